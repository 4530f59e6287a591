"""Shared expressions: products and sums of arrays, each distinct one once.

In: products. Out: a piece.

A `Builder` numbers values. A contraction is known by the canonical form of the network it stands
for, so the same sub-network reached twice, in another diagram or another order, is one value. A
sum of terms with a common factor adds first and multiplies once (the distributive law),
recursively. Nothing is executed or even kept here unless an output reaches it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tnsim.engine.canonical import canonical
from tnsim.engine.pathfinding import CACHED, WRITING
from tnsim.engine.piece import Operation, Piece

Label = int | str
Path = tuple[tuple[int, ...], ...]


class Use(NamedTuple):
    """A value with a name for each of its axes."""

    value: int
    labels: tuple[Label, ...]


@dataclass(frozen=True)
class _Value:
    shape: tuple[int, ...]
    atoms: tuple[
        tuple[int, tuple[int, ...]], ...
    ]  # the network it stands for, over values that are not products
    axes: tuple[int, ...]
    operation: Operation | None = None
    cost: int = 0


class Builder:
    """Values of one piece under construction."""

    def __init__(self, forms: dict | None = None) -> None:
        self.values: list[_Value] = []
        self.symmetric: set[int] = set()
        self._known: dict = {}
        self._uses: dict = {}
        self._forms = (
            {} if forms is None else forms
        )  # canonical forms, shared by attempts at one stage

    def atom(
        self, shape: tuple[int, ...], symmetric: bool = False, operation: Operation | None = None
    ) -> int:
        """A value that is not taken apart: an input, or a sum."""
        number, axes = len(self.values), tuple(range(len(shape)))
        self.values.append(_Value(shape, ((number, axes),), axes, operation))
        if symmetric:
            self.symmetric.add(number)
        return number

    def contract(self, uses: Iterable[Use], output: Iterable[Label]) -> Use:
        """The product of one or two values, summed over labels not in `output`.

        Its labels are `output`, reordered.
        """
        uses, output = tuple(uses), tuple(output)
        names = {
            label: n for n, label in enumerate(dict.fromkeys(x for u in uses for x in u.labels))
        }
        back = tuple(names)
        shorthand = (
            tuple((u.value, tuple(names[x] for x in u.labels)) for u in uses),
            frozenset(names[x] for x in output),
        )
        if shorthand not in self._uses:
            self._uses[shorthand] = self._contract(uses, output, names)
        found = self._uses[shorthand]
        return Use(found.value, tuple(back[n] for n in found.labels))

    def _contract(
        self, uses: tuple[Use, ...], output: tuple[Label, ...], names: dict[Label, int]
    ) -> Use:
        """The same with labels numbered: look the network up by its canonical form, or add it."""
        fresh = itertools.count(len(names))
        atoms = []
        for use in uses:
            value = self.values[use.value]
            local = dict(zip(value.axes, (names[x] for x in use.labels), strict=True))
            for ref, labels in value.atoms:
                atoms.append(
                    (
                        ref,
                        tuple(
                            local[x] if x in local else local.setdefault(x, next(fresh))
                            for x in labels
                        ),
                    )
                )
        symmetric = frozenset(ref for ref, _ in atoms if ref in self.symmetric)
        form = tuple(atoms), frozenset(names[x] for x in output), symmetric
        if form not in self._forms:
            self._forms[form] = canonical(atoms, [names[x] for x in output], symmetric.__contains__)
        key, order = self._forms[form]
        if key not in self._known:
            sizes = {
                names[x]: n
                for u in uses
                for x, n in zip(u.labels, self.values[u.value].shape, strict=True)
            }
            wanted = tuple(names[x] for x in output)
            labels = tuple(tuple(names[x] for x in u.labels) for u in uses)
            operation = Operation("contract", tuple(u.value for u in uses), labels, wanted)
            cost = math.prod(sizes.values()) if len(uses) == 2 else 0
            # The axes stand as the first who asked wants them, by their place in canonical order.
            self._known[key] = len(self.values), tuple(order.index(x) for x in wanted)
            self.values.append(
                _Value(tuple(sizes[x] for x in wanted), tuple(atoms), wanted, operation, cost)
            )
        number, places = self._known[key]
        return Use(number, tuple(order[place] for place in places))

    def loop(self, operation: Operation, shape: tuple[int, ...], cost: int) -> int:
        """A loop over chunks as a value that is not taken apart; equal loops are one value."""
        key = ("loop", operation)
        if key not in self._known:
            self._known[key] = self.atom(shape, operation=operation)
            number = self._known[key]
            self.values[number] = dataclasses.replace(self.values[number], cost=cost)
        return self._known[key]

    def ordered(self, use: Use, output: tuple[Label, ...]) -> Use:
        """The same value with its axes in a given order."""
        if use.labels == output:
            return use
        position = {x: n for n, x in enumerate(output)}
        labels = tuple(position[x] for x in use.labels)
        sizes = dict(zip(labels, self.values[use.value].shape, strict=True))
        axes = tuple(range(len(output)))
        operation = Operation("sum", (use.value,), (labels,), axes, (1.0,))
        return Use(self.atom(tuple(sizes[n] for n in axes), operation=operation), output)

    def piece(self, outputs: list[int], inputs: int, **scaling: Any) -> Piece:
        """Everything that the outputs need, renumbered.

        The first `inputs` values, then operations in order.
        """
        needed = [n for n in self.reachable(outputs) if n >= inputs]
        number = {n: n for n in range(inputs)} | {n: inputs + i for i, n in enumerate(needed)}
        operations = []
        for n in needed:
            op = self.values[n].operation
            assert op is not None, "every value after the inputs is computed"
            operations.append(
                op._replace(
                    args=tuple(number[a] for a in op.args), weights=tuple(map(float, op.weights))
                )
            )
        shapes = tuple(value.shape for value in self.values[:inputs])
        return Piece(shapes, tuple(operations), tuple(number[n] for n in outputs), **scaling)

    def total(self, items: Iterable[tuple[float, Use]], output: tuple[Label, ...]) -> Use:
        """`sum(weight * use)` with its axes in the order `output`, common factors taken out."""
        items = self._factored(self._merged(items))
        if len(items) == 1 and items[0][0] == 1.0:
            return items[0][1]
        position = {label: n for n, label in enumerate(output)}
        parts = sorted(
            (use.value, tuple(position[x] for x in use.labels), weight) for weight, use in items
        )
        key = ("sum", len(output), tuple(parts))
        if key not in self._known:
            operation = Operation(
                "sum",
                tuple(v for v, _, _ in parts),
                tuple(x for _, x, _ in parts),
                tuple(range(len(output))),
                tuple(w for *_, w in parts),
            )
            _, use = items[0]
            sizes = dict(zip(use.labels, self.values[use.value].shape, strict=True))
            self._known[key] = self.atom(tuple(sizes[x] for x in output), operation=operation)
        return Use(self._known[key], output)

    def _merged(self, items: Iterable[tuple[float, Use]]) -> list[tuple[float, Use]]:
        weights: dict[Use, float] = {}
        for weight, use in items:
            weights[use] = weights.get(use, 0.0) + weight
        left = [(w, use) for use, w in weights.items() if w != 0.0]
        return left or [(0.0, use) for use in weights][:1]  # where all cancels, zero has a shape

    def _factored(self, items: list[tuple[float, Use]]) -> list[tuple[float, Use]]:
        while len(items) > 1:
            groups: dict = {}
            for n, (_, use) in enumerate(items):
                for factor in self._factors(use):
                    groups.setdefault(factor.signature, {}).setdefault(n, factor)
            shared = [g for g in groups.values() if len(g) > 1]
            if not shared:
                break
            best = max(shared, key=lambda g: (len(g) - 1) * sum(f.cost for f in g.values()))
            inner = [(items[n][0], factor.rest) for n, factor in best.items()]
            one = next(iter(best.values()))
            total = self.total(inner, one.rest.labels)
            product = self.contract((total, one.factor), one.output)
            items = [item for n, item in enumerate(items) if n not in best] + [(1.0, product)]
            items = self._merged(items)
        return items

    def _factors(self, use: Use) -> list[_Factor]:
        """The ways to read a value as factor times rest, in names that other terms share."""
        value = self.values[use.value]
        op = value.operation
        if op is None or op.kind != "contract" or len(op.args) != 2:
            return []
        outer = dict(zip(op.output, use.labels, strict=True))
        found = []
        primes = "'" * (1 + max((str(x).count("'") for x in use.labels), default=0))
        for f, g in ((0, 1), (1, 0)):
            names = dict(outer)
            for position, label in enumerate(op.labels[f]):
                names.setdefault(
                    label, f"{position}{primes}"
                )  # a name that no outer factor has used
            if any(label not in names for label in op.labels[g]):
                continue
            factor = Use(op.args[f], tuple(names[x] for x in op.labels[f]))
            rest = Use(op.args[g], tuple(names[x] for x in op.labels[g]))
            signature = (factor, frozenset(rest.labels))
            found.append(_Factor(signature, factor, rest, use.labels, value.cost))
        return found

    def reachable(self, outputs: Iterable[int]) -> list[int]:
        """Values that the outputs need, arguments before results, depth first to keep few alive."""
        order: dict[int, None] = {}

        def visit(number: int) -> None:
            if number in order:
                return
            op = self.values[number].operation
            for arg in op.args if op else ():
                visit(arg)
            order[number] = None

        for output in outputs:
            visit(output)
        return list(order)

    def cost(self, outputs: Iterable[int]) -> int:
        """Price of everything the outputs need, in the measure of `paths`."""
        values = [self.values[n] for n in self.reachable(outputs)]
        sizes = [math.prod(v.shape) for v in values if v.operation]
        return sum(v.cost for v in values) + WRITING * sum(size for size in sizes if size > CACHED)


@dataclass(frozen=True)
class _Factor:
    signature: tuple
    factor: Use
    rest: Use
    output: tuple[Label, ...]
    cost: int


def reduced(
    operands: list[tuple[tuple[Label, ...], tuple[int, ...]]], output: tuple[Label, ...]
) -> tuple:
    """Structure of a product after each operand is reduced alone.

    (labels of each, output, sizes), labels numbered.
    """
    kept = _kept([labels for labels, _ in operands], output)
    sizes = {x: n for labels, shape in operands for x, n in zip(labels, shape, strict=True)}
    names = {
        label: n for n, label in enumerate(dict.fromkeys(x for labels in kept for x in labels))
    }
    inputs = tuple(tuple(names[x] for x in labels) for labels in kept)
    return inputs, tuple(names[x] for x in output), tuple((n, sizes[x]) for x, n in names.items())


def _kept(operands: list[tuple[Label, ...]], output: tuple[Label, ...]) -> list[tuple[Label, ...]]:
    """Labels of each operand, once each, without those that no other operand and no output has."""
    return [
        tuple(
            x
            for x in dict.fromkeys(labels)
            if x in set(output).union(*(o for m, o in enumerate(operands) if m != n))
        )
        for n, labels in enumerate(operands)
    ]


def product(builder: Builder, uses: list[Use], output: tuple[Label, ...], route: Callable) -> Use:
    """One term: reduce what a single array can, then contract pairwise along `route(structure)`,
    in chunks if it says so.
    """
    structure = reduced([(u.labels, builder.values[u.value].shape) for u in uses], output)
    kept = _kept([u.labels for u in uses], output)
    uses = [
        u if labels == u.labels else builder.contract([u], labels)
        for u, labels in zip(uses, kept, strict=True)
    ]
    if len(uses) == 1:
        return uses[0]
    found = route(structure)
    if found.chunks:
        names = list(dict.fromkeys(x for labels in kept for x in labels))
        return _chunked(builder, uses, output, found, tuple(names[n] for n in found.chunks))
    return _pairwise(builder, uses, output, found.path)


def _pairwise(builder: Builder, uses: list[Use], output: tuple[Label, ...], path: Path) -> Use:
    pool: dict[int, Use] = dict(enumerate(uses))
    place = {label: n for n, label in enumerate(output)}
    for step, (one, two) in enumerate(path):
        pair = pool.pop(one), pool.pop(two)
        needed = set(output).union(*(u.labels for u in pool.values()))
        open_labels = [x for x in dict.fromkeys(pair[0].labels + pair[1].labels) if x in needed]
        # In the order of the result, so that what is multiplied and added up needs no transposes.
        kept = tuple(sorted(open_labels, key=lambda x: place.get(x, len(place))))
        pool[len(uses) + step] = builder.contract(pair, kept)
    return pool.popitem()[1]


def _chunked(
    builder: Builder,
    uses: list[Use],
    output: tuple[Label, ...],
    found: Any,
    chunks: tuple[Label, ...],
) -> Use:
    """One term as a loop over the labels `chunks`."""
    names = {label: n for n, label in enumerate(dict.fromkeys(x for u in uses for x in u.labels))}
    sizes = {
        x: s for u in uses for x, s in zip(u.labels, builder.values[u.value].shape, strict=True)
    }
    inner, fixed = Builder(), []
    for use in uses:
        labels = tuple(x for x in use.labels if x not in chunks)
        fixed.append(Use(inner.atom(tuple(sizes[x] for x in labels)), labels))
    body = inner.piece(
        [inner.ordered(_pairwise(inner, fixed, output, found.path), output).value], len(uses)
    )
    operation = Operation(
        "loop",
        tuple(u.value for u in uses),
        tuple(tuple(names[x] for x in u.labels) for u in uses),
        tuple(names[x] for x in output),
        (),
        tuple(names[x] for x in chunks),
        body,
    )
    cost = math.prod(sizes[x] for x in chunks) * body.multiplications
    return Use(builder.loop(operation, tuple(sizes[x] for x in output), cost), output)
