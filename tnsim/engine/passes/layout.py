"""The choice of an order of axes for every large value of a program, which saves copies.

A matrix product reads its arguments in a few orders of axes, and needs a copy of an argument in any
other order. Entry-by-entry operations read every order, but slowly where it differs from the order
of the result. Copies of values that fit in a cache cost next to nothing. Each larger value in turn
gets the best of the orders that the operation that computes it and the operations that read it
prefer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

from tnsim.engine.costs import CACHED
from tnsim.engine.ir.matmul_form import Labels, MatrixProduct, matrix_product, matrix_products
from tnsim.engine.ir.program import Operation, Program

LARGE = CACHED
"""Elements beyond which the order of a value's axes is chosen."""
SWEEPS = 4
"""Most sweeps over all large values; the best order of a value depends on its neighbours."""
Sizes = Mapping[int, int]


def laid_out(program: Program) -> Program:
    """The program with large values in orders of axes that save copies.

    Inputs, outputs, and arguments and results of loops keep the order of their axes.

    Args:
        program: Program of any length.

    Returns:
        A program of the same operations and numbers of values.

    Example:
        The middle axis of the first product is summed in the second product, which reads it without
        a copy where it is the last axis:

        >>> outer = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 1, 2))
        >>> later = Operation("contract", (3, 2), ((0, 1, 2), (1, 3)), (0, 2, 3))
        >>> program = Program(((300, 300),) * 3, (outer, later), (4,))
        >>> laid_out(program).operations[0].output
        (0, 2, 1)
    """
    draft = _Draft(program)
    for _ in range(SWEEPS):
        # A list and no generator: `any` would end a sweep at the first value that changes.
        if not any([draft.improve(value) for value in draft.free]):
            break
    return dataclasses.replace(program, operations=tuple(draft.operations))


class _Draft:
    """A program whose values change the order of their axes.

    Args:
        program: Initial program.

    Attributes:
        operations: Current operations.
        free: Values whose axes may stand in any order, the largest first.
    """

    def __init__(self, program: Program) -> None:
        self.operations = list(program.operations)
        self.first = len(program.shapes)
        # Sizes by label, for each operation. Permutations of axes change the order of labels and no
        # size, so these stay right.
        self.sizes = [op.sizes(program.value_shapes) for op in program.operations]
        self.readers: dict[int, list[int]] = {}
        # Whoever called for the program reads its outputs, in the order of axes that the plan
        # announces.
        fixed = set(program.outputs)
        for n, op in enumerate(program.operations):
            for arg in set(op.args):
                self.readers.setdefault(arg, []).append(n)
            if op.body is not None:
                # A loop takes slices of its arguments, and adds up results of its body as they
                # come.
                fixed.update((self.first + n, *op.args))
        elements = [math.prod(shape) for shape in program.value_shapes]
        computed = range(self.first, len(elements))
        # A small value is copied faster than its best order is found.
        free = [n for n in computed if n not in fixed and elements[n] > LARGE]
        self.free = sorted(free, key=lambda n: -elements[n])

    def improve(self, value: int) -> bool:
        """Give a value the best order of its axes.

        Returns:
            Whether the order has changed.
        """
        # Operations that neither give nor read the value move the same entries as before.
        beside = [value - self.first, *self.readers.get(value, ())]
        best = {n: self.operations[n] for n in beside}
        # Nothing is moved now, and no order can do better.
        cost = self._moved(best)
        if not cost:
            return False
        # Orders are tried one value at a time while all others stand: each sweep lowers the number
        # of moved entries or ends.
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
        """The number of entries that some operations, by position, move."""
        return sum(moved(op, self.sizes[n]) for n, op in operations.items())

    def _orders(self, value: int) -> Iterator[tuple[int, ...]]:
        """The orders of a value's axes that the operations that compute and read it prefer.

        An order is a permutation of the current axes. The preferences of an operation depend on the
        current order of its other values.
        """
        # Labels are local to an operation. An order is therefore passed around as a permutation of
        # the value's current axes, which means the same to the operation that computes the value
        # and to all that read it.
        own = self.operations[value - self.first]
        wanted = {_places(order, own.output) for order in _results(own)}
        for n in self.readers.get(value, ()):
            op = self.operations[n]
            for arg, labels in zip(op.args, op.labels, strict=True):
                # A label that stands twice is a diagonal, which every order of axes reads with
                # gaps.
                if arg == value and len(set(labels)) == len(labels):
                    wanted.update(_places(order, labels) for order in _readings(op, labels))
        # Sorted, because the first of equally good orders is taken, and a set has its own order in
        # every process.
        yield from sorted(wanted)


