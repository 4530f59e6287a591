"""Many models: both routes against the verbs, laws of the matrix, duplicates, errors, plans."""

from pathlib import Path

import backends
import cases
import jax
import numpy as np
import pytest
from closeness import assert_close
from forced import OF_RUNS, take
from oracles import bilinear, dense_product, dense_symmetric_product, expected_products, linear
from processes import python
from refusals import refused

import tnsim
from tnsim.all_pairs import contracted_runs, ways
from tnsim.all_pairs import work as tiles
from tnsim.all_pairs.ways import PairSetting
from tnsim.problems.units import common_units

pytestmark = pytest.mark.usefixtures("diagrams")

SHIPPED = Path(tnsim.__file__).parent / "data" / "modular-addition"
SMALL = tnsim.Budget(memory_bytes=20_000)  # tiles of few models
# metrics by name, as functions of a generator
METRICS = {
    "standard": lambda g: tnsim.Gaussian(),
    "mean and covariance": lambda g: tnsim.Gaussian(*cases.INPUTS["mean and covariance"](g)),
    "diagonal": lambda g: tnsim.GaussianClosure(*cases.INPUTS["diagonal"](g)),
    "singular covariance": lambda g: tnsim.Gaussian(*cases.INPUTS["singular covariance"](g)),
    "tree": lambda g: tnsim.TreeSymmetric(),
    "symmetric": lambda g: tnsim.Symmetric(),
    "frobenius": lambda g: tnsim.Frobenius(),
}


@pytest.fixture
def route(monkeypatch):
    """Make every run take one route, whatever it costs."""
    return lambda name: take(monkeypatch, name, OF_RUNS)


def models(g, count, biases=True, rank=4):
    return [tnsim.Model([bilinear(g, cases.D, rank, 2, biases)]) for _ in range(count)]


def agrees(found, rows, columns, metric=METRICS["standard"](None)):
    """Every pair as the verbs have it."""
    for i, a in enumerate(rows):
        for j, b in enumerate(columns):
            sign, log = tnsim.log_inner(a, b, metric)
            assert found.sign[i, j] == sign
            assert_close(found.log_inner[i, j], log, scale=1.0)
            cosine = tnsim.similarity(a, b, metric)
            assert_close(found.similarity[i, j], cosine, scale=1.0, rtol=1e-12)


def expected(a, b, metric):
    """Products per output by oracles that know nothing of plans or features."""
    if isinstance(metric, tnsim.Symmetric):
        return dense_symmetric_product(a, b)
    if isinstance(metric, tnsim.TreeSymmetric | tnsim.Frobenius):
        return dense_product(a, b, isinstance(metric, tnsim.TreeSymmetric))
    return expected_products(a, b, metric)


# The features of every case and input are held to the oracle in tests/problems/test_deep_features.py;
# what is compiled for them here, by one case under all metrics and by all under one.
FEATURES = [("embedded biases", metric) for metric in METRICS]
FEATURES += [("linear", "tree"), ("nested residual", "tree")]
OTHERS = [case for case in cases.SHALLOW if case != "embedded biases"]
LONGER = [
    (case, metric)
    for case in OTHERS
    for metric in ("tree", "mean and covariance")
    if (case, metric) not in FEATURES
]


@pytest.mark.crossing
@pytest.mark.parametrize(
    "case, metric", [*FEATURES, *(pytest.param(*one, marks=pytest.mark.slow) for one in LONGER)]
)
def test_features(case, metric, rng, route):
    route("features")
    (a, b), metric = cases.pair(cases.SHALLOW[case], rng), METRICS[metric](rng)
    found = tnsim.pairwise([a, b], metric, slices=True)
    cross, first, second = (expected(p, q, metric) for p, q in ((a, b), (a, a), (b, b)))
    assert_close(found.slices[0, 1], cross / np.sqrt(first * second), scale=1.0, rtol=1e-12)
    wanted = cross.sum() / np.sqrt(first.sum() * second.sum())
    assert_close(found.similarity[0, 1], wanted, scale=1.0, rtol=1e-12)
    assert_close(found.sign[0, 1] * np.exp(found.log_inner[0, 1]), cross.sum())
    assert_close(np.exp(found.log_norm_b), [first.sum(), second.sum()], rtol=1e-12)


def test_contractions_leave_the_constant_of_lifted_models_out(rng, route):
    route("contractions")
    a, b = models(rng, 2)
    metric = tnsim.Symmetric()
    found = tnsim.pairwise([a, b], metric, slices=True)
    cross, first, second = (expected(p, q, metric) for p, q in ((a, b), (a, a), (b, b)))
    assert_close(found.slices[0, 1], cross / np.sqrt(first * second), scale=1.0, rtol=1e-12)


