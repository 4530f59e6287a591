"""Gauss quadrature of a single coordinate, and points and draws of Gaussian inputs.

A measure's orthonormal polynomials satisfy `b_{k+1} p_{k+1} = (x - a_k) p_k - b_k p_{k-1}`. The n
nodes of its Gauss rule are the eigenvalues of the Jacobi matrix with the diagonal a and the
off-diagonal b (Golub and Welsch 1969); the weights are Christoffel's numbers

    w_i = 1 / sum_{k<n} p_k(x_i)^2,

which, unlike squared components of eigenvectors, have full relative precision where weights are
tiny. Such weights count: polynomials of high degree live on the outermost nodes. A rule with n
nodes integrates degree 2n - 1 exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.metrics.input_moments import check_coordinates, flattened, root_of
from tnsim.metrics.points import Draw, Points, Reading, Rule, mapped, product_rule

_RELATIVE = 1e-14
"""Directions with singular values below this share of the largest count as not read."""
_MOST = 32
"""Most coordinates: already two nodes in each give 2^32 points, more than any budget allows."""
_MOST_NODES = 2**13
"""Most nodes of a coordinate: a rule takes two seconds, and the time grows with the square."""


def gauss_rule(diagonal: Float[np.ndarray, " n"], off_diagonal: Float[np.ndarray, " n-1"]) -> Rule:
    """The Gauss rule of a probability measure, from the recurrence of its polynomials.

    Example:
        >>> nodes, log_weights = gauss_rule(np.zeros(2), np.ones(1))
        >>> nodes.round(6).tolist(), np.exp(log_weights).round(6).tolist()
        ([-1.0, 1.0], [0.5, 0.5])

    Source:
        Golub and Welsch, Calculation of Gauss quadrature rules, 1969.
    """
    from scipy.linalg import eigh_tridiagonal  # here, as its import takes a while

    nodes: Any = eigh_tridiagonal(diagonal, off_diagonal, eigvals_only=True)
    # The recurrence runs at all nodes at once. Polynomials grow beyond floats at the outer nodes:
    # every step divides both values by the root of the sum of squares so far. This sum is
    # total * exp(log).
    before, value = np.zeros_like(nodes), np.ones_like(nodes)
    total, log = np.ones_like(nodes), np.zeros_like(nodes)
    for k, b in enumerate(off_diagonal):
        below = off_diagonal[k - 1] if k else 0.0
        before, value = value, ((nodes - diagonal[k]) * value - below * before) / b
        total = total + value**2
        before, value = before / np.sqrt(total), value / np.sqrt(total)
        log, total = log + np.log(total), np.ones_like(total)
    return Rule(nodes, -log)


def hermite_rule(nodes: int) -> Rule:
    """The Gauss rule of a standard normal number: `a_k = 0`, `b_k = sqrt(k)`.

    Example:
        >>> x, log_weights = hermite_rule(3)
        >>> round(float(np.exp(log_weights) @ x**4), 9)
        3.0
    """
    return gauss_rule(np.zeros(nodes), np.sqrt(np.arange(1.0, nodes)))


def most_directions(n_ctx: int | None) -> int:
    """Number of coordinates of a position beyond which no budget allows a product of rules."""
    return _MOST // (n_ctx or 1)


def gaussian_points(
    metric: Any, reading: Reading, rows: Float[np.ndarray, "rows in"]
) -> Points | None:
    """Points and weights that give polynomials their exact means under a Gaussian.

    Args:
        metric: Gaussian metric with a mean and a covariance, each optional.
        reading: Inputs that the models read. Inner products have twice its degree.
        rows: Rows that span the directions that any of the models reads at a position, see
            `models.forward.directions`. Points vary in no other direction.

    Returns:
        A product of Gauss-Hermite rules with degree + 1 nodes in each coordinate of z, where
        x = m + T V z, with T T' the covariance and V the right singular vectors of `rows T`. All
        rows count alike, whatever their length, as a later layer may magnify a small row. None if
        the points are too many for any budget.
    """
    # n nodes are exact for polynomials of degree 2 n - 1. The product of two models of degree d has
    # degree 2 d, so n = d + 1.
    nodes = reading.degree + 1
    if min(rows.shape) > most_directions(reading.n_ctx) or nodes > _MOST_NODES:
        return None
    # x = m + T z for a standard normal z, and models see `rows T z` alone. Directions in which that
    # vanishes need no nodes. The other directions are made orthogonal, so that coordinates along
    # them are independent: a rotation of z keeps its distribution.
    mean, root = _mean_and_root(metric, reading)
    root = np.diag(root) if root.ndim == 1 else root
    # The model reads each position through the same rows, so a sequence through the block-diagonal
    # matrix of them.
    every = np.kron(np.eye(reading.n_ctx or 1), rows)
    vectors = _span_basis(every @ root, np.abs(every) @ np.abs(root))
    turned = root @ vectors.T
    points = product_rule([hermite_rule(nodes)] * turned.shape[1])
    return mapped(points, partial(_inputs_at, mean, turned, reading.shape))


def _span_basis(
    rows: Float[np.ndarray, "rows in"], sizes: Float[np.ndarray, "rows in"]
) -> Float[np.ndarray, "directions in"]:
    """An orthonormal basis of the span of some rows, whatever their lengths.

    Args:
        rows: Rows, each entry of which is a sum of products.
        sizes: Sums of the absolute values of these products. An entry that is tiny beside its size
            is rounding, and counts as zero.
    """
    length, size = np.abs(rows).max(axis=1), sizes.max(axis=1)
    reads = length > _RELATIVE * size * rows.shape[1]
    if not reads.any():
        return np.zeros((0, rows.shape[1]))
    # Rows of unit length: a small row that a later layer magnifies spans a direction like any
    # other.
    _, values, vectors = np.linalg.svd(rows[reads] / length[reads, None], full_matrices=False)
    # Smaller singular values are rounding of the decomposition itself.
    return vectors[values > _RELATIVE * values[0] * max(rows.shape)]


def gaussian_draws(metric: Any, reading: Reading) -> Draw:
    """The function that draws inputs from a Gaussian."""
    return partial(_normal_draws, math.prod(reading.shape), normal_map(metric, reading))


def _normal_draws(
    size: int, to_inputs: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator, count: int
) -> np.ndarray:
    return to_inputs(rng.normal(size=(count, size)))


def normal_map(metric: Any, reading: Reading) -> Callable[[np.ndarray], np.ndarray]:
    """The map from standard normal numbers to inputs of a Gaussian, x = m + T z.

    Args:
        metric: Gaussian metric with a mean m and a covariance T T', each optional.
        reading: Inputs that the models read.

    Returns:
        A function, which can be pickled, from z (count, coordinates) to inputs (count, *shape).

    Raises:
        ModelError: The metric has moments of another shape.

    Example:
        >>> import tnsim
        >>> normal_map(tnsim.Gaussian(mean=[1.0]), Reading(1, None, 1))(np.ones((1, 1))).tolist()
        [[2.0]]
    """
    return partial(_inputs_at, *_mean_and_root(metric, reading), reading.shape)


def _inputs_at(
    mean: np.ndarray, root: np.ndarray, shape: tuple[int, ...], z: np.ndarray
) -> np.ndarray:
    """The inputs mean + root z, where the root may be a diagonal."""
    centred = z * root if root.ndim == 1 else z @ root.T
    return (mean + centred).reshape(len(z), *shape)


def _mean_and_root(
    metric: Any, reading: Reading
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]]:
    """Mean and root T of the covariance T T' of whole inputs, sequences flattened.

    The covariance may be singular, and the root be a diagonal.
    """
    if reading.n_ctx is not None:
        metric = flattened(metric, reading.d_in, reading.n_ctx)
    else:
        check_coordinates(metric, reading.d_in)
    size = math.prod(reading.shape)
    mean = np.zeros(size) if metric.mean is None else np.asarray(metric.mean, np.float64)
    return mean, np.ones(size) if metric.cov is None else root_of(metric.cov)
