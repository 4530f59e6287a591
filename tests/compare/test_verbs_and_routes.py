"""Every verb by every route that the table has, on models that routes treat differently.

The oracle is the forward pass at Gauss nodes; for `Symmetric` dense symmetrised tensors.
"""

from contextlib import contextmanager

import numpy as np
import pytest
from closeness import assert_close
from forced import OF_PAIRS, OF_RUNS, take
from oracles import (
    bilinear,
    dense_symmetric_product,
    linear,
    moments_of,
    quadrature,
    random_gaussian,
)

import tnsim
import tnsim.models.arrays
from tnsim.compare import routes
from tnsim.compare.request import CROSS, Question
from tnsim.engine.runtime import devices
from tnsim.problems import receptive_fields

D = 3


def sparse(rng, biases=False):
    """Units that read two neighbouring inputs each."""
    bands = [np.eye(D)[:2] * rng.normal(size=(2, D)) + np.eye(D)[1:] * rng.normal() for _ in "lr"]
    bias = rng.normal(size=(3, 2)) if biases else ()
    legs = [tnsim.models.arrays.SparseMatrix.of(matrix) for matrix in bands]
    return tnsim.Bilinear(
        *legs, tnsim.models.arrays.SparseMatrix.of(rng.normal(size=(2, 2))), *bias
    )


def sharing(rng):
    first = bilinear(rng, D, 4, 2, True)
    return [[first, bilinear(rng, 2, 3, 2)] for _ in range(2)]


PAIRS = {
    "one layer": lambda g: [[bilinear(g, D, 4, 2)], [bilinear(g, D, 5, 2)]],
    "constants": lambda g: [
        [bilinear(g, D, 4, 2, True), bilinear(g, 2, 3, 2, True)],
        [bilinear(g, D, 3, 2, True), bilinear(g, 2, 2, 2)],
    ],
    "subspaces": lambda g: [
        [linear(g, D, 2), bilinear(g, 2, 3, 2), bilinear(g, 2, 3, 2)],
        [linear(g, D, 1, True), bilinear(g, 1, 3, 2), bilinear(g, 2, 2, 2)],
    ],
    "one direction": lambda g: [
        [bilinear(g, D, 1, 2, True), bilinear(g, 2, 2, 2, True)],
        [bilinear(g, D, 1, 2), bilinear(g, 2, 2, 2)],
    ],
    "shared layers": sharing,
    "sparse": lambda g: [[sparse(g, True), linear(g, 2, 2, True)], [sparse(g)]],
    "depths": lambda g: [
        [bilinear(g, D, 3, 2, True)],
        [bilinear(g, D, 3, 2), bilinear(g, 2, 3, 2, True)],
    ],
    "skips": lambda g: [
        [tnsim.Residual(bilinear(g, D, 3, D, True), 0.6, 0.4), bilinear(g, D, 3, 2)],
        [tnsim.Residual(bilinear(g, D, 2, D), 0.6, 0.4), bilinear(g, D, 3, 2)],
    ],
}
METRICS = {
    "standard": lambda g: tnsim.Gaussian(),
    "mean and covariance": lambda g: tnsim.Gaussian(*random_gaussian(g, D)),
    "singular": lambda g: tnsim.Gaussian(cov=np.diag([1.0, 2.0, 0.0])),
    "symmetric": lambda g: tnsim.Symmetric(),
}
CROSSED = [
    (pair, metric)
    for pair in PAIRS
    for metric in METRICS
    if (pair, metric) != ("depths", "symmetric")  # of unequal degrees, which it does not compare
]


def expected(a, b, metric):
    """The inner product of two functions of inputs."""
    if isinstance(metric, tnsim.Symmetric):
        return sum(c * d * dense_symmetric_product(m, n).sum() for c, m in a for d, n in b)
    points, weights = quadrature(9, *moments_of(metric, D))
    left, right = (sum(c * np.asarray(m(points)) for c, m in terms) for terms in (a, b))
    return float(weights @ (left * right).sum(axis=1))


def offered(models, metric):
    """Names of the routes of some models."""
    question = Question(tuple(models), metric, CROSS, False, "float64")
    return [route.name for route in routes.routes_of(question)]


@pytest.fixture(autouse=True)
def small_fields(monkeypatch):
    """Receptive fields are a route of small models, too."""
    monkeypatch.setattr(receptive_fields, "_SLOWER", 0)


