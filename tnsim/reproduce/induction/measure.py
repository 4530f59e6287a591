"""Similarities along the induction series, beside what its checkpoints do. Out: `Measured`.

In: a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import tnsim
from tnsim.reproduce.induction.behaviour import behaviour
from tnsim.reproduce.induction.sequences import drawn
from tnsim.reproduce.induction.setting import Setting
from tnsim.reproduce.induction.train import series_of
from tnsim.reproduce.phases import squared_distances
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    import xarray as xr

MEASURES = ("similarity", "repeated_outputs", "weight_cosine")
TURNING = ("repeated accuracy", "log of induction score")
"""The curves whose turns are the phases of behaviour."""


@dataclass(frozen=True)
class Measured:
    """What claims and figures read.

    Args:
        table: the matrices of `MEASURES`, and the curves over its checkpoints.
        behaviour: squared distances of the curves that turn.
    """

    table: xr.Dataset
    behaviour: xr.DataArray


def measure(run: Run[Setting]) -> Measured:
    """Compare all checkpoints, and watch what each does.

    Args:
        run: of the shipped series, or of one that is given.

    Returns:
        Matrices and curves.
    """
    setting, series = run.setting, series_of(run)
    steps = list(map(int, series.labels))
    models = [tnsim.Model(model.layers, n_ctx=setting.positions) for model in series]
    repeated = drawn(
        setting.sequences,
        models[0].d_in,
        setting.context,
        setting.shortest,
        setting.longest,
        run.seed,
    )
    table: xr.Dataset = tnsim.pairwise(
        models,
        tnsim.GaussianClosure(),
        names=steps,
        dtype="float32",
        store=run.store("closure"),
        progress=run.progress,
    )
    table["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=steps)
    whole = [tnsim.Model(model.layers, n_ctx=setting.context) for model in series]
    outputs = tnsim.pairwise(whole, tnsim.Empirical(repeated.tokens), names=steps, dtype="float32")
    table["repeated_outputs"] = outputs.similarity

    with run.bar(len(whole), "behaviour", "model") as bar:
        curves = []
        for model in whole:
            curves.append(behaviour(model, repeated))
            bar.update()
    for name in curves[0]:
        table[name] = ("a", [curve[name] for curve in curves])
    table["log of induction score"] = np.log1p(np.maximum(table["induction score"], 0.0))
    turning = np.stack([table[name].values for name in TURNING], axis=1)
    return Measured(table, squared_distances(turning, steps))
