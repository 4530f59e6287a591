"""Models are pytrees: gradients, jit and vmap pass through the verbs."""

import gc
import os

import activated_cases
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import bilinear, linear
from refusals import refused

import tnsim

METRICS = {
    "symmetric": tnsim.Symmetric(),
    "gaussian": tnsim.Gaussian(),
    "closure": tnsim.GaussianClosure(),
    "tree": tnsim.TreeSymmetric(),
}


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    "metric, case",
    [
        ("gaussian", "lerp residual"),
        ("gaussian", "two bilinear"),
        ("gaussian", "two with biases"),
        ("symmetric", "lerp residual"),
        ("closure", "lerp residual"),
        ("tree", "lerp residual"),
    ],
)
def test_jit_and_vmap_agree_with_the_plain_call(metric, case, rng, diagrams):
    pairs = [cases.pair((cases.SHALLOW | cases.DEEP)[case], rng) for _ in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *[a for a, _ in pairs])
    b = pairs[0][1]
    expected = [tnsim.similarity(a, b, METRICS[metric]) for a, _ in pairs]
    with jax.enable_x64(True):
        batched = jax.jit(jax.vmap(lambda m: tnsim.similarity(m, b, METRICS[metric])))(stacked)
    assert_close(batched, expected, scale=1.0, rtol=1e-12)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize(
    "metric, case",
    [
        ("gaussian", "bilinear biases"),
        pytest.param("gaussian", "two bilinear", marks=pytest.mark.full),
        pytest.param("closure", "lerp residual", marks=pytest.mark.full),
    ],
)
def test_compiled_slices_and_logarithms_are_those_of_the_plain_call(metric, case, rng, diagrams):
    a, b = cases.pair((cases.SHALLOW | cases.DEEP)[case], rng)
    with jax.enable_x64(True):
        slices = jax.jit(tnsim.slices)(a, b, METRICS[metric])
        log = jax.jit(tnsim.log_inner)(a, b, METRICS[metric])
    assert_close(slices, tnsim.slices(a, b, METRICS[metric]), scale=1.0, rtol=1e-12)
    assert_close(log, tnsim.log_inner(a, b, METRICS[metric]), scale=1.0, rtol=1e-11)


STRICT = {
    "linear": lambda rng: [linear(rng, 3, 2, bias=True)],
    "bilinear": lambda rng: [bilinear(rng, 3, 4, 2, biases=True)],
    "relu": lambda rng: [linear(rng, 3, 2, bias=True), tnsim.Elementwise("relu")],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["linear", "bilinear", pytest.param("relu", marks=pytest.mark.full)]
)
def test_strict_promotion_of_types_is_the_affair_of_the_callers_code(kind, rng):
    a, b = (tnsim.Model(STRICT[kind](rng)) for _ in range(2))

    def answers():
        value = tnsim.similarity(a, b)
        slope = jax.grad(lambda m: tnsim.similarity(m, b))(a)
        compiled = jax.jit(tnsim.similarity)(a, b)
        both = jax.jit(jax.value_and_grad(lambda m: tnsim.similarity(m, b)))(a)
        return [float(value), slope, compiled, both, tnsim.pairwise([a, b]).similarity.values]

    usual = jax.tree.leaves(answers())
    jax.clear_caches()
    with jax.numpy_dtype_promotion("strict"):
        strict = jax.tree.leaves(answers())
    for one, two in zip(usual, strict, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_untraced_partner_leaves_the_dtype_of_the_weights(rng, x64):
    # Units are applied to an untraced model in float64, the trace computes in float32 all the same.
    a, b = (
        tnsim.Model([tnsim.Linear(rng.normal(size=(3, 4)).astype(np.float32))]) for _ in range(2)
    )
    with jax.enable_x64(x64):
        value, gradient = jax.value_and_grad(lambda model: tnsim.similarity(model, b))(a)
    assert value.dtype == np.float32
    assert gradient.layers[0].weight.dtype == np.float32
    assert_close(value, tnsim.similarity(a, b), scale=1, rtol=1e-5, limited_by="float32")


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    "case, metric, first",
    [
        ("lerp residual", "empirical", False),
        ("lerp residual", "empirical", True),
        ("lerp residual", "gaussian", False),
        ("two bilinear", "closure", True),
        ("gelu", "gaussian", False),
    ],
)
def test_traces_in_both_precisions_share_no_array(case, metric, first, rng):
    """JAX gave arrays of a kept trace in float32 to a trace in float64: 2e-9, or a TypeError."""
    made = {"gelu": lambda g: [activated_cases.mlp(g, "gelu", inputs=3).layers for _ in range(2)]}
    a, b = cases.pair((cases.SHALLOW | cases.DEEP | made)[case], rng)
    mean, cov = cases.INPUTS["mean and covariance"](rng)
    metric = {
        "gaussian": tnsim.Gaussian(mean, cov),
        "closure": tnsim.GaussianClosure(mean, cov),
        "empirical": tnsim.Empirical(rng.normal(size=(9, 3))),
    }[metric]
    kept, values = [], {}
    for wide in (first, not first):
        cosine = jax.jit(lambda model: tnsim.similarity(model, b, metric))
        with jax.enable_x64(wide):
            kept.append(cosine.trace(a))
            values[wide] = kept[-1].lower().compile()(a)
    true = tnsim.similarity(a, b, metric)
    assert_close(values[True], true, scale=1.0, rtol=1e-12)
    assert_close(values[False], true, scale=1.0, rtol=1e-4, limited_by="float32")


