"""`tnsim demo`. In: the shipped checkpoints. Out: what tnsim says of them, a picture, a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tnsim.cli.options import check_outputs, save_picture, say
from tnsim.files import PNG

if TYPE_CHECKING:
    from tnsim.analysis.phases import Segmentation
    from tnsim.checkpoints.series import Series
    from tnsim.gram.result import Pairwise

MIDDLE = 3200
"""A step at which what was trained on is known by heart, and nothing else."""
PAGE = "report.html"
CURVES = ("train_accuracy", "validation_accuracy")


def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the picture and the matrix.")
    ] = Path("tnsim-demo"),
) -> None:
    """Compare the shipped checkpoints of a network that groks, all pairs, and draw the matrix."""
    import tnsim
    from tnsim.analysis import baselines, reading, report
    from tnsim.gram import export

    picture, matrix, page = (out / name for name in ("similarity.png", "similarity.npz", PAGE))
    check_outputs({picture: PNG, matrix: export.NPZ, page: report.PAGE})
    folder = Path(tnsim.__file__).parent / "data" / "grokking"
    series = tnsim.Series(folder)
    _introduce(series)
    result = tnsim.pairwise(series, progress=True)
    result["weight_cosine"] = baselines.weight_cosine(series)
    phases = reading.segment(result, 3)
    log = json.loads((folder / "log.json").read_text())["checkpoints"]
    for curve in CURVES:
        result[curve] = ("a", [entry[curve] for entry in log])

    out.mkdir(parents=True, exist_ok=True)
    matrices = ["similarity", "weight_cosine"]
    figure = result.tnsim.plot("heatmap", matrices, phases.change_points, [CURVES])
    save_picture(figure, picture)
    export.write_npz(result, matrix)
    report.write(result, page, "Modular addition")
    say(f"\nwrote {picture}, {matrix} and {page}, a page to explore")
    _explain(result, phases)


def _introduce(series: Series) -> None:
    """What is compared: the checkpoints, the last as a network, and what one pair costs."""
    import tnsim

    say(
        f"{len(series)} checkpoints of one network learning (a + b) mod 113, "
        f"steps {series.labels[0]} to {series.labels[-1]}"
    )
    say(f"{series[-1]}\n")
    network = tnsim.network(series[-1])
    say(f"network: {network.num_tensors} tensors, tags {', '.join(sorted(network.tags))}\n")
    say(f"{tnsim.plan(series[0], series[-1])}\n")


def _explain(result: Pairwise, phases: Segmentation) -> None:
    """What is to be seen in the picture."""
    first, last = result["a"].values[[0, -1]]
    to_last = result.similarity.sel(b=last)
    first_to_last = float(to_last.sel(a=first))
    middle_to_last = float(to_last.sel(a=MIDDLE))
    starts = ", ".join(map(str, phases.labels))
    say(
        "What is to be seen: three blocks along the diagonal, the steps that are still close to "
        "the initialisation, those that know the training set by heart, and the solution that "
        f"generalises, each unlike the others (similarity of step {first} to step {last}: "
        f"{first_to_last:.2f}, of step {MIDDLE}: {middle_to_last:.2f}). "
        f"The best three phases start at steps {first}, {starts}; the curves above the matrix show "
        "training accuracy rise with the second and validation accuracy jump with the third."
    )
