"""The covariance of two layers' outputs. In: two layers over their states. Out: summands, stages, inner products.

An output is a sum of parts, the residual stream, what the layer computes (its core) and a constant, so a covariance is

    stream with stream  +  stream with core  +  core with stream  +  core with core.

As a moment of a step the sum is one definition. Where an inner product is all that is wanted, the same summands are closed: with the
product of the means they are taken at equal coordinates of the output and added up over positions.
"""

from __future__ import annotations

from collections.abc import Mapping

from tnsim.engine.problem import Operand, Stage, StageBuilder, Term, renamed
from tnsim.folding.sequences import attention, position_wise
from tnsim.folding.sequences.bra_ket import BraKet, stream
from tnsim.folding.sequences.expansions import Expansions
from tnsim.folding.sequences.layer_means import OutputMean, names_defined
from tnsim.folding.sequences.notation import (
    FIRST,
    OTHER,
    OUTPUT_END,
    SECOND,
    Summand,
    indices_of,
)
from tnsim.folding.sequences.projections import Projections
from tnsim.folding.sequences.states import COVARIANCE_AXES, Form, LayerStep, Moment
from tnsim.names import CORE, SLOTS, STREAM, ModelName, Pair, Slot

Means = Mapping[ModelName, OutputMean]


class OutputCovariance:
    """The covariance of the outputs of two layers.

    Args:
        step: The layers.
        pair: Which model stands in the bra, and which in the ket.
        means: Of the outputs of both models at this step.
        by_head: Leave the heads of attention as open indices.

    Attributes:
        names: The layers in their slots.
        stage: What has to be computed.
        summands: What the covariance is the sum of, at the positions `names.outputs` and the coordinates `k`, `l`.
    """

    def __init__(self, step: LayerStep, pair: Pair, means: Means, by_head: bool = False) -> None:
        self.names = BraKet(step, pair, one_position=not _positions_matter(step, pair))
        self.stage = StageBuilder(step.suffix, known=names_defined(means.values()))
        legs = Projections(self.names, self.stage)
        expansions = Expansions(f"wick.{pair.group}", legs)
        self.summands = [
            *_stream_with_stream(legs),
            *_stream_with_core(expansions, "bra"),
            *_stream_with_core(expansions, "ket"),
            *_core_with_core(expansions, means, by_head),
        ]


def covariance_stage(step: LayerStep, pair: Pair, means: Means) -> tuple[Stage, Moment]:
    """The covariance of two outputs as a moment, and the stage that computes it."""
    covariance = OutputCovariance(step, pair, means)
    present = set().union(*(indices_of(summand.product) for summand in covariance.summands))
    form: Form = "each" if "s" in present else "alike"
    if covariance.names.apart:
        form = "full"
    axes = COVARIANCE_AXES[form]
    terms = [summand.term(axes) for summand in covariance.summands]
    moment = covariance.stage.define(f"cov.{pair.group}", axes, terms, kept=True)
    return covariance.stage.stage(), Moment(moment.name, form)


def inner_product(
    step: LayerStep, pair: Pair, means: Means, outputs: tuple[str, ...]
) -> tuple[StageBuilder, tuple[Term, ...]]:
    """The inner product of two outputs, summed over positions.

    Args:
        step: The last one.
        pair: Which model stands in the bra, and which in the ket.
        means: Of the outputs of both models.
        outputs: `("k",)` for one number per output coordinate, `()` for their sum.

    Returns:
        What has to be computed first, and the terms of the inner product.
    """
    covariance = OutputCovariance(step, pair, means)
    summands = [*covariance.summands, *_product_of_means(covariance.names, means)]
    terms = []
    for summand in summands:
        closed = renamed(summand.product, {OUTPUT_END["ket"]: OUTPUT_END["bra"]})
        terms.append(summand._replace(product=closed).term(outputs, summed=("s",)))
    return covariance.stage, tuple(terms)


def _positions_matter(step: LayerStep, pair: Pair) -> bool:
    """Whether outputs at different positions have a covariance, and a later layer asks for it."""
    kinds = [step.kinds[model] for model in pair]
    mixes = any(kind is not None and kind.mixes_positions for kind in kinds)
    return step.mixes_later and (mixes or step.states.moments[pair].form == "full")


def _stream_with_stream(legs: Projections) -> list[Summand]:
    names = legs.names
    skips = [names.skip(slot) for slot in SLOTS]
    if None in skips:
        return []
    state = legs.covariance(stream("bra"), stream("ket"))
    state = renamed(state, {FIRST: OUTPUT_END["bra"], SECOND: OUTPUT_END["ket"]})
    share = names.step.rules.skip_share(names.order("bra"))
    same = names.form() != "full"
    return [Summand(share, (*skips[0], *skips[1], *state), same, (STREAM, STREAM))]


def _stream_with_core(expansions: Expansions, slot: Slot) -> list[Summand]:
    """The covariance of the stream in a slot with what the layer in the other one computes."""
    names, layer = expansions.legs.names, OTHER[slot]
    skip, kind = names.skip(slot), names.kind(layer)
    if skip is None or kind is None:
        return []
    if kind.mixes_positions:
        summands = attention.covariance_with_stream(expansions, slot)
    else:
        summands = position_wise.covariance_with_stream(expansions.legs, slot)
    ends = {FIRST: OUTPUT_END[slot], SECOND: OUTPUT_END[layer]}
    parts = (STREAM, CORE) if slot == "bra" else (CORE, STREAM)
    share = names.step.rules.skip_share(names.order("bra"))
    return [
        Summand(share * s.weight, (*skip, *renamed(s.product, ends)), s.same, parts)
        for s in summands
    ]


def _core_with_core(expansions: Expansions, means: Means, by_head: bool) -> list[Summand]:
    kinds = [expansions.legs.names.kind(slot) for slot in SLOTS]
    if None in kinds:
        return []
    if not kinds[0].mixes_positions:
        return position_wise.covariance(expansions.legs)
    head_means = {model: mean.heads for model, mean in means.items()}
    return attention.covariance(expansions, head_means, by_head)


def _product_of_means(names: BraKet, means: Means) -> list[Summand]:
    """What an inner product has beside the covariance."""
    operands = []
    for slot in SLOTS:
        mean = means[names.models[slot]].moment
        if mean is None:
            return []
        position = ("s",) if mean.form == "each" else ()
        operands.append(Operand(mean.name + names.marks[slot], (*position, OUTPUT_END[slot])))
    return [Summand(1.0, tuple(operands))]
