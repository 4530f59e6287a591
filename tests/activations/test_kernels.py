"""Kernels of activations beside 24 digits of mpmath, quadrature, finite differences and laws."""

import itertools
import json
from dataclasses import replace
from functools import partial
from math import pi
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activated_cases import gated_kernel
from closeness import LARGEST, assert_close
from mpmath import mp
from oracles import slope_of
from refusals import refused
from scipy.special import ndtr

from tnsim import UnsupportedLayer
from tnsim.activations.activation import (
    ACTIVATIONS,
    Activation,
    Remainder,
    activation,
    elu,
    leaky_relu,
    plus_line,
)
from tnsim.activations.coefficients import coefficients, energies, with_coefficients_of_slope
from tnsim.activations.kernels import (
    GatedInputs,
    GatedPairing,
    NormalInputs,
    Pairing,
    expanded,
    first_moments,
    gated_expanded,
    gated_moments,
    in_turn,
    kernel,
    left_over,
    with_slopes,
)
from tnsim.activations.normal import owens_t
from tnsim.activations.pairs import SLOPE_ORDERS, pair_derivatives, slopes_by_law

REFERENCES = json.loads(Path(__file__).with_name("references.json").read_text())
QUICK = ("relu", "relu")
SLOW = sorted({(one["f"], one["g"]) for one in REFERENCES} - {QUICK})
# hardtanh is bounded and yet not in this list of growth 0: far out it is a difference of two gates
# of size s, so that it is rounded like s t (2.5e-13 of the norms at s = t = 48), which the bound of
# its kernel covers
GROWTH = dict.fromkeys(("erf", "relu6", "sigmoid", "sin", "step", "tanh"), 0)
GROWTH |= {"relu2": 2, "square": 2}
SUMS = {"gelu + 0.5 u": plus_line(activation("gelu"), 0.5)}  # activations that no name makes


def random_units(g, count, rank=2):
    return NormalInputs(g.normal(size=count), g.normal(size=(count, rank)))


def grid(sides=80):
    """Points and weights of N(0, I) in two dimensions, for analytic integrands."""
    x, w = np.polynomial.hermite_e.hermegauss(sides)
    points = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
    return points, np.outer(w, w).ravel() / (2 * pi)


def beside_references(f, g):
    """References of two activations, and the kernel on whose diagonal their numbers are."""
    cases = [x for x in REFERENCES if (x["f"], x["g"]) == (f, g)]
    m, s, n, t, sign, gap = np.array([x["law"] for x in cases]).T
    rows = np.stack([s, 0 * s], 1)
    others = t[:, None] * np.stack([sign * (1 - gap), np.sqrt(gap * (2 - gap))], 1)
    first, second = (SUMS.get(name, name) for name in (f, g))
    return cases, kernel(first, second, NormalInputs(m, rows), NormalInputs(n, others))


@pytest.mark.sampled(quick=1, slow=8)
@pytest.mark.parametrize(
    "pair", [QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)], ids=":".join
)
def test_24_digits(pair):
    """1e-13 of the scale of each pair, and 1e-12 of the norms of live units."""
    cases, kernel_found = beside_references(*pair)
    m, s, n, t, *_ = np.array([x["law"] for x in cases]).T
    values, norms = (np.array([x[key] for x in cases]) for key in ("value", "norms"))
    found = np.diag(kernel_found.values)
    scale = np.prod(
        [
            (1 + np.abs(mean) + deviation) ** GROWTH.get(name, 1)
            for name, mean, deviation in zip(pair, (m, n), (s, t), strict=True)
        ],
        axis=0,
    )
    live = np.prod(norms, 1) > 1e-3 * scale
    error = np.abs(found - values)
    assert np.all(error <= 1e-13 * scale), (error / scale).max()
    assert np.all(error[live] <= 1e-12 * np.prod(norms, 1)[live])
    assert np.all(error <= np.diag(kernel_found.bound))


def test_owens_t_in_closed_cases():
    """T(h, 1) = Phi(h) (1 - Phi(h)) / 2, T(0, a) = atan(a) / (2 pi), T(h, infinity) = Q(|h|) / 2."""
    h = np.linspace(-9, 9, 181)
    with jax.enable_x64(True):
        low = 0.5 * np.asarray(jax.lax.erfc(jnp.asarray(-h) * np.sqrt(0.5)))
        assert_close(owens_t(h, np.ones(181)), low * (1 - low) / 2, scale=1.0, rtol=3e-16)
        assert_close(owens_t(0 * h, h), np.arctan(h) / (2 * pi), scale=1.0, rtol=3e-16)
        far = np.minimum(low, 1 - low) / 2
        assert_close(owens_t(h, np.full(181, np.inf)), far, scale=1.0, rtol=3e-16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["elu", "hardswish", "relu2", "silu"])
