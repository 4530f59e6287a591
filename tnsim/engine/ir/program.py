"""Programs: pairwise contractions, sums and loops over numbered values; and stages, which run them.

Values are arrays, numbered with the inputs first. Every stage of a plan runs a program, and stages
of equal form share it: a stack of 64 layers is a handful of programs. A program also counts its
scalar multiplications, contractions and written elements.

*Stages* are runs of programs on named arrays, in order. From the stages follows how often the
exponent of each scale counts in the exponent of an output (`scale_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

V = TypeVar("V")
Labels: TypeAlias = tuple[int, ...]
"""A label for each axis of an array."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A size, a number of something, or a place; programs that are read are held to it."""


class Operation(NamedTuple):
    """An operation of a program, which computes a single value.

    Args:
        kind: "contract": the product of one or two arguments, summed over the labels that are not
            in the output. "sum": the sum of `weights[i] * args[i]`, axes permuted to the order of
            the output. "loop": the sum of `body` over all values of the labels `chunks`, which
            bounds memory.
        args: Numbers of the arguments, which are earlier values.
        labels: Labels of the axes of each argument; equal labels are a single index.
        output: Labels of the axes of the result.
        weights: Weight of every argument, in a sum.
        chunks: Labels that a loop goes through.
        body: Program of a turn, in a loop: its inputs are the arguments with `chunks` fixed, its
            only output has the axes `output`.
        concurrency: Number of turns of a loop that may run at once, each with arrays of its own.
        block_size: Number of values of the label that a turn takes, in a loop over a label whose
            body has an axis for them; 0 where a turn takes a single value and the body lacks the
            axis.
    """

    kind: str
    args: tuple[Count, ...]
    labels: tuple[tuple[Count, ...], ...]
    output: tuple[Count, ...]
    weights: tuple[float, ...] = ()
    chunks: tuple[Count, ...] = ()
    body: Program | None = None
    concurrency: Count = 1
    block_size: Count = 0

    @property
    def is_product(self) -> bool:
        """Whether the operation is the product of two arrays."""
        return self.kind == "contract" and len(self.args) == 2

    def sizes(
        self, shapes: Sequence[tuple[int, ...]] | Mapping[int, tuple[int, ...]]
    ) -> dict[int, int]:
        """The size of every label, from the shapes of earlier values by number."""
        sizes: dict[int, int] = {}
        for arg, labels in zip(self.args, self.labels, strict=True):
            sizes |= zip(labels, shapes[arg], strict=True)
        return sizes


