"""Small differences of models as models: the same function and tensor, whatever the layers."""

import jax
import mpmath
import numpy as np
import pytest
import rational_oracle
import recursion_oracle
from closeness import LARGEST, assert_close
from oracles import bilinear, linear, moved
from sequence_oracles import attention

import tnsim
from tnsim import Multilinear
from tnsim.models.differences import by_differences
from tnsim.models.model import terms

pytestmark = pytest.mark.usefixtures("diagrams")


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
    "attention": lambda g: [linear(g, 3, 2), attention(g, 2, 2, 2, 2, 3, True), linear(g, 3, 2)],
    "attention over attention": lambda g: [
        attention(g, 3, 2, 2, 2, 3, True),
        attention(g, 3, 2, 2, 2, 2, True),
    ],
    "attention with a skip": lambda g: [
        tnsim.Residual(attention(g, 3, 2, 2, 2, 3, True)),
        bilinear(g, 3, 3, 2, True),
    ],
}


@pytest.mark.parametrize("kind", [*VECTORS, *SEQUENCES])
def test_the_difference_is_the_function(kind, rng):
    """Beside forward passes in fractions, whose difference keeps all digits."""
    n_ctx = 3 if kind in SEQUENCES else None
    a = tnsim.Model((VECTORS | SEQUENCES)[kind](rng), n_ctx=n_ctx)
    b = moved(rng, a, 1e-7)
    x = rng.normal(size=(6, 3) if n_ctx is None else (3, n_ctx, 3))
    (_, one), *others = terms(by_differences(b - a, "float64"))
    assert not others and one.degree == a.degree
    true = (rational_oracle.forward(b, x) - rational_oracle.forward(a, x)).astype(np.float64)
    found = by_differences(b - a, "float64")(x)
    assert_close(found, true, scale=LARGEST, rtol=1e-12)


def turned(rng, model):
    """Every weight larger or smaller by 1e-4 of itself, nearly as far as a small difference goes."""
    move = lambda x: x * (1 + 1e-4 * rng.choice([-1, 1], x.shape)) if np.ndim(x) else x  # noqa: E731
    return jax.tree.map(move, model)


def keeps_its_value(c, a, b, metric):
    """Inner products with b - a are those with b less those with a, and so is the squared norm.

    The right sides subtract inner products with a and b, so their errors are relative to the norms
    of a and b. Neither side is a difference of three squared norms, which would lose s^2 for a
    difference of relative size s.
    """
    diff = b - a
    (_, one), *others = terms(by_differences(diff, "float64"))
    assert not others and one.degree == a.degree
    norms = [np.sqrt(tnsim.inner(model, model, metric)) for model in (a, c, diff)]
    inner = tnsim.inner(c, diff, metric)
    expected = tnsim.inner(c, b, metric) - tnsim.inner(c, a, metric)
    assert_close(inner, expected, scale=norms[0] * norms[1], rtol=1e-12)
    expected = tnsim.inner(b, diff, metric) - tnsim.inner(a, diff, metric)
    assert_close(norms[2] ** 2, expected, scale=norms[0] * norms[2], rtol=1e-12)
    cosine = inner / (norms[1] * norms[2])
    assert_close(tnsim.similarity(c, diff, metric), cosine, scale=1.0, rtol=1e-12)


@pytest.mark.crossing(slow=1)
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
def test_every_metric_keeps_its_value(kind, metric, rng):
    a, c = (tnsim.Model(VECTORS[kind](rng)) for _ in range(2))
    keeps_its_value(c, a, turned(rng, a), metric)


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric",
    [tnsim.Frobenius(), tnsim.TreeSymmetric(), tnsim.Gaussian(), tnsim.Categorical()],
    ids=lambda metric: metric.name,
)
def test_sequences_keep_their_value(metric, rng):
    a, c = (tnsim.Model(SEQUENCES["attention"](rng), n_ctx=2) for _ in range(2))
    keeps_its_value(c, a, turned(rng, a), metric)


def test_what_is_no_small_difference_stays(rng):
    a, b, wide = (tnsim.Model([bilinear(rng, 3, n, 2)]) for n in (4, 4, 5))
    near = moved(rng, a, 1e-6)
    for model in (a, 2.0 * a, b - a, wide - a, near + a, near - 2.0 * a, moved(rng, a, 0.1) - a):
        assert by_differences(model, "float64") is model or terms(model) == terms(
            by_differences(model, "float64")
        )
    assert len(terms(by_differences(moved(rng, a, 0.02) - a, "float32"))) == 1


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("size", [1e-4, 3e-4, 1e-3, 1e-2, 2e-2])
def test_no_size_of_a_difference_loses_half_of_the_digits(size, rng):
    """Differences as models and as combinations, beside recursions in 60 digits.

    The worst are combinations just above eps^(1/8) = 0.011: off by a few eps / 0.011^2 = 2e-12.
    """
    metric = tnsim.GaussianClosure()
    a = tnsim.Model([bilinear(rng, 3, 4, 3, True), bilinear(rng, 3, 4, 3, True)])
    b, c = moved(rng, a, size), moved(rng, a, size)

    def product(x, y):
        pairs = (x, y), (x, a), (a, y), (a, a)
        full, left, right, own = (recursion_oracle.inner(*pair, metric) for pair in pairs)
        return full - left - right + own

    with mpmath.workdps(recursion_oracle.DIGITS):
        cosine = product(b, c) / mpmath.sqrt(product(b, b) * product(c, c))
    assert_close(tnsim.similarity(b - a, c - a, metric), float(cosine), scale=1.0, rtol=1e-9)


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


@pytest.mark.parametrize(
    ("first", "second", "log"),
    [
        ([1.5e308, 0.0], [-1.5e308, 0.0], np.log(3.0) + 308 * np.log(10.0)),
        ([1e300, 1e-300], [1e300, 2e-300], -300 * np.log(10.0)),
    ],
)
def test_differences_at_the_ends_of_the_range_of_floats(first, second, log):
    a, b = (tnsim.Model([tnsim.Linear([row])]) for row in (first, second))
    found = tnsim.log_inner(b - a, b - a, tnsim.Gaussian())
    assert_close(float(found.log), 2 * log, scale=LARGEST, rtol=1e-12)
