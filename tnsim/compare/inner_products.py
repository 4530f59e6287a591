"""Inner products of two models, or of sums of models.

`inner_products` first makes small differences models of their own. The table of routes then says
which way the computation goes (`routes`), and the route computes.
"""

from __future__ import annotations

from typing import Any

from tnsim.compare.by_plans import same_weights
from tnsim.compare.request import (
    Comparable,
    InnerProducts,
    Question,
    Request,
    check_comparison,
    summands,
)
from tnsim.compare.resident import apart_by_precision, is_known_constant
from tnsim.compare.routes import cheapest
from tnsim.models.arrays import is_traced
from tnsim.models.differences import by_differences
from tnsim.models.matrices import written_out
from tnsim.models.model import AnyModel, Model


def inner_products(a: Comparable, b: Comparable, request: Request) -> InnerProducts:
    """The inner product `AB` and, with `squared_norms`, also `AA` and `BB`.

    Unless traced, the norms of a sum of several models are always computed, as a comparison with
    them shows how much cancels.

    Args:
        a, b: Models, sums of models or plain functions.
        request: Metric, precision, budget, and the products that are wanted.

    Returns:
        The products, with the sums of forward passes where these ran.

    Raises:
        ModelError: The models cannot be compared.
        TooLarge: The computation would exceed the budget.
    """
    check_comparison(a, b, request.metric)
    traced = any(map(_is_traced, (a, b, request.metric)))
    if traced:
        same = b is a
        a, b, metric = apart_by_precision(written_out((a, b, request.metric)))
        request = request._replace(metric=metric)
        b = a if same else b
    first = _as_differences(a, request.dtype)
    second = first if b is a else _as_differences(b, request.dtype)
    one, two = summands(first), summands(second)
    models = [part for _, part in (*one, *two) if isinstance(part, Model)]
    alone = not traced and len(models) == 2 and len(one) == len(two) == 1
    if alone and one[0][0] == two[0][0] and same_weights(*models):
        second, models = first, models[:1]  # one vector, with a cosine of 1
    question = Question(
        tuple(models), request.metric, request.pairs, request.slices, request.dtype, traced
    )
    return cheapest(question, request.budget).route.products(first, second, request, traced)


def _as_differences(model: Comparable, dtype: str) -> Comparable:
    """A sum of models with small differences as models of their own; functions are unchanged."""
    return by_differences(model, dtype) if isinstance(model, AnyModel) else model


def _is_traced(value: Any) -> bool:
    """Whether a metric, a model or a combination holds a traced array."""
    return not is_known_constant(value) and is_traced(value)
