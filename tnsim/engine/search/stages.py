"""The cheapest program of a stage.

`Assembly` puts a stage together under a choice of routes. A definition with `loop_indices` may be
computed in nested loops over them. Every definition that leads to it and has an axis for the index
of a loop is computed inside the loop, where no value has this axis. The values of a turn are then
small enough to stay in a cache, and turns can run at once.

`build_program` searches routes product by product (see `routes`), the assembly shares what products
have in common (see `sharing`), and every sum is made cheaper as a whole (see `sharing`).

*Blocks of large values.* A value far larger than the processor's caches is written to memory and
read again, and it sets the peak memory of a plan. Where all operations that lead from such a value
to a single sum have an index in common, a loop over blocks of this index computes the same sum, and
only a block of the value is alive at a time: two exact layers of width 128 take a fifth of the
memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tnsim.engine.costs import peak_elements
from tnsim.engine.ir.problem import Definition, Operand, Stage, Term, names_read
from tnsim.engine.ir.program import Operation, Program, loop_labels
from tnsim.engine.search.paths import Route
from tnsim.engine.search.routes import (
    Choices,
    RouteSearch,
    Shapes,
    Structure,
    product,
)
from tnsim.engine.search.sharing import (
    Builder,
    Forms,
    Use,
    WeightedValue,
    laid_out,
    program_of,
    total,
)

WHOLE = 2**24
"""Elements up to which a value is computed whole."""
BLOCK = 2**23
"""Most elements of a value in a block. Smaller blocks would make products of few rows."""

NumberAxes = dict[int, int]
"""The axis of the index in each value that has the index, by number of the value."""


IndexAxes = dict[str, int]
"""The axis of a loop's index in each array that has the index, by name."""
MOST_TURNS = 2
"""Most turns of a loop that run at once: more turns need more memory and use the cores little
better."""
TURNS_ROOM = 8
"""Elements that the turns of a loop running at once may take, in multiples of `large`."""


class _Region(NamedTuple):
    """The operations that become a loop over an index.

    Args:
        axes: Axis of the index, for every value that has the index.
        end: Number of the value in which the index is summed.
        size: Size of the index.
    """

    axes: NumberAxes
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


def _having(program: Program, number: int, axes: NumberAxes, large: set[int]) -> NumberAxes | None:
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
    having: NumberAxes = {}
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


def _label(op: Operation, number: int, axes: NumberAxes) -> int | None:
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


