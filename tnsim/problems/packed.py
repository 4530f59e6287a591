"""Symmetric tensors, stored once per sorted index, and the positions of their entries.

The entry at i_1 <= ... <= i_n < d stands at the position

    sum_j C(i_j + j - 1, j),        j = 1 ... n, coordinates counted from 0,

so indices are sorted by their largest coordinate, then by the next. In this order the tensor
over the first d coordinates is the beginning of the tensor over more, and the indices with a
largest coordinate within [start, stop) are a slice: products of tensors are computed block by
block.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tnsim.sessions import session


def kept(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Keep the tables of a function in the session; positions as 32-bit integers."""

    @wraps(make)
    def found(*args: int) -> np.ndarray:
        def table() -> np.ndarray:
            made = make(*args)
            return made.astype(np.int32) if made.dtype.kind == "i" else made

        return session().places.get((make, *args), table)

    return found


def count(width: int, order: int) -> int:
    """Number of stored entries of a symmetric tensor.

    Example:
        >>> count(3, 2)
        6
    """
    return math.comb(width + order - 1, order) if order else 1


def block_slice(start: int, stop: int, order: int) -> slice:
    """The slice of the indices with a largest coordinate within [start, stop).

    The index of order 0 counts as an index with the largest coordinate 0.

    Example:
        >>> block_slice(1, 3, 2)
        slice(1, 6, None)
    """
    if order == 0:
        return slice(0, int(start == 0))
    return slice(count(start, order), count(stop, order))


def sorted_indices(width: int, order: int, start: int = 0) -> Int[np.ndarray, "count order"]:
    """All sorted indices below `width` with a largest coordinate from `start` on, in order.

    Example:
        >>> sorted_indices(2, 2).tolist()
        [[0, 0], [0, 1], [1, 1]]
        >>> sorted_indices(2, 2, start=1).tolist()
        [[0, 1], [1, 1]]
    """
    if order == 0:
        return np.zeros((int(start == 0), 0), np.int64)
    # Indices with the largest coordinate i are all shorter indices below i + 1, which come first in
    # the order, with i behind. They are written, and lie in memory, coordinate by coordinate.
    ends = [count(largest + 1, order - 1) for largest in range(start, width)]
    indices = np.empty((order, sum(ends)), np.int64)
    for own, shorter in zip(indices, sorted_indices(width, order - 1).T, strict=False):
        np.concatenate([shorter[:end] for end in ends], out=own)
    indices[-1] = np.repeat(np.arange(start, width), ends)
    return indices.T


def positions(indices: Int[np.ndarray, "*shape order"]) -> Int[np.ndarray, "*shape"]:
    """The positions of sorted indices.

    Example:
        >>> positions(np.array([[0, 1], [1, 1]])).tolist()
        [1, 2]
    """
    order = indices.shape[-1]
    steps = _steps(int(indices.max(initial=-1)) + 1, order)
    places = np.zeros(indices.shape[:-1], np.int64)
    for j in range(order):
        places += steps[j][indices[..., j]]
    return places


def _steps(width: int, order: int) -> Int[np.ndarray, "order width"]:
    """C(i + j, j + 1) for every j and coordinate i, of which positions are sums.

    Example:
        >>> _steps(3, 2).tolist()
        [[0, 1, 2], [0, 1, 3]]
    """
    steps = np.zeros((order, width), np.int64)
    steps[:1] = np.arange(width)
    for j in range(1, order):  # C(i + j, j + 1) is the sum of C(k + j - 1, j) over k up to i
        np.cumsum(steps[j - 1], out=steps[j])
    return steps


@kept
def multiplicities(width: int, order: int, start: int = 0) -> Float[np.ndarray, " count"]:
    """The number n! / prod(repetitions!) of entries that each index of `sorted_indices` stands for.

    Example:
        >>> multiplicities(2, 2).tolist()
        [1.0, 2.0, 1.0]
    """
    indices = sorted_indices(width, order, start)
    # A coordinate that occurs r times in a row divides n! by 2, 3, ..., r, one factor at each
    # repetition.
    counts = np.full(len(indices), float(math.factorial(order)))
    run = np.ones(len(indices))
    for j in range(1, order):
        run = np.where(indices[:, j] == indices[:, j - 1], run + 1, 1)
        counts /= run
    return counts


@kept
def joined(
    own: int, shared: int, width: int, start: int, stop: int
) -> Int[np.ndarray, "own shared"]:
    """The positions of the concatenated indices (I, R), sorted.

    I are all indices of order `own` with a largest coordinate within [start, stop), R all indices
    of order `shared` below `width`.

    Example:
        The symmetric matrix of 3 numbers 00, 01, 11 as rows and columns.

        >>> joined(1, 1, 2, 0, 2).tolist()
        [[0, 1], [1, 2]]
    """
    first = sorted_indices(stop, own, start)
    second = sorted_indices(width, shared)
    both = [
        np.repeat(first[:, None], len(second), axis=1),
        np.repeat(second[None], len(first), axis=0),
    ]
    return positions(np.sort(np.concatenate(both, axis=2), axis=2))


@kept
def splits(rows: int, columns: int, start: int, stop: int) -> Int[np.ndarray, "ways count"]:
    """The positions of the two parts of every index in a matrix over (columns, rows).

    An index of order `rows + columns` with a largest coordinate within [start, stop) is split in
    all ways. The matrix is the square of parts below `stop` without the square of parts below
    `start`, in two pieces, behind each other: columns below `stop` with rows of the block, then
    columns of the block with rows below `start`.

    Example:
        The indices 00, 01 and 11, of which 01 is split into 0 and 1 in two ways.

        >>> splits(1, 1, 0, 2).tolist()
        [[0, 2, 3], [0, 1, 3]]
    """
    order = rows + columns
    places = sorted_indices(stop, order, start).T
    first_row, end_row, _ = block_slice(start, stop, rows).indices(count(stop, rows))
    first_column = block_slice(start, stop, columns).start
    height = end_row - first_row
    second_piece = count(stop, columns) * height
    # What a coordinate adds to the position of a part of which it is coordinate j; all ways share
    # these, and a matrix has fewer entries than 32 bits tell apart.
    steps = _steps(stop, max(rows, columns)).astype(np.int32)
    added = functools.cache(lambda place, j: steps[j][places[place]])

    def part(chosen: Sequence[int]) -> Any:
        return sum((added(place, j) for j, place in enumerate(chosen)), np.int32(0))

    ways = list(itertools.combinations(range(order), rows))
    choices = np.empty((len(ways), places.shape[1]), np.int32)
    for way, choice in zip(ways, choices, strict=True):
        row, column = part(way), part([place for place in range(order) if place not in way])
        choice[...] = column * height + row - first_row
        # Where the row has no coordinate of the block, the column has one, and the entry is in the
        # second piece.
        if start:
            below = second_piece + (column - first_column) * count(start, rows) + row
            largest = places[way[-1]] if way else 0
            np.copyto(choice, below, where=np.less(largest, start))
    return choices
