"""Differences of models: the change by which a network learned 9, found again in another.

The claims come from the paper's appendix B, and the figure is figure 7. The series
`seed-N/stages` and `seed-N/kept` are those of `forgetting`. `seed-N/pair` is another network from
another start: after the digits 0 to 8, and after learning all of them. The checkpoints of the
stages are compared with the difference of the pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import tnsim
from benchmarks.paper.claims import Claim, at_least, at_most, each, near
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.forgetting import (
    ACCURACIES,
    CURVES,
    PAPER,
    ForgettingSetting,
    Trainer,
    borders,
    differs_from_paper,
    ends,
    labels_of,
)
from benchmarks.paper.images import WANTED
from benchmarks.paper.run import ExperimentRun, seed_folders, unfinished_seeds, with_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


APART = 1000
"""Number that is added to a seed for the seed of its pair."""
DIFFERENCE = "learning 9"
"""The model with 9 minus the model without."""
WHERE = "appendix B, figure 7"
AUTHORS = {"add 8": -0.89, "add 9": 0.38, "remove 9": -0.86, "re-add 9": 0.39}
"""Slice 9 of the authors' similarity to the difference, at the ends of stages."""


def train(run: ExperimentRun[ForgettingSetting]) -> None:
    """Train every seed that is not complete.

    Args:
        run: The run whose checkpoints are written.
    """
    missing = unfinished_seeds(run, run.setting.seeds, ("stages", "kept", "pair"))
    if missing:
        trainer = Trainer(run)
        for seed in missing:
            trainer.stages(seed)
            trainer.pair(f"seed-{seed}/pair", seed + APART)


@dataclass(frozen=True)
class Measured:
    """Measured values, for the claims and the figure.

    Args:
        seeds: Results of each seed, all checkpoints (a) with the difference (b): `similarity` and
            `slices`; along training `stage` and accuracies.
        kept: Results of the control that goes on where 9 is removed; empty without controls.
    """

    seeds: tuple[Any, ...]
    kept: tuple[Any, ...]


def measure(run: ExperimentRun[ForgettingSetting]) -> Measured:
    """Compare all checkpoints of every seed with the difference of its pair.

    Args:
        run: A run after `train`.

    Returns:
        A result for each seed.
    """
    names = seed_folders(run, "the series stages and pair")
    stages = tuple(beside_difference(run, name, "stages") for name in names)
    kept = ()
    if all((run.checkpoints / name / "kept").is_dir() for name in names):
        kept = tuple(beside_difference(run, name, "kept") for name in names)
    return Measured(stages, kept)


def beside_difference(
    run: ExperimentRun[ForgettingSetting], name: str, part: str
) -> tnsim.Pairwise:
    """The checkpoints of a series compared with the difference, a model like any other."""
    without, with_9 = run.series(f"{name}/pair")
    log = run.log(f"{name}/{part}", *CURVES)
    labels = [f"{part} {n + 1}" for n in range(len(log))]
    if part == "stages":
        labels = labels_of(log)
    models = dict(zip(labels, run.series(f"{name}/{part}"), strict=True))
    result = tnsim.pairwise(
        models,
        # A difference of models is compared like a model, from the weights.
        other={DIFFERENCE: with_9 - without},
        slices=True,
        store=run.store(f"{name}-{part}"),
        progress=run.progress,
    )
    return with_curves(result, log, CURVES)


def claims(run: ExperimentRun[ForgettingSetting], measured: Measured) -> tuple[Claim, ...]:
    """The claims on slice 9 at the ends of stages, and on its changes between stages.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        The claims.
    """
    differs = differs_from_paper(run)
    rows = []
    for stage, authors in AUTHORS.items():
        rows.append(
            Claim(
                name=f"slice-9-at-{stage.replace(' ', '-')}",
                text=f"Slice 9 beside the difference, at the end of {stage}.",
                where=WHERE,
                authors=authors,
                ours=each(measured.seeds, lambda seed, name=stage: at_end(seed, name)),
                expected=near(authors, 0.15),
                why="another pair of networks",
                differs=differs,
            )
        )
    return (*rows, *_change_claims(measured))


