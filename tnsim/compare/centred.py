"""Functions without their means: `f - E f` over the inputs of a metric.

Outputs that hardly depend on the input make any two networks alike: a classifier whose logits have
a common offset, a convolutional network that ends in a positive mean. Of sequences the mean is over
inputs and positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.compare.by_points import points_of
from tnsim.compare.request import Request, estimated
from tnsim.compare.routes import inner_products
from tnsim.engine.planner import Budget
from tnsim.errors import ModelError, TnsimError
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.metric import is_expectation
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.differences import constant, less
from tnsim.models.forward import outputs_on
from tnsim.models.functions import Function, is_function, outputs_of, refused_under
from tnsim.models.model import Combination, Model, check_untraced
from tnsim.problems.at_points import all_points
from tnsim.scaled import power

_ROUNDING = 1e3
"""Outputs of a constant function without its mean, in units of the last place of the mean."""


@dataclass(frozen=True, eq=False)
class WithoutMean:
    """A function less a constant.

    Args:
        function: Plain function or module.
        mean: Constant, one number for every output.
        beside: What the mean is more than these numbers, which floats round.
        is_zero: Whether nothing but the rounding of the mean is left.
    """

    function: Function
    mean: Float[np.ndarray, " out"]
    beside: Float[np.ndarray, " out"]
    is_zero: bool = False

    def __call__(self, inputs: Any) -> np.ndarray:
        """The outputs on a batch, in NumPy."""
        rest = outputs_of(self.function, inputs) - self.mean - self.beside
        return np.zeros_like(rest) if self.is_zero else rest


class Mean(NamedTuple):
    """The mean of a function over inputs, and positions where there are any.

    Attributes:
        values: Mean of every output.
        is_all: Whether the function is at all points its mean, to within rounding. Of an exact
            plan, which knows what cancels, False.
        beside: What the mean of a plain function is more than these values, which floats round.
    """

    values: Float[np.ndarray, " out"]
    is_all: bool
    beside: Any = 0.0


def without_mean(given: Any, metric: Metric, budget: Budget = Budget()) -> Any:
    """A model or a function without its mean.

    Args:
        given: A model, a sum of models, a module or a plain function.
        metric: Metric that is an expectation over inputs.
        budget: Limits of the computation of the mean.

    Returns:
        A model with one more bias, a sum with one more term, or a function.

    Raises:
        ModelError: The metric is no expectation over inputs, or numbers are traced.
        TooLarge: The mean is beyond the budget.

    Example:
        >>> import tnsim
        >>> offset = tnsim.Model([tnsim.Linear([[2.0]], bias=[5.0])])
        >>> without_mean(offset, tnsim.Gaussian()).layers[-1].bias.tolist()
        [0.0]
    """
    mean = mean_of(given, metric, budget)
    if is_function(given):
        return WithoutMean(given, mean.values, mean.beside, mean.is_all)
    return without(given, mean)


def without(given: Model | Combination, mean: Mean) -> Model | Combination:
    """A model or a sum of models less its mean, or the zero function where that is all of it."""
    if mean.is_all:
        return constant(given.d_in, np.zeros(given.d_out), given.n_ctx)
    return less(given, mean.values)


def mean_of(given: Any, metric: Metric, budget: Budget = Budget()) -> Mean:
    """The mean of a model or a function.

    Args:
        given, metric, budget: Arguments of `without_mean`.

    Raises:
        ModelError: The metric is no expectation over inputs, or numbers are traced.
        TooLarge: The mean is beyond the budget.

    Example:
        >>> import tnsim
        >>> offset = tnsim.Model([tnsim.Linear([[2.0]], bias=[5.0])])
        >>> mean_of(offset, tnsim.Gaussian()).values.tolist()
        [5.0]
    """
    if not is_expectation(metric):
        raise ModelError(
            f"centred=True takes the mean over inputs, and {metric.name} is no expectation over "
            "inputs: use Gaussian(), Empirical(inputs), Categorical() or Product(...)"
        )
    check_untraced("centred=True", given, metric)
    if is_function(given):
        values, beside = _mean_of_function(given, metric, budget)
        rest: Function = WithoutMean(given, values, beside)
        return Mean(values, _is_rounding(rest, values, metric, budget), beside)
    values = _mean_of_model(given, metric, budget)
    # The rest of a sum is held against the terms of the sum.
    if isinstance(given, Combination) or not adds_up(metric):
        return Mean(values, is_all=False)
    model: Any = less(given, values)
    return Mean(values, _is_rounding(partial(outputs_on, model), values, metric, budget, [model]))


def _is_rounding(
    rest: Function,
    mean: Float[np.ndarray, " out"],
    metric: Metric,
    budget: Budget,
    models: Sequence[Any] = (),
) -> bool:
    """Whether a function without its mean is at all points what rounding left of a constant."""
    points = points_of(models, metric)
    if points is None:
        return False  # an exact plan, which knows what cancels
    least = _ROUNDING * float(np.finfo(np.float64).eps) * np.abs(mean).max(initial=0.0)
    # A few points tell of all functions but constant ones.
    few = points.block(0, points.aligned(4) if points.continuations else min(4, points.count))
    batches = itertools.chain([few], all_points([*models] or [rest], points, "float64", budget))
    return all(np.abs(rest(batch.inputs)).max(initial=0.0) <= least for batch in batches)


def _mean_of_model(given: Any, metric: Metric, budget: Budget) -> Float[np.ndarray, " out"]:
    """The mean of every output: its inner product with the constant 1."""
    ones = constant(given.d_in, np.ones(given.d_out), given.n_ctx)
    chosen = estimated(metric, [given], None)

    def times_one(model: Any) -> tuple[np.ndarray, Any]:
        products = inner_products(model, ones, Request(chosen, "float64", budget, slices=True))
        found = products.values["AB"]
        return np.asarray(found.mantissa), found.exponent + products.exponent

    mantissa, exponent = times_one(given)
    mass, of_mass = np.asarray(given.n_ctx or 1), 0.0
    if adds_up(metric):  # a measure of a user's own has any mass
        mass, of_mass = times_one(ones)
        if not mass.all():
            raise ModelError(f"no input of {metric.name} has a weight, so there is no mean")
    values = power(mantissa / mass, exponent - of_mass)
    _check_finite(values)
    return values


def _check_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise TnsimError(
            "the mean of the outputs, or what they are less their mean, is beyond float64, and "
            "centred=True takes it away: scale down the last layers of the models, which changes "
            "no similarity"
        )


def _mean_of_function(
    given: Any, metric: Metric, budget: Budget
) -> tuple[Float[np.ndarray, " out"], Float[np.ndarray, " out"]]:
    """The mean of every output as the sum of two floats, the second of which is the rounding."""
    if not isinstance(metric, Empirical):
        raise refused_under(metric)
    total: Any = 0.0
    first: Any = None
    for batch in all_points([given], metric.points(None), "float64", budget):
        outputs = outputs_of(given, batch.inputs).astype(np.float64)
        outputs = outputs.reshape(len(outputs), -1, outputs.shape[-1])
        # What outputs have in common with the first of them is not rounded.
        first = outputs[0, 0].copy() if first is None else first
        with np.errstate(over="ignore", invalid="ignore"):  # refused by name
            outputs -= first
            total = total + np.exp(batch.log_weights) @ outputs.mean(axis=1)
    mean = first + total
    _check_finite(mean)
    return mean, total - (mean - first)
