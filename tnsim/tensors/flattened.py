"""Sequences as one vector. In: layers, n_ctx. Out: kinds and lifted arrays over flattened inputs.

`Gaussian` beyond one nonlinear layer and `Symmetric` join the legs of whole trees (see
`folding.whole_tree`), and there a leg is one index. Flattened, (1, x_00, x_01, ...), a sequence is
one vector with one constant, position-wise layers have block-diagonal weights, and an attention
layer is a dense tensor of five legs, symmetrised: of size (1 + n_ctx d)^5 per output, which only
small models afford.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.arrays import is_traced
from tnsim.models.attention import Attention
from tnsim.models.layers import innermost
from tnsim.models.protocol import Layer
from tnsim.names import DENSE, OUT, input_index
from tnsim.tensors.kinds import LayerKind, layer_kind
from tnsim.tensors.layer_networks import at_every_position, local_nodes
from tnsim.tensors.symmetric import symmetric_arrays, symmetrised


def flat_kind(layer: Layer, n_ctx: int) -> LayerKind:
    """Kind of a layer over flattened sequences.

    Attention is given by its whole tensor, and so always lifted.

    Example:
        >>> import tnsim
        >>> flat_kind(tnsim.Linear(np.eye(2)), n_ctx=3).d_in
        6
    """
    kind = layer_kind(layer)
    flat = kind._replace(d_in=n_ctx * kind.d_in, d_out=n_ctx * kind.d_out, rank=n_ctx * kind.rank)
    if not kind.mixes_positions:
        return flat
    return LayerKind(flat.name, flat.legs, flat.down, flat.d_in, flat.d_out, dense=True)


def flat_arrays(layer: Layer, n_ctx: int) -> dict[str, Any]:
    """The arrays of a layer over flattened sequences.

    Returns:
        Role -> array, as `symmetric.symmetric_arrays` gives them; DENSE alone for attention.

    Raises:
        ModelError: The weights of an attention layer are traced.

    Example:
        >>> import tnsim
        >>> flat_arrays(tnsim.Linear(np.eye(2)), n_ctx=3)["WEIGHT"].shape
        (7, 7)
    """
    if not isinstance(innermost(layer), Attention):
        return symmetric_arrays(at_every_position(layer, n_ctx), lifted=True)
    if is_traced(layer):
        raise ModelError(
            "the exact metrics of deep models with attention have no derivatives; "
            "use GaussianClosure() or TreeSymmetric()"
        )
    return {DENSE: symmetrised(dense(layer, n_ctx))}


def dense(layer: Layer, n_ctx: int) -> Float[np.ndarray, "out i j k l m"]:
    """The tensor of an attention layer over flattened, lifted sequences, not symmetrised.

    Returns:
        float64, (1 + n_ctx * d_out, (1 + n_ctx * d_in) five times).

    Example:
        >>> import tnsim
        >>> one = np.ones((1, 1))
        >>> layer = tnsim.Attention(one, one, one, one, one, one, n_heads=1, rope_base=None)
        >>> dense(layer, n_ctx=1).shape
        (2, 2, 2, 2, 2, 2)
    """
    nodes = local_nodes(layer, n_ctx)
    # np.einsum takes numbers for indices: here in the order in which they occur.
    numbers: dict[str, int] = {}
    arguments: list[Any] = []
    for node in nodes:
        arguments += [node.array, [numbers.setdefault(i, len(numbers)) for i in node.indices]]
    output = [numbers[index] for index in (OUT, *map(input_index, range(5)))]
    return np.einsum(*arguments, output, optimize=True)
