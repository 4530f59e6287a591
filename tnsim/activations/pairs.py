"""E f(u) g(v) for single pairs of jointly normal variables, up to correlation 1 and -1.

Gates meet gates in closed form. A part without one meets parts with a closed mean in an integral
over one variable, and another remainder in an integral over two. Integrals are sums over nodes
whose number follows from the strip, the scale and the correlation of each pair: no tolerance is
searched for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import inf
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.activations.activation import (
    Activation,
    ClosedPart,
    Gate,
    Part,
    Remainder,
    Tail,
    Wave,
    is_kink,
)
from tnsim.activations.coefficients import (
    NODES,
    WEIGHTS,
    average_of_part,
    nodes_of,
    span,
    trapezoidal_step,
)
from tnsim.activations.normal import (
    Real,
    below_both,
    density,
    gate_tables,
    repeat,
    smallest,
    threshold,
    unit_of,
)
from tnsim.scaled import library, not_differentiated

_MOST_NODES = 10_000
"""Most nodes of either sum of a double integral."""
_REACH = 9.0
"""Where integrals over a standard normal variable end: 1e-18 of its mass lies beyond."""


Orders: TypeAlias = tuple[tuple[int, int], ...]
"""How often f and g are differentiated, for each of several values at a pair."""


def pair_derivatives(
    f: Activation, g: Activation, law: tuple[Real, ...], orders: Orders
) -> list[Real]:
    """E of derivatives of f(u) and g(v), pair by pair, an array for each of several orders.

    All orders share what is dear: moments of gates, nodes of integrals and means given a variable.

    Args:
        f: Activation of u.
        g: Activation of v.
        law: Means m and deviations s of u, n and t of v, correlations rho, and gaps 1 - |rho| with
            their own digits, arrays of one axis.
        orders: How often f and g are differentiated.

    Returns:
        Arrays in the shape of rho. Slopes of E f(u) g(v) itself by m, s, n, t and rho are exact up
        to |rho| = 1; gap follows rho.
    """
    traced = isinstance(law[4], jax.Array)
    if traced and orders == ((0, 0),) and _halves_meet(f, g):
        # The kernel of two parts that jump has the slope 1 / sqrt(1 - rho^2) where both thresholds
        # meet; derivatives of both functions have no such part, as their densities have cancelled.
        return _traced(_sum_over_parts, f, g, orders, *law)
    return _sum_over_parts(f, g, orders, *law)


def _sum_over_parts(f: Activation, g: Activation, orders: Orders, *law: Real) -> list[Real]:
    """The values of `pair_derivatives`, summed part by part."""
    m, s, n, t, rho, gap = law
    flipped = n, t, m, s, rho, gap
    exchanged = tuple((j, i) for i, j in orders)
    traced = isinstance(rho, jax.Array)
    derivatives: list[Any] = []
    # Gates of one width share their tables of moments, so they are evaluated together, knots along
    # axes of their own.
    for left, right in product(_by_width(f), _by_width(g)):
        plain = traced and orders[0] == (0, 0)
        # Slopes of a traced value are those of every part for itself, densities included.
        alone = (tuple(replace(x, tail=0.0) for x in gates) for gates in (left, right))
        of_gates = [_gates(*alone, *law)] if plain else []
        rest = [(order, False) for order in orders[len(of_gates) :]]
        derivatives.append(
            [*of_gates, *(_differentiated_gates(left, right, law, rest) if rest else ())]
        )
    # All pairs of parts with at least one that is no gate.
    for a, b in product(f.parts, g.parts):
        if isinstance(a, Gate) and isinstance(b, Gate):
            continue
        # A part without a closed mean is integrated over, and the other part enters through its
        # mean given the first variable. Of two parts with closed means a gate, if there is one,
        # enters through its mean.
        if is_kink(a):
            derivatives.append(_beside_kink(a, b, orders, *law))
        elif is_kink(b):
            derivatives.append(_beside_kink(b, a, exchanged, *flipped))
        elif isinstance(a, Wave) and isinstance(b, Wave):
            derivatives.append([_waves(i, j, *law) for i, j in orders])
        elif not isinstance(a, Remainder) and (isinstance(a, Gate) or isinstance(b, Remainder)):
            derivatives.append(_one_integral(b, a, exchanged, *flipped))
        elif not isinstance(b, Remainder):
            derivatives.append(_one_integral(a, b, orders, *law))
        elif traced:
            derivatives.append(_traced(_two_integrals, a, b, orders, *law))
        else:
            derivatives.append(_two_integrals_by_scale(a, b, orders, *law))
    return [sum(same, 0 * rho) for same in zip(*derivatives, strict=True)]


def _halves_meet(f: Activation, g: Activation) -> bool:
    """Whether parts of two activations jump, and the activations themselves do not."""
    gates = f.gates_at_kinks + g.gates_at_kinks
    return any(x.tail for x in gates) and all(x.weights[0] == x.tail for x in gates)


@dataclass(frozen=True)
class _Opened:
    """A kink of which derivatives leave out the densities at its threshold."""

    gate: Gate
    width = 0.0
    strip = 0.0
    support = (-inf, inf)

    @property
    def knot(self) -> float:
        return self.gate.knot

    def __call__(self, u: Real, order: int = 0) -> Real:
        return self.gate(u, order)

    def mean(self, mean: Real, deviation: Real, order: int = 0) -> Real:
        opened, _ = self.gate.derivative(order)
        return Gate(self.knot, 0.0, opened).mean(mean, deviation)


def _kink_and_other(
    gate: Gate, part: Tail | Wave | Remainder, orders: Orders, *law: Real
) -> list[Real]:
    """E of derivatives of a kink in u and of a part in v that is no gate.

    A density at the kink fixes u, and leaves the mean of the other part given u: no sum over nodes,
    which sees no density where correlations of 1 and -1 leave it no width. A tail ends there as the
    gates begin beside this density, by the same digits (`below_both`), so that both make one
    continuous function.
    """
    m, s, n, t, rho, gap = law
    xp = library(rho)
    exchanged = tuple((j, i) for i, j in orders)
    values = _one_integral(part, _Opened(gate), exchanged, n, t, m, s, rho, gap)
    m = m - gate.knot
    unit, h = unit_of(m, s, 0.0), threshold(m, s)
    safe = xp.maximum(s / unit, smallest(rho.dtype)) * unit
    _, k_given_h, _, bar = below_both(h, threshold(n, t), rho, gap)

    @cache
    def at_kink(derivative: int, order: int) -> Real:
        """E of a derivative of the density at the kink and of part^(order).

        By Stein's lemma E z d g = s E d' g + rho t E d g' of a derivative d of the density, and
        z = (u - m) / s, where u d is the derivative before d, as often negative as d has been
        differentiated.
        """
        if not derivative:
            mean = average_of_part(part, k_given_h * bar * t, bar * t, order)
            return density(h) / safe * mean
        before = (derivative - 1) * at_kink(derivative - 2, order) / safe if derivative > 1 else 0.0
        by_z = h * at_kink(derivative - 1, order) + before
        return -(by_z + rho * t * at_kink(derivative - 1, order + 1)) / safe

    # The kink's derivative i has the density of derivative i - k, differentiated k times.
    return [
        sum((w * at_kink(k, j) for k in range(i) for w in gate.derivative(i - k)[1] if w), value)
        for value, (i, j) in zip(values, orders, strict=True)
    ]


def _waves(i: int, j: int, m: Real, s: Real, n: Real, t: Real, rho: Real, gap: Real) -> Real:
    """E sin(u) sin(v) = (E cos(u - v) - E cos(u + v)) / 2, with derivatives as shifts of the phase.

    Both means are near one where u and v are small, so their difference is taken term by term,

        cos m cos n (exp(-p / 2) - exp(-q / 2)) + sin m sin n (exp(-p / 2) + exp(-q / 2)),

    with the variances p and q of u -+ v. These are (s -+ rho t)^2 + t^2 (1 - rho^2), without
    cancellation for equal units, and q - p = 4 rho s t.
    """
    xp = library(rho)
    sign = xp.where(rho < 0, -1.0, 1.0)
    # (s - t)^2 + 2 s t (1 - |rho|) = s^2 + t^2 - 2 s t |rho|, a sum of two terms that are not
    # negative.
    near = xp.exp(-0.5 * (xp.square(s - t) + 2 * s * t * gap))  # of u - sign v
    far = xp.exp(-0.5 * (xp.square(s + t) - 2 * s * t * gap))
    difference = -sign * near * xp.expm1(-2 * s * t * sign * rho)
    sine = Wave()
    cosines = sine(m, i + 1) * sine(n, j + 1)
    return 0.5 * (cosines * difference + sine(m, i) * sine(n, j) * (near + far))


def _by_width(f: Activation) -> list[tuple[Gate, ...]]:
    """The gates of an activation, those of one width together."""
    gates = [x for x in f.parts if isinstance(x, Gate)]
    return [tuple(x for x in gates if x.width == w) for w in sorted({x.width for x in gates})]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gates(left, right, m, s, n, t, rho, gap):
    (values,) = _differentiated_gates(left, right, (m, s, n, t, rho, gap), [((0, 0), False)])
    return values


@_gates.defjvp
def _gates_jvp(left, right, primals, tangents):
    """Slopes in closed form, as automatic ones lose digits where bar is small.

    dK/dm = E f' g, dK/drho = s t E f' g', dK/ds = E f' z g with z = (u - m) / s.
    """
    _, s, _, t, *_ = primals
    m1, s1, n1, t1, rho1, _ = tangents
    wanted = [((0, 0), False), ((1, 0), False), ((0, 1), False), ((1, 1), False), ((1, 0), True)]
    value, by_u, by_v, mixed, by_z = _differentiated_gates(left, right, primals, wanted)
    # The law seen from v: means and deviations change places, rho and gap stay.
    flipped = (*primals[2:4], *primals[:2], *primals[4:])
    (by_other_z,) = _differentiated_gates(right, left, flipped, [((1, 0), True)])
    slope = m1 * by_u + n1 * by_v + rho1 * s * t * mixed
    return value, slope + s1 * by_z + t1 * by_other_z


def _differentiated_gates(
    left: tuple[Gate, ...],
    right: tuple[Gate, ...],
    law: tuple[Real, ...],
    wanted: Sequence[tuple[tuple[int, int], bool]],
) -> list[Real]:
    """All gates of one width with all gates of one width, knots along leading axes.

    Wanted are orders of derivatives, each with or without the factor z = (u - m) / s. A derivative
    of a gate is a gate of lower powers and a density of its threshold (`_terms`). The factor is
    Stein's lemma again, s d/du + rho t d/dv; given U = 0 it is normal of mean -m s / S^2, its
    covariances with u and v are s and rho t times kappa^2 / S^2.
    """
    m, s, n, t, rho, gap = law
    xp = library(rho)
    knots, others = (np.array([x.knot for x in gates], rho.dtype) for gates in (left, right))
    # Shapes (knots, 1, pairs) and (1, other knots, pairs): every knot of u meets every knot of v.
    m, n = m - knots[:, None, None], n - others[:, None]
    width = left[0].width, right[0].width
    terms = [tuple(map(_terms, (left, right), derivatives)) for derivatives, _ in wanted]
    # Tables of densities have one power more than those of gates; at a kink u is 0.
    powers = [
        max(
            [p - kind for each in terms for kind, p in each[n]]
            + [len(x.weights) - 1 for x in gates]
        )
        for n, gates in enumerate((left, right))
    ]
    law = m, s, n, t, rho, gap
    gates, at_u, at_v, at_both = gate_tables(law, width, (powers[0], powers[1]))
    kinds = ((gates, at_v), (at_u, at_both))

    def at(table: list[list[Real]], p: int, q: int) -> Real:
        inside = 0 <= p < len(table) and 0 <= q < len(table[p])
        return table[p][q] if inside else 0 * table[0][0]

    total = xp.maximum(xp.hypot(s, 0.0 if width[0] == inf else width[0]), smallest(rho.dtype))
    share = 0.0 if width[0] == inf else (width[0] / total) ** 2

    # By Stein's lemma E z F = s E dF/du + rho t E dF/dv. Behind a gate the derivative lowers a
    # power or turns the gate into its density. At the density of a threshold the law given U = 0
    # takes the place of the plain law, with its own mean and covariances.
    def value(times_z: bool, kind: int, other: int, p: int, q: int) -> Real:
        table = kinds[kind][other]
        if not times_z:
            return at(table, p, q)
        by_v = q * at(table, p, q - 1) + (at(kinds[kind][1], p, q) if other == 0 else 0.0)
        if kind == 0:
            by_u = p * at(table, p - 1, q) + at(kinds[1][other], p, q)
            return s * by_u + rho * t * by_v
        by_u = p * at(table, p - 1, q)
        return -m * s / total**2 * at(table, p, q) + share * (s * by_u + rho * t * by_v)

    # Weights per knot stand along the axes of knots, which are summed over; what remains has an
    # entry per pair.
    results = []
    for (of_u, of_v), (_, times_z) in zip(terms, wanted, strict=True):
        result = 0 * rho
        for (kind, p), weights in of_u.items():
            for (other, q), other_weights in of_v.items():
                weight = (weights[:, None, None] * other_weights[:, None]).astype(rho.dtype)
                result = result + xp.sum(weight * value(times_z, kind, other, p, q), (0, 1))
        results.append(result)
    return results


def _terms(gates: tuple[Gate, ...], derivatives: int) -> dict[tuple[int, int], np.ndarray]:
    """Weights of (u - knot)^p, by p, behind gates (0) and at their densities (1)."""
    terms: dict[tuple[int, int], np.ndarray] = {}
    for row, gate in enumerate(gates):
        for kind, weights in enumerate(gate.derivative(derivatives)):
            for p, weight in enumerate(weights):
                terms.setdefault((kind, p), np.zeros(len(gates)))[row] = weight
    return {k: w for k, w in terms.items() if w.any()}


def _one_integral(part: Part, closed: ClosedPart, orders: Orders, *law: Real) -> list[Real]:
    """int part(m + s z) phi(z) E[closed(v) | z] dz over panels of 20 Gauss-Legendre nodes.

    There is a value for each order of derivatives.

    Given z, v is normal of mean n + t rho z and deviation t sqrt(1 - rho^2). The mean of a gate
    turns from one asymptote to the other about z*, where its argument's mean is at the knot, within
    W = sqrt(t^2 (1 - rho^2) + width^2) / |t rho|. Panels march outward from z*, no longer than 2 W
    or twice their distance to z*: an ellipse of sum of half-axes 2.8 about such a panel stays where
    the transition decays, 2.8^-40 = 1e-18. W is 16 eps at least, so that an edge within the reach
    of 9, whose neighbours are 8 eps away, moves with every panel, and 40 panels reach any end.
    """
    m, s, n, t, rho, gap = law
    xp, dtype = library(rho), rho.dtype
    tiny, eps = smallest(dtype), float(xp.finfo(dtype).eps)
    nodes, weights = (xp.asarray(x, dtype) for x in (NODES, WEIGHTS))
    of_part, of_closed = (sorted({order[n] for order in orders}) for n in (0, 1))
    # Where the part is alive. Panels are no longer than 2, on which 20 nodes integrate the density
    # to rounding, and no longer than the strip of the part allows.
    low, high = span(part, m, s, _REACH)
    # Derivatives are steeper beside a singularity, and take shorter panels.
    strip = part.strip / (1 + max(i for i, _ in orders) / 8)
    longest = xp.minimum(2.0, 2 * strip / xp.maximum(s, tiny))
    # The conditional law of v: its mean moves by `slope` with z, and `left_over` is its deviation,
    # from 1 - rho^2 = (1 - |rho|) (1 + |rho|).
    slope, left_over = t * rho, t * xp.sqrt(gap * (2 - gap))
    steep = xp.maximum(xp.abs(slope), tiny)
    # An entire function has no transition; its strip as a function of z limits the panels instead.
    if closed.width == inf:
        longest = xp.minimum(longest, 2 * closed.strip / steep)
        centre, width = 0.5 * (low + high), xp.full_like(rho, 2 * _REACH)
    else:
        signed = xp.where(slope < 0, -steep, steep)
        centre = xp.clip((closed.knot - n) / signed, -1e6, 1e6)
        width = xp.maximum(xp.hypot(left_over, closed.width) / steep, 16 * eps)
    # Where panels begin and end changes no integral, so nothing is differentiated through them.
    centre, width, longest = not_differentiated((centre, width, longest))
    # Only the check that the sum would end; the number itself is not used.
    if xp is np:
        nodes_of(part, (high - low) / longest)
    # One panel to the left and one to the right of what has been integrated so far, along the first
    # axis of edges and ends.
    start = xp.clip(centre, low, high)
    ends, signs = xp.stack([low, high]), xp.asarray([[-1.0], [1.0]], dtype)

    def body(state: tuple[Real, Real]) -> tuple[Real, Real]:
        edges, total = state
        # A panel ends at the end of the interval at the latest; at the end its length is zero.
        length = xp.minimum(longest, 2 * xp.maximum(width, xp.abs(edges - centre)))
        length = xp.minimum(length, signs * (ends - edges))
        z = edges[..., None] + (signs * length)[..., None] * nodes
        # Every order of either function once, for all pairs of orders.
        mean, weighted = n[:, None] + slope[:, None] * z, weights * density(z)
        inner = {j: closed.mean(mean, left_over[:, None] + 0 * mean, j) for j in of_closed}
        outer = {i: weighted * part(m[:, None] + s[:, None] * z, i) for i in of_part}
        sums = xp.stack([xp.sum(outer[i] * inner[j], -1) for i, j in orders])
        return edges + signs * length, total + xp.sum(length * sums, 1)

    def unfinished(state: tuple[Real, Real]) -> Real:
        return xp.any(signs * (ends - state[0]) > 0)

    state = xp.stack([start, start]), xp.zeros((len(orders), 1), dtype) * rho
    if xp is np:
        while unfinished(state):
            state = body(state)
    else:
        state = jax.lax.while_loop(unfinished, body, state)
    return list(state[1])


def _two_integrals(a, b, orders, m, s, n, t, rho, gap):
    """Trapezoidal sums over u = m + s x and, given x, over v = n + t (rho x + sqrt(1 - rho^2) y).

    As a function of x the inner sum is analytic within strip_b / |t rho|, the outer factor within
    strip_a / s, so every direction has a step of its own and either sum ends with its remainder.
    """
    xp, dtype = library(rho), rho.dtype
    tiny = smallest(dtype)
    low, high = span(a, m, s, _REACH)
    slope, spread = t * rho, t * xp.sqrt(gap * (2 - gap))
    distance = xp.minimum(a.strip / xp.maximum(s, tiny), b.strip / xp.maximum(xp.abs(slope), tiny))
    step = trapezoidal_step(distance, derivatives=max(i + j for i, j in orders))
    inner_step = trapezoidal_step(
        b.strip / xp.maximum(spread, tiny), derivatives=max(j for _, j in orders)
    )
    low, high, step, inner_step = not_differentiated((low, high, step, inner_step))
    # nodes at once: all that fit beside each other in NumPy, few in a compiled loop
    rows, columns = (1, 8) if xp is jnp else (max(1, min(128, 4096 // max(1, len(rho)))), 16)
    ahead, together = xp.arange(rows, dtype=dtype), xp.arange(columns, dtype=dtype)
    # Every order of either function once, for all pairs of orders.
    of_a, of_b = (sorted({order[n] for order in orders}) for n in (0, 1))

    def outer(turn: Any, total: Real) -> Real:
        x = low[:, None] + (rows * turn + ahead) * step[:, None]
        mean = n[:, None] + slope[:, None] * x
        first, last = span(b, mean, spread[:, None], _REACH)
        count = (nodes_of(b, (last - first) / inner_step[:, None], _MOST_NODES) - 1) // columns + 1

        def inner(turn: Any, part: Real) -> Real:
            # Axes are (pairs, nodes of x, nodes of y).
            y = first[..., None] + (columns * turn + together) * inner_step[:, None, None]
            v = mean[..., None] + spread[:, None, None] * y
            weight = xp.where(y > last[..., None], 0.0, density(y))
            return part + xp.stack([xp.sum(weight * b(v, j), 2) for j in of_b])

        integrals = repeat(count, inner, xp.zeros((len(of_b), 1, 1), dtype) * mean)
        inside = dict(zip(of_b, integrals, strict=True))
        weight = xp.where(x > high[:, None], 0.0, density(x))
        outside = {i: weight * a(m[:, None] + s[:, None] * x, i) for i in of_a}
        return total + xp.stack([xp.sum(outside[i] * inside[j], 1) for i, j in orders])

    # Steps are common to all nodes of a sum, so they multiply the total once.
    count = (nodes_of(a, (high - low) / step, _MOST_NODES) - 1) // rows + 1
    zeros = xp.zeros((len(orders), 1), dtype) * rho
    return list(repeat(count, outer, zeros) * step * inner_step)


def _two_integrals_by_scale(a, b, orders, m, s, n, t, rho, gap):
    """The sums of `_two_integrals`, the variable of larger scale outside.

    Given the wider variable, the narrower one moves little. The other way round the inner sum would
    turn within 1 / |t rho|, and the outer one need as many nodes.
    """
    wide = s >= t
    totals = np.zeros((len(orders), *rho.shape))
    exchanged = tuple((j, i) for i, j in orders)
    for chosen, flip in ((wide, False), (~wide, True)):
        if chosen.any():
            u, v = (m[chosen], s[chosen]), (n[chosen], t[chosen])
            # Exchanging u and v exchanges parts, derivatives, means and deviations; the correlation
            # is symmetric.
            both = (b, a, exchanged, *v, *u) if flip else (a, b, orders, *u, *v)
            totals[:, chosen] = _two_integrals(*both, rho[chosen], gap[chosen])
    return list(totals)


def _beside_kink(gate: Gate, part: Any, orders: Orders, *law: Real) -> list[Real]:
    # Densities where a tail jumps stand with the gate beside it, see `pair_derivatives`.
    if isinstance(law[4], jax.Array) and not isinstance(part, Tail):
        return _traced(_kink_and_other, gate, part, orders, *law)
    return _kink_and_other(gate, part, orders, *law)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _traced(integrals, a, b, orders, *law):
    """Expectations whose slopes are those of the law of u and v, not of how they are computed."""
    return integrals(a, b, orders, *law)


@_traced.defjvp
def _traced_jvp(integrals_of, a, b, orders, primals, tangents):
    # All orders that the values and their slopes take, in one sum.
    every = tuple(sorted({(i + x, j + y) for i, j in orders for x, y in SLOPE_ORDERS}))
    integrals = dict(zip(every, _traced(integrals_of, a, b, every, *primals), strict=True))

    def slope(order: tuple[int, int]) -> Real:
        slopes = slopes_by_law(integrals, order, primals)
        return sum((x * y for x, y in zip(tangents, slopes, strict=False)), 0.0)

    return [integrals[order] for order in orders], [slope(order) for order in orders]


SLOPE_ORDERS = (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2)
"""Further derivatives of f and g that slopes of an expectation take, see `slopes_by_law`."""


def slopes_by_law(
    expected: dict[tuple[int, int], Any], order: tuple[int, int], law: Any
) -> list[Any]:
    """Slopes of an expected derivative by m, s, n, t and rho, by Price's theorem.

    dK/dm = E f' g, dK/ds = s E f'' g + rho t E f' g', dK/drho = s t E f' g'.

    Args:
        expected: E of derivatives of f(u) and g(v), by how often these are differentiated.
        order: How often f and g are differentiated in the expectation itself.
        law: Means and deviations of u and of v, correlations, and gaps.
    """
    _, s, _, t, rho, *_ = law
    i, j = order
    mixed = expected[i + 1, j + 1]
    by_s = s * expected[i + 2, j] + rho * t * mixed
    by_t = t * expected[i, j + 2] + rho * s * mixed
    return [expected[i + 1, j], by_s, expected[i, j + 1], by_t, s * t * mixed]
