"""The one declared list of what is tested by everything: model pairs by kind of layer, and metrics."""

import numpy as np
from oracles import bilinear, linear, random_gaussian, thinned

import tnsim

D = 3


def cubic(g, d_in, rank, d_out, biases=False):
    """`down (W x + b)^3 + c`."""
    rows, down = g.normal(size=(rank, d_in)), g.normal(size=(d_out, rank))
    constants = ([g.normal(size=rank)] * 3, g.normal(size=d_out)) if biases else ()
    return tnsim.Multilinear([rows] * 3, down, *constants)


# name -> rng -> (a, b) with one nonlinear layer or none
SHALLOW = {
    "bilinear": lambda g: ([bilinear(g, D, 4, 2)], [bilinear(g, D, 5, 2)]),
    "bilinear biases": lambda g: ([bilinear(g, D, 4, 2, True)], [bilinear(g, D, 2, 2, True)]),
    "bias on one side": lambda g: ([bilinear(g, D, 4, 2)], [bilinear(g, D, 5, 2, True)]),
    "additive residual": lambda g: (
        [tnsim.Residual(bilinear(g, D, 4, D), 1.0, 0.35)],
        [bilinear(g, D, 5, D)],
    ),
    "lerp residual": lambda g: (
        [tnsim.Residual(bilinear(g, D, 4, D, True), 0.7, 0.3)],
        [tnsim.Residual(bilinear(g, D, 3, D, True), 1.0, 0.5)],
    ),
    "nested residual": lambda g: (
        [tnsim.Residual(tnsim.Residual(bilinear(g, D, 4, D, True), 0.4, 0.9), 0.5, 0.8)],
        [bilinear(g, D, 2, D)],
    ),
    "embedded": lambda g: (
        [linear(g, D, 5), bilinear(g, 5, 4, 3), linear(g, 3, 2)],
        [linear(g, D, 2), bilinear(g, 2, 6, 2), linear(g, 2, 2)],
    ),
    "embedded biases": lambda g: (
        [
            linear(g, D, 4, True),
            tnsim.Residual(bilinear(g, 4, 4, 4, True), 0.7, 0.3),
            linear(g, 4, 2, True),
        ],
        [linear(g, D, 2, True), bilinear(g, 2, 5, 3, True), linear(g, 3, 2)],
    ),
    "uneven linear layers": lambda g: (
        [linear(g, D, 2), linear(g, 2, 4, True), bilinear(g, 4, 3, 2)],
        [bilinear(g, D, 5, 2)],
    ),
    "sparse": lambda g: (
        [
            thinned(g, linear(g, D, 4, True)),
            thinned(g, bilinear(g, 4, 5, 3, True)),
            linear(g, 3, 2),
        ],
        [thinned(g, bilinear(g, D, 6, 2))],
    ),
    "three factors": lambda g: (
        [linear(g, D, 2), tnsim.Residual(cubic(g, 2, 3, 2, True), 0.7, 0.3), linear(g, 2, 2)],
        [cubic(g, D, 2, 2)],
    ),
    "linear": lambda g: (
        [linear(g, D, 4), tnsim.Residual(linear(g, 4, 4, True), 0.3, 0.4), linear(g, 4, 2)],
        [linear(g, D, 2)],
    ),
}

