"""The engine's table: first call, second process, warm call, and the floor, for work of all kinds.

    python benchmarks/run.py --out benchmarks/results/engine.md
    python benchmarks/run.py --device gpu --rows "language model" --out results.md

Every row runs in two processes that share a folder of caches, empty before the first: "first" is
the first call of the first process, planning and compiling included, "second process" that of the
second one, "warm" the median of further calls there. The floor is the planned multiplications over
the rate of one 2048 x 2048 matrix product of the same dtype in the same process, and the ratio is
warm over floor. "Before" is the warm time of the release before, on two cores; only its ratio to
the floor can be compared between machines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

REPEATS = 3
SECONDS = 900  # after which a process is given up


class Work(NamedTuple):
    """What a row measures: a call to be timed, and its plan's multiplications and seconds."""

    call: Callable[[], object]
    multiplications: int
    estimated: float | None = None


class Row(NamedTuple):
    """A row of the table: how to set its work up, its dtype, and the figures of the past."""

    work: Callable[[], Work]
    dtype: str
    before: str


def _stack(seed: int, depth: int, width: int, rank: int, outputs: int):
    import numpy as np

    import tnsim

    random = np.random.default_rng(seed)
    layers = []
    for output in [width] * (depth - 1) + [outputs]:
        shapes = (rank, width), (rank, width), (output, rank)
        arrays = [random.normal(size=shape) / math.sqrt(shape[1]) for shape in shapes]
        layers.append(tnsim.Bilinear(*arrays))
    return tnsim.Model(layers)


def _language_model(seed: int, n_ctx: int, width: int, vocabulary: int, heads: int):
    import numpy as np

    import tnsim

    random = np.random.default_rng(seed)

    def matrix(*shape: int):
        return (random.normal(size=shape) / math.sqrt(shape[-1])).astype(np.float32)

    def block():
        biases = [(0.1 * random.normal(size=width)).astype(np.float32) for _ in range(4)]
        weights = [matrix(width, width) for _ in range(6)]
        return tnsim.Residual(tnsim.Attention(*weights, heads, *biases), 1.0, 0.35)

    ends = tnsim.Linear(matrix(width, vocabulary)), tnsim.Linear(matrix(vocabulary, width))
    return tnsim.Model([ends[0], block(), block(), ends[1]], n_ctx=n_ctx)


def _cross_term(n_ctx: int) -> Work:
    import tnsim

    models = [_language_model(seed, n_ctx, 256, 4096, 8) for seed in (0, 1)]
    metric = tnsim.GaussianClosure()
    plan = tnsim.plan(*models, metric, norms=False, dtype="float32")
    return Work(
        lambda: tnsim.inner(*models, metric, dtype="float32"), plan.multiplications, _seconds(plan)
    )


def _checkpoints() -> Work:
    import tnsim

    models = [_language_model(seed, 4, 64, 384, 4) for seed in range(15)]
    metric = tnsim.GaussianClosure()
    plan = tnsim.plan_pairwise(models, metric, dtype="float32")
    return Work(
        lambda: tnsim.pairwise(models, metric, dtype="float32"),
        plan.multiplications,
        _seconds(plan),
    )


def _inner(metric_name: str, *sizes: int) -> Work:
    import tnsim

    models = [_stack(seed, *sizes) for seed in (0, 1)]
    metric = getattr(tnsim, metric_name)()
    plan = tnsim.plan(*models, metric, norms=False)
    return Work(lambda: tnsim.log_inner(*models, metric), plan.multiplications, _seconds(plan))


def _similarity(metric_name: str, *sizes: int) -> Work:
    import tnsim

    models = [_stack(seed, *sizes) for seed in (0, 1)]
    metric = getattr(tnsim, metric_name)()
    plan = tnsim.plan(*models, metric)
    return Work(lambda: tnsim.similarity(*models, metric), plan.multiplications, _seconds(plan))


def _seconds(plan) -> float | None:
    return getattr(plan, "seconds", None)


