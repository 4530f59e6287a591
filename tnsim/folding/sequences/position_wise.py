"""Layers that act position by position. In: moments of their legs. Out: moments of their outputs.

Such a layer is an elementwise product of n legs, mapped to the output:

    y[k] = sum over h of  down[k, h] leg_1[h] * ... * leg_n[h].

A bilinear layer has n = 2; a linear layer has n = 1, and its leg is the output.

A moment of products of legs is a sum over matchings (see `joining_rules`): legs joined in pairs
count by their covariances, the others by their means, all of it elementwise in the hidden unit of
the bra and in that of the ket. A *covariance* keeps the matchings in which something of the bra is
joined with something of the ket; the others make up the product of the two means. For two
bilinear layers with legs L and R that leaves

    C_LL C_RR + C_LR C_RL                                            both legs cross,
    C_LL m_R m_R + C_RR m_L m_L + C_LR m_R m_L + C_RL m_L m_R        one crosses.
"""

from __future__ import annotations

from tnsim.engine.problem import Operand, renamed
from tnsim.folding.sequences.bra_ket import BraKet, stream
from tnsim.folding.sequences.joining_rules import Matching, matchings
from tnsim.folding.sequences.notation import (
    FIRST,
    OTHER,
    OUTPUT_END,
    SECOND,
    Product,
    Summand,
    indices_of,
)
from tnsim.folding.sequences.projections import Projections
from tnsim.names import SLOTS, Slot


def mean(legs: Projections) -> list[Summand]:
    """The mean of the output of the layer in the bra, at `k`."""
    names = legs.names
    hidden, down = _hidden(names, "bra", OUTPUT_END["bra"], FIRST)
    summands = []
    for matching in matchings(names.legs("bra"), names.step.rules.within):
        product = _product(legs, matching, {"bra": hidden})
        if product is not None:
            summands.append(Summand(1.0, (*down, *product)))
    return summands


def covariance(legs: Projections) -> list[Summand]:
    """The covariance of the outputs of two layers, at `k` and `l`."""
    names, rules = legs.names, legs.names.step.rules
    bra, ket = (names.legs(slot) for slot in SLOTS)
    if all(names.kind(slot).down is None for slot in SLOTS):
        product = legs.uncontracted_covariance(*bra, *ket)
        outputs = {FIRST: OUTPUT_END["bra"], SECOND: OUTPUT_END["ket"]}
        return [Summand(1.0, renamed(product, outputs))]
    bra_hidden, bra_down = _hidden(names, "bra", OUTPUT_END["bra"], FIRST)
    ket_hidden, ket_down = _hidden(names, "ket", OUTPUT_END["ket"], SECOND)
    summands = []
    for matching in matchings((*bra, *ket), rules.across):
        if matching.crossing == 0:
            continue  # a summand of the product of the two means
        product = _product(legs, matching, {"bra": bra_hidden, "ket": ket_hidden})
        if product is not None:
            weight = rules.share(len(bra), matching.crossing)
            summands.append(Summand(weight, product))
    present = set().union(*(indices_of(summand.product) for summand in summands))
    positions = tuple(index for index in names.output_positions if index in present)
    indices = (*positions, bra_hidden, ket_hidden)
    terms = [summand.term(indices) for summand in summands]
    hidden = legs.stage.define(f"hidden.{names.pair.group}", indices, terms, kept=False)
    return [Summand(1.0, (*bra_down, *ket_down, hidden))]


def covariance_with_stream(legs: Projections, slot: Slot) -> list[Summand]:
    """The covariance of the stream in one slot with the output of the layer in the other one.

    The stream's end is `FIRST`, the output's is `SECOND`.
    """
    names, layer = legs.names, OTHER[slot]
    hidden, down = _hidden(names, layer, SECOND, "h")
    summands = []
    for matching in matchings((stream(slot), *names.legs(layer)), names.step.rules.stream):
        if matching.crossing == 0:
            continue
        product = _product(legs, matching, {slot: FIRST, layer: hidden})
        if product is not None:
            summands.append(Summand(1.0, (*down, *product)))
    return summands


def _hidden(names: BraKet, slot: Slot, output: str, hidden: str) -> tuple[str, Product]:
    """The index of the elementwise product of a layer's legs, and what maps it to the output.

    Where a leg is the output, they have one index, and nothing maps it.
    """
    down = names.kind(slot).down
    if down is None:
        return output, ()
    return hidden, (names.leaf(slot, down, output, hidden),)


def _product(legs: Projections, matching: Matching, ends: dict[Slot, str]) -> Product | None:
    """The arrays of a matching; None where a leg is left to a mean that vanishes.

    Args:
        legs: Means and covariances of the legs.
        matching: Which of them are joined, and which left to their means.
        ends: Name of the coordinate of all legs of a slot, as their product is elementwise.
    """
    operands: list[Operand] = []
    for one, two in matching.pairs:
        names = {FIRST: ends[one.slot], SECOND: ends[two.slot]}
        operands += renamed(legs.covariance(one, two), names)
    for leg in matching.singles:
        value = legs.mean(leg)
        if value is None:
            return None
        operands += renamed(value, {FIRST: ends[leg.slot]})
    return tuple(operands)
