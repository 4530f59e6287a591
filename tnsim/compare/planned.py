"""Plans within a budget. In: a family, the inner products wanted. Out: a plan that may run, or `TooLarge`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from tnsim.engine import execution
from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE, plan_problem
from tnsim.errors import ModelError, TooLarge
from tnsim.folding.base import Family
from tnsim.metrics.metric import check_metric
from tnsim.models.model import Combination, Model, check_comparable, terms
from tnsim.names import Pair

AnyModel = Model | Combination

_ALWAYS_FITS = 2**28
FREE_SHARE = 0.8


@dataclass(frozen=True)
class Budget:
    """What one plan may use; beyond it `TooLarge` is raised before anything runs.

    memory_bytes: None for 80 % of what is free on the device. multiplications: 1e14 take about an hour on two cores.
    """

    memory_bytes: float | None = None
    multiplications: float = 1e14


@lru_cache(maxsize=1024)
def plan_for(
    family: Family, pairs: tuple[Pair, ...], per_output: bool, dtype: str, large: int = LARGE
) -> Plan:
    """The plan of the inner products `pairs`. large: elements beyond which an intermediate is computed in chunks."""
    problem = family.problem(pairs, per_output)
    return plan_problem(problem, family.name, family.exact, dtype, large)


def cast(array: Any, dtype: str) -> Any:
    if array.dtype == dtype:
        return array
    return array.astype(dtype) if isinstance(array, jax.Array) else np.asarray(array, dtype)


def check(a: Any, b: Any, metric: Any) -> None:
    """Raise `ModelError` unless these are two models that this metric can compare."""
    check_metric(metric)
    one, two = terms(a)[0][1], terms(b)[0][1]
    check_comparable(one, two)
    if one.n_ctx is None and (one.attends or two.attends):
        raise ModelError(
            "attention is compared on sequences of one length: give tnsim.Model(layers, n_ctx=...) or tnsim.load(..., n_ctx=...)"
        )


def affordable(
    family: Family, wanted: tuple[Pair, ...], per_output: bool, dtype: str, budget: Budget
) -> Plan:
    """A plan within the budget, its largest contractions in smaller chunks if need be. Raises `TooLarge`."""
    found = plan_for(family, wanted, per_output, dtype, LARGE)
    advice = "use GaussianClosure() (an approximation beyond one nonlinear layer), smaller widths or a larger tnsim.Budget"
    if found.multiplications > budget.multiplications:
        raise TooLarge(
            f"{found.metric} needs {found.multiplications:.3g} multiplications here, "
            f"more than the budget of {budget.multiplications:.3g}; {advice}"
        )
    allowed = budget.memory_bytes
    if allowed is None:
        free = execution.available_bytes() if found.peak_bytes > _ALWAYS_FITS else None
        allowed = math.inf if free is None else FREE_SHARE * free
    least = found.peak_bytes
    for finer in range(2, 10, 2):
        if found.peak_bytes <= allowed:
            return found
        found = plan_for(family, wanted, per_output, dtype, LARGE >> finer)
        least = min(least, found.peak_bytes)
    raise TooLarge(
        f"{found.metric} needs {least / 2**30:.3g} GiB here, and the budget is {allowed / 2**30:.3g} GiB; {advice}"
    )
