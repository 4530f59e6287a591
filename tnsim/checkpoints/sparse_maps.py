"""Matrices of linear maps that read few coordinates for each entry, such as convolutions.

A map is a function here, which is run on vectors of its coordinates. The coordinates are arrays of
some axes, the *grids*, one after another. Two kinds of runs give the matrix of rows with few
entries, and no dense matrix is made:

Supports. A run on a slab of a grid, all coordinates of the same index on an axis, with no number of
the map negative, is zero at the rows that read nothing there. All slabs of all axes give a *box*
for each row, an index set on every axis, and the row reads no coordinate outside of the product of
these sets. An image of C channels takes C + H + W runs.

Values. Indices of an axis that stand in a common box get different *colours*. A row then reads at
most a single coordinate of those of equal colour on all axes, and a run on ones at these gives an
entry of every row. A convolution of 3 x 3 pixels of C channels takes 9 C runs.

Source: coloured differences for sparse Jacobians, Curtis, Powell and Reid, On the estimation of
sparse Jacobian matrices (1974).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from tnsim.errors import TooLarge
from tnsim.models.matrices import Columns, SparseMatrix

LARGEST = 2**27
"""Most numbers of a matrix that is stored, 1 GiB in float64."""

FEWEST = 2**12
"""Entries from which on a matrix may be sparse."""

FILLED = 4
"""A sparse matrix stores at most this part of its dense form, a quarter."""

RUNS = 8
"""Most runs of either kind for each row; a run backwards would give a row of the dense matrix."""


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map that is known by running it.

    Args:
        run: Function from points (points, coordinates) to results (points, rows).
        grids: Shapes of the arrays that the coordinates are, one after another.
        rows: Number of entries of a result.
        block: Points that `run` takes at once.
        reach: Function of indicators of coordinates, whose result is not zero where a row reads any
            of them.
    """

    run: Callable[[Float[np.ndarray, "points size"]], Float[np.ndarray, "points rows"]]
    grids: tuple[tuple[int, ...], ...]
    rows: int
    block: int
    reach: Callable[[Float[np.ndarray, "points size"]], Float[np.ndarray, "points rows"]]

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return sum(map(math.prod, self.grids))

    @property
    def axes(self) -> list[list[int]]:
        """Lengths of the axes of each grid, without axes of a single index.

        A vector is taken for a table of two axes, of nearly equal lengths where these divide it.
        """
        axes = [[length for length in shape if length > 1] for shape in self.grids]
        return [_table(*shape) if len(shape) == 1 else shape for shape in axes]


@dataclass(frozen=True, eq=False)
class Pattern:
    """The places of the entries of a sparse matrix, and the runs that give the entries.

    Args:
        columns: Columns of the entries.
        colours: Number of the run in which a coordinate is 1, for each coordinate.
        boxes: Number of the box of each row.
        slots: Place in a row that a run gives, (runs, boxes); -1 for no place.
    """

    columns: Columns
    colours: Int[np.ndarray, " size"]
    boxes: Int[np.ndarray, " rows"]
    slots: Int[np.ndarray, "runs boxes"]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return len(self.boxes), self.columns.width

    def matrix_of(self, linear: LinearMap) -> SparseMatrix:
        """The matrix of a map that has no entries elsewhere.

        Example:
            >>> run = lambda points: 2 * points
            >>> double = LinearMap(run, ((8, 8),), 64, 64, run)
            >>> pattern = pattern_of(double)
            >>> len(pattern.slots), pattern.matrix_of(double).values[:3].tolist()
            (1, [[2.0], [2.0], [2.0]])
        """
        values = None
        runs = len(self.slots)
        for start in range(0, runs, linear.block):
            numbers = np.arange(start, min(start + linear.block, runs))
            results = linear.run((self.colours == numbers[:, None]).astype(np.float64))
            if values is None:
                values = np.zeros(self.columns.array.shape, results.dtype)
            for slots, result in zip(self.slots[numbers], results, strict=True):
                at = slots[self.boxes]
                given = np.flatnonzero(at >= 0)
                values[given, at[given]] = result[given]
        assert values is not None  # as a pattern has a run
        return SparseMatrix(fixed(values), self.columns)

    def trimmed(self, matrix: SparseMatrix) -> tuple[Pattern, SparseMatrix]:
        """The pattern and the matrix without places of boxes that are zero.

        A support need not be a box: a pixel and its four neighbours are five pixels of nine.

        Args:
            matrix: Matrix of this pattern, of a map of weights that are not zero.

        Example:
            >>> def run(points):  # sums of the four neighbours of a pixel
            ...     image = np.pad(points.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
            ...     rows, columns = image[:, 1:-1], image[:, :, 1:-1]
            ...     around = columns[:, :-2] + columns[:, 2:] + rows[:, :, :-2] + rows[:, :, 2:]
            ...     return around.reshape(-1, 64)
            >>> linear = LinearMap(run, ((8, 8),), 64, 64, run)
            >>> pattern_of(linear).columns.array.shape  # the boxes have nine pixels
            (64, 4)
        """
        values = np.asarray(matrix.values)
        kept = values != 0
        if (kept == self.columns.filled).all():
            return self, matrix
        parts = [self.boxes.astype(np.int64)[:, None].view(np.uint8), np.packbits(kept, axis=1)]
        _, first, boxes = _distinct(np.concatenate(parts, axis=1))
        kept, columns = kept[first], self.columns.array[first]
        order = np.argsort(~kept, axis=1, kind="stable")[:, : max(1, kept.sum(1).max())]
        # The new place of each old one, and -1 for places that are left out and for none.
        places = np.full((len(first), kept.shape[1] + 1), -1, np.int32)
        box, place = np.nonzero(np.take_along_axis(kept, order, axis=1))
        places[box, order[box, place]] = place
        slots = places[np.arange(len(first)), self.slots[:, self.boxes[first]]]
        columns = np.take_along_axis(np.where(kept, columns, -1), order, axis=1)[boxes]
        pattern = Pattern(Columns(columns, self.shape[1]), self.colours, boxes, slots)
        values = np.take_along_axis(values, order[boxes], axis=1)
        return pattern, SparseMatrix(fixed(values), pattern.columns)


