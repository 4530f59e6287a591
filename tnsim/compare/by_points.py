"""Inner products by forward passes: their points, costs and sums.

These metrics have points:

    Empirical, Product    always
    Categorical           beyond a single attention layer, and where samples are asked for
    Gaussian              of several nonlinear layers that read few directions: Gauss-Hermite nodes

A sampled value has a standard error, see `numbers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from tnsim.compare.operands import content
from tnsim.compare.request import (
    Comparable,
    Estimate,
    InnerProducts,
    Question,
    Request,
    count_text,
    is_exact,
    smaller_share,
    summands,
)
from tnsim.engine.planner import Budget
from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.finite_measures import Categorical
from tnsim.metrics.input_moments import gaussian_points, most_directions
from tnsim.metrics.metric import Gaussian, joins_whole_trees
from tnsim.metrics.protocol import (
    FiniteMetric,
    Metric,
    Points,
    Reading,
    WeightedPoints,
    adds_up,
    points_for,
)
from tnsim.models.arrays import is_traced
from tnsim.models.forward import as_read, directions, reading_layers
from tnsim.models.model import AnyModel, Model, kept_with
from tnsim.problems import at_points
from tnsim.problems.families import has_plan
from tnsim.problems.layer_kinds import joined_levels, kinds
from tnsim.scaled import taken
from tnsim.sessions import session, session_cache

Rows: TypeAlias = Float[np.ndarray, "rows in"]
_FULL = 1e-6
"""Smallest over largest singular value of rows that surely span all directions; others are looked
at together, with those of the other models."""


class AtPoints:
    """The route by forward passes.

    Args:
        question: Question of the comparison.
        points: Points of the metric for its models, see `points_of`.
    """

    search = 0.0

    def __init__(self, question: Question, points: Points) -> None:
        self.question, self.points = question, points
        self.name = route_name(question.metric, points)

    def estimate(self) -> Estimate:
        """What forward passes take: every model once, and a product of outputs for every pair.

        Returns:
            An estimate with the fact "forward passes", those of each model. Its `peak_bytes` are
            those of a usual batch. Layers that models have in common count for each.
        """
        return self.question.once((AtPoints, self.points.count), self._estimated)

    def _estimated(self) -> Estimate:
        question, points = self.question, self.points
        models, metric = question.models, question.metric
        work, written = at_points.work_of(models, points)
        outputs = 0  # the outputs of a plain function are not known before it runs
        if models:
            # Models that are compared have outputs of one shape, so any of them tells how many.
            outputs = at_points.outputs(models[-1].d_out, models[-1].n_ctx or 1, points)
        # The Gram matrix of outputs is symmetric: k (k + 1) / 2 products, each over all outputs.
        pairs = len(models) * (len(models) + 1) // 2
        passes = at_points.Work(work + pairs * outputs, written)
        needed = self._needs
        return Estimate(
            metric=metric.name,
            exact=is_exact(metric, models),
            route=self.name,
            dtype=question.dtype,
            outputs=question.outputs,
            multiplications=passes.multiplications,
            peak_bytes=math.ceil(needed.most(points.count)),
            seconds=passes.seconds,
            facts=(("forward passes", points.count),),
        )

    @property
    def _needs(self) -> at_points.Needs:
        question, points = self.question, self.points
        return question.once(
            (at_points.needs, points.count),
            lambda: at_points.needs(question.models, points, question.dtype),
        )

    def within(self, estimate: Estimate, budget: Budget) -> Estimate:
        """See `routes.Route`. A batch of a single point is to fit the memory."""
        question, points = self.question, self.points
        if estimate.multiplications <= budget.multiplications:
            # Free memory is not looked up for a usual batch, which a few points may replace: for
            # two layers of width 8 the look-up takes longer than all else.
            least = self._needs.least
            room = budget.room(0, least)
            at_points.check_room(least, room, f"forward passes of {estimate.metric}")
            # Batches follow the budget.
            return replace(estimate, peak_bytes=int(min(room, estimate.peak_bytes)))
        advice, metric = "fewer inputs", question.metric
        if not adds_up(metric):
            advice = (
                "GaussianClosure(), an approximation, Empirical(inputs), forward passes on yours,"
            )
        elif hasattr(metric, "samples"):
            advice = f"{type(metric).__name__}(..., samples=100_000), an estimate with its error,"
        raise TooLarge(
            f"{estimate.metric} runs through {count_text(points.count)} inputs here, which takes "
            f"{count_text(estimate.multiplications)} multiplications, more than the budget of "
            f"{budget.multiplications:.3g}; use {advice} or a larger tnsim.Budget"
        )

    def products(
        self, first: Comparable, second: Comparable, request: Request, traced: bool
    ) -> InnerProducts:
        """The inner products of two models, functions or sums of them, at the points.

        Args:
            first, second: Models, sums of models or plain functions.
            request: Metric, precision, budget, and the products that are wanted.
            traced: Whether weights or coefficients are traced.

        Raises:
            TooLarge: The forward passes would exceed the budget.
        """
        points, slices, dtype = self.points, request.slices, request.dtype
        self.within(self.estimate(), request.budget)
        one, two = summands(first), summands(second)
        if traced:
            # Batches follow no smaller budget: each becomes part of the caller's program.
            known = [part for _, part in (*one, *two)]
            every = at_points.all_points(known, points, dtype, Budget())
            found = at_points.over_batches(one, two, every, slices, request.squared_norms)
            return InnerProducts(found, 0.0, True, str(found["AB"].mantissa.dtype), self.name)
        means = are_inputs(points, request.metric)
        sampled = at_points.sums([one], [two], points, slices, dtype, request.budget, means=means)
        sampled = at_points.with_cancellation(sampled, [one], [two], points, dtype)
        # Sums of forward passes are matrices of all rows with all columns; here each side is a row.
        values = {
            "AB": taken(at_points.over_groups(sampled.products), (0, 0)),
            "AA": taken(at_points.over_groups(sampled.rows), 0),
            "BB": taken(at_points.over_groups(sampled.columns), 0),
        }
        share = smaller_share(*(float(shares[0]) for shares in sampled.mean_shares()))
        return InnerProducts(values, 0.0, False, dtype, self.name, sampled, points.count, share)


def are_inputs(points: Points, metric: Metric) -> bool:
    """Whether every point is an input, over which outputs have means.

    Draws and nodes of quadrature are; other points may be beginnings of sequences.
    """
    return points.drawn or isinstance(metric, Gaussian)


def at_traced_points(first: AnyModel, second: AnyModel, sample: WeightedPoints) -> InnerProducts:
    """Inner products and norms over points that are traced themselves.

    Checks that need the numbers of points, such as their fit to the models, were made before.

    Args:
        first, second: Models or sums of models.
        sample: All points.
    """
    found = at_points.over_batches(summands(first), summands(second), [sample], False, True)
    return InnerProducts(found, 0.0, True, str(found["AB"].mantissa.dtype), "data")


def points_of(
    models: Sequence[Model], metric: Metric, read: Sequence[Rows | None] | None = None
) -> Points | None:
    """The points at which models may be compared; None where there are none.

    Whoever needs points asks here, with all models that are to run on them: points depend on what
    each of them reads, and models of equal layers read different directions.

    Args:
        models: All models; empty where only plain functions are compared. Where `read` is given, a
            model of each structure is enough.
        metric: Metric of the comparison.
        read: Rows from `what_is_read` of every model, where not all models are at hand.

    Returns:
        The points of a finite measure, or Gauss nodes that are exact for these polynomials.

    Raises:
        ModelError: The metric has no inputs for these models, or inputs of another shape.
    """
    # Tokens have an exact plan up to a single attention layer.
    if isinstance(metric, Categorical) and metric.samples is None and has_plan(models, metric):
        return None
    if adds_up(metric):
        _check_concrete(metric)
        points = points_for(metric, reading_of(models))
        if not points.together:  # draws are of the form that models read
            for model in models:
                as_read(model, points.block(0, 1).inputs)
        return points
    # A subclass may weigh inputs otherwise, so only the class itself has quadrature.
    if type(metric) is not Gaussian or not models:
        return None
    if not joins_whole_trees(Gaussian, joined_levels(*map(kinds, models))):
        return None
    if read is None:
        # Models with switches share the layers that they read inputs with.
        readers = {tuple(map(id, reading_layers(model))): model for model in models}
        read = [what_is_read(model, metric) for model in readers.values()]
    # A model that reads too many directions has no quadrature.
    rows = [sample for sample in read if sample is not None]
    if len(rows) < len(read):
        return None
    reading, every = reading_of(models), _every_direction(models[0].d_in)
    # Whatever the others read: a decomposition for each pair is a third of a small, warm call.
    if any(sample is every for sample in rows):
        key = gaussian_points, content(metric), reading
        return session().results.get(key, lambda: gaussian_points(metric, reading, every))
    return gaussian_points(metric, reading, np.concatenate(rows))


def what_is_read(model: Model, metric: Metric) -> Rows | None:
    """Rows that span the directions in which a model reads a single position, for quadrature.

    Rows depend on the weights, so models of equal layers have different rows.

    Returns:
        The rows; None where there are too many, or the metric has no quadrature.
    """
    if type(metric) is not Gaussian or not model.is_polynomial:
        return None
    most = most_directions(model.n_ctx)

    def found() -> Rows | None:
        rows = directions(model, most)
        if rows is None or len(rows) < model.d_in:
            return rows
        if np.linalg.matrix_rank(rows, rtol=_FULL) < model.d_in:
            return rows
        return _every_direction(model.d_in)

    return kept_with(model, what_is_read, found, lambda rows: 0 if rows is None else rows.nbytes)


@session_cache
def _every_direction(d_in: int) -> Rows:
    """The rows of a model that reads all of its inputs, one array for all models."""
    return np.eye(d_in)


def _check_concrete(metric: FiniteMetric) -> None:
    """Raise `ModelError` where points or their weights are traced."""
    if is_traced(metric):
        raise ModelError(
            f"{type(metric).__name__} has arrays that are traced, and says with numbers at which "
            "inputs the models run: make the metric outside the JAX trace, of NumPy arrays; "
            "weights of models may be traced"
        )


def route_name(metric: Metric, points: Points) -> str:
    """The kind of points, as `Estimate.route` names it."""
    if not adds_up(metric):
        return "quadrature"
    if points.drawn:
        estimates = points.replicates or getattr(metric, "samples", None)
        return "sampling" if estimates else "data"
    return "enumeration" if points.tokens else "quadrature"


def reading_of(models: Sequence[Model]) -> Reading:
    """The form of the inputs of models; plain functions alone tell nothing."""
    if not models:
        return Reading(0, None, 0)
    first = models[0]
    layers = [layer for model in models for layer in kinds(model)]
    causal = all(layer.causal or not layer.mixes_positions for layer in layers)
    return Reading(first.d_in, first.n_ctx, max(model.degree for model in models), causal)
