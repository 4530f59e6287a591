"""Numbers that cannot overflow and that know the size of their terms.

A `LogScaled` holds `mantissa * exp(log)` for one inner product or a block of inner products.
Mantissa and logarithm have the shape of the pairs and, where products are wanted per output, one
more axis at the end; `log` lacks this axis where all outputs of a pair have one scale. The third
array, `size`, is the sum of the absolute values of all terms, in the same scale. An inner product
of two plain models is one term. Combinations add one term per pair of models, and models with a
constant one per moment node, with the weight of the node. Cancellation is then read off, as
rounding is relative to the size (see `precision`). The same functions serve NumPy and, inside a
trace, JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

Numeric = np.ndarray | jax.Array

_NOTHING = -(2.0**40)
"""Logarithm that stands for the scale of a zero, below that of any other value."""


class LogScaled(NamedTuple):
    """A sum `mantissa * exp(log)`, whose terms have the absolute sum `size * exp(log)`.

    Attributes:
        mantissa: Sums, in the scale of `log`.
        log: Logarithm of the scale, of each pair or of each output of a pair.
        size: Sums of the absolute values of the terms, in the same scale.
    """

    mantissa: Float[Numeric, "*pairs_and_outputs"]
    log: Float[Numeric, "*pairs"] | Float[Numeric, "*pairs_and_outputs"]
    size: Float[Numeric, "*pairs_and_outputs"]


def contribution(mantissa: Any, log: Any) -> LogScaled:
    """An inner product that is a single term, so that its size is its absolute value."""
    return LogScaled(mantissa, log, abs(mantissa))


def times(value: LogScaled, factor: Any, log: Any = 0.0) -> LogScaled:
    """The product `factor * exp(log) * value`; factor and log broadcast over pairs and outputs.

    Example:
        >>> float(times(contribution(np.array(2.0), np.array(0.0)), -3.0).size)
        6.0
    """
    size = abs(factor) * value.size
    return LogScaled(factor * value.mantissa, over_outputs(value.log, log) + log, size)


def magnified(value: LogScaled, factor: Any) -> LogScaled:
    """The value with its size `factor` times as large, for terms that cancel within a model.

    Example:
        >>> magnified(contribution(np.array(2.0), np.array(0.0)), 10.0).size
        np.float64(20.0)
    """
    factor = library_of(factor).asarray(factor)
    return value._replace(size=over_outputs(factor, value.size) * value.size)


def taken(values: LogScaled, place: Any) -> LogScaled:
    """Some entries of a block of values.

    Args:
        values: Block of values.
        place: Index of the entries: a number, slices or arrays of numbers.

    Example:
        >>> block = contribution(np.array([2.0, 3.0]), np.array([0.0, 1.0]))
        >>> float(taken(block, 1).log)
        1.0
    """
    return LogScaled(*(array[place] for array in values))


def stacked(values: Sequence[LogScaled]) -> LogScaled:
    """A block of several values of equal shape, with a first axis over the values."""
    return LogScaled(*(np.stack(arrays) for arrays in zip(*values, strict=True)))


def add(parts: Sequence[LogScaled]) -> LogScaled:
    """The sum of several values, pair by pair in the largest of their scales."""
    if len(parts) == 1:
        return parts[0]
    # In the largest scale no factor exceeds 1, so nothing overflows; a far smaller part becomes 0,
    # which is right to within rounding. The scale of a part that is zero is ignored.
    log = _own_log(parts[0])
    for part in parts[1:]:
        log = library_of(log).maximum(log, _own_log(part))
    same_scale = [_in_scale(part, log) for part in parts]
    mantissa: Any = sum(part.mantissa for part in same_scale)
    size: Any = sum(part.size for part in same_scale)
    return LogScaled(mantissa, log, size)


def total(value: LogScaled, slices: bool) -> LogScaled:
    """The sum over outputs, the last axis if `slices`; otherwise the value itself."""
    if not slices:
        return value
    if np.ndim(value.log) == np.ndim(value.mantissa):
        value = _in_scale(value, _own_log(value).max(axis=-1))
    return LogScaled(value.mantissa.sum(axis=-1), value.log, value.size.sum(axis=-1))


def log_abs(value: LogScaled) -> Float[Numeric, "*pairs_and_outputs"]:
    """The logarithm of `|value|`, -inf for zero."""
    library = library_of(value.mantissa)
    with np.errstate(divide="ignore"):
        return library.log(abs(value.mantissa)) + over_outputs(value.log, value.mantissa)


def over_outputs(per_pair: Any, other: Any) -> Any:
    """An array over pairs, with a last axis of size 1 where the other array has one of outputs."""
    return per_pair[..., None] if np.ndim(per_pair) < np.ndim(other) else per_pair


def library_of(array: Any) -> Any:
    """The module of array functions for an array: `jax.numpy` for JAX's, else `numpy`."""
    return jnp if isinstance(array, jax.Array) else np


def _own_log(value: LogScaled) -> Any:
    """The logarithm of the scale, pair by pair; `_NOTHING` where all terms are zero."""
    counts = value.size > 0
    if np.ndim(value.log) < np.ndim(counts):
        counts = counts.any(axis=-1)
    return library_of(value.size).where(counts, value.log, _NOTHING)


def _in_scale(value: LogScaled, log: Any) -> LogScaled:
    """The value with the logarithm of another scale, no smaller unless the value is zero."""
    library = library_of(log)
    # Only a value of zero may have a larger scale (see `add`), for which any factor is right.
    factor = library.exp(library.minimum(value.log - over_outputs(log, value.log), 0.0))
    factor = over_outputs(factor, value.mantissa)
    return LogScaled(factor * value.mantissa, log, factor * value.size)
