"""Networks of attention and of models over sequences: they compute the model, contract to inner, are tagged and drawable."""

import itertools

import numpy as np
import pytest
import quimb.tensor as qtn
from closeness import LARGEST, assert_close
from oracles import bilinear, dense_layer, expected_products
from refusals import refused
from seeds import generator
from sequence_cases import DEEP, ONE_LAYER, D, inputs, pair
from sequence_oracles import attention
from test_networks import METRICS, meet_inner

import tnsim

pytestmark = pytest.mark.usefixtures("diagrams")

ROLES = ("Q1", "K1", "Q2", "K2", "V", "O", "MASK")


@pytest.mark.parametrize("layers", ONE_LAYER | DEEP)
def test_network_is_the_model(layers, rng):
    for model in pair((ONE_LAYER | DEEP)[layers], 3):
        x = rng.normal(size=(3, model.d_in))
        legs = [
            qtn.Tensor(np.concatenate([[1.0], x.ravel()]), (f"in{n}",)) for n in range(model.degree)
        ]
        network = tnsim.tensor_networks.network(model)
        assert set(network.outer_inds()) == {"out", *(f"in{n}" for n in range(model.degree))}
        found = network.combine(legs).contract(output_inds=("out",), optimize="greedy").data
        assert_close(found, np.ravel(model(x)), rtol=1e-11)


@pytest.mark.parametrize("layers", ["biases", "residual", "bilinear at every position"])
def test_network_is_the_dense_tensor(layers):
    """Entry by entry: constant, biases and skip sit where the lift wants them, the skip shared equally by all legs."""
    for model in pair(ONE_LAYER[layers], 3):
        legs = [f"in{n}" for n in range(model.degree)]
        found = (
            tnsim.tensor_networks.network(model)
            .contract(output_inds=("out", *legs), optimize="greedy")
            .data
        )
        assert_close(found, dense_layer(model.layers[0], 3)[1:], scale=LARGEST, rtol=1e-12)


@pytest.mark.crossing
@pytest.mark.parametrize(
    "layers, metric",
    [
        *itertools.product(ONE_LAYER | DEEP, ("tree", "frobenius")),
        *itertools.product(ONE_LAYER, ("gaussian",)),
    ],
)
def test_networks_of_sequences_give_inner(layers, metric):
    a, b = pair((ONE_LAYER | DEEP)[layers], 2)
    if metric != "gaussian" and a.orders != b.orders:
        return
    meet_inner(a, b, METRICS[metric](None, None))


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("form", ["standard", "alike", "diagonal", "each", "full"])
@pytest.mark.parametrize("layers", ONE_LAYER)
def test_gaussian_networks_are_inner(layers, form):
    meet_inner(*pair(ONE_LAYER[layers], 2), tnsim.Gaussian(*inputs(generator(3), 2, D)[form]))


def test_orbits_stand_for_all_pairings():
    """Two attention layers without constants have 945 pairings; symmetrised, three networks weigh as much."""
    a, b = pair(ONE_LAYER["plain"], 2)
    found = list(tnsim.tensor_networks.networks(a, b))
    assert [weight for weight, _ in found] == [225, 600, 120]
    meet_inner(a, b, tnsim.Symmetric())


def test_attention_may_meet_a_bilinear_layer(rng):
    """Legs are flattened and symmetrised, so orders need not agree; plans leave this pair to points."""
    a = tnsim.Model([attention(rng, 2, 1, 2, 1, 2, True)], n_ctx=2)
    b = tnsim.Model([bilinear(rng, 2, 3, 2, True)], n_ctx=2)
    metric = tnsim.Gaussian(rng.normal(size=2))
    found = sum(
        weight * network.contract(output_inds=(), optimize="greedy")
        for weight, network in tnsim.tensor_networks.networks(a, b, metric)
    )
    assert_close(found, expected_products(a, b, metric).sum(), rtol=1e-10)


def test_closure_over_attention(rng):
    a, b = (
        tnsim.Model([attention(rng, 1, 1, 2, 1, 1), bilinear(rng, 1, 2, 2)], n_ctx=2)
        for _ in range(2)
    )
    metric = tnsim.GaussianClosure()
    meet_inner(a, b, metric)
    deeper = [tnsim.Model([*m.layers, bilinear(rng, 2, 2, 1)], n_ctx=2) for m in (a, b)]
    with refused(
        r"Gaussian joins the legs of whole models.*degree 20 and 20.*Use GaussianClosure",
        tnsim.TooLarge,
    ):
        tnsim.tensor_networks.networks(*deeper)


def test_tags(rng):
    model = tnsim.Model(
        [
            tnsim.Linear(np.eye(2)),
            tnsim.Residual(attention(rng, 2, 2, 2, 1, 2, True)),
            attention(rng, 2, 1, 2, 1, 2),
        ],
        2,
    )
    network = tnsim.tensor_networks.network(model)
    assert network.select("LAYER0").num_tensors == 25
    assert network.select("LAYER1").num_tensors == 5 * 7
    assert {
        role: network.select([role, "LAYER2"], which="all").num_tensors for role in ROLES
    } == dict.fromkeys(ROLES, 1)
    (query,) = network.select_tensors(["Q1", "LAYER1", "COPY3"], which="all")
    assert query.shape == (
        2,
        2 + 1 + 5 * 2,
        2,
        1 + 2 * 2,
    )  # position; heads, the constant's and the skip's; score; flattened leg
    _, closed = next(tnsim.tensor_networks.networks(model, model, tnsim.TreeSymmetric()))
    (node,) = closed.select_tensors(["SYMMETRISER", "B"], which="all")[:1]
    assert node.shape == (5,) * 5
    assert np.count_nonzero(node.data) == 120
    assert_close(node.data.sum(), 1.0)


def test_refusals(rng):
    model = tnsim.Model([attention(rng, 2, 1, 2, 1, 2)] * 5, n_ctx=2)
    with refused(r"5,467 tensors, more than max_tensors=4,096", tnsim.TooLarge):
        tnsim.tensor_networks.network(model)
    open_ended = tnsim.Model([attention(rng, 2, 1, 2, 1, 2)])
    with refused(r"sequences of one length: give tnsim.Model\(layers, n_ctx=...\)"):
        tnsim.tensor_networks.network(open_ended)
    with refused("sequences of one length"):
        tnsim.tensor_networks.networks(open_ended, open_ended)
    one = tnsim.Model([attention(rng, 2, 1, 2, 1, 2)], n_ctx=2)
    with refused(r"covariance has shape \(3, 3\).*need one of"):
        tnsim.tensor_networks.networks(one, one, tnsim.Gaussian(None, np.eye(3)))
    with refused("Categorical adds up over inputs and joins no legs"):
        tnsim.tensor_networks.networks(one, one, tnsim.Categorical())


def test_deep_networks_of_sequences_join_whole_trees():
    rng = generator(12)
    a, b = (
        tnsim.Model([bilinear(rng, 1, 2, 2, biases), bilinear(rng, 2, 2, 1)], n_ctx=2)
        for biases in (False, True)
    )
    meet_inner(a, a, tnsim.Gaussian())
    meet_inner(a, b, tnsim.Symmetric())
    line = tnsim.Model([tnsim.Linear([[2.0]], [1.0])], n_ctx=2)  # of odd degree, so it is raised
    meet_inner(line, a, tnsim.Gaussian())
    cubic = tnsim.Model([tnsim.Multilinear([[[1.0]]] * 3, [[1.0]])], n_ctx=2)
    with refused("degrees 3 and 4 have an odd number", tnsim.TooLarge):
        next(tnsim.tensor_networks.networks(cubic, b))
