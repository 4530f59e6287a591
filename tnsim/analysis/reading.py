"""Reading a pairwise run. In: a result, or one matrix of it. Out: scores, phases, trajectories, embeddings.

Every function takes a result (of which it reads `similarity`), one of its (a, b) matrices, as `result.weight_cosine`
or `result.slices.sel(output=9)`, or a plain array. Rows follow training. Raises `ResultError` for a matrix that is
not finite or, where all pairs of one set of models are needed, not square and symmetric.

A similarity K that is a cosine is a Gram matrix of unit vectors, one per model. Distances are the chords between
them, `|u - v| = sqrt(2 - 2 cos)`: Euclidean by construction, where arccos is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tnsim.analysis.matrices import SYMMETRIC, matrix, square
from tnsim.errors import GramWarning, MissingExtra, ResultError

if TYPE_CHECKING:
    import xarray as xr

    from tnsim.analysis.matrices import Matrix

NEGATIVE_SHARE = 0.01
_ROUNDING = 1e3  # in units of eps: what degree 2^10 may do to an entry


class Segmentation(NamedTuple):
    """Contiguous phases. `change_points`: rows at which a new phase starts, with their `labels`; `cost` is what was minimised."""

    change_points: tuple[int, ...]
    labels: tuple[Any, ...]
    cost: float


class Embedding(NamedTuple):
    """`points` (a, axis), centred; the `share` of the variance along each axis; the share of `negative` eigenvalues."""

    points: xr.DataArray
    share: Float[np.ndarray, " dims"]
    negative: float


def block_score(similarity: Matrix, change_points: Sequence[int]) -> float:
    """Delta: mean similarity within blocks minus mean across blocks (paper, section 3.3); higher is a sharper split.

    Means are over pairs of different models: that a model equals itself says nothing about its block. Raises
    `ResultError` when there is no pair within or none across.
    """
    found = square(similarity)
    block = phase_of_rows(change_points, len(found))
    same, values = block[:, None] == block, found.values
    pairs = ~np.eye(len(found), dtype=bool)
    if not (same & pairs).any() or same.all():
        raise ResultError(
            f"a block score needs pairs within blocks and across, found blocks of {np.bincount(block).tolist()} models"
        )
    return float(values[same & pairs].mean() - values[~same].mean())


def phase_of_rows(change_points: Sequence[int], count: int) -> Int[np.ndarray, " count"]:
    """The phase, from 0, of each of `count` rows. Raises `ResultError` unless change points rise within 1 to count - 1."""
    bounds = np.array([0, *change_points, count])
    if (np.diff(bounds) < 1).any():
        raise ResultError(
            f"change points must rise from 1 to {count - 1}, found {list(change_points)}"
        )
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def segment(similarity: Matrix, phases: int) -> Segmentation:
    """The best division into `phases` contiguous phases, exactly, by dynamic programming in O(K^2 phases).

    Minimises the scatter of the models, as vectors, around the mean of their phase, which a Gram matrix gives
    without the vectors: `sum_i K_ii - sum_ij K_ij / n` for a phase of n models (kernel change points). Where several divisions
    are equally good, later phases are longest. Raises `ResultError` unless 1 <= phases <= K.
    """
    return segmentations(similarity, phases)[-1]


def segmentations(similarity: Matrix, up_to: int) -> list[Segmentation]:
    """`segment` into 1, 2, ..., `up_to` phases, from one table; costs never rise for a Gram matrix."""
    found = _cosines(similarity)
    labels, count = found["a"].values.tolist(), len(found)
    if not 1 <= up_to <= count:
        raise ResultError(
            f"{count} models can be divided into 1 to {count} phases, not into {up_to}"
        )
    cost = _scatter(found.values)
    best, origins = cost[0], []  # best[e]: cost of the first e rows in so many phases
    segmented = []
    for phases in range(1, up_to + 1):
        if phases > 1:
            totals = best[:, None] + cost
            origins.append(totals.argmin(0))
            best = totals.min(0)
        points, end = [], count
        for origin in reversed(origins):
            end = int(origin[end])
            points.append(end)
        points.reverse()
        segmented.append(
            Segmentation(tuple(points), tuple(labels[p] for p in points), float(best[count]))
        )
    return segmented


def trajectory(result: Matrix, to: int | str = "final") -> xr.DataArray:
    """Similarity of every model to the last one (`"final"`), to the one before it (`"previous"`) or to a label, over `a`.

    `"previous"` starts at the second model. Raises `ResultError` for a label that is not there.
    """
    if to == "previous":
        found = square(result)
        return (
            found[1:, 0]
            .drop_vars("b")
            .copy(data=np.diagonal(found.values, -1).copy())
            .assign_attrs(to=to)
        )
    found = matrix(result)
    if to == "final":
        return found[:, -1].drop_vars("b").assign_attrs(to=to)
    places = np.flatnonzero(found["b"].values == to)
    if not places.size:
        known = found["b"].values.tolist()
        raise ResultError(
            f"no model is labelled {to!r}; labels go from {known[0]!r} to {known[-1]!r}, besides 'final' and 'previous'"
        )
    return found[:, places[0]].drop_vars("b").assign_attrs(to=to)


def mds(result: Matrix, dims: int = 2) -> Embedding:
    """Classical multidimensional scaling of the chords: the models as points, in the axes of most variance.

    Double centring turns squared chords back into the Gram matrix of the centred vectors, `J K J` (Torgerson 1952). Each axis points
    from the first model to the last. Warns with `GramWarning` when negative eigenvalues, which no points have, carry over 1 %.
    """
    found = _cosines(result)
    count = len(found)
    if not 1 <= dims <= count:
        raise ResultError(f"{count} models can be placed in 1 to {count} dimensions, not in {dims}")
    squared = _squared_chords(found.values)
    means = squared.mean(0)
    values, vectors = _scipy("an embedding").linalg.eigh(
        -(squared - means - means[:, None] + means.mean()) / 2
    )
    values, vectors = values[::-1], vectors[:, ::-1]
    weight = np.abs(values).sum() or 1.0
    negative = float(np.abs(values[values < 0]).sum() / weight)
    if negative > NEGATIVE_SHARE:
        warnings.warn(
            f"{negative:.1%} of the spectrum of {found.name or 'the matrix'} is negative: no points have these distances, and "
            "the embedding leaves that part out",
            GramWarning,
            stacklevel=2,
        )
    points = vectors[:, :dims] * np.sqrt(np.clip(values[:dims], 0, None))
    points *= np.where(points[-1] < points[0], -1.0, 1.0)
    placed = found[:, :1].drop_vars("b").rename(b="axis")
    placed = placed.isel(axis=np.zeros(dims, int)).copy(data=points).assign_coords(axis=range(dims))
    share = np.clip(values[:dims], 0, None) / (values[values > 0].sum() or 1.0)
    return Embedding(placed.assign_attrs(distance="sqrt(2 - 2 similarity)"), share, negative)


def dendrogram(result: Matrix) -> Float[np.ndarray, "K-1 4"]:
    """SciPy's linkage matrix: clusters by average chord, leaves in the order that keeps neighbours close."""
    hierarchy = _scipy("a dendrogram").cluster.hierarchy
    found = _cosines(result)
    if len(found) < 2:
        raise ResultError("a dendrogram needs at least two models, found one")
    chords = np.sqrt(_squared_chords(found.values))
    return hierarchy.linkage(
        chords[np.triu_indices(len(found), 1)], "average", optimal_ordering=True
    )


