"""Which numbers a feature vector holds. In: kinds of layers, a metric. Out: a `Space`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tnsim.metrics.metric import joins_legs, layer_by_layer
from tnsim.metrics.protocol import Metric
from tnsim.metrics.ways import Way, way_of
from tnsim.tensors.kinds import LayerKind, nonlinear

_LARGEST = 2**24  # numbers in a vector of a combination, 128 MiB
AT_ONCE = 4  # models whose quadratic forms are in flight at the same time


class Space(NamedTuple):
    """Which numbers a feature vector holds; one space for all models of a run. Hashable.

    Args:
        d_in: Coordinates of the input.
        d_out: Vectors that a model has, one for each output.
        quadratic: Whether models are of degree two, else of degree one.
        lifted: Whether there is a constant, before the coordinates of the input.
        gaussian: Hermite coefficients under a Gaussian; else entries of the tensor.
        symmetric: The tensor is symmetric, and its upper half is enough.
    """

    d_in: int
    d_out: int
    quadratic: bool
    lifted: bool
    gaussian: bool
    symmetric: bool

    @property
    def length(self) -> int:
        """Numbers per output."""
        # Among Hermite coefficients constants and linear terms are numbers of their own; among the
        # entries of a tensor they are its rows and columns at the constant coordinate.
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
        metric: Any; its way of joining legs decides.
        sequences: Whether the models read sequences.

    Returns:
        The space. None where a model is no quadratic polynomial, or where the metric joins legs in
        a way that is no dot product known here.
    """
    layers = list(itertools.chain.from_iterable(models))
    depths = {nonlinear(model) for model in models}
    if sequences or max(depths) > 1 or max(kind.order for kind in layers) > 2:
        return None
    way = way_of(layer_by_layer(metric, 1, (2, 2))) if joins_legs(metric) else None
    if way is None:
        return None
    odd_and_even = len(depths) > 1
    has_mean = getattr(metric, "mean", None) is not None
    return Space(
        models[0][0].d_in,
        models[0][-1].d_out,
        quadratic=max(depths) == 1,
        lifted=odd_and_even or has_mean or any(kind.constant for kind in layers),
        gaussian=way is Way.ISSERLIS,
        symmetric=way is not Way.AS_WRITTEN,
    )


def fits(space: Space | None) -> bool:
    """Whether combinations may be compared as vectors, which lose fewer digits than products."""
    return space is not None and space.length * space.d_out <= _LARGEST
