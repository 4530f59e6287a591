"""The picture at the top of the README: one function in two sets of weights, and a run that groks.

    python docs/pictures/same_function.py [FOLDER]

FOLDER holds the checkpoints of a run with its log, by default a series that tnsim ships. The
picture is written beside this file; run it again whenever the series changes.
"""

import json
import sys
from pathlib import Path

import numpy as np

import tnsim
from tnsim.analysis.plots import new_figure

HERE = Path(__file__).parent
SHIPPED = Path(tnsim.__file__).parent / "data"
COLUMNS = 48  # of the weights that are shown; all rows are
CURVES = (
    ("train_accuracy", "training accuracy", "#1f77b4"),
    ("validation_accuracy", "validation accuracy", "#e67e22"),
)


def folder_of_series():
    """What was asked for, else the run that groks, else the first one shipped."""
    named = [Path(name) for name in sys.argv[1:]]
    known = (*named, SHIPPED / "grokking", SHIPPED / "modular-addition")
    return next(folder for folder in known if folder.is_dir())


def shuffled(model):
    """The same function: hidden units in another order, left and right swapped."""
    (layer,) = model.layers
    order = np.random.default_rng(0).permutation(layer.rank)
    left, right, down = layer.right[order], layer.left[order], layer.down[:, order]
    return tnsim.Model([tnsim.Bilinear(left, right, down)])


def draw_weights(part, model, other):
    """Left and right matrices of both networks, and what the two numbers say of them."""
    similarity = float(tnsim.similarity(model, other))
    cosine = float(tnsim.baselines.weight_cosine([model, other])[0, 1])
    what = "B is A with units permuted, left and right swapped"
    part.suptitle(f"One function, two sets of weights\n{what}", fontsize=10)
    grid = part.subplots(2, 2)
    for row, network in zip(grid, (model, other), strict=True):
        for axes, role in zip(row, ("left", "right"), strict=True):
            weight = getattr(network.layers[0], role)
            reach = np.abs(weight).max()
            style = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach, "interpolation": "nearest"}
            axes.imshow(weight[:, :COLUMNS], aspect="auto", **style)
            axes.set(xticks=(), yticks=())
    for axes, role in zip(grid[0], ("left", "right"), strict=True):
        axes.set_title(role, fontsize=10)
    for axes, name in zip(grid[:, 0], ("network A", "network B"), strict=True):
        axes.set_ylabel(name, fontsize=10)
    numbers = f"similarity {similarity:.3f}    cosine of weights {cosine:.3f}"
    part.supxlabel(numbers, fontsize=12)


def draw_run(part, labels, run, log):
    """The matrix of all pairs, beside the curves of the same checkpoints."""
    part.suptitle("A network that learns to add modulo 113\n", fontsize=10)
    heat, curves = part.subplots(1, 2, width_ratios=(1, 1.05))
    places = np.arange(len(labels))
    image = heat.imshow(run.similarity, vmin=0, vmax=1, origin="lower")
    heat.set_title("similarity of all pairs", fontsize=10)
    part.colorbar(image, ax=heat, shrink=0.7)
    style = {"marker": "o", "ms": 3.5}
    for key, label, colour in CURVES:
        curves.plot(places, [row[key] for row in log], color=colour, label=label, **style)
    to_last = run.similarity[:, -1]
    curves.plot(places, to_last, color="#2ca02c", label="similarity to the last", **style)
    curves.set_ylim(-0.03, 1.05)
    curves.set_title("along the run", fontsize=10)
    curves.grid(alpha=0.25)
    curves.spines[["top", "right"]].set_visible(False)
    part.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    for point in tnsim.reading.segment(run, 3).change_points:
        heat.axhline(point - 0.5, color="white", lw=1)
        heat.axvline(point - 0.5, color="white", lw=1)
        curves.axvline(point - 0.5, color="0.4", lw=0.9, ls=":")
    shown = places[:: max(1, len(places) // 10)]
    steps = [labels[n] for n in shown]
    for axis in (heat.xaxis, curves.xaxis):
        axis.set_ticks(shown, steps, rotation=90, fontsize=8)
    heat.yaxis.set_ticks(shown, steps, fontsize=8)
    heat.set_xlabel("training step", fontsize=9)


def main():
    folder = folder_of_series()
    series = tnsim.load(folder)
    (log,) = folder.glob("*.json")
    rows = {str(row["step"]): row for row in json.loads(log.read_text())["checkpoints"]}
    figure, axes = new_figure(figsize=(12.5, 4.4))
    axes.remove()
    first, second = figure.subfigures(1, 2, width_ratios=(1, 2.15))
    draw_weights(first, series[-1], shuffled(series[-1]))
    run = tnsim.pairwise(series)
    draw_run(second, series.labels, run, [rows[step] for step in series.labels])
    figure.savefig(HERE / "same-function.png", dpi=110, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
