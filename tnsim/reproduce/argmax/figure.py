"""The grid of scatter plots. In: measured values. Out: figures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tnsim
from tnsim.reproduce.argmax.measure import Measured
from tnsim.reproduce.argmax.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = {
    "symmetric": "tensor similarity, symmetrised",
    "fitted": "tensor similarity, Gaussian with mean and covariance of the inputs",
}


def figures(run: Run[Setting], measured: Measured) -> dict[str, Figure]:
    """A panel for every distribution: tensors against outputs, for the metric of the authors' code
    and for the one fitted to the inputs.

    Args:
        run: That was measured.
        measured: Its matrices.

    Returns:
        Two figures.
    """
    drawn = {}
    for metric, label in ACROSS.items():
        panels = {}
        for name, table in measured.tables.items():
            if name != "spikes-text":  # the paper's nine
                panels[name] = (table[metric], table.output_cosine)
        drawn[f"scatter-{metric}"] = tnsim.figures.scatter_grid(
            panels, label, "cosine of the outputs"
        )
    return drawn
