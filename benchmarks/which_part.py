"""Paths and changes: first calls and warm calls, beside an inner product with its gradient.

    python benchmarks/which_part.py [--rows NAMES] [--out FILE]

Every row runs in a process of its own, first with an empty folder of compiled programs, then in a
second process that reads them. `beside` is an inner product along the same route with its
derivatives by all weights, warm, where a row has one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = "row | players | first (s) | second process (s) | warm (s) | beside (s) | ratio"


def stacks(layers: int, width: int, rank: int) -> tuple[Any, Any]:
    """Two stacks of residual bilinear layers."""
    import numpy as np

    import tnsim

    g = np.random.default_rng(0)

    def block() -> Any:
        shapes = (rank, width), (rank, width), (width, rank)
        return tnsim.Residual(
            tnsim.Bilinear(*(0.5 * g.normal(size=s) / np.sqrt(s[1]) for s in shapes))
        )

    a, b = (tnsim.Model([block() for _ in range(layers)]) for _ in range(2))
    return a, b


def by_gradient(a: Any, b: Any, metric: Any) -> Callable[[], Any]:
    """An inner product with its derivatives by the weights of the first model, compiled."""
    import jax

    import tnsim

    def product(model: Any) -> Any:
        return tnsim.inner(model, b, metric)

    compiled = jax.jit(jax.value_and_grad(product))
    return lambda: jax.block_until_ready(compiled(a))


def units_at_points() -> tuple[int, Callable[[], Any], Callable[[], Any] | None]:
    """Change by unit under given inputs: 3 layers of 128 units, width 32, 2,048 inputs."""
    import numpy as np

    import tnsim

    a, b = stacks(3, 32, 128)
    metric = tnsim.Empirical(np.random.default_rng(1).normal(size=(2048, 32)))
    return 384, lambda: tnsim.change(a, b, metric, by="unit"), by_gradient(a, b, metric)


def units_along_plans() -> tuple[int, Callable[[], Any], Callable[[], Any] | None]:
    """Change by unit under the exact Gaussian: 2 layers of 128 units, width 16."""
    import tnsim

    a, b = stacks(2, 16, 128)
    metric = tnsim.Gaussian()
    return 256, lambda: tnsim.change(a, b, metric, by="unit"), by_gradient(a, b, metric)


def induction() -> tuple[int, Callable[[], Any], Callable[[], Any] | None]:
    """Shares by layer of the 12 shipped induction checkpoints, 512 sequences of 16 tokens."""
    import tnsim

    folder = Path(tnsim.__file__).parent / "data" / "induction"
    run = tnsim.load(folder, n_ctx=16)
    tokens = tnsim.Categorical(samples=512)
    return 2, lambda: tnsim.paths(run, metric=tokens), None


def heads() -> tuple[int, Callable[[], Any], Callable[[], Any] | None]:
    """Paths by head of the last induction checkpoint, 128 sequences: 80 switched models."""
    import tnsim

    folder = Path(tnsim.__file__).parent / "data" / "induction"
    model = tnsim.load(folder, n_ctx=16)[-1]
    tokens = tnsim.Categorical(samples=128)
    return 8, lambda: tnsim.paths(model, metric=tokens, by="head"), None


def layers_along_plans() -> tuple[int, Callable[[], Any], Callable[[], Any] | None]:
    """Paths by layer of 3 layers of 16 units, width 6, under the exact Gaussian."""
    import tnsim

    a, b = stacks(3, 6, 16)
    return 3, lambda: tnsim.paths(a, b), None


def hidden_units() -> tuple[int, Callable[[], Any], Callable[[], Any] | None]:
    """Paths by unit of GELU blocks of 1,024 units, width 256, under the exact Gaussian."""
    import numpy as np

    import tnsim

    g = np.random.default_rng(0)

    def block() -> Any:
        gate, down = (g.normal(size=s) / np.sqrt(s[1]) for s in ((1024, 256), (256, 1024)))
        return tnsim.Model([tnsim.Residual(tnsim.Gated(gate, None, down, "gelu"))])

    a, b = block(), block()
    return 1024, lambda: tnsim.paths(a, b, by="unit"), lambda: tnsim.inner(a, b)


ROWS = {
    "units-at-points": units_at_points,
    "units-along-plans": units_along_plans,
    "induction": induction,
    "heads": heads,
    "layers-along-plans": layers_along_plans,
    "hidden-units": hidden_units,
}


def measure(name: str) -> str:
    """Players, and seconds of the first call, a warm call and the call beside, in this process."""
    players, call, beside = ROWS[name]()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    other = 0.0
    if beside is not None:
        beside()
        for _ in range(2):
            start = time.perf_counter()
            beside()
            other = time.perf_counter() - start
    return f"{players} {times[0]} {min(times[1:])} {other}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--one", choices=list(ROWS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        print(measure(options.one))
        return
    lines = [COLUMNS, " | ".join("---" for _ in COLUMNS.split("|"))]
    for name in options.rows:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--one", name]
            found = []
            for _ in range(2):
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    check=True,
                    env={**os.environ, "TNSIM_CACHE_DIR": cache},
                )
                found.append(list(map(float, done.stdout.split())))
        (players, first, *_), (_, second, warm, beside) = found
        ratio = f"{beside:.3f} | {warm / beside:.1f}" if beside else "- | -"
        words = " ".join((ROWS[name].__doc__ or "").split()).rstrip(".")
        lines.append(f"{words} | {players:.0f} | {first:.2f} | {second:.2f} | {warm:.3f} | {ratio}")
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
