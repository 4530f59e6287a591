"""The paper's figure and one more measure, and the first one's phases.

In: measured. Out: figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.language.measure import Measured
from tnsim.reproduce.language.setting import PHASES, Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_WEIGHTS = ("similarity", "gaussian_logits", "weight_cosine")
OF_TEXT = ("held_out_text", "text_logits", "text_residual")


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """All measures with the n-gram scores above them, and the first with its own phases.

    Args:
        run: That was measured.
        measured: Its matrices and curves.

    Returns:
        Three figures; lines in the first two are the phases of the n-gram scores.
    """
    table = measured.table
    grams = [name for name in table.data_vars if str(name).endswith("-gram score")]
    curves = [list(map(str, grams)), "held-out loss"]
    of_behaviour = tnsim.reading.segment(measured.ngrams, PHASES).change_points
    tensor = tnsim.reading.segment(table, PHASES).change_points
    draw = tnsim.figures.pairwise
    return {
        "figure-5": draw(table, "heatmap", OF_WEIGHTS, of_behaviour, curves),
        "figure-5-text": draw(table, "heatmap", OF_TEXT, of_behaviour, curves),
        "tensor-phases": draw(table, "heatmap", "similarity", tensor, curves),
    }
