"""Means and covariances of the outputs of layers, and the stages that compute them.

An output is a sum of parts: the residual stream, the core (the output of the layer itself, without
the stream), and a constant. So is its mean. The stage of a mean also holds the means and
covariances of the layer's legs that it needed; covariances with another layer use them again.

A covariance of two outputs is

    stream with stream  +  stream with core  +  core with stream  +  core with core.

For the next step the sum is a definition, a moment. Where only an inner product is asked for, the
same summands and the product of the two means are taken at equal output coordinates and added up
over positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tnsim.engine.ir.problem import Operand, Stage, StageBuilder, Term, renamed
from tnsim.metrics.input_moments import PositionForm
from tnsim.names import SLOTS, Pair, Side, Slot, bias_of
from tnsim.problems.sequences import attention, position_wise
from tnsim.problems.sequences.bra_ket import (
    COVARIANCE_AXES,
    MEAN_AXES,
    BraKet,
    LayerStep,
    Moment,
    stream,
)
from tnsim.problems.sequences.expansions import Expansions
from tnsim.problems.sequences.notation import FIRST, OTHER, OUTPUT_END, SECOND, Summand, indices_of
from tnsim.problems.sequences.position_wise import Projections


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
    stage = StageBuilder(step.suffix, kept=True)
    legs = Projections(names, stage)
    heads, summands = None, []
    if names.kind("bra").mixes_positions:
        heads = attention.head_mean(Expansions(f"wick.{model}", legs))
        summands += attention.mean(names, heads)
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
    known = frozenset(each.name for mean in means.values() for each in mean.stage.outputs)
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
    array = builder.define(f"cov.{pair.group}", axes, terms, kept=True)
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
    names, builder, summands = output_covariance(step, pair, means)
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
        covariances = attention.covariance_with_stream(expansions, slot)
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
    head_means: attention.HeadMeans = {model: mean.heads for model, mean in means.items()}
    return attention.covariance(expansions, head_means)


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
