"""Expected seconds of every route beside measured ones, and the choice beside the fastest route.

    taskset -c 0,1 python benchmarks/routes.py [--works NAME ...] [--longest 60]

A row is a work of a pair of models along a route, in a session of its own and without files of
earlier plans, so a plan of contractions is searched as in a first call. Expected are the search
and the seconds of the route's estimate, and the ratio is that of the latter. Routes that are
expected to take longer than `--longest` seconds are not run.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tnsim
from tnsim.compare import routes
from tnsim.compare.request import ALL, Question, Request
from tnsim.errors import TooLarge

Pair = tuple[list[tnsim.Model], Any]


def matrices(g: np.random.Generator, *shapes: tuple[int, int]) -> list[np.ndarray]:
    return [g.normal(size=shape) / np.sqrt(shape[1]) for shape in shapes]


def stack(g: Any, depth: int, width: int, rank: int = 0, skip: bool = False, read: int = 0) -> Any:
    """Bilinear layers, with skips or behind a linear layer of `read` directions."""
    layers: list[Any] = []
    rank, before = rank or width, width
    if read:
        layers, before = [tnsim.Linear(*matrices(g, (read, width)))], read
    for _ in range(depth):
        shapes = (rank, before), (rank, before), (before if skip or read else width, rank)
        layer = tnsim.Bilinear(*matrices(g, *shapes))
        layers.append(tnsim.Residual(layer, 1.0, 0.5) if skip else layer)
        before = layer.d_out
    return tnsim.Model(layers)


def transformer(g: Any, width: int, n_ctx: int, attentions: int, bilinear: bool, rope: Any) -> Any:
    layers: list[Any] = [tnsim.Linear(*matrices(g, (width, width)))]
    for _ in range(attentions):
        square = matrices(g, *[(width, width)] * 6)
        layers.append(tnsim.Attention(*square, n_heads=1, rope_base=rope))
    if bilinear:
        layers.append(tnsim.Bilinear(*matrices(g, *[(width, width)] * 3)))
    return tnsim.Model([*layers, tnsim.Linear(*matrices(g, (width, width)))], n_ctx=n_ctx)


def activation(g: Any, name: str, width: int, hidden: int, gated: bool = False) -> tnsim.Model:
    if gated:
        shapes = (hidden, width), (hidden, width), (width, hidden)
        return tnsim.Model([tnsim.Gated(*matrices(g, *shapes), activation=name)])
    first, last = matrices(g, (hidden, width), (width, hidden))
    return tnsim.Model([tnsim.Linear(first), tnsim.Elementwise(name), tnsim.Linear(last)])


def pair(make: Callable[[Any], tnsim.Model], metric: Any = tnsim.Gaussian()) -> Pair:
    return [make(np.random.default_rng(seed)) for seed in (0, 1)], metric


def mean_of(width: int) -> Any:
    g = np.random.default_rng(2)
    root = g.normal(size=(width, width)) / np.sqrt(width)
    return tnsim.Gaussian(g.normal(size=width), root @ root.T)


WORKS: dict[str, Callable[[], Pair]] = {
    "2 layers, width 16": lambda: pair(lambda g: stack(g, 2, 16)),
    "2 layers, width 64": lambda: pair(lambda g: stack(g, 2, 64)),
    "2 with skips, width 6": lambda: pair(lambda g: stack(g, 2, 6, skip=True)),
    "2 with skips, width 16": lambda: pair(lambda g: stack(g, 2, 16, skip=True)),
    "2 with skips, width 40": lambda: pair(lambda g: stack(g, 2, 40, skip=True)),
    "2 layers, width 24, a mean": lambda: pair(lambda g: stack(g, 2, 24), mean_of(24)),
    "2 layers of 4 of 40 inputs": lambda: pair(lambda g: stack(g, 2, 40, 24, read=4)),
    "3 layers of 2 of 40 inputs": lambda: pair(lambda g: stack(g, 3, 40, 64, read=2)),
    "3 layers, width 4": lambda: pair(lambda g: stack(g, 3, 4)),
    "3 layers, width 8": lambda: pair(lambda g: stack(g, 3, 8)),
    "3 with skips, width 8": lambda: pair(lambda g: stack(g, 3, 8, skip=True)),
    "3 layers, width 12": lambda: pair(lambda g: stack(g, 3, 12)),
    "5 layers of 2 inputs": lambda: pair(lambda g: stack(g, 5, 2, 8)),
    "symmetrised, 3 layers, width 6": lambda: pair(lambda g: stack(g, 3, 6), tnsim.Symmetric()),
    "attention, bilinear, n_ctx 2": lambda: pair(lambda g: transformer(g, 2, 2, 1, True, None)),
    "attention with RoPE, bilinear, n_ctx 2": lambda: pair(
        lambda g: transformer(g, 4, 2, 1, True, 10_000.0)
    ),
    "2 attentions, width 2, n_ctx 2": lambda: pair(lambda g: transformer(g, 2, 2, 2, False, None)),
    "closure, 2 attentions, width 16": lambda: pair(
        lambda g: transformer(g, 16, 4, 2, False, None), tnsim.GaussianClosure()
    ),
    "relu, 64 to 512": lambda: pair(lambda g: activation(g, "relu", 64, 512)),
    "gelu, 64 to 512": lambda: pair(lambda g: activation(g, "gelu", 64, 512)),
    "SwiGLU, 32 to 128": lambda: pair(lambda g: activation(g, "silu", 32, 128, gated=True)),
    "data, 4,000 sequences of 16": lambda: pair(
        lambda g: transformer(g, 32, 16, 2, True, 10_000.0),
        tnsim.Empirical(np.random.default_rng(2).normal(size=(4000, 16, 32))),
    ),
    "data, 50,000 inputs": lambda: pair(
        lambda g: stack(g, 3, 64),
        tnsim.Empirical(np.random.default_rng(2).normal(size=(50_000, 64))),
    ),
    "tokens, 16^4 sequences": lambda: pair(
        lambda g: transformer(g, 16, 4, 2, False, None), tnsim.Categorical()
    ),
}


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """A session without files of earlier plans."""
    os.environ["TNSIM_CACHE_DIR"] = ""
    with tnsim.using(tnsim.Session()):
        yield


def rows(name: str, longest: float) -> None:
    (a, b), metric = WORKS[name]()
    question = Question((a, b), metric, ALL, False, "float64")
    request = Request(metric, "float64", tnsim.Budget(), squared_norms=True)
    with fresh():
        taken = routes.cheapest(question, tnsim.Budget()).route.name
    for route in routes.routes_of(question):
        mark = "taken" if route.name == taken else ""
        with fresh():
            if route.search > longest:
                print(f"| {name} | {route.name} | | {route.search:.2g} to search | | |", flush=True)
                continue
            start = time.perf_counter()
            try:
                estimate = route.estimate()
            except TooLarge as beyond:
                print(f"| {name} | {route.name} | | {beyond} | | |", flush=True)
                continue
            searched = time.perf_counter() - start
            work, search, run = estimate.multiplications, route.search, estimate.seconds
            expected = f"{work:.2g} | {search:.2g} + {run:.2g}"
            if run > longest:
                print(f"| {name} | {route.name} | {expected} | | | {mark} |", flush=True)
                continue
            start = time.perf_counter()
            route.products(a, b, request, False)
            measured = time.perf_counter() - start
            found = f"{searched:.2g} + {measured:.2g} | {run / measured:.2f} | {mark}"
            print(f"| {name} | {route.name} | {expected} | {found} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="*", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--longest", type=float, default=60.0)
    options = parser.parse_args()
    # What every process does once, so that no row counts it.
    square = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
    tnsim.similarity(square, square)
    tnsim.similarity(square, square, tnsim.Empirical(np.eye(2)))
    print("| work | route | multiplications | expected s | measured s | run, ratio | |")
    print("|---|---|---|---|---|---|---|")
    for name in options.works:
        rows(name, options.longest)


if __name__ == "__main__":
    main()
