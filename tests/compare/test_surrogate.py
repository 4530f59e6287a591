"""Polynomial surrogates beside Hermite projections by quadrature, and the bound of their angles."""

import numpy as np
import pytest
from activated_cases import KINKED, KINKS, gated, gaussian, mlp, panels, points
from closeness import assert_close
from numpy.polynomial import hermite_e
from refusals import refused

import tnsim

pytestmark = pytest.mark.filterwarnings("ignore:the models are not quite")
SAMPLES = 4096


def cut(activation, mean, deviation, degree):
    """The Hermite projection of an activation about N(mean, deviation^2), by panels."""
    kinks = KINKS.get(activation, (0.0,) if activation in KINKED else ())
    short = np.arange(-9.0, 9.0, 0.25)  # what turns within a tenth of a deviation is followed
    z, weights = panels([*((kink - mean) / deviation for kink in kinks), *short])
    values = tnsim.Elementwise(activation)(mean + deviation * z)
    basis = hermite_e.hermevander(z, degree)
    sizes = np.cumprod([1.0, *range(1, degree + 1)])
    series = (weights * values) @ basis / sizes
    return lambda u: hermite_e.hermeval((u - mean) / deviation, series)


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("degree", [1, 2, 3, 6])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "step"])
def test_every_unit_is_the_best_polynomial_of_its_degree(rng, activation, degree, monkeypatch):
    monkeypatch.setattr("tnsim.compare.surrogate.LARGEST_ERROR", np.inf)
    model, metric = mlp(rng, activation), gaussian(rng)
    first, _, last = model.layers
    found = tnsim.polynomial(model, degree, metric, samples=SAMPLES)
    x = rng.normal(size=(7, 2))
    gates = first(x)
    means = first(metric.mean)
    deviations = np.sqrt(np.diag(first.weight @ metric.cov @ first.weight.T))
    hidden = [
        cut(activation, *moments, degree)(gate)
        for *moments, gate in zip(means, deviations, gates.T, strict=True)
    ]
    assert_close(found(x), last(np.stack(hidden, axis=1)), scale=abs(np.array(hidden)).max())
    assert found.degree == degree
    if degree == 2:
        assert [type(layer) for layer in found.layers] == [tnsim.Bilinear]


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize("degree, on_inputs", [(1, False), (2, False), (2, True), (3, False)])
def test_gates_keep_their_factors_and_residuals_their_skips(rng, degree, on_inputs, monkeypatch):
    monkeypatch.setattr("tnsim.compare.surrogate.LARGEST_ERROR", np.inf)
    (block,) = gated(rng, "silu").layers
    model = tnsim.Model([tnsim.Residual(block, skip=0.3, scale=0.7)])
    x = rng.normal(size=(7, 2))
    gates = x @ block.gate.T + block.gate_bias
    if on_inputs:
        found = tnsim.polynomial(model, degree, tnsim.Empirical(x))
        means, deviations = gates.mean(0), gates.std(0)
    else:
        found = tnsim.polynomial(model, degree, samples=SAMPLES)
        means, deviations = block.gate_bias, np.linalg.norm(block.gate, axis=1)
    hidden = [
        cut("silu", *moments, degree)(gate)
        for *moments, gate in zip(means, deviations, gates.T, strict=True)
    ]
    products = np.stack(hidden, axis=1) * (x @ block.up.T + block.up_bias)
    expected = 0.3 * x + 0.7 * (products @ block.down.T + block.down_bias)
    assert_close(found(x), expected, scale=abs(products).max())
    assert found.degree == degree + 1


@pytest.mark.slow
def test_the_error_is_that_of_the_forward_passes(rng):
    model, metric = mlp(rng, "relu", hidden=4), gaussian(rng)
    found = tnsim.polynomial(model, 2, metric)
    x, weights = points([model], metric)
    error = weights @ ((model(x) - found(x)) ** 2).sum(1) / (weights @ (model(x) ** 2).sum(1))
    assert_close(found.origin.error, error**0.5, rtol=0.2, limited_by="draws")
    # a projection is orthogonal to its remainder
    rest = weights @ ((model(x) - found(x)) * found(x)).sum(1)
    assert_close(rest, 0.0, scale=weights @ (found(x) ** 2).sum(1))
    assert "degree 2" in found.origin.caveats[-1]


