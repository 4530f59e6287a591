"""The route of a run that contracts every pair along its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tnsim.all_pairs import batched_plans
from tnsim.all_pairs.batched_plans import Contracted, Pairs
from tnsim.all_pairs.run_plan import LARGEST_TILE, Bases, RouteOfRun, Sizes
from tnsim.compare.by_plans import Contractions
from tnsim.compare.estimates import Estimate
from tnsim.compare.planned import AROUND, PREPARING
from tnsim.compare.request import CROSS, SELF, Question
from tnsim.engine.budget import Budget
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.plan import Plan
from tnsim.engine.runtime.stacking import StackedAxes
from tnsim.engine.runtime.tiers import seconds_of, tier_in_use
from tnsim.names import SIDES, side_of
from tnsim.problems.tensors.kinds import Kinds

# Multiplications as which a written element counts. Over plans of all families and widths 16 to
# 128, multiplications alone run at 3e9 to 6e10 per second; with writing counted in this way, at no
# less than 1.3e10 per second.
_ELEMENT_WORK = 64
# Pairs of at least _LARGE multiplications run up to _AT_ONCE at a time, as a single pair keeps all
# cores busy only part of the time: on 4 cores, language models of width 256 take 1.46 s per pair
# one by one, 0.90 s two at once and 0.84 s four at once.
_AT_ONCE, _LARGE = 4, 2**28


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

    def estimate(self, limit: float = math.inf) -> Estimate:
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
        # Six stacks: rows and columns, each as read, on the device, and left from the previous
        # tile.
        stacks = 6 * tile * run.terms * (run.weights + own_bytes)
        one_tile = stacks + max(_batch_bytes(plan, setting.budget) for _, plan in plans)
        is_large = tile == 1 and multiplications >= _LARGE * setting.pairs
        together = max(1, min(_AT_ONCE, int(run.available / 4 // one_tile))) if is_large else 1
        seconds = sum(_seconds(times, plan, tile, setting.budget) for times, plan in plans)
        tier = tier_in_use()
        programs = len(set().union(*(plan.programs for _, plan in plans)))
        return self.priced(
            run,
            tile,
            multiplications=multiplications,
            peak_bytes=together * one_tile,
            seconds=PREPARING + AROUND * seconds,
            together=together,
            programs=programs if tier == "compile" else 0,
            tier=tier,
        )

    def check(self, estimate: Estimate, budget: Budget) -> None:
        """See `compare.routes.Weighed`; plans beyond the budget have no estimate."""

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
    batch = batched_plans.batch_side(plan, LARGEST_TILE, budget) ** 2
    return batched_plans.intermediate_bytes(plan) * batch


def _seconds(times: int, plan: Plan, tile: int, budget: Budget) -> float:
    """Seconds of a number of pairs with one plan, in the batches in which they run."""
    side = min(batched_plans.batch_side(plan, tile, budget), max(1, times))
    over: dict[str, StackedAxes] = {}
    for name in plan.shapes if side > 1 else ():
        owner = side_of(name)
        # The first stacked axis belongs to rows, the second to columns.
        if owner is not None:
            over[name] = (owner == SIDES[0], owner == SIDES[1])
    return seconds_of(plan, times, side, over)
