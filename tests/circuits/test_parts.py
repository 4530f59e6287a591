"""Parts of standard transformers against forward passes of each layout, written from its definition."""

import tracemalloc

import jax
import numpy as np
import pytest
import transformer_cases as cases
from activated_cases import panels
from closeness import LARGEST, assert_close
from refusals import refused
from transformer_cases import attention_model, module, written

import tnsim
from tnsim.circuits.standard_parts import View

TOKENS = np.array([3, 0, 6, 3, 1, 5])


def score_of(part, read):
    """Scores of all pairs of positions, from a part with one output per distance, or with one."""
    count = len(read)
    scores = np.full((count, count), np.nan)
    for s in range(count):
        for t in range(s + 1):
            outputs = part(np.concatenate([read[s], read[t]]))
            scores[s, t] = outputs[s - t] if len(outputs) > 1 else outputs[0]
    return scores


@pytest.mark.crossing
@pytest.mark.parametrize("case", cases.CONFIGS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_parts_rebuild_the_forward_pass(case, dtype, rng):
    """Scores, patterns, what heads and MLPs add: from the parts, and from the layout's definition."""
    config = cases.CONFIGS[case]
    state = cases.checkpoint(rng, config, dtype)
    layers = cases.forward(state, config, TOKENS)
    parts = tnsim.parts(module(state, config), distances=range(len(TOKENS)))
    precision = (
        {"rtol": 1e-12}
        if dtype == np.float64
        else {"rtol": 3e-5, "limited_by": "float32 of the forward pass"}
    )
    seen = np.tri(len(TOKENS), dtype=bool)
    for i, layer in enumerate(layers):
        for h, expected in enumerate(layer.scores):
            scores = score_of(parts[f"layer {i} head {h} qk"], layer.read)
            assert_close(scores[seen], expected[seen], scale=LARGEST, **precision)
            added = layer.pattern[h] @ parts[f"layer {i} head {h} ov"](layer.read)
            assert_close(added, layer.heads[h], scale=LARGEST, **precision)
        assert_close(parts[f"layer {i} mlp"](layer.mlp_read), layer.mlp, scale=LARGEST, **precision)
    count = len(layers) * (2 * len(layers[0].scores) + 1)
    assert len(parts) == count + ("direct" in parts)


@pytest.mark.parametrize("case", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_mlps_are_compared_exactly_from_their_weights(case, rng):
    """Streams on a plane, so that two normal coordinates integrate the block itself."""
    config = cases.CONFIGS[case]
    states = [cases.checkpoint(rng, config) for _ in range(2)]
    plane, mean = rng.normal(size=(2, cases.WIDTH)), rng.normal(size=cases.WIDTH)
    nodes, weights = panels([])
    x = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2) @ plane + mean
    weights = np.outer(weights, weights).ravel()
    read = x - x.mean(-1, keepdims=True) if case == "gpt2" else x  # what a layer norm takes away
    outputs = [cases.mlp(state, config, 1, read) for state in states]
    wanted, *norms = (
        float(weights @ (outputs[i] * outputs[j]).sum(-1)) for i, j in ((0, 1), (0, 0), (1, 1))
    )
    parts = [tnsim.parts(module(state, config))["layer 1 mlp"] for state in states]
    found = tnsim.similarity(*parts, tnsim.Gaussian(mean, plane.T @ plane))
    assert found.exact
    assert_close(found, wanted / np.sqrt(norms[0] * norms[1]), scale=1.0, rtol=1e-10)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_parts_may_read_the_output_of_the_norm(case, rng):
    config = cases.CONFIGS[case]
    state = cases.checkpoint(rng, config)
    layer = cases.forward(state, config, TOKENS)[1]
    name = {"gpt2": "transformer.h.1.ln_1", "llama": "model.layers.1.input_layernorm"}[case]
    read = layer.read * state[f"{name}.weight"] + state.get(f"{name}.bias", 0.0)
    parts = tnsim.parts(module(state, config), "ov", norm="leave")
    added = layer.pattern[1] @ parts["layer 1 head 1 ov"](read)
    assert_close(added, layer.heads[1], scale=LARGEST, rtol=1e-12)


def test_the_direct_path_is_the_logits_of_a_tokens_own_embedding(rng):
    config = cases.CONFIGS["gpt_neox"]
    state = cases.checkpoint(rng, config)
    direct = tnsim.parts(module(state, config), "direct")["direct"]
    embedding = state["gpt_neox.embed_in.weight"]
    centred = embedding - embedding.mean(1, keepdims=True)
    norm = "gpt_neox.final_layer_norm"
    stream = centred * state[f"{norm}.weight"] + state[f"{norm}.bias"]
    logits = stream @ state["embed_out.weight"].T
    assert_close(direct(np.eye(cases.VOCABULARY)), logits, scale=LARGEST, rtol=1e-12)
    assert "final norm" in direct.origin.caveats[0]


def assert_trees_equal(one, two):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.array_equal(x, y)


def direct_path(rng, count, width, bias):
    """A model as the direct part is."""
    embedding, logits = rng.normal(size=(width, count)), rng.normal(size=(count, width))
    last = tnsim.Linear(logits, rng.normal(size=count) if bias else None)
    return tnsim.Model([tnsim.Linear(embedding), last])


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("moments", ["none", "both", "mean", "variances"])
def test_no_metric_takes_a_matrix_over_pairs_of_tokens(moments, bias, rng):
    """Of the direct path. All pairs are 488 MiB; means, variances and `Symmetric` took them once or twice."""
    count = 8000
    a, b = (direct_path(rng, count, 8, bias) for _ in "ab")
    small = [direct_path(rng, 30, 8, bias) for _ in "ab"]
    mean, variances, given = np.zeros(count), np.ones(count), {}
    if moments in ("mean", "both"):
        given["mean"] = mean = rng.normal(size=count)
    if moments in ("variances", "both"):
        given["cov"] = variances = rng.uniform(0.5, 2.0, count)
    metrics = [tnsim.Gaussian(**given), tnsim.GaussianClosure(**given)]
    metrics += [] if given else [tnsim.Symmetric()]

    def product(a, b):
        """<U E, U' E'> and the constants, from products of factors alone."""
        (one, two), (three, four) = a.layers, b.layers
        linear = np.sum((two.weight.T @ four.weight) * ((one.weight * variances) @ three.weight.T))
        return linear + (a(mean) * b(mean)).sum()

    wanted = product(a, b) / np.sqrt(product(a, a) * product(b, b))
    for metric in metrics:
        tnsim.pairwise(small, type(metric)())
        tracemalloc.start()
        try:
            assert tnsim.plan_pairwise([a, b], metric).route == "contractions"
            assert_close(tnsim.similarity(a, b, metric), wanted, scale=1.0, rtol=1e-13)
            result = tnsim.pairwise([a, b], metric)
            assert_close(result.similarity[0, 1], wanted, scale=1.0, rtol=1e-12)
            assert tnsim.slices(a, b, metric).shape == (count,)
            assert tracemalloc.get_traced_memory()[1] < 250 * 2**20
        finally:
            tracemalloc.stop()


def test_tied_unembeddings_and_models_without_a_head(rng):
    tied = cases.CONFIGS["gemma"]
    state = cases.checkpoint(rng, tied)
    direct = tnsim.parts(module(state, tied), "direct")["direct"]
    table, gain = state["model.embed_tokens.weight"], state["model.norm.weight"]
    expected = (table * np.sqrt(cases.WIDTH) * (1 + gain)) @ table.T
    assert_close(direct(np.eye(cases.VOCABULARY)), expected, scale=LARGEST, rtol=1e-12)
    config = cases.CONFIGS["mistral"]
    state = cases.checkpoint(rng, config)
    del state["lm_head.weight"]
    bare = {name.removeprefix("model."): value for name, value in state.items()}
    assert "direct" not in tnsim.parts(module(bare, config))
    with refused("no part of kind direct"):
        tnsim.parts(module(bare, config), "direct")


@pytest.mark.parametrize("config", [cases.CONFIGS["gpt2"], cases.CONFIGS["llama 3"]])
def test_tied_tables_are_stored_under_either_name(config, rng, tmp_path):
    state = cases.checkpoint(rng, config)
    (name,) = (name for name in state if name.endswith(("wte.weight", "embed_tokens.weight")))
    other = {key: value for key, value in state.items() if key != name}
    other["lm_head.weight"] = state[name]
    both = {**state, "lm_head.weight": state[name]}
    files = [
        cases.written(tmp_path / key, tensors, config)
        for key, tensors in {"table": state, "logits": other, "both": both}.items()
    ]
    tokens = np.eye(cases.VOCABULARY)
    expected = tnsim.parts(files[0], "direct")["direct"](tokens)
    for file in files[1:]:
        found = tnsim.parts(file, "direct")["direct"](tokens)
        assert_close(found, expected, scale=LARGEST, rtol=1e-15)
    # Files that differ in this alone are one network, also in what belongs to no part.
    rests = [dict(tnsim.parts(file, "qk").anatomy.rest([], View())) for file in files]
    for rest in rests[1:]:
        assert rest.keys() == rests[0].keys()
        assert all(np.array_equal(rest[key], value) for key, value in rests[0].items())
    untied = cases.written(tmp_path / "untied", other, {**config, "tie_word_embeddings": False})
    with refused(r"missing, and config.json does not tie it"):
        assert tnsim.parts(untied, "direct")["direct"]


def test_adding_one_number_to_all_rows_behind_a_layer_norm_changes_no_part(rng):
    """The gauge of a layer norm: its output has mean zero."""
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config)
    moved = dict(state)
    gain = state["transformer.h.0.ln_1.weight"]
    shift = rng.normal(size=3 * cases.WIDTH) / gain[:, None]
    moved["transformer.h.0.attn.c_attn.weight"] = (
        state["transformer.h.0.attn.c_attn.weight"] + shift
    )
    bias = state["transformer.h.0.ln_1.bias"] @ shift
    moved["transformer.h.0.attn.c_attn.bias"] = state["transformer.h.0.attn.c_attn.bias"] - bias
    first, second = (tnsim.parts(module(one, config), "qk") for one in (state, moved))
    part, other = (one["layer 0 head 2 qk"] for one in (first, second))
    assert_close(tnsim.similarity(part, other), 1.0, rtol=1e-12)


