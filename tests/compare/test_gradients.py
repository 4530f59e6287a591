"""Gradients of code that is not compiled run plans: against differences of the verbs, and against compiled traces."""

import gc
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_cases
from closeness import LARGEST, assert_close
from oracles import slope_of
from refusals import refused

import tnsim
from tnsim.compare import by_plans
from tnsim.compare.gradients import Form
from tnsim.engine.plan import Plan

WORKS = {
    "inputs far from one": (
        cases.SHALLOW["bilinear biases"],
        tnsim.Gaussian([300.0, 0.1, 0.0], [1e5, 1.0, 1e-6]),
    ),
    "a skip": (cases.SHALLOW["lerp residual"], tnsim.Gaussian()),
    "moment nodes": (
        cases.DEEP["two with biases"],
        tnsim.Gaussian([0.5, 0.0, -0.2], [1.0, 0.3, 2.0]),
    ),
    "diagrams": (cases.DEEP["two bilinear"], tnsim.Gaussian()),
    "diagrams of skips": (cases.DEEP["two residual"], tnsim.Gaussian()),
    "whole trees": (cases.DEEP["two bilinear"], tnsim.Symmetric()),
    "whole trees of skips": (cases.DEEP["two residual"], tnsim.Symmetric()),
    "layers": (cases.DEEP["two residual"], tnsim.TreeSymmetric()),
    "a closure": (cases.DEEP["two bilinear"], tnsim.GaussianClosure()),
    "a closure of skips": (cases.DEEP["two residual"], tnsim.GaussianClosure()),
    "attention": (sequence_cases.ONE_LAYER["biases"], tnsim.Gaussian()),
}
VERBS = {
    "similarity": tnsim.similarity,
    "inner": tnsim.inner,
    "log_inner": lambda *given: tnsim.log_inner(*given).log,
}


@pytest.fixture
def never_traced(monkeypatch):
    """Plans are never a part of a trace."""

    def forbidden(*given):
        raise AssertionError("a plan was traced")

    monkeypatch.setattr(by_plans, "_traced_runs", forbidden)


def numbers_of(tree):
    return jax.tree.map(lambda x: np.asarray(x, float), tree)


def differentiated(transform, function, *given, **options):
    """What a transform of JAX gives of a function, in float64, as numbers of NumPy."""
    with jax.enable_x64(True):
        return numbers_of(transform(function, **options)(*given))


@pytest.mark.sampled(quick=1, slow=5)
@pytest.mark.parametrize("work, verb", itertools.product(WORKS, VERBS))
def test_gradients_are_differences_of_the_value(work, verb, never_traced, rng, diagrams):
    """Both models and the moments move; differences are of eighth order."""
    make, metric = WORKS[work]
    models = sequence_cases.pair(make, 2) if work == "attention" else cases.pair(make, rng)
    assert tnsim.plan(*models, metric).route == "contractions"
    given = numbers_of((*models, metric))
    function = VERBS[verb]
    value, gradient = differentiated(jax.value_and_grad, lambda given: function(*given), given)
    # Relative to the numbers, as moments may be of any size.
    steps = jax.tree.map(lambda x: rng.normal(size=np.shape(x)) * np.abs(x), given)
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(steps), strict=True)
    terms = [np.sum(slope * step) for slope, step in pairs]

    def moved(t):
        return float(function(*jax.tree.map(lambda x, v: x + t * v, given, steps)))

    # Beside a zero of the inner product the series of its logarithm converges in a small disc, and
    # that of a cosine beside a zero of a norm.
    size = 0.0002 if verb == "log_inner" else 0.001
    scale = max(map(abs, (*terms, moved(0.0))))
    assert_close(value, moved(0.0), scale=abs(moved(0.0)), rtol=1e-11)
    assert_close(sum(terms), slope_of(moved, size, order=8), scale=scale, rtol=1e-9)


def product(weights):
    left, right, down, bias = weights
    return tnsim.Model([tnsim.Bilinear(left, right, down, None, None, bias)])


