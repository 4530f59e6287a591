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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.models.layers import Attention, Bilinear, Layer, Linear, innermost
from tnsim.names import DOWN, LEFT, MASK, OUTPUT, RIGHT, SCORES, SKIP, VALUE, WEIGHT, bias_of
from tnsim.tensors.lifted import residual_rule

_TURNED = tuple(role for score in SCORES for role in score)
_LEGS = {"Linear": (WEIGHT,), "Bilinear": (LEFT, RIGHT), "Attention": (*_TURNED, VALUE)}
_DOWN = {"Linear": None, "Bilinear": DOWN, "Attention": OUTPUT}


class SequenceKind(NamedTuple):
    """The shape of a layer without its numbers; `biases` names the roles that have one, `heads` is (n_heads, d_head, d_value)."""

    name: str
    d_in: int
    d_out: int
    rank: int
    heads: tuple[int, int, int]
    rotary: bool
    causal: bool
    biases: tuple[str, ...]
    skips: bool

    @property
    def legs(self) -> tuple[str, ...]:
        """Roles of the arrays through which the layer reads its input; it is linear in each."""
        return _LEGS[self.name]

    @property
    def down(self) -> str | None:
        """Role of the array that maps the product of the legs to the output.

        None where there is one leg, which is the output.
        """
        return _DOWN[self.name]

    @property
    def order(self) -> int:
        """Degree of the output in the input."""
        return len(self.legs)

    @property
    def mixes_positions(self) -> bool:
        """Whether an output depends on the input at other positions: scores, values and heads."""
        return self.name == "Attention"

    def turns(self, role: str) -> bool:
        """Whether the array of a leg depends on the position, as RoPE makes queries and keys do."""
        return self.rotary and role in _TURNED


def sequence_kind(layer: Layer) -> SequenceKind:
    core = innermost(layer)
    skips = core is not layer and not isinstance(
        core, Linear
    )  # a skip around a linear layer is added to its matrix
    biases = tuple(role for role, name in _biases(core).items() if getattr(core, name) is not None)
    attends = isinstance(core, Attention)
    return SequenceKind(
        type(core).__name__,
        core.d_in,
        core.d_out,
        core.rank if isinstance(core, Bilinear) else 0,
        (core.n_heads, core.d_head, core.d_value) if attends else (0, 0, 0),
        attends and core.rope_base is not None,
        attends and core.mask == "causal",
        biases,
        skips,
    )


def sequence_shapes(kind: SequenceKind, n_ctx: int) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `sequence_arrays` returns for a layer of this kind."""
    found: dict[str, tuple[int, ...]] = {}
    if kind.name == "Linear":
        found = {WEIGHT: (kind.d_out, kind.d_in)}
    elif kind.name == "Bilinear":
        found = {
            LEFT: (kind.rank, kind.d_in),
            RIGHT: (kind.rank, kind.d_in),
            DOWN: (kind.d_out, kind.rank),
        }
    else:
        heads, d_head, d_value = kind.heads
        position = (n_ctx,) if kind.rotary else ()
        found = {role: (*position, heads, d_head, kind.d_in) for role in _TURNED}
        found |= {
            VALUE: (heads, d_value, kind.d_in),
            OUTPUT: (kind.d_out, heads, d_value),
            MASK: (n_ctx, n_ctx),
        }
    top = (DOWN, OUTPUT)
    found |= {
        bias_of(role): found[role][:1] if role in top else found[role][:-1] for role in kind.biases
    }
    return found | ({SKIP: ()} if kind.skips else {})


def sequence_arrays(layer: Layer, n_ctx: int) -> dict[str, Any]:
    """Role -> array; NumPy, or JAX where a weight is."""
    xp = jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer)) else np
    core = innermost(layer)
    skip, scale = residual_rule(layer)
    biases = {
        bias_of(role): getattr(core, name)
        for role, name in _biases(core).items()
        if getattr(core, name) is not None
    }
    if isinstance(core, Linear):
        weight = scale * core.weight + (
            0 if core is layer else skip * xp.eye(core.d_in, dtype=core.weight.dtype)
        )
        return {WEIGHT: weight} | {name: scale * bias for name, bias in biases.items()}
    found: dict[str, Any]
    if isinstance(core, Bilinear):
        found = {LEFT: core.left, RIGHT: core.right, DOWN: scale * core.down, **biases}
    else:
        heads = core.n_heads
        found = {
            VALUE: core.v.reshape(heads, -1, core.d_in),
            OUTPUT: scale * core.o.reshape(core.d_out, heads, -1),
        }
        found[MASK] = core.pattern(n_ctx)
        rotations = core.rotations(n_ctx)
        for role in _TURNED:
            factor = 1 / core.d_head if role.startswith("Q") else 1.0
            for name, array in (
                (role, getattr(core, role.lower())),
                (bias_of(role), biases.get(bias_of(role))),
            ):
                if array is None:
                    continue
                array = factor * array.reshape(heads, core.d_head, -1)
                if rotations is not None:
                    turns = (
                        rotations if xp is np else xp.asarray(rotations, array.dtype)
                    )  # NumPy turns float32 weights in float64
                    array = turns[:, None] @ array
                found[name] = array[..., 0] if name != role else array
        if bias_of(VALUE) in biases:
            found[bias_of(VALUE)] = biases[bias_of(VALUE)].reshape(heads, -1)
        if bias_of(OUTPUT) in biases:
            found[bias_of(OUTPUT)] = biases[bias_of(OUTPUT)]
    for name in (bias_of(DOWN), bias_of(OUTPUT)):
        if name in found:
            found[name] = scale * found[name]
    return found | (
        {SKIP: xp.asarray(skip, core.v.dtype if isinstance(core, Attention) else core.down.dtype)}
        if core is not layer
        else {}
    )


def _biases(core: Linear | Bilinear | Attention) -> dict[str, str]:
    """Role -> name of its bias in the layer."""
    if isinstance(core, Linear):
        return {WEIGHT: "bias"}
    if isinstance(core, Bilinear):
        return {LEFT: "left_bias", RIGHT: "right_bias", DOWN: "down_bias"}
    return {role: f"{role.lower()}_bias" for role in (*_TURNED, VALUE, OUTPUT)}
