"""Attention crossed with derivatives, units, `vmap`, `pairwise`, differences and paths.

Plans run on NumPy, forward and backward, so nothing is compiled.
"""

import functools
import itertools
from types import SimpleNamespace

import backends
import component_oracles
import jax
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import (
    bilinear,
    closure_products,
    expected_products,
    in_dtype,
    linear,
    moments_of,
    quadrature,
    random_gaussian,
)
from rational_oracle import Function, cosine_of_sequences
from sequence_cases import slow
from sequence_oracles import attention, dense_tree_product

import tnsim
import tnsim.models.components
from tnsim.localise.paths import components_in
from tnsim.metrics.protocol import Reading

N = 2  # positions


def bare(layer, *names):
    """Attention without these of its biases."""
    return type(layer)(**vars(layer) | {f"{name}_bias": None for name in names})


# attention in every setting, between other layers: rng -> layers from two coordinates to two
ONE = {
    "rotation, some biases": lambda g: [bare(attention(g, 2, 1, 2, 2, 2, True), "k1", "v", "o")],
    "biases, no rotation, no mask": lambda g: [
        tnsim.Residual(attention(g, 2, 2, 1, 1, 2, True, rope_base=None, mask="none"), 0.7, 0.35),
        linear(g, 2, 2, True),
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


def moved(tree, direction, step):
    """Every array of a pytree plus a step along the array of another."""
    return jax.tree.map(lambda x, y: x + step * y if np.ndim(x) else x, tree, direction)


def direction(rng, tree):
    return jax.tree.map(lambda x: rng.normal(size=np.shape(x)), tree)


def agrees(function, oracle, at, rng, along=None):
    """The gradient of a function of a pytree is the derivative of its oracle along a direction, random unless given.

    The derivative is a complex step, without truncation or cancellation. The tolerance is relative to the sum of the
    absolute terms of the scalar product.
    """
    along = direction(rng, at) if along is None else along
    with jax.enable_x64(True):
        slopes = jax.grad(function)(at)
    pairs = zip(*map(jax.tree.leaves, (slopes, along, at)), strict=True)
    terms = [np.asarray(g) * d for g, d, x in pairs if np.ndim(x)]
    slope = complex(oracle(moved(at, along, 1e-100j))).imag * 1e100
    size = sum(np.abs(x).sum() for x in terms)
    assert_close(sum(x.sum() for x in terms), slope, scale=size, rtol=1e-11)


def products_under(metric):
    """Two models to their inner product at every output, by forward passes or dense tensors.

    Numbers of models and of metrics may be complex.
    """

    def products(a, b):
        if isinstance(metric, (tnsim.TreeSymmetric, tnsim.Frobenius)):
            return dense_tree_product(a, b, isinstance(metric, tnsim.TreeSymmetric))
        if isinstance(metric, tnsim.GaussianClosure):
            return closure_products(a, b, metric)
        return expected_products(a, b, metric)

    return products


def cosine(products, a, b):
    """Also of one output, whose inner products are then numbers."""
    ab, aa, bb = (np.sum(products(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    return ab / np.sqrt(aa * bb)


def log_size(product):
    return np.log(product * np.sign(product.real))


METRICS = {
    "tree": lambda rng, d: tnsim.TreeSymmetric(),
    "frobenius": lambda rng, d: tnsim.Frobenius(),
    "gaussian": lambda rng, d: over_positions(rng, tnsim.Gaussian, d),
    "closure": lambda rng, d: over_positions(rng, tnsim.GaussianClosure, d),
}


def three_legs(g):
    """A product of three maps, of which one has no bias, beside a skip."""
    legs, biases = g.normal(size=(3, 3, 2)), [g.normal(size=3), None, g.normal(size=3)]
    layer = tnsim.Multilinear(legs, g.normal(size=(2, 3)), biases, g.normal(size=2))
    return [tnsim.Residual(layer, 0.5, 0.7)]


# verb -> its number, and the number of two models by their inner products
DIFFERENTIATED = {
    "similarity": (tnsim.similarity, cosine),
    "slices": (
        lambda *ask: tnsim.slices(*ask)[0],
        lambda products, *both: cosine(lambda *pair: products(*pair)[0], *both),
    ),
    "log_inner": (
        lambda *ask: tnsim.log_inner(*ask).log,
        lambda products, *both: log_size(products(*both).sum()),
    ),
}
ONE_LAYER = ONE | {"three legs": three_legs}


@pytest.mark.sampled(quick=0, slow=3)
@pytest.mark.parametrize(
    "case, verb, metric",
    [
        *itertools.product(ONE_LAYER, ["similarity", "slices"], ["tree", "frobenius", "gaussian"]),
        *itertools.product(TWO, ["similarity", "log_inner"], ["tree", "frobenius", "closure"]),
    ],
)
def test_gradients(case, verb, metric, rng):
    """In both models at once."""
    models = pair((ONE_LAYER | TWO)[case], rng)
    metric = METRICS[metric](rng, models[0].d_in)
    value, expected = DIFFERENTIATED[verb]
    agrees(
        lambda both: value(*both, metric),
        lambda both: expected(products_under(metric), *both),
        models,
        rng,
    )


@pytest.mark.slow
def test_gradients_of_moments_and_differences(rng):
    """In the mean and covariance of the inputs, and in both models of `b - a`."""
    a, b = pair(ONE["rotation, some biases"], rng)
    mean, cov = random_gaussian(rng, N * 2)
    turn = 0.1 * rng.normal(size=cov.shape)
    along = rng.normal(size=mean.shape), turn @ cov + cov @ turn.T
    agrees(
        lambda at: tnsim.similarity(a, b, tnsim.Gaussian(*at)),
        lambda at: cosine(products_under(SimpleNamespace(mean=at[0], cov=at[1])), a, b),
        (mean, cov),
        rng,
        along,
    )
    metric = tnsim.Gaussian(mean, cov)
    products = products_under(metric)

    def difference(both):
        one, two = both
        aa, ab, bb = (products(*x).sum() for x in ((one, one), (one, two), (two, two)))
        return (ab - aa) / np.sqrt(aa * (bb - 2 * ab + aa))

    agrees(
        lambda both: tnsim.similarity(both[1] - both[0], both[0], metric), difference, (a, b), rng
    )


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("metric", [tnsim.Categorical([0.3, 0.7]), tnsim.Categorical(samples=5)])
def test_gradients_over_tokens(metric, rng):
    models = pair(ONE["rotation, some biases"], rng)
    if metric.samples is None:
        tokens = np.array(list(itertools.product(range(2), repeat=N)))
        weights = metric.probabilities[tokens].prod(axis=1)
    else:
        reading = Reading(d_in=2, n_ctx=N, degree=models[0].degree)
        tokens = metric.points(reading).block(0, metric.samples).inputs
        weights = np.full(metric.samples, 1 / metric.samples)
    x = np.eye(2)[tokens]

    def products(a, b):
        return np.einsum("p,psk->k", weights, a(x) * b(x))

    agrees(
        lambda both: tnsim.similarity(*both, metric),
        lambda both: cosine(products, *both),
        models,
        rng,
    )


# --------------------------------------------------------------------- units, batches


PROJECTIONS = ("q1", "k1", "q2", "k2", "v", "o")
PRECISIONS = pytest.mark.parametrize("dtype", ["float32", "float64"])


def agrees_in_units(found, expected, dtype, scale):
    """float32 has seven digits, and its cosines were seen to differ by up to 7e-7."""
    rtol, reason = {"float32": (3e-5, "float32"), "float64": (1e-12, None)}[dtype]
    assert_close(found, expected, scale=scale, rtol=rtol, limited_by=reason)


@pytest.mark.slow
@PRECISIONS
@pytest.mark.parametrize("metric", ["tree", slow("closure")])
def test_every_projection_in_a_unit_of_its_own(metric, dtype, rng):
    """Powers of two on each projection change no cosine, an inner product by a known power."""
    layers = [ONE["no constants"](rng)[1], attention(rng, 2, 1, 3, 1, 2, rope_base=None)]
    a, b = (in_dtype(tnsim.Model([layer], n_ctx=N), dtype) for layer in layers)
    metric = METRICS[metric](rng, 2)
    expected = tnsim.similarity(a, b, metric, dtype=dtype)
    log = tnsim.log_inner(a, b, metric, dtype=dtype).log
    most = {"float32": 100, "float64": 900}[dtype]
    for _ in range(10):
        powers = dict(zip(PROJECTIONS, rng.integers(-most, most + 1, 6).tolist(), strict=True))
        fields = vars(a.layers[0])
        far = {name: np.ldexp(fields[name], power) for name, power in powers.items()}
        far = tnsim.Model([type(a.layers[0])(**fields | far)], n_ctx=N)
        agrees_in_units(tnsim.similarity(far, b, metric, dtype=dtype), expected, dtype, 1.0)
        found = tnsim.log_inner(far, b, metric, dtype=dtype).log
        wanted = log + sum(powers.values()) * np.log(2)
        agrees_in_units(found, wanted, dtype, 1 / abs(expected) + abs(wanted))


@PRECISIONS
@pytest.mark.parametrize("metric", ["tree", slow("closure")])
@pytest.mark.parametrize("case", ["rotation, some biases", slow("biases, no rotation, no mask")])
def test_every_hidden_unit_in_a_unit_of_its_own(case, metric, dtype, rng):
    """Powers of two that queries take from keys, and outputs from values: the same function, biases included."""
    a, b = (in_dtype(model, dtype) for model in pair(ONE[case], rng))
    metric = METRICS[metric](rng, 2)
    expected = tnsim.similarity(*(in_dtype(model, "float64") for model in (a, b)), metric)
    most = {"float32": 30, "float64": 300}[dtype]

    def turned(layer):
        if isinstance(layer, tnsim.Residual):
            return tnsim.Residual(turned(layer.layer), layer.skip, layer.scale)
        if not isinstance(layer, tnsim.Attention):
            return layer
        powers = rng.integers(-most, most + 1, size=2)
        fields = vars(layer)
        for number, power in zip((1, 2), powers.tolist(), strict=True):
            for side, sign in (("q", 1), ("k", -1)):
                for name in (f"{side}{number}", f"{side}{number}_bias"):
                    if fields[name] is not None:
                        fields = fields | {name: np.ldexp(fields[name], sign * power)}
        units = rng.integers(-most, most + 1, size=len(layer.v))
        fields = fields | {"v": np.ldexp(layer.v, units[:, None]), "o": np.ldexp(layer.o, -units)}
        if layer.v_bias is not None:
            fields = fields | {"v_bias": np.ldexp(layer.v_bias, units)}
        return type(layer)(**fields)

    for _ in range(5):
        far = tnsim.Model([turned(layer) for layer in a.layers], n_ctx=N)
        agrees_in_units(tnsim.similarity(far, b, metric, dtype=dtype), expected, dtype, 1.0)
        agrees_in_units(tnsim.similarity(far, a, metric, dtype=dtype), 1.0, dtype, 1.0)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("metric", ["tree", "gaussian"])
@pytest.mark.parametrize("case", ONE)
def test_mapped_over_models(case, metric, rng):
    """`vmap` over the weights of attention gives the cosines of the models one by one."""
    a, b = pair(ONE[case], rng)
    metric = METRICS[metric](rng, 2)
    some = [a, *(moved(a, direction(rng, a), 1.0) for _ in range(2))]
    axes = jax.tree.map(lambda x: 0 if np.ndim(x) else None, a)
    both = jax.tree.map(lambda *x: np.stack(x) if np.ndim(x[0]) else x[0], *some)
    cosines = jax.vmap(lambda model: tnsim.similarity(model, b, metric), in_axes=(axes,))
    with jax.enable_x64(True):
        found = jax.jit(cosines)(both)
    expected = [tnsim.similarity(one, b, metric) for one in some]
    assert_close(found, expected, scale=1.0, rtol=1e-11)


@pytest.mark.sampled(quick=0, slow=4)
@pytest.mark.parametrize("metric", ["gaussian", "closure"])
@pytest.mark.parametrize("case", ["no constants", "biases, no rotation, no mask"])
def test_pairs_over_dependent_positions(case, metric, rng):
    """`pairwise` with a covariance over positions against quadrature, a difference among them."""
    a, b = pair(ONE[case], rng)
    metric = METRICS[metric](rng, 2)
    models = [a, b, a - 0.5 * b]
    points, weights = quadrature(6, *moments_of(metric, 2, N))
    values = [model(points.reshape(-1, N, 2)) for model in models]
    gram = np.array([[np.einsum("p,psk,psk->", weights, x, y) for y in values] for x in values])
    norms = np.sqrt(np.diag(gram))
    run = tnsim.pairwise(models, metric)
    assert_close(run.similarity, gram / np.outer(norms, norms), scale=1.0, rtol=1e-11)


@pytest.mark.sampled(quick=0, slow=4)
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
        functions = Function(b - a), Function(c)
        expected = float(cosine_of_sequences(*functions, mean, root))
        assert_close(tnsim.similarity(b - a, c, metric), expected, scale=1.0, rtol=1e-11)


# small enough for quadrature over both positions: rng -> layers, the lower first
DEEP = {
    "bilinear over attention": lambda g: [
        attention(g, 2, 1, 2, 1, 2, True, rope_base=None, mask="none"),
        bilinear(g, 2, 2, 2, True),
    ],
    "bilinear over attention, a skip": lambda g: [
        tnsim.Residual(attention(g, 2, 1, 2, 1, 2, True), 0.7, 0.35),
        bilinear(g, 2, 1, 1, True),
    ],
    "attention over bilinear, one coordinate": lambda g: [
        bilinear(g, 1, 1, 1, True),
        attention(g, 1, 1, 1, 1, 1, True, rope_base=None, mask="none"),
    ],
}


@pytest.mark.sampled(quick=0, slow=0)
@pytest.mark.parametrize("case", DEEP)
def test_deep_attention_by_diagrams(case, rng, diagrams):
    """Twenty legs of both models joined over a mean and a covariance of all positions."""
    a, b = pair(DEEP[case], rng)
    metric = over_positions(rng, tnsim.Gaussian, a.d_in)
    expected, *norms = (expected_products(x, y, metric) for x, y in ((a, b), (a, a), (b, b)))
    found = tnsim.inner(a, b, metric)
    assert found.exact and found.route == "contractions"
    scale = np.sqrt(norms[0].sum() * norms[1].sum())
    assert_close(found, expected.sum(), scale=scale, rtol=1e-11)
    slices = tnsim.slices(a, b, metric)
    assert_close(slices, expected / np.sqrt(norms[0] * norms[1]), scale=1.0, rtol=1e-11)


# ------------------------------------------------------------------------------------- paths


def subsets(switches):
    """All ways to turn some of the switches off."""
    return itertools.product(*((0, 1) if one else (0,) for one in switches))


def of_path(label, names, own, value):
    """What a path adds: inclusion and exclusion over its own components, the others being on."""
    chosen = components_in(label)
    path = [int(name in chosen) for name in own]
    found = 0.0
    for some in subsets(path):
        on = dict(zip(own, some, strict=True))
        switches = tuple(on.get(name, 1) for name in names)
        found = found + (-1.0) ** (sum(path) - sum(some)) * value(switches)
    return found


@pytest.mark.sampled(quick=0, slow=4)
@backends.interpreted
@pytest.mark.parametrize(
    ("case", "by", "within"),
    [
        ("biases, no rotation, no mask", "layer", None),
        ("biases, no rotation, no mask", "head", None),
        ("biases, no rotation, no mask", "head", ("layer 0 head 1",)),
        ("rotation, some biases", "head", None),
        ("no constants", "head", None),
        ("attention over bilinear, one coordinate", "head", None),
    ],
)
def test_paths_over_dependent_positions(case, by, within, rng, diagrams):
    """Paths of attention along plans, against switched forward passes at points of quadrature."""
    a, b = pair((ONE | DEEP)[case], rng)
    metric = over_positions(rng, tnsim.Gaussian, a.d_in)
    found = tnsim.paths(a, b, metric, by=by, within=within)
    names = tnsim.components(a, by)
    x, weights = quadrature(a.degree + 1, *moments_of(metric, a.d_in, N))
    x = x.reshape(-1, N, a.d_in)

    def parts(model, labels):
        def outputs(switches):
            return component_oracles.switched_outputs(model, x, np.array(switches, float), by)

        return np.stack([of_path(label, names, within or names, outputs) for label in labels])

    one, two = parts(a, found.bra), parts(b, found.ket)
    wanted = np.einsum("ipsk,p,jpsk->ij", one, weights, two)
    assert found.exact
    assert_close(found.values, wanted, scale=LARGEST, rtol=1e-10)


@pytest.mark.sampled(quick=0, slow=4)
@backends.interpreted
@pytest.mark.parametrize("metric", [tnsim.TreeSymmetric(), tnsim.Frobenius()], ids=lambda m: m.name)
@pytest.mark.parametrize("by", ["layer", "head"])
@pytest.mark.parametrize("case", TWO)
def test_paths_of_two_layers_against_dense_tensors(case, by, metric, rng):
    a, b = pair(TWO[case], rng)
    found = tnsim.paths(a, b, metric, by=by)
    names = tnsim.components(a, by)
    products = products_under(metric)

    @functools.cache
    def product(*switches):
        both = zip((a, b), switches, strict=True)
        return products(
            *(tnsim.models.components.switched(x, np.array(z, float), by) for x, z in both)
        ).sum()

    def entry(one, two):
        def of_both(first):
            return of_path(two, names, names, lambda second: product(first, second))

        return of_path(one, names, names, of_both)

    wanted = [[entry(one, two) for two in found.ket] for one in found.bra]
    assert_close(found.values, wanted, scale=LARGEST, rtol=1e-12)
