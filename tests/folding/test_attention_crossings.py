"""Attention crossed with derivatives, attribution, units, `vmap`, `pairwise` and differences.

Plans run on NumPy, forward and backward: `eager` gives JAX the derivative of a plan's operations, which PyTorch
finds by running them one by one, so nothing is compiled.
"""

import itertools

import jax
import numpy as np
import pytest
from oracles import bilinear, linear, quadrature, random_gaussian
from rational_oracle import SequenceFunction, cosine_of_sequences
from sequence_cases import slow
from sequence_oracles import attention, sequence_moments, sequence_products

import tnsim
from tnsim.engine import execution
from tnsim.engine.lowering import run_piece

N = 2  # positions


def bare(layer, *names):
    """Attention without these of its biases."""
    return type(layer)(**vars(layer) | {f"{name}_bias": None for name in names})


# attention in every setting, between other layers: rng -> layers from two coordinates to two
ONE = {
    "biases, no rotation, no mask": lambda g: [
        tnsim.Residual(attention(g, 2, 2, 1, 1, 2, True, rope_base=None, mask="none"), 0.7, 0.35),
        linear(g, 2, 2, True),
    ],
    "rotation, some biases": lambda g: [
        bare(attention(g, 2, 1, 2, 2, 2, True), "k1", "v", "o"),
    ],
    "no constants": lambda g: [linear(g, 2, 2), attention(g, 2, 2, 2, 1, 2, mask="none")],
}
# two nonlinear layers of one coordinate, for quadrature over both hidden states
TWO = {
    "attention over attention": lambda g: [
        tnsim.Residual(attention(g, 1, 1, 2, 1, 1, True), 0.6, 0.4),
        attention(g, 1, 2, 1, 1, 1, True, rope_base=None, mask="none"),
    ],
    "attention over bilinear": lambda g: [
        bilinear(g, 1, 2, 1, True),
        tnsim.Residual(attention(g, 1, 2, 2, 1, 1, True, mask="none"), 1.0, 0.5),
        linear(g, 1, 2, True),
    ],
}


def pair(make, rng):
    return tuple(tnsim.Model(make(rng), n_ctx=N) for _ in range(2))


def over_positions(rng, metric, d):
    """A metric of a mean and a covariance over all coordinates of all positions."""
    return metric(*random_gaussian(rng, N * d))


# ---------------------------------------------------------------------------------- derivatives


@pytest.fixture
def eager(monkeypatch):
    """What is traced runs on NumPy, operation by operation, and so does its reverse mode."""
    torch = pytest.importorskip("torch", reason="reverse mode without compiling needs PyTorch")
    run = execution.run

    def on_torch(plan, arrays):
        values, logs = dict(arrays), {}
        for n, stage in enumerate(plan.stages):
            inputs = [values[name] for name in stage.inputs]
            outputs, scales = run_piece(plan.pieces[stage.piece], inputs)
            values.update(zip(stage.outputs, outputs, strict=True))
            logs.update(zip([(n, group) for group in stage.groups], scales, strict=True))
        return [values[name] for name in plan.outputs], [logs[key] for key in plan.log_weights]

    def traced(plan, arrays, backend="jax", over=None):
        if not any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
            return run(plan, arrays, backend, over or {})
        names = list(plan.shapes)

        def forward(inputs):
            found = run(plan, dict(zip(names, map(np.asarray, inputs), strict=True)), "numpy")
            values = [np.asarray(found.values[name]) for name in plan.outputs]
            return (values, [np.asarray(found.logs[key]) for key in plan.log_weights]), inputs

        @torch.enable_grad()
        def backward(inputs, slopes):
            tensors = [torch.tensor(np.asarray(x), requires_grad=True) for x in inputs]
            found = itertools.chain(*on_torch(plan, dict(zip(names, tensors, strict=True))))
            slopes = [torch.tensor(np.asarray(x)) for x in itertools.chain(*slopes)]
            moving = [(x, y) for x, y in zip(found, slopes, strict=True) if x.requires_grad]
            ends, weights = ([one[n] for one in moving] for n in (0, 1))
            gradients = torch.autograd.grad(ends, tensors, weights, allow_unused=True)
            zeros = [np.zeros(x.shape) for x in inputs]
            return ([z if g is None else g.numpy() for g, z in zip(gradients, zeros, strict=True)],)

        differentiable = jax.custom_vjp(lambda inputs: forward(inputs)[0])
        differentiable.defvjp(forward, backward)
        values, logs = differentiable([arrays[name] for name in names])
        return execution.Result(
            dict(zip(plan.outputs, values, strict=True)),
            dict(zip(plan.log_weights, logs, strict=True)),
            plan.log_weights,
        )

    monkeypatch.setattr(execution, "run", traced)
    with jax.enable_x64(True), jax.disable_jit():
        yield


