"""A layer from outside, an elementwise cubic, through the documented protocol alone: `as_layer` and a forward pass."""

import jax
import numpy as np
from closeness import LARGEST, assert_close
from oracles import bilinear
from refusals import refused

import tnsim
import tnsim.models.layers


class Cubic:
    """`down (W x)^3`, written by somebody who knows `tnsim.models.layers.OwnLayer` and nothing else."""

    def __init__(self, weight, down):
        self.weight, self.down = weight, down

    def __call__(self, x):
        return (x @ self.weight.T) ** 3 @ self.down.T

    def as_layer(self):
        return tnsim.Multilinear([self.weight] * 3, self.down)


def test_models_and_residuals_hold_the_layer_that_it_names(rng):
    """So every verb sees a product of three maps, which `cases.SHALLOW` crosses with metrics."""
    layer = Cubic(rng.normal(size=(3, 2)), rng.normal(size=(2, 3)))
    model = tnsim.Model([layer, tnsim.Residual(layer, 0.7, 0.3)])
    named = tnsim.Model([layer.as_layer(), tnsim.Residual(layer.as_layer(), 0.7, 0.3)])
    assert jax.tree.structure(model) == jax.tree.structure(named)
    x = rng.normal(size=(5, 2))
    assert_close(model(x), 0.7 * layer(x) + 0.3 * layer(layer(x)), scale=LARGEST, rtol=1e-13)
    np.testing.assert_array_equal(model(x), named(x))


def test_products_of_other_orders_have_no_tree_in_common(rng):
    a = tnsim.Model([Cubic(rng.normal(size=(3, 2)), rng.normal(size=(2, 3)))])
    with refused(r"trees of one shape.*orders \[3\] and \[2\]"):
        tnsim.inner(a, tnsim.Model([bilinear(rng, 2, 3, 2)]), tnsim.TreeSymmetric())


def test_what_it_says_is_compared_with_what_it_does():
    class Liar(Cubic):
        def as_layer(self):
            return tnsim.Multilinear([self.weight] * 2, self.down)

    with refused(r"layer 0: as_layer\(\) is another function"):
        tnsim.Model([Liar(np.eye(2), np.eye(2))])
    with refused(r"layer 0 is a float; .*method as_layer\(\)", tnsim.UnsupportedLayer):
        tnsim.Model([1.0])


def test_a_class_inside_names_each_array_once():
    """Otherwise units and bases would be applied twice to one array, and numbers be wrong in silence."""
    arrays = [np.eye(2)] * 3  # equal arrays under two names are allowed
    tnsim.Model([tnsim.Bilinear(*arrays)])
    for names in ((("left", "left"), "down"), (("left", "down"), "down")):
        with refused("with one name twice: give each factor"):
            type("Twice", (tnsim.Bilinear,), {"maps": names})(*arrays)
