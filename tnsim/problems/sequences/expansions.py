"""Moments of attention layers: expansions of scores, and their sums over positions.

*Scores, sums before products.* A head's output is a value leg times two scores, each the inner
product of a query leg and a key leg. The expectation of the product of two such outputs joins ten
legs in 945 ways (paper, appendix A.3), and in more where legs may be left to their means. But every
way is a set of *chains*: the partner of a leg sits in a score, the other leg of that score has a
partner, and so on. So the sum is expanded as a hafnian is, along a row. Take the leg u that carries
the output, and a set D of scores, in

    E[u w^T prod D].

Either u is left to its mean, or it is joined with w, or with a leg x of a score in D. In the last
case, with x' the other leg of that score, u (x . x') becomes the matrix C_ux times x', and the
remaining factor is the same expectation with a score less. Summed over all legs x of the scores
in D:

    E[u w^T prod D] = C_uw E[prod D]  +  m_u E[w prod D]^T  +  sum_x C_ux E[x' w^T prod (D - x)]
    E[u prod D]     = m_u E[prod D]                         +  sum_x C_ux E[x' prod (D - x)]
    E[prod D]       = trace of E[q k^T prod (D - q)],  for one score (q . k) of D,

where D - x are the scores without the score of x. Each distinct expectation is a definition: for
ten legs 256 products of d_head x d_head matrices per pair of heads, instead of 945 chains of up to
five. Where a rule forbids joining two legs, or a leg has no mean, there are fewer.

*Positions.* A moment of attention layers is a sum over keys of such expectations. How it is summed
depends on the states below:

- States at different positions depend on each other: any two legs may be joined, whatever their
  positions. A single expansion serves all positions, which are indices of its arrays, and the mask
  is an array that sums over keys.
- States at different positions are independent: the sum falls into patterns of coinciding positions
  (see `coincidences`). Each pattern has an expansion of its own in which only legs at a common
  position are joined; its arrays have a single index, `g`, over the tuples of positions of the
  pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from tnsim.engine.ir.problem import Operand, StageBuilder, Term, renamed
from tnsim.names import MASK, SLOTS, STREAM, Slot
from tnsim.problems.sequences.coincidences import ABSENT, CAUSAL, OPEN, Pattern, patterns
from tnsim.problems.sequences.joining_rules import JoiningRule
from tnsim.problems.sequences.notation import (
    FIRST,
    POSITIONS,
    SECOND,
    Leg,
    Product,
    Score,
    Sum,
    in_order,
    indices_of,
)
from tnsim.problems.sequences.position_wise import Projections

LINK, RING = "z", "y"
"""Indices summed within one product: one links two arrays, the other makes them a ring, a trace."""
Scores = frozenset[Score]


class Wick:
    """Expectations of products of legs and scores.

    Args:
        name: Prefix of the names of the definitions.
        legs: Covariances and means of the legs.
        stage: Builder that receives the definitions.

    Attributes:
        matrix, vector, scalar: Expectations of `_matrix`, `_vector`, `_scalar`, each expanded once.
    """

    def __init__(self, name: str, legs: RuledMoments, stage: StageBuilder) -> None:
        self.name = name
        self.legs = legs
        self.stage = stage
        self._count = 0
        self.matrix = cache(self._matrix)
        self.vector = cache(self._vector)
        self.scalar = cache(self._scalar)

    def _matrix(self, u: Leg, w: Leg, scores: Scores) -> Sum:
        """The expectation E[u w^T prod scores], with the ends `FIRST` and `SECOND`."""

        def products() -> Iterator[Product]:
            # u with w: C_uw E[prod D]
            yield from _multiplied_out(self.legs.covariance(u, w), self.scalar(scores))
            # u left to its mean: m_u E[w prod D]^T, where w takes the second end
            mean = self.legs.mean(u)
            if mean is not None:
                rest = _renamed_sum(self.vector(w, scores), {FIRST: SECOND})
                yield from _multiplied_out((mean,), rest)
            # u with a leg x of a score (x . x'): u x^T becomes C_ux, and C_ux x' stands for u
            for x, mate, others in _score_partners(scores):
                joined = _renamed_sum(self.legs.covariance(u, x), {SECOND: LINK})
                rest = _renamed_sum(self.matrix(mate, w, others), {FIRST: LINK})
                yield from _multiplied_out(joined, rest)

        return self._add_up(products())

    def _vector(self, u: Leg, scores: Scores) -> Sum:
        """The expectation E[u prod scores], with the end `FIRST`."""

        def products() -> Iterator[Product]:
            mean = self.legs.mean(u)
            if mean is not None:
                yield from _multiplied_out((mean,), self.scalar(scores))
            for x, mate, others in _score_partners(scores):
                joined = _renamed_sum(self.legs.covariance(u, x), {SECOND: LINK})
                rest = _renamed_sum(self.vector(mate, others), {FIRST: LINK})
                yield from _multiplied_out(joined, rest)

        return self._add_up(products())

    def _scalar(self, scores: Scores) -> Sum:
        """The expectation E[prod scores]."""
        if not scores:
            return ((),)  # the empty product, 1
        first = min(scores)  # any score serves; always the same, so that expectations recur
        q, k = first
        # Isserlis along a row: the leg q is joined in turn with k, with its mean, and with every
        # leg that is left.
        rest = scores - {first}

        # (q . k) is the trace of q k^T, so these are the three summands of `matrix` for u = q and
        # w = k with both ends on one index. Traced one by one, they need no matrix E[q k^T ...].
        def products() -> Iterator[Product]:
            trace = _renamed_sum(self.legs.covariance(q, k), {FIRST: LINK, SECOND: LINK})
            yield from _multiplied_out(trace, self.scalar(rest))
            mean = self.legs.mean(q)
            if mean is not None:
                other = _renamed_sum(self.vector(k, rest), {FIRST: LINK})
                yield from _multiplied_out((renamed(mean, {FIRST: LINK}),), other)
            for x, mate, others in _score_partners(rest):
                joined = _renamed_sum(self.legs.covariance(q, x), {FIRST: LINK, SECOND: RING})
                back = _renamed_sum(self.matrix(mate, k, others), {FIRST: RING, SECOND: LINK})
                yield from _multiplied_out(joined, back)

        return self._add_up(products())

    def _add_up(self, products: Iterable[Product]) -> Sum:
        """The sum of products, with an array for each set of open indices.

        Each array becomes a definition, unless it exists already.
        """
        # Arrays are added only where they have the same axes: a summand that does not depend on a
        # position or a head is not spread over it, but remains a summand of its own.
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
    """Whether a product needs no computation: a single array or none, and no summed index."""
    return len(product) < 2 and not indices_of(product) & {LINK, RING}


def _score_partners(scores: Scores) -> Iterator[tuple[Leg, Leg, Scores]]:
    """Every leg of the scores, the other leg of its score, and the remaining scores."""
    for score in sorted(scores):
        rest = scores - {score}
        yield score.query, score.key, rest
        yield score.key, score.query, rest


def _multiplied_out(one: Sum, two: Sum) -> Iterator[Product]:
    """The products of two sums, multiplied out."""
    for first in one:
        for second in two:
            # Operands of a product commute, so a product of sums is the sum over all pairs.
            yield (*first, *second)


def _renamed_sum(value: Sum, new: dict[str, str]) -> Sum:
    """The sum with its indices renamed."""
    return tuple(renamed(product, new) for product in value)


class Frame(NamedTuple):
    """A summand of a sum over positions.

    Args:
        wick: Expectations of products of legs, at the positions of the frame.
        sums: Arrays that are multiplied with the expectations to sum over keys.
        pattern: Pattern of coinciding positions; None for all positions in a single frame.
    """

    wick: Wick
    sums: Product
    pattern: Pattern | None

    @property
    def same(self) -> bool:
        """Whether both outputs are at the same position, though two positions are told apart."""
        return self.pattern is not None and self.pattern.same_output

    @property
    def linked(self) -> bool:
        """Whether a state of the bra may depend on a state of the ket."""
        return self.pattern is None or self.pattern.linked


class RuledMoments:
    """Covariances and means of legs as a rule allows them, from which an expansion is made.

    Args:
        legs: Means and covariances without a rule.
        rule: Rule that says which legs may be joined.
        pattern: Pattern with the tuples of positions at which arrays are read; None for all
            positions.

    Attributes:
        covariance, mean: The moments of `_covariance` and `_mean`, each found once.
    """

    def __init__(self, legs: Projections, rule: JoiningRule, pattern: Pattern | None) -> None:
        self.legs = legs
        self.rule = rule
        self.pattern = pattern
        self.covariance = cache(self._covariance)
        self.mean = cache(self._mean)

    def _covariance(self, one: Leg, two: Leg) -> Sum:
        """The sum over the ways to join two legs, with the ends `FIRST` and `SECOND`.

        The ways are the covariance of the legs and, if the rule says so, the product of their
        values at zero. Legs at different, independent positions have no covariance.
        """
        if not self.rule.joins(one, two):
            return ()
        position = self.legs.names.position
        products: list[Product] = []
        if self.pattern is None or self.pattern.joins(position(one), position(two)):
            products.append(self._placed_product(self.legs.covariance(one, two), one))
        if self.rule.with_constants:  # C + m m'^T, see `joining_rules`
            first, second = self.legs.mean(one), self.legs.mean(two)
            if first is not None and second is not None:
                at_first = self._placed_product(first, one)
                at_second = renamed(self._placed_product(second, two), {FIRST: SECOND})
                products.append((*at_first, *at_second))
        return tuple(products)

    def _mean(self, leg: Leg) -> Product | None:
        """The mean of a leg, with the end `FIRST`; None where it vanishes or needs a partner.

        The stream needs a partner, as only covariances with the stream are asked for.
        """
        if self.rule.with_constants or leg.role == STREAM:
            return None
        mean = self.legs.mean(leg)
        return None if mean is None else self._placed_product(mean, leg)

    def _placed_product(self, product: Product, leg: Leg) -> Product:
        """A product for the position of a leg, read at the tuples of the pattern."""
        if self.pattern is None:
            return product
        place = self.pattern.class_of(self.legs.names.position(leg))
        return tuple(self._gathered_array(operand, self.pattern, place) for operand in product)

    def _gathered_array(self, operand: Operand, pattern: Pattern, place: int) -> Operand:
        """The array, read at the position of class `place` in every tuple.

        An axis `g` of tuples replaces the axis of positions.
        """
        # packed[..., g, ...] = sum_s array[..., s, ...] AT[g, s]: a gather, written as a product
        axes = [n for n, index in enumerate(operand.indices) if index in POSITIONS]
        if not axes:
            return operand
        (axis,) = axes
        old = tuple(f"x{n}" for n in range(len(operand.indices)))
        new = (*old[:axis], "g", *old[axis + 1 :])
        at = Operand(pattern.at(place), ("g", old[axis]))
        name = f"{operand.name}.{'|'.join(pattern.classes)}.{place}"
        packed = self.legs.stage.define(name, new, [Term(1.0, (Operand(operand.name, old), at))])
        indices = (*operand.indices[:axis], "g", *operand.indices[axis + 1 :])
        return Operand(packed.name, indices)


class Expansions:
    """Expansions of moments of two layers, each made once.

    Args:
        name: Prefix of the names of the definitions.
        legs: Means and covariances of the legs.
    """

    def __init__(self, name: str, legs: Projections) -> None:
        self.name = name
        self.legs = legs
        self._expansion = cache(self._new_expansion)

    def frames(self, positions: dict[Slot, str], rule: JoiningRule) -> Iterator[Frame]:
        """The frames into which a sum over keys falls.

        Args:
            positions: Output position of every slot that takes part, followed by the key position
                where an attention layer takes part.
            rule: Rule that says which legs may be joined.
        """
        names = self.legs.names
        mixing: list[Slot] = [slot for slot, variables in positions.items() if len(variables) == 2]
        known = names.step.positions
        if not known.independent:
            masks = tuple(names.leaf(slot, MASK, *positions[slot]) for slot in mixing)
            yield self.frame(rule, masks, None)
            return
        masks = "".join(self._mask_of(slot, mixing) for slot in SLOTS)
        variables = "".join(positions.values())
        for pattern in patterns(variables, masks, known.relative, known.n_ctx):
            # How often each tuple of distinct positions occurs for given outputs stands in the
            # place of the masks.
            count = Operand(pattern.count, ("g", *pattern.outputs))
            yield self.frame(rule, (count,), pattern)

    def frame(self, rule: JoiningRule, sums: Product, pattern: Pattern | None) -> Frame:
        """The frame of a pattern under a rule for joining legs."""
        return Frame(self._expansion(rule, pattern), sums, pattern)

    def _new_expansion(self, rule: JoiningRule, pattern: Pattern | None) -> Wick:
        where = "" if pattern is None else "." + "|".join(pattern.classes)
        moments = RuledMoments(self.legs, rule, pattern)
        return Wick(f"{self.name}.{rule.name}{where}", moments, self.legs.stage)

    def _mask_of(self, slot: Slot, mixing: list[Slot]) -> str:
        """The sort of mask of a slot, `ABSENT` without attention."""
        if slot not in mixing:
            return ABSENT
        return CAUSAL if self.legs.names.kind(slot).causal else OPEN
