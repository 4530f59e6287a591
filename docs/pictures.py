"""Pictures of the site and of the README: `python docs/pictures.py` writes `docs/images`.

The gallery and the theory page show the same functions and what they draw.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import tnsim
from tnsim import figures
from tnsim.analysis.axes import show_legend
from tnsim.metrics import orbits

HERE = Path(__file__).parent
SHIPPED = Path(tnsim.__file__).parent / "data" / "grokking"
INK, ACCENT, PALE = "#30343b", "#2c6fbb", "#c3c8d0"
BRA, KET = ("o", ACCENT), ("s", "#ff9f40")


def same_function() -> Figure:
    """A trained network, and a copy whose hidden units are permuted and swapped."""
    network = tnsim.load(SHIPPED / "step_080000.safetensors")
    layer = network.layers[0]

    rng = np.random.default_rng(0)
    order = rng.permutation(len(layer.left))  # hidden units in another order
    swapped = rng.random(len(order)) < 0.5  # half of them with left and right exchanged
    left, right = layer.left[order], layer.right[order]
    left, right = (
        np.where(swapped[:, None], right, left),
        np.where(swapped[:, None], left, right),
    )
    copy = tnsim.Model([tnsim.Bilinear(left, right, layer.down[:, order])])

    numbers = {
        "similarity": float(tnsim.similarity(network, copy)),
        "weight cosine": float(tnsim.baselines.weight_cosine([network, copy])[0, 1]),
    }

    figure, (first, second, bars) = figures.new_figure(ncols=3, figsize=(9.6, 3.2))
    panels = ((first, layer.left, "one network"), (second, left, "the same, hidden units shuffled"))
    for axes, weights, title in panels:
        largest = np.abs(layer.left).max()
        axes.imshow(weights[:40, :56], vmin=-largest, vmax=largest, cmap="RdBu_r", aspect="auto")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("input")
        axes.set_ylabel("hidden unit")
        axes.set_xticks([])
        axes.set_yticks([])
    drawn = bars.barh(list(numbers), list(numbers.values()), color=[ACCENT, PALE], height=0.5)
    bars.bar_label(drawn, fmt="%.3f", padding=4, fontsize=13)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.35)
    bars.set_xticks([0, 0.5, 1])
    bars.set_title("the same function?", fontsize=10)
    bars.spines[["top", "right"]].set_visible(False)
    return figure


def grokking() -> Figure:
    """All pairs of a training run that groks, beside its accuracies."""
    series = tnsim.load(SHIPPED)
    run = tnsim.pairwise(series, progress=False)
    phases = tnsim.reading.segment(run, 3)
    log = json.loads((SHIPPED / "log.json").read_text())["checkpoints"]
    rows = np.arange(len(log))
    ticks = rows[::2]
    labels = [f"{log[row]['step']:,}" for row in ticks]

    figure, (left, right) = figures.new_figure(ncols=2, width_ratios=[1, 1.05], figsize=(9.6, 4.2))
    image = left.imshow(run.similarity, vmin=-1, vmax=1, cmap="RdBu_r", origin="lower")
    left.set_title("similarity of every pair of checkpoints", fontsize=10)
    left.set_xticks(ticks, labels, rotation=60, ha="right", rotation_mode="anchor")
    left.set_yticks(ticks, labels)
    figure.colorbar(image, ax=left, shrink=0.85)

    right.plot(rows, [row["train_accuracy"] for row in log], "o-", color=PALE, label="training")
    accuracy = [row["validation_accuracy"] for row in log]
    right.plot(rows, accuracy, "o-", color=INK, label="validation")
    right.plot(rows, run.similarity[-1], "s-", color=ACCENT, label="similarity to the end")
    right.set_xticks(ticks, labels, rotation=60, ha="right", rotation_mode="anchor")
    right.set_xlabel("training step")
    show_legend(right, 4.4, "accuracy, and how much of the final function is there")
    right.title.set_fontsize(10)
    right.spines[["top", "right"]].set_visible(False)
    for start in phases.change_points:
        left.axhline(start - 0.5, color=INK, lw=0.8, ls="--")
        left.axvline(start - 0.5, color=INK, lw=0.8, ls="--")
        right.axvline(start - 0.5, color=INK, lw=0.8, ls="--")
    return figure


def ten_diagrams() -> Figure:
    """The ten diagrams of two bilinear layers: what is joined with what, and how often."""
    tree = orbits.Tree((2, 2))
    diagrams = orbits.diagrams(tree, tree, cross_only=False)
    places = {0: (0, 1), 1: (0, 0), 2: (1, 1), 3: (1, 0)}  # two nodes of the bra, two of the ket

    figure, panels = figures.new_figure(nrows=2, ncols=5, figsize=(9.6, 4.2))
    for axes, diagram in zip(panels.flat, diagrams, strict=True):
        for start, end, bend in _curves(diagram.edges):
            if start == end:
                _draw_loop(axes, places[start], outwards=-0.16 if start < 2 else 0.16)
            else:
                style = {"arrowstyle": "-", "connectionstyle": f"arc3,rad={bend}", "color": INK}
                axes.annotate("", places[start], places[end], arrowprops=style)
        for node, place in places.items():
            marker, colour = BRA if node < 2 else KET
            axes.plot(*place, marker, ms=11, color=colour)
        axes.set_title(f"{diagram.count} of 105", fontsize=10)
        axes.set_xlim(-0.5, 1.5)
        axes.set_ylim(-0.4, 1.4)
        axes.axis("off")
    return figure


def _curves(edges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, float]]:
    """Every edge with how far it bends, so that two between the same nodes are both seen."""
    for (start, end), times in Counter(map(tuple, edges)).items():
        bends = [0.0]
        if times == 2:
            bends = [-0.25, 0.25]
        for bend in bends:
            yield start, end, bend


def _draw_loop(axes: Axes, place: tuple[float, float], outwards: float) -> None:
    centre = (place[0] + outwards, place[1])
    axes.add_patch(Circle(centre, abs(outwards), fill=False, color=INK))


def main() -> None:
    images = HERE / "images"
    images.mkdir(exist_ok=True)
    same_function().savefig(images / "same-function.png", dpi=90)
    grokking().savefig(images / "grokking.png", dpi=90)


if __name__ == "__main__":
    main()
