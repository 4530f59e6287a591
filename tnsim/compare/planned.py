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
from tnsim.folding.forward import Terms
from tnsim.folding.functions import Function
from tnsim.metrics.empirical import Empirical
from tnsim.metrics.metric import check_metric
from tnsim.models.model import Combination, Model, check_comparable, terms
from tnsim.names import Pair
from tnsim.sessions import remembered

AnyModel = Model | Combination
Comparable = AnyModel | Function
"""What may stand on either side: under `Empirical` also plain functions."""

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


def is_function(model: Any) -> bool:
    """Whether this is a plain function: something to call that is no model.

    Example:
        >>> import tnsim
        >>> is_function(abs), is_function(tnsim.Model([tnsim.Linear([[1.0]])]))
        (True, False)
    """
    return callable(model) and not isinstance(model, AnyModel)


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
        if not isinstance(metric, Empirical):
            raise ModelError(
                "functions that are no models are compared on inputs alone: use "
                f"tnsim.Empirical(inputs), found {type(metric).__name__}"
            )
        return
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
