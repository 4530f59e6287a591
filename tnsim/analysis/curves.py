"""Curves along training, above a matrix or alone. In: variables of a result. Out: drawings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from tnsim.analysis.axes import show_curves, thin_ticks
from tnsim.analysis.plots import new_figure
from tnsim.errors import ResultError

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT, _GAP = 0.24, 0.05
STRIP = _HEIGHT + _GAP
"""Of curves above a heatmap, in heights of the heatmap."""
_WIDTH, _ALONE = 8.0, 2.0
"""Inches of a strip that stands alone."""

Strips: TypeAlias = Sequence[str | Sequence[str]]
"""Names of curves; each entry is a strip, of one curve or of several."""


def curves_over_training(
    result: xr.Dataset, strips: Strips, change_points: Sequence[int] = ()
) -> Figure:
    """Curves over the checkpoints of a run, evenly spaced, one strip below the other.

    Args:
        result: With variables over `a`.
        strips: Names of variables; each entry is a strip, of one curve or of several.
        change_points: Rows at which phases start, drawn as dotted lines.

    Returns:
        A figure; nothing is shown.

    Raises:
        ResultError: There is no strip, or a variable is unknown or not over `a`.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import xarray as xr
        >>> run = xr.Dataset({"loss": ("a", [2.0, 1.0])}, {"a": [0, 100]})
        >>> figure = curves_over_training(run, ["loss"])
        >>> figure.axes[0].lines[0].get_ydata().tolist()
        [2.0, 1.0]
    """
    drawn = strips_of(result, strips)
    if not drawn:
        raise ResultError("a figure of curves needs at least one strip, found none")
    figure, grid = new_figure(
        nrows=len(drawn), squeeze=False, figsize=(_WIDTH, _ALONE * len(drawn) + 0.6)
    )
    for axes, strip in zip(grid[:, 0], drawn, strict=True):
        show_curves(axes, strip, change_points)
        thin_ticks(axes.xaxis, result["a"].values, _WIDTH - 1)
        axes.tick_params(labelbottom=axes is grid[-1, 0])
    return figure


def strips_of(result: xr.Dataset, strips: Strips) -> list[list[xr.DataArray]]:
    """The curves of every strip, each with a value for every column.

    Args:
        result: With matrices, and variables over `a` or `b`.
        strips: Names of variables.

    Returns:
        Curves, strip by strip.

    Raises:
        ResultError: A variable is unknown, or has not one value for every column.

    Example:
        >>> import xarray as xr
        >>> run = xr.Dataset({"loss": ("a", [2.0, 1.0])})
        >>> [[curve.name for curve in strip] for strip in strips_of(run, ["loss"])]
        [['loss']]
    """
    columns = result.sizes.get("b", result.sizes.get("a"))
    found = []
    for entry in strips:
        names = [entry] if isinstance(entry, str) else list(entry)
        check_variables(result.reset_coords(), names)
        strip = [result[name] for name in names]
        for curve in strip:
            if curve.ndim != 1 or curve.size != columns:
                raise ResultError(
                    f"a curve has one value for each of {columns} columns: {curve.name} is of "
                    f"shape {curve.shape}"
                )
        found.append(strip)
    return found


def check_variables(result: xr.Dataset, names: Sequence[str]) -> None:
    """Refuse names that are not those of variables.

    Args:
        result: With variables.
        names: That are asked for.

    Raises:
        ResultError: The result has no such variable.

    Example:
        >>> import xarray as xr
        >>> check_variables(xr.Dataset(), ["slices"])
        Traceback (most recent call last):
        tnsim.errors.ResultError: the result has no variable 'slices', only ...
    """
    for name in names:
        if name in result:
            continue
        hint = ""
        if name == "slices":
            hint = "; compute the run with slices"
        known = ", ".join(map(str, result))
        raise ResultError(f"the result has no variable {name!r}, only {known}{hint}")


def draw_above(axes: Axes, strips: Sequence[Sequence[xr.DataArray]], points: Sequence[int]) -> Axes:
    """Curves above a heatmap, as wide as it is.

    Args:
        axes: Of the heatmap.
        strips: Curves, strip by strip.
        points: Columns at which phases start.

    Returns:
        The uppermost axes, for a title.

    Example:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> draw_above(axes, [], []) is axes
        True
    """
    top = axes
    bottom = 1 + _GAP
    for strip in reversed(strips):
        top = axes.inset_axes((0, bottom, 1, _HEIGHT), sharex=axes)
        show_curves(top, strip, points)
        top.tick_params(labelbottom=False)
        bottom += STRIP
    return top
