"""What a verb says of the products it asked for. In: inner products. Out: numbers with labels.

Outside a JAX trace a number knows its metric, whether that is exact, the standard error of what was
sampled, and what sets the models apart from the networks they were read from; what rounding leaves
of it is said in a warning or an error. Inside a trace the arrays are handed out as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from tnsim.compare.comparable import Comparable, parts
from tnsim.compare.jackknife import cosine_error, inner_error
from tnsim.compare.numbers import Number, Numbers, SignedLog
from tnsim.compare.question import Products, Question
from tnsim.engine import precision
from tnsim.engine.log_scaled import LogScaled, log_abs
from tnsim.engine.precision import Arithmetic
from tnsim.errors import TnsimError
from tnsim.metrics.metric import Metric
from tnsim.models.model import AnyModel, Model, caveats, guesses, terms
from tnsim.models.origin import warn_of_caveats
from tnsim.models.scaling import beyond_float, power
from tnsim.tensors.kinds import kinds, nonlinear

Two: TypeAlias = tuple[Comparable, Comparable]


def cosine(products: Products, models: Two, asked: Question) -> Any:
    """AB / sqrt(AA BB), elementwise.

    Args:
        products: AB, AA and BB.
        models: What was compared.
        asked: What was asked of them.

    Returns:
        A `Number`, or `Numbers` where outputs are told apart; inside a trace an array.

    Raises:
        ModelError: Where a norm vanishes, unless traced (there it is NaN).
    """
    arithmetic = Arithmetic(_degree(models), asked.dtype)
    values = products.values
    if not products.traced:
        for product in values.values():
            _check_number(product.mantissa, asked.metric)
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
    return _labelled(clipped, asked.metric, models, products, error)


def value(products: Products, models: Two, asked: Question) -> Any:
    """The inner product AB as a float.

    Args:
        products: AB, and the norms where they were asked for.
        models: What was compared.
        asked: What was asked of them.

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
    _report(products.values, models, asked)
    error = _standard_error(products, inner_error)
    if error is not None:
        error = power(error, product.log, exponent)
    return _labelled(number, asked.metric, models, products, error)


def logarithm(products: Products, models: Two, asked: Question) -> SignedLog:
    """Sign and logarithm of the inner product AB.

    Args:
        products: AB, and the norms where they were asked for.
        models: What was compared.
        asked: What was asked of them.

    Returns:
        Two of `Number`; inside a trace two arrays. A standard error is that of the logarithm.
    """
    product, exponent = products.values["AB"], products.exponent
    log = log_abs(product) + exponent * np.log(2)
    if products.traced:
        sign: Any = jnp.sign(product.mantissa)
        return SignedLog(sign, log)
    _report(products.values, models, asked)
    error = None
    if product.mantissa != 0:
        error = _standard_error(products, inner_error)
    if error is not None:
        error = error / abs(product.mantissa)  # d log|x| = dx / |x|
    sign = _labelled(np.sign(product.mantissa), asked.metric, models, products)
    return SignedLog(sign, _labelled(log, asked.metric, models, products, error))


def _report(products: dict[str, LogScaled], models: Two, asked: Question) -> None:
    """Say what rounding leaves of an inner product, seen beside the two norms.

    Warnings point four frames up: past this function, its caller here and the verb.
    """
    product = products["AB"]
    _check_number(product.mantissa, asked.metric)
    warn_of_caveats(_caveats(models), stacklevel=4)
    arithmetic = Arithmetic(_degree(models), asked.dtype)
    if product.mantissa == 0:
        return
    if "AA" not in products:
        error = float(arithmetic.rounding * product.size / abs(product.mantissa))
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            cosines = precision.cosine(product, products["AA"], products["BB"], arithmetic)
        error = float(np.nan_to_num(cosines.error, nan=np.inf))
    precision.report(error, "the inner product", arithmetic, stacklevel=4)


def _standard_error(products: Products, error_of: Callable[[Any], Any]) -> Any:
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
    values: Any, metric: Metric, models: Two, products: Products, error: Any = None
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
