"""Inner products along plans of contractions, and the route of these plans.

A sum of models is expanded by bilinearity over its terms. Each pair of plain models has a plan,
which is made within the budget and runs once or, with a constant in an exact deep metric, at every
moment node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import numpy as np

from tnsim.compare.by_features import by_vectors
from tnsim.compare.operands import (
    Places,
    content,
    in_units,
    mean_share,
    numbered_models,
    over_terms,
    pairs_of_models,
    placed_weights,
    scaled_sum,
)
from tnsim.compare.request import (
    CROSS,
    SELF,
    Estimate,
    InnerProducts,
    Question,
    Request,
    smaller_share,
)
from tnsim.engine import precision
from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE, Budget, plan_problem, within
from tnsim.engine.precision import Arithmetic, lost_half
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.devices import backend
from tnsim.engine.runtime.execution import (
    Tier,
    fetched,
    fetched_at_all,
    seconds_of,
    tier_in_use,
)
from tnsim.engine.search.paths import planning
from tnsim.errors import TooLarge
from tnsim.long_work import announced
from tnsim.metrics.metric import is_expectation, joins_whole_trees
from tnsim.metrics.orbits import expected_count
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import weights_dtype
from tnsim.models.differences import constant
from tnsim.models.model import AnyModel, Model, kept_with, terms, with_dense_matrices
from tnsim.names import COVARIANCE, SIDES, Pair
from tnsim.problems import features
from tnsim.problems.diagrams import tree
from tnsim.problems.families import Family, by_side, choose, model_weights
from tnsim.problems.layer_kinds import joined_levels, kinds, need_constant
from tnsim.problems.layer_tensors import zero_outputs
from tnsim.problems.polynomial_space import mean_output
from tnsim.problems.units import ScaledModel, common_units
from tnsim.problems.whole_tree import MAX_LEGS
from tnsim.scaled import (
    ScaledSum,
    add,
    contribution,
    library,
    magnified,
    times,
)
from tnsim.sessions import per_object_cache, session

ADVICE = (
    "use GaussianClosure() (an approximation beyond one nonlinear layer), smaller widths, shorter "
    "sequences (n_ctx) or a larger tnsim.Budget"
)
"""Advice where a comparison is beyond its budget."""

PREPARING, AROUND = 0.02, 1.5
"""Seconds of writing models in units and of measuring how far sums cancel, and all time of a run as
a multiple of its steps' time."""
_BRIEF = 1e9  # multiplications that take no seconds
_BUSY = {"cpu": 2**20, "gpu": 2**27}
"""Multiplications of one operation that keep all of a device busy, by JAX's name of the device."""


_SPARSE = (
    "; one or two layers of convolutions are compared as they are where pixels are independent, "
    "tnsim.Gaussian(mean, variances)"
)
_MEANS = 10**10
"""Multiplications, less than a second, up to which the means of a model's outputs are worked out
beside a product that was asked for."""
_STARTING, _PER_DIAGRAM, _LIFTED = 0.08, 1.4e-5, 1.5
"""Seconds to plan an inner product of whole trees: in any case, for each diagram by the square of
its number of legs, and the factor beside constants."""


def plan_for(
    family: Family,
    pairs: tuple[Pair, ...],
    slices: bool,
    dtype: str,
    large: int = LARGE,
    limit: float = math.inf,
) -> Plan:
    """The plan of some inner products, the same object at every call in a session.

    Args:
        family: Way in which the models and the metric become a problem.
        pairs: Inner products that are wanted.
        slices: Whether outputs are told apart.
        dtype: Precision of the computation.
        large: Elements beyond which an intermediate is computed in chunks.
        limit: Multiplications beyond which planning ends early, see `plan_problem`.

    Raises:
        BeyondLimit: The plan takes more multiplications than the limit.
    """

    def planned() -> Plan:
        with planning(family.name):
            return plan_problem(
                family.problem(pairs, slices),  # refuses trees of too many legs
                family.name,
                family.exact,
                dtype,
                large,
                # A plan with moment nodes runs once at each, and a budget counts all runs.
                len(family.nodes.points) if family.nodes else 1,
                limit,
            )

    # The limit ends a search and changes no plan.
    return session().results.get((plan_for, family, pairs, slices, dtype, large), planned)


