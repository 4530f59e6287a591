"""Plans run by NumPy: programs bound once to closures, called in order.

*Binding* (`bind`). What an operation does with its axes depends on shapes alone, so it is decided
once for a program: the order in which `matmul` reads an argument, the shape of the result, the
value that is free after the operation. What is left is a row of functions of arrays. Every value
is written in the order of its labels, so a later operation knows which of its arguments BLAS reads
where they stand (see `ir/matmul_form: host_product`), and memory is known beforehand
(`costs.host_elements`).

*Loops.* A turn is the bound body on slices of the arguments. Turns are dealt to lanes, each of
which adds up its own; the lanes are added in order.

*Threads.* Stages of a round, lanes of a loop and blocks of a large product share the threads of a
pool where their work repays it, with BLAS on one thread. Threads of BLAS wait for each other in a
busy loop, which beside other work took three times as long (depth 16, width 256). No bit depends
on which thread runs what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tnsim.engine import costs
from tnsim.engine.costs import HostRound
from tnsim.engine.ir.matmul_form import host_product
from tnsim.engine.ir.program import Operation, Program, n_iterations
from tnsim.engine.ir.stages import WholePlan
from tnsim.engine.plan import Plan
from tnsim.engine.runtime.stacking import Axes, Stacked, aligned, stacked_program
from tnsim.engine.runtime.threads import one_blas_thread, processors, shared
from tnsim.scaled import scale_exponent, shifted
from tnsim.sessions import per_object_cache

Labels = tuple[int, ...]
Sizes = Mapping[int, int]
Function = Callable[..., np.ndarray]

_REPAYS = 1e-3
"""Seconds of work of one core that repay waking threads."""


_LARGE = 2**24
"""Multiplications of a product of matrices whose blocks are shared, a millisecond."""


_BLOCKS, _LEAST_SIDE = 4, 64
"""Most blocks of such a product, and fewest rows or columns of a block."""


class Outcome(NamedTuple):
    """What the stages of a plan gave.

    Attributes:
        values: Outputs of the plan by name, divided by their scales.
        exponents: Exponent of every scale, by stage number and scale group.
    """

    values: dict[str, np.ndarray]
    exponents: dict[tuple[int, str], Any]


class _Call(NamedTuple):
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
    """A program bound to functions of NumPy.

    Attributes:
        calls: Operations, in order.
        outputs: Numbers of the outputs.
    """

    calls: tuple[_Call, ...]
    outputs: tuple[int, ...]

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs, not yet divided by scales.

        Args:
            inputs: Arrays of the shapes of the program, contiguous.

        Returns:
            Arrays, some of which may be inputs themselves.
        """
        values: list[Any] = list(inputs)
        for function, args, dead in self.calls:
            values.append(function(*[values[a] for a in args]))
            for number in dead:
                values[number] = None
        return [values[number] for number in self.outputs]


@per_object_cache
def bind(program: Program) -> Bound:
    """Bind a program to functions of NumPy.

    Args:
        program: Program on arrays that stand in the order of their labels.

    Returns:
        The bound program, without the division by its scales.

    Example:
        >>> product = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
        >>> bound = bind(Program(((4, 3), (3, 5)), (product,), (2,)))
        >>> bound([np.ones((4, 3)), np.ones((3, 5))])[0].tolist()[0]
        [3.0, 3.0, 3.0, 3.0, 3.0]
    """
    last = {a: n for n, op in enumerate(program.operations) for a in op.args}
    over = costs.overwritten(program)
    calls = []
    for n, op in enumerate(program.operations):
        sizes = op.sizes(program.value_shapes)
        if op.kind == "sum":
            function = _sum(op, sizes, over[n])
        elif op.kind == "loop":
            function = _loop(op, sizes)
        elif len(op.args) == 1:
            function = _reduction(op)
        else:
            function = _contraction(op, sizes, over[n])
        dead = {a for a in op.args if last[a] == n and a not in program.outputs}
        calls.append(_Call(function, op.args, tuple(dead)))
    return Bound(tuple(calls), program.outputs)


