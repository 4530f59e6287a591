"""Figures 3 and 6. In: measured values. Out: figures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import tnsim
from tnsim.reproduce.forgetting.claims import ends
from tnsim.reproduce.forgetting.measure import WHOLE, Measured
from tnsim.reproduce.forgetting.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACIES = ("validation_accuracy", "accuracy_of_9")


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """Whole models and slices across stages, and both beside the end of the stage that adds 9.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        Four figures, of the first seed.
    """
    result = measured.seeds[0].stages
    points = borders(result)
    of_9 = ("slice_9", "weight_slice_9")
    return {
        "figure-3": tnsim.figures.pairwise(result, "heatmap", WHOLE, points, [ACCURACIES]),
        "figure-3-slice-9": tnsim.figures.pairwise(result, "heatmap", of_9, points, [ACCURACIES]),
        "figure-3-slices": tnsim.figures.pairwise(result, "slices", change_points=points),
        "figure-6": beside_add_9(result, points),
    }


def borders(result: Any) -> tuple[int, ...]:
    """Rows at which stages start."""
    return tuple(int(row) for row in 1 + np.flatnonzero(np.diff(result.stage.values)))


def beside_add_9(result: Any, points: tuple[int, ...]) -> Figure:
    """Every measure against the end of the stage that adds 9, along training."""
    drawn = result.copy()
    column = ends(result)["add 9"]
    for name in WHOLE:
        drawn[f"{name}_to_add_9"] = ("a", result[name].values[:, column])
    slices = result.slices.values[:, column]
    drawn["slice_9_to_add_9"] = ("a", slices[:, 9])
    drawn["other_slices_to_add_9,_mean"] = ("a", slices[:, :9].mean(1))
    drawn["weight_slice_9_to_add_9"] = ("a", result.weight_slice_9.values[:, column])
    strips = [
        ACCURACIES,
        [f"{name}_to_add_9" for name in WHOLE],
        ["slice_9_to_add_9", "other_slices_to_add_9,_mean", "weight_slice_9_to_add_9"],
    ]
    return tnsim.figures.curves_over_training(drawn, strips, points)
