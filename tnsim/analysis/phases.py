"""Phases of a training run, found in a matrix of similarities.

Rows follow training. A phase is a contiguous range of rows, and a change point is the row at which
a new phase starts, so change points (5, 14) of 18 rows are the phases 0-4, 5-13 and 14-17.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tnsim.analysis.chords import squared_distances
from tnsim.errors import ResultError
from tnsim.options import checked

if TYPE_CHECKING:
    from tnsim.analysis.matrices import Matrix


class Segmentation(NamedTuple):
    """A division into contiguous phases.

    Attributes:
        change_points: Rows at which a new phase starts, without row 0.
        labels: Labels of the models in these rows.
        cost: Scatter: the sum of the squared distances of the models from the mean of their phase.

    Example:
        >>> import numpy as np
        >>> segment(np.eye(2), 2)
        Segmentation(change_points=(1,), labels=(1,), cost=0.0)
    """

    change_points: tuple[int, ...]
    labels: tuple[Any, ...]
    cost: float

    def __str__(self) -> str:
        """The division in words.

        Example:
            >>> str(Segmentation((1, 3), (100, 300), 0.5))
            '3 phases, changed here: 100, 300'
        """
        here = f", changed here: {', '.join(map(str, self.labels))}" if self.labels else ""
        return f"{len(self.labels) + 1} phases{here}"


@checked
def phase_of_rows(change_points: Sequence[int], count: int) -> Int[np.ndarray, " count"]:
    """The phase of every row.

    Args:
        change_points: Rows at which phases start, without row 0.
        count: The number of rows.

    Returns:
        (count,), integers from 0.

    Raises:
        ResultError: Change points do not rise within 1 to count - 1.

    Example:
        >>> phase_of_rows([2, 3], 5).tolist()
        [0, 0, 1, 2, 2]
    """
    bounds = np.array([0, *change_points, count])
    sizes = np.diff(bounds)
    if (sizes < 1).any():
        raise ResultError(
            f"change points must rise from 1 to {count - 1}, found {list(change_points)}"
        )
    return np.repeat(np.arange(len(sizes)), sizes)


@checked(own="phases")
def segment(similarity: Matrix, phases: int) -> Segmentation:
    """The best division into contiguous phases, exactly, in O(K^2 phases) (kernel change points).

    Minimises the scatter of the models, as vectors v_i, around the mean of their phase. Squared
    distances `D_ij = |v_i - v_j|^2` give the scatter without the vectors, for a phase P of n models
    as

        `sum over i in P of |v_i - mean|^2  =  sum over i, j in P of D_ij / (2 n)`.

    Cosines belong to unit vectors, with D = 2 - 2 cos. A divergence that vanishes between a model
    and itself is taken for D; the Jensen-Shannon divergence is a squared distance.

    Where several divisions are equally good, later phases are longest.

    Args:
        similarity: A result, its matrix of cosines or divergences, or an array (K, K).
        phases: Number of phases, from 1 to K.

    Returns:
        `phases` - 1 change points, their labels, and the scatter.

    Raises:
        ResultError: `phases` is out of range, or the matrix is not finite, square and symmetric
            with ones, or for divergences zeros, on its diagonal.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> run = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.1], [0.0, 0.1, 1.0]])
        >>> change_points, labels, cost = segment(run, 2)
        >>> change_points, round(cost, 3)
        ((2,), 0.1)

    Source:
        Harchaoui and Cappe 2007, "Retrospective multiple change-point estimation with kernels";
        Fuglede and Topsoe 2004, "Jensen-Shannon divergence and Hilbert space embedding".
    """
    return segmentations(similarity, phases)[-1]


@checked(own="up_to")
def segmentations(similarity: Matrix, up_to: int) -> list[Segmentation]:
    """The best divisions into 1, 2, ..., `up_to` phases, from a single table; see `segment`.

    Args:
        similarity: A result, its matrix of cosines or divergences, or an array (K, K).
        up_to: The largest number of phases, from 1 to K.

    Returns:
        `up_to` divisions. For distances of vectors, the costs never rise with the number of phases.

    Raises:
        ResultError: `up_to` is out of range, or the matrix is not finite, square and symmetric with
            ones, or for divergences zeros, on its diagonal.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> for division in segmentations(np.eye(3), 3):
        ...     print(division.change_points, round(division.cost, 3))
        () 2.0
        (1,) 1.0
        (1, 2) 0.0
    """
    squared = squared_distances(similarity)
    count = len(squared)
    if not (isinstance(up_to, Integral) and 1 <= up_to <= count):
        raise ResultError(
            f"{count} models can be divided into 1 to {count} phases, not into {up_to!r}"
        )
    labels = squared["a"].values.tolist()
    return [
        Segmentation(change_points, tuple(labels[row] for row in change_points), cost)
        for change_points, cost in _best_divisions(squared.values, up_to)
    ]


def _best_divisions(
    squared: Float[np.ndarray, "K K"], up_to: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Change points and cost of the best 1, 2, ..., `up_to` phases, by dynamic programming.

    Let best_p(e) be the least cost of the first e rows in p phases. The last phase starts at some
    row s, and the rows before s have their best division into p - 1 phases:

        best_1(e)  =  scatter(0, e)
        best_p(e)  =  min over s of  best_{p-1}(s) + scatter(s, e)

    The minimising s are kept for every p and e, and read back from the last row to the first.
    """
    scatter = _scatter_table(squared)
    count = len(squared)
    best = scatter[0]
    last_starts: list[Int[np.ndarray, " K+1"]] = []
    yield (), float(best[count])
    for _ in range(2, up_to + 1):
        # Entry (s, e): the first s rows in fewer phases, and rows s to e - 1 as the last phase.
        cost = best[:, None] + scatter
        # The first minimum, so that later phases are longest.
        last_starts.append(cost.argmin(0))
        best = cost.min(0)
        yield _read_back(last_starts, count), float(best[count])


def _read_back(last_starts: Sequence[Int[np.ndarray, " K+1"]], end: int) -> tuple[int, ...]:
    """Change points of the first `end` rows, found from the last to the first."""
    points = []
    for start in reversed(last_starts):
        end = int(start[end])
        points.append(end)
    return tuple(reversed(points))


def _scatter_table(squared: Float[np.ndarray, "K K"]) -> Float[np.ndarray, "K+1 K+1"]:
    """The scatter of rows s to e - 1 around their mean in entry (s, e), infinite unless s < e.

    With C(i, j) the sum of the upper left i x j squared distances, a diagonal block has the sum

        C(e, e) - C(s, e) - C(e, s) + C(s, s).
    """
    count = len(squared)
    sums = np.zeros((count + 1, count + 1))
    # A frame of zeros stands for blocks without rows.
    sums[1:, 1:] = squared.cumsum(0).cumsum(1)
    corners = np.diag(sums)
    blocks = corners[None, :] - sums - sums.T + corners[:, None]
    # Rows s to e - 1 are e - s models.
    size = np.arange(count + 1) - np.arange(count + 1)[:, None]
    scatter = blocks / (2 * np.maximum(size, 1))
    return np.where(size > 0, scatter, np.inf)
