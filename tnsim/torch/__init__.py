"""Similarities with gradients in PyTorch, and along a training run.

Nothing here imports PyTorch before it is called, and `import torch` means PyTorch in these modules.
The modules in their reading order:

    autograd  modules, and functions by their outputs, compared with gradients
    monitor   a network recorded while it trains
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import DTypeLike

from tnsim.checkpoints.given import given_model, is_path_or_paths
from tnsim.checkpoints.module_calls import outside_compiler, require_torch
from tnsim.checkpoints.modules import Declared
from tnsim.compare.request import Request, comparables, estimated, may_estimate
from tnsim.engine.ir.problem import dtype_name
from tnsim.engine.planner import Budget
from tnsim.errors import UnsupportedLayer
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.metric import Gaussian, as_metric
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import numbers
from tnsim.models.functions import is_function
from tnsim.models.model import Model, with_dense_matrices
from tnsim.options import checked

if TYPE_CHECKING:
    import torch

    from tnsim.torch.monitor import Monitor

__all__ = ["Monitor", "from_module", "similarity"]


def __getattr__(name: str) -> Any:
    """`Monitor` on first use, as it draws and labels matrices."""
    if name != "Monitor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tnsim.torch.monitor import Monitor

    return Monitor


@outside_compiler
@checked
def similarity(
    a: Any,
    b: Any,
    metric: Metric | str = Gaussian(),
    *,
    n_ctx: int | None = None,
    centred: bool = False,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> torch.Tensor:
    """The similarity of two models, with gradients with respect to the tensors in either model.

    Under `Empirical` modules run on the inputs in PyTorch, in their own mode, precision and place,
    whatever they compute; and so they do under a `Gaussian` without an exact inner product, on the
    normal inputs of its estimate, which `Gaussian(samples=1024)` makes fewer. Models are computed
    on the default device of JAX. Tensors on this device pass without a copy, all others through the
    host (also tensors on a GPU, where JAX knows the CPU alone). Gradients come back in the type and
    on the device of each tensor. Second derivatives with respect to weights of models are not
    supported.

    Args:
        a: An `nn.Module`, which is recognised at every call as by `tnsim.from_module`, and under
            `Empirical` runs on the inputs; a model with weights that may be tensors that require
            grad; a combination of such models; the path of a file; under `Empirical` also a plain
            function, with gradients where its outputs are tensors that require grad.
        b: The other module, model, combination, path or function. A side without tensors that
            require grad is held fixed.
        metric: Metric that weighs the inputs, or its name. The inputs of `Empirical` may change
            from call to call.
        n_ctx: Length of the sequences on which models with attention are compared.
        centred: Whether functions are compared without their means over the inputs.
        dtype: Precision in which models are computed, float64 or float32; modules that run on
            inputs have their own.
        budget: Limits on work and memory. Values that modules and plain functions keep for the way
            back are not counted, as nothing tells them beforehand.

    Returns:
        A float64 tensor of no axes, in [-1, 1], on the device of the first tensor, or of the
            first outputs on an accelerator.

    Raises:
        ModelError: The models cannot be compared, see `tnsim.similarity`; or a module that runs on
            inputs is in training mode, and its outputs are random.
        UnsupportedLayer: A module holds a layer that `tnsim.from_module` does not know.
        TooLarge: The computation, gradients included, would exceed the budget.
        MissingExtra: PyTorch is not installed.
        TnsimError: Outputs of a function are not finite, or too far apart for float64; or second
            derivatives are asked for, or a gradient of a model is not finite, which `backward`
            raises.

    Example:
        >>> import torch, tnsim
        >>> net = torch.nn.Linear(2, 2)
        >>> goal = tnsim.Model([tnsim.Linear([[1.0, 0.0], [0.0, 1.0]])])
        >>> loss = 1 - tnsim.torch.similarity(net, goal)
        >>> loss.backward()
        >>> net.weight.grad.shape
        torch.Size([2, 2])

    Source:
        Paper, equation 2; derivatives by reverse mode, contraction by contraction.
    """
    require_torch()
    metric = as_metric(metric)
    request = Request(metric, dtype_name(dtype), budget, squared_norms=True, centred=centred)
    from tnsim.torch.autograd import compared, compared_on_inputs

    if may_estimate(metric):
        try:
            return compared(a, b, n_ctx, request)
        except UnsupportedLayer:
            # No exact inner product: the estimate of `tnsim.similarity`, on the same inputs.
            a, b = (given_model(x, n_ctx) if is_path_or_paths(x) else x for x in (a, b))
            metric = estimated(metric, [numbers(with_dense_matrices(x)) for x in (a, b)], n_ctx)
            if not isinstance(metric, Empirical):
                raise
            request = request._replace(metric=metric)
    if isinstance(metric, Empirical):
        # Modules run on the inputs as they are.
        a, b = comparables(a, b, metric, n_ctx)
        if is_function(a) or is_function(b):
            return compared_on_inputs(a, b, request)
    return compared(a, b, n_ctx, request)


@outside_compiler
@checked(own="layers")
def from_module(
    module: Any,
    layers: Mapping[type, Declared] | None = None,
    n_ctx: int | None = None,
    *,
    inputs: Any = None,
) -> Model:
    """The model of a module, with the parameters themselves in its layers.

    The model belongs to the autograd graph of the moment, as every computed tensor does: make it
    anew at each step of training.

    Args:
        module: An `nn.Module` with parameters that may require grad.
        layers: Rules for classes of your own, as for `tnsim.from_module`.
        n_ctx: Length of the sequences on which a model with attention is compared.
        inputs: Example of the inputs with which the module is called.

    Returns:
        A model for `tnsim.torch.similarity`. Verbs without gradients refuse it.

    Raises:
        UnsupportedLayer: The module holds a layer that `tnsim.from_module` does not know, or a
            norm: the constant energy of a norm would have to follow the weights.
        ModelError: The recognised layers compute something other than the module.
        MissingExtra: PyTorch is not installed.

    Example:
        >>> import torch, tnsim
        >>> net = torch.nn.Linear(2, 3)
        >>> tnsim.torch.from_module(net).layers[0].weight is net.weight
        True
    """
    from tnsim.torch.autograd import model_of

    return model_of(module, layers, n_ctx, inputs)
