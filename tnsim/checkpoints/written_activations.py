"""Activations that a forward pass writes out, such as `x * torch.sigmoid(x)`.

Elementwise operations on a single value u compute a *formula*: on each interval between kinks a
ratio of polynomials in u and in atoms, which are `exp`, `erf` and `sin` of polynomials in u, and
the logarithm of 1 + exp. Operations of PyTorch become operations on formulas, comparisons and
choices among them, so that

    sigmoid(u) = T / (1 + T),    tanh(u / 2) = (T - 1) / (T + 1),    T = exp(u)

and every way to write an activation ends in an equal formula. Two ratios are equal where the
products of numerators and denominators, crosswise, have the same coefficients, which is a matter of
algebra and not of values at some numbers. A formula is a known activation f where it is
`c f(b u + d) + s u + o`, and f with a line beside it is an activation as well, f(v) + s / (c b) v.
Pieces that are polynomials are an activation of their own.

Coefficients are compared in the precision of the constants of the forward pass: of float64, or less
where a constant was rounded to float32 or written with ten digits.

Reading order: `_Ratio` and `_Formulas` are the algebra, `_OPERATIONS` the operations of PyTorch in
it, `_fitted` finds the activation, and `written_activations` goes through a graph.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.fx

from tnsim.activations.activation import (
    ACTIVATIONS,
    Activation,
    activation,
    elu,
    jump_relu,
    leaky_relu,
    plus_line,
)
from tnsim.errors import OWN_ACTIVATION

MOST_TERMS = 64
"""Most terms of a polynomial: longer ones are no activation that anybody knows."""

FILLS = ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
"""Operations that fill an array of another's shape with a number."""

ROUNDING = 2.0**-46
"""Relative error of coefficients after some operations in float64."""

Monomial = tuple[tuple[int, int], ...]
"""Powers by variable: variable 0 is u, the others are atoms."""

Polynomial = dict[Monomial, float]


class Fit(NamedTuple):
    """A function of u as `factor f(scale u + shift) + offset`.

    Attributes:
        function: Activation f.
        scale: Number by which u is multiplied.
        shift: Number that is added to the multiple of u.
        factor: Number by which the activation is multiplied.
        offset: Number that is added.
    """

    function: Activation
    scale: float = 1.0
    shift: float = 0.0
    factor: float = 1.0
    offset: float = 0.0

    @property
    def detours(self) -> tuple[bool, ...]:
        """Whether numbers stand beside an activation with a name, the least welcome first."""
        beside = (self.function.name not in ACTIVATIONS, self.offset != 0, self.shift != 0)
        return (*beside, self.scale != 1, self.factor != 1)


class Written(NamedTuple):
    """A value that is an activation of an earlier value, perhaps times another.

    Attributes:
        argument: Node of the value that the activation reads.
        times: Node of the value by which the activation is multiplied; None for no such value.
        fit: The activation, and the numbers beside it.
    """

    argument: torch.fx.Node
    times: torch.fx.Node | None
    fit: Fit

    @property
    def reads(self) -> list[torch.fx.Node]:
        """Nodes from which the value is computed."""
        return [self.argument] if self.times is None else [self.argument, self.times]


class _UnknownFormulaError(Exception):
    """An operation leads out of the formulas."""


@dataclass(frozen=True, eq=False)
class _Ratio:
    """A ratio of two polynomials."""

    above: Polynomial
    below: Polynomial

    @property
    def is_polynomial(self) -> bool:
        """Whether the ratio is a polynomial in u alone."""
        variables = {one for monomial in self.above for one, _ in monomial}
        return set(self.below) == {()} and variables <= {0}

    @property
    def coefficients(self) -> list[float]:
        """Coefficients of 1, u, u^2, ... of a polynomial."""
        if not self.is_polynomial:
            raise _UnknownFormulaError
        powers = {dict(monomial).get(0, 0): c for monomial, c in self.above.items()}
        return [powers.get(n, 0.0) / self.below[()] for n in range(1 + max(powers, default=0))]


def _number(value: float) -> _Ratio:
    return _Ratio({(): float(value)} if value else {}, {(): 1.0})


def _variable(index: int, power: int = 1) -> _Ratio:
    above, below = {((index, abs(power)),): 1.0}, {(): 1.0}
    return _Ratio(above, below) if power > 0 else _Ratio(below, above)


def _sum(one: Polynomial, two: Polynomial, factor: float = 1.0) -> Polynomial:
    total = dict(one)
    for monomial, c in two.items():
        before = total.pop(monomial, 0.0)
        after = before + factor * c
        # A difference of equal numbers leaves rounding, which is no term.
        if abs(after) > 8 * 2.0**-52 * max(abs(before), abs(factor * c)):
            total[monomial] = after
    return total


def _times(one: Polynomial, two: Polynomial) -> Polynomial:
    total: Polynomial = {}
    if len(one) * len(two) > MOST_TERMS**2:
        raise _UnknownFormulaError
    for (first, c), (second, d) in product(one.items(), two.items()):
        powers = dict(first)
        for variable, power in second:
            powers[variable] = powers.get(variable, 0) + power
        total = _sum(total, {tuple(sorted(powers.items())): c * d})
    if len(total) > MOST_TERMS:
        raise _UnknownFormulaError
    return total


