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
from tnsim.folding.forward import Sums


def cosine_error(sums: Sums) -> Float[np.ndarray, "rows columns *out"] | None:
    """Of the cosines of all pairs; None where one group of points has all the weight."""
    counted = sums.shares > 0
    if np.count_nonzero(counted) < 2:
        return None
    products = _without_each(sums.products, counted)
    rows, columns = (_without_each(norms, counted) for norms in (sums.rows, sums.columns))
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = np.sqrt(rows[:, :, None] * columns[:, None, :])
        return _error(products / norms)


def inner_error(sums: Sums) -> Float[np.ndarray, "rows columns"] | None:
    """Of inner products, as a share of the largest mantissa of `forward.total`."""
    counted = sums.shares > 0
    if np.count_nonzero(counted) < 2:
        return None
    # Without a group the weights add up to less than 1: an inner product is a mean over the rest.
    left = sums.shares.sum() - sums.shares[counted]
    return _error(_without_each(sums.products, counted) / left[:, None, None])


def _without_each(value: LogScaled, counted: Bool[np.ndarray, " groups"]) -> np.ndarray:
    """Sums without one of some groups each, all in the scale that `forward.total` has."""
    log = value.log.max(axis=0)
    scaled = value.mantissa * over_outputs(np.exp(value.log - log), value.mantissa)
    return scaled.sum(axis=0) - scaled[counted]


def _error(left_out: np.ndarray) -> np.ndarray:
    """The standard error of a value from its values without each of several groups.

    Infinite where the value is not defined without one of them.
    """
    groups = len(left_out)
    with np.errstate(invalid="ignore"):
        spread = ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0)
    return np.sqrt((groups - 1) / groups * np.nan_to_num(spread, nan=np.inf))
