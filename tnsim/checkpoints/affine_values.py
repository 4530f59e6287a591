"""Values that are affine in the coordinates of a state and of hidden units.

An operation (`operations`) that a table names as affine is carried out on rows, so its matrix is
exact for all inputs; which coordinates an entry reads is found by `Operation.reach`, where nothing
cancels. Nothing is concluded from random numbers. Of arrays the algebra asks for a `Library` of a
few functions.

A state has `positions` vectors of equal width, such as the tokens of a sequence; a model of vectors
has one. Layers do the same at every position, so a map has one matrix for all of them: its
coordinates are put at all positions at once, and `reach` says which position an entry reads.

*Sparse maps* read few coordinates for each entry, as convolutions do. A map is a function here,
which is run on vectors of its coordinates. The coordinates are arrays of some axes, the *grids*,
one after another. Two kinds of runs give the matrix of rows with few entries, and no dense matrix
is made:

*Supports.* A run on a slab of a grid, all coordinates of the same index on an axis, with no number
of the map negative, is zero at the rows that read nothing there. All slabs of all axes give a *box*
for each row, an index set on every axis, and the row reads no coordinate outside of the product of
these sets. An image of C channels takes C + H + W runs.

*Values.* Indices of an axis that stand in a common box get different *colours*. A row then reads at
most a single coordinate of those of equal colour on all axes, and a run on ones at these gives an
entry of every row. A convolution of 3 x 3 pixels of C channels takes 9 C runs.

Source: coloured differences for sparse Jacobians, Curtis, Powell and Reid, On the estimation of
sparse Jacobian matrices (1974).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from tnsim.checkpoints.operations import KEEP_ORDER, Operation
from tnsim.errors import TooLarge
from tnsim.models.arrays import Columns, SparseMatrix, requires_grad

LARGEST = 2**27
"""Most numbers of a matrix that is stored, 1 GiB in float64."""

FEWEST = 2**12
"""Entries from which on a matrix may be sparse."""

FILLED = 4
"""A sparse matrix stores at most this part of its dense form, a quarter."""

RUNS = 8
"""Most runs of either kind for each row; a run backwards would give a row of the dense matrix."""


AT_ONCE = 2**19
"""Entries of the largest array on the way, over all rows of a matrix that are computed at once."""

Grids: TypeAlias = tuple[tuple[int, ...], ...]
"""Shapes of the arrays that coordinates are, one after another."""

IDENTITY = "the identity"
"""In the place of `Map.last`, that the last axis of an array is the coordinates in their order."""


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
    grids: Grids
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


class Library(Protocol):
    """Functions of arrays that the algebra needs, besides the methods all arrays have.

    Attributes:
        precision: Type of the fewest digits that a module or function computes with.
        rounding: Relative difference of numbers that are equal but for the order of sums.
    """

    precision: Any

    @property
    def rounding(self) -> float: ...

    def epsilon(self, dtype: Any) -> float:
        """The machine epsilon of a type of floats."""
        ...

    def vmap(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function on many rows at once."""
        ...

    def transposed(self, function: Callable[[Any], Any], size: int) -> Callable[[Any], Any]:
        """The transposed map of a linear function of vectors of a size."""
        ...

    def array(self, numbers: Any) -> Any:
        """An array of the library, floats in the type of the weights."""
        ...

    def eye(self, size: int) -> Any:
        """The identity."""
        ...

    def concatenate(self, arrays: Sequence[Any], axis: int = 0) -> Any:
        """Arrays after one another."""
        ...

    def numbers(self, array: Any) -> np.ndarray:
        """The entries without gradients."""
        ...


