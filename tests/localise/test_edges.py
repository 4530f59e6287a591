"""Edges: gates on what one component reads of another, against blocks of the stream by hand."""

import itertools

import component_oracles as oracle
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from component_oracles import points, stack
from oracles import bilinear, linear
from refusals import refused
from sequence_oracles import attention, linear_attention

import tnsim
from tnsim.models.components import components_of, edges_of, wired

LEGS = {"q1": "Q", "q2": "Q", "k1": "K", "k2": "K", "v": "V"}


def apart(core, index):
    """The layer over three inputs side by side: those of queries, keys and values, or the first alone."""

    def at(name):
        block = {"Q": 0, "K": 1, "V": 2}[LEGS[name]]
        matrix = getattr(core, name)
        return np.kron(np.eye(3)[block], matrix)

    o = np.zeros_like(core.o)
    columns = slice(index * core.d_value, (index + 1) * core.d_value)
    o[:, columns] = core.o[:, columns]
    return tnsim.Attention(
        at("q1"), at("k1"), at("q2"), at("k2"), at("v"), o, core.n_heads,
        core.q1_bias, core.k1_bias, core.q2_bias, core.k2_bias, core.v_bias,
        mask=core.mask, rope_base=core.rope_base,
    )  # fmt: skip


def gated_outputs(model, x, gates):
    """Outputs by head with gates on edges, by label; an edge without a gate is open.

    Constants of linear layers belong to what is below all components, while a skip keeps it.
    """
    blocks = {"embed": x}
    for n, layer in enumerate(model.layers):
        if isinstance(layer, tnsim.Linear):
            blocks = {name: value @ layer.weight.T for name, value in blocks.items()}
            if layer.bias is not None:
                own = "embed" if "embed" in blocks else "constants"
                blocks[own] = blocks.get(own, 0) + layer.bias
            continue
        core, skip, scale = oracle.core_of(layer)

        def read(target, leg, blocks=blocks):
            return sum(
                gates.get(f"{s} > {leg} of {target}", 1.0) * value for s, value in blocks.items()
            )

        found = {name: skip * value for name, value in blocks.items()} if skip else {}
        if isinstance(core, tnsim.Attention):
            for h in range(core.n_heads):
                name = f"layer {n} head {h}"
                both = np.concatenate([read(name, leg) for leg in "QKV"], axis=-1)
                found[name] = scale * apart(core, h)(both)
            if core.o_bias is not None:
                found[f"layer {n} bias"] = scale * core.o_bias + 0 * found[name]
        else:
            found[f"layer {n}"] = scale * core(read(f"layer {n}", "in"))
        blocks = found
    return sum(blocks.values())


KINDS = {
    "linear": lambda g, d, biases: linear(g, d, d, biases),
    "bilinear": lambda g, d, biases: bilinear(g, d, 2, d, biases),
    "multilinear": lambda g, d, biases: tnsim.Multilinear(
        [g.normal(size=(2, d)) for _ in range(3)],
        g.normal(size=(d, 2)),
        [g.normal(size=2), None, g.normal(size=2)] if biases else None,
        g.normal(size=d) if biases else None,
    ),
    "attention": lambda g, d, biases: attention(g, d, 2, 2, 1, d, biases),
    "single score": lambda g, d, biases: linear_attention(g, d, 2, 2, 1, d, biases),
}


@pytest.mark.crossing
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biases", [False, True], ids=["no bias", "biases"])
@pytest.mark.parametrize("skip", [None, 0.0, 0.7], ids=["plain", "skip 0", "skip"])
def test_a_model_of_gated_edges_is_the_model_by_hand(kind, biases, skip, rng):
    def part():
        core = KINDS[kind](rng, 2, biases)
        # A linear layer is a component inside a residual alone.
        return core if skip is None and kind != "linear" else tnsim.Residual(core, skip or 0.0, 0.6)

    for linears in itertools.product((False, True), repeat=3):
        # Linear layers with a bias before, between and behind the components.
        first, middle, last = ([linear(rng, 2, 2, True)] if own else [] for own in linears)
        layers = [*first, part(), *middle, *middle, part(), part(), *last]
        model = tnsim.Model(layers, n_ctx=3 if hasattr(KINDS[kind](rng, 2, False), "o") else None)
        x = rng.normal(size=(2, 3, 2) if model.attends else (4, 2))
        parts = components_of([model], by_of(model))
        edges = edges_of(model, parts)
        name = {-1: "embed"} | {n: part.label for n, part in enumerate(parts)}
        labels = [f"{name[e.source]} > {e.leg} of {name[e.target]}" for e in edges]
        for gates in (np.ones(len(edges)), rng.normal(size=len(edges))):
            given = wired(model, gates, parts, edges)(x)
            by_hand = gated_outputs(model, x, dict(zip(labels, gates, strict=True)))
            assert_close(given, by_hand, scale=LARGEST, rtol=1e-11)
            if np.all(gates == 1):
                assert_close(given, model(x), scale=LARGEST, rtol=1e-11)


