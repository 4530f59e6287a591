"""Moments of the inputs that a metric stands for: checks, structure, arrays.

The Gaussian metrics have a mean m and a covariance C, both optional and both checked when the
metric is made (`GaussianMoments`). Layers read these moments in the form that makes contractions
cheap: an identity is no array at all, a diagonal is a vector. The structure (`InputKind`,
`SequenceInputs`) is hashable and part of the key of a plan; the arrays are given when the plan
runs.

Vectors are lifted where a layer has a constant: `x~ = (1, x)`, of mean (1, m) and second moment

    E[x~ x~^T] = [[1, m^T], [m, C + m m^T]].

Sequences are not lifted. Their covariance is about the mean, over positions and coordinates.

*Quadrature.* A measure's orthonormal polynomials satisfy `b_{k+1} p_{k+1} = (x - a_k) p_k - b_k
p_{k-1}`. The n nodes of its Gauss rule are the eigenvalues of the Jacobi matrix with the diagonal a
and the off-diagonal b (Golub and Welsch 1969); the weights are Christoffel's numbers

    w_i = 1 / sum_{k<n} p_k(x_i)^2,

which, unlike squared components of eigenvectors, have full relative precision where weights are
tiny. Such weights count: polynomials of high degree live on the outermost nodes. A rule with n
nodes integrates degree 2n - 1 exactly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.metrics.orbits import PairingRule
from tnsim.metrics.protocol import (
    Draw,
    Metric,
    Points,
    Reading,
    Rule,
    WeightedPoints,
    mapped,
    product_rule,
)
from tnsim.models.arrays import Array, as_array, in_float64, pytree
from tnsim.models.functions import input_rows
from tnsim.models.model import check_untraced
from tnsim.models.scaling import replaced
from tnsim.names import COVARIANCE, MEAN
from tnsim.scaled import library, not_differentiated, shifted
from tnsim.sessions import session_cache

PositionForm = Literal["alike", "each", "full"]
"""Dependence on positions: the same at each, different at each, or full between positions."""
ROUNDING_OF_COVARIANCES = 45.0
"""The rounding of a given matrix of d correlations, in units of `eps d` of its largest eigenvalue.

Its entries are rounded sums of products. Of 6,000 matrices of lower rank, made as `F F^T` or of
1,000 samples, the eigenvalues that should be zero are up to 1.3 of this unit; of a million samples,
added up one after another, up to 68. What is below is no direction of the inputs, along every route
that takes a root; a true one has hardly two digits there.
"""


_RELATIVE = 1e-14
"""Directions with singular values below this share of the largest count as not read."""
_MOST = 32
"""Most coordinates: already two nodes in each give 2^32 points, more than any budget allows."""
_MOST_NODES = 2**13
"""Most nodes of a coordinate: a rule takes two seconds, and the time grows with the square."""


@dataclass(frozen=True, eq=False)
class GaussianMoments:
    """Base of both Gaussian metrics: moments of x ~ N(mean, cov), and Isserlis' theorem."""

    mean: Float[Array, " d"] | None = None
    cov: Float[Array, "d d"] | Float[Array, " d"] | None = None
    pairs_within_model = True
    rule = PairingRule.ISSERLIS

    @classmethod
    def fit(cls, samples: Float[Array, "n ..."]) -> Self:
        """Fit the mean and the covariance to data or activations.

        Args:
            samples: Vectors (n, d) with n > 1, all finite, or images (n, channels, height, width),
                which models read as vectors; a loader of batches, or a mapping as tokenizers give.

        Returns:
            The metric with a mean (d,) and a covariance (d, d), divided by n, both float64.

        Raises:
            ModelError: There are fewer than two samples, or the samples are no finite matrix.
        """
        moments = "; Gaussian(mean, cov) takes traced moments"
        check_untraced("Gaussian.fit", samples, instead=moments)
        rows = input_rows(samples)
        axes = _axes_of(rows)
        given = as_array(rows, "samples", axes if axes >= 4 else 2)
        data = np.asarray(given, np.float64).reshape(len(given), -1)
        if len(data) < 2:
            raise ModelError(f"fitting a Gaussian needs at least two samples, found {len(data)}")
        mean = data.mean(axis=0)
        return cls(mean, (data - mean).T @ (data - mean) / len(data))

    def __post_init__(self) -> None:
        mean, cov = self.mean, self.cov
        if mean is not None:
            mean = as_array(mean, "the input mean", 2 if _axes_of(mean) == 2 else 1)
        if cov is not None:
            cov = as_array(cov, "the input covariance", _axes_of(cov))
            _check_covariance(cov)
            cov = _without_rounding(cov)
        if mean is not None and cov is not None:
            _check_together(mean, cov)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "cov", cov)