@dataclass(frozen=True)
class Program:
    """Operations on numbered values, with the inputs first.

    Args:
        shapes: Shapes of the inputs.
        operations: Operation of every further value, in an order in which they can run.
        outputs: Numbers of the values that the program gives.
        scales: Pair (output, power) of every scale: after the program has run, the scale of a group
            is read off this output, which is of this power in the group.
        powers: Pairs (scale, power) of every output: the output is divided by these powers.
        unshared: Scalar multiplications of all products contracted alone, with nothing shared
            and no common factors taken out.
    """

    shapes: tuple[tuple[Count, ...], ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Count, ...]
    scales: tuple[tuple[Count, Count], ...] = ()
    powers: tuple[tuple[tuple[Count, Count], ...], ...] = ()
    unshared: Count = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Programs are keys of compiled programs, so their operations are hashed only once.
        return hash(
            (self.shapes, self.operations, self.outputs, self.scales, self.powers, self.unshared)
        )

    @classmethod
    def of(
        cls,
        operations: Mapping[Any, Operation],
        inputs: Iterable[Any],
        outputs: Iterable[Any],
        shape: Callable[[Any], tuple[int, ...]],
        **other: Any,
    ) -> Program:
        """The program of operations on values that are named, and not yet numbered.

        Args:
            operations: Operation of every computed value, with names in the place of `args`.
            inputs: Names of the inputs.
            outputs: Names of the outputs.
            shape: Function from the name of an input to its shape.
            other: Other fields of the program.
        """
        inputs = tuple(inputs)
        numbers = {value: n for n, value in enumerate((*inputs, *operations))}
        numbered = [
            op._replace(args=tuple([numbers[a] for a in op.args])) for op in operations.values()
        ]
        given = tuple(numbers[value] for value in outputs)
        return cls(tuple(map(shape, inputs)), tuple(numbered), given, **other)

    @property
    def scaling(self) -> dict[str, Any]:
        """The fields beside shapes, operations and outputs, for a program of equal outputs."""
        return {"scales": self.scales, "powers": self.powers, "unshared": self.unshared}

    @property
    def length(self) -> int:
        """Number of operations, those of loop bodies included."""
        bodies = [op.body for op in self.operations if op.body is not None]
        return len(self.operations) + sum(body.length for body in bodies)

    @property
    def value_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all values, inputs first."""
        return self._sized[0]

    @property
    def sizes(self) -> tuple[dict[int, int], ...]:
        """The size of every label, for each operation."""
        return self._sized[1]

    @cached_property
    def _sized(self) -> tuple[tuple[tuple[int, ...], ...], tuple[dict[int, int], ...]]:
        shapes, sizes = list(self.shapes), []
        for op in self.operations:
            sizes.append(op.sizes(shapes))
            shapes.append(tuple([sizes[-1][label] for label in op.output]))
        return tuple(shapes), tuple(sizes)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The places of the operations that read each value that is read, in order."""
        readers: dict[int, list[int]] = {}
        for n, op in enumerate(self.operations):
            for arg in set(op.args):
                readers.setdefault(arg, []).append(n)
        return readers

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """Scalar multiplications of each operation.

        Sums and contractions of a single argument count as zero.
        """
        costs = []
        for op, sizes in zip(self.operations, self.sizes, strict=True):
            if op.body is not None:
                costs.append(n_iterations(op, sizes) * op.body.multiplications)
            elif op.is_product:
                # One multiplication for every combination of indices, those that are summed
                # included.
                costs.append(math.prod(sizes.values()))
            else:
                costs.append(0)
        return tuple(costs)

    @cached_property
    def multiplications(self) -> int:
        """Scalar multiplications of all operations."""
        return sum(self.costs)

    @property
    def contractions(self) -> int:
        """Number of pairwise contractions, those of a loop's body counted once."""
        contractions = 0
        for op, cost in zip(self.operations, self.costs, strict=True):
            contractions += op.body.contractions if op.body is not None else cost > 0
        return contractions

    @cached_property
    def written_elements(self) -> int:
        """Elements of all computed values, those of a loop's body once for every turn."""
        # The result of a loop is written once; each turn writes the values of the body besides.
        written = sum(map(math.prod, self.value_shapes[len(self.shapes) :]))
        for op, sizes in zip(self.operations, self.sizes, strict=True):
            if op.body is not None:
                written += n_iterations(op, sizes) * op.body.written_elements
        return written


def postorder(roots: Iterable[V], below: Callable[[V], Iterable[V]]) -> list[V]:
    """All nodes of a graph without cycles, each behind the nodes below it, depth first.

    The order is kept on a list and not on Python's stack: a vector that goes through a thousand
    matrices is a thousand nodes deep.

    Example:
        >>> postorder([3], {3: (1, 2), 2: (0, 1), 1: (), 0: ()}.__getitem__)
        [1, 0, 2, 3]
    """
    order: dict[V, None] = {}
    waiting = list(roots)[::-1]
    while waiting:
        node = waiting[-1]
        if left := [x for x in below(node) if x not in order]:
            waiting += reversed(left)
        else:
            order[waiting.pop()] = None
    return list(order)


def n_iterations(loop: Operation, sizes: Mapping[int, int]) -> int:
    """The number of turns of a loop; a block size divides the size of its label."""
    return math.prod(sizes[label] for label in loop.chunks) // max(loop.block_size, 1)


