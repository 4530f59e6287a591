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

Scores are computed over blocks, the phases into which change points divide a run.
The paper's text and its published figures score them by two formulas; both are here, `block_score`
and `last_block_score`.

*Phases.* A phase is a contiguous range of rows, and a change point is the row at which a new phase
starts, so change points (5, 14) of 18 rows are the phases 0-4, 5-13 and 14-17.

*Points.* A similarity K that is a cosine is a Gram matrix of unit vectors, which stand for the
models. Distances are the chords between them, `|u - v| = sqrt(2 - 2 cos)`: Euclidean by
construction, where arccos is not.

`summary` has the first answers of a run in words: how far, when, how sure, what to ask next.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tnsim.analysis.matrices import (
    TOLERANCE,
    are_steps,
    is_one_set,
    is_symmetric,
    matrix,
    place_of,
    square,
)
from tnsim.errors import NegativeEigenvalueWarning, ResultError, printable, require, warn
from tnsim.options import checked, shown

if TYPE_CHECKING:
    import xarray as xr

    from tnsim.analysis.matrices import Matrix


NEGATIVE_SHARE = 0.01
"""Share of the spectrum in negative eigenvalues above which `mds` warns."""
_ROUNDING = 1e3
"""Rounding error of an entry at degree 2^10, in units of eps."""


_FEWEST = 3
"""Least number of pairs, as two points always lie on a line."""

_SHARP = 2.0
"""Steps of this many median steps are called a change."""
_NO_DIFFERENCE = 1e-7
"""Distance of unit vectors below which the rounding of their cosine is all there is."""
_PHASES = 3
"""Phases into which a run is divided, as on the page and in the demo."""
_NAMED = 3
"""Most parts of a kind that are named."""


class Embedding(NamedTuple):
    """Models as points.

    Attributes:
        points: Coordinates over (a, axis), float64, centred, in units of a chord.
        share: Part of the variance along each axis, (dims,).
        negative: Share of negative eigenvalues in the absolute spectrum. Points have none.

    Example:
        >>> import numpy as np
        >>> embedding = mds(np.eye(3))
        >>> embedding.points.shape, embedding.share.round(3).tolist()
        ((3, 2), [0.5, 0.5])
    """

    points: xr.DataArray
    share: Float[np.ndarray, " dims"]
    negative: float


@checked
def mds(result: Matrix, dims: int = 2) -> Embedding:
    """Classical multidimensional scaling of the chords, in the axes of most variance.

    Each axis points from the first model to the last. Points have no negative eigenvalues: warns
    with `NegativeEigenvalueWarning` when these carry over 1 % of the spectrum.

    Args:
        result: A result, its matrix of cosines, or an array (K, K).
        dims: The number of axes, from 1 to K.

    Returns:
        Points (K, dims) in units of a chord, from 0 to 2 apart; shares of the variance per axis;
        the share of negative eigenvalues.

    Raises:
        ResultError: `dims` is out of range, or the matrix is not finite, square and symmetric with
            ones on its diagonal.
        MissingExtra: xarray or scipy is not installed.

    Example:
        >>> import numpy as np
        >>> embedding = mds(np.array([[1.0, 0.5], [0.5, 1.0]]), dims=1)  # a chord of length 1
        >>> embedding.points.values.round(3).tolist()
        [[-0.5], [0.5]]

    Source:
        Torgerson 1952, "Multidimensional scaling: I. Theory and method".
    """
    table = cosine_matrix(result)
    count = len(table)
    if not 1 <= dims <= count:
        raise ResultError(f"{count} models can be placed in 1 to {count} dimensions, not in {dims}")
    # Of points v_i with squared distances D_ij = |v_i|^2 + |v_j|^2 - 2 <v_i, v_j>, centring rows
    # and columns by J = 1 - 11'/K leaves the Gram matrix of the centred points, -J D J / 2 = J K J.
    # Its eigenvectors times the roots of their eigenvalues are coordinates of these points.
    squared = _squared_chords(table.values)
    means = squared.mean(0)
    centred = -(squared - means - means[:, None] + means.mean()) / 2
    values, vectors = import_scipy("an embedding").linalg.eigh(centred)
    # SciPy lists the smallest eigenvalue first.
    values, vectors = values[::-1], vectors[:, ::-1]
    # Of the absolute spectrum, which of a matrix of zeros has none.
    negative = np.abs(values[values < 0]).sum() / (np.abs(values).sum() or 1.0)
    if negative > NEGATIVE_SHARE:
        warn(
            f"{negative:.1%} of the spectrum of {table.name or 'the matrix'} is negative: "
            "no points have these distances, and the embedding leaves that part out",
            NegativeEigenvalueWarning,
        )
    # Negative eigenvalues belong to no points.
    variances = np.clip(values[:dims], 0, None)
    points = vectors[:, :dims] * np.sqrt(variances)
    # The sign of an eigenvector is arbitrary: the run goes from left to right.
    points *= np.where(points[-1] < points[0], -1.0, 1.0)
    share = variances / (values[values > 0].sum() or 1.0)
    return Embedding(_with_labels(table, points), share, negative)


