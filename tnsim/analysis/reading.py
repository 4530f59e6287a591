"""Readers of a pairwise run: scores, phases, paths and points from a result or its matrices.

Every function takes a result (of which it reads `similarity`), any of its (a, b) matrices, such as
`result.weight_cosine` or `result.slices.sel(output=9)`, or a plain array. Rows follow training.

    segment, segmentations, phase_of_rows                 phases of a run
    block_score, last_block_score, group_score            how sharp a division is
    against_control                                       comparison with training on unchanged
    trajectory                                            similarity to a model along a run
    correlation                                           how far two matrices agree
    mds, dendrogram, spectrum                             models as points

Every function raises `ResultError` for a matrix that is not finite or, where all pairs of the same
set of models are needed, not square and symmetric.

Scores are computed over blocks, the phases into which change points divide a run (see `phases`).
The paper's text and its published figures score them by two formulas; both are here, `block_score`
and `last_block_score`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tnsim.analysis.chords import Embedding, dendrogram, mds, spectrum
from tnsim.analysis.correlations import Correlation, correlation, label_range
from tnsim.analysis.matrices import TOLERANCE, matrix, place_of, square
from tnsim.analysis.phases import Segmentation, phase_of_rows, segment, segmentations
from tnsim.errors import ResultError
from tnsim.options import checked, shown

if TYPE_CHECKING:
    import xarray as xr

    from tnsim.analysis.matrices import Matrix

__all__ = [
    "AgainstControl",
    "Correlation",
    "Embedding",
    "Segmentation",
    "against_control",
    "block_score",
    "correlation",
    "dendrogram",
    "group_score",
    "last_block_score",
    "mds",
    "phase_of_rows",
    "segment",
    "segmentations",
    "spectrum",
    "trajectory",
]


class AgainstControl(NamedTuple):
    """The scores of a run and of its control.

    Attributes:
        score: Score of the run, in the unit of its matrix.
        control: Score of the control.
        difference: Score of the run minus score of the control.

    Example:
        >>> AgainstControl(score=0.75, control=0.5, difference=0.25).difference
        0.25
    """

    score: float
    control: float
    difference: float


@checked
def block_score(similarity: Matrix, change_points: Sequence[int]) -> float:
    """Delta: mean similarity within blocks minus mean across blocks; higher is a sharper split.

        Delta  =  mean of K_ij over i != j in a block  -  mean of K_ij over i, j in different
        blocks

    A model always equals itself, whatever its block, so pairs are of different models.

    Args:
        similarity: A result, any of its matrices, or an array (K, K).
        change_points: Rows at which blocks start, without row 0.

    Returns:
        Delta, in the unit of the matrix: for similarities from -2 to 2.

    Raises:
        ResultError: No pair lies within a block or none across, change points do not rise within
            1 to K - 1, or the matrix is not finite, square and symmetric.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> similarity = np.array([[1.0, 0.8, 0.1], [0.8, 1.0, 0.3], [0.1, 0.3, 1.0]])
        >>> round(block_score(similarity, [2]), 3)  # 0.8 - (0.1 + 0.3) / 2
        0.6

    Source:
        The paper, section 3.3, as its text defines it.
    """
    table = square(similarity)
    return group_score(table, phase_of_rows(change_points, len(table)))


@checked
def group_score(similarity: Matrix, groups: Sequence[Any] | np.ndarray) -> float:
    """Mean similarity within groups minus mean across groups, of different models.

    This is `block_score` for groups of models that need not follow each other.

    Args:
        similarity: A result, any of its matrices, or an array (K, K).
        groups: K names or numbers; models with equal entries are a group.

    Returns:
        The difference of the means, in the unit of the matrix.

    Raises:
        ResultError: No pair lies within a group or none across groups, the numbers of entries in
            `groups` and of models differ, or the matrix is not finite, square and symmetric.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> similarity = np.array([[1.0, 0.1, 0.8], [0.1, 1.0, 0.3], [0.8, 0.3, 1.0]])
        >>> round(group_score(similarity, ["with", "without", "with"]), 3)
        0.6

    Source:
        The paper, section 3.1: stages of training with and without a digit.
    """
    values = square(similarity).values
    # Names become numbers, which compare fast in all pairs.
    group = np.arange(0)
    with contextlib.suppress(TypeError, ValueError):  # lists of several lengths
        _, group = np.unique(np.asarray(groups), return_inverse=True)
    if group.shape != (len(values),):
        found = f"{group.size} groups" if group.ndim == 1 and group.size else shown(groups)
        raise ResultError(f"{len(values)} models need a group each, found {found}")
    same = group[:, None] == group
    within = same & ~np.eye(len(values), dtype=bool)
    return _mean_contrast(values, within, ~same, group)


@checked
def last_block_score(similarity: Matrix, change_points: Sequence[int]) -> float:
    """Mean similarity within the last block minus mean across it and all before; higher is sharper.

        Delta  =  mean of K_ij over i != j in the last block  -  mean of K_ij over i in the last
        block, j before it

    Similarities among the models before the last block do not enter, so a run that merely slows
    down in training scores high without learning anything else: compare it with a control.

    Args:
        similarity: A result, any of its matrices, or an array (K, K).
        change_points: Rows at which blocks start, without row 0; only the last counts.

    Returns:
        Delta, in the unit of the matrix: for similarities from -2 to 2.

    Raises:
        ResultError: The last block is a single model, change points do not rise within 1 to K - 1,
            or the matrix is not finite, square and symmetric.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> similarity = np.array([[1.0, 0.1, 0.3], [0.1, 1.0, 0.8], [0.3, 0.8, 1.0]])
        >>> round(last_block_score(similarity, [1]), 3)  # 0.8 - (0.1 + 0.3) / 2
        0.6

    Source:
        The paper's published scores of backdoors, figure 1 and section 3.3, as its code computes
        them.
    """
    values = square(similarity).values
    block = phase_of_rows(change_points, len(values))
    last = block == block[-1]
    within = last[:, None] & last & ~np.eye(len(values), dtype=bool)
    return _mean_contrast(values, within, last[:, None] & ~last, block)


def _mean_contrast(
    values: Float[np.ndarray, "K K"],
    within: Bool[np.ndarray, "K K"],
    across: Bool[np.ndarray, "K K"],
    block: Int[np.ndarray, " K"],
) -> float:
    """The mean over the pairs within blocks minus the mean over the pairs across blocks."""
    if not within.any() or not across.any():
        sizes = np.bincount(block).tolist()
        raise ResultError(
            f"a block score needs pairs within blocks and across, found blocks of {sizes} models"
        )
    return float(values[within].mean() - values[across].mean())


@checked
def against_control(
    similarity: Matrix,
    control: Matrix,
    change_points: Sequence[int],
    score: Callable[[Matrix, Sequence[int]], float] = block_score,
) -> AgainstControl:
    """The score of a run with a change in its training, and the score of a control without it.

    A run drifts while it is trained, changed or not, and a score of blocks measures drift too. The
    control goes on from the last checkpoint before the change, without the change, for the same
    steps; the difference of the two scores is due to the change.

    Args:
        similarity: A result, any of its matrices, or an array (K, K).
        control: Result, matrix or array of the control, with the run's own models before the last
            change point.
        change_points: Rows at which blocks start, without row 0; the change is the last of them.
        score: `block_score`, or `last_block_score`.

    Returns:
        Both scores, and their difference.

    Raises:
        ResultError: The control has other rows, or other values before the change, or `score`
            refuses either matrix.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> before = np.array([[1.0, 0.9, 0.0, 0.0], [0.9, 1.0, 0.0, 0.0]])
        >>> run = np.concatenate([before, [[0, 0, 1, 0.9], [0, 0, 0.9, 1]]])
        >>> control = np.full((4, 4), 0.9) + 0.1 * np.eye(4)
        >>> against_control(run, control, [2])
        AgainstControl(score=0.9, control=0.0, difference=0.9)
    """
    changed, kept = square(similarity), square(control)
    if not np.array_equal(changed["a"], kept["a"]):
        raise ResultError(
            f"a control has the steps of its run: found {label_range(kept['a'].values)}, and "
            f"{label_range(changed['a'].values)} in the run"
        )
    # The last change point is the change; blocks before it only divide the common past.
    if not len(change_points):
        raise ResultError("the change is at the last change point: give one at least, found none")
    start = change_points[-1]
    # Only the common past can show whether the control belongs to the run.
    apart = np.abs(changed.values - kept.values)[:start, :start]
    if apart.size and apart.max() > TOLERANCE:
        raise ResultError(
            f"a control goes on from the run's own models: before row {start} the two matrices "
            f"differ by up to {apart.max():.3g}"
        )
    of_run, of_control = score(changed, change_points), score(kept, change_points)
    return AgainstControl(of_run, of_control, of_run - of_control)


@checked
def trajectory(result: Matrix, to: int | str = "final") -> xr.DataArray:
    """Similarity of every model to a single model of the run, or to the previous model.

    Args:
        result: A result, any of its matrices, or an array (A, B).
        to: `"final"` for the last column, a label of a column, or `"previous"`, which starts at the
            second model and needs all pairs of a set of models.

    Returns:
        Similarities over `a`, with dtype and unit of the matrix; `attrs["to"]` holds `to`.

    Raises:
        ResultError: No model has this label, the matrix is not finite, or, for `"previous"`, it is
            not square and symmetric.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> run = np.array([[1.0, 0.8, 0.1], [0.8, 1.0, 0.3], [0.1, 0.3, 1.0]])
        >>> trajectory(run).values.tolist()
        [0.1, 0.3, 1.0]
        >>> trajectory(run, "previous").values.tolist()
        [0.8, 0.3]
    """
    if to == "previous":
        table = square(result)
        # Entry (n, n - 1) compares a model with the one before it.
        below_diagonal = np.diagonal(table.values, -1).copy()
        column = table[1:, 0].copy(data=below_diagonal)
    elif to == "final":
        column = matrix(result)[:, -1]
    else:
        table = matrix(result)
        place = place_of(table["b"], to)
        if place is None:
            labels = table["b"].values.tolist()
            raise ResultError(
                f"no model is labelled {to!r}; labels go from {labels[0]!r} to {labels[-1]!r}, "
                "besides 'final' and 'previous'"
            )
        column = table[:, place]
    return column.drop_vars("b").assign_attrs(to=to)
