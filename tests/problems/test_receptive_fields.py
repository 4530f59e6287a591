"""Sparse layers, as convolutions are: compared by what their units read, and as if they were written out."""

import jax
import numpy as np
import pytest
from closeness import assert_close
from oracles import moments_of, quadrature
from refusals import refused

import tnsim
import tnsim.models.arrays
from tnsim.compare import operands
from tnsim.models.arrays import Columns
from tnsim.models.model import with_dense_matrices
from tnsim.problems import features, receptive_fields

METRICS = {
    "standard": tnsim.Gaussian(),
    "mean and variances": tnsim.Gaussian(np.linspace(-0.5, 1, 25), np.linspace(0.2, 2, 25)),
    "constant pixels": tnsim.Gaussian(np.ones(25), np.r_[np.zeros(7), np.ones(18)]),
    "symmetric": tnsim.Symmetric(),
}


def convolution(kernel, size, padding=0):
    """The matrix of a convolution (out, in, k, k) on images of size x size, row by row."""
    out, channels, k, _ = kernel.shape
    whole, side = size + 2 * padding, size + 2 * padding - k + 1
    matrix = np.zeros((out, side, side, channels, whole, whole))
    for y in range(side):
        for x in range(side):
            matrix[:, y, x, :, y : y + k, x : x + k] = kernel
    inner = slice(padding, padding + size)
    return matrix[..., inner, inner].reshape(out * side**2, -1)


def pooling(channels, size, by):
    """The matrix of an average over by x by pixels."""
    return convolution(np.eye(channels)[:, :, None, None] * np.ones((by, by)) / by**2, size)


def network(rng, channels=2, size=5, kernels=(3, 2), biases=False, padding=0, skip=None, pool=1):
    """Bilinear convolutions and a readout of two classes; a skip or pooling in the last layer."""
    layers, before = [], 1
    for n, k in enumerate(kernels):
        left, right = (
            convolution(rng.normal(size=(channels, before, k, k)), size, padding) for _ in "lr"
        )
        size, before = size + 2 * padding - k + 1, channels
        last = n + 1 == len(kernels)
        down = pooling(channels, size, pool) if last else np.eye(len(left))
        of_units = [np.repeat(rng.normal(size=channels), size**2) for _ in "lr"] if biases else []
        bias = [*of_units, rng.normal(size=len(down))] if biases else []
        layer = tnsim.Bilinear(
            *map(tnsim.models.arrays.SparseMatrix.of, (left, right, down)), *bias
        )
        layers.append(layer if skip is None or not n else tnsim.Residual(layer, skip, 0.4))
    readout = rng.normal(size=(2, layers[-1].d_out))
    return tnsim.Model([*layers, tnsim.Linear(readout, rng.normal(size=2) if biases else None)])


NETWORKS = {
    "one layer": dict(kernels=(3,), channels=3),
    "two layers": dict(),
    "biases": dict(biases=True),
    "pooling": dict(kernels=(2, 2), pool=2, biases=True),
    "padding": dict(kernels=(3,), padding=1, biases=True),
    "residual": dict(kernels=(1, 3), padding=1, skip=0.6, channels=1),
}


def makes_same_products(a, b, metric, rtol=1e-12):
    """Inner products per output, of models as they are and written out."""
    assert tnsim.plan(a, b, metric).route == "receptive fields"
    whole = with_dense_matrices(a), with_dense_matrices(b)
    norms = [tnsim.inner(model, model, metric) for model in whole]
    product = tnsim.inner(*whole, metric)
    assert_close(tnsim.inner(a, b, metric), product, scale=np.sqrt(norms[0] * norms[1]), rtol=rtol)
    for model, norm in zip((a, b), norms, strict=True):
        assert_close(tnsim.inner(model, model, metric), norm, rtol=rtol)
    assert_close(tnsim.slices(a, b, metric), tnsim.slices(*whole, metric), scale=1, rtol=rtol)


