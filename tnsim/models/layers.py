"""Layers as immutable, checked pytrees of weights.

A layer knows its shapes, its forward pass on an example (or on a batch along leading axes) and its
order in the input, and nothing of networks, metrics or plans. The formulas are those of the paper's
section 2.1. `Multilinear` extends them to products of any number of affine maps; `Residual` covers
the additive rule (skip 1) and the interpolating rule (skip 1 - s). Layers from outside follow the
protocol of `OwnLayer`.

*Layers with an activation* are no polynomials, and exact under `Gaussian` where one stands alone.
`Elementwise` applies a function to every coordinate, `Gated` multiplies it by a second affine map.
A hidden unit is a function of a linear map or two of the input, so the inner product of two such
layers is a sum over pairs of hidden units (see `problems.hidden_units`). Their order is infinite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Activation, activation, jump_relu
from tnsim.errors import ModelError, UnsupportedLayer
from tnsim.models.arrays import (
    AffineMaps,
    Array,
    as_array,
    bias_name,
    is_count,
    is_traced,
    matrix,
    pytree,
    requires_grad,
    scalar,
    set_arrays,
    vector,
    written_out,
)
from tnsim.options import checked
from tnsim.scaled import library

MASKS = ("causal", "none")


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


@checked(own="rope_base")
@pytree
@dataclass(frozen=True, eq=False)
class Attention(AffineMaps):
    """Bilinear attention on a sequence.

    Per head and position s, with positions t of keys,

        z[s]   = sum_t mask[s, t] (q1[s] . k1[t]) (q2[s] . k2[t]) / d_head^2  v[t]
        output = O z + o_bias,

    with q1[s] = R_s (Q1 x_s + q1_bias) and so on; v is not rotated. The order in the sequence is 5:
    two queries, two keys and a value. Without RoPE and with q2 = k2 = 0 the second score is the
    constant q2_bias . k2_bias of a head, which makes the layer linear attention.

    R_s turns coordinates (i, i + d_head / 2) by the angle s * rope_base^(-2 i / d_head).

    Args:
        q1, k1, q2, k2: Matrices (n_heads * d_head, d_in), the rows of a head together.
        v: Matrix (n_heads * d_value, d_in).
        o: Matrix (d_out, n_heads * d_value).
        n_heads: Number of heads.
        q1_bias, k1_bias, q2_bias, k2_bias, v_bias, o_bias: Vectors with an entry per row, or None.
        mask: Positions that a query sees: "causal" (t <= s) or "none" (all).
        rope_base: Base of the rotary embedding; None for no rotation.

    Raises:
        ModelError: Shapes do not fit, an entry is not finite, or a setting is not allowed.

    Example:
        A head of width 1 on ones: each of s + 1 keys gives 1.

        >>> one = np.ones((1, 1))
        >>> layer = Attention(one, one, one, one, one, one, n_heads=1, rope_base=None)
        >>> layer(np.ones((3, 1)))[:, 0]
        array([1., 2., 3.])

    Source:
        Paper, section 2.1.
    """

    q1: Float[Array, "rows in"]
    k1: Float[Array, "rows in"]
    q2: Float[Array, "rows in"]
    k2: Float[Array, "rows in"]
    v: Float[Array, "values in"]
    o: Float[Array, "out values"]
    n_heads: int = dataclasses.field(metadata={"static": True})
    q1_bias: Float[Array, " rows"] | None = None
    k1_bias: Float[Array, " rows"] | None = None
    q2_bias: Float[Array, " rows"] | None = None
    k2_bias: Float[Array, " rows"] | None = None
    v_bias: Float[Array, " values"] | None = None
    o_bias: Float[Array, " out"] | None = None
    mask: str = dataclasses.field(default="causal", metadata={"static": True})
    rope_base: float | None = dataclasses.field(default=10_000.0, metadata={"static": True})
    maps = ("q1", "k1", "q2", "k2", "v"), "o"

    def __post_init__(self) -> None:
        q1 = matrix(self.q1, "Attention q1", (None, None))
        rows, d_in = q1.shape
        if not is_count(self.n_heads):
            raise ModelError(f"n_heads must be a positive integer, found {self.n_heads!r}")
        arrays = {"q1": q1}
        for name in ("k1", "q2", "k2"):
            array = getattr(self, name)
            arrays[name] = matrix(array, f"Attention {name}", (rows, d_in), " as in q1")
        v = matrix(self.v, "Attention v", (None, d_in), ", the width that q1 reads")
        arrays["v"] = v
        arrays["o"] = matrix(self.o, "Attention o", (None, v.shape[0]), ", the rows of v")
        # Rows of keys and second queries are as many as those of q1, so two checks do for all.
        for name in ("q1", "v"):
            size = arrays[name].shape[0]
            if size % self.n_heads:
                raise ModelError(
                    f"Attention {name} has {size} rows, which {self.n_heads} heads do not divide"
                )
        _check_settings(self.mask, self.rope_base, rows // self.n_heads)
        for name, array in list(arrays.items()):
            bias = bias_name(name)
            arrays[bias] = vector(getattr(self, bias), f"Attention {bias}", array.shape[0])
        set_arrays(self, **arrays)

    @property
    def d_head(self) -> int:
        """Coordinates of a query or a key."""
        return self.q1.shape[-2] // self.n_heads

    @property
    def d_value(self) -> int:
        """Coordinates of a head's value."""
        return self.v.shape[-2] // self.n_heads

    @property
    def frequencies(self) -> Float[np.ndarray, " half"] | None:
        """Angles by which R_1 turns each pair of coordinates; None without RoPE."""
        if self.rope_base is None:
            return None
        return self.rope_base ** (-2 * np.arange(self.d_head // 2) / self.d_head)

    def angles(self, n_ctx: int) -> Float[np.ndarray, "n_ctx half"] | None:
        """Angles by which R_s turns each pair of coordinates, per position; None without RoPE."""
        frequencies = self.frequencies
        return None if frequencies is None else np.arange(n_ctx)[:, None] * frequencies

    def rotations(self, n_ctx: int) -> Float[np.ndarray, "n_ctx d_head d_head"] | None:
        """Matrices R_s of every position, float64; None without RoPE."""
        angles = self.angles(n_ctx)
        return None if angles is None else turns(angles)

    def pattern(self, n_ctx: int) -> Float[np.ndarray, "n_ctx n_ctx"]:
        """The mask as numbers: entry [s, t] is 1 where s sees t, 0 elsewhere."""
        everywhere = np.ones((n_ctx, n_ctx))
        return np.tril(everywhere) if self.mask == "causal" else everywhere

    def hidden(self, x: Float[Array, "*batch ctx in"]) -> Float[Array, "*batch ctx values"]:
        """The values z of all heads, side by side, which O multiplies."""
        n_ctx = x.shape[-2]
        angles = self.angles(n_ctx)

        def by_head(name: str) -> Any:
            """Rows of a map with the axes (*batch, head, position, row)."""
            rows = self._at(name, x)
            # Heads come in front of positions, so that a product of matrices runs over positions.
            return rows.reshape((*rows.shape[:-1], self.n_heads, -1)).swapaxes(-3, -2)

        def turned(name: str) -> Any:
            rows = by_head(name)
            return rows if angles is None else rotated(rows, angles)

        def score(query: str, key: str) -> Any:
            """Scores with the axes (*batch, head, position of query, position of key)."""
            return turned(query) @ turned(key).swapaxes(-1, -2)

        # Both the mask and the scale are factors of the scores, without a softmax in between.
        share = self.pattern(n_ctx).astype(x.dtype) / self.d_head**2
        z = (score("q1", "k1") * score("q2", "k2") * share) @ by_head("v")
        z = z.swapaxes(-3, -2)  # (*batch, position, head, row)
        return z.reshape((*z.shape[:-2], -1))


def rotated(
    rows: Float[Array, "*batch d_head"], angles: Float[np.ndarray, "*batch half"]
) -> Float[Array, "*batch d_head"]:
    """Queries or keys with each pair of coordinates (i, i + d_head / 2) turned by angle i.

    Example:
        >>> rotated(np.array([1.0, 0.0]), np.array([np.pi / 2])).round(9).tolist()
        [0.0, 1.0]
    """
    half = angles.shape[-1]
    cos, sin = np.cos(angles).astype(rows.dtype), np.sin(angles).astype(rows.dtype)
    # Coordinates i and i + d_head / 2 stand at the same place of the two halves, the layout that
    # rules of files call `half`.
    first, second = rows[..., :half], rows[..., half:]
    turned = first * cos - second * sin, second * cos + first * sin
    return library(rows).concatenate(turned, axis=-1)


def turns(angles: Float[np.ndarray, "*batch half"]) -> Float[np.ndarray, "*batch d_head d_head"]:
    """The matrices by which `rotated` turns queries or keys.

    Example:
        >>> turns(np.array([np.pi / 2])).round(9).tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    units = np.eye(2 * angles.shape[-1])
    # Column i of a matrix is the image of unit vector i.
    return np.asarray(rotated(units, angles[..., None, :])).swapaxes(-1, -2)


def _check_settings(mask: str, rope_base: float | None, d_head: int) -> None:
    """Raise `ModelError` for an unknown mask, or for heads that cannot be rotated."""
    if mask not in MASKS:
        raise ModelError(f"mask must be one of {', '.join(MASKS)}, found {mask!r}")
    if rope_base is None:
        return
    # A base that is no finite number is refused in the words for arrays.
    as_array(rope_base, "Attention rope_base", 0)
    if d_head % 2 or not rope_base > 0:
        raise ModelError(
            f"RoPE needs heads of even width and a base above 0, found {d_head} and {rope_base}"
        )


@checked
@pytree
@dataclass(frozen=True, eq=False)
class Elementwise:
    """A function of every coordinate alone, between linear layers: `f(x)`.

    Args:
        activation: Name of an activation, such as "relu" or "gelu", or an `Activation`.
        width: Number of coordinates; None to take the number of the neighbours in a `Model`.

    Raises:
        ModelError: The activation is unknown, or the width is no positive integer.

    Example:
        >>> import numpy as np, tnsim
        >>> rectified = tnsim.Model([tnsim.Linear([[1.0], [-1.0]]), tnsim.Elementwise("relu")])
        >>> rectified(np.array([3.0]))
        array([3., 0.])

    Source:
        Cho and Saul 2009, "Kernel methods for deep learning", for the rectifier.
    """

    activation: Activation = dataclasses.field(metadata={"static": True})
    width: int | None = dataclasses.field(default=None, metadata={"static": True})

    if TYPE_CHECKING:  # a name becomes an activation, so that it is asked for and never held

        def __init__(self, activation: Activation | str, width: int | None = None) -> None: ...

    def __post_init__(self) -> None:
        if self.width is not None and not is_count(self.width):
            raise ModelError(f"Elementwise width must be a positive integer, found {self.width!r}")
        set_arrays(self, activation=activation(self.activation))

    @property
    def order(self) -> Any:
        """Infinity, as an activation is no polynomial."""
        return math.inf

    @property
    def d_in(self) -> int:
        """Coordinates of the input.

        Raises:
            ModelError: The layer stands alone and was given no width.
        """
        if self.width is None:
            raise ModelError(
                f"Elementwise({self.activation.name!r}) has no width: stand it beside a layer with "
                "weights in a Model, or give Elementwise(..., width=...)"
            )
        return self.width

    @property
    def d_out(self) -> int:
        """Coordinates of the output, as many as of the input."""
        return self.d_in

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        return self.activation(x)


@pytree
@dataclass(frozen=True, eq=False)
class Gated(AffineMaps):
    """An affine map times an activation of another: `D (f(G x + g) * (U x + u)) + b`.

    SwiGLU is the case "silu", GeGLU "gelu", ReGLU "relu". The case "identity" is a `Bilinear`
    layer, which a `Model` makes of it. Without `up` the gate stands alone, `D f(G x + g) + b`: an
    ordinary block of a single hidden layer, which a `Residual` can go around.

    Args:
        gate: Matrix G, (rank, d_in).
        up: Matrix U, (rank, d_in), or None.
        down: Matrix D, (d_out, rank).
        activation: Name of an activation, such as "silu", or an `Activation`.
        gate_bias: Vector g, (rank,) or None.
        up_bias: Vector u, (rank,) or None.
        down_bias: Vector b, (d_out,) or None.

    Raises:
        ModelError: Shapes do not fit, an entry is not finite, or the activation is unknown.

    Example:
        >>> import numpy as np
        >>> layer = Gated([[1.0, 0.0]], [[0.0, 1.0]], [[1.0]], "relu")
        >>> layer(np.array([3.0, 5.0])), layer(np.array([-3.0, 5.0]))
        (array([15.]), array([0.]))

    Source:
        Shazeer 2020, "GLU variants improve transformer".
    """

    gate: Float[Array, "rank in"]
    up: Float[Array, "rank in"] | None
    down: Float[Array, "out rank"]
    activation: Activation = dataclasses.field(metadata={"static": True})
    gate_bias: Float[Array, " rank"] | None = None
    up_bias: Float[Array, " rank"] | None = None
    down_bias: Float[Array, " out"] | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            gate: Any,
            up: Any,
            down: Any,
            activation: Activation | str,
            gate_bias: Any = None,
            up_bias: Any = None,
            down_bias: Any = None,
        ) -> None: ...

    @classmethod
    def jump_relu(
        cls, gate: Any, down: Any, thresholds: Any, gate_bias: Any = None, down_bias: Any = None
    ) -> Gated:
        """A layer of JumpReLU units with thresholds of their own, as sparse autoencoders have them.

        A unit is u for u > threshold and 0 up to there, which is the threshold times the unit of
        threshold 1 at u / threshold. Thresholds therefore go into the weights on either side.

        Args:
            gate: Matrix of the encoder, (rank, d_in).
            down: Matrix of the decoder, (d_out, rank).
            thresholds: Positive thresholds of the units, (rank,).
            gate_bias: Vector (rank,) or None.
            down_bias: Vector (d_out,) or None.

        Returns:
            A layer without a second factor, `up` None, exact under `Gaussian`.

        Raises:
            ModelError: Shapes do not fit, or a threshold is not positive; thresholds of zero are
                the activation "relu".

        Example:
            >>> import numpy as np
            >>> layer = Gated.jump_relu([[1.0], [1.0]], [[1.0, 1.0]], [0.5, 2.0])
            >>> layer(np.array([[1.0], [3.0]])).ravel().tolist()
            [1.0, 6.0]
        """
        gate = written_out(matrix(gate, "Gated gate", (None, None)))
        down = written_out(matrix(down, "Gated down", (None, len(gate)), ", the rank of gate"))
        sizes = vector(thresholds, "Gated thresholds", len(gate))
        if sizes is None or not (is_traced(sizes) or bool((sizes > 0).all())):
            raise ModelError(
                "thresholds of JumpReLU are positive numbers, one for every unit, found "
                f"{thresholds!r}; a threshold of 0 is the activation 'relu'"
            )
        bias = vector(gate_bias, "Gated gate_bias", len(gate))
        # Thresholds divide the reading side and multiply the writing side, which leaves the
        # function alone.
        bias = None if bias is None else bias / sizes
        scaled = gate / sizes[:, None], None, down * sizes
        return cls(*scaled, jump_relu(1.0), bias, None, down_bias)

    def __post_init__(self) -> None:
        if self.up is None and self.up_bias is not None:
            # The bias would be a second factor without a matrix: a constant per unit.
            raise ModelError("Gated has an up_bias but no up: move the numbers into down")
        set_arrays(self, activation=activation(self.activation))
        super().__post_init__()

    @property
    def order(self) -> Any:
        """Infinity, as an activation is no polynomial."""
        return math.inf

    @property
    def maps(self) -> tuple[tuple[str, ...], str]:
        """Names of the factors and of the output map."""
        return ("gate",) if self.up is None else ("gate", "up"), "down"

    @property
    def multiplies(self) -> bool:
        """Whether a second affine map multiplies the activation."""
        return self.up is not None

    @property
    def rank(self) -> int:
        """Hidden units, over which products are summed."""
        return self.gate.shape[-2]

    def hidden(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch rank"]:
        """Values of the hidden units, which D multiplies."""
        units = self.activation(self._at("gate", x))
        return units if self.up is None else units * self._at("up", x)


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

    A `Gated` layer with the identity as its activation is returned as the `Bilinear` layer it is.

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
