"""Inner products of two models, or of sums of models. In: models, a metric. Out: scaled products.

A sum of models is expanded by bilinearity over its terms; each pair of plain models has one plan,
which runs once or, with a constant in an exact deep metric, at every moment node.
"""

from __future__ import annotations

import itertools
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tnsim.compare.by_points import ForwardPlan, check_affordable, forward_plan, points_of
from tnsim.compare.planned import AnyModel, Comparable, affordable, check, parts, runs_together
from tnsim.compare.resident import in_units, is_constant, placed_weights
from tnsim.engine import execution
from tnsim.engine.budget import Budget
from tnsim.engine.log_scaled import LogScaled, add, contribution, times
from tnsim.engine.plan import Plan
from tnsim.engine.precision import lost_half
from tnsim.engine.whole_plans import fetched, fetched_at_all
from tnsim.folding import features, forward_traced
from tnsim.folding.base import Family, model_weights
from tnsim.folding.choose import choose
from tnsim.folding.forward import Sums, Terms, sums, total
from tnsim.folding.leaves import by_side
from tnsim.metrics.metric import Metric
from tnsim.metrics.points import Points
from tnsim.metrics.protocol import FiniteMetric
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.models.scaling import Scaled, larger, split
from tnsim.names import COVARIANCE, Pair, Side
from tnsim.sessions import kept_with

CROSS = (Pair("A", "B"),)
ALL = (Pair("A", "A"), Pair("A", "B"), Pair("B", "B"))
SELF = (Pair("A", "A"),)


class Products(NamedTuple):
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


class _Asked(NamedTuple):
    """What is the same for all pairs of models of one comparison.

    norms: whether `AA` and `BB` are wanted beside `AB`.
    traced: whether weights, coefficients or metric are traced.
    """

    metric: Metric
    norms: bool
    per_output: bool
    dtype: str
    budget: Budget
    traced: bool


def inner_products(
    a: Comparable,
    b: Comparable,
    metric: Metric,
    norms: bool,
    per_output: bool,
    dtype: str,
    budget: Budget,
) -> Products:
    """The inner products asked for, `AB` and with `norms` also `AA` and `BB`.

    A sum of several models has its norms computed unless traced: what cancels is seen beside them.
    """
    check(a, b, metric)
    traced = any(map(_is_traced, (a, b, metric)))
    asked = _Asked(metric, norms, per_output, dtype, budget, traced)
    first = _differences(a, dtype)
    second = first if b is a else _differences(b, dtype)
    models = [part for _, part in (*parts(first), *parts(second)) if isinstance(part, Model)]
    wanted = ALL if norms else CROSS
    points = None
    if not traced or isinstance(metric, FiniteMetric):
        points = points_of(models, metric, wanted, per_output, dtype)
    if points is None:
        assert isinstance(first, AnyModel) and isinstance(second, AnyModel)
        return _by_plans(first, second, asked)
    plan = forward_plan(models, metric, points, dtype)
    check_affordable(plan, metric, budget)
    if traced:
        return _traced_by_points(parts(first), parts(second), points, asked)
    found = sums([parts(first)], [parts(second)], points, per_output, dtype)
    values = {"AB": total(found.products), "AA": total(found.rows), "BB": total(found.columns)}
    values["AB"] = LogScaled(*(x[0, 0] for x in values["AB"]))
    for name in ("AA", "BB"):
        values[name] = LogScaled(*(x[0] for x in values[name]))
    return Products(values, 0.0, False, plan, found)


def _traced_by_points(first: Terms, second: Terms, points: Points, asked: _Asked) -> Products:
    """Inner products over a finite measure, inside a trace."""
    sides = {"AB": (first, second)}
    if asked.norms:
        sides |= {"AA": (first, first), "BB": (second, second)}
    values = {}
    for name, (one, two) in sides.items():
        values[name] = forward_traced.inner_product(one, two, points, asked.per_output)
    return Products(values, 0.0, True)


def _differences(model: Comparable, dtype: str) -> Comparable:
    return by_differences(model, dtype) if isinstance(model, AnyModel) else model


