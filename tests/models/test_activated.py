"""Layers with an activation: shapes, widths, forward passes in any range, files and refusals."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activated_cases import gated, mlp
from closeness import LARGEST, assert_close
from refusals import refused
from scipy.sparse import csr_array

import tnsim
from tnsim.activations.activation import activation, elu, jump_relu, leaky_relu, plus_line, power
from tnsim.models.forward import forward, scaled_layers


def test_a_width_comes_from_the_neighbours(rng):
    relu = tnsim.Elementwise("relu")
    weight = rng.normal(size=(3, 2))
    behind = tnsim.Model([tnsim.Linear(weight), tnsim.Residual(relu), relu])
    assert [layer.d_in for layer in behind.layers] == [2, 3, 3]
    before = tnsim.Model([relu, tnsim.Residual(relu), tnsim.Linear(weight)])
    assert [layer.d_out for layer in before.layers] == [2, 2, 3]
    x = rng.normal(size=(4, 2))
    np.testing.assert_array_equal(
        before(x), (np.maximum(x, 0) + np.maximum(np.maximum(x, 0), 0)) @ weight.T
    )
    with refused("has no width: stand it beside a layer"):
        tnsim.Model([relu])
    with refused("layer 1 expects 4 inputs but layer 0 gives 3"):
        tnsim.Model([tnsim.Linear(weight), tnsim.Elementwise("relu", 4)])
    with refused("width must be a positive integer, found 0"):
        tnsim.Elementwise("relu", 0)
    with refused("no activation is called 'rleu'"):
        tnsim.Elementwise("rleu")


def test_a_gate_without_activation_is_bilinear(rng):
    gate, up, down = (rng.normal(size=shape) for shape in ((4, 2), (4, 2), (3, 4)))
    (layer,) = tnsim.Model([tnsim.Gated(gate, up, down, "identity", rng.normal(size=4))]).layers
    assert type(layer) is tnsim.Bilinear
    inside = tnsim.Residual(tnsim.Gated(gate, up, down[:2], "identity"))
    assert type(inside.layer) is tnsim.Bilinear
    with refused("an up_bias but no up"):
        tnsim.Gated(gate, None, down, "relu", up_bias=np.ones(4))
    with refused("Gated up has shape"):
        tnsim.Gated(gate, up[:3], down, "relu")


def test_thresholds_of_their_own(rng):
    """A layer of JumpReLU units is the sum of its units, each with its threshold as a kink."""
    gate, down, thresholds = (
        rng.normal(size=(4, 2)),
        rng.normal(size=(3, 4)),
        rng.uniform(0.1, 2, 4),
    )
    bias = 0.1 * rng.normal(size=4)
    gate /= np.linalg.norm(gate, axis=1, keepdims=True)
    layer = tnsim.Gated.jump_relu(gate, down, thresholds, bias)
    x = 3 * rng.normal(size=(50, 2))
    u = x @ gate.T + bias
    assert_close(layer(x), np.where(u > thresholds, u, 0) @ down.T, scale=LARGEST, rtol=1e-13)
    units = [
        tnsim.Model(
            [tnsim.Gated(gate[[n]], None, down[:, [n]], jump_relu(thresholds[n]), bias[[n]])]
        )
        for n in range(4)
    ]
    together = sum(units[1:], start=units[0])  # products of two units alone may have no digit
    whole = tnsim.Model([layer])
    total = tnsim.inner(together, together)
    assert_close(tnsim.inner(whole, whole), total, rtol=1e-13)
    with refused("positive numbers, one for every unit"):
        tnsim.Gated.jump_relu(gate, down, -thresholds)


def test_thresholds_may_be_traced(rng):
    """The check of their signs was an error of JAX."""
    gate, down, sizes = rng.normal(size=(3, 2)), rng.normal(size=(1, 3)), rng.uniform(1, 2, 3)
    slope = jax.jacfwd(lambda sizes: tnsim.Gated.jump_relu(gate, down, sizes).gate)(sizes)
    expected = np.einsum("ij,ik->ijk", -gate / sizes[:, None] ** 2, np.eye(3))
    assert_close(slope, expected, scale=LARGEST, rtol=1e-5, limited_by="float32")


def test_forward_passes_keep_digits_at_any_size(rng):
    """Rows of an activation are in no unit but 1; linear layers around it may leave floats."""
    a = mlp(rng, "gelu")
    weight = rng.normal(size=(2, 2))
    large = tnsim.Model([*a.layers, *[tnsim.Linear(np.ldexp(weight, 664))] * 2])
    plain = tnsim.Model([*a.layers, *[tnsim.Linear(weight)] * 2])
    x = rng.normal(size=(5, 2))
    values, exponents = forward(scaled_layers(large), x)
    assert_close(values * 2.0 ** (exponents - 2 * 664), plain(x), scale=LARGEST, rtol=1e-13)
    metric = tnsim.Empirical(x)
    expected = tnsim.similarity(plain, a, metric)
    assert_close(tnsim.similarity(large, a, metric), expected, scale=1.0, rtol=1e-12)


def test_a_pytree_of_its_weights(rng):
    model = gated(rng, "silu")
    doubled = jax.tree.map(lambda x: 2 * x, model)
    assert len(jax.tree.leaves(model)) == 6
    assert doubled.layers[0].activation is model.layers[0].activation
    assert len(jax.tree.leaves(mlp(rng, "relu"))) == 4


def test_files(rng, tmp_path):
    block = tnsim.Gated(rng.normal(size=(4, 2)), None, rng.normal(size=(2, 4)), "gelu_tanh")
    model = tnsim.Model(
        [tnsim.Residual(block, 0.5), *gated(rng, "silu").layers, tnsim.Elementwise("relu6")]
    )
    path = tmp_path / "model.safetensors"
    tnsim.save(model, path)
    again = tnsim.load(path)
    x = rng.normal(size=(4, 2))
    assert repr(again) == repr(model)
    np.testing.assert_array_equal(again(x), model(x))
    made = jump_relu(0.25), leaky_relu(0.2), elu(1.0), elu(1.5), power(3)
    lines = [plus_line(activation(name), -1 / 3) for name in ("gelu", "relu", "elu(1.5)")]
    for function in (*made, *lines):
        tnsim.save(tnsim.Model([tnsim.Linear(np.eye(2)), tnsim.Elementwise(function)]), path)
        assert tnsim.load(path).layers[1].activation == function
    for name in ("leaky_relu(nan)", "elu(x)", "power(1e9)", "swish + 1.0 u", "gelu + inf u"):
        with refused("no activation is called"):
            activation(name)
    own = tnsim.Model([tnsim.Linear(np.eye(2)), tnsim.Elementwise(own_activation())])
    with refused("is a function of your own, which no file holds"):
        tnsim.save(own, path)


def own_activation():
    return type(tnsim.Elementwise("relu").activation)(kinks=(1.0,), pieces=((0.0,), (-1.0, 1.0)))


@pytest.mark.parametrize(
    "own",
    [elu(), elu(0.5), leaky_relu(0.2), plus_line(activation("gelu"), -0.5), activation("relu")],
)
def test_activations_are_sent_by_their_names(own):
    assert pickle.loads(pickle.dumps(own)) == own


def test_rules(rng):
    state = {"w": rng.normal(size=(8, 3)), "o": rng.normal(size=(2, 4)), "b": rng.normal(size=2)}
    rules = (
        tnsim.dialects.ElementwiseRule(activation="tanh"),
        tnsim.dialects.GatedRule(fused="w", fused_order="up-gate", down="o", activation="silu"),
    )
    dialect = tnsim.Dialect("mine", rules, unused=("b",))
    assert tnsim.Dialect.from_json(dialect.to_json()) == dialect
    model = tnsim.from_state_dict(state, dialect)
    x = rng.normal(size=(5, 3))
    up, gate = np.split(np.tanh(x) @ state["w"].T, 2, axis=1)
    assert_close(model(x), up * gate / (1 + np.exp(-gate)) @ state["o"].T)
    assert "activation tanh" in "; ".join(model.origin.assumptions)


def test_roads_that_need_no_closed_form(rng):
    """Any depth on inputs of one's own, on draws in one word, and on tokens by enumeration."""
    deep = tnsim.Model([*mlp(rng, "relu").layers, tnsim.Elementwise("tanh")])
    other = tnsim.Model([*mlp(rng, "gelu").layers, *gated(rng, "silu").layers])
    x = rng.normal(size=(40, 2))
    expected = np.sum(deep(x) * other(x)) / np.linalg.norm(deep(x)) / np.linalg.norm(other(x))
    found = tnsim.similarity(deep, other, tnsim.Empirical(x))
    assert_close(found, expected, rtol=1e-13)
    metric = tnsim.Empirical.normal(np.ones(2), np.array([1.0, 4.0]), samples=5000)
    assert metric.inputs.shape == (5000, 2)
    standard = tnsim.Empirical.normal(np.zeros(2), samples=5000).inputs
    assert_close(metric.inputs, 1 + standard * [1.0, 2.0], scale=LARGEST, rtol=1e-13)
    assert tnsim.similarity(deep, other, metric).standard_error > 0
    assert tnsim.Empirical.normal(np.zeros((3, 2)), samples=4).inputs.shape == (4, 3, 2)
    with refused("need a mean or a covariance"):
        tnsim.Empirical.normal()
    with refused("memory does not hold draws of shape", tnsim.TooLarge):
        tnsim.Empirical.normal(np.zeros(3), samples=2**60)
    tokens = [tnsim.Model(mlp(rng, "relu", inputs=3).layers, n_ctx=2) for _ in range(2)]
    every = np.array([[i, j] for i in range(3) for j in range(3)])
    assert_close(
        tnsim.inner(*tokens, tnsim.Categorical()),
        tnsim.inner(*tokens, tnsim.Empirical(every)),
        rtol=1e-13,
    )


