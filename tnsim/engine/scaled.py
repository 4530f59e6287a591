"""Numbers that cannot overflow and know their terms. In: mantissas, logarithms. Out: sums.

A `LogScaled` holds `mantissa * exp(log)` for one inner product or a block of them: both have the
shape of the pairs and, where products are wanted per output, one more axis at the end, which `log`
lacks where all outputs of a pair have one scale. Beside it stands `size`, the sum of the absolute
values of all that was added up, in the same scale. An inner product of two plain models is one
contribution; combinations add one per pair of terms, and models with a constant one per moment
node, with the node's weight. What cancels is then read off: rounding is relative to the size (see
`precision`). The same functions serve NumPy and, inside a trace, JAX.
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
"""Logarithm of the scale of a zero."""


class LogScaled(NamedTuple):
    """`mantissa * exp(log)`, a sum whose terms have the absolute sum `size * exp(log)`."""

    mantissa: Float[Numeric, "*pairs_and_outputs"]
    log: Float[Numeric, "*pairs"] | Float[Numeric, "*pairs_and_outputs"]
    size: Float[Numeric, "*pairs_and_outputs"]


def contribution(mantissa: Any, log: Any) -> LogScaled:
    """One inner product that is no sum of others."""
    return LogScaled(mantissa, log, abs(mantissa))


def times(value: LogScaled, factor: Any, log: Any = 0.0) -> LogScaled:
    """`factor * exp(log) * value`; factors broadcast against mantissas, logarithms too.

    Example:
        >>> float(times(contribution(np.array(2.0), np.array(0.0)), -3.0).size)
        6.0
    """
    size = abs(factor) * value.size
    return LogScaled(factor * value.mantissa, over_outputs(value.log, log) + log, size)


def magnified(value: LogScaled, factor: Any) -> LogScaled:
    """The same value as a sum of terms `factor` times as large, which cancel within a model.

    Example:
        >>> magnified(contribution(np.array(2.0), np.array(0.0)), 10.0).size
        np.float64(20.0)
    """
    return value._replace(size=over_outputs(np.asarray(factor), value.size) * value.size)


def taken(values: LogScaled, place: Any) -> LogScaled:
    """Some of a block of values.

    Args:
        values: A block.
        place: What indexes its arrays: a number, slices, arrays of numbers.

    Example:
        >>> block = contribution(np.array([2.0, 3.0]), np.array([0.0, 1.0]))
        >>> float(taken(block, 1).log)
        1.0
    """
    return LogScaled(*(array[place] for array in values))


def stacked(values: Sequence[LogScaled]) -> LogScaled:
    """Values of equal shape as one block, with a first axis over them."""
    return LogScaled(*(np.stack(arrays) for arrays in zip(*values, strict=True)))


def add(parts: Sequence[LogScaled]) -> LogScaled:
    """Their sum, in the scale of the largest, pair by pair."""
    if len(parts) == 1:
        return parts[0]
    # In the largest scale no factor exceeds 1; a part far smaller becomes 0, which it is beside it.
    # The scale of a part that is zero says nothing.
    log = _own_log(parts[0])
    for part in parts[1:]:
        log = library_of(log).maximum(log, _own_log(part))
    same_scale = [_in_scale(part, log) for part in parts]
    mantissa: Any = sum(part.mantissa for part in same_scale)
    size: Any = sum(part.size for part in same_scale)
    return LogScaled(mantissa, log, size)


def total(value: LogScaled, per_output: bool) -> LogScaled:
    """The sum over all outputs, which are told apart in the last axis if `per_output`."""
    if not per_output:
        return value
    if np.ndim(value.log) == np.ndim(value.mantissa):
        value = _in_scale(value, _own_log(value).max(axis=-1))
    return LogScaled(value.mantissa.sum(axis=-1), value.log, value.size.sum(axis=-1))


def log_abs(value: LogScaled) -> Float[Numeric, "*pairs_and_outputs"]:
    """`log |value|`, -inf for zero."""
    library = library_of(value.mantissa)
    with np.errstate(divide="ignore"):
        return library.log(abs(value.mantissa)) + over_outputs(value.log, value.mantissa)


def over_outputs(per_pair: Any, other: Any) -> Any:
    """An array over pairs, with an axis of one output where the other array tells outputs apart."""
    return per_pair[..., None] if np.ndim(per_pair) < np.ndim(other) else per_pair


def library_of(array: Any) -> Any:
    """The module, NumPy or JAX's, whose functions an array goes through."""
    return jnp if isinstance(array, jax.Array) else np


def _own_log(value: LogScaled) -> Any:
    """The logarithm of the scale, pair by pair; far below any other where all terms are zero."""
    counts = value.size > 0
    if np.ndim(value.log) < np.ndim(counts):
        counts = counts.any(axis=-1)
    return library_of(value.size).where(counts, value.log, _NOTHING)


def _in_scale(value: LogScaled, log: Any) -> LogScaled:
    library = library_of(log)
    # What is larger than the scale is zero, see `add`.
    factor = library.exp(library.minimum(value.log - over_outputs(log, value.log), 0.0))
    factor = over_outputs(factor, value.mantissa)
    return LogScaled(factor * value.mantissa, log, factor * value.size)
