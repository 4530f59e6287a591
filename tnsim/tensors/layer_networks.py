"""The tensors of one layer, as an unrolled network shows them. In: a layer, n_ctx. Out: named arrays over named indices.

Inputs and outputs are lifted, `(1, x)`; those of a sequence are flattened first, position-major, with one constant for
all positions: `(1, x_00, x_01, ...)`, 1 + n_ctx * d coordinates.

    Linear      WEIGHT[out, in0]
    Bilinear    DOWN[out, hidden] LEFT[hidden, in0] RIGHT[hidden, in1]
    Attention   O[out, s, a, u] MASK[a, s, t] Q1[s, a, x, in0] K1[t, a, x, in1] Q2[s, a, y, in2] K2[t, a, y, in3] V[t, a, u, in4]

s and t are the positions of queries and keys, a heads, x and y coordinates of the two scores, u of the values.
A network is one product, so what a layer adds to it is spelled out: a skip around a bilinear layer as hidden units, the
constant, the output bias and the skip of attention as heads. Plans never see these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.models.arrays import Array
from tnsim.models.attention import Attention
from tnsim.models.layers import Residual, affine_maps, innermost
from tnsim.names import (
    DOWN,
    MASK,
    OUT,
    OUTPUT,
    SKIP,
    VALUE,
    WEIGHT,
    bias_of,
    input_index,
)
from tnsim.tensors.lifted import unrolled_arrays
from tnsim.tensors.positional import sequence_arrays

_HEAD_INDICES = {"Q1": "sax", "K1": "tax", "Q2": "say", "K2": "tay", VALUE: "tau"}


class Node(NamedTuple):
    """One tensor: its role, its array, and an index for every axis; the output comes first, an input last."""

    role: str
    array: Float[np.ndarray, "*axes"]
    indices: tuple[str, ...]


def node_count(layer: Layer) -> int:
    """Number of tensors in the local network of a layer: its affine maps, and a mask for attention."""
    core = innermost(layer)
    rows, _ = affine_maps(core)
    return len(rows) + 1 + isinstance(core, Attention)


def local_nodes(layer: Layer, n_ctx: int | None) -> tuple[Node, ...]:
    """The local network of a layer in float64: the nodes without an input first, then those of `in0`, `in1`, ... in order."""
    layer = jax.tree.map(lambda x: np.asarray(x, np.float64), layer)
    if isinstance(innermost(layer), Attention):
        return _attention_nodes(layer, n_ctx)
    arrays = unrolled_arrays(layer if n_ctx is None else at_every_position(layer, n_ctx))
    if WEIGHT in arrays:
        return (Node(WEIGHT, arrays[WEIGHT], (OUT, input_index(0))),)
    legs = [role for role in arrays if role != DOWN]
    nodes = [Node(DOWN, arrays[DOWN], (OUT, "hidden"))]
    for n, role in enumerate(legs):
        nodes.append(Node(role, arrays[role], ("hidden", input_index(n))))
    return tuple(nodes)


def at_every_position(layer: Layer, n_ctx: int) -> Layer:
    """The layer that acts on flattened sequences as this one does on every position: block-diagonal weights."""
    if isinstance(layer, Residual):
        return Residual(at_every_position(layer.layer, n_ctx), layer.skip, layer.scale)
    leaves, structure = jax.tree.flatten(layer)
    return jax.tree.unflatten(structure, [_repeated(leaf, n_ctx) for leaf in leaves])


def _repeated(array: Array, n_ctx: int) -> Array:
    """A bias as often as there are positions, a matrix as the blocks of a diagonal."""
    xp = jnp if isinstance(array, jax.Array) else np
    if array.ndim == 1:
        return xp.tile(array, n_ctx)
    return xp.kron(xp.eye(n_ctx, dtype=array.dtype), array)


def stacked(legs: Sequence[Node]) -> tuple[Float[np.ndarray, "*axes"], tuple[str, ...]]:
    """The nodes of all input legs as one array with the role as its first axis, and its indices between role and leg.

    Every role is spread over the indices of all roles, so that a symmetriser may hand any role to any leg.
    """
    sizes = {
        index: size
        for node in legs
        for index, size in zip(node.indices[:-1], node.array.shape, strict=False)
    }
    arrays = []
    for node in legs:
        own = sorted(node.indices[:-1], key=list(sizes).index)
        ordered = node.array.transpose([*(node.indices.index(i) for i in own), -1])
        spread = ordered.reshape(*(size if i in own else 1 for i, size in sizes.items()), -1)
        arrays.append(np.broadcast_to(spread, (*sizes.values(), spread.shape[-1])))
    return np.stack(arrays), tuple(sizes)


def _attention_nodes(layer: Layer, n_ctx: int) -> tuple[Node, ...]:
    """Attention with further heads, in which every score is 1 and every position attends to itself alone.

    The first reads the constant on all legs and gives the constant row and the output bias. With a skip, each of the
    others reads one coordinate of the input on one leg and the constant on the rest: 1/5 of the skip comes from
    each leg, so that the tensor treats them alike (see `local` for order two).
    """
    core = innermost(layer)
    found = sequence_arrays(layer, n_ctx)
    copies = (
        [(role, i) for role in _HEAD_INDICES for i in range(core.d_in)] if SKIP in found else []
    )
    heads, every = core.n_heads + 1 + len(copies), np.arange(n_ctx)
    legs = []
    for leg, (role, indices) in enumerate(_HEAD_INDICES.items()):
        rows = found[role].shape[-2]
        constant, body = (
            np.zeros((n_ctx, heads, rows)),
            np.zeros((n_ctx, heads, rows, n_ctx, core.d_in)),
        )
        constant[:, : core.n_heads] = found.get(bias_of(role), 0.0)
        constant[:, core.n_heads :, 0] = 1.0
        body[every, : core.n_heads, :, every] = found[role]
        for head, (reads, i) in enumerate(copies, core.n_heads + 1):
            if reads == role:
                constant[:, head, 0] = 0.0
                body[every, head, 0, every, i] = 1.0
        lifted = np.concatenate(
            [constant[..., None], body.reshape(n_ctx, heads, rows, -1)], axis=-1
        )
        legs.append(Node(role, lifted, (*indices, input_index(leg))))
    output = np.zeros((1 + n_ctx * core.d_out, n_ctx, heads, core.d_value))
    output[0, 0, core.n_heads, 0] = 1.0
    blocks = output[1:].reshape(n_ctx, core.d_out, n_ctx, heads, core.d_value)  # a view
    blocks[every, :, every, : core.n_heads] = found[OUTPUT]
    blocks[every, :, every, core.n_heads, 0] = found.get(bias_of(OUTPUT), 0.0)
    for head, (_, i) in enumerate(copies, core.n_heads + 1):
        blocks[every, i, every, head, 0] = found[SKIP] / core.order
    mask = np.concatenate(
        [
            np.broadcast_to(found[MASK], (core.n_heads, n_ctx, n_ctx)),
            [np.eye(n_ctx)] * (heads - core.n_heads),
        ]
    )
    return (Node(OUTPUT, output, (OUT, "s", "a", "u")), Node(MASK, mask, ("a", "s", "t")), *legs)
