"""Which algebra a metric's joinings have. In: a metric. Out: a `Way`, where there is one.

Layer over layer any joinings can be contracted as they are. Vectors of features, and moments of
sequences, need to know more: that all joinings of a metric together are one of the sums below. A
metric from outside may give such a sum, or another one; what it answers decides, not its class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum, auto

from tnsim.metrics.pairings import Joining, gaussian, straight
from tnsim.metrics.protocol import LayerwiseMetric

LARGEST_ORDER = 3
"""Layers up to this order are asked about; of layers of more legs a `Way` says nothing."""
_ORDERS = range(1, LARGEST_ORDER + 1)
_ASKED = tuple(itertools.product(_ORDERS, _ORDERS, (True, False)))
"""Orders of the bra's and the ket's layer, and whether no leg is handed to the mean."""


class Way(Enum):
    """What the joinings of two layers add up to.

    Attributes:
        AS_WRITTEN: Leg i with leg i, the inner product of two tensors.
        SYMMETRISED: The same of two tensors symmetrised over their legs.
        ISSERLIS: All pairings, the expectation of a product of Gaussians.
    """

    AS_WRITTEN = auto()
    SYMMETRISED = auto()
    ISSERLIS = auto()


def way_of(metric: LayerwiseMetric) -> Way | None:
    """The way in which a metric joins legs; None where it is none of those known.

    Example:
        >>> import tnsim
        >>> way_of(tnsim.TreeSymmetric()).name
        'SYMMETRISED'
    """
    for way, known in _KNOWN.items():
        if all(metric.joinings(*asked) == known(*asked) for asked in _ASKED):
            return way
    return None


def _as_written(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    return straight(bra, symmetrised=False)


def _symmetrised(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    return straight(bra, symmetrised=True)


_KNOWN: dict[Way, Callable[[int, int, bool], tuple[Joining, ...]]] = {
    Way.AS_WRITTEN: _as_written,
    Way.SYMMETRISED: _symmetrised,
    Way.ISSERLIS: gaussian,
}