@dataclass(frozen=True, eq=False)
class Map:
    """A linear map from coordinates to an array, as the operations that compute it.

    Args:
        library: Functions of arrays.
        size: Number of coordinates.
        shape: Shape of the array.
        operation: Function of the arrays that the maps before it give; None for the coordinates
            themselves.
        reach: The same function of indicators.
        before: Maps of the same coordinates, the arrays of which the operation reads.
        grids: Shapes of the arrays that the coordinates are, one after another.
        index: For the coordinates themselves, the coordinate at each entry of the array.
        position: For the coordinates themselves, the position of each entry.
        last: A matrix of which the last axis of the array is the result, the same along all other
            axes; `IDENTITY` for the identity; None where no such matrix is known.
    """

    library: Library
    size: int
    shape: tuple[int, ...]
    operation: Callable[..., Any] | None = None
    reach: Callable[..., Any] | None = None
    before: tuple[Map, ...] = ()
    grids: Grids = ()
    index: Any = None
    position: Any = None
    last: Any = None

    def __post_init__(self) -> None:
        known = self.before[0].grids if self.before else (self.shape,)
        object.__setattr__(self, "grids", self.grids or known)

    @property
    def entries(self) -> int:
        """Number of entries of the array."""
        return math.prod(self.shape)

    @property
    def is_root(self) -> bool:
        """Whether the map is the coordinates themselves."""
        return self.operation is None

    @property
    def is_stored(self) -> bool:
        """Whether the dense matrix may be written out."""
        return self.entries * self.size <= LARGEST

    @cached_property
    def widest(self) -> int:
        """Entries of the largest array on the way."""
        before = (earlier.widest for earlier in self.before)
        return max(self.entries, self.size, *before)

    def at(self, coordinates: Any) -> Any:
        """The array at coordinates (size,)."""
        return self._computed(lambda root: coordinates[root.index].reshape(root.shape), False, {})

    def reached(self, coordinates: Any, positions: Any) -> Any:
        """The indicator of entries that read any of some coordinates at any of some positions."""

        def start(root: Map) -> Any:
            return (coordinates[root.index] * positions[root.position]).reshape(root.shape)

        return self._computed(start, True, {})

    def _computed(self, start: Callable[[Map], Any], reach: bool, known: dict[Map, Any]) -> Any:
        # A map that several others read is computed once.
        if self not in known:
            operation = self.reach if reach else self.operation
            if operation is None:
                known[self] = start(self)
            else:
                given = [earlier._computed(start, reach, known) for earlier in self.before]
                known[self] = operation(*given)
        return known[self]

    def then(
        self,
        operation: Callable[[Any], Any],
        shape: Sequence[int],
        reach: Callable[[Any], Any] | None = None,
        last: Any = None,
    ) -> Map:
        """The map followed by a linear operation, which by default has no negative numbers."""
        after = (operation, reach or operation, (self,))
        return Map(self.library, self.size, tuple(shape), *after, last=last)

    @cached_property
    def roots(self) -> frozenset[Map]:
        """The coordinates themselves, in all forms in which the map reads them."""
        if self.is_root:
            return frozenset([self])
        return frozenset[Map]().union(*(one.roots for one in self.before))

    def rebased(
        self, start: Callable[[Map], Map], last: Callable[[Any], Any], known: dict[Map, Map]
    ) -> Map:
        """The map with maps of other coordinates in the place of its own.

        Args:
            start: Function from coordinates themselves to the map in their place.
            last: What becomes of a known matrix of the last axis.
            known: Maps that were made before.
        """
        if self not in known:
            if self.is_root:
                known[self] = start(self)
            else:
                before = tuple(one.rebased(start, last, known) for one in self.before)
                matrix = None if self.last is None else last(self.last)
                size, grids = before[0].size, before[0].grids
                known[self] = replace(self, size=size, before=before, grids=grids, last=matrix)
        return known[self]

    @cached_property
    def matrix(self) -> Any:
        """The matrix of the map, (entries, coordinates)."""
        check_stored(self.entries, self.size, self.size)
        block, library = max(1, AT_ONCE // self.widest), self.library

        def flat_at(coordinates: Any) -> Any:
            return self.at(coordinates).reshape(-1)

        if self.operation is None:
            return library.eye(self.size)[self.index]
        by_rows = self.entries < self.size
        function = library.transposed(flat_at, self.size) if by_rows else flat_at
        unit = library.eye(min(self.entries, self.size))
        parts = [unit[n : n + block] for n in range(0, len(unit), block)]
        if not parts:
            return library.array(np.zeros((self.entries, self.size)))
        found = library.concatenate([library.vmap(function)(part) for part in parts])
        return found if by_rows else found.T

    @cached_property
    def by_runs(self) -> LinearMap:
        """The map and its indicators as functions of NumPy."""
        library = self.library
        everywhere = library.array(np.ones(1))

        def many(function: Callable[[Any], Any]) -> Callable[[np.ndarray], np.ndarray]:
            def run(points: np.ndarray) -> np.ndarray:
                found = library.vmap(lambda x: function(x).reshape(-1))(library.array(points))
                return library.numbers(found)

            return run

        reach = many(lambda x: self.reached(x, everywhere))
        block = max(1, AT_ONCE // self.widest)
        return LinearMap(many(self.at), self.grids, self.entries, block, reach)

    def read_positions(self, positions: int) -> np.ndarray:
        """Which positions each entry reads, (positions, entries) of booleans."""
        if self.size == 0:
            return np.zeros((positions, self.entries), bool)
        library = self.library
        everything = library.array(np.ones(self.size))
        each = library.array(np.eye(positions))
        found = library.vmap(lambda p: self.reached(everything, p).reshape(-1))(each)
        return library.numbers(found) != 0

    @cached_property
    def matters(self) -> bool:
        """Whether the map has a gradient or is not zero; True for maps too large to be seen."""
        if self.last is IDENTITY or (self.last is None and not self.is_stored):
            return True
        entries = self.matrix if self.last is None else self.last
        return requires_grad(entries) or bool(entries.any())


def rerooted(linear: Map, size: int, start: int, grids: Grids, memo: dict[Map, Map]) -> Map:
    """A map of some coordinates as a map of more, among which these come from a place on."""

    def padded(last: Any) -> Any:
        last = matrix_rows(last, linear.size, linear.library)
        zeros = [
            linear.library.array(np.zeros((last.shape[0], n)))
            for n in (start, size - start - linear.size)
        ]
        return linear.library.concatenate([zeros[0], last, zeros[1]], 1)

    def moved(root: Map) -> Map:
        last = None if root.last is None else padded(root.last)
        return replace(root, size=size, index=root.index + start, grids=grids, last=last)

    return linear.rebased(moved, padded, memo)


def added(parts: Sequence[Map]) -> Map:
    """The sum of maps of the same coordinates to arrays of one shape."""
    if len(parts) == 1:
        return parts[0]
    lasts = [part.last for part in parts]
    last = None
    if all(one is not None and one is not IDENTITY for one in lasts):
        last = sum(lasts[1:], lasts[0])

    def total(*arrays: Any) -> Any:
        return sum(arrays[1:], arrays[0])

    shape = parts[0].shape
    return Map(parts[0].library, parts[0].size, shape, total, total, tuple(parts), last=last)


def side_by_side(maps: Sequence[Map], positions: int) -> Map:
    """The map of the coordinates of all maps, one after another, to the sum of their arrays."""
    if len(maps) == 1:
        return maps[0]
    grids = joined_grids(maps, positions)
    *starts, total = np.cumsum([0, *(one.size for one in maps)]).tolist()
    pairs = zip(maps, starts, strict=True)
    return added([rerooted(one, total, start, grids, {}) for one, start in pairs])


def joined_grids(maps: Sequence[Map], positions: int) -> Grids:
    """The grids of the coordinates of all maps, one after another."""
    if positions > 1:  # coordinates of a position are a vector
        return ((sum(one.size for one in maps),),)
    return tuple(shape for one in maps for shape in one.grids)


def composed(last: Any, inside: Any) -> Any:
    """The matrix of a last axis behind another, either of which may be `IDENTITY`."""
    if last is IDENTITY:
        return inside
    return last if inside is IDENTITY else last @ inside


@dataclass(frozen=True, eq=False)
class Value:
    """An array that is an affine function of the state and of hidden units.

    Args:
        constant: The array where the state and all hidden units are zero.
        slopes: Linear map from the coordinates of a source to the array, for every source: 0 for
            the state, n for block n of hidden units.
    """

    constant: Any
    slopes: dict[int, Map]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.constant.shape)

    def mapped(
        self,
        function: Callable[[Any], Any],
        last: Callable[[Any], Any] | None = None,
        reach: Callable[[Any], Any] | None = None,
    ) -> Value:
        """A linear operation on the value.

        Args:
            function: The operation.
            last: What becomes of a known matrix of the last axis; None where none is known after.
            reach: The operation on indicators, where it has negative numbers.
        """
        constant = function(self.constant)
        slopes = {}
        for source, slope in self.slopes.items():
            kept = None if last is None or slope.last is None else last(slope.last)
            slopes[source] = slope.then(function, constant.shape, reach, last=kept)
        return Value(constant, slopes)

    def shifted(self, by: Any) -> Value:
        """The value with numbers of its shape added, or with one number."""
        return Value(self.constant + by, self.slopes)

    def plus(self, other: Value) -> Value:
        """The sum of two values of one shape."""
        slopes = dict(self.slopes)
        for n, slope in other.slopes.items():
            slopes[n] = added([slopes[n], slope]) if n in slopes else slope
        return Value(self.constant + other.constant, slopes)

    def expanded(self, shape: Sequence[int]) -> Value:
        """The value at all places of a shape to which it broadcasts."""
        if self.shape == tuple(shape):
            return self
        zeros = next(iter(self.slopes.values())).library.array(np.zeros(tuple(shape)))
        keeps = self.shape[-1:] == tuple(shape[-1:])
        return self.mapped(lambda x: x + zeros, (lambda last: last) if keeps else None)

    def times(self, gain: Any) -> Value:
        """The value times a number, or entry by entry times an array of the library."""
        if isinstance(gain, float):
            return self if gain == 1 else self.mapped(lambda x: gain * x, self._rows_times(gain))
        # The same number along all other axes.
        is_row = math.prod(gain.shape) == gain.shape[-1]
        last = self._rows_times(gain.reshape(-1, 1)) if is_row else None
        return self.mapped(lambda x: x * gain, last, lambda x: x * (gain != 0))

    def _rows_times(self, gain: Any) -> Callable[[Any], Any]:
        """The function of matrices of the last axis that multiplies their rows."""
        slopes = list(self.slopes.values())
        return lambda last: gain * matrix_rows(last, slopes[0].shape[-1], slopes[0].library)


def affine_result(
    operation: Operation,
    values: Mapping[Operation, Any],
    library: Library,
    filled: Mapping[Operation, Any],
) -> Value:
    """An affine operation: its constant is that of its constants, its slopes those of its slopes.

    Args:
        operation: Operation that is affine in the values it reads.
        values: Arrays, and the `Value`s in which the operation is affine.
        library: Functions of arrays.
        filled: Arrays in the place of others where indicators are computed, by operation.
    """
    given = {one: values[one] for one in operation.reads if isinstance(values[one], Value)}
    others = {one: values[one] for one in operation.reads if one not in given}
    reachable = others | {one: _joined(others[one], filled[one]) for one in others if one in filled}
    constant = operation.run(others | {one: value.constant for one, value in given.items()})
    # The image of zero under weights that have a gradient is zero without a gradient.
    if requires_grad(constant) and not _adds(operation, given):
        starts = [value.constant for value in given.values()]
        is_zero = not any(requires_grad(one) or bool(one.any()) for one in starts)
        constant = library.array(np.zeros(constant.shape)) if is_zero else constant
    result = Value(constant, {})
    varying = frozenset(given)
    zeros = {one: value.constant * 0 for one, value in given.items()}

    def on(part: Callable[..., Any], fixed: dict[Any, Any], reading: list[Operation]) -> Any:
        """A part of the operation as a function of arrays for some operations that it reads."""
        known = fixed | zeros
        return lambda *arrays: part(known | dict(zip(reading, arrays, strict=True)), varying)

    for source in sorted({source for value in given.values() for source in value.slopes}):
        reading = [one for one, value in given.items() if source in value.slopes]
        moved = on(operation.linear, others, reading)
        reached = on(operation.reach, reachable, reading)
        before = tuple(given[one].slopes[source] for one in reading)
        last = None
        if len(reading) == 1:
            last = _last_matrix(operation, reading[0], before[0], values, result.shape, library)
        slope = Map(library, before[0].size, result.shape, moved, reached, before, last=last)
        result.slopes[source] = slope
    return result


def _adds(operation: Operation, given: Mapping[Operation, Any]) -> bool:
    """Whether an operation adds anything to a linear function of some values."""
    return any(
        one not in given if isinstance(one, Operation) else bool(one) for one in operation.added
    )


def _joined(array: Any, filled: Any) -> Any:
    """An array that is zero where two are zero."""
    return array if filled is array else abs(array) + abs(filled)


def _last_matrix(
    operation: Operation,
    read: Operation,
    before: Map,
    values: Mapping[Operation, Any],
    shape: tuple[int, ...],
    library: Library,
) -> Any:
    """The matrix of the last axis after an operation, where it is known before.

    Else it is found by runs: a file of bilinear attention of 12 positions takes 1.2 to 1.6 times as
    long, and the matrix at all positions together, of which it is a part, may be too large.
    """
    last, name, arguments = before.last, operation.name, operation.arguments
    if last is None or not shape or not before.shape:
        return None
    width, rows = shape[-1], before.shape[-1]
    if name in KEEP_ORDER:
        return last if width == rows else None
    # What is added to itself is read by both arguments.
    if name in ("add", "sub") and width == rows and arguments[0] is not arguments[1]:
        first = arguments[0] is read
        return last if first or (name == "add" and not operation.keywords) else None
    # The coordinates of a single vector may have a sparse matrix.
    if name == "mul" and width == rows and (last is not IDENTITY or before.entries > before.size):
        gain = values.get(arguments[1] if arguments[0] is read else arguments[0])
        if gain is not None and math.prod(gain.shape) == width == gain.shape[-1]:  # of each row
            return gain.reshape(-1, 1) * matrix_rows(last, rows, library)
    if name in ("mm", "addmm", "bmm") and arguments[-2:][0] is read:
        weight = values[arguments[-1]]
        # Numbers by name are factors, of which the matrix is not made.
        if weight.ndim != 2 or operation.keywords or (name == "addmm" and arguments[0] is read):
            return None
        if last is IDENTITY and arguments[-1].name == "t":
            return values[arguments[-1].arguments[0]]  # the parameter itself
        return weight.T if last is IDENTITY else weight.T @ last
    if name == "slice" and width != rows:
        axis, start, stop, step = ([*arguments[1:], *(0, 0, 2**62, 1)[len(arguments) - 1 :]])[:4]
        if axis % len(shape) == len(shape) - 1:
            return matrix_rows(last, rows, library)[slice(start, stop, step)]
    return None


def matrix_rows(last: Any, rows: int, library: Library) -> Any:
    """The matrix of a last axis, written out where it is `IDENTITY`."""
    return library.eye(rows) if last is IDENTITY else last
