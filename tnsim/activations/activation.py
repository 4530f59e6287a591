"""Activations: what they compute, and the parts whose Gaussian moments are known.

An activation is a polynomial plus parts. A part has either a closed mean under a normal law (gates,
an exponential tail, a wave) or is a remainder, analytic in a strip about the real line, for which
trapezoidal sums converge exponentially.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise, zip_longest
from math import comb, factorial, inf, isfinite, pi, sqrt
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.activations.normal import (
    Real,
    cumulative,
    density,
    gate_moments,
    legendre,
    threshold,
)
from tnsim.errors import ModelError
from tnsim.options import checked
from tnsim.scaled import library

_ARGUMENTS = np.linspace(-30.0, 30.0, 4097)  # at which a function of a user's own is told
_NODES, _TAIL = 64, 16  # Chebyshev coefficients of an interval, and the last ones that count
_SEARCHED, _INTERVALS = 8.0, 250  # how far from 0 a kink is looked for, in at most so many of them
_VISIBLE_TAIL = 1e-12
"""Largest of the last coefficients by the largest value of the function. Analytic functions have
4e-15, over ten functions, five scales and three strips each; x / (1 + |x|) has 2e-4 for a strip of
3 and 3e-9 for a strip of 0.01."""
# Names that read several units at once, without underscores.
_TOGETHER = ("topk", "batchtopk", "softmax", "logsoftmax", "softmin", "maxout")
# Panels and nodes of the integral of a scaled tail.
_TAIL_RULE = tuple(zip(*legendre(16), strict=True))
_TAIL_PANELS = ((0.0, 2.0), (2.0, 5.0), (5.0, 10.0), (10.0, 18.0), (18.0, 40.0))


class Part(Protocol):
    """A summand of an activation."""

    @property
    def strip(self) -> float:
        """Half-width of the strip about the real line in which the part is analytic."""
        ...

    @property
    def support(self) -> tuple[float, float]:
        """Interval outside of which the part is below rounding."""
        ...

    def __call__(self, u: Real, order: int = 0) -> Real:
        """The part, or a derivative of it, almost everywhere: at a kink no density stands."""
        ...


class ClosedPart(Part, Protocol):
    """A part with a closed mean under any normal law: every part that is no remainder."""

    @property
    def knot(self) -> float:
        """Place where the part changes its form."""
        ...

    @property
    def width(self) -> float:
        """Length over which it does; 0 is a kink, infinity an entire function."""
        ...

    def mean(self, mean: Real, deviation: Real, order: int = 0) -> Real:
        """The mean of the part or of a derivative of it, densities at kinks included."""
        ...


@dataclass(frozen=True)
class Gate:
    """sum_p weights[p] (u - knot)^p Phi((u - knot) / width).

    Width 0 is a kink, (u - knot)_+^p; infinite width an open gate, which leaves a polynomial.

    Phi(u / width) is the probability that u and noise of deviation `width` are positive: GELU is
    ReLU's gate with noise, and one family of formulas serves both.

    Args:
        knot: Threshold of the gate.
        width: Deviation of the noise.
        weights: Coefficients of the powers of u - knot.
        tail: Weight of a `Tail` beside a kink, whose jumps the derivatives of the kink take over:
            ELU is continuous and its two parts jump, so their densities cancel here, in weights.
            Apart they are as large as 1 / sqrt(1 - rho^2) beside another threshold.
    """

    knot: float
    width: float
    weights: tuple[float, ...]
    tail: float = 0.0
    support = (-inf, inf)

    @property
    def strip(self) -> float:
        return 3.0 * self.width

    def __call__(self, u: Real, order: int = 0) -> Real:
        u = u - self.knot
        opened, at_threshold = self.derivative(order)
        value = _horner(opened, u)
        if self.width == inf:
            return value
        if not self.width:
            return library(u).where(u > 0, value, 0.0)
        value = value * cumulative(u / self.width)
        if not at_threshold:
            return value
        return value + _horner(at_threshold, u) * density(u / self.width) / self.width

    def derivative(self, order: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Weights of (u - knot)^p behind the gate, and of those at the density of its threshold.

        d/du of u^p Phi(u / kappa) is p u^(p-1) Phi(u / kappa) + u^p delta(u), where delta is the
        density of the threshold, of deviation kappa, and its derivative -u / kappa^2 delta(u). A
        kink has u^p delta(u) = 0 for p > 0. A tail w exp(u) below the kink is its own derivative
        beside -w delta(u), at every order.
        """
        gate, delta = list(self.weights), []
        for _ in range(order):
            # The gate's own derivative is the density, times the polynomial in front; at a kink
            # only the constant survives.
            through = gate if self.width else [gate[0] - self.tail]
            # Derivative of the polynomial at the density, and the derivative -u / kappa^2 of the
            # density itself, which raises the power.
            lower = [p * w for p, w in enumerate(delta)][1:]
            raised = [0.0, *(-w / self.width**2 for w in delta)] if delta and self.width else []
            delta = [sum(x) for x in zip_longest(through, lower, raised, fillvalue=0.0)]
            if self.width == inf or not any(delta):
                delta = []
            gate = [p * w for p, w in enumerate(gate)][1:] or [0.0]
        return tuple(gate), tuple(delta)

    def mean(self, mean: Real, deviation: Real, order: int = 0) -> Real:
        opened, at_threshold = self.derivative(order)
        most = max(len(opened), len(at_threshold)) - 1
        gates, densities = gate_moments(mean - self.knot, deviation, self.width, most)
        terms = [w * x for w, x in zip(opened, gates, strict=False) if w]
        terms += [w * x for w, x in zip(at_threshold, densities, strict=False) if w]
        return sum(terms, 0 * gates[0])


