"""Large values computed in blocks, so that they never stand in memory as a whole.

A value far larger than the processor's caches is written to memory and read again, and it sets the
peak memory of a plan. Where all operations that lead from such a value to a single sum have an
index in common, a loop over blocks of this index computes the same sum, and only a block of the
value is alive at a time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tnsim.engine.ir.program import Operation, Program, loop_labels

WHOLE = 2**24
"""Elements up to which a value is computed whole."""
BLOCK = 2**23
"""Most elements of a value in a block. Smaller blocks would make products of few rows."""

IndexAxes = dict[int, int]
"""The axis of the index in each value that has the index, by number of the value."""


class _Region(NamedTuple):
    """The operations that become a loop over an index.

    Args:
        axes: Axis of the index, for every value that has the index.
        end: Number of the value in which the index is summed.
        size: Size of the index.
    """

    axes: IndexAxes
    end: int
    size: int

    @property
    def inside(self) -> list[int]:
        """The numbers of all values that a turn computes, in order."""
        return sorted([*self.axes, self.end])


def tiled(program: Program) -> Program:
    """The program with loops over blocks in the place of values of more than `WHOLE` elements.

    A value stays whole where no index leads from it to a single sum. No operation is computed more
    often than before.

    Args:
        program: Program of any length.
    """
    # Each loop replaces at least one large value, and values inside loops are not looked at again,
    # so this ends.
    while (region := _largest(program)) is not None:
        program = _with_loop(program, region)
    return program


def _largest(program: Program) -> _Region | None:
    """The region of the largest value that has a region, along the index that saves most memory."""
    elements = [math.prod(shape) for shape in program.value_shapes]
    computed = enumerate(program.operations, len(program.shapes))
    large = {n for n, op in computed if op.body is None and elements[n] > WHOLE}
    # Values of equal size are tried in the order of the program, so that equal problems are cut
    # alike in every process and find each other's compiled programs.
    for value in sorted(large, key=lambda n: (-elements[n], n)):
        regions = []
        for axis, size in enumerate(program.value_shapes[value]):
            if elements[value] // size > BLOCK:
                continue  # a block of a single value of the index is too large already
            region = _region(program, value, axis, large)
            # A block of all values of the index would be the whole value again.
            if region is not None and 0 < _block(program, region) < region.size:
                regions.append(region)
        if regions:
            # The more elements the region has along the index, the more of them exist in blocks
            # only.
            return max(regions, key=lambda region: sum(elements[n] for n in region.axes))
    return None


def _region(program: Program, value: int, axis: int, large: set[int]) -> _Region | None:
    """The region of a large value and the index of an axis; None where there is no region.

    The search follows the index from the value to its arguments and readers, and from these on.
    """
    # `axes` is the region so far. The index spreads from each of its values to the operation that
    # computes the value and to all operations that read it, until every operation either carries
    # the index to its result or sums over it.
    axes, first = {value: axis}, len(program.shapes)
    ends: set[int] = set()
    waiting = [value]
    while waiting:
        number = waiting.pop()
        # An output is needed whole, and a loop gives nothing but the sum at its end.
        if number in program.outputs:
            return None
        readers = [first + n for n in program.readers.get(number, ())]
        for user in (number, *readers):
            having = _having(program, user, axes, large)
            if having is None:
                return None
            # The index is summed here, so that every turn adds the contribution of its block.
            if user not in having:
                ends.add(user)
            # Values that were found here for the first time are followed in a later round of the
            # loop.
            waiting += having.keys() - axes.keys()
            axes |= having
    # All values of a turn lead to the only end, so no input of the loop is computed from the end.
    return _Region(axes, ends.pop(), program.value_shapes[value][axis]) if len(ends) == 1 else None


def _having(program: Program, number: int, axes: IndexAxes, large: set[int]) -> IndexAxes | None:
    """The axis of the index in the result and the large arguments of an operation.

    Args:
        program: Program of the operation.
        number: Number of the operation's result.
        axes: Axes of the index that are known already.
        large: Numbers of the values that are followed, which are computed and large.

    Returns:
        The axes by number of the value; None where a value would have the index along several axes,
        or where the operation is a loop.
    """
    op = _operation(program, number)
    label = _label(op, number, axes)
    if label is None or op.body is not None:
        return None
    # A value that several operations read must have the index along the same axis for each of them:
    # `setdefault` compares with what was found before, also within this operation, where a value
    # may be both arguments.
    extended = dict(axes)
    having: IndexAxes = {}
    for value, labels in ((number, op.output), *zip(op.args, op.labels, strict=True)):
        if label not in labels:
            continue
        if labels.count(label) > 1:  # a block of a diagonal is a block along several axes at once
            return None
        place = labels.index(label)
        # Small arguments and inputs are read block by block where they stand; nobody computes them
        # again.
        if value == number or value in axes or value in large:
            if extended.setdefault(value, place) != place:
                return None
            having[value] = place
    return having


def _operation(program: Program, number: int) -> Operation:
    """The operation that computes a value."""
    return program.operations[number - len(program.shapes)]


def _label(op: Operation, number: int, axes: IndexAxes) -> int | None:
    """The label of the index in an operation; None where the index has several labels."""
    # Labels are local to an operation: the axis of a value in the region says which of them is the
    # index here.
    labels = {own[axes[arg]] for arg, own in zip(op.args, op.labels, strict=True) if arg in axes}
    if number in axes:
        labels.add(op.output[axes[number]])
    return labels.pop() if len(labels) == 1 else None


def _block(program: Program, region: _Region) -> int:
    """The number of values of the index in a block, a divisor of its size.

    The number is 0 where a block of a single value is too large.
    """
    # A divisor makes all turns equal, and one compiled program computes them.
    # Elements of the largest value of the region for one value of the index.
    widest = max(math.prod(program.value_shapes[n]) for n in region.axes) // region.size
    most = min(region.size, BLOCK // widest)
    return next((n for n in range(most, 0, -1) if region.size % n == 0), 0)


def _with_loop(program: Program, region: _Region) -> Program:
    """The program with a region replaced by a loop, which gives the value that ends it."""
    first = len(program.shapes)
    # The values of the region leave the program, except its end.
    left = {n: op for n, op in enumerate(program.operations, first) if n not in region.axes}
    # The loop stands where the sum stood: everything that it reads is computed by then.
    left[region.end] = _loop(program, region)
    shape = program.shapes.__getitem__
    return Program.of(left, range(first), program.outputs, shape, **program.scaling)


def _loop(program: Program, region: _Region) -> Operation:
    """The loop over blocks that computes a region."""
    block = _block(program, region)
    # Arguments of the loop as pairs (value, axis of the index), each once. The axis is None where
    # the argument lacks the index and is read whole.
    reads: dict[tuple[int, int | None], None] = {}
    # A value may be read with the index and, by another operation, without it; these are two inputs
    # of the body. All operations of the region go into the body as they are, with other numbers.
    operations: dict[int, Operation] = {}
    for n in region.inside:
        args: list[Any] = []
        for read in _reads(program, region, n):
            is_inside = read[0] in region.axes
            args.append(read[0] if is_inside else read)
            if not is_inside:
                reads[read] = None
        operations[n] = _operation(program, n)._replace(args=tuple(args))

    def taken(read: tuple[int, int | None]) -> tuple[int, ...]:
        # In the body an argument with the index has an axis for a block of it in the place of the
        # whole axis.
        arg, axis = read
        shape = program.value_shapes[arg]
        return tuple([block if n == axis else size for n, size in enumerate(shape)])

    shapes = [program.value_shapes[arg] for arg, _ in reads]
    labels, of_size = loop_labels(shapes, [axis for _, axis in reads])
    return Operation(
        kind="loop",
        args=tuple(arg for arg, _ in reads),
        labels=labels,
        # The result of the loop has the axes of the sum that ends the region. The labels of a loop
        # tell sizes only, so each axis is labelled by its size, for which an argument has a label.
        output=tuple(of_size[size] for size in program.value_shapes[region.end]),
        chunks=(0,),
        body=Program.of(operations, reads, [region.end], taken),
        block_size=block,
    )


def _reads(program: Program, region: _Region, number: int) -> list[tuple[int, int | None]]:
    """The arguments of an operation as pairs (value, axis of the index or None)."""
    op = _operation(program, number)
    label = _label(op, number, region.axes)
    places = [labels.index(label) if label in labels else None for labels in op.labels]
    return list(zip(op.args, places, strict=True))