@pytest.fixture
def weights(rng):
    return [rng.normal(size=shape) for shape in ((3, 2), (3, 2), (2, 3), (2,))]


@pytest.fixture
def cosine(rng):
    goal = product([rng.normal(size=shape) for shape in ((3, 2), (3, 2), (2, 3), (2,))])
    return lambda weights: tnsim.similarity(product(weights), goal, tnsim.TreeSymmetric())


@pytest.mark.slow
def test_first_derivatives_by_every_transform(weights, cosine, never_traced, rng):
    direction = [rng.normal(size=x.shape) for x in weights]
    gradient = differentiated(jax.grad, cosine, weights)
    with jax.enable_x64(True):
        forward = float(jax.jvp(cosine, (weights,), (direction,))[1])
        linear = float(jax.linearize(cosine, weights)[1](direction))
        backward = numbers_of(jax.vjp(cosine, weights)[1](jnp.asarray(2.0))[0])
    along = differentiated(jax.jacfwd, lambda x: cosine([x, *weights[1:]]), weights[0])
    twice = differentiated(jax.grad, lambda x: cosine(x) ** 2, weights)
    expected = sum(np.vdot(g, v) for g, v in zip(gradient, direction, strict=True))
    assert_close(forward, expected, scale=1.0, rtol=1e-13)
    assert_close(linear, expected, scale=1.0, rtol=1e-13)
    assert_close(along, gradient[0], scale=LARGEST, rtol=1e-13)
    for one, other, square in zip(gradient, backward, twice, strict=True):
        assert_close(other, 2 * one, scale=LARGEST, rtol=1e-13)
        assert_close(square, 2 * cosine(weights) * one, scale=LARGEST, rtol=1e-12)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("x64", [True, False])
def test_a_compiled_trace_has_the_same_derivatives(weights, cosine, x64):
    """In the types that a trace gives, whether the gradient, the cosine or the tier is compiled."""
    rtol, reason = (1e-11, None) if x64 else (1e-4, "float32")
    with jax.enable_x64(x64):
        given = [jnp.asarray(x, float) for x in weights]
        value, gradient = jax.value_and_grad(cosine)(given)
        by_tier = tnsim.using(tnsim.Session(tier="compile"))(jax.value_and_grad(cosine))
        in_traces = jax.jit(jax.value_and_grad(cosine)), jax.value_and_grad(jax.jit(cosine))
        for compiled in (by_tier, *in_traces):
            found, slopes = compiled(given)
            assert found.dtype == value.dtype
            assert_close(found, value, scale=1.0, rtol=rtol, limited_by=reason)
            for one, other in zip(gradient, slopes, strict=True):
                assert one.dtype == other.dtype
                assert_close(other, one, scale=LARGEST, rtol=rtol, limited_by=reason)


def test_gradients_of_numbers_are_numbers_inside_of_a_trace(never_traced, rng):
    """A gradient at constants inside of a compiled function was an error of nested compilation."""
    model, goal = cases.pair(cases.DEEP["two bilinear"], rng)
    slope = jax.grad(lambda model: tnsim.similarity(model, goal, tnsim.TreeSymmetric()))
    with jax.enable_x64(True):
        expected = numbers_of(jax.tree.leaves(slope(model)))
        found = jax.jit(lambda x: [x * one for one in jax.tree.leaves(slope(model))])(2.0)
    for one, other in zip(expected, found, strict=True):
        assert_close(other, 2 * one, scale=LARGEST, rtol=1e-13)


