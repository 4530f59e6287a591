"""Hermite coefficients of activations, c_k = E f(m + s z) h_k(z), for every hidden unit.

h_k = he_k / sqrt(k!) are the normalised Hermite polynomials and z is standard normal. With the
coefficients d_k of g, E f(u) g(v) = sum_k c_k d_k rho^k (Mehler).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import comb, factorial, inf, log, pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tnsim.activations.activation import Activation, Gate, Part, Remainder
from tnsim.activations.normal import Real, cumulative, density, smallest

NODES, WEIGHTS = (
    0.5 * (np.asarray(x) + y)
    for x, y in zip(np.polynomial.legendre.leggauss(20), (1.0, 0.0), strict=True)
)
"""Gauss-Legendre nodes and weights on [0, 1]."""
REACH = 12.5
"""Where sums over a standard normal variable end, with Hermite factors of high order."""


def span(part: Part, mean: Real, deviation: Real, reach: float) -> tuple[Real, Real]:
    """The interval of z in which part(mean + deviation z) and the density of z are alive.

    Ends move with mean and deviation where a part ends. An infinite end stays: the slope of its
    quotient is infinite, and times the zero slope of `clip` no number.
    """
    safe = jnp.maximum(deviation, smallest(mean.dtype))

    def place(end: float) -> Real:
        if abs(end) == inf:
            return jnp.full_like(mean + deviation, reach if end > 0 else -reach)
        return jnp.clip((end - mean) / safe, -reach, reach)

    low, high = part.support
    return place(low), place(high)


def trapezoidal_step(distance: Real, order: int = 0) -> Real:
    """Distance of nodes in sums over z ~ N(0, 1), for functions analytic within `distance`.

    The error of a sum of step h is exp(-2 pi y / h + y^2 / 2) for any y up to the distance, with
    the Gaussian's growth off the axis; Hermite polynomials of order k add exp(y sqrt k) each.
    """
    digits = 1.0 - log(jnp.finfo(jnp.result_type(distance)).eps)
    y = jnp.minimum(distance, sqrt(2 * digits))
    return 2 * pi * y / (digits + y**2 / 2 + 2 * y * sqrt(order))


def polynomial_coefficients(
    polynomial: tuple[float, ...], mean: Real, deviation: Real
) -> Float[Array, "orders units"]:
    """Coefficients of a polynomial: finitely many, exact.

    z^j = sum_i j! / (2^i i! (j - 2i)!) he_(j - 2i).
    """
    degree = len(polynomial) - 1
    powers = [
        sum(polynomial[q] * comb(q, j) * mean ** (q - j) for q in range(j, degree + 1))
        * deviation**j
        for j in range(degree + 1)
    ]
    zero = jnp.zeros_like(mean)
    rows = []
    for k in range(degree + 1):
        terms = (
            powers[j]
            * (factorial(j) / (2 ** ((j - k) // 2) * factorial((j - k) // 2) * sqrt(factorial(k))))
            for j in range(k, degree + 1, 2)
        )
        rows.append(sum(terms, zero))
    return jnp.stack(rows)


@partial(jax.jit, static_argnums=(0, 3))
def part_coefficients(
    part: Part, mean: Real, deviation: Real, order: int
) -> Float[Array, "orders units"]:
    """Coefficients 0 .. order of one part at every unit."""
    if isinstance(part, Gate) and part.width == inf:
        exact = polynomial_coefficients(part.weights, mean - part.knot, deviation)[: order + 1]
        return jnp.zeros((order + 1, *mean.shape), mean.dtype).at[: len(exact)].set(exact)
    if isinstance(part, Gate):
        return _gate_coefficients(part, mean, deviation, order)
    return _summed_coefficients(part, mean, deviation, order)


def coefficients(
    f: Activation, mean: Real, deviation: Real, order: int
) -> Float[Array, "orders units"]:
    """Hermite coefficients 0 .. order of an activation at every unit.

    Args:
        f: The activation.
        mean: Means of the units' inputs.
        deviation: Standard deviations of the units' inputs.
        order: Highest order.

    Returns:
        Array of order + 1 rows, a column for every unit.

    Example:
        >>> from tnsim.activations.activation import activation
        >>> relu = activation("relu")
        >>> float(coefficients(relu, jnp.zeros(1), jnp.ones(1), 1)[1, 0])
        0.5
    """
    zero = jnp.zeros((order + 1, *mean.shape), mean.dtype)
    return sum((part_coefficients(part, mean, deviation, order) for part in f.parts), zero)


def average(f: Activation, mean: Real, deviation: Real) -> Real:
    """E f(m + s z) of every unit, differentiable to any order in reverse mode as well.

    Args:
        f: The activation.
        mean: Means of the units' inputs.
        deviation: Standard deviations of the units' inputs.

    Returns:
        Array in the shape of the means.
    """
    total = jnp.zeros_like(mean)
    for part in f.parts:
        if isinstance(part, Remainder):
            total = total + _remainder_average(part, 0, mean, deviation)
        else:
            total = total + part.mean(mean, deviation)
    return total


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _remainder_average(part: Remainder, derivative: int, mean: Real, deviation: Real) -> Real:
    """E of a derivative of a remainder, by a trapezoidal sum."""
    function = derivative_of(part, derivative)
    low, high = span(part, mean, deviation, REACH)
    step = trapezoidal_step(part.strip / jnp.maximum(deviation, smallest(mean.dtype)), 2)
    count = jnp.max(jnp.ceil((high - low) / step)).astype(int) + 1

    def body(i: Real, total: Real) -> Real:
        z = low + i * step
        return total + jnp.where(z > high, 0.0, density(z) * step * function(mean + deviation * z))

    return jax.lax.fori_loop(0, count, body, jnp.zeros_like(mean))


@_remainder_average.defjvp
def _remainder_average_jvp(part, derivative, primals, tangents):
    """d/dm E f = E f' and, by the heat equation, d/ds E f = s E f''."""
    mean, deviation = primals
    by_mean = _remainder_average(part, derivative + 1, mean, deviation)
    by_deviation = deviation * _remainder_average(part, derivative + 2, mean, deviation)
    value = _remainder_average(part, derivative, mean, deviation)
    return value, by_mean * tangents[0] + by_deviation * tangents[1]