def is_kink(part: Part) -> TypeGuard[Gate]:
    """Whether a part is a gate without width, behind which derivatives jump."""
    return isinstance(part, Gate) and part.width == 0


@dataclass(frozen=True)
class Tail:
    """weight exp(u) for u < 0, zero above: what ELU has beside its pieces.

    Its derivatives are the tail itself; densities where it jumps stand with the `Gate` beside it.
    """

    weight: float
    knot = 0.0
    width = 0.0
    strip = 8.5
    support = (-40.0, 0.0)

    def __call__(self, u: Real, order: int = 0) -> Real:
        xp = library(u)
        return self.weight * xp.where(u > 0, 0.0, xp.exp(xp.minimum(u, 0.0)))

    def mean(self, mean: Real, deviation: Real, order: int = 0) -> Real:
        # E exp(u) 1(u < 0) = exp(m + s^2/2) Phi(-(m + s^2)/s) = exp(-(m/s)^2/2) R((m + s^2)/s),
        # where R(x) = exp(x^2/2) Phi(-x) is a scaled error function, so no large exponents meet
        xp = library(mean, deviation)
        h = threshold(mean, deviation)
        x = h + deviation
        inside = xp.exp(xp.minimum(mean + deviation**2 / 2, 50.0)) * cumulative(-x)
        outside = xp.exp(-0.5 * xp.square(xp.clip(h, -40, 40))) * _scaled_tail(x)
        return self.weight * xp.where(x > 1, outside, inside)