@pytest.mark.full
def test_maps_checkpoints_and_second_derivatives(weights, cosine):
    gradient = differentiated(jax.grad, cosine, weights)
    other = differentiated(jax.grad, cosine, [2 * x for x in weights])
    again = differentiated(jax.grad, jax.checkpoint(cosine), weights)
    of_left = lambda x: cosine([x, *weights[1:]])  # noqa: E731
    with jax.enable_x64(True):
        mapped = numbers_of(jax.vmap(jax.grad(cosine))([jnp.stack([x, 2 * x]) for x in weights]))
        compiled = np.asarray(jax.jit(jax.hessian(of_left))(weights[0]))
    hessian = differentiated(jax.hessian, of_left, weights[0])
    twice = differentiated(jax.grad, lambda x: jax.grad(of_left)(x).sum(), weights[0])
    for one, two, mapped_two, same in zip(gradient, other, mapped, again, strict=True):
        assert_close(mapped_two, np.stack([one, two]), scale=LARGEST, rtol=1e-11)
        assert_close(same, one, scale=LARGEST, rtol=1e-11)
    assert_close(hessian, compiled, scale=LARGEST, rtol=1e-11)
    assert_close(twice, compiled.sum(axis=(0, 1)), scale=LARGEST, rtol=1e-10)


@pytest.mark.slow
def test_sums_with_traced_coefficients(weights, never_traced, rng):
    """c M - N beside N, where c moves too."""
    other = product([rng.normal(size=x.shape) for x in weights])

    def inner(c, weights):
        return tnsim.inner(c * product(weights) - other, other, tnsim.TreeSymmetric())

    slope, slopes = differentiated(jax.grad, inner, 3.0, weights, argnums=(0, 1))
    alone = differentiated(
        jax.grad, lambda x: tnsim.inner(product(x), other, tnsim.TreeSymmetric()), weights
    )
    expected = tnsim.inner(product(weights), other, tnsim.TreeSymmetric())
    assert_close(slope, expected, scale=abs(expected), rtol=1e-12)
    for one, single in zip(slopes, alone, strict=True):
        assert_close(one, 3 * single, scale=LARGEST, rtol=1e-12)


SUMS = {
    "plans": (lambda arrays: tnsim.Model([tnsim.Bilinear(*arrays)]), tnsim.Gaussian()),
    "points": (lambda arrays: tnsim.Model([tnsim.Bilinear(*arrays)]), tnsim.Empirical(np.eye(3))),
    "kernels": (
        lambda arrays: tnsim.Model([tnsim.Linear(arrays[0]), tnsim.Elementwise("relu")]),
        tnsim.Gaussian(),
    ),
}


@pytest.mark.crossing
@pytest.mark.parametrize("factor", [1.0, 1e-100, 1e100])
@pytest.mark.parametrize("route", SUMS)
def test_a_coefficient_of_zero_has_the_slope_of_its_model(route, factor, rng):
    """The slope was 0, and a second derivative NaN, as a zero had no scale."""
    build, metric = SUMS[route]
    a, b = (build(rng.normal(size=(3, 3, 3))) for _ in range(2))
    cross, norm = tnsim.inner(a, b, metric), tnsim.inner(b, b, metric)
    of_one = lambda c: tnsim.inner(c * (factor * a), b, metric)  # noqa: E731
    beside = lambda c: tnsim.inner(c * (factor * a) + b, b, metric)  # noqa: E731
    both = lambda c: tnsim.inner(c * (factor * a) + c * b, b, metric)  # noqa: E731
    all_three = lambda c: [function(c) for function in (of_one, beside, both)]  # noqa: E731
    expected = factor * cross + np.array([0.0, 0.0, norm])
    if route != "points":  # which are a trace in either way
        assert_close(differentiated(jax.jacobian, all_three, 0.0), expected, scale=np.abs(expected))
    with jax.enable_x64(True):
        compiled = jax.jit(jax.jacobian(all_three))(0.0)
    assert_close(np.array(compiled), expected, scale=np.abs(expected))


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("route, compiling", [("plans", True), ("plans", False), ("points", True)])
def test_second_derivatives_where_a_coefficient_is_zero(route, compiling, rng):
    """Without compiling, a sum without axes is a plain number of NumPy."""
    build, metric = SUMS[route]
    a, b = (build(rng.normal(size=(3, 3, 3))) for _ in range(2))

    def norm(c):
        return tnsim.inner(b + c * a, b + c * a, metric)

    expected = 2 * tnsim.inner(a, a, metric)
    with jax.disable_jit(not compiling):
        found = differentiated(jax.hessian, norm, 0.0)
    assert_close(found, expected, scale=expected)


