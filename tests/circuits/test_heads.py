"""Heads against heads: products of d_head x d_head against models and against all tokens, gauges, matchings."""

import itertools

import jax
import numpy as np
import pytest
import transformer_cases as cases
from closeness import assert_close
from refusals import refused
from transformer_cases import attention_model, module

import tnsim


def two_of(case, rng):
    """Two transformers, or models of bilinear attention with a base of rotations."""
    if case in BILINEAR:
        models = [attention_model(rng, BILINEAR[case]) for _ in range(2)]
        embeddings = [tnsim.Linear(x.layers[0].weight, rng.normal(size=4)) for x in models]
        return [
            tnsim.Model([e, *x.layers[1:]], x.n_ctx)
            for e, x in zip(embeddings, models, strict=True)
        ]
    config = cases.CONFIGS[case]
    return [module(cases.checkpoint(rng, config), config) for _ in range(2)]


BILINEAR = {"bilinear": None, "bilinear with rotations": 10.0}


@pytest.mark.parametrize("kind", ["qk", "ov"])
def test_no_similarity_of_heads_is_above_one(kind, rng):
    """Rounding took some to 1 + 4e-16, of which an arc cosine is no number."""
    config = cases.CONFIGS["gpt2"]
    for _ in range(5):
        net = module(cases.checkpoint(rng, config), config)
        similarity = tnsim.heads(net, net, kind).similarity.values
        assert abs(similarity).max() <= 1
        assert_close(similarity.diagonal(), 1.0)


@pytest.mark.parametrize("through", [None, "embedding"])
def test_heads_whose_rows_cancel_have_no_digits(through, rng):
    """Their squared norm was what rounding had left of large terms, and their similarity noise."""
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config)
    width, size = config["n_embd"], config["n_embd"] // config["n_head"]
    values = state["transformer.h.0.attn.c_attn.weight"][:, 2 * width :]  # of head 0 and others
    written = state["transformer.h.0.attn.c_proj.weight"]
    state["transformer.h.0.attn.c_attn.bias"][2 * width :] = 0
    values[:, 2:size], written[1] = 0, written[0]
    first = values[:, 0].copy()
    values[:, 1] = -first * (1 + 1e-4)
    near = tnsim.heads(*[module(state, config)] * 2, "ov", through=through).similarity.values
    assert_close(near[0, 0], 1.0)
    values[:, 1] = -first * (1 + 1e-9)
    with refused("layer 0 head 0 has no digits left: its terms cancel", tnsim.TnsimError):
        tnsim.heads(*[module(state, config)] * 2, "ov", through=through)
    with refused("composition score of layer 0 head 0 has no digits left", tnsim.TnsimError):
        tnsim.composition(module(state, config))


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("case", ["gpt2", "llama", "gpt_neox", "gemma", *BILINEAR])
@pytest.mark.parametrize("kind", ["qk", "ov"])
def test_heads_are_compared_as_their_models_are(case, kind, rng):
    """The d_head x d_head products against `inner` and `similarity` of the models of the parts."""
    a, b = (tnsim.parts(net, kind, distances=[1, 2]) for net in two_of(case, rng))
    found = tnsim.heads(a, b, kind, distances=[1, 2])
    pairs = itertools.product(found.a.values, found.b.values)
    for first, second in itertools.islice(pairs, 0, 64, 9 if found.similarity.size > 9 else 1):
        parts = a[f"{first} {kind}"], b[f"{second} {kind}"]
        here = found.sel(a=first, b=second)
        bound = np.sqrt(np.prod([float(tnsim.inner(part, part)) for part in parts]))
        assert_close(here.inner.item(), tnsim.inner(*parts), scale=bound)
        assert_close(here.similarity.item(), tnsim.similarity(*parts), scale=1.0)


@pytest.mark.parametrize("case", ["gpt2", "llama", "gemma", *BILINEAR])
def test_scores_through_the_embeddings_are_those_of_all_pairs_of_tokens(case, rng):
    nets = two_of(case, rng)
    found = tnsim.heads(*nets, "qk", through="embedding", distances=[1, 2])
    values = []
    for net in nets:
        side = tnsim.parts(net, "qk", distances=[1, 2])
        if case in BILINEAR:
            tokens = net.layers[0](np.eye(6))
        else:
            tokens = normalised(cases.CONFIGS[case], side.anatomy.transformer.embedding())
        both = np.stack([np.concatenate(pair) for pair in itertools.product(tokens, tokens)])
        values.append(np.stack([side[label](both).ravel() for label in side]) / len(tokens))
    inner = values[0] @ values[1].T
    assert_close(found.inner.values, inner, scale=np.abs(inner).max())
    sizes = [np.linalg.norm(one, axis=1) for one in values]
    assert_close(found.similarity.values, inner / np.outer(*sizes), scale=1.0)


