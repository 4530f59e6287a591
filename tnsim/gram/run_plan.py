"""What a run over many pairs would cost.

In: entries, a metric. Out: a plan: the route, the tiles, multiplications, memory.

Two routes give the same numbers. *Features* turn each model into a vector, so that a pair is a
dot product; *recursion* contracts every pair along its plan. The one that multiplies less is
taken, where a feature vector beyond the cache is charged for being written, as planning charges
any large intermediate.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tnsim.engine import execution
from tnsim.engine.pathfinding import CACHED, WRITING
from tnsim.engine.piece import Piece
from tnsim.engine.plan import Plan
from tnsim.engine.plan_memory import PROGRAM_BYTES
from tnsim.folding import feature_space
from tnsim.folding.feature_space import Space
from tnsim.gram import batched_plans
from tnsim.gram.batched_plans import Setting
from tnsim.gram.run_sizes import LARGEST_TILE, Sizes
from tnsim.gram.sources import Entry
from tnsim.models.model import Model
from tnsim.tensors.kinds import Kinds

FEATURES, RECURSION = ROUTES = "features", "recursion"
FORWARD = "forward passes"  # see `forward_runs`
# An element written counts as so many multiplications: these alone go at 3e9 to 6e10 a second over
# layer-wise, whole-tree and attention plans of widths 16 to 128, with writing counted so the
# slowest plan does 1.3e10.
_ELEMENT_WORK = 64
_MATMUL = 1024
_COMPILED = {
    FEATURES: 2**23,
    RECURSION: 3 * 2**22,
    FORWARD: 3 * 2**22,
}  # bytes of a program and of compiling it

_Bases: TypeAlias = "Counter[Kinds]"
"""Numbers of distinct models by the kinds of their layers."""


@dataclass(frozen=True)
class PairwisePlan:
    """What a pairwise run takes.

    Args:
        route: "features", "recursion" or "forward passes".
        pairs: Pairs of distinct models.
        tile: Models a side of a tile.
        tiles: How many there are.
        multiplications: Scalar ones, of all pairs together.
        peak_bytes: Alive at once: weights, features and products of one tile.
        compilations: Compiled programs.
        seconds: Estimated; None where no rate was measured.

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
    seconds: float | None = None

    @property
    def program_bytes(self) -> int:
        """Bytes that compiling takes, the first time in a process."""
        return PROGRAM_BYTES + _COMPILED[self.route] * self.compilations

    @property
    def summary(self) -> str:
        """One line, as the result keeps it."""
        tiles = f"{self.tiles} tiles of {self.tile} x {self.tile}"
        return f"{self.route}: {self.multiplications:.3g} multiplications in {tiles}"

    def __str__(self) -> str:
        rows = [
            ("route", self.route),
            ("pairs", f"{self.pairs:,}"),
            ("tiles", f"{self.tiles:,} of {self.tile} x {self.tile}"),
            ("multiplications", f"{self.multiplications:,} scalar multiplications"),
            ("peak memory", f"{self.peak_bytes / 2**20:,.2f} MiB"),
            ("compilations", f"{self.compilations:,} programs"),
        ]
        if self.seconds is not None:
            rate = "at the measured matrix product rate, without reading and compiling"
            rows.append(("estimated", f"{self.seconds:.3g} s {rate}"))
        return "\n".join(f"{name:<16} {text}" for name, text in rows)


def plan(
    rows: Sequence[Entry],
    columns: Sequence[Entry] | None,
    examples: Mapping[Kinds, Model],
    setting: Setting,
) -> tuple[PairwisePlan, Space | None]:
    """The plan of the cheaper route.

    Args:
        rows: Distinct models.
        columns: Distinct models they are compared with; None for all pairs of `rows`.
        examples: One model of each sequence of layer kinds.
        setting: What is the same for all pairs.

    Returns:
        The plan, and the space of features whichever route it is; None where there are none.

    Raises:
        ModelError, TooLarge: As for a single pair.
    """
    several = [_bases(rows)] if columns is None else [_bases(rows), _bases(columns)]
    sequences = any(model.n_ctx is not None for model in examples.values())
    space = feature_space.space(list(examples), setting.metric, sequences)
    run = Sizes.of(rows, columns, examples, setting)
    by_pair = _recursion(run, several, examples, setting)
    if space is None:
        return by_pair, None
    by_model = _features(run, several, space, compilations=len(examples) + 2)
    if run.terms > 1 and feature_space.fits(space):
        return by_model, space
    numbers = space.length * space.d_out
    made = sum(bases.total() for bases in several)
    charge = WRITING * numbers * made if numbers > CACHED else 0
    cheaper = by_model.multiplications + charge < by_pair.multiplications
    return (by_model if cheaper else by_pair), space


