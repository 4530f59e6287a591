"""Constants beside states of any size: against recursions with unlimited exponents."""

import warnings

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import recursion_oracle as oracle
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import moved

import tnsim

METRICS = {
    "tree": tnsim.TreeSymmetric(),
    "closure": tnsim.GaussianClosure(),
    "closure of a far mean": tnsim.GaussianClosure([2.0**20, 1.0], [1.0, 2.0**-30]),
}
EPS = {"float64": 2.0**-52, "float32": 2.0**-23}
MARGIN = 130
"""The error of a cosine is at most this many roundings, see `roundings`."""


def constant_model(depth, n_ctx=None, width=1):
    """Every weight and every bias is 2: the state soon is far larger than the constant."""
    two = np.full((width, width), 2.0)
    layer = tnsim.Bilinear(two, two, two, two[0], two[0], two[0])
    return tnsim.Model([layer] * depth, n_ctx)


def layer(rng, weights, biases, spread, kind, width=2):
    """A layer with weights and biases of given sizes, and rows of sizes 2^-spread to 2^spread."""

    def matrix(rows, columns):
        powers = rng.integers(-spread, spread + 1, (rows, 1))
        return np.ldexp(weights * rng.normal(size=(rows, columns)), powers)

    def vector(rows):
        return biases * rng.normal(size=rows)

    if kind == "linear":
        return tnsim.Linear(matrix(width, width), vector(width))
    if kind == "cubic":
        legs = [matrix(width, width) for _ in range(3)]
        return tnsim.Multilinear(legs, matrix(width, width), [vector(width)] * 3, vector(width))
    core = tnsim.Bilinear(
        matrix(width + 1, width),
        matrix(width + 1, width),
        matrix(width, width + 1),
        vector(width + 1),
        vector(width + 1),
        vector(width),
    )
    if kind == "bilinear":
        return core
    skip, scale = 2.0 ** rng.integers(-10, 11, 2)
    return tnsim.Residual(core, skip, scale)


def model(seed, depth, kinds, weights, biases, spread, n_ctx=None):
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(depth):
        layers.append(layer(rng, weights, biases, spread, rng.choice(kinds)))
    return tnsim.Model(layers, n_ctx)


def near(a, seed):
    """The same layers with every weight changed by a third of itself."""
    return moved(np.random.default_rng(seed), a, 0.3)


def rounding(a, dtype):
    """Rounding of a polynomial, which grows with its degree."""
    return MARGIN * EPS[dtype] * a.degree


def roundings(a, b, metric):
    """The number of roundings in a cosine of two polynomials: the degree, and more where the recursion loses more.

    Hidden units of random biases cancel by chance, which no unit can mend. Taken from 60 digits.
    """
    return max(a.degree, oracle.condition(a, b, metric, np.random.default_rng(0)))


def check(value, a, b, metric, dtype):
    expected = oracle.cosine(a, b, metric)
    rtol = MARGIN * EPS[dtype] * roundings(a, b, metric)
    assert_close(float(value), expected, scale=1.0, rtol=rtol, limited_by=dtype)


sizes = st.integers(-40, 40)


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("kinds", [["bilinear"], ["residual"], ["linear", "bilinear", "residual"]])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", EPS)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**20),
    depth=st.sampled_from([1, 2, 3, 5, 8, 12, 16]),
    weights=st.sampled_from([-30, -3, 0, 3, 30]),
    biases=sizes,
    spread=st.sampled_from([0, 1, 10, 40]),
)
def test_constants_of_any_size(metric, dtype, kinds, seed, depth, weights, biases, spread):
    """Each bias is found beside the states, from 2^-40 to 2^40 times as large, at any depth."""
    a = model(seed, depth, kinds, 2.0**weights, 2.0**biases, spread)
    b = near(a, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tnsim.PrecisionWarning)
        try:
            value = tnsim.similarity(a, b, METRICS[metric], dtype=dtype)
        except tnsim.errors.ResultError:
            return  # the bound says that no digit is left
    if not value_is_unsure(a, b, METRICS[metric], dtype):
        check(value, a, b, METRICS[metric], dtype)


