"""What belongs to no part: every tensor and setting is held by parts or compared beside them."""

import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import transformer_cases as cases
from commands import command, told
from refusals import refused
from transformer_cases import attention_model, module, written

import tnsim
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.run import RESTS, _digest, rests_of, write_rests
from tnsim.all_pairs.sources import content_hash
from tnsim.all_pairs.store import LISTS, Leases

KINDS = ("qk", "ov", "mlp", "direct")
LAYOUTS = ("gpt2", "gpt_neox", "llama", "llama 3", "mistral", "qwen2", "gemma", "opt")


def contents(checkpoint, kinds, norm):
    """Digests of all parts by kind, and of the rest by name."""
    parts = tnsim.parts([checkpoint], kinds, norm=norm)
    digests = {kind: [] for kind in kinds}
    for name, series in zip(parts.names, parts.values(), strict=True):
        digests[name.kind].append(content_hash(series[0]))
    return digests, parts.rests(_digest)[0]


def changed(before, after):
    """The names of entries that differ."""
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize(
    ("kinds", "norm"),
    [(KINDS, "fold"), (KINDS, "leave"), (("qk",), "fold"), (("ov", "mlp"), "leave")],
)
def test_every_tensor_is_held_by_parts_or_belongs_to_the_rest(case, kinds, norm, rng):
    config = cases.CONFIGS[case]
    state = {
        name: array + 0.05
        for name, array in cases.checkpoint(rng, config).items()
        if not name.endswith(("attn.bias", "inv_freq"))
    }
    tied = "lm_head.weight" if "direct" not in kinds and case in ("gpt2", "llama 3", "opt") else ""

    def make(tensors):
        return module(tensors, config)

    parts, rest = contents(make(state), kinds, norm)
    for name, array in state.items():
        # Rows in another order: other scores, values and logits.
        change = {**state, name: array + 0.1 * rng.normal(size=array.shape)}
        new_parts, new_rest = contents(make(change), kinds, norm)
        in_parts, in_rest = changed(parts, new_parts), changed(rest, new_rest)
        assert in_parts or in_rest, name
        is_table = name.endswith(("wte.weight", "embed_tokens.weight"))
        assert in_rest <= {name, *([tied or "lm_head.weight"] if is_table else [])}, name
        # Held are tensors of which all kinds that read them are asked for.
        every, _ = contents(make(change), KINDS, norm)
        readers = (
            changed(contents(make(state), KINDS, norm)[0], every) if kinds != KINDS else in_parts
        )
        assert (name in rest) == (not readers or not readers <= set(kinds)), name
    assert all(name in new_rest for name in ("rotation", "mask", "norms", "activation"))


@pytest.mark.parametrize("kinds", [KINDS, ("qk",), ("mlp", "ov")])
def test_every_array_of_a_model_is_held_by_parts_or_belongs_to_the_rest(kinds, rng):
    model = attention_model(rng, 10.0)
    found = []

    def changed_model(i, name):
        layers = list(model.layers)
        layer = copy.copy(layers[i])
        core = layer.layer if isinstance(layer, tnsim.Residual) else layer
        values = {field: getattr(core, field) for field in vars(core)}
        new = type(core)(**{**values, name: values[name] + rng.normal(size=values[name].shape)})
        residual = isinstance(layer, tnsim.Residual)
        layers[i] = tnsim.Residual(new, layer.skip, layer.scale) if residual else new
        return tnsim.Model(layers, n_ctx=model.n_ctx)

    parts, rest = contents(model, kinds, "fold")
    for i, layer in enumerate(model.layers):
        core = layer.layer if isinstance(layer, tnsim.Residual) else layer
        for name, value in vars(core).items():
            if np.ndim(value):
                new_parts, new_rest = contents(changed_model(i, name), kinds, "fold")
                in_rest = changed(rest, new_rest)
                assert changed(parts, new_parts) or in_rest, (i, name)
                assert in_rest <= {f"layer {i}: {name}"}
                found.append(name)
    assert {"q1", "o", "left", "weight"} <= set(found)
    other = tnsim.Model(model.layers, n_ctx=5)
    assert changed(rest, contents(other, kinds, "fold")[1]) == {"number of positions"}


WINDOW = {"use_sliding_window": True, "sliding_window": 4}


