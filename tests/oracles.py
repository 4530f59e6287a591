"""Random models, and slow, plain oracles that share no code with what they check (NumPy only).

Weights, means and covariances may be complex, never conjugated: an imaginary part of 1e-100 is a derivative, exact to
rounding.
"""

import itertools
import math

import jax
import numpy as np

import tnsim
import tnsim.models.arrays


def bilinear(rng, d_in, rank, d_out, biases=False):
    shapes = [(rank, d_in), (rank, d_in), (d_out, rank)] + [(rank,), (rank,), (d_out,)] * biases
    return tnsim.Bilinear(*(rng.normal(size=s) for s in shapes))


def multilinear(rng, order, d_in, rank, d_out, biases=False):
    legs, down = (
        [rng.normal(size=(rank, d_in)) for _ in range(order)],
        rng.normal(size=(d_out, rank)),
    )
    if not biases:
        return tnsim.Multilinear(legs, down)
    return tnsim.Multilinear(legs, down, rng.normal(size=(order, rank)), rng.normal(size=d_out))


def linear(rng, d_in, d_out, bias=False):
    return tnsim.Linear(rng.normal(size=(d_out, d_in)), rng.normal(size=d_out) if bias else None)


def thinned(rng, layer):
    """The layer with a part of the entries of its matrices, some in each row, as sparse matrices."""

    def thin(array):
        if array.ndim < 2:
            return array
        kept = rng.random(array.shape) < 0.4
        kept[np.arange(len(array)), rng.integers(array.shape[1], size=len(array))] = True
        return tnsim.models.arrays.SparseMatrix.of(array * kept)

    return jax.tree.map(thin, layer)


def moved(rng, model, size):
    """Every weight changed by `size` of itself, skips and scales kept."""

    def move(x):
        return x * (1 + size * rng.normal(size=x.shape)) if np.ndim(x) else x

    return jax.tree.map(move, model)


def in_dtype(model, dtype):
    return jax.tree.map(lambda x: np.asarray(x, dtype) if np.ndim(x) else x, model)


def random_gaussian(rng, d):
    factor = rng.normal(size=(d, d))
    return rng.normal(size=d), factor @ factor.T + 0.5 * np.eye(d)


def quadrature(nodes, mean, cov):
    """Gauss-Hermite points and weights for N(mean, cov); n nodes a coordinate are exact to degree 2n - 1."""
    d = len(mean)
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    points = np.array(list(itertools.product(x, repeat=d)))
    weights = np.prod(np.array(list(itertools.product(w / w.sum(), repeat=d))), axis=1)
    return points @ _root(np.asarray(cov)).T + mean, weights


def _root(cov):
    """R with R R^T = cov, to first order in an imaginary part.

    With C the real part, D the imaginary one, R R^T = C, P = R R^+ and S = D R^+T - P D R^+T / 2, the sum
    S R^T + R S^T is D P + P D - P D P, so D where D vanishes outside the span of C, as it does along a path of
    covariances.
    """
    values, vectors = np.linalg.eigh(cov.real)
    root = vectors * np.sqrt(np.clip(values, 0, None))
    if not np.iscomplexobj(cov):
        return root
    inverse = np.linalg.pinv(root, rcond=1e-7)
    slope = cov.imag @ inverse.T
    return root + 1j * (slope - root @ inverse @ slope / 2)


def moments_of(metric, d, n=1):
    """Mean and covariance over all n * d coordinates of n positions, from the shapes a user may give."""
    mean = np.zeros(n * d) if metric.mean is None else np.asarray(metric.mean)
    mean = np.tile(mean, n) if mean.shape == (d,) and n > 1 else mean.reshape(n * d)
    cov = np.eye(n * d) if metric.cov is None else np.asarray(metric.cov)
    cov = np.diag(cov) if cov.ndim == 1 else cov
    return mean, np.kron(np.eye(n), cov) if len(cov) == d else cov