@pytest.mark.parametrize("case", ["gpt2", "llama 3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_files_and_folders_are_read_as_modules_are(case, shards, tmp_path, rng):
    config = cases.CONFIGS[case]
    state = cases.checkpoint(rng, config)
    folder = written(tmp_path / "model", state, config, shards)
    expected = tnsim.parts(module(state, config))
    found = tnsim.parts(folder)
    assert list(found) == list(expected)
    for label in ("layer 1 head 1 qk", "layer 0 head 0 ov", "layer 1 mlp", "direct"):
        for one, other in zip(found[label].layers, expected[label].layers, strict=True):
            assert repr(one).startswith(type(other).__name__)
        x = rng.normal(size=found[label].d_in)
        assert np.array_equal(found[label](x), expected[label](x))


def test_wrappers_put_words_before_all_names(rng):
    config = cases.CONFIGS["gpt_neox"]
    state = cases.checkpoint(rng, config)
    wrapped = {f"module._orig_mod.{name}": value for name, value in state.items()}
    parts = [tnsim.parts(module(one, config)) for one in (state, wrapped)]
    x = rng.normal(size=cases.VOCABULARY)
    assert np.array_equal(parts[0]["direct"](x), parts[1]["direct"](x))


def test_half_precision_is_folded_in_double(rng):
    config = cases.CONFIGS["qwen2"]
    state = cases.checkpoint(rng, config, np.float16)
    wide = {name: value.astype(np.float64) for name, value in state.items()}
    x = rng.normal(size=cases.WIDTH)
    found, expected = (
        tnsim.parts(module(one, config))["layer 0 head 0 ov"](x) for one in (state, wide)
    )
    assert found.dtype == np.float64 and np.array_equal(found, expected)


# Models of tnsim


@pytest.mark.parametrize("rope_base", [None, 10.0])
def test_parts_of_bilinear_attention_rebuild_the_forward_pass(rope_base, rng):
    model = attention_model(rng, rope_base)
    parts = tnsim.parts(model, distances=range(3))
    tokens = rng.normal(size=(3, 6))
    stream = model.layers[0](tokens)
    attended = np.zeros_like(stream)
    for h in range(2):
        score, value = parts[f"layer 1 head {h} qk"], parts[f"layer 1 head {h} ov"]
        scores = np.nan_to_num(score_of(score, stream))
        attended += scores @ value(stream)
    assert_close(0.5 * stream + attended, model.layers[1](stream), scale=LARGEST, rtol=1e-12)
    after = 0.5 * stream + attended
    added = parts["layer 2 mlp"](after)
    assert_close(2.0 * after + added, model.layers[2](after), scale=LARGEST, rtol=1e-12)
    first, last = model.layers[0], model.layers[3]
    assert_close(parts["direct"](tokens), last(1.0 * first(tokens)), scale=LARGEST, rtol=1e-12)


def test_a_direct_path_has_every_skip_in_its_place(rng):
    """Behind a bias a skip is another map than before it."""
    first, second, last = (
        tnsim.Linear(*draw)
        for draw in zip(rng.normal(size=(3, 2, 2)), rng.normal(size=(3, 2)), strict=True)
    )
    nothing = tnsim.Residual(tnsim.Bilinear(*np.zeros((3, 2, 2))), 0.5)
    model = tnsim.Model([nothing, first, nothing, second, nothing, last])
    x = rng.normal(size=(4, 2))
    assert_close(tnsim.parts(model)["direct"](x), model(x), scale=LARGEST, rtol=1e-12)


def test_there_is_no_direct_path_past_a_layer_without_a_skip(rng):
    square = tnsim.Bilinear(*rng.normal(size=(3, 2, 2)))
    model = tnsim.Model([square, tnsim.Residual(square, 0.0)])
    assert list(tnsim.parts(model)) == ["layer 0 mlp", "layer 1 mlp"]


def test_the_two_scores_of_a_head_may_change_places(rng):
    model = attention_model(rng, 10.0)
    layer = model.layers[1].layer
    swapped = tnsim.Attention(
        layer.q2, layer.k2, 3.0 * layer.q1, layer.k1 / 3.0, layer.v, layer.o, 2,
        k1_bias=layer.k2_bias, q2_bias=3.0 * layer.q1_bias, v_bias=layer.v_bias, rope_base=10.0,
    )  # fmt: skip
    other = tnsim.Model([model.layers[0], tnsim.Residual(swapped, 0.5, 0.7), *model.layers[2:]])
    pair = [tnsim.parts(one, "qk")["layer 1 head 0 qk"] for one in (model, other)]
    assert_close(tnsim.similarity(*pair), 1.0, rtol=1e-12)


# Refusals


def changed(case, **settings):
    return {**cases.CONFIGS[case], **settings}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("llama", model_type="qwen3"), "of type qwen3 normalises queries and keys"),
        (changed("llama", model_type="gemma2"), r"of type gemma2 caps its scores .* \(softcaps\)"),
        (changed("llama", model_type="bloom"), "of type bloom adds a constant for each distance"),
        (
            changed("llama", model_type="mamba"),
            "no layout is known of transformers of type 'mamba'",
        ),
        (changed("llama", attn_logit_softcapping=30.0), "attn_logit_softcapping = 30.0 .*softcap"),
        (changed("llama", qk_layernorm=True), "qk_layernorm of config.json normalises queries"),
        (changed("llama", quantization_config={"bits": 4}), "weights are packed"),
        (changed("opt", do_layer_norm_before=False), "puts norms behind the blocks"),
        (changed("opt", word_embed_proj_dim=3), "maps between embedding and stream"),
        (changed("gpt2", add_cross_attention=True), "heads that read another sequence"),
        (changed("llama", rope_scaling={"rope_type": "yarn"}), "RoPE of type 'yarn'"),
        (changed("llama", rope_parameters={"full": {}}), "differ from layer to layer"),
        (changed("llama", num_attention_heads=5, head_dim=2), "5 heads cannot share 2 heads"),
        (changed("gpt2", n_head=5), "5 heads do not divide a stream of width 12"),
        (changed("gpt2", n_layer=0), "the number of layers must be a positive integer"),
        (changed("gpt2", n_layer="two"), "the number of layers must be a finite number"),
        (
            changed("gpt2", n_layer=1),
            "'transformer.h.1.attn.bias' has no place|has no place in the",
        ),
        (changed("gpt2", n_embd=8), r"must have shape \(.*\) by config.json, found"),
        (
            changed("llama", hidden_act="quick_gelu"),
            "the MLP has the activation 'quick_gelu'; known",
        ),
        (changed("gpt2", activation_function=None), "names the activation of the MLP, found None"),
        (changed("llama", rms_norm_eps="x"), "norms add a number to the mean square"),
    ],
)
def test_what_is_no_part_is_refused_by_name(config, message, rng):
    case = (
        next(c for c in cases.CONFIGS.values() if c["model_type"] == config["model_type"])
        if (config["model_type"] in ("gpt2", "opt"))
        else cases.CONFIGS["llama"]
    )
    state = cases.checkpoint(rng, case)
    with refused(message, tnsim.TnsimError) as error:
        parts = tnsim.parts(module(state, config))
        [parts[label] for label in parts]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.q_norm.weight", "normalises queries and keys"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "merge adapters into the weights"),
        ("model.layers.9.self_attn.q_proj.weight", "no place in the layout llama of 2 layers"),
    ],
)
def test_tensors_without_a_place_are_refused(name, message, rng):
    config = cases.CONFIGS["llama"]
    state = {**cases.checkpoint(rng, config), name: np.ones(2)}
    with refused(message, tnsim.TnsimError):
        tnsim.parts(module(state, config))


