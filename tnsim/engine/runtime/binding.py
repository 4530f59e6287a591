"""Programs bound once to closures over NumPy or `jax.numpy`, called in order.

*Binding* (`bind`). What an operation does with its axes depends on shapes alone, so it is decided
once for a program: the order in which `matmul` reads an argument, the shape of the result, the
value that is free after the operation. What is left is a row of functions of arrays, which NumPy
runs at once, and which XLA compiles under `jax.jit`. In NumPy every value is written in the order
of its labels, so a later operation knows which of its arguments BLAS reads where they stand (see
`ir/matmul_form: host_product`), and memory is known beforehand (`costs.working_elements`). XLA
orders axes itself, and fuses loops over entries.

*Loops.* A turn is the bound body on slices of the arguments. NumPy deals turns to lanes, each of
which adds up its own; the lanes are added in order. In JAX the body is traced once.

*Stages* (`BoundStage`). The outputs of a program are divided by the scales of their groups, powers
of two. Stacked axes of models are labels of their own, at the front of every array that has them.

*Threads.* Stages of a round, operations of a stage, lanes of a loop and blocks of a large product
share the threads of a pool where their work repays it, with BLAS on one thread. Threads of BLAS
wait for each other in a busy loop, which beside other work took three times as long (depth 16,
width 256). No bit depends on which thread runs what.

*Stacks.* An array may be stacked over several axes at once, such as the rows and the columns of a
block of pairs, or over some of the axes, or over none. Stacked axes lead, in one order for all
arrays. The values that a program computes from arrays without a stacked axis are computed once for
the axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.engine import costs
from tnsim.engine.costs import Round
from tnsim.engine.ir.matmul_form import MatrixProduct, host_product
from tnsim.engine.ir.program import Labels, Operation, Program, WholePlan, n_iterations
from tnsim.engine.plan import Plan
from tnsim.engine.runtime.devices import Order, processors, shared
from tnsim.scaled import Numeric, scale_exponent, shifted
from tnsim.sessions import per_object_cache

StackedAxes = tuple[bool, ...]
"""Whether an array has each of the stacked axes."""
Run = Callable[[list[Any]], tuple[list[Any], list[Any]]]
"""A stage as a function from its inputs to its outputs and the exponents of its scales."""


Sizes = Mapping[int, int]
Function = Callable[..., Any]
REPAYS = 1e-3
"""Seconds of work of one core that repay waking threads."""
_LARGE = 2**24
"""Multiplications of a product of matrices whose blocks are shared, a millisecond."""
_BLOCKS, _LEAST_SIDE = 4, 128
"""Most blocks of an array that threads share, and fewest rows or columns of those of a product."""
_LARGE_ENTRIES = 2**20
"""Entries of an array whose blocks are shared where it is passed entry by entry, a millisecond."""
_FUSED = 64
"""Most multiplications of a matrix product that XLA compiles as a loop. Compiling the gradient of
an attention layer takes three quarters of the seconds, and the program is as fast."""
_WHOLE = slice(None)


class Stacked(NamedTuple):
    """The stacked axes of all inputs, outputs and scales of a program.

    Attributes:
        sizes: Sizes of the stacked axes; 1 where no input has the axis.
        inputs: Flags of every input: whether it has each of the stacked axes.
        outputs: Flags of every output.
        scales: Flags of every scale.
        computed: Flags of every output before it is divided by scales.
    """

    sizes: tuple[int, ...]
    inputs: tuple[StackedAxes, ...]
    outputs: tuple[StackedAxes, ...]
    scales: tuple[StackedAxes, ...]
    computed: tuple[StackedAxes, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether no input is stacked, so that the program runs as it is."""
        return not any(map(any, self.inputs))

    def leading(self, axes: StackedAxes) -> tuple[int, ...]:
        """Sizes of the stacked axes that an array has."""
        return tuple(size for size, own in zip(self.sizes, axes, strict=True) if own)


