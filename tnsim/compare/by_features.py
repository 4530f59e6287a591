"""Inner products of polynomials, as dot products of the vectors of their coefficients.

The route of `Gaussian` and `Symmetric`

    where layers are sparse, as convolutions are            `problems.receptive_fields`
    of several nonlinear layers, where vectors take less    `problems.polynomial_space`
        than diagrams and their search

A sum of models is a sum of vectors, so what cancels between terms costs half the digits that it
costs a sum of products. Vectors are made by NumPy in float64, with nothing to plan or to compile.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tnsim.compare.planned import plan_for
from tnsim.compare.request import InnerProducts, Request
from tnsim.engine.budget import Budget, check_budget
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.errors import TooLarge
from tnsim.metrics.metric import joins_whole_trees
from tnsim.metrics.protocol import Metric
from tnsim.models.model import AnyModel, Model, terms
from tnsim.names import Pair
from tnsim.problems import features
from tnsim.problems.families import choose
from tnsim.problems.features import FeatureSpace
from tnsim.problems.polynomial_space import PolynomialSpace, polynomials
from tnsim.problems.tensors.kinds import kinds, nonlinear
from tnsim.tables import html_table

_FEW_LEGS = 8
"""Legs of a pair of two bilinear layers each."""

_PER_PAIRING, _SHORTEST_SEARCH = 3e-6, 1.0
"""Seconds for which diagrams are searched, by the number of pairings of legs, and at least beside
constants; 7 s for the 2 million pairings of three bilinear layers a side."""

_RATE = 1e9
"""Multiplications of vectors in a second of one core."""


@dataclass(frozen=True)
class FeaturePlan:
    """The vectors that would be made for the inner products of two models.

    Args:
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        route: "receptive fields" where layers are sparse, else "features".
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


def space_of(
    models: Sequence[Model], metric: Metric, wanted: tuple[Pair, ...]
) -> FeatureSpace | None:
    """The space in which pairs of these models may be compared; None where there is none.

    Of a single layer, or layer over layer, a plan is a handful of matrix products, and without
    constants the ten diagrams of two layers are found at once: there nobody asks for vectors.

    Args:
        models: Distinct models that are not traced.
        metric: Any metric.
        wanted: Inner products that are wanted.
    """
    several = [kinds(model) for model in models]
    if any(kind.sparse for layers in several for kind in layers):
        space = features.common_space(models, metric)
        return space if space is not None and space.on_host else None
    depth = nonlinear(*several)
    if depth < 2 or not joins_whole_trees(type(metric), depth):
        return None
    space = polynomials(several, metric, models[0].n_ctx)
    few = space is not None and not space.lifted and _legs(models, wanted) <= _FEW_LEGS
    return None if few else space


def _legs(models: Sequence[Model], wanted: tuple[Pair, ...]) -> int:
    """Legs of the largest diagram of an example of a pair, the first model and the last."""
    degrees = [model.degree for model in (models[0], models[-1])]
    return sum(degrees) if len(wanted) == 1 else 2 * max(degrees)


def work_of(space: FeatureSpace, models: Sequence[Model]) -> int:
    """Multiplications of the vectors of distinct models."""
    return sum(space.multiplications(kinds(model)) for model in models)


def beats_diagrams(
    space: FeatureSpace,
    models: Sequence[Model],
    metric: Metric,
    wanted: tuple[Pair, ...],
    slices: bool,
    dtype: str,
    budget: Budget,
) -> bool:
    """Whether vectors are made for a pair of models, instead of a plan of contractions.

    Sparse layers have no plan. Others are planned where the search takes less time than the
    vectors, and the fewer multiplications win.

    Args:
        space: Space that holds the models.
        models: Distinct models, the first and the last of them as an example of a pair.
        metric: Metric of the comparison.
        wanted: Inner products that are wanted.
        slices: Whether outputs are told apart.
        dtype: Precision of the plan.
        budget: Budget of the comparison.
    """
    if not isinstance(space, PolynomialSpace):
        return True
    plan = feature_plan(space, models, metric, wanted)
    if plan.multiplications > budget.multiplications:
        return False
    if plan.peak_bytes > budget.room(0, plan.peak_bytes):
        return False
    legs = _legs(models, wanted)
    # 2n legs have (2n - 1)!! pairings.
    search = max(_SHORTEST_SEARCH, _PER_PAIRING * math.prod(range(legs - 1, 0, -2)))
    if plan.multiplications <= search * _RATE:
        return True
    try:
        limit = plan.multiplications
        family = choose(models[0], models[-1], metric)
        return limit < plan_for(family, wanted, slices, dtype, limit=limit).multiplications
    except TooLarge:
        return True


def feature_plan(
    space: FeatureSpace,
    models: Sequence[Model],
    metric: Metric,
    wanted: tuple[Pair, ...],
) -> FeaturePlan:
    """The plan of the inner products of some models.

    Args:
        space: Space of the models.
        models: Distinct models.
        metric: Metric of the comparison.
        wanted: Inner products that are wanted.
    """
    several = [kinds(model) for model in models]
    largest = max(part.length for part in space.parts) * space.d_out
    dots = len(wanted) * space.length * space.d_out
    held = len(models) * largest + max(space.in_flight(layers, 1) for layers in several)
    return FeaturePlan(
        metric=metric.name,
        exact=bool(metric.is_exact(nonlinear(*several))),
        route=space.route,
        dtype="float64",
        outputs=tuple(pair.group for pair in wanted),
        features=space.length * space.d_out,
        multiplications=work_of(space, models) + dots,
        peak_bytes=held * ITEM_BYTES["float64"],
    )


def by_features(
    space: FeatureSpace, first: AnyModel, second: AnyModel, request: Request
) -> InnerProducts:
    """The inner products of two sums of models that a space holds.

    Args:
        space: Space from `space_of`.
        first, second: Models or sums of models, not traced.
        request: Question asked of them.

    Returns:
        The products and the norms, in float64.

    Raises:
        TooLarge: The computation would exceed the budget.
    """
    one, two = terms(first), terms(second)
    models = list({id(model): model for _, model in (*one, *two)}.values())
    plan = feature_plan(space, models, request.metric, request.pairs)
    check_budget(request.budget)
    what = f"{plan.metric} by {plan.route} of {plan.features:,} coefficients"
    advice = "compare outputs, metric tnsim.Empirical(inputs), or give a larger tnsim.Budget"
    if plan.multiplications > request.budget.multiplications:
        raise TooLarge(
            f"{what} takes up to {plan.multiplications:.3g} multiplications, more than the budget "
            f"of {request.budget.multiplications:.3g}; {advice}"
        )
    room = request.budget.room(0, plan.peak_bytes)
    if plan.peak_bytes > room:
        raise TooLarge(
            f"{what} needs up to {plan.peak_bytes / 2**30:.3g} GiB, and the budget is "
            f"{room / 2**30:.3g} GiB; {advice}"
        )
    values = features.compared(space, one, two, request.metric, request.slices)
    return InnerProducts(values, 0.0, False, "float64")