# several nonlinear layers, equal depth and orders
DEEP = {
    "two bilinear": lambda g: (
        [bilinear(g, D, 4, 2), bilinear(g, 2, 3, 2)],
        [bilinear(g, D, 5, 3), bilinear(g, 3, 4, 2)],
    ),
    "two with biases": lambda g: (
        [bilinear(g, D, 4, 2, True), bilinear(g, 2, 3, 2, True)],
        [bilinear(g, D, 2, 2, True), bilinear(g, 2, 4, 2)],
    ),
    "two residual": lambda g: (
        [tnsim.Residual(bilinear(g, D, 4, D, True), 0.7, 0.3), bilinear(g, D, 3, 2, True)],
        [tnsim.Residual(bilinear(g, D, 3, D)), bilinear(g, D, 4, 2)],
    ),
    "embedded two": lambda g: (
        [linear(g, D, 2), bilinear(g, 2, 4, 3), bilinear(g, 3, 3, 2), linear(g, 2, 2)],
        [linear(g, D, 3, True), bilinear(g, 3, 2, 2), bilinear(g, 2, 3, 2), linear(g, 2, 2)],
    ),
}
DEEP["sparse two"] = lambda g: (
    [
        tnsim.Residual(thinned(g, bilinear(g, D, 4, D, True)), 0.7, 0.3),
        tnsim.Residual(thinned(g, bilinear(g, D, 5, D, True)), 0.8, 0.5),
        linear(g, D, 2, True),
    ],
    [thinned(g, bilinear(g, D, 5, 4)), thinned(g, bilinear(g, 4, 4, 3)), linear(g, 3, 2)],
)
UNEVEN = {  # different numbers of nonlinear layers: no tree metric, but functions all the same
    "one over none": lambda g: (  # of odd and of even order, so that means matter
        [linear(g, D, 4), linear(g, 4, 2, True)],
        [linear(g, D, 3), bilinear(g, D, 5, 2, True)],
    ),
    "two over one": lambda g: (
        [bilinear(g, D, 3, 2), bilinear(g, 2, 3, 2)],
        [bilinear(g, D, 4, 2)],
    ),
    "two over none": lambda g: (
        [bilinear(g, D, 3, 2, True), bilinear(g, 2, 3, 2)],
        [linear(g, D, 2, True)],
    ),
    "biased two over one": lambda g: (
        [tnsim.Residual(bilinear(g, D, 3, D, True)), bilinear(g, D, 3, 2, True)],
        [linear(g, D, 2, True), bilinear(g, 2, 4, 2, True)],
    ),
}
THREE = {
    "three bilinear": lambda g: (
        [bilinear(g, D, 3, 2), bilinear(g, 2, 3, 2), bilinear(g, 2, 2, 2)],
        [bilinear(g, D, 2, 2, True), tnsim.Residual(bilinear(g, 2, 3, 2)), bilinear(g, 2, 2, 2)],
    )
}


def _full(g):
    return random_gaussian(g, D)


# name -> rng -> (mean, cov) of the Gaussian metrics
INPUTS = {
    "standard": lambda g: (None, None),
    "mean": lambda g: (g.normal(size=D), None),
    "covariance": lambda g: (None, _full(g)[1]),
    "diagonal": lambda g: (None, g.uniform(0.5, 2, size=D)),
    "mean and diagonal": lambda g: (g.normal(size=D), g.uniform(0.5, 2, size=D)),
    "mean and covariance": _full,
    "singular covariance": lambda g: (g.normal(size=D), np.diag([1.0, 2.0, 0.0])),
}


def pair(make, rng):
    return tuple(tnsim.Model(layers) for layers in make(rng))


def in_basis(matrices, basis, inverse):
    """Two bilinear layers with another basis between them, which is the same function."""
    left, right, down, other_left, other_right, last = matrices
    second = tnsim.Bilinear(other_left @ inverse, other_right @ inverse, last)
    return tnsim.Model([tnsim.Bilinear(left, right, basis @ down), second])


def skewed(rng, condition):
    """The matrices of two bilinear layers, and a hidden basis of a condition with its inverse."""
    shapes = (9, 4), (9, 4), (4, 9), (9, 4), (9, 4), (2, 9)
    matrices = [rng.normal(size=shape) for shape in shapes]
    left, right = (np.linalg.qr(rng.normal(size=(4, 4)))[0] for _ in range(2))
    sizes = np.geomspace(1, condition, 4)
    return matrices, left * sizes @ right, right.T / sizes @ left.T


def cancelling_copies(rng):
    """A bilinear model, and copies in float32 with two more units of a size, which nearly undo each other."""
    left, right, down = rng.normal(size=(4, 3)), rng.normal(size=(4, 3)), rng.normal(size=(2, 4))

    def copy(size):
        big = size * np.ones((2, 1))
        units = np.concatenate([down + big * np.eye(4)[:1], -big], axis=1)
        arrays = np.r_[left, left[:1]], np.r_[right, right[:1]], units
        return tnsim.Model([tnsim.Bilinear(*(x.astype(np.float32) for x in arrays))])

    return tnsim.Model([tnsim.Bilinear(left, right, down)]), copy