def test_the_same_models_in_another_space(rng, route):
    """Unbiased models alone, then beside biased ones: features of the first run do not serve the second."""
    route("features")
    plain, biased = models(rng, 2, biases=False), models(rng, 2)
    tnsim.pairwise(plain)
    found = tnsim.pairwise(plain, other=dict(zip("xy", biased, strict=True)))
    assert found.b.values.tolist() == ["x", "y"]
    agrees(found, plain, biased)
    assert len(tnsim.session().blocks) == 0


def test_a_run_forgets_its_own_blocks_only(rng, route, monkeypatch):
    """A run that ends while an equal one is under way leaves the blocks of that one alone."""
    route("features")
    few = models(rng, 3)
    kept = tnsim.session().blocks
    counts, plain_tile = [], tiles.tile

    def tile(*arguments):
        products = plain_tile(*arguments)
        if not counts:
            counts.append(len(kept))
            tnsim.pairwise(few)  # another run from its start to its end
            counts.append(len(kept))
        return products

    monkeypatch.setattr(tiles, "tile", tile)
    tnsim.pairwise(few)
    assert counts == [1, 1]
    assert len(kept) == 0


@pytest.mark.parametrize("name", ["features", "contractions"])
def test_matrix_is_symmetric_with_ones(name, rng, route):
    route(name)
    some = models(rng, 9)
    found = tnsim.pairwise(some, slices=True, budget=SMALL)
    assert int(found.attrs["plan"].split(" in ")[1].split()[0]) > 3  # several tiles
    for values in (found.similarity.values, found.log_inner.values, found.slices.values):
        assert np.array_equal(values, np.swapaxes(values, 0, 1))
    assert (found.similarity.values.diagonal() == 1).all() and (np.abs(found.similarity) <= 1).all()
    assert_close(found.similarity, tnsim.pairwise(some).similarity, scale=1.0, rtol=1e-13)
    assert np.linalg.eigvalsh(found.similarity).min() > -1e-12
    assert (tnsim.pairwise(some, other=some).similarity.values.diagonal() == 1).all()


def test_float32_is_close(rng):
    some = models(rng, 5)
    one, two = (tnsim.pairwise(some, dtype=dtype).similarity for dtype in ("float32", "float64"))
    assert_close(one, two, scale=1.0, rtol=1e-5, limited_by="float32")


@pytest.mark.slow
def test_two_devices_give_what_one_gives(rng, tmp_path):
    """In a process of its own, where JAX sees two: three models do not divide evenly."""
    some = models(rng, 3)
    deep = [tnsim.Model([bilinear(rng, 3, 3, 2), bilinear(rng, 2, 3, 2)]) for _ in range(3)]
    for n, model in enumerate((*some, *deep)):
        tnsim.save(model, tmp_path / f"{n}.safetensors")
    code = (
        "import jax, tnsim, numpy as np; m = list(tnsim.load('.')); assert len(jax.devices()) == 2; "
        "r = [tnsim.pairwise(m[:3]), tnsim.pairwise(m[3:], tnsim.GaussianClosure())]; "
        "print(*(x for run in r for x in run.similarity.values.ravel()))"
    )
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    shown, _ = python(code, env=two, cwd=tmp_path)
    runs = tnsim.pairwise(some), tnsim.pairwise(deep, tnsim.GaussianClosure())
    alone = np.concatenate([run.similarity.values.ravel() for run in runs])
    assert_close(np.array(shown.split(), float), alone, scale=1.0, rtol=1e-13)


def test_checkpoints_are_labelled_by_step_and_read_lazily(monkeypatch):
    series = tnsim.load(SHIPPED)
    found = tnsim.pairwise(series)
    assert found.a.values.tolist() == [int(x) for x in series.labels] and found.a.dtype == int
    assert found.name_b.values[0] == str(series.paths[0]) and found.attrs["metric"] == "gaussian"
    assert found.attrs["exact"] == 1 and found.attrs["metric_parameters"] == "standard"
    one = float(found.similarity.sel(a=400, b=100000))
    assert_close(one, tnsim.similarity(series[3], series[-1]), scale=1.0, rtol=1e-13)
    assert isinstance(found.sel(a=slice(0, 800)), tnsim.Pairwise)


