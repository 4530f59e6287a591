"""Figures of networks, of contributions and of pairwise runs, with matplotlib.

`draw` shows a network, `contributions` a matrix of paths, `heatmap` any matrix of similarities, and
`depth` the cost of deep models. `pairwise` draws any of seven pictures of a result, with curves
above heatmaps; `curves_over_training` draws curves along a run, and `scatter_grid` two measures of
the same models against each other.

Models are spaced evenly by index, whatever their training steps, and labelled by step as far as
labels fit. Panels of a figure share a colour range. All drawn quantities come from `reading`.
Every plot takes `ax`, `figsize`, `cmap`, `vmin` and `vmax` (`Drawing`). No pyplot state and no
global setting is touched, and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from jaxtyping import Float

from tnsim.analysis import reading
from tnsim.analysis.axes import (
    COLOURS,
    SMALL,
    Canvas,
    Curve,
    Drawing,
    Panel,
    Scale,
    Wire,
    around_zero,
    canvas,
    colour_of,
    colours_of,
    heading,
    inches_of,
    label_inches,
    legend_height,
    limit,
    new_figure,
    refuse_span,
    scale_of,
    shortened,
    show_bars,
    show_curves,
    show_graph,
    show_legend,
    show_matrices,
    show_points,
    show_tree,
    thin_ticks,
    title_inches,
    title_of,
    written,
)
from tnsim.analysis.matrices import check_result, matrix, numbers_in, part_grids, square
from tnsim.analysis.reading import correlation, paired_entries, without_copies
from tnsim.errors import ResultError, printable, require
from tnsim.names import COVARIANCE, MEAN, SYMMETRISER, layer_tag
from tnsim.options import checked, shown

if TYPE_CHECKING:
    import quimb.tensor as qtn
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from tnsim.analysis.matrices import Matrix

__all__ = [
    "Drawing",
    "contributions",
    "curves_over_training",
    "depth",
    "draw",
    "edges",
    "heatmap",
    "layer_by_layer",
    "layers_and_heads",
    "new_figure",
    "pairwise",
    "scatter_grid",
    "shares",
    "shares_over_training",
]

MAX_BARS = 24
"""Most bars, unless the caller says another number."""
MOST_PARTS = 40
"""Most parts along an axis with room each."""
_OPERATOR_COLOURS = {SYMMETRISER: "#d62728", COVARIANCE: "#7f7f7f", MEAN: "#111111"}
_LAYER_COLOURS = [colour for colour in COLOURS if colour not in _OPERATOR_COLOURS.values()]
_SCATTER_PANEL = 3.0
"""Side of a scatter panel in inches."""
_HEIGHT, _GAP = 0.24, 0.04
"""Height of a strip of curves and of the gap below the strip, in heights of the heatmap."""
_WIDTH, _ALONE = 8.0, 2.0
"""Width and height in inches of a strip without a heatmap."""
MAX_SLICES = 144
"""Most slices in one figure."""
_PANEL = 4.4
"""Side of a panel in inches."""


@checked
def heatmap(
    matrix: Float[np.ndarray, "K K"],
    labels: Sequence[str],
    title: str = "",
    **drawing: Unpack[Drawing],
) -> Figure:
    """A figure of a matrix of similarities, evenly spaced by index, with colours over [-1, 1].

    Where all similarities crowd near 1, colours follow their angle or the logarithm of their
    difference from 1, as the colour bar says.

    Args:
        matrix: Similarities (K, K), from -1 to 1.
        labels: K names, thinned until they fit.
        title: Title above the matrix.
        drawing: Axes, size, colour map and range, see `Drawing`.

    Returns:
        A figure; nothing is shown.

    Raises:
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> figure = heatmap(np.eye(2), ["early", "late"], "two models")
        >>> figure.axes[0].get_title()
        'two models'
    """
    values = numbers_in(matrix)
    if not values.size:
        raise ResultError(f"a heatmap shows a matrix (K, K), found {shown(matrix)}")
    scale = scale_of(values)
    scale = around_zero(1.0) if scale.name == "linear" else scale
    panel = Panel(values, labels, labels, heading(title), ("checkpoint", "checkpoint"))
    cell = _PANEL / len(values)
    return show_matrices(drawing, [panel], scale, cell=cell, bar="similarity").figure


@checked
def layer_by_layer(matrix: xr.DataArray, title: str = "", **drawing: Unpack[Drawing]) -> Figure:
    """A figure of parts of a network against parts of another, the first layers below.

    Args:
        matrix: Matrix of `tnsim.layer_similarity` over (a, b), with the names of parts as labels.
        title: Title above the matrix; by default the name of the measure.
        drawing: Axes, size, colour map and range, see `Drawing`.

    Returns:
        A figure; nothing is shown.

    Raises:
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import xarray as xr
        >>> parts = {"a": ["embed", "block"], "b": ["embed", "block", "head"]}
        >>> found = xr.DataArray([[1.0, 0.5, 0.1], [0.5, 1.0, 0.3]], parts, ("a", "b"), "cka")
        >>> layer_by_layer(found).axes[0].get_title()
        'cka'
    """
    values = matrix.values
    # Debiased measures fall below 0 by chance: 0 stays the dark end unless they do.
    span = Scale("linear", min(0.0, values.min()), max(1.0, values.max()))
    labels = matrix["a"].values, matrix["b"].values
    panel = Panel(values, *labels, heading(title or str(matrix.name)))
    cell = 0.24 * min(1.0, MOST_PARTS / max(values.shape))
    return show_matrices(drawing, [panel], span, cell=cell, whole=True).figure


@checked
def contributions(
    values: Float[np.ndarray, "bra ket"],
    bra: Sequence[str],
    ket: Sequence[str],
    title: str = "",
    names: tuple[str, str] = ("a", "b"),
    **drawing: Unpack[Drawing],
) -> Figure:
    """A figure of `Paths`: the contribution of every pair of paths to an inner product.

    Where there are few parts, each contribution is also written as its share of the sum.

    Args:
        values: Contributions (bra, ket), in the unit of the inner product.
        bra: Names of the rows.
        ket: Names of the columns.
        title: Title; by default the sum of the contributions.
        names: Names of the two models, for the rows and for the columns.
        drawing: Axes, size, colour map and range, see `Drawing`.

    Returns:
        A figure; nothing is shown.

    Raises:
        ResultError: The numbers of names and of values differ, or a value is not finite.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> figure = contributions(np.array([[3.0, 1.0]]), ["head 0"], ["head 0", "head 1"])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['75%', '25%']
    """
    values = np.asarray(values)
    _check_names(values, bra, ket)
    if len(names) != 2:
        raise ResultError(f"names are those of two models, found {shown(names)}")
    total = values.sum()
    cells = {}
    if total:
        cells = {at: f"{value / total:.0%}" for at, value in np.ndenumerate(values[::-1])}
    title = heading(title) or f"contributions, sum {total:.4g}"
    panel = Panel(values[::-1], bra[::-1], ket, title, names, cells)  # the first row at the top
    scale = around_zero(float(np.abs(values).max()))
    return show_matrices(drawing, [panel], scale, cell=0.55, whole=True, bar="contribution").figure


@checked
def shares(
    labels: Sequence[str],
    values: Float[np.ndarray, " parts"],
    errors: Float[np.ndarray, " parts"] | None = None,
    *,
    title: str = "",
    most: int = MAX_BARS,
    **drawing: Unpack[Drawing],
) -> Figure:
    """A figure of signed shares as bars, those of `tnsim.paths` or of `tnsim.change`.

    Args:
        labels: Names of the parts.
        values: Shares, which sum to 1.
        errors: Standard errors of sampled shares, drawn as lines across the ends of the bars.
        title: Title above the bars.
        most: Number of parts with bars of their own, those of the largest shares; one more bar is
            the sum of the others.
        drawing: Axes, size, colour map and range, see `Drawing`.

    Returns:
        The figure; nothing is shown.

    Raises:
        ResultError: The numbers of names and of values differ, or a value is not finite.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> figure = shares(["layer 0", "layer 1"], np.array([1.2, -0.2]))
        >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
        [1.2, -0.2]
    """
    values = np.asarray(values)
    for each in (values, values if errors is None else np.asarray(errors)):
        _check_names(each, labels)
    kept = np.argsort(-abs(values), kind="stable")[:most]
    names = [labels[n] for n in kept]
    lengths, lines = values[kept], None if errors is None else np.asarray(errors)[kept]
    if len(kept) < len(values):
        names.append(f"{len(values) - len(kept)} others")
        lengths = np.append(lengths, values.sum() - lengths.sum())
        lines = None if lines is None else np.append(lines, np.nan)
    beside = max(2.0, label_inches(list(map(written, names))))
    # The title stands in the middle of the bars.
    width = beside + max(4.4, title_inches(title))
    chosen = canvas(drawing, (width, 0.9 + 0.24 * len(names)))
    axes = chosen.axes
    colours = [colour_of(4 * (length < 0), 5, chosen) for length in lengths]
    show_bars(axes, names, lengths, colours, lines)
    limit(chosen, axes, "x")
    axes.set_xlabel("share")
    axes.set_title(heading(title))
    return chosen.figure


@checked
def layers_and_heads(
    labels: Sequence[str],
    values: Float[np.ndarray, " components"],
    *,
    title: str = "",
    colour_label: str = "share",
    **drawing: Unpack[Drawing],
) -> Figure:
    """A heatmap of a number for each component, layer by layer.

    Args:
        labels: Labels of components, such as `layer 1 head 0`; columns are heads or units, with
            biases and whole layers in columns of their own.
        values: Number for each component, such as `Change.share` or `Change.removed`.
        title: Title above the heatmap.
        colour_label: Name of the numbers, beside the colour bar.
        drawing: Axes, size, colour map and range, see `Drawing`.

    Returns:
        The figure; nothing is shown.

    Raises:
        ResultError: The numbers of names and of values differ, or a value is not finite.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> labels = ["layer 1 head 0", "layer 1 head 1", "layer 2"]
        >>> figure = layers_and_heads(labels, np.array([0.5, 0.25, 0.25]))
        >>> [text.get_text() for text in figure.axes[0].get_xticklabels()]
        ['head 0', 'head 1', 'whole']
    """
    _check_names(np.asarray(values), labels)
    split = [label.split(" ", 2) for label in labels]
    places = [(" ".join(words[:2]), "".join(words[2:]) or "whole") for words in split]
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = sorted({column for _, column in places}, key=_column_order)
    table = np.full((len(rows), len(columns)), np.nan)
    for (row, column), value in zip(places, np.asarray(values), strict=True):
        table[rows.index(row), columns.index(column)] = value
    cells = {at: f"{value:.2g}" for at, value in np.ndenumerate(table) if np.isfinite(value)}
    panel = Panel(table, rows, columns, heading(title), texts=cells)
    scale = around_zero(float(np.nanmax(abs(table))))
    return show_matrices(drawing, [panel], scale, cell=0.45, whole=True, bar=colour_label).figure


def _check_names(values: np.ndarray, *names: Sequence[Any]) -> None:
    """Raise `ResultError` where values are not finite, or have another number of names, or none."""
    counts = tuple(map(len, names))
    if values.shape != counts or 0 in counts:
        raise ResultError(
            f"a figure shows a number for each name, found values of shape {values.shape} for "
            f"{' x '.join(map(str, counts))} names"
        )
    # A bar without a length and a point without a place would be missing, and nothing would tell.
    if not np.isfinite(values).all():
        at = tuple(np.argwhere(~np.isfinite(values))[0])
        named = ", ".join(printable(str(own[n]), 40) for own, n in zip(names, at, strict=True))
        raise ResultError(f"a figure shows finite numbers, found {values[at]} for {named}")


def _column_order(name: str) -> tuple[bool, str, int]:
    """Heads and units by number, then biases and whole layers."""
    kind, _, number = name.partition(" ")
    return not number, kind, int(number or 0)


@checked
def shares_over_training(
    checkpoints: Sequence[Any],
    paths: Sequence[str],
    table: Float[np.ndarray, "checkpoints paths"],
    beside: Mapping[str, Sequence[float]] | None = None,
    *,
    title: str = "",
    most: int = 6,
    **drawing: Unpack[Drawing],
) -> Figure:
    """A figure of shares over the checkpoints of a run, evenly spaced, beside other curves.

    Args:
        checkpoints: Labels of the checkpoints.
        paths: Labels of the paths.
        table: Shares, as `PathSeries.share` has them.
        beside: Other curves by name, such as an accuracy, drawn dashed.
        title: Title above the curves.
        most: Number of paths that are drawn, those of the largest shares.
        drawing: Axes, size, colour map and range, see `Drawing`.

    Returns:
        The figure; nothing is shown.

    Raises:
        ResultError: The numbers of names and of values differ, or a value is not finite.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> table = np.array([[1.0, 0.0], [0.1, 0.9]])
        >>> accuracy = {"accuracy": [0.1, 0.8]}
        >>> figure = shares_over_training(["0", "50"], ["embed", "layer 1"], table, accuracy)
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['embed', 'layer 1', 'accuracy']
    """
    table = np.asarray(table)
    _check_names(table, checkpoints, paths)
    chosen = canvas(drawing, (8.0, 3.8))
    drawn = sorted(np.argsort(-abs(table).max(axis=0), kind="stable")[:most])
    curves = [
        Curve(written(paths[path]), table[:, path], colour_of(n, len(drawn), chosen))
        for n, path in enumerate(drawn)
    ]
    for name, values in (beside or {}).items():
        curves.append(Curve(written(name), values, "0.2", "--"))
    width = inches_of(chosen, "x", 7.0)
    names = ("checkpoint", "share")
    show_curves(chosen.axes, curves, width, labels=checkpoints, names=names, title=title)
    limit(chosen, chosen.axes)
    return chosen.figure


@checked
def edges(
    labels: Sequence[str],
    values: Float[np.ndarray, " edges"],
    *,
    title: str = "",
    most: int = 16,
    **drawing: Unpack[Drawing],
) -> Figure:
    """A graph of components in which the width of a line is the effect of an edge.

    Args:
        labels: Labels of edges, as `tnsim.localise.paths.Edges` has them.
        values: Number for each edge, such as `Edges.cut`.
        title: Title above the graph.
        most: Number of edges that are drawn, those of the largest numbers.
        drawing: Axes, size, colour map and range, see `Drawing`.

    Returns:
        The figure; nothing is shown.

    Raises:
        ResultError: The numbers of names and of values differ, or a value is not finite.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> figure = edges(["embed > Q of layer 1", "layer 1 > K of layer 2"], np.array([0.2, 0.8]))
        >>> sorted(text.get_text() for text in figure.axes[0].texts)
        ['embed', 'layer 1', 'layer 2']
    """
    values = np.asarray(values)
    _check_names(values, labels)
    wires = [_wire_of(label) for label in labels]
    ends = {name for wire in wires for name in (wire.source, wire.target)}
    rows: dict[int, list[str]] = {}
    for name in sorted(ends, key=_place_of):
        rows.setdefault(_place_of(name)[0], []).append(name)
    width = max(2.4 + 1.3 * max(map(len, rows.values())), title_inches(title))
    size = (width, 1.4 + 1.3 * len(rows))
    chosen = canvas(drawing, size)
    axes = chosen.axes
    legs = list(dict.fromkeys(wire.kind for wire in wires))
    colours = {leg: colour_of(n, len(legs), chosen) for n, leg in enumerate(legs)}
    span = colours_of(chosen, {"vmin": 0.0, "vmax": float(abs(values).max()) or 1.0})
    widths = 0.5 + 5 * np.clip(np.interp(abs(values), [span["vmin"], span["vmax"]], [0, 1]), 0, 1)
    kept = np.argsort(-abs(values), kind="stable")[:most]
    show_graph(axes, list(rows.values()), [wires[n] for n in kept], widths[kept], colours)
    show_legend(axes, inches_of(chosen, "x", size[0] - 0.2), title)
    return chosen.figure


def _wire_of(label: str) -> Wire:
    """The source, the target and the class of legs of an edge."""
    source, _, reader = label.partition(" > ")
    leg, _, target = reader.partition(" of ")
    return Wire(source, target, leg)


def _place_of(name: str) -> tuple[int, int]:
    """The numbers of layer and part in the label of a component; what has none comes first."""
    numbers = [int(word) for word in name.split() if word.isdecimal()]
    return (*numbers, -1, -1)[0], (*numbers, -1, -1)[1]


@checked
def draw(network: qtn.TensorNetwork, title: str = "", **drawing: Unpack[Drawing]) -> Figure:
    """A figure of a tagged network with a legend.

    Every layer and every kind of operator node has a colour; bra and ket differ by marker.

    Args:
        network: Network from `tnsim.tensor_networks.network` or `tnsim.tensor_networks.networks`.
        title: Title above the network.
        drawing: Axes, size and colour map, see `Drawing`.

    Returns:
        A figure; nothing is shown.

    Raises:
        MissingExtra: matplotlib or networkx is not installed.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> legend = draw(tnsim.tensor_networks.network(model)).axes[0].get_legend()
        >>> [text.get_text() for text in legend.get_texts()]
        ['Layer0']
    """
    require("networkx", "plot", "drawing a network")  # with which quimb lays networks out
    chosen = canvas(drawing, (9, 6.5))
    refuse_span(chosen, "a network")
    axes = chosen.axes
    tags = network.tag_map
    layer_tags = map(layer_tag, range(len(tags)))
    layers = [tag for tag in layer_tags if tag in tags]
    operators = [tag for tag in _OPERATOR_COLOURS if tag in tags]
    has_ket = "B" in tags
    # Colours of layers repeat.
    colours: dict[str, Any] = {}
    for n, tag in enumerate(layers):
        colours[tag] = _LAYER_COLOURS[n % len(_LAYER_COLOURS)]
        if chosen.cmap is not None:
            colours[tag] = colour_of(n, len(layers), chosen)
    colours |= {tag: _OPERATOR_COLOURS[tag] for tag in operators}
    shapes: Any = dict.fromkeys(operators, "D")  # quimb takes one shape, or shapes by tag
    if has_ket:
        shapes = {"B": "s", **shapes}
    no_legend: Any = False  # quimb's default is a string, so type checkers refuse a bool
    network.draw(
        color=list(colours),
        custom_colors=list(colours.values()),
        node_shape=shapes,
        legend=no_legend,
        show_inds=False,
        show_tags=False,
        node_outline_size=0.8,
        ax=axes,
    )
    entries = [_legend_entry(tag.capitalize(), "o", colours[tag]) for tag in layers]
    entries += [_legend_entry(tag.lower(), "D", colours[tag]) for tag in operators]
    if has_ket:
        entries.append(_legend_entry("bra (A)", "o", "black", markerfacecolor="white"))
        entries.append(_legend_entry("ket (B)", "s", "black", markerfacecolor="white"))
    axes.legend(handles=entries, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_title(heading(title))
    return chosen.figure


def _legend_entry(label: str, marker: str, colour: Any, **style: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=marker, ls="", color=colour, label=label, **style)


@checked
def depth(rows: Sequence[Mapping[str, Any]], title: str = "", **drawing: Unpack[Drawing]) -> Figure:
    """A figure of `tnsim bench depth`: planned multiplications and warm time against depth.

    Args:
        rows: Mappings, depth by depth, with `depth`, `multiplications`, `paper_multiplications`,
            `unrolled_multiplications` (None where they were not counted), `milliseconds` and
            `hand_milliseconds`.
        title: Title above both panels, or above the first of given axes.
        drawing: Two axes, size and colour map, see `Drawing`.

    Returns:
        A figure of two panels with logarithmic axes; nothing is shown.

    Raises:
        MissingExtra: matplotlib is not installed.

    Example:
        >>> row = {
        ...     "depth": 2,
        ...     "multiplications": 900,
        ...     "paper_multiplications": 1000,
        ...     "unrolled_multiplications": None,
        ...     "milliseconds": 0.5,
        ...     "hand_milliseconds": 0.4,
        ... }
        >>> [axes.get_ylabel() for axes in depth([row]).axes]
        ['scalar multiplications', 'milliseconds']
    """
    chosen = canvas(drawing, (11, 4.4), panels=2)
    refuse_span(chosen, "a figure of two quantities")
    first, second = (colour_of(n, 2, chosen) for n in (0, 1))
    drawn = {
        "scalar multiplications": [
            ("multiplications", "tnsim plan", first, "o-"),
            ("paper_multiplications", "Gram recursion, per layer x depth", "black", "--"),
            ("unrolled_multiplications", "unrolled, cotengra alone", second, "s-"),
        ],
        "milliseconds": [
            ("milliseconds", "tnsim, warm", first, "o-"),
            ("hand_milliseconds", "hand-written JAX recursion", "black", "--"),
        ],
    }
    titles = ["", ""] if chosen.is_new else [title, ""]
    for axes, above, (unit, columns) in zip(chosen.panels, titles, drawn.items(), strict=True):
        curves = []
        for column, label, colour, form in columns:
            measured = [row for row in rows if row[column]]
            values = [row[column] for row in measured]
            places = [row["depth"] for row in measured]
            curves.append(Curve(label, values, colour, form, places))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        width = inches_of(chosen, "x", 4.8)
        curves = [curve for curve in curves if len(curve.values)]
        show_curves(axes, curves, width, names=("depth", unit), title=above)
    if chosen.is_new:
        chosen.figure.suptitle(heading(title))
    return chosen.figure


@checked
def scatter_grid(
    panels: Mapping[str, tuple[Matrix, Matrix]],
    x_label: str,
    y_label: str,
    **drawing: Unpack[Drawing],
) -> Figure:
    """A figure with a panel for every comparison: a point for every pair, and both correlations.

    Args:
        panels: Pairs of matrices by title, for `reading.correlation`: the first is drawn along x,
            the second along y.
        x_label: Name of the quantity in the first matrices.
        y_label: Name of the quantity in the second matrices.
        drawing: Axes, size, colour map and range of the values along y, see `Drawing`.

    Returns:
        A figure; nothing is shown.

    Raises:
        ResultError: There is no panel, or `reading.correlation` refuses a panel.
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
    size = (_SCATTER_PANEL * columns + 0.4, _SCATTER_PANEL * rows + 0.4)
    chosen = canvas(drawing, size, len(panels), columns)
    for axes, (title, (first, second)) in zip(chosen.panels, panels.items(), strict=True):
        _draw_points(chosen, axes, first, second)
        axes.set_title(heading(title))
        if not chosen.is_new:
            axes.set_xlabel(heading(x_label))
            axes.set_ylabel(heading(y_label))
    if chosen.is_new:
        chosen.figure.supxlabel(heading(x_label))
        chosen.figure.supylabel(heading(y_label))
    return chosen.figure