def expected_products(a, b, metric):
    """E[a_k(x) b_k(x)] per output, added up over positions, from forward passes at quadrature points."""
    n = a.n_ctx or 1
    x, w = quadrature((a.degree + b.degree) // 2 + 1, *moments_of(metric, a.d_in, n))
    x = x if a.n_ctx is None else x.reshape(-1, n, a.d_in)
    return w @ (a(x) * b(x)).reshape(len(x), n, -1).sum(axis=1)


def closure_products(a, b, metric):
    """The closure by brute force: after each layer, the joint Gaussian of both hidden states, moments by quadrature.

    Models of equal depth; every layer is one step of both. The states are those of all positions.
    """
    n = a.n_ctx or 1
    mean, cov = moments_of(metric, a.d_in, n)
    mean, cov = np.concatenate([mean, mean]), np.block([[cov, cov], [cov, cov]])
    for p, q in zip(a.layers, b.layers, strict=True):
        x, w = quadrature(max(p.order, q.order) + 1, mean, cov)
        states = x[:, : n * p.d_in], x[:, n * p.d_in :]
        if a.n_ctx is not None:
            states = [part.reshape(len(x), n, -1) for part in states]
        outputs = [layer(part) for layer, part in zip((p, q), states, strict=True)]
        out = np.concatenate([part.reshape(len(x), -1) for part in outputs], axis=1)
        mean = w @ out
        second = (w[:, None] * out).T @ out
        cov = second - np.outer(mean, mean)
    width = n * a.d_out
    return np.diag(second[:width, width:]).reshape(n, -1).sum(axis=0)


def dense_tensor(model, symmetrised):
    """The lifted tensor A[k, i_1, ..., i_n] of a whole model, layer tensors symmetrised or not; row 0 is the constant."""
    tensor = None
    for layer in model.layers:
        local = dense_layer(layer)
        local = symmetric_part(local) if symmetrised else local
        if tensor is not None:
            for _ in range(local.ndim - 1):  # the next leg, and its own legs to the end
                local = np.tensordot(local, tensor, (1, 0))
        tensor = local
    return tensor


def dense_product(a, b, symmetrised):
    return np.sum(
        dense_tensor(a, symmetrised)[1:] * dense_tensor(b, symmetrised)[1:],
        axis=tuple(range(1, a.degree + 1)),
    )


def dense_symmetric_product(a, b):
    """Per output, the Frobenius product of the fully symmetrised lifted tensors."""
    first, second = (symmetric_part(dense_tensor(m, False))[1:] for m in (a, b))
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


def symmetric_part(tensor):
    orders = [(0, *legs) for legs in itertools.permutations(range(1, tensor.ndim))]
    return sum(tensor.transpose(order) for order in orders) / len(orders)


def dense_layer(layer, n=1):
    """The lifted tensor of a layer over (1, x), or over the inputs of n positions; row 0 is the constant.

    From the formulas: a skip as (x (x) 1 + 1 (x) x) / 2, constants as 1 (x) 1. Legs of attention are in the order
    q1, k1, q2, k2, v. Numbers may be complex, or fractions.
    """
    kind = np.result_type(np.float64, *jax.tree.leaves(layer))
    rows = [slice(1 + s * layer.d_out, 1 + (s + 1) * layer.d_out) for s in range(n)]
    if isinstance(layer, tnsim.Residual):
        tensor = layer.scale * dense_layer(layer.layer, n)
        order = tensor.ndim - 1
        for leg, k in itertools.product(range(order), range(1, len(tensor))):
            place = [0] * order
            place[leg] = k
            tensor[(k, *place)] += layer.skip / order
    elif isinstance(layer, tnsim.Attention):
        tensor = np.zeros((n * layer.d_out + 1, *(n * layer.d_in + 1,) * 5), kind)
        for s, t, head in itertools.product(range(n), range(n), range(layer.n_heads)):
            if layer.mask == "causal" and t > s:
                continue
            legs = []
            for name, at in (("q1", s), ("k1", t), ("q2", s), ("k2", t), ("v", t)):
                width = layer.d_value if name == "v" else layer.d_head
                leg = _leg(getattr(layer, name), getattr(layer, f"{name}_bias"), at, n)
                leg = leg[head * width : (head + 1) * width]
                legs.append(leg if name == "v" else _rotation(layer, at) @ leg)
            out = layer.o[:, head * layer.d_value : (head + 1) * layer.d_value]
            part = np.einsum("ku,xa,xb,yc,yd,ue->kabcde", out, *legs, optimize=True)
            tensor[rows[s]] += part / layer.d_head**2
        if layer.o_bias is not None:
            tensor[1:, 0, 0, 0, 0, 0] += np.tile(layer.o_bias, n)
    else:
        down, constant = np.eye(layer.d_out, dtype=int), None
        if isinstance(layer, tnsim.Linear):
            legs = [(layer.weight, layer.bias)]
        else:
            down, constant = layer.down, layer.down_bias
            if isinstance(layer, tnsim.Bilinear):
                legs = [(layer.left, layer.left_bias), (layer.right, layer.right_bias)]
            else:
                legs = list(zip(layer.legs, layer.leg_biases, strict=True))
        tensor = np.zeros((n * layer.d_out + 1, *(n * layer.d_in + 1,) * len(legs)), kind)
        letters = "abcdef"[: len(legs)]
        equation = f"kh,{','.join(f'h{letter}' for letter in letters)}->k{letters}"
        for s in range(n):
            tensor[rows[s]] = np.einsum(
                equation, np.asarray(down), *(_leg(w, bias, s, n) for w, bias in legs)
            )
        if constant is not None:
            tensor[(slice(1, None), *(0,) * len(legs))] += np.tile(constant, n)
    tensor[(0,) * tensor.ndim] = 1
    return tensor + 0 * np.ravel(jax.tree.leaves(layer)[0])[0]  # no 1 or 0 is a plain integer


def _leg(weight, bias, position, n):
    """(rows, 1 + n * d): the bias on the constant, the weight on the coordinates of one position."""
    rows, d = weight.shape
    leg = np.zeros((rows, 1 + n * d), np.result_type(weight, np.float64 if bias is None else bias))
    leg[:, 0] = 0 if bias is None else bias
    leg[:, 1 + position * d : 1 + (position + 1) * d] = np.asarray(weight)
    return leg


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


def hsic(x, y):
    """The unbiased estimator as Song et al. (2012) print it: n x n kernels without diagonals."""
    n, one = len(x), np.ones(len(x))
    k, o = (z.reshape(n, -1) @ z.reshape(n, -1).T for z in (x, y))
    np.fill_diagonal(k, 0)
    np.fill_diagonal(o, 0)
    cross = np.trace(k @ o) + (one @ k @ one) * (one @ o @ one) / ((n - 1) * (n - 2))
    return (cross - 2 / (n - 2) * (one @ k @ o @ one)) / (n * (n - 3))


def linear_cka(x, y):
    """Debiased CKA of the rows of two arrays."""
    return hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y))


STENCILS = {4: (2 / 3, -1 / 12), 6: (3 / 4, -3 / 20, 1 / 60), 8: (4 / 5, -1 / 5, 4 / 105, -1 / 280)}


def slope_of(function, step, order=4):
    """The derivative at 0 of a function of a number, by central differences of an order."""
    weights = enumerate(STENCILS[order], 1)
    return sum(c * (function(n * step) - function(-n * step)) for n, c in weights) / step
