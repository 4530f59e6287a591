"""The preparation of a run: everything that is known before its first product.

Every model is read once, for its digest and the kinds of its layers. Models with equal digests are
one model. For each sequence of layer kinds one model is kept as an example to plan with. The
outcome is a `PairwiseRun`, and the store that it fills.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import jax

import tnsim
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.contracted_runs import ContractedRun
from tnsim.all_pairs.forward_runs import ForwardRun, function_entry
from tnsim.all_pairs.kernel_runs import KernelRun
from tnsim.all_pairs.run_plan import Models, RouteOfRun, memory, pairs_of, summary, tiles_of
from tnsim.all_pairs.sources import Entry, entry, metric_parameters, sources
from tnsim.all_pairs.store import FORMAT
from tnsim.all_pairs.vector_runs import VectorRun
from tnsim.all_pairs.ways import Job, PairSetting
from tnsim.circuits.parts import PartSeries
from tnsim.compare.by_points import Rows, points_of, what_is_read
from tnsim.compare.estimates import Estimate
from tnsim.compare.request import check_comparison, estimated
from tnsim.compare.routes import Ways, from_table, weighed
from tnsim.engine.budget import Budget
from tnsim.engine.precision import Arithmetic
from tnsim.engine.runtime.devices import device
from tnsim.errors import DuplicateWarning, ModelError, warn
from tnsim.metrics.points import Points, Reading
from tnsim.metrics.protocol import Metric
from tnsim.models.differences import by_differences
from tnsim.models.functions import is_function
from tnsim.models.model import Model, terms
from tnsim.problems import features
from tnsim.problems.features import FeatureSpace
from tnsim.problems.tensors.kinds import Kinds, kinds
from tnsim.problems.units import common_units


@dataclass
class Known:
    """Knowledge about the models that were read.

    Args:
        examples: A model of each sequence of layer kinds.
        read: Rows that span the input read by each model, by the model's digest, see
            `compare.by_points.what_is_read`.
    """

    examples: dict[Kinds, Model] = field(default_factory=dict)
    read: dict[str, Rows | None] = field(default_factory=dict)

    def add(self, digest: str, model: Model, metric: Metric) -> None:
        """Add a model that was read."""
        self.examples.setdefault(kinds(model), model)
        if digest not in self.read:
            self.read[digest] = what_is_read(model, metric)

    def of(self, entries: Sequence[Entry]) -> Known:
        """The knowledge about the models of some entries."""
        bases = dict(itertools.chain.from_iterable(entry.bases for entry in entries))
        wanted = set(bases.values())
        examples = {kind: model for kind, model in self.examples.items() if kind in wanted}
        return Known(examples, {digest: self.read.get(digest) for digest in bases})


class Asked(NamedTuple):
    """What is asked of all pairs, whichever the models are; see `pairwise`.

    Args:
        metric: Metric that weighs the inputs.
        slices: Whether every output has an inner product of its own.
        dtype: Precision of the computation.
        budget: Limits on a single inner product and on the memory of a tile.
        centred: Whether means are taken away.
        stored: Whether results go to a store.
    """

    metric: Metric
    slices: bool
    dtype: str
    budget: Budget
    centred: bool = False
    stored: bool = False


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


class Place(NamedTuple):
    """The place of a run in a folder of results.

    Attributes:
        path: Folder of the store.
        part: Name of the part that is compared; None for whole models.
        parts: All parts that are compared into this folder, with the settings by which they are
            taken; None for whole models.
    """

    path: Path
    part: str | None = None
    parts: Mapping[str, Any] | None = None


class PairwiseRun(NamedTuple):
    """A run: the models, the settings of the tasks, and the plan.

    Args:
        rows, columns: The two lists of models, equal where all pairs of one list are compared.
        symmetric: Whether both are one list.
        job: Settings that all tasks share.
        estimate: Route, tiles and costs.
        known: Knowledge about the models, to plan pairs of some of them by.
    """

    rows: Side
    columns: Side
    symmetric: bool
    job: Job
    estimate: Estimate
    known: Known

    @property
    def models(self) -> dict[str, dict[str, Entry]]:
        """The distinct models of each side by digest; of a single list both sides are the same."""
        both = {"a": self.rows, "b": self.columns}
        return {
            name: {entry.digest: entry for entry in side.entries} for name, side in both.items()
        }

    @property
    def caveats(self) -> tuple[str, ...]:
        """Differences between the models and the networks that were read, each named once."""
        said = [caveat for entry in (*self.rows.all, *self.columns.all) for caveat in entry.caveats]
        return tuple(dict.fromkeys(said))

    @property
    def exact(self) -> bool:
        """Whether the metric's definition is met exactly."""
        entries = (*self.rows.all, *self.columns.all)
        return self.job.setting.metric.is_exact(max(entry.nonlinear for entry in entries))

    @property
    def arithmetic(self) -> Arithmetic:
        """Largest degree and the precision, which bound the errors of rounding."""
        entries = (*self.rows.entries, *self.columns.entries)
        return Arithmetic(max(entry.degree for entry in entries), self.job.setting.dtype)

    @property
    def pairs(self) -> int:
        """The number of pairs of distinct models; of a single list each pair counts once."""
        return pairs_of(len(self.rows.entries), len(self.columns.entries), self.symmetric)