def affordable(
    family: Family, wanted: tuple[Pair, ...], slices: bool, dtype: str, budget: Budget
) -> Plan:
    """A plan of some inner products within the budget. Raises `TooLarge` where none fits."""
    return within(budget, family.name, partial(plan_for, family, wanted, slices, dtype), ADVICE)


def runs_together(plan: Plan, budget: Budget) -> bool:
    """Whether the runs of a plan at all moment nodes become a single run on stacks of moments.

    Small operations then take the time of a single node for all nodes (measured on four cores: 2.5
    ms become 1.1 ms at width 8 and depth 2, 450 ms become 260 ms at width 6 and depth 3). An
    operation that keeps the device busy by itself gains nothing, and XLA multiplies stacks of
    matrices more slowly than matrices (4.6 s become 6.2 s at width 64 and depth 2). The stacks must
    also fit into the budget's memory.
    """
    # The average operation of a run keeps the device busy by itself.
    busy = _BUSY.get(backend(), _BUSY["gpu"])
    if plan.multiplications > busy * plan.runs * plan.whole.length:
        return False
    # An upper bound: arrays that do not depend on the moment are shared by all runs.
    together = plan.runs * plan.peak_bytes
    return together <= budget.room(plan.program_bytes, together)


def announced_plans(plans: Sequence[Plan]) -> AbstractContextManager[None]:
    """Announce runs of plans that are expected to be long, each plan with all its runs."""
    seconds = 0.0
    if sum(plan.multiplications for plan in plans) > _BRIEF:
        seconds = AROUND * sum(map(seconds_of, plans))
    name = plans[0].metric if plans else ""
    return announced(f"contractions of {name}", seconds)


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
        return self.question.once(Contractions, self._search)

    def _search(self) -> float:
        question, (a, b) = self.question, self._example
        several = [kinds(a), kinds(b)]
        if not joins_whole_trees(type(question.metric), joined_levels(*several)):
            return 0.0
        trees = dict(zip(SIDES, map(tree, several), strict=True))
        lifted = a.n_ctx is not None or need_constant(several)
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
        plan = plan_for(self._family, question.wanted, question.slices, question.dtype)
        return self._told(plan)

    def _told(self, plan: Plan) -> Estimate:
        return Estimate(
            metric=plan.metric,
            exact=plan.exact,
            route=self.name,
            dtype=plan.dtype,
            outputs=plan.outputs,
            multiplications=plan.multiplications,
            peak_bytes=plan.interpreted_bytes,
            seconds=PREPARING + AROUND * seconds_of(plan),
            facts=(("diagrams", plan.diagrams), ("runs", plan.runs)),
            contraction=plan,
        )

    def within(self, estimate: Estimate, budget: Budget) -> Estimate:
        """See `routes.Route`. Large contractions may be in smaller chunks than in the estimate."""
        question = self.question
        family, wanted = self._family, question.wanted
        with self._advised():
            plan = affordable(family, wanted, question.slices, question.dtype, budget)
        return estimate if plan is estimate.contraction else self._told(plan)

    @cached_property
    def _family(self) -> Family:
        metric = self.question.metric
        forms = {kinds(model): model for model in self.question.models}
        if len(self.question.models) > 2:  # a sum has no plan where two of its models have none
            for one, two in itertools.combinations(forms.values(), 2):
                choose(one, two, metric)
        a, b = self._example
        return choose(a, b, common_units([a, b], metric).metric)

    @cached_property
    def _example(self) -> tuple[Model, Model]:
        """The two models that are compared, of sums the two of the highest degree."""
        models = [*self.question.models]
        if len(models) > 2:
            models = sorted(models, key=lambda model: model.degree, reverse=True)[:2]
        return models[0], models[-1]

    def products(
        self, first: AnyModel, second: AnyModel, request: Request, traced: bool
    ) -> InnerProducts:
        """See `by_plans`."""
        with self._advised():
            return by_plans(first, second, request, traced)

    @contextlib.contextmanager
    def _advised(self) -> Iterator[None]:
        """Add to the message of `TooLarge` what to do with sparse layers, where there are some."""
        try:
            yield
        except TooLarge as beyond:
            question = self.question
            sparse = any(kind.sparse for model in question.models for kind in kinds(model))
            if question.traced or not sparse:
                raise
            raise TooLarge(f"{beyond}{_SPARSE}") from None


