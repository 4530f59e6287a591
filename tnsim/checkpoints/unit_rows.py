"""Rows of layers: matrices of the library, or sparse ones, of which most questions are the same.

A row of a factor is what a hidden unit reads. Rows are chosen, scaled, stacked and compared here,
and units that share a row of one factor are put together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from tnsim.checkpoints.affine_values import FEWEST, FILLED, LARGEST, Library, check_stored, fixed
from tnsim.models.arrays import Columns, SparseMatrix, requires_grad

NEGLIGIBLE = 1e-13
"""Singular values below this part of the largest are rounding."""

MERGED = 2**22
"""Most entries of sparse matrices that are written out in order to save hidden units."""

Rows: TypeAlias = Any
"""A matrix of the library, or a `SparseMatrix`."""

Factor: TypeAlias = tuple[Rows, Any]
"""A matrix W (units, width) and a vector b (units,) of the factors `W z + b` of hidden units."""


def indices(library: Library, numbers: Any) -> Any:
    """Whole numbers by which arrays of the library are indexed."""
    return library.array(np.asarray(numbers, np.int64))


def unless_zero(bias: Any) -> Any:
    """A bias, or None for a bias of zeros that nobody differentiates."""
    return bias if requires_grad(bias) or bool(bias.any()) else None


def stacked_factors(units: Sequence[Sequence[Factor]], library: Library) -> list[Factor]:
    """The factors of a layer: matrix (units, in) and bias (units,) of all blocks, leg by leg."""
    factors = []
    for leg in range(max(map(len, units))):
        # A block of fewer factors than the layer has is multiplied by 1.
        own = [block[leg] if leg < len(block) else _ones_like(*block[0]) for block in units]
        rows = _stacked_rows([w for w, _ in own], library)
        factors.append(
            (rows, own[0][1] if len(own) == 1 else library.concatenate([b for _, b in own]))
        )
    return factors


def _ones_like(matrix: Rows, bias: Any) -> Factor:
    """The factor 1 for every unit of another factor."""
    if not isinstance(matrix, SparseMatrix):
        return matrix * 0, bias * 0 + 1
    none = Columns(np.full((len(bias), 1), -1), matrix.columns.width)
    return SparseMatrix(np.zeros((len(bias), 1), matrix.dtype), none), bias * 0 + 1


def _stacked_rows(parts: list[Rows], library: Library) -> Rows:
    """The rows of several matrices, sparse where any is and it pays for all."""
    if len(parts) == 1:
        return parts[0]
    sparse = [part if isinstance(part, SparseMatrix) else None for part in parts]
    if not any(sparse):
        return library.concatenate(parts)
    width = parts[0].shape[1]
    made = [
        one or SparseMatrix.of(library.numbers(part))
        for one, part in zip(sparse, parts, strict=True)
    ]
    rows, most = sum(part.shape[0] for part in parts), max(one.values.shape[1] for one in made)
    if most * FILLED > width and rows * width <= LARGEST:
        return library.concatenate([written_out(part, library) for part in parts])
    check_stored(rows, width, most)
    values = np.concatenate([_padded(np.asarray(one.values), most, 0) for one in made])
    columns = np.concatenate([_padded(one.columns.array, most, -1) for one in made])
    return SparseMatrix(fixed(values), Columns(columns, width))


def _padded(array: np.ndarray, width: int, value: int) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=value)


def scaled_rows(matrix: Rows, factors: Any) -> Rows:
    """A matrix with each row times a number."""
    if isinstance(matrix, SparseMatrix):
        return matrix.with_values(fixed(np.asarray(matrix.values) * np.asarray(factors)[:, None]))
    return factors[:, None] * matrix


def chosen_rows(matrix: Rows, rows: np.ndarray, library: Library) -> Rows:
    """Some rows of a matrix, in a given order."""
    if isinstance(matrix, SparseMatrix):
        columns = Columns(matrix.columns.array[rows], matrix.columns.width)
        return SparseMatrix(fixed(np.asarray(matrix.values)[rows]), columns)
    return matrix[indices(library, rows)]


def rows_with_entries(matrix: Rows, library: Library) -> np.ndarray:
    """The rows that have a gradient, an entry, or the place of an entry."""
    if isinstance(matrix, SparseMatrix):
        return np.flatnonzero(matrix.columns.filled.any(1))
    if requires_grad(matrix):
        return np.arange(len(matrix))
    return np.flatnonzero(library.numbers(matrix).any(1))


def counts(matrix: Rows) -> Any:
    """The number of entries in each row that are not zero."""
    entries: Any = np.asarray(matrix.values) if isinstance(matrix, SparseMatrix) else matrix
    return (entries != 0).sum(1)


def single_entries(matrix: Rows, library: Library) -> tuple[np.ndarray, Any]:
    """Column and value of the largest entry of each row."""
    if isinstance(matrix, SparseMatrix):
        entries = np.asarray(matrix.values)
        rows, places = np.arange(len(entries)), np.abs(entries).argmax(1)
        return matrix.columns.array[rows, places].astype(np.int64), library.array(
            entries[rows, places]
        )
    columns = np.abs(library.numbers(matrix)).argmax(1)
    return columns, matrix[indices(library, np.arange(len(columns))), indices(library, columns)]


def written_out(matrix: Rows, library: Library) -> Any:
    """A matrix as an array of the library."""
    return library.array(np.array(matrix.dense())) if isinstance(matrix, SparseMatrix) else matrix


def with_fewer_units(
    factors: Sequence[Factor], down: Rows, library: Library
) -> tuple[Sequence[Factor], Rows]:
    """Two factors and a map D with fewer hidden units, where many units share a factor.

    Units with the same left row l add up to l(x) * D_g (R_g x + r_g), which are as many units as
    the matrix D_g [R_g r_g] has rank. An einsum in two copies of x, for instance, has all products
    x_i x_j. Layers with gradients keep their units as they are, and so do large sparse ones.
    """
    arrays = [down, *(array for factor in factors for array in factor)]
    if any(requires_grad(array) for array in arrays):
        return factors, down
    sparse = [array for array in arrays if isinstance(array, SparseMatrix)]
    if max((math.prod(matrix.shape) for matrix in sparse), default=0) > MERGED:
        return factors, down
    found = []
    # Either factor may be the one that many units share.
    for turn in (1, -1):
        shared, other = factors[::turn]
        terms = [*_merged(shared, other, down, library)]
        if 0 < sum(len(one) for one, _, _ in terms) < down.shape[1]:
            one, two, out = zip(*terms, strict=True)
            both = (np.concatenate(one), np.concatenate(two))[::turn]
            found.append((*both, np.concatenate(out, 1)))
    if not found:
        return factors, down

    def like(matrix: np.ndarray, was_sparse: bool) -> Rows:
        few = int(counts(matrix).max()) * FILLED <= matrix.shape[1] and matrix.size >= FEWEST
        if was_sparse and few:
            return SparseMatrix.of(matrix)
        return library.array(np.ascontiguousarray(matrix))

    one, two, out = min(found, key=lambda made: len(made[0]))
    few = [(like(rows[:, :-1], bool(sparse)), library.array(rows[:, -1])) for rows in (one, two)]
    return few, like(out, isinstance(down, SparseMatrix))


def _merged(
    first: Factor, second: Factor, down: Rows, library: Library
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each distinct row of a factor the rows of both factors, and the map, of fewer units.

    There are none where groups of hardly more than one unit save nothing.
    """
    groups, group_of = np.unique(_row_keys(*first, library), return_inverse=True)
    if 2 * len(groups) > down.shape[1]:
        return
    dense = library.numbers(written_out(down, library))
    # Biases are a last column, so that they go with their rows.
    shared, other = (
        np.column_stack([library.numbers(written_out(w, library)), library.numbers(b)])
        for w, b in (first, second)
    )
    # In the order of their first units, so that models of one module have units in one order.
    for group in dict.fromkeys(group_of.ravel().tolist()):
        members = np.flatnonzero(group_of.ravel() == group)
        # The rank of a group is the number of units that it needs. The product of a few members
        # has the singular values of a small matrix between orthogonal ones.
        outer, core = np.linalg.qr(dense[:, members])
        read = other[members].any(0)
        inner, rest = np.linalg.qr(other[members][:, read].T)
        left, sizes, small = np.linalg.svd(core @ rest.T, full_matrices=False)
        left, right = outer @ left, np.zeros((len(sizes), other.shape[1]))
        right[:, read] = small @ inner.T
        kept = sizes > NEGLIGIBLE * sizes[:1]
        yield (
            np.tile(shared[members[0]], (int(kept.sum()), 1)),
            right[kept],
            (left * sizes)[:, kept],
        )


def _row_keys(matrix: Rows, bias: Any, library: Library) -> np.ndarray:
    """A key of bytes for every row with its bias, equal for equal rows."""
    parts: list[Any] = [matrix]
    if isinstance(matrix, SparseMatrix):
        parts = [np.asarray(matrix.values), matrix.columns.array]
    # Adding zero makes -0.0 a 0.0.
    rows = np.column_stack([library.numbers(x).astype(np.float64) + 0.0 for x in (*parts, bias)])
    return np.ascontiguousarray(rows).view([("", np.uint8, rows.shape[1] * 8)])[:, 0]
