"""Models as points: an embedding, a dendrogram and a spectrum from a matrix of cosines.

A similarity K that is a cosine is a Gram matrix of unit vectors, which stand for the models.
Distances are the chords between them, `|u - v| = sqrt(2 - 2 cos)`: Euclidean by construction, where
arccos is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.analysis.matrices import TOLERANCE, square
from tnsim.errors import NegativeEigenvalueWarning, ResultError, require, warn
from tnsim.options import checked

if TYPE_CHECKING:
    import xarray as xr

    from tnsim.analysis.matrices import Matrix

NEGATIVE_SHARE = 0.01
"""Share of the spectrum in negative eigenvalues above which `mds` warns."""
_ROUNDING = 1e3
"""Rounding error of an entry at degree 2^10, in units of eps."""


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
