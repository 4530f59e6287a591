"""Matrices of affine maps: dense arrays, or rows that hold few entries.

A convolution reads a patch of an image for each of its outputs. As a dense matrix it is zeros
almost everywhere: 32 channels of 3 x 3 pixels after 32 channels of 26 x 26 are 3.2 GiB, of which
42 MiB are weights. A `SparseMatrix` holds these weights with the columns that they stand in.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Float, Int

from tnsim.errors import ModelError, TooLarge
from tnsim.models.arrays import (
    Array,
    add,
    as_array,
    host_array,
    pytree,
    set_arrays,
    vector,
    weight,
)
from tnsim.scaled import library

MOST_DENSE = 2**27
"""Most entries of a sparse matrix that is written out, 1 GiB in float64."""


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


def is_sparse(tree: Any) -> bool:
    """Whether a pytree holds a sparse matrix; of models, their kinds say so sooner.

    Example:
        >>> is_sparse({"weight": SparseMatrix.of(np.eye(2))}), is_sparse(np.eye(2))
        (True, False)
    """
    leaves = jax.tree.leaves(tree, is_leaf=_is_matrix)
    return any(map(_is_matrix, leaves))


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
        lambda leaf: leaf.dense() if _is_matrix(leaf) else leaf, tree, is_leaf=_is_matrix
    )


def _is_matrix(value: Any) -> bool:
    return isinstance(value, SparseMatrix)
