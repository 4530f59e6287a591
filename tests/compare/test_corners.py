"""Corners of the numbers: parts that are zero, float32 weights, products of one affine map."""

import jax
import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear, expected_products, in_dtype, linear
from refusals import refused
from sequence_oracles import attention

import tnsim

WHOLE = [tnsim.Gaussian(), tnsim.Symmetric()]
LAYERED = [tnsim.GaussianClosure(), tnsim.TreeSymmetric(), tnsim.Frobenius()]


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("metric", [*WHOLE, *LAYERED])
def test_a_zero_term_changes_nothing_however_small_the_others_are(metric, rng):
    layers = [[bilinear(rng, 2, 2, 2), bilinear(rng, 2, 2, 2)] for _ in range(2)]
    a, b = (jax.tree.map(lambda x: 2.0**-300 * x, tnsim.Model(both)) for both in layers)
    zero = jax.tree.map(np.zeros_like, a)
    assert_close(tnsim.similarity(a + zero, b, metric), tnsim.similarity(a, b, metric))
    sign, log = tnsim.log_inner(a + zero, b, metric)
    assert_close((sign, log), tnsim.log_inner(a, b, metric), scale=1.0)
    found = tnsim.pairwise([a + zero, b], metric)
    assert_close(found.log_inner[0, 1], log, scale=1.0)


@pytest.mark.parametrize("metric", [*WHOLE, *LAYERED])
def test_float32_weights_are_not_rounded_again(metric, rng):
    """As checkpoints hold them, with residuals whose scale is no power of two."""
    models = []
    for _ in range(2):
        skips = tnsim.Residual(linear(rng, 2, 2), 0.3, 0.35), bilinear(rng, 2, 3, 2)
        models.append(in_dtype(tnsim.Model([tnsim.Residual(skips[1], 0.7, 0.35), *skips]), "f4"))
    wide = [in_dtype(model, "f8") for model in models]
    wanted = tnsim.similarity(*wide, metric)
    assert_close(tnsim.similarity(*models, metric), wanted, scale=1.0, rtol=1e-14)
    assert_close(tnsim.pairwise(models, metric).similarity[0, 1], wanted, scale=1.0, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [tnsim.GaussianClosure(), tnsim.Categorical()])
def test_float32_attention_is_not_rounded_again(metric, rng):
    models = []
    for _ in range(2):
        attends = tnsim.Residual(attention(rng, 3, 1, 2, 2, 3, True), 0.7, 0.35)
        model = tnsim.Model([linear(rng, 4, 3, True), attends, linear(rng, 3, 2)], n_ctx=2)
        models.append(in_dtype(model, "f4"))
    wide = [in_dtype(model, "f8") for model in models]
    wanted = tnsim.similarity(*wide, metric)
    assert_close(tnsim.similarity(*models, metric), wanted, scale=1.0, rtol=1e-14)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("metric", [*WHOLE, *LAYERED])
def test_a_product_of_one_map_is_a_linear_layer(metric, rng):
    leg, down, first, last = (rng.normal(size=shape) for shape in ((3, 2), (2, 3), 3, 2))
    layers = [
        tnsim.Multilinear([leg], down, [first], last),
        tnsim.Linear(down @ leg, down @ first + last),
    ]
    layers = [tnsim.Residual(layer, 0.5, 0.7) for layer in layers]
    rest = bilinear(rng, 2, 2, 2)
    a, b = (tnsim.Model([rest, layer, rest]) for layer in layers)
    assert_close(tnsim.similarity(a, b, metric), 1, scale=1.0, rtol=1e-11)
    assert_close(tnsim.pairwise([a, b], metric).similarity[0, 1], 1, scale=1.0, rtol=1e-11)
    assert_close(tnsim.similarity(a - 1.5 * b, b, metric), -1, scale=1.0, rtol=1e-10)
    if isinstance(metric, tnsim.Gaussian):
        assert_close(tnsim.inner(a, a), expected_products(a, a, metric).sum())
    if metric in LAYERED:
        a, b = (tnsim.Model([layer, rest], n_ctx=2) for layer in layers)
        assert_close(tnsim.similarity(a, b, metric), 1, scale=1.0, rtol=1e-11)


def test_covariances_are_symmetric_and_variances_positive_in_every_way_to_compute():
    assert tnsim.Gaussian(cov=np.array([1.0, -1e-9])).cov.tolist() == [1.0, 0.0]
    cov = tnsim.Gaussian(cov=np.array([[1.0, 0.3 + 1e-9], [0.3, 1.0]])).cov
    assert cov[0, 1] == cov[1, 0]


def test_probabilities_sum_to_one_in_every_way_to_compute(rng):
    p = np.array([0.3, 0.7 + 5e-7])
    table = tnsim.Model([linear(rng, 2, 2)], n_ctx=2)
    found = tnsim.inner(table, table, tnsim.Categorical(p))
    exact = tnsim.inner(table, table, tnsim.Categorical(p / p.sum()))
    assert_close(found, exact, rtol=1e-14)


def test_arithmetic_on_slices_gives_plain_numbers(rng):
    a, b = (tnsim.Model([linear(rng, 2, 3)]) for _ in range(2))
    found = tnsim.slices(a, b, tnsim.Empirical(rng.normal(size=(40, 2))))
    assert found[:1].metric == "empirical" and len(found.standard_error) == 3
    for other in (2 * found, found.mean(), abs(found), found @ found):
        assert not hasattr(other, "standard_error"), other


@pytest.mark.parametrize("metric", [*LAYERED, tnsim.Gaussian(), tnsim.Empirical([[1.0]])])
def test_degrees_beyond_floats_are_refused(metric):
    tenth = tnsim.Multilinear([np.full((1, 1), 1.5)] * 10, np.ones((1, 1)))
    model = tnsim.Model([tenth] * 101)
    for compare in (tnsim.similarity, tnsim.inner, tnsim.log_inner, tnsim.slices, tnsim.plan):
        with refused(r"degree 10\^101 .* fewer layers"):
            compare(model, model, metric)
    with refused(r"degree 10\^101 .* fewer layers"):
        tnsim.pairwise([model], metric)


def test_many_layers_under_an_exact_metric_are_refused_at_once(rng):
    """Whatever few inputs they read: the nodes alone would take hours."""
    models = [tnsim.Model([bilinear(rng, 1, 1, 1) for _ in range(depth)]) for depth in (14, 60)]
    for model in models:
        with refused("GaussianClosure", tnsim.TooLarge):
            tnsim.similarity(model, model)
        with refused("GaussianClosure", tnsim.TooLarge):
            tnsim.pairwise([model])
