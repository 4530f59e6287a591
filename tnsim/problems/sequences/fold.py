"""The fold of two models layer over layer: a problem step by step, and the scales of its values.

The closed network of an inner product is a tree over a tree. The contribution of a pair of subtrees
depends on the two layers at their tops and on the pairs below, not on the copy of the subtrees, so
it is defined once. Models of vectors are models of sequences with a single position.

Carried from layer to layer are the covariances of two models' states between positions,
`C_XY[s, i, t, j]`, and their means `m_X[s, i]`, in the cheapest form that holds them
(`Moment`). A step applies a layer of each model (`moments`). For the Gaussian metrics
that is Isserlis' theorem layer by layer: exact for a single nonlinear layer, the closure beyond.
The tree metrics are the same computation with other joinings (`notation`), and the mean of a
state then stands for its value at the zero input.

*Scales.* Values grow doubly exponentially with depth, so after every step they are divided by a
scale, and the logarithm of the scale is stored. All terms of a sum must be divided alike, which
decides which values share a scale:

- A Gaussian metric adds products of S_AB to products of S_AA and of means, and constants are
  added to all of them. All values of a model then share a scale, and S_AB is divided by the scale
  of A times the scale of B. Summands keep their ratios, and no sum ever needs the exponential of a
  difference of two logarithms, which would lose digits.
- Without either, S_AB is made of S_AB below alone, and has a scale of its own.

Definitions are made homogeneous for that: a bias in a layer of order n is multiplied n times by
ONE, the constant 1 in the current scale of its model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tnsim.engine.ir.problem import (
    Definition,
    Operand,
    Problem,
    ScaleGroup,
    Stage,
    StageBuilder,
    Term,
    prune,
)
from tnsim.errors import ModelError
from tnsim.metrics.input_moments import SequenceInputs
from tnsim.metrics.orbits import PairingRule
from tnsim.names import (
    COVARIANCE,
    IDENTITY,
    MEAN,
    ONE,
    ONES,
    PAIRS,
    SAME_POSITION,
    Leaf,
    Pair,
    Side,
)
from tnsim.problems.layer_kinds import Kinds, LayerKind, Step, align
from tnsim.problems.layer_tensors import sequence_shapes
from tnsim.problems.sequences.expansions import position_shape
from tnsim.problems.sequences.moments import (
    OutputMean,
    covariance_stage,
    inner_product,
    output_mean,
)
from tnsim.problems.sequences.notation import (
    COVARIANCE_AXES,
    MEAN_AXES,
    LayerStep,
    MetricRules,
    Moment,
    Product,
    States,
    rules_of,
)

Powers = tuple[tuple[str, int], ...]


class Scales(NamedTuple):
    """The scale groups of a comparison.

    Args:
        models: Names of the models that are compared.
        tracked: Pairs with covariances that are carried from step to step.
        by_model: Whether all values of a model share a scale; otherwise the values of a pair do.
    """

    models: tuple[Side, ...]
    tracked: tuple[Pair, ...]
    by_model: bool

    def powers(self, pair: Pair) -> Powers:
        """The powers of the scales in a covariance of two models."""
        if not self.by_model:
            return ((pair.group, 1),)
        if pair.bra == pair.ket:
            return ((pair.bra, 2),)
        return ((pair.bra, 1), (pair.ket, 1))

    def size(self, step: LayerStep, pair: Pair, covariance: Moment, mean: Moment) -> Definition:
        """The second moments of a state above a step, `E[h_k^2]`, added up over positions.

        Args:
            step: Step below the state.
            pair: Pair of the model with itself.
            covariance: Covariance above the step, before it is rescaled.
            mean: Mean above the step, before it is rescaled.
        """
        axes = tuple(axis.lower().replace("l", "k") for axis in COVARIANCE_AXES[covariance.form])
        # E[h_k^2] = C_kk + m_k^2, added up over positions.
        variance = Term(1.0, (Operand(covariance.name, axes),))
        squared = Term(1.0, (Operand(mean.name, MEAN_AXES[mean.form]),) * 2)
        name = _size_name(step, pair.bra)
        return Definition(name, ("k",), (variance, squared), powers=self.powers(pair))

    def after_step(self, step: LayerStep, states: States) -> tuple[ScaleGroup, ...]:
        """The scale groups at the end of a step.

        A model's scale is the root of the largest second moment of its state, mean included, where
        the covariance of the model with itself is tracked. Divided by a scale of the covariance
        alone, the mean and the constant of a state that varies little would be large.
        """
        scales = []
        if not self.by_model:
            for pair in self.tracked:
                name = states.moments[pair].name
                scales.append(ScaleGroup(pair.group, step.order(pair.bra), name))
            return tuple(scales)
        for model in self.models:
            own = Pair(model, model)
            largest = states.moments[own].name if own in self.tracked else None
            if largest is not None and states.means[model] is not None:
                largest = _size_name(step, model)
            scales.append(ScaleGroup(model, step.order(model), largest, power=2))
        return tuple(scales)

    def after_result(self, step: LayerStep, pair: Pair, first: bool) -> tuple[ScaleGroup, ...]:
        """The scale groups of an output of the problem, the first output of its step or another.

        The models' scales grow with the step, which the first output records for all, and are
        renormalised no more.
        """
        if not self.by_model:
            return (ScaleGroup(pair.group, step.order(pair.bra), pair.group),)
        own = ScaleGroup(pair.group, degree=1, definition=pair.group)
        if not first:
            return (own,)
        grown = []
        for model in self.models:
            grown.append(ScaleGroup(model, step.order(model), definition=None, power=2))
        return (*grown, own)


def _size_name(step: LayerStep, model: Side) -> str:
    """Name of the second moments of a model's state above a step."""
    return f"size.{model}{step.suffix}"


