"""Reading a pairwise run. In: a result, or one matrix of it. Out: scores, phases, paths, points.

Every function takes a result (of which it reads `similarity`), one of its (a, b) matrices, as
`result.weight_cosine` or `result.slices.sel(output=9)`, or a plain array. Rows follow training.

    segment, segmentations, phase_of_rows                 phases of a run
    block_score, last_block_score, group_score            how sharp a division is
    against_control                                       what training on would have given
    trajectory                                            similarity to one model along a run
    correlation                                           how far two matrices agree
    mds, dendrogram, spectrum                             models as points

Raises `ResultError` for a matrix that is not finite or, where all pairs of one set of models are
needed, not square and symmetric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tnsim.analysis.block_scores import (
    AgainstControl,
    against_control,
    block_score,
    group_score,
    last_block_score,
)
from tnsim.analysis.chords import Embedding, dendrogram, mds, spectrum
from tnsim.analysis.correlations import Correlation, correlation
from tnsim.analysis.matrices import matrix, square
from tnsim.analysis.phases import Segmentation, phase_of_rows, segment, segmentations
from tnsim.errors import ResultError

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


def trajectory(result: Matrix, to: int | str = "final") -> xr.DataArray:
    """Similarity of every model to one of them, or to the one before it.

    Args:
        result: A result, one of its matrices, or an array (A, B).
        to: `"final"` for the last column, a label of a column, or `"previous"`, which starts at the
            second model and needs all pairs of one set of models.

    Returns:
        Over `a`, with dtype and unit of the matrix; `attrs["to"]` says to what.

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
        below_diagonal = np.diagonal(table.values, -1).copy()
        column = table[1:, 0].copy(data=below_diagonal)
    elif to == "final":
        column = matrix(result)[:, -1]
    else:
        table = matrix(result)
        column = table[:, _place(table["b"].values.tolist(), to)]
    return column.drop_vars("b").assign_attrs(to=to)


def _place(labels: list[int | str], wanted: int | str) -> int:
    """The first column with this label."""
    if wanted not in labels:
        raise ResultError(
            f"no model is labelled {wanted!r}; labels go from {labels[0]!r} to {labels[-1]!r}, "
            "besides 'final' and 'previous'"
        )
    return labels.index(wanted)