def _draw_points(chosen: Canvas, axes: Any, first: Matrix, second: Matrix) -> None:
    """Draw the points of a panel, with the two coefficients above them."""
    x, y = paired_entries(first, second)
    show_points(axes, x, y, colour_of(0, 1, chosen))
    correlated = correlation(first, second)
    said = f"r = {correlated.pearson:.3f}, rank {correlated.spearman:.3f}"
    axes.text(0.03, 0.97, said, transform=axes.transAxes, va="top", fontsize=SMALL)
    axes.margins(y=0.12)  # room for the text of the coefficients
    limit(chosen, axes)


@checked
def curves_over_training(
    result: xr.Dataset,
    strips: Sequence[str | Sequence[str]],
    change_points: Sequence[int] = (),
    **drawing: Unpack[Drawing],
) -> Figure:
    """A figure of curves over the checkpoints of a run, evenly spaced, in strips.

    Args:
        result: Result with variables over `a`.
        strips: Names of variables; each entry is a strip, of a single curve or of several.
        change_points: Rows at which phases start, drawn as dotted lines.
        drawing: Axes for every strip, size, colour map and range, see `Drawing`.

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
    chosen = canvas(drawing, (_WIDTH, _ALONE * len(drawn) + 0.6), len(drawn), ncols=1)
    width = inches_of(chosen, "x", _WIDTH - 1)
    for axes, strip in zip(chosen.panels, drawn, strict=True):
        curves, labels = _curves_of(strip, chosen), result["a"].values
        show_curves(axes, curves, width, points=change_points, labels=labels)
        limit(chosen, axes)
        axes.tick_params(labelbottom=not chosen.is_new or axes is chosen.panels[-1])
    return chosen.figure


def strips_of(
    result: xr.Dataset, strips: Sequence[str | Sequence[str]]
) -> list[list[xr.DataArray]]:
    """The curves of every strip, each with a value for every column.

    Args:
        result: Result with matrices, and variables over `a` or `b`.
        strips: Names of variables; each entry is a strip, of a single curve or of several.

    Returns:
        Curves, strip by strip.

    Raises:
        ResultError: A variable is unknown, or has no value for some column.

    Example:
        >>> import xarray as xr
        >>> run = xr.Dataset({"loss": ("a", [2.0, 1.0])})
        >>> [[curve.name for curve in strip] for strip in strips_of(run, ["loss"])]
        [['loss']]
    """
    columns = result.sizes.get("b", result.sizes.get("a"))
    rows = []
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
        rows.append(strip)
    return rows


def check_variables(result: xr.Dataset, names: Sequence[str]) -> None:
    """Refuse names of variables that a result does not have.

    Args:
        result: Result with variables.
        names: Names that the caller asks for.

    Raises:
        ResultError: The result has no such variable.

    Example:
        >>> import xarray as xr
        >>> check_variables(xr.Dataset(), ["slices"])
        Traceback (most recent call last):
        tnsim.errors.ResultError: the result has no variable 'slices', only ...
    """
    check_result(result)
    for name in names:
        if name in result:
            continue
        hint = "; compute the run with slices" if name == "slices" else ""
        known = ", ".join(map(str, result))
        raise ResultError(f"the result has no variable {name!r}, only {known}{hint}")


def _draw_above(
    axes: Axes,
    strips: Sequence[Sequence[xr.DataArray]],
    points: Sequence[int],
    inches: float,
    chosen: Canvas,
    title: str,
) -> None:
    """Draw curves and a title above a heatmap, of the same width.

    Heights of inset axes are in heights of the heatmap, and those of legends in inches.
    """
    top = axes
    bottom = 1.0
    for strip in reversed(strips):
        top = axes.inset_axes((0, bottom + _GAP, 1, _HEIGHT), sharex=axes)
        show_curves(top, _curves_of(strip, chosen), inches, points=points)
        top.tick_params(labelbottom=False)
        bottom += _GAP + _HEIGHT + _legend_of(strip, inches) / inches
    show_legend(top, inches, title)


def _curves_of(strip: Sequence[xr.DataArray], chosen: Canvas) -> list[Curve]:
    return [
        Curve(title_of(str(curve.name)), curve.values, colour_of(n, len(strip), chosen))
        for n, curve in enumerate(strip)
    ]


def _legend_of(strip: Sequence[xr.DataArray], inches: float) -> float:
    """The height in inches of the legend of a strip."""
    return legend_height([title_of(str(curve.name)) for curve in strip], inches)


@checked
def pairwise(
    result: xr.Dataset,
    kind: str = "heatmap",
    variable: str | Sequence[str] = "similarity",
    change_points: Sequence[int] | None = None,
    curves: Sequence[str | Sequence[str]] = (),
    **drawing: Unpack[Drawing],
) -> Figure:
    """A picture, of seven kinds, of a pairwise result.

    Several variables give several panels, or several lines.

    Args:
        result: A pairwise result.
        kind: `"heatmap"`; `"trajectory"`, the similarity of every model to the last and to the
            previous model; `"slices"`, a heatmap for each output (`variable` is then not read);
            `"mds"`, the models as points of a plane, those of a run joined in order;
            `"dendrogram"`; `"scatter"`, the first variable against each of the others, a point for
            every pair of models; or `"parts"`, of a result over parts, layer by head, the first
            model of the rows against the last model of the columns.
        variable: Name of a matrix in the result, or several names.
        change_points: Rows at which phases start, such as
            `reading.segment(result, 3).change_points`, drawn as lines or colours.
        curves: Variables with a value for every column, such as accuracies over `a`, drawn above
            heatmaps: each entry is a strip, of a single curve or of several.
        drawing: Axes for every panel, size, colour map and range, see `Drawing`.

    Returns:
        A figure; nothing is shown.

    Raises:
        ResultError: The kind or a variable is unknown, there are too many slices for a figure,
            curves or `drawing` do not fit, or `reading` refuses the matrix or the change points.
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
    names = (variable,) if isinstance(variable, str) else tuple(variable)
    names = ("slices",) if kind == "slices" else names
    if not names:
        raise ResultError("variable names a matrix of the result or several, found none")
    check_variables(result, names)
    points = () if change_points is None else tuple(change_points)
    if points:
        reading.phase_of_rows(points, len(square(result)))
    if not curves:
        return _KINDS[kind](result, names, points, drawing)
    if kind != "heatmap":
        raise ResultError(f"curves are drawn above a heatmap, not above {kind!r}")
    return _heatmaps(result, names, points, drawing, strips_of(result, curves))


