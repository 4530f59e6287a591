"""Gauss rules against known moments, and metrics of independent inputs against their sums."""

import contextlib
import copy
import dataclasses
import itertools
import math
import re

import cases
import jax
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import bilinear
from refusals import refused
from scipy import stats

import tnsim
from tnsim.metrics.finite_measures import NAMED, marginal, rule_of_moments
from tnsim.metrics.input_moments import hermite_rule


def double_factorial(n):
    return math.prod(range(n, 0, -2))


def half_normal(k):
    return double_factorial(k - 1) * (math.sqrt(2 / math.pi) if k % 2 else 1.0)


def bimodal(k):
    normal = [0.3**j * double_factorial(j - 1) * (j % 2 == 0) for j in range(k + 1)]
    return sum(math.comb(k, j) * normal[j] * (k % 2 == 0 or j % 2) for j in range(k + 1)) * (
        k % 2 == 0
    )


MOMENTS = {
    "normal": lambda k: double_factorial(k - 1) * (k % 2 == 0),
    "half-normal": half_normal,
    "uniform": lambda k: (k % 2 == 0) / (k + 1),
    "laplace": lambda k: math.factorial(k) * 2 ** (-k / 2) * (k % 2 == 0),
    "bimodal": bimodal,
    "spikes": lambda k: (0.25 * 2**k * double_factorial(k - 1) if k else 1.0) * (k % 2 == 0),
    "bernoulli": lambda k: 0.5 if k else 1.0,
    "signs": lambda k: float(k % 2 == 0),
}


@pytest.mark.crossing
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("nodes", [1, 2, 5, 33])
def test_rules_have_the_moments_of_their_distribution(name, nodes):
    """Relative to E|x|^k, for odd k to the bound sqrt(E x^(k-1) E x^(k+1)) of Cauchy and Schwarz."""
    x, log_weights = marginal(name).rule(nodes)
    for k in range(2 * nodes):
        size = math.sqrt(MOMENTS[name](k - k % 2)) * math.sqrt(MOMENTS[name](k + k % 2))
        assert_close(np.exp(log_weights) @ x**k, MOMENTS[name](k), scale=size, rtol=1e-11)


def test_draws_have_these_moments_too(rng):
    for name, one in NAMED.items():
        x = one.draw(rng, (200_000,))
        for k in (1, 2, 4):
            error = np.std(x**k) / np.sqrt(len(x))
            assert abs(np.mean(x**k) - MOMENTS[name](k)) < 6 * error + 1e-12


def test_moments_alone_give_the_same_rules():
    moments = [float(MOMENTS["normal"](k)) for k in range(24)]
    ours, known = rule_of_moments(moments, 12), hermite_rule(12)
    assert_close(ours.nodes, known.nodes, scale=LARGEST, rtol=1e-12)
    assert_close(ours.log_weights, known.log_weights, scale=1.0, rtol=1e-10)
    two_points = rule_of_moments([1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], 4)
    assert_close(two_points.nodes, [0, 1], scale=1.0, rtol=1e-12)
    with refused("those of no distribution"):
        rule_of_moments([1, 0, -1, 0], 2)
    with refused(r"need the moments up to E\[x\^5\], found 4"):
        rule_of_moments([1, 0, 1, 0], 3)


@pytest.mark.parametrize("case", ["two with biases", "two residual"])
def test_independent_inputs_are_summed_exactly(case, rng):
    """Against every combination of the points of three finite distributions."""
    a, b = cases.pair(cases.DEEP[case], rng)
    given = [(rng.normal(size=4), rng.uniform(size=4)) for _ in range(3)]
    metric = tnsim.Product([given[0], "signs", given[1]])
    p = [given[0][1] / given[0][1].sum(), np.ones(2) / 2, given[1][1] / given[1][1].sum()]
    x = np.array(list(itertools.product(given[0][0], [-1, 1], given[1][0])))
    w = np.array([math.prod(one) for one in itertools.product(*p)])
    value = tnsim.inner(a, b, metric)
    assert_close(value, w @ (a(x) * b(x)).sum(axis=1), rtol=1e-11)
    assert (value.exact, value.route) == (True, "quadrature")
    gaussian, normal = tnsim.similarity(a, b), tnsim.similarity(a, b, tnsim.Product("normal"))
    assert_close(normal, gaussian, scale=1.0, rtol=1e-10)
    moments = np.array([float(MOMENTS["uniform"](k)) for k in range(10)])
    by_moments = tnsim.slices(a, b, tnsim.Product(moments))
    assert_close(by_moments, tnsim.slices(a, b, tnsim.Product("uniform")), scale=1.0, rtol=1e-10)


