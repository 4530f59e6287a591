"""All pairs of many models. In: models or files, a metric. Out: a `Pairwise`, or what it would cost.

A run reads every model once for its digest and shape, plans, computes the squared norms block by block and
then the inner products tile by tile. Models with equal digests are one model. What is finished is in the store.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import DTypeLike

import tnsim
from tnsim.compare import planned
from tnsim.compare import similarity as verbs
from tnsim.compare.planned import Budget
from tnsim.engine.log_scaled import Norms, Products, cosine, log_abs, total
from tnsim.engine.plan import dtype_name
from tnsim.errors import DuplicateWarning, ModelError
from tnsim.gram import executors
from tnsim.gram import run_plan as costs
from tnsim.gram import store as stores
from tnsim.gram import tasks as tiles
from tnsim.gram.batched_plans import Setting
from tnsim.gram.digests import metric_parameters
from tnsim.gram.features import Space
from tnsim.gram.result import Pairwise, require_xarray
from tnsim.gram.run_plan import PairwisePlan
from tnsim.gram.sources import Entry, entry, sources
from tnsim.gram.store import Store
from tnsim.gram.tasks import Job
from tnsim.metrics import metric as metrics
from tnsim.metrics.metric import Gaussian, Metric
from tnsim.models.model import Model, terms
from tnsim.tensors.lifted import Kind


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

    models, other: sequences of models or combinations, mappings from labels to them, or a `tnsim.load` of many files,
    whose weights are read when they are needed. slices: also the cosine of every output. store: a folder in which
    finished tiles are kept, so that the same call goes on where an earlier one ended. executor: anything with
    `submit`, such as a `concurrent.futures` executor (processes must not fork) or a `dask.distributed.Client`.
    budget: for one inner product and for the memory of a tile. names: labels of `models`.

    Raises `ModelError` when models cannot be compared or one is the zero function, `StoreMismatch` when the store
    holds another run, `TooLarge`; warns with `DuplicateWarning` of models with identical weights.
    """
    require_xarray()
    path = None if store is None else stores.folder(store)
    dtype = dtype_name(dtype)
    run = _prepared(models, metric, other, slices, dtype, budget, names)
    target = _target(run, path)
    run = _as_stored(run, target, executor is None)
    verbs.warn_of_rounding(max(e.degree for e in (*run.rows.entries, *run.columns.entries)), dtype)
    with _bar(run, progress) as bar, tiles.forgetting():
        for side in (run.rows,) if run.symmetric else (run.rows, run.columns):
            for block, found in executors.completed(_norm_tasks(run, target, side), executor):
                _write_norms(run, target, side, block, found)
        for (i, j), found in executors.completed(_tile_tasks(run, target, bar), executor):
            _write_tile(run, target, i, j, found)
            bar.update(_pairs(run, i, j))
    return _result(target)


def plan_pairwise(
    models: Any,
    metric: Metric = Gaussian(),
    other: Any = None,
    *,
    slices: bool = False,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> PairwisePlan:
    """What `pairwise` would take for these arguments. Reads every model once; a matrix product is timed for the estimate."""
    dtype = dtype_name(dtype)
    return costs.with_seconds(
        _prepared(models, metric, other, slices, dtype, budget, None).plan, dtype
    )


def open_pairwise(path: str | os.PathLike) -> Pairwise:
    """The result in a store; pairs that are not computed yet are NaN. Raises `StoreMismatch` when there is none."""
    return _result(stores.open_store(stores.folder(path), "r"))


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


def _prepared(models, metric, other, slices: bool, dtype: str, budget: Budget, names) -> _Run:
    """Everything that is known before the first product. Raises `ModelError` and `TooLarge`."""
    metrics.check_metric(metric)
    examples: dict[tuple[Kind, ...], Model] = {}
    rows = _side("a", models, names, examples)
    columns = rows._replace(name="b") if other is None else _side("b", other, None, examples)
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
                f"{one.source.name} reads sequences of n_ctx={one.n_ctx}, but {first.source.name} of n_ctx={first.n_ctx}"
            )
    for model in examples.values():
        planned.check(model, model, metric)
    setting = Setting(metric, slices, dtype, budget)
    plan, space = costs.plan(
        rows.entries, None if other is None else columns.entries, examples, setting
    )
    key = f"{metric.name} {metric_parameters(metric)} {dtype} {slices}"
    return _Run(rows, columns, other is None, Job(setting, None, plan.tile, 0, key), plan, space)


