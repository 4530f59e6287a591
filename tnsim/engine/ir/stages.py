"""The stages of a plan: which program runs on which arrays, and what follows from their order.

In: programs. Out: stages, the shapes of what they hand out, how their scales count in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tnsim.engine.ir.program import Program


@dataclass(frozen=True)
class PlanStage:
    """One run of a program.

    Args:
        program: Its number in the plan.
        inputs: Names of the arrays that it reads.
        outputs: Names of those that it hands out.
        groups: The scale groups that the program's `scales` stand for.
        degrees: (scale group, factor) by which the logarithm of a scale grows in this stage.
    """

    program: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    groups: tuple[str, ...] = ()
    degrees: tuple[tuple[str, int], ...] = ()


class Schedule(Protocol):
    """A plan as its costs and its JSON see it: stages, and the programs that stages run.

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
    """All stages of a plan as the work of one program.

    Args:
        programs: Of the plan.
        stages: Of the plan.
        names: Of the arrays that it reads, in order.
        shapes: Of those arrays.
        outputs: Of the plan.
        length: Number of operations, those of equal stages as often as they run.
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
        return hash((self.programs, self.stages, self.names, self.shapes, self.outputs))


def output_shapes(
    programs: Sequence[Program], stages: Sequence[PlanStage], outputs: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Shape of every output.

    Args:
        programs: Of a plan.
        stages: Of the plan, in order.
        outputs: Names of those that are asked for.

    Returns:
        Shapes by name, in the order of the names.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in stages:
        program = programs[stage.program]
        for name, output in zip(stage.outputs, program.outputs, strict=True):
            shapes[name] = program.value_shapes[output]
    return {name: shapes[name] for name in outputs}


def log_weights(stages: Sequence[PlanStage]) -> dict[tuple[int, str], float]:
    """How often the logarithm of a group's scale in a stage counts in the end.

    Where a stage is of degree n in a group, a scale taken out of the group before it stands to the
    power n behind it: the weight is the product of the degrees of all later stages.

    Args:
        stages: Of a plan, in order.

    Returns:
        Weights by number of the stage and name of the group, in the order of the stages.

    Example:
        >>> first = PlanStage(0, ("x",), ("y",), groups=("g",))
        >>> second = PlanStage(1, ("y", "y"), ("z",), degrees=(("g", 2),))
        >>> log_weights([first, second])
        {(0, 'g'): 2.0}
    """
    found: dict[tuple[int, str], float] = {}
    later: dict[str, int] = {}
    for n in reversed(range(len(stages))):
        for group in reversed(stages[n].groups):
            found[n, group] = float(later.get(group, 1))
        for group, degree in stages[n].degrees:
            later[group] = later.get(group, 1) * degree
    return dict(reversed(found.items()))
