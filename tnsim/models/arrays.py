"""Arrays of weights from any library, pytrees of them, and matrices of affine maps.

Layers keep PyTorch tensors that require grad as they are, as they keep arrays that JAX traces:
`tnsim.torch` computes with such tensors, and functions without a gradient to give refuse them.
Other arrays are checked and become JAX arrays or read-only NumPy arrays. Nothing here imports
PyTorch.

*Matrices* are dense arrays, or rows that hold few entries. A convolution reads a patch of an image
for each of its outputs. As a dense matrix it is zeros almost everywhere: 32 channels of 3 x 3
pixels after 32 channels of 26 x 26 are 3.2 GiB, of which 42 MiB are weights. A `SparseMatrix` holds
these weights with the columns that they stand in.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Float, Int

from tnsim.errors import ModelError, TooLarge, in_one_line
from tnsim.scaled import largest_of, library

T = TypeVar("T")
Array: TypeAlias = jax.Array | np.ndarray
_REAL, _COMPLEX = (np.float32, np.float64), (np.complex64, np.complex128)
# Attributes by which NumPy recognises an array; data sets and loaders have none of them.
_ARRAYS = ("__array__", "__array_interface__", "__dlpack__", "__buffer__")


_MANY = 2**16
"""Arrays of more numbers than this are checked without a mask, which takes an eighth of them."""
MOST_DENSE = 2**27
"""Most entries of a sparse matrix that is written out, 1 GiB in float64."""


def requires_grad(value: Any) -> bool:
    """Whether a value is a PyTorch tensor with respect to which a gradient may be asked for.

    Example:
        >>> requires_grad(np.ones(2))
        False
    """
    wanted = getattr(value, "requires_grad", None)
    if wanted is not False:
        return wanted is True
    # A dual number of PyTorch's forward mode has its derivative beside it, and requires no grad.
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.autograd.forward_ad.unpack_dual(value).tangent is not None


def detached(value: Any) -> Any:
    """The numbers of a tensor that requires grad; any other value unchanged.

    Example:
        >>> detached(1.0)
        1.0
    """
    return value.detach() if requires_grad(value) else value


def like(constant: np.ndarray, array: Any) -> Any:
    """A constant in the library of a given array, which may be a PyTorch tensor.

    Example:
        >>> like(np.ones(2), np.zeros(3))
        array([1., 1.])
    """
    return array.new_tensor(constant) if hasattr(array, "new_tensor") else constant


def register_pytree(cls: type, names: tuple[str, ...], static: tuple[str, ...] = ()) -> None:
    """Make a class a pytree.

    Unflattening bypasses the constructor: JAX rebuilds pytrees around tracers and placeholders,
    which the checks of a constructor must not see.

    Args:
        cls: The class.
        names: Attributes that are children.
        static: Attributes that are part of the structure; hashable.

    Example:
        >>> class Point:
        ...     def __init__(self, x):
        ...         self.x = x
        >>> register_pytree(Point, ("x",))
        >>> jax.tree.map(lambda x: 2 * x, Point(3)).x
        6
    """

    def fixed(instance: Any) -> tuple:
        return tuple(getattr(instance, name) for name in static)

    def flatten(instance: Any) -> tuple[tuple, tuple]:
        children = tuple(getattr(instance, name) for name in names)
        return children, fixed(instance)

    def flatten_with_keys(instance: Any) -> tuple[tuple, tuple]:
        children, aux = flatten(instance)
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, children, strict=True)), aux

    def unflatten(aux: tuple, children: Iterable[Any]) -> Any:
        instance = object.__new__(cls)
        for name, value in zip((*names, *static), (*children, *aux), strict=True):
            object.__setattr__(instance, name, value)
        return instance

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def pytree(cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a pytree that is shown in a line, as a class decorator.

    Fields are children unless their metadata says `static`. Arrays are shown by dtype and shape,
    and fields that nobody gave are not shown.

    Example:
        >>> @pytree
        ... @dataclasses.dataclass(frozen=True)
        ... class Point:
        ...     x: float
        ...     unit: str = dataclasses.field(metadata={"static": True})
        >>> jax.tree.leaves(Point(3.0, "m"))
        [3.0]
        >>> Point(np.zeros((2, 3)), "m")
        Point(x=float64[2, 3], unit='m')
    """
    children, static = [], []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = static if field.metadata.get("static") else children
        kind.append(field.name)
    register_pytree(cls, tuple(children), tuple(static))
    cls.__repr__ = _shown_dataclass
    return cls


