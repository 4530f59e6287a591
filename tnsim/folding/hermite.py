"""Products of polynomials by their Hermite coefficients. In: series. Out: their product.

A polynomial of a standard normal z is a *series* of symmetric tensors, f = sum_n <a_n, He_n(z)>
with `He_n` the Hermite polynomials of order n, and `E[f g] = sum_n n! <a_n, b_n>`. For a product of
two polynomials, Wick's theorem pairs r coordinates of one with r of the other in all ways:

    <a, He_p> <b, He_q> = sum_r r! C(p, r) C(q, r) <Sym(a . b), He_(p + q - 2r)>,

where `a . b` sums over r shared coordinates. Nothing is subtracted, so no digit is lost: for two
quadratic forms P and Q these are `Sym(P (x) Q)`, `4 Sym(P Q)` and `2 tr(P Q)`. Terms of r = 0 alone
are the product of monomials, whose coefficients are symmetric tensors too.

A symmetric tensor is stored once per sorted index (`tensors.packed`). Its entry at I is the mean of
`(a . b)` over all ways to split I into p - r and q - r coordinates: matrix products make all
entries of `a . b`, of which as many are read as there are ways. Blocks of I by its largest
coordinate bound the size of these matrices and multiply nothing twice: either part has it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tnsim.models.arrays import library
from tnsim.tensors import packed

Series: TypeAlias = dict[int, Any]
"""Order -> coefficients (units, numbers) of several polynomials. What is missing is zero."""


class IndexBlock(NamedTuple):
    """The indices over `width` coordinates whose largest one is within [start, stop)."""

    width: int
    start: int
    stop: int

    def of(self, order: int) -> slice:
        """Where these indices stand in a tensor of this order."""
        return packed.block_slice(self.start, self.stop, order)

    def length(self, order: int) -> int:
        """Their number."""
        within = self.of(order)
        return within.stop - within.start


def whole(width: int) -> IndexBlock:
    """All indices.

    Example:
        >>> whole(3).length(2)
        6
    """
    return IndexBlock(width, 0, width)


class Term(NamedTuple):
    """One way to multiply two tensors: their orders, and how many coordinates they share."""

    left: int
    right: int
    shared: int

    @property
    def free(self) -> tuple[int, int]:
        """Coordinates of either tensor that are left."""
        return self.left - self.shared, self.right - self.shared

    @property
    def weight(self) -> float:
        """Ways to share, over ways to split the coordinates of the product."""
        ways = math.comb(sum(self.free), self.free[0])
        choices = math.comb(self.left, self.shared) * math.comb(self.right, self.shared)
        return math.factorial(self.shared) * choices / ways


def terms(left: Collection[int], right: Collection[int], pairs: bool) -> Iterator[Term]:
    """All terms of a product of series with these orders; without `pairs` nothing is shared.

    Example:
        Two linear maps without constants: a quadratic form and its trace.

        >>> [term.free for term in terms([1], [1], True)]
        [(1, 1), (0, 0)]
    """
    for p, q in itertools.product(left, right):
        for shared in range(min(p, q) + 1 if pairs else 1):
            yield Term(p, q, shared)


def mapped(weight: Any, series: Series) -> Series:
    """A linear map of several polynomials."""
    return {order: weight @ entries for order, entries in series.items()}


def plus(first: Series, second: Series) -> Series:
    """The sum, unit by unit."""
    missing = {order: entries for order, entries in second.items() if order not in first}
    both = {n: x + second[n] if n in second else x for n, x in first.items()}
    return both | missing


def within(series: Series, block: IndexBlock) -> Series:
    """The numbers of a block."""
    return {order: entries[:, block.of(order)] for order, entries in series.items()}


def product(left: Series, right: Series, down: Any, block: IndexBlock, pairs: bool) -> Series:
    """The numbers of `sum_k down[o, k] left_k right_k` in a block.

    Args:
        left, right: k polynomials each.
        down: (out, k), or None for the k products themselves.
        block: Which numbers of the product.
        pairs: Whether coordinates are shared: for Hermite polynomials, not for monomials.

    Returns:
        Order -> (out, numbers).

    Example:
        The square of `He_1(z) = z` is `He_2 + 1`.

        >>> z = {1: np.ones((1, 1))}
        >>> product(z, z, np.ones((1, 1)), whole(1), True)
        {2: array([[1.]]), 0: array([[1.]])}

    Source:
        The product formula of Wiener chaos, e.g. Nualart, The Malliavin Calculus, prop. 1.1.3.
    """
    matrices: dict[tuple[int, int], Any] = {}
    for term in terms(left, right, pairs):
        if sum(term.free) or not block.start:  # order 0 is one number, and in the first block
            matrix = _matrix(left[term.left], right[term.right], down, term, block)
            matrices[term.free] = matrices.get(term.free, 0.0) + matrix
    found: Series = {}
    for (rows, columns), matrix in matrices.items():
        first, *others = packed.splits(rows, columns, block.start, block.stop)
        read = _take(matrix, first, 0)
        for way in others:
            read = read + _take(matrix, way, 0)
        found = plus(found, {rows + columns: read.T})
    return found


def multiplications(
    left: Collection[int], right: Collection[int], k: int, out: int, width: int, pairs: bool
) -> int:
    """Scalar multiplications of `product`, all blocks together.

    Example:
        >>> multiplications([1], [1], k=5, out=2, width=3, pairs=True)
        115
    """
    number = 0
    for term in terms(left, right, pairs):
        rows, columns = (packed.count(width, order) for order in term.free)
        shared = packed.count(width, term.shared) if term.shared else 0
        number += k * rows * columns * (shared + out)
    return number


def _matrix(left: Any, right: Any, down: Any, term: Term, block: IndexBlock) -> Any:
    """`weight * (a . b)` summed over k as `packed.splits` reads it, (entries, out)."""
    # An index of the block is split in a part of a, the row, and a part of b, the column, and its
    # largest coordinate, at least `start`, is in one of them: in the row, beside any column below
    # `stop`; or in the column alone, beside a row below `start`.
    width, start, stop = block
    pieces = [_piece(left, right, down, term, block, IndexBlock(width, 0, stop))]
    if start:
        pieces.append(_piece(left, right, down, term, IndexBlock(width, 0, start), block))
    return library(left).concatenate(pieces) if start else pieces[0]


def _piece(
    left: Any, right: Any, down: Any, term: Term, rows: IndexBlock, columns: IndexBlock
) -> Any:
    """Some rows and columns of this matrix, (columns * rows, out).

    Without shared coordinates `down` is multiplied into one factor, and the sum over k is one
    matrix product; with them it comes last, since many entries of each k are summed before.
    """
    first = term.weight * _unpacked(left, term.free[0], term.shared, rows)
    second = _unpacked(right, term.free[1], term.shared, columns)
    k = len(first)
    if term.shared:
        second = second * _multiplicities(rows.width, term.shared, second.dtype)
    elif down is not None:
        first = first * down.T[:, None, :]
        return (second[:, :, 0].T @ first.reshape(k, -1)).reshape(-1, len(down))
    products = (second @ first.swapaxes(1, 2)).reshape(k, -1).T
    return products if down is None else products @ down.T


def _unpacked(entries: Any, own: int, shared: int, block: IndexBlock) -> Any:
    """(k, indices of the block, shared indices) of tensors (k, numbers)."""
    if not shared:
        return entries[:, block.of(own), None]
    at = packed.joined(own, shared, *block)
    return _take(entries, at.ravel(), 1).reshape(len(entries), *at.shape)


def _multiplicities(width: int, order: int, dtype: Any) -> np.ndarray:
    return packed.multiplicities(width, order).astype(dtype)


def _take(array: Any, at: np.ndarray, axis: int) -> Any:
    return library(array).take(array, at.astype(np.int32), axis=axis, mode="clip")
