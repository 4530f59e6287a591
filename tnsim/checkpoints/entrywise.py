"""Entrywise operations: chains of them are functions of one number, with their kinks.

Between two products a forward pass may compute `0.5 * u * (1 + tanh(...))`: every operation acts on
every entry alone, and all of them on a single value u. Such a chain is a function of one number,
which is given here with all its kinks, the places where a comparison, a clamp or a kinked operation
switches; `curves` says which activation it is. A switch has to be of a piecewise linear function of
u, so that its places are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from tnsim.checkpoints.curves import Curve, curve_of, rounding_of
from tnsim.checkpoints.operations import Operation, is_affine
from tnsim.errors import UnsupportedLayer

Numbers = Any
_WIDE = np.geomspace(1e-12, 1e15, 271)
_BENDS, _STEP = 40.0, 0.5  # sizes of arguments at which functions bend, and steps between places
_ROUNDS, _MOST_PLACES = 24, 8_000


def _softplus(u: Numbers, beta: float = 1.0, threshold: float = 20.0) -> Numbers:
    # Beyond PyTorch's threshold of 20 the function is its asymptote to 2e-9.
    smooth = np.logaddexp(beta * u, 0.0) / beta
    return smooth if threshold >= 20 else np.where(beta * u > threshold, u, smooth)


def _softplus_switches(u: Any, beta: float = 1.0, threshold: float = 20.0) -> list[tuple[Any, Any]]:
    return [] if threshold >= 20 else [(u, threshold / beta)]


def _gelu(u: Numbers, approximate: str = "none") -> Numbers:
    if approximate == "tanh":
        return 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    return u * special.ndtr(u)


def _clamp(u: Numbers, low: Any = None, high: Any = None) -> Numbers:
    u = u if low is None else np.maximum(u, low)
    return u if high is None else np.minimum(u, high)


class _Function(NamedTuple):
    """An entrywise operation.

    Attributes:
        compute: The function of NumPy arrays, with the arguments of the operation.
        switches: Function of the arguments to pairs of values; the operation may have a kink where
            the two of a pair are equal. None for a smooth operation.
        is_linear: Whether it is linear between its switches.
        is_constant: Whether it is constant between its switches.
    """

    compute: Callable[..., Numbers]
    switches: Callable[..., list[tuple[Any, Any]]] | None = None
    is_linear: bool = False
    is_constant: bool = False


def _kinks_at(*places: float) -> Callable[..., list[tuple[Any, Any]]]:
    return lambda u, *_, **__: [(u, place) for place in places]


def _bounds(u: Any, low: Any = None, high: Any = None) -> list[tuple[Any, Any]]:
    return [(u, bound) for bound in (low, high) if bound is not None]


def _between(u: Any, v: Any) -> list[tuple[Any, Any]]:
    return [(u, v)]


def _comparison(function: Callable[..., Numbers]) -> _Function:
    return _Function(function, _between, True, True)


def _logical(function: Callable[..., Numbers]) -> _Function:
    return _Function(function, lambda *several: [(u, 0.0) for u in several], True, True)


FUNCTIONS: dict[str, _Function] = {
    "add": _Function(lambda u, v, alpha=1: u + alpha * v, None, True),
    "sub": _Function(lambda u, v, alpha=1: u - alpha * v, None, True),
    "neg": _Function(np.negative, None, True),
    "mul": _Function(np.multiply, None, True),
    "div": _Function(np.divide, None, True),
    "to": _Function(lambda u, *_, **__: u * 1.0, None, True),
    "clone": _Function(lambda u, **_: u, None, True),
    "alias": _Function(lambda u: u, None, True),
    "detach": _Function(lambda u: u, None, True),
    "relu": _Function(lambda u: np.maximum(u, 0.0), _kinks_at(0.0), True),
    "abs": _Function(np.abs, _kinks_at(0.0), True),
    "sign": _Function(np.sign, _kinks_at(0.0), True, True),
    "clamp": _Function(_clamp, _bounds, True),
    "maximum": _Function(np.maximum, _between, True),
    "minimum": _Function(np.minimum, _between, True),
    "gt": _comparison(np.greater),
    "ge": _comparison(np.greater_equal),
    "lt": _comparison(np.less),
    "le": _comparison(np.less_equal),
    "eq": _comparison(np.equal),
    "ne": _comparison(np.not_equal),
    "heaviside": _Function(np.heaviside, _kinks_at(0.0), True, True),
    "where": _Function(np.where, None, True),
    "logical_and": _logical(np.logical_and),
    "logical_or": _logical(np.logical_or),
    "logical_not": _logical(np.logical_not),
    "bitwise_and": _logical(np.logical_and),
    "bitwise_or": _logical(np.logical_or),
    "bitwise_not": _logical(np.logical_not),
    "pow": _Function(np.power),
    "exp": _Function(np.exp),
    "expm1": _Function(np.expm1),
    "exp2": _Function(np.exp2),
    "log": _Function(np.log),
    "log1p": _Function(np.log1p),
    "logaddexp": _Function(np.logaddexp),
    "sqrt": _Function(np.sqrt),
    "rsqrt": _Function(lambda u: 1 / np.sqrt(u)),
    "reciprocal": _Function(lambda u: 1 / u),
    "sigmoid": _Function(special.expit),
    "tanh": _Function(np.tanh),
    "erf": _Function(special.erf),
    "erfc": _Function(special.erfc),
    "sin": _Function(np.sin),
    "cos": _Function(np.cos),
    "atan": _Function(np.arctan),
    "sinh": _Function(np.sinh),
    "cosh": _Function(np.cosh),
    "asinh": _Function(np.arcsinh),
    "gelu": _Function(_gelu),
    "softplus": _Function(_softplus, _softplus_switches),
    "mish": _Function(lambda u: u * np.tanh(np.logaddexp(u, 0.0))),
}
"""Entrywise operations by name."""


def is_entrywise(name: str) -> bool:
    """Whether an operation of a name acts on every entry alone."""
    return name in FUNCTIONS


class _Facts(NamedTuple):
    """What is known of a value in a chain.

    Attributes:
        kinks: Places where it may not be analytic.
        is_linear: Whether it is linear between its kinks.
        is_constant: Whether it is constant between its kinks.
        is_wave: Whether it goes up and down without an end.
    """

    kinks: frozenset[float] = frozenset()
    is_linear: bool = True
    is_constant: bool = False
    is_wave: bool = False


_CONSTANT = _Facts(is_constant=True)


@dataclass(frozen=True, eq=False)
class Chain:
    """Entrywise operations on a single value.

    Args:
        end: The last operation.
        start: Operation that gives the value.
        scalars: Numbers that other operations give, for those that are read besides.
    """

    end: Operation
    start: Operation
    scalars: Mapping[Operation, float]

    @cached_property
    def steps(self) -> tuple[Operation, ...]:
        """The operations behind the start, each after those that it reads."""
        found: dict[Operation, None] = {}  # a set that keeps its order

        def visit(one: Operation) -> None:
            if self._varies(one) and one is not self.start and one not in found:
                for read in one.reads:
                    visit(read)
                found[one] = None

        visit(self.end)
        return tuple(found)

    def __call__(self, u: np.ndarray) -> np.ndarray:
        """The function at numbers."""
        return np.asarray(self._at(u)(self.end), np.float64)

    def curve(self) -> Curve:
        """The activation that the function is, or the polynomial.

        Raises:
            UnsupportedLayer: It is neither, or it switches at places that are not known exactly.
        """
        kinks = sorted(self._facts[self.end].kinks)
        rounding = max(map(rounding_of, self._numbers()), default=rounding_of(1.0))
        return curve_of(self, kinks, rounding, self._places())

    @property
    def key(self) -> Any:
        """What the function is made of: chains of equal keys are the same function."""
        number = {one: n for n, one in enumerate((self.start, *self.steps))}

        def said(given: Any) -> Any:
            if not isinstance(given, Operation):
                return type(given).__name__, repr(given)
            return number[given] if given in number else repr(self.scalars[given])

        return tuple(
            (one.name, *map(said, one.arguments), repr(one.keywords)) for one in self.steps
        )

    @property
    def dominators(self) -> list[Operation]:
        """The values of each of which alone the last operation is a function, from the start on."""
        read: set[Operation] = set()  # by operations further on
        found = []
        for one in (*reversed(self.steps), self.start):
            read.discard(one)
            if not read and one is not self.end:
                found.append(one)
            read |= set(filter(self._varies, one.reads if one is not self.start else ()))
        return found[::-1]

    @property
    def is_line(self) -> bool:
        """Whether the operations are those of a line alone."""
        return all(is_affine(one.name) for one in self.steps) and self._facts[self.end].is_linear

    @property
    def names(self) -> list[str]:
        """Names of the operations, in order, each once."""
        names = dict.fromkeys(one.name for one in self.steps)
        return [name for name in names if name not in ("to", "clone", "alias", "detach")]

    def _varies(self, argument: Any) -> bool:
        return isinstance(argument, Operation) and argument not in self.scalars

    def _at(self, u: np.ndarray) -> Callable[[Any], Any]:
        """The value of every operation, and of every argument, at numbers."""
        known: dict[Operation, Any] = {self.start: u}

        def value(given: Any) -> Any:
            if not isinstance(given, Operation):
                return given
            return known[given] if given in known else self.scalars[given]

        with np.errstate(all="ignore"):  # numbers that no float holds are refused where they count
            for one in self.steps:
                given = map(value, one.arguments)
                known[one] = FUNCTIONS[one.name].compute(*given, **dict(one.keywords))
        return value

    def _places(self) -> np.ndarray:
        """Numbers at which a value on the way is of the size at which functions bend.

        A bend is narrow, or far out, where a value on the way has a large slope or a large shift:
        `exp(-(1000 u - 5)^2)`. Between places where that value differs by a step, others are added.
        """
        u = np.concatenate([-_WIDE[::-1], [0.0], _WIDE])
        first = len(u)
        inner = [one for one in self.steps if one is not self.end and not self._facts[one].is_wave]
        for _ in range(_ROUNDS):
            apart = np.zeros(len(u) - 1, bool)
            for value in map(self._at(u), inner):
                if np.shape(value) == u.shape:
                    with np.errstate(all="ignore"):
                        moved = np.abs(np.diff(np.clip(value * 1.0, -_BENDS, _BENDS)))
                    apart |= moved > _STEP
            low, high = u[:-1], u[1:]
            apart &= high - low > 1e-14 * np.maximum(abs(low), abs(high))
            if not apart.any() or len(u) > _MOST_PLACES:
                break
            between = (low + np.linspace(0, 1, 9)[1:-1, None] * (high - low))[:, apart]
            u = np.sort(np.append(u, between))
        return u if len(u) > first else u[:0]

    @cached_property
    def _facts(self) -> dict[Operation, _Facts]:
        """What is known of the values on the way."""
        known = {self.start: _Facts()}

        def of(arguments: Iterable[Any]) -> list[_Facts]:
            return [known[x] if self._varies(x) else _CONSTANT for x in arguments]

        for one in self.steps:
            function = FUNCTIONS[one.name]
            parts = of(one.arguments)
            kinks = frozenset[float]().union(*(part.kinks for part in parts))
            if function.switches is not None:
                for pair in function.switches(*one.arguments, **dict(one.keywords)):
                    kinks |= self._crossings(pair, of(pair))
            is_linear = function.is_linear and all(part.is_linear for part in parts)
            is_constant = function.is_linear and all(part.is_constant for part in parts)
            if one.name in ("mul", "div"):
                factors = [part for part in parts if not part.is_constant]
                divides = one.name == "div" and self._varies(one.arguments[1])
                is_linear = is_linear and len(factors) < 2 and not divides
            is_wave = one.name in ("sin", "cos") or any(part.is_wave for part in parts)
            is_constant = is_constant or function.is_constant
            known[one] = _Facts(kinks, is_linear, is_constant, is_wave)
        return known

    def _crossings(self, pair: tuple[Any, Any], facts: Sequence[_Facts]) -> set[float]:
        """Places where two piecewise linear values are equal."""
        if not all(one.is_linear for one in facts):
            raise UnsupportedLayer("a comparison of what is no piecewise linear function of it")
        kinks = sorted(facts[0].kinks | facts[1].kinks)
        ends = [-math.inf, *kinks, math.inf]
        found = set()
        for low, high in pairwise(ends):
            if math.isinf(low) and math.isinf(high):
                places = [0.0, 1.0]
            elif math.isinf(low):
                places = [high - 2.0, high - 1.0]
            elif math.isinf(high):
                places = [low + 1.0, low + 2.0]
            else:
                places = [low + (high - low) / 4, low + 3 * (high - low) / 4]
            u = np.array(places)
            first, second = (np.broadcast_to(x * 1.0, u.shape) for x in map(self._at(u), pair))
            with np.errstate(invalid="ignore"):  # a bound may be infinite, which nothing crosses
                difference = first - second
                slope = (difference[1] - difference[0]) / (u[1] - u[0])
            if slope:
                root = float(u[0] - difference[0] / slope)
                if low < root < high:
                    found.add(float(f"{root:.15g}") if abs(root) > 1e-300 else 0.0)
        return found

    def _numbers(self) -> set[float]:
        """All numbers that the operations bring with them."""
        given = [
            self.scalars[x] if isinstance(x, Operation) and x in self.scalars else x
            for one in self.steps
            for x in one.given
        ]
        return {float(x) for x in given if isinstance(x, (int, float))}


def start_of(
    operation: Operation,
    starts: Mapping[Operation, Operation],
    scalars: Mapping[Operation, float],
    shapes: Mapping[Operation, Sequence[int]],
) -> Operation:
    """The value of which an operation is an entrywise function, as early as there is one.

    Args:
        operation: An operation that depends on the input.
        starts: The same of the operations before it; operations that do not depend on the input
            are missing.
        scalars: Numbers of operations that do not depend on the input and give one number.
        shapes: Shapes of the results.

    Returns:
        The operation that gives the value; the operation itself where it is no such function.
    """
    if not is_entrywise(operation.name):
        return operation
    found = set()
    for one in operation.reads:
        if one in starts:
            if tuple(shapes[one]) != tuple(shapes[operation]):
                return operation
            found.add(starts[one])
        elif one not in scalars:
            return operation
    return found.pop() if len(found) == 1 else operation
