"""Kernels of activations: K[i, j] = E f(u_i) g(v_j) for all pairs of hidden units of two layers.

Most pairs take Mehler's series sum_k c_k d_k rho^k up to an order at which the rest is certified to
be small; pairs of high correlation, such as a unit and its copy, are computed alone.

Sources: Cho & Saul, Kernel methods for deep learning (2009); Tsuchida et al., arXiv:1711.09090 and
arXiv:2002.08517, for kernels of ReLU, leaky ReLU and GELU; Kuang & Lin, arXiv:2601.22307.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tnsim.activations.activation import Activation, Gate, Remainder, activation
from tnsim.activations.coefficients import average, coefficients, norms
from tnsim.activations.normal import Real
from tnsim.activations.pairs import pair_values
from tnsim.errors import ModelError

ORDER = 64
"""Highest order of the series; pairs that need more are computed alone."""
_TURN = 8  # orders between two looks at what is left
_BLOCK = 2**18  # pairs of a block
_CHUNK = 1024  # pairs alone at once
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

    Where kinks of an activation cancel, as those of hardtanh do at large inputs, the bound covers
    rounding as well.

    Args:
        values: The matrix, shape (units of f, units of g).
        sizes: sqrt(E f(u_i)^2), shape (units of f,).
        other_sizes: sqrt(E g(v_j)^2), shape (units of g,).
        share: Number such that entry (i, j) is off by no more than share * sizes[i] *
            other_sizes[j], beside rounding.
    """

    values: Float[Array | np.ndarray, "m n"]
    sizes: Float[Array | np.ndarray, "m"]
    other_sizes: Float[Array | np.ndarray, "n"]
    share: Float[Array | np.ndarray, ""]

    @property
    def bound(self) -> Float[Array | np.ndarray, "m n"]:
        """Bound of the error of truncation and of cancelling kinks, entry by entry."""
        return self.share * self.sizes[:, None] * self.other_sizes

    def to_numpy(self) -> Kernel:
        """The same arrays in NumPy, so that none lose digits outside of `jax.enable_x64`."""
        arrays = self.values, self.sizes, self.other_sizes, self.share
        return Kernel(*map(np.asarray, arrays))