AskedPair: TypeAlias = tuple[int, int, Family, tuple[Pair, ...]]
"""A `PlannedPair` without its plan, for which JAX may keep programs: it would keep the plan too."""


class PlannedPair(NamedTuple):
    """The inner products of two models, as a plan computes them.

    Args:
        one, two: Numbers of the models among the distinct models of a comparison.
        family: Way in which the models and the metric become a problem.
        wanted: Inner products that are wanted; `SELF` where one plan of a model with itself serves
            for all products.
        plan: Plan within the budget, which follows from the others.
    """

    one: int
    two: int
    family: Family
    wanted: tuple[Pair, ...]
    plan: Plan

    @property
    def asked(self) -> AskedPair:
        """The pair without its plan."""
        return self.one, self.two, self.family, self.wanted

    @property
    def alone(self) -> bool:
        """Whether the plan is of one model with itself."""
        return self.wanted == SELF

    def inputs(self, metric: Metric, d_in: int) -> list[dict[str, Any]]:
        """The arrays of the inputs by name, at every moment node; once where there are no nodes."""
        nodes = self.family.nodes
        points = (None,) if nodes is None else nodes.points
        return [self.family.inputs(self.plan.shapes, metric, d_in, t) for t in points]


def planned(asked: AskedPair, request: Request) -> PlannedPair:
    """A pair with its plan within the budget of a request, the same object at every call."""
    one, two, family, wanted = asked
    plan = affordable(family, wanted, request.slices, request.dtype, request.budget)
    return PlannedPair(one, two, family, wanted, plan)


class Written(NamedTuple):
    """The models of a comparison in scientific notation, as far as sums of products depend on it.

    Args:
        exponents: Exponents that the models lack.
        factors: Factors by which terms cancel within the models, see `problems.conditioning`.
        zeros: Which outputs of each model are zero, though a trace finds rounding for their norms.
    """

    exponents: Sequence[Any]
    factors: Sequence[Any]
    zeros: Sequence[Any] = ()

    @classmethod
    def of(cls, known: Sequence[ScaledModel], traced: bool) -> Self:
        """What the products depend on of models in scientific notation."""
        zeros = [zero_outputs(one.value) for one in known] if traced else ()
        return cls([one.exponent for one in known], [one.cancels for one in known], zeros)


