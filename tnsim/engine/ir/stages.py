"""The stages of a plan: runs of programs on named arrays, in order.

From the stages follows how often the exponent of each scale counts in the exponent of an output
(`scale_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tnsim.engine.ir.program import Count, Program


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
