"""All pairs of language-model checkpoints: seconds a pair, and those of a run.

    python benchmarks/checkpoints.py --sizes small --models 30
    python benchmarks/checkpoints.py --sizes paper --measured 8
    python benchmarks/checkpoints.py --sizes paper --models 101 --device gpu    # all of it

Random models of two attention layers with biases on queries and keys, `GaussianClosure`, float32.
Two runs of `--measured` models: the first compiles, the second has its programs. What is done once
for each model (its norm, and its moments at every layer) is shared among its pairs, which are fewer
here than in a larger run, so a pair costs less there. Without `--measured` all models are measured.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

SIZES = {"small": (64, 384, 4), "paper": (256, 4096, 8)}
"""Width, vocabulary and heads."""


def seconds(models: list) -> float:
    """A run of all pairs."""
    import tnsim

    start = time.perf_counter()
    tnsim.pairwise(models, tnsim.GaussianClosure(), dtype="float32", progress=True)
    return time.perf_counter() - start


def pairs(models: int) -> int:
    """Pairs of so many models, each with itself among them."""
    return models * (models + 1) // 2


def report(options: argparse.Namespace) -> str:
    """What both runs of all measured models take, and what follows for the whole run."""
    from works import language_model

    from tnsim.engine.runtime.devices import device, processors

    width, vocabulary, heads = SIZES[options.sizes]
    count = options.measured or options.models
    models = []
    for seed in range(count):
        models.append(language_model(seed, options.n_ctx, width, vocabulary, heads))
    first, again = seconds(models), seconds(models)
    pair = again / pairs(count)
    whole = pairs(options.models) * pair
    lines = [
        f"Width {width}, vocabulary {vocabulary}, {heads} heads, n_ctx {options.n_ctx}, "
        f"on {device()} with {processors()} cores.",
        "",
        f"- {count} models, {pairs(count)} pairs: {first:.1f} s, and {again:.1f} s a second time",
        f"- {pair:.3g} s a pair",
    ]
    if count < options.models:
        minutes = f"{whole / 60:.1f} minutes at that rate"
        lines.append(f"- {options.models} models, {pairs(options.models)} pairs: {minutes}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument("--n-ctx", type=int, default=4)
    parser.add_argument("--models", type=int, default=101, help="models of the whole run")
    parser.add_argument("--measured", type=int, help="models of the part that is measured")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="gpu: JAX's own")
    parser.add_argument("--out", type=Path, help="a file for the report")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
    text = report(options)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
