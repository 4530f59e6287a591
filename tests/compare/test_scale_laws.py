"""Laws of scale: weights times powers of two change no cosine, inner products by a known power."""

import functools
import itertools

import cases
import jax
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import bilinear, linear
from refusals import refused
from sequence_oracles import attention

import tnsim
from tnsim.models.arrays import SparseMatrix
from tnsim.models.scaling import scaled

LAWS = settings(max_examples=6)
RANGES = {"float64": (900, 1e-12), "float32": (100, 1e-5)}


# layers without constants: multiplying any array multiplies the function
HOMOGENEOUS = {
    "linear": lambda g: ([linear(g, 3, 4), linear(g, 4, 2)], None),
    "bilinear": lambda g: ([linear(g, 3, 2), bilinear(g, 2, 4, 3), linear(g, 3, 2)], None),
    "two bilinear": lambda g: ([bilinear(g, 3, 4, 2), bilinear(g, 2, 3, 2)], None),
    "attention": lambda g: ([attention(g, 2, 2, 2, 1, 3), linear(g, 3, 2)], 2),
    "bilinear, then attention": lambda g: (
        [bilinear(g, 2, 3, 2), attention(g, 2, 1, 2, 1, 2, rope_base=None)],
        2,
    ),
}
# layers with biases and skips: bonds may change their unit, and the output may
AFFINE = {
    "linear": lambda g: ([linear(g, 3, 4, True), linear(g, 4, 2, True)], None),
    "bilinear": lambda g: ([linear(g, 3, 2, True), bilinear(g, 2, 4, 3, True)], None),
    "residual": lambda g: (
        [linear(g, 3, 2), tnsim.Residual(bilinear(g, 2, 4, 2, True), 0.7, 0.3), linear(g, 2, 2)],
        None,
    ),
    "attention": lambda g: ([linear(g, 2, 2), attention(g, 2, 2, 2, 1, 3, True)], 2),
    "transformer": lambda g: (
        [
            linear(g, 2, 3, True),
            tnsim.Residual(attention(g, 3, 1, 2, 2, 3, True, rope_base=None), 1.0, 0.35),
            tnsim.Residual(bilinear(g, 3, 2, 3, True)),
            linear(g, 3, 2, True),
        ],
        2,
    ),
}
METRICS = {"tree": tnsim.TreeSymmetric(), "closure": tnsim.GaussianClosure()}


def model(make, seed, dtype="float64"):
    layers, n_ctx = make(np.random.default_rng(seed))
    cast = [jax.tree.map(lambda x: np.asarray(x, dtype) if np.ndim(x) else x, y) for y in layers]
    return tnsim.Model(cast, n_ctx)


def times(layer, k):
    """Every array of a layer, biases too, times 2**k."""
    return jax.tree.map(lambda x: np.ldexp(x, k) if np.ndim(x) else x, layer)


def legs_times(layer, k):
    """A layer that reads its input in another unit: W (2**k x) + b."""
    if isinstance(layer, tnsim.Residual):
        return tnsim.Residual(legs_times(layer.layer, k), np.ldexp(layer.skip, k), layer.scale)
    inputs = ("weight", "left", "right", "q1", "k1", "q2", "k2", "v")
    fields = {name: np.ldexp(x, k if name in inputs else 0) for name, x in arrays(layer).items()}
    if isinstance(layer, tnsim.Attention):
        return tnsim.Attention(
            **fields, n_heads=layer.n_heads, mask=layer.mask, rope_base=layer.rope_base
        )
    return type(layer)(**fields)


def arrays(layer):
    return {name: x for name, x in vars(layer).items() if isinstance(x, np.ndarray)}


@functools.cache
def cosines(make, metric, dtype):
    """Of the models with seeds 0 and 1, over all outputs and per output."""
    a, c = (model(make, seed, dtype) for seed in (0, 1))
    return [verb(a, c, METRICS[metric], dtype=dtype) for verb in (tnsim.similarity, tnsim.slices)]


