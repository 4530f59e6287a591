"""Comparison of the phases of a matrix with the phases of behaviour.

Two things are compared: the steps that start a phase, and the order of pairs of checkpoints by
their likeness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

import tnsim
from benchmarks.paper.claims import Claim, Summary, at_least, at_most

if TYPE_CHECKING:
    import xarray as xr


class Seen(NamedTuple):
    """The best phases of a matrix, compared with the phases of behaviour.

    Attributes:
        starts: Labels of the checkpoints that start the matrix's own phases.
        score: Block score of these phases, by the formula of the paper's text.
        last: Block score by the formula of the paper's published figures; None where the last phase
            is a single checkpoint, for which the formula is empty.
        even: Block score of a run that drifts evenly, see `drifting_evenly`, at its own best
            phases.
        late: Mean distance, in checkpoints, between the starts of the matrix's phases and of
            behaviour's.
        rank: Spearman's coefficient with likeness in behaviour, over pairs of checkpoints.
    """

    starts: tuple[Any, ...]
    score: float
    last: float | None
    even: float
    late: float
    rank: float


def seen(matrix: xr.DataArray, behaviour: xr.DataArray, change_points: Sequence[int]) -> Seen:
    """Compare the best phases of a matrix with as many phases of behaviour.

    Args:
        matrix: Matrix of similarities.
        behaviour: Squared distances of the same checkpoints.
        change_points: Rows at which behaviour changes.

    Returns:
        Scores and differences.
    """
    phases = len(change_points) + 1
    own = tnsim.reading.segment(matrix, phases)
    even = drifting_evenly(matrix.values)
    apart = np.subtract(own.change_points, change_points)
    last = None
    # A last block of a single model has no pair within.
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


def claims_of(
    seen: Mapping[str, Seen],
    titles: Mapping[str, str],
    where: str,
    turns: str,
    authors: Mapping[str, float] | None = None,
    differs: str = "",
) -> list[Claim]:
    """Two claims for each matrix: that it has phases, and that its phases are behaviour's.

    Args:
        seen: Phases of the matrices, by name.
        titles: Titles of the matrices, by name.
        where: Place of the claims in the paper.
        turns: Words for the starts of behaviour's phases, such as "the accuracy turns".
        authors: Block scores of the authors' stored matrices.
        differs: Difference of the setting from the paper's.

    Returns:
        Claims `blocks-NAME` and `phases-NAME`.
    """
    rows = []
    for name, curve in seen.items():
        hyphened = name.replace("_", "-")
        count = len(curve.starts) + 1
        rows += [
            Claim(
                name=f"blocks-{hyphened}",
                text=f"Block score of {titles[name]} at its best {count} phases.",
                where=where,
                authors=(authors or {}).get(name),
                ours=(curve.score,),
                control=(curve.even,),
                excess=at_least(0.0),
                why="the control drifts as much, evenly, so it has no phases",
                differs=differs,
            ),
            Claim(
                name=f"phases-{hyphened}",
                text=f"The best {count} phases of {titles[name]} start where {turns}.",
                where=where,
                ours=(curve.late,),
                expected=at_most(1.0),
                why="checkpoints between the two, on average",
                differs=differs,
                note=f"they start at steps {_steps(curve.starts)}",
            ),
        ]
    return rows


def summary(seen: Mapping[str, Seen], titles: Mapping[str, str], turns: Sequence[Any]) -> Summary:
    """A table of all matrices side by side.

    Args:
        seen: Phases of the matrices, by name.
        titles: Titles of the matrices, by name.
        turns: Steps at which behaviour changes.

    Returns:
        A table with a row for each matrix: its block score by the formula of the paper's text, the
        score of the same drift without phases, the score by the formula of the published figures,
        the steps at which its phases start, their mean distance from behaviour's in checkpoints,
        and Spearman's coefficient with likeness in behaviour over pairs of checkpoints.
    """
    heads = (
        "measure",
        "block score",
        "even drift",
        "as published",
        "phases start at",
        "apart",
        "Spearman",
    )
    rows = []
    for name, curve in seen.items():
        last = "-" if curve.last is None else f"{curve.last:.3f}"
        rows.append(
            (
                titles[name],
                f"{curve.score:.3f}",
                f"{curve.even:.3f}",
                last,
                _steps(curve.starts),
                f"{curve.late:.1f}",
                f"{curve.rank:.3f}",
            )
        )
    title = f"Which measure sees the phases of behaviour, which start at steps {_steps(turns)}"
    return Summary(title, heads, tuple(rows))


def _steps(steps: Sequence[Any]) -> str:
    return ", ".join(map(str, steps))


def drifting_evenly(similarity: Float[np.ndarray, "K K"]) -> Float[np.ndarray, "K K"]:
    """The same drift without phases: similarity depends on the distance in checkpoints alone.

    Args:
        similarity: A matrix of a run.

    Returns:
        The matrix with every entry replaced by the mean of its diagonal.

    Example:
        >>> drifting_evenly(np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.5], [0.1, 0.5, 1.0]]))
        array([[1. , 0.7, 0.1],
               [0.7, 1. , 0.7],
               [0.1, 0.7, 1. ]])
    """
    count = len(similarity)
    # Similarity by distance along training alone is drift without phases.
    means = np.array([np.diagonal(similarity, apart).mean() for apart in range(count)])
    rows = np.arange(count)
    return means[np.abs(rows[:, None] - rows)]


def squared_distances(curves: Float[np.ndarray, "K curves"]) -> Float[np.ndarray, "K K"]:
    """The squared distances of checkpoints in some curves, each curve divided by its range.

    Args:
        curves: Values of K checkpoints.

    Returns:
        Distances (K, K), not negative, with zeros on the diagonal.

    Example:
        >>> squared_distances(np.array([[1.0, 0.0], [3.0, 0.0]])).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    ranges = np.ptp(curves, axis=0)
    # Every curve counts by its own range.
    scaled = curves / np.where(ranges > 0, ranges, 1.0)
    apart = scaled[:, None] - scaled[None, :]
    return np.square(apart).sum(axis=-1)
