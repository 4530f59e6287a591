"""The request of a verb, the question of its route, and the inner products that answer both.

What a comparison would take is an `Estimate`, one class for every route, of a pair and of many.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from tnsim.checkpoints.given import check_chooses, given_model
from tnsim.compare.operands import content, is_known_constant
from tnsim.engine.plan import Plan
from tnsim.engine.planner import Budget
from tnsim.engine.runtime.execution import Tier
from tnsim.errors import ModelError, TooLarge, UnsupportedLayer
from tnsim.long_work import seconds_text
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.metric import Gaussian, as_metric, estimate_of, is_metric
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.functions import Function, is_function, is_module, loaded, refused_under
from tnsim.models.model import AnyModel, Model, check_comparable, check_numbers, in_numpy, terms
from tnsim.names import Pair
from tnsim.problems.at_points import Sums, Terms
from tnsim.problems.hidden_units import has_kernels
from tnsim.problems.layer_kinds import kinds, nonlinear
from tnsim.scaled import ScaledSum
from tnsim.sessions import session
from tnsim.tables import html_table

log: logging.Logger = logging.getLogger(__name__)
V = TypeVar("V")

CROSS = (Pair("A", "B"),)  # the inner product alone
ALL = (Pair("A", "A"), Pair("A", "B"), Pair("B", "B"))  # the inner product and both norms
SELF = (Pair("A", "A"),)  # a model with itself, where all three are equal
Comparable: TypeAlias = AnyModel | Function | str | os.PathLike[str]
"""A model or a sum of models, a module of PyTorch or the path of a file; under `Empirical` also a
plain function."""
MOST_DEGREE = 10**100
"""Highest degree of a polynomial that is compared. The logarithms of its values grow with the
degree, and squares of these logarithms must be floats."""


Two: TypeAlias = tuple[Comparable, Comparable]
"""The two sides of a comparison."""


@dataclass(frozen=True, eq=False)
class Question:
    """A comparison as far as its route depends on it.

    Args:
        models: All models of both sides; empty where only plain functions are compared. The first
            and the last are an example of a pair.
        metric: Metric of the comparison.
        wanted: Inner products that are wanted.
        slices: Whether outputs are told apart.
        dtype: Precision of the computation.
        traced: Whether models or metric are traced, so that no route may look at numbers.
    """

    models: tuple[Model, ...]
    metric: Metric
    wanted: tuple[Pair, ...]
    slices: bool
    dtype: str
    traced: bool = False

    @property
    def distinct(self) -> list[Model]:
        """The models, each once."""
        return list({id(model): model for model in self.models}.values())

    def once(self, what: Hashable, make: Callable[[], V]) -> V:
        """What questions of equal form have in common: found once in a session, else at every call.

        Args:
            what: Name of what is made, with all that it depends on beside the form.
            make: Function that makes it; what it makes must hold neither a model nor the metric.
        """
        if self._form is None:
            return make()
        return session().results.get((what, self._form), make)

    @cached_property
    def _form(self) -> Hashable:
        """The question without the numbers in its models; None where routes are not weighed."""
        if self.traced or adds_up(self.metric):
            return None
        models = [id(model) for model in self.models]
        layers = [id(layer) for model in self.models for layer in model.layers]
        shapes = [(kinds(model), model.parameters, model.n_ctx) for model in self.models]
        # Models that occur twice, or have layers in common, run once.
        shared = tuple(map(models.index, models)), len(set(layers)) < len(layers)
        asked = content(self.metric), self.wanted, self.slices, self.dtype
        return (*shapes, *shared, *asked)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the inner products."""
        return tuple(pair.group for pair in self.wanted)


