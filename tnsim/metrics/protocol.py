"""Protocols of metrics: names, guarantees, and a rule for joining legs or points.

The metrics of tnsim follow these protocols. Metrics from outside are finite measures.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from numbers import Integral
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from tnsim.errors import ModelError
from tnsim.metrics.pairings import PairingRule
from tnsim.metrics.points import Points, Reading, WeightedPoints
from tnsim.options import shown


@runtime_checkable
class Metric(Protocol):
    """The attributes that every metric has.

    A metric is immutable, and a pytree whose leaves are its arrays.

    Example:
        >>> import tnsim
        >>> tnsim.GaussianClosure().name, tnsim.GaussianClosure().is_exact(2)
        ('closure', False)

    Source:
        Paper, section 2.2: a metric is the `Lambda` that joins the input legs of two models.
    """

    @property
    def name(self) -> str:
        """Name in a single word, for results and the command line."""
        ...

    @property
    def pairs_within_model(self) -> bool:
        """Whether legs of the same model may be joined with each other.

        If so, legs may be handed to the mean as well, and the moments and the mean of each model
        alone are computed along with the moments between models.
        """
        ...

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether the computed value is exact by the definition of the metric.

        Args:
            nonlinear_layers: Number of nonlinear layers in the deeper model.
        """
        ...


class LayerwiseMetric(Metric, Protocol):
    """A metric that joins the legs of a layer of the bra with the legs of a layer of the ket.

    Source:
        Paper, appendices A.2 and A.3: a single layer of the Gram recursion.
    """

    @property
    def rule(self) -> PairingRule:
        """The rule by which the legs of two layers are joined."""
        ...


@runtime_checkable
class FiniteMetric(Metric, Protocol):
    """A metric that is a finite measure: `sum_i w_i <a(x_i), b(x_i)>`.

    No legs are joined, so the value of `pairs_within_model` does not matter.

    Example:
        A coin whose sides are the inputs -1 and 1.

        >>> import numpy as np, tnsim
        >>> from tnsim.metrics.points import Rule, product_rule
        >>> class Coin:
        ...     name = "coin"
        ...     pairs_within_model = False
        ...     def is_exact(self, nonlinear_layers):
        ...         return True
        ...     def points(self, reading):
        ...         side = Rule(np.array([-1.0, 1.0]), np.log([0.5, 0.5]))
        ...         return product_rule([side] * reading.d_in)
        >>> line = tnsim.Model([tnsim.Linear([[1.0]], [1.0])])
        >>> print(f"{tnsim.inner(line, line, Coin()):.3f}")
        2.000

    Source:
        Paper, section 2.2, with `Lambda = sum_i w_i x_i (x) ... (x) x_i`.
    """

    def points(self, reading: Reading) -> Points:
        """Inputs and their weights.

        Args:
            reading: Inputs that the models under comparison read.

        Raises:
            ModelError: The measure has no inputs of this form.
        """
        ...


# Attributes that every metric has, listed once: a check of each name is faster than `isinstance`.
_EVERY = tuple(name for name in dir(Metric) if not name.startswith("_"))


def joins_layers(metric: Any) -> TypeGuard[LayerwiseMetric]:
    """Whether a metric joins legs layer by layer.

    Example:
        >>> import tnsim
        >>> joins_layers(tnsim.TreeSymmetric()), joins_layers(tnsim.Symmetric())
        (True, False)
    """
    return isinstance(getattr(metric, "rule", None), PairingRule) and _is_metric(metric)


def adds_up(metric: Any) -> TypeGuard[FiniteMetric]:
    """Whether a value is a `FiniteMetric`, twenty times as fast as `isinstance`.

    Example:
        >>> import tnsim
        >>> adds_up(tnsim.Categorical()), adds_up(tnsim.TreeSymmetric())
        (True, False)
    """
    return getattr(metric, "points", None) is not None and _is_metric(metric)


def points_for(metric: FiniteMetric, reading: Any) -> Points:
    """The points of a finite measure; a block that is none of its parts is refused as it is read.

    Args:
        metric: Metric, which may be a user's own.
        reading: Inputs that the models under comparison read, None for plain functions.

    Raises:
        ModelError: The measure has no points, or a block has NaN or infinite inputs, weights that
            are no logarithms of numbers, or another number of points than was asked for.

    Example:
        >>> import tnsim
        >>> points_for(tnsim.Empirical(np.eye(3)), None).count
        3
    """
    points: Any = metric.points(reading)
    count = points.count if isinstance(points, Points) else None
    if not isinstance(count, Integral) or count < 1:
        raise ModelError(
            f"the metric {metric.name} says at which inputs models run by tnsim.metrics.points."
            f"Points with one point at least, found {shown(points)}"
        )
    if points.replicates > count:
        raise ModelError(
            f"the metric {metric.name} has {points.replicates} replicates of {count} points"
        )
    return dataclasses.replace(points, block=partial(_checked_block, points))


def _checked_block(points: Points, start: int, stop: int) -> WeightedPoints:
    inputs, log_weights = points.block(start, stop)
    if points.continuations:  # beginnings of sequences, which are tnsim's own
        return WeightedPoints(inputs, log_weights)
    what = f"points {start} to {stop - 1} of a measure"
    inputs, log_weights = np.asarray(inputs), np.asarray(log_weights)
    count = stop - start
    if inputs.shape[:1] != (count,) or log_weights.shape != (count,):
        raise ModelError(
            f"{what} were asked for, and its block has inputs {inputs.shape} and weights "
            f"{log_weights.shape}"
        )
    if {inputs.dtype.kind, log_weights.dtype.kind} - set("biuf"):
        raise ModelError(
            f"{what} are real numbers and so are the logarithms of their weights, found "
            f"{inputs.dtype} and {log_weights.dtype}"
        )
    if not np.isfinite(inputs).all():
        raise ModelError(f"{what} have NaN or infinite inputs")
    if not (log_weights < np.inf).all():  # as no NaN is
        raise ModelError(
            f"{what} have the logarithm {log_weights.max()} among their weights: weights are "
            "finite and not below zero, and their logarithms numbers or -inf"
        )
    return WeightedPoints(inputs, log_weights)


def _is_metric(value: Any) -> bool:
    """Whether a value has the attributes of every metric."""
    return all(hasattr(value, name) for name in _EVERY)
