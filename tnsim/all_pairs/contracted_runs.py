"""The route of a run that contracts every pair along its plan, many pairs at once.

A plan per pair of shapes runs on stacks of weights, mapped over rows and columns, and equal
shapes share a single compiled program whatever the number of pairs.

A plan is cut into shares (`engine.hoisting`). An own share is the part that reads one model
only: it is computed once per model and stays in the model's `Stack`. A pair then costs the crossing
share alone: all pairs of six language models take 9.2 to 9.6 s, whole plans 10.5 to 11.2. Where own
shares do not repay a further compiled program, the plan stays whole, and the part that reads the
row's model only runs once per row of a batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tnsim import scaled
from tnsim.all_pairs.ways import (
    LARGEST_TILE,
    Bases,
    ByPairs,
    Combined,
    IndexPair,
    Job,
    PairBlock,
    PairSetting,
    RouteOfRun,
    Sizes,
)
from tnsim.compare.by_plans import AROUND, PREPARING, Contractions, affordable, mean_in_units
from tnsim.compare.operands import in_units_of_run
from tnsim.compare.request import CROSS, SELF, Estimate, Question
from tnsim.engine.hoisting import COMPILING, ONE, Share, Shares, shares, uncut
from tnsim.engine.ir.problem import ITEM_BYTES
from tnsim.engine.plan import Plan
from tnsim.engine.planner import Budget
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.binding import StackedAxes, aligned
from tnsim.engine.runtime.devices import backend, mesh, replicated, spread
from tnsim.engine.runtime.execution import Result, seconds_of, tier_in_use
from tnsim.models.model import Model, with_dense_matrices
from tnsim.names import SIDES, Pair, Side, side_of
from tnsim.problems.families import Family, choose
from tnsim.problems.layer_kinds import Kinds, kinds
from tnsim.scaled import ScaledSum, add, contribution, taken

WORTH = 2**22
"""Multiplications per pair below which no plan is cut: calls take most of the time of a small pair,
and shares take as long as the whole plan."""
SAVING = 1 / 32
"""Least part of a pair's work that own shares must save for a plan to be cut."""
Exponents: TypeAlias = "dict[tuple[int, str], Any]"
"""Exponents of scales, by stage of the whole plan and by scale group."""
_SIDE = 16  # most models per side that run together


# Multiplications as which a written element counts. Over plans of all families and widths 16 to
# 128, multiplications alone run at 3e9 to 6e10 per second; with writing counted in this way, at no
# less than 1.3e10 per second.
_ELEMENT_WORK = 64
# Pairs of at least _LARGE multiplications run up to _AT_ONCE at a time, as a single pair keeps all
# cores busy only part of the time: on 4 cores, language models of width 256 take 1.46 s per pair
# one by one, 0.90 s two at once and 0.84 s four at once.
_AT_ONCE, _LARGE = 4, 2**28


class Pairs(NamedTuple):
    """How models of two kinds are contracted with each other, or every model with itself.

    Args:
        family: Family that lays out the arrays of the models.
        plan: Plan of a single pair.
        shares: The plan cut into own shares, computed once per model, and the crossing share.
    """

    family: Family
    plan: Plan
    shares: Shares

    @classmethod
    def of(cls, a: Model, b: Model | None, setting: PairSetting) -> Pairs:
        """The contraction of `<a|b>`, or of `<a|a>` where b is None.

        Raises `TooLarge`, `ModelError`.
        """
        family = choose(a, b, setting.units.metric)
        wanted = SELF if b is None else CROSS
        plan = affordable(family, wanted, setting.slices, setting.dtype, setting.budget)
        return cls(family, plan, uncut(plan) if b is None else _cut(plan, family, setting.pairs))

    def uncut(self) -> Pairs:
        """The same contraction with the whole plan run for every pair."""
        return self._replace(shares=uncut(self.plan))


