"""Pictures of a pairwise run. In: a result, names of its matrices, change points. Out: matplotlib figures.

Models are spaced evenly by index, whatever their training steps, and labelled by step as far as labels fit. Panels of
one figure share one colour range. What is drawn comes from `reading`; no pyplot state and no global setting is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.analysis import reading
from tnsim.analysis.matrices import matrix, square
from tnsim.analysis.plots import new_figure
from tnsim.errors import ResultError

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SLICES = 144
_PHASES = (
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
_PANEL = 4.4  # inches
_LABEL = 0.19  # inches that a label needs for itself
_SMALL = 8  # points


def pairwise(
    result: xr.Dataset,
    kind: str = "heatmap",
    variable: str | Sequence[str] = "similarity",
    change_points: Sequence[int] | None = None,
) -> Figure:
    """One of five pictures of a pairwise result; several variables give several panels, or several lines.

    kind: `"heatmap"`; `"trajectory"`, the similarity of every model to the last and to the one before; `"slices"`, one heatmap per
    output (`variable` is then not read); `"mds"`, the models as points of a plane, joined in order; `"dendrogram"`.
    change_points: rows at which phases start, as `reading.segment(result, 3).change_points`, drawn as lines or colours.
    Raises `ResultError` for an unknown kind or variable, and for what `reading` refuses.
    """
    if kind not in _KINDS:
        raise ResultError(f"a pairwise result is drawn as {', '.join(_KINDS)}, not as {kind!r}")
    names = (
        ("slices",)
        if kind == "slices"
        else (variable,)
        if isinstance(variable, str)
        else tuple(variable)
    )
    for name in names:
        if name not in result:
            hint = "; compute the run with slices" if name == "slices" else ""
            raise ResultError(
                f"the result has no variable {name!r}, only {', '.join(map(str, result))}{hint}"
            )
    points = () if change_points is None else tuple(change_points)
    if points:
        reading.phase_of_rows(points, len(square(result)))
    return _KINDS[kind](result, names, points)


def _heatmaps(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    panels = [matrix(result[name]) for name in names]
    figure, grid = new_figure(
        ncols=len(panels),
        squeeze=False,
        layout="compressed",
        figsize=(_PANEL * len(panels) + 1.2, _PANEL + 0.4),
    )
    colours = _colours(np.stack([panel.values for panel in panels]))
    image: Any = None
    for axes, panel, name in zip(grid[0], panels, names, strict=True):
        image = _heatmap(axes, panel, colours, points)
        _ticks(axes.xaxis, panel["b"].values, _PANEL)
        _ticks(axes.yaxis, panel["a"].values, _PANEL)
        axes.set_title(_title(name))
    figure.colorbar(
        image, ax=list(grid[0]), shrink=0.85, label=_title(names[0]) if len(names) == 1 else None
    )
    return figure


def _slices(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    slices = result["slices"].transpose("output", "a", "b")
    count = len(slices)
    if not 1 <= count <= MAX_SLICES:
        raise ResultError(
            f"{count} slices are not 1 to {MAX_SLICES}, as one figure shows; choose some, as in result.sel(output=[0, 1])"
        )
    panels = [matrix(one) for one in slices]
    columns = int(np.ceil(np.sqrt(1.5 * count)))
    rows = -(-count // columns)
    size = max(0.9, min(2.4, 12 / columns))
    figure, grid = new_figure(
        nrows=rows,
        ncols=columns,
        squeeze=False,
        layout="compressed",
        figsize=(size * columns + 1, (size + 0.2) * rows),
    )
    colours = _colours(slices.values)
    image: Any = None
    for axes in grid.flat[count:]:
        axes.remove()
    for axes, panel, output in zip(grid.flat, panels, slices["output"].values, strict=False):
        image = _heatmap(axes, panel, colours, points)
        axes.set_title(f"output {output}" if size > 1.2 else output, fontsize=_SMALL, pad=2)
        axes.set(xticks=(), yticks=())
    figure.colorbar(image, ax=list(grid.flat[:count]), shrink=0.6, label="similarity of the output")
    return figure


def _trajectories(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    figure, axes = new_figure(figsize=(1.7 * _PANEL, _PANEL))
    labels = result["a"].values
    for colour, name in zip(_cycle(len(names)), names, strict=True):
        final, previous = (
            reading.trajectory(result[name]),
            reading.trajectory(result[name], "previous"),
        )
        size = 3.5 if len(labels) <= 60 else 0
        axes.plot(
            range(len(labels)),
            final,
            "o-",
            color=colour,
            markersize=size,
            label=f"{_title(name)} to the last",
        )
        axes.plot(
            range(1, len(labels)),
            previous,
            "s--",
            color=colour,
            markersize=size,
            alpha=0.55,
            label=f"{_title(name)} to the one before",
        )
    for point in points:
        axes.axvline(point - 0.5, color="0.4", lw=0.9, ls=":")
    _ticks(axes.xaxis, labels, 1.5 * _PANEL)
    axes.set_xlabel("checkpoint")
    axes.set_ylabel(_title(names[0]) if len(names) == 1 else "value")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=len(names), fontsize=_SMALL)
    return figure


def _embeddings(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    figure, grid = new_figure(
        ncols=len(names),
        squeeze=False,
        layout="compressed",
        figsize=(1.2 * _PANEL * len(names), 1.2 * _PANEL),
    )
    for axes, name in zip(grid[0], names, strict=True):
        found = reading.mds(result[name])
        x, y = found.points.values.T
        axes.plot(x, y, "-", color="0.75", lw=1.2, zorder=1)
        axes.scatter(
            x,
            y,
            c=[_PHASES[p % len(_PHASES)] for p in reading.phase_of_rows(points, len(x))],
            s=28,
            zorder=2,
        )
        _place_labels(axes, found.points.values, found.points["a"].values)
        reach = (
            0.65 * max(np.ptp(x), np.ptp(y)) or 1.0
        )  # room for labels on all sides, axes to one scale
        middle = ((x.max() + x.min()) / 2, (y.max() + y.min()) / 2)
        axes.set(
            xlim=(middle[0] - reach, middle[0] + reach),
            ylim=(middle[1] - reach, middle[1] + reach),
            aspect="equal",
        )
        axes.set_xlabel(f"axis 1, {found.share[0]:.0%} of the variance")
        axes.set_ylabel(f"axis 2, {found.share[1]:.0%}")
        axes.set_title(_title(name))
        axes.grid(alpha=0.25)
    return figure


def _dendrograms(result: xr.Dataset, names: Sequence[str], points: Sequence[int]) -> Figure:
    from scipy.cluster.hierarchy import dendrogram

    width = max(_PANEL, min(0.16 * result.sizes["a"], 3 * _PANEL)) + 1
    figure, grid = new_figure(ncols=len(names), squeeze=False, figsize=(width * len(names), _PANEL))
    for axes, name in zip(grid[0], names, strict=True):
        drawn = dendrogram(reading.dendrogram(result[name]), no_plot=True)
        for across, up in zip(drawn["icoord"], drawn["dcoord"], strict=True):
            axes.plot(
                np.array(across) / 10 - 0.5, up, color="0.35", lw=1.1
            )  # SciPy puts leaves at 5, 15, 25, ...
        leaves = np.array(drawn["leaves"])
        _ticks(axes.xaxis, result["a"].values[leaves], width - 1)
        phases = reading.phase_of_rows(points, len(leaves))[leaves]
        for tick, place in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True):
            tick.set_color(_PHASES[phases[int(place)] % len(_PHASES)] if points else "black")
        axes.set_xlim(-0.7, len(leaves) - 0.3)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("chord, sqrt(2 - 2 cos)")
        axes.set_title(_title(name))
        axes.spines[["top", "right"]].set_visible(False)
    return figure


_KINDS: dict[str, Callable[[Any, Sequence[str], Sequence[int]], Any]] = {
    "heatmap": _heatmaps,
    "trajectory": _trajectories,
    "slices": _slices,
    "mds": _embeddings,
    "dendrogram": _dendrograms,
}


def _heatmap(
    axes: Axes, values: xr.DataArray, colours: dict[str, Any], points: Sequence[int]
) -> Any:
    image = axes.imshow(values, origin="lower", interpolation="nearest", **colours)
    for point in points:
        axes.axhline(point - 0.5, color="black", lw=0.9)
        axes.axvline(point - 0.5, color="black", lw=0.9)
    return image


def _colours(values: Float[np.ndarray, "panel a b"]) -> dict[str, Any]:
    """[-1, 1] diverging where similarities are clearly negative, else up from 0; other quantities over their own range."""
    low, high = values.min(), values.max()
    if high > 1 + 1e-6 or low < -1 - 1e-6:
        return {"cmap": "viridis", "vmin": low, "vmax": high}
    return (
        {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}
        if low < -0.1
        else {"cmap": "viridis", "vmin": min(low, 0), "vmax": 1}
    )


def _ticks(axis: Any, labels: np.ndarray, inches: float) -> None:
    """Evenly thinned labels, as many as fit in so many inches."""
    every = max(1, int(np.ceil(len(labels) * _LABEL / inches)))
    places = np.arange(0, len(labels), every)
    upright = {"rotation": 90} if axis.axis_name == "x" else {}
    axis.set_ticks(places, [str(labels[p]) for p in places], fontsize=_SMALL, **upright)


def _place_labels(axes: Axes, points: Float[np.ndarray, "K 2"], labels: np.ndarray) -> None:
    """Labels beside their points, away from the middle, where they are not too near to one that is written already."""
    from matplotlib.patheffects import withStroke

    taken: list[np.ndarray] = []
    reach = 0.075 * max(np.ptp(points, axis=0).max(), 1e-12)
    for n in sorted({0, len(points) - 1}) + list(range(1, len(points) - 1)):
        if any(np.linalg.norm(points[n] - other) < reach for other in taken):
            continue
        taken.append(points[n])
        outward = points[n] / (np.linalg.norm(points[n]) or 1.0)
        axes.annotate(
            str(labels[n]),
            points[n],
            xytext=9 * outward,
            textcoords="offset points",
            fontsize=_SMALL,
            ha="left" if outward[0] > 0 else "right",
            va="center",
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )


def _cycle(count: int) -> list[str]:
    return [_PHASES[n % len(_PHASES)] for n in range(count)]


def _title(name: str) -> str:
    return name.replace("_", " ")