def stacked(program: Program, inputs: Sequence[StackedAxes], sizes: Sequence[int]) -> Stacked:
    """The stacked axes of a program: an output or scale has the axes of all that it depends on.

    Args:
        program: Program for arrays without stacked axes.
        inputs: Flags of every input: whether it is stacked over each of the axes.
        sizes: Sizes of the stacked axes.

    Returns:
        The flags of inputs, outputs and scales.

    Example:
        >>> from tnsim.engine.ir.program import Operation
        >>> outer = Operation("contract", (0, 1), ((0,), (1,)), (0, 1))
        >>> program = Program(((2,), (3,)), (outer,), (2,))
        >>> stacked(program, [(True, False), (False, True)], (4, 5)).outputs
        ((True, True),)
    """
    depth = len(sizes)
    if not any(map(any, inputs)):  # the usual case, which needs no walk through the operations
        none = (False,) * depth
        outputs, scales = (none,) * len(program.outputs), (none,) * len(program.scales)
        return Stacked((1,) * depth, tuple(inputs), outputs, scales)
    values = list(inputs)
    # A value has every stacked axis that one of its arguments has, as in broadcasting.
    for op in program.operations:
        values.append(_union([values[a] for a in op.args], depth))
    given = [values[n] for n in program.outputs]
    scales = [given[which] for which, _ in program.scales]
    # Dividing by a scale that depends on a stacked axis makes the output depend on it as well.
    outputs = list(given)
    for n, powers in enumerate(program.powers):
        outputs[n] = _union([given[n], *(scales[slot] for slot, _ in powers)], depth)
    # An axis that no input has counts as size 1, so that equal programs on other sizes of such an
    # axis are one compiled program.
    used = _union(inputs, depth)
    own_sizes = tuple(size if own else 1 for size, own in zip(sizes, used, strict=True))
    return Stacked(own_sizes, tuple(inputs), tuple(outputs), tuple(scales), tuple(given))


def stacked_stages(
    plan: Plan, sizes: Sequence[int], over: Mapping[str, StackedAxes]
) -> tuple[tuple[Stacked, ...], dict[str, StackedAxes]]:
    """The stacked axes of every stage of a plan, and of all its values by name.

    Args:
        plan: Plan for arrays without stacked axes.
        sizes: Sizes of the stacked axes.
        over: Name -> stacked axes, for every array that is a stack.
    """
    axes = {name: over.get(name, (False,) * len(sizes)) for name in plan.shapes}
    stacks = []
    for stage in plan.stages:
        inputs = [axes[name] for name in stage.inputs]
        stacks.append(stacked(plan.programs[stage.program], inputs, sizes))
        axes.update(zip(stage.outputs, stacks[-1].outputs, strict=True))
    return tuple(stacks), axes


def stacked_program(program: Program, over: Stacked) -> Program:
    """The program on stacks: every stacked axis is a further index of the arrays that have it.

    An index of a stack is never summed over. A term of a sum that lacks it is repeated along it.

    Args:
        program: Program for arrays without stacked axes.
        over: Stacked axes of its arrays.

    Example:
        >>> from tnsim.engine.ir.program import Operation
        >>> outer = Operation("contract", (0, 1), ((0,), (1,)), (0, 1))
        >>> program = Program(((2,), (3,)), (outer,), (2,))
        >>> over = stacked(program, [(True, False), (False, True)], (4, 5))
        >>> stacked_program(program, over).value_shapes
        ((4, 2), (5, 3), (4, 5, 2, 3))
    """
    depth = len(over.sizes)
    values = list(over.inputs)
    operations = []
    for op in program.operations:
        own = [values[a] for a in op.args]
        values.append(_union(own, depth))
        # The body of a loop reads the arguments of the loop with their stacked axes.
        body = op.body
        if body is not None:
            body = stacked_program(body, stacked(body, own, over.sizes))
        labels = []
        for axes, rest in zip(own, op.labels, strict=True):
            # Stacked axes lead in every array, in one order, so their labels go in front.
            labels.append((*_stack_labels(axes), *rest))
        output = (*_stack_labels(values[-1]), *op.output)
        operations.append(op._replace(labels=tuple(labels), output=output, body=body))
    shapes = []
    for axes, shape in zip(over.inputs, program.shapes, strict=True):
        shapes.append(over.leading(axes) + tuple(shape))
    return dataclasses.replace(program, shapes=tuple(shapes), operations=tuple(operations))


