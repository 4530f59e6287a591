"""Assembling a stage: routes for its products, sharing between them.

In: a numbered stage. Out: a `Piece`.

Effort follows cost. Every product gets a greedy path in each way it is written; only those that
matter are searched again, harder. A stage of few products is then tuned as a whole by coordinate
descent over the routes of its dearest products, since the best path for one alone need not share
most with the others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from tnsim.engine import pathfinding as paths
from tnsim.engine.canonical import Tensor, canonical
from tnsim.engine.pathfinding import Route
from tnsim.engine.piece import Operation, Piece
from tnsim.engine.problem import Definition, Operand, Stage, Term
from tnsim.engine.sharing import Builder, Use, product, reduced

FEW, SMALL_STAGE = (
    12,
    60,
)  # products: up to FEW always, up to SMALL_STAGE where it is worth it, all are tuned together
WORTH_SEARCHING = 10**8  # price of a stage, see `paths`: some milliseconds
MATTERS, HEAVY = 2e-4, 2e-3  # share of it
MAX_ATTEMPTS = 40
NEGLIGIBLE = 0.01

Shapes = tuple[tuple[int, ...], ...]
Key = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[tuple[int, int], ...]]


def build_piece(stage: Stage, shapes: Shapes, symmetric: tuple[bool, ...], large: int) -> Piece:
    """Search routes for every product of a stage and assemble them with what they share.

    `large`: elements beyond which an intermediate is computed in chunks.
    """
    stage = Stage(tuple(_distinct_terms(d) for d in stage.definitions), stage.scale_groups)
    search = _Search(large)
    search.cheapest_ways(stage, shapes)
    best = _Assembly(stage, shapes, symmetric, search.pick, {})
    terms = _count(stage)
    if terms <= FEW or (terms <= SMALL_STAGE and best.cost >= WORTH_SEARCHING):
        best = search.tuned(
            best, lambda pick, forms: _Assembly(stage, shapes, symmetric, pick, forms)
        )
    piece = best.piece(stage)
    if piece.peak_elements > large and any(d.over for d in stage.definitions):
        looped = _Assembly(stage, shapes, symmetric, search.pick, {}, loops=True).piece(stage)
        piece = min(piece, looped, key=lambda p: p.peak_elements)
    return piece


def settle(stage: Stage, shapes: Shapes, large: int) -> tuple[tuple[int, ...], ...]:
    """For every term of every definition, which of the ways it is written is the cheapest to
    contract.
    """
    return _Search(large).cheapest_ways(stage, shapes)


def written(definition: Definition, ways: tuple[int, ...]) -> Definition:
    """The definition with every term in the way chosen for it."""
    terms = tuple(
        Term(t.weight, (t.operands, *t.otherwise)[way])
        for t, way in zip(definition.terms, ways, strict=True)
    )
    return dataclasses.replace(definition, terms=terms)


def _count(stage: Stage) -> int:
    return sum(len(d.terms) for d in stage.definitions)


class _Search:
    """Routes found so far, by the structure of the product, and the one chosen for each."""

    def __init__(self, large: int):
        self.large = large
        self.found: dict[Key, tuple[Route, ...]] = {}
        self.effort: dict[Key, int] = {}
        self.chosen: dict[Key, int] = {}

    def look(self, key: Key, effort: int) -> Route:
        if self.effort.get(key, -1) < effort:
            self.found[key] = paths.routes(*key, effort, self.large)
            self.effort[key] = effort
        return self.found[key][0]

    def pick(self, key: Key) -> Route:
        self.look(key, 0)
        return self.found[key][self.chosen.get(key, 0)]

    def cheapest_ways(self, stage: Stage, shapes: Shapes) -> tuple[tuple[int, ...], ...]:
        """Search every term in every way it is written, harder where the stage's cost lies.

        The cheapest way of each.
        """
        sizes = dict(zip((f"in{n}" for n in range(len(shapes))), shapes, strict=True))
        ways: list[list[list[Key]]] = []
        for definition in stage.definitions:
            ways.append(
                [
                    [_key(o, definition.indices, sizes) for o in (t.operands, *t.otherwise)]
                    for t in definition.terms
                ]
            )
            sizes[definition.name] = shape_of(definition, sizes)
        every = [way for terms in ways for way in terms]
        few = len(every) <= FEW
        for effort, share in ((0, 0.0), (1, 0.0 if few else MATTERS), (2, HEAVY)):
            prices = [
                min(self.found[key][0].price if effort else 0 for key in way) for way in every
            ]
            if effort == 0 or (effort == 1 and few) or sum(prices) >= WORTH_SEARCHING:
                for way, price in zip(every, prices, strict=True):
                    if price >= share * sum(prices):
                        for key in way:
                            self.look(key, effort)
        return tuple(
            tuple(min(range(len(w)), key=lambda n, w=w: self.found[w[n]][0].price) for w in terms)
            for terms in ways
        )

    def tuned(self, best: _Assembly, assemble) -> _Assembly:
        """Coordinate descent: a route stays if it makes the whole stage cheaper."""
        attempts, improved, forms = 0, True, {}
        keys = sorted(best.keys, key=lambda key: self.found[key][0].price, reverse=True)
        while improved:
            improved = False
            for key in keys:
                self.look(key, 1)
                if self.found[key][0].price < NEGLIGIBLE * best.cost:
                    continue
                for n in range(len(self.found[key])):
                    kept = self.chosen.get(key, 0)
                    if n == kept or attempts >= MAX_ATTEMPTS:
                        continue
                    self.chosen[key], attempts = n, attempts + 1
                    attempt = assemble(self.pick, forms)
                    if attempt.cost < best.cost:
                        best, improved = attempt, True
                    else:
                        self.chosen[key] = kept
        return best


def _key(
    operands: tuple[Operand, ...], indices: tuple[str, ...], sizes: dict[str, tuple[int, ...]]
) -> Key:
    """Structure of a product.

    Labels numbered by first use, what is left of each operand after reducing it alone.
    """
    return reduced([(o.indices, sizes[o.name]) for o in operands], indices)


def shape_of(definition: Definition, sizes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of a definition, from the shapes of what it names."""
    known = {
        x: n
        for o in definition.terms[0].operands
        for x, n in zip(o.indices, sizes[o.name], strict=True)
    }
    return tuple(known[x] for x in definition.indices)