def test_damaged_weights_are_refused(rng):
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config)
    state["transformer.h.0.ln_1.weight"][2] = np.nan
    with refused(r"'transformer.h.0.ln_1.weight' has entries that"):
        tnsim.parts(module(state, config))["layer 0 head 0 qk"]
    del state["transformer.h.1.attn.c_attn.weight"]
    with refused(r"'transformer.h.1.attn.c_attn.weight' is missing"):
        tnsim.parts(module(state, config))["layer 1 head 0 ov"]
    del state["transformer.h.0.attn.c_proj.weight"]
    with refused(r"whose name ends in 'h.0.attn.c_proj.weight'", tnsim.CheckpointError):
        tnsim.parts(module(state, config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": "heads"}, "kinds of parts are qk, ov, mlp, direct, found 'heads'"),
        ({"kinds": []}, "kinds of parts are"),
        ({"distances": []}, "distances lists by how many positions"),
        ({"distances": [1, 1]}, "distances lists"),
        ({"distances": [-1]}, "distances lists"),
        ({"distances": 0.5}, "distances lists"),
        ({"norm": "drop"}, "norm must be 'fold' or 'leave', found 'drop'"),
    ],
)
def test_arguments_that_mean_nothing(options, message, rng):
    model = attention_model(rng, None)
    with refused(message):
        tnsim.parts(model, **options)


