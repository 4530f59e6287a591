"""Pictures of matrices and networks as matplotlib figures; nothing is computed or shown here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.analysis.axes import written
from tnsim.errors import MissingExtra
from tnsim.names import COVARIANCE, MEAN, SYMMETRISER, layer_tag

if TYPE_CHECKING:
    import quimb.tensor as qtn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MAX_LABELS = 24
"""Number of labels at which the thinning of an axis aims; fewer than twice as many are shown."""
MAX_NUMBERS = 200
"""Most contributions that are written as numbers into their cells."""
_OPERATOR_COLOURS = {SYMMETRISER: "#d62728", COVARIANCE: "#7f7f7f", MEAN: "#111111"}
_LAYER_COLOURS = (
    "#1f77b4",
    "#ff9f40",
    "#2ca02c",
    "#9467bd",
    "#17becf",
    "#bcbd22",
    "#e377c2",
    "#8c564b",
)


def heatmap(matrix: Float[np.ndarray, "K K"], labels: Sequence[str], title: str = "") -> Figure:
    """A figure of a matrix of similarities, evenly spaced by index, with a colour bar over [-1, 1].

    Args:
        matrix: Similarities (K, K), from -1 to 1.
        labels: K names, thinned until they fit.
        title: Title above the matrix.

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
    figure, axes = new_figure(figsize=(6.4, 5.4))
    image = axes.imshow(np.asarray(matrix), vmin=-1, vmax=1, cmap="RdBu_r", origin="lower")
    every = max(1, len(labels) // MAX_LABELS)
    ticks = range(0, len(labels), every)
    shown = [written(labels[tick]) for tick in ticks]
    axes.set_xticks(ticks, shown, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(ticks, shown)
    axes.set_xlabel("checkpoint")
    axes.set_ylabel("checkpoint")
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label="similarity")
    return figure


def contributions(
    values: Float[np.ndarray, "bra ket"],
    bra: Sequence[str],
    ket: Sequence[str],
    title: str = "",
    names: tuple[str, str] = ("a", "b"),
) -> Figure:
    """A figure of an `Attribution`: the contribution of every pair of parts to an inner product.

    Where there are few parts, each contribution is also written as its share of the sum.

    Args:
        values: Contributions (bra, ket), in the unit of the inner product.
        bra: Names of the rows.
        ket: Names of the columns.
        title: Title; by default the sum of the contributions.
        names: Names of the two models, for the rows and for the columns.

    Returns:
        A figure; nothing is shown.

    Raises:
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> figure = contributions(np.array([[3.0, 1.0]]), ["head 0"], ["head 0", "head 1"])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['75%', '25%']
    """
    values = np.asarray(values)
    figure, axes = new_figure(figsize=(2.6 + 0.62 * len(ket), 1.8 + 0.5 * len(bra)))
    largest = float(np.abs(values).max()) or 1.0
    image = axes.imshow(values, vmin=-largest, vmax=largest, cmap="RdBu_r")
    axes.set_xticks(range(len(ket)), ket, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(bra)), bra)
    axes.set_xlabel(names[1])
    axes.set_ylabel(names[0])
    axes.set_title(title or f"contributions, sum {values.sum():.4g}")
    if values.size <= MAX_NUMBERS:
        _write_shares(axes, values, largest)
    figure.colorbar(image, ax=axes, label="contribution (numbers: share of the sum)")
    return figure


def _write_shares(axes: Axes, values: Float[np.ndarray, "bra ket"], largest: float) -> None:
    """Write shares of the sum into the cells, in white on dark cells."""
    for (row, column), value in np.ndenumerate(values):
        colour = "black"
        if abs(value) > 0.6 * largest:
            colour = "white"
        share = f"{value / values.sum():.0%}"
        axes.text(column, row, share, ha="center", va="center", fontsize=8, color=colour)


