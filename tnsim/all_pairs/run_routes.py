"""The routes of a run that need no plans: vectors, kernels, and forward passes.

*Vectors of coefficients.* Each model is a vector, and a pair a dot product.

*Kernels*, for models with an activation. Every model is prepared once for a block: rows of its
units over the input's coordinates, and what its outputs read (see `problems.kernels`). A pair is a
sum over the kernel of its hidden units.

*Forward passes*, under metrics that add up over points. A tile runs each of its models once over
all points and adds up the Gram matrix of their outputs batch by batch (see `problems.at_points`).
Tiles are therefore as large as memory allows, so that few models run more than once. Every task
makes the points anew: they are closures, and cheap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tnsim.all_pairs.sources import Entry, Source, content_hash
from tnsim.all_pairs.ways import (
    Blocks,
    ByPairs,
    Combined,
    IndexPair,
    Job,
    Models,
    NormBlock,
    PairBlock,
    PairSetting,
    RouteOfRun,
    Sizes,
    Tile,
    Way,
    memory,
)
from tnsim.compare import by_features, by_kernels
from tnsim.compare.by_features import Vectors
from tnsim.compare.by_kernels import Kernels, prepared_under
from tnsim.compare.by_points import AtPoints, are_inputs, route_name
from tnsim.compare.numbers import cosine_error
from tnsim.compare.operands import in_units, in_units_of_run
from tnsim.compare.request import Estimate, summands
from tnsim.engine.planner import Budget
from tnsim.engine.runtime import execution
from tnsim.errors import TooLarge
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.protocol import Points
from tnsim.models.differences import by_differences
from tnsim.models.functions import is_function, outputs_of, refused_under
from tnsim.models.model import Model
from tnsim.problems import at_points, features
from tnsim.problems.at_points import GROUPS, Part, Sums
from tnsim.problems.features import FeatureBlock, FeatureSpace
from tnsim.problems.kernels import KERNEL_DTYPE, PreparedModel, host_sum, mean_part, product_of
from tnsim.problems.layer_kinds import Kinds, kinds
from tnsim.scaled import ScaledSum, stacked

# Inputs on which a function runs at once for its digest, and bytes of their outputs. They follow no
# free memory, as the last digits of outputs may depend on them.
_BATCH, _BATCH_BYTES = 1024, 2**28


@dataclass(frozen=True)
class AsVectors(Blocks):
    """Models as vectors in a space that holds all, one part of the space after another.

    Args:
        space: The space.
    """

    space: FeatureSpace

    @property
    def sections(self) -> Sequence[FeatureSpace]:
        """The parts of the space."""
        return self.space.parts

    def prepared(self, job: Job, of: Combined, section: FeatureSpace) -> FeatureBlock:
        """See `Blocks.prepared`."""
        units, slices = job.setting.units, job.setting.slices
        index, coefficients = of.terms
        # Models in scientific notation, in units that all models of the run share. Parts of a
        # vector have values in common, which are belongings of the model that is scaled.
        scaled = in_units_of_run if len(self.sections) == 1 else in_units
        made = [scaled(model, units, slices) for model in of.models]
        weights = None
        # Where every entry is a single model with coefficient 1, features need no sums, which take
        # a tenth of the time and of the memory of 100 models.
        if len(made) < len(index) or index.shape[1] > 1 or (coefficients != 1).any():
            weights = np.zeros((len(index), len(made)))
            # A model may occur in several terms, the coefficients of which add up.
            np.add.at(weights, (np.arange(len(index))[:, None], index), coefficients)
        return features.block(made, weights, section, units.metric)

    def squares(self, job: Job, block: FeatureBlock) -> ScaledSum:
        """See `Blocks.squares`."""
        return features.norms(block, job.setting.slices)

    def means(self, job: Job, block: FeatureBlock, section: FeatureSpace) -> ScaledSum | None:
        """See `Blocks.means`."""
        return features.means(block, section)

    def products(self, job: Job, first: FeatureBlock, second: FeatureBlock) -> ScaledSum:
        """See `Blocks.products`."""
        return features.products(first, second, job.setting.slices)


class VectorRun(RouteOfRun):
    """The route of a run that turns every model into a vector, so that a pair is a dot product.

    Args:
        models: Models of the run.
        setting: Settings common to all pairs.
        space: Space that holds all models.
    """

    dtype = "float64"

    def __init__(self, models: Models, setting: PairSetting, space: FeatureSpace) -> None:
        super().__init__(models, setting)
        self.space, self.name, self.way = space, space.route, AsVectors(space)
        self.of_pair = partial(Vectors, space=space)

    def estimate(self) -> Estimate:
        """See `compare.routes.Weighed`."""
        models, space = self.models, self.space
        made = list(itertools.chain.from_iterable(bases.elements() for bases in models.bases))
        numbers = space.length * space.d_out
        making = sum(space.multiplications(kinds) for kinds in made)
        run = Sizes.of(models, self.setting._replace(dtype="float64"))
        dots, times = self.setting.pairs * numbers, 1
        vector_bytes = numbers * run.item
        section_bytes = max(one.length for one in space.parts) * space.d_out * run.item
        kept = len(made) * vector_bytes <= run.available / 2
        streamed = not kept and len(space.parts) > 1
        if streamed:  # a larger tile makes vectors fewer times, so tiles take half the memory
            vector_bytes = section_bytes
            tile = run.tile(1, run.weights + 2 * section_bytes, share=1 / 2)
        else:
            tile = run.tile(numbers, run.weights + 2 * vector_bytes)
        # Every tile makes the features of its rows and its columns, so each model is made about 2
        # tiles x tile / models times.
        if not kept:
            times += 2 * run.tiles(tile) * tile // len(made)
        # Features are kept for later tiles: of two blocks, or of all models up to half the memory.
        most = max(2 * tile * vector_bytes, run.available / 2)
        peak = int(min(len(made) * numbers * run.item, most))
        peak += self._making_bytes(run, tile * run.terms, made, section_bytes)
        return self.priced(
            run,
            tile,
            multiplications=times * making + dots,
            peak_bytes=peak,
            seconds=by_features.STARTING + times * space.seconds(made) + dots / by_features.DOTS,
            facts=(("coefficients at most", numbers),),
            streamed=streamed,
            tier="interpret",
        )

    def within(self, estimate: Estimate, budget: Budget) -> Estimate:
        """See `compare.routes.Weighed`. All vectors at hand are to fit the memory as well."""
        super().within(estimate, budget)
        available = memory(self.setting)
        if estimate.peak_bytes > available:
            raise TooLarge(
                f"{estimate.metric} by {self.name} needs {estimate.peak_bytes / 2**30:.3g} GiB, "
                f"and the budget is {available / 2**30:.3g} GiB; give a larger tnsim.Budget"
            )
        return estimate

    @property
    def fits(self) -> bool:
        """Whether vectors of combinations fit, also the memory of the run."""
        return features.fits(self.space) and self.estimate().peak_bytes <= memory(self.setting)

    def _making_bytes(
        self, run: Sizes, models: int, made: Sequence[Kinds], section_bytes: int
    ) -> int:
        """Working bytes for making a section of the features of `models` distinct models."""
        combined = models * section_bytes if run.terms > 1 else 0
        stacks = 2 * models * run.weights  # as read and in units of the run
        in_flight = max(self.space.in_flight(kinds, models) for kinds in made) * run.item
        return combined + stacks + in_flight


class OverUnits(ByPairs):
    """Sums over pairs of hidden units of models that are prepared under the metric."""

    def prepared(self, job: Job, of: Combined, section: None) -> PairBlock:
        """See `Blocks.prepared`."""
        with execution.precision():
            made = [prepared_under(x, job.setting.metric) for x in of.models]
        exponents = np.array([model.exponent for model in made])
        return PairBlock(tuple(made), of.digests, exponents, of.terms, np.ones(len(made)))

    def mean_of(self, job: Job, model: PreparedModel) -> ScaledSum:
        """See `ByPairs.mean_of`."""
        return mean_part(model)

    def paired(
        self, job: Job, models: Sequence[PreparedModel], pairs: Sequence[IndexPair]
    ) -> dict[IndexPair, ScaledSum]:
        """See `ByPairs.paired`."""
        return {(low, high): _product(job, models[high], models[low]) for low, high in pairs}

    def crossed(self, job: Job, rows: PairBlock, columns: PairBlock | None) -> ScaledSum:
        """See `ByPairs.crossed`."""
        if columns is not None:
            return stacked(
                [stacked([_product(job, a, b) for b in columns.models]) for a in rows.models]
            )
        numbers = range(len(rows.models))
        every = itertools.combinations_with_replacement(numbers, 2)
        known = self.paired(job, rows.models, list(every))
        return stacked([stacked([known[min(m, n), max(m, n)] for n in numbers]) for m in numbers])


def _product(job: Job, a: PreparedModel, b: PreparedModel) -> ScaledSum:
    with execution.precision():
        return host_sum(product_of(a, b, job.setting.slices, KERNEL_DTYPE))


class KernelRun(RouteOfRun):
    """The route of a run by sums over pairs of hidden units, see `RouteOfRun`."""

    name = Kernels.name
    way = OverUnits()
    of_pair = Kernels
    dtype = KERNEL_DTYPE

    def estimate(self) -> Estimate:
        """See `compare.routes.Weighed`."""
        run = Sizes.of(self.models, self.setting._replace(dtype=KERNEL_DTYPE))
        routes: list[tuple[Model, Any]] = [
            (model, self.alone(model)) for model in self.models.examples.values()
        ]
        several = [route.estimate() for _, route in routes]
        largest = max(several, key=lambda planned: planned.multiplications)
        one_pair = run.terms**2 * largest.multiplications
        tile = run.tile(one_pair, 4 * max(1, run.weights))
        # A block of models, as its files have them and as they are read.
        read = 2 * tile * run.terms * run.weights
        # The estimate of a pair has two prepared models, all of which are kept for later tiles.
        each = max(route.prepared_bytes(model) for model, route in routes)
        made = sum(sum(side.values()) for side in self.models.bases)
        kept = min(made * each, 2 * tile * run.terms * each + run.available / 2)
        kept = max(0, kept - 2 * each)
        programs = len(self.models.examples) ** 2
        return self.priced(
            run,
            tile,
            multiplications=self.setting.pairs * one_pair,
            peak_bytes=largest.peak_bytes + read + kept,
            seconds=by_kernels.STARTING
            + self.setting.pairs * run.terms**2 * (largest.seconds - by_kernels.STARTING),
            programs=programs,
        )


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

    def _sums(self, job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...] | None) -> Sums:
        """Inner products by groups of points, of rows with columns; None for rows with rows."""
        if rows == columns:
            key = tuple(entry.digest for entry in rows)
            return job.kept(key, lambda: self._sums(job, rows, None))
        setting, points = job.setting, self.points
        known: dict[str, Part] = {}  # parts that several entries have in common run once
        first = [_terms(entry, known, setting.dtype) for entry in rows]
        second = None
        if columns is not None:
            second = [_terms(entry, known, setting.dtype) for entry in columns]
        means = columns is None and are_inputs(points, setting.metric)
        asked = setting.slices, setting.dtype, setting.budget
        found = at_points.sums(first, second, points, *asked, means=means)
        return at_points.with_cancellation(found, first, second, points, setting.dtype)


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

    def estimate(self) -> Estimate:
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
        outputs = at_points.outputs(entries[0].d_out, entries[0].n_ctx or 1, points)
        # Every tile runs the models of its rows and its columns.
        again = max(1, 2 * run.tiles(tile) * tile // len(entries))
        passes = {kinds(model): self.alone(model).estimate() for model in examples}
        every = [
            passes[layers] for entry in entries for _, layers in entry.bases if layers in passes
        ]
        work = again * sum(each.multiplications for each in every) + setting.pairs * outputs
        most = at_points.FUNCTION_BYTES if self._outputs_of_functions() else at_points.BATCH_BYTES
        batch = min(points.count * needed.each, most, run.available / 2)
        return self.priced(
            run,
            tile,
            multiplications=work,
            peak_bytes=needed.beside + max(needed.each, batch) + tile * run.weights,
            seconds=at_points.STARTING
            + again * sum(each.seconds - at_points.STARTING for each in every),
            facts=(("forward passes", points.count),),
            programs=len(examples),
        )

    def _needs(self, count: int) -> at_points.Needs:
        """Bytes of forward passes of `count` models, all of them the model that needs most."""
        points, dtype = self.points, self.setting.dtype
        every = [at_points.needs([x] * count, points, dtype) for x in self.models.examples.values()]
        every.append(at_points.needs((), points, dtype, count * self._outputs_of_functions()))
        return max(every, key=lambda needed: needed.least)

    def _outputs_of_functions(self) -> int:
        """Number of output values of a plain function at a point, 0 where all are models."""
        of_functions = [entry for entry in self.models.entries if entry.d_in is None]
        return max((entry.d_out * (entry.n_ctx or 1) for entry in of_functions), default=0)


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
