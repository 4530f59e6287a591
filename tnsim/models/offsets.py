"""Constant functions, and models less a constant."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.models.arrays import requires_grad
from tnsim.models.layers import Linear
from tnsim.models.model import Combination, Model


def constant(d_in: int, values: Float[np.ndarray, " out"], n_ctx: int | None) -> Model:
    """The model of a constant function.

    Args:
        d_in: Coordinates of the input.
        values: Output for every input.
        n_ctx: Number of positions of a sequence, or None.

    Example:
        >>> constant(2, np.array([5.0]), None)(np.ones((1, 2))).tolist()
        [[5.0]]
    """
    nothing = Linear(np.zeros((1, d_in)))  # narrow, as inputs may be tokens of a large vocabulary
    return Model([nothing, Linear(np.zeros((len(values), 1)), values)], n_ctx)


def less(given: Model | Combination, values: Float[np.ndarray, " out"]) -> Model | Combination:
    """A model or a sum of models less a constant.

    Args:
        given: Model or combination.
        values: Constant, one number for every output.

    Returns:
        Of a model a model with another bias at its end, in a layer of its own where the last bias
        is a tensor that requires grad; of a sum a sum with one more term.

    Example:
        >>> less(Model([Linear([[2.0]])]), np.array([5.0]))(np.ones((1, 1))).tolist()
        [[-3.0]]
    """
    if isinstance(given, Combination):
        return given - constant(given.d_in, values, given.n_ctx)
    last: Any = given.layers[-1]
    if isinstance(last, Linear) and not requires_grad(last.bias):
        bias = -values if last.bias is None else np.asarray(last.bias, np.float64) - values
        layers = (*given.layers[:-1], Linear(last.weight, bias))
    else:
        layers = (*given.layers, Linear(np.eye(len(values)), -values))
    return Model(layers, given.n_ctx, given.origin)