def dendrogram(result: Matrix) -> Float[np.ndarray, "K-1 4"]:
    """Clusters by average chord, with leaves in the order that keeps neighbours close.

    Args:
        result: A result, its matrix of cosines, or an array (K, K).

    Returns:
        SciPy's linkage matrix (K - 1, 4), float64: per merger the two clusters, their mean chord
        from 0 to 2, and the number of models.

    Raises:
        ResultError: There are fewer than two models, or the matrix is not finite, square and
            symmetric with ones on its diagonal.
        MissingExtra: xarray or scipy is not installed.

    Example:
        >>> import numpy as np
        >>> dendrogram(np.array([[1.0, 0.5], [0.5, 1.0]])).tolist()
        [[0.0, 1.0, 1.0, 2.0]]

    Source:
        Sokal and Michener 1958 for average linkage; Bar-Joseph et al. 2001, "Fast optimal leaf
        ordering for hierarchical clustering".
    """
    hierarchy = import_scipy("a dendrogram").cluster.hierarchy
    table = cosine_matrix(result)
    if len(table) < 2:
        raise ResultError("a dendrogram needs at least two models, found one")
    chords = np.sqrt(_squared_chords(table.values))
    pairs = np.triu_indices(len(table), 1)
    # Neighbours in the order of leaves are as near as the tree allows.
    return hierarchy.linkage(chords[pairs], "average", optimal_ordering=True)


@checked
def spectrum(result: Matrix, tolerance: float | None = None) -> Float[np.ndarray, " K"]:
    """Eigenvalues of the matrix, which are not negative if it is a Gram matrix.

    `Gaussian`, `Symmetric` and the tree metrics are inner products and pass; `GaussianClosure`
    beyond a single nonlinear layer, float32 and some baselines may not. Warns with
    `NegativeEigenvalueWarning` when an eigenvalue lies below `-tolerance`.

    Args:
        result: A result, any of its matrices, or an array (K, K).
        tolerance: Size up to which negative eigenvalues pass. By default the rounding error of K
            entries in the dtype that a result names, else in float64.

    Returns:
        (K,), float64, ascending, in the unit of the matrix.

    Raises:
        ResultError: The matrix is not finite, square and symmetric.
        MissingExtra: xarray or scipy is not installed.

    Example:
        >>> import numpy as np
        >>> spectrum(np.array([[1.0, 0.5], [0.5, 1.0]])).round(3).tolist()
        [0.5, 1.5]
    """
    table = square(result)
    if tolerance is None:
        # Rounding is that of the precision in which the run was made.
        dtype = getattr(result, "attrs", {}).get("dtype", "float64")
        eps = float(np.finfo(dtype).eps)
        tolerance = _ROUNDING * eps * len(table) * float(np.abs(table.values).max())
    values = import_scipy("a spectrum").linalg.eigvalsh(table.values)
    if values[0] < -tolerance:
        warn(
            f"{table.name or 'the matrix'} has the eigenvalue {values[0]:.3g}, below "
            f"-{tolerance:.1g}: it is no Gram matrix; distances and embeddings made from it are "
            "approximate",
            NegativeEigenvalueWarning,
        )
    return values


