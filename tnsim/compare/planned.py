"""Plans within a budget.

In: a family, the inner products wanted. Out: a plan that may run, or `TooLarge`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tnsim.engine import memory
from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE, plan_problem
from tnsim.errors import ModelError, TooLarge
from tnsim.folding.base import Family
from tnsim.metrics.metric import check_metric
from tnsim.models.model import Combination, Model, check_comparable, terms
from tnsim.names import Pair
from tnsim.sessions import remembered

AnyModel = Model | Combination

FREE_SHARE = 0.8
_ADVICE = (
    "use GaussianClosure() (an approximation beyond one nonlinear layer), smaller widths, shorter "
    "sequences (n_ctx) or a larger tnsim.Budget"
)


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

    Example:
        >>> Budget(memory_bytes=2**30).room(0)
        1073741824
    """

    memory_bytes: float | None = None
    multiplications: float = 1e14

    def room(self, program_bytes: int, wanted: float = math.inf) -> float:
        """Bytes of arrays allowed now, infinite where the platform does not tell what is free.

        What is `wanted` is not looked up where it is next to nothing: that would take longer than
        to compute it.
        """
        if self.memory_bytes is not None:
            return self.memory_bytes
        if wanted <= _ALWAYS_FITS:
            return math.inf
        free = memory.available_bytes()
        return math.inf if free is None else max(0.0, FREE_SHARE * free - program_bytes)


@remembered
def plan_for(
    family: Family, pairs: tuple[Pair, ...], per_output: bool, dtype: str, large: int = LARGE
) -> Plan:
    """The plan of the inner products `pairs`.

    `large`: elements beyond which an intermediate is computed in chunks.
    """
    problem = family.problem(pairs, per_output)
    runs = len(family.nodes.points) if family.nodes else 1
    return plan_problem(problem, family.name, family.exact, dtype, large, runs)


def check(a: Any, b: Any, metric: Any) -> None:
    """Raise `ModelError` unless these are two models that this metric can compare."""
    check_metric(metric)
    one, two = terms(a)[0][1], terms(b)[0][1]
    check_comparable(one, two)
    if one.n_ctx is None and (one.attends or two.attends):
        raise ModelError(
            "attention is compared on sequences of one length: "
            "give tnsim.Model(layers, n_ctx=...) or tnsim.load(..., n_ctx=...)"
        )


def affordable(
    family: Family, wanted: tuple[Pair, ...], per_output: bool, dtype: str, budget: Budget
) -> Plan:
    """A plan within the budget, its largest contractions in smaller chunks if need be.

    Raises `TooLarge`.
    """
    best = plan_for(family, wanted, per_output, dtype, LARGE)
    if best.multiplications > budget.multiplications:
        raise TooLarge(
            f"{best.metric} needs {best.multiplications:.3g} multiplications here, "
            f"more than the budget of {budget.multiplications:.3g}; {_ADVICE}"
        )
    allowed = budget.room(best.program_bytes, best.peak_bytes)
    least = best.peak_bytes
    for finer in range(2, 10, 2):
        if best.peak_bytes <= allowed or best.input_bytes > allowed:
            break  # chunks make no input smaller
        best = plan_for(family, wanted, per_output, dtype, LARGE >> finer)
        least = min(least, best.peak_bytes)
    if best.peak_bytes <= allowed:
        return best
    compiling = f"{best.program_bytes / 2**30:.3g} GiB for compiling"
    share = f" ({FREE_SHARE:.0%} of free memory less {compiling})"
    raise TooLarge(
        f"{best.metric} needs {least / 2**30:.3g} GiB here, and the budget is "
        f"{allowed / 2**30:.3g} GiB{share if budget.memory_bytes is None else ''}; {_ADVICE}"
    )
