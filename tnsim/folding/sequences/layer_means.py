"""The mean of one layer's output. In: a layer over its states. Out: a mean, and its stage.

An output is a sum of parts, the residual stream, what the layer computes and its bias, and so is
its mean. The stage also holds the means and covariances of the layer's legs that it needed;
covariances with another layer use them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tnsim.engine.problem import Operand, Stage, StageBuilder, renamed
from tnsim.folding.sequences import attention, position_wise
from tnsim.folding.sequences.bra_ket import BraKet, stream
from tnsim.folding.sequences.expansions import Expansions
from tnsim.folding.sequences.notation import FIRST, Summand, indices_of
from tnsim.folding.sequences.projections import Projections
from tnsim.folding.sequences.states import MEAN_AXES, LayerStep, Moment
from tnsim.metrics.input_moments import PositionForm
from tnsim.names import CONSTANT, STREAM, ModelName, Pair, bias_of


class OutputMean(NamedTuple):
    """The mean of a layer's output.

    Args:
        moment: The mean, None where it vanishes; of a model that waits, that of the state below.
        summands: What it is the sum of, at `k`.
        heads: The mean of every head's output, None where it vanishes or the layer has no heads.
        stage: What has to be computed for it.
    """

    moment: Moment | None
    summands: tuple[Summand, ...] = ()
    heads: Operand | None = None
    stage: Stage = Stage(())


def output_mean(step: LayerStep, model: ModelName) -> OutputMean:
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
    summands += _stream(legs)
    summands += _bias(names)
    if not summands:
        return OutputMean(None, heads=heads, stage=stage.stage())
    by_position = any("s" in indices_of(summand.product) for summand in summands)
    form: PositionForm = "each" if by_position else "alike"
    axes = MEAN_AXES[form]
    terms = [summand.term(axes) for summand in summands]
    moment = Moment(stage.define(f"mean.{model}", axes, terms).name, form)
    return OutputMean(moment, tuple(summands), heads, stage.stage())


def names_defined(means: Iterable[OutputMean]) -> frozenset[str]:
    """Names of all that the stages of some means have left for later stages."""
    return frozenset(definition.name for mean in means for definition in mean.stage.outputs)


def _stream(legs: Projections) -> list[Summand]:
    """What the residual stream adds to the mean."""
    skip, state = legs.names.skip("bra"), legs.mean(stream("bra"))
    if skip is None or state is None:
        return []
    product = (*skip, *renamed(state, {FIRST: "k"}))
    return [Summand(1.0, product, parts=(STREAM, STREAM))]


def _bias(names: BraKet) -> list[Summand]:
    """What the bias of the output matrix adds.

    The biases of legs, that of a linear layer among them, are in the means of the legs.
    """
    kind = names.kind("bra")
    if kind.down is None or kind.down not in kind.biases:
        return []
    product = (names.leaf("bra", bias_of(kind.down), "k"), *names.ones("bra", kind.order))
    return [Summand(1.0, product, parts=(CONSTANT, CONSTANT))]