def _axes_of(values: Any) -> int:
    """Number of axes of what a caller gave; 2 for rows of unequal length, which are no array."""
    try:
        return np.ndim(values)
    except ValueError:  # NumPy's, which says neither what was given nor where
        return 2


def _check_covariance(cov: Any) -> None:
    """Raise `ModelError` unless an array is a covariance: square or a diagonal, semidefinite.

    Entries may differ from their mirror image, and eigenvalues may be below zero, by the rounding
    of float32 (1e-6 of the largest entry). Of a traced array only the shape is checked.
    """
    if cov.ndim not in (1, 2) or cov.shape[0] != cov.shape[-1]:
        raise ModelError(
            "cov must be a square matrix or the vector of its diagonal, "
            f"found shape {tuple(cov.shape)}"
        )
    if isinstance(cov, Tracer):
        return
    cov = np.asarray(cov, np.float64)
    scale = float(np.abs(cov).max())
    if cov.ndim == 1:
        smallest = float(cov.min())
    else:
        # Relative to the largest entry: covariances are often computed in float32.
        skew = float(np.abs(cov - cov.T).max())
        if skew > 1e-6 * scale:
            raise ModelError(
                "cov must be symmetric, "
                f"found entries that differ from their mirror image by {skew:.3g}"
            )
        smallest = float(np.linalg.eigvalsh(cov).min())
    if smallest < -1e-6 * scale:
        raise ModelError(f"cov must be positive semidefinite, found the eigenvalue {smallest:.3g}")


def _without_rounding(cov: Any) -> Any:
    """The symmetric part of a covariance matrix, or a diagonal with negative entries set to 0.

    All routes of computation then read the same numbers. Without such rounding the array itself is
    returned.
    """
    if isinstance(cov, Tracer):
        return cov
    given = np.asarray(cov)
    # Rounding makes covariances unsymmetric and variances negative; both are checked to be small
    # before.
    if given.ndim == 1:
        kept = np.maximum(given, 0)
    else:  # a mean of halves, as sums of the largest floats are none
        kept = np.where(given == given.T, given, given / 2 + given.T / 2)
    return cov if np.array_equal(kept, given) else as_array(kept, "the input covariance", cov.ndim)


def _check_together(mean: Any, cov: Any) -> None:
    """Raise `ModelError` where no input can have both the mean and the covariance.

    For sequences, either may cover all positions while the other repeats at each position,
    so the larger size may be a multiple of the smaller. The n_ctx of a model decides later.
    """
    small, large = sorted((mean.shape[0], cov.shape[0]))
    if mean.ndim == 1 and large % small:
        raise ModelError(f"mean has {mean.shape[0]} coordinates but cov {cov.shape[0]}")


class InputKind(NamedTuple):
    """Structure of the moments of a vector input.

    Args:
        centred: Whether the mean is zero, so that no leg is ever handed to it.
        moment: The second moment: "identity", "diagonal" or "full".
    """

    centred: bool
    moment: str