def moved(tree, direction, step):
    """Every array of a pytree plus a step along the array of another."""
    return jax.tree.map(lambda x, y: x + step * y if np.ndim(x) else x, tree, direction)


def direction(rng, tree):
    return jax.tree.map(lambda x: rng.normal(size=np.shape(x)), tree)


def slope(value, step=0.001):
    """The derivative at 0 by central differences of order ten."""
    weights = (5 / 6, -5 / 21, 5 / 84, -5 / 504, 1 / 1260)
    differences = [value(n * step) - value(-n * step) for n in range(1, 6)]
    return np.dot(weights, differences) / step


def agrees(function, at, rng, along=None):
    """The gradient of a function of a pytree is its slope along a direction, random unless given.

    The tolerance is relative to the sum of the absolute terms of the scalar product.
    """
    along = direction(rng, at) if along is None else along
    pairs = zip(*map(jax.tree.leaves, (jax.grad(function)(at), along, at)), strict=True)
    terms = [np.asarray(g) * d for g, d, x in pairs if np.ndim(x)]
    size = sum(np.abs(x).sum() for x in terms)
    found = slope(lambda step: float(function(moved(at, along, step))))
    assert size > 0
    assert abs(sum(x.sum() for x in terms) - found) < 1e-9 * size


METRICS = {
    "tree": lambda rng, d: tnsim.TreeSymmetric(),
    "frobenius": lambda rng, d: tnsim.Frobenius(),
    "gaussian": lambda rng, d: over_positions(rng, tnsim.Gaussian, d),
    "closure": lambda rng, d: over_positions(rng, tnsim.GaussianClosure, d),
}


QUICK = "biases, no rotation, no mask"


@pytest.mark.parametrize("metric", ["tree", slow("gaussian"), slow("frobenius")])
@pytest.mark.parametrize("case", [QUICK, *(slow(case) for case in ONE if case != QUICK)])
def test_gradients(case, metric, rng, eager):
    """Of similarity and slices, in both models at once."""
    a, b = pair(ONE[case], rng)
    metric = METRICS[metric](rng, 2)
    agrees(lambda models: tnsim.similarity(*models, metric), (a, b), rng)
    agrees(lambda model: tnsim.slices(model, b, metric)[0], a, rng)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["tree", "closure"])
@pytest.mark.parametrize("case", TWO)
def test_gradients_of_two_layers(case, metric, rng, eager):
    a, b = pair(TWO[case], rng)
    metric = METRICS[metric](rng, 1)
    agrees(lambda models: tnsim.similarity(*models, metric), (a, b), rng)


@pytest.mark.slow
def test_gradients_of_moments_and_differences(rng, eager):
    """In the mean and covariance of the inputs, and in both models of `b - a`."""
    a, b = pair(ONE["rotation, some biases"], rng)
    mean, cov = random_gaussian(rng, N * 2)
    turn = 0.1 * rng.normal(size=cov.shape)
    along = rng.normal(size=mean.shape), turn @ cov + cov @ turn.T
    agrees(lambda at: tnsim.similarity(a, b, tnsim.Gaussian(*at)), (mean, cov), rng, along)
    metric = tnsim.Gaussian(mean, cov)
    agrees(lambda models: tnsim.similarity(models[1] - models[0], models[0], metric), (a, b), rng)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [tnsim.Categorical([0.3, 0.7]), tnsim.Categorical(samples=5)])
def test_gradients_over_tokens(metric, rng, eager):
    a, b = pair(ONE["rotation, some biases"], rng)
    agrees(lambda models: tnsim.similarity(*models, metric), (a, b), rng)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["tree", "frobenius", "gaussian"])
def test_gradients_of_three_legs(metric, rng, eager):
    """Of `Multilinear` layers, biases and a skip among them."""
    arrays = [[rng.normal(size=(3, 2)) for _ in range(3)] for _ in range(2)]
    biases = [rng.normal(size=3), None, rng.normal(size=3)]
    first = tnsim.Multilinear(arrays[0], rng.normal(size=(2, 3)), biases, rng.normal(size=2))
    second = tnsim.Multilinear(arrays[1], rng.normal(size=(2, 3)))
    models = tnsim.Model([tnsim.Residual(first, 0.5, 0.7)]), tnsim.Model([second])
    chosen = METRICS[metric](rng, 1)  # two positions of one coordinate are two coordinates
    agrees(lambda both: tnsim.similarity(*both, chosen), models, rng)


