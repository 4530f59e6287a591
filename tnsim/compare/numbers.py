"""Numbers that carry their metric, guarantee and error; the answers of the verbs.

**Standard errors** of sampled values come from a jackknife. With G groups of draws, and theta_g the
value from the draws of all groups but g,

    error^2 = (G - 1) / G sum_g (theta_g - mean of all theta)^2.

A jackknife needs no formula for the variance of a quotient such as a cosine.

**Labels.** Outside a JAX trace the verbs return a `Number` or `Numbers`, which behave as
`numpy.float64` and `numpy.ndarray`. They carry the metric, whether its definition is met exactly,
the standard error of a sampled value, and the differences between the models and the networks they
were read from, also in copies and pickles. Arithmetic on them gives plain NumPy numbers again.

**Answers.** `cosine`, `value` and `logarithm` turn inner products into labelled numbers. Rounding
that leaves few digits causes a warning, and rounding that leaves none an error. Inside a trace the
answers are plain arrays.

Source:
    Tukey 1958, "Bias and confidence in not-quite large samples".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from tnsim.compare.request import InnerProducts, Request, Two, highest_degree, is_exact, summands
from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.errors import TnsimError
from tnsim.metrics.protocol import Metric
from tnsim.models.model import AnyModel, caveats, terms, warn_of_caveats
from tnsim.problems.at_points import Sums, over_groups
from tnsim.scaled import LOG_2, Scaled, ScaledSum, beyond_float, log_abs, over_outputs, power
from tnsim.tables import html_table


def cosine_error(sums: Sums) -> Float[np.ndarray, "rows columns *out"] | None:
    """Standard errors of the cosines of all pairs; None where a single group has all the weight."""
    counted = sums.shares > 0
    if np.count_nonzero(counted) < 2:
        return None
    products, scale = without_each(sums.products, counted)
    rows, row_scale = without_each(sums.rows, counted)
    columns, column_scale = without_each(sums.columns, counted)
    # Each sum is in the largest scale of its groups; products and norms may have it from others.
    exponent = scale - (row_scale[:, None] + column_scale[None, :]) / 2
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = over_outputs(np.exp2(exponent), products[0])
        norms = np.sqrt(rows[:, :, None] * columns[:, None, :])
        return jackknife_error(ratio * products / norms)


def inner_error(sums: Sums) -> Float[np.ndarray, "rows columns"] | None:
    """Standard errors of inner products, in the scale of `over_groups`.

    None where a single group of points has all the weight.
    """
    counted = sums.shares > 0
    if np.count_nonzero(counted) < 2:
        return None
    # Without a group the weights add up to less than 1; a division makes the rest a mean.
    left = sums.shares.sum() - sums.shares[counted]
    products, _ = without_each(sums.products, counted)
    return jackknife_error(products / left[:, None, None])


def without_each(
    value: ScaledSum, counted: Bool[np.ndarray, " groups"]
) -> Scaled[Float[np.ndarray, "groups *pairs"]]:
    """Sums over all other groups, for every counted group, in the scale of `over_groups`."""
    exponent = np.asarray(over_groups(value).exponent)
    # Only a group of zeros may have a larger scale than the sum.
    factors = np.exp2(np.minimum(value.exponent - exponent, 0.0))
    groups = value.mantissa * over_outputs(factors, value.mantissa)
    return Scaled(groups.sum(axis=0) - groups[counted], exponent)


def jackknife_error(left_out: Float[np.ndarray, "groups *out"]) -> Float[np.ndarray, "*out"]:
    """The standard error of a value, by the jackknife.

    Args:
        left_out: Values without each of several groups of draws; NaN where one is undefined.

    Returns:
        The errors, infinite where the value without some group is undefined.

    Example:
        >>> jackknife_error(np.array([[1.0, 2.0], [3.0, np.nan]])).tolist()
        [1.0, inf]
    """
    groups = len(left_out)
    with np.errstate(invalid="ignore"):
        # (G - 1) / G sum_g (theta_g - mean)^2; a value that is undefined without some group has no
        # finite error.
        spread = ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0)
    return np.sqrt((groups - 1) / groups * np.nan_to_num(spread, nan=np.inf))


class Number(np.float64):
    """A float64 that carries its metric, guarantee and error.

    Attributes:
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        route: Name of the route, see `Estimate.route`; None where none is known.
        standard_error: Standard error of the number as an estimate for the distribution that the
            points are drawn from; None where nothing was sampled.
        caveats: Differences between the models and the networks they were read from.
        inputs: Number of inputs on which the models ran; None where the weights were compared.
        mean_share: Share of the squared norm that both models have in their means over the inputs,
            the smaller of the two; None where it is not known.

    A number that was sampled is printed with its standard error and its inputs, and any number with
    the share of the means where this is more than a half: it says little beyond the means.

    Example:
        >>> Number(0.5, "gaussian", True)
        Number(0.5, metric='gaussian', exact=True)
        >>> print(Number(0.92503, "gaussian", False, "sampling", 0.0003, inputs=16384))
        0.9250 ± 0.0003 (estimate, 16,384 normal inputs)
        >>> print(Number(0.92503, "empirical", True, "data", 0.009, inputs=1000))
        0.925 ± 0.009 (on 1,000 inputs)
        >>> str(Number(0.993, "empirical", True, "data", 0.001, (), 500, 0.98)).split("; ")[1]
        '98 % of the squared norm is the mean: centred=True compares without it)'
    """

    metric: str
    exact: bool
    route: str | None
    standard_error: np.float64 | None
    caveats: tuple[str, ...]
    inputs: int | None
    mean_share: float | None

    def __new__(
        cls,
        value: Any,
        metric: str,
        exact: bool,
        route: str | None = None,
        standard_error: Any = None,
        caveats: tuple[str, ...] = (),
        inputs: int | None = None,
        mean_share: float | None = None,
    ) -> Number:
        self = super().__new__(cls, value)
        self.metric, self.exact, self.caveats = metric, exact, caveats
        self.route, self.standard_error, self.inputs = route, standard_error, inputs
        self.mean_share = mean_share
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # NumPy's own scalars are pickled, and sent between processes, as their value alone.
        facts = self.metric, self.exact, self.route, self.standard_error, self.caveats
        return type(self), (float(self), *facts, self.inputs, self.mean_share)

    def __copy__(self) -> Number:
        return self  # a scalar, which nothing changes

    def __deepcopy__(self, memo: Any) -> Number:
        return self

    def __repr__(self) -> str:
        return f"Number({float(self)!r}, {_number_facts(self)})"

    def __str__(self) -> str:
        advice = f"{self._of_means}: centred=True compares without it" if self._of_means else ""
        if self.inputs is None or self.standard_error is None:
            return f"{float(self)!r} ({advice})" if advice else repr(float(self))
        said = f"{_with_error(float(self), float(self.standard_error))} ("
        kind = "normal " if self.metric == "gaussian" else ""
        said += "on " if self.exact else "estimate, "
        return f"{said}{self.inputs:,} {kind}inputs{'; ' if advice else ''}{advice})"

    def __format__(self, spec: str) -> str:
        # Without a specification Python's own numbers are what `str` says; NumPy's drop the error.
        return super().__format__(spec) if spec else str(self)

    @property
    def _of_means(self) -> str:
        """How much of the similarity is due to means, where it is more than half."""
        share = self.mean_share or 0.0
        return f"{100 * share:.0f} % of the squared norm is the mean" if share > 0.5 else ""

    def _repr_html_(self) -> str:
        share = None if self.mean_share is None else f"{self.mean_share:.3g}"
        rows = [
            ("metric", self.metric),
            ("exact", self.exact),
            ("route", self.route),
            ("standard error", self.standard_error),
            *(("caveat", caveat) for caveat in self.caveats),
            ("inputs", self.inputs),
            ("share of the mean", share),
        ]
        return html_table(repr(float(self)), [row for row in rows if row[1] is not None])


def _with_error(value: float, error: float) -> str:
    """A value to the last digit that its error leaves, with the error.

    Example:
        >>> [_with_error(0.92503, error) for error in (3.2e-4, 0.0, math.inf)]
        ['0.9250 ± 0.0003', '0.92503 ± 0', '0.92503 ± inf']
    """
    decimals = -math.floor(math.log10(error)) if 0 < error < math.inf else -1
    # Large values, and errors of rounding, are shorter in floating-point notation.
    if not 0 <= decimals <= 12 or abs(value) >= 1e6:
        return f"{value:.12g} ± {error:.1g}"
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


class Numbers(np.ndarray):
    """A float64 array with the attributes of a `Number`, which views and slices keep.

    `.standard_error`, if any, has the shape of the whole array, also in a slice.

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

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments, state = super().__reduce__()
        return make, arguments, (state, vars(self))

    def __setstate__(self, state: Any, /) -> None:
        array, facts = state
        super().__setstate__(array)
        vars(self).update(facts)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """The plain array: the attributes do not hold for the result of arithmetic."""
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __repr__(self) -> str:
        values = np.array2string(np.asarray(self), separator=", ", prefix="Numbers(")
        return f"Numbers({values}, {_number_facts(self)})"