def by_plans(first: AnyModel, second: AnyModel, request: Request, traced: bool) -> InnerProducts:
    """The inner products of two sums of models, along plans.

    Args:
        first, second: Models or sums of models.
        request: Metric, precision, budget, and the products that are wanted.
        traced: Whether weights, coefficients or metric are traced.

    Returns:
        The products of the request; of sums that are not traced, also the norms.
    """
    models, places = numbered_models(first, second)
    if traced:
        # The dtype of the weights as given: units of untraced models are applied in float64.
        request = request._replace(dtype=weights_dtype(*models))
    # All models of a comparison are written in the same units, as are the inputs; the metric then
    # follows the inputs.
    metric, units = request.metric, common_units(models, request.metric)
    # Plans read dense matrices, whose rows have units and bases of their own.
    known = [in_units(with_dense_matrices(model), units, request.slices) for model in models]
    request = request._replace(metric=units.metric)
    pairs = planned_pairs([one.value for one in known], places, request, traced)
    run = _traced_runs if traced else partial(_host_runs, tier=tier_in_use())
    results = [run(pair, known[pair.one].value, known[pair.two].value, request) for pair in pairs]
    written = Written.of(known, traced)
    found = products_of(first, second, places, pairs, results, written, request, traced)
    if not traced and request.squared_norms and is_expectation(metric):
        means = [mean_in_units(one.value, units.metric, request.budget) for one in known]
        single, norms, shares = _are_single(first, second), found.values, []
        if single:  # the products of a pair lack the scales that cancel in a cosine
            norms = _of_models(pairs[0], results[0], written, request, relative=False)
        for model, own, name in zip((first, second), places, ("AA", "BB"), strict=True):
            side, norm = scaled_sum(model, own, written.exponents), norms[name]
            if single:
                norm = times(norm, side.value[0][0] ** 2)
            shares.append(mean_share(side, means.__getitem__, norm))
        found = found._replace(mean_share=smaller_share(*shares))
    if traced or _are_single(first, second):
        return found
    if any(lost_half(found.values[name], request.dtype) for name in ("AA", "BB")):
        # A difference of feature vectors loses half as many digits as a difference of products.
        space = features.common_space(models, metric)
        if space is not None:
            both = terms(first), terms(second)
            sums, share = by_vectors(space, *both, metric, request.slices)
            return InnerProducts(sums, 0.0, traced, "float64", space.route, mean_share=share)
    return found


def mean_in_units(model: Model, metric: Metric, budget: Budget) -> ScaledSum | None:
    """The means of the outputs of a model over inputs and positions, found once while it lives.

    Args:
        model: Model from `in_units`.
        metric: Metric in the same units.
        budget: Limits of the computation.

    Returns:
        Means, for sequences times the root of the number of positions: their squares add up to the
        part of the squared norm that is in the mean. None where the metric is no expectation over
        inputs, or the means are beyond the budget.
    """

    def found() -> ScaledSum | None:
        mean = mean_output(model, metric)
        if mean is None:
            return _planned_mean(model, metric, budget)
        return contribution(mean, np.float64(0.0))

    return kept_with(model, (mean_in_units, content(metric), budget), found)


def _planned_mean(model: Model, metric: Metric, budget: Budget) -> ScaledSum | None:
    """The means of `mean_in_units` as inner products of outputs with the constant 1.

    They cost a part of a model's norm, once while the model lives. They run in NumPy wherever other
    plans run, as a program of their own is not worth compiling.
    """
    if not is_expectation(metric):
        return None
    ones = constant(model.d_in, np.ones(model.d_out), model.n_ctx)
    most = min(budget.multiplications, _MEANS)
    budget = dataclasses.replace(budget, multiplications=most)
    request = Request(metric, "float64", budget, slices=True)
    try:
        (pair,) = planned_pairs([model, ones], ((0,), (1,)), request, traced=False)
    except TooLarge:
        return None
    results = _host_runs(pair, model, ones, request, "interpret")
    written = Written((0.0, 0.0), (1.0, 1.0))
    found = _of_models(pair, results, written, request)["AB"]
    # E[sum of positions] = n_ctx E, and n_ctx E^2 is what the mean has of the squared norm.
    return times(found, 1 / math.sqrt(model.n_ctx or 1))


def _are_single(first: AnyModel, second: AnyModel) -> bool:
    """Whether both sums consist of a single model."""
    return len(terms(first)) == len(terms(second)) == 1


def planned_pairs(
    models: Sequence[Model], places: Places, request: Request, traced: bool
) -> list[PlannedPair]:
    """The pairs of models whose products make up those of two sums, each pair once.

    Args:
        models: Distinct models in scientific notation.
        places: Numbers of the models of each sum.
        request: Request for the sums, its metric in the units of the inputs.
        traced: Whether weights, coefficients or metric are traced, or are to be differentiated.

    Raises:
        TooLarge: A plan would exceed the budget.
    """
    single = all(len(own) == 1 for own in places)
    wanted = request.pairs if single else CROSS
    # The norms of a sum show how much of a product cancels.
    norms = not single and (request.squared_norms or not traced)
    pairs = []
    for one, two in pairs_of_models(places, norms):
        a, b = models[one], models[two]
        # A model with itself has one plan for AA, which serves AB and BB: its cosine is then 1 to
        # the last bit.
        alone = a is b or (not traced and same_weights(a, b))
        family = _family_of(a, None if alone else b, request.metric, traced)
        asked = one, two, family, SELF if alone else wanted
        pairs.append(planned(asked, request))  # refused before anything runs
    return pairs


