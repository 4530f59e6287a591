"""Kernels of activations: K[i, j] = E f(u_i) g(v_j) for all pairs of hidden units of two layers.

Most pairs take Mehler's series sum_k c_k d_k rho^k up to an order at which the rest is certified to
be small; pairs of high correlation, such as a unit and its copy, are computed alone.

Both libraries share the text of orders, series, marks and pairs alone. Numbers on the host take
NumPy (`_in_tiles`): tiles of pairs that stay in a core's cache, in threads, nothing to compile.
Traces and accelerators take one compiled program of JAX (`_in_blocks`), which has gradients.

Sources: Cho & Saul, Kernel methods for deep learning (2009); Tsuchida et al., arXiv:1711.09090 and
arXiv:2002.08517, for kernels of ReLU, leaky ReLU and GELU; Kuang & Lin, arXiv:2601.22307.

*Gated units*, f(u) w as in SwiGLU, GeGLU, ReGLU and bilinear layers, have four variables.

Let z be the standard normal variable of u = m + s z, and w = a + b z + e, e independent of z,

    phi(z) = f(u) (a + b z),    g12 = E e z',    g21 = E z e',    eps = E e e'.

Stein's lemma, used for e and e', leaves functions of z and z' (a prime is the other layer's unit):

    E f w f' w' = E phi phi' + g12 E f dphi'/dz' + g21 E dphi/dz f' + eps E f f'
                + g12 g21 E df/dz df'/dz'

Each of the five has a Mehler series, so a unit has four fields: coefficients c of f, p of phi, q of
dphi/dz, d of df/dz, and the rest of each field has its own norm, so the bound is certified as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from math import inf, sqrt
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from tnsim.activations.activation import Activation, Gate, Remainder, Tail, Wave, activation
from tnsim.activations.coefficients import (
    average,
    coefficients,
    energies,
    norms,
    times_z,
    with_coefficients_of_slope,
)
from tnsim.activations.normal import Real, repeat
from tnsim.activations.pairs import SLOPE_ORDERS, pair_derivatives, slopes_by_law
from tnsim.errors import ModelError, UnsupportedLayer
from tnsim.scaled import library, not_differentiated

ORDER = 64
"""Highest order of the series of all pairs; pairs that need more are computed alone."""
_LONG = 256
"""Highest order of the series of single pairs in NumPy, a hundred times cheaper than integrals."""
_ROUNDING = 32  # units in the last place of gross sizes, in which values are off
_TURN = 4  # orders between two norms of what is left
_BLOCK = 2**18  # numbers of an array over the pairs of a block in JAX
_CHUNK, _FEW = 1024, 64  # pairs alone at once, and a few of them
_GROUP = 64  # pairs of which the marked ones are counted together
_TILE = 2**14  # pairs of a tile in NumPy: a few arrays of 128 KiB
_STEP = 2.0**-100  # an imaginary step, far below the rounding of what it is added to
_SAMPLE = 2**15  # pairs that choose the order of the series of a block

DerivativeWeights = dict[tuple[int, int], Any]
"""Factors of the expected derivatives of f(u) and g(v), by how often each is differentiated."""
Cross: TypeAlias = tuple[Real, ...]
"""Matrices over pairs of units, or their entries at single pairs: correlations, and what a pairing
has besides."""
_Bounds: TypeAlias = tuple[Real, Real, Real, Real, Real]
"""What `Kernel` has between values and slopes."""
_Pairs: TypeAlias = tuple[tuple[Real, ...], tuple[Real, ...], Real, Cross]
"""Single pairs: parameters of the left and of the right units, correlations, and what the pairing
has besides, arrays over the pairs."""
Together = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""The results of independent tasks, in order."""