class Assembly:
    """A stage put together under a choice of routes.

    Args:
        stage: Stage with inputs named in0, in1, ...
        shapes: Shapes of the inputs.
        exchangeable: Number of last axes of each input that may be exchanged.
        pick: Function from the structure of a product to its route.
        forms: Canonical forms, shared by attempts at a stage.
        room: Elements that the turns of a loop running at once may take. Definitions with
            `loop_indices` become loops; None for no loops.

    Attributes:
        unshared: Scalar multiplications of all products contracted alone.
    """

    def __init__(
        self,
        stage: Stage,
        shapes: Shapes,
        exchangeable: tuple[int, ...],
        pick: Callable[[Structure], Route],
        forms: Forms,
        room: int | None = None,
    ) -> None:
        self.stage = stage
        self.pick = pick
        self.builder = Builder(forms)
        self.inputs = len(shapes)
        self.unshared = 0
        self.values: dict[str, int] = {}
        for n, (shape, axes) in enumerate(zip(shapes, exchangeable, strict=True)):
            self.values[f"in{n}"] = self.builder.atom(shape, axes)
        self.room = room
        self.add(self.builder, self.values, stage.definitions)
        self.outputs = [self.values[definition.name] for definition in stage.outputs]

    def route(self, key: Structure) -> Route:
        """The route of a product, which is counted in `unshared`."""
        route = self.pick(key)
        self.unshared += route.multiplications
        return route

    def add(
        self, builder: Builder, values: dict[str, int], definitions: Sequence[Definition]
    ) -> None:
        """Add the values of definitions to `values`, which has all names that they read."""
        for definition in definitions:
            # A loop computes its own copies of what leads to it. Values made here for the same
            # definitions are left out by `program_of` where no output needs them.
            if self.room is not None and definition.loop_indices:
                number = self.loop(builder, values, definition, definitions)
            else:
                number = self.value(builder, values, definition)
            values[definition.name] = number

    def value(self, builder: Builder, values: dict[str, int], definition: Definition) -> int:
        """The number of the value of a definition: the sum of its terms, without a loop."""
        items = []
        for term in definition.terms:
            uses = [Use(values[o.name], o.indices) for o in term.operands]
            use = product(builder, uses, definition.indices, self.route)
            items.append(WeightedValue(term.weight, use))
        # Products come first, so that equal ones are a single value when common factors are looked
        # for.
        use = total(builder, items, definition.indices)
        number = builder.ordered(use, definition.indices).value
        if definition.exchangeable and number in builder.exchangeable:
            builder.exchangeable[number] = definition.exchangeable
        return number

    def loop(
        self,
        builder: Builder,
        values: dict[str, int],
        definition: Definition,
        definitions: Sequence[Definition],
    ) -> int:
        """The number of the value of a definition, added up over the first of its `loop_indices`.

        Everything that leads to the definition and has an axis for the index is computed in the
        body, once per turn. In the body the definition may loop over its next index.
        """
        axes = leading(definitions, definition)
        # Definitions without an axis for the index are the same in every turn: they are read from
        # outside, computed once.
        chain = [_without_axes(d, axes) for d in definitions if d.name in axes]
        chain.append(
            dataclasses.replace(
                _without_axes(definition, axes), loop_indices=definition.loop_indices[1:]
            )
        )
        names = names_read(chain)
        shapes = [builder.values[values[name]].shape for name in names]

        inner = Builder()
        inside: dict[str, int] = {}
        for name, shape in zip(names, shapes, strict=True):
            inside[name] = inner.atom(_dropped_item(shape, axes.get(name)))
        self.add(inner, inside, chain)
        # Inputs of the body come first, in the order of `names`, which is the order of the loop's
        # arguments.
        body = laid_out(program_of(inner, [inside[definition.name]], len(names)))

        labels, of_size = loop_labels(shapes, [axes.get(name) for name in names])
        # The index runs over the axis of any array that has it; all have the same size.
        turns = next(shape[axes[x]] for x, shape in zip(names, shapes, strict=True) if x in axes)
        shape = body.value_shapes[body.outputs[0]]
        operation = Operation(
            kind="loop",
            args=tuple(values[name] for name in names),
            labels=labels,
            output=tuple(of_size[size] for size in shape),
            chunks=(0,),
            body=body,
            concurrency=self.together(body, turns) if builder is self.builder else 1,
        )
        return builder.computed(operation, turns * body.multiplications)

    def together(self, body: Program, turns: int) -> int:
        """The number of turns of an outermost loop that may run at once."""
        assert self.room is not None  # without room there are no loops
        # Turns at once hold their intermediates side by side.
        return max(1, min(turns, MOST_TURNS, self.room // peak_elements(body)))

    def program(self) -> Program:
        """The program of the stage's outputs, with the scales that renormalise them."""
        stage = self.stage
        position = {definition.name: n for n, definition in enumerate(stage.outputs)}
        # Groups that the stage rescales, numbered; an output is divided by scales of this stage
        # only.
        scales, number = [], {}
        for group in stage.scale_groups:
            if group.definition is not None:
                number[group.group] = len(scales)
                scales.append((position[group.definition], group.power))
        powers = []
        for definition in stage.outputs:
            powers.append(tuple((number[g], p) for g, p in definition.powers if g in number))
        return program_of(
            self.builder,
            self.outputs,
            self.inputs,
            unshared=self.unshared,
            scales=tuple(scales),
            powers=tuple(powers),
        )


def leading(definitions: Sequence[Definition], definition: Definition) -> IndexAxes:
    """The arrays that lead to a definition and have an axis for the first of its `loop_indices`.

    Args:
        definitions: Definitions of the stage.
        definition: Definition with `loop_indices`.

    Returns:
        Axis of the index by name, for definitions and inputs of the stage.

    Raises:
        ValueError: For an array that has the index along two axes.
    """
    # Only intermediates may be computed inside the loop; a definition that later stages read exists
    # with its whole axis.
    steps = {d.name: d for d in definitions if not d.kept}
    axes: IndexAxes = {}
    waiting = [(definition, definition.loop_indices[0])]
    # From the definition back to all that it is computed from, with the name that the index has
    # there.
    while waiting:
        reader, index = waiting.pop()
        for operand in (o for term in reader.terms for o in term.operands):
            if index not in operand.indices:
                continue
            axis = operand.indices.index(index)
            if operand.name not in axes and operand.name in steps:
                step = steps[operand.name]
                waiting.append((step, step.indices[axis]))
            if axes.setdefault(operand.name, axis) != axis:
                raise ValueError(f"{operand.name} is read along two axes")
    return axes


def _without_axes(definition: Definition, axes: IndexAxes) -> Definition:
    """The definition at a single value of an index, without the axes of that index."""
    terms = []
    for term in definition.terms:
        operands = [
            Operand(o.name, _dropped_item(o.indices, axes.get(o.name))) for o in term.operands
        ]
        terms.append(Term(term.weight, tuple(operands)))
    indices = _dropped_item(definition.indices, axes.get(definition.name))
    # The dropped axis may be an exchangeable axis, so the number of them no longer holds.
    return dataclasses.replace(definition, indices=indices, terms=tuple(terms), exchangeable=0)


def _dropped_item(items: tuple, place: int | None) -> tuple:
    """The items without the item at a position, all items where the position is None."""
    return items if place is None else items[:place] + items[place + 1 :]


def build_program(
    stage: Stage, shapes: Shapes, exchangeable: tuple[int, ...], large: int
) -> Program:
    """The cheapest program of a stage that the search finds.

    Args:
        stage: Stage with inputs named in0, in1, ...
        shapes: Shapes of the inputs.
        exchangeable: Number of last axes of each input that may be exchanged.
        large: Elements beyond which an intermediate is computed in chunks.
    """
    search = RouteSearch(large)
    search.search_all(stage, shapes)
    # Both attempts share the canonical forms of networks.
    forms: Forms = {}

    def assembled(room: int | None = None) -> Program:
        return Assembly(stage, shapes, exchangeable, search.best, forms, room).program()

    program = assembled()
    if any(d.loop_indices for d in stage.definitions) and peak_elements(program) > large:
        looped = assembled(room=TURNS_ROOM * large)
        # A loop takes less memory unless all that is large has no axis for its index.
        program = min(program, looped, key=peak_elements)
    return tiled(laid_out(program))


def choose_alternatives(stage: Stage, shapes: Shapes, large: int) -> tuple[Choices, ...]:
    """The cheapest way to write each definition of a stage."""
    return RouteSearch(large).cheapest_ways(stage, shapes)
