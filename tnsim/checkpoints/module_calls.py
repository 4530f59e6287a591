"""What a PyTorch module calls, in order. In: a module, inputs. Out: calls with their arrays.

Every submodule is watched while the module runs once, so it does not matter how its forward pass is
written: what counts is which submodule was given what, and what it gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAVES = ("Linear", "Embedding", "LayerNorm", "RMSNorm")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a submodule.

    Attributes:
        path: Its name in the module, "blocks.0.left".
        module: The submodule.
        given: Its first argument, float64 or token numbers.
        result: What it returned.
    """

    path: str
    module: Any
    given: np.ndarray
    result: np.ndarray


def calls(module: Any, inputs: Any, leaves: tuple[type, ...]) -> tuple[list[Call], np.ndarray]:
    """Run a module once and record the calls of its norms and of leaves that have parameters.

    Args:
        module: One of PyTorch's.
        inputs: What it is called with.
        leaves: Classes that are taken whole, beside the layers that are known.

    Returns:
        The calls in order, and what the module returned, float64.
    """
    found: list[Call] = []
    handles = []

    def watch(path: str, leaf: Any) -> None:
        def record(_: Any, arguments: tuple, named: dict[str, Any], result: Any) -> None:
            given = (*arguments, *named.values())[0]
            found.append(Call(path, leaf, array(given), array(result)))

        handles.append(leaf.register_forward_hook(record, with_kwargs=True))

    for path, leaf in leaves_of(module, leaves):
        known = isinstance(leaf, leaves) or kind(leaf) in LEAVES  # norms without weights as well
        if known or any(True for _ in leaf.parameters()):
            watch(path, leaf)
    try:
        result = module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found, array(result)


def leaves_of(module: Any, classes: tuple[type, ...], path: str = "") -> Iterator[tuple[str, Any]]:
    """Submodules that are taken whole: those of given classes, and those that have none inside.

    Args:
        module: One of PyTorch's.
        classes: Classes that are taken whole though they have submodules.
        path: Of the module.

    Yields:
        Path and submodule, in the order in which they were declared.
    """
    whole = isinstance(module, classes) or kind(module) in LEAVES
    if whole or not any(True for _ in module.children()):
        yield path, module
        return
    for name, child in module.named_children():
        yield from leaves_of(child, classes, join(path, name))


def join(path: str, name: str) -> str:
    """The name of something inside a submodule.

    Args:
        path: Of the submodule, "" for the module itself.
        name: Inside it.

    Returns:
        Both with a dot between.

    Example:
        >>> join("blocks.0", "weight"), join("", "weight")
        ('blocks.0.weight', 'weight')
    """
    return f"{path}.{name}" if path else name


def kind(module: Any) -> str:
    """What PyTorch calls a submodule, whatever it was derived or parametrised from.

    Args:
        module: Any.

    Returns:
        The name of the first class that PyTorch itself defines; "" for one of the user's own.
    """
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.nn.modules.") and cls.__name__ != "Module":
            return cls.__name__
    return ""


def array(value: Any) -> np.ndarray:
    """A tensor as NumPy, floats in float64; the first of several.

    Args:
        value: A tensor, or a tuple that begins with one.

    Returns:
        A copy of the numbers.
    """
    if isinstance(value, tuple):
        value = value[0]
    numbers = value.detach().cpu()
    if numbers.is_floating_point():
        numbers = numbers.double()
    return np.array(numbers.numpy())
