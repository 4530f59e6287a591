"""Exact rational arithmetic for tiny models: polynomials and tensors without any rounding.

A float is a fraction, so a model of floats is a polynomial with fractional coefficients, and every
inner product is a fraction too. Nothing here knows of plans, features or differences.
"""

import itertools
import math
from fractions import Fraction

import jax
import numpy as np
from oracles import dense_layer, dense_tensor, symmetric_part

import tnsim
from tnsim.models.model import terms


def rational(array):
    """An array of floats, or of fractions, as an object array of fractions."""
    array = np.asarray(array)
    return np.array([Fraction(x) for x in array.ravel().tolist()], object).reshape(array.shape)


def exact(model):
    """A model, or a layer, whose numbers are fractions; `dense_tensor` of `oracles` is exact then."""
    return jax.tree.map(rational, model)


def layer_tensor(layer, symmetric=True):
    """The tensor of a layer over inputs (1, x) in fractions, its legs symmetrised or as the layer has them."""
    tensor = dense_layer(exact(layer))
    return symmetric_part(tensor) if symmetric else tensor


def tree_tensor(model):
    """The tensor of a model, every layer symmetrised, without the row of the constant."""
    return dense_tensor(exact(model), True)[1:]


def polynomial(model):
    """Coefficients by exponents of every output: what is left of the tensor when legs commute."""
    tensor = tree_tensor(model)
    d = model.d_in
    outputs = [{} for _ in tensor]
    for index in np.ndindex(*tensor.shape):
        exponents = tuple(index[1:].count(i) for i in range(1, d + 1))
        known = outputs[index[0]]
        known[exponents] = known.get(exponents, 0) + tensor[index]
    return outputs


def gaussian_product(a, b):
    """`E sum_k a_k(x) b_k(x)` for standard normal x."""
    total = Fraction(0)
    for one, two in zip(vector(a, polynomial), vector(b, polynomial), strict=True):
        for (p, x), (q, y) in itertools.product(one.items(), two.items()):
            powers = [i + j for i, j in zip(p, q, strict=True)]
            if all(power % 2 == 0 for power in powers):
                total += x * y * math.prod(math.prod(range(1, power, 2)) for power in powers)
    return total


def tree_product(a, b):
    """Entry against entry of the tensors symmetrised layer by layer."""
    return (vector(a, tree_tensor) * vector(b, tree_tensor)).sum()


def forward(model, x):
    """What a model computes of inputs (..., d_in), or of sequences (..., n_ctx, d_in), in fractions."""
    x = rational(x)
    for layer in model.layers:
        x = layer_forward(layer, x)
    return x


def layer_forward(layer, x):
    """A layer by its formula; `x` holds fractions."""
    if isinstance(layer, tnsim.Residual):
        return Fraction(layer.skip) * x + Fraction(layer.scale) * layer_forward(layer.layer, x)
    if isinstance(layer, tnsim.Linear):
        return _affine(x, layer.weight, layer.bias)
    if isinstance(layer, tnsim.Bilinear):
        left = _affine(x, layer.left, layer.left_bias)
        right = _affine(x, layer.right, layer.right_bias)
        return _affine(left * right, layer.down, layer.down_bias)
    if isinstance(layer, tnsim.Multilinear):
        legs = zip(layer.legs, layer.leg_biases, strict=True)
        return _affine(math.prod(_affine(x, *leg) for leg in legs), layer.down, layer.down_bias)
    return _attention(layer, x)


def _affine(x, weight, bias):
    found = x @ rational(weight).T
    return found if bias is None else found + rational(bias)


