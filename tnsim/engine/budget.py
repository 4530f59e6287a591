"""What a plan may use.

In: a budget, plans of one problem in larger and smaller chunks. Out: one that fits, or `TooLarge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE
from tnsim.engine.runtime import devices
from tnsim.engine.runtime.rates import seconds
from tnsim.errors import ModelError, TooLarge
from tnsim.sessions import session

FREE_SHARE = 0.8
_ALWAYS_FITS = 2**24


@dataclass(frozen=True)
class Budget:
    """What one plan may use, all its runs together.

    Beyond it `TooLarge` is raised before anything runs.

    Args:
        memory_bytes: Bytes of arrays beside the models. None for 80 % of what is free, less what
            compiling takes: on the device and, on a CPU, in the machine, under the process's
            control groups and within its address space.
        multiplications: Scalar ones; 1e14 take about an hour on two cores.

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
        """Bytes of arrays allowed now, infinite where the platform does not tell what is free.

        What is `wanted` is not looked up where it is next to nothing: that would take longer than
        to compute it.
        """
        if self.memory_bytes is not None:
            return self.memory_bytes
        if wanted <= _ALWAYS_FITS:
            return math.inf
        free = devices.available_bytes()
        return math.inf if free is None else max(0.0, FREE_SHARE * free - program_bytes)


def check_budget(budget: Any) -> None:
    """Refuse what is no budget.

    Raises:
        ModelError: It is something else, such as a number of bytes.

    Example:
        >>> check_budget(2**30)
        Traceback (most recent call last):
        tnsim.errors.ModelError: a budget is tnsim.Budget(memory_bytes=...), found 1073741824
    """
    if not isinstance(budget, Budget):
        raise ModelError(f"a budget is tnsim.Budget(memory_bytes=...), found {budget!r}")


def within(budget: Budget, plan_at: Callable[[int], Plan], advice: str) -> Plan:
    """A plan within the budget, its largest contractions in smaller chunks if need be.

    Args:
        budget: What it may use.
        plan_at: Gives the plan whose intermediates beyond so many elements are chunked.
        advice: What to do where none fits; ends the message.

    Raises:
        TooLarge: None fits, or the process has too little address space to compile any.
    """
    check_budget(budget)
    devices.check_addresses()
    best = plan_at(LARGE)
    if best.multiplications > budget.multiplications:
        raise TooLarge(
            f"{best.metric} needs {best.multiplications:.3g} multiplications here, "
            f"more than the budget of {budget.multiplications:.3g}, and would run "
            f"{seconds(best)}; {advice}"
        )
    allowed = budget.room(best.program_bytes, best.peak_bytes)
    if best.peak_bytes > allowed:  # what other calls left gives way
        session().belongings.clear()
        devices.give_back_freed()
        allowed = budget.room(best.program_bytes, best.peak_bytes)
    least = best.peak_bytes
    for finer in range(2, 10, 2):
        if best.peak_bytes <= allowed or best.input_bytes > allowed:
            break  # chunks make no input smaller
        best = plan_at(LARGE >> finer)
        least = min(least, best.peak_bytes)
    if best.peak_bytes <= allowed:
        return best
    compiling = f"{best.program_bytes / 2**30:.3g} GiB for compiling"
    share = f" ({FREE_SHARE:.0%} of free memory less {compiling})"
    raise TooLarge(
        f"{best.metric} needs {least / 2**30:.3g} GiB here, and the budget is "
        f"{allowed / 2**30:.3g} GiB{share if budget.memory_bytes is None else ''}; {advice}"
    )