def fixed(values: np.ndarray) -> np.ndarray:
    """The same array, which nobody may write to any more and layers need not copy."""
    values.flags.writeable = False
    return values


def pattern_of(linear: LinearMap) -> Pattern | None:
    """The places of the entries of the matrix of a map, None where the matrix is better dense.

    Args:
        linear: The map.

    Returns:
        The pattern of the entries; None for small matrices, for matrices that are
        filled to more than a quarter, and where the runs would be many beside rows or coordinates.

    Raises:
        TooLarge: The entries are more than `LARGEST`.

    Example:
        A difference of neighbours along rows of 8 x 8 numbers.

        >>> def run(points):
        ...     return np.diff(points.reshape(-1, 8, 8)).reshape(-1, 56)
        >>> def reach(points):
        ...     image = points.reshape(-1, 8, 8)
        ...     return (image[:, :, 1:] + image[:, :, :-1]).reshape(-1, 56)
        >>> pattern_of(LinearMap(run, ((8, 8),), 56, 64, reach)) is None  # less than 2^12 entries
        True
        >>> twice = [lambda points, f=f: np.tile(f(points), 2) for f in (run, reach)]
        >>> both = LinearMap(twice[0], ((8, 8),), 112, 64, twice[1])
        >>> pattern_of(both).columns.array[:2].tolist()
        [[0, 1], [1, 2]]
    """
    size, axes = linear.size, linear.axes
    runs = sum(map(sum, axes))
    if linear.rows * size < FEWEST or runs > RUNS * linear.rows or 2 * runs > size:
        return None
    touched = list(map(_Touched, (linear,) * len(axes), range(len(axes))))
    # The entries of a box are the product of its sizes.
    counts = np.sum([one.counts for one in touched], axis=0)
    most = max(1, int(counts.max(initial=0)))
    if most * FILLED > size or most > RUNS * linear.rows:
        return None
    check_stored(linear.rows, size, most)
    keys = np.concatenate([bits for one in touched for bits in one.bits]).T
    _, first, boxes = _distinct(keys)
    pattern = _coloured(linear, touched, first, boxes.ravel(), most)
    # A support need not be a box.
    reached = replace(linear, run=linear.reach)
    return pattern.trimmed(pattern.matrix_of(reached))[0]


def check_stored(rows: int, size: int, most: int) -> None:
    """Raise `TooLarge` where a matrix would store more than `LARGEST` entries.

    Args:
        rows: Number of rows.
        size: Number of columns.
        most: Entries of a row that are stored, all of a dense matrix.
    """
    if rows * most > LARGEST:
        few, such = f" with {most:,} in a row", "such rows"
        if most == size:
            few, such = "", "rows of so many inputs"
        raise TooLarge(
            f"a layer would be a matrix of {rows:,} x {size:,} numbers{few}, "
            f"{rows * most / 2**27:,.1f} GiB in float64, and layers such as convolutions are "
            f"stored up to {LARGEST / 2**27:.3g} GiB, {LARGEST // most:,} {such}: pool or "
            "stride before the product, give an example of smaller images, or compare outputs, "
            "metric tnsim.Empirical(images)"
        )


