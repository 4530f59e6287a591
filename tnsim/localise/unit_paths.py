"""Paths through the hidden units of models of one nonlinear layer, with an activation or without.

Such a model is a linear map of its hidden units, a constant and the input
(`problems.hidden_units`), and every hidden unit is a component. So the inner product of two models
is a sum over pairs of components, which is read off before it is summed: entries of the kernel
times products of output weights. The path of no component is the input with all constants but the
bias of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnsim.engine.runtime import execution
from tnsim.localise.grams import Gram, Setting
from tnsim.models.components import Component
from tnsim.models.model import Model
from tnsim.problems.hidden_units import bias_in_outputs, hidden_units, tells_units_apart
from tnsim.problems.kernel_models import PreparedModel, units_under
from tnsim.problems.kernels import KERNEL_DTYPE, products_of_parts
from tnsim.scaled import power


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
) -> Gram:
    """The inner products of the paths of two models through their hidden units.

    Args:
        a, b: Models that `reads_units` accepts.
        parts: Components of each model.
        setting: Gaussian metric of the comparison.

    Returns:
        A `Gram`, the path of no component first, then each component in order.
    """
    with execution.precision():
        (bra, first), (ket, second) = (
            _with_bias(model, own, setting) for model, own in zip((a, b), parts, strict=True)
        )
        total: Any = 0.0
        for count, one, two in zip(bra.counts, bra.positions, ket.positions, strict=True):
            total = total + count * products_of_parts(one.first, two.first, (first, second))
    return Gram(total, float(bra.exponent + ket.exponent))


def _with_bias(
    model: Model, parts: Sequence[Component], setting: Setting
) -> tuple[PreparedModel, np.ndarray | None]:
    """A model as prepared, and its bias in the same scale; None where it is no component."""
    reading = model.d_in, model.n_ctx
    made = units_under(hidden_units(model), setting.metric, reading, KERNEL_DTYPE)
    # The bias of the nonlinear layer is told apart from all other constants.
    bias = bias_in_outputs(model) if parts[-1].part is None else None
    return made, None if bias is None else power(np.asarray(bias), -made.exponent)