def test_gradients_are_those_of_forward_passes(rng, eager):
    """Beside the derivative of the forward pass at nodes of a quadrature, by a complex step."""
    a, b = pair(ONE["biases, no rotation, no mask"], rng)
    metric = over_positions(rng, tnsim.Gaussian, 2)
    gradient = jax.grad(lambda model: tnsim.inner(model, b, metric))(a)
    along = direction(rng, a)
    pairs = zip(*map(jax.tree.leaves, (gradient, along, a)), strict=True)
    terms = [np.asarray(g) * d for g, d, x in pairs if np.ndim(x)]
    expected = sequence_products(moved(a, along, 1e-100j), b, metric).sum().imag * 1e100
    assert sum(x.sum() for x in terms) == pytest.approx(expected, rel=1e-10)


# --------------------------------------------------------------------- components, units, batches


def components(model, by):
    """The parts of the output as functions of the state before the last nonlinear layer."""
    number = max(n for n, order in enumerate(model.orders) if order > 1)
    layer, tail = model.layers[number], model.layers[number + 1 :]
    skip, scale, core = 0.0, 1.0, layer
    if isinstance(layer, tnsim.Residual):
        skip, scale, core = layer.skip, layer.scale, layer.layer

    def behind(y):
        for one in tail:
            y = y @ one.weight.T
        return y

    def constants(h):
        y = np.zeros((*h.shape[:-1], core.d_out))
        y = y if core.o_bias is None else y + scale * core.o_bias
        for one in tail:
            y = one(y)
        return y

    def only(heads):
        seen = np.repeat(np.isin(np.arange(core.n_heads), heads), core.d_value)
        alone = type(core)(**vars(core) | {"o": core.o * seen, "o_bias": None})
        return lambda h: behind(scale * alone(h))

    heads = range(core.n_heads)
    cores = [only([head]) for head in heads] if by == "head" else [only(heads)]
    return number, [lambda h: behind(skip * h), *cores, constants]


def states(a, b, metric, number):
    """Two states before a layer at nodes of a quadrature, and its weights.

    Exact behind linear layers, else over the joint Gaussian that the closure takes both for.
    """
    mean, cov = sequence_moments(metric, N, a.d_in)
    before = a.layers[:number], b.layers[:number]
    if all(layer.order == 1 for layer in before[0]):
        points, weights = quadrature(6, mean, cov)
        found = []
        for layers in before:
            state = points.reshape(len(points), N, -1)
            for layer in layers:
                state = layer(state)
            found.append(state)
        return *found, weights
    mean, cov = np.concatenate([mean, mean]), np.block([[cov, cov], [cov, cov]])
    for pair_of_layers in zip(*before, strict=True):
        points, weights = quadrature(pair_of_layers[0].order + 1, mean, cov)
        halves = zip(pair_of_layers, np.split(points, 2, axis=1), strict=True)
        out = np.hstack([f(x.reshape(len(x), N, -1)).reshape(len(x), -1) for f, x in halves])
        mean = weights @ out
        cov = (weights[:, None] * out).T @ out - np.outer(mean, mean)
    points, weights = quadrature(6, mean, cov)
    return *(x.reshape(len(x), N, -1) for x in np.split(points, 2, axis=1)), weights


@pytest.mark.parametrize("by", ["layer", "head"])
@pytest.mark.parametrize(
    "case", [*ONE, "attention over bilinear", slow("attention over attention")]
)
def test_contributions_are_those_of_the_components(case, by, rng):
    """Entry by entry against quadrature: biases, skips, heads, no rotation, no mask, two layers."""
    a, b = pair((ONE | TWO)[case], rng)
    metric = over_positions(rng, tnsim.GaussianClosure, a.d_in)
    (number, bra), (_, ket) = (components(model, by) for model in (a, b))
    x, y, weights = states(a, b, metric, number)
    products = [
        [np.einsum("p,psk,psk->", weights, f(x), g(y), optimize=True) for g in ket] for f in bra
    ]
    found = tnsim.attribution(a, b, metric, by=by)
    np.testing.assert_allclose(
        found.values, products, rtol=1e-9, atol=1e-10 * np.abs(products).max()
    )


