"""How many digits a cosine has.

In: inner products, sizes of sums. Out: values, bounds, refusals.

One rule for every route. Let u = 4 n eps, for polynomials of degree n: each layer squares what it
is given, so a relative error doubles, and eps grows to n eps. An inner product that is one
contribution is off by at most u times the two norms, and a sum by u times the sum of the absolute
contributions, its `size`. With rho = size / value of the squared norms AA and BB, Cauchy and
Schwarz leave for the product

    |error of AB| <= u max(size_AB, sqrt(size_AA size_BB)),

and the cosine c = AB / sqrt(AA BB) is off by at most

    u max(size_AB / sqrt(AA BB), sqrt(rho_A rho_B)) + |c| u (rho_A + rho_B) / 2

to first order in u rho. Cosines between logarithms of size l lose eps l more: u contains it.

Measured against exact rational arithmetic, errors are a fiftieth of the bound (median) and at most
a quarter. Cancellation *within* a plain model, such as two hidden units that nearly undo each
other, or a hidden basis that is far from orthogonal, is measured on forward passes and counted
in the size of its products (`cancellation`, `problems.conditioning`). Where it takes a cosine out
of [-1, 1] nevertheless, by no more than half of the digits, the excess is the error.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.engine.scaled import LogScaled, Numeric, library_of, over_outputs
from tnsim.errors import ModelError, PrecisionWarning, ResultError, TnsimError

VISIBLE = 1e-3
"""Error of a cosine beyond which it is told."""
USELESS = 0.1
"""Error of a cosine beyond which no digit is left."""
_SAFETY = 4.0
_EPS = {dtype: float(np.finfo(dtype).eps) for dtype in ("float64", "float32")}
_LOG_EPS = _EPS["float64"]


class Arithmetic(NamedTuple):
    """Polynomials of a degree computed in a dtype."""

    degree: float
    dtype: str

    @property
    def rounding(self) -> float:
        """Relative error of one contribution."""
        return _SAFETY * self.degree * _EPS[self.dtype]

    @property
    def alone(self) -> float:
        """Error of a cosine of two plain models."""
        return 2 * self.rounding

    @property
    def text(self) -> str:
        """What is computed, in words."""
        return f"polynomials of degree {self.degree:.3g} in {self.dtype}"

    @property
    def advice(self) -> str:
        """What gives more digits, where anything does."""
        return "; use dtype='float64'" if self.dtype == "float32" else ""


def cancellation(amplification: float) -> float:
    """How many times larger than a model's inner products the sums within them are.

    Args:
        amplification: A, by which the model enlarges rounding, see `problems.conditioning`.

    Returns:
        1 + 2 A. With pairs of hidden units that nearly cancel, 10 to 10^4 times as large as their
        sum, the worst error of 12 seeds is 0.3 n A eps under `GaussianClosure`, and about
        sqrt(A) eps under the other metrics; the bound of a cosine is 16 n A eps.
    """
    return 1.0 + 2.0 * amplification


class Cosine(NamedTuple):
    """Cosines, unclipped, and the bound of their errors."""

    value: Float[Numeric, "..."]
    error: Float[Numeric, "..."]


def cosine(product: LogScaled, bra: LogScaled, ket: LogScaled, arithmetic: Arithmetic) -> Cosine:
    """`AB / sqrt(AA BB)` and its error bound, elementwise.

    Args:
        product: Inner products.
        bra, ket: Squared norms, above zero, in shapes that broadcast against the products.
        arithmetic: Degree of the polynomials and dtype of the computation.

    Returns:
        Values, not clipped, and bounds of their absolute errors; huge where a norm may be zero.
    """
    library = library_of(product.mantissa)
    mantissa = product.mantissa
    logs = [over_outputs(x.log, x.mantissa) for x in (product, bra, ket)]
    norms = library.sqrt(bra.mantissa) * library.sqrt(ket.mantissa)
    factor = library.exp(logs[0] - (logs[1] + logs[2]) / 2) / norms
    rounding = arithmetic.rounding + _LOG_EPS * sum(abs(log) for log in logs)
    # rho of both norms: how many times larger their terms are than what is left of them
    magnified = bra.size / bra.mantissa, ket.size / ket.mantissa
    # The bound of the error of AB, in units of u sqrt(AA BB)
    direct = library.maximum(product.size * factor, library.sqrt(magnified[0] * magnified[1]))
    # 1 / sqrt((1 - x) (1 - y)) - 1 <= (x + y) / 2 / (1 - max(x, y)) for relative errors x and y
    worst = rounding * library.maximum(*magnified)
    left = library.maximum(1 - worst, _LOG_EPS)
    norm_error = rounding * (magnified[0] + magnified[1]) / 2 / left
    value = mantissa * factor
    error = rounding * direct * (1 + norm_error) + abs(value) * norm_error
    excess = abs(value) - 1
    shown = library.where(excess <= math.sqrt(_EPS[arithmetic.dtype]), excess, 0.0)
    return Cosine(value, library.maximum(error, shown))


def check_norm(norm: LogScaled, name: str, has_terms: bool, arithmetic: Arithmetic) -> None:
    """Refuse a squared norm that is zero to within rounding.

    Args:
        norm: Squared norm of a model, or of each of its outputs.
        name: The model, as the subject of a sentence.
        has_terms: Whether it is a sum of several models, which may have cancelled.
        arithmetic: What the norm was computed with.

    Raises:
        ModelError: The model is the zero function, or a difference that is.
        ResultError: A model is not, but its contributions cancel and leave no digit.
    """
    rounding = min(arithmetic.rounding, 0.5)
    vanishes = norm.mantissa <= rounding * norm.size
    if not vanishes.any():
        return
    zero = np.flatnonzero(vanishes)
    where = ""
    if np.ndim(norm.mantissa):
        where = f" in output {', '.join(map(str, zero[:8]))}"
    if has_terms:
        raise ModelError(
            f"{name} is a difference of models that are the same function to within rounding"
            f"{where}: its cosine is undefined"
        )
    if np.any(np.asarray(norm.mantissa)[vanishes]):
        raise ResultError(
            f"the squared norm of {name} has no digits left{where}: its contributions cancel, and "
            "it is no larger than their rounding. The model may be the zero function; if it is "
            "not, use float64, fewer layers, or GaussianClosure()"
        )
    raise ModelError(f"{name} is the zero function{where}: its cosine with anything is undefined")


def lost_half(norm: LogScaled, dtype: str) -> bool:
    """Whether any of some squared norms has lost half of its digits to what cancels in its sum."""
    return bool(np.any(np.sqrt(np.finfo(dtype).eps) * norm.size > abs(norm.mantissa)))


def clipped(cosines: Cosine) -> Any:
    """The cosines within [-1, 1].

    Raises:
        TnsimError: One is outside by more than its error bound, which Cauchy and Schwarz do not
        allow.
    """
    excess = abs(cosines.value) - 1
    outside = excess > cosines.error
    if outside.any():
        worst = np.argmax(np.where(outside, excess, -np.inf))
        raise TnsimError(
            f"a cosine came out as {np.ravel(cosines.value)[worst]:.6g}, outside [-1, 1] by more "
            f"than its error bound {np.ravel(cosines.error)[worst]:.1g}: hidden units of a model "
            "nearly cancel one another (use float64, or an equal model in a better basis), or this "
            "is an error in tnsim, please report it"
        )
    return np.minimum(np.maximum(cosines.value, -1.0), 1.0)


def report(error: float, what: str, arithmetic: Arithmetic, stacklevel: int) -> None:
    """Refuse a cosine without digits, warn of a visible error.

    Args:
        error: Bound of the cosine's absolute error.
        what: The cosine, as the subject of a sentence.
        arithmetic: What it was computed with.
        stacklevel: Of the warning, as for `warnings.warn`.

    Raises:
        ResultError: See `refuse`.

    Warns:
        PrecisionWarning: See `warn`.
    """
    refuse(error, what, arithmetic)
    warn(error, what, arithmetic, stacklevel + 1)


def refuse(error: float, what: str, arithmetic: Arithmetic) -> None:
    """Raise `ResultError` where terms cancel so far that no digit of a cosine is left.

    A degree so high that it alone takes all digits is warned of and not refused: the number is
    right for weights that differ by eps.

    Args:
        error: Bound of the cosine's absolute error.
        what: The cosine, as the subject of a sentence.
        arithmetic: What it was computed with.
    """
    if error > USELESS and arithmetic.alone <= USELESS:
        raise ResultError(
            f"{what} has no digits left: its terms cancel, and rounding may change it by "
            f"{min(error, 2.0):.1g}{arithmetic.advice or _ADVICE}"
        )


def warn(error: float, what: str, arithmetic: Arithmetic, stacklevel: int) -> None:
    """Warn with `PrecisionWarning` of a visible error; arguments as for `refuse`."""
    if error <= VISIBLE:
        return
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
    warnings.warn(message + arithmetic.advice, PrecisionWarning, stacklevel=stacklevel + 1)


_ADVICE = (
    "; compare models that differ more, or a difference of models with equal layers and nearly "
    "equal weights, which loses nothing"
)
