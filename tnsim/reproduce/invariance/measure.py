"""Similarities of networks and their copies. In: a run. Out: `Measured`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import tnsim
from tnsim.reproduce.invariance.setting import Setting
from tnsim.reproduce.run import Run

if TYPE_CHECKING:
    import xarray as xr

ONE_LAYER = (
    "original",
    "permuted",
    "swapped",
    "rescaled",
    "both",
    "perturbed",
    "backdoor",
    "unrelated",
    "negated",
)
SAME_FUNCTION = ("permuted", "swapped", "rescaled", "both")


@dataclass(frozen=True)
class Measured:
    """What the claims and the figure read.

    Args:
        values: By name, one for each network.
        pictured: All pairs of the first network's copies, in `similarity`, `weight_cosine` and
            `output_cosine`.
    """

    values: dict[str, tuple[float, ...]]
    pictured: xr.Dataset


def measure(run: Run[Setting]) -> Measured:
    """Compare every network with its copies.

    Args:
        run: After `train`.

    Returns:
        Values for each network, and matrices of the first.
    """
    names = [f"seed-{run.seed + n}" for n in range(run.setting.networks)]
    values: dict[str, list[float]] = {}
    tables: list[xr.Dataset] = []
    with run.bar(len(names), "networks", "network") as bar:
        for name in names:
            series = run.series(name)
            copies = {path.stem: model for path, model in zip(series.paths, series, strict=True)}
            table = all_pairs(copies, run)
            measured = {**of_one_layer(table), **of_equivalence(copies), **of_depth(copies, run)}
            for key, value in measured.items():
                values.setdefault(key, []).append(value)
            tables.append(table)
            bar.update()
    return Measured({key: tuple(found) for key, found in values.items()}, tables[0])


def all_pairs(copies: Mapping[str, tnsim.Model], run: Run[Setting]) -> xr.Dataset:
    """The copies of the one-layer network under three measures.

    The data have a last input of zero, so what reads it alone is never seen.
    """
    models = {name: copies[name] for name in ONE_LAYER}
    data = np.random.default_rng(run.seed).normal(size=(run.setting.samples, run.setting.inputs))
    data[:, -1] = 0.0
    result = tnsim.pairwise(models)
    result["weight_cosine"] = tnsim.baselines.weight_cosine(list(models.values()), names=ONE_LAYER)
    result["output_cosine"] = tnsim.baselines.output_cosine(
        list(models.values()), data, names=ONE_LAYER
    )
    return result


def of_one_layer(table: xr.Dataset) -> dict[str, float]:
    """What three measures say of every copy beside the original, as `MEASURE COPY`."""
    to_original = table.sel(b="original")
    values = {}
    for name in ("similarity", "weight_cosine", "output_cosine"):
        for copy in ONE_LAYER:
            values[f"{name} {copy}"] = float(to_original[name].sel(a=copy))
    return values


def of_equivalence(copies: Mapping[str, tnsim.Model]) -> dict[str, float]:
    """How far metrics are from calling equal functions equal."""
    original = copies["original"]
    apart: dict[str, list[float]] = {"symmetric": [], "gaussian": []}
    for name in SAME_FUNCTION:
        for metric in (tnsim.Symmetric(), tnsim.Gaussian()):
            cosine = tnsim.similarity(original, copies[name], metric)
            apart[metric.name].append(abs(1 - float(cosine)))
    squares, mixed = copies["squares"], copies["mixed"]
    return {
        "gaussian apart": max(apart["gaussian"]),
        "symmetric apart": max(apart["symmetric"]),
        "tree of one polynomial": float(tnsim.similarity(squares, mixed, tnsim.TreeSymmetric())),
        "symmetric of one polynomial": float(tnsim.similarity(squares, mixed, tnsim.Symmetric())),
    }


def of_depth(copies: Mapping[str, tnsim.Model], run: Run[Setting]) -> dict[str, float]:
    """Two layers: another hidden basis, and closed forms beside sampling and each other."""
    deep, changed = copies["deep"], copies["deep changed"]
    samples, seed = run.setting.samples, run.seed
    sampled = tnsim.check(deep, changed, tnsim.Gaussian(), samples=samples, seed=seed)
    closure = tnsim.similarity(deep, changed, tnsim.GaussianClosure())
    return {
        "similarity deep turned": float(tnsim.similarity(deep, copies["deep turned"])),
        "deviation from sampling": abs(sampled.deviation),
        "closure apart": abs(float(closure) - float(sampled.similarity)),
    }