ROWS = {
    "language model, one cross term, n_ctx 4": Row(lambda: _cross_term(4), "float32", "6x"),
    "language model, one cross term, n_ctx 16": Row(lambda: _cross_term(16), "float32", "not run"),
    "pairwise of 15 language models of width 64": Row(_checkpoints, "float32", "not finished"),
    "depth 16, d=256, r=512": Row(
        lambda: _inner("TreeSymmetric", 16, 256, 512, 256), "float64", "1.4x of one jitted loop"
    ),
    "exact depth 2, d=128, r=256, 10 outputs": Row(
        lambda: _inner("Gaussian", 2, 128, 256, 10), "float64", "4x"
    ),
    "exact depth 3, d=r=32, 10 outputs": Row(
        lambda: _inner("Gaussian", 3, 32, 32, 10), "float64", "2.2x"
    ),
    "exact depth 3, d=r=32, 32 outputs": Row(
        lambda: _inner("Gaussian", 3, 32, 32, 32), "float64", "1.4x"
    ),
    "exact depth 2, width 24": Row(
        lambda: _similarity("Gaussian", 2, 24, 24, 24), "float64", "41 s first call"
    ),
    "tiny: depth 2, d=8": Row(
        lambda: _similarity("TreeSymmetric", 2, 8, 8, 8), "float64", "0.5 to 1.6 ms"
    ),
}


def measure(name: str) -> dict:
    """The figures of a row, in this process."""
    row = ROWS[name]
    start = time.perf_counter()
    work = row.work()
    work.call()
    first = time.perf_counter() - start
    times = [_timed(work.call) for _ in range(REPEATS if first < SECONDS / 10 else 1)]
    rate = _rate(row.dtype)
    return {
        "first": first,
        "warm": statistics.median(times),
        "floor": work.multiplications / rate,
        "multiplications": work.multiplications,
        "estimated": work.estimated,
        "gflops": 2e-9 * rate,
    }


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _rate(dtype: str) -> float:
    """Multiplications a second of one large matrix product."""
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        matrix = jnp.ones((2048, 2048), dtype)
        product = jax.jit(lambda x: x @ x)
        product(matrix).block_until_ready()
        return 2048**3 / min(_timed(lambda: product(matrix).block_until_ready()) for _ in range(5))


def _process(name: str, device: str, folder: str) -> dict | str:
    """The figures of a row from a process of its own, or why there are none."""
    environment = os.environ | {"TNSIM_CACHE_DIR": folder}
    environment["JAX_PLATFORMS"] = "cpu" if device == "cpu" else "cuda"
    command = [sys.executable, __file__, "--measure", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"given up after {SECONDS} s"
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][:120]
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, device: str) -> str:
    """A row of the table in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        cold = _process(name, device, folder)
        again = cold if isinstance(cold, str) else _process(name, device, folder)
    if isinstance(cold, str) or isinstance(again, str):
        return (
            f"| {name} | {cold if isinstance(cold, str) else again} ||||||| {ROWS[name].before} |"
        )
    estimated = "-" if again["estimated"] is None else f"{again['estimated']:.3g}"
    cells = [
        name,
        f"{again['multiplications']:.2e}",
        f"{cold['first']:.3g}",
        f"{again['first']:.3g}",
        f"{again['warm']:.3g}",
        f"{again['floor']:.3g}",
        f"{again['warm'] / again['floor']:.1f}x",
        estimated,
        ROWS[name].before,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--rows", default="", help="only rows whose name holds this text")
    parser.add_argument("--out", type=Path, help="where to write the table")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    columns = "work, multiplications, first s, second process s, warm s, floor s, warm / floor"
    names = [*columns.split(", "), "estimated s", "before"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    print(*lines, sep="\n", flush=True)
    for name in ROWS:
        if arguments.rows in name:
            lines.append(line(name, arguments.device))
            print(lines[-1], flush=True)
    if arguments.out:
        machine = (
            f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        )
        title = f"# The engine on {arguments.device} ({machine})"
        arguments.out.write_text("\n".join([title, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