@pytest.mark.parametrize("name", ["features", "contractions"])
def test_duplicates_are_told_and_computed_once(name, rng, route, monkeypatch):
    route(name)
    a, b = models(rng, 2)
    again = tnsim.Model([tnsim.Bilinear(*(np.array(x) for x in vars(a.layers[0]).values()))])
    seen = []

    def tile(job, rows, columns, *others, run=tiles.tile):
        seen.append(len(rows) * len(columns))
        return run(job, rows, columns, *others)

    monkeypatch.setattr(tiles, "tile", tile)
    said = "identical weights: again = first; they are computed once"
    with pytest.warns(tnsim.errors.DuplicateWarning, match=said):
        found = tnsim.pairwise({"first": a, "second": b, "again": again})
    assert sum(seen) == 4 and found.attrs["duplicates"] == 1
    values = found.similarity.values
    assert values[0, 2] == 1.0 and values[2, 1] == values[0, 1]
    assert found.hash_a[0] == found.hash_a[2]


def test_models_that_cannot_be_compared(rng):
    a, b = models(rng, 2)
    layer = a.layers[0]
    legs, biases = (layer.left, layer.right), (layer.left_bias, layer.right_bias)
    dead = tnsim.Model([tnsim.Bilinear(*legs, np.array([[1.0], [0.0]]) * layer.down)])
    zero = tnsim.Model([tnsim.Bilinear(*legs, 0 * layer.down)])
    swapped = tnsim.Model([tnsim.Bilinear(*legs[::-1], layer.down, *biases[::-1], layer.down_bias)])
    deep = tnsim.Model([bilinear(rng, 3, 4, 2), bilinear(rng, 2, 4, 2)])
    wider, of_two = tnsim.Model([linear(rng, 4, 2)]), tnsim.Gaussian(np.ones(2))
    same = "is a difference of models that are the same function to within rounding"
    for message, given, options in [
        ("pairwise compares many models.*found one model", a, {}),
        ("needs at least one model, found none", [], {}),
        ("expected models, a mapping or a tnsim.load of several files, found int", 3, {}),
        ("expected a tnsim Model or a combination of models, found int", [a, 3], {}),
        ("1 names for 2 models", [a, b], {"names": ["x"]}),
        ("labels must differ, found x more than once", [a, b], {"names": ["x", "x"]}),
        ("1 maps 4 inputs to 2 outputs, but 0 maps 3 inputs to 2", [a, wider], {}),
        ("expected a metric such as", [a, b], {"metric": "gauss"}),
        ("dtype must be one of float64, float32, found 'float16'", [a, b], {"dtype": "float16"}),
        ("mean has 2 coordinates but the models read 3", [a, b], {"metric": of_two}),
        ("y is the zero function: its cosine", {"x": a, "y": zero}, {}),
        ("y is the zero function in output 1", {"x": a, "y": dead}, {"slices": True}),
        (f"1 {same}", [a - b, a - swapped], {}),
        (f"0 {same}", [deep - deep], {}),
        ("TreeSymmetric compares trees of one shape", [a, deep], {"metric": "tree"}),
    ]:
        with refused(message):
            tnsim.pairwise(given, **options)


@pytest.mark.slow
@backends.compiled
def test_ranges(rng, route):
    a, b = models(rng, 2, biases=False)
    layer = a.layers[0]
    huge = tnsim.Model([tnsim.Bilinear(*(1e20 * x for x in (layer.left, layer.right, layer.down)))])
    # A cosine of logarithms of norms, here 280, of which a rounding is 6e-14.
    for dtype, rtol, reason in (("float64", 2e-12, None), ("float32", 1e-5, "float32")):
        found = tnsim.pairwise([huge, a], dtype=dtype)
        assert_close(found.similarity[0, 1], 1, rtol=rtol, limited_by=reason)
    route("contractions")
    far = tnsim.Gaussian(cov=np.full(3, 1e30))  # beyond float32 after one product of inputs
    wanted = tnsim.pairwise([huge, b], tnsim.Gaussian()).similarity  # f(c x) = c^2 f(x)
    found = tnsim.pairwise([huge, b], far, dtype="float32").similarity
    assert_close(found, wanted, scale=1.0, rtol=1e-5, limited_by="float32")


