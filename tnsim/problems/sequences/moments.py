"""Means and covariances of the outputs of layers, and the stages that compute them.

An output is a sum of parts: the residual stream, the core (the output of the layer itself, without
the stream), and a constant. So is its mean. The stage of a mean also holds the means and
covariances of the layer's legs that it needed; covariances with another layer use them again.

A covariance of two outputs is

    stream with stream  +  stream with core  +  core with stream  +  core with core.

For the next step the sum is a definition, a moment. Where only an inner product is asked for, the
same summands and the product of the two means are taken at equal output coordinates and added up
over positions.

*Attention.* Head a of a layer gives at position s

    z[s, a] = sum over t of  mask[s, t] (q1[s] . k1[t]) (q2[s] . k2[t]) v[t]
    output  = sum over a of  O[a] z[s, a]

Moments are taken of z first, which is of size d_value, and then mapped to the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tnsim.engine.ir.problem import Operand, Stage, StageBuilder, Term, renamed
from tnsim.metrics.input_moments import PositionForm
from tnsim.names import OUTPUT, SLOTS, VALUE, Pair, Side, Slot, bias_of
from tnsim.problems.sequences import position_wise
from tnsim.problems.sequences.expansions import Expansions, Frame
from tnsim.problems.sequences.notation import (
    COVARIANCE_AXES,
    FIRST,
    HEAD,
    KEY_POSITION,
    MEAN_AXES,
    OTHER,
    OUTPUT_END,
    SECOND,
    BraKet,
    LayerStep,
    Leg,
    Moment,
    Product,
    Summand,
    indices_of,
    scores_of,
    stream,
)
from tnsim.problems.sequences.position_wise import Projections

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
        for product in frame.wick.ended(Leg("bra", VALUE), None, scores_of("bra")):
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
        product = (*outputs, stage.define(name, indices, terms))
        ends = tuple(OUTPUT_END.values())
        if names.step.traced is not None:
            ends = names.step.traced
            product = renamed(product, {OUTPUT_END["ket"]: OUTPUT_END["bra"]})
        # Where memory is short, a plan loops over the pairs of heads: `over`.
        core = (*positions, *ends)
        total = [Term(1.0, product)]
        array = stage.define(f"core.{name}", core, total, loop_indices=("a", "b"))
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
        for product in frame.wick.ended(bra_value, ket_value, scores):
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
    bra, ket = (frame.wick.ended(Leg(slot, VALUE), None, scores_of(slot)) for slot in SLOTS)
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
        for joined in frame.wick.ended(stream(slot), value, scores):
            product: Product = (output, *renamed(joined, {SECOND: "v"}), *frame.sums)
            summands.append(Summand(1.0, product, frame.same))
    return summands


class OutputMean(NamedTuple):
    """The mean of a layer's output.

    Args:
        moment: Mean, None where it vanishes; for a model that waits, the mean of the state below.
        heads: Mean of every head's output, None where it vanishes or the layer has no heads.
        stage: Stage that computes the mean.
    """

    moment: Moment | None
    heads: Operand | None = None
    stage: Stage = Stage(())


Means = Mapping[Side, OutputMean]


def output_mean(step: LayerStep, model: Side) -> OutputMean:
    """The mean of a layer's output, or for the tree metrics its value at the zero input."""
    names = BraKet(step, Pair(model, model), one_position=True)
    if names.waits("bra"):
        return OutputMean(step.states.means[model])
    stage = StageBuilder(step.suffix)
    legs = Projections(names, stage)
    heads, summands = None, []
    if names.kind("bra").mixes_positions:
        heads = head_mean(Expansions(f"wick.{model}", legs))
        summands += mean(names, heads)
    else:
        summands += position_wise.mean(legs)
    summands += _stream_summand(legs)
    summands += _bias_summand(names)
    if not summands:
        return OutputMean(None, heads=heads, stage=stage.stage())
    # Where nothing in the sum depends on a position, the mean is alike at all positions and has no
    # axis for it.
    by_position = any("s" in indices_of(summand.product) for summand in summands)
    form: PositionForm = "each" if by_position else "alike"
    axes = MEAN_AXES[form]
    terms = [summand.term(axes) for summand in summands]
    moment = Moment(stage.define(f"mean.{model}", axes, terms).name, form)
    return OutputMean(moment, heads, stage.stage())


def _stream_summand(legs: Projections) -> list[Summand]:
    """The summand of the residual stream in the mean."""
    skip, state = legs.names.skip("bra"), legs.mean(stream("bra"))
    if skip is None or state is None:
        return []
    product = (*skip, *renamed(state, {FIRST: "k"}))
    return [Summand(1.0, product)]


def _bias_summand(names: BraKet) -> list[Summand]:
    """The summand of the output matrix's bias in the mean.

    The means of legs already have the biases of legs, the bias of a linear layer included.
    """
    kind = names.kind("bra")
    if kind.down is None or kind.down not in kind.biases:
        return []
    product = (names.leaf("bra", bias_of(kind.down), "k"), *names.ones("bra", kind.order))
    return [Summand(1.0, product)]


def output_covariance(
    step: LayerStep, pair: Pair, means: Means
) -> tuple[BraKet, StageBuilder, tuple[Summand, ...]]:
    """The covariance of the outputs of two layers.

    Args:
        step: Step with the layers.
        pair: Model in the bra and model in the ket.
        means: Means of the outputs of both models at this step.

    Returns:
        The layers in their slots, a builder with the definitions that the summands read, and the
        summands at the positions `outputs` of the layers and the coordinates `k` and `l`.
    """
    names = BraKet(step, pair, one_position=not _positions_matter(step, pair))
    known = frozenset(each.name for mean in means.values() for each in mean.stage.definitions)
    stage = StageBuilder(step.suffix, known=known)
    legs = Projections(names, stage)
    expansions = Expansions(f"wick.{pair.group}", legs)
    summands = (
        *_stream_with_stream(legs),
        *_stream_with_core(expansions, "bra"),
        *_stream_with_core(expansions, "ket"),
        *_core_with_core(expansions, means),
    )
    return names, stage, summands or (_zero_covariance(legs),)


