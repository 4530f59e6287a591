"""Small models of sequences as models of vectors. In: layers, n_ctx. Out: kinds and lifted arrays over flattened sequences.

`Gaussian` beyond one nonlinear layer and `Symmetric` join the legs of whole trees (see `deep`), and there a leg is one
index. Flattened, (1, x_00, x_01, ...), a sequence is one vector with one constant, position-wise layers have
block-diagonal weights, and an attention layer is a dense tensor of five legs, symmetrised: of size (1 + n_ctx d)^5 per output,
which only small models afford.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.attention import Attention
from tnsim.models.layers import innermost
from tnsim.names import DENSE, OUT, input_index
from tnsim.tensors.kinds import LayerKind, layer_kind
from tnsim.tensors.layer_networks import at_every_position, local_nodes
from tnsim.tensors.lifted import symmetric_arrays, symmetrised


def flat_kind(layer: Layer, n_ctx: int) -> LayerKind:
    """LayerKind of a layer over flattened sequences; attention is given by its whole tensor, and so always lifted."""
    kind = layer_kind(layer)
    flat = kind._replace(d_in=n_ctx * kind.d_in, d_out=n_ctx * kind.d_out, rank=n_ctx * kind.rank)
    if not kind.mixes_positions:
        return flat
    return LayerKind(flat.name, flat.legs, flat.down, flat.d_in, flat.d_out, dense=True)


def flat_arrays(layer: Layer, n_ctx: int) -> dict[str, Any]:
    """Role -> array, as `local.symmetric_arrays`; DENSE for attention. Raises `ModelError` for traced weights of attention."""
    if not isinstance(innermost(layer), Attention):
        return symmetric_arrays(at_every_position(layer, n_ctx), lifted=True)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(layer)):
        raise ModelError(
            "the exact metrics of deep models with attention have no derivatives; use GaussianClosure() or TreeSymmetric()"
        )
    return {DENSE: symmetrised(dense(layer, n_ctx))}


def dense(layer: Layer, n_ctx: int) -> Float[np.ndarray, "out i j k l m"]:
    """The local tensor of an attention layer."""
    nodes = local_nodes(layer, n_ctx)
    letters = {
        index: chr(ord("a") + n)
        for n, index in enumerate(dict.fromkeys(i for node in nodes for i in node.indices))
    }
    inputs = ",".join("".join(letters[i] for i in node.indices) for node in nodes)
    output = "".join(letters[i] for i in (OUT, *map(input_index, range(5))))
    return np.einsum(f"{inputs}->{output}", *(node.array for node in nodes), optimize=True)
