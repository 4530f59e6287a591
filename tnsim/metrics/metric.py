"""Metrics that join input legs, with a table of all metrics; and the estimate of a Gaussian one.

An inner product is `<A|M|B>` with `M = 1 (x) Lambda` (paper, section 2.2): outputs meet outputs,
and Lambda joins the input legs of A, the bra, with the input legs of B, the ket.

    metric            joins                              exact for
    Frobenius         leg i with leg i                   the tensor as written
    TreeSymmetric     leg i with leg i, ket symmetrised  the tensor symmetrised layer by layer
    Symmetric         bra with ket legs, in all ways     the tensor symmetrised over all its legs
    Gaussian          all pairings (Isserlis)            E<A(x), B(x)>, any depth
    GaussianClosure   all pairings, layer by layer       1 nonlinear layer; beyond, hidden states
                                                         are *treated as* Gaussian
    Categorical       no legs: tokens are counted        E<A(x), B(x)> over sequences of tokens
    Empirical         no legs: inputs are added up       the mean of <A(x), B(x)> over given inputs
    Product           no legs: inputs are added up       E<A(x), B(x)>, independent coordinates

The attributes of a metric are written down in `protocol`. A metric that works *layer by layer* says
by which rule the legs of a layer of the bra meet those of a layer of the ket
(`orbits.PairingRule`).

A joining as a network is written in `tensor_networks`, as part of a plan in `problems`. `Gaussian`
beyond a single nonlinear layer and `Symmetric` join the legs of whole trees instead (see `orbits`).

*The estimate of a Gaussian inner product* is for networks that have no exact one. A network of
several layers with activations, or a function of which nothing is known, has no closed form under
`Gaussian`. Its inner product is a mean over normal inputs all the same, and points that cover the
space evenly tell this mean with fewer forward passes than draws do. The points are those of Sobol's
sequence in the unit cube, mapped to normal numbers coordinate by coordinate. Scrambled at random
(Owen 1998) each point is distributed uniformly, so that every mean is unbiased, and replicates with
scrambles of their own are independent: they give the standard error, by a jackknife over
replicates.

Source:
    Owen, Scrambling Sobol' and Niederreiter-Xing points, 1998.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, cast

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.finite_measures import Categorical, Empirical, RowsOnDemand
from tnsim.metrics.input_moments import GaussianMoments, normal_map
from tnsim.metrics.orbits import PairingRule
from tnsim.metrics.protocol import LayerwiseMetric, Metric, Points, Reading, adds_up, joins_layers
from tnsim.models.arrays import pytree
from tnsim.options import checked

_FEWEST_SAMPLES = 32
"""Fewest inputs of an estimate: two for each of the replicates that tell its standard error."""
_MOST_SAMPLES = 2**30
"""Most inputs of an estimate, each with a weight in memory."""


class _AlwaysExact:
    """Base of metrics that are computed as they are defined, for all models."""

    def is_exact(self, nonlinear_layers: int) -> bool:
        return True


@pytree
@dataclass(frozen=True, eq=False)
class Frobenius(_AlwaysExact):
    """The inner product of tensors as they are written, entry by entry: exact.

    The metric is invariant under none of the symmetries of a function: models that compute the same
    may differ.

    Example:
        `x_0 x_1` and `x_1 x_0`.

        >>> import tnsim
        >>> first, second, down = [[1.0, 0.0]], [[0.0, 1.0]], [[1.0]]
        >>> a = tnsim.Model([tnsim.Bilinear(first, second, down)])
        >>> b = tnsim.Model([tnsim.Bilinear(second, first, down)])
        >>> float(tnsim.similarity(a, b, tnsim.Frobenius()))
        0.0

    Source:
        Paper, section 2.2, with `Lambda` the identity.
    """

    name = "frobenius"
    pairs_within_model = False
    rule = PairingRule.AS_WRITTEN


@pytree
@dataclass(frozen=True, eq=False)
class TreeSymmetric(_AlwaysExact):
    """The inner product of tensors symmetrised layer by layer: exact, at a cost linear in depth.

    A similarity of 1 implies the same function up to a factor. The converse does not hold beyond
    a single nonlinear layer: different trees may compute the same polynomial (see `Symmetric`).

    Example:
        `x_0 x_1` and `x_1 x_0`.

        >>> import tnsim
        >>> first, second, down = [[1.0, 0.0]], [[0.0, 1.0]], [[1.0]]
        >>> a = tnsim.Model([tnsim.Bilinear(first, second, down)])
        >>> b = tnsim.Model([tnsim.Bilinear(second, first, down)])
        >>> print(f"{tnsim.similarity(a, b, tnsim.TreeSymmetric()):.3f}")
        1.000

    Source:
        Paper, appendix A.2.
    """

    name = "tree"
    pairs_within_model = False
    rule = PairingRule.SYMMETRISED


@pytree
@dataclass(frozen=True, eq=False)
class Symmetric(_AlwaysExact):
    """The inner product of tensors symmetrised over all n legs, `Lambda = P_n`: exact.

    The similarity is 1 if and only if the models are the same function up to a positive factor.
    Both models must have the same degree. The cost is a diagram per orbit of the n! ways to join
    bra and ket legs.

    Example:
        `(x_0 x_1) (x_0 x_1)` and `(x_0 x_0) (x_1 x_1)` are different trees for a single function.

        >>> import numpy as np
        >>> import tnsim
        >>> zero, one, both = [[1.0, 0.0]], [[0.0, 1.0]], np.eye(2)
        >>> product = tnsim.Bilinear(zero, one, [[1.0]])
        >>> a = tnsim.Model([product, tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> b = tnsim.Model([tnsim.Bilinear(both, both, both), product])
        >>> print(f"{tnsim.similarity(a, b, tnsim.Symmetric()):.3f}")
        1.000
        >>> print(f"{tnsim.similarity(a, b, tnsim.TreeSymmetric()):.3f}")
        0.000

    Source:
        Paper, section 2.3.
    """

    name = "symmetric"
    pairs_within_model = False


@checked(own="samples")
@pytree
@dataclass(frozen=True, eq=False)
class Gaussian(GaussianMoments, _AlwaysExact):
    """`E<A(x), B(x)>` over x ~ N(mean, cov), by Isserlis' theorem: exact at any depth.

    The cost is a Gram step for models with a single nonlinear layer, and a diagram per orbit of
    pairings of all legs for deeper models.

    Args:
        mean: Mean (d,), or None for zero. For sequences also (n_ctx, d) or (n_ctx * d,).
        cov: Covariance (d, d), (d,) for a diagonal, or None for the identity. For sequences also
            (n_ctx * d, n_ctx * d) or (n_ctx * d,), position-major; else positions are independent.
        samples: Number of inputs at which networks are run that have no exact inner product, such
            as deep ReLU networks: the result is then an estimate with a standard error. Rounded up
            to a multiple of 16; powers of two are the most precise. 0 refuses such networks.

    Raises:
        ModelError: The covariance is not symmetric and positive semidefinite, or does not fit the
            mean; or there are fewer than 32 samples, and not none.

    Example:
        The square of a normal number has E[x^2 x^2] = 3; around 1, E[(1 + x)^4] = 10.

        >>> import tnsim
        >>> square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> print(f"{tnsim.inner(square, square, tnsim.Gaussian()):.3f}")
        3.000
        >>> print(f"{tnsim.inner(square, square, tnsim.Gaussian(mean=[1.0])):.3f}")
        10.000

    Source:
        Paper, section 2.3 and appendix A.3.
    """

    samples: int = field(default=2**14, metadata={"static": True})
    name = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.samples
        if not isinstance(count, Integral) or not (
            count == 0 or _FEWEST_SAMPLES <= count <= _MOST_SAMPLES
        ):
            raise ModelError(
                f"samples of a Gaussian are a whole number, {_FEWEST_SAMPLES} to 2^30, or 0 to "
                f"refuse networks that have no exact inner product, found {count!r}"
            )


@pytree
@dataclass(frozen=True, eq=False)
class GaussianClosure(GaussianMoments):
    """Isserlis' theorem layer by layer, with hidden states treated as Gaussian.

    The value is equal to `Gaussian` for a single nonlinear layer and an approximation beyond. The
    cost is linear in depth. Layers with activations count as nonlinear ones, and have exact kernels
    as moments (see `problems.kernels`). The error of the approximation is not small: trained
    networks of cosine 0.99 have 0.63 to 0.97 (benchmarks/results/closure-error.md).

    Two models of different depth have to be aligned, and beyond a single nonlinear layer the value
    depends on the alignment: layers are matched from the input up, first nonlinear layer with first
    nonlinear layer, and linear layers need no partner. The state of a model without further layers
    is carried along unchanged. Padding a model with identities keeps the value only if the
    alignment still matches the same layers.

    Args:
        mean: Mean of the inputs, in the forms that `Gaussian` takes.
        cov: Covariance of the inputs, in the forms that `Gaussian` takes.

    Raises:
        ModelError: The covariance is not symmetric and positive semidefinite, or does not fit the
            mean.

    Example:
        The fourth power as a square of a square. Exactly, E[x^8] = 105. The square has mean 1 and
        variance 2, and a Gaussian h like that has E[h^4] = 1 + 6 * 2 + 3 * 2^2 = 25.

        >>> import tnsim
        >>> square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> fourth = tnsim.Model([square, square])
        >>> print(f"{tnsim.inner(fourth, fourth, tnsim.Gaussian()):.3f}")
        105.000
        >>> print(f"{tnsim.inner(fourth, fourth, tnsim.GaussianClosure()):.3f}")
        25.000

    Source:
        Paper, appendix A.3, applied to a single layer at a time.
    """

    name = "closure"

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether the models have no second nonlinear layer, as outputs are no longer Gaussian."""
        return nonlinear_layers <= 1


METRICS: dict[str, Any] = {
    cls.name: cls
    for cls in (Gaussian, GaussianClosure, Symmetric, TreeSymmetric, Frobenius, Categorical)
}
"""The metrics that need no arguments, by the names that stand for them."""


def is_metric(given: Any) -> bool:
    """Whether a value is a metric, of tnsim or of a user.

    Example:
        >>> is_metric(Gaussian()), is_metric(Gaussian)
        (True, False)
    """
    # The class of a metric has its methods too, so it would pass for one.
    known = joins_layers(given) or adds_up(given) or isinstance(given, Symmetric)
    return known and not isinstance(given, type)


def as_metric(metric: Any) -> Metric:
    """The metric that an argument of a verb says: itself, or that of a name.

    Raises:
        ModelError: The argument is neither, such as inputs or the class of a metric.

    Example:
        >>> as_metric("tree"), as_metric(Frobenius())
        (TreeSymmetric(), Frobenius())
    """
    if isinstance(metric, str) and metric in METRICS:
        return METRICS[metric]()
    if not is_metric(metric):
        if isinstance(metric, list) or getattr(metric, "ndim", 0):
            raise ModelError(
                "expected a metric such as tnsim.Gaussian(), found an array: models are compared "
                "on inputs by tnsim.Empirical(inputs), and under their Gaussian by "
                "tnsim.Gaussian.fit(inputs)"
            )
        raise ModelError(
            f"expected a metric such as tnsim.Gaussian(), found {metric!r}; metrics are "
            "Gaussian(), GaussianClosure(), Symmetric(), TreeSymmetric(), Frobenius() and "
            f"Categorical(), which the names {', '.join(METRICS)} stand for, Empirical(inputs), "
            "Product(...), and classes of yours with what tnsim.metrics.protocol.FiniteMetric has"
        )
    return cast(Metric, metric)


def is_expectation(metric: Metric) -> bool:
    """Whether inner products are means over inputs, so that functions have means as well.

    Example:
        >>> is_expectation(Gaussian()), is_expectation(TreeSymmetric())
        (True, False)
    """
    return isinstance(metric, Gaussian | GaussianClosure) or adds_up(metric)


def joins_whole_trees(metric: type, nonlinear_layers: int) -> bool:
    """Whether a metric joins the legs of whole trees, instead of layer over layer."""
    return metric is Symmetric or (metric is Gaussian and nonlinear_layers > 1)


def layer_by_layer(
    metric: Metric, nonlinear_layers: int, degrees: tuple[int, int]
) -> LayerwiseMetric:
    """The metric that joins layer over layer and has the value of `metric` for models of sequences.

    Args:
        metric: Any metric that joins legs.
        nonlinear_layers: Number of nonlinear layers in the deeper model.
        degrees: Degrees of both models.

    Returns:
        `TreeSymmetric` for `Symmetric`, as both are the same for a single layer; else `metric`
        itself.

    Raises:
        TooLarge: The legs of whole trees would have to be joined.
    """
    # One nonlinear layer is a whole tree, whose legs a layer joins just as well.
    if nonlinear_layers > 1 and joins_whole_trees(type(metric), nonlinear_layers):
        raise TooLarge(
            f"{type(metric).__name__} joins the legs of whole models, here polynomials of degree "
            f"{degrees[0]} and {degrees[1]} in sequences; beyond one nonlinear layer, or with "
            "attention beside a product, that is for small models, of up to 20 legs together. "
            "Use GaussianClosure(), an approximation, or TreeSymmetric(), where layers of one kind "
            "meet, or forward passes, Empirical(inputs)"
        )
    if isinstance(metric, Symmetric):
        return TreeSymmetric()
    assert joins_layers(metric)
    return metric


REPLICATES = 16
"""Number of independent scrambles: the standard error is known to a sixth of itself."""
_MOST_COORDINATES = 21_201
"""Dimension of the table of direction numbers that SciPy has (Joe and Kuo 2008)."""
_BITS = 30  # binary digits of a coordinate in the unit cube


class SobolInputs(RowsOnDemand):
    """Scrambled Sobol points of N(mean, cov), made when rows are asked for.

    Rows are numbered replicate by replicate. Beyond 21,201 coordinates, which is as far as tables
    of Sobol's sequence go, they are independent draws.

    Args:
        metric: Gaussian metric with a mean and a covariance, each optional.
        shape: Shape of an input: (d,), or (n_ctx, d) for sequences.
        samples: Least number of rows, which is rounded up to a multiple of `REPLICATES`.

    Example:
        >>> inputs = SobolInputs(Gaussian(mean=[3.0]), (1,), 1000)
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

    The inputs are a `SobolInputs`. Made by `estimate_of`.
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
    return GaussianEstimate(SobolInputs(metric, shape, metric.samples))
