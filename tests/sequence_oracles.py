"""Attention layers of random weights, and products of their dense tensors layer over layer (NumPy only)."""

import numpy as np
from oracles import dense_layer, symmetric_part

import tnsim


def attention(rng, d_in, heads, d_head, d_value, d_out, biases=False, **options):
    sizes = [(heads * d_head, d_in)] * 4 + [(heads * d_value, d_in), (d_out, heads * d_value)]
    weights = [rng.normal(size=s) for s in sizes]
    found = [rng.normal(size=s[0]) for s in sizes] if biases else [None] * 6
    return tnsim.Attention(*weights, heads, *found, **{"rope_base": 10.0, **options})


def linear_attention(rng, d_in, heads, d_head, d_value, d_out, biases=False, **options):
    """A layer of a single score, as files have it."""
    names = {role: role for role in ("q1", "k1", "v", "o")}
    sizes = [(heads * d_head, d_in)] * 2 + [(heads * d_value, d_in), (d_out, heads * d_value)]
    state = {name: rng.normal(size=size) for name, size in zip(names, sizes, strict=True)}
    if biases:
        names |= {f"{role}_bias": f"{role}_bias" for role in names}
        state |= {f"{name}_bias": rng.normal(size=len(rows)) for name, rows in state.items()}
    rule = tnsim.dialects.AttentionRule(
        **names, **{"scores": 1, "score_power": 0.5, "n_heads": heads} | options
    )
    return tnsim.from_state_dict(state, tnsim.Dialect("linear attention", (rule,))).layers[0]


def dense_tree_product(a, b, symmetrised):
    """Layer over layer with dense lifted tensors: per output, <A|B> with or without each layer's legs symmetrised."""
    moment = np.eye(a.n_ctx * a.d_in + 1)
    for p, q in zip(a.layers, b.layers, strict=True):
        one, two = (dense_layer(layer, a.n_ctx) for layer in (p, q))
        order = two.ndim - 1
        two = symmetric_part(two) if symmetrised else two
        for _ in range(order):
            two = np.tensordot(two, moment, axes=[[1], [1]])
        moment = np.tensordot(one, two, axes=[list(range(1, order + 1))] * 2)
    return np.diag(moment)[1:].reshape(a.n_ctx, -1).sum(axis=0)
