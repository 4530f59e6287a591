"""Correlations of two matrices over the same models, which tell how far two measures agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.analysis.chords import import_scipy
from tnsim.analysis.matrices import is_symmetric, matrix
from tnsim.errors import ResultError
from tnsim.options import checked

if TYPE_CHECKING:
    from tnsim.analysis.matrices import Matrix

_FEWEST = 3
"""Least number of pairs, as two points always lie on a line."""


class Correlation(NamedTuple):
    """How far two matrices rise together, over pairs of different models.

    Attributes:
        pearson: Correlation of the values, from -1 to 1; 1 where they lie on a rising line.
        spearman: Correlation of the ranks, from -1 to 1; 1 where the values are ordered alike.
        pairs: Number of pairs.

    Example:
        >>> Correlation(pearson=0.99, spearman=1.0, pairs=10).pairs
        10
    """

    pearson: float
    spearman: float
    pairs: int


@checked
def correlation(first: Matrix, second: Matrix) -> Correlation:
    """Pearson's and Spearman's coefficients of two matrices over the same models.

    Where both sides are the same models, each pair counts once, and a model with itself not at
    all. Pairs that share a model are not independent, so no p-value is given.

    Args:
        first: A result, any of its matrices, or an array (A, B).
        second: Another result, matrix or array over the same models.

    Returns:
        Both coefficients, and the number of pairs.

    Raises:
        ResultError: The matrices are not finite or not over the same models, there are fewer than
            three pairs, or all entries of a side are equal.
        MissingExtra: xarray or scipy is not installed.

    Example:
        >>> import numpy as np
        >>> similarity = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.5], [0.1, 0.5, 1.0]])
        >>> found = correlation(similarity, similarity**3)
        >>> round(found.pearson, 2), round(found.spearman, 2), found.pairs
        (0.93, 1.0, 3)

    Source:
        The paper, appendix E: tensor similarity against behaviour, over all pairs of checkpoints.
    """
    x, y = paired_entries(first, second)
    stats = import_scipy("a correlation").stats
    pearson = float(stats.pearsonr(x, y).statistic)
    spearman = float(stats.spearmanr(x, y).statistic)
    return Correlation(pearson, spearman, len(x))


def paired_entries(
    first: Matrix, second: Matrix
) -> tuple[Float[np.ndarray, " pairs"], Float[np.ndarray, " pairs"]]:
    """Entries of two matrices over the same models, pair by pair.

    Args:
        first: A result, any of its matrices, or an array (A, B).
        second: Another result, matrix or array over the same models.

    Returns:
        Two arrays (pairs,), in the units of the matrices: all entries, or the entries above the
        diagonal where both sides are the same models.

    Raises:
        ResultError: The matrices are not finite or not over the same models, there are fewer than
            three pairs, or all entries of a side are equal.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> similarity = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.5], [0.1, 0.5, 1.0]])
        >>> paired_entries(similarity, 1 - similarity)[1].round(3).tolist()
        [0.1, 0.9, 0.5]
    """
    tables = [matrix(first), matrix(second)]
    for axis in "ab":
        labels, others = (table[axis].values for table in tables)
        if not np.array_equal(labels, others):
            raise ResultError(
                f"two matrices are compared over the same models; along {axis} the first has "
                f"{label_range(labels)}, the second {label_range(others)}"
            )
    values = [table.values for table in tables]
    rows, columns = values[0].shape
    chosen = np.indices((rows, columns)).reshape(2, -1)
    one_set = np.array_equal(tables[0]["a"], tables[0]["b"])
    # Either triangle says the same, and pairs must not count twice.
    if one_set and all(map(is_symmetric, values)):
        chosen = np.array(np.triu_indices(rows, 1))
    x, y = (table[tuple(chosen)] for table in values)
    if len(x) < _FEWEST:
        raise ResultError(f"a correlation needs at least {_FEWEST} pairs of models, found {len(x)}")
    for table, entries in zip(tables, (x, y), strict=True):
        # A constant has no deviation to divide by.
        if np.ptp(entries) == 0:
            raise ResultError(
                f"all entries of {table.name or 'a matrix'} are {entries[0]:.6g}: "
                "its correlation with anything is undefined"
            )
    return x, y


def label_range(labels: np.ndarray) -> str:
    """The number of labels with the first and the last, for a message.

    Args:
        labels: Labels of models.

    Example:
        >>> label_range(np.array([0, 50, 100]))
        '3 models, 0 to 100'
    """
    return f"{len(labels)} models, {labels[0]} to {labels[-1]}"
