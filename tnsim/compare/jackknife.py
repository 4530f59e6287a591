"""Standard errors of what was sampled. In: sums over groups of draws. Out: errors.

A jackknife: with theta_g the value that all draws but those of group g give, and G groups,

    error^2 = (G - 1) / G sum_g (theta_g - mean of all theta)^2.

It needs no formula for the variance of a quotient such as a cosine.

Source:
    Tukey 1958, "Bias and confidence in not-quite large samples".
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from tnsim.engine.log_scaled import LogScaled, over_outputs
from tnsim.folding.forward import Sums, total


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
