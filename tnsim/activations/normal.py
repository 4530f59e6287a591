"""One and two normal variables: distribution functions and moments cut off at a threshold.

All formulas are elementwise, for arrays of NumPy and of JAX, float64 and float32, and keep their
digits where the two variables are nearly or exactly one (correlation close to 1 or -1). NumPy
serves numbers on the host, where compiling a formula takes longer than its arithmetic; JAX serves
traces and accelerators.

Sources: Owen, Tables for computing bivariate normal probabilities, Ann. Math. Stat. 27 (1956);
Genz, Numerical computation of rectangular bivariate and trivariate normal and t probabilities,
Stat. Comput. 14 (2004), for the conditioning near correlation 1; Kuang & Lin, arXiv:2601.22307, for
moments through probit and ReLU gates.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, pi, sqrt
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from tnsim.scaled import library

Real = Float[Any, "..."]
_OWEN = tuple(
    (0.5 * (x + y)).tolist()
    for x, y in zip(np.polynomial.legendre.leggauss(20), (1.0, 0.0), strict=True)
)
"""Gauss-Legendre nodes and weights on [0, 1]; plain floats, which leave float32 as it is."""


def smallest(dtype: np.dtype) -> float:
    """A positive number for divisors: so small that it changes no sum, squares far from underflow.

    Example:
        >>> smallest(np.float64) < 1e-100
        True
    """
    return float(np.finfo(dtype).tiny) ** (1 / 3)


def held(x: Real) -> Real:
    """The numbers of an array without their derivatives."""
    return jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x


def repeat(count: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """The state after `body(0, state)`, `body(1, state)`, ...: a loop of JAX for a count of JAX.

    Example:
        >>> repeat(3, lambda i, total: total + i, 0)
        3
    """
    if isinstance(count, jax.Array):
        return jax.lax.fori_loop(0, count, body, state)
    for i in range(int(count)):
        state = body(i, state)
    return state


def density(x: Real) -> Real:
    """The standard normal density; zero, without overflow on the way, far out.

    Example:
        >>> round(float(density(np.zeros(()))), 6)
        0.398942
    """
    xp = library(x)
    return xp.exp(-0.5 * xp.square(xp.clip(x, -40.0, 40.0))) / sqrt(2 * pi)


def cumulative(x: Real) -> Real:
    """The standard normal distribution function, with its relative digits in the lower tail.

    Example:
        >>> float(cumulative(np.zeros(())))
        0.5
    """
    if not isinstance(x, jax.Array):
        from scipy.special import erfc  # here, as its import takes a while

        return 0.5 * erfc(x * -sqrt(0.5))
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
        >>> abs(float(owens_t(np.zeros(()), np.ones(()))) - 0.125) < 1e-7
        True
    """
    xp = library(h, a)
    # T is even in h and odd in a, so absolute values do, and the sign of a returns at the end.
    h, size = xp.abs(h), xp.minimum(xp.abs(a), 1 / smallest(xp.result_type(h, a)) ** 2)
    large = size > 1
    # a h, without overflow: beyond 40 every term below has vanished.
    product = xp.minimum(h * xp.where(large, size, 1.0), 40.0)
    h = xp.minimum(h, 40.0)
    # Where the reflection is used, the integral is T(a h, 1 / a); otherwise T(h, a) itself.
    first = xp.where(large, product, h)
    upper = xp.where(large, 1 / xp.where(large, size, 1.0), size)
    exponent = -0.5 * xp.square(first)
    total = xp.zeros(xp.broadcast_shapes(xp.shape(h), xp.shape(a)), exponent.dtype)
    for node, weight in zip(*_OWEN, strict=True):
        q = 1 + xp.square(node * upper)
        total = total + weight * xp.exp(exponent * q) / q
    total = total * upper / (2 * pi)
    above, beyond = cumulative(-h), cumulative(-product)
    reflected = 0.5 * (above + beyond) - above * beyond - total
    return xp.sign(a) * xp.where(large, reflected, total)