def normalised(config, x):
    if config["model_type"] == "gpt2":
        x = x - x.mean(1, keepdims=True)
    eps = config.get("layer_norm_epsilon", config.get("rms_norm_eps"))
    return x / np.sqrt(np.square(x).mean(1, keepdims=True) + eps)


def test_values_through_the_embeddings_are_the_logits_of_all_tokens(rng):
    config = cases.CONFIGS["gpt2"]
    states = [cases.checkpoint(rng, config) for _ in range(2)]
    sides = [tnsim.parts(module(state, config), "ov") for state in states]
    values = []
    for state, side in zip(states, sides, strict=True):
        table = state["transformer.wte.weight"]
        gained = table * state["transformer.ln_f.weight"]
        logits = gained - gained.mean(1, keepdims=True)
        x = normalised(config, table)
        values.append(np.stack([(side[label](x) @ logits.T).ravel() for label in side]))
    inner = values[0] @ values[1].T / cases.VOCABULARY
    found = tnsim.heads(*sides, "ov", through="embedding")
    assert_close(found.inner.values, inner, scale=np.abs(inner).max())


# Gauges: what changes no function changes no similarity


def scrambled(rng, state, config, order, rotated=True):
    """The same GPT-2 with heads in another order, other bases inside heads, and another basis of the stream.

    A layer norm commutes with rotations that keep the vector of ones. Gains are folded into the maps first.
    """
    d, heads = cases.WIDTH, cases.HEADS
    ones = np.ones((d, 1)) / np.sqrt(d)
    complement = np.linalg.svd(np.eye(d) - ones @ ones.T)[0][:, : d - 1]
    turn = np.linalg.qr(rng.normal(size=(d - 1, d - 1)))[0]
    basis = ones @ ones.T + complement @ turn @ complement.T if rotated else np.eye(d)
    new = dict(state)
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        new[name] = state[name] @ basis
    for i in range(cases.LAYERS):
        h = f"transformer.h.{i}"
        gain, shift = (state[f"{h}.ln_1.{part}"] for part in ("weight", "bias"))
        fused = (state[f"{h}.attn.c_attn.weight"] * gain[:, None]).reshape(d, 3, heads, -1)
        bias = (state[f"{h}.attn.c_attn.bias"] + shift @ state[f"{h}.attn.c_attn.weight"]).reshape(
            3, heads, -1
        )
        out = state[f"{h}.attn.c_proj.weight"].reshape(heads, -1, d)
        z = rng.normal(size=(2, heads, d // heads, d // heads))
        inverse = np.linalg.inv(z)
        mixed = [
            np.einsum("dhi,hij->dhj", fused[:, 0], z[0]),
            np.einsum("dhi,hji->dhj", fused[:, 1], inverse[0]),
            np.einsum("dhi,hij->dhj", fused[:, 2], z[1]),
        ]
        biases = [
            np.einsum("hi,hij->hj", bias[0], z[0]),
            np.einsum("hi,hji->hj", bias[1], inverse[0]),
            np.einsum("hi,hij->hj", bias[2], z[1]),
        ]
        mixed = np.stack(mixed, 1)[:, :, order].reshape(d, 3 * d)
        new[f"{h}.attn.c_attn.weight"] = basis.T @ mixed
        new[f"{h}.attn.c_attn.bias"] = np.stack(biases)[:, order].reshape(-1)
        new[f"{h}.ln_1.weight"], new[f"{h}.ln_1.bias"] = np.ones(d), np.zeros(d)
        out = np.einsum("hij,hjd->hid", inverse[1], out)[order]
        new[f"{h}.attn.c_proj.weight"] = out.reshape(d, d) @ basis
    final = state["transformer.ln_f.weight"]
    new["lm_head.weight"] = (state["transformer.wte.weight"] * final) @ basis
    new["transformer.ln_f.weight"], new["transformer.ln_f.bias"] = np.ones(d), np.zeros(d)
    return new


@pytest.mark.parametrize("kind", ["qk", "ov"])
@pytest.mark.parametrize("through", [None, "embedding"])
def test_heads_are_found_again_whatever_the_gauge(kind, through, rng):
    """A permutation of heads comes back with similarity 1; through the embeddings from a rotated stream too."""
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config)
    order = rng.permutation(cases.HEADS)
    other = scrambled(rng, state, config, order, rotated=through is not None)
    found = tnsim.heads(module(state, config), module(other, config), kind, through=through)
    for i, (new, old) in itertools.product(range(cases.LAYERS), enumerate(order)):
        assert found.became.sel(a=f"layer {i} head {old}").item() == f"layer {i} head {new}"
    assert_close(found.matched.values, np.ones(cases.LAYERS * cases.HEADS))
    assert "any invertible change of basis" in found.attrs["symmetry"]


def test_rotations_leave_less_symmetry_and_the_result_says_so(rng):
    """Turns that commute with RoPE change nothing, a general change of basis does."""
    config = {**cases.CONFIGS["mistral"], "num_key_value_heads": cases.HEADS}
    state = cases.checkpoint(rng, config)
    query, key = (f"model.layers.0.self_attn.{one}_proj.weight" for one in "qk")
    d_head = config["head_dim"]
    angles, sizes = rng.normal(size=3), np.exp(rng.normal(size=3))
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    turn = np.block([[cos, -sin], [sin, cos]])
    size = np.diag(np.tile(sizes, 2))
    for left, right, same in (
        (turn @ size, turn @ np.linalg.inv(size), True),
        (size[::-1], np.linalg.inv(size[::-1]).T, False),
    ):
        moved = dict(state)
        for name, change in ((query, left), (key, right)):
            rows = state[name].reshape(-1, d_head, cases.WIDTH)
            moved[name] = (change @ rows).reshape(-1, cases.WIDTH)
        found = tnsim.heads(module(state, config), module(moved, config), distances=[0, 1, 3])
        values = np.diagonal(found.similarity.values)[: cases.HEADS]
        if same:
            assert_close(values, np.ones(cases.HEADS))
        else:
            assert (values < 0.999).all()
        assert "commutes with the rotations" in found.attrs["symmetry"]


def test_models_of_other_widths_and_other_numbers_of_heads(rng):
    config = cases.CONFIGS["gpt2"]
    small = cases.checkpoint(rng, config)
    run = tnsim.load(tnsim.__path__[0] + "/data/induction")
    with refused(r'streams have widths 12 and 32: .*"embedding"'):
        tnsim.heads(module(small, config), run[0], "ov")
    with refused("vocabularies have 7 and 16 tokens"):
        tnsim.heads(module(small, config), run[0], "ov", through="embedding")
    wide = cases.CONFIGS["llama"]
    other = cases.checkpoint(rng, wide)
    found = tnsim.heads(module(small, config), module(other, wide), "ov", through="embedding")
    assert found.similarity.shape == (8, 12) and np.isfinite(found.matched).all()
    turned = tnsim.heads(module(other, wide), module(small, config), "ov", through="embedding")
    assert_close(turned.similarity.values.T, found.similarity.values, scale=1.0)
    assert (turned.became.values == "").sum() == 4 and np.isnan(turned.matched).sum() == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mlp"}, "kind of heads is qk or ov, found 'mlp'"),
        ({"through": "tokens"}, "through is None or 'embedding', found 'tokens'"),
        ({"distances": []}, "distances lists"),
    ],
)
def test_arguments_that_mean_nothing(options, message, rng):
    model = attention_model(rng, None)
    with refused(message):
        tnsim.heads(model, model, **options)


