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

from tnsim.scaled import library, not_differentiated

Real = Float[Any, "..."]
"""Arrays of floats, of one shape or broadcast to one."""
Table = list[list[Real]]
"""Moments E u^p v^q w of two normal variables and a weight w, by [p][q]."""


def legendre(nodes: int) -> tuple[list[float], list[float]]:
    """Gauss-Legendre nodes and weights on [0, 1]: plain floats, which leave float32 as it is.

    Example:
        >>> legendre(1)
        ([0.5], [1.0])
    """
    x, weights = np.polynomial.legendre.leggauss(nodes)
    return (0.5 * (x + 1.0)).tolist(), (0.5 * weights).tolist()


_OWEN = legendre(20)


def smallest(dtype: np.dtype) -> float:
    """A positive number for divisors: so small that it changes no sum, squares far from underflow.

    Example:
        >>> smallest(np.float64) < 1e-100
        True
    """
    return float(np.finfo(dtype).tiny) ** (1 / 3)


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
    if xp is np:
        from scipy.special import owens_t as of_scipy  # here, as its import takes a while

        return of_scipy(h, a)
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


def below_both(h: Real, k: Real, r: Real, gap: Real) -> tuple[Real, Real, Real, Real]:
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
    size = not_differentiated(xp.maximum(abs(mean), deviation))
    one = xp.ones_like(size)
    if width:
        return one
    tiny = (size < smallest(xp.result_type(size)) ** 0.25) & (size > 0)
    return xp.where(tiny, xp.ldexp(one, xp.frexp(xp.where(tiny, size, 1.0))[1]), 1.0)


class _Gated(NamedTuple):
    """A normal variable u before a gate, both in a unit of their own.

    Args:
        mean, deviation: Moments of u.
        noise: Deviation of the noise e of the gate; zero for an open gate, whose noise counts
            nothing where formulas of the other gate ask for it.
        total: Deviation of U = u + e.
        threshold: How many of these deviations the mean lies above the threshold.
        is_open: Whether there is no gate.
        unit: The unit, a power of two.
    """

    mean: Real
    deviation: Real
    noise: float
    total: Real
    threshold: Real
    is_open: bool
    unit: Real

    @classmethod
    def of(cls, mean: Real, deviation: Real, width: float) -> _Gated:
        """A variable before a gate of some width."""
        xp, unit = library(mean, deviation), unit_of(mean, deviation, width)
        mean, deviation = mean / unit, deviation / unit
        noise = 0.0 if width == inf else width
        total = xp.hypot(deviation, noise)
        place = threshold(mean, total)
        total = xp.maximum(total, smallest(total.dtype))
        return cls(mean, deviation, noise, total, place, width == inf, unit)

    @property
    def opens(self) -> Real | float:
        """E 1(U > 0), the probability that the gate is open."""
        return 1.0 if self.is_open else cumulative(self.threshold)

    @property
    def at_threshold(self) -> Real | float:
        """E delta(U), the density of U at the threshold."""
        return 0.0 if self.is_open else density(self.threshold) / self.total

    @property
    def kept(self) -> Real | float:
        """kappa^2 / S^2, the share of its mean and variance that u keeps given U = 0."""
        # A quotient would have a slope that is no number where nothing varies.
        return 0.0 if self.is_open else (self.noise / self.total) ** 2


