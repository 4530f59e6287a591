"""The cosine of two models as a function of PyTorch's autograd.

*The points of a finite metric.* Reverse mode keeps the outputs of every layer at every point, so
all points are in memory at once. They are arguments of the compiled programs: another sample of the
same size needs no new program.

*The function of autograd.* `compared` takes for moving weights those leaves of (a, b, metric) that
are tensors of PyTorch (`comparison`), hands them to JAX and the gradients back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from tnsim.checkpoints.given import given_model, length_and_width
from tnsim.compare import similarity as without_gradients
from tnsim.compare.by_points import AtPoints, points_of
from tnsim.compare.centred import mean_of, without
from tnsim.compare.comparison import comparison_of
from tnsim.compare.gradients import number_and_pullback
from tnsim.compare.inner_products import inner_products
from tnsim.compare.request import InnerProducts, Question, Request, Two, shape_of
from tnsim.engine import precision
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.devices import backend
from tnsim.errors import TnsimError, TooLarge
from tnsim.metrics.points import WeightedPoints
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.arrays import numbers
from tnsim.models.checks import check_comparable, check_untraced
from tnsim.models.forward import as_read
from tnsim.models.functions import is_function, refused_under
from tnsim.models.model import caveats, terms, with_dense_matrices
from tnsim.models.origin import warn_of_caveats
from tnsim.problems.batches import needs
from tnsim.torch.models import model_of

_TORCH_DEVICES = {"cpu": "cpu", "gpu": "cuda"}
"""PyTorch's names for the platforms of JAX; PyTorch calls ROCm "cuda" as well."""


def sample_of(a: Any, b: Any, request: Request) -> WeightedPoints | None:
    """The points at which two models are compared in a loss.

    Args:
        a: A model or a combination of models.
        b: The other model or combination.
        request: Metric, precision and budget of the comparison.

    Returns:
        All points; None where the metric joins legs, or counts tokens along a plan.

    Raises:
        ModelError: The models do not read these inputs.
        TooLarge: The forward passes, or the values that reverse mode keeps, are over the budget.
    """
    metric = request.metric
    if not adds_up(metric):
        return None
    models = [model for number in numbers((a, b)) for _, model in terms(number)]
    points = points_of(models, metric)
    if points is None:
        return None
    question = Question(
        tuple(models), metric, request.pairs, request.slices, request.dtype, traced=True
    )
    passes = AtPoints(question, points)
    passes.check(passes.estimate(), request.budget)
    # Reverse mode keeps the outputs of every layer at every point until the way back.
    layers = max(len(model.layers) for model in models)
    kept = points.count * layers * needs(models, points, request.dtype).each
    if kept > request.budget.room(0, kept):
        raise TooLarge(
            f"{metric.name} runs through {points.count:,} inputs here, of which the way back keeps "
            f"about {kept / 2**30:.3g} GiB; use fewer inputs or a larger tnsim.Budget"
        )
    sample = points.block(0, points.count)
    # Inputs that a model cannot read raise here, with the model's message, and not inside a trace.
    for model in models:
        as_read(model, sample.inputs)
    return sample


def compared(a: Any, b: Any, n_ctx: int | None, request: Request) -> torch.Tensor:
    """The cosine of two models, see `tnsim.torch.similarity`.

    Without means the gradient is that of a constant mean: what is left, `g = a - E a`, has the
    inner product 0 with every constant, so `d <f - E f, g> = <df - E df, g> = <df, g>`.

    Args:
        a: A module, a model, a combination of models or the path of a file.
        b: The other module, model, combination or path.
        n_ctx: Length of the sequences on which models with attention are compared.
        request: Metric, precision and budget, and whether means over the inputs are left out.

    Returns:
        A tensor of no axes, float64.

    Raises:
        ModelError: The models cannot be compared, or a module holds a layer that is not known.
        TooLarge: The computation would exceed the budget.
        TnsimError: The similarity is not a number.
    """
    metric, dtype, budget = request.metric, request.dtype, request.budget
    shape = shape_of(metric, a, b)
    a, b = (_model(one, metric, n_ctx, shape) for one in (a, b))
    check_comparable(a, b)
    check_untraced("tnsim.torch.similarity", a, b, metric)
    if request.centred:
        a, b = (without(one, mean_of(numbers(one), metric, budget)) for one in (a, b))
    sample = sample_of(a, b, request)
    comparison = comparison_of(_unclipped, a, b, request, sample)
    # Tensors among the leaves are the weights that require grad; models hold all other weights as
    # arrays.
    moving = {n: leaf for n, leaf in comparison.leaves.items() if isinstance(leaf, torch.Tensor)}
    if not moving:
        value = without_gradients.similarity(a, b, metric, dtype=dtype, budget=budget)
        return torch.tensor(float(value), dtype=torch.float64)
    arithmetic, gradient = _arithmetic((a, b), dtype), None
    with execution.precision():
        weights = {n: to_jax(tensor) for n, tensor in moving.items()}
        if torch.is_grad_enabled():
            cosines, gradient = number_and_pullback(comparison, weights)
        else:
            one, two, known = comparison.at(weights)
            question = comparison.form.request(known)
            cosines = _unclipped(inner_products(one, two, question), (a, b), question)
        cosines = precision.Cosine(*(np.asarray(x, np.float64) for x in cosines))
    if np.isnan(cosines.value):
        why = numbers((a, b))
        # Without gradients, the same similarity raises the error that explains the NaN.
        without_gradients.similarity(*why, metric, dtype=dtype, budget=budget)
        raise TnsimError("the similarity is not a number, though without gradients it is one")
    precision.report(float(cosines.error), "the cosine", arithmetic)

    def pullback(tensors: Sequence[torch.Tensor], outer: torch.Tensor) -> Iterator[torch.Tensor]:
        # The derivative of the cosine by each weight; the chain rule multiplies by the derivative
        # of the loss by the cosine.
        assert gradient is not None
        slopes = gradient()
        for place, tensor in zip(moving, tensors, strict=True):
            yield of_jax(slopes[place], tensor) * outer.to(tensor.device)

    # Autograd sees only tensors that are arguments of their own.
    tensors = tuple(moving.values())
    value = float(precision.clipped(cosines, dtype))
    plain = torch.tensor(value, dtype=torch.float64, device=tensors[0].device)
    number: Any = WithPullback.apply(plain, pullback, *tensors)
    warn_of_caveats(caveats(a, b))
    return number


