"""Gradients: which verbs have which derivatives, and what a step of training costs.

    python benchmarks/gradients.py abilities                     # the table of abilities
    python benchmarks/gradients.py abilities --keep before.npz   # with every number, to compare
    python benchmarks/gradients.py abilities --against before.npz
    python benchmarks/gradients.py steps                         # first and later steps
    python benchmarks/gradients.py steps --rows gelu
    python benchmarks/gradients.py torch                         # the same steps in PyTorch

A row of abilities is a verb, a metric and a family of models, a column a transform of JAX. A cell
holds the largest entry of what the transform gives, or the name of the error. `--against` prints
the largest relative difference to numbers that were kept, for every cell of both.

A row of steps is measured in a process of its own: `value_and_grad` of a similarity as a training
loop calls it, and the same function inside `jax.jit`, which traces plans and kernels as a whole and
is called XLA here. Wall-clock seconds are of the first call and of the median of later ones, whose
weights move; "cpu" is the time of all threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tnsim

LATER = 7  # later steps, of which the median counts
ENOUGH = 20.0  # seconds of later steps after which no further one is made
LIMIT = 900  # seconds of a process


# Models


def bilinear(rng: Any, d: int, rank: int, out: int, biases: bool = False) -> Any:
    arrays = [rng.normal(size=(rank, d)) for _ in range(2)] + [rng.normal(size=(out, rank))]
    arrays = [x / x.shape[1] ** 0.5 for x in arrays]
    own = [0.3 * rng.normal(size=n) for n in (rank, rank, out)] if biases else []
    return tnsim.Bilinear(*arrays, *own)


def stack(rng: Any, d: int, depth: int, biases: bool = False, skips: bool = False) -> Any:
    wrap = tnsim.Residual if skips else (lambda layer: layer)
    return tnsim.Model([wrap(bilinear(rng, d, d, d, biases)) for _ in range(depth)])


def network(rng: Any, d: int, hidden: int, out: int, activation: str, depth: int = 1) -> Any:
    layers: list[Any] = []
    for n in range(depth):
        width = d if n == 0 else hidden
        layers.append(tnsim.Linear(rng.normal(size=(hidden, width)) / width**0.5, np.zeros(hidden)))
        layers.append(tnsim.Elementwise(activation))
    return tnsim.Model([*layers, tnsim.Linear(rng.normal(size=(out, hidden)) / hidden**0.5)])


def gated(rng: Any, d: int, hidden: int, activation: str) -> Any:
    shapes = (hidden, d), (hidden, d), (d, hidden)
    gate, up, down = (rng.normal(size=s) / s[1] ** 0.5 for s in shapes)
    return tnsim.Model([tnsim.Gated(gate, up, down, activation)])


def attending(rng: Any, d: int, n_ctx: int, tokens: int | None = None) -> Any:
    maps = [rng.normal(size=(d, d)) / d**0.5 for _ in range(6)]
    layers: list[Any] = [tnsim.Residual(tnsim.Attention(*maps, n_heads=1))]
    if tokens is not None:
        layers.insert(0, tnsim.Linear(rng.normal(size=(d, tokens))))
    return tnsim.Model(layers, n_ctx=n_ctx)


# Abilities

FAMILIES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "one layer, skip, biases": lambda g: (stack(g, 3, 1, True, True), stack(g, 3, 1, True)),
    "two layers": lambda g: (stack(g, 3, 2), stack(g, 3, 2)),
    "two layers, biases": lambda g: (stack(g, 2, 2, True), stack(g, 2, 2, True)),
    "a difference": lambda g: (stack(g, 3, 1), 0.5 * stack(g, 3, 1) - stack(g, 3, 1)),
    "attention": lambda g: (attending(g, 2, 2), attending(g, 2, 2)),
    "tokens": lambda g: (attending(g, 2, 2, 3), attending(g, 2, 2, 3)),
    "relu": lambda g: (network(g, 2, 4, 2, "relu"), network(g, 2, 3, 2, "relu")),
    "gelu": lambda g: (network(g, 2, 4, 2, "gelu"), network(g, 2, 3, 2, "gelu")),
    "silu, gated": lambda g: (gated(g, 2, 3, "silu"), gated(g, 2, 3, "silu")),
    "two relu layers": lambda g: (network(g, 2, 3, 2, "relu", 2), network(g, 2, 3, 2, "relu", 2)),
}
POINTS = np.random.default_rng(3).normal(size=(7, 3))
MOMENTS = np.array([0.5, -0.2]), np.array([1.0, 0.4])
METRICS: dict[str, Any] = {
    "Gaussian": tnsim.Gaussian(),
    "Gaussian, mean": tnsim.Gaussian(*MOMENTS),
    "Gaussian, 1024 samples": tnsim.Gaussian(samples=1024),
    "GaussianClosure": tnsim.GaussianClosure(),
    "Symmetric": tnsim.Symmetric(),
    "TreeSymmetric": tnsim.TreeSymmetric(),
    "Frobenius": tnsim.Frobenius(),
    "Categorical": tnsim.Categorical(),
    "Empirical": tnsim.Empirical(POINTS),
    "Empirical, 2 coordinates": tnsim.Empirical(POINTS[:, :2]),
    "Product": tnsim.Product("uniform"),
}
VERBS: dict[str, Callable[..., Any]] = {
    "similarity": tnsim.similarity,
    "inner": tnsim.inner,
    "log_inner": lambda *given: tnsim.log_inner(*given).log,
    "slices": lambda *given: tnsim.slices(*given).sum(),
}
WORKS = [
    ("one layer, skip, biases", "Gaussian"),
    ("one layer, skip, biases", "TreeSymmetric"),
    ("two layers", "Gaussian"),
    ("two layers", "Symmetric"),
    ("two layers", "TreeSymmetric"),
    ("two layers", "Frobenius"),
    ("two layers", "GaussianClosure"),
    ("two layers, biases", "Gaussian, mean"),
    ("two layers, biases", "GaussianClosure"),
    ("two layers, biases", "Empirical, 2 coordinates"),
    ("two layers, biases", "Product"),
    ("a difference", "Gaussian"),
    ("attention", "Gaussian"),
    ("tokens", "Categorical"),
    ("relu", "Gaussian"),
    ("relu", "Gaussian, mean"),
    ("gelu", "Gaussian"),
    ("silu, gated", "Gaussian"),
    ("two relu layers", "Gaussian, 1024 samples"),
    ("two relu layers", "GaussianClosure"),
    ("two relu layers", "Empirical, 2 coordinates"),
]


def twice(function: Callable, model: Any) -> Any:
    """The derivative, by the weights, of a derivative along a direction of all weights."""
    ones = jax.tree.map(jnp.ones_like, model)
    return jax.grad(lambda x: jax.jvp(function, (x,), (ones,))[1])(model)


def pair(model: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]), model)


TRANSFORMS: dict[str, Callable[[Callable, Any], Any]] = {
    "grad": lambda f, m: jax.value_and_grad(f)(m),
    "jvp": lambda f, m: jax.jvp(f, (m,), (jax.tree.map(jnp.ones_like, m),)),
    "second": twice,
    "jit": lambda f, m: jax.jit(f)(m),
    "jit grad": lambda f, m: jax.jit(jax.grad(f))(m),
    "jit second": lambda f, m: jax.jit(lambda m: twice(f, m))(m),
    "vmap": lambda f, m: jax.vmap(f)(pair(m)),
    "vmap grad": lambda f, m: jax.vmap(jax.grad(f))(pair(m)),
}
SLOW = {"jit grad", "jit second", "vmap", "vmap grad", "second"}  # of verbs but similarity, skipped
SLOWEST = {"attention", "tokens", "gelu", "silu, gated"}  # with these, skipped without a wish


def cells(chosen: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of the cells and functions that fill them."""
    for family, metric in WORKS:
        rng = np.random.default_rng(1)
        a, b = FAMILIES[family](rng)
        a = jax.tree.map(jnp.asarray, a)
        for verb, function in VERBS.items():
            for transform, made in TRANSFORMS.items():
                name = f"{family} | {metric} | {verb} | {transform}"
                is_slow = transform in SLOW and (verb != "similarity" or family in SLOWEST)
                if chosen in name and (chosen == name or not is_slow):
                    f = lambda m, function=function, b=b, metric=metric: function(  # noqa: E731
                        m, b, METRICS[metric]
                    )
                    yield name, lambda made=made, f=f, a=a: made(f, a)