class SignedLog(NamedTuple):
    """A number `sign * exp(log)`; a zero has sign 0 and log -inf.

    Inside a trace sign and logarithm are arrays.

    Attributes:
        sign: Sign of the number: -1, 0 or 1.
        log: Natural logarithm of the absolute value.

    Example:
        >>> sign, log = (Number(x, "Gaussian", True) for x in (1.0, 2.0))
        >>> SignedLog(sign, log).log
        Number(2.0, metric='Gaussian', exact=True)
    """

    sign: Number
    log: Number


def _number_facts(number: Number | Numbers) -> str:
    """The attributes of a number, written as arguments of its constructor."""
    facts = f"metric={number.metric!r}, exact={number.exact}"
    if number.route is not None:
        facts += f", route={number.route!r}"
    if number.standard_error is not None:
        error = np.array2string(
            np.asarray(number.standard_error),
            separator=", ",
            formatter={"float_kind": "{:.3g}".format},
        )
        facts += f", standard_error={error}"
    if isinstance(number, Number) and number._of_means:
        facts += f", mean_share={number.mean_share:.3g}"
    return facts


def cosine(products: InnerProducts, models: Two, request: Request) -> Any:
    """The cosine `AB / sqrt(AA BB)`, elementwise.

    Args:
        products: Inner products AB, AA and BB.
        models: Models that were compared.
        request: Metric, precision, budget, and the products that are wanted.

    Returns:
        A `Number`, or `Numbers` where outputs are told apart; inside a trace an array, NaN where a
        norm vanishes or no digit is left.

    Raises:
        ModelError: A norm vanishes, outside a trace.
    """
    arithmetic = _arithmetic(models, products.dtype)
    values = products.values
    if not products.traced:
        for product in values.values():
            precision.check_finite([product.mantissa], request.metric.name, products.dtype)
        for name, model, which in zip(("AA", "BB"), models, ("first", "second"), strict=True):
            several = len(summands(model)) > 1
            norm, subject = values[name], f"the {which} model"
            precision.check_norm(norm, subject, several, arithmetic, request.centred)
    if products.traced:  # the dtype of a trace is that of the weights
        arithmetic = arithmetic._replace(dtype=str(values["AB"].mantissa.dtype))
    cosines = precision.cosine(values["AB"], values["AA"], values["BB"], arithmetic)
    if products.traced:
        values_known = precision.known(cosines, (values["AA"], values["BB"]), arithmetic)
        return values_known.astype(arithmetic.dtype)
    # Within its error bound a value beyond 1 is rounding; further out it is refused, never clipped.
    clipped = precision.clipped(cosines, arithmetic.dtype)
    precision.report(float(cosines.error.max()), "the cosine", arithmetic)
    warn_of_caveats(_model_caveats(models))
    error = _standard_error(products, cosine_error)
    return _labelled_values(clipped, request.metric, models, products, error)