def _family_of(a: Model, b: Model | None, metric: Metric, traced: bool) -> Family:
    """See `choose`, which depends on kinds of layers and on the moments of the metric alone.

    Shapes of the arrays of tokens are found by evaluation, 9 of 22 ms of a warm comparison.
    """
    if traced:
        return choose(a, b, metric)
    key = choose, kinds(a), None if b is None else kinds(b), a.n_ctx, content(metric)
    return session().results.get(key, lambda: choose(a, b, metric))


def products_of(
    first: AnyModel,
    second: AnyModel,
    places: Places,
    pairs: Sequence[PlannedPair],
    results: Sequence[Sequence[execution.Result]],
    written: Written,
    request: Request,
    traced: bool,
) -> InnerProducts:
    """The inner products of two sums, from the results of the plans of their models.

    Args:
        first, second: Models or sums of models, of which coefficients and degrees are read.
        places: Numbers of the models of each sum.
        pairs: Pairs of models, see `planned_pairs`.
        results: Results of the plan of each pair, at every moment node.
        written: Exponents and factors of the models.
        request: Request for the sums.
        traced: Whether numbers are traced.
    """
    of_pairs: dict[tuple[int, int], dict[str, ScaledSum]] = {}
    for pair, found in zip(pairs, results, strict=True):
        products = _of_models(pair, found, written, request)
        of_pairs[pair.one, pair.two] = of_pairs[pair.two, pair.one] = products
    bra, ket = (
        scaled_sum(one, own, written.exponents)
        for one, own in zip((first, second), places, strict=True)
    )
    dtype, exponent = request.dtype, bra.exponent + ket.exponent
    if _are_single(first, second):
        ((c, _, m),), ((d, _, n),) = bra.value, ket.value
        plain = dict(of_pairs[m, n])
        if traced and not request.squared_norms:  # nothing can be refused later
            growth = max(model.growth for one in (first, second) for _, model in terms(one))
            plain["AB"] = precision.known_product(plain["AB"], Arithmetic(growth, dtype))
        # <c A|d B> = c d <A|B>.
        factors = {"AB": c * d, "AA": c * c, "BB": d * d}
        values = {name: times(value, factors[name]) for name, value in plain.items()}
        return InnerProducts(values, exponent, traced, dtype, Contractions.name)
    norms = request.squared_norms or not traced
    values = over_terms(bra, ket, lambda m, n: of_pairs[m, n]["AB"], norms)
    return InnerProducts(values, exponent, traced, dtype, Contractions.name)


def _of_models(
    pair: PlannedPair,
    results: Sequence[execution.Result],
    written: Written,
    request: Request,
    relative: bool = True,
) -> dict[str, ScaledSum]:
    """The products of two plain models from results at every moment node.

    Exponents are relative to the norms where these are computed too, unless asked for as they are.
    """
    products = []
    for result in results:
        if request.slices and pair.family.lifted:  # output 0 is the constant
            values = {name: value[1:] for name, value in result.values.items()}
            result = result._replace(values=values)
        products.append(_products(pair.plan, result, pair.alone, relative))
    total = products[0]
    nodes = pair.family.nodes
    if nodes is not None:
        # The sum over moment nodes, E = sum_j w_j F(t_j), see `problems.families`.
        weighted: dict[str, list[ScaledSum]] = {name: [] for name in products[0]}
        for weight, product in zip(nodes.weights, products, strict=True):
            for name, value in product.items():
                weighted[name].append(times(value, weight))
        total = {name: add(summands) for name, summands in weighted.items()}
    first, second = (written.factors[n] for n in (pair.one, pair.two))
    amplified = {"AB": precision.of_pair(first, second), "AA": first, "BB": second}
    total = {name: magnified(value, amplified[name]) for name, value in total.items()}
    for name, n in (("AA", pair.one), ("BB", pair.two)):
        if name in total and written.zeros:
            zeros = written.zeros[n]
            total[name] = times(total[name], 1.0 - (zeros if request.slices else zeros.all()))
    return total


