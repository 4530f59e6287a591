"""Whether a matrix shows the phases that behaviour shows. In: matrices. Out: `Seen`.

Compared are the steps that start a phase, and the order in which pairs of checkpoints are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

import tnsim

if TYPE_CHECKING:
    import xarray as xr


class Seen(NamedTuple):
    """What the best phases of a matrix have to do with those of behaviour.

    Attributes:
        starts: labels of the checkpoints that start the matrix's own phases.
        score: block score of these, by the formula of the paper's text.
        last: the same by that of its published figures; None where the last phase is a single
            checkpoint, of which it says nothing.
        even: the score of a run that drifts evenly, see `drifting_evenly`, at its own best phases.
        late: checkpoints by which its phases start later than those of behaviour, on average
            without sign.
        rank: Spearman's coefficient with likeness in behaviour, over pairs of checkpoints.
    """

    starts: tuple[Any, ...]
    score: float
    last: float | None
    even: float
    late: float
    rank: float


def seen(matrix: xr.DataArray, behaviour: xr.DataArray, change_points: Sequence[int]) -> Seen:
    """Compare the best phases of a matrix with as many of behaviour.

    Args:
        matrix: of similarities.
        behaviour: squared distances of the same checkpoints.
        change_points: rows at which behaviour changes.

    Returns:
        Scores and differences.
    """
    phases = len(change_points) + 1
    own = tnsim.reading.segment(matrix, phases)
    even = drifting_evenly(matrix.values)
    apart = np.subtract(own.change_points, change_points)
    last = None
    if own.change_points[-1] < len(even) - 1:
        last = tnsim.reading.last_block_score(matrix, own.change_points)
    return Seen(
        starts=own.labels,
        score=tnsim.reading.block_score(matrix, own.change_points),
        last=last,
        even=tnsim.reading.block_score(even, tnsim.reading.segment(even, phases).change_points),
        late=float(np.abs(apart).mean()),
        rank=tnsim.reading.correlation(matrix, -behaviour).spearman,
    )


def published_score(one: Seen) -> str:
    """What the formula of the published figures gives, in words for a note.

    Args:
        one: of a matrix.

    Returns:
        A part of a sentence.
    """
    if one.last is None:
        return "the formula of the published figures needs a last phase of two or more"
    return f"by the formula of the published figures {one.last:.3f}"


def drifting_evenly(similarity: Float[np.ndarray, "K K"]) -> Float[np.ndarray, "K K"]:
    """The same drift without phases: models as many checkpoints apart are alike to one degree.

    Args:
        similarity: a matrix of a run.

    Returns:
        The matrix with every entry replaced by the mean of its diagonal.

    Example:
        >>> drifting_evenly(np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.5], [0.1, 0.5, 1.0]]))
        array([[1. , 0.7, 0.1],
               [0.7, 1. , 0.7],
               [0.1, 0.7, 1. ]])
    """
    count = len(similarity)
    means = np.array([np.diagonal(similarity, apart).mean() for apart in range(count)])
    rows = np.arange(count)
    return means[np.abs(rows[:, None] - rows)]


def squared_distances(curves: Float[np.ndarray, "K curves"]) -> Float[np.ndarray, "K K"]:
    """Squared distances of checkpoints in what some curves say of them, each over its own range.

    Args:
        curves: values of K checkpoints.

    Returns:
        (K, K), not negative, with zeros on its diagonal.

    Example:
        >>> squared_distances(np.array([[1.0, 0.0], [3.0, 0.0]])).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    ranges = np.ptp(curves, axis=0)
    scaled = curves / np.where(ranges > 0, ranges, 1.0)
    apart = scaled[:, None] - scaled[None, :]
    return np.square(apart).sum(axis=-1)
