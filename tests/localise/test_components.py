"""Switches on components: names, outputs against components added up by hand, transforms, refusals."""

import component_oracles as oracle
import jax
import numpy as np
import pytest
from activated_cases import gated, mlp
from closeness import LARGEST, assert_close
from component_oracles import STACKS, attending, points, stack
from oracles import bilinear, linear
from refusals import refused
from scipy.sparse import csr_array
from sequence_oracles import attention

import tnsim
from tnsim.models.components import (
    components_of,
    exchanged,
    interpolated_outputs,
    switched,
    switches,
)
from tnsim.models.forward import Prefixes


def granularities(model):
    return ("layer", "head", "unit") if model.attends else ("layer", "unit")


def test_names_follow_layers_heads_units_and_biases(rng):
    model = tnsim.Model(
        [
            linear(rng, 2, 3),
            tnsim.Residual(attention(rng, 3, 2, 2, 2, 3, True)),
            tnsim.Residual(bilinear(rng, 3, 2, 3)),
            tnsim.Residual(linear(rng, 3, 3, True)),
            linear(rng, 3, 2, True),
        ],
        n_ctx=2,
    )
    assert tnsim.components(model) == ("layer 1", "layer 2", "layer 3")
    heads = ("layer 1 head 0", "layer 1 head 1", "layer 1 bias")
    assert tnsim.components(model, by="head") == (*heads, "layer 2", "layer 3")
    units = ("layer 2 unit 0", "layer 2 unit 1")
    assert tnsim.components(model, by="unit") == (*heads, *units, "layer 3")


@pytest.mark.parametrize("name", STACKS)
def test_a_switched_model_adds_up_its_components(name, rng):
    model = stack(name, rng)
    x = points(model, rng)
    for by in granularities(model):
        count = len(tnsim.components(model, by))
        for z in (rng.integers(0, 2, count).astype(float), rng.normal(size=count)):
            wanted = oracle.switched_outputs(model, x, z, by)
            assert_close(switched(model, z, by)(x), wanted, scale=LARGEST, rtol=1e-12)
    z = np.ones(len(tnsim.components(model)))
    same = switched(model, z)
    assert all(one is other for one, other in zip(same.layers, model.layers, strict=True))


def test_components_of_residuals_of_two_scales_are_exchanged_one_by_one(rng):
    """All heads and the bias of a layer change it together by what the whole layer changes."""
    a, b = (
        tnsim.Model([tnsim.Residual(attention(rng, 3, 2, 2, 2, 3, bias), 0.7, scale)], n_ctx=2)
        for bias, scale in ((True, 0.5), (False, 0.25))
    )
    x, parts = points(a, rng), components_of([a, b], "head")
    assert len(parts) == 3
    moved = sum(exchanged(a, b, part)(x) - a(x) for part in parts)
    assert_close(moved, b(x) - a(x), scale=LARGEST, rtol=1e-12)


def test_switches_by_label_leave_the_others_on(rng):
    model = stack("attention", rng)
    x = points(model, rng)
    labels = tnsim.components(model, "head")
    z = np.ones(len(labels))
    z[labels.index("layer 2 head 1")] = 0.25
    given = switched(model, {"layer 2 head 1": 0.25}, by="head")
    assert given(x).tolist() == switched(model, z, "head")(x).tolist()
    parts = components_of([model], "head")
    assert jax.grad(lambda one: switches(parts, {"layer 2 head 1": one}).sum())(0.25) == 1.0


def test_layers_of_sparse_matrices_have_switches(rng):
    weights = [np.diag(rng.normal(size=3)) for _ in range(3)]
    layers = [tnsim.Residual(tnsim.Bilinear(*map(f, weights))) for f in (np.array, csr_array)]
    dense, sparse = (switched(tnsim.Model([layer]), [0.5]) for layer in layers)
    x = rng.normal(size=(4, 3))
    np.testing.assert_array_equal(sparse(x), dense(x))


@pytest.mark.slow
def test_all_switches_are_one_plan_that_may_be_batched_and_differentiated(rng):
    model = tnsim.Model([bilinear(rng, 2, 3, 2)])
    count = len(tnsim.components(model, "unit"))

    def product(z):
        return tnsim.inner(switched(model, z, "unit"), model, tnsim.Frobenius())

    z = rng.normal(size=(5, count))
    with jax.enable_x64(True):
        batched = np.asarray(jax.vmap(product)(z))
        slopes = np.asarray(jax.grad(product)(z[0]))
    each = np.array([float(product(one)) for one in z])
    assert_close(batched, each, scale=LARGEST, rtol=1e-12)
    # One nonlinear layer: the product is linear in its switches.
    assert_close(float(slopes @ z[0]), each[0], scale=abs(each).max(), rtol=1e-12)