def test_no_pair_exceeds_its_bound(name):
    """The series beside pairs computed alone, over 3,600 random pairs."""
    g = np.random.default_rng(0)
    left, right = (
        NormalInputs(g.normal(size=60), g.normal(size=(60, 6)) * np.exp(g.normal(size=(60, 1)) / 2))
        for _ in range(2)
    )
    found = kernel(name, name, left, right)
    s, t = (np.linalg.norm(x.rows, axis=1) for x in (left, right))
    rho = np.clip(left.rows @ right.rows.T / np.outer(s, t), -1, 1)
    i, j = np.indices(rho.shape).reshape(2, -1)
    f = activation(name)
    law = left.mean[i], s[i], right.mean[j], t[j], rho.ravel(), 1 - np.abs(rho.ravel())
    with np.errstate(all="ignore"):
        (alone,) = pair_derivatives(f, f, law, ((0, 0),))
    assert np.all(np.abs(found.values - alone.reshape(rho.shape)) <= 2 * found.bound)
    assert float(found.share) < 1e-15


def test_bounds_are_within_a_hundred_errors():
    """Of the worst pair, so that a bound says how large an error is and not only that it is small."""
    ratios = []
    for name in ("relu", "softplus", "square"):
        cases, found = beside_references(name, name)
        error = np.abs(np.diag(found.values) - [x["value"] for x in cases])
        ratios.append((error / np.diag(found.bound)).max())
    assert min(ratios) > 0.01, ratios
    assert max(ratios) <= 1


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6, 1e-8, 1e-12, 1e-150])
def test_sines_of_small_units_keep_their_digits(scale):
    """Sines of small angles are the angles but for their cubes; rows of correlation 1 are alike."""
    mean, rows = scale * np.array([0.0, 0.5]), scale * np.array([[1.0, 0.0], [0.6, 0.8]])
    for left, right in itertools.product((0, 1), repeat=2):
        units = [NormalInputs(mean[[n]], rows[[n]]) for n in (left, right)]
        plain = mean[left] * mean[right] + rows[left] @ rows[right]
        assert_close(
            kernel("sin", "sin", *units).values,
            plain,
            rtol=max(1e-13, 5 * scale**2),
            limited_by="cubes of the angles",
        )


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh", "elu"])
def test_bounds_of_truncation_are_within_a_hundred_errors(name):
    """What a series leaves out after 4, 8, ... orders, for all pairs and for equal units."""
    f, order = activation(name), 1024
    g = np.random.default_rng(7)
    mean, deviation = g.normal(size=20), np.exp(g.normal(size=20) / 2)
    with np.errstate(all="ignore"):
        c = coefficients(f, mean, deviation, order)
        rest = left_over(f, c[:33], energies(f, mean, deviation))
    for rho in (-0.7, 0.5, 0.9):
        for turn, norms in enumerate(rest):
            above = np.arange(4 * (turn + 1) + 1, order + 1)
            left_out = np.einsum("ki,kj,k->ij", c[above], c[above], rho**above)
            bound = np.abs(rho) ** above[0] * np.outer(norms, norms)
            rounding = 1e-15 * np.outer(*2 * [np.sqrt(np.sum(c**2, 0))])
            assert np.all(np.abs(left_out) <= bound + rounding)
            if rho > 0:
                seen = np.diag(bound) > 10 * np.diag(rounding)
                assert np.all(np.diag(bound)[seen] < 100 * np.diag(left_out)[seen])


def test_sines_of_any_scale():
    """E sin u sin v = (E cos(u - v) - E cos(u + v)) / 2, whatever the number of waves."""
    mean = np.array([0.3, -20.0, 700.0])
    for scale in (1e-300, 1e-3, 3.0, 1e4, 1e8):
        rows = scale * np.array([[1.0, 0.0], [0.6, 0.8], [1.0, 1e-5]])
        left, right = NormalInputs(mean, rows), NormalInputs(mean[::-1], rows[::-1])
        expected = 0.0
        for sign in (1, -1):
            square = np.sum((left.rows[:, None] - sign * right.rows) ** 2, 2)
            waves = np.cos(left.mean[:, None] - sign * right.mean)
            expected = expected + sign / 2 * np.exp(-square / 2) * waves
        found = kernel("sin", "sin", left, right).values
        assert_close(found, expected, scale=1.0, rtol=1e-12)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"sin"}))
def test_inputs_of_any_scale_end_in_numbers(name):
    """Finite within Cauchy-Schwarz, at deviations and means from nothing to 1e8."""
    s, m = (x.ravel() for x in np.meshgrid([0.0, 1e-12, 1.0, 1e4, 1e8], [-1e8, 0.3, 1e4]))
    found = kernel(
        name, name, *(NormalInputs(m, s[:, None] * row) for row in ([[1.0, 0.0]], [[0.6, 0.8]]))
    )
    assert np.isfinite(found.values).all()
    most = np.outer(found.sizes, found.other_sizes)
    assert np.all(np.abs(found.values) <= (1 + 1e-12) * most + found.bound)


def test_sums_without_an_end_are_refused():
    waves = Activation(lambda u: jnp.sin(u) * jnp.cos(3 * u), strip=2.0, name="waves")
    units = NormalInputs(np.zeros(1), np.full((1, 1), 1e7))
    with refused(r"varies? over so many|vary over so many"):
        kernel(waves, waves, units, units)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silu"])
