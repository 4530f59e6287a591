"""One and two normal variables: distribution functions and moments cut off at a threshold.

All formulas are elementwise in JAX, for float64 and float32, and keep their digits where the two
variables are nearly or exactly one (correlation close to 1 or -1).

Sources: Owen, Tables for computing bivariate normal probabilities, Ann. Math. Stat. 27 (1956);
Genz, Numerical computation of rectangular bivariate and trivariate normal and t probabilities,
Stat. Comput. 14 (2004), for the conditioning near correlation 1; Kuang & Lin, arXiv:2601.22307, for
moments through probit and ReLU gates.
"""

from __future__ import annotations

from math import pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Real = Float[Array, "..."]
_OWEN = tuple(
    0.5 * (x + y) for x, y in zip(np.polynomial.legendre.leggauss(20), (1.0, 0.0), strict=True)
)
"""Gauss-Legendre nodes and weights on [0, 1]."""


def smallest(dtype: np.dtype) -> float:
    """A positive number for divisors: so small that it changes no sum, squares far from underflow.

    Example:
        >>> smallest(np.float64) < 1e-100
        True
    """
    return float(np.finfo(dtype).tiny) ** (1 / 3)


def density(x: Real) -> Real:
    """The standard normal density; zero, without overflow on the way, far out.

    Example:
        >>> round(float(density(jnp.zeros(()))), 6)
        0.398942
    """
    return jnp.exp(-0.5 * jnp.square(jnp.clip(x, -40.0, 40.0))) / sqrt(2 * pi)


def cumulative(x: Real) -> Real:
    """The standard normal distribution function, with its relative digits in the lower tail.

    Example:
        >>> float(cumulative(jnp.zeros(())))
        0.5
    """
    return 0.5 * jax.lax.erfc(x * -sqrt(0.5))


def owens_t(h: Real, a: Real) -> Real:
    """Owen's T(h, a) = 1/(2 pi) int_0^a exp(-h^2 (1 + x^2) / 2) / (1 + x^2) dx.

    For |a| <= 1 the integrand has its poles at +-i, so that 20 Gauss-Legendre nodes leave
    (2 + sqrt 5)^-40 = 1e-25 beside the entire factor. For |a| > 1 Owen's reflection
    T(h, a) = (Q(h) + Q(a h)) / 2 - Q(h) Q(a h) - T(a h, 1 / a), with Q = 1 - Phi, h and a positive.

    Args:
        h: First argument, any real numbers.
        a: Second argument, infinite ones included.

    Returns:
        Values in the broadcast shape, absolute error 2e-16 in float64.

    Example:
        >>> abs(float(owens_t(jnp.zeros(()), jnp.ones(()))) - 0.125) < 1e-7
        True
    """
    h, size = jnp.abs(h), jnp.abs(a)
    large = size > 1
    product = jnp.minimum(h * jnp.where(large, size, 1.0), 40.0)
    h = jnp.minimum(h, 40.0)
    first = jnp.where(large, product, h)
    upper = jnp.where(large, 1 / jnp.where(large, size, 1.0), size)
    exponent = -0.5 * jnp.square(first)
    total = jnp.zeros(jnp.broadcast_shapes(jnp.shape(h), jnp.shape(a)), exponent.dtype)
    for node, weight in zip(*_OWEN, strict=True):
        q = 1 + jnp.square(node * upper)
        total = total + weight * jnp.exp(exponent * q) / q
    total = total * upper / (2 * pi)
    above, beyond = cumulative(-h), cumulative(-product)
    reflected = 0.5 * (above + beyond) - above * beyond - total
    return jnp.sign(a) * jnp.where(large, reflected, total)


