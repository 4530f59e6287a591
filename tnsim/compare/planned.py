"""Plans within a budget.

In: a family, the inner products wanted. Out: a plan that may run, or `TooLarge`.
"""

from __future__ import annotations

from typing import Any

from tnsim.engine.budget import Budget, within
from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE, plan_problem
from tnsim.errors import ModelError
from tnsim.folding.base import Family
from tnsim.metrics.metric import check_metric
from tnsim.models.model import Combination, Model, check_comparable, terms
from tnsim.names import Pair
from tnsim.sessions import remembered

AnyModel = Model | Combination

_ADVICE = (
    "use GaussianClosure() (an approximation beyond one nonlinear layer), smaller widths, shorter "
    "sequences (n_ctx) or a larger tnsim.Budget"
)


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
    """A plan within the budget. Raises `TooLarge`."""
    return within(budget, lambda large: plan_for(family, wanted, per_output, dtype, large), _ADVICE)
