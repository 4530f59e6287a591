"""A similarity in closed form, checked by sampling.

The forward passes know nothing of networks or plans, so agreement within the standard error is an
independent check of a result, and disagreement shows the error of a closure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

from tnsim.compare.by_points import reading_of
from tnsim.compare.centred import without_mean
from tnsim.compare.estimates import count_text
from tnsim.compare.numbers import Number, cosine_error
from tnsim.compare.request import Comparable, highest_degree, summands, with_metric
from tnsim.compare.similarity import similarity
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.precision import Arithmetic
from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.categorical import Categorical
from tnsim.metrics.empirical import Empirical
from tnsim.metrics.metric import Gaussian, GaussianClosure, as_metric
from tnsim.metrics.points import Points, Reading, WeightedPoints, draws
from tnsim.metrics.quadrature import gaussian_draws
from tnsim.models.checks import Seed, check_untraced, seed_number
from tnsim.models.model import Model
from tnsim.options import checked
from tnsim.problems import at_points
from tnsim.problems.at_points import Sums
from tnsim.problems.batches import GROUPS, work_of
from tnsim.tables import html_table

Expectation: TypeAlias = Gaussian | GaussianClosure | Categorical
"""Metrics that are an expectation over a distribution from which inputs can be drawn."""


class Check(NamedTuple):
    """A similarity in closed form and its estimate by sampling.

    Args:
        similarity: Closed form, a `Number`.
        estimate: True cosine as estimated from samples.
        standard_error: Standard error of the estimate.
        deviation: Difference of closed form and estimate in standard errors, of both where the
            similarity is an estimate itself: of order 1 where it is the true value.
        samples: Number of inputs that were drawn.
        seed: Number from which `check` draws the same inputs again.

    Example:
        >>> Check(Number(0.5, "closure", False), 0.52, 0.01, 2.0, 1000, 0).deviation
        2.0
    """

    similarity: Number
    estimate: float
    standard_error: float
    deviation: float
    samples: int
    seed: int

    def _repr_html_(self) -> str:
        return html_table("Closed form beside sampling", self._asdict().items())


@checked(own="samples")
def check(
    a: Comparable,
    b: Comparable,
    metric: Expectation | str = Gaussian(),
    *,
    n_ctx: int | None = None,
    centred: bool = False,
    samples: int = 65536,
    seed: Seed = 0,
    progress: bool = False,
) -> Check:
    """Compare the cosine in closed form with an estimate of it by sampling.

    The estimate is `E<a,b> / sqrt(E|a|^2 E|b|^2)` over inputs x ~ N(mean, cov), or over token
    sequences. The standard error is a jackknife over 32 groups of samples.

    Args:
        a, b: Models, combinations such as `b - c`, modules of PyTorch, or paths of files.
        metric: Metric that is an expectation over inputs, or its name: Gaussian, its closure or
            `Categorical`.
        n_ctx: Length of the sequences on which models with attention are compared, where the models
            do not say it.
        centred: Whether the models are compared without their means over the inputs.
        samples: Number of inputs that are drawn, at least 64.
        seed: Seed of the random numbers: a number, a NumPy generator or a JAX key.
        progress: Whether a progress bar is shown.

    Returns:
        A `Check` of floats: cosines in [-1, 1], their deviation in standard errors.

    Raises:
        ModelError: The metric is no expectation over inputs, there are too few samples, the seed
            is negative, or `similarity` would raise it.
        TooLarge: The samples take more multiplications than a budget has.

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
    asked: Any = as_metric(metric)
    if not isinstance(asked, Expectation):
        raise ModelError(
            "only Gaussian metrics and Categorical are expectations that sampling can check, "
            f"found {type(asked).__name__}"
        )
    if not (isinstance(samples, Integral) and samples >= 2 * GROUPS):
        raise ModelError(f"a check needs at least {2 * GROUPS} samples, found {samples!r}")
    a, b, chosen = with_metric(a, b, asked, n_ctx)
    check_untraced("check", a, b, asked)
    given = a, b
    if centred:
        a, b = without_mean(a, chosen), without_mean(b, chosen)
    seed = seed_number(seed, "the seed of a check")
    models = [part for _, part in (*summands(a), *summands(b)) if isinstance(part, Model)]
    reading = reading_of(models)
    if not models and isinstance(chosen, Empirical):  # functions alone, on inputs of an estimate
        *positions, width = chosen.inputs.shape[1:]
        reading = Reading(width, positions[0] if positions else None, 1)
    points = _drawn_points(asked, reading, samples, seed)
    work, most = work_of(models, points).multiplications, Budget().multiplications
    if work > most:
        raise TooLarge(
            f"{samples:,} samples take {count_text(work)} multiplications, more than the "
            f"{most:.3g} of a budget: check with fewer samples"
        )
    closed = similarity(*given, chosen, centred=centred)
    with _with_bar(points, progress) as watched:
        sums = at_points.sums([summands(a)], [summands(b)], watched, False, "float64")
    estimate, error = _estimated_cosine(sums, Arithmetic(highest_degree((a, b)), "float64"))
    # Without spread, as between a model and its copy, nothing deviates.
    both = math.hypot(error, float(closed.standard_error or 0.0))
    deviation = float((closed - estimate) / both) if both else 0.0
    return Check(closed, estimate, error, deviation, samples, seed)


def _estimated_cosine(sums: Sums, arithmetic: Arithmetic) -> tuple[float, float]:
    """The cosine of the only pair, and the standard error of the cosine."""
    norms = at_points.over_groups(sums.rows), at_points.over_groups(sums.columns)
    for norm, which in zip(norms, ("first", "second"), strict=True):
        precision.check_norm(norm, f"the {which} model, on the samples,", True, arithmetic)
    cosines = precision.cosine(at_points.over_groups(sums.products), *norms, arithmetic)
    errors = cosine_error(sums)
    assert errors is not None  # samples are drawn
    return float(precision.clipped(cosines, arithmetic.dtype)[0, 0]), float(errors[0, 0])


def _drawn_points(metric: Expectation, reading: Reading, samples: int, seed: int) -> Points:
    """Draws from the distribution of inputs of a metric."""
    if isinstance(metric, Categorical):
        return dataclasses.replace(metric, samples=samples, seed=seed).points(reading)
    return draws(samples, seed, gaussian_draws(metric, reading))


@contextlib.contextmanager
def _with_bar(points: Points, shown: bool) -> Iterator[Points]:
    """The points, with a progress bar that counts the points that are read."""
    if not shown:
        yield points
        return
    from tqdm.auto import tqdm

    with tqdm(total=points.count, desc="samples", unit="sample") as bar:

        def block(start: int, stop: int) -> WeightedPoints:
            bar.update(stop - start)
            return points.block(start, stop)

        yield dataclasses.replace(points, block=block)
