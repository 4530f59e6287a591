"""Numbers beyond the range of floats: a value times a power of two.

Norms of deep models are of the order `exp(2^L)`, so a number is stored as `value * 2 ** exponent`.
All exponents of the project have base 2: powers of two multiply without rounding, and whole
exponents add up without rounding below 2^53. Exponents that come from weights of points are not
whole. Natural logarithms stand in results only, and as the weights of points.

`Scaled` is the pair of any value (a model, a layer, states, outputs) and its exponent. A
`ScaledSum` holds `mantissa * 2 ** exponent` for an inner product or a block of inner products,
with the size of the terms. Mantissa and exponent have the shape of the pairs and, where products
are wanted per output, a further axis at the end; `exponent` lacks this axis where all outputs of a
pair have a common scale. The size is the sum of the absolute values of all terms, in the same
scale. An inner product of two plain models is a single term. Combinations add a term per pair of
models, and models with a constant a term per moment node, with the weight of the node. Cancellation
is then read off, as rounding is relative to the size (see `engine.precision`).

The same functions serve NumPy and, inside a trace, JAX. Derivatives treat powers of two that are
read off an array as constants, since they cancel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

Numeric = np.ndarray | jax.Array
Value = TypeVar("Value")

SMALLEST = -(2.0**40)
"""The exponent of zero, below the exponent of any other value."""
LOG_2 = float(np.log(2.0))
_VANISHES = 10_000
"""An exponent that turns any float into zero or into infinity."""


class Scaled(NamedTuple, Generic[Value]):
    """The product `2 ** exponent * value`.

    Attributes:
        value: A model, a layer, an array, or terms of a sum, with numbers near 1.
        exponent: Exponent of two: a single number, or an array that broadcasts against the value.
    """

    value: Value
    exponent: Any


class ScaledSum(NamedTuple):
    """A sum `mantissa * 2 ** exponent`, whose terms have the absolute sum `size * 2 ** exponent`.

    Attributes:
        mantissa: Sums, in the scale of `exponent`.
        exponent: Exponent of the scale, of each pair or of each output of a pair.
        size: Sums of the absolute values of the terms, in the same scale.
    """

    mantissa: Float[Numeric, "*pairs_and_outputs"]
    exponent: Float[Numeric, "*pairs"] | Float[Numeric, "*pairs_and_outputs"]
    size: Float[Numeric, "*pairs_and_outputs"]


def library(*trees: Any) -> Any:
    """The module `jax.numpy` where any leaf of the pytrees is an array of JAX, else NumPy.

    Example:
        >>> library({"weight": np.eye(2)}).__name__
        'numpy'
    """
    if all(isinstance(tree, np.ndarray | np.generic | float) for tree in trees):  # usual, sooner
        return np
    return jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(trees)) else np


def not_differentiated(tree: Value) -> Value:
    """The same arrays as constants to derivatives; arrays of NumPy as they are.

    Example:
        >>> not_differentiated(np.ones(2)).tolist()
        [1.0, 1.0]
    """
    return jax.lax.stop_gradient(tree) if library(tree) is not np else tree


def contribution(mantissa: Any, exponent: Any) -> ScaledSum:
    """An inner product that is a single term, so that its size is its absolute value."""
    return ScaledSum(mantissa, exponent, abs(mantissa))


def times(value: ScaledSum, factor: Any, exponent: Any = 0.0) -> ScaledSum:
    """The product `factor * 2 ** exponent * value`.

    Args:
        value: Sum or block of sums.
        factor: Factor that broadcasts over pairs and outputs.
        exponent: Exponent of a further factor, which broadcasts over pairs and outputs.

    Example:
        >>> float(times(contribution(np.array(2.0), np.array(0.0)), -3.0).size)
        6.0
    """
    raised = over_outputs(value.exponent, exponent) + exponent
    return ScaledSum(factor * value.mantissa, raised, abs(factor) * value.size)


def magnified(value: ScaledSum, factor: Any) -> ScaledSum:
    """The value with its size `factor` times as large, for terms that cancel within a model.

    Example:
        >>> magnified(contribution(np.array(2.0), np.array(0.0)), 10.0).size
        np.float64(20.0)
    """
    return value._replace(size=over_outputs(factor, value.size) * value.size)


def taken(values: ScaledSum, place: Any) -> ScaledSum:
    """Some entries of a block of values.

    Args:
        values: Block of values.
        place: Index of the entries: a number, slices or arrays of numbers.

    Example:
        >>> block = contribution(np.array([2.0, 3.0]), np.array([0.0, 1.0]))
        >>> float(taken(block, 1).exponent)
        1.0
    """
    return ScaledSum(*(array[place] for array in values))


def stacked(values: Sequence[ScaledSum]) -> ScaledSum:
    """A block of several values of equal shape, with a first axis over the values."""
    return ScaledSum(*(np.stack(arrays) for arrays in zip(*values, strict=True)))


def add(parts: Sequence[ScaledSum]) -> ScaledSum:
    """The sum of several values, pair by pair in the largest of their scales."""
    if len(parts) == 1:
        return parts[0]
    # In the largest scale no factor exceeds 1, so nothing overflows; a far smaller part becomes 0,
    # which is right to within rounding. The scale of a part that is zero is ignored.
    exponent = functools.reduce(larger, map(_own_exponent, parts))
    # Where all terms are zero their derivatives decide, so any of the scales serves.
    of_zeros = functools.reduce(larger, (part.exponent for part in parts))
    exponent = library(exponent).where(exponent == SMALLEST, of_zeros, exponent)
    same_scale = [_in_scale(part, exponent) for part in parts]
    mantissa: Any = sum(part.mantissa for part in same_scale)
    size: Any = sum(part.size for part in same_scale)
    return ScaledSum(mantissa, exponent, size)


def total(value: ScaledSum, slices: bool) -> ScaledSum:
    """The sum over outputs, the last axis if `slices`; otherwise the value itself."""
    if not slices:
        return value
    # Outputs with scales of their own are brought to the largest scale of their pair before they
    # are added.
    if np.ndim(value.exponent) == np.ndim(value.mantissa):
        value = _in_scale(value, _own_exponent(value).max(axis=-1))
    return ScaledSum(value.mantissa.sum(axis=-1), value.exponent, value.size.sum(axis=-1))


def share_of_squares(parts: ScaledSum, norms: ScaledSum) -> Float[np.ndarray, "*functions"]:
    """The share of squared norms that is in some parts, from 0 to 1; NaN where a norm vanishes.

    Args:
        parts: Parts of every output that are orthogonal to the rest, such as means,
            (*functions, out).
        norms: Squared norms, (*functions).

    Example:
        >>> means = contribution(np.array([3.0, 4.0]), np.array(1.0))
        >>> float(share_of_squares(means, contribution(np.array(50.0), np.array(2.0))))
        0.5
    """
    one, two = (over_outputs(x, parts.mantissa) for x in (parts.exponent, norms.exponent))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        shares = (power(parts.mantissa, one - two / 2) ** 2).sum(axis=-1) / norms.mantissa
    # A constant function exceeds 1 by rounding.
    return np.where(np.asarray(norms.mantissa) > 0, np.minimum(shares, 1.0), np.nan)


def log_abs(value: ScaledSum) -> Float[Numeric, "*pairs_and_outputs"]:
    """The natural logarithm of `|value|`, -inf for zero.

    Example:
        >>> round(float(log_abs(contribution(np.array(0.5), np.array(1.0)))), 12)
        0.0
    """
    with np.errstate(divide="ignore"):
        log = library(value.mantissa).log(abs(value.mantissa))
    return log + over_outputs(value.exponent, value.mantissa) * LOG_2


def over_outputs(per_pair: Any, other: Any) -> Any:
    """An array over pairs, with a last axis of size 1 where the other array is over outputs.

    A number, of a single pair, remains one.
    """
    return per_pair[..., None] if 0 < np.ndim(per_pair) < np.ndim(other) else per_pair


def _own_exponent(value: ScaledSum) -> Any:
    """The exponent of the scale, pair by pair; `SMALLEST` where all terms are zero."""
    # The size is zero only where every term is zero, and then any exponent would do.
    counts = value.size > 0
    if np.ndim(value.exponent) < np.ndim(counts):
        counts = counts.any(axis=-1)
    return library(counts, value.exponent).where(counts, value.exponent, SMALLEST)


def _in_scale(value: ScaledSum, exponent: Any) -> ScaledSum:
    """The value in the scale of another exponent, which is no smaller unless the value is zero."""
    # Only a value of zero may have a larger scale (see `add`). Any factor is right for the value,
    # and the derivative of the value takes its own, as far as that is a float.
    below = value.exponent - over_outputs(exponent, value.exponent)
    xp = library(below)
    most = np.finfo(xp.result_type(below)).maxexp / 2
    factor = power(below * 0.0 + 1.0, xp.minimum(below, most))
    factor = over_outputs(factor, value.mantissa)
    return ScaledSum(factor * value.mantissa, exponent, factor * value.size)


def split(number: Any) -> Scaled[Any]:
    """A number in scientific notation, with a mantissa near 1.

    Zero has an exponent below the exponent of any model.

    Example:
        >>> mantissa, exponent = split(6.0)
        >>> float(mantissa), float(exponent)
        (0.75, 3.0)
    """
    # Zero would have the exponent -inf, which sums cannot take.
    exponent = exponents_of(number).clip(SMALLEST)
    return Scaled(shifted(number, -exponent), exponent)


def scaled_terms(
    weighted: Iterable[tuple[Any, Any, Value]],
) -> Scaled[tuple[tuple[Any, Any, Value], ...]]:
    """A sum of `coefficient * 2 ** exponent * summand`, in scientific notation.

    Args:
        weighted: Triples (coefficient, exponent, summand); summands may be anything.

    Returns:
        The same triples with mantissas of the coefficients, the largest exponent being 0, and the
        exponent that all summands share.

    Example:
        >>> terms, exponent = scaled_terms([(6.0, 0, "a"), (1.0, -1, "b")])
        >>> [(float(c), float(e), name) for c, e, name in terms], float(exponent)
        ([(0.75, 0.0, 'a'), (0.5, -3.0, 'b')], 3.0)
    """
    terms = []
    for coefficient, own, summand in weighted:
        # A zero has no exponent. It takes that of one, so that a derivative with respect to the
        # coefficient, which is the summand, keeps a scale.
        exponent = exponents_of(coefficient)
        exponent = library(exponent).where(exponent == -np.inf, 0.0, exponent)
        terms.append((shifted(coefficient, -exponent), own + exponent, summand))
    largest = functools.reduce(larger, (exponent for _, exponent, _ in terms))
    return Scaled(tuple((c, e - largest, summand) for c, e, summand in terms), largest)


def power(mantissa: Any, exponent: Any) -> Any:
    """The product `mantissa * 2 ** exponent` in float64, even where the power is no float.

    Exponents need not be whole. Whole ones round nothing unless the product is no normal float;
    `shifted` takes these alone, and keeps the dtype of the array.

    Example:
        >>> float(power(np.float64(3.0), np.float64(-1.0)))
        1.5
    """
    xp = library(mantissa, exponent)
    whole = xp.rint(exponent)
    # The rest lies in [-1/2, 1/2]; its power is a float near one, exactly 1 for a whole exponent.
    rest = xp.exp2(exponent - whole)
    with np.errstate(over="ignore"):
        product = mantissa * rest
        # In the product itself: results may be large.
        is_own = isinstance(product, np.ndarray) and product.dtype.kind == "f"
        return shifted(product, whole, product if is_own else None)


def largest_of(values: Any) -> Any:
    """The largest absolute value of an array of NumPy, NaN where it has one.

    Of real numbers no second array of their size is made.

    Example:
        >>> [float(largest_of(np.array(x))) for x in ([1.0, -2.0], [3.0j])]
        [2.0, 3.0]
    """
    if np.iscomplexobj(values):
        return np.abs(values).max()
    return np.maximum(np.max(values), -np.min(values))


def beyond_float(values: Any, mantissas: Any) -> bool:
    """Whether `power` has made infinities of some mantissas, or zeros of all of them.

    Example:
        >>> beyond_float(np.array([0.0]), np.array([1.0])), beyond_float(np.ones(1), np.ones(1))
        (True, False)
    """
    # One number out of range makes the block unusable, while small ones beside a large one may
    # vanish.
    largest = largest_of(values)
    vanished = largest < np.finfo(np.float64).tiny and np.any(mantissas)
    return bool(np.isinf(largest) or vanished)


def larger(x: Any, y: Any) -> Any:
    """The larger of two arrays, entry by entry, traced or not.

    Example:
        >>> larger(np.array([1.0, 2.0]), np.array([2.0, 0.0]))
        array([2., 2.])
    """
    return library(x, y).maximum(x, y)


def exponents_of(array: Any) -> Any:
    """The integers e with `2^(e - 1) <= |x| < 2^e`, entry by entry, as floats; -inf for zero.

    Example:
        >>> exponents_of(np.array([0.0, 1.0, 3.0])).tolist()
        [-inf, 1.0, 2.0]
    """
    if library(array) is jnp:
        array = jax.lax.stop_gradient(array)
        return jnp.where(array == 0, -np.inf, _exponents_by_bits(array))
    array = np.asarray(array)
    return np.where(array == 0, -np.inf, np.frexp(array)[1])


def shifted(array: Any, by: Any, out: np.ndarray | None = None) -> Any:
    """The array times `2 ** by` for whole `by`, exact unless the result is no normal float.

    Args:
        array: Array of floats, whose dtype the result has; complex numbers on NumPy and JAX alike.
        by: Whole numbers, stored as floats, that broadcast against the array.
        out: Array of NumPy for the result, which may be the array itself.

    Example:
        >>> shifted(np.array([3.0]), np.float64(2.0)).tolist()
        [12.0]
    """
    on_host = not (isinstance(array, jax.Array) or isinstance(by, jax.Array))
    is_real = on_host and isinstance(array, np.ndarray | np.generic) and array.dtype.kind == "f"
    if is_real and by.ndim == 0:  # in a third of the time
        by = int(min(max(by, -_VANISHES), _VANISHES))  # in a tenth of the time of `clip`
        return np.ldexp(array, by, out=out) if by else array
    if on_host:
        by = by.clip(-_VANISHES, _VANISHES).astype("int32")
        if not by.any() and np.broadcast_shapes(np.shape(array), by.shape) == np.shape(array):
            return array
        if np.iscomplexobj(array):  # as two numbers that are shifted alike
            dtype = np.asarray(array).dtype
            pairs = np.asarray(array)[..., None].view(f"f{dtype.itemsize // 2}")
            return np.ldexp(pairs, by[..., None]).view(dtype)[..., 0][()]
        return np.ldexp(array, by, out=out)
    if isinstance(by, np.ndarray) and by.ndim == 0 and by == 0:  # nothing to trace
        return array
    array, by = jnp.asarray(array), _clamped(jnp.asarray(by), -_VANISHES, _VANISHES).astype("int32")
    first = by >> 1  # two steps, as the whole power may be no float
    return array * _two_to(first, array.dtype) * _two_to(by - first, array.dtype)


def scale_exponent(value: Any, power: int = 1, depth: int = 0) -> Any:
    """The exponent of the scale of a value, the power of two next to `max|value| ** (1 / power)`.

    A scale that is a power of two divides without rounding, and exponents of stages add up without
    rounding. Derivatives treat the scale as a constant: those of the divided value and of the
    exponent would cancel.

    Args:
        value: Array with `depth` stacked axes in front.
        power: Power of the scale in the value.
        depth: Number of stacked axes; each of their entries has a scale of its own.

    Returns:
        Whole numbers, stored as floats; 0 where all numbers are zero.

    Example:
        >>> scale_exponent(np.array([[3.0, 1.0], [0.0, 0.0]]), depth=1).tolist()
        [2.0, 0.0]
    """
    xp = jnp if isinstance(value, jax.Array) else np
    if xp is np and depth == 0 and value.dtype.kind == "f":  # the usual case, in half the time
        largest = max(np.maximum.reduce(value, None), -np.minimum.reduce(value, None))
        return np.float64(round(math.frexp(largest)[1] / power))
    axes = tuple(range(depth, value.ndim))
    if value.dtype.kind == "c":
        largest = abs(value).max(axis=axes)
    else:  # without an array of absolute values
        largest = xp.maximum(value.max(axis=axes), -value.min(axis=axes))
    # 2^(e - 1) <= largest < 2^e, and e = 0 for zero. After a division by 2^e the rule gives 0.
    if xp is np:
        return np.rint(np.frexp(largest)[1] / power)
    largest = jax.lax.stop_gradient(largest)
    exponents = jnp.where(largest == 0, 0, _exponents_by_bits(largest))
    # A float first: JAX divides integers of 32 bits in float32, and exponents go into all sums.
    return jnp.rint(exponents * 1.0 / power)


# `jnp.frexp`, `jnp.ldexp`, `jnp.clip` and `//` trace ten to twenty operations each, and every array
# of a model has its exponents read and is shifted: most of the first call of a gradient was the
# compiling of these. The bits of a float give the same numbers in four.


def _exponents_by_bits(array: Any) -> jax.Array:
    """The integers e with `2^(e - 1) <= |x| < 2^e` from the bits of floats; 0 for inf and NaN.

    XLA reads subnormal floats as zero, and zero has no exponent: callers replace what comes out.
    """
    about = jnp.finfo(array.dtype)
    bits = jax.lax.bitcast_convert_type(array, f"uint{about.bits}")
    # The field above the mantissa is e + maxexp - 2, and the sign stands above the field.
    largest = 2 * about.maxexp - 1
    field = ((bits >> about.nmant) & largest).astype("int32")
    return jnp.where(field == largest, 0, field - (about.maxexp - 2))


def _clamped(array: jax.Array, least: int, most: int) -> jax.Array:
    """The array with its entries between two whole numbers."""
    return jax.lax.clamp(np.array(least, array.dtype), array, np.array(most, array.dtype))


def _two_to(exponent: jax.Array, dtype: Any) -> jax.Array:
    """The float `2 ** exponent` from its bits, which is exact; clipped to normal floats."""
    about = jnp.finfo(dtype)
    # The bits of a float: an exponent field, shifted by its bias, above a mantissa field of zeros.
    biased = _clamped(exponent, about.minexp, about.maxexp - 1) + (about.maxexp - 1)
    bits = biased.astype(f"uint{about.bits}") << about.nmant
    return jax.lax.bitcast_convert_type(bits, about.dtype)