def _side(name: str, models: Any, names: Any, examples: dict[tuple[Kind, ...], Model]) -> _Side:
    """Read every model once, keep one of each shape, and find those that are equal."""
    entries, distinct, equal = [], {}, []
    for source in sources(models, names):
        model = source.read()
        found = entry(source, model)
        for (_, kinds), (_, part) in zip(found.parts, terms(model), strict=True):
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


def _target(run: _Run, path: str | os.PathLike | None) -> Store:
    """The store of a run: in memory, new, or the one that is there."""
    outputs = run.rows.all[0].d_out if run.job.setting.per_output else None
    layout = stores.shapes(
        len(run.rows.entries),
        None if run.symmetric else len(run.columns.entries),
        outputs,
        run.plan.tile,
    )
    setting = run.job.setting
    nonlinear = max(one.nonlinear for one in (*run.rows.all, *run.columns.all))
    attrs: dict[str, Any] = {
        "format": stores.FORMAT,
        "metric": setting.metric.name,
        "metric_parameters": metric_parameters(setting.metric),
        "dtype": setting.dtype,
        "slices": setting.per_output,
        "exact": int(metrics.is_exact(setting.metric, nonlinear)),
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
        "arrays": list(layout),
    }
    for side in (run.rows, run.columns):
        alone = run.symmetric and side.name == "b"
        attrs[f"hash_{side.name}"] = None if alone else [one.digest for one in side.all]
        attrs[f"labels_{side.name}"] = None if alone else [one.source.label for one in side.all]
        attrs[f"names_{side.name}"] = None if alone else [one.source.name for one in side.all]
    if path is None:
        return stores.in_memory(layout, attrs)
    path = Path(path)
    found = stores.open_store(path) if path.exists() else stores.create(path, layout, attrs)
    stores.check(found, attrs)
    return found


def _as_stored(run: _Run, target: Store, alone: bool) -> _Run:
    """The run along the route and with the tiles that its store was begun with.

    What is prepared is kept for later tiles only where this process computes alone: workers may share a machine.
    """
    route, tile = target.attrs["route"], target.attrs["tile"]
    space = run.space if route == costs.FEATURES else None
    keep = costs.memory(run.job.setting) / 2 if alone else 0
    return run._replace(
        job=run.job._replace(
            size=tile, space=space, keep_bytes=keep, key=f"{run.job.key} {space} {tile}"
        )
    )


def _block(run: _Run, side: _Side, n: int) -> tuple[Entry, ...]:
    return side.entries[n * run.job.size : (n + 1) * run.job.size]


