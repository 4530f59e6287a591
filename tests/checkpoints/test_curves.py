"""Names of curves: every activation is found however it is written, and nothing near it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from closeness import assert_close
from refusals import refused

import tnsim
from tnsim.activations.activation import ACTIVATIONS, activation
from tnsim.checkpoints.curves import ROUNDING, curve_of, rounding_of

SIZES = np.geomspace(1e-3, 1e4, 200)
PLACES = np.concatenate([-SIZES, [0.0], SIZES, np.linspace(-30, 30, 2001)])
NAMES = [*ACTIVATIONS, "leaky_relu(-0.3)", "jump_relu(0.5)", "elu(0.7)", "power(3)", "power(4)"]
SAME = {  # with a line or an offset beside it an activation may have another name
    "tanh": {"sigmoid", "tanhshrink"},
    "sigmoid": {"tanh", "tanhshrink"},
    "tanhshrink": {"tanh", "sigmoid"},
    "hardtanh": {"relu6"},
    "relu6": {"hardtanh"},
}


def assert_same(curve, function, kinks=(), scale=1.0):
    """A curve has the values of the function from 1e-3 to 1e4 and beside its kinks."""
    steps = np.array([1e-9, 1e-6, 1e-3])
    beside = [kink + sign * max(1, abs(kink)) * steps for kink in kinks for sign in (-1, 1)]
    u = np.concatenate([PLACES / scale, *beside])
    u = u[[all(abs(x - kink) > 1e-10 for kink in kinks) for x in u]]
    values = function(u)
    # Rounding of u moves a value by the slope, and both grow with the size.
    size = np.maximum(np.abs(function(np.linspace(-2, 2, 50) / scale)).max(), np.abs(values))
    order = np.argsort(np.abs(u))
    size[order] = np.maximum.accumulate(size[order])
    assert np.all(np.abs(curve(u) - values) <= 3e-11 * (size + np.abs(u * scale)))


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_beside_every_activation(name, rng):
    """Scales, shifts, factors, lines and offsets are found, whatever kinks are given beside."""
    known = activation(name)
    own = known.kinks or ((0.0,) if name.startswith("elu") else ())
    for case in range(6):
        sign, other = rng.choice([-1.0, 1.0], 2)
        scale = sign * math.exp(rng.uniform(-3, 3)) if case else 1.0
        shift = rng.normal() * 2 if case % 2 else 0.0
        factor = other * math.exp(rng.uniform(-3, 3)) if case else 1.0
        line = factor * scale * rng.normal() if case > 3 else 0.0
        offset = factor * rng.normal() if case > 2 else 0.0

        def function(u, a=factor, b=scale, d=shift, s=line, o=offset):
            return a * known(b * u + d) + s * u + o

        kinks = [(kink - shift) / scale for kink in own]
        curve = curve_of(function, [*kinks, *rng.normal(size=case % 3)])
        assert_same(curve, function, kinks, abs(scale))
        if case == 0:
            assert repr(curve) == repr(curve_of(known, own))
            assert curve.function.name in (name, "jump_relu(1.0)")
        if not known.kinks and not known.is_polynomial:
            assert curve.function.name.split(" ")[0] in {name, *SAME.get(name, ())} or own


def gelu_tanh(u, cubic=0.044715, root=math.sqrt(2 / math.pi)):
    return 0.5 * u * (1 + np.tanh(root * (u + cubic * u**3)))


@pytest.mark.parametrize(
    "function",
    [
        lambda u: gelu_tanh(u, cubic=0.0447),
        lambda u: gelu_tanh(u, root=0.79788456),
        lambda u: activation("gelu")(u) + 1e-9 * np.exp(-(u**2)),
        lambda u: activation("gelu")(u) + 1e-6 * np.sin(u),
        lambda u: u / (1 + np.exp(-u)) + 1e-8 * u**2,
        lambda u: u / (1 + np.exp(-u)) + 1e-3 * np.exp(-(((u - 3.3) * 100) ** 2)),
        lambda u: np.where((u > 1) & (u < 1.01), 0.0, activation("gelu")(u)),
        lambda u: np.where(
            (u > 1) & (u < 1.01), activation("gelu")(u) + 1e-9, activation("gelu")(u)
        ),
        lambda u: np.where(u > 1.01, activation("elu")(u) + 1e-7, activation("elu")(u)),
        lambda u: np.where(u == 1, 5.0, np.tanh(u)),
        lambda u: np.where(u == 1, 5.0, u),
        lambda u: np.where(u == 1, 5.0, np.maximum(u, 20)),
        lambda u: np.clip(activation("gelu")(u), -1, 1),
        lambda u: np.where(u > 1e3, 1e3, np.logaddexp(u, 0)) + 0 * u,
        lambda u: np.where(u > 20, u, np.log1p(np.exp(u))),
        lambda u: np.arctan(u),
        lambda u: np.exp(u),
        lambda u: np.tanh(1.5 * np.tanh(u) + 0.1),
        lambda u: gelu_tanh(1.5 * gelu_tanh(u) + 0.1),
        lambda u: 1 / u,
        lambda u: np.sqrt(u),
        lambda u: u / (1 + abs(u)),
        lambda u: np.sin(u) * u,
        lambda u: np.sin(u) + 1e-6 * np.sin(2 * u),
        lambda u: np.where(u > 1e3, np.nan, u),
        lambda u: np.where(u > 1e3, np.inf, u),
        lambda u: u**9,
    ],
)
def test_what_is_nearly_an_activation_is_refused(function):
    with refused("the function", tnsim.UnsupportedLayer):
        curve_of(function, [0.0, 1.0, 1.01, 20.0, 1e3])


def test_nearby_constants_are_these_constants():
    curve = curve_of(lambda u: u / (1 + np.exp(-1.70 * u)))
    assert (curve.function.name, curve.scale) == ("silu", 1.7)
    curve = curve_of(lambda u: np.where(u > 0, u, 0.0100001 * u), [0.0])
    assert curve.function.name == "leaky_relu(0.0100001)"
    curve = curve_of(lambda u: np.clip(u, 0, 6.0000001), [0.0, 6.0000001])
    assert_close(curve(np.array([7.0]))[0], 6.0000001, rtol=1e-15)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("width", [1e-2, 1e-6, 1e-9])
def test_narrow_bands_have_their_pieces(width, strict):
    """Where an inequality is strict or not, its number is on the side that it is on."""

    def band(u):
        inside = (u > 1) & (u < 1 + width) if strict else (u >= 1) & (u <= 1 + width)
        return np.where(inside, 0.0, u)

    kinks = [1.0, 1 + width]
    curve = curve_of(band, kinks)
    np.testing.assert_array_equal(curve(np.array(kinks)), band(np.array(kinks)))
    u = np.array([1 - width, 1 + width / 3, 1 + 2 * width, *PLACES])
    assert_close(curve(u), band(u), scale=abs(band(u)) + 1e-2, rtol=1e-12)


def test_a_function_may_not_change_between_kinks_that_are_taken_as_one():
    near = [1.0, 1 + 1e-13]
    with refused("kinks at 1 and at 1.00.*too near", tnsim.UnsupportedLayer):
        curve_of(lambda u: np.where((u > near[0]) & (u < near[1]), 0.0, u), near)
    curve = curve_of(lambda u: sum(np.maximum(u, kink) for kink in near), near)
    assert_close(curve(np.array([-3.0, 7.0])), [2.0, 14.0])


def test_pieces_of_polynomials():
    """Softshrink, hardshrink and pieces of other degrees are activations of their own."""
    for function, kinks in (
        (lambda u: np.where(u > 0.5, u - 0.5, np.where(u < -0.5, u + 0.5, 0.0)), [-0.5, 0.5]),
        (lambda u: np.where(abs(u) > 0.5, u, 0.0), [-0.5, 0.5]),
        (lambda u: np.where(u > 1, u**2, np.where(u > -1, u, -1.0)), [-1, 1]),
        (lambda u: np.where(u < 0, u**8, 1.0001 * u), [0]),
        (lambda u: np.where(u > 100, 1e-3 * u**3, np.where(u > 99.9, 1e3, u)), [99.9, 100]),
    ):
        curve = curve_of(function, kinks)
        assert curve.function.name == "piecewise"
        assert_same(curve, function, kinks)
        assert_close(curve(np.array(kinks)), function(np.array(kinks)), rtol=1e-12)


def test_coefficients_to_their_digits():
    """A polynomial is known at all sizes, small coefficients beside large ones too."""
    coefficients = [3.0, -1e-4, 0.0, 2.5e-9, 7.0]
    curve = curve_of(lambda u: np.polynomial.polynomial.polyval(u, coefficients), [0.3, 5.0])
    assert curve.is_polynomial
    # Values around one are rounded by 1e-15 of their largest term, which is all that the smaller
    # coefficients lose.
    scale = np.maximum(np.abs(coefficients), 4e-7)
    assert_close(
        curve.function.pieces[0], coefficients, scale=scale, rtol=1e-6, limited_by="cancellation"
    )
    assert curve_of(lambda u: 0 * u + 2.0).function.pieces == ((2.0,),)


def test_rounded_constants_are_those_of_the_activation():
    """With the constant's own rounding said, an approximation to ten digits is the activation."""
    root = 0.7978845608
    assert curve_of(lambda u: gelu_tanh(u, root=root)).scale != 1
    curve = curve_of(lambda u: gelu_tanh(u, root=root), rounding=rounding_of(root))
    assert repr(curve) == repr(curve_of(activation("gelu_tanh")))
    assert rounding_of(0.5) == rounding_of(math.pi) == ROUNDING
    assert 2.1e-7 < rounding_of(float(np.float32(0.1))) < 2.7e-7