def _unclipped(products: InnerProducts, models: Two, request: Request) -> precision.Cosine:
    """The cosine in float64, which rounding may take out of [-1, 1], and its error bound."""
    values = products.values
    arithmetic = _arithmetic(models, request.dtype)
    cosines = precision.cosine(values["AB"], values["AA"], values["BB"], arithmetic)
    return precision.Cosine(cosines.value.astype("float64"), cosines.error)


def _arithmetic(models: Two, dtype: str) -> precision.Arithmetic:
    """Largest degree of the polynomials and the precision, which bound the errors of rounding."""
    return precision.Arithmetic(max(m.growth for one in models for _, m in terms(one)), dtype)


def _model(model: Any, metric: Metric, n_ctx: int | None, shape: tuple[int, ...]) -> Any:
    """The model of a module's tensors, else the model that `tnsim.similarity` would compare."""
    if isinstance(model, torch.nn.Module):
        n_ctx, width = length_and_width(n_ctx, shape)
        return model_of(model, None, n_ctx, None, width)
    if is_function(model):
        raise refused_under(metric)
    model = with_dense_matrices(given_model(model, n_ctx))
    terms(model)  # refuses anything but a model or a combination
    return model


class WithPullback(torch.autograd.Function):
    """A number or numbers that were computed outside of autograd, with their pullback."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        pullback: Callable[[Sequence[torch.Tensor], torch.Tensor], Iterable[torch.Tensor]],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """The value itself.

        Args:
            ctx: Keeper of the tensors until the way back.
            value: Value, without a graph.
            pullback: Function of the tensors and of the derivative of a loss by the value, to its
                derivatives by the tensors.
            *tensors: Weights of which the value is a function.
        """
        ctx.save_for_backward(*tensors)
        ctx.pullback = pullback
        return value

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise TnsimError(
            "PyTorch's forward mode does not pass through a similarity: call backward, or "
            "differentiate tnsim.similarity by jax.jvp"
        )

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise TnsimError(
                "second derivatives of a similarity are not supported: call backward without "
                "create_graph. jax.hessian differentiates tnsim.similarity twice"
            )
        # Values kept by a pullback may share the memory of the tensors. Reading the saved tensors
        # makes PyTorch raise an error where they were written to since the forward pass.
        tensors = ctx.saved_tensors
        with execution.precision():
            return None, None, *ctx.pullback(tensors, outer[0])


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A tensor as an array on the device of JAX, without a copy where it is there already."""
    tensor = tensor.detach()
    # DLPack shares memory and asks for contiguous tensors. `device_put` copies only where the array
    # lies on another device than JAX's default.
    if tensor.device.type == _TORCH_DEVICES.get(backend()):
        return jax.device_put(jax.dlpack.from_dlpack(tensor.contiguous()))
    return jax.device_put(tensor.cpu().numpy())


def of_jax(array: jax.Array, beside: torch.Tensor) -> torch.Tensor:
    """A derivative as a tensor on the device of its weight."""
    derivative = torch.from_dlpack(array).to(beside.device)
    if not torch.isfinite(derivative).all():
        raise TnsimError(
            "a gradient is not finite: a float range was exceeded, or a model is near the zero "
            "function; use dtype='float64'"
        )
    return derivative
