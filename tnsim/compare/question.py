"""What two models are asked, and what comes back. In: nothing. Out: plain data."""

from __future__ import annotations

from typing import Any, NamedTuple

from tnsim.compare.by_points import ForwardPlan
from tnsim.engine.budget import Budget
from tnsim.engine.log_scaled import LogScaled
from tnsim.folding.forward import Sums
from tnsim.metrics.metric import Metric
from tnsim.names import Pair

CROSS = (Pair("A", "B"),)
ALL = (Pair("A", "A"), Pair("A", "B"), Pair("B", "B"))
SELF = (Pair("A", "A"),)


class Question(NamedTuple):
    """What is asked of two models, and of all pairs of models that they are sums of.

    Args:
        metric: How inputs are weighed.
        dtype: Precision of the computation.
        budget: What it may take.
        norms: Whether `AA` and `BB` are wanted beside `AB`, as a cosine needs.
        per_output: Whether outputs are told apart.
    """

    metric: Metric
    dtype: str
    budget: Budget
    norms: bool = False
    per_output: bool = False

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The inner products that are wanted."""
        return ALL if self.norms else CROSS


class Products(NamedTuple):
    """Inner products of two models.

    Args:
        values: `AB`, and with norms also `AA` and `BB`.
        exponent: The power of two that `AB` lacks, as the norms do and cosines may.
        traced: Whether they are traced.
        forward: What ran, where that was forward passes.
        sums: Their sums over groups of points.
    """

    values: dict[str, LogScaled]
    exponent: Any
    traced: bool
    forward: ForwardPlan | None = None
    sums: Sums | None = None
