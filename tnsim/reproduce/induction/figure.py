"""The induction series as matrices under its curves. In: measured. Out: figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.induction.measure import MEASURES, Measured
from tnsim.reproduce.induction.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """Three measures, and above them accuracies and what goes through which part.

    Args:
        run: That was measured.
        measured: Its matrices and curves.

    Returns:
        One figure; its lines are where the accuracy on repeated tokens turns.
    """
    table = measured.table
    parts = [str(name) for name in table.data_vars if str(name).startswith("through ")]
    curves = [["repeated accuracy", "fresh accuracy"], parts]
    figure = tnsim.figures.pairwise(table, "heatmap", list(MEASURES), measured.turns, curves)
    return {"induction": figure}
