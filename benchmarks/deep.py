"""Exact Gaussian inner products by depth and width.

Planned cost, time, memory, and the closure beside them.

    python benchmarks/deep.py [--out benchmarks/results/deep.json]

One process per row, so that peak memory is the row's own. The first call plans (with an empty
cache), compiles and runs; the warm time is the smaller of two further calls. `floor` is the planned
multiplications over the rate of a 2048 x 2048 float64 matrix product measured in the same process;
peak memory is the process's largest resident size.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS = (
    (1, 128, 256),
    (2, 16, 32),
    (2, 32, 64),
    (2, 64, 128),
    (2, 128, 256),
    (3, 8, 8),
    (3, 16, 16),
    (3, 32, 32),
)
OUTPUTS = 10


def row(depth: int, width: int, rank: int) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import tnsim
    from tnsim.engine import execution

    def stack(seed):
        g = np.random.default_rng(seed)
        outs = [width] * (depth - 1) + [OUTPUTS]
        shapes = [((rank, width), (rank, width), (out, rank)) for out in outs]
        return tnsim.Model(
            [tnsim.Bilinear(*(g.normal(size=s) / np.sqrt(s[1]) for s in layer)) for layer in shapes]
        )

    def timed(function):
        start = time.perf_counter()
        value = function()
        return value, time.perf_counter() - start

    a, b = stack(0), stack(1)
    planned, planning = timed(lambda: tnsim.plan(a, b))
    value, first = timed(lambda: tnsim.inner(a, b))
    warm = min(timed(lambda: tnsim.inner(a, b))[1] for _ in range(2))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    closure, _ = timed(lambda: tnsim.inner(a, b, tnsim.GaussianClosure()))
    closure_warm = min(
        timed(lambda: tnsim.inner(a, b, tnsim.GaussianClosure()))[1] for _ in range(3)
    )
    with execution.precision():
        matrix = jnp.ones((2048, 2048))
        product = jax.jit(lambda x: x @ x)
        product(matrix).block_until_ready()
        rate = 2048**3 / min(
            timed(lambda: product(matrix).block_until_ready())[1] for _ in range(3)
        )
    norm = float(
        np.exp(
            (
                tnsim.log_inner(a, a, tnsim.GaussianClosure()).log
                + tnsim.log_inner(b, b, tnsim.GaussianClosure()).log
            )
            / 2
        )
    )
    return {
        "depth": depth,
        "width": width,
        "rank": rank,
        "diagrams": planned.diagrams,
        "unshared_multiplications": planned.unshared_multiplications,
        "multiplications": planned.multiplications,
        "planning_seconds": planning,
        "first_seconds": first,
        "warm_seconds": warm,
        "floor_seconds": planned.multiplications / rate,
        "planned_peak_gib": planned.peak_bytes / 2**30,
        "measured_peak_gib": peak,
        "closure_milliseconds": 1e3 * closure_warm,
        "closure_error_over_norms": abs(float(value) - float(closure)) / norm,
    }


COLUMNS = tuple(
    [
        "L",
        "width",
        "rank",
        "diagrams",
        "unshared",
        "planned",
        "plan_s",
        "first_s",
        "warm_s",
        "floor_s",
        "plan_GiB",
        "peak_GiB",
        "closure_ms",
        "error",
    ]
)


def _cells(r: dict) -> tuple[str, ...]:
    return (
        f"{r['depth']}",
        f"{r['width']}",
        f"{r['rank']}",
        f"{r['diagrams']}",
        f"{r['unshared_multiplications']:.2e}",
        f"{r['multiplications']:.2e}",
        *(f"{r[name]:.2f}" for name in ("planning_seconds", "first_seconds")),
        *(f"{r[name]:.3f}" for name in ("warm_seconds", "floor_seconds")),
        *(
            f"{r[name]:.2f}"
            for name in ("planned_peak_gib", "measured_peak_gib", "closure_milliseconds")
        ),
        f"{r['closure_error_over_norms']:.4f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", type=int, nargs=3)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(row(*args.row)))
        return
    rows = []
    print(*COLUMNS)
    for sizes in ROWS:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--row", *map(str, sizes)]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "TNSIM_CACHE_DIR": cache},
            )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(
            " ".join(
                f"{cell:>{len(name)}}" for name, cell in zip(COLUMNS, _cells(rows[-1]), strict=True)
            ),
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
