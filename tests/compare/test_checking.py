"""Sampling beside the closed form, and metrics fitted to data."""

import dataclasses

import cases
import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear
from refusals import refused
from seeds import generator
from sequence_oracles import attention

import tnsim
from tnsim.compare import similarity


@pytest.mark.slow
def test_check_agrees_where_the_metric_is_exact(rng):
    for name in ("two with biases", "two residual"):
        a, b = cases.pair(cases.DEEP[name], rng)
        metric = tnsim.Gaussian(0.1 * rng.normal(size=3), rng.uniform(0.2, 0.6, size=3))
        found = tnsim.check(a, b, metric, samples=100_000, seed=1)
        assert found.similarity == tnsim.similarity(a, b, metric) and found.similarity.exact
        assert_close(
            abs(found.estimate - found.similarity), abs(found.deviation) * found.standard_error
        )
        assert abs(found.deviation) < 5 and found.standard_error < 0.05
        assert tnsim.check(a, b, metric, samples=100_000, seed=1) == found


@pytest.mark.slow
def test_check_shows_what_a_closure_misses():
    rng = generator(7)
    a, b = (tnsim.Model([bilinear(rng, 3, 4, 2), bilinear(rng, 2, 4, 2)]) for _ in range(2))
    closure, exact = (
        tnsim.check(a, b, m, samples=200_000) for m in (tnsim.GaussianClosure(), tnsim.Gaussian())
    )
    assert abs(closure.deviation) > 5 * abs(exact.deviation) and not closure.similarity.exact


def test_standard_error_shrinks_with_samples(rng):
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    few, many = (tnsim.check(a, b, samples=n) for n in (4096, 65536))
    assert many.standard_error < 0.6 * few.standard_error and many.samples == 65536


def test_every_sample_asked_for_is_drawn(rng, monkeypatch):
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    drawn, draws = [], similarity.draws

    def counting(*arguments):
        points = draws(*arguments)
        block = points.block
        counted = lambda start, stop: drawn.append(stop - start) or block(start, stop)  # noqa: E731
        return dataclasses.replace(points, block=counted)

    monkeypatch.setattr(similarity, "draws", counting)
    for samples in (64, 1000, 163_841):
        drawn.clear()
        assert tnsim.check(a, b, samples=samples).samples == sum(drawn) == samples
        assert max(drawn) - min(drawn) <= 1
    assert tnsim.check(a, b, samples=1000, progress=True) == tnsim.check(a, b, samples=1000)


def test_check_refuses_what_it_cannot_sample(rng):
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    with refused("only Gaussian metrics and Categorical are expectations"):
        tnsim.check(a, b, tnsim.TreeSymmetric())
    with refused("a check needs at least 64 samples, found 10"):
        tnsim.check(a, b, samples=10)
    with refused("samples take .* multiplications, more than the 1e.14", tnsim.TooLarge):
        tnsim.check(a, b, samples=10**15)
    with refused(r"the seed of a check must be 0 or more, .* found -1"):
        tnsim.check(a, b, seed=-1)


def test_check_stands_any_size(rng):
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    layer = a.layers[0]
    for size in (1e200, 1e-200):
        far = tnsim.Model([tnsim.Bilinear(layer.left, layer.right, size * layer.down)])
        near = tnsim.check(a, b, samples=64)
        assert_close(tnsim.check(far, b, samples=64).estimate, near.estimate, scale=1.0, rtol=1e-12)


def test_fit(rng):
    data = rng.normal(size=(500, 3)) @ rng.normal(size=(3, 3)) + rng.normal(size=3)
    for cls in (tnsim.Gaussian, tnsim.GaussianClosure):
        metric = cls.fit(data)
        assert_close(metric.mean, data.mean(axis=0))
        assert_close(metric.cov, np.cov(data.T, bias=True))
        images = cls.fit(data.reshape(500, 1, 3, 1))  # vectors to models
        assert (images.mean == metric.mean).all() and (images.cov == metric.cov).all()
    a, b = cases.pair(cases.SHALLOW["linear"], rng)
    assert_close(tnsim.inner(a, b, metric), np.mean(np.sum(a(data) * b(data), axis=1)), rtol=1e-10)
    with refused("needs at least two samples, found 1"):
        tnsim.Gaussian.fit(data[:1])
    with refused("samples has 1 NaN"):
        tnsim.Gaussian.fit(np.where(np.arange(6).reshape(2, 3) == 4, np.nan, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric", [tnsim.Gaussian(np.array([0.2, -0.1])), tnsim.Categorical(np.array([0.3, 0.7]))]
)
def test_sequences_are_sampled_as_their_metric_says(metric, rng):
    a, b = (
        tnsim.Model([tnsim.Residual(attention(rng, 2, 1, 2, 1, 2, True))], n_ctx=2)
        for _ in range(2)
    )
    found = tnsim.check(a, b, metric, samples=20_000)
    assert abs(found.deviation) < 6
    assert found.standard_error < 0.2


def test_a_check_says_the_length_of_sequences_as_other_verbs_do(rng):
    a, b = (tnsim.Model([attention(rng, 2, 1, 2, 2, 2)]) for _ in range(2))
    found = tnsim.check(a, b, n_ctx=2, samples=4096)
    assert found.similarity == tnsim.similarity(a, b, n_ctx=2) and abs(found.deviation) < 5


def test_errors_of_an_estimate_and_of_its_check_add_up(rng):
    weights = [rng.normal(size=(6, 3)), rng.normal(size=(4, 6)), rng.normal(size=(2, 4))]

    def network(sign):
        def run(x):
            for n, weight in enumerate(weights):
                x = x @ weight.T if n == 0 else np.maximum(x, sign * x) @ weight.T
            return x

        return run

    metric = tnsim.Gaussian(mean=np.zeros(3), samples=1024)
    found = tnsim.check(network(0.0), network(0.3), metric, samples=1024, seed=3)
    both = np.hypot(found.standard_error, found.similarity.standard_error)
    assert_close(found.deviation, (found.similarity - found.estimate) / both, rtol=1e-12)
    assert abs(found.deviation) < 5 and found.similarity.inputs == 1024