def fold_sequences(
    models: dict[Side, Kinds],
    rule: PairingRule,
    inputs: SequenceInputs,
    n_ctx: int,
    pairs: Iterable[Pair],
    slices: bool,
) -> Problem:
    """The problem that has the inner products `pairs`, summed over positions, for outputs.

    Args:
        models: Kinds of the layers, from the input up.
        rule: Rule by which legs are joined.
        inputs: Structure of the input's mean and covariance.
        n_ctx: Number of positions.
        pairs: Inner products that are asked for.
        slices: Whether there is an inner product for every output coordinate, (d_out,), or
            their sum, ().

    Returns:
        Problem with an output named after each pair. Its leaves are the arrays of the models
        (`names.Leaf`), `MEAN` and `COVARIANCE` of the input, and the constants `ONE`, `ONES`,
        `SAME_POSITION`, `IDENTITY` and the arrays of `names.PositionLeaf`.

    Raises:
        ModelError: An attention layer of a model meets a nonlinear layer of the other that acts
            position by position.
    """
    fold = SequenceFold(models, rule, inputs, n_ctx, tuple(pairs))
    *first, last = range(len(fold.layers))
    for number in first:
        fold.advance(number)
    fold.close(last, slices)
    return fold.problem()


class SequenceFold:
    """A fold in progress: the stages so far, and the states above them.

    Args:
        models, rule, inputs, n_ctx, pairs: Arguments of `fold_sequences`.

    Attributes:
        layers: Layers that each step applies.
        stages: Stages so far.
        states: Moments of both models above these stages.
        scales: Scale groups of the comparison.
        last_mixing: Number of the last step with a layer that mixes positions, -1 if there is none.
    """

    def __init__(
        self,
        models: dict[Side, Kinds],
        rule: PairingRule,
        inputs: SequenceInputs,
        n_ctx: int,
        pairs: tuple[Pair, ...],
    ) -> None:
        self.models, self.inputs, self.n_ctx, self.pairs = models, inputs, n_ctx, pairs
        self.rules = rules_of(rule)
        self.layers = _matched_layers(models)
        self.stages: list[Stage] = []
        self.states = _input_states(models, inputs)
        every = list(itertools.chain.from_iterable(models.values()))
        constants = inputs.mean is not None or any(kind.biases or kind.skips for kind in every)
        # Where nothing is added to a product of covariances, neither means nor constants, each pair
        # may have a scale of its own.
        by_model = self.rules.gaussian or constants
        self.scales = Scales(tuple(models), _tracked_pairs(pairs, self.rules), by_model)
        self.last_mixing = -1
        for number, layers in enumerate(self.layers):
            for kind in _kinds_at(models, layers):
                if kind.mixes_positions:
                    self.last_mixing = number

    def step(self, number: int) -> LayerStep:
        """The layers of a step over the current states."""
        layers = self.layers[number]
        kinds: dict[Side, LayerKind | None] = dict.fromkeys(self.models)
        for model, layer in layers.items():
            if layer is not None:
                kinds[model] = self.models[model][layer]
        return LayerStep(
            number=number,
            kinds=kinds,
            layers=layers,
            states=self.states,
            rules=self.rules,
            positions=self.states.positions(self.n_ctx),
            mixes_later=number < self.last_mixing,
            with_own=all(Pair(model, model) in self.scales.tracked for model in self.models),
        )

    def means(self, step: LayerStep) -> dict[Side, OutputMean]:
        """The means of both models' outputs."""
        return {model: output_mean(step, model) for model in self.models}

    def advance(self, number: int) -> None:
        """Add the stages of a step: the mean of each model, the covariance of each pair, scales.

        Definitions are divided by scales at the end of their stage, and the values of a step share
        scales. The last stage therefore defines all values once more, under the names that the
        next step reads.
        """
        step = self.step(number)
        means = self.means(step)
        stages = [mean.stage for mean in means.values() if mean.stage.definitions]
        following = _kinds_at(self.models, self.layers[number + 1])
        attends = any(kind.mixes_positions for kind in following)
        below = self.states
        above = States(dict(below.moments), dict(below.means), dict(below.ones))
        values: list[Definition] = []
        for model in self.models:
            if step.kinds[model] is None:
                continue
            own = ((model, 1),)
            # The constant of a state that is divided by c is 1 / c: a layer of order n multiplies n
            # copies of it, and the new scale divides it with the other values.
            ones = (Operand(below.ones[model], ()),) * step.order(model)
            values.append(_carried_value(step, f"one.{model}", (), ones, own))
            above.ones[model] = values[-1].name
            mean = means[model].moment
            if mean is not None:
                axes = MEAN_AXES[mean.form]
                values.append(
                    _carried_value(step, f"m.{model}", axes, (Operand(mean.name, axes),), own)
                )
                mean = mean._replace(name=values[-1].name)
            above.means[model] = mean
        # The covariance of two outputs needs the means of both, and is carried under a name that
        # the last stage of the step divides by scales.
        for pair in self.scales.tracked:
            if all(step.kinds[model] is None for model in pair):
                continue
            stage, moment = covariance_stage(step, pair, means)
            stages.append(stage)
            axes = COVARIANCE_AXES[moment.form]
            array = (Operand(moment.name, axes),)
            value = _carried_value(step, f"S.{pair.group}", axes, array, self.scales.powers(pair))
            # At one position the covariance of a model with itself is a symmetric matrix. Attention
            # above reads every such array along one axis, and has one plan for all pairs instead.
            symmetric = pair.bra == pair.ket and moment.form != "full" and not attends
            values.append(dataclasses.replace(value, exchangeable=2 if symmetric else 0))
            above.moments[pair] = moment._replace(name=values[-1].name)
            mean = means[pair.bra].moment
            if pair.bra == pair.ket and mean is not None and step.kinds[pair.bra] is not None:
                values.append(self.scales.size(step, pair, moment, mean))
        stages.append(Stage(tuple(values), self.scales.after_step(step, above)))
        self.stages += stages if step.mixes else [_joined_stage(stages)]
        self.states = above

    def close(self, number: int, slices: bool) -> None:
        """Add the stages of the last step: its inner products instead of its moments."""
        step = self.step(number)
        means = self.means(step)
        stages = [mean.stage for mean in means.values() if mean.stage.definitions]
        outputs = ("k",) if slices else ()
        for pair in self.pairs:
            builder, terms = inner_product(step, pair, means, outputs)
            stages.append(self.result(step, pair, outputs, builder, terms))
        self.stages += stages if step.mixes else [_joined_stage(stages)]

    def result(
        self,
        step: LayerStep,
        pair: Pair,
        indices: tuple[str, ...],
        builder: StageBuilder,
        terms: tuple[Term, ...],
    ) -> Stage:
        """The stage of an output of the problem, `pair.group[indices] = sum(terms)`."""
        powers = self.scales.powers(pair)
        if self.scales.by_model:
            powers = (*powers, (pair.group, 1))
        # The output is divided by the models' scales and by its own, so that a product far below
        # the norms keeps its digits.
        result = Definition(pair.group, indices, terms, powers=powers)
        scales = self.scales.after_result(step, pair, first=pair == self.pairs[0])
        return Stage((*builder.definitions, result), scales)

    def problem(self) -> Problem:
        """The problem of all stages so far, with the shapes of its leaves."""
        n, d_in = self.n_ctx, self.models["A"][0].d_in
        shapes: dict[str, tuple[int, ...]] = {
            ONE: (),
            ONES: (n,),
            SAME_POSITION: (n, n),
            IDENTITY: (d_in, d_in),
            MEAN: self.inputs.mean_shape(d_in, n),
            COVARIANCE: self.inputs.covariance_shape(d_in, n),
        }
        for model, kinds in self.models.items():
            for number, kind in enumerate(kinds):
                for role, shape in sequence_shapes(kind, n).items():
                    shapes[str(Leaf(model, number, role))] = shape
        definitions = [each for stage in self.stages for each in stage.definitions]
        terms = [term for definition in definitions for term in definition.terms]
        for name in sorted({operand.name for term in terms for operand in term.operands}):
            shape = position_shape(name, n)
            if shape is not None:
                shapes[name] = shape
        outputs = tuple(pair.group for pair in self.pairs)
        symmetric = frozenset({IDENTITY, SAME_POSITION})
        return prune(Problem(tuple(self.stages), shapes, symmetric, outputs))