def _distinct_terms(definition: Definition) -> Definition:
    """Terms that are one network up to the names of summed indices become one, with the sum of
    their weights.
    """
    numbers = {
        x: n
        for n, x in enumerate(dict.fromkeys(o.name for t in definition.terms for o in t.operands))
    }
    weights: dict = {}
    for term in definition.terms:
        labels = {x: n for n, x in enumerate(definition.indices)}
        tensors: list[Tensor] = []
        for n in range(len(labels)):
            tensors.append((-1 - n, (n,)))  # marks that keep the outputs apart
        for o in term.operands:
            tensors.append(
                (numbers[o.name], tuple(labels.setdefault(x, len(labels)) for x in o.indices))
            )
        key, _ = canonical(tensors, range(len(definition.indices)), lambda ref: False)
        kept, weight = weights.get(key, (term, 0.0))
        weights[key] = kept, weight + term.weight
    terms = [dataclasses.replace(term, weight=weight) for term, weight in weights.values()]
    left = tuple(term for term in terms if term.weight)
    return dataclasses.replace(definition, terms=left or tuple(terms[:1]))


def leading(stage: Stage, definition: Definition) -> dict[str, int]:
    """What leads to a definition and has an axis for its index `over`.

    Names, of inputs too, and which axis that is.
    """
    by_name = {d.name: d for d in stage.definitions if not d.kept}
    found: dict[str, int] = {}

    def visit(terms: tuple[Term, ...], index: str) -> None:
        for operand in (o for term in terms for o in term.operands if index in o.indices):
            axis = operand.indices.index(index)
            if found.setdefault(operand.name, axis) != axis:
                raise ValueError(f"{operand.name} is read along two axes")
            if operand.name in by_name and operand.name not in seen:
                seen.add(operand.name)
                visit(by_name[operand.name].terms, by_name[operand.name].indices[axis])

    seen: set[str] = set()
    if definition.over is not None:
        visit(definition.terms, definition.over)
    return found