def _recursion(
    run: Sizes, several: Sequence[_Bases], examples: Mapping[Kinds, Model], setting: Setting
) -> PairwisePlan:
    """Every pair contracted along its plan."""
    work = _contractions(several, examples, setting)
    one_pair = max(1, (work.multiplications + _ELEMENT_WORK * work.written) // run.pairs)
    tile = run.tile(one_pair, 2 * run.weights)
    # Rows and columns, each as read, on the device, and still there from the tile before.
    stacks = 6 * tile * run.terms * run.weights
    return PairwisePlan(
        RECURSION,
        run.pairs,
        tile,
        run.tiles(tile),
        work.multiplications,
        peak_bytes=stacks + work.intermediate_bytes + run.tile_bytes(tile),
        compilations=len(work.pieces),
    )


def _features(
    run: Sizes, several: Sequence[_Bases], space: Space, compilations: int
) -> PairwisePlan:
    """Every model turned into a vector, every pair a dot product."""
    made = list(itertools.chain.from_iterable(bases.elements() for bases in several))
    numbers = space.length * space.d_out
    vector_bytes = numbers * run.item
    tile = run.tile(numbers, run.weights + 2 * vector_bytes)
    making = sum(space.multiplications(kinds) for kinds in made)
    work = making + run.pairs * numbers
    if len(made) * vector_bytes > run.available / 2:  # then they are made again for every tile
        again = 2 * run.tiles(tile) * tile // len(made)
        work += again * making
    # Features are kept for later tiles: of two blocks, or of all models up to half the memory.
    kept = max(2 * tile * vector_bytes, run.available / 2)
    peak = int(min(len(made) * vector_bytes, kept))
    peak += _making_bytes(run, tile * run.terms, space, made)
    return PairwisePlan(
        FEATURES,
        run.pairs,
        tile,
        run.tiles(tile),
        work,
        peak_bytes=peak + run.tile_bytes(tile),
        compilations=compilations,
    )


def _making_bytes(run: Sizes, models: int, space: Space, made: Sequence[Kinds]) -> int:
    """What it takes to make the features of so many distinct models, besides these."""
    combined = models * space.length * space.d_out * run.item if run.terms > 1 else 0
    stacks = 2 * models * run.weights  # in NumPy and on the device
    in_flight = max(space.in_flight(kinds, models) for kinds in made) * run.item
    return combined + stacks + in_flight


def with_seconds(found: PairwisePlan, dtype: str) -> PairwisePlan:
    """The plan with an estimate of its time, from the rate of a matrix product measured now."""
    import jax
    import jax.numpy as jnp

    with execution.precision():
        matrix, product = jnp.ones((_MATMUL, _MATMUL), dtype), jax.jit(lambda x: x @ x)
        product(matrix).block_until_ready()
        start = time.perf_counter()
        product(matrix).block_until_ready()
        rate = _MATMUL**3 / (time.perf_counter() - start)
    return dataclasses.replace(found, seconds=found.multiplications / rate)


def _bases(entries: Sequence[Entry]) -> _Bases:
    """How many distinct models of each sequence of layer kinds the entries are made of."""
    distinct: dict[str, Kinds] = {}
    for entry in entries:
        distinct |= entry.parts
    return Counter(distinct.values())


@dataclass
class _Work:
    """What contracting pairs takes, added up plan by plan."""

    multiplications: int = 0
    written: int = 0
    intermediate_bytes: int = 0
    pieces: set[Piece] = field(default_factory=set)

    def add(self, times: int, plan: Plan) -> None:
        """So many pairs along one plan, a batch of them at a time."""
        self.multiplications += times * plan.multiplications
        self.written += times * plan.written_elements
        self.pieces.update(plan.pieces)
        batch = batched_plans.batch_side(plan, LARGEST_TILE) ** 2
        batch_bytes = batched_plans.intermediate_bytes(plan) * batch
        self.intermediate_bytes = max(self.intermediate_bytes, batch_bytes)


def _contractions(
    several: Sequence[_Bases], examples: Mapping[Kinds, Model], setting: Setting
) -> _Work:
    """The norms of all models, and the inner products of all pairs.

    Args:
        several: Of the rows and, if they are another list, of the columns.
        examples: One model of each sequence of layer kinds.
        setting: What is the same for all pairs.
    """
    work = _Work()
    for bases in several:
        for kinds, times in bases.items():
            work.add(times, batched_plans.pair_plan(examples[kinds], None, setting))
    for bra, ket, times in _pairs_of_kinds(several):
        work.add(times, batched_plans.pair_plan(examples[bra], examples[ket], setting))
    return work


def _pairs_of_kinds(several: Sequence[_Bases]) -> Iterator[tuple[Kinds, Kinds, int]]:
    """How many pairs of models there are of every pair of kinds."""
    rows, columns = list(several[0].items()), list(several[-1].items())
    one_list = len(several) == 1
    for n, (bra, times) in enumerate(rows):
        for m, (ket, others) in enumerate(columns):
            if not one_list or m < n:
                yield bra, ket, times * others
            elif m == n:
                yield bra, ket, times * (times - 1) // 2
