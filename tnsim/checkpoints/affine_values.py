"""Values that are affine in the coordinates of a state and of hidden units.

An operation (`operations`) that a table names as affine is carried out on rows, so its matrix is
exact for all inputs; which coordinates an entry reads is found by `Operation.reach`, where nothing
cancels. Nothing is concluded from random numbers. Of arrays the algebra asks for a `Library` of a
few functions.

A state has `positions` vectors of equal width, such as the tokens of a sequence; a model of vectors
has one. Layers do the same at every position, so a map has one matrix for all of them: its
coordinates are put at all positions at once, and `reach` says which position an entry reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tnsim.checkpoints.operations import KEEP_ORDER, Operation
from tnsim.checkpoints.sparse_maps import LARGEST, LinearMap, check_stored
from tnsim.models.arrays import requires_grad

AT_ONCE = 2**19
"""Entries of the largest array on the way, over all rows of a matrix that are computed at once."""


class Library(Protocol):
    """Functions of arrays that the algebra needs, besides the methods all arrays have.

    Attributes:
        rounding: Relative difference of numbers that are equal but for the order of sums.
    """

    @property
    def rounding(self) -> float: ...

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

    def keeps(self, before: Any, after: Any) -> bool:
        """Whether a change of type keeps the digits that the module computes with."""
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
    grids: tuple[tuple[int, ...], ...] = ()
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


IDENTITY = "the identity"
"""In the place of `Map.last`, that the last axis of an array is the coordinates in their order."""


def rerooted(
    linear: Map, size: int, start: int, grids: tuple[tuple[int, ...], ...], memo: dict[Map, Map]
) -> Map:
    """A map of some coordinates as a map of more, among which these come from a place on."""

    def padded(last: Any) -> Any:
        last = linear.library.eye(linear.size) if last is IDENTITY else last
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


def joined_grids(maps: Sequence[Map], positions: int) -> tuple[tuple[int, ...], ...]:
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
        return lambda last: gain * _matrix_rows(last, slopes[0].shape[-1], slopes[0].library)


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
    """The matrix of the last axis after an operation, where it is known before."""
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
            return gain.reshape(-1, 1) * _matrix_rows(last, rows, library)
    if name in ("mm", "addmm", "bmm") and arguments[-2:][0] is read:
        weight = values[arguments[-1]]
        if weight.ndim != 2 or (name == "addmm" and arguments[0] is read):
            return None
        if last is IDENTITY and arguments[-1].name == "t":
            return values[arguments[-1].arguments[0]]  # the parameter itself
        return weight.T if last is IDENTITY else weight.T @ last
    if name == "slice" and width != rows:
        axis, start, stop, step = ([*arguments[1:], *(0, 0, 2**62, 1)[len(arguments) - 1 :]])[:4]
        if axis % len(shape) == len(shape) - 1:
            return _matrix_rows(last, rows, library)[slice(start, stop, step)]
    return None


def _matrix_rows(last: Any, rows: int, library: Library) -> Any:
    return library.eye(rows) if last is IDENTITY else last