def abilities(args: argparse.Namespace) -> None:
    known = dict(np.load(args.against, allow_pickle=True)) if args.against else {}
    kept: dict[str, Any] = {}
    rows: dict[str, dict[str, str]] = {}
    for name, make in cells(args.rows):
        start = time.perf_counter()
        try:
            found = [np.asarray(x, float).ravel() for x in jax.tree.leaves(make())]
            kept[name] = np.concatenate(found)
            text = f"{np.abs(kept[name]).max():.4g}"
        except Exception as error:  # the name is the cell
            kept[name] = np.array(type(error).__name__)
            text = type(error).__name__
        seconds = time.perf_counter() - start
        if name in known:
            text += f" ({_difference(kept[name], known[name])})"
        *row, transform = name.split(" | ")
        rows.setdefault(" | ".join(row), {})[transform] = text
        print(f"{seconds:7.2f} s  {name}: {text}", flush=True)
        if args.keep:
            np.savez(args.keep, **kept)
    print("\n| models | metric | verb | " + " | ".join(TRANSFORMS) + " |")
    print("|---" * (3 + len(TRANSFORMS)) + "|")
    for row, found in rows.items():
        print(f"| {row} | " + " | ".join(found.get(t, "") for t in TRANSFORMS) + " |")


def _difference(one: np.ndarray, other: np.ndarray) -> str:
    if one.dtype.kind == "U" or other.dtype.kind == "U":
        return "same" if one.dtype.kind == other.dtype.kind and one == other else "OTHER"
    if one.shape != other.shape:
        return "OTHER"
    same = np.isfinite(one) == np.isfinite(other)
    if not same.all():
        return "OTHER"
    size = max(np.nanmax(np.abs(other)), 1e-300)
    return f"{np.nanmax(np.abs(one - other)) / size:.0e}"


