"""A single layer as an unrolled network, and layers over flattened sequences.

*Networks.* A drawn network has a tensor per array, over named indices. Inputs and outputs are
lifted, `(1, x)`; sequences are flattened first, position-major, with a single constant for all
positions: `(1, x_00, x_01, ...)`, 1 + n_ctx * d coordinates.

    Linear      WEIGHT[out, in0]
    Bilinear    DOWN[out, hidden] LEFT[hidden, in0] RIGHT[hidden, in1]
    Attention   O[out, s, a, u] MASK[a, s, t]
                Q1[s, a, x, in0] K1[t, a, x, in1]
                Q2[s, a, y, in2] K2[t, a, y, in3] V[t, a, u, in4]

s and t are the positions of queries and keys, a heads, x and y coordinates of the two scores, u of
the values. A network is a single product, so the sums within a layer are spelled out: a skip around
a bilinear layer as hidden units, and the constant, the output bias and the skip of attention as
heads. Plans never read these arrays.

*Flattened layers.* `Gaussian` beyond a single nonlinear layer and `Symmetric` join the legs of
whole trees (see `problems.whole_tree`), and there a leg is a single index. A flattened sequence is
a vector with a single constant, position-wise layers have block-diagonal weights, and an attention
layer is a dense tensor of five legs, symmetrised: of size (1 + n_ctx d)^5 per output, which only
small models afford.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.arrays import Array, is_traced
from tnsim.models.attention import Attention
from tnsim.models.layers import Residual, affine_maps, innermost
from tnsim.models.protocol import Layer
from tnsim.names import DENSE, DOWN, MASK, OUT, OUTPUT, SKIP, VALUE, WEIGHT, bias_of, input_index
from tnsim.problems.tensors.kinds import LayerKind, core_of, layer_kind
from tnsim.problems.tensors.lifted import symmetric_arrays, symmetrised, unrolled_arrays
from tnsim.problems.tensors.positional import sequence_arrays
from tnsim.scaled import library

_HEAD_INDICES = {"Q1": "sax", "K1": "tax", "Q2": "say", "K2": "tay", VALUE: "tau"}


class Node(NamedTuple):
    """A tensor of a layer's network.

    Args:
        role: Role of the array in the layer.
        array: Entries, float64.
        indices: Indices of the axes; the output comes first, an input last.
    """

    role: str
    array: Float[np.ndarray, "*axes"]
    indices: tuple[str, ...]


def node_count(layer: Layer) -> int:
    """Number of tensors in the network of a layer: its affine maps, and a mask for attention.

    Example:
        >>> import tnsim
        >>> node_count(tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2)))
        3
    """
    core = core_of(layer)
    rows, _ = affine_maps(core)
    return len(rows) + 1 + isinstance(core, Attention)


def local_nodes(layer: Layer, n_ctx: int | None) -> tuple[Node, ...]:
    """The network of a layer.

    Args:
        layer: Any layer.
        n_ctx: Number of positions of the sequence; None for vectors, which attention does not read.

    Returns:
        Nodes without an input first, then the nodes that read `in0`, `in1`, ... in order.

    Raises:
        ModelError: Attention without `n_ctx`.

    Example:
        >>> import tnsim
        >>> nodes = local_nodes(tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2)), None)
        >>> [(node.role, node.indices) for node in nodes][:2]
        [('DOWN', ('out', 'hidden')), ('LEFT', ('hidden', 'in0'))]

    Source:
        Paper, section 2.1.
    """
    layer = jax.tree.map(lambda x: np.asarray(x, np.float64), layer)
    core = core_of(layer)
    if isinstance(core, Attention):
        if n_ctx is None:
            raise ModelError("attention reads sequences, but the model has no n_ctx")
        return _attention_nodes(core, sequence_arrays(layer, n_ctx), n_ctx)
    arrays = unrolled_arrays(layer if n_ctx is None else at_every_position(layer, n_ctx))
    if WEIGHT in arrays:
        return (Node(WEIGHT, arrays[WEIGHT], (OUT, input_index(0))),)
    legs = [role for role in arrays if role != DOWN]
    nodes = [Node(DOWN, arrays[DOWN], (OUT, "hidden"))]
    for n, role in enumerate(legs):
        nodes.append(Node(role, arrays[role], ("hidden", input_index(n))))
    return tuple(nodes)


def at_every_position(layer: Layer, n_ctx: int) -> Layer:
    """The layer on flattened sequences that applies the given layer at every position.

    Its weights are block-diagonal, a block for each position.

    Example:
        >>> import tnsim
        >>> at_every_position(tnsim.Linear([[2.0]]), n_ctx=2).weight
        array([[2., 0.],
               [0., 2.]])
    """
    if isinstance(layer, Residual):
        return Residual(at_every_position(layer.layer, n_ctx), layer.skip, layer.scale)
    leaves, structure = jax.tree.flatten(layer)
    return jax.tree.unflatten(structure, [_repeated_array(leaf, n_ctx) for leaf in leaves])


def _repeated_array(array: Array, n_ctx: int) -> Array:
    """A bias repeated for every position, or a matrix repeated as the blocks of a diagonal."""
    xp = library(array)
    if array.ndim == 1:
        return xp.tile(array, n_ctx)
    return xp.kron(xp.eye(n_ctx, dtype=array.dtype), array)


def stacked(legs: Sequence[Node]) -> tuple[Float[np.ndarray, "*axes"], tuple[str, ...]]:
    """The nodes of all input legs as a single array, so that a symmetriser may permute them.

    Every node is broadcast over the indices of all nodes.

    Returns:
        Array with the role as its first axis and the leg as its last axis, and the indices of the
        axes between.

    Example:
        >>> left = Node("LEFT", np.ones((2, 3)), ("hidden", "in0"))
        >>> right = Node("RIGHT", np.ones((2, 3)), ("hidden", "in1"))
        >>> array, indices = stacked([left, right])
        >>> array.shape, indices
        ((2, 2, 3), ('hidden',))
    """
    sizes: dict[str, int] = {}
    for node in legs:
        for index, size in zip(node.indices[:-1], node.array.shape, strict=False):
            sizes[index] = size
    order = list(sizes)
    arrays = []
    for node in legs:
        own = sorted(node.indices[:-1], key=order.index)
        axes = [node.indices.index(index) for index in own]
        ordered = node.array.transpose([*axes, -1])
        missing = tuple(n for n, index in enumerate(order) if index not in own)
        spread = np.expand_dims(ordered, missing)
        arrays.append(np.broadcast_to(spread, (*sizes.values(), spread.shape[-1])))
    return np.stack(arrays), tuple(order)


def _attention_nodes(core: Attention, arrays: dict[str, Any], n_ctx: int) -> tuple[Node, ...]:
    """The nodes of attention, with extra heads for the constant, the output bias and a skip.

    In an extra head every score is 1 and a position sees itself alone. The first extra head reads
    the constant on all legs and gives the constant row and the output bias. With a skip, each of
    the others reads a coordinate of the input on a single leg and the constant on the rest: 1/5 of
    the skip comes from each leg, so that the tensor treats legs alike (as in
    `lifted.unrolled_arrays` for two legs).

    Args:
        core: Attention inside the residuals.
        arrays: Arrays of the layer with its residuals, by role.
        n_ctx: Number of positions.
    """
    copies: list[tuple[str, int]] = []  # (leg that reads, coordinate) of each further head
    if SKIP in arrays:
        copies = [(role, i) for role in _HEAD_INDICES for i in range(core.d_in)]
    heads = core.n_heads + 1 + len(copies)
    output = _attention_output(core, arrays, n_ctx, copies)
    own = np.broadcast_to(arrays[MASK], (core.n_heads, n_ctx, n_ctx))
    mask = np.concatenate([own, [np.eye(n_ctx)] * (heads - core.n_heads)])
    nodes = [Node(OUTPUT, output, (OUT, "s", "a", "u")), Node(MASK, mask, ("a", "s", "t"))]
    for leg, (role, indices) in enumerate(_HEAD_INDICES.items()):
        array = _attention_leg(core, arrays, n_ctx, copies, role)
        nodes.append(Node(role, array, (*indices, input_index(leg))))
    return tuple(nodes)


def _attention_leg(
    core: Attention, arrays: dict[str, Any], n_ctx: int, copies: list[tuple[str, int]], role: str
) -> Float[np.ndarray, "position head row in"]:
    """Queries, keys or values of all heads, over flattened and lifted inputs."""
    heads = core.n_heads + 1 + len(copies)
    rows = arrays[role].shape[-2]
    every = np.arange(n_ctx)
    constant = np.zeros((n_ctx, heads, rows))
    # Axes (position of the leg, head, row, position of the input, coordinate); a leg reads its own
    # position only, so the blocks off the diagonal stay zero.
    body = np.zeros((n_ctx, heads, rows, n_ctx, core.d_in))
    constant[:, : core.n_heads] = arrays.get(bias_of(role), 0.0)
    constant[:, core.n_heads :, 0] = 1.0
    body[every, : core.n_heads, :, every] = arrays[role]
    for head, (reads, i) in enumerate(copies, core.n_heads + 1):
        if reads == role:
            constant[:, head, 0] = 0.0
            body[every, head, 0, every, i] = 1.0
    flat = body.reshape(n_ctx, heads, rows, -1)
    return np.concatenate([constant[..., None], flat], axis=-1)


def _attention_output(
    core: Attention, arrays: dict[str, Any], n_ctx: int, copies: list[tuple[str, int]]
) -> Float[np.ndarray, "out position head value"]:
    """The output matrix of all heads, over flattened and lifted outputs."""
    heads = core.n_heads + 1 + len(copies)
    every = np.arange(n_ctx)
    output = np.zeros((1 + n_ctx * core.d_out, n_ctx, heads, core.d_value))
    # The constant output is read off the first extra head at position 0.
    output[0, 0, core.n_heads, 0] = 1.0
    blocks = output[1:].reshape(n_ctx, core.d_out, n_ctx, heads, core.d_value)  # a view
    blocks[every, :, every, : core.n_heads] = arrays[OUTPUT]
    blocks[every, :, every, core.n_heads, 0] = arrays.get(bias_of(OUTPUT), 0.0)
    for head, (_, i) in enumerate(copies, core.n_heads + 1):
        blocks[every, i, every, head, 0] = arrays[SKIP] / core.order
    return output


def flat_kind(layer: Layer, n_ctx: int) -> LayerKind:
    """The kind of a layer over flattened sequences.

    Attention is given by its whole tensor, and so is always lifted.

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
        Arrays by role, as from `lifted.symmetric_arrays`; DENSE alone for attention.

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
        Tensor of float64, (1 + n_ctx * d_out, (1 + n_ctx * d_in) five times).

    Example:
        >>> import tnsim
        >>> one = np.ones((1, 1))
        >>> layer = tnsim.Attention(one, one, one, one, one, one, n_heads=1, rope_base=None)
        >>> dense(layer, n_ctx=1).shape
        (2, 2, 2, 2, 2, 2)
    """
    nodes = local_nodes(layer, n_ctx)
    # np.einsum takes numbers for indices, here numbered in the order of their occurrence.
    numbers: dict[str, int] = {}
    arguments: list[Any] = []
    for node in nodes:
        arguments += [node.array, [numbers.setdefault(i, len(numbers)) for i in node.indices]]
    output = [numbers[index] for index in (OUT, *map(input_index, range(5)))]
    return np.einsum(*arguments, output, optimize=True)
