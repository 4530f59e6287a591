"""Figure 4: curves above the matrix. In: measured values. Out: figures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.grokking.measure import Measured
from tnsim.reproduce.grokking.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """Accuracies, losses and frequencies above similarity and the cosine of weights.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        One figure, of the first seed.
    """
    result = measured.runs[0]
    frequencies = [name for name in map(str, result) if name[-1].isdigit()]
    strips = [
        ("train_accuracy", "validation_accuracy"),
        ("log10_train_loss", "log10_validation_loss"),
        frequencies,
    ]
    points = tnsim.reading.segment(result, 3).change_points
    panels = ("similarity", "weight_cosine")
    return {"figure-4": tnsim.figures.pairwise(result, "heatmap", panels, points, strips)}
