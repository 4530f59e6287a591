"""Pictures. In: results and networks. Out: matplotlib figures; nothing is computed or shown here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import MissingExtra
from tnsim.names import COVARIANCE, MEAN, SYMMETRISER, layer_tag

if TYPE_CHECKING:
    import quimb.tensor as qtn
    from matplotlib.figure import Figure

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
    """A K x K similarity matrix, evenly spaced by index, colours fixed to [-1, 1], with a colour bar."""
    figure, axes = new_figure(figsize=(6.4, 5.4))
    image = axes.imshow(np.asarray(matrix), vmin=-1, vmax=1, cmap="RdBu_r", origin="lower")
    every = max(1, len(labels) // 24)
    ticks = range(0, len(labels), every)
    axes.set_xticks(
        ticks, [labels[t] for t in ticks], rotation=60, ha="right", rotation_mode="anchor"
    )
    axes.set_yticks(ticks, [labels[t] for t in ticks])
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
    """The matrix of an `Attribution`: contributions to an inner product, as numbers too where there are few, with their sum."""
    values = np.asarray(values)
    figure, axes = new_figure(figsize=(2.6 + 0.62 * len(ket), 1.8 + 0.5 * len(bra)))
    largest = float(np.abs(values).max()) or 1.0
    image = axes.imshow(values, vmin=-largest, vmax=largest, cmap="RdBu_r")
    axes.set_xticks(range(len(ket)), ket, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(bra)), bra)
    axes.set_xlabel(names[1])
    axes.set_ylabel(names[0])
    axes.set_title(title or f"contributions, sum {values.sum():.4g}")
    if values.size <= 200:
        for (i, j), value in np.ndenumerate(values):
            colour = "white" if abs(value) > 0.6 * largest else "black"
            axes.text(
                j,
                i,
                f"{value / values.sum():.0%}",
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
            )
    figure.colorbar(image, ax=axes, label="contribution (numbers: share of the sum)")
    return figure


def draw(network: qtn.TensorNetwork, title: str = "") -> Figure:
    """A tagged network: one colour per layer, one per kind of operator node, bra and ket by marker; with a legend."""
    try:
        import networkx  # noqa: F401  what quimb lays networks out with
    except ImportError:
        raise MissingExtra("networkx", "plot", "drawing a network") from None
    figure, axes = new_figure(figsize=(9, 6.5))
    layers = [
        t for t in (layer_tag(n) for n in range(len(network.tag_map))) if t in network.tag_map
    ]
    operators = [t for t in _OPERATOR_COLOURS if t in network.tag_map]
    colours = {t: _LAYER_COLOURS[n % len(_LAYER_COLOURS)] for n, t in enumerate(layers)}
    colours |= {t: _OPERATOR_COLOURS[t] for t in operators}
    shapes: Any = dict.fromkeys(operators, "D")  # quimb takes one shape, or shapes by tag
    if "B" in network.tag_map:
        shapes = {"B": "s", **shapes}
    legend: Any = False
    network.draw(
        color=list(colours),
        custom_colors=list(colours.values()),
        node_shape=shapes,
        legend=legend,
        show_inds=False,
        show_tags=False,
        node_outline_size=0.8,
        ax=axes,
    )
    from matplotlib.lines import Line2D

    sides = {"A": "o", "B": "s"}
    entries = [
        Line2D([], [], marker="o", ls="", color=c, label=t.lower().capitalize())
        for t, c in colours.items()
        if t in layers
    ]
    entries += [
        Line2D([], [], marker="D", ls="", color=c, label=t.lower())
        for t, c in colours.items()
        if t in operators
    ]
    if "B" in network.tag_map:
        entries += [
            Line2D(
                [],
                [],
                marker=m,
                ls="",
                markerfacecolor="white",
                color="black",
                label="bra (A)" if s == "A" else "ket (B)",
            )
            for s, m in sides.items()
        ]
    axes.legend(handles=entries, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_title(title)
    return figure


def depth(rows: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """The table of `tnsim bench depth` as two panels: planned multiplications and warm time against depth."""
    figure, (left, right) = new_figure(ncols=2, figsize=(11, 4.2))
    depths = [row["depth"] for row in rows]
    left.plot(depths, [row["multiplications"] for row in rows], "o-", label="tnsim plan")
    left.plot(
        depths,
        [row["paper_multiplications"] for row in rows],
        "k--",
        label="Gram recursion, per layer x depth",
    )
    unrolled = [
        (r["depth"], r["unrolled_multiplications"]) for r in rows if r["unrolled_multiplications"]
    ]
    if unrolled:
        left.plot(*zip(*unrolled, strict=True), "s-", label="unrolled, cotengra alone")
    left.set_ylabel("scalar multiplications")
    right.plot(depths, [row["milliseconds"] for row in rows], "o-", label="tnsim, warm")
    right.plot(
        depths,
        [row["hand_milliseconds"] for row in rows],
        "k--",
        label="hand-written JAX recursion",
    )
    right.set_ylabel("milliseconds")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("depth")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title)
    return figure


def new_figure(**options: Any) -> tuple[Figure, Any]:
    """A figure without pyplot state, so that nothing leaks and no display is needed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "drawing") from None
    grid = {name: options.pop(name) for name in ("nrows", "ncols", "squeeze") if name in options}
    options.setdefault("layout", "constrained")
    figure = Figure(**options)
    return figure, figure.subplots(**grid)
