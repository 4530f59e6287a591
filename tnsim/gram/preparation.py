"""What is known of a run before its first product.

In: models or files, a metric. Out: a `Run`, and the store that it fills.

Every model is read once, for its digest and the kinds of its layers. Models with equal digests are
one model; one of each sequence of kinds is kept as an example to plan with.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import jax

import tnsim
from tnsim.compare import planned
from tnsim.compare.planned import Budget
from tnsim.engine.precision import Arithmetic
from tnsim.errors import DuplicateWarning, ModelError
from tnsim.folding.feature_space import Space
from tnsim.gram import run_plan as costs
from tnsim.gram import store as stores
from tnsim.gram.batched_plans import Setting
from tnsim.gram.digests import metric_parameters
from tnsim.gram.run_plan import PairwisePlan
from tnsim.gram.sources import Entry, entry, sources
from tnsim.gram.store import Store
from tnsim.gram.store_metadata import FORMAT
from tnsim.gram.tasks import Job
from tnsim.metrics import metric as metrics
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.tensors.kinds import LayerKind


class Side(NamedTuple):
    """One list of models: all of them, the distinct ones among them, and which is which."""

    name: str
    all: tuple[Entry, ...]
    entries: tuple[Entry, ...]


class Run(NamedTuple):
    rows: Side
    columns: Side
    symmetric: bool
    job: Job
    plan: PairwisePlan
    space: Space | None

    @property
    def arithmetic(self) -> Arithmetic:
        entries = (*self.rows.entries, *self.columns.entries)
        return Arithmetic(max(one.degree for one in entries), self.job.setting.dtype)


def prepared(models, metric, other, slices: bool, dtype: str, budget: Budget, names) -> Run:
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
    return Run(rows, columns, other is None, job, plan, space)


def _side(
    name: str, models: Any, names: Any, examples: dict[tuple[LayerKind, ...], Model], dtype: str
) -> Side:
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
    return Side(name, tuple(entries), tuple(distinct.values()))


def store_of(run: Run, path: Path | None) -> Store:
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


def as_stored(run: Run, target: Store, alone: bool) -> Run:
    """The run along the route and with the tiles that its store was begun with.

    What is prepared is kept for later tiles only where this process computes alone: workers may
    share a machine.
    """
    route, tile = target.attrs["route"], target.attrs["tile"]
    space = run.space if route == costs.FEATURES else None
    keep = costs.memory(run.job.setting) / 2 if alone else 0
    return run._replace(job=run.job._replace(size=tile, space=space, keep_bytes=keep))


def block_of(run: Run, side: Side, n: int) -> tuple[Entry, ...]:
    return side.entries[n * run.job.size : (n + 1) * run.job.size]


def pairs_in(run: Run, i: int, j: int) -> int:
    rows, columns = len(block_of(run, run.rows, i)), len(block_of(run, run.columns, j))
    return rows * (rows + 1) // 2 if run.symmetric and i == j else rows * columns
