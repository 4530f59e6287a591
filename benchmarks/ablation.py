"""What every part of the planner earns: planned multiplications with the part switched off.

    python benchmarks/ablation.py               # every work
    python benchmarks/ablation.py --works tree  # works whose name holds this text
    python benchmarks/ablation.py --warm        # seconds of a warm call as well

Parts:

- search: without it every product is contracted along its greedy path.
- factoring: without it sums take no common factors out.
- canonical forms: without them equal networks are recognised only where they are written alike.
- alternatives: without them every term is computed as it is written first.
- shares: without them every pair of many computes all that belongs to one model. The column counts
  the multiplications of a pair over many pairs.

Works are planned afresh for every variant. Ratios are to the complete planner; above 1 the part
saves work. The table is written to `results/ablation.md`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import works

import tnsim
from tnsim.compare.by_plans import plan_for
from tnsim.compare.request import ALL, CROSS
from tnsim.engine import hoisting
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import execution
from tnsim.engine.search import paths, routes, sharing
from tnsim.names import Pair, side_of
from tnsim.problems.families import choose

MANY = 10_000
"""Number of pairs over which what belongs to one model is computed once."""

RESULTS = Path(__file__).parent / "results" / "ablation.md"

Made = tuple[list[tnsim.Model], Any, tuple[Pair, ...]]
"""Two models, their metric, and the inner products that are planned."""


def _stacks(metric: Any, pairs: tuple[Pair, ...], *sizes: int) -> Callable[[], Made]:
    return lambda: ([works.stack(n, "float64", *sizes) for n in (0, 1)], metric, pairs)


def _language(pairs: tuple[Pair, ...]) -> Made:
    models = [works.language_model(seed, 4, 64, 384, 4) for seed in (0, 1)]
    return models, works.CLOSURE, pairs


def _attention() -> Made:
    blocks: list[Any] = [works.language_model(seed, 4, 64, 64, 8).layers[1] for seed in (0, 1)]
    return [tnsim.Model([block.layer], n_ctx=4) for block in blocks], tnsim.Gaussian(), ALL


WORKS: dict[str, Callable[[], Made]] = {
    "language models of width 64, a cosine": lambda: _language(ALL),
    "one attention layer of width 64, a cosine": _attention,
    "exact depth 2, d=128, r=256": _stacks(tnsim.Gaussian(), CROSS, 2, 128, 256, 10),
    "exact depth 2, width 24, a cosine": _stacks(tnsim.Gaussian(), ALL, 2, 24, 24, 24),
    "symmetric depth 3, width 24": _stacks(tnsim.Symmetric(), CROSS, 3, 24, 24, 10),
    "closure depth 8, d=64, r=96, a cosine": _stacks(works.CLOSURE, ALL, 8, 64, 96, 64),
    "tree depth 16, d=256, r=512": _stacks(tnsim.TreeSymmetric(), CROSS, 16, 256, 512, 256),
}


@contextmanager
def _greedy() -> Iterator[None]:
    searched = paths.route

    def greedy(inputs: Any, output: Any, items: Any, _: int, large: int) -> Any:
        return searched(inputs, output, items, 0, large)

    with patch.object(paths, "route", greedy):
        yield


@contextmanager
def _unfactored() -> Iterator[None]:
    with patch.object(sharing, "_most_saving", lambda *_: {}):
        yield


@contextmanager
def _as_written() -> Iterator[None]:
    def form(_: Any, atoms: Any, output: Any) -> Any:
        order = tuple(sorted(output))
        return (atoms, order), order

    with patch.object(sharing.Builder, "_canonical_form", form):
        yield


@contextmanager
def _first_way() -> Iterator[None]:
    with patch.object(routes.RouteSearch, "_cheapest_way", lambda *_: (0, ())):
        yield


VARIANTS: dict[str, Callable[[], Any]] = {
    "complete": ExitStack,
    "greedy only": _greedy,
    "no factoring": _unfactored,
    "no canonical forms": _as_written,
    "no alternatives": _first_way,
}


def planned(made: Made) -> Plan:
    """The plan of a work."""
    models, metric, pairs = made
    return plan_for(choose(models[0], models[1], metric), pairs, False, "float64")


def shares(made: Made) -> float:
    """Multiplications of a pair without shares over those with shares, over many pairs."""
    models, metric, _ = made
    plan = plan_for(choose(models[0], models[1], metric), CROSS, False, "float64")
    owners = {name: side for name in plan.shapes if (side := side_of(name)) is not None}
    crossing = hoisting.shares(plan, owners, MANY).crossing.plan
    return plan.multiplications / max(crossing.multiplications, 1)


def warm(made: Made, plan: Plan) -> float:
    """Seconds of a warm run of a plan on the host, on random arrays."""
    import numpy as np

    random = np.random.default_rng(0)
    with execution.precision():
        known = {name: random.normal(size=shape) for name, shape in plan.shapes.items()}
        arrays = execution.placed(known, "float64")
        times = []
        for _ in range(4):
            start = time.perf_counter()
            execution.fetched(plan, arrays)
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", default="", help="only works whose name holds this text")
    parser.add_argument("--warm", action="store_true", help="time warm runs too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["TNSIM_CACHE_DIR"] = ""
    columns = ["work", "multiplications", *list(VARIANTS)[1:], "no shares"]
    lines = [
        "# The parts of the planner",
        "",
        "`python benchmarks/ablation.py`; its first lines say what is counted.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for name, make in WORKS.items():
        if options.works not in name:
            continue
        made, cells, base = make(), [], (0, 0.0)
        for variant, switched in VARIANTS.items():
            with switched(), tnsim.using(tnsim.Session()):
                plan = planned(made)
                seconds = warm(made, plan) if options.warm else 0.0
            if variant == "complete":
                base = plan.multiplications, seconds
                cells.append(f"{base[0]:.3g}" + (f", {seconds:.3g} s" if options.warm else ""))
                continue
            ratio = f"{plan.multiplications / base[0]:.3f}"
            cells.append(ratio + (f", {seconds / base[1]:.2f}" if options.warm else ""))
        with tnsim.using(tnsim.Session()):
            cells.append(f"{shares(made):.2f}")
        lines.append(f"| {' | '.join([name, *cells])} |")
        print(lines[-1], flush=True)
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