@pytest.mark.parametrize(
    ("case", "setting", "named"),
    [
        ("gpt2", {"layer_norm_epsilon": 0.1}, "norms"),
        ("gpt2", {"scale_attn_weights": False}, "scales of scores"),
        ("gpt_neox", {"use_parallel_residual": False}, "parallel blocks"),
        ("gpt_neox", {"rotary_pct": 0.67}, "rotation"),
        ("mistral", {"sliding_window": 4}, "mask"),
        ("qwen2", {**WINDOW, "max_window_layers": 1}, "mask"),
        # Layers from 28 on have windows, of which there are none.
        ("qwen2", WINDOW, None),
        ("gemma", {"use_bidirectional_attention": True}, "mask"),
        ("llama", {"hidden_act": "relu"}, "activation"),
        ("llama", {"dtype": "bfloat16", "attention_dropout": 0.1, "use_cache": False}, None),
    ],
)
def test_settings_belong_to_the_rest(case, setting, named, rng):
    config = cases.CONFIGS[case]
    state = cases.checkpoint(rng, config)
    before, after = (
        contents(module(state, entries), ("ov",), "fold")[1]
        for entries in (config, {**config, **setting})
    )
    assert changed(before, after) == ({named} if named else set())


def test_precision_and_prefixes_do_not_make_another_rest(rng):
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config, np.float16)
    first = contents(module(state, config), ("qk",), "fold")[1]
    wide = {f"module.{name}": array.astype(np.float64) for name, array in state.items()}
    assert contents(module(wide, config), ("qk",), "fold")[1] == first
    tied = {**state, "lm_head.weight": state["transformer.wte.weight"]}
    assert contents(module(tied, config), ("qk",), "fold")[1] == first


@pytest.fixture
def run(tmp_path, rng):
    """Four checkpoints: one, with positions in another order, with another block, and a copy."""
    config = {**cases.CONFIGS["gpt2"], "activation_function": "relu", "n_head": 1}
    state = cases.checkpoint(rng, config, np.float32)
    flipped = {**state, "transformer.wpe.weight": state["transformer.wpe.weight"][::-1].copy()}
    name = "transformer.h.1.mlp.c_fc.weight"
    tuned = {**state, name: state[name] + np.float32(0.1) * state[name][::-1]}
    for n, tensors in enumerate((state, flipped, tuned, state)):
        written(tmp_path / "run" / f"step{n}", tensors, config)
    return tmp_path / "run"


KINDS_OF_RUN = ["ov", "mlp"]


def test_equal_parts_are_no_equal_models(run, tmp_path):
    """Positions in another order leave every part as it is: the result says so, stored and read again."""
    series, store = tnsim.load(run), tmp_path / "store"
    result = tnsim.pairwise(tnsim.parts(series[:2], KINDS_OF_RUN), store=store)
    assert np.abs(result.similarity.values - 1).max() < 1e-12
    assert result.attrs["duplicates"] == 0
    table = "transformer.wte.weight"  # equal, as the direct path is not asked for
    assert result.attrs["rest"] == ["transformer.wpe.weight"] and table not in result.attrs["rest"]
    assert result.rest_differs.values.tolist() == [[0, 1], [1, 0]]
    said = "differs in 1: transformer.wpe.weight"
    assert said in repr(result) and said in result._repr_html_()
    assert isinstance(result, tnsim.Pairwise) and tnsim.open_pairwise(store).identical(result)
    (store / "rests.json").unlink()
    with pytest.warns(
        tnsim.errors.StoreWarning, match="not finished: what belongs to no part missing"
    ):
        unknown = tnsim.open_pairwise(store)
    assert "rest_differs" not in unknown and "rest" not in unknown.attrs
    tnsim.pairwise(tnsim.parts(series[:2], KINDS_OF_RUN), store=store)
    assert tnsim.open_pairwise(store).identical(result)
    for damage in ('{"a": {"0": {"parts": 1, "rest": {}}}, "b": {}}', "{", "[]"):
        (store / "rests.json").write_text(damage)
        with refused(r"rests\.json is damaged", tnsim.errors.DamagedStore):
            tnsim.open_pairwise(store)