def test_unknown_parts_and_things_without_parts(tmp_path, rng):
    model = attention_model(rng, None)
    with pytest.raises(KeyError, match="no part 'layer 1 head 9 qk' among 6 parts: layer 1 head 0"):
        tnsim.parts(model)["layer 1 head 9 qk"]
    with refused(r"an nn.Module, or several .*, found object"):
        tnsim.parts(object())
    with refused("at least one model, found none"):
        tnsim.parts([])
    with refused("the model has no part of kind qk"):
        tnsim.parts(tnsim.Model([tnsim.Linear(np.eye(2))]), "qk")
    perceptron = tnsim.Model([tnsim.Linear(np.eye(2)), tnsim.Elementwise("relu")])
    with refused(r"no part of kind qk or ov or mlp .*as a whole"):
        tnsim.parts(perceptron)  # its activation has no weights
    with refused(r"nowhere.safetensors", tnsim.CheckpointError):
        tnsim.parts(tmp_path / "nowhere.safetensors")
    config = changed("llama", model_type="mamba")
    folder = written(tmp_path / "model", cases.checkpoint(rng, cases.CONFIGS["llama"]), config)
    with refused(f"^{folder}: no layout .*of type 'mamba'", tnsim.UnsupportedLayer):
        tnsim.parts(folder)


