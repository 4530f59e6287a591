"""Layers that are products of five or more factors: against quadrature and dense tensors, or refused at once."""

import itertools
import time

import jax
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import dense_layer, quadrature, symmetric_part
from refusals import refused

import tnsim

WIDTH = 3


def product(rng, order, *, equal=False, width=WIDTH, skip=None):
    """A model of one product of affine maps, all equal or all different."""
    rows = [rng.normal(size=(width, width)) / width for _ in range(1 if equal else order)]
    biases = [rng.normal(size=width) / 3 for _ in rows]
    times = order // len(rows)
    down = rng.normal(size=(width, width))
    layer = tnsim.Multilinear(rows * times, down, biases * times, rng.normal(size=width))
    return tnsim.Model([layer if skip is None else tnsim.Residual(layer, skip, 0.5)])


@pytest.mark.crossing
@pytest.mark.parametrize("order", [5, 6, 8])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("skip", [None, 0.7])
def test_a_gaussian_over_many_factors_is_quadrature(order, equal, skip, rng):
    a, b = product(rng, order, equal=equal, skip=skip), product(rng, order, skip=skip)
    partner = product(rng, 2)
    mean, root = rng.normal(size=WIDTH), rng.normal(size=(WIDTH, WIDTH)) / 2
    metric = tnsim.Gaussian(mean, root @ root.T)
    inputs, weights = quadrature(order + 1, metric.mean, metric.cov)

    def expected(one, two):
        return (weights[:, None] * one(inputs) * two(inputs)).sum()

    def length(one):
        return expected(one, one) ** 0.5

    for one, two in itertools.combinations_with_replacement([a, b, partner], 2):
        scale = length(one) * length(two)
        for alike in (metric, tnsim.GaussianClosure(metric.mean, metric.cov)):
            assert_close(tnsim.inner(one, two, alike), expected(one, two), scale=scale, rtol=2e-11)
    result = tnsim.pairwise([a, b, partner], metric)
    cosine = expected(a, b) / (length(a) * length(b))
    assert_close(result.similarity[0, 1], cosine, scale=1.0, rtol=2e-11)
    shares = tnsim.paths(a, b, metric, by="unit").values
    assert_close(shares.sum(), expected(a, b), scale=length(a) * length(b), rtol=2e-11)


@pytest.mark.slow
@pytest.mark.parametrize("equal", [False, True])
def test_wide_powers_are_compared_or_refused_at_once(equal, rng):
    """Ten minutes of pairings; of equal factors a single power is left."""
    start = time.perf_counter()
    for order, width in ((6, 16), (6, 64), (8, 16), *(((8, 64),) if equal else ())):
        a, b = (product(rng, order, equal=equal, width=width) for _ in range(2))
        plan = tnsim.plan(a, b)
        assert plan.route == "kernels"
        assert plan.fact("rows of hidden units") == width * (1 if equal else 2 ** (order - 1))
        if equal or width == 16:
            assert abs(tnsim.similarity(a, b)) <= 1
        for metric in (tnsim.Symmetric(), tnsim.TreeSymmetric()):
            with refused(r"too many for a product of .* tnsim.pairwise", tnsim.TooLarge):
                tnsim.similarity(a, b, metric)
    assert time.perf_counter() - start < 60


def test_many_factors_are_compared_by_coefficients(rng):
    a, b = product(rng, 6), product(rng, 6)

    one, two = (symmetric_part(dense_layer(model.layers[0]))[1:] for model in (a, b))
    expected = (one * two).sum() / np.sqrt((one**2).sum() * (two**2).sum())
    for metric in (tnsim.Symmetric(), tnsim.TreeSymmetric()):
        found = tnsim.pairwise([a, b], metric).similarity[0, 1]
        assert_close(found, expected, scale=1.0, rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("equal", [False, True])
def test_gradients_through_many_factors(equal, rng):
    """Equal factors are one power in a value, and in a derivative as many as they are."""
    a, b = product(rng, 6, equal=equal), product(rng, 6)
    (layer,) = a.layers

    def similarity(first):
        legs = [first, *layer.legs[1:]]
        moved = tnsim.Multilinear(legs, layer.down, layer.leg_biases, layer.down_bias)
        return tnsim.similarity(tnsim.Model([moved]), b)

    start, direction, step = layer.legs[0], rng.normal(size=(WIDTH, WIDTH)), 1e-5
    ends = [float(similarity(start + t * step * direction)) for t in (1, -1)]
    difference = (ends[0] - ends[1]) / (2 * step)
    with jax.enable_x64(True):  # JAX would round the weights to float32, which moves the derivative
        gradients = [jax.grad(similarity)(start), jax.jit(jax.grad(similarity))(start)]
    for gradient in gradients:
        found = (np.asarray(gradient) * direction).sum()
        assert_close(found, difference, scale=LARGEST, rtol=1e-6, limited_by="central differences")
