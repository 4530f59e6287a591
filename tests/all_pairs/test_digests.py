"""A model is told by what it computes: not by what was done with it, nor by where it was read."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import bilinear
from safetensors.numpy import save_file

import tnsim
from tnsim.activations.activation import ACTIVATIONS, activation
from tnsim.all_pairs import sources
from tnsim.all_pairs.sources import content_hash
from tnsim.metrics.finite_measures import RowsOnDemand
from tnsim.models.model import Origin


def test_use_changes_no_digest(rng):
    """What is worked out of a model stays with it, and is no part of it."""
    model = tnsim.Model([bilinear(rng, 3, 4, 2, True), bilinear(rng, 2, 3, 2)])
    combination = model - tnsim.Model([bilinear(rng, 3, 4, 2)])
    before = content_hash(model), content_hash(combination)
    for metric in (tnsim.TreeSymmetric(), tnsim.GaussianClosure()):
        tnsim.similarity(model, model, metric)
    assert model.degree == 4 and repr(model) and tnsim.pairwise([model, combination])
    assert (content_hash(model), content_hash(combination)) == before


def test_where_a_model_was_read_is_no_part_of_it(rng):
    layers = [bilinear(rng, 3, 4, 2)]
    read = tnsim.Model(layers, origin=Origin("a file", caveats=("left out: norm.weight",)))
    assert content_hash(read) == content_hash(tnsim.Model(layers))


def test_every_number_counts(rng):
    layer = bilinear(rng, 3, 4, 2)
    other = tnsim.Bilinear(layer.left, layer.right, layer.down * (1 + 1e-16 + 2e-16))
    assert content_hash(tnsim.Model([layer])) != content_hash(tnsim.Model([other]))


class Weighted:
    """A metric from outside that is no data class and holds a list."""

    name = "weighted"
    pairs_within_model = False

    def __init__(self, weights):
        self.weights = weights
        self.settings = {"second": np.arange(3000.0), "first": 1}

    def is_exact(self, nonlinear_layers):
        return True


def test_numbers_in_lists_and_plain_objects_count():
    """The text of a large array leaves out its middle, that of an object is its address."""
    weights = np.zeros(3000)
    other = np.where(np.arange(3000) == 1500, 1.0, weights)
    assert content_hash(Weighted([weights])) == content_hash(Weighted([weights.copy()]))
    assert content_hash(Weighted([weights])) != content_hash(Weighted([other]))
    assert content_hash([weights]) != content_hash((weights,))


def test_a_file_of_inputs_is_its_numbers_and_is_never_whole_in_memory(tmp_path, rng, monkeypatch):
    x = rng.normal(size=(50, 3))
    save_file({"x": x}, tmp_path / "x.safetensors")
    whole = content_hash(tnsim.Empirical(x))
    monkeypatch.setattr(sources, "_FED_BYTES", 200)  # eight rows
    monkeypatch.delattr(RowsOnDemand, "__array__")
    assert content_hash(tnsim.Empirical(tmp_path / "x.safetensors")) == whole


@pytest.mark.parametrize("name", [*ACTIVATIONS, "elu(0.5)", "gelu + 0.5 u", "leaky_relu(0.2)"])
def test_an_activation_is_the_same_in_another_process(name):
    """Where a function is in memory says nothing of it, and would refuse stores of earlier runs."""
    fed = []
    sources._feed(SimpleNamespace(update=lambda data: fed.append(bytes(data))), activation(name))
    assert fed and b" at 0x" not in b"".join(fed)


def test_activations_of_ones_own_are_told_by_their_values():
    def digest(scale):
        own = tnsim.Activation(lambda u: jnp.tanh(scale * u), strip=1.0, name="own")
        return content_hash(tnsim.Model([tnsim.Elementwise(own, 2)]))

    assert digest(1.0) == digest(1.0) != digest(0.9)
