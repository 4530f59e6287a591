"""The plan of a run over many pairs: its route, tiles, multiplications, memory and seconds.

First stand the `Sizes` of a run, on which the costs of all routes depend, and the size of a tile.

All routes give the same numbers. *Features* turn each model into a vector, so that a pair is a dot
product; each space that holds the models is a route. *Recursion* contracts every pair along its
plan. The route with the fewest multiplications is taken, where writing features beyond the cache
counts as multiplications, too. (*Forward passes* are planned in `forward_runs`, sums over *pairs of
hidden units* in `kernel_runs`.)

`with_seconds` estimates the time of a plan from the rates measured on this machine, with compiling
and without reading models.
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
from tnsim.engine.budget import Budget
from tnsim.engine.costs import CACHED, PROGRAM_BYTES, WRITING
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.ir.program import Program
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import rates
from tnsim.engine.runtime.devices import backend, check_addresses
from tnsim.engine.runtime.rates import Runs, Tier
from tnsim.engine.runtime.stacking import Axes
from tnsim.errors import TooLarge
from tnsim.metrics.points import Points
from tnsim.models.model import Model
from tnsim.names import SIDES, side_of
from tnsim.problems import features
from tnsim.problems.features import FeatureSpace
from tnsim.problems.tensors.kinds import Kinds

# Multiplications of a tile: at most one and a half seconds on two cores, so that an interrupted
# tile loses little, and long enough that the overhead of a tile is small.
_TILE_WORK = 2**34
_ACCELERATED = 2**5  # factor on the work of a tile where the arrays are not on a CPU
LARGEST_TILE = 128  # models per side of a tile
_UNKNOWN = 2**33  # bytes assumed free where the platform does not tell
FEATURES, CONTRACTIONS = "features", "contractions"
ROUTES = (FEATURES, CONTRACTIONS)
FORWARD = "forward passes"  # see `forward_runs`
KERNELS = "kernels"  # see `kernel_runs`
# Multiplications as which a written element counts. Over plans of all families and widths 16 to
# 128, multiplications alone run at 3e9 to 6e10 per second; with writing counted in this way, at no
# less than 1.3e10 per second.
_ELEMENT_WORK = 64
# Pairs of at least _LARGE multiplications run up to _AT_ONCE at a time, as a single pair keeps all
# cores busy only part of the time: on 4 cores, language models of width 256 take 1.46 s per pair
# one by one, 0.90 s two at once and 0.84 s four at once.
_AT_ONCE, _LARGE = 4, 2**28
_EACH_BYTES = 2**24  # bytes of a compiled program, with compiling it
_Bases: TypeAlias = "Counter[Kinds]"
"""Numbers of distinct models by the kinds of their layers."""
Contracted: TypeAlias = "list[tuple[int, Plan]]"
"""Numbers of pairs, each with the plan along which they are contracted."""
_FEATURE_OPERATIONS = 16  # operations of a program that makes features or takes their products


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
    def of(
        cls,
        rows: Sequence[Entry],
        columns: Sequence[Entry] | None,
        examples: Mapping[Kinds, Model],
        setting: PairSetting,
    ) -> Self:
        """The sizes of a run; the arguments are those of `plan`."""
        item = ITEM_BYTES[setting.dtype]
        entries = (*rows, *(columns or ()))
        outputs = rows[0].d_out if setting.slices else 1
        return cls(
            rows=len(rows),
            columns=len(rows if columns is None else columns),
            symmetric=columns is None,
            terms=max(len(entry.parts) for entry in entries),
            weights=max((model.parameters for model in examples.values()), default=0) * item,
            products=32 * outputs,
            item=item,
            available=memory(setting),
        )

    @property
    def pairs(self) -> int:
        """The number of inner products; of a single list each pair counts once."""
        return self._on_and_below(self.rows) if self.symmetric else self.rows * self.columns

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
        return self._on_and_below(blocks) if self.symmetric else blocks * across

    def tile_bytes(self, tile: int) -> int:
        """Bytes of the products of a tile."""
        return min(tile, self.rows) * min(tile, self.columns) * self.products

    @staticmethod
    def _on_and_below(n: int) -> int:
        return n * (n + 1) // 2


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


@dataclass(frozen=True)
class PairwisePlan:
    """The cost of a pairwise run.

    Args:
        route: "contractions", "forward passes", "kernels", or the name of a way to make
            vectors, as "features".
        pairs: Pairs of distinct models.
        tile: Models per side of a tile.
        tiles: Number of tiles.
        multiplications: Scalar multiplications of all pairs together.
        peak_bytes: Bytes alive at once: weights, features and products of a single tile.
        compilations: Number of compiled programs.
        streamed: Whether the vectors are too large to be kept, and are made again for every tile,
            part by part.
        together: Number of tiles that may run at once on the cores of a CPU.
        seconds: Estimated time with compiling; None where no rate was measured.
        tier: Tier in which plans of pairs run, "interpret" or "compile".
        others: The other routes that were weighed, the cheapest first.

    Example:
        >>> print(PairwisePlan("features", 3, 2, 1, 12, 2**20, 3).summary)
        features: 12 multiplications in 1 tiles of 2 x 2
    """

    route: str
    pairs: int
    tile: int
    tiles: int
    multiplications: int
    peak_bytes: int
    compilations: int
    streamed: bool = False
    together: int = 1
    seconds: float | None = None
    others: tuple[PairwisePlan, ...] = ()
    tier: Tier = "compile"

    @property
    def routes(self) -> tuple[PairwisePlan, ...]:
        """This plan and the plans of the other routes."""
        return self, *self.others

    @property
    def program_bytes(self) -> int:
        """Bytes that compiling takes in a new process."""
        return PROGRAM_BYTES + _EACH_BYTES * self.compilations

    @property
    def summary(self) -> str:
        """The plan in a single line, as stored in a result's attributes."""
        tiles = f"{self.tiles} tiles of {self.tile} x {self.tile}"
        return f"{self.route}: {self.multiplications:.3g} multiplications in {tiles}"

    @property
    def _costs(self) -> str:
        """The costs in one line, for the list of other routes."""
        seconds = "" if self.seconds is None else f", {self.seconds:.3g} s"
        memory = f"{self.peak_bytes / 2**20:,.2f} MiB"
        return f"{self.multiplications:.3g} multiplications, {memory}{seconds}"

    def __str__(self) -> str:
        rows = [
            ("route", self.route),
            ("pairs", f"{self.pairs:,}"),
            ("tiles", f"{self.tiles:,} of {self.tile} x {self.tile}"),
            ("multiplications", f"{self.multiplications:,} scalar multiplications"),
            ("peak memory", f"{self.peak_bytes / 2**20:,.2f} MiB"),
            ("tier", f"{self.tier}, {self.compilations:,} compiled programs"),
        ]
        if self.seconds is not None:
            rows.append(("estimated", f"{self.seconds:.3g} s with compiling, without reading"))
        for other in self.others:
            rows.append((f"or {other.route}", other._costs))
        return "\n".join(f"{name:<16} {text}" for name, text in rows)


