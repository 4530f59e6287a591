"""The operations of a program as array functions.

Lowering is written once over autoray, so a program runs on JAX, traced into one compiled program,
and on NumPy, eagerly, which is the reference in tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from autoray import do

from tnsim.engine.ir.matmul_form import Labels, matrix_product
from tnsim.engine.ir.program import Operation, Program, n_iterations
from tnsim.scaled import scale_exponent, shifted


def run_program(program: Program, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """All outputs of a program, divided by their scales, and the exponent of each scale."""
    values = list(inputs)
    # Number of the last operation that reads each value; later entries overwrite earlier ones.
    last = {a: n for n, op in enumerate(program.operations) for a in op.args}
    for n, op in enumerate(program.operations):
        values.append(_apply(op, [values[a] for a in op.args]))
        for a in op.args:
            if last[a] == n and a not in program.outputs:
                values[a] = None  # lets NumPy free the array; XLA needs no such help
    outputs = [values[n] for n in program.outputs]
    # Scales are powers of two, so dividing by them rounds nothing. The scale of a group is read off
    # an output of some degree in the group, hence the power.
    exponents = [scale_exponent(outputs[which], power) for which, power in program.scales]
    for n, powers in enumerate(program.powers):
        for slot, power in powers:
            outputs[n] = shifted(outputs[n], -power * exponents[slot])
    return outputs, exponents


def _apply(op: Operation, args: list[Any]) -> Any:
    """The value of a single operation: a weighted sum, a loop, a reduction or a contraction."""
    # Weights of 1 are not multiplied, so that a plain sum is additions only.
    if op.kind == "sum":
        total = None
        for weight, arg, labels in zip(op.weights, args, op.labels, strict=True):
            arg = _to(arg, labels, op.output)
            arg = arg if weight == 1.0 else weight * arg
            total = arg if total is None else total + arg
        return total
    if op.kind == "loop":
        return _loop(op, args)
    if len(args) == 1:
        return _reduce(args[0], op.labels[0], op.output)
    (x, y), (x_labels, y_labels) = args, op.labels
    return _contract(x, y, x_labels, y_labels, op.output)


def _loop(op: Operation, args: list[Any]) -> Any:
    """The sum of a program over all values of its chunked labels.

    On JAX the total starts at zero and the body is traced once, inside the loop. A first turn in
    front of the loop would be compiled as a second copy of the whole body, and every level of
    nested loops would double the copies.
    """
    sizes = _sizes(op, args)
    count = n_iterations(op, sizes)
    # Outside JAX the turns are plain calls, which the eager reference adds up in the same order.
    if not any(isinstance(arg, jax.Array) for arg in args):
        return sum(run_turn(op, args, n) for n in range(count))
    zero = jnp.zeros([sizes[label] for label in op.output], jnp.result_type(*args))
    return jax.lax.fori_loop(0, count, lambda n, total: total + run_turn(op, args, n), zero)


def run_turn(loop: Operation, args: list[Any], number: Any) -> Any:
    """The summand that one turn of a loop adds to the total.

    Args:
        loop: Operation of the kind "loop".
        args: Arguments of the loop.
        number: Number of the turn, from 0 on; its mixed-radix digits are the values of the labels.
    """
    sizes = _sizes(loop, args)
    first, *others = loop.chunks
    # The number of the turn is written in mixed radix, the last label running fastest.
    at = {}
    for label in reversed(others):
        number, at[label] = number // sizes[label], number % sizes[label]
    at[first] = number  # the last digit needs no remainder, whose code handles negative numbers
    fixed = []
    # Axes are taken from the last to the first, so that the numbers of the axes still to come stay
    # right while axes disappear.
    for arg, labels in zip(args, loop.labels, strict=True):
        for axis in reversed(range(len(labels))):
            if labels[axis] in at:
                arg = _part(arg, at[labels[axis]], loop.block_size, axis)
        fixed.append(arg)
    assert loop.body is not None  # every loop has a body
    return run_program(loop.body, fixed)[0][0]


def _part(x: Any, number: Any, block: int, axis: int) -> Any:
    """A block of an array along an axis; with a block size of 0 a single entry, without the axis.

    Numbers are within bounds, so JAX is told not to wrap negative ones: code that clips or wraps
    was a third of the time of compiling a loop.
    """
    size = max(block, 1)
    start = number * size
    if isinstance(x, jax.Array):
        x = jax.lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)
    else:
        x = x[(slice(None),) * axis + (slice(start, start + size),)]
    return x if block else do("squeeze", x, axis=axis)


def _sizes(op: Operation, args: list[Any]) -> dict[int, int]:
    """Label -> size, from the shapes of the arguments."""
    sizes: dict[int, int] = {}
    for arg, labels in zip(args, op.labels, strict=True):
        sizes |= zip(labels, arg.shape, strict=True)
    return sizes


def _reduce(x: Any, labels: Sequence[int], output: Labels) -> Any:
    """A single array: diagonals over repeated labels, then sums over labels not in the output."""
    labels = list(labels)
    # NumPy moves a diagonal to the end, so its label goes to the end of the labels as well.
    while len(set(labels)) < len(labels):
        label = next(x for x in labels if labels.count(x) > 1)
        first = labels.index(label)
        second = labels.index(label, first + 1)
        x = do("diagonal", x, axis1=first, axis2=second)
        labels = [y for n, y in enumerate(labels) if n not in (first, second)] + [label]
    summed = tuple(n for n, label in enumerate(labels) if label not in output)
    x = do("sum", x, axis=summed) if summed else x
    return _to(x, tuple(y for y in labels if y in output), output)


def _contract(x: Any, y: Any, x_labels: Labels, y_labels: Labels, output: Labels) -> Any:
    """Two arrays contracted: an entry-by-entry product, perhaps summed, or matrix products."""
    sizes = dict(zip(x_labels, x.shape, strict=True)) | dict(zip(y_labels, y.shape, strict=True))
    summed = tuple(label for label in x_labels if label in y_labels and label not in output)
    chosen = matrix_product(x_labels, y_labels, output, sizes)
    if chosen is None:  # nothing is summed, or a matrix product would have no rows or no columns
        # Both arguments get all labels, of size 1 where a label is missing, and broadcasting
        # multiplies them.
        entries = (*output, *summed)
        z = _spread(x, x_labels, entries) * _spread(y, y_labels, entries)
        return do("sum", z, axis=tuple(range(len(output), len(entries)))) if summed else z
    product, swapped = chosen
    if swapped:
        x, y, x_labels, y_labels = y, x, y_labels, x_labels

    def matrices(array: Any, labels: Labels, rows: Labels, columns: Labels) -> Any:
        order = (*product.batch, *rows, *columns)
        array = _spread(array, labels, order)
        full = tuple(sizes[label] for label in order)
        # A label that joins the batch although this argument lacks it has size 1 so far; `reshape`
        # needs it in full.
        if full != tuple(array.shape):
            array = do("broadcast_to", array, full)
        # Shape (batch, rows, columns): each group of labels is one axis of the product.
        groups = (product.batch, rows, columns)
        return do("reshape", array, tuple(math.prod(sizes[x] for x in group) for group in groups))

    x = matrices(x, x_labels, product.left, product.summed)
    y = matrices(y, y_labels, product.summed, product.right)
    z = do("reshape", do("matmul", x, y), tuple(sizes[label] for label in product.result))
    return _to(z, product.result, output)


def _to(x: Any, labels: Labels, output: Labels) -> Any:
    """The array with its axes in the order of the output."""
    axes = tuple(labels.index(label) for label in output)
    return x if axes == tuple(range(len(axes))) else do("transpose", x, axes)


def _spread(x: Any, labels: Labels, output: Labels) -> Any:
    """The array with axes in the order of the output, of size 1 where a label is missing."""
    present = tuple(label for label in output if label in labels)
    x = _to(x, labels, present)
    it = iter(x.shape)
    shape = tuple(next(it) if label in labels else 1 for label in output)
    return x if shape == tuple(x.shape) else do("reshape", x, shape)