def is_cheap(form, metric):
    """Whether plans of the dense models take less than seconds."""
    cheap = {("biases", "mean and variances")}
    return form in ("one layer", "padding") or metric == "symmetric" or (form, metric) in cheap


WRITTEN_OUT = [
    pytest.param(form, metric, marks=() if is_cheap(form, metric) else pytest.mark.slow)
    for form in NETWORKS
    for metric in METRICS
]


@pytest.mark.crossing(slow=1)
@pytest.mark.parametrize(("form", "metric"), WRITTEN_OUT)
def test_as_if_written_out(form, metric, rng):
    a, b = (network(rng, **NETWORKS[form]) for _ in "ab")
    makes_same_products(a, b, METRICS[metric])


@pytest.mark.slow
def test_networks_of_other_forms(rng):
    """Kernels of other sizes reach other pixels; the readout of a constant reaches none."""
    makes_same_products(network(rng), network(rng, kernels=(2, 3), biases=True), tnsim.Gaussian())
    makes_same_products(network(rng, kernels=(4,)), network(rng), tnsim.Gaussian())
    blind = jax.tree.map(np.zeros_like, network(rng, kernels=(3,), biases=True).layers[0])
    blind = tnsim.Bilinear(
        *(
            tnsim.models.arrays.SparseMatrix.of(np.zeros(m.shape))
            for m in (blind.left, blind.right)
        ),
        np.ones((2, blind.rank)),
        rng.normal(size=blind.rank),
        rng.normal(size=blind.rank),
    )
    makes_same_products(tnsim.Model([blind]), network(rng, biases=True), tnsim.Gaussian())


def test_by_quadrature_on_few_pixels(rng):
    """Two layers on images of 3 x 3 pixels, of which a row varies: E[f g] by Gauss-Hermite nodes."""
    mean, variances = rng.normal(size=9), np.r_[np.zeros(3), rng.uniform(0.5, 2, 3), np.zeros(3)]
    grid, weights = quadrature(6, mean[3:6], np.diag(variances[3:6]))
    points = np.tile(mean, (len(grid), 1))
    points[:, 3:6] = grid
    a, b = (network(rng, size=3, kernels=(2, 2), biases=True) for _ in "ab")
    expected = np.sum(weights[:, None] * a(points) * b(points))
    assert_close(tnsim.inner(a, b, tnsim.Gaussian(mean, variances)), expected, rtol=1e-11)


def holed(rng, rows, columns):
    """A sparse matrix of which some rows and some columns have no entries."""
    kept = rng.random((rows, columns)) < rng.choice([0.2, 0.6])
    kept[rng.random(rows) < 0.4] = False
    kept[:, rng.random(columns) < 0.3] = False
    return tnsim.models.arrays.SparseMatrix.of(rng.normal(size=(rows, columns)) * kept)


def holed_model(rng, width):
    """One or two sparse layers, with biases, skips (also of 0) and linear layers or without."""
    layers, inner = [], width
    for _ in range(rng.integers(1, 3)):
        rank, skip = int(rng.integers(2, 8)), rng.choice([None, 0.0, 0.5])
        out = inner if skip is not None else int(rng.integers(2, 8))
        shapes = (rank, inner), (rank, inner), (out, rank)
        biases = [rng.normal(size=rows) for rows, _ in shapes] if rng.random() < 0.5 else []
        layer = tnsim.Bilinear(*(holed(rng, *shape) for shape in shapes), *biases)
        layers.append(layer if skip is None else tnsim.Residual(layer, skip, 0.7))
        if rng.random() < 0.4:
            layers.append(tnsim.Linear(holed(rng, 4, out), rng.normal(size=4)))
        inner = layers[-1].d_out
    return tnsim.Model([*layers, tnsim.Linear(rng.normal(size=(2, inner)))])


