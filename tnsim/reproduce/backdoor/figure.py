"""Figure 1: what sees the attack. In: measured values. Out: figures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.backdoor.measure import Measured
from tnsim.reproduce.backdoor.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = ("similarity", "slice_9", "weight_cosine", "clean_behaviour", "poisoned_behaviour")
CURVES = ("train_accuracy", "test_accuracy", "attack_success")


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """The attack and its control under five measures, and all slices of the attack.

    Args:
        run: that was measured.
        measured: its values.

    Returns:
        Two figures of the first seed, and one of its control.
    """
    first = measured.seeds[0]
    points = (first.injection,)
    drawn = {"slices": tnsim.figures.pairwise(first.attack, "slices", change_points=points)}
    results = {"attack": first.attack}
    if first.control is not None:
        results["control"] = first.control
    for name, result in results.items():
        drawn[name] = tnsim.figures.pairwise(result, "heatmap", PANELS, points, [CURVES])
    return drawn