def kernel(f: str | Activation, g: str | Activation, units: Units, other_units: Units) -> Kernel:
    """E f(u_i) g(v_j) for all pairs of hidden units, exact to rounding.

    Args:
        f: Activation of the first layer, or its name.
        g: Activation of the second layer.
        units: Inputs of the first layer's units.
        other_units: Inputs of the second layer's units, in the same coordinates.

    Returns:
        The matrix with a certified bound: for units in NumPy in NumPy and in float64, else in JAX
        and in their dtype, differentiable in means and rows, under `jit` as well.

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
            found = kernel(f, g, *(Units(*map(jnp.asarray, x)) for x in (units, other_units)))
            return found.to_numpy()
    deviation, unit = directions(units.rows)
    other_deviation, other_unit = directions(other_units.rows)
    rho = correlations(unit, other_unit)
    pairing = Plain(f, g)
    left, right = (units.mean, deviation), (other_units.mean, other_deviation)
    return matrix(pairing, left, right, (rho,), unit, other_unit)


def first_moments(f: str | Activation, units: Units) -> tuple[Real | np.ndarray, Real | np.ndarray]:
    """E f(u_i) and E f'(u_i) of every unit.

    The latter gives all that crosses with linear maps (Stein's lemma): E f(u_i) v =
    E f(u_i) E v + E f'(u_i) cov(u_i, v) for v jointly normal with u_i, so
    E f(u_i) (x - mean) = E f'(u_i) L rows[i].

    Args:
        f: Activation, or its name.
        units: Inputs of the units.

    Returns:
        Two arrays of shape (units,), differentiable, in the library and dtype that `kernel` has.

    Example:
        >>> mean, slope = first_moments("square", Units(np.array([3.0]), np.array([[2.0]])))
        >>> float(mean[0]), float(slope[0])
        (13.0, 6.0)
    """
    f = activation(f)
    if all(isinstance(x, np.ndarray) for x in units):
        with jax.enable_x64(True):
            mean, slope = first_moments(f, Units(*map(jnp.asarray, units)))
            return np.asarray(mean), np.asarray(slope)
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


@jax.jit
def correlations(unit: Float[Array, "m rank"], other_unit: Float[Array, "n rank"]) -> Real:
    """Products of rows of length 1, never beyond 1 by rounding."""
    return jnp.clip(jnp.matmul(unit, other_unit.T, precision="highest"), -1.0, 1.0)


class Side(NamedTuple):
    """What the units of one layer bring to a kernel, one unit in each entry of the last axis."""

    parameters: tuple[Real, ...]  # mean, deviation, and what a pairing has besides
    tables: Real  # (kinds, fields, orders, units): of the value, and of slopes by each parameter
    rest: Real  # (fields, turns, units): norms of what is left after 8, 16, ... orders
    size: Real  # sqrt(E (f w)^2)
    gross: Real  # the same of the parts of f, added up: relative to this values are rounded


class Pairing(Protocol):
    """Units of two kinds, and how their kernel is made of Hermite coefficients."""

    f: Activation
    g: Activation

    def sides(self, left: Any, right: Any, slopes: bool) -> tuple[Side, Side]:
        """Coefficients and norms of both layers' units."""
        ...

    def form(self, left: Real, right: Real, cross: tuple[Real, ...]) -> Real:
        """The sum over pairs of fields that stands at one order of the series."""
        ...

    def alone(self, left: Any, right: Any, rho: Real, gap: Real, cross: tuple[Real, ...]) -> Real:
        """The kernel of single pairs without a series."""
        ...


@dataclass(frozen=True)
class Plain:
    """E f(u) g(v): one field, the coefficients of f."""

    f: Activation
    g: Activation

    def sides(self, left: Any, right: Any, slopes: bool) -> tuple[Side, Side]:
        (m, s), (n, t) = left, right
        return _side(self.f, m, s, slopes), _side(self.g, n, t, slopes)

    def form(self, left: Real, right: Real, cross: tuple[Real, ...]) -> Real:
        return left[0] * right[0]

    def alone(self, left: Any, right: Any, rho: Real, gap: Real, cross: tuple[Real, ...]) -> Real:
        (m, s), (n, t) = left, right
        return pair_values(self.f, self.g, m, s, n, t, rho, gap)


def _side(f: Activation, mean: Real, deviation: Real, slopes: bool) -> Side:
    c, c_slope = hermite(f, mean, deviation, ORDER + 1)
    kinds = [c[:-1]]
    if slopes:
        kinds += [c_slope[:-1], times_z(c_slope)[:-1]]

    def energy_of(part: Activation) -> Real:
        return norms(part, mean, deviation, lambda value, slope, z: [value**2])[0]

    energy = energy_of(f)
    size = jnp.sqrt(energy)
    return Side(
        (mean, deviation),
        jnp.stack(kinds)[:, None],
        left_over(f, c[:-1], energy)[None],
        size,
        gross_size(f, size, lambda part: jnp.sqrt(energy_of(part))),
    )


def cancels(f: Activation) -> bool:
    """Whether parts are larger than the activation: hardtanh is u - u far out, bounded by 1."""
    return sum(isinstance(x, Gate) and x.width == 0 for x in f.parts) > 1


def gross_size(f: Activation, size: Real, size_of: Callable[[Activation], Real]) -> Real:
    """Sizes of the parts added up where several kinks cancel, else the size.

    A kernel is a sum over pairs of parts, of which each is at most the product of their sizes
    (Cauchy-Schwarz) and is rounded to a few eps of that. At s = t = 48 hardtanh has gross sizes of
    70 beside a size of 1, so that eps = 2.2e-16 becomes 1e-12; 24 digits show 2.5e-13.

    Args:
        f: Activation.
        size: Sizes of the whole.
        size_of: Function of a part to its sizes.
    """
    if not cancels(f):
        return size
    return sum((size_of(Activation(parts=(part,))) for part in f.parts), jnp.zeros_like(size))


def hermite(f: Activation, mean: Real, deviation: Real, order: int) -> tuple[Real, Real]:
    """Coefficients of f and of f', the latter not divided by the deviation, which may vanish."""
    at = partial(coefficients, f, deviation=deviation, order=order)
    return jax.jvp(at, (mean,), (jnp.ones_like(mean),))


def times_z(c: Real) -> Real:
    """Coefficients of z f: z h_k = sqrt(k+1) h_(k+1) + sqrt k h_(k-1); the last order is short."""
    k = jnp.arange(1, len(c), dtype=c.dtype)[:, None]
    shifted = jnp.zeros_like(c).at[1:].set(jnp.sqrt(k) * c[:-1])
    return shifted.at[:-1].add(jnp.sqrt(k) * c[1:])


def left_over(f: Activation, c: Real, energy: Real, degree: int = 0) -> Real:
    """sqrt(E f^2 - sum of c_k^2 so far) after each turn, never below its rounding.

    Cauchy-Schwarz makes it a bound: |sum_(k>K) c_k d_k rho^k| <= |rho|^(K+1) r_K r'_K. The rounding
    of the difference is 1e-16 of E f^2; two such roots multiply to 1e-16 of the norms.

    Args:
        f: Activation.
        c: Coefficients by order.
        energy: E f^2 of every unit.
        degree: Degree by which a factor raises that of f.
    """
    known = jnp.cumsum(jnp.square(c), 0)
    if f.is_polynomial:  # its series ends, and leaves nothing behind
        sizes = [len(part.weights) for part in f.parts if isinstance(part, Gate)]  # all of them
        most = max(sizes) - 1 + degree
        left = jnp.maximum(known[-1] - known, 0) * (jnp.arange(len(c)) < most)[:, None]
    else:
        rounding = 4 * float(jnp.finfo(c.dtype).eps)
        left = jnp.maximum(energy - known, 0) + rounding * jnp.maximum(energy, known[-1])
    return jnp.sqrt(left[_TURN::_TURN])


def matrix(
    pairing: Any,
    left: tuple[Real, ...],
    right: tuple[Real, ...],
    cross: tuple[Real, ...],
    unit: Float[Array, "m rank"],
    other_unit: Float[Array, "n rank"],
) -> Kernel:
    """The kernel of all pairs of units, differentiable in all but the last two arguments.

    Args:
        pairing: The activations, and what stands beside them.
        left: Means, deviations and further parameters of the first layer's units.
        right: The same of the second layer's units.
        cross: Matrices over pairs: correlations, and what the pairing has besides.
        unit: Rows of length 1 of the first layer's units.
        other_unit: Rows of length 1 of the second layer's units.
    """
    values, *rest = _values(pairing, left, right, cross, unit, other_unit)
    return Kernel(values, *map(jax.lax.stop_gradient, rest))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values(pairing, left, right, cross, unit, other_unit):
    values, *rest = _blocks(pairing, False, left, right, cross, unit, other_unit)
    return values[0], *rest


@_values.defjvp
def _values_jvp(pairing, primals, tangents):
    (value, *slopes), *rest = _blocks(pairing, True, *primals)
    left, right, cross, *_ = tangents
    changes = [*(x[:, None] for x in left), *(x[None, :] for x in right), *cross]
    change = sum(x * y for x, y in zip(slopes, changes, strict=True))
    return (value, *rest), (change, *map(jnp.zeros_like, rest))


@partial(jax.jit, static_argnums=(0, 1))
def _blocks(pairing, slopes, left, right, cross, unit, other_unit):
    """All pairs in blocks of rows: values first, after them slopes by left, right and cross."""
    rows, columns = cross[0].shape
    count = -(-rows // max(1, min(rows, _BLOCK // max(columns, 1))))
    block = -(-rows // count)
    first, second = pairing.sides(left, right, slopes)

    def split(x: Real, axis: int) -> Real:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, count * block - rows)
        x = jnp.pad(x, width) if count * block > rows else x
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)

    sides = jax.tree.map(lambda x: split(x, x.ndim - 1), first)
    arguments = sides, tuple(split(x, 0) for x in cross), split(unit, 0)
    values, share = jax.lax.map(partial(_block, pairing, slopes, other_unit, second), arguments)
    values = tuple(x.reshape(count * block, columns)[:rows] for x in values)
    return values, first.size, second.size, jnp.max(share, initial=0.0)


def _block(pairing, slopes, other_unit, second, argument):
    """One block of rows: the series to the order that repays itself, the remaining pairs alone."""
    first, cross, unit = argument
    rho, *others = cross
    tolerance = 4 * float(jnp.finfo(rho.dtype).eps)
    scale = first.size[:, None] * second.size
    dear = _cost(pairing.f, pairing.g)
    parameters = len(first.parameters)

    def form(left: Real, right: Real) -> Real:
        return pairing.form(left[:, :, None], right[:, None, :], cross)

    def term(k: Any, power: Real, before: Real) -> Real:
        """Order k of the series and of its slopes, given rho^k and rho^(k-1)."""
        left, right = (
            jax.lax.dynamic_index_in_dim(x.tables, k, 2, keepdims=False) for x in (first, second)
        )
        values = [form(left[0], right[0]) * power]
        if slopes:
            values += [form(left[i + 1], right[0]) * power for i in range(parameters)]
            values += [form(left[0], right[i + 1]) * power for i in range(parameters)]
            values.append(k * form(left[0], right[0]) * before)
            for i in range(len(others)):
                tangents = tuple(jnp.full_like(rho, i == j) for j in range(len(others)))
                moved = jax.jvp(
                    lambda *x: pairing.form(left[0][:, :, None], right[0][:, None], (rho, *x)),
                    tuple(others),
                    tangents,
                )[1]
                values.append(moved * power)
        return jnp.stack(values)

    def orders(state: tuple[Any, Real, Real, Real, Any]) -> tuple[Any, Real, Real, Real, Any]:
        turn, before, total, _, _ = state
        for i in range(_TURN):
            power = before * rho
            total = total + term(_TURN * turn + i + 1, power, before)
            before = power
        left, right = (
            jax.lax.dynamic_index_in_dim(x.rest, turn, 1, keepdims=False) for x in (first, second)
        )
        sizes = tuple(jnp.abs(x) for x in cross)
        tail = jnp.abs(before * rho) * pairing.form(left[:, :, None], right[:, None, :], sizes)
        return turn + 1, before, total, tail, jnp.sum(tail > tolerance * scale)

    def repays(state: tuple[Any, Real, Real, Real, Any]) -> Real:
        turn, _, _, _, count = state
        return (turn < ORDER // _TURN) & (count * dear > _TURN * rho.size)

    one = jnp.ones_like(rho)
    start = orders((jnp.asarray(0), one, term(0, one, one), one, jnp.asarray(0)))
    _, _, total, tail, count = jax.lax.while_loop(repays, orders, start)
    marked = tail > tolerance * scale
    share = tail / jnp.where(scale > 0, scale, 1.0)
    share = jnp.max(jnp.where(marked, 0.0, share), initial=0.0)
    if cancels(pairing.f) or cancels(pairing.g):
        rounding = tolerance * first.gross[:, None] * second.gross
        share += jnp.max(rounding / jnp.where(scale > 0, scale, 1.0), initial=0.0)
    if pairing.f.is_polynomial or pairing.g.is_polynomial:  # a finite sum
        return tuple(total), share
    chunk = min(_CHUNK, rho.size)
    groups = jnp.pad(marked.ravel(), (0, -rho.size % _GROUP)).reshape(-1, _GROUP)
    ends = jnp.cumsum(jnp.sum(groups, 1))

    def alone(state: tuple[Any, Real]) -> tuple[Any, Real]:
        begin, total = state
        place, found = _selected(groups, ends, begin + jnp.arange(chunk))
        i, j = place // rho.shape[1], place % rho.shape[1]
        near, gap = _gaps(rho[i, j], unit, other_unit, i, j)
        left, right = (
            tuple(x[index] for x in side.parameters) for side, index in ((first, i), (second, j))
        )
        values = _direct(pairing, left, right, near, gap, tuple(x[i, j] for x in others), slopes)
        i = jnp.where(found, i, rho.shape[0])  # beyond the last row: dropped
        return begin + chunk, total.at[:, i, j].set(values.astype(total.dtype), mode="drop")

    total = jax.lax.while_loop(lambda state: state[0] < count, alone, (jnp.asarray(0), total))[1]
    return tuple(total), share


def _cost(f: Activation, g: Activation) -> float:
    """What a pair alone costs, in orders of the series for a pair."""
    cost = 0.0
    for a, b in product(f.parts, g.parts):
        kinds = (
            sum(isinstance(x, Gate) for x in (a, b)),
            sum(isinstance(x, Remainder) for x in (a, b)),
        )
        cost += 400 if kinds[0] == 2 else 20_000 if kinds[1] == 2 else 4_000
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

    1 - rho^2 computed from rho near 1 keeps 1e-16 absolute, so the angle 1e-8. The distance of two
    rows keeps all digits, and is zero for equal rows.
    """
    gap = 1 - jnp.abs(rho)
    sign = jnp.where(rho < 0, -1.0, 1.0)

    def distances() -> Real:
        difference = unit[i] - sign[:, None] * other_unit[j]
        return 0.5 * jnp.sum(jnp.square(difference), 1)

    close = gap < 0.01
    exact = jax.lax.cond(jnp.any(close), distances, lambda: gap)
    close &= jnp.any(unit[i] != 0, 1) & jnp.any(other_unit[j] != 0, 1)
    gap = jnp.where(close, exact, gap)
    return jnp.where(close, sign * (1 - gap), rho), gap


def _direct(pairing, left, right, rho, gap, others, slopes):
    """Values of pairs alone, and their slopes by left, right and cross parameters."""
    values = pairing.alone(left, right, rho, gap, others)
    if not slopes:
        return values[None]
    # a step's kernel has the slope 1 / sqrt(1 - rho^2): at rho = 1, where rho does not move, it is
    # cut off at rounding, so that zero times the slope is zero
    sign = jnp.where(rho < 0, -1.0, 1.0)
    floor = jnp.maximum(gap, float(jnp.finfo(gap.dtype).eps))
    arguments = (*left, *right, rho, *others)
    count = len(left)

    def values_at(*moved: Real) -> Real:
        moved_gap = floor - sign * (moved[2 * count] - rho)
        return pairing.alone(
            moved[:count],
            moved[count : 2 * count],
            moved[2 * count],
            moved_gap,
            moved[2 * count + 1 :],
        )

    def slope(direction: Real) -> Real:
        tangents = tuple(x * jnp.ones_like(gap) for x in direction)
        return jax.jvp(values_at, arguments, tangents)[1]

    every = jax.vmap(slope)(jnp.eye(len(arguments), dtype=gap.dtype))
    return jnp.concatenate([values[None], every])