def prepared(models: Any, other: Any, names: Any, asked: Asked) -> PairwiseRun:
    """The run before its first product.

    Args:
        models, other: Both lists, as `pairwise` takes them.
        names: Labels of `models`, None for their own.
        asked: What is asked of all pairs.

    Raises:
        ModelError: Models cannot be compared.
        TooLarge: A single inner product is beyond the budget.
    """
    known = Known()
    rows = _side("a", models, names, known, asked)
    columns = rows._replace(name="b")
    if other is not None:
        columns = _side("b", other, None, known, asked)
    # All models agree in widths and length with the first model, and a model of every form is
    # checked under the metric.
    _check_shapes((*rows.all, *columns.all))
    asked = asked._replace(metric=estimated(asked.metric, list(known.examples.values()), None))
    for model in known.examples.values():
        check_comparison(model, model, asked.metric)
    return _planned(rows, columns, other is None, known, asked)


def planned_again(
    run: PairwiseRun, rows: Sequence[Entry], columns: Sequence[Entry] | None, route: str
) -> PairwiseRun:
    """The run over some models of a run, by the given route where this route holds the models.

    Args:
        run: Run of all models.
        rows: Distinct models of the rows.
        columns: Distinct models compared with the rows; None for all pairs of `rows`.
        route: Name of the route to keep.

    Raises:
        TooLarge: One inner product is beyond the budget.
    """
    first = Side("a", tuple(rows), tuple(rows))
    second = first._replace(name="b")
    if columns is not None:
        second = Side("b", tuple(columns), tuple(columns))
    known = run.known.of((*first.entries, *second.entries))
    setting = run.job.setting
    asked = Asked(setting.metric, setting.slices, setting.dtype, setting.budget)
    return _planned(first, second, columns is None, known, asked, route)


def _planned(
    rows: Side,
    columns: Side,
    symmetric: bool,
    known: Known,
    asked: Asked,
    kept: str | None = None,
) -> PairwiseRun:
    """The run of two lists of models that were read.

    Args:
        rows, columns: The two lists.
        symmetric: Whether both are one list.
        known: Knowledge about the models.
        asked: What is asked of all pairs.
        kept: Name of the route to take where it holds the models; None for the cheapest.
    """
    others = None if symmetric else columns.entries
    pairs = pairs_of(len(rows.entries), len(columns.entries), symmetric)
    units = common_units(known.examples.values(), asked.metric)
    setting = PairSetting(asked.metric, asked.slices, asked.dtype, asked.budget, pairs, units)
    models = Models(rows.entries, others, known.examples)
    routes = routes_of_run(models, list(known.read.values()), setting, kept)
    # New pairs of a run that grew keep the route of the first run where that is a route now.
    choice = weighed([route for route in routes if route.name == kept] or routes, setting.budget)
    taken, estimate = choice.route, choice.estimate
    tiles = tiles_of(estimate)
    setting = setting._replace(tier=tiles.tier)
    job = Job(
        setting=setting,
        way=taken.way,
        sizes=(tiles.side, tiles.side),
        keep_blocks=2,
        keep_bytes=0,
        alone=True,
        key=uuid4().hex,  # two equal runs at the same time share no kept blocks
        # Arrays of float64 take twice the memory.
        certifies=setting.dtype == "float32" and 2 * estimate.peak_bytes <= memory(setting),
        differences=setting.dtype,
    )
    return PairwiseRun(rows, columns, symmetric, job, estimate, known)


