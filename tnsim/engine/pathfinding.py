"""Contraction paths from cotengra.

In: labels and sizes of one product. Out: a few good routes, deterministic.

Several routes are returned because the one that is best for a product alone need not share most
with the products beside it; `planning` picks. Everything here depends on its arguments only:
cotengra's hyper-optimisers stop by the clock and start processes, so they are not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tnsim.sessions import remembered

Path = tuple[tuple[int, ...], ...]

OPTIMAL_UP_TO = 9
KEPT = 6
CACHED, WRITING = (
    2**20,
    512,
)  # an element of an intermediate beyond the cache costs about as much as so many multiplications


class Route(NamedTuple):
    """A path in SSA form (each step names two earlier tensors) and the labels it loops over to
    stay small.
    """

    path: Path
    chunks: tuple[int, ...]
    multiplications: int
    price: int
    largest: int


@remembered
def routes(
    inputs: tuple[tuple[int, ...], ...],
    output: tuple[int, ...],
    items: tuple[tuple[int, int], ...],
    effort: int,
    large: int,
) -> tuple[Route, ...]:
    """Distinct routes, the cheapest first, for labels of the sizes `items`.

    No intermediate exceeds `large` elements where chunks can prevent it.

    effort 0: one greedy path. 1: optimal paths for few tensors, a handful of random-greedy ones.
    2: many, the best improved by reconfiguring subtrees.
    """
    sizes = dict(items)
    if len(inputs) < 3:
        found: list[Path] = [((0, 1),)] if len(inputs) == 2 else [()]
    else:
        found = _search(inputs, output, sizes, effort)
    ranked = sorted(
        {_routed(inputs, output, sizes, path, large) for path in found},
        key=lambda r: (r.price, r.path),
    )
    return tuple(ranked[:KEPT])


class Cost(NamedTuple):
    """Scalar multiplications, elements written to memory beyond the cache, and elements of the
    largest intermediate.
    """

    multiplications: int
    written: int
    largest: int

    @property
    def price(self) -> int:
        return self.multiplications + WRITING * self.written


def cost(
    inputs: Sequence[Sequence[int]], output: Sequence[int], sizes: dict[int, int], path: Path
) -> Cost:
    """What one product costs along one path."""
    pool, total, written, largest = dict(enumerate(map(frozenset, inputs))), 0, 0, 0
    for n, (one, two) in enumerate(path):
        both = pool.pop(one) | pool.pop(two)
        total += math.prod(sizes[x] for x in both)
        pool[len(inputs) + n] = kept = both & frozenset(output).union(*pool.values())
        size = math.prod(sizes[x] for x in kept)
        written, largest = written + (size if size > CACHED else 0), max(largest, size)
    return Cost(total, written, largest)


def version() -> str:
    import cotengra

    return f"cotengra {cotengra.__version__}"


def _search(inputs, output, sizes: dict[int, int], effort: int) -> list[Path]:
    from cotengra.pathfinders import path_basic

    letters = [tuple(map(_letter, labels)) for labels in inputs]
    out, size = tuple(map(_letter, output)), {_letter(k): v for k, v in sizes.items()}
    found = [_ssa(path_basic.optimize_greedy(letters, out, size, use_ssa=True), len(inputs))]
    if effort == 0:
        return found
    if len(inputs) <= OPTIMAL_UP_TO:
        mirror = len(inputs) - 1
        found.append(
            _ssa(path_basic.optimize_optimal(letters, out, size, use_ssa=True), len(inputs))
        )
        reverse = _ssa(
            path_basic.optimize_optimal(letters[::-1], out, size, use_ssa=True), len(inputs)
        )
        found.append(
            tuple(tuple(mirror - i if i <= mirror else i for i in step) for step in reverse)
        )
    for seed in range(KEPT):
        path, _ = path_basic.optimize_random_greedy_track_flops(
            letters, out, size, ntrials=4 if effort == 1 else 32, seed=seed, use_ssa=True
        )
        found.append(_ssa(path or (), len(inputs)))
    if len(inputs) > OPTIMAL_UP_TO and effort == 2:
        best = sorted(
            dict.fromkeys(found), key=lambda path: cost(inputs, output, sizes, path).price
        )[:KEPT]
        found = [_reconfigured(letters, out, size, path) for path in best[:2]] + best
    return found


def _routed(inputs, output, sizes: dict[int, int], path: Path, large: int) -> Route:
    """Chunk a path over the label that leaves the least work, one more at a time, until its
    intermediates fit.
    """
    chunks: tuple[int, ...] = ()
    found = cost(inputs, output, sizes, path)
    total, price, largest = found.multiplications, found.price, found.largest
    while largest > large:
        options = []
        for label in sorted(set(sizes) - set(output) - set(chunks)):
            inside = cost(inputs, output, sizes | dict.fromkeys((*chunks, label), 1), path)
            if inside.largest < largest:
                times = math.prod(sizes[x] for x in (*chunks, label))
                options.append(
                    (inside.price * times, inside.largest, label, inside.multiplications * times)
                )
        if not options:
            break
        fitting = [o for o in options if o[1] <= large]
        price, largest, label, total = (
            min(fitting) if fitting else min(options, key=lambda o: (o[1], o[0]))
        )
        chunks = (*chunks, label)
    return Route(path, chunks, total, price, largest)


def _reconfigured(letters: list, out: tuple, size: dict, path: Path) -> Path:
    import cotengra

    tree = cotengra.ContractionTree.from_path(letters, out, size, ssa_path=path)
    tree.subtree_reconfigure_(subtree_size=8, minimize="combo")
    return _ssa(tree.get_ssa_path(), len(letters))


def _letter(label: int) -> str:
    return chr(0x100 + label)


def _ssa(path: Sequence[Sequence[int]], count: int) -> Path:
    """Drop the single-tensor steps that cotengra's simplifications insert, keep pairs."""
    alias, steps, fresh = {}, [], count
    for n, step in enumerate(path):
        resolved = tuple(alias.get(i, i) for i in step)
        if len(resolved) == 1:
            alias[count + n] = resolved[0]
            continue
        steps.append(resolved)
        alias[count + n] = fresh
        fresh += 1
    return tuple(steps)