@dataclass(frozen=True)
class Wave:
    """sin(u)."""

    knot = 0.0
    width = inf
    strip = 3.0
    support = (-inf, inf)

    def __call__(self, u: Real, order: int = 0) -> Real:
        xp = library(u)
        return (-1) ** (order // 2) * (xp.cos(u) if order % 2 else xp.sin(u))

    def mean(self, mean: Real, deviation: Real, order: int = 0) -> Real:
        return library(mean, deviation).exp(-0.5 * deviation**2) * self(mean, order)


@dataclass(frozen=True)
class Remainder:
    """function(u) less gates that share its asymptotes: analytic, and nothing beyond `reach`."""

    function: Callable[..., Any]
    strip: float
    less: tuple[Gate, ...] = ()
    reach: float = inf

    @property
    def support(self) -> tuple[float, float]:
        return -self.reach, self.reach

    def __call__(self, u: Real, order: int = 0) -> Real:
        if isinstance(u, jax.Array):
            return _derivative_in_jax(self._values, order)(u)
        if self.reach == inf:
            return _numbers(self.function, u, order)
        # Beyond `reach` function and gates agree to rounding, and their difference would be noise.
        inside = np.clip(u, -self.reach, self.reach)
        values = _numbers(self.function, inside, order)
        for gate in self.less:
            values = values - gate(inside, order)
        return np.where(inside == u, values, 0.0)

    def _values(self, u: Real) -> Real:
        return self.function(u) - sum(gate(u) for gate in self.less)


@checked
@dataclass(frozen=True, repr=False)
class Activation:
    """A function of one number, between linear layers.

    Either piecewise polynomial, by its kinks and pieces, or analytic near the real line, by a
    function and the half-width of a strip: `Activation(jnp.tanh, strip=pi / 2)`.

    Args:
        function: Function of JAX arrays, elementwise. None for piecewise polynomials.
        strip: Distance from the real line to the nearest singularity of the function in the complex
            plane; less is allowed and costs time. Up to there the function must stay of moderate
            size.
        kinks: Places where the polynomial changes, increasing.
        pieces: Coefficients of 1, u, u^2, ... of each polynomial, from the left; one more than
            there are kinks. At a kink the left piece holds.
        name: Name in messages and files; of an own activation the name of its function.
        parts: Summands with known moments, which the named activations come with.

    Raises:
        ModelError: Neither or both forms are given, kinks do not increase, counts differ, or the
            values of the function between -8 and 8 show a singularity within the strip.

    Example:
        >>> shrink = Activation(kinks=(-1.0, 1.0), pieces=((1.0, 1.0), (0.0,), (-1.0, 1.0)))
        >>> shrink(np.array([-3.0, 0.5, 2.0])).tolist()
        [-2.0, 0.0, 1.0]
        >>> activation("gelu")
        Activation('gelu')
    """

    function: Callable[[Any], Any] | None = None
    strip: float | None = None
    kinks: tuple[float, ...] = ()
    pieces: tuple[tuple[float, ...], ...] = ()
    name: str = ""
    parts: tuple[ClosedPart | Remainder, ...] = ()

    def __post_init__(self) -> None:
        kinks = tuple(float(x) for x in self.kinks)
        pieces = tuple(tuple(float(x) for x in piece) for piece in self.pieces)
        object.__setattr__(self, "kinks", kinks)
        object.__setattr__(self, "pieces", pieces)
        # Named activations bring their parts along; nothing is derived for them.
        if self.parts:
            return
        if (self.function is None) == (not pieces) or (self.function is not None) != (
            self.strip is not None
        ):
            raise ModelError(
                "an activation is either analytic, Activation(function, strip=half_width), or "
                "piecewise polynomial, Activation(kinks=(0.0,), pieces=((0.0,), (0.0, 1.0))); "
                f"found function {self.function!r}, strip {self.strip}, {len(pieces)} pieces"
            )
        if pieces and (len(pieces) != len(kinks) + 1 or not all(pieces)):
            raise ModelError(
                f"an activation of {len(kinks)} kinks has {len(kinks) + 1} pieces, each with a "
                f"coefficient or more; found pieces {pieces}"
            )
        if not all(map(isfinite, chain(kinks, *pieces))) or any(b <= a for a, b in pairwise(kinks)):
            raise ModelError(
                "kinks and coefficients of an activation are finite, and its kinks increase; found "
                f"kinks {kinks} and pieces {pieces}"
            )
        if self.strip is not None and not 0 < self.strip < inf:
            raise ModelError(f"strip is a positive half-width, found {self.strip}")
        if self.function is not None and self.strip is not None:
            _check_strip(self.function, self.strip)
            parts = (Remainder(self.function, self.strip),)
        else:
            parts = _gates(kinks, pieces)
        object.__setattr__(self, "parts", parts)
        if not self.name:
            name = getattr(self.function, "__name__", "") if self.function else "piecewise"
            object.__setattr__(self, "name", name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A function within a function, as that of ELU, cannot be sent to another process.
        with suppress(ModelError):
            if activation(self.name) == self:
                return activation, (self.name,)
        return super().__reduce_ex__(protocol)

    @property
    def is_polynomial(self) -> bool:
        """Whether one polynomial says it all, so that every kernel with it is a finite sum."""
        return all(isinstance(x, Gate) and x.width == inf for x in self.parts)

    @property
    def content(self) -> tuple[Any, ...] | None:
        """What identifies an analytic activation in every process; None where its fields do.

        The text of a function is its address. A function of tnsim's is told by its name, one of a
        user's own by values as well.
        """
        if self.function is None:
            return None
        values = None if ACTIVATIONS.get(self.name) == self else self(_ARGUMENTS)
        return self.name, self.strip, self.kinks, values

    @property
    def gates_at_kinks(self) -> list[Gate]:
        """The parts that are kinks."""
        return [part for part in self.parts if is_kink(part)]

    def __call__(self, x: Any) -> Any:
        """The activation of an array, NumPy for NumPy and JAX for JAX, of floats in their dtype."""
        if isinstance(x, jax.Array):
            return self._values(x, jnp)
        x = np.asarray(x)
        x = x.astype(float) if x.dtype.kind in "iub" else x  # whole numbers have other values
        if self.function is None:
            return self._values(x, np)
        with np.errstate(over="ignore", under="ignore"):  # exp(-u) far out, whose quotient is 0
            return np.asarray(_numbers(self.function, x), x.dtype)

    def _values(self, x: Any, xp: Any) -> Any:
        if self.function is not None:
            return self.function(x)
        # From left to right, each kink replaces the value to its right.
        values = _horner(self.pieces[0], x)
        for kink, piece in zip(self.kinks, self.pieces[1:], strict=True):
            values = xp.where(x > kink, _horner(piece, x), values)
        return values

    def __repr__(self) -> str:
        return f"Activation({self.name!r})"


def _check_strip(function: Callable[[Any], Any], strip: float) -> None:
    """Refuse a strip that the values of a function contradict.

    A function that is analytic within the distance d of an interval of half-length d, and at most M
    there, has Chebyshev coefficients of at most 2 M (1 + sqrt 2)^-k: 8e-19 M for k = 48, as the
    ellipse with foci at the ends of the interval and the half-axis d off the real line has the
    half-axes d and d sqrt 2. A kink in any of the first two derivatives leaves powers of k.

    Source:
        Trefethen, "Approximation Theory and Approximation Practice", theorem 8.1.
    """
    half = min(strip, 4.0)
    # Overlapping intervals, as far out from 0 as their number allows.
    most = min(_INTERVALS // 2, int(np.ceil(_SEARCHED / half)))
    centres = half * np.arange(-most, most + 1)
    angles = (np.arange(_NODES) + 0.5) * pi / _NODES
    # Constants also inside a trace of the caller's.
    with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):
        values = _numbers(function, centres[:, None] + half * np.cos(angles))
        waves = np.cos(np.arange(_NODES - _TAIL, _NODES)[:, None] * angles)
        tails = abs(values @ waves.T).max(axis=1) * 2 / _NODES
        is_seen = ~(tails <= _VISIBLE_TAIL * abs(values).max())  # of NaN as well
    if is_seen.any():
        place = centres[np.argmax(is_seen * (1 + np.nan_to_num(tails, nan=np.inf)))]
        raise ModelError(
            f"the function is declared analytic within {strip:g} of the real line, and its values "
            f"between {place - half:.3g} and {place + half:.3g} show a kink, a singularity nearer "
            "by or waves too steep for it: give the distance to the nearest singularity in the "
            "complex plane as the strip, and kinks as Activation(kinks=..., pieces=...), if the "
            "pieces are polynomials"
        )


def activation(name: str | Activation) -> Activation:
    """The activation of a name; an `Activation` is returned as it is.

    Args:
        name: A key of `ACTIVATIONS`, a name with numbers such as "leaky_relu(0.2)" or
            "gelu + 0.5 u", or an activation of one's own.

    Raises:
        ModelError: No activation has this name, or it mixes units, as TopK and softmax do.

    Example:
        >>> activation("relu")(np.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """
    if isinstance(name, Activation):
        return name
    if isinstance(name, str) and name in ACTIVATIONS:
        return ACTIVATIONS[name]
    if isinstance(name, str) and (made := _with_numbers(name)) is not None:
        return made
    if isinstance(name, str) and name.lower().replace("_", "") in _TOGETHER:
        raise ModelError(
            f"{name} reads all hidden units at once: whether a unit counts depends on the others, "
            "so that no pair of units has a kernel of its own; compare on inputs by "
            "tnsim.Empirical(inputs), or give 'relu' or jump_relu(threshold) units, which are exact"
        )
    raise ModelError(
        f"no activation is called {name!r}; there are {', '.join(sorted(ACTIVATIONS))}, "
        "leaky_relu(slope), jump_relu(threshold), elu(alpha), power(exponent), and for others "
        "Activation(function, strip=...) or Activation(kinks=..., pieces=...)"
    )


def _with_numbers(name: str) -> Activation | None:
    """The activation of a name with numbers, as activations with numbers are called."""
    makers = {"leaky_relu": leaky_relu, "jump_relu": jump_relu, "elu": elu}
    try:
        if called := re.fullmatch(r"(leaky_relu|jump_relu|elu)\((\S+)\)", name):
            number = float(called[2])
            return makers[called[1]](number) if isfinite(number) else None
        if called := re.fullmatch(r"power\((\d\d?)\)", name):
            return power(int(called[1]))
        if line := re.fullmatch(r"(\S+) ([+-]) (\S+) u", name):
            slope = float(line[2] + line[3])
            return plus_line(activation(line[1]), slope) if isfinite(slope) else None
    except ValueError:  # no number
        return None
    return None


@cache
def derivative(f: Activation) -> Activation:
    """The derivative of an analytic activation.

    Example:
        >>> float(derivative(activation("tanh"))(np.zeros(1))[0])
        1.0
    """
    values: Any = f.function  # an analytic activation has a function
    strip = min(part.strip for part in f.parts)

    @_in_numpy(derivatives=True)
    def slope(u: Any, order: int = 0) -> Any:
        return Remainder(values, strip)(u, order + 1)

    # A derivative is analytic where the function is, which is known already.
    known = (Remainder(slope, strip),)
    return Activation(slope, strip=strip, name=f"derivative of {f.name}", parts=known)


def leaky_relu(slope: float = 0.01) -> Activation:
    """u for u > 0, slope u below.

    Example:
        >>> leaky_relu(0.5)(np.array([-2.0, 2.0])).tolist()
        [-1.0, 2.0]
    """
    name = "leaky_relu" if slope == 0.01 else f"leaky_relu({slope!r})"
    return Activation(kinks=(0.0,), pieces=((0.0, slope), (0.0, 1.0)), name=name)


def jump_relu(threshold: float) -> Activation:
    """u for u > threshold, zero up to there: a kink and a step, as sparse autoencoders have them.

    Thresholds of their own for every unit are `Gated.jump_relu`.

    Example:
        >>> jump_relu(0.5)(np.array([0.4, 0.6])).tolist()
        [0.0, 0.6]
    """
    return Activation(
        kinks=(threshold,), pieces=((0.0,), (0.0, 1.0)), name=f"jump_relu({threshold!r})"
    )


def power(exponent: int) -> Activation:
    """u^exponent.

    Example:
        >>> power(3)(np.array([2.0])).tolist()
        [8.0]
    """
    name = {1: "identity", 2: "square"}.get(exponent, f"power({exponent})")
    return Activation(pieces=((*[0.0] * exponent, 1.0),), name=name)


def elu(alpha: float = 1.0) -> Activation:
    """u for u > 0, alpha (exp(u) - 1) below.

    Example:
        >>> elu()(np.array([0.0, 2.0])).tolist()
        [0.0, 2.0]
    """
    return _elu(float(alpha))


@cache
def _elu(alpha: float) -> Activation:
    @_in_numpy
    def function(u: Any) -> Any:
        xp = library(u)
        return xp.where(u > 0, u, alpha * xp.expm1(xp.minimum(u, 0.0)))

    # alpha (exp(u) - 1) 1(u < 0) + u_+  =  -alpha + (alpha 1 + u)(u > 0) + alpha exp(u) 1(u < 0)
    return Activation(
        function,
        name="elu" if alpha == 1 else f"elu({alpha!r})",
        parts=(Gate(0.0, inf, (-alpha,)), Gate(0.0, 0.0, (alpha, 1.0), alpha), Tail(alpha)),
    )


@cache
def plus_line(f: Activation, slope: float) -> Activation:
    """f(u) + slope u, such as gelu(u) + u.

    Args:
        f: A known activation, or one of an own function.
        slope: Number that multiplies u.

    Example:
        >>> plus_line(activation("relu"), 0.5)(np.array([-2.0, 2.0])).tolist()
        [-1.0, 3.0]
    """
    name = f"{f.name} {'-' if slope < 0 else '+'} {abs(slope)!r} u"
    known: Any = f.function
    if known is None:
        line = np.polynomial.Polynomial([0.0, slope])
        pieces = ((np.polynomial.Polynomial(piece) + line).coef for piece in f.pieces)
        sums = tuple(tuple(piece.tolist()) for piece in pieces)
        return Activation(kinks=f.kinks, pieces=sums, name=name)

    def values(u: Any, order: int = 0) -> Any:
        if not order:
            return known(u) + slope * u
        return known(u, order) + (slope if order == 1 else 0.0)

    values.__name__ = name  # as messages have it
    if hasattr(known, "in_numpy"):
        values = _in_numpy(values, derivatives=known.in_numpy)
    return Activation(values, name=name, parts=(Gate(0.0, inf, (0.0, slope)), *f.parts))


def _horner(coefficients: tuple[float, ...], u: Any) -> Any:
    total = coefficients[-1] + 0 * u
    for c in coefficients[-2::-1]:
        total = total * u + c
    return total


def about(polynomial: Sequence[float] | np.ndarray, place: Any) -> list[Any]:
    """Coefficients of a polynomial in powers of the distance from a place, or from each of several.

    Example:
        >>> about((0.0, 0.0, 1.0), 3.0)
        [9.0, 6.0, 1.0]
    """
    size = len(polynomial)
    return [
        sum(polynomial[q] * comb(q, p) * place ** (q - p) for q in range(p, size))
        for p in range(size)
    ]


def _gates(kinks: tuple[float, ...], pieces: tuple[tuple[float, ...], ...]) -> tuple[Gate, ...]:
    """What every kink adds to the polynomial on its left, in powers of the distance to the kink."""
    gates = [Gate(0.0, inf, pieces[0])] if any(pieces[0]) or not kinks else []
    for kink, left, right in zip(kinks, pieces[:-1], pieces[1:], strict=True):
        size = max(len(left), len(right))
        change = np.zeros(size)
        change[: len(right)] += right
        # What the polynomial gains at the kink, first in powers of u, then in powers of u - kink.
        change[: len(left)] -= left
        gates.append(Gate(kink, 0.0, tuple(float(x) for x in about(change, kink))))
    return tuple(gates)


def _scaled_tail(x: Real) -> Real:
    """exp(x^2 / 2) Phi(-x) for x > 1: `erfcx` of SciPy in NumPy, Laplace's integral in JAX."""
    xp = library(x)
    if xp is np:
        from scipy.special import erfcx

        return 0.5 * erfcx(np.maximum(x, 1.0) * sqrt(0.5))
    x = jnp.maximum(x, 1.0)
    # int_0^inf exp(-x y - y^2 / 2) dy / sqrt(2 pi) with y = z / x, by Gauss-Legendre panels in z.
    total = jnp.zeros_like(x)
    for start, stop in _TAIL_PANELS:
        for node, weight in _TAIL_RULE:
            z = start + (stop - start) * node
            total = total + (stop - start) * weight * jnp.exp(-z - 0.5 * jnp.square(z / x))
    return total / (x * sqrt(2 * pi))


def _analytic(
    name: str, function: Callable[[Any], Any], strip: float, reach: float, *gates: Gate
) -> Activation:
    """An analytic activation with the gates that share its asymptotes."""
    return Activation(function, name=name, parts=(*gates, Remainder(function, strip, gates, reach)))


def _derivative_in_jax(function: Callable[[Any], Any], order: int) -> Callable[[Any], Any]:
    """A derivative of a function of JAX arrays, elementwise."""
    if not order:
        return function
    lower = _derivative_in_jax(function, order - 1)
    return lambda u: jax.jvp(lower, (u,), (jnp.ones_like(u),))[1]


def _numbers(function: Callable[..., Any], u: np.ndarray, order: int = 0) -> np.ndarray:
    """A function or a derivative of it at numbers, without a compiler where it is a known one.

    An own function of JAX is compiled for rows of few lengths, filled up with zeros.
    """
    if hasattr(function, "in_numpy") and (not order or function.in_numpy):  # see `_in_numpy`
        return function(u, order) if function.in_numpy else function(u)
    flat = np.ravel(u)
    # Lengths grow by factors of eight, so a function is compiled for few lengths and at most seven
    # eighths of a row are filled up in vain.
    size = 256
    while size < flat.size:
        size *= 8
    size = min(size, 2**17)
    blocks = []
    with jax.enable_x64(True):
        for start in range(0, max(1, flat.size), size):
            row = np.zeros(size, flat.dtype)
            some = flat[start : start + size]
            row[: len(some)] = some
            try:
                values = _compiled(function, order)(row)
            except TypeError as error:  # as functions of NumPy raise, or of one number
                raise ModelError(
                    f"{function!r} computes no arrays of JAX: write it by jax.numpy, entry by entry"
                ) from error
            blocks.append(np.asarray(values)[: len(some)])
    return np.concatenate(blocks).reshape(np.shape(u))


@cache
def _compiled(function: Callable[..., Any], order: int) -> Callable[[Any], Any]:
    return jax.jit(_derivative_in_jax(function, order))


def _in_numpy(function: Any = None, *, derivatives: bool = False) -> Any:
    """Mark a function that takes arrays of NumPy, and perhaps the order of a derivative."""
    if function is None:
        return partial(_in_numpy, derivatives=derivatives)
    function.in_numpy = derivatives
    return function


def _of_series(name: str, series: Callable[[list[Any], int], list[Any]]) -> Callable[..., Any]:
    """A function with its derivatives, for arrays of NumPy and of JAX, from its Taylor series.

    Args:
        name: Name under which the function stands in this module.
        series: Function of the Taylor coefficients of u and an order to the coefficients of the
            result up to this order. A derivative of order n is n! times coefficient n.
    """

    @_in_numpy(derivatives=True)
    def function(u: Any, order: int = 0) -> Any:
        found = series([u, 1.0], order)[order]
        return factorial(order) * found if order else found

    function.__name__ = function.__qualname__ = name
    return function


def _product(first: list[Any], second: list[Any], k: int) -> Any:
    """Taylor coefficient k of a product; coefficients beyond the end of a list are 0."""
    most = min(k, len(first) - 1)
    terms = [first[j] * second[k - j] for j in range(most + 1) if k - j < len(second)]
    return sum(terms[1:], terms[0])


def _times_u(gate: list[Any], u: list[Any]) -> list[Any]:
    """The Taylor series of u g(u)."""
    return [_product(u, gate, k) for k in range(len(gate))]


def _logistic(inner: list[Any], order: int) -> list[Any]:
    """The Taylor series of s = 1 / (1 + exp(-w)), given that of w.

    With r = 1 - s the derivative is s' = s r w', so (k + 1) s_(k+1) = sum_j (s r)_j (w')_(k-j). As
    r is sigmoid(-w), which has its own relative digits, derivatives keep theirs in both tails.
    """

    def sigmoid(w: Any) -> Any:
        if isinstance(w, jax.Array):
            return jax.nn.sigmoid(w)
        with np.errstate(over="ignore"):  # 1 / inf is the value far in the tail
            return 1 / (1 + np.exp(-w))

    s = [sigmoid(inner[0])]
    if not order:
        return s
    r, both, slope = [sigmoid(-inner[0])], [], [k * w for k, w in enumerate(inner)][1:]
    for k in range(order):
        both.append(_product(s, r, k))
        s.append(_product(both, slope, k) / (k + 1))
        r.append(-s[-1])
    return s


def _hyperbolic(inner: list[Any], order: int) -> list[Any]:
    """The Taylor series of tanh(w) = 2 sigmoid(2 w) - 1, whose value has its digits about 0."""
    slopes = _logistic([2 * w for w in inner], order)[1:] if order else []
    return [library(inner[0]).tanh(inner[0]), *(2 * x for x in slopes)]


@_in_numpy(derivatives=True)
def _softplus(u: Any, order: int = 0) -> Any:
    return _sigmoid(u, order - 1) if order else library(u).logaddexp(u, 0.0)


@_in_numpy(derivatives=True)
def _tanhshrink(u: Any, order: int = 0) -> Any:
    return float(order == 1) - _tanh(u, order) if order else u - library(u).tanh(u)


def _mish_series(u: list[Any], order: int) -> list[Any]:
    """u tanh(v), where v = softplus(u) has the derivative sigmoid(u)."""
    slope = _logistic(u, order - 1) if order else []
    inner = [_softplus(u[0]), *(x / (k + 1) for k, x in enumerate(slope))]
    return _times_u(_hyperbolic(inner, order), u)


def _gelu_tanh_series(u: list[Any], order: int) -> list[Any]:
    """u sigmoid(w), where w = 2 sqrt(2 / pi) (u + 0.044715 u^3)."""
    x, scale, cube = u[0], 2 * sqrt(2 / pi), 0.044715
    inner = [_horner((0.0, scale, 0.0, scale * cube), x)]
    if order:
        inner += [_horner((scale, 0.0, 3 * scale * cube), x), 3 * scale * cube * x, scale * cube]
    return _times_u(_logistic(inner, order), u)


_sigmoid = _of_series("_sigmoid", _logistic)
_tanh = _of_series("_tanh", _hyperbolic)
_silu = _of_series("_silu", lambda u, order: _times_u(_logistic(u, order), u))
_mish = _of_series("_mish", _mish_series)
_gelu_tanh = _of_series("_gelu_tanh", _gelu_tanh_series)


@_in_numpy(derivatives=True)
def _gelu(u: Any, order: int = 0) -> Any:
    return Gate(0.0, 1.0, (0.0, 1.0))(u, order) if order else u * cumulative(u)


@_in_numpy(derivatives=True)
def _erf(u: Any, order: int = 0) -> Any:
    if order:
        return Gate(0.0, sqrt(0.5), (2.0,))(u, order)
    if isinstance(u, jax.Array):
        return jax.lax.erf(u)
    from scipy.special import erf

    return erf(u)


@_in_numpy(derivatives=True)
def _sin(u: Any, order: int = 0) -> Any:
    return Wave()(u, order)


def _kinked(name: str, kinks: tuple[float, ...], *pieces: tuple[float, ...]) -> Activation:
    return Activation(kinks=kinks, pieces=pieces, name=name)


ACTIVATIONS: dict[str, Activation] = {
    x.name: x
    for x in (
        power(1),
        power(2),
        leaky_relu(),
        elu(),
        _kinked("relu", (0.0,), (0.0,), (0.0, 1.0)),
        _kinked("relu2", (0.0,), (0.0,), (0.0, 0.0, 1.0)),
        _kinked("relu6", (0.0, 6.0), (0.0,), (0.0, 1.0), (6.0,)),
        _kinked("hardtanh", (-1.0, 1.0), (-1.0,), (0.0, 1.0), (1.0,)),
        _kinked("hardswish", (-3.0, 3.0), (0.0,), (0.0, 0.5, 1 / 6), (0.0, 1.0)),
        _kinked("abs", (0.0,), (0.0, -1.0), (0.0, 1.0)),
        _kinked("step", (0.0,), (0.0,), (1.0,)),
        Activation(_gelu, name="gelu", parts=(Gate(0.0, 1.0, (0.0, 1.0)),)),
        Activation(
            _erf,
            name="erf",
            parts=(Gate(0.0, inf, (-1.0,)), Gate(0.0, sqrt(0.5), (2.0,))),
        ),
        Activation(_sin, name="sin", parts=(Wave(),)),
        _analytic("gelu_tanh", _gelu_tanh, 2.0, 9.0, Gate(0.0, 1.0, (0.0, 1.0))),
        _analytic("tanh", _tanh, pi / 2, 20.0, Gate(0.0, inf, (-1.0,)), Gate(0.0, 0.85, (2.0,))),
        _analytic("sigmoid", _sigmoid, pi, 40.0, Gate(0.0, 1.7, (1.0,))),
        _analytic("silu", _silu, pi, 44.0, Gate(0.0, 1.7, (0.0, 1.0))),
        _analytic("softplus", _softplus, pi, 40.0, Gate(0.0, 1.7, (0.0, 1.0))),
        # The poles of tanh(softplus(u)) are at exp(u) = -1 + i and -1 - i.
        _analytic("mish", _mish, 0.75 * pi, 44.0, Gate(0.0, 1.7, (0.0, 1.0))),
        _analytic(
            "tanhshrink",
            _tanhshrink,
            pi / 2,
            20.0,
            Gate(0.0, inf, (1.0, 1.0)),
            Gate(0.0, 0.85, (-2.0,)),
        ),
    )
}
"""Activations by name.

`gelu` is u Phi(u); `gelu_tanh`, its approximation in GPT-2, is another function and differs by up
to 4e-4 a unit.
"""