def thresholds(h: Real, k: Real, r: Real, gap: Real) -> tuple[Real, Real, Real, Real]:
    """P(X < h, Y < k) of two standard normal variables, and how far either threshold lies.

    Phi2 = (Phi(h) + Phi(k)) / 2 - T(h, (k - r h) / (h bar)) - T(k, (h - r k) / (k bar)) - [h k < 0] / 2
    with bar = sqrt(1 - r^2) (Owen 1956). For r > 0 the difference k - r h is (k - h) + (1 - r) h, else
    (k + h) - (1 + r) h, so nothing cancels at r = +-1 as long as 1 - |r| is handed over with its
    own digits.

    Args:
        h: First threshold.
        k: Second threshold.
        r: Correlation.
        gap: 1 - |r|, not computed from r.

    Returns:
        The probability, (k - r h) / bar, (h - r k) / bar, and bar.
    """
    tiny = smallest(jnp.result_type(h))
    h, k = (jnp.where(jnp.abs(x) < tiny, tiny, x) for x in (h, k))
    bar = jnp.maximum(jnp.sqrt(gap * (2 - gap)), tiny)
    near = jnp.where(r < 0, -1.0, 1.0)
    k_given_h = near * ((near * k - h) + gap * h) / bar
    h_given_k = near * ((near * h - k) + gap * k) / bar
    both = owens_t(h, k_given_h / h) + owens_t(k, h_given_k / k)
    opposite = jnp.where((h < 0) != (k < 0), 0.5, 0.0)
    probability = 0.5 * (cumulative(h) + cumulative(k)) - both - opposite
    return jnp.maximum(probability, 0.0), k_given_h, h_given_k, bar


def gated_moments(mean: Real, deviation: Real, width: float, most: int) -> list[Real]:
    """E u^p Phi(u / width) for p = 0 .. most, u ~ N(mean, deviation^2); width 0 stands for a kink.

    With noise e of deviation `width`, Phi(u / width) = P(u + e > 0). Stein's lemma for u^p 1(u + e > 0) gives
    E u^(p+1) 1 = mean E u^p 1 + deviation^2 (p E u^(p-1) 1 + E u^p delta(u + e)), where at u + e = 0
    u is normal of mean `mean (width / S)^2` and variance `(deviation width / S)^2`.

    Returns:
        A list of most + 1 arrays in the shape of mean and deviation.
    """
    tiny = smallest(jnp.result_type(mean))
    total = jnp.maximum(jnp.hypot(deviation, width), tiny)
    h = mean / total
    at = [density(h) / total]  # E u^p delta(u + e)
    inner_mean, inner_variance = mean * (width / total) ** 2, (deviation * width / total) ** 2
    moments = [cumulative(h)]
    for p in range(most):
        step = mean * moments[p] + deviation**2 * at[p]
        if p:
            step = step + deviation**2 * p * moments[p - 1]
        moments.append(step)
        following = inner_mean * at[p]
        at.append(following + p * inner_variance * at[p - 1] if p else following)
    return moments


