"""Products of equal factors as powers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnsim.activations.activation import power
from tnsim.models.activated import Gated
from tnsim.models.layers import Multilinear, Residual, innermost, residual_rule
from tnsim.models.matrices import is_sparse
from tnsim.models.model import Model


def with_powers(model: Model, most: int) -> Model:
    """A model whose products of many equal factors are powers, `h^n` in the place of `h ... h`.

    Written as sums of powers by polarisation, which does not ask for equal factors, they would be
    2^(n - 1) powers. Equal numbers have derivatives of their own, so this is for values alone.

    Args:
        model: Model that is not traced; without such layers it is returned itself.
        most: Most factors of a product that stays a product.

    Example:
        >>> import tnsim
        >>> sixth = tnsim.Model([tnsim.Multilinear([[[2.0]]] * 6, [[1.0]])])
        >>> with_powers(sixth, 4).layers[0].activation.name
        'power(6)'
    """
    layers = [_as_power(layer, most) for layer in model.layers]
    changed = any(new is not old for new, old in zip(layers, model.layers, strict=True))
    return Model(layers, model.n_ctx, model.origin) if changed else model


def _as_power(layer: Any, most: int) -> Any:
    core = innermost(layer)
    if not isinstance(core, Multilinear) or core.n_legs <= most or is_sparse(core):
        return layer
    (gate, *others), (bias, *biases) = core.legs, core.leg_biases
    pairs = [*((gate, leg) for leg in others), *((bias, one) for one in biases)]
    if not all(_are_equal(one, two) for one, two in pairs):
        return layer
    made = Gated(gate, None, core.down, power(core.n_legs), bias, None, core.down_bias)
    return made if core is layer else Residual(made, *residual_rule(layer))


def _are_equal(one: Any, two: Any) -> bool:
    """Whether two arrays have equal numbers; a missing bias differs from zeros."""
    return one is two or (one is not None and two is not None and np.array_equal(one, two))