def check(b, make, metric, dtype, tolerance):
    """b is the first model up to a positive factor."""
    c = model(make, 1, dtype)
    for verb, expected in zip(
        (tnsim.similarity, tnsim.slices), cosines(make, metric, dtype), strict=True
    ):
        found = verb(b, c, METRICS[metric], dtype=dtype)
        assert_close(found, expected, scale=1.0, rtol=tolerance, limited_by=dtype)


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("name, metric", itertools.product(HOMOGENEOUS, METRICS))
@LAWS
@given(data=st.data())
def test_any_layer_and_all_layers(name, metric, dtype, data):
    most, tolerance = RANGES[dtype]
    powers = st.integers(-most, most)
    a = model(HOMOGENEOUS[name], 0, dtype)
    if data.draw(st.booleans()):
        scales = [data.draw(powers)] * len(a.layers)
    else:
        scales = [data.draw(powers) for _ in a.layers]
    b = tnsim.Model(map(times, a.layers, scales), a.n_ctx)
    check(b, HOMOGENEOUS[name], metric, dtype, tolerance)


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("name, metric", itertools.product(AFFINE, METRICS))
@LAWS
@given(data=st.data())
def test_units_of_bonds_with_constants(name, metric, dtype, data):
    """A state in other units is the same model, whatever constants are added to it."""
    most, tolerance = RANGES[dtype]
    a = model(AFFINE[name], 0, dtype)
    layers = list(a.layers)
    n = data.draw(st.integers(0, len(layers) - 1))
    k = data.draw(st.integers(-most, most))
    if isinstance(layers[n], tnsim.Residual):
        inner = layers[n]
        layers[n] = tnsim.Residual(inner.layer, np.ldexp(inner.skip, k), np.ldexp(inner.scale, k))
    else:
        layers[n] = output_times(layers[n], k)
    if n + 1 < len(layers):
        layers[n + 1] = legs_times(layers[n + 1], -k)
    check(tnsim.Model(layers, a.n_ctx), AFFINE[name], metric, dtype, tolerance)


def moments(g, form):
    """A mean or None, and a covariance, of two coordinates."""
    mean = None if form == "centred" else g.normal(size=2)
    root = g.normal(size=(2, 3))
    return mean, np.exp(g.normal(size=2)) if form == "diagonal" else root @ root.T / 3


def in_units(mean, cov, k):
    """The moments of the same inputs, with coordinates 2**k times as large."""
    by_both = 2 * k if cov.ndim == 1 else k[:, None] + k
    return None if mean is None else np.ldexp(mean, k), np.ldexp(cov, by_both)


def gaussian(make, form):
    def metrics(g, k):
        mean, cov = moments(g, form)
        return make(mean, cov), make(*in_units(mean, cov, k))

    return metrics


def data(g, k):
    inputs = g.normal(size=(9, 2))
    return tnsim.Empirical(inputs), tnsim.Empirical(np.ldexp(inputs, k))


def products(g, k):
    nodes, weights = g.normal(size=(2, 6)), np.full(6, 1 / 6)
    near, far = (
        tnsim.Product([(np.ldexp(x, n), weights) for x, n in zip(nodes, powers, strict=True)])
        for powers in (0 * k, k)
    )
    return near, far


# every way in which inputs are read: plans of vectors, lifted and not, of sequences and of whole
# trees, points of data, of products and of quadrature
READ = {
    "vectors": ("bilinear", gaussian(tnsim.Gaussian, "centred")),
    "with constants": ("affine", gaussian(tnsim.GaussianClosure, "full")),
    "with a stream": ("residual", gaussian(tnsim.GaussianClosure, "diagonal")),
    "whole trees": ("two bilinear", gaussian(tnsim.Gaussian, "centred")),
    "quadrature": ("two bilinear", gaussian(tnsim.Gaussian, "full")),
    "data": ("affine", data),
    "products": ("bilinear", products),
    "sequences": ("attention", gaussian(tnsim.GaussianClosure, "full")),
}
READERS = {
    "bilinear": lambda g: ([bilinear(g, 2, 3, 2)], None),
    "affine": lambda g: ([bilinear(g, 2, 3, 2, True)], None),
    "residual": lambda g: ([tnsim.Residual(bilinear(g, 2, 3, 2, True), 0.7, 0.3)], None),
    "two bilinear": lambda g: ([bilinear(g, 2, 3, 2), bilinear(g, 2, 2, 2)], None),
    "attention": lambda g: ([attention(g, 2, 1, 1, 1, 2, rope_base=None)], 2),
}


@pytest.mark.crossing
@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize(
    "pairs", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two", "pairs"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if x == "sequences" else []) for x in READ]
)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(powers=st.tuples(*[st.integers(-200, 200)] * 2))
def test_units_of_inputs(name, pairs, dtype, request, powers):
    """Inputs 2**k times as large, read by weights 2**-k times as large, for each coordinate."""
    if name == "whole trees":
        request.getfixturevalue("diagrams")
    reader, metrics = READ[name]
    k = np.array(powers)
    if reader == "residual":
        k[:] = k[0]  # the skip is one number for all coordinates
    near, far = metrics(np.random.default_rng(2), k)
    a, b = (model(READERS[reader], seed) for seed in (0, 1))
    expected = tnsim.similarity(a, b, near)
    by_legs = -k[0] if reader == "residual" else -k
    a, b = (tnsim.Model([legs_times(x.layers[0], by_legs), *x.layers[1:]], x.n_ctx) for x in (a, b))
    if pairs:
        found = tnsim.pairwise([a, b], far, dtype=dtype).similarity.values[0, 1]
    else:
        found = tnsim.similarity(a, b, far, dtype=dtype)
    assert_close(found, expected, scale=1.0, rtol=RANGES[dtype][1], limited_by=dtype)


