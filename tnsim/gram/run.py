"""All pairs of many models.

In: models or files, a metric. Out: a `Pairwise`, or what it would cost.

A run reads every model once for its digest and shape, plans, computes the squared norms block by
block and then the inner products tile by tile. Models with equal digests are one model. What is
finished is in the store.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import jax
import numpy as np
from numpy.typing import DTypeLike

import tnsim
from tnsim.compare import planned
from tnsim.compare.planned import Budget
from tnsim.engine import precision
from tnsim.engine.log_scaled import LogScaled
from tnsim.engine.plan import dtype_name
from tnsim.engine.precision import Arithmetic
from tnsim.errors import DuplicateWarning, ModelError, StoreWarning
from tnsim.folding.features import Space
from tnsim.gram import executors, tasks
from tnsim.gram import run_plan as costs
from tnsim.gram import store as stores
from tnsim.gram.batched_plans import Setting
from tnsim.gram.claims import Claims
from tnsim.gram.digests import metric_parameters
from tnsim.gram.layout import Record
from tnsim.gram.normalise import Doubt, norm_arrays, norms_in, tile_arrays
from tnsim.gram.progress import Work, advice, complete
from tnsim.gram.result import Pairwise, labelled, require_xarray
from tnsim.gram.run_plan import PairwisePlan
from tnsim.gram.sources import Entry, entry, sources
from tnsim.gram.store import Store
from tnsim.gram.store_metadata import FORMAT
from tnsim.gram.tasks import Job
from tnsim.metrics import metric as metrics
from tnsim.metrics.metric import Gaussian, Metric
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.tensors.kinds import LayerKind


def pairwise(
    models: Any,
    metric: Metric = Gaussian(),
    other: Any = None,
    *,
    slices: bool = False,
    dtype: DTypeLike = "float64",
    store: str | os.PathLike | None = None,
    executor: Any = None,
    progress: bool = False,
    budget: Budget = Budget(),
    names: Sequence[Any] | None = None,
) -> Pairwise:
    """Similarity of every pair of models, or of every model with every one of `other`.

    Args:
        models, other: Sequences of models or combinations, mappings from labels to them, or a
            `tnsim.load` of many files, whose weights are read when they are needed. Without
            `other`, all pairs of `models`.
        metric: How inputs are weighed.
        slices: Also the cosine of every output.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        store: A folder in which finished tiles are kept, so that the same call goes on where an
            earlier one ended.
        executor: Anything with `submit`, such as a `concurrent.futures` executor (processes must
            not fork) or a `dask.distributed.Client`.
        progress: Whether a progress bar is shown.
        budget: For one inner product and for the memory of a tile.
        names: Labels of `models`.

    Returns:
        A `Pairwise`: float64 similarities of shape (models, others) in [-1, 1], natural
        logarithms and signs of the inner products, and with `slices` also (models, others, d_out).

    Raises:
        ModelError: Models cannot be compared, or one is the zero function.
        StoreMismatch: The store holds another run.
        DamagedStore: What the store holds cannot be told any more.
        ExecutorError: The executor fails.
        TooLarge: One inner product, or the memory of a tile, is beyond the budget.
        ResultError: The terms of a combination cancel until no digit is left.

    Warns:
        DuplicateWarning: Models have identical weights.
        StoreWarning: Something in the store was damaged and is computed again.
        PrecisionWarning: The largest visible error among the pairs that were computed.

    Example:
        >>> import numpy as np, tnsim
        >>> weights = [np.eye(2), np.array([[1.0, 0.0], [0.0, 0.0]])]
        >>> models = [tnsim.Model([tnsim.Linear(w)]) for w in weights]
        >>> tnsim.pairwise(models).similarity.values.round(4).tolist()
        [[1.0, 0.7071], [0.7071, 1.0]]

    Source:
        Paper, equation 2, for every pair.
    """
    require_xarray()
    path = None if store is None else stores.folder(store)
    dtype = dtype_name(dtype)
    run = _prepared(models, metric, other, slices, dtype, budget, names)
    target = _target(run, path)
    run = _as_stored(run, target, executor is None)
    doubts = [Doubt(run.arithmetic.alone, "")]
    if target.damaged:
        warnings.warn(
            f"{store}: damaged: {stores.listed(target.damaged)}; computed again",
            StoreWarning,
            stacklevel=2,
        )
    with _bar(run, progress) as bar, tasks.forgetting(run.job), Claims(target.path) as claims:
        try:
            for work in _works(run, target, bar, doubts):
                complete(work, target, claims, executor)
            target.finish()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(advice(target))
            raise
    precision.warn(*max(doubts), run.arithmetic, stacklevel=2)
    return labelled(target.attrs, target.arrays)


def plan_pairwise(
    models: Any,
    metric: Metric = Gaussian(),
    other: Any = None,
    *,
    slices: bool = False,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> PairwisePlan:
    """What `pairwise` would take for these arguments.

    Reads every model once; a matrix product is timed for the estimate.

    Args:
        models, other: Sequences of models or combinations, mappings from labels to them, or a
            `tnsim.load` of many files, whose weights are read when they are needed. Without
            `other`, all pairs of `models`.
        metric: How inputs are weighed.
        slices: Also the cosine of every output.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: For one inner product and for the memory of a tile.

    Returns:
        A `PairwisePlan`: scalar multiplications, bytes and seconds.

    Raises:
        ModelError: Models cannot be compared.
        TooLarge: One inner product is beyond the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> weights = [np.eye(2), np.array([[1.0, 0.0], [0.0, 0.0]])]
        >>> models = [tnsim.Model([tnsim.Linear(w)]) for w in weights]
        >>> tnsim.plan_pairwise(models).pairs
        3
    """
    dtype = dtype_name(dtype)
    return costs.with_seconds(
        _prepared(models, metric, other, slices, dtype, budget, None).plan, dtype
    )


def open_pairwise(path: str | os.PathLike) -> Pairwise:
    """The result in a store, every number of it verified.

    Args:
        path: The folder that was the `store` of a run.

    Returns:
        A `Pairwise` as the run returns it. Pairs that are not computed yet are NaN.

    Raises:
        StoreMismatch: There is no store.
        DamagedStore: Anything in it is not what was written.

    Warns:
        StoreWarning: The run is not finished.

    Example:
        >>> import tempfile
        >>> import numpy as np, tnsim
        >>> weights = [np.eye(2), np.array([[1.0, 0.0], [0.0, 0.0]])]
        >>> models = [tnsim.Model([tnsim.Linear(w)]) for w in weights]
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> result = tnsim.pairwise(models, store=folder)
        >>> bool((tnsim.open_pairwise(folder).similarity == result.similarity).all())
        True
    """
    require_xarray()
    store, missing = stores.read(stores.folder(path))
    if missing:
        warnings.warn(
            f"{path}: not finished: {stores.listed(missing)} missing, whose pairs are NaN; "
            "run pairwise again with this store to go on",
            StoreWarning,
            stacklevel=2,
        )
    return labelled(store.attrs, store.arrays)


class _Side(NamedTuple):
    """One list of models: all of them, the distinct ones among them, and which is which."""

    name: str
    all: tuple[Entry, ...]
    entries: tuple[Entry, ...]


class _Run(NamedTuple):
    rows: _Side
    columns: _Side
    symmetric: bool
    job: Job
    plan: PairwisePlan
    space: Space | None

    @property
    def arithmetic(self) -> Arithmetic:
        entries = (*self.rows.entries, *self.columns.entries)
        return Arithmetic(max(one.degree for one in entries), self.job.setting.dtype)


def _prepared(models, metric, other, slices: bool, dtype: str, budget: Budget, names) -> _Run:
    """Everything that is known before the first product. Raises `ModelError` and `TooLarge`."""
    metrics.check_metric(metric)
    examples: dict[tuple[LayerKind, ...], Model] = {}
    rows = _side("a", models, names, examples, dtype)
    columns = rows._replace(name="b") if other is None else _side("b", other, None, examples, dtype)
    first = rows.all[0]
    for one in (*rows.all, *columns.all):
        if (one.d_in, one.d_out) != (first.d_in, first.d_out):
            found, wanted = (
                f"{one.d_in} inputs to {one.d_out} outputs",
                f"{first.d_in} to {first.d_out}",
            )
            raise ModelError(
                f"{one.source.name} maps {found}, but {first.source.name} maps {wanted}"
            )
        if one.n_ctx != first.n_ctx:
            raise ModelError(
                f"{one.source.name} reads sequences of n_ctx={one.n_ctx}, "
                f"but {first.source.name} of n_ctx={first.n_ctx}"
            )
    for model in examples.values():
        planned.check(model, model, metric)
    setting = Setting(metric, slices, dtype, budget)
    plan, space = costs.plan(
        rows.entries, None if other is None else columns.entries, examples, setting
    )
    job = Job(setting, None, plan.tile, 0, key=uuid4().hex)  # equal runs at once stay apart
    return _Run(rows, columns, other is None, job, plan, space)


def _side(
    name: str, models: Any, names: Any, examples: dict[tuple[LayerKind, ...], Model], dtype: str
) -> _Side:
    """Read every model once, keep one of each shape, and find those that are equal."""
    entries, distinct, equal = [], {}, []
    for source in sources(models, names):
        model = source.read()
        found = entry(source, model, dtype)
        for (_, kinds), (_, part) in zip(
            found.parts, terms(by_differences(model, dtype)), strict=True
        ):
            examples.setdefault(kinds, part)
        entries.append(found)
        if distinct.setdefault(found.digest, found) is not found:
            equal.append(f"{source.label} = {distinct[found.digest].source.label}")
    if equal:
        shown = ", ".join(equal[:5]) + (f" and {len(equal) - 5} more" if len(equal) > 5 else "")
        warnings.warn(
            f"models with identical weights: {shown}; they are computed once",
            DuplicateWarning,
            stacklevel=4,
        )
    return _Side(name, tuple(entries), tuple(distinct.values()))


def _target(run: _Run, path: Path | None) -> Store:
    """The store of a run: in memory, new, or the one that is there."""
    setting = run.job.setting
    nonlinear = max(one.nonlinear for one in (*run.rows.all, *run.columns.all))
    attrs: dict[str, Any] = {
        "format": FORMAT,
        "metric": setting.metric.name,
        "metric_parameters": metric_parameters(setting.metric),
        "dtype": setting.dtype,
        "slices": setting.per_output,
        "outputs": run.rows.all[0].d_out if setting.per_output else None,
        "exact": int(setting.metric.is_exact(nonlinear)),
        "symmetric": int(run.symmetric),
        "route": run.plan.route,
        "tile": run.plan.tile,
        "plan": run.plan.summary,
        "duplicates": sum(
            len(side.all) - len(side.entries)
            for side in ((run.rows,) if run.symmetric else (run.rows, run.columns))
        ),
        "tnsim_version": tnsim.__version__,
        "jax_version": jax.__version__,
    }
    for side in (run.rows, run.columns):
        alone = run.symmetric and side.name == "b"
        attrs[f"hash_{side.name}"] = None if alone else [one.digest for one in side.all]
        attrs[f"labels_{side.name}"] = None if alone else [one.source.label for one in side.all]
        attrs[f"names_{side.name}"] = None if alone else [one.source.name for one in side.all]
    return stores.in_memory(attrs) if path is None else stores.opened(path, attrs)


def _as_stored(run: _Run, target: Store, alone: bool) -> _Run:
    """The run along the route and with the tiles that its store was begun with.

    What is prepared is kept for later tiles only where this process computes alone: workers may
    share a machine.
    """
    route, tile = target.attrs["route"], target.attrs["tile"]
    space = run.space if route == costs.FEATURES else None
    keep = costs.memory(run.job.setting) / 2 if alone else 0
    return run._replace(job=run.job._replace(size=tile, space=space, keep_bytes=keep))


def _block(run: _Run, side: _Side, n: int) -> tuple[Entry, ...]:
    return side.entries[n * run.job.size : (n + 1) * run.job.size]


def _works(run: _Run, target: Store, bar: Any, doubts: list[Doubt]) -> list[Work]:
    """All norms, then the tiles that they normalise, whose largest errors are added to `doubts`."""
    layout = target.layout
    sides = {side.name: side for side in (run.rows, run.columns)}
    works = [_norm_work(run, target, sides[name], layout.norms(name)) for name in layout.sides]
    return [*works, _tile_work(run, target, layout.tiles(), bar, doubts)]


def _norm_work(run: _Run, target: Store, side: _Side, records: list[Record]) -> Work:
    def task(record: Record) -> executors.Task:
        return tasks.norms, (run.job, _block(run, side, *record.blocks))

    def write(record: Record, result: Any) -> None:
        _write_norms(run, target, side, record, result)

    return Work(records, task, write, lambda record: None)


def _tile_work(
    run: _Run, target: Store, records: list[Record], bar: Any, doubts: list[Doubt]
) -> Work:
    def task(record: Record) -> executors.Task:
        i, j = record.blocks
        return tasks.tile, (run.job, _block(run, run.rows, i), _block(run, run.columns, j))

    def write(record: Record, result: Any) -> None:
        doubts.append(_write_tile(run, target, record, result))

    return Work(records, task, write, lambda record: bar.update(_pairs(run, *record.blocks)))


def _write_norms(run: _Run, target: Store, side: _Side, record: Record, result: Any) -> None:
    """Write squared norms and the sizes of their sums. Raises `ModelError` where one is zero."""
    entries = _block(run, side, *record.blocks)
    norms = tasks.expect_norms(result, (len(entries),), target.layout.outputs, advice(target))
    for i, one in enumerate(entries):
        norm = LogScaled(*(x[i] for x in norms))
        precision.check_norm(norm, one.source.name, one.terms > 1, run.arithmetic)
    target.write(record, list(norm_arrays(norms, run.job.setting.per_output).values()))


def _write_tile(run: _Run, target: Store, record: Record, result: Any) -> Doubt:
    """Normalise a tile and write it, mirrored too where rows and columns are one list.

    Returns the cosine with the largest error. Raises `ResultError` where that leaves no digit.
    """
    i, j = record.blocks
    at, to, per_output = target.layout.block(i), target.layout.block(j), run.job.setting.per_output
    rows, columns = _block(run, run.rows, i), _block(run, run.columns, j)
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


def _pairs(run: _Run, i: int, j: int) -> int:
    rows, columns = len(_block(run, run.rows, i)), len(_block(run, run.columns, j))
    return rows * (rows + 1) // 2 if run.symmetric and i == j else rows * columns


def _bar(run: _Run, shown: bool) -> Any:
    from tqdm.auto import tqdm

    rows, columns = len(run.rows.entries), len(run.columns.entries)
    pairs = rows * (rows + 1) // 2 if run.symmetric else rows * columns
    return tqdm(total=pairs, unit="pair", desc="pairs", disable=not shown)