@pytest.mark.parametrize("form", ["mapping", "series", "checkpoints"])
def test_checkpoints_go_by_position_and_label_and_others_are_refused(form, tmp_path, rng):
    models = {f"step{n}": attention_model(rng, None) for n in (0, 50)}
    for name, model in models.items():
        tnsim.save(model, tmp_path / f"{name}.safetensors")
    run = tnsim.load(tmp_path)
    parts = tnsim.parts(
        {"0": models["step0"], "50": models["step50"]} if form == "mapping" else run
    )
    several = run if form == "checkpoints" else parts["layer 1 head 0 ov"]
    assert_trees_equal(several["50"], several[-1])
    assert_trees_equal(several[np.int64(0)], several["0"])
    assert len(list(several)) == 2
    for key in ("nope", "", 2, -3, 1.0, True, None, [0], np.array([0, 1]), ("0",)):
        with refused("position below 2 or a label, '0', '50'"):
            several[key]
        for mapping in (parts, tnsim.parts(models["step0"])):
            with refused(r"no part .* among 6 parts: layer 1 head 0"):
                mapping[key]
            assert key not in mapping and mapping.get(key) is None


def test_labels_that_read_alike_are_refused(rng):
    model = attention_model(rng, None)
    with refused("2 models have 1 different"):
        tnsim.parts({1: model, "1": model})