def thresholds(h: Real, k: Real, r: Real, gap: Real) -> tuple[Real, Real, Real, Real]:
    """P(X < h, Y < k) of two standard normal variables, and how far either threshold lies.

    With bar = sqrt(1 - r^2) (Owen 1956),

        Phi2 = (Phi(h) + Phi(k) - [h k < 0]) / 2
               - T(h, (k - r h) / (h bar)) - T(k, (h - r k) / (k bar)).

    For r > 0 the difference k - r h is (k - h) + (1 - r) h, else (k + h) - (1 + r) h, so nothing
    cancels at r = +-1 as long as 1 - |r| is handed over with its own digits.

    Args:
        h: First threshold.
        k: Second threshold.
        r: Correlation.
        gap: 1 - |r|, not computed from r.

    Returns:
        The probability, (k - r h) / bar, (h - r k) / bar, and bar.
    """
    xp = library(h, k, r, gap)
    tiny = smallest(xp.result_type(h))
    # A threshold of zero would be divided by; a tiny positive one has the same probabilities.
    h, k = (xp.where(xp.abs(x) < tiny, tiny, x) for x in (h, k))
    bar = xp.maximum(xp.sqrt(gap * (2 - gap)), tiny)
    near = xp.where(r < 0, -1.0, 1.0)
    # k - r h = near ((near k - h) + gap h), as r = near (1 - gap).
    k_given_h = near * ((near * k - h) + gap * h) / bar
    h_given_k = near * ((near * h - k) + gap * k) / bar
    both = owens_t(h, k_given_h / h) + owens_t(k, h_given_k / k)
    opposite = xp.where((h < 0) != (k < 0), 0.5, 0.0)
    probability = 0.5 * (cumulative(h) + cumulative(k)) - both - opposite
    return xp.maximum(probability, 0.0), k_given_h, h_given_k, bar


def gated_moments(
    mean: Real, deviation: Real, width: float, most: int
) -> tuple[list[Real], list[Real]]:
    """E u^p Phi(u / width) for p = 0 .. most and u ~ N(mean, deviation^2), and E u^p delta(u + e).

    Width 0 stands for a kink, infinite width for no gate at all. With noise e of deviation `width`,
    Phi(u / width) = P(u + e > 0), and Stein's lemma raises the power:

        E u^(p+1) 1 = mean E u^p 1 + deviation^2 (p E u^(p-1) 1 + E u^p delta(u + e)).

    At u + e = 0 u is normal of mean `mean (width / S)^2` and variance `(deviation width / S)^2`,
    where S^2 = deviation^2 + width^2.

    Returns:
        Two lists of most + 1 arrays in the shape of mean and deviation.
    """
    xp = library(mean, deviation)
    if width == inf:
        moments, at = [xp.ones_like(mean + deviation)], [xp.zeros_like(mean + deviation)]
        inner_mean = inner_variance = at[0]
    else:
        unit = unit_of(mean, deviation, width)
        mean, deviation = mean / unit, deviation / unit
        total = xp.hypot(deviation, width)
        h = threshold(mean, total)
        total = xp.maximum(total, smallest(xp.result_type(mean)))
        moments, at = [cumulative(h)], [density(h) / total]
        inner_mean, inner_variance = mean * (width / total) ** 2, (deviation * width / total) ** 2
    for p in range(most):
        moments.append(_raised(moments, p, mean, deviation**2) + deviation**2 * at[p])
        at.append(_raised(at, p, inner_mean, inner_variance))
    if width < inf:
        moments = [x * unit**p for p, x in enumerate(moments)]
        at = [x * unit ** (p - 1) for p, x in enumerate(at)]
    return moments, at


def _raised(row: list[Real], power: int, mean: Real, variance: Real) -> Real:
    """mean row[power] + power variance row[power - 1], the smooth share of Stein's lemma."""
    raised = mean * row[power]
    return raised + power * variance * row[power - 1] if power else raised


def threshold(mean: Real, total: Real) -> Real:
    """How many deviations a mean lies above the threshold of a gate; far, where nothing varies.

    A gate without width or variance is open above its threshold and shut at it, as the function is.

    Example:
        >>> [float(threshold(np.float64(x), np.float64(0.0))) > 0 for x in (0.0, 1e-300)]
        [False, True]
    """
    xp = library(mean, total)
    tiny = smallest(xp.result_type(mean, total))
    # Slopes of traces overflow sooner than numbers.
    varies = total > (0.0 if xp is np else tiny)
    within = xp.clip(mean / xp.where(varies, total, 1.0), -1 / tiny, 1 / tiny)
    return xp.where(varies, within, xp.where(mean > 0, 100.0, -100.0))


def unit_of(mean: Real, deviation: Real, width: float) -> Real:
    """A power of two in which a variable before a kink at zero is near one where it is tiny.

    Squares of deviations leave the range of floats long before moments of kinks do, and these are
    homogeneous. Other gates have a width, beside which a tiny variable is none.

    Example:
        >>> float(unit_of(np.float64(0.0), np.float64(2.0**-500), 0.0)) == 2.0**-499
        True
    """
    xp = library(mean, deviation)
    size = held(xp.maximum(abs(mean), deviation))
    one = xp.ones_like(size)
    if width:
        return one
    tiny = (size < smallest(xp.result_type(size)) ** 0.25) & (size > 0)
    return xp.where(tiny, xp.ldexp(one, xp.frexp(xp.where(tiny, size, 1.0))[1]), 1.0)