def _shown_dataclass(self: Any) -> str:
    """A dataclass with its fields, arrays by dtype and shape."""
    shown = []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        is_default = not hasattr(value, "shape") and value == field.default
        if not is_default:
            shown.append(f"{field.name}={_shown_value(value)}")
    return f"{type(self).__name__}({', '.join(shown)})"


def _shown_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown_value, value))}{',' * (len(value) == 1)})"
    if not hasattr(value, "shape"):
        return repr(value)
    dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, value.shape))}]"


def is_traced(tree: Any) -> bool:
    """Whether JAX traces any leaf of a pytree.

    Example:
        >>> is_traced({"weight": np.ones(2)})
        False
    """
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def weights_dtype(*trees: Any) -> str:
    """The dtype that the arrays of pytrees share by the promotion rules of JAX, without numbers.

    Example:
        >>> weights_dtype({"weight": np.eye(2, dtype="float32")}, 1.0)
        'float32'
    """
    given = (x.dtype for x in jax.tree.leaves(trees) if hasattr(x, "dtype") and x.ndim)
    return str(jnp.result_type(*map(jax.dtypes.canonicalize_dtype, given)))


def host_array(value: Any) -> np.ndarray:
    """Convert an array or tensor of any library to NumPy.

    Returns:
        An array of the same shape; floats have the byte order of the machine, and those narrower
            than 32 bits widen to float32.

    Raises:
        ModelError: The tensor requires grad, and its gradient would be lost; or the value is no
            array, such as a dataset of pairs or nested lists of unequal lengths; or its numbers
            are gone, or never were.

    Example:
        >>> host_array(np.ones(2, np.float16)).dtype
        dtype('float32')
    """
    if requires_grad(value):
        raise ModelError(
            "a tensor that requires grad was given where only its numbers are used, and its "
            "gradient would be lost: give tensor.detach(), or use tnsim.torch.similarity, which "
            "has gradients with respect to weights"
        )
    if hasattr(value, "detach"):
        value = _of_torch(value)
    _check_array(value)
    check_kept(value)
    if np.ma.is_masked(value):
        raise ModelError(
            "a masked array was given, and what is under its mask would count: give the rows "
            "without a mask, or array.filled(0)"
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:  # nested lists of unequal lengths, among others
        if isinstance(value, Tracer):
            raise ModelError(
                "a value that JAX traces has no numbers, and only its numbers are used here: "
                "models (tnsim.Model) pass through jax.grad, jit and vmap, functions and files "
                "do not; build layers of the arrays, or compare outside of the trace"
            ) from None
        raise ModelError(
            f"an array was expected, and no array can be made: {in_one_line(error)}"
        ) from None
    if array.dtype.kind in "iub":
        return array
    return array.astype(_wide_dtype(array.dtype), copy=False)


def _check_array(value: Any) -> None:
    """Refuse data sets and loaders, which NumPy would take apart item by item like lists.

    An item of a data set is a pair of an input and a label. The pair would become two positions of
    a single input.
    """
    if isinstance(value, (list, tuple, range, str, bytes, bytearray, memoryview)):
        return
    items = any(hasattr(value, name) for name in ("__getitem__", "__iter__", "__len__"))
    if items and not any(hasattr(value, name) for name in _ARRAYS) and not _is_buffer(value):
        raise ModelError(
            f"an array was expected, found {type(value).__name__}, the items of which may be pairs "
            "of inputs and labels: give the inputs alone, such as dataset.tensors[0]"
        )


def check_kept(value: Any) -> None:
    """Refuse an array of JAX whose memory was given away, as by `donate_argnums` of `jax.jit`."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
        raise ModelError(
            f"an array of JAX of shape {value.shape} was deleted, as jax.jit does with the "
            "arguments named in donate_argnums: give a copy to the function that takes it over"
        )


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def numbers(tree: T) -> T:
    """Replace every tensor that requires grad in a pytree by its numbers.

    Example:
        >>> numbers((1.0, None))
        (1.0, None)
    """
    return jax.tree.map(lambda x: _on_host(x.detach()) if requires_grad(x) else x, tree)


def _on_host(value: Any) -> np.ndarray | float:
    """A read-only array of NumPy, or a float for a single number."""
    array = host_array(value)
    return _read_only(array) if array.ndim else float(array)


def with_numpy(tree: T) -> T:
    """A pytree with arrays of NumPy in the place of arrays of other libraries, number by number.

    Every verb computes in NumPy up to the precision of the computation, whatever library the
    weights come from: JAX alone would round to float32 what it multiplies outside of the scope
    `engine.runtime.execution.precision`. Nothing is rounded here, so both kinds of arrays are the
    same model.

    Args:
        tree: Pytree of weights, such as a layer.

    Returns:
        The tree itself where it has arrays of NumPy alone, of at least 32 bits, or where JAX traces
        a leaf, as the trace is one of JAX. Else a tree with read-only arrays: JAX's on a processor
        are shared, narrower floats become float32, and single numbers become floats. Tensors that
        require grad are kept.

    Example:
        >>> with_numpy((jnp.ones(2, jnp.float32), jnp.float32(0.5)))
        (array([1., 1.], dtype=float32), 0.5)
    """

    def is_kept(leaf: Any) -> bool:
        if isinstance(leaf, np.ndarray):
            return leaf.dtype == _wide_dtype(leaf.dtype) or leaf.dtype.kind in "iub"
        return not hasattr(leaf, "dtype") or requires_grad(leaf)

    if is_traced(tree) or all(map(is_kept, jax.tree.leaves(tree))):
        return tree
    return jax.tree.map(lambda leaf: leaf if is_kept(leaf) else _on_host(leaf), tree)


def in_float64(weights: T) -> T:
    """Weights with arrays of NumPy in float64; what JAX traces, and what is beside it, stays JAX's.

    Arrays made of weights are rounded once, to the dtype of the computation. Without this, sums and
    multiples of float32 weights would be rounded to float32, whatever that dtype is. So whoever
    multiplies or adds weights calls this before.

    Args:
        weights: Pytree of weights, such as a layer or the mean of a metric.

    Example:
        >>> in_float64([np.ones(1, np.float32)])[0].dtype
        dtype('float64')
    """

    def wide(leaf: Any) -> Any:
        return np.asarray(leaf, np.float64) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(wide, with_numpy(weights))


def _of_torch(tensor: Any) -> np.ndarray:
    """Convert a PyTorch tensor to NumPy; narrow floats widen first, as NumPy has no bfloat16."""
    try:
        # Views that conjugate or negate as they are read are unknown to NumPy.
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            tensor = tensor.float()
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            "a tensor of PyTorch has no plain numbers, as inside torch.func, on the device meta or "
            f"in a sparse layout: {in_one_line(error)}"
        ) from None


def as_array(value: Any, what: str, ndim: int, *, real: bool = True) -> Any:
    """Check a value and return it as a read-only NumPy array or a wide enough JAX array.

    Args:
        value: An array or tensor of any library, or nested lists. Arrays that may still be written
            to are copied; PyTorch tensors are copied to the host, bfloat16 included.
        what: Words for the value in messages.
        ndim: Required number of axes.
        real: Whether complex numbers are refused.

    Returns:
        An array of float32, float64 or complex numbers as given; narrower floats widen to float32,
        integers to float64 (traced integers only where JAX has 64-bit types on).

    Raises:
        ModelError: The array is empty, not real, not finite, or has another number of axes.

    Example:
        >>> as_array([1, 2], "the mean", 1)
        array([1., 2.])
    """
    if isinstance(value, Tracer):
        array = value.astype(_wide_dtype(value.dtype))
    elif isinstance(value, jax.Array) and value.dtype == _wide_dtype(value.dtype):
        check_kept(value)
        array = value
    else:
        array = _read_only(host_array(value))
    allowed = _REAL if real else _REAL + _COMPLEX
    if array.dtype not in allowed:
        numbers = "real numbers" if real else "numbers"
        raise ModelError(f"{what} must hold {numbers}, found dtype {array.dtype}")
    if array.ndim != ndim:
        raise ModelError(f"{what} must have {ndim} axes, found shape {tuple(array.shape)}")
    if 0 in array.shape:
        raise ModelError(f"{what} is empty, shape {tuple(array.shape)}")
    if not isinstance(array, Tracer):
        _check_finite(array, what)
    return array


def _read_only(array: np.ndarray) -> np.ndarray:
    """Make an array read-only, after a copy where the array may still be written to elsewhere.

    Integers become float64.
    """
    # Changing the dtype makes a copy.
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)
    elif not is_fixed(array):
        # A caller could still write into a shared array, so such an array is copied.
        array = array.copy(order="K")
    array.flags.writeable = False
    return array


def is_fixed(value: Any) -> bool:
    """Whether a weight can never change: no tracer, and no array that can be written to.

    A read-only view of an array is not fixed while the array itself may change.

    Example:
        >>> array = np.ones(2)
        >>> view = array.view()
        >>> view.flags.writeable = False
        >>> is_fixed(view)
        False
        >>> array.flags.writeable = False
        >>> is_fixed(view)
        True
    """
    # A view is fixed only if all arrays that it looks into are.
    while isinstance(value, np.ndarray | memoryview):
        read_only = value.readonly if isinstance(value, memoryview) else not value.flags.writeable
        owner = value.obj if isinstance(value, memoryview) else value.base
        if not read_only or owner is None:
            return read_only
        value = owner
    return isinstance(value, jax.Array | bytes | float) and not isinstance(value, Tracer)


def _check_finite(array: Any, what: str) -> None:
    numbers = np.asarray(array)
    # Of many numbers without a second array, as they may be all that memory holds.
    if numbers.size > _MANY and numbers.dtype.kind == "f" and np.isfinite(largest_of(numbers)):
        return
    # The first place and the number of such entries help to find the layer that diverged.
    finite = np.isfinite(numbers)
    if finite.all():
        return
    if not finite.ndim:
        raise ModelError(f"{what} is {float(array)}, no finite number")
    first = [int(i) for i in np.unravel_index(finite.argmin(), finite.shape)]
    count = finite.size - np.count_nonzero(finite)
    raise ModelError(f"{what} has {count} NaN or infinite entries, the first at {first}")


def _wide_dtype(dtype: Any) -> Any:
    """The dtype to compute in: at least float32 for floats, float64 for integers.

    It has the byte order of the machine, whichever the given one has.
    """
    if not isinstance(dtype, np.dtype):  # that of the keys of JAX, which are no numbers
        return dtype
    if dtype.kind in "iub":
        return jax.dtypes.canonicalize_dtype(np.float64)
    # Half precision loses digits in sums, so such weights are computed in float32.
    narrow = dtype.itemsize < 4 and jnp.issubdtype(dtype, np.floating)
    return np.dtype(np.float32) if narrow else np.dtype(dtype).newbyteorder("=")


def set_arrays(layer: Any, /, **values: Any) -> None:
    """Set attributes of a frozen layer or model during its construction."""
    for name, value in values.items():
        object.__setattr__(layer, name, value)


def weight(value: Any, what: str, ndim: int) -> Any:
    """Check a value as `as_array` does, but leave a PyTorch tensor that requires grad a tensor.

    Example:
        >>> weight([1, 2], "the bias", 1)
        array([1., 2.])
    """
    if not requires_grad(value):
        return as_array(value, what, ndim)
    # Checks read values alone; the tensor itself keeps its gradient.
    as_array(value.detach(), what, ndim)
    return value if value.dtype.itemsize >= 4 else value.float()


def vector(value: Any, what: str, size: int) -> Any:
    """Check a vector of a given size and return it; None stays None.

    Raises:
        ModelError: The vector has another size, or `as_array` refuses it.

    Example:
        >>> vector([1, 2], "the bias", 2)
        array([1., 2.])
    """
    if value is None:
        return None
    array = weight(value, what, 1)
    if array.shape != (size,):
        raise ModelError(f"{what} has shape {tuple(array.shape)}, expected ({size},)")
    return array


def rename_errors(where: str, build: Callable[[], T]) -> T:
    """Run a constructor and put `where` (a layer's place, a file) in front of its error messages.

    Example:
        >>> rename_errors("layer 3", lambda: vector([1], "the bias", 2))
        Traceback (most recent call last):
        tnsim.errors.ModelError: layer 3: the bias has shape (1,), expected (2,)
    """
    try:
        return build()
    except ModelError as error:
        # A chained traceback would show the same words twice.
        raise ModelError(f"{where}: {error}") from None


def is_count(value: Any) -> bool:
    """Whether a value is a positive integer, which True is for Python alone.

    Example:
        >>> is_count(2), is_count(0), is_count(True)
        (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def scalar(value: Any, what: str) -> Any:
    """Check a scalar and return a Python float; scalars of JAX or with a gradient stay arrays.

    Raises:
        ModelError: `as_array` refuses the value.

    Example:
        >>> scalar(np.float32(0.5), "the skip")
        0.5
    """
    # A float would lose the gradient.
    if isinstance(value, jax.Array) or requires_grad(value):
        return weight(value, what, 0)
    return float(as_array(value, what, 0))


def add(x: Any, bias: Any) -> Any:
    """The sum `x + bias`, or `x` itself without a bias.

    Example:
        >>> add(1.0, None)
        1.0
    """
    return x if bias is None else x + bias


def digest_of(tree: Any) -> bytes:
    """A digest of the structure and the numbers of a pytree of arrays, to be found by in memory.

    Example:
        >>> digest_of([np.ones(2)]) == digest_of([np.ones(2)]) != digest_of([np.ones((2, 1))])
        True
    """
    leaves, form = jax.tree.flatten(tree)
    digest = hashlib.blake2b(str(form).encode(), digest_size=16)
    for leaf in leaves:
        array = np.ascontiguousarray(leaf)
        digest.update(repr((array.shape, array.dtype.str)).encode())
        digest.update(array.tobytes())
    return digest.digest()


class Columns:
    """The columns in which the entries of a sparse matrix stand. Hashable, by content.

    Args:
        array: Columns (rows, entries) in rising order along a row; -1 behind the last entry of a
            row with fewer entries than others.
        width: Number of columns of the matrix.

    Raises:
        ModelError: The columns are no whole numbers in rows, or there is no column.

    Example:
        >>> Columns([[0, 2], [1, -1]], 3) == Columns([[0, 2], [1, -1]], 3)
        True
    """

    def __init__(self, array: Any, width: int) -> None:
        given = np.asarray(array)
        if given.ndim != 2 or given.dtype.kind not in "iu" or not 0 < width < 2**31:
            raise ModelError(
                "columns of a sparse matrix are whole numbers (rows, entries) below its width, "
                f"found {given.dtype} {given.shape} and the width {width}"
            )
        # Columns beyond the width stay beyond it as integers of 32 bits, and are refused later.
        places = given.clip(-2, width)
        self.array: Int[np.ndarray, "rows entries"] = np.array(places, np.int32, order="C")
        self.array.flags.writeable = False
        self.width = width
        digest = hashlib.blake2b(self.array.data, digest_size=16)
        digest.update(repr((self.array.shape, width)).encode())
        self._digest = digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        rows, entries = self.array.shape
        return f"Columns({rows} x {self.width}, up to {entries} in a row, {self._digest.hex()})"

    @cached_property
    def filled(self) -> np.ndarray:
        """Where a row has an entry, booleans (rows, entries)."""
        return self.array >= 0

    @cached_property
    def by_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns of all entries, row after row, and the ends of the rows, as SciPy has them."""
        ends = np.concatenate([[0], np.cumsum(self.filled.sum(1))]).astype(np.int32)
        return self.array[self.filled], ends


@pytree
@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A matrix of rows with few entries, such as a convolution written out.

    Layers take it in the place of a dense matrix. Where the last layers of two models are linear
    and all others are sparse, `Gaussian` and `Symmetric` compare what is read together alone; other
    computations write the matrix out, up to 1 GiB.

    Args:
        values: Entries (rows, entries), 0 behind the last entry of a row.
        columns: Columns of the entries.

    Raises:
        ModelError: Shapes do not fit, or an entry is not finite.

    Example:
        >>> eye = SparseMatrix.of(np.eye(3))
        >>> eye.shape, eye.values.shape, eye.dense().tolist()[0]
        ((3, 3), (3, 1), [1.0, 0.0, 0.0])
    """

    values: Float[Array, "rows entries"]
    columns: Columns = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        values = as_array(self.values, "the entries of a sparse matrix", 2)
        places = self.columns.array
        if tuple(values.shape) != places.shape:
            raise ModelError(
                f"a sparse matrix has entries {tuple(values.shape)} at columns {places.shape}"
            )
        lowest, highest = places.min(initial=0), places.max(initial=-1)
        if lowest < -1 or highest >= self.columns.width:
            column = lowest if lowest < -1 else highest
            raise ModelError(
                f"a sparse matrix has an entry in column {column} of {self.columns.width}"
            )
        if not isinstance(values, Tracer) and np.asarray(values)[~self.columns.filled].any():
            raise ModelError("a sparse matrix has an entry that is not zero, and no column for it")
        set_arrays(self, values=values)

    @classmethod
    def of(cls, matrix: Any) -> SparseMatrix:
        """The entries of a matrix that are not zero.

        Args:
            matrix: Sparse matrix of SciPy, or a dense array (rows, columns).

        Example:
            >>> SparseMatrix.of([[0.0, 2.0], [0.0, 0.0]]).columns.array.tolist()
            [[1], [-1]]
        """
        from scipy.sparse import csr_array

        rows: Any = csr_array(matrix if hasattr(matrix, "tocsr") else host_array(matrix))
        rows.sum_duplicates()
        rows.eliminate_zeros()
        counts = np.diff(rows.indptr)
        at = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(rows.nnz) - rows.indptr[at]
        shape = len(counts), max(1, counts.max(initial=0))
        columns, values = np.full(shape, -1, np.int32), np.zeros(shape, rows.dtype)
        columns[at, places], values[at, places] = rows.indices, rows.data
        return cls(values, Columns(columns, rows.shape[1]))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.values.shape[0], self.columns.width

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return 2

    @property
    def dtype(self) -> Any:
        """Type of the entries."""
        return self.values.dtype

    def with_values(self, values: Any) -> SparseMatrix:
        """Another matrix with entries in the same places; nothing is checked."""
        made = object.__new__(SparseMatrix)
        set_arrays(made, values=values, columns=self.columns)
        return made

    def csr(self) -> Any:
        """The matrix as one of SciPy, `scipy.sparse.csr_array`."""
        from scipy.sparse import csr_array

        indices, ends = self.columns.by_rows
        values = np.asarray(self.values)
        entries = values.ravel() if len(indices) == values.size else values[self.columns.filled]
        return csr_array((entries, indices, ends), shape=self.shape)

    def dense(self) -> Float[Array, "rows columns"]:
        """The matrix written out.

        Raises:
            TooLarge: The matrix has more than 2^27 entries.
        """
        rows, width = self.shape
        if rows * width > MOST_DENSE:
            raise TooLarge(
                f"a sparse matrix of {rows:,} x {width:,} numbers would be written out, "
                f"{rows * width / 2**27:,.1f} GiB in float64: Gaussian() and Symmetric() compare "
                "one or two layers of convolutions with a linear readout as they are, and "
                "Empirical(images) compares outputs of any network"
            )
        xp = library(self.values)
        # Missing entries add zero to column 0.
        places = np.maximum(self.columns.array, 0)
        at = np.arange(rows)[:, None], places
        zeros = xp.zeros((rows, width), self.values.dtype)
        if xp is np:
            np.add.at(zeros, at, self.values)
            return zeros
        return zeros.at[at].add(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.dense(), dtype)

    def times(self, x: Float[Array, "points columns"]) -> Float[Array, "points rows"]:
        """The products `W x` of the matrix with inputs.

        Args:
            x: Inputs, one after another.
        """
        if library(self.values, x) is np:
            return np.ascontiguousarray((self.csr() @ np.asarray(x).T).T)
        x, places = jnp.asarray(x), np.maximum(self.columns.array, 0)
        dtype = jnp.result_type(self.values, x)

        # Entry after entry of all rows, so that no array of inputs by rows by entries is made.
        def added(total: Any, entry: Any) -> tuple[Any, None]:
            values, columns = entry
            return total + x[:, columns] * values, None

        zeros = jnp.zeros((len(x), len(places)), dtype)
        return jax.lax.scan(added, zeros, (jnp.asarray(self.values).T, jnp.asarray(places.T)))[0]


Matrix: TypeAlias = Array | SparseMatrix
"""The matrix of an affine map."""


def matrix(value: Any, what: str, shape: tuple[int | None, int | None], why: str = "") -> Any:
    """Check a matrix of a given shape and return it.

    Args:
        value: Matrix in any form that `weight` takes, a `SparseMatrix`, or a matrix of SciPy.
        what: Words for the matrix in messages.
        shape: Required sizes of the axes, None for any size.
        why: Origin of the required sizes, put after the size in the message.

    Raises:
        ModelError: The matrix has another shape, or `as_array` refuses it.

    Example:
        >>> matrix([[1, 2]], "the weight", (None, 2)).shape
        (1, 2)
    """
    if hasattr(value, "tocsr"):
        value = SparseMatrix.of(value)
    array = value if isinstance(value, SparseMatrix) else weight(value, what, 2)
    for axis, size in enumerate(shape):
        if size is not None and array.shape[axis] != size:
            raise ModelError(
                f"{what} has shape {tuple(array.shape)}, axis {axis} must be {size}{why}"
            )
    return array


def affine(
    x: Float[Array, "*batch in"], weight: Matrix, bias: Float[Array, " out"] | None
) -> Float[Array, "*batch out"]:
    """The affine map `W x + b` along the last axis, as a single matrix product.

    NumPy multiplies a stack of matrices by a matrix in turn and reads the second matrix
    anew for each: 16 sequences of four positions took fifty times as long as their 64 rows.

    Args:
        x: Inputs, with any axes in front.
        weight: Matrix W, (out, in).
        bias: Vector b, or None.

    Example:
        >>> affine(np.ones((2, 3, 1)), np.full((2, 1), 5.0), None).shape
        (2, 3, 2)
    """
    if x.ndim < 3 and not isinstance(weight, SparseMatrix):
        return add(x @ weight.T, bias)
    # A single product of all rows, in which the matrix is read once.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    made = weight.times(rows) if isinstance(weight, SparseMatrix) else rows @ weight.T
    return add(made.reshape(*x.shape[:-1], weight.shape[0]), bias)


def bias_name(name: str) -> str:
    """The attribute that holds the bias of the affine map `name`.

    Example:
        >>> bias_name("weight"), bias_name("left")
        ('bias', 'left_bias')
    """
    return "bias" if name == "weight" else f"{name}_bias"


class AffineMaps:
    """Base of layers that are an affine map of a product of affine maps.

    The name of a map is the attribute of its matrix; `bias_name` gives the attribute of its bias.

    Attributes:
        maps: Names of the factors, none of a linear layer, and of the output map.
    """

    maps: Any

    def __post_init__(self) -> None:
        """Check the arrays: factors of one shape, and an output map that reads their rank.

        Units and changes of basis are applied to arrays by name. An array that stood for two
        factors would get the unit of both, and inner products would be wrong without a sign of it.
        """
        (factors, output), kind = self.maps, type(self).__name__
        if len({*factors, output}) <= len(factors):
            raise ModelError(
                f"the affine maps of {kind} are {', '.join((*factors, output))}, with one name "
                "twice: give each factor an attribute of its own, which may hold an equal array"
            )
        shape: tuple[int | None, int | None] = (None, None)
        arrays = {}
        for name in factors:
            why = f" as in {factors[0]}"
            arrays[name] = matrix(getattr(self, name), f"{kind} {name}", shape, why)
            shape = arrays[name].shape
        why = f", the rank of {' and '.join(factors[:2])}"
        arrays[output] = matrix(getattr(self, output), f"{kind} {output}", (None, shape[0]), why)
        for name, array in list(arrays.items()):
            bias = bias_name(name)
            arrays[bias] = vector(getattr(self, bias), f"{kind} {bias}", array.shape[0])
        set_arrays(self, **arrays)

    @property
    def order(self) -> int:
        """Degree in the input, the number of factors; 1 of a linear layer."""
        return len(self.maps[0]) or 1

    @property
    def d_in(self) -> int:
        """Coordinates of the input, at a single position of a sequence."""
        factors, output = self.maps
        return getattr(self, factors[0] if factors else output).shape[-1]

    @property
    def d_out(self) -> int:
        """Coordinates of the output, at a single position of a sequence."""
        return getattr(self, self.maps[1]).shape[-2]

    def hidden(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch rank"]:
        """Values of the hidden units, which the output map multiplies."""
        factors, _ = self.maps
        return functools.reduce(operator.mul, (self._at(name, x) for name in factors))

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return self._at(self.maps[1], self.hidden(x))

    def _at(self, name: str, x: Any) -> Any:
        """The affine map of a name, at an array."""
        return affine(x, getattr(self, name), getattr(self, bias_name(name)))


def bytes_of(tree: Any) -> int:
    """Bytes of the arrays of a model, or of any other tree; leaves that are no arrays have none.

    Example:
        >>> bytes_of({"weight": np.ones(2), "name": "W"})
        16
    """
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))


def is_sparse(tree: Any) -> bool:
    """Whether a pytree holds a sparse matrix; of models, their kinds say so sooner.

    Example:
        >>> is_sparse({"weight": SparseMatrix.of(np.eye(2))}), is_sparse(np.eye(2))
        (True, False)
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_sparse_matrix)
    return any(map(is_sparse_matrix, leaves))


def written_out(tree: Any) -> Any:
    """A pytree with dense arrays in the place of sparse matrices; itself where there are none.

    Raises:
        TooLarge: A matrix has more than 2^27 entries.

    Example:
        >>> written_out({"weight": SparseMatrix.of(np.eye(2))})["weight"].shape
        (2, 2)
    """
    if not is_sparse(tree):
        return tree
    return jax.tree.map(
        lambda leaf: leaf.dense() if is_sparse_matrix(leaf) else leaf,
        tree,
        is_leaf=is_sparse_matrix,
    )


def is_sparse_matrix(value: Any) -> bool:
    """Whether a value is a sparse matrix itself.

    Example:
        >>> is_sparse_matrix(SparseMatrix.of(np.eye(2))), is_sparse_matrix(np.eye(2))
        (True, False)
    """
    return isinstance(value, SparseMatrix)
