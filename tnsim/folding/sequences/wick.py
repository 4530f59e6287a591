"""Moments of attention scores, sums before products. In: moments of legs. Out: definitions.

A head's output is a value leg times two scores, each the inner product of a query leg and a key
leg. The expectation of the product of two such outputs joins ten legs in 945 ways (paper,
appendix A.3), and in more where legs may be left to their means. But every way is a set of
*chains*: the partner of a leg sits in a score, the other leg of that score has a partner, and so
on. So the sum is expanded as a hafnian is, along a row. Take the leg u that carries the output,
and a set D of scores, in

    E[u w^T prod D].

Either u is left to its mean, or it is joined with w, or with a leg x of a score in D. In the last
case, with x' the other leg of that score, u (x . x') becomes the matrix C_ux times x', and what
stays behind is the same question with one score less. Summed over all legs x of the scores in D:

    E[u w^T prod D] = C_uw E[prod D]  +  m_u E[w prod D]^T  +  sum_x C_ux E[x' w^T prod (D - x)]
    E[u prod D]     = m_u E[prod D]                         +  sum_x C_ux E[x' prod (D - x)]
    E[prod D]       = trace of E[q k^T prod (D - q)],  for one score (q . k) of D,

where D - x are the scores without that of x. Each distinct question is one definition: for ten
legs 256 products of d_head x d_head matrices per pair of heads, instead of 945 chains of up to
five. Where a rule forbids to join two legs, or a leg has no mean, there are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from tnsim.engine.problem import StageBuilder, Term, renamed
from tnsim.folding.sequences.notation import (
    FIRST,
    SECOND,
    Leg,
    Product,
    Score,
    Sum,
    in_order,
    indices_of,
)

LINK, RING = "z", "y"
"""Indices summed within one product: one links two arrays, the other makes them a ring, a trace."""

Scores = frozenset[Score]


class LegMoments(Protocol):
    """What an expansion is made of."""

    def covariance(self, one: Leg, two: Leg) -> Sum:
        """The ways in which two legs may be joined, if any. Ends `FIRST` and `SECOND`."""
        ...

    def mean(self, leg: Leg) -> Product | None:
        """The mean of a leg, None where it has none or may not be left to it. End `FIRST`."""
        ...


class Wick:
    """Expectations of products of legs and scores; each question is answered once.

    Args:
        name: Begins the names of the definitions.
        legs: Covariances and means of the legs.
        stage: Takes the definitions.
    """

    def __init__(self, name: str, legs: LegMoments, stage: StageBuilder) -> None:
        self.name = name
        self.legs = legs
        self.stage = stage
        self._answers: dict[tuple, Sum] = {}
        self._count = 0

    def matrix(self, u: Leg, w: Leg, scores: Scores) -> Sum:
        """E[u w^T prod scores], ends `FIRST` and `SECOND`."""

        def products() -> Iterator[Product]:
            # u with w: C_uw E[prod D]
            yield from _products(self.legs.covariance(u, w), self.scalar(scores))
            # u left to its mean: m_u E[w prod D]^T, where w takes the second end
            mean = self.legs.mean(u)
            if mean is not None:
                rest = _renamed(self.vector(w, scores), {FIRST: SECOND})
                yield from _products((mean,), rest)
            # u with a leg x of a score (x . x'): u x^T becomes C_ux, and C_ux x' stands for u
            for x, mate, others in _partners(scores):
                joined = _renamed(self.legs.covariance(u, x), {SECOND: LINK})
                rest = _renamed(self.matrix(mate, w, others), {FIRST: LINK})
                yield from _products(joined, rest)

        return self._once(("matrix", u, w, scores), products)

    def vector(self, u: Leg, scores: Scores) -> Sum:
        """E[u prod scores], end `FIRST`."""

        def products() -> Iterator[Product]:
            mean = self.legs.mean(u)
            if mean is not None:
                yield from _products((mean,), self.scalar(scores))
            for x, mate, others in _partners(scores):
                joined = _renamed(self.legs.covariance(u, x), {SECOND: LINK})
                rest = _renamed(self.vector(mate, others), {FIRST: LINK})
                yield from _products(joined, rest)

        return self._once(("vector", u, scores), products)

    def scalar(self, scores: Scores) -> Sum:
        """E[prod scores]."""
        if not scores:
            return ((),)  # the empty product, 1
        first = min(scores)  # any one will do; always the same, so that questions recur
        q, k = first
        rest = scores - {first}

        # (q . k) is the trace of q k^T, so these are the three summands of `matrix` for u = q and
        # w = k with both ends on one index. Traced one by one, they need no matrix E[q k^T ...].
        def products() -> Iterator[Product]:
            trace = _renamed(self.legs.covariance(q, k), {FIRST: LINK, SECOND: LINK})
            yield from _products(trace, self.scalar(rest))
            mean = self.legs.mean(q)
            if mean is not None:
                other = _renamed(self.vector(k, rest), {FIRST: LINK})
                yield from _products((renamed(mean, {FIRST: LINK}),), other)
            for x, mate, others in _partners(rest):
                joined = _renamed(self.legs.covariance(q, x), {FIRST: LINK, SECOND: RING})
                back = _renamed(self.matrix(mate, k, others), {FIRST: RING, SECOND: LINK})
                yield from _products(joined, back)

        return self._once(("scalar", scores), products)

    def _once(self, question: tuple, products: Callable[[], Iterable[Product]]) -> Sum:
        if question not in self._answers:
            self._answers[question] = self._add_up(products())
        return self._answers[question]

    def _add_up(self, products: Iterable[Product]) -> Sum:
        """The sum of products: for each set of open indices one array.

        It is a definition, unless it is nothing but an array that exists already.
        """
        # Arrays are added only where they have the same axes: a summand that does not depend on a
        # position or a head is not spread over it, but kept as a summand of its own.
        by_indices: dict[tuple[str, ...], list[Product]] = {}
        for product in products:
            open_indices = indices_of(product) - {LINK, RING}
            by_indices.setdefault(in_order(open_indices), []).append(product)
        values: list[Product] = []
        for indices, group in by_indices.items():
            if len(group) == 1 and _is_one_array(group[0]):
                values.append(group[0])
                continue
            terms = [Term(1.0, product) for product in group]
            name = f"{self.name}.{self._count}"
            self._count += 1
            values.append((self.stage.define(name, indices, terms, kept=False),))
        return tuple(values)


def _is_one_array(product: Product) -> bool:
    """Whether nothing is left to be computed: at most one array, and nothing summed."""
    return len(product) < 2 and not indices_of(product) & {LINK, RING}


def _partners(scores: Scores) -> Iterator[tuple[Leg, Leg, Scores]]:
    """Every leg of the scores, the other leg of its score, and the scores left."""
    for score in sorted(scores):
        rest = scores - {score}
        yield score.query, score.key, rest
        yield score.key, score.query, rest


def _products(one: Sum, two: Sum) -> Iterator[Product]:
    """Two sums multiplied out."""
    for first in one:
        for second in two:
            yield (*first, *second)


def _renamed(value: Sum, new: dict[str, str]) -> Sum:
    """A sum with indices renamed."""
    return tuple(renamed(product, new) for product in value)
