"""The order of the axes of every large value of a program, chosen to save copies.

NumPy multiplies matrices where they stand in memory, and copies an argument or a result of any
other order of axes. Entry by entry it reads every order, but slowly where it is not that of the
result. Each large value in turn gets the best of the orders in which its neighbours read or write
it without moving entries. Copies of values that fit in a cache cost next to nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from tnsim.engine.costs import CACHED
from tnsim.engine.ir.matmul_form import matrix_product
from tnsim.engine.ir.program import Labels, Operation, Program

LARGE = CACHED
"""Elements beyond which the order of a value's axes is chosen."""
SWEEPS = 4
"""Most sweeps over all large values; the best order of a value depends on its neighbours."""


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
    operations, first = list(program.operations), len(program.shapes)
    # Orders of axes change the order of labels and no size.
    sizes = program.sizes
    fixed = set(program.outputs)  # the caller reads them in the order that is announced
    for n, op in enumerate(operations):
        if op.body is not None:  # a loop reads slices, and adds up results of its body as they come
            fixed.update((first + n, *op.args))
    elements = {n: math.prod(shape) for n, shape in enumerate(program.value_shapes)}
    free = [n for n in elements if n >= first and n not in fixed and elements[n] > LARGE]
    known: dict[tuple[int, Operation], int] = {}  # most operations are asked for again and again

    def moved_by(n: int, op: Operation) -> int:
        if (n, op) not in known:
            known[n, op] = moved(op, sizes[n])
        return known[n, op]

    for _ in range(SWEEPS):
        is_better = False
        for value in sorted(free, key=lambda n: -elements[n]):
            beside = [value - first, *program.readers.get(value, ())]
            best = {n: operations[n] for n in beside}
            least = sum(moved_by(n, op) for n, op in best.items())
            # Sorted, as the first of equally good orders is taken, and a set has its own order in
            # every process. Nothing is better than nothing moved.
            for order in sorted(_orders(operations, value, beside)) if least else ():
                turned = {n: _turned(operations[n], value, first + n, order) for n in beside}
                attempt = sum(moved_by(n, op) for n, op in turned.items())
                if attempt < least:
                    best, least, is_better = turned, attempt, True
            for n, op in best.items():
                operations[n] = op
        if not is_better:
            break
    return dataclasses.replace(program, operations=tuple(operations))


def moved(op: Operation, sizes: Mapping[int, int]) -> int:
    """The number of entries that an operation reads or writes in another order than they stand.

    Where the last axis stays the last, entries are moved in rows, and count a quarter.
    """
    if op.body is not None:
        return 0  # the values around a loop keep their order
    chosen = None
    if op.is_product:
        first, second = op.labels
        chosen = matrix_product(first, second, op.output, sizes)
    if chosen is None:  # entry by entry, from one end of the result to the other
        orders = []
        for labels in op.labels:
            kept = tuple(x for x in labels if x in op.output)
            orders.append((tuple(x for x in op.output if x in labels), kept))
    else:
        product, swapped = chosen
        one, other = op.labels[::-1] if swapped else op.labels
        wanted_one, wanted_other = product.orders
        orders = [(wanted_one, one), (op.output, product.result)]
        if not product.reads_in_place(wanted_other, other):  # transposed matrices are read fast
            orders.append((wanted_other, other))
    entries = 0
    for wanted, stands in orders:
        if wanted != stands:
            size = math.prod(sizes[label] for label in wanted)
            entries += size // 4 if wanted[-1] == stands[-1] else size
    return entries


def _orders(operations: list[Operation], value: int, beside: list[int]) -> set[tuple[int, ...]]:
    """The orders of a value's axes, as permutations, that its neighbours prefer.

    Args:
        operations: Operations of the program.
        value: Number of the value.
        beside: Numbers of the operation that gives the value, and of those that read it.
    """
    made, *reading = (operations[n] for n in beside)
    found = {tuple(made.output.index(x) for x in order) for order in _results(made)}
    for op in reading:
        for arg, labels in zip(op.args, op.labels, strict=True):
            # A label that stands twice is a diagonal, which every order reads with gaps.
            if arg == value and len(set(labels)) == len(labels):
                found |= {tuple(labels.index(x) for x in order) for order in _readings(op, labels)}
    return found


def _results(op: Operation) -> Iterator[Labels]:
    """The orders of axes in which an operation gives its result without a copy."""
    if op.is_product:
        shared = [x for x in op.output if all(x in labels for labels in op.labels)]
        rows, columns = (
            [x for x in op.output if x in own and x not in shared] for own in op.labels
        )
        yield (*shared, *rows, *columns)
        yield (*shared, *columns, *rows)
    # Entry by entry a result is written in the order of an argument, whole arguments repeated.
    for labels in op.labels:
        rest = [x for x in op.output if x not in labels]
        yield (*rest, *dict.fromkeys(x for x in labels if x in op.output))


def _readings(op: Operation, labels: Labels) -> Iterator[Labels]:
    """The orders of axes in which an operation reads an argument without a copy."""
    others = {x for own in op.labels if own is not labels for x in own}
    kept = [x for x in op.output if x in labels]
    summed = [x for x in labels if x not in op.output]
    yield (*kept, *summed)
    shared, alone = [x for x in kept if x in others], [x for x in kept if x not in others]
    yield (*shared, *alone, *summed)
    yield (*shared, *summed, *alone)


def _turned(op: Operation, value: int, number: int, order: tuple[int, ...]) -> Operation:
    """The operation after the axes of a value that it gives or reads are permuted.

    Args:
        op: Operation before the permutation.
        value: Number of the permuted value.
        number: Number of the operation's result.
        order: Permutation of the axes.
    """

    def permuted(labels: Labels) -> Labels:
        return tuple(labels[place] for place in order)

    labels = [permuted(x) if arg == value else x for arg, x in zip(op.args, op.labels, strict=True)]
    output = permuted(op.output) if number == value else op.output
    return op._replace(labels=tuple(labels), output=output)