def value(products: InnerProducts, models: Two, request: Request) -> Any:
    """The inner product AB as a float.

    Args:
        products: Inner product AB, and the norms where they are known.
        models: Models that were compared.
        request: Metric, precision, budget, and the products that are wanted.

    Returns:
        A `Number`; inside a trace an array, NaN where the product of two models has no digit left
        or no error bound.

    Raises:
        TnsimError: The inner product is beyond float64.
    """
    product = products.values["AB"]
    exponent = product.exponent + products.exponent
    number = power(product.mantissa, exponent)
    if products.traced:
        return precision.bounded(number, product.size)
    if beyond_float(number, product.mantissa):
        raise TnsimError(
            f"the inner product is about exp({exponent * LOG_2:.6g}), beyond float64; use log_inner"
        )
    _report_rounding(products, models, request)
    error = _standard_error(products, inner_error)
    if error is not None:
        error = power(error, exponent)
    return _labelled_values(number, request.metric, models, products, error)


def logarithm(products: InnerProducts, models: Two, request: Request) -> SignedLog:
    """The sign and logarithm of the inner product AB.

    Args:
        products: Inner product AB, and the norms where they are known.
        models: Models that were compared.
        request: Metric, precision, budget, and the products that are wanted.

    Returns:
        A `Number` each for sign and logarithm, which has the standard error; inside a trace arrays,
        NaN where the product of two models has no digit left or no error bound.
    """
    product = products.values["AB"]
    log: Any = log_abs(product._replace(exponent=product.exponent + products.exponent))
    if products.traced:
        sign: Any = jnp.sign(product.mantissa)
        return SignedLog(*(precision.bounded(x, product.size) for x in (sign, log)))
    _report_rounding(products, models, request)
    error = None
    if product.mantissa != 0:
        error = _standard_error(products, inner_error)
    if error is not None:
        error = error / abs(product.mantissa)  # d log|x| = dx / |x|
    sign = _labelled_values(np.sign(product.mantissa), request.metric, models, products)
    return SignedLog(sign, _labelled_values(log, request.metric, models, products, error))