class SequenceInputs(NamedTuple):
    """Structure of the Gaussian over sequences.

    Args:
        mean: Form of the mean: None for zero, "alike" at every position, or "each" where every
            position has its own.
        covariance: Form of the covariance over positions and whether only a diagonal is stored;
            None for the identity. A form that is "alike" is independent between positions.
    """

    mean: Literal["alike", "each"] | None
    covariance: tuple[PositionForm, bool] | None

    @property
    def form(self) -> tuple[PositionForm, bool]:
        """The form of the covariance; the identity counts as a matrix."""
        return self.covariance or ("alike", False)

    def mean_shape(self, d: int, n_ctx: int) -> tuple[int, ...]:
        """Shape of the mean over n_ctx positions of d coordinates."""
        return (n_ctx, d) if self.mean == "each" else (d,)

    def covariance_shape(self, d: int, n_ctx: int) -> tuple[int, ...]:
        """Shape of the covariance over n_ctx positions; the identity counts as a matrix."""
        over, is_diagonal = self.form
        shape = (d,) if over == "alike" else (n_ctx, d)
        return shape if is_diagonal else shape * 2


def whole_tree_kind(metric: Metric, lifted: bool) -> InputKind:
    """Structure of the second moment that diagrams over whole trees use.

    Diagrams have no legs for a mean. With a mean, or with the constant of the lift, they run at
    full second moments `C + t m m^T`, and the kind counts as not centred (see `input_moments`).
    Where bra legs only meet ket legs, the constant is a coordinate like any other.
    """
    mean, cov = _mean_and_covariance(metric)
    if metric.pairs_within_model and (lifted or mean is not None):
        return InputKind(centred=False, moment="full")
    return InputKind(centred=True, moment=_structure(cov))


def input_moments(metric: Metric, d: int, lifted: bool, t: float | None = None) -> dict[str, Any]:
    """Moment arrays of a vector input with D = d coordinates, or D = d + 1 with the constant first.

    Args:
        metric: Metric with a mean and a covariance; without them, zero and the identity.
        d: Coordinates that the models read.
        lifted: Whether to add the constant.
        t: Variance of the constant, of either sign, for the second moment `C + t m m^T` (see
            `problems.families`); None for the moment of the input itself, as at 1.

    Returns:
        Arrays by the names of leaves. `MEAN` is E[x], (D,), absent where zero. `COVARIANCE` is the
        second moment E[x x^T], (D, D), or its diagonal (D,) where all other entries are zero;
        absent where it is the identity. At a t it is a matrix.

    Raises:
        ModelError: The metric is for another number of coordinates.
    """
    check_coordinates(metric, d)
    mean, cov = _mean_and_covariance(metric)
    xp = library(mean, cov)
    # With M = (1, m) lifted, else M = m: E[x~ x~^T] = C + M M^T, C padded with zeros if lifted.
    structure = _structure(cov) if mean is None and t is None else "full"
    moments = {}
    if lifted:
        mean = xp.concatenate([xp.ones(1), xp.zeros(d) if mean is None else mean])
    if mean is not None:
        moments[MEAN] = mean
    if structure == "diagonal":
        moments[COVARIANCE] = xp.concatenate([xp.ones(1), cov]) if lifted else cov
    elif structure == "full":
        moment = _as_matrix(xp, cov, d)
        if lifted:
            moment = xp.pad(moment, ((1, 0), (1, 0)))  # the constant does not vary
        if mean is not None:
            moment = moment + (1.0 if t is None else t) * mean[:, None] * mean[None, :]
        moments[COVARIANCE] = moment
    return moments