def value_is_unsure(a, b, metric, dtype):
    """Whether a warning tells of digits that are lost."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tnsim.similarity(a, b, metric, dtype=dtype)
    return any(issubclass(warning.category, tnsim.PrecisionWarning) for warning in told)


@pytest.mark.sampled(quick=0)
@pytest.mark.filterwarnings("ignore::tnsim.PrecisionWarning")
@pytest.mark.parametrize("dtype", EPS)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**20), depth=st.sampled_from([1, 2, 4]), biases=sizes)
def test_products_of_three_legs(dtype, seed, depth, biases):
    a = model(seed, depth, ["cubic"], 1.0, 2.0**biases, 3)
    b = near(a, seed)
    check(tnsim.similarity(a, b, METRICS["tree"], dtype=dtype), a, b, METRICS["tree"], dtype)


@pytest.mark.parametrize("depth", [5, 3])
@pytest.mark.parametrize("dtype", EPS)
def test_a_large_state_is_not_zero(depth, dtype):
    """Five layers of weights and biases 2: the inner product was 0.0, called exact."""
    a = constant_model(depth)
    true = oracle.inner(a, a, tnsim.TreeSymmetric())
    # Layers 2 u u + 2 e e of the lifted state, u = (2, 2) and e = (1, 0), in whole numbers: products of the state
    # with the constant and with itself.
    with_one, with_itself = 0, 1
    for _ in range(depth):
        legs = 4 * (1 + 2 * with_one + with_itself), 2 * (1 + with_one)
        with_one, with_itself = 2 * legs[1] ** 2 + 2, 4 * legs[0] ** 2 + 8 * legs[1] ** 2 + 4
    assert_close(float(true), float(with_itself), rtol=1e-14)
    value = tnsim.log_inner(a, a, tnsim.TreeSymmetric(), dtype=dtype)
    assert value.sign == 1
    log = float(mpmath.log(true))
    assert_close(float(value.log), log, scale=1.0, rtol=rounding(a, dtype), limited_by=dtype)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("metric", ["tree", "closure"])
@pytest.mark.parametrize("size", [2.0**-8, 1.0, 2.0**40])
def test_states_without_constants_at_any_depth(size, metric):
    """Degree 4,096, moments of 2^10,000 and more: only the scales of the stages keep them in range."""
    a, b = (
        tnsim.Model([tnsim.Bilinear(*(size * rng.normal(size=(3, 2, 2)))) for _ in range(12)])
        for rng in map(np.random.default_rng, (1, 2))
    )
    expected = oracle.cosine(a, b, METRICS[metric])
    assert_close(tnsim.similarity(a, b, METRICS[metric]), expected, scale=1.0, rtol=1e-9)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("metric", ["tree", "closure"])
@pytest.mark.parametrize("depth", [7, 8])
def test_ordinary_deep_networks(depth, metric):
    """Weights normal / sqrt(fan-in), biases N(0, 1): 10 of 12 inner products were 0.0 at depth 8."""
    for seed in range(6):
        rng = np.random.default_rng(seed)

        def layers(rng=rng):
            for _ in range(depth):
                weights = [rng.normal(size=(4, 4)) / 2 for _ in range(3)]
                yield tnsim.Bilinear(*weights, *rng.normal(size=(3, 4)))

        a, b = tnsim.Model(layers()), tnsim.Model(layers())
        true = oracle.inner(a, b, METRICS[metric])
        found = tnsim.log_inner(a, b, METRICS[metric])
        size = mpmath.sqrt(
            oracle.inner(a, a, METRICS[metric]) * oracle.inner(b, b, METRICS[metric])
        )
        value = found.sign * mpmath.exp(mpmath.mpf(float(found.log)))
        rtol = rounding(a, "float64")
        assert_close(float(value / size), float(true / size), scale=1.0, rtol=rtol)


@pytest.mark.crossing(quick=0)
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("metric", METRICS)
def test_all_pairs(metric, dtype):
    first = model(0, 3, ["bilinear", "linear"], 1.0, 1.0, 2)
    models = [first, near(first, 1), near(first, 2)]
    matrix = tnsim.pairwise(models, METRICS[metric], dtype=dtype).similarity.values
    for i, j in np.ndindex(3, 3):
        check(matrix[i, j], models[i], models[j], METRICS[metric], dtype)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("n_ctx", [None, 2])
def test_all_pairs_of_models_with_large_states(n_ctx, dtype):
    """Over sequences the matrix was NaN, with warnings of NumPy's."""
    a, b = constant_model(5, n_ctx, 2), constant_model(5, n_ctx, 2)
    b = tnsim.Model([*b.layers[:-1], near(b, 0).layers[-1]], n_ctx)
    metric = tnsim.GaussianClosure()
    matrix = tnsim.pairwise([a, b], metric, dtype=dtype).similarity.values
    true = oracle.cosine(a, b, metric)
    expected = [[1, true], [true, 1]]
    assert_close(matrix, expected, scale=1.0, rtol=rounding(a, dtype), limited_by=dtype)


@pytest.mark.full
@pytest.mark.parametrize("metric", ["tree", "closure", "closure of a far mean"])
def test_traced(metric):
    """Inside a trace units follow the states as well, as constants to derivatives."""
    a = model(0, 4, ["bilinear"], 1.0, 2.0**30, 2)
    b = near(a, 1)
    with jax.enable_x64(True):
        one, two = (jax.tree.map(jnp.asarray, m) for m in (a, b))
        value = jax.jit(lambda x, y: tnsim.similarity(x, y, METRICS[metric]))(one, two)
    check(value, a, b, METRICS[metric], "float64")


@pytest.mark.filterwarnings("ignore::tnsim.PrecisionWarning")
@pytest.mark.parametrize("power", [-60, 60])
def test_hidden_units_in_other_units(power):
    """A hidden unit that is 2^k times as large, and counts 2^-k times, changes nothing."""
    a = model(0, 3, ["bilinear"], 1.0, 4.0, 0)
    layers = list(a.layers)
    unit = np.array([power, 0, -power])
    first = layers[1]
    layers[1] = tnsim.Bilinear(
        np.ldexp(first.left, unit[:, None]),
        first.right,
        np.ldexp(first.down, -unit),
        np.ldexp(first.left_bias, unit),
        first.right_bias,
        first.down_bias,
    )
    for metric in METRICS.values():
        for dtype, eps in EPS.items():
            value = tnsim.similarity(a, tnsim.Model(layers), metric, dtype=dtype)
            assert_close(float(value), 1.0, rtol=8 * MARGIN * eps, limited_by=dtype)


@pytest.mark.slow
def test_units_follow_the_metric():
    """A metric with inputs of another size gives other units, and is not taken for the first."""
    a = model(0, 3, ["bilinear"], 1.0, 1.0, 0)
    b = near(a, 1)
    for variance in (1.0, 2.0**60, 2.0**-60, 1.0):
        metric = tnsim.GaussianClosure(cov=np.full(2, variance))
        for dtype in EPS:
            check(tnsim.similarity(a, b, metric, dtype=dtype), a, b, metric, dtype)
