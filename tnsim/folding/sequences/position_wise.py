"""Layers that act position by position. In: means and covariances of their legs. Out: summands of
moments of outputs.

Such a layer is an elementwise product of n legs, mapped to the output:

    y[k] = sum over h of  down[k, h] leg_1[h] * ... * leg_n[h],

a bilinear layer with n = 2, and a linear layer with n = 1, whose leg is the output. A moment of
products of legs is a sum over matchings (see `joining_rules`): legs joined in pairs count by their
covariances, the others by their means. All of them are elementwise, in the hidden unit h of the
bra and in that of the ket. A *covariance* keeps the matchings in which something of the bra is
joined with something of the ket; the others make up the product of the two means. For two bilinear
layers that leaves

    C_LL C_RR + C_LR C_RL                               both legs cross
    C_LL m_R m_R + C_RR m_L m_L + C_LR m_R m_L + ...     one crosses, two are left to their means
"""

from __future__ import annotations

from tnsim.engine.problem import Operand, renamed
from tnsim.folding.sequences.bra_ket import stream
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

_HIDDEN: dict[Slot, str] = {"bra": FIRST, "ket": SECOND}


def mean(legs: Projections) -> list[Summand]:
    """The mean of the output of the layer in the bra, at `k`."""
    names = legs.names
    kind = names.kind("bra")
    hidden, down = FIRST, ()
    if kind.down is None:
        hidden = "k"
    else:
        down = (names.leaf("bra", kind.down, "k", hidden),)
    summands = []
    for matching in matchings(names.legs("bra"), names.step.rules.within):
        product = _product(legs, matching, {"bra": hidden})
        if product is not None:
            summands.append(Summand(1.0, (*down, *product)))
    return summands


def covariance(legs: Projections) -> list[Summand]:
    """The covariance of the outputs of two layers, at `k` and `l`."""
    names = legs.names
    kinds = [names.kind(slot) for slot in SLOTS]
    bra, ket = (names.legs(slot) for slot in SLOTS)
    if all(kind.down is None for kind in kinds):
        product = legs.uncontracted_covariance(*bra, *ket)
        outputs = {FIRST: OUTPUT_END["bra"], SECOND: OUTPUT_END["ket"]}
        return [Summand(1.0, renamed(product, outputs), same=names.form() != "full")]
    rules = names.step.rules
    summands = []
    for matching in matchings((*bra, *ket), rules.across):
        if matching.crossing == 0:
            continue
        product = _product(legs, matching, _HIDDEN)
        if product is not None:
            weight = rules.share(len(bra), matching.crossing)
            summands.append(Summand(weight, product))
    present = set().union(*(indices_of(summand.product) for summand in summands))
    positions = tuple(index for index in names.output_positions if index in present)
    indices = (*positions, FIRST, SECOND)
    terms = [summand.term(indices) for summand in summands]
    hidden = legs.stage.define(f"hidden.{names.pair.group}", indices, terms, kept=False)
    downs = [names.leaf(s, names.kind(s).down, OUTPUT_END[s], _HIDDEN[s]) for s in SLOTS]
    return [Summand(1.0, (*downs, hidden))]


def covariance_with_stream(legs: Projections, slot: Slot) -> list[Summand]:
    """The covariance of the stream in a slot, end `FIRST`, with the output of the layer in the other one, end `SECOND`."""
    names, layer = legs.names, OTHER[slot]
    kind = names.kind(layer)
    state, others = stream(slot), names.legs(layer)
    if kind.down is None:
        return [Summand(1.0, legs.covariance(state, *others), same=names.form() != "full")]
    down = names.leaf(layer, kind.down, SECOND, "h")
    summands = []
    for matching in matchings((state, *others), names.step.rules.stream):
        if matching.crossing == 0:
            continue
        product = _product(legs, matching, {slot: FIRST, layer: "h"})
        if product is not None:
            summands.append(Summand(1.0, (down, *product)))
    return summands


def _product(legs: Projections, matching: Matching, ends: dict[Slot, str]) -> Product | None:
    """The arrays of a matching, with one end for each slot; None where a leg is left to a mean that vanishes."""
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
