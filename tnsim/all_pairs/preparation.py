"""The preparation of a run: everything that is known before its first product.

Every model is read once, for its digest and the kinds of its layers. Models with equal digests are
one model. For each sequence of layer kinds one model is kept as an example to plan with. The
outcome is a `PairwiseRun`, and the store that it fills.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import jax

import tnsim
from tnsim.all_pairs import forward_runs, kernel_runs, run_plan
from tnsim.all_pairs import run_plan as costs
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.batched_plans import PairSetting
from tnsim.all_pairs.forward_runs import function_entry
from tnsim.all_pairs.run_plan import KERNELS, Contracted, PairwisePlan, Route
from tnsim.all_pairs.sources import Entry, entry, metric_parameters, sources
from tnsim.all_pairs.store import FORMAT, Store
from tnsim.all_pairs.tasks import Job
from tnsim.compare.by_points import Rows, what_is_read
from tnsim.compare.request import check_comparison
from tnsim.engine.budget import Budget
from tnsim.engine.precision import Arithmetic
from tnsim.engine.runtime.devices import device
from tnsim.errors import DuplicateWarning, ModelError, TooLarge
from tnsim.metrics import metric as metrics
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.differences import by_differences
from tnsim.models.functions import is_function
from tnsim.models.model import Model, terms
from tnsim.problems.features import FeatureSpace
from tnsim.problems.state_sizes import common_units
from tnsim.problems.tensors.kinds import Kinds, kinds

_FREE_FOR_A_RUN = (
    2**30
)  # forward passes up to so many multiplications cost less than planning diagrams


@dataclass
class _Known:
    """Knowledge about the models that were read.

    Args:
        examples: A model of each sequence of layer kinds.
        read: Rows that span the input read by each model, see `compare.by_points.what_is_read`.
    """

    examples: dict[Kinds, Model] = field(default_factory=dict)
    read: list[Rows | None] = field(default_factory=list)

    def add(self, model: Model, metric: Metric) -> None:
        """Add a model that was read."""
        self.examples.setdefault(kinds(model), model)
        self.read.append(what_is_read(model, metric))


class Side(NamedTuple):
    """A list of models.

    Args:
        name: "a" for rows, "b" for columns.
        all: Every model, in the order given.
        entries: Distinct models, in the order of their first occurrence.
    """

    name: str
    all: tuple[Entry, ...]
    entries: tuple[Entry, ...]


class PairwiseRun(NamedTuple):
    """A run: the models, the settings of the tasks, and the plan.

    Args:
        rows, columns: The two lists of models, equal where all pairs of one list are compared.
        symmetric: Whether both are one list.
        job: Settings that all tasks share.
        plan: Route, tiles and costs.
        spaces: Feature spaces by route name, of every route by features, taken or not.
        contracted: Number of pairs and plan, for each plan; empty where pairs are too large.
    """

    rows: Side
    columns: Side
    symmetric: bool
    job: Job
    plan: PairwisePlan
    spaces: Mapping[str, FeatureSpace]
    contracted: Contracted

    @property
    def caveats(self) -> tuple[str, ...]:
        """Differences between the models and the networks that were read, each named once."""
        said = [caveat for one in (*self.rows.all, *self.columns.all) for caveat in one.caveats]
        return tuple(dict.fromkeys(said))

    @property
    def exact(self) -> bool:
        """Whether the metric's definition is met exactly and nothing about a model is guessed."""
        entries = (*self.rows.all, *self.columns.all)
        known = not any(one.guessed for one in entries)
        return known and self.job.setting.metric.is_exact(max(one.nonlinear for one in entries))

    @property
    def arithmetic(self) -> Arithmetic:
        """Largest degree and the precision, which bound the errors of rounding."""
        entries = (*self.rows.entries, *self.columns.entries)
        return Arithmetic(max(one.degree for one in entries), self.job.setting.dtype)

    @property
    def pairs(self) -> int:
        """The number of pairs of distinct models; of a single list each pair counts once."""
        return _pairs(len(self.rows.entries), len(self.columns.entries), self.symmetric)

    def block(self, side: Side, n: int) -> tuple[Entry, ...]:
        """The distinct models of block `n`."""
        return side.entries[n * self.job.size : (n + 1) * self.job.size]

    def pairs_in(self, i: int, j: int) -> int:
        """The number of pairs in tile (i, j)."""
        rows, columns = self.block(self.rows, i), self.block(self.columns, j)
        return _pairs(len(rows), len(columns), self.symmetric and i == j)


