"""The work of a run: norms, then tiles. In: a prepared run. Out: units of work that write a store.

The units are pure functions (`tasks`), so they may run anywhere. What they return is checked,
normalised and written here, by the one process that called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tnsim.engine import precision
from tnsim.engine.log_scaled import taken
from tnsim.gram import executors, tasks
from tnsim.gram.forward_runs import Estimated
from tnsim.gram.layout import Record
from tnsim.gram.normalise import Doubt, norm_arrays, norms_in, tile_arrays
from tnsim.gram.preparation import Run, Side
from tnsim.gram.progress import Work, advice
from tnsim.gram.sources import Entry
from tnsim.gram.store import Store


def units_of_work(run: Run, target: Store, bar: Any) -> list[Work]:
    """All norms, then the tiles that they normalise.

    Args:
        run: What is compared, and how.
        target: Where results are written, and norms are read again.
        bar: A progress bar that is told how many pairs a finished tile holds.
    """
    layout = target.layout
    sides = {side.name: side for side in (run.rows, run.columns)}
    norms = [_norm_work(run, target, sides[name]) for name in layout.sides]
    return [*norms, _tile_work(run, target, bar)]


def _norm_work(run: Run, target: Store, side: Side) -> Work:
    def task(record: Record) -> executors.Task:
        return tasks.norms, (run.job, run.block(side, *record.blocks))

    def write(record: Record, result: Any) -> list[Doubt]:
        _write_norms(run, target, side, record, result)
        return []

    return Work(target.layout.norms(side.name), task, write, lambda record: None)


def _tile_work(run: Run, target: Store, bar: Any) -> Work:
    def task(record: Record) -> executors.Task:
        i, j = record.blocks
        return tasks.tile, (run.job, run.block(run.rows, i), run.block(run.columns, j))

    def write(record: Record, result: Any) -> list[Doubt]:
        return [_write_tile(run, target, record, result)]

    def done(record: Record) -> None:
        bar.update(run.pairs_in(*record.blocks))

    return Work(target.layout.tiles(), task, write, done, run.plan.together)


def _write_norms(run: Run, target: Store, side: Side, record: Record, result: Any) -> None:
    """Write squared norms and the sizes of their sums. Raises `ModelError` where one is zero."""
    entries = run.block(side, *record.blocks)
    norms = tasks.expect_norms(result, (len(entries),), target.layout.outputs, advice(target))
    for i, one in enumerate(entries):
        precision.check_norm(taken(norms, i), one.source.name, one.terms > 1, run.arithmetic)
    target.write(record, list(norm_arrays(norms, run.job.setting.per_output).values()))


def _write_tile(run: Run, target: Store, record: Record, result: Any) -> Doubt:
    """Normalise a tile and write it, mirrored too where rows and columns are one list.

    Returns:
        The cosine with the largest error.

    Raises:
        ResultError: That error leaves no digit.
    """
    i, j = record.blocks
    at, to = target.layout.block(i), target.layout.block(j)
    per_output = run.job.setting.per_output
    rows, columns = run.block(run.rows, i), run.block(run.columns, j)
    shape = len(rows), len(columns)
    products = tasks.expect_products(result, shape, target.layout.outputs, advice(target))
    estimated = None
    if isinstance(products, Estimated):
        products, estimated = products
    same = _digests(rows)[:, None] == _digests(columns)
    bra = norms_in(target.arrays, "a", at, per_output)
    ket = norms_in(target.arrays, "a" if run.symmetric else "b", to, per_output)
    blocks, error = tile_arrays(products, bra, ket, same, run.arithmetic)
    if estimated is not None:
        blocks["standard_error"] = np.where(same, 0.0, estimated)
    row, column = np.unravel_index(np.argmax(error), error.shape)
    what = f"the cosine of {rows[row].source.name} and {columns[column].source.name}"
    doubt = Doubt(float(error[row, column]), what)
    precision.refuse(*doubt, run.arithmetic)
    values = []
    for name, place in record.regions:
        block = blocks[name]
        values.append(block if place == (at, to) else np.swapaxes(block, 0, 1))
    target.write(record, values)
    return doubt


def _digests(entries: tuple[Entry, ...]) -> np.ndarray:
    return np.array([entry.digest for entry in entries])
