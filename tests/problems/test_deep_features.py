"""Polynomials as vectors: against quadrature, dense tensors and diagrams, whole and in blocks."""

import itertools
import tracemalloc

import cases
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from forced import OF_RUNS, take
from oracles import bilinear, dense_symmetric_product, expected_products, linear, multilinear
from refusals import refused

import tnsim
from tnsim.problems import features, packed, polynomial_space
from tnsim.problems.features import spaces
from tnsim.problems.layer_kinds import kinds
from tnsim.problems.polynomial_space import IndexBlock

pytestmark = pytest.mark.usefixtures("diagrams")

CASES = cases.SHALLOW | cases.DEEP | cases.UNEVEN | cases.THREE


def vectors(models, metric):
    """Features (models, out, numbers), by NumPy alone."""
    (space,) = spaces([kinds(model) for model in models], metric)
    parts = []
    for part in space.parts:
        inputs = part.inputs(metric)
        parts.append(np.stack([part.vector(model, inputs) for model in models]))
    found = np.concatenate(parts, axis=2)
    assert found.shape[:2] == (len(models), space.d_out)
    # Features that receptive fields have in common are counted for each of them.
    assert found.shape[2] <= space.length if space.is_sparse else found.shape[2] == space.length
    return found


def agrees(a, b, metric, product):
    """Inner products per output, relative to the norms of the two models compared."""
    first, second = vectors([a, b], metric)
    for (x, one), (y, two) in itertools.product([(first, a), (second, b)], repeat=2):
        scale = np.sqrt(np.sum(x**2) * np.sum(y**2))
        assert_close(np.sum(x * y, axis=1), product(one, two), scale=scale, rtol=1e-12)


def cosine(a, b, metric):
    first, second = vectors([a, b], metric)
    return np.sum(first * second) / np.sqrt(np.sum(first**2) * np.sum(second**2))


@pytest.mark.crossing
@pytest.mark.parametrize("inputs", cases.INPUTS)
@pytest.mark.parametrize("case", CASES)
def test_gaussian(case, inputs, rng):
    """Biases, skips, linear layers, models of different depth; mean and covariance of any rank."""
    metric = tnsim.Gaussian(*cases.INPUTS[inputs](rng))
    a, b = cases.pair(CASES[case], rng)
    agrees(a, b, metric, lambda one, two: expected_products(one, two, metric))


@pytest.mark.parametrize("case", cases.SHALLOW | cases.DEEP)
def test_symmetric(case, rng):
    a, b = cases.pair((cases.SHALLOW | cases.DEEP)[case], rng)
    agrees(a, b, tnsim.Symmetric(), dense_symmetric_product)


@pytest.mark.parametrize("biases", [False, True])
def test_products_of_three_legs(biases, rng):
    """Odd orders, under a bilinear layer and over one, and skips around three legs."""

    def cubic(*sizes):
        return multilinear(rng, 3, *sizes, biases)

    a = tnsim.Model([cubic(2, 3, 2), bilinear(rng, 2, 3, 2, biases)])
    b = tnsim.Model([bilinear(rng, 2, 2, 2, biases), cubic(2, 2, 2)])
    for metric in (tnsim.Gaussian(), tnsim.Gaussian(*cases.random_gaussian(rng, 2))):
        agrees(a, b, metric, lambda one, two, m=metric: expected_products(one, two, m))
    skip = tnsim.Residual(cubic(2, 3, 2), 0.7, 0.3)
    c = tnsim.Model([skip, linear(rng, 2, 2, True)])
    agrees(c, a, tnsim.Gaussian(), lambda x, y: expected_products(x, y, tnsim.Gaussian()))
    e = tnsim.Model([tnsim.Residual(cubic(2, 2, 2), 0.4, 0.5), linear(rng, 2, 2)])
    assert_close(
        cosine(c, e, tnsim.Symmetric()),
        tnsim.similarity(c, e, tnsim.Symmetric()),
        scale=1.0,
        rtol=1e-12,
    )