def _pairs(rows: int, columns: int, triangle: bool) -> int:
    return rows * (rows + 1) // 2 if triangle else rows * columns


def prepared(
    models: Any,
    metric: Metric,
    other: Any,
    slices: bool,
    dtype: str,
    budget: Budget,
    names: Sequence[Any] | None,
) -> PairwiseRun:
    """The run before its first product; the arguments are those of `pairwise`.

    Raises:
        ModelError: Models cannot be compared.
        TooLarge: A single inner product is beyond the budget.
    """
    metrics.check_metric(metric)
    known = _Known()
    rows = _side("a", models, names, known, metric, dtype)
    columns = rows._replace(name="b")
    if other is not None:
        columns = _side("b", other, None, known, metric, dtype)
    _check_shapes((*rows.all, *columns.all))
    for model in known.examples.values():
        check_comparison(model, model, metric)
    others = None if other is None else columns.entries
    pairs = _pairs(len(rows.entries), len(columns.entries), other is None)
    units = common_units(known.examples.values(), metric)
    setting = PairSetting(metric, slices, dtype, budget, pairs, units)
    route = _route(rows.entries, others, known, setting)
    setting = setting._replace(tier=route.plan.tier)
    key = uuid4().hex  # two equal runs at the same time share no kept blocks
    job = Job(
        setting=setting,
        space=None,
        size=route.plan.tile,
        keep_blocks=2,
        keep_bytes=0,
        alone=True,
        key=key,
        points=route.points,
        kernels=route.plan.route == KERNELS,
    )
    symmetric = other is None
    return PairwiseRun(rows, columns, symmetric, job, route.plan, route.spaces, route.contracted)


def _route(
    rows: Sequence[Entry], columns: Sequence[Entry] | None, known: _Known, setting: PairSetting
) -> Route:
    """The cheapest of all routes, with the costs of the others."""
    examples = known.examples
    if kernel_runs.applies(list(examples.values()), setting):
        return kernel_runs.route(rows, columns, examples, setting)
    forward = forward_runs.route(rows, columns, examples, known.read, setting)
    if forward is None:
        return costs.plan(rows, columns, examples, setting)
    passes = forward.plan
    if adds_up(setting.metric) or passes.multiplications <= _FREE_FOR_A_RUN:
        return forward
    try:
        other = costs.plan(rows, columns, examples, setting)
    except TooLarge:
        return forward
    if passes.multiplications <= other.plan.multiplications:
        cheapest = dataclasses.replace(passes, others=other.plan.routes)
        return other._replace(plan=cheapest, points=forward.points)
    cheapest = dataclasses.replace(other.plan, others=(*other.plan.others, passes))
    return other._replace(plan=cheapest)


def _check_shapes(entries: Sequence[Entry]) -> None:
    """Refuse models with other widths or another sequence length than the first model."""
    first = entries[0]
    for one in entries:
        known = None not in (one.d_in, first.d_in)
        if (one.d_in != first.d_in and known) or one.d_out != first.d_out:
            raise ModelError(
                f"{one.source.name} maps {one.d_in} inputs to {one.d_out} outputs, "
                f"but {first.source.name} maps {first.d_in} to {first.d_out}"
            )
        if one.n_ctx != first.n_ctx:
            raise ModelError(
                f"{one.source.name} reads sequences of n_ctx={one.n_ctx}, "
                f"but {first.source.name} of n_ctx={first.n_ctx}"
            )


