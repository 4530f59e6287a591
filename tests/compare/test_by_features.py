"""Vectors of coefficients as a route of pairs: sums of models, precisions, and choices.

Their numbers are held to quadrature in `problems/test_deep_features.py`, the verbs in `test_verbs_and_routes.py`."""

import jax
import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear, linear

import tnsim
import tnsim.models.arrays
from tnsim.compare import by_plans, by_points
from tnsim.problems.polynomial_space import PolynomialSpace


@pytest.fixture
def features(monkeypatch):
    """Deep polynomials go by vectors, whatever the others cost."""
    monkeypatch.setattr(by_points, "gaussian_points", lambda *arguments: None)
    monkeypatch.setattr(by_plans, "_PER_DIAGRAM", np.inf)


def deep(rng, width, layers, biases):
    """Bilinear layers with skips; constants where they have biases."""
    stack = [bilinear(rng, width, width, width, biases) for _ in range(layers)]
    return tnsim.Model([tnsim.Residual(layer, 0.7, 0.4) if biases else layer for layer in stack])


def test_sums_of_models(features, rng):
    """Bilinear in both arguments, and digits where terms nearly cancel."""
    a, b, c = (deep(rng, 4, 2, True) for _ in range(3))
    by_terms = 2 * tnsim.inner(a, c) - 3 * tnsim.inner(b, c)
    assert_close(tnsim.inner(2 * a - 3 * b, c), by_terms, scale=abs(by_terms) + 1, rtol=1e-11)
    assert_close(tnsim.similarity(a - b, a - b), 1.0, rtol=1e-12)
    assert_close(tnsim.similarity(2 * a - b, b - 2 * a), -1.0, rtol=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_copy_keeps_its_coefficient(sparse, features, rng):
    """Equal weights are one model, of which each side may be another multiple."""
    weights = [rng.normal(size=shape) for shape in ((6, 4), (6, 4), (3, 6))]
    layers = [
        tnsim.Bilinear(*(tnsim.models.arrays.SparseMatrix.of(w) if sparse else w for w in weights))
    ]
    if not sparse:
        layers.append(bilinear(rng, 3, 2, 2, True))
    a, copy = tnsim.Model(layers), tnsim.Model(layers)
    assert_close(tnsim.inner(2 * a, copy), 2 * tnsim.inner(a, a), rtol=1e-13)
    assert tnsim.similarity(a, copy) == 1.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_and_answers_of_either_precision(dtype, features, rng):
    """Vectors are made in float64, so weights alone are rounded."""
    first, second = ([rng.normal(size=(3, 3)).astype(dtype) for _ in range(6)] for _ in range(2))
    a, b = (tnsim.Model([tnsim.Bilinear(*w[:3]), tnsim.Bilinear(*w[3:])]) for w in (first, second))
    wide = [
        tnsim.Model([tnsim.Bilinear(*(x.astype(float) for x in w[n : n + 3])) for n in (0, 3)])
        for w in (first, second)
    ]
    for precision in ("float32", "float64"):
        assert_close(tnsim.similarity(a, b, dtype=precision), tnsim.similarity(*wide), rtol=1e-13)


@pytest.mark.full
def test_the_cheaper_route_is_taken(rng):
    """Search is a part of the cost: of ten diagrams of two layers as of hundreds of three."""
    for layers, biases in ((2, False), (2, True), (3, False), (3, True)):
        a, b = (deep(rng, 12, layers, biases) for _ in range(2))
        assert tnsim.plan(a, b, cosine=True).route == "features"
    wide = deep(rng, 64, 2, False)
    assert tnsim.plan(wide, wide).route == "contractions"
    small = tnsim.Budget(memory_bytes=7e7)
    a, b = (deep(rng, 12, 3, False) for _ in range(2))
    assert tnsim.plan(a, b, budget=small).route == "contractions"
    narrow = tnsim.Model([linear(rng, 12, 1, False), *deep(rng, 1, 3, False).layers])
    assert tnsim.plan(narrow, narrow).route == "quadrature"
    assert tnsim.plan(a, b, tnsim.GaussianClosure()).route == "contractions"


def test_vectors_are_kept_with_models_that_nobody_can_write_to(rng, monkeypatch, features):
    """A second comparison makes the vector of the new model alone, and gives equal bits."""
    a, b, c = (deep(rng, 5, 2, True) for _ in range(3))
    made, vector = [], PolynomialSpace.vector
    monkeypatch.setattr(
        PolynomialSpace, "vector", lambda self, *rest: made.append(1) or vector(self, *rest)
    )
    first = tnsim.similarity(a, b)
    assert first.route == "features" and len(made) == 2
    assert tnsim.similarity(a, b) == first and len(made) == 2
    tnsim.similarity(a, c)
    far = tnsim.Gaussian(rng.normal(size=5))
    counts = [len(made)]
    tnsim.similarity(a, b, far)  # other inputs have other vectors
    counts.append(len(made))
    writable = jax.tree.map(np.copy, a)
    tnsim.similarity(writable, b)
    next(iter(jax.tree.leaves(writable)))[0, 0] += 1.0
    changed = tnsim.similarity(writable, b)
    counts.append(len(made))
    assert counts == [3, 5, 7]
    with tnsim.using(tnsim.Session()):
        assert_close(changed, tnsim.similarity(writable, b), scale=1.0, rtol=1e-14)
    assert abs(changed - first) > 1e-9
