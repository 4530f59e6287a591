"""The points of a finite metric for a loss. In: models, a metric. Out: inputs and their weights.

Reverse mode keeps what every layer gave at every point, so all points are there at once, and they
are arguments of the compiled programs: another sample of the same size needs no other program.
"""

from __future__ import annotations

from typing import Any

from tnsim.compare.by_points import check_affordable, forward_plan, points_of
from tnsim.compare.question import Question
from tnsim.errors import TooLarge
from tnsim.folding.forward import needs
from tnsim.metrics.points import Weighted
from tnsim.metrics.protocol import adds_up
from tnsim.models.arrays import numbers
from tnsim.models.forward import check_inputs
from tnsim.models.model import terms


def sample_of(a: Any, b: Any, asked: Question) -> Weighted | None:
    """The points at which two models are compared in a loss.

    Args:
        a: A model or a combination, as is b.
        b: The other one.
        asked: What is asked of them.

    Returns:
        All points; None where the metric joins legs, or counts tokens along a plan.

    Raises:
        ModelError: Where the models do not read these inputs.
        TooLarge: Where forward passes, or what the way back keeps of them, are over the budget.
    """
    metric = asked.metric
    if not adds_up(metric):
        return None
    models = [model for one in numbers((a, b)) for _, model in terms(one)]
    points = points_of(models, metric, asked.pairs, asked.per_output, asked.dtype)
    if points is None:
        return None
    plan = forward_plan(models, metric, points, asked.dtype)
    check_affordable(plan, metric, asked.budget)
    layers = max(len(model.layers) for model in models)
    kept = points.count * layers * needs(models, points, asked.dtype).each
    if kept > asked.budget.room(0, kept):
        raise TooLarge(
            f"{metric.name} runs through {points.count:,} inputs here, of which the way back keeps "
            f"about {kept / 2**30:.3g} GiB; use fewer inputs or a larger tnsim.Budget"
        )
    sample = points.block(0, points.count)
    for model in models:
        check_inputs(model, sample.inputs)
    return sample
