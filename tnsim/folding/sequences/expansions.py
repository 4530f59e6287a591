"""Expansions over positions. In: legs of two layers, a joining rule. Out: sums over keys.

A moment of attention layers is a sum over keys of expectations of products of legs (see `wick`).
How it is summed depends on the states below:

- States at different positions depend on each other: any two legs may be joined, whatever their
  positions. One expansion serves all positions, which are indices of its arrays, and the mask is
  an array that sums over keys.
- They are independent: the sum falls into patterns of coinciding positions (see `coincidences`).
  Each has an expansion of its own in which only legs at one position are joined; its arrays have
  one index, `g`, over the tuples of positions of the pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tnsim.engine.problem import Operand, Term, renamed
from tnsim.folding.sequences.coincidences import ABSENT, CAUSAL, OPEN, Pattern, patterns
from tnsim.folding.sequences.joining_rules import Rule
from tnsim.folding.sequences.notation import FIRST, POSITIONS, SECOND, Leg, Product, Sum
from tnsim.folding.sequences.projections import Projections
from tnsim.folding.sequences.wick import Wick
from tnsim.names import MASK, SLOTS, STREAM, Slot


class Frame(NamedTuple):
    """One summand of a sum over positions.

    Args:
        wick: Expectations of products of legs, at the positions of the frame.
        sums: Arrays by which they have to be multiplied to sum over keys.
        pattern: Which positions coincide; None for all positions in one frame.
    """

    wick: Wick
    sums: Product
    pattern: Pattern | None

    @property
    def same(self) -> bool:
        """Whether both outputs are at one position, though two were asked for."""
        return self.pattern is not None and self.pattern.same_output

    @property
    def linked(self) -> bool:
        """Whether something of the bra may depend on something of the ket."""
        return self.pattern is None or self.pattern.linked


class RuledMoments:
    """Covariances and means of legs as a rule allows them: the `wick.LegMoments` of a frame.

    Args:
        legs: Means and covariances without a rule.
        rule: Which legs may be joined.
        pattern: Whose tuples of positions the arrays are read at; None for all positions.
    """

    def __init__(self, legs: Projections, rule: Rule, pattern: Pattern | None) -> None:
        self.legs = legs
        self.rule = rule
        self.pattern = pattern

    def covariance(self, one: Leg, two: Leg) -> Sum:
        """The ways in which two legs may be joined, with the ends `FIRST` and `SECOND`.

        They are the covariance of the legs and, if the rule says so, the product of their values
        at zero. Legs at different, independent positions have no covariance.
        """
        if not self.rule.joins(one, two):
            return ()
        position = self.legs.names.position
        products: list[Product] = []
        if self.pattern is None or self.pattern.joins(position(one), position(two)):
            products.append(self._placed(self.legs.covariance(one, two), one))
        if self.rule.with_constants:  # C + m m'^T, see `joining_rules`
            first, second = self.legs.mean(one), self.legs.mean(two)
            if first is not None and second is not None:
                at_first = self._placed(first, one)
                at_second = renamed(self._placed(second, two), {FIRST: SECOND})
                products.append((*at_first, *at_second))
        return tuple(products)

    def mean(self, leg: Leg) -> Product | None:
        """The mean of a leg; None where it vanishes or the leg must have a partner.

        The stream must, as all that is ever asked for is its covariance with something.
        """
        if self.rule.with_constants or leg.role == STREAM:
            return None
        mean = self.legs.mean(leg)
        return None if mean is None else self._placed(mean, leg)

    def _placed(self, product: Product, leg: Leg) -> Product:
        """Arrays with an axis for the position of a leg, read at the tuples of the pattern."""
        if self.pattern is None:
            return product
        place = self.pattern.class_of(self.legs.names.position(leg))
        return tuple(self._gathered(operand, self.pattern, place) for operand in product)

    def _gathered(self, operand: Operand, pattern: Pattern, place: int) -> Operand:
        """The array read at the position of class `place` in every tuple.

        The tuples `g` take the place of its axis of positions.
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
    """Expansions of moments of two layers; those that are asked for again are shared.

    Args:
        name: Begins the names of their definitions.
        legs: Means and covariances of the legs.
    """

    def __init__(self, name: str, legs: Projections) -> None:
        self.name = name
        self.legs = legs
        self._expansions: dict[tuple[Rule, Pattern | None], Wick] = {}

    def frames(self, positions: dict[Slot, str], rule: Rule) -> Iterator[Frame]:
        """The frames into which a sum over keys falls.

        Args:
            positions: Of every slot that takes part, its output position and, if it has an
                attention layer that takes part, its key position.
            rule: Which legs may be joined.
        """
        names = self.legs.names
        mixing: list[Slot] = [slot for slot, variables in positions.items() if len(variables) == 2]
        known = names.step.positions
        if not known.independent:
            masks = tuple(names.leaf(slot, MASK, *positions[slot]) for slot in mixing)
            yield self.frame(rule, masks, None)
            return
        masks = "".join(self._mask(slot, mixing) for slot in SLOTS)
        variables = "".join(positions.values())
        for pattern in patterns(variables, masks, known.relative, known.n_ctx):
            count = Operand(pattern.count, ("g", *pattern.outputs))
            yield self.frame(rule, (count,), pattern)

    def frame(self, rule: Rule, sums: Product, pattern: Pattern | None) -> Frame:
        """The frame of a pattern under a rule for joining legs."""
        key = rule, pattern
        if key not in self._expansions:
            where = "" if pattern is None else "." + "|".join(pattern.classes)
            name = f"{self.name}.{rule.name}{where}"
            moments = RuledMoments(self.legs, rule, pattern)
            self._expansions[key] = Wick(name, moments, self.legs.stage)
        return Frame(self._expansions[key], sums, pattern)

    def _mask(self, slot: Slot, mixing: list[Slot]) -> str:
        if slot not in mixing:
            return ABSENT
        return CAUSAL if self.legs.names.kind(slot).causal else OPEN