READING = {  # what reads numbers, of a model and of inputs
    "networks": lambda model, x: tnsim.tensor_networks.contract(
        tnsim.tensor_networks.networks(model, model)
    ),
    "network": lambda model, x: tnsim.tensor_networks.network(model),
    "pairwise": lambda model, x: tnsim.pairwise([model, model]),
    "check": lambda model, x: tnsim.check(model, model),
    "save": lambda model, x: tnsim.save(model, "model.safetensors"),
    "a baseline": lambda model, x: tnsim.baselines.cka([model, model], x),
    "Gaussian.fit": lambda model, x: tnsim.Gaussian.fit(model.layers[0].left),
    "hidden_states": lambda model, x: tnsim.hidden_states(model, x),
}


@pytest.mark.crossing
@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
@pytest.mark.parametrize("name", READING)
def test_what_reads_numbers_says_so_in_a_trace(name, transform, rng):
    model, _ = cases.pair(cases.SHALLOW["bilinear"], rng)
    x = rng.normal(size=(9, model.d_in))
    with refused(rf"^{name} reads numbers.*inner.* can be traced"):
        transform(lambda model: READING[name](model, x))(model)


@pytest.mark.slow
def test_gradients_in_float32_leave_no_array_to_traces_in_float64(rng):
    """JAX keeps its float32 form of a caller's array as long as anything holds it."""
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    gc.disable()  # garbage that is still to be collected holds it too
    try:
        with jax.enable_x64(False):
            jax.grad(lambda model: tnsim.similarity(model, b))(a)
        with jax.enable_x64(True):
            assert jnp.asarray(jax.tree.leaves(a)[0]).dtype == np.float64
    finally:
        gc.enable()


def test_models_are_pytrees(rng):
    model, _ = cases.pair(cases.SHALLOW["lerp residual"], rng)
    again = jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(model))
    x = rng.normal(size=3)
    np.testing.assert_array_equal(again(x), model(x))
    assert_close(
        jax.vmap(model)(np.stack([x, x]))[0],
        model(x),
        scale=LARGEST,
        rtol=1e-5,
        limited_by="float32",
    )
    with pytest.raises(AttributeError, match="immutable"):
        model.layers = ()
    with pytest.raises(ValueError, match="read-only"):
        model.layers[0].layer.left[0, 0] = 1.0


