"""What users touch: names on a base install, types, precisions, prompts and notebooks."""

import ast
import copy
import dataclasses
import html.parser
import itertools
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from closeness import assert_close
from oracles import bilinear
from processes import python
from refusals import refused
from sample_runs import blocks

import tnsim
import tnsim.compare.request
import tnsim.metrics.protocol
from tnsim.all_pairs.sources import metric_parameters
from tnsim.metrics.metric import METRICS as known_metrics
from tnsim.metrics.metric import as_metric
from tnsim.metrics.protocol import (
    Points,
    Reading,
    Rule,
    WeightedPoints,
    adds_up,
    joins_layers,
    product_rule,
)
from tnsim.models.arrays import pytree

EXTRAS = ("matplotlib", "networkx", "xarray", "zarr", "scipy", "pyarrow", "torch", "yaml")
ROOT = Path(tnsim.__file__).parent


def typed_names():
    """What type checkers see: the names that the stub imports as themselves."""
    tree = ast.parse((ROOT / "__init__.pyi").read_text())
    aliases = [alias for node in tree.body if type(node) is ast.ImportFrom for alias in node.names]
    assert all(alias.name == alias.asname for alias in aliases)
    return {alias.name for alias in aliases}


def test_every_public_name_is_there_documented_and_typed():
    homes = typed_names()
    assert set(tnsim.__all__) == homes - {"torch"}  # a star would put it in the place of PyTorch
    assert tnsim.__all__ == sorted(tnsim.__all__)
    for name in homes:
        assert getattr(tnsim, name).__doc__, name
    shown = {name for name in dir(tnsim) if not name.startswith("__")}  # what a prompt completes
    assert shown == homes | {"baselines", "figures", "reading", "report"}
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        tnsim.nope  # noqa: B018


def on_a_base_install(code):
    block = f"import sys\nfor name in {EXTRAS}: sys.modules[name] = None\nimport tnsim\n"
    return python(block + code)[0]


def test_names_need_no_extra():
    """Without optional packages: all names by star and by attribute, help, late errors."""
    code = """
from tnsim import *
from tnsim import baselines, figures, reading, report
from tnsim.all_pairs import result
assert tnsim.figures is figures and pairwise is tnsim.pairwise and "figures" in dir(tnsim)
help(tnsim)
for attempt in (
    lambda: tnsim.pairwise([]),
    lambda: tnsim.Pairwise(),
    lambda: tnsim.figures.heatmap([[1.0]], ["a"]),
    lambda: tnsim.torch.similarity(None, None),
    lambda: result.write_parquet(None, None),
):
    try:
        attempt()
    except tnsim.errors.MissingExtra as error:
        print("asked for", error)
"""
    text = on_a_base_install(code)
    assert "class Bilinear" in text and "plan_pairwise(" in text
    assert re.search(r"\bsimilarity\(\s*a:", text)  # Python 3.13 breaks long signatures
    asked = [line for line in text.splitlines() if line.startswith("asked for")]
    needed = ["xarray pairwise"] * 2 + ["matplotlib plot", "torch torch", "pyarrow parquet"]
    for line, (package, extra) in zip(asked, map(str.split, needed), strict=True):
        said = f"needs {package}, which is not installed: run  pip install 'tnsim[{extra}]'"
        assert said in line


@pytest.mark.parametrize("dtype", ["float32", "f4", np.float32, np.dtype("float32"), jnp.float32])
def test_a_precision_is_what_numpy_takes(dtype, rng):
    a, b = (tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2))
    assert tnsim.plan(a, b, dtype=dtype).dtype == "float32"
    assert tnsim.similarity(a, b, dtype=dtype) == tnsim.similarity(a, b, dtype="float32")
    assert tnsim.pairwise([a, b], dtype=dtype).attrs["dtype"] == "float32"
    parts = tnsim.paths(a, b, dtype=dtype)
    assert parts.values.tolist() == tnsim.paths(a, b, dtype="float32").values.tolist()