@contextmanager
def forced(name):
    """Make verbs take a route wherever it is one."""
    with pytest.MonkeyPatch.context() as patch:
        take(patch, name, OF_PAIRS, OF_RUNS)
        yield


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("pair, metric", CROSSED)
def test_every_verb_by_every_route(pair, metric, rng):
    metric = METRICS[metric](rng)
    a, b = (tnsim.Model(layers) for layers in PAIRS[pair](rng))
    names = offered((a, b), metric)
    ab, aa, bb = (expected([(1, x)], [(1, y)], metric) for x, y in ((a, b), (a, a), (b, b)))
    scale = np.sqrt(aa * bb)
    for name in names:
        with forced(name):
            found = tnsim.inner(a, b, metric)
            assert found.route == name
            verbs_agree(a, b, metric, (ab, aa, bb), scale, found)


def verbs_agree(a, b, metric, products, scale, found):
    ab, aa, bb = products
    assert_close(found, ab, scale=scale, rtol=1e-10)
    assert_close(tnsim.similarity(a, b, metric), ab / scale, scale=1.0, rtol=1e-10)
    log = tnsim.log_inner(a, b, metric)
    assert_close(log.sign * np.exp(log.log), ab, scale=scale, rtol=1e-10)
    slices = tnsim.slices(a, b, metric)
    assert slices.shape == (2,) and np.all(abs(slices) <= 1)
    change = (ab - bb) / np.sqrt((aa + bb - 2 * ab) * bb)
    assert_close(tnsim.similarity(a - b, b, metric), change, scale=1.0, rtol=1e-10)
    both = tnsim.inner(a - 0.5 * b, a + b, metric)
    assert_close(both, aa + 0.5 * ab - 0.5 * bb, scale=aa + bb, rtol=1e-10)
    if isinstance(metric, tnsim.Symmetric):
        return
    paths = tnsim.paths(a, b, metric)
    assert_close(paths.values.sum(), ab, scale=abs(paths.values).sum(), rtol=1e-10)
    if kinds_agree(a, b):
        change = tnsim.change(a, b, metric)
        assert_close(change.total, aa + bb - 2 * ab, scale=aa + bb, rtol=1e-10)
        assert_close(change.share.sum() * change.total, change.total, scale=aa + bb, rtol=1e-10)


def kinds_agree(a, b):
    return [type(x) for x in a.layers] == [type(y) for y in b.layers] and all(
        x.d_out == y.d_out and x.d_in == y.d_in for x, y in zip(a.layers, b.layers, strict=True)
    )


@pytest.mark.crossing
@pytest.mark.parametrize("pair, metric", CROSSED)
def test_all_pairs_by_every_route(pair, metric, rng):
    pytest.importorskip("xarray")
    metric = METRICS[metric](rng)
    a, b = (tnsim.Model(layers) for layers in PAIRS[pair](rng))
    several = [[(1, a)], [(1, b)], [(1, a), (-0.5, b)]]
    models = [a, b, a - 0.5 * b]
    products = [[expected(x, y, metric) for y in several] for x in several]
    norms = np.sqrt(np.diag(products))
    for name in offered((a, b), metric):
        with forced(name):
            found = tnsim.pairwise(models, metric).similarity.values
            across = tnsim.pairwise(models[:2], metric, other=models[1:]).similarity.values
        assert_close(found, products / norms / norms[:, None], scale=1.0, rtol=1e-10)
        assert_close(across, found[:2, 1:], scale=1.0, rtol=1e-12)


def test_the_table_has_every_route(rng):
    """What the pairs above go by, so that none of them is left out unseen."""
    found = {}
    for pair, metric in CROSSED:
        models = [tnsim.Model(layers) for layers in PAIRS[pair](rng)]
        found[pair, metric] = tuple(offered(models, METRICS[metric](rng)))
    assert {name for names in found.values() for name in names} == {
        "contractions",
        "features",
        "quadrature",
        "receptive fields",
    }
    assert found["constants", "standard"] == ("quadrature", "features", "contractions")
    assert found["sparse", "standard"] == ("receptive fields",)


def test_free_memory_is_not_looked_up_for_small_models(rng, monkeypatch):
    """The look-up took a third of a warm comparison, for the batches of a route not taken."""
    model = tnsim.Model([tnsim.Bilinear(*rng.normal(size=(3, 8, 8))) for _ in "ab"])
    monkeypatch.setattr(devices, "host_bytes", lambda *args: pytest.fail("memory was looked up"))
    others = [other.route for other in tnsim.plan(model, model, cosine=True).others]
    assert others == ["quadrature"] and tnsim.similarity(model, model) == 1
