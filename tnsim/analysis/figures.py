"""Pictures of a pairwise run. In: a result, names of its matrices, change points. Out: figures.

Models are spaced evenly by index, whatever their training steps, and labelled by step as far as
labels fit. Panels of one figure share one colour range. What is drawn comes from `reading`; no
pyplot state and no global setting is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tnsim.analysis import reading
from tnsim.analysis.axes import (
    SMALL,
    colour_of,
    colour_range,
    label_points,
    show_matrix,
    thin_ticks,
    title_of,
    written,
)
from tnsim.analysis.curves import (
    STRIP,
    check_variables,
    curves_over_training,
    draw_above,
    strips_of,
)
from tnsim.analysis.matrices import matrix, square
from tnsim.analysis.plots import new_figure
from tnsim.analysis.scatter import scatter_grid
from tnsim.errors import ResultError

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MAX_SLICES", "curves_over_training", "pairwise", "scatter_grid"]

MAX_SLICES = 144
_PANEL = 4.4  # inches


def pairwise(
    result: xr.Dataset,
    kind: str = "heatmap",
    variable: str | Sequence[str] = "similarity",
    change_points: Sequence[int] | None = None,
    curves: Sequence[str | Sequence[str]] = (),
) -> Figure:
    """One of six pictures of a pairwise result.

    Several variables give several panels, or several lines.

    Args:
        result: A pairwise result.
        kind: `"heatmap"`; `"trajectory"`, the similarity of every model to the last and to the one
            before; `"slices"`, one heatmap per output (`variable` is then not read); `"mds"`, the
            models as points of a plane, joined in order; `"dendrogram"`; or `"scatter"`, the first
            variable against each of the others, a point for every pair of models.
        variable: One of the result's matrices, or several.
        change_points: Rows at which phases start, as `reading.segment(result, 3).change_points`,
            drawn as lines or colours.
        curves: Variables with a value for every column, such as accuracies over `a`, drawn above
            heatmaps: each entry is a strip, of one curve or of several.

    Returns:
        A figure; nothing is shown.

    Raises:
        ResultError: The kind or a variable is unknown, there are too many slices for one figure,
            curves do not fit, or `reading` refuses the matrix or the change points.
        MissingExtra: matplotlib or scipy is not installed.

    Example:
        >>> import numpy as np, xarray as xr
        >>> values = np.array([[1.0, 0.5], [0.5, 1.0]])
        >>> run = xr.Dataset({"similarity": (("a", "b"), values)}, {"a": [0, 100], "b": [0, 100]})
        >>> figure = pairwise(run, "heatmap", change_points=[1])
        >>> figure.axes[0].get_title()
        'similarity'
    """
    if kind not in _KINDS:
        raise ResultError(f"a pairwise result is drawn as {', '.join(_KINDS)}, not as {kind!r}")
    if kind == "slices":
        names = ("slices",)
    elif isinstance(variable, str):
        names = (variable,)
    else:
        names = tuple(variable)
    check_variables(result, names)
    points: tuple[int, ...] = ()
    if change_points is not None:
        points = tuple(change_points)
    if points:
        reading.phase_of_rows(points, len(square(result)))
    if not curves:
        return _KINDS[kind](result, names, points)
    if kind != "heatmap":
        raise ResultError(f"curves are drawn above a heatmap, not above {kind!r}")
    return _heatmaps(result, names, points, strips_of(result, curves))


def _heatmaps(
    result: xr.Dataset,
    names: Sequence[str],
    points: Sequence[int],
    strips: Sequence[Sequence[xr.DataArray]] = (),
) -> Figure:
    panels = [matrix(result[name]) for name in names]
    figure, grid = new_figure(
        ncols=len(panels),
        squeeze=False,
        layout="compressed",
        figsize=(
            _PANEL * len(panels) + 1.2,
            _PANEL * (1 + STRIP * len(strips)) + 0.4,
        ),
    )
    colours = colour_range(np.stack([panel.values for panel in panels]))
    image: Any = None
    for axes, panel, name in zip(grid[0], panels, names, strict=True):
        image = show_matrix(axes, panel.values, colours, points)
        thin_ticks(axes.xaxis, panel["b"].values, _PANEL)
        thin_ticks(axes.yaxis, panel["a"].values, _PANEL)
        top = draw_above(axes, strips, points)
        top.set_title(title_of(name))
    label = None  # several panels carry their names as titles
    if len(names) == 1:
        label = title_of(names[0])
    figure.colorbar(image, ax=list(grid[0]), shrink=0.85, label=label)
    return figure


def _slices(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    slices = result["slices"].transpose("output", "a", "b")
    count = len(slices)
    if not 1 <= count <= MAX_SLICES:
        raise ResultError(
            f"{count} slices are not 1 to {MAX_SLICES}, as one figure shows; "
            "choose some, as in result.sel(output=[0, 1])"
        )
    panels = list(map(matrix, slices))
    # a page is half as wide again as it is high
    columns = int(np.ceil(np.sqrt(1.5 * count)))
    rows = -(-count // columns)
    inches = max(0.9, min(2.4, 12 / columns))
    figure, grid = new_figure(
        nrows=rows,
        ncols=columns,
        squeeze=False,
        layout="compressed",
        figsize=(inches * columns + 1, (inches + 0.2) * rows),
    )
    colours = colour_range(slices.values)
    image: Any = None
    used, unused = grid.flat[:count], grid.flat[count:]
    for axes in unused:
        axes.remove()
    for axes, panel, output in zip(used, panels, slices["output"].values, strict=True):
        image = show_matrix(axes, panel.values, colours, points)
        title = written(output)
        if inches > 1.2:
            title = f"output {written(output)}"
        axes.set_title(title, fontsize=SMALL, pad=2)
        axes.set(xticks=(), yticks=())
    figure.colorbar(image, ax=list(used), shrink=0.6, label="similarity of the output")
    return figure


def _trajectories(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    figure, axes = new_figure(figsize=(1.7 * _PANEL, _PANEL))
    labels = result["a"].values
    rows = np.arange(len(labels))
    marker_size = 3.5
    if len(rows) > 60:
        marker_size = 0
    for n, name in enumerate(names):
        style = {"color": colour_of(n), "markersize": marker_size}
        final = reading.trajectory(result[name])
        previous = reading.trajectory(result[name], "previous")
        title = title_of(name)
        axes.plot(rows, final, "o-", label=f"{title} to the last", **style)
        before = f"{title} to the one before"
        axes.plot(rows[1:], previous, "s--", alpha=0.55, label=before, **style)
    for point in points:
        axes.axvline(point - 0.5, color="0.4", lw=0.9, ls=":")
    thin_ticks(axes.xaxis, labels, 1.5 * _PANEL)
    axes.set_xlabel("checkpoint")
    axes.set_ylabel("value")
    if len(names) == 1:
        axes.set_ylabel(title_of(names[0]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=len(names), fontsize=SMALL)
    return figure


def _embeddings(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    figure, grid = new_figure(
        ncols=len(names),
        squeeze=False,
        layout="compressed",
        figsize=(1.2 * _PANEL * len(names), 1.2 * _PANEL),
    )
    for axes, name in zip(grid[0], names, strict=True):
        embedding = reading.mds(result[name])
        _draw_path(axes, embedding.points, points)
        axes.set_xlabel(f"axis 1, {embedding.share[0]:.0%} of the variance")
        axes.set_ylabel(f"axis 2, {embedding.share[1]:.0%}")
        axes.set_title(title_of(name))
        axes.grid(alpha=0.25)
    return figure


def _draw_path(axes: Axes, placed: xr.DataArray, points: Sequence[int]) -> None:
    """Models in the plane, joined in the order of training and coloured by phase."""
    x, y = placed.values.T
    colours = list(map(colour_of, reading.phase_of_rows(points, len(x))))
    axes.plot(x, y, "-", color="0.75", lw=1.2, zorder=1)
    axes.scatter(x, y, c=colours, s=28, zorder=2)
    label_points(axes, placed.values, placed["a"].values)
    # room for labels on all sides, both axes to one scale
    reach = 0.65 * max(np.ptp(x), np.ptp(y)) or 1.0
    across, up = (x.max() + x.min()) / 2, (y.max() + y.min()) / 2
    axes.set(
        xlim=(across - reach, across + reach),
        ylim=(up - reach, up + reach),
        aspect="equal",
    )


def _dendrograms(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    width = max(_PANEL, min(0.16 * result.sizes["a"], 3 * _PANEL)) + 1
    figure, grid = new_figure(ncols=len(names), squeeze=False, figsize=(width * len(names), _PANEL))
    for axes, name in zip(grid[0], names, strict=True):
        leaves = _draw_tree(axes, reading.dendrogram(result[name]))
        thin_ticks(axes.xaxis, result["a"].values[leaves], width - 1)
        if points:
            phases = reading.phase_of_rows(points, len(leaves))[leaves]
            _colour_ticks(axes, phases)
        axes.set_xlim(-0.7, len(leaves) - 0.3)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("chord, sqrt(2 - 2 cos)")
        axes.set_title(title_of(name))
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_tree(axes: Axes, linkage: np.ndarray) -> np.ndarray:
    """The brackets of a hierarchy, leaves at 0, 1, 2, ...; the row of every leaf."""
    from scipy.cluster.hierarchy import dendrogram

    tree = dendrogram(linkage, no_plot=True)
    for across, up in zip(tree["icoord"], tree["dcoord"], strict=True):
        # SciPy puts leaves at 5, 15, 25, ...
        axes.plot(np.array(across) / 10 - 0.5, up, color="0.35", lw=1.1)
    return np.array(tree["leaves"])


def _colour_ticks(axes: Axes, phases: np.ndarray) -> None:
    for tick, place in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True):
        tick.set_color(colour_of(phases[int(place)]))


def _scatters(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    first, *others = names
    if not others:
        raise ResultError(
            f"a scatter figure has one variable against others, found {first!r} alone: "
            "name two or more"
        )
    panels = {title_of(name): (result[first], result[name]) for name in others}
    return scatter_grid(panels, title_of(first), "of the same pair")


_KINDS: dict[str, Callable[[xr.Dataset, Sequence[str], Sequence[int]], Figure]] = {
    "heatmap": _heatmaps,
    "trajectory": _trajectories,
    "slices": _slices,
    "mds": _embeddings,
    "dendrogram": _dendrograms,
    "scatter": _scatters,
}
