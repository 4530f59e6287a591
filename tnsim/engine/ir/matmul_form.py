"""The batch of matrix products that computes a contraction of two arrays.

A contraction of two arrays is summed over the labels that both arguments have and the result
lacks. The labels that both arguments and the result have form a batch, and the contraction is a
batch of matrix products,

    batch, left, summed   times   batch, summed, right   gives   batch, left, right

An array whose axes stand in another order is copied first. A label that only a single argument has
need not be a row or a column: it may join the batch, and the other argument is repeated along it.
Where the result has such a label in front of its batch, this takes a single copy (of the repeated
argument) instead of two (of the other argument and of the result): products of a language model
copy two fifths of the entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from tnsim.engine.ir.program import Labels


class MatrixProduct(NamedTuple):
    """A batch of matrix products of two arrays.

    Args:
        batch: Leading labels of both arguments and of the result.
        left: Labels of the rows, which the first argument has.
        summed: Labels that are summed over.
        right: Labels of the columns, which the second argument has.
    """

    batch: Labels
    left: Labels
    summed: Labels
    right: Labels

    @property
    def orders(self) -> tuple[Labels, Labels]:
        """The axes that the product expects of its two arguments."""
        first = (*self.batch, *self.left, *self.summed)
        second = (*self.batch, *self.summed, *self.right)
        return first, second

    @property
    def result(self) -> Labels:
        """The axes of the result."""
        return (*self.batch, *self.left, *self.right)

    def reads_in_place(self, order: Labels, labels: Labels) -> bool:
        """Whether an argument with axes `labels` is read in the order `order` without a copy.

        The matrices of the argument may stand transposed.
        """
        # `order` is (batch, rows, columns) of this argument's matrices: (batch, left, summed) for
        # the first argument, (batch, summed, right) for the second. BLAS reads either of the two
        # transposed.
        batch = len(self.batch)
        rows = self.left if order == self.orders[0] else self.summed
        columns = order[batch + len(rows) :]
        return labels in (order, (*self.batch, *columns, *rows))


def matrix_product(
    first: Labels, second: Labels, output: Labels, sizes: Mapping[int, int]
) -> tuple[MatrixProduct, bool] | None:
    """The batch of matrix products that copies the fewest entries.

    Args:
        first, second: Axes of the arguments; every label is on both or in the output.
        output: Wanted axes of the result.
        sizes: Size of every label.

    Returns:
        The product, and whether the arguments change places in it; None where the contraction has
        no rows, no columns or no summed label.

    Example:
        >>> matrix_product((0, 1, 2), (0, 2, 3), (0, 1, 3), {0: 9, 1: 5, 2: 5, 3: 5})
        (MatrixProduct(batch=(0,), left=(1,), summed=(2,), right=(3,)), False)
    """
    return _cheapest_product(first, second, output, tuple(sizes.items()))


@lru_cache(maxsize=2**14)  # asked again by every pass and by the costs, for contractions much alike
def _cheapest_product(
    first: Labels, second: Labels, output: Labels, items: tuple[tuple[int, int], ...]
) -> tuple[MatrixProduct, bool] | None:
    """The product that copies the fewest entries, by pairs (label, size) of all labels."""
    sizes = dict(items)

    def copies(candidate: tuple[MatrixProduct, bool]) -> int:
        product, swapped = candidate
        arguments = (second, first) if swapped else (first, second)
        return copied_entries(product, arguments, output, sizes)

    # Each product exists twice, with rows and columns exchanged. One of the two may write the
    # output as it is wanted where the other one needs a copy of it.
    candidates = [
        (product, swapped)
        for swapped, pair in ((False, (first, second)), (True, (second, first)))
        for product in _possible_products(*pair, output)
    ]
    return min(candidates, key=copies, default=None)


def copied_entries(
    product: MatrixProduct,
    arguments: tuple[Labels, Labels],
    output: Labels,
    sizes: Mapping[int, int],
) -> int:
    """Entries of the copies that a product needs of its arguments and of its result."""
    # A copy of the result counts as one of an argument: each entry is read and written once.
    copies = [] if product.result == output else [output]
    for order, labels in zip(product.orders, arguments, strict=True):
        if not product.reads_in_place(order, labels):
            copies.append(order)
    return sum(math.prod(sizes[label] for label in labels) for labels in copies)


def _possible_products(first: Labels, second: Labels, output: Labels) -> list[MatrixProduct]:
    """The products of the two possible batches.

    The batch holds either the labels that both arguments and the output have, or all leading labels
    of the output up to a last matrix of rows and columns.
    """
    shared = [label for label in first if label in second]
    summed = tuple(label for label in shared if label not in output)
    # In the order of the output, so that rows and columns can be written without a copy.
    left = tuple(label for label in output if label in first and label not in second)
    right = tuple(label for label in output if label in second and label not in first)
    # Otherwise the contraction is a product entry by entry, or of a matrix and a vector, and a
    # batch of matrix products would have matrices of one row or column.
    if not (summed and left and right):
        return []
    batch = tuple(label for label in output if label in shared)
    products = [MatrixProduct(batch, left, summed, right)]
    rows, columns = _matrix_at_the_end(output, left, right)
    # Without a batch there is one large product, which uses all cores and is not cut into many.
    if batch and rows and columns:
        leading = output[: len(output) - len(rows) - len(columns)]
        products.append(MatrixProduct(leading, rows, summed, columns))
    return products


def _matrix_at_the_end(output: Sequence[int], left: Labels, right: Labels) -> tuple[Labels, Labels]:
    """The longest end of the output that consists of rows followed by columns."""
    # From the end backwards: columns as far as they go, then rows in front of them. All labels
    # before that can join the batch, since a batch is any prefix of the output.
    end = len(output)
    middle = end
    while middle and output[middle - 1] in right:
        middle -= 1
    start = middle
    while start and output[start - 1] in left:
        start -= 1
    return tuple(output[start:middle]), tuple(output[middle:end])


class HostProduct(NamedTuple):
    """How NumPy contracts two arrays that stand in the order of their labels.

    Args:
        product: Batch of matrix products, possibly with no rows or no columns.
        swapped: Whether the arguments change places in it.
        is_read: Whether each argument of the product, after the swap, is read without a copy.
        is_written: Whether the result is written as it is wanted, without a copy.
    """

    product: MatrixProduct
    swapped: bool
    is_read: tuple[bool, bool]
    is_written: bool

    def copied(self, sizes: Mapping[int, int], labels: tuple[Labels, Labels]) -> int:
        """Entries of all copies of arguments and of the result."""
        arguments = labels[::-1] if self.swapped else labels
        copies = [own for own, read in zip(arguments, self.is_read, strict=True) if not read]
        if not self.is_written:
            copies.append(self.product.result)
        return sum(math.prod(sizes[label] for label in own) for own in copies)


def host_product(
    first: Labels, second: Labels, output: Labels, sizes: Mapping[int, int]
) -> HostProduct | None:
    """The matrix products by which NumPy contracts two arrays.

    Axes of the batch may stand anywhere in an argument, as `matmul` takes strides for them. Rows
    and columns are one axis each, so the labels of either must follow one another, and BLAS needs
    neighbouring entries along one of the two.

    Args:
        first, second: Axes of the arguments.
        output: Wanted axes of the result.
        sizes: Size of every label.

    Returns:
        The products; None where the contraction is computed entry by entry, as nothing is summed,
        or only sums of a batch are wanted.

    Example:
        >>> found = host_product((1, 0, 2), (0, 2, 3), (0, 1, 3), {0: 9, 1: 5, 2: 5, 3: 5})
        >>> found.product.batch, found.is_read, found.is_written
        ((0,), (True, True), True)
    """
    return _host_product(first, second, output, tuple(sizes.items()))


@lru_cache(maxsize=2**14)
def _host_product(
    first: Labels, second: Labels, output: Labels, items: tuple[tuple[int, int], ...]
) -> HostProduct | None:
    """The products of `host_product`, by pairs (label, size) of all labels."""
    chosen = _cheapest_product(first, second, output, items)
    if chosen is None:
        summed = tuple(label for label in first if label in second and label not in output)
        left = tuple(label for label in output if label not in second)
        right = tuple(label for label in output if label not in first)
        batch = tuple(label for label in output if label in first and label in second)
        if not summed or (batch and not left and not right):
            return None
        chosen = MatrixProduct(batch, left, summed, right), False
    product, swapped = chosen
    x, y = (second, first) if swapped else (first, second)
    is_read = (
        _is_strided(x, product.left, product.summed),
        _is_strided(y, product.summed, product.right),
    )
    return HostProduct(product, swapped, is_read, product.result == output)


def _is_strided(labels: Labels, rows: Labels, columns: Labels) -> bool:
    """Whether an array has rows and columns as one axis each, one of them of neighbours."""
    for group in (rows, columns):
        if group:
            start = labels.index(group[0])
            if labels[start : start + len(group)] != group:
                return False
    return labels[-1] in rows or labels[-1] in columns
