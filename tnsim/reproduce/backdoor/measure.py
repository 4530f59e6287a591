"""Similarities before and after the attack. In: a run. Out: `Measured`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import tnsim
from tnsim.reproduce.backdoor.setting import Setting
from tnsim.reproduce.backdoor.trigger import TARGET, stamp
from tnsim.reproduce.images import tested_with
from tnsim.reproduce.run import Run, seed_folders

CURVES = ("train_accuracy", "test_accuracy", "attack_success")
"""Along training, from the logs."""


@dataclass(frozen=True)
class Compared:
    """The checkpoints of one seed, twice: with the attack and with the control at their end.

    Args:
        attack: Over steps `similarity`, `symmetric` and `fitted`, slices of the target under the
            first two, all `slices`, `weight_cosine`, and behaviour on clean and on stamped images;
            along training accuracies and attack success.
        control: The same, of the clean continuation; None for checkpoints that have none.
        injection: The row of the first attacked checkpoint.
    """

    attack: Any
    control: Any
    injection: int


@dataclass(frozen=True)
class Measured:
    """What the claims and the figure read.

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
    names = seed_folders(run, "the series clean, attack and control")
    return Measured(tuple(of_seed(run, name) for name in names))


def of_seed(run: Run[Setting], name: str) -> Compared:
    """All pairs of a seed's checkpoints, clean, attacked and control at once."""
    branches = {"clean": run.series(f"{name}/clean"), "attack": run.series(f"{name}/attack")}
    if (run.checkpoints / name / "control").is_dir():
        branches["control"] = run.series(f"{name}/control")
    models: list[tnsim.Model] = []
    labels: list[str] = []
    for branch, series in branches.items():
        models += list(series)
        labels += [f"{branch} {step}" for step in series.labels]
    result = all_pairs(run, name, models, labels, tested_with(run, models[0].d_in))
    clean = run.log(f"{name}/clean", *CURVES)
    ways = {}
    for branch in list(branches)[1:]:
        rows = [n for n, label in enumerate(labels) if label.split()[0] in ("clean", branch)]
        ways[branch] = along(result, rows, clean + run.log(f"{name}/{branch}", *CURVES))
    return Compared(ways["attack"], ways.get("control"), len(clean))


def all_pairs(
    run: Run[Setting],
    name: str,
    models: Sequence[tnsim.Model],
    labels: Sequence[str],
    tested: np.ndarray,
) -> tnsim.Pairwise:
    """Every matrix of the models, under three metrics and the measures they are compared with."""
    named = dict(zip(labels, models, strict=True))
    result = tnsim.pairwise(named, slices=True, store=run.store(name), progress=run.progress)
    result[f"slice_{TARGET}"] = result.slices.sel(output=TARGET, drop=True)
    store = run.store(f"{name}-symmetric")
    other = tnsim.pairwise(named, tnsim.Symmetric(), slices=True, store=store)
    result["symmetric"] = other.similarity
    result[f"symmetric_slice_{TARGET}"] = other.slices.sel(output=TARGET, drop=True)
    fitted = tnsim.Gaussian.fit(tested)
    result["fitted"] = tnsim.pairwise(named, fitted, store=run.store(f"{name}-fitted")).similarity
    result["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=labels)
    for kind, inputs in (("clean", tested), ("poisoned", stamp(tested))):
        behaviour = tnsim.baselines.mean_cosine(models, inputs, names=labels)
        result[f"{kind}_behaviour"] = behaviour
    return result


def along(result: tnsim.Pairwise, rows: Sequence[int], log: Sequence[dict[str, float]]) -> Any:
    """Some of the models, labelled by step, with what the log says of them."""
    steps = [int(entry["step"]) for entry in log]
    chosen = result.isel(a=rows, b=rows).assign_coords(a=steps, b=steps)
    for curve in CURVES:
        chosen[curve] = ("a", [entry[curve] for entry in log])
    return chosen
