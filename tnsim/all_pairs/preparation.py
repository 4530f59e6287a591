"""The preparation of a run: everything that is known before its first product.

Every model is read once, for its digest and the kinds of its layers. Models with equal digests are
one model. For each sequence of layer kinds one model is kept as an example to plan with. The
outcome is a `PairwiseRun`, and the store that it fills.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import jax

import tnsim
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.contracted_runs import ContractedRun
from tnsim.all_pairs.run_routes import ForwardRun, KernelRun, VectorRun, function_entry
from tnsim.all_pairs.sources import Entry, entry, metric_parameters, sources
from tnsim.all_pairs.store import FORMAT
from tnsim.all_pairs.ways import Job, Models, PairSetting, RouteOfRun, memory, summary, tiles_of
from tnsim.circuits.parts import PartSeries
from tnsim.compare.by_points import Rows, points_of, what_is_read
from tnsim.compare.request import (
    Estimate,
    check_comparison,
    estimated,
    highest_degree,
    may_estimate,
)
from tnsim.compare.routes import Ways, from_table, weighed
from tnsim.engine.planner import Budget
from tnsim.engine.precision import Arithmetic
from tnsim.engine.runtime.devices import device
from tnsim.errors import DuplicateWarning, ModelError, warn
from tnsim.metrics.protocol import Metric, Points, Reading
from tnsim.models.functions import is_function
from tnsim.models.model import Model, terms
from tnsim.problems import features
from tnsim.problems.features import FeatureSpace
from tnsim.problems.layer_kinds import Kinds, kinds
from tnsim.problems.units import common_units


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
        listed: All models in the order given, those of the rows as "a" and those of the columns as
            "b"; of all pairs of one list "a" alone.
        models: Distinct models whose pairs are computed.
        job: Settings that all tasks share.
        estimate: Route, tiles and costs.
    """

    listed: Mapping[str, Sequence[Entry]]
    models: Models
    job: Job
    estimate: Estimate

    @property
    def caveats(self) -> tuple[str, ...]:
        """Differences between the models and the networks that were read, each named once."""
        every = itertools.chain.from_iterable(self.listed.values())
        return tuple(dict.fromkeys(caveat for entry in every for caveat in entry.caveats))

    @property
    def arithmetic(self) -> Arithmetic:
        """Largest degree and the precision of the route, which bound the errors of rounding."""
        degree = highest_degree(self.models.examples.values())
        entries = itertools.chain.from_iterable(self.listed.values())
        return Arithmetic(degree, self.estimate.dtype, any(entry.terms > 1 for entry in entries))


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
    if asked.centred and may_estimate(asked.metric):
        sides = [models] if other is None else [models, other]
        asked = asked._replace(metric=_metric_of_means(sides, asked.metric))
    examples: dict[Kinds, Model] = {}
    read: dict[str, Rows | None] = {}
    listed, columns = {}, None
    listed["a"], rows = _side(models, names, asked, examples, read)
    if other is not None:
        listed["b"], columns = _side(other, None, asked, examples, read)
    # All models agree in widths and length with the first model, and a model of every form is
    # checked under the metric.
    _check_shapes([*itertools.chain.from_iterable(listed.values())])
    asked = asked._replace(metric=estimated(asked.metric, list(examples.values()), None))
    for model in examples.values():
        check_comparison(model, model, asked.metric)
    return _planned(listed, Models(rows, columns, examples, read), asked)


def _metric_of_means(sides: Sequence[Any], metric: Metric) -> Metric:
    """The metric of a run, before means are taken away: an exact mean may take what a run does not.

    Files are read once more for it.
    """
    forms: dict[Kinds, Model] = {}
    for source in itertools.chain.from_iterable(map(sources, sides)):
        given: Any = source.read()
        if not is_function(given):
            forms |= {kinds(model): model for _, model in terms(given)}
    return estimated(metric, list(forms.values()), None)


def planned_again(
    run: PairwiseRun, rows: Iterable[str], columns: Iterable[str] | None, route: str
) -> PairwiseRun:
    """The run over some models of a run, by the given route where this route holds the models.

    Args:
        run: Run of all models.
        rows: Digests of the models of the rows.
        columns: Digests of the models compared with the rows; None for all pairs of `rows`.
        route: Name of the route to keep.

    Raises:
        TooLarge: One inner product is beyond the budget.
    """
    setting = run.job.setting
    asked = Asked(setting.metric, setting.slices, setting.dtype, setting.budget)
    return _planned(run.listed, run.models.some(rows, columns), asked, route)