# Steps

STEPS: dict[str, Callable[[Any], tuple[Any, Any, Any]]] = {
    "gelu (8, 32)": lambda g: (*(network(g, 8, 32, 8, "gelu") for _ in "ab"), tnsim.Gaussian()),
    "relu (16, 64)": lambda g: (*(network(g, 16, 64, 4, "relu") for _ in "ab"), tnsim.Gaussian()),
    "silu gated (8, 16)": lambda g: (*(gated(g, 8, 16, "silu") for _ in "ab"), tnsim.Gaussian()),
    "bilinear (64)": lambda g: (stack(g, 64, 1), stack(g, 64, 1), tnsim.Gaussian()),
    "tree (64), 8 layers": lambda g: (stack(g, 64, 8), stack(g, 64, 8), tnsim.TreeSymmetric()),
    "closure (16), 4 layers, biases": lambda g: (
        *(stack(g, 16, 4, True, True) for _ in "ab"),
        tnsim.GaussianClosure(),
    ),
    "Gaussian (24), 2 layers": lambda g: (stack(g, 24, 2), stack(g, 24, 2), tnsim.Gaussian()),
    "attention (8), 4 positions": lambda g: (
        attending(g, 8, 4),
        attending(g, 8, 4),
        tnsim.Gaussian(),
    ),
}


def timed(step: Callable[[Any], Any], model: Any) -> dict[str, float]:
    """Seconds of the first step and of later ones; weights move between steps."""
    walls, cpus = [], []
    while len(walls) <= LATER and (len(walls) < 2 or sum(walls[1:]) < ENOUGH):
        moved = jax.tree.map(lambda x, n=len(walls): x * (1 + 1e-3 * n), model)
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(step(moved))  # tensors of PyTorch are there already
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {
        "first": walls[0],
        "first cpu": cpus[0],
        "later": statistics.median(walls[1:]),
        "later cpu": statistics.median(cpus[1:]),
    }


def measured(row: str, way: str) -> dict[str, float]:
    a, b, metric = STEPS[row](np.random.default_rng(0))
    if way == "torch":
        return timed(*_in_torch(a, b, metric))
    a = jax.tree.map(jnp.asarray, a)
    step = jax.value_and_grad(lambda m: tnsim.similarity(m, b, metric))
    return timed(jax.jit(step) if way == "XLA" else step, a)


def _in_torch(a: Any, b: Any, metric: Any) -> tuple[Callable, Any]:
    """The same step in PyTorch, and its first weights."""
    import torch

    leaves, form = jax.tree.flatten(a)

    def step(leaves: Any) -> Any:
        tensors = [torch.tensor(np.asarray(x), requires_grad=True) for x in leaves]
        value = tnsim.torch.similarity(jax.tree.unflatten(form, tensors), b, metric)
        value.backward()
        return [x.grad for x in tensors]

    return step, [jnp.asarray(x) for x in leaves]


def steps(args: argparse.Namespace) -> None:
    ways = ("torch",) if args.what == "torch" else ("numbers", "XLA")
    print("| work | way | first s | cpu s | later ms | cpu ms |\n|---|---|---|---|---|---|")
    for row in STEPS:
        if args.rows not in row:
            continue
        for way in ways:
            command = [sys.executable, __file__, "one", "--rows", row, "--way", way]
            try:
                text = subprocess.run(
                    command, capture_output=True, text=True, check=True, timeout=LIMIT
                ).stdout
            except subprocess.TimeoutExpired:
                print(f"| {row} | {way} | over {LIMIT} s | | | |", flush=True)
                continue
            figures = json.loads(text.splitlines()[-1])
            first, cpu, later, later_cpu = figures.values()
            print(
                f"| {row} | {way} | {first:.2f} | {cpu:.2f} | {1e3 * later:.1f} | "
                f"{1e3 * later_cpu:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Abilities and costs of gradients.")
    parser.add_argument("what", choices=("abilities", "steps", "torch", "one"))
    parser.add_argument("--rows", default="", help="part of the names of rows")
    parser.add_argument("--keep", type=Path, help="file for the numbers of all cells")
    parser.add_argument("--against", type=Path, help="file of numbers to compare with")
    parser.add_argument("--way", default="numbers", help=argparse.SUPPRESS)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if args.what == "one":
        print(json.dumps(measured(args.rows, args.way)))
    else:
        {"abilities": abilities}.get(args.what, steps)(args)


if __name__ == "__main__":
    main()