class Route(NamedTuple):
    """The route of a run.

    Args:
        plan: Costs of the cheapest route; the costs of the other routes are its `others`.
        spaces: Feature spaces by route name, of every route by features, taken or not.
        contracted: Numbers of pairs and their plans; empty where pairs are too large for plans.
        points: Points of forward passes; None on other routes.
    """

    plan: PairwisePlan
    spaces: Mapping[str, FeatureSpace]
    contracted: Contracted
    points: Points | None = None


def plan(
    rows: Sequence[Entry],
    columns: Sequence[Entry] | None,
    examples: Mapping[Kinds, Model],
    setting: PairSetting,
) -> Route:
    """The cheapest route by features or along plans.

    Args:
        rows: Distinct models.
        columns: Distinct models compared with the rows; None for all pairs of `rows`.
        examples: A model of each sequence of layer kinds.
        setting: Settings common to all pairs.

    Raises:
        ModelError: The models cannot be compared.
        TooLarge: A single pair is beyond the budget along a plan, and no feature space fits.
    """
    several = [_bases(rows)] if columns is None else [_bases(rows), _bases(columns)]
    n_ctx = next(iter(examples.values())).n_ctx
    run = Sizes.of(rows, columns, examples, setting)
    spaces = features.spaces(list(examples), setting.units.metric, n_ctx)
    made = sum(bases.total() for bases in several)
    routes: list[tuple[float, PairwisePlan]] = []
    for space in spaces:
        candidate = _features(run, several, space, len(space.parts) * (len(examples) + 2))
        if candidate.peak_bytes > run.available:
            continue
        numbers = space.length * space.d_out
        charge = WRITING * numbers * made if numbers > CACHED else 0
        # Features of a combination are added up before products are taken, so that terms that
        # cancel lose fewer digits: where they fit, they are taken whatever they cost.
        keeps_digits = run.terms > 1 and features.fits(space)
        routes.append((0 if keeps_digits else candidate.multiplications + charge, candidate))
    contracted: Contracted = []
    if routes and any(space.on_host for space in spaces):  # no plan would be as short
        (_, cheapest), *_ = routes
        return Route(cheapest, {space.route: space for space in spaces}, contracted)
    try:
        work = _contractions(several, examples, setting)
        contracted = work.plans
        candidate = _recursion(run, work)
        routes.append((candidate.multiplications, candidate))
    except TooLarge:
        if not routes:
            raise
    routes.sort(key=lambda route: route[0])
    (_, cheapest), *others = routes
    weighed = tuple(other for _, other in others)
    by_route = {space.route: space for space in spaces}
    return Route(dataclasses.replace(cheapest, others=weighed), by_route, contracted)