def _change_claims(measured: Measured) -> list[Claim]:
    """The claims on the curves: slice 9 rises, falls and recovers, and other slices do so less."""
    controls = tuple(
        at_end(kept, "remove 9") - at_end(seed, "control")
        for seed, kept in zip(measured.seeds, measured.kept, strict=bool(measured.kept))
    )
    return [
        Claim(
            name="rises",
            text="Slice 9 turns towards the difference when 9 is added.",
            where=WHERE,
            authors=1.27,
            ours=each(measured.seeds, lambda seed: at_end(seed, "add 9") - at_end(seed, "add 8")),
            expected=at_least(0.3),
            why="change between the ends of two stages",
        ),
        Claim(
            name="falls",
            text="Slice 9 turns away from it when 9 is removed.",
            where=WHERE,
            authors=-1.24,
            ours=each(
                measured.seeds, lambda seed: at_end(seed, "remove 9") - at_end(seed, "control")
            ),
            control=controls,
            expected=at_most(-0.1),
            excess=at_most(-0.1) if controls else None,
            why="change between the ends of two stages; the control goes on with all digits",
        ),
        Claim(
            name="recovers",
            text="Slice 9 turns back when 9 is added again.",
            where=WHERE,
            authors=1.25,
            ours=each(
                measured.seeds, lambda seed: at_end(seed, "re-add 9") - at_end(seed, "remove 9")
            ),
            expected=at_least(0.1),
            why="change between the ends of two stages",
        ),
        Claim(
            name="isolated",
            text="The difference isolates output 9: other slices turn less.",
            where=WHERE,
            ours=each(measured.seeds, _times_other_slices),
            expected=at_least(2.0),
            why="ratio of the change when 9 is removed to the mean size of the nine others'",
        ),
    ]


def at_end(result: Any, stage: str, output: int = 9) -> float:
    """A slice of the similarity to the difference, at the end of a stage."""
    return float(result.slices[ends(result)[stage], 0, output])


def _times_other_slices(seed: Any) -> float:
    changes = []
    for output in range(seed.sizes["output"]):
        changes.append(abs(at_end(seed, "remove 9", output) - at_end(seed, "control", output)))
    return float(changes[9] / np.mean(changes[:9]))


def figures(run: ExperimentRun[ForgettingSetting], measured: Measured) -> dict[str, Figure]:
    """The similarity to the difference along training, of whole models and of slices.

    Args:
        run: The run that was measured.
        measured: Measured values of the run.

    Returns:
        A single figure, of the first seed.
    """
    result = measured.seeds[0]
    drawn = result.copy()
    slices = result.slices.values[:, 0]
    drawn["similarity_to_the_difference"] = ("a", result.similarity.values[:, 0])
    drawn["slice_9"] = ("a", slices[:, 9])
    drawn["other_slices,_mean"] = ("a", slices[:, :9].mean(1))
    strips = [
        ACCURACIES,
        "similarity_to_the_difference",
        ("slice_9", "other_slices,_mean"),
    ]
    points = borders(result)
    # curves run over the checkpoints alone: the one column is the difference
    return {"figure-7": tnsim.figures.curves_over_training(drawn.isel(b=0), strips, points)}


EXPERIMENT = Experiment(
    name="differences",
    title="Differences of models as models",
    where="section 2.4, appendix B, figure 7",
    default=ForgettingSetting(),
    full={"paper": PAPER},
    train=train,
    measure=measure,
    claims=claims,
    figures=figures,
    results=lambda measured: {"seed-0": measured.seeds[0]},
    data=WANTED,
    checkpoints="seed-0, seed-1, ...: series stages and pair (and kept) of each, with a log.json",
)
