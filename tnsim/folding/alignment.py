"""Layers of two models matched from the input up. In: layers, a metric. Out: steps, a layer of each at most.

Where one model has a linear layer more, the other waits: an identity stands in for its layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tnsim.errors import ModelError
from tnsim.metrics.metric import Metric


class Step(NamedTuple):
    """Layer index of bra and ket that one stage applies; None waits."""

    bra: int | None
    ket: int | None


class Ordered(Protocol):
    """A layer, or its kind: something of an order in its input."""

    @property
    def order(self) -> int: ...


def align(bra: Sequence[Ordered], ket: Sequence[Ordered], metric: Metric) -> tuple[Step, ...]:
    """Match layers from the input up. Raises `ModelError` where a tree metric finds trees of different shape."""
    steps, i, j = [], 0, 0
    while i < len(bra) or j < len(ket):
        orders = [k[n].order if n < len(k) else None for k, n in ((bra, i), (ket, j))]
        if None in orders:
            step = Step(i if orders[1] is None else None, j if orders[0] is None else None)
        elif orders[0] == orders[1] or 1 not in orders:
            step = Step(i, j)
        else:
            step = Step(i if orders[0] == 1 else None, j if orders[1] == 1 else None)
        pair = [k[n].order if n is not None else 1 for k, n in ((bra, step.bra), (ket, step.ket))]
        if not metric.pairs_within_model and pair[0] != pair[1]:
            found = [[k.order for k in kinds if k.order > 1] for kinds in (bra, ket)]
            raise ModelError(
                f"{type(metric).__name__} compares trees of one shape, but the nonlinear layers have orders "
                f"{found[0]} and {found[1]}; use GaussianClosure() or Gaussian()"
            )
        steps.append(step)
        i, j = i + (step.bra is not None), j + (step.ket is not None)
    return tuple(steps)
