"""Similarities with gradients in PyTorch. In: modules, models of tensors. Out: tensors.

Nothing here imports PyTorch before it is called. Reading order: `models` keeps the tensors of a
module in the layers of a model, `samples` has the points of a finite metric, `autograd` hands both
to JAX and gradients back, `programs` is what JAX compiles. `import torch` means PyTorch in all of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import DTypeLike

from tnsim.checkpoints.module_calls import require_torch
from tnsim.checkpoints.module_rules import Declared
from tnsim.engine.budget import Budget
from tnsim.metrics.metric import Gaussian
from tnsim.metrics.protocol import Metric
from tnsim.models.model import Model

if TYPE_CHECKING:
    import torch

__all__ = ["from_module", "similarity"]


def similarity(
    a: Any,
    b: Any,
    metric: Metric = Gaussian(),
    *,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> torch.Tensor:
    """As `tnsim.similarity`, with gradients with respect to the tensors in either model.

    The value is computed where JAX computes. Tensors that are there pass without a copy, others
    through the host, those of a GPU too where JAX knows the CPU alone; gradients come back in the
    type and on the device of each tensor. Second derivatives are not there.

    Args:
        a: an `nn.Module`, which is recognised at every call as by `tnsim.from_module`; a model
            whose weights may be tensors that require grad; or a combination of such models.
        b: likewise. What has no tensor that requires grad is held fixed.
        metric: How inputs are weighed. The inputs of `Empirical` may change from call to call.
        dtype: Precision of the computation, float64 or float32.
        budget: What the computation may take.

    Returns:
        A float64 tensor of no axes, in [-1, 1], on the device of the first tensor.

    Raises:
        ModelError: As `tnsim.similarity`.
        UnsupportedLayer: As `tnsim.from_module`.
        TooLarge: The computation would exceed the budget.
        MissingExtra: PyTorch is not installed.
        TnsimError: In `backward`, of second derivatives and of gradients that are not finite.

    Example:
        >>> import torch, tnsim
        >>> net = torch.nn.Linear(2, 2)
        >>> goal = tnsim.Model([tnsim.Linear([[1.0, 0.0], [0.0, 1.0]])])
        >>> loss = 1 - tnsim.torch.similarity(net, goal)
        >>> loss.backward()
        >>> net.weight.grad.shape
        torch.Size([2, 2])

    Source:
        Paper, equation 2; derivatives by reverse mode through the same contractions.
    """
    require_torch()
    from tnsim.torch.autograd import compared

    return compared(a, b, metric, dtype, budget)


def from_module(
    module: Any,
    layers: Mapping[type, Declared] | None = None,
    n_ctx: int | None = None,
    *,
    inputs: Any = None,
) -> Model:
    """As `tnsim.from_module`, but the layers hold the parameters themselves.

    The model belongs to the graph of this moment, as every tensor that is computed does: make it
    anew at each step of training.

    Args:
        module: An `nn.Module`, whose parameters may require grad.
        layers: What classes of your own are, as for `tnsim.from_module`.
        n_ctx: Length of the sequences on which a model with attention is compared.
        inputs: An example of what the module is called with.

    Returns:
        A model for `tnsim.torch.similarity`. Verbs without gradients refuse it.

    Raises:
        UnsupportedLayer: As `tnsim.from_module`; and for norms, whose constant energy would have to
            follow the weights.
        ModelError: What was recognised computes something else.
        MissingExtra: PyTorch is not installed.

    Example:
        >>> import torch, tnsim
        >>> net = torch.nn.Linear(2, 3)
        >>> tnsim.torch.from_module(net).layers[0].weight is net.weight
        True
    """
    from tnsim.torch.models import model_of

    return model_of(module, layers, n_ctx, inputs)