def _by_plans(first: AnyModel, second: AnyModel, asked: _Asked) -> Products:
    """Inner products of sums of models along their plans."""
    per_output, dtype, traced = asked.per_output, asked.dtype, asked.traced
    one, two = terms(first), terms(second)
    units = {id(m): in_units(m, per_output) for _, m in (*one, *two)}
    bra, ket = _side(first, units), _side(second, units)
    exponent = bra.exponent + ket.exponent
    if len(one) == len(two) == 1:
        return Products(_of_one_pair(bra, ket, asked), exponent, traced)
    products = _of_sums(bra, ket, asked)
    if not traced and any(lost_half(products[name], dtype) for name in ("AA", "BB")):
        by_vectors = features.compared(one, two, asked.metric, per_output, dtype)
        if by_vectors is not None:
            return Products(by_vectors, 0.0, traced)
    return Products(products, exponent, traced)


def _is_traced(value: Any) -> bool:
    """Whether a metric, a model or a combination holds anything traced."""
    if isinstance(value, Model) and is_constant(value):
        return False
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


class _Side(NamedTuple):
    """`2 ** exponent * sum of coefficient * 2 ** e * model`, the largest e being 0.

    `terms` holds (coefficient, e, model).
    """

    terms: tuple[tuple[Any, Any, Model], ...]
    exponent: Any


def _side(model: AnyModel, known: dict[int, Scaled]) -> _Side:
    """A combination of scaled models."""
    if isinstance(model, Model):
        part = known[id(model)]
        return _Side(((1.0, np.float64(0.0), part.model),), part.exponent)
    parts = []
    for coefficient, m in terms(model):
        mantissa, own = split(coefficient)
        parts.append((mantissa, own + known[id(m)].exponent, known[id(m)].model))
    largest = reduce(larger, (exponent for _, exponent, _ in parts))
    return _Side(tuple((c, e - largest, m) for c, e, m in parts), largest)


def _of_one_pair(bra: _Side, ket: _Side, asked: _Asked) -> dict[str, LogScaled]:
    """Products of one model with one other, each with a coefficient."""
    ((c, _, m),), ((d, _, n),) = bra.terms, ket.terms
    plain = _of_models(m, n, asked)
    factors = {"AB": c * d, "AA": c * c, "BB": d * d}
    return {name: times(value, factors[name]) for name, value in plain.items()}


def _of_sums(bra: _Side, ket: _Side, asked: _Asked) -> dict[str, LogScaled]:
    """Products of sums of models: every pair of terms once, weighted and added up."""
    sides = {"AB": (bra, ket)}
    if asked.norms or not asked.traced:
        sides |= {"AA": (bra, bra), "BB": (ket, ket)}
    asked = asked._replace(norms=False)
    known: dict[tuple[int, int], LogScaled] = {}

    def product(m: Model, n: Model) -> LogScaled:
        key = (id(m), id(n))
        if key not in known:
            known[key] = known[id(n), id(m)] = _of_models(m, n, asked)["AB"]
        return known[key]

    products = {}
    for name, (one, two) in sides.items():
        contributions = []
        for (c, x, m), (d, y, n) in itertools.product(one.terms, two.terms):
            contributions.append(times(product(m, n), c * d, (x + y) * np.log(2)))
        products[name] = add(contributions)
    return products


def _of_models(a: Model, b: Model, asked: _Asked) -> dict[str, LogScaled]:
    """Plan and execute for two plain models.

    Logs are relative to the norms when these are computed too.
    """
    alone = a is b or (not asked.traced and _same_weights(a, b))
    wanted = ALL if asked.norms else CROSS
    if alone:
        wanted = SELF
    family = choose(a, None if alone else b, asked.metric)
    plan = affordable(family, wanted, asked.per_output, asked.dtype, asked.budget)
    runs = _traced_runs if asked.traced else _runs
    products = []
    for result in runs(family, plan, a, None if alone else b, asked):
        drop_constant = asked.per_output and family.lifted
        products.append(_relative(plan, result, alone, asked.norms, drop_constant))
    if family.nodes is None:
        return products[0]
    weighted: dict[str, list[LogScaled]] = {name: [] for name in products[0]}
    for weight, product in zip(family.nodes.weights, products, strict=True):
        for name, value in product.items():
            weighted[name].append(times(value, weight))
    return {name: add(parts) for name, parts in weighted.items()}


