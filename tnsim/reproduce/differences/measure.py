"""Stages beside a difference of two models. In: a run. Out: `Measured`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tnsim
from tnsim.reproduce.forgetting.measure import CURVES, labels_of
from tnsim.reproduce.forgetting.setting import Setting
from tnsim.reproduce.run import Run, seed_folders

DIFFERENCE = "learning 9"
"""The model with 9 minus the model without."""


@dataclass(frozen=True)
class Measured:
    """What the claims and the figure read.

    Args:
        seeds: For each seed all checkpoints (a) beside the difference (b): `similarity` and
            `slices`; along training `stage` and accuracies.
        kept: The same of the control that goes on where 9 is removed; empty without controls.
    """

    seeds: tuple[Any, ...]
    kept: tuple[Any, ...]


def measure(run: Run[Setting]) -> Measured:
    """Compare all checkpoints of every seed with the difference of its pair.

    Args:
        run: After `train`.

    Returns:
        A result for each seed.
    """
    names = seed_folders(run, "the series stages and pair")
    stages = tuple(beside_difference(run, name, "stages") for name in names)
    kept = ()
    if all((run.checkpoints / name / "kept").is_dir() for name in names):
        kept = tuple(beside_difference(run, name, "kept") for name in names)
    return Measured(stages, kept)


def beside_difference(run: Run[Setting], name: str, part: str) -> tnsim.Pairwise:
    """The checkpoints of a series beside the difference, which is a model like any other."""
    without, with_9 = run.series(f"{name}/pair")
    log = run.log(f"{name}/{part}", *CURVES)
    labels = [f"{part} {n + 1}" for n in range(len(log))]
    if part == "stages":
        labels = labels_of(log)
    models = dict(zip(labels, run.series(f"{name}/{part}"), strict=True))
    result = tnsim.pairwise(
        models,
        other={DIFFERENCE: with_9 - without},
        slices=True,
        store=run.store(f"{name}-{part}"),
        progress=run.progress,
    )
    for curve in CURVES:
        result[curve] = ("a", [entry[curve] for entry in log])
    return result