@pytest.mark.slow
def test_random_layers_with_rows_and_columns_without_entries(rng):
    """Against Gauss-Hermite nodes of the models written out."""
    several = tnsim.Gaussian(), tnsim.Gaussian(rng.normal(size=4), [0.0, *rng.uniform(0.5, 2, 3)])
    routes = set()
    for metric in several:
        points, weights = quadrature(5, *moments_of(metric, 4))
        for _ in range(12):
            pair = [holed_model(rng, 4) for _ in "ab"]
            f, g = (with_dense_matrices(model)(points) for model in pair)
            norms = [(weights @ (h * h)).sum() for h in (f, g)]
            found, route = tnsim.inner(*pair, metric), tnsim.plan(*pair, metric).route
            scale = max(np.sqrt(np.prod(norms)), 1e-12)
            assert_close(found, (weights @ (f * g)).sum(), scale=scale, rtol=1e-12)
            routes.add(route)
    assert "receptive fields" in routes


def test_vectors_in_parts(monkeypatch, rng):
    """Parts by the largest pixel, and series that are not kept between them, give the same sums."""
    a, b = (network(rng, biases=True) for _ in "ab")
    expected = tnsim.inner(a, b), tnsim.similarity(a, b)
    tnsim.session().clear()
    monkeypatch.setattr(receptive_fields, "_PART", 2_000)
    monkeypatch.setattr(receptive_fields, "_KEPT", 0)
    monkeypatch.setattr(receptive_fields, "_AT_ONCE", 1_000)
    assert_close(tnsim.inner(a, b), expected[0], rtol=1e-12)
    assert_close(tnsim.similarity(a, b), expected[1], scale=1, rtol=1e-12)
    tnsim.session().clear()


@pytest.mark.parametrize("compare", [tnsim.similarity, lambda *ab: tnsim.pairwise(ab)])
def test_parts_share_the_series_of_a_model(monkeypatch, rng, compare):
    """The series of the units are made once for each model, however many parts its vector has."""
    made, series = [], receptive_fields._series
    tnsim.session().clear()
    monkeypatch.setattr(operands, "_SMALL", 0)  # as of models of many weights
    monkeypatch.setattr(receptive_fields, "_PART", 2_000)
    monkeypatch.setattr(receptive_fields, "_series", lambda *of: made.append(of) or series(*of))
    a, b = network(rng), network(rng)
    space = features.common_space([a, b], tnsim.Gaussian())
    assert space is not None and len(space.parts) > 3
    compare(a, b)
    assert len(made) == 2  # of a convolution, whose units are alike
    tnsim.session().clear()


def test_laws(rng):
    a, b = (network(rng, biases=True) for _ in "ab")
    assert tnsim.similarity(a, a) == tnsim.similarity(a, jax.tree.map(np.array, a)) == 1.0
    assert_close(tnsim.similarity(a, b), tnsim.similarity(b, a), scale=1, rtol=1e-14)
    total = tnsim.inner(a + 2.0 * b, a - b)
    parts = tnsim.inner(a, a) + tnsim.inner(a, b) - 2.0 * tnsim.inner(b, b)
    assert_close(total, parts, scale=tnsim.inner(b, b), rtol=1e-12)
    # The images shifted left to right, and so the columns of the first layer and of the metric.
    order = rng.permutation(25)

    def moved(model):
        first = model.layers[0]
        legs = [
            tnsim.models.arrays.SparseMatrix.of(np.asarray(w)[:, order])
            for w in (first.left, first.right)
        ]
        rest = first.down, first.left_bias, first.right_bias, first.down_bias
        return tnsim.Model([tnsim.Bilinear(*legs, *rest), *model.layers[1:]])

    assert_close(tnsim.similarity(moved(a), moved(b)), tnsim.similarity(a, b), scale=1, rtol=1e-12)


def test_weights_far_from_one(rng):
    """Powers of two beyond the range of products of four, in one layer and back in the next."""
    a, b = (network(rng) for _ in "ab")

    def scaled(model, power):
        first, *rest = model.layers
        return tnsim.Model([jax.tree.map(lambda w: w * 2.0**power, first), *rest])

    far = tnsim.similarity(scaled(a, 200), scaled(b, -200))
    assert_close(far, tnsim.similarity(a, b), scale=1, rtol=1e-12)
    assert_close(
        tnsim.log_inner(scaled(a, 200), a).log,
        tnsim.log_inner(a, a).log + 12 * 100 * np.log(2),
        rtol=1e-12,
    )


