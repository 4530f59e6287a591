"""Networks: they compute the model, contract to inner with quimb alone, and are tagged and drawable."""

import itertools

import cases
import jax
import numpy as np
import pytest
import quimb.tensor as qtn
from closeness import assert_close
from refusals import refused

import tnsim
from tnsim import figures

pytestmark = pytest.mark.usefixtures("diagrams")

ALL = cases.SHALLOW | cases.DEEP


@pytest.mark.parametrize("name", ALL | cases.THREE)
def test_network_is_the_model(name, rng):
    for model in cases.pair((ALL | cases.THREE)[name], rng):
        x = rng.normal(size=model.d_in)
        network = tnsim.tensor_networks.network(model)
        assert {f"in{n}" for n in range(model.degree)} | {"out"} == set(network.outer_inds()) | {
            "out"
        }
        for leg in range(model.degree):
            network = network & qtn.Tensor(np.concatenate([[1.0], x]), (f"in{leg}",))
        found = network.contract(output_inds=("out",)).data
        # Terms of an output are no larger than with the sign of every weight and input positive.
        sizes = jax.tree.map(abs, model)(abs(x))
        assert_close(found, model(x), scale=sizes, rtol=1e-12)


METRICS = {
    "frobenius": lambda mean, cov: tnsim.Frobenius(),
    "tree": lambda mean, cov: tnsim.TreeSymmetric(),
    "closure": tnsim.GaussianClosure,
    "gaussian": tnsim.Gaussian,
    "centred gaussian": lambda mean, cov: tnsim.Gaussian(cov=cov.diagonal()),
    "symmetric": lambda mean, cov: tnsim.Symmetric(),
}
LONG = {("gaussian", name) for name in cases.DEEP} | {("closure", "two residual")}


def crossed():
    """Every model and metric of the declared lists; those with tens of networks with `-m slow`."""
    for name, metric in (
        *itertools.product(ALL, METRICS),
        *itertools.product(cases.UNEVEN, ["gaussian"]),
    ):
        yield pytest.param(name, metric, marks=pytest.mark.slow if (metric, name) in LONG else ())


def meet_inner(a, b, metric):
    """Engine, quimb and `inner` agree as far as rounding in the largest network lets it be known."""
    networks = list(tnsim.tensor_networks.networks(a, b, metric))
    terms = [w * one.contract(output_inds=(), optimize="greedy") for w, one in networks]
    size = sum(map(abs, terms))
    assert_close(tnsim.tensor_networks.contract(networks), sum(terms), scale=size, rtol=1e-10)
    assert_close(sum(terms), tnsim.inner(a, b, metric), scale=size, rtol=1e-10)
    return sum(terms)


@pytest.mark.crossing
@pytest.mark.parametrize("name, metric", crossed())
def test_networks_of_a_metric_give_inner(name, metric, rng):
    a, b = cases.pair((ALL | cases.UNEVEN)[name], rng)
    metric = METRICS[metric](*cases.INPUTS["mean and covariance"](rng))
    if isinstance(metric, tnsim.Symmetric) and a.degree != b.degree:
        return
    total = meet_inner(a, b, metric)
    scale = np.sqrt(tnsim.inner(a, a, metric) * tnsim.inner(b, b, metric))
    assert_close(total, tnsim.inner(a, b, metric), scale=scale, rtol=1e-11)


def test_tags(rng):
    model = tnsim.Model(
        [
            cases.linear(rng, 3, 4),
            cases.bilinear(rng, 4, 5, 4),
            tnsim.Residual(cases.bilinear(rng, 4, 3, 4)),
        ]
    )
    network = tnsim.tensor_networks.network(model)
    assert len(network.select("LAYER2").tensors) == 3
    assert len(network.select(["LAYER1", "LEFT"], which="all").tensors) == 2
    assert len(network.select("LAYER0").tensors) == 4
    for tensor in network:
        roles = set(tensor.tags) & {"WEIGHT", "LEFT", "RIGHT", "DOWN"}
        assert len(roles) == 1 and "A" in tensor.tags
        assert (
            sum(t.startswith("LAYER") for t in tensor.tags)
            == sum(t.startswith("COPY") for t in tensor.tags)
            == 1
        )


def test_operator_nodes_carry_no_layer_and_sit_on_one_side(rng):
    a, b = cases.pair(cases.DEEP["two with biases"], rng)
    seen = set()
    for metric in (
        tnsim.GaussianClosure(*cases.INPUTS["mean and covariance"](rng)),
        tnsim.TreeSymmetric(),
    ):
        for _, network in tnsim.tensor_networks.networks(a, b, metric):
            for tensor in network:
                operator = set(tensor.tags) & {"SYMMETRISER", "COVARIANCE", "MEAN"}
                seen |= operator
                assert bool(operator) != any(t.startswith("LAYER") for t in tensor.tags)
                if "SYMMETRISER" in operator:
                    np.testing.assert_array_equal(tensor.data, [[0, 0.5], [0.5, 0]])
    assert seen == {"SYMMETRISER", "COVARIANCE", "MEAN"}
    assert len(network.select(["SYMMETRISER", "B"], which="all").tensors) == 3
    assert not network.select(["SYMMETRISER", "A"], which="all").tensors


def test_hidden_ranks_are_hyperindices(rng):
    network = tnsim.tensor_networks.network(tnsim.Model([cases.bilinear(rng, 3, 5, 2)]))
    assert network.num_tensors == 3
    (hidden,) = [ind for ind, tids in network.ind_map.items() if len(tids) == 3]
    assert network.ind_size(hidden) == 6  # five units and the one that computes the constant


def test_refuses_to_unroll_too_far(rng):
    deep = tnsim.Model([cases.bilinear(rng, 2, 2, 2) for _ in range(20)])
    with refused(
        r"3,145,725 tensors, more than max_tensors=4,096.*plan\(\) fold the copies", tnsim.TooLarge
    ):
        tnsim.tensor_networks.network(deep)
    with refused("6,291,450 tensors", tnsim.TooLarge):
        tnsim.tensor_networks.networks(deep, deep, tnsim.TreeSymmetric())
    with refused("several networks"):
        tnsim.tensor_networks.network(deep - deep)


def test_drawing_tells_layers_and_operators_apart(rng):
    a, b = cases.pair(cases.DEEP["two bilinear"], rng)
    _, network = next(tnsim.tensor_networks.networks(a, b, tnsim.TreeSymmetric()))
    figure = figures.draw(network)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["Layer0", "Layer1", "symmetriser", "bra (A)", "ket (B)"]
    handles = figure.axes[0].get_legend().legend_handles[:3]
    assert len({h.get_color() for h in handles}) == 3


@pytest.mark.parametrize("package", ["networkx", "matplotlib.figure"])
def test_drawing_is_an_extra(package, rng, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    network = tnsim.tensor_networks.network(tnsim.Model([cases.bilinear(rng, 3, 5, 2)]))
    with refused(
        r"which is not installed: run  pip install 'tnsim\[plot\]'", tnsim.errors.MissingExtra
    ):
        figures.draw(network)