class Request(NamedTuple):
    """What a verb asks of two models, or of two sums of models.

    Args:
        metric: Metric of the comparison.
        dtype: Precision of the computation.
        budget: Limits of the computation.
        squared_norms: Whether `AA` and `BB` are wanted as well as `AB`, as a cosine needs.
        slices: Whether outputs are told apart.
        centred: Whether the models are given without their means.
    """

    metric: Metric
    dtype: str
    budget: Budget
    squared_norms: bool = False
    slices: bool = False
    centred: bool = False

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The inner products that are wanted."""
        return ALL if self.squared_norms else CROSS


class InnerProducts(NamedTuple):
    """Inner products of two models.

    Args:
        values: Inner product `AB` and, with norms, `AA` and `BB`.
        exponent: Exponent of the power of two by which `AB` is to be multiplied. The norms lack
            powers of their own, which cancel in a cosine.
        traced: Whether the values are traced.
        dtype: Precision of the computation: float64 also where float32 was asked for and would
            have left few digits.
        route: Name of the route, see `Estimate.route`.
        sums: Sums of the forward passes over groups of points, for standard errors.
        inputs: Number of inputs of the forward passes, None where nothing was run.
        mean_share: Share of the squared norm that both functions have in their means over the
            inputs, the smaller of the two; None where it is not known.
    """

    values: dict[str, ScaledSum]
    exponent: Any
    traced: bool
    dtype: str
    route: str
    sums: Sums | None = None
    inputs: int | None = None
    mean_share: float | None = None


Answer: TypeAlias = Callable[[InnerProducts, Two, Request], Any]
"""A function of inner products that gives a number, or a pair of a number and of numbers that
accompany it without derivatives."""


def comparables(
    a: Any, b: Any, metric: Any, n_ctx: int | None, *, runs: bool = False
) -> tuple[Any, Any]:
    """The two sides of a comparison as models and functions.

    Args:
        a, b: Arguments of a verb, see `Comparable`.
        metric: Metric of the comparison. `Empirical` runs modules on its inputs.
        n_ctx: Length of the sequences on which models with attention are compared.
        runs: Whether modules that cannot be read as models are compared by their outputs.

    Returns:
        Models, sums of models and plain functions.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: A file or a module cannot be read as a model,
            or a metric stands in the place of the second side.
    """
    if is_metric(b):  # as `pairwise` has it, after many models
        raise ModelError(
            f"the second of two networks is a metric, {type(b).__name__}: give it as metric="
        )
    inputs = output = None
    if isinstance(metric, Empirical):
        inputs, output = metric.inputs, metric.output
    first = given_model(a, n_ctx, inputs, output, runs, shape_of(metric, a, b))
    shape = shape_of(metric, first, b)
    both = first, first if b is a else given_model(b, n_ctx, inputs, output, runs, shape)
    check_chooses(output, both)
    return both


def shape_of(metric: Any, *given: Any) -> tuple[int, ...]:
    """The shape of an input as a metric weighs it, or the width that a model reads.

    Args:
        metric: Metric of a comparison.
        given: What is compared.

    Returns:
        The shape (d,) or (positions, d); () where neither the moments of the metric nor a model
        say it.

    Example:
        >>> shape_of(Gaussian(mean=np.zeros((2, 3)))), shape_of(Gaussian())
        ((2, 3), ())
    """
    mean, cov = (getattr(metric, name, None) for name in ("mean", "cov"))
    if mean is not None and np.ndim(mean):
        return tuple(np.shape(mean))
    if cov is not None and np.ndim(cov):
        return tuple(np.shape(cov)[-1:])
    models = [part for one in given if isinstance(one, AnyModel) for _, part in terms(one)]
    return (in_numpy(models[0]).d_in,) if models else ()


def with_metric(a: Any, b: Any, metric: Metric | str, n_ctx: int | None) -> tuple[Any, Any, Metric]:
    """The two sides of a comparison, and the metric that compares them.

    Args:
        a, b: Arguments of a verb, see `Comparable`.
        metric: Metric that was asked for, or its name.
        n_ctx: Length of the sequences on which models with attention are compared.

    Returns:
        Models, sums of models and plain functions; and the metric, or its estimate where `Gaussian`
        has no exact inner product of them, see `estimated`.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: A file or a module cannot be read as a model,
            and cannot be run on inputs of the metric.
    """
    metric = as_metric(metric)
    a, b = comparables(a, b, metric, n_ctx, runs=may_estimate(metric))
    return a, b, estimated(metric, (a, b), n_ctx)


def may_estimate(metric: Any) -> bool:
    """Whether a metric has an estimate for networks without an exact inner product.

    Example:
        >>> import tnsim
        >>> may_estimate(tnsim.Gaussian()), may_estimate(tnsim.Gaussian(samples=0))
        (True, False)
    """
    # A subclass may weigh inputs otherwise, so only the class itself has normal inputs.
    return type(metric) is Gaussian and metric.samples > 0


def estimated(metric: Any, models: Sequence[Any], n_ctx: int | None) -> Any:
    """The metric by which models and functions are compared: exact, or by an estimate.

    Args:
        metric: Metric that was asked for.
        models: Models, sums of models, modules and plain functions under comparison.
        n_ctx: Length of sequences, where modules or functions read sequences.

    Returns:
        The metric itself; of a `Gaussian` that knows no exact inner product of these models a
        `GaussianEstimate`, which runs them on normal inputs.

    Raises:
        ModelError: Nothing says which inputs the functions take.

    Example:
        >>> import tnsim
        >>> half = tnsim.Linear([[0.5]]), tnsim.Elementwise("relu")
        >>> shallow, deep = tnsim.Model(half), tnsim.Model(half * 2)
        >>> [type(estimated(tnsim.Gaussian(), [m], None)).__name__ for m in (shallow, deep)]
        ['Gaussian', 'GaussianEstimate']
    """
    if not may_estimate(metric):
        return metric
    read = [part for model in models if isinstance(model, AnyModel) for _, part in terms(model)]
    if not any(map(is_function, models)):
        if not read:
            return metric  # neither models nor functions, which the comparison refuses
        try:
            has_kernels(read, metric)
        except UnsupportedLayer as refusal:
            log.info("no exact inner product, so an estimate is made: %s", refusal)
        else:
            return metric
    return estimate_of(metric, _input_shape(metric, models, read, n_ctx))


def _input_shape(
    metric: Gaussian, models: Sequence[Any], read: Sequence[Model], n_ctx: int | None
) -> tuple[int, ...]:
    """The shape of a single input: as a model reads it, as the metric says, or a module takes."""
    if read:
        one = read[0]
        return (one.d_in,) if one.n_ctx is None else (one.n_ctx, one.d_in)
    if known := shape_of(metric):
        return known if n_ctx is None or len(known) == 2 else (n_ctx, *known)
    for model in map(loaded, models):
        if is_module(model):
            from tnsim.checkpoints.module_calls import shape_of_inputs

            return shape_of_inputs(model, n_ctx)
    raise ModelError(
        "nothing says which inputs these functions take: give tnsim.Gaussian(mean=np.zeros(d)) "
        "for vectors of d coordinates, or inputs of your own by tnsim.Empirical(inputs)"
    )


def at_numbers(a: Any, b: Any, metric: Any) -> bool:
    """Whether JAX differentiates a comparison, with numbers at hand, along plans or kernels.

    Args:
        a, b: Models, combinations of models or functions.
        metric: Metric of the comparison. Points of finite metrics run inside the trace.

    Example:
        >>> import numpy as np, tnsim
        >>> found = []
        >>> def loss(weight):
        ...     model = tnsim.Model([tnsim.Linear(weight)])
        ...     found.append(at_numbers(model, model, tnsim.Gaussian()))
        ...     return weight.sum()
        >>> _ = jax.grad(loss)(np.eye(2)), jax.jit(loss)(np.eye(2)), loss(np.eye(2))
        >>> found
        [True, False, False]
    """
    if is_known_constant(a) and is_known_constant(b) and not jax.tree.leaves(metric):
        return False
    leaves = jax.tree.leaves((a, b, metric))
    tracers = [leaf for leaf in leaves if isinstance(leaf, Tracer)]
    if not tracers or is_function(a) or is_function(b) or adds_up(metric):
        return False
    return all(tracer.to_concrete_value() is not None for tracer in tracers)


def summands(model: Any) -> Terms:
    """The coefficients and models of a sum; a model or a plain function is a sum of a single term.

    Raises:
        ModelError: The argument is neither a model, nor a combination of models, nor a function.
    """
    return ((1.0, model),) if is_function(model) else terms(model)


def smaller_share(*shares: float) -> float | None:
    """The smaller of two shares; None where one of them is not known.

    Example:
        >>> smaller_share(0.5, 0.9), smaller_share(0.5, math.nan), smaller_share()
        (0.5, None, None)
    """
    return None if not shares or np.isnan(shares).any() else min(shares)


def highest_degree(models: Iterable[Comparable]) -> int:
    """The highest degree, or growth, of the models; plain functions count as degree 1."""
    degrees = [1]
    for model in models:
        degrees += [part.growth for _, part in summands(model) if isinstance(part, Model)]
    return max(degrees)


def is_exact(metric: Metric, models: Iterable[Model]) -> bool:
    """Whether a metric's definition is met exactly, of these models, whatever the route.

    Args:
        metric: Metric of the comparison.
        models: Models that are compared; a metric that adds up over inputs does not ask for them.

    Example:
        >>> import tnsim
        >>> is_exact(tnsim.Categorical(), []), is_exact(tnsim.Categorical(samples=10), [])
        (True, False)
    """
    depth = 0 if adds_up(metric) else nonlinear(*map(kinds, models))
    return bool(metric.is_exact(depth))


def check_comparison(a: Any, b: Any, metric: Any) -> None:
    """Raise `ModelError` or `UnsupportedLayer` unless the metric can compare the two models."""
    degree = highest_degree((a, b))
    if degree > MOST_DEGREE:
        raise ModelError(
            f"a polynomial of degree 10^{math.log10(degree):.0f} has values whose logarithms "
            "are beyond float64: degrees up to 10^100 are compared, which are 332 bilinear "
            "layers; compare models of fewer layers"
        )
    if is_function(a) or is_function(b):
        check_numbers(*(model for model in (a, b) if isinstance(model, AnyModel)))
        if not isinstance(metric, Empirical):  # a plain function gives outputs and nothing else
            raise refused_under(metric)
        return
    one, two = terms(a)[0][1], terms(b)[0][1]
    check_numbers(*(model for model in (a, b) if not is_known_constant(model)))
    check_comparable(one, two)
    has_kernels([part for model in (a, b) for _, part in terms(model)], metric)
    if one.n_ctx is None and (one.attends or two.attends):
        raise ModelError(
            "attention is compared on sequences of one length: give n_ctx=, as in "
            "tnsim.similarity(a, b, n_ctx=12), or tnsim.load(..., n_ctx=12) (--n-ctx)"
        )


@dataclass(frozen=True)
class Tiles:
    """How a run over many pairs goes: the matrix of pairs is computed tile by tile.

    Args:
        pairs: Pairs of distinct models.
        side: Models per side of a tile.
        number: Number of tiles.
        together: Number of tiles that may run at once on the cores of a CPU.
        streamed: Whether vectors of models are too large to be kept, and are made again for every
            tile, part by part.
        programs: Number of compiled programs.
        tier: Tier in which plans of pairs run, "interpret" or "compile".
    """

    pairs: int
    side: int
    number: int
    together: int = 1
    streamed: bool = False
    programs: int = 0
    tier: Tier = "compile"


@dataclass(frozen=True)
class Estimate:
    """The costs of the inner products of two models, or of many pairs, along a route.

    Made by `tnsim.plan` and `tnsim.plan_pairwise`, which run nothing. The costs are those of all
    inner products together.

    Args:
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        route: Way to compute: "contractions" of tensors, sums over "kernels" of hidden units,
            vectors of coefficients ("features", or "receptive fields" of sparse layers), or the
            kind of points of forward passes, "data", "quadrature", "enumeration" or "sampling".
        dtype: Precision of the computation, such as "float64".
        outputs: Names of the inner products: `AB` is `<a|b>`, `AA` and `BB` are squared norms.
        multiplications: Scalar multiplications.
        peak_bytes: Bytes of all arrays alive at once, without the arrays of the models.
        seconds: Expected time of a call that has its plan, on two cores of a usual processor; of
            many pairs without compiling and without reading files. The speed of the machine in use
            plays no part, so equal questions have equal routes, and numbers have equal bits.
        facts: Counts by which a route tells its size, such as ("forward passes", 1000), the passes
            of each model.
        contraction: Plan of the contractions of a pair; None on the other routes.
        tiles: How a run over many pairs goes, with the numbers of its `pairs` of distinct models,
            of models per `side` of a tile, of tiles (`number`), of those that may run at once
            (`together`) and of compiled `programs`, whether vectors are `streamed`, and the `tier`;
            None of a single pair.
        others: Estimates of the other routes that were weighed, the fastest first.
        passed_over: Routes without an estimate, each with the reason.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> for metric in (tnsim.Gaussian(), tnsim.Empirical(np.eye(2))):
        ...     estimate = tnsim.plan(model, model, metric)
        ...     print(estimate.route, estimate.multiplications > 0, estimate.peak_bytes > 0)
        contractions True True
        data True True
        >>> print(estimate)
        metric           empirical (on these inputs)
        route            data: 2 forward passes
        inner products   AB, without the norms of a similarity (cosine=True, --cosine)
        multiplications  68 scalar multiplications of float64
        peak memory      0.00 MiB of float64 beside the models
        expected         about 0.006 s
    """

    metric: str
    exact: bool
    route: str
    dtype: str
    outputs: tuple[str, ...]
    multiplications: int
    peak_bytes: int
    seconds: float
    facts: tuple[tuple[str, int], ...] = ()
    contraction: Plan | None = None
    tiles: Tiles | None = None
    others: tuple[Estimate, ...] = ()
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def routes(self) -> tuple[Estimate, ...]:
        """This estimate and those of the other routes."""
        return self, *self.others

    def fact(self, name: str) -> int:
        """A count of `facts` by its name. Raises `KeyError` where the route has none."""
        return dict(self.facts)[name]

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, of numbers, texts and lists, without the plan of contractions.

        `facts` stand in a dictionary of their own.
        """
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        del data["contraction"]
        others = [other.as_dict() for other in self.others]
        return data | {
            "outputs": list(self.outputs),
            "tiles": None if self.tiles is None else asdict(self.tiles),
            "facts": dict(self.facts),
            "others": others,
            "passed_over": dict(self.passed_over),
        }

    def to_json(self) -> str:
        """The fields as a JSON object; `contraction` is the document of `Plan.to_json`, or null."""
        plan = None if self.contraction is None else json.loads(self.contraction.to_json())
        return json.dumps(self.as_dict() | {"contraction": plan})

    def __repr__(self) -> str:
        guarantee = "exact" if self.exact else "not exact"
        return (
            f"Estimate({self.metric}, {guarantee}, {self.route}: {', '.join(self.outputs)}; "
            f"{self._costs})"
        )

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {text}" for name, text in self._table_rows())

    def _repr_html_(self) -> str:
        return html_table("Plan", self._table_rows())

    @property
    def _costs(self) -> str:
        return (
            f"{count_text(self.multiplications)} multiplications, "
            f"{self.peak_bytes / 2**20:,.2f} MiB of {self.dtype}, {seconds_text(self.seconds)}"
        )

    @property
    def _guarantee(self) -> str:
        if self.exact:
            return "on these inputs" if self.route == "data" else "exact"
        return "estimate" if self.route == "sampling" else "approximation"

    def _table_rows(self) -> list[tuple[str, str]]:
        """Names and descriptions of the properties that tables show."""
        work = f"{count_text(self.multiplications)} scalar multiplications of {self.dtype}"
        memory = f"{self.peak_bytes / 2**20:,.2f} MiB of {self.dtype} beside the models"
        counted = ", ".join(f"{count_text(number)} {name}" for name, number in self.facts)
        products = ", ".join(self.outputs)
        if products == "AB":
            products += ", without the norms of a similarity (cosine=True, --cosine)"
        rows = [
            ("metric", f"{self.metric} ({self._guarantee})"),
            ("route", f"{self.route}: {counted}" if counted else self.route),
            ("inner products", products),
            ("multiplications", work),
            ("peak memory", memory),
        ]
        if self.contraction is not None:
            rows = [*rows[:-2], *self.contraction.details]
        if self.tiles is not None:
            tiles = self.tiles
            rows[2:3] = [
                ("pairs", f"{tiles.pairs:,}"),
                ("tiles", f"{tiles.number:,} of {tiles.side} x {tiles.side}"),
            ]
            rows[-1] = ("peak memory", f"{self.peak_bytes / 2**20:,.2f} MiB with a tile of models")
            rows.append(("tier", f"{tiles.tier}, {tiles.programs:,} compiled programs"))
        rows.append(("expected", seconds_text(self.seconds)))
        rows += [(f"or {other.route}", other._costs) for other in self.others]
        return rows + [(f"not {route}", why) for route, why in self.passed_over]


