"""Figure 2 as three matrices. In: measured values. Out: figures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.invariance.measure import Measured
from tnsim.reproduce.invariance.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = ("weight_cosine", "output_cosine", "similarity")


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """Weights, outputs on data and tensors of one network's copies, side by side.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        One figure.
    """
    return {"figure-2": tnsim.figures.pairwise(measured.pictured, "heatmap", PANELS)}
