"""The work of a run: norms, then tiles. In: a prepared run. Out: units of work that write a store.

The units are pure functions (`tasks`), so they may run anywhere. What they return is checked,
normalised and written here, by the one process that called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tnsim.engine import precision
from tnsim.engine.log_scaled import LogScaled
from tnsim.gram import executors, tasks
from tnsim.gram.layout import Record
from tnsim.gram.normalise import Doubt, norm_arrays, norms_in, tile_arrays
from tnsim.gram.preparation import Run, Side, block_of, pairs_in
from tnsim.gram.progress import Work, advice
from tnsim.gram.store import Store


def units_of_work(run: Run, target: Store, bar: Any, doubts: list[Doubt]) -> list[Work]:
    """All norms, then the tiles that they normalise, whose largest errors are added to `doubts`."""
    layout = target.layout
    sides = {side.name: side for side in (run.rows, run.columns)}
    works = [_norm_work(run, target, sides[name], layout.norms(name)) for name in layout.sides]
    return [*works, _tile_work(run, target, layout.tiles(), bar, doubts)]


def _norm_work(run: Run, target: Store, side: Side, records: list[Record]) -> Work:
    def task(record: Record) -> executors.Task:
        return tasks.norms, (run.job, block_of(run, side, *record.blocks))

    def write(record: Record, result: Any) -> None:
        _write_norms(run, target, side, record, result)

    return Work(records, task, write, lambda record: None)


def _tile_work(
    run: Run, target: Store, records: list[Record], bar: Any, doubts: list[Doubt]
) -> Work:
    def task(record: Record) -> executors.Task:
        i, j = record.blocks
        return tasks.tile, (run.job, block_of(run, run.rows, i), block_of(run, run.columns, j))

    def write(record: Record, result: Any) -> None:
        doubts.append(_write_tile(run, target, record, result))

    return Work(records, task, write, lambda record: bar.update(pairs_in(run, *record.blocks)))


def _write_norms(run: Run, target: Store, side: Side, record: Record, result: Any) -> None:
    """Write squared norms and the sizes of their sums. Raises `ModelError` where one is zero."""
    entries = block_of(run, side, *record.blocks)
    norms = tasks.expect_norms(result, (len(entries),), target.layout.outputs, advice(target))
    for i, one in enumerate(entries):
        norm = LogScaled(*(x[i] for x in norms))
        precision.check_norm(norm, one.source.name, one.terms > 1, run.arithmetic)
    target.write(record, list(norm_arrays(norms, run.job.setting.per_output).values()))


def _write_tile(run: Run, target: Store, record: Record, result: Any) -> Doubt:
    """Normalise a tile and write it, mirrored too where rows and columns are one list.

    Returns the cosine with the largest error. Raises `ResultError` where that leaves no digit.
    """
    i, j = record.blocks
    at, to, per_output = target.layout.block(i), target.layout.block(j), run.job.setting.per_output
    rows, columns = block_of(run, run.rows, i), block_of(run, run.columns, j)
    shape = len(rows), len(columns)
    products = tasks.expect_products(result, shape, target.layout.outputs, advice(target))
    same = np.array([[a.digest == b.digest for b in columns] for a in rows])
    bra = norms_in(target.arrays, "a", at, per_output)
    ket = norms_in(target.arrays, "a" if run.symmetric else "b", to, per_output)
    blocks, error = tile_arrays(products, bra, ket, same, run.arithmetic)
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
