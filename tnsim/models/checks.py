"""Checks of models and numbers that every verb makes before it begins."""

from __future__ import annotations

from typing import Any

import jax

from tnsim.errors import ModelError
from tnsim.models.arrays import requires_grad


def check_numbers(*models: Any) -> None:
    """Refuse weights that require grad in a computation that has no gradients to give.

    Raises:
        ModelError: A weight of a model, or of a model in a combination, requires grad.

    Example:
        >>> import tnsim
        >>> check_numbers(tnsim.Model([tnsim.Linear([[1.0]])]))
    """
    if any(map(requires_grad, jax.tree.leaves(models))):
        raise ModelError(
            "weights of a model are PyTorch tensors that require grad, and the gradient would be "
            "lost here: use tnsim.torch.similarity, or build the model of tensor.detach() where "
            "none is wanted"
        )


def check_comparable(a: Any, b: Any) -> None:
    """Refuse models that cannot be compared.

    Raises:
        ModelError: The models read different inputs, give different outputs, or differ in `n_ctx`.

    Example:
        >>> import tnsim
        >>> a = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> b = tnsim.Model([tnsim.Linear([[1.0, 2.0]])])
        >>> check_comparable(a, b)
        Traceback (most recent call last):
        tnsim.errors.ModelError: the models read different inputs: 1 and 2 coordinates
    """
    if a.d_in != b.d_in:
        raise ModelError(f"the models read different inputs: {a.d_in} and {b.d_in} coordinates")
    if a.d_out != b.d_out:
        raise ModelError(f"the models have different outputs: {a.d_out} and {b.d_out}")
    if a.n_ctx != b.n_ctx:
        raise ModelError(
            f"the models read sequences of different length: n_ctx={a.n_ctx} and n_ctx={b.n_ctx}"
        )


def check_length(n_ctx: Any) -> None:
    """Refuse a value that is no length of sequences.

    Raises:
        ModelError: The value is neither None nor a positive integer.

    Example:
        >>> check_length(-1)
        Traceback (most recent call last):
        tnsim.errors.ModelError: n_ctx must be a positive integer or None, found -1
    """
    whole = isinstance(n_ctx, int) and not isinstance(n_ctx, bool)
    if n_ctx is not None and not (whole and n_ctx > 0):
        raise ModelError(f"n_ctx must be a positive integer or None, found {n_ctx!r}")