@pytree
@dataclass(frozen=True, eq=False)
class MomentInParts:
    """A second moment `diag(spread) + mean mean^T` that is not written out.

    That of GPT-2's tokens, as a matrix, would have 20 GiB.

    Args:
        spread: Variances, (D,).
        mean: Means, (D,).

    Example:
        >>> moment = MomentInParts(np.ones(2), np.array([1.0, 2.0]))
        >>> moment.behind(np.eye(2)).tolist()
        [[2.0, 2.0], [2.0, 5.0]]
    """

    spread: Float[Array, " lifted"]
    mean: Float[Array, " lifted"]

    def behind(self, rows: Any) -> Any:
        """The matrix `rows S`."""
        return rows * self.spread + (rows @ self.mean)[:, None] * self.mean

    def matrix(self) -> Float[Array, "lifted lifted"]:
        """The moment written out."""
        return library(self.spread).diag(self.spread) + self.mean[:, None] * self.mean


def moments_at_a_position(metric: Metric, d: int, n_ctx: int | None) -> tuple[Any, Any]:
    """The lifted mean and second moment of an input; for sequences, averaged over positions.

    Args:
        metric: Metric with a mean and a covariance; without them, zero and the identity.
        d: Coordinates that the models read.
        n_ctx: Number of positions, None for vectors.

    Returns:
        E[x~], (1 + d,), and E[x~ x~^T], (1 + d, 1 + d); of independent coordinates in parts.

    Example:
        >>> import tnsim
        >>> _, second = moments_at_a_position(tnsim.GaussianClosure(mean=[2.0]), 1, n_ctx=3)
        >>> second.matrix().tolist()
        [[1.0, 2.0], [2.0, 5.0]]
    """
    _, means, covs = zip(*marginals(metric, d, n_ctx), strict=True)
    # What is alike at every position is one object.
    means, covs = (each[:1] if each[0] is each[-1] else each for each in (means, covs))
    xp = library(means, covs)
    rows = xp.zeros((1, d)) if means[0] is None else xp.stack(means)
    means = xp.concatenate([xp.ones((len(rows), 1)), rows], axis=1)
    cov = None if covs[0] is None else sum(covs) / len(covs)
    if len(means) == 1 and (cov is None or cov.ndim == 1):
        spread = xp.concatenate([xp.zeros(1), xp.ones(d) if cov is None else cov])
        return means[0], MomentInParts(spread, means[0])
    second = xp.pad(_as_matrix(xp, cov, d), ((1, 0), (1, 0)))
    # E[x~ x~^T] = C + M M^T with M = (1, m_s), averaged over positions s.
    return means.mean(axis=0), second + means.T @ means / len(means)


def marginals(metric: Metric, d: int, n_ctx: int | None) -> tuple[tuple[int, Any, Any], ...]:
    """The distributions of the input at single positions.

    Args:
        metric: Metric with a mean and a covariance; without them, zero and the identity.
        d: Coordinates that the models read.
        n_ctx: Number of positions, None for vectors.

    Returns:
        Triples (number of positions alike, mean, covariance). A mean is (d,), None for zero; a
        covariance is (d, d), (d,) for a diagonal, or None for the identity.

    Raises:
        ModelError: The metric is for another number of coordinates.

    Example:
        >>> import tnsim
        >>> marginals(tnsim.Gaussian(mean=[2.0]), 1, n_ctx=3)
        ((3, array([2.]), None),)
    """
    mean, cov = _mean_and_covariance(metric)
    if n_ctx is None:
        check_coordinates(metric, d)
        return ((1, mean, cov),)
    form = sequence_inputs(metric, d, n_ctx)
    moments = sequence_moments(metric, d, n_ctx)
    mean, cov = moments.get(MEAN), moments.get(COVARIANCE)
    over, _ = form.form
    if form.mean != "each" and over == "alike":
        return ((n_ctx, mean, cov),)
    means: Any = mean if form.mean == "each" else [mean] * n_ctx
    covs: Any = cov if over == "each" else [cov] * n_ctx
    if over == "full":  # blocks between positions are no moments of a single position
        covs = [every[s, :, s] for s, every in enumerate(covs)]
    return tuple((1, *own) for own in zip(means, covs, strict=True))


