"""Which matrix product multiplies two arrays. In: labels and sizes. Out: how their axes stand.

The product of two arrays is summed over labels that both have and the result has not. With those
that all three have as a batch it is a batch of matrix products,

    batch, left, summed   times   batch, summed, right   gives   batch, left, right

and every array whose axes stand in another order has to be copied first. A label of one argument
alone need not be a row or a column: it may join the batch, and the other argument is repeated
along it. Where the result has such a label in front of its batch, that is one copy, of the
repeated argument, instead of two, of the other argument and of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Labels = tuple[int, ...]


class MatrixProduct(NamedTuple):
    """A batch of matrix products of two arrays.

    Args:
        batch: Labels in front of both arguments and of the result.
        left: Rows, labels of the first argument.
        summed: Labels that are summed.
        right: Columns, labels of the second argument.
    """

    batch: Labels
    left: Labels
    summed: Labels
    right: Labels

    @property
    def orders(self) -> tuple[Labels, Labels]:
        """Axes of the two arguments."""
        first = (*self.batch, *self.left, *self.summed)
        second = (*self.batch, *self.summed, *self.right)
        return first, second

    @property
    def readings(self) -> Iterator[Labels]:
        """Axes of arguments that need not be copied; the second's matrices may stand transposed."""
        batch, _, summed, right = self
        yield from self.orders
        yield (*batch, *right, *summed)

    @property
    def result(self) -> Labels:
        """Axes of the result."""
        return (*self.batch, *self.left, *self.right)

    def reads_in_place(self, order: Labels, labels: Labels) -> bool:
        """Whether an argument with axes `labels` need not be copied to have the axes `order`.

        Its matrices may stand transposed.
        """
        batch = len(self.batch)
        rows = self.left if order == self.orders[0] else self.summed
        columns = order[batch + len(rows) :]
        return labels in (order, (*self.batch, *columns, *rows))


def matrix_product(
    first: Labels, second: Labels, output: Labels, sizes: Mapping[int, int]
) -> tuple[MatrixProduct, bool] | None:
    """The batch of matrix products that copies fewest entries.

    Args:
        first, second: Axes of the arguments; every label is on both or in the output.
        output: Axes wanted of the result.
        sizes: Of all labels.

    Returns:
        The product, and whether the arguments change places in it; None where there are no rows
        or no columns, or nothing is summed.

    Example:
        >>> matrix_product((0, 1, 2), (0, 2, 3), (0, 1, 3), {0: 9, 1: 5, 2: 5, 3: 5})
        (MatrixProduct(batch=(0,), left=(1,), summed=(2,), right=(3,)), False)
    """

    def copies(candidate: tuple[MatrixProduct, bool]) -> int:
        product, swapped = candidate
        arguments = (second, first) if swapped else (first, second)
        return copied_entries(product, arguments, output, sizes)

    return min(matrix_products(first, second, output), key=copies, default=None)


def matrix_products(
    first: Labels, second: Labels, output: Labels
) -> Iterator[tuple[MatrixProduct, bool]]:
    """All batches of matrix products that multiply two arrays.

    Args:
        first, second: Axes of the arguments.
        output: Axes wanted of the result.

    Yields:
        A product, and whether the arguments change places in it.
    """
    for swapped in (False, True):
        arguments = (second, first) if swapped else (first, second)
        for product in _products(*arguments, output):
            yield product, swapped


def copied_entries(
    product: MatrixProduct,
    arguments: tuple[Labels, Labels],
    output: Labels,
    sizes: Mapping[int, int],
) -> int:
    """Entries of the copies that a product needs of its arguments and of its result."""
    copies = [] if product.result == output else [output]
    for order, labels in zip(product.orders, arguments, strict=True):
        if not product.reads_in_place(order, labels):
            copies.append(order)
    return sum(math.prod(sizes[label] for label in labels) for labels in copies)


def _products(first: Labels, second: Labels, output: Labels) -> list[MatrixProduct]:
    """The two ways to choose a batch: what both have, or all that stands in front of a matrix."""
    shared = [label for label in first if label in second]
    summed = tuple(label for label in shared if label not in output)
    left = tuple(label for label in output if label in first and label not in second)
    right = tuple(label for label in output if label in second and label not in first)
    if not (summed and left and right):
        return []
    batch = tuple(label for label in output if label in shared)
    products = [MatrixProduct(batch, left, summed, right)]
    rows, columns = _matrix_at_the_end(output, left, right)
    if batch and rows and columns:  # one large product uses all cores, and is not cut into many
        leading = output[: len(output) - len(rows) - len(columns)]
        products.append(MatrixProduct(leading, rows, summed, columns))
    return products


def _matrix_at_the_end(output: Sequence[int], left: Labels, right: Labels) -> tuple[Labels, Labels]:
    """The last axes of the output, as far as they are rows followed by columns."""
    end = len(output)
    middle = end
    while middle and output[middle - 1] in right:
        middle -= 1
    start = middle
    while start and output[start - 1] in left:
        start -= 1
    return tuple(output[start:middle]), tuple(output[middle:end])