def test_an_estimate_answers_by_any_route(rng):
    """A reader of costs need not know whether contractions or forward passes answer."""
    a, b = (tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2))
    routes = []
    for metric in (tnsim.TreeSymmetric(), tnsim.Empirical(rng.normal(size=(5, 3)))):
        for cosine in (False, True):
            plan = tnsim.plan(a, b, metric, cosine=cosine)
            assert isinstance(plan, tnsim.compare.request.Estimate) and plan.routes == (plan,)
            assert plan.outputs == (("AA", "AB", "BB") if cosine else ("AB",))
            assert plan.metric == metric.name and plan.exact and plan.dtype == "float64"
            assert plan.multiplications > 0 and plan.peak_bytes > 0 and 0 < plan.seconds < 1
            fields = json.loads(plan.to_json())
            assert plan.metric in str(fields)
            rows = [line.split("  ")[0] for line in str(plan).splitlines()]
            assert {"metric", "route", "inner products", "multiplications", "peak memory"} <= {
                *rows
            }
            routes.append(plan.route)
    assert routes == ["contractions", "contractions", "data", "data"]


def test_the_metric_follows_the_models(rng):
    """`other` is a keyword, so that no second set of models is taken for a metric."""
    models = [tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2)]
    for verb in (tnsim.pairwise, tnsim.plan_pairwise):
        with pytest.raises(TypeError, match="positional"):
            verb(models, tnsim.TreeSymmetric(), models)


def test_seeds_of_every_kind(rng):
    """A number, a NumPy generator and a JAX key; equal seeds draw equal inputs."""
    a, b = (tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2))

    def drawn(seed):
        return tnsim.check(a, b, samples=64, seed=seed).estimate

    for make in (lambda: np.random.default_rng(3), lambda: jax.random.key(3), lambda: np.int64(3)):
        assert drawn(make()) == drawn(make())
    assert drawn(jax.random.key(3)) == drawn(jax.random.PRNGKey(3)) == drawn(3)
    assert drawn(jax.random.key(3)) != drawn(jax.random.key(4))
    generator = np.random.default_rng(3)
    assert drawn(generator) != drawn(generator)  # a generator goes on
    again = tnsim.check(a, b, samples=64, seed=np.random.default_rng(3))
    assert drawn(again.seed) == again.estimate
    sampled = [tnsim.Product("uniform", 64, seed) for seed in (3, jax.random.key(3))]
    assert tnsim.inner(a, b, sampled[0]) == tnsim.inner(a, b, sampled[1])
    own = [tnsim.baselines.output_cosine([a, b], 64, seed=seed) for seed in (3, jax.random.key(3))]
    assert own[0].equals(own[1])
    assert tnsim.compare_forward(a, a, seed=np.random.default_rng(0)).relative < 1e-5
    for wrong in (-1, 1.5, True, "3", None, rng.normal(size=3)):
        with refused("must be 0 or more, a NumPy generator or a JAX"):
            tnsim.check(a, b, samples=64, seed=wrong)
    with refused("the seed of samples is traced"):
        jax.jit(lambda key: tnsim.Categorical(samples=10, seed=key).seed)(jax.random.key(0))


@pytest.mark.parametrize("dtype", ["int8", "half", complex, "nonsense", 7, {"names": 1}])
def test_other_precisions_are_refused(dtype, rng):
    a = tnsim.Model([bilinear(rng, 3, 4, 2)])
    for verb in (tnsim.similarity, tnsim.slices, tnsim.inner, tnsim.log_inner, tnsim.plan):
        with refused("dtype must be one of float64, float32, found"):
            verb(a, a, dtype=dtype)
    for verb in (tnsim.pairwise, tnsim.plan_pairwise):
        with refused("dtype must be one of float64, float32, found"):
            verb([a, a], dtype=dtype)


def test_a_prompt_shows_metric_guarantee_and_value(rng):
    a, b = (tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2))
    value = tnsim.similarity(a, b)
    assert (
        repr(value)
        == f"Number({float(value)!r}, metric='gaussian', exact=True, route='contractions')"
    )
    assert str(value) == str(float(value)) and f"{value:.3f}" == f"{float(value):.3f}"
    parts = tnsim.slices(a, b)
    assert repr(
        parts
    ) == f"Numbers({parts.tolist()}, metric='gaussian', exact=True, route='contractions')".replace(
        str(parts.tolist()), np.array2string(np.asarray(parts), separator=", ")
    )
    plan = tnsim.plan(a, b, tnsim.GaussianClosure())
    assert repr(plan).startswith("Estimate(closure, exact, contractions: AB; ")
    assert "\n" not in repr(plan)
    assert f"{plan.multiplications:,} multiplications" in repr(plan)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_and_pickles_keep_what_a_number_knows(again, rng):
    """Workers and caches send numbers by pickle, which lost the metric, the error and the route."""
    estimate = tnsim.similarity(np.sin, np.cos, tnsim.Empirical(rng.normal(size=(40, 3))))
    exact = tnsim.inner(*(tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2)))
    assert estimate.standard_error is not None
    for value in (estimate, exact):
        other = again(value)
        assert type(other) is type(value) and float(other) == float(value)
        assert vars(other) == vars(value) and str(other) == str(value)
    parts = tnsim.slices(*(tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2)))
    for value in (parts, parts[:1], parts.astype(np.float32)):
        other = again(value)
        assert repr(other) == repr(value) and other.dtype == value.dtype
        assert vars(other) == vars(value)
    assert type(again(parts) * 2) is np.ndarray


