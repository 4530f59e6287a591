"""Layers of two models matched from the input up. In: layers, a metric. Out: steps of a layer each.

Where one model has a linear layer more, the other waits: an identity stands in for its layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tnsim.errors import ModelError
from tnsim.metrics.protocol import Metric


class Step(NamedTuple):
    """The layers that one stage applies, by their numbers.

    Args:
        bra: Of the bra; None waits.
        ket: Of the ket; None waits.
    """

    bra: int | None
    ket: int | None


class Ordered(Protocol):
    """A layer, or its kind: something of an order in its input."""

    @property
    def order(self) -> int:
        """Degree in the input."""
        ...


def align(bra: Sequence[Ordered], ket: Sequence[Ordered], metric: Metric) -> tuple[Step, ...]:
    """Match layers from the input up: linear with linear, nonlinear with nonlinear.

    Args:
        bra: Layers of one model.
        ket: Layers of the other.
        metric: Whether it compares trees of one shape only.

    Returns:
        Steps in order; every layer is in one of them.

    Raises:
        ModelError: The metric compares trees of one shape, and these differ.

    Example:
        >>> import numpy as np, tnsim
        >>> linear, square = tnsim.Linear([[1.0]]), tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> [tuple(step) for step in align([linear, square], [square], tnsim.Gaussian())]
        [(0, None), (1, 0)]
    """
    steps: list[Step] = []
    i, j = 0, 0
    while i < len(bra) or j < len(ket):
        advances_bra, advances_ket = _advances(_order_at(bra, i), _order_at(ket, j))
        step = Step(i if advances_bra else None, j if advances_ket else None)
        steps.append(step)
        if not metric.pairs_within_model:
            _check_same_order(bra, ket, step, metric)
        i += advances_bra
        j += advances_ket
    return tuple(steps)


def orders_that_meet(
    bra: Sequence[Ordered], ket: Sequence[Ordered], metric: Metric
) -> set[tuple[int, int]]:
    """Orders of the pairs of layers whose legs are joined, of each model with itself included.

    Args:
        bra: Layers of one model.
        ket: Layers of the other.
        metric: As for `align`.

    Returns:
        Pairs (order of the bra's layer, order of the ket's), 1 for a model that waits.

    Raises:
        ModelError: As `align`.

    Example:
        >>> import tnsim
        >>> square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> sorted(orders_that_meet([square], [tnsim.Linear([[1.0]])], tnsim.Gaussian()))
        [(1, 1), (2, 1), (2, 2)]
    """
    found: set[tuple[int, int]] = set()
    for step in align(bra, ket, metric):
        first = 1 if step.bra is None else bra[step.bra].order
        second = 1 if step.ket is None else ket[step.ket].order
        found |= {(first, second), (first, first), (second, second)}
    return found


def _order_at(layers: Sequence[Ordered], number: int) -> int | None:
    """Order of the layer that comes next; None where there is none left."""
    return layers[number].order if number < len(layers) else None


def _advances(bra: int | None, ket: int | None) -> tuple[bool, bool]:
    """Whether the next layers of bra and ket are applied, by their orders."""
    if bra is None or ket is None:
        return bra is not None, ket is not None
    # Linear meets linear, nonlinear meets nonlinear; where they differ, the nonlinear one waits.
    if bra == ket or 1 not in (bra, ket):
        return True, True
    return bra == 1, ket == 1


def _check_same_order(
    bra: Sequence[Ordered], ket: Sequence[Ordered], step: Step, metric: Metric
) -> None:
    """Refuse layers of different order; one that waits is of order 1."""
    first = 1 if step.bra is None else bra[step.bra].order
    second = 1 if step.ket is None else ket[step.ket].order
    if first == second:
        return
    raise ModelError(
        f"{type(metric).__name__} compares trees of one shape, but the nonlinear layers have "
        f"orders {_nonlinear_orders(bra)} and {_nonlinear_orders(ket)}; "
        "use GaussianClosure() or Gaussian()"
    )


def _nonlinear_orders(layers: Sequence[Ordered]) -> list[int]:
    return [layer.order for layer in layers if layer.order > 1]
