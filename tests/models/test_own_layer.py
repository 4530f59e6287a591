"""A layer from outside, an elementwise cubic, through the documented protocol alone: `as_layer` and a forward pass."""

import itertools
import math

import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear, dense_product, expected_products, linear
from refusals import refused

import tnsim
import tnsim.models.protocol

pytestmark = pytest.mark.usefixtures("diagrams")

D = 2


class Cubic:
    """`down (W x + b)^3 + c`, written by somebody who knows `tnsim.models.protocol.OwnLayer` and nothing else."""

    def __init__(self, weight, down, bias=None, shift=None):
        self.weight, self.down, self.bias, self.shift = weight, down, bias, shift

    def __call__(self, x):
        hidden = x @ self.weight.T + (0.0 if self.bias is None else self.bias)
        return hidden**3 @ self.down.T + (0.0 if self.shift is None else self.shift)

    def as_layer(self):
        biases = None if self.bias is None else [self.bias] * 3
        return tnsim.Multilinear([self.weight] * 3, self.down, biases, self.shift)


def cubic(rng, d_in, rank, d_out, biases=False):
    constants = [rng.normal(size=rank), rng.normal(size=d_out)] if biases else []
    return Cubic(rng.normal(size=(rank, d_in)), rng.normal(size=(d_out, rank)), *constants)


CASES = {
    "plain": lambda g: ([cubic(g, D, 3, 2)], [cubic(g, D, 2, 2)]),
    "biases": lambda g: ([cubic(g, D, 3, 2, True)], [cubic(g, D, 2, 2, True)]),
    "residual": lambda g: (
        [tnsim.Residual(cubic(g, D, 3, D, True), 0.7, 0.3)],
        [tnsim.Residual(cubic(g, D, 2, D))],
    ),
    "between linear layers": lambda g: (
        [linear(g, D, 3, True), cubic(g, 3, 2, 2), linear(g, 2, 2)],
        [cubic(g, D, 3, 3), linear(g, 3, 2, True)],
    ),
}


def pair(name, rng, n_ctx=None):
    return tuple(tnsim.Model(layers, n_ctx=n_ctx) for layers in CASES[name](rng))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("moments", ["standard", "mean and covariance"])
def test_gaussian_is_the_expectation(name, moments, rng):
    a, b = pair(name, rng)
    metric = tnsim.Gaussian()
    if moments != "standard":
        factor = rng.normal(size=(D, D))
        metric = tnsim.Gaussian(rng.normal(size=D), factor @ factor.T + 0.5 * np.eye(D))
    expected, *norms = (expected_products(x, y, metric).sum() for x, y in ((a, b), (a, a), (b, b)))
    scale = math.sqrt(norms[0] * norms[1])
    assert_close(tnsim.inner(a, b, metric), expected, scale=scale, rtol=1e-11)
    cosine = expected / scale
    assert_close(tnsim.similarity(a, b, metric), cosine, scale=1.0, rtol=1e-11)


@pytest.mark.parametrize("name", ["plain", "biases", "residual"])
def test_tree_metrics_are_those_of_the_dense_tensor(name, rng):
    a, b = pair(name, rng)
    plain, symmetric = (
        [dense_product(x, y, symmetrised).sum() for x, y in ((a, b), (a, a), (b, b))]
        for symmetrised in (False, True)
    )
    for metric in (tnsim.Frobenius(), tnsim.TreeSymmetric(), tnsim.Symmetric()):
        expected, *norms = plain if metric == tnsim.Frobenius() else symmetric
        scale = math.sqrt(norms[0] * norms[1])
        assert_close(tnsim.inner(a, b, metric), expected, scale=scale, rtol=1e-11)


@pytest.mark.slow
def test_two_cubic_layers_are_exact(rng):
    a = tnsim.Model([cubic(rng, 1, 2, 1), cubic(rng, 1, 1, 2)])
    b = tnsim.Model([cubic(rng, 1, 1, 1), cubic(rng, 1, 2, 2)])
    metric = tnsim.Gaussian()
    expected = expected_products(a, b, metric).sum()
    assert_close(tnsim.inner(a, b, metric), expected)


