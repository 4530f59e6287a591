"""The route of a run by forward passes, under metrics that add up over points.

A tile runs each of its models once over all points and adds up the Gram matrix of their outputs
batch by batch (see `problems.at_points`). Tiles are therefore as large as memory allows, so that
few models run more than once. Every task makes the points anew: they are closures, and cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tnsim.all_pairs.run_plan import Models, RouteOfRun, Sizes
from tnsim.all_pairs.sources import Entry, Source, content_hash
from tnsim.all_pairs.ways import Job, NormBlock, PairSetting, Tile, Way
from tnsim.compare.by_points import AtPoints, are_inputs, route_name
from tnsim.compare.estimates import Estimate
from tnsim.compare.numbers import cosine_error
from tnsim.compare.request import summands
from tnsim.metrics.empirical import Empirical
from tnsim.metrics.points import Points
from tnsim.models.differences import by_differences
from tnsim.models.functions import is_function, outputs_of, refused_under
from tnsim.problems import at_points, batches
from tnsim.problems.at_points import Sums
from tnsim.problems.batches import GROUPS, STARTING, Part
from tnsim.problems.tensors.kinds import kinds

# Inputs on which a function runs at once for its digest, and bytes of their outputs. They follow no
# free memory, as the last digits of outputs may depend on them.
_BATCH, _BATCH_BYTES = 1024, 2**28


@dataclass(frozen=True)
class OverPoints(Way):
    """Sums over points; those of a block with itself are kept, for norms and tiles.

    Args:
        points: The points.
    """

    points: Points

    @property
    def estimates(self) -> bool:
        """Whether the points are draws."""
        return self.points.drawn

    def norms(self, job: Job, entries: tuple[Entry, ...]) -> NormBlock:
        """See `Way.norms`."""
        sums = self._sums(job, entries, entries)
        shares = sums.mean_shares() or [np.full(len(entries), np.nan)]
        return NormBlock(job.finite(at_points.over_groups(sums.rows)), shares[0])

    def tile(self, job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Tile:
        """See `Way.tile`.

        Where a single group of draws has all the weight, errors are unknown, and infinite.
        """
        sums = self._sums(job, rows, columns)
        products = job.finite(at_points.over_groups(sums.products))
        if not self.points.drawn:
            return Tile(products)
        error = cosine_error(sums.over_outputs() if job.setting.slices else sums)
        if error is None:
            error = np.full(sums.products.mantissa.shape[1:3], np.inf)
        return Tile(products, error)

    def _sums(self, job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Sums:
        if rows != columns:
            return _sums(job.setting, self.points, rows, columns)
        key = tuple(entry.digest for entry in rows)
        return job.kept(key, lambda: _sums(job.setting, self.points, rows, None))


class ForwardRun(RouteOfRun):
    """The route of a run by forward passes.

    Args:
        models: Models of the run.
        setting: Settings common to all pairs.
        points: Points at which the models run.
    """

    def __init__(self, models: Models, setting: PairSetting, points: Points) -> None:
        super().__init__(models, setting)
        self.points, self.way = points, OverPoints(points)
        self.name = route_name(setting.metric, points)
        self.of_pair = partial(AtPoints, points=points)

    def estimate(self, limit: float = math.inf) -> Estimate:
        """See `compare.routes.Weighed`."""
        setting, points, entries = self.setting, self.points, self.models.entries
        examples = list(self.models.examples.values())
        run = Sizes.of(self.models, setting)
        # Sums are kept by groups of points, for the standard errors.
        run = run._replace(products=run.products * GROUPS)
        # Work plays no part in the size of a tile: passes are shared by all pairs of the tile, so
        # larger tiles are cheaper.
        tile = run.tile(1, 2 * max(1, run.weights))
        # Half of the memory is for the batches, an eighth each for weights and for products.
        while tile > 1 and self._needs(2 * tile * run.terms).least > run.available / 2:
            tile = math.ceil(tile / 2)
        needed = self._needs(2 * tile * run.terms)
        outputs = batches.outputs(entries[0].d_out, entries[0].n_ctx or 1, points)
        # Every tile runs the models of its rows and its columns.
        again = max(1, 2 * run.tiles(tile) * tile // len(entries))
        passes = {kinds(model): self.alone(model).estimate() for model in examples}
        every = [
            passes[layers] for entry in entries for _, layers in entry.bases if layers in passes
        ]
        work = again * sum(each.multiplications for each in every) + setting.pairs * outputs
        most = batches.FUNCTION_BYTES if self._outputs_of_functions() else batches.BATCH_BYTES
        batch = min(points.count * needed.each, most, run.available / 2)
        return self.priced(
            run,
            tile,
            multiplications=work,
            peak_bytes=needed.beside + max(needed.each, batch) + tile * run.weights,
            seconds=STARTING + again * sum(each.seconds - STARTING for each in every),
            facts=(("forward passes", points.count),),
            programs=len(examples),
        )

    def _needs(self, count: int) -> batches.Needs:
        """Bytes of forward passes of `count` models, all of them the model that needs most."""
        points, dtype = self.points, self.setting.dtype
        every = [batches.needs([x] * count, points, dtype) for x in self.models.examples.values()]
        every.append(batches.needs((), points, dtype, count * self._outputs_of_functions()))
        return max(every, key=lambda needed: needed.least)

    def _outputs_of_functions(self) -> int:
        """Number of output values of a plain function at a point, 0 where all are models."""
        of_functions = [entry for entry in self.models.entries if entry.d_in is None]
        return max((entry.d_out * (entry.n_ctx or 1) for entry in of_functions), default=0)


def _sums(
    setting: PairSetting, points: Points, rows: Sequence[Entry], columns: Sequence[Entry] | None
) -> Sums:
    """Inner products by groups of points, of rows with columns, or with rows where this is None."""
    # Parts that several entries have in common run once.
    known: dict[str, Part] = {}
    first = [_terms(entry, known, setting.dtype) for entry in rows]
    second = None
    if columns is not None:
        second = [_terms(entry, known, setting.dtype) for entry in columns]
    means = columns is None and are_inputs(points, setting.metric)
    asked = setting.slices, setting.dtype, setting.budget
    found = at_points.sums(first, second, points, *asked, means=means)
    return at_points.with_cancellation(found, first, second, points, setting.dtype)


def function_entry(source: Source, metric: Any, stored: bool) -> Entry:
    """The entry of a plain function.

    The content of a function is unknown. For a store, a function is told by its outputs on the
    inputs of the metric, which are all that the metric sees of it; else no two function objects
    count as equal.

    Args:
        source: Place of the function.
        metric: Metric of the run.
        stored: Whether results go to a store.

    Raises:
        ModelError: The metric has no inputs of its own, or the function gives no such outputs.
    """
    function = source.read()
    if not isinstance(metric, Empirical):
        raise refused_under(metric)
    points = metric.points(None)
    outputs = outputs_of(function, points.block(0, 1).inputs)
    digest = f"function {id(source.weights):x}"
    if stored:
        rows = max(1, min(_BATCH, _BATCH_BYTES // outputs[0].nbytes))
        digest = f"function {_digest_of_outputs(function, points, rows)}"
    return Entry(
        source=source,
        digest=digest,
        bases=((digest, ()),),
        d_in=None,
        d_out=outputs.shape[-1],
        n_ctx=math.prod(outputs.shape[1:-1]) if outputs.ndim > 2 else None,
        terms=1,
        caveats=(),
    )


def _digest_of_outputs(function: Any, points: Points, rows: int) -> str:
    """The digest of a function's outputs on all points, in batches of rows, 32 hex digits."""
    starts = range(0, points.count, rows)
    batches = (points.block(start, min(start + rows, points.count)) for start in starts)
    return content_hash([content_hash(outputs_of(function, batch.inputs)) for batch in batches])


def _terms(entry: Entry, known: dict[str, Part], dtype: str) -> list[tuple[Any, Part]]:
    """An entry as a sum of (coefficient, part); equal parts of several entries are one object."""
    model: Any = entry.read()
    if not is_function(model):
        model = by_differences(model, dtype)
    terms = []
    for (digest, _), (coefficient, part) in zip(entry.bases, summands(model), strict=True):
        terms.append((coefficient, known.setdefault(digest, part)))
    return terms