def test_constants_behind_a_layer_without_skip_need_no_edge():
    square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
    model = tnsim.Model([square, tnsim.Linear([[1.0]], [1.0]), square])
    found = tnsim.paths(model, metric=tnsim.Empirical([[1.0]]), legs=True)
    # (g1 (g0 x)^2 + 1)^2 = 4 at x = 1 with open gates, and 1 with either closed.
    assert found.edges == ("embed > in of layer 0", "layer 0 > in of layer 2")
    assert_close(found.share, [0.5, 0.25], scale=1.0, rtol=1e-13)
    assert_close(found.cut, [0.5625, 0.5625], scale=1.0, rtol=1e-13)
    assert_close(found.rest, 0.25, scale=1.0, rtol=1e-13)


def test_what_small_units_read_is_cut_along_plans():
    # x + (x^2 + small x^2): along plans a cut is a difference of two norms.
    small = 1e-9
    layer = tnsim.Bilinear(np.ones((2, 1)), np.ones((2, 1)), [[1.0, small]])
    found = tnsim.paths(
        tnsim.Model([tnsim.Residual(layer)]), metric="frobenius", by="unit", legs=True
    )
    norm = 0.5 + (1.0 + small) ** 2  # x is half of x (x) 1 and half of 1 (x) x
    assert_close(found.cut, [1.0 / norm, small**2 / norm], scale=1.0, rtol=1e-14)


def test_float32_takes_models_that_are_zero_without_edges():
    square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
    found = tnsim.paths(square, metric="frobenius", legs=True, dtype="float32")
    both = [*found.share, *found.cut]
    assert_close(both, [1.0, 1.0], rtol=1e-6, limited_by="float32")


def test_edges_of_a_first_layer_that_reads_tokens():
    layer = tnsim.Residual(tnsim.Linear([[0.0, 1.0], [0.0, 0.0]]))
    metric = tnsim.Empirical(np.array([[0, 1], [1, 1]]))
    found = tnsim.paths(tnsim.Model([layer], n_ctx=2), metric=metric, legs=True)
    # Token 0 is (1, 0) and token 1 is (1, 1), of which the layer adds the first coordinate.
    assert_close(found.cut, [3 / 7], rtol=1e-13)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: tnsim.Elementwise("relu", 2),
        lambda g: tnsim.Gated(*(g.normal(size=(2, 2)) for _ in range(3)), "relu"),
        lambda g: tnsim.Residual(tnsim.Elementwise("gelu", 2)),
    ],
)
def test_edges_of_layers_with_activations_are_refused_by_name(make, rng):
    model = tnsim.Model([linear(rng, 2, 2), make(rng)])
    with refused(r"layer 1 has the activation (relu|gelu)", tnsim.UnsupportedLayer):
        tnsim.paths(model, legs=True)


def by_of(model):
    return "head" if model.attends else "layer"


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("name", ["mlp", "no skip", "nested", "attention", "mixed"])
def test_cuts_and_shares_are_those_of_blocks_by_hand(name, rng):
    model = stack(name, rng)
    x = points(model, rng, 3)
    found = tnsim.paths(model, metric=tnsim.Empirical(x), by=by_of(model), legs=True)
    whole = gated_outputs(model, x, {})
    assert_close(whole, model(x), scale=LARGEST, rtol=1e-12)
    norm = (whole**2).sum()
    for label, cut in zip(found.edges, found.cut, strict=True):
        lost = ((whole - gated_outputs(model, x, {label: 0.0})) ** 2).sum() / norm
        assert_close(cut, lost, scale=found.cut.max(), rtol=1e-10)
    none = gated_outputs(model, x, dict.fromkeys(found.edges, 0.0))
    assert_close(found.rest, (none * whole).sum() / norm, scale=1.0, rtol=1e-10)
    t, w = np.polynomial.legendre.leggauss(24)
    for n in (0, len(found.edges) - 1):
        share = 0.0
        for node, weight in zip((t + 1) / 2, w / 2, strict=True):
            gates = dict.fromkeys(found.edges, node + 0j)
            gates[found.edges[n]] += 1e-100j
            slope = gated_outputs(model, x.astype(complex), gates).imag / 1e-100
            share += weight * (slope * whole).sum() / norm
        assert_close(found.share[n], share, scale=abs(found.share).max(), rtol=1e-10)


