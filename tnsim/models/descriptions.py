"""Layers in a line of text. In: a layer. Out: its kind, its shapes and what it adds."""

from __future__ import annotations

from typing import Any

from tnsim.models.attention import Attention
from tnsim.models.layers import Residual, affine_maps, bias_name
from tnsim.models.protocol import Layer


def describe(layer: Layer) -> str:
    """One line about a layer: kind, shapes, biases, residual rule.

    Example:
        >>> import tnsim
        >>> describe(tnsim.Linear([[1.0, 2.0]], [0.0]))
        'Linear(2 -> 1, bias)'
        >>> describe(tnsim.Multilinear([[[1.0]]] * 3, [[1.0]]))
        'Multilinear(1 -> 1, rank 1)'
    """
    if isinstance(layer, Residual):
        skip, scale = _number(layer.skip), _number(layer.scale)
        return f"Residual({describe(layer.layer)}, skip={skip}, scale={scale})"
    facts = [f"{layer.d_in} -> {layer.d_out}"]
    rows, output = affine_maps(layer)
    if isinstance(layer, Attention):
        facts.append(f"{layer.n_heads} heads of {layer.d_head}")
        facts.append(f"{layer.mask} mask")
        facts.append("no RoPE" if layer.rope_base is None else f"RoPE base {layer.rope_base:g}")
    elif rows:
        facts.append(f"rank {getattr(layer, rows[0]).shape[-2]}")
    biases = map(bias_name, (*rows, output))
    facts += [bias for bias in biases if getattr(layer, bias) is not None]
    return f"{type(layer).__name__}({', '.join(facts)})"


def _number(x: Any) -> str:
    return f"{x:g}" if isinstance(x, float) else "array"
