"""The cheapest program of a stage.

`Assembly` puts a stage together under a choice of routes. A definition with `loop_indices` may be
computed in nested loops over them. Every definition that leads to it and has an axis for the index
of a loop is computed inside the loop, where no value has this axis. The values of a turn are then
small enough to stay in a cache, and turns can run at once.

`build_program` searches routes product by product (see `routes`), the assembly shares what products
have in common (see `sharing`), and every sum is made cheaper as a whole (see `sums`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tnsim.engine.costs import peak_elements
from tnsim.engine.ir.problem import Definition, Operand, Stage, Term, names_read
from tnsim.engine.ir.program import Operation, Program, loop_labels
from tnsim.engine.passes.tiling import tiled
from tnsim.engine.search.paths import Route
from tnsim.engine.search.routes import (
    Choices,
    RouteSearch,
    Shapes,
    Structure,
    product,
)
from tnsim.engine.search.sharing import Builder, Forms, Use, WeightedValue, program_of
from tnsim.engine.search.sums import total

IndexAxes = dict[str, int]
"""The axis of a loop's index in each array that has the index, by name."""
MOST_TURNS = 2
"""Most turns of a loop that run at once: more turns need more memory and use the cores little
better."""
TURNS_ROOM = 8
"""Elements that the turns of a loop running at once may take, in multiples of `large`."""


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
        body = program_of(inner, [inside[definition.name]], len(names))

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
    search.cheapest_ways(stage, shapes)  # for the routes that it finds; terms have one way left
    # Both attempts share the canonical forms of networks.
    forms: Forms = {}

    def assembled(room: int | None = None) -> Program:
        return Assembly(stage, shapes, exchangeable, search.best, forms, room).program()

    program = assembled()
    if any(d.loop_indices for d in stage.definitions) and peak_elements(program) > large:
        looped = assembled(room=TURNS_ROOM * large)
        # A loop takes less memory unless all that is large has no axis for its index.
        program = min(program, looped, key=peak_elements)
    return tiled(program)


def choose_alternatives(stage: Stage, shapes: Shapes, large: int) -> tuple[Choices, ...]:
    """The cheapest way to write each definition of a stage."""
    return RouteSearch(large).cheapest_ways(stage, shapes)
