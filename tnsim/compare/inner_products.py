"""Inner products of two models, or of sums of models.

`inner_products` first makes small differences models of their own. The table of routes then says
which way the computation goes (`routes`), and the route computes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tnsim.compare.by_plans import same_weights
from tnsim.compare.request import (
    Comparable,
    InnerProducts,
    Question,
    Request,
    check_comparison,
    highest_degree,
    parts,
)
from tnsim.compare.resident import apart_by_precision, is_known_constant
from tnsim.compare.routes import cheapest
from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.errors import TooLarge
from tnsim.models.arrays import is_traced
from tnsim.models.differences import by_differences
from tnsim.models.matrices import written_out
from tnsim.models.model import AnyModel, Model

_CERTIFICATE = 1e12
"""Most multiplications of a second computation in float64: about half a minute on two cores."""


def inner_products(a: Comparable, b: Comparable, request: Request) -> InnerProducts:
    """The inner product `AB` and, with `squared_norms`, also `AA` and `BB`.

    Unless traced, the norms of a sum of several models are always computed, as a comparison with
    them shows how much cancels. Where products in float32 are not `certified`, they are computed in
    float64 instead, within the budget and `_CERTIFICATE`: where terms cancel, bounds of float32 are
    hundreds of times as large as errors, and the second computation is what a warning would advise.

    Args:
        a, b: Models, sums of models or plain functions.
        request: Question asked of them.

    Returns:
        The products, with the plan and the sums of forward passes where these ran.

    Raises:
        ModelError: The models cannot be compared.
        TooLarge: The computation would exceed the budget.
    """
    products = _inner_products(a, b, request)
    if products.traced or products.dtype != "float32":
        return products
    arithmetic = Arithmetic(highest_degree((a, b)), products.dtype)
    if np.all(precision.certified(products.values, arithmetic)):
        return products
    most = min(request.budget.multiplications, _CERTIFICATE)
    budget = dataclasses.replace(request.budget, multiplications=most)
    try:
        return _inner_products(a, b, request._replace(dtype="float64", budget=budget))
    except TooLarge:
        return products  # with the bound of float32, of which the answer warns


def _inner_products(a: Comparable, b: Comparable, request: Request) -> InnerProducts:
    """The products in the precision of the request, see `inner_products`."""
    check_comparison(a, b, request.metric)
    traced = any(map(_is_traced, (a, b, request.metric)))
    if traced:
        same = b is a
        a, b, metric = apart_by_precision(written_out((a, b, request.metric)))
        request = request._replace(metric=metric)
        b = a if same else b
    first = _as_differences(a, request.dtype)
    second = first if b is a else _as_differences(b, request.dtype)
    one, two = parts(first), parts(second)
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