def layers_of(rng, widths, bases):
    """A model with a layer of one head of bilinear attention for each width."""
    layers = [tnsim.Linear(rng.normal(size=(4, 6)))]
    for width, base in zip(widths, bases, strict=True):
        maps = [rng.normal(size=(width, 4)) for _ in range(5)]
        attention = tnsim.Attention(*maps, rng.normal(size=(4, width)), 1, rope_base=base)
        layers.append(tnsim.Residual(attention))
    return tnsim.Model([*layers, tnsim.Linear(rng.normal(size=(6, 4)))])


def test_a_refusal_names_the_file(rng, tmp_path):
    config = cases.CONFIGS["llama 3"]
    state = cases.checkpoint(rng, config)
    other = {**config, "num_key_value_heads": 3}
    folders = [
        cases.written(tmp_path / f"n{n}", state, each) for n, each in enumerate((config, other))
    ]
    with refused(r"n1: 2 heads cannot share 3 heads"):
        tnsim.heads(*folders)
    with refused(r"n1: 2 heads cannot share 3 heads"):
        tnsim.composition(folders[1])


def test_heads_of_layers_that_differ(rng):
    a, b = (layers_of(rng, (2, 4), (None, None)) for _ in "ab")
    found = tnsim.heads(a, b, "ov")
    ends = tnsim.parts(a)["layer 1 head 0 ov"], tnsim.parts(b)["layer 2 head 0 ov"]
    assert_close(found.inner.values[0, 1], tnsim.inner(*ends), scale=1.0)
    scores = tnsim.heads(a, b, through="embedding")
    assert scores.similarity.shape == (2, 2) and np.isfinite(scores.similarity).all()
    large = jax.tree.map(lambda leaf: 1e100 * leaf, a)
    with np.errstate(over="ignore", invalid="ignore"), refused("beyond float64"):
        tnsim.heads(large, b, "ov")
    turned = layers_of(rng, (2, 2), (None, 10.0))
    with refused("by one rotation of keys, and layers", tnsim.UnsupportedLayer):
        tnsim.heads(turned, turned, through="embedding")