def _runs(
    family: Family, plan: Plan, a: Model, b: Model | None, asked: _Asked
) -> list[execution.Result]:
    """Results of a plan, one for each moment node, on the host."""
    metric, dtype = asked.metric, asked.dtype
    with execution.precision():
        arrays: dict[str, Any] = {}
        for side, model in by_side(a, b).items():
            arrays |= placed_weights(family, side, model, dtype)
        arrays = {name: array for name, array in arrays.items() if name in plan.shapes}
        if family.nodes is None:
            inputs = family.inputs(plan.shapes, metric, a.d_in)
            return [fetched(plan, arrays | execution.placed(inputs, dtype))]
        nodes = [family.inputs(plan.shapes, metric, a.d_in, t) for t in family.nodes.points]
        if runs_together(plan, asked.budget):
            moments = np.stack([inputs[COVARIANCE] for inputs in nodes])
            inputs = nodes[0] | {COVARIANCE: moments}
            arrays |= execution.placed(inputs, dtype)
            return fetched_at_all(plan, arrays, [COVARIANCE])
        return [fetched(plan, arrays | execution.placed(inputs, dtype)) for inputs in nodes]


def _traced_runs(
    family: Family, plan: Plan, a: Model, b: Model | None, asked: _Asked
) -> list[execution.Result]:
    """The same inside a trace of the caller's, in the dtype of the weights given."""
    leaves = jax.tree.leaves((a, b))
    dtype = str(jnp.result_type(*(x.dtype for x in leaves if hasattr(x, "dtype") and x.ndim)))
    models: dict[Side, Model] = {}
    for side, model in by_side(a, b).items():
        models[side] = family.prepare(model)
    weights = model_weights(family, models)
    results = []
    for t in family.nodes.points if family.nodes else (None,):
        known = weights | family.inputs(plan.shapes, asked.metric, a.d_in, t)
        arrays = {name: jnp.asarray(known[name], dtype) for name in plan.shapes}
        results.append(execution.run(plan, arrays, "traced"))
    return results


def _relative(
    chosen: Plan, result: execution.Result, alone: bool, norms: bool, drop_constant: bool
) -> dict[str, LogScaled]:
    """Products of one run, in the gauge in which the two models' own scales are left out when
    norms are there too.
    """
    values = {k: v[1:] if drop_constant else v for k, v in result.values.items()}
    scales = {name: dict(groups) for name, groups in chosen.scales.items()}
    if alone:
        product = contribution(values["AA"], execution.log_of(result, scales["AA"]))
        return {"AB": product, "AA": product, "BB": product}
    if not norms:
        return {"AB": contribution(values["AB"], execution.log_of(result, scales["AB"]))}
    gauge = {g for s in scales.values() for g in s} - set(scales)
    shared = {g: (scales["AA"].get(g, 0) + scales["BB"].get(g, 0)) / 2 for g in gauge}
    for g in gauge:  # <A|B> carries half of what each norm carries, so these cancel in a cosine
        assert shared[g] == scales["AB"].get(g, 0), g
    return {
        name: contribution(
            values[name], execution.log_of(result, {name: scales[name].get(name, 0)})
        )
        for name in scales
    }


def _same_weights(a: Model, b: Model) -> bool:
    """Equal layer by layer.

    A re-saved checkpoint then has similarity 1 to the last bit, at any depth.
    """
    (one, form), (two, other_form) = _flat(a), _flat(b)
    return form == other_form and all(map(np.array_equal, one, two))


@kept_with
def _flat(model: Model) -> tuple[list[Any], Any]:
    """The weights of a model, and its form without them."""
    return jax.tree.flatten(model)
