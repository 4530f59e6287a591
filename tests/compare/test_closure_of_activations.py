"""`GaussianClosure` of several layers with activations, against a recursion by quadrature.

The oracle goes through both networks side by side, layer by layer. A unit is f(u) w with u and w
affine in the joint state, and every moment is a sum over a dense grid of (u, v), given which w and
w' are normal. Panels of Gauss-Legendre nodes end at kinks.
"""

import itertools

import jax
import numpy as np
import pytest
from activated_cases import KINKED, panels
from closeness import assert_close
from refusals import refused

import tnsim
from tnsim.activations.activation import activation
from tnsim.engine.precision import Arithmetic
from tnsim.problems.kernels import product_of, under


def lifted(weight, bias):
    """An affine map of (1, x) to (1, y)."""
    bias = np.zeros(len(weight)) if bias is None else bias
    return np.vstack([np.eye(1, 1 + weight.shape[1]), np.column_stack([bias, weight])])


def levels(model):
    """Every layer with an activation as (f, rows u, rows w, map), and the affine map behind the last one.

    Rows read the state (1, x) below, and the map gives the state above from the state below and the units.
    """
    found, below = [], np.eye(model.d_in + 1)
    for layer in model.layers:
        skip, scale = 0.0, 1.0
        if isinstance(layer, tnsim.Residual):
            skip, scale, layer = layer.skip, layer.scale, layer.layer
        if isinstance(layer, tnsim.Linear):
            below = lifted(layer.weight, layer.bias) @ below
            continue
        down, bias, up = np.eye(layer.d_out), None, None
        if isinstance(layer, tnsim.Elementwise):
            f, gate = layer.activation, lifted(down, None)
        else:
            is_bilinear = isinstance(layer, tnsim.Bilinear)
            names = ("left", "right") if is_bilinear else ("gate", "up")
            f = activation("identity") if is_bilinear else layer.activation
            gate, up = (
                None
                if getattr(layer, name) is None
                else lifted(getattr(layer, name), getattr(layer, f"{name}_bias"))
                for name in names
            )
            down, bias = layer.down, layer.down_bias
        factor = np.eye(1, gate.shape[1]).repeat(len(gate), 0) if up is None else up
        constant = None if bias is None else scale * bias
        stream = lifted(skip * np.eye(layer.d_out, layer.d_in), constant)
        units = np.vstack([np.zeros(down.shape[1]), scale * down])
        above = np.hstack([stream @ below, units])
        found.append((f, gate[1:] @ below, factor[1:] @ below, above))
        below = np.eye(layer.d_out + 1)
    return found, below


def nodes_of(f, mean, deviation, near=()):
    """Nodes and weights of a standard normal variable that f(mean + deviation z) is integrated by."""
    own = [-mean / deviation] if f.name in KINKED else near_crossing(mean, deviation, 1.0)
    return panels([*own, *near])


def near_crossing(mean, slope, width):
    """Ends of panels about the place where mean + slope z crosses zero, of a transition that wide."""
    if not slope:
        return ()
    lengths = width / abs(slope) * 2.0 ** np.arange(-1, 12)
    return [-mean / slope + x for x in (*-lengths, 0.0, *lengths)]


