"""Inner products along plans of contractions, and the route of these plans.

A sum of models is expanded by bilinearity over its terms. Each pair of plain models has a plan,
which runs once or, with a constant in an exact deep metric, at every moment node.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from tnsim.compare.by_features import by_vectors
from tnsim.compare.estimates import Estimate
from tnsim.compare.planned import (
    AROUND,
    PREPARING,
    affordable,
    announced_plans,
    plan_for,
    runs_together,
)
from tnsim.compare.request import SELF, Arrays, InnerProducts, Question, Request
from tnsim.compare.resident import conditioning, placed_weights
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.plan import Plan
from tnsim.engine.precision import Arithmetic, lost_half
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.execution import fetched, fetched_at_all
from tnsim.engine.runtime.rates import backend_of, usual_seconds
from tnsim.errors import TooLarge
from tnsim.metrics.metric import joins_whole_trees
from tnsim.metrics.orbits import expected_count
from tnsim.models.arrays import weights_dtype
from tnsim.models.model import AnyModel, Model, terms
from tnsim.names import COVARIANCE, SIDES, Side
from tnsim.problems import features
from tnsim.problems.base import Family, model_weights
from tnsim.problems.diagrams import tree
from tnsim.problems.families import choose
from tnsim.problems.leaves import by_side
from tnsim.problems.polynomial_space import need_all_orders
from tnsim.problems.state_sizes import common_units, in_units_of_inputs, units_of_inputs
from tnsim.problems.tensors.kinds import kinds, nonlinear
from tnsim.problems.whole_tree import MAX_LEGS
from tnsim.scaled import (
    Scaled,
    ScaledSum,
    add,
    contribution,
    library,
    magnified,
    scaled_terms,
    times,
)
from tnsim.sessions import per_object_cache

_Terms: TypeAlias = Scaled[tuple[tuple[Any, Any, Model], ...]]
"""A sum of scaled models: triples (coefficient, exponent, model), and the exponent of the sum."""
_SPARSE = (
    "; one or two layers of convolutions are compared as they are where pixels are independent, "
    "tnsim.Gaussian(mean, variances)"
)
_STARTING, _PER_DIAGRAM, _LIFTED = 0.08, 1.4e-5, 1.5
"""Seconds to plan an inner product of whole trees: in any case, for each diagram by the square of
its number of legs, and the factor beside constants."""


class Contractions:
    """The route by a plan of contractions.

    Args:
        question: Question of the comparison.
    """

    name = "contractions"

    def __init__(self, question: Question) -> None:
        self.question = question

    @property
    def search(self) -> float:
        """See `routes.Route`."""
        question = self.question
        a, b = question.models[0], question.models[-1]
        several = [kinds(a), kinds(b)]
        if not joins_whole_trees(type(question.metric), nonlinear(*several)):
            return 0.0
        trees = dict(zip(SIDES, map(tree, several), strict=True))
        lifted = a.n_ctx is not None or need_all_orders(several)
        seconds = 0.0
        for pair in question.wanted:
            bra, ket = trees[pair.bra], trees[pair.ket]
            legs = bra.legs + ket.legs
            if legs > MAX_LEGS:
                return 0.0  # refused at once
            count = expected_count(bra, ket, not question.metric.pairs_within_model)
            seconds += _STARTING + _PER_DIAGRAM * legs**2 * count * (_LIFTED if lifted else 1)
        return seconds

    def estimate(self) -> Estimate:
        """See `routes.Route`."""
        question = self.question
        a, b, wanted = question.models[0], question.models[-1], question.wanted
        family = choose(a, b, common_units([a, b], question.metric).metric)
        plan = plan_for(family, wanted, question.slices, question.dtype)
        return Estimate(
            metric=plan.metric,
            exact=plan.exact,
            route=self.name,
            dtype=plan.dtype,
            outputs=plan.outputs,
            multiplications=plan.multiplications,
            peak_bytes=plan.interpreted_bytes,
            seconds=PREPARING + AROUND * usual_seconds(plan),
            facts=(("diagrams", plan.diagrams), ("runs", plan.runs)),
            contraction=plan,
        )

    def check(self, estimate: Estimate, budget: Budget) -> None:
        """See `routes.Route`."""
        question = self.question
        a, b = question.models[0], question.models[-1]
        family = choose(a, b, common_units([a, b], question.metric).metric)
        with self._advised():
            affordable(family, question.wanted, question.slices, question.dtype, budget)

    def products(
        self, first: AnyModel, second: AnyModel, request: Request, traced: bool
    ) -> InnerProducts:
        """See `by_plans`."""
        with self._advised():
            return by_plans(first, second, request, traced)

    @contextlib.contextmanager
    def _advised(self) -> Iterator[None]:
        """What is too large names the road for sparse layers, where there are some."""
        try:
            yield
        except TooLarge as beyond:
            question = self.question
            sparse = any(kind.sparse for model in question.models for kind in kinds(model))
            if question.traced or not sparse:
                raise
            raise TooLarge(f"{beyond}{_SPARSE}") from None


def by_plans(first: AnyModel, second: AnyModel, request: Request, traced: bool) -> InnerProducts:
    """The inner products of two sums of models, along plans.

    Args:
        first, second: Models or sums of models.
        request: Question asked of them.
        traced: Whether weights, coefficients or metric are traced.

    Returns:
        The products of the request; of sums that are not traced, also the norms.
    """
    one, two = terms(first), terms(second)
    models = [model for _, model in (*one, *two)]
    if traced:
        # The dtype of the weights as given: units of untraced models are applied in float64.
        request = request._replace(dtype=weights_dtype(*models))
    slices, dtype = request.slices, request.dtype
    # All models of a comparison are written in the same units, as are the inputs; the metric then
    # follows the inputs.
    tracing, metric = request.tracing, request.metric
    unit = tracing.noted(partial(units_of_inputs, models, metric))
    units = in_units_of_inputs(models, metric, unit)
    known = {id(model): tracing.in_units(model, units, slices) for model in models}
    bra, ket = _scaled_sum(first, known), _scaled_sum(second, known)
    request = request._replace(metric=units.metric)
    exponent = bra.exponent + ket.exponent
    if len(one) == len(two) == 1:
        values = _of_one_pair(bra, ket, request, traced)
        return InnerProducts(values, exponent, traced, dtype, Contractions.name)
    products = _of_sums(bra, ket, request, traced)
    if not traced and any(lost_half(products[name], dtype) for name in ("AA", "BB")):
        # A difference of feature vectors loses half as many digits as a difference of products.
        space = features.common_space(models, metric)
        if space is not None:
            products = by_vectors(space, one, two, metric, slices)
            return InnerProducts(products, 0.0, traced, "float64", space.route)
    return InnerProducts(products, exponent, traced, dtype, Contractions.name)


def _scaled_sum(model: AnyModel, known: dict[int, Scaled[Model]]) -> _Terms:
    """A model or a combination as a sum of scaled models, which are given by `id`."""
    if isinstance(model, Model):
        part = known[id(model)]
        return Scaled(((1.0, np.float64(0.0), part.value),), part.exponent)
    return scaled_terms((c, known[id(m)].exponent, known[id(m)].value) for c, m in terms(model))


def _of_one_pair(bra: _Terms, ket: _Terms, request: Request, traced: bool) -> dict[str, ScaledSum]:
    """The products of two sums of a single model each, with their coefficients."""
    ((c, _, m),), ((d, _, n),) = bra.value, ket.value
    plain = _of_models(m, n, request, traced)
    if traced and not request.squared_norms:  # nothing can be refused later
        arithmetic = Arithmetic(max(m.growth, n.growth), request.dtype)
        plain["AB"] = precision.known_product(plain["AB"], arithmetic)
    # <c A|d B> = c d <A|B>.
    factors = {"AB": c * d, "AA": c * c, "BB": d * d}
    return {name: times(value, factors[name]) for name, value in plain.items()}


def _of_sums(bra: _Terms, ket: _Terms, request: Request, traced: bool) -> dict[str, ScaledSum]:
    """The products of sums of models: every pair of terms once, weighted and added up."""
    sides = {"AB": (bra, ket)}
    if request.squared_norms or not traced:  # the norms show how much of a product cancels
        sides |= {"AA": (bra, bra), "BB": (ket, ket)}
    request = request._replace(squared_norms=False)
    known: dict[tuple[int, int], ScaledSum] = {}

    # Terms of both sums may be one model, and AA has each pair twice.
    def product(m: Model, n: Model) -> ScaledSum:
        key = (id(m), id(n))
        if key not in known:
            # The inner product is symmetric.
            known[key] = known[id(n), id(m)] = _of_models(m, n, request, traced)["AB"]
        return known[key]

    products = {}
    for name, (one, two) in sides.items():
        contributions = []
        for (c, x, m), (d, y, n) in itertools.product(one.value, two.value):
            contributions.append(times(product(m, n), c * d, x + y))
        products[name] = add(contributions)
    return products


def _of_models(a: Model, b: Model, request: Request, traced: bool) -> dict[str, ScaledSum]:
    """The products of two plain models, planned and run.

    Exponents are relative to the norms where these are computed too.
    """
    # A model with itself has one plan for AA, which serves AB and BB: its cosine is then 1 to the
    # last bit.
    alone = a is b or (not traced and same_weights(a, b))
    other = None if alone else b
    family = choose(a, other, request.metric)
    pairs = SELF if alone else request.pairs
    plan = affordable(family, pairs, request.slices, request.dtype, request.budget)
    runs = _traced_runs if traced else _host_runs
    products = []
    for result in runs(family, plan, a, other, request):
        if request.slices and family.lifted:
            result = _without_constant(result)
        products.append(_relative_products(plan, result, alone, request.squared_norms))
    total = products[0]
    if family.nodes is not None:
        # The sum over moment nodes, E = sum_j w_j F(t_j), see `problems.base`.
        weighted: dict[str, list[ScaledSum]] = {name: [] for name in products[0]}
        for weight, product in zip(family.nodes.weights, products, strict=True):
            for name, value in product.items():
                weighted[name].append(times(value, weight))
        total = {name: add(summands) for name, summands in weighted.items()}
    return _with_cancellation(total, a, b, request)


def _with_cancellation(
    products: dict[str, ScaledSum], a: Model, b: Model, request: Request
) -> dict[str, ScaledSum]:
    """Products whose sizes count the cancellation within each model, see `conditioning`."""
    # An error of A's function enters <A|A> twice and <A|B> once, so the factor of AB is the
    # geometric mean of the factors of the norms.

    def factor(model: Model) -> Any:
        made = partial(conditioning, model, request.metric)
        return precision.cancellation(request.tracing.noted(made))

    first = factor(a)
    second = first if a is b else factor(b)
    factors = {"AB": (first * second) ** 0.5, "AA": first, "BB": second}
    return {name: magnified(value, factors[name]) for name, value in products.items()}


def _host_runs(
    family: Family, plan: Plan, a: Model, b: Model | None, request: Request
) -> list[execution.Result]:
    """Results of a plan on the host, node by node."""
    metric, dtype = request.metric, request.dtype
    backend = backend_of(plan)
    with announced_plans([plan]), execution.precision():
        arrays: dict[str, Any] = {}
        for side, model in by_side(a, b).items():
            arrays |= placed_weights(family, side, model, dtype, backend)
        arrays = {name: array for name, array in arrays.items() if name in plan.shapes}

        def at(inputs: dict[str, Any]) -> execution.Result:
            return fetched(plan, arrays | execution.placed(inputs, dtype, backend), backend)

        if family.nodes is None:
            return [at(family.inputs(plan.shapes, metric, a.d_in))]
        nodes = [family.inputs(plan.shapes, metric, a.d_in, t) for t in family.nodes.points]
        if runs_together(plan, request.budget):
            # Runs at different nodes read the same weights; the second moment alone differs.
            moments = np.stack([inputs[COVARIANCE] for inputs in nodes])
            inputs = nodes[0] | {COVARIANCE: moments}
            arrays |= execution.placed(inputs, dtype, backend)
            return fetched_at_all(plan, arrays, [COVARIANCE], backend)
        return [at(inputs) for inputs in nodes]


def _traced_runs(
    family: Family, plan: Plan, a: Model, b: Model | None, request: Request
) -> list[execution.Result]:
    """Results inside a trace of the caller's, node by node."""

    def cast(arrays: Arrays) -> Arrays:
        named = {name: array for name, array in arrays.items() if name in plan.shapes}
        # Where models and metric are numbers, so are all arrays.
        return {name: library(x).asarray(x, request.dtype) for name, x in named.items()}

    @functools.cache
    def weights() -> Arrays:
        models: dict[Side, Model] = {}
        for side, model in by_side(a, b).items():
            models[side] = family.prepare(model)
        return cast(model_weights(family, models))

    def arrays(t: float | None) -> Arrays:
        return weights() | cast(family.inputs(plan.shapes, request.metric, a.d_in, t))

    points = family.nodes.points if family.nodes else (None,)
    return request.tracing.results(plan, [partial(arrays, t) for t in points])