def derivative_of(function: Callable[[Real], Real], order: int) -> Callable[[Real], Real]:
    """The derivative of a function of one number, elementwise."""
    if not order:
        return function
    lower = derivative_of(function, order - 1)
    return lambda u: jax.jvp(lower, (u,), (jnp.ones_like(u),))[1]


def _hermite_rows(first: Real, z: Real, order: int, dtype: Any) -> Float[Array, "orders ..."]:
    """first h_k(z) for k = 0 .. order, in a loop, so that small factors meet large polynomials."""

    def following(carry: tuple[Real, Real], k: Real) -> tuple[tuple[Real, Real], Real]:
        before, now = carry
        after = (z * now - jnp.sqrt(k) * before) / jnp.sqrt(k + 1)
        return (now, after), after

    ks = jnp.arange(order, dtype=dtype)
    _, rows = jax.lax.scan(following, (jnp.zeros_like(first), first), ks)
    return jnp.concatenate([first[None], rows])


def _gate_coefficients(gate: Gate, mean: Real, deviation: Real, order: int) -> Real:
    """Closed forms for (u - knot)^p Phi((u - knot) / width).

    With S^2 = s^2 + width^2 and H = (m - knot) / S,

        c_k[Phi] = (s / S)^k phi(H) h_(k-1)(-H) / sqrt k.

    A kink's powers follow from c_k[u_+^p] = s p c_(k-1)[u_+^(p-1)] / sqrt k, those of a smooth gate
    from z h_k = sqrt(k+1) h_(k+1) + sqrt k h_(k-1).
    """
    dtype = mean.dtype
    most = len(gate.weights) - 1
    extra = order + (most if gate.width else 0)
    u = mean - gate.knot
    total = jnp.maximum(jnp.hypot(deviation, gate.width), smallest(dtype))
    h = jnp.clip(u / total, -40, 40)
    k = jnp.arange(1, extra + 1, dtype=dtype)[:, None]
    rows = _hermite_rows(density(h), -h, max(extra - 1, 0), dtype)[:extra]
    share = deviation / total
    rows = rows * share**k / jnp.sqrt(k)
    rows = jnp.concatenate([cumulative(u / total)[None], rows])
    result = gate.weights[0] * rows
    average = [rows[0]]
    for p in range(1, most + 1):
        if gate.width:
            up = jnp.sqrt(k) * rows[1:]
            down = jnp.sqrt(k[: len(rows) - 1]) * rows[:-1]
            raised = u * rows + deviation * jnp.concatenate([up, jnp.zeros_like(rows[:1])])
            rows = raised.at[1:].add(deviation * down)
        else:
            if p == 1:
                average.append(u * average[0] + deviation * density(u / total))
            else:
                average.append(u * average[-1] + deviation**2 * (p - 1) * average[-2])
            rows = jnp.concatenate([average[-1][None], deviation * p * rows[:-1] / jnp.sqrt(k)])
        result = result + gate.weights[p] * rows
    return result[: order + 1]


