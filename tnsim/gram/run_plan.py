"""What a run over many pairs would cost.

In: entries, a metric. Out: a plan: the route, the tiles, multiplications, memory.

Two routes give the same numbers. *Features* turn each model into a vector, so that a pair is a
dot product; *recursion* contracts every pair along its plan. The one that multiplies less is
taken, where a feature vector beyond the cache is charged for being written, as planning charges
any large intermediate.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tnsim.engine import execution
from tnsim.engine.pathfinding import CACHED, WRITING
from tnsim.engine.plan import PROGRAM_BYTES
from tnsim.folding import feature_space
from tnsim.folding.feature_space import Space
from tnsim.gram import batched_plans as recursion
from tnsim.gram.batched_plans import Setting
from tnsim.gram.sources import Entry
from tnsim.models.model import Model
from tnsim.tensors.kinds import LayerKind

FEATURES, RECURSION = ROUTES = "features", "recursion"
# Work of a tile, so that little is lost with it and little is spent on it: at most one and a half
# seconds on two cores, over layer-wise, whole-tree and attention plans of widths 16 to 128.
# Counted are multiplications, and an element written as so many more: multiplications alone go at
# 3e9 to 6e10 a second, with writing counted so the slowest plan does 1.3e10.
_TILE_WORK = 2**34
_ELEMENT_WORK = 64
_ACCELERATED = 2**5  # times as much work a tile where the arrays are not on a CPU
_LARGEST = 128  # models a side of a tile
_MATMUL = 1024
_COMPILED = {FEATURES: 2**23, RECURSION: 3 * 2**22}  # bytes of a program and of compiling it
_UNKNOWN = 2**33  # bytes, where the platform does not tell what is free


@dataclass(frozen=True)
class PairwisePlan:
    """What a pairwise run takes.

    `tile`: models a side. `multiplications`: scalar ones. `peak_bytes`: bytes alive at once, of
    weights, features and products of one tile. `compilations`: compiled programs. `seconds`: only
    where a rate was measured.

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
    examples: Mapping[tuple[LayerKind, ...], Model],
    setting: Setting,
) -> tuple[PairwisePlan, Space | None]:
    """The plan of the cheaper route, and the space of features whichever it is (None where there
    are none).

    examples: one model of each sequence of layer kinds. Raises `TooLarge` and `ModelError` as a
    single pair would.
    """
    several = [_bases(rows), _bases(columns)] if columns is not None else [_bases(rows)]
    count, others = len(rows), len(rows if columns is None else columns)
    pairs = count * (count + 1) // 2 if columns is None else count * others
    sequences = any(model.n_ctx is not None for model in examples.values())
    space = feature_space.space(list(examples), setting.metric, sequences)
    contracted, written, programs, intermediate = _recursion(several, examples, setting)
    available = memory(setting)
    item = 8 if setting.dtype == "float64" else 4
    weights = max(model.parameters for model in examples.values()) * item
    longest = max(len(entry.parts) for entry in (*rows, *(columns or ())))
    products = 32 * (rows[0].d_out if setting.per_output else 1)

    def tiled(route: str, work: int, one: int, model_bytes: int, compilations: int) -> PairwisePlan:
        """Tiles of about a second, whose models take an eighth of the memory.

        The peak is left open.
        """
        by_work = math.isqrt(max(1, _tile_work() // one))
        by_memory = available / 8 / (longest * model_bytes)
        tile = max(1, int(min(_LARGEST, by_work, by_memory, math.sqrt(available / 8 / products))))
        tile = math.ceil(count / math.ceil(count / min(tile, count)))
        blocks, across = math.ceil(count / tile), math.ceil(others / tile)
        tiles = blocks * (blocks + 1) // 2 if columns is None else blocks * across
        return PairwisePlan(route, pairs, tile, tiles, work, 0, compilations)

    one_pair = max(1, (contracted + _ELEMENT_WORK * written) // pairs)
    by_pair = tiled(RECURSION, contracted, one_pair, 2 * weights, programs)
    # rows and columns: as read, on the device, and still there from the tile before
    stacks = 6 * by_pair.tile * longest * weights
    peak = stacks + intermediate
    peak += by_pair.tile * min(by_pair.tile, others) * products
    by_pair = dataclasses.replace(by_pair, peak_bytes=peak)
    if space is None:
        return by_pair, None
    numbers = space.length * space.d_out
    made = [kinds for bases in several for kinds in bases.elements()]
    vectors = sum(space.multiplications(kinds) for kinds in made)
    model_bytes = weights + 2 * numbers * item
    work = vectors + pairs * numbers
    by_model = tiled(FEATURES, work, numbers, model_bytes, len(examples) + 2)
    blocks = 2 * by_model.tile * numbers * item
    # Features are kept for later tiles: of two blocks, or of all models up to half the memory.
    peak = int(min(len(made) * numbers * item, max(blocks, available / 2)))
    peak += _making_bytes(by_model.tile * longest, space, made, longest, weights, item)
    peak += by_model.tile * min(by_model.tile, others) * products
    by_model = dataclasses.replace(by_model, peak_bytes=peak)
    if len(made) * numbers * item > available / 2:  # then features are made again for every tile
        again = 2 * by_model.tiles * by_model.tile // len(made)
        by_model = dataclasses.replace(
            by_model, multiplications=by_model.multiplications + again * vectors
        )
    charge = WRITING * numbers * len(made) if numbers > CACHED else 0
    if longest > 1 and feature_space.fits(space):
        return by_model, space
    cheaper = by_model.multiplications + charge < by_pair.multiplications
    return (by_model if cheaper else by_pair), space


def _making_bytes(
    models: int,
    space: Space,
    made: list[tuple[LayerKind, ...]],
    longest: int,
    weights: int,
    item: int,
) -> int:
    """What it takes to make the features of a block of distinct models, besides these."""
    combined = models * space.length * space.d_out * item if longest > 1 else 0
    stacks = 2 * models * weights  # in NumPy and on the device
    in_flight = max(space.in_flight(kinds, models) for kinds in made) * item
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


def memory(setting: Setting) -> float:
    """Bytes that a run may use."""
    room = setting.budget.room(0)
    return _UNKNOWN if math.isinf(room) else room


def _bases(entries: Sequence[Entry]) -> Counter[tuple[LayerKind, ...]]:
    """How many distinct models of each sequence of layer kinds the entries are made of."""
    return Counter(dict(part for entry in entries for part in entry.parts).values())


def _tile_work() -> int:
    """By the kind of backend, never measured: equal runs have equal tiles, and so equal bits."""
    import jax

    return _TILE_WORK if jax.default_backend() == "cpu" else _ACCELERATED * _TILE_WORK


def _recursion(
    several: list[Counter], examples: Mapping, setting: Setting
) -> tuple[int, int, int, int]:
    """What contracting every pair takes.

    Returns multiplications, elements written, programs, and bytes of intermediates.
    """
    work, written, pieces, largest = 0, 0, set(), 0

    def count(times: int, a: Model, b: Model | None) -> None:
        nonlocal work, written, largest
        found = recursion.pair_plan(a, b, setting)
        work += times * found.multiplications
        written += times * found.written_elements
        pieces.update(found.pieces)
        largest = max(
            largest, recursion.intermediate_bytes(found) * recursion.side(found, _LARGEST) ** 2
        )

    for bases in several:
        for kinds, times in bases.items():
            count(times, examples[kinds], None)
    rows, columns = list(several[0].items()), list(several[-1].items())
    for n, (kinds, times) in enumerate(rows):
        for m, (others, also) in enumerate(columns):
            if len(several) > 1:
                count(times * also, examples[kinds], examples[others])
            elif m <= n:
                count(
                    times * (times - 1) // 2 if m == n else times * also,
                    examples[kinds],
                    examples[others],
                )
    return work, written, len(pieces), largest
