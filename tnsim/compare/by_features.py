"""Inner products of polynomials, as dot products of the vectors of their coefficients.

The route of `Gaussian` and `Symmetric`

    where layers are sparse, as convolutions are            `problems.receptive_fields`
    of several nonlinear layers, where vectors take less    `problems.polynomial_space`
        than diagrams and their search

A sum of models is a sum of vectors, so what cancels between terms costs half the digits that it
costs a sum of products. Vectors are made by NumPy in float64, with nothing to plan or to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnsim.compare.operands import in_units
from tnsim.compare.request import (
    Estimate,
    InnerProducts,
    Question,
    Request,
    check_affordable,
    is_exact,
    smaller_share,
)
from tnsim.engine.ir.problem import ITEM_BYTES
from tnsim.engine.planner import Budget
from tnsim.long_work import announced
from tnsim.metrics.metric import joins_whole_trees
from tnsim.metrics.protocol import Metric
from tnsim.models.model import AnyModel, Model, terms
from tnsim.problems import features
from tnsim.problems.features import FeatureSpace
from tnsim.problems.layer_kinds import kinds, nonlinear
from tnsim.problems.polynomial_space import polynomials
from tnsim.problems.receptive_fields import receptive_fields
from tnsim.problems.units import common_units
from tnsim.scaled import ScaledSum, add, share_of_squares, taken, total

STARTING, DOTS = 0.02, 1e9
"""Seconds before the first vector, and multiplications of dot products in a second."""


class Vectors:
    """The route by vectors of coefficients.

    Args:
        question: Question of the comparison.
        space: Space that holds its models, see `space_of`.
    """

    search = 0.0

    def __init__(self, question: Question, space: FeatureSpace) -> None:
        self.question, self.space = question, space
        self.name = space.route

    def estimate(self) -> Estimate:
        """See `routes.Route`."""
        return self.question.once((Vectors, self.space), self._estimated)

    def _estimated(self) -> Estimate:
        question, space = self.question, self.space
        models, metric = question.distinct, question.metric
        several = [kinds(model) for model in models]
        largest = max(part.length for part in space.parts) * space.d_out
        dots = len(question.wanted) * space.length * space.d_out
        # Vectors of a part, and of the one before, which are given up when the next ones are made.
        held = min(2, len(space.parts)) * len(models) * largest
        held += max(space.in_flight(layers, len(models)) for layers in several)
        work = sum(map(space.multiplications, several)) + dots
        return Estimate(
            metric=metric.name,
            exact=is_exact(metric, models),
            route=self.name,
            dtype="float64",
            outputs=question.outputs,
            # Hidden units with equal weights below them, as of a convolution, are computed once.
            multiplications=work,
            peak_bytes=held * ITEM_BYTES["float64"],
            seconds=STARTING + space.seconds(several) + dots / DOTS,
            facts=(("coefficients at most", space.length * space.d_out),),
        )

    def within(self, estimate: Estimate, budget: Budget) -> Estimate:
        """See `routes.Route`."""
        advice = "compare outputs, metric tnsim.Empirical(inputs), or give a larger tnsim.Budget"
        count = estimate.fact("coefficients at most")
        what = f"{estimate.metric} by {self.name} of {count:,} coefficients"
        check_affordable(estimate, budget, what, advice, advice)
        return estimate

    def products(
        self, first: AnyModel, second: AnyModel, request: Request, traced: bool
    ) -> InnerProducts:
        """The inner products of two sums of models, and the norms, in float64.

        Args:
            first, second: Models or sums of models, not traced.
            request: Metric, precision, budget, and the products that are wanted.
            traced: False.

        Raises:
            TooLarge: The computation would exceed the budget.
        """
        estimate = self.estimate()
        self.within(estimate, request.budget)
        one, two = terms(first), terms(second)
        with announced(f"vectors of {estimate.metric}", estimate.seconds):
            values, share = by_vectors(self.space, one, two, request.metric, request.slices)
        return InnerProducts(values, 0.0, False, "float64", self.name, mean_share=share)


def by_vectors(
    space: FeatureSpace,
    one: Sequence[tuple[Any, Model]],
    two: Sequence[tuple[Any, Model]],
    metric: Metric,
    slices: bool,
) -> tuple[dict[str, ScaledSum], float | None]:
    """`<a|b>`, `<a|a>` and `<b|b>` of two sums by their vectors, as `AB`, `AA` and `BB`.

    Args:
        space: Space that holds the models.
        one, two: Coefficients and models of each sum, not traced.
        metric: Metric of the comparison.
        slices: Whether outputs are told apart.

    Returns:
        Inner products, (out,) or (), and the share of the means, see `InnerProducts.mean_share`.
    """
    models = {id(model): model for _, model in (*one, *two)}
    units = common_units(models.values(), metric)
    prepared = [in_units(model, units, slices) for model in models.values()]
    # Both sums as rows over the distinct models, each with features made once.
    number = {key: n for n, key in enumerate(models)}
    weights = np.zeros((2, len(number)))
    for row, weighted in zip(weights, (one, two), strict=True):
        for coefficient, model in weighted:
            row[number[id(model)]] += coefficient
    plain = None if np.array_equal(weights, np.eye(len(number))) else weights
    keep = space.length * space.d_out <= features.KEPT
    crossed, squared, means = [], [], None
    for part in space.parts:  # in turn, so that one part is held at a time
        both = features.block(prepared, plain, part, units.metric, keep)
        crossed.append(features.products(both, both, slices))
        squared.append(features.norms(both, slices))
        means = means or features.means(both, part)
    # Row 0 is the first sum, row 1 the second.
    squares = add(squared)
    alone = list(one) == list(two)
    values = {
        "AB": taken(squares, 0) if alone else taken(add(crossed), (0, 1)),
        "AA": taken(squares, 0),
        "BB": taken(squares, 1),
    }
    if means is None:
        return values, None
    return values, smaller_share(*share_of_squares(means, total(squares, slices)))


def space_of(question: Question) -> FeatureSpace | None:
    """The space in which pairs of the models may be compared; None where there is none.

    Of a single layer, or layer over layer, a plan is a handful of matrix products, found at once.

    Args:
        question: Question that is not traced, of at least one model.
    """

    def found() -> FeatureSpace | None:
        models, metric = question.distinct, question.metric
        several = [kinds(model) for model in models]
        if any(kind.sparse for layers in several for kind in layers):
            return receptive_fields(several, metric, models[0].n_ctx)
        depth = nonlinear(*several)
        if depth < 2 or not joins_whole_trees(type(metric), depth):
            return None
        return polynomials(several, metric, models[0].n_ctx)

    return question.once(space_of, found)