def count_text(number: int) -> str:
    """A count as text; a count such as vocab ** n_ctx may be beyond a float.

    Example:
        >>> count_text(1200), count_text(50**12)
        ('1,200', '10^20.4')
    """
    return f"{number:,}" if number < 10**15 else f"10^{math.log10(number):,.1f}"


def work_text(number: int) -> str:
    """A large count with three digits.

    Example:
        >>> work_text(123456), work_text(10**400)
        ('1.23e+05', '10^400.0')
    """
    return f"{number:.3g}" if number < 10**300 else count_text(number)


def check_affordable(
    estimate: Estimate,
    budget: Budget,
    what: str,
    less_work: str,
    less_memory: str,
    program_bytes: int = 0,
) -> None:
    """Raise `TooLarge` where an estimate is beyond the budget.

    Args:
        estimate: Estimate of a route.
        budget: Limits of memory and work.
        what: Words for the computation, the beginning of the message.
        less_work: Advice where there are too many multiplications.
        less_memory: Advice where the arrays are too large.
        program_bytes: Bytes that compiling takes.
    """
    if estimate.multiplications > budget.multiplications:
        raise TooLarge(
            f"{what} takes {work_text(estimate.multiplications)} multiplications, more than the "
            f"budget of {budget.multiplications:.3g}; {less_work}"
        )
    room = budget.room(program_bytes, estimate.peak_bytes)
    if estimate.peak_bytes > room:
        raise TooLarge(
            f"{what} needs {estimate.peak_bytes / 2**30:.3g} GiB, and the budget is "
            f"{room / 2**30:.3g} GiB; {less_memory}"
        )
