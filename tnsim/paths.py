"""Contraction paths from cotengra. In: labels and sizes of one product. Out: a few good orders, deterministic.

Several candidates are returned because the path that is best for one product alone need not share most
with the products beside it; `planning` picks. Everything here depends on its arguments only: cotengra's
hyper-optimisers stop by the clock and start processes, so they are not used.
"""

from __future__ import annotations

from collections.abc import Sequence

Path = tuple[tuple[int, ...], ...]

OPTIMAL_UP_TO = 9
GREEDY_SEEDS = 4


def candidates(inputs: Sequence[Sequence[int]], output: Sequence[int], sizes: dict[int, int]) -> tuple[Path, ...]:
    """Distinct paths in SSA form (each step names two earlier tensors), the most promising first."""
    if len(inputs) < 3:
        return (((0, 1),),) if len(inputs) == 2 else ((),)
    from cotengra.pathfinders import path_basic

    letters = [tuple(map(_letter, labels)) for labels in inputs]
    out, size = tuple(map(_letter, output)), {_letter(k): v for k, v in sizes.items()}
    found: list[Path] = []
    mirror = len(inputs) - 1
    if len(inputs) <= OPTIMAL_UP_TO:
        found.append(_ssa(path_basic.optimize_optimal(letters, out, size, use_ssa=True), len(inputs)))
        reverse = _ssa(path_basic.optimize_optimal(letters[::-1], out, size, use_ssa=True), len(inputs))
        found.append(tuple(tuple(mirror - i if i <= mirror else i for i in step) for step in reverse))
    found.append(_ssa(path_basic.optimize_greedy(letters, out, size, use_ssa=True), len(inputs)))
    for seed in range(GREEDY_SEEDS):
        path, _ = path_basic.optimize_random_greedy_track_flops(letters, out, size, ntrials=8, seed=seed, use_ssa=True)
        found.append(_ssa(path, len(inputs)))
    return tuple(dict.fromkeys(found))


def version() -> str:
    import cotengra

    return f"cotengra {cotengra.__version__}"


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
