"""Kernels of activations: K[i, j] = E f(u_i) g(v_j) for all pairs of hidden units of two layers.

Most pairs take Mehler's series sum_k c_k d_k rho^k up to an order at which what is left is certified
to be small; pairs of high correlation, such as a unit and its copy, are computed alone.

Sources: Cho & Saul, Kernel methods for deep learning (2009); Tsuchida et al., arXiv:1711.09090 and
arXiv:2002.08517, for kernels of ReLU, leaky ReLU and GELU; Kuang & Lin, arXiv:2601.22307.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tnsim.activations.activation import Activation, Gate, Remainder, activation
from tnsim.activations.coefficients import average, coefficients, polynomial_coefficients
from tnsim.activations.normal import Real
from tnsim.activations.pairs import pair_values
from tnsim.errors import ModelError

ORDER = 64
"""Highest order of the series; pairs that need more are computed alone."""
_TURN = 8
_BLOCK = 2**20
_CHUNK = 1024
_GROUP = 64


class Units(NamedTuple):
    """The inputs of hidden units under a normal law of the layer's input.

    For x ~ N(mean, L L^T) and u = W x + b: means W mean + b, rows W L. Units of two layers have the
    covariance rows @ rows'.T, so both are given in the coordinates of one L.

    Args:
        mean: Mean of every unit's input, shape (units,).
        rows: Row of every unit, shape (units, rank); an input without randomness has rank 0 or
            zero rows.
    """

    mean: Float[Array, "units"]
    rows: Float[Array, "units rank"]


@dataclass(frozen=True)
class Kernel:
    """A matrix of E f(u_i) g(v_j) with the certified bound of what its series leave out.

    Args:
        values: The matrix, shape (units of f, units of g).
        sizes: sqrt(E f(u_i)^2), shape (units of f,).
        other_sizes: sqrt(E g(v_j)^2), shape (units of g,).
        share: Number such that entry (i, j) is off by no more than share * sizes[i] *
            other_sizes[j], beside rounding.
    """

    values: Float[Array, "m n"]
    sizes: Float[Array, "m"]
    other_sizes: Float[Array, "n"]
    share: Float[Array, ""]

    @property
    def bound(self) -> Float[Array, "m n"]:
        """Bound of the truncation error, entry by entry."""
        return self.share * self.sizes[:, None] * self.other_sizes


def kernel(f: str | Activation, g: str | Activation, units: Units, other_units: Units) -> Kernel:
    """E f(u_i) g(v_j) for all pairs of hidden units, exact to rounding.

    Args:
        f: Activation of the first layer, or its name.
        g: Activation of the second layer.
        units: Inputs of the first layer's units.
        other_units: Inputs of the second layer's units, in the same coordinates.

    Returns:
        The matrix with a certified bound, in JAX; in float64 where the units are NumPy arrays, else
        in their dtype. It is differentiable in means and rows, under `jit` as well.

    Raises:
        ModelError: The units' coordinates differ in number, or an activation is unknown.

    Example:
        >>> units = Units(np.zeros(2), np.eye(2))
        >>> np.asarray(kernel("relu", "relu", units, units).values).round(4).tolist()
        [[0.5, 0.1592], [0.1592, 0.5]]
    """
    f, g = activation(f), activation(g)
    if units.rows.shape[1] != other_units.rows.shape[1]:
        raise ModelError(
            "units of both layers have rows in the coordinates of one input, found "
            f"{units.rows.shape[1]} and {other_units.rows.shape[1]} coordinates"
        )
    if all(isinstance(x, np.ndarray) for x in (*units, *other_units)):
        with jax.enable_x64(True):
            return kernel(f, g, *(Units(*map(jnp.asarray, x)) for x in (units, other_units)))
    deviation, unit = directions(units.rows)
    other_deviation, other_unit = directions(other_units.rows)
    rho = jnp.clip(jnp.matmul(unit, other_unit.T, precision="highest"), -1.0, 1.0)
    values, *rest = _values(
        f, g, units.mean, deviation, other_units.mean, other_deviation, rho, unit, other_unit
    )
    return Kernel(values, *map(jax.lax.stop_gradient, rest))


def first_moments(f: str | Activation, units: Units) -> tuple[Real, Real]:
    """E f(u_i) and E f'(u_i) of every unit.

    The latter gives all that crosses with linear maps (Stein's lemma): for v jointly normal with u_i,
    E f(u_i) v = E f(u_i) E v + E f'(u_i) cov(u_i, v), so E f(u_i) (x - mean) = E f'(u_i) L rows[i].

    Args:
        f: Activation, or its name.
        units: Inputs of the units.

    Returns:
        Two arrays of shape (units,), differentiable, in the dtype that `kernel` has.

    Example:
        >>> mean, slope = first_moments("square", Units(np.array([3.0]), np.array([[2.0]])))
        >>> float(mean[0]), float(slope[0])
        (13.0, 6.0)
    """
    f = activation(f)
    if all(isinstance(x, np.ndarray) for x in units):
        with jax.enable_x64(True):
            return first_moments(f, Units(*map(jnp.asarray, units)))
    deviation, _ = directions(units.rows)
    return jax.jvp(
        lambda mean: average(f, mean, deviation), (units.mean,), (jnp.ones_like(units.mean),)
    )


def directions(rows: Float[Array, "units rank"]) -> tuple[Real, Real]:
    """Lengths of rows and rows of length 1, with gradients; rows of length 0 stay as they are."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(rows), axis=1, initial=0.0))
    scale = jnp.where(largest > 0, largest, 1.0)[:, None]
    rows = rows / scale
    square = jnp.sum(jnp.square(rows), 1)
    length = jnp.sqrt(jnp.where(square > 0, square, 1.0))
    return jnp.where(square > 0, length, 0.0) * scale[:, 0], rows / length[:, None]


class _Series(NamedTuple):
    """What the units of one layer bring to a series; tables are for values and derivatives."""

    mean: Real
    deviation: Real
    tables: Real  # (kinds, orders, units): of f, and of its derivatives by mean and deviation
    polynomial: Real  # the same of the polynomial beside the parts
    rest: Real  # (orders / 8, units): sqrt(E f^2 - sum of c_k^2) after 8, 16, ... orders
    size: Real


def _prepared(f: Activation, mean: Real, deviation: Real, derivatives: bool) -> _Series:
    """Coefficients for values and derivatives, norms, and what is left of norms after each turn."""
    c = coefficients(f, mean, deviation, ORDER)
    exact = jnp.zeros_like(c)
    exact = exact.at[: len(f.polynomial)].set(
        polynomial_coefficients(f.polynomial, mean, deviation)
    )
    tables = [c[None], exact[None]]
    if derivatives:
        alone = Activation(pieces=(f.polynomial,))
        tables = [_with_derivatives(x, mean, deviation) for x in (f, alone)]
    ones = jnp.ones_like(mean)
    energy = pair_values(f, f, mean, deviation, mean, deviation, ones, 0 * ones)
    energy = energy + jnp.sum(exact * (2 * c - exact), 0)
    known = jnp.cumsum(jnp.square(c), 0)
    energy = jnp.maximum(energy, known[-1])
    if f.is_polynomial:  # its series ends: no rounding stays behind
        ends = jnp.arange(ORDER + 1) < len(f.polynomial) - 1
        left = jnp.maximum(known[-1] - known, 0) * ends[:, None]
    else:
        left = jnp.maximum(energy - known, 0) + 4 * float(jnp.finfo(c.dtype).eps) * energy
    left = left[_TURN::_TURN]
    return _Series(mean, deviation, *tables, jnp.sqrt(left), jnp.sqrt(energy))


def _with_derivatives(f: Activation, mean: Real, deviation: Real) -> Real:
    """Coefficients of f, of df/dm = f', of df/ds = z f', and of s f': dK/drho = s t E f' g' (Price).

    z h_k = sqrt(k+1) h_(k+1) + sqrt k h_(k-1); f' is differentiated, not divided by s, which may vanish.
    """
    at = partial(coefficients, f, deviation=deviation, order=ORDER + 1)
    c, slope = jax.jvp(at, (mean,), (jnp.ones_like(mean),))
    k = jnp.arange(1, ORDER + 2, dtype=c.dtype)[:, None]
    spread = (jnp.sqrt(k) * slope[1:]).at[1:].add(jnp.sqrt(k[:-1]) * slope[:-2])
    return jnp.stack([c[:-1], slope[:-1], spread, deviation * slope[:-1]])


_PAIRINGS = ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (3, 3))
"""Kinds of coefficients of f and g in the value and in its derivatives by m, s, n, t and rho."""


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _values(f, g, m, s, n, t, rho, unit, other_unit):
    values, *rest = _blocks(f, g, False, m, s, n, t, rho, unit, other_unit)
    return values[0], *rest


