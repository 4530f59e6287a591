"""Layers of sequence models as named arrays. In: a layer and n_ctx. Out: its kind, shapes and arrays.

A sequence model is not lifted: its biases stay vectors beside the matrices, because the constant is one and the
same at every position and a lifted coordinate per position would multiply it out. What a residual adds is the
scalar SKIP; its scale is multiplied into DOWN and O, the 1 / d_head of each score into Q1 and Q2, and the
rotation of a position into the query and key arrays, which then have a position axis.

    Linear      WEIGHT[k, i]                                                    WEIGHT_BIAS[k]
    Bilinear    DOWN[k, h] LEFT[h, i] RIGHT[h, i]                               LEFT_BIAS[h] RIGHT_BIAS[h] DOWN_BIAS[k]
    Attention   O[k, a, u] V[a, u, i] MASK[s, t] and, for c = 1, 2,             V_BIAS[a, u] O_BIAS[k]
                Qc[s, a, x, i] Kc[t, a, x, i], or Qc[a, x, i] without RoPE      Qc_BIAS[s, a, x] and so on
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.models.attention import Attention
from tnsim.models.layers import (
    Layer,
    affine_maps,
    bias_name,
    innermost,
    residual_rule,
)
from tnsim.names import MASK, OUTPUT, SCORES, SKIP, VALUE, WEIGHT, bias_of
from tnsim.tensors.kinds import LayerKind

_TURNED = tuple(role for score in SCORES for role in score)


def sequence_shapes(kind: LayerKind, n_ctx: int) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `sequence_arrays` returns for a layer of this kind."""
    if kind.mixes_positions:
        shapes = _attention_shapes(kind, n_ctx)
    elif kind.down is None:
        shapes = {WEIGHT: (kind.d_out, kind.d_in)}
    else:
        shapes = {role: (kind.rank, kind.d_in) for role in kind.legs}
        shapes[kind.down] = (kind.d_out, kind.rank)
    for role in kind.biases:
        shape = shapes[role]
        shapes[bias_of(role)] = shape[:1] if role == kind.down else shape[:-1]
    if kind.skips:
        shapes[SKIP] = ()
    return shapes


def _attention_shapes(kind: LayerKind, n_ctx: int) -> dict[str, tuple[int, ...]]:
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
    """Role -> array; NumPy, or JAX where a weight is."""
    xp = jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer)) else np
    core = innermost(layer)
    rows, output = affine_maps(core)
    skip, scale = residual_rule(layer)
    roles: dict[str, Any] = {}
    for name in (*rows, output):
        roles[name.upper()] = getattr(core, name)
        bias = getattr(core, bias_name(name))
        if bias is not None:
            roles[bias_of(name.upper())] = bias
    last = output.upper()
    for role in (last, bias_of(last)):
        if role in roles:
            roles[role] = scale * roles[role]
    if not rows:
        if core is not layer:
            roles[WEIGHT] = roles[WEIGHT] + skip * xp.eye(core.d_in, dtype=core.weight.dtype)
        return roles
    if isinstance(core, Attention):
        roles = _by_head(core, roles, n_ctx, xp)
    if core is not layer:
        roles[SKIP] = xp.asarray(skip, getattr(core, output).dtype)
    return roles


def _by_head(core: Attention, roles: dict[str, Any], n_ctx: int, xp: Any) -> dict[str, Any]:
    """The arrays of attention with an axis of heads; queries divided by the width, queries and keys turned."""
    by_head = {MASK: core.pattern(n_ctx)}
    rotations = core.rotations(n_ctx)
    for role, array in roles.items():
        if role == OUTPUT:
            by_head[role] = array.reshape(core.d_out, core.n_heads, core.d_value)
            continue
        if role == bias_of(OUTPUT):
            by_head[role] = array
            continue
        array = array.reshape(core.n_heads, -1, *array.shape[1:])
        if role.startswith("Q"):
            array = 1 / core.d_head * array
        if rotations is not None and role not in (VALUE, bias_of(VALUE)):
            array = _turned(array, rotations, xp)
        by_head[role] = array
    return by_head


def _turned(array: Any, rotations: Any, xp: Any) -> Any:
    """The rows of every head, (heads, d_head, ...), turned for every position, (n_ctx, heads, d_head, ...)."""
    # NumPy turns float32 weights in float64.
    turns = rotations if xp is np else xp.asarray(rotations, array.dtype)
    if array.ndim == 3:
        return turns[:, None] @ array
    return (turns[:, None] @ array[..., None])[..., 0]