def test_degenerate_units(name):
    """Variances of 0 and 1e-300 leave f(m) f(n), at means to 1e4 as well."""
    mean = np.array([0.7, -1.3, 1e4, -1e4, 2.5])
    rows = np.array([0.0, 1e-300, 0.0, 1e-12, 1e-300])[:, None]
    units = NormalInputs(mean, rows)
    values = np.asarray(kernel(name, name, units, units).values)
    expected = np.outer(*2 * [activation(name)(mean)])
    scale = np.outer(*2 * [1 + np.abs(mean) ** GROWTH.get(name, 1)])
    assert np.all(np.abs(values - expected) <= 1e-11 * scale)


@pytest.mark.slow
def test_equal_units_of_a_step_have_correlation_one():
    """1 - rho is the distance of rows: arcsin at 1 - 1e-16 would be off by 1e-9."""
    g = np.random.default_rng(3)
    units = NormalInputs(g.normal(size=20), g.normal(size=(20, 30)))
    values = np.asarray(kernel("step", "step", units, units).values)
    mean, _ = first_moments("step", units)
    assert_close(np.diag(values), mean, scale=1.0, rtol=1e-15)


@pytest.mark.slow
def test_gated_units_against_quadrature():
    name = "gelu"
    g = np.random.default_rng(2)
    points, weights = grid()
    units, others = (
        GatedInputs(
            *(NormalInputs(g.normal(size=5), 0.5 * g.normal(size=(5, 2))) for _ in range(2))
        )
        for _ in range(2)
    )
    f = activation(name)
    left, right = (
        f(points @ u.gate.rows.T + u.gate.mean) * (points @ u.up.rows.T + u.up.mean)
        for u in (units, others)
    )
    found = gated_kernel(name, name, units, others)
    sizes = np.outer(*(np.sqrt(weights @ x**2) for x in (left, right)))
    assert np.all(np.abs(found.values - (left * weights[:, None]).T @ right) <= 1e-11 * sizes)
    assert_close(found.sizes, np.sqrt(weights @ left**2), rtol=1e-11)
    own = gated_kernel(name, name, units, units)
    assert_close(np.diag(own.values), weights @ left**2, rtol=1e-11)
    mean, rows = gated_moments(name, units)
    assert_close(mean, weights @ left, scale=1.0, rtol=1e-11)
    assert_close(rows, (left * weights[:, None]).T @ points, scale=1.0, rtol=1e-11)


@pytest.mark.slow
def test_a_bilinear_layer_is_written_as_squares():
    """u w = ((u + w)^2 - (u - w)^2) / 4."""
    g = np.random.default_rng(5)
    gate, up = random_units(g, 4, 3), random_units(g, 4, 3)
    units = GatedInputs(gate, up)
    squares = NormalInputs(
        np.concatenate([gate.mean + up.mean, gate.mean - up.mean]),
        np.concatenate([gate.rows + up.rows, gate.rows - up.rows]),
    )
    sign = np.concatenate([np.eye(4), -np.eye(4)]) / 4
    found = np.asarray(gated_kernel("identity", "identity", units, units).values)
    expected = sign.T @ np.asarray(kernel("square", "square", squares, squares).values) @ sign
    assert_close(found, expected, scale=LARGEST, rtol=1e-12)


def test_first_moments_of_a_relu():
    """E relu(u) = m Phi(m/s) + s phi(m/s), E relu'(u) = Phi(m/s)."""
    mean, slope = first_moments("relu", NormalInputs(np.zeros(1), np.array([[2.0]])))
    assert_close([mean[0], slope[0]], [2 / np.sqrt(2 * pi), 0.5], rtol=1e-15)


ANALYTIC = {  # and the distance of the nearest singularity from the real line, or a moderate one
    "tanh": (jnp.tanh, pi / 2),
    "sigmoid": (jax.nn.sigmoid, pi),
    "silu": (jax.nn.silu, pi),
    "softplus": (jax.nn.softplus, pi),
    "gelu": (partial(jax.nn.gelu, approximate=False), 3.0),
    "sin": (jnp.sin, 3.0),
    "arctan": (jnp.arctan, 1.0),
    "root": (lambda u: jnp.sqrt(1 + u * u), 1.0),
}
KINKED = {
    "softsign": lambda u: u / (1 + abs(u)),
    "abs": abs,
    "relu": lambda u: jnp.maximum(u, 0.0),
    "a kink elsewhere": lambda u: jnp.maximum(u - 1.2345, 0.0),
    "elu": jax.nn.elu,
    "squared relu": lambda u: jnp.maximum(u, 0.0) ** 2,
}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("name", ANALYTIC)
def test_strips_that_hold_are_believed(name):
    function, strip = ANALYTIC[name]
    for scale in (0.1, 1.0, 10.0):
        for share in (0.1, 1.0):
            Activation(lambda u, scale=scale: function(scale * u), strip=share * strip / scale)


