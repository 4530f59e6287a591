"""Drawings on matplotlib axes from which figures are made: matrices, curves, labels.

Colours stand for phases, or for variables, in one order everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import printable

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.image import AxesImage

SMALL = 8
"""Size of labels in points."""
_LABEL = 0.19
"""Inches along an axis that a label needs."""
_COLOURS = (
    "#1f77b4",
    "#e67e22",
    "#2ca02c",
    "#9467bd",
    "#d62728",
    "#17becf",
    "#8c564b",
    "#7f7f7f",
    "#bcbd22",
    "#e377c2",
)


def colour_of(number: int) -> str:
    """The colour of a phase or of a line; colours repeat after ten.

    Args:
        number: Number of the phase or line, from 0.

    Returns:
        A hexadecimal RGB colour.

    Example:
        >>> colour_of(0) == colour_of(10)
        True
    """
    return _COLOURS[number % len(_COLOURS)]


def colour_range(values: Float[np.ndarray, "*panel A B"]) -> dict[str, Any]:
    """The colour map and the range for all panels of a figure.

    Args:
        values: Values of all panels, finite.

    Returns:
        Options of `imshow`. Similarities have a diverging map over [-1, 1] where some are clearly
        negative, else a map from 0 (or the least similarity, if lower) to 1. Other quantities have
        their own range.

    Example:
        >>> import numpy as np
        >>> colour_range(np.array([[1.0, 0.5], [0.5, 1.0]]))
        {'cmap': 'viridis', 'vmin': 0, 'vmax': 1}
    """
    low, high = values.min(), values.max()
    if high > 1 + 1e-6 or low < -1 - 1e-6:
        return {"cmap": "viridis", "vmin": low, "vmax": high}
    if low < -0.1:
        return {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}
    return {"cmap": "viridis", "vmin": min(low, 0), "vmax": 1}


def show_matrix(
    axes: Axes, values: Float[np.ndarray, "A B"], colours: dict[str, Any], points: Sequence[int]
) -> AxesImage:
    """Draw a heatmap with row 0 at the bottom, and a line before every change point.

    Args:
        axes: Axes to draw on.
        values: Matrix (A, B).
        colours: Options of `imshow`, from `colour_range`.
        points: Rows at which phases start.

    Returns:
        The image, for a colour bar.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> image = show_matrix(Figure().subplots(), np.eye(3), colour_range(np.eye(3)), [2])
        >>> image.axes.lines[0].get_ydata()
        [1.5, 1.5]
    """
    image = axes.imshow(values, origin="lower", interpolation="nearest", **colours)
    for point in points:
        axes.axhline(point - 0.5, color="black", lw=0.9)
        axes.axvline(point - 0.5, color="black", lw=0.9)
    return image


def show_curves(axes: Axes, curves: Sequence[xr.DataArray], points: Sequence[int]) -> None:
    """Draw curves over the rows of a matrix, and a dotted line before every change point.

    Args:
        axes: Axes to draw on; row n belongs at n.
        curves: Named curves with one value per row each.
        points: Rows at which phases start.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import xarray as xr
        >>> axes = Figure().subplots()
        >>> show_curves(axes, [xr.DataArray([0.1, 0.9], dims="a", name="test_accuracy")], [])
        >>> axes.get_legend().get_texts()[0].get_text()
        'test accuracy'
    """
    for n, curve in enumerate(curves):
        rows = np.arange(curve.size)
        label = title_of(str(curve.name))
        axes.plot(rows, curve.values, ".-", color=colour_of(n), lw=1.2, label=label)
    for point in points:
        axes.axvline(point - 0.5, color="0.4", lw=0.9, ls=":")
    axes.tick_params(labelsize=SMALL)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    columns = -(-len(curves) // 3)
    axes.legend(fontsize=SMALL, edgecolor="none", ncols=columns)


def title_of(name: str) -> str:
    """The name of a variable as it is written in a figure.

    Args:
        name: Name of a variable.

    Returns:
        The name with spaces.

    Example:
        >>> title_of("weight_cosine")
        'weight cosine'
    """
    return written(name.replace("_", " "))


def written(label: Any) -> str:
    """A label with escapes, so that matplotlib writes it letter by letter.

    Matplotlib takes text between two dollar signs for a formula, and fonts have no letter for the
    bytes of a file name that are no text.

    Args:
        label: Label of a model or of a variable.

    Returns:
        The text with both escaped.

    Example:
        >>> print(written("a$1$"))
        a\\$1\\$
    """
    return printable(str(label)).replace("$", r"\$")


def thin_ticks(axis: XAxis | YAxis, labels: np.ndarray, inches: float) -> None:
    """Write as many evenly thinned labels along an axis as fit; along x they are turned upright.

    Args:
        axis: Axis on which label n belongs at n.
        labels: Labels, one per model.
        inches: Length of the axis.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> axes = Figure().subplots()
        >>> thin_ticks(axes.xaxis, np.arange(100), inches=2.0)
        >>> axes.get_xticks().tolist()
        [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    """
    every = max(1, int(np.ceil(len(labels) * _LABEL / inches)))
    places = np.arange(0, len(labels), every)
    style: dict[str, Any] = {"fontsize": SMALL}
    if axis.axis_name == "x":
        style["rotation"] = 90
    axis.set_ticks(places, list(map(written, labels[places])), **style)


def label_points(axes: Axes, points: Float[np.ndarray, "K 2"], labels: np.ndarray) -> None:
    """Write labels next to their points, away from the middle, where there is room.

    The first and the last point come first; a label is left out where its point is too near to a
    labelled point.

    Args:
        axes: Axes on which the points are drawn.
        points: Points (K, 2), centred.
        labels: K labels.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> axes = Figure().subplots()
        >>> label_points(axes, np.array([[-1.0, 0.0], [0.99, 0.0], [1.0, 0.0]]), np.arange(3))
        >>> [text.get_text() for text in axes.texts]
        ['0', '2']
    """
    from matplotlib.patheffects import withStroke

    placed: list[np.ndarray] = []
    # No label closer than this part of the larger extent to another.
    reach = 0.075 * max(np.ptp(points, axis=0).max(), 1e-12)
    for n in _ends_first(len(points)):
        if _is_near(points[n], placed, reach):
            continue
        placed.append(points[n])
        outward = points[n] / (np.linalg.norm(points[n]) or 1.0)
        side = "right"
        if outward[0] > 0:
            side = "left"
        axes.annotate(
            written(labels[n]),
            points[n],
            xytext=9 * outward,
            textcoords="offset points",
            fontsize=SMALL,
            ha=side,
            va="center",
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )


def _ends_first(count: int) -> list[int]:
    """Indices below `count`: the first, the last, then all between."""
    order = list(range(count))
    return order[:1] + order[1:][-1:] + order[1:-1]


def _is_near(point: np.ndarray, others: Sequence[np.ndarray], reach: float) -> bool:
    """Whether a point lies within `reach` of any of the others."""
    return any(np.linalg.norm(point - other) < reach for other in others)
