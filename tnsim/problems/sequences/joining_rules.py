"""The rules by which a metric joins legs layer by layer, and the matchings that they allow.

The *Gaussian* metrics ask for E[product of legs]. By Isserlis' theorem that is a sum over all ways
of joining some legs in pairs and leaving the others alone: a pair counts by its covariance, a
single leg by its mean.

The *tree* metrics ask for the inner product of two layers as tensors. Such a tensor reads the
state through legs, `weight x + bias`, each with a copy of the lifted state (1, x) of its own, and
leg r of the bra meets leg p(r) of the ket. For `Frobenius` p is the identity; `TreeSymmetric`
averages over all n! permutations p. Let m_r, in place of a mean, be the value of leg r at the zero
input, and let C_rp, in place of a covariance, be the inner product of the rest of two legs. Two
legs that meet then count as

    C_rp + m_r m_p^T.

Multiplied out, a product of n such factors is again a sum over matchings: some legs joined in
pairs across, the others left to their values at zero. In these terms both families of metrics are
a single computation. Layers that act position by position use the sum multiplied out (`matchings`),
attention uses the factors (`JoiningRule.with_constants`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tnsim.metrics.pairings import PairingRule
from tnsim.names import STREAM
from tnsim.problems.sequences.notation import Leg


class JoiningRule(NamedTuple):
    """A rule that says which two legs may be joined.

    Args:
        name: Part of the names of definitions.
        joins: Test whether a leg may be joined with another.
        with_constants: Whether every leg has a partner, and two joined legs count by `C + m m^T`
            instead of by C.
    """

    name: str
    joins: Callable[[Leg, Leg], bool]
    with_constants: bool = False


def _across(one: Leg, two: Leg) -> bool:
    return one.slot != two.slot


ALL = JoiningRule("all", lambda one, two: True)
NONE = JoiningRule("none", lambda one, two: False)
ACROSS = JoiningRule("across", _across, with_constants=True)
STRAIGHT = JoiningRule(
    "straight", lambda one, two: _across(one, two) and one.role == two.role, with_constants=True
)
STREAM_ACROSS = JoiningRule(
    "stream", lambda one, two: _across(one, two) and STREAM in (one.role, two.role)
)


class MetricRules(NamedTuple):
    """The rules of a metric.

    Args:
        within: Rule for a single layer alone, for its mean.
        across: Rule for a layer of the bra and a layer of the ket.
        stream: Rule for the residual stream of a side and the layer of the other.
        gaussian: Whether the metric asks for expectations, and joins legs of a single layer too.
        symmetrised: Whether joinings across are averaged over the permutations of a layer's legs.
    """

    within: JoiningRule
    across: JoiningRule
    stream: JoiningRule
    gaussian: bool
    symmetrised: bool

    def share(self, order: int, pairs: int) -> float:
        """Weight of a matching that joins `pairs` of `order` legs across.

        Of the n! permutations, (n - k)! contain k given pairs. The other legs meet by their values
        at zero, with a product that does not depend on which of them meet.
        """
        if not self.symmetrised:
            return 1.0
        return math.factorial(order - pairs) / math.factorial(order)

    def skip_share(self, order: int) -> float:
        """Weight of the stream past a layer of this order where it meets a leg of the other side.

        As a tensor with n legs a skip is `x (x) 1 (x) ... (x) 1`, averaged over which leg holds
        the state x. The tree metrics join leg with leg, so a leg of the other side meets x in
        1 of n cases, and else the constant. A Gaussian metric depends on the function alone.
        """
        return 1.0 if self.gaussian else 1.0 / order


def rules_of(rule: PairingRule) -> MetricRules:
    """The rules by which a metric joins legs layer by layer.

    Example:
        >>> rules_of(PairingRule.ISSERLIS).gaussian
        True
    """
    if rule is PairingRule.ISSERLIS:
        return MetricRules(ALL, ALL, ALL, gaussian=True, symmetrised=False)
    symmetrised = rule is PairingRule.SYMMETRISED
    across = ACROSS if symmetrised else STRAIGHT
    # A tree metric joins no legs of one layer, so the mean of a layer is its value at zero.
    return MetricRules(NONE, across, STREAM_ACROSS, gaussian=False, symmetrised=symmetrised)


class Matching(NamedTuple):
    """A way of joining legs: some in pairs, the other, single legs left to their means."""

    pairs: tuple[tuple[Leg, Leg], ...]
    singles: tuple[Leg, ...]

    @property
    def crossing(self) -> int:
        """Number of pairs between the bra and the ket."""
        return sum(one.slot != two.slot for one, two in self.pairs)


def matchings(legs: tuple[Leg, ...], rule: JoiningRule) -> Iterator[Matching]:
    """All ways of joining some legs in pairs that the rule allows, the way without pairs included.

    Example:
        >>> legs = (Leg("bra", "LEFT"), Leg("bra", "RIGHT"), Leg("ket", "WEIGHT"))
        >>> [len(matching.pairs) for matching in matchings(legs, ACROSS)]
        [1, 1, 0]
    """
    if not legs:
        yield Matching((), ())
        return
    # The first leg joins a later one, or is left alone: every matching is met once.
    first, *others = legs
    for n, partner in enumerate(others):
        if not rule.joins(first, partner):
            continue
        rest = (*others[:n], *others[n + 1 :])
        for pairs, singles in matchings(rest, rule):
            yield Matching(((first, partner), *pairs), singles)
    for pairs, singles in matchings(tuple(others), rule):
        yield Matching(pairs, (first, *singles))
