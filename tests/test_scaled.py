"""Numbers as a value times a power of two, on NumPy and on JAX alike."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from closeness import assert_close

from tnsim.scaled import (
    SMALLEST,
    add,
    contribution,
    exponents_of,
    log_abs,
    power,
    scale_exponent,
    shifted,
    split,
)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_shifts_are_exact(rng, dtype):
    x = (rng.normal(size=(3, 4)) + (1j if dtype == "complex128" else 0)).astype(dtype)
    for by in (np.float64(0), np.float64(-7), np.array([[3.0], [0.0], [-40.0]])):
        found = shifted(x, by)
        assert found.dtype == dtype and (found == x * 2.0**by).all()
        with jax.enable_x64(True):
            traced = jax.jit(shifted)(jnp.asarray(x), jnp.asarray(by))
        assert traced.dtype == dtype and (np.asarray(traced) == found).all()


def test_shifts_beyond_a_single_power():
    assert shifted(np.array(2.0**-1000), np.float64(1900.0)) == 2.0**900
    with jax.enable_x64(True):
        assert jax.jit(shifted)(jnp.asarray(2.0**-1000), jnp.asarray(1900.0)) == 2.0**900


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exponents_of_a_trace_are_those_of_numpy(rng, dtype):
    """Also of the first and the last float, of zero, and of what is no number."""
    about = np.finfo(dtype)
    ends = [0.0, -0.0, 1.0, -2.0, 0.5, about.tiny, about.max, np.inf, -np.inf, np.nan]
    x = np.concatenate([np.ldexp(rng.normal(size=200), rng.integers(-100, 100, 200)), ends])
    x = x.astype(dtype)
    with jax.enable_x64(True):
        assert (np.asarray(jax.jit(exponents_of)(jnp.asarray(x))) == exponents_of(x)).all()
        for some in (x[:3], x[200:202], x[-4:-2], x[-3:-1], x[-1:]):
            traced = jax.jit(scale_exponent)(jnp.asarray(some))
            assert np.asarray(traced) == scale_exponent(some)


def test_plain_numbers_are_split():
    for number in (6.0, -0.3, np.float32(3.0), np.float64(1e300)):
        mantissa, exponent = split(number)
        assert 0.5 <= abs(mantissa) < 1 and float(mantissa) * 2.0**exponent == number
    assert split(0.0) == (0.0, SMALLEST)


def test_powers_against_many_digits(rng):
    with mpmath.workdps(40):
        for mantissa, exponent in rng.normal(size=(20, 2)) * (1.0, 300.0):
            expected = mpmath.mpf(mantissa) * mpmath.mpf(2) ** mpmath.mpf(exponent)
            # The exponent itself is rounded to 2^-53 of its size.
            assert_close(float(power(mantissa, exponent)), float(expected), rtol=1e-13)


@pytest.mark.parametrize("power_of_scale", [1, 2, 3])
def test_a_scaled_value_has_the_scale_one(rng, power_of_scale):
    for size in (1e-300, 1e-3, 1.0, 7.0, 1e200):
        value = size * rng.normal(size=(5,))
        exponent = scale_exponent(value, power_of_scale)
        again = shifted(value, -power_of_scale * exponent)
        assert scale_exponent(again, power_of_scale) == 0
        with jax.enable_x64(True):
            assert scale_exponent(jnp.asarray(value), power_of_scale) == exponent
    assert scale_exponent(np.zeros(3), power_of_scale) == 0


def test_sums_beyond_floats(rng):
    logs = rng.normal(size=6) * 1e4
    signs = np.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    parts = [
        contribution(np.array(s), np.array(x / np.log(2))) for s, x in zip(signs, logs, strict=True)
    ]
    with mpmath.workdps(60):
        total = mpmath.fsum(s * mpmath.exp(mpmath.mpf(x)) for s, x in zip(signs, logs, strict=True))
        expected = float(mpmath.log(abs(total)))
    assert_close(float(log_abs(add(parts))), expected, rtol=1e-13)


def test_a_zero_has_no_scale():
    """However large its exponent, it takes no digit of the other terms."""
    zero, one = (
        contribution(np.array(0.0), np.array(3000.0)),
        contribution(np.array(1.0), np.array(0.0)),
    )
    for parts in ([zero, one], [one, zero]):
        assert float(log_abs(add(parts))) == 0.0
