"""Products of any number of legs at every position, by plans: against quadrature and dense tensors."""

from functools import partial

import numpy as np
import pytest
from oracles import expected_products, multilinear
from sequence_oracles import dense_tree_product
from test_exactness import check

import tnsim

MOMENTS = np.array([0.3, -0.5]), np.array([[0.8, 0.2], [0.2, 0.5]])
EXPECTATIONS = tnsim.Gaussian(), tnsim.Gaussian(*MOMENTS), tnsim.GaussianClosure(*MOMENTS)
TREES = tnsim.TreeSymmetric(), tnsim.Frobenius()
CASES = [
    pytest.param(orders, metric, marks=pytest.mark.slow if orders[0] == 4 else ())
    for orders, metrics in {
        (2, 3): EXPECTATIONS,
        (3, 3): (*TREES, *EXPECTATIONS),
        (4, 3): EXPECTATIONS,
        (4, 4): TREES,
    }.items()
    for metric in metrics
]


def model(rng, order, constants):
    """A product of legs, with biases and a skip or without."""
    layer = multilinear(rng, order, 2, 3, 2, constants)
    return tnsim.Model([tnsim.Residual(layer, 0.7, 0.4) if constants else layer], n_ctx=2)


@pytest.mark.crossing
@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("orders, metric", CASES)
def test_products_of_any_number_of_legs(orders, metric, constants, rng, diagrams):
    """Of odd and even order without constants the product is 0, which ended in an IndexError."""
    a, b = (model(rng, order, constants) for order in orders)
    products = partial(expected_products, metric=metric)
    if metric in TREES:
        products = partial(dense_tree_product, symmetrised=metric is TREES[0])
    assert tnsim.inner(a, b, metric).route == "contractions"
    check(a, b, metric, products)