def deep(rng, depth, width=8):
    layers = []
    for _ in range(depth):
        weight = rng.normal(size=(width, width)) * (2 / width) ** 0.5
        layers += [tnsim.Linear(weight, 0.2 * rng.normal(size=width)), tnsim.Elementwise("relu")]
    return tnsim.Model([*layers, tnsim.Linear(rng.normal(size=(3, width)))])


@pytest.mark.slow
def test_the_bound_of_angles_holds_on_the_inputs_that_measured_it(rng):
    a, b = deep(rng, 2), deep(rng, 2)
    metric = tnsim.Empirical(rng.normal(size=(2000, 8)))
    one, two = (tnsim.polynomial(model, 2, metric) for model in (a, b))
    assert [type(layer) for layer in one.layers] == [tnsim.Bilinear] * 2
    angles = [
        np.arccos(float(tnsim.similarity(*pair, metric))) for pair in ((a, b), (one, two), (a, one))
    ]
    bounds = [np.arcsin(model.origin.error) for model in (one, two)]
    assert abs(angles[0] - angles[1]) <= sum(bounds)
    assert angles[2] <= bounds[0] * (1 + 1e-9)
    with pytest.warns(tnsim.CaveatWarning, match="angles are off by up to"):
        tnsim.similarity(one, two, tnsim.GaussianClosure())


@pytest.mark.slow
def test_states_at_many_positions_and_weighted_inputs(rng):
    model = deep(rng, 2)
    sequences = tnsim.Model(model.layers, n_ctx=3)
    inputs = rng.normal(size=(50, 3, 8))
    one = tnsim.polynomial(sequences, 2, tnsim.Empirical(inputs))
    two = tnsim.polynomial(model, 2, tnsim.Empirical(inputs.reshape(-1, 8)))
    weights = rng.integers(1, 4, size=len(inputs))
    three = tnsim.polynomial(sequences, 2, tnsim.Empirical(inputs, weights))
    four = tnsim.polynomial(sequences, 2, tnsim.Empirical(np.repeat(inputs, weights, axis=0)))
    for first, second in ((one, two), (three, four)):
        assert_close(first.origin.error, second.origin.error)
        assert_close(first(inputs), second(inputs), scale=abs(second(inputs)).max())
    spread = tnsim.Gaussian(mean=rng.normal(size=(3, 8)))  # positions differ
    assert tnsim.polynomial(sequences, 2, spread, samples=SAMPLES).n_ctx == 3


@pytest.mark.slow
def test_polynomials_and_constants_stay_as_they_are(rng):
    square = tnsim.Model([tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2))])
    assert tnsim.polynomial(square, 2) is square
    squares = tnsim.Model([tnsim.Linear(np.eye(2)), tnsim.Elementwise("square")])
    assert tnsim.polynomial(squares, 2).origin.error < 1e-14
    dead = tnsim.Model([tnsim.Linear([[0.0], [1.0]], [2.0, 0.0]), tnsim.Elementwise("relu")])
    found = tnsim.polynomial(dead, 3, samples=SAMPLES)
    assert_close(found(np.array([5.0]))[0], 2.0)


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize(
    "words, attempt",
    {
        "relative error, on 16,384 draws": lambda m: tnsim.polynomial(m, 5),
        "whole number from 1": lambda m: tnsim.polynomial(m, 0),
        "to 170, found 171": lambda m: tnsim.polynomial(m, 171),
        "found Symmetric": lambda m: tnsim.polynomial(m, 2, tnsim.Symmetric()),
        "token ids": lambda m: tnsim.polynomial(m, 2, tnsim.Empirical([[1, 2]])),
        "each model of a sum": lambda m: tnsim.polynomial(m - m, 2),
        "without layers": lambda m: tnsim.polynomial((0.0).__mul__, 2),
        "at least 2": lambda m: tnsim.polynomial(m, 2, samples=1),
        "zero on all": lambda m: tnsim.polynomial(zero(), 2),
    }.items(),
)
def test_refusals_name_the_road(attempt, words):
    with refused(words, tnsim.TnsimError):
        attempt(deep(np.random.default_rng(0), 4))


def zero():
    return tnsim.Model([tnsim.Linear([[0.0]]), tnsim.Elementwise("relu")])
