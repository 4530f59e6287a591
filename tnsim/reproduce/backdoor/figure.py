"""Figure 1: what sees the attack. In: measured values. Out: figures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.backdoor.measure import CURVES, Measured
from tnsim.reproduce.backdoor.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "tensors": ("similarity", "slice_9", "weight_cosine"),
    "inputs": ("clean_behaviour", "poisoned_behaviour", "fitted"),
}


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """The attack and its control under several measures, and all slices of the attack.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        Three figures of the first seed, and two of its control.
    """
    first = measured.seeds[0]
    points = (first.injection,)
    drawn = {}
    results = {"attack": first.attack}
    if first.control is not None:
        results["control"] = first.control
    for name, result in results.items():
        for kind, panels in PANELS.items():
            figure = tnsim.figures.pairwise(result, "heatmap", panels, points, [CURVES])
            drawn[f"{name}-{kind}"] = figure
    drawn["slices"] = tnsim.figures.pairwise(first.attack, "slices", change_points=points)
    return drawn
