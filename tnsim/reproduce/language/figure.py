"""The paper's figure of five measures, and the phases of each. In: measured. Out: figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.language.measure import MEASURES, Measured
from tnsim.reproduce.language.setting import PHASES, Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """All measures with the n-gram scores above them, and the first with its own phases.

    Args:
        run: that was measured.
        measured: its matrices and curves.

    Returns:
        Two figures; lines in the first are the phases of the n-gram scores.
    """
    table = measured.table.rename(MEASURES)
    grams = [name for name in table.data_vars if str(name).endswith("-gram score")]
    curves = [list(map(str, grams)), "held-out loss"]
    of_behaviour = tnsim.reading.segment(measured.ngrams, PHASES).change_points
    tensor = tnsim.reading.segment(measured.table, PHASES).change_points
    first = next(iter(MEASURES.values()))
    return {
        "figure-5": tnsim.figures.pairwise(
            table, "heatmap", list(MEASURES.values()), of_behaviour, curves
        ),
        "tensor-phases": tnsim.figures.pairwise(table, "heatmap", [first], tensor, curves),
    }
