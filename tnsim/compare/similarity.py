"""The verbs: similarity, slices, inner, log_inner, plan. In: models and a metric. Out: numbers.

Models are aligned and planned by shape (once per structure and process), their arrays are lifted
where a bias or a skip needs it, and the plan is run. Outside a JAX trace everything runs in a
scoped 64-bit, full-precision setting and returns NumPy float64; inside one, in the dtype of the
weights given, and what comes back is a JAX array.
"""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from tnsim.compare.by_points import (
    ForwardPlan,
    cosine_error,
    forward_plan,
    inner_error,
    points_of,
)
from tnsim.compare.numbers import Number, Numbers, SignedLog
from tnsim.compare.planned import AnyModel, Comparable, check, parts, plan_for
from tnsim.compare.products import ALL, CROSS, Products, inner_products
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.dtypes import dtype_name
from tnsim.engine.log_scaled import LogScaled, log_abs
from tnsim.engine.plan import Plan
from tnsim.engine.precision import Arithmetic
from tnsim.errors import ModelError, TnsimError
from tnsim.folding.choose import choose
from tnsim.metrics.metric import Gaussian, Metric
from tnsim.models.model import Model, caveats, terms
from tnsim.models.origin import warn_of_caveats
from tnsim.models.scaling import beyond_float, power


