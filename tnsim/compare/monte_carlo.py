"""Closed form beside sampling.

In: two models and a Gaussian metric. Out: an estimate with its standard error.

The forward passes know nothing of networks or plans, so agreement within the standard error is an
independent check of a result, and disagreement shows what a closure misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tnsim.compare.planned import AnyModel
from tnsim.compare.similarity import similarity
from tnsim.errors import ModelError, TnsimError
from tnsim.metrics.input_moments import flattened
from tnsim.metrics.metric import Categorical, Gaussian, GaussianClosure
from tnsim.tables import html_table

BATCH = 4096
GROUPS = 32


class Check(NamedTuple):
    """A similarity in closed form beside an estimate by sampling.

    Args:
        similarity: The closed form, a `Number`.
        estimate: The true cosine, estimated from samples.
        standard_error: Of the estimate.
        deviation: Their difference in standard errors: of order one when the closed form is the
            true value.
        samples: Inputs that were drawn.
        seed: Of the random numbers.

    Example:
        >>> Check(0.5, 0.52, 0.01, 2.0, 1000, 0).deviation
        2.0
    """

    similarity: Any
    estimate: float
    standard_error: float
    deviation: float
    samples: int
    seed: int

    def _repr_html_(self) -> str:
        return html_table("Closed form beside sampling", self._asdict().items())


def check(
    a: AnyModel,
    b: AnyModel,
    metric: Gaussian | GaussianClosure | Categorical = Gaussian(),
    *,
    samples: int = 65536,
    seed: int = 0,
    progress: bool = False,
) -> Check:
    """Estimate the cosine `E<a,b> / sqrt(E|a|^2 E|b|^2)` by sampling, beside the closed form.

    Inputs are x ~ N(mean, cov), or token sequences. The standard error is a jackknife over 32
    groups of samples.

    Args:
        a, b: Models, or combinations such as `b - c`.
        metric: One that is an expectation over inputs: Gaussian, its closure or `Categorical`.
        samples: How many inputs are drawn, at least 64.
        seed: Seed of the random numbers.
        progress: Whether a progress bar is shown.

    Returns:
        A `Check` of floats: cosines in [-1, 1], their deviation in standard errors.

    Raises:
        ModelError: The metric is no expectation over inputs, there are too few samples, or as
            `similarity`.
        TnsimError: Forward passes exceed the range of floats.

    Example:
        >>> import numpy as np, tnsim
        >>> from tnsim.compare.monte_carlo import check
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 0.0]]))])
        >>> bool(abs(check(a, b, samples=4096).deviation) < 5)
        True

    Source:
        Paper, equation 2, for the cosine; Tukey 1958, "Bias and confidence in not-quite large
        samples", for the jackknife.
    """
    if not isinstance(metric, (Gaussian, GaussianClosure, Categorical)):
        raise ModelError(
            "only Gaussian metrics and Categorical are expectations that sampling can check, "
            f"found {type(metric).__name__}"
        )
    if samples < 2 * GROUPS:
        raise ModelError(f"a check needs at least {2 * GROUPS} samples, found {samples}")
    if seed < 0:
        raise ModelError(f"the seed of a check must be 0 or more, found {seed}")
    closed = similarity(a, b, metric)
    draw = _sampler(metric, a)
    rng = np.random.default_rng(seed)
    sums = np.zeros((GROUPS, 3))
    count = max(GROUPS, math.ceil(samples / BATCH))
    batches = [samples // count + (n < samples % count) for n in range(count)]
    if progress:
        from tqdm.auto import tqdm

        batches = tqdm(batches, desc="samples", unit="batch")
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
        for n, size in enumerate(batches):
            x = draw(rng, size)
            p, q = np.asarray(a(x)), np.asarray(b(x))
            sums[n % GROUPS] += (p * q).sum(), (p * p).sum(), (q * q).sum()
    if not (np.isfinite(sums).all() and sums[:, 1:].any(axis=0).all()):
        raise TnsimError(
            "the outputs of a model leave the range of floats when they are computed and squared, "
            "so sampling cannot check them; scale down, or up, its last layer"
        )
    # With c_g the cosine of all samples but those of group g, the variance of the estimate from G
    # groups is about (G - 1) / G sum_g (c_g - mean c)^2.
    total = sums.sum(axis=0)
    estimate = _cosine(total)
    left_out = np.array([_cosine(total - part) for part in sums])
    error = float(np.sqrt((GROUPS - 1) / GROUPS * ((left_out - left_out.mean()) ** 2).sum()))
    deviation = float((closed - estimate) / error) if error else 0.0
    return Check(closed, float(estimate), error, deviation, samples, seed)


def _cosine(sums: np.ndarray) -> float:
    ab, aa, bb = sums
    return float(ab / np.sqrt(aa * bb))


def _sampler(
    metric: Gaussian | GaussianClosure | Categorical, model: AnyModel
) -> Callable[[np.random.Generator, int], np.ndarray]:
    """What draws inputs of a model, (samples, d_in) or (samples, n_ctx, d_in)."""
    shape = (model.d_in,) if model.n_ctx is None else (model.n_ctx, model.d_in)
    if isinstance(metric, Categorical):
        p = np.asarray(metric.distribution(model.d_in), np.float64)
        one_hot, positions = np.eye(model.d_in), shape[:-1]

        def tokens(rng: np.random.Generator, size: int) -> np.ndarray:
            return one_hot[rng.choice(len(p), size=(size, *positions), p=p / p.sum())]

        return tokens
    whole: Any = metric
    if model.n_ctx is not None:
        whole = flattened(metric, model.d_in, model.n_ctx)
    factor, mean = _factor(whole, math.prod(shape))

    def draw(rng: np.random.Generator, size: int) -> np.ndarray:
        x = rng.normal(size=(size, math.prod(shape)))
        centred = x * factor if factor.ndim == 1 else x @ factor.T
        return (mean + centred).reshape(size, *shape)

    return draw


def _factor(metric: Gaussian | GaussianClosure, d: int) -> tuple[np.ndarray, np.ndarray]:
    """A root F of the covariance, F F' = C, as a matrix or a diagonal, and the mean."""
    mean = np.zeros(d) if metric.mean is None else np.asarray(metric.mean, np.float64)
    if metric.cov is None:
        return np.ones(d), mean
    cov = np.asarray(metric.cov, np.float64)
    if cov.ndim == 1:
        return np.sqrt(np.clip(cov, 0, None)), mean
    values, vectors = np.linalg.eigh(cov)
    return vectors * np.sqrt(np.clip(values, 0, None)), mean