def root_of(cov: Any, rounding: float = ROUNDING_OF_COVARIANCES) -> Any:
    """A matrix L with `L L^T` the covariance, which may be singular.

    The root is taken of the matrix of correlations, so that coordinates of very different variance
    keep their digits. A traced matrix has a Cholesky factor instead: eigenvectors of equal
    eigenvalues have no derivative.

    Args:
        cov: Covariance (d, d), its diagonal (d,), or None for the identity.
        rounding: Eigenvalue that is taken for zero, in units of `eps d` of the largest one.

    Returns:
        A matrix (d, d), a vector (d,) for a diagonal matrix, or None for the identity.

    Example:
        >>> root_of(np.array([4.0, 0.0]))
        array([2., 0.])
    """
    if cov is None:
        return None
    if isinstance(cov, Tracer):
        xp = library(cov)
        return xp.sqrt(cov) if cov.ndim == 1 else xp.linalg.cholesky(cov)
    cov = np.asarray(cov, np.float64)
    if cov.ndim == 1:
        return np.sqrt(np.clip(cov, 0.0, None))
    deviations = np.sqrt(np.clip(np.diag(cov), 0.0, None))
    # C = U R U with deviations U and correlations R, so L = U V sqrt(values); a coordinate without
    # variance has zeros in R.
    units = np.where(deviations > 0, deviations, 1.0)
    values, vectors = np.linalg.eigh((cov + cov.T) / 2 / units / units[:, None])
    kept = values > rounding * np.finfo(np.float64).eps * len(cov) * values[-1]
    return units[:, None] * vectors * np.sqrt(np.where(kept, values, 0.0))


def mean_of(metric: Metric, d: int) -> Float[np.ndarray, " d"]:
    """The mean of the inputs of a metric, zeros where it has none.

    Args:
        metric: Any metric.
        d: Number of coordinates of the inputs.

    Raises:
        ModelError: The metric is for inputs of another width.

    Example:
        >>> import tnsim
        >>> mean_of(tnsim.Gaussian(), 2)
        array([0., 0.])
    """
    check_coordinates(metric, d)
    mean = getattr(metric, "mean", None)
    return np.zeros(d) if mean is None else np.asarray(mean, np.float64)


def mean_and_root(
    metric: Metric, d: int
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]]:
    """The mean and a root of the covariance of d coordinates, see `mean_of` and `root_of`.

    The covariance may be singular, and the root be a diagonal: no matrix is made where none was
    given, as of tokens.
    """
    cov = getattr(metric, "cov", None)
    return mean_of(metric, d), np.ones(d) if cov is None else root_of(cov)


def input_sizes(metric: Metric, d: int) -> Float[Array, " d"]:
    """Sizes of the coordinates of an input, as logarithms to base 2, over all positions.

    Args:
        metric: Metric with a mean and a covariance; without them, zero and the identity.
        d: Coordinates that the models read at a position.

    Returns:
        The larger of deviation and mean, (d,), without a derivative; 0 for a coordinate that
        is always zero.

    Example:
        >>> import tnsim
        >>> input_sizes(tnsim.Gaussian(mean=[8.0, 0.0], cov=[4.0, 0.25]), 2).tolist()
        [3.0, -1.0]
    """
    mean, cov = _mean_and_covariance(metric)
    xp = library(mean, cov)
    mean, cov = not_differentiated((mean, cov))
    squares = xp.ones(d) if cov is None else cov.diagonal() if cov.ndim == 2 else cov
    sizes = _log2(xp, squares).reshape(-1, d).max(axis=0) / 2
    if mean is not None:
        sizes = xp.maximum(sizes, _log2(xp, abs(mean)).reshape(-1, d).max(axis=0))
    return xp.where(sizes == -xp.inf, 0.0, sizes)