def spectrum(result: Matrix, tolerance: float | None = None) -> Float[np.ndarray, " K"]:
    """Eigenvalues, ascending. Warns with `GramWarning` when one lies below `-tolerance`, so that this is no Gram matrix.

    `Gaussian`, `Symmetric` and the tree metrics are inner products and pass; `GaussianClosure` beyond one nonlinear layer,
    float32 and some baselines may not. tolerance: by default what rounding may do to K entries in the dtype that a result names,
    else in float64.
    """
    found = square(result)
    if tolerance is None:
        dtype = getattr(result, "attrs", {}).get("dtype", "float64")
        tolerance = (
            _ROUNDING * float(np.finfo(dtype).eps) * len(found) * float(np.abs(found.values).max())
        )
    values = _scipy("a spectrum").linalg.eigvalsh(found.values)
    if values[0] < -tolerance:
        warnings.warn(
            f"{found.name or 'the matrix'} has the eigenvalue {values[0]:.3g}, below -{tolerance:.1g}: it is no Gram matrix; "
            "distances and embeddings made from it are approximate",
            GramWarning,
            stacklevel=2,
        )
    return values


def _cosines(result: Matrix) -> xr.DataArray:
    """As `square`, of unit vectors: a divergence or a logarithm would give distances without meaning."""
    found = square(result)
    own = np.diag(found.values)
    worst = own[np.abs(own - 1).argmax()]
    if abs(worst - 1) > SYMMETRIC:
        raise ResultError(
            f"{found.name or 'the matrix'} is no matrix of cosines: a model compared with itself gives {worst:.3g}, not 1"
        )
    return found


def _scatter(gram: Float[np.ndarray, "K K"]) -> Float[np.ndarray, "K+1 K+1"]:
    """Entry (s, e): scatter of rows s to e - 1 around their mean, infinite unless s < e."""
    count = len(gram)
    sums = np.zeros((count + 1, count + 1))
    sums[1:, 1:] = gram.cumsum(0).cumsum(1)
    traces = np.concatenate([[0.0], np.diag(gram).cumsum()])
    corners = np.diag(sums)
    total = corners[None, :] - sums - sums.T + corners[:, None]
    size = np.arange(count + 1) - np.arange(count + 1)[:, None]
    return np.where(size > 0, traces - traces[:, None] - total / np.maximum(size, 1), np.inf)


def _squared_chords(similarity: Float[np.ndarray, "K K"]) -> Float[np.ndarray, "K K"]:
    own = np.diag(similarity)
    squared = own[:, None] + own - 2 * similarity
    np.fill_diagonal(squared, 0.0)
    return np.clip(squared, 0.0, None)


def _scipy(purpose: str) -> Any:
    try:
        import scipy.cluster.hierarchy
        import scipy.linalg
    except ImportError:
        raise MissingExtra("scipy", "pairwise", purpose) from None
    return scipy