def _part_panels(
    result: xr.Dataset, names: Sequence[str], points: Sequence[int], drawing: Drawing
) -> Figure:
    """Layer by head, a panel for each kind of part: the first row against the last column."""
    if len(names) != 1 or set(result[names[0]].dims) != {"part", "a", "b"}:
        raise ResultError(
            "parts are drawn of one matrix over (part, a, b), as pairwise of tnsim.parts(series) "
            f"gives, found {', '.join(names)} over {tuple(map(str, result[names[0]].dims))}"
        )
    table = result[names[0]].transpose("part", "a", "b")[:, 0, -1]
    finite = table.values[np.isfinite(table.values)]
    if not finite.size:
        raise ResultError(
            f"no part has a finite {names[0]} of the first row and the last column: finish the "
            "run, or select other models"
        )
    panels = []
    grids = part_grids(table)
    # Below the first layer that has parts, as below attention behind an embedding, is nothing.
    layered = [places for places in grids.values() if len(places) > 1]
    first = min((int((places >= 0).any(axis=1).argmax()) for places in layered), default=0)
    for kind, places in grids.items():
        rows, columns = (range(n) if n > 1 else () for n in places.shape)
        named = ("layer" if rows else "", "head" if columns else "")
        grid = np.where(places >= 0, table.values[places], np.nan)
        if rows:
            rows, grid = rows[first:], grid[first:]
        panels.append(Panel(grid, rows, columns, written(kind), named))
    # Cells of few layers are larger, so that the bar holds its numbers and the words beside it.
    most = max(len(panel.values) for panel in panels)
    cell = max(0.4, min(0.9, 2.4 / most))
    margin = (1.4 * len(panels), max(1.6, 3.6 - cell * most))
    ends = [shortened(table[side].item()) for side in "ab"]
    both = "\nand " if label_inches(ends) > 1 else " and "  # two long names have a line each
    of = f"{title_of(names[0])}\nof {both.join(ends)}"
    return show_matrices(drawing, panels, scale_of(finite), cell=cell, margin=margin, bar=of).figure


