"""How the inner products of a run are computed along a route, and at what price.

Every route of a run has a *way*, which a task asks for the norms of some models and for a tile,
whatever the route. Vectors, contractions and kernels prepare the models of a block once and keep
the block for the tasks that follow (`Blocks`); forward passes add up over points. Ways and jobs are
small and picklable, so that a task may run in another process.

Contractions and kernels know inner products of models alone. Combinations expand by bilinearity
over distinct models, `<sum_s c_s f_s | sum_t d_t g_t> = sum_st c_s d_t <f_s|g_t>`.

*Price.* A run has a price of tiles, multiplications, memory and seconds. First stand the `Sizes` of
a run, on which the costs of all routes depend, and the size of a tile; then what all routes of a
run have in common. All routes give the same numbers:

    vectors        each model is a vector, so that a pair is a dot product
    contractions   every pair is contracted along its plan
    kernels        sums over pairs of hidden units
    points         outputs at points

`preparation` has the table of all routes and takes the cheapest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import numpy as np
from jaxtyping import Float, Int

from tnsim.all_pairs.sources import Entry
from tnsim.compare.by_points import Rows
from tnsim.compare.request import CROSS, Estimate, Question, Tiles, is_exact
from tnsim.compare.routes import Weighed
from tnsim.engine import precision
from tnsim.engine.ir.problem import ITEM_BYTES
from tnsim.engine.planner import Budget
from tnsim.engine.runtime.devices import backend, check_addresses
from tnsim.engine.runtime.execution import Tier
from tnsim.metrics.protocol import Metric
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.problems.layer_kinds import Kinds
from tnsim.problems.units import Units
from tnsim.scaled import (
    Scaled,
    ScaledSum,
    add,
    magnified,
    over_outputs,
    share_of_squares,
    split,
    stacked,
    taken,
    times,
    total,
)
from tnsim.sessions import session

IndexPair: TypeAlias = tuple[int, int]
"""Numbers of two models of a block, the smaller one first."""
_WORKER = "worker"  # owner of the blocks of all runs on a worker, see `Job.kept`


# Multiplications of a tile: at most one and a half seconds on two cores, so that an interrupted
# tile loses little, and long enough that the overhead of a tile is small. On an accelerator a tile
# has so many times the work.
_TILE_WORK, _ACCELERATED = 2**34, 2**5
LARGEST_TILE = 128  # models per side of a tile
_UNKNOWN = 2**33  # bytes assumed free where the platform does not tell
Bases: TypeAlias = "Counter[Kinds]"
"""Numbers of distinct models by the kinds of their layers."""


class NormBlock(NamedTuple):
    """Squared norms of some models, and the shares of them that are in the models' means.

    Attributes:
        squared: Squared norms, per output where the job wants slices.
        mean_share: Shares from 0 to 1; NaN where they are not known.
    """

    squared: ScaledSum
    mean_share: Float[np.ndarray, " models"]


class Tile(NamedTuple):
    """Inner products of a tile, and the standard errors of their cosines, None for no estimates."""

    products: ScaledSum
    standard_error: Float[np.ndarray, "rows columns"] | None = None


class PairSetting(NamedTuple):
    """Settings common to all pairs of a run.

    Args:
        metric: Metric that weighs the inputs.
        slices: Whether every output has an inner product of its own.
        dtype: Precision of the computation.
        budget: Limits on a single inner product and on the memory of a tile.
        pairs: Number of pairs in the run.
        units: Units that all models share, with the metric in the units of the inputs.
        tier: Tier in which plans run, "interpret" or "compile"; of a store, the tier in which the
            store was begun.
    """

    metric: Metric
    slices: bool
    dtype: str
    budget: Budget
    pairs: int
    units: Units
    tier: Tier = "compile"


class Job(NamedTuple):
    """Settings that all tasks of a run share.

    Args:
        setting: Settings common to all pairs.
        way: Way of the route.
        sizes: Most models in a block of rows, and in a block of columns.
        keep_blocks: Number of prepared blocks that are kept, whatever their size.
        keep_bytes: Bytes up to which further blocks are kept.
        alone: Whether a single process computes the whole run, and forgets its blocks at the end.
        key: Unique name of this run.
    """

    setting: PairSetting
    way: Way
    sizes: tuple[int, int]
    keep_blocks: int
    keep_bytes: float
    alone: bool
    key: str

    def kept(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """The value of a key in the session's cache of blocks, made where it is missing."""
        # On a worker, the blocks of all runs share one allowance: no worker learns that a run has
        # ended.
        owner = self.key if self.alone else _WORKER
        kept = session().blocks
        block = kept.get((owner, self.key, *key), make)
        kept.shrink(self.keep_bytes, self.keep_blocks, lambda key: key[0] == owner)
        return block

    def finite(self, products: ScaledSum) -> ScaledSum:
        """The products, unchanged. Raises `ResultError` where any is not finite."""
        values = products.mantissa, products.exponent
        precision.check_finite(values, self.setting.metric.name, self.setting.dtype)
        return products