def _side(name: str, models: Any, names: Any, known: _Known, metric: Metric, dtype: str) -> Side:
    """A list of models, each read once and added to `known`."""
    entries: list[Entry] = []
    distinct: dict[str, Entry] = {}
    equal: list[str] = []
    for source in sources(models, names):
        model: Any = source.read()
        if is_function(model):
            found = function_entry(source, metric)
        else:
            found = entry(source, model, dtype)
            for _, part in terms(by_differences(model, dtype)):
                known.add(part, metric)
        entries.append(found)
        first = distinct.setdefault(found.digest, found)
        if first is not found:
            equal.append(f"{source.label} = {first.source.label}")
    if equal:
        warnings.warn(
            f"models with identical weights: {stores.listed(equal)}; they are computed once",
            DuplicateWarning,
            stacklevel=4,
        )
    return Side(name, tuple(entries), tuple(distinct.values()))


def store_of(run: PairwiseRun, path: Path | None) -> Store:
    """The store of a run: in memory without a path, else new or continued."""
    attrs = _attributes(run)
    if path is not None and any(one.d_in is None for one in (*run.rows.all, *run.columns.all)):
        raise ModelError(
            "a store tells models by their weights, and plain functions have none that are known: "
            "run without store="
        )
    return stores.in_memory(attrs) if path is None else stores.opened(path, attrs)


def _attributes(run: PairwiseRun) -> dict[str, Any]:
    """The attributes by which a store describes its run."""
    setting = run.job.setting
    sides = [run.rows] if run.symmetric else [run.rows, run.columns]
    attrs: dict[str, Any] = {
        "format": FORMAT,
        "metric": setting.metric.name,
        "metric_parameters": metric_parameters(setting.metric),
        "dtype": setting.dtype,
        "slices": setting.slices,
        "outputs": run.rows.all[0].d_out if setting.slices else None,
        "exact": int(run.exact),
        "estimates": int(run.job.points is not None and run.job.points.drawn),
        "symmetric": int(run.symmetric),
        "route": run.plan.route,
        "tile": run.plan.tile,
        "tier": setting.tier,
        "plan": run.plan.summary,
        "duplicates": sum(len(side.all) - len(side.entries) for side in sides),
        "caveats": list(run.caveats),
        "device": device(),
        "tnsim_version": tnsim.__version__,
        "jax_version": jax.__version__,
    }
    attrs |= {"hash_b": None, "labels_b": None, "names_b": None}
    for side in sides:
        attrs[f"hash_{side.name}"] = [one.digest for one in side.all]
        attrs[f"labels_{side.name}"] = [one.source.label for one in side.all]
        attrs[f"names_{side.name}"] = [one.source.name for one in side.all]
    return attrs


def as_stored(run: PairwiseRun, target: Store, alone: bool) -> PairwiseRun:
    """The run with the route, the tiles and the tier of its store.

    Args:
        run: Run as planned now.
        target: Store of the run, begun by this run or by an earlier one.
        alone: Whether this process computes the whole run. Blocks prepared from models are kept for
            later tiles; workers keep less, as several of them may share one machine.
    """
    route, tile = target.attrs["route"], target.attrs["tile"]
    space = run.spaces.get(route)
    keep = run_plan.memory(run.job.setting) / 2
    if not alone:
        keep /= os.cpu_count() or 1
    setting = run.job.setting._replace(tier=target.attrs["tier"])
    job = run.job._replace(setting=setting, size=tile, space=space, keep_bytes=keep, alone=alone)
    streamed = any(plan.route == route and plan.streamed for plan in run.plan.routes)
    if not streamed:
        job = job._replace(keep_blocks=2 * len(job.parts))
    return run._replace(job=job)
