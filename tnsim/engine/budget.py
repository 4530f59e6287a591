"""Budgets, and the choice of a plan that fits a budget.

A plan that needs too much memory is planned again with smaller chunks, up to four times. Where none
of these plans fits, or the work is beyond the budget, `TooLarge` is raised before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE
from tnsim.engine.runtime import devices
from tnsim.engine.runtime.gradients import Pullback
from tnsim.engine.runtime.tiers import seconds_of, tier_in_use
from tnsim.engine.search.routes import BeyondLimit
from tnsim.errors import ModelError, TooLarge
from tnsim.options import checked
from tnsim.sessions import session

FREE_SHARE = 0.8  # share of free memory that a plan may use with its compiling
_ALWAYS_FITS = 2**24  # bytes for which free memory is not looked up


@checked
@dataclass(frozen=True)
class Budget:
    """Limits of memory and work for a single plan with all its runs.

    A plan beyond the budget raises `TooLarge` before anything runs.

    Args:
        memory_bytes: Bytes of arrays in addition to the models; imported libraries and compiling
            come on top, see the page of limits. None stands for 80 % of free
            memory, less the memory of compiling. Free memory is that of the device; on a CPU, the
            least of the machine's, the control groups' and the address space's.
        multiplications: Scalar multiplications; 1e14 take about an hour on two cores.

    Raises:
        ModelError: A limit is not above 0.

    Example:
        >>> Budget(memory_bytes=2**30).room(0)
        1073741824
    """

    memory_bytes: float | None = None
    multiplications: float = 1e14

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None and not limit > 0:
                raise ModelError(f"{name} of a Budget must be above 0, found {limit!r}")

    def room(self, program_bytes: int, wanted: float = math.inf) -> float:
        """Bytes of arrays allowed now; infinite where the platform does not tell free memory.

        Where `wanted` is next to nothing, free memory is not looked up: the look-up would take
        longer than the computation.

        Args:
            program_bytes: Bytes that compiling takes.
            wanted: Bytes of arrays that would be used.
        """
        if self.memory_bytes is not None:
            return self.memory_bytes
        if wanted <= _ALWAYS_FITS:
            return math.inf
        free = devices.available_bytes(compiles=program_bytes > 0)
        return math.inf if free is None else max(0.0, FREE_SHARE * free - program_bytes)


class _Needed(NamedTuple):
    """Bytes that a plan needs in its tier: of arrays, and of compiling."""

    arrays: int
    programs: int


def _needed_bytes(plan: Plan) -> _Needed:
    """The bytes that a plan needs. Raises `TooLarge` where it cannot be compiled but has to be."""
    if tier_in_use() == "interpret":
        return _Needed(plan.interpreted_bytes, 0)
    devices.check_addresses()
    return _Needed(plan.peak_bytes, plan.program_bytes)


def check_pullbacks(pullbacks: Sequence[Pullback], budget: Budget, name: str, advice: str) -> None:
    """Refuse derivatives beyond a budget.

    All plans run first, and what their pullbacks read is kept until these run.

    Args:
        pullbacks: Pullback of each run of a plan.
        budget: Limits of all runs together.
        name: Name of the metric, the beginning of the message.
        advice: Advice where the derivatives do not fit, the end of the message.

    Raises:
        TooLarge: The derivatives take more memory or more multiplications than the budget has.
    """
    # A plan counts all its runs, and here each run has a pullback of its own.
    work = sum(p.forward.multiplications / p.forward.runs + p.multiplications for p in pullbacks)
    if work > budget.multiplications:
        raise TooLarge(
            f"{name} with its gradients needs {work:.3g} multiplications here, more than the "
            f"budget of {budget.multiplications:.3g}; {advice}"
        )
    kept = sum(pullback.kept_bytes for pullback in pullbacks)
    each = [_needed_bytes(pullback.forward) for pullback in pullbacks]
    back = [pullback.own_bytes for pullback in pullbacks]
    arrays = kept + max([memory.arrays for memory in each] + back, default=0)
    allowed = budget.room(max((memory.programs for memory in each), default=0), arrays)
    if arrays > allowed:
        raise TooLarge(
            f"{name} with its gradients needs {arrays / 2**30:.3g} GiB here, of which the way back "
            f"keeps {kept / 2**30:.3g} GiB, and the budget is {allowed / 2**30:.3g} GiB; {advice}"
        )


class PlanAt(Protocol):
    """A function that plans a computation in chunks."""

    def __call__(self, *, large: int, limit: float) -> Plan:
        """The plan.

        Args:
            large: Elements beyond which an intermediate is computed in chunks.
            limit: Multiplications beyond which planning may end with `BeyondLimit`.
        """
        ...


def within(budget: Budget, name: str, plan_at: PlanAt, advice: str) -> Plan:
    """A plan within the budget, its largest contractions in smaller chunks if need be.

    Args:
        budget: Limits of the plan.
        name: Name of the metric or of the sum, the beginning of the message.
        plan_at: Function that plans.
        advice: Advice where no plan fits, the end of the message.

    Returns:
        The plan with the largest chunks that fits.

    Raises:
        TooLarge: No plan fits, or the process has too little address space to compile a plan.
    """
    limit = budget.multiplications

    def planned(large: int) -> Plan:
        # The search is told the limit and gives up early; the plan found is compared with it once
        # more. In smaller chunks it may take more work, as turns compute some values again.
        try:
            plan = plan_at(large=large, limit=limit)
        except BeyondLimit as beyond:
            raise TooLarge(
                f"{name} needs at least {beyond.least:.3g} multiplications here, more than the "
                f"budget of {limit:.3g}; {advice}"
            ) from None
        if plan.multiplications > limit:
            raise TooLarge(
                f"{name} needs {plan.multiplications:.3g} multiplications here, "
                f"more than the budget of {limit:.3g}, and would run about "
                f"{seconds_of(plan):.2g} s in NumPy; {advice}"
            )
        return plan

    best = planned(LARGE)
    needed = _needed_bytes(best)
    allowed = budget.room(needed.programs, needed.arrays)
    if needed.arrays > allowed:  # arrays that other calls left give way
        session().belongings.clear()
        devices.give_back_freed()
        allowed = budget.room(needed.programs, needed.arrays)
    least = needed.arrays
    # Chunks a quarter as large each time; LARGE / 4, / 16, / 64, / 256.
    for finer in range(2, 10, 2):
        if needed.arrays <= allowed or best.input_bytes > allowed:
            break  # it fits already, or never will: chunks make no input smaller
        best = planned(LARGE >> finer)
        needed = _needed_bytes(best)
        least = min(least, needed.arrays)
    if needed.arrays <= allowed:
        return best
    compiling = f"{needed.programs / 2**30:.3g} GiB for compiling"
    share = f" ({FREE_SHARE:.0%} of free memory less {compiling})"
    raise TooLarge(
        f"{name} needs {least / 2**30:.3g} GiB here, and the budget is "
        f"{allowed / 2**30:.3g} GiB{share if budget.memory_bytes is None else ''}; {advice}"
    )