def unit_moments(one, two, mean, cov):
    """E f(u) w g(v) w'; a unit is (f, row u, row w). Without an activation f(u) is 1."""
    rows = np.stack([*one[1:], *two[1:]])
    at, joint = rows @ mean, rows @ cov @ rows.T
    (f, *_), (g, *_) = one, two
    if f is None and g is None:
        return joint[1, 3] + at[1] * at[3]
    if f is None:
        return unit_moments(two, one, mean, cov)
    same = g is None or abs(joint[0, 2] ** 2 / joint[0, 0] / joint[2, 2] - 1) < 1e-13
    deviation = joint[0, 0] ** 0.5
    x, weight = nodes_of(f, at[0], deviation)
    if same:
        u = at[0] + deviation * x
        slope = joint[0] / joint[0, 0]
        given = at[:, None] + slope[:, None] * (u - at[0])
        left = joint[1, 3] - joint[0, 1] * slope[3]
        other = 1.0 if g is None else g(given[2])
        return weight @ (f(u) * other * (given[1] * given[3] + left))
    rest = (joint[2, 2] - joint[0, 2] ** 2 / joint[0, 0]) ** 0.5
    width = rest if g.name in KINKED else np.hypot(rest, 1.0)
    x, weight = nodes_of(f, at[0], deviation, near_crossing(at[2], joint[0, 2] / deviation, width))
    both = np.ix_((0, 2), (0, 2))
    slopes = joint[[1, 3]][:, [0, 2]] @ np.linalg.inv(joint[both])
    left = (joint[np.ix_((1, 3), (1, 3))] - slopes @ joint[[0, 2]][:, [1, 3]])[0, 1]
    total = 0.0
    for z, share in zip(x, weight, strict=True):
        u = at[0] + deviation * z
        centre = at[2] + joint[0, 2] / deviation * z
        y, inner = nodes_of(g, centre, rest)
        v = centre + rest * y
        w, other = at[[1, 3]][:, None] + slopes @ np.stack([np.full_like(v, u - at[0]), v - at[2]])
        total += share * f(u) * (inner @ (g(v) * (w * other + left)))
    return float(total)


def beside(one, two):
    """Two maps of the states of the two models as one."""
    return np.block(
        [[one, np.zeros((len(one), two.shape[1]))], [np.zeros((len(two), one.shape[1])), two]]
    )


def closure(a, b, metric):
    """E of outputs of a times those of b, and of the squares of both, by the recursion."""
    sides, d = [levels(a), levels(b)], a.d_in
    mean = np.tile([1.0, *(np.zeros(d) if metric.mean is None else metric.mean)], 2)
    cov = np.tile(np.pad(np.eye(d) if metric.cov is None else metric.cov, ((1, 0), (1, 0))), (2, 2))
    width = d + 1  # of the state of a, which comes first
    for level in range(max(len(layers) for layers, _ in sides)):
        rows, units, maps = np.eye(len(mean)), [], []
        for own, (layers, _) in zip((rows[:width], rows[width:]), sides, strict=True):
            units += [(None, row, row) for row in own]
            maps.append(np.eye(len(own)))
            if level < len(layers):
                f, gate, factor, maps[-1] = layers[level]
                units += [(f, u @ own, w @ own) for u, w in zip(gate, factor, strict=True)]
        one = None, rows[0], rows[0]
        means = np.array([unit_moments(unit, one, mean, cov) for unit in units])
        second = np.zeros((len(units),) * 2)
        for i, j in itertools.combinations_with_replacement(range(len(units)), 2):
            second[i, j] = second[j, i] = unit_moments(units[i], units[j], mean, cov)
        read, width = beside(*maps), len(maps[0])
        mean, cov = read @ means, read @ (second - np.outer(means, means)) @ read.T
    read = beside(*(last[1:] for _, last in sides))
    raw = read @ (cov + np.outer(mean, mean)) @ read.T
    d = a.d_out
    return np.diag(raw[:d, d:]), np.diag(raw[:d, :d]), np.diag(raw[d:, d:])


def linear(generator, rows, columns):
    return tnsim.Linear(generator.normal(size=(rows, columns)), generator.normal(size=rows))


def network(generator, *activations, width=3, inputs=2):
    """A network with an activation behind every linear layer but the last."""
    sizes = [inputs, *[width] * len(activations)]
    layers = []
    for size, name in zip(sizes, activations, strict=False):
        layers += [linear(generator, width, size), tnsim.Elementwise(name)]
    return tnsim.Model([*layers, linear(generator, 2, width)])


def block(generator, name, width=3, up=True):
    """A gated layer inside a residual."""
    shapes = (2, width), (2, width), (width, 2)
    gate, factor, down = (generator.normal(size=shape) for shape in shapes)
    biases = generator.normal(size=2), generator.normal(size=2) if up else None
    layer = tnsim.Gated(
        gate, factor if up else None, down, name, *biases, generator.normal(size=width)
    )
    return tnsim.Residual(layer, 0.8, 0.5)


