"""How long a run over many pairs takes. In: its plan. Out: the plan with seconds.

Estimated from what this machine does a second, with compiling and without reading models.
"""

from __future__ import annotations

import dataclasses

from tnsim.engine import rates
from tnsim.engine.budget import Budget
from tnsim.gram import batched_plans
from tnsim.gram.run_plan import RECURSION, Contracted, PairwisePlan
from tnsim.gram.stacks import Setting

_FEATURE_OPERATIONS = 16  # of a program that makes features or takes their products


def with_seconds(found: PairwisePlan, contracted: Contracted, setting: Setting) -> PairwisePlan:
    """The plan with an estimate of the time of every route, from what this machine does a second.

    Args:
        found: The plan of a run.
        contracted: What is contracted along plans.
        setting: Of the run.
    """
    timed = []
    for route in found.routes:
        seconds = _feature_seconds(route, setting.dtype)
        if route.route == RECURSION:
            seconds = _recursion_seconds(route, contracted, setting.budget)
        timed.append(dataclasses.replace(route, seconds=seconds))
    return dataclasses.replace(timed[0], others=tuple(timed[1:]))


def _feature_seconds(route: PairwisePlan, dtype: str) -> float:
    measured = rates.measured(dtype)
    compiling = measured.compiling * _FEATURE_OPERATIONS * route.compilations
    return route.multiplications / measured.small + compiling


def _recursion_seconds(route: PairwisePlan, contracted: Contracted, budget: Budget) -> float:
    plans = [plan for _, plan in contracted]
    sides = [batched_plans.batch_side(plan, route.tile, budget) for plan in plans]
    once = rates.seconds_of(plans, sides)
    running = sum(times * one.running for (times, _), one in zip(contracted, once, strict=True))
    return running + sum(one.compiling for one in once)
