"""What a step of a fold stands on. In: nothing. Out: plain data on states and layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tnsim.folding.sequences.joining_rules import MetricRules
from tnsim.metrics.input_moments import PositionForm
from tnsim.names import ModelName, Pair
from tnsim.tensors.kinds import LayerKind

MEAN_AXES: dict[PositionForm, tuple[str, ...]] = {"alike": ("k",), "each": ("s", "k")}
COVARIANCE_AXES: dict[PositionForm, tuple[str, ...]] = {
    "alike": ("k", "l"),
    "each": ("s", "k", "l"),
    "full": ("s", "k", "S", "l"),
}
"""Axes of a mean and of a covariance of outputs by form."""


class Moment(NamedTuple):
    """A mean or a covariance of states over positions, as the array `name` holds it.

    Its axes are `MEAN_AXES` or `COVARIANCE_AXES`. Where a covariance is not full, states at
    different positions are independent. A `diagonal` covariance has one axis for both coordinates;
    one without a name is the identity.
    """

    name: str
    form: PositionForm
    diagonal: bool = False


class Positions(NamedTuple):
    """What is known of the positions below a step.

    Args:
        n_ctx: Their number.
        independent: Whether states at different positions are independent.
        relative: Whether they are moreover distributed alike, so that only differences of positions
            matter.
    """

    n_ctx: int
    independent: bool
    relative: bool


class States(NamedTuple):
    """What is known of both models below a step.

    Args:
        moments: Covariance of the states of a pair of models.
        means: Mean of a model's state; None: zero.
        ones: Name of the constant 1 in the current scale of a model.
    """

    moments: dict[Pair, Moment]
    means: dict[ModelName, Moment | None]
    ones: dict[ModelName, str]

    def positions(self, n_ctx: int) -> Positions:
        """Whether positions are independent, and alike."""
        forms = {moment.form for moment in self.moments.values()}
        means = {mean.form for mean in self.means.values() if mean is not None}
        relative = forms == {"alike"} and means <= {"alike"}
        return Positions(n_ctx, "full" not in forms, relative)


@dataclass(frozen=True)
class LayerStep:
    """A layer of each model over the states below; a model without one waits (see `alignment`).

    Args:
        number: Of the step, from the input.
        kinds: Kinds of the layers; None waits.
        layers: Their numbers within the models; None waits.
        states: What is known below the step.
        rules: Which legs the metric joins.
        positions: What is known of the positions below.
        mixes_later: Whether a later layer mixes positions, so that covariances between different
            ones are still needed.
    """

    number: int
    kinds: dict[ModelName, LayerKind | None]
    layers: dict[ModelName, int | None]
    states: States
    rules: MetricRules
    positions: Positions
    mixes_later: bool

    @property
    def suffix(self) -> str:
        """Ends the names of all that the step defines."""
        return f"@{self.number}"

    def order(self, model: ModelName) -> int:
        """Order of a model's layer. A model that waits applies the identity, of order 1."""
        kind = self.kinds[model]
        return 1 if kind is None else kind.order
