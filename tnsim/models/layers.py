"""Layers as immutable pytrees of weights. In: arrays (NumPy, JAX, PyTorch). Out: checked layers.

A layer knows its shapes, its forward pass on one example (or a batch along leading axes), its order
in the input, and nothing of networks, metrics or plans. The formulas are those of the paper's
section 2.1; `Residual` covers the additive rule (skip 1) and the interpolating one (skip 1 - s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, UnsupportedLayer
from tnsim.models.arrays import Array, add, matrix, pytree, scalar, set_arrays, vector
from tnsim.models.attention import Attention


class Layer(Protocol):
    """What every layer of a model answers: a polynomial map of one order, but for biases and skips.

    An immutable pytree whose leaves are its weights. The algebra knows `Linear`, `Bilinear`, `Multilinear`, `Attention`
    and `Residual`; a layer of your own says which of these it is, see `OwnLayer`.
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
        """The forward pass, for any leading axes."""
        ...


@pytree
@dataclass(frozen=True, eq=False)
class Linear:
    """`W x + b`. weight: (d_out, d_in); bias: (d_out,) or None. Raises `ModelError`."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None = None

    def __post_init__(self) -> None:
        weight = matrix(self.weight, "Linear weight", (None, None))
        set_arrays(self, weight=weight, bias=vector(self.bias, "Linear bias", weight.shape[0]))

    @property
    def order(self) -> int:
        return 1

    @property
    def d_in(self) -> int:
        return self.weight.shape[-1]

    @property
    def d_out(self) -> int:
        return self.weight.shape[-2]

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return add(x @ self.weight.T, self.bias)


@pytree
@dataclass(frozen=True, eq=False)
class Bilinear:
    """`D ((L x + l) * (R x + r)) + b` (paper, equation 1, with the lift written out).

    left, right: (rank, d_in); down: (d_out, rank); left_bias, right_bias: (rank,); down_bias: (d_out,).
    Raises `ModelError` on shapes that do not fit.
    """

    left: Float[Array, "rank in"]
    right: Float[Array, "rank in"]
    down: Float[Array, "out rank"]
    left_bias: Float[Array, " rank"] | None = None
    right_bias: Float[Array, " rank"] | None = None
    down_bias: Float[Array, " out"] | None = None

    def __post_init__(self) -> None:
        left = matrix(self.left, "Bilinear left", (None, None))
        rank, d_in = left.shape
        right = matrix(self.right, "Bilinear right", (rank, d_in), " as in left")
        down = matrix(self.down, "Bilinear down", (None, rank), ", the rank of left and right")
        set_arrays(
            self,
            left=left,
            right=right,
            down=down,
            left_bias=vector(self.left_bias, "Bilinear left_bias", rank),
            right_bias=vector(self.right_bias, "Bilinear right_bias", rank),
            down_bias=vector(self.down_bias, "Bilinear down_bias", down.shape[0]),
        )

    @property
    def order(self) -> int:
        return 2

    @property
    def d_in(self) -> int:
        return self.left.shape[-1]

    @property
    def d_out(self) -> int:
        return self.down.shape[-2]

    @property
    def rank(self) -> int:
        return self.left.shape[-2]

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        left = add(x @ self.left.T, self.left_bias)
        right = add(x @ self.right.T, self.right_bias)
        return add((left * right) @ self.down.T, self.down_bias)


class Multilinear:
    """`D (h_1 * ... * h_n) + b` with `h_j = W_j x + b_j`: a product of any number of affine maps.

    Every polynomial of order n is of this form, with enough hidden units. `Bilinear` is the case of two.

    Args:
        legs: The n matrices W_j, each (rank, d_in); the same array may stand several times.
        down: D, (d_out, rank).
        leg_biases: The n vectors b_j, each (rank,) or None; None for none at all.
        down_bias: b, (d_out,) or None.

    Raises:
        ModelError: Shapes do not fit, an entry is not finite, or there is no leg.

    Example:
        >>> cube = Multilinear([[[2.0]]] * 3, [[1.0]])
        >>> cube(np.array([1.0])), cube.order
        (array([8.]), 3)
    """

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
        biases = [None] * len(legs) if leg_biases is None else list(leg_biases)
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

    n_legs: int

    @property
    def order(self) -> int:
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
        return self.legs[0].shape[-1]

    @property
    def d_out(self) -> int:
        return self.down.shape[-2]

    @property
    def rank(self) -> int:
        return self.down.shape[-1]

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        maps = zip(self.legs, self.leg_biases, strict=True)
        hidden = math.prod(add(x @ leg.T, bias) for leg, bias in maps)
        return add(hidden @ self.down.T, self.down_bias)

    def __repr__(self) -> str:
        return f"Multilinear({self.n_legs} legs, {self.d_in} -> {self.d_out}, rank {self.rank})"


def _flatten(layer: Multilinear) -> tuple[tuple[Any, ...], int]:
    return (*layer.legs, *layer.leg_biases, layer.down, layer.down_bias), layer.n_legs


def _unflatten(n_legs: int, children: Sequence[Any]) -> Multilinear:
    """Rebuild without checks: JAX fills layers with tracers and placeholders."""
    layer = object.__new__(Multilinear)
    names = [f"leg{n}" for n in range(n_legs)] + [f"leg{n}_bias" for n in range(n_legs)]
    values = dict(zip((*names, "down", "down_bias"), children, strict=True))
    set_arrays(layer, **values, n_legs=n_legs)
    return layer


jax.tree_util.register_pytree_node(Multilinear, _flatten, _unflatten)


@runtime_checkable
class OwnLayer(Protocol):
    """A polynomial layer from outside: anything that can say which known layer computes the same.

    `Model` and `Residual` ask it once, compare the two forward passes, and keep the known layer.

    Example:
        >>> class Cubic:
        ...     def __init__(self, weight, down):
        ...         self.weight, self.down = weight, down
        ...     def __call__(self, x):
        ...         return (x @ self.weight.T) ** 3 @ self.down.T
        ...     def as_layer(self):
        ...         return Multilinear([self.weight] * 3, self.down)
        >>> known_layer(Cubic(np.eye(2), np.ones((1, 2))), "layer 0")
        Multilinear(3 legs, 2 -> 1, rank 2)
    """

    def as_layer(self) -> Layer:
        """The same function as a layer of tnsim."""
        ...

    def __call__(self, x: Any) -> Any:
        """The forward pass, with which the known layer is compared."""
        ...


@pytree
@dataclass(frozen=True, eq=False)
class Residual:
    """`skip * x + scale * layer(x)`; the layer must keep the width. Raises `ModelError`, `UnsupportedLayer`."""

    layer: Linear | Bilinear | Multilinear | Attention | Residual
    skip: Float[Array, ""] | float = 1.0
    scale: Float[Array, ""] | float = 1.0

    def __post_init__(self) -> None:
        set_arrays(self, layer=known_layer(self.layer, "the layer inside Residual"))
        if self.layer.d_in != self.layer.d_out:
            raise ModelError(
                f"Residual adds its input to its layer's output, but the layer maps {self.layer.d_in} to {self.layer.d_out}"
            )
        set_arrays(
            self,
            skip=scalar(self.skip, "Residual skip"),
            scale=scalar(self.scale, "Residual scale"),
        )

    @property
    def order(self) -> int:
        return self.layer.order

    @property
    def d_in(self) -> int:
        return self.layer.d_in

    @property
    def d_out(self) -> int:
        return self.layer.d_out

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        return self.skip * x + self.scale * self.layer(x)


def innermost(layer: Layer) -> Linear | Bilinear | Multilinear | Attention:
    """The layer inside any number of residuals."""
    inner: Any = layer  # a known kind: residuals and models hold no other
    while isinstance(inner, Residual):
        inner = inner.layer
    return inner


def affine_maps(core: Layer) -> tuple[tuple[str, ...], str]:
    """Names of the affine maps that a layer multiplies, and of the one that it ends with.

    Every layer inside residuals is `output(product of rows)`, where attention multiplies by heads. A map is called
    as its matrix; its bias is the attribute `bias_name`. A linear layer multiplies nothing.

    Example:
        >>> affine_maps(Bilinear(np.eye(2), np.eye(2), np.eye(2)))
        (('left', 'right'), 'down')
    """
    if isinstance(core, Linear):
        return (), "weight"
    if isinstance(core, Attention):
        return ("q1", "k1", "q2", "k2", "v"), "o"
    if isinstance(core, Multilinear):
        return tuple(f"leg{n}" for n in range(core.n_legs)), "down"
    return ("left", "right"), "down"


def bias_name(name: str) -> str:
    """Attribute that holds the bias of the affine map `name`."""
    return "bias" if name == "weight" else f"{name}_bias"


def residual_rule(layer: Layer) -> tuple[Any, Any]:
    """(skip, scale) of nested residuals: s2 x + c2 (s1 x + c1 f) = (s2 + c2 s1) x + c2 c1 f."""
    skip, scale = 0.0, 1.0
    while isinstance(layer, Residual):
        skip, scale = skip + scale * layer.skip, scale * layer.scale
        layer = layer.layer
    return skip, scale


KNOWN = Linear | Bilinear | Multilinear | Attention | Residual


def known_layer(layer: Any, what: str) -> Layer:
    """`layer` itself, or the known layer that one from outside says it is.

    Raises:
        UnsupportedLayer: It is neither.
        ModelError: The two forward passes differ, or their shapes do.
    """
    if isinstance(layer, KNOWN):
        return layer
    if not hasattr(layer, "as_layer"):
        known = "Linear, Bilinear, Multilinear, Attention, Residual"
        raise UnsupportedLayer(
            f"{what} is a {type(layer).__name__}; only polynomial layers have an exact similarity: {known}, "
            "or a layer with a method as_layer() that says which of these it is"
        )
    known = known_layer(layer.as_layer(), f"as_layer() of {what}")
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(known))
    if not traced:  # a traced layer has no numbers to compare
        _compare_forward(layer, known, what)
    return known


def _compare_forward(own: OwnLayer, known: Layer, what: str) -> None:
    """Raise `ModelError` unless both layers compute the same on a few random inputs."""
    x = np.random.default_rng(0).normal(size=(3, 2, known.d_in))
    expected, found = np.asarray(own(x)), np.asarray(known(x))
    if expected.shape != found.shape:
        raise ModelError(
            f"{what}: its forward pass gives shape {expected.shape}, as_layer() gives {found.shape}"
        )
    error = np.abs(expected - found).max() / max(np.abs(expected).max(), 1e-300)
    if not error < 1e-4:
        raise ModelError(
            f"{what}: as_layer() is another function than the layer: outputs on random inputs differ by "
            f"{error:.2g} of their size"
        )
