"""E f(u) g(v) for single pairs of jointly normal variables, up to correlation 1 and -1.

Gates meet gates in closed form. A part without one meets parts with a closed mean in an integral
over one variable, and another remainder in an integral over two. Integrals are sums over nodes
whose number follows from the strip, the scale and the correlation of each pair: no tolerance is
searched for.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.activations.activation import Activation, ClosedPart, Gate, Part, Remainder
from tnsim.activations.coefficients import NODES, WEIGHTS, span, trapezoidal_step
from tnsim.activations.normal import Real, density, pair_moments, smallest

_REACH = 9.0
"""Where integrals over a standard normal variable end: 1e-18 of its mass lies beyond."""


def pair_values(
    f: Activation, g: Activation, m: Real, s: Real, n: Real, t: Real, rho: Real, gap: Real
) -> Real:
    """The share of the parts (not of the polynomials) in E f(u) g(v), pair by pair.

    Args:
        f: Activation of u.
        g: Activation of v.
        m: Means of u.
        s: Standard deviations of u.
        n: Means of v.
        t: Standard deviations of v.
        rho: Correlations.
        gap: 1 - |rho|, with its own digits.

    Returns:
        Values in the shape of rho, which all arguments share.
    """
    total = jnp.zeros_like(rho)
    gates = [[x for x in h.parts if isinstance(x, Gate)] for h in (f, g)]
    by_width = (
        [[x for x in side if x.width == width] for width in sorted({x.width for x in side})]
        for side in gates
    )
    for left, right in product(*by_width):
        total = total + _gates(left, right, m, s, n, t, rho, gap)
    for a, b in product(f.parts, g.parts):
        if isinstance(a, Gate) and isinstance(b, Gate):
            continue
        if not isinstance(b, Remainder):
            if isinstance(a, Gate):
                total = total + _one_integral(b, a, n, t, m, s, rho, gap)
            else:
                total = total + _one_integral(a, b, m, s, n, t, rho, gap)
        elif not isinstance(a, Remainder):
            total = total + _one_integral(b, a, n, t, m, s, rho, gap)
        else:
            total = total + _two_integrals(a, b, m, s, n, t, rho, gap)
    return total


def _gates(
    left: list[Gate], right: list[Gate], m: Real, s: Real, n: Real, t: Real, rho: Real, gap: Real
) -> Real:
    """All gates of one width with all gates of one width, knots along leading axes."""
    (knots, weights), (others, other_weights) = (_stacked(x) for x in (left, right))
    means = m - knots[:, None, None], n - others[:, None]
    most = weights.shape[1] - 1, other_weights.shape[1] - 1
    table = pair_moments(means, (s, t), rho, gap, (left[0].width, right[0].width), most)
    return sum(
        jnp.sum(weights[:, p, None, None] * other_weights[:, q, None] * table[p][q], (0, 1))
        for p in range(most[0] + 1)
        for q in range(most[1] + 1)
        if weights[:, p].any() and other_weights[:, q].any()
    )


def _stacked(gates: list[Gate]) -> tuple[np.ndarray, np.ndarray]:
    """Knots, and weights of each gate in a row."""
    weights = np.zeros((len(gates), max(len(x.weights) for x in gates)))
    for row, gate in zip(weights, gates, strict=True):
        row[: len(gate.weights)] = gate.weights
    return np.array([x.knot for x in gates]), weights


def _one_integral(
    part: Part, closed: ClosedPart, m: Real, s: Real, n: Real, t: Real, rho: Real, gap: Real
) -> Real:
    """int part(m + s z) phi(z) E[closed(v) | z] dz over panels of 20 Gauss-Legendre nodes.

    Given z, v is normal of mean n + t rho z and deviation t sqrt(1 - rho^2). The conditional mean of a
    gate turns from one asymptote to the other within W = sqrt(t^2 (1 - rho^2) + width^2) / |t rho| of z* where
    its mean is at the knot. Panels march outward from z*, no longer than twice W or twice their
    distance to z*: an ellipse of sum of half-axes 2.8 about such a panel stays in the sector in
    which the transition decays, 2.8^-40 = 1e-18. W is 1e-16 at least, so 40 panels reach any end.
    """
    dtype = rho.dtype
    tiny = smallest(dtype)
    low, high = span(part, m, s, _REACH)
    longest = jnp.minimum(2.0, 2 * part.strip / jnp.maximum(s, tiny))
    slope, left_over = t * rho, t * jnp.sqrt(gap * (2 - gap))
    steep = jnp.maximum(jnp.abs(slope), tiny)
    if closed.width == jnp.inf:
        longest = jnp.minimum(longest, 2 * closed.strip / steep)
        centre, width = 0.5 * (low + high), jnp.full_like(rho, 2 * _REACH)
    else:
        signed = jnp.where(slope < 0, -steep, steep)
        centre = jnp.clip((closed.knot - n) / signed, -1e6, 1e6)
        width = jnp.maximum(jnp.hypot(left_over, closed.width) / steep, float(jnp.finfo(dtype).eps))
    centre, width, longest = (jax.lax.stop_gradient(x) for x in (centre, width, longest))
    start = jnp.clip(centre, low, high)

    def panel(edge: Real, end: Real, sign: float) -> tuple[Real, Real]:
        length = jnp.minimum(longest, 2 * jnp.maximum(width, jnp.abs(edge - centre)))
        length = jnp.minimum(length, sign * (end - edge))
        z = edge[:, None] + sign * length[:, None] * NODES
        inner = closed.mean(n[:, None] + slope[:, None] * z, left_over[:, None])
        values = density(z) * part(m[:, None] + s[:, None] * z) * inner
        return edge + sign * length, length * jnp.sum(WEIGHTS * values, 1)

    def body(state: tuple[Real, Real, Real]) -> tuple[Real, Real, Real]:
        left, right, total = state
        left, first = panel(left, low, -1.0)
        right, second = panel(right, high, 1.0)
        return left, right, total + first + second

    def unfinished(state: tuple[Real, Real, Real]) -> Real:
        return jnp.any((state[0] > low) | (state[1] < high))

    return jax.lax.while_loop(unfinished, body, (start, start, jnp.zeros_like(rho)))[2]


def _two_integrals(
    a: Remainder, b: Remainder, m: Real, s: Real, n: Real, t: Real, rho: Real, gap: Real
) -> Real:
    """Trapezoidal sums over u = m + s x and, given x, over v = n + t (rho x + sqrt(1 - rho^2) y).

    As a function of x the inner sum is analytic within strip_b / |t rho|, the outer factor within
    strip_a / s, so every direction has a step of its own and either sum ends with its remainder.
    """
    dtype = rho.dtype
    tiny = smallest(dtype)
    low, high = span(a, m, s, _REACH)
    slope, spread = t * rho, t * jnp.sqrt(gap * (2 - gap))
    step = trapezoidal_step(
        jnp.minimum(a.strip / jnp.maximum(s, tiny), b.strip / jnp.maximum(jnp.abs(slope), tiny))
    )
    inner_step = trapezoidal_step(b.strip / jnp.maximum(spread, tiny))
    low, high, step, inner_step = (jax.lax.stop_gradient(x) for x in (low, high, step, inner_step))
    together = jnp.arange(8, dtype=dtype)

    def outer(i: Any, total: Real) -> Real:
        x = low + i * step
        mean = n + slope * x
        first, last = (jax.lax.stop_gradient(y) for y in span(b, mean, spread, _REACH))
        count = jnp.max(jnp.ceil((last - first) / inner_step)).astype(int) // 8 + 1

        def inner(j: Any, part: Real) -> Real:
            y = first[:, None] + (8 * j + together) * inner_step[:, None]
            values = density(y) * b(mean[:, None] + spread[:, None] * y)
            return part + jnp.sum(jnp.where(y > last[:, None], 0.0, values), 1)

        integral = jax.lax.fori_loop(0, count, inner, jnp.zeros_like(rho))
        weight = jnp.where(x > high, 0.0, density(x) * a(m + s * x))
        return total + weight * integral

    count = jnp.max(jnp.ceil((high - low) / step)).astype(int) + 1
    total = jax.lax.fori_loop(0, count, outer, jnp.zeros_like(rho))
    return total * step * inner_step
