"""Every layer crossed with every metric, against oracles that share no code with the library."""

import backends
import cases
import numpy as np
import pytest
from closeness import assert_close
from oracles import (
    bilinear,
    closure_products,
    dense_product,
    dense_symmetric_product,
    expected_products,
    polynomial_product,
    random_gaussian,
)
from refusals import refused

import tnsim

pytestmark = pytest.mark.usefixtures("diagrams")

TOLERANCE = 1e-10


def check(a, b, metric, slices):
    """inner, similarity and slices of (a, b) against the oracle's products per output."""
    ab, aa, bb = (slices(*p) for p in ((a, b), (a, a), (b, b)))
    scale = np.sqrt(aa.sum() * bb.sum())
    inner = tnsim.inner(a, b, metric)
    assert_close(inner, ab.sum(), scale=scale, rtol=TOLERANCE)
    assert_close(tnsim.inner(a, a, metric), aa.sum(), rtol=TOLERANCE)
    assert_close(tnsim.similarity(a, b, metric), ab.sum() / scale, scale=1.0, rtol=TOLERANCE)
    assert_close(tnsim.slices(a, b, metric), ab / np.sqrt(aa * bb), scale=1.0, rtol=TOLERANCE)
    sign, log = tnsim.log_inner(a, b, metric)
    assert_close(sign * np.exp(log), inner, rtol=1e-11)


@pytest.mark.crossing
@backends.with_inputs(cases.INPUTS, ["standard", "diagonal", "mean and covariance"])
@pytest.mark.parametrize("name", cases.SHALLOW)
def test_gaussian_against_quadrature(name, inputs, rng):
    a, b = cases.pair(cases.SHALLOW[name], rng)
    metric = tnsim.Gaussian(*cases.INPUTS[inputs](rng))
    check(a, b, metric, lambda p, q: expected_products(p, q, metric))
    assert tnsim.similarity(a, b, metric).exact


@pytest.mark.crossing
@backends.with_inputs(
    ["standard", "mean and covariance"],
    ["mean and covariance"],
    rare=["diagonal", "singular covariance"],
)
@pytest.mark.parametrize("name", cases.DEEP | cases.UNEVEN)
def test_deep_gaussian_against_quadrature(name, inputs, rng):
    """All diagrams of two nonlinear layers, biases, skips, means and covariances included."""
    a, b = cases.pair((cases.DEEP | cases.UNEVEN)[name], rng)
    metric = tnsim.Gaussian(*cases.INPUTS[inputs](rng))
    check(a, b, metric, lambda p, q: expected_products(p, q, metric))
    assert tnsim.similarity(a, b, metric).exact


@pytest.mark.slow
@backends.both
@pytest.mark.parametrize("biases", [False, True])
def test_three_layers_against_quadrature(biases, rng):
    """606 diagrams; with biases each at nine moment nodes. Two input coordinates keep the quadrature small."""
    a, b = (
        tnsim.Model(
            [
                bilinear(rng, 2, 2, 2, biases),
                tnsim.Residual(bilinear(rng, 2, 2, 2)) if biases else bilinear(rng, 2, 2, 2),
                bilinear(rng, 2, 2, 1),
            ]
        )
        for _ in range(2)
    )
    metric = tnsim.Gaussian(*random_gaussian(rng, 2)) if biases else tnsim.Gaussian()
    ab = expected_products(a, b, metric).sum()
    assert tnsim.plan(a, b, metric).contraction.diagrams == 606
    assert_close(tnsim.inner(a, b, metric), ab)


@pytest.mark.sampled(quick=6)
@backends.both
@pytest.mark.parametrize("name", cases.SHALLOW | cases.DEEP)
def test_symmetric_against_dense_tensors(name, rng):
    """P_n over all legs, on the dense lifted tensor."""
    a, b = cases.pair((cases.SHALLOW | cases.DEEP)[name], rng)
    if a.degree != b.degree:
        with refused("have degrees"):
            tnsim.inner(a, b, tnsim.Symmetric())
        return
    check(a, b, tnsim.Symmetric(), lambda p, q: dense_symmetric_product(p, q))
    assert tnsim.similarity(a, b, tnsim.Symmetric()).exact