def test_heads_without_an_inner_product(rng):
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config)
    model = attention_model(rng, None)
    with refused("bilinear forms", tnsim.TnsimError):
        tnsim.heads(module(state, config), model)
    with refused("either kind is compared with its own"):
        tnsim.heads(module(state, config), model, through="embedding")
    with refused("does not begin and end with a linear layer", tnsim.UnsupportedLayer):
        bare = tnsim.Model(model.layers[1:], 3)
        tnsim.heads(bare, bare, "ov", through="embedding")
    # Scores need no unembedding.
    headless = tnsim.Model(model.layers[:-1], 3)
    scores = tnsim.heads(headless, model, through="embedding").similarity.values
    assert_close(np.diagonal(scores), np.ones(len(scores)))
    with refused("the model has no head"):
        tnsim.heads(*[tnsim.Model([tnsim.Linear(np.eye(2))])] * 2, "ov")
    turned = cases.CONFIGS["llama"]
    rotated = module(cases.checkpoint(rng, turned), turned)
    with refused(r"depend on distance .* found 2"):
        tnsim.heads(module(state, config), rotated, distances=[1, 2])
    state["transformer.h.1.attn.c_proj.weight"][:] = 0
    with refused("layer 1 head 0 is the zero function"):
        tnsim.heads(module(state, config), module(state, config), "ov")


# Composition, chance, and what softmax does not see


def maps_of(side, kind):
    """Matrices of heads from their models alone: bilinear forms of qk, linear maps of ov."""
    found = {}
    for label in side:
        model = side[label]
        if kind == "ov":
            values, out = model.layers
            found[label] = np.asarray(out.weight) @ np.asarray(values.weight)
        else:
            (form,) = model.layers
            d = form.left.shape[1] // 2
            whole = np.asarray(form.left).T @ np.diag(np.asarray(form.down)[0]) @ form.right
            found[label] = whole[:d, d:]
    return found


@pytest.mark.parametrize("case", ["gpt2", "llama", "gpt_neox"])
def test_composition_is_the_norm_of_products(case, rng):
    config = cases.CONFIGS[case]
    net = module(cases.checkpoint(rng, config), config)
    sides = {kind: tnsim.parts(net, kind, distances=[0]) for kind in ("qk", "ov")}
    maps = {kind: maps_of(side, kind) for kind, side in sides.items()}
    found = tnsim.composition(net)
    for reader, writer in itertools.product(found.reader.values, found.writer.values):
        here = found.sel(reader=reader, writer=writer).values
        if not reader.startswith("layer 1") or not writer.startswith("layer 0"):
            assert np.isnan(here).all()
            continue
        written = maps["ov"][f"{writer} ov"]
        qk, ov = maps["qk"][f"{reader} qk"], maps["ov"][f"{reader} ov"]
        for score, matrix in zip(here, (qk.T, qk, ov), strict=True):
            size = np.linalg.norm(matrix) * np.linalg.norm(written)
            assert_close(score, np.linalg.norm(matrix @ written) / size)


@pytest.mark.parametrize("size", [1e-200, 1e100, 1e200])
def test_composition_has_no_scale(size, rng):
    """Norms beyond the range of floats left scores that were no numbers."""
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config)
    found = tnsim.composition(module(state, config))
    state["transformer.h.0.attn.c_proj.weight"] *= size
    scaled = tnsim.composition(module(state, config))
    earlier = ~np.isnan(found.values)
    assert_close(scaled.values[earlier], found.values[earlier])


def test_composition_by_chance_and_its_refusals(rng):
    config = cases.CONFIGS["llama"]
    squares = []
    for _ in range(20):
        found = tnsim.composition(module(cases.checkpoint(rng, config), config))
        squares.append(np.nanmean(found.values**2))
    # Independent normal maps are turned against each other at random.
    assert abs(np.mean(squares) * cases.WIDTH - 1) < 5 * np.std(squares) * cases.WIDTH / 20**0.5
    assert found.attrs["chance"] == cases.WIDTH**-0.5
    with refused("legs=True", tnsim.UnsupportedLayer):
        tnsim.composition(attention_model(rng, None))
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config)
    state["transformer.h.0.attn.c_proj.weight"][:] = 0
    with refused("a head is the zero function: it has no composition score"):
        tnsim.composition(module(state, config))


