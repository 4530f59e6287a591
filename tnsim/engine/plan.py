"""A plan: the programs of a computation, their order and their cost.

A plan is a row of stages. Each stage runs a *program*, a short list of pairwise contractions and
weighted sums; stages of equal form share a program. A plan is plain data that JSON holds, and is
shown as a line, as a table of text or as a table of HTML.

*Contractions to be looked at*: a table of einsum steps, and cotengra's trees. A plan shares equal
intermediates between diagrams and adds up what has a common factor, so as a whole it is a directed
graph. What is a tree is the product behind a step, down to the arrays that its stage reads and to
sums and loops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tnsim.engine import costs
from tnsim.engine.costs import Round
from tnsim.engine.ir.plan_json import document, plan_from
from tnsim.engine.ir.problem import ITEM_BYTES
from tnsim.engine.ir.program import (
    Count,
    Operation,
    PlanStage,
    Program,
    Schedule,
    WholePlan,
    scale_weights,
)
from tnsim.errors import ModelError
from tnsim.tables import html_table

if TYPE_CHECKING:
    from cotengra import ContractionTree


class PathStep(NamedTuple):
    """A step of a plan.

    Args:
        stage: Number of the stage.
        kind: "contract", "sum" or "loop"; a loop sums an equation in blocks.
        inputs: Names of the arrays that are read: arrays of the plan, or `#n`, the result of step
            n.
        output: Name of the array that is written.
        equation: The step in the notation of einsum, with names of indices parted by spaces where
            letters do not suffice.
        multiplications: Scalar multiplications.
    """

    stage: int
    kind: str
    inputs: tuple[str, ...]
    output: str
    equation: str
    multiplications: int


class ContractionPath(tuple[PathStep, ...]):
    """The steps of a plan in the order in which they run; printed as a table."""

    def __str__(self) -> str:
        rows = [("step", "stage", "multiplications", "equation", "arrays")]
        for n, step in enumerate(self):
            arrays = f"{', '.join(step.inputs)} -> {step.output}"
            equation = step.equation if step.kind == "contract" else f"{step.kind} {step.equation}"
            rows.append((str(n), str(step.stage), f"{step.multiplications:,}", equation, arrays))
        widths = [max(len(row[n]) for row in rows) for n in range(5)]
        return "\n".join(
            f"{a:>{widths[0]}} {b:>{widths[1]}} {c:>{widths[2]}}  {d:<{widths[3]}}  {e}"
            for a, b, c, d, e in rows
        )


class _Value(NamedTuple):
    """A value of a stage: an array of the plan, or the result of a step.

    Args:
        name: Name in the path.
        shape: Shape of the array.
        operation: Operation that gives it, with its arguments; None of an array of the plan.
        arguments: Values of these arguments.
    """

    name: str
    shape: tuple[int, ...]
    operation: Operation | None = None
    arguments: tuple[_Value, ...] = ()


def path_of(plan: Schedule) -> ContractionPath:
    """The steps of a plan.

    Args:
        plan: Plan to be shown.

    Example:
        >>> import numpy as np, tnsim
        >>> line = tnsim.Model([tnsim.Linear(np.ones((3, 2)))])
        >>> print(path_of(tnsim.plan(line, line).contraction))
        step stage multiplications  equation  arrays
           0     0               6  ab,ab->   A.LAYER0.WEIGHT, B.LAYER0.WEIGHT -> AB
    """
    return ContractionPath(step for step, _ in _steps(plan))


def tree_of(plan: Schedule, step: int | None = None) -> ContractionTree:
    """The tree of contractions behind a step of a plan.

    Args:
        plan: Plan to be shown.
        step: Number of the step in `path_of`; by default the last one of the most multiplications.

    Returns:
        A tree of cotengra, with its costs and drawings. Its leaves are arrays that the stage reads,
        sums and loops, each as often as it is read.

    Raises:
        ModelError: There is no such step, or it is a sum or a loop.

    Example:
        >>> import numpy as np, tnsim
        >>> square = tnsim.Model([tnsim.Bilinear(*[np.ones((3, 3))] * 3)])
        >>> tree_of(tnsim.plan(square, square).contraction, 8).N > 2
        True
    """
    return _product(plan, step)[1]


def _product(plan: Schedule, step: int | None) -> tuple[list[str], ContractionTree]:
    """The names of the leaves of a tree, and the tree, see `tree_of`."""
    from cotengra import ContractionTree, get_symbol

    steps = list(_steps(plan))
    products = [n for n, (found, _) in enumerate(steps) if found.kind == "contract"]
    if step is None and products:
        step = max(products, key=lambda n: (steps[n][0].multiplications, n))
    if step not in products:
        raise ModelError(
            f"the tree of a product is asked for, and step {step} is none of the "
            f"{len(products)} products of the plan: print(plan.path) lists the steps"
        )
    leaves: list[str] = []
    inputs: list[tuple[str, ...]] = []
    sizes: dict[str, int] = {}
    pairs: list[tuple[int, ...]] = []
    fresh = map(get_symbol, itertools.count())

    def visit(value: _Value, indices: tuple[str, ...]) -> int:
        """The place of a value among the leaves from 0, among the products from -1 downwards."""
        sizes.update(zip(indices, value.shape, strict=True))
        operation = value.operation
        if operation is None or operation.kind != "contract":
            leaves.append(value.name)
            inputs.append(indices)
            return len(inputs) - 1
        names = dict(zip(operation.output, indices, strict=True))
        for labels in operation.labels:
            for label in labels:
                if label not in names:
                    names[label] = next(fresh)
        places = []
        for argument, labels in zip(value.arguments, operation.labels, strict=True):
            places.append(visit(argument, tuple(names[label] for label in labels)))
        if len(places) == 1:
            return places[0]  # an index may as well be summed later
        pairs.append(tuple(places))
        return -len(pairs)

    value = steps[step][1]
    output = tuple(next(fresh) for _ in value.shape)
    visit(value, output)

    # Products come behind the leaves, whose number is known by now.
    ssa_path = [tuple(n if n >= 0 else len(inputs) - 1 - n for n in pair) for pair in pairs]
    tree = ContractionTree.from_path(inputs, output, sizes, ssa_path=ssa_path)
    return leaves, tree


def _steps(plan: Schedule) -> Iterator[tuple[PathStep, _Value]]:
    """The steps of a plan, each with the value that it gives."""
    known = {name: _Value(name, shape) for name, shape in plan.shapes.items()}
    count = itertools.count()
    for number, stage in enumerate(plan.stages):
        program = plan.programs[stage.program]
        values = [known[name] for name in stage.inputs]
        names = dict(zip(program.outputs, stage.outputs, strict=True))
        for operation, cost in zip(program.operations, program.costs, strict=True):
            n, at = next(count), len(values)
            arguments = tuple(values[arg] for arg in operation.args)
            name = names.get(at, f"#{n}")
            shape = program.value_shapes[at]
            values.append(_Value(name, shape, operation, arguments))
            read = tuple(argument.name for argument in arguments)
            equation = _equation(operation)
            yield PathStep(number, operation.kind, read, name, equation, cost), values[-1]
        # Later stages may read an output divided by its scale, so it is an array of its own; an
        # array that is only divided keeps its name.
        for value, name in zip(program.outputs, stage.outputs, strict=True):
            known[name] = values[value]._replace(operation=None, arguments=())


def _equation(operation: Operation) -> str:
    """An operation in the notation of einsum."""
    labels = list(dict.fromkeys(itertools.chain(*operation.labels, operation.output)))
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if len(labels) <= len(letters):
        names, between = dict(zip(labels, letters, strict=False)), ""
    else:
        names, between = {label: f"i{n}" for n, label in enumerate(labels)}, " "
    terms = [between.join(names[label] for label in term) for term in operation.labels]
    return f"{','.join(terms)}->{between.join(names[label] for label in operation.output)}"


@dataclass(frozen=True)
class Plan:
    """The computation of the inner products of two models: shapes only, no numbers.

    Plans are made by `tnsim.plan`. The costs of a plan are those of all outputs together.

    Args:
        metric: Name of the metric.
        exact: Whether the plan computes the metric exactly for models of this depth.
        dtype: Precision of the computation: "float64", "float32", or a complex precision for
            networks.
        diagrams: Number of terms in the sums of the inner products.
        programs: Programs that the stages run.
        stages: Stages in the order in which they run.
        shapes: Shapes of all arrays that the plan reads: weights, moments, constants.
        outputs: Names of the inner products: `AB` is `<a|b>`, `AA` and `BB` are squared norms.
        scales: Pairs (scale group, power) of every output; their exponents make up the exponent
            of the output.
        searched_with: Names and versions of the tools that found the contraction paths.
        runs: Number of runs of the whole plan. An exact deep metric takes several runs where models
            have constants or inputs have a mean: a run for every value of an auxiliary variance.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> plan = tnsim.plan(model, model).contraction
        >>> plan.outputs, plan.runs, plan.exact
        (('AB',), 1, True)
    """

    metric: str
    exact: bool
    dtype: str
    diagrams: Count
    programs: tuple[Program, ...]
    stages: tuple[PlanStage, ...]
    shapes: dict[str, tuple[Count, ...]]
    outputs: tuple[str, ...]
    scales: dict[str, tuple[tuple[str, Count], ...]]
    searched_with: str = ""
    runs: Count = 1

    @cached_property
    def multiplications(self) -> int:
        """Scalar multiplications of all inner products in `outputs`, over all runs."""
        once = sum(self.programs[stage.program].multiplications for stage in self.stages)
        return self.runs * once

    @property
    def written_elements(self) -> int:
        """Elements of all intermediates and outputs of the whole plan, over all runs."""
        return self.runs * sum(
            self.programs[stage.program].written_elements for stage in self.stages
        )

    @property
    def unshared_multiplications(self) -> int:
        """Scalar multiplications over all runs if every product were contracted on its own."""
        return self.runs * sum(self.programs[stage.program].unshared for stage in self.stages)

    @property
    def contractions(self) -> int:
        """Distinct pairwise contractions; a program counts once for all stages that run it."""
        return sum(program.contractions for program in self.programs)

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds of stages that run at once, in their order."""
        programs = tuple(self.programs[stage.program] for stage in self.stages)
        return costs.rounds(self.whole, programs, ITEM_BYTES[self.dtype])

    @cached_property
    def peak_elements(self) -> int:
        """Most elements alive at once: arrays, values for later stages, and running stages."""
        read = sum(map(math.prod, self.shapes.values()))
        # A plan without rounds holds its inputs alone.
        return max([read, *(each.elements for each in self.rounds)])

    @property
    def interpreted_bytes(self) -> int:
        """Bytes of all arrays alive at once in a single run, without the arrays of the models."""
        in_run = self.peak_elements * ITEM_BYTES[self.dtype]
        # Only outputs of 32 bits are copied, as they are given in 64.
        is_copied = self.dtype in ("float32", "complex64")
        return max(in_run, self._given_bytes) if is_copied else in_run

    @property
    def peak_bytes(self) -> int:
        """Bytes of all arrays alive at once where the plan is compiled, an estimate.

        Weights laid out in NumPy are freed singly as they are put on the device, so they
        count once. Outputs are copied to the host.
        """
        in_run = costs.COMPILED * self.peak_elements * ITEM_BYTES[self.dtype]
        return max(math.ceil(in_run), self._given_bytes)

    @property
    def _given_bytes(self) -> int:
        """Bytes alive while outputs are copied to arrays of 64 bits."""
        item, wide = ITEM_BYTES[self.dtype], ITEM_BYTES[str(np.result_type(self.dtype, "float64"))]
        return self.input_bytes + (item + wide) * sum(map(math.prod, self.output_shapes.values()))

    @cached_property
    def program_bytes(self) -> int:
        """Bytes that compiling takes, the first time in a process: XLA itself, and its programs."""
        return costs.program_bytes(self)

    @cached_property
    def whole(self) -> WholePlan:
        """The plan without metric, guarantee and scales, as the work of a compiled program."""
        names, shapes = tuple(self.shapes), tuple(map(tuple, self.shapes.values()))
        length = sum(self.programs[stage.program].length for stage in self.stages)
        return WholePlan(self.programs, self.stages, names, shapes, self.outputs, length)

    @cached_property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every output."""
        shapes: dict[str, tuple[int, ...]] = {}
        for stage in self.stages:
            program = self.programs[stage.program]
            for name, output in zip(stage.outputs, program.outputs, strict=True):
                shapes[name] = program.value_shapes[output]
        return {name: shapes[name] for name in self.outputs}

    @cached_property
    def scale_weights(self) -> dict[tuple[int, str], float]:
        """The weight of each scale's exponent in the end, by stage number and scale group."""
        return scale_weights(self.stages)

    @property
    def input_bytes(self) -> int:
        """Bytes of the arrays that the plan reads: weights, moments, masks and positions."""
        elements = sum(math.prod(shape) for shape in self.shapes.values())
        return elements * ITEM_BYTES[self.dtype]

    @property
    def details(self) -> list[tuple[str, str]]:
        """Names and descriptions of the properties that plans of contractions alone have."""
        repeated = f", in {self.runs} runs" if self.runs > 1 else ""
        return [
            ("diagrams", f"{self.diagrams:,}"),
            ("stages", f"{len(self.stages):,} running {len(self.programs)} distinct programs"),
            ("contractions", f"{self.contractions:,} distinct pairwise contractions"),
            ("multiplications", f"{self.multiplications:,} scalar multiplications{repeated}"),
            (
                "unshared",
                f"{self.unshared_multiplications:,} if every product were contracted on its own",
            ),
            (
                "peak memory",
                f"{self.interpreted_bytes / 2**20:,.2f} MiB of {self.dtype} interpreted, "
                f"{self.peak_bytes / 2**20:,.2f} MiB compiled, beside the models",
            ),
            ("compiling", f"{self.program_bytes / 2**20:,.0f} MiB more, once in a process"),
            ("searched with", self.searched_with),
        ]

    @cached_property
    def path(self) -> ContractionPath:
        """The steps in the order in which they run, a tuple that is printed as a table."""
        return path_of(self)

    def tree(self, step: int | None = None) -> ContractionTree:
        """The tree of contractions behind a step, as cotengra has them, with costs and drawings.

        Args:
            step: Number of the step in `path`; by default the last one of the most multiplications.

        Raises:
            ModelError: There is no such step, or it is a sum or a loop.

        Example:
            >>> import numpy as np, tnsim
            >>> square = tnsim.Model([tnsim.Bilinear(*[np.ones((3, 3))] * 3)])
            >>> plan = tnsim.plan(square, square).contraction
            >>> plan.tree(13).N, len(plan.path)
            (6, 15)
        """
        return tree_of(self, step)

    def to_json(self) -> str:
        """The plan as a JSON document with a digest of its content, which `from_json` reads."""
        return document(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan that `to_json` wrote.

        Args:
            text: JSON document, in any indentation and order of keys.

        Raises:
            CheckpointError: For text that is no plan of this format, for a plan that cannot run,
                and for a plan that was changed: another coefficient would give another number.

        Example:
            >>> import numpy as np, tnsim
            >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
            >>> plan = tnsim.plan(model, model).contraction
            >>> tnsim.engine.plan.Plan.from_json(plan.to_json()) == plan
            True
        """
        return plan_from(text, cls)

    def __repr__(self) -> str:
        guarantee = "exact" if self.exact else "approximation"
        return (
            f"Plan({self.metric}, {guarantee}: {', '.join(self.outputs)}; "
            f"{self.multiplications:,} multiplications, "
            f"{self.peak_bytes / 2**20:,.2f} MiB of {self.dtype})"
        )

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {text}" for name, text in self._rows)

    def _repr_html_(self) -> str:
        return html_table("Plan", self._rows)

    @property
    def _rows(self) -> list[tuple[str, str]]:
        """Names and descriptions of the properties that tables of a plan show."""
        return [
            ("metric", f"{self.metric} ({'exact' if self.exact else 'approximation'})"),
            ("inner products", ", ".join(self.outputs)),
            *self.details,
        ]
