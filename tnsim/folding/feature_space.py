"""Which numbers a feature vector holds. In: kinds of layers, a metric. Out: a `Space`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tnsim.metrics.metric import Categorical, Frobenius, Metric
from tnsim.tensors.kinds import LayerKind

_LARGEST = 2**24  # numbers in a vector of a combination, 128 MiB
AT_ONCE = 4  # models whose quadratic forms are in flight at the same time


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
    """The space that holds all models of these layers, None where one of them is no quadratic
    polynomial.
    """
    flat = [k for layers in models for k in layers]
    if isinstance(metric, Categorical) or sequences:
        return None
    bilinear = {sum(k.order > 1 for k in layers) for layers in models}
    if max(bilinear) > 1 or any(k.order > 2 for k in flat):
        return None
    odd_and_even = len(bilinear) > 1
    lifted = (
        any(k.constant for k in flat) or getattr(metric, "mean", None) is not None or odd_and_even
    )
    symmetric = not isinstance(metric, Frobenius)
    return Space(
        models[0][0].d_in,
        models[0][-1].d_out,
        max(bilinear) == 1,
        lifted,
        metric.pairs_within_model,
        symmetric,
    )


def fits(space: Space | None) -> bool:
    """Whether combinations may be compared as vectors, which lose fewer digits than products."""
    return space is not None and space.length * space.d_out <= _LARGEST
