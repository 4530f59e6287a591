"""Random models, and slow, plain oracles that share no code with what they check (NumPy only)."""

import itertools
import math

import numpy as np

import tnsim


def bilinear(rng, d_in, rank, d_out, biases=False):
    shapes = [(rank, d_in), (rank, d_in), (d_out, rank)] + [(rank,), (rank,), (d_out,)] * biases
    return tnsim.Bilinear(*(rng.normal(size=s) for s in shapes))


def linear(rng, d_in, d_out, bias=False):
    return tnsim.Linear(rng.normal(size=(d_out, d_in)), rng.normal(size=d_out) if bias else None)


def random_gaussian(rng, d):
    factor = rng.normal(size=(d, d))
    return rng.normal(size=d), factor @ factor.T + 0.5 * np.eye(d)


def quadrature(nodes, mean, cov):
    """Gauss-Hermite points and weights for N(mean, cov); n nodes a coordinate are exact to degree 2n - 1."""
    d = len(mean)
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    points = np.array(list(itertools.product(x, repeat=d)))
    weights = np.prod(np.array(list(itertools.product(w / w.sum(), repeat=d))), axis=1)
    values, vectors = np.linalg.eigh(cov)
    return points @ (vectors * np.sqrt(np.clip(values, 0, None))).T + mean, weights


def moments_of(metric, d):
    mean = np.zeros(d) if metric.mean is None else np.asarray(metric.mean)
    cov = np.eye(d) if metric.cov is None else np.asarray(metric.cov)
    return mean, np.diag(cov) if cov.ndim == 1 else cov


def expected_products(a, b, metric):
    """E[a_k(x) b_k(x)] per output, from forward passes at quadrature points."""
    x, w = quadrature(max(a.degree, b.degree) + 1, *moments_of(metric, a.d_in))
    return w @ (a(x) * b(x))


def closure_products(a, b, metric):
    """The closure by brute force: after each layer, the joint Gaussian of both hidden states, moments by quadrature.

    Models of equal depth; every layer is one step of both.
    """
    mean, cov = moments_of(metric, a.d_in)
    mean, cov = np.concatenate([mean, mean]), np.block([[cov, cov], [cov, cov]])
    width = a.d_in
    for p, q in zip(a.layers, b.layers, strict=True):
        x, w = quadrature(3, mean, cov)
        out = np.concatenate([p(x[:, :width]), q(x[:, width:])], axis=1)
        mean = w @ out
        second = (w[:, None] * out).T @ out
        cov, width = second - np.outer(mean, mean), p.d_out
    return np.diag(second[:width, width:])


def dense_tensor(model, symmetrised):
    """The lifted tensor A[k, i_1, ..., i_n] of a whole model, layer tensors symmetrised or not; row 0 is the constant."""
    tensor = None
    for layer in model.layers:
        local = _symmetric_part(_dense_layer(layer)) if symmetrised else _dense_layer(layer)
        if tensor is None:
            tensor = local
            continue
        order = local.ndim - 1
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        out, bonds = next(letters), [next(letters) for _ in range(order)]
        legs = [[next(letters) for _ in range(tensor.ndim - 1)] for _ in range(order)]
        inputs = ",".join(
            [out + "".join(bonds)] + [b + "".join(x) for b, x in zip(bonds, legs, strict=True)]
        )
        tensor = np.einsum(
            f"{inputs}->{out}{''.join(itertools.chain(*legs))}", local, *[tensor] * order
        )
    return tensor


def dense_product(a, b, symmetrised):
    return np.sum(
        dense_tensor(a, symmetrised)[1:] * dense_tensor(b, symmetrised)[1:],
        axis=tuple(range(1, a.degree + 1)),
    )


def dense_symmetric_product(a, b):
    """Per output, the Frobenius product of the fully symmetrised lifted tensors."""
    first, second = (_symmetric_part(dense_tensor(m, False))[1:] for m in (a, b))
    return np.sum(first * second, axis=tuple(range(1, a.degree + 1)))


def polynomial_product(a, b):
    """<A|P_n|B> of bias-free models of two variables and one output, from their polynomials' coefficients.

    A symmetric tensor holds the coefficient c_k of x^k y^(n-k) in binom(n, k) equal entries c_k / binom(n, k). The
    coefficients come from interpolating the forward pass at n + 1 points of a circle.
    """
    n = a.degree
    angles = np.pi * (np.arange(n + 1) + 0.5) / (n + 1)
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    k = np.arange(n + 1)
    monomials = points[:, :1] ** k * points[:, 1:] ** (n - k)
    binomials = np.array([math.comb(n, j) for j in k], float)
    first, second = (
        np.linalg.solve(monomials * np.sqrt(binomials), m(points)[:, 0]) for m in (a, b)
    )
    return float(first @ second)


def _symmetric_part(tensor):
    n = tensor.ndim - 1
    return sum(
        tensor.transpose(0, *(1 + i for i in p)) for p in itertools.permutations(range(n))
    ) / math.factorial(n)


def _dense_layer(layer):
    """From the formulas: skip as (x (x) 1 + 1 (x) x) / 2, constants as 1 (x) 1."""
    if isinstance(layer, tnsim.Residual):
        inner = layer.scale * _dense_layer(layer.layer)
        d, order = layer.d_in, inner.ndim - 1
        e = np.eye(d + 1)
        if order == 1:
            inner[1:] += layer.skip * e[1:]
        else:
            inner[1:] += (
                layer.skip
                / 2
                * (np.einsum("ki,j->kij", e, e[0]) + np.einsum("kj,i->kij", e, e[0]))[1:]
            )
        inner[(0,) * (order + 1)] = 1.0
        return inner
    if isinstance(layer, tnsim.Linear):
        tensor = np.zeros((layer.d_out + 1, layer.d_in + 1))
        tensor[0, 0] = 1.0
        tensor[1:, 1:] = layer.weight
        tensor[1:, 0] = 0.0 if layer.bias is None else layer.bias
        return tensor
    zero = np.zeros(layer.rank)
    left = np.column_stack([zero if layer.left_bias is None else layer.left_bias, layer.left])
    right = np.column_stack([zero if layer.right_bias is None else layer.right_bias, layer.right])
    tensor = np.zeros((layer.d_out + 1, layer.d_in + 1, layer.d_in + 1))
    tensor[1:] = np.einsum("kh,hi,hj->kij", layer.down, left, right)
    tensor[1:, 0, 0] += 0.0 if layer.down_bias is None else layer.down_bias
    tensor[0, 0, 0] = 1.0
    return tensor
