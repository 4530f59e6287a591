"""A stage put together under a choice of routes. In: a stage, routes. Out: values, and their price.

A definition with an index `over` may be computed in a loop over it, with everything that leads to
it and has an axis for that index: then no value inside the loop has this axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tnsim.engine.factoring import total
from tnsim.engine.pathfinding import Route
from tnsim.engine.piece import Operation, Piece
from tnsim.engine.problem import Definition, Operand, Stage, Term
from tnsim.engine.route_search import Shapes
from tnsim.engine.sharing import Builder, Forms, Use, Weighted, piece_of, price
from tnsim.engine.term_products import Structure, product

Axes = dict[str, int]
"""Names, and which of their axes is that of a loop."""


class Assembly:
    """One assembly of a stage under a choice of routes.

    Args:
        stage: Its inputs are named in0, in1, ...
        shapes: Of the inputs.
        exchangeable: Of each input, how many axes, the last ones, may be exchanged.
        pick: The route of a product.
        forms: Canonical forms, shared by attempts at one stage.
        loops: Whether definitions with an index `over` become loops over it.

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
        loops: bool = False,
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
        for definition in stage.definitions:
            # What only a loop needs is not reached from an output, and is left out.
            if loops and definition.over is not None:
                self.values[definition.name] = self.loop(definition)
            else:
                self.values[definition.name] = self.value(self.builder, definition, self.values)
        self.outputs = [self.values[definition.name] for definition in stage.outputs]
        self.price = price(self.builder, self.outputs)

    def route(self, key: Structure) -> Route:
        """The route of a product; takes down that it was asked for."""
        route = self.pick(key)
        self.keys[key] = None
        self.unshared += route.multiplications
        return route

    def value(self, builder: Builder, definition: Definition, values: dict[str, int]) -> int:
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

    def loop(self, definition: Definition) -> int:
        """A definition added up over its index `over`.

        Everything that leads to it and has an axis for the index is computed once per turn, inside.
        """
        axes = leading(self.stage, definition)
        chain = [_without(d, axes) for d in self.stage.definitions if d.name in axes]
        chain.append(_without(definition, axes))
        names = _names_read(chain)
        shapes = [self.builder.values[self.values[name]].shape for name in names]

        inner = Builder()
        values: dict[str, int] = {}
        for name, shape in zip(names, shapes, strict=True):
            values[name] = inner.atom(_dropped(shape, axes.get(name)))
        for d in chain:
            values[d.name] = self.value(inner, d, values)
        body = piece_of(inner, [values[definition.name]], len(names))

        # Labels only have to tell sizes, and the loop's axis: 0 is that axis, each size is another.
        sizes: dict[int, int] = {}
        labels = []
        turns = 1
        for name, shape in zip(names, shapes, strict=True):
            of = [sizes.setdefault(size, len(sizes) + 1) for size in shape]
            if name in axes:
                turns = shape[axes[name]]
                of[axes[name]] = 0
            labels.append(tuple(of))
        shape = body.value_shapes[body.outputs[0]]
        operation = Operation(
            kind="loop",
            args=tuple(self.values[name] for name in names),
            labels=tuple(labels),
            output=tuple(sizes[size] for size in shape),
            chunks=(0,),
            body=body,
        )
        return self.builder.computed(operation, turns * body.multiplications)

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


def leading(stage: Stage, definition: Definition) -> Axes:
    """What leads to a definition and has an axis for its index `over`: names, of inputs too."""
    steps = {d.name: d for d in stage.definitions if not d.kept}
    axes: Axes = {}
    waiting = [(definition, definition.over)]
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