@_values.defjvp
def _values_jvp(f, g, primals, tangents):
    """Partial derivatives are kernels too (Price's theorem): of f' and g, f and g', f' and g'."""
    values, *rest = _blocks(f, g, True, *primals)
    value, by_m, by_s, by_n, by_t, by_rho = values
    m, s, n, t, rho, *_ = tangents
    zero = jnp.zeros_like(value)
    change = zero
    for tangent, factor in ((m, by_m), (s, by_s)):
        change = change + factor * tangent[:, None]
    for tangent, factor in ((n, by_n), (t, by_t)):
        change = change + factor * tangent
    change = change + by_rho * rho
    return (value, *rest), (change, *map(jnp.zeros_like, rest))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _blocks(f, g, derivatives, m, s, n, t, rho, unit, other_unit):
    """All pairs in blocks of rows: values first, partial derivatives after them."""
    rows, columns = rho.shape
    block = max(1, min(rows, _BLOCK // max(columns, 1)))
    count = -(-rows // block)
    first, second = (
        _prepared(f, m, s, derivatives),
        _prepared(g, n, t, derivatives),
    )
    lead = {"tables": 2, "polynomial": 2, "rest": 1}

    def split(x: Real, axis: int) -> Real:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, count * block - rows)
        x = jnp.pad(x, width)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)

    parts = _Series(*(split(x, lead.get(name, 0)) for name, x in first._asdict().items()))
    compute = partial(_block, f, g, derivatives, other_unit, second)
    values, share = jax.lax.map(compute, (parts, split(rho, 0), split(unit, 0)))
    values = jnp.moveaxis(values, 0, 1).reshape(values.shape[1], count * block, columns)[:, :rows]
    return values, first.size, second.size, jnp.max(share, initial=0.0)


def _block(f, g, derivatives, other_unit, second, argument):
    """One block of rows: the series to the order that repays itself, the remaining pairs alone."""
    first, rho, unit = argument
    kinds = _PAIRINGS if derivatives else _PAIRINGS[:1]
    tolerance = 4 * float(jnp.finfo(rho.dtype).eps)
    scale = first.size[:, None] * second.size
    dear = _cost(f, g)

    def term(k: Any, power: Real) -> Real:
        left, right = (
            jax.lax.dynamic_index_in_dim(x.tables, k, 1, keepdims=False) for x in (first, second)
        )
        return jnp.stack([left[a][:, None] * right[b] * power for a, b in kinds])

    def orders(state: tuple[Any, Real, Real, Real, Any]) -> tuple[Any, Real, Real, Real, Any]:
        turn, power, total, _, _ = state
        for i in range(_TURN):
            power = power * rho
            total = total + term(_TURN * turn + i + 1, power)
        left, right = (
            jax.lax.dynamic_index_in_dim(x.rest, turn, 0, keepdims=False) for x in (first, second)
        )
        tail = jnp.abs(power * rho) * left[:, None] * right
        return turn + 1, power, total, tail, jnp.sum(tail > tolerance * scale)

    def repays(state: tuple[Any, Real, Real, Real, Any]) -> Real:
        turn, _, _, _, count = state
        return (turn < ORDER // _TURN) & (count * dear > _TURN * rho.size)

    one = jnp.ones_like(rho)
    start = orders((jnp.asarray(0), one, term(0, one), one, jnp.asarray(0)))
    _, _, total, tail, count = jax.lax.while_loop(repays, orders, start)
    left_over = tail > tolerance * scale
    share = tail / jnp.where(scale > 0, scale, 1.0)
    share = jnp.max(jnp.where(left_over, 0.0, share), initial=0.0)
    if f.is_polynomial or g.is_polynomial:  # a finite sum
        return total, share
    chunk = min(_CHUNK, rho.size)
    groups = jnp.pad(left_over.ravel(), (0, -rho.size % _GROUP)).reshape(-1, _GROUP)
    ends = jnp.cumsum(jnp.sum(groups, 1))

    def alone(state: tuple[Any, Real]) -> tuple[Any, Real]:
        begin, total = state
        place, found = _selected(groups, ends, begin + jnp.arange(chunk))
        i, j = place // rho.shape[1], place % rho.shape[1]
        near, gap = _gaps(rho[i, j], unit, other_unit, i, j)
        arguments = first.mean[i], first.deviation[i], second.mean[j], second.deviation[j], near
        values = _direct(f, g, arguments, gap, derivatives)
        values = values + _with_polynomials(first, second, i, j, near, kinds, f, g)
        i = jnp.where(found, i, rho.shape[0])  # beyond the last row: dropped
        return begin + chunk, total.at[:, i, j].set(values, mode="drop")

    total = jax.lax.while_loop(lambda state: state[0] < count, alone, (jnp.asarray(0), total))[1]
    return total, share


def _cost(f: Activation, g: Activation) -> float:
    """What a pair alone costs, in orders of the series for a pair."""
    cost = 0.0
    for a in f.parts:
        for b in g.parts:
            closed = isinstance(a, Gate) and isinstance(b, Gate)
            cost += (
                400
                if closed
                else 2e4
                if isinstance(a, Remainder) and isinstance(b, Remainder)
                else 4e3
            )
    return cost


def _selected(groups: Array, ends: Array, ranks: Array) -> tuple[Array, Array]:
    """Flat places of the pairs with the given ranks among those marked, and whether they exist.

    Two levels, counts of groups and marks within a group, so that nothing runs over all pairs.
    """
    group = jnp.minimum(jnp.searchsorted(ends, ranks, side="right"), len(ends) - 1)
    marks = groups[group]
    before = ends[group] - jnp.sum(marks, 1)
    within = jnp.argmax(jnp.cumsum(marks, 1) > (ranks - before)[:, None], 1)
    found = ranks < ends[-1]
    return jnp.where(found, group * _GROUP + within, 0), found


def _gaps(rho: Real, unit: Real, other_unit: Real, i: Array, j: Array) -> tuple[Real, Real]:
    """Correlations and 1 - |rho|, the latter as |e -+ e'|^2 / 2 of unit rows where they are close.

    1 - rho^2 computed from rho near 1 keeps 1e-16 absolute, so the angle 1e-8; the distance of two rows keeps
    all digits, and is zero for equal rows.
    """
    gap = 1 - jnp.abs(rho)
    sign = jnp.where(rho < 0, -1.0, 1.0)

    def distances() -> Real:
        difference = unit[i] - sign[:, None] * other_unit[j]
        return 0.5 * jnp.sum(jnp.square(difference), 1)

    close = gap < 0.01
    exact = jax.lax.cond(jnp.any(close), distances, lambda: gap)
    alive = jnp.any(unit[i] != 0, 1) & jnp.any(other_unit[j] != 0, 1)
    gap = jnp.where(close & alive, exact, gap)
    return jnp.where(close & alive, sign * (1 - gap), rho), gap


def _direct(
    f: Activation, g: Activation, arguments: tuple[Real, ...], gap: Real, derivatives: bool
) -> Real:
    """Values without polynomials, and partial derivatives by m, s, n, t and rho."""
    values = pair_values(f, g, *arguments, gap)
    if not derivatives:
        return values[None]
    # a step's kernel has the slope 1 / sqrt(1 - rho^2): at rho = 1, where rho does not move, it is
    # cut off at rounding, so that zero times the slope is zero
    sign = jnp.where(arguments[4] < 0, -1.0, 1.0)
    floor = jnp.maximum(gap, float(jnp.finfo(gap.dtype).eps))

    def values_at(*moved: Real) -> Real:
        return pair_values(f, g, *moved, floor - sign * (moved[4] - arguments[4]))

    def slope(direction: Real) -> Real:
        tangents = tuple(x * jnp.ones_like(gap) for x in direction)
        return jax.jvp(values_at, arguments, tangents)[1]

    slopes = jax.vmap(slope)(jnp.eye(5, dtype=gap.dtype))
    return jnp.concatenate([values[None], slopes])


def _with_polynomials(first, second, i, j, rho, kinds, f, g):
    """E f g less E of the parts alone: finite sums, as a polynomial is of finite order."""
    most = max(len(f.polynomial), len(g.polynomial))
    if not any(f.polynomial) and not any(g.polynomial):
        return 0.0
    (c, p), (d, q) = (
        (x.tables[:, :most, index], x.polynomial[:, :most, index])
        for x, index in ((first, i), (second, j))
    )
    powers = jnp.cumprod(jnp.stack([jnp.ones_like(rho), *[rho] * (most - 1)]), 0)
    return jnp.stack([jnp.sum((p[a] * d[b] + (c[a] - p[a]) * q[b]) * powers, 0) for a, b in kinds])
