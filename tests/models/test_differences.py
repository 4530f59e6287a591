"""Small differences of models as models: the same function and tensor, whatever the layers."""

import jax
import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear, linear

import tnsim
from tnsim.compare import products
from tnsim.models.differences import by_differences
from tnsim.models.layers import Multilinear
from tnsim.models.model import terms


def attention(rng, d_in, d_out):
    weights = [rng.normal(size=(4, d_in)) for _ in range(5)]
    biases = {"q1_bias": rng.normal(size=4), "o_bias": rng.normal(size=d_out)}
    return tnsim.Attention(*weights, rng.normal(size=(d_out, 4)), 2, **biases)


VECTORS = {
    "linear": lambda g: [linear(g, 3, 4, True), tnsim.Residual(linear(g, 4, 4), 0.5, 0.7)],
    "bilinear": lambda g: [bilinear(g, 3, 4, 2)],
    "cubic": lambda g: [
        Multilinear(
            [g.normal(size=(4, 3)) for _ in range(3)], g.normal(size=(2, 4)), [g.normal(size=4)] * 3
        )
    ],
    "two": lambda g: [bilinear(g, 3, 4, 2), linear(g, 2, 2), bilinear(g, 2, 3, 2)],
    "biases": lambda g: [bilinear(g, 3, 3, 2, True), bilinear(g, 2, 3, 2, True)],
    "skips": lambda g: [
        tnsim.Residual(bilinear(g, 3, 4, 3, True), 0.7, 0.3),
        tnsim.Residual(bilinear(g, 3, 3, 3)),
    ],
}
SEQUENCES = {
    "attention": lambda g: [linear(g, 3, 2), attention(g, 2, 3), linear(g, 3, 2)],
    "attention over attention": lambda g: [attention(g, 3, 3), attention(g, 3, 2)],
    "attention with a skip": lambda g: [
        tnsim.Residual(attention(g, 3, 3)),
        bilinear(g, 3, 3, 2, True),
    ],
}


def moved(rng, model, size):
    def move(x):
        return x * (1 + size * rng.normal(size=x.shape)) if np.ndim(x) else x

    return jax.tree.map(move, model)


def long(model):
    return jax.tree.map(lambda x: np.asarray(x, np.longdouble) if np.ndim(x) else x, model)


@pytest.mark.parametrize("kind", [*VECTORS, *SEQUENCES])
def test_the_difference_is_the_function(kind, rng):
    """Beside forward passes in extended precision, of which 1e-7 leaves twelve digits."""
    n_ctx = 3 if kind in SEQUENCES else None
    a = tnsim.Model((VECTORS | SEQUENCES)[kind](rng), n_ctx=n_ctx)
    b = moved(rng, a, 1e-7)
    x = rng.normal(size=(50, 3) if n_ctx is None else (50, n_ctx, 3))
    (_, one), *others = terms(by_differences(b - a, "float64"))
    assert not others and one.degree == a.degree
    true = long(b)(x.astype(np.longdouble)) - long(a)(x.astype(np.longdouble))
    found = by_differences(b - a, "float64")(x)
    assert_close(found, true, scale=np.abs(true).max(), rtol=1e-11)


def expanded(monkeypatch, verb, *arguments):
    """What bilinearity gives."""
    with monkeypatch.context() as context:
        context.setattr(products, "by_differences", lambda model, dtype: model)
        return verb(*arguments)


@pytest.mark.parametrize(
    "metric",
    [
        tnsim.Frobenius(),
        tnsim.TreeSymmetric(),
        tnsim.Symmetric(),
        tnsim.Gaussian(),
        tnsim.GaussianClosure(np.array([0.3, -0.2, 0.5]), np.array([1.0, 2.0, 0.5])),
    ],
    ids=lambda metric: metric.name,
)
@pytest.mark.parametrize("kind", VECTORS)
def test_every_metric_keeps_its_value(kind, metric, rng, monkeypatch):
    a, c = (tnsim.Model(VECTORS[kind](rng)) for _ in range(2))
    diff = moved(rng, a, 2e-5) - a
    one = tnsim.similarity(c, diff, metric)
    assert_close(
        one,
        expanded(monkeypatch, tnsim.similarity, c, diff, metric),
        scale=1.0,
        rtol=1e-5,
        limited_by="the expansion by bilinearity, which loses the digits that differences keep",
    )


@pytest.mark.parametrize(
    "metric",
    [tnsim.Frobenius(), tnsim.TreeSymmetric(), tnsim.Gaussian(), tnsim.Categorical()],
    ids=lambda metric: metric.name,
)
def test_sequences_keep_their_value(metric, rng, monkeypatch):
    a, c = (tnsim.Model(SEQUENCES["attention"](rng), n_ctx=2) for _ in range(2))
    diff = moved(rng, a, 2e-5) - a
    one = tnsim.slices(c, diff, metric)
    other = expanded(monkeypatch, tnsim.slices, c, diff, metric)
    assert_close(
        one,
        other,
        scale=1.0,
        rtol=1e-6,
        limited_by="the expansion by bilinearity, which loses the digits that differences keep",
    )


def test_what_is_no_small_difference_stays(rng):
    a, b, wide = (tnsim.Model([bilinear(rng, 3, n, 2)]) for n in (4, 4, 5))
    near = moved(rng, a, 1e-6)
    for model in (a, 2.0 * a, b - a, wide - a, near + a, near - 2.0 * a, moved(rng, a, 1e-3) - a):
        assert by_differences(model, "float64") is model or terms(model) == terms(
            by_differences(model, "float64")
        )
    assert len(terms(by_differences(moved(rng, a, 1e-3) - a, "float32"))) == 1


def test_several_differences_at_once(rng):
    """Coefficients of near models that do not quite cancel leave one term of full size."""
    a, far = (tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(2))
    whole = moved(rng, a, 1e-6) - 1.0000001 * a + 0.5 * far - 0.5 * moved(rng, far, 1e-7)
    coefficients = sorted(abs(c) for c, _ in terms(by_differences(whole, "float64")))
    assert len(coefficients) == 3 and coefficients[-1] < 1e-5


def test_equal_layers_are_not_doubled(rng):
    layers = [bilinear(rng, 3, 4, 3), bilinear(rng, 3, 4, 2), linear(rng, 2, 2)]
    a = tnsim.Model(layers)
    b = tnsim.Model([*layers[:2], moved(rng, layers[2], 1e-6)])
    ((_, one),) = terms(by_differences(b - a, "float64"))
    assert one.layers[:2] == a.layers[:2] and one.parameters == a.parameters


def test_traces_are_left_alone(rng):
    a = tnsim.Model([bilinear(rng, 3, 4, 2)])
    b = moved(rng, a, 1e-6)
    seen = []
    jax.make_jaxpr(lambda m: seen.append(by_differences(b - m, "float64")))(a)
    assert len(terms(seen[0])) == 2
