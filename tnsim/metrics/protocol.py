"""What a metric is asked. In: orders of layers. Out: joinings, names, guarantees.

The six metrics of tnsim answer these; so may others, as long as they work layer by layer.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tnsim.metrics.pairings import Joining


@runtime_checkable
class Metric(Protocol):
    """What every metric says of itself.

    A metric is immutable and a pytree whose leaves are its arrays. Plans are kept by its class,
    which can be called without arguments: what a plan depends on does not depend on the numbers
    in a metric.
    """

    @property
    def name(self) -> str:
        """One word, as results and the command line call it."""
        ...

    @property
    def pairs_within_model(self) -> bool:
        """Whether legs of one model are joined with each other too, not only with the other's.

        Then legs may be handed to the mean as well, and the moments and the mean of each model
        alone are carried along with those between models.
        """
        ...

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether models with so many nonlinear layers meet the metric's own definition exactly."""
        ...


@runtime_checkable
class LayerwiseMetric(Metric, Protocol):
    """A metric that joins the legs of one layer of the bra with those of one layer of the ket."""

    def joinings(self, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
        """The ways in which the input legs of two layers are joined, with weights.

        Args:
            bra: order of the bra's layer, its number of input legs.
            ket: order of the ket's layer.
            centred: no leg is handed to the mean, which is zero.

        Returns:
            One joining for every orbit under exchange of a layer's legs.
        """
        ...