def test_sums_with_an_activation_beside_a_traced_coefficient(rng):
    """Ended in JAX's error for a trace that NumPy reads."""
    build, metric = SUMS["kernels"]
    a, b = (build(rng.normal(size=(1, 3, 3))) for _ in range(2))
    cosine = lambda c: tnsim.similarity(b + c * a, a, metric)  # noqa: E731
    with jax.enable_x64(True):
        found = jax.jit(jax.vmap(cosine))(jnp.array([0.0, 0.7]))
    expected = [cosine(0.0), cosine(0.7)]
    assert_close(np.asarray(found), np.array(expected, float), scale=1.0)


def test_a_model_beside_itself(weights, never_traced):
    def cosine(weights):
        model = product(weights)
        return tnsim.similarity(model, model)

    value, gradient = differentiated(jax.value_and_grad, cosine, weights)
    assert_close(value, 1.0)
    for array in gradient:
        assert_close(array, np.zeros_like(array), scale=1.0)


def zeros_in_a_product(rng, huge):
    """Rows of both legs, rows of the output and a column of it; what reads a row of zeros may be huge."""
    left, right, down = (rng.normal(size=(4, 4)) for _ in range(3))
    left[1], right[2], down[3], down[:, 0] = 0.0, 0.0, 0.0, 0.0
    down[:, 1] *= huge
    return [left, right, down], lambda arrays: tnsim.Model([tnsim.Bilinear(*arrays)])


def zeros_in_attention(rng, huge):
    """A head without queries, a row of values of the other, and an output."""
    arrays = [rng.normal(size=(4, 3)) for _ in range(5)] + [rng.normal(size=(3, 4))]
    arrays[0][2:], arrays[4][1], arrays[5][2] = 0.0, 0.0, 0.0
    arrays[5][:, 1:] *= huge
    return arrays, lambda arrays: tnsim.Model([tnsim.Attention(*arrays, n_heads=2)], n_ctx=2)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("huge", [1.0, 1e250])
@pytest.mark.parametrize("zeros", [zeros_in_a_product, zeros_in_attention])
def test_rows_of_zeros_have_gradients(zeros, huge, rng):
    """They were 0, as a row of zeros had no unit, and what reads it became zero in its place."""
    arrays, build = zeros(rng, huge)
    goal = build([rng.normal(size=x.shape) for x in arrays])

    def log(arrays):
        return tnsim.log_inner(build(arrays), goal, tnsim.TreeSymmetric())

    slopes = differentiated(jax.grad, lambda arrays: log(arrays).log, arrays)
    sign, base = log(arrays)
    for n, slope in enumerate(slopes):
        # The inner product is linear in each array: f(x + v) = f(x) (1 + slope v).
        step = rng.normal(size=slope.shape)
        moved_sign, moved = log([x + step if n == k else x for k, x in enumerate(arrays)])
        ratio = sign * moved_sign * np.exp(moved - base)
        found = 1.0 + np.vdot(slope, step)
        assert_close(found, ratio, scale=max(1.0, np.abs(slope * step).sum()), rtol=1e-11)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("metric", [tnsim.Symmetric(), tnsim.Gaussian()])