def in_input_units(metric: Metric, unit: Any, d: int) -> Metric:
    """The same metric over inputs in units of `2 ** unit`; exact, as units are powers of two.

    Args:
        metric: Metric with a mean and a covariance.
        unit: Exponents of two, the same for all or for each coordinate of a position, (d,).
        d: Coordinates that the models read at a position.

    Example:
        >>> import tnsim
        >>> far = tnsim.Gaussian(mean=[8.0, 0.0])
        >>> near = in_input_units(far, np.array([2.0, 0.0]), d=2)
        >>> near.mean.tolist(), near.cov.tolist()
        ([2.0, 0.0], [0.0625, 1.0])
    """
    mean, cov = _mean_and_covariance(metric)
    unit = unit + np.zeros(d)

    def over(length: int) -> Any:
        """The exponents of coordinates that may be flattened over positions."""
        return library(unit).tile(unit, length // d)

    if mean is not None:
        mean = shifted(mean, -over(mean.shape[-1]))
    cov = np.ones(d) if cov is None else cov
    rows = over(len(cov))
    cov = shifted(cov, -(rows + (rows if cov.ndim == 1 else rows[:, None])))
    return replaced(metric, {"mean": mean, "cov": cov})


def _log2(xp: Any, values: Any) -> Any:
    """Logarithms to base 2, -inf for zero."""
    positive = values > 0
    return xp.where(positive, xp.log2(xp.where(positive, values, 1.0)), -xp.inf)


def sequence_inputs(metric: Metric, d: int, n_ctx: int) -> SequenceInputs:
    """Structure of the Gaussian of a metric over sequences of n_ctx positions with d coordinates.

    A mean may be (d,), the same at every position, or (n_ctx, d) or (n_ctx * d,). A covariance may
    be (d,) or (d, d), the same at every position and independent between positions, or
    (n_ctx * d,) or (n_ctx * d, n_ctx * d) over all coordinates, position-major.

    Raises:
        ModelError: The mean or the covariance has another shape.
    """
    mean, cov = _mean_and_covariance(metric)
    every = n_ctx * d
    means: dict[tuple[int, ...], Literal["alike", "each"]] = {
        (d,): "alike",
        (n_ctx, d): "each",
        (every,): "each",
    }
    covariances: dict[tuple[int, ...], tuple[PositionForm, bool]] = {
        (every,): ("each", True),
        (every, every): ("full", False),
        (d,): ("alike", True),  # last, so that with a single position the simpler forms win
        (d, d): ("alike", False),
    }
    for what, array, known in (("mean", mean, means), ("covariance", cov, covariances)):
        if array is not None and tuple(array.shape) not in known:
            raise ModelError(
                f"the metric's {what} has shape {tuple(array.shape)}, but sequences of {n_ctx} "
                f"positions with {d} coordinates need one of {', '.join(map(str, known))}"
            )
    mean_form = None if mean is None else means[tuple(mean.shape)]
    if mean_form is not None and n_ctx == 1:
        mean_form = "alike"
    return SequenceInputs(mean_form, None if cov is None else covariances[tuple(cov.shape)])


def sequence_moments(metric: Metric, d: int, n_ctx: int) -> dict[str, Any]:
    """Moment arrays of a sequence input.

    Returns:
        Arrays by the names of leaves: `MEAN`, absent where zero, and `COVARIANCE` (about the mean),
        absent where it is the identity, in the shapes that `sequence_inputs` announces.

    Raises:
        ModelError: The mean or the covariance has a shape that `sequence_inputs` refuses.
    """
    inputs = sequence_inputs(metric, d, n_ctx)
    mean, cov = _mean_and_covariance(metric)
    moments = {}
    if mean is not None:
        moments[MEAN] = mean.reshape(inputs.mean_shape(d, n_ctx))
    if cov is not None:
        moments[COVARIANCE] = cov.reshape(inputs.covariance_shape(d, n_ctx))
    return moments


def flattened(metric: Metric, d: int, n_ctx: int) -> Metric:
    """The same metric over flattened sequences, (n_ctx * d,), position-major.

    Raises:
        ModelError: The mean or the covariance has a shape that `sequence_inputs` refuses.
    """
    inputs = sequence_inputs(metric, d, n_ctx)
    if not isinstance(metric, GaussianMoments):
        return metric
    mean, cov = _mean_and_covariance(metric)
    if mean is not None:
        mean = np.asarray(mean).reshape(-1)
        mean = np.tile(mean, n_ctx) if inputs.mean == "alike" else mean
    over, is_diagonal = inputs.form
    if cov is not None and over == "alike":
        cov = np.tile(cov, n_ctx) if is_diagonal else np.kron(np.eye(n_ctx), cov)
    return dataclasses.replace(metric, mean=mean, cov=cov)


def check_coordinates(metric: Metric, d: int) -> None:
    """Raise `ModelError` unless the mean and covariance of a metric are for d coordinates.

    Example:
        >>> import tnsim
        >>> check_coordinates(tnsim.Gaussian(mean=[1.0, 2.0]), d=2)
    """
    mean, cov = _mean_and_covariance(metric)
    if mean is not None and mean.ndim == 2:
        raise ModelError(
            f"the metric's mean has shape {tuple(mean.shape)}, as for sequences, "
            f"but the models read {d} coordinates"
        )
    for what, array in (("mean", mean), ("covariance", cov)):
        if array is not None and array.shape[0] != d:
            raise ModelError(
                f"the metric's {what} has {array.shape[0]} coordinates but the models read {d}"
            )


def _mean_and_covariance(metric: Metric) -> tuple[Any, Any]:
    """Mean and covariance of a metric, in float64 unless they are traced.

    None stands for zero and the identity, and for the moments of metrics that have none.
    """
    return in_float64((getattr(metric, "mean", None), getattr(metric, "cov", None)))


def _as_matrix(xp: Any, array: Any, d: int) -> Any:
    """The matrix (d, d) of a covariance: of a diagonal, of a matrix, or of None (the identity)."""
    if array is None:
        return xp.eye(d)
    return xp.diag(array) if array.ndim == 1 else array


def _structure(cov: Any) -> str:
    """Structure of a covariance: "identity", "diagonal" or "full"."""
    if cov is None:
        return "identity"
    return "diagonal" if cov.ndim == 1 else "full"


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


@session_cache
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
    mean, root = _of_whole_inputs(metric, reading)
    root = np.diag(root) if root.ndim == 1 else root
    # The model reads each position through the same rows, so a sequence through the block-diagonal
    # matrix of them.
    every = np.kron(np.eye(reading.n_ctx or 1), rows)
    vectors = _span_basis(every @ root, np.abs(every) @ np.abs(root))
    turned = root @ vectors.T
    # Routes are weighed by the number of points alone: most comparisons ask for no node, and do
    # without the import of SciPy.
    axes = turned.shape[1]
    points = Points(nodes**axes, partial(_hermite_block, nodes, axes))
    return mapped(points, partial(_inputs_at, mean, turned, reading.shape))


def _hermite_block(nodes: int, axes: int, start: int, stop: int) -> WeightedPoints:
    """Some points of a product of Gauss-Hermite rules, see `Points.block`."""
    return product_rule([hermite_rule(nodes)] * axes).block(start, stop)


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
    return partial(_inputs_at, *_of_whole_inputs(metric, reading), reading.shape)


def _inputs_at(
    mean: np.ndarray, root: np.ndarray, shape: tuple[int, ...], z: np.ndarray
) -> np.ndarray:
    """The inputs mean + root z, where the root may be a diagonal."""
    centred = z * root if root.ndim == 1 else z @ root.T
    return (mean + centred).reshape(len(z), *shape)


def _of_whole_inputs(
    metric: Any, reading: Reading
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]]:
    """See `mean_and_root`: of sequences, flattened."""
    if reading.n_ctx is not None:
        metric = flattened(metric, reading.d_in, reading.n_ctx)
    return mean_and_root(metric, math.prod(reading.shape))