def _added(one: _Ratio, two: _Ratio, factor: float = 1.0) -> _Ratio:
    if one.below == two.below:
        return _reduced(_sum(one.above, two.above, factor), one.below)
    crossed = _times(one.above, two.below), _times(two.above, one.below)
    return _reduced(_sum(*crossed, factor), _times(one.below, two.below))


def _multiplied(one: _Ratio, two: _Ratio) -> _Ratio:
    return _reduced(_times(one.above, two.above), _times(one.below, two.below))


def _inverse(one: _Ratio) -> _Ratio:
    if not one.above:
        raise _UnknownFormulaError
    return _reduced(one.below, one.above)


def _reduced(above: Polynomial, below: Polynomial) -> _Ratio:
    """A ratio without the monomial that numerator and denominator have in common."""
    if not above:
        return _number(0.0)
    shared = dict(_common_monomial([*above, *below]))
    size = max(map(abs, below.values()))
    if shared or size != 1:
        above, below = (
            {_without(monomial, shared): c / size for monomial, c in terms.items()}
            for terms in (above, below)
        )
    return _Ratio(above, below)


def _common_monomial(monomials: Sequence[Monomial]) -> Monomial:
    """The largest monomial that divides all monomials."""
    first, *others = map(dict, monomials)
    powers = {one: min([n, *(other.get(one, 0) for other in others)]) for one, n in first.items()}
    return tuple(sorted((one, n) for one, n in powers.items() if n))


def _without(monomial: Monomial, shared: Mapping[int, int]) -> Monomial:
    powers = ((one, n - shared.get(one, 0)) for one, n in monomial)
    return tuple((one, n) for one, n in powers if n)


class _Formula(NamedTuple):
    """A function of u in pieces.

    Attributes:
        kinks: Places between pieces, increasing.
        cells: Ratios on the first interval, at the first kink, on the second interval, ...
    """

    kinks: tuple[float, ...]
    cells: tuple[_Ratio, ...]

    @property
    def is_polynomial(self) -> bool:
        """Whether a single polynomial is the function."""
        return not self.kinks and self.cells[0].is_polynomial


_ARGUMENT = _Formula((), (_variable(0),))


