"""Models with an activation under Gaussian metrics, against quadrature, laws and other routes."""

import dataclasses
import itertools
import tracemalloc
import warnings

import jax
import mpmath
import numpy as np
import pytest
from activated_cases import by_quadrature, gated, gaussian, mlp, points
from closeness import LARGEST, assert_close
from oracles import slope_of
from refusals import refused

import tnsim
from tnsim.engine import precision
from tnsim.problems import kernels
from tnsim.problems.hidden_units import hidden_units


def assert_right(a, b, metric, tolerance=1e-12):
    """Inner product, similarity and slices against quadrature, relative to the norms."""
    cross, first, second = by_quadrature(a, b, metric)
    size = np.sqrt(first.sum() * second.sum())
    assert_close(tnsim.inner(a, b, metric), cross.sum(), scale=size, rtol=tolerance)
    similarity = tnsim.similarity(a, b, metric)
    assert similarity.exact
    assert_close(similarity, cross.sum() / size, scale=1.0, rtol=tolerance)
    slices = np.asarray(tnsim.slices(a, b, metric))
    assert_close(slices, cross / np.sqrt(first * second), scale=1.0, rtol=tolerance)


def around(generator, layer):
    """A layer of two inputs and outputs inside a residual, linear layers around it."""
    first = tnsim.Linear(generator.normal(size=(2, 2)), generator.normal(size=2))
    last = tnsim.Linear(generator.normal(size=(2, 2)))
    return tnsim.Model([first, tnsim.Residual(layer, 0.7, 0.4), last])


def without_up(g):
    (block,) = gated(g, "relu").layers
    return dataclasses.replace(block, up=None, up_bias=None)


def line(g):
    return tnsim.Model([tnsim.Linear(g.normal(size=(2, 2)), g.normal(size=2))])


def relu(g):
    return mlp(g, "relu")


