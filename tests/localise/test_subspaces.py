"""Models that read subspaces of their inputs, each another one: paths, changes and edges on every route.

Points of quadrature vary in the directions that the models under comparison read, so a verb that takes
the points of one model for two gives another number, without a word.
"""

import component_oracles as oracle
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import bilinear, linear, moments_of, quadrature, random_gaussian
from sequence_cases import slow

import tnsim
import tnsim.localise.paths

MODELS = {
    "rank 1 of 4": lambda rng: [bilinear(rng, 4, 1, 2), bilinear(rng, 2, 2, 2)],
    "rank 1 of 4 with biases": lambda rng: [
        bilinear(rng, 4, 1, 2, True),
        bilinear(rng, 2, 2, 2, True),
    ],
    "embedding 4 to 2": lambda rng: [
        linear(rng, 4, 2, True),
        tnsim.Residual(bilinear(rng, 2, 2, 2)),
        bilinear(rng, 2, 2, 2),
    ],
    "one nonlinear layer": lambda rng: [linear(rng, 4, 1), bilinear(rng, 1, 2, 2, True)],
}
METRICS = {
    "standard": lambda rng: tnsim.Gaussian(),
    "mean and covariance": lambda rng: tnsim.Gaussian(*random_gaussian(rng, 4)),
    "singular": lambda rng: tnsim.Gaussian(cov=np.diag([1.0, 2.0, 0.5, 0.0])),
}


@pytest.fixture(
    params=[
        "rank 1 of 4",
        slow("rank 1 of 4 with biases"),
        "embedding 4 to 2",
        slow("one nonlinear layer"),
    ]
)
def made(request, rng):
    """A function that makes a model of a structure, each time with other weights."""
    return lambda: tnsim.Model(MODELS[request.param](rng))


@pytest.fixture(params=[slow("standard"), "mean and covariance", slow("singular")])
def metric(request, rng):
    return METRICS[request.param](rng)


@pytest.fixture(params=["quadrature", slow("contractions")])
def route(request, monkeypatch):
    """The cheaper route of these models, or plans alone."""
    if request.param == "contractions":
        monkeypatch.setattr("tnsim.compare.by_points.gaussian_points", lambda *_: None)
    return request.param


def nodes(metric, *models):
    """Points of all coordinates, whatever the models read."""
    return quadrature(max(m.degree for m in models) + 1, *moments_of(metric, 4))


def parts_of(model, x, by, labels):
    """Outputs of the paths with these labels, (paths, points, outputs)."""
    names = tnsim.components(model, by)
    by_set = {
        frozenset(n for n, one in zip(names, own, strict=True) if one): value
        for own, value in oracle.path_outputs(model, x, len(names), by).items()
    }
    return np.stack([by_set[frozenset(tnsim.localise.paths.components_in(n))] for n in labels])


@pytest.mark.crossing
@pytest.mark.parametrize("by", ["layer", "unit"])
@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        # Of some networks shares cancel to two digits, which is told.
        pytest.param("float32", marks=pytest.mark.filterwarnings("default:a share of a path has")),
    ],
)
def test_paths_and_their_series(made, metric, route, by, dtype):
    a, b, c = made(), made(), made()
    x, w = nodes(metric, a, b)
    found = tnsim.paths(a, b, metric, by=by, dtype=dtype)
    bra, ket = parts_of(a, x, by, found.bra), parts_of(b, x, by, found.ket)
    wanted = np.einsum("n,ino,jno->ij", w, bra, ket)
    scale = abs(wanted).max()
    tolerance = {"rtol": 1e-10} if dtype == "float64" else {"rtol": 1e-4, "limited_by": "float32"}
    assert_close(found.values, wanted, scale=LARGEST, **tolerance)
    assert_close(found.values.sum(), tnsim.inner(a, b, metric), scale=scale, **tolerance)
    (one, other) = tnsim.paths([a, c], b, metric, by=by, dtype=dtype).each
    assert_close(one.values, wanted, scale=LARGEST, **tolerance)
    inner = tnsim.inner(c, b, metric)
    assert_close(other.values.sum(), inner, scale=abs(other.values).max(), **tolerance)


@pytest.mark.sampled(quick=0, slow=1)
def test_changes_and_edges(made, rng, route):
    """Derivatives are compiled, which takes most of the time: one metric stands for all."""
    metric = METRICS["mean and covariance"](rng)
    a, b = made(), made()
    x, w = nodes(metric, a, b)
    change = tnsim.change(a, b, metric, ends=True)
    assert_close(change.total, w @ ((b(x) - a(x)) ** 2).sum(axis=1), rtol=1e-10)
    assert_close(change.share.sum(), 1.0, scale=abs(change.share).sum(), rtol=1e-11)
    parts = change.matrix.sum(axis=1) / change.total
    assert_close(parts, change.share, scale=LARGEST, rtol=1e-9)
    edges = tnsim.paths(a, metric=metric, legs=True)
    run = tnsim.paths([b, a], metric=metric, legs=True)
    assert_close(run.share[1], edges.share, scale=LARGEST, rtol=1e-12)
    # The same questions at points that no verb has chosen.
    everywhere = tnsim.Empirical(x, w)
    by_hand = tnsim.change(a, b, everywhere, ends=True)
    assert_close(change.share, by_hand.share, scale=LARGEST, rtol=1e-9)
    assert_close(change.removed, by_hand.removed, scale=LARGEST, rtol=1e-9)
    wanted = tnsim.paths(a, metric=everywhere, legs=True)
    assert_close(edges.share, wanted.share, scale=LARGEST, rtol=1e-9)
    assert_close(edges.cut, wanted.cut, scale=LARGEST, rtol=1e-9)