class _Formulas:
    """The algebra of formulas with a tolerance for coefficients.

    Attributes:
        tolerance: Relative difference of equal coefficients.
        atoms: Names and arguments of atoms; atom n is variable n + 1.
    """

    def __init__(self, tolerance: float = ROUNDING) -> None:
        self.tolerance = tolerance
        self.atoms: list[tuple[str, _Ratio]] = []

    def constant(self, value: float) -> _Formula:
        return _Formula((), (_number(value),))

    def add(self, x: Any, y: Any, alpha: float = 1) -> _Formula:
        return self.lifted(lambda one, two: _added(one, two, alpha), x, y)

    def sub(self, x: Any, y: Any, alpha: float = 1) -> _Formula:
        return self.add(x, y, -alpha)

    def mul(self, x: Any, y: Any) -> _Formula:
        return self.lifted(_multiplied, x, y)

    def div(self, x: Any, y: Any) -> _Formula:
        return self.mul(x, self.lifted(_inverse, y))

    def power(self, x: Any, exponent: Any) -> _Formula:
        if not isinstance(exponent, int | float) or exponent != int(exponent) or exponent < 0:
            raise _UnknownFormulaError
        result = self.constant(1.0)
        for _ in range(min(int(exponent), MOST_TERMS)):
            result = self.mul(result, x)
        return result

    def where(self, chosen: Any, x: Any, y: Any) -> _Formula:
        def one_of(choice: _Ratio, one: _Ratio, two: _Ratio) -> _Ratio:
            (said,) = choice.coefficients
            return one if said else two

        return self.lifted(one_of, chosen, x, y)

    def maximum(self, x: Any, y: Any) -> _Formula:
        return self.where(self.compared(operator.gt, x, y), x, y)

    def minimum(self, x: Any, y: Any) -> _Formula:
        return self.where(self.compared(operator.lt, x, y), x, y)

    def clamp(self, x: Any, min: Any = None, max: Any = None) -> _Formula:
        x = x if min is None else self.maximum(x, min)
        return x if max is None else self.minimum(x, max)

    def exp(self, x: Any) -> _Formula:
        return self.lifted(self._exponential, x)

    def log(self, x: Any) -> _Formula:
        return self.lifted(self._logarithm, x)

    def odd(self, name: str, x: Any) -> _Formula:
        """An odd function of a polynomial, `erf` or `sin`."""
        return self.lifted(lambda argument: self._odd_atom(name, argument), x)

    def compared(self, comparison: Callable[[float, float], bool], x: Any, y: Any) -> _Formula:
        """1 where a comparison holds, and 0 elsewhere."""
        return self._simplified(
            self._mapped(lambda sign: _number(comparison(sign, 0.0)), self._sign(self.sub(x, y)))
        )

    def lifted(self, function: Callable[..., _Ratio], *formulas: Any) -> _Formula:
        """A function of ratios, piece by piece."""
        given = [
            one if isinstance(one, _Formula) else self.constant(_scalar(one)) for one in formulas
        ]
        kinks: list[float] = []
        for kink in sorted(kink for one in given for kink in one.kinks):
            if not kinks or not self.is_near(kinks[-1], kink):
                kinks.append(kink)
        refined = [self._refined(one, kinks) for one in given]
        cells = tuple(function(*some) for some in zip(*refined, strict=True))
        return self._simplified(_Formula(tuple(kinks), cells))

    def are_equal(self, one: _Ratio, two: _Ratio) -> bool:
        """Whether two ratios are the same function."""
        first, second = _times(one.above, two.below), _times(two.above, one.below)
        size = max(map(abs, [*first.values(), *second.values()]), default=0.0)
        both = first.keys() | second.keys()
        return all(
            abs(first.get(key, 0.0) - second.get(key, 0.0)) <= self.tolerance * size for key in both
        )

    def at(self, ratio: _Ratio, u: float) -> float:
        """The value of a ratio at a number."""
        variables = {0: u}

        def value(terms: Polynomial) -> float:
            for variable in {one for monomial in terms for one, _ in monomial}:
                if variable not in variables:
                    name, argument = self.atoms[variable - 1]
                    variables[variable] = getattr(math, name)(self.at(argument, u))
            powers = (
                c * math.prod(variables[one] ** n for one, n in monomial)
                for monomial, c in terms.items()
            )
            return math.fsum(powers)

        return value(ratio.above) / value(ratio.below)

    def is_near(self, one: float, two: float) -> bool:
        """Whether two numbers are equal, relative to one where they are small."""
        return abs(one - two) <= self.tolerance * max(abs(one), abs(two), 1.0)

    def _refined(self, formula: _Formula, kinks: Sequence[float]) -> list[_Ratio]:
        """The cells of a formula between more kinks."""
        places = [one for pair in zip(_inside(kinks), [*kinks, None], strict=True) for one in pair]
        cells = []
        for n, place in enumerate(places[:-1]):
            assert place is not None
            at = next((k for k, kink in enumerate(formula.kinks) if self.is_near(kink, place)), -1)
            if n % 2 and at >= 0:
                cells.append(formula.cells[2 * at + 1])
            else:
                cells.append(formula.cells[2 * bisect_left(formula.kinks, place)])
        return cells

    def _simplified(self, formula: _Formula) -> _Formula:
        """A formula without kinks at which nothing changes."""
        kinks, cells = [], [formula.cells[0]]
        for n, kink in enumerate(formula.kinks):
            at, right = formula.cells[2 * n + 1 : 2 * n + 3]
            if self.are_equal(cells[-1], right) and self.agree(cells[-1], at, kink):
                continue
            kinks.append(kink)
            cells += [at, right]
        return _Formula(tuple(kinks), tuple(cells))

    def agree(self, one: _Ratio, two: _Ratio, place: float) -> bool:
        """Whether two ratios have the same value at a place."""
        try:
            first, second = self.at(one, place), self.at(two, place)
        except (ArithmeticError, ValueError):
            return False
        return self.is_near(first, second)

    def _mapped(self, function: Callable[[float], _Ratio], signs: _Formula) -> _Formula:
        return _Formula(
            signs.kinks, tuple(function(cell.above.get((), 0.0)) for cell in signs.cells)
        )

    def _sign(self, formula: _Formula) -> _Formula:
        """-1, 0 or 1 in every cell, with a kink at every place where a line meets zero."""
        kinks = list(formula.kinks)
        for n, cell in enumerate(formula.cells[::2]):
            offset, slope, *higher = [*cell.coefficients, 0.0]
            if any(higher):
                raise _UnknownFormulaError
            if slope:
                low, high = [-math.inf, *formula.kinks][n], [*formula.kinks, math.inf][n]
                root = -offset / slope
                known = any(self.is_near(root, kink) for kink in kinks)
                if low < root < high and not known:
                    kinks.append(root)
        kinks.sort()
        signs = []
        refined = self._refined(formula, kinks)
        inside = _inside(kinks)
        for n, cell in enumerate(refined):
            place = kinks[n // 2] if n % 2 else inside[n // 2]
            value = self.at(cell, place)
            size = sum(abs(c * place**power) for power, c in enumerate(cell.coefficients))
            signs.append(_number(0.0 if abs(value) <= self.tolerance * size else np.sign(value)))
        return _Formula(tuple(kinks), tuple(signs))

    def _atom(self, name: str, argument: _Ratio, power: int = 1) -> _Ratio:
        """An atom, the same for equal arguments."""
        for n, (known, other) in enumerate(self.atoms):
            if known == name and self.are_equal(argument, other):
                return _variable(n + 1, power)
        self.atoms.append((name, argument))
        return _variable(len(self.atoms), power)

    def _exponential(self, argument: _Ratio) -> _Ratio:
        # A whole multiple of a logarithm gives a power: tanh(softplus(u)) is a ratio in exp(u).
        for n, (name, inside) in enumerate(self.atoms):
            monomial = ((n + 1, 1),)
            if name == "log" and monomial in argument.above and set(argument.below) == {()}:
                multiple = argument.above[monomial] / argument.below[()]
                if not self.is_near(multiple, whole := round(multiple)) or abs(whole) > 8:
                    raise _UnknownFormulaError
                rest = {key: c for key, c in argument.above.items() if key != monomial}
                result = self._exponential(_reduced(rest, argument.below))
                for _ in range(abs(whole)):
                    result = _multiplied(result, inside if whole > 0 else _inverse(inside))
                return result
        coefficients = argument.coefficients
        if len(coefficients) == 1:
            return _number(math.exp(coefficients[0]))
        # Of whole multiples of a known argument the exponential is a power of the known atom.
        for n, (name, other) in enumerate(self.atoms):
            if name == "exp" and len(other.coefficients) == len(coefficients):
                multiple = coefficients[-1] / other.coefficients[-1]
                whole = round(multiple)
                if 0 < abs(whole) <= 8 and self.are_equal(
                    argument, _multiplied(_number(whole), other)
                ):
                    return _variable(n + 1, whole)
        if coefficients[-1] > 0:
            return self._atom("exp", argument)
        return self._atom("exp", _multiplied(_number(-1), argument), -1)

    def _logarithm(self, argument: _Ratio) -> _Ratio:
        """log(c T^k R) = log c + k E + log R for an exponential T = exp(E)."""
        total = _number(0.0)
        rest = []
        for terms, sign in ((argument.above, 1.0), (argument.below, -1.0)):
            shared = _common_monomial(list(terms))
            for variable, power in shared:
                # The logarithm of u itself is no part of any activation.
                if variable == 0 or self.atoms[variable - 1][0] != "exp":
                    raise _UnknownFormulaError
                exponent = self.atoms[variable - 1][1]
                total = _added(total, _multiplied(_number(sign * power), exponent))
            remaining = {_without(monomial, dict(shared)): c for monomial, c in terms.items()}
            lowest = remaining.get((), 0.0)
            exponentials = all(
                one and self.atoms[one - 1][0] == "exp" for key in remaining for one, _ in key
            )
            # Sums of exponentials with positive weights have a logarithm everywhere.
            if lowest <= 0 or min(remaining.values()) < 0 or not exponentials:
                raise _UnknownFormulaError
            total = _added(total, _number(math.log(lowest)), sign)
            rest.append({key: c / lowest for key, c in remaining.items()})
        for terms, sign in zip(rest, (1.0, -1.0), strict=True):
            if len(terms) > 1:
                total = _added(total, self._atom("log", _Ratio(terms, {(): 1.0})), sign)
        return total

    def _odd_atom(self, name: str, argument: _Ratio) -> _Ratio:
        coefficients = argument.coefficients
        if len(coefficients) == 1:
            return _number(getattr(math, name)(coefficients[0]))
        if coefficients[-1] > 0:
            return self._atom(name, argument)
        minus = _number(-1)
        return _multiplied(minus, self._atom(name, _multiplied(minus, argument)))


def _inside(kinks: Sequence[float]) -> list[float]:
    """A number within each interval between kinks."""
    if not kinks:
        return [0.0]
    between = [(low + high) / 2 for low, high in pairwise(kinks)]
    return [kinks[0] - 1 - abs(kinks[0]), *between, kinks[-1] + 1 + abs(kinks[-1])]


def _scalar(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _UnknownFormulaError
    return float(value)


def _sigmoid(f: _Formulas, x: Any) -> _Formula:
    grown = f.exp(x)
    return f.div(grown, f.add(grown, 1))


def _tanh(f: _Formulas, x: Any) -> _Formula:
    return f.sub(f.mul(2, _sigmoid(f, f.mul(2, x))), 1)


def _gelu(f: _Formulas, x: Any, approximate: str = "none") -> _Formula:
    if approximate == "tanh":
        wave = f.mul(math.sqrt(2 / math.pi), f.add(x, f.mul(0.044715, f.power(x, 3))))
        return f.mul(f.mul(0.5, x), f.add(1, _tanh(f, wave)))
    return f.mul(f.mul(0.5, x), f.add(1, f.odd("erf", f.div(x, math.sqrt(2)))))


def _elu(f: _Formulas, x: Any, alpha: float = 1, scale: float = 1, rate: float = 1) -> _Formula:
    below = f.mul(alpha, f.sub(f.exp(f.mul(rate, x)), 1))
    return f.mul(scale, f.where(f.compared(operator.gt, x, 0), x, below))


def _softplus(f: _Formulas, x: Any, beta: float = 1, threshold: float = 20) -> _Formula:
    # PyTorch's function is the line beyond the threshold, where the curve is the line to rounding.
    if threshold < 20:
        raise _UnknownFormulaError
    return f.div(f.log(f.add(1, f.exp(f.mul(beta, x)))), beta)


def _leaky(f: _Formulas, x: Any, slope: float = 0.01) -> _Formula:
    return f.where(f.compared(operator.gt, x, 0), x, f.mul(slope, x))


def _jump(f: _Formulas, x: Any) -> _Formula:
    return f.where(f.compared(operator.gt, x, 1), x, 0)


def _as_it_is(f: _Formulas, x: Any, **_: Any) -> _Formula:
    return f.add(x, 0)


_OPERATIONS: dict[str, Callable[..., _Formula]] = {
    "abs": lambda f, x: f.maximum(x, f.mul(-1, x)),
    "add": _Formulas.add,
    "sub": _Formulas.sub,
    "rsub": lambda f, x, y, alpha=1: f.sub(y, x, alpha),
    "mul": _Formulas.mul,
    "div": _Formulas.div,
    "sign": lambda f, x: f.sub(f.compared(operator.gt, x, 0), f.compared(operator.lt, x, 0)),
    "neg": lambda f, x: f.mul(-1, x),
    "reciprocal": lambda f, x: f.div(1, x),
    "pow": _Formulas.power,
    "square": lambda f, x: f.mul(x, x),
    "exp": _Formulas.exp,
    "expm1": lambda f, x: f.sub(f.exp(x), 1),
    "log": _Formulas.log,
    "log1p": lambda f, x: f.log(f.add(1, x)),
    "logaddexp": lambda f, x, y: f.log(f.add(f.exp(x), f.exp(y))),
    "erf": lambda f, x: f.odd("erf", x),
    "sin": lambda f, x: f.odd("sin", x),
    "cos": lambda f, x: f.odd("sin", f.add(x, math.pi / 2)),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "silu": lambda f, x: f.mul(x, _sigmoid(f, x)),
    "softplus": _softplus,
    "mish": lambda f, x: f.mul(x, _tanh(f, _softplus(f, x))),
    "gelu": _gelu,
    "elu": _elu,
    "relu": lambda f, x: f.maximum(x, 0),
    "relu6": lambda f, x: f.clamp(x, 0, 6),
    "leaky_relu": _leaky,
    "hardtanh": lambda f, x, low=-1.0, high=1.0: f.clamp(x, low, high),
    "hardswish": lambda f, x: f.div(f.mul(x, f.clamp(f.add(x, 3), 0, 6)), 6),
    "clamp": _Formulas.clamp,
    "clamp_min": lambda f, x, low: f.clamp(x, low),
    "clamp_max": lambda f, x, high: f.clamp(x, None, high),
    "maximum": _Formulas.maximum,
    "minimum": _Formulas.minimum,
    "where": _Formulas.where,
    "gt": lambda f, x, y: f.compared(operator.gt, x, y),
    "ge": lambda f, x, y: f.compared(operator.ge, x, y),
    "lt": lambda f, x, y: f.compared(operator.lt, x, y),
    "le": lambda f, x, y: f.compared(operator.le, x, y),
    **dict.fromkeys(("_to_copy", "alias", "clone", "detach", "lift_fresh_copy"), _as_it_is),
}
"""Operations of PyTorch as operations on formulas."""

_ANALYTIC: dict[str, Callable[[_Formulas, Any], _Formula]] = {
    **{
        name: _OPERATIONS[name]
        for name in ("tanh", "sigmoid", "silu", "softplus", "mish", "gelu", "erf", "sin")
    },
    "tanhshrink": lambda f, x: f.sub(x, _tanh(f, x)),
    "gelu_tanh": lambda f, x: _gelu(f, x, "tanh"),
}
"""Activations that no kinks part, by name."""

_KINKED: dict[str, Callable[[_Formulas, Any], _Formula]] = {
    **{name: _OPERATIONS[name] for name in ("relu", "relu6", "hardtanh", "hardswish", "abs")},
    "relu2": lambda f, x: f.power(f.maximum(x, 0), 2),
    "step": lambda f, x: f.compared(operator.gt, x, 0),
}
"""Activations of polynomial pieces, by name."""


def _fitted(f: _Formulas, formula: _Formula, with_offset: bool) -> Fit | None:
    """The activation that a formula is, None for no known activation.

    Args:
        f: Algebra of the formula.
        formula: Function of u.
        with_offset: Whether a number may be added to the activation.
    """
    fits = [fit for fit in _known_fits(f, formula) if with_offset or not fit.offset]
    if fits:
        return min(fits, key=lambda fit: fit.detours)
    own = _own_pieces(f, formula)
    return None if own is None else Fit(own)


def _known_fits(f: _Formulas, formula: _Formula) -> list[Fit]:
    """All ways in which a formula is an activation with a name."""
    fits = []
    for make, function, scale, shift in _candidates(f, formula):
        scale, shift = _snapped(f, scale, 1.0), _snapped(f, shift, 0.0)
        try:
            known = make(f, f.add(f.mul(scale, _ARGUMENT), shift))
            numbers = _line_beside(f, formula, known, bool(formula.kinks))
        except (_UnknownFormulaError, ArithmeticError, ValueError):
            continue
        if numbers is not None:
            factor, slope, offset = numbers
            if slope:
                # c f(v) + s u + o = c (f(v) + s / (c b) v) + o - s d / b, as u = (v - d) / b
                line = slope / (factor * scale)
                function = plus_line(function, _snapped(f, line, round(line, 6)))
                offset = _snapped(f, offset - slope * shift / scale, 0.0)
            fits.append(Fit(function, scale, shift, factor, offset))
    return fits


def _candidates(f: _Formulas, formula: _Formula) -> list[tuple[Any, Activation, float, float]]:
    """Activations, and arguments `scale u + shift` that would give them the formula's places."""
    found: list[tuple[Any, Activation, float, float]] = []
    kinks = formula.kinks
    if not kinks:
        # Atoms of the formula say what the argument is.
        for name, make in _ANALYTIC.items():
            own = _Formulas()
            make(own, _ARGUMENT)
            (kind, argument), *_ = own.atoms
            for scale, shift in _arguments(f, formula, kind, argument.coefficients):
                found.append((make, activation(name), scale, shift))
        return found
    for name, make in _KINKED.items():
        places = activation(name).kinks
        for sign in (1.0, -1.0):
            if len(places) == len(kinks):
                ends = places[:: int(sign)]
                scale = sign if len(kinks) == 1 else (ends[1] - ends[0]) / (kinks[1] - kinks[0])
                found.append((make, activation(name), scale, ends[0] - scale * kinks[0]))
    kink, *further = kinks
    if further:
        return found
    left, _, right = formula.cells
    if kink > 0:
        # u 1(u > t) = t j(u / t) with j of threshold 1, so that all thresholds are one activation.
        found.append((_jump, jump_relu(1.0), 1 / kink, 0.0))
    for sign in (1.0, -1.0):
        line, other = (right, left) if sign > 0 else (left, right)
        if not line.is_polynomial or len(line.coefficients) != 2:
            continue
        slope = line.coefficients[1]
        if other.is_polynomial and len(other.coefficients) == 2:
            ratio = _snapped(f, other.coefficients[1] / slope, 0.01)
            found.append(
                (
                    lambda f, x, ratio=ratio: _leaky(f, x, ratio),
                    leaky_relu(ratio),
                    sign,
                    -sign * kink,
                )
            )
        # alpha c (exp(b u) - 1) below, c b u above
        for monomial, c in other.above.items() if not kink else ():
            for variable, power in monomial:
                if variable and f.atoms[variable - 1][0] == "exp" and power == 1:
                    rate = sign * f.atoms[variable - 1][1].coefficients[1]
                    size = max(map(abs, other.below.values()))
                    alpha = _snapped(f, abs(c / size * rate / slope), 1.0)
                    found.append(
                        (lambda f, x, alpha=alpha: _elu(f, x, alpha), elu(alpha), rate, 0.0)
                    )
    return found


def _arguments(
    f: _Formulas, formula: _Formula, kind: str, known: list[float]
) -> list[tuple[float, float]]:
    """Numbers b and d with which a known argument of b u + d is the argument of an atom.

    With the coefficients g_n, g_(n-1) and a_n, a_(n-1) of the highest powers in both, b^n is
    a_n / g_n and n g_n b^(n-1) d + g_(n-1) b^(n-1) is a_(n-1).
    """
    used = {
        one
        for cell in formula.cells
        for terms in (cell.above, cell.below)
        for key in terms
        for one, _ in key
    }
    used |= {
        one
        for n in used
        if n and f.atoms[n - 1][0] == "log"
        for key in f.atoms[n - 1][1].above
        for one, _ in key
    }
    found = []
    for variable in sorted(used - {0}):
        name, argument = f.atoms[variable - 1]
        # An exponential may be the square of the known exponential's root.
        for multiple in (1, 2) if kind == "exp" else (1,):
            if name != kind or len(argument.coefficients) != len(known):
                continue
            *_, below, lead = (multiple * c for c in argument.coefficients)
            degree = len(known) - 1
            scale = abs(lead / known[-1]) ** (1 / degree)
            inner = below / scale ** (degree - 1) - known[-2]
            shift = inner / (degree * known[-1])
            found += [(scale, shift), (-scale, -shift)]
    return found


def _line_beside(
    f: _Formulas, formula: _Formula, known: _Formula, bare: bool
) -> tuple[float, float, float] | None:
    """Numbers c, s and o with formula = c known + s u + o; None without such numbers.

    Args:
        f: Algebra of both formulas.
        formula: Function of u.
        known: Another function of u, with the same kinks.
        bare: Whether s and o are zero.
    """
    if len(known.kinks) != len(formula.kinks):
        return None
    if not all(map(f.is_near, known.kinks, formula.kinks)):
        return None
    rows, goals = [], []
    for cell, other in list(zip(formula.cells, known.cells, strict=True))[::2]:
        # N / D = c M / Q + s u + o, multiplied by D Q
        goal = _times(cell.above, other.below)
        both = _times(cell.below, other.below)
        columns = [_times(other.above, cell.below)]
        columns += [] if bare else [_times(both, {((0, 1),): 1.0}), both]
        for monomial in {key for terms in (goal, *columns) for key in terms}:
            rows.append([terms.get(monomial, 0.0) for terms in columns])
            goals.append(goal.get(monomial, 0.0))
    matrix, wanted = np.array(rows), np.array(goals)
    numbers = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    size = max(np.abs(wanted).max(), np.abs(matrix * numbers).max())
    numbers = [_snapped(f, numbers[0], 1.0), *(_snapped(f, x, 0.0, size) for x in numbers[1:])]
    if np.abs(matrix @ numbers - wanted).max() > f.tolerance * size or not numbers[0]:
        return None
    # At a kink the values are equal as well, which a jump decides by its side.
    points = zip(formula.cells[1::2], known.cells[1::2], formula.kinks, strict=True)
    if not all(
        f.agree(cell, _multiplied(_number(numbers[0]), other), kink) for cell, other, kink in points
    ):
        return None
    factor, slope, offset = (*numbers, 0.0, 0.0)[:3]
    return float(factor), float(slope), float(offset)


def _snapped(f: _Formulas, value: float, goal: float, size: float = 1.0) -> float:
    """A number, or the number in its place from which it differs by rounding."""
    return goal if abs(value - goal) <= f.tolerance * max(abs(goal), size) else float(value)


def _own_pieces(f: _Formulas, formula: _Formula) -> Activation | None:
    """The activation of polynomial pieces that a formula is; None for other formulas."""
    kinks, cells = formula.kinks, formula.cells
    if not kinks or not all(cell.is_polynomial for cell in cells[::2]):
        return None
    # At a kink the left piece holds.
    for left, at, kink in zip(cells[::2], cells[1::2], kinks, strict=False):
        if not f.agree(left, at, kink):
            return None
    pieces = tuple(tuple(cell.coefficients) for cell in cells[::2])
    if len(kinks) == 1 and pieces == ((0.0,), (0.0, 1.0)):
        return jump_relu(kinks[0])
    return Activation(kinks=kinks, pieces=pieces, name=_name_of_pieces(kinks, pieces))


def _name_of_pieces(kinks: tuple[float, ...], pieces: tuple[tuple[float, ...], ...]) -> str:
    """The name of an argument kept between two ends, else of pieces."""
    low = pieces[0][0] if len(pieces[0]) == 1 else None
    high = pieces[-1][0] if len(pieces[-1]) == 1 else None
    ends = tuple(bound for bound in (low, high) if bound is not None)
    if (0.0, 1.0) in pieces and ends == kinks:
        return f"clamp({low}, {high})"
    return "piecewise"


_Product = dict[torch.fx.Node, _Formula]
"""A product of functions of several values, by the node of each value."""


class WrittenActivations:
    """The elementwise operations of a forward pass, and the activations that they compute.

    Args:
        varying: Nodes that depend on the input, in their order.
        constants: Arrays at nodes that do not depend on the input.

    Attributes:
        unknown: Names of operations that together are no known activation, by each node of these.
    """

    def __init__(
        self, varying: Sequence[torch.fx.Node], constants: Mapping[torch.fx.Node, Any]
    ) -> None:
        self.varying, self.constants = varying, constants
        self.unknown: dict[torch.fx.Node, list[str]] = {}
        # Nodes of which no formula tells what they compute, though they read a single value.
        self.outside: set[torch.fx.Node] = set()
        self.products = self._products(_Formulas(), varying, {})

    def written(self, node: torch.fx.Node) -> Written | None:
        """The activation that a node computes, from as early a value as there is.

        Args:
            node: A node that depends on the input.

        Returns:
            The activation with its argument; None for polynomials and for operations that are no
            activation.
        """
        whole = self.products[node]
        if node not in self.outside and all(one.is_polynomial for one in whole.values()):
            return None
        before = self._ancestors(node)
        # Atoms and constants of other parts of the forward pass say nothing about these.
        formulas = _Formulas(self._rounding_in([*before, node]))
        whole = self._products(formulas, [*before, node], {})[node]
        found = self._activation(formulas, whole)
        if found is None:
            chain = [one for one in (*before, node) if self._is_function(one)]
            names = list(dict.fromkeys(map(_name_of, chain)))
            for one in chain:
                self.unknown.setdefault(one, names)
        else:
            return found
        # Of a function of a function the outer is taken alone.
        for n, cut in enumerate(before):
            later = [*before[n + 1 :], node]
            outer = self._products(formulas, later, {cut: {cut: _ARGUMENT}})[node]
            if set(outer) == {cut} and (found := self._activation(formulas, outer)):
                return found
        return None

    def advice_at(self, node: torch.fx.Node) -> str:
        """What to do where a node has no layer, because of operations of which it is the last.

        Args:
            node: A node that was refused.

        Returns:
            The end of a message, empty where no chain of elementwise operations is the reason.
        """
        chains = (self.unknown.get(one) for one in (node, *node.all_input_nodes))
        names = next((chain for chain in chains if chain), None)
        if names is None:
            return ""
        *others, last = names
        listed = f"{', '.join(others)} and {last}" if others else last
        return f"; {listed} of a value make no activation known by name. {OWN_ACTIVATION}"

    def _activation(self, formulas: _Formulas, whole: _Product) -> Written | None:
        """A product as an activation of one value, perhaps times a multiple of another value."""
        curved = [node for node, formula in whole.items() if not formula.is_polynomial]
        others = [node for node in whole if node not in curved]
        if len(curved) != 1 or len(others) > 1:
            return None
        size = 1.0
        for node in others:
            constant, size, *higher = [*whole[node].cells[0].coefficients, 0.0]
            if constant or any(higher):
                return None
        try:
            fit = _fitted(formulas, whole[curved[0]], with_offset=not others)
        except (_UnknownFormulaError, ArithmeticError, ValueError):
            return None
        if fit is None:
            return None
        times = others[0] if others else None
        return Written(curved[0], times, fit._replace(factor=fit.factor * size))

    def _is_function(self, node: torch.fx.Node) -> bool:
        """Whether a node is a function of values before it, entry by entry."""
        return node in self.outside or node not in self.products[node]

    def _ancestors(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Nodes before a node, up to the values of which it is a function, in their order."""
        found: set[torch.fx.Node] = set()
        waiting = [node]
        while waiting:
            for before in waiting.pop().all_input_nodes:
                if before in self.products and before not in found:
                    found.add(before)
                    waiting += [before] if self._is_function(before) else []
        return [one for one in self.varying if one in found]

    def _rounding_in(self, nodes: Sequence[torch.fx.Node]) -> float:
        """The relative error of the least precise constant of operations."""
        numbers = [
            self._number_at(argument)
            for node in nodes
            if _name_of(node) in _OPERATIONS
            for argument in node.args
        ]
        return max(map(_rounding_of, numbers), default=ROUNDING)

    def _products(
        self,
        formulas: _Formulas,
        nodes: Sequence[torch.fx.Node],
        known: Mapping[torch.fx.Node, _Product],
    ) -> dict[torch.fx.Node, _Product]:
        """Nodes as products of functions of the values before them."""
        products = dict(known)
        for node in nodes:
            product = None
            if _name_of(node) not in _OPERATIONS and _is_elementwise(node):
                self.outside.add(node)
            try:
                product = self._product(formulas, node, products)
            except (_UnknownFormulaError, ArithmeticError, TypeError, ValueError):
                self.outside.add(node)
            products[node] = product or {node: _ARGUMENT}
        return products

    def _product(
        self, f: _Formulas, node: torch.fx.Node, known: Mapping[torch.fx.Node, _Product]
    ) -> _Product | None:
        """A node as a product; None where it is a value in its own right."""
        name = _name_of(node)
        operation = _OPERATIONS.get(name)
        if operation is None or not _keeps_numbers(node):
            return None
        given: list[Any] = []
        for argument in node.args:
            if not isinstance(argument, torch.fx.Node):
                given.append(argument)
            elif argument in known:
                given.append(known[argument])
            elif (number := self._number_at(argument)) is not None:
                given.append(number)
            else:
                return None
        several = [one for one in given if isinstance(one, dict)]
        if name in ("mul", "div") and len(several) == 2 and not node.kwargs:
            factors = dict(several[0])
            for value, formula in several[1].items():
                before = factors.get(value, f.constant(1.0))
                factors[value] = operation(f, before, formula)
            return factors
        values = {value for one in several for value in one}
        # A number multiplies a product of several values; all else is a function of a single value.
        is_multiple = name in ("mul", "neg") or (name == "div" and given[0] in several)
        if len(values) > 1 and (len(several) > 1 or not is_multiple):
            return None
        first = next(iter(several[0]))
        # A value that broadcasts to another shape is no function entry by entry.
        if len(values) == 1 and _shape_of(first) != _shape_of(node):
            return None
        arguments = [one[first] if isinstance(one, dict) else one for one in given]
        settings = {} if operation is _as_it_is else node.kwargs
        return {**several[0], first: operation(f, *arguments, **settings)}

    def _number_at(self, argument: Any) -> Any:
        """The number that an argument is by its code; None for arrays of several numbers."""
        array = self.constants.get(argument) if isinstance(argument, torch.fx.Node) else argument
        if not isinstance(array, torch.Tensor):
            return array if isinstance(array, int | float) else None
        # A parameter that is trained stays a tensor, and entries that are equal may differ in
        # another checkpoint.
        if array.requires_grad or not self._is_filled(argument):
            return None
        return array.flatten()[0].item()

    def _is_filled(self, node: torch.fx.Node) -> bool:
        """Whether an array has a single number, or is filled with numbers that the code says."""
        array = self.constants.get(node)
        if not isinstance(array, torch.Tensor) or not array.numel():
            return False
        if array.numel() == 1 or _name_of(node) in (*FILLS, "full", "ones", "zeros"):
            return True
        reads = node.all_input_nodes
        return _name_of(node) in _OPERATIONS and bool(reads) and all(map(self._is_filled, reads))


def _keeps_numbers(node: torch.fx.Node) -> bool:
    """Whether an operation gives numbers or truths, rather than floats cut to integers."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (
        value.is_floating_point() or value.dtype == torch.bool or _reads_truths(node)
    )


def _reads_truths(node: torch.fx.Node) -> bool:
    values = (before.meta.get("val") for before in node.all_input_nodes)
    return all(isinstance(value, torch.Tensor) and value.dtype == torch.bool for value in values)


def _is_elementwise(node: torch.fx.Node) -> bool:
    """Whether an operation computes every entry of a single array from this entry alone."""
    tags = getattr(node.target, "tags", ())
    return len(node.all_input_nodes) == 1 and torch.Tag.pointwise in tags


def _shape_of(node: torch.fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _name_of(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "_opname", "")) if node.op == "call_function" else ""


def _rounding_of(number: Any) -> float:
    """The relative error with which a number stands for a constant.

    Numbers of few bits, such as 0.5 and 3, are exact. Others that float32 holds were rounded to it,
    and numbers of ten digits or more to these digits.
    """
    if not isinstance(number, float) or not number or not math.isfinite(number):
        return ROUNDING
    with np.errstate(over="ignore", under="ignore"):
        if float(np.float16(number)) == number:
            return ROUNDING
        if float(np.float32(number)) == number:
            return 4 * 2.0**-24
    digits = len(Decimal(repr(number)).normalize().as_tuple().digits)
    return 4 * 10.0 ** (1 - digits) if 10 <= digits <= 14 else ROUNDING
