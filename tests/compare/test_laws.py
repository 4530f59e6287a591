"""Laws: what leaves the function alone leaves the similarity at 1; inner products are inner products."""

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import bilinear, linear
from refusals import refused

import tnsim

METRICS = {
    "tree": tnsim.TreeSymmetric(),
    "closure": tnsim.GaussianClosure(),
    "gaussian": tnsim.Gaussian(),
}
SEEDS = st.integers(0, 2**32 - 1)
LAWS = settings(max_examples=15)


def replaced(layer, left, right, down, left_bias, right_bias):
    return tnsim.Bilinear(left, right, down, left_bias, right_bias, layer.down_bias)


def permuted(rng, x):
    p = rng.permutation(x.rank)
    return replaced(x, x.left[p], x.right[p], x.down[:, p], x.left_bias[p], x.right_bias[p])


def rescaled(rng, x):
    s, t = (
        np.exp(rng.normal(size=x.rank)),
        np.exp(rng.normal(size=x.rank)) * rng.choice([-1, 1], x.rank),
    )
    return replaced(
        x,
        x.left * s[:, None],
        x.right * t[:, None],
        x.down / (s * t),
        x.left_bias * s,
        x.right_bias * t,
    )


def swapped(rng, x):
    which = rng.random(x.rank) < 0.5
    left, right = (
        np.where(which[:, None], p, q) for p, q in ((x.left, x.right), (x.right, x.left))
    )
    left_bias, right_bias = (
        np.where(which, p, q) for p, q in ((x.left_bias, x.right_bias), (x.right_bias, x.left_bias))
    )
    return replaced(x, left, right, x.down, left_bias, right_bias)


def split(rng, x):
    n, share = rng.integers(x.rank), rng.uniform(0.1, 0.9)
    rows = np.append(np.arange(x.rank), n)
    down = x.down[:, rows].copy()
    down[:, n] *= share
    down[:, -1] *= 1 - share
    return replaced(x, x.left[rows], x.right[rows], down, x.left_bias[rows], x.right_bias[rows])


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("change", [permuted, rescaled, swapped, split])
@pytest.mark.parametrize("metric", METRICS)
@LAWS
@given(seed=SEEDS)
def test_hidden_symmetries_leave_similarity_at_one(metric, change, seed):
    rng = np.random.default_rng(seed)
    layers = [linear(rng, 3, 3, True), bilinear(rng, 3, 4, 3, True)]
    if metric != "gaussian":
        layers.append(bilinear(rng, 3, 4, 2, True))
    other = [layers[0], *(change(rng, layer) for layer in layers[1:])]
    assert_close(
        tnsim.similarity(tnsim.Model(layers), tnsim.Model(other), METRICS[metric]),
        1,
        scale=1.0,
        rtol=1e-12,
    )


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize("metric", METRICS)
@LAWS
@given(seed=SEEDS)
def test_gauge_between_layers(metric, seed):
    """U and its inverse between two layers cancel."""
    rng = np.random.default_rng(seed)
    embed, body = linear(rng, 3, 3), bilinear(rng, 3, 4, 2)
    u = np.linalg.qr(rng.normal(size=(3, 3)))[0] * np.exp(rng.uniform(-1, 1, 3))
    inverse = np.linalg.inv(u)
    a = tnsim.Model([embed, body])
    b = tnsim.Model(
        [
            tnsim.Linear(u @ embed.weight),
            tnsim.Bilinear(body.left @ inverse, body.right @ inverse, body.down),
        ]
    )
    assert_close(tnsim.similarity(a, b, METRICS[metric]), 1, scale=1.0, rtol=1e-12)


def test_frobenius_sees_the_left_right_swap(rng):
    """The raw tensor does not have the symmetry: this is what symmetrising is for."""
    layer = bilinear(rng, 3, 4, 2)
    other = tnsim.Bilinear(layer.right, layer.left, layer.down)
    assert tnsim.similarity(tnsim.Model([layer]), tnsim.Model([other]), tnsim.Frobenius()) < 0.999


def test_means_of_models(rng):
    """Python's `sum` begins with 0, which is no other number."""
    models = [tnsim.Model([bilinear(rng, 3, 4, 2, True)]) for _ in range(3)]
    mean, x = sum(models) / 3, rng.normal(size=(5, 3))
    assert_close(mean(x), np.mean([model(x) for model in models], axis=0), scale=LARGEST)
    with_each = [tnsim.inner(model, models[0]) for model in models]
    assert_close(tnsim.inner(mean, models[0]), np.mean(with_each), scale=max(map(abs, with_each)))
    for other in (1, 0.0, None):
        with pytest.raises(TypeError):
            other + models[0]
    for divisor, words in ((0, "divided by 0"), (np.nan, "divisor of a model is nan")):
        with refused(words):
            models[0] / divisor


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
@LAWS
@given(seed=SEEDS)
def test_inner_product_laws(metric, seed):
    """Symmetry, Cauchy-Schwarz, bilinearity, and a positive semidefinite Gram matrix."""
    rng, m = np.random.default_rng(seed), METRICS[metric]
    models = [tnsim.Model([bilinear(rng, 3, 4, 2, True)]) for _ in range(4)]
    gram = np.array([[tnsim.inner(p, q, m) for q in models] for p in models])
    scale = np.abs(gram).max()
    assert_close(gram, gram.T, scale=LARGEST, rtol=1e-12)
    assert np.linalg.eigvalsh(gram).min() > -1e-12 * scale
    cosine = gram / np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
    assert np.abs(cosine).max() <= 1 + 1e-12
    a, b, c, _ = models
    assert_close(
        tnsim.inner(a + 2.0 * b, c, m), gram[0, 2] + 2 * gram[1, 2], scale=scale, rtol=1e-12
    )
    assert_close(
        tnsim.similarity(-1.0 * a, b, m), -tnsim.similarity(a, b, m), scale=1.0, rtol=1e-13
    )
