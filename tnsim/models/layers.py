"""Layers as immutable pytrees of weights. In: arrays (NumPy, JAX, PyTorch). Out: checked layers.

A layer knows its shapes, its forward pass on one example (or a batch along leading axes), its order
in the input, and nothing of networks, metrics or plans. The formulas are those of the paper's
section 2.1; `Residual` covers the additive rule (skip 1) and the interpolating one (skip 1 - s).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from tnsim.errors import ModelError, UnsupportedLayer

T = TypeVar("T")
Array = jax.Array | np.ndarray


def register_pytree(cls: type, names: tuple[str, ...], static: tuple[str, ...] = ()) -> None:
    """Make `cls` a pytree with the attributes `names` as children and `static` as part of its structure.

    Unflattening bypasses the constructor: JAX rebuilds pytrees around tracers and placeholders, which
    the checks of a constructor must not see.
    """

    def fixed(obj: Any) -> tuple:
        return tuple(getattr(obj, n) for n in static)

    def flatten_with_keys(obj: Any) -> tuple[tuple, tuple]:
        return tuple((jax.tree_util.GetAttrKey(n), getattr(obj, n)) for n in names), fixed(obj)

    def flatten(obj: Any) -> tuple[tuple, tuple]:
        return tuple(getattr(obj, n) for n in names), fixed(obj)

    def unflatten(aux: tuple, children: Iterable[Any]) -> Any:
        obj = object.__new__(cls)
        for name, value in zip((*names, *static), (*children, *aux), strict=True):
            object.__setattr__(obj, name, value)
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def pytree(cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a pytree; fields are children unless their metadata says `static`."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [
        [f.name for f in fields if bool(f.metadata.get("static")) is static]
        for static in (False, True)
    ]
    register_pytree(cls, *map(tuple, names))
    return cls


def host_array(value: Any) -> np.ndarray:
    """NumPy, from an array or tensor of any library; floats narrower than 32 bits widen to float32."""
    if hasattr(value, "detach"):  # PyTorch, which has no NumPy bfloat16
        value = value.detach().cpu()
        value = (
            value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
        ).numpy()
    array = np.asarray(value)
    return array if array.dtype.kind in "iub" else array.astype(_wide(array.dtype), copy=False)


def as_array(value: Any, what: str, ndim: int) -> Any:
    """`value` as a read-only NumPy array or, where it is wide enough, a JAX array.

    Real, finite, with `ndim` axes. float32 and float64 are kept, narrower floats widen to float32,
    integers to float64 (traced ones as far as JAX has 64-bit types on). PyTorch tensors are copied
    to the host (bfloat16 included). Raises `ModelError` naming `what`.
    """
    if isinstance(value, jax.core.Tracer):
        array = value.astype(_wide(value.dtype))
    elif isinstance(value, jax.Array) and value.dtype == _wide(value.dtype):
        array = value
    else:
        array = host_array(value)
        array = array.astype(np.float64) if array.dtype.kind in "iub" else array.view()
        array.flags.writeable = False
    if array.dtype not in (np.float32, np.float64):
        raise ModelError(f"{what} must hold real numbers, found dtype {array.dtype}")
    if array.ndim != ndim:
        raise ModelError(f"{what} must have {ndim} axes, found shape {tuple(array.shape)}")
    if 0 in array.shape:
        raise ModelError(f"{what} is empty, shape {tuple(array.shape)}")
    if not isinstance(array, Tracer):
        finite = np.isfinite(np.asarray(array))
        if not finite.all():
            first = [int(i) for i in np.unravel_index(finite.argmin(), finite.shape)]
            raise ModelError(
                f"{what} has {finite.size - np.count_nonzero(finite)} NaN or infinite entries, "
                f"the first at {first}"
            )
    return array


def _wide(dtype: Any) -> Any:
    """The dtype to compute in: float32 for narrower floats, float64 for integers."""
    if dtype.kind in "iub":
        return jax.dtypes.canonicalize_dtype(np.float64)
    narrow = dtype.itemsize < 4 and jax.numpy.issubdtype(dtype, np.floating)
    return np.dtype(np.float32) if narrow else dtype


def _set(layer: Any, **arrays: Any) -> None:
    for name, value in arrays.items():
        object.__setattr__(layer, name, value)


def _matrix(value: Any, what: str, shape: tuple[int | None, int | None], why: str = "") -> Any:
    array = as_array(value, what, 2)
    for axis, size in enumerate(shape):
        if size is not None and array.shape[axis] != size:
            raise ModelError(
                f"{what} has shape {tuple(array.shape)}, axis {axis} must be {size}{why}"
            )
    return array


def _vector(value: Any, what: str, size: int) -> Any:
    if value is None:
        return None
    array = as_array(value, what, 1)
    if array.shape != (size,):
        raise ModelError(f"{what} has shape {tuple(array.shape)}, expected ({size},)")
    return array


class Layer(Protocol):
    """What every layer of a model answers: a polynomial map of one order, but for biases and skips.

    An immutable pytree whose leaves are its weights. Today the algebra knows `Linear`, `Bilinear`,
    `Attention` and `Residual`, and `Model` refuses others.
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
        weight = _matrix(self.weight, "Linear weight", (None, None))
        _set(self, weight=weight, bias=_vector(self.bias, "Linear bias", weight.shape[0]))

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
        return _add(x @ self.weight.T, self.bias)


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
        left = _matrix(self.left, "Bilinear left", (None, None))
        rank, d_in = left.shape
        right = _matrix(self.right, "Bilinear right", (rank, d_in), " as in left")
        down = _matrix(self.down, "Bilinear down", (None, rank), ", the rank of left and right")
        _set(
            self,
            left=left,
            right=right,
            down=down,
            left_bias=_vector(self.left_bias, "Bilinear left_bias", rank),
            right_bias=_vector(self.right_bias, "Bilinear right_bias", rank),
            down_bias=_vector(self.down_bias, "Bilinear down_bias", down.shape[0]),
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
        left = _add(x @ self.left.T, self.left_bias)
        right = _add(x @ self.right.T, self.right_bias)
        return _add((left * right) @ self.down.T, self.down_bias)


MASKS = ("causal", "none")


@pytree
@dataclass(frozen=True, eq=False)
class Attention:
    """Bilinear attention on a sequence (paper, section 2.1): per head h and position s

        z[s, h] = sum_t mask[s, t] (q1[s] . k1[t]) (q2[s] . k2[t]) / d_head^2  v[t],    output O z + o_bias,

    with q1[s] = R_s (Q1 x_s + q1_bias) and so on; v is not rotated. q1, k1, q2, k2: (n_heads * d_head, d_in), rows of
    one head together; v: (n_heads * d_value, d_in); o: (d_out, n_heads * d_value); biases: one per row.
    mask: "causal" (t <= s) or "none". R_s turns coordinates (i, i + d_head / 2) by the angle s * rope_base^(-2 i / d_head);
    rope_base None: no rotation. Order 5 in the sequence. Raises `ModelError` on shapes that do not fit.
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

    def __post_init__(self) -> None:
        q1 = _matrix(self.q1, "Attention q1", (None, None))
        rows, d_in = q1.shape
        if isinstance(self.n_heads, bool) or not isinstance(self.n_heads, int) or self.n_heads < 1:
            raise ModelError(f"n_heads must be a positive integer, found {self.n_heads!r}")
        others = {
            n: _matrix(getattr(self, n), f"Attention {n}", (rows, d_in), " as in q1")
            for n in ("k1", "q2", "k2")
        }
        v = _matrix(self.v, "Attention v", (None, d_in), ", the width that q1 reads")
        o = _matrix(self.o, "Attention o", (None, v.shape[0]), ", the rows of v")
        for name, size in (("q1", rows), ("v", v.shape[0])):
            if size % self.n_heads:
                raise ModelError(
                    f"Attention {name} has {size} rows, which {self.n_heads} heads do not divide"
                )
        if self.mask not in MASKS:
            raise ModelError(f"mask must be one of {', '.join(MASKS)}, found {self.mask!r}")
        if self.rope_base is not None:
            _scalar(self.rope_base, "Attention rope_base")
            if rows // self.n_heads % 2 or not self.rope_base > 0:
                raise ModelError(
                    "RoPE needs heads of even width and a base above 0, "
                    f"found {rows // self.n_heads} and {self.rope_base}"
                )
        sizes = {n: int(rows) for n in ("q1", "k1", "q2", "k2")}
        sizes |= {"v": v.shape[0], "o": o.shape[0]}
        biases = {
            f"{n}_bias": _vector(getattr(self, f"{n}_bias"), f"Attention {n}_bias", size)
            for n, size in sizes.items()
        }
        _set(self, q1=q1, **others, v=v, o=o, **biases)

    @property
    def order(self) -> int:
        return 5

    @property
    def d_in(self) -> int:
        return self.q1.shape[-1]

    @property
    def d_out(self) -> int:
        return self.o.shape[-2]

    @property
    def d_head(self) -> int:
        return self.q1.shape[-2] // self.n_heads

    @property
    def d_value(self) -> int:
        return self.v.shape[-2] // self.n_heads

    def rotations(self, n_ctx: int) -> Float[np.ndarray, "n_ctx d_head d_head"] | None:
        """R_s for every position, None without RoPE."""
        if self.rope_base is None:
            return None
        half = self.d_head // 2
        angles = np.arange(n_ctx)[:, None] * self.rope_base ** (-2 * np.arange(half) / self.d_head)
        found, i = np.zeros((n_ctx, self.d_head, self.d_head)), np.arange(half)
        found[:, i, i] = found[:, half + i, half + i] = np.cos(angles)
        found[:, half + i, i] = np.sin(angles)
        found[:, i, half + i] = -np.sin(angles)
        return found

    def pattern(self, n_ctx: int) -> Float[np.ndarray, "n_ctx n_ctx"]:
        """mask[s, t] as numbers."""
        return (
            np.tril(np.ones((n_ctx, n_ctx))) if self.mask == "causal" else np.ones((n_ctx, n_ctx))
        )

    def __call__(self, x: Float[Array, "*batch ctx in"]) -> Float[Array, "*batch ctx out"]:
        n = x.shape[-2]
        rotations = self.rotations(n)

        def heads(weight: Any, bias: Any, turned: bool) -> Any:
            y = _add(x @ weight.T, bias)
            y = y.reshape((*y.shape[:-1], self.n_heads, -1)).swapaxes(
                -3, -2
            )  # (*batch, head, position, row)
            return (
                (rotations.astype(x.dtype) @ y[..., None])[..., 0]
                if turned and rotations is not None
                else y
            )

        q1, k1, q2, k2 = (
            heads(getattr(self, name), getattr(self, f"{name}_bias"), True)
            for name in ("q1", "k1", "q2", "k2")
        )
        scores = (
            (q1 @ k1.swapaxes(-1, -2))
            * (q2 @ k2.swapaxes(-1, -2))
            * (self.pattern(n).astype(x.dtype) / self.d_head**2)
        )
        z = (scores @ heads(self.v, self.v_bias, False)).swapaxes(-3, -2)
        return _add(z.reshape((*z.shape[:-2], -1)) @ self.o.T, self.o_bias)


@pytree
@dataclass(frozen=True, eq=False)
class Residual:
    """`skip * x + scale * layer(x)`; the layer must keep the width. Raises `ModelError`, `UnsupportedLayer`."""

    layer: Linear | Bilinear | Attention | Residual
    skip: Float[Array, ""] | float = 1.0
    scale: Float[Array, ""] | float = 1.0

    def __post_init__(self) -> None:
        check_layer(self.layer, "the layer inside Residual")
        if self.layer.d_in != self.layer.d_out:
            raise ModelError(
                f"Residual adds its input to its layer's output, but the layer maps {self.layer.d_in} to {self.layer.d_out}"
            )
        _set(
            self,
            skip=_scalar(self.skip, "Residual skip"),
            scale=_scalar(self.scale, "Residual scale"),
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


def innermost(layer: Layer) -> Linear | Bilinear | Attention:
    """The layer inside any number of residuals."""
    inner: Any = layer  # a known kind: residuals and models hold no other
    while isinstance(inner, Residual):
        inner = inner.layer
    return inner


def check_layer(layer: Any, what: str) -> None:
    """Raise `UnsupportedLayer` unless `layer` is one that the algebra describes."""
    if not isinstance(layer, Linear | Bilinear | Attention | Residual):
        known = "Linear, Bilinear, Attention, Residual"
        raise UnsupportedLayer(
            f"{what} is a {type(layer).__name__}; only polynomial layers have an exact similarity: {known}"
        )


def rename_errors(where: str, build: Callable[[], T]) -> T:
    """Run a constructor and put `where` (a layer's place, a file) in front of what it refuses."""
    try:
        return build()
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None


def _scalar(value: Any, what: str) -> Any:
    """A Python float, or a JAX scalar left as it is (it may be traced)."""
    if isinstance(value, jax.Array):
        return as_array(value, what, 0)
    return float(as_array(value, what, 0))


def _add(x: Any, bias: Any) -> Any:
    return x if bias is None else x + bias
