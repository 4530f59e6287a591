"""Hermite coefficients of activations, c_k = E f(m + s z) h_k(z), for every hidden unit.

h_k = he_k / sqrt(k!) are the normalised Hermite polynomials and z is standard normal. With the
coefficients d_k of g, E f(u) g(v) = sum_k c_k d_k rho^k (Mehler).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import factorial, inf, log, pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import (
    Activation,
    ClosedPart,
    Gate,
    Part,
    Remainder,
    Tail,
    Wave,
    about,
)
from tnsim.activations.normal import (
    Real,
    cumulative,
    density,
    legendre,
    repeat,
    smallest,
    threshold,
)
from tnsim.errors import ModelError
from tnsim.scaled import library

NODES, WEIGHTS = map(np.array, legendre(20))
"""Gauss-Legendre nodes and weights on [0, 1]."""
REACH = 12.5
"""Where sums over a standard normal variable end, with Hermite factors of high order."""
_AT_ONCE = 4096
"""Numbers of an array over some nodes and all units, in NumPy."""


def span(part: Part, mean: Real, deviation: Real, reach: float) -> tuple[Real, Real]:
    """The interval of z in which neither part(mean + deviation z) nor the density of z vanishes.

    A finite end of the part's support moves with mean and deviation. An infinite one stays at
    `reach`: its quotient by the deviation has an infinite slope, which times the zero slope of
    `clip` would be NaN. Where the deviation is 0 the interval is all of z or empty; a mean at the
    upper end of the support counts as inside, as it does for the part itself.
    """
    xp = library(mean, deviation)

    def place(end: float) -> Real:
        if abs(end) == inf:
            return xp.full_like(mean + deviation, reach if end > 0 else -reach)
        return xp.clip(-threshold(mean - end, deviation), -reach, reach)

    low, high = part.support
    return place(low), place(high)


def _divisor(deviation: Real) -> Real:
    """Deviations to divide by; slopes of traces overflow sooner than numbers."""
    xp, tiny = library(deviation), smallest(deviation.dtype)
    return xp.where(deviation > 0, deviation, tiny) if xp is np else xp.maximum(deviation, tiny)


def trapezoidal_step(distance: Real, order: int = 0, derivatives: int = 0) -> Real:
    """Distance of nodes in sums over z ~ N(0, 1), for functions analytic within `distance`.

    The error of a sum of step h is exp(-2 pi y / h + y^2 / 2) for any y up to the distance, with
    the Gaussian's growth off the axis; Hermite polynomials of order k add exp(y sqrt k) each. A
    derivative multiplies the error by 2 pi / h, beside values that grow as 1 / y.
    """
    xp = library(distance)
    # Natural logarithm of the accuracy wanted: an error of eps, with a factor e to spare.
    digits = 1.0 - log(xp.finfo(xp.result_type(distance)).eps)
    digits += derivatives * log(digits)
    # The exponent -2 pi y / h + y^2 / 2 equals -digits at the step below. A y beyond sqrt(2 digits)
    # would lose more by the Gaussian's growth than it gains.
    y = xp.minimum(distance, sqrt(2 * digits))
    return 2 * pi * y / (digits + y**2 / 2 + 2 * y * sqrt(order))


def polynomial_coefficients(
    polynomial: tuple[float, ...], mean: Real, deviation: Real
) -> Float[Any, "orders units"]:
    """Coefficients of a polynomial: finitely many, exact.

    z^j = sum_i j! / (2^i i! (j - 2i)!) he_(j - 2i).
    """
    degree = len(polynomial) - 1
    # Coefficients of z^j in the polynomial of m + s z.
    powers = [c * deviation**j for j, c in enumerate(about(polynomial, mean))]
    zero = 0 * (mean + deviation)
    rows = []
    for k in range(degree + 1):
        # he_k gets a share of every z^j with j - k even, and he_k = sqrt(k!) h_k.
        terms = (
            powers[j]
            * (factorial(j) / (2 ** ((j - k) // 2) * factorial((j - k) // 2) * sqrt(factorial(k))))
            for j in range(k, degree + 1, 2)
        )
        rows.append(sum(terms, zero))
    return library(zero).stack(rows)


def part_coefficients(
    part: Part, mean: Real, deviation: Real, order: int
) -> Float[Any, "orders units"]:
    """Coefficients 0 .. order of one part at every unit."""
    if isinstance(part, Gate) and part.width == inf:
        exact = polynomial_coefficients(part.weights, mean - part.knot, deviation)[: order + 1]
        xp = library(exact)
        beyond = xp.zeros((order + 1 - len(exact), *mean.shape), mean.dtype)
        return xp.concatenate([exact, beyond])
    if isinstance(part, Gate):
        return _gate_coefficients(part, mean, deviation, order)
    if isinstance(part, Wave):
        return _wave_coefficients(mean, deviation, order)
    return _summed_coefficients(part, mean, deviation, order)


def coefficients(
    f: Activation, mean: Real, deviation: Real, order: int
) -> Float[Any, "orders units"]:
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
    first, *others = (part_coefficients(part, mean, deviation, order) for part in f.parts)
    return sum(others, first)


def with_coefficients_of_slope(
    f: Activation, mean: np.ndarray, deviation: np.ndarray, order: int
) -> tuple[Float[np.ndarray, "orders units"], Float[np.ndarray, "orders units"]]:
    """Hermite coefficients 0 .. order of f and of f' at every unit, in NumPy.

    By parts s c_k[f'] = sqrt(k + 1) c_(k+1)[f], which closed forms keep for small s. Sums over
    nodes, whose rounding a small s would enlarge, are of f' itself.

    Args:
        f: The activation.
        mean: Means of the units' inputs.
        deviation: Standard deviations of the units' inputs.
        order: Highest order.

    Example:
        >>> from tnsim.activations.activation import activation
        >>> square = with_coefficients_of_slope(activation("square"), np.ones(1), np.ones(1), 1)
        >>> [x[:, 0].tolist() for x in square]
        [[2.0, 2.0], [2.0, 2.0]]
    """
    k = np.sqrt(np.arange(1.0, order + 2))[:, None]
    spread = deviation > 0
    quotients = np.where(spread, k / np.where(spread, deviation, 1.0), 0.0)

    def of_part(part: Part) -> np.ndarray:
        if isinstance(part, Remainder):
            every = (_summed_coefficients(part, mean, deviation, order, n) for n in (0, 1))
            return np.stack([*every])
        found = part_coefficients(part, mean, deviation, order + 1)
        return np.stack([found[:-1], quotients * found[1:]])

    first, *others = map(of_part, f.parts)
    plain, slopes = sum(others, first)
    slopes[0] = average(f, mean, deviation, 1)
    return plain, slopes


def average(f: Activation, mean: Real, deviation: Real, order: int = 0) -> Real:
    """E f(m + s z) of every unit, differentiable to any order in reverse mode as well.

    Args:
        f: The activation.
        mean: Means of the units' inputs.
        deviation: Standard deviations of the units' inputs.
        order: How often f is differentiated.

    Returns:
        Array in the shape of the means.
    """
    parts = (average_of_part(part, mean, deviation, order) for part in f.parts)
    return sum(parts, 0 * mean)


def average_of_part(part: ClosedPart | Remainder, mean: Real, deviation: Real, order: int) -> Real:
    """E of a derivative of one part of an activation."""
    # Closed means have derivatives of every order as they are. Those of a remainder are sums, for
    # which a rule of their own takes derivatives under the sum.
    if not isinstance(part, Remainder):
        return part.mean(mean, deviation, order)
    traced = library(mean, deviation) is jnp
    return (_traced_average if traced else _remainder_average)(part, order, mean, deviation)


def _remainder_average(part: Remainder, derivative: int, mean: Real, deviation: Real) -> Real:
    """E of a derivative of a remainder, by a trapezoidal sum."""
    xp = library(mean, deviation)
    low, high = span(part, mean, deviation, REACH)
    distance = part.strip / xp.maximum(deviation, smallest(mean.dtype))
    step = trapezoidal_step(distance, derivatives=derivative)
    count = nodes_of(part, (high - low) / step)
    # Nodes at once: as many as stay in a core's cache in NumPy, one in a compiled loop.
    rows = 1 if xp is jnp else max(1, min(128, _AT_ONCE // max(1, mean.size)))
    ahead = xp.arange(rows, dtype=mean.dtype).reshape(-1, *[1] * mean.ndim)

    # Nodes of different units differ in number; nodes beyond the end count zero.
    def body(i: Real, total: Real) -> Real:
        z = low + (rows * i + ahead) * step
        values = density(z) * step * part(mean + deviation * z, derivative)
        return total + xp.sum(xp.where(z > high, 0.0, values), 0)

    return repeat((count - 1) // rows + 1, body, 0 * mean)


def nodes_of(part: Any, lengths: Real, most: int = 100_000) -> Any:
    """Number of nodes of sums of some lengths in steps; refused where no sum would end.

    Args:
        part: Part of an activation, for the message.
        lengths: Lengths of the sums in steps.
        most: Most nodes of a sum of numbers.

    Raises:
        ModelError: A sum of numbers, not of traces, has more nodes.
    """
    xp = library(lengths)
    count = xp.max(xp.ceil(lengths), initial=0.0)
    if xp is np and not count <= most:
        raise ModelError(
            f"inputs of {_words(part)} vary over so many of its waves that an integral takes "
            f"{count:.1g} nodes: divide its weights or the covariance by {count / most:.0g} or "
            "more, or use Empirical(inputs)"
        )
    return count.astype(int) + 1


def _words(part: Any) -> str:
    function = getattr(part, "function", None)
    return "sin" if function is None else f"the activation {function.__name__.strip('_')}"


_traced_average = jax.custom_jvp(_remainder_average, nondiff_argnums=(0, 1))


@_traced_average.defjvp
def _traced_average_jvp(part, derivative, primals, tangents):
    """d/dm E f = E f' and, by the heat equation, d/ds E f = s E f''."""
    mean, deviation = primals
    by_mean = _traced_average(part, derivative + 1, mean, deviation)
    by_deviation = deviation * _traced_average(part, derivative + 2, mean, deviation)
    value = _traced_average(part, derivative, mean, deviation)
    return value, by_mean * tangents[0] + by_deviation * tangents[1]


def _hermite_rows(first: Real, z: Real, order: int, dtype: Any) -> Float[Any, "orders ..."]:
    """first h_k(z) for k = 0 .. order, in a loop, so that small factors meet large polynomials."""

    if not isinstance(first, jax.Array):
        values = np.empty((order + 1, *np.shape(first)), dtype)
        values[0] = first
        # sqrt(k + 1) h_(k+1) = z h_k - sqrt(k) h_(k-1), in place in the rows of the result.
        for k in range(order):
            np.multiply(z, values[k], out=values[k + 1])
            if k:
                values[k + 1] -= sqrt(k) * values[k - 1]
            values[k + 1] /= sqrt(k + 1)
        return values

    def following(carry: tuple[Real, Real], k: Real) -> tuple[tuple[Real, Real], Real]:
        before, now = carry
        after = (z * now - jnp.sqrt(k) * before) / jnp.sqrt(k + 1)
        return (now, after), after

    ks = jnp.arange(order, dtype=dtype)
    _, rows = jax.lax.scan(following, (jnp.zeros_like(first), first), ks)
    return jnp.concatenate([first[None], rows])


def times_z(c: Real) -> Real:
    """Coefficients of z f: z h_k = sqrt(k+1) h_(k+1) + sqrt k h_(k-1); the last order is short."""
    xp = library(c)
    # `none + k c[:-1]` raises: entry k gets sqrt(k) c_(k-1). `k c[1:] + none` lowers: entry k gets
    # sqrt(k+1) c_(k+1), for which the last entry lacks its partner.
    k = xp.sqrt(xp.arange(1, len(c), dtype=c.dtype))[:, None]
    none = xp.zeros_like(c[:1])
    return xp.concatenate([none, k * c[:-1]]) + xp.concatenate([k * c[1:], none])


def _gate_coefficients(gate: Gate, mean: Real, deviation: Real, order: int) -> Real:
    """Closed forms for (u - knot)^p Phi((u - knot) / width).

    With S^2 = s^2 + width^2 and H = (m - knot) / S,

        c_k[Phi] = (s / S)^k phi(H) h_(k-1)(-H) / sqrt k.

    A kink's powers follow from c_k[u_+^p] = s p c_(k-1)[u_+^(p-1)] / sqrt k, those of a smooth gate
    from z h_k = sqrt(k+1) h_(k+1) + sqrt k h_(k-1).
    """
    xp, dtype = library(mean, deviation), mean.dtype
    most = len(gate.weights) - 1
    # Each multiplication by u takes the coefficients of one order more, so a gate of power p starts
    # p orders further and the surplus is cut off at the end.
    extra = order + (most if gate.width else 0)
    u = mean - gate.knot
    total = xp.hypot(deviation, gate.width)
    # Beyond 40 deviations the density is zero in float64, and Hermite polynomials of the clipped
    # place stay finite.
    h = xp.clip(threshold(u, total), -40, 40)
    total = xp.where(total > 0, total, smallest(dtype))
    k = xp.arange(1, extra + 1, dtype=dtype)[:, None]
    # The density is the first factor of the recursion: polynomials of large arguments then never
    # stand alone, where they would overflow.
    rows = _hermite_rows(density(h), -h, max(extra - 1, 0), dtype)[:extra]
    share = deviation / total
    rows = rows * share**k / xp.sqrt(k)
    # Order 0 is the mean of the gate, the orders above follow the closed form.
    rows = xp.concatenate([cumulative(h)[None], rows])
    result = gate.weights[0] * rows
    average = [rows[0]]
    for p in range(1, most + 1):
        # Smooth gate: u f = (m - knot) f + s z f, and z moves orders up and down.
        if gate.width:
            rows = u * rows + deviation * times_z(rows)
        else:
            # Kink: the derivative of u_+^p is p u_+^(p-1), and c_k[f] = s c_(k-1)[f'] / sqrt k.
            # Only the means, the order 0, need the moments of a normal variable cut off at the
            # kink.
            if p == 1:
                average.append(u * average[0] + deviation * density(h))
            else:
                average.append(u * average[-1] + deviation**2 * (p - 1) * average[-2])
            rows = xp.concatenate([average[-1][None], deviation * p * rows[:-1] / xp.sqrt(k)])
        result = result + gate.weights[p] * rows
    return result[: order + 1]


def _wave_coefficients(mean: Real, deviation: Real, order: int) -> Real:
    """c_k[sin] = exp(-s^2 / 2) s^k sin(m + k pi / 2) / sqrt(k!)."""
    xp = library(mean, deviation)
    # the exponential stands first, so that no power overflows
    k = xp.arange(1, order + 1, dtype=mean.dtype)[:, None]
    factors = [xp.exp(-0.5 * xp.square(deviation))[None], deviation / xp.sqrt(k)]
    sizes = xp.cumprod(xp.concatenate(factors), 0)
    waves = xp.sin(mean), xp.cos(mean)
    # sin(m + k pi / 2) runs through sin, cos, -sin, -cos.
    signs = xp.stack([(-1) ** (n // 2) * waves[n % 2] for n in range(order + 1)])
    return sizes * signs


def _summed_coefficients(
    part: Part, mean: Real, deviation: Real, order: int, derivative: int = 0
) -> Real:
    """Sums over the values of z where the part is alive, of the part or of a derivative of it.

    Trapezoidal sums; a part that ends at a kink takes Gauss-Legendre panels from there instead,
    short beside the waves of h_k, which have 2 sqrt(k) radians to the unit.
    """
    xp, dtype = library(mean, deviation), mean.dtype
    low, high = span(part, mean, deviation, REACH)
    distance = part.strip / xp.maximum(deviation, smallest(dtype))
    kinked = isinstance(part, Tail)
    step = (
        xp.minimum(4 / sqrt(order + 4), 2 * distance)
        if kinked
        else trapezoidal_step(distance, order, derivative)
    )
    count = nodes_of(part, (high - low) / step)
    offsets, weights = (NODES, WEIGHTS) if kinked else (np.arange(8), np.ones(8))
    offsets, weights = (xp.asarray(x, dtype)[:, None] for x in (offsets, weights))
    # Each turn takes 20 nodes of a panel, or 8 neighbouring nodes of the trapezoidal sum.
    turns = count if kinked else count // 8 + 1

    def body(i: Real, total: Real) -> Real:
        # From the upper end downwards: there a kinked part ends, at which panels have to begin.
        z = high - ((i if kinked else 8 * i) + offsets) * step
        first = weights * density(z) * step * part(mean + deviation * z, derivative)
        rows = _hermite_rows(xp.where(z < low, 0.0, first), z, order, dtype)
        return total + xp.sum(rows, 1)

    return repeat(turns, body, xp.zeros((order + 1, *mean.shape), dtype))


def norms(
    f: Activation,
    mean: Real,
    deviation: Real,
    integrands: Callable[[Callable[[int], Real], Real], list[Real]],
) -> list[Real]:
    """Integrals over z of functions of f(u), its derivatives and z at every unit, u = m + s z.

    Gauss-Legendre panels between kinks, as long as the strip allows. All terms are positive for
    squares, so the results have their relative digits however far a unit lies in a tail.

    Args:
        f: The activation.
        mean: Means of the units' inputs.
        deviation: Standard deviations of the units' inputs.
        integrands: Function of the derivatives of f at u, by order, and of z, to a list of arrays
            of the same shape.

    Returns:
        An array in the shape of the means for every integrand.
    """
    xp = library(mean, deviation)
    safe = _divisor(deviation)
    # Between two landmarks every part is a polynomial or analytic in a strip, so panels of a length
    # that the strips allow converge.
    places = (-inf, *_landmarks(f), inf)
    ends = [xp.clip((x - mean) / safe, -REACH, REACH) for x in places]
    nodes, weights = (xp.asarray(x, mean.dtype)[:, None] for x in (NODES, WEIGHTS))
    # Panels at once: as many as stay in a core's cache in NumPy, one in a compiled loop.
    rows = 1 if xp is jnp else max(1, _AT_ONCE // max(1, nodes.size * mean.size))
    ahead = xp.arange(rows)[:, None, None]
    lows, lengths, turns = [], [], []
    for (left, right), (low, high) in zip(pairwise(places), pairwise(ends), strict=True):
        strips = [part.strip for part in f.parts if _alive(part, left, right)]
        longest = xp.minimum(2.0, 2 * min(strips, default=inf) / safe)
        # Panels of one interval are equally long, with a number that the longest interval of all
        # units needs.
        turns.append(nodes_of(f.parts[-1], (high - low) / longest) - 1)
        lows.append(low)
        lengths.append((high - low) / xp.maximum(turns[-1], 1))

    # Two nested loops, over intervals and over their panels, so that a trace compiles one panel
    # only.
    def panels(n: Any, totals: list[Real]) -> list[Real]:
        low, length, count = (xp.stack(x)[n] for x in (lows, lengths, turns))

        def panel(i: Any, totals: list[Real]) -> list[Real]:
            at = rows * i + ahead
            z = low + (xp.minimum(at, count - 1) + nodes) * length
            u = mean + deviation * z
            weight = xp.where(at < count, weights, 0.0) * density(z) * length
            terms = integrands(lambda n: sum(part(u, n) for part in f.parts), z)
            return [x + xp.sum(weight * y, (0, 1)) for x, y in zip(totals, terms, strict=True)]

        return repeat((count + rows - 1) // rows, panel, totals)

    # The integrands are called once on zeros to learn how many there are.
    totals = [0 * mean] * len(integrands(lambda n: 0 * mean, 0 * mean))
    return repeat(xp.asarray(len(lows)), panels, totals)


def energies(f: Activation, mean: Real, deviation: Real) -> Real:
    """E f(u)^2 of every unit."""
    if len(f.parts) == 1 and isinstance(f.parts[0], Wave):
        # E sin(u)^2 = (1 - exp(-2 s^2) cos 2m) / 2, with its digits for small s and m
        xp = library(mean, deviation)
        damped = 2 * xp.square(deviation)
        return xp.square(xp.sin(mean)) - 0.5 * xp.expm1(-damped) * xp.cos(2 * mean)
    return norms(f, mean, deviation, lambda at, z: [at(0) ** 2])[0]


def _landmarks(f: Activation) -> list[float]:
    """Places between which an activation is a polynomial or has a strip: kinks, ends of changes."""
    places = set()
    for part in f.parts:
        places |= set(part.support)
        if not isinstance(part, Remainder) and part.width < inf:
            places |= {part.knot - REACH * part.width, part.knot + REACH * part.width}
    return sorted(x for x in places if abs(x) < inf)


def _alive(part: Part, left: float, right: float) -> bool:
    """Whether a part limits panels between two landmarks, where it is no polynomial."""
    if isinstance(part, Gate):
        middle = 0.5 * (left + right)
        return 0 < part.width < inf and abs(middle - part.knot) < REACH * part.width
    low, high = part.support
    return part.strip > 0 and low < right and left < high