def _attention(layer, x):
    """Head by head; cosines and sines of the rotations are the floats that the formula rounds them to."""
    n_ctx, half = x.shape[-2], layer.d_head // 2

    def leg(name, head, width):
        rows = slice(head * width, (head + 1) * width)
        bias = getattr(layer, f"{name}_bias")
        y = _affine(x, getattr(layer, name)[rows], None if bias is None else bias[rows])
        if name == "v" or layer.rope_base is None:
            return y
        angles = np.arange(n_ctx)[:, None] * layer.rope_base ** (-2 * np.arange(half) / width)
        cos, sin = rational(np.cos(angles)), rational(np.sin(angles))
        first, second = y[..., :half], y[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    heads = []
    for head in range(layer.n_heads):
        q1, k1, q2, k2 = (leg(name, head, layer.d_head) for name in ("q1", "k1", "q2", "k2"))
        weights = (q1 @ k1.swapaxes(-1, -2)) * (q2 @ k2.swapaxes(-1, -2))
        if layer.mask == "causal":
            weights = weights * np.tril(np.ones((n_ctx, n_ctx), int))
        heads.append(weights @ leg("v", head, layer.d_value) / Fraction(layer.d_head) ** 2)
    return _affine(np.concatenate(heads, axis=-1), layer.o, layer.o_bias)


def vector(model, read):
    """A model or combination as `read` gives it: tensors add, and coefficients do."""
    weighted = [(Fraction(float(c)), read(part)) for c, part in terms(model)]
    if isinstance(weighted[0][1], np.ndarray):
        return sum(c * tensor for c, tensor in weighted)
    outputs = [{} for _ in weighted[0][1]]
    for c, values in weighted:
        for known, coefficients in zip(outputs, values, strict=True):
            for exponents, x in coefficients.items():
                known[exponents] = known.get(exponents, 0) + c * x
    return outputs


def cosine(a, b, product):
    """The cosine to 50 digits, as a fraction."""
    norms = product(a, a) * product(b, b)
    shift = 10**100
    root = Fraction(math.isqrt(norms.numerator * norms.denominator * shift**2), shift)
    return product(a, b) * norms.denominator / root


def cosine_of_sequences(a, b, mean, root):
    """The cosine of `a` and `b` over normal sequences; arguments as for `products_of_sequences`."""
    found = products_of_sequences(a, b, mean, root)
    known = dict(zip(((0, 1), (0, 0), (1, 1)), found, strict=True))
    return cosine(0, 1, lambda p, q: known[p, q])


def products_of_sequences(a, b, mean, root):
    """<a|b>, <a|a> and <b|b> of functions of sequences, over inputs of N(mean, root root^T).

    Args:
        a, b: From points (point, position, coordinate) in fractions to outputs, with their degree
            as `degree`: models as `Function`.
        mean: (positions, coordinates).
        root: (positions * coordinates, independent normal numbers).
    """
    nodes, weights = _interpolatory_rule(2 * max(a.degree, b.degree))
    count = root.shape[1]
    points = np.array(list(itertools.product(nodes, repeat=count)), object)
    weight = np.array([math.prod(w) for w in itertools.product(weights, repeat=count)], object)
    x = points @ rational(root).T + rational(mean).ravel()
    values = [f(x.reshape(len(x), *mean.shape)).reshape(len(x), -1) for f in (a, b)]
    return [
        ((values[i] * values[j]).sum(axis=1) * weight).sum() for i, j in ((0, 1), (0, 0), (1, 1))
    ]


def _interpolatory_rule(degree):
    """Integers and weights of which polynomials up to a degree have their moments of N(0, 1).

    A weight is the expectation of the Lagrange polynomial of its node.
    """
    nodes = [Fraction(k - degree // 2) for k in range(degree + 1)]
    moments = [0 if k % 2 else math.prod(range(1, k, 2)) for k in range(degree + 1)]
    weights = []
    for node in nodes:
        lagrange = [Fraction(1)]  # coefficients from the lowest power on
        for other in nodes:
            if other != node:
                shifted, constant = [Fraction(0), *lagrange], [*lagrange, Fraction(0)]
                lagrange = [
                    (s - other * c) / (node - other) for s, c in zip(shifted, constant, strict=True)
                ]
        weights.append(sum(c * m for c, m in zip(lagrange, moments, strict=True)))
    return nodes, weights


class Function:
    """A sum of coefficients times models, of vectors or of sequences, as a function in fractions."""

    def __init__(self, model):
        self.terms = [(Fraction(float(c)), part) for c, part in terms(model)]
        self.degree = max(part.degree for _, part in self.terms)

    def __call__(self, x):
        return sum(coefficient * forward(model, x) for coefficient, model in self.terms)
