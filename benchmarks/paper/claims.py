"""Claims: values of the paper beside measured values, and their verdicts.

Verdicts are computed here and nowhere else; no experiment states its own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tnsim.errors import ResultError

T = TypeVar("T")


class Verdict(enum.StrEnum):
    """Possible verdicts on a claim."""

    holds = "holds"
    fails = "does not hold"
    differs = "differs in setting"
    cannot = "cannot be rerun"


@dataclass(frozen=True)
class Interval:
    """The interval in which a number is expected, both ends included.

    Example:
        >>> print(near(0.997, 0.02), at_least(0.9), at_most(0.1), sep=", ")
        0.997 ± 0.02, at least 0.9, at most 0.1
        >>> 0.98 in near(0.997, 0.02)
        True
    """

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        if math.isinf(self.low):
            return f"at most {self.high:g}"
        middle, reach = (self.low + self.high) / 2, (self.high - self.low) / 2
        if reach > middle / 4 > 0:  # a wide interval, such as a factor of two either way
            return f"{self.low:.3g} to {self.high:.3g}"
        return f"{middle:g} ± {reach:.3g}"


def near(value: float, tolerance: float) -> Interval:
    """The interval within a tolerance of a value.

    Args:
        value: Middle of the interval.
        tolerance: Largest distance from the middle.

    Returns:
        The interval, its ends free of the rounding of the sum.

    Example:
        >>> near(0.61, 0.02)
        Interval(low=0.59, high=0.63)
    """
    return Interval(round(value - tolerance, 12), round(value + tolerance, 12))


def at_least(value: float) -> Interval:
    """The interval of a value or more.

    Example:
        >>> 0.95 in at_least(0.9)
        True
    """
    return Interval(value, math.inf)


def at_most(value: float) -> Interval:
    """The interval of a value or less.

    Example:
        >>> 0.95 in at_most(0.9)
        False
    """
    return Interval(-math.inf, value)


@dataclass(frozen=True)
class Claim:
    """A claim with the values of the paper, of its authors and of this run, and an expectation.

    Args:
        name: Short name, unique within the experiment, in words joined by hyphens.
        text: The claim as a single sentence.
        where: Place in the paper, such as "figure 2" or "appendix D".
        ours: Measured values, seed by seed; empty where `cannot` says why.
        expected: Interval in which the mean of `ours` must be for the claim to hold.
        why: Reason for this interval.
        paper: Value that the paper prints, a number or the paper's words.
        authors: Value of the authors' stored runs, where it is known.
        control: The same quantity, seed by seed, where nothing but training happened.
        excess: Interval in which `ours - control` must be in every seed; given with a control.
        differs: Difference of this setting from the paper's, such as "digits instead of SVHN".
        cannot: Reason why the claim cannot be rerun.
        note: Remark that a reader needs in addition to the numbers.

    Example:
        >>> claim = Claim("r", "r exceeds 0.9.", "appendix D", (0.93,), at_least(0.9))
        >>> verdict(claim).value
        'holds'
    """

    name: str
    text: str
    where: str
    ours: tuple[float, ...] = ()
    expected: Interval | None = None
    why: str = ""
    paper: float | str | None = None
    authors: float | str | None = None
    control: tuple[float, ...] = ()
    excess: Interval | None = None
    differs: str = ""
    cannot: str = ""
    note: str = ""


class Summary(NamedTuple):
    """A table of measures side by side, as single claims do not show how measures compare.

    Attributes:
        title: Words for the compared quantities.
        heads: Heads of the columns.
        rows: Rows of words, a cell for each column.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def verdict(claim: Claim) -> Verdict:
    """The verdict on a claim.

    Args:
        claim: A claim with its measured values.

    Returns:
        *Holds* where the mean of `ours` is in `expected` and every seed's excess over its control
        in `excess`. Otherwise *does not hold*, or *differs in setting* where the claim says how.

    Raises:
        ResultError: When a value is not finite, nothing is expected of a measured value, or the
            numbers of controls and values differ.

    Example:
        >>> drift = Claim("drift", "The attack is seen.", "figure 5", (0.27, 0.26), at_least(0.2),
        ...     control=(0.24, 0.27), excess=at_least(0.0))
        >>> verdict(drift).value  # the second seed has less than its control
        'does not hold'
    """
    if claim.cannot:
        return Verdict.cannot
    _check(claim)
    if _is_met(claim):
        return Verdict.holds
    if claim.differs:
        return Verdict.differs
    return Verdict.fails


def mean(values: tuple[float, ...]) -> float:
    """The mean over seeds, of at least one value.

    Example:
        >>> mean((1.0, 2.0))
        1.5
    """
    return math.fsum(values) / len(values)


def each(seeds: Iterable[T], value: Callable[[T], float]) -> tuple[float, ...]:
    """A value for each seed, in the form that a claim has.

    Args:
        seeds: Measured results of each seed.
        value: Function that gives the value of a seed's results.

    Returns:
        The values in the order of the seeds.

    Example:
        >>> each(("a", "bc"), len)
        (1, 2)
    """
    return tuple(map(value, seeds))


def _is_met(claim: Claim) -> bool:
    if claim.expected is not None and mean(claim.ours) not in claim.expected:
        return False
    if claim.excess is None:
        return True
    pairs = zip(claim.ours, claim.control, strict=True)
    return all(ours - control in claim.excess for ours, control in pairs)


def _check(claim: Claim) -> None:
    if not claim.ours or not all(map(math.isfinite, claim.ours + claim.control)):
        raise ResultError(
            f"claim {claim.name!r} needs finite values, found {claim.ours} and controls "
            f"{claim.control}; what cannot be measured says why in `cannot`"
        )
    if claim.expected is None and claim.excess is None:
        raise ResultError(f"claim {claim.name!r} expects nothing; give it an interval")
    if (claim.excess is not None or claim.control) and len(claim.control) != len(claim.ours):
        raise ResultError(
            f"claim {claim.name!r} has {len(claim.ours)} values and {len(claim.control)} controls; "
            "every seed needs its own control"
        )
    if claim.control and claim.excess is None:
        raise ResultError(
            f"claim {claim.name!r} has a control but says not what is expected beyond it; "
            "give `excess`"
        )