def _without(definition: Definition, axes: dict[str, int]) -> Definition:
    """The definition at one value of the index: that axis is gone from it and from all it reads."""

    def dropped(name: str, indices: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(index for axis, index in enumerate(indices) if axis != axes.get(name))

    terms = tuple(
        Term(t.weight, tuple(Operand(o.name, dropped(o.name, o.indices)) for o in t.operands))
        for t in definition.terms
    )
    return dataclasses.replace(
        definition, indices=dropped(definition.name, definition.indices), terms=terms
    )


class _Assembly:
    """One assembly of a stage under a choice of routes: its builder, its outputs, its cost."""

    def __init__(
        self,
        stage: Stage,
        shapes: Shapes,
        symmetric: tuple[bool, ...],
        pick,
        forms: dict,
        loops: bool = False,
    ):
        self.builder = builder = Builder(forms)
        self.inputs = len(shapes)
        self.keys: dict[Key, None] = {}
        self.unshared, self.pick = 0, pick
        values = {
            f"in{n}": builder.atom(s, symmetric=y)
            for n, (s, y) in enumerate(zip(shapes, symmetric, strict=True))
        }
        self.outputs: list[int] = []
        sums = {d.name: leading(stage, d) for d in stage.definitions if loops and d.over}
        for definition in stage.definitions:
            if definition.name in sums:
                values[definition.name] = self.loop(
                    stage, definition, sums[definition.name], values
                )
            else:  # what only a loop needs is not reached from an output and falls away
                values[definition.name] = self.value(builder, definition, values)
            if definition.kept:
                self.outputs.append(values[definition.name])
        self.cost = builder.cost(self.outputs)

    def route(self, key: Key) -> Route:
        self.keys[key] = None
        found = self.pick(key)
        self.unshared += found.multiplications
        return found

    def value(self, builder: Builder, definition: Definition, values: dict[str, int]) -> int:
        """The sum of a definition's terms as one value of a builder."""
        items = []
        for term in definition.terms:
            uses = [Use(values[o.name], o.indices) for o in term.operands]
            items.append((term.weight, product(builder, uses, definition.indices, self.route)))
        total = builder.ordered(builder.total(items, definition.indices), definition.indices)
        if definition.symmetric:
            builder.symmetric.add(total.value)
        return total.value

    def loop(
        self, stage: Stage, definition: Definition, axes: dict[str, int], values: dict[str, int]
    ) -> int:
        """A definition added up over its index `over`.

        Everything that has an axis for it is computed once per value, inside.
        """
        chain = [_without(d, axes) for d in stage.definitions if d.name in axes or d is definition]
        own = {d.name for d in chain}
        names = list(
            dict.fromkeys(
                o.name for d in chain for t in d.terms for o in t.operands if o.name not in own
            )
        )
        shapes = [self.builder.values[values[name]].shape for name in names]
        inner, known = Builder(), {}
        for name, shape in zip(names, shapes, strict=True):
            known[name] = inner.atom(
                tuple(n for axis, n in enumerate(shape) if axis != axes.get(name))
            )
        for d in chain:
            known[d.name] = self.value(inner, d, known)
        body = inner.piece([known[definition.name]], len(names))
        count = next(
            shape[axes[name]] for name, shape in zip(names, shapes, strict=True) if name in axes
        )
        sizes = {
            n: label + 1
            for label, n in enumerate(dict.fromkeys(n for shape in shapes for n in shape))
        }  # one a size
        labels = tuple(
            tuple(0 if axis == axes.get(name) else sizes[n] for axis, n in enumerate(shape))
            for name, shape in zip(names, shapes, strict=True)
        )
        shape = body.value_shapes[body.outputs[0]]
        operation = Operation(
            "loop",
            tuple(values[name] for name in names),
            labels,
            tuple(sizes[n] for n in shape),
            (),
            (0,),
            body,
        )
        return self.builder.loop(operation, shape, count * body.multiplications)

    def piece(self, stage: Stage) -> Piece:
        position = {d.name: n for n, d in enumerate(stage.outputs)}
        live = [
            (g.group, g.definition, g.power) for g in stage.scale_groups if g.definition is not None
        ]
        slot = {group: n for n, (group, _, _) in enumerate(live)}
        return self.builder.piece(
            self.outputs,
            self.inputs,
            unshared=self.unshared,
            scales=tuple((position[name], power) for _, name, power in live),
            powers=tuple(
                tuple((slot[g], p) for g, p in d.powers if g in slot) for d in stage.outputs
            ),
        )


def split(piece: Piece, limit: int) -> list[tuple[Piece, tuple[int, ...], tuple[int, ...]]]:
    """Cut a long piece into pieces of at most `limit` operations, with the numbers of the values
    each takes and gives.

    XLA's compile time grows faster than linearly in the length of a program. Scales are applied
    by the last piece.
    """
    count, inputs = len(piece.operations), len(piece.shapes)
    if count <= limit:
        return [(piece, tuple(range(inputs)), piece.outputs)]
    found = []
    chunks = math.ceil(count / limit)
    bounds = [round(count * n / chunks) for n in range(chunks + 1)]
    for start, stop in itertools.pairwise(bounds):
        operations = piece.operations[start:stop]
        inside = set(range(inputs + start, inputs + stop))
        last = stop == count
        later = set(piece.outputs).union(*(op.args for op in piece.operations[stop:]))
        gives = piece.outputs if last else tuple(sorted(inside & later))
        takes = tuple(
            sorted({a for op in operations for a in op.args} - inside | (set(gives) - inside))
        )
        number = {a: n for n, a in enumerate((*takes, *sorted(inside)))}
        body = Piece(
            shapes=tuple(piece.value_shapes[a] for a in takes),
            operations=tuple(
                op._replace(args=tuple(number[a] for a in op.args)) for op in operations
            ),
            outputs=tuple(number[a] for a in gives),
            scales=piece.scales if last else (),
            powers=piece.powers if last else ((),) * len(gives),
            unshared=piece.unshared if last else 0,
        )
        found.append((body, takes, gives))
    return found
