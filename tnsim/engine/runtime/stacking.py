"""A program on stacks of arrays.

An array may be stacked over several axes at once, such as the rows and the columns of a block of
pairs, or over some of the axes, or over none. Stacked axes lead, in one order for all arrays. The
values that a program computes from arrays without a stacked axis are computed once for the axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tnsim.engine.ir.program import Program
from tnsim.engine.plan import Plan

StackedAxes = tuple[bool, ...]
"""Whether an array has each of the stacked axes."""
Run = Callable[[list[Any]], tuple[list[Any], list[Any]]]
"""A stage as a function from its inputs to its outputs and the exponents of its scales."""


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
