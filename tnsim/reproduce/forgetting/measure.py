"""Similarities across stages. In: a run. Out: `Measured`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import tnsim
from tnsim.reproduce.forgetting.setting import STAGES, Setting
from tnsim.reproduce.forgetting.train import REMOVED
from tnsim.reproduce.images import tested_with
from tnsim.reproduce.run import Run, seed_folders

WHOLE = ("similarity", "cka", "weight_cosine")
"""Measures of whole models."""
CURVES = ("stage", "validation_accuracy", "accuracy_of_9")
"""Along training, from the logs."""


@dataclass(frozen=True)
class Compared:
    """The checkpoints of one seed.

    Args:
        stages: Of all stages in order: `WHOLE`, `slices`, `weight_slices`, `slice_9` and
            `weight_slice_9`; along training `stage` and accuracies.
        kept: The same with the control in the place of the stage that removes 9, and without the
            one after it; None for checkpoints that have no control.
    """

    stages: Any
    kept: Any


@dataclass(frozen=True)
class Measured:
    """What the claims and the figures read.

    Args:
        seeds: One comparison for each seed.
    """

    seeds: tuple[Compared, ...]


def measure(run: Run[Setting]) -> Measured:
    """Compare all checkpoints of every seed.

    Args:
        run: After `train`.

    Returns:
        Matrices for each seed.
    """
    return Measured(tuple(of_seed(run, name) for name in seed_folders(run, "the series stages")))


def of_seed(run: Run[Setting], name: str) -> Compared:
    """All pairs of a seed's checkpoints, those of the control among them."""
    series = run.series(f"{name}/stages")
    models, log = list(series), run.log(f"{name}/stages", *CURVES)
    labels = labels_of(log)
    has_control = (run.checkpoints / name / "kept").is_dir()
    if has_control:
        kept_log = run.log(f"{name}/kept", *CURVES)
        models += list(run.series(f"{name}/kept"))
        labels += [f"kept {n}" for n in range(1, len(kept_log) + 1)]
        log = log + kept_log
    result = all_pairs(run, name, models, labels, tested_with(run, models[0].d_in))
    for curve in CURVES:
        result[curve] = ("a", [entry[curve] for entry in log])
    rows = np.arange(len(labels))
    is_control = np.array([label.startswith("kept") for label in labels])
    earlier = result.stage.values < REMOVED
    kept = None
    if has_control:
        kept = chosen(result, rows[earlier | is_control])
    return Compared(chosen(result, rows[~is_control]), kept)


def labels_of(log: Sequence[dict[str, float]]) -> list[str]:
    """Names of the checkpoints: the stage, and which one of it."""
    labels = ["start"]
    stages = [int(entry["stage"]) for entry in log]
    for row in range(1, len(log)):
        place = stages[1 : row + 1].count(stages[row])
        labels.append(f"{STAGES[stages[row]].name}, {place}")
    return labels


def chosen(result: Any, rows: Sequence[int] | np.ndarray) -> Any:
    """Some of the models, against each other."""
    return result.isel(a=rows, b=rows)


def all_pairs(
    run: Run[Setting],
    name: str,
    models: Sequence[tnsim.Model],
    labels: Sequence[str],
    tested: np.ndarray,
) -> tnsim.Pairwise:
    """Every matrix of the models."""
    named = dict(zip(labels, models, strict=True))
    result = tnsim.pairwise(named, slices=True, store=run.store(name), progress=run.progress)
    result["cka"] = tnsim.baselines.cka(models, tested, names=labels)
    result["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=labels)
    result["weight_slices"] = tnsim.baselines.weight_slices(models, names=labels)
    result["slice_9"] = result.slices.sel(output=9, drop=True)
    # weight slices have no label for their outputs
    result["weight_slice_9"] = result.weight_slices.isel(output=9, drop=True)
    return result