class Stack(NamedTuple):
    """Arrays of some models, as a plan reads them.

    Args:
        arrays: Arrays by name, with a leading axis of models where there are several.
        exponents: Exponents of the scales of own shares, with the same axis.
    """

    arrays: dict[str, Any]
    exponents: Exponents

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def _cut(plan: Plan, family: Family, pairs: int) -> Shares:
    """The shares of a plan that runs for `pairs` pairs, uncut where cutting would save nothing.

    With a constant, the plan of an exact deep metric runs at several second moments of the input
    (`family.nodes`). Every value depends on the moment, so such a plan stays whole.
    """
    if family.nodes is not None or plan.multiplications < WORTH:
        return uncut(plan)
    # Arrays of the input belong to no model and have no side in their names.
    owners: dict[str, str] = {}
    for name in plan.shapes:
        side = side_of(name)
        if side is not None:
            owners[name] = side
    cut = shares(plan, owners, pairs)
    crossing = cut.crossing.plan
    # What every pair saves; the own shares themselves run once a model, which is nothing beside the
    # pairs of a large run.
    saved = plan.multiplications - crossing.multiplications
    # The norms compile most programs of a whole plan, so only the other programs of the crossing
    # share count as additional compiling.
    compiling = sum(program.length for program in set(crossing.programs).difference(plan.programs))
    worth = saved >= SAVING * plan.multiplications and saved * pairs >= COMPILING * compiling
    # The values kept of one model may take no more memory than one pair computed whole.
    fits = crossing.input_bytes - plan.input_bytes <= plan.interpreted_bytes
    return cut if fits and worth else uncut(plan)


def stack(
    name: Side, models: Sequence[Model], count: int, pairs: Pairs, setting: PairSetting
) -> Stack:
    """The stack of some models on a single side, with the values of their own shares.

    Args:
        name: Side on which the models stand.
        models: Models of equal layers.
        count: Length of the leading axis; the last model is repeated where there are fewer. A count
            of 1 gives arrays without this axis.
        pairs: How the models are contracted with others.
        setting: Settings common to all pairs.
    """
    family, dtype = pairs.family, setting.dtype
    leaves = [family.weights(name, family.prepare(model)) for model in models]
    # The last batch of a tile is filled up, so that all batches run one compiled program.
    leaves += leaves[-1:] * (count - len(leaves))
    arrays: dict[str, Any] = {}
    for leaf, first in leaves[0].items():
        if count == 1:
            arrays[leaf] = np.asarray(first, dtype)
        else:
            arrays[leaf] = np.stack([weights[leaf] for weights in leaves], dtype=dtype)
    share = pairs.shares.own.get(name)
    if share is None:
        return Stack(arrays, {})
    # A plan reads what belongs to no model besides: the constant, moments and masks.
    names = share.plan.shapes
    known = {ONE: np.ones(())} | family.inputs(names, setting.units.metric, models[0].d_in)
    read = {leaf: array for leaf, array in arrays.items() if leaf in names}
    read = _placed(Stack(read, {}), spread, setting).arrays
    over = dict.fromkeys(read, (True,)) if count > 1 else {}
    read |= {leaf: np.asarray(x, dtype) for leaf, x in known.items() if leaf in names}
    # The own share runs on the stack of all models at once, and its outputs join the arrays.
    with execution.precision():
        result = execution.run(share.plan, read, setting.tier, over)
    return Stack(arrays | result.values, _of_whole(result, share))


def contracted(
    pairs: Pairs,
    stacks: Sequence[tuple[Stack, StackedAxes]],
    pair: Pair,
    setting: PairSetting,
    d_in: int,
) -> ScaledSum:
    """Inner products of stacks, as weighted sums over the second moments at which the plan runs.

    Args:
        pairs: How models are contracted.
        stacks: Stack of each side, with a flag for each axis of the products: whether the arrays of
            the stack have this axis.
        pair: Bra and ket of the inner products.
        setting: Settings common to all pairs.
        d_in: Number of input coordinates.
    """
    family, whole, crossing = pairs.family, pairs.plan, pairs.shares.crossing
    parts = []
    runs: list[tuple[float | None, float]] = [(None, 1.0)]
    if family.nodes:
        runs = list(zip(family.nodes.points, family.nodes.weights, strict=True))
    # Names say the side, so the stacks of both sides have different names.
    arrays = {name: x for stack_of_model, _ in stacks for name, x in stack_of_model.arrays.items()}
    over = {name: axes for stack_of_model, axes in stacks for name in stack_of_model.arrays}
    own: Exponents = {}
    # Exponents of own shares have the axis of their side only, and get axes of size 1 for the
    # others, so that they add up by broadcasting.
    for stack_of_model, axes in stacks:
        own |= {key: aligned(np.asarray(x), axes) for key, x in stack_of_model.exponents.items()}
    names = crossing.plan.shapes
    for t, weight in runs:
        known = family.inputs(names, setting.units.metric, d_in, t)
        leaves = arrays | {name: np.asarray(x, setting.dtype) for name, x in known.items()}
        with execution.precision():
            read = {name: leaves[name] for name in names}
            result = execution.run(crossing.plan, read, setting.tier, over)
        mantissa = np.asarray(result.values[pair.group], np.float64)
        if setting.slices and family.lifted:
            mantissa = mantissa[..., 1:]  # output 0 of a lifted model is the constant
        total = own | _of_whole(result, crossing)
        exponents = {key: np.asarray(x, np.float64) for key, x in total.items()}
        result = Result(result.values, exponents, whole.scale_weights)
        exponent = execution.exponent_of(result, dict(whole.scales[pair.group]))
        exponent = np.broadcast_to(exponent, mantissa.shape[: len(stacks[0][1])])
        parts.append(scaled.times(contribution(mantissa, exponent), weight))
    return add(parts)


