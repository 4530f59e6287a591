"""Plans of inner products within a budget, for two models and a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from tnsim.engine.budget import Budget, within
from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE, plan_problem
from tnsim.engine.runtime.devices import backend
from tnsim.engine.runtime.tiers import seconds_of
from tnsim.engine.search.progress import planning
from tnsim.long_work import announced
from tnsim.names import Pair
from tnsim.problems.base import Family
from tnsim.sessions import session

ADVICE = (
    "use GaussianClosure() (an approximation beyond one nonlinear layer), smaller widths, shorter "
    "sequences (n_ctx) or a larger tnsim.Budget"
)
"""Advice where a comparison is beyond its budget."""

PREPARING, AROUND = 0.02, 1.5
"""Seconds of writing models in units and of measuring how far sums cancel, and all time of a run as
a multiple of its steps' time."""
_BRIEF = 1e9  # multiplications that take no seconds
_BUSY = {"cpu": 2**20, "gpu": 2**27}
"""Multiplications of one operation that keep all of a device busy, by JAX's name of the device."""


def plan_for(
    family: Family,
    pairs: tuple[Pair, ...],
    slices: bool,
    dtype: str,
    large: int = LARGE,
    limit: float = math.inf,
) -> Plan:
    """The plan of some inner products, the same object at every call in a session.

    Args:
        family: Way in which the models and the metric become a problem.
        pairs: Inner products that are wanted.
        slices: Whether outputs are told apart.
        dtype: Precision of the computation.
        large: Elements beyond which an intermediate is computed in chunks.
        limit: Multiplications beyond which planning ends early, see `plan_problem`.

    Raises:
        BeyondLimit: The plan takes more multiplications than the limit.
    """

    def planned() -> Plan:
        with planning(family.name):
            problem = family.problem(pairs, slices)  # refuses trees of too many legs
            # A plan with moment nodes runs once at each, and a budget counts all runs.
            runs = len(family.nodes.points) if family.nodes else 1
            return plan_problem(problem, family.name, family.exact, dtype, large, runs, limit)

    # The limit ends a search and changes no plan.
    return session().results.get((plan_for, family, pairs, slices, dtype, large), planned)


def affordable(
    family: Family, wanted: tuple[Pair, ...], slices: bool, dtype: str, budget: Budget
) -> Plan:
    """A plan of some inner products within the budget. Raises `TooLarge` where none fits."""
    return within(budget, family.name, partial(plan_for, family, wanted, slices, dtype), ADVICE)


def runs_together(plan: Plan, budget: Budget) -> bool:
    """Whether the runs of a plan at all moment nodes become a single run on stacks of moments.

    Small operations then take the time of a single node for all nodes (measured on four cores: 2.5
    ms become 1.1 ms at width 8 and depth 2, 450 ms become 260 ms at width 6 and depth 3). An
    operation that keeps the device busy by itself gains nothing, and XLA multiplies stacks of
    matrices more slowly than matrices (4.6 s become 6.2 s at width 64 and depth 2). The stacks must
    also fit into the budget's memory.
    """
    # The average operation of a run keeps the device busy by itself.
    busy = _BUSY.get(backend(), _BUSY["gpu"])
    if plan.multiplications > busy * plan.runs * plan.whole.length:
        return False
    # An upper bound: arrays that do not depend on the moment are shared by all runs.
    together = plan.runs * plan.peak_bytes
    return together <= budget.room(plan.program_bytes, together)


def announced_plans(plans: Sequence[Plan]) -> AbstractContextManager[None]:
    """Announce runs of plans that are expected to be long, each plan with all its runs."""
    seconds = 0.0
    if sum(plan.multiplications for plan in plans) > _BRIEF:
        seconds = AROUND * sum(map(seconds_of, plans))
    name = plans[0].metric if plans else ""
    return announced(f"contractions of {name}", seconds)
