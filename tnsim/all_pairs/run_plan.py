"""The price of a run over many pairs: its tiles, multiplications, memory and seconds.

First stand the `Sizes` of a run, on which the costs of all routes depend, and the size of a tile;
then what all routes of a run have in common. All routes give the same numbers:

    vector_runs       each model is a vector, so that a pair is a dot product
    contracted_runs   every pair is contracted along its plan
    kernel_runs       sums over pairs of hidden units
    forward_runs      outputs at points

`preparation` has the table of all routes and takes the cheapest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

from tnsim.all_pairs.sources import Entry
from tnsim.all_pairs.ways import PairSetting, Way
from tnsim.compare.by_points import Rows
from tnsim.compare.estimates import Estimate, Tiles
from tnsim.compare.request import CROSS, Question, is_exact
from tnsim.compare.routes import Weighed
from tnsim.engine.budget import Budget
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.runtime.devices import backend, check_addresses
from tnsim.models.model import Model
from tnsim.problems.tensors.kinds import Kinds

# Multiplications of a tile: at most one and a half seconds on two cores, so that an interrupted
# tile loses little, and long enough that the overhead of a tile is small. On an accelerator a tile
# has so many times the work.
_TILE_WORK, _ACCELERATED = 2**34, 2**5
LARGEST_TILE = 128  # models per side of a tile
_UNKNOWN = 2**33  # bytes assumed free where the platform does not tell
Bases: TypeAlias = "Counter[Kinds]"
"""Numbers of distinct models by the kinds of their layers."""


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
    """

    name: str
    way: Way
    search: float = 0.0
    of_pair: Callable[[Question], Weighed]

    def __init__(self, models: Models, setting: PairSetting) -> None:
        self.models, self.setting = models, setting

    @abstractmethod
    def estimate(self, limit: float = math.inf) -> Estimate:
        """See `compare.routes.Weighed`."""

    def alone(self, model: Model) -> Weighed:
        """The route for a model with itself."""
        setting = self.setting
        question = Question((model,), setting.metric, CROSS, setting.slices, setting.dtype)
        return self.of_pair(question)

    def check(self, estimate: Estimate, budget: Budget) -> None:
        """See `compare.routes.Weighed`. A model with itself is to be within the budget."""
        for route in map(self.alone, self.models.examples.values()):
            route.check(route.estimate(), budget)

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
            dtype=setting.dtype,
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