def _joined_stage(stages: Iterable[Stage]) -> Stage:
    """The stages of a step as one.

    A step of layers that act position by position has few products: planned together they share
    what they have in common, up to 13% of the multiplications, and equal steps are one program.
    """
    definitions: dict[str, Definition] = {}
    scales: list[ScaleGroup] = []
    for stage in stages:
        scales += stage.scale_groups
        for each in stage.definitions:
            definitions.setdefault(each.name, each)
    return Stage(tuple(definitions.values()), tuple(scales))


def _carried_value(
    step: LayerStep, name: str, indices: tuple[str, ...], product: Product, powers: Powers
) -> Definition:
    """A value under the name that the next step reads."""
    return Definition(name + step.suffix, indices, (Term(1.0, product),), powers=powers)


def _matched_layers(models: Mapping[Side, Kinds]) -> tuple[Step, ...]:
    """The layers that each step applies.

    Raises:
        ModelError: A layer that mixes positions meets a nonlinear layer that does not.
    """
    steps = []
    for matched in align(models["A"], models.get("B", models["A"])):
        layers: Step = {model: matched[model] for model in models}
        _check_meeting(_kinds_at(models, layers))
        steps.append(layers)
    return tuple(steps)


def _kinds_at(models: Mapping[Side, Kinds], layers: Step) -> list[LayerKind]:
    """Kinds of the layers that a step applies, without models that wait."""
    return [models[model][number] for model, number in layers.items() if number is not None]


