"""Layers out of hidden units: a state, units on top of it, and the layers that led to it.

Every value of a forward pass is an affine function of a state, the vector that the layers so far
give, and of hidden units on top of it. A product of two values makes units, an activation of a
value makes units, attention makes units. Where all that follows depends on a single value, this
value is the next state, and the layer that leads to it is

    z' = S z + D u + c,    u = h_1 * ... * h_n  or  f(h_1)  or  f(h_1) * h_2,   h_j = W_j z + b_j

a `Linear`, `Bilinear`, `Multilinear`, `Gated` or `Attention`, with a `Residual` around it where S
is a multiple of the identity. Any other S is carried by hidden units of its own, `(S z) * 1`, or by
a state (z, S z) to the second part of which a residual connection adds the units. A norm gives a
second source, of which the units of its layer are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tnsim.activations.activation import Activation, activation, jump_relu
from tnsim.checkpoints.affine_values import (
    AT_ONCE,
    IDENTITY,
    Grids,
    Library,
    Map,
    Value,
    added,
    composed,
    joined_grids,
    matrix_rows,
    pattern_of,
    rerooted,
    side_by_side,
)
from tnsim.checkpoints.norms import Norm, Normed
from tnsim.checkpoints.unit_rows import (
    Factor,
    Rows,
    chosen_rows,
    counts,
    indices,
    rows_with_entries,
    scaled_rows,
    single_entries,
    stacked_factors,
    unless_zero,
    with_fewer_units,
    written_out,
)
from tnsim.errors import TooLarge, UnsupportedLayer
from tnsim.models.arrays import SparseMatrix, requires_grad
from tnsim.models.layers import Bilinear, Elementwise, Gated, Linear, Multilinear, Residual

MIXED = (
    "the forward pass puts numbers of several positions of a sequence together, and layers act on "
    "every position alone, but for attention"
)


class NoLayerError(UnsupportedLayer):
    """Values of which no layer is made, though an activation of the user's own might be."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The place of every entry of an array: its position, and its coordinate there.

    Args:
        index: Coordinates, flat.
        position: Positions, flat.
        width: Coordinates at a position.
        is_last: Whether the last axis of the array is the coordinates in their order.
    """

    index: np.ndarray
    position: np.ndarray
    width: int
    is_last: bool

    @classmethod
    def in_rows(cls, positions: int, width: int, is_last: bool = True) -> Layout:
        """The layout of an array whose last axis is the coordinates, position after position."""
        where = np.arange(positions * width)
        return cls(where % max(width, 1), where // max(width, 1), width, is_last)

    @cached_property
    def order(self) -> np.ndarray:
        """The entries position after position, at each its coordinates in their order."""
        return np.lexsort((self.index, self.position))


@dataclass(frozen=True, eq=False)
class Source:
    """What values are affine in: the state, a norm of it, or a block of hidden units.

    Args:
        root: The coordinates as an array.
        layout: Place of every entry of the array.
        reads: The source that factors read, 0 for the state.
        factors: Pairs (W, b) of shapes (units, width) and (units,).
        function: Activation of the first factor.
        norm: The norm that leads from the state to this source.
        layers: Function from D and c to layers: attention, or declared layers.
        place: Words for where a norm stands.
    """

    root: Map
    layout: Layout
    reads: int = 0
    factors: tuple[Factor, ...] = ()
    function: Activation | None = None
    norm: Norm | None = None
    layers: Callable[[Any, Any], list[Normed]] | None = None
    place: str = ""


@dataclass(frozen=True, eq=False)
class Units:
    """What the entries of an array are made of: each a number times a product of factors.

    Args:
        reads: The source that the factors read.
        factors: Pairs (W, b) with a row for each entry.
        function: Activation of the first factor.
        size: The numbers; None for 1.
    """

    reads: int
    factors: tuple[Factor, ...]
    function: Activation | None = None
    size: Any = None

    @property
    def scaled(self) -> tuple[Factor, ...]:
        """The factors, the numbers among them."""
        return _times(self.factors, self.size)


@dataclass(frozen=True, eq=False)
class Draft:
    """A layer `s z + D u + c`; without units `D z + c`.

    Args:
        down: Linear map D.
        bias: Vector c.
        layout: Places of the entries of the array that D gives.
        factors: Pairs (W, b) of the factors of units.
        skip: Number s; None for no residual connection.
        function: Activation of the first factor.
        norm: Norm before the layer, inside the residual.
        layers: Function from D and c to layers, for units that are no products.
        is_whole: Whether it is a linear layer as the user wrote it.
    """

    down: Map
    bias: Any
    layout: Layout
    factors: tuple[Factor, ...] = ()
    skip: float | None = None
    function: Activation | None = None
    norm: Norm | None = None
    layers: Callable[[Any, Any], list[Normed]] | None = None
    is_whole: bool = False

    @property
    def gives_units(self) -> bool:
        """Whether the coordinates of D are those of the result."""
        index = self.down.index
        return self.down.is_root and self.down.library.numbers(index).tolist() == (
            self.layout.index.tolist()
        )


class Stack:
    """The layers so far, and hidden units on top of the state that they give.

    Args:
        library: Functions of arrays.
        shape: Shape of the input.
        positions: Number of positions of a sequence; 1 for vectors.
        layout: Places of the entries of the input.
        may_be_sparse: Whether layers may have sparse matrices.

    Attributes:
        drafts: The layers.
        sources: What values are affine in, by number; 0 is the state.
    """

    def __init__(
        self, library: Library, shape: tuple[int, ...], positions: int, may_be_sparse: bool
    ) -> None:
        self.library, self.positions, self.may_be_sparse = library, positions, may_be_sparse
        self.drafts: list[Draft] = []
        self.sources: dict[int, Source] = {}
        width = math.prod(shape) // positions
        self._begin(shape, Layout.in_rows(positions, width, positions > 1 or len(shape) == 2))
        self._known: dict[Map, Any] = {}

    @property
    def width(self) -> int:
        """Coordinates of the state at a position."""
        return self.sources[0].layout.width

    def state(self) -> Value:
        """The state itself, as an array."""
        root = self.sources[0].root
        return Value(self.zeros(root.shape), {0: root})

    def zeros(self, shape: Sequence[int]) -> Any:
        """An array of zeros."""
        return self.library.array(np.zeros(tuple(shape)))

    def _begin(self, shape: tuple[int, ...], layout: Layout, grids: Grids = ()) -> None:
        self.sources = {0: Source(self._root(shape, layout, grids), layout)}

    def _root(self, shape: tuple[int, ...], layout: Layout, grids: Grids = ()) -> Map:
        last = IDENTITY if layout.is_last and shape and shape[-1] == layout.width else None
        grids = grids or ((tuple(shape),) if self.positions == 1 else ((layout.width,),))
        index, position = (indices(self.library, x) for x in (layout.index, layout.position))
        return Map(
            self.library,
            layout.width,
            tuple(shape),
            grids=grids,
            index=index,
            position=position,
            last=last,
        )

    def _in_rows(self, width: int, grids: Grids = ()) -> Map:
        """Coordinates as an array with a row for each position."""
        n = self.positions
        return self._root((n, width), Layout.in_rows(n, width), grids)

    def _by_matrix(self, matrix: Any, grids: Grids = ()) -> Map:
        """A matrix as a map of coordinates in rows to as many rows."""
        size, width = matrix.shape
        rows = self._in_rows(width, grids)
        return rows.then(lambda z: z @ matrix.T, (self.positions, size), last=matrix)

    def layout(self, *values: Value) -> Layout:
        """The places of the entries of values of one shape.

        Raises:
            UnsupportedLayer: An entry reads several positions.
        """
        shape, n = values[0].shape, self.positions
        entries = math.prod(shape)
        slopes = [slope for value in values for slope in value.slopes.values()]
        if n == 1:
            return Layout.in_rows(1, entries, len(shape) < 3 and math.prod(shape[:-1]) == 1)
        last = bool(shape) and entries == n * shape[-1]
        if last and slopes and all(slope.last is not None for slope in slopes):
            return Layout.in_rows(n, shape[-1])
        position = self.positions_of(*values)
        if (position == -2).any():
            raise UnsupportedLayer(MIXED)
        grid = np.indices(shape).reshape(len(shape), entries)
        for axis, length in enumerate(shape):
            # Entries that read nothing take the position of their neighbours.
            if length == n and (grid[axis] == position)[position >= 0].all():
                position = grid[axis]
                break
        if (
            (position < 0).any()
            or entries % n
            or (np.bincount(position, minlength=n) != entries // n).any()
        ):
            raise UnsupportedLayer(MIXED)
        order = np.argsort(position, kind="stable")
        index = np.empty(entries, np.int64)
        index[order] = np.arange(entries) % (entries // n)
        ordered = (order == np.arange(entries)).all()
        return Layout(index, position, entries // n, bool(ordered and shape[-1] == entries // n))

    def positions_of(self, *values: Value) -> np.ndarray:
        """The position that entries of values of one shape read; -1 for none, -2 for several."""
        reads = np.zeros((self.positions, math.prod(values[0].shape)), bool)
        for value in values:
            for slope in value.slopes.values():
                reads |= slope.read_positions(self.positions)
        counts = reads.sum(0)
        return np.where(counts == 0, -1, np.where(counts == 1, reads.argmax(0), -2))

    def rows(self, linear: Map, layout: Layout) -> Rows:
        """The matrix of a map, (coordinates at a position, width of its source)."""
        # Flat units between convolutions have a sparse identity behind them.
        by_runs = linear.last is IDENTITY and self.positions == 1 and self.may_be_sparse
        is_whole = linear.last is not None and linear.shape[-1] == layout.width
        if is_whole and layout.is_last and not by_runs:
            return matrix_rows(linear.last, linear.size, self.library)
        if self.positions == 1:
            return self._matrix(linear)
        # One matrix for all positions, so a small one at each of them is the whole.
        every = linear.matrix[indices(self.library, layout.order)].reshape(
            self.positions, layout.width, -1
        )
        numbers = self.library.numbers(every)
        self._check_equal(numbers)
        return every[0]

    def vector(self, constant: Any, layout: Layout) -> Any:
        """The constant of every coordinate at a position."""
        flat = constant.reshape(-1)
        if self.positions == 1:
            return flat
        every = flat[indices(self.library, layout.order)].reshape(self.positions, layout.width)
        self._check_equal(self.library.numbers(every))
        return every[0]

    def _check_equal(self, every: np.ndarray) -> None:
        """Raise `UnsupportedLayer` where numbers differ between positions."""
        size = np.abs(every).max(initial=0.0)
        if np.abs(every - every[:1]).max(initial=0.0) > self.library.rounding * size:
            raise UnsupportedLayer(
                "the forward pass does something else at each position of a sequence, such as "
                "adding embeddings of positions, and layers are the same at all positions"
            )

    def _matrix(self, linear: Map, may_be_sparse: bool = False) -> Rows:
        """The matrix of a map of vectors, sparse where rows have few entries."""
        if linear not in self._known:
            sparse = may_be_sparse or self.may_be_sparse
            pattern = pattern_of(linear.by_runs) if sparse else None
            made: Rows = None
            if pattern is not None:
                made = pattern.matrix_of(linear.by_runs)
                # Factors often read the same coordinates, which are held once: with their places
                # by row, two factors in float32 have 17 bytes for each pair of entries, not 26.
                for other in self._known.values():
                    if isinstance(other, SparseMatrix) and other.columns == made.columns:
                        made = SparseMatrix(made.values, other.columns)
                        break
            self._known[linear] = linear.matrix if made is None else made
        return self._known[linear]

    def units_in(self, value: Value) -> list[int]:
        """The blocks of hidden units that a value is affine in."""
        return [block for block in value.slopes if self._is_units(block)]

    def _is_units(self, block: int) -> bool:
        source = self.sources[block]
        return block != 0 and source.norm is None

    def product(self, one: Value, two: Value) -> Value | None:
        """The product, entry by entry, of two values that broadcast, as a block of hidden units.

        Units are products of affine functions of the state; an activation of one, the *gate*, times
        another; and a step times what it is a step of, `u 1(u > t)`.

        Returns:
            The product; None where it is none of these, as of sums of units.
        """
        shape = np.broadcast_shapes(one.shape, two.shape)
        one, two = one.expanded(shape), two.expanded(shape)
        for gate, other in ((one, two), (two, one)):
            if self.function_in(gate) is not None and bool(gate.constant.any()):
                # (f(u) + c) v = f(u) v + c v
                found = self.product(gate.shifted(-gate.constant), other)
                return None if found is None else found.plus(other.times(gate.constant))
        hidden = {value: self._units(value) for value in (one, two) if self.units_in(value)}
        if None in hidden.values() or any(len(value.slopes) > 1 for value in (one, two)):
            return None
        layout = self.layout(one, two)
        first, second = (hidden.get(value) or self._affine(value, layout) for value in (one, two))
        # The activation goes first, as the gate of its layer; of two a step, which decides.
        if second.function is not None and (first.function is None or _is_step(second)):
            first, second = second, first
        reads, function = self._common_source(first, second), first.function
        if function is None:
            factors = (*first.scaled, *second.scaled)
            return self.new_block(shape, layout, reads, factors=factors)
        if len(first.factors) > 1 or len(second.factors) > 1:
            return None
        if _is_step(first):
            return self._stepped(first, second, shape, layout)
        if second.function is not None:
            return None
        factors = (*first.factors, *_times(second.scaled, first.size))
        return self.new_block(shape, layout, reads, factors=factors, function=function)

    def _stepped(
        self, step: Units, other: Units, shape: tuple[int, ...], layout: Layout
    ) -> Value | None:
        """A step times what it is a step of, u 1(u > t), or times ReLU of that; None for others.

        It is t j(u / t) with j the JumpReLU of threshold 1, and ReLU at t = 0.
        """
        ((weight, bias),), ((up, shift),) = step.factors, other.factors
        if other.function is not None and other.function.name != "relu":
            return None
        # The step must read the rows that it multiplies.
        if isinstance(weight, SparseMatrix) or isinstance(up, SparseMatrix):
            return None
        if not bool((weight == up).all()):
            return None
        thresholds = shift - bias
        height = math.prod(units.size for units in (step, other) if units.size is not None)
        if not bool(thresholds.any()):
            factors, made = step.factors, activation("relu")
        elif bool((thresholds > 0).all()):
            factors = ((weight / thresholds[:, None], bias / thresholds + 1),)
            height, made = height * thresholds, jump_relu(1.0)
        else:  # thresholds of both kinds would need two activations in one layer
            return None
        activated = self.new_block(shape, layout, step.reads, factors=factors, function=made)
        if isinstance(height, int):
            return activated
        # Heights are put into the slope, behind the activation.
        at = indices(self.library, layout.index)
        return activated.mapped(lambda x: x * height[at].reshape(shape))

    def stays_under_relu(self, value: Value) -> bool:
        """Whether ReLU leaves a value as it is: positive multiples of ReLU or of JumpReLU."""
        made = self._units(value) if self.units_in(value) else None
        if made is None or made.function is None or len(made.factors) != 1:
            return False
        is_positive = made.size is None or bool((made.size > 0).all())
        return is_positive and made.function in (activation("relu"), jump_relu(1.0))

    def step_of_relu(self, value: Value, thresholds: Any) -> Value | None:
        """1 where ReLU is above thresholds that are not negative, as its argument is there too.

        Args:
            value: An array of the shape of the result.
            thresholds: Numbers that broadcast to it.

        Returns:
            The units; None where the value is no ReLU, or a threshold is negative.
        """
        made = self._units(value) if self.units_in(value) else None
        if made is None or made.size is not None or made.function != activation("relu"):
            return None
        if len(made.factors) != 1 or bool((thresholds < 0).any()):
            return None
        (weight, bias), layout = made.factors[0], self.layout(value)
        shift = self.vector(value.constant - thresholds, layout)
        factors = ((weight, bias + shift),)
        step = activation("step")
        return self.new_block(value.shape, layout, made.reads, factors=factors, function=step)

    def _common_source(self, one: Units, two: Units) -> int:
        """The source that both of two factors read."""
        if one.reads != two.reads:
            place = self.sources[max(one.reads, two.reads)].place
            raise UnsupportedLayer(
                f"{place} is multiplied by what it reads, and a layer has its norm before all "
                "of its factors"
            )
        return one.reads

    def function_in(self, value: Value) -> Activation | None:
        """The activation of the hidden units that a value is made of."""
        functions = [self.sources[block].function for block in value.slopes]
        return next((function for function in functions if function is not None), None)

    def _affine(self, value: Value, layout: Layout) -> Units:
        """Entries that are affine in one source, as factors alone."""
        ((source, slope),) = value.slopes.items()
        return Units(source, ((self.rows(slope, layout), self.vector(value.constant, layout)),))

    def _units(self, value: Value) -> Units | None:
        """The unit of which each entry of a value is a multiple; None where there is none such."""
        # A sum of a unit and anything else is no factor.
        if len(value.slopes) > 1 or bool(value.constant.any()):
            return None
        ((block, slope),) = value.slopes.items()
        source = self.sources[block]
        if source.layers is not None:
            return None
        if slope.is_root:
            return Units(source.reads, source.factors, source.function)
        if self.positions == 1 and not self.may_be_sparse and not slope.is_stored:
            return None
        try:
            rows = self.rows(slope, self.layout(value))
        except (TooLarge, UnsupportedLayer):
            return None
        if not bool((counts(rows) == 1).all()):
            return None
        places, size = single_entries(rows, self.library)
        factors = (
            (chosen_rows(w, places, self.library), b[indices(self.library, places)])
            for w, b in source.factors
        )
        return Units(source.reads, tuple(factors), source.function, size)

    def activated(self, value: Value, function: Activation) -> Value:
        """An activation of every entry of a value that is affine in the state."""
        layout = self.layout(value)
        made = self._affine(value, layout)
        fields = {"factors": made.factors, "function": function}
        return self.new_block(value.shape, layout, made.reads, **fields)

    def normed(self, value: Value, norm: Norm, place: str) -> Value:
        """The state behind a norm, as an array of the shape of the value, which is the state."""
        return self.new_block(value.shape, self.layout(value), norm=norm, place=place)

    def is_state(self, value: Value) -> int | None:
        """The source of which a value is all coordinates in their order; None for other values."""
        if len(value.slopes) != 1 or bool(value.constant.any()):
            return None
        ((source, slope),) = value.slopes.items()
        if self._is_units(source) or slope.entries != self.positions * slope.size:
            return None
        return source if self._multiple_of_identity(slope, self.layout(value)) == 1 else None

    def new_block(
        self,
        shape: tuple[int, ...],
        layout: Layout,
        reads: int = 0,
        **fields: Any,
    ) -> Value:
        """A new source as an array of a shape, with other fields of `Source`: hidden units mostly.

        Without factors these are neither products nor activations: attention, or declared layers.
        """
        block = 1 + max(self.sources)
        root = self._root(shape, layout)
        self.sources[block] = Source(root, layout, reads, **fields)
        return Value(self.zeros(shape), {block: root})

    def ends_layer(self, value: Value, is_whole: bool) -> bool:
        """Whether a value that all the rest depends on becomes a state of its own.

        A value with hidden units does, and a linear layer as the user wrote it. Another affine
        function of the state does where it is narrower than the state; a wider value is cheaper as
        rows of the next layer. So is a value that would be too large a matrix.
        """
        if is_whole or self.units_in(value):
            return True
        if set(value.slopes) != {0}:
            return 0 in value.slopes
        narrow = self.width * self.positions
        before = self.drafts[-1] if self.drafts else None
        if before is not None and not (before.factors or before.layers or before.norm):
            narrow += 1  # a map of the same width is part of the linear layer before it
        if value.constant.reshape(-1).shape[0] >= narrow:
            return False
        slope = value.slopes[0]
        try:
            self.layout(value)
            return slope.is_stored or isinstance(self._matrix(slope), SparseMatrix)
        except (TooLarge, UnsupportedLayer):
            return False

    def settle(
        self, values: dict[Hashable, Value], is_whole: bool = False
    ) -> dict[Hashable, Value]:
        """Add a layer that gives everything that values depend on, and make this the state.

        A single value becomes the state; of several, all sources that they are affine in.

        Args:
            values: Values that are used later.
            is_whole: Whether a single value is a linear layer as the user wrote it.

        Returns:
            The values, affine in the new state alone.
        """
        if len(values) == 1:
            ((name, value),) = values.items()
            layout = self.layout(value)
            self._append_layer(value, layout, is_whole)
            self._begin(value.shape, layout)
            return {name: self.state()}
        sources = sorted({source for value in values.values() for source in value.slopes})
        functions = [self.sources[n].function for n in sources]
        if function := next((one for one in functions if one is not None), None):
            raise NoLayerError(
                f"the forward pass computes {function.name}, and keeps other values beside it over "
                "a nonlinear layer"
            )
        # The new state is all sources one after another.
        roots = [self.sources[source].root for source in sources]
        *starts, total = np.cumsum([0, *(root.size for root in roots)]).tolist()
        place, n = dict(zip(sources, starts, strict=True)), self.positions
        both, grids = Layout.in_rows(n, total), joined_grids(roots, n)
        memo: dict[Map, Map] = {}
        moved: dict[Hashable, Value] = {}
        for name, value in values.items():
            parts = [
                rerooted(slope, total, place[source], grids, memo)
                for source, slope in value.slopes.items()
            ]
            moved[name] = Value(value.constant, {0: added(parts)})
        unit = self.library.eye(total)
        slopes = {
            source: self._by_matrix(unit[:, start : start + root.size], root.grids)
            for source, start, root in zip(sources, starts, roots, strict=True)
        }
        self._append_layer(Value(self.zeros((n, total)), slopes), both)
        self._begin((n, total), both, grids)
        return moved

    def finished(self, value: Value) -> list[Normed]:
        """All layers of tnsim, the last of which gives a value."""
        # A last layer that is the identity is left out.
        if not self.drafts or self.is_state(value) != 0:
            self._append_layer(value, self.layout(value))
        return [layer for draft in self.drafts for layer in self._layers_of(draft)]

    def _append_layer(self, value: Value, layout: Layout, is_whole: bool = False) -> None:
        """Add the layer that gives a value."""
        bias = self.vector(value.constant, layout)
        blocks = [block for block in sorted(value.slopes) if self._is_units(block)]
        norms = {source for source in value.slopes if self.sources[source].norm is not None}
        norms |= {self.sources[n].reads for n in blocks if self.sources[n].reads != 0}
        around = value.slopes.get(0)
        skip = None if around is None else self._multiple_of_identity(around, layout)
        norm = None
        if norms:
            (normed,) = norms  # a second norm begins with a state of its own
            norm = self.sources[normed].norm
            if any(self.sources[n].reads != normed and self.sources[n].factors for n in blocks):
                raise UnsupportedLayer(
                    f"{self.sources[normed].place} stands before a part of a layer alone, and "
                    "layers have a norm before all of their factors"
                )
            if skip is None and around is not None and around.matters:
                raise UnsupportedLayer(
                    f"a linear map other than a residual connection goes around "
                    f"{self.sources[normed].place}"
                )
            around = value.slopes.get(normed)
            if not blocks:
                assert around is not None
                self.drafts.append(Draft(around, bias, layout, skip=skip, norm=norm))
                return
        elif not blocks:
            assert around is not None
            self._append_linear(around, bias, layout, is_whole)
            return
        carried = None
        if around is not None and around.matters and (skip is None or norm is not None):
            others = [self.sources[n] for n in blocks]
            if norm is None and any(one.function or one.layers for one in others):
                self._append_beside(value, blocks, layout, bias, around)
                return
            carried = self._carried(around, layout)
        sources, downs = [self.sources[n] for n in blocks], [value.slopes[n] for n in blocks]
        self._append_units(sources, downs, layout, bias, skip, norm, carried)

    def _carried(self, matrix: Map, layout: Layout) -> tuple[Factor, Map]:
        """Units `(S z) * 1` with the map from them to the state."""
        rows = self.rows(matrix, layout)
        # Rows of zeros, as of a state beside others, need no units.
        needed = rows_with_entries(rows, self.library)
        count = len(needed)
        if count < layout.width:
            rows = chosen_rows(rows, needed, self.library)
        place = np.full(layout.width, count)
        place[needed] = np.arange(count)
        entries = place[layout.index]
        zero = self.zeros((1,))
        at = indices(self.library, entries + layout.position * (count + 1))
        n, shape = self.positions, matrix.shape

        def placed(z: Any) -> Any:
            ones = self.library.concatenate([zero] * n).reshape(n, 1)
            return self.library.concatenate([z, ones], 1).reshape(-1)[at].reshape(shape)

        if n == 1 and count == layout.width:
            down = self._in_rows(count, (tuple(shape),)).then(lambda z: z.reshape(shape), shape)
        else:
            down = self._in_rows(count).then(placed, shape)
        return (rows, self.zeros((count,))), down

    def _append_units(
        self,
        sources: list[Source],
        downs: list[Map],
        layout: Layout,
        bias: Any,
        skip: float | None,
        norm: Norm | None = None,
        carried: tuple[Factor, Map] | None = None,
    ) -> None:
        """Add the layer `s z + D (units of all blocks) + c`."""
        if any(source.layers is not None for source in sources):
            if len(sources) > 1 or carried is not None:
                raise NoLayerError(
                    "one layer computes attention, or a class that was declared, and something "
                    "else beside it"
                )
            made = sources[0].layers
            self.drafts.append(Draft(downs[0], bias, layout, (), skip, None, norm, made))
            return
        functions = [source.function for source in sources]
        # What is carried on is a product with 1.
        function = _only_activation([*functions, *([] if carried is None else [None])])
        units = [source.factors for source in sources]
        if carried is not None:
            units.append((carried[0],))
            downs = [*downs, carried[1]]
        down = side_by_side(downs, self.positions)
        factors = tuple(stacked_factors(units, self.library))
        self.drafts.append(Draft(down, bias, layout, factors, skip, function, norm))

    def _append_beside(
        self, value: Value, blocks: list[int], layout: Layout, bias: Any, matrix: Map
    ) -> None:
        """Add the layers `z -> (z, S z) -> (z, S z + D u + c)`, whose second part is the state."""
        kept, size, n = self.width, layout.width, self.positions
        total, library = kept + size, self.library
        both = Layout.in_rows(n, total)
        rows = written_out(self.rows(matrix, layout), library)
        first = self._by_matrix(library.concatenate([library.eye(kept), rows]))
        self._append_linear(first, self.zeros((total,)), both, False)
        sources = [self.sources[b] for b in blocks]
        if any(source.layers is not None for source in sources):
            raise NoLayerError(
                "a linear map other than a residual connection goes around attention, or around a "
                "class that was declared"
            )
        down = side_by_side([value.slopes[b] for b in blocks], n)
        narrow = written_out(self.rows(down, layout), library)

        def padded(factor: Factor) -> tuple[Rows, Any]:
            rows = written_out(factor[0], library)
            return library.concatenate([rows, self.zeros((len(rows), size))], 1), factor[1]

        wide = [replace(one, factors=tuple(map(padded, one.factors))) for one in sources]
        placed = library.concatenate([self.zeros((kept, narrow.shape[1])), narrow])
        shifted = library.concatenate([self.zeros((kept,)), bias])
        self._append_units(wide, [self._by_matrix(placed)], both, shifted, 1.0)
        second = library.concatenate([self.zeros((size, kept)), library.eye(size)], 1)
        nothing = self.zeros((size,))
        self._append_linear(self._by_matrix(second), nothing, Layout.in_rows(n, size), False)

    def _append_linear(self, matrix: Map, bias: Any, layout: Layout, is_whole: bool) -> None:
        """Add a linear layer, merged into a layer before it without skip where that is smaller."""
        if self.drafts and self.drafts[-1].skip is None and self.drafts[-1].norm is None:
            last = self.drafts[-1]
            units = bool(last.factors or last.layers) and last.down.is_root
            apart = (last.down.size + layout.width) * matrix.size
            smaller = layout.width * last.down.size <= apart and (last.factors or not is_whole)
            alone = last.function is not None and self._is_elementwise(last)
            if (units or smaller) and not alone:
                if unless_zero(last.bias) is not None:
                    bias = bias + self._applied(matrix, layout, last.bias)
                self.drafts[-1] = replace(
                    last,
                    down=self._composed(matrix, last),
                    bias=bias,
                    layout=layout,
                    is_whole=is_whole or last.is_whole,
                )
                return
        self.drafts.append(Draft(matrix, bias, layout, is_whole=is_whole))

    def _is_elementwise(self, draft: Draft) -> bool:
        """Whether a layer is an activation of every coordinate of its state."""
        if len(draft.factors) != 1:
            return False
        (weight, bias), width = draft.factors[0], draft.factors[0][0].shape[1]
        if isinstance(weight, SparseMatrix) or weight.shape[0] != width or bool(bias.any()):
            return False
        # Without an identity beside it: that of 16,384 units takes 2 GiB.
        block = max(1, AT_ONCE // width)
        blocks = (weight[n : n + block] for n in range(0, width, block))
        entries = sum(int((rows != 0).sum()) for rows in blocks)
        return bool((weight.diagonal() == 1).all()) and entries == width and draft.gives_units

    def _applied(self, matrix: Map, layout: Layout, vector: Any) -> Any:
        """The image of a vector under a map that is the same at all positions."""
        image = matrix.at(vector).reshape(-1)
        return image[indices(self.library, layout.order[: layout.width])]

    def _composed(self, outer: Map, before: Draft) -> Map:
        """A map of the state, as a map of the units that gave the state."""
        layout, inner = before.layout, before.down
        roots = outer.roots
        known = next(iter(roots)).last is IDENTITY and len(roots) == 1 and layout.is_last

        def start(root: Map) -> Map:
            index, position = (self.library.numbers(x) for x in (root.index, root.position))
            take = layout.order[position * layout.width + index]
            if inner.shape == root.shape and (take == np.arange(len(take))).all():
                return inner
            places = indices(self.library, take)
            last = inner.last if known else None
            return inner.then(
                lambda y: y.reshape(-1)[places].reshape(root.shape), root.shape, last=last
            )

        def last(matrix: Any) -> Any:
            return composed(matrix, inner.last) if known and inner.last is not None else None

        return outer.rebased(start, last, {})

    def _multiple_of_identity(self, linear: Map, layout: Layout) -> float | None:
        """The number s of a map s I; None for zero, other maps, and maps with a gradient."""
        if linear.entries != linear.size * self.positions or layout.width != linear.size:
            return None
        source = next((one for one in self.sources.values() if one.root is linear), None)
        if source is not None or linear.last is IDENTITY:
            same = source is None or (
                (source.layout.index == layout.index).all()
                and (source.layout.position == layout.position).all()
            )
            return 1.0 if same else None
        if requires_grad(linear.at(self.zeros((linear.size,)) + 1)):
            return None
        if not linear.is_stored and not self.may_be_sparse and linear.last is None:
            matrix = self._matrix(linear, may_be_sparse=True)
        else:
            matrix = self.rows(linear, layout)
        if isinstance(matrix, SparseMatrix):
            columns, values = matrix.columns.array, np.asarray(matrix.values)
            if columns.shape[1] != 1 or (columns[:, 0] != np.arange(len(columns))).any():
                return None
            return float(values[0, 0]) if values[0, 0] and (values == values[0, 0]).all() else None
        return multiple_of_identity(self.library.numbers(matrix))

    def _layers_of(self, draft: Draft) -> list[Normed]:
        """The layers of tnsim of a draft."""
        bias: Any = unless_zero(draft.bias)
        if draft.layers is not None:
            down = None if draft.gives_units else self.rows(draft.down, draft.layout)
            return self._with_skip(draft.layers(down, bias), draft.skip, draft.norm)
        if not draft.factors:
            # The state may be in another order than the source.
            down = self.rows(draft.down, draft.layout)
            return self._with_skip([Normed(Linear(down, bias))], draft.skip, draft.norm)
        if (
            draft.function is not None
            and draft.skip is None
            and draft.norm is None
            and self._is_elementwise(draft)
            and bias is None
        ):
            return [Normed(Elementwise(draft.function, draft.factors[0][0].shape[1]))]
        down = self.rows(draft.down, draft.layout)
        factors: Any = draft.factors
        if draft.function is None and len(factors) == 2:
            factors, down = with_fewer_units(factors, down, self.library)
        rows: list[Any] = [w for w, _ in factors]
        biases: list[Any] = [unless_zero(b) for _, b in factors]
        if draft.function is not None:
            up, up_bias = (rows[1], biases[1]) if len(rows) == 2 else (None, None)
            layer: Any = Gated(rows[0], up, down, draft.function, biases[0], up_bias, bias)
        elif len(rows) == 2:
            layer = Bilinear(rows[0], rows[1], down, biases[0], biases[1], bias)
        else:
            layer = Multilinear(rows, down, biases, bias)
        return self._with_skip([Normed(layer)], draft.skip, draft.norm)

    def _with_skip(
        self, layers: list[Normed], skip: float | None, norm: Norm | None
    ) -> list[Normed]:
        if norm is not None:
            inner: Any = layers[0].layer
            while isinstance(inner, Residual) and inner.skip == 0:
                inner = inner.layer
            # A skip of a declared layer is behind the norm, and would pass it by.
            if len(layers) != 1 or layers[0].norm is not None or isinstance(inner, Residual):
                raise UnsupportedLayer(
                    "a norm stands before several layers that were declared, or before one that "
                    "has a residual connection: declare the class that holds the norm as well"
                )
            layers = [Normed(layers[0].layer, norm)]
        if skip is None:
            return layers
        if len(layers) != 1:
            raise UnsupportedLayer(
                f"a residual connection goes around {len(layers)} layers; tnsim has it around one"
            )
        layer: Any = layers[0].layer
        if isinstance(layer, Residual) and layer.skip == 0:
            return [Normed(Residual(layer.layer, skip, layer.scale), layers[0].norm)]
        return [Normed(Residual(layer, skip=skip), layers[0].norm)]


def _times(factors: tuple[Factor, ...], size: Any) -> tuple[Factor, ...]:
    """Factors with numbers in the first; None for 1."""
    if size is None:
        return factors
    (weight, bias), *others = factors
    return ((scaled_rows(weight, size), size * bias), *others)


def _is_step(units: Units) -> bool:
    return units.function is not None and units.function.name == "step"


def _only_activation(functions: Sequence[Activation | None]) -> Activation | None:
    """The activation of the units of a layer, None for products."""
    if any(one != functions[0] for one in functions):
        names = sorted({"a product" if one is None else one.name for one in functions})
        raise NoLayerError(
            f"one layer computes {' and '.join(names)}, and has room for one activation"
        )
    return functions[0]


def multiple_of_identity(matrix: np.ndarray) -> float | None:
    """The number s of a matrix s I; None for zero and for other matrices."""
    number = matrix[0, 0] if matrix.size and matrix.shape[0] == matrix.shape[1] else 0.0
    return float(number) if number and (matrix == number * np.eye(len(matrix))).all() else None