def test_many_inputs_are_sampled(rng):
    a, b = (tnsim.Model([bilinear(rng, 3, 3, 2), bilinear(rng, 2, 2, 2)]) for _ in range(2))
    for given in ("laplace", ["uniform", "bernoulli", "bimodal"]):
        exact = tnsim.similarity(a, b, tnsim.Product(given))
        estimate = tnsim.similarity(a, b, tnsim.Product(given, samples=60_000))
        assert abs(exact - estimate) < 6 * estimate.standard_error
        assert (estimate.exact, estimate.route) == (False, "sampling")
    wide = [tnsim.Model([bilinear(rng, 60, 3, 2), bilinear(rng, 2, 2, 2)]) for _ in range(2)]
    with refused(r"use Product\(..., samples=100_000\), an estimate", tnsim.TooLarge):
        tnsim.similarity(*wide, tnsim.Product("uniform"))


def test_what_is_no_distribution_is_refused(rng):
    a, b = cases.pair(cases.DEEP["two bilinear"], rng)
    for given, message in (
        ("cauchy", "no distribution is called 'cauchy'; known are normal"),
        ([2.0, 1.0], "moments are finite numbers"),
        ([[1.0, 0, 1, 0], [1, 0, 2, 0]], r"found an array of shape \(2, 4\)"),
        ([1, 1j], r"found an array of shape \(2,\)"),
        (([1.0], [-1.0]), "weights not negative"),
    ):
        with refused(message):
            tnsim.Product(given if isinstance(given, str | tuple) else np.array(given))
    with refused("2 distributions, but the models read 3"):
        tnsim.similarity(a, b, tnsim.Product(["normal", "signs"]))
    with refused("nothing can be drawn from given moments"):
        tnsim.similarity(a, b, tnsim.Product(np.array([1.0, 0, 1]), samples=100))


def test_a_distribution_of_scipy_is_told_by_the_moments_that_a_refusal_names(rng):
    a, b = (tnsim.Model([bilinear(rng, 2, 2, 1, biases=True)]) for _ in range(2))
    for d in (stats.gamma(2.5), stats.beta(2, 0.5), stats.binom(3, 0.4)):
        with refused(r"d.moment\(k\) for k in range\(2 \* n \+ 2\)") as refusal:
            tnsim.Product(["normal", d])
        said = re.search(r"np.array\(.*\)", str(refusal.value)).group()
        moments = eval(said, {"np": np, "d": d, "n": a.degree, "range": range})
        value = tnsim.inner(a, b, tnsim.Product(["signs", moments]))
        expected = sum(d.expect(lambda x, s=s: product(a, b, s, x)) for s in (-1.0, 1.0)) / 2
        assert_close(value, expected, scale=abs(expected), rtol=1e-9)


def product(a, b, first, second):
    x = np.stack([np.full(np.shape(second), first), second], axis=-1)
    return (a(x) * b(x))[..., 0]


@pytest.mark.parametrize("given", [lambda x: (x, np.ones(2)), lambda x: [x, "normal"]])
def test_traced_distributions_are_refused(given):
    with refused("distributions of Product are data, found traced arrays"):
        jax.jit(lambda x: tnsim.Product(given(x)).points)(np.ones(2))


def test_moments_of_a_few_points_are_those_of_a_distribution(rng):
    """Rounded, they leave squares of the recurrence that are zero up to their rounding."""
    for count in (1, 2, 3) * 10:
        nodes, weights = rng.normal(size=count), rng.dirichlet(np.ones(count))
        moments = [1.0, *(float(weights @ nodes**k) for k in range(1, 10))]
        x, log_weights = rule_of_moments(moments, nodes=5)
        for k in range(10):
            size = float(weights @ abs(nodes) ** k)
            assert_close(np.exp(log_weights) @ x**k, moments[k], scale=size, rtol=1e-11)


