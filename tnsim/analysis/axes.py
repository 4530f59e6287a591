"""The six drawings of which all figures are made, and labels, legends and colours around them.

`show_matrices`, `show_curves`, `show_points`, `show_bars`, `show_tree`, `show_graph` draw on axes
of a `Canvas`, which has the colours and the range that the caller chose. Colours stand for phases,
or for variables, in the same order everywhere. Legends stand above their axes, where they cover no
curve.

*Canvas.* A plot asks `canvas` for its panels. They are those of a new figure, which knows no
pyplot, or axes that the caller made; colour map and range are those of the plot wherever the caller
says nothing.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
from jaxtyping import Float

from tnsim.analysis.matrices import are_steps
from tnsim.errors import ResultError, printable, require
from tnsim.options import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


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


SMALL = 8
"""Size of labels in points."""
LONGEST = 32
"""Most letters of a label of a model; longer ones would take the picture."""
MAX_NUMBERS = 200
"""Most cells of a matrix into which numbers are written."""
_MANY = 60
"""Number of values from which on the points of a curve are not marked."""
_FEW = 300
"""Largest number of points that are drawn large."""
_LABEL = 0.19
"""Inches along an axis that a label needs."""
_LETTER, _ROW = 0.07, 0.17
"""Width of a letter and height of a row in a legend, in inches."""
_CAPITAL = 0.09
"""Width of a letter in a title, in inches."""
_HANDLE = 0.55
"""Inches that an entry of a legend needs beside its letters."""
_CROWDED = 0.9
"""Least similarity from which on all of a figure count as crowded near 1."""
_SAME = 1e-12
"""Difference from 1 below which two models count as equal."""


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


def label_inches(labels: Sequence[str]) -> float:
    """The length of the longest of some labels, as they are written.

    Example:
        >>> label_inches(["layer 1", "1"]) > 6 * label_inches(["1"])
        True
    """
    return _LETTER * max(map(len, labels), default=0)


def title_inches(title: str) -> float:
    """The width of a figure in which a title has room above axes that are not quite in the middle.

    Example:
        >>> title_inches("a run") < title_inches("a run of training")
        True
    """
    return 1.0 + _CAPITAL * max(map(len, title.splitlines()), default=0)


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


class Panel(NamedTuple):
    """A matrix as it is drawn.

    Attributes:
        values: Matrix; cells that are NaN stay empty.
        rows: Labels of the rows; none are written without them.
        columns: Labels of the columns.
        title: Title above the matrix.
        names: What the rows are, and what the columns are.
        texts: Texts in the cells by row and column, left out where there are too many.

    Example:
        >>> import numpy as np
        >>> Panel(np.eye(2), title="two models").names
        ('', '')
    """

    values: Float[np.ndarray, "A B"]
    rows: Sequence[Any] | np.ndarray = ()
    columns: Sequence[Any] | np.ndarray = ()
    title: str = ""
    names: tuple[str, str] = ("", "")
    texts: Mapping[tuple[int, ...], str] = {}


def show_matrices(
    drawing: Drawing,
    panels: Sequence[Panel],
    scale: Scale,
    *,
    cell: float,
    margin: tuple[float, float] = (2.0, 1.2),
    ncols: int | None = None,
    points: Sequence[int] = (),
    whole: bool = False,
    bar: str = "",
    shrink: float = 1.0,
) -> Canvas:
    """Draw matrices side by side with one range of colours and one colour bar, row 0 at the bottom.

    Args:
        drawing: Axes, size, colour map and range, see `Drawing`.
        panels: Matrices.
        scale: Scale of colours, such as `scale_of` or `around_zero` gives.
        cell: Side of a cell in inches, in a figure of the plot's own size.
        margin: Width and height in inches of what stands around the matrices.
        ncols: Number of columns of panels; None for a single row.
        points: Rows at which phases start, with a line before each.
        whole: Whether labels are written in full, see `thin_ticks`.
        bar: Name of the values, beside the colour bar.
        shrink: Height of the colour bar in heights of the panels.

    Returns:
        The panels that were drawn on.

    Example:
        >>> import numpy as np
        >>> scale = Scale("linear", 0, 1)
        >>> drawn = show_matrices({}, [Panel(np.eye(3))], scale, cell=0.4, points=[2])
        >>> drawn.axes.lines[0].get_ydata()
        [1.5, 1.5]
    """
    ncols = ncols or len(panels)
    heights, widths = zip(*(panel.values.shape for panel in panels), strict=True)
    # A panel of a single column still needs the room of its title.
    ratios = [max(width, 2) for width in widths[:ncols]]
    if whole:  # margins have room for short labels
        beside = label_inches([written(row) for panel in panels for row in panel.rows])
        below = label_inches([written(column) for panel in panels for column in panel.columns])
        # Labels below are slanted by 45 degrees, as far to the left as down.
        slanted = max(0.0, below - cell) / math.sqrt(2)
        wider, higher = max(0.0, beside - 0.8, slanted - 1.2), max(0.0, slanted - 0.4)
        margin = margin[0] + wider, margin[1] + higher
    rows = -(-len(panels) // ncols)
    height = margin[1] + cell * max(heights) * rows
    names = list(map(shortened, panels[0].names))
    width = margin[0] + cell * sum(ratios)
    # The words beside the colour bar need some height, even beside a single row.
    size = (
        max(width, title_inches(panels[0].title), title_inches(names[1])),
        max(height, title_inches(names[0]), 2.4),
    )
    options: dict[str, Any] = {"layout": "compressed", "width_ratios": ratios}
    chosen = canvas(drawing, size, len(panels), ncols, **options)
    options = colours_of(chosen, colours_by(scale))
    # Cells are square, so the shorter side decides.
    shape = panels[0].values.shape
    cell = min(inches_of(chosen, axis, cell * n) / n for axis, n in zip("yx", shape, strict=True))
    image: Any = None
    for axes, panel in zip(chosen.panels, panels, strict=True):
        image = axes.imshow(panel.values, origin="lower", interpolation="nearest", **options)
        for point in points:
            # Lines stand between cells, so half a row before the phase.
            axes.axhline(point - 0.5, color="black", lw=0.9)
            axes.axvline(point - 0.5, color="black", lw=0.9)
        for axis, labels in ((axes.xaxis, panel.columns), (axes.yaxis, panel.rows)):
            thin_ticks(axis, labels, cell * max(len(labels), 1), whole=whole)
        axes.set(xlabel=shortened(panel.names[1]), ylabel=shortened(panel.names[0]))
        axes.set_title(panel.title)
        if len(panel.texts) <= MAX_NUMBERS:
            write_in_cells(image, panel.texts)
    colour_bar(image, list(chosen.panels), label=bar, shrink=shrink)
    return chosen


def write_in_cells(image: AxesImage, texts: Mapping[tuple[int, ...], str]) -> None:
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


class Curve(NamedTuple):
    """A curve as it is drawn.

    Attributes:
        label: Name in the legend.
        values: Values along the curve.
        colour: Colour, see `colour_of`.
        form: Mark and line, as matplotlib's `plot` takes them.
        places: Places along x; without them value n is at n.
        opacity: Opacity of line and marks.

    Example:
        >>> Curve("loss", [2.0, 1.0], "black").form
        '.-'
    """

    label: str
    values: Sequence[float] | np.ndarray
    colour: Colour
    form: str = ".-"
    places: Sequence[float] | np.ndarray | None = None
    opacity: float = 1.0


def show_curves(
    axes: Axes,
    curves: Sequence[Curve],
    inches: float,
    *,
    points: Sequence[int] = (),
    labels: Sequence[Any] | np.ndarray = (),
    names: tuple[str, str] = ("", ""),
    title: str = "",
) -> None:
    """Draw curves, a dotted line before every change point, and the legend above.

    Args:
        axes: Axes to draw on.
        curves: Curves.
        inches: Width of the axes.
        points: Rows at which phases start.
        labels: Labels of the values along x.
        names: What stands along x, and what the values are.
        title: Title above the legend.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> show_curves(axes, [Curve("test accuracy", [0.1, 0.9], "black")], 4.0)
        >>> axes.get_legend().get_texts()[0].get_text()
        'test accuracy'
    """
    for curve in curves:
        count = len(curve.values)
        places = np.arange(count) if curve.places is None else curve.places
        style: dict[str, Any] = {"color": curve.colour, "alpha": curve.opacity, "lw": 1.2}
        if count > _MANY:
            style["markersize"] = 0
        axes.plot(places, curve.values, curve.form, label=curve.label, **style)
    for point in points:
        axes.axvline(point - 0.5, color="0.4", lw=0.9, ls=":")
    if len(labels):
        thin_ticks(axes.xaxis, labels, inches)
    axes.tick_params(labelsize=SMALL)
    if axes.get_yscale() == "linear":
        # What matplotlib takes out of numbers near 1, or of small ones, it writes on the legend.
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.14g}".replace("-", "\N{MINUS SIGN}"))
    axes.set(xlabel=names[0], ylabel=names[1])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    show_legend(axes, inches, title)


def show_points(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    colour: Colour | Sequence[Colour],
    labels: Sequence[Any] | np.ndarray = (),
) -> None:
    """Draw points on a pale grid; those with labels are models, of a run joined in their order.

    Args:
        axes: Axes to draw on.
        x: Places along x.
        y: Places along y.
        colour: Colour of all points, or of each.
        labels: Labels of the points; none without them.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> axes = Figure().subplots()
        >>> show_points(axes, np.array([0.0, 1.0]), np.array([0.0, 1.0]), "black", ["0", "100"])
        >>> [text.get_text() for text in axes.texts]
        ['0', '100']
    """
    if len(labels):
        if are_steps(labels):
            axes.plot(x, y, "-", color="0.75", lw=1.2, zorder=1)
        axes.scatter(x, y, c=colour, s=28, zorder=2)
        label_points(axes, np.stack([x, y], axis=1), labels)
    else:
        size = 16 if len(x) <= _FEW else 4
        axes.scatter(x, y, s=size, alpha=0.4, linewidths=0, c=[colour], rasterized=True)
    axes.grid(alpha=0.25)


def show_bars(
    axes: Axes,
    labels: Sequence[Any],
    values: Float[np.ndarray, " bars"],
    colours: Sequence[Colour],
    errors: Float[np.ndarray, " bars"] | None = None,
) -> None:
    """Draw signed bars, the first at the top, with standard errors across their ends.

    Args:
        axes: Axes to draw on.
        labels: Labels of the bars.
        values: Lengths of the bars.
        colours: Colour of each bar.
        errors: Standard errors; NaN where a bar has none.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> axes = Figure().subplots()
        >>> show_bars(axes, ["layer 0", "layer 1"], np.array([1.2, -0.2]), ["red", "blue"])
        >>> [float(bar.get_width()) for bar in axes.patches]
        [1.2, -0.2]
    """
    axes.barh(range(len(labels)), values, color=colours, xerr=errors, error_kw={"lw": 0.8})
    axes.set_yticks(range(len(labels)), list(map(written, labels)), fontsize=SMALL)
    axes.invert_yaxis()
    axes.axvline(0.0, color="0.3", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def show_tree(axes: Axes, linkage: Float[np.ndarray, "merges 4"]) -> np.ndarray:
    """Draw the brackets of a hierarchy with leaves at 0, 1, 2, ...

    Args:
        axes: Axes to draw on.
        linkage: Merges, as SciPy has them.

    Returns:
        The rows of the leaves, from left to right.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> show_tree(Figure().subplots(), np.array([[0.0, 1.0, 0.5, 2.0]])).tolist()
        [0, 1]
    """
    from matplotlib.collections import LineCollection
    from scipy.cluster.hierarchy import dendrogram

    tree = dendrogram(linkage, no_plot=True)
    # SciPy puts leaves at 5, 15, 25, ...; here they are at 0, 1, 2, ...
    brackets = np.stack([np.array(tree["icoord"]) / 10 - 0.5, tree["dcoord"]], axis=-1)
    axes.add_collection(LineCollection(list(brackets), colors="0.35", linewidths=1.1))
    leaves = np.array(tree["leaves"])
    axes.set_xlim(-0.7, len(leaves) - 0.3)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    return leaves


class Wire(NamedTuple):
    """A line between two nodes of a graph.

    Attributes:
        source: Name of the lower node.
        target: Name of the upper node.
        kind: Kind of the line, which has a colour and a place beside lines of other kinds.

    Example:
        >>> Wire("embed", "layer 1", "Q").kind
        'Q'
    """

    source: str
    target: str
    kind: str


def show_graph(
    axes: Axes,
    rows: Sequence[Sequence[str]],
    wires: Sequence[Wire],
    widths: Float[np.ndarray, " wires"],
    colours: Mapping[str, Colour],
) -> None:
    """Draw named nodes in rows, the first at the bottom, and lines between them.

    Args:
        axes: Axes to draw on.
        rows: Names of the nodes, row by row.
        wires: Lines, those on top last.
        widths: Width of each line in points.
        colours: Colour of each kind of line.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> axes, wires = Figure().subplots(), [Wire("embed", "layer 1", "Q")]
        >>> show_graph(axes, [["embed"], ["layer 1"]], wires, np.array([2.0]), {"Q": "black"})
        >>> [line.get_label() for line in axes.lines]
        ['Q']
    """
    place = {
        name: (n - (len(row) - 1) / 2, height)
        for height, row in enumerate(rows)
        for n, name in enumerate(row)
    }
    kinds = list(colours)
    drawn: set[str] = set()
    for wire, width in zip(wires, widths, strict=True):
        # Lines of several kinds lie apart.
        side = 0.09 * (kinds.index(wire.kind) - (len(kinds) - 1) / 2)
        (x, y), (u, v) = place[wire.source], place[wire.target]
        label = None if wire.kind in drawn else wire.kind
        style: dict[str, Any] = {"color": colours[wire.kind], "lw": width, "label": label}
        # A line past other rows bends around their nodes, behind which it would be hidden.
        along = np.linspace(0, 1, 25)
        bend = min(0.3 * (v - y - 1), 0.8) * np.sin(np.pi * along)
        axes.plot(
            x + (u - x) * along + side + bend,
            y + (v - y) * along,
            alpha=0.75,
            solid_capstyle="round",
            zorder=1,
            **style,
        )
        drawn.add(wire.kind)
    box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.4"}
    for name, (x, y) in place.items():
        axes.text(x, y, written(name), ha="center", va="center", fontsize=SMALL, bbox=box)
    # Limits by the rows, so that lines of several kinds beside one another do not stretch a chain.
    reach = max(*map(len, rows), 2) / 2
    axes.set(xlim=(-reach, reach), ylim=(-0.4, len(rows) - 0.6))
    axes.set_axis_off()


def label_points(
    axes: Axes, points: Float[np.ndarray, "K 2"], labels: Sequence[Any] | np.ndarray
) -> None:
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
    # The ends of a run tell its direction, so their labels may not be crowded out.
    order = list(range(len(points)))
    for n in order[:1] + order[1:][-1:] + order[1:-1]:
        if any(np.linalg.norm(points[n] - other) < reach for other in placed):
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


class Scale(NamedTuple):
    """A scale of colours, by which figures and the page draw matrices.

    Attributes:
        name: What equal steps of colour stand for: `"linear"`, equal steps of the values;
            `"angle"`, of `arccos s`; or `"log"`, of the logarithm of `1 - s`.
        low: Lower end of the range of values.
        high: Upper end of the range.
        least: Least difference from 1 that a scale by logarithm tells from none.
        diverging: Whether the colours have a middle.

    Example:
        >>> Scale("angle", 0.99, 1.0).least
        0.0
    """

    name: str
    low: float
    high: float
    least: float = 0.0
    diverging: bool = False


def scale_of(values: Float[np.ndarray, "*panel A B"]) -> Scale:
    """The scale of colours for all panels of a figure.

    Similarities have a diverging scale over [-1, 1] where some are clearly negative, else one from
    0, or the least similarity if that is lower, to 1. Other quantities have their own range.

    Where all similarities crowd near 1, such a scale hides what differs. Equal steps of the angle
    `arccos s` are equal changes of the function, where `s` itself changes by their squares. Where
    differences of models spread over more than two powers of ten, the angle hides the small ones
    too, and the logarithm of `1 - s` shows them.

    Args:
        values: Values of all panels; what is not finite is passed over.

    Returns:
        The scale; near 1 it is chosen by the least, the median and the largest difference from 1.

    Example:
        >>> import numpy as np
        >>> scale_of(np.array([1.0, 0.995, 0.99])).name
        'angle'
        >>> scale_of(np.array([1.0, 0.999999, 0.9999995, 0.99])).name
        'log'
        >>> scale_of(np.array([1.0, 0.2]))
        Scale(name='linear', low=0, high=1, least=0.0, diverging=False)
    """
    values = values[np.isfinite(values)]
    if not values.size:
        return Scale("linear", 0, 1)
    low, high = float(values.min()), float(values.max())
    # Values beyond [-1, 1] are no similarities; rounding is.
    if high > 1 + 1e-6 or low < -1 - 1e-6:
        return Scale("linear", low, high)
    differences = 1 - values[1 - values > _SAME]
    if low >= _CROWDED and differences.size:
        spread = 1 - low > 100 * float(np.median(differences))
        return Scale("log" if spread else "angle", low, 1.0, float(differences.min()))
    # Noise slightly below zero needs no second colour.
    if low < -0.1:
        return Scale("linear", -1, 1, diverging=True)
    return Scale("linear", min(low, 0), 1)


def colours_by(scale: Scale) -> dict[str, Any]:
    """Options of `imshow` for a scale; near 1 the label of the image says which it is.

    Args:
        scale: Scale of colours.

    Example:
        >>> colours_by(Scale("linear", -2, 2, diverging=True))
        {'cmap': 'RdBu_r', 'vmin': -2, 'vmax': 2}
    """
    from matplotlib.colors import FuncNorm

    if scale.name == "linear":
        cmap = "RdBu_r" if scale.diverging else "viridis"
        return {"cmap": cmap, "vmin": scale.low, "vmax": scale.high}
    if scale.name == "angle":
        said = "colours by angle, arccos s"
        norm = FuncNorm((lambda s: -np.arccos(np.clip(s, -1, 1)), np.cos), scale.low, scale.high)
    else:
        said = "colours by log of 1 - s"
        # The top of the scale is the least difference; equal models have the colour of the top.
        norm = FuncNorm(
            (lambda s: -np.log10(np.maximum(1 - s, scale.least)), lambda y: 1 - 10.0**-y),
            scale.low,
            scale.high - scale.least,
        )
    return {"cmap": "viridis", "norm": norm, "label": said}


def colour_bar(image: AxesImage, axes: Any, label: str = "", **options: Any) -> None:
    """Draw a colour bar that says its scale, where this is not that of the values.

    Args:
        image: Heatmap, as `imshow` returns it.
        axes: Axes from which the bar takes its room, one or several.
        label: Name of the values.
        options: Other options of matplotlib's `Figure.colorbar`.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> values = np.array([[1.0, 0.99], [0.99, 1.0]])
        >>> axes = Figure().subplots()
        >>> image = axes.imshow(values, **colours_by(scale_of(values)))
        >>> colour_bar(image, axes, "similarity")
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


