"""All pairs of language-model checkpoints: seconds a model and seconds a pair, and those of a run.

    python benchmarks/checkpoints.py --sizes small --measured 8 --models 30
    python benchmarks/checkpoints.py --sizes paper --measured 3 --models 101
    python benchmarks/checkpoints.py --sizes paper --models 101              # all of it, on a GPU

Random models of two attention layers with biases on queries and keys, `GaussianClosure`, float32.
JAX computes on a GPU where it is installed for one. Runs of two and of `--measured` models, both
with compiled programs, tell what is done once for each model (its norm, and its moments at every
layer) from what every pair costs; without `--measured` the whole run is timed as well.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from works import language_model

import tnsim
from tnsim.engine.devices import device

SIZES = {"small": (64, 384, 4), "paper": (256, 4096, 8)}
"""Width, vocabulary and heads."""
METRIC = tnsim.GaussianClosure()


def seconds(models: list[tnsim.Model]) -> float:
    """A run of all pairs."""
    start = time.perf_counter()
    tnsim.pairwise(models, METRIC, dtype="float32", progress=True)
    return time.perf_counter() - start


def pairs(models: int) -> int:
    """Pairs of so many models, each with itself among them."""
    return models * (models + 1) // 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument("--n-ctx", type=int, default=4)
    parser.add_argument("--models", type=int, default=101, help="models of the whole run")
    parser.add_argument("--measured", type=int, help="models of the part that is measured")
    options = parser.parse_args()
    width, vocabulary, heads = SIZES[options.sizes]
    count = options.measured or options.models
    models = []
    for seed in range(count):
        models.append(language_model(seed, options.n_ctx, width, vocabulary, heads))
    print(f"on {device()}; compiling and two models: {seconds(models[:2]):.1f} s")
    found = seconds(models[:2]), seconds(models)
    work = [[2, pairs(2)], [count, pairs(count)]]
    model, pair = np.linalg.solve(work, found)
    whole = options.models * model + pairs(options.models) * pair
    print(f"{count} models, {pairs(count)} pairs: {found[1]:.1f} s")
    print(f"{model:.3g} s a model, {pair:.3g} s a pair")
    print(f"{options.models} models, {pairs(options.models)} pairs: {whole / 60:.1f} minutes")


if __name__ == "__main__":
    main()