def _check_meeting(kinds: list[LayerKind]) -> None:
    """Refuse attention that meets a nonlinear layer which acts position by position."""
    mixing = [kind for kind in kinds if kind.mixes_positions]
    others = [kind for kind in kinds if kind.order > 1 and not kind.mixes_positions]
    if mixing and others:
        one, two = mixing[0].name.lower(), others[0].name.lower()
        raise ModelError(
            f"an {one} layer of one model meets a {two} layer of the other at the same depth; "
            f"models of sequences are compared {one} with {one} and {two} with {two}"
        )


def _tracked_pairs(pairs: tuple[Pair, ...], rules: MetricRules) -> tuple[Pair, ...]:
    """The pairs with covariances that are carried along.

    These are the pairs asked for and, under a Gaussian metric, which joins legs of the same model
    too, every model with itself.
    """
    present = set(itertools.chain.from_iterable(pairs))
    tracked = []
    for pair in PAIRS:
        with_itself = pair.bra == pair.ket and pair.bra in present
        if pair in pairs or (rules.gaussian and with_itself):
            tracked.append(pair)
    return tuple(tracked)


def _input_states(models: Iterable[Side], inputs: SequenceInputs) -> States:
    """The states below the first step, the input that both models read."""
    covariance = Moment("" if inputs.covariance is None else COVARIANCE, *inputs.form)
    mean = None if inputs.mean is None else Moment(MEAN, inputs.mean)
    names = tuple(models)
    return States(
        dict.fromkeys(PAIRS, covariance), dict.fromkeys(names, mean), dict.fromkeys(names, ONE)
    )
