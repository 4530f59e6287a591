"""Scale groups of sequence models. In: a metric's rules, the layers. Out: powers of definitions.

Values grow doubly exponentially with depth, so after every step they are divided by a scale whose
logarithm is kept. All terms of a sum must be divided alike, which decides who shares a scale:

- A Gaussian metric adds products of S_AB to products of S_AA and of means, and constants are
  added to all of them. All values of a model then share one scale, S_AB being divided by that of
  A times that of B. Whatever is added up stays in ratio, and no sum ever needs the exponential of
  a difference of two logarithms, which would lose digits.
- Without either, S_AB is made of S_AB below alone, and has a scale of its own.

Definitions are made homogeneous for that: a bias in a layer of order n is multiplied n times by
ONE, the constant 1 in the current scale of its model.
"""

from __future__ import annotations

from typing import NamedTuple

from tnsim.engine.problem import Definition, Operand, ScaleGroup, Term
from tnsim.folding.sequences.states import (
    COVARIANCE_AXES,
    MEAN_AXES,
    LayerStep,
    Moment,
    States,
)
from tnsim.names import ModelName, Pair

Powers = tuple[tuple[str, int], ...]


class Scales(NamedTuple):
    """The scale groups of a comparison.

    Args:
        models: The models that are compared.
        tracked: Pairs whose covariances are carried from step to step.
        by_model: Whether all values of a model share one scale; otherwise those of a pair do.
    """

    models: tuple[ModelName, ...]
    tracked: tuple[Pair, ...]
    by_model: bool

    def powers(self, pair: Pair) -> Powers:
        """How a covariance of two models grows with the scales."""
        if not self.by_model:
            return ((pair.group, 1),)
        if pair.bra == pair.ket:
            return ((pair.bra, 2),)
        return ((pair.bra, 1), (pair.ket, 1))

    def powers_of_result(self, pair: Pair) -> Powers:
        """How an output of the problem grows with the scales: the last of them is its own."""
        if not self.by_model:
            return self.powers(pair)
        return (*self.powers(pair), (pair.group, 1))

    def size(self, step: LayerStep, pair: Pair, covariance: Moment, mean: Moment) -> Definition:
        """Second moments of a state above a step, `E[h_k^2]`, added up over positions.

        Args:
            step: The step.
            pair: The model with itself.
            covariance: The covariance above the step, before it is rescaled.
            mean: The mean above the step, before it is rescaled.
        """
        axes = tuple(axis.lower().replace("l", "k") for axis in COVARIANCE_AXES[covariance.form])
        variance = Term(1.0, (Operand(covariance.name, axes),))
        squared = Term(1.0, (Operand(mean.name, MEAN_AXES[mean.form]),) * 2)
        name = _size_name(step, pair.bra)
        return Definition(name, ("k",), (variance, squared), powers=self.powers(pair))

    def after_step(self, step: LayerStep, states: States) -> tuple[ScaleGroup, ...]:
        """How the scales are renormalised as a step ends.

        A model's scale is the root of the largest second moment of its state, mean included, where
        the covariance of the model with itself is tracked. A scale read off the covariance alone
        would make the mean and the constant as large as the state varies little.
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
        """How the scales change with an output of the problem, the first of its step or another.

        The models' scales grow with the step, which is told once, and are renormalised no more.
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


def _size_name(step: LayerStep, model: ModelName) -> str:
    return f"size.{model}{step.suffix}"