def test_duplicates_and_costs_are_those_of_whole_models(run):
    """Adapters on one block, merged: most parts are equal, and the models are not."""
    series = tnsim.load(run)
    parts = tnsim.parts(series[1:3], KINDS_OF_RUN)
    result, planned = tnsim.pairwise(parts), tnsim.plan_pairwise(parts)
    assert result.attrs["duplicates"] == 0
    differing = result.part[result.similarity[:, 0, 1] < 1 - 1e-9]
    assert differing.values.tolist() == ["layer 1 mlp"]
    # A pair of equal parts, and three of the block that differs.
    assert planned.tiles.pairs == len(parts) - 1 + 3
    with pytest.warns(tnsim.errors.DuplicateWarning, match="models with identical weights: 3 = 0$"):
        every = tnsim.pairwise(tnsim.parts(series, KINDS_OF_RUN))
    assert every.attrs["duplicates"] == 1
    assert every.rest_differs.values[:, 1].tolist() == [1, 0, 1, 1]
    one, others = (tnsim.parts(chosen, KINDS_OF_RUN) for chosen in (series[:1], series[1:]))
    between = tnsim.pairwise(one, other=others)
    assert between.rest_differs.values.tolist() == [[1, 0, 0]] and between.attrs["duplicates"] == 0


def test_a_run_that_grows_compares_the_rests_of_all(run, tmp_path):
    series, store = tnsim.load(run), tmp_path / "store"
    tnsim.pairwise(tnsim.parts(series[:1], ["ov"]), store=store)
    result = tnsim.pairwise(tnsim.parts(series[:3], ["ov"]), store=store)
    assert result.rest_differs.values.tolist() == [[0, 1, 1], [1, 0, 2], [1, 2, 0]]
    names = ["transformer.h.1.mlp.c_fc.weight", "transformer.wpe.weight"]
    assert sorted(result.attrs["rest"]) == names
    assert tnsim.open_pairwise(store).identical(result)


def test_rests_of_processes_that_share_a_store_are_added_up(run, tmp_path):
    parts, store = tnsim.parts(tnsim.load(run)[:1], ["ov"]), tmp_path / "store"
    result = tnsim.pairwise(parts, store=store)
    (store / RESTS).unlink()
    keep = partial(write_rests, store, result, rests_of(parts, None))
    with Leases(store) as theirs, ThreadPoolExecutor() as here:
        theirs.wait(LISTS)
        writing = here.submit(keep)
        time.sleep(0.2)
        assert not writing.done()
        stores.write_list(store / RESTS, {"a": {"later": {}}, "b": {}})
        theirs.release(LISTS)
        writing.result(timeout=30)
    _, kept = stores.read_list(store / RESTS)
    assert set(kept["a"]) == {"later", *map(str, result.a.values)}


def test_a_finished_store_of_parts_may_be_read_only(run, tmp_path, monkeypatch):
    """Nothing is written where all is there, not even a lease."""
    parts, store = tnsim.parts(tnsim.load(run)[:2], ["ov"]), tmp_path / "store"
    result = tnsim.pairwise(parts, store=store)
    monkeypatch.setattr(os, "mkdir", lambda *path: pytest.fail(f"writes {path}"))
    assert tnsim.pairwise(parts, store=store).identical(result)


def test_the_command_says_what_belongs_to_no_part(run, tmp_path):
    files = [run / "step0", run / "step1"]
    options = ("--parts", "ov,mlp", "--out", tmp_path / "out", "--report", tmp_path / "page.html")
    done = command("pairwise", *files, *options)
    said = "what belongs to no part differs in 1: transformer.wpe.weight"
    assert f"rest        {said}" in done.stdout
    assert "models      2 x 2, 0 with the weights of another" in done.stdout
    assert (tmp_path / "page.html").read_text().count(said) == 1  # as a caveat
    found = told("pairwise", *files, *options)
    assert found["rest"] == ["transformer.wpe.weight"] and found["duplicates"] == 0
    cost = told("pairwise", *files, *options[:2], "--dry-run")
    assert cost["ov"]["together"]["tiles"]["pairs"] == 2
    assert cost["mlp"]["together"]["tiles"]["pairs"] == 2
    files = [run / "step0", run / "step3"]
    same = command("pairwise", *files, *options[:2], "--out", tmp_path / "same")
    assert "rest        what belongs to no part does not differ" in same.stdout
    assert "models with identical weights: 3 = 0" in same.stderr
