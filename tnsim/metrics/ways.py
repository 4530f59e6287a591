"""Joinings of a metric: as plain data, and as an algebra. In: a metric. Out: `Joinings`, a
`PairingRule`.

A plan depends on how legs are joined, which a metric may decide by its class or by its numbers. The
joinings themselves, asked for once, are therefore part of the key under which a plan is kept.

Layer over layer any joinings can be contracted as they are. Vectors of features, and moments of
sequences, need to know more: that all joinings of a metric together are one of the sums below. A
metric from outside may give such a sum, or another one; what it answers decides, not its class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tnsim.errors import ModelError
from tnsim.metrics.pairings import Joining, Leg, gaussian, straight
from tnsim.metrics.protocol import LayerwiseMetric
from tnsim.names import SIDES

LARGEST_ORDER = 3
"""Layers up to this order are asked about; of layers of more legs a `PairingRule` says nothing."""
_ORDERS = range(1, LARGEST_ORDER + 1)
ASKED = tuple(itertools.product(_ORDERS, _ORDERS, (True, False)))
"""Orders of the bra's and the ket's layer, and whether no leg is handed to the mean."""

Orders = tuple[int, int]
"""Of a layer of the bra and of a layer of the ket."""
ALL_ORDERS: tuple[Orders, ...] = tuple(itertools.product(_ORDERS, _ORDERS))
"""Orders of the layers that are asked about."""


@dataclass(frozen=True)
class Joinings:
    """A layer-wise metric as all that a plan depends on: hashable, without the metric's numbers.

    Args:
        name: Name of the metric.
        pairs_within_model: Whether legs of one model are joined with each other too.
        exact: Whether the definition of the metric is met for the models under comparison.
        table: Joinings by the orders of two layers and by whether the mean is zero.
    """

    name: str
    pairs_within_model: bool
    exact: bool
    table: tuple[tuple[tuple[int, int, bool], tuple[Joining, ...]], ...]

    def is_exact(self, nonlinear_layers: int) -> bool:
        """As the metric answered for the models under comparison."""
        return self.exact

    def joinings(self, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
        """As the metric answered, see `LayerwiseMetric`."""
        return dict(self.table)[bra, ket, bool(centred)]


def asked(metric: LayerwiseMetric, orders: Collection[Orders], nonlinear_layers: int) -> Joinings:
    """What a metric answers for some layers.

    Args:
        metric: Any metric that joins layer by layer.
        orders: Orders of the pairs of layers that meet.
        nonlinear_layers: Their number in the deeper model.

    Returns:
        The answers as plain data.

    Raises:
        ModelError: A joining does not join every leg of both layers once, or its weight is no
            finite number.

    Example:
        >>> import tnsim
        >>> found = asked(tnsim.TreeSymmetric(), [(2, 2)], nonlinear_layers=1)
        >>> found.joinings(2, 2, True) == tnsim.TreeSymmetric().joinings(2, 2, True)
        True
    """
    table = []
    for bra, ket in sorted(set(orders)):
        for centred in (True, False):
            given = tuple(metric.joinings(bra, ket, centred))
            if bra == ket or metric.pairs_within_model:  # others meet in no comparison
                given = tuple(_checked(one, (bra, ket), metric) for one in given)
            table.append(((bra, ket, centred), given))
    exact = bool(metric.is_exact(nonlinear_layers))
    return Joinings(metric.name, bool(metric.pairs_within_model), exact, tuple(table))


def _checked(joining: Joining, orders: Orders, metric: LayerwiseMetric) -> Joining:
    """A joining as plain data, every leg of both layers in it once."""
    called = f"{type(metric).__name__}.joinings{orders}"
    weight = _number(joining.weight, called)
    pairs = tuple((Leg(*one), Leg(*two)) for one, two in joining.pairs)
    capped = tuple(Leg(*leg) for leg in joining.capped)
    legs = sorted((*itertools.chain(*pairs), *capped))
    wanted = [Leg(side, n) for side, order in zip(SIDES, orders, strict=True) for n in range(order)]
    if legs != wanted:
        shown = ", ".join(f"{leg.side}{leg.index}" for leg in legs) or "none"
        raise ModelError(
            f"{called} must join every leg of both layers once or hand it to the mean: layers of "
            f"orders {orders[0]} and {orders[1]} have {len(wanted)} legs, found {shown}"
        )
    alone = bool(capped) or any(one.side == two.side for one, two in pairs)
    if alone and not metric.pairs_within_model:
        raise ModelError(
            f"{called} joins legs of one model with each other, or hands them to the mean, but "
            "the metric answers pairs_within_model with False"
        )
    return Joining(weight, pairs, capped, tuple(joining.symmetrised))


def _number(weight: Any, called: str) -> float:
    """The weight of a joining, which is part of a plan."""
    try:
        number = float(weight)
    except TypeError:  # of what JAX traces, among others
        raise ModelError(
            f"{called} gives a weight that is no number, found {type(weight).__name__}: weights of "
            "joinings are part of the plan, so they can be neither traced nor differentiated"
        ) from None
    if not math.isfinite(number):
        raise ModelError(f"{called} gives a weight that is not finite, found {number}")
    return number


class PairingRule(Enum):
    """What the joinings of two layers add up to.

    Attributes:
        AS_WRITTEN: Leg i with leg i, the inner product of two tensors.
        SYMMETRISED: The same of two tensors symmetrised over their legs.
        ISSERLIS: All pairings, the expectation of a product of Gaussians.
    """

    AS_WRITTEN = auto()
    SYMMETRISED = auto()
    ISSERLIS = auto()


def pairing_rule(metric: LayerwiseMetric) -> PairingRule | None:
    """The way in which a metric joins legs; None where it is none of those known.

    Example:
        >>> import tnsim
        >>> pairing_rule(tnsim.TreeSymmetric()).name
        'SYMMETRISED'
    """
    for way, known in _KNOWN.items():
        if all(tuple(metric.joinings(*one)) == known(*one) for one in ASKED):
            return way
    return None


def _as_written(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    return straight(bra, symmetrised=False)


def _symmetrised(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    return straight(bra, symmetrised=True)


_KNOWN: dict[PairingRule, Callable[[int, int, bool], tuple[Joining, ...]]] = {
    PairingRule.AS_WRITTEN: _as_written,
    PairingRule.SYMMETRISED: _symmetrised,
    PairingRule.ISSERLIS: gaussian,
}
