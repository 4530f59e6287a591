"""The axes on which a figure is drawn, and the choices that every plot takes.

A plot asks `canvas` for its panels. They are those of a new figure, which knows no pyplot, or axes
that the caller made; colour map and range are those of the plot wherever the caller says nothing.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np

from tnsim.errors import ResultError, require
from tnsim.options import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

COLOURS = (
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
"""Colours of phases and of lines, in figures and on the page."""
Colour: TypeAlias = "str | tuple[float, float, float, float]"
"""A colour as matplotlib takes it: a hexadecimal text, or red, green, blue and opacity."""


class Drawing(TypedDict, total=False):
    """Keyword arguments that every plot takes.

    Attributes:
        ax: Axes to draw on, as many as panels; without them the plot makes a new figure.
        figsize: Width and height of the new figure in inches.
        cmap: Colour map, by name or as matplotlib's object. Lines, bars and points take their
            colours from the map in order.
        vmin: Lower end of the range of values: of the colours, or of the axis with the values.
        vmax: Upper end of that range.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from tnsim import figures
        >>> whole = Figure(figsize=(8, 3))
        >>> left, right = whole.subplots(ncols=2)
        >>> chosen: figures.Drawing = {"cmap": "magma", "vmin": 0.0}
        >>> figure = figures.heatmap(np.eye(2), ["0", "100"], ax=left, **chosen)
        >>> figure is whole, left.images[0].get_clim()
        (True, (0.0, 1.0))
    """

    ax: Axes | Sequence[Axes] | np.ndarray | None
    figsize: tuple[float, float] | None
    cmap: str | Colormap | None
    vmin: float | None
    vmax: float | None


@dataclass(frozen=True)
class Canvas:
    """Panels of a figure, with the caller's colours and range.

    Attributes:
        figure: Figure of the panels.
        panels: Axes, row by row.
        is_new: Whether the figure was made for the plot.
        is_sized: Whether the caller chose the size, by `figsize` or by axes.
        cmap: Colour map that the caller chose; None without a choice.
        span: Ends of the range that the caller chose, `vmin` and `vmax`.
    """

    figure: Any
    panels: tuple[Any, ...]
    is_new: bool
    is_sized: bool
    cmap: Colormap | None
    span: Mapping[str, float]

    @property
    def axes(self) -> Any:
        """The first panel, or the only panel."""
        return self.panels[0]


def canvas(
    drawing: Drawing,
    size: tuple[float, float],
    panels: int = 1,
    ncols: int | None = None,
    **options: Any,
) -> Canvas:
    """The panels of a plot: those of the caller, or those of a new figure.

    Args:
        drawing: Keyword arguments that the caller gave to the plot.
        size: Width and height of a new figure in inches, where the caller names none.
        panels: Number of panels.
        ncols: Number of columns of a new figure; None for a single row.
        options: Other options of `new_figure`.

    Returns:
        The panels, row by row. A new figure keeps no axes beyond their number.

    Raises:
        ResultError: A keyword argument is unknown, the number of axes is not that of the panels,
            `figsize` stands beside `ax`, or colour map or range cannot be used.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> len(canvas({}, (6, 4), panels=3, ncols=2).figure.axes)
        3
    """
    given = {name: value for name, value in drawing.items() if value is not None}
    known = tuple(Drawing.__annotations__)
    for name in given:
        if name not in known:
            raise ResultError(
                f"a plot takes {', '.join(known)} beside arguments of its own, found {name!r}"
            )
    figsize: Any = given.get("figsize")
    if "ax" in given:
        axes = _axes_of(given["ax"], panels)
        if figsize is not None:
            raise ResultError(
                "figsize is the size of a new figure, and axes stand in a figure already: leave "
                "out figsize, or leave out ax"
            )
        return Canvas(axes[0].figure, axes, False, True, _map_of(given), _span_of(given))
    if figsize is not None:
        _check_size(figsize)
    ncols = ncols or panels
    figure, grid = new_figure(
        nrows=-(-panels // ncols), ncols=ncols, squeeze=False, figsize=figsize or size, **options
    )
    for unused in grid.flat[panels:]:
        unused.remove()
    kept = tuple(grid.flat[:panels])
    return Canvas(figure, kept, True, figsize is not None, _map_of(given), _span_of(given))


def _check_size(figsize: Any) -> None:
    """Raise `ResultError` where a size is no width and height in inches."""
    try:
        width, height = map(float, figsize)
    except (TypeError, ValueError, OverflowError):
        width = height = math.nan
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise ResultError(f"figsize is a width and a height in inches, found {shown(figsize)}")


def inches_of(chosen: Canvas, along: str, designed: float) -> float:
    """The length of an axis, by which labels are thinned.

    Args:
        chosen: Canvas of the plot.
        along: Axis of the first panel, `"x"` or `"y"`.
        designed: Length in inches in a figure of the plot's own size.

    Returns:
        The length in inches; where the caller chose the size, the length before a layout engine
        moves the axes.

    Example:
        >>> round(inches_of(canvas({"figsize": (8, 4)}, (4, 4)), "x", 3.1), 1)
        6.2
    """
    if not chosen.is_sized:
        return designed
    box = chosen.axes.get_window_extent()
    return float(box.width if along == "x" else box.height) / chosen.figure.dpi


def _axes_of(given: Any, panels: int) -> tuple[Any, ...]:
    """Axes that the caller made, as many as panels."""
    from matplotlib.axes import Axes

    axes = tuple(np.asarray(given, dtype=object).ravel())
    for each in axes:
        if not isinstance(each, Axes):
            raise ResultError(
                f"ax is axes of matplotlib, found {type(each).__name__}: figure, ax = "
                "plt.subplots() makes both"
            )
    if len(axes) != panels:
        raise ResultError(
            f"this picture has {panels} {'panel' if panels == 1 else 'panels'}, found {len(axes)} "
            f"axes: give {panels}, as plt.subplots(ncols={panels})[1] makes them"
        )
    return axes


def _map_of(given: Mapping[str, Any]) -> Colormap | None:
    if "cmap" not in given:
        return None
    from matplotlib import colormaps

    try:
        return colormaps.get_cmap(given["cmap"])
    except (ValueError, TypeError):
        raise ResultError(
            "cmap is the name of a colour map of matplotlib, such as 'viridis', or the map itself, "
            f"found {given['cmap']!r}: list(matplotlib.colormaps) has all names"
        ) from None


def _span_of(given: Mapping[str, Any]) -> Mapping[str, float]:
    span = {name: given[name] for name in ("vmin", "vmax") if name in given}
    for name, value in span.items():
        if not np.isscalar(value) or not np.isreal(value) or not np.isfinite(value):
            raise ResultError(f"{name} is a number, found {value!r}")
    return {name: float(value) for name, value in span.items()}


def _check_range(low: float, high: float) -> None:
    if not low < high:
        raise ResultError(f"vmin is below vmax, found a range from {low:g} to {high:g}: name both")


def colours_of(chosen: Canvas, default: Mapping[str, Any]) -> dict[str, Any]:
    """Colour map and range of a heatmap, the caller's before those of the plot.

    Args:
        chosen: Canvas of the plot.
        default: Colour map and range of the plot, `cmap`, `vmin` and `vmax`.

    Returns:
        Options of `imshow`.

    Raises:
        ResultError: The range is empty.

    Example:
        >>> chosen = canvas({"vmin": 0.5}, (4, 4))
        >>> colours_of(chosen, {"cmap": "viridis", "vmin": 0, "vmax": 1})
        {'cmap': 'viridis', 'vmin': 0.5, 'vmax': 1}
    """
    colours = dict(default)
    if chosen.span and "norm" in colours:
        # A range that the caller names is one of values, whatever scale the data would have.
        norm = colours.pop("norm")
        del colours["label"]
        colours |= {"vmin": norm.vmin, "vmax": norm.vmax}
    colours |= chosen.span
    if chosen.cmap is not None:
        colours["cmap"] = chosen.cmap
    if chosen.span:
        _check_range(colours["vmin"], colours["vmax"])
    return colours


def limit(chosen: Canvas, axes: Any, along: str = "y") -> None:
    """End an axis with values where the caller said, and nowhere else.

    Args:
        chosen: Canvas of the plot.
        axes: Axes with the drawn values.
        along: Axis with the values, `"x"` or `"y"`.

    Raises:
        ResultError: The range is empty.

    Example:
        >>> chosen = canvas({"vmax": 2.0}, (4, 4))
        >>> limit(chosen, chosen.axes)
        >>> float(chosen.axes.get_ylim()[1])
        2.0
    """
    if not chosen.span:
        return
    low, high = getattr(axes, f"get_{along}lim")()
    low, high = chosen.span.get("vmin", low), chosen.span.get("vmax", high)
    _check_range(low, high)
    getattr(axes, f"set_{along}lim")(low, high)


def refuse_span(chosen: Canvas, kind: str) -> None:
    """Refuse `vmin` and `vmax` of a picture that has no range of values.

    Args:
        chosen: Canvas of the plot.
        kind: Name of the picture.

    Raises:
        ResultError: The caller named an end of the range.

    Example:
        >>> refuse_span(canvas({}, (4, 4)), "a network")
    """
    if chosen.span:
        raise ResultError(
            f"{kind} has no range of values that {' and '.join(chosen.span)} could end: "
            "leave the argument out"
        )


def colour_of(number: int, count: int = 1, chosen: Canvas | None = None) -> Colour:
    """The colour of a phase, a line or a bar.

    Args:
        number: Number of the phase or line, from 0.
        count: Number of phases or lines, over which a colour map is spread.
        chosen: Canvas of the plot, with the caller's colour map.

    Returns:
        A colour of the caller's map, from its beginning to its end; without a map a hexadecimal
        RGB colour, of which there are ten.

    Example:
        >>> colour_of(0) == colour_of(10)
        True
        >>> colour_of(1, 2, canvas({"cmap": "gray"}, (4, 4)))
        (1.0, 1.0, 1.0, 1.0)
    """
    if chosen is None or chosen.cmap is None:
        return COLOURS[number % len(COLOURS)]
    red, green, blue, opacity = chosen.cmap(number / max(count - 1, 1))
    return float(red), float(green), float(blue), float(opacity)


def new_figure(**options: Any) -> tuple[Figure, Any]:
    """A figure without pyplot state, so that nothing leaks and no display is needed.

    Notebooks show it as a picture.

    Args:
        options: Options of `Figure`, with the layout `"constrained"` by default, and `nrows`,
            `ncols`, `squeeze` and `width_ratios` of `Figure.subplots`.

    Returns:
        The figure, and the result of `Figure.subplots`: an axes object or an array of such.

    Raises:
        MissingExtra: matplotlib is not installed.

    Example:
        >>> figure, axes = new_figure(ncols=2, figsize=(4, 2))
        >>> axes.shape
        (2,)
    """
    require("matplotlib.figure", "plot", "drawing")
    of_grid = {"nrows", "ncols", "squeeze", "width_ratios"} & options.keys()
    grid = {name: options.pop(name) for name in of_grid}
    options.setdefault("layout", "constrained")
    figure = _notebook_figure()(**options)
    return figure, figure.subplots(**grid)


@cache
def _notebook_figure() -> type[Figure]:
    """A class of figures that a notebook shows although pyplot does not know them.

    Made at the first figure, because this module is imported without matplotlib too.
    """
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            """The figure as PNG, which Jupyter shows."""
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return NotebookFigure