def test_moments_far_from_zero_leave_few_digits_of_a_spread():
    """The fourth power of a mean of 1e4 is rounded by 1, and that of a normal number is 3."""
    for mean, warned in ((1000, False), (10_000, True)):
        moments = [
            float(
                sum(
                    math.comb(k, j) * mean ** (k - j) * int(MOMENTS["normal"](j))
                    for j in range(k + 1)
                )
            )
            for k in range(6)
        ]
        expected = pytest.warns(tnsim.PrecisionWarning, match="leave about 0 digits of the spread")
        with expected if warned else contextlib.nullcontext():
            rule = rule_of_moments(moments, nodes=3)
        if not warned:
            assert_close(rule.nodes - mean, hermite_rule(3).nodes, scale=LARGEST)


def test_weights_of_nodes_are_shares_whatever_their_size():
    line = tnsim.Model([tnsim.Linear([[1.0]])])
    for size in (1e-320, 1.0, 1e308):
        assert tnsim.inner(line, line, tnsim.Product(([0.0, 2.0], [size, size]))) == 2.0


def test_moments_that_go_on_after_all_points_are_found_are_refused():
    """A variance of zero leaves no room for a third moment."""
    with refused("of no distribution"):
        rule_of_moments([1, 0, 0, 5, 0, 0], nodes=3)
    assert_close(rule_of_moments([3.0**k for k in range(6)], nodes=3).nodes, [3.0])


def test_moments_that_are_of_mass_1_up_to_rounding(rng):
    """Sums of weights that a float does not add up to 1; the same distribution as nodes, by hand."""
    square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
    seen = set()
    for _ in range(50):
        nodes, weights = rng.normal(size=7), rng.random(7)
        weights /= weights.sum()
        moments = [float(sum(weights * nodes**k)) for k in range(10)]
        seen.add(moments[0])
        found = tnsim.inner(square, square, tnsim.Product(np.array(moments)))
        assert abs(found - moments[4]) <= 1e-12 * moments[4]
    assert len(seen) > 1
    with refused("moments are finite numbers"):
        tnsim.Product(np.array([1 + 1e-9, 0.0, 1.0]))


@pytest.mark.parametrize(
    "given", ["uniform", ["uniform", "normal"], [[1, 0, 1, 0, 3, 0, 15], [1, 0, 2, 0, 12, 0, 120]]]
)
def test_a_setting_is_replaced_without_its_distributions(given, rng):
    """Two arrays of moments are no nodes and weights, though both are pairs of arrays."""
    models = [tnsim.Model([tnsim.Bilinear(*rng.normal(size=(3, 2, 2)))]) for _ in range(2)]
    metric = tnsim.Product(given)
    again = dataclasses.replace(metric, seed=7)
    assert again.seed == 7
    assert tnsim.inner(*models, again) == tnsim.inner(*models, metric)


@pytest.mark.parametrize("given", [np.array([1.0, 0.0, 1.0, 0.0, 3.0, 0.0]), ([0.0, 1.0], [1, 3])])
def test_equal_distributions_are_one_structure(given):
    first, second = (tnsim.Product(copy.deepcopy(given)) for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert hash(first.marginals) == hash(second.marginals)
    line = tnsim.Model([tnsim.Linear([[1.0]])])
    inner = jax.jit(lambda metric, model: tnsim.inner(model, model, metric))
    assert float(inner(first, line)) == float(inner(second, line))
    exact = float(tnsim.inner(line, line, first))
    assert_close(float(inner(first, line)), exact, rtol=1e-6, limited_by="float32")


def test_weights_beyond_the_range_of_sums_are_shares(rng):
    line, x = tnsim.Model([tnsim.Linear([[1.0]])]), rng.normal(size=(3, 1))
    shares = [0.5, 1.0, 1.0]
    found, expected = (
        tnsim.inner(line, line, tnsim.Empirical(x, weights=np.array(shares) * size))
        for size in (1.5e308, 1.0)
    )
    assert_close(float(found), float(expected), rtol=1e-14)