def input_law(generator, inputs=2):
    root = generator.normal(size=(inputs, inputs))
    return tnsim.GaussianClosure(generator.normal(size=inputs), root @ root.T)


def assert_right(a, b, metric, tolerance):
    cross, first, second = closure(a, b, metric)
    size = np.sqrt(first.sum() * second.sum())
    assert abs(tnsim.inner(a, b, metric) - cross.sum()) < tolerance * size
    found = tnsim.similarity(a, b, metric)
    assert not found.exact
    assert abs(found - cross.sum() / size) < tolerance
    slices = np.asarray(tnsim.slices(a, b, metric))
    assert_close(slices, cross / np.sqrt(first * second), scale=1.0, rtol=tolerance)


CASES = {
    "smooth": lambda g: (network(g, "tanh", "gelu"), network(g, "gelu", "tanh")),
    "kinks": lambda g: (network(g, "relu", "relu"), network(g, "relu", "tanh")),
    "depth": lambda g: (network(g, "relu", "gelu", "tanh"), network(g, "tanh")),
    "blocks": lambda g: (
        tnsim.Model([linear(g, 3, 2), block(g, "silu"), block(g, "gelu", up=False)]),
        tnsim.Model([linear(g, 3, 2), tnsim.Residual(tnsim.Elementwise("relu"), 0.3), linear(g, 3, 3), block(g, "relu")]),
    ),
    "bilinear": lambda g: (
        tnsim.Model([tnsim.Bilinear(*(g.normal(size=s) for s in ((3, 2), (3, 2), (3, 3), 3, 3, 3))), block(g, "silu")]),
        tnsim.Model([linear(g, 3, 2), tnsim.Elementwise("relu"), tnsim.Bilinear(*(g.normal(size=(3, 3)) for _ in range(3)))]),
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_against_the_recursion_by_quadrature(rng, case):
    a, b = CASES[case](rng)
    assert_right(a, b, input_law(rng), 1e-9)


def by_kernels(model):
    """The same polynomial with an identity behind it, which is an activation, so that it has no plan."""
    return tnsim.Model([*model.layers, tnsim.Elementwise("identity")])


def test_polynomials_have_the_values_of_their_plans(rng):
    def bilinear(rows, columns):
        shapes = (5, columns), (5, columns), (rows, 5), 5, 5, rows
        return tnsim.Bilinear(*(rng.normal(size=shape) for shape in shapes))

    cubic = tnsim.Multilinear(
        rng.normal(size=(3, 4, 3)), rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    )
    a = tnsim.Model([bilinear(3, 2), tnsim.Residual(bilinear(3, 3), 0.5), linear(rng, 2, 3)])
    b = tnsim.Model([linear(rng, 3, 2), cubic, bilinear(2, 3)])
    metric = input_law(rng)
    for one, two in ((a, b), (a, a), (b, b)):
        expected = tnsim.similarity(one, two, metric)
        assert_close(
            tnsim.similarity(by_kernels(one), by_kernels(two), metric),
            expected,
            scale=1.0,
            rtol=1e-12,
        )
    assert_close(
        tnsim.inner(by_kernels(a), by_kernels(a), metric), tnsim.inner(a, a, metric), rtol=1e-12
    )


def test_equal_functions_have_similarity_one(rng):
    metric = input_law(rng)
    a = network(rng, "relu", "gelu", width=6)
    first, relu, second, gelu, last = a.layers
    order, factors = rng.permutation(6), np.exp(rng.normal(size=6))
    copy = tnsim.Model(
        [
            tnsim.Linear(first.weight[order] * factors[:, None], first.bias[order] * factors),
            relu,
            tnsim.Linear(second.weight[:, order] / factors, second.bias),
            gelu,
            last,
        ]
    )
    assert abs(tnsim.similarity(a, copy, metric) - 1) < 1e-13
    assert tnsim.similarity(a, tnsim.Model(a.layers), metric) == 1


@pytest.mark.slow
def test_steps_tell_the_error_of_correlations(rng):
    """A kernel of steps has the slope 1 / sqrt(1 - rho^2), so that equal units lose half the digits."""
    metric = input_law(rng)
    a = network(rng, "relu", "step", width=6)
    first, relu, second, *rest = a.layers
    order = rng.permutation(6)
    permuted = tnsim.Linear(first.weight[order], first.bias[order])
    copy = tnsim.Model([permuted, relu, tnsim.Linear(second.weight[:, order], second.bias), *rest])
    assert abs(tnsim.similarity(a, copy, metric) - 1) < 1e-6
    product = product_of(*(under(x, metric, "float64") for x in (a, copy)), False, "float64")
    assert product.size * Arithmetic(1, "float64").rounding > 1e-8 * product.mantissa


def test_means_that_are_large_beside_deviations(rng):
    """ReLU units far from their kinks are linear, so that the network is one bilinear layer."""
    weight = rng.normal(size=(4, 2))
    weight /= np.linalg.norm(weight, axis=1, keepdims=True)  # a mean of 100 is rounded by 1e-14
    lifted = tnsim.Linear(weight, np.full(4, 100.0)), tnsim.Elementwise("relu")
    back = tnsim.Linear(np.eye(4), np.full(4, -100.0))
    last = tnsim.Bilinear(*(rng.normal(size=(4, 4)) for _ in range(3)))
    deep = tnsim.Model([*lifted, back, last])
    plain = tnsim.Model([tnsim.Linear(weight), last])
    assert_close(
        tnsim.inner(deep, deep, tnsim.GaussianClosure()), tnsim.inner(plain, plain), rtol=2e-11
    )


@pytest.mark.slow
def test_verbs(rng):
    metric = input_law(rng)
    a, b, c = (network(rng, *names) for names in (("relu", "tanh"), ("tanh", "gelu"), ("relu",)))
    inner = float(tnsim.inner(a, b, metric))
    sign, log = tnsim.log_inner(a, b, metric)
    assert_close(sign * np.exp(log), inner, rtol=1e-13)
    difference = tnsim.inner(a, a, metric) - 2 * inner
    assert_close(tnsim.inner(a, a - 2.0 * b, metric), difference, rtol=1e-12)
    models = [a, b, c]
    found = tnsim.pairwise(models, metric)
    expected = [[float(tnsim.similarity(x, y, metric)) for y in models] for x in models]
    assert_close(found.similarity, expected, scale=1.0, rtol=1e-13)
    assert not found.attrs["exact"]
    plan = tnsim.plan(a, b, metric, cosine=True)
    assert (plan.route, plan.exact, plan.fact("kernels")) == ("kernels", False, 6)
    assert plan.fact("rows of hidden units") == plan.fact("columns of hidden units") == 3
    sequences = tnsim.Model(a.layers, n_ctx=2), tnsim.Model(b.layers, n_ctx=2)
    assert_close(tnsim.inner(*sequences, metric), 2 * inner, rtol=1e-13)


@pytest.mark.slow
def test_networks_show_the_kernel_of_the_last_layers(rng):
    metric = input_law(rng)
    a, b = network(rng, "relu", "tanh"), network(rng, "tanh", "gelu")
    ((weight, joined),) = tnsim.tensor_networks.networks(a, b, metric)
    assert "KERNEL" in joined.tags
    found = weight * joined.contract(output_inds=())
    assert_close(found, tnsim.inner(a, b, metric), rtol=1e-13)


def test_weights_of_any_size(rng):
    metric = input_law(rng)
    a, b = network(rng, "relu", "tanh"), network(rng, "gelu", "relu")
    first, relu, second, *rest = a.layers
    far = tnsim.Linear(second.weight * 1e200, second.bias * 1e200)
    back = tnsim.Linear(np.eye(3) * 1e-200)
    assert_close(
        tnsim.similarity(tnsim.Model([first, relu, far, back, *rest]), b, metric),
        tnsim.similarity(a, b, metric),
        scale=1.0,
        rtol=1e-12,
    )


def test_gradients_are_refused_in_one_line(rng):
    a, b = network(rng, "relu", "tanh"), network(rng, "gelu", "relu")
    with refused(r"no gradients.*Empirical", tnsim.UnsupportedLayer):
        jax.grad(lambda model: tnsim.similarity(model, b, tnsim.GaussianClosure()))(a)
