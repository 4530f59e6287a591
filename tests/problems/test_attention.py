"""Models of sequences: every layer kind under every metric against quadrature and dense tensors, at two or three positions.

Nothing is compiled.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import bilinear, closure_products, expected_products, linear
from rational_oracle import layer_forward, rational
from refusals import refused
from seeds import generator
from sequence_cases import DEEP, ONE_LAYER, D, inputs, pair
from sequence_oracles import attention, dense_tree_product, linear_attention
from test_exactness import check

import tnsim
from tnsim.compare.by_plans import Contractions
from tnsim.compare.request import ALL, Question


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize("rope_base", [None, 10.0, 1000.0])
def test_forward_pass_is_the_formula(rope_base, mask, rng):
    layer = attention(rng, 3, 2, 4, 3, 5, True, mask=mask, rope_base=rope_base)
    x = rng.normal(size=(7, 3))
    both = np.stack([x, 2 * x])
    wanted = layer_forward(layer, rational(both)).astype(np.float64)
    assert_close(layer(x), wanted[0], scale=LARGEST, rtol=1e-13)
    assert_close(layer(both), wanted, scale=LARGEST, rtol=1e-13)


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("form", ["standard", "alike", "diagonal", "each", "full"])
@pytest.mark.parametrize("layers", ONE_LAYER)
def test_one_nonlinear_layer_is_exact(layers, form):
    a, b = pair(ONE_LAYER[layers], 2)
    metric = tnsim.Gaussian(*inputs(generator(3), 2, D)[form])
    check(a, b, metric, lambda x, y: expected_products(x, y, metric))
    assert tnsim.inner(a, b, metric).exact


@pytest.mark.parametrize("legs", [2, 3])
def test_attention_beside_products(legs, rng, request):
    if legs == 3:  # eight legs together, which diagrams can join
        request.getfixturevalue("diagrams")
    a = tnsim.Model([attention(rng, D, 1, 2, 1, 2, True)], n_ctx=2)
    rows = [rng.normal(size=(3, D)) for _ in range(legs)]
    b = tnsim.Model([tnsim.Multilinear(rows, rng.normal(size=(2, 3)))], n_ctx=2)
    metric = tnsim.Gaussian(*inputs(rng, 2, D)["full"])
    value = tnsim.similarity(a, b, metric)
    pairs = (a, b), (a, a), (b, b)
    cross, one, two = (expected_products(*pair, metric).sum() for pair in pairs)
    assert value.exact
    assert_close(value, cross / np.sqrt(one * two), scale=1.0)
    assert_close(tnsim.pairwise([a, b], metric).similarity[0, 1], value, scale=1.0)


def test_every_pair_of_a_sum_decides_about_its_route(rng):
    """A plan of the first and the last model says nothing of a model between that has none."""
    deep = [attention(rng, 2, 1, 2, 1, 2), attention(rng, 2, 1, 2, 1, 2)]
    square, two, line = (
        tnsim.Model(layers, n_ctx=1)
        for layers in ([bilinear(rng, 2, 1, 2)], deep, [linear(rng, 2, 2)])
    )
    question = Question((square, two, line), tnsim.Gaussian(), ALL, False, "float64")
    with refused("joins the legs of whole models", tnsim.TooLarge):
        Contractions(question).estimate()
    value = tnsim.similarity(two + line, square)
    assert_close(tnsim.similarity(square, two + line), value, scale=1.0)
    cube, fourth = (
        tnsim.Model([tnsim.Multilinear([np.eye(2)] * order, np.eye(2))] * depth)
        for order, depth in ((3, 1), (2, 2))
    )  # two kinds of models among three, which have an odd number of legs together
    question = Question((fourth, cube, fourth), tnsim.Gaussian(), ALL, False, "float64")
    with refused("an odd number", tnsim.TooLarge):
        Contractions(question).estimate()


@pytest.mark.slow
def test_three_positions():
    a, b = (
        tnsim.Model(m.layers, n_ctx=3)
        for m in pair(
            lambda g: ([attention(g, 1, 2, 2, 1, 2, True)], [attention(g, 1, 1, 2, 2, 2, True)]), 3
        )
    )
    metric = tnsim.Gaussian(np.array([0.5]), np.array([[0.7]]))
    assert_close(tnsim.inner(a, b, metric), expected_products(a, b, metric).sum(), rtol=1e-10)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("form", ["standard", "full"])
@pytest.mark.parametrize("layers", reversed(DEEP))
def test_closure_is_the_joint_gaussian_layer_by_layer(layers, form):
    a, b = pair(DEEP[layers], 2)
    metric = tnsim.GaussianClosure(*inputs(generator(4), 2, 1)[form])
    expected = closure_products(a, b, metric)
    found = tnsim.inner(a, b, metric)
    assert_close(found, expected.sum())
    assert not found.exact


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("symmetrised", [True, False])
@pytest.mark.parametrize("layers", [*ONE_LAYER, *DEEP])
def test_tree_metrics_are_those_of_dense_tensors(layers, symmetrised):
    if layers == "against a linear model":
        return
    a, b = pair({**ONE_LAYER, **DEEP}[layers], 2)
    metric = tnsim.TreeSymmetric() if symmetrised else tnsim.Frobenius()
    check(a, b, metric, lambda x, y: dense_tree_product(x, y, symmetrised))
    if symmetrised and sum(order > 1 for order in a.orders) == 1:
        inner = tnsim.inner(a, b, tnsim.Symmetric())
        assert_close(inner, tnsim.inner(a, b, metric), scale=LARGEST, rtol=1e-10)


TOKENS = 3
OVER_TOKENS = {
    "transformer": lambda g: [
        linear(g, TOKENS, 4, True),
        tnsim.Residual(bilinear(g, 4, 3, 4, True)),
        tnsim.Residual(attention(g, 4, 2, 2, 1, 4, True), 0.6, 0.35),
        linear(g, 4, 3),
        linear(g, 3, 5, True),
    ],
    "attention alone": lambda g: [attention(g, TOKENS, 2, 2, 1, 5, rope_base=None)],
    "no mask": lambda g: [linear(g, TOKENS, 4), attention(g, 4, 1, 2, 1, 5, True, mask="none")],
    "no attention": lambda g: [bilinear(g, TOKENS, 4, 5)],
}


@pytest.mark.crossing(quick=0)
@pytest.mark.parametrize("n_ctx", [1, 3])
@pytest.mark.parametrize("second", OVER_TOKENS)
@pytest.mark.parametrize("first", OVER_TOKENS)
def test_categorical_is_the_sum_over_all_sequences(first, second, n_ctx):
    rng = generator(7)
    a, b = (tnsim.Model(OVER_TOKENS[name](rng), n_ctx=n_ctx) for name in (first, second))
    p = rng.uniform(size=TOKENS)
    p /= p.sum()
    sequences = [list(x) for x in itertools.product(range(TOKENS), repeat=n_ctx)]

    def enumerated(one, two):
        return sum(
            np.prod(p[x]) * (one(np.eye(TOKENS)[x]) * two(np.eye(TOKENS)[x])).sum(axis=0)
            for x in sequences
        )

    metric = tnsim.Categorical(p)
    check(a, b, metric, enumerated)
    assert tnsim.similarity(a, b, metric).exact


@pytest.mark.slow
def test_a_constant_second_score_costs_no_digits():
    """Linear attention over tokens, on samples, and with weights of any size."""
    rng = generator(15)
    one, two = (linear_attention(rng, TOKENS, 2, 3, 2, 4) for _ in range(2))
    a, b = tnsim.Model([one], n_ctx=2), tnsim.Model([two], n_ctx=2)
    sequences = np.eye(TOKENS)[list(itertools.product(range(TOKENS), repeat=2))]
    p = np.array([0.2, 0.3, 0.5])
    weights = {"tokens": sequences @ p, "samples": np.full((9, 2), 1 / 3)}
    metrics = {"tokens": tnsim.Categorical(p), "samples": tnsim.Empirical(sequences)}
    for name, metric in metrics.items():
        products = [
            np.einsum("n,nsk->", weights[name].prod(axis=1), x(sequences) * y(sequences))
            for x, y in ((a, b), (a, a), (b, b))
        ]
        cosine = products[0] / np.sqrt(products[1] * products[2])
        assert_close(tnsim.similarity(a, b, metric), cosine, scale=1.0, rtol=1e-12)
    metric = tnsim.Gaussian()
    expected = tnsim.similarity(a, b, metric)
    for factor in (1e-200, 1e200):
        larger = tnsim.Model([dataclasses.replace(one, q1=factor * np.asarray(one.q1))], n_ctx=2)
        assert_close(tnsim.similarity(larger, b, metric), expected, scale=1.0, rtol=1e-12)


def test_categorical_refuses():
    rng = generator(8)
    a = tnsim.Model(OVER_TOKENS["transformer"](rng), n_ctx=2)
    with refused(r"smallest of -0\.5 and a sum of 1"):
        tnsim.Categorical(np.array([1.5, -0.5]))
    with refused(r"probabilities of 2 tokens, but the models read 3"):
        tnsim.inner(a, a, tnsim.Categorical(np.array([0.5, 0.5])))
    deeper = tnsim.Model([*a.layers, bilinear(rng, 5, 2, 2)], n_ctx=2)
    assert tnsim.plan(deeper, deeper, tnsim.Categorical()).route == "enumeration"
    with refused("distribution of token sequences"):
        tnsim.inner(*[tnsim.Model([linear(rng, 3, 2)])] * 2, tnsim.Categorical())


def test_constants_are_not_gaussian():
    """f(x) = x written with attention: q and k are the constant 1. E|f|^2 = 2; taking the constant for a Gaussian gives 210."""
    ones, zero = np.ones(1), np.zeros((1, 2))
    layer = tnsim.Attention(
        zero, zero, zero, zero, np.eye(2), np.eye(2), 1, ones, ones, ones, ones, rope_base=None
    )
    model = tnsim.Model([layer], n_ctx=1)
    assert_close(tnsim.inner(model, model), 2.0, rtol=1e-14)


@pytest.mark.slow
def test_symmetries_leave_the_similarity_at_one():
    rng = generator(5)
    layer = attention(rng, 2, 2, 2, 2, 2, True)
    swapped = tnsim.Attention(
        layer.q2, layer.k2, layer.q1, layer.k1, layer.v, layer.o, 2,
        layer.q2_bias, layer.k2_bias, layer.q1_bias, layer.k1_bias, layer.v_bias, layer.o_bias, rope_base=10.0,
    )  # fmt: skip
    heads = np.array([2, 3, 0, 1])
    permuted = tnsim.Attention(
        *(getattr(layer, n)[heads] for n in ("q1", "k1", "q2", "k2", "v")), layer.o[:, heads], 2,
        *(getattr(layer, f"{n}_bias")[heads] for n in ("q1", "k1", "q2", "k2", "v")), layer.o_bias, rope_base=10.0,
    )  # fmt: skip
    scaled = tnsim.Attention(
        3 * layer.q1, layer.k1 / 3, layer.q2, layer.k2, 2 * layer.v, layer.o / 2, 2,
        3 * layer.q1_bias, layer.k1_bias / 3, layer.q2_bias, layer.k2_bias, 2 * layer.v_bias, layer.o_bias, rope_base=10.0,
    )  # fmt: skip
    model = tnsim.Model([layer], n_ctx=3)
    for other in (swapped, permuted, scaled):
        for metric in (tnsim.Gaussian(), tnsim.TreeSymmetric()):
            assert_close(
                tnsim.similarity(model, tnsim.Model([other], n_ctx=3), metric),
                1.0,
                scale=1.0,
                rtol=1e-12,
            )
    assert tnsim.similarity(model, tnsim.Model([swapped], n_ctx=3), tnsim.Frobenius()) < 0.99


def test_what_cannot_be_compared_says_so():
    a, b = pair(ONE_LAYER["plain"], 2)
    with refused("n_ctx=2 and n_ctx=3"):
        tnsim.inner(a, tnsim.Model(b.layers, n_ctx=3))
    with refused("sequences of one length"):
        tnsim.inner(tnsim.Model(a.layers), tnsim.Model(b.layers))
    with refused(r"shape \(2, 2\), found an input of shape \(3, 2\)"):
        a(np.zeros((3, 2)))
    with refused(r"covariance has shape \(3, 3\).*need one of \(4,\), \(4, 4\), \(2,\), \(2, 2\)"):
        tnsim.inner(a, b, tnsim.Gaussian(None, np.eye(3)))
    rng = generator(0)
    mixed = tnsim.Model([bilinear(rng, 2, 3, 3)], n_ctx=2)
    with refused("attention layer of one model meets a bilinear layer"):
        tnsim.inner(a, mixed, tnsim.GaussianClosure())
    with refused("tensors of one order, but the models have degrees 5 and 2"):
        tnsim.inner(a, mixed, tnsim.Symmetric())
    with refused("4 rows, which 3 heads do not divide"):
        tnsim.Attention(*[np.ones((4, 2))] * 4, np.ones((3, 2)), np.ones((2, 3)), 3)
    with refused("heads of even width and a base above 0, found 3"):
        tnsim.Attention(*[np.ones((3, 2))] * 4, np.ones((3, 2)), np.ones((2, 3)), 1)
    with refused("mask must be one of causal, none, found 'future'"):
        tnsim.Attention(*[np.ones((2, 2))] * 6, 1, mask="future")