NETWORKS = {
    "relu": (relu, relu),
    "gelu": (lambda g: mlp(g, "gelu"), relu),
    "tanh": (lambda g: mlp(g, "tanh"), relu),
    "gated": (lambda g: gated(g, "silu"), relu),
    "residuals": (
        lambda g: around(g, without_up(g)),
        lambda g: around(g, tnsim.Elementwise("relu")),
    ),
    "beside a line": (lambda g: around(g, without_up(g)), line),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_one_hidden_layer(name, rng):
    make, other = NETWORKS[name]
    assert_right(make(rng), other(rng), gaussian(rng))


@pytest.mark.parametrize("name", ["relu", "gated"])
def test_kernels_in_several_blocks_of_rows(name, rng, monkeypatch):
    """Of a model with itself, entries of later blocks stand for those below the diagonal too."""
    monkeypatch.setattr(kernels, "_BLOCK", 7)
    make, other = NETWORKS[name]
    assert_right(make(rng), other(rng), gaussian(rng))


def test_singular_covariances(rng):
    row = rng.normal(size=(2, 1))
    metric = tnsim.Gaussian(rng.normal(size=2), row @ row.T)
    assert_right(mlp(rng, "relu"), mlp(rng, "relu"), metric)
    still = tnsim.Gaussian(rng.normal(size=2), np.zeros((2, 2)))
    a, b = mlp(rng, "relu"), mlp(rng, "relu")
    assert_close(tnsim.inner(a, b, still), a(still.mean) @ b(still.mean), rtol=1e-13)


def test_kernels_are_float64_whatever_is_asked(rng):
    """Numbers of float64 were told, and refused, as if they had been computed in float32."""
    near = tnsim.Linear([[1.0, 1.0], [1.0, 1.0001]])
    a = tnsim.Model([near, tnsim.Elementwise("relu"), tnsim.Linear([[1.0, -1.0]] * 2)])
    b = mlp(rng, "relu")
    assert tnsim.similarity(a, b, dtype="float32") == tnsim.similarity(a, b)
    some, same = (tnsim.pairwise([a, b], dtype=dtype) for dtype in ("float32", "float64"))
    assert (some.similarity.values == same.similarity.values).all()


def permuted(model, order):
    first, activation, last = model.layers
    return tnsim.Model(
        [
            tnsim.Linear(first.weight[order], first.bias[order]),
            activation,
            tnsim.Linear(last.weight[:, order], last.bias),
        ]
    )


def rescaled(model, factors, odd=False):
    """Every hidden unit times a factor going in, divided by it (times its sign) coming out."""
    first, activation, last = model.layers
    out = np.sign(factors) if odd else 1 / factors
    return tnsim.Model(
        [
            tnsim.Linear(first.weight * factors[:, None], first.bias * factors),
            activation,
            tnsim.Linear(last.weight * out, last.bias),
        ]
    )


def test_equal_functions_have_similarity_one(rng):
    metric = gaussian(rng)
    a = mlp(rng, "relu")
    assert abs(tnsim.similarity(a, permuted(a, rng.permutation(5)), metric) - 1) < 1e-14
    scaled = rescaled(a, np.exp(rng.normal(size=5)))
    assert abs(tnsim.similarity(a, scaled, metric) - 1) < 1e-14


@pytest.mark.slow
def test_polynomial_layers_of_any_order_beside_an_activation(rng):
    legs, biases = rng.normal(size=(3, 4, 2)), rng.normal(size=(3, 4))
    cubic = tnsim.Multilinear(legs * [[[1.0]], [[30.0]], [[0.02]]], rng.normal(size=(2, 4)), biases)
    metric = gaussian(rng)
    for layer in (cubic, gated(rng, "identity", hidden=4).layers[0]):
        model = tnsim.Model([layer])
        assert_right(model, mlp(rng, "relu"), metric)
        other = mlp(rng, "relu")
        shares = tnsim.paths(model, other, metric, by="unit")
        assert shares.bra[:5] == ("embed", *(f"embed > layer 0 unit {n}" for n in range(4)))
        assert_close(shares.values.sum(), tnsim.inner(model, other, metric), rtol=1e-10)


@pytest.mark.slow
def test_odd_activations_with_signs_flipped(rng):
    a = mlp(rng, "tanh")
    flipped = rescaled(a, rng.choice([-1.0, 1.0], 5), odd=True)
    assert abs(tnsim.similarity(a, flipped, gaussian(rng)) - 1) < 1e-14


@pytest.mark.slow
def test_a_bilinear_network_written_as_squares(rng):
    left, right, down = (rng.normal(size=shape) for shape in ((4, 2), (4, 2), (2, 4)))
    bilinear = tnsim.Model([tnsim.Bilinear(left, right, down)])
    squares = tnsim.Model(
        [
            tnsim.Linear(np.concatenate([left + right, left - right]) / 2),
            tnsim.Elementwise("square"),
            tnsim.Linear(np.concatenate([down, -down], axis=1)),
        ]
    )
    metric = gaussian(rng)
    assert abs(tnsim.similarity(bilinear, squares, metric) - 1) < 1e-14
    assert_close(
        tnsim.inner(squares, squares, metric), tnsim.inner(bilinear, bilinear, metric), rtol=1e-13
    )


def test_all_verbs(rng):
    metric = gaussian(rng)
    a, b = mlp(rng, "relu"), mlp(rng, "relu")
    inner = float(tnsim.inner(a, b, metric))
    sign, log = tnsim.log_inner(a, b, metric)
    assert_close(sign * np.exp(log), inner, rtol=1e-13)
    closure = tnsim.GaussianClosure(metric.mean, metric.cov)
    assert tnsim.inner(a, b, closure) == inner
    assert tnsim.similarity(a, b, closure).exact
    assert abs(tnsim.check(a, b, metric, samples=4096).deviation) < 5
    plan = tnsim.plan(a, b, metric, cosine=True)
    assert plan.exact
    assert dict(plan.facts) == {
        "kernels": 3,
        "rows of hidden units": 5,
        "columns of hidden units": 5,
    }
    for weighted in (
        tnsim.tensor_networks.networks(a, b, metric),
        [*tnsim.tensor_networks.networks(a, b, metric)],
    ):
        assert_close(tnsim.tensor_networks.contract(weighted), inner, rtol=1e-13)
    ((weight, network),) = tnsim.tensor_networks.networks(a, b, metric)
    assert "KERNEL" in network.tags
    assert_close(weight * network.contract(output_inds=()), inner, rtol=1e-13)
    large = tnsim.Model([*a.layers, tnsim.Linear(1e200 * np.eye(len(a.layers[-1].weight)))])
    weighted = tnsim.tensor_networks.networks(large, large, metric)
    mantissa, exponent = tnsim.tensor_networks.contract(weighted, strip_exponent=True)
    log = tnsim.log_inner(large, large, metric).log
    assert_close(exponent * np.log(10) + np.log(mantissa), float(log), rtol=1e-13)


@pytest.mark.slow
def test_float32(rng):
    metric = gaussian(rng)
    a, b = mlp(rng, "relu"), mlp(rng, "relu")
    low = tnsim.similarity(a, b, metric, dtype="float32")
    assert abs(low - tnsim.similarity(a, b, metric)) < 1e-5


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_hidden_units_whose_fourth_powers_are_no_floats(activation, rng):
    one, other = (mlp(rng, activation) for _ in range(2))
    # Far from the kinks both activations are linear, and sizes of outputs are divided out.
    one, large = (
        tnsim.Model(
            [tnsim.Linear(s * one.layers[0].weight, s * one.layers[0].bias), *one.layers[1:]]
        )
        for s in (1e30, 1e100)
    )
    for verb in (tnsim.similarity, lambda a, b: tnsim.pairwise([a, b]).similarity[0, 1]):
        assert_close(verb(large, other), verb(one, other), scale=1.0, rtol=1e-12)


def test_squares_that_leave_the_range_of_floats_are_refused(rng):
    one, other = (mlp(rng, "relu2") for _ in range(2))
    far = tnsim.Model([tnsim.Linear(1e76 * one.layers[0].weight), *one.layers[1:]])
    verbs = tnsim.similarity, tnsim.inner, tnsim.log_inner
    for verb in verbs:
        with refused(r"squares of hidden units leave the range of floats", tnsim.TnsimError):
            verb(far, other)
    with jax.enable_x64(True):  # a trace cannot refuse
        traced = jax.jit(lambda a: [jax.tree.leaves(verb(a, other))[-1] for verb in verbs])(far)
    assert np.isnan(traced).all()


def test_one_model_under_two_metrics(rng):
    a, b = (mlp(rng, "relu", inputs=3) for _ in range(2))
    metrics = tnsim.Gaussian(), tnsim.Gaussian(np.array([1.0, -2.0, 0.5]))
    found = [float(tnsim.similarity(a, b, metric)) for metric in metrics]
    for metric, value in zip(metrics, found, strict=True):
        with tnsim.using(tnsim.Session()):
            assert_close(value, float(tnsim.similarity(a, b, metric)), rtol=1e-13)
    assert abs(found[0] - found[1]) > 1e-6


def test_sums_of_models(rng):
    metric = gaussian(rng)
    a, b = mlp(rng, "relu"), mlp(rng, "relu")
    expected = tnsim.inner(a, a, metric) - 2 * tnsim.inner(a, b, metric)
    assert_close(tnsim.inner(a, a - 2.0 * b, metric), expected, rtol=1e-12)


def difference_of_outputs(a, b, x):
    """b(x) - a(x) of tanh networks, as tanh(u + d) - tanh(u) = sinh(d) / (cosh(u) cosh(u + d))."""
    (first, _, last), (other_first, _, other_last) = a.layers, b.layers
    u = x @ first.weight.T + first.bias
    d = x @ (other_first.weight - first.weight).T + (other_first.bias - first.bias)
    hidden = np.sinh(d) / (np.cosh(u) * np.cosh(u + d))
    outputs = np.tanh(u + d) @ (other_last.weight - last.weight).T + hidden @ last.weight.T
    return outputs + (other_last.bias - last.bias)


def test_narrow_layers_stay_on_the_host_beside_an_accelerator(rng, monkeypatch):
    narrow, wide = mlp(rng, "relu", hidden=5), mlp(rng, "relu", hidden=12)
    wanted = tnsim.inner(narrow, narrow)
    monkeypatch.setattr(kernels, "backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "_NARROW", 8)
    sides = [
        kernels.prepared(hidden_units(model), None, None, 2, "float64").expanded.side
        for model in (narrow, wide)
    ]
    assert sides[0] is not None and sides[1] is None
    with tnsim.using(tnsim.Session()):
        assert tnsim.inner(narrow, narrow) == wanted


@pytest.mark.slow
def test_kernels_of_wide_layers_on_an_accelerator(rng, monkeypatch):
    """They are made there, and what is made of them on the host, in total and by output."""
    models = [mlp(rng, "gelu", hidden=12), gated(rng, "gelu", hidden=12)]
    pairs = list(itertools.combinations_with_replacement(models, 2))
    calls = [(f, a, b) for f in (tnsim.inner, tnsim.slices) for a, b in pairs]
    wanted = [f(a, b) for f, a, b in calls]
    monkeypatch.setattr(kernels, "backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "_NARROW", 8)
    with tnsim.using(tnsim.Session()):
        found = [f(a, b) for f, a, b in calls]
    for one, other in zip(wanted, found, strict=True):
        assert_close(other, one, rtol=1e-12)


@pytest.mark.full
def test_gradients_of_wide_layers_on_an_accelerator(rng, monkeypatch):
    """The partner is numbers, whose kernel with itself is made inside a trace too."""
    a, b = mlp(rng, "relu", hidden=12), mlp(rng, "relu", hidden=12)

    def found(transform=lambda f: f):
        with jax.enable_x64(True), tnsim.using(tnsim.Session()):
            return transform(jax.value_and_grad(lambda m: tnsim.similarity(m, b)))(a)

    wanted = found()
    monkeypatch.setattr(kernels, "backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "_NARROW", 8)
    for there in (found(), found(jax.jit)):
        for one, other in zip(*map(jax.tree.leaves, (wanted, there)), strict=True):
            assert_close(other, one, scale=LARGEST, rtol=1e-11)


@pytest.mark.slow
def test_small_differences_lose_no_digits(rng):
    metric = gaussian(rng)
    a = mlp(rng, "tanh")
    b, c = (jax.tree.map(lambda x: x * (1 + 1e-8 * rng.normal(size=x.shape)), a) for _ in range(2))
    x, weights = points([a], metric)
    one, two = (difference_of_outputs(a, other, x) for other in (b, c))
    first, cross, second = (
        weights @ np.sum(f * g, 1) for f, g in ((one, one), (one, two), (two, two))
    )
    assert_close(tnsim.inner(b - a, b - a, metric), float(first), rtol=1e-09)
    cosine = float(cross / np.sqrt(first * second))
    assert abs(tnsim.similarity(b - a, c - a, metric) - cosine) < 1e-9


def test_sequences_are_compared_position_by_position(rng):
    mean, cov = rng.normal(size=(3, 2)), rng.uniform(0.5, 2.0, 6)
    a, b = (tnsim.Model(mlp(rng, "relu").layers, n_ctx=3) for _ in range(2))
    total = 0.0
    for position in range(3):
        own = tnsim.Gaussian(mean[position], cov[2 * position : 2 * position + 2])
        total += tnsim.inner(tnsim.Model(a.layers), tnsim.Model(b.layers), own)
    assert_close(tnsim.inner(a, b, tnsim.Gaussian(mean, cov)), total, rtol=1e-13)


def test_weights_of_any_size(rng):
    metric = gaussian(rng)
    a, b = mlp(rng, "relu"), mlp(rng, "relu")
    first, activation, last = a.layers
    large = tnsim.Model([first, activation, tnsim.Linear(last.weight * 1e200, last.bias * 1e200)])
    expected = tnsim.similarity(a, b, metric)
    # The worst of 20 seeds are one and a half roundings, and two and a half over all pairs.
    assert_close(tnsim.similarity(large, b, metric), expected, scale=1.0, rtol=3e-14)
    _, log = tnsim.log_inner(large, large, metric)
    assert_close(log, np.log(tnsim.inner(a, a, metric)) + 400 * np.log(10), rtol=1e-14)


def beside_equal_units(make, rng):
    """Two models, each with a unit of weights 0; two units of one are multiples of the other's."""
    a, b = make(rng), make(rng)
    is_gated = isinstance(a.layers[0], tnsim.Gated)
    weight, bias = ("gate", "gate_bias") if is_gated else ("weight", "bias")

    def changed(model, rows, offsets):
        first, *rest = model.layers
        return tnsim.Model([dataclasses.replace(first, **{weight: rows, bias: offsets}), *rest])

    rows, offsets = (np.array(getattr(a.layers[0], name)) for name in (weight, bias))
    rows[2] = 0.0
    others, other_offsets = (np.array(getattr(b.layers[0], name)) for name in (weight, bias))
    others[:3] = rows[:3] * np.array([[1.0], [-2.0], [1.0]])
    other_offsets[:2] = offsets[:2] * np.array([1.0, -2.0])
    return changed(a, rows, offsets), changed(b, others, other_offsets)


DIFFERENTIATED = {
    "gelu": lambda g: mlp(g, "gelu"),
    "relu": lambda g: mlp(g, "relu"),
    "sin": lambda g: mlp(g, "sin"),
    "gated silu": lambda g: gated(g, "silu"),
    "gated gelu": lambda g: gated(g, "gelu"),
}


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("case", DIFFERENTIATED)
def test_gradients_against_differences(case, rng):
    """Pairs in series and pairs of equal and of opposite units, which are computed alone."""
    metric = gaussian(rng)
    a, b = beside_equal_units(DIFFERENTIATED[case], rng)
    assert_gradient_is_slope(lambda model: tnsim.similarity(model, b, metric), a, rng)


@pytest.mark.full
def test_gradients_of_sums_in_blocks_against_differences(rng, monkeypatch):
    """A model on both sides, and kernels of several blocks of rows."""
    monkeypatch.setattr(kernels, "_BLOCK", 7)
    metric = gaussian(rng)
    a, b, c = (mlp(rng, "gelu") for _ in range(3))
    assert_gradient_is_slope(lambda m: tnsim.similarity(m - 0.5 * b, m + c, metric), a, rng)


def assert_gradient_is_slope(value, a, rng):
    """A gradient outside of traces against differences of fourth order along a random change."""
    change = jax.tree.map(lambda x: rng.normal(size=x.shape), a)
    with jax.enable_x64(True):
        slopes = jax.grad(value)(a)
    slope = sum(
        np.vdot(x, y) for x, y in zip(jax.tree.leaves(slopes), jax.tree.leaves(change), strict=True)
    )

    def at(t):
        return value(jax.tree.map(lambda x, y: x + t * y, a, change))

    assert_close(slope, slope_of(at, 1e-4), scale=1.0, rtol=1e-6, limited_by="finite differences")


def with_activation(model, name):
    """The same weights around another activation."""
    first, *others = model.layers
    if isinstance(first, tnsim.Gated):
        return tnsim.Model([dataclasses.replace(first, activation=name)])
    return tnsim.Model([first, tnsim.Elementwise(name), others[-1]])


@pytest.mark.slow
@pytest.mark.parametrize("make", [mlp, gated])
def test_a_student_begins_as_a_copy_with_another_activation(rng, make):
    """Gated ones were off by 1e-2, and called exact: all units are parallel to units of the other."""
    teacher = make(rng, "silu", hidden=3)
    assert_right(with_activation(teacher, "relu6"), teacher, gaussian(rng))


@pytest.mark.full
@pytest.mark.parametrize("by", ["grad", "jit", "torch"])
def test_the_first_step_of_a_student(rng, by):
    """Slopes of a similarity by all weights of a hardswish network, its teacher one of silu."""
    metric, teacher = gaussian(rng), mlp(rng, "silu")
    student = with_activation(teacher, "hardswish")
    if by == "torch":
        torch = pytest.importorskip("torch")
        traced = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), student)
        tnsim.torch.similarity(traced, teacher, metric).backward()
        slopes = jax.tree.map(lambda x: x.grad.numpy(), traced)
    else:
        gradient = jax.grad(lambda model: tnsim.similarity(model, teacher, metric))
        with jax.enable_x64(True):
            slopes = (jax.jit(gradient) if by == "jit" else gradient)(student)
    first, _, last = student.layers
    x, weights = points([student, teacher], metric)
    u, one, other = x @ first.weight.T + first.bias, student(x), teacher(x)
    cross, own, others = (
        weights @ (y * z).sum(1) for y, z in ((one, other), (one, one), (other, other))
    )
    # The slope of a cosine by an output of the student at an input.
    goal = weights[:, None] * (other - cross / own * one) / np.sqrt(own * others)
    slope = np.where(abs(u) < 3, (2 * u + 3) / 6, u > 0) * (goal @ last.weight)
    hidden = u * np.clip(u + 3, 0, 6) / 6
    expected = slope.T @ x, slope.sum(0), goal.T @ hidden, goal.sum(0)
    found = (y for layer in slopes.layers[::2] for y in (layer.weight, layer.bias))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, scale=LARGEST, rtol=1e-11)


def test_gradients_beyond_the_budget_are_refused(rng):
    a, b = mlp(rng, "relu", hidden=40), mlp(rng, "relu", hidden=40)
    budget = tnsim.Budget(memory_bytes=2**17)
    with refused(r"kernels of 40 x 40 hidden units need .* GiB", tnsim.TooLarge):
        jax.grad(lambda model: tnsim.similarity(model, b, budget=budget))(a)


@pytest.mark.full
def test_gradients_outside_of_a_trace_are_those_inside(rng):
    """Slopes of kernels by NumPy and by a compiled program, of the model with itself as well."""
    metric = gaussian(rng)
    a, b = beside_equal_units(DIFFERENTIATED["gelu"], rng)
    with jax.enable_x64(True):
        gradient = jax.grad(
            lambda first, second: tnsim.log_inner(first, second, metric).log, (0, 1)
        )
        compiled = jax.jit(gradient)
        for pair in ((a, b), (a, a)):
            with tnsim.using(tnsim.Session(tier="compile")):
                by_program = gradient(*pair)
            every = gradient(*pair), by_program, compiled(*pair)
            for outside, of_program, inside in zip(*map(jax.tree.leaves, every), strict=True):
                assert_close(outside, inside, scale=LARGEST, rtol=1e-11)
                assert_close(of_program, inside, scale=LARGEST, rtol=1e-11)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("name, transform", [("tanh", lambda f: f), ("relu", jax.jit)])
def test_a_partner_in_float64_leaves_the_floats_of_a_trace(name, transform, rng):
    """A gradient by weights in float32 was a TypeError where JAX computes in float64."""
    pair = mlp(rng, name), mlp(rng, name)
    a, b = jax.tree.map(lambda x: x.astype(np.float32), pair)
    with jax.enable_x64(True):
        value, gradient = transform(jax.value_and_grad(lambda m: tnsim.similarity(m, b)))(a)
    assert value.dtype == np.float32
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {np.dtype("float32")}
    assert_close(value, tnsim.similarity(a, b), scale=1.0, rtol=1e-5, limited_by="float32")


def test_pairwise(rng):
    metric = gaussian(rng)
    models = [mlp(rng, "relu") for _ in range(3)]
    found = tnsim.pairwise(models, metric)
    assert found.attrs["plan"].startswith("kernels")
    expected = [[float(tnsim.similarity(a, b, metric)) for b in models] for a in models]
    assert_close(found.similarity, expected, scale=1.0, rtol=3e-14)


REFUSED = {
    "two nonlinear layers": (
        lambda g: tnsim.Model([*mlp(g, "relu").layers, tnsim.Elementwise("relu")]),
        tnsim.Gaussian(samples=0),
        r"exact beside an activation for one nonlinear layer, found 2.*GaussianClosure\(mean, cov\)",
    ),
    "Symmetric": (lambda g: mlp(g, "relu"), tnsim.Symmetric(), "compares the tensors of poly"),
    "TreeSymmetric": (lambda g: mlp(g, "relu"), tnsim.TreeSymmetric(), "relu is no polynomial"),
    "Product": (lambda g: mlp(g, "relu"), tnsim.Product("normal"), "exact for polynomials"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line_with_the_road_left(rng, case):
    make, metric, words = REFUSED[case]
    a, b = make(rng), mlp(rng, "relu")
    with refused(words, tnsim.TnsimError) as caught:
        tnsim.similarity(a, b, metric)
    assert "Empirical" in str(caught.value) or "samples" in str(caught.value)


def test_a_polynomial_degree_is_infinite_and_no_number_is_given_for_it(rng):
    model = mlp(rng, "relu")
    assert model.degree == np.inf
    assert "no polynomial" in repr(model)
    with refused("no network of its own", tnsim.UnsupportedLayer):
        tnsim.tensor_networks.network(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tnsim.similarity(model, model, gaussian(rng))


def kernel_by_mpmath(name, one, two):
    """E h_i h'_j of hidden units without means, in many digits: rows (gate, up) of both models.

    Arc-cosine kernels of order 1 and 2 (Cho and Saul 2009) for ReLU and for u relu(u); for p sin(u)
    the characteristic function, E p q exp(i w) = (cov(p, q) - cov(p, w) cov(q, w)) exp(-var(w) / 2).
    """
    (u, p), (v, q) = one, two

    def dot(x, y):
        return mpmath.fsum(s * t for s, t in zip(x, y, strict=True))

    if name == "sin":
        total = mpmath.mpf(0)
        for sign in (-1, 1):
            w = [s + sign * t for s, t in zip(u, v, strict=True)]
            moment = dot(p, q) - dot(p, w) * dot(q, w)
            total -= sign * moment * mpmath.exp(-dot(w, w) / 2) / 2
        return total
    size = mpmath.sqrt(dot(u, u) * dot(v, v))
    cosine = dot(u, v) / size
    angle = mpmath.acos(cosine)
    left, sine = mpmath.pi - angle, mpmath.sin(angle)
    if name == "relu":
        return size * (sine + left * cosine) / (2 * mpmath.pi)
    return size**2 * (3 * sine * cosine + left * (1 + 2 * cosine**2)) / (2 * mpmath.pi)


def in_many_digits(matrix):
    return [[mpmath.mpf(float(x)) for x in row] for row in matrix]


def cosine_by_mpmath(name, one, two):
    """The cosine of two differences of models, each a pair of models."""

    def product(first, second):
        total = mpmath.mpf(0)
        for (sign, a), (other, b) in itertools.product(first, second):
            (u, p, d), (v, q, e) = (
                map(in_many_digits, (x.gate, x.gate if x.up is None else x.up, x.down))
                for x in (a, b)
            )
            for i, j in itertools.product(range(len(u)), range(len(v))):
                read = mpmath.fsum(x[i] * y[j] for x, y in zip(d, e, strict=True))
                total += sign * other * read * kernel_by_mpmath(name, (u[i], p[i]), (v[j], q[j]))
        return total

    with mpmath.workdps(50):
        norms = product(one, one) * product(two, two)
        return float(product(one, two) / mpmath.sqrt(norms))


@pytest.mark.parametrize("name", ["relu", "relu squared", "sin"])
def test_second_differences_are_within_the_error_that_is_told(name, rng, monkeypatch):
    """b - a against d - c for nearly equal weights: kinks and gates have no differences in closed
    form, so digits go, and the error says how many."""
    told = []
    monkeypatch.setattr(precision, "warn_of_error", lambda error, *_: told.append(error))
    shape = (2, 3)
    gate, up, down = rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=(2, 2))
    for change in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        layers = []
        for _ in range(4):
            w, v, d = (x + change * rng.normal(size=x.shape) for x in (gate, up, down))
            other = {"relu": None, "relu squared": w, "sin": v}[name]
            layers.append(tnsim.Gated(w, other, d, name.split()[0]))
        a, b, c, d = (tnsim.Model([layer]) for layer in layers)
        wanted = cosine_by_mpmath(
            name, [(1, layers[1]), (-1, layers[0])], [(1, layers[3]), (-1, layers[2])]
        )
        found = tnsim.similarity(b - a, d - c)
        assert abs(found - wanted) <= told[-1] <= max(1e-13, 1e-13 / change**2)
    near, other = (
        tnsim.Model([tnsim.Gated(w, None if name == "relu" else up, down, name.split()[0])])
        for w in (gate, gate * (1 + 1e-9))
    )
    with refused("the same function to within rounding"):
        tnsim.similarity(other - near, near)


def test_what_kernels_of_many_inputs_take(rng):
    """Rows of the units that a model has in common with itself count; matrix products are quick."""
    a, b, *narrow = (mlp(rng, "relu", 160, 3, inputs) for inputs in (600, 600, 3, 3))
    plan = tnsim.plan(a, b, cosine=True)
    assert plan.seconds < 2 * tnsim.plan(*narrow, cosine=True).seconds
    tnsim.similarity(a, b)
    tracemalloc.start()
    tnsim.similarity(a, b)
    measured = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert measured < plan.peak_bytes
