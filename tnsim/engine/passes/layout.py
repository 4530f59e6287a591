"""In which order the axes of large values stand. In: a program. Out: one that moves fewer entries.

A matrix product wants its arguments in one of few orders of axes, and else reads a copy. What is
done entry by entry reads any order, but slowly if it is not that of the result. Values that fit in
a cache are moved in no time; those beyond it are given, in turn, each of the orders that what makes
them and what reads them would like, and keep the best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from tnsim.engine.costs import CACHED
from tnsim.engine.ir.matmul_form import Labels, MatrixProduct, matrix_product, matrix_products
from tnsim.engine.ir.program import Operation, Program

LARGE = CACHED
"""Elements beyond which the order of a value's axes is chosen."""
SWEEPS = 4
"""Times that all of them are gone through, at most: an order depends on those beside it."""
Sizes = Mapping[int, int]


def laid_out(program: Program) -> Program:
    """The program with large values in orders of axes that spare copies.

    Inputs, outputs and what loops read or give stay as they are.

    Args:
        program: Of any length.

    Returns:
        The same operations, on the same numbers.

    Example:
        Of `a b`, the second axis is summed with d later on: it had better be the last.

        >>> outer = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 1, 2))
        >>> later = Operation("contract", (3, 2), ((0, 1, 2), (1, 3)), (0, 2, 3))
        >>> program = Program(((300, 300),) * 3, (outer, later), (4,))
        >>> laid_out(program).operations[0].output
        (0, 2, 1)
    """
    draft = _Draft(program)
    for _ in range(SWEEPS):
        if not any([draft.improve(value) for value in draft.free]):
            break
    return dataclasses.replace(program, operations=tuple(draft.operations))


class _Draft:
    """A program whose values are being turned.

    Args:
        program: As it is at first.

    Attributes:
        operations: As they are now.
        free: Values whose axes may stand in any order, the largest first.
    """

    def __init__(self, program: Program) -> None:
        self.operations = list(program.operations)
        self.first = len(program.shapes)
        self.sizes = [op.sizes(program.value_shapes) for op in program.operations]
        self.readers: dict[int, list[int]] = {}
        fixed = set(program.outputs)
        for n, op in enumerate(program.operations):
            for arg in set(op.args):
                self.readers.setdefault(arg, []).append(n)
            if op.body is not None:
                fixed.update((self.first + n, *op.args))
        elements = [math.prod(shape) for shape in program.value_shapes]
        computed = range(self.first, len(elements))
        free = [n for n in computed if n not in fixed and elements[n] > LARGE]
        self.free = sorted(free, key=lambda n: -elements[n])

    def improve(self, value: int) -> bool:
        """Give a value the best order of its axes; whether it was another before."""
        beside = [value - self.first, *self.readers.get(value, ())]
        best = {n: self.operations[n] for n in beside}
        cost = self._moved(best)
        if not cost:
            return False
        is_better = False
        for order in self._orders(value):
            turned = {n: _turned(self.operations[n], value, self.first + n, order) for n in beside}
            attempt = self._moved(turned)
            if attempt < cost:
                best, cost, is_better = turned, attempt, True
        for n, op in best.items():
            self.operations[n] = op
        return is_better

    def _moved(self, operations: Mapping[int, Operation]) -> int:
        return sum(moved(op, self.sizes[n]) for n, op in operations.items())

    def _orders(self, value: int) -> Iterator[tuple[int, ...]]:
        """Orders of axes, by their present places, that the operations beside a value would like.

        They are asked for what they would like of it as they are now.
        """
        own = self.operations[value - self.first]
        wanted = {_places(order, own.output) for order in _results(own)}
        for n in self.readers.get(value, ()):
            op = self.operations[n]
            for arg, labels in zip(op.args, op.labels, strict=True):
                if arg == value and len(set(labels)) == len(labels):
                    wanted.update(_places(order, labels) for order in _readings(op, labels))
        yield from sorted(wanted)


def _turned(op: Operation, value: int, number: int, order: tuple[int, ...]) -> Operation:
    """An operation that gives or reads a value whose axes stand in another order."""
    labels = []
    for arg, own in zip(op.args, op.labels, strict=True):
        labels.append(_permuted(own, order) if arg == value else own)
    output = _permuted(op.output, order) if number == value else op.output
    return op._replace(labels=tuple(labels), output=output)


def _permuted(labels: Labels, order: tuple[int, ...]) -> Labels:
    return tuple(labels[place] for place in order)


def _places(order: Labels, labels: Labels) -> tuple[int, ...]:
    return tuple(labels.index(label) for label in order)


def moved(op: Operation, sizes: Sizes) -> int:
    """Entries that an operation reads or writes in another order than they stand.

    Those whose last axis stays the last are moved many at a time, and count a quarter.
    """
    if op.body is not None:
        return 0
    return sum(_entries(order, labels, sizes) for order, labels in _moves(op, sizes))


def _moves(op: Operation, sizes: Sizes) -> Iterator[tuple[Labels, Labels]]:
    """The order in which each array is read or written, and that in which it stands."""
    product = None
    if op.kind == "contract" and len(op.args) == 2:
        first, second = op.labels
        product = matrix_product(first, second, op.output, sizes)
    if product is None:
        for labels in op.labels:
            kept = tuple(label for label in labels if label in op.output)
            yield tuple(label for label in op.output if label in labels), kept
        return
    matrices, swapped = product
    second, first = op.labels if swapped else op.labels[::-1]
    wanted_first, wanted_second = matrices.orders
    yield wanted_first, first
    if not matrices.reads_in_place(wanted_second, second):  # where they stand transposed it is fast
        yield wanted_second, second
    yield op.output, matrices.result


def _entries(order: Labels, labels: Labels, sizes: Sizes) -> int:
    if order == labels:
        return 0
    entries = math.prod(sizes[label] for label in order)
    return entries // 4 if order[-1] == labels[-1] else entries


def _results(op: Operation) -> Iterator[Labels]:
    """Orders of axes in which an operation gives its result without a copy."""
    for product in _products(op):
        yield product.result
    for labels in op.labels:
        rest = tuple(label for label in op.output if label not in labels)
        yield (*rest, *dict.fromkeys(label for label in labels if label in op.output))


def _readings(op: Operation, labels: Labels) -> Iterator[Labels]:
    """Orders of axes in which an operation reads an argument without a copy."""
    summed = tuple(label for label in labels if label not in op.output)
    yield (*(label for label in op.output if label in labels), *summed)
    for product in _products(op):
        for order in product.readings:
            if set(order) == set(labels):
                yield order


def _products(op: Operation) -> Iterator[MatrixProduct]:
    """All matrix products that compute an operation."""
    if op.kind == "contract" and len(op.args) == 2:
        first, second = op.labels
        for product, _ in matrix_products(first, second, op.output):
            yield product