def loop_labels(
    shapes: Sequence[tuple[int, ...]], axes: Sequence[int | None]
) -> tuple[tuple[tuple[int, ...], ...], dict[int, int]]:
    """Labels of the arguments of a loop over a single index.

    The labels only tell sizes and the axis of the loop apart: 0 is the axis of the loop, and every
    size has a label of its own.

    Args:
        shapes: Shapes of the arguments.
        axes: Axis of the loop in each argument, None where the argument lacks it.

    Returns:
        The labels of each argument, and the label of each size.

    Example:
        >>> loop_labels([(4, 3), (3, 3)], [0, None])
        (((0, 1), (1, 1)), {3: 1})
    """
    # Labels of equal sizes may be one label, because a loop never joins its arguments; only its
    # body does. So loops over arrays of equal shapes are equal, and share a program.
    of_size: dict[int, int] = {}
    by_loop = []
    for shape, axis in zip(shapes, axes, strict=True):
        labels = []
        for n, size in enumerate(shape):
            labels.append(0 if n == axis else of_size.setdefault(size, len(of_size) + 1))
        by_loop.append(tuple(labels))
    return tuple(by_loop), of_size


@dataclass(frozen=True)
class PlanStage:
    """A run of a program.

    Args:
        program: Number of the program in the plan.
        inputs: Names of the arrays that the program reads.
        outputs: Names of the arrays that the program gives.
        groups: Scale group of each entry of the program's `scales`.
        degrees: Pairs (scale group, factor): the stage multiplies the group's exponent by the
            factor.
    """

    program: Count
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    groups: tuple[str, ...] = ()
    degrees: tuple[tuple[str, Count], ...] = ()


class Schedule(Protocol):
    """A plan as phases before `plan` read it: stages and their programs.

    Attributes:
        programs: Programs of the plan.
        stages: Runs of these programs, in order.
        shapes: Shapes of the arrays that the plan reads, by name.
        outputs: Names of the results.
        dtype: Precision of the computation.
        runs: Number of runs of the whole plan.
        scales: Scale groups and powers of every output.
    """

    @property
    def programs(self) -> tuple[Program, ...]: ...
    @property
    def stages(self) -> tuple[PlanStage, ...]: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def runs(self) -> int: ...
    @property
    def scales(self) -> dict[str, tuple[tuple[str, int], ...]]: ...


@dataclass(frozen=True)
class WholePlan:
    """All stages of a plan as the work of a single compiled program.

    Args:
        programs: Programs of the plan.
        stages: Stages of the plan.
        names: Names of the arrays that the plan reads, in order.
        shapes: Shapes of these arrays.
        outputs: Names of the plan's outputs.
        length: Number of operations of all stages; a shared program counts once per stage.
    """

    programs: tuple[Program, ...]
    stages: tuple[PlanStage, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[str, ...]
    length: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Whole plans are keys of compiled programs, so their stages are hashed only once.
        return hash((self.programs, self.stages, self.names, self.shapes, self.outputs))


def scale_weights(stages: Sequence[PlanStage]) -> dict[tuple[int, str], float]:
    """The weight of each scale's exponent in the exponent of a group after the last stage.

    A stage of degree n in a group raises every scale that was divided off before it to the power n.
    The weight is therefore the product of the degrees of all later stages.

    Args:
        stages: Stages of a plan, in order.

    Returns:
        Weights by number of the stage and name of the group, in the order of the stages.

    Example:
        >>> first = PlanStage(0, ("x",), ("y",), groups=("g",))
        >>> second = PlanStage(1, ("y", "y"), ("z",), degrees=(("g", 2),))
        >>> scale_weights([first, second])
        {(0, 'g'): 2.0}
    """
    weights: dict[tuple[int, str], float] = {}
    # Stages are gone through from the last to the first, so that `later` holds the product of the
    # degrees of all stages behind the current stage.
    later: dict[str, int] = {}
    for n in reversed(range(len(stages))):
        for group in reversed(stages[n].groups):
            weights[n, group] = float(later.get(group, 1))
        for group, degree in stages[n].degrees:
            later[group] = later.get(group, 1) * degree
    return dict(reversed(weights.items()))
