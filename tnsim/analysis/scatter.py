"""Two measures of the same models against each other. In: pairs of matrices. Out: a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tnsim.analysis.axes import SMALL, colour_of
from tnsim.analysis.correlations import correlation, paired_entries
from tnsim.analysis.plots import new_figure
from tnsim.errors import ResultError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tnsim.analysis.matrices import Matrix

_PANEL = 3.0
"""Inches of a panel."""
_FEW = 300
"""Points up to which each is drawn large."""


def scatter_grid(panels: Mapping[str, tuple[Matrix, Matrix]], x_label: str, y_label: str) -> Figure:
    """A point for every pair of models, and both correlations; a panel for every comparison.

    Args:
        panels: By title, the matrix across and the matrix upwards, as `reading.correlation` takes
            them.
        x_label: What the first matrices hold.
        y_label: What the second ones hold.

    Returns:
        A figure; nothing is shown.

    Raises:
        ResultError: There is no panel, or `reading.correlation` refuses one.
        MissingExtra: matplotlib or scipy is not installed.

    Example:
        >>> import numpy as np
        >>> similarity = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.5], [0.1, 0.5, 1.0]])
        >>> figure = scatter_grid({"cubes": (similarity, similarity**3)}, "x", "x^3")
        >>> figure.axes[0].texts[0].get_text()
        'r = 0.935, rank 1.000'

    Source:
        The paper, appendix E, figure 8.
    """
    if not panels:
        raise ResultError("a scatter figure needs at least one pair of matrices, found none")
    columns = int(np.ceil(np.sqrt(len(panels))))
    rows = -(-len(panels) // columns)
    figure, grid = new_figure(
        nrows=rows,
        ncols=columns,
        squeeze=False,
        figsize=(_PANEL * columns + 0.4, _PANEL * rows + 0.4),
    )
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, (first, second)) in zip(grid.flat, panels.items(), strict=False):
        _draw(axes, first, second)
        axes.set_title(title)
    figure.supxlabel(x_label)
    figure.supylabel(y_label)
    return figure


def _draw(axes: Any, first: Matrix, second: Matrix) -> None:
    """The points of one panel, under the two coefficients."""
    x, y = paired_entries(first, second)
    size = 16
    if len(x) > _FEW:
        size = 4
    axes.scatter(x, y, s=size, alpha=0.4, linewidths=0, color=colour_of(0), rasterized=True)
    found = correlation(first, second)
    said = f"r = {found.pearson:.3f}, rank {found.spearman:.3f}"
    axes.text(0.03, 0.97, said, transform=axes.transAxes, va="top", fontsize=SMALL)
    axes.margins(y=0.12)  # room for what is said
    axes.grid(alpha=0.25)