def _heatmaps(
    result: xr.Dataset,
    names: Sequence[str],
    points: Sequence[int],
    drawing: Drawing,
    strips: Sequence[Sequence[xr.DataArray]] = (),
) -> Figure:
    panels = [
        Panel(values.values, values["a"].values, values["b"].values)
        for values in (matrix(result[name]) for name in names)
    ]
    above = sum((_HEIGHT + _GAP) * _PANEL + _legend_of(strip, _PANEL) for strip in strips)
    chosen = show_matrices(
        drawing,
        panels,
        scale_of(np.stack([panel.values for panel in panels])),
        cell=_PANEL / max(panels[0].values.shape),
        margin=(1.2, above + 0.4),
        points=points,
        bar=title_of(names[0]) if len(names) == 1 else "",  # several stand in their titles
        shrink=0.85,
    )
    side = min(inches_of(chosen, along, _PANEL) for along in "xy")
    for axes, name in zip(chosen.panels, names, strict=True):
        _draw_above(axes, strips, points, side, chosen, title_of(name))
    return chosen.figure


def _slice_panels(
    result: xr.Dataset, names: Sequence[str], points: Sequence[int], drawing: Drawing
) -> Figure:
    slices = result["slices"].transpose("output", "a", "b")
    count = len(slices)
    if not 1 <= count <= MAX_SLICES:
        raise ResultError(
            f"{count} slices are not 1 to {MAX_SLICES}, as one figure shows; "
            "choose some, as in result.sel(output=[0, 1])"
        )
    # A page is 1.5 times as wide as high.
    columns = int(np.ceil(np.sqrt(1.5 * count)))
    inches = max(0.9, min(2.4, 12 / columns))
    title = "output {}" if inches > 1.2 else "{}"
    panels = [
        Panel(matrix(values).values, title=title.format(written(output)))
        for values, output in zip(slices, slices["output"].values, strict=True)
    ]
    chosen = show_matrices(
        drawing,
        panels,
        scale_of(slices.values),
        cell=inches / max(panels[0].values.shape),
        margin=(1.0, 0.2 * -(-count // columns)),
        ncols=columns,
        points=points,
        bar="similarity of the output",
        shrink=0.6,
    )
    for axes in chosen.panels:
        axes.set_title(axes.get_title(), fontsize=SMALL, pad=2)
    return chosen.figure


def _trajectories(
    result: xr.Dataset, names: Sequence[str], points: Sequence[int], drawing: Drawing
) -> Figure:
    chosen = canvas(drawing, (1.7 * _PANEL, _PANEL))
    result, points = _steps_alone(result, points)
    labels = result["a"].values
    rows = np.arange(len(labels))
    curves = []
    for n, name in enumerate(names):
        colour, title = colour_of(n, len(names), chosen), title_of(name)
        final = reading.trajectory(result[name]).values
        previous = reading.trajectory(result[name], "previous").values
        curves.append(Curve(f"{title} to the last", final, colour))
        before = f"{title} to the one before"
        curves.append(Curve(before, previous, colour, ".--", rows[1:], 0.55))
    axis = ("checkpoint", title_of(names[0]) if len(names) == 1 else "value")
    width = inches_of(chosen, "x", 1.5 * _PANEL)
    show_curves(chosen.axes, curves, width, points=points, labels=labels, names=axis)
    limit(chosen, chosen.axes)
    return chosen.figure


def _steps_alone(result: xr.Dataset, points: Sequence[int]) -> tuple[xr.Dataset, Sequence[int]]:
    """A run without copies of its steps, and the rows at which its phases start then."""
    kept = without_copies(result)
    rows = np.flatnonzero(np.isin(result["a"].values, kept["a"].values))
    starts = np.unique(np.searchsorted(rows, points)).tolist()
    # A phase of copies alone has no row left, so no phase starts behind it, or there.
    return kept, [start for start in starts if 0 < start < len(rows)]


def _embeddings(
    result: xr.Dataset, names: Sequence[str], points: Sequence[int], drawing: Drawing
) -> Figure:
    result, points = _steps_alone(result, points)
    # Long labels take more room at both sides than a square has beside its points.
    room = 2 * max(0.0, label_inches(list(map(shortened, result["a"].values))) - 0.4)
    wider = 1 + room / _PANEL
    size = (1.2 * _PANEL * wider * len(names), 1.2 * _PANEL)
    chosen = canvas(drawing, size, len(names), layout="compressed")
    refuse_span(chosen, "an embedding")
    for axes, name in zip(chosen.panels, names, strict=True):
        embedding = reading.mds(result[name])
        _draw_path(chosen, axes, embedding.points, points, wider)
        axes.set_xlabel(f"axis 1, {embedding.share[0]:.0%} of the variance")
        axes.set_ylabel(f"axis 2, {embedding.share[1]:.0%}")
        axes.set_title(title_of(name))
    return chosen.figure


def _draw_path(
    chosen: Canvas, axes: Axes, placed: xr.DataArray, points: Sequence[int], wider: float
) -> None:
    """Draw models in the plane, joined in the order of training and coloured by phase.

    The picture is as high as wide, or `wider`.
    """
    x, y = placed.values.T
    phases = reading.phase_of_rows(points, len(x))
    colours = [colour_of(phase, len(points) + 1, chosen) for phase in phases]
    show_points(axes, x, y, colours, placed["a"].values)
    # Leave room for labels on all sides, with one scale for both axes.
    reach = 0.65 * max(np.ptp(x), np.ptp(y)) or 1.0
    across, up = (x.max() + x.min()) / 2, (y.max() + y.min()) / 2
    axes.set(
        xlim=(across - reach * wider, across + reach * wider),
        ylim=(up - reach, up + reach),
        aspect="equal",
    )


def _dendrograms(
    result: xr.Dataset, names: Sequence[str], points: Sequence[int], drawing: Drawing
) -> Figure:
    width = max(_PANEL, min(0.16 * result.sizes["a"], 3 * _PANEL)) + 1
    chosen = canvas(drawing, (width * len(names), _PANEL), len(names))
    inches = inches_of(chosen, "x", width - 1)
    for axes, name in zip(chosen.panels, names, strict=True):
        leaves = show_tree(axes, reading.dendrogram(result[name]))
        thin_ticks(axes.xaxis, result["a"].values[leaves], inches)
        if points:
            phases = reading.phase_of_rows(points, len(leaves))[leaves]
            for tick, place in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True):
                tick.set_color(colour_of(phases[int(place)], len(points) + 1, chosen))
        limit(chosen, axes)
        axes.set_ylabel("chord, sqrt(2 - 2 cos)")
        axes.set_title(title_of(name))
    return chosen.figure


def _scatters(
    result: xr.Dataset, names: Sequence[str], points: Sequence[int], drawing: Drawing
) -> Figure:
    first, *others = names
    if not others:
        raise ResultError(
            f"a scatter figure has one variable against others, found {first!r} alone: "
            "name two or more"
        )
    panels = {title_of(name): (result[first], result[name]) for name in others}
    return scatter_grid(panels, title_of(first), "of the same pair", **drawing)


_KINDS: dict[str, Callable[[xr.Dataset, Sequence[str], Sequence[int], Drawing], Figure]] = {
    "heatmap": _heatmaps,
    "trajectory": _trajectories,
    "slices": _slice_panels,
    "mds": _embeddings,
    "dendrogram": _dendrograms,
    "scatter": _scatters,
    "parts": _part_panels,
}