def draw(network: qtn.TensorNetwork, title: str = "") -> Figure:
    """A figure of a tagged network with a legend.

    Every layer and every kind of operator node has a colour; bra and ket differ by marker.

    Args:
        network: Network from `tnsim.network` or `tnsim.networks`.
        title: Title above the network.

    Returns:
        A figure; nothing is shown.

    Raises:
        MissingExtra: matplotlib or networkx is not installed.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> legend = draw(tnsim.network(model)).axes[0].get_legend()
        >>> [text.get_text() for text in legend.get_texts()]
        ['Layer0']
    """
    try:
        import networkx  # noqa: F401  what quimb lays networks out with
    except ImportError:
        raise MissingExtra("networkx", "plot", "drawing a network") from None
    figure, axes = new_figure(figsize=(9, 6.5))
    tags = network.tag_map
    layer_tags = map(layer_tag, range(len(tags)))
    layers = [tag for tag in layer_tags if tag in tags]
    operators = [tag for tag in _OPERATOR_COLOURS if tag in tags]
    has_ket = "B" in tags
    colours = _colours(layers, operators)
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
    entries = []
    for tag in layers:
        entries.append(_legend_entry(tag.lower().capitalize(), "o", colours[tag]))
    for tag in operators:
        entries.append(_legend_entry(tag.lower(), "D", colours[tag]))
    if has_ket:
        entries.append(_legend_entry("bra (A)", "o", "black", markerfacecolor="white"))
        entries.append(_legend_entry("ket (B)", "s", "black", markerfacecolor="white"))
    axes.legend(handles=entries, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_title(title)
    return figure


def _colours(layers: Sequence[str], operators: Sequence[str]) -> dict[str, str]:
    """The colour of every tag; colours of layers repeat."""
    colours = {}
    for n, tag in enumerate(layers):
        colours[tag] = _LAYER_COLOURS[n % len(_LAYER_COLOURS)]
    for tag in operators:
        colours[tag] = _OPERATOR_COLOURS[tag]
    return colours


def _legend_entry(label: str, marker: str, colour: str, **style: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=marker, ls="", color=colour, label=label, **style)


def depth(rows: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """A figure of `tnsim bench depth`: planned multiplications and warm time against depth.

    Args:
        rows: Mappings, one per depth, with `depth`, `multiplications`, `paper_multiplications`,
            `unrolled_multiplications` (None where they were not counted), `milliseconds` and
            `hand_milliseconds`.
        title: Title above both panels.

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
    figure, (left, right) = new_figure(ncols=2, figsize=(11, 4.2))
    _curve(left, rows, "multiplications", "o-", "tnsim plan")
    _curve(left, rows, "paper_multiplications", "k--", "Gram recursion, per layer x depth")
    _curve(left, rows, "unrolled_multiplications", "s-", "unrolled, cotengra alone")
    left.set_ylabel("scalar multiplications")
    _curve(right, rows, "milliseconds", "o-", "tnsim, warm")
    _curve(right, rows, "hand_milliseconds", "k--", "hand-written JAX recursion")
    right.set_ylabel("milliseconds")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("depth")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title)
    return figure


def _curve(
    axes: Axes, rows: Sequence[Mapping[str, Any]], column: str, style: str, label: str
) -> None:
    """Draw a column against depth, at the depths with a value in it."""
    measured = [row for row in rows if row[column]]
    if measured:
        depths = [row["depth"] for row in measured]
        axes.plot(depths, [row[column] for row in measured], style, label=label)


def new_figure(**options: Any) -> tuple[Figure, Any]:
    """A figure without pyplot state, so that nothing leaks and no display is needed.

    Notebooks show it as a picture.

    Args:
        options: Options of `Figure`, with the layout `"constrained"` by default, and `nrows`,
            `ncols`, `squeeze` and `width_ratios` of `Figure.subplots`.

    Returns:
        The figure, and the result of `Figure.subplots`: one axes object or an array of them.

    Raises:
        MissingExtra: matplotlib is not installed.

    Example:
        >>> figure, axes = new_figure(ncols=2, figsize=(4, 2))
        >>> axes.shape
        (2,)
    """
    try:
        import matplotlib.figure  # noqa: F401  what pictures are made of

        from tnsim.analysis.pictures import Picture
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "drawing") from None
    grid = {}
    for name in ("nrows", "ncols", "squeeze", "width_ratios"):
        if name in options:
            grid[name] = options.pop(name)
    options.setdefault("layout", "constrained")
    figure = Picture(**options)
    return figure, figure.subplots(**grid)