def _host_runs(
    pair: PlannedPair, a: Model, b: Model, request: Request, tier: Tier
) -> list[execution.Result]:
    """Results of a plan on the host, node by node."""
    plan = pair.plan
    with announced_plans([plan]), execution.precision():
        arrays: dict[str, Any] = {}
        for side, model in by_side(a, None if pair.alone else b).items():
            arrays |= placed_weights(pair.family, side, model, request.dtype, tier)
        arrays = {name: array for name, array in arrays.items() if name in plan.shapes}
        nodes = pair.inputs(request.metric, a.d_in)
        if len(nodes) > 1 and runs_together(plan, request.budget):
            # Runs at different nodes read the same weights; the second moment alone differs.
            moments = np.stack([inputs[COVARIANCE] for inputs in nodes])
            inputs = nodes[0] | {COVARIANCE: moments}
            arrays |= execution.placed(inputs, request.dtype, tier)
            return fetched_at_all(plan, arrays, [COVARIANCE], tier)
        placed = [execution.placed(inputs, request.dtype, tier) for inputs in nodes]
        return [fetched(plan, arrays | inputs, tier) for inputs in placed]


def _traced_runs(pair: PlannedPair, a: Model, b: Model, request: Request) -> list[execution.Result]:
    """Results inside a trace of the caller's, node by node."""
    arrays = traced_arrays(pair, a, b, request)
    return [execution.run(pair.plan, own, "trace") for own in arrays]


def traced_arrays(pair: PlannedPair, a: Model, b: Model, request: Request) -> list[dict[str, Any]]:
    """The arrays of a pair's plan inside a trace, node by node.

    Args:
        pair: Pair of models.
        a, b: Its models in scientific notation.
        request: Request for the sums, its metric in the units of the inputs.
    """
    plan, family = pair.plan, pair.family

    def cast(arrays: dict[str, Any]) -> dict[str, Any]:
        named = {name: array for name, array in arrays.items() if name in plan.shapes}
        # Where models and metric are numbers, so are all arrays.
        return {name: library(x).asarray(x, request.dtype) for name, x in named.items()}

    sides = by_side(a, None if pair.alone else b).items()
    weights = cast(model_weights(family, {side: family.prepare(model) for side, model in sides}))
    nodes = pair.inputs(request.metric, a.d_in)
    return [weights | cast(inputs) for inputs in nodes]


def _products(
    plan: Plan, result: execution.Result, alone: bool, relative: bool
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
    if len(scales) > 1 and relative:
        _check_shared(scales)
        scales = {name: {name: powers.get(name, 0)} for name, powers in scales.items()}
    return {
        name: contribution(values[name], execution.exponent_of(result, powers))
        for name, powers in scales.items()
    }


def _check_shared(scales: dict[str, dict[str, int]]) -> None:
    """Assert that the scales of the separate models cancel in a cosine."""
    groups = set().union(*scales.values()) - set(scales)
    for group in groups:
        of_norms = scales["AA"].get(group, 0) + scales["BB"].get(group, 0)
        assert of_norms == 2 * scales["AB"].get(group, 0), group


def same_weights(a: Any, b: Any) -> bool:
    """Whether two models have equal layers with equal weights, or two layers have.

    Such models are planned as a single model, so a re-saved checkpoint has similarity 1 to the last
    bit, at any depth.
    """
    (one, form), (two, other_form) = _flat_weights(a), _flat_weights(b)
    return form == other_form and all(map(np.array_equal, one, two))


@per_object_cache
def _flat_weights(model: Any) -> tuple[list[Any], Any]:
    """The weights of a model or a layer, and its form without weights."""
    return jax.tree.flatten(model)
