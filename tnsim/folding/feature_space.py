"""Which numbers a feature vector holds. In: kinds of layers, a metric. Out: a `Space`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tnsim.metrics.metric import joins_legs, layer_by_layer
from tnsim.metrics.pairings import Joining, gaussian, straight
from tnsim.metrics.protocol import Metric
from tnsim.tensors.kinds import LayerKind

_LARGEST = 2**24  # numbers in a vector of a combination, 128 MiB
AT_ONCE = 4  # models whose quadratic forms are in flight at the same time

Joins = Callable[[int, int, bool], tuple[Joining, ...]]
_ASKED = tuple(itertools.product((1, 2), (1, 2), (True, False)))  # orders of layers, centred


class Space(NamedTuple):
    """Which numbers a feature vector holds; one space for all models of a run. Hashable."""

    d_in: int
    d_out: int
    quadratic: bool
    lifted: bool
    gaussian: bool
    symmetric: bool

    @property
    def length(self) -> int:
        """Numbers per output."""
        d = self.d_in + (self.lifted and not self.gaussian)
        square = d * (d + 1) // 2 if self.symmetric else d * d
        if not self.gaussian:
            return square if self.quadratic else d
        return 1 + self.lifted * d + square if self.quadratic else self.lifted + d

    def multiplications(self, layers: tuple[LayerKind, ...]) -> int:
        """Scalar multiplications that the features of one model take.

        Products of single layers are left out as small.
        """
        width = self.d_in + self.lifted
        rank = max((k.rank for k in layers if k.order > 1), default=1)
        return self.d_out * rank * width * (width if self.quadratic else 1)

    def in_flight(self, layers: tuple[LayerKind, ...], models: int) -> int:
        """Elements of intermediates while features of some models are made.

        A form (out, D, D) beside its contraction over hidden units, or beside its symmetrised
        copy and half of another (measured); where the models are no multiple of those in flight,
        all features once more.
        """
        if not self.quadratic:
            return 0
        width = self.d_in + self.lifted
        rank = max((k.rank for k in layers if k.order == 2), default=1)
        form = width * width
        once = self.d_out * (form + max(3 * form // 2, rank * width))
        uneven = models > AT_ONCE and models % AT_ONCE > 0
        return min(models, AT_ONCE) * once + uneven * models * self.length * self.d_out


def space(
    models: Sequence[tuple[LayerKind, ...]], metric: Metric, sequences: bool = False
) -> Space | None:
    """The space that holds all models of these layers.

    Args:
        models: Kinds of layers, model by model.
        metric: Any; what it answers for layers of one and two legs decides.
        sequences: Whether the models read sequences.

    Returns:
        The space. None where a model is no quadratic polynomial, or where the metric joins legs in
        a way that is no dot product known here.
    """
    layers = [kind for model in models for kind in model]
    bilinear = {sum(kind.order > 1 for kind in model) for model in models}
    if sequences or max(bilinear) > 1 or max(kind.order for kind in layers) > 2:
        return None
    joined = _joined(metric)
    if joined is None:
        return None
    odd_and_even = len(bilinear) > 1
    has_mean = getattr(metric, "mean", None) is not None
    return Space(
        models[0][0].d_in,
        models[0][-1].d_out,
        quadratic=max(bilinear) == 1,
        lifted=odd_and_even or has_mean or any(kind.constant for kind in layers),
        gaussian=joined is gaussian,
        symmetric=joined is not _as_written,
    )


def _joined(metric: Metric) -> Joins | None:
    """How a metric joins legs, among the ways that are dot products of vectors; None for others."""
    if not joins_legs(metric):
        return None
    layerwise = layer_by_layer(metric, 1, (2, 2))

    def agrees(known: Joins) -> bool:
        return all(layerwise.joinings(*asked) == known(*asked) for asked in _ASKED)

    return next((known for known in (_as_written, _symmetrised, gaussian) if agrees(known)), None)


def _as_written(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    return straight(bra, symmetrised=False)


def _symmetrised(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    return straight(bra, symmetrised=True)


def fits(space: Space | None) -> bool:
    """Whether combinations may be compared as vectors, which lose fewer digits than products."""
    return space is not None and space.length * space.d_out <= _LARGEST