def routes_of_run(
    models: Models, read: Sequence[Rows | None], setting: PairSetting, kept: str | None = None
) -> list[RouteOfRun]:
    """The routes of a run, from the table of `compare.routes`.

    Args:
        models: Models of the run.
        read: Rows that span the input read by each model, see `compare.by_points.what_is_read`.
        setting: Settings common to all pairs.
        kept: Name of the route of which numbers are kept already.

    Raises:
        ModelError: The metric has no inputs for these models.
        UnsupportedLayer: An activation that no route can compare under the metric.
    """
    examples, metric = list(models.examples.values()), setting.metric

    def points() -> Points | None:
        return points_of(examples, metric, read)

    def spaces() -> Sequence[FeatureSpace]:
        return features.spaces(list(models.examples), setting.units.metric, examples[0].n_ctx)

    ways: Ways[RouteOfRun] = Ways(
        partial(KernelRun, models, setting),
        partial(ForwardRun, models, setting),
        partial(VectorRun, models, setting),
        partial(ContractedRun, models, setting),
    )
    routes = from_table(examples, metric, points, spaces, ways)
    # Vectors of a combination are added up before products are taken, so that terms that cancel
    # lose fewer digits: where they fit, no plan is taken, whatever they cost.
    combined = kept is None and any(len(entry.bases) > 1 for entry in models.entries)
    if combined and any(isinstance(route, VectorRun) and route.fits for route in routes):
        routes = [route for route in routes if not isinstance(route, ContractedRun)]
    return routes


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


def _side(name: str, models: Any, names: Any, known: Known, asked: Asked) -> Side:
    """A list of models, each read once and added to `known`."""
    metric, dtype = asked.metric, asked.dtype
    entries: list[Entry] = []
    distinct: dict[str, Entry] = {}
    equal: list[str] = []
    for source in sources(models, names, metric if asked.centred else None):
        model: Any = source.read()
        if is_function(model):
            made = function_entry(source, metric, asked.stored)
        else:
            made = entry(source, model, dtype)
            terms_of_model = terms(by_differences(model, dtype))
            for (digest, _), (_, base) in zip(made.bases, terms_of_model, strict=True):
                known.add(digest, base, metric)
        entries.append(made)
        first = distinct.setdefault(made.digest, made)
        if first is not made:
            equal.append(f"{source.label} = {first.source.label}")
    # Models with an equal part need not be equal, see `part_runs.warn_of_duplicates`.
    if equal and not isinstance(models, PartSeries):
        warn(
            f"models with identical weights: {stores.listed(equal)}; they are computed once",
            DuplicateWarning,
        )
    return Side(name, tuple(entries), tuple(distinct.values()))


def attributes_of(run: PairwiseRun, parts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The attributes by which a store describes its run.

    Args:
        run: Run over all models.
        parts: Parts that are compared into one folder, see `Place`.
    """
    setting = run.job.setting
    sides = [run.rows] if run.symmetric else [run.rows, run.columns]
    first = run.rows.all[0]
    # Of degree 1, as deeper models may come later.
    reading = Reading(first.d_in or 0, first.n_ctx, degree=1)
    attrs: dict[str, Any] = {
        "format": FORMAT,
        "metric": setting.metric.name,
        "metric_parameters": metric_parameters(setting.metric, reading),
        "dtype": setting.dtype,
        "slices": setting.slices,
        "centred": int(run.rows.all[0].source.centred is not None),
        "parts": parts,
        "outputs": run.rows.all[0].d_out if setting.slices else None,
        "exact": int(run.exact),
        "estimates": int(run.job.way.estimates),
        "symmetric": int(run.symmetric),
        # How the pairs of every growth of a store are computed, those of the first run first.
        "growths": [
            {
                "route": run.estimate.route,
                "tile": tiles_of(run.estimate).side,
                "tier": setting.tier,
            }
        ],
        "plan": summary(run.estimate),
        "caveats": list(run.caveats),
        "device": device(),
        "tnsim_version": tnsim.__version__,
        "jax_version": jax.__version__,
    }
    attrs |= {"hash_b": None, "labels_b": None, "names_b": None, "since_b": None}
    for side in sides:
        attrs[f"hash_{side.name}"] = [entry.digest for entry in side.all]
        attrs[f"labels_{side.name}"] = [entry.source.label for entry in side.all]
        attrs[f"names_{side.name}"] = [entry.source.name for entry in side.all]
        attrs[f"since_{side.name}"] = [0] * len(side.all)  # the growth with which each came
    return attrs


def as_stored(run: PairwiseRun, tier: str, alone: bool) -> PairwiseRun:
    """The run with the tier of its store.

    Args:
        run: Run as planned now.
        tier: Tier that was chosen when the store was begun.
        alone: Whether this process computes the whole run. Blocks prepared from models are kept for
            later tiles; workers keep less, as several of them may share one machine.
    """
    keep = memory(run.job.setting) / 2
    if not alone:
        keep /= os.cpu_count() or 1
    job = run.job._replace(
        setting=run.job.setting._replace(tier=tier), keep_bytes=keep, alone=alone
    )
    # Blocks of two sides, of every section of the features: what a tile needs at once.
    if not tiles_of(run.estimate).streamed:
        job = job._replace(keep_blocks=2 * len(job.way.sections))
    return run._replace(job=job)
