"""What may be compared. In: whatever a caller gives. Out: models, refusals in words."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from tnsim.compare.resident import is_known_constant
from tnsim.errors import ModelError
from tnsim.folding.forward import Terms
from tnsim.metrics.empirical import Empirical
from tnsim.metrics.metric import check_metric
from tnsim.models.checks import check_comparable, check_numbers
from tnsim.models.functions import Function, is_function, refused_under
from tnsim.models.model import AnyModel, terms

Comparable: TypeAlias = AnyModel | Function
"""What may stand on either side: under `Empirical` also plain functions."""
MOST_DEGREE = 10**100
"""Of polynomials. Logarithms of their values grow with it, and squares of those must be floats."""


def parts(model: Any) -> Terms:
    """Coefficients and models that `model` is a sum of; a plain function is one part.

    Raises:
        ModelError: It is neither a model, nor a combination of models, nor a function.
    """
    return ((1.0, model),) if is_function(model) else terms(model)


def check_comparison(a: Any, b: Any, metric: Any) -> None:
    """Raise `ModelError` unless these are two models that this metric can compare."""
    check_metric(metric)
    _check_degrees(a, b)
    if is_function(a) or is_function(b):
        _check_functions(a, b, metric)
        return
    one, two = terms(a)[0][1], terms(b)[0][1]
    check_numbers(*(model for model in (a, b) if not is_known_constant(model)))
    check_comparable(one, two)
    if one.n_ctx is None and (one.attends or two.attends):
        raise ModelError(
            "attention is compared on sequences of one length: "
            "give tnsim.Model(layers, n_ctx=...) or tnsim.load(..., n_ctx=...)"
        )


def _check_degrees(*models: Any) -> None:
    for model in models:
        if is_function(model):
            continue
        degree = max(part.degree for _, part in terms(model))
        if degree > MOST_DEGREE:
            raise ModelError(
                f"a polynomial of degree 10^{math.log10(degree):.0f} has values whose logarithms "
                "are beyond float64: degrees up to 10^100 are compared, which are 332 bilinear "
                "layers; compare models of fewer layers"
            )


def _check_functions(a: Any, b: Any, metric: Any) -> None:
    """The same where one of them is a plain function, of which nothing but outputs is known."""
    for model in (a, b):
        parts(model)
        if isinstance(model, AnyModel):
            check_numbers(model)
    if not isinstance(metric, Empirical):
        raise refused_under(metric)
