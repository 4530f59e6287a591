"""Components by hand: forward passes that add up components one by one, on copies of layers with other columns zero.

Nothing here is shared with `tnsim.models.components`. Switches may be complex: an imaginary part of 1e-100 is a
derivative, exact to rounding.
"""

import dataclasses
import itertools
import math

import numpy as np
from oracles import bilinear, linear, multilinear
from sequence_oracles import attention

import tnsim

OUTPUTS = {
    "Attention": "o",
    "Bilinear": "down",
    "Multilinear": "down",
    "Linear": "weight",
    "Gated": "down",
}


def core_of(layer):
    """The layer inside residuals with the weights of stream and layer."""
    skip, scale = 0.0, 1.0
    while isinstance(layer, tnsim.Residual):
        skip, scale, layer = skip + scale * layer.skip, scale * layer.scale, layer.layer
    return layer, skip, scale


def columns(core, by):
    """Column ranges of the components of a layer, and whether the bias is one of them."""
    width = getattr(core, OUTPUTS[type(core).__name__]).shape[1]
    kind = type(core).__name__
    count = core.n_heads if kind == "Attention" else width
    if by == "layer" or (by == "head" and kind != "Attention") or kind == "Linear":
        return [range(width)], True
    step = width // count
    return [range(k * step, (k + 1) * step) for k in range(count)], False


def functions(layer, by):
    """The components of a layer as functions of its input; a bias of its own comes last."""
    core, _, scale = core_of(layer)
    output = OUTPUTS[type(core).__name__]
    bias_name = "bias" if output == "weight" else f"{output}_bias"
    bias = getattr(core, bias_name)
    ranges, whole = columns(core, by)
    found = []
    for chosen in ranges:
        weight = np.zeros_like(getattr(core, output))
        weight[:, list(chosen)] = getattr(core, output)[:, list(chosen)]
        if isinstance(core, tnsim.Multilinear):
            part = tnsim.Multilinear(core.legs, weight, core.leg_biases, bias if whole else None)
        else:
            part = dataclasses.replace(core, **{output: weight, bias_name: bias if whole else None})
        found.append(lambda x, part=part: scale * part(x))
    if not whole and bias is not None:
        found.append(lambda x: scale * bias + np.zeros((*x.shape[:-1], 1), x.dtype))
    return found


def has_components(layer, ends=False):
    return ends or not isinstance(layer, tnsim.Linear)


def switched_outputs(model, x, z, by="layer"):
    """The outputs of a model with component n times z[n]."""
    z = list(z)
    for layer in model.layers:
        if not has_components(layer):
            x = layer(x)
            continue
        _, skip, _ = core_of(layer)
        added = sum(z.pop(0) * f(x) for f in functions(layer, by))
        x = added + skip * x if skip else added
    assert not z
    return x


def mixed_outputs(a, b, x, s, by="layer", ends=False):
    """The outputs with component functions (1 - s) F^a + s F^b; layers without components are those of b."""
    s = list(s)
    for first, second in zip(a.layers, b.layers, strict=True):
        if not has_components(second, ends):
            x = second(x)
            continue
        _, skip, _ = core_of(second)
        total = skip * x if skip else 0
        for f, g in itertools.zip_longest(functions(first, by), functions(second, by)):
            t = s.pop(0)
            total = total + (0 if f is None else (1 - t) * f(x)) + (0 if g is None else t * g(x))
        x = total
    assert not s
    return x


def parts_of_change(a, b, x, players, by="layer", ends=False, nodes=40):
    """delta_c at points: derivatives by complex steps, integrated over the diagonal."""
    t, w = np.polynomial.legendre.leggauss(nodes)
    step, found = 1e-100, []
    for c in range(players):
        total = 0
        for node, weight in zip((t + 1) / 2, w / 2, strict=True):
            s = np.full(players, node, complex)
            s[c] += 1j * step
            outputs = mixed_outputs(a, b, x.astype(complex), s, by, ends)
            total = total + weight * outputs.imag / step
        found.append(total)
    return np.stack(found)


def path_outputs(model, x, players, by="layer"):
    """h_S at points for all sets S, by inclusion and exclusion over all of their subsets."""
    sets = list(itertools.product((0, 1), repeat=players))
    values = {own: switched_outputs(model, x, np.array(own, float), by) for own in sets}
    return {
        own: sum(
            (-1.0) ** (sum(own) - sum(sub)) * values[sub]
            for sub in itertools.product(*[(0, 1) if one else (0,) for one in own])
        )
        for own in sets
    }


def shapley_parts(values, players):
    """Shapley values from the outputs at all corners, by finite sums over all subsets."""
    found = []
    for c in range(players):
        total = 0
        for own in itertools.product((0, 1), repeat=players):
            if own[c]:
                continue
            weight = 1 / (players * math.comb(players - 1, sum(own)))
            with_c = tuple(1 if n == c else one for n, one in enumerate(own))
            total = total + weight * (values[with_c] - values[own])
        found.append(total)
    return np.stack(found)


def mlp(g, d, rank, skip=1.0, scale=0.6, biases=True):
    return tnsim.Residual(bilinear(g, d, rank, d, biases), skip, scale)


def attending(g, d, heads, biases=True, **options):
    return tnsim.Residual(attention(g, d, heads, 2, 2, d, biases, **options), 0.9, 0.3)


def cubic(g, d, rank):
    return tnsim.Residual(multilinear(g, 3, d, rank, d, True), 0.5)


# name -> (rng -> model), its length, and the granularities that are told apart
STACKS = {
    "mlp": (lambda g: [linear(g, 3, 4), mlp(g, 4, 3), mlp(g, 4, 2, 0.7), linear(g, 4, 2)], None),
    "no skip": (lambda g: [bilinear(g, 3, 3, 4, True), bilinear(g, 4, 2, 2)], None),
    "nested": (
        lambda g: [tnsim.Residual(mlp(g, 3, 2), 0.5, 0.8), tnsim.Residual(linear(g, 3, 3, True))],
        None,
    ),
    "cubic": (lambda g: [linear(g, 2, 3, True), cubic(g, 3, 2), linear(g, 3, 2, True)], None),
    "attention": (
        lambda g: [
            linear(g, 3, 4),
            attending(g, 4, 2),
            attending(g, 4, 2, False, mask="none", rope_base=None),
            linear(g, 4, 2),
        ],
        3,
    ),
    "mixed": (lambda g: [attending(g, 3, 2, False), mlp(g, 3, 2), linear(g, 3, 2, True)], 3),
}


def stack(name, rng):
    make, n_ctx = STACKS[name]
    return tnsim.Model(make(rng), n_ctx=n_ctx)


def pair(name, rng):
    return stack(name, rng), stack(name, rng)


def points(model, rng, count=5):
    """Inputs of a model."""
    shape = (count, model.d_in) if model.n_ctx is None else (count, model.n_ctx, model.d_in)
    return rng.normal(size=shape)
