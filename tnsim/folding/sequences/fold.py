"""From two sequence models and a metric to a folded problem. In: layer kinds, input structure. Out: a `Problem`.

Carried from layer to layer are the covariances of two models' states between positions, `C_XY[s, i, t, j]`, and their means
`m_X[s, i]`, in the cheapest form that holds them (see `states.Moment`). Layers that act position by position are in
`position_wise`, attention is in `attention`, and a residual adds the covariance of the stream with the layer's output
(`layer_covariances`). For the Gaussian metrics that is Isserlis' theorem layer by layer: exact for one nonlinear
layer, the closure beyond. The tree metrics are the same computation with other joinings (see `joining_rules`); the "mean" of
a state is then its value at the zero input.

*Scales.* Values grow doubly exponentially with depth, so after every step they are divided by a scale whose logarithm is kept.
Every term of a definition must be divided alike. Therefore all of them are homogeneous in the state and in ONE, the
constant 1 in a model's current scale: a bias in a layer of order n, say, is multiplied by ONE n times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tnsim.engine.problem import (
    Definition,
    Gauge,
    Operand,
    Problem,
    Stage,
    StageBuilder,
    Term,
    prune,
)
from tnsim.errors import ModelError
from tnsim.folding.alignment import align
from tnsim.folding.sequences.coincidences import position_array
from tnsim.folding.sequences.joining_rules import rules_of
from tnsim.folding.sequences.layer_covariances import covariance_stage, inner_product
from tnsim.folding.sequences.layer_means import OutputMean, output_mean
from tnsim.folding.sequences.notation import Product
from tnsim.folding.sequences.states import (
    COVARIANCE_AXES,
    MEAN_AXES,
    LayerStep,
    Moment,
    States,
)
from tnsim.metrics.metric import Metric, SequenceInputs
from tnsim.names import (
    COVARIANCE,
    IDENTITY,
    MEAN,
    ONE,
    ONES,
    PAIRS,
    SAME_POSITION,
    Leaf,
    ModelName,
    Pair,
)
from tnsim.tensors.positional import SequenceKind, sequence_shapes

Kinds = tuple[SequenceKind, ...]
Powers = tuple[tuple[str, int], ...]


def fold_sequences(
    models: dict[ModelName, Kinds],
    metric: Metric,
    inputs: SequenceInputs,
    n_ctx: int,
    pairs: Iterable[Pair],
    per_output: bool,
) -> Problem:
    """The problem whose outputs are the inner products `pairs`, summed over positions.

    Args:
        models: Kinds of the layers, from the input up.
        metric: One that works layer by layer.
        inputs: Structure of the input's mean and covariance.
        n_ctx: Number of positions.
        pairs: The inner products that are wanted.
        per_output: Whether they are wanted for every output coordinate, (d_out,), or in all, ().

    Returns:
        A problem with an output named after each pair. Its leaves are those of the models (`names.Leaf`), `MEAN` and `COVARIANCE` of
        the input, and constants (`ONE`, `ONES`, `SAME_POSITION`, `IDENTITY`, `names.PositionLeaf`).

    Raises:
        ModelError: An attention layer of one model meets a nonlinear layer of the other that acts position by position, or a tree
            metric finds trees of different shape.
    """
    folder = Folder(models, metric, inputs, n_ctx, tuple(pairs))
    *first, last = range(len(folder.alignment))
    for step in first:
        folder.advance(step)
    folder.close(last, per_output)
    return folder.problem()


class Folder:
    """Lays stages down step by step, and holds the states as they stand.

    Args:
        models, metric, inputs, n_ctx, pairs: As of `fold_sequences`.

    Attributes:
        stages: Laid down so far.
        states: What is known of both models behind them.
        tracked: Pairs whose covariances are carried along: those that are wanted, and under a Gaussian metric, which joins legs of
            one model too, each model with itself.
        last_nonlinear: The last step with a nonlinear layer.
    """

    def __init__(
        self,
        models: dict[ModelName, Kinds],
        metric: Metric,
        inputs: SequenceInputs,
        n_ctx: int,
        pairs: tuple[Pair, ...],
    ) -> None:
        self.models, self.inputs, self.n_ctx, self.pairs = models, inputs, n_ctx, pairs
        self.rules = rules_of(metric)
        self.alignment = align(models["A"], models.get("B", models["A"]), metric)
        self.stages: list[Stage] = []
        covariance = Moment("" if inputs.covariance == "identity" else COVARIANCE, *inputs.form)
        mean = None if inputs.mean is None else Moment(MEAN, inputs.mean)
        self.states = States(
            dict.fromkeys(PAIRS, covariance),
            dict.fromkeys(models, mean),
            dict.fromkeys(models, ONE),
        )
        self.tracked = tuple(pair for pair in PAIRS if self._is_tracked(pair))
        every = [kind for kinds in models.values() for kind in kinds]
        constants = mean is not None or any(kind.biases or kind.skips for kind in every)
        self.scale_by_model = self.rules.gaussian or constants
        layers = [self._kinds_at(number) for number in range(len(self.alignment))]
        for kinds in layers:
            _check_meeting(kinds)
        mixing = [n for n, kinds in enumerate(layers) if any(k.mixes_positions for k in kinds)]
        self.last_mixing = max(mixing, default=-1)
        nonlinear = [n for n, kinds in enumerate(layers) if any(k.order > 1 for k in kinds)]
        self.last_nonlinear = max(nonlinear, default=-1)

    # --- stages ----------------------------------------------------------------------------------------------------

    def advance(self, number: int) -> None:
        """The stages of one step: the legs and the mean of each model, the covariance of each pair, then scales.

        The last stage defines every value of the step once more, under the name by which the next step knows it: what a
        stage defines is divided by scales as the stage ends, and all values of a model must be divided by the same.
        """
        step = self.step(number)
        means = self.means(step)
        states = States(*(dict(part) for part in self.states))
        values: list[Definition] = []

        def carry(name: str, indices: tuple[str, ...], product: Product, powers: Powers) -> str:
            name += step.suffix
            values.append(Definition(name, indices, (Term(1.0, product),), powers=powers))
            return name

        for model in self.models:
            if step.kinds[model] is None:
                continue
            own = ((model, 1),)
            one = (Operand(self.states.ones[model], ()),) * step.order(model)
            states.ones[model] = carry(f"one.{model}", (), one, own)
            mean = means[model].moment
            if mean is not None:
                axes = MEAN_AXES[mean.form]
                name = carry(f"m.{model}", axes, (Operand(mean.name, axes),), own)
                mean = mean._replace(name=name)
            states.means[model] = mean
        for pair in self.tracked:
            if all(step.kinds[model] is None for model in pair):
                continue
            stage, moment = covariance_stage(step, pair, means)
            self.stages.append(stage)
            axes = COVARIANCE_AXES[moment.form]
            product = (Operand(moment.name, axes),)
            name = carry(f"S.{pair.group}", axes, product, self._powers(pair))
            states.moments[pair] = moment._replace(name=name)
        self.stages.append(Stage(tuple(values), self._scales(step, states)))
        self.states = states

    def close(self, number: int, per_output: bool) -> None:
        """The stages of the last step: its inner products instead of its moments."""
        step = self.step(number)
        means = self.means(step)
        outputs = ("k",) if per_output else ()
        for pair in self.pairs:
            builder, terms = inner_product(step, pair, means, outputs)
            self.add_result(step, pair, outputs, builder, terms)

    def means(self, step: LayerStep) -> dict[ModelName, OutputMean]:
        """The means of both models' outputs; their stages are laid down."""
        means = {model: output_mean(step, model) for model in self.models}
        self.stages += [mean.stage for mean in means.values() if mean.stage.definitions]
        return means

    def add_result(
        self,
        step: LayerStep,
        pair: Pair,
        indices: tuple[str, ...],
        builder: StageBuilder,
        terms: tuple[Term, ...],
    ) -> None:
        """The stage of an output of the problem, `pair.group[indices] = sum(terms)`, in a scale of its own."""
        powers, scales = self._powers(pair), [Gauge(pair.group, step.order(pair.bra), pair.group)]
        if self.scale_by_model:
            powers = (*powers, (pair.group, 1))
            scales = [Gauge(pair.group, 1, pair.group)]
            # The models' own scales grow with the step, once, and are renormalised no more.
            if pair == self.pairs[0]:
                grown = [Gauge(model, step.order(model), None, 2) for model in self.models]
                scales = [*grown, *scales]
        result = Definition(pair.group, indices, terms, powers=powers)
        self.stages.append(Stage((*builder.definitions, result), tuple(scales)))

    def problem(self, selectors: Mapping[str, tuple[int, ...]] | None = None) -> Problem:
        """What was laid down, with the shapes of its leaves; `selectors` are those that only an attribution has."""
        n, d = self.n_ctx, self.models["A"][0].d_in
        shapes = {ONE: (), ONES: (n,), SAME_POSITION: (n, n), IDENTITY: (d, d)}
        shapes |= {MEAN: self.inputs.mean_shape(d, n)}
        shapes |= {COVARIANCE: self.inputs.covariance_shape(d, n)}
        for model, kinds in self.models.items():
            for number, kind in enumerate(kinds):
                for role, shape in sequence_shapes(kind, n).items():
                    shapes[str(Leaf(model, number, role))] = shape
        for name in sorted(_names_used(self.stages)):
            array = position_array(name, n)
            if array is not None:
                shapes[name] = array.shape
        shapes |= selectors or {}
        outputs = tuple(pair.group for pair in self.pairs)
        symmetric = frozenset({IDENTITY, SAME_POSITION})
        return prune(Problem(tuple(self.stages), shapes, symmetric, outputs))

    # --- layers ----------------------------------------------------------------------------------------------------

    def step(self, number: int) -> LayerStep:
        """The layers of a step over the states as they stand."""
        layers = self._layers_at(number)
        kinds: dict[ModelName, SequenceKind | None] = dict.fromkeys(self.models)
        for model, layer in layers.items():
            if layer is not None:
                kinds[model] = self.models[model][layer]
        return LayerStep(
            number,
            kinds,
            layers,
            self.states,
            self.rules,
            self.states.positions(self.n_ctx),
            mixes_later=number < self.last_mixing,
        )

    def _layers_at(self, number: int) -> dict[ModelName, int | None]:
        """Numbers of the layers that a step applies; None waits."""
        matched = self.alignment[number]
        layers = {"A": matched.bra, "B": matched.ket}
        return {model: layers[model] for model in self.models}

    def _kinds_at(self, number: int) -> list[SequenceKind]:
        """Kinds of the layers that a step applies."""
        layers = self._layers_at(number)
        return [self.models[model][n] for model, n in layers.items() if n is not None]

    def _is_tracked(self, pair: Pair) -> bool:
        present = {model for wanted in self.pairs for model in wanted}
        own = pair.bra == pair.ket and pair.bra in present
        return pair in self.pairs or (self.rules.gaussian and own)

    # --- scales ----------------------------------------------------------------------------------------------------

    def _powers(self, pair: Pair) -> Powers:
        """How a covariance of two models, or an inner product, grows with the scales.

        A Gaussian metric adds products of S_AB to products of S_AA and of means, and constants are added to all of them. Such
        sums are kept in ratio if all values of a model share one scale: S_AB then has the scale of A times that of B, and
        no sum needs an exponential of a difference of logarithms. Without either, S_AB is made of S_AB alone and has a scale of its
        own.
        """
        if not self.scale_by_model:
            return ((pair.group, 1),)
        if pair.bra == pair.ket:
            return ((pair.bra, 2),)
        return ((pair.bra, 1), (pair.ket, 1))

    def _scales(self, step: LayerStep, states: States) -> tuple[Gauge, ...]:
        """How the scales are renormalised after a step: a model's is the root of the largest value of its own covariance."""
        if not self.scale_by_model:
            return tuple(
                Gauge(pair.group, step.order(pair.bra), states.moments[pair].name)
                for pair in self.tracked
            )
        scales = []
        for model in self.models:
            own = Pair(model, model)
            read_off = states.moments[own].name if own in self.tracked else None
            scales.append(Gauge(model, step.order(model), read_off, 2))
        return tuple(scales)


def _check_meeting(kinds: list[SequenceKind]) -> None:
    """Layers of one step are of one sort, or linear.

    Raises:
        ModelError: They are not.
    """
    mixing = [kind for kind in kinds if kind.mixes_positions]
    others = [kind for kind in kinds if kind.order > 1 and not kind.mixes_positions]
    if mixing and others:
        one, two = mixing[0].name.lower(), others[0].name.lower()
        raise ModelError(
            f"an {one} layer of one model meets a {two} layer of the other at the same depth; "
            f"models of sequences are compared {one} with {one} and {two} with {two}"
        )


def _names_used(stages: Iterable[Stage]) -> set[str]:
    """Names of all operands of some stages."""
    definitions = [definition for stage in stages for definition in stage.definitions]
    terms = [term for definition in definitions for term in definition.terms]
    return {operand.name for term in terms for operand in term.operands}