def _of_whole(result: Result, share: Share) -> Exponents:
    """The exponents of a share's scales, numbered by the stages of the whole plan."""
    exponents = {}
    for (stage, group), exponent in result.exponents.items():
        exponents[share.numbers[stage], group] = exponent
    return exponents


def intermediate_bytes(plan: Plan) -> int:
    """Bytes that one pair needs in addition to the weights."""
    return max(1, plan.interpreted_bytes - plan.input_bytes)


def batch_side(plan: Plan, models: int, budget: Budget) -> int:
    """The number of models per side that run together, dividing `models` evenly.

    A batch should keep the device busy. On a CPU the intermediates of a batch should stay in the
    caches (measured: 4 x 4 pairs of 1 MiB each take a fifth of the time of single pairs, and
    16 x 16 twice as long as 4 x 4); on other devices they may be large. Where a memory budget is
    given, they take no more than the budget. The memory free at the moment plays no part, so that
    equal runs have equal batches.
    """
    in_flight = 2**25 if backend() == "cpu" else 2**30
    if budget.memory_bytes is not None:
        in_flight = int(min(in_flight, budget.memory_bytes))
    most = max(1, min(_SIDE, math.isqrt(in_flight // intermediate_bytes(plan))))
    # Evenly filled batches, in numbers that all devices share evenly.
    even = math.ceil(models / math.ceil(models / most))
    return mesh().size * math.ceil(even / mesh().size)


def _batches(
    bra: PairBlock, rows: list[int], ket: PairBlock, columns: list[int], job: Job, triangle: bool
) -> Iterator[tuple[list[int], list[int], ScaledSum]]:
    """Products of all batches of models of equal layers; of a triangle, on and below its diagonal.

    Args:
        bra, ket: Blocks of both sides.
        rows, columns: Places of models of equal layers in the blocks.
        job: Settings that all tasks share.
        triangle: Whether both sides are the same models.

    Yields:
        (rows, columns, products) of a batch.
    """
    setting = job.setting
    first = bra.models[rows[0]]
    pairs = Pairs.of(first, ket.models[columns[0]], setting)
    plan = pairs.shares.crossing.plan
    across, down = (batch_side(plan, size, setting.budget) for size in job.sizes)

    def stacks(
        name: Side, block: PairBlock, places: list[int], together: int, place: Callable[[Any], Any]
    ) -> list[tuple[list[int], Stack]]:
        made = []
        for i in range(0, len(places), together):
            at = places[i : i + together]
            key = (name, pairs.family, together, *(block.digests[n] for n in at))
            make = partial(stack, name, [block.models[n] for n in at], together, pairs, setting)
            # Only stacks with own shares are dear enough to be kept.
            stacked = job.kept(key, make) if name in pairs.shares.own else make()
            made.append((at, _placed(stacked, place, setting)))
        return made

    with execution.precision():
        left = stacks("A", bra, rows, across, spread)
        right = stacks("B", ket, columns, down, replicated)
    # Stacks of rows have no axis of columns, so the part that reads the row's model only runs once
    # per row.
    over_rows, over_columns = (across > 1, False), (False, down > 1)
    for (at, row), (to, column) in itertools.product(left, right):
        if not triangle or to[0] <= at[0]:
            both = (row, over_rows), (column, over_columns)
            yield at, to, contracted(pairs, both, CROSS[0], setting, first.d_in)


def _placed(stacked: Stack, place: Callable[[Any], Any], setting: PairSetting) -> Stack:
    """A stack with its arrays where plans read them: on devices, or as they are in NumPy."""
    return stacked._replace(arrays=place(stacked.arrays)) if setting.tier == "compile" else stacked


def _by_kind(models: Sequence[Model]) -> list[list[int]]:
    groups: dict[Kinds, list[int]] = {}
    for n, model in enumerate(models):
        groups.setdefault(kinds(model), []).append(n)
    return list(groups.values())


def _mirrored(block: np.ndarray) -> np.ndarray:
    """A square block with its lower triangle (of the first two axes) copied to the upper one."""
    below = np.tri(len(block), dtype=bool)
    below = below.reshape(below.shape + (1,) * (block.ndim - 2))
    return np.where(below, block, np.swapaxes(block, 0, 1))


class Contracted(ByPairs):
    """Contractions of models in scientific notation, those of equal layers together."""

    def prepared(self, job: Job, of: Combined, section: None) -> PairBlock:
        """See `Blocks.prepared`."""
        setting = job.setting
        # In units that all models of the run share.
        dense = map(with_dense_matrices, of.models)  # as `by_plans` has them
        made = [in_units_of_run(model, setting.units, setting.slices) for model in dense]
        exponents = np.array([model.exponent for model in made])
        factors = np.array([model.cancels for model in made])
        values = tuple(model.value for model in made)
        return PairBlock(values, of.digests, exponents, of.terms, factors)

    def mean_of(self, job: Job, model: Model) -> ScaledSum | None:
        """See `ByPairs.mean_of`."""
        return mean_in_units(model, job.setting.units.metric, job.setting.budget)

    def paired(
        self, job: Job, models: Sequence[Model], pairs: Sequence[IndexPair]
    ) -> dict[IndexPair, ScaledSum]:
        """See `ByPairs.paired`."""
        groups: dict[Any, list[IndexPair]] = {}
        for low, high in pairs:
            alike = low == high, kinds(models[low]), kinds(models[high])
            groups.setdefault(alike, []).append((low, high))
        products = {}
        for (alone, *_), members in groups.items():
            low, high = members[0]
            plan = Pairs.of(models[low], None if alone else models[high], job.setting).uncut()
            together = batch_side(plan.plan, len(members), job.setting.budget)
            (asked,) = SELF if alone else CROSS
            for i in range(0, len(members), together):
                at = members[i : i + together]
                sides: dict[Side, list[Model]] = {"A": [models[low] for low, _ in at]}
                if not alone:
                    sides["B"] = [models[high] for _, high in at]
                stacks = []
                with execution.precision():
                    for name, some in sides.items():
                        stacked = stack(name, some, together, plan, job.setting)
                        stacks.append((_placed(stacked, spread, job.setting), (together > 1,)))
                values = contracted(plan, stacks, asked, job.setting, models[low].d_in)
                # The last batch was filled up with repeats, whose results nobody reads.
                products |= {pair: taken(values, place) for place, pair in enumerate(at)}
        return products

    def crossed(self, job: Job, rows: PairBlock, columns: PairBlock | None) -> ScaledSum:
        """See `ByPairs.crossed`; blocks up to the sizes of the job share programs."""
        others = rows if columns is None else columns
        pairs = (len(rows.models), len(others.models))
        outputs = (rows.models[0].d_out,) if job.setting.slices else ()
        # Filled group by group; every entry is written, as the groups cover all pairs.
        whole = ScaledSum(np.empty(pairs + outputs), np.empty(pairs), np.empty(pairs + outputs))
        row_groups, column_groups = _by_kind(rows.models), _by_kind(others.models)
        for n, row_group in enumerate(row_groups):
            # Models of one list meet in both orders; groups up to the own one suffice, and the rest
            # is mirrored.
            met = column_groups[: n + 1] if columns is None else column_groups
            for column_group in met:
                triangle = columns is None and column_group == row_group
                groups = rows, row_group, others, column_group
                for at, to, batch in _batches(*groups, job, triangle):
                    # In a batch on the diagonal both orders of a pair were computed, and rounding
                    # may tell them apart: the upper triangle is replaced by the lower one.
                    diagonal = triangle and at == to
                    for array, values in zip(whole, batch, strict=True):
                        part = np.asarray(values)[: len(at), : len(to)]
                        array[np.ix_(at, to)] = _mirrored(part) if diagonal else part
                        if columns is None and not diagonal:
                            array[np.ix_(to, at)] = np.swapaxes(part, 0, 1)
        return whole


class ContractedRun(RouteOfRun):
    """The route of a run that contracts every pair along its plan, see `RouteOfRun`."""

    name = Contractions.name
    way = Contracted()
    of_pair = Contractions

    @property
    def search(self) -> float:
        """See `compare.routes.Weighed`."""
        (bases, examples), setting = (self.models.bases, self.models.examples), self.setting
        plans = [(kinds, kinds, SELF) for side in bases for kinds in side]
        plans += [(bra, ket, CROSS) for bra, ket, _, _ in _pairs_of_kinds(bases)]
        seconds = 0.0
        for bra, ket, wanted in plans:
            pair = examples[bra], examples[ket]
            question = Question(pair, setting.units.metric, wanted, setting.slices, setting.dtype)
            seconds += self.of_pair(question).search
        return seconds

    def estimate(self) -> Estimate:
        """See `compare.routes.Weighed`.

        Raises:
            TooLarge: A single pair is beyond the budget.
        """
        models, setting = self.models, self.setting
        run = Sizes.of(models, setting)
        plans, own_bytes = self._plans()
        multiplications = sum(times * plan.multiplications for times, plan in plans)
        # Written elements count as well, since small contractions wait for memory.
        written = sum(times * plan.written_elements for times, plan in plans)
        one_pair = max(1, (multiplications + _ELEMENT_WORK * written) // setting.pairs)
        tile = run.tile(one_pair, 2 * (run.weights + own_bytes))
        tier = tier_in_use()
        # Models in units, with what they hand on as rows and as columns, are kept for later tiles:
        # those of a tile, and of the others as many as half the memory holds.
        of_tile = 2 * tile * run.terms  # models of a tile
        made = sum(sum(side.values()) for side in models.bases)
        kept = run.weights + 2 * own_bytes
        kept = min(made * kept, of_tile * kept + run.available / 2)
        # A block of models as its files have them and as they are read; and in stacks, or on the
        # device, those of both sides. NumPy reads single models where they are.
        budget = setting.budget
        sides = max(batch_side(plan, tile, budget) for _, plan in plans)
        stacks = of_tile * (run.weights + own_bytes) if sides > 1 or tier == "compile" else 0
        one_tile = (
            of_tile * run.weights + stacks + max(_batch_bytes(plan, budget) for _, plan in plans)
        )
        is_large = tile == 1 and multiplications >= _LARGE * setting.pairs
        together = max(1, min(_AT_ONCE, int(run.available / 4 // one_tile))) if is_large else 1
        seconds = sum(_seconds(times, plan, tile, setting.budget) for times, plan in plans)
        programs = len(set().union(*(plan.programs for _, plan in plans)))
        return self.priced(
            run,
            tile,
            multiplications=multiplications,
            peak_bytes=kept + together * one_tile,
            seconds=PREPARING + AROUND * seconds,
            together=together,
            programs=programs if tier == "compile" else 0,
            tier=tier,
        )

    def within(self, estimate: Estimate, budget: Budget) -> Estimate:
        """See `compare.routes.Weighed`; plans beyond the budget have no estimate."""
        return estimate

    def _plans(self) -> tuple[list[tuple[int, Plan]], int]:
        """Every plan with the number of times that it runs, and bytes kept of a model's share."""
        (bases, examples), setting = (self.models.bases, self.models.examples), self.setting
        # Norms: every model with itself.
        plans = [
            (times, Pairs.of(examples[kinds], None, setting).plan)
            for side in bases
            for kinds, times in side.items()
        ]
        own_bytes = 0
        for bra, ket, sides, times in _pairs_of_kinds(bases):
            shares = Pairs.of(examples[bra], examples[ket], setting).shares
            plans.append((times, shares.crossing.plan))
            for name, share in shares.own.items():
                plans.append((sides[name], share.plan))
                handed = sum(math.prod(shape) for shape in share.plan.output_shapes.values())
                own_bytes = max(own_bytes, handed * ITEM_BYTES[share.plan.dtype])
        return plans, own_bytes


def _pairs_of_kinds(
    several: Sequence[Bases],
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


def _batch_bytes(plan: Plan, budget: Budget) -> int:
    """Bytes of a square of models, which runs at once."""
    batch = batch_side(plan, LARGEST_TILE, budget) ** 2
    return intermediate_bytes(plan) * batch


def _seconds(times: int, plan: Plan, tile: int, budget: Budget) -> float:
    """Seconds of a number of pairs with one plan, in the batches in which they run."""
    side = min(batch_side(plan, tile, budget), max(1, times))
    over: dict[str, StackedAxes] = {}
    for name in plan.shapes if side > 1 else ():
        owner = side_of(name)
        # The first stacked axis belongs to rows, the second to columns.
        if owner is not None:
            over[name] = (owner == SIDES[0], owner == SIDES[1])
    return seconds_of(plan, times, side, over)