def covariance_stage(step: LayerStep, pair: Pair, means: Means) -> tuple[Stage, Moment]:
    """The stage that computes the covariance of two outputs, and that covariance as a moment."""
    names, builder, summands = output_covariance(step, pair, means)
    by_position = any("s" in indices_of(summand.product) for summand in summands)
    form: PositionForm = "each" if by_position else "alike"
    if names.apart:
        form = "full"
    axes = COVARIANCE_AXES[form]
    terms = [summand.term(axes) for summand in summands]
    array = builder.define(f"cov.{pair.group}", axes, terms)
    return builder.stage(), Moment(array.name, form)


def inner_product(
    step: LayerStep, pair: Pair, means: Means, outputs: tuple[str, ...]
) -> tuple[StageBuilder, tuple[Term, ...]]:
    """The inner product of two outputs, summed over positions.

    Args:
        step: Last step.
        pair: Model in the bra and model in the ket.
        means: Means of the outputs of both models.
        outputs: `("k",)` for a number per output coordinate, `()` for their sum.

    Returns:
        Builder with the definitions that the terms read, and the terms of the inner product.
    """
    # E<f, g> = sum_s tr Cov[f[s], g[s]] + <E f[s], E g[s]>, the trace by equal output coordinates.
    names, builder, summands = output_covariance(replace(step, traced=outputs), pair, means)
    summed = ("s",) if step.positions.n_ctx > 1 else ()  # a single position is counted once
    terms = []
    for summand in (*summands, *_product_of_means(names, means)):
        product = renamed(summand.product, {OUTPUT_END["ket"]: OUTPUT_END["bra"]})
        terms.append(summand._replace(product=product).term(outputs, summed=summed))
    return builder, tuple(terms)


def _positions_matter(step: LayerStep, pair: Pair) -> bool:
    """Whether outputs at different positions are correlated, and a later layer mixes them."""
    kinds = [step.kinds[model] for model in pair]
    mixes = any(kind is not None and kind.mixes_positions for kind in kinds)
    return step.mixes_later and (mixes or step.states.moments[pair].form == "full")


def _stream_with_stream(legs: Projections) -> list[Summand]:
    """The covariance of the residual streams of bra and ket."""
    names = legs.names
    bra, ket = names.skip("bra"), names.skip("ket")
    if bra is None or ket is None:
        return []
    state = legs.covariance(stream("bra"), stream("ket"))
    state = renamed(state, {FIRST: OUTPUT_END["bra"], SECOND: OUTPUT_END["ket"]})
    share = names.step.rules.skip_share(names.order("bra"))
    same = names.form() != "full"
    return [Summand(share, (*bra, *ket, *state), same)]


def _stream_with_core(expansions: Expansions, slot: Slot) -> list[Summand]:
    """The covariance of the stream in a slot with the core of the layer in the other slot."""
    names, layer = expansions.legs.names, OTHER[slot]
    skip = names.skip(slot)
    if skip is None or names.waits(layer):
        return []
    kind = names.kind(layer)
    if kind.mixes_positions:
        covariances = covariance_with_stream(expansions, slot)
    else:
        covariances = position_wise.covariance_with_stream(expansions.legs, slot)
    ends = {FIRST: OUTPUT_END[slot], SECOND: OUTPUT_END[layer]}
    share = names.step.rules.skip_share(names.order("bra"))
    summands = []
    for weight, product, same in covariances:
        product = (*skip, *renamed(product, ends))
        summands.append(Summand(share * weight, product, same))
    return summands


def _core_with_core(expansions: Expansions, means: Means) -> list[Summand]:
    """The covariance of the cores of bra and ket."""
    names = expansions.legs.names
    if any(names.waits(slot) for slot in SLOTS):
        return []
    if not names.kind("bra").mixes_positions:
        return position_wise.covariance(expansions.legs)
    head_means: HeadMeans = {model: mean.heads for model, mean in means.items()}
    return covariance(expansions, head_means)


def _zero_covariance(legs: Projections) -> Summand:
    """The zero covariance of outputs that no legs join, such as outputs of odd and even order.

    It is a product of weight 0 with the axes of both outputs: the output matrix of a layer, and for
    a model that waits the states below.
    """
    names = legs.names
    ends: dict[Slot, str] = {slot: f"unit of the {slot}" for slot in SLOTS}
    arrays = []
    for slot in SLOTS:
        if names.waits(slot):
            ends[slot] = OUTPUT_END[slot]
        else:
            kind = names.kind(slot)
            role = kind.down or kind.legs[0]
            arrays.append(names.leaf(slot, role, OUTPUT_END[slot], f"input of the {slot}"))
    if any(names.waits(slot) for slot in SLOTS):
        state = legs.covariance(stream("bra"), stream("ket"))
        arrays += renamed(state, {FIRST: ends["bra"], SECOND: ends["ket"]})
    return Summand(0.0, tuple(arrays), same=names.form() != "full")


def _product_of_means(names: BraKet, means: Means) -> list[Summand]:
    """The product of the means, which an inner product has besides the covariance."""
    operands = []
    for slot in SLOTS:
        mean = means[names.models[slot]].moment
        if mean is None:
            return []
        position = ("s",) if mean.form == "each" else ()
        operands.append(Operand(mean.name + names.marks[slot], (*position, OUTPUT_END[slot])))
    return [Summand(1.0, tuple(operands))]
