"""A cosine of JAX as a function of PyTorch's autograd. In: models of tensors. Out: a tensor."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from numpy.typing import DTypeLike

from tnsim.compare import similarity as without_gradients
from tnsim.compare.question import Question
from tnsim.engine import execution, precision
from tnsim.engine.budget import Budget
from tnsim.engine.dtypes import dtype_name
from tnsim.errors import TnsimError
from tnsim.metrics.metric import Metric, check_metric
from tnsim.models.arrays import numbers
from tnsim.models.checks import check_comparable
from tnsim.models.model import caveats, terms
from tnsim.models.origin import warn_of_caveats
from tnsim.torch.models import model_of
from tnsim.torch.programs import (
    Comparison,
    Fixed,
    comparison_of,
    cosine,
    cosine_and_pullback,
    gradient,
)
from tnsim.torch.samples import sample_of

_TORCH_DEVICES = {"cpu": "cpu", "gpu": "cuda"}
"""What PyTorch calls the platforms of JAX; ROCm is "cuda" there."""


def compared(a: Any, b: Any, metric: Metric, dtype: DTypeLike, budget: Budget) -> torch.Tensor:
    """The cosine of two models, see `tnsim.torch.similarity`.

    Args:
        a: A module, a model or a combination of models, as is b.
        b: The other one.
        metric: How inputs are weighed.
        dtype: Precision of the computation.
        budget: What it may take.

    Returns:
        A tensor of no axes, float64.

    Raises:
        ModelError, TnsimError: As `tnsim.torch.similarity`.
    """
    check_metric(metric)
    a, b = _model(a), _model(b)
    check_comparable(a, b)
    asked = Question(metric, dtype_name(dtype), budget, norms=True)
    sample = sample_of(a, b, asked)
    comparison, leaves = comparison_of(a, b, asked, sample)
    moving = {n: leaf for n, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    fixed = Fixed({n: leaf for n, leaf in leaves.items() if n not in moving}, sample)
    if not moving:
        value = without_gradients.similarity(a, b, metric, dtype=dtype, budget=budget)
        return torch.tensor(float(value), dtype=torch.float64)
    value = _Cosine.apply(
        comparison, fixed, tuple(moving), torch.is_grad_enabled(), *moving.values()
    )
    if torch.isnan(value):
        why = numbers((a, b))
        without_gradients.similarity(*why, metric, dtype=dtype, budget=budget)  # it says why
        raise TnsimError("the similarity is not a number, though without gradients it is one")
    warn_of_caveats(caveats(a, b), stacklevel=3)
    return value


def _model(model: Any) -> Any:
    """A module as a model of its tensors; a model as it is."""
    if isinstance(model, torch.nn.Module):
        return model_of(model, None, None, None)
    terms(model)  # refuses what is neither
    return model


class _Cosine(torch.autograd.Function):
    """Forward: one program of JAX, which keeps what the backward one needs."""

    @staticmethod
    def forward(
        ctx: Any,
        comparison: Comparison,
        fixed: Fixed,
        places: tuple[int, ...],
        wanted: bool,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        with execution.precision():
            moving = dict(zip(places, map(_to_jax, tensors), strict=True))
            if wanted:
                found, ctx.pullback = cosine_and_pullback(comparison, moving, fixed)
                # The tensors may be written to as soon as this returns.
                jax.block_until_ready(ctx.pullback)
            else:
                found = cosine(comparison, moving, fixed)
            found = precision.Cosine(*(np.asarray(x, np.float64) for x in found))
        ctx.save_for_backward(*tensors)
        ctx.places = places
        arithmetic = comparison.arithmetic
        if not np.isnan(found.value):
            precision.report(float(found.error), "the cosine", arithmetic, stacklevel=4)
        value = float(precision.clipped(found))
        return torch.tensor(value, dtype=torch.float64, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise TnsimError(
                "second derivatives of a similarity are not supported: call backward without "
                "create_graph. jax.hessian differentiates tnsim.similarity twice"
            )
        # What the pullback keeps may be the memory of the tensors: PyTorch refuses them here where
        # they were written to since.
        tensors = ctx.saved_tensors
        with execution.precision():
            slopes = gradient(ctx.pullback)
        gradients = []
        for place, tensor in zip(ctx.places, tensors, strict=True):
            gradients.append(_of_jax(slopes[place], tensor) * outer[0].to(tensor.device))
        return None, None, None, None, *gradients


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    """A tensor where JAX computes: its own memory where it is there, else a copy."""
    tensor = tensor.detach()
    if tensor.device.type == _TORCH_DEVICES.get(jax.default_backend()):
        return jax.device_put(jax.dlpack.from_dlpack(tensor.contiguous()))
    return jax.device_put(tensor.cpu().numpy())


def _of_jax(array: jax.Array, beside: torch.Tensor) -> torch.Tensor:
    """A derivative as a tensor on the device of its weight."""
    derivative = torch.from_dlpack(array).to(beside.device)
    if not torch.isfinite(derivative).all():
        raise TnsimError(
            "a gradient is not finite: a float range was exceeded, or a model is near the zero "
            "function; use dtype='float64'"
        )
    return derivative