def test_a_series_leads_from_parts_to_checkpoints(tmp_path, rng):
    config = cases.CONFIGS["gpt_neox"]
    states = [cases.checkpoint(rng, config) for _ in range(3)]
    for n, state in enumerate(states):
        written(tmp_path / "run" / f"step{1000 * n}", state, config)
    parts = tnsim.parts(tnsim.load(tmp_path / "run"), ["ov", "qk"])
    assert list(tnsim.parts(str(tmp_path / "run"), ["ov", "qk"])) == list(parts)
    assert repr(parts).startswith("SeriesParts(3 checkpoints, 8 parts: layer 0 head 0 qk, ")
    part = parts["layer 1 head 1 ov"]
    assert part.labels == ("0", "1000", "2000") and len(part[1:]) == 2
    x = rng.normal(size=cases.WIDTH)
    for state, model in zip(states, part, strict=True):
        expected = tnsim.parts(module(state, config))["layer 1 head 1 ov"](x)
        assert np.array_equal(model(x), expected)
    with pytest.raises(KeyError, match="among 8 parts"):
        parts["direct"]
    assert "8 parts" in parts._repr_html_() and "qk" in tnsim.parts(part_file(parts))._repr_html_()


def test_several_models_are_taken_apart_as_a_series_is(tmp_path, rng):
    """Modules, models and files in a list or by label, with the numbers of their parts alone."""
    config = cases.CONFIGS["gpt_neox"]
    states = [cases.checkpoint(rng, config) for _ in range(2)]
    written(tmp_path / "first", states[0], config)
    named = {"first": tmp_path / "first", "second": module(states[1], config)}
    parts = tnsim.parts(named, ["ov", "qk"])
    assert repr(parts).startswith("SeriesParts(2 checkpoints, 8 parts: layer 0 head 0 qk, ")
    single = [tnsim.parts(module(state, config))["layer 1 head 1 ov"] for state in states]
    ov = parts["layer 1 head 1 ov"]
    assert (ov.labels, repr(ov)) == (
        ("first", "second"),
        "PartSeries(layer 1 head 1 ov of 2 checkpoints)",
    )
    x = rng.normal(size=cases.WIDTH)
    for model, alone in zip(ov, single, strict=True):
        assert np.array_equal(model(x), alone(x))
    result = tnsim.pairwise(parts)
    assert list(result.a.values) == ["first", "second"]
    value = result.similarity.sel(part="layer 1 head 1 ov", a="first", b="second").item()
    assert_close(value, tnsim.similarity(*single), scale=1)
    # A list of files is a series, a list of anything else is counted.
    assert tnsim.parts([str(tmp_path / "first")], "ov")["layer 1 head 1 ov"].labels == ("first",)
    counted = tnsim.pairwise(tnsim.parts([module(state, config) for state in states], "ov"))
    assert counted.b.values.tolist() == [0, 1]
    other = tnsim.pairwise(tnsim.parts(named, "ov"), other=tnsim.parts(named, "ov"))
    assert_close(other.similarity.values, counted.similarity.values, scale=1)
    smaller = {"whole": attention_model(rng, None), "none": tnsim.Model([tnsim.Linear(np.eye(6))])}
    with pytest.raises(KeyError, match="none: there is no part 'layer 1 head 0 ov' among 0 parts"):
        tnsim.parts(smaller, "ov")["layer 1 head 0 ov"]
    with refused(r"b: parts are those of a file.*, found float"):
        tnsim.parts({"a": named["second"], "b": 1.0})


