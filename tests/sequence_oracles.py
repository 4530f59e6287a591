"""Slow, plain oracles for models of sequences: forward passes at quadrature points, dense layer tensors (NumPy only)."""

import itertools
import math

import numpy as np
from oracles import number_type, quadrature

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


def plain_attention(layer, x):
    """The formula of the layer with loops over heads and positions; x: (n_ctx, d)."""
    n, half = len(x), layer.d_head // 2
    z = np.zeros((n, layer.n_heads * layer.d_value))

    def leg(name, s, head, turned):
        size = layer.d_head if turned else layer.d_value
        rows = slice(head * size, (head + 1) * size)
        bias = getattr(layer, f"{name}_bias")
        y = getattr(layer, name)[rows] @ x[s] + (0 if bias is None else bias[rows])
        if not turned or layer.rope_base is None:
            return y
        angle = s * layer.rope_base ** (-2 * np.arange(half) / layer.d_head)
        a, b = y[:half], y[half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        )

    for head, s in itertools.product(range(layer.n_heads), range(n)):
        for t in range(s + 1 if layer.mask == "causal" else n):
            scores = [leg(f"q{c}", s, head, True) @ leg(f"k{c}", t, head, True) for c in (1, 2)]
            weight = scores[0] * scores[1] / layer.d_head**2
            z[s, head * layer.d_value : (head + 1) * layer.d_value] += weight * leg(
                "v", t, head, False
            )
    return z @ layer.o.T + (0 if layer.o_bias is None else layer.o_bias)


def sequence_moments(metric, n, d):
    """Mean and covariance over all n * d coordinates, from the shapes a user may give."""
    mean = np.zeros(n * d) if metric.mean is None else np.asarray(metric.mean)
    mean = np.tile(mean, n) if mean.shape == (d,) and n > 1 else mean.reshape(n * d)
    cov = np.eye(n * d) if metric.cov is None else np.asarray(metric.cov)
    cov = np.diag(cov) if cov.ndim == 1 else cov
    return mean, np.kron(np.eye(n), cov) if len(cov) == d else cov


def sequence_products(a, b, metric):
    """E sum_s a[s, k] b[s, k] per output k, from forward passes at quadrature points."""
    points, weights = quadrature(
        (a.degree + b.degree) // 2 + 1, *sequence_moments(metric, a.n_ctx, a.d_in)
    )
    x = points.reshape(-1, a.n_ctx, a.d_in)
    return np.einsum("p,psk->k", weights, a(x) * b(x))


def sequence_closure(a, b, metric):
    """The closure by brute force: the joint Gaussian of both states over all positions, moments by quadrature."""
    n = a.n_ctx
    mean, cov = sequence_moments(metric, n, a.d_in)
    mean, cov = np.concatenate([mean, mean]), np.block([[cov, cov], [cov, cov]])
    for p, q in zip(a.layers, b.layers, strict=True):
        x, w = quadrature(max(p.order, q.order) + 1, mean, cov)
        half = n * p.d_in
        out = [
            layer(part.reshape(-1, n, layer.d_in)).reshape(len(x), -1)
            for layer, part in ((p, x[:, :half]), (q, x[:, half:]))
        ]
        out = np.concatenate(out, axis=1)
        mean = w @ out
        second = (w[:, None] * out).T @ out
        cov = second - np.outer(mean, mean)
    width = n * a.d_out
    return np.diag(second[:width, width:]).reshape(n, -1).sum(axis=0)


def _rotation(layer, s):
    """R_s plane by plane, as the docstring of `Attention` has it; the identity without RoPE."""
    turn, half = np.eye(layer.d_head), layer.d_head // 2
    if layer.rope_base is None:
        return turn
    for i in range(half):
        angle = s * layer.rope_base ** (-2 * i / layer.d_head)
        turn[i, i] = turn[half + i, half + i] = np.cos(angle)
        turn[half + i, i], turn[i, half + i] = np.sin(angle), -np.sin(angle)
    return turn