@backends.both
@pytest.mark.usefixtures("diagrams")
def test_symmetric_three_layers_at_tiny_size(rng):
    a, b = (
        tnsim.Model([bilinear(rng, 2, 2, 2) for _ in range(2)] + [bilinear(rng, 2, 2, 1)])
        for _ in range(2)
    )
    assert tnsim.plan(a, b, tnsim.Symmetric()).contraction.diagrams == 16
    expected = polynomial_product(a, b)
    assert_close(
        tnsim.inner(a, b, tnsim.Symmetric()),
        expected,
        scale=np.sqrt(polynomial_product(a, a) * polynomial_product(b, b)),
    )


@pytest.mark.crossing
@backends.with_inputs(
    ["standard", "diagonal", "mean and covariance"], ["standard", "mean and covariance"]
)
@pytest.mark.parametrize("name", cases.DEEP | cases.THREE)
def test_closure_against_joint_gaussians(name, inputs, rng):
    a, b = cases.pair((cases.DEEP | cases.THREE)[name], rng)
    metric = tnsim.GaussianClosure(*cases.INPUTS[inputs](rng))
    check(a, b, metric, lambda p, q: closure_products(p, q, metric))
    assert not tnsim.similarity(a, b, metric).exact


@pytest.mark.crossing
@backends.both
@pytest.mark.parametrize("metric", [tnsim.TreeSymmetric(), tnsim.Frobenius()], ids=lambda m: m.name)
@pytest.mark.parametrize("name", cases.SHALLOW | cases.DEEP | cases.THREE)
def test_tree_metrics_against_dense_tensors(name, metric, rng):
    a, b = cases.pair((cases.SHALLOW | cases.DEEP | cases.THREE)[name], rng)
    check(a, b, metric, lambda p, q: dense_product(p, q, isinstance(metric, tnsim.TreeSymmetric)))
    assert tnsim.similarity(a, b, metric).exact


@backends.both
@pytest.mark.parametrize("name", ["bilinear biases", "lerp residual", "embedded"])
def test_differences_expand_by_bilinearity(name, rng):
    (a, b), (c, _) = cases.pair(cases.SHALLOW[name], rng), cases.pair(cases.SHALLOW[name], rng)
    metric = tnsim.Gaussian(*cases.INPUTS["mean and covariance"](rng))
    diff = b - 0.5 * c
    dd = sum(
        x * y * expected_products(p, q, metric)
        for x, p in ((1, b), (-0.5, c))
        for y, q in ((1, b), (-0.5, c))
    )
    ad = expected_products(a, b, metric) - 0.5 * expected_products(a, c, metric)
    aa = expected_products(a, a, metric)
    scale = np.sqrt(aa.sum() * dd.sum())
    assert_close(tnsim.inner(a, diff, metric), ad.sum(), scale=scale, rtol=TOLERANCE)
    assert_close(tnsim.similarity(a, diff, metric), ad.sum() / scale, scale=1.0, rtol=TOLERANCE)
    assert_close(tnsim.slices(a, diff, metric), ad / np.sqrt(aa * dd), scale=1.0, rtol=TOLERANCE)
    x = rng.normal(size=(5, a.d_in))
    assert_close(diff(x), b(x) - 0.5 * c(x), rtol=1e-13)


def test_hermite_weights_are_the_gaussian_moments():
    """All joinings at S = m = 1 sum to E[x^N] for x ~ N(1, 0): one, whatever the split into bra and ket."""
    from tnsim.metrics import orbits as diagrams

    for bra in range(6):
        for ket in range(6):
            assert sum(j.weight for j in diagrams.gaussian(bra, ket, False)) == 1
    assert sum(j.weight for j in diagrams.gaussian(5, 5, True)) == 945