@pytest.mark.parametrize("kind", ["qk", "ov"])
@pytest.mark.parametrize("through", [None, "embedding"])
def test_chance_is_the_spread_among_random_heads(kind, through, rng):
    from tnsim.all_pairs import heads as module_of_heads

    config = cases.CONFIGS["gpt2"]
    a, b = (tnsim.parts(module(cases.checkpoint(rng, config), config), kind) for _ in range(2))
    sides = [module_of_heads._side(side.anatomy, kind, through, side.view) for side in (a, b)]
    squares = module_of_heads._squares(sides[0])
    spread = module_of_heads._spread_of_chance(*sides, squares)
    drawn = []
    circuits = sides[1].circuits
    for _ in range(400):
        random = circuits._replace(
            left=rng.normal(size=circuits.left.shape), right=rng.normal(size=circuits.right.shape)
        )
        side = sides[1]._replace(circuits=random)
        inner = module_of_heads._inner(
            sides[0].circuits, random, module_of_heads._moments(sides[0], side)
        )
        drawn.append(inner / np.sqrt(np.outer(squares, module_of_heads._squares(side))))
    # Exact for streams of standard normal numbers; else the mean norm stands for the norm.
    ratio = np.sqrt((np.array(drawn) ** 2).mean((0, 2))) / spread
    assert np.abs(ratio - 1).max() < (0.06 if through is None else 0.35)


def test_a_match_by_chance_is_named(rng):
    config = cases.CONFIGS["gpt2"]
    states = [cases.checkpoint(rng, config) for _ in range(2)]
    same = tnsim.heads(*[module(states[0], config)] * 2, "ov")
    assert same.attrs["by_chance"] == [] and (same.matched > same.chance).all()
    apart = tnsim.heads(*(module(state, config) for state in states), "ov")
    assert len(apart.attrs["by_chance"]) >= 1
    several = tnsim.heads(
        *[module(cases.checkpoint(rng, cases.CONFIGS["llama"]), cases.CONFIGS["llama"])] * 2,
        distances=[1, 2],
    )
    assert np.isnan(several.chance).all() and several.attrs["by_chance"] == []


def test_a_bias_of_keys_changes_no_centred_score(rng):
    config = cases.CONFIGS["gpt2"]
    state = cases.checkpoint(rng, config)
    moved = dict(state)
    width = cases.WIDTH
    for i in range(cases.LAYERS):
        name = f"transformer.h.{i}.attn.c_attn.bias"
        moved[name] = state[name].copy()
        moved[name][width : 2 * width] += rng.normal(size=width)
    # Softmax sees no bias of keys: both networks give the same.
    tokens = rng.integers(0, cases.VOCABULARY, size=cases.LENGTH)
    layers = [cases.forward(one, config, tokens) for one in (state, moved)]
    for before, after in zip(*layers, strict=True):
        assert_close(after.pattern, before.pattern, scale=1.0)
    nets = [module(one, config) for one in (state, moved)]
    plain, centred = (
        [tnsim.parts(net, "qk", centred=apart) for net in nets] for apart in (False, True)
    )
    label = next(iter(plain[0]))
    assert tnsim.similarity(plain[0][label], plain[1][label]) < 0.999
    assert_close(tnsim.similarity(centred[0][label], centred[1][label]), 1.0)
    found = tnsim.heads(*nets, centred=True)
    assert_close(np.diagonal(found.similarity.values), np.ones(len(found.a)))
    # The scores are those of the part less their mean over keys of mean zero.
    query, keys = rng.normal(size=width), rng.normal(size=(4, width))
    keys = np.concatenate([keys, -keys])
    both = np.hstack([np.tile(query, (8, 1)), keys])
    scores = np.asarray(plain[0][label](both))
    assert_close(centred[0][label](both), scores - scores.mean(), scale=1.0)
    turned = module(cases.checkpoint(rng, cases.CONFIGS["llama"]), cases.CONFIGS["llama"])
    with refused("depends on the distance", tnsim.UnsupportedLayer):
        tnsim.parts(turned, "qk", centred=True)["layer 0 head 0 qk"]
    with refused("centred are scores"):
        tnsim.heads(*nets, "ov", centred=True)
    with refused("no softmax follows", tnsim.UnsupportedLayer):
        tnsim.heads(*two_of("bilinear", rng), centred=True)
