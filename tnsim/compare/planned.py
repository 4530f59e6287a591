"""Plans within a budget.

In: a family, the inner products wanted. Out: a plan that may run, or `TooLarge`.
"""

from __future__ import annotations

from typing import Any

import jax

from tnsim.engine.budget import Budget, within
from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE, plan_problem
from tnsim.errors import ModelError
from tnsim.folding.base import Family
from tnsim.folding.forward import Terms
from tnsim.metrics.empirical import Empirical
from tnsim.metrics.metric import check_metric
from tnsim.models.functions import Function, is_function
from tnsim.models.model import Combination, Model, check_comparable, check_numbers, terms
from tnsim.names import Pair
from tnsim.sessions import remembered

AnyModel = Model | Combination
Comparable = AnyModel | Function
"""What may stand on either side: under `Empirical` also plain functions."""

_ADVICE = (
    "use GaussianClosure() (an approximation beyond one nonlinear layer), smaller widths, shorter "
    "sequences (n_ctx) or a larger tnsim.Budget"
)


_BUSY = {"cpu": 2**20, "gpu": 2**27}
"""Multiplications of one operation that keep a whole device busy."""


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


def parts(model: Any) -> Terms:
    """Coefficients and models that `model` is a sum of; a plain function is one part.

    Raises:
        ModelError: It is neither a model, nor a combination of models, nor a function.
    """
    return ((1.0, model),) if is_function(model) else terms(model)


def check(a: Any, b: Any, metric: Any) -> None:
    """Raise `ModelError` unless these are two models that this metric can compare."""
    check_metric(metric)
    if is_function(a) or is_function(b):
        for model in (a, b):
            parts(model)
            if isinstance(model, AnyModel):
                check_numbers(model)
        if not isinstance(metric, Empirical):
            raise ModelError(
                "functions that are no models are compared on inputs alone: use "
                f"tnsim.Empirical(inputs), found {type(metric).__name__}"
            )
        return
    one, two = terms(a)[0][1], terms(b)[0][1]
    check_numbers(a, b)
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


def runs_together(plan: Plan, budget: Budget) -> bool:
    """Whether the runs of a plan, at all moment nodes, are one run on stacks of moments.

    Small operations are then done for all nodes in the time of one (measured on four cores: 2.5 ms
    become 1.1 at width 8 and depth 2, 450 ms 260 at width 6 and depth 3). An operation that keeps
    the device busy by itself gains nothing, and XLA multiplies stacks of matrices more slowly than
    matrices (4.6 s become 6.2 at width 64 and depth 2). Nor may the stacks need more memory than
    there is.
    """
    busy = _BUSY.get(jax.default_backend(), _BUSY["gpu"])
    if plan.multiplications > busy * plan.runs * plan.whole.length:
        return False
    together = plan.runs * plan.peak_bytes
    return together <= budget.room(plan.program_bytes, together)
