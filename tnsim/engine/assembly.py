"""A stage put together under a choice of routes. In: a stage, routes. Out: values, and their price.

A definition with indices `over` may be computed in loops over them, one inside another. What leads
to it and has an axis for the index of a loop is computed inside, where no value has this axis. The
values of a turn are then small enough to stay in a cache, and turns can run at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tnsim.engine.factoring import total
from tnsim.engine.pathfinding import Route
from tnsim.engine.piece import Operation, Piece, loop_labels
from tnsim.engine.problem import Definition, Operand, Stage, Term
from tnsim.engine.route_search import Shapes
from tnsim.engine.sharing import Builder, Forms, Use, Weighted, piece_of, price
from tnsim.engine.term_products import Structure, product

Axes = dict[str, int]
"""Names, and which of their axes is that of a loop."""

MOST_TURNS = 4
"""Turns of a loop that may run at once: more need more memory, and use the cores little better."""


class Assembly:
    """One assembly of a stage under a choice of routes.

    Args:
        stage: Its inputs are named in0, in1, ...
        shapes: Of the inputs.
        exchangeable: Of each input, how many axes, the last ones, may be exchanged.
        pick: The route of a product.
        forms: Canonical forms, shared by attempts at one stage.
        room: Where given, definitions with indices `over` become loops over them, and as many turns
            of a loop may run at once as stay within so many elements.

    Attributes:
        keys: Products that were contracted along a route, in order.
        unshared: Multiplications of all products contracted one by one.
        price: Of the whole, in the measure of `pathfinding.Cost.price`.
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
        self.keys: dict[Structure, None] = {}
        self.unshared = 0
        self.values: dict[str, int] = {}
        for n, (shape, axes) in enumerate(zip(shapes, exchangeable, strict=True)):
            self.values[f"in{n}"] = self.builder.atom(shape, axes)
        self.room = room
        self.add(self.builder, self.values, stage.definitions)
        self.outputs = [self.values[definition.name] for definition in stage.outputs]
        self.price = price(self.builder, self.outputs)

    def route(self, key: Structure) -> Route:
        """The route of a product; takes down that it was asked for."""
        route = self.pick(key)
        self.keys[key] = None
        self.unshared += route.multiplications
        return route

    def add(
        self, builder: Builder, values: dict[str, int], definitions: Sequence[Definition]
    ) -> None:
        """The values of definitions, in order; `values` has those of the names that they read."""
        for definition in definitions:
            # What only a loop needs is not reached from an output, and is left out.
            is_loop = self.room is not None and definition.over
            make = self.loop if is_loop else self.value
            values[definition.name] = make(builder, values, definition, definitions)

    def value(
        self,
        builder: Builder,
        values: dict[str, int],
        definition: Definition,
        _: Sequence[Definition],
    ) -> int:
        """The sum of a definition's terms as one value of a builder that has the values named."""
        items = []
        for term in definition.terms:
            uses = [Use(values[o.name], o.indices) for o in term.operands]
            use = product(builder, uses, definition.indices, self.route)
            items.append(Weighted(term.weight, use))
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
        """A definition added up over the first of its indices `over`.

        Everything that leads to it and has an axis for the index is computed once per turn, inside,
        where the definition may be added up over the next index.
        """
        axes = leading(definitions, definition)
        chain = [_without(d, axes) for d in definitions if d.name in axes]
        chain.append(dataclasses.replace(_without(definition, axes), over=definition.over[1:]))
        names = _names_read(chain)
        shapes = [builder.values[values[name]].shape for name in names]

        inner = Builder()
        inside: dict[str, int] = {}
        for name, shape in zip(names, shapes, strict=True):
            inside[name] = inner.atom(_dropped(shape, axes.get(name)))
        self.add(inner, inside, chain)
        body = piece_of(inner, [inside[definition.name]], len(names))

        labels, of_size = loop_labels(shapes, [axes.get(name) for name in names])
        turns = next(shape[axes[x]] for x, shape in zip(names, shapes, strict=True) if x in axes)
        shape = body.value_shapes[body.outputs[0]]
        operation = Operation(
            kind="loop",
            args=tuple(values[name] for name in names),
            labels=labels,
            output=tuple(of_size[size] for size in shape),
            chunks=(0,),
            body=body,
            together=self.together(body, turns) if builder is self.builder else 1,
        )
        return builder.computed(operation, turns * body.multiplications)

    def together(self, body: Piece, turns: int) -> int:
        """How many turns of an outermost loop may run at once."""
        assert self.room is not None  # else there are no loops
        return max(1, min(turns, MOST_TURNS, self.room // body.peak_elements))

    def piece(self) -> Piece:
        """All that the stage's outputs need, and what renormalises them."""
        stage = self.stage
        position = {definition.name: n for n, definition in enumerate(stage.outputs)}
        scales, number = [], {}
        for group in stage.scale_groups:
            if group.definition is not None:
                number[group.group] = len(scales)
                scales.append((position[group.definition], group.power))
        powers = []
        for definition in stage.outputs:
            powers.append(tuple((number[g], p) for g, p in definition.powers if g in number))
        return piece_of(
            self.builder,
            self.outputs,
            self.inputs,
            unshared=self.unshared,
            scales=tuple(scales),
            powers=tuple(powers),
        )


def leading(definitions: Sequence[Definition], definition: Definition) -> Axes:
    """What leads to a definition and has an axis for the first of its indices `over`.

    Returns:
        Names, those of inputs too, and which of their axes it is.
    """
    steps = {d.name: d for d in definitions if not d.kept}
    axes: Axes = {}
    waiting = [(definition, definition.over[0])]
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


def _without(definition: Definition, axes: Axes) -> Definition:
    """The definition at one value of the index: that axis is gone from it and from all it reads."""
    terms = []
    for term in definition.terms:
        operands = [Operand(o.name, _dropped(o.indices, axes.get(o.name))) for o in term.operands]
        terms.append(Term(term.weight, tuple(operands)))
    indices = _dropped(definition.indices, axes.get(definition.name))
    # The last axes need not be the exchangeable ones any more.
    return dataclasses.replace(definition, indices=indices, terms=tuple(terms), exchangeable=0)


def _dropped(items: tuple, place: int | None) -> tuple:
    """All items but the one in that place."""
    return items if place is None else items[:place] + items[place + 1 :]


def _names_read(definitions: list[Definition]) -> list[str]:
    """Names that definitions read and do not define, by first use."""
    own = {definition.name for definition in definitions}
    names: dict[str, None] = {}
    for definition in definitions:
        for term in definition.terms:
            names |= dict.fromkeys(o.name for o in term.operands)
    return [name for name in names if name not in own]