def _stack_labels(axes: StackedAxes) -> tuple[int, ...]:
    """A label for every stacked axis of an array; those of programs are not negative."""
    return tuple(-1 - n for n, is_stacked in enumerate(axes) if is_stacked)


def aligned(array: Any, axes: StackedAxes) -> Any:
    """The array with an axis of size 1 for every stacked axis that it lacks."""
    sizes = iter(array.shape)
    leading = [next(sizes) if is_stacked else 1 for is_stacked in axes]
    return array.reshape([*leading, *sizes])


def _union(several: Iterable[StackedAxes], depth: int) -> StackedAxes:
    """The axes that at least one of several arrays has."""
    all_axes = list(several)
    return tuple(any(axes[n] for axes in all_axes) for n in range(depth))


class Call(NamedTuple):
    """An operation of a program, bound.

    Attributes:
        function: Function of the arguments.
        args: Numbers of the arguments.
        dead: Numbers of the values that nothing reads later.
    """

    function: Function
    args: tuple[int, ...]
    dead: tuple[int, ...]


class Bound(NamedTuple):
    """A program bound to functions of arrays.

    Attributes:
        calls: Operations, in order.
        outputs: Numbers of the outputs.
        order: Which operations wait for which, where threads share them; None where they run one
            after another.
    """

    calls: tuple[Call, ...]
    outputs: tuple[int, ...]
    order: Order | None = None

    def __call__(self, inputs: Sequence[Numeric]) -> list[Any]:
        """The outputs, not yet divided by scales.

        Args:
            inputs: Arrays of the shapes of the program; those of NumPy are contiguous.

        Returns:
            Arrays, some of which may be inputs themselves.
        """
        values: list[Any] = list(inputs)
        if self.order is not None:
            return self._at_once(values, self.order)
        for function, args, dead in self.calls:
            values.append(function(*[values[a] for a in args]))
            for number in dead:
                values[number] = None
        return [values[number] for number in self.outputs]

    def _at_once(self, values: list[Any], order: Order) -> list[Any]:
        first = len(values)
        values += [None] * len(self.calls)

        def run(n: int) -> None:
            function, args, _ = self.calls[n]
            values[first + n] = function(*[values[a] for a in args])

        def passed(n: int) -> None:
            for number in self.calls[n].dead:
                values[number] = None

        tasks = [partial(run, n) for n in range(len(self.calls))]
        shared(tasks, min(processors(), costs.AT_ONCE), order, passed)
        return [values[number] for number in self.outputs]


@per_object_cache
def bind(program: Program, xp: ModuleType = np) -> Bound:
    """Bind a program to functions of arrays, which run one after another.

    Args:
        program: Program on arrays that stand in the order of their labels.
        xp: Library of the arrays, NumPy or `jax.numpy`.

    Returns:
        The bound program, without the division by its scales.

    Example:
        >>> product = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
        >>> bound = bind(Program(((4, 3), (3, 5)), (product,), (2,)))
        >>> bound([np.ones((4, 3)), np.ones((3, 5))])[0].tolist()[0]
        [3.0, 3.0, 3.0, 3.0, 3.0]
    """
    return _bound(program, xp, None)


def _bound(program: Program, xp: ModuleType, order: Order | None) -> Bound:
    """A program bound to functions, of which threads share those that an order lets run at once."""
    over = costs.overwritten(program)
    alone = [True] * len(over) if order is None else _alone(order, program.costs)
    calls = []
    for n, op in enumerate(program.operations):
        function = operation_function(op, program.sizes[n], over[n], xp, alone[n])
        last = {a for a in op.args if program.readers[a][-1] == n}
        dead = last.difference(program.outputs)
        calls.append(Call(function, op.args, tuple(dead)))
    return Bound(tuple(calls), program.outputs, order)


def _order(program: Program) -> Order:
    """Which operations of a program wait for which, in NumPy."""
    over = []
    for op, place in zip(program.operations, costs.overwritten(program), strict=True):
        over.append(None if place is None else op.args[place])
    return order_of([op.args for op in program.operations], over, len(program.shapes))


