"""Protocols of metrics: names, guarantees, and joinings or points.

The metrics of tnsim follow these protocols. Metrics from outside may follow them as well, as long
as they work layer by layer or are finite measures.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

from tnsim.metrics.pairings import Joining
from tnsim.metrics.points import Points, Reading


@runtime_checkable
class Metric(Protocol):
    """The attributes that every metric has.

    A metric is immutable, and a pytree whose leaves are its arrays. Plans of a metric that joins
    layer by layer are cached under its answers, joinings included, so a number in the metric may
    decide how legs are joined.

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


@runtime_checkable
class LayerwiseMetric(Metric, Protocol):
    """A metric that joins the legs of a layer of the bra with the legs of a layer of the ket.

    Every verb takes any such metric for models of vectors. Models of sequences, and the feature
    vectors of `pairwise`, need a metric whose joinings together are a known sum
    (`tnsim.metrics.ways`).

    Example:
        Three times `TreeSymmetric`, layer by layer.

        >>> import dataclasses
        >>> import tnsim
        >>> from tnsim.metrics.pairings import straight
        >>> from tnsim.models.arrays import pytree
        >>> @pytree
        ... @dataclasses.dataclass(frozen=True, eq=False)
        ... class Tripled:
        ...     name = "tripled"
        ...     pairs_within_model = False
        ...     def is_exact(self, nonlinear_layers):
        ...         return True
        ...     def joinings(self, bra, ket, centred):
        ...         (way,) = straight(bra, symmetrised=True)
        ...         return (dataclasses.replace(way, weight=3.0),)
        >>> square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> print(f"{tnsim.inner(square, square, Tripled()):.3f}")
        3.000

    Source:
        Paper, appendices A.2 and A.3: a single layer of the Gram recursion.
    """

    def joinings(self, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
        """The ways in which the input legs of two layers are joined, with weights.

        Args:
            bra: Order of the layer of the bra, its number of input legs.
            ket: Order of the layer of the ket.
            centred: Whether the mean is zero, so that no leg is handed to it.

        Returns:
            Joinings, a single joining for every orbit under exchange of the legs of a layer.
        """
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
    """Whether a value is a `LayerwiseMetric`, twenty times as fast as `isinstance`.

    Example:
        >>> import tnsim
        >>> joins_layers(tnsim.TreeSymmetric()), joins_layers(tnsim.Symmetric())
        (True, False)
    """
    return _has_method(metric, "joinings")


def adds_up(metric: Any) -> TypeGuard[FiniteMetric]:
    """Whether a value is a `FiniteMetric`, twenty times as fast as `isinstance`.

    Example:
        >>> import tnsim
        >>> adds_up(tnsim.Categorical()), adds_up(tnsim.TreeSymmetric())
        (True, False)
    """
    return _has_method(metric, "points")


def _has_method(metric: Any, method: str) -> bool:
    """Whether a metric has a given method and the attributes of every metric."""
    if getattr(metric, method, None) is None:
        return False
    return all(hasattr(metric, name) for name in _EVERY)
