"""A piece: a small program over numbered values. In: nothing. Out: plain data, and what it costs.

Values are arrays, numbered inputs first. A stage of a plan runs a piece, and stages of equal shape
share one: a 64-layer stack is a handful of compiled programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tnsim.engine import buffers


class Operation(NamedTuple):
    """One value of a piece. `labels` name the axes of each argument, `output` those of the result.

    "contract": the product of one or two arguments, summed over the labels that are not in the
    output.
    "sum": the sum of `weights[i] * args[i]`, axes permuted to the output's order.
    "loop": the sum over all values of the labels `chunks` of `body`, a piece whose inputs are the
    arguments with those labels fixed and whose one output has the axes `output`; it bounds memory.
    """

    kind: str
    args: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    weights: tuple[float, ...] = ()
    chunks: tuple[int, ...] = ()
    body: Piece | None = None


@dataclass(frozen=True)
class Piece:
    """Inputs by shape, then operations; values are numbered inputs first.

    `scales` lists (output, power) of the values that renormalise a scale group after the piece
    has run, `powers` for every output the (scale, power) pairs it is divided by. `unshared`:
    multiplications of its products contracted one by one, nothing shared and no sums taken first.
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
        return hash(
            (self.shapes, self.operations, self.outputs, self.scales, self.powers, self.unshared)
        )

    @property
    def length(self) -> int:
        """Operations, those of loop bodies too."""
        return sum(1 + (op.body.length if op.body else 0) for op in self.operations)

    @cached_property
    def value_shapes(self) -> tuple[tuple[int, ...], ...]:
        found = list(self.shapes)
        for op in self.operations:
            sizes = self._sizes(op, found)
            found.append(tuple(sizes[label] for label in op.output))
        return tuple(found)

    @staticmethod
    def _sizes(op: Operation, shapes: list | tuple) -> dict[int, int]:
        return {
            x: n
            for arg, labels in zip(op.args, op.labels, strict=True)
            for x, n in zip(labels, shapes[arg], strict=True)
        }

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """Scalar multiplications of each operation.

        Sums and single-argument reductions have none.
        """
        found = []
        for op in self.operations:
            sizes = self._sizes(op, self.value_shapes)
            if op.body is not None:
                found.append(math.prod(sizes[x] for x in op.chunks) * op.body.multiplications)
            else:
                found.append(
                    math.prod(sizes.values()) if len(op.args) == 2 and op.kind == "contract" else 0
                )
        return tuple(found)

    @property
    def multiplications(self) -> int:
        return sum(self.costs)

    @property
    def contractions(self) -> int:
        inside = sum(op.body.contractions for op in self.operations if op.body)
        return inside + sum(
            cost > 0 and op.body is None
            for op, cost in zip(self.operations, self.costs, strict=True)
        )

    @cached_property
    def written_elements(self) -> int:
        """Elements of all values that operations make, those of loop bodies once for every turn."""
        made = zip(self.operations, self.value_shapes[len(self.shapes) :], strict=True)
        written = 0
        for op, shape in made:
            written += math.prod(shape)
            if op.body is not None:
                sizes = self._sizes(op, self.value_shapes)
                turns = math.prod(sizes[label] for label in op.chunks)
                written += turns * op.body.written_elements
        return written

    @cached_property
    def peak_elements(self) -> int:
        """Largest number of elements alive at once when the piece runs compiled, see `buffers`."""
        return buffers.peak_elements(self)

    @cached_property
    def loops(self) -> int:
        """Loops over entries that XLA compiles: sums, products entry by entry, reductions."""
        return buffers.loops(self)