def similarity(
    a: Comparable,
    b: Comparable,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Number:
    """Cosine over all outputs: `<a|M|b> / sqrt(<a|M|a> <b|M|b>)`.

    Args:
        a, b: Models, or combinations such as `b - c`; under `Empirical` also plain functions.
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
    products = inner_products(a, b, metric, True, False, dtype, budget)
    return _cosine(products, metric, (a, b), dtype)


def slices(
    a: Comparable,
    b: Comparable,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Numbers:
    """Cosine of every output coordinate on its own.

    Args:
        a, b: Models, or combinations such as `b - c`; under `Empirical` also plain functions.
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
    products = inner_products(a, b, metric, True, True, dtype, budget)
    return _cosine(products, metric, (a, b), dtype)


def inner(
    a: Comparable,
    b: Comparable,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Number:
    """Inner product `<a|M|b>`; under `Gaussian` that is `E <a(x), b(x)>`.

    Args:
        a, b: Models, or combinations such as `b - c`; under `Empirical` also plain functions.
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
    products = inner_products(a, b, metric, False, False, dtype, budget)
    product, exponent = products.values["AB"], products.exponent
    value = power(product.mantissa, product.log, exponent)
    if products.traced:
        return value
    if beyond_float(value, product.mantissa):
        log = product.log + exponent * np.log(2)
        raise TnsimError(
            f"the inner product is about exp({log:.6g}), beyond float64; use log_inner"
        )
    _report_inner(products.values, metric, (a, b), dtype)
    error = None
    if products.sums is not None:
        error = inner_error(products.sums)
    if error is not None:
        error = power(error[0, 0], product.log, exponent)
    return cast(Number, _labelled(value, metric, (a, b), products, error))


def log_inner(
    a: Comparable,
    b: Comparable,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> SignedLog:
    """Sign and logarithm of `<a|M|b>`, finite at any depth.

    Args:
        a, b: Models, or combinations such as `b - c`; under `Empirical` also plain functions.
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
    products = inner_products(a, b, metric, False, False, dtype, budget)
    product, exponent = products.values["AB"], products.exponent
    log = log_abs(product) + exponent * np.log(2)
    if products.traced:
        return SignedLog(jnp.sign(product.mantissa), log)
    _report_inner(products.values, metric, (a, b), dtype)
    sign = np.sign(product.mantissa)
    error = None
    if products.sums is not None and product.mantissa != 0:
        error = inner_error(products.sums)
    if error is not None:
        error = error[0, 0] / abs(product.mantissa)
    labelled = _labelled(log, metric, (a, b), products, error)
    return SignedLog(_labelled(sign, metric, (a, b), products), labelled)


def plan(
    a: Model,
    b: Model,
    metric: Metric = Gaussian(),
    *,
    norms: bool = False,
    per_output: bool = False,
    dtype: DTypeLike = "float64",
) -> Plan | ForwardPlan:
    """What would run for `<a|M|b>`, from shapes alone.

    Args:
        a, b: Models.
        metric: How inputs are weighed.
        norms: Also `<a|M|a>` and `<b|M|b>`, as a cosine needs.
        per_output: One inner product for every output coordinate.
        dtype: Precision of the computation, float64 or float32.

    Returns:
        A `Plan`: the order of contractions, with costs in scalar multiplications and bytes; or a
        `ForwardPlan` where the models are run on inputs.

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
    wanted = ALL if norms else CROSS
    points = points_of([a, b], metric, wanted, per_output, dtype)
    if points is not None:
        return forward_plan([a, b], metric, points, dtype)
    return plan_for(choose(a, b, metric), wanted, per_output, dtype)


def _cosine(
    products: Products, metric: Metric, models: tuple[Comparable, Comparable], dtype: str
) -> Any:
    """AB / sqrt(AA BB), elementwise.

    Raises `ModelError` where a norm vanishes, unless traced (there it is NaN).
    """
    arithmetic = Arithmetic(_degree(models), dtype)
    found = products.values
    if not products.traced:
        for product in found.values():
            _check_number(product.mantissa, metric)
        for name, model, which in zip(("AA", "BB"), models, ("first", "second"), strict=True):
            several = len(parts(model)) > 1
            precision.check_norm(found[name], f"the {which} model", several, arithmetic)
    cosines = precision.cosine(found["AB"], found["AA"], found["BB"], arithmetic)
    if products.traced:
        return cosines.value
    values = precision.clipped(cosines)
    precision.report(float(np.max(cosines.error)), "the cosine", arithmetic, stacklevel=3)
    warn_of_caveats(_caveats(models), stacklevel=3)
    error = None
    if products.sums is not None:
        error = cosine_error(products.sums)
    if error is not None:
        error = error[0, 0]
    return _labelled(values, metric, models, products, error)


def _report_inner(
    products: dict[str, LogScaled],
    metric: Metric,
    models: tuple[Comparable, Comparable],
    dtype: str,
) -> None:
    """Say what rounding leaves of an inner product, seen beside the two norms."""
    product = products["AB"]
    _check_number(product.mantissa, metric)
    warn_of_caveats(_caveats(models), stacklevel=3)
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


def _degree(models: tuple[Comparable, Comparable]) -> int:
    """That of the polynomial of higher degree; of plain functions none is known."""
    degrees = [1]
    for model in models:
        degrees += [part.degree for _, part in parts(model) if isinstance(part, Model)]
    return max(degrees)


def _check_number(values: Any, metric: Metric) -> None:
    """A NaN is an error, never a result."""
    if np.isnan(values).any():
        raise TnsimError(
            f"the {metric.name} computation gave NaN for finite weights: "
            "a float range was exceeded within a layer"
        )


def _labelled(
    values: Any,
    metric: Metric,
    models: tuple[Comparable, Comparable],
    products: Products,
    error: Any = None,
) -> Number | Numbers:
    """Values that know the metric's name, its guarantee and, of forward passes, route and error."""
    number = Number if np.ndim(values) == 0 else Numbers
    if products.forward is not None:
        ran = products.forward
        return number(values, metric.name, ran.exact, ran.route, error, _caveats(models))
    orders = [m.orders for model in models for _, m in terms(model)]
    nonlinear = max(sum(order > 1 for order in layers) for layers in orders)
    exact = metric.is_exact(nonlinear)
    return number(values, metric.name, exact, caveats=_caveats(models))


def _caveats(models: tuple[Comparable, Comparable]) -> tuple[str, ...]:
    return caveats(*(model for model in models if isinstance(model, AnyModel)))
