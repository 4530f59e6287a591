"""States inside a PyTorch module, as a public function, and what readers of modules share."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tnsim.errors import ModelError, first_few, require
from tnsim.models.arrays import detached, host_array
from tnsim.models.functions import array_of, batch_of_inputs, run_module
from tnsim.options import checked

P = ParamSpec("P")
T = TypeVar("T")

BATCH = 16  # inputs that run at once where states are collected


@checked
def inputs_of(module: Any, path: str, inputs: Any) -> np.ndarray:
    """The states that enter a submodule while a module runs on inputs.

    For the distribution of what a block reads: `Gaussian.fit(states)`, `Empirical(states)`.

    Args:
        module: An `nn.Module` in evaluation mode. It is not changed.
        path: Name of the submodule, such as "transformer.h.5.mlp".
        inputs: Argument of the module, a row for each input: token ids (n, positions), or vectors.

    Returns:
        The first argument of the submodule in every call, (states, width), float64: a state for
        each position of each input.

    Raises:
        ModelError: There is no such submodule, it is not called, or its argument has no
            coordinates.
        MissingExtra: PyTorch is not installed.

    Example:
        >>> import torch, tnsim
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4))
        >>> states = inputs_of(net, "1", np.array([[0, 1], [2, 3]]))
        >>> states.shape, tnsim.Gaussian.fit(states).mean.shape
        ((4, 3), (3,))
    """
    torch = require_torch()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"states are taken from a torch.nn.Module, found {type(module).__name__}")
    known = dict(module.named_modules())
    if path not in known:
        # Names that end alike are the likeliest to be meant.
        names = [name for name in known if name.rpartition(".")[2] == str(path).rpartition(".")[2]]
        near = names or [name for name in known if name]
        raise ModelError(f"there is no submodule {path!r}; there are {first_few(near)}")
    rows = batch_of_inputs(inputs)
    batches: list[np.ndarray] = []

    def record(_: Any, arguments: tuple, named: dict[str, Any]) -> None:
        given = as_numpy((*arguments, *named.values())[0])
        # Token numbers are no states.
        if given.dtype.kind != "f" or given.ndim < 2:
            raise ModelError(
                f"{path} reads an array of {given.dtype} and shape {given.shape}, which are no "
                "states: name the submodule that reads vectors"
            )
        # A position is a state like any other.
        batches.append(given.reshape(-1, given.shape[-1]))

    handle = known[path].register_forward_pre_hook(record, with_kwargs=True)
    try:
        for start in range(0, len(rows), BATCH):
            run_module(module, rows[start : start + BATCH])
    finally:
        handle.remove()
    if not batches:
        raise ModelError(f"{path} is not called when the module runs on these inputs")
    return np.concatenate(batches)


def as_numpy(value: Any) -> np.ndarray:
    """A tensor as NumPy, floats in float64.

    Args:
        value: A tensor, or outputs of a module that hold a tensor, as for `array_of`.

    Returns:
        A copy of the numbers.
    """
    found = host_array(detached(array_of(value)))
    return np.array(found, np.float64 if found.dtype.kind == "f" else found.dtype)


def copy_of(module: Any) -> Any:
    """A copy of a module, also of one that keeps tensors computed from its parameters.

    Pruning and the norms of `torch.nn.utils` keep a weight as an attribute, beside the parameters
    that it is computed from before every call. PyTorch copies no such tensor, as a copy would have
    no history; that of a module needs none, since the next call computes it anew.

    Args:
        module: A module of PyTorch, or what a package wraps one in.

    Example:
        >>> import torch
        >>> from torch.nn.utils import prune
        >>> pruned = prune.l1_unstructured(torch.nn.Linear(2, 1), "weight", 1)
        >>> int((copy_of(pruned).weight == 0).sum())
        1
    """
    torch = require_torch()
    known: dict[int, Any] = {}
    for child in module.modules() if isinstance(module, torch.nn.Module) else ():
        for kept in (*vars(child).values(), *child.buffers(recurse=False)):
            if isinstance(kept, torch.Tensor) and not kept.is_leaf:
                known[id(kept)] = kept.detach().clone()
    return copy.deepcopy(module, known)


def outside_compiler(function: Callable[P, T]) -> Callable[P, T]:
    """The function, run as it is where `torch.compile` compiles the code that calls it.

    The compiler would compile tnsim itself, for half a minute, and modules cannot be read there.

    Args:
        function: Function that reads modules.

    Example:
        >>> outside_compiler(abs)(-1)
        1
    """

    @wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> T:
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*given, **named)
        return function(*given, **named)

    return called


def diverged(module: Any) -> str | None:
    """What to say of the numbers of a module that are NaN or infinite; None where all are finite.

    Args:
        module: An `nn.Module`.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(1, 1)
        >>> diverged(net) is None
        True
        >>> _ = net.weight.data.fill_(torch.inf)
        >>> diverged(net)
        "'weight' has numbers that are NaN or infinite: the run diverged there"
    """
    names = [
        repr(name)
        for name, one in module.named_parameters()
        if not one.is_meta and not bool(one.detach().isfinite().all())
    ]
    if not names:
        return None
    has = "has" if len(names) == 1 else "have"
    return f"{first_few(names)} {has} numbers that are NaN or infinite: the run diverged there"


def require_torch() -> Any:
    """The package `torch`.

    Returns:
        The package.

    Raises:
        MissingExtra: When PyTorch is not installed.
    """
    require("torch", "torch", "reading a module")
    import torch

    return torch


@contextlib.contextmanager
def as_precise_as(module: Any) -> Iterator[None]:
    """Run a copy of a module in float64 as precisely as the module itself runs.

    In a module of float32 or less, casts to float32 lose nothing, as in `x.float()`. In its copy
    they would round, or mix two types in one product, and are left out. In a module of float64 they
    round, and so they do in its copy.

    Args:
        module: The module, of which a copy in float64 runs.

    Example:
        >>> import torch
        >>> with as_precise_as(torch.nn.Linear(1, 1)):
        ...     torch.zeros(1, dtype=torch.float64).float().dtype
        torch.float64
    """
    torch = require_torch()
    from torch.overrides import TorchFunctionMode

    class Wide(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = kwargs or {}
            if not args or getattr(args[0], "dtype", None) is not torch.float64:
                return function(*args, **named)
            if function is torch.Tensor.float:
                return args[0]
            return function(*map(wider, args), **{name: wider(x) for name, x in named.items()})

    def wider(given: Any) -> Any:
        return torch.float64 if given is torch.float32 else given

    is_wide = any(weight.dtype is torch.float64 for weight in module.parameters())
    with contextlib.nullcontext() if is_wide else Wide():
        yield
