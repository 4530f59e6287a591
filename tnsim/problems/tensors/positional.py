"""Layers of sequence models as named arrays, with their shapes.

A sequence model is not lifted: its biases stay vectors next to the matrices, because the constant
is the same at every position and a lifted coordinate per position would multiply it out. The skip
of a residual is the scalar SKIP; its scale is multiplied into DOWN and O, the 1 / d_head of each
score into Q1 and Q2, and the rotation of a position into the query and key arrays, which then have
a position axis.

    Linear      WEIGHT[k, i]
                WEIGHT_BIAS[k]
    Bilinear    DOWN[k, h] LEFT[h, i] RIGHT[h, i]
                LEFT_BIAS[h] RIGHT_BIAS[h] DOWN_BIAS[k]
    Attention   O[k, a, u] V[a, u, i] MASK[s, t]
                Qc[s, a, x, i] Kc[t, a, x, i] for c = 1, 2; Qc[a, x, i] and so on without RoPE
                V_BIAS[a, u] O_BIAS[k] Qc_BIAS[s, a, x] Kc_BIAS[t, a, x]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tnsim.models.arrays import in_float64
from tnsim.models.attention import Attention
from tnsim.models.layers import Residual, affine_maps, residual_rule
from tnsim.models.matrices import bias_name, written_out
from tnsim.models.protocol import Layer
from tnsim.names import MASK, OUTPUT, SCORES, SKIP, VALUE, WEIGHT, bias_of
from tnsim.problems.tensors.kinds import LayerKind, core_of
from tnsim.scaled import library

_TURNED = tuple(role for score in SCORES for role in score)


def sequence_shapes(kind: LayerKind, n_ctx: int) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `sequence_arrays` returns for a layer of this kind.

    Example:
        >>> kind = LayerKind("Linear", ("WEIGHT",), None, d_in=2, d_out=3, biases=("WEIGHT",))
        >>> sequence_shapes(kind, n_ctx=4)
        {'WEIGHT': (3, 2), 'WEIGHT_BIAS': (3,)}
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if kind.mixes_positions:
        shapes = _attention_shapes(kind, n_ctx)
    elif kind.down is None:
        shapes[WEIGHT] = (kind.d_out, kind.d_in)
    else:
        shapes[kind.down] = (kind.d_out, kind.rank)
        for role in kind.legs:
            shapes[role] = (kind.rank, kind.d_in)
    for role in kind.biases:
        shape = shapes[role]
        shapes[bias_of(role)] = shape[:1] if role == kind.down else shape[:-1]
    if kind.skips:
        shapes[SKIP] = ()
    return shapes


def _attention_shapes(kind: LayerKind, n_ctx: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of attention, without biases."""
    heads, d_head, d_value = kind.heads
    position = (n_ctx,) if kind.rotary else ()
    shapes: dict[str, tuple[int, ...]] = {}
    for role in _TURNED:
        shapes[role] = (*position, heads, d_head, kind.d_in)
    shapes[VALUE] = (heads, d_value, kind.d_in)
    shapes[OUTPUT] = (kind.d_out, heads, d_value)
    shapes[MASK] = (n_ctx, n_ctx)
    return shapes


def sequence_arrays(layer: Layer, n_ctx: int) -> dict[str, Any]:
    """The arrays of a layer, as the head of this module lists them.

    Args:
        layer: Any layer.
        n_ctx: Number of positions of the sequence.

    Returns:
        Arrays by role; NumPy, or JAX where a weight is.

    Example:
        >>> import tnsim
        >>> list(sequence_arrays(tnsim.Linear([[2.0]], [3.0]), n_ctx=4))
        ['WEIGHT', 'WEIGHT_BIAS']

    Source:
        Paper, section 2.1.
    """
    layer = in_float64(written_out(layer))
    xp = library(layer)
    core = core_of(layer)
    rows, output = affine_maps(core)
    skip, scale = residual_rule(layer)
    roles: dict[str, Any] = {}
    for name in (*rows, output):
        roles[name.upper()] = getattr(core, name)
        bias = getattr(core, bias_name(name))
        if bias is not None:
            roles[bias_of(name.upper())] = bias
    last = output.upper()
    if isinstance(layer, Residual):  # the scale multiplies the output matrix and its bias
        for role in {last, bias_of(last)} & roles.keys():
            roles[role] = scale * roles[role]
    if isinstance(core, Attention):
        roles = _by_head(core, roles, n_ctx, xp)
    if not isinstance(layer, Residual):
        return roles
    dtype = getattr(core, output).dtype
    if rows:
        roles[SKIP] = xp.asarray(skip, dtype)
    else:  # around a linear layer the skip is part of the matrix
        roles[WEIGHT] = roles[WEIGHT] + skip * xp.eye(core.d_in, dtype=dtype)
    return roles


def _by_head(core: Attention, roles: dict[str, Any], n_ctx: int, xp: Any) -> dict[str, Any]:
    """The arrays of attention with an axis of heads.

    Queries are divided by the width of a head. Rows of queries and keys, and their biases, are
    rotated for every position, which becomes the first axis.
    """
    by_head: dict[str, Any] = {MASK: core.pattern(n_ctx)}
    rotations = core.rotations(n_ctx)
    for role, array in roles.items():
        if role == bias_of(OUTPUT):
            by_head[role] = array
            continue
        if role == OUTPUT:
            by_head[role] = array.reshape(core.d_out, core.n_heads, core.d_value)
            continue
        array = array.reshape(core.n_heads, -1, *array.shape[1:])
        if role.startswith("Q"):
            array = 1 / core.d_head * array
        if rotations is not None and role not in (VALUE, bias_of(VALUE)):
            # In NumPy, float32 weights are rotated in float64.
            turns = rotations if xp is np else xp.asarray(rotations, array.dtype)
            is_bias = array.ndim == 2
            array = turns[:, None] @ (array[..., None] if is_bias else array)
            array = array[..., 0] if is_bias else array
        by_head[role] = array
    return by_head