@pytest.mark.slow
def test_units_of_inputs_traced(rng):
    """The metric and the weights inside a trace, at both ends of float32."""
    a, b = (model(READERS["bilinear"], seed) for seed in (0, 1))
    _, cov = moments(rng, "full")
    expected = tnsim.similarity(a, b, tnsim.Gaussian(cov=cov))

    @jax.jit
    def similarity(a, b, cov):
        return tnsim.similarity(a, b, tnsim.Gaussian(cov=cov), dtype="float32")

    for powers in ([50, 50], [-50, -50], [45, -45]):
        k = np.array(powers)
        one, two = (tnsim.Model([legs_times(x.layers[0], -k)]) for x in (a, b))
        one, two, far = jax.tree.map(
            lambda x: np.asarray(x, "float32"), (one, two, in_units(None, cov, k)[1])
        )
        assert_close(
            similarity(one, two, far), expected, scale=1.0, rtol=1e-5, limited_by="float32"
        )


def output_times(layer, k):
    """2**k times what a layer computes."""
    outputs = ("weight", "bias", "down", "down_bias", "o", "o_bias")
    fields = vars(layer) | {n: np.ldexp(x, k) for n, x in arrays(layer).items() if n in outputs}
    return type(layer)(**fields)


@pytest.mark.crossing
@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("name", cases.SHALLOW | cases.DEEP | cases.THREE)
def test_a_scaled_model_is_the_same_function(name, slices, rng):
    for a in cases.pair((cases.SHALLOW | cases.DEEP | cases.THREE)[name], rng):
        far = tnsim.Model([times(layer, 40) for layer in a.layers])
        for m in (a, far):
            near, exponent = scaled(m, slices)
            assert np.shape(exponent) == ((m.d_out,) if slices else ())
            x = rng.normal(size=(5, m.d_in))
            assert_close(near(x) * 2.0**exponent, m(x), rtol=1e-11)
            assert max(np.abs(w).max() for w in jax.tree.leaves(near) if np.ndim(w) == 2) < 2


@pytest.mark.parametrize("matrix", [np.asarray, SparseMatrix.of], ids=["dense", "sparse"])
def test_rows_of_any_size_count(matrix, rng):
    """Hidden units and coordinates of a bond in units of their own, far apart."""
    first, second = linear(rng, 3, 3, True), bilinear(rng, 3, 4, 2)
    c = tnsim.Model([bilinear(rng, 3, 4, 2)])
    bond, left, right = [450, 0, -450], [450, -450, 0, 9], [0, -80, 450, 9]
    a = tnsim.Model([first, second])
    b = tnsim.Model(
        [
            tnsim.Linear(matrix(turned(first.weight, bond)), np.ldexp(first.bias, bond)),
            tnsim.Bilinear(
                turned(np.ldexp(second.left, np.negative(bond)), left),
                turned(np.ldexp(second.right, np.negative(bond)), right),
                np.ldexp(second.down, -np.add(left, right)),
            ),
        ]
    )
    for metric in METRICS.values():
        assert_close(
            tnsim.similarity(a, c, metric), tnsim.similarity(b, c, metric), scale=1.0, rtol=1e-13
        )


def turned(matrix, powers):
    """Row by row times powers of two."""
    return np.ldexp(matrix, np.array(powers)[:, None])


def test_an_output_far_below_the_others(rng):
    """Slices are per output: one of 1e-170 has the cosines of one of size one."""
    a, b = (bilinear(rng, 3, 4, 2) for _ in range(2))
    small = tnsim.Bilinear(a.left, a.right, np.array([[1.0], [1e-170]]) * a.down)
    a, small, b = (tnsim.Model([layer]) for layer in (a, small, b))
    for metric in (tnsim.Gaussian(), tnsim.TreeSymmetric()):
        expected = tnsim.slices(a, b, metric)
        assert_close(tnsim.slices(small, b, metric), expected, scale=1.0, rtol=1e-13)
        single = tnsim.slices(small, b, metric, dtype="float32")
        assert_close(single, expected, scale=1.0, rtol=1e-5, limited_by="float32")


