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
  (see below). Each pattern has an expansion of its own in which only legs at a common
  position are joined; its arrays have a single index, `g`, over the tuples of positions of the
  pattern.

*Patterns of coinciding positions.* A product of two attention outputs is summed over the keys `t`
and `T`, and holds legs at up to four positions: `s` and `t` of the bra, `S` and `T` of the ket.
Where the states at different positions are independent, two legs can be joined only if they read
the same position. So the sum is split by which positions coincide, over the partitions of {s, t, S,
T}. These are the *patterns*: "sS|t|T" stands for s = S, with t and T different from it and from
each other. Within a pattern

- it is known which legs can be joined, so that the expansion has few terms, and
- a sum over *different* positions is left, a position for every class of the partition.

If the states are moreover distributed alike at all positions, a tuple of positions and its
translates have equal values: RoPE depends on differences of positions only. Then a single tuple of
each set of translates is evaluated, the tuple with lowest position 0, and it counts as often as it
has translates.

Tuples are packed into an index `g`. Two sorts of arrays, leaves of the problem, describe them:

    AT[g, p]          1 where a class of tuple g stands at position p: reads arrays there
    COUNT[g, s, ...]  number of translates of tuple g with outputs at s, ...: sums up values
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tnsim.engine.ir.problem import Operand, StageBuilder, Term, renamed, strip_alias
from tnsim.names import AT, COUNT, MASK, SLOTS, STREAM, PositionLeaf, Slot
from tnsim.problems.sequences.notation import (
    FIRST,
    POSITIONS,
    SECOND,
    JoiningRule,
    Leg,
    Product,
    Score,
    Sum,
    in_order,
    indices_of,
)
from tnsim.problems.sequences.position_wise import Projections
from tnsim.sessions import own_cache, session_cache

BRA, KET = {"s", "t"}, {"S", "T"}
OUTPUTS = ("s", "S")
CAUSAL, OPEN, ABSENT = "c", "n", "-"
"""Masks of a layer: keys up to the output's position, all keys, and no keys at all."""


LINK, RING = "z", "y"
"""Indices summed within one product: one links two arrays, the other makes them a ring, a trace."""
Scores = frozenset[Score]


