"""Figure 7. In: measured values. Out: figures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.differences.measure import Measured
from tnsim.reproduce.forgetting.figure import ACCURACIES, borders
from tnsim.reproduce.forgetting.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """Similarity to the difference along training, of whole models and of every slice.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        One figure, of the first seed.
    """
    result = measured.seeds[0]
    drawn = result.copy()
    slices = result.slices.values[:, 0]
    drawn["similarity_to_the_difference"] = ("a", result.similarity.values[:, 0])
    drawn["slice_9"] = ("a", slices[:, 9])
    drawn["other_slices,_mean"] = ("a", slices[:, :9].mean(1))
    strips = [
        ACCURACIES,
        "similarity_to_the_difference",
        ("slice_9", "other_slices,_mean"),
    ]
    points = borders(result)
    # over the checkpoints alone: the one column is the difference
    return {"figure-7": tnsim.figures.curves_over_training(drawn.isel(b=0), strips, points)}
