"""Products of matrices to more bits than a float has.

Matrices are cut into slices of few bits, so that products of slices are exact, and the products are
added up with what rounding leaves out of every sum.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.scaled import exponents_of, library, shifted

_MORE_BITS = 31
"""Bits beyond those of a float to which products are computed."""
_BLOCK = 1024
"""Rows and columns of a product in NumPy that are computed at once."""


def exact_product(a: Any, b: Any) -> tuple[Any, Any]:
    """The product of two matrices as a sum of two, with 31 bits more than a float for large terms.

    Both matrices are cut into slices of so few bits that products of slices are exact. The sum is a
    function with derivatives inside a JAX trace.

    Args:
        a: Matrix (rows, inner).
        b: Matrix (inner, columns).

    Returns:
        The product, rounded to floats, and the rest.

    Example:
        >>> product, rest = exact_product(np.array([[1.0, 2.0**-60]]), np.ones((2, 1)))
        >>> float(product[0, 0]), float(rest[0, 0]) == 2.0**-60
        (1.0, True)

    Source:
        Ozaki, Ogita, Oishi and Rump, Error-free transformations of matrix multiplication, 2012.
    """
    if library(a, b) is np:
        return _in_blocks(a, b)
    with jax.default_matmul_precision("highest"):
        known, rest = _sliced_product(*map(jax.lax.stop_gradient, (a, b)))
        # Slices have no derivative of use; that of the plain product cancels no further than
        # products of rounded numbers do.
        plain = a @ b
    return plain + jax.lax.stop_gradient(known - plain), rest


def _in_blocks(a: Any, b: Any) -> tuple[Any, Any]:
    """The product by blocks of its rows and columns, whose slices take little memory: no bit of a
    product depends on other rows and columns."""
    shape = len(a), b.shape[1]
    if max(shape) <= _BLOCK:
        return _sliced_product(a, b)
    product, rest = np.empty(shape, a.dtype), np.empty(shape, a.dtype)
    starts = (range(0, size, _BLOCK) for size in shape)
    for row, column in itertools.product(*starts):
        rows, columns = slice(row, row + _BLOCK), slice(column, column + _BLOCK)
        product[rows, columns], rest[rows, columns] = _sliced_product(a[rows], b[:, columns])
    return product, rest


def _sliced_product(a: Any, b: Any) -> tuple[Any, Any]:
    """The product, in the library of the arrays."""
    xp = library(a, b)
    # A sum of n products of two numbers of b bits has 2 b + log2(n) bits, which must fit into the
    # mantissa.
    mantissa = xp.finfo(a.dtype).nmant + 1
    bits = (mantissa - math.ceil(math.log2(a.shape[1]))) // 2
    count = math.ceil((mantissa + _MORE_BITS) / bits)
    lefts, rights = _slices(a, bits, count), _slices(b.T, bits, count)
    # Slices k and n - k multiply to order n; orders beyond the wanted bits are left out, and the
    # smallest products come first.
    places = [(k, n - k) for n in reversed(range(count)) for k in range(n + 1)]
    zero = xp.zeros((len(a), b.shape[1]), a.dtype)
    if xp is np:
        terms = (lefts[k] @ rights[n].T for k, n in places)
        total, rest = functools.reduce(_added, terms, (zero, zero))
    else:  # a loop, which compiles in a fraction of the time
        of_left, of_right = np.array(places).T
        terms = lefts[of_left] @ rights[of_right].swapaxes(1, 2)
        (total, rest), _ = jax.lax.scan(lambda x, y: (_added(x, y), None), (zero, zero), terms)
    both = total + rest
    rest = rest - (both - total)
    return both, rest


def _added(summed: tuple[Any, Any], term: Any) -> tuple[Any, Any]:
    """A sum with one term more, and what rounding has left out (Knuth, section 4.2.2)."""
    # `part` is the summand as it arrived in the sum; what is missing of either summand is exact in
    # floats.
    total, rest = summed
    both = total + term
    part = both - total
    return both, rest + ((total - (both - part)) + (term - part))


def _slices(matrix: Any, bits: int, count: int) -> Float[np.ndarray, "slices rows columns"]:
    """Matrices of few bits relative to the largest entry of each row, which add up to a matrix."""
    xp = library(matrix)
    exponent = exponents_of(abs(matrix).max(axis=1, keepdims=True))
    about = xp.finfo(matrix.dtype)
    least = about.minexp if xp is jnp else about.minexp - about.nmant  # XLA has no subnormals
    # Slice k is a multiple of 2^(exponent - bits k), so it has at most `bits` bits.
    powers = exponent - bits * np.arange(1, count + 1)[:, None, None]
    units = shifted(xp.ones((), matrix.dtype), xp.maximum(powers, least))

    def cut(matrix: Any, unit: Any) -> tuple[Any, Any]:
        """The rest of a matrix, and its multiple of a unit."""
        multiple = xp.rint(matrix / unit) * unit
        return matrix - multiple, multiple

    if xp is jnp:
        return jax.lax.scan(cut, matrix, units)[1]
    slices = []
    for unit in units:
        matrix, multiple = cut(matrix, unit)
        slices.append(multiple)
    return np.stack(slices)
