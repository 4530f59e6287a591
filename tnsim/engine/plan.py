"""A plan: what will be contracted, in which order, at what cost.

In: programs. Out: plain data, JSON both ways.

A plan is a row of stages. Each stage runs one *program*, a small compiled program of pairwise
contractions and weighted sums; stages of equal shape share one.

[merged from engine/plan_text]
What is shown of a plan. In: a plan. Out: a line, a table as text, a table as HTML.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tnsim.engine import costs
from tnsim.engine.costs import ParallelGroup, rounds
from tnsim.engine.ir import stages as stages_module
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.ir.plan_json import document, plan_from
from tnsim.engine.ir.program import Program
from tnsim.engine.ir.stages import PlanStage, WholePlan
from tnsim.tables import html_table


@dataclass(frozen=True)
class Plan:
    """What would run for the inner products of two models: shapes only, no numbers.

    Made by `tnsim.plan`. Its costs are those of all outputs together.

    Args:
        metric: Name of the metric.
        exact: Whether its definition is met exactly for models of this depth.
        dtype: Precision of the computation, "float64" or "float32".
        diagrams: Terms that the inner products are sums of.
        programs: The compiled programs that its stages run.
        stages: In the order in which they run.
        shapes: Of every array that is read: weights, moments, constants.
        outputs: Names of the inner products: `AB` is `<a|b>`, `AA` and `BB` are squared norms.
        scales: For every output, the (scale group, power) pairs whose logarithms make up its own.
        searched_with: What its contraction paths were found with.
        runs: How often all of it is run. An exact deep metric takes several runs where models have
            constants or inputs a mean: one for every value of an auxiliary variance.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> plan = tnsim.plan(model, model)
        >>> plan.outputs, plan.runs, plan.exact
        (('AB',), 1, True)
    """

    metric: str
    exact: bool
    dtype: str
    diagrams: int
    programs: tuple[Program, ...]
    stages: tuple[PlanStage, ...]
    shapes: dict[str, tuple[int, ...]]
    outputs: tuple[str, ...]
    scales: dict[str, tuple[tuple[str, int], ...]]
    searched_with: str = ""
    runs: int = 1

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
        """The same if every product of every stage were contracted on its own."""
        return self.runs * sum(self.programs[stage.program].unshared for stage in self.stages)

    @property
    def contractions(self) -> int:
        """Distinct pairwise contractions: a program counts once, however many stages run it."""
        return sum(program.contractions for program in self.programs)

    @cached_property
    def rounds(self) -> tuple[ParallelGroup, ...]:
        """Which stages run at once, one round after another."""
        return rounds(self)

    @cached_property
    def peak_elements(self) -> int:
        """Most elements alive at once: weights, values that wait, those of stages that run."""
        return costs.plan_peak_elements(self.shapes, self.rounds)

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes of all arrays alive at once in one run, beside those of the models.

        Weights laid out in NumPy are let go one by one as they are put on the device, so they
        count once.
        """
        return costs.allocated_bytes(self.programs, self.array_bytes)

    @cached_property
    def program_bytes(self) -> int:
        """Bytes that compiling takes, the first time in a process: XLA itself, and its programs."""
        return costs.program_bytes(self)

    @cached_property
    def whole(self) -> WholePlan:
        """What runs, without what it is for."""
        names, shapes = tuple(self.shapes), tuple(map(tuple, self.shapes.values()))
        length = sum(self.programs[stage.program].length for stage in self.stages)
        return WholePlan(self.programs, self.stages, names, shapes, self.outputs, length)

    @cached_property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every output."""
        return stages_module.output_shapes(self.programs, self.stages, self.outputs)

    @cached_property
    def log_weights(self) -> dict[tuple[int, str], float]:
        """How often the logarithm of a group in a stage, by its number, counts in the end."""
        return stages_module.log_weights(self.stages)

    @property
    def input_bytes(self) -> int:
        """Bytes of the arrays that the plan reads: weights, moments, masks and positions."""
        elements = sum(math.prod(shape) for shape in self.shapes.values())
        return elements * ITEM_BYTES[self.dtype]

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays alive at once."""
        return self.peak_elements * ITEM_BYTES[self.dtype]

    def to_json(self) -> str:
        """One JSON document with a digest of its content; `from_json` gives an equal plan back."""
        return document(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan that `to_json` wrote.

        Args:
            text: The document. Indentation and the order of its keys do not matter.

        Raises:
            CheckpointError: For what is no plan of this format, for one that cannot run, and for
                one that was changed: another coefficient would give another number.

        Example:
            >>> import numpy as np, tnsim
            >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
            >>> plan = tnsim.plan(model, model)
            >>> tnsim.Plan.from_json(plan.to_json()) == plan
            True
        """
        return plan_from(text, cls)

    def __repr__(self) -> str:
        return one_line(self)

    def __str__(self) -> str:
        return table(self)

    def _repr_html_(self) -> str:
        return html(self)


def one_line(plan: Plan) -> str:
    """Metric, guarantee, inner products and cost."""
    guarantee = "exact" if plan.exact else "approximation"
    return (
        f"Plan({plan.metric}, {guarantee}: {', '.join(plan.outputs)}; "
        f"{plan.multiplications:,} multiplications, "
        f"{plan.peak_bytes / 2**20:,.2f} MiB of {plan.dtype})"
    )


def table(plan: Plan) -> str:
    """One line for everything that a reader wants to know."""
    return "\n".join(f"{name:<16} {text}" for name, text in _rows(plan))


def html(plan: Plan) -> str:
    """The same as a table for notebooks."""
    return html_table("Plan", _rows(plan))


def _rows(plan: Plan) -> list[tuple[str, str]]:
    """What a reader wants to know, in words."""
    repeated = f", in {plan.runs} runs" if plan.runs > 1 else ""
    return [
        ("metric", f"{plan.metric} ({'exact' if plan.exact else 'approximation'})"),
        ("inner products", ", ".join(plan.outputs)),
        ("diagrams", f"{plan.diagrams:,}"),
        ("stages", f"{len(plan.stages):,} running {len(plan.programs)} distinct programs"),
        ("contractions", f"{plan.contractions:,} distinct pairwise contractions"),
        ("multiplications", f"{plan.multiplications:,} scalar multiplications{repeated}"),
        (
            "unshared",
            f"{plan.unshared_multiplications:,} if every product were contracted on its own",
        ),
        (
            "peak memory",
            f"{plan.peak_bytes / 2**20:,.2f} MiB of {plan.dtype} beside the models",
        ),
        ("compiling", f"{plan.program_bytes / 2**20:,.0f} MiB more, once in a process"),
        ("searched with", plan.searched_with),
    ]