def test_sampled_edges_say_so():
    """They had no errors, and were called an approximation beyond one nonlinear layer."""
    model = tnsim.Model([tnsim.Residual(tnsim.Linear([[0.0, 1.0], [0.0, 0.0]]))], n_ctx=2)
    found = tnsim.paths(model, metric=tnsim.Categorical(samples=32), legs=True)
    assert "(estimate from samples, standard errors of shares up to" in str(found)
    (error,) = found.standard_error
    assert 0 < error < 0.1
    assert tnsim.paths(model, metric=tnsim.Empirical([[0, 1]]), legs=True).standard_error is None


def test_edges_of_many_units_are_refused_by_name():
    """A thousand units took many gigabytes, and hours."""
    wide = tnsim.Model([tnsim.Bilinear(np.ones((1100, 1)), np.ones((1100, 1)), np.ones((1, 1100)))])
    with refused("by='unit' gives 1,100 edges", tnsim.TooLarge):
        tnsim.paths(wide, by="unit", legs=True)


def test_what_nothing_reads_has_no_block():
    """Every component had a block of its own, so that layers grew by as many columns."""
    layer = tnsim.Bilinear(np.ones((7, 2)), np.ones((7, 2)), np.ones((2, 7)))
    model = tnsim.Model([layer])
    parts = components_of([model], "unit")
    edges = edges_of(model, parts)
    found = wired(model, np.arange(1.0, 8.0), parts, edges)
    assert found.layers[1].d_in == 2 * layer.d_in
    # A unit multiplies two legs, of which each has the gate of its edge.
    assert_close(found(np.ones(2)), np.full(2, 4.0 * sum(n**2 for n in range(1, 8))))


@pytest.mark.slow
def test_sampled_edges_have_errors_that_cover_them(rng):
    model = stack("mlp", rng)
    exact = tnsim.paths(model, metric=tnsim.Gaussian(), legs=True)
    assert exact.standard_error is None
    deviations = []
    for _ in range(20):
        x = tnsim.Empirical(rng.normal(size=(1000, model.d_in)))
        found = tnsim.paths(model, metric=x, legs=True)
        deviations.append((found.share - exact.share) / found.standard_error)
    assert 0.4 < np.sqrt(np.mean(np.square(deviations))) < 2.5


@pytest.mark.slow
def test_edges_name_the_legs_that_no_gauge_mixes(rng):
    model = stack("mixed", rng)
    found = tnsim.paths(
        model, metric=tnsim.Empirical(rng.normal(size=(2, 3, 3))), by="head", legs=True
    )
    heads = [f"embed > {leg} of layer 0 head {h}" for h in (0, 1) for leg in "QKV"]
    read = [f"{s} > in of layer 1" for s in ("embed", "layer 0 head 0", "layer 0 head 1")]
    assert found.edges == (*heads, *read)
    assert "layer 0 head 1" in found._repr_html_()


@pytest.mark.slow
def test_edges_of_a_run_are_those_of_its_checkpoints(rng):
    models = {step: stack("mlp", rng) for step in ("0", "10")}
    metric = tnsim.Empirical(rng.normal(size=(4, models["0"].d_in)))
    run = tnsim.paths(models, metric=metric, legs=True)
    assert run.labels == ("0", "10") and run.share.shape == run.cut.shape == (2, len(run.edges))
    for row, cut, model in zip(run.share, run.cut, models.values(), strict=True):
        alone = tnsim.paths(model, metric=metric, legs=True)
        assert_close(row, alone.share, scale=LARGEST, rtol=1e-12)
        assert_close(cut, alone.cut, scale=LARGEST, rtol=1e-12)
    assert "layer 1 &gt; in of layer 2" in run._repr_html_()
    with refused("checkpoint 1 has other edges than 0"):
        tnsim.paths([models["0"], stack("nested", rng)], metric=metric, legs=True)


def test_edges_are_those_of_one_model(rng):
    model = stack("mlp", rng)
    for options in ({"b": model}, {"order": 1}, {"within": ["layer 1"]}, {"top": 1}):
        with refused("legs=True gives the edges of each model"):
            tnsim.paths(model, legs=True, **options)
    for run in ({}, [], ()):
        with refused("at least one checkpoint, found none"):
            tnsim.paths(run, legs=True)
    with refused("take the models of a combination one by one"):
        tnsim.paths(model - stack("mlp", rng), legs=True)
