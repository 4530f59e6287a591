"""Products of any number of affine maps. In: arrays. Out: a checked layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.arrays import Array, add, matrix, set_arrays, vector


class Multilinear:
    """`D (h_1 * ... * h_n) + b` with `h_j = W_j x + b_j`: a product of any number of affine maps.

    Every polynomial of order n is of this form, with enough hidden units. `Bilinear` is the case of
    two.

    Args:
        legs: The n matrices W_j, each (rank, d_in); the same array may stand several times.
        down: D, (d_out, rank).
        leg_biases: The n vectors b_j, each (rank,) or None; None for none at all.
        down_bias: b, (d_out,) or None.

    Raises:
        ModelError: Shapes do not fit, an entry is not finite, or there is no leg.

    Example:
        >>> import numpy as np
        >>> cube = Multilinear([[[2.0]]] * 3, [[1.0]])
        >>> cube(np.array([1.0])), cube.order
        (array([8.]), 3)

    Source:
        Paper, section 2.1: equation 1 with n maps in place of two, a CP decomposition of the
        layer's tensor.
    """

    n_legs: int
    down: Float[Array, "out rank"]
    down_bias: Float[Array, " out"] | None

    def __init__(
        self,
        legs: Sequence[Any],
        down: Any,
        leg_biases: Sequence[Any] | None = None,
        down_bias: Any = None,
    ) -> None:
        legs = list(legs)
        if not legs:
            raise ModelError("Multilinear multiplies at least one leg, found none")
        biases = [None] * len(legs)
        if leg_biases is not None:
            biases = list(leg_biases)
        if len(biases) != len(legs):
            raise ModelError(f"Multilinear has {len(legs)} legs but {len(biases)} leg biases")
        rank, d_in = matrix(legs[0], "Multilinear leg 0", (None, None)).shape
        arrays = {}
        for n, (leg, bias) in enumerate(zip(legs, biases, strict=True)):
            what = f"Multilinear leg {n}"
            arrays[f"leg{n}"] = matrix(leg, what, (rank, d_in), " as in leg 0")
            arrays[f"leg{n}_bias"] = vector(bias, f"{what} bias", rank)
        down = matrix(down, "Multilinear down", (None, rank), ", the rank of the legs")
        arrays["down"] = down
        arrays["down_bias"] = vector(down_bias, "Multilinear down_bias", down.shape[0])
        set_arrays(self, **arrays, n_legs=len(legs))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Multilinear is immutable, cannot set {name!r}; build a new one")

    @property
    def order(self) -> int:
        """Degree in the input, the number of legs."""
        return self.n_legs

    @property
    def legs(self) -> tuple[Float[Array, "rank in"], ...]:
        """The matrices W_1 to W_n."""
        return tuple(getattr(self, f"leg{n}") for n in range(self.n_legs))

    @property
    def leg_biases(self) -> tuple[Float[Array, " rank"] | None, ...]:
        """The vectors b_1 to b_n, None where there is none."""
        return tuple(getattr(self, f"leg{n}_bias") for n in range(self.n_legs))

    @property
    def d_in(self) -> int:
        """Coordinates of the input."""
        return self.legs[0].shape[-1]

    @property
    def d_out(self) -> int:
        """Coordinates of the output."""
        return self.down.shape[-2]

    @property
    def rank(self) -> int:
        """Hidden units, over which products are summed."""
        return self.down.shape[-1]

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        maps = zip(self.legs, self.leg_biases, strict=True)
        hidden = math.prod(add(x @ leg.T, bias) for leg, bias in maps)
        return add(hidden @ self.down.T, self.down_bias)

    def __repr__(self) -> str:
        return f"Multilinear({self.n_legs} legs, {self.d_in} -> {self.d_out}, rank {self.rank})"


def _flatten(layer: Multilinear) -> tuple[tuple[Any, ...], int]:
    return (*layer.legs, *layer.leg_biases, layer.down, layer.down_bias), layer.n_legs


def _unflatten(n_legs: int, children: Iterable[Any]) -> Multilinear:
    """Rebuild without checks: JAX fills layers with tracers and placeholders."""
    *legs, down, down_bias = children
    layer = object.__new__(Multilinear)
    set_arrays(layer, down=down, down_bias=down_bias, n_legs=n_legs)
    for n in range(n_legs):
        set_arrays(layer, **{f"leg{n}": legs[n], f"leg{n}_bias": legs[n_legs + n]})
    return layer


jax.tree_util.register_pytree_node(Multilinear, _flatten, _unflatten)