def order_of(args: Sequence[Sequence[int]], over: Sequence[int | None], inputs: int) -> Order:
    """Which functions wait for which.

    Args:
        args: Numbers of the arguments of each function, inputs first.
        over: For each function the number of the argument that it writes its result over, or None.
        inputs: Number of inputs.
    """
    readers: dict[int, list[int]] = {}
    waits, then = [], [list[int]() for _ in args]
    for n, (read, written) in enumerate(zip(args, over, strict=True)):
        before = {a - inputs for a in read if a >= inputs}
        if written is not None:  # all others have read it
            before.update(readers.get(written, ()))
        for a in read:
            readers.setdefault(a, []).append(n)
        waits.append(len(before))
        for number in before:
            then[number].append(n)
    return Order(tuple(waits), tuple(map(tuple, then)), costs.AHEAD)


def _alone(order: Order, work: Sequence[int]) -> list[bool]:
    """Whether each function waits for all other large products, or these for it.

    Args:
        order: Which functions wait for which.
        work: Multiplications of each function.
    """
    # Sets of large products are the bits of a number.
    bits, count = [0] * len(work), 0
    for n, each in enumerate(work):
        if each >= _LARGE:
            bits[n], count = 1 << count, count + 1
    after, before = [0] * len(work), list(bits)
    for n in reversed(range(len(work))):
        for later in order.then[n]:
            after[n] |= bits[later] | after[later]
    for n, then in enumerate(order.then):
        for later in then:
            before[later] |= before[n]
    return [after[n] | before[n] == (1 << count) - 1 for n in range(len(work))]


def operation_function(
    op: Operation, sizes: Sizes, over: int | None, xp: ModuleType, alone: bool = True
) -> Function:
    """The function of the arguments of an operation.

    Args:
        op: Operation of a program.
        sizes: Size of every label.
        over: Place of the argument that NumPy writes the result over; None for new memory.
        xp: Library of the arrays, NumPy or `jax.numpy`.
        alone: Whether no other operation runs at once, so that threads share blocks of a large
            product.
    """
    if op.kind == "sum":
        return _sum(op, sizes, over, xp)
    if op.kind == "loop":
        return _loop(op, sizes) if xp is np else _traced_loop(op, sizes)
    return _reduction(op, xp) if len(op.args) == 1 else _contraction(op, sizes, over, xp, alone)


def _spread(labels: Labels, order: Labels, sizes: Sizes) -> Function:
    """A view with axes in an order, of size 1 where a label is missing."""
    shape = [sizes[label] if label in labels else 1 for label in order]
    return _viewed(labels, order, shape, sizes)


def _viewed(labels: Labels, order: Labels, shape: list[int], sizes: Sizes) -> Function:
    """A view with axes in an order, as far as there are such, and of a shape."""
    own = [label for label in order if label in labels]
    axes = tuple(labels.index(label) for label in own)
    if [sizes[label] for label in own] != shape:
        return lambda x: x.transpose(axes).reshape(shape)
    return _same if own == list(labels) else lambda x: x.transpose(axes)


def _same(x: Any) -> Any:
    return x


def _written(xp: ModuleType) -> Function:
    """A function that writes a view out; in JAX it does nothing, as XLA orders axes itself."""
    return _copied if xp is np else _same


def _copied(x: np.ndarray) -> np.ndarray:
    """A copy in the order of the axes."""
    if x.size < _LARGE_ENTRIES:
        return x.copy()
    return _entrywise(lambda source, out: np.copyto(out, source), x, out=np.empty(x.shape, x.dtype))


