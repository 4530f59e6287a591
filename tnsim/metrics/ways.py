"""Joinings of a metric as plain data (`Joinings`) and as a known sum (`PairingRule`).

A plan depends on how legs are joined, which a metric may decide by its class or by its numbers. The
joinings themselves, asked for once, are therefore part of the key under which a plan is stored.

Layer over layer any joinings can be contracted as they are. Vectors of features and moments of
sequences need more: all joinings of the metric together must be among the sums of `PairingRule`. A
metric from outside may give such a sum or another; its joinings decide, not its class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from tnsim.errors import ModelError
from tnsim.metrics.pairings import Joining, Leg, gaussian, straight
from tnsim.metrics.protocol import LayerwiseMetric
from tnsim.names import SIDES
from tnsim.sessions import session_cache

LARGEST_ORDER = 3
"""Largest order of layers whose joinings a `PairingRule` describes."""
_ORDERS = range(1, LARGEST_ORDER + 1)
ASKED = tuple(itertools.product(_ORDERS, _ORDERS, (True, False)))
"""Arguments of `joinings` that are compared: orders in bra and ket, and whether centred."""

Orders = tuple[int, int]
"""Order of a layer of the bra, order of a layer of the ket."""
ALL_ORDERS: tuple[Orders, ...] = tuple(itertools.product(_ORDERS, _ORDERS))
"""Pairs of orders whose joinings are compared."""


@dataclass(frozen=True)
class Joinings:
    """The answers of a layer-wise metric on which a plan depends: hashable and without arrays.

    Args:
        name: Name of the metric.
        pairs_within_model: Whether legs of the same model may be joined with each other.
        exact: Whether the definition of the metric is met for the models under comparison.
        table: Joinings by the orders of two layers and by whether the mean is zero.
    """

    name: str
    pairs_within_model: bool
    exact: bool
    table: tuple[tuple[tuple[int, int, bool], tuple[Joining, ...]], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Plans are looked up by it at every call, and a table holds hundreds of legs.
        return hash((self.name, self.pairs_within_model, self.exact, self.table))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the hash, which is another one in another process.
        return type(self), (self.name, self.pairs_within_model, self.exact, self.table)

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether the metric is exact for the models under comparison, as it answered."""
        return self.exact

    def joinings(self, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
        """Joinings that the metric gave for these orders, see `LayerwiseMetric`."""
        return dict(self.table)[bra, ket, bool(centred)]


def asked(metric: LayerwiseMetric, orders: Collection[Orders], nonlinear_layers: int) -> Joinings:
    """The answers of a metric for some pairs of layers.

    Args:
        metric: Any metric that joins layer by layer.
        orders: Orders of the pairs of layers that meet.
        nonlinear_layers: Number of nonlinear layers in the deeper model.

    Returns:
        The answers as plain data.

    Raises:
        ModelError: A joining does not join every leg of both layers once, joins legs within a
            model although the metric denies that, or has a weight that is no finite number.

    Example:
        >>> import tnsim
        >>> found = asked(tnsim.TreeSymmetric(), [(2, 2)], nonlinear_layers=1)
        >>> found.joinings(2, 2, True) == tnsim.TreeSymmetric().joinings(2, 2, True)
        True
    """
    if _joins_by_class(metric):
        return _asked_of_class(type(metric), tuple(orders), nonlinear_layers)
    return _asked_joinings(metric, orders, nonlinear_layers)


def _joins_by_class(metric: LayerwiseMetric) -> bool:
    """Whether the class of a metric decides how legs are joined, as in tnsim's own metrics."""
    ours = type(metric).__module__.startswith("tnsim.metrics.")
    return ours and not isinstance(metric, Joinings)


@session_cache
def _asked_of_class(
    kind: type[LayerwiseMetric], orders: tuple[Orders, ...], nonlinear_layers: int
) -> Joinings:
    return _asked_joinings(kind(), orders, nonlinear_layers)


def _asked_joinings(
    metric: LayerwiseMetric, orders: Collection[Orders], nonlinear_layers: int
) -> Joinings:
    table = []
    for bra, ket in sorted(set(orders)):
        for centred in (True, False):
            given = tuple(metric.joinings(bra, ket, centred))
            if bra == ket or metric.pairs_within_model:  # other pairs of orders never meet
                given = tuple(_checked_joining(joining, (bra, ket), metric) for joining in given)
            table.append(((bra, ket, centred), given))
    exact = bool(metric.is_exact(nonlinear_layers))
    return Joinings(metric.name, bool(metric.pairs_within_model), exact, tuple(table))


def _checked_joining(joining: Joining, orders: Orders, metric: LayerwiseMetric) -> Joining:
    """Check that a joining has every leg of both layers once, and return it as plain data."""
    called = f"{type(metric).__name__}.joinings{orders}"
    weight = _weight_number(joining.weight, called)
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


def _weight_number(weight: Any, called: str) -> float:
    """The weight of a joining as a float; weights are part of a plan."""
    try:
        number = float(weight)
    except TypeError:  # raised by traced numbers, among others
        raise ModelError(
            f"{called} gives a weight that is no number, found {type(weight).__name__}: weights of "
            "joinings are part of the plan, so they can be neither traced nor differentiated"
        ) from None
    if not math.isfinite(number):
        raise ModelError(f"{called} gives a weight that is not finite, found {number}")
    return number


class PairingRule(Enum):
    """A known sum that all joinings of two layers together amount to.

    Attributes:
        AS_WRITTEN: Leg i with leg i, the inner product of two tensors.
        SYMMETRISED: Leg i with leg i, the inner product of two tensors symmetrised over their legs.
        ISSERLIS: All pairings, the expectation of a product of Gaussians.
    """

    AS_WRITTEN = auto()
    SYMMETRISED = auto()
    ISSERLIS = auto()


def pairing_rule(metric: LayerwiseMetric) -> PairingRule | None:
    """The known sum of the joinings of a metric; None for a metric with another sum.

    Example:
        >>> import tnsim
        >>> pairing_rule(tnsim.TreeSymmetric()).name
        'SYMMETRISED'
    """
    return _rule_of_class(type(metric)) if _joins_by_class(metric) else _rule_of(metric)


@session_cache
def _rule_of_class(kind: type[LayerwiseMetric]) -> PairingRule | None:
    return _rule_of(kind())


def _rule_of(metric: LayerwiseMetric) -> PairingRule | None:
    for way, known in _KNOWN.items():
        if all(tuple(metric.joinings(*asked)) == known(*asked) for asked in ASKED):
            return way
    return None


def _as_written(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    return straight(bra, symmetrised=False)


def _symmetrised_joinings(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    return straight(bra, symmetrised=True)


_KNOWN: dict[PairingRule, Callable[[int, int, bool], tuple[Joining, ...]]] = {
    PairingRule.AS_WRITTEN: _as_written,
    PairingRule.SYMMETRISED: _symmetrised_joinings,
    PairingRule.ISSERLIS: gaussian,
}
