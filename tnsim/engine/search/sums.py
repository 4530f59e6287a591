"""The sum of products, made cheaper as a whole: by rotations, and by common factors.

The cheapest path of a product alone need not share most with the other products of a sum. In a
`Builder` every distinct array is a single value, computed in one way. A rotation at a value
computes `(a b) c` as `(a c) b` or `(b c) a`. It pays where the new pair is there already, where
nothing else reads `a b`, or where the product then shares a factor with another summand.

Common factors are taken out by the distributive law, greedily: of all factors that several summands
share, the factor that saves most multiplications is taken out, the rests are added up in the same
way, and their sum is multiplied by the factor once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tnsim.engine.costs import CACHED, WRITING
from tnsim.engine.ir.program import Operation
from tnsim.engine.search.paths import foreign
from tnsim.engine.search.sharing import Builder, Label, Use, WeightedValue, reachable

MATTERS = 1e-3
"""Share of a sum's price from which on the way to compute a value is changed, and share of the
price of all sums so far from which on a sum is changed at all: a program of many heads has
thousands of small sums, whose planning would take longer than they do."""


TOLERANCE = 1.002
"""Price, in multiples of the lowest one found, up to which a rotation is made although it does not
pay by itself: several values must often be rotated before a pair is shared by all of them."""


PATIENCE = 2
"""Most passes over the values of a sum, one after another, that find no lower price."""


MOST_PASSES = 10
"""Most passes over the values of a sum."""


def _rotate(builder: Builder, products: Iterable[Use], large: int) -> None:
    """Compute the products of a sum in ways that share more, where that makes the sum cheaper.

    Args:
        builder: Builder of the products.
        products: Summands, with the labels of the sum.
        large: Elements beyond which no value is made.
    """
    if foreign() is not None:
        return  # the paths of a caller's optimiser stay as they are
    search = _Rotations(builder, products, large)
    builder.spent += search.total
    if search.total < MATTERS * builder.spent:
        return
    in_vain = 0
    for _ in range(MOST_PASSES):
        lowest = search.lowest
        dear = [n for n in search.readers if search.price(n) > MATTERS * lowest]
        dear.sort(key=lambda n: (-search.price(n), n))
        # Rotations at other values may have made a value needless.
        made = [search.rotate(n) for n in dear if n in search.readers]
        in_vain = 0 if search.lowest < lowest else in_vain + 1
        if not any(made) or in_vain > PATIENCE:
            break
    search.restore()


class _Rotation(NamedTuple):
    """Another way to compute a value.

    Args:
        pair: Two factors that are contracted first.
        kept: Labels of their product.
        other: The factor that is contracted with the product.
    """

    pair: tuple[Use, Use]
    kept: list[Label]
    other: Use


class _Rotations:
    """The values that a sum needs, the ways to compute them, and their price.

    Values that are settled are there already, whatever the sum is: they cost nothing and keep their
    ways.

    Attributes:
        readers: Number of operations and summands that read each needed value.
        total: Price of all needed values, in the measure of `paths.Cost.price`. Of summands that
            share a factor, one pays for the product with it.
        lowest: The lowest total so far.
    """

    def __init__(self, builder: Builder, products: Iterable[Use], large: int) -> None:
        self.builder = builder
        self.large = large
        self.total = 0
        self.readers: Counter[int] = Counter()
        self._products = {use.value: use for use in products}
        self._sharing: Counter[tuple] = Counter()
        self._keys: dict[tuple[int, int], tuple[Any, list]] = {}
        for number in self._products:
            self._hold(number)
        self.lowest = self.total
        self._length = 0
        self._log: list[tuple[int, Operation]] = []
        self._taken: set[tuple[int, frozenset[int]]] = set()

    def restore(self) -> None:
        """Return to the ways of the lowest total."""
        while len(self._log) > self._length:
            self._undo()

    def price(self, number: int) -> int:
        """The price of the operation of a value; inputs and settled values are there already."""
        value = self.builder.values[number]
        if value.operation is None or number in self.builder.settled:
            return 0
        size = math.prod(value.shape)
        return value.cost + (WRITING * size if size > CACHED else 0)

    def rotate(self, number: int) -> bool:
        """Make the first rotation at a value that may be worth while; whether there was one."""
        if number in self.builder.settled:
            return False
        for rotation in list(self._rotations(number)):
            pair = self.builder.contract(rotation.pair, rotation.kept)
            if pair.value not in self.readers and pair.value not in self.builder.settled:
                # Nothing needs the pair yet, so it may be computed from these factors.
                self._rewrite(pair.value, _product_of(rotation.pair, pair.labels))
            if self._tried(number, (pair, rotation.other)):
                return True
        return False

    def _rotations(self, number: int) -> Iterator[_Rotation]:
        """The rotations at a value that may lower the total."""
        builder = self.builder
        operation = builder.values[number].operation
        if operation is None or operation.kind != "contract" or len(operation.args) != 2:
            return
        uses = [Use(*use) for use in zip(operation.args, operation.labels, strict=True)]
        given = builder.sizes(operation)
        sizes: dict[Label, int] = dict(given.items())
        for below, other in (uses, uses[::-1]):
            inner = builder.values[below.value].operation
            if inner is None or inner.kind != "contract" or len(inner.args) != 2:
                continue
            names = dict(zip(inner.output, below.labels, strict=True))
            fresh = itertools.count(1 + max(given, default=0))
            for label, size in builder.sizes(inner).items():
                if label not in names:
                    names[label] = next(fresh)
                    sizes[names[label]] = size
            factors = []
            for arg, labels in zip(inner.args, inner.labels, strict=True):
                factors.append(Use(arg, tuple(names[label] for label in labels)))
            before = self.price(number) + self.price(below.value)
            for moved, left in (factors, factors[::-1]):
                needed = {*operation.output, *left.labels}
                kept = dict.fromkeys([*moved.labels, *other.labels])
                kept = [label for label in kept if label in needed]
                cost = math.prod(sizes[label] for label in {*kept, *left.labels})
                if math.prod(sizes[label] for label in kept) <= self.large and cost < before:
                    yield _Rotation((moved, other), kept, left)

    def _tried(self, number: int, factors: tuple[Use, Use]) -> bool:
        """Compute a value as the product of two factors unless that is too dear."""
        operation = self.builder.values[number].operation
        assert operation is not None
        before = self.total
        self._rewrite(number, _product_of(factors, operation.output))
        way = number, frozenset(factor.value for factor in factors)
        if self.total < self.lowest or (
            self.total <= TOLERANCE * self.lowest and way not in self._taken
        ):
            # A way that was left is not taken again unless it is the best one found.
            self._taken |= {way, (number, frozenset(operation.args))}
            if self.total < self.lowest:
                self.lowest, self._length = self.total, len(self._log)
            return True
        self._undo()
        self.total = before
        return False

    def _rewrite(self, number: int, operation: Operation) -> None:
        """Compute a value by another operation."""
        old = self.builder.values[number].operation
        assert old is not None
        self._log.append((number, old))
        self._replace(number, old, operation)

    def _undo(self) -> None:
        """Return to the state before the last operation that was rewritten."""
        number, old = self._log.pop()
        new = self.builder.values[number].operation
        assert new is not None
        self._replace(number, new, old)

    def _replace(self, number: int, old: Operation, new: Operation) -> None:
        needed = number in self.readers
        if needed:
            for arg in new.args:
                self._hold(arg)
            self._pay(number, -1)
        cost = math.prod(self.builder.sizes(new).values())
        value = self.builder.values[number]
        self.builder.values[number] = dataclasses.replace(value, operation=new, cost=cost)
        if needed:
            self._pay(number, 1)
            for arg in old.args:
                self._release(arg)

    def _hold(self, number: int) -> None:
        """Count another reader of a value."""
        self.readers[number] += 1
        if self.readers[number] == 1 and number not in self.builder.settled:
            self._pay(number, 1)
            for arg in self._args(number):
                self._hold(arg)

    def _release(self, number: int) -> None:
        """Count a reader of a value less; without readers it is not needed."""
        self.readers[number] -= 1
        if self.readers[number] == 0:
            del self.readers[number]
            if number not in self.builder.settled:
                self._pay(number, -1)
                for arg in self._args(number):
                    self._release(arg)

    def _args(self, number: int) -> tuple[int, ...]:
        operation = self.builder.values[number].operation
        return operation.args if operation else ()

    def _keys_of(self, number: int) -> list[tuple[Use, frozenset[Label]]]:
        """The factors that a summand may share with others, found once for each of its ways."""
        if number not in self._products:
            return []
        operation = self.builder.values[number].operation
        # The operation is kept beside its keys, so that no other takes its place in memory.
        known = self._keys.get((number, id(operation)))
        if known is None:
            factors = _shared_factors(self.builder, self._products[number])
            known = operation, [(one.factor, frozenset(one.rest.labels)) for one in factors]
            self._keys[number, id(operation)] = known
        return known[1]

    def _pay(self, number: int, sign: int) -> None:
        """Add the price of a value to the total, or take it off."""
        keys = self._keys_of(number)
        if sign < 0:
            self._sharing.subtract(keys)
        if not any(self._sharing[key] for key in keys):
            self.total += sign * self.price(number)
        if sign > 0:
            self._sharing.update(keys)


def _product_of(factors: Iterable[Use], output: Iterable[Any]) -> Operation:
    """The operation that contracts some values."""
    args, labels = zip(*factors, strict=True)
    return Operation("contract", args, labels, tuple(output))


class _Factor(NamedTuple):
    """A summand read as a factor times a rest.

    Args:
        factor: Factor, with names for summed labels that do not depend on the summand.
        rest: Cofactor: the summand is the product of factor and rest.
        output: Labels of the summand.
        cost: Scalar multiplications of the product.
    """

    factor: Use
    rest: Use
    output: tuple[Label, ...]
    cost: int


def total(
    builder: Builder, items: Iterable[WeightedValue], output: tuple[Label, ...], large: int
) -> Use:
    """The sum of weighted values, with shared intermediates and common factors taken out.

    Args:
        builder: Builder of the values and of their sum.
        items: Summands, with the labels of the output.
        output: Order of the axes of the result, unless it is a single product, which has an order
            of its own.
        large: Elements beyond which no intermediate is made for the sake of sharing.
    """
    items = _merged_items(items)
    _rotate(builder, [item.use for item in items], large)
    while len(items) > 1:
        shared = _most_saving(builder, items)
        if not shared:
            break
        inner = [WeightedValue(items[n].weight, factor.rest) for n, factor in shared.items()]
        first = next(iter(shared.values()))
        # a b + a c = a (b + c): the sum of the rests is a sum like any other, and may have common
        # factors itself.
        others = [item for n, item in enumerate(items) if n not in shared]
        outside = reachable(builder, [first.factor.value, *(item.use.value for item in others)])
        with builder.settling(outside):
            rest = total(builder, inner, first.rest.labels, large)
        product = builder.contract((rest, first.factor), first.output)
        # The product joins the other summands, with which it may share a factor in turn; every pass
        # leaves fewer summands, so the loop ends.
        items = _merged_items([*others, WeightedValue(1.0, product)])
    if len(items) == 1 and items[0].weight == 1.0:
        return items[0].use
    return builder.sum(items, output)


def _merged_items(items: Iterable[WeightedValue]) -> list[WeightedValue]:
    """The summands with equal values merged and weights of zero left out."""
    weights: dict[Use, float] = {}
    for weight, use in items:
        weights[use] = weights.get(use, 0.0) + weight
    left = [WeightedValue(weight, use) for use, weight in weights.items() if weight != 0.0]
    if left:
        return left
    return [WeightedValue(0.0, use) for use in weights][:1]  # a zero that has the right shape


def _most_saving(builder: Builder, items: list[WeightedValue]) -> dict[int, _Factor]:
    """The items that share the most saving factor, by number, each read as factor times rest."""
    groups: dict[tuple, dict[int, _Factor]] = {}
    for n, item in enumerate(items):
        for factor in _shared_factors(builder, item.use):
            shared_by = (factor.factor, frozenset(factor.rest.labels))
            groups.setdefault(shared_by, {}).setdefault(n, factor)
    best: dict[int, _Factor] = {}
    saved = -1
    for group in groups.values():
        # All products but one are saved: products may differ in cost, so the sum of all costs
        # less their average. This is len(group) times that sum, which favours large groups.
        saving = (len(group) - 1) * sum(factor.cost for factor in group.values())
        if len(group) > 1 and saving > saved:
            best, saved = group, saving
    return best


def _shared_factors(builder: Builder, use: Use) -> Iterator[_Factor]:
    """The ways to read a value as factor times rest, under names that other summands share."""
    value = builder.values[use.value]
    operation = value.operation
    if operation is None or operation.kind != "contract" or len(operation.args) != 2:
        return
    outer = dict(zip(operation.output, use.labels, strict=True))
    # A summed label is named after its position in the factor, which other summands share, with
    # more primes than any outer label, so that the two differ.
    primes = "'" * (1 + max((str(label).count("'") for label in use.labels), default=0))
    # Either factor may be the common one.
    for one, two in ((0, 1), (1, 0)):
        names = dict(outer)
        for position, label in enumerate(operation.labels[one]):
            names.setdefault(label, f"{position}{primes}")
        if not names.keys() >= set(operation.labels[two]):
            continue  # the rest has a summed label of its own
        factor = Use(operation.args[one], tuple(names[x] for x in operation.labels[one]))
        rest = Use(operation.args[two], tuple(names[x] for x in operation.labels[two]))
        yield _Factor(factor, rest, use.labels, value.cost)
