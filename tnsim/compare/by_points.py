"""The choice between forward passes and a plan, and the points and cost of forward passes.

These metrics are answered at points instead of by a plan:

    Empirical, Product    always
    Categorical           beyond a single attention layer, and where samples are asked for
    Gaussian              of several nonlinear layers, where Gauss-Hermite nodes are fewer
                          multiplications than diagrams

A sampled value has a standard error, see `numbers`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from tnsim.compare.planned import plan_for
from tnsim.engine.budget import Budget, check_budget
from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.categorical import Categorical
from tnsim.metrics.metric import Gaussian, joins_whole_trees
from tnsim.metrics.points import Points, Reading
from tnsim.metrics.protocol import FiniteMetric, Metric, adds_up
from tnsim.metrics.quadrature import gaussian_points, most_directions
from tnsim.models.arrays import is_traced
from tnsim.models.forward import directions, reading_layers
from tnsim.models.model import Model
from tnsim.names import Pair
from tnsim.problems import forward
from tnsim.problems.families import choose, has_plan
from tnsim.problems.tensors.kinds import kinds, nonlinear
from tnsim.tables import html_table

Rows: TypeAlias = Float[np.ndarray, "rows in"]

_FREE_FOR_A_PAIR, _FEW_LEGS, _PER_PAIRING = 2**27, 12, 2**14
"""Multiplications that take less time than planning diagrams, of models of more than `_FEW_LEGS`
legs together, and for each pairing of fewer legs: two bilinear layers a side have 105 pairings."""


@dataclass(frozen=True)
class ForwardPlan:
    """Forward passes that would run for the inner products of two models.

    Args:
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        route: Kind of points: `data`, `quadrature`, `enumeration` or `sampling`.
        dtype: Precision of the computation.
        outputs: Names of the inner products: `AB` is `<a|b>`, `AA` and `BB` are squared norms.
        points: Number of inputs that each model runs on.
        multiplications: Scalar multiplications of all forward passes and of the products of their
            outputs.
        peak_bytes: Bytes of the arrays of a single batch. A small budget makes batches smaller.
        least_bytes: Bytes of the arrays of a batch of a single point, the least that a budget must
            have.

    Example:
        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> print(tnsim.plan(line, line, tnsim.Empirical([[1.0], [2.0]])))
        metric           empirical (exact)
        route            forward passes at 2 points (data)
        inner products   AB
        multiplications  10 scalar multiplications of float64
        peak memory      0.00 MiB of float64 beside the models
    """

    metric: str
    exact: bool
    route: str
    dtype: str
    outputs: tuple[str, ...]
    points: int
    multiplications: int
    peak_bytes: int
    least_bytes: int

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {text}" for name, text in self._point_rows())

    def _repr_html_(self) -> str:
        return html_table("Plan", self._point_rows())

    def _point_rows(self) -> list[tuple[str, str]]:
        guarantee = "exact" if self.exact else "estimate"
        return [
            ("metric", f"{self.metric} ({guarantee})"),
            ("route", f"forward passes at {_count_text(self.points)} points ({self.route})"),
            ("inner products", ", ".join(self.outputs)),
            (
                "multiplications",
                f"{_count_text(self.multiplications)} scalar multiplications of {self.dtype}",
            ),
            (
                "peak memory",
                f"{self.peak_bytes / 2**20:,.2f} MiB of {self.dtype} beside the models",
            ),
        ]


def _count_text(number: int) -> str:
    """A count as text; a count such as vocab ** n_ctx may be beyond a float."""
    return f"{number:,}" if number < 10**15 else f"10^{math.log10(number):,.1f}"


def points_of(
    models: Sequence[Model],
    metric: Metric,
    wanted: tuple[Pair, ...],
    slices: bool,
    dtype: str,
    read: Sequence[Rows | None] | None = None,
    most: float = math.inf,
) -> Points | None:
    """The points at which models are compared, None where a plan answers.

    Whoever needs points asks here, with all models that are to run on them: points depend on what
    each of them reads, and models of equal layers read different directions.

    Args:
        models: All models; empty where only plain functions are compared. Where `read` is given, a
            model of each structure is enough.
        metric: Metric of the comparison.
        wanted: Inner products that are wanted, for the cost of a plan.
        slices: Whether outputs are told apart.
        dtype: Precision of the computation.
        read: Rows from `what_is_read` of every model, where not all models are at hand.
        most: Multiplications that another exact route takes, and no plan is searched for.

    Returns:
        The points, or None.

    Raises:
        ModelError: The metric has no inputs for these models.
    """
    # Tokens have an exact plan up to a single attention layer.
    if isinstance(metric, Categorical) and metric.samples is None and has_plan(models, metric):
        return None
    if adds_up(metric):
        _check_concrete(metric)
        return metric.points(reading_of(models))
    # A subclass may weigh inputs otherwise, so only the class itself has quadrature.
    if type(metric) is not Gaussian or not models:
        return None
    if not joins_whole_trees(Gaussian, nonlinear(*map(kinds, models))):
        return None
    if read is None:
        # Models with switches share the layers that they read inputs with.
        readers = {tuple(map(id, reading_layers(model))): model for model in models}
        read = [what_is_read(model, metric) for model in readers.values()]
    # A model that reads too many directions has no quadrature.
    rows = [sample for sample in read if sample is not None]
    if len(rows) < len(read):
        return None
    points = gaussian_points(metric, reading_of(models), np.concatenate(rows))
    if points is None:
        return None
    # Both routes are exact, so the cheaper wins for a pair; equal costs go to forward passes, which
    # plan nothing.
    pair = {id(model): model for model in (models[0], models[-1])}
    passes = sum(_forward_work(model, points) for model in pair.values())
    if passes > most:
        return None
    if passes <= _diagram_work(models, metric, wanted, slices, dtype, passes):
        return points
    return None


def what_is_read(model: Model, metric: Metric) -> Rows | None:
    """Rows that span the directions in which a model reads a single position, for quadrature.

    Rows depend on the weights, so models of equal layers have different rows.

    Returns:
        The rows; None where there are too many, or the metric has no quadrature.
    """
    if type(metric) is not Gaussian or not model.is_polynomial:
        return None
    return directions(model, most_directions(model.n_ctx))


def _check_concrete(metric: FiniteMetric) -> None:
    """Raise `ModelError` where points or their weights are traced."""
    if is_traced(metric):
        raise ModelError(
            f"{type(metric).__name__} has arrays that are traced, and says with numbers at which "
            "inputs the models run: make the metric outside the JAX trace, of NumPy arrays; "
            "weights of models may be traced"
        )


def forward_plan(
    models: Sequence[Any],
    metric: Metric,
    points: Points,
    dtype: str,
    wanted: tuple[Pair, ...] = (Pair("A", "B"),),
) -> ForwardPlan:
    """The plan of forward passes: every model once, and a product of outputs for every pair."""
    known = [model for model in models if isinstance(model, Model)]
    passes = sum(_forward_work(model, points) for model in known)
    outputs = 0  # the outputs of a plain function are not known before it runs
    if known:
        # Models that are compared have outputs of one shape, so any of them tells their number.
        outputs = forward.outputs(known[-1].d_out, known[-1].n_ctx or 1, points)
    # The Gram matrix of outputs is symmetric: k (k + 1) / 2 products, each over all output values.
    pairs = len(models) * (len(models) + 1) // 2
    work = passes + pairs * outputs
    exact = not adds_up(metric) or metric.is_exact(0)  # quadrature is exact
    needed = forward.needs(known, points, dtype)
    return ForwardPlan(
        metric=metric.name,
        exact=exact,
        route=route_name(metric, points),
        dtype=dtype,
        outputs=tuple(pair.group for pair in wanted),
        points=points.count,
        multiplications=work,
        peak_bytes=math.ceil(needed.most(points.count)),
        least_bytes=math.ceil(needed.least),
    )


def route_name(metric: Metric, points: Points) -> str:
    """The kind of points, as `ForwardPlan.route` names it."""
    if not adds_up(metric):
        return "quadrature"
    if points.drawn:
        return "sampling" if getattr(metric, "samples", None) else "data"
    return "enumeration" if points.tokens else "quadrature"


def check_affordable(plan: ForwardPlan, metric: Metric, budget: Budget) -> None:
    """Raise `TooLarge` where forward passes are beyond the budget."""
    check_budget(budget)
    if plan.multiplications <= budget.multiplications:
        room = budget.room(0, plan.least_bytes)
        forward.check_room(plan.least_bytes, room, f"forward passes of {plan.metric}")
        return
    advice = "fewer inputs"
    if not adds_up(metric):
        advice = "GaussianClosure(), an approximation,"
    elif hasattr(metric, "samples"):
        advice = f"{type(metric).__name__}(..., samples=100_000), an estimate with its error,"
    raise TooLarge(
        f"{plan.metric} runs through {_count_text(plan.points)} inputs here, which takes "
        f"{_count_text(plan.multiplications)} multiplications, more than the budget of "
        f"{budget.multiplications:.3g}; use {advice} or a larger tnsim.Budget"
    )


def reading_of(models: Sequence[Model]) -> Reading:
    """The form of the inputs of models; plain functions alone tell nothing."""
    if not models:
        return Reading(0, None, 0)
    first = models[0]
    layers = [layer for model in models for layer in kinds(model)]
    causal = all(layer.causal or not layer.mixes_positions for layer in layers)
    return Reading(first.d_in, first.n_ctx, max(model.degree for model in models), causal)


def _forward_work(model: Model, points: Points) -> int:
    """Multiplications of the forward passes of a model at some points."""
    return forward.multiplications(kinds(model), model.n_ctx or 1, points)


def _diagram_work(
    models: Sequence[Model],
    metric: Metric,
    wanted: tuple[Pair, ...],
    slices: bool,
    dtype: str,
    passes: float,
) -> float:
    """Multiplications of a plan of diagrams, or a number above those of the forward passes.

    Diagrams are not planned where planning alone takes longer than the forward passes, and planning
    ends where a few products take longer.
    """
    a, b = models[0], models[-1]
    legs = a.degree + b.degree
    free = _FREE_FOR_A_PAIR
    if legs <= _FEW_LEGS:
        # 2n legs have (2n - 1)!! pairings, each at most a contraction of the plan.
        free = _PER_PAIRING * math.prod(range(legs - 1, 0, -2))
    if passes <= free:
        return math.inf
    try:
        family = choose(a, b, metric)
        return plan_for(family, wanted, slices, dtype, limit=passes).multiplications
    except TooLarge:
        return math.inf
