"""Tensors of PyTorch that require grad. In: weights of any library. Out: what they are, numbers.

Layers keep such tensors as they are, as they keep what JAX traces: `tnsim.torch` computes with
them, and what has no gradient to give refuses them. Nothing here imports PyTorch.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def requires_grad(value: Any) -> bool:
    """Whether this is a tensor of PyTorch with respect to which a gradient may be asked for.

    Example:
        >>> requires_grad(np.ones(2))
        False
    """
    return getattr(value, "requires_grad", False) is True


def detached(value: Any) -> Any:
    """The numbers of a tensor that requires grad, and anything else as it is.

    Example:
        >>> detached(1.0)
        1.0
    """
    return value.detach() if requires_grad(value) else value


def like(constant: np.ndarray, array: Any) -> Any:
    """A constant in the library of an array, which may be a tensor of PyTorch.

    Example:
        >>> like(np.ones(2), np.zeros(3))
        array([1., 1.])
    """
    return array.new_tensor(constant) if hasattr(array, "new_tensor") else constant
