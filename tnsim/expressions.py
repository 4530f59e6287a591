"""Shared expressions: products and sums of arrays, each distinct one once. In: products. Out: a piece.

A `Builder` numbers values. A contraction is known by the canonical form of the network it stands for, so
the same sub-network reached twice, in another diagram or another order, is one value. A sum of terms
with a common factor adds first and multiplies once (the distributive law), recursively. Nothing is
executed or even kept here unless an output reaches it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tnsim.canonical import canonical
from tnsim.plans import Operation

Label = int | str


class Use(NamedTuple):
    """A value with a name for each of its axes."""

    value: int
    labels: tuple[Label, ...]


@dataclass(frozen=True)
class _Value:
    shape: tuple[int, ...]
    atoms: tuple[tuple[int, tuple[int, ...]], ...]  # the network it stands for, over values that are not products
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
        self._forms = {} if forms is None else forms  # canonical forms, shared by attempts at one stage

    def atom(self, shape: tuple[int, ...], symmetric: bool = False, operation: Operation | None = None) -> int:
        """A value that is not taken apart: an input, or a sum."""
        number, axes = len(self.values), tuple(range(len(shape)))
        self.values.append(_Value(shape, ((number, axes),), axes, operation))
        if symmetric:
            self.symmetric.add(number)
        return number

    def contract(self, uses: Iterable[Use], output: Iterable[Label]) -> Use:
        """The product of one or two values, summed over labels not in `output`; its labels are `output`, reordered."""
        uses, output = tuple(uses), tuple(output)
        names = {label: n for n, label in enumerate(dict.fromkeys(x for u in uses for x in u.labels))}
        back = tuple(names)
        shorthand = tuple((u.value, tuple(names[x] for x in u.labels)) for u in uses), frozenset(names[x] for x in output)
        if shorthand not in self._uses:
            self._uses[shorthand] = self._contract(uses, output, names)
        found = self._uses[shorthand]
        return Use(found.value, tuple(back[n] for n in found.labels))

    def _contract(self, uses: tuple[Use, ...], output: tuple[Label, ...], names: dict[Label, int]) -> Use:
        """The same with labels numbered: look the network up by its canonical form, or add it."""
        fresh = itertools.count(len(names))
        atoms = []
        for use in uses:
            value = self.values[use.value]
            local = dict(zip(value.axes, (names[x] for x in use.labels), strict=True))
            for ref, labels in value.atoms:
                atoms.append((ref, tuple(local[x] if x in local else local.setdefault(x, next(fresh)) for x in labels)))
        symmetric = frozenset(ref for ref, _ in atoms if ref in self.symmetric)
        form = tuple(atoms), frozenset(names[x] for x in output), symmetric
        if form not in self._forms:
            self._forms[form] = canonical(atoms, [names[x] for x in output], symmetric.__contains__)
        key, order = self._forms[form]
        if key not in self._known:
            sizes = {names[x]: n for u in uses for x, n in zip(u.labels, self.values[u.value].shape, strict=True)}
            labels = tuple(tuple(names[x] for x in u.labels) for u in uses)
            operation = Operation("contract", tuple(u.value for u in uses), labels, order)
            cost = math.prod(sizes.values()) if len(uses) == 2 else 0
            self._known[key] = len(self.values)
            self.values.append(_Value(tuple(sizes[x] for x in order), tuple(atoms), order, operation, cost))
        return Use(self._known[key], order)

    def total(self, items: Iterable[tuple[float, Use]], output: tuple[Label, ...]) -> Use:
        """`sum(weight * use)` with its axes in the order `output`, common factors taken out."""
        items = self._factored(self._merged(items))
        if len(items) == 1 and items[0][0] == 1.0:
            return items[0][1]
        position = {label: n for n, label in enumerate(output)}
        parts = sorted((use.value, tuple(position[x] for x in use.labels), weight) for weight, use in items)
        key = ("sum", len(output), tuple(parts))
        if key not in self._known:
            operation = Operation(
                "sum", tuple(v for v, _, _ in parts), tuple(x for _, x, _ in parts), tuple(range(len(output))), tuple(w for *_, w in parts)
            )
            _, use = items[0]
            sizes = dict(zip(use.labels, self.values[use.value].shape, strict=True))
            self._known[key] = self.atom(tuple(sizes[x] for x in output), operation=operation)
        return Use(self._known[key], output)

    def _merged(self, items: Iterable[tuple[float, Use]]) -> list[tuple[float, Use]]:
        weights: dict[Use, float] = {}
        for weight, use in items:
            weights[use] = weights.get(use, 0.0) + weight
        return [(w, use) for use, w in weights.items() if w != 0.0]

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
                names.setdefault(label, f"{position}{primes}")  # a name that no outer factor has used
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

    def cost(self, outputs: Iterable[int]) -> tuple[int, int]:
        """(multiplications, elements written) of everything the outputs need."""
        values = [self.values[n] for n in self.reachable(outputs)]
        return sum(v.cost for v in values), sum(math.prod(v.shape) for v in values if v.operation)


@dataclass(frozen=True)
class _Factor:
    signature: tuple
    factor: Use
    rest: Use
    output: tuple[Label, ...]
    cost: int


def product(builder: Builder, uses: list[Use], output: tuple[Label, ...], path: Callable) -> Use:
    """One term: reduce what a single array can, then contract pairwise along `path(inputs, output, sizes)`."""
    uses = list(uses)
    for n, use in enumerate(uses):
        elsewhere = set(output).union(*(u.labels for m, u in enumerate(uses) if m != n))
        kept = tuple(x for x in dict.fromkeys(use.labels) if x in elsewhere)
        if kept != use.labels:
            uses[n] = builder.contract([use], kept)
    if len(uses) == 1:
        return uses[0]
    names = {label: n for n, label in enumerate(dict.fromkeys(x for u in uses for x in u.labels))}
    sizes = {names[x]: s for u in uses for x, s in zip(u.labels, builder.values[u.value].shape, strict=True)}
    inputs = tuple(tuple(names[x] for x in u.labels) for u in uses)
    pool: dict[int, Use] = dict(enumerate(uses))
    for step, (one, two) in enumerate(path(inputs, tuple(names[x] for x in output), sizes)):
        pair = pool.pop(one), pool.pop(two)
        needed = set(output).union(*(u.labels for u in pool.values()))
        kept = tuple(x for x in dict.fromkeys(pair[0].labels + pair[1].labels) if x in needed)
        pool[len(uses) + step] = builder.contract(pair, kept)
    return pool.popitem()[1]