def test_what_cannot_be_switched_is_refused_in_one_line(rng):
    model = stack("mlp", rng)
    cases = {
        "by must be one of layer, head, unit, found 'neuron'": lambda: tnsim.components(
            model, "neuron"
        ),
        "by='head' needs an attention layer": lambda: tnsim.components(model, "head"),
        "all of its layers are linear": lambda: tnsim.components(tnsim.Model([linear(rng, 2, 2)])),
        "take the models of a combination one by one": lambda: tnsim.components(model - model),
        r"has 2 components and z has shape \(3,\).*layer 1, layer 2": lambda: switched(
            model, [1.0] * 3
        ),
        "no component 'layer 9', only layer 1, layer 2": lambda: switched(model, {"layer 9": 0.0}),
        "and 2 more up to layer 2 bias": lambda: switched(
            tnsim.Model([linear(rng, 3, 4), oracle.mlp(rng, 4, 9), oracle.mlp(rng, 4, 3)]),
            {"x": 0.0},
            "unit",
        ),
        "the switches z has 1 NaN": lambda: switched(model, [1.0, np.nan]),
        "z has 1 NaN or infinite entries": lambda: switched(model, {"layer 1": np.nan}),
        "z must hold real numbers": lambda: switched(model, {"layer 1": None}),
        r"a switch is one number, found \[0.5\] for 'layer 1'": lambda: switched(
            model, {"layer 1": [0.5]}
        ),
        "the switches z has 2 NaN": lambda: switched(model, jax.numpy.full(2, np.nan)),
    }
    for message, attempt in cases.items():
        with refused(message):
            attempt()


@pytest.mark.parametrize("kind", ["elementwise", "gated"])
def test_changes_and_edges_beside_an_activation_are_refused_with_another_road(kind, rng):
    """Outputs are no polynomial in switches, so no number of nodes is exact."""
    make = {"elementwise": mlp, "gated": gated}[kind]
    a, b = make(rng, "gelu"), make(rng, "gelu")
    message = r"activation gelu, .* tnsim.paths, or .* tnsim.change\(a, b, by='layer'\)"
    for ask in (
        lambda: tnsim.change(a, b, by="unit"),
        lambda: tnsim.change(a, b, tnsim.Empirical(np.ones((3, 2))), by="unit", ends=True),
        lambda: tnsim.paths(a, by="layer", legs=True),
        lambda: tnsim.paths(a, by="unit", legs=True),
    ):
        with refused(message, tnsim.UnsupportedLayer):
            ask()
    data = tnsim.Empirical(rng.normal(size=(3, a.d_in)))
    found = tnsim.change(a, b, data, by="layer")  # the road that is named
    assert all(name.startswith("layer ") for name in found.components)


@pytest.mark.parametrize("kind", ["elementwise", "gated"])
def test_units_of_an_activation_have_switches(kind, rng):
    model = {"elementwise": mlp, "gated": gated}[kind](rng, "gelu")
    x, labels = points(model, rng), tnsim.components(model, "unit")
    units = [one for one in labels if "unit" in one]
    assert len(units) == 5 and len(labels) == 5 + (kind == "gated")
    off = switched(model, dict.fromkeys(labels, 0.0), "unit")(x)
    each = [switched(model, {one: 0.0}, "unit")(x) for one in labels]
    assert_close(model(x) - off, sum(model(x) - y for y in each), scale=LARGEST, rtol=1e-12)
    z = dict.fromkeys(units, 2.0)
    doubled = switched(model, z, "unit")(x) - model(x)
    assert_close(doubled, sum(model(x) - y for y in each[:5]), scale=LARGEST, rtol=1e-12)
    whole = switched(model, {labels[0].rsplit(" unit")[0]: 0.0}, "unit")(x)
    assert whole.tolist() == off.tolist()


@pytest.mark.parametrize("name", STACKS)
def test_shares_of_hidden_units_are_shares_of_columns(name, rng):
    """Interpolated outputs, whose numbers stand on hidden units, against components by hand."""
    a, b = stack(name, rng), stack(name, rng)
    x = points(a, rng)
    for by in granularities(a):
        for ends in (False, True):
            parts = components_of([a, b], by, linear=ends)
            s = rng.normal(size=len(parts))
            wanted = oracle.mixed_outputs(a, b, x, s, by, ends=ends)
            found = interpolated_outputs(a, b, s, parts, x)
            assert_close(found, wanted, scale=LARGEST, rtol=1e-12)


def test_beginnings_of_sequences_are_interpolated_as_sequences_are(rng):
    a, b = (tnsim.Model([linear(rng, 2, 4, True), attending(rng, 4, 2)], n_ctx=2) for _ in range(2))
    parts = components_of([a, b], "head", linear=True)
    s = rng.normal(size=len(parts))
    first, second = np.array([0, 1]), np.array([0, 1, 0, 1])
    found = interpolated_outputs(a, b, s, parts, Prefixes((first, second)))
    one_hot = np.eye(2)[np.array([[0, 0], [0, 1], [1, 0], [1, 1]])]
    wanted = oracle.mixed_outputs(a, b, one_hot, s, "head", ends=True)
    assert_close(found[2:], wanted[:, 1], scale=LARGEST, rtol=1e-12)
    assert_close(found[:2], wanted[::2, 0], scale=LARGEST, rtol=1e-12)