LEAVES = {  # what a function makes of the weights of a bilinear layer, and the refusal
    "None": (lambda x: None, "left must hold real numbers"),
    "numbers": (lambda x: 1.0, r"left must have 2 axes, found shape \(\)"),
    "stacks": (lambda x: np.stack([x, x]), r"inside jax.vmap.*layer 0: Bilinear left must have 2"),
    "complex": (lambda x: x + 1j, "left must hold real numbers, found dtype complex128"),
    "NaN": (lambda x: x * np.nan, "left has 12 NaN or infinite entries, the first at"),
    "short biases": (lambda x: x[:1] if x.ndim == 1 else x, "left_bias has shape"),
    "transposed": (lambda x: x.T, "down has shape"),
}


@pytest.mark.parametrize("what", LEAVES)
def test_leaves_that_are_no_weights_are_refused(what, rng):
    """They ended in errors of NumPy; broadcast biases and imaginary parts were numbers."""
    make, message = LEAVES[what]
    model = tnsim.Model([bilinear(rng, 3, 4, 2, biases=True)])
    made = jax.tree.map(make, model)
    for verb in (tnsim.inner, lambda a, b: tnsim.pairwise([a, b])):
        for pair in ((made, model), (model, made)):
            with refused(message):
                verb(*pair)
    with refused(message):
        tnsim.inner(model, made, tnsim.Empirical(rng.normal(size=(4, 3))))


def test_leaves_of_the_second_layer_and_of_sums_are_checked(rng):
    model = tnsim.Model([tnsim.Residual(bilinear(rng, 3, 4, 3)), linear(rng, 3, 2)])
    wide = jax.tree.map(lambda x: x[:, :2] if np.shape(x) == (2, 3) else x, model)
    with refused("layer 1 expects 2 inputs but layer 0 gives 3"):
        tnsim.inner(wide - model, model)
    hidden = tnsim.Model([linear(rng, 3, 2, bias=True), tnsim.Elementwise("relu")])
    with refused("weight must hold real numbers"):
        tnsim.inner(jax.tree.map(lambda x: x + 1j, hidden), hidden)


@pytest.mark.slow
def test_whole_numbers_and_lists_are_weights(rng):
    """Whole numbers inside of a trace were an error of NumPy."""
    model = tnsim.Model([linear(rng, 3, 2, bias=True)])
    whole = jax.tree.map(lambda x: np.round(3 * x).astype(np.int8), model)
    expected = tnsim.inner(jax.tree.map(lambda x: x.astype(float), whole), model)
    with jax.enable_x64(True):
        traced = jax.jit(lambda one: tnsim.inner(one, model, tnsim.Frobenius()))(whole)
    for found in (
        tnsim.inner(jax.tree.map(lambda x: x.tolist(), whole), model),
        tnsim.inner(whole, model),
        float(traced),
    ):
        assert_close(found, expected, scale=abs(expected), rtol=1e-12)


# XLA's code for float16 needs conversions (F16C) that no processor before AVX has.
before_f16c = "xla_cpu_max_isa=SSE4_2" in os.environ.get("XLA_FLAGS", "")
float16 = pytest.param("float16", marks=pytest.mark.skipif(before_f16c, reason="XLA needs F16C"))


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize("dtype", ["bfloat16", float16, "int32", "uint8"])
def test_narrow_and_whole_numbers_of_jax_are_widened_as_those_of_numpy(dtype):
    import ml_dtypes

    numbers = np.array([[1, 2, 3], [4, 5, 6]])
    of_numpy = numbers.astype(getattr(ml_dtypes, dtype, None) or dtype)
    weight = tnsim.Linear(jnp.asarray(numbers, dtype)).weight
    assert weight.dtype == tnsim.Linear(of_numpy).weight.dtype
    np.testing.assert_array_equal(weight, numbers)
    other = tnsim.Model([tnsim.Linear(np.ones((2, 3)))])
    cosine = lambda w: tnsim.similarity(tnsim.Model([tnsim.Linear(w)]), other)  # noqa: E731
    with jax.enable_x64(True):
        traced = jax.jit(cosine)(jnp.asarray(numbers, dtype))
    assert_close(float(traced), float(cosine(numbers)), scale=1.0, rtol=1e-12)