def _turned(op: Operation, value: int, number: int, order: tuple[int, ...]) -> Operation:
    """The operation after the axes of a value that it gives or reads are permuted.

    Args:
        op: Operation before the permutation.
        value: Number of the permuted value.
        number: Number of the operation's result.
        order: Permutation of the axes.
    """
    labels = []
    for arg, own in zip(op.args, op.labels, strict=True):
        labels.append(_permuted(own, order) if arg == value else own)
    output = _permuted(op.output, order) if number == value else op.output
    return op._replace(labels=tuple(labels), output=output)


def _permuted(labels: Labels, order: tuple[int, ...]) -> Labels:
    """The labels in the order of a permutation."""
    return tuple(labels[place] for place in order)


def _places(order: Labels, labels: Labels) -> tuple[int, ...]:
    """The permutation that puts labels in an order."""
    return tuple(labels.index(label) for label in order)


def moved(op: Operation, sizes: Sizes) -> int:
    """The number of entries that an operation reads or writes in another order than they stand.

    Where the last axis stays the last, entries are moved in rows, and count a quarter.
    """
    # The values around a loop keep their order, so nothing can be saved here.
    if op.body is not None:
        return 0
    return _moved(op.kind, op.labels, op.output, tuple(sizes.items()))


@lru_cache(maxsize=2**14)  # labels are numbers, so the operations of a program are much alike
def _moved(
    kind: str, labels: tuple[Labels, ...], output: Labels, items: tuple[tuple[int, int], ...]
) -> int:
    """The number of moved entries of an operation that is no loop, by what the number depends on.

    Args:
        kind: Kind of the operation.
        labels: Labels of each argument.
        output: Labels of the result.
        items: Pairs (label, size) of all labels.
    """
    # Neither the numbers of the arguments nor the weights move entries, so they are left out of the
    # key of the cache.
    op, sizes = Operation(kind, (), labels, output), dict(items)
    return sum(_entries(order, own, sizes) for order, own in _moves(op, sizes))


def _moves(op: Operation, sizes: Sizes) -> Iterator[tuple[Labels, Labels]]:
    """The order in which each array is read or written, and the order in which it stands."""
    # Entry-by-entry operations, sums and operations of a single argument go through the result from
    # end to end. An argument is read in order where its labels, as far as the result has them,
    # stand in the order of the result.
    product = None
    if op.kind == "contract" and len(op.labels) == 2:
        first, second = op.labels
        product = matrix_product(first, second, op.output, sizes)
    if product is None:
        for labels in op.labels:
            kept = tuple(label for label in labels if label in op.output)
            yield tuple(label for label in op.output if label in labels), kept
        return
    matrices, swapped = product
    # `orders` begins with the argument that has the rows. Where the arguments change places, this
    # is the second argument of the operation.
    second, first = op.labels if swapped else op.labels[::-1]
    wanted_first, wanted_second = matrices.orders
    yield wanted_first, first
    if not matrices.reads_in_place(wanted_second, second):  # transposed matrices are read fast
        yield wanted_second, second
    # The product is computed in the order `matrices.result` and then moved into the order of the
    # output.
    yield op.output, matrices.result


def _entries(order: Labels, labels: Labels, sizes: Sizes) -> int:
    """The number of moved entries of an array with axes `labels` that is read in `order`."""
    if order == labels:
        return 0
    entries = math.prod(sizes[label] for label in order)
    return entries // 4 if order[-1] == labels[-1] else entries


def _results(op: Operation) -> Iterator[Labels]:
    """The orders of axes in which an operation gives its result without a copy."""
    # A matrix product writes batch, rows and columns. An operation entry by entry writes in the
    # order of an argument, with the labels that this argument lacks in front, where a whole
    # argument repeats.
    for product in _products(op):
        yield product.result
    for labels in op.labels:
        rest = tuple(label for label in op.output if label not in labels)
        yield (*rest, *dict.fromkeys(label for label in labels if label in op.output))


def _readings(op: Operation, labels: Labels) -> Iterator[Labels]:
    """The orders of axes in which an operation reads an argument without a copy."""
    # Entry by entry an argument is read in the order of the result, with the summed labels
    # innermost.
    summed = tuple(label for label in labels if label not in op.output)
    yield (*(label for label in op.output if label in labels), *summed)
    for product in _products(op):
        for order in product.readings:
            # Readings of both arguments come along, and of these only the orders of exactly these
            # labels apply. A product whose batch has a label that the argument lacks is left out:
            # the argument is repeated along this label, which no order of its own axes brings
            # about.
            if set(order) == set(labels):
                yield order


def _products(op: Operation) -> Iterator[MatrixProduct]:
    """All matrix products that compute an operation."""
    if op.kind == "contract" and len(op.args) == 2:
        first, second = op.labels
        for product, _ in matrix_products(first, second, op.output):
            yield product
