"""Pairs of sequence models by kind of layer, and Gaussians over their inputs by form."""

import numpy as np
import pytest
from oracles import bilinear, linear
from seeds import generator
from sequence_oracles import attention, linear_attention

import tnsim

D = 2
ONE_LAYER = {
    "plain": lambda g: (
        [attention(g, D, 2, 2, 1, 3)],
        [attention(g, D, 1, 2, 2, 3, rope_base=None)],
    ),
    "biases": lambda g: (
        [attention(g, D, 2, 2, 1, 2, True)],
        [attention(g, D, 1, 2, 2, 2, True, mask="none")],
    ),
    "residual": lambda g: (
        [tnsim.Residual(attention(g, D, 1, 2, 1, D, True), 0.7, 0.35)],
        [tnsim.Residual(attention(g, D, 2, 2, 2, D), 1.0, 0.5)],
    ),
    "transformer": lambda g: (
        [
            linear(g, D, 3, True),
            tnsim.Residual(attention(g, 3, 1, 2, 2, 3, True)),
            linear(g, 3, 2, True),
        ],
        [linear(g, D, 2), attention(g, 2, 1, 2, 2, 2, rope_base=None), linear(g, 2, 2)],
    ),
    "single score": lambda g: (
        [tnsim.Residual(linear_attention(g, D, 2, 2, 1, D, True), 0.7, 0.35)],
        [linear_attention(g, D, 1, 2, 2, D, mask="none")],
    ),
    "against a linear model": lambda g: (
        [tnsim.Residual(attention(g, D, 1, 2, 2, D, True))],
        [linear(g, D, D, True)],
    ),
    "bilinear at every position": lambda g: (
        [tnsim.Residual(bilinear(g, D, 3, D, True), 0.5)],
        [bilinear(g, D, 3, D)],
    ),
}
DEEP = {  # narrow enough for quadrature over the joint state of both models at all positions
    "two attention": lambda g: (
        [
            tnsim.Residual(attention(g, 1, 1, 2, 1, 1, True), 1.0, 0.35),
            tnsim.Residual(attention(g, 1, 2, 2, 1, 1)),
        ],
        [attention(g, 1, 1, 2, 2, 1), attention(g, 1, 1, 2, 1, 1, True, rope_base=None)],
    ),
    "attention and bilinear": lambda g: (
        [
            linear(g, 1, 1),
            tnsim.Residual(attention(g, 1, 1, 2, 1, 1, True)),
            tnsim.Residual(bilinear(g, 1, 2, 1, True)),
            linear(g, 1, 3),
        ],
        [linear(g, 1, 1, True), attention(g, 1, 1, 2, 1, 1), bilinear(g, 1, 3, 1), linear(g, 1, 3)],
    ),
    "bilinear, then attention": lambda g: (
        [
            tnsim.Residual(bilinear(g, 1, 2, 1, True)),
            tnsim.Residual(attention(g, 1, 1, 2, 1, 1, True)),
        ],
        [bilinear(g, 1, 3, 1), attention(g, 1, 1, 2, 1, 1)],
    ),
}


def slow(value):
    """A parameter among the slow ones: its plan takes seconds to search."""
    return pytest.param(value, marks=pytest.mark.slow)


def inputs(g, n, d):
    factor = g.normal(size=(n * d, n * d))
    full = factor @ factor.T + 0.3 * np.eye(n * d)
    return {
        "standard": (None, None),
        "alike": (full[0, :d], full[:d, :d]),
        "diagonal": (None, np.diag(full)[:d]),
        "each": (g.normal(size=(n, d)), np.diag(full)),
        "full": (g.normal(size=n * d), full),
    }


def pair(make, n, seed=0):
    return tuple(tnsim.Model(layers, n_ctx=n) for layers in make(generator(seed)))
