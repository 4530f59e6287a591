"""The verbs: similarity, slices, inner, log_inner, plan. In: models and a metric. Out: numbers.

Models are aligned and planned by shape (once per structure and process), their arrays are lifted
where a bias or a skip needs it, and the plan is run. Outside a JAX trace everything runs in a
scoped 64-bit, full-precision setting and returns NumPy float64; inside one, in the dtype of the
weights given, and what comes back is a JAX array.
"""

from __future__ import annotations

import itertools
from functools import reduce
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import DTypeLike

from tnsim.compare.numbers import Number, Numbers, SignedLog
from tnsim.compare.planned import AnyModel, Budget, affordable, check, plan_for
from tnsim.engine import execution, precision
from tnsim.engine.log_scaled import LogScaled, add, contribution, log_abs, times
from tnsim.engine.plan import Plan, dtype_name
from tnsim.engine.precision import Arithmetic, lost_half
from tnsim.errors import ModelError, TnsimError
from tnsim.folding import features
from tnsim.folding.base import model_weights
from tnsim.folding.choose import choose
from tnsim.metrics.metric import Gaussian, Metric
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.models.scaling import Scaled, beyond_float, larger, power, scaled, split
from tnsim.names import Pair, Side


def similarity(
    a: AnyModel,
    b: AnyModel,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Number:
    """Cosine over all outputs: `<a|M|b> / sqrt(<a|M|a> <b|M|b>)`.

    Args:
        a, b: Models, or combinations such as `b - c`.
        metric: How inputs are weighed.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: What the computation may take.

    Returns:
        A float64 in [-1, 1], without a unit; inside a JAX trace a scalar array.

    Raises:
        ModelError: The models cannot be compared, or one of them is the zero function.
        TooLarge: The computation would exceed the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 0.0]]))])
        >>> round(float(tnsim.similarity(a, b)), 6)
        0.707107

    Source:
        Paper, equation 2.
    """
    dtype = dtype_name(dtype)
    products, _, traced = _products(a, b, metric, True, False, dtype, budget)
    return _cosine(products, metric, (a, b), traced, dtype)


def slices(
    a: AnyModel,
    b: AnyModel,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Numbers:
    """Cosine of every output coordinate on its own.

    Args:
        a, b: Models, or combinations such as `b - c`.
        metric: How inputs are weighed.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: What the computation may take.

    Returns:
        Float64 of shape (d_out,), each in [-1, 1], without a unit.

    Raises:
        ModelError: As `similarity`; also where one output of a model is the zero function.
        TooLarge: The computation would exceed the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, -2.0]]))])
        >>> np.asarray(tnsim.slices(a, b)).round(6).tolist()
        [1.0, -1.0]

    Source:
        Paper, section 2.4.
    """
    dtype = dtype_name(dtype)
    products, _, traced = _products(a, b, metric, True, True, dtype, budget)
    return _cosine(products, metric, (a, b), traced, dtype)


def inner(
    a: AnyModel,
    b: AnyModel,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Number:
    """Inner product `<a|M|b>`; under `Gaussian` that is `E <a(x), b(x)>`.

    Args:
        a, b: Models, or combinations such as `b - c`.
        metric: How inputs are weighed.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: What the computation may take.

    Returns:
        A float64, in units of squared outputs; inside a JAX trace a scalar array.

    Raises:
        ModelError: The models cannot be compared.
        TooLarge: The computation would exceed the budget.
        TnsimError: The value is too large or too small for float64; use `log_inner`.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 0.0]]))])
        >>> round(float(tnsim.inner(a, b)), 6)
        1.0

    Source:
        Paper, section 2.
    """
    dtype = dtype_name(dtype)
    products, exponent, traced = _products(a, b, metric, False, False, dtype, budget)
    product = products["AB"]
    value = power(product.mantissa, product.log, exponent)
    if traced:
        return value
    if beyond_float(value, product.mantissa):
        log = product.log + exponent * np.log(2)
        raise TnsimError(
            f"the inner product is about exp({log:.6g}), beyond float64; use log_inner"
        )
    _report_inner(products, metric, (a, b), dtype)
    return cast(Number, _labelled(value, metric, (a, b)))


def log_inner(
    a: AnyModel,
    b: AnyModel,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> SignedLog:
    """Sign and logarithm of `<a|M|b>`, finite at any depth.

    Args:
        a, b: Models, or combinations such as `b - c`.
        metric: How inputs are weighed.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: What the computation may take.

    Returns:
        `SignedLog(sign, log)`, float64 scalars: the sign is -1, 0 or 1, the logarithm natural. A
        zero inner product has sign 0 and log -inf.

    Raises:
        ModelError: The models cannot be compared.
        TooLarge: The computation would exceed the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 0.0]]))])
        >>> sign, log = tnsim.log_inner(a, b)
        >>> float(sign), round(abs(float(log)), 6)
        (1.0, 0.0)

    Source:
        Paper, section 2.2: norms grow like c^(2^L) with depth L.
    """
    dtype = dtype_name(dtype)
    products, exponent, traced = _products(a, b, metric, False, False, dtype, budget)
    product = products["AB"]
    log = log_abs(product) + exponent * np.log(2)
    if traced:
        return SignedLog(jnp.sign(product.mantissa), log)
    _report_inner(products, metric, (a, b), dtype)
    sign = np.sign(product.mantissa)
    return SignedLog(_labelled(sign, metric, (a, b)), _labelled(log, metric, (a, b)))


def plan(
    a: Model,
    b: Model,
    metric: Metric = Gaussian(),
    *,
    norms: bool = False,
    per_output: bool = False,
    dtype: DTypeLike = "float64",
) -> Plan:
    """What would run for `<a|M|b>`, from shapes alone.

    Args:
        a, b: Models.
        metric: How inputs are weighed.
        norms: Also `<a|M|a>` and `<b|M|b>`, as a cosine needs.
        per_output: One inner product for every output coordinate.
        dtype: Precision of the computation, float64 or float32.

    Returns:
        A `Plan`: the order of contractions, with costs in scalar multiplications and bytes.

    Raises:
        ModelError: The models cannot be compared, or one is a combination.
        TooLarge: No plan could be carried out.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> tnsim.plan(a, a).metric
        'gaussian'
    """
    dtype = dtype_name(dtype)
    check(a, b, metric)
    for model in (a, b):
        if not isinstance(model, Model):
            raise ModelError(
                "a plan is for two models; plan the models of a combination pair by pair"
            )
    wanted = _ALL if norms else _CROSS
    return plan_for(choose(a, b, metric), wanted, per_output, dtype)


_CROSS = (Pair("A", "B"),)
_ALL = (Pair("A", "A"), Pair("A", "B"), Pair("B", "B"))
_SELF = (Pair("A", "A"),)


def _products(
    a: AnyModel,
    b: AnyModel,
    metric: Metric,
    norms: bool,
    per_output: bool,
    dtype: str,
    budget: Budget,
) -> tuple[dict[str, LogScaled], Any, bool]:
    """The inner products asked for, `AB` and with `norms` also `AA` and `BB`.

    Returned beside them are the power of two that `AB` lacks, as the norms do and cosines may, and
    whether they are traced.

    A sum of several models has its norms computed unless traced: what cancels is seen beside them.
    """
    check(a, b, metric)
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((a, b, metric)))
    first = by_differences(a, dtype)
    second = first if b is a else by_differences(b, dtype)
    one, two = terms(first), terms(second)
    parts = {id(m): scaled(m, per_output) for _, m in (*one, *two)}
    bra, ket = _side(first, parts), _side(second, parts)
    exponent = bra.exponent + ket.exponent
    if len(one) == len(two) == 1:
        (c, _, m), (d, _, n) = *bra.terms, *ket.terms
        plain = _run(m, n, metric, norms, per_output, dtype, traced, budget)
        factors = {"AB": c * d, "AA": c * c, "BB": d * d}
        products = {name: times(value, factors[name]) for name, value in plain.items()}
        return products, exponent, traced
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
            return by_vectors, 0.0, traced
    return products, exponent, traced


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
    wanted = _ALL if norms else _CROSS
    if alone:
        wanted = _SELF
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


def _cosine(
    products: dict[str, LogScaled],
    metric: Metric,
    models: tuple[AnyModel, AnyModel],
    traced: bool,
    dtype: str,
) -> Any:
    """AB / sqrt(AA BB), elementwise.

    Raises `ModelError` where a norm vanishes, unless traced (there it is NaN).
    """
    arithmetic = Arithmetic(_degree(models), dtype)
    if not traced:
        for product in products.values():
            _check_number(product.mantissa, metric)
        for name, model, which in zip(("AA", "BB"), models, ("first", "second"), strict=True):
            several = len(terms(model)) > 1
            precision.check_norm(products[name], f"the {which} model", several, arithmetic)
    cosines = precision.cosine(products["AB"], products["AA"], products["BB"], arithmetic)
    if traced:
        return cosines.value
    values = precision.clipped(cosines)
    precision.report(float(np.max(cosines.error)), "the cosine", arithmetic, stacklevel=3)
    return _labelled(values, metric, models)


def _report_inner(
    products: dict[str, LogScaled],
    metric: Metric,
    models: tuple[AnyModel, AnyModel],
    dtype: str,
) -> None:
    """Say what rounding leaves of an inner product, seen beside the two norms."""
    product = products["AB"]
    _check_number(product.mantissa, metric)
    arithmetic = Arithmetic(_degree(models), dtype)
    if "AA" not in products:
        error = arithmetic.rounding
    elif product.mantissa == 0:
        return
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            cosines = precision.cosine(product, products["AA"], products["BB"], arithmetic)
        error = float(np.nan_to_num(cosines.error, nan=np.inf))
    precision.report(error, "the inner product", arithmetic, stacklevel=3)


def _degree(models: tuple[AnyModel, AnyModel]) -> int:
    return max(m.degree for model in models for _, m in terms(model))


def _check_number(values: Any, metric: Metric) -> None:
    """A NaN is an error, never a result."""
    if np.isnan(values).any():
        raise TnsimError(
            f"the {metric.name} computation gave NaN for finite weights: "
            "a float range was exceeded within a layer"
        )


def _labelled(values: Any, metric: Metric, models: tuple[AnyModel, AnyModel]) -> Number | Numbers:
    """Values that know the metric's name and guarantee."""
    orders = [m.orders for model in models for _, m in terms(model)]
    nonlinear = max(sum(order > 1 for order in layers) for layers in orders)
    exact = metric.is_exact(nonlinear)
    number = Number if np.ndim(values) == 0 else Numbers
    return number(values, metric.name, exact)