def test_strips_of_named_activations_hold():
    parts = [part for named in ACTIVATIONS.values() for part in named.parts]
    remainders = [part for part in parts if isinstance(part, Remainder)]
    assert len(remainders) > 5
    for part in remainders:
        assert Activation(part.function, strip=part.strip).parts[0].strip == part.strip


def test_strips_are_judged_inside_a_trace():
    assert jax.jit(lambda x: Activation(jnp.tanh, strip=1.0)(x))(0.0) == 0.0
    with refused("show a kink"):
        jax.jit(lambda x: Activation(jnp.abs, strip=1.0)(x))(0.0)
    with refused("show a kink"):
        Activation(jnp.log, strip=1.0)  # NaN below 0


@pytest.mark.parametrize("name", KINKED)
def test_strips_that_the_values_contradict_are_refused(name):
    """x / (1 + |x|) was believed, and kernels with it called exact."""
    for strip in (3.0, 0.5, 0.1):
        with refused(r"declared analytic within .* show a kink"):
            Activation(KINKED[name], strip=strip)


@pytest.mark.parametrize("name, strip", [("tanh", 8.0), ("arctan", 4.0)])
def test_strips_beyond_a_pole_are_refused(name, strip):
    with refused("a singularity nearer"):
        Activation(ANALYTIC[name][0], strip=strip)


@pytest.mark.slow
def test_own_activations():
    """An own analytic function is the named one; own kinks and pieces as well."""
    g = np.random.default_rng(4)
    left, right = random_units(g, 8), random_units(g, 8)
    right.rows[0] = left.rows[0]
    own = Activation(jnp.tanh, strip=pi / 2)
    close = partial(assert_close, scale=LARGEST, rtol=1e-12)
    named = kernel("tanh", "tanh", left, right).values
    close(kernel(own, own, left, right).values, named)
    pieces = Activation(kinks=(0.0,), pieces=((0.0, 0.25), (0.0, 1.0)))
    close(
        kernel(pieces, "relu", left, right).values,
        kernel(leaky_relu(0.25), "relu", left, right).values,
    )


@pytest.mark.parametrize("name", ["tanh", pytest.param("elu", marks=pytest.mark.slow), "relu6"])
def test_a_line_beside_an_activation(name):
    """E (f(u) + c u) (f(v) + c v) = E f f + c (E f(u) v + E u f(v)) + c^2 E u v."""
    g = np.random.default_rng(5)
    left, right = random_units(g, 8), random_units(g, 8)
    right.rows[0] = left.rows[0]
    pairs = [(name, name), (name, "identity"), ("identity", name), ("identity", "identity")]
    parts = [kernel(*pair, left, right).values for pair in pairs]
    expected = parts[0] - 0.7 * (parts[1] + parts[2]) + 0.49 * parts[3]
    summed = plus_line(activation(name), -0.7)
    found = kernel(summed, summed, left, right)
    assert_close(found.values, expected, scale=max(np.abs(x).max() for x in parts), rtol=1e-13)
    u = np.linspace(-8, 8, 33)
    assert_close(summed(u), activation(name)(u) - 0.7 * u, scale=LARGEST, rtol=1e-15)


def in_float32():
    """Random units, and equal, opposite, still and far ones, that float32 holds exactly."""
    units = random_units(np.random.default_rng(6), 7)
    units.rows[:4] = np.outer([1.0, 1.0, -1.0, 0.0], units.rows[1])
    units.mean[:5] = units.mean[1], units.mean[1], -units.mean[1], 0.7, -100.0
    return NormalInputs(*(x.astype(np.float32).astype(np.float64) for x in units))


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("name, rtol", [("sin", 3e-5), ("elu", 1e-5)])
def test_float32_inside_a_trace(name, rtol):
    units = in_float32()
    single = NormalInputs(*(jnp.asarray(x, jnp.float32) for x in units))
    found = jax.jit(lambda u: kernel(name, name, u, u).values)(single)
    assert found.dtype == jnp.float32
    exact = kernel(name, name, units, units)
    scale = np.maximum(1, np.outer(exact.sizes, exact.sizes))
    # The sine of 100 is off by eps times 100.
    assert_close(np.asarray(found), exact.values, scale=scale, rtol=rtol, limited_by="float32")


def test_tails_stay_in_float32():
    mean, rows = jnp.array([0.3, 2.0, -40.0], jnp.float32), jnp.array([[1.0], [0.1], [2.0]])
    units = NormalInputs(mean, rows.astype(jnp.float32))
    wide = NormalInputs(*(np.asarray(x, float) for x in units))
    found, _ = jax.jit(first_moments, static_argnums=0)("elu", units)
    assert found.dtype == np.float32
    assert_close(found, first_moments("elu", wide)[0], rtol=1e-5, limited_by="float32")


