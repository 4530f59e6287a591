"""Inner products of many models of one shape that share layers, such as switched models.

At points every layer runs once for all models that share it and what is below it
(`problems.at_points`). Along plans `pairwise` answers, by feature vectors or by one plan for all
pairs with the share of each model computed once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.all_pairs.run import pairwise
from tnsim.compare import numbers
from tnsim.compare.by_plans import same_weights
from tnsim.compare.by_points import AtPoints
from tnsim.compare.numbers import without_each
from tnsim.compare.request import CROSS, Question, Request, check_comparison
from tnsim.compare.routes import cheapest, inner_products
from tnsim.compare.similarity import inner, similarity
from tnsim.errors import CaveatWarning, DuplicateWarning, ModelError
from tnsim.metrics.metric import GaussianClosure
from tnsim.metrics.protocol import Points
from tnsim.models.model import AnyModel, Combination, Model
from tnsim.problems import at_points
from tnsim.problems.conditioning import amplification, cancellation_at
from tnsim.problems.layer_kinds import kinds
from tnsim.scaled import LOG_2, Scaled, ScaledSum, power

NEAR = 1e-4
"""Change of a cosine below which it is computed from differences: 1 less a cosine near 1 has few
digits, and nothing is left of it below 1e-16."""


def one_less_cosine(squares: float, longer: float, first: float, second: float) -> float:
    """`1 - cos(a, b)` with the digits that 1 less a cosine near 1 has lost.

    With d = b - a it is `(|d|^2 - (|b| - |a|)^2) / (2 |a| |b|)`, where
    `|b| - |a| = <d, a + b> / (|a| + |b|)`.

    Args:
        squares: `|d|^2`.
        longer: `<d, a + b>`.
        first, second: `|a|` and `|b|`, above 0.

    Example:
        >>> one_less_cosine(2.0, 0.0, 1.0, 1.0)
        1.0
    """
    return (squares - (longer / (first + second)) ** 2) / (2 * first * second)


class Setting(Request):
    """The metric, precision and budget of all comparisons that a split of a model needs."""

    def inner(self, a: AnyModel, b: AnyModel) -> Any:
        """The inner product of two models."""
        return inner(a, b, self.metric, dtype=self.dtype, budget=self.budget)

    def squared_norm(self, model: AnyModel) -> float:
        """The squared norm of a model."""
        return float(self.inner(model, model))

    def product(self, first: AnyModel, second: AnyModel) -> float:
        """An inner product with the digits that are left of it, of parts that are summed up."""
        found = inner_products(first, second, self)
        value = found.values["AB"]
        return float(power(value.mantissa, value.exponent + found.exponent))

    def similarity(self, a: AnyModel, b: AnyModel) -> Any:
        """The cosine of two models."""
        return similarity(a, b, self.metric, dtype=self.dtype, budget=self.budget)

    def measure(self, a: Model, b: Model, of: str, beside: float = 0.0) -> float:
        """How far two models are apart: `|b - a|^2`, or `1 - similarity(a, b)`.

        Args:
            a, b: Models.
            of: Measure, `distance` or `similarity`.
            beside: Squared distance beside which a smaller one is read; digits count relative to
                it, as nothing is left of those of equal functions in other weights.
        """
        if same_weights(a, b):  # in float32 a zero without a term is taken for a loss
            return 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaveatWarning)  # said once, of the models themselves
            if of == "distance":
                return self._squared_distance(b - a, beside)
            apart = 1.0 - float(self.similarity(a, b))
            return apart if apart > NEAR else self._apart(a, b)

    def _squared_distance(self, difference: Combination, beside: float) -> float:
        found = inner_products(difference, difference, self)
        own = found.values["AB"]
        if power(own.mantissa, own.exponent + found.exponent) < beside:
            size = np.asarray(beside, np.float64)
            whole = ScaledSum(size, np.asarray(-found.exponent, np.float64), size)
            found = found._replace(values={"AB": own, "AA": whole, "BB": whole})
        return max(float(numbers.value(found, (difference, difference), self)), 0.0)

    def _apart(self, a: Model, b: Model) -> float:
        """`1 - similarity(a, b)` of near models, whose squared norms are within floats."""
        first, second = (math.sqrt(self.squared_norm(model)) for model in (a, b))
        difference = b - a
        squares, longer = (self.product(difference, other) for other in (difference, a + b))
        return one_less_cosine(squares, longer, first, second)

    def enlarged(self, model: Model, points: Points | None) -> float:
        """The factor by which a model enlarges the rounding of its weights, at least 1."""
        if points is not None:
            return cancellation_at(model, points, self.dtype)
        return max(1.0, math.sqrt(float(amplification(model, self.metric))))

    def points(self, *models: Model) -> Points | None:
        """Points at which models are compared; None where a plan answers.

        Args:
            models: All models that are to run on the points.
        """
        check_bilinear(self.metric)
        check_comparison(models[0], models[-1], self.metric)
        question = Question(models, self.metric, CROSS, False, self.dtype)
        route = cheapest(question, self.budget).route
        if not isinstance(route, AtPoints):
            return None
        # Layers that models have in common run once, so one of each form tells the cost.
        forms = {kinds(model): model for model in models}.values()
        alone = AtPoints(question._replace(models=tuple(forms)), route.points)
        alone.check(alone.estimate(), self.budget)
        return route.points


def check_bilinear(metric: Any) -> None:
    """Refuse a metric under which a sum of models is not a sum of inner products.

    Raises:
        ModelError: The metric is `GaussianClosure`.

    Example:
        >>> import tnsim
        >>> check_bilinear(tnsim.Gaussian())
    """
    if isinstance(metric, GaussianClosure):
        raise ModelError(
            "GaussianClosure is no bilinear form of the model: it treats the hidden states of a "
            "whole model as Gaussian, so a sum of parts has another value than the parts; use "
            "Gaussian(), a finite metric such as Empirical or Categorical(samples=...), or "
            "TreeSymmetric()"
        )


@dataclass(frozen=True)
class Gram:
    """The matrix `values * 2 ** exponent` of inner products.

    Args:
        values: Inner products (rows, columns).
        exponent: Exponent of their common scale.
        left_out: The same matrix without each group of draws, (groups, rows, columns), in scales
            of their own; None where nothing was sampled.
        points: Points at which all models ran; None along plans.
    """

    values: Float[np.ndarray, "rows columns"]
    exponent: float
    left_out: Float[np.ndarray, "groups rows columns"] | None = None
    points: Points | None = None


def gram(rows: Sequence[Model], columns: Sequence[Model] | None, setting: Setting) -> Gram:
    """The inner products of all rows with all columns, without columns of all rows.

    Args:
        rows, columns: Models of one shape of inputs and outputs.
        setting: Metric, precision and budget.

    Returns:
        A `Gram`, float64.

    Example:
        >>> import numpy as np, tnsim
        >>> lines = [tnsim.Model([tnsim.Linear([[w]])]) for w in (1.0, 3.0)]
        >>> setting = Setting(tnsim.Empirical([[1.0], [2.0]]), "float64", tnsim.Budget())
        >>> found = gram(lines, None, setting)
        >>> (found.values * 2.0**found.exponent).round(9).tolist()
        [[2.5, 7.5], [7.5, 22.5]]
    """
    points = setting.points(*rows, *(columns or ()))
    if points is None:
        return along_plans(rows, columns, setting)
    sums = at_points.sums(
        [[(1.0, model)] for model in rows],
        None if columns is None else [[(1.0, model)] for model in columns],
        points,
        False,
        setting.dtype,
        setting.budget,
    )
    values, exponent = _in_one_scale(at_points.over_groups(sums.products))
    left_out = None
    # Groups without weight have no values to leave out.
    counted = sums.shares > 0
    if points.drawn and np.count_nonzero(counted) > 1:
        left_out, exponents = without_each(sums.products, counted)
        left_out = left_out * np.exp2(exponents - exponents.max())
    return Gram(values, exponent, left_out, points)


def _in_one_scale(products: ScaledSum) -> Scaled[Float[np.ndarray, "rows columns"]]:
    """Values relative to the largest scale among them."""
    # A mantissa of zero has no scale, and must not set the common one.
    exponents = np.where(products.mantissa == 0, -np.inf, products.exponent)
    top = float(exponents.max())
    if math.isinf(top):
        return Scaled(np.zeros(products.mantissa.shape), 0.0)
    factors = np.exp2(np.minimum(products.exponent - top, 0.0))
    return Scaled(np.asarray(products.mantissa * factors), top)


def along_plans(
    rows: Sequence[AnyModel], columns: Sequence[AnyModel] | None, setting: Setting
) -> Gram:
    """The inner products of all rows with all columns, as for `gram`, where no points answer."""
    with warnings.catch_warnings():
        # Switched models may be equal, and the caller has spoken of caveats.
        warnings.simplefilter("ignore", DuplicateWarning)
        warnings.simplefilter("ignore", CaveatWarning)
        products = pairwise(
            list(rows),
            setting.metric,
            other=None if columns is None else list(columns),
            dtype=setting.dtype,
            budget=setting.budget,
        )
    # `pairwise` gives natural logarithms.
    sign, log = (
        np.asarray(products["sign"], np.float64),
        np.asarray(products["log_inner"], np.float64),
    )
    values, exponent = _in_one_scale(ScaledSum(sign, log / LOG_2, abs(sign)))
    return Gram(values, exponent)