@pytest.mark.parametrize("name", CASES)
def test_networks_sum_to_inner(name, rng):
    a, b = pair(name, rng)
    for metric in (tnsim.TreeSymmetric(), tnsim.Gaussian()):
        weighted = tnsim.tensor_networks.networks(a, b, metric)
        total = sum(w * net.contract(output_inds=()) for w, net in weighted)
        assert_close(float(total), tnsim.inner(a, b, metric), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "biases", "residual", "between linear layers"])
def test_sequences_apply_it_position_by_position(name, rng):
    a, b = pair(name, rng)
    positions = 3
    many = [tnsim.Model(m.layers, n_ctx=positions) for m in (a, b)]
    for metric in (tnsim.Gaussian(), tnsim.TreeSymmetric()):
        if metric == tnsim.TreeSymmetric() and name == "between linear layers":
            continue
        expected = positions * tnsim.inner(a, b, metric)
        assert_close(tnsim.inner(*many, metric), expected, rtol=1e-11)
    parts = tnsim.paths(a, b)
    assert_close(parts.values.sum(), tnsim.inner(a, b), rtol=1e-10)


def test_all_pairs(rng):
    models = [tnsim.Model([cubic(rng, D, 3, 2, True)]) for _ in range(3)]
    result = tnsim.pairwise(models)
    for i, j in itertools.combinations(range(3), 2):
        expected = tnsim.similarity(models[i], models[j])
        assert_close(float(result.similarity[i, j]), float(expected), scale=1.0, rtol=1e-11)


@pytest.mark.slow
def test_scale_does_not_matter(rng):
    a, b = pair("biases", rng)
    tiny = tnsim.Model([*b.layers, tnsim.Linear(2.0**-600 * np.eye(2))])
    assert_close(tnsim.similarity(a, tiny), tnsim.similarity(a, b), scale=1.0, rtol=1e-12)


def test_a_cubic_beside_a_bilinear_layer(rng):
    a, b = tnsim.Model([cubic(rng, D, 3, 2)]), tnsim.Model([bilinear(rng, D, 3, 2, True)])
    expected = expected_products(a, b, tnsim.Gaussian()).sum()
    assert_close(tnsim.inner(a, b), expected, rtol=1e-11)
    with refused(r"trees of one shape.*orders \[3\] and \[2\]"):
        tnsim.inner(a, b, tnsim.TreeSymmetric())


def test_what_it_says_is_compared_with_what_it_does(rng):
    class Liar(Cubic):
        def as_layer(self):
            return tnsim.Multilinear([self.weight] * 2, self.down)

    with refused(r"layer 0: as_layer\(\) is another function"):
        tnsim.Model([Liar(np.eye(2), np.eye(2))])
    with refused(r"layer 0 is a float; .*method as_layer\(\)", tnsim.UnsupportedLayer):
        tnsim.Model([1.0])


def test_a_model_with_it_can_be_saved(rng, tmp_path):
    a, _ = pair("residual", rng)
    tnsim.save(a, tmp_path / "own.safetensors")
    again = tnsim.load(tmp_path / "own.safetensors")
    x = rng.normal(size=(5, D))
    np.testing.assert_array_equal(again(x), a(x))


def test_a_class_inside_names_each_array_once():
    """Otherwise units and bases would be applied twice to one array, and numbers be wrong in silence."""
    arrays = [np.eye(2)] * 3  # equal arrays under two names are allowed
    tnsim.Model([tnsim.Bilinear(*arrays)])
    for names in ((("left", "left"), "down"), (("left", "down"), "down")):
        with refused("with one name twice: give each factor"):
            type("Twice", (tnsim.Bilinear,), {"maps": names})(*arrays)