def test_all_pairs_of_a_run(rng, tmp_path):
    models = {step: network(rng, biases=True) for step in range(4)}
    found = tnsim.pairwise(models, store=tmp_path / "store", slices=True)
    assert tnsim.plan_pairwise(models).route == "receptive fields"
    for i, j in ((0, 1), (2, 3), (1, 2)):
        expected = tnsim.slices(models[i], models[j])
        assert_close(found.slices.sel(a=i, b=j).values, expected, scale=1, rtol=1e-12)


@pytest.mark.slow
def test_other_metrics_and_verbs_write_out(rng):
    """Whatever has no receptive fields sees the same function."""
    a, b = (network(rng, size=4, kernels=(3,), biases=True) for _ in "ab")
    whole = with_dense_matrices(a), with_dense_matrices(b)
    root = rng.normal(size=(16, 16)) / 4
    several = (
        tnsim.TreeSymmetric(),
        tnsim.GaussianClosure(),
        tnsim.Gaussian(cov=root @ root.T),
        tnsim.Empirical(rng.normal(size=(7, 16))),
    )
    for metric in several:
        expected = tnsim.similarity(*whole, metric)
        assert_close(tnsim.similarity(a, b, metric), expected, scale=1, rtol=1e-11)
    assert_close(tnsim.change(a, b).share, tnsim.change(*whole).share, rtol=1e-9)


def test_a_small_dense_layer_among_sparse_ones(monkeypatch, rng):
    """A convolution of few pixels may read nearly all of them."""
    monkeypatch.setattr(receptive_fields, "_SLOWER", 0)
    a, b = (network(rng, kernels=(3, 2), biases=True) for _ in "ab")

    def mixed(model):
        first, second, readout = model.layers
        arrays = (np.asarray(m) for m in (second.left, second.right, second.down))
        biases = second.left_bias, second.right_bias, second.down_bias
        return tnsim.Model([first, tnsim.Bilinear(*arrays, *biases), readout])

    makes_same_products(mixed(a), mixed(b), tnsim.Gaussian())


def test_a_sparse_model_beside_a_dense_one(rng):
    """A model without receptive fields is compared with the other one written out."""
    a, b = network(rng, size=4, kernels=(3,), biases=True), network(rng, size=4, kernels=(3,))
    whole = with_dense_matrices(a), with_dense_matrices(b)
    for metric in (tnsim.Gaussian(), tnsim.Symmetric(), tnsim.TreeSymmetric()):
        expected = tnsim.similarity(*whole, metric)
        assert_close(tnsim.similarity(a, whole[1], metric), expected, scale=1, rtol=1e-12)
        found = tnsim.pairwise([a, whole[1]], metric).similarity.values
        assert_close(found[0, 1], expected, scale=1, rtol=1e-12)


@pytest.mark.slow
def test_gradients_write_out(rng):
    a, b = (network(rng, size=4, kernels=(3,), biases=True) for _ in "ab")
    whole = with_dense_matrices(a), with_dense_matrices(b)
    gradient = jax.grad(lambda model: tnsim.similarity(model, b))(a)
    expected = jax.grad(lambda model: tnsim.similarity(model, whole[1]))(whole[0])
    filled = np.nonzero(whole[0].layers[0].left)
    dense = np.asarray(gradient.layers[0].left)
    assert_close(dense[filled], expected.layers[0].left[filled], rtol=1e-9)


def test_files_hold_sparse_matrices(rng, tmp_path):
    a = network(rng, biases=True)
    tnsim.save(a, tmp_path / "a.safetensors")
    again = tnsim.load(tmp_path / "a.safetensors")
    assert again.layers[0].left.columns == a.layers[0].left.columns
    assert tnsim.similarity(a, again) == 1.0


