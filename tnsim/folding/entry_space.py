"""Bilinear models as vectors of their tensors' entries, as written. In: layers. Out: features.

For `Frobenius`, which tells the two legs of a layer apart: the entries of the (lifted) form

    sum_h D[o, h] L[h, i] R[h, j],      with a skip + (copy[o, i] skip[j] + skip[i] copy[o, j]) / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Float

from tnsim.folding.merged_layers import merged_layers
from tnsim.folding.polynomial_space import way_of_one_layer
from tnsim.metrics.protocol import Metric
from tnsim.metrics.ways import Way
from tnsim.models.arrays import library
from tnsim.models.model import Model
from tnsim.tensors.kinds import Kinds
from tnsim.tensors.lifted import arrays

_TOGETHER = 4


class EntrySpace(NamedTuple):
    """The entries of quadratic forms. Hashable."""

    d_in: int
    d_out: int
    lifted: bool

    @property
    def route(self) -> str:
        return "features"

    @property
    def length(self) -> int:
        return (self.d_in + self.lifted) ** 2

    @property
    def parts(self) -> tuple[EntrySpace, ...]:
        return (self,)

    @property
    def at_once(self) -> int:
        return _TOGETHER

    def multiplications(self, layers: Kinds) -> int:
        rank = max(kind.rank for kind in layers)
        return self.d_out * rank * self.length

    def in_flight(self, layers: Kinds, models: int) -> int:
        rank = max(kind.rank for kind in layers)
        once = self.d_out * (2 * self.length + rank * (self.d_in + self.lifted))
        return min(models, _TOGETHER) * once + models * self.length * self.d_out

    def weights(self, model: Model) -> list[dict[str, Any]]:
        return [arrays(layer, self.lifted) for layer in model.layers]

    def inputs(self, metric: Metric, dtype: str) -> None:
        return None

    def vector(self, weights: list[dict[str, Any]], inputs: None) -> Float[Any, "out entries"]:
        before, (layer,) = merged_layers(weights)
        left, right = (leg if before is None else leg @ before for leg in layer.legs)
        outputs = slice(int(self.lifted), None)
        down, xp = layer.down[outputs], library(left)
        form = xp.einsum("oh,hi,hj->oij", down, left, right)
        if layer.copy is not None:
            copy = layer.copy[outputs]
            copy = copy if before is None else copy @ before
            one = xp.eye(1, copy.shape[1], dtype=copy.dtype)[0]
            form = form + 0.5 * (copy[:, :, None] * one + one[:, None] * copy[:, None, :])
        return form.reshape(len(form), -1)


def entries(models: Sequence[Kinds], metric: Metric, n_ctx: int | None) -> EntrySpace | None:
    """The space of models of one bilinear layer each under a metric that joins legs as written."""
    flat = [kind for layers in models for kind in layers]
    orders = {tuple(sorted(kind.order for kind in layers if kind.order > 1)) for layers in models}
    if n_ctx is not None or orders != {(2,)} or way_of_one_layer(metric) is not Way.AS_WRITTEN:
        return None
    lifted = any(kind.constant for kind in flat)
    return EntrySpace(models[0][0].d_in, models[0][-1].d_out, lifted)