def _without_constant(result: execution.Result) -> execution.Result:
    """A result per output of lifted models, without the constant, which is output 0."""
    return result._replace(values={name: value[1:] for name, value in result.values.items()})


def _relative_products(
    plan: Plan, result: execution.Result, alone: bool, squared_norms: bool
) -> dict[str, ScaledSum]:
    """The products of a single run; for cosines, without the scales of the separate models.

    These scales are as large as exp(2^L) at depth L. A cosine divides by the roots of both norms,
    and the exponent of `<A|B>` carries half of the scales in each norm's. So they cancel and are
    left out of all products. Left is the scale group of each product, which has the product's name.
    """
    values = result.values
    scales = {name: dict(powers) for name, powers in plan.scales.items()}
    if alone:
        product = contribution(values["AA"], execution.exponent_of(result, scales["AA"]))
        return {"AB": product, "AA": product, "BB": product}
    if not squared_norms:
        return {"AB": contribution(values["AB"], execution.exponent_of(result, scales["AB"]))}
    _check_shared(scales)
    products = {}
    for name, powers in scales.items():
        exponent = execution.exponent_of(result, {name: powers.get(name, 0)})
        products[name] = contribution(values[name], exponent)
    return products


def _check_shared(scales: dict[str, dict[str, int]]) -> None:
    """Assert that the scales of the separate models cancel in a cosine."""
    groups = set().union(*scales.values()) - set(scales)
    for group in groups:
        of_norms = scales["AA"].get(group, 0) + scales["BB"].get(group, 0)
        assert of_norms == 2 * scales["AB"].get(group, 0), group


def same_weights(a: Model, b: Model) -> bool:
    """Whether two models have equal layers with equal weights.

    Such models are planned as a single model, so a re-saved checkpoint has similarity 1 to the last
    bit, at any depth.
    """
    (one, form), (two, other_form) = _flat_weights(a), _flat_weights(b)
    return form == other_form and all(map(np.array_equal, one, two))


@per_object_cache
def _flat_weights(model: Model) -> tuple[list[Any], Any]:
    """The weights of a model, and its form without weights."""
    return jax.tree.flatten(model)