def cosine_matrix(result: Matrix) -> xr.DataArray:
    """The square matrix of cosines in a result, checked for ones on its diagonal.

    A divergence or a logarithm would give distances without meaning.

    Args:
        result: A result, any of its matrices, or an array (K, K).

    Returns:
        The matrix over (a, b), symmetric, with ones on its diagonal up to rounding.

    Raises:
        ResultError: A model compared with itself does not give 1, or `square` refuses the matrix.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> cosine_matrix(np.zeros((2, 2)))
        Traceback (most recent call last):
        tnsim.errors.ResultError: the matrix is no matrix of cosines: ...
    """
    table = square(result)
    own = np.diag(table.values)
    worst = own[np.abs(own - 1).argmax()]
    if abs(worst - 1) > TOLERANCE:
        raise ResultError(
            f"{table.name or 'the matrix'} is no matrix of cosines: "
            f"a model compared with itself gives {worst:.3g}, not 1"
        )
    return table


def squared_distances(result: Matrix) -> xr.DataArray:
    """The square matrix of squared distances: squared chords, or a divergence as it is.

    Args:
        result: A result, its matrix of cosines or divergences, or an array (K, K).

    Returns:
        The matrix over (a, b), symmetric, not negative, with zeros on its diagonal.

    Raises:
        ResultError: A model compared with itself gives neither 1 nor 0, a divergence is negative,
            or `square` refuses the matrix.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> squared_distances(np.array([[1.0, 0.5], [0.5, 1.0]])).values.tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        >>> squared_distances(np.array([[0.0, 0.7], [0.7, 0.0]])).values.tolist()
        [[0.0, 0.7], [0.7, 0.0]]
    """
    table = square(result)
    values, own = table.values, np.diag(table.values)
    rounding = TOLERANCE * max(np.abs(values).max(), 1e-300)
    # Divergences vanish between a model and itself, where cosines are 1.
    if np.abs(own).max() <= rounding and values.min() >= -rounding:
        divergence = np.clip(values, 0.0, None)
        np.fill_diagonal(divergence, 0.0)
        return table.copy(data=divergence)
    if np.abs(own - 1).max() <= TOLERANCE:
        return table.copy(data=_squared_chords(values))
    raise ResultError(
        f"{table.name or 'the matrix'} holds neither cosines nor divergences: models compared with "
        f"themselves give {own.min():.3g} to {own.max():.3g}, not 1 (or 0 and nothing below it)"
    )


def _squared_chords(gram: Float[np.ndarray, "K K"]) -> Float[np.ndarray, "K K"]:
    """`|u - v|^2 = <u, u> + <v, v> - 2 <u, v>`, clipped where rounding falls below zero."""
    own = np.diag(gram)
    squared = own[:, None] + own - 2 * gram
    # Rounding would leave small distances of a model from itself.
    np.fill_diagonal(squared, 0.0)
    return np.clip(squared, 0.0, None)


def _with_labels(table: xr.DataArray, points: Float[np.ndarray, "K dims"]) -> xr.DataArray:
    """Points with the rows' coordinates of a matrix, over (a, axis)."""
    dims = points.shape[1]
    column = table[:, :1].drop_vars("b").rename(b="axis")
    placed = column.isel(axis=np.zeros(dims, int)).copy(data=points)
    placed = placed.assign_coords(axis=range(dims))
    return placed.assign_attrs(distance="sqrt(2 - 2 similarity)")


def import_scipy(purpose: str) -> Any:
    """SciPy, of which analyses call several parts.

    Args:
        purpose: What needs it, for the message where it is not installed.
    """
    require("scipy.linalg", "pairwise", purpose)
    import scipy

    return scipy  # loads its parts when they are named


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
        return printable(f"{len(self.labels) + 1} phases{here}")


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


