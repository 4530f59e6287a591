"""What the Gaussian metrics share. In: a mean and covariance, or samples. Out: checked moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.metrics import pairings
from tnsim.metrics.pairings import Joining
from tnsim.models.arrays import Array, as_array


@dataclass(frozen=True, eq=False)
class GaussianMoments:
    """What both Gaussian metrics share: the moments of x ~ N(mean, cov), and Isserlis' theorem."""

    mean: Float[Array, " d"] | None = None
    cov: Float[Array, "d d"] | Float[Array, " d"] | None = None
    pairs_within_model = True

    @classmethod
    def fit(cls, samples: Float[Array, "n d"]) -> Self:
        """The metric with the mean and the covariance of data or activations.

        Args:
            samples: n > 1 vectors of d coordinates, all finite.

        Returns:
            The metric with a mean (d,) and a covariance (d, d), divided by n, both float64.

        Raises:
            ModelError: There are fewer than two samples, or they are no finite matrix.
        """
        data = np.asarray(as_array(samples, "samples", 2), np.float64)
        if len(data) < 2:
            raise ModelError(f"fitting a Gaussian needs at least two samples, found {len(data)}")
        mean = data.mean(axis=0)
        return cls(mean, (data - mean).T @ (data - mean) / len(data))

    def joinings(self, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
        """All pairings, legs of one layer among themselves too, see `LayerwiseMetric`."""
        return pairings.gaussian(bra, ket, centred)

    def __post_init__(self) -> None:
        mean, cov = self.mean, self.cov
        if mean is not None:
            mean = as_array(mean, "the input mean", 2 if np.ndim(mean) == 2 else 1)
        if cov is not None:
            cov = as_array(cov, "the input covariance", np.ndim(cov))
            _check_covariance(cov)
            cov = _without_rounding(cov)
        if mean is not None and cov is not None:
            _check_together(mean, cov)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "cov", cov)


def _check_covariance(cov: Any) -> None:
    """Raise `ModelError` unless this is a covariance: square, or a diagonal, and semidefinite.

    Entries may differ from their mirror image, and eigenvalues from zero, by what rounding does to
    float32. Of an array that is traced only the shape is known.
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
    """The symmetric part of a covariance; of a diagonal what is not negative.

    Every way to compute then reads the same numbers. What needs no change stays as it is.
    """
    if isinstance(cov, Tracer):
        return cov
    given = np.asarray(cov)
    kept = np.maximum(given, 0) if given.ndim == 1 else (given + given.T) / 2
    return cov if np.array_equal(kept, given) else as_array(kept, "the input covariance", cov.ndim)


def _check_together(mean: Any, cov: Any) -> None:
    """Raise `ModelError` where mean and covariance can be of no common input.

    For sequences one of them may be over all positions and the other the same at each, so one size
    may be a multiple of the other. What they are, a model with its n_ctx decides.
    """
    small, large = sorted((mean.shape[0], cov.shape[0]))
    if mean.ndim == 1 and large % small:
        raise ModelError(f"mean has {mean.shape[0]} coordinates but cov {cov.shape[0]}")