def test_moments_of_narrow_numbers_are_those_of_float64():
    narrow = NormalInputs(np.array([0.1], np.float32), np.array([[0.3]], np.float32))
    wide = NormalInputs(*(x.astype(float) for x in narrow))
    found = np.array(first_moments("tanh", narrow))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, np.array(first_moments("tanh", wide)))


def test_a_kink_far_out_beside_an_equal_unit():
    """E sin(z - c) relu(z - c), where a panel of the width of the transition moves no edge."""
    c = np.array([-5.1, 5.0, 5.3])
    units = NormalInputs(-c, np.ones((3, 1)))
    found = np.diag(kernel("sin", "relu", units, units).values)
    x, weights = np.polynomial.legendre.leggauss(200)
    z = c + (14 - c) * (x[:, None] + 1) / 2
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * pi)
    expected = weights @ (np.sin(z - c) * (z - c) * density) * (14 - c) / 2
    assert_close(found, expected, scale=LARGEST, rtol=1e-12)


EXACT = {
    "mish": lambda u: u * mp.tanh(mp.log1p(mp.exp(u))),
    "tanhshrink": lambda u: u - mp.tanh(u),
    "gelu + 0.5 u": lambda u: u * mp.ncdf(u) + u / 2,
}


@pytest.mark.parametrize("name", EXACT)
def test_values_and_derivatives(name):
    """Of the function and of the sum of its parts, beside 40 digits."""
    f = SUMS[name] if name in SUMS else activation(name)
    u = np.linspace(-12, 12, 25)
    for order in range(4):
        with mp.workdps(40):
            exact = np.array([float(mp.diff(EXACT[name], mp.mpf(x), order)) for x in u])
        for found in (f.function(u, order), sum(part(u, order) for part in f.parts)):
            assert_close(found, exact, scale=1.0, rtol=1e-12)


def test_errors_say_what_to_do():
    with refused(r"no activation is called 'swish'.*silu"):
        activation("swish")
    with refused(r"TopK reads all hidden units at once"):
        activation("TopK")
    with refused("2 pieces"):
        Activation(kinks=(0.0,), pieces=((0.0,),))
    for kink in (0.0, np.inf):
        with refused("finite, and its kinks increase"):
            Activation(kinks=(0.0, kink), pieces=((0.0,), (1.0,), (2.0,)))
    with refused("strip"):
        Activation(np.tanh)
    with refused("3 and 2 coordinates"):
        kernel(
            "relu",
            "relu",
            NormalInputs(np.zeros(1), np.ones((1, 3))),
            NormalInputs(np.zeros(1), np.ones((1, 2))),
        )
    units = GatedInputs(*2 * [NormalInputs(np.zeros(1), np.ones((1, 1)))])
    with refused("without steps", UnsupportedLayer):
        gated_kernel("step", "relu", units, units)


FAR = ("sigmoid", "tanh", "silu", "softplus", "mish", "gelu", "gelu_tanh", "erf", "elu")


def test_forward_values_far_out():
    """Limits at numbers the exponentials of which are infinite."""
    x = np.array([-1e120, -800.0, 800.0, 1e120])
    for dtype in (np.float64, np.float32):
        far = np.clip(x, -1e30, 1e30).astype(dtype) if dtype == np.float32 else x
        for name in FAR:
            low = -1.0 if name in ("tanh", "erf", "elu") else 0.0
            high = 1.0 if name in ("sigmoid", "tanh", "erf") else far[2:]
            found = activation(name)(far)
            assert found.dtype == dtype
            assert_close(found, np.concatenate([[low, low], high + 0 * far[2:]]))


@pytest.mark.parametrize("exponent", [-300, -345, -500])
def test_kinks_of_tiny_deviations(exponent):
    """Kinks at zero are homogeneous: a unit in other units is a power of two times the kernel."""
    g = np.random.default_rng(0)
    mean, rows = g.normal(size=4), g.normal(size=(4, 3))
    rows[1], mean[1] = rows[0], mean[0]
    unit = 2.0**exponent
    plain, tiny = NormalInputs(mean, rows), NormalInputs(unit * mean, unit * rows)
    for name, degree in (("step", 0), ("relu", 1), ("abs", 1)):
        expected = kernel(name, "relu", plain, plain).values
        found = kernel(name, "relu", tiny, plain).values / unit**degree
        assert_close(found, expected, scale=np.abs(expected).max(), rtol=1e-14)
        first, slope = first_moments(name, tiny)
        usual, steep = first_moments(name, plain)
        assert_close(first / unit**degree, usual, rtol=1e-13)
        assert_close(slope / unit ** (degree - 1), steep, rtol=1e-13)
    expected = kernel("step", "step", plain, plain).values
    assert_close(kernel("step", "step", tiny, tiny).values, expected, scale=1.0, rtol=1e-15)