class Pattern(NamedTuple):
    """Position variables by class; different classes are at different positions.

    Args:
        classes: Classes of variables, such as ("sS", "t", "T").
        masks: Masks of the bra and of the ket, each `CAUSAL`, `OPEN` or `ABSENT`.
        relative: Whether tuples count up to translation.
    """

    classes: tuple[str, ...]
    masks: str
    relative: bool

    def class_of(self, variable: str) -> int:
        """Number of the class of a variable."""
        return next(n for n, members in enumerate(self.classes) if variable in members)

    def joins(self, one: str, two: str) -> bool:
        """Whether two variables are at a single position."""
        return self.class_of(one) == self.class_of(two)

    @property
    def variables(self) -> str:
        """All position variables, class by class."""
        return "".join(self.classes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The output positions; the first alone where they coincide."""
        present = tuple(variable for variable in OUTPUTS if variable in self.variables)
        return present[:1] if self.same_output else present

    @property
    def same_output(self) -> bool:
        """Whether two outputs that are told apart are at a single position."""
        return any(set(OUTPUTS) <= set(members) for members in self.classes)

    @property
    def linked(self) -> bool:
        """Whether a position of the bra coincides with a position of the ket."""
        return any(BRA & set(members) and KET & set(members) for members in self.classes)

    def at(self, place: int) -> str:
        """Name of the array AT of a single class."""
        return self._array(AT, place)

    @property
    def count(self) -> str:
        """Name of the array COUNT."""
        return self._array(COUNT, *map(self.class_of, self.outputs))

    def _array(self, array: str, *places: int) -> str:
        """Name of an array of some classes, the same for all patterns that have this array."""
        orders = _class_orders(self)
        ranks = tuple("".join(map(str, orders[:, place])) for place in places)
        return str(PositionLeaf(array, self.relative, len(self.classes), ranks))


def patterns(variables: Iterable[str], masks: str, relative: bool, n_ctx: int) -> Iterator[Pattern]:
    """All patterns of some position variables that occur under the masks."""
    for classes in _partitions(_in_order(variables)):
        pattern = Pattern(classes, masks, relative)
        if len(_class_orders(pattern)) and _set_count(len(classes), relative, n_ctx):
            yield pattern


@session_cache
def _class_orders(pattern: Pattern) -> Int[np.ndarray, "orders classes"]:
    """Orders of the classes in a sequence that the masks allow, as the rank of every class."""
    ranks = np.array(list(itertools.permutations(range(len(pattern.classes)))))
    # With outputs at one position only, the ket's output is called `s`, like the bra's.
    ket_output = "S" if "S" in pattern.variables else "s"
    keep = np.ones(len(ranks), bool)
    for mask, output, key in zip(pattern.masks, ("s", ket_output), ("t", "T"), strict=True):
        if mask == CAUSAL:
            # t <= s; in one class both have equal ranks.
            keep &= ranks[:, pattern.class_of(output)] >= ranks[:, pattern.class_of(key)]
    return ranks[keep]


def _set_count(size: int, relative: bool, n_ctx: int) -> int:
    """Number of sets of different positions; relative ones contain 0."""
    return math.comb(n_ctx - relative, size - relative)


@session_cache
def _ascending_sets(size: int, relative: bool, n_ctx: int) -> Int[np.ndarray, "sets size"]:
    """All sets of different positions, ascending; relative ones have the lowest position 0.

    Example:
        >>> _ascending_sets(2, True, 3).tolist()
        [[0, 1], [0, 2]]
    """
    lowest = int(relative)
    sets = itertools.combinations(range(lowest, n_ctx), size - lowest)
    flat = np.fromiter(itertools.chain.from_iterable(sets), int)
    chosen = flat.reshape(_set_count(size, relative, n_ctx), size - lowest)
    return np.pad(chosen, ((0, 0), (lowest, 0)))


def position_shape(name: str, n_ctx: int) -> tuple[int, ...] | None:
    """The shape of `position_array` of a name, None for the name of any other leaf."""
    leaf = PositionLeaf.of(name)
    if leaf is None:
        return None
    count = len(leaf.ranks[0]) * _set_count(leaf.size, leaf.relative, n_ctx)
    return (count, *(n_ctx,) * len(leaf.ranks))


def position_leaves(names: Collection[str]) -> list[str]:
    """Those of some names that have a `position_array`."""
    return [name for name in names if PositionLeaf.of(name) is not None]


def position_array(name: str, n_ctx: int) -> Float[np.ndarray, "tuples ..."]:
    """The array AT or COUNT of a name, in float64.

    Args:
        name: Name of a leaf, see `names.PositionLeaf`.
        n_ctx: Number of positions.
    """
    leaf = PositionLeaf.of(name)
    assert leaf is not None, name
    sets = _ascending_sets(leaf.size, leaf.relative, n_ctx)
    # Every order of the positions permutes the columns.
    places = [np.concatenate([sets[:, int(rank)] for rank in ranks]) for ranks in leaf.ranks]
    last = np.tile(sets[:, -1], len(leaf.ranks[0]))
    array = np.zeros((len(last), *(n_ctx,) * len(places)))
    # A relative tuple counts at every shift for which its last position stays within the sequence.
    shifts = n_ctx if leaf.relative and leaf.array == COUNT else 1
    for shift in range(shifts):
        inside = np.flatnonzero(last + shift < n_ctx)
        array[(inside, *[place[inside] + shift for place in places])] = 1.0
    return array


def _in_order(variables: Iterable[str]) -> tuple[str, ...]:
    """Position variables without repetition, in the order of `POSITIONS`."""
    return tuple(sorted(set(variables), key=POSITIONS.index))


def _partitions(variables: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All partitions of distinct letters into classes."""
    if not variables:
        yield ()
        return
    # The first letter is a class of its own, or joins a class of the other letters.
    first, *rest = variables
    for smaller in _partitions(tuple(rest)):
        yield (first, *smaller)
        for n, members in enumerate(smaller):
            yield (*smaller[:n], first + members, *smaller[n + 1 :])


class Wick:
    """Expectations of products of legs and scores, each of which is expanded once.

    Args:
        name: Prefix of the names of the definitions.
        legs: Covariances and means of the legs.
        stage: Builder that receives the definitions.
    """

    def __init__(self, name: str, legs: RuledMoments, stage: StageBuilder) -> None:
        self.name = name
        self.legs = legs
        self.stage = stage
        self._count = 0

    @own_cache
    def ended(self, u: Leg, w: Leg | None, scores: Scores) -> Sum:
        """The expectation E[u w^T prod scores], with the ends `FIRST` and `SECOND`.

        Without w it is E[u prod scores], with the first end alone.
        """

        def products() -> Iterator[Product]:
            # u with w: C_uw E[prod D]
            if w is not None:
                yield from _multiplied_out(self.legs.covariance(u, w), self.scalar(scores))
            # u left to its mean: m_u E[w prod D]^T, where w takes the second end
            mean = self.legs.mean(u)
            if mean is not None:
                rest = self.scalar(scores)
                if w is not None:
                    rest = _renamed_sum(self.ended(w, None, scores), {FIRST: SECOND})
                yield from _multiplied_out((mean,), rest)
            # u with a leg x of a score (x . x'): u x^T becomes C_ux, and C_ux x' stands for u
            for x, mate, others in _score_partners(scores):
                joined = _renamed_sum(self.legs.covariance(u, x), {SECOND: LINK})
                rest = _renamed_sum(self.ended(mate, w, others), {FIRST: LINK})
                yield from _multiplied_out(joined, rest)

        return self._add_up(products())

    @own_cache
    def scalar(self, scores: Scores) -> Sum:
        """The expectation E[prod scores]."""
        if not scores:
            return ((),)  # the empty product, 1
        first = min(scores)  # any score serves; always the same, so that expectations recur
        q, k = first
        # Isserlis along a row: the leg q is joined in turn with k, with its mean, and with every
        # leg that is left.
        rest = scores - {first}

        # (q . k) is the trace of q k^T, so these are the three summands of `ended` for u = q and
        # w = k with both ends on one index. Traced one by one, they need no matrix E[q k^T ...].
        def products() -> Iterator[Product]:
            trace = _renamed_sum(self.legs.covariance(q, k), {FIRST: LINK, SECOND: LINK})
            yield from _multiplied_out(trace, self.scalar(rest))
            mean = self.legs.mean(q)
            if mean is not None:
                other = _renamed_sum(self.ended(k, None, rest), {FIRST: LINK})
                yield from _multiplied_out((renamed(mean, {FIRST: LINK}),), other)
            for x, mate, others in _score_partners(rest):
                joined = _renamed_sum(self.legs.covariance(q, x), {FIRST: LINK, SECOND: RING})
                back = _renamed_sum(self.ended(mate, k, others), {FIRST: RING, SECOND: LINK})
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
            values.append((self.stage.define(name, indices, terms),))
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

    Each moment is found once.

    Args:
        legs: Means and covariances without a rule.
        rule: Rule that says which legs may be joined.
        pattern: Pattern with the tuples of positions at which arrays are read; None for all
            positions.
    """

    def __init__(self, legs: Projections, rule: JoiningRule, pattern: Pattern | None) -> None:
        self.legs = legs
        self.rule = rule
        self.pattern = pattern

    @own_cache
    def covariance(self, one: Leg, two: Leg) -> Sum:
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
        if self.rule.with_constants:  # C + m m'^T, see `notation`
            first, second = self.legs.mean(one), self.legs.mean(two)
            if first is not None and second is not None:
                at_first = self._placed_product(first, one)
                at_second = renamed(self._placed_product(second, two), {FIRST: SECOND})
                products.append((*at_first, *at_second))
        return tuple(products)

    @own_cache
    def mean(self, leg: Leg) -> Product | None:
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
        # Moments of a single model are packed in the stage of its mean, under their first name.
        name = strip_alias(operand.name)
        packed = self.legs.stage.define(
            f"{name}.{at.name}",
            new,
            [Term(1.0, (Operand(operand.name, old), at))],
            alias=operand.name[len(name) :],
        )
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

    @own_cache
    def _expansion(self, rule: JoiningRule, pattern: Pattern | None) -> Wick:
        where = "" if pattern is None else "." + "|".join(pattern.classes)
        moments = RuledMoments(self.legs, rule, pattern)
        return Wick(f"{self.name}.{rule.name}{where}", moments, self.legs.stage)

    def _mask_of(self, slot: Slot, mixing: list[Slot]) -> str:
        """The sort of mask of a slot, `ABSENT` without attention."""
        if slot not in mixing:
            return ABSENT
        return CAUSAL if self.legs.names.kind(slot).causal else OPEN
