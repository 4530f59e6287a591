"""Modules as models that keep the parameters, so that PyTorch records all operations on them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tnsim.checkpoints.graphs import graph_of, state_of
from tnsim.checkpoints.module_calls import copy_of, require_torch
from tnsim.checkpoints.modules import Declared, graph_layers, recognised
from tnsim.errors import UnsupportedLayer
from tnsim.models.model import Model
from tnsim.sessions import session


def model_of(
    module: Any,
    layers: Mapping[type, Declared] | None,
    n_ctx: int | None,
    inputs: Any,
    width: int | None = None,
) -> Model:
    """The model of a module, made of the module's own tensors.

    `recognised` reads the layers and compares them with the module, on numbers. The same reading of
    the module's graph then takes the tensors, so PyTorch records their operations.

    Args:
        module: An `nn.Module`.
        layers: Rules for classes of the user's own.
        n_ctx: Length of sequences.
        inputs: Example of the inputs with which the module is called.
        width: Entries of a vector that the module reads, where what it is compared with says so.

    Returns:
        The model. Tensors that require no grad are arrays in it.

    Raises:
        UnsupportedLayer: The module holds a norm, or a layer that `tnsim.from_module` does not
            know.
        ModelError: The recognised layers compute something other than the module.
    """
    # Modules that are compared by their numbers have no place of their own.
    reader = module if type(module).__hash__ is object.__hash__ else None
    reading = recognised(module, layers, n_ctx, inputs, width=width, reader=reader)
    torch = require_torch()
    module, example = reading.module, reading.example
    parameters = [one for one in module.parameters() if one.is_floating_point()]
    if parameters and example.is_floating_point():
        # The graph is that of the module's own type and place.
        example = example.to(parameters[0])
    whole, own = tuple(layers or {}), state_of(module)
    # The caller's autocast would round weights on their way into the layers.
    exact = torch.autocast(example.device.type, enabled=False)
    with exact, contextlib.nullcontext() if torch.is_grad_enabled() else torch.no_grad():
        # The graph of the reading is for float64. One object for as long as the code stays.
        graph = session().belongings.get(
            reading.graph,
            (model_of, example.dtype, example.device),
            lambda: graph_of(copy_of(module).eval(), example, whole),
        )
        live = graph_layers(graph, own, module, layers or {}, example, reading.positions > 1)
    normed = [str(n) for n, layer in enumerate(live) if layer.norm is not None]
    if normed:
        raise UnsupportedLayer(
            f"a norm stands before layer {', '.join(normed)}. At a constant energy it is part of "
            "the layer, but the energy changes with the weights, so a gradient would lack a part: "
            "train with tnsim.Empirical(inputs), on which the module runs as it is, and use "
            "tnsim.from_module(module, norm_inputs=inputs) to look at what came of it"
        )
    return Model([layer.layer for layer in live], n_ctx)
