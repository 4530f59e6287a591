"""The verbs: similarity, slices, inner, log_inner, plan and check.

A verb reads both sides as models and makes a `Request` of its options; `routes.inner_products`
computes along the cheapest route, and `numbers` makes the answer. Outside a JAX trace everything
runs in a scoped 64-bit, full-precision setting, and results are NumPy float64. Inside a trace
everything runs in the dtype of the weights given, and results are JAX arrays.

*Checking by samples.* The forward passes know nothing of networks or plans, so agreement within the
standard error is an independent check of a result, and disagreement shows the error of a closure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import DTypeLike

from tnsim.compare import numbers
from tnsim.compare.by_points import reading_of
from tnsim.compare.centred import without_mean
from tnsim.compare.numbers import Number, Numbers, SignedLog, cosine_error
from tnsim.compare.request import (
    ALL,
    CROSS,
    Answer,
    Comparable,
    Estimate,
    InnerProducts,
    Question,
    Request,
    Two,
    at_numbers,
    check_comparison,
    count_text,
    highest_degree,
    summands,
    with_metric,
)
from tnsim.compare.routes import cheapest, inner_products
from tnsim.engine import precision
from tnsim.engine.ir.problem import dtype_name
from tnsim.engine.planner import Budget
from tnsim.engine.precision import Arithmetic
from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.finite_measures import Categorical, Empirical
from tnsim.metrics.input_moments import gaussian_draws
from tnsim.metrics.metric import Gaussian, GaussianClosure, as_metric
from tnsim.metrics.protocol import Metric, Points, Reading, WeightedPoints, draws
from tnsim.models.functions import is_function
from tnsim.models.model import Model, Seed, check_untraced, seed_number, with_dense_matrices
from tnsim.options import checked
from tnsim.problems import at_points
from tnsim.problems.at_points import GROUPS, Sums, work_of
from tnsim.tables import html_table

Expectation: TypeAlias = Gaussian | GaussianClosure | Categorical
"""Metrics that are an expectation over a distribution from which inputs can be drawn."""


@checked
def similarity(
    a: Comparable,
    b: Comparable,
    metric: Metric | str = Gaussian(),
    *,
    centred: bool = False,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Number:
    """The cosine over all outputs, `<a|M|b> / sqrt(<a|M|a> <b|M|b>)`.

    Args:
        a, b: Models, or combinations such as `b - c`; modules of PyTorch and paths of files in the
            place of models; under `Empirical` also plain functions.
        metric: Metric that weighs the inputs, or its name, such as "symmetric".
        centred: Whether functions are compared without their means over the inputs.
        n_ctx: Length of the sequences on which models with attention are compared, where neither
            the models nor the inputs of `Empirical` say it.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: Limits of memory and work for the computation.

    Returns:
        A float64 in [-1, 1], without a unit; inside a JAX trace a scalar array.

    Raises:
        CheckpointError, UnsupportedLayer: A file or module cannot be read as a model.
        ModelError: The models cannot be compared, or either is the zero function, or with
            `centred` constant.
        TooLarge: The computation would exceed the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 0.0]]))])
        >>> round(float(tnsim.similarity(a, b)), 6)
        0.707107

    Source:
        Paper, equation 2.
    """
    a, b, metric = _sides(a, b, metric, n_ctx, centred, budget)
    request = Request(metric, dtype_name(dtype), budget, squared_norms=True, centred=centred)
    if at_numbers(a, b, metric):
        return _differentiated(numbers.cosine, a, b, request)[0]
    return numbers.cosine(inner_products(a, b, request), (a, b), request)


@checked
def slices(
    a: Comparable,
    b: Comparable,
    metric: Metric | str = Gaussian(),
    *,
    centred: bool = False,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Numbers:
    """The cosine of every output coordinate on its own.

    Args:
        a, b: Models, or combinations such as `b - c`; modules of PyTorch and paths of files in the
            place of models; under `Empirical` also plain functions.
        metric: Metric that weighs the inputs, or its name, such as "symmetric".
        centred: Whether functions are compared without their means over the inputs.
        n_ctx: Length of the sequences on which models with attention are compared, where neither
            the models nor the inputs of `Empirical` say it.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: Limits of memory and work for the computation.

    Returns:
        Numbers of float64 of shape (d_out,), each in [-1, 1], without a unit.

    Raises:
        CheckpointError, UnsupportedLayer: A file or module cannot be read as a model.
        ModelError: The models cannot be compared, or an output of a model is the zero function.
        TooLarge: The computation would exceed the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, -2.0]]))])
        >>> np.asarray(tnsim.slices(a, b)).round(6).tolist()
        [1.0, -1.0]

    Source:
        Paper, section 2.4.
    """
    a, b, metric = _sides(a, b, metric, n_ctx, centred, budget)
    request = Request(metric, dtype_name(dtype), budget, True, slices=True, centred=centred)
    return numbers.cosine(inner_products(a, b, request), (a, b), request)


@checked
def inner(
    a: Comparable,
    b: Comparable,
    metric: Metric | str = Gaussian(),
    *,
    centred: bool = False,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Number:
    """The inner product `<a|M|b>`; under `Gaussian` it is `E <a(x), b(x)>`.

    Args:
        a, b: Models, or combinations such as `b - c`; modules of PyTorch and paths of files in the
            place of models; under `Empirical` also plain functions.
        metric: Metric that weighs the inputs, or its name, such as "symmetric".
        centred: Whether functions are compared without their means over the inputs.
        n_ctx: Length of the sequences on which models with attention are compared, where neither
            the models nor the inputs of `Empirical` say it.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: Limits of memory and work for the computation.

    Returns:
        A float64, in units of squared outputs; inside a JAX trace a scalar array.

    Raises:
        CheckpointError, UnsupportedLayer: A file or module cannot be read as a model.
        ModelError: The models cannot be compared.
        TooLarge: The computation would exceed the budget.
        TnsimError: The value is too large or too small for float64; use `log_inner`.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 0.0]]))])
        >>> round(float(tnsim.inner(a, b)), 6)
        1.0

    Source:
        Paper, section 2.
    """
    a, b, metric = _sides(a, b, metric, n_ctx, centred, budget)
    request = Request(metric, dtype_name(dtype), budget)
    if at_numbers(a, b, metric):
        return _differentiated(numbers.value, a, b, request)[0]
    return numbers.value(inner_products(a, b, request), (a, b), request)


@checked
def log_inner(
    a: Comparable,
    b: Comparable,
    metric: Metric | str = Gaussian(),
    *,
    centred: bool = False,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> SignedLog:
    """The sign and logarithm of `<a|M|b>`, finite at any depth.

    Args:
        a, b: Models, or combinations such as `b - c`; modules of PyTorch and paths of files in the
            place of models; under `Empirical` also plain functions.
        metric: Metric that weighs the inputs, or its name, such as "symmetric".
        centred: Whether functions are compared without their means over the inputs.
        n_ctx: Length of the sequences on which models with attention are compared, where neither
            the models nor the inputs of `Empirical` say it.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: Limits of memory and work for the computation.

    Returns:
        `SignedLog(sign, log)`, float64 scalars: the sign is -1, 0 or 1, the logarithm natural. A
        zero inner product has sign 0 and log -inf.

    Raises:
        CheckpointError, UnsupportedLayer: A file or module cannot be read as a model.
        ModelError: The models cannot be compared.
        TooLarge: The computation would exceed the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 1.0]]))])
        >>> b = tnsim.Model([tnsim.Linear(np.array([[1.0, 0.0], [0.0, 0.0]]))])
        >>> sign, log = tnsim.log_inner(a, b)
        >>> float(sign), round(abs(float(log)), 6)
        (1.0, 0.0)

    Source:
        Paper, section 2.2: norms grow like c^(2^L) with depth L.
    """
    a, b, metric = _sides(a, b, metric, n_ctx, centred, budget)
    request = Request(metric, dtype_name(dtype), budget)
    if at_numbers(a, b, metric):
        log, sign = _differentiated(_log_and_sign, a, b, request)
        return SignedLog(sign, log)
    return numbers.logarithm(inner_products(a, b, request), (a, b), request)


def _sides(
    a: Any, b: Any, metric: Metric | str, n_ctx: int | None, centred: bool, budget: Budget
) -> tuple[Any, Any, Metric]:
    """Both sides of a comparison and its metric, see `with_metric`, without means if asked."""
    a, b, metric = with_metric(a, b, metric, n_ctx)
    if centred:
        first = without_mean(a, metric, budget)
        a, b = first, first if b is a else without_mean(b, metric, budget)
    return a, b, metric


def _log_and_sign(products: InnerProducts, models: Two, request: Request) -> tuple[Any, Any]:
    """The logarithm of an inner product, which has derivatives, and its sign, which has none."""
    sign, log = numbers.logarithm(products, models, request)
    return log, sign


def _differentiated(answer: Answer, a: Any, b: Any, request: Request) -> tuple[Any, Any]:
    """An answer with derivatives along plans, see `gradients.differentiated`."""
    # Its programs ask for the device of JAX, which is not to start before it is needed.
    from tnsim.compare.gradients import differentiated

    a, b = with_dense_matrices(a), with_dense_matrices(b)
    return differentiated(answer, a, b, request)


@checked
def plan(
    a: Comparable,
    b: Comparable,
    metric: Metric | str = Gaussian(),
    *,
    n_ctx: int | None = None,
    cosine: bool = False,
    slices: bool = False,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Estimate:
    """The plan of the computation of `<a|M|b>`: the route, and what it takes; nothing is run.

    Plans of contractions depend on shapes alone; the points of quadrature depend on weights too.

    Args:
        a, b: Models, or modules of PyTorch and paths of files in their place.
        metric: Metric that weighs the inputs, or its name, such as "symmetric".
        n_ctx: Length of the sequences on which models with attention are compared, where neither
            the models nor the inputs of `Empirical` say it.
        cosine: Whether `<a|M|a>` and `<b|M|b>` are planned too, as a cosine needs.
        slices: Whether there is an inner product for every output coordinate.
        dtype: Precision of the computation, float64 or float32.
        budget: Limits that decide between routes, and on the memory of one; a plan of contractions
            that has no rival and does not fit is returned as it would be without a budget.

    Returns:
        An `Estimate` of the route that is taken, with multiplications (scalar products of two
        numbers), peak memory (bytes) and expected time (seconds). `print` shows it beside the other
        routes; `contraction` is the order of the contractions where tensors are contracted.

    Raises:
        CheckpointError, UnsupportedLayer: A file or module cannot be read as a model.
        ModelError: The models cannot be compared, or either is a combination.
        TooLarge: No plan could be carried out, or the only route is beyond the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> a = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> plan = tnsim.plan(a, a, cosine=True)
        >>> plan.metric, plan.route, plan.outputs
        ('gaussian', 'contractions', ('AA', 'AB', 'BB'))
    """
    dtype = dtype_name(dtype)
    bra, ket, metric = with_metric(a, b, metric, n_ctx)
    check_comparison(bra, ket, metric)
    for model in (bra, ket):
        if not (isinstance(model, Model) or is_function(model)):
            raise ModelError(
                "a plan is for two models; plan the models of a combination pair by pair"
            )
    # What a function takes is not known before it runs.
    models = tuple(model for model in (bra, ket) if isinstance(model, Model))
    question = Question(models, metric, ALL if cosine else CROSS, slices, dtype)
    choice = cheapest(question, budget)
    if choice.estimates:
        return choice.estimate
    estimate = choice.route.estimate()
    try:
        return choice.route.within(estimate, budget)
    except TooLarge:
        if estimate.contraction is None:
            raise
        return estimate


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
        >>> from tnsim.compare.similarity import check
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
    if isinstance(asked, Categorical):
        points = dataclasses.replace(asked, samples=samples, seed=seed).points(reading)
    else:
        points = draws(samples, seed, gaussian_draws(asked, reading))
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