def test_small_variances_are_kept(rng):
    """Coordinates of deviations 1, 1e-12 and 0: relative to its own size none is lost."""
    cov = np.diag([1.0, 1e-24, 0.0])
    cov[0, 1] = cov[1, 0] = 0.5e-12
    metric = tnsim.Gaussian(np.ones(3), cov)
    (space,) = spaces([kinds(tnsim.Model([linear(rng, 3, 1)]))], metric)
    root = space.inputs(metric)[1][1:]
    assert root.shape == (3, 2)
    assert_close(root @ root.T, cov, rtol=1e-13)


def test_variances_of_rounding_size_are_none():
    """Vectors kept a variance of 4 units of rounding, which kernels and quadrature take for none."""
    cov = np.full((2, 2), 1.0 - 2.0**-48) + np.diag([2.0**-48] * 2)
    metric = tnsim.Gaussian(cov=cov)
    (space,) = spaces([kinds(tnsim.Model([tnsim.Linear([[1.0, -1.0]])]))], metric)
    assert space.inputs(metric)[1].shape == (2, 1)


@pytest.mark.parametrize("pairs", [True, False])
def test_blocks_are_parts_of_the_whole(pairs, rng):
    """Any blocks, orders 0 to 3 and k products as they are: together the whole, nothing twice."""
    width, k = 4, 3
    left, right = (
        {n: rng.normal(size=(k, packed.count(width, n))) for n in range(top + 1)} for top in (3, 2)
    )
    for down in (rng.normal(size=(2, k)), None):
        whole = polynomial_space.product(left, right, down, polynomial_space.whole(width), pairs)
        for edges in ((0, 1, 4), (0, 3, 4), (0, 1, 2, 3, 4)):
            blocks = [IndexBlock(width, *ends) for ends in itertools.pairwise(edges)]
            parts = [polynomial_space.product(left, right, down, block, pairs) for block in blocks]
            for order, numbers in whole.items():
                found = [part[order] for part in parts if order in part]
                found = np.concatenate(found, axis=1)
                assert_close(found, numbers, scale=LARGEST, rtol=1e-12)