def test_out_of_range(rng):
    """An inner product beyond float64 says so, above and below; its logarithm is there."""
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    log = tnsim.log_inner(a, b).log
    for k in (-900, 900):
        far = tnsim.Model([times(a.layers[0], k)])
        with refused(r"is about exp\(-?18\d\d.*beyond float64; use log", tnsim.TnsimError):
            tnsim.inner(far, b)
        with refused(r"beyond float64.*scale down the last layer", tnsim.TnsimError):
            tnsim.paths(far, b)
        assert_close(tnsim.log_inner(far, b).log, log + 3 * k * np.log(2), scale=1.0, rtol=1e-11)
    assert_close(
        tnsim.inner(tnsim.Model([times(a.layers[0], 300)]), b),
        tnsim.inner(a, b) * 2.0**900,
        rtol=1e-12,
    )


def test_combinations_of_any_size(rng):
    """Coefficients count as weights do; terms of very different size are added up in one unit."""
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    small = tnsim.Model([times(a.layers[0], -300)])
    expected = tnsim.similarity(a - b, b)
    assert_close(tnsim.similarity(2.0**900 * small - b, b), expected, scale=1.0, rtol=1e-13)
    assert_close(
        tnsim.similarity(2.0**-900 * a - 2.0**-900 * b, b), expected, scale=1.0, rtol=1e-13
    )
    assert tnsim.similarity(2.0**900 * a + 0.0 * b, b) == tnsim.similarity(a, b)
    assert tnsim.similarity(a - small, b) == tnsim.similarity(a, b)


@pytest.mark.parametrize("case", ["features", "plans"])
def test_many_models(case, rng):
    """Both routes of a pairwise run, over all outputs and per output, combinations too."""
    if case == "features":
        a, b, c = (tnsim.Model([bilinear(rng, 3, 4, 2)]) for _ in range(3))
        metric = tnsim.Gaussian()
    else:
        a, b, c = (model(HOMOGENEOUS["two bilinear"], seed) for seed in range(3))
        metric = tnsim.TreeSymmetric()
    far = [
        tnsim.Model([times(layer, 600) for layer in a.layers]),
        tnsim.Model([times(layer, -600) for layer in b.layers[:1]] + list(b.layers[1:])),
        2.0**800 * a - 2.0**800 * c,
    ]
    near = [a, b, a - c]
    expected = tnsim.pairwise(near, metric, slices=True)
    for slices in (False, True):
        run = tnsim.pairwise(far, metric, slices=slices)
        assert_close(run.similarity, expected.similarity, scale=1.0, rtol=1e-11)
    assert_close(run.slices, expected.slices, scale=1.0, rtol=1e-11)


@pytest.mark.full
def test_traced(rng):
    """Derivatives, compiled and mapped calls, for weights of any size."""
    a, c = (model(HOMOGENEOUS["bilinear"], seed) for seed in (0, 1))
    far = tnsim.Model([times(layer, 300) for layer in a.layers])
    with jax.enable_x64(True):
        cosine = lambda m: tnsim.similarity(m, c)  # noqa: E731
        value, slope = jax.value_and_grad(cosine)(a)
        # One of the two step by step, the other compiled.
        found, other = jax.jit(jax.value_and_grad(cosine))(far)
        assert_close(found, float(value), scale=1.0, rtol=1e-13)
        for x, y in zip(jax.tree.leaves(slope), jax.tree.leaves(other), strict=True):
            assert_close(np.ldexp(y, 300), x, scale=LARGEST, rtol=1e-10)
        both = jax.tree.map(lambda *x: np.stack(x), a, far)
        assert_close(jax.vmap(cosine)(both), [value] * 2, scale=1.0, rtol=1e-13)


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize(
    "seed, scales", [(242, (3, -5)), (282, (4, 2)), (332, (-1, -5)), (378, (2, 1))]
)
def test_moments_of_attention_stay_in_the_range_of_float32(seed, scales):
    """Moments of ten small states were zero, and the model was called the zero function."""
    a = model(HOMOGENEOUS["bilinear, then attention"], seed, "float32")
    b = tnsim.Model(map(times, a.layers, scales), a.n_ctx)
    value = tnsim.similarity(a, b, METRICS["closure"], dtype="float32")
    assert_close(value, 1.0, rtol=1e-4, limited_by="float32")


