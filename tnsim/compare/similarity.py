"""The verbs: similarity, slices, inner, log_inner and plan.

A verb reads both sides as models and makes a `Request` of its options; `inner_products` computes
along the cheapest route, and `numbers` makes the answer. Outside a JAX trace everything runs in a
scoped 64-bit, full-precision setting, and results are NumPy float64. Inside a trace everything runs
in the dtype of the weights given, and results are JAX arrays.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike

from tnsim.compare import numbers
from tnsim.compare.centred import without_mean
from tnsim.compare.estimates import Estimate
from tnsim.compare.inner_products import inner_products
from tnsim.compare.numbers import Number, Numbers, SignedLog
from tnsim.compare.request import (
    ALL,
    CROSS,
    Answer,
    Comparable,
    InnerProducts,
    Question,
    Request,
    Two,
    at_numbers,
    check_comparison,
    with_metric,
)
from tnsim.compare.routes import cheapest
from tnsim.engine.budget import Budget
from tnsim.engine.ir.dtypes import dtype_name
from tnsim.errors import ModelError
from tnsim.metrics.metric import Gaussian
from tnsim.metrics.protocol import Metric
from tnsim.models.functions import is_function
from tnsim.models.model import Model, with_dense_matrices
from tnsim.options import checked


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
        budget: Limits that decide between routes; a plan of contractions that has no rival is
            returned whatever it takes.

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
    if estimate.contraction is None:
        choice.route.check(estimate, budget)
    return estimate