def in_turn(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of tasks that run one after another."""
    with np.errstate(all="ignore"):
        return [task() for task in tasks]


class NormalInputs(NamedTuple):
    """The inputs of hidden units under a normal law of the layer's input.

    For x ~ N(mean, L L^T) and u = W x + b: means W mean + b, rows W L. Units of two layers have the
    covariance rows @ rows'.T, so both are given in the coordinates of one L.

    Args:
        mean: Mean of every unit's input, shape (units,).
        rows: Row of every unit, shape (units, rank); an input without randomness has rank 0 or
            zero rows.
    """

    mean: Float[Any, "units"]
    rows: Float[Any, "units rank"]


def in_floats(units: NormalInputs) -> NormalInputs:
    """Units that are numbers in float64; arrays of JAX stay in the floats that they have."""
    return NormalInputs(*(x if isinstance(x, jax.Array) else np.asarray(x, float) for x in units))


class Kernel(NamedTuple):
    """A matrix of E f(u_i) g(v_j) with the certified bound of what its series leave out.

    Args:
        values: The matrix, shape (units of f, units of g).
        sizes: sqrt(E f(u_i)^2), shape (units of f,).
        other_sizes: sqrt(E g(v_j)^2), shape (units of g,).
        share: Number such that entry (i, j) is off by no more than share * gross[i] *
            other_gross[j], beside rounding.
        gross: Sizes relative to which values are rounded, shape (units of f,), see `gross_size`.
            Series end where they are that exact, as pairs computed alone are no better.
        other_gross: The same of g, shape (units of g,).
        slopes: Slopes of the matrix by the parameters of both sides and by the cross matrices, all
            in its shape, see `with_slopes`; None by parameters of units that do not move. Empty
            where no slope was asked for.
    """

    values: Float[Any, "m n"]
    sizes: Float[Any, "m"]
    other_sizes: Float[Any, "n"]
    share: Float[Any, ""]
    gross: Float[Any, "m"]
    other_gross: Float[Any, "n"]
    slopes: tuple[Float[Any, "m n"] | None, ...] = ()

    @property
    def bound(self) -> Float[Any, "m n"]:
        """Bound of the errors of truncation and of rounding, entry by entry."""
        rounding = _ROUNDING * float(np.finfo(self.values.dtype).eps)
        return (self.share + rounding) * self.gross[:, None] * self.other_gross


def kernel(
    f: str | Activation, g: str | Activation, units: NormalInputs, other_units: NormalInputs
) -> Kernel:
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
        >>> units = NormalInputs(np.zeros(2), np.eye(2))
        >>> np.asarray(kernel("relu", "relu", units, units).values).round(4).tolist()
        [[0.5, 0.1592], [0.1592, 0.5]]
    """
    if units.rows.shape[1] != other_units.rows.shape[1]:
        raise ModelError(
            "units of both layers have rows in the coordinates of one input, found "
            f"{units.rows.shape[1]} and {other_units.rows.shape[1]} coordinates"
        )
    first, second = expanded(f, units), expanded(g, other_units)
    return between(Pairing(first.f, second.f), first, second, in_turn)


def first_moments(
    f: str | Activation, units: NormalInputs
) -> tuple[Real | np.ndarray, Real | np.ndarray]:
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
        >>> mean, slope = first_moments("square", NormalInputs(np.array([3.0]), np.array([[2.0]])))
        >>> float(mean[0]), float(slope[0])
        (13.0, 6.0)
    """
    f, units = activation(f), in_floats(units)
    deviation, _ = lengths_and_directions(units.rows)
    with np.errstate(all="ignore"):
        mean, slope = (average(f, units.mean, deviation, order) for order in (0, 1))
    return mean, slope


def lengths_and_directions(rows: Float[Any, "units rank"]) -> tuple[Real, Real]:
    """Lengths of rows and rows of length 1, with gradients; rows of length 0 stay as they are."""
    xp = library(rows)
    # Rows are divided by their largest entry first, so that squares neither overflow nor vanish.
    # The divisor is a constant to derivatives, as the length does not depend on it.
    largest = not_differentiated(xp.max(abs(rows), axis=1, initial=0.0))
    scale = xp.where(largest > 0, largest, 1.0)[:, None]
    rows = rows / scale
    # A row of zeros has no direction, and the root has no slope there. Both `where`s are needed:
    # the inner one keeps the root away from zero, so that no derivative is infinite times zero.
    square = xp.sum(xp.square(rows), 1)
    length = xp.sqrt(xp.where(square > 0, square, 1.0))
    return xp.where(square > 0, length, 0.0) * scale[:, 0], rows / length[:, None]


def product_of_rows(rows: Real, others: Real) -> Real:
    """Products of rows with rows, in full precision on every device."""
    if library(rows, others) is np:
        return rows @ others.T
    return _compiled_product(rows, others)


@jax.jit
def _compiled_product(rows: Real, others: Real) -> Real:
    return jnp.matmul(rows, others.T, precision="highest")


def correlations(unit: Float[Any, "m rank"], other_unit: Float[Any, "n rank"]) -> Real:
    """Products of rows of length 1, never beyond 1 by rounding."""
    cosines = product_of_rows(unit, other_unit)
    return (
        cosines.clip(-1.0, 1.0, out=cosines)
        if isinstance(cosines, np.ndarray)
        else cosines.clip(-1, 1)
    )


class Side(NamedTuple):
    """What the units of one layer bring to a kernel, one unit in each entry of the last axis.

    Args:
        parameters: Mean, deviation, and what a pairing has besides.
        tables: Coefficients by order, of each field, (kinds, fields, orders, units): of the value,
            and of slopes by each parameter.
        rest: Norms of what is left after 4, 8, ... orders relative to `gross`, (fields, turns,
            units).
        size: Roots of E (f w)^2.
        gross: Sizes relative to which values are rounded, see `gross_size`.
    """

    parameters: tuple[Real, ...]
    tables: Real
    rest: Real
    size: Real
    gross: Real

    def part(self, *units: Any) -> Side:
        """Some of the units, by an index of their axis and new axes before or behind it."""
        parameters = tuple(x[units] for x in self.parameters)
        return Side(parameters, *(x[(..., *units)] for x in self[1:]))


class Tables(NamedTuple):
    """Coefficients by order of every field of some units.

    Args:
        kinds: Those that series read (see `at_rest`), and behind them their slopes by each
            parameter where these are wanted, (kinds, fields, orders, units).
        known: Those of the units as they are, (fields, orders, units).
    """

    kinds: Real
    known: Real


@dataclass(frozen=True)
class Pairing:
    """What stands at the pairs of units of two kinds of layers: of plain units E f(u) g(v).

    Args:
        f: Activation of the first layer.
        g: Activation of the second layer.
        centred: Whether products of means are left out, for numbers on the host: covariances, and
            no digit lost where means are large beside deviations.

    Attributes:
        parameters: Number of parameters of a unit.
        slopes: Number of arguments of a kernel: parameters of both units, and cross matrices.
        terms: Fields of the left and of the right unit that meet in a series, of plain units the
            coefficients of f and g. The first of them stands alone, and its order 0 is the mean of
            a unit; the others stand behind `weights`.
    """

    f: Activation
    g: Activation
    centred: bool = False
    parameters: ClassVar[int] = 2
    slopes: ClassVar[int] = 5
    terms: ClassVar[tuple[tuple[int, int], ...]] = ((0, 0),)

    def arguments(self, left: bool, right: bool) -> tuple[int, ...]:
        """Numbers of the arguments that move with the units of either side.

        Example:
            >>> pairing = Pairing(activation("relu"), activation("relu"))
            >>> pairing.arguments(True, False), pairing.arguments(False, False)
            ((0, 1, 4), ())
        """
        n = self.parameters
        own = (*(range(n) if left else ()), *(range(n, 2 * n) if right else ()))
        return (*own, *range(2 * n, self.slopes)) if own else ()

    def weights(self, cross: Cross) -> tuple[Real, ...]:
        """What stands before the series of all pairs of fields but the first."""
        return ()

    def slopes_of_weights(self, cross: Cross) -> tuple[tuple[Real | float, ...], ...]:
        """Slopes of the weights by each cross matrix behind the correlations."""
        return ()

    def cross(self, left: Expanded, right: Expanded) -> Cross:
        """Matrices over pairs: correlations, and what the pairing has besides."""
        return (correlations(left.unit, right.unit),)

    def smooth_enough(self, f: Activation) -> bool:
        """Whether slopes of pairs alone are expected derivatives of f, see `alone`."""
        # The second derivative of a kink is a density; that of a jump has no value.
        return not jumps(f)

    @property
    def ends_as_a_root(self) -> bool:
        """Whether slopes by the correlation rho end as sqrt(1 - rho^2), with finite values."""
        return all(f.gates_at_kinks and not jumps(f) for f in (self.f, self.g))

    def tables(self, f: Activation, parameters: tuple[Real, ...], slopes: bool) -> Tables:
        """Coefficients of the units of one layer, and their slopes by the parameters if asked."""
        mean, deviation = parameters
        if slopes:
            # Slopes by the mean are coefficients of f'. By the deviation, d/ds f(m + s z) =
            # z f'(m + s z), which raises the order by one: hence the one order more, which is cut
            # off again.
            c, c_slope = hermite(f, mean, deviation, ORDER + 1)
            kinds = [at_rest(c[:-1], deviation, c_slope[0]), c_slope[:-1], times_z(c_slope)[:-1]]
            c = c[:-1]
        else:
            c = coefficients(f, mean, deviation, highest_order(f, mean))
            kinds = [c]
        return Tables(library(mean).stack(kinds)[:, None], c[None])

    def side(self, f: Activation, parameters: tuple[Real, ...], tables: Tables) -> Side:
        """Coefficients and norms of the units of one layer."""
        mean, deviation = parameters
        (c,) = tables.known
        xp = library(mean)
        energy = energies(f, mean, deviation)
        size = xp.sqrt(energy)
        gross = gross_size(f, mean, deviation, size)
        rest = relative(left_over(f, c, energy), gross)
        if not f.is_polynomial:
            # Where squares are below the range of floats nothing is known of the rest, and pairs
            # are computed alone.
            least = sqrt(float(xp.finfo(c.dtype).tiny)) / float(xp.finfo(c.dtype).eps)
            rest = xp.where((gross > 0) & (gross < least), 1.0, rest)
        return Side(parameters, tables.kinds, rest[None], size, gross)

    def alone(self, left: Any, right: Any, rho: Real, cross: Cross) -> DerivativeWeights:
        """The kernel of single pairs: weights of expected derivatives of f(u) and g(v).

        Args:
            left, right: Parameters of the units, mean and deviation first.
            rho: Correlations.
            cross: What the pairing has besides, an array over pairs each.

        Returns:
            Weights, polynomials in all arguments, by how often f and g are differentiated.
        """
        return {(0, 0): 1.0}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["parameters", "unit", "across", "side"],
    meta_fields=["f"],
)
@dataclass(frozen=True, eq=False)
class Expanded:
    """Units with all that kernels take of one layer, so that a layer is prepared once.

    Args:
        f: Activation.
        parameters: Mean, deviation, and what a pairing has besides, an array over units each.
        unit: Rows of length 1.
        across: Rows that cross with the rows of another layer; None for plain units.
        side: Coefficients and norms, for numbers on the host; programs of JAX make them themselves.
    """

    f: Activation
    parameters: tuple[Real, ...]
    unit: Real
    across: Real | None
    side: Side | None

    def part(self, start: int, stop: int) -> Expanded:
        """Some of the units; the same object for all of them."""
        if (start, stop) == (0, len(self.unit)):
            return self
        across = None if self.across is None else self.across[start:stop]
        parameters = tuple(x[start:stop] for x in self.parameters)
        side = None if self.side is None else self.side.part(slice(start, stop))
        return Expanded(self.f, parameters, self.unit[start:stop], across, side)

    def in_trace(self, dtype: Any) -> Expanded:
        """The same units as programs of JAX read them, in their floats."""
        parameters, unit, across = jax.tree.map(
            lambda x: jnp.asarray(x, dtype), (self.parameters, self.unit, self.across)
        )
        return Expanded(self.f, parameters, unit, across, None)


def jumps(f: Activation) -> bool:
    """Whether an activation jumps, as steps do."""
    return any(gate.weights[0] != gate.tail for gate in f.gates_at_kinks)


def expanded(
    f: str | Activation, units: NormalInputs, on_device: bool = False, moving: bool = False
) -> Expanded:
    """Units with their coefficients; a kernel of many layers prepares each of them once.

    Args:
        f: Activation, or its name.
        units: Inputs of the units.
        on_device: Whether kernels of units that are numbers are made on JAX's device.
        moving: Whether kernels will have slopes by the parameters of the units.
    """
    f, units = activation(f), in_floats(units)
    deviation, unit = lengths_and_directions(units.rows)
    parameters = units.mean, deviation
    made = Expanded(f, parameters, unit, None, None)
    return with_side(Pairing(f, f), made, on_device, moving)


def with_side(pairing: Pairing, units: Expanded, on_device: bool, moving: bool) -> Expanded:
    """The units with their coefficients where they are numbers on the host."""
    if on_device or library(*units.parameters) is jnp:
        return units
    f, parameters = units.f, units.parameters
    with np.errstate(all="ignore"):
        side = pairing.side(f, parameters, pairing.tables(f, parameters, moving))
        return replace(units, side=side)


def between(pairing: Pairing, first: Expanded, second: Expanded, together: Together) -> Kernel:
    """The kernel of all pairs of units, in NumPy for numbers on the host and else in JAX."""
    if first.side is not None and second.side is not None:
        cross = pairing.cross(first, second)
        (values,), bounds = _in_tiles(pairing, first, second, cross, together, ())
        return Kernel(values, *bounds)
    # A partner that is not traced was prepared in float64; the trace computes in floats of its own.
    dtype = (first if first.side is None else second).unit.dtype
    one, two = first.in_trace(dtype), None if second is first else second.in_trace(dtype)
    values, *bounds = _values(pairing, one, two, pairing.cross(one, two or one))
    # Sizes and shares are bounds, of which nobody needs a derivative.
    return Kernel(values, *map(jax.lax.stop_gradient, bounds))


def with_slopes(
    pairing: Pairing,
    first: Expanded,
    second: Expanded,
    together: Together,
    moving: tuple[bool, bool] = (True, True),
) -> Kernel:
    """The kernel of units that are numbers, and its slopes, for `as_function`.

    Args:
        pairing: The activations, and what stands beside them.
        first, second: Units of the rows and of the columns; one object for a layer with itself.
        together: Function that runs independent tasks.
        moving: Whether the units of the rows, and those of the columns, are differentiated.
    """
    alone = first is second
    wanted = pairing.arguments(moving[0], moving[1] and not alone)
    if first.side is None or second.side is None:
        # The program is kept by the activations and the numbers of units: the kernels of a
        # comparison and its norms share it. It makes coefficients and their slopes itself.
        one, two = (
            replace(units.in_trace(units.unit.dtype), side=None) for units in (first, second)
        )
        cross = pairing.cross(one, two)
        (values, *slopes), bounds = _in_blocks(pairing, wanted, one, None if alone else two, cross)
    else:
        cross = pairing.cross(first, second)
        one = _with_slopes_of_tables(pairing, first) if moving[0] else first
        two = second if not moving[1] else one if alone else _with_slopes_of_tables(pairing, second)
        (values, *slopes), bounds = _in_tiles(pairing, one, two, cross, together, wanted)
    return Kernel(values, *bounds, slopes=_by_arguments(pairing, wanted, slopes, alone))


def _by_arguments(
    pairing: Pairing, wanted: tuple[int, ...], slopes: Sequence[Real], alone: bool
) -> tuple[Real | None, ...]:
    """Slopes by all arguments of a kernel, None by those that do not move.

    Args:
        pairing: The activations, and what stands beside them.
        wanted: Numbers of the arguments by which there are slopes.
        slopes: Slopes by these arguments.
        alone: Whether the kernel is that of a layer with itself: it is symmetric, so slopes by the
            units of its columns are those by the units of its rows, transposed.
    """
    known = dict(zip(wanted, slopes, strict=True))
    if alone:
        known |= {pairing.parameters + n: x.T for n, x in known.items() if n < pairing.parameters}
    return tuple(known.get(n) for n in range(pairing.slopes))


def as_function(kernel: Kernel, pairing: Pairing, first: Expanded, second: Expanded) -> Kernel:
    """A kernel of numbers inside a trace, as a function of the parameters of its units.

    Args:
        kernel: Kernel of these units, with slopes where it is differentiated.
        pairing: The activations, and what stands beside them.
        first, second: Units of the rows and of the columns, traced.
    """
    sides = first.parameters, second.parameters
    known: Kernel = jax.tree.map(lambda x: x.astype(sides[0][0].dtype), kernel)
    numbers = known.values, *known.slopes
    return known._replace(values=_given_values(numbers, *sides, pairing.cross(first, second)))


def _with_slopes_of_tables(pairing: Pairing, units: Expanded) -> Expanded:
    """Units whose coefficients have slopes, the same object where they have them already."""
    assert units.side is not None
    has_slopes = len(units.side.tables) > 1
    return units if has_slopes else with_side(pairing, units, on_device=False, moving=True)


@jax.custom_jvp
def _given_values(values: tuple[Any, ...], left: Any, right: Any, cross: Any) -> Real:
    """The values of a kernel that were computed before, with their slopes."""
    return values[0]


@_given_values.defjvp
def _given_values_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Real, Real]:
    value, *slopes = primals[0]
    return value, _change_along(slopes, *tangents[1:])


def _change_along(slopes: Sequence[Real | None], left: Any, right: Any, cross: Any) -> Real:
    """The change of a kernel along changes of the parameters of both sides and of cross matrices.

    Slopes by parameters of the left units broadcast along rows, those of the right units along
    columns; slopes by cross matrices have an entry for each pair already.
    """
    changes = [*((x, (slice(None), None)) for x in left), *((x, None) for x in right)]
    changes += [(x, ...) for x in cross]
    terms = [(x, *of) for x, of in zip(slopes, changes, strict=True) if x is not None]
    return sum(x * by[place] for x, by, place in terms if not isinstance(by, SymbolicZero))


def highest_order(f: Activation, mean: Real) -> int:
    """The highest order that coefficients of an activation are made for."""
    # A remainder has no closed form for pairs, so pairs alone cost integrals, and a series of 256
    # orders is cheaper by far. Closed forms are cheap enough to end at 64.
    integrates = any(isinstance(x, Remainder) for x in f.parts)
    return _LONG if integrates and library(mean) is np else ORDER


def gross_size(f: Activation, mean: Real, deviation: Real, size: Real) -> Real:
    """Sizes relative to which kernels are rounded: no less than half of what gates measure.

    A closed form is a sum of moments of gates, such as m Phi(m / s) + s phi(m / s), and is rounded
    like |m| + s, however small the sum is: a ReLU at m = -10 s has a size of 1e-11 s. Where several
    kinks cancel, as u - u does in hardtanh far out, all of them count: at s = t = 48 and a size of
    1 values are off by 2.5e-13, as 24 digits show.

    Args:
        f: Activation.
        mean: Means of the units' inputs.
        deviation: Standard deviations of the units' inputs.
        size: Sizes of the units.
    """
    total = 0 * size
    for part in f.parts:
        if isinstance(part, Gate):
            width = 0.0 if part.width == inf else part.width
            # How far the argument of the gate reaches: its distance from the knot, its spread and
            # the width of the gate. A power p of it bounds the moment of that power.
            reach = abs(mean - part.knot) + deviation + width
            powers = (abs(w) * reach**p for p, w in enumerate(part.weights) if w)
            total = total + sum(powers, 0 * size)
    return library(size).maximum(size, total if len(f.gates_at_kinks) > 1 else 0.5 * total)


def hermite(f: Activation, mean: Real, deviation: Real, order: int) -> tuple[Real, Real]:
    """Coefficients of f and of f', the latter not divided by the deviation, which may vanish."""
    if library(mean) is np:
        return with_coefficients_of_slope(f, mean, deviation, order)
    at = partial(coefficients, f, deviation=deviation, order=order)
    return jax.jvp(at, (mean,), (jnp.ones_like(mean),))


def at_rest(c: Real, deviation: Real, slope: Real) -> Real:
    """Coefficients of which kernels have their slopes by the rows of units, rows of zeros included.

    The coefficient of order 1 is s E f'(u) and stands beside rho = e . e'. A row of zeros has s = 0
    and no direction, but with a row r in its place the kernel would change by E f'(u) r . e'. In
    its units of length 1 (`lengths_and_directions`) rho changes by r . e', so its coefficient of
    order 1 is E f'(u), as if s were 1. Nothing else changes: correlations with such a unit are 0.

    Args:
        c: Coefficients by order.
        deviation: Standard deviations s of the units' inputs.
        slope: E f'(u) of every unit; infinite or undefined at the jump of a step, which stays 0.
    """
    xp = library(c, slope)
    known = (deviation == 0) & xp.isfinite(slope)
    # A change of E f'(u) itself is of second order beside a row of zeros.
    return xp.concatenate([c[:1], xp.where(known, not_differentiated(slope), c[1])[None], c[2:]])


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
    xp = library(c, energy)
    # known[k] is the energy of all orders up to k; E f^2 is the energy of all orders (Parseval).
    known = xp.cumsum(xp.square(c), 0)
    if f.is_polynomial:  # its series ends, and leaves nothing behind
        sizes = [len(part.weights) for part in f.parts if isinstance(part, Gate)]  # all of them
        most = max(sizes) - 1 + degree
        left = xp.maximum(known[-1] - known, 0) * (xp.arange(len(c)) < most)[:, None]
    else:
        rounding = 4 * float(xp.finfo(c.dtype).eps)
        left = xp.maximum(energy - known, 0) + rounding * xp.maximum(energy, known[-1])
    # Entry n is what is left after order 4 (n + 1), as orders begin at 0.
    return xp.sqrt(left[_TURN::_TURN])


def relative(rest: Real, gross: Real) -> Real:
    """What is left of series relative to gross sizes; nothing, where these are zero."""
    xp = library(rest, gross)
    return xp.where(gross > 0, rest / xp.where(gross > 0, gross, 1.0), 0.0)


def _tolerance(dtype: Any) -> float:
    """What a series may leave out, relative to gross sizes."""
    return 4 * float(np.finfo(dtype).eps)


def _turns_that_pay(pairing: Pairing, left: Side, right: Side, cross: Cross) -> Any:
    """The turns after which series and pairs alone cost least, by a sample of pairs."""
    rows, columns = cross[0].shape
    xp, most = library(*cross), ORDER // _TURN
    for f, side in ((pairing.f, left), (pairing.g, right)):
        # The rests of a polynomial are zero from some turn on; the series ends there, and is exact.
        if f.is_polynomial:
            ended = ~side.rest.any((0, 2))
            return xp.where(ended.any(), 1 + xp.argmax(ended), most)
    # Every n-th row and column, so that about `_SAMPLE` pairs decide.
    share = max(1.0, sqrt(rows * columns / _SAMPLE))
    i, j = (np.arange(0, n, share).astype(int) for n in (rows, columns))
    some = tuple(x[np.ix_(i, j)] for x in cross)
    left, right = left.part(i, None), right.part(None, j)
    dear = _cost(pairing.f, pairing.g)
    # Costs are counted in orders per pair: the orders of the series, and for each pair that is
    # marked as left over the cost of a pair alone. A longer series marks fewer pairs.
    costs, steps = [], _powers(abs(some[0]), _TURN)
    power = steps * abs(some[0])
    for turn in range(most):
        # `power` is |rho|^(K+1) for the order K at the end of each turn.
        marked = _tails(pairing, left, right, some, turn) * power > _tolerance(power.dtype)
        costs.append(_TURN * (turn + 1) + dear * xp.mean(marked))
        power = power * steps
    return 1 + xp.argmin(xp.stack(costs))


def _turns_enough(
    pairing: Pairing, left: Side, right: Side, cross: Cross, most: Any
) -> tuple[Any, Real]:
    """The fewest turns after which no pair of a tile needs more, and what is then left at most.

    Largest norms and largest correlations bound all pairs at once. Where that is no bound within
    the tolerance after the given number of turns, the pairs are looked at one by one.
    """
    xp = library(*cross)
    largest = tuple(xp.maximum(x.max(), -x.min()) for x in cross)
    turns = np.arange(1, 1 + ORDER // _TURN)
    own, other = (x.rest[:, : len(turns)].max((-2, -1)) for x in (left, right))
    bounds = _form(pairing, own, other, largest) * largest[0] ** (_TURN * turns + 1)
    # After the last turn that pays, pairs are looked at anyway.
    place = xp.argmax((bounds <= _tolerance(bounds.dtype)) | (turns >= most))
    return place + 1, bounds[place]


def _powers(x: Real, exponent: Any) -> Real:
    """A positive power of an array; in NumPy by squares."""
    if isinstance(x, jax.Array):
        return x**exponent
    if exponent == 1:
        return x
    half = _powers(x * x, exponent // 2)
    return half * x if exponent % 2 else half


def _form(pairing: Pairing, left: Real, right: Real, cross: Cross) -> Real:
    """The sum over pairs of fields, along the first axis, of products and their weights."""
    return _weighted(pairing.weights(cross), [left[a] * right[b] for a, b in pairing.terms])


def _weighted(weights: Sequence[Real | float], fields: Sequence[Real]) -> Real:
    """The first field, and behind it the others times their weights."""
    total, *others = fields
    for weight, field in zip(weights, others, strict=True):
        total = total + weight * field
    return total


def _tails(pairing: Pairing, left: Side, right: Side, cross: Cross, turn: Any) -> Real:
    """What is left of series after a turn, relative to gross sizes, without powers of rho."""
    return _form(pairing, left.rest[:, turn], right.rest[:, turn], tuple(map(abs, cross)))


def _series(
    pairing: Pairing, left: Side, right: Side, cross: Cross, turns: Any, wanted: tuple[int, ...]
) -> list[Real]:
    """The series of pairs, and behind it the series of slopes.

    Args:
        pairing: The activations, and what stands beside them.
        left, right: Units, whose axes broadcast to those of the pairs.
        cross: Matrices over pairs.
        turns: Number of orders in turns, beside order 0.
        wanted: Numbers of the arguments by which slopes follow.
    """
    # Tables hold the coefficients, and behind them their slopes by each parameter of a unit.
    n = pairing.parameters
    chosen = [(0, 0), *((k + 1, 0) if k < n else (0, k - n + 1) for k in wanted if k < 2 * n)]
    tables = [(left.tables[m, a], right.tables[n, b]) for m, n in chosen for a, b in pairing.terms]
    lowest = [int(pairing.centred), *[0] * (len(pairing.terms) - 1)] * len(chosen)
    if wanted:
        # d/drho rho^k = k rho^(k-1).
        xp, count = library(*cross), len(pairing.terms)
        k = xp.arange(1.0, left.tables.shape[2], dtype=cross[0].dtype)
        above = [(k.reshape(-1, *[1] * (c.ndim - 1)) * c[1:], d[1:]) for c, d in tables[:count]]
        lowest += [0] * count
        tables += [tuple(xp.concatenate([x, xp.zeros_like(x[:1])]) for x in both) for both in above]
    sums = iter(_horner(tables, lowest, cross[0], turns))
    weights, fields = pairing.weights(cross), [*islice(sums, len(pairing.terms))]
    values = [_weighted(weights, fields)]
    while following := [*islice(sums, len(pairing.terms))]:
        values.append(_weighted(weights, following))
    if wanted:
        # Weights depend on the further cross matrices, by which they are differentiated in turn.
        for by in pairing.slopes_of_weights(cross):
            values.append(_weighted(by, [0 * cross[0], *fields[1:]]))
    return values


def _horner(
    tables: Sequence[tuple[Real, Real]], lowest: Sequence[int], rho: Real, turns: Any
) -> Iterable[Real]:
    """sum_k c_k d_k rho^k for each of some pairs of tables, orders along the first axis."""
    if not isinstance(rho, jax.Array):
        return (
            _horner_in_numpy(c[: _TURN * turns + 1], d[: _TURN * turns + 1], rho, lowest[n])
            for n, (c, d) in enumerate(tables)
        )
    c, d = (jnp.stack(x) for x in zip(*tables, strict=True))

    def turn(n: Any, sums: Real) -> Real:
        # The orders of a turn from above, 4 (turns - n) first.
        first = _TURN * (turns - 1 - n) + 1
        own, other = (jax.lax.dynamic_slice_in_dim(x, first, _TURN, 1) for x in (c, d))
        for k in range(_TURN - 1, -1, -1):
            sums = (sums + own[:, k] * other[:, k]) * rho
        return sums

    start = jnp.zeros((len(tables), *rho.shape), rho.dtype)
    return repeat(turns, turn, start) + c[:, 0] * d[:, 0]


def _horner_in_numpy(c: np.ndarray, d: np.ndarray, rho: np.ndarray, lowest: int) -> np.ndarray:
    # Units of mean zero have coefficients of one parity, beside the linear one.
    present = [x.reshape(len(x), -1).any(-1) for x in (c, d)]
    present = np.flatnonzero(present[0] & present[1])
    series, above, product = np.zeros(rho.shape), len(c) - 1, np.empty(rho.shape)
    for k in present[present >= lowest][::-1]:
        if above > k:
            series *= _powers(rho, above - k)
        series += np.multiply(c[k], d[k], out=product)
        above = k
    if above:
        series *= _powers(rho, above)
    return series


def _tile(
    pairing: Pairing, left: Side, right: Side, cross: Cross, most: Any, wanted: tuple[int, ...]
) -> tuple[list[Real], Real | None, Real]:
    """The series of a tile, which pairs are left over, and the share of the others.

    Args:
        pairing: The activations, and what stands beside them.
        left, right: Units of the rows and of the columns.
        cross: Matrices over the pairs.
        most: Most turns of the series.
        wanted: Numbers of the arguments by which slopes follow the values.

    Returns:
        Arrays over the pairs; marks, None where no pair is left over; and the bound of what the
        series of all others leave out, relative to gross sizes.
    """
    left, right = left.part(slice(None), None), right.part(None, slice(None))
    if pairing.f.is_polynomial or pairing.g.is_polynomial:  # a finite sum
        none_left = np.zeros((), cross[0].dtype)
        return _series(pairing, left, right, cross, most, wanted), None, none_left
    turns, bound = _turns_enough(pairing, left, right, cross, most)
    values = _series(pairing, left, right, cross, turns, wanted)
    tolerance = _tolerance(cross[0].dtype)
    if not isinstance(bound, jax.Array) and bound <= tolerance:
        return values, None, bound
    # The bound is that of the largest norms and correlations of the tile; here each pair has its
    # own. Marked pairs are computed alone, so their tails are no part of the error of what remains.
    tails = _tails(pairing, left, right, cross, turns - 1)
    marked = tails * _powers(abs(cross[0]), _TURN * turns + 1) > tolerance
    return values, marked, library(bound).minimum(bound, tolerance)


def _in_tiles(
    pairing: Pairing,
    first: Expanded,
    second: Expanded,
    cross: tuple[np.ndarray, ...],
    together: Together,
    wanted: tuple[int, ...],
) -> tuple[Float[np.ndarray, "count m n"], _Bounds]:
    """The kernel in NumPy, or the kernel and its slopes, and what `Kernel` has besides.

    Args:
        pairing: The activations, and what stands beside them.
        first, second: Units of the rows and of the columns; they have tables of slopes where slopes
            by their parameters are wanted.
        cross: Matrices over pairs.
        together: Function that runs independent tasks.
        wanted: Numbers of the arguments by which slopes follow.
    """
    assert first.side is not None and second.side is not None
    left, right = first.side, second.side
    rows, columns = cross[0].shape
    values = np.empty((1 + len(wanted), rows, columns))
    # One order for all pairs: the series then runs over whole tiles, with no branch for single
    # pairs.
    most = int(_turns_that_pay(pairing, left, right, cross))
    # Tiles of at most 32 rows, the arrays of which stay in a core's cache.
    height = max(1, min(rows, 32))
    width = max(1, _TILE // height)
    tiles = [
        (slice(i, i + height), slice(j, j + width))
        for i in range(0, rows, height)
        for j in range(0, columns, width)
    ]
    # At most 64 tasks, so that starting a task costs little beside its tiles.
    runs = np.array_split(np.arange(len(tiles)), min(len(tiles), 64))
    none = np.zeros((2, 0), int)

    def run(places: np.ndarray) -> list[tuple[np.ndarray, float]]:
        """Rows and columns of the pairs of some tiles that are left over, and shares of others."""
        found = []
        for i, j in (tiles[n] for n in places):
            part = tuple(np.ascontiguousarray(x[i, j]) for x in cross)
            series, marked, share = _tile(pairing, left.part(i), right.part(j), part, most, wanted)
            for place, total in enumerate(series):
                values[place, i, j] = total
            at = none if marked is None else np.stack(np.nonzero(marked))
            found.append((at + np.array([[i.start], [j.start]]), float(share)))
        return found

    found = [
        one for run_of in together([partial(run, x) for x in runs if len(x)]) for one in run_of
    ]
    at = np.concatenate([none, *(one[0] for one in found)], 1)
    shares = [0.0, *(one[1] for one in found)]

    def by_long_series(start: int) -> tuple[np.ndarray, float]:
        """As `run` of a thousand single pairs, by the longest series."""
        i, j = some = at[:, start : start + _CHUNK]
        own, other, part = left.part(i), right.part(j), tuple(x[i, j] for x in cross)
        values[:, i, j] = _series(pairing, own, other, part, _LONG // _TURN, ())
        tails = _tails(pairing, own, other, part, -1) * _powers(abs(part[0]), _LONG + 1)
        is_left = tails > _tolerance(float)
        return some[:, is_left], float(tails[~is_left].max(initial=0.0))

    # Pairs that are left over try the longest series first, where coefficients of so many orders
    # exist.
    if not wanted and min(x.tables.shape[2] for x in (left, right)) > _LONG:
        starts = range(0, at.shape[1], _CHUNK)
        found = together([partial(by_long_series, start) for start in starts])
        at = np.concatenate([none, *(one[0] for one in found)], 1)
        shares += [one[1] for one in found]

    # What still is left takes closed forms or integrals.
    def alone(start: int) -> None:
        i, j = at[:, start : start + _CHUNK]
        values[:, i, j] = _alone_at(pairing, first, second, cross, i, j, wanted)
        if pairing.centred:
            a, b = pairing.terms[0]
            values[0, i, j] -= left.tables[0, a, 0, i] * right.tables[0, b, 0, j]

    together([partial(alone, start) for start in range(0, at.shape[1], _CHUNK)])
    return values, (left.size, right.size, np.asarray(max(shares)), left.gross, right.gross)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values(
    pairing: Pairing, first: Expanded, second: Expanded | None, cross: Cross
) -> tuple[Real, ...]:
    """The kernel in JAX, with its bounds; slopes make themselves once they are asked for."""
    values, bounds = _in_blocks(pairing, (), first, second, cross)
    return values[0], *bounds


@partial(_values.defjvp, symbolic_zeros=True)
def _values_jvp(
    pairing: Pairing, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[tuple[Real, ...], tuple[Real, ...]]:
    first, second, cross = tangents
    alone, n = second is None, pairing.parameters
    changes = first.parameters, (first if alone else second).parameters
    moving = [not isinstance(x, SymbolicZero) for x in (*changes[0], *changes[1])]
    wanted = (k for k in range(n if alone else 2 * n) if moving[k])
    wanted = (*wanted, *range(2 * n, pairing.slopes))
    (value, *slopes), bounds = _in_blocks(pairing, wanted, *primals)
    change = _change_along(_by_arguments(pairing, wanted, slopes, alone), *changes, cross)
    return (value, *bounds), (change, *map(jnp.zeros_like, bounds))


@partial(jax.jit, static_argnums=(0, 1))
def _in_blocks(
    pairing: Pairing,
    wanted: tuple[int, ...],
    first: Expanded,
    second: Expanded | None,
    cross: Cross,
) -> tuple[tuple[Real, ...], _Bounds]:
    """The kernel in JAX, or the kernel and its slopes, and what `Kernel` has besides.

    Args:
        pairing: The activations, and what stands beside them.
        wanted: Numbers of the arguments by which slopes follow.
        first, second: Units of the rows and of the columns, None for those of the rows.
        cross: Matrices over pairs.
    """
    rows, columns = cross[0].shape
    n = pairing.parameters

    def side(units: Expanded, arguments: range) -> Side:
        tables = pairing.tables(units.f, units.parameters, any(k in arguments for k in wanted))
        return pairing.side(units.f, units.parameters, tables)

    left = side(first, range(n))
    right = left if second is None else side(second, range(n, 2 * n))
    others = second or first
    most = _turns_that_pay(pairing, left, right, cross)
    # Even blocks of at most `_BLOCK` numbers in every array: the number of blocks, rounded up, and
    # then the rows of each.
    pairs = _BLOCK // len(pairing.terms)
    count = -(-rows // max(1, min(rows, pairs // max(columns, 1))))
    block = -(-rows // count)

    # The axis of units is padded with zeros to whole blocks and moved in front as (blocks, rows of
    # a block); padded rows are cut off at the end.
    def split(x: Real, axis: int) -> Real:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, count * block - rows)
        x = jnp.pad(x, width) if count * block > rows else x
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)

    def values_of(part: tuple[Side, Cross, Real]) -> tuple[Real, Real]:
        own, across, unit = part
        series, marked, share = _tile(pairing, own, right, across, most, wanted)
        values = jnp.stack(series)
        if marked is None:
            return values, share

        def alone(i: Array, j: Array) -> Real:
            units = replace(first, parameters=own.parameters, unit=unit)
            return _alone_at(pairing, units, others, across, i, j, wanted)

        return _replaced(values, marked, alone), share

    sides = jax.tree.map(lambda x: split(x, x.ndim - 1), left)
    parts = sides, tuple(split(x, 0) for x in cross), split(first.unit, 0)
    values, share = jax.lax.map(values_of, parts)
    values = jnp.moveaxis(values, 0, 1).reshape(-1, count * block, columns)[:, :rows]
    return tuple(values), (left.size, right.size, jnp.max(share), left.gross, right.gross)


def _replaced(values: Array, marked: Array, alone: Callable[[Array, Array], Real]) -> Array:
    """Values with those of marked pairs computed alone, in a trace.

    Shapes inside a trace are fixed, so marked pairs cannot be collected by a mask. Their places are
    found rank by rank, a chunk at a time, until the count is reached.
    """
    rows, columns = marked.shape
    chunk = min(_CHUNK, marked.size)
    groups = jnp.pad(marked.ravel(), (0, -marked.size % _GROUP)).reshape(-1, _GROUP)
    ends = jnp.cumsum(jnp.sum(groups, 1))

    def with_next_chunk(state: tuple[Any, Array]) -> tuple[Any, Array]:
        begin, values = state
        place, is_pair = _selected(groups, ends, begin + jnp.arange(chunk))
        i, j = place // columns, place % columns
        found = alone(i, j).astype(values.dtype)
        i = jnp.where(is_pair, i, rows)  # beyond the last row: dropped
        return begin + chunk, values.at[:, i, j].set(found, mode="drop")

    start = jnp.asarray(0), values
    return jax.lax.while_loop(lambda state: state[0] < ends[-1], with_next_chunk, start)[1]


def _cost(f: Activation, g: Activation) -> float:
    """What a pair alone costs, in orders of the series for a pair."""
    cost = 0.0
    for a, b in product(f.parts, g.parts):
        # Two gates have a closed form; every other pair is an integral.
        gates, rests = (sum(isinstance(x, kind) for x in (a, b)) for kind in (Gate, Remainder))
        cost += 400 if gates == 2 else 2_000 if rests == 2 else 4_000
    return cost


def _selected(groups: Array, ends: Array, ranks: Array) -> tuple[Array, Array]:
    """Flat places of the pairs with the given ranks among those marked, and whether they exist.

    Two levels, counts of groups and marks within a group, so that nothing runs over all pairs.
    """
    # The first group whose cumulated count exceeds the rank holds the pair; within the group, it is
    # the first place whose cumulated marks exceed the rank less those of all groups before.
    group = jnp.minimum(jnp.searchsorted(ends, ranks, side="right"), len(ends) - 1)
    marks = groups[group]
    before = ends[group] - jnp.sum(marks, 1)
    within = jnp.argmax(jnp.cumsum(marks, 1) > (ranks - before)[:, None], 1)
    is_pair = ranks < ends[-1]
    return jnp.where(is_pair, group * _GROUP + within, 0), is_pair


def _gaps(rho: Real, unit: Real, other_unit: Real) -> tuple[Real, Real]:
    """Correlations and 1 - |rho|, the latter as |e -+ e'|^2 / 2 of unit rows where they are close.

    1 - rho^2 computed from rho near 1 keeps 1e-16 absolute, so the angle 1e-8. The distance of two
    rows keeps all digits, and is zero for equal rows.
    """
    xp = library(rho)
    # For unit rows |e - e'|^2 / 2 = 1 - rho, and |e + e'|^2 / 2 = 1 + rho.
    gap = 1 - abs(rho)
    sign = xp.where(rho < 0, -1.0, 1.0)

    def distances() -> Real:
        difference = unit - sign[:, None] * other_unit
        return 0.5 * xp.sum(xp.square(difference), 1)

    # Elsewhere the difference 1 - |rho| has lost two digits at most.
    close = gap < 0.01
    if xp is np:
        exact = distances() if close.any() else gap
    else:
        exact = jax.lax.cond(jnp.any(close), distances, lambda: gap)
    # Rows of zeros belong to units without randomness, which correlate with nothing.
    close &= xp.any(unit != 0, 1) & xp.any(other_unit != 0, 1)
    gap = xp.where(close, exact, gap)
    return xp.where(close, sign * (1 - gap), rho), gap


def _alone_at(
    pairing: Pairing,
    first: Expanded,
    second: Expanded,
    cross: Cross,
    i: Any,
    j: Any,
    wanted: tuple[int, ...],
) -> Real:
    """The kernel of single pairs without a series, and behind it slopes.

    Args:
        pairing: The activations, and what stands beside them.
        first, second: Units of the rows and of the columns.
        cross: Matrices over pairs.
        i, j: Rows and columns of the pairs.
        wanted: Numbers of the arguments by which slopes follow.
    """
    rho, gap = _gaps(cross[0][i, j], first.unit[i], second.unit[j])
    left, right = tuple(x[i] for x in first.parameters), tuple(x[j] for x in second.parameters)
    pairs = left, right, rho, tuple(x[i, j] for x in cross[1:])
    if not wanted:
        return _alone(pairing, pairs, gap)[None]
    slopes_of: Any = _slopes_in_jax
    if library(rho) is np:
        smooth = all(pairing.smooth_enough(f) for f in (pairing.f, pairing.g))
        slopes_of = _slopes_in_numpy if smooth else _slopes_by_program
    return slopes_of(pairing, pairs, gap, wanted)


def _alone(pairing: Pairing, pairs: _Pairs, gap: Real) -> Real:
    """The kernel of single pairs, given gaps, which are 1 - |rho| with their own digits."""
    weights = pairing.alone(*pairs)
    left, right, rho, _ = pairs
    law = *left[:2], *right[:2], rho, gap
    every = pair_derivatives(pairing.f, pairing.g, law, tuple(weights))
    terms = zip(weights.values(), every, strict=True)
    return sum((weight * expected for weight, expected in terms), 0 * rho)


def _slopes_in_numpy(
    pairing: Pairing, pairs: _Pairs, gap: np.ndarray, wanted: tuple[int, ...]
) -> list[Any]:
    """The kernel of single pairs, and behind it its slopes by some arguments, in NumPy."""
    weights = pairing.alone(*pairs)
    left, right, rho, _ = pairs
    law = *left[:2], *right[:2], rho, gap
    every = tuple(sorted({(i + x, j + y) for i, j in weights for x, y in SLOPE_ORDERS}))
    expected = dict(zip(every, pair_derivatives(pairing.f, pairing.g, law, every), strict=True))
    arguments, tree = jax.tree.flatten(pairs)
    # The places of m, s, n, t and rho among the arguments.
    of_law = {0: 0, 1: 1, len(left): 2, len(left) + 1: 3, len(left) + len(right): 4}
    slopes = []
    for place in wanted:
        # Weights are polynomials in all arguments, so that the imaginary part after a small
        # imaginary step is their slope, to the last digit.
        moved = [*arguments]
        moved[place] = arguments[place] + 1j * _STEP
        changed = pairing.alone(*jax.tree.unflatten(tree, moved))
        terms = (
            (np.imag(w) / _STEP, expected[x]) for x, w in changed.items() if np.iscomplexobj(w)
        )
        slope = sum((w * x for w, x in terms), 0 * rho)
        if place in of_law:
            for order, weight in weights.items():
                slope = slope + weight * slopes_by_law(expected, order, law)[of_law[place]]
        slopes.append(slope)
    return [sum((w * expected[order] for order, w in weights.items()), 0 * rho), *slopes]


def _slopes_by_program(
    pairing: Pairing, pairs: _Pairs, gap: np.ndarray, wanted: tuple[int, ...]
) -> list[Any]:
    """As `_slopes_in_numpy`, by a compiled program for the slope along one argument."""
    count = len(gap)
    # Two lengths, each of which is compiled once.
    filled = (0, (_FEW if count <= _FEW else _CHUNK) - count)
    padded = jax.tree.map(lambda x: np.pad(x, filled, "edge"), (pairs, gap))
    slopes = [
        np.asarray(_compiled_slope(pairing, *padded, direction))[:count]
        for direction in np.eye(len(jax.tree.leaves(pairs)))[[*wanted]]
    ]
    return [_alone(pairing, pairs, gap), *slopes]


def _slopes_in_jax(pairing: Pairing, pairs: _Pairs, gap: Real, wanted: tuple[int, ...]) -> Real:
    """As `_slopes_in_numpy`, in JAX."""
    directions = jnp.eye(len(jax.tree.leaves(pairs)), dtype=gap.dtype)[np.array(wanted)]
    every = jax.vmap(partial(_slope_in_jax, pairing, pairs, gap))(directions)
    return jnp.concatenate([_alone(pairing, pairs, gap)[None], every])


def _slope_in_jax(pairing: Pairing, pairs: _Pairs, gap: Real, direction: Real) -> Real:
    """The slope along one argument, all of them in a row, by a forward derivative.

    A step's kernel has the slope 1 / sqrt(1 - rho^2): at rho = 1, where rho does not move, it is
    cut off at rounding, so that zero times the slope is zero. A kink's kernel has a slope that ends
    as sqrt(1 - rho^2), which is cut off where that is rounding.
    """
    *_, rho, _ = pairs
    sign = jnp.where(rho < 0, -1.0, 1.0)
    eps = float(jnp.finfo(gap.dtype).eps)
    floor = jnp.maximum(gap, eps**2 if pairing.ends_as_a_root else eps)
    flat, tree = jax.tree.flatten(pairs)

    # The gap follows rho, since it is 1 - |rho|: the derivative must move both.
    def values_at(*flat_moved: Real) -> Real:
        moved = jax.tree.unflatten(tree, flat_moved)
        return _alone(pairing, moved, floor - sign * (moved[2] - rho))

    tangents = tuple(x * jnp.ones_like(gap) for x in direction)
    return jax.jvp(values_at, tuple(flat), tangents)[1]


_compiled_slope = jax.jit(_slope_in_jax, static_argnums=0)


class GatedInputs(NamedTuple):
    """The inputs of gated units under a normal law: of the activation, and of the factor beside it.

    Args:
        gate: Inputs u of the activations.
        up: Inputs w of the factors, in the same coordinates.
    """

    gate: NormalInputs
    up: NormalInputs


def gated_expanded(
    f: str | Activation, units: GatedInputs, on_device: bool = False, moving: bool = False
) -> Expanded:
    """Gated units with their coefficients, as `expanded` makes plain ones.

    Args:
        f: Activation of the gates, or its name.
        units: Inputs of the units.
        on_device: Whether kernels of units that are numbers are made on JAX's device.
        moving: Whether kernels will have slopes by the parameters of the units.

    Raises:
        ModelError: The activation is unknown.
        UnsupportedLayer: The activation has no kernel of gated units, see `check_gate`.
    """
    f = check_gate(activation(f))
    parameters, unit, e = _split(units)
    made = Expanded(f, parameters, unit, e, None)
    return with_side(GatedPairing(f, f), made, on_device, moving)


def gated_moments(
    f: str | Activation, units: GatedInputs
) -> tuple[Real | np.ndarray, Float[Any, "m rank"]]:
    """E f(u_i) w_i of every unit, and its expected derivative by the input's coordinates.

    By Stein's lemma the row is E f'(u) w times the row of u plus E f(u) times the row of w, and
    E f(u) w = a E f + s b E f', E f'(u) w = a E f' + s b E f'', with w = a + b z + e.

    Args:
        f: Activation of the gates, or its name.
        units: Inputs of the units.

    Returns:
        Means (units,) and rows (units, rank). For a standard normal coordinate x_k of the input,
        E f(u) w x_k is entry k of the row.

    Example:
        >>> one = NormalInputs(np.ones(1), np.eye(1))
        >>> units = GatedInputs(one, one)
        >>> mean, row = gated_moments("identity", units)
        >>> float(mean[0]), float(row[0, 0])
        (2.0, 2.0)
    """
    f = activation(f)
    (mean, deviation, shift, slope, _), unit, e = _split(units)
    with np.errstate(all="ignore"):
        # E f, E f' and E f'' of every unit; `slope * deviation` is s b, from Stein's lemma for z.
        first, second, third = (average(f, mean, deviation, order) for order in range(3))
    # A row of zeros has no direction and b = 0. Its changes r change direction and b as if s were 1
    # (`at_rest`), and moments by E f' times r.
    length = library(deviation).where(deviation > 0, deviation, 1.0)
    value = shift * first + slope * length * second
    by_mean = shift * second + slope * deviation * third
    along = length * by_mean + slope * first
    return value, along[:, None] * unit + first[:, None] * e


def check_gate(f: Activation) -> Activation:
    """The activation of gates, or `UnsupportedLayer` where no bound of their kernel is known."""
    # The series of the slope of a step does not converge in the mean square, so no rest of it has a
    # bound. Slopes of pairs alone take derivatives of third order, which parts that jump lack.
    if jumps(f) or any(isinstance(part, Tail) for part in f.parts):
        raise UnsupportedLayer(
            "gated units take activations without steps, and ELU neither (relu, gelu, silu, tanh, "
            f"sigmoid), found {f!r}: nothing bounds the series of its derivatives; use "
            "Empirical(inputs)"
        )
    return f


def _split(units: GatedInputs) -> tuple[tuple[Real, ...], Real, Real]:
    """Mean, deviation, a, b and the deviation of e of every unit; its direction; the row of e."""
    units = GatedInputs(*map(in_floats, units))
    deviation, unit = lengths_and_directions(units.gate.rows)
    # b is the component of the row of w along the direction of u, and the row of e is what remains,
    # so that e is independent of z.
    slope = library(unit, units.up.rows).sum(units.up.rows * unit, 1)
    e = units.up.rows - slope[:, None] * unit
    return (units.gate.mean, deviation, units.up.mean, slope, lengths_and_directions(e)[0]), unit, e


@dataclass(frozen=True)
class GatedPairing(Pairing):
    """Fields c, p, q, d of either side, joined by rho, g12, g21 and eps."""

    parameters, slopes = 5, 14
    # Fields in the order of the lemma: phi phi', f dphi', dphi f', f f' and df df', where 0 is c, 1
    # is p, 2 is q and 3 is d.
    terms = ((1, 1), (0, 2), (2, 0), (0, 0), (3, 3))

    def weights(self, cross: Cross) -> tuple[Real, ...]:
        _, g12, g21, eps = cross
        return g12, g21, eps, g12 * g21

    def slopes_of_weights(self, cross: Cross) -> tuple[tuple[Real | float, ...], ...]:
        _, g12, g21, _ = cross
        return (1.0, 0.0, 0.0, g21), (0.0, 1.0, 0.0, g12), (0.0, 0.0, 1.0, 0.0)

    def cross(self, left: Expanded, right: Expanded) -> Cross:
        unit, e, other_unit, other_e = left.unit, left.across, right.unit, right.across
        # In the order of the weights: g12 = E e z', g21 = E z e', eps = E e e'.
        products = ((e, other_unit), (unit, other_e), (e, other_e))
        return correlations(unit, other_unit), *(product_of_rows(*both) for both in products)

    def tables(self, f: Activation, parameters: tuple[Real, ...], slopes: bool) -> Tables:
        """Fields c, p, q, d, and their slopes by the parameters if asked."""
        mean, deviation, shift, slope, _ = parameters
        xp, highest = library(mean), ORDER if slopes else highest_order(f, mean)
        # Multiplying by z and differentiating each need one order beyond the result.
        order = highest + 4
        k = xp.sqrt(xp.arange(1, order + 1, dtype=mean.dtype))[:, None]

        def fields(c: Real, p: Real) -> Real:
            # Integration by parts: coefficient k of the derivative is sqrt(k + 1) times the next.
            return xp.stack([x[: highest + 1] for x in (c[:-1], p[:-1], k * p[1:], k * c[1:])])

        def of(c: Real) -> Real:
            return fields(c, shift * c + slope * times_z(c))

        if not slopes:
            known = of(coefficients(f, mean, deviation, order))
            return Tables(known[None], known)
        plain, by_mean = hermite(f, mean, deviation, order)
        c, by_deviation = at_rest(plain, deviation, by_mean[0]), times_z(by_mean)
        kinds = [of(c), of(by_mean), of(at_rest(by_deviation, deviation, 0 * by_mean[0]))]
        # By shift and slope only phi changes, and nothing by the deviation of e.
        kinds += [fields(0 * c, c), fields(0 * c, times_z(c)), 0 * kinds[0]]
        return Tables(xp.stack(kinds), of(plain))

    def side(self, f: Activation, parameters: tuple[Real, ...], tables: Tables) -> Side:
        """Fields of the units of one layer, and their norms."""
        mean, deviation, shift, slope, spread = parameters

        def squares(at: Callable[[int], Real], z: Real) -> list[Real]:
            # The integrands are f^2, phi^2, (dphi/dz)^2 and (df/dz)^2, in the order of the fields.
            factor = shift + slope * z
            value, by_z = at(0), deviation * at(1)
            return [value**2, (value * factor) ** 2, (by_z * factor + slope * value) ** 2, by_z**2]

        xp = library(mean)
        squared_norms = norms(f, mean, deviation, squares)
        rests = [
            left_over(f, c, energy, int(i == 1))
            for i, (c, energy) in enumerate(zip(tables.known, squared_norms, strict=True))
        ]
        # E (f w)^2 = E phi^2 + E e^2 E f^2.
        plain, whole, *_ = squared_norms
        size = xp.sqrt(whole + spread**2 * plain)
        factors = abs(shift) + abs(slope) + spread
        if any(isinstance(x, Wave) for x in f.parts):
            # A wave is as large as its derivatives, which the lemma multiplies by deviations.
            factors = factors * (1 + deviation)
        gross = xp.maximum(size, factors * gross_size(f, mean, deviation, xp.sqrt(plain)))
        return Side(parameters, tables.kinds, relative(xp.stack(rests), gross), size, gross)

    @property
    def ends_as_a_root(self) -> bool:
        return False  # slopes take derivatives of higher order

    def smooth_enough(self, f: Activation) -> bool:
        # Slopes take derivatives of fourth order, which kinks do not have.
        return not f.gates_at_kinks

    def alone(self, left: Any, right: Any, rho: Real, cross: Cross) -> DerivativeWeights:
        """Stein's lemma for w and w' themselves, of which no derivative of phi is needed.

        w pairs with u, v, w' or stands for its mean a, where cov(w, u) = b s and
        cov(w, v) = t (b rho + g12):

            E f g w w' = (a a' + cov(w, w')) E f g + sum over x in (u, v) of
                         (a cov(w', x) + a' cov(w, x)) E d/dx (f g)
                         + sum over x, y in (u, v) of cov(w, x) cov(w', y) E d/dx d/dy (f g).
        """
        (_, s, a, b, _), (_, t, a1, b1, _) = left, right
        g12, g21, eps = cross
        # Covariances of w with u and v, of w' with u and v, and of w with w'.
        wu, wv = b * s, t * (b * rho + g12)
        xu, xv = s * (b1 * rho + g21), b1 * t
        joint = eps + b * b1 * rho + b * g21 + b1 * g12
        return {
            (0, 0): a * a1 + joint,
            (1, 0): a * xu + a1 * wu,
            (0, 1): a * xv + a1 * wv,
            (1, 1): wu * xv + wv * xu,
            (2, 0): wu * xu,
            (0, 2): wv * xv,
        }