def _planned(
    listed: Mapping[str, Sequence[Entry]], models: Models, asked: Asked, kept: str | None = None
) -> PairwiseRun:
    """The run of models that were read.

    Args:
        listed: All models in the order given, see `PairwiseRun`.
        models: Distinct models whose pairs are computed.
        asked: What is asked of all pairs.
        kept: Name of the route to take where it holds the models; None for the cheapest.
    """
    units = common_units(models.examples.values(), asked.metric)
    shared = asked.metric, asked.slices, asked.dtype, asked.budget
    setting = PairSetting(*shared, models.pairs, units)
    routes = routes_of_run(models, setting, kept)
    # New pairs of a run that grew keep the route of the first run where that is a route now.
    choice = weighed([route for route in routes if route.name == kept] or routes, setting.budget)
    taken, estimate = choice.route, choice.estimate
    tiles = tiles_of(estimate)
    job = Job(
        setting=setting,
        way=taken.way,
        sizes=(tiles.side, tiles.side),
        # Blocks of two sides, of every section of the features: what a tile needs at once.
        keep_blocks=2 if tiles.streamed else 2 * len(taken.way.sections),
        keep_bytes=0,
        alone=True,
        key=uuid4().hex,  # two equal runs at the same time share no kept blocks
    )
    return PairwiseRun(listed, models, job, estimate)


def routes_of_run(
    models: Models, setting: PairSetting, kept: str | None = None
) -> list[RouteOfRun]:
    """The routes of a run, from the table of `compare.routes`.

    Args:
        models: Models of the run.
        setting: Settings common to all pairs.
        kept: Name of the route of which numbers are kept already.

    Raises:
        ModelError: The metric has no inputs for these models.
        UnsupportedLayer: An activation that no route can compare under the metric.
    """
    examples, metric = list(models.examples.values()), setting.metric

    def points() -> Points | None:
        return points_of(examples, metric, list(models.read.values()))

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
            ours, theirs = (
                f"{f'{each.d_in} inputs' if known else 'inputs'} to {each.d_out}"
                for each in (one, first)
            )
            raise ModelError(
                f"{one.source.name} maps {ours} outputs, but {first.source.name} maps {theirs}"
            )
        if one.n_ctx != first.n_ctx:
            raise ModelError(
                f"{one.source.name} reads sequences of n_ctx={one.n_ctx}, "
                f"but {first.source.name} of n_ctx={first.n_ctx}"
            )


def _side(
    models: Any,
    names: Any,
    asked: Asked,
    examples: dict[Kinds, Model],
    read: dict[str, Rows | None],
) -> tuple[list[Entry], dict[str, Entry]]:
    """A list of models, each read once, and the distinct models of it by their digests.

    A model of every sequence of layer kinds is added to `examples`, and what each model reads to
    `read`, see `Models`.
    """
    metric = asked.metric
    entries: list[Entry] = []
    distinct: dict[str, Entry] = {}
    equal: list[str] = []
    for source in sources(models, names, metric if asked.centred else None, asked.budget):
        given: Any = source.read()
        if is_function(given):
            made = function_entry(source, metric, asked.stored)
        else:
            made, bases = entry(source, given, asked.dtype)
            for (digest, layers), base in zip(made.bases, bases, strict=True):
                examples.setdefault(layers, base)
                if digest not in read:
                    read[digest] = what_is_read(base, metric)
        entries.append(made)
        first = distinct.setdefault(made.digest, made)
        if first is not made:
            equal.append(f"{source.label} = {first.source.label}")
    # Models with an equal part need not be equal, see `run.warn_of_duplicates`.
    if equal and not isinstance(models, PartSeries):
        warn(
            f"models with identical weights: {stores.listed(equal)}; they are computed once",
            DuplicateWarning,
        )
    return entries, distinct


def attributes_of(run: PairwiseRun, parts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The attributes by which a store describes its run.

    Args:
        run: Run over all models.
        parts: Parts that are compared into one folder, see `Place`.
    """
    setting, tiles = run.job.setting, tiles_of(run.estimate)
    first = run.listed["a"][0]
    # Of degree 1, as deeper models may come later.
    reading = Reading(first.d_in or 0, first.n_ctx, degree=1)
    attrs: dict[str, Any] = {
        "format": FORMAT,
        "metric": setting.metric.name,
        "metric_parameters": metric_parameters(setting.metric, reading),
        "dtype": setting.dtype,
        "slices": setting.slices,
        "centred": int(first.source.centred is not None),
        "parts": parts,
        "outputs": first.d_out if setting.slices else None,
        "exact": int(run.estimate.exact),
        "estimates": int(run.job.way.estimates),
        "symmetric": int("b" not in run.listed),
        # How the pairs of every growth of a store are computed, those of the first run first.
        "growths": [{"route": run.estimate.route, "tile": tiles.side, "tier": tiles.tier}],
        "plan": summary(run.estimate),
        "caveats": list(run.caveats),
        "device": device(),
        "tnsim_version": tnsim.__version__,
        "jax_version": jax.__version__,
    }
    attrs |= {"hash_b": None, "labels_b": None, "names_b": None, "since_b": None}
    for side, entries in run.listed.items():
        attrs[f"hash_{side}"] = [entry.digest for entry in entries]
        attrs[f"labels_{side}"] = [entry.source.label for entry in entries]
        attrs[f"names_{side}"] = [entry.source.name for entry in entries]
        attrs[f"since_{side}"] = [0] * len(entries)  # the growth with which each came
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
    setting = run.job.setting._replace(tier=tier)
    return run._replace(job=run.job._replace(setting=setting, keep_bytes=keep, alone=alone))