@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_whose_products_have_a_factor_zero(metric, place, rng):
    """Squares that undo each other had a norm of rounding, and the zero function a cosine."""
    layers = [list(rng.normal(size=(3, 3, 3))) for _ in range(2)]
    goal = tnsim.Model([tnsim.Bilinear(*rng.normal(size=(3, 3, 3))) for _ in layers])
    layers[place][rng.integers(2)] *= 0

    def number(verb, layers, *bias):
        model = tnsim.Model([tnsim.Bilinear(*layer) for layer in layers])
        if bias:  # small beside all that the zero stands for
            model = tnsim.Model([*model.layers, tnsim.Linear(np.eye(3), *bias)])
        return verb(model, goal, metric)

    def with_gradient(verb, *given):
        return differentiated(jax.value_and_grad, lambda *x: number(verb, *x), *given)

    assert np.isnan(with_gradient(tnsim.similarity, layers)[0])
    found, slopes = with_gradient(tnsim.inner, layers)
    assert_close(found, 0.0, scale=1.0)
    if place:  # the product is linear in the rows of zeros
        moved = jax.tree.map(lambda x: x if x.any() else rng.normal(size=x.shape), layers)
        linear = sum(jax.tree.leaves(jax.tree.map(np.vdot, slopes, moved)))
        assert_close(linear, number(tnsim.inner, moved))
    if metric.pairs_within_model:
        given = layers, 1e-12 * rng.normal(size=3)
        value, _ = with_gradient(tnsim.similarity, *given)
        assert_close(value, number(tnsim.similarity, *given), scale=1.0)


@pytest.mark.parametrize(
    "verb",
    ["similarity", *(pytest.param(n, marks=pytest.mark.slow) for n in ("inner", "log_inner"))],
)
@pytest.mark.parametrize("tier", ["interpret", pytest.param("compile", marks=pytest.mark.slow)])
def test_a_number_without_digits_is_nan(tier, verb, rng, monkeypatch):
    """As in a compiled trace: two hidden units that nearly undo each other, in float32."""
    monkeypatch.setattr(tnsim.session(), "tier", tier)
    goal, cancelling = cases.cancelling_copies(rng)
    for size, is_known in ((1.0, True), (1e6, False)):
        value, gradient = jax.value_and_grad(lambda a: VERBS[verb](a, goal))(cancelling(size))
        assert value.dtype == np.float32 and np.isfinite(value) == is_known
        assert all(np.isfinite(x).all() == is_known for x in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["interpret", "compile"])
def test_the_way_back_counts_in_the_budget(tier, rng):
    a, b = (tnsim.Model([tnsim.Bilinear(*rng.normal(size=(3, 8, 8)))]) for _ in range(2))
    plan = tnsim.plan(a, b, cosine=True).contraction
    memory = plan.peak_bytes if tier == "compile" else plan.interpreted_bytes
    limits = {"memory_bytes": memory}, {"multiplications": plan.multiplications}
    for limit in limits:
        budget = tnsim.Budget(**limit)
        tnsim.similarity(a, b, budget=budget)
        # In the precision of the budget's plan: JAX differentiates in float32 else.
        with (
            tnsim.using(tnsim.Session(tier=tier)),
            jax.enable_x64(True),
            refused("with its gradients needs", tnsim.TooLarge),
        ):
            jax.grad(lambda m, budget=budget: tnsim.similarity(m, b, budget=budget))(a)


def test_plans_are_gone_with_their_session(weights, cosine):
    """Programs that JAX keeps held them."""

    def plans() -> list[Plan]:
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing) is Plan]

    session, before = tnsim.Session(), len(plans())
    with tnsim.using(session):
        jax.grad(cosine)(weights)
    assert len(plans()) > before
    session.clear()
    assert len(plans()) == before


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["interpret", "compile"])
def test_steps_of_training_trace_nothing_anew(tier, weights, cosine, monkeypatch):
    optax = pytest.importorskip("optax")
    adam = optax.adam(0.05)
    traces = []
    traced = Form.traced
    monkeypatch.setattr(Form, "traced", lambda *given: traces.append(0) or traced(*given))
    with jax.enable_x64(True), tnsim.using(tnsim.Session(tier=tier)):
        state, values = adam.init(weights), []
        for _ in range(20):
            value, gradient = jax.value_and_grad(lambda x: 1 - cosine(x))(weights)
            updates, state = adam.update(gradient, state)
            weights = optax.apply_updates(weights, updates)
            values.append((float(value), len(traces)))
    assert values[-1][0] < values[0][0] - 0.2 and values[-1][1] == values[0][1]