def test_the_cheaper_route_is_planned():
    def plan(width, rank, outputs, depth=1):
        g = np.random.default_rng(0)
        sizes = [(rank, width, width)] * (depth - 1) + [(rank, width, outputs)]

        def weight(*shape):
            return g.normal(size=shape).astype(np.float32)

        def layer(r, d, o):
            return tnsim.Bilinear(weight(r, d), weight(r, d), weight(o, r))

        models = [tnsim.Model([layer(*size) for size in sizes]) for _ in range(20)]
        return tnsim.plan_pairwise(models, dtype="float32")

    narrow = plan(32, 64, 5)
    assert narrow.route == "features"
    assert (narrow.tiles.pairs, narrow.tiles.number) == (210, 1)
    legs, form, trace = 2 * 64 * 32 * 32, 5 * 64 * 32 * 32, 64 * (32 + 5)
    assert narrow.multiplications == 20 * (legs + form + trace) + 210 * 5 * (1 + 32 * 33 // 2)
    assert plan(784, 32, 62).route == "contractions"
    assert plan(8, 16, 3, depth=2).route == "features"
    deep = plan(64, 4, 3, depth=2)
    assert deep.route == "contractions" and deep.seconds > 0 and deep.peak_bytes > 0
    words = "route            contractions", "pairs            210", "expected"
    assert all(word in str(deep) for word in (*words, "tier             interpret"))


@pytest.mark.slow
@backends.compiled
def test_programs_are_compiled_once_per_shape(rng, monkeypatch, route):
    """Thirty pairs more of known shapes trace nothing; means run in NumPy in any tier."""
    from tnsim.engine.runtime.binding import BoundStage

    def make(count):
        return [tnsim.Model([bilinear(rng, 3, 4, 2), bilinear(rng, 2, 3, 2)]) for _ in range(count)]

    route("contractions")
    tnsim.pairwise(make(8))
    traced = []
    run = BoundStage.__call__

    def called(stage, inputs):
        if any(isinstance(x, jax.core.Tracer) for x in inputs):
            traced.append(stage)
        return run(stage, inputs)

    monkeypatch.setattr(BoundStage, "__call__", called)
    tnsim.pairwise(make(8))
    assert not traced


def plan_of_one_pair(some):
    metric = tnsim.GaussianClosure()
    units = common_units(some, metric)
    setting = PairSetting(metric, False, "float64", tnsim.Budget(), 1, units)
    return contracted_runs.Pairs.of(some[0], some[1], setting).plan


def test_work_of_a_tile(rng, monkeypatch):
    """A kill loses a bounded number of multiplications and of elements written."""
    monkeypatch.setattr(ways, "_TILE_WORK", 2**22)
    for width in (2, 12):
        some = [
            tnsim.Model([bilinear(rng, width, width, width) for _ in range(2)]) for _ in range(40)
        ]
        pair = plan_of_one_pair(some)
        made = [
            np.prod(shape, dtype=int)
            for stage in pair.stages
            for shape in pair.programs[stage.program].value_shapes[len(stage.inputs) :]
        ]
        assert pair.written_elements == sum(made)
        cost = pair.multiplications + 64 * pair.written_elements
        tile = tnsim.plan_pairwise(some, tnsim.GaussianClosure()).tiles.side
        assert tile**2 * cost <= 1.1 * 2**22
        assert tile == 40 or 4 * tile**2 * cost > 2**22  # and is no smaller than it must be


def test_models_that_are_kept_for_later_tiles_count(rng, monkeypatch):
    monkeypatch.setattr(ways, "LARGEST_TILE", 2)
    models = [tnsim.Model([bilinear(rng, 6, 6, 6) for _ in range(2)]) for _ in range(9)]
    few, many = (tnsim.plan_pairwise(some, "closure") for some in (models[:4], models))
    assert few.route == many.route == "contractions"
    assert many.peak_bytes - few.peak_bytes >= 5 * models[0].parameters * 8


def test_a_batch_of_pairs_is_within_the_budget(rng):
    models = [tnsim.Model([bilinear(rng, 6, 6, 6) for _ in range(2)]) for _ in range(8)]
    pair = plan_of_one_pair(models)
    one = contracted_runs.intermediate_bytes(pair)
    for room, side in [(1e12, 8), (np.inf, 8), (None, 8), (4 * one, 2), (np.int64(one), 1), (1, 1)]:
        assert contracted_runs.batch_side(pair, 8, tnsim.Budget(memory_bytes=room)) == side
    assert contracted_runs.batch_side(pair, 8, tnsim.Budget(memory_bytes=9.9 * one)) == 3
    budget = tnsim.Budget(memory_bytes=pair.peak_bytes)
    few = tnsim.plan_pairwise(models, tnsim.GaussianClosure(), budget=budget)
    weights = 6 * few.tiles.side * models[0].parameters * 8  # models are no part of a budget
    assert few.route == "contractions" and few.peak_bytes - weights <= 2 * pair.peak_bytes
