"""Protocols of layers: layers of tnsim, and layers from outside."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float

from tnsim.models.arrays import Array


class Layer(Protocol):
    """A layer of a model: a polynomial of a single order, up to biases and skips, or an activation.

    A layer is an immutable pytree whose leaves are the weights. The algebra knows `Linear`,
    `Bilinear`, `Multilinear`, `Attention`, `Elementwise`, `Gated` and `Residual`; a layer from
    outside says which of these computes the same (see `OwnLayer`).

    Example:
        >>> import tnsim
        >>> layer = tnsim.Bilinear([[1.0, 0.0]], [[0.0, 1.0]], [[1.0]])
        >>> layer.order, layer.d_in, layer.d_out
        (2, 2, 1)

    Source:
        Paper, section 2.1.
    """

    @property
    def order(self) -> int:
        """Degree of the polynomial, the number of input legs of its tensor; infinite of others."""
        ...

    @property
    def d_in(self) -> int:
        """Coordinates of the input."""
        ...

    @property
    def d_out(self) -> int:
        """Coordinates of the output."""
        ...

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """The forward pass, for any leading axes.

        Args:
            x: Inputs (..., d_in); for attention (..., n_ctx, d_in).

        Returns:
            Outputs (..., d_out), in the dtype that weights and input promote to.
        """
        ...


@runtime_checkable
class OwnLayer(Protocol):
    """A layer from outside, with a method that names an equal layer of tnsim.

    `Model` and `Residual` call `as_layer` once, compare the two forward passes, and hold the layer
    of tnsim.

    Example:
        >>> import numpy as np
        >>> import tnsim
        >>> class Cubic:
        ...     def __init__(self, weight, down):
        ...         self.weight, self.down = weight, down
        ...     def __call__(self, x):
        ...         return (x @ self.weight.T) ** 3 @ self.down.T
        ...     def as_layer(self):
        ...         return tnsim.Multilinear([self.weight] * 3, self.down)
        >>> tnsim.Model([Cubic(np.eye(2), np.ones((1, 2)))]).layers
        (Multilinear(3 legs, 2 -> 1, rank 2),)
    """

    def as_layer(self) -> Layer:
        """The same function as a layer of tnsim.

        Returns:
            A layer with the same forward pass; `Model` raises `ModelError` where the two differ on
            random inputs.
        """
        ...

    def __call__(self, x: Any) -> Any:
        """The forward pass, with which `Model` compares the layer of tnsim."""
        ...
