"""Ways of joining the input legs of a bra and a ket. In: numbers of legs. Out: weighted joinings.

Pure combinatorics, no arrays. A joining pairs legs (`pairs`), hands others to the mean (`capped`) and
says on which side the layer's tensor has to be symmetrised before this one representative may stand
for its whole orbit: exchanging the legs of a layer leaves the *function* alone, not its tensor.

For a Gaussian x with raw second moment S = E[x x^T] and mean m, the moment generating function
exp(t.m + t C t / 2) = exp(t S t / 2) exp(t.m - (t.m)^2 / 2) gives Isserlis' theorem with a mean as

    E[x_1 ... x_N] = sum over k, over sets of k legs handed to m, over pairings of the rest with S,  of  He_k(1)

with He_k the probabilists' Hermite polynomials: 1, 1, 0, -2, -2, 6, ... at 1. The constant coordinate of
a lifted input needs nothing more: it is a Gaussian of variance 0 and mean 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tnsim.names import SIDES, Side


class Leg(NamedTuple):
    """Input leg `index` of the layer on one side."""

    side: Side
    index: int


@dataclass(frozen=True)
class Joining:
    """One orbit of joinings: a representative, its weight, the sides to symmetrise first."""

    weight: float
    pairs: tuple[tuple[Leg, Leg], ...]
    capped: tuple[Leg, ...] = ()
    symmetrised: tuple[Side, ...] = ()


def straight(order: int, symmetrised: bool) -> tuple[Joining, ...]:
    """Leg i of the bra with leg i of the ket, the ket symmetrised or not: the tree metrics.

    One side suffices, since the symmetriser commutes with the Gram step and is idempotent (paper, appendix A.2).
    """
    pairs = tuple((Leg("A", i), Leg("B", i)) for i in range(order))
    return (Joining(1.0, pairs, symmetrised=("B",) if symmetrised and order > 1 else ()),)


@cache
def gaussian(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    """Orbits of all pairings of `bra` + `ket` legs, with legs left over for the mean unless `centred`.

    Legs of one side are exchangeable, so an orbit is the number of cross pairs, of pairs inside either
    side, and of capped legs. The weights sum to the Gaussian moment of order bra + ket at S = m = 1.
    """
    found = []
    for cross in range(min(bra, ket) + 1):
        for bra_caps in range((bra - cross) % 2, bra - cross + 1, 2):
            for ket_caps in range((ket - cross) % 2, ket - cross + 1, 2):
                caps = bra_caps + ket_caps
                count = (
                    _sides(bra, cross, bra_caps)
                    * _sides(ket, cross, ket_caps)
                    * math.factorial(cross)
                )
                weight = hermite_at_one(caps) * count
                if weight and not (centred and caps):
                    found.append(
                        _representative(float(weight), (bra, ket), cross, (bra_caps, ket_caps))
                    )
    return tuple(found)


@cache
def gaussian_mean(order: int, centred: bool) -> tuple[Joining, ...]:
    """The same for one tensor alone: the mean of a layer's output."""
    found = []
    for caps in range(order % 2, order + 1, 2):
        weight = hermite_at_one(caps) * _sides(order, 0, caps)
        if weight and not (centred and caps):
            found.append(_representative(float(weight), (order, 0), 0, (caps, 0)))
    return tuple(found)


@cache
def hermite_at_one(k: int) -> int:
    """He_k(1): He_{k+1}(1) = He_k(1) - k He_{k-1}(1)."""
    return 1 if k < 2 else hermite_at_one(k - 1) - (k - 1) * hermite_at_one(k - 2)


def _sides(legs: int, cross: int, caps: int) -> int:
    """Ways to choose the crossing and the capped legs of one side and to pair up the rest."""
    rest = legs - cross - caps
    matchings = math.prod(range(1, rest, 2))
    return math.comb(legs, cross) * math.comb(legs - cross, caps) * matchings


def _representative(
    weight: float, legs: tuple[int, int], cross: int, caps: tuple[int, int]
) -> Joining:
    pairs = [(Leg("A", i), Leg("B", i)) for i in range(cross)]
    capped: list[Leg] = []
    for side, count, capped_here in zip(SIDES, legs, caps, strict=True):
        capped += [Leg(side, i) for i in range(cross, cross + capped_here)]
        start = cross + capped_here
        pairs += [(Leg(side, i), Leg(side, i + 1)) for i in range(start, count, 2)]
    return Joining(weight, tuple(pairs), tuple(capped), _to_symmetrise(legs, cross, caps))


def _to_symmetrise(legs: tuple[int, int], cross: int, caps: tuple[int, int]) -> tuple[Side, ...]:
    """Sides whose legs the representative treats unequally; of two all-crossing sides, the ket alone."""
    if legs[0] == legs[1] == cross:
        return ("B",) if cross > 1 else ()
    mixed = []
    for side, count, capped in zip(SIDES, legs, caps, strict=True):
        paired = count - cross - capped
        alike = max(cross, capped, paired) == count and not paired > 2
        if not alike:
            mixed.append(side)
    return tuple(mixed)
