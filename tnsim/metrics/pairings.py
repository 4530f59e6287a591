"""Weighted joinings of the legs of a layer over another, orbit by orbit.

The module is pure combinatorics without arrays. A joining pairs some legs, hands the other legs to
the mean (caps them), and says on which side the tensor of the layer has to be symmetrised before
this representative may stand for its whole orbit: an exchange of legs keeps the *function* of a
layer, but not its tensor.

*Hermite caps.* For a Gaussian x with raw second moment S = E[x x^T] = C + m m^T and mean m, the
moment generating function is

    exp(t.m + t.C t / 2) = exp(t.S t / 2) exp(t.m - (t.m)^2 / 2).

The first factor generates pairings with S. The second generates the Hermite polynomials at 1,
`exp(z - z^2 / 2) = sum_k He_k(1) z^k / k!` with z = t.m, and so gives k legs handed to m the weight
He_k(1). Isserlis' theorem with a mean therefore reads

    E[x_1 ... x_N] = sum over k, over sets of k legs handed to m, over pairings of the rest with S,
                     of He_k(1),

with He_k the probabilists' Hermite polynomials: 1, 1, 0, -2, -2, 6, ... at 1. The constant
coordinate of a lifted input needs no further rule: it is a Gaussian of variance 0 and mean 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from tnsim.names import SIDES, Side
from tnsim.sessions import session_cache


class PairingRule(Enum):
    """The sum that all joinings of the legs of two layers together amount to.

    Attributes:
        AS_WRITTEN: Leg i with leg i, the inner product of two tensors.
        SYMMETRISED: Leg i with leg i, the inner product of two tensors symmetrised over their legs.
        ISSERLIS: All pairings, the expectation of a product of Gaussians.
    """

    AS_WRITTEN = auto()
    SYMMETRISED = auto()
    ISSERLIS = auto()


class JoinedLeg(NamedTuple):
    """Input leg `index` of the layer on a single side, "A" for the bra and "B" for the ket."""

    side: Side
    index: int


@dataclass(frozen=True)
class Joining:
    """An orbit of joinings.

    Args:
        weight: Number of joinings in the orbit, times He_k(1) for k capped legs.
        pairs: Legs that a representative joins through the second moment.
        capped: Legs that the representative hands to the mean.
        symmetrised: Sides where the tensor is first averaged over all orders of its legs.
    """

    weight: float
    pairs: tuple[tuple[JoinedLeg, JoinedLeg], ...]
    capped: tuple[JoinedLeg, ...] = ()
    symmetrised: tuple[Side, ...] = ()


def joinings(rule: PairingRule, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    """The ways in which the legs of two layers are joined, one for every orbit.

    Args:
        rule: Rule of the metric. The tree metrics, all but Isserlis' sum, join layers of one order.
        bra: Number of legs of the layer in the bra.
        ket: Number of legs of the layer in the ket.
        centred: Whether the mean is zero, so that no leg is handed to it.

    Returns:
        Joinings with their weights.

    Example:
        >>> joinings(PairingRule.AS_WRITTEN, 1, 1, centred=True)[0].pairs
        ((JoinedLeg(side='A', index=0), JoinedLeg(side='B', index=0)),)
        >>> [joined.weight for joined in joinings(PairingRule.ISSERLIS, 2, 2, centred=True)]
        [1.0, 2.0]
    """
    if rule is PairingRule.ISSERLIS:
        return gaussian(bra, ket, centred)
    return straight(bra, symmetrised=rule is PairingRule.SYMMETRISED)


def straight(order: int, symmetrised: bool) -> tuple[Joining, ...]:
    """The joining of the tree metrics: leg i of the bra with leg i of the ket.

    If the metric symmetrises, a single side is enough. A symmetriser is idempotent, P = P^T P, and
    a symmetriser on the legs of the bra may be moved over to the ket, through second moments that
    are the same on every leg (paper, appendix A.2).
    """
    # The n! ways to join n legs of either side are one orbit under permutations of the ket's legs;
    # the mean over the orbit has weight 1.
    pairs = tuple((JoinedLeg("A", i), JoinedLeg("B", i)) for i in range(order))
    averaged: tuple[Side, ...] = ()
    if symmetrised and order > 1:
        averaged = ("B",)
    return (Joining(1.0, pairs, symmetrised=averaged),)


@session_cache
def gaussian(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    """Orbits of all pairings of the legs of two layers, with legs left over for the mean.

    Legs of a side are exchangeable, so an orbit is known by its numbers of cross pairs, of pairs
    inside either side, and of capped legs.

    Args:
        bra: Number of legs of the layer in the bra.
        ket: Number of legs of the layer in the ket.
        centred: Whether the mean is zero, so that no leg is capped.

    Returns:
        Joinings. Their weights sum to (bra + ket - 1)!! if centred, and else to 1, the Gaussian
        moment of order bra + ket at S = m = 1.

    Source:
        Isserlis' theorem (paper, appendix A.3), with a mean as above.
    """
    joinings = []
    for cross in range(min(bra, ket) + 1):
        for bra_caps in _numbers_of_caps(bra - cross, centred):
            for ket_caps in _numbers_of_caps(ket - cross, centred):
                count = (
                    _ways_on_a_side(bra, cross, bra_caps)
                    * _ways_on_a_side(ket, cross, ket_caps)
                    * math.factorial(cross)  # which bra leg crosses to which ket leg
                )
                # With S the raw second moment, k legs handed to the mean m are worth m^k He_k(1):
                # He_k takes off the pairs among them, which S m m^T counts already. He_3(1) = -2,
                # He_2(1) = 0.
                weight = float(hermite_at_one(bra_caps + ket_caps) * count)
                if weight:
                    caps = bra_caps, ket_caps
                    joinings.append(_representative(weight, (bra, ket), cross, caps))
    return tuple(joinings)


@session_cache
def gaussian_mean(order: int, centred: bool) -> tuple[Joining, ...]:
    """Joinings of the legs of a single layer, for the mean of its output; empty if that is 0."""
    joinings = []
    for caps in _numbers_of_caps(order, centred):
        weight = float(hermite_at_one(caps) * _ways_on_a_side(order, 0, caps))
        if weight:
            joinings.append(_representative(weight, (order, 0), 0, (caps, 0)))
    return tuple(joinings)


@session_cache
def hermite_at_one(k: int) -> int:
    """The number He_k(1), by the recurrence He_{k+1}(z) = z He_k(z) - k He_{k-1}(z)."""
    if k < 2:
        return 1
    return hermite_at_one(k - 1) - (k - 1) * hermite_at_one(k - 2)


def _numbers_of_caps(legs: int, centred: bool) -> range:
    """Possible numbers of capped legs, such that the other legs can be paired."""
    odd = legs % 2
    if centred:
        return range(0) if odd else range(1)
    return range(odd, legs + 1, 2)


def _ways_on_a_side(legs: int, cross: int, caps: int) -> int:
    """Number of ways to choose crossing and capped legs of a side and to pair up the rest."""
    rest = legs - cross - caps
    pairings = math.prod(range(1, rest, 2))  # (rest - 1)!!
    return math.comb(legs, cross) * math.comb(legs - cross, caps) * pairings


def _representative(
    weight: float, legs: tuple[int, int], cross: int, caps: tuple[int, int]
) -> Joining:
    """The joining of an orbit whose legs are in order: first crossing, then capped, then paired."""
    pairs = [(JoinedLeg("A", i), JoinedLeg("B", i)) for i in range(cross)]
    capped: list[JoinedLeg] = []
    for side, count, capped_here in zip(SIDES, legs, caps, strict=True):
        first_paired = cross + capped_here
        capped += [JoinedLeg(side, i) for i in range(cross, first_paired)]
        pairs += [
            (JoinedLeg(side, i), JoinedLeg(side, i + 1)) for i in range(first_paired, count, 2)
        ]
    return Joining(weight, tuple(pairs), tuple(capped), _to_symmetrise(legs, cross, caps))


def _to_symmetrise(legs: tuple[int, int], cross: int, caps: tuple[int, int]) -> tuple[Side, ...]:
    """Sides on which a representative treats legs unequally.

    The legs of a side are alike if all of them are capped, or if the side has exactly two legs,
    paired with each other: every order gives the same joining, and there is nothing to average.
    They are alike too if all of them cross to a side that is symmetrised itself. Four or more legs
    paired among themselves are not alike, as their partners differ. If all legs of both sides
    cross, only their order against each other matters, and it is enough to symmetrise the ket.
    """
    if legs[0] == legs[1] == cross:
        return ("B",) if cross > 1 else ()
    unequal = []
    for side, count, capped in zip(SIDES, legs, caps, strict=True):
        paired = count - cross - capped
        alike = count in (cross, capped, paired) and paired <= 2
        if not alike:
            unequal.append(side)
    return tuple(unequal)