def test_steps_without_variance_are_shut_at_their_threshold():
    """A unit that does not vary is f(mean), and a step is 0 at its knot."""
    mean, rows = np.array([0.0, 1e-300, -1e-300, 0.0]), np.zeros((4, 2))
    rows[3] = 1.0
    units = NormalInputs(mean, rows)
    for name in ("step", "relu"):
        open_ = activation(name)(mean[:3])
        first, _ = first_moments(name, units)
        found = kernel("step", name, units, units).values
        assert_close(first[:3], open_, rtol=1e-15)
        assert_close(found[:3, :3], np.outer(activation("step")(mean[:3]), open_), rtol=1e-15)
        assert_close(found[0], np.zeros(4))
        assert_close(found[1], first, rtol=1e-14)


def test_tails_without_variance_are_whole_or_none():
    """Units of ELU that do not vary have its value, at its kink as well."""
    f, mean = activation("elu"), np.array([0.0, -1e-200, -0.5, 1e-200, 2.0])
    values, one = (NormalInputs(x, np.zeros((len(x), 1))) for x in (mean, np.ones(1)))
    for found in (
        kernel(f, "identity", values, one).values[:, 0],
        first_moments(f, values)[0],
        coefficients(f, mean, 0 * mean, 2)[0],
    ):
        assert_close(found, f(mean), scale=1.0, rtol=1e-15)


def zeros_among_rows(left, right):
    """Rows without a direction, of the left units two, which meet one of the right."""
    for rows in jax.tree.leaves((left, right)):
        if rows.ndim == 2:
            rows[1:] = 0.0


def equal_units(left, right):
    """A pair of equal units, or gates, which is computed alone."""
    one, two = (side.gate if isinstance(side, GatedInputs) else side for side in (left, right))
    two.mean[0], two.rows[0] = one.mean[0], one.rows[0]


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    "name, gated, meet",
    [
        ("square", False, zeros_among_rows),
        ("square", True, zeros_among_rows),
        ("sin", False, equal_units),
        ("relu", False, equal_units),
        ("relu", True, equal_units),
    ],
)
def test_gradients_are_finite_differences(name, gated, meet):
    """Rows of zeros had none, as they have no direction: E f(m + r z) g(v) has the slope f'(m) E z g(v)."""
    g = np.random.default_rng(6)
    law = (
        random_units if not gated else lambda *one: GatedInputs(*(random_units(*one) for _ in "uw"))
    )
    left, right = law(g, 3), law(g, 2)
    meet(left, right)
    moves = jax.tree.map(lambda x: g.normal(size=x.shape), (left, right))
    weights, made = g.normal(size=(3, 2)), gated_kernel if gated else kernel

    def total(units, others):
        return (weights * made(name, name, units, others).values).sum()

    with jax.enable_x64(True):
        units = jax.tree.map(jnp.asarray, (left, right))
        value, along = jax.jvp(total, units, moves)
        slopes = jax.jit(jax.grad(total, (0, 1)))(*units)
    wanted = slope_of(
        lambda h: total(*jax.tree.map(lambda x, y: x + h * y, (left, right), moves)), 1e-3, order=6
    )
    back = sum(map(np.vdot, jax.tree.leaves(slopes), jax.tree.leaves(moves)))
    assert_close(value, total(left, right), scale=LARGEST, rtol=1e-13)
    assert_close([along, back], [wanted, wanted])


def test_derivatives_of_pairs_are_slopes_of_pairs():
    """All orders that share one sum, traced and by NumPy, against slopes of lower orders."""
    g = np.random.default_rng(4)
    orders = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2))
    (m, n), (s, t) = g.normal(size=(2, 5)), g.uniform(0.5, 2.0, size=(2, 5))
    rho = np.array([-0.99, -0.4, 0.1, 0.8, 0.999])
    law = m, s, n, t, rho, 1 - abs(rho)
    for name in ("silu", "gelu", "relu"):
        f = activation(name)
        found = dict(zip(orders, pair_derivatives(f, f, law, orders), strict=True))
        for (i, j), values in found.items():
            (alone,) = pair_derivatives(f, f, law, ((i, j),))
            assert_close(values, alone, scale=LARGEST, rtol=1e-14)

        def at(h, k, f=f):
            moved = m + h, s, n + k, t, rho, 1 - abs(rho)
            return pair_derivatives(f, f, moved, ((0, 0),))[0]

        # Derivatives by means, as E f(m + h + s z) moves with the mean.
        for order in ((1, 0), (0, 1)):
            slope = slope_of(lambda h, order=order: at(*(h * x for x in order)), 1e-3)
            assert_close(found[order], slope, scale=LARGEST, rtol=1e-9)


def near_equal_and_opposite():
    """Laws of pairs at correlations of 1 and -1 and near them, the thresholds of which meet."""
    pairs = [(0.7, 1.3, 0.5), (0.0, 1.0, 2.0), (-0.4, 0.5, 2.0), (0.3, 1.0, 1.0)]
    cases = [
        (mean, deviation, sign * ratio * mean, ratio * deviation, sign, gap)
        for mean, deviation, ratio in pairs
        for sign in (-1.0, 1.0)
        for gap in (0.0, 1e-16, 1e-12, 1e-6, 1e-2)
    ]
    m, s, n, t, sign, gap = np.array(cases).T
    return m, s, n, t, sign * (1 - gap), gap


