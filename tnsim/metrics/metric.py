"""Metrics: which inner product on input space is meant. In: diagrams, moments. Out: joinings and input nodes.

`<A|M|B>` with `M = 1 (x) Lambda` (paper, section 2.2). A metric says, for one layer of the bra over one of
the ket, in which ways their input legs are joined, and which operator sits on the inputs themselves.
What a joining looks like as a network is written in `closing`, as part of a plan in `folding`.

    metric            joins                              exact for
    Frobenius         leg i with leg i                   the tensor as written (no symmetry of the function)
    TreeSymmetric     leg i with leg i, ket symmetrised  the tensor symmetrised layer by layer
    Symmetric         bra legs with ket legs, all ways   the tensor symmetrised over all its legs
    Gaussian          all pairings (Isserlis)            E<A(x), B(x)>, any depth
    GaussianClosure   all pairings, layer by layer       one nonlinear layer; beyond, hidden states are
                                                         *treated as* Gaussian with their mean and covariance

`Gaussian` beyond one nonlinear layer and `Symmetric` join the legs of whole trees: those are in `deep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from tnsim.errors import ModelError, TooLarge
from tnsim.metrics import pairings as diagrams
from tnsim.metrics.pairings import Joining
from tnsim.metrics.protocol import LayerwiseMetric, Metric
from tnsim.models.layers import Array, as_array, pytree


class InputKind(NamedTuple):
    """Structure of the input operator: is there a mean, and is the second moment the identity, diagonal or full?"""

    centred: bool
    moment: str


class SequenceInputs(NamedTuple):
    """Structure of the Gaussian over sequences: its mean and its covariance between positions.

    mean: None, "alike" at every position or "each" its own. covariance: "identity", "diagonal" or "matrix", the
    same at every position and independent between them; "each diagonal"; or "full" over all coordinates.
    """

    mean: str | None
    covariance: str

    @property
    def form(self) -> tuple[str, bool]:
        """Form over positions, and whether only a diagonal is stored."""
        known = {
            "identity": ("alike", False),
            "diagonal": ("alike", True),
            "matrix": ("alike", False),
        }
        return (
            known.get(self.covariance)
            or {"each diagonal": ("each", True), "full": ("full", False)}[self.covariance]
        )

    def mean_shape(self, d: int, n_ctx: int) -> tuple[int, ...]:
        return (n_ctx, d) if self.mean == "each" else (d,)

    def covariance_shape(self, d: int, n_ctx: int) -> tuple[int, ...]:
        shapes = {"diagonal": (d,), "each diagonal": (n_ctx, d), "full": (n_ctx, d, n_ctx, d)}
        return shapes.get(self.covariance, (d, d))


class _AlwaysExact:
    """Of metrics that are computed as they are defined, whatever the models."""

    def is_exact(self, nonlinear_layers: int) -> bool:
        return True


@pytree
@dataclass(frozen=True, eq=False)
class Frobenius(_AlwaysExact):
    """The tensors as they are, entry against entry. Invariant under none of the symmetries; exact."""

    name = "frobenius"
    closes = False

    def joinings(self, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
        return diagrams.straight(bra, symmetrised=False)


@pytree
@dataclass(frozen=True, eq=False)
class TreeSymmetric(_AlwaysExact):
    """Each layer's legs symmetrised (paper, appendix A.2): similarity 1 implies the same function; exact."""

    name = "tree"
    closes = False

    def joinings(self, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
        return diagrams.straight(bra, symmetrised=True)


@pytree
@dataclass(frozen=True, eq=False)
class Symmetric(_AlwaysExact):
    """All n legs symmetrised, P_n (paper, section 2.3): similarity 1 if and only if the same function up to a factor.

    Exact; one diagram per orbit of the n! cross joinings. Both models must have the same degree.
    """

    name = "symmetric"
    closes = False


@dataclass(frozen=True, eq=False)
class _GaussianMoments:
    """The moments of x ~ N(mean, cov), checked."""

    mean: Float[Array, " d"] | None = None
    cov: Float[Array, "d d"] | Float[Array, " d"] | None = None
    closes = True

    @classmethod
    def fit(cls, samples: Float[Array, "n d"]) -> Any:
        """The metric with the mean and the covariance (1/n) of data or activations, (n, d); n > 1, all finite."""
        data = np.asarray(as_array(samples, "samples", 2), np.float64)
        if len(data) < 2:
            raise ModelError(f"fitting a Gaussian needs at least two samples, found {len(data)}")
        mean = data.mean(axis=0)
        return cls(mean, (data - mean).T @ (data - mean) / len(data))

    def joinings(self, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
        return diagrams.gaussian(bra, ket, centred)

    @staticmethod
    def _unlike(mean: Any, cov: Any) -> bool:
        """Neither is the other's size times a number of positions."""
        sizes = sorted((mean.shape[0], cov.shape[0]))
        return bool(sizes[1] % sizes[0])

    def __post_init__(self) -> None:
        mean = (
            None
            if self.mean is None
            else as_array(self.mean, "the input mean", 2 if np.ndim(self.mean) == 2 else 1)
        )
        cov = (
            None
            if self.cov is None
            else as_array(self.cov, "the input covariance", np.ndim(self.cov))
        )
        if cov is not None and (
            cov.ndim not in (1, 2) or (cov.ndim == 2 and cov.shape[0] != cov.shape[1])
        ):
            raise ModelError(
                f"cov must be a square matrix or the vector of its diagonal, found shape {tuple(cov.shape)}"
            )
        if cov is not None and not isinstance(cov, Tracer):
            _check_covariance(np.asarray(cov, np.float64))
        if (
            mean is not None
            and cov is not None
            and mean.ndim == 1
            and mean.shape[0] != cov.shape[0]
            and self._unlike(mean, cov)
        ):
            raise ModelError(f"mean has {mean.shape[0]} coordinates but cov {cov.shape[0]}")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "cov", cov)


@pytree
@dataclass(frozen=True, eq=False)
class Gaussian(_GaussianMoments, _AlwaysExact):
    """`E<A(x), B(x)>` over x ~ N(mean, cov), by Isserlis' theorem (paper, section 2.3 and appendix A.3); exact at any depth.

    One Gram step for one nonlinear layer; beyond, one diagram per orbit of pairings of all legs.

    mean: (d,), None for zero. cov: (d, d), or (d,) for a diagonal, None for the identity.
    Raises `ModelError` when cov is not symmetric and positive semidefinite.
    """

    name = "gaussian"


@pytree
@dataclass(frozen=True, eq=False)
class GaussianClosure(_GaussianMoments):
    """Isserlis layer by layer, every hidden state treated as Gaussian with the mean and covariance it has.

    Arguments as for `Gaussian`. Equal to it for one nonlinear layer, an approximation beyond; linear in depth.

    Two models of different depth have to be aligned, and beyond one nonlinear layer the value depends on it: layers are
    matched from the input up, first nonlinear with first nonlinear, linear ones wait for no partner, and the state of the
    model that has no layer left is carried along as it is. Padding a model with identities changes nothing only
    where this matches the same layers.
    """

    name = "closure"

    def is_exact(self, nonlinear_layers: int) -> bool:
        return nonlinear_layers <= 1


@pytree
@dataclass(frozen=True, eq=False)
class Categorical(_AlwaysExact):
    """`E<A(x), B(x)>` over sequences of one-hot tokens, independent across positions, from one distribution; exact.

    For models with at most one attention layer and only linear layers after it (see `tokens`). probabilities:
    (vocabulary,), None for uniform. Raises `ModelError` when they are negative or do not sum to 1.
    """

    probabilities: Float[Array, " vocabulary"] | None = None
    name = "categorical"
    closes = True

    def __post_init__(self) -> None:
        if self.probabilities is None:
            return
        found = as_array(self.probabilities, "the token probabilities", 1)
        if not isinstance(found, Tracer) and (
            np.min(found) < 0 or abs(float(np.sum(np.asarray(found, np.float64))) - 1) > 1e-6
        ):
            raise ModelError(
                f"token probabilities are at least 0 and sum to 1; found a smallest of {np.min(found):.3g} and a sum of {np.sum(found):.6g}"
            )
        object.__setattr__(self, "probabilities", found)

    def distribution(self, vocabulary: int) -> Any:
        """Probabilities of every token, (vocabulary,). Raises `ModelError` if they are for another vocabulary."""
        if self.probabilities is None:
            return np.full(vocabulary, 1 / vocabulary)
        if self.probabilities.shape[0] != vocabulary:
            raise ModelError(
                f"the metric has probabilities of {self.probabilities.shape[0]} tokens, but the models read {vocabulary}"
            )
        return self.probabilities


def check_metric(metric: Any) -> None:
    """Raise `ModelError` for what is no metric, a metric's class among it."""
    known = isinstance(metric, LayerwiseMetric | Symmetric | Categorical)
    if not known or isinstance(metric, type):
        raise ModelError(f"expected a metric such as tnsim.Gaussian(), found {metric!r}")


def is_exact(metric: Metric, nonlinear_layers: int) -> bool:
    """Whether the metric's own definition is met exactly by models with so many nonlinear layers."""
    return metric.is_exact(nonlinear_layers)


def joins_whole_trees(metric: type, nonlinear_layers: int) -> bool:
    """Whether the legs of whole trees are joined, instead of layer over layer."""
    return metric is Symmetric or (metric is Gaussian and nonlinear_layers > 1)


def input_kind(metric: Metric, lifted: bool) -> InputKind:
    """Structure of the moments of the (lifted) input under a metric; hashable."""
    mean, cov = getattr(metric, "mean", None), getattr(metric, "cov", None)
    full = mean is not None or (cov is not None and cov.ndim == 2)
    moment = "full" if full else "identity" if cov is None else "diagonal"
    return InputKind(centred=metric.closes and mean is None and not lifted, moment=moment)


def input_moments(metric: Metric, d: int, lifted: bool) -> dict[str, Any]:
    """Arrays of the input: `mean` (D,), `moment` E[x x^T] as (D, D) or its diagonal (D,), absent if the identity.

    D is d, or d + 1 with the constant coordinate first when `lifted`. Raises `ModelError` if the metric is
    for another number of coordinates.
    """
    mean: Any = getattr(metric, "mean", None)
    cov: Any = getattr(metric, "cov", None)
    for what, array in (("mean", mean), ("covariance", cov)):
        if array is not None and what == "mean" and array.ndim == 2:
            raise ModelError(
                f"the metric's mean has shape {tuple(array.shape)}, as for sequences, but the models read {d} coordinates"
            )
        if array is not None and array.shape[0] != d:
            raise ModelError(
                f"the metric's {what} has {array.shape[0]} coordinates but the models read {d}"
            )
    xp = jnp if isinstance(mean, jax.Array) or isinstance(cov, jax.Array) else np
    found = {}
    if lifted or mean is not None:
        body = xp.zeros(d) if mean is None else mean
        found["mean"] = mean = xp.concatenate([xp.ones(1), body]) if lifted else body
    kind = input_kind(metric, lifted)
    if kind.moment == "diagonal":
        found["moment"] = xp.concatenate([xp.ones(1), cov]) if lifted else cov
    elif kind.moment == "full":
        cov = xp.eye(d) if cov is None else (xp.diag(cov) if cov.ndim == 1 else cov)
        cov = xp.pad(cov, ((1, 0), (1, 0))) if lifted else cov
        found["moment"] = cov if mean is None else cov + mean[:, None] * mean[None, :]
        if lifted and mean is None:
            found["moment"] = cov + xp.pad(xp.ones((1, 1)), ((0, d), (0, d)))
    return found


def sequence_inputs(metric: Metric, d: int, n_ctx: int) -> SequenceInputs:
    """Structure of a metric's Gaussian over sequences of n_ctx positions with d coordinates.

    The mean may be (d,), the same at every position, or (n_ctx, d) or (n_ctx * d,); the covariance (d,) or (d, d), the same
    at every position and independent between positions, or (n_ctx * d,) or (n_ctx * d, n_ctx * d) over all coordinates, position-major.
    Raises `ModelError` on other shapes.
    """
    mean, cov = getattr(metric, "mean", None), getattr(metric, "cov", None)
    means = {(d,): "alike", (n_ctx, d): "each", (n_ctx * d,): "each"}
    every = n_ctx * d
    covariances = {
        (every,): "each diagonal",
        (every, every): "full",
        (d,): "diagonal",
        (d, d): "matrix",
    }
    for what, array, known in (("mean", mean, means), ("covariance", cov, covariances)):
        if array is not None and tuple(array.shape) not in known:
            raise ModelError(
                f"the metric's {what} has shape {tuple(array.shape)}, but sequences of {n_ctx} positions with {d} coordinates "
                f"need one of {', '.join(map(str, known))}"
            )
    return SequenceInputs(
        None if mean is None else means[tuple(mean.shape)] if n_ctx > 1 else "alike",
        "identity" if cov is None else covariances[tuple(cov.shape)],
    )


def sequence_moments(metric: Metric, d: int, n_ctx: int) -> dict[str, Any]:
    """Arrays `mean` and `covariance` (about the mean) in the shapes that `sequence_inputs` announces; absent where standard."""
    inputs = sequence_inputs(metric, d, n_ctx)
    mean: Any = getattr(metric, "mean", None)
    cov: Any = getattr(metric, "cov", None)
    found = {}
    if mean is not None:
        found["mean"] = mean.reshape(inputs.mean_shape(d, n_ctx))
    if cov is not None:
        found["covariance"] = cov.reshape(inputs.covariance_shape(d, n_ctx))
    return found


def flattened(metric: Metric, d: int, n_ctx: int) -> Metric:
    """The same metric over flattened sequences, (n_ctx * d,), position-major. Raises `ModelError` as `sequence_inputs`."""
    inputs = sequence_inputs(metric, d, n_ctx)
    if not isinstance(metric, Gaussian | GaussianClosure):
        return metric
    mean: Any = metric.mean
    cov: Any = metric.cov
    if inputs.mean is not None:
        mean = np.broadcast_to(
            mean if inputs.mean == "alike" else np.reshape(mean, (n_ctx, d)), (n_ctx, d)
        ).reshape(-1)
    if inputs.covariance in ("diagonal", "matrix"):
        cov = (
            np.tile(cov, n_ctx) if inputs.covariance == "diagonal" else np.kron(np.eye(n_ctx), cov)
        )
    return type(metric)(mean, cov)


def layer_by_layer(metric: Metric, nonlinear_layers: int, degrees: tuple[int, int]) -> Metric:
    """The metric that joins layer over layer and has the value of `metric` for models of sequences.

    nonlinear_layers: of the deeper model; degrees: of both. Raises `TooLarge` where the legs of whole trees would have to be joined.
    """
    if nonlinear_layers > 1 and joins_whole_trees(type(metric), nonlinear_layers):
        raise TooLarge(
            f"{type(metric).__name__} joins the legs of whole models, here polynomials of degree {degrees[0]} and {degrees[1]} "
            "in sequences; beyond one nonlinear layer that is for small models, of up to 20 legs together. "
            "Use GaussianClosure(), an approximation, or TreeSymmetric()"
        )
    return TreeSymmetric() if isinstance(metric, Symmetric) else metric


def whole_tree_kind(metric: Metric, lifted: bool) -> InputKind:
    """Structure of the second moment that diagrams over whole trees use: centred, the mean inside it."""
    mean, cov = getattr(metric, "mean", None), getattr(metric, "cov", None)
    if metric.closes and (lifted or mean is not None):
        return InputKind(centred=False, moment="full")
    return InputKind(
        centred=True,
        moment="identity" if cov is None else ("diagonal" if cov.ndim == 1 else "full"),
    )


def second_moment_at(metric: Metric, d: int, lifted: bool, t: float) -> Any:
    """C + t m m^T, (D, D), over the lifted input or, with a mean but nothing lifted, over the plain one.

    Raises `ModelError` if the metric is for another number of coordinates.
    """
    moments = input_moments(metric, d, lifted)
    mean, moment = moments["mean"], moments.get("moment")
    xp = jnp if isinstance(mean, jax.Array) else np
    if moment is None:
        moment = xp.eye(len(mean))
    elif moment.ndim == 1:
        moment = xp.diag(moment)
    return moment + (t - 1.0) * mean[:, None] * mean[None, :]


def _check_covariance(cov: np.ndarray) -> None:
    scale = float(np.abs(cov).max())
    if cov.ndim == 1:
        smallest = float(cov.min())
    else:
        skew = float(np.abs(cov - cov.T).max())
        if skew > 1e-6 * scale:
            raise ModelError(
                f"cov must be symmetric, found entries that differ from their mirror image by {skew:.3g}"
            )
        smallest = float(np.linalg.eigvalsh(cov).min())
    if smallest < -1e-6 * scale:
        raise ModelError(f"cov must be positive semidefinite, found the eigenvalue {smallest:.3g}")
