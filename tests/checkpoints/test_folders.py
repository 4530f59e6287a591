"""Folders of one model, and templates of dialects: read by every command alike, from files that libraries write."""

import json
import os

import numpy as np
import pytest
from commands import command, piped
from oracles import linear
from safetensors.numpy import save_file

import tnsim
from tnsim.checkpoints.suggestions import suggest

KEYS = ("q1", "k1", "q2", "k2", "v", "o")
CONFIG = {"num_attention_heads": 2, "attn_scale": 0.35, "model_type": "mine"}


def state_of(rng):
    names = ["embed", "unembed", *(f"layers.0.{key}" for key in KEYS)]
    return {f"{name}.weight": rng.normal(size=(4, 4)).astype(np.float32) for name in names}


def folder(path, rng, parts=1):
    """A model as Hugging Face's libraries write it, in one file or in several with an index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    state = state_of(rng)
    if parts == 1:
        save_file(state, path / "model.safetensors", {"format": "pt"})
        return path
    places = {}
    for n in range(parts):
        file = f"model-{n + 1:05}-of-{parts:05}.safetensors"
        part = dict(list(state.items())[n::parts])
        save_file(part, path / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 512}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_folder_of_one_model_is_read_by_every_command(tmp_path, rng):
    for step, parts in ((5, 1), (40, 3)):
        folder(tmp_path / "run" / f"checkpoint-{step}", rng, parts)
        (tmp_path / "run" / f"checkpoint-{step}" / "optimizer.pt").touch()
    one, two = (tmp_path / "run" / f"checkpoint-{step}" for step in (5, 40))
    said = command("inspect", two, "--n-ctx", 2).stdout
    assert "2 heads, causal mask" in said and "s = 0.35" in said and "config:" not in said
    given = ("--n-ctx", 2, "--dialect", "bilinear-attention")
    options = ("--metric", "tree", *given, "--json")
    value = json.loads(command("similarity", one, two, *options).stdout)["similarity"]
    models = [tnsim.load(file, "bilinear-attention", n_ctx=2) for file in (one, two)]
    assert value == tnsim.similarity(*models, tnsim.TreeSymmetric())
    planned = command("pairwise", tmp_path / "run", "--dry-run", *options).stdout
    assert json.loads(planned)["pairs"] == 3
    assert tnsim.load(tmp_path / "run").labels == ("5", "40")


def test_a_folder_where_a_file_is_meant(tmp_path, rng):
    for step in (1, 2):
        np.savez(tmp_path / f"step_{step}.npz", w=np.ones((2, 2)))
    done = command("similarity", tmp_path, tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is a folder of 2 checkpoints where one file is meant; name one of them" in done.stderr
    (tmp_path / "empty").mkdir()
    with pytest.raises(tnsim.CheckpointError, match="no checkpoint matches"):
        tnsim.load(tmp_path / "empty")


def test_parts_that_are_missing_or_elsewhere(tmp_path, rng):
    path = folder(tmp_path / "model", rng, 2)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for places, message in [
        ({**good["weight_map"], "more": "model-00001-of-00002.safetensors"}, "its parts lack more"),
        ({**good["weight_map"], "more": "../other.safetensors"}, "its parts must lie beside it"),
        ({**good["weight_map"], "more": "none.safetensors"}, "part none.safetensors: no such file"),
        ({**good["weight_map"], "more": index.name}, "its parts must lie beside it as .safetensor"),
        (None, "not a readable index"),
    ]:
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(tnsim.CheckpointError, match=message):
            tnsim.load(path)


def test_a_suggestion_reads_what_it_was_made_for(tmp_path, rng):
    path = folder(tmp_path / "model", rng)
    template = command("dialect", "suggest", path).stdout
    assert '"# n_heads"' in template and "residual of layer rule 1" in template
    (tmp_path / "mine.json").write_text(template)
    model = tnsim.load(path, tmp_path / "mine.json", n_ctx=2)
    assert [layer.d_out for layer in model.layers] == [4, 4, 4]
    told = [guess.partition(":")[0] for guess in model.origin.guesses]
    open_fields = ("transpose", 0), *((name, 1) for name in ("rope_base", "mask", "score_power", "residual")), ("residual", 2)  # fmt: skip
    assert told == ["layers", "matrices", *(f"{name} of layer rule {n}" for name, n in open_fields)]


SHAPES = {
    "classifier": (
        {"emb.weight": (4, 6), "b.left.weight": (5, 4), "b.right.weight": (5, 4), "b.down.weight": (4, 5), "b.down.bias": (4,), "head.weight": (3, 4), "head.bias": (3,)},
        "degree 2",
    ),
    "tokens": ({"wte.weight": (9, 4), "out.weight": (9, 4)}, "Linear(9 -> 4), Linear(4 -> 9)"),
    "fused": ({"in.weight": (3, 5), "blocks.0.weight": (6, 3), "blocks.1.weight": (6, 3)}, "degree 4"),
    "names in alphabetical order": (
        {"blocks.0.l": (6, 4), "blocks.0.p": (4, 6), "blocks.0.r": (6, 4), "embed.weight": (4, 5), "head.weight": (3, 4)},
        "Model(Linear(5 -> 4), Residual(Bilinear(4 -> 4, rank 6), skip=1, scale=1), Linear(4 -> 3)",
    ),
    "blocks of two layers": (
        {f"h.{i}.{name}": shape for i in range(2) for name, shape in {"mlp.l": (6, 4), "mlp.r": (6, 4), "mlp.d": (4, 6), "proj.weight": (4, 4)}.items()},
        "rank 6), skip=1, scale=1), Linear(4 -> 4), Residual(Bilinear",
    ),
    "matrices alone": ({"W_l": (5, 4), "W_r": (5, 4), "W_p": (2, 5)}, "rank 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_suggestions(name):
    shapes, said = SHAPES[name]
    state = {key: np.ones(shape) for key, shape in shapes.items()}
    dialect = tnsim.Dialect.from_json(suggest({"model": state, "step": 3}, "mine"))
    assert dialect.nested == ("model?",)
    assert said in repr(tnsim.from_state_dict(state, dialect))
    assert said in repr(tnsim.from_state_dict({"model": state}, dialect))


def test_suggestions_of_fused_attention_and_of_what_may_be_no_polynomial(rng):
    shapes = {"wte": (9, 4), "wpe": (7, 4), "h.0.attn.qkv.weight": (12, 4), "h.0.attn.qkv.bias": (12,), "h.0.attn.out.weight": (4, 4), "h.0.mlp.l.weight": (8, 4), "h.0.mlp.r.weight": (8, 4), "h.0.mlp.d.weight": (4, 8), "head.weight": (9, 4)}  # fmt: skip
    state = {f"module.{key}": rng.normal(size=shape) for key, shape in shapes.items()}
    text = json.loads(suggest(state, "mine"))
    embed, attention, _, _ = text["layers"]
    assert embed["weight"] == "wte" and attention["fused_bias"] == "h.0.attn.qkv.bias"
    guesses = {one["about"]: one["guess"] for one in text["guesses"]}
    assert "SwiGLU" in guesses["product of layer rule 2"] and "ReLU" in guesses["layers"]
    assert "softmax" in guesses["score_power of layer rule 1"]
    assert text["# not accounted for"] == ["wpe"]
    attention["n_heads"] = 2
    state.pop("module.wpe")
    dialect = tnsim.Dialect.from_json(json.dumps(text))
    model = tnsim.from_state_dict(state, dialect, n_ctx=3).layers[1].layer
    parts = np.split(state["module.h.0.attn.qkv.weight"], 3)
    np.testing.assert_array_equal([model.q1, model.k1, model.v], parts)
    np.testing.assert_array_equal([model.q2, model.k2], parts[:2])


ACTIVATED = {
    "LLaMA": ({"gate_proj.weight": (8, 4), "up_proj.weight": (8, 4), "down_proj.weight": (4, 8)}, "gate_proj"),
    "LLaMA, first release": ({"w1.weight": (8, 4), "w2.weight": (4, 8), "w3.weight": (8, 4)}, "w1.weight is a gate"),
    "Phi": ({"mlp.gate_up_proj.weight": (16, 4), "mlp.down_proj.weight": (4, 8)}, "gate_up_proj"),
    "T5": ({"wi_0.weight": (8, 4), "wi_1.weight": (8, 4), "wo.weight": (4, 8)}, "wi_0"),
    "a scope": ({"h.0.swiglu.l": (8, 4), "h.0.swiglu.r": (8, 4), "h.0.swiglu.d": (4, 8)}, "swiglu"),
    "a chain with gaps": ({"0.weight": (4, 5), "2.weight": (3, 4)}, "0.weight and 2.weight are plain linear layers in a row"),
    "a run": ({"layers.0.weight": (4, 4), "layers.1.weight": (4, 4)}, r"layers.\{i\}.weight are plain"),
    "embed and head": ({"embed.weight": (8, 4), "head.weight": (3, 8)}, "embed.weight and head.weight"),
    "an MLP after attention": ({f"h.{i}.{key}": (4, 4) for i in range(2) for key in (*KEYS, "fc1", "fc2")}, "h.0.fc1 and h.0.fc2"),
    "blocks that meet": ({f"h.{i}.{key}": shape for i in range(2) for key, shape in {"a": (4, 4), "l": (6, 4), "r": (6, 4), "p": (4, 6)}.items()} | {"last": (4, 4), "head": (3, 4)}, "last and head"),
    "left and right in a row": ({"l.weight": (8, 4), "r.weight": (3, 8)}, "l.weight and r.weight are plain"),
    "a GLU": ({"0.weight": (16, 4), "2.weight": (4, 8)}, "0.weight and 2.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATED)
def test_what_has_activations_in_nearly_all_networks_is_not_suggested(name):
    shapes, said = ACTIVATED[name]
    state = {key: np.ones(shape) for key, shape in shapes.items()}
    with pytest.raises(tnsim.UnsupportedLayer, match=rf"{said}.* tnsim\.Empirical\(inputs\)"):
        suggest(state, "mine")


def test_suggestions_name_norms_and_what_is_left(rng):
    shapes = {"embed.weight": (9, 4), "blocks.0.norm.weight": (4,), "blocks.0.l.weight": (6, 4), "blocks.0.r.weight": (6, 4), "blocks.0.d.weight": (4, 6), "final_norm.weight": (4,), "final_norm.bias": (4,), "head.weight": (9, 4), "gain": (7,)}  # fmt: skip
    state = {key: rng.normal(size=shape) for key, shape in shapes.items()}
    text = json.loads(suggest({**state, "steps": np.array(3)}, "mine"))
    _, block, head = text["layers"]
    assert block["norm"] == "rms" and head["norm"] == "layer"
    assert head["norm_bias"] == "final_norm.bias"
    assert text["ignore"] == ["steps"] and text["# not accounted for"] == ["gain"]
    dialect = tnsim.Dialect.from_json(json.dumps(text))
    tokens = rng.integers(9, size=(8, 3))
    model = tnsim.from_state_dict(
        {**state, "steps": 3}, dialect, n_ctx=3, leave_out=["gain"], norm_inputs=tokens
    )
    assert len(model.origin.caveats) == 2


def test_no_matrix_makes_no_suggestion():
    with pytest.raises(tnsim.CheckpointError, match="no matrix is there"):
        suggest({"step": np.array(3)}, "mine")


def test_files_of_one_name_are_ordered_by_their_folders(tmp_path):
    for step in (10, 9, 100):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "model.npz").touch()
    series = tnsim.load(str(tmp_path / "step_*" / "model.npz"))
    assert [path.parent.name for path in series.paths] == ["step_9", "step_10", "step_100"]


def test_folders_that_one_may_not_look_into_are_passed_by(tmp_path, monkeypatch, rng):
    """Such as `lost+found` at the top of a disk."""
    tnsim.save(tnsim.Model([linear(rng, 2, 2)]), tmp_path / "a.safetensors")
    (tmp_path / "lost+found").mkdir()
    stat = os.stat

    def refusing(path, **options):
        if "lost+found/" in str(path):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refusing)
    assert len(tnsim.load(tmp_path)) == 1


def guessed_file(tmp_path, rng):
    """Two files of one layout, whose names say nothing of an activation, and what is suggested for them."""
    shapes = {"emb.weight": (4, 6), "b.left.weight": (5, 4), "b.right.weight": (5, 4), "b.down.weight": (4, 5), "last.weight": (3, 4)}  # fmt: skip
    files = [tmp_path / f"{name}.npz" for name in "ab"]
    for file in files:
        np.savez(file, **{key: rng.normal(size=shape) for key, shape in shapes.items()})
    (tmp_path / "mine.json").write_text(command("dialect", "suggest", files[0]).stdout)
    return files, tmp_path / "mine.json"


def test_results_of_guesses_say_so_and_are_not_exact(tmp_path, rng):
    files, dialect = guessed_file(tmp_path, rng)
    with pytest.warns(tnsim.CaveatWarning, match="or not known to be: not confirmed: layers: "):
        a, b = (tnsim.load(file, dialect) for file in files)
        results = [
            tnsim.similarity(a, b),
            tnsim.slices(a, b),
            tnsim.inner(a, b - a),
            tnsim.similarity(a, b, tnsim.Empirical(np.ones((2, 6)))),
            tnsim.paths(a, b),
        ]
        run = tnsim.pairwise(tnsim.load(files, dialect), store=tmp_path / "run")
    about = [guess.partition(":")[0] for guess in a.origin.guesses]
    assert about == ["layers", "product of layer rule 1", "residual of layer rule 1"]
    expected = tuple(f"not confirmed: {guess}" for guess in a.origin.guesses)
    for result in results:
        assert result.exact is False and result.caveats == expected
    opened = tnsim.open_pairwise(tmp_path / "run")
    for one in (run, opened):
        assert one.tnsim.exact is False and tuple(one.attrs["caveats"]) == expected
    tnsim.save(a, tmp_path / "own.safetensors")
    again = tnsim.load(tmp_path / "own.safetensors")
    assert again.origin.guesses == a.origin.guesses and again.origin.caveats == ()
    with pytest.warns(tnsim.CaveatWarning):
        assert tnsim.similarity(again, again).exact is False
    said = command("similarity", *[tmp_path / "own.safetensors"] * 2)
    assert "guessed in part" in said.stdout and "not confirmed: layers" in said.stderr


def test_the_command_line_wants_every_guess_confirmed(tmp_path, rng, monkeypatch):
    files, dialect = guessed_file(tmp_path, rng)
    given = ("--dialect", dialect)
    orders = [
        ("similarity", *files, *given),
        ("plan", *files, *given),
        ("pairwise", *files, *given, "--out", tmp_path / "out"),
        ("pairwise", *files, *given, "--dry-run"),
        ("convert", files[0], tmp_path / "c.safetensors", *given),
    ]
    for order in orders:
        done = command(*order, check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "mine.json: guesses that are not confirmed: layers, product of" in done.stderr
        assert '"confirmed": true' in done.stderr and " ... " not in done.stderr
        assert "tnsim.confirm(model, forward)" in done.stderr
        assert done.stderr.endswith("or give the module, --dialect FILE.py:NAME\n")
    assert not (tmp_path / "out").exists() and not (tmp_path / "c.safetensors").exists()
    monkeypatch.setattr("sys.stdin", piped(dialect.read_text()))
    done = command("similarity", *files, "--dialect", "-", check=False)
    assert "-: guesses that are not confirmed" in done.stderr
    assert "guessed     product of layer rule 1" in command("inspect", files[0], *given).stdout
    text = json.loads(dialect.read_text())
    for n, guess in enumerate(text["guesses"]):
        assert guess["confirmed"] is False
        assert command(*orders[0], check=False).returncode == 2, n
        guess["confirmed"] = True
        dialect.write_text(json.dumps(text))
    said = json.loads(command(*orders[0], "--json").stdout)
    assert said["exact"] is True and said["caveats"] == []


def test_a_forward_pass_confirms_guesses_or_refutes_them(tmp_path, rng):
    (file, _), dialect = guessed_file(tmp_path, rng)
    state = {key: array.astype(np.float32) for key, array in np.load(file).items()}

    def network(activation, skip):
        def forward(x):
            h = x @ state["emb.weight"].T
            gated = activation(h @ state["b.left.weight"].T) * (h @ state["b.right.weight"].T)
            return (skip * h + gated @ state["b.down.weight"].T) @ state["last.weight"].T

        return forward

    model = tnsim.load(file, dialect)
    known = tnsim.confirm(model, network(lambda x: x, 1))
    assert known.origin.guesses == () and "largest relative error" in known.origin.assumptions[-1]
    dialect.write_text(known.origin.dialect.to_json())
    assert tnsim.load(file, dialect).origin.guesses == ()
    assert tnsim.similarity(known, known).exact is True
    for activation, skip in [(lambda x: np.maximum(x, 0), 1), (lambda x: x, 0), (lambda x: x * (1 + np.tanh(x / 2)) / 2, 1)]:  # fmt: skip
        with pytest.raises(tnsim.ModelError, match=r"a guess of its dialect is wrong: .*Empirical"):
            tnsim.confirm(model, network(activation, skip))


class Gated:
    """A network whose tensors have the names of a preset, and whose activation leaves no tensor."""

    def __init__(self, rng, activation):
        shapes = {"embed": (4, 6), "body.left": (5, 4), "body.right": (5, 4), "body.down": (4, 5), "head": (3, 4)}  # fmt: skip
        self.state = {f"{key}.weight": rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}  # fmt: skip
        self.activation = activation

    def __call__(self, x):
        embed, left, right, down, head = (matrix.T for matrix in self.state.values())
        return (self.activation(x @ embed @ left) * (x @ embed @ right)) @ down @ head


def silu(x):
    return x / (1 + np.exp(-x))


def test_a_preset_found_by_names_is_a_guess_in_every_result(tmp_path, rng):
    nets = [Gated(rng, silu) for _ in range(2)]
    files = [tmp_path / f"step_{n}.npz" for n in range(2)]
    for net, file in zip(nets, files, strict=True):
        np.savez(file, **net.state)
    run = tmp_path / "run"
    orders = [
        ("similarity", *files),
        ("paths", *files),
        ("paths", files[0]),
        ("pairwise", *files, "--out", run, "--report", tmp_path / "page.html"),
    ]
    for order in orders:
        done = command(*order, "--json")
        said = json.loads(done.stdout)
        assert said["exact"] is False and len(said["caveats"]) == 1, order
        assert "dialect bilinear-classifier: chosen by names of tensors" in said["caveats"][0]
        assert '(--dialect bilinear-classifier, dialect="bilinear-classifier")' in done.stderr
    named = command(*orders[0], "--dialect", "bilinear-classifier", "--json")
    assert json.loads(named.stdout)["exact"] is True and named.stderr == ""
    page = (tmp_path / "page.html").read_text()
    assert '["exact","no"]' in page and "chosen by names of tensors" in page
    assert "guessed in part" in command(*orders[0]).stdout
    assert "guessed     dialect bilinear-classifier" in command("inspect", files[0]).stdout
    command("convert", files[0], tmp_path / "own.safetensors")
    for source in (files[0], tmp_path / "own.safetensors", nets[0].state):
        model = tnsim.from_state_dict(source) if isinstance(source, dict) else tnsim.load(source)
        assert len(model.origin.guesses) == 1
        with pytest.warns(tnsim.CaveatWarning, match="chosen by names of tensors"):
            assert tnsim.inner(model, model).exact is False
        assert tnsim.plan(model, model).exact is False
        with pytest.raises(tnsim.ModelError, match="a guess of its dialect is wrong"):
            tnsim.confirm(model, nets[0])


def test_a_preset_found_by_names_is_confirmed_by_a_forward_pass(rng):
    net = Gated(rng, lambda x: x)
    known = tnsim.confirm(tnsim.from_state_dict(net.state), net)
    assert tnsim.similarity(known, known).exact is True
    named = tnsim.from_state_dict(net.state, known.origin.dialect)
    assert named.origin.guesses == () and tnsim.similarity(named, known).exact is True


def test_guesses_that_are_none(tmp_path):
    rule = {"kind": "linear", "weight": "w"}
    for guesses in ({"about": "x"}, [3], [{"about": "x"}], [{"about": "x", "guess": "y", "confirmed": "yes"}], [{"about": 1, "guess": "y"}], [{"about": "x", "guess": "y", "more": 1}], "text", 7, None):  # fmt: skip
        text = json.dumps({"format": 1, "name": "mine", "layers": [rule], "guesses": guesses})
        with pytest.raises(tnsim.CheckpointError, match="guess"):
            tnsim.Dialect.from_json(text)


@pytest.mark.parametrize(
    "commit",
    ["../../elsewhere", "../snapshots/../../elsewhere", "/{root}/elsewhere", ".", "..", ""],
)
def test_a_reference_leads_nowhere_but_to_a_snapshot(commit, tmp_path, rng):
    """A ref of the cache, or a revision that was asked for, with a path in the place of a commit."""
    folder(tmp_path / "elsewhere", rng)
    cache = tmp_path / "models--me--net"
    folder(cache / "snapshots" / "0123456789", rng)
    (cache / "refs").mkdir()
    commit = commit.format(root=tmp_path)
    (cache / "refs" / "main").write_text(commit)
    for revision in ("main", commit or "main", f"{commit}*", "*", "?123456789", "a\0b"):
        with pytest.raises(tnsim.CheckpointError):
            tnsim.load(f"{cache}@{revision}", n_ctx=2)
    (cache / "refs" / "main").write_text("0123456789\n")
    assert tnsim.load(f"{cache}@main", n_ctx=2).d_in == 4
    assert tnsim.load(f"{cache}@0123", n_ctx=2).d_in == 4