def elu_mean(alpha, mean, deviation, order):
    """E of a derivative of ELU for a normal variable, alpha e^(m + s^2/2) Phi(-m/s - s) and gates."""
    h = np.clip(mean / np.maximum(deviation, 1e-100), -40, 40)
    low = alpha * np.exp(np.minimum(mean, 40) + deviation**2 / 2) * ndtr(-h - deviation)
    if order:
        return ndtr(h) + low
    density = np.exp(-(h**2) / 2) / np.sqrt(2 * pi)
    return mean * ndtr(h) + deviation * density + low - alpha * ndtr(-h)


def elu_slopes(alpha, m, s, n, t, rho, gap):
    """E f(u) f(v) and its slopes: E f' f, E z f' f, the same of v, and s t E f' f' by rho.

    An integral over z with the mean of the other function given z, in panels that end at the kink
    of the former and shrink towards that of the latter.
    """
    nodes, weights = np.polynomial.legendre.leggauss(30)

    def expected(m, s, n, t, order, other, power=0):
        spread = t * np.sqrt(gap * (2 - gap))
        place, width = -n / (t * rho), spread / t
        ends = [-m / s, place, *np.linspace(-12, 12, 25)]
        ends += [place + sign * width * 2.0**k for sign in (1, -1) for k in range(-1, 7)]
        ends = np.unique(np.clip(ends, -12, 12))
        length = np.diff(ends)
        z = (ends[:-1] + length * (nodes[:, None] + 1) / 2).ravel()
        weight = (length * weights[:, None] / 2).ravel() * np.exp(-(z**2) / 2) / np.sqrt(2 * pi)
        u = m + s * z
        below = alpha * (np.exp(np.minimum(u, 0)) if order else np.expm1(np.minimum(u, 0)))
        f = np.where(u > 0, 1.0 if order else u, below)
        inner = elu_mean(alpha, n + t * rho * z, spread, other)
        return np.sum(weight * z**power * f * inner)

    return [
        expected(m, s, n, t, 0, 0),
        expected(m, s, n, t, 1, 0),
        expected(m, s, n, t, 1, 0, 1),
        expected(n, t, m, s, 1, 0),
        expected(n, t, m, s, 1, 0, 1),
        s * t * expected(m, s, n, t, 1, 1),
    ]


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("alpha", [1.0, 1.6732632423543772])
def test_slopes_of_elu_where_thresholds_meet(alpha):
    """They were off by up to 0.1: the parts of ELU jump, and their densities do not cancel apart."""
    law, f = near_equal_and_opposite(), elu(alpha)
    expected = np.array([elu_slopes(alpha, *one) for one in zip(*law, strict=True)]).T
    with np.errstate(all="ignore"):
        found = dict(zip(SLOPE_ORDERS, pair_derivatives(f, f, law, SLOPE_ORDERS), strict=True))
    slopes = [found[0, 0], *slopes_by_law(found, (0, 0), law)]
    assert_close(np.array(slopes), expected, scale=1 + np.abs(expected), rtol=1e-13)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("compiled", [False, True])
def test_slopes_of_equal_and_opposite_units_of_elu(compiled):
    m, s, n, t, rho, gap = near_equal_and_opposite()
    exact = gap == 0
    m, s, n, t, rho, gap = (x[exact] for x in (m, s, n, t, rho, gap))
    rows = [np.stack([0.6 * x, 0.8 * x], 1) for x in (s, rho * t)]
    f = elu()
    units = [expanded(f, NormalInputs(*one)) for one in ((m, rows[0]), (n, rows[1]))]
    if compiled:
        units = [replace(one, side=None) for one in units]
    with jax.enable_x64(True):
        made = with_slopes(Pairing(f, f), *units, in_turn)
    found = made.values, *made.slopes
    law = zip(m, s, n, t, rho, gap, strict=True)
    expected = np.array([elu_slopes(1.0, *one) for one in law]).T
    diagonals = np.array([np.diag(x) for x in found])
    assert_close(diagonals, expected, scale=1 + np.abs(expected), rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["step", pytest.param("relu gated", marks=pytest.mark.full)])
