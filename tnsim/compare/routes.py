"""The routes by which models may be compared, and the cheapest of them.

    route           of which models and metrics                                    in
    --------------  -------------------------------------------------------------  -------------
    kernels         a nonlinear layer with an activation                           `by_kernels`
    vectors         sparse layers; deep polynomials                                `by_features`
    points          finite measures; Gauss nodes of deep polynomials that read     `by_points`
                    few directions
    contractions    everything else, and beside vectors and Gauss nodes            `by_plans`

Where there are several, the one with the least expected time is taken, among those within the
budget. Whoever compares or plans asks here, pairs and runs of many models alike, so that a plan
says what a comparison does.

`inner_products` first makes small differences models of their own; then the route of the table
computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tnsim.compare.by_features import Vectors, space_of
from tnsim.compare.by_kernels import Kernels
from tnsim.compare.by_plans import Contractions, same_weights
from tnsim.compare.by_points import AtPoints, points_of
from tnsim.compare.operands import apart_by_precision, is_known_constant
from tnsim.compare.request import (
    Comparable,
    Estimate,
    InnerProducts,
    Question,
    Request,
    check_comparison,
    summands,
)
from tnsim.engine.planner import Budget
from tnsim.errors import TooLarge
from tnsim.long_work import seconds_text
from tnsim.metrics.protocol import Metric, Points, adds_up
from tnsim.models.arrays import is_traced, written_out
from tnsim.models.differences import by_differences
from tnsim.models.model import AnyModel, Model
from tnsim.problems.features import FeatureSpace
from tnsim.problems.hidden_units import has_kernels


class Weighed(Protocol):
    """A way to compute something, with its price.

    Attributes:
        name: Name of the route, see `Estimate.route`.
        search: Expected seconds until an estimate is there; 0 where it is next to nothing.
    """

    @property
    def name(self) -> str: ...

    @property
    def search(self) -> float: ...

    def estimate(self) -> Estimate:
        """What the route takes. Raises `TooLarge` where nothing can be planned."""
        ...

    def within(self, estimate: Estimate, budget: Budget) -> Estimate:
        """What the route takes within a budget, such as in smaller batches.

        Args:
            estimate: Estimate of the route.
            budget: Limits of the computation.

        Raises:
            TooLarge: The route does not fit the budget.
        """
        ...


class Route(Weighed, Protocol):
    """A way to compute the inner products of a question."""

    def products(self, first: Any, second: Any, request: Request, traced: bool) -> InnerProducts:
        """The inner products of two models or sums of models.

        Args:
            first, second: Both sides, whose models are those of the question.
            request: Metric, precision, budget, and the products that are wanted.
            traced: Whether weights, coefficients or metric are traced.

        Raises:
            TooLarge: The computation would exceed the budget.
        """
        ...


_Way = TypeVar("_Way", bound=Weighed)


class Ways(NamedTuple, Generic[_Way]):
    """The constructors of the routes for one question, a row of the table each."""

    kernels: Callable[[], _Way]
    at_points: Callable[[Points], _Way]
    vectors: Callable[[FeatureSpace], _Way]
    contractions: Callable[[], _Way]


def from_table(
    models: Sequence[Model],
    metric: Metric,
    points: Callable[[], Points | None],
    spaces: Callable[[], Sequence[FeatureSpace]],
    ways: Ways[_Way],
) -> list[_Way]:
    """The routes of some models under a metric, row by row of the table.

    Args:
        models: Models, or one of each form.
        metric: Metric of the comparison.
        points: Function that gives the points at which the models may be compared, None for none.
        spaces: Function that gives the spaces of vectors that hold the models.
        ways: Constructors of the routes.

    Raises:
        ModelError: The metric has no inputs for these models.
        UnsupportedLayer: An activation that no route can compare under the metric.
    """
    if has_kernels(models, metric):
        return [ways.kernels()]
    held = () if adds_up(metric) else spaces()
    if sparse := [space for space in held if space.is_sparse]:
        return [ways.vectors(space) for space in sparse]  # no plan would be as short
    nodes = points()
    routes = [] if nodes is None else [ways.at_points(nodes)]
    if nodes is not None and adds_up(metric):
        return routes
    return [*routes, *map(ways.vectors, held), ways.contractions()]


def routes_of(question: Question) -> list[Route]:
    """The routes of a comparison, at least one.

    Args:
        question: Models, metric and inner products.

    Raises:
        ModelError: The metric has no inputs for these models.
        UnsupportedLayer: An activation that no route can compare under the metric.
    """
    models, metric = question.models, question.metric
    # Gauss nodes and sparse patterns depend on the numbers in models, which a trace does not have.
    known = bool(models) and not question.traced

    def points() -> Points | None:
        return points_of(models, metric) if known or adds_up(metric) else None

    def spaces() -> Sequence[FeatureSpace]:
        space = space_of(question) if known else None
        return () if space is None else (space,)

    ways: Ways[Route] = Ways(
        partial(Kernels, question),
        partial(AtPoints, question),
        partial(Vectors, question),
        partial(Contractions, question),
    )
    return from_table(models, metric, points, spaces, ways)


class Choice(NamedTuple, Generic[_Way]):
    """The route that is taken.

    Attributes:
        route: Cheapest route within the budget.
        estimates: Estimates of the routes that were weighed, that of `route` first; empty where
            nothing was weighed.
        passed_over: Names of routes without an estimate or beyond the budget, with the reason.
    """

    route: _Way
    estimates: tuple[Estimate, ...] = ()
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def estimate(self) -> Estimate:
        """The estimate of the route, with those of the others."""
        first, *others = self.estimates
        return replace(first, others=tuple(others), passed_over=self.passed_over)


def cheapest(question: Question, budget: Budget) -> Choice[Route]:
    """The route of a comparison with the least expected time within a budget.

    Args:
        question: Models, metric and inner products.
        budget: Limits of the computation.

    Raises:
        TooLarge: Several routes, and each is beyond the budget. A single one is not estimated.
    """
    routes = routes_of(question)
    return Choice(routes[0]) if len(routes) == 1 else weighed(routes, budget)


def weighed(routes: Sequence[_Way], budget: Budget) -> Choice[_Way]:
    """The route with the least expected time within a budget.

    A route whose search alone would take longer than another route takes is not searched. Expected
    times are those of a usual processor, so that equal questions have equal routes.

    Args:
        routes: At least one route.
        budget: Limits of the computation.

    Raises:
        TooLarge: Each route is beyond the budget.
    """
    fitting: list[tuple[_Way, Estimate]] = []
    passed_over: list[tuple[str, str]] = []
    refused: list[tuple[float, TooLarge]] = []
    for route in sorted(routes, key=lambda route: route.search):
        best = min((estimate.seconds for _, estimate in fitting), default=math.inf)
        if best <= route.search:
            passed_over.append((route.name, f"the search alone: {seconds_text(route.search)}"))
            continue
        needed = math.inf
        try:
            estimate = route.estimate()
            needed = estimate.seconds
            estimate = route.within(estimate, budget)
        except TooLarge as beyond:
            refused.append((needed, beyond))
            passed_over.append((route.name, str(beyond)))
        else:
            fitting.append((route, estimate))
    if not fitting:
        _, nearest = min(refused, key=lambda found: found[0])
        raise nearest
    fitting.sort(key=lambda found: found[1].seconds)
    return Choice(fitting[0][0], tuple(estimate for _, estimate in fitting), tuple(passed_over))


def inner_products(a: Comparable, b: Comparable, request: Request) -> InnerProducts:
    """The inner product `AB` and, with `squared_norms`, also `AA` and `BB`.

    Unless traced, the norms of a sum of several models are always computed, as a comparison with
    them shows how much cancels.

    Args:
        a, b: Models, sums of models or plain functions.
        request: Metric, precision, budget, and the products that are wanted.

    Returns:
        The products, with the sums of forward passes where these ran.

    Raises:
        ModelError: The models cannot be compared.
        TooLarge: The computation would exceed the budget.
    """
    check_comparison(a, b, request.metric)
    traced = any(map(_is_traced, (a, b, request.metric)))
    if traced:
        same = b is a
        a, b, metric = apart_by_precision(written_out((a, b, request.metric)))
        request = request._replace(metric=metric)
        b = a if same else b
    first = _as_differences(a, request.dtype)
    second = first if b is a else _as_differences(b, request.dtype)
    one, two = summands(first), summands(second)
    models = [part for _, part in (*one, *two) if isinstance(part, Model)]
    alone = not traced and len(models) == 2 and len(one) == len(two) == 1
    if alone and one[0][0] == two[0][0] and same_weights(*models):
        second, models = first, models[:1]  # one vector, with a cosine of 1
    question = Question(
        tuple(models), request.metric, request.pairs, request.slices, request.dtype, traced
    )
    return cheapest(question, request.budget).route.products(first, second, request, traced)


def _as_differences(model: Comparable, dtype: str) -> Comparable:
    """A sum of models with small differences as models of their own; functions are unchanged."""
    return by_differences(model, dtype) if isinstance(model, AnyModel) else model


def _is_traced(value: Any) -> bool:
    """Whether a metric, a model or a combination holds a traced array."""
    return not is_known_constant(value) and is_traced(value)