def test_beyond_the_budget(rng):
    a, b = (network(rng) for _ in "ab")
    plan = tnsim.plan(a, b, cosine=True)
    assert plan.exact and plan.outputs == ("AA", "AB", "BB")
    few = tnsim.Budget(multiplications=plan.multiplications // 2)
    with refused("receptive fields", tnsim.TooLarge):
        tnsim.similarity(a, b, budget=few)
    with refused("GiB", tnsim.TooLarge):
        tnsim.similarity(a, b, budget=tnsim.Budget(memory_bytes=1000))
    correlated = tnsim.Gaussian(cov=np.eye(25) + 0.1)
    with refused("where pixels are independent", tnsim.TooLarge):
        tnsim.similarity(a, b, correlated, budget=tnsim.Budget(multiplications=1000))
    rows = np.arange(2**14)[:, None]
    eye = tnsim.models.arrays.SparseMatrix(np.ones(rows.shape), Columns(rows, 2**14))
    wide = tnsim.Model([tnsim.Bilinear(eye, eye, eye)])
    assert wide(np.full(2**14, 3.0))[5] == 9.0
    with refused(r"written out, 2\.0 GiB", tnsim.TooLarge):
        # Whatever memory the machine has free.
        tnsim.similarity(
            wide, wide, tnsim.TreeSymmetric(), budget=tnsim.Budget(memory_bytes=2.0**40)
        )


def test_rows_of_zeros_below_a_sparse_output(rng):
    """Rows of zeros take the unit of what reads them, on forward passes as in the sum by hand."""
    left, right, down, x = (rng.normal(size=shape) for shape in [(3, 4), (3, 4), (2, 3), (9, 4)])
    left[1], down[0, 2] = 0.0, 0.0
    sparse = tnsim.models.arrays.SparseMatrix.of(down)
    model = tnsim.Model([tnsim.Bilinear(left, right, sparse)])
    outputs = (x @ left.T * (x @ right.T)) @ down.T
    metric = tnsim.Empirical(x)
    assert_close(tnsim.inner(model, model, metric), np.square(outputs).sum() / 9, rtol=1e-13)


@pytest.mark.parametrize("library", [np.asarray, jax.numpy.asarray])
def test_values_and_inputs_are_of_either_library(library, rng):
    values, columns = np.array([[1.0, 2.0], [3.0, 0.0]]), Columns([[0, 2], [1, -1]], 3)
    x = rng.normal(size=(4, 3))
    with jax.enable_x64(True):
        layer = tnsim.Linear(tnsim.models.arrays.SparseMatrix(library(values), columns))
        for inputs in (x, jax.numpy.asarray(x)):
            assert_close(layer(inputs), x[:, :2] * [1, 3] + x[:, 2:] * [2, 0], scale=1.0)


def test_columns_are_whole_numbers():
    with refused("whole numbers"):
        Columns([[0.5]], 3)
    with refused("width 0"):
        Columns([[0]], 0)


@pytest.mark.parametrize(
    ("values", "columns", "message"),
    [
        ([[1.0, 2.0]], [[0]], "entries"),
        ([[1.0]], [[3]], "column 3 of 3"),
        ([[1.0]], [[-2]], "column -2 of 3"),
        ([[1.0, 1.0]], [[0, -1]], "no column for it"),
        ([[np.nan]], [[0]], "NaN"),
    ],
)
def test_damaged_matrices_are_refused(values, columns, message):
    with refused(message):
        tnsim.models.arrays.SparseMatrix(values, Columns(columns, 3))


@pytest.mark.full
def test_a_network_of_many_channels(rng):
    """Eight channels on 10 x 10 pixels, whose plan would take 6e12 multiplications, against draws."""
    a = network(rng, channels=8, size=10, kernels=(3, 3), biases=True)
    b = network(rng, channels=8, size=10, kernels=(3, 3), biases=True)
    mixed = tnsim.Model([*a.layers[:-1], jax.tree.map(np.add, a.layers[-1], b.layers[-1])])
    checked = tnsim.check(a, mixed, samples=4096)
    assert 0.1 < checked.similarity < 0.99
    assert abs(checked.deviation) < 5
