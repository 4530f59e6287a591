"""Paths through the hidden units of models of one nonlinear layer, with an activation or without.

Such a model is a linear map of its hidden units, a constant and the input (`problems.kernels`), and
every hidden unit is a component. So the inner product of two models is a sum over pairs of
components, which is read off before it is summed: entries of the kernel times products of output
weights. The path of no component is the input with all constants but the bias of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.engine.runtime import execution
from tnsim.localise.grams import Setting
from tnsim.models.components import Component, core_with_output
from tnsim.models.layers import affine_maps, bias_name, residual_rule
from tnsim.models.model import Model
from tnsim.problems.kernel_models import last_segments, under
from tnsim.problems.kernels import (
    KERNEL_DTYPE,
    Prepared,
    readout,
    tells_units_apart,
    whole_kernel,
)
from tnsim.scaled import power


class UnitProducts(NamedTuple):
    """The matrix `values * 2 ** exponent` of inner products of paths.

    Args:
        values: Inner products, the path of no component first, then each component in order.
        exponent: Exponent of their common scale.
    """

    values: Float[np.ndarray, "bra ket"]
    exponent: float


def reads_units(models: Sequence[Model], parts: Sequence[Sequence[Component]], metric: Any) -> bool:
    """Whether the components of some models are the units of single nonlinear layers.

    Args:
        models: Models under comparison.
        parts: All components of each model.
        metric: Metric of the comparison.

    Raises:
        UnsupportedLayer: A model has an activation, and the metric has no closed form for it.
    """
    for model, own in zip(models, parts, strict=True):
        places = {part.layer for part in own}
        if not any(part.parts > 1 or part.part is None for part in own):
            return False
        if places != {n for n, order in enumerate(model.orders) if order > 1}:
            return False
    return tells_units_apart(models, metric)


def products_of_units(
    a: Model, b: Model, parts: tuple[Sequence[Component], Sequence[Component]], setting: Setting
) -> UnitProducts:
    """The inner products of the paths of two models through their hidden units.

    Args:
        a, b: Models that `reads_units` accepts.
        parts: Components of each model.
        setting: Gaussian metric of the comparison.
    """
    with execution.precision():
        bra, ket = (under(model, setting.metric, KERNEL_DTYPE) for model in (a, b))
        # The bias of the nonlinear layer is a component of its own where it has one, so it is told
        # apart from all other constants.
        biases = [
            _bias(model, own, chain.exponent)
            for model, own, chain in zip((a, b), parts, (bra, ket), strict=True)
        ]
        total: Any = 0.0
        for count, one, two, _ in last_segments(bra, ket):
            # Legs (h, 1, z) on both sides, and behind them the bias as a further constant. Entry
            # (i, j) of the product is the kernel times the weights with which outputs read both
            # legs.
            kernel = np.asarray(whole_kernel(one, two))
            first, second = _readout(one, biases[0]), _readout(two, biases[1])
            kernel = _with_bias(_with_bias(kernel, one, biases[0]).T, two, biases[1]).T
            shares = np.asarray((first.T @ second) * kernel, np.float64)
            rows = _gathered(shares, one, biases[0])
            total = total + count * _gathered(rows.T, two, biases[1]).T
    return UnitProducts(total, float(bra.exponent + ket.exponent))


def _bias(model: Model, parts: Sequence[Component], exponent: Any) -> np.ndarray | None:
    """What the bias of the nonlinear layer adds to the outputs; None where it is no component."""
    if parts[-1].part is not None:
        return None
    place = parts[-1].layer
    core = core_with_output(model.layers[place])
    vector = getattr(core, bias_name(affine_maps(core)[1]))
    if vector is None:
        return None
    # The bias passes the scale of the residual and all linear layers behind.
    vector = residual_rule(model.layers[place])[1] * np.asarray(vector, np.float64)
    for layer in model.layers[place + 1 :]:
        matrix = getattr(layer, affine_maps(layer)[1])  # layers behind are linear
        vector = np.asarray(matrix, np.float64) @ vector
    return power(vector, -exponent)


def _readout(model: Prepared, bias: np.ndarray | None) -> np.ndarray:
    """The matrix that reads the outputs off `(h, 1, z)`, with the bias as a constant of its own."""
    matrix = np.asarray(readout(model))
    if bias is None:
        return matrix
    rest = np.array(matrix)
    # Column `units` is that of the constant 1: it loses the bias, which gets a column of its own.
    rest[:, model.units] -= bias
    return np.column_stack([rest, bias])


def _with_bias(kernel: np.ndarray, model: Prepared, bias: np.ndarray | None) -> np.ndarray:
    """Rows of the kernel for `(h, 1, z)`, and once more for the constant where there is a bias."""
    return kernel if bias is None else np.concatenate([kernel, kernel[[model.units]]])


def _gathered(shares: np.ndarray, model: Prepared, bias: np.ndarray | None) -> np.ndarray:
    """Rows of hidden units, constants and the input as rows of paths."""
    units = shares[: model.units]
    # The first axis after reshaping are the powers that together are a hidden unit, see `_powers`
    # of the kernels; they sum to a component.
    units = units.reshape(model.copies, -1, shares.shape[1]).sum(axis=0)
    end = len(shares) - (bias is not None)
    stream = shares[model.units : end].sum(axis=0, keepdims=True)
    return np.concatenate([stream, units, shares[end:]])