def pair_moments(
    mean: tuple[Real, Real],
    deviation: tuple[Real, Real],
    rho: Real,
    gap: Real,
    width: tuple[float, float],
    most: tuple[int, int],
) -> list[list[Real]]:
    """E u^p Phi(u / width_u) v^q Phi(v / width_v) for p and q up to `most`, u and v jointly normal.

    Let e, e' be independent noise of deviations kappa, lambda (the widths), U = u + e, V = v + e',
    S^2 = s^2 + kappa^2, T^2 = t^2 + lambda^2, c = cov(u, v), and D = E delta(U) delta(V). Stein's lemma raises a
    power at a time (E u F = m E F + s^2 E dF/du + c E dF/dv, F = u^p v^q 1(U>0) 1(V>0)):

        M[p+1, q] = m M[p, q] + s^2 (p M[p-1, q] + X[p, q]) + c (q M[p, q-1] + Y[p, q])
        X[p, q] = E u^p v^q delta(U) 1(V>0),    Y[p, q] = E u^p v^q 1(U>0) delta(V).

    A kink (kappa = 0) has X[p, q] = 0 for p > 0, since u = 0 there. Otherwise E V F delta(V) = 0 turns the
    derivative of delta into moments: Y[p, 1] = (lambda / T)^2 (n Y[p, 0] + c dY[p]), where
    dY[p] = p Y[p-1, 0] + [p = 0] D. Given V = 0, u is normal of mean m - c n / T^2 and variance
    s^2 - c^2 / T^2, so Y[p+1, 0] = (m - c n / T^2) Y[p, 0] + (s^2 - c^2 / T^2) (p Y[p-1, 0] + [p = 0] D).
    D grows like 1 / bar; its factor vanishes like bar^2 at kinks, so the product is written out.

    Args:
        mean: Means of u and v.
        deviation: Standard deviations of u and v.
        rho: Correlation of u and v.
        gap: 1 - |rho|, with its own digits.
        width: Noise of either gate; 0 is a kink.
        most: Highest powers; 1 at most for a gate with noise.

    Returns:
        The table M[p][q].
    """
    if width[0] and not width[1]:
        flipped = pair_moments(mean[::-1], deviation[::-1], rho, gap, width[::-1], most[::-1])
        return [[flipped[q][p] for q in range(most[1] + 1)] for p in range(most[0] + 1)]
    (m, n), (s, t), (kappa, lam) = mean, deviation, width
    tiny = smallest(jnp.result_type(m, n, rho))
    total_s, total_t = jnp.maximum(jnp.hypot(s, kappa), tiny), jnp.maximum(jnp.hypot(t, lam), tiny)
    share_s, share_t = s / total_s, t / total_t
    c, r = rho * s * t, rho * share_s * share_t
    # 1 - |r| = (1 - |rho|) + |rho| (1 - share), and 1 - share^2 of noise is a sum of squares
    noise = jnp.zeros_like(r)
    if kappa:
        noise = noise + (kappa / total_s) ** 2 * share_t**2
    if lam:
        noise = noise + (lam / total_t) ** 2
    r_gap = gap + jnp.abs(rho) * noise / (1 + share_s * share_t)
    h, k = m / total_s, n / total_t
    probability, k_given_h, h_given_k, bar = thresholds(h, k, r, r_gap)
    table = [[probability] * (most[1] + 1) for _ in range(most[0] + 1)]
    if most == (0, 0):
        return table
    at_u = density(h) / total_s * cumulative(k_given_h)
    at_v = density(k) / total_t * cumulative(h_given_k)
    joint = density(h) * density(k_given_h) / (total_s * total_t)  # D bar
    mean_v, mean_u = n - c * m / total_s**2, m - c * n / total_t**2  # given U = 0, given V = 0
    # (t^2 - c^2 / S^2) / bar and its mirror; a kink has S = s, T = t and leaves t^2 bar
    spread_v = t**2 * (bar if not kappa and not lam else _spared(gap, rho, kappa, total_s) / bar)
    spread_u = s**2 * (bar if not kappa and not lam else _spared(gap, rho, lam, total_t) / bar)
    x, y = [at_u], [at_v]
    for q in range(most[1]):
        rest = (
            spread_v * joint if q == 0 else q * t**2 * _spared(gap, rho, kappa, total_s) * x[q - 1]
        )
        x.append(mean_v * x[q] + rest)
    for p in range(most[0]):
        rest = spread_u * joint if p == 0 else p * s**2 * _spared(gap, rho, lam, total_t) * y[p - 1]
        y.append(mean_u * y[p] + rest)
    for q in range(most[1]):
        value = n * table[0][q] + c * x[q]
        value = value + t**2 * (at_v if q == 0 else q * table[0][q - 1])
        table[0][q + 1] = value
    for p in range(most[0]):
        for q in range(most[1] + 1):
            value = m * table[p][q] + s**2 * (x[q] if p == 0 else p * table[p - 1][q])
            if q == 0:
                value = value + c * y[p]
            else:
                value = value + c * q * table[p][q - 1]
            if q == 1 and lam:
                through = c * joint / bar if p == 0 else c * p * y[p - 1]
                value = value + c * (lam / total_t) ** 2 * (n * y[p] + through)
            table[p + 1][q] = value
    return table


def _spared(gap: Real, rho: Real, width: float, total: Real) -> Real:
    """1 - rho^2 (s / S)^2 where S^2 = s^2 + width^2: what one variable keeps, given the other's gate."""
    exact = gap * (2 - gap)
    return exact + jnp.square(rho * width / total) if width else exact