def test_activations_far_from_zero_are_values_without_warnings():
    far = np.array([-2000.0, 2000.0])
    for name, values in {"sigmoid": [0.0, 1.0], "silu": [0.0, 2000.0]}.items():
        layer = tnsim.Elementwise(name, 1)
        with np.errstate(over="raise"):
            assert layer(far[:, None])[:, 0].tolist() == values


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "relu"])
def test_whole_numbers_have_values_that_are_not_whole(name):
    numbers = np.arange(-2, 3)
    np.testing.assert_array_equal(activation(name)(numbers), activation(name)(numbers * 1.0))


def test_thresholds_of_sparse_matrices_are_those_of_dense_ones(rng):
    gate, down, thresholds = np.diag(rng.normal(size=3)), np.eye(3), np.array([0.1, 0.2, 0.3])
    sparse = tnsim.Gated.jump_relu(csr_array(gate), csr_array(down), thresholds)
    x = rng.normal(size=(5, 3))
    np.testing.assert_array_equal(sparse(x), tnsim.Gated.jump_relu(gate, down, thresholds)(x))


def test_skips_of_jax_are_no_parameters():
    layer = tnsim.Bilinear(*[np.eye(2)] * 3)
    skips = 0.5, jnp.asarray(0.5)
    assert [tnsim.Model([tnsim.Residual(layer, x)]).parameters for x in skips] == [12, 12]