def _axes(labels: Labels, order: Labels) -> Labels | None:
    """The permutation that puts labels in an order; None where they stand in it."""
    axes = tuple(labels.index(label) for label in order)
    return None if axes == tuple(range(len(labels))) else axes


def _spread(labels: Labels, order: Labels, sizes: Sizes) -> Function:
    """A view with axes in an order, of size 1 where a label is missing."""
    axes = _axes(labels, tuple(label for label in order if label in labels))
    shape = tuple(sizes[label] if label in labels else 1 for label in order)
    if len(shape) == len(labels):
        return _same if axes is None else lambda x: x.transpose(axes)
    if axes is None:
        return lambda x: x.reshape(shape)
    return lambda x: x.transpose(axes).reshape(shape)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _contraction(op: Operation, sizes: Sizes, over: int | None) -> Function:
    """The contraction of two arrays: matrix products, or entry by entry."""
    (first, second), output = op.labels, op.output
    form = host_product(first, second, output, sizes)
    if form is None:
        return _by_entries(first, second, output, sizes, over)
    batch, left, summed, right = form.product
    x_labels, y_labels = (second, first) if form.swapped else (first, second)
    of_x = _matrices(x_labels, (batch, left, summed), sizes, form.is_read[0])
    of_y = _matrices(y_labels, (batch, summed, right), sizes, form.is_read[1])
    shape = tuple(sizes[label] for label in form.product.result)
    axes = _axes(form.product.result, output)
    size = math.prod(sizes.values())
    matmul = _in_blocks if not batch and size >= _LARGE else np.matmul
    # A result that has rows and columns of one label each already has its shape.
    is_shaped = len(left) == len(right) == 1

    def contract(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        z = matmul(of_x(x), of_y(y))
        if not is_shaped:
            z = z.reshape(shape)
        return z if axes is None else z.transpose(axes).copy()

    if form.swapped:
        return lambda x, y: contract(y, x)
    return contract


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
    axes = _axes(labels, tuple(x for x in (*batch, *rows, *columns) if x in labels))
    shape = [sizes[label] if label in labels else 1 for label in batch]
    for group in (rows, columns):
        size = 1
        for label in group:
            size *= sizes[label]
        shape.append(size)
    wanted = tuple(shape)
    if not is_read:
        return lambda x: x.transpose(axes).copy().reshape(wanted)
    is_shaped = len(rows) == len(columns) == 1 and len(wanted) == len(labels)
    if axes is None:
        return _same if is_shaped else lambda x: x.reshape(wanted)
    if is_shaped:
        return lambda x: x.transpose(axes)
    return lambda x: x.transpose(axes).reshape(wanted)


def _by_entries(
    first: Labels, second: Labels, output: Labels, sizes: Sizes, over: int | None
) -> Function:
    """A product entry by entry, summed over the labels that the output lacks."""
    summed = tuple(label for label in first if label in second and label not in output)
    if summed:  # sums of a batch: `einsum` needs no array of all products
        places = {label: n for n, label in enumerate((*output, *summed))}
        x_axes, y_axes = ([places[label] for label in own] for own in (first, second))
        z_axes = list(range(len(output)))
        shape = tuple(sizes[label] for label in output)

        def contract(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return np.einsum(x, x_axes, y, y_axes, z_axes, out=np.empty(shape, x.dtype))

        return contract
    of_x, of_y = _spread(first, output, sizes), _spread(second, output, sizes)
    if not output:  # NumPy would give a scalar, which cannot be written to
        return lambda x, y: np.asarray(x * y)
    if over == 0:
        return lambda x, y: np.multiply(x, of_y(y), x)
    if over == 1:
        return lambda x, y: np.multiply(of_x(x), y, y)
    return lambda x, y: np.multiply(of_x(x), of_y(y), order="C")


def _sum(op: Operation, sizes: Sizes, over: int | None) -> Function:
    """A weighted sum, added up in place; in the argument `over` where there is one."""
    shape = tuple(sizes[label] for label in op.output)
    views = [_spread(labels, op.output, sizes) for labels in op.labels]
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
            (np.add if second == 1.0 else np.subtract)(start, term, out)
        elif weight != 1.0:
            np.multiply(start, weight, out)
        elif over is None:
            np.copyto(out, start)
        for own, term in rest:
            if own == 1.0:
                np.add(out, term, out)
            elif own == -1.0:
                np.subtract(out, term, out)
            else:
                np.add(out, own * term, out)
        return out

    return total


def _reduction(op: Operation) -> Function:
    """A single array: diagonals over repeated labels, sums over labels not in the output."""
    (labels,), output = op.labels, op.output
    if labels == output:
        return _same
    if len(set(labels)) < len(labels):
        places = {label: n for n, label in enumerate(dict.fromkeys(labels))}
        ours, theirs = [places[x] for x in labels], [places[x] for x in output]
        return lambda x: np.array(np.einsum(x, ours, theirs))
    summed = tuple(label for label in labels if label not in output)
    axes = tuple(labels.index(label) for label in (*output, *summed))
    if not summed:
        return lambda x: x.transpose(axes).copy()
    gone = tuple(range(len(output), len(labels)))

    def reduce(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.add.reduce(x.transpose(axes), gone))

    # A number has no axes, which `ascontiguousarray` would give it.
    return reduce if output else lambda x: np.asarray(np.add.reduce(x, None))


def _loop(op: Operation, sizes: Sizes) -> Function:
    """The sum of a program over all values of the labels of a loop."""
    assert op.body is not None  # every loop has a body
    body, count, block = bind(op.body), n_iterations(op, sizes), op.block_size
    lanes = costs.lanes(op, count)
    first, *others = op.chunks
    repays = costs.host_seconds_of(op, sizes, 8) > _REPAYS
    whole = slice(None)
    moves = [any(label in op.chunks for label in labels) for labels in op.labels]

    def turn(args: tuple[np.ndarray, ...], number: int) -> np.ndarray:
        at = {}
        # The number in mixed radix, the last label running fastest.
        for label in reversed(others):
            number, at[label] = divmod(number, sizes[label])
        at[first] = number
        fixed = []
        for x, labels, is_moving in zip(args, op.labels, moves, strict=True):
            if is_moving:
                index = []
                for label in labels:
                    n = at.get(label)
                    if n is None:
                        index.append(whole)
                    else:
                        index.append(slice(n * block, (n + 1) * block) if block else n)
                x = x[(*index, ...)]
                if not x.flags.c_contiguous:
                    x = x.copy()
            fixed.append(x)
        return body(fixed)[0]

    def lane(args: tuple[np.ndarray, ...], number: int) -> np.ndarray:
        found = turn(args, number)
        if number + lanes >= count:
            return found
        # The summand of a turn may be an argument, which is not to be written to.
        total = np.asarray(found + turn(args, number + lanes))
        for n in range(number + 2 * lanes, count, lanes):
            np.add(total, turn(args, n), total)
        return total

    def run(*args: np.ndarray) -> np.ndarray:
        if lanes == 1 or not repays:
            sums = [lane(args, n) for n in range(lanes)]
        else:
            sums = shared([partial(lane, args, n) for n in range(lanes)], processors())
        total = sums[0]
        for other in sums[1:]:
            total = np.asarray(total + other)
        return total

    return run


class _Stage(NamedTuple):
    """The program of a stage, for stacks where arrays are stacked, bound."""

    program: Program
    bound: Bound
    over: Stacked
    alone: tuple[bool, ...]

    @classmethod
    def of(cls, program: Program, over: Stacked) -> _Stage:
        """The stage of a program, as stacked axes say."""
        if not over.nothing:
            program = stacked_program(program, over)
        # An output that nothing else gives and that is no input may be divided where it stands. A
        # reduction that changes nothing gives its argument.
        alone = []
        for number in program.outputs:
            op = number - len(program.shapes)
            is_new = op >= 0 and program.operations[op].labels != (program.operations[op].output,)
            alone.append(is_new and program.outputs.count(number) == 1)
        read = {a for op in program.operations if op.labels == (op.output,) for a in op.args}
        alone = [a and n not in read for a, n in zip(alone, program.outputs, strict=True)]
        return cls(program, bind(program), over, tuple(alone))

    def __call__(self, inputs: Sequence[np.ndarray]) -> tuple[list[Any], list[Any]]:
        """Outputs divided by their scales, and the exponent of each scale."""
        outputs: list[Any] = self.bound(inputs)
        program, over = self.program, self.over
        if not program.scales:
            return outputs, []
        depth = 0 if over.nothing else len(over.sizes)
        if depth:
            outputs = [aligned(x, axes) for x, axes in zip(outputs, over.computed, strict=True)]
        # With stacks the scale is taken over all but the `depth` leading axes, an exponent for
        # every entry.
        exponents = [
            scale_exponent(outputs[which], power, depth) for which, power in program.scales
        ]
        for n, powers in enumerate(program.powers):
            in_place = self.alone[n]
            for slot, power in powers:
                by = -power * exponents[slot]
                # An output that lacks a stacked axis gains it where its scale has the axis.
                if depth:
                    by = by.reshape(by.shape + (1,) * (outputs[n].ndim - depth))
                    shape = np.broadcast_shapes(outputs[n].shape, by.shape)
                    in_place = in_place and shape == outputs[n].shape
                outputs[n] = shifted(outputs[n], by, out=outputs[n] if in_place else None)
        if not depth:
            return outputs, exponents
        given = [_without(x, axes) for x, axes in zip(outputs, over.outputs, strict=True)]
        return given, [_without(x, axes) for x, axes in zip(exponents, over.scales, strict=True)]


def _without(array: np.ndarray, axes: Axes) -> np.ndarray:
    """An array without the stacked axes that it lacks, which have size 1."""
    return array.squeeze(tuple(n for n, is_stacked in enumerate(axes) if not is_stacked))


class Prepared(NamedTuple):
    """A plan bound to functions, before it is run on numbers.

    Attributes:
        stages: Bound program of each stage.
        rounds: Stages that run at once, round after round.
    """

    stages: tuple[_Stage, ...]
    rounds: tuple[HostRound, ...]


@per_object_cache
def prepared(whole: WholePlan, item: int, stacks: tuple[Stacked, ...]) -> Prepared:
    """Bind all stages of a plan.

    Args:
        whole: Stages of the plan.
        item: Bytes of an element of the arrays.
        stacks: Stacked axes of every stage.
    """
    # Stages of one program with the same stacks share what is bound.
    made: dict[tuple[int, Stacked], _Stage] = {}
    stages = []
    for stage, over in zip(whole.stages, stacks, strict=True):
        key = (stage.program, over)
        if key not in made:
            made[key] = _Stage.of(whole.programs[stage.program], over)
        stages.append(made[key])
    rounds = costs.host_rounds(whole, [stage.program for stage in stages], item)
    return Prepared(tuple(stages), rounds)


def run_on_host(plan: Plan, arrays: Mapping[str, Any], stacks: tuple[Stacked, ...]) -> Outcome:
    """Run the stages of a plan in NumPy.

    Args:
        plan: Plan to run.
        arrays: Name -> array for every name in `plan.shapes`, stacked axes first.
        stacks: Stacked axes of every stage.
    """
    dtype = np.dtype(plan.dtype)
    ready = prepared(plan.whole, dtype.itemsize, stacks)
    values = {name: np.asarray(arrays[name], dtype, order="C") for name in plan.shapes}
    exponents: dict[tuple[int, str], Any] = {}
    with one_blas_thread(), np.errstate(all="ignore"):
        for each in ready.rounds:
            tasks = []
            for n in each.stages:
                inputs = [values[name] for name in plan.stages[n].inputs]
                tasks.append(partial(ready.stages[n], inputs))
            threads = each.at_once if each.seconds > _REPAYS else 1
            results = shared(tasks, min(processors(), threads))
            for n, (outputs, scales) in zip(each.stages, results, strict=True):
                stage = plan.stages[n]
                values.update(zip(stage.outputs, outputs, strict=True))
                if scales:
                    exponents.update(
                        zip([(n, group) for group in stage.groups], scales, strict=True)
                    )
            for name in each.last_read:
                del values[name]
    return Outcome({name: values[name] for name in plan.outputs}, exponents)