class Tags(html.parser.HTMLParser):
    """The elements of a fragment; every opened one is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.all = [], set()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.all.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_notebook_shows_small_tables(rng):
    a, b = (tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2))
    parts = tnsim.paths(a, b)
    nasty = "<script>alert(1)</script>&\udc80"
    shown = [
        (a, "Bilinear(3 -&gt; 2, rank 4)"),
        (tnsim.plan(a, b), "scalar multiplications"),
        (tnsim.similarity(a, b), "gaussian"),
        (tnsim.check(a, b, samples=64), "standard_error"),
        (parts, "layer 0"),
        (dataclasses.replace(parts, bra=(nasty,) * len(parts.bra)), "&lt;script&gt;"),
    ]
    for thing, text in shown:
        markup = thing._repr_html_()
        tags = Tags()
        tags.feed(markup)
        assert tags.all <= {"table", "caption", "tr", "th", "td"} and not tags.open
        assert text in markup and markup.encode()


def test_pictures_of_a_result_stand_under_its_accessor(rng):
    result = blocks(rng, [2, 2])
    assert type(result) is xr.Dataset and tnsim.Pairwise  # registered with the class
    figure = result.tnsim.plot("heatmap", change_points=[2])
    assert figure.axes[0].images[0].get_array().shape == (4, 4)
    assert result.tnsim.metric == "gaussian" and result.tnsim.exact is True
    assert "plot" not in vars(tnsim.Pairwise)


METRICS = [
    tnsim.Frobenius(),
    tnsim.TreeSymmetric(),
    tnsim.Symmetric(),
    tnsim.Gaussian(),
    tnsim.GaussianClosure(),
    tnsim.Categorical(),
]


def test_metrics_answer_their_protocol():
    for metric in METRICS:
        assert isinstance(metric, tnsim.Metric) and type(metric)().name == metric.name
    layerwise = {metric.name for metric in METRICS if joins_layers(metric)}
    assert layerwise == {"frobenius", "tree", "gaussian", "closure"}
    assert [m.name for m in METRICS if not m.is_exact(2)] == ["closure"]


@pytree
@dataclasses.dataclass(frozen=True, eq=False)
class Signs:
    """A metric from outside: inputs of -1 and 1, and numbers of its own."""

    name = "signs"
    pairs_within_model = False
    weights: Any = None

    def is_exact(self, nonlinear_layers):
        return True

    def points(self, reading):
        side = Rule(np.array([-1.0, 1.0]), np.log([0.5, 0.5]))
        return product_rule([side] * reading.d_in)


def test_protocols_are_told_as_isinstance_tells_them():
    common = {"name": "own", "pairs_within_model": None, "is_exact": bool}
    own = [
        SimpleNamespace(**common, points=max),  # attributes of an instance count
        SimpleNamespace(**common, points=None),
        SimpleNamespace(**common),
        SimpleNamespace(points=max),
    ]
    for missing in common:
        rest = {name: member for name, member in common.items() if name != missing}
        own.append(SimpleNamespace(**rest, points=max))
    assert [adds_up(metric) for metric in own] == [True, *[False] * 6]
    for metric in (*METRICS, *own, Signs(), Signs, None, 3.0, "gaussian"):
        assert adds_up(metric) == isinstance(metric, tnsim.metrics.protocol.FiniteMetric)
    joining = SimpleNamespace(**common, joinings=max)
    for metric in (*own[1:], joining, "gauss", "empirical", tnsim.Gaussian, None):
        with refused(r"expected a metric such as tnsim.Gaussian\(\)"):
            as_metric(metric)


def test_a_metric_from_outside(rng):
    """All coordinates are -1 or 1 alike, as they are in a product of two marginals."""
    a, b = models = [tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2)]
    known = tnsim.Empirical(np.array(list(itertools.product((-1.0, 1.0), repeat=3))))
    assert_close(tnsim.inner(a, b, Signs()), tnsim.inner(a, b, known))
    value = tnsim.similarity(a, b, Signs())
    assert_close(value, tnsim.similarity(a, b, known))
    assert value.metric == "signs"
    result = tnsim.pairwise(models, Signs())
    assert_close(result.log_inner[0, 1], np.log(abs(tnsim.inner(a, b, known))), scale=1.0)
    assert_close(result.similarity[0, 1], value)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", ["tree", "closure", "frobenius", "categorical"])
def test_a_name_stands_for_a_metric_in_every_verb(name, rng):
    a, b = models = [tnsim.Model([bilinear(rng, 3, 4, 2), bilinear(rng, 2, 2, 2)]) for _ in "ab"]
    if name == "categorical":
        a, b = models = [tnsim.Model([bilinear(rng, 3, 4, 2)], n_ctx=1) for _ in "ab"]
    metric = known_metrics[name]()
    number = tnsim.similarity(a, b, name)
    assert (number, number.metric) == (tnsim.similarity(a, b, metric), name)
    assert tnsim.inner(a, b, name) == tnsim.inner(a, b, metric)
    assert tnsim.log_inner(a, b, name) == tnsim.log_inner(a, b, metric)
    assert (tnsim.slices(a, b, name) == tnsim.slices(a, b, metric)).all()
    assert tnsim.plan(a, b, name).metric == tnsim.plan_pairwise(models, name).metric == name
    assert tnsim.pairwise(models, name).identical(tnsim.pairwise(models, metric))
    if name in ("tree", "frobenius"):
        # Components of two layers take a second.
        one, two = models if name == "tree" else (tnsim.Model(m.layers[:1]) for m in models)
        assert tnsim.change(one, two, name).total == tnsim.change(one, two, metric).total
        assert (tnsim.paths(one, two, name).values == tnsim.paths(one, two, metric).values).all()
        assert len(list(tnsim.tensor_networks.networks(a, b, name))) == 1
    if name in ("closure", "categorical"):
        checked = tnsim.check(a, b, name, samples=64)
        assert checked.similarity == number


def test_a_store_tells_the_numbers_of_a_metric_from_outside(rng):
    """Arrays so long that they are printed with an ellipsis."""
    weights = rng.standard_normal(5000)
    first, second = Signs(weights), Signs(np.where(np.arange(5000) == 2500, 0.0, weights))
    assert repr(first) == repr(second)
    reading = Reading(3, None, 1)
    known = metric_parameters(first, reading)
    assert known == metric_parameters(Signs(weights.copy()), reading)
    assert known != metric_parameters(second, reading)


class Held:
    """A metric from outside with a number, and no pytree: coordinates of plus or minus that size."""

    name = "held"
    pairs_within_model = False

    def __init__(self, size):
        self.size = size

    def is_exact(self, nonlinear_layers):
        return self.size < 3

    def points(self, reading):
        side = Rule(np.array([-1.0, 1.0]) * float(self.size), np.log([0.5, 0.5]))
        return product_rule([side] * reading.d_in)


def test_a_number_in_a_metric_from_outside_counts(rng, tmp_path):
    models = [tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2)]
    for size in (1.0, 0.0, 5.0, np.float32(0.5), 1):
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=3)))
        found = tnsim.inner(*models, Held(size))
        assert_close(found, tnsim.inner(*models, tnsim.Empirical(float(size) * signs)))
        assert found.exact is bool(size < 3)
    tnsim.pairwise(models, Held(1.0), store=tmp_path / "run")
    with refused("other parameters there", tnsim.errors.StoreMismatch):
        tnsim.pairwise(models, Held(0.5), store=tmp_path / "run")
    one, again = (metric_parameters(Held(1.0), Reading(3, None, 1)) for _ in range(2))
    assert one == again


def test_what_a_metric_from_outside_has_in_its_code_counts(rng, tmp_path):
    """No attribute tells such metrics apart, and a measure may have any mass."""
    models = [tnsim.Model([bilinear(rng, 2, 4, 2, True)]) for _ in range(2)]

    def metric(size, mass=1.0):
        class Own(Held):
            __slots__ = ()

            def __init__(self):
                pass

            def is_exact(self, nonlinear_layers):
                return True

            def points(self, reading):
                side = Rule(np.array([-size, size]), np.log([0.3 * mass, 0.7 * mass]))
                return product_rule([side] * reading.d_in)

        return Own()

    for size in (1.0, 2.0):
        known = tnsim.Product(([-size, size], [0.3, 0.7]))
        for mass in (1.0, 2.0):
            found = tnsim.similarity(*models, metric(size, mass), centred=True)
            assert_close(found, tnsim.similarity(*models, known, centred=True), scale=1.0)
    tnsim.pairwise(models, metric(1.0), store=tmp_path / "run")
    tnsim.pairwise(models, metric(1.0), store=tmp_path / "run")
    with refused("other parameters there", tnsim.errors.StoreMismatch):
        tnsim.pairwise(models, metric(2.0), store=tmp_path / "run")


LOG = np.log(np.full(5, 0.2))


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ((5, np.ones((0, 2)), LOG[:0]), r"points \d to \d .* has inputs \(., 2\) and weights"),
        (
            (5, np.full((5, 2), np.inf), LOG),
            "of a measure have NaN or infinite inputs",
        ),
        ((5, np.ones((5, 2)), LOG * np.nan), "have the logarithm nan among their weights"),
        ((5, np.ones((5, 2)) * 1j, LOG), "are real numbers .* found complex128 and float64"),
        ((0, np.ones((0, 2)), LOG[:0]), r"with one point at least, found Points\(count=0"),
        ((5, np.ones((5, 2)), LOG, 6), "has 6 replicates of 5 points"),
        (None, "with one point at least, found None"),
        ((5, np.ones((5, 2)), LOG * np.inf), "no input of held has a weight, so there is no mean"),
    ],
)
def test_what_is_no_measure_is_refused(points, said, rng):
    models = [tnsim.Model([bilinear(rng, 2, 4, 2)]) for _ in range(2)]

    def measure(reading):
        if points is None:
            return None
        count, inputs, log_weights, *replicates = points

        def block(start, stop):
            return WeightedPoints(inputs[start:stop], log_weights[start:stop])

        return Points(count, block, drawn=True, replicates=sum(replicates))

    metric = Held(1.0)
    metric.points = measure
    with refused(said):
        tnsim.similarity(*models, metric, centred=True)
    with refused(said):
        tnsim.pairwise(models, metric, centred=True)


def test_every_layer_and_metric_is_shown_in_one_line(rng):
    """As the class by name, arrays by dtype and shape, and nothing that nobody gave."""
    square = np.eye(30)
    layer = tnsim.Bilinear(square, square, square)
    shown = {
        tnsim.Linear(square, np.ones(30)): "Linear(weight=float64[30, 30], bias=float64[30])",
        tnsim.Residual(layer, scale=0.5): (
            "Residual(layer=Bilinear(left=float64[30, 30], right=float64[30, 30], "
            "down=float64[30, 30]), scale=0.5)"
        ),
        tnsim.Attention(*[square] * 6, n_heads=3): (
            "Attention(q1=float64[30, 30], k1=float64[30, 30], q2=float64[30, 30], "
            "k2=float64[30, 30], v=float64[30, 30], o=float64[30, 30], n_heads=3)"
        ),
        tnsim.Gaussian(): "Gaussian()",
        tnsim.Gaussian(cov=square): "Gaussian(cov=float64[30, 30])",
        tnsim.Empirical(square): "Empirical(inputs=float64[30, 30])",
    }
    for value, text in shown.items():
        assert repr(value) == text


def test_a_result_says_its_guarantee_in_words(rng):
    result = tnsim.pairwise([tnsim.Model([bilinear(rng, 3, 4, 2)])], progress=False)
    for text in (repr(result), result._repr_html_()):
        lines = re.sub("<[^>]*>", " ", text)
        for said in (r"exact\b\W+yes", r"symmetric\b\W+yes", r"caveats\b\W+none"):
            assert re.search(said, lines), said
    assert result.attrs["exact"] == 1 and result.attrs["caveats"] == []
    rough = tnsim.pairwise(
        [tnsim.Model([bilinear(rng, 3, 4, 3), bilinear(rng, 3, 4, 2)])], tnsim.GaussianClosure()
    )
    assert re.search(r"exact: +no", repr(rough))