class _Touched:
    """The slabs of a grid that each row of a map reads.

    Attributes:
        bits: For each axis the indices that are read, bit by bit, (bytes, rows).
        counts: Coordinates in the box of each row.
    """

    def __init__(self, linear: LinearMap, grid: int) -> None:
        before = sum(map(math.prod, linear.grids[:grid]))
        axes = linear.axes[grid]
        around = before, linear.size - before - math.prod(axes)
        self.start, self.axes = before, axes
        self.counts = np.ones(linear.rows, np.int64)
        self.bits = [np.zeros((-(-length // 8), linear.rows), np.uint8) for length in axes]
        for axis, bits in enumerate(self.bits):
            read = np.zeros(linear.rows, np.int64)
            for start in range(0, axes[axis], linear.block):
                indices = np.arange(start, min(start + linear.block, axes[axis]))
                points = np.zeros((len(indices), *axes))
                for point, index in zip(points, indices, strict=True):
                    slab = (slice(None),) * axis + (index,)
                    point[slab] = 1.0
                results = linear.reach(np.pad(points.reshape(len(points), -1), ((0, 0), around)))
                for index, result in zip(indices, results, strict=True):
                    reads = result != 0
                    read += reads
                    bits[index // 8] |= reads.astype(np.uint8) << np.uint8(index % 8)
            self.counts *= read

    def masks(self, rows: Int[np.ndarray, " some"]) -> Iterator[Bool[np.ndarray, "some length"]]:
        """For each axis the indices that given rows read."""
        for bits, length in zip(self.bits, self.axes, strict=True):
            yield np.unpackbits(bits[:, rows], axis=0, count=length, bitorder="little").T > 0


def _coloured(
    linear: LinearMap,
    touched: Sequence[_Touched],
    first: Int[np.ndarray, " boxes"],
    boxes: Int[np.ndarray, " rows"],
    most: int,
) -> Pattern:
    """The pattern of boxes.

    Args:
        linear: The map.
        touched: Slabs of each grid that rows read.
        first: A row of each box.
        boxes: Number of the box of each row.
        most: Entries of the largest box.
    """
    count, runs = len(first), 0
    # Places of a box, their columns and the runs that give them, grid after grid.
    inside, columns, givers, colours = [], [], [], []
    for one in touched:
        in_box = np.ones((count, 1), bool)
        column = np.zeros((count, 1), np.int32)
        giver = np.zeros((count, 1), np.int32)
        colour, colour_count = np.zeros(1, np.int32), 1
        for length, mask in zip(one.axes, one.masks(first), strict=True):
            own = _colours(mask)
            used = int(own.max()) + 1
            # Indices of the box in rising order, then indices outside.
            width = int(mask.sum(1).max())
            indices = np.argsort(~mask, axis=1, kind="stable")[:, :width].astype(np.int32)
            known = np.take_along_axis(mask, indices, axis=1)
            in_box = (in_box[:, :, None] & known[:, None]).reshape(count, -1)
            column = (column[:, :, None] * length + indices[:, None]).reshape(count, -1)
            giver = (giver[:, :, None] * used + own[indices][:, None]).reshape(count, -1)
            colour = (colour[:, None] * used + own).ravel()
            colour_count *= used
        inside.append(in_box)
        columns.append(column + one.start)
        givers.append(giver + runs)
        colours.append(colour + runs)
        runs += colour_count
    filled = np.concatenate(inside, axis=1)
    # Missing entries of a row are its last ones.
    order = np.argsort(~filled, axis=1, kind="stable")[:, :most]
    filled, column, giver = (
        np.take_along_axis(np.concatenate(parts, axis=1), order, axis=1)
        for parts in (inside, columns, givers)
    )
    if filled.shape[1] == 0:
        # Rows that read nothing still have a place, which is empty.
        filled, column = np.zeros((count, 1), bool), np.zeros((count, 1), np.int32)
        giver = column
    slots = np.full((runs, count), -1, np.int32)
    box, place = np.nonzero(filled)
    slots[giver[box, place], box] = place
    array = np.where(filled, column, -1)[boxes]
    return Pattern(Columns(array, linear.size), np.concatenate(colours), boxes, slots)


def _colours(mask: Bool[np.ndarray, "boxes length"]) -> Int[np.ndarray, " length"]:
    """A colour for each index of an axis, different for indices in a common box.

    Along intervals the first free colour in rising order makes the fewest colours that there are.
    """
    reads = mask.astype(np.float32)
    meet = reads.T @ reads > 0
    colours = np.zeros(len(meet), np.int32)
    for index in range(1, len(meet)):
        taken = set(colours[:index][meet[index, :index]].tolist())
        colours[index] = next(colour for colour in range(index + 1) if colour not in taken)
    return colours


def _distinct(rows: Int[np.ndarray, "rows bytes"]) -> Any:
    """Distinct rows of bytes, the first row of each kind, and the kind of each row."""
    whole = np.ascontiguousarray(rows).view([("", rows.dtype, rows.shape[1])])[:, 0]
    return np.unique(whole, return_index=True, return_inverse=True)


def _table(length: int) -> list[int]:
    """Rows and columns of a table for the entries of a vector."""
    rows = next(count for count in range(math.isqrt(length), 0, -1) if length % count == 0)
    return [rows, length // rows]
