"""Drawings on matplotlib axes from which figures are made: matrices, curves, labels.

Colours stand for phases, or for variables, in the same order everywhere. Legends stand above their
axes, where they cover no curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.analysis.canvas import Canvas, colour_of
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
_LETTER, _ROW = 0.07, 0.17
"""Width of a letter and height of a row in a legend, in inches."""
_HANDLE = 0.55
"""Inches that an entry of a legend needs beside its letters."""
CROWDED = 0.9
"""Least similarity from which on all of a figure count as crowded near 1."""
_SAME = 1e-12
"""Difference from 1 below which two models count as equal."""


class Near(NamedTuple):
    """A scale of colours for similarities that crowd near 1.

    Attributes:
        name: `"angle"` or `"log"`.
        low: Least similarity.
        least: Least difference from 1 that the scale tells from none.

    Example:
        >>> Near("angle", 0.99, 1e-4).name
        'angle'
    """

    name: str
    low: float
    least: float


def near_one(values: Float[np.ndarray, "*panel A B"]) -> Near | None:
    """The scale of similarities that crowd near 1; None where a scale by the values shows them.

    Equal steps of the angle `arccos s` are equal changes of the function, where `s` itself changes
    by their squares. Where differences of models spread over more than two powers of ten, the angle
    hides the small ones too, and the logarithm of `1 - s` shows them.

    Args:
        values: Values of all panels; what is not finite is passed over.

    Returns:
        The scale, chosen by the least, the median and the largest difference from 1.

    Example:
        >>> import numpy as np
        >>> near_one(np.array([1.0, 0.995, 0.99])).name
        'angle'
        >>> near_one(np.array([1.0, 0.999999, 0.9999995, 0.99])).name
        'log'
        >>> near_one(np.array([1.0, 0.2])) is None
        True
    """
    differences = 1 - values[np.isfinite(values)]
    # Values above 1 are no similarities; rounding is.
    if not differences.size or differences.min() < -1e-6 or differences.max() > 1 - CROWDED:
        return None
    differences = differences[differences > _SAME]
    if not differences.size:
        return None
    most = float(differences.max())
    name = "log" if most > 100 * float(np.median(differences)) else "angle"
    return Near(name, 1 - most, float(differences.min()))


def _norm_of(near: Near) -> dict[str, Any]:
    """Options of `imshow` for a scale near 1; the label of the image says which it is."""
    from matplotlib.colors import FuncNorm

    if near.name == "angle":
        said = "colours by angle, arccos s"
        norm = FuncNorm((lambda s: -np.arccos(np.clip(s, -1, 1)), np.cos), near.low, 1.0)
    else:
        said = "colours by log of 1 - s"
        # The top of the scale is the least difference; equal models have the colour of the top.
        norm = FuncNorm(
            (lambda s: -np.log10(np.maximum(1 - s, near.least)), lambda y: 1 - 10.0**-y),
            near.low,
            1 - near.least,
        )
    return {"cmap": "viridis", "norm": norm, "label": said}


def colour_bar(image: AxesImage, axes: Any, label: str = "", **options: Any) -> None:
    """Draw a colour bar that says its scale, where this is not that of the values.

    Args:
        image: Heatmap, as `show_matrix` returns it.
        axes: Axes from which the bar takes its room, one or several.
        label: Name of the values.
        options: Other options of matplotlib's `Figure.colorbar`.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> values = np.array([[1.0, 0.99], [0.99, 1.0]])
        >>> axes = Figure().subplots()
        >>> colour_bar(show_matrix(axes, values, colour_range(values), ()), axes, "similarity")
        >>> axes.figure.axes[1].get_ylabel()
        'similarity (colours by angle, arccos s)'
    """
    figure: Any = image.figure
    said = str(image.get_label())
    if said.startswith("_"):  # matplotlib's own label of an image
        figure.colorbar(image, ax=axes, label=label, **options)
        return
    norm: Any = image.norm  # the norm of a scale has an inverse
    places = norm.inverse(np.linspace(0, 1, 6))
    label = f"{label} ({said})" if label else said
    bar = figure.colorbar(image, ax=axes, label=label, ticks=places, **options)
    bar.ax.set_yticks(places, [_similarity_text(float(place)) for place in places], minor=False)
    bar.ax.minorticks_off()


def _similarity_text(similarity: float) -> str:
    """A similarity near 1 with two digits of its difference from 1."""
    difference = 1 - similarity
    if difference <= _SAME:
        return "1"
    digits = 1 - math.floor(math.log10(difference))
    return f"{similarity:.{digits}f}" if digits <= 7 else f"1 - {difference:.1e}"


def colour_range(values: Float[np.ndarray, "*panel A B"]) -> dict[str, Any]:
    """The colour map and the range for all panels of a figure.

    Args:
        values: Values of all panels, finite.

    Returns:
        Options of `imshow`. Similarities have a diverging map over [-1, 1] where some are clearly
        negative, a scale by angle or logarithm where all crowd near 1 (`near_one`), else a map from
        0 (or the least similarity, if lower) to 1. Other quantities have their own range.

    Example:
        >>> import numpy as np
        >>> colour_range(np.array([[1.0, 0.5], [0.5, 1.0]]))
        {'cmap': 'viridis', 'vmin': 0, 'vmax': 1}
    """
    near = near_one(values)
    if near is not None:
        return _norm_of(near)
    low, high = values.min(), values.max()
    # Values beyond [-1, 1] are no similarities; rounding is.
    if high > 1 + 1e-6 or low < -1 - 1e-6:
        return {"cmap": "viridis", "vmin": low, "vmax": high}
    # Noise slightly below zero needs no second colour.
    if low < -0.1:
        return {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}
    return {"cmap": "viridis", "vmin": min(low, 0), "vmax": 1}


def diverging(largest: float) -> dict[str, Any]:
    """The colour map and the range of values around zero.

    Args:
        largest: Largest size of a value.

    Returns:
        Options of `imshow`: red above zero and blue below, white at zero.

    Example:
        >>> diverging(2.0)
        {'cmap': 'RdBu_r', 'vmin': -2.0, 'vmax': 2.0}
    """
    # A range of width zero has no colours.
    largest = largest or 1.0
    return {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}


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
        # Lines stand between cells, so half a row before the phase.
        axes.axhline(point - 0.5, color="black", lw=0.9)
        axes.axvline(point - 0.5, color="black", lw=0.9)
    return image


def write_in_cells(image: AxesImage, texts: Mapping[tuple[int, int], str]) -> None:
    """Write into the cells of a heatmap, in white where a cell is dark.

    Args:
        image: Heatmap, as `imshow` returns it.
        texts: Texts by row and column.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> image = Figure().subplots().imshow(np.array([[0.0, 1.0]]), cmap="gray")
        >>> write_in_cells(image, {(0, 0): "dark", (0, 1): "bright"})
        >>> [text.get_color() for text in image.axes.texts]
        ['white', 'black']
    """
    red, green, blue, _ = np.moveaxis(image.to_rgba(np.ma.asarray(image.get_array())), -1, 0)
    light = 0.299 * red + 0.587 * green + 0.114 * blue  # as an eye weighs the three, ITU-R BT.601
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL}
    for (row, column), text in texts.items():
        colour = "white" if light[row, column] < 0.5 else "black"
        image.axes.text(column, row, text, color=colour, **style)


def show_curves(
    axes: Axes,
    curves: Sequence[xr.DataArray],
    points: Sequence[int],
    inches: float,
    chosen: Canvas | None = None,
) -> None:
    """Draw curves over the rows of a matrix, and a dotted line before every change point.

    Args:
        axes: Axes to draw on; row n belongs at n.
        curves: Named curves with a value for each row.
        points: Rows at which phases start.
        inches: Width of the axes.
        chosen: Canvas of the plot, with the caller's colour map.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import xarray as xr
        >>> axes = Figure().subplots()
        >>> show_curves(axes, [xr.DataArray([0.1, 0.9], dims="a", name="test_accuracy")], [], 4.0)
        >>> axes.get_legend().get_texts()[0].get_text()
        'test accuracy'
    """
    for n, curve in enumerate(curves):
        style = {"color": colour_of(n, len(curves), chosen), "label": title_of(str(curve.name))}
        axes.plot(np.arange(curve.size), curve.values, ".-", lw=1.2, **style)
    mark_phases(axes, points)
    axes.tick_params(labelsize=SMALL)
    finish_curves(axes)
    show_legend(axes, inches)


def mark_phases(axes: Axes, points: Sequence[int]) -> None:
    """Draw a dotted line before every row at which a phase starts.

    Args:
        axes: Axes of curves; row n is at n.
        points: Rows at which phases start.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> mark_phases(axes, [3])
        >>> axes.lines[0].get_xdata()
        [2.5, 2.5]
    """
    for point in points:
        axes.axvline(point - 0.5, color="0.4", lw=0.9, ls=":")


def finish_curves(axes: Axes) -> None:
    """Put a pale grid behind curves, and leave out the frame above and on the right.

    Args:
        axes: Axes with curves.

    Example:
        >>> from matplotlib.figure import Figure
        >>> finish_curves(Figure().subplots())
    """
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def show_legend(axes: Axes, inches: float, title: str = "") -> None:
    """Put the legend above the axes, where it covers no curve, and the title above the legend.

    Args:
        axes: Axes with labelled curves.
        inches: Width of the axes.
        title: Title of the axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> _ = axes.plot([0, 1], label="accuracy")
        >>> show_legend(axes, 4.0, "a run")
        >>> axes.get_legend().get_texts()[0].get_text(), axes.get_title()
        ('accuracy', 'a run')
    """
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            borderaxespad=0.0,
            frameon=False,
            fontsize=SMALL,
            ncols=_legend_columns(labels, inches),
        )
    # The title stands above the legend; 72 points are an inch.
    axes.set_title(heading(title), pad=6 + 72 * legend_height(labels, inches))


def legend_height(labels: Sequence[str], inches: float) -> float:
    """The height of a legend that stands above axes.

    Args:
        labels: Labels of all entries.
        inches: Width of the axes.

    Returns:
        The height in inches; 0 without labels.

    Example:
        >>> legend_height([], 4.0), round(legend_height(["loss"], 4.0), 2)
        (0.0, 0.23)
    """
    if not labels:
        return 0.0
    return _ROW * -(-len(labels) // _legend_columns(labels, inches)) + 0.06


def _legend_columns(labels: Sequence[str], inches: float) -> int:
    """Columns of a legend, as many as fit side by side; a legend is filled column by column."""
    # From the widest legend down: fewer rows leave more height to the curves.
    for columns in range(len(labels), 1, -1):
        rows = -(-len(labels) // columns)
        letters = sum(
            max(map(len, labels[start : start + rows])) for start in range(0, len(labels), rows)
        )
        if _HANDLE * columns + _LETTER * letters <= inches:
            return columns
    return 1


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


LONGEST = 32
"""Most letters of a label of a model; longer ones would take the picture."""


def shortened(label: Any) -> str:
    """The label of a model, at most `LONGEST` letters of it, as matplotlib writes it.

    Names of checkpoints differ at their ends more than elsewhere, so the end keeps more letters.

    Args:
        label: Label of a model.

    Returns:
        The text with escapes, the middle of long ones left out.

    Example:
        >>> shortened("/home/somebody/runs/first/step_100/model.safetensors")
        '/home/somebo…0/model.safetensors'
    """
    text = str(label)
    if len(text) > LONGEST:
        text = f"{text[:12]}…{text[13 - LONGEST :]}"
    return written(text)


def heading(title: str) -> str:
    """A title that the caller wrote, formulas and lines included, as fonts can write it.

    Args:
        title: Title, which may hold the name of a file.

    Returns:
        The title with the bytes that are no text escaped.

    Example:
        >>> print(heading("step \\udcff of $x^2$"))
        step \\udcff of $x^2$
    """
    return title.encode("utf-8", "backslashreplace").decode()


def thin_ticks(axis: XAxis | YAxis, labels: np.ndarray, inches: float) -> None:
    """Write as many evenly thinned labels along an axis as fit; along x they are turned upright.

    Args:
        axis: Axis on which label n belongs at n.
        labels: Labels of the models.
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
    axis.set_ticks(places, list(map(shortened, labels[places])), **style)


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
        # A point in the middle has no direction, and no division by zero.
        outward = points[n] / (np.linalg.norm(points[n]) or 1.0)
        side = "right"
        if outward[0] > 0:
            side = "left"
        axes.annotate(
            shortened(labels[n]),
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
    # The ends of a run tell its direction, so their labels may not be crowded out.
    return order[:1] + order[1:][-1:] + order[1:-1]


def _is_near(point: np.ndarray, others: Sequence[np.ndarray], reach: float) -> bool:
    """Whether a point lies within `reach` of any of the others."""
    return any(np.linalg.norm(point - other) < reach for other in others)