def gate_moments(
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
    u = _Gated.of(mean, deviation, width)
    zero, variance = 0 * (u.mean + u.deviation), u.deviation**2
    moments, at = [u.opens + zero], [u.at_threshold + zero]
    for p in range(most):
        moments.append(_raised(moments, p, u.mean, variance) + variance * at[p])
        at.append(_raised(at, p, u.mean * u.kept, variance * u.kept))
    moments = [x * u.unit**p for p, x in enumerate(moments)]
    return moments, [x * u.unit ** (p - 1) for p, x in enumerate(at)]


def _raised(row: list[Real], power: int, mean: Real, variance: Real) -> Real:
    """mean row[power] + power variance row[power - 1], the smooth share of Stein's lemma."""
    raised = mean * row[power]
    return raised + power * variance * row[power - 1] if power else raised


class _Law(NamedTuple):
    """Means, variances and covariance of two jointly normal variables u and v."""

    means: tuple[Real, Real]
    variances: tuple[Real, Real]
    covariance: Real


def gate_tables(
    law: tuple[Real, ...], width: tuple[float, float], most: tuple[int, int]
) -> tuple[Table, Table, Table, Table]:
    """Moments of two jointly normal variables behind gates, up to correlation 1 and -1.

    They are E u^p a(u) v^q b(v) by [p][q], where a and b are gates or the densities of their
    thresholds: with noise e of deviation `width`, a gate is 1(U > 0) and its density delta(U),
    U = u + e.

    Let e, e' be independent noise of deviations kappa, lambda (the widths), U = u + e, V = v + e',
    S^2 = s^2 + kappa^2, T^2 = t^2 + lambda^2. Given the argument of a density, variables are normal
    again. So each table follows by Stein's lemma (`_table`) from its first entry, from the law of u
    and v given the arguments of its densities, and from the tables where a gate has turned into its
    density:

        weight              law of u and v       derivatives by u, by v
        delta(U) delta(V)   given U = V = 0      none
        delta(U) 1(V > 0)   given U = 0          none, delta(U) delta(V)
        1(U > 0) delta(V)   given V = 0          delta(U) delta(V), none
        1(U > 0) 1(V > 0)   as it is             the two tables above

    A kink (kappa = 0) has u = 0 where delta(U) is, so its tables end at power 0.

    Args:
        law: Mean and standard deviation of u and of v, their correlation rho, and 1 - |rho| with
            its own digits.
        width: Noise of either gate; 0 is a kink, infinity an open gate.
        most: Highest powers of u and v in the table of gates.

    Returns:
        The tables of gates, of a density of U and a gate, of a gate and a density of V, and of
            densities; those with a density have one more power where its width is not 0.
    """
    m, s, n, t, rho, gap = library(*law).broadcast_arrays(*law)
    u, v = _Gated.of(m, s, width[0]), _Gated.of(n, t, width[1])
    first, bar = _first_entries(u, v, rho, gap)
    powers = (most[0] + 1 if u.noise else 0), (most[1] + 1 if v.noise else 0)
    both = _table(first[3], _given_both(u, v, rho, gap, bar), powers)
    at_u = _table(first[1], _given_one(u, v, rho, gap), (powers[0], most[1]), None, both)
    # The mirror image: u and v exchanged, in tables by powers of v.
    mirrored = _given_one(v, u, rho, gap), (powers[1], most[0]), None, _transposed(both)
    at_v = _transposed(_table(first[2], *mirrored))
    squares = u.deviation**2, v.deviation**2
    whole = _Law((u.mean, v.mean), squares, rho * u.deviation * v.deviation)
    gates = _table(first[0], whole, most, at_u, at_v)

    def scaled(table: Table, by_u: int, by_v: int) -> Table:
        """Moments in the units of the variables; a density has the inverse unit."""
        return [
            [value * u.unit ** (p - by_u) * v.unit ** (q - by_v) for q, value in enumerate(row)]
            for p, row in enumerate(table)
        ]

    return scaled(gates, 0, 0), scaled(at_u, 1, 0), scaled(at_v, 0, 1), scaled(both, 1, 1)


def _first_entries(
    u: _Gated, v: _Gated, rho: Real, gap: Real
) -> tuple[tuple[Real, Real, Real, Real], Real]:
    """The expected weights of all four tables, in their order, and sqrt(1 - r^2) of U and V."""
    xp = library(rho)
    zero = xp.zeros_like(rho)
    # E delta(U) and E delta(V) before the other gate is considered.
    at_u, at_v = u.at_threshold + zero, v.at_threshold + zero
    if u.is_open or v.is_open:
        # With an open gate the two thresholds do not interact.
        return (u.opens * v.opens + zero, at_u, at_v, zero), zero + 1.0
    share_u, share_v = u.deviation / u.total, v.deviation / v.total
    # 1 - |r| = (1 - |rho|) + |rho| (1 - share), and 1 - share^2 of noise is a sum of squares.
    noise = u.kept * share_v**2 + v.kept
    r_gap = gap + xp.abs(rho) * noise / (1 + share_u * share_v)
    r = rho * share_u * share_v
    probability, v_given_u, u_given_v, bar = below_both(u.threshold, v.threshold, r, r_gap)
    # delta(U) delta(V) has the density of U times that of V given U, whose deviation is T bar.
    # Given U = 0 the other gate opens with the probability Phi((k - r h) / bar).
    at_both = at_u * density(v_given_u) / (v.total * bar)
    return (probability, at_u * cumulative(v_given_u), at_v * cumulative(u_given_v), at_both), bar


def _given_one(u: _Gated, v: _Gated, rho: Real, gap: Real) -> _Law:
    """The law of u and v given U = 0: v loses what U explains of it."""
    c = rho * u.deviation * v.deviation
    means = u.mean * u.kept, v.mean - c * u.mean / u.total**2
    variances = u.deviation**2 * u.kept, v.deviation**2 * _unexplained(u, rho, gap)
    return _Law(means, variances, c * u.kept)


def _given_both(u: _Gated, v: _Gated, rho: Real, gap: Real, bar: Real) -> _Law:
    """The law of u and v given U = V = 0, with widths as factors: a kink gives exact zeros."""
    c = rho * u.deviation * v.deviation
    determinant = library(rho).square(u.total * v.total * bar)
    safe = library(rho).where(determinant > 0, determinant, 1.0)  # of the covariance of U and V

    def moments(u: _Gated, v: _Gated) -> tuple[Real, Real]:
        mean = u.noise**2 * (v.total**2 * u.mean - c * v.mean) / safe
        unexplained = v.total**2 * _unexplained(v, rho, gap)
        return mean, u.noise**2 * u.deviation**2 * unexplained / safe

    (mean, variance), (other_mean, other_variance) = moments(u, v), moments(v, u)
    covariance = (u.noise * v.noise) ** 2 * c / safe
    return _Law((mean, other_mean), (variance, other_variance), covariance)


def _unexplained(u: _Gated, rho: Real, gap: Real) -> Real:
    """1 - rho^2 s^2 / S^2, the share of the variance of v that U does not explain."""
    return gap * (2 - gap) + library(rho).square(rho * u.noise / u.total)


def _table(
    first: Real,
    law: _Law,
    most: tuple[int, int],
    by_u: Table | None = None,
    by_v: Table | None = None,
) -> Table:
    """Moments E u^p v^q w from E w, by Stein's lemma.

        T[p+1, q] = m T[p, q] + var(u) (p T[p-1, q] + D_u[p, q])
                              + cov(u, v) (q T[p, q-1] + D_v[p, q])

    and the same for v, where D are the moments with the derivatives of w.

    Args:
        first: E w.
        law: Law of u and v.
        most: Highest powers of u and v.
        by_u, by_v: Tables D; None for zero, which entries beyond a table are too.
    """
    (m, n), (of_u, of_v), covariance = law

    def at(table: Table | None, p: int, q: int) -> Real:
        inside = table is not None and p < len(table) and q < len(table[p])
        return table[p][q] if table is not None and inside else 0.0

    row = [first]
    for q in range(most[1]):
        by_both = of_v * at(by_v, 0, q) + covariance * at(by_u, 0, q)
        row.append(_raised(row, q, n, of_v) + by_both)
    table = [row]
    for p in range(most[0]):
        table.append([])
        for q in range(most[1] + 1):
            lower = q * table[p][q - 1] if q else 0.0
            by_both = of_u * at(by_u, p, q) + covariance * (at(by_v, p, q) + lower)
            table[-1].append(_raised([x[q] for x in table[:-1]], p, m, of_u) + by_both)
    return table


def _transposed(table: Table) -> Table:
    return [list(column) for column in zip(*table, strict=True)]