PROJECTIONS = ("q1", "k1", "q2", "k2", "v", "o")


@pytest.mark.parametrize("dtype, most, digits", [("float32", 100, 1e-5), ("float64", 900, 1e-13)])
@pytest.mark.parametrize("metric", ["tree", slow("closure")])
def test_every_projection_in_a_unit_of_its_own(metric, dtype, most, digits, rng):
    """Powers of two on each projection change no cosine, an inner product by a known power."""
    layers = [ONE["no constants"](rng)[1], attention(rng, 2, 1, 3, 1, 2, rope_base=None)]
    a, b = (
        tnsim.Model([type(x)(**{k: _cast(v, dtype) for k, v in vars(x).items()})], n_ctx=N)
        for x in layers
    )
    metric = METRICS[metric](rng, 2)
    expected = tnsim.similarity(a, b, metric, dtype=dtype)
    log = tnsim.log_inner(a, b, metric, dtype=dtype).log
    for _ in range(10):
        powers = dict(zip(PROJECTIONS, rng.integers(-most, most + 1, 6).tolist(), strict=True))
        fields = vars(a.layers[0])
        far = {name: np.ldexp(fields[name], power) for name, power in powers.items()}
        far = tnsim.Model([type(a.layers[0])(**fields | far)], n_ctx=N)
        assert tnsim.similarity(far, b, metric, dtype=dtype) == pytest.approx(expected, abs=digits)
        found = tnsim.log_inner(far, b, metric, dtype=dtype).log
        assert found == pytest.approx(
            log + sum(powers.values()) * np.log(2), abs=10 * digits, rel=1e-15
        )


def _cast(value, dtype):
    return value.astype(dtype) if isinstance(value, np.ndarray) else value


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["tree", "gaussian"])
@pytest.mark.parametrize("case", ONE)
def test_mapped_over_models(case, metric, rng):
    """`vmap` over the weights of attention gives the cosines of the models one by one."""
    a, b = pair(ONE[case], rng)
    metric = METRICS[metric](rng, 2)
    some = [a, *(moved(a, direction(rng, a), 1.0) for _ in range(2))]
    axes = jax.tree.map(lambda x: 0 if np.ndim(x) else None, a)
    both = jax.tree.map(lambda *x: np.stack(x) if np.ndim(x[0]) else x[0], *some)
    with jax.enable_x64(True), jax.disable_jit():
        found = jax.vmap(lambda one: tnsim.similarity(one, b, metric), in_axes=(axes,))(both)
    expected = [tnsim.similarity(one, b, metric) for one in some]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("metric", ["gaussian", "closure"])
@pytest.mark.parametrize("case", ["no constants", slow("biases, no rotation, no mask")])
def test_pairs_over_dependent_positions(case, metric, rng):
    """`pairwise` with a covariance over positions against quadrature, a difference among them."""
    a, b = pair(ONE[case], rng)
    metric = METRICS[metric](rng, 2)
    models = [a, b, a - 0.5 * b]
    points, weights = quadrature(6, *sequence_moments(metric, N, 2))
    values = [model(points.reshape(-1, N, 2)) for model in models]
    gram = np.array([[np.einsum("p,psk,psk->", weights, x, y) for y in values] for x in values])
    norms = np.sqrt(np.diag(gram))
    run = tnsim.pairwise(models, metric)
    np.testing.assert_allclose(run.similarity, gram / np.outer(norms, norms), rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [1e-5, 1e-8, 1e-11])
def test_differences_of_attention_in_fractions(size, rng):
    """`b - a` of models that nearly agree, inputs dependent or of rank one, to the last digits."""
    layer = attention(rng, 1, 1, 1, 1, 2, True, rope_base=None, mask="none")
    other = attention(rng, 1, 1, 1, 1, 2, True, rope_base=None)
    a, c = (tnsim.Model([x], n_ctx=N) for x in (layer, other))
    b = moved(a, direction(rng, a), size)
    mean = np.array([[0.25], [-0.5]])
    for root in (np.array([[1.0, 0.0], [0.5, 0.75]]), np.array([[1.0], [-0.5]])):
        metric = tnsim.Gaussian(mean.ravel(), root @ root.T)
        functions = SequenceFunction(b - a), SequenceFunction(c)
        expected = float(cosine_of_sequences(*functions, mean, root))
        assert tnsim.similarity(b - a, c, metric) == pytest.approx(expected, rel=1e-10)
