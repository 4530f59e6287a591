"""A plan: what will be contracted, in which order, at what cost.

In: nothing. Out: plain data, JSON both ways.

A plan is a row of stages. Each stage runs one *piece*, a small program of pairwise contractions and
weighted sums over numbered values; stages of equal shape share one piece, so a 64-layer stack has a
handful of pieces and compiles as many programs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tnsim.engine import buffers
from tnsim.engine.documents import opened, sealed
from tnsim.errors import CheckpointError, ModelError
from tnsim.tables import html_table

FORMAT = 2
DTYPES = ("float64", "float32")


def dtype_name(dtype: DTypeLike) -> str:
    """The name of a precision that plans run in.

    Args:
        dtype: what NumPy takes for one: `"float32"`, `np.float32`, `np.dtype("f4")`, `jnp.float32`.

    Returns:
        `"float64"` or `"float32"`.

    Raises:
        ModelError: for any other.

    Example:
        >>> import numpy as np
        >>> dtype_name(np.float32)
        'float32'
    """
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError):
        name = None
    if name not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    return name


# Measured by benchmarks/memory.py. A matrix product packs its operands in blocks, and XLA orders
# operations of its own, in long programs rather differently.
SLACK, LONG_SLACK, LONG = 1.08, 1.4, 120
# What compiling takes: once, for every loop that is compiled (matrix products are library calls),
# and once more where runs are repeated, for what is set up between them.
PROGRAM_BYTES, LOOP_BYTES, REPEATING_BYTES = 46 * 2**20, 330 * 2**10, 36 * 2**20


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


@dataclass(frozen=True)
class PlanStage:
    """One run of a piece: names of its inputs and outputs, and the scale groups it renormalises.

    `degrees[group]` is the factor by which the logarithm of a group grows in this stage; `groups`
    lists the groups that the piece's `scales` stand for.
    """

    piece: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    groups: tuple[str, ...] = ()
    degrees: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """What would run for the inner products of two models under one metric; shapes only, no
    numbers.

    Costs are those of all `outputs` together, each run `runs` times: an exact deep metric of
    models with constants or of inputs with a mean runs its whole plan at several values of an
    auxiliary variance (see `folding.whole_tree.moment_nodes`). `scales` gives, per output, the
    scale groups whose logarithms make up its own. `exact` repeats the metric's guarantee for
    models of this depth.
    """

    metric: str
    exact: bool
    dtype: str
    diagrams: int
    pieces: tuple[Piece, ...]
    stages: tuple[PlanStage, ...]
    shapes: dict[str, tuple[int, ...]]
    outputs: tuple[str, ...]
    scales: dict[str, tuple[tuple[str, int], ...]]
    searched_with: str = ""
    runs: int = 1

    @property
    def multiplications(self) -> int:
        """Scalar multiplications of all inner products in `outputs`, over all runs."""
        once = sum(self.pieces[stage.piece].multiplications for stage in self.stages)
        return self.runs * once

    @property
    def written_elements(self) -> int:
        """Elements of all intermediates and outputs of the whole plan, over all runs."""
        return self.runs * sum(self.pieces[stage.piece].written_elements for stage in self.stages)

    @property
    def unshared_multiplications(self) -> int:
        """The same if every product of every stage were contracted on its own."""
        return self.runs * sum(self.pieces[stage.piece].unshared for stage in self.stages)

    @property
    def contractions(self) -> int:
        """Distinct pairwise contractions.

        Every piece is counted once, however many stages run it.
        """
        return sum(piece.contractions for piece in self.pieces)

    @cached_property
    def peak_elements(self) -> int:
        """Largest number of elements alive at once.

        Weights, values kept between stages, the stage that runs.
        """
        last = {name: n for n, stage in enumerate(self.stages) for name in stage.inputs}
        last |= dict.fromkeys(self.outputs, len(self.stages))
        alive = {name: math.prod(shape) for name, shape in self.shapes.items()}
        peak = sum(alive.values())
        for n, stage in enumerate(self.stages):
            piece, read = self.pieces[stage.piece], set(stage.inputs)
            waiting = sum(size for name, size in alive.items() if name not in read)
            peak = max(peak, waiting + piece.peak_elements)
            for name, output in zip(stage.outputs, piece.outputs, strict=True):
                alive[name] = math.prod(piece.value_shapes[output])
            for name in (*stage.inputs, *stage.outputs):
                if last.get(name, n) == n and name not in self.shapes:
                    alive.pop(name, None)
        return peak

    @property
    def peak_bytes(self) -> int:
        """Bytes of all arrays alive at once in one run, beside those of the models.

        Weights laid out in NumPy are let go one by one as they are put on the device, so they
        count once.
        """
        longest = max((piece.length for piece in self.pieces), default=0)
        slack = LONG_SLACK if longest > LONG else SLACK
        return math.ceil(slack * self.array_bytes)

    @property
    def program_bytes(self) -> int:
        """Bytes that compiling takes, the first time in a process.

        What XLA works with, and the programs.
        """
        loops = sum(piece.loops for piece in self.pieces)
        repeating = REPEATING_BYTES if self.runs > 1 else 0
        return PROGRAM_BYTES + LOOP_BYTES * loops + repeating

    @property
    def input_bytes(self) -> int:
        """Bytes of the arrays that the plan reads: weights, moments, masks and positions."""
        elements = sum(math.prod(shape) for shape in self.shapes.values())
        return elements * self._item

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays alive at once if they are computed in the order written."""
        return self.peak_elements * self._item

    @property
    def _item(self) -> int:
        return 8 if self.dtype == "float64" else 4

    def to_json(self) -> str:
        """One JSON document with a digest of its content; `from_json` gives an equal plan back."""
        return sealed({"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan that `to_json` wrote.

        Args:
            text: the document. Indentation and the order of its keys do not matter.

        Raises:
            CheckpointError: for what is no plan of this format, for one that cannot run, and for
                one that was changed: another coefficient would give another number.

        Example:
            >>> import numpy as np, tnsim
            >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
            >>> plan = tnsim.plan(model, model)
            >>> tnsim.Plan.from_json(plan.to_json()) == plan
            True
        """
        from tnsim.engine.plan_json import plan_from_data

        try:
            data = opened(text)
            if data.pop("format", None) != FORMAT:
                raise ValueError("another format number")
            return plan_from_data(data)
        except (ValueError, TypeError) as error:
            reason = str(error)
        except RecursionError:
            reason = "it is nested too deeply"
        raise CheckpointError(f"not a tnsim plan in format {FORMAT}: {reason}")

    def __repr__(self) -> str:
        guarantee = "exact" if self.exact else "approximation"
        return (
            f"Plan({self.metric}, {guarantee}: {', '.join(self.outputs)}; "
            f"{self.multiplications:,} multiplications, "
            f"{self.peak_bytes / 2**20:,.2f} MiB of {self.dtype})"
        )

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        return html_table("Plan", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        """What a reader wants to know, in words."""
        repeated = f", in {self.runs} runs" if self.runs > 1 else ""
        return [
            ("metric", f"{self.metric} ({'exact' if self.exact else 'approximation'})"),
            ("inner products", ", ".join(self.outputs)),
            ("diagrams", f"{self.diagrams:,}"),
            ("stages", f"{len(self.stages):,} running {len(self.pieces)} distinct pieces"),
            ("contractions", f"{self.contractions:,} distinct pairwise contractions"),
            ("multiplications", f"{self.multiplications:,} scalar multiplications{repeated}"),
            (
                "unshared",
                f"{self.unshared_multiplications:,} if every product were contracted on its own",
            ),
            (
                "peak memory",
                f"{self.peak_bytes / 2**20:,.2f} MiB of {self.dtype} beside the models",
            ),
            ("compiling", f"{self.program_bytes / 2**20:,.0f} MiB more, once in a process"),
            ("searched with", self.searched_with),
        ]
