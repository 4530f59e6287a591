"""Names of curves: entrywise functions as known activations, to rounding, from their values.

A sequence of entrywise operations of one value is a curve: a function of one number, smooth between
its *kinks*, which are the constants of its comparisons and clamps. A curve is a polynomial on each
piece between kinks, or `factor f(scale u + shift) + offset` of a known activation f, perhaps with a
line beside f. Either way a few numbers say all of it, and places of the curve say the numbers: its
asymptotes, where these meet, and how fast one goes over to the other. Steps of Newton give their
last digits, and values at thousands of places, of sizes 1e-3 to 1e4 and on either side of every
kink, decide whether the curve is what the numbers say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from tnsim.activations.activation import (
    ACTIVATIONS,
    Activation,
    activation,
    elu,
    jump_relu,
    leaky_relu,
    plus_line,
    power,
)
from tnsim.errors import UnsupportedLayer

ROUNDING = 2.0**-46
"""Relative error of constants that are told in float64."""

MOST_POWERS = 8
"""Highest power of a polynomial: of higher ones the coefficients lose digits."""

_TOLERANCE = 4e-13  # of values after some operations, by the size of the function up to there
_SELU = 1.6732632423543772  # the multiple of the exponential in SELU
_NEAR = 1e-12  # of a kink, which is computed from the constants of operations
_SIZES = np.geomspace(1e-3, 1e4, 400)
_PLACES = np.concatenate([-_SIZES, [0.0], _SIZES, np.linspace(-30, 30, 3000)])
_FAR = np.geomspace(1e-6, 2.0**20, 600)
_AROUND = np.linspace(-12.0, 12.0, 96)
_SATURATED = {"gelu_tanh": 16.0}  # beyond, and beyond 100 of others, a function may overflow
_WINDOW = np.cos((np.arange(32) + 0.5) * np.pi / 32)

# Two asymptotes of different slopes: the part of the way to the right one at which a landmark is.
_GATES = {"gelu": 0.75, "silu": 0.75, "gelu_tanh": 0.75, "mish": 0.75, "softplus": 1.25}
# Two parallel asymptotes, and where three quarters of the way between them are done.
_STEPS = {
    "sigmoid": math.log(3),
    "tanh": math.atanh(0.5),
    "tanhshrink": math.atanh(0.5),
    "erf": 0.4769362762044699,
}


@dataclass(frozen=True)
class Curve:
    """An entrywise function as `factor f(scale u + shift) + offset`.

    Attributes:
        function: Activation f.
        scale: Number by which u is multiplied.
        shift: Number that is added to the multiple of u.
        factor: Number by which the activation is multiplied.
        offset: Number that is added.

    Example:
        >>> curve_of(lambda u: 3 * np.maximum(u, 0) + 1, kinks=[0.0])
        Curve(function=Activation('relu'), scale=1.0, shift=0.0, factor=3.0, offset=1.0)
    """

    function: Activation
    scale: float = 1.0
    shift: float = 0.0
    factor: float = 1.0
    offset: float = 0.0

    @property
    def is_polynomial(self) -> bool:
        """Whether the function is one polynomial."""
        return self.function.is_polynomial

    def __call__(self, u: np.ndarray) -> np.ndarray:
        return self.factor * self.function(self.scale * u + self.shift) + self.offset

    @property
    def detours(self) -> tuple[bool, ...]:
        """Whether numbers stand beside an activation with a name, the least welcome first."""
        beside = (self.function.name not in ACTIVATIONS, self.offset != 0, self.shift != 0)
        return (*beside, self.scale != 1, self.factor != 1)


def curve_of(
    function: Callable[[np.ndarray], np.ndarray],
    kinks: Sequence[float] = (),
    rounding: float = ROUNDING,
    places: Sequence[float] | np.ndarray = (),
) -> Curve:
    """The known activation, or the polynomials between kinks, that an entrywise function is.

    Args:
        function: Function of float64 arrays, entry by entry, analytic between the kinks. Where it
            overflows beyond the reach of an activation, it is what it is before. An operation that
            takes its asymptote before it is there to rounding, as softplus of PyTorch beyond 20,
            is given without this switch.
        kinks: All places where the function may not be analytic.
        rounding: Relative error of the constants in the function, see `rounding_of`.
        places: Numbers at which the function is to be seen besides, as it is narrow there.

    Returns:
        The curve, by a known activation if it is one, with as few numbers beside it as possible.
        Of polynomials the activation holds the coefficients.

    Raises:
        UnsupportedLayer: The function is neither a known activation nor made of polynomials, or
            it has no number somewhere.

    Example:
        >>> curve_of(lambda u: u / (1 + np.exp(-1.5 * u))).function
        Activation('silu')
    """
    with np.errstate(all="ignore"):
        curve = _Samples(function, kinks, max(_TOLERANCE, rounding), np.asarray(places, float))
        found = curve.polynomials() or [*curve.smooth(), *curve.with_tails()]
        if not found:
            raise UnsupportedLayer(curve.refusal())
        return min(found, key=lambda one: one.detours)


def rounding_of(number: float) -> float:
    """The relative error with which a number stands for a constant.

    Numbers of few digits, as 0.5 and 3001, are exact. Others that float32 holds were rounded to
    it, and numbers of ten digits or more to these digits.

    Example:
        >>> rounding_of(0.5) == ROUNDING, rounding_of(0.7978845608)
        (True, 4e-09)
    """
    if not number or not math.isfinite(number):
        return ROUNDING
    digits = len(Decimal(repr(float(number))).normalize().as_tuple().digits)
    with np.errstate(over="ignore", under="ignore"):
        if digits < 8 or float(np.float16(number)) == number:
            return ROUNDING
        if float(np.float32(number)) == number:
            return 4 * 2.0**-24
    return 4 * 10.0 ** (1 - digits) if 10 <= digits <= 14 else ROUNDING


class _Samples:
    """A function of one number with its pieces, and its values at many places."""

    def __init__(
        self,
        function: Callable[[np.ndarray], np.ndarray],
        kinks: Sequence[float],
        tolerance: float,
        places: np.ndarray,
    ) -> None:
        self.function, self.tolerance = function, tolerance
        self.kinks: list[float] = []
        for kink in sorted(map(float, kinks)):
            if not self.kinks or kink - self.kinks[-1] > _NEAR * max(1.0, abs(kink)):
                self.kinks.append(kink)
            elif kink - self.kinks[-1] > 1e-3 * _NEAR * abs(kink):  # and not by rounding
                self._check_same(self.kinks[-1], kink)
        self.pieces = list(pairwise([-math.inf, *self.kinks, math.inf]))
        steps = np.geomspace(1e-9, 0.5, 30)
        rows = [_PLACES, places]
        for low, high in self.pieces:
            width = min(high - low, 2e4)
            rows += [low + width * steps] if low > -math.inf else []
            rows += [high - width * steps] if high < math.inf else []
        u = np.concatenate(rows)
        for kink in self.kinks:  # so near to it rounding decides on which side a number is
            u = u[np.abs(u - kink) > 0.25 * _NEAR * max(1.0, abs(kink))]
        self.u, self.values = u, self.at(u)
        self.at_kinks = self.at(np.array(self.kinks))

    def _check_same(self, low: float, high: float) -> None:
        """Raise `UnsupportedLayer` where a function changes between two kinks taken as one."""
        values = self.at(np.linspace(low, high, 5))
        if not np.ptp(values) <= 1e-3 * np.abs(values).max():
            raise UnsupportedLayer(
                f"the function has kinks at {low:.17g} and at {high:.17g}, which are too near to "
                "one another to be told apart"
            )

    def at(self, u: np.ndarray) -> np.ndarray:
        """Values of the function."""
        return np.asarray(self.function(u), dtype=np.float64)

    def refusal(self) -> str:
        """Why the function is no curve that is known here."""
        places = np.append(self.u, self.kinks)
        missing = places[~np.isfinite(np.append(self.values, self.at_kinks))]
        if len(missing):
            return f"the function has no finite value at {missing[np.argmin(abs(missing))]:.6g}"
        if not self.kinks:
            return "the function is neither a polynomial nor a known activation"
        places = ", ".join(f"{kink:.6g}" for kink in self.kinks)
        return (
            f"the function, with kinks at {places}, is neither a known activation nor polynomials "
            "between the kinks, of which one holds at each kink"
        )

    def polynomials(self) -> list[Curve]:
        """The ways in which the function is polynomials between kinks; none for other functions."""
        whole = self._polynomial(-math.inf, math.inf, [])
        if whole is not None:
            error = abs(_horner(whole, np.array(self.kinks)) - self.at_kinks)
            close = error <= self.tolerance * _size(whole, 1 + abs(np.array(self.kinks)))
            return [_polynomial_curve(whole)] if close.all() else []
        known: dict[int, np.ndarray] = {}
        # Wide pieces next to zero say coefficients best, and others may have the same.
        windows = [_window(*piece) for piece in self.pieces]
        for n in sorted(range(len(windows)), key=lambda n: windows[n][2:]):
            found = self._polynomial(*self.pieces[n], list(known.values()))
            if found is None:
                return []
            known[n] = found
        kinks: list[float] = []
        pieces = [known[0]]
        sides = []  # at each kink, whether the polynomials on the left and on the right hold
        for n, (kink, value) in enumerate(zip(self.kinks, self.at_kinks, strict=True)):
            both = pieces[-1], known[n + 1]
            holds = [
                abs(_horner(one, kink) - value) <= self.tolerance * _size(one, 1 + abs(kink))
                for one in both
            ]
            if both[0] is not both[1]:
                kinks.append(kink)
                pieces.append(both[1])
                sides.append(holds)
            elif not holds[0]:
                return []  # a value of its own at a single number
        if not kinks:
            return [_polynomial_curve(pieces[0])]
        ends = [-math.inf, *kinks, math.inf]
        places = np.append(self.u, kinks)
        size = np.zeros_like(places)
        for one, low, high in zip(pieces, ends, ends[1:], strict=False):
            size += np.where((places > low) & (places <= high), _size(one, places), 0.0)
        reach = 4 * max(1.0, *map(abs, kinks))
        named = [
            self._beside(function, scale, shift, reach)
            for function, scale, shift in _kinked(kinks, pieces)
        ]
        found = [one for one in named if one and self._fits(one, places, size)]
        if found or not all(map(any, sides)):
            return found
        # At a kink of an activation the left piece holds: where it is the right one, the kink is
        # the number before.
        before = [k if left else _before(k) for k, (left, _) in zip(kinks, sides, strict=True)]
        if len(kinks) == 1 and [list(one) for one in pieces] == [[0.0], [0.0, 1.0]]:
            return [Curve(jump_relu(before[0]))]
        return [Curve(Activation(kinks=tuple(before), pieces=tuple(map(tuple, pieces))))]

    def _polynomial(
        self, low: float, high: float, known: Sequence[np.ndarray]
    ) -> np.ndarray | None:
        """Coefficients of 1, u, u^2, ... on an interval, one of the known if it fits."""
        inside = (self.u > low) & (self.u < high)
        u, values = self.u[inside], self.values[inside]
        start, stop, *_ = _window(low, high)
        nodes = (start + stop) / 2 + (stop - start) / 2 * _WINDOW
        at_nodes = self.at(nodes)
        largest, width = np.abs(at_nodes).max(), max(abs(start), abs(stop))

        def holds(one: np.ndarray) -> bool:
            error = abs(_horner(one, u) - values)
            return bool(np.all(error <= self.tolerance * (_size(one, u) + largest)))

        if not np.isfinite(values).all() or not np.isfinite(largest):
            return None
        for one in known:
            if holds(one):
                return one
        waves = np.polynomial.chebyshev.chebvander(_WINDOW, MOST_POWERS)
        series = np.linalg.lstsq(waves, at_nodes)[0]
        if np.abs(waves @ series - at_nodes).max() > self.tolerance * largest:
            return None
        powers = np.arange(1 + max(np.flatnonzero(abs(series) > 2e-14 * largest), default=0))
        # First the coefficients in the window, then to the same number of digits at all sizes.
        every, at_every = np.append(nodes, u), np.append(at_nodes, values)
        rows = (every[:, None] / width) ** powers
        weights = np.append(np.ones_like(nodes), np.zeros_like(u))
        for _ in range(3):
            columns = rows * weights[:, None]
            sizes = np.linalg.norm(columns, axis=0)
            scaled = np.linalg.lstsq(columns / sizes, at_every * weights)[0] / sizes
            scaled[abs(scaled) <= 4e-15 * abs(scaled).sum()] = 0.0
            weights = 1 / (abs(rows) @ abs(scaled) + 1e-9 * largest + 1e-300)
        found = scaled / width**powers
        # Coefficients of few digits say as much, if they are as near to the values.
        large = abs(scaled) > 1e-12 * abs(scaled).sum()
        neat = np.array([_neat(x, 1e-12 * abs(x)) for x in found * large])
        errors = [max(abs(_horner(one, every) - at_every) * weights) for one in (neat, found)]
        best = neat if errors[0] <= 2 * errors[1] + 1e-15 else found
        return best if holds(best) else None

    def smooth(self) -> Iterator[Curve]:
        """The ways in which the function is an activation without kinks."""
        for name, scale, shift in self._starts():
            wave: Any = ACTIVATIONS[name].function
            u = (_AROUND - shift) / scale
            values = self.at(u)
            largest = np.abs(values).max()
            # The activation of `stretch x + move` with a line beside it, for x = scale u + shift.
            stretch, move = 1.0, 0.0
            line = [_AROUND, np.ones_like(u)]
            for error in (1e-3, 1e-5, 1e-8, 1e-8):
                x = stretch * _AROUND + move
                columns = np.stack([wave(x), *line, wave(x, 1), wave(x, 1) * _AROUND], 1)
                if not np.isfinite(largest):
                    break
                numbers = np.linalg.lstsq(columns[:, :3], values)[0]
                rest = values - columns[:, :3] @ numbers
                if not np.abs(rest).max() <= error * largest:
                    break
                columns[:, 3:] *= numbers[0]
                *_, further, more = np.linalg.lstsq(columns, rest)[0]
                stretch, move = stretch + more, move + further
            else:
                scale, shift = stretch * scale, stretch * shift + move
                if name == "sin":  # whose sign is the factor's
                    shift = math.remainder(shift, math.pi)
                    if shift < 1e-9 - math.pi / 2:  # a cosine, which rounding puts at either end
                        shift += math.pi
                near, error = 4 * self.tolerance, 1e-14 * (1 + abs(shift))
                whole = _neat(scale, error * abs(scale), near)
                for b, d in ((whole, _neat(shift * whole / scale, error, near)), (scale, shift)):
                    found = self._beside(ACTIVATIONS[name], b, d, 12 / abs(b), -d / b, True)
                    if found and self._fits_all_along(found, _SATURATED.get(name, 100.0)):
                        yield found
                        break

    def with_tails(self) -> Iterator[Curve]:
        """The ways in which the function is an ELU: an exponential that meets a line at a kink."""
        for kink, top in zip(self.kinks, self.at_kinks, strict=True):
            for side in (1.0, -1.0):
                left = self._asymptote(kink - side * _FAR)
                if left is None:
                    continue
                # Beyond the kink a line, and before it the line of far out and an exponential.
                slope, offset = side * left[0], left[1] + left[0] * kink - top
                before = self.at(kink - side * _FAR) - top + slope * _FAR - offset
                half = _crossing(_FAR, before / -offset, 0.5) if offset else None
                if half is None:
                    continue
                rate, height = math.log(2) / half, -offset
                for _ in range(6):
                    v = (_AROUND - 12.1) / rate
                    wave = np.exp(rate * v)
                    columns = np.stack([wave, v, np.ones_like(v), height * v * wave], 1)
                    values = self.at(kink + side * v) - top
                    rest = values - height * wave
                    if not np.isfinite(rest).all():
                        break
                    more, slope, offset, faster = np.linalg.lstsq(columns, rest)[0]
                    rate, height = rate + faster, height + more
                else:
                    ahead = self.at(kink + side * np.array([4.0, 8.0]))
                    factor = ((ahead[1] - ahead[0]) / 4 - slope) / rate
                    if not factor or not rate > 0:
                        continue
                    alpha = _neat(height / factor, 1e-13 * abs(height / factor), 4 * self.tolerance)
                    if abs(alpha - _SELU) <= 4 * self.tolerance:
                        alpha = _SELU
                    rate = _neat(rate, 1e-14 * rate, 4 * self.tolerance)
                    shift = _neat(-side * rate * kink, 0.0)
                    reach = 12 / rate
                    found = self._beside(elu(alpha), side * rate, shift, reach, kink, True)
                    if found and self._fits_all_along(found):
                        yield found

    def _starts(self) -> Iterator[tuple[str, float, float]]:
        """Analytic activations, with the scale and the shift that asymptotes and landmarks say."""
        left, right = self._asymptote(-_FAR), self._asymptote(_FAR)
        if left is None or right is None:
            yield from self._waves()
        elif abs(right[0] - left[0]) > 1e-9 * (left[2] + right[2]):
            meet = (left[1] - right[1]) / (right[0] - left[0])
            for side, (slope, offset, _), other in ((1, left, right), (-1, right, left)):
                u = meet + side * _FAR
                way = (self.at(u) - slope * u - offset) / ((other[0] - slope) * (u - meet))
                for name, level in _GATES.items():
                    distance = _crossing(_FAR, way, level)
                    if distance:
                        scale = side * _landmark(name) / distance
                        yield name, scale, -scale * meet
        elif right[1] != left[1]:
            u = np.concatenate([-_FAR[::-1], [0.0], _FAR])
            for _ in range(4):  # the middle, between ever nearer places
                way = (self.at(u) - left[0] * u - left[1]) / (right[1] - left[1])
                middle = _crossing(u, way, 0.5)
                if middle is None:
                    return
                n = int(np.clip(np.searchsorted(u, middle), 1, len(u) - 1))
                u = np.linspace(u[max(n - 2, 0)], u[min(n + 1, len(u) - 1)], 65)
            u = middle + _FAR
            way = (self.at(u) - left[0] * u - left[1]) / (right[1] - left[1])
            distance = _crossing(_FAR, way, 0.75)
            if distance:
                for name, landmark in _STEPS.items():
                    for scale in (landmark / distance, -landmark / distance):
                        yield name, scale, -scale * middle

    def _asymptote(self, u: np.ndarray) -> tuple[float, float, float] | None:
        """Slope and offset of the line far out, and the error of slopes; None for no line."""
        values = self.at(u)
        last = int(max(np.flatnonzero(np.isfinite(values)), default=0))
        if last < 200:
            return None
        (a, b, c), (x, y, z) = (row[last - 40 : last + 1 : 20] for row in (u, values))
        slope = (z - x) / (c - a)
        if not abs(y - x - slope * (b - a)) <= 1e-12 * (abs(x) + abs(z)):
            return None
        return slope, z - slope * c, (abs(x) + abs(z)) / abs(c)

    def _waves(self) -> Iterator[tuple[str, float, float]]:
        """Waves beside a line: their second differences y have y_+ + y_- = 2 cos(scale h) y."""
        for h in 2.0 ** np.arange(-10, 8):
            y = np.diff(self.at(0.1234 + h * np.arange(40)), 2)
            sums, middle = y[2:] + y[:-2], y[1:-1]
            half = middle @ sums / (2 * middle @ middle)
            if abs(half) < 1 and np.abs(sums - 2 * half * middle).max() < 1e-9 * abs(y).max():
                scale = math.acos(half) / h
                u = _AROUND / scale
                columns = [np.sin(_AROUND), np.cos(_AROUND), u, np.ones_like(u)]
                sine, cosine, *_ = np.linalg.lstsq(np.stack(columns, 1), self.at(u))[0]
                yield "sin", scale, math.atan2(cosine, sine)
                return

    def _beside(
        self,
        function: Activation,
        scale: float,
        shift: float,
        reach: float,
        centre: float = 0.0,
        has_line: bool = False,
    ) -> Curve | None:
        """An activation of `scale u + shift` with the factor, offset and line that fit best."""
        u = centre + reach * _AROUND / 12
        x, values = scale * u + shift, self.at(u)
        columns = np.stack([function(x), np.ones_like(x), x], 1)
        largest = np.abs(values).max()
        kept = [0, 1, 2] if has_line else [0, 1]
        numbers = np.zeros(3)
        for _ in range(2):
            if 0 not in kept or not np.isfinite(columns).all() or not np.isfinite(largest):
                return None
            numbers = np.zeros(3)
            numbers[kept] = np.linalg.lstsq(columns[:, kept], values)[0]
            sizes = np.abs(columns * numbers).max(0)
            kept = [n for n in kept if sizes[n] > 4 * self.tolerance * largest]
        if 0 not in kept:
            return None
        factor = _neat(numbers[0], 1e-14 * abs(numbers[0]), 4 * self.tolerance)
        offset = _neat(numbers[1], 1e-15 * largest)
        if numbers[2]:
            slope = numbers[2] / factor
            function = plus_line(function, _neat(slope, 1e-14 * (1 + abs(slope))))
        return Curve(function, float(scale), float(shift), factor, offset)

    def _fits_all_along(self, curve: Curve, reach: float = math.inf) -> bool:
        """Whether an activation with its transition is the function, as far as it has values."""
        local = (np.linspace(-40.0, 40.0, 801) - curve.shift) / curve.scale
        values = self.at(local)
        used = np.isfinite(values)
        order = np.argsort(local[used])
        steepest = np.abs(np.diff(values[used][order]) / np.diff(local[used][order])).max(initial=0)
        near = np.abs(curve.scale * local + curve.shift) <= 4
        places = np.concatenate([self.u, self.kinks, local])
        size = np.abs(values[near]).max() + steepest * abs(places)
        return self._fits(curve, places, size, reach)

    def _fits(
        self, curve: Curve, places: np.ndarray, size: np.ndarray, reach: float = math.inf
    ) -> bool:
        """Whether a curve has the values of the function, where this has some within a reach."""
        values = self.at(places)
        beyond = ~np.isfinite(values) & (abs(curve.scale * places + curve.shift) > reach)
        return bool(np.all(beyond | (abs(curve(places) - values) <= self.tolerance * size)))


def _kinked(
    kinks: Sequence[float], pieces: Sequence[np.ndarray]
) -> Iterator[tuple[Activation, float, float]]:
    """Activations of polynomial pieces, with the scale and the shift that take kinks to theirs."""
    for known in ACTIVATIONS.values():
        for sign in (1, -1) if known.kinks and len(known.kinks) == len(kinks) else ():
            ends = known.kinks[::sign]
            several = len(kinks) > 1
            scale = (ends[-1] - ends[0]) / (kinks[-1] - kinks[0]) if several else float(sign)
            yield known, scale, ends[0] - scale * kinks[0] + 0.0
    if len(kinks) > 1 or max(map(len, pieces)) != 2:
        return
    (kink,) = kinks
    if kink:
        # u 1(u > t) = t j(u / t) with j of threshold 1, so that all thresholds are one activation.
        yield jump_relu(1.0), 1 / kink, 0.0
    left, right = (float(one[1]) if len(one) > 1 else 0.0 for one in pieces)
    for sign, slope, other in ((1.0, right, left), (-1.0, left, right)):
        if abs(slope) > abs(other) > 0:
            yield leaky_relu(_neat(other / slope, 1e-14)), sign, -sign * kink + 0.0


def _polynomial_curve(coefficients: np.ndarray) -> Curve:
    """A polynomial, where it can be as a power with numbers beside it."""
    degree = len(coefficients) - 1
    if degree and not coefficients[1:degree].any():
        factor, offset = float(coefficients[degree]), float(coefficients[0])
        return Curve(power(degree), factor=factor, offset=offset)
    return Curve(Activation(pieces=(tuple(coefficients),), name="polynomial"))


def _before(kink: float) -> float:
    """The number before a kink, no number that arithmetic may take for zero."""
    return float(np.nextafter(kink, -np.inf)) if kink else -float(np.finfo(np.float64).tiny)


@cache
def _landmark(name: str) -> float:
    """Where a gate is at its level on the way from one asymptote to the other."""
    x = np.linspace(0.01, 10.0, 100_000)
    landmark = _crossing(x, activation(name)(x) / x, _GATES[name])
    assert landmark is not None
    return landmark


def _crossing(u: np.ndarray, values: np.ndarray, level: float) -> float | None:
    """Where values first cross a level, between two places on a line."""
    above = values > level
    n = int(np.argmax(above != above[0]))
    low, high = values[n - 1] - level, values[n] - level
    if not n or not math.isfinite(low - high):
        return None
    return float(u[n - 1] + (u[n] - u[n - 1]) * low / (low - high))


def _neat(value: float, error: float, near: float = 0.0) -> float:
    """The number of few digits from which a number differs by rounding, 0 or 1 at first."""
    for whole in (0.0, 1.0, -1.0):
        if abs(value - whole) <= near:
            return whole
    short = float(f"{value:.12g}")
    return short if abs(short - value) <= error else float(value)


def _window(low: float, high: float) -> tuple[float, float, float, float]:
    """A part of an interval next to zero; its relative width, negative, and its distance."""
    centre = min(max(0.0, low), high)
    reach = max(1.0, abs(centre))
    start, stop = max(low, centre - reach), min(high, centre + reach)
    return start, stop, (start - stop) / reach, abs(centre)


def _horner(coefficients: np.ndarray, u: Any) -> Any:
    return np.polynomial.polynomial.polyval(u, coefficients)


def _size(coefficients: np.ndarray, u: Any) -> Any:
    """The sum of the sizes of the terms of a polynomial, of which its rounding is a part."""
    return np.polynomial.polynomial.polyval(abs(u), abs(coefficients))
