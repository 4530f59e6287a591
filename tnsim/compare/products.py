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
from tnsim.compare.planned import AnyModel, Comparable, affordable, check, parts
from tnsim.engine import execution
from tnsim.engine.budget import Budget
from tnsim.engine.log_scaled import LogScaled, add, contribution, times
from tnsim.engine.plan import Plan
from tnsim.engine.precision import lost_half
from tnsim.errors import ModelError
from tnsim.folding import features
from tnsim.folding.base import model_weights
from tnsim.folding.choose import choose
from tnsim.folding.forward import Sums, sums, total
from tnsim.metrics.metric import Metric
from tnsim.metrics.protocol import FiniteMetric
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.models.scaling import Scaled, larger, scaled, split
from tnsim.names import Pair, Side

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
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((a, b, metric)))
    first = _differences(a, dtype)
    second = first if b is a else _differences(b, dtype)
    models = [part for _, part in (*parts(first), *parts(second)) if isinstance(part, Model)]
    wanted = ALL if norms else CROSS
    points = None
    if not traced or isinstance(metric, FiniteMetric):
        points = points_of(models, metric, wanted, per_output, dtype)
    if points is None:
        assert isinstance(first, AnyModel) and isinstance(second, AnyModel)
        return _by_plans(first, second, metric, norms, per_output, dtype, traced, budget)
    if traced:
        raise ModelError(
            f"{metric.name} runs the models on inputs, which is not traced: inside a JAX trace, "
            "multiply the outputs of the models themselves"
        )
    plan = forward_plan(models, metric, points, dtype)
    check_affordable(plan, metric, budget)
    found = sums([parts(first)], [parts(second)], points, per_output, dtype)
    values = {"AB": total(found.products), "AA": total(found.rows), "BB": total(found.columns)}
    values["AB"] = LogScaled(*(x[0, 0] for x in values["AB"]))
    for name in ("AA", "BB"):
        values[name] = LogScaled(*(x[0] for x in values[name]))
    return Products(values, 0.0, False, plan, found)


def _differences(model: Comparable, dtype: str) -> Comparable:
    return by_differences(model, dtype) if isinstance(model, AnyModel) else model


def _by_plans(
    first: AnyModel,
    second: AnyModel,
    metric: Metric,
    norms: bool,
    per_output: bool,
    dtype: str,
    traced: bool,
    budget: Budget,
) -> Products:
    """Inner products of sums of models along their plans."""
    one, two = terms(first), terms(second)
    scaled_parts = {id(m): scaled(m, per_output) for _, m in (*one, *two)}
    bra, ket = _side(first, scaled_parts), _side(second, scaled_parts)
    exponent = bra.exponent + ket.exponent
    if len(one) == len(two) == 1:
        (c, _, m), (d, _, n) = *bra.terms, *ket.terms
        plain = _run(m, n, metric, norms, per_output, dtype, traced, budget)
        factors = {"AB": c * d, "AA": c * c, "BB": d * d}
        products = {name: times(value, factors[name]) for name, value in plain.items()}
        return Products(products, exponent, traced)
    sides = {"AB": (bra, ket)}
    if norms or not traced:
        sides |= {"AA": (bra, bra), "BB": (ket, ket)}
    known: dict[tuple[int, int], LogScaled] = {}

    def product(m: Model, n: Model) -> LogScaled:
        key = (id(m), id(n))
        if key not in known:
            value = _run(m, n, metric, False, per_output, dtype, traced, budget)["AB"]
            known[key] = known[id(n), id(m)] = value
        return known[key]

    products = {}
    for name, pair in sides.items():
        contributions = []
        for (c, x, m), (d, y, n) in itertools.product(pair[0].terms, pair[1].terms):
            contributions.append(times(product(m, n), c * d, (x + y) * np.log(2)))
        products[name] = add(contributions)
    if not traced and any(lost_half(products[name], dtype) for name in ("AA", "BB")):
        by_vectors = features.compared(one, two, metric, per_output, dtype)
        if by_vectors is not None:
            return Products(by_vectors, 0.0, traced)
    return Products(products, exponent, traced)


class _Side(NamedTuple):
    """`2 ** exponent * sum of coefficient * 2 ** e * model`, the largest e being 0.

    `terms` holds (coefficient, e, model).
    """

    terms: tuple[tuple[Any, Any, Model], ...]
    exponent: Any


def _side(model: AnyModel, known: dict[int, Scaled]) -> _Side:
    """A combination of scaled models."""
    parts = []
    for coefficient, m in terms(model):
        mantissa, own = split(coefficient)
        parts.append((mantissa, own + known[id(m)].exponent, known[id(m)].model))
    largest = reduce(larger, (exponent for _, exponent, _ in parts))
    return _Side(tuple((c, e - largest, m) for c, e, m in parts), largest)


def _run(
    a: Model,
    b: Model,
    metric,
    norms: bool,
    per_output: bool,
    dtype: str,
    traced: bool,
    budget: Budget,
) -> dict[str, LogScaled]:
    """Plan and execute for two plain models.

    Logs are relative to the norms when these are computed too.
    """
    alone = a is b or (not traced and _same_weights(a, b))
    wanted = ALL if norms else CROSS
    if alone:
        wanted = SELF
    family = choose(a, None if alone else b, metric)
    chosen = affordable(family, wanted, per_output, dtype, budget)
    nodes = family.nodes
    if traced:
        leaves = jax.tree.leaves((a, b))
        arrays = [x for x in leaves if hasattr(x, "dtype") and x.ndim]
        dtype = str(jnp.result_type(*(x.dtype for x in arrays)))
    models: dict[Side, Model] = {"A": family.prepare(a)}
    if not alone:
        models["B"] = family.prepare(b)
    known = model_weights(family, models)
    known = {name: array for name, array in known.items() if name in chosen.shapes}
    if not traced:  # laid out once, whatever the number of runs
        with execution.precision():
            known = execution.placed(known, dtype)
    runs = []
    for t in nodes.points if nodes else (None,):
        inputs = family.inputs(chosen.shapes, metric, a.d_in, t)
        runs.append(_execute(chosen, known, inputs, dtype, traced))
    if nodes is None:
        return _relative(chosen, runs[0], alone, norms, per_output and family.lifted)
    parts = [_relative(chosen, run, alone, norms, per_output and family.lifted) for run in runs]
    weighted = []
    for weight, part in zip(nodes.weights, parts, strict=True):
        weighted.append({name: times(value, weight) for name, value in part.items()})
    return {name: add([part[name] for part in weighted]) for name in weighted[0]}


def _execute(
    chosen: Plan, weights: dict[str, Any], inputs: dict[str, Any], dtype: str, traced: bool
) -> execution.Result:
    """One run of a plan in `dtype`, on weights that are in place unless traced, and inputs."""
    if traced:
        known = {k: jnp.asarray(x, dtype) for k, x in (weights | inputs).items()}
        return execution.run(chosen, known, "traced")
    with execution.precision():
        result = execution.run(chosen, weights | execution.placed(inputs, dtype))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(result))


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
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