def _arithmetic(models: Two, dtype: str) -> Arithmetic:
    return Arithmetic(highest_degree(models), dtype, any(len(summands(x)) > 1 for x in models))


def _report_rounding(products: InnerProducts, models: Two, request: Request) -> None:
    """Warn of, or refuse, the rounding error of an inner product, relative to the two norms."""
    values = products.values
    product = values["AB"]
    precision.check_finite([product.mantissa], request.metric.name, products.dtype)
    warn_of_caveats(_model_caveats(models))
    arithmetic = _arithmetic(models, products.dtype)
    if product.mantissa == 0:
        precision.check_terms(product.size, products.dtype)
        return
    if "AA" not in values:
        # Relative to the product itself, as no norm is known: |error| <= u size.
        error = float(arithmetic.rounding * product.size / abs(product.mantissa))
    else:
        cosines = precision.cosine(product, values["AA"], values["BB"], arithmetic)
        error = float(np.nan_to_num(cosines.error, nan=np.inf))
    precision.report(error, "the inner product", arithmetic)


def _standard_error(products: InnerProducts, error_of: Callable[[Any], Any]) -> Any:
    """The standard error of the only pair of forward passes; None where nothing was sampled."""
    if products.sums is None:
        return None
    errors = error_of(products.sums)
    return None if errors is None else errors[0, 0]


def _labelled_values(
    values: Any, metric: Metric, models: Two, products: InnerProducts, error: Any = None
) -> Any:
    """Values with the metric's name and guarantee, the route and the standard error."""
    plain = [part for model in _read_models(models) for _, part in terms(model)]
    facts = metric.name, is_exact(metric, plain), products.route, error, _model_caveats(models)
    if np.ndim(values) == 0:
        return Number(values, *facts, products.inputs, products.mean_share)
    return Numbers(values, *facts)


def _read_models(models: Two) -> list[Any]:
    """The models that were built or read, without plain functions."""
    return [model for model in models if isinstance(model, AnyModel)]


def _model_caveats(models: Two) -> tuple[str, ...]:
    """Differences between the models and the networks they were read from."""
    return caveats(*_read_models(models))