@pytest.mark.parametrize("out", [None, 1, 6])
@pytest.mark.parametrize("start", [0, 10])
def test_products_take_the_memory_that_is_told(out, start, rng):
    width, k = 14, 5
    series = {n: rng.normal(size=(k, packed.count(width, n))) for n in range(3)}
    down, block = None if out is None else rng.normal(size=(out, k)), IndexBlock(width, start, 14)

    def traced():
        tracemalloc.start()
        polynomial_space.product(series, series, down, block, True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    _, measured = traced(), traced()  # tables are made first
    sizes = polynomial_space.ProductSizes((0, 1, 2), (0, 1, 2), k, out, True)
    assert 0.95 * measured < 8 * sizes.peak(block) < 1.2 * measured


def deep(rng, count):
    return [
        tnsim.Model([bilinear(rng, 3, 4, 2, True), bilinear(rng, 2, 3, 2)]) for _ in range(count)
    ]


@pytest.fixture
def blocks(monkeypatch):
    """Several blocks, whatever their size."""
    monkeypatch.setattr(polynomial_space, "_MATRIX", 30)
    with tnsim.using(tnsim.Session()):  # the blocks of a space are kept
        yield


@pytest.mark.slow
def test_pairs_of_deep_models(rng):
    """Differences, and models of another depth."""
    some = deep(rng, 4)
    some += [some[0] - some[1], tnsim.Model([bilinear(rng, 3, 2, 2)])]
    run = tnsim.pairwise(some, slices=True)
    plan = tnsim.plan_pairwise(some)
    assert run.attrs["plan"].startswith("features") and not plan.tiles.streamed
    assert_close(run.similarity[0, 5], tnsim.similarity(some[0], some[5]), scale=1.0, rtol=1e-10)
    whole = vectors([*some[:4], some[5]], tnsim.Gaussian())
    whole = np.stack([*whole[:4], whole[0] - whole[1], whole[4]])
    products = np.einsum("iof,jof->ijo", whole, whole)
    norms = np.sqrt(np.einsum("iio->io", products))
    assert_close(run.slices, products / norms[:, None] / norms, scale=1.0, rtol=1e-12)


@pytest.mark.slow
def test_vectors_too_many_to_be_kept(blocks, rng, monkeypatch):
    """They are made again, part by part, for every tile."""
    take(monkeypatch, "features", OF_RUNS)
    some = deep(rng, 144)
    room = 2 * vectors(some, tnsim.Gaussian()).nbytes - 1
    small = tnsim.Budget(memory_bytes=room)
    plan = tnsim.plan_pairwise(some, budget=small)
    assert plan.route == "features" and plan.tiles.streamed and plan.peak_bytes <= room
    made = []
    making = features.block
    monkeypatch.setattr(features, "block", lambda *a: made.append(a[2]) or making(*a))
    run = tnsim.pairwise(some, budget=small)
    whole = vectors(some, tnsim.Gaussian()).reshape(len(some), -1)
    whole /= np.linalg.norm(whole, axis=1, keepdims=True)
    assert_close(run.similarity, whole @ whole.T, scale=1.0, rtol=1e-13)
    parts = len(set(made))
    assert parts > 1 and len(made) > parts * len(some) / plan.tiles.side


def test_symmetric_pairs_and_float32(rng):
    some = deep(rng, 3)
    run = tnsim.pairwise(some, tnsim.Symmetric(), dtype="float32")
    assert run.attrs["plan"].startswith("features")
    assert_close(
        run.similarity[0, 1],
        cosine(*some[:2], tnsim.Symmetric()),
        scale=1.0,
        rtol=1e-13,
    )


def test_routes_beside_each_other(rng):
    """The fastest first; plans that take longer to find are not looked for."""
    some = [tnsim.Model([bilinear(rng, 24, 24, 24), bilinear(rng, 24, 24, 24)]) for _ in range(20)]
    plan = tnsim.plan_pairwise(some)
    (other,) = plan.others
    assert {plan.route, other.route} == {"features", "contractions"}
    assert plan.seconds < other.seconds
    assert f"or {other.route:<13} {other.multiplications:,} multiplications" in str(plan)
    narrow = tnsim.plan_pairwise(deep(rng, 3))
    assert dict(narrow.passed_over)["contractions"].startswith("the search alone: ")
    wide = tnsim.plan_pairwise(some, budget=tnsim.Budget(multiplications=3e7))
    assert wide.route == "contractions"
    assert "more than the budget of 3e+07" in dict(wide.passed_over)["features"]
    for metric in (tnsim.Gaussian(), tnsim.GaussianClosure()):
        with refused("more than the budget of 10", tnsim.TooLarge):
            tnsim.plan_pairwise(some, metric, budget=tnsim.Budget(multiplications=10))


def test_long_vectors_are_left_to_plans(rng):
    wide = tnsim.Model([bilinear(rng, 200, 2, 2), bilinear(rng, 2, 2, 1)])
    assert spaces([kinds(wide)], tnsim.Gaussian())[0].length == packed.count(200, 4) + 20101
    assert tnsim.plan_pairwise([wide, wide + 0.0 * wide]).route == "contractions"
    deeper = tnsim.Model([bilinear(rng, 2, 2, 2)] * 4)
    assert spaces([kinds(deeper)], tnsim.Gaussian()) == ()
    assert spaces([kinds(wide)], tnsim.GaussianClosure()) == ()


def test_what_a_vector_costs(rng):
    """Legs on 13 numbers of orders 0 to 2 in 3 coordinates; products of orders 0 to 2 with them."""
    model = tnsim.Model([bilinear(rng, 3, 4, 2), bilinear(rng, 2, 3, 5)])
    (space,) = spaces([kinds(model)], tnsim.Gaussian())
    first = 2 * 4 * 3 * 3 + 4 * (3 * 3 * 2 + 3 + 2)
    legs = 2 * 3 * 2 * (1 + 6)
    top = 3 * (6 * 6 * 5 + 3 * 3 * (3 + 5) + 6 + 5)
    rest = 3 * (2 * 6 * 5 + 5)
    assert space.multiplications(kinds(model)) == first + legs + top + rest