def distance(result: xr.Dataset) -> xr.DataArray:
    """Distances |b - a| of all pairs as functions, see `result.tnsim.distance`.

    Args:
        result: Result with similarities and the logarithms of squared norms.

    Raises:
        ResultError: A distance is beyond float64, or a variable is missing.

    Example:
        >>> import numpy as np, xarray as xr
        >>> norms = {f"log_norm_{side}": (side, np.log([1.0, 9.0])) for side in "ab"}
        >>> run = xr.Dataset({"similarity": (("a", "b"), np.ones((2, 2))), **norms})
        >>> distance(run).values.round(6).tolist()
        [[0.0, 2.0], [2.0, 0.0]]
    """
    for name in ("similarity", "log_norm_a", "log_norm_b"):
        if name not in result:
            raise ResultError(f"the result has no {name}, which distances are made of")
    # |b - a|^2 = (|b| - |a|)^2 + 2 |a| |b| (1 - cos), without a difference of squares.
    with np.errstate(over="ignore"):
        lengths = np.exp(result["log_norm_a"] / 2), np.exp(result["log_norm_b"] / 2)
        apart = (lengths[1] - lengths[0]) ** 2
        apart = apart + 2 * lengths[0] * lengths[1] * (1 - result["similarity"])
    if np.isinf(apart).any():
        raise ResultError(
            "distances of functions are beyond float64 here: scale down the last layer of all "
            "models, which changes no similarity"
        )
    apart: Any = np.sqrt(apart)
    return apart.transpose(*result["similarity"].dims).rename("distance")


def most_changed(result: xr.Dataset, a: Any = None, b: Any = None) -> xr.Dataset:
    """The parts of a result whose functions moved furthest, see `result.tnsim.most_changed`.

    Args:
        result: Result of a run over parts.
        a, b: Labels of two models; None for the first row and the last column.

    Raises:
        ResultError: The result has no parts, or a label is unknown.
    """
    if "part" not in result.dims:
        raise ResultError("the result has no parts: compare tnsim.parts(series)")
    places = {}
    for dim, label, end in (("a", a, 0), ("b", b, -1)):
        places[dim] = end if label is None else place_of(result[dim], label)
        if places[dim] is None:
            shown = ", ".join(map(str, result[dim].values.tolist()[:8]))
            raise ResultError(f"no model is called {label!r} along {dim}: {shown}")
    pair = result.assign(distance=distance(result)).isel(places)[["distance", "similarity"]]
    return pair.isel(part=np.argsort(-pair["distance"].values, kind="stable"))


def copies(result: xr.Dataset) -> dict[int, int]:
    """The rows that repeat a model under a name, such as `model_best`, with the row repeated.

    A label with a number is a step of its own, whatever its weights.

    Args:
        result: Result of a run that compares one set with itself.

    Example:
        >>> import xarray as xr
        >>> labels = {"a": ["1", "2", "model_best"], "hash_a": ("a", ["p", "q", "p"])}
        >>> copies(xr.Dataset(coords=labels))
        {2: 0}
    """
    if "hash_a" not in result.variables:
        return {}
    digests, labels = result["hash_a"].values.tolist(), result["a"].values.tolist()
    named = [row for row, label in enumerate(labels) if not re.search(r"\d", str(label))]
    firsts: dict[str, int] = {}
    # Steps come first: of a step and its copy the step is kept, wherever it stands.
    for row in sorted(range(len(labels)), key=lambda row: row in named):
        firsts.setdefault(digests[row], row)
    return {row: firsts[digests[row]] for row in named if firsts[digests[row]] != row}


def without_copies(result: xr.Dataset) -> xr.Dataset:
    """A run without rows and columns that repeat a model under a name, see `copies`.

    Results that compare two sets, or that have no digests of models, stay as they are.

    Args:
        result: Result of a run.

    Example:
        >>> import numpy as np, xarray as xr
        >>> labels = {name: ["1", "2", "model_best"] for name in "ab"}
        >>> digests = {"hash_a": ("a", ["p", "q", "p"])}
        >>> run = xr.Dataset({"similarity": (("a", "b"), np.ones((3, 3)))}, {**labels, **digests})
        >>> without_copies(run).a.values.tolist()
        ['1', '2']
    """
    if not is_one_set(result):
        return result
    repeated = copies(result)
    kept = [row for row in range(result.sizes["a"]) if row not in repeated]
    return result.isel(a=kept, b=kept) if repeated else result


