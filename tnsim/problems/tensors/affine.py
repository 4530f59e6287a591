"""Linear layers as affine maps, one after another."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Float

from tnsim.models.arrays import Array, add
from tnsim.models.protocol import Layer
from tnsim.names import WEIGHT, bias_of
from tnsim.problems.tensors.positional import sequence_arrays


class Affine(NamedTuple):
    """The affine map `weight x + bias`; a weight of None is the identity, a bias of None zero."""

    weight: Float[Array, "rows in"] | None = None
    bias: Float[Array, " rows"] | None = None

    def after(self, inner: Affine) -> Affine:
        """This map of the outputs of another map."""
        bias = self.bias
        if inner.bias is not None:
            # W (V x + v) + w = W V x + (W v + w).
            bias = add(product(self.weight, inner.bias), bias)
        weight = self.weight if inner.weight is None else product(self.weight, inner.weight)
        return Affine(weight, bias)


def affine_of(layer: Layer) -> Affine:
    """A linear layer as an affine map, in float64.

    Example:
        A residual around a linear layer is linear as well: skip x + scale (W x + b).

        >>> import tnsim
        >>> affine_of(tnsim.Residual(tnsim.Linear([[2.0]], [1.0]), skip=1.0, scale=10.0))
        Affine(weight=array([[21.]]), bias=array([10.]))
    """
    arrays = sequence_arrays(layer, 1)
    return Affine(arrays[WEIGHT], arrays.get(bias_of(WEIGHT)))


def product(matrix: Any, other: Any) -> Any:
    """The product of two matrices, or of a matrix and a vector; None is the identity.

    Example:
        >>> product(None, 3.0)
        3.0
    """
    return other if matrix is None else matrix @ other
