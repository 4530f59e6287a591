"""Layers as immutable, checked pytrees of weights.

A layer knows its shapes, its forward pass on an example (or on a batch along leading axes) and its
order in the input, and nothing of networks, metrics or plans. The formulas are those of the paper's
section 2.1. `Multilinear` extends them to products of any number of affine maps; `Residual` covers
the additive rule (skip 1) and the interpolating rule (skip 1 - s). Layers with an activation stand
in `activated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Activation
from tnsim.errors import ModelError, UnsupportedLayer
from tnsim.models.activated import Elementwise, Gated
from tnsim.models.arrays import Array, is_traced, pytree, requires_grad, scalar, set_arrays
from tnsim.models.attention import Attention
from tnsim.models.matrices import AffineMaps
from tnsim.models.protocol import Layer, OwnLayer
from tnsim.options import checked


class Multilinear(AffineMaps):
    """A product of any number of affine maps: `D (h_1 * ... * h_n) + b` with `h_j = W_j x + b_j`.

    Every polynomial of order n has this form, with enough hidden units. `Bilinear` is the case of
    two maps.

    Args:
        legs: Matrices W_1 to W_n, each (rank, d_in); an array may be given several times.
        down: Matrix D, (d_out, rank).
        leg_biases: Vectors b_1 to b_n, each (rank,) or None; None for no biases on legs.
        down_bias: Vector b, (d_out,) or None.

    Raises:
        ModelError: Shapes do not fit, an entry is not finite, or there is no leg.

    Example:
        >>> import numpy as np
        >>> cube = Multilinear([[[2.0]]] * 3, [[1.0]])
        >>> cube(np.array([1.0])), cube.order
        (array([8.]), 3)

    Source:
        Paper, section 2.1: equation 1 with n maps instead of two, a CP decomposition of the
        tensor of the layer.
    """

    n_legs: int
    down: Float[Array, "out rank"]
    down_bias: Float[Array, " out"] | None

    @checked
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
        given: dict[str, Any] = {"down": down, "down_bias": down_bias}
        for n, (leg, bias) in enumerate(zip(legs, biases, strict=True)):
            given |= {f"leg{n}": leg, f"leg{n}_bias": bias}
        set_arrays(self, n_legs=len(legs), **given)
        self.__post_init__()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Multilinear is immutable, cannot set {name!r}; build a new one")

    @property
    def maps(self) -> tuple[tuple[str, ...], str]:
        """Names of the legs and of the output map."""
        return tuple(f"leg{n}" for n in range(self.n_legs)), "down"

    @property
    def legs(self) -> tuple[Float[Array, "rank in"], ...]:
        """The matrices W_1 to W_n."""
        return tuple(getattr(self, f"leg{n}") for n in range(self.n_legs))

    @property
    def leg_biases(self) -> tuple[Float[Array, " rank"] | None, ...]:
        """The vectors b_1 to b_n, None where there is none."""
        return tuple(getattr(self, f"leg{n}_bias") for n in range(self.n_legs))

    @property
    def rank(self) -> int:
        """Hidden units, over which products are summed."""
        return self.down.shape[-1]

    def __repr__(self) -> str:
        return f"Multilinear({self.n_legs} legs, {self.d_in} -> {self.d_out}, rank {self.rank})"


def _flatten(layer: Multilinear) -> tuple[tuple[Any, ...], int]:
    return (*layer.legs, *layer.leg_biases, layer.down, layer.down_bias), layer.n_legs


def _unflatten(n_legs: int, children: Iterable[Any]) -> Multilinear:
    """Rebuild a layer without checks, since JAX fills layers with tracers and placeholders."""
    *legs, down, down_bias = children
    layer = object.__new__(Multilinear)
    set_arrays(layer, down=down, down_bias=down_bias, n_legs=n_legs)
    for n in range(n_legs):
        set_arrays(layer, **{f"leg{n}": legs[n], f"leg{n}_bias": legs[n_legs + n]})
    return layer


jax.tree_util.register_pytree_node(Multilinear, _flatten, _unflatten)


@pytree
@dataclass(frozen=True, eq=False)
class Linear(AffineMaps):
    """The affine map `W x + b`.

    Args:
        weight: Matrix W, (d_out, d_in).
        bias: Vector b, (d_out,) or None.

    Raises:
        ModelError: Shapes do not fit, or an entry is not finite.

    Example:
        >>> Linear([[2.0, 0.0]], [1.0])(np.array([3.0, 5.0]))
        array([7.])

    Source:
        Paper, section 2.1.
    """

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None = None
    maps = (), "weight"

    def hidden(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch in"]:
        """The input itself, which W multiplies."""
        return x


@pytree
@dataclass(frozen=True, eq=False)
class Bilinear(AffineMaps):
    """A product of two affine maps, entry by entry: `D ((L x + l) * (R x + r)) + b`.

    Args:
        left: Matrix L, (rank, d_in).
        right: Matrix R, (rank, d_in).
        down: Matrix D, (d_out, rank).
        left_bias: Vector l, (rank,) or None.
        right_bias: Vector r, (rank,) or None.
        down_bias: Vector b, (d_out,) or None.

    Raises:
        ModelError: Shapes do not fit, or an entry is not finite.

    Example:
        The product of two coordinates.

        >>> product = Bilinear([[1.0, 0.0]], [[0.0, 1.0]], [[1.0]])
        >>> product(np.array([3.0, 5.0]))
        array([15.])

    Source:
        Paper, equation 1, with the lift written out as biases.
    """

    left: Float[Array, "rank in"]
    right: Float[Array, "rank in"]
    down: Float[Array, "out rank"]
    left_bias: Float[Array, " rank"] | None = None
    right_bias: Float[Array, " rank"] | None = None
    down_bias: Float[Array, " out"] | None = None
    maps = ("left", "right"), "down"

    @property
    def rank(self) -> int:
        """Hidden units, over which products are summed."""
        return self.left.shape[-2]


@pytree
@dataclass(frozen=True, eq=False)
class Residual:
    """A layer with a skip connection: `skip * x + scale * layer(x)`.

    Args:
        layer: Any layer with as many outputs as inputs, also another `Residual` or an `OwnLayer`.
        skip: Weight of the input, a number.
        scale: Weight of the output of the layer, a number.

    Raises:
        ModelError: The layer changes the width, or a number is not finite.
        UnsupportedLayer: The layer is none that tnsim knows.

    Example:
        >>> Residual(Linear(2 * np.eye(2)), skip=0.5)(np.array([1.0, 2.0]))
        array([2.5, 5. ])

    Source:
        Paper, section 2.1.
    """

    layer: Layer
    skip: Float[Array, ""] | float = 1.0
    scale: Float[Array, ""] | float = 1.0

    def __post_init__(self) -> None:
        layer = known_layer(self.layer, "the layer inside Residual")
        if not isinstance(innermost(layer), Elementwise) and layer.d_in != layer.d_out:
            raise ModelError(
                "Residual adds its input to its layer's output, but the layer maps "
                f"{layer.d_in} to {layer.d_out}"
            )
        set_arrays(
            self,
            layer=layer,
            skip=scalar(self.skip, "Residual skip"),
            scale=scalar(self.scale, "Residual scale"),
        )

    @property
    def order(self) -> int:
        """Degree in the input, the degree of the layer inside."""
        return self.layer.order

    @property
    def d_in(self) -> int:
        """Coordinates of the input."""
        return self.layer.d_in

    @property
    def d_out(self) -> int:
        """Coordinates of the output."""
        return self.layer.d_out

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        return self.skip * x + self.scale * self.layer(x)


Core: TypeAlias = Linear | Bilinear | Multilinear | Attention | Elementwise | Gated
"""Kinds of layers that may stand inside residuals."""


def innermost(layer: Layer) -> Core:
    """The layer inside any number of residuals.

    Example:
        >>> innermost(Residual(Residual(Linear(np.eye(2))))).order
        1
    """
    inner: Any = layer  # checked by `known_layer` when it was built
    while isinstance(inner, Residual):
        inner = inner.layer
    return inner


def affine_maps(core: Layer) -> tuple[tuple[str, ...], str]:
    """Names of the affine maps that a layer multiplies, and of its output map.

    Every polynomial layer inside residuals is `output(product of rows)`, a product per head for
    attention; a gated layer applies its activation to the first row. The name of a map is the
    attribute of its matrix; `bias_name` gives the attribute of its bias. A linear layer multiplies
    no maps. No name stands twice, even where two factors are equal arrays.

    Args:
        core: A layer with weights that is no residual.

    Returns:
        A pair: names of the factors, name of the output map.

    Example:
        >>> affine_maps(Bilinear(np.eye(2), np.eye(2), np.eye(2)))
        (('left', 'right'), 'down')
    """
    layer: Any = core
    return layer.maps


def map_names(core: Layer) -> tuple[str, ...]:
    """Names of all affine maps of a layer that is no residual; an elementwise layer has none.

    Example:
        >>> map_names(Linear(np.eye(2))), map_names(Elementwise("relu", 2))
        (('weight',), ())
    """
    if isinstance(core, Elementwise):
        return ()
    rows, output = affine_maps(core)
    return *rows, output


def activation_of(layer: Layer) -> Activation | None:
    """The activation of a layer, inside any residuals; None for polynomial layers.

    Example:
        >>> activation_of(Elementwise("relu")).name, activation_of(Linear(np.eye(2)))
        ('relu', None)
    """
    return getattr(innermost(layer), "activation", None)


def of_width(layer: Layer, width: int) -> Layer:
    """The layer, or an elementwise layer without a width as a layer of this width.

    Example:
        >>> of_width(Residual(Elementwise("relu")), 3).d_out
        3
    """
    if isinstance(layer, Residual):
        inner = of_width(layer.layer, width)
        return layer if inner is layer.layer else Residual(inner, layer.skip, layer.scale)
    if isinstance(layer, Elementwise) and layer.width is None:
        return Elementwise(layer.activation, width)
    return layer


def has_width(layer: Layer) -> bool:
    """Whether the widths of a layer are known without its neighbours.

    Example:
        >>> has_width(Elementwise("relu"))
        False
    """
    core = innermost(layer)
    return not isinstance(core, Elementwise) or core.width is not None


def with_widths(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """The layers, where elementwise layers have the widths of their neighbours.

    Raises:
        ModelError: No layer has a width.

    Example:
        >>> with_widths([Linear(np.eye(2)), Elementwise("relu")])[1].d_out
        2
    """
    wide = list(layers)
    if all(map(has_width, wide)):
        return tuple(wide)
    known = next((layer for layer in wide if has_width(layer)), wide[0])
    width = known.d_in  # elementwise layers before it keep this width; raises where none is known
    for n, layer in enumerate(wide):
        wide[n] = of_width(layer, width)
        width = wide[n].d_out
    return tuple(wide)


def residual_rule(layer: Layer) -> tuple[Any, Any]:
    """The pair (skip, scale) of nested residuals: weights of the input and of the innermost layer.

    Two residuals give s2 x + c2 (s1 x + c1 f) = (s2 + c2 s1) x + c2 c1 f.

    Example:
        >>> residual_rule(Residual(Residual(Linear(np.eye(2)), scale=3.0), scale=2.0))
        (3.0, 6.0)
    """
    skip, scale = 0.0, 1.0
    while isinstance(layer, Residual):
        skip, scale = skip + scale * layer.skip, scale * layer.scale
        layer = layer.layer
    return skip, scale


def known_layer(layer: Any, what: str) -> Layer:
    """A layer of tnsim unchanged, or the layer of tnsim that an `OwnLayer` stands for.

    Args:
        layer: A layer of tnsim, or an `OwnLayer`.
        what: Words for the layer in messages.

    Raises:
        UnsupportedLayer: The layer is neither.
        ModelError: The two forward passes differ in their numbers or their shapes.

    Example:
        >>> known_layer(Linear(np.eye(2)), "layer 0").order
        1
    """
    if isinstance(layer, Gated) and layer.up is not None and layer.activation.name == "identity":
        biases = layer.gate_bias, layer.up_bias, layer.down_bias
        return Bilinear(layer.gate, layer.up, layer.down, *biases)
    if isinstance(layer, Core | Residual):
        return layer
    if not hasattr(layer, "as_layer"):
        raise UnsupportedLayer(
            f"{what} is a {type(layer).__name__}; layers with an exact similarity are Linear, "
            "Bilinear, Multilinear, Attention, Elementwise, Gated, Residual, "
            "or a layer with a method as_layer() that says which of these it is; a module as a "
            "whole is read by tnsim.from_module(module)"
        )
    known = known_layer(layer.as_layer(), f"as_layer() of {what}")
    if not (is_traced(known) or any(map(requires_grad, jax.tree.leaves(known)))):
        _compare_forward(layer, known, what)  # needs plain numbers
    return known


def _compare_forward(own: OwnLayer, known: Layer, what: str) -> None:
    """Raise `ModelError` unless both layers compute the same on a few random inputs."""
    x = np.random.default_rng(0).normal(size=(3, 2, known.d_in))
    expected, given = np.asarray(own(x)), np.asarray(known(x))
    if expected.shape != given.shape:
        raise ModelError(
            f"{what}: its forward pass gives shape {expected.shape}, as_layer() gives {given.shape}"
        )
    error = np.abs(expected - given).max() / max(np.abs(expected).max(), 1e-300)
    if not error < 1e-4:  # more than float32 rounds; `not <` refuses NaN as well
        raise ModelError(
            f"{what}: as_layer() is another function than the layer: outputs on random inputs "
            f"differ by {error:.2g} of their size"
        )