@pytest.mark.slow
def test_modules_of_bilinear_attention_are_read_as_models(rng):
    torch = pytest.importorskip("torch")
    from module_cases import Module

    def forward(m, x):
        first, second = (q(x) @ k(x).mT for q, k in ((m.q1, m.k1), (m.q2, m.k2)))
        return x + m.o(torch.tril(first * second) @ m.v(x))

    def scores():
        names = "q1", "k1", "q2", "k2", "v", "o"
        return Module(forward, **{name: torch.nn.Linear(4, 4, bias=False) for name in names})

    nets = [scores().double() for _ in range(2)]
    parts = tnsim.parts(nets, ["ov"])
    (label,) = parts
    for net, part in zip(nets, parts[label], strict=True):
        expected = (net.o.weight @ net.v.weight).detach().numpy()
        assert_close(part(np.eye(4)), expected.T, scale=LARGEST)


def part_file(parts):
    return parts.series.paths[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in cases.CONFIGS if case != "gpt_neox of v5"])
def test_parts_rebuild_the_patterns_of_hugging_face(case, rng):
    """Attention patterns of `transformers` itself, in float32, with random norms and biases."""
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    config = {**cases.CONFIGS[case], "vocab_size": cases.VOCABULARY, "bos_token_id": None}
    config |= {
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": False,
        "sliding_window": None,
    }
    known = transformers.AutoConfig.for_model(**config)
    known._attn_implementation = "eager"
    net = transformers.AutoModelForCausalLM.from_config(known).eval()
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.from_numpy(0.1 * rng.normal(size=tuple(weight.shape))))
        seen = net(
            torch.from_numpy(TOKENS)[None], output_attentions=True, output_hidden_states=True
        )
    parts = tnsim.parts(net, ["qk"], distances=range(len(TOKENS)))
    transformer = parts.anatomy.transformer
    for i in range(cases.LAYERS):
        stream = seen.hidden_states[i][0].double().numpy()
        read = transformer.attention_norm(i).normalised(stream)
        for h in range(transformer.heads):
            scores = score_of(parts[f"layer {i} head {h} qk"], read)
            weights = np.exp(scores - np.nanmax(scores, 1, keepdims=True))
            pattern = np.nan_to_num(weights / np.nansum(weights, 1, keepdims=True))
            expected = seen.attentions[i][0, h].double().numpy()
            assert_close(pattern, expected, scale=1.0, rtol=1e-6, limited_by="float32")


def test_mlps_go_by_the_paths_of_their_modules(tmp_path, rng):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        config = cases.CONFIGS["gpt2"]
        written(folder, cases.checkpoint(rng, config), config)
    parts = tnsim.parts(folders[0])
    for path in ("transformer.h.1.mlp", "h.1.mlp", "module.transformer.h.1.mlp"):
        assert parts.place(path) == ("mlp", 1, None), path
    x = rng.normal(size=12)
    assert_close(parts["h.1.mlp"](x), parts["layer 1 mlp"](x), rtol=0)
    assert parts.matching("h.*.mlp") == ["layer 0 mlp", "layer 1 mlp"]
    assert parts.matching("layer 0 *") == [label for label in parts if label.startswith("layer 0")]
    for unknown in ("h.2.mlp", "h.*.mlp", "1.mlp.c_fc", "mlp"):
        assert unknown not in parts, unknown
    series = tnsim.parts(tnsim.Series(folders))
    assert len(series["h.0.mlp"]) == 2
    opt = cases.CONFIGS["opt"]
    assert tnsim.parts(module(cases.checkpoint(rng, opt), opt), "mlp").matching("*") == [
        "layer 0 mlp",
        "layer 1 mlp",
    ]
