"""Standard errors of what was sampled. In: sums over groups of draws. Out: errors.

A jackknife: with theta_g the value that all draws but those of group g give, and G groups,

    error^2 = (G - 1) / G sum_g (theta_g - mean of all theta)^2.

It needs no formula for the variance of a quotient such as a cosine.

Source:
    Tukey 1958, "Bias and confidence in not-quite large samples".

[merged from compare/numbers]
Numbers that know where they come from.

In: values, a metric's name, its guarantee. Out: NumPy float64.

Outside a JAX trace the verbs return these: they behave as `numpy.float64` and `numpy.ndarray` and
carry `metric`, `exact` and `caveats`. Arithmetic on them gives plain NumPy numbers again.

[merged from compare/answers]
What a verb says of the products it asked for. In: inner products. Out: numbers with labels.

Outside a JAX trace a number knows its metric, whether that is exact, the standard error of what was
sampled, and what sets the models apart from the networks they were read from; what rounding leaves
of it is said in a warning or an error. Inside a trace the arrays are handed out as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from tnsim.compare.request import Comparable, InnerProducts, Request, parts
from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.engine.scaled import LogScaled, log_abs, over_outputs
from tnsim.errors import TnsimError
from tnsim.metrics.protocol import Metric
from tnsim.models.model import AnyModel, Model, caveats, guesses, terms
from tnsim.models.origin import warn_of_caveats
from tnsim.models.scaling import beyond_float, power
from tnsim.problems.forward import Sums, total
from tnsim.problems.tensors.kinds import kinds, nonlinear
from tnsim.tables import html_table


def cosine_error(sums: Sums) -> Float[np.ndarray, "rows columns *out"] | None:
    """Of the cosines of all pairs; None where one group of points has all the weight."""
    counted = sums.shares > 0
    if np.count_nonzero(counted) < 2:
        return None
    products, log = _without_each(sums.products, counted)
    rows, row_log = _without_each(sums.rows, counted)
    columns, column_log = _without_each(sums.columns, counted)
    # The largest scale of a product need not be that of both norms: they may be of other groups.
    log_ratio = log - (row_log[:, None] + column_log[None, :]) / 2
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = over_outputs(np.exp(log_ratio), products[0])
        norms = np.sqrt(rows[:, :, None] * columns[:, None, :])
        return _error(ratio * products / norms)


def inner_error(sums: Sums) -> Float[np.ndarray, "rows columns"] | None:
    """Of inner products, as a share of the largest mantissa of `forward.total`."""
    counted = sums.shares > 0
    if np.count_nonzero(counted) < 2:
        return None
    # Without a group the weights add up to less than 1: an inner product is a mean over the rest.
    left = sums.shares.sum() - sums.shares[counted]
    products, _ = _without_each(sums.products, counted)
    return _error(products / left[:, None, None])


def _without_each(
    value: LogScaled, counted: Bool[np.ndarray, " groups"]
) -> tuple[Float[np.ndarray, "groups *pairs"], Float[np.ndarray, " *pairs"]]:
    """Sums without one of some groups each, and their scale, that of `forward.total`."""
    log = np.asarray(total(value).log)
    # A scale beyond that of the sum is one of zeros.
    factors = np.exp(np.minimum(value.log - log, 0.0))
    scaled = value.mantissa * over_outputs(factors, value.mantissa)
    return scaled.sum(axis=0) - scaled[counted], log


def _error(left_out: np.ndarray) -> np.ndarray:
    """The standard error of a value from its values without each of several groups.

    Infinite where the value is not defined without one of them.
    """
    groups = len(left_out)
    with np.errstate(invalid="ignore"):
        spread = ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0)
    return np.sqrt((groups - 1) / groups * np.nan_to_num(spread, nan=np.inf))


class Number(np.float64):
    """A float64 with `.metric` (name) and `.exact` (its definition is met exactly).

    Where forward passes were run, `.route` says at which points, and `.standard_error` is that of
    the number as an estimate for the distribution that they are drawn from; else both are None.
    `.caveats` say what makes the models other functions than the networks they were read from.

    Example:
        >>> Number(0.5, "Gaussian", True)
        Number(0.5, metric='Gaussian', exact=True)
    """

    metric: str
    exact: bool
    route: str | None
    standard_error: np.float64 | None
    caveats: tuple[str, ...]

    def __new__(
        cls,
        value: Any,
        metric: str,
        exact: bool,
        route: str | None = None,
        standard_error: Any = None,
        caveats: tuple[str, ...] = (),
    ) -> Number:
        self = super().__new__(cls, value)
        self.metric, self.exact, self.caveats = metric, exact, caveats
        self.route, self.standard_error = route, standard_error
        return self

    def __repr__(self) -> str:
        return f"Number({float(self)!r}, {_facts(self)})"

    def _repr_html_(self) -> str:
        rows = [("metric", self.metric), ("exact", self.exact)]
        if self.route is not None:
            rows += [("route", self.route), ("standard error", self.standard_error)]
        rows += [("caveat", caveat) for caveat in self.caveats]
        return html_table(str(self), rows)


class Numbers(np.ndarray):
    """A float64 array with `.metric`, `.exact`, `.route`, `.caveats`; views and slices keep them.

    `.standard_error`, where there is one, is an array of the shape of the whole.

    Example:
        >>> Numbers([0.5, 1.0], "Gaussian", True)[:1]
        Numbers([0.5], metric='Gaussian', exact=True)
    """

    metric: str | None
    exact: bool | None
    route: str | None
    standard_error: np.ndarray | None
    caveats: tuple[str, ...]

    def __new__(
        cls,
        values: Any,
        metric: str,
        exact: bool,
        route: str | None = None,
        standard_error: Any = None,
        caveats: tuple[str, ...] = (),
    ) -> Numbers:
        self = np.array(values, dtype=np.float64).view(cls)
        self.metric, self.exact, self.caveats = metric, exact, caveats
        self.route, self.standard_error = route, standard_error
        return self

    def __array_finalize__(self, source: Any) -> None:
        for name in ("metric", "exact", "route", "standard_error"):
            setattr(self, name, getattr(source, name, None))
        self.caveats = getattr(source, "caveats", ())

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """What arithmetic gives is another number, of which none of this is known."""
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __repr__(self) -> str:
        values = np.array2string(np.asarray(self), separator=", ", prefix="Numbers(")
        return f"Numbers({values}, {_facts(self)})"


class SignedLog(NamedTuple):
    """`sign * exp(log)`; a zero has sign 0 and log -inf. Inside a trace both are arrays.

    Example:
        >>> sign, log = (Number(x, "Gaussian", True) for x in (1.0, 2.0))
        >>> SignedLog(sign, log).log
        Number(2.0, metric='Gaussian', exact=True)
    """

    sign: Number
    log: Number


def _facts(number: Number | Numbers) -> str:
    """What a number knows of itself, as its constructor takes it."""
    facts = f"metric={number.metric!r}, exact={number.exact}"
    if number.route is not None:
        facts += f", route={number.route!r}"
    if number.standard_error is not None:
        error = np.array2string(np.asarray(number.standard_error), precision=3, separator=", ")
        facts += f", standard_error={error}"
    return facts


Two: TypeAlias = tuple[Comparable, Comparable]


def cosine(products: InnerProducts, models: Two, request: Request) -> Any:
    """AB / sqrt(AA BB), elementwise.

    Args:
        products: AB, AA and BB.
        models: What was compared.
        request: What was asked of them.

    Returns:
        A `Number`, or `Numbers` where outputs are told apart; inside a trace an array.

    Raises:
        ModelError: Where a norm vanishes, unless traced (there it is NaN).
    """
    arithmetic = Arithmetic(_degree(models), request.dtype)
    values = products.values
    if not products.traced:
        for product in values.values():
            _check_number(product.mantissa, request.metric)
        for name, model, which in zip(("AA", "BB"), models, ("first", "second"), strict=True):
            several = len(parts(model)) > 1
            precision.check_norm(values[name], f"the {which} model", several, arithmetic)
    cosines = precision.cosine(values["AB"], values["AA"], values["BB"], arithmetic)
    if products.traced:
        return cosines.value
    clipped = precision.clipped(cosines)
    precision.report(float(cosines.error.max()), "the cosine", arithmetic, stacklevel=3)
    warn_of_caveats(_caveats(models), stacklevel=3)
    error = _standard_error(products, cosine_error)
    return _labelled(clipped, request.metric, models, products, error)


def value(products: InnerProducts, models: Two, request: Request) -> Any:
    """The inner product AB as a float.

    Args:
        products: AB, and the norms where they were asked for.
        models: What was compared.
        request: What was asked of them.

    Returns:
        A `Number`; inside a trace an array.

    Raises:
        TnsimError: Where it is beyond float64.
    """
    product, exponent = products.values["AB"], products.exponent
    number = power(product.mantissa, product.log, exponent)
    if products.traced:
        return number
    if beyond_float(number, product.mantissa):
        log = product.log + exponent * np.log(2)
        raise TnsimError(
            f"the inner product is about exp({log:.6g}), beyond float64; use log_inner"
        )
    _report(products.values, models, request)
    error = _standard_error(products, inner_error)
    if error is not None:
        error = power(error, product.log, exponent)
    return _labelled(number, request.metric, models, products, error)


def logarithm(products: InnerProducts, models: Two, request: Request) -> SignedLog:
    """Sign and logarithm of the inner product AB.

    Args:
        products: AB, and the norms where they were asked for.
        models: What was compared.
        request: What was asked of them.

    Returns:
        Two of `Number`; inside a trace two arrays. A standard error is that of the logarithm.
    """
    product, exponent = products.values["AB"], products.exponent
    log = log_abs(product) + exponent * np.log(2)
    if products.traced:
        sign: Any = jnp.sign(product.mantissa)
        return SignedLog(sign, log)
    _report(products.values, models, request)
    error = None
    if product.mantissa != 0:
        error = _standard_error(products, inner_error)
    if error is not None:
        error = error / abs(product.mantissa)  # d log|x| = dx / |x|
    sign = _labelled(np.sign(product.mantissa), request.metric, models, products)
    return SignedLog(sign, _labelled(log, request.metric, models, products, error))


def _report(products: dict[str, LogScaled], models: Two, request: Request) -> None:
    """Say what rounding leaves of an inner product, seen beside the two norms.

    Warnings point four frames up: past this function, its caller here and the verb.
    """
    product = products["AB"]
    _check_number(product.mantissa, request.metric)
    warn_of_caveats(_caveats(models), stacklevel=4)
    arithmetic = Arithmetic(_degree(models), request.dtype)
    if product.mantissa == 0:
        return
    if "AA" not in products:
        error = float(arithmetic.rounding * product.size / abs(product.mantissa))
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            cosines = precision.cosine(product, products["AA"], products["BB"], arithmetic)
        error = float(np.nan_to_num(cosines.error, nan=np.inf))
    precision.report(error, "the inner product", arithmetic, stacklevel=4)


def _standard_error(products: InnerProducts, error_of: Callable[[Any], Any]) -> Any:
    """That of the only pair of a forward pass; None where nothing was sampled."""
    if products.sums is None:
        return None
    errors = error_of(products.sums)
    return None if errors is None else errors[0, 0]


def _degree(models: Two) -> int:
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
    values: Any, metric: Metric, models: Two, products: InnerProducts, error: Any = None
) -> Any:
    """Values that know the metric's name, its guarantee and, of forward passes, route and error."""
    number = Number if np.ndim(values) == 0 else Numbers
    known = not guesses(*_read(models))
    if products.forward is not None:
        ran = products.forward
        return number(values, metric.name, ran.exact and known, ran.route, error, _caveats(models))
    layers = [kinds(part) for model in models for _, part in terms(model)]
    exact = known and bool(metric.is_exact(nonlinear(*layers)))
    return number(values, metric.name, exact, caveats=_caveats(models))


def _read(models: Two) -> list[Any]:
    """Models that were built or read, without plain functions."""
    return [model for model in models if isinstance(model, AnyModel)]


def _caveats(models: Two) -> tuple[str, ...]:
    return caveats(*_read(models))
