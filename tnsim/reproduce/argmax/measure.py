"""Similarities of all checkpoints on every distribution. In: a run. Out: `Measured`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

import tnsim
from tnsim.reproduce.argmax.distributions import SAMPLERS
from tnsim.reproduce.argmax.setting import Setting
from tnsim.reproduce.argmax.train import seeds_of, series_of
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    import xarray as xr

MEASURES = ("symmetric", "gaussian", "fitted", "weight_cosine")


@dataclass(frozen=True)
class Measured:
    """What the claims and the figure read, by distribution.

    Args:
        tables: All pairs of checkpoints of the first repetition: `similarity` under the symmetrised
            metric of the authors' code, also as `symmetric`; `gaussian`; `fitted` to the inputs;
            `output_cosine` on the inputs; `weight_cosine`.
        r: Pearson's, of outputs with each of `MEASURES`, for each repetition.
        accuracy: At the end of every training.
    """

    tables: dict[str, xr.Dataset]
    r: dict[str, dict[str, tuple[float, ...]]]
    accuracy: dict[str, tuple[float, ...]]


def measure(run: Run[Setting]) -> Measured:
    """Compare all checkpoints of every distribution, under several measures.

    Args:
        run: After `train`.

    Returns:
        Matrices, correlations and accuracies.
    """
    tables, r, accuracy = {}, {}, {}
    names = run.setting.distributions
    with run.bar(len(names), "comparing", "distribution") as bar:
        for name in names:
            bar.set_description(f"comparing on {name}")
            repetitions = apart(all_pairs(run, name), run.setting.repetitions)
            tables[name] = repetitions[0]
            r[name] = {one: correlations(repetitions, one) for one in MEASURES}
            logs = [run.log(series) for series in series_of(run, name)]
            accuracy[name] = tuple(log[-1]["accuracy"] for log in logs)
            bar.update()
    return Measured(tables, r, accuracy)


def all_pairs(run: Run[Setting], distribution: str) -> xr.Dataset:
    """The matrices of one distribution over all trainings, labelled `SEED:STEP`."""
    models, names = [], []
    for seed, name in zip(seeds_of(run), series_of(run, distribution), strict=True):
        series = run.series(name)
        models += list(series)
        names += [f"{seed}:{step}" for step in series.labels]
    inputs = np.asarray(SAMPLERS[distribution](jax.random.key(99), run.setting.samples))
    metrics = {
        "symmetric": tnsim.Symmetric(),
        "gaussian": tnsim.Gaussian(),
        "fitted": tnsim.Gaussian.fit(inputs),
    }
    results = {}
    for name, metric in metrics.items():
        store = run.store(f"{distribution}-{name}")
        results[name] = tnsim.pairwise(models, metric, names=names, store=store)
    table = results["symmetric"]
    for name, result in results.items():
        table[name] = result.similarity
    table["output_cosine"] = tnsim.baselines.output_cosine(models, inputs, names=names)
    table["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=names)
    return table


def apart(table: xr.Dataset, repetitions: int) -> list[xr.Dataset]:
    """The pairs within each repetition."""
    count = table.sizes["a"] // repetitions
    rows = [slice(n * count, (n + 1) * count) for n in range(repetitions)]
    return [table.isel(a=own, b=own) for own in rows]


def correlations(tables: list[xr.Dataset], measure: str) -> tuple[float, ...]:
    """Pearson's r of a measure with the cosine of outputs, for each table."""
    found = [tnsim.reading.correlation(table[measure], table.output_cosine) for table in tables]
    return tuple(one.pearson for one in found)