def dense_sequence_layer(layer, n):
    """The lifted tensor of a layer over (1, x_00, x_01, ...) with all positions flattened; legs in the order q1, k1, q2, k2, v."""
    if isinstance(layer, tnsim.Residual):
        tensor = layer.scale * dense_sequence_layer(layer.layer, n)
        order, size = tensor.ndim - 1, n * layer.d_in + 1
        eye = np.eye(size)
        for leg in range(order):
            legs = [eye if m == leg else eye[0] for m in range(order)]
            letters = "abcde"[:order]
            terms = ",".join("k" + c if m == leg else c for m, c in enumerate(letters))
            tensor[1:] += layer.skip / order * np.einsum(f"{terms}->k{letters}", *legs)[1:]
        tensor[(0,) * tensor.ndim] = 1.0
        return tensor
    if not isinstance(layer, tnsim.Attention):
        names = {1: ("weight",), 2: ("left", "right")}[layer.order]
        shape = (n * layer.d_out + 1, *(n * layer.d_in + 1,) * layer.order)
        tensor = np.zeros(shape, number_type(layer))
        for s in range(n):
            legs = [
                _leg(
                    getattr(layer, m),
                    getattr(layer, "bias" if m == "weight" else f"{m}_bias"),
                    s,
                    n,
                )
                for m in names
            ]
            rows = slice(1 + s * layer.d_out, 1 + (s + 1) * layer.d_out)
            if layer.order == 1:
                tensor[rows] += legs[0]
            else:
                tensor[rows] += np.einsum("kh,hi,hj->kij", layer.down, *legs)
                tensor[rows, 0, 0] += 0 if layer.down_bias is None else layer.down_bias
        tensor[(0,) * tensor.ndim] = 1.0
        return tensor
    tensor = np.zeros((n * layer.d_out + 1, *(n * layer.d_in + 1,) * 5), number_type(layer))
    for s, t, head in itertools.product(range(n), range(n), range(layer.n_heads)):
        if layer.mask == "causal" and t > s:
            continue
        legs = []
        for name, at, size in (("q1", s, 0), ("k1", t, 0), ("q2", s, 0), ("k2", t, 0), ("v", t, 1)):
            width = layer.d_value if size else layer.d_head
            leg = _leg(getattr(layer, name), getattr(layer, f"{name}_bias"), at, n)[
                head * width : (head + 1) * width
            ]
            legs.append(leg if size else _rotation(layer, at) @ leg)
        part = np.einsum(
            "ku,xa,xb,yc,yd,ue->kabcde",
            layer.o[:, head * layer.d_value : (head + 1) * layer.d_value],
            *legs,
            optimize=True,
        )
        tensor[1 + s * layer.d_out : 1 + (s + 1) * layer.d_out] += part / layer.d_head**2
    for s in range(n):
        tensor[1 + s * layer.d_out : 1 + (s + 1) * layer.d_out, 0, 0, 0, 0, 0] += (
            0 if layer.o_bias is None else layer.o_bias
        )
    tensor[(0,) * 6] = 1.0
    return tensor


def dense_tree_product(a, b, symmetrised):
    """Layer over layer with dense lifted tensors: per output, <A|B> with or without each layer's legs symmetrised."""
    moment = np.eye(a.n_ctx * a.d_in + 1)
    for p, q in zip(a.layers, b.layers, strict=True):
        one, two = (dense_sequence_layer(layer, a.n_ctx) for layer in (p, q))
        order = two.ndim - 1
        if symmetrised:
            two = sum(
                two.transpose(0, *(1 + i for i in legs))
                for legs in itertools.permutations(range(order))
            ) / math.factorial(order)
        for _ in range(order):
            two = np.tensordot(two, moment, axes=[[1], [1]])
        moment = np.tensordot(one, two, axes=[list(range(1, order + 1))] * 2)
    return np.diag(moment)[1:].reshape(a.n_ctx, -1).sum(axis=0)


def _leg(weight, bias, position, n):
    """(rows, 1 + n * d): the bias on the constant, the weight on the coordinates of one position."""
    rows, d = weight.shape
    leg = np.zeros((rows, 1 + n * d), np.result_type(weight, np.float64 if bias is None else bias))
    leg[:, 0] = 0 if bias is None else bias
    leg[:, 1 + position * d : 1 + (position + 1) * d] = weight
    return leg