@pytest.mark.slow
def test_a_trace_tells_what_it_cannot_refuse():
    """Inside a trace a difference of models that float32 cannot tell apart has no number."""
    rng = np.random.default_rng(0)
    a, c = (tnsim.Model([tnsim.Linear(rng.normal(size=(3, 3)))]) for _ in range(2))
    changes = np.geomspace(1e-9, 1, 60)[:, None, None] * rng.normal(size=(60, 3, 3))

    @jax.jit
    @jax.vmap
    def similarities(change):
        b = tnsim.Model([tnsim.Linear(a.layers[0].weight + change)])
        return tnsim.similarity(b - a, c)

    found = np.asarray(similarities(changes.astype(np.float32)))
    true = np.array(
        [tnsim.similarity(tnsim.Model([tnsim.Linear(x)]), c, dtype="float64") for x in changes]
    )
    known = ~np.isnan(found)
    assert not known[:10].any() and known[-10:].all()
    assert_close(found[known], true[known], scale=1.0, rtol=0.1, limited_by="float32")


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    "dtype, condition, rtol",
    [
        # the worst of 20 seeds is 3.6e-7, three roundings
        pytest.param("float32", 1e4, 2e-5, marks=pytest.mark.full),
        pytest.param("float64", 1e4, 1e-12, marks=pytest.mark.full),
        ("float64", 1e6, 1e-12),
    ],
)
def test_a_skewed_hidden_basis_costs_no_digits_inside_a_trace(dtype, condition, rtol, rng):
    """A basis stayed as it was given: 0.188 for 1.0 in float32, 0.88 in float64 at 10^6.

    The number outside of a trace is that of the same rounded weights in float64.
    """
    metric = tnsim.GaussianClosure()
    pairs = []
    for _ in range(5):
        matrices, basis, inverse = cases.skewed(rng, condition)
        pairs.append(
            (
                cases.in_basis(matrices, np.eye(4), np.eye(4)),
                cases.in_basis(matrices, basis, inverse),
            )
        )
    pairs = [jax.tree.map(lambda x: x.astype(dtype), pair) for pair in pairs]
    stacks = jax.tree.map(lambda *same: np.stack(same), *pairs)
    with jax.enable_x64(dtype == "float64"):
        cosines = jax.jit(jax.vmap(lambda a, b: tnsim.similarity(a, b, metric)))(*stacks)
    true = [tnsim.similarity(a, b, metric) for a, b in pairs]
    assert_close(cosines, true, scale=1.0, rtol=rtol, limited_by=dtype)


@pytest.mark.full
def test_derivatives_do_not_depend_on_the_hidden_basis(rng):
    """By matrices that a basis and its inverse multiply, whatever the basis."""
    matrices, basis, inverse = cases.skewed(rng, 1e3)
    other = cases.in_basis(cases.skewed(rng, 1.0)[0], np.eye(4), np.eye(4))

    @jax.jit
    @jax.grad
    def gradient(matrices, *bases):
        return tnsim.similarity(cases.in_basis(matrices, *bases), other, tnsim.TreeSymmetric())

    with jax.enable_x64(True):
        plain = gradient(matrices, np.eye(4), np.eye(4))
        found = gradient(matrices, basis, inverse)
    for one, two in zip(plain, found, strict=True):
        assert_close(two, one, scale=LARGEST, rtol=1e-9)


@pytest.mark.slow
def test_a_trace_tells_units_that_cancel(rng):
    """Two hidden units that nearly undo each other, which no basis mends: float32 gave a number."""
    c, cancelling = cases.cancelling_copies(rng)
    for verb in (tnsim.similarity, tnsim.inner, lambda a, b: tnsim.log_inner(a, b).log):
        number = jax.jit(jax.value_and_grad(lambda a, verb=verb: verb(a, c)))
        for size, is_known in ((1.0, True), (1e6, False)):
            value, gradient = number(cancelling(size))
            assert np.isfinite(value) == is_known
            assert all(np.isfinite(x).all() == is_known for x in jax.tree.leaves(gradient))
