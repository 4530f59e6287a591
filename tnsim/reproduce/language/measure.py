"""Six measures of a language model's checkpoints, beside its n-gram scores.

In: a run. Out: `Measured`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import tnsim
from tnsim.reproduce.language.corpus import text_of
from tnsim.reproduce.language.ngrams import common, losses, scores, windows
from tnsim.reproduce.language.setting import SERIES, Setting
from tnsim.reproduce.phases import squared_distances
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    import xarray as xr

MEASURES = {
    "similarity": "tensor, layer by layer",
    "held_out_text": "outputs over held-out text",
    "text_logits": "text, logits",
    "text_residual": "text, residual",
    "gaussian_logits": "Gaussian, logits",
    "weight_cosine": "weights",
}
"""Matrices by the name of their variable; the first is the closure's, the third on the paper's."""
_LOSS_SEQUENCES = 400


@dataclass(frozen=True)
class Measured:
    """What claims and figures read.

    Args:
        table: The matrices of `MEASURES`, `gaussian_outputs` with its `standard_error`, and over
            the checkpoints the held-out loss and n-gram scores.
        ngrams: Squared distances of the n-gram scores.
        digest: Of the text.
    """

    table: xr.Dataset
    ngrams: xr.DataArray
    digest: str


def measure(run: Run[Setting]) -> Measured:
    """Compare all checkpoints, and score them.

    Args:
        run: After `train`.

    Returns:
        Matrices and curves.
    """
    setting, text = run.setting, text_of(run)
    series = run.series(SERIES)
    steps = list(map(int, series.labels))
    models = [tnsim.Model(model.layers, n_ctx=setting.positions) for model in series]
    ids = windows(text.held_out, setting.positions, setting.sequences, run.seed)
    shape = (setting.sequences, setting.positions, models[0].d_in)
    normal = np.random.default_rng(run.seed).normal(size=shape).astype(np.float32)

    def all_pairs(name: str, metric: tnsim.Metric) -> tnsim.Pairwise:
        store = run.store(name)
        return tnsim.pairwise(
            models, metric, names=steps, dtype="float32", store=store, progress=run.progress
        )

    table: xr.Dataset = all_pairs("closure", tnsim.GaussianClosure())
    table["held_out_text"] = all_pairs("held-out-text", tnsim.Empirical(ids)).similarity
    sampled = all_pairs("gaussian", tnsim.Empirical(normal))
    table["gaussian_outputs"] = sampled.similarity
    table["standard_error"] = sampled.standard_error
    without_logits = [tnsim.Model(model.layers[:-1], n_ctx=model.n_ctx) for model in models]
    mean_cosine = tnsim.baselines.mean_cosine
    table["text_logits"] = mean_cosine(models, ids, names=steps)
    table["text_residual"] = mean_cosine(without_logits, ids, names=steps)
    table["gaussian_logits"] = mean_cosine(models, normal, names=steps)
    table["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=steps)

    sizes = range(2, setting.positions + 2)
    known = [common(text.training, n, setting.grams) for n in sizes]
    unseen = [windows(text.held_out, n, setting.windows, run.seed) for n in sizes]
    found = scores(models, known, unseen)
    for n, curve in zip(sizes, found.T, strict=True):
        table[f"{n}-gram score"] = ("a", curve)
    held_out = windows(text.held_out, setting.context + 1, _LOSS_SEQUENCES, run.seed)
    table["held-out loss"] = ("a", [losses(model, held_out).mean() for model in models])
    ngrams = table["similarity"].copy(data=squared_distances(found))
    return Measured(table, ngrams, text.digest)