def _recursion(run: Sizes, work: _Work) -> PairwisePlan:
    """The cost of contracting every pair along its plan."""
    # Written elements count as well, since small contractions wait for memory.
    one_pair = max(1, (work.multiplications + _ELEMENT_WORK * work.written) // run.pairs)
    tile = run.tile(one_pair, 2 * (run.weights + work.own_bytes))
    # Six stacks: rows and columns, each as read, on the device, and left from the previous tile.
    stacks = 6 * tile * run.terms * (run.weights + work.own_bytes)
    one_tile = stacks + work.intermediate_bytes
    is_large = tile == 1 and work.multiplications >= _LARGE * run.pairs
    together = max(1, min(_AT_ONCE, int(run.available / 4 // one_tile))) if is_large else 1
    tier = rates.tier_of_all(_runs(work.plans, tile, work.budget))
    return PairwisePlan(
        route=CONTRACTIONS,
        pairs=run.pairs,
        tile=tile,
        tiles=run.tiles(tile),
        multiplications=work.multiplications,
        peak_bytes=together * one_tile + run.tile_bytes(tile),
        compilations=len(work.programs) if tier == "compile" else 0,
        together=together,
        tier=tier,
    )


def _features(
    run: Sizes, several: Sequence[_Bases], space: FeatureSpace, compilations: int
) -> PairwisePlan:
    """The cost of turning every model into a vector, and of a dot product for every pair."""
    made = list(itertools.chain.from_iterable(bases.elements() for bases in several))
    numbers = space.length * space.d_out
    vector_bytes = numbers * run.item
    part_bytes = max(part.length for part in space.parts) * space.d_out * run.item
    making = sum(space.multiplications(kinds) for kinds in made)
    work = making + run.pairs * numbers
    kept = len(made) * vector_bytes <= run.available / 2
    streamed = not kept and len(space.parts) > 1
    if streamed:  # a larger tile makes vectors fewer times, so tiles take half the memory
        vector_bytes = part_bytes
        tile = run.tile(1, run.weights + 2 * part_bytes, share=1 / 2)
    else:
        tile = run.tile(numbers, run.weights + 2 * vector_bytes)
    # Every tile makes the features of its rows and its columns, so each model is made about 2 tiles
    # x tile / models times.
    if not kept:
        work += 2 * run.tiles(tile) * tile // len(made) * making
    # Features are kept for later tiles: of two blocks, or of all models up to half the memory.
    most = max(2 * tile * vector_bytes, run.available / 2)
    peak = int(min(len(made) * numbers * run.item, most))
    peak += _making_bytes(run, tile * run.terms, space, made, part_bytes)
    return PairwisePlan(
        route=space.route,
        pairs=run.pairs,
        tile=tile,
        tiles=run.tiles(tile),
        multiplications=work,
        peak_bytes=peak + run.tile_bytes(tile),
        compilations=compilations,
        streamed=streamed,
    )


def _making_bytes(
    run: Sizes, models: int, space: FeatureSpace, made: Sequence[Kinds], part_bytes: int
) -> int:
    """Working bytes for making a single part of the features of `models` distinct models."""
    combined = models * part_bytes if run.terms > 1 else 0
    stacks = 2 * models * run.weights  # in NumPy and on the device
    in_flight = max(space.in_flight(kinds, models) for kinds in made) * run.item
    return combined + stacks + in_flight


def _bases(entries: Sequence[Entry]) -> _Bases:
    """The number of distinct models in the entries, for each sequence of layer kinds."""
    distinct: dict[str, Kinds] = {}
    for entry in entries:
        distinct |= entry.parts
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
            work.add(times, batched_plans.pair_plan(examples[kinds], None, setting))
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


def several(plan: PairwisePlan, count: int) -> PairwisePlan:
    """The plan of several runs of equal shapes, which share their programs, one after another.

    Args:
        plan: Plan of each run.
        count: Number of runs.

    Example:
        >>> several(PairwisePlan("features", 3, 2, 1, 12, 2**20, 3), 2).summary
        'features: 24 multiplications in 2 tiles of 2 x 2'
    """
    return dataclasses.replace(
        plan,
        pairs=count * plan.pairs,
        tiles=count * plan.tiles,
        multiplications=count * plan.multiplications,
        others=tuple(several(other, count) for other in plan.others),
    )


def in_turn(plans: Sequence[PairwisePlan]) -> PairwisePlan:
    """The plan of runs of several kinds, one after another.

    Args:
        plans: Plans of the runs; other routes are those of the only run, if there is one.

    Example:
        >>> one = PairwisePlan("features", 3, 2, 1, 12, 2**20, 3)
        >>> in_turn([one, dataclasses.replace(one, route="kernels", tile=4)]).summary
        'features, kernels: 24 multiplications in 2 tiles of 4 x 4'
    """
    if len(plans) == 1:
        return plans[0]
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    return PairwisePlan(
        route=", ".join(dict.fromkeys(plan.route for plan in plans)),
        pairs=sum(plan.pairs for plan in plans),
        tile=max(plan.tile for plan in plans),
        tiles=sum(plan.tiles for plan in plans),
        multiplications=sum(plan.multiplications for plan in plans),
        peak_bytes=max(plan.peak_bytes for plan in plans),
        compilations=sum(plan.compilations for plan in plans),
        streamed=any(plan.streamed for plan in plans),
        together=min(plan.together for plan in plans),
        # A sum over some of the runs would be no estimate.
        seconds=sum(seconds) if len(seconds) == len(plans) else None,
        tier="compile" if any(plan.tier == "compile" for plan in plans) else "interpret",
    )


def with_seconds(
    planned: PairwisePlan, contracted: Contracted, setting: PairSetting
) -> PairwisePlan:
    """The plan with an estimated time for every route, from rates measured on this machine.

    Args:
        planned: The plan of a run.
        contracted: Numbers of pairs and the plans along which they are contracted.
        setting: Settings of the run.
    """
    timed = []
    for route in planned.routes:
        seconds = _feature_seconds(route, setting.dtype)
        if route.route == CONTRACTIONS:
            seconds = _recursion_seconds(route, contracted, setting.budget)
        timed.append(dataclasses.replace(route, seconds=seconds))
    return dataclasses.replace(timed[0], others=tuple(timed[1:]))


def _feature_seconds(route: PairwisePlan, dtype: str) -> float:
    measured = rates.measured(dtype)
    compiling = measured.compiling * _FEATURE_OPERATIONS * route.compilations
    return route.multiplications / measured.small + compiling


def _recursion_seconds(route: PairwisePlan, contracted: Contracted, budget: Budget) -> float:
    runs = _runs(contracted, route.tile, budget)
    return sum(seconds.total for seconds in rates.seconds_of(runs, route.tier))


def _runs(contracted: Contracted, tile: int, budget: Budget) -> list[Runs]:
    """The plans of all pairs, each with the batches in which it runs."""
    runs = []
    for times, plan in contracted:
        side = min(batched_plans.batch_side(plan, tile, budget), max(1, times))
        over: dict[str, Axes] = {}
        for name in plan.shapes if side > 1 else ():
            owner = side_of(name)
            # The first stacked axis belongs to rows, the second to columns.
            if owner is not None:
                over[name] = (owner == SIDES[0], owner == SIDES[1])
        runs.append(Runs(plan, times, side, over))
    return runs