def _summed_coefficients(part: Part, mean: Real, deviation: Real, order: int) -> Real:
    """Sums over the values of z where the part is alive.

    Trapezoidal sums; a part that ends at a kink takes Gauss-Legendre panels from there instead,
    short beside the waves of h_k, which have 2 sqrt(k) radians to the unit.
    """
    dtype = mean.dtype
    low, high = span(part, mean, deviation, REACH)
    distance = part.strip / jnp.maximum(deviation, smallest(dtype))
    kinked = part.support[1] == 0.0
    step = (
        jnp.minimum(4 / sqrt(order + 4), 2 * distance)
        if kinked
        else trapezoidal_step(distance, order)
    )
    count = jnp.max(jnp.ceil((high - low) / step)).astype(int) + 1
    offsets, weights = (NODES, WEIGHTS) if kinked else (np.arange(8), np.ones(8))
    offsets, weights = (jnp.asarray(x, dtype)[:, None] for x in (offsets, weights))
    turns = count if kinked else count // 8 + 1

    def body(i: Real, total: Real) -> Real:
        z = high - ((i if kinked else 8 * i) + offsets) * step
        first = weights * density(z) * step * part(mean + deviation * z)
        rows = _hermite_rows(jnp.where(z < low, 0.0, first), z, order, dtype)
        return total + jnp.sum(rows, 1)

    return jax.lax.fori_loop(0, turns, body, jnp.zeros((order + 1, *mean.shape), dtype))


def norms(
    f: Activation, mean: Real, deviation: Real, integrands: Callable[[Real, Real, Real], list[Real]]
) -> list[Real]:
    """Integrals over z of functions of f(u), df/dz and z at every unit, u = m + s z.

    Gauss-Legendre panels between kinks, as long as the strip allows. All terms are positive for
    squares, so the results have their relative digits however far a unit lies in a tail.

    Args:
        f: The activation.
        mean: Means of the units' inputs.
        deviation: Standard deviations of the units' inputs.
        integrands: Function of f(u), df/dz and z to a list of arrays of the same shape.

    Returns:
        An array in the shape of the means for every integrand.
    """
    safe = jnp.maximum(deviation, smallest(mean.dtype))
    kinks = sorted({x.knot for x in f.parts if not isinstance(x, Remainder) and x.width == 0})
    strip = min((x.strip for x in f.parts if x.strip > 0), default=inf)
    ends = [jnp.clip((x - mean) / safe, -REACH, REACH) for x in (-inf, *kinks, inf)]
    count = len(integrands(*[jnp.zeros_like(mean)] * 3))
    totals = [jnp.zeros_like(mean)] * count
    nodes, weights = (jnp.asarray(x, mean.dtype)[:, None] for x in (NODES, WEIGHTS))

    def values(u: Real) -> Real:
        return sum((part(u) for part in f.parts), jnp.zeros_like(u))

    for low, high in pairwise(ends):
        turns = jnp.max(jnp.ceil((high - low) / jnp.minimum(2.0, 2 * strip / safe))).astype(int)
        length = (high - low) / jnp.maximum(turns, 1)

        def body(i: Any, totals: list[Real], low: Real = low, length: Real = length) -> list[Real]:
            z = low + (i + nodes) * length
            value, slope = jax.jvp(
                values, (mean + deviation * z,), (jnp.broadcast_to(deviation, z.shape),)
            )
            weight = weights * density(z) * length
            return [
                x + jnp.sum(weight * y, 0)
                for x, y in zip(totals, integrands(value, slope, z), strict=True)
            ]

        totals = jax.lax.fori_loop(0, turns, body, totals)
    return totals
