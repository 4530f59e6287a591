"""Which legs a metric joins in models of sequences. In: a metric. Out: rules, the matchings that
they allow.

The *Gaussian* metrics take E[product of legs] by Isserlis' theorem: the sum over all ways of
joining some legs in pairs, each by its covariance, and of handing each of the others to its mean.

The *tree* metrics read the same layers as tensors. With the constant as one more coordinate of the
state, x~ = (1, x), a leg is `W~ x~`, and leg r of the bra meets leg p(r) of the ket. Over one
state below, where the constants meet as 1 * 1, two legs meet in

    C_rp + m_r m_p^T,    C the product of the states without the constant, m a leg's value at the
    zero input,

so "mean" and "covariance" are words for both families. `Frobenius` takes p = identity,
`TreeSymmetric` the average over the n! permutations. From the whole is subtracted the product of
the two values at zero, as a covariance is the moment without the product of the means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tnsim.folding.sequences.notation import Leg
from tnsim.metrics.metric import Frobenius, Metric
from tnsim.names import STREAM


class Rule(NamedTuple):
    """Which two legs may be joined.

    with_constants: Every leg has a partner, and two joined legs count with the product of their
        values at zero.
    """

    name: str
    joins: Callable[[Leg, Leg], bool]
    with_constants: bool = False


def _always(one: Leg, two: Leg) -> bool:
    return True


def _never(one: Leg, two: Leg) -> bool:
    return False


def _across(one: Leg, two: Leg) -> bool:
    return one.slot != two.slot


def _straight_across(one: Leg, two: Leg) -> bool:
    return _across(one, two) and one.role == two.role


def _stream_across(one: Leg, two: Leg) -> bool:
    return _across(one, two) and STREAM in (one.role, two.role)


ALL = Rule("all", _always)
NONE = Rule("none", _never)
ACROSS = Rule("across", _across, with_constants=True)
STRAIGHT = Rule("straight", _straight_across, with_constants=True)
STREAM_ACROSS = Rule("stream", _stream_across)


class MetricRules(NamedTuple):
    """The rules of a metric.

    within: For the legs of one layer: its mean, or its value at zero.
    across: For a layer of the bra and one of the ket.
    stream: For the residual stream of one side and the layer of the other.
    gaussian: Whether legs of one model are joined, and scales are shared by all values of a model.
    symmetrised: Whether the joinings across are averaged over the permutations of a layer's legs.
    """

    within: Rule
    across: Rule
    stream: Rule
    gaussian: bool
    symmetrised: bool

    def share(self, order: int, pairs: int) -> float:
        """Weight of a matching that joins `pairs` of `order` legs across.

        Of the n! permutations (n - k)! contain k given pairs; in those the other legs meet by
        their constants, in whatever order.
        """
        if not self.symmetrised:
            return 1.0
        return math.factorial(order - pairs) / math.factorial(order)

    def skip_share(self, order: int) -> float:
        """Weight with which the stream past a layer of that order meets a leg of the other side.

        As a tensor a skip is `x (x) 1 (x) ... (x) 1`, averaged over which of the n legs holds the
        state. The tree metrics join leg with leg, so it meets a given state in one of n cases. A
        Gaussian metric asks for the function alone.
        """
        return 1.0 if self.gaussian else 1.0 / order


def rules_of(metric: Metric) -> MetricRules:
    """The rules by which a metric joins legs layer by layer."""
    if metric.closes:
        return MetricRules(ALL, ALL, ALL, gaussian=True, symmetrised=False)
    symmetrised = not isinstance(metric, Frobenius)
    across = ACROSS if symmetrised else STRAIGHT
    return MetricRules(NONE, across, STREAM_ACROSS, gaussian=False, symmetrised=symmetrised)


class Matching(NamedTuple):
    """A way of joining legs: some in pairs, the others, singles, left to their means."""

    pairs: tuple[tuple[Leg, Leg], ...]
    singles: tuple[Leg, ...]

    @property
    def crossing(self) -> int:
        """Number of pairs between the bra and the ket."""
        return sum(one.slot != two.slot for one, two in self.pairs)


def matchings(legs: tuple[Leg, ...], rule: Rule) -> Iterator[Matching]:
    """All ways of joining some legs in pairs that the rule allows, the one without pairs included.

    Example:
        >>> legs = (Leg("bra", "LEFT"), Leg("bra", "RIGHT"), Leg("ket", "WEIGHT"))
        >>> [len(matching.pairs) for matching in matchings(legs, ACROSS)]
        [1, 1, 0]
    """
    if not legs:
        yield Matching((), ())
        return
    first, *others = legs
    for n, partner in enumerate(others):
        if not rule.joins(first, partner):
            continue
        rest = (*others[:n], *others[n + 1 :])
        for pairs, singles in matchings(rest, rule):
            yield Matching(((first, partner), *pairs), singles)
    for pairs, singles in matchings(tuple(others), rule):
        yield Matching(pairs, (first, *singles))
