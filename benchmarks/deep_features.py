"""Two-layer models, all pairs: along features and along plans, time a model and a pair.

    python benchmarks/deep_features.py [--out benchmarks/results/deep_features.md]

Every row runs in a process of its own, in float32. `run` is one call of `tnsim.pairwise`, all
included: digests, planning, compiling, features or contractions, norms, the result. `warm` is a
second call, without planning and compiling. Along plans a run of few models is timed, and `100
models` is that time by the number of inner products, norms among them: it is marked as an estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

OUTPUTS, ALL = 10, 100
# width, rank, route, models, whether a second run is timed
ROWS = [
    (64, 128, "features", 100, False),
    (64, 128, "features", 20, True),
    (64, 128, "contractions", 4, True),
    (128, 256, "features", 8, False),
    (128, 256, "contractions", 1, False),
]


def models(count: int, width: int, rank: int) -> list:
    import numpy as np

    import tnsim

    made = []
    for seed in range(count):
        g = np.random.default_rng(seed)
        layers = []
        for out in (width, OUTPUTS):
            shapes = ((rank, width), (rank, width), (out, rank))
            matrices = [(g.normal(size=s) / s[1] ** 0.5).astype(np.float32) for s in shapes]
            layers.append(tnsim.Bilinear(*matrices))
        made.append(tnsim.Model(layers))
    return made


def measured(width: int, rank: int, route: str, count: int, again: bool) -> dict:
    import tnsim
    from tnsim.all_pairs import preparation

    every = preparation.routes_of_run

    def forced(*arguments):
        return [one for one in every(*arguments) if one.name == route]

    preparation.routes_of_run = forced
    some = models(count, width, rank)
    times = []
    for _ in range(1 + again):
        start = time.perf_counter()
        run = tnsim.pairwise(some, dtype="float32")
        times.append(time.perf_counter() - start)
    return {
        "route": route,
        "count": count,
        "row": f"{width} | {rank} | {route} | {count}",
        "times": times,
        "products": count * (count + 1) // 2 + (count if route == "contractions" else 0),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "plan": run.attrs["plan"],
    }


def table(rows: list[dict]) -> str:
    lines = [
        "# Deep features",
        "",
        "| width | rank | route | models | first run s | warm run s | s a product | "
        f"{ALL} models s | peak GiB |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        first, warm = row["times"][0], row["times"][-1]
        again = f"{warm:.1f}" if len(row["times"]) > 1 else ""
        each = warm / row["products"]
        whole = f"{first:.0f}"
        if row["count"] < ALL:
            products = ALL * (ALL + 1) // 2 + (ALL if row["route"] == "contractions" else 0)
            whole = f"about {each * products:,.0f}" if row["route"] == "contractions" else ""
        cells = (row["row"], f"{first:.1f}", again, f"{each:.3g}", whole, f"{row['peak']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", type=int, nargs="*", default=None, help="numbers of rows")
    parser.add_argument("--row", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measured(*ROWS[options.row])))
        return
    found = []
    for n in range(len(ROWS)) if options.only is None else options.only:
        command = [sys.executable, __file__, "--row", str(n)]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        if done.returncode:
            sys.exit(done.stderr)
        found.append(json.loads(done.stdout))
        print(found[-1], flush=True)
    text = table(found)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
