"""Cost of attention models by context length and width: plan, first call, warm calls, memory.

Random language models of the paper's shape (vocabulary 4096, two residual attention layers with
query and key biases, heads of 32, RoPE, causal mask) under GaussianClosure, float32, one cross term
<A|B>; and one attention layer alone, all three terms of a cosine. Every row is a process of its own
with an empty plan cache, so that its memory and its first call are its own.

    python benchmarks/attention.py --out benchmarks/results/attention.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path


def language_model(seed: int, n_ctx: int, width: int, vocabulary: int = 4096):
    import numpy as np

    import tnsim

    g = np.random.default_rng(seed)

    def matrix(*shape: int):
        return (g.normal(size=shape) / math.sqrt(shape[-1])).astype(np.float32)

    def block():
        biases = [(0.1 * g.normal(size=width)).astype(np.float32) for _ in range(4)]
        return tnsim.Residual(
            tnsim.Attention(*(matrix(width, width) for _ in range(6)), width // 32, *biases),
            1.0,
            0.35,
        )

    embed, unembed = (
        tnsim.Linear(matrix(width, vocabulary)),
        tnsim.Linear(matrix(vocabulary, width)),
    )
    return tnsim.Model([embed, block(), block(), unembed], n_ctx=n_ctx)


def one_layer(seed: int, n_ctx: int, width: int, biases: bool):
    import numpy as np

    import tnsim

    g = np.random.default_rng(seed)
    weights = [
        (g.normal(size=(width, width)) / math.sqrt(width)).astype(np.float32) for _ in range(6)
    ]
    vectors = [g.normal(size=width).astype(np.float32) for _ in range(4)] if biases else []
    return tnsim.Model([tnsim.Attention(*weights, 8, *vectors)], n_ctx=n_ctx)


def row(kind: str, n_ctx: int, width: int, repeats: int) -> dict:
    """Measure one case in this process."""
    import tnsim

    if kind == "language model":
        models = [language_model(seed, n_ctx, width) for seed in (0, 1)]
        metric, call, norms = tnsim.GaussianClosure(), tnsim.inner, False
    else:
        models = [one_layer(seed, n_ctx, width, kind.endswith("biases")) for seed in (0, 1)]
        metric, call, norms = tnsim.Gaussian(), tnsim.similarity, True
    start = time.perf_counter()
    plan = tnsim.plan(*models, metric, norms=norms, dtype="float32")
    planned = time.perf_counter()
    figures = {
        "kind": kind,
        "n_ctx": n_ctx,
        "width": width,
        "multiplications": plan.multiplications,
        "contractions": plan.contractions,
        "planned_gib": plan.peak_bytes / 2**30,
        "plan_s": planned - start,
    }
    if not repeats:
        return figures
    call(*models, metric, dtype="float32")
    first = time.perf_counter() - start
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call(*models, metric, dtype="float32")
        times.append(time.perf_counter() - begin)
    return figures | {
        "first_s": first,
        "warm_s": statistics.median(times),
        "process_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


CASES = [("language model", n, 256, 3 if n < 8 else 1) for n in (2, 4, 8)]
CASES += [("language model", 16, 256, 0)]  # planned, not run: minutes on two cores
CASES += [("language model", 4, width, 3) for width in (64, 128)]
CASES += [(f"one layer{biases}", 4, 64, 15) for biases in ("", ", biases")]
COLUMNS = (
    "n_ctx",
    "width",
    "multiplications",
    "contractions",
    "planned_gib",
    "plan_s",
    "first_s",
    "warm_s",
    "process_gib",
)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _exponents(growth: dict[str, float]) -> str:
    return ", ".join(f"{value:.2f} ({key})" for key, value in growth.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to write the table")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(row(*json.loads(arguments.case))))
        return
    lines = [f"| case | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    rows = []
    for case in CASES:
        environment = os.environ | {"TNSIM_CACHE_DIR": ""}
        done = subprocess.run(
            [sys.executable, __file__, "--case", json.dumps(case)],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        cells = [_cell(rows[-1].get(c)) for c in COLUMNS]
        lines.append(f"| {rows[-1]['kind']} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    by_context = [r for r in rows if r["kind"] == "language model" and r["width"] == 256]
    for one, two in itertools.pairwise(by_context):
        growth = {
            key: math.log2(two[key] / one[key])
            for key in ("multiplications", "warm_s")
            if key in two
        }
        lines.append(f"\nn_ctx {one['n_ctx']} to {two['n_ctx']}: exponents {_exponents(growth)}")
    by_width = sorted(
        (r for r in rows if r["kind"] == "language model" and r["n_ctx"] == 4),
        key=lambda r: r["width"],
    )
    for one, two in itertools.pairwise(by_width):
        growth = {
            key: math.log2(two[key] / one[key])
            for key in ("multiplications", "warm_s")
            if key in two
        }
        lines.append(f"\nwidth {one['width']} to {two['width']}: exponents {_exponents(growth)}")
    if arguments.out:
        arguments.out.write_text("# Attention, float32\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