class Way(ABC):
    """How the inner products of a run are computed along a route."""

    @property
    def sections(self) -> Sequence[Any]:
        """Sections of the models, prepared one at a time; inner products are sums over all."""
        return (None,)

    @property
    def estimates(self) -> bool:
        """Whether inner products are estimates from draws, with standard errors."""
        return False

    @abstractmethod
    def norms(self, job: Job, entries: tuple[Entry, ...]) -> NormBlock:
        """Squared norms of some models in the precision of the job."""

    @abstractmethod
    def tile(self, job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Tile:
        """Inner products of all rows with all columns in the precision of the job."""


class Terms(NamedTuple):
    """Linear combinations of models: row i is `sum_t coefficients[i, t] * models[index[i, t]]`."""

    index: Int[np.ndarray, "rows terms"]
    coefficients: Float[np.ndarray, "rows terms"]


class Combined(NamedTuple):
    """The distinct models of some entries, and the entries as combinations of them.

    Attributes:
        models: Distinct models.
        digests: Digests of the models' content.
        terms: The combinations.
    """

    models: tuple[Model, ...]
    digests: tuple[str, ...]
    terms: Terms


class Blocks(Way):
    """A way along which the models of a block are prepared once, section by section."""

    @abstractmethod
    def prepared(self, job: Job, of: Combined, section: Any) -> Any:
        """A section of some models, prepared for products."""

    @abstractmethod
    def squares(self, job: Job, block: Any) -> ScaledSum:
        """Squared norms of the entries of a block."""

    @abstractmethod
    def means(self, job: Job, block: Any, section: Any) -> ScaledSum | None:
        """Means of the outputs of a block, as parts of its norms; None where they are not known."""

    @abstractmethod
    def products(self, job: Job, first: Any, second: Any) -> ScaledSum:
        """Inner products of two blocks, which are one object where a block meets itself."""

    def norms(self, job: Job, entries: tuple[Entry, ...]) -> NormBlock:
        """See `Way.norms`."""
        squares, means = [], None
        for section in self.sections:
            block = self._block(job, entries, section)
            squares.append(self.squares(job, block))
            means = means or self.means(job, block, section)
        squared = job.finite(add(squares))
        if means is None:
            return NormBlock(squared, np.full(len(entries), np.nan))
        return NormBlock(squared, share_of_squares(means, total(squared, job.setting.slices)))

    def tile(self, job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Tile:
        """See `Way.tile`."""
        products = []
        for section in self.sections:
            first = self._block(job, rows, section)
            second = first if rows == columns else self._block(job, columns, section)
            products.append(self.products(job, first, second))
        return Tile(job.finite(add(products)))

    def _block(self, job: Job, entries: tuple[Entry, ...], section: Any) -> Any:
        """The block of some models, from the cache or made now."""
        key = (section, *(entry.digest for entry in entries))
        return job.kept(key, lambda: self.prepared(job, _combined(entries, job), section))


def _combined(entries: tuple[Entry, ...], job: Job) -> Combined:
    models: dict[str, Model] = {}
    most = max(len(entry.bases) for entry in entries)
    index, coefficients = np.zeros((len(entries), most), int), np.zeros((len(entries), most))
    for i, entry in enumerate(entries):
        model: Any = entry.read()  # no plain function, as functions take forward passes
        both = zip(entry.bases, terms(by_differences(model, job.setting.dtype)), strict=True)
        for t, ((digest, _), (coefficient, base)) in enumerate(both):
            models.setdefault(digest, base)
            # Terms that this entry lacks repeat its last term, with coefficient 0.
            index[i, t:] = list(models).index(digest)
            coefficients[i, t] = coefficient
    return Combined(tuple(models.values()), tuple(models), Terms(index, coefficients))


class PairBlock(NamedTuple):
    """Distinct models `2 ** exponents * models`, and the combinations of them that are compared.

    Args:
        models: Models as the way prepares them.
        digests: Digests of the models' content.
        exponents: Powers of two taken out of the models, one per model or one per output.
        terms: Combinations that are compared.
        factors: Factors by which cancellation within the models enlarges rounding, see
            `problems.conditioning`; 1 where products count it themselves.
    """

    models: tuple[Any, ...]
    digests: tuple[str, ...]
    exponents: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"]
    terms: Terms
    factors: Float[np.ndarray, " models"]

    def coefficients(self) -> Scaled[np.ndarray]:
        """The factor of the model in every term.

        Returns:
            Mantissas (rows, terms). Exponents (rows, terms), or (rows, terms, out) where
            exponents differ by output.
        """
        mantissas, powers = split(self.terms.coefficients)
        own = self.exponents[self.terms.index]
        return Scaled(mantissas, own + (powers if own.ndim == 2 else powers[:, :, None]))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of the models."""
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self.models))


class ByPairs(Blocks):
    """A way that knows inner products of models, of which those of combinations are sums."""

    @abstractmethod
    def mean_of(self, job: Job, model: Any) -> ScaledSum | None:
        """The mean of every output of a prepared model, as a part of its norm; None if unknown."""

    @abstractmethod
    def paired(
        self, job: Job, models: Sequence[Any], pairs: Sequence[IndexPair]
    ) -> dict[IndexPair, ScaledSum]:
        """Inner products of pairs of prepared models."""

    @abstractmethod
    def crossed(self, job: Job, rows: PairBlock, columns: PairBlock | None) -> ScaledSum:
        """Inner products of all models of the rows with all of the columns, or among themselves."""

    def squares(self, job: Job, block: PairBlock) -> ScaledSum:
        """|sum_s c_s f_s|^2 = sum_st c_s c_t <f_s|f_t>; every product is computed once."""
        index, (coefficients, exponents) = block.terms.index, block.coefficients()
        # Pairs of models that occur together in some combination.
        wanted: set[IndexPair] = set()
        for row in index.tolist():
            wanted.update(itertools.combinations_with_replacement(sorted(set(row)), 2))
        known = {}
        for (low, high), product in self.paired(job, block.models, sorted(wanted)).items():
            known[low, high] = magnified(
                product, precision.of_pair(block.factors[low], block.factors[high])
            )
        # One part for each pair of terms (s, t), over all rows at once.
        parts = []
        for s, t in itertools.product(range(index.shape[1]), repeat=2):
            both = np.sort(index[:, [s, t]]).tolist()
            together = stacked([known[low, high] for low, high in both])
            factors = over_outputs(coefficients[:, s] * coefficients[:, t], together.mantissa)
            parts.append(times(together, factors, exponents[:, s] + exponents[:, t]))
        return add(parts)

    def means(self, job: Job, block: PairBlock, section: None) -> ScaledSum | None:
        """See `Blocks.means`."""
        each: list[ScaledSum] = []
        for model, exponent in zip(block.models, block.exponents, strict=True):
            mean = self.mean_of(job, model)
            if mean is None:
                return None
            each.append(times(mean, 1.0, exponent))
        rows = zip(*block.terms, strict=True)
        return stacked(
            [add([times(each[n], c) for n, c in zip(*row, strict=True)]) for row in rows]
        )

    def products(self, job: Job, first: PairBlock, second: PairBlock) -> ScaledSum:
        """See `Blocks.products`."""
        crossed = self.crossed(job, first, None if second is first else second)
        of_pairs = precision.of_pair(first.factors[:, None], second.factors)
        crossed = magnified(crossed, of_pairs)
        rows, columns = first.coefficients(), second.coefficients()
        parts = []
        for s in range(first.terms.index.shape[1]):
            for t in range(second.terms.index.shape[1]):
                # Entry (i, j) is the product of term s of row i with term t of column j.
                places = np.ix_(first.terms.index[:, s], second.terms.index[:, t])
                part = taken(crossed, places)
                factors = rows.value[:, s, None] * columns.value[None, :, t]
                exponents = rows.exponent[:, None, s] + columns.exponent[None, :, t]
                parts.append(times(part, over_outputs(factors, part.mantissa), exponents))
        return add(parts)


class Models(NamedTuple):
    """The models of a run, equal models once, in the order of their first occurrence.

    Args:
        rows: Models by their digests.
        columns: Models compared with the rows; None for all pairs of `rows`.
        examples: A model of each sequence of layer kinds.
        read: Rows that span the input read by each model, by the model's digest, see
            `compare.by_points.what_is_read`.
    """

    rows: Mapping[str, Entry]
    columns: Mapping[str, Entry] | None
    examples: Mapping[Kinds, Model]
    read: Mapping[str, Rows | None]

    @property
    def sides(self) -> dict[str, Mapping[str, Entry]]:
        """The models of the rows, "a", and of the columns, "b", which may be the same."""
        return {"a": self.rows, "b": self.rows if self.columns is None else self.columns}

    @property
    def entries(self) -> list[Entry]:
        """Rows and columns."""
        return [*self.rows.values(), *(self.columns or {}).values()]

    @property
    def bases(self) -> list[Bases]:
        """Numbers of models by kinds, of the rows and, if they are another list, the columns."""
        lists = [side.values() for side in (self.rows, self.columns) if side is not None]
        return [Counter(_bases(entries).values()) for entries in lists]

    @property
    def pairs(self) -> int:
        """The number of inner products; of a single list each pair counts once."""
        rows, columns = map(len, self.sides.values())
        return pairs_of(rows, columns, self.columns is None)

    def some(self, rows: Iterable[str], columns: Iterable[str] | None) -> Models:
        """The models of a run over some of the pairs, given by digests."""
        first, second = self.sides.values()
        others = None if columns is None else {model: second[model] for model in columns}
        chosen = self._replace(rows={model: first[model] for model in rows}, columns=others)
        bases = _bases(chosen.entries)
        wanted = set(bases.values())
        return chosen._replace(
            examples={kind: model for kind, model in self.examples.items() if kind in wanted},
            read={digest: self.read.get(digest) for digest in bases},
        )


class Sizes(NamedTuple):
    """Sizes on which the costs of all routes depend.

    Args:
        rows, columns: Numbers of distinct models.
        symmetric: Whether rows and columns are a single list.
        terms: Largest number of models that an entry adds up.
        weights: Bytes of the largest model.
        products: Bytes computed and kept per pair.
        item: Bytes of a number.
        available: Bytes that the run may use.
    """

    rows: int
    columns: int
    symmetric: bool
    terms: int
    weights: int
    products: int
    item: int
    available: float

    @classmethod
    def of(cls, models: Models, setting: PairSetting) -> Self:
        """The sizes of a run."""
        rows, columns = map(len, models.sides.values())
        item = ITEM_BYTES[setting.dtype]
        outputs = models.entries[0].d_out if setting.slices else 1
        largest = max((model.parameters for model in models.examples.values()), default=0)
        return cls(
            rows=rows,
            columns=columns,
            symmetric=models.columns is None,
            terms=max(len(entry.bases) for entry in models.entries),
            weights=largest * item,
            products=32 * outputs,
            item=item,
            available=memory(setting),
        )

    def tile(self, work: int, model_bytes: int, share: float = 1 / 8) -> int:
        """The number of models per side of a tile, limited by its work and its memory.

        A tile is about a second of work. Tiles are as even as they can be: 5 models in tiles of at
        most 4 are 3 and 2. Where all rows fit one tile, the columns are divided evenly instead: a
        tile then has fewer rows than columns.

        Args:
            work: Scalar multiplications of a single pair.
            model_bytes: Bytes of a single model.
            share: Share of the memory for the models of a tile.
        """
        # Work is counted and never timed: equal runs have equal tiles, and so equal bits.
        most_work = _TILE_WORK if backend() == "cpu" else _ACCELERATED * _TILE_WORK
        # A tile of n models a side has n^2 pairs, so limits on pairs are limits on n^2.
        by_work = math.isqrt(max(1, most_work // work))
        by_models = share * self.available / (self.terms * model_bytes)
        by_products = math.sqrt(self.available / 8 / self.products)
        most = max(1, int(min(LARGEST_TILE, by_work, by_models, by_products)))
        divided = self.rows if self.rows > most else max(self.rows, self.columns)
        blocks = math.ceil(divided / most)
        return math.ceil(divided / blocks)

    def tiles(self, tile: int) -> int:
        """The number of tiles; of a single list, of those on and below the diagonal."""
        blocks, across = math.ceil(self.rows / tile), math.ceil(self.columns / tile)
        return pairs_of(blocks, across, self.symmetric)

    def tile_bytes(self, tile: int) -> int:
        """Bytes of the products of a tile."""
        return min(tile, self.rows) * min(tile, self.columns) * self.products


def pairs_of(rows: int, columns: int, symmetric: bool) -> int:
    """The number of pairs of rows and columns; of a single list, of those up to the diagonal."""
    return rows * (rows + 1) // 2 if symmetric else rows * columns


def memory(setting: PairSetting) -> float:
    """Bytes that a run may use. Raises `TooLarge` where nothing can be compiled."""
    check_addresses()
    room = setting.budget.room(0)
    return _UNKNOWN if math.isinf(room) else room


class RouteOfRun(ABC):
    """A way to compute all pairs of a run, with its price, see `compare.routes.Weighed`.

    Args:
        models: Models of the run.
        setting: Settings common to all pairs.

    Attributes:
        name: Name of the route.
        way: How tasks compute along the route.
        search: Expected seconds until an estimate is there.
        of_pair: The same route for the inner products of two models.
        dtype: Precision of its numbers where it is not the one that is asked for.
    """

    name: str
    way: Way
    search: float = 0.0
    of_pair: Callable[[Question], Weighed]
    dtype: str | None = None

    def __init__(self, models: Models, setting: PairSetting) -> None:
        self.models, self.setting = models, setting

    @abstractmethod
    def estimate(self) -> Estimate:
        """See `compare.routes.Weighed`."""

    def alone(self, model: Model) -> Weighed:
        """The route for a model with itself."""
        setting = self.setting
        question = Question((model,), setting.metric, CROSS, setting.slices, setting.dtype)
        return self.of_pair(question)

    def within(self, estimate: Estimate, budget: Budget) -> Estimate:
        """See `compare.routes.Weighed`. A model with itself is to be within the budget."""
        for route in map(self.alone, self.models.examples.values()):
            route.within(route.estimate(), budget)
        return estimate

    def priced(
        self,
        run: Sizes,
        tile: int,
        *,
        multiplications: int,
        peak_bytes: float,
        seconds: float,
        facts: tuple[tuple[str, int], ...] = (),
        **how: Any,
    ) -> Estimate:
        """The estimate of the run along the route.

        Args:
            run: Sizes of the run.
            tile: Number of models per side of a tile.
            multiplications: Scalar multiplications of all pairs together.
            peak_bytes: Bytes alive at once beside the products of a tile: weights and vectors.
            seconds: Expected seconds without compiling and without reading models.
            facts: Counts by which the route tells its size.
            how: How else the run goes, see `Tiles`.
        """
        setting = self.setting
        return Estimate(
            metric=setting.metric.name,
            exact=is_exact(setting.metric, self.models.examples.values()),
            route=self.name,
            dtype=self.dtype or setting.dtype,
            outputs=("AA", "AB", "BB"),
            multiplications=multiplications,
            peak_bytes=math.ceil(peak_bytes) + run.tile_bytes(tile),
            seconds=seconds,
            facts=facts,
            tiles=Tiles(setting.pairs, tile, run.tiles(tile), **how),
        )


def tiles_of(planned: Estimate) -> Tiles:
    """How a run goes, of an estimate of many pairs."""
    assert planned.tiles is not None, planned.route
    return planned.tiles


def summary(planned: Estimate) -> str:
    """An estimate of many pairs in a single line, as stored in a result's attributes."""
    tiles = tiles_of(planned)
    cut = f"{tiles.number} tiles of {tiles.side} x {tiles.side}"
    return f"{planned.route}: {planned.multiplications:.3g} multiplications in {cut}"


def _bases(entries: Iterable[Entry]) -> dict[str, Kinds]:
    """Digests of the distinct models in the entries, with the kinds of their layers."""
    return dict(itertools.chain.from_iterable(entry.bases for entry in entries))


def in_turn(runs: Sequence[tuple[Estimate, int]]) -> Estimate:
    """The estimate of runs one after another.

    Args:
        runs: Estimates, each with a number of runs of equal shapes. Programs are compiled for the
            first of these; other routes are told where all shapes are equal.
    """
    (first, count), *others = runs
    tiles = [(tiles_of(planned), times) for planned, times in runs]
    together = dataclasses.replace(
        first,
        multiplications=sum(times * planned.multiplications for planned, times in runs),
        peak_bytes=max(planned.peak_bytes for planned, _ in runs),
        seconds=sum(times * planned.seconds for planned, times in runs),
        tiles=Tiles(
            pairs=sum(times * each.pairs for each, times in tiles),
            side=max(each.side for each, _ in tiles),
            number=sum(times * each.number for each, times in tiles),
            together=min(each.together for each, _ in tiles),
            streamed=any(each.streamed for each, _ in tiles),
            programs=sum(each.programs for each, _ in tiles),
            tier="compile" if any(each.tier == "compile" for each, _ in tiles) else "interpret",
        ),
        others=tuple(in_turn([(other, count)]) for other in first.others),
    )
    if not others:
        return together
    return dataclasses.replace(
        together,
        route=", ".join(dict.fromkeys(planned.route for planned, _ in runs)),
        exact=all(planned.exact for planned, _ in runs),
        facts=(),
        others=(),
        passed_over=(),
    )
