"""What two models are asked, and what comes back. In: nothing. Out: plain data.

[merged from compare/comparable]
What may be compared. In: whatever a caller gives. Out: models, refusals in words.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from tnsim.compare.by_points import ForwardPlan
from tnsim.compare.resident import is_known_constant
from tnsim.engine.budget import Budget
from tnsim.engine.scaled import LogScaled
from tnsim.errors import ModelError
from tnsim.metrics.empirical import Empirical
from tnsim.metrics.metric import check_metric
from tnsim.metrics.protocol import Metric
from tnsim.models.checks import check_comparable, check_numbers
from tnsim.models.functions import Function, is_function, refused_under
from tnsim.models.model import AnyModel, terms
from tnsim.names import Pair
from tnsim.problems.forward import Sums, Terms

CROSS = (Pair("A", "B"),)


ALL = (Pair("A", "A"), Pair("A", "B"), Pair("B", "B"))


SELF = (Pair("A", "A"),)


class Request(NamedTuple):
    """What is asked of two models, and of all pairs of models that they are sums of.

    Args:
        metric: How inputs are weighed.
        dtype: Precision of the computation.
        budget: What it may take.
        norms: Whether `AA` and `BB` are wanted beside `AB`, as a cosine needs.
        per_output: Whether outputs are told apart.
    """

    metric: Metric
    dtype: str
    budget: Budget
    norms: bool = False
    per_output: bool = False

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The inner products that are wanted."""
        return ALL if self.norms else CROSS


class InnerProducts(NamedTuple):
    """Inner products of two models.

    Args:
        values: `AB`, and with norms also `AA` and `BB`.
        exponent: The power of two that `AB` lacks, as the norms do and cosines may.
        traced: Whether they are traced.
        forward: What ran, where that was forward passes.
        sums: Their sums over groups of points.
    """

    values: dict[str, LogScaled]
    exponent: Any
    traced: bool
    forward: ForwardPlan | None = None
    sums: Sums | None = None


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
