"""What a layer is asked. In: nothing. Out: the protocols of layers, known and from outside."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float

from tnsim.models.arrays import Array


class Layer(Protocol):
    """What every layer of a model answers: a polynomial map of one order, but for biases and skips.

    An immutable pytree whose leaves are its weights. The algebra knows `Linear`, `Bilinear`,
    `Multilinear`, `Attention` and `Residual`; a layer of your own says which of these it is, see
    `OwnLayer`.

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
        """Degree of the polynomial, which is the number of input legs of the layer's tensor."""
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
            x: (..., d_in); for attention (..., n_ctx, d_in).

        Returns:
            (..., d_out), in the dtype that weights and input promote to.
        """
        ...


@runtime_checkable
class OwnLayer(Protocol):
    """A polynomial layer from outside: anything that can say which known layer computes the same.

    `Model` and `Residual` ask it once, compare the two forward passes, and keep the known layer.

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
            A layer whose forward pass agrees on random inputs; `Model` raises `ModelError` where it
            does not.
        """
        ...

    def __call__(self, x: Any) -> Any:
        """The forward pass, with which the known layer is compared."""
        ...
