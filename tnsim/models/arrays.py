"""Arrays of weights, and pytrees that hold them. In: arrays of NumPy, JAX or PyTorch. Out: checked arrays, registered classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from tnsim.errors import ModelError

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
    if isinstance(value, Tracer):
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


def set_arrays(obj: Any, /, **arrays: Any) -> None:
    for name, value in arrays.items():
        object.__setattr__(obj, name, value)


def matrix(value: Any, what: str, shape: tuple[int | None, int | None], why: str = "") -> Any:
    array = as_array(value, what, 2)
    for axis, size in enumerate(shape):
        if size is not None and array.shape[axis] != size:
            raise ModelError(
                f"{what} has shape {tuple(array.shape)}, axis {axis} must be {size}{why}"
            )
    return array


def vector(value: Any, what: str, size: int) -> Any:
    if value is None:
        return None
    array = as_array(value, what, 1)
    if array.shape != (size,):
        raise ModelError(f"{what} has shape {tuple(array.shape)}, expected ({size},)")
    return array


def rename_errors(where: str, build: Callable[[], T]) -> T:
    """Run a constructor and put `where` (a layer's place, a file) in front of what it refuses."""
    try:
        return build()
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None


def scalar(value: Any, what: str) -> Any:
    """A Python float, or a JAX scalar left as it is (it may be traced)."""
    if isinstance(value, jax.Array):
        return as_array(value, what, 0)
    return float(as_array(value, what, 0))


def add(x: Any, bias: Any) -> Any:
    return x if bias is None else x + bias
