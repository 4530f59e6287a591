"""Modules as models that keep the parameters, so that PyTorch records all operations on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tnsim.checkpoints.module_rules import Declared
from tnsim.checkpoints.modules import layers_of, recognised, tensors_of
from tnsim.checkpoints.named_arrays import NamedArrays
from tnsim.checkpoints.traced_modules import exports_of, traced_layers
from tnsim.errors import UnsupportedLayer
from tnsim.models.model import Model


def model_of(
    module: Any, layers: Mapping[type, Declared] | None, n_ctx: int | None, inputs: Any
) -> Model:
    """The model of a module, made of the module's own tensors.

    `recognised` finds the rules of the layers, and compares them with the module, on numbers. The
    same rules then read the tensors, so PyTorch records their operations.

    Args:
        module: An `nn.Module`.
        layers: Rules for classes of the user's own.
        n_ctx: Length of sequences.
        inputs: Example of the inputs with which the module is called.

    Returns:
        The model. Tensors that require no grad are arrays in it.

    Raises:
        UnsupportedLayer: The module holds a norm, or a layer that `tnsim.from_module` does not
            know.
        ModelError: The recognised layers compute something other than the module.
    """
    reading = recognised(module, layers, n_ctx, inputs)
    if reading.parts is None:
        # A module that no rules describe is traced operation by operation; the example is moved to
        # the type and device of the parameters first.
        parameters = [
            parameter for parameter in reading.module.parameters() if parameter.is_floating_point()
        ]
        example = reading.example.to(parameters[0])
        return Model(
            traced_layers(reading.module, example, exports_of(reading.module, None)), n_ctx
        )
    arrays = NamedArrays(tensors_of(reading.module), None)
    live = [layer for part in reading.parts for layer in layers_of(part, reading.module, arrays)]
    normed = [str(n) for n, layer in enumerate(live) if layer.norm is not None]
    if normed:
        raise UnsupportedLayer(
            f"a norm stands before layer {', '.join(normed)}. At a constant energy it is part of "
            "the layer, but the energy changes with the weights, so a gradient would lack a part: "
            "train with tnsim.Empirical(inputs), on which the module runs as it is, and use "
            "tnsim.from_module(module, norm_inputs=inputs) to look at what came of it"
        )
    return Model([layer.layer for layer in live], n_ctx)
