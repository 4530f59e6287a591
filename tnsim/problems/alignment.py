"""Layers of two models matched from the input up, in steps of a single layer of each model.

Where a model has a linear layer more, the other waits: an identity stands in for its layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tnsim.errors import ModelError
from tnsim.metrics.protocol import Metric


class Step(NamedTuple):
    """The layers that a stage applies, by their numbers.

    Args:
        bra: Number of the bra's layer; None where the bra waits.
        ket: Number of the ket's layer; None where the ket waits.
    """

    bra: int | None
    ket: int | None


class Ordered(Protocol):
    """A layer or the kind of a layer, with an order in its input."""

    @property
    def order(self) -> int:
        """Degree of the output in the input."""
        ...


def align(bra: Sequence[Ordered], ket: Sequence[Ordered], metric: Metric) -> tuple[Step, ...]:
    """Match layers from the input up: linear with linear, nonlinear with nonlinear.

    Args:
        bra: Layers of a single model.
        ket: Layers of the other.
        metric: Metric, which may compare trees of equal shape only.

    Returns:
        Steps in order; every layer is in a single step.

    Raises:
        ModelError: The metric compares trees of equal shape, and these differ.

    Example:
        >>> import numpy as np, tnsim
        >>> linear, square = tnsim.Linear([[1.0]]), tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> [tuple(step) for step in align([linear, square], [square], tnsim.Gaussian())]
        [(0, None), (1, 0)]
    """
    steps: list[Step] = []
    i, j = 0, 0
    # Numbers of the next layer of each model. Every step applies a layer of at least one model, so
    # the loop ends.
    while i < len(bra) or j < len(ket):
        advances_bra, advances_ket = _both_advance(_order_at(bra, i), _order_at(ket, j))
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
    """Orders of the pairs of layers that meet, pairs within each model included.

    Args:
        bra: Layers of a single model.
        ket: Layers of the other.
        metric: Metric, which may compare trees of equal shape only.

    Returns:
        Pairs (order of the bra's layer, order of the ket's), 1 for a model that waits.

    Raises:
        ModelError: The metric compares trees of equal shape, and these differ.

    Example:
        >>> import tnsim
        >>> square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> sorted(orders_that_meet([square], [tnsim.Linear([[1.0]])], tnsim.Gaussian()))
        [(1, 1), (2, 1), (2, 2)]
    """
    orders: set[tuple[int, int]] = set()
    for step in align(bra, ket, metric):
        first = 1 if step.bra is None else bra[step.bra].order
        second = 1 if step.ket is None else ket[step.ket].order
        orders |= {(first, second), (first, first), (second, second)}
    return orders


def _order_at(layers: Sequence[Ordered], number: int) -> int | None:
    """Order of the layer with this number; None beyond the last layer."""
    return layers[number].order if number < len(layers) else None


def _both_advance(bra: int | None, ket: int | None) -> tuple[bool, bool]:
    """Whether the next layers of bra and ket are applied, by their orders."""
    if bra is None or ket is None:
        return bra is not None, ket is not None
    # Linear meets linear, nonlinear meets nonlinear; a nonlinear layer waits for a linear one.
    if bra == ket or 1 not in (bra, ket):
        return True, True
    return bra == 1, ket == 1


def _check_same_order(
    bra: Sequence[Ordered], ket: Sequence[Ordered], step: Step, metric: Metric
) -> None:
    """Refuse layers of different order; a model that waits has order 1."""
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
    """Orders of the nonlinear layers, from the input up."""
    return [layer.order for layer in layers if layer.order > 1]
