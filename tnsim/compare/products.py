"""Inner products of two models, or of sums of models. In: models, a question. Out: products.

Small differences become models of their own, and the metric decides which way it goes: along plans
(`by_plans`), or by forward passes where it is a finite measure (`by_points`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tnsim.compare.by_plans import by_plans
from tnsim.compare.by_points import check_affordable, forward_plan, points_of
from tnsim.compare.comparable import Comparable, check_comparison, parts
from tnsim.compare.question import Products, Question
from tnsim.compare.resident import is_known_constant
from tnsim.engine.log_scaled import LogScaled, taken
from tnsim.folding import forward_traced
from tnsim.folding.forward import Terms, sums, total
from tnsim.metrics.points import Weighted
from tnsim.metrics.protocol import adds_up
from tnsim.models.arrays import is_traced
from tnsim.models.differences import by_differences
from tnsim.models.model import AnyModel, Model


def inner_products(a: Comparable, b: Comparable, asked: Question) -> Products:
    """The inner products asked for, `AB` and with `norms` also `AA` and `BB`.

    A sum of several models has its norms computed unless traced: what cancels is seen beside them.

    Raises:
        ModelError: The models cannot be compared.
        TooLarge: That would exceed the budget.
    """
    check_comparison(a, b, asked.metric)
    traced = any(map(_is_traced, (a, b, asked.metric)))
    first = _differences(a, asked.dtype)
    second = first if b is a else _differences(b, asked.dtype)
    one, two = parts(first), parts(second)
    models = [part for _, part in (*one, *two) if isinstance(part, Model)]
    points = None
    # Gauss nodes are chosen by the numbers of models and metric, which a trace does not have.
    if not traced or adds_up(asked.metric):
        points = points_of(models, asked.metric, asked.pairs, asked.per_output, asked.dtype)
    if points is None:
        assert isinstance(first, AnyModel) and isinstance(second, AnyModel)
        return by_plans(first, second, asked, traced)
    plan = forward_plan(models, asked.metric, points, asked.dtype)
    check_affordable(plan, asked.metric, asked.budget)
    if traced:
        inner = partial(
            forward_traced.inner_product,
            points=points,
            per_output=asked.per_output,
            dtype=asked.dtype,
        )
        return _traced(one, two, asked.norms, inner)
    found = sums([one], [two], points, asked.per_output, asked.dtype, asked.budget)
    values = {
        "AB": taken(total(found.products), (0, 0)),
        "AA": taken(total(found.rows), 0),
        "BB": taken(total(found.columns), 0),
    }
    return Products(values, 0.0, False, plan, found)


def at_traced_points(a: AnyModel, b: AnyModel, sample: Weighted, dtype: str) -> Products:
    """Inner products and norms over points that are traced themselves.

    What a metric checks with numbers, whether models read its points among it, was checked before.
    """
    one, two = (parts(_differences(model, dtype)) for model in (a, b))
    inner = partial(forward_traced.over_batches, batches=[sample], per_output=False)
    return _traced(one, two, True, inner)


def _traced(first: Terms, second: Terms, norms: bool, inner: Callable[..., LogScaled]) -> Products:
    """The inner products of two sums inside a trace, where `inner` makes one."""
    values = {"AB": inner(first, second)}
    if norms:
        values |= {"AA": inner(first, first), "BB": inner(second, second)}
    return Products(values, 0.0, True)


def _differences(model: Comparable, dtype: str) -> Comparable:
    return by_differences(model, dtype) if isinstance(model, AnyModel) else model


def _is_traced(value: Any) -> bool:
    """Whether a metric, a model or a combination holds anything traced."""
    return not is_known_constant(value) and is_traced(value)
