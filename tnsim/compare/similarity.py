"""The verbs: similarity, slices, inner, log_inner, plan. In: models and a metric. Out: numbers.

Models are aligned and planned by shape (once per structure and process), their arrays are lifted where a
bias or a skip needs it, and the plan is run. Outside a JAX trace everything runs in a scoped 64-bit,
full-precision setting and returns NumPy float64; inside one, in the dtype of the weights given, and
what comes back is a JAX array.
"""

from __future__ import annotations

import warnings
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from tnsim.compare.numbers import Number, Numbers, SignedLog
from tnsim.compare.planned import AnyModel, Budget, affordable, check, plan_for
from tnsim.engine import execution
from tnsim.engine.plan import Plan, dtype_name
from tnsim.errors import ModelError, PrecisionWarning, TnsimError
from tnsim.folding.base import model_weights
from tnsim.folding.choose import choose
from tnsim.metrics import metric as metrics
from tnsim.metrics.metric import Gaussian, Metric
from tnsim.models.model import Model, terms
from tnsim.models.scaling import Scaled, beyond_float, larger, power, scaled, split
from tnsim.names import Pair

_ROUNDING_SHOWN = 1e-2


def similarity(
    a: AnyModel,
    b: AnyModel,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Number:
    """Cosine over all outputs: `<a|M|b> / sqrt(<a|M|a> <b|M|b>)` (paper, equation 2), in [-1, 1].

    a, b: models, or combinations such as `b - c`. dtype: precision of the computation. Raises `ModelError`
    when the models cannot be compared or one of them is the zero function.
    """
    dtype = dtype_name(dtype)
    products, traced = _products(a, b, metric, True, False, dtype, budget)
    return _finish(_cosine(products, traced), metric, (a, b), traced, dtype)


def slices(
    a: AnyModel,
    b: AnyModel,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Numbers:
    """Cosine of every output coordinate on its own (paper, section 2.4), shape (d_out,). Raises as `similarity`."""
    dtype = dtype_name(dtype)
    products, traced = _products(a, b, metric, True, True, dtype, budget)
    return _finish(_cosine(products, traced), metric, (a, b), traced, dtype)


def inner(
    a: AnyModel,
    b: AnyModel,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Number:
    """`<a|M|b>`; under `Gaussian` that is `E <a(x), b(x)>`.

    Raises `TnsimError` where it is too large or too small for float64.
    """
    dtype = dtype_name(dtype)
    products, traced = _products(a, b, metric, False, False, dtype, budget)
    product = products["AB"]
    value = power(*product)
    if traced:
        return value
    if beyond_float(value, product.mantissa):
        log = product.log + product.exponent * np.log(2)
        raise TnsimError(
            f"the inner product is about exp({log:.6g}), beyond float64; use log_inner"
        )
    return _finish(value, metric, (a, b), False, dtype)


def log_inner(
    a: AnyModel,
    b: AnyModel,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> SignedLog:
    """(sign, log |<a|M|b>|), finite at any depth; a zero inner product has sign 0 and log -inf."""
    dtype = dtype_name(dtype)
    products, traced = _products(a, b, metric, False, False, dtype, budget)
    mantissa, log, exponent = products["AB"]
    log = log + exponent * np.log(2)
    xp = jnp if traced else np
    with np.errstate(divide="ignore"):
        found = SignedLog(xp.sign(mantissa), xp.log(xp.abs(mantissa)) + log)
    return (
        found if traced else SignedLog(*(_finish(x, metric, (a, b), False, dtype) for x in found))
    )


def plan(
    a: Model,
    b: Model,
    metric: Metric = Gaussian(),
    *,
    norms: bool = False,
    per_output: bool = False,
    dtype: DTypeLike = "float64",
) -> Plan:
    """What would run for `<a|M|b>`, from shapes alone; with `norms` also `<a|M|a>` and `<b|M|b>`, as a cosine needs."""
    dtype = dtype_name(dtype)
    check(a, b, metric)
    for model in (a, b):
        if not isinstance(model, Model):
            raise ModelError(
                "a plan is for two models; plan the models of a combination pair by pair"
            )
    wanted = _ALL if norms else _CROSS
    return plan_for(choose(a, b, metric), wanted, per_output, dtype)


class _Product(NamedTuple):
    """`mantissa * exp(log) * 2 ** exponent`; a cosine leaves the exponents of both models out."""

    mantissa: Any
    log: Any
    exponent: Any = 0.0


_CROSS = (Pair("A", "B"),)
_ALL = (Pair("A", "A"), Pair("A", "B"), Pair("B", "B"))
_SELF = (Pair("A", "A"),)


def _products(
    a, b, metric, norms: bool, per_output: bool, dtype: str, budget: Budget
) -> tuple[dict[str, _Product], bool]:
    """The inner products asked for, `AB` and with `norms` also `AA` and `BB`, in a common gauge."""
    check(a, b, metric)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((a, b, metric)))
    known_models = {id(m): scaled(m, per_output) for model in (a, b) for _, m in terms(model)}
    bra, ket = (_side(model, known_models) for model in (a, b))
    exponent = 0.0 if norms else bra.exponent + ket.exponent
    if len(bra.terms) == len(ket.terms) == 1:
        (c, _, one), (d, _, two) = *bra.terms, *ket.terms
        found = _run(one, two, metric, norms, per_output, dtype, traced, budget)
        factors = {"AB": c * d, "AA": c * c, "BB": d * d}
        return {
            k: _Product(factors[k] * p.mantissa, p.log, exponent) for k, p in found.items()
        }, traced
    sides = {"AB": (bra, ket), **({"AA": (bra, bra), "BB": (ket, ket)} if norms else {})}
    known: dict[tuple[int, int], _Product] = {}
    found = {}
    for name, (first, second) in sides.items():
        parts = []
        for c, x, m in first.terms:
            for d, y, n in second.terms:
                key = (id(m), id(n))
                if key not in known:
                    known[key] = known[key[::-1]] = _run(
                        m, n, metric, False, per_output, dtype, traced, budget
                    )["AB"]
                log = known[key].log + (x + y) * np.log(2)
                parts.append(_Product(c * d * known[key].mantissa, log))
        total = _sum(parts, traced, dtype, {"AA": "the first", "BB": "the second"}.get(name))
        found[name] = total._replace(exponent=exponent)
    return found, traced


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


def _sum(
    parts: list[_Product], traced: bool, dtype: str = "", model: str | None = None
) -> _Product:
    """A sum of products in the gauge of the largest. A squared norm that cancels to rounding is refused."""
    xp = jnp if traced else np
    log = parts[0].log
    for part in parts[1:]:
        log = xp.maximum(log, part.log)
    scaled = [part.mantissa * xp.exp(part.log - log) for part in parts]
    total = sum(scaled[1:], scaled[0])
    if model and not traced:
        size = sum(np.abs(x).sum() for x in scaled)
        if np.abs(total).sum() <= 1e3 * np.finfo(dtype).eps * size:
            raise ModelError(
                f"{model} model is a difference of models that are the same function to within rounding: its cosine is undefined"
            )
    return _Product(total, log)


def _run(
    a: Model,
    b: Model,
    metric,
    norms: bool,
    per_output: bool,
    dtype: str,
    traced: bool,
    budget: Budget,
) -> dict[str, _Product]:
    """Plan and execute for two plain models; logs are relative to the norms when these are computed too."""
    alone = a is b or (not traced and _same_weights(a, b))
    wanted = _SELF if alone else _ALL if norms else _CROSS
    family = choose(a, None if alone else b, metric)
    found = affordable(family, wanted, per_output, dtype, budget)
    nodes = family.nodes
    if traced:
        dtype = jnp.result_type(
            *(x.dtype for x in jax.tree.leaves((a, b)) if hasattr(x, "dtype") and x.ndim)
        )
    models = {"A": a} if alone else {"A": a, "B": b}
    models = {side: family.prepare(model) for side, model in models.items()}
    known = model_weights(family, models)
    known = {name: array for name, array in known.items() if name in found.shapes}
    if not traced:  # laid out once, whatever the number of runs
        with execution.precision():
            known = execution.placed(known, dtype)
    runs = []
    for t in nodes.points if nodes else (None,):
        read = known | family.inputs(found.shapes, metric, a.d_in, t)
        runs.append(_execute(found, {name: read[name] for name in found.shapes}, dtype, traced))
    if nodes is None:
        return _relative(found, runs[0], alone, norms, per_output and family.lifted)
    parts = [_relative(found, run, alone, norms, per_output and family.lifted) for run in runs]
    return {
        name: _sum(
            [
                _Product(w * part[name].mantissa, part[name].log)
                for w, part in zip(nodes.weights, parts, strict=True)
            ],
            traced,
        )
        for name in parts[0]
    }


def _execute(found: Plan, known: dict[str, Any], dtype: str, traced: bool) -> execution.Result:
    """One run of a plan on arrays by name, in `dtype`."""
    if traced:
        known = {k: jnp.asarray(x, dtype) for k, x in known.items()}
        return execution.run(found, known, "traced")
    with execution.precision():
        result = execution.run(found, execution.placed(known, dtype))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(result))


def _relative(
    found: Plan, result: execution.Result, alone: bool, norms: bool, drop_constant: bool
) -> dict[str, _Product]:
    """Products of one run, in the gauge in which the two models' own scales are left out when norms are there too."""
    values = {k: v[1:] if drop_constant else v for k, v in result.values.items()}
    scales = {name: dict(groups) for name, groups in found.scales.items()}
    if alone:
        product = _Product(values["AA"], execution.log_of(result, scales["AA"]))
        return {"AB": product, "AA": product, "BB": product}
    if not norms:
        return {"AB": _Product(values["AB"], execution.log_of(result, scales["AB"]))}
    gauge = {g for s in scales.values() for g in s} - set(scales)
    shared = {g: (scales["AA"].get(g, 0) + scales["BB"].get(g, 0)) / 2 for g in gauge}
    for g in gauge:  # <A|B> carries half of what each norm carries, so these cancel in a cosine
        assert shared[g] == scales["AB"].get(g, 0), g
    return {
        name: _Product(values[name], execution.log_of(result, {name: scales[name].get(name, 0)}))
        for name in scales
    }


def _same_weights(a: Model, b: Model) -> bool:
    """Equal layer by layer: a re-saved checkpoint then has similarity 1 to the last bit, at any depth."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _cosine(products: dict[str, _Product], traced: bool) -> Any:
    """AB / sqrt(AA BB), elementwise. Raises `ModelError` where a norm vanishes, unless traced (there it is NaN)."""
    xp = jnp if traced else np
    if not traced:
        for name, which in (("AA", "first"), ("BB", "second")):
            zero = np.flatnonzero(products[name].mantissa <= 0)
            if zero.size:
                where = (
                    ""
                    if products[name].mantissa.ndim == 0
                    else f" in output {', '.join(map(str, zero[:8]))}"
                )
                raise ModelError(
                    f"the {which} model is the zero function{where}: its cosine with anything is undefined"
                )
    with np.errstate(invalid="ignore"):  # what is no number is refused by _finish
        log = products["AB"].log - (products["AA"].log + products["BB"].log) / 2
        value = (
            products["AB"].mantissa
            / xp.sqrt(products["AA"].mantissa)
            / xp.sqrt(products["BB"].mantissa)
            * xp.exp(log)
        )
    if traced:
        return value
    return np.clip(
        value, -1.0, 1.0
    )  # Cauchy-Schwarz; what rounding does is reported by warn_of_rounding


def _finish(value: Any, metric: Metric, models: tuple, traced: bool, dtype: str) -> Any:
    """Attach the metric's name and guarantee; a NaN is an error, never a result."""
    if traced:
        return value
    if np.isnan(value).any():
        raise TnsimError(
            f"the {metric.name} computation gave NaN for finite weights: a float range was exceeded within a layer"
        )
    warn_of_rounding(max(m.degree for model in models for _, m in terms(model)), dtype)
    nonlinear = max(
        sum(order > 1 for order in m.orders) for model in models for _, m in terms(model)
    )
    exact = metrics.is_exact(metric, nonlinear)
    return (
        Number(value, metric.name, exact)
        if np.ndim(value) == 0
        else Numbers(value, metric.name, exact)
    )


def warn_of_rounding(degree: int, dtype: str) -> None:
    """Each layer squares what it is given, so a relative error doubles: about degree * eps in the end."""
    error = degree * float(np.finfo(dtype).eps)
    if error > _ROUNDING_SHOWN:
        warnings.warn(
            f"polynomials of degree {degree:.3g} in {dtype}: rounding alone may change the result by {min(error, 2.0):.1g}"
            + ("; use dtype='float64'" if dtype == "float32" else ""),
            PrecisionWarning,
            stacklevel=4,
        )
