"""A program: a small compiled program over numbered values. In: nothing. Out: plain data, and what
it costs.

Values are arrays, numbered inputs first. A stage of a plan runs a program, and stages of equal
shape share one: a 64-layer stack is a handful of compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Operation(NamedTuple):
    """One value of a program.

    Args:
        kind: "contract": the product of one or two arguments, summed over the labels that are not
            in the output. "sum": the sum of `weights[i] * args[i]`, axes permuted to the order of
            the output. "loop": the sum of `body` over all values of the labels `chunks`, which
            bounds memory.
        args: Numbers of the values that it reads.
        labels: The axes of each argument; equal labels are one index.
        output: The axes of the result.
        weights: Of a sum, one for every argument.
        chunks: Of a loop, the labels that it goes through.
        body: Of a loop, a program whose inputs are the arguments with `chunks` fixed and whose one
            output has the axes `output`.
        concurrency: Of a loop, how many turns may run at once, each with arrays of its own.
        block: Of a loop over one label, how many of its values a turn takes, where the body keeps
            their axis; 0 where a turn takes one value and the body has no such axis.
    """

    kind: str
    args: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    weights: tuple[float, ...] = ()
    chunks: tuple[int, ...] = ()
    body: Program | None = None
    concurrency: int = 1
    block_size: int = 0

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[int, int]:
        """The size of every label, by the shapes of all values that come before."""
        sizes: dict[int, int] = {}
        for arg, labels in zip(self.args, self.labels, strict=True):
            sizes |= zip(labels, shapes[arg], strict=True)
        return sizes


@dataclass(frozen=True)
class Program:
    """Inputs by shape, then operations; values are numbered inputs first.

    Args:
        shapes: Of the inputs.
        operations: One for every further value, in an order in which they can run.
        outputs: Numbers of the values that are handed out.
        scales: (output, power) of the values that renormalise a scale group after the program has
            run.
        powers: For every output the (scale, power) pairs that it is divided by.
        unshared: Scalar multiplications of its products contracted one by one, nothing shared and
            no sums taken first.
    """

    shapes: tuple[tuple[int, ...], ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]
    scales: tuple[tuple[int, int], ...] = ()
    powers: tuple[tuple[tuple[int, int], ...], ...] = ()
    unshared: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Programs are keys of compiled programs: the operations of a long one are hashed once.
        return hash(
            (self.shapes, self.operations, self.outputs, self.scales, self.powers, self.unshared)
        )

    @property
    def length(self) -> int:
        """Operations, those of loop bodies too."""
        bodies = [op.body for op in self.operations if op.body is not None]
        return len(self.operations) + sum(body.length for body in bodies)

    @cached_property
    def value_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all values, inputs first."""
        shapes = list(self.shapes)
        for op in self.operations:
            sizes = op.sizes(shapes)
            shapes.append(tuple(sizes[label] for label in op.output))
        return tuple(shapes)

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """Scalar multiplications of each operation.

        Sums and single-argument reductions have none.
        """
        costs = []
        for op in self.operations:
            sizes = op.sizes(self.value_shapes)
            if op.body is not None:
                costs.append(n_iterations(op, sizes) * op.body.multiplications)
            elif op.kind == "contract" and len(op.args) == 2:
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
        """Pairwise contractions, those of a loop body once."""
        contractions = 0
        for op, cost in zip(self.operations, self.costs, strict=True):
            contractions += op.body.contractions if op.body is not None else cost > 0
        return contractions

    @cached_property
    def written_elements(self) -> int:
        """Elements of all values that operations make, those of loop bodies once for every turn."""
        made = zip(self.operations, self.value_shapes[len(self.shapes) :], strict=True)
        written = 0
        for op, shape in made:
            written += math.prod(shape)
            if op.body is not None:
                count = n_iterations(op, op.sizes(self.value_shapes))
                written += count * op.body.written_elements
        return written


def n_iterations(loop: Operation, sizes: dict[int, int]) -> int:
    """How often the body of a loop runs; a block divides the size of its label."""
    return math.prod(sizes[label] for label in loop.chunks) // max(loop.block_size, 1)


def loop_labels(
    shapes: Sequence[tuple[int, ...]], axes: Sequence[int | None]
) -> tuple[tuple[tuple[int, ...], ...], dict[int, int]]:
    """Labels of the arguments of a loop over one index.

    They only have to tell sizes and the loop's axis: 0 is that axis, each size is another.

    Args:
        shapes: Of the arguments.
        axes: Which axis of each is that of the loop, None for no axis.

    Returns:
        The labels of each argument, and the label of each size.

    Example:
        >>> loop_labels([(4, 3), (3, 3)], [0, None])
        (((0, 1), (1, 1)), {3: 1})
    """
    of_size: dict[int, int] = {}
    found = []
    for shape, axis in zip(shapes, axes, strict=True):
        labels = []
        for n, size in enumerate(shape):
            labels.append(0 if n == axis else of_size.setdefault(size, len(of_size) + 1))
        found.append(tuple(labels))
    return tuple(found), of_size
