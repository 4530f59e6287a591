"""Similarities along the induction series, beside what its checkpoints do. Out: `Measured`.

In: a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

import tnsim
from tnsim.reproduce.induction.behaviour import behaviour
from tnsim.reproduce.induction.sequences import drawn
from tnsim.reproduce.induction.setting import Setting
from tnsim.reproduce.induction.train import series_of
from tnsim.reproduce.phases import squared_distances
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    import xarray as xr

MEASURES = {
    "similarity": "tensor, layer by layer",
    "repeated_outputs": "outputs on repeated tokens",
    "weight_cosine": "weights",
}
"""Matrices by the name of their variable."""


@dataclass(frozen=True)
class Measured:
    """What claims and figures read.

    Args:
        table: The matrices of `MEASURES`, and the curves over its checkpoints.
        behaviour: Squared distances of accuracies and of the logarithm of the score.
        turns: Rows at which the accuracy on repeated tokens leaves chance, and arrives.
    """

    table: xr.Dataset
    behaviour: xr.DataArray
    turns: tuple[int, int]


def measure(run: Run[Setting]) -> Measured:
    """Compare all checkpoints, and watch what each does.

    Args:
        run: Of the shipped series, or of one that is given.

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
    accuracy = table["repeated accuracy"].values
    score = np.log1p(np.maximum(table["induction score"].values, 0.0))
    apart = squared_distances(np.stack([accuracy, score], axis=1))
    behaved = table["similarity"].copy(data=apart)
    return Measured(table, behaved, turns_of(accuracy, 1 / models[0].d_in))


def turns_of(accuracy: Float[np.ndarray, " K"], chance: float) -> tuple[int, int]:
    """The first rows at which an accuracy is twice chance, and nine tenths of its last value.

    Args:
        accuracy: Along a run.
        chance: The accuracy of guessing.

    Returns:
        Two rows.

    Raises:
        ResultError: It is never twice chance, or it arrives at once.

    Example:
        >>> turns_of(np.array([0.1, 0.3, 0.8, 0.95, 1.0]), 0.1)
        (1, 3)
    """
    begins = int((accuracy > 2 * chance).argmax())
    arrives = int((accuracy > 0.9 * accuracy[-1]).argmax())
    if not 0 < begins < arrives:
        raise tnsim.ResultError(
            f"the accuracy does not rise in three phases: {accuracy.round(2).tolist()}; "
            "give checkpoints from before, within and after learning"
        )
    return begins, arrives