def around_zero(largest: float) -> Scale:
    """The scale of values around zero: red above it and blue below, white at zero.

    Args:
        largest: Largest size of a value.

    Example:
        >>> around_zero(2.0).low
        -2.0
    """
    # A range of width zero has no colours.
    largest = largest or 1.0
    return Scale("linear", -largest, largest, diverging=True)


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
        # Matplotlib fills columns as evenly as it can: six labels in five are 2, 1, 1, 1 and 1.
        letters = sum(max(map(len, column)) for column in np.array_split(labels, columns))
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


def thin_ticks(
    axis: XAxis | YAxis, labels: Sequence[Any] | np.ndarray, inches: float, *, whole: bool = False
) -> None:
    """Write as many evenly thinned labels along an axis as fit, long ones along x upright.

    Args:
        axis: Axis on which label n belongs at n.
        labels: Labels of the models.
        inches: Length of the axis.
        whole: Whether labels are written in full, and long ones slanted along x: those of parts,
            whose middle says as much as their ends.

    Example:
        >>> from matplotlib.figure import Figure
        >>> import numpy as np
        >>> axes = Figure().subplots()
        >>> thin_ticks(axes.xaxis, np.arange(100), inches=2.0)
        >>> axes.get_xticks().tolist()
        [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    """
    if not len(labels):
        axis.set_ticks([])
        return
    every = max(1, int(np.ceil(len(labels) * _LABEL / inches)))
    places = range(0, len(labels), every)
    write = written if whole else shortened
    shown = [write(labels[place]) for place in places]
    style: dict[str, Any] = {"fontsize": SMALL}
    needed = label_inches(shown) + _LETTER
    if axis.axis_name == "x" and needed > inches / len(labels) * every:
        style |= {"rotation": 45 if whole else 90}
        if whole:
            style |= {"ha": "right", "rotation_mode": "anchor"}
    axis.set_ticks(places, shown, **style)