def test_slopes_where_derivatives_are_no_functions(kind, rng):
    """Steps, and kinks of gated units: beside the program that differentiates all of a kernel."""
    f, count = activation(kind.split()[0]), 70  # more pairs alone than a few
    mean, rows = rng.normal(size=count), rng.normal(size=(count, 3))
    near = NormalInputs(mean * 1.01, rows + 1e-3 * rng.normal(size=rows.shape))
    pairing, units = Pairing(f, f), [expanded(f, one) for one in (NormalInputs(mean, rows), near)]
    if kind == "relu gated":
        pairing, up = GatedPairing(f, f), NormalInputs(mean, rng.normal(size=rows.shape))
        both = GatedInputs(NormalInputs(mean, rows), up), GatedInputs(near, up)
        units = [gated_expanded(f, one) for one in both]
    for both in (units, [units[0].part(0, 5), units[1].part(0, 5)]):
        compiled = [replace(one, side=None) for one in both]
        with jax.enable_x64(True):
            found, known = (with_slopes(pairing, *each, in_turn) for each in (both, compiled))
        numbers = zip((found.values, *found.slopes), (known.values, *known.slopes), strict=True)
        for one, two in numbers:
            assert_close(one, two, scale=np.abs(two).max(), rtol=1e-10)


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "square", "sin"])
def test_coefficients_of_slopes_are_those_of_the_derivative(name):
    """Beside Gauss-Hermite sums of the derivative in JAX; small deviations lose no digit."""
    f, order = activation(name), 6
    m, s = np.array([0.4, -1.3, 0.7, 0.2]), np.array([0.9, 0.3, 1e-9, 0.0])
    z, w = np.polynomial.hermite_e.hermegauss(120)
    rows = [w / np.sqrt(2 * pi)]
    rows.append(rows[0] * z)
    for k in range(1, order):
        rows.append((z * rows[k] - np.sqrt(k) * rows[k - 1]) / np.sqrt(k + 1))
    u = m + s * z[:, None]
    with jax.enable_x64(True):
        slopes = jax.vmap(jax.vmap(jax.grad(lambda x: f(x))))(jnp.asarray(u))
    found = with_coefficients_of_slope(f, m, s, order)
    for one, values in zip(found, (f(u), np.asarray(slopes)), strict=True):
        assert_close(one, np.array(rows) @ values, scale=1.0, rtol=1e-13)


@pytest.mark.parametrize(
    ("name", "is_gated", "compiled"),
    [
        ("relu", False, False),
        ("gelu", False, False),
        ("square", True, False),
        pytest.param("silu", True, False, marks=pytest.mark.slow),
        pytest.param("gelu", False, True, marks=pytest.mark.slow),
    ],
)
def test_slopes_follow_what_moves(name, is_gated, compiled, rng):
    """A layer that stays has none, and one of a layer with itself stands for the other."""
    f, count, pairing = activation(name), 5, Pairing

    def units():
        one = random_units(rng, count)
        if is_gated:
            return gated_expanded(f, GatedInputs(one, random_units(rng, count)))
        return expanded(f, one)

    a, b = units(), units()
    if is_gated:
        pairing = GatedPairing
    if compiled:
        a, b = (replace(one, side=None) for one in (a, b))
    pairs, n = pairing(f, f), pairing.parameters
    with jax.enable_x64(True):

        def slopes(first, second, *moving):
            return with_slopes(pairs, first, second, in_turn, *moving)

        both, itself = slopes(a, b), slopes(a, replace(a))
        left, right = slopes(a, b, (True, False)), slopes(a, b, (False, True))
        alone = slopes(a, a)
    absent = {"left": range(n, 2 * n), "right": range(n)}
    for made, known, none in (
        (left, both, absent["left"]),
        (right, both, absent["right"]),
        (alone, itself, ()),
    ):
        assert [k for k, x in enumerate(made.slopes) if x is None] == list(none)
        there = [k for k in range(pairs.slopes) if k not in none]
        found = np.array([made.values, *(made.slopes[k] for k in there)])
        expected = np.array([known.values, *(known.slopes[k] for k in there)])
        assert_close(found, expected, scale=1 + np.abs(expected).max(), rtol=1e-13)


@pytest.mark.slow
def test_a_trace_has_slopes_of_what_moves(rng):
    """Means of the columns alone, and all of a layer with itself, beside numbers moved by hand."""
    units, others = random_units(rng, 3), random_units(rng, 4)
    weights, step = rng.normal(size=(3, 4)), 1e-3

    def total(means):
        moved = NormalInputs(means, others.rows)
        return (weights * kernel("relu", "gelu", units, moved).values).sum()

    def own(rows):
        moved = NormalInputs(units.mean, rows)
        return (weights[:, :3] * kernel("gelu", "gelu", moved, moved).values).sum()

    for function, at in ((total, others.mean), (own, units.rows)):
        with jax.enable_x64(True):
            found = np.asarray(jax.jit(jax.grad(function))(jnp.asarray(at)))
        for place in np.ndindex(at.shape):
            by = np.zeros(at.shape)
            by[place] = step
            expected = slope_of(lambda t, by=by, at=at, g=function: g(at + t * by / step), step)
            assert_close(found[place], expected, scale=np.abs(weights).sum(), rtol=1e-9)


def test_integrals_take_every_derivative_once(monkeypatch):
    """Three pairs of orders with two orders of f: each was evaluated for each pair."""
    orders, called = ((0, 0), (0, 1), (1, 0)), []
    known = Remainder.__call__

    def counted(part, u, order=0):
        called.append(order)
        return known(part, u, order)

    monkeypatch.setattr(Remainder, "__call__", counted)
    one, f = np.ones(2), activation("silu")
    pair_derivatives(f, activation("gelu"), (0 * one, one, 0 * one, one, one, 0 * one), orders)
    assert called.count(0) == called.count(1) > 0
