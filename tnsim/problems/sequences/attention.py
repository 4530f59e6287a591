"""Moments of the outputs of attention layers, from the expansions of their heads.

Head a of a layer gives at position s

    z[s, a] = sum over t of  mask[s, t] (q1[s] . k1[t]) (q2[s] . k2[t]) v[t]
    output  = sum over a of  O[a] z[s, a]

Moments are taken of z first, which is of size d_value, and then mapped to the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from tnsim.engine.ir.problem import Operand, Term, renamed
from tnsim.names import OUTPUT, SLOTS, VALUE, Side, Slot
from tnsim.problems.sequences.bra_ket import BraKet, stream
from tnsim.problems.sequences.expansions import Expansions, Frame
from tnsim.problems.sequences.notation import (
    FIRST,
    HEAD,
    KEY_POSITION,
    OTHER,
    OUTPUT_END,
    SECOND,
    Leg,
    Product,
    Summand,
    scores_of,
)

HeadMeans = Mapping[Side, Operand | None]
"""Mean of every head's output by model, `[s, a, u]`; None where it vanishes or is undefined."""


def head_mean(expansions: Expansions) -> Operand | None:
    """The mean of every head's output of the layer in the bra, None where it vanishes.

    Later stages use the mean to centre covariances.
    """
    names = expansions.legs.names
    # Each slot has its output position, followed by its key position.
    positions: dict[Slot, str] = {"bra": names.outputs["bra"] + KEY_POSITION["bra"]}
    summands = []
    for frame in expansions.frames(positions, names.step.rules.within):
        for product in frame.wick.vector(Leg("bra", VALUE), scores_of("bra")):
            summands.append(Summand(1.0, (*product, *frame.sums)))
    if not summands:
        return None
    indices = ("s", "a", FIRST)
    terms = [summand.term(indices) for summand in summands]
    return expansions.legs.stage.define(f"heads.{names.models['bra']}", indices, terms)


def mean(names: BraKet, heads: Operand | None) -> list[Summand]:
    """The mean of the output of the layer in the bra, at `k`, from the means of its heads."""
    if heads is None:
        return []
    output = names.leaf("bra", OUTPUT, "k", "a", FIRST)
    return [Summand(1.0, (output, heads))]


def covariance(expansions: Expansions, head_means: HeadMeans) -> list[Summand]:
    """The covariance of the outputs of two layers, at `k` and `l`.

    Args:
        expansions: Expansions of the two layers.
        head_means: Means of the heads of both models.
    """
    names, stage = expansions.legs.names, expansions.legs.stage
    outputs = []
    for slot, end in zip(SLOTS, (FIRST, SECOND), strict=True):
        outputs.append(names.leaf(slot, OUTPUT, OUTPUT_END[slot], HEAD[slot], end))
    summands = []
    for same, covariances in _head_covariances(expansions, head_means).items():
        positions = ("s",) if same else names.output_positions
        name = f"heads.{names.pair.group}.{len(summands)}"
        indices = (*positions, "a", "b", FIRST, SECOND)
        terms = [summand.term(indices) for summand in covariances]
        product = (*outputs, stage.define(name, indices, terms, kept=False))
        # Where memory is short, a plan loops over the pairs of heads: `over`.
        core = (*positions, *OUTPUT_END.values())
        total = [Term(1.0, product)]
        array = stage.define(f"core.{name}", core, total, kept=False, loop_indices=("a", "b"))
        summands.append(Summand(1.0, (array,), same))
    return summands


def _head_covariances(expansions: Expansions, head_means: HeadMeans) -> dict[bool, list[Summand]]:
    """Second moments of head outputs, summed over keys, minus the product of the means.

    The product of the means can be subtracted as a whole. But where outputs at different positions
    are told apart and positions are independent, it is subtracted pattern by pattern: in most
    patterns no position of the bra coincides with a position of the ket, the moment *is* the
    product of the means, and both are left out.

    Returns:
        Summands by whether they count only where both outputs are at a single position.
    """
    names = expansions.legs.names
    rules = names.step.rules
    # Cov[z, z'] = E[z z'^T] - E[z] E[z']^T, where E[z z'^T] joins a value leg of each and the four
    # scores of both, ten legs in all.
    by_pattern = names.apart and names.step.positions.independent
    # The expansion adds up the n! ways in which n legs meet n; some metrics average over them.
    order = names.order("bra")
    weight = rules.share(order, order)
    positions: dict[Slot, str] = {}
    for slot in SLOTS:
        positions[slot] = names.outputs[slot] + KEY_POSITION[slot]
    bra_value, ket_value = Leg("bra", VALUE), Leg("ket", VALUE)
    scores = scores_of("bra") | scores_of("ket")
    summands: dict[bool, list[Summand]] = {}
    for frame in expansions.frames(positions, rules.across):
        if by_pattern and not frame.linked:
            continue
        here = summands.setdefault(frame.same, [])
        for product in frame.wick.matrix(bra_value, ket_value, scores):
            here.append(Summand(weight, (*product, *frame.sums)))
        if by_pattern:
            alone = expansions.frame(rules.within, frame.sums, frame.pattern)
            here += _minus_means_within(alone)
    bra, ket = head_means[names.pair.bra], head_means[names.pair.ket]
    if not by_pattern and bra is not None and ket is not None:
        summands.setdefault(False, []).append(_minus_means(names, bra, ket))
    return {same: covariances for same, covariances in summands.items() if covariances}


def _minus_means(names: BraKet, bra: Operand, ket: Operand) -> Summand:
    """Minus the product of the means of the heads of two layers."""
    ket = Operand(ket.name + names.marks["ket"], ket.indices)
    at_bra = {"s": names.outputs["bra"]}
    at_ket = {"s": names.outputs["ket"], HEAD["bra"]: HEAD["ket"], FIRST: SECOND}
    return Summand(-1.0, (bra.renamed(at_bra), ket.renamed(at_ket)))


def _minus_means_within(frame: Frame) -> list[Summand]:
    """Minus the product of the means of heads at the positions of a frame."""
    bra, ket = (frame.wick.vector(Leg(slot, VALUE), scores_of(slot)) for slot in SLOTS)
    summands = []
    for one, two in itertools.product(bra, ket):
        product = (*one, *renamed(two, {FIRST: SECOND}), *frame.sums)
        summands.append(Summand(-1.0, product))
    return summands


def covariance_with_stream(expansions: Expansions, slot: Slot) -> list[Summand]:
    """The covariance of the stream in a slot with the output of the layer in the other slot.

    The stream has the end `FIRST`, the output the end `SECOND`.
    """
    names, layer = expansions.legs.names, OTHER[slot]
    output = names.leaf(layer, OUTPUT, SECOND, HEAD[layer], "v")
    positions: dict[Slot, str] = {
        slot: names.outputs[slot],
        layer: names.outputs[layer] + KEY_POSITION[layer],
    }
    value, scores = Leg(layer, VALUE), scores_of(layer)
    summands = []
    for frame in expansions.frames(positions, names.step.rules.stream):
        for joined in frame.wick.matrix(stream(slot), value, scores):
            product: Product = (output, *renamed(joined, {SECOND: "v"}), *frame.sums)
            summands.append(Summand(1.0, product, frame.same))
    return summands
