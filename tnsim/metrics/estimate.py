"""The estimate of a Gaussian inner product, for networks that have no exact one.

A network of several layers with activations, or a function of which nothing is known, has no closed
form under `Gaussian`. Its inner product is a mean over normal inputs all the same, and points that
cover the space evenly tell this mean with fewer forward passes than draws do. The points are those
of Sobol's sequence in the unit cube, mapped to normal numbers coordinate by coordinate. Scrambled
at random (Owen 1998) each point is distributed uniformly, so that every mean is unbiased, and
replicates with scrambles of their own are independent: they give the standard error, by a jackknife
over replicates.

Source:
    Owen, Scrambling Sobol' and Niederreiter-Xing points, 1998.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.metrics.finite_measures import Empirical, RowsOnDemand
from tnsim.metrics.input_moments import normal_map
from tnsim.metrics.metric import Gaussian
from tnsim.metrics.protocol import Points, Reading
from tnsim.models.arrays import pytree

REPLICATES = 16
"""Number of independent scrambles: the standard error is known to a sixth of itself."""
_MOST_COORDINATES = 21_201
"""Dimension of the table of direction numbers that SciPy has (Joe and Kuo 2008)."""
_BITS = 30  # binary digits of a coordinate in the unit cube


class NormalInputs(RowsOnDemand):
    """Scrambled Sobol points of N(mean, cov), made when rows are asked for.

    Rows are numbered replicate by replicate. Beyond 21,201 coordinates, which is as far as tables
    of Sobol's sequence go, they are independent draws.

    Args:
        metric: Gaussian metric with a mean and a covariance, each optional.
        shape: Shape of an input: (d,), or (n_ctx, d) for sequences.
        samples: Least number of rows, which is rounded up to a multiple of `REPLICATES`.

    Example:
        >>> inputs = NormalInputs(Gaussian(mean=[3.0]), (1,), 1000)
        >>> len(inputs), float(inputs[:].mean().round(1))
        (1008, 3.0)
    """

    dtype = np.dtype(np.float64)

    def __init__(self, metric: Gaussian, shape: tuple[int, ...], samples: int) -> None:
        self._each = math.ceil(samples / REPLICATES)
        self._coordinates = math.prod(shape)
        n_ctx = shape[0] if len(shape) == 2 else None
        self._to_inputs = normal_map(metric, Reading(shape[-1], n_ctx, degree=1))
        self.shape = (self._each * REPLICATES, *shape)

    def __getitem__(self, rows: slice) -> Float[np.ndarray, "rows ..."]:
        start, stop, _ = rows.indices(len(self))
        blocks = []
        for replicate in range(start // self._each, math.ceil(stop / self._each)):
            first = replicate * self._each
            within = max(start - first, 0), min(stop - first, self._each)
            blocks.append(self._normal_numbers(replicate, *within))
        z = np.concatenate(blocks) if blocks else np.zeros((0, self._coordinates))
        return self._to_inputs(z)

    def _normal_numbers(self, replicate: int, start: int, stop: int) -> np.ndarray:
        """Rows start to stop - 1 of a replicate, as standard normal numbers."""
        from scipy.special import ndtri
        from scipy.stats import qmc

        rng = np.random.default_rng([0, replicate])
        if self._coordinates > _MOST_COORDINATES:
            return rng.normal(size=(stop, self._coordinates))[start:]
        sequence = qmc.Sobol(self._coordinates, bits=_BITS, rng=rng)
        if start:
            sequence.fast_forward(start)
            cube = sequence.random(stop - start)
        else:  # from the beginning of the sequence SciPy warns of all but powers of two
            cube = sequence.random_base2((stop - 1).bit_length())[:stop]
        # Coordinates are multiples of 2^-30 from 0 on: the middle of each interval is inside of
        # (0, 1), where the quantiles of the normal distribution are finite.
        return ndtri(cube + 0.5 ** (_BITS + 1))


@pytree
@dataclass(frozen=True, eq=False)
class GaussianEstimate(Empirical):
    """`Gaussian` by forward passes at scrambled Sobol points, with a standard error.

    The inputs are a `NormalInputs`. Made by `estimate_of`.
    """

    name = "gaussian"

    def __post_init__(self) -> None:
        """Inputs are made here and need no check."""

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether sums are the metric's: never, they estimate it."""
        return False

    def points(self, reading: Reading | None) -> Points:
        """The points, whose replicates are independent of each other."""
        return dataclasses.replace(super().points(reading), replicates=REPLICATES)


def estimate_of(metric: Gaussian, shape: tuple[int, ...]) -> GaussianEstimate:
    """The estimate of a Gaussian metric on inputs of a shape.

    Args:
        metric: Gaussian metric; its `samples` are the number of inputs.
        shape: Shape of an input: (d,), or (n_ctx, d) for sequences.

    Raises:
        ModelError: The mean or the covariance is for inputs of another shape, or traced.

    Example:
        >>> estimate_of(Gaussian(), (3,)).inputs.shape
        (16384, 3)
    """
    if len(shape) > 2:
        raise ModelError(
            f"inputs of a Gaussian are vectors (d,) or sequences (n_ctx, d), found {shape}: give "
            "inputs of your own by tnsim.Empirical(inputs)"
        )
    return GaussianEstimate(NormalInputs(metric, shape, metric.samples))
