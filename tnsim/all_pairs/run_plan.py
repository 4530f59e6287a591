"""The price of a run over many pairs: its tiles, multiplications, memory and seconds.

First stand the `Sizes` of a run, on which the costs of all routes depend, and the size of a tile.

All routes give the same numbers. *Vectors* turn each model into one, so that a pair is a dot
product; each space that holds the models is a route. *Contractions* run every pair along its plan.
(*Forward passes* are priced in `forward_runs`, sums over pairs of hidden units in `kernel_runs`.)
`preparation` has the table of all routes and takes the cheapest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

from tnsim.all_pairs import batched_plans
from tnsim.all_pairs.batched_plans import Pairs, PairSetting
from tnsim.all_pairs.sources import Entry
from tnsim.compare.by_features import expected_seconds
from tnsim.compare.by_plans import Contractions
from tnsim.compare.estimates import Estimate, Tiles
from tnsim.compare.planned import AROUND, PREPARING
from tnsim.compare.request import CROSS, SELF, Question
from tnsim.engine.budget import Budget
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.ir.program import Program
from tnsim.engine.plan import Plan
from tnsim.engine.runtime.devices import backend, check_addresses
from tnsim.engine.runtime.stacking import Axes
from tnsim.engine.runtime.tiers import seconds_of, tier_in_use
from tnsim.errors import TooLarge
from tnsim.models.model import Model
from tnsim.names import SIDES, Pair, side_of
from tnsim.problems import features
from tnsim.problems.features import FeatureSpace
from tnsim.problems.tensors.kinds import Kinds, nonlinear

# Multiplications of a tile: at most one and a half seconds on two cores, so that an interrupted
# tile loses little, and long enough that the overhead of a tile is small. On an accelerator a tile
# has so many times the work.
_TILE_WORK, _ACCELERATED = 2**34, 2**5
LARGEST_TILE = 128  # models per side of a tile
_UNKNOWN = 2**33  # bytes assumed free where the platform does not tell
# Multiplications as which a written element counts. Over plans of all families and widths 16 to
# 128, multiplications alone run at 3e9 to 6e10 per second; with writing counted in this way, at no
# less than 1.3e10 per second.
_ELEMENT_WORK = 64
# Pairs of at least _LARGE multiplications run up to _AT_ONCE at a time, as a single pair keeps all
# cores busy only part of the time: on 4 cores, language models of width 256 take 1.46 s per pair
# one by one, 0.90 s two at once and 0.84 s four at once.
_AT_ONCE, _LARGE = 4, 2**28
_Bases: TypeAlias = "Counter[Kinds]"
"""Numbers of distinct models by the kinds of their layers."""
Contracted: TypeAlias = "list[tuple[int, Plan]]"
"""Numbers of pairs, each with the plan along which they are contracted."""


class Models(NamedTuple):
    """The models of a run.

    Args:
        rows: Distinct models.
        columns: Distinct models compared with the rows; None for all pairs of `rows`.
        examples: A model of each sequence of layer kinds.
    """

    rows: Sequence[Entry]
    columns: Sequence[Entry] | None
    examples: Mapping[Kinds, Model]

    @property
    def entries(self) -> list[Entry]:
        """Rows and columns."""
        return [*self.rows, *(self.columns or ())]

    @property
    def bases(self) -> list[_Bases]:
        """Numbers of models by kinds, of the rows and, if they are another list, the columns."""
        return [_bases(side) for side in (self.rows, self.columns) if side is not None]


class Sizes(NamedTuple):
    """Sizes on which the costs of all routes depend.

    Args:
        rows, columns: Numbers of distinct models.
        symmetric: Whether rows and columns are a single list.
        terms: Largest number of models that an entry adds up.
        nonlinear: Largest number of nonlinear layers of a model.
        weights: Bytes of the largest model.
        products: Bytes computed and kept per pair.
        item: Bytes of a number.
        available: Bytes that the run may use.
    """

    rows: int
    columns: int
    symmetric: bool
    terms: int
    nonlinear: int
    weights: int
    products: int
    item: int
    available: float

    @classmethod
    def of(cls, models: Models, setting: PairSetting) -> Self:
        """The sizes of a run."""
        rows, columns = models.rows, models.columns
        item = ITEM_BYTES[setting.dtype]
        outputs = rows[0].d_out if setting.slices else 1
        largest = max((model.parameters for model in models.examples.values()), default=0)
        return cls(
            rows=len(rows),
            columns=len(rows if columns is None else columns),
            symmetric=columns is None,
            terms=max(len(entry.bases) for entry in models.entries),
            nonlinear=max(entry.nonlinear for entry in models.entries),
            weights=largest * item,
            products=32 * outputs,
            item=item,
            available=memory(setting),
        )

    @property
    def pairs(self) -> int:
        """The number of inner products; of a single list each pair counts once."""
        return pairs_of(self.rows, self.columns, self.symmetric)

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
        # A tile of n models a side has n^2 pairs, so limits on pairs are limits on n^2.
        by_work = math.isqrt(max(1, _tile_work() // work))
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


def _tile_work() -> int:
    """Multiplications of a tile, by the kind of backend.

    They are never measured: equal runs have equal tiles, and so equal bits.
    """
    return _TILE_WORK if backend() == "cpu" else _ACCELERATED * _TILE_WORK


def estimated(
    route: str,
    run: Sizes,
    setting: PairSetting,
    tiles: Tiles,
    *,
    multiplications: int,
    peak_bytes: int,
    seconds: float,
    facts: tuple[tuple[str, int], ...] = (),
) -> Estimate:
    """The estimate of a run along a route.

    Args:
        route: Name of the route.
        run: Sizes of the run.
        setting: Settings common to all pairs.
        tiles: How the run goes.
        multiplications: Scalar multiplications of all pairs together.
        peak_bytes: Bytes alive at once: weights, vectors and products of a tile.
        seconds: Expected seconds without compiling and without reading models.
        facts: Counts by which the route tells its size.
    """
    return Estimate(
        metric=setting.metric.name,
        exact=setting.metric.is_exact(run.nonlinear),
        route=route,
        dtype=setting.dtype,
        outputs=("AA", "AB", "BB"),
        multiplications=multiplications,
        peak_bytes=peak_bytes,
        seconds=seconds,
        facts=facts,
        tiles=tiles,
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


class ContractedRun:
    """The route of a run that contracts every pair along its plan.

    Args:
        models: Models of the run.
        setting: Settings common to all pairs.
    """

    name = Contractions.name

    def __init__(self, models: Models, setting: PairSetting) -> None:
        self.models, self.setting = models, setting

    @property
    def search(self) -> float:
        """See `compare.routes.Weighed`."""
        examples, setting = self.models.examples, self.setting

        def planning(bra: Kinds, ket: Kinds, wanted: tuple[Pair, ...]) -> float:
            pair = examples[bra], examples[ket]
            question = Question(pair, setting.units.metric, wanted, setting.slices, setting.dtype)
            return Contractions(question).search

        several = self.models.bases
        seconds = sum(planning(kinds, kinds, SELF) for bases in several for kinds in bases)
        for bra, ket, _, _ in _pairs_of_kinds(several):
            seconds += planning(bra, ket, CROSS)
        return seconds

    def estimate(self, limit: float = math.inf) -> Estimate:
        """See `compare.routes.Weighed`.

        Raises:
            TooLarge: A single pair is beyond the budget.
        """
        models, setting = self.models, self.setting
        run = Sizes.of(models, setting)
        work = _contractions(models.bases, models.examples, setting)
        # Written elements count as well, since small contractions wait for memory.
        one_pair = max(1, (work.multiplications + _ELEMENT_WORK * work.written) // run.pairs)
        tile = run.tile(one_pair, 2 * (run.weights + work.own_bytes))
        # Six stacks: rows and columns, each as read, on the device, and left from the previous
        # tile.
        stacks = 6 * tile * run.terms * (run.weights + work.own_bytes)
        one_tile = stacks + work.intermediate_bytes
        is_large = tile == 1 and work.multiplications >= _LARGE * run.pairs
        together = max(1, min(_AT_ONCE, int(run.available / 4 // one_tile))) if is_large else 1
        seconds = sum(_seconds(times, plan, tile, work.budget) for times, plan in work.plans)
        tier = tier_in_use()
        programs = len(work.programs) if tier == "compile" else 0
        return estimated(
            self.name,
            run,
            setting,
            Tiles(run.pairs, tile, run.tiles(tile), together, programs=programs, tier=tier),
            multiplications=work.multiplications,
            peak_bytes=together * one_tile + run.tile_bytes(tile),
            seconds=PREPARING + AROUND * seconds,
        )

    def check(self, estimate: Estimate, budget: Budget) -> None:
        """See `compare.routes.Weighed`; plans beyond the budget have no estimate."""


class VectorRun:
    """The route of a run that turns every model into a vector, so that a pair is a dot product.

    Args:
        models: Models of the run.
        setting: Settings common to all pairs.
        space: Space that holds all models.
    """

    search = 0.0

    def __init__(self, models: Models, setting: PairSetting, space: FeatureSpace) -> None:
        self.models, self.setting, self.space = models, setting, space
        self.name = space.route

    def estimate(self, limit: float = math.inf) -> Estimate:
        """See `compare.routes.Weighed`."""
        models, setting, space = self.models, self.setting, self.space
        several = models.bases
        made = list(itertools.chain.from_iterable(bases.elements() for bases in several))
        numbers = space.length * space.d_out
        making = sum(space.multiplications(kinds) for kinds in made)
        run = Sizes.of(models, setting._replace(dtype="float64"))
        work = making + run.pairs * numbers
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
            work += 2 * run.tiles(tile) * tile // len(made) * making
        # Features are kept for later tiles: of two blocks, or of all models up to half the memory.
        most = max(2 * tile * vector_bytes, run.available / 2)
        peak = int(min(len(made) * numbers * run.item, most))
        peak += self._making_bytes(run, tile * run.terms, made, section_bytes)
        return estimated(
            self.name,
            run,
            setting,
            Tiles(run.pairs, tile, run.tiles(tile), streamed=streamed, tier="interpret"),
            multiplications=work,
            peak_bytes=peak + run.tile_bytes(tile),
            seconds=expected_seconds(work, nonlinear(*models.examples)),
            facts=(("coefficients at most", numbers),),
        )

    def check(self, estimate: Estimate, budget: Budget) -> None:
        """See `compare.routes.Weighed`."""
        available = memory(self.setting)
        if estimate.peak_bytes > available:
            raise TooLarge(
                f"{estimate.metric} by {self.name} needs {estimate.peak_bytes / 2**30:.3g} GiB, "
                f"and the budget is {available / 2**30:.3g} GiB; give a larger tnsim.Budget"
            )

    @property
    def fits(self) -> bool:
        """Whether vectors of combinations fit, also the memory of the run."""
        within = self.estimate().peak_bytes <= memory(self.setting)
        return features.fits(self.space) and within

    def _making_bytes(
        self, run: Sizes, models: int, made: Sequence[Kinds], section_bytes: int
    ) -> int:
        """Working bytes for making a section of the features of `models` distinct models."""
        combined = models * section_bytes if run.terms > 1 else 0
        stacks = 2 * models * run.weights  # as read and in units of the run
        in_flight = max(self.space.in_flight(kinds, models) for kinds in made) * run.item
        return combined + stacks + in_flight


def _bases(entries: Sequence[Entry]) -> _Bases:
    """The number of distinct models in the entries, for each sequence of layer kinds."""
    distinct: dict[str, Kinds] = {}
    for entry in entries:
        distinct |= entry.bases
    return Counter(distinct.values())


@dataclass
class _Work:
    """The cost of contracting pairs, added up plan by plan."""

    budget: Budget
    multiplications: int = 0
    written: int = 0
    intermediate_bytes: int = 0
    own_bytes: int = 0
    programs: set[Program] = field(default_factory=set)
    plans: Contracted = field(default_factory=list)

    def add(self, times: int, plan: Plan) -> None:
        """Add `times` pairs along a single plan, run in batches."""
        self.multiplications += times * plan.multiplications
        self.written += times * plan.written_elements
        self.programs.update(plan.programs)
        self.plans.append((times, plan))
        # A square of models runs at once.
        batch = batched_plans.batch_side(plan, LARGEST_TILE, self.budget) ** 2
        batch_bytes = batched_plans.intermediate_bytes(plan) * batch
        self.intermediate_bytes = max(self.intermediate_bytes, batch_bytes)

    def add_own(self, models: int, plan: Plan) -> None:
        """Add the own shares of `models` models, with outputs that are kept."""
        self.add(models, plan)
        handed = sum(math.prod(shape) for shape in plan.output_shapes.values())
        self.own_bytes = max(self.own_bytes, handed * ITEM_BYTES[plan.dtype])


def _contractions(
    several: Sequence[_Bases], examples: Mapping[Kinds, Model], setting: PairSetting
) -> _Work:
    """The cost of the norms of all models and of the inner products of all pairs.

    Args:
        several: Numbers of models by kinds, of the rows and, if they are another list, the columns.
        examples: A model of each sequence of layer kinds.
        setting: Settings common to all pairs.
    """
    work = _Work(setting.budget)
    # Norms: every model with itself.
    for bases in several:
        for kinds, times in bases.items():
            work.add(times, Pairs.of(examples[kinds], None, setting).plan)
    for bra, ket, sides, times in _pairs_of_kinds(several):
        shares = Pairs.of(examples[bra], examples[ket], setting).shares
        work.add(times, shares.crossing.plan)
        for name, models in sides.items():
            if name in shares.own:
                work.add_own(models, shares.own[name].plan)
    return work


def _pairs_of_kinds(
    several: Sequence[_Bases],
) -> Iterator[tuple[Kinds, Kinds, dict[str, int], int]]:
    """Every pair of kinds, with its numbers of models on each side and its number of pairs."""
    rows, columns = list(several[0].items()), list(several[-1].items())
    one_list = len(several) == 1
    for n, (bra, times) in enumerate(rows):
        for m, (ket, others) in enumerate(columns):
            # Of a single list, pairs of different kinds are counted once, and pairs of equal kinds
            # without the norms, which are counted above.
            sides = {"A": times, "B": others}
            if not one_list or m < n:
                yield bra, ket, sides, times * others
            elif m == n:
                yield bra, ket, sides, times * (times - 1) // 2


def several(planned: Estimate, count: int) -> Estimate:
    """The estimate of several runs of equal shapes, one after another.

    Args:
        planned: Estimate of each run.
        count: Number of runs. Programs are compiled for the first.
    """
    tiles = tiles_of(planned)
    return dataclasses.replace(
        planned,
        multiplications=count * planned.multiplications,
        seconds=count * planned.seconds,
        tiles=dataclasses.replace(tiles, pairs=count * tiles.pairs, number=count * tiles.number),
        others=tuple(several(other, count) for other in planned.others),
    )


def in_turn(several: Sequence[Estimate]) -> Estimate:
    """The estimate of runs of several kinds, one after another.

    Args:
        several: Estimates of the runs; other routes are those of the only run, if there is one.
    """
    if len(several) == 1:
        return several[0]
    tiles = [tiles_of(planned) for planned in several]
    return dataclasses.replace(
        several[0],
        route=", ".join(dict.fromkeys(planned.route for planned in several)),
        exact=all(planned.exact for planned in several),
        multiplications=sum(planned.multiplications for planned in several),
        peak_bytes=max(planned.peak_bytes for planned in several),
        seconds=sum(planned.seconds for planned in several),
        facts=(),
        tiles=Tiles(
            pairs=sum(each.pairs for each in tiles),
            side=max(each.side for each in tiles),
            number=sum(each.number for each in tiles),
            together=min(each.together for each in tiles),
            streamed=any(each.streamed for each in tiles),
            programs=sum(each.programs for each in tiles),
            tier="compile" if any(each.tier == "compile" for each in tiles) else "interpret",
        ),
        others=(),
        passed_over=(),
    )


def _seconds(times: int, plan: Plan, tile: int, budget: Budget) -> float:
    """Seconds of a number of pairs with one plan, in the batches in which they run."""
    side = min(batched_plans.batch_side(plan, tile, budget), max(1, times))
    over: dict[str, Axes] = {}
    for name in plan.shapes if side > 1 else ():
        owner = side_of(name)
        # The first stacked axis belongs to rows, the second to columns.
        if owner is not None:
            over[name] = (owner == SIDES[0], owner == SIDES[1])
    return seconds_of(plan, times, side, over)