@pytest.mark.parametrize("powers", [(30, 100), (31, 96), (30, -100)])
@pytest.mark.parametrize("name", ["data", "quadrature"])
def test_inputs_far_from_each_other_keep_digits_in_float32(name, powers):
    """Products of two rows that read small coordinates left the range of floats, off by 6e-4."""
    k, (reader, metrics) = np.array(powers), READ[name]
    near, far = metrics(np.random.default_rng(2), k)
    models = [model(READERS[reader], seed) for seed in (0, 1)]
    expected = tnsim.similarity(*models, near, dtype="float32")
    moved = (tnsim.Model([legs_times(x.layers[0], -k), *x.layers[1:]]) for x in models)
    found = tnsim.similarity(*moved, far, dtype="float32")
    assert_close(found, expected, scale=1.0, rtol=1e-5, limited_by="float32")


@pytest.mark.parametrize("power", [64, 66, 72, 90])
def test_small_hidden_states_that_large_weights_read(power, rng):
    """Products of two such states are below the least float32, which is told: they were off by 0.23."""
    first = bilinear(rng, 3, 3, 3)
    last = [bilinear(rng, 3, 3, 2) for _ in range(2)]
    only, unit = np.array([0.0, 1.0, 0.0]), np.array([1.0, 2.0**-power, 1.0])
    small = tnsim.Bilinear(first.left, first.right, first.down * unit[:, None])
    near, far = (
        [
            tnsim.Model([start, tnsim.Bilinear(x.left * reads, x.right * reads, x.down)])
            for x in last
        ]
        for start, reads in ((first, only), (small, only / unit))
    )
    metric = tnsim.Empirical(rng.normal(size=(9, 3)))
    assert_close(tnsim.inner(*far, metric), tnsim.inner(*near, metric))
    beside = near[0] + far[1], near[1]  # a sum was that of its other part
    asked = [(tnsim.pairwise, [far]), (tnsim.pairwise, [beside]), (tnsim.similarity, beside)]
    verbs = tnsim.similarity, tnsim.inner, tnsim.log_inner, tnsim.paths
    for verb, models in (*asked, *((verb, far) for verb in verbs)):
        with refused("(in float32|range of floats).*use dtype='float64'", tnsim.TnsimError):
            verb(*models, metric, dtype="float32")


def with_small_states(rng, layer, units, n_ctx=None):
    """A model, the same with hidden states in some units, whose products float32 loses, and another."""
    layers, last, units = [linear(rng, 2, 2), layer], linear(rng, 2, 2, bias=True), np.array(units)
    small = output_times(layers[0], units[:, None]), legs_times(layers[1], -units)
    other = tnsim.Model([linear(rng, 2, 2, bias=True)], n_ctx)
    return *(tnsim.Model([*x, last], n_ctx) for x in (layers, small)), other


@pytest.mark.parametrize("verb", ["similarity", "slices", "pairwise"])
def test_biases_hide_no_hidden_states_below_the_range_of_float32(verb, rng):
    """Products of five rows that vanished left the biases behind them: -0.52 for 0.34."""
    layer = attention(rng, 2, 1, 2, 2, 2, rope_base=None)
    near, far, other = with_small_states(rng, layer, [-25, 5], 2)
    metric = tnsim.Empirical(rng.normal(size=(9, 2, 2)))
    assert_close(tnsim.similarity(far, other, metric), tnsim.similarity(near, other, metric))
    asked = [[far, other]] if verb == "pairwise" else [far, other]
    told = tnsim.TnsimError, tnsim.PrecisionWarning  # the latter where a digit is left
    with refused("use dtype='float64'", told):
        getattr(tnsim, verb)(*asked, metric, dtype="float32")


def test_traces_in_float32_keep_small_hidden_states(rng):
    """Nothing can be refused there, where products that vanished left the biases behind them."""
    models = with_small_states(rng, bilinear(rng, 2, 3, 2), [-30, 30])
    near, far, other = jax.tree.map(lambda x: np.asarray(x, "float32"), models)
    metric = tnsim.Empirical(rng.normal(size=(9, 2)))
    found = jax.jit(lambda model: tnsim.inner(model, other, metric))(far)
    assert_close(found, tnsim.inner(near, other, metric), rtol=1e-4, limited_by="float32")


@pytest.mark.parametrize("size", [1e-160, 1e120])
def test_squares_that_are_no_floats_are_refused_without_warnings_of_numpy(size, rng):
    first = [linear(rng, 2, 3, bias=True) for _ in "ab"]
    models = []
    for x in first:
        large = tnsim.Linear(x.weight * size, x.bias * size)
        small = tnsim.Linear(x.weight.T / size)
        models.append(tnsim.Model([large, tnsim.Elementwise("relu"), small]))
    with refused("has no digits left|a float range was exceeded", tnsim.TnsimError):
        tnsim.similarity(*models)