def _blocks(run: _Run, side: _Side) -> int:
    return -(-len(side.entries) // run.job.size)


def _at(run: _Run, n: int) -> slice:
    return slice(n * run.job.size, (n + 1) * run.job.size)


def _norm_tasks(run: _Run, target: Store, side: _Side) -> Iterator[tuple[int, executors.Task]]:
    for n in range(_blocks(run, side)):
        if not target.arrays[f"blocks_{side.name}"][n]:
            stores.log_start(target, f"norms {side.name} {n}")
            yield n, (tiles.norms, (run.job, _block(run, side, n)))


def _write_norms(run: _Run, target: Store, side: _Side, n: int, found: Norms) -> None:
    entries, per_output = _block(run, side, n), run.job.setting.per_output
    for one, cancelled, mantissa in zip(
        entries, found.cancelled, found.products.mantissa, strict=True
    ):
        if cancelled:
            raise ModelError(
                f"{one.source.name} is a difference of models that are the same function to within rounding: its cosine is undefined"
            )
        if (zero := np.flatnonzero(mantissa <= 0)).size:
            where = f" in output {', '.join(map(str, zero[:8]))}" if per_output else ""
            raise ModelError(
                f"{one.source.name} is the zero function{where}: its cosine with anything is undefined"
            )
    with stores.writing(target.path):
        target.arrays[f"log_norm_{side.name}"][_at(run, n)] = log_abs(
            total(found.products, per_output)
        )
        if per_output:
            target.arrays[f"log_norms_{side.name}"][_at(run, n)] = log_abs(found.products)
        target.arrays[f"blocks_{side.name}"][n] = 1


def _tile_tasks(
    run: _Run, target: Store, bar: Any
) -> Iterator[tuple[tuple[int, int], executors.Task]]:
    """The tiles on and below the diagonal, or all of them; a shared store is begun at a place of the process's own."""
    wanted = [
        (i, j)
        for i in range(_blocks(run, run.rows))
        for j in range(i + 1 if run.symmetric else _blocks(run, run.columns))
    ]
    start = 0 if target.path is None else os.getpid() % len(wanted)
    for i, j in wanted[start:] + wanted[:start]:
        if target.arrays["tiles"][i, j]:
            bar.update(_pairs(run, i, j))
            continue
        stores.log_start(target, f"tile {i} {j}")
        yield (i, j), (tiles.tile, (run.job, _block(run, run.rows, i), _block(run, run.columns, j)))


def _write_tile(run: _Run, target: Store, i: int, j: int, found: Products) -> None:
    """Normalise a tile and write it, mirrored too where rows and columns are one list, and then its marker."""
    at, to, per_output = _at(run, i), _at(run, j), run.job.setting.per_output
    rows, columns = _block(run, run.rows, i), _block(run, run.columns, j)
    other = "a" if run.symmetric else "b"
    norms, also = target.arrays["log_norm_a"][at], target.arrays[f"log_norm_{other}"][to]
    inner = total(found, per_output)
    blocks = {
        "similarity": cosine(inner, norms, also),
        "log_inner": log_abs(inner),
        "sign": np.sign(inner.mantissa),
    }
    if per_output:
        blocks["slices"] = cosine(
            found, target.arrays["log_norms_a"][at], target.arrays[f"log_norms_{other}"][to]
        )
    same = np.array([[a.digest == b.digest for b in columns] for a in rows])
    for name, values in blocks.items():
        values[same] = (
            np.broadcast_to(norms[:, None], same.shape)[same] if name == "log_inner" else 1
        )
    with stores.writing(target.path):
        for name, values in blocks.items():
            target.arrays[name][at, to] = values
            if run.symmetric and i != j:
                target.arrays[name][to, at] = np.swapaxes(values, 0, 1)
        target.arrays["tiles"][i, j] = 1


def _pairs(run: _Run, i: int, j: int) -> int:
    rows, columns = len(_block(run, run.rows, i)), len(_block(run, run.columns, j))
    return rows * (rows + 1) // 2 if run.symmetric and i == j else rows * columns


def _bar(run: _Run, shown: bool) -> Any:
    from tqdm.auto import tqdm

    rows, columns = len(run.rows.entries), len(run.columns.entries)
    pairs = rows * (rows + 1) // 2 if run.symmetric else rows * columns
    return tqdm(total=pairs, unit="pair", desc="pairs", disable=not shown)


def _result(target: Store) -> Pairwise:
    """The arrays of a store with their labels, models that are equal repeated."""
    attrs = target.attrs
    coordinates, index = {}, {}
    for side in "ab":
        stored = "a" if attrs["symmetric"] else side
        digests = attrs[f"hash_{stored}"]
        distinct = {digest: n for n, digest in enumerate(dict.fromkeys(digests))}
        index[side] = np.array([distinct[digest] for digest in digests])
        coordinates[side] = attrs[f"labels_{stored}"]
        coordinates[f"name_{side}"] = (side, attrs[f"names_{stored}"])
        coordinates[f"hash_{side}"] = (side, digests)
        coordinates[f"log_norm_{side}"] = (
            side,
            np.asarray(target.arrays[f"log_norm_{stored}"])[index[side]],
        )
    both = np.ix_(index["a"], index["b"])
    variables = {
        name: (("a", "b"), np.asarray(target.arrays[name])[both])
        for name in ("similarity", "log_inner", "sign")
    }
    variables |= {name: coordinates.pop(name) for name in ("log_norm_a", "log_norm_b")}
    if attrs["slices"]:
        variables["slices"] = (("a", "b", "output"), np.asarray(target.arrays["slices"])[both])
        coordinates["output"] = np.arange(variables["slices"][1].shape[-1])
    known = (
        "metric",
        "metric_parameters",
        "exact",
        "dtype",
        "plan",
        "symmetric",
        "duplicates",
        "tnsim_version",
        "jax_version",
    )
    return Pairwise(variables, coordinates, {name: attrs[name] for name in known})