class GateTables(NamedTuple):
    """E u^p a(u) v^q b(v) by [p][q], where a and b are gates or the densities of their thresholds.

    With noise e of deviation width_u, a gate is 1(U > 0) and its density delta(U), U = u + e.
    """

    gates: list[list[Real]]
    density_gate: list[list[Real]]
    gate_density: list[list[Real]]
    densities: list[list[Real]]


def gate_tables(
    mean: tuple[Real, Real],
    deviation: tuple[Real, Real],
    rho: Real,
    gap: Real,
    width: tuple[float, float],
    most: tuple[int, int],
) -> GateTables:
    """Moments of two jointly normal variables behind gates, up to correlation 1 and -1.

    Let e, e' be independent noise of deviations kappa, lambda (the widths), U = u + e, V = v + e',
    S^2 = s^2 + kappa^2, T^2 = t^2 + lambda^2, c = cov(u, v). Four tables are built by Stein's
    lemma, each from earlier ones; given the argument of a density the variables are normal again.

        Z = E u^p v^q delta(U) delta(V):   both means and the covariance given U = V = 0
        X = E u^p v^q delta(U) 1(V > 0):   X[p, q+1] = n1 X[p, q] + t1 (q X[p, q-1] + Z[p, q])
                                                       + c1 p X[p-1, q], given U = 0
        Y, its mirror
        M[p+1, q] = m M[p, q] + s^2 (p M[p-1, q] + X[p, q]) + c (q M[p, q-1] + Y[p, q])

    A kink (kappa = 0) has u = 0 where delta(U) is, so X and Z vanish for p > 0. Z grows like
    1 / bar, bar^2 = 1 - r^2, r = c / (S T); next to two kinks its factor t1 is t^2 bar^2, and the
    product is written without the quotient.

    Args:
        mean: Means of u and v.
        deviation: Standard deviations of u and v.
        rho: Correlation of u and v.
        gap: 1 - |rho|, with its own digits.
        width: Noise of either gate; 0 is a kink, infinity an open gate.
        most: Highest powers of u and v in the table of gates.

    Returns:
        The tables; those with a density have one more power where its width is not 0.
    """
    xp = library(*mean, *deviation, rho, gap)
    (m, n), (s, t), (kappa, lam) = mean, deviation, width
    m, n, s, t, rho, gap = xp.broadcast_arrays(m, n, s, t, rho, gap)
    unit_u, unit_v = unit_of(m, s, kappa), unit_of(n, t, lam)
    m, n, s, t = m / unit_u, n / unit_v, s / unit_u, t / unit_v
    c, zero = rho * s * t, xp.zeros_like(rho)
    open_u, open_v = kappa == inf, lam == inf
    # An open gate has no threshold; its noise counts as zero where formulas of the other gate ask
    # for it.
    noise_u, noise_v = (0.0 if x == inf else x for x in width)
    tiny = smallest(rho.dtype)
    total_s = xp.maximum(xp.hypot(s, noise_u), tiny)
    total_t = xp.maximum(xp.hypot(t, noise_v), tiny)
    h, k = threshold(m, xp.hypot(s, noise_u)), threshold(n, xp.hypot(t, noise_v))
    # E delta(U) and E delta(V), the first entries of X and Y before the other gate is considered.
    at_u = zero if open_u else density(h) / total_s
    at_v = zero if open_v else density(k) / total_t
    joint, bar = zero, zero + 1.0
    if open_u or open_v:
        # With an open gate the two thresholds do not interact.
        probability = (1.0 if open_u else cumulative(h)) * (1.0 if open_v else cumulative(k)) + zero
    else:
        share_s, share_t = s / total_s, t / total_t
        # 1 - |r| = (1 - |rho|) + |rho| (1 - share), and 1 - share^2 of noise is a sum of squares
        noise = (noise_u / total_s) ** 2 * share_t**2 + (noise_v / total_t) ** 2
        r_gap = gap + xp.abs(rho) * noise / (1 + share_s * share_t)
        probability, k_given_h, h_given_k, bar = thresholds(h, k, rho * share_s * share_t, r_gap)
        # delta(U) delta(V) has the density of U times that of V given U, whose deviation is T bar.
        joint = at_u * density(k_given_h) / total_t  # Z[0][0] bar
        # Given U = 0 the other gate opens with the probability Phi((k - r h) / bar).
        at_u, at_v = at_u * cumulative(k_given_h), at_v * cumulative(h_given_k)

    def kept(width: float, total: Real) -> Real:
        """1 - rho^2 s^2 / S^2."""
        return gap * (2 - gap) + xp.square(rho * width / total)

    # given U = V = 0
    powers = (most[0] + 1 if noise_u else 0), (most[1] + 1 if noise_v else 0)
    z = [[joint / bar]]
    # Determinant of the covariance of (U, V).
    determinant = xp.square(total_s * total_t * bar)
    safe = xp.where(determinant > 0, determinant, 1.0)
    # Means, variances and covariance of (u, v) given U = V = 0 by the usual formulas of
    # conditioning. Each is written with the widths as factors, so that a kink gives exact zeros.
    m2 = noise_u**2 * (total_t**2 * m - c * n) / safe
    n2 = noise_v**2 * (total_s**2 * n - c * m) / safe
    s2 = noise_u**2 * s**2 * total_t**2 * kept(noise_v, total_t) / safe
    t2 = noise_v**2 * t**2 * total_s**2 * kept(noise_u, total_s) / safe
    c2 = (noise_u * noise_v) ** 2 * c / safe
    # First the row of u^0, then every further power of u from the rows before.
    for q in range(powers[1]):
        z[0].append(_raised(z[0], q, n2, t2))
    for p in range(powers[0]):
        columns = [
            _raised([row[q] for row in z], p, m2, s2) + (q * c2 * z[p][q - 1] if q else 0.0)
            for q in range(powers[1] + 1)
        ]
        z.append(columns)

    def at(table: list[list[Real]], p: int, q: int) -> Real:
        return table[p][q] if p < len(table) and q < len(table[p]) else zero

    def conditional(
        first: Real,
        moments: tuple[Real, ...],
        spread_zero: Real,
        most: int,
        powers: int,
        flip: bool,
    ) -> list[list[Real]]:
        """Powers of the variable at its threshold by rows, of the other one by columns."""
        own_mean, own_variance, mean, variance, covariance = moments

        def both(p: int, q: int) -> Real:
            return at(z, q, p) if flip else at(z, p, q)

        # Row 0 holds the powers of the other variable. The derivative of its gate contributes the
        # table of both densities, for power 0 through `spread_zero`, where the quotient by bar is
        # avoided.
        row = [first]
        for q in range(most):
            through = spread_zero if q == 0 else variance * both(0, q)
            row.append(_raised(row, q, mean, variance) + through)
        table = [row]
        # Powers of the variable at its own threshold, by the law given that threshold.
        for p in range(powers):
            table.append(
                [
                    _raised([x[q] for x in table], p, own_mean, own_variance)
                    + covariance * (both(p, q) + (q * table[p][q - 1] if q else 0.0))
                    for q in range(most + 1)
                ]
            )
        return table

    # Given U = 0 the variable u keeps the share kappa^2 / S^2 of its mean and variance, and v loses
    # what U explains of it.
    share_u, share_v = (noise_u / total_s) ** 2, (noise_v / total_t) ** 2
    v_kept, u_kept = t**2 * kept(noise_u, total_s), s**2 * kept(noise_v, total_t)
    kinks = not noise_u and not noise_v
    v_through = (t**2 * bar if kinks else v_kept / bar) * joint
    u_through = (s**2 * bar if kinks else u_kept / bar) * joint
    given_u = m * share_u, s**2 * share_u, n - c * m / total_s**2, v_kept, c * share_u
    given_v = n * share_v, t**2 * share_v, m - c * n / total_t**2, u_kept, c * share_v
    x = conditional(at_u, given_u, v_through, most[1], powers[0], False)
    # The mirror image: the same recursion with u and v exchanged gives rows by powers of v, which
    # are transposed into Y[p][q].
    flipped = conditional(at_v, given_v, u_through, most[0], powers[1], True)
    y = [[flipped[q][p] for q in range(len(flipped))] for p in range(most[0] + 1)]
    # Row 0 first, by the mirror image of the recursion for M, and then row by row.
    table = [[probability]]
    for q in range(most[1]):
        table[0].append(_raised(table[0], q, n, t**2) + t**2 * at(y, 0, q) + c * x[0][q])
    for p in range(most[0]):
        table.append(
            [
                _raised([row[q] for row in table], p, m, s**2)
                + s**2 * at(x, p, q)
                + c * (at(y, p, q) + (q * table[p][q - 1] if q else 0.0))
                for q in range(most[1] + 1)
            ]
        )

    def scaled(table: list[list[Real]], by_u: int, by_v: int) -> list[list[Real]]:
        """Moments in the units of the variables; a density has the inverse unit."""
        return [
            [value * unit_u ** (p - by_u) * unit_v ** (q - by_v) for q, value in enumerate(row)]
            for p, row in enumerate(table)
        ]

    return GateTables(scaled(table, 0, 0), scaled(x, 1, 0), scaled(y, 0, 1), scaled(z, 1, 1))
