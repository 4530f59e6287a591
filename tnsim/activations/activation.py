"""Activations: what they compute, and the parts whose Gaussian moments are known.

An activation is a polynomial plus parts. A part has either a closed mean under a normal law (gates,
an exponential tail, a wave) or is a remainder, analytic in a strip about the real line, for which
trapezoidal sums converge exponentially.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import comb, inf, pi, sqrt
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.activations.normal import Real, cumulative, gated_moments, smallest
from tnsim.errors import ModelError


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

    def __call__(self, u: Real) -> Real: ...


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

    def mean(self, mean: Real, deviation: Real) -> Real: ...


@dataclass(frozen=True)
class Gate:
    """sum_p weights[p] (u - knot)^p Phi((u - knot) / width).

    Width 0 is a kink, (u - knot)_+^p; infinite width an open gate, which leaves a polynomial.

    Phi(u / width) is the probability that u and noise of deviation `width` are positive: GELU is
    ReLU's gate with noise, and one family of formulas serves both.
    """

    knot: float
    width: float
    weights: tuple[float, ...]
    support = (-inf, inf)

    @property
    def strip(self) -> float:
        return 3.0 * self.width

    def __call__(self, u: Real) -> Real:
        u = u - self.knot
        if self.width == inf:
            return _horner(self.weights, u)
        opened = cumulative(u / self.width) if self.width else jnp.where(u > 0, 1.0, 0.0)
        return _horner(self.weights, u) * opened

    def mean(self, mean: Real, deviation: Real) -> Real:
        moments = gated_moments(mean - self.knot, deviation, self.width, len(self.weights) - 1)
        terms = (w * x for w, x in zip(self.weights, moments, strict=True) if w)
        return sum(terms, jnp.zeros_like(moments[0]))


@dataclass(frozen=True)
class Tail:
    """weight exp(u) for u < 0, zero above: what ELU has beside its pieces."""

    weight: float
    knot = 0.0
    width = 0.0
    strip = 8.5
    support = (-40.0, 0.0)

    def __call__(self, u: Real) -> Real:
        return self.weight * jnp.where(u > 0, 0.0, jnp.exp(jnp.minimum(u, 0.0)))

    def mean(self, mean: Real, deviation: Real) -> Real:
        # E exp(u) 1(u < 0) = exp(m + s^2/2) Phi(-(m + s^2)/s) = exp(-(m/s)^2/2) R((m + s^2)/s),
        # where R(x) = exp(x^2/2) Phi(-x) is a scaled error function, so no large exponents meet
        safe = jnp.maximum(deviation, smallest(jnp.result_type(mean)))
        x = mean / safe + deviation
        inside = jnp.exp(jnp.minimum(mean + deviation**2 / 2, 50.0)) * cumulative(-x)
        outside = jnp.exp(-0.5 * jnp.square(jnp.clip(mean / safe, -40, 40))) * _scaled_tail(x)
        return self.weight * jnp.where(x > 1, outside, inside)


@dataclass(frozen=True)
class Wave:
    """sin(u)."""

    knot = 0.0
    width = inf
    strip = 3.0
    support = (-inf, inf)

    def __call__(self, u: Real) -> Real:
        return jnp.sin(u)

    def mean(self, mean: Real, deviation: Real) -> Real:
        return jnp.exp(-0.5 * deviation**2) * jnp.sin(mean)


@dataclass(frozen=True)
class Remainder:
    """function(u) less gates that share its asymptotes: analytic, and nothing beyond `reach`."""

    function: Callable[[Any], Any]
    strip: float
    less: tuple[Gate, ...] = ()
    reach: float = inf

    @property
    def support(self) -> tuple[float, float]:
        return -self.reach, self.reach

    def __call__(self, u: Real) -> Real:
        return self.function(u) - sum(gate(u) for gate in self.less)


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
        ModelError: Neither or both forms are given, kinks do not increase, or counts differ.

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
        if any(not b > a for a, b in pairwise(kinks)):
            raise ModelError(f"the kinks of an activation increase, found {kinks}")
        if self.strip is not None and not self.strip > 0:
            raise ModelError(f"strip is a positive half-width, found {self.strip}")
        if self.function is not None and self.strip is not None:
            parts = (Remainder(self.function, self.strip),)
        else:
            parts = _gates(kinks, pieces)
        object.__setattr__(self, "parts", parts)
        if not self.name:
            name = getattr(self.function, "__name__", "") if self.function else "piecewise"
            object.__setattr__(self, "name", name)

    @property
    def is_polynomial(self) -> bool:
        """Whether one polynomial says it all, so that every kernel with it is a finite sum."""
        return all(isinstance(x, Gate) and x.width == inf for x in self.parts)

    def __call__(self, x: Any) -> Any:
        """The activation of an array, NumPy for NumPy and JAX for JAX, in the same dtype."""
        if isinstance(x, jax.Array):
            return self._values(x, jnp)
        x = np.asarray(x)
        if self.function is None:
            return self._values(x, np)
        with jax.enable_x64(True):
            return np.asarray(self.function(jnp.asarray(x)), x.dtype)

    def _values(self, x: Any, xp: Any) -> Any:
        if self.function is not None:
            return self.function(x)
        values = _horner(self.pieces[0], x)
        for kink, piece in zip(self.kinks, self.pieces[1:], strict=True):
            values = xp.where(x > kink, _horner(piece, x), values)
        return values

    def __repr__(self) -> str:
        return f"Activation({self.name!r})"


def activation(name: str | Activation) -> Activation:
    """The activation of a name; an `Activation` is returned as it is.

    Args:
        name: A key of `ACTIVATIONS`, or an activation of one's own.

    Raises:
        ModelError: No activation has this name.

    Example:
        >>> activation("relu")(np.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """
    if isinstance(name, Activation):
        return name
    if isinstance(name, str) and name in ACTIVATIONS:
        return ACTIVATIONS[name]
    raise ModelError(
        f"no activation is called {name!r}; there are {', '.join(sorted(ACTIVATIONS))}, "
        "leaky_relu(slope), jump_relu(threshold), elu(alpha), power(exponent), and for others "
        "Activation(function, strip=...) or Activation(kinks=..., pieces=...)"
    )


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


@cache
def elu(alpha: float = 1.0) -> Activation:
    """u for u > 0, alpha (exp(u) - 1) below.

    Example:
        >>> elu()(np.array([0.0, 2.0])).tolist()
        [0.0, 2.0]
    """

    def function(u: Any) -> Any:
        return jnp.where(u > 0, u, alpha * jnp.expm1(jnp.minimum(u, 0.0)))

    # alpha (exp(u) - 1) 1(u < 0) + u_+  =  -alpha + (alpha 1 + u)(u > 0) + alpha exp(u) 1(u < 0)
    return Activation(
        function,
        name="elu" if alpha == 1 else f"elu({alpha!r})",
        parts=(Gate(0.0, inf, (-alpha,)), Gate(0.0, 0.0, (alpha, 1.0)), Tail(alpha)),
    )


def _horner(coefficients: tuple[float, ...], u: Any) -> Any:
    total = coefficients[-1] + 0 * u
    for c in coefficients[-2::-1]:
        total = total * u + c
    return total


def _gates(kinks: tuple[float, ...], pieces: tuple[tuple[float, ...], ...]) -> tuple[Gate, ...]:
    """What every kink adds to the polynomial on its left, in powers of the distance to the kink."""
    gates = [Gate(0.0, inf, pieces[0])] if any(pieces[0]) or not kinks else []
    for kink, left, right in zip(kinks, pieces[:-1], pieces[1:], strict=True):
        size = max(len(left), len(right))
        change = np.zeros(size)
        change[: len(right)] += right
        change[: len(left)] -= left
        shifted = [
            sum(change[q] * comb(q, p) * kink ** (q - p) for q in range(p, size))
            for p in range(size)
        ]
        gates.append(Gate(kink, 0.0, tuple(float(x) for x in shifted)))
    return tuple(gates)


def _scaled_tail(x: Real) -> Real:
    """exp(x^2 / 2) Phi(-x) for x > 1, by the continued fraction of Laplace behind erfcx."""
    x = jnp.maximum(x, 1.0)
    # int_0^inf exp(-x y - y^2 / 2) dy / sqrt(2 pi), in y = 9 z / (x + z ...): Gauss-Legendre panels
    total = jnp.zeros_like(x)
    for start, stop in _TAIL_PANELS:
        for node, weight in _TAIL_RULE:
            z = start + (stop - start) * node
            total = total + (stop - start) * weight * jnp.exp(-z - 0.5 * jnp.square(z / x))
    return total / (x * sqrt(2 * pi))


_TAIL_RULE = tuple(
    zip(
        *(
            (
                0.5 * (a + b)
                for a, b in zip(np.polynomial.legendre.leggauss(16), (1, 0), strict=True)
            )
        ),
        strict=True,
    )
)
_TAIL_PANELS = ((0.0, 2.0), (2.0, 5.0), (5.0, 10.0), (10.0, 18.0), (18.0, 40.0))


def _analytic(
    name: str, function: Callable[[Any], Any], strip: float, reach: float, *gates: Gate
) -> Activation:
    """An analytic activation with the gates that share its asymptotes."""
    return Activation(function, name=name, parts=(*gates, Remainder(function, strip, gates, reach)))


def _gelu(u: Any) -> Any:
    return u * cumulative(u)


def _gelu_tanh(u: Any) -> Any:
    return u * jax.nn.sigmoid(2 * sqrt(2 / pi) * (u + 0.044715 * u**3))


def _silu(u: Any) -> Any:
    return u * jax.nn.sigmoid(u)


def _softplus(u: Any) -> Any:
    return jnp.logaddexp(u, 0.0)


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
            jax.lax.erf,
            name="erf",
            parts=(Gate(0.0, inf, (-1.0,)), Gate(0.0, sqrt(0.5), (2.0,))),
        ),
        Activation(jnp.sin, name="sin", parts=(Wave(),)),
        _analytic("gelu_tanh", _gelu_tanh, 2.0, 9.0, Gate(0.0, 1.0, (0.0, 1.0))),
        _analytic("tanh", jnp.tanh, pi / 2, 20.0, Gate(0.0, inf, (-1.0,)), Gate(0.0, 0.85, (2.0,))),
        _analytic("sigmoid", jax.nn.sigmoid, pi, 40.0, Gate(0.0, 1.7, (1.0,))),
        _analytic("silu", _silu, pi, 44.0, Gate(0.0, 1.7, (0.0, 1.0))),
        _analytic("softplus", _softplus, pi, 40.0, Gate(0.0, 1.7, (0.0, 1.0))),
    )
}
"""Activations by name.

`gelu` is u Phi(u); `gelu_tanh`, its approximation in GPT-2, is another function and differs by up
to 4e-4 a unit.
"""
