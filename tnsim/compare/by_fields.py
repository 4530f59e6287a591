"""Inner products of models with receptive fields, as dot products of vectors.

The route of `Gaussian` and `Symmetric` where layers are sparse, as convolutions are (see
`problems.receptive_fields`). Every model is a vector of the coefficients of its polynomial, so a
sum of models is a sum of vectors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tnsim.compare.request import InnerProducts, Request
from tnsim.engine.budget import Budget, check_budget
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.errors import TooLarge
from tnsim.metrics.protocol import Metric
from tnsim.models.model import AnyModel, Model, terms
from tnsim.names import Pair
from tnsim.problems import features
from tnsim.problems.features import FeatureSpace
from tnsim.problems.tensors.kinds import kinds, nonlinear
from tnsim.tables import html_table


@dataclass(frozen=True)
class FieldPlan:
    """The vectors that would be made for the inner products of two models of sparse layers.

    Args:
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        route: The words "receptive fields".
        dtype: Precision of the computation.
        outputs: Names of the inner products: `AB` is `<a|b>`, `AA` and `BB` are squared norms.
        features: Most numbers of a vector, of all outputs together.
        multiplications: Most scalar multiplications: hidden units with equal weights below them,
            as those of a convolution, are computed once.
        peak_bytes: Bytes of all arrays alive at once, beside the models.

    Example:
        >>> import numpy as np, tnsim
        >>> square = tnsim.Bilinear(*[tnsim.SparseMatrix.of(np.eye(100))] * 2, np.ones((1, 100)))
        >>> print(tnsim.plan(tnsim.Model([square]), tnsim.Model([square])))
        metric           gaussian (exact)
        route            receptive fields, up to 101 coefficients
        inner products   AB
        multiplications  up to 1,101 scalar multiplications of float64
        peak memory      0.01 MiB of float64 beside the models
    """

    metric: str
    exact: bool
    route: str
    dtype: str
    outputs: tuple[str, ...]
    features: int
    multiplications: int
    peak_bytes: int

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        return html_table("Plan", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        guarantee = "exact" if self.exact else "approximation"
        work = f"{self.multiplications:,} scalar multiplications of {self.dtype}"
        memory = f"{self.peak_bytes / 2**20:,.2f}"
        return [
            ("metric", f"{self.metric} ({guarantee})"),
            ("route", f"{self.route}, up to {self.features:,} coefficients"),
            ("inner products", ", ".join(self.outputs)),
            ("multiplications", f"up to {work}"),
            ("peak memory", f"{memory} MiB of {self.dtype} beside the models"),
        ]


def space_of(models: Sequence[Model], metric: Metric) -> FeatureSpace | None:
    """The space of the receptive fields of some models; None where they have none.

    Args:
        models: Models that are not traced.
        metric: Any metric.
    """
    if not any(kind.sparse for model in models for kind in kinds(model)):
        return None
    space = features.common_space(models, metric)
    return space if space is not None and space.on_host else None


def field_plan(
    space: FeatureSpace,
    models: Sequence[Model],
    metric: Metric,
    wanted: tuple[Pair, ...],
    dtype: str,
) -> FieldPlan:
    """The plan of the inner products of some models.

    Args:
        space: Space of the models.
        models: Distinct models.
        metric: Metric of the comparison.
        wanted: Inner products that are wanted.
        dtype: Precision of the vectors.
    """
    several = [kinds(model) for model in models]
    largest = max(part.length for part in space.parts) * space.d_out
    work = sum(space.multiplications(layers) for layers in several)
    dots = len(wanted) * space.length * space.d_out
    held = len(models) * largest + max(space.in_flight(layers, 1) for layers in several)
    return FieldPlan(
        metric=metric.name,
        exact=bool(metric.is_exact(nonlinear(*several))),
        route=space.route,
        dtype=dtype,
        outputs=tuple(pair.group for pair in wanted),
        features=space.length * space.d_out,
        multiplications=work + dots,
        peak_bytes=held * ITEM_BYTES["float64"],
    )


def _check_affordable(plan: FieldPlan, budget: Budget) -> None:
    """Raise `TooLarge` where vectors are beyond the budget."""
    check_budget(budget)
    what = f"{plan.metric} by receptive fields of {plan.features:,} coefficients"
    advice = "compare outputs, metric tnsim.Empirical(inputs), or give a larger tnsim.Budget"
    if plan.multiplications > budget.multiplications:
        raise TooLarge(
            f"{what} takes up to {plan.multiplications:.3g} multiplications, more than the budget "
            f"of {budget.multiplications:.3g}; {advice}"
        )
    room = budget.room(0, plan.peak_bytes)
    if plan.peak_bytes > room:
        raise TooLarge(
            f"{what} needs up to {plan.peak_bytes / 2**30:.3g} GiB, and the budget is "
            f"{room / 2**30:.3g} GiB; {advice}"
        )


def by_fields(first: AnyModel, second: AnyModel, request: Request) -> InnerProducts | None:
    """The inner products of two sums of models with receptive fields.

    Args:
        first, second: Models or sums of models, not traced.
        request: Question asked of them.

    Returns:
        The products and the norms; None where models or metric have no receptive fields.

    Raises:
        TooLarge: The computation would exceed the budget.
    """
    one, two = terms(first), terms(second)
    models = list({id(model): model for _, model in (*one, *two)}.values())
    space = space_of(models, request.metric)
    if space is None:
        return None
    plan = field_plan(space, models, request.metric, request.pairs, request.dtype)
    _check_affordable(plan, request.budget)
    values = features.compared(one, two, request.metric, request.slices, request.dtype)
    assert values is not None  # the space holds the models
    return InnerProducts(values, 0.0, False, request.dtype)
