"""The number of digits of a cosine: error bounds, warnings and refusals.

A single rule serves every route. Let u = 4 n eps, for polynomials of degree n: each layer squares
its inputs, so a relative error doubles, and eps grows to n eps. An inner product of a single
contribution is off by at most u times the two norms, and a sum by u times the sum of the absolute
contributions, its `size`. Let rho = size / value of the squared norms AA and BB. What is made of A
alone, a mean of its outputs under Isserlis' theorem or a forward pass, enters AA twice and AB once,
and is therefore off by u rho_A / 2, whatever the other model is. Hence

    |error of AB| <= u max(size_AB, sqrt(AA BB) (rho_A + rho_B) / 2),

and the cosine c = AB / sqrt(AA BB) is off by at most

    u max(size_AB / sqrt(AA BB), (rho_A + rho_B) / 2) + |c| u (rho_A + rho_B) / 2

to first order in u rho. The geometric mean of rho_A and rho_B would do where joint moments alone
are read, layer over layer. Beside means, and of whole trees, it told as little as a 240th of the
error of cosines near zero. Where a side is a sum of models, multiplied out, rho is large as its
terms cancel: they do so twice in AA and once in AB, and the geometric mean does.

An exponent e of a scale that is no whole number, as weights of points make it, is off by eps |e| /
2, so for each scale of a cosine eps |e| is added to u.

Measured against exact rational arithmetic, errors are a fiftieth of the bound (median) and at most
half. In float32 the median is a 62nd to a 137th, over one to three layers of weights of all sizes;
where the bound is visible, errors are a 220th and less of it.

Cancellation *within* a plain model, such as two hidden units that nearly undo each other, or a
hidden basis that is far from orthogonal, is measured on forward passes and counted in the size of
the model's products (`cancellation`, `problems.conditioning`). Where such cancellation takes a
cosine out of [-1, 1] nevertheless, by no more than half of the digits, the excess is taken as the
error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, PrecisionWarning, ResultError, TnsimError, warn
from tnsim.scaled import Numeric, ScaledSum, library, over_outputs

VISIBLE = 1e-3
"""Error of a cosine beyond which a warning tells it."""
USELESS = 0.1
"""Error of a cosine beyond which no digit is left."""
_SAFETY = 4.0  # the 4 of u = 4 n eps
EPS = {dtype: float(np.finfo(dtype).eps) for dtype in ("float64", "float32")}
"""Distance of 1 and the next number, by dtype."""
_EXPONENT_EPS = EPS["float64"]
_ADVICE = (
    "; compare models that differ more, or a difference of models with equal layers and nearly "
    "equal weights, which loses nothing"
)


class Arithmetic(NamedTuple):
    """The arithmetic of a computation.

    Attributes:
        degree: Degree of the polynomials.
        dtype: Precision of the computation.
        sums: Whether a side of a product is a sum of models, multiplied out.
    """

    degree: float
    dtype: str
    sums: bool = False

    @property
    def rounding(self) -> float:
        """The relative error u = 4 n eps of a single contribution."""
        return _SAFETY * self.degree * EPS[self.dtype]

    @property
    def alone(self) -> float:
        """The error of a cosine of two plain models, from degree and dtype alone."""
        return 2 * self.rounding

    @property
    def text(self) -> str:
        """The computation in words."""
        return f"polynomials of degree {self.degree:.3g} in {self.dtype}"

    @property
    def advice(self) -> str:
        """Advice for more digits, see `_in_float64`."""
        return _in_float64(self.dtype)


def _in_float64(dtype: str) -> str:
    """Advice for more digits, as the end of a sentence; empty in float64, which has no more."""
    return "; use dtype='float64'" if dtype == "float32" else ""


def cancellation(amplification: float) -> float:
    """The ratio of the terms within a model's inner products to the inner products.

    Args:
        amplification: Factor A by which the model enlarges rounding, see `problems.conditioning`.

    Returns:
        The ratio 1.5 + A / 4. Over 800 pairs in float32, of one to three layers, two in five
        with hidden units that nearly cancel, 3 to 10^3 times as large as their sum, the largest
        error is 0.4 of a cosine's bound where nothing cancels, and 0.3 where hidden units do.
    """
    return 1.5 + amplification / 4


def of_pair(first: Any, second: Any) -> Any:
    """The factor by which cancellation enlarges errors of AB, as derived above.

    Args:
        first: Factors of the squared norms AA, at least 1, in any shape.
        second: Factors of the squared norms BB, in a shape that broadcasts against `first`.

    Returns:
        Factors in the common shape.

    Example:
        >>> of_pair(1.5, 300.5)
        151.0
    """
    return (first + second) / 2


class Cosine(NamedTuple):
    """Cosines and their error bounds.

    Attributes:
        value: Cosines, which rounding may take out of [-1, 1].
        error: Bounds of the absolute errors.
    """

    value: Float[Numeric, "..."]
    error: Float[Numeric, "..."]


@np.errstate(all="ignore")  # of norms without digits the bound is NaN or huge
def cosine(product: ScaledSum, bra: ScaledSum, ket: ScaledSum, arithmetic: Arithmetic) -> Cosine:
    """The cosines `AB / sqrt(AA BB)` and their error bounds, elementwise.

    Args:
        product: Inner products AB.
        bra, ket: Squared norms AA and BB, in shapes that broadcast against AB.
        arithmetic: Degree of the polynomials and dtype of the computation.

    Returns:
        Values, not clipped, and bounds of their absolute errors; huge where a norm may be zero,
        infinite where it is not above zero.
    """
    xp = library(product.mantissa)
    mantissa = product.mantissa
    scales = [over_outputs(x.exponent, x.mantissa) for x in (product, bra, ket)]
    norms = xp.sqrt(bra.mantissa) * xp.sqrt(ket.mantissa)
    if xp is np:  # in a trace the derivatives by both norms differ
        # Roots of equal numbers may round, so that the cosine of a copy would miss 1.
        norms = np.where(bra.mantissa == ket.mantissa, bra.mantissa, norms)
    scale = xp.exp2(scales[0] - (scales[1] + scales[2]) / 2)
    factor = scale / norms
    rounding = arithmetic.rounding + _EXPONENT_EPS * sum(abs(scale) for scale in scales)
    # rho of both norms: the ratio of the sum of absolute terms to the norm. A squared norm below
    # zero is rounding alone.
    magnified = [xp.where(x.mantissa > 0, x.size / x.mantissa, xp.inf) for x in (bra, ket)]
    # The bound of the error of AB, in units of u sqrt(AA BB)
    between = xp.sqrt(magnified[0] * magnified[1]) if arithmetic.sums else of_pair(*magnified)
    direct = xp.maximum(product.size * factor, between)
    # 1 / sqrt((1 - x) (1 - y)) - 1 <= (x + y) / 2 / (1 - max(x, y)) for relative errors x and y
    worst = rounding * xp.maximum(*magnified)
    left = xp.maximum(1 - worst, _EXPONENT_EPS)
    norm_error = rounding * (magnified[0] + magnified[1]) / 2 / left
    value = mantissa / norms * scale
    error = rounding * direct * (1 + norm_error) + abs(value) * norm_error
    excess = abs(value) - 1
    # A small excess over 1 is rounding that the bound has missed; `clipped` refuses a larger one.
    shown = xp.where(excess <= math.sqrt(EPS[arithmetic.dtype]), excess, 0.0)
    return Cosine(value, xp.maximum(error, shown))


def check_finite(values: Iterable[Any], metric: str, dtype: str) -> None:
    """Refuse what finite weights have taken beyond the range of floats.

    Args:
        values: Numbers that a result is made of.
        metric: Name of the metric.
        dtype: Precision of the computation.

    Raises:
        ResultError: A number is NaN or infinite, which is never a result.
    """
    if not all(np.isfinite(each).all() for each in values):
        raise ResultError(
            f"the {metric} computation in {dtype} gave NaN for finite weights: a float range was "
            f"exceeded within a layer{_in_float64(dtype)}"
        )


def check_terms(sizes: Any, dtype: str) -> None:
    """Refuse inner products in float32 that are 0 without any term, which no cancellation explains.

    Args:
        sizes: Sums of absolute terms of the inner products that a result is made of.
        dtype: Precision of the computation.

    Raises:
        ResultError: One of them is zero in float32.
    """
    if dtype == "float32" and not np.all(sizes):
        raise ResultError(
            "the inner product is 0 in float32, without any term: hidden states may be below the "
            f"range of floats{_in_float64(dtype)}"
        )


def check_norm(
    norm: ScaledSum, name: str, has_terms: bool, arithmetic: Arithmetic, centred: bool = False
) -> None:
    """Refuse a squared norm that is zero to within rounding.

    Args:
        norm: Squared norm of a model, or of each output of the model.
        name: Name of the model, as the subject of a sentence.
        has_terms: Whether the model is a sum of several models, which may have cancelled.
        arithmetic: Degree of the polynomials and dtype of the computation.
        centred: Whether this is the norm of the model without its mean over the inputs.

    Raises:
        ModelError: The model is the zero function, or a difference of equal functions; or, without
            its mean, a constant.
        ResultError: The norm of a plain model is not zero, but cancellation leaves it no digit; or
            float32 does not tell.
    """
    rounding = min(arithmetic.rounding, USELESS)
    vanishes = norm.mantissa <= rounding * norm.size
    if not vanishes.any():
        return
    zero = np.flatnonzero(vanishes)
    where = ""
    if np.ndim(norm.mantissa):
        where = f" in output {', '.join(map(str, zero[:8]))}"
    if arithmetic.dtype == "float32":  # of which float64 may leave something
        raise ResultError(
            f"the squared norm of {name} has no digits left{where} in float32: its terms cancel, "
            f"or hidden states are below the range of floats{arithmetic.advice}"
        )
    if centred and (has_terms or not np.any(np.asarray(norm.mantissa)[vanishes])):
        raise ModelError(
            f"{name} is constant to within rounding{where}: centred=True leaves nothing of it, and "
            "the cosine is undefined. Compare it with its mean, by centred=False"
        )
    if has_terms:
        raise ModelError(
            f"{name} is a difference of models that are the same function to within rounding"
            f"{where}: its cosine is undefined"
        )
    if np.any(np.asarray(norm.mantissa)[vanishes]):
        raise ResultError(
            f"the squared norm of {name} has no digits left{where}: its contributions cancel, and "
            "it is no larger than their rounding. The model may be "
            f"{'constant' if centred else 'the zero function'}; if it is not, use fewer layers, or "
            "GaussianClosure()"
        )
    raise ModelError(f"{name} is the zero function{where}: its cosine with anything is undefined")


def known(cosines: Cosine, norms: Sequence[ScaledSum], arithmetic: Arithmetic) -> Any:
    """The cosines inside a trace, where nothing can be refused: NaN in its place.

    So are cosines that `refuse` or `clipped` would not take, and those of norms without digits.

    Args:
        cosines: Cosines and the bounds of their errors.
        norms: Squared norms, in shapes that broadcast against the cosines.
        arithmetic: Degree of the polynomials and dtype of the computation.

    Example:
        The squared norm 1e-20 is what rounding has left of terms of size 1.

        >>> exact, lost = (ScaledSum(np.float64(x), 0.0, np.float64(1.0)) for x in (1.0, 1e-20))
        >>> arithmetic = Arithmetic(2, "float64")
        >>> for norm in (exact, lost):
        ...     float(known(cosine(exact, norm, exact, arithmetic), [norm, exact], arithmetic))
        1.0
        nan
    """
    is_lost = (cosines.error > USELESS) & (arithmetic.alone <= USELESS)
    is_lost = is_lost | (abs(cosines.value) - 1 > cosines.error)
    for norm in norms:
        is_lost = is_lost | (norm.mantissa <= min(arithmetic.rounding, USELESS) * norm.size)
    return bounded(_without_lost(cosines.value, is_lost), cosines.error)


def known_product(product: ScaledSum, arithmetic: Arithmetic) -> ScaledSum:
    """An inner product of two models inside a trace: NaN where cancellation leaves it no digit.

    Args:
        product: Inner product of two plain models, whose size counts what cancels within them.
        arithmetic: Degree of the polynomials and dtype of the computation.

    Example:
        >>> product = ScaledSum(np.float64(1.0), np.float64(0.0), np.float64(1e5))
        >>> [float(known_product(product, Arithmetic(4, x)).mantissa) for x in EPS]
        [1.0, nan]
    """
    is_lost = arithmetic.rounding * product.size > USELESS * abs(product.mantissa)
    is_lost = is_lost & (arithmetic.alone <= USELESS)
    return product._replace(mantissa=_without_lost(product.mantissa, is_lost))


def bounded(values: Any, bounds: Any) -> Any:
    """Values inside a trace: NaN where their bound is NaN, as `refuse` has it.

    Args:
        values: Numbers that are traced.
        bounds: Bounds of their errors, or the sizes that bounds are made of.

    Example:
        >>> bounded(np.ones(2), np.array([0.5, np.nan])).tolist()
        [1.0, nan]
    """
    return _without_lost(values, library(bounds).isnan(bounds))


def _without_lost(values: Any, is_lost: Any) -> Any:
    """The values, NaN where they are lost, with a gradient of NaN as well."""
    return values * library(values).where(is_lost, np.nan, 1.0).astype(values.dtype)


def lost_half(norm: ScaledSum, dtype: str) -> bool:
    """Whether a squared norm has lost half of its digits to cancellation in its sum."""
    return bool(np.any(math.sqrt(EPS[dtype]) * norm.size > abs(norm.mantissa)))


def clipped(cosines: Cosine, dtype: str) -> Any:
    """The cosines within [-1, 1].

    Args:
        cosines: Cosines and the bounds of their errors.
        dtype: Precision of the computation.

    Raises:
        TnsimError: A cosine is outside by more than its error bound, against the inequality of
            Cauchy and Schwarz.
    """
    excess = abs(cosines.value) - 1
    outside = excess > cosines.error
    if outside.any():
        worst = np.argmax(np.where(outside, excess, -np.inf))
        wider = "dtype='float64' or " if _in_float64(dtype) else ""
        raise TnsimError(
            f"a cosine came out as {np.ravel(cosines.value)[worst]:.6g}, outside [-1, 1] by more "
            f"than its error bound {np.ravel(cosines.error)[worst]:.1g}: hidden units of a model "
            f"nearly cancel one another (use {wider}an equal model in a better basis), or this is "
            "an error in tnsim, please report it"
        )
    return np.minimum(np.maximum(cosines.value, -1.0), 1.0)


def report(error: float, what: str, arithmetic: Arithmetic) -> None:
    """Refuse a cosine without digits, warn of a visible error.

    Args:
        error: Bound of the cosine's absolute error.
        what: Name of the cosine, as the subject of a sentence.
        arithmetic: Degree of the polynomials and dtype of the computation.

    Raises:
        ResultError: Terms cancel so far that no digit is left, see `refuse`.

    Warns:
        PrecisionWarning: The error is visible, see `warn_of_error`.
    """
    refuse(error, what, arithmetic)
    warn_of_error(error, what, arithmetic)


def refuse(error: float, what: str, arithmetic: Arithmetic) -> None:
    """Raise `ResultError` where terms cancel so far that no digit of a cosine is left.

    A degree so high that it alone takes all digits causes a warning and no error: the number is
    right for weights that differ by eps.

    Args:
        error: Bound of the cosine's absolute error.
        what: Name of the cosine, as the subject of a sentence.
        arithmetic: Degree of the polynomials and dtype of the computation.

    Raises:
        ResultError: No digit is left, or the bound is NaN.
    """
    if np.isnan(error):
        raise ResultError(
            f"{what} has no error bound: squares of hidden units leave the range of floats; "
            f"{arithmetic.advice[2:] or 'scale down the weights before them'}"
        )
    if error > USELESS and arithmetic.alone <= USELESS:
        raise ResultError(
            f"{what} has no digits left: its terms cancel, and rounding may change it by "
            f"{min(error, 2.0):.1g}{arithmetic.advice or _ADVICE}"
        )


def warn_of_error(error: float, what: str, arithmetic: Arithmetic) -> None:
    """Warn with `PrecisionWarning` of a visible error; arguments are as for `report`."""
    if error <= VISIBLE:
        return
    # Either the degree alone explains the error, or terms cancel; the message says which.
    if arithmetic.alone > USELESS or error <= 2 * arithmetic.alone:
        message = (
            f"{arithmetic.text}: rounding alone may change the result by {min(error, 2.0):.1g}"
        )
    else:
        digits = int(-math.log10(error))
        message = (
            f"{what} has about {digits} digits left: its terms cancel, and rounding may change it "
            f"by {error:.1g}"
        )
    warn(message + arithmetic.advice, PrecisionWarning)
