"""Protocols of metrics: names, guarantees, and a rule for joining legs or points.

The metrics of tnsim follow these protocols. Metrics from outside are finite measures.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

from tnsim.metrics.pairings import PairingRule
from tnsim.metrics.points import Points, Reading


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


def _is_metric(value: Any) -> bool:
    """Whether a value has the attributes of every metric."""
    return all(hasattr(value, name) for name in _EVERY)
