"""A model is told by what it computes: not by what was done with it, nor by where it was read."""

from oracles import bilinear

import tnsim
from tnsim.all_pairs.sources import content_hash
from tnsim.models.origin import Origin


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