def findings(result: xr.Dataset) -> list[str]:
    """Sentences that say what a result shows.

    Args:
        result: Result of a run, over parts as well.

    Returns:
        Sentences: the models and the range of similarity; where labels are steps, when the function
        changed, and its phases; of parts those that moved furthest.

    Raises:
        ResultError: A similarity is not finite, or there is no matrix over (a, b).

    Example:
        >>> import numpy as np, xarray as xr
        >>> values = np.array([[1.0, 0.99, 0.2], [0.99, 1.0, 0.21], [0.2, 0.21, 1.0]])
        >>> steps = {"a": [0, 100, 200], "b": [0, 100, 200]}
        >>> for sentence in findings(xr.Dataset({"similarity": (("a", "b"), values)}, steps)):
        ...     print(sentence)
        3 models, 0 to 200: similarity from 0.2 (0 and 200) to 0.99 (0 and 100).
        Changed here: from 100 to 200 (similarity 0.21; the other steps 0.99).
    """
    if "similarity" in result and not np.isfinite(result["similarity"]).all():
        raise ResultError("similarities that are not finite have no summary: finish the run first")
    over_parts = "part" in result.dims
    table = matrix(result.isel(part=0) if over_parts else result)
    one_set = is_one_set(result)
    if over_parts:
        return list(map(printable, _of_parts(result, one_set)))
    result = result.assign(similarity=table)
    repeated = copies(result) if one_set else {}
    kept = without_copies(result)
    said = [_range(kept, one_set), *_of_means(kept, one_set)]
    if repeated:
        labels = result["a"].values
        pairs = [f"{labels[row]} = {labels[first]}" for row, first in repeated.items()]
        said.append(f"Copies are left out: {', '.join(pairs)}.")
    if one_set and kept.sizes["a"] > 2 and are_steps(kept["a"].values):
        said += _changes(kept["similarity"])
    return list(map(printable, said))  # names of files may hold the end of a line


def summary(result: xr.Dataset) -> str:
    """The findings of a result, how sure they are, and what to call next; see `findings`.

    Args:
        result: Result of a run.

    Example:
        >>> import tnsim
        >>> models = [tnsim.Model([tnsim.Linear([[w, 1.0]])]) for w in (1.0, 3.0)]
        >>> print(tnsim.pairwise(models).tnsim.summary())
        2 models, 0 and 1: similarity 0.894.
        Exact under gaussian.
        Next: tnsim.change(a, b) says which part changed.
    """
    said = findings(result)
    if "exact" in result.attrs:
        kind, rest = certainty(result)
        said.append(f"{kind.capitalize()} under {result.attrs['metric']}{rest}.")
    return "\n".join([*said, f"Next: {_advice(result)}."])


def _range(result: xr.Dataset, one_set: bool) -> str:
    values, (rows, columns) = result["similarity"].values, (result[dim].values for dim in "ab")
    counted = (
        f"{len(rows)} models, {rows[0]}" if one_set else f"{len(rows)} x {len(columns)} models"
    )
    if one_set and len(rows) < 2:
        return "1 model: nothing to compare it with."
    if one_set and len(rows) == 2:
        return f"{counted} and {rows[1]}: similarity {_shown(values[0, 1])}."
    # Of one set each pair once, and no model beside itself.
    counts = np.triu(np.ones(values.shape, bool), 1) if one_set else np.ones(values.shape, bool)
    places = [
        np.unravel_index(find(np.where(counts, values, beyond)), values.shape)
        for find, beyond in ((np.argmin, np.inf), (np.argmax, -np.inf))
    ]
    ends = [f"{_shown(values[i, j])} ({rows[i]} and {columns[j]})" for i, j in places]
    counted += f" to {rows[-1]}" if one_set else ""
    return f"{counted}: similarity from {ends[0]} to {ends[1]}."


def _of_means(result: xr.Dataset, one_set: bool) -> list[str]:
    """What the means over the inputs are of the functions, where they make pairs alike."""
    if not {"mean_share_a", "mean_share_b"} <= set(result.variables):
        return []
    sides = [result[f"mean_share_{side}"].values for side in ("a" if one_set else "ab")]
    large = [int(np.count_nonzero(shares > 0.5)) for shares in sides]
    # A pair is alike by its means where both of its models are mostly their means.
    if min(large) < (2 if one_set else 1):
        return []
    most, counted = max(np.nanmax(shares) for shares in sides), sum(map(len, sides))
    return [
        f"More than half of the squared norm is the mean over the inputs in {sum(large)} of "
        f"{counted} models (up to {100 * most:.0f} %): centred=True (--centred) compares without "
        "it."
    ]