def _entrywise(function: Function, *arrays: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The result of a function of single entries, written by blocks that threads share.

    Args:
        function: Function of the arrays and the array to write to, such as `np.multiply`.
        arrays: Arrays that broadcast to the result, of as many axes.
        out: Result, which may be one of the arrays.
    """
    count = min(_BLOCKS, len(out)) if out.ndim and out.size >= _LARGE_ENTRIES else 1
    if count < 2:
        function(*arrays, out)
        return out
    tasks = []
    for n in range(count):
        block = slice(n * len(out) // count, (n + 1) * len(out) // count)
        parts = [x[block] if len(x) == len(out) else x for x in arrays]
        tasks.append(partial(function, *parts, out[block]))
    shared(tasks, processors())
    return out


def _contraction(
    op: Operation, sizes: Sizes, over: int | None, xp: ModuleType, alone: bool
) -> Function:
    """The contraction of two arrays: matrix products, or entry by entry."""
    (first, second), output = op.labels, op.output
    form = host_product(first, second, output, sizes)
    if form is None or (xp is not np and _is_fused(form.product, sizes)):
        return _by_entries(first, second, output, sizes, over, xp)
    batch, left, summed, right = form.product
    x_labels, y_labels = (second, first) if form.swapped else (first, second)
    reads_x, reads_y = form.is_read if xp is np else (True, True)
    of_x = _matrices(x_labels, (batch, left, summed), sizes, reads_x)
    of_y = _matrices(y_labels, (batch, summed, right), sizes, reads_y)
    result, written = form.product.result, _written(xp)
    shape = tuple(sizes[label] for label in result)
    axes = None if form.is_written else tuple(result.index(label) for label in output)
    is_shared = alone and xp is np and not batch and math.prod(sizes.values()) >= _LARGE
    matmul = _in_blocks if is_shared else xp.matmul

    def contract(x: Any, y: Any) -> Any:
        z = matmul(of_x(x), of_y(y)).reshape(shape)
        return z if axes is None else written(z.transpose(axes))

    if form.swapped:
        return lambda x, y: contract(y, x)
    return contract


def _is_fused(product: MatrixProduct, sizes: Sizes) -> bool:
    """Whether XLA fuses a product into the loops over entries around it, with less to compile."""
    work = math.prod(sizes.values())
    if product.left and product.right:
        return work <= _FUSED
    # Of a large matrix and a vector XLA would write all products out before it adds them up.
    return work < _LARGE_ENTRIES or not (product.left or product.right)


def _in_blocks(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The product of two large matrices, by blocks of rows or columns that threads share."""
    rows, columns = x.shape[0], y.shape[1]
    out = np.empty((rows, columns), x.dtype)
    is_tall = rows >= columns
    count = min(_BLOCKS, max(rows, columns) // _LEAST_SIDE)
    tasks = []
    for n in range(count):
        # The blocks follow from the shape alone, and so do the bits.
        start, end = (k * max(rows, columns) // count for k in (n, n + 1))
        if is_tall:
            tasks.append(partial(np.matmul, x[start:end], y, out[start:end]))
        else:
            tasks.append(partial(np.matmul, x, y[:, start:end], out[:, start:end]))
    if len(tasks) < 2:
        return np.matmul(x, y, out)
    shared(tasks, processors())
    return out


def _matrices(
    labels: Labels, groups: tuple[Labels, Labels, Labels], sizes: Sizes, is_read: bool
) -> Function:
    """An argument as matrices: the axes of the batch, then rows and columns, an axis each."""
    batch, rows, columns = groups
    shape = [sizes[label] if label in labels else 1 for label in batch]
    for group in (rows, columns):
        size = 1
        for label in group:
            size *= sizes[label]
        shape.append(size)
    order = (*batch, *rows, *columns)
    if is_read:
        return _viewed(labels, order, shape, sizes)
    axes = tuple(labels.index(x) for x in order if x in labels)
    return lambda x: _copied(x.transpose(axes)).reshape(shape)


def _by_entries(
    first: Labels, second: Labels, output: Labels, sizes: Sizes, over: int | None, xp: ModuleType
) -> Function:
    """A product entry by entry, summed over the labels that the output lacks."""
    summed = tuple(label for label in first if label in second and label not in output)
    order = (*output, *summed)
    of_x, of_y = _spread(first, order, sizes), _spread(second, order, sizes)
    if xp is not np:
        gone = tuple(range(len(output), len(order)))
        if summed:
            return lambda x, y: (of_x(x) * of_y(y)).sum(gone)
        return lambda x, y: of_x(x) * of_y(y)
    if summed:  # sums of a batch: `einsum` needs no array of all products
        places = {label: n for n, label in enumerate(order)}
        x_axes, y_axes = ([places[label] for label in own] for own in (first, second))
        z_axes = list(range(len(output)))
        shape = tuple(sizes[label] for label in output)

        def contract(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return np.einsum(x, x_axes, y, y_axes, z_axes, out=np.empty(shape, x.dtype))

        return contract
    if over == 0:
        return lambda x, y: _entrywise(np.multiply, x, of_y(y), out=x)
    if over == 1:
        return lambda x, y: _entrywise(np.multiply, of_x(x), y, out=y)
    shape = tuple(sizes[label] for label in output)

    def multiplied(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = np.empty(shape, np.result_type(x, y))
        return _entrywise(np.multiply, of_x(x), of_y(y), out=out)

    return multiplied


def _sum(op: Operation, sizes: Sizes, over: int | None, xp: ModuleType) -> Function:
    """A weighted sum; in NumPy added up in place, in the argument `over` where there is one."""
    shape = tuple(sizes[label] for label in op.output)
    views = [_spread(labels, op.output, sizes) for labels in op.labels]
    if xp is not np:

        def added(*args: Any) -> Any:
            terms = (view(x) for view, x in zip(views, args, strict=True))
            weighted = zip(op.weights, terms, strict=True)
            return functools.reduce(operator.add, (x if w == 1.0 else w * x for w, x in weighted))

        return added
    begin = over or 0
    order = [begin, *(n for n in range(len(views)) if n != begin)]
    weight, *weights = [op.weights[n] for n in order]

    def total(*args: np.ndarray) -> np.ndarray:
        start, *terms = [views[n](args[n]) for n in order]
        out = np.empty(shape, start.dtype) if over is None else start
        rest = zip(weights, terms, strict=True)
        if over is None and weight == 1.0 and weights and abs(weights[0]) == 1.0:
            # The first two terms at once, without a copy of the first.
            second, term = next(rest)
            _entrywise(np.add if second == 1.0 else np.subtract, start, term, out=out)
        elif weight != 1.0:
            np.multiply(start, weight, out)
        elif over is None:
            np.copyto(out, start)
        for own, term in rest:
            if own == 1.0:
                _entrywise(np.add, out, term, out=out)
            elif own == -1.0:
                _entrywise(np.subtract, out, term, out=out)
            else:
                np.add(out, own * term, out)
        return out

    return total


def _reduction(op: Operation, xp: ModuleType) -> Function:
    """A single array: diagonals over repeated labels, sums over labels not in the output."""
    (labels,), output = op.labels, op.output
    # `diagonal` moves the axis of a diagonal to the end.
    own, diagonals = list(labels), []
    while len(set(own)) < len(own):
        label = next(x for x in own if own.count(x) > 1)
        one = own.index(label)
        other = own.index(label, one + 1)
        diagonals.append((one, other))
        own = [x for n, x in enumerate(own) if n not in (one, other)] + [label]
    summed = tuple(label for label in own if label not in output)
    axes = tuple(own.index(label) for label in (*output, *summed))
    gone = tuple(range(len(output), len(own)))
    written = _written(xp)
    # A sum of NumPy may stand in another order, or be a scalar, which cannot be written to.
    in_order = partial(np.asarray, order="C") if xp is np else _same

    def reduce(x: Any) -> Any:
        for one, other in diagonals:
            x = xp.diagonal(x, 0, one, other)
        x = x.transpose(axes)
        return in_order(x.sum(gone)) if gone else written(x)

    return reduce


def turn(loop: Operation, sizes: Sizes, xp: ModuleType) -> Callable[[Sequence[Any], Any], Any]:
    """A function of the arguments of a loop and the number of a turn: what the turn adds.

    Args:
        loop: Operation of the kind "loop".
        sizes: Size of every label.
        xp: Library of the arrays, NumPy or `jax.numpy`.

    Returns:
        A function of arrays and of a number from 0 on, whose mixed-radix digits are the values of
        the labels of the loop.
    """
    assert loop.body is not None  # every loop has a body
    body, block = bind(loop.body, xp), loop.block_size
    part_of = part if xp is np else _traced_part
    moves = [any(label in loop.chunks for label in labels) for labels in loop.labels]

    def run(args: Sequence[Any], number: Any) -> Any:
        at = turn_indices(loop, sizes, number)
        fixed = []
        for x, labels, is_moving in zip(args, loop.labels, moves, strict=True):
            fixed.append(part_of(x, labels, at, block) if is_moving else x)
        return body(fixed)[0]

    return run


def turn_indices(loop: Operation, sizes: Sizes, number: Any) -> dict[int, Any]:
    """The value of each label of a loop in a turn: the number of the turn in mixed radix."""
    first, *others = loop.chunks
    at = {}
    for label in reversed(others):  # the last label runs fastest
        number, at[label] = number // sizes[label], number % sizes[label]
    at[first] = number  # the last digit needs no remainder
    return at


def place(labels: Labels, at: Mapping[int, int], block: int) -> tuple[Any, ...]:
    """The index of what a turn reads of an argument: an entry or a block along each label."""
    index: list[Any] = []
    for label in labels:
        n = at.get(label)
        if n is None:
            index.append(_WHOLE)
        else:
            index.append(slice(n * block, (n + 1) * block) if block else n)
    return (*index, ...)


def part(x: np.ndarray, labels: Labels, at: Mapping[int, int], block: int) -> np.ndarray:
    """What a turn reads of an argument."""
    x = x[place(labels, at, block)]
    return x if x.flags.c_contiguous else x.copy()


def _traced_part(x: jax.Array, labels: Labels, at: Mapping[int, Any], block: int) -> jax.Array:
    """What a turn reads of an argument, where the number of the turn may be traced."""
    # From the last axis to the first, so that the numbers of axes still to come stay right while
    # axes disappear. Numbers are within bounds, so JAX is told not to wrap negative ones: code that
    # clips or wraps was a third of the time of compiling a loop.
    for axis, label in reversed(list(enumerate(labels))):
        if label in at:
            size = max(block, 1)
            x = jax.lax.dynamic_slice_in_dim(
                x, at[label] * size, size, axis, allow_negative_indices=False
            )
            if not block:
                x = x.squeeze(axis)
    return x


def _traced_loop(op: Operation, sizes: Sizes) -> Function:
    """The sum of a program over all values of the labels of a loop, in JAX.

    The total starts at zero and the body is traced once, inside the loop. A first turn in front of
    the loop would be compiled as a second copy of the whole body, and every level of nested loops
    would double the copies.
    """
    one, count = turn(op, sizes, jnp), n_iterations(op, sizes)
    shape = [sizes[label] for label in op.output]

    def run(*args: jax.Array) -> jax.Array:
        zero = jnp.zeros(shape, jnp.result_type(*args))

        @jax.checkpoint  # derivatives compute a turn again and keep nothing of it
        def added(n: Any) -> jax.Array:
            return one(args, n)

        return jax.lax.fori_loop(0, count, lambda n, total: total + added(n), zero)

    return run


def _loop(op: Operation, sizes: Sizes) -> Function:
    """The sum of a program over all values of the labels of a loop, in NumPy."""
    one, count = turn(op, sizes, np), n_iterations(op, sizes)
    lanes = costs.lanes(op, count)
    repays = costs.host_seconds_of(op, sizes, 8) > REPAYS

    def lane(args: tuple[np.ndarray, ...], number: int) -> np.ndarray:
        found = one(args, number)
        if number + lanes >= count:
            return found
        # The summand of a turn may be an argument, which is not to be written to.
        total = np.asarray(found + one(args, number + lanes))
        for n in range(number + 2 * lanes, count, lanes):
            np.add(total, one(args, n), total)
        return total

    def run(*args: np.ndarray) -> np.ndarray:
        sums = shared([partial(lane, args, n) for n in range(lanes)], processors() if repays else 1)
        return functools.reduce(lambda x, y: np.asarray(x + y), sums)

    return run


class BoundStage(NamedTuple):
    """The program of a stage, for stacks where arrays are stacked, bound.

    Attributes:
        program: Program on arrays with their stacked axes.
        bound: The same program, bound.
        over: Stacked axes of inputs and outputs; None without stacks.
        alone: Whether each output is an array of its own, which may be written to.
    """

    program: Program
    bound: Bound
    over: Stacked | None
    alone: tuple[bool, ...]

    @classmethod
    def of(cls, program: Program, over: Stacked | None = None, xp: ModuleType = np) -> BoundStage:
        """The stage of a program.

        Args:
            program: Program for arrays without stacked axes.
            over: Stacked axes of its arrays; None without stacks.
            xp: Library of the arrays, NumPy or `jax.numpy`.
        """
        if over is not None and over.nothing:
            over = None
        if over is not None:
            program = stacked_program(program, over)
        # An output that nothing else gives and that is no input may be divided where it stands.
        first, outputs = len(program.shapes), program.outputs
        alone = tuple(n >= first and outputs.count(n) == 1 for n in outputs)
        if xp is np and costs.runs_at_once(program):
            bound = _bound(program, xp, _order(program))
        else:
            bound = bind(program, xp)
        return cls(program, bound, over, alone)

    def __call__(self, inputs: Sequence[Numeric]) -> tuple[list[Any], list[Any]]:
        """Outputs divided by their scales, and the exponent of each scale."""
        outputs: list[Any] = self.bound(inputs)
        program, over = self.program, self.over
        if not program.scales:
            return outputs, []
        depth = 0 if over is None else len(over.sizes)
        if over is not None:
            outputs = [aligned(x, axes) for x, axes in zip(outputs, over.computed, strict=True)]
        # Scales are powers of two, so dividing by them rounds nothing. The scale of a group is read
        # off an output of some degree in the group, hence the power. With stacks the scale is taken
        # over all but the `depth` leading axes, an exponent for every entry.
        exponents = [
            scale_exponent(outputs[which], power, depth) for which, power in program.scales
        ]
        for n, powers in enumerate(program.powers):
            # Without axes a sum may be a plain number, which holds no other.
            in_place = self.alone[n] and isinstance(outputs[n], np.ndarray)
            for slot, power in powers:
                by = -power * exponents[slot]
                # An output that lacks a stacked axis gains it where its scale has the axis.
                if depth:
                    by = by.reshape(by.shape + (1,) * (outputs[n].ndim - depth))
                    shape = np.broadcast_shapes(outputs[n].shape, by.shape)
                    in_place = in_place and shape == outputs[n].shape
                outputs[n] = shifted(outputs[n], by, out=outputs[n] if in_place else None)
        if over is None:
            return outputs, exponents
        given = [_without(x, axes) for x, axes in zip(outputs, over.outputs, strict=True)]
        return given, [_without(x, axes) for x, axes in zip(exponents, over.scales, strict=True)]


def _without(array: Any, axes: StackedAxes) -> Any:
    """An array without the stacked axes that it lacks, which have size 1."""
    return array.squeeze(tuple(n for n, is_stacked in enumerate(axes) if not is_stacked))


class Prepared(NamedTuple):
    """A plan bound to functions, before it is run on numbers.

    Attributes:
        stages: Bound program of each stage.
        rounds: Stages that run at once, round after round.
    """

    stages: tuple[BoundStage, ...]
    rounds: tuple[Round, ...]


@per_object_cache
def prepared(whole: WholePlan, item: int, stacks: tuple[Stacked, ...]) -> Prepared:
    """Bind all stages of a plan.

    Args:
        whole: Stages of the plan.
        item: Bytes of an element of the arrays.
        stacks: Stacked axes of every stage.
    """
    # Stages of one program with the same stacks share what is bound.
    made: dict[tuple[int, Stacked], BoundStage] = {}
    stages = []
    for stage, over in zip(whole.stages, stacks, strict=True):
        key = (stage.program, over)
        if key not in made:
            made[key] = BoundStage.of(whole.programs[stage.program], over)
        stages.append(made[key])
    rounds = costs.rounds(whole, tuple(stage.program for stage in stages), item)
    return Prepared(tuple(stages), rounds)


def share_round(calls: Sequence[Callable[[], Any]], each: Round) -> list[Any]:
    """The results of a round in NumPy, whose calls threads share where that repays."""
    return shared(calls, min(processors(), each.at_once if each.seconds > REPAYS else 1))
