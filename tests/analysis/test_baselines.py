"""Baselines against plain formulas, their invariances, and what they refuse."""

import itertools

import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear, linear_cka
from refusals import refused
from sample_runs import SHIPPED

import tnsim
from tnsim.analysis import baselines

OF_POSITIONS = baselines.output_cosine, baselines.mean_cosine
OF_POSITIONS += baselines.js_divergence, baselines.agreement
WITH_DATA = *OF_POSITIONS, baselines.cka


@pytest.fixture
def models(rng):
    return [tnsim.Model([bilinear(rng, 4, 5, 3, True)]) for _ in range(3)]


def test_weight_cosine(models):
    flat = [np.concatenate([x.ravel() for x in vars(m.layers[0]).values()]) for m in models]
    found = baselines.weight_cosine(models)
    wanted = [[p @ q / np.linalg.norm(p) / np.linalg.norm(q) for q in flat] for p in flat]
    assert_close(found.values, np.array(wanted))
    assert found.attrs["needs_data"] == 0 and found.a.values.tolist() == [0, 1, 2]


@pytest.mark.slow
def test_weight_cosine_of_modules_that_are_no_models():
    """By their parameters, each once, as of networks with softmax and max pooling."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    def network(width=4):
        tied = nn.Linear(width, width)
        layers = nn.Linear(3, width), nn.Softmax(-1), tied, nn.ReLU(), tied, nn.Softmax(-1)
        return nn.Sequential(*layers)

    nets = [network() for _ in range(2)]
    arrays = ([x.detach().double().numpy().ravel() for x in net.parameters()] for net in nets)
    one, two = map(np.concatenate, arrays)
    wanted = one @ two / np.sqrt((one @ one) * (two @ two))
    found = baselines.weight_cosine({"a": nets[0], "b": nets[1]})
    assert found.a.values.tolist() == ["a", "b"]
    assert_close(found.values[0, 1], wanted, scale=1.0, rtol=1e-12)
    with refused(r"0\.weight of shape \(5, 3\) and \(4, 3\)"):
        baselines.weight_cosine([nets[0], network(5)])


def test_weight_cosine_says_that_it_is_blind_to_residuals(rng):
    layer = bilinear(rng, 3, 4, 3)
    rules = ((1.0, 1.0), (0.2, 0.8))
    found = baselines.weight_cosine([tnsim.Model([tnsim.Residual(layer, *r)]) for r in rules])
    assert_close(found.values[0, 1], 1)
    assert "skip and scale of residuals" in found.attrs["invariant_to"]


def test_weight_slices(rng, models):
    """Rows of the last layer with their biases, under residuals as well."""
    found = baselines.weight_slices(models)
    assert found.dims == ("a", "b", "output") and found.shape == (3, 3, 3)
    rows = [np.column_stack([m.layers[0].down, m.layers[0].down_bias]) for m in models]
    first, second = rows[0][2], rows[1][2]
    expected = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert_close(float(found[0, 1, 2]), expected)
    assert np.all(np.diagonal(found.values)) and "all layers below" in found.attrs["invariant_to"]
    heads = [tnsim.Linear(rng.normal(size=(4, 4))) for _ in range(2)]
    plain, inside = (
        [tnsim.Model([bilinear(rng, 3, 5, 4), wrapped(head)]) for head in heads]
        for wrapped in (lambda head: head, tnsim.Residual)
    )
    assert np.array_equal(baselines.weight_slices(plain), baselines.weight_slices(inside))


def test_cosines_of_outputs(rng, models):
    """Of each input, against a loop over inputs, and of all inputs at once."""
    x = rng.normal(size=(30, 4))
    p, q = (np.asarray(m(x)) for m in models[:2])
    cosines = [u @ v / np.linalg.norm(u) / np.linalg.norm(v) for u, v in zip(p, q, strict=True)]
    assert_close(baselines.mean_cosine(models, x)[0, 1], np.mean(cosines))
    whole = (p * q).sum() / np.linalg.norm(p) / np.linalg.norm(q)
    assert_close(baselines.output_cosine(models, x)[0, 1], whole)


@pytest.mark.parametrize("n", [6, 50])  # fewer samples than entries of a feature, and more
def test_cka_against_kernels(rng, n):
    wide = [tnsim.Model([bilinear(rng, 4, 5, 9)]) for _ in range(2)]
    x = rng.normal(size=(n, 4)) + 1
    p, q = (np.asarray(m(x)) for m in wide)
    assert_close(baselines.cka(wide, x)[0, 1], linear_cka(p, q))
    h = np.eye(n) - 1 / n
    k, o = h @ p @ p.T @ h, h @ q @ q.T @ h
    wanted = (k * o).sum() / np.linalg.norm(k) / np.linalg.norm(o)
    assert_close(baselines.cka(wide, x, debiased=False)[0, 1], wanted)


def test_cka_of_outputs_of_any_width(rng):
    """Fewer coordinates than inputs, more, and more than are multiplied at once."""
    maps = [rng.normal(size=(4, width)) + 1 for width in (3, 20, 9001)]
    x = rng.normal(size=(8, 4)) + 1
    functions = [lambda x, w=w: np.tanh(x @ w) for w in maps]
    outputs = [f(x) - f(x).mean(0) for f in functions]
    wanted = [[linear_cka(f, g) for f in outputs] for g in outputs]
    assert_close(baselines.cka(functions, x).values, np.array(wanted), scale=1.0, rtol=1e-12)
    with refused("model 1 gives the same output for all inputs"):
        baselines.cka([functions[0], lambda x: np.full((len(x), 9), 0.1)], x)


def test_debiased_cka_of_unrelated_outputs_is_zero_by_average(rng):
    """Against a model whose inputs are relabelled in all n! ways, which makes the two unrelated.

    Laws that hold for every pair of models: debiased kernels have zero diagonals and row sums, and
    average to zero over the relabellings. As they form one irreducible representation of the
    permutations, of dimension n (n - 3) / 2, their squared cosines average to the inverse of it.
    """
    n, width = 5, 300
    first, second = rng.normal(size=(2, width, n))
    orders = itertools.permutations(range(n))
    relabelled = [tnsim.Model([tnsim.Linear(second[:, list(order)])]) for order in orders]
    found = baselines.cka([tnsim.Model([tnsim.Linear(first)]), *relabelled], np.eye(n))
    assert_close(found[0, 1:].mean(), 0, scale=1.0, rtol=1e-10)
    assert_close(np.square(found[0, 1:]).mean(), 2 / (n * (n - 3)))
    assert found.attrs["debiased"] == 1


def test_js_divergence(rng, models):
    x = rng.normal(size=(30, 4))

    def softmax(y):
        e = np.exp(y)
        return e / e.sum(1, keepdims=True)

    p, q = (softmax(np.asarray(m(x))) for m in models[:2])
    middle = (p + q) / 2
    expected = ((p * np.log(p / middle)).sum(1) + (q * np.log(q / middle)).sum(1)).mean() / 2
    found = baselines.js_divergence(models, x)
    assert_close(found[0, 1], expected)
    assert found.attrs["units"] == "nats"
    assert np.all(np.diag(found) == 0) and found.max() <= np.log(2)
    ends = [1000.0, -1000.0], [-1000.0, 1000.0]
    certain = [tnsim.Model([tnsim.Linear(np.zeros((2, 4)), end)]) for end in ends]
    assert_close(baselines.js_divergence(certain, x)[0, 1], np.log(2))


def test_agreement(rng, models):
    x = rng.normal(size=(30, 4))
    choices = [np.asarray(m(x)).argmax(1) for m in models]
    assert baselines.agreement(models, x).values.tolist() == [
        [np.mean(c == d) for d in choices] for c in choices
    ]


def test_sequences(rng, models):
    """Positions: more samples of a prediction, features of a representation, terms of a norm."""
    x = rng.normal(size=(20, 3, 4))
    flat = x.reshape(60, 4)
    for measure in OF_POSITIONS:
        assert_close(measure(models, x).values, measure(models, flat).values)
    outputs = [np.asarray(m(x)) for m in models[:2]]
    assert_close(baselines.cka(models, x)[0, 1], linear_cka(*outputs))


def test_labels_and_batches(monkeypatch):
    series = tnsim.load(SHIPPED)[:3]
    whole = baselines.cka(series, 300)
    assert whole.dims == ("a", "b") and whole.b.values.tolist() == [0, 100, 200]
    monkeypatch.setattr(baselines, "BATCH", 128)
    assert_close(baselines.cka(series, 300).values, whole.values, rtol=1e-12)
    named = baselines.agreement(series, 300, names=["x", "y", "z"])
    assert named.a.values.tolist() == ["x", "y", "z"]
    for seed in (0, 1):
        drawn = np.random.default_rng(seed).normal(size=(50, series[0].d_in))
        found = baselines.output_cosine(series, 50, seed=seed)
        assert np.array_equal(found, baselines.output_cosine(series, drawn))


def test_a_difference_of_models_has_outputs_but_no_weights(models):
    difference = models[0] - models[1]
    assert baselines.output_cosine([difference, models[0]], 100)[0, 1] > 0
    with refused("model 1 is a Combination: the cosine of weights is for models"):
        baselines.weight_cosine([models[0], difference])


def test_refusals(rng, models):
    other = tnsim.Model([bilinear(rng, 4, 6, 3, True)])
    zero = tnsim.Model([tnsim.Linear(np.zeros((3, 4)))])
    constant = tnsim.Model([tnsim.Linear(np.zeros((3, 4)), [0.1, 0.2, 0.7])])
    huge = tnsim.Model([tnsim.Bilinear(*[1e200 * np.ones((3, 4))] * 2, np.ones((3, 3)))])
    wide, agreement = tnsim.Model([bilinear(rng, 5, 2, 3)]), baselines.agreement
    for message, measure, *given in [
        ("model 1 has other layers than model 0", baselines.weight_cosine, [models[0], other]),
        ("model 0 has zero weights only", baselines.weight_cosine, [zero]),
        ("model 0 writes output 0 with zero weights only", baselines.weight_slices, [zero]),
        ("zero in row 0 .* leave that input out", baselines.mean_cosine, [models[0], zero], 10),
        ("1 gives zero on all inputs", baselines.output_cosine, [models[0], zero], 10),
        ("at least 4 inputs .* found 3", baselines.cka, models, 3),
        ("1 gives the same output for all inputs", baselines.cka, [models[0], constant], 50),
        ("(inf|nan) in output 0 of input 0: a float range", agreement, [models[0], huge], 10),
        ("at least one input is needed, found n = 0", agreement, models, 0),
        (r"shape \(n, 4\); found shape \(5, 3\)", agreement, models, np.ones((5, 3))),
        ("inputs are not finite, first in row 0", agreement, models, np.full((5, 4), np.nan)),
        ("different inputs: 4 and 5", agreement, [models[0], wide], 5),
        ("expected a tnsim Model", agreement, [models[0], 3.0], 5),
    ]:
        with refused(message):
            measure(*given)
    with refused("1 names were given for 3 models"):
        agreement(models, 5, names=["x"])


@pytest.mark.parametrize("measure", WITH_DATA)
def test_every_matrix_says_what_it_is(measure, models):
    attrs = measure(models, 20).attrs
    assert attrs["needs_data"] == 1 and attrs["invariant_to"] and attrs["formula"]
    assert (attrs["samples"], attrs["seed"], attrs["inputs"]) == (20, 0, "standard normal")


def language_models(rng, count, n_ctx):
    """Models of attention over 6 tokens, as the paper's: a table, a residual layer, logits."""
    models = []
    for _ in range(count):
        attention = tnsim.Attention(*rng.normal(size=(6, 4, 4)), 2)
        layers = [
            tnsim.Linear(rng.normal(size=(4, 6))),
            tnsim.Residual(attention, 1.0, 0.35),
            tnsim.Linear(rng.normal(size=(6, 4))),
        ]
        models.append(tnsim.Model(layers, n_ctx=n_ctx))
    return models


@pytest.mark.parametrize("baseline", WITH_DATA)
def test_token_ids_are_one_hot_vectors(rng, baseline):
    models = language_models(rng, 2, 3)
    models.append(models[0] - 0.5 * models[1])
    ids = rng.integers(0, 6, size=(10, 3))
    by_ids = baseline(models, ids)
    assert_close(by_ids.values, baseline(models, np.eye(6)[ids]).values, rtol=1e-12)


def test_token_ids_that_do_not_fit_are_refused(rng):
    models = language_models(rng, 2, 3)
    with refused("6 tokens, counted from 0"):
        baselines.output_cosine(models, np.full((5, 3), 6))
    with refused(r"of shape \(n, 3\), found \(n, 4\)"):
        baselines.output_cosine(models, np.zeros((5, 4), int))


def test_integers_are_numbers_to_models_of_vectors(models, rng):
    x = rng.integers(0, 5, size=(10, 4))
    assert (baselines.output_cosine(models, x) == baselines.output_cosine(models, x * 1.0)).all()
