"""Many checkpoints: time a pair along both routes, and time and memory of long runs into a store.

    python benchmarks/pairwise.py [--out benchmarks/results/pairwise.json]

Every row runs in a process of its own. `first` includes compilation; `warm` is the median of five
further calls of `tnsim.pairwise`, all included: digests, features or contractions, norms, the
result. `pair` is `warm` over the pairs, K (K + 1) / 2. `one by one` is the median time of a warm
`tnsim.similarity` of two of the models.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH, RANK, OUTPUTS = 128, 256, 10
ROUTES = [
    (route, count)
    for route in ("features", "contractions", "closure of depth 4")
    for count in (10, 30, 100)
]
STORED = (125, 250, 500, 1000)
MEMORY = 2**28


def models(count: int, depth: int = 1, width: int = WIDTH, rank: int = RANK) -> list:
    import numpy as np

    import tnsim

    def layer(g, out):
        return tnsim.Bilinear(
            *(
                (g.normal(size=s) / s[1] ** 0.5).astype(np.float32)
                for s in ((rank, width), (rank, width), (out, rank))
            )
        )

    made = []
    for seed in range(count):
        g = np.random.default_rng(seed)
        made.append(tnsim.Model([*(layer(g, width) for _ in range(depth - 1)), layer(g, OUTPUTS)]))
    return made


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def route_row(route: str, count: int) -> dict:
    import tnsim
    from tnsim.all_pairs import preparation

    deep = route.startswith("closure")
    metric = tnsim.GaussianClosure() if deep else tnsim.Gaussian()
    some = models(count, 4 if deep else 1)
    if not deep:  # whatever would be cheaper
        table = preparation.routes_of_run

        def forced(*arguments):
            return [one for one in table(*arguments) if one.name == route]

        preparation.routes_of_run = forced

    def once():
        tnsim.pairwise(some, metric, dtype="float32")

    first, warm = (
        timed(once),
        statistics.median(
            timed(once) for _ in range(5 if count < 100 or route == "features" else 1)
        ),
    )
    alone = [
        timed(lambda: tnsim.similarity(some[0], some[1], metric, dtype="float32")) for _ in range(6)
    ]
    pairs = count * (count + 1) // 2
    return {
        "route": route,
        "models": count,
        "pairs": pairs,
        "first_seconds": first,
        "warm_seconds": warm,
        "pair_milliseconds": 1e3 * warm / pairs,
        "one_by_one_milliseconds": 1e3 * statistics.median(alone[1:]),
    }


def stored_row(count: int) -> dict:
    import tnsim

    with tempfile.TemporaryDirectory() as folder:
        for n, model in enumerate(models(count, width=64, rank=64)):
            tnsim.save(model, Path(folder) / "models" / f"{n}.safetensors")
        series, budget = tnsim.load(Path(folder) / "models"), tnsim.Budget(memory_bytes=MEMORY)
        options = {"dtype": "float32", "store": Path(folder) / "store", "budget": budget}
        tnsim.pairwise(series[:2], dtype="float32")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = timed(lambda: tnsim.pairwise(series, **options))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        again = timed(lambda: tnsim.pairwise(series, **options))
    return {
        "models": count,
        "pairs": count * (count + 1) // 2,
        "seconds": seconds,
        "resume_seconds": again,
        "growth_mib": (after - before) / 2**10,
        "peak_mib": after / 2**10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", nargs=2)
    args = parser.parse_args()
    if args.row:
        name, count = args.row[0], int(args.row[1])
        print(json.dumps(stored_row(count) if name == "stored" else route_row(name, count)))
        return
    results = {"routes": [], "stored": []}
    for kind, rows in (("routes", ROUTES), ("stored", [("stored", count) for count in STORED])):
        for n, (name, count) in enumerate(rows):
            done = subprocess.run(
                [sys.executable, __file__, "--row", name, str(count)],
                capture_output=True,
                text=True,
                check=True,
            )
            row = json.loads(done.stdout.splitlines()[-1])
            results[kind].append(row)
            if n == 0:
                print(*row, sep="  ")
            print(
                *(f"{x:.3f}" if isinstance(x, float) else x for x in row.values()),
                sep="  ",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
