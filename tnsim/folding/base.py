"""How a comparison becomes a Problem. In: nothing. Out: the protocol of a family of problems.

A *family* is one way to write the inner products of two models as contractions: layer over layer,
diagrams over whole trees, sequences, tokens. Each is a small frozen object, made from the models'
layers (not their numbers) and the metric; `choose` picks the one that applies. The rest of the
program asks a family four questions and never which one it is.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any, Protocol, Self

from tnsim.engine.problem import Problem
from tnsim.folding.constants import MomentNodes
from tnsim.metrics.metric import Metric
from tnsim.models.model import Model
from tnsim.names import Pair, Side


class Family(Protocol):
    """One way in which two models and a metric become a Problem.

    Frozen and hashable: a family is the key under which plans are kept, so it holds all that a plan
    depends on besides the inner products asked for.
    """

    @property
    def name(self) -> str:
        """Name of the metric that was asked for."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the metric's own definition is met exactly."""
        ...

    @property
    def lifted(self) -> bool:
        """Whether outputs, where they are wanted one by one, carry the constant at position 0."""
        ...

    @property
    def nodes(self) -> MomentNodes | None:
        """Variances of the constant at which a plan runs, see `constants`.

        None where one run is all.
        """
        ...

    @property
    def layout(self) -> Hashable:
        """All that `prepare` and `weights` depend on besides the model and its side.

        Families of one layout lay out a model alike, so its arrays serve all of them.
        """
        ...

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        """The family member that compares `a` with `b`, or `a` with itself where `b` is None.

        Raises:
            ModelError: The metric is not defined for these models.
            TooLarge: It is, but nobody could contract what it asks for.
        """
        ...

    def prepare(self, model: Model) -> Model:
        """The same function as `model`, in the form of layers that the family reads."""
        ...

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        """The problem whose outputs are inner products.

        Args:
            pairs: The inner products asked for; outputs are named by them.
            per_output: Whether they are wanted for every output coordinate, or summed over them.
        """
        ...

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        """The arrays of one prepared model by the names of the problem's leaves."""
        ...

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        """The leaves that are not a model's: moments of the input, and constants.

        Args:
            names: The leaves that are read.
            metric: Whose moments; of the class that the family was made for.
            d_in: Coordinates of the input.
            t: Variance of the constant, one of `nodes`; None without nodes.

        Returns:
            Leaf name -> array.
        """
        ...


def model_weights(family: Family, models: Mapping[Side, Model]) -> dict[str, Any]:
    """The arrays of all models.

    Args:
        family: Says what the leaves are.
        models: Prepared by the family.

    Returns:
        Leaf name -> array.

    Example:
        >>> import tnsim
        >>> from tnsim.folding.choose import choose
        >>> model = tnsim.Model([tnsim.Linear([[2.0]])])
        >>> family = choose(model, None, tnsim.Gaussian())
        >>> model_weights(family, {"A": model})
        {'A.LAYER0.WEIGHT': array([[2.]])}
    """
    arrays: dict[str, Any] = {}
    for side, model in models.items():
        arrays |= family.weights(side, model)
    return arrays
