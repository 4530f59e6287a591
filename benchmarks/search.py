"""The search of the engine: multiplications and CPU seconds of planning, beside those of before.

    python benchmarks/search.py                    # every problem, beside the figures kept before
    python benchmarks/search.py --problems tree    # problems whose name holds this text
    python benchmarks/search.py --keep             # keep these figures as those of before

Every problem is planned once in a session of its own, without a folder of caches. Terms are the
products of all definitions, those of alternatives included, operands the most of one of them.
Operations are those of all programs of the plan. Planning includes writing the diagrams down.
Figures are kept in a JSON file beside the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import sums
import works

import tnsim
from tnsim.compare import by_plans
from tnsim.compare.request import ALL, CROSS
from tnsim.engine import planner
from tnsim.engine.ir.problem import Problem
from tnsim.engine.plan import Plan
from tnsim.problems.families import choose
from tnsim.tensor_networks import contraction

RESULTS = Path(__file__).parent / "results" / "search.json"


class Question(NamedTuple):
    """What is planned: two models under a metric, or a sum of networks."""

    plan: Callable[[], Plan]


def models(make: Callable[[int], tnsim.Model], metric: Any, pairs: tuple = CROSS) -> Question:
    def plan() -> Plan:
        family = choose(make(0), make(1), metric)
        return by_plans.plan_for(family, pairs, False, "float64")

    return Question(plan)


def stacks(metric: Any, *sizes: int, pairs: tuple = CROSS) -> Question:
    return models(lambda seed: works.stack(seed, "float64", *sizes), metric, pairs)


def biased(seed: int, depth: int, width: int, rank: int) -> tnsim.Model:
    """Bilinear layers with skips and biases."""
    random = np.random.default_rng(seed)
    layers = []
    for layer in works.stack(seed, "float64", depth, width, rank, width).layers:
        biases = [random.normal(size=size) for size in (rank, rank, width)]
        layers.append(tnsim.Residual(tnsim.Bilinear(layer.left, layer.right, layer.down, *biases)))
    return tnsim.Model(layers)


def language(n_ctx: int, *sizes: int, pairs: tuple = CROSS) -> Question:
    return models(lambda seed: works.language_model(seed, n_ctx, *sizes), works.CLOSURE, pairs)


def attention(seed: int) -> tnsim.Model:
    """One attention layer of width 64."""
    layer: Any = works.language_model(seed, 4, 64, 64, 8).layers[1]
    return tnsim.Model([layer.layer], n_ctx=4)


def networks(what: str, width: int) -> Question:
    """A sum of quimb networks."""
    return Question(
        lambda: tnsim.tensor_networks.contract_expression(sums.SUMS[what](width)[2]).plan
    )


GAUSSIAN, SYMMETRIC, TREE = tnsim.Gaussian(), tnsim.Symmetric(), tnsim.TreeSymmetric()

PROBLEMS: dict[str, Question] = {
    "language model, cross term, n_ctx 4": language(4, 256, 4096, 8),
    "language model, cross term, n_ctx 8": language(8, 256, 4096, 8),
    "language model, cross term, n_ctx 16": language(16, 256, 4096, 8),
    "language models of width 64, a cosine": language(4, 64, 384, 4, pairs=ALL),
    "one attention layer of width 64, a cosine": models(attention, GAUSSIAN, ALL),
    "tree depth 16, d=256, r=512": stacks(TREE, 16, 256, 512, 256),
    "tree depth 2, d=8, a cosine": stacks(TREE, 2, 8, 8, 8, pairs=ALL),
    "tree depth 8, d=64, biases, a cosine": models(lambda n: biased(n, 8, 64, 64), TREE, ALL),
    "tree depth 8, d=256, r=512, biases": models(lambda n: biased(n, 8, 256, 512), TREE),
    "closure depth 8, d=64, r=96, a cosine": stacks(works.CLOSURE, 8, 64, 96, 64, pairs=ALL),
    "closure depth 4, d=16, biases": models(lambda n: biased(n, 4, 16, 16), works.CLOSURE),
    "exact depth 1, d=64": stacks(GAUSSIAN, 1, 64, 64, 64),
    "exact depth 2, d=128, r=256, 10 outputs": stacks(GAUSSIAN, 2, 128, 256, 10),
    "exact depth 2, d=32": stacks(GAUSSIAN, 2, 32, 32, 32),
    "exact depth 2, d=24, a cosine": stacks(GAUSSIAN, 2, 24, 24, 24, pairs=ALL),
    "exact depth 2, d=24, biases": models(lambda n: biased(n, 2, 24, 24), GAUSSIAN),
    "exact depth 2, d=12, biases, a cosine": models(lambda n: biased(n, 2, 12, 12), GAUSSIAN, ALL),
    "exact depth 3, d=r=32, 10 outputs": stacks(GAUSSIAN, 3, 32, 32, 10),
    "exact depth 3, d=r=32, 32 outputs": stacks(GAUSSIAN, 3, 32, 32, 32),
    "exact depth 3, d=12": stacks(GAUSSIAN, 3, 12, 12, 12),
    "exact depth 3, d=12, a cosine": stacks(GAUSSIAN, 3, 12, 12, 12, pairs=ALL),
    "exact depth 3, d=8, biases": models(lambda n: biased(n, 3, 8, 8), GAUSSIAN),
    "symmetric depth 2, d=24": stacks(SYMMETRIC, 2, 24, 24, 10),
    "symmetric depth 3, d=24": stacks(SYMMETRIC, 3, 24, 24, 10),
} | {
    f"{what}, width {width}": networks(what, width)
    for what, width in [*((sums.FEW, n) for n in (8, 16, 32)), *((sums.MANY, n) for n in (8, 16))]
}


def measured(question: Question) -> dict[str, float]:
    """The figures of a problem, planned afresh."""
    problems: list[Problem] = []
    spent = [0.0]
    original = planner.plan_problem

    def watched(problem: Problem, *rest: Any, **others: Any) -> Plan:
        problems.append(problem)
        start = time.process_time()
        try:
            return original(problem, *rest, **others)
        finally:
            spent[0] += time.process_time() - start

    with (
        patch.object(by_plans, "plan_problem", watched),
        patch.object(contraction, "plan_problem", watched),
        tnsim.using(tnsim.Session()),
    ):
        plan = question.plan()
    products = [
        product
        for problem in problems
        for stage in problem.stages
        for definition in stage.definitions
        for term in definition.terms
        for product in term.products()
    ]
    return {
        "terms": len(products),
        "operands": max(map(len, products)),
        "operations": sum(program.length for program in plan.programs),
        "multiplications": plan.multiplications,
        "peak GiB": plan.peak_bytes / 2**30,
        "seconds": spent[0],
    }


def written(figures: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """The figures and, beside them, the table of them."""
    path.write_text(json.dumps(figures, indent=1) + "\n")
    columns = [
        "problem",
        "terms",
        "operands",
        "operations",
        "multiplications before",
        "now",
        "now / before",
        "planning s before",
        "now",
        "now / before",
        "planned GiB now / before",
    ]
    lines = [
        "# The search",
        "",
        "`python benchmarks/search.py`; its first lines say what is counted.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    ratios: dict[str, list[float]] = {"multiplications": [], "seconds": [], "peak GiB": []}
    for name, now in figures["now"].items():
        before = figures["before"].get(name)
        cells = [name, f"{now['terms']}", f"{now['operands']}", f"{now['operations']}"]
        for figure in ("multiplications", "seconds"):
            past = before[figure] if before else math.nan
            cells += [f"{past:.3g}", f"{now[figure]:.3g}", f"{now[figure] / past:.2f}"]
        cells.append(f"{now['peak GiB'] / before['peak GiB']:.2f}" if before else "")
        lines.append(f"| {' | '.join(cells)} |")
        if before:
            for figure, of_all in ratios.items():
                of_all.append(now[figure] / before[figure])
    means = [f"{math.exp(np.mean(np.log(of_all))):.2f}" for of_all in ratios.values() if of_all]
    if means:
        cells = ["geometric mean", *[""] * 5, means[0], "", "", *means[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default="", help="only problems whose name holds this text")
    parser.add_argument("--keep", action="store_true", help="keep the figures as those of before")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file; the table is beside")
    options = parser.parse_args()
    os.environ["TNSIM_CACHE_DIR"] = ""
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    figures = {"before": known.get("before", {}), "now": known.get("now", {})}
    measured(PROBLEMS["tree depth 2, d=8, a cosine"])  # imports
    for name, question in PROBLEMS.items():
        if options.problems not in name:
            continue
        found = measured(question)
        figures["now"][name] = found
        if options.keep:
            figures["before"][name] = found
        ordered = {name: figures["now"][name] for name in PROBLEMS if name in figures["now"]}
        written(figures | {"now": ordered}, options.out)
        past = figures["before"].get(name, found)
        ratio = found["multiplications"] / past["multiplications"]
        print(
            f"{name:<45} {ratio:.3f}, {past['seconds']:.2f} s -> {found['seconds']:.2f}", flush=True
        )


if __name__ == "__main__":
    main()