def _changes(similarity: xr.DataArray) -> list[str]:
    """When the function changed, by steps between neighbours, and the phases of the run."""
    table = square(similarity)
    labels, along = table["a"].values.tolist(), np.diagonal(table.values, 1)
    steps = np.sqrt(np.maximum(2 - 2 * along, 0.0))  # chords
    largest = int(steps.argmax())
    usual = float(np.median(np.delete(steps, largest)))
    # A median alone hides that the steps beside the largest may be nearly as large.
    others = np.delete(along, largest)
    least, rest = _shown(others.min()), _shown(np.median(others))
    if least != rest:
        rest = f"{least} or more, their median {rest}"
    place = f"from {labels[largest]} to {labels[largest + 1]}"
    if steps[largest] < _NO_DIFFERENCE:
        return ["The function did not change."]
    if steps[largest] < _SHARP * usual:
        said = [
            f"It changed evenly: most {place} (similarity {_shown(along[largest])}), less than "
            f"twice as far as in the other steps ({rest})."
        ]
    else:
        said = [
            f"Changed here: {place} (similarity {_shown(along[largest])}; the other steps {rest})."
        ]
    if len(labels) >= 2 * _PHASES:
        whole, *_, found = segmentations(table, _PHASES)
        within = found.cost / whole.cost
        spans = [
            f"{labels[start]} to {labels[stop - 1]}" if stop - start > 1 else f"{labels[start]}"
            for start, stop in zip(
                (0, *found.change_points), (*found.change_points, len(labels)), strict=True
            )
        ]
        said.append(
            f"The best {_PHASES} phases: {'; '.join(spans)} ({100 * within:.0f} % of the scatter "
            "is within them)."
        )
    return said


def _of_parts(result: xr.Dataset, one_set: bool) -> list[str]:
    """The parts of each kind that moved furthest from the first model to the last."""
    first, last = result["a"].values[0], result["b"].values[-1]
    counted = f"{result.sizes['a']} models" if one_set else "models"
    counted = f"{result.sizes['part']} parts of {counted}"
    if not {"log_norm_a", "log_norm_b", "kind"} <= set(result.variables):
        return [f"{counted}."]  # with similarities alone
    said = [f"{counted}; from {first} to {last} moved furthest:"]
    moved = most_changed(result)
    labels, apart, alike = (moved[name].values for name in ("part", "distance", "similarity"))
    for kind in dict.fromkeys(result["kind"].values.tolist()):
        # Outputs of one kind have one meaning, so that their distances can be compared.
        parts = [
            f"{labels[n]} (|b - a| {apart[n]:.3g}, similarity {_shown(alike[n])})"
            for n in np.flatnonzero((moved["kind"].values == kind) & (apart > 0))[:_NAMED]
        ]
        said.append(f"{kind}: {', '.join(parts) or 'none moved'}.")
    return said


def certainty(result: xr.Dataset) -> tuple[str, str]:
    """What kind of numbers a result has, and how sure they are, in words.

    Args:
        result: Result with its attributes.

    Returns:
        The kind, such as "exact"; and the rest of the sentence, which may be empty.
    """
    about = result.attrs
    apart = ", without means" if about.get("centred") else ""
    if "standard_error" not in result:
        return "exact" if about["exact"] else "an approximation", apart
    errors = result["standard_error"].values
    worst = np.nanmax(errors) if np.isfinite(errors).any() else np.inf
    kind = "on these inputs" if about["exact"] else "estimates"
    return kind, f"{apart}, with standard errors up to {worst:.1g}"


def _advice(result: xr.Dataset) -> str:
    if "part" in result.dims:
        return "result.tnsim.most_changed(), result.tnsim.plot('parts'), result.sel(part=...)"
    ask = "tnsim.change(a, b) says which part changed"
    if result.sizes["a"] <= 2:
        return ask
    return f"result.tnsim.plot() draws all pairs, {ask}"


def _shown(similarity: Any) -> str:
    """A similarity to three digits, or by its difference from 1 where this is small."""
    apart = 1 - float(similarity)
    return f"1 - {apart:.2g}" if 1e-15 < abs(apart) < 5e-3 else f"{float(similarity):.3g}"
