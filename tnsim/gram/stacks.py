"""Stacks of models contracted with each other. In: models, a metric. Out: inner products.

A plan of pairs is cut in shares (`engine.shares`): what reads one model only is computed once for
each model and stays in its stack, and a pair costs the crossing share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tnsim.compare.planned import affordable
from tnsim.compare.question import CROSS, SELF
from tnsim.engine import execution
from tnsim.engine.budget import Budget
from tnsim.engine.devices import spread
from tnsim.engine.execution import Result
from tnsim.engine.log_scaled import LogScaled, add, contribution, times
from tnsim.engine.ownership import COMPILING, UNIT
from tnsim.engine.plan import Plan
from tnsim.engine.shares import Share, Shares, shares, uncut
from tnsim.engine.stacking import Axes, aligned
from tnsim.folding.base import Family
from tnsim.folding.choose import choose
from tnsim.metrics.metric import Metric
from tnsim.models.model import Model
from tnsim.names import Pair, Side, side_of

WORTH = 2**22
"""Multiplications of a pair below which shares take as long as the whole: calls are most of it."""
SAVING = 1 / 32
"""Part of a pair's work that own shares must save."""

Logs: TypeAlias = "dict[tuple[int, str], Any]"
"""Logarithms of scales by stage of the whole plan and group."""


class Setting(NamedTuple):
    """What is the same for all pairs of a run.

    Args:
        metric: How inputs are weighed.
        per_output: Whether outputs are told apart.
        dtype: Precision of the computation.
        budget: For one inner product and for the memory of a tile.
        pairs: Number of pairs in the run.
        by_states: Whether units of models follow the sizes of their states.
    """

    metric: Metric
    per_output: bool
    dtype: str
    budget: Budget
    pairs: int
    by_states: bool = False


class Pairs(NamedTuple):
    """How models of two kinds are contracted with each other, or those of one with themselves.

    Args:
        family: Lays out their arrays.
        plan: Of one pair.
        shares: What of it is computed once for each model, and the rest.
    """

    family: Family
    plan: Plan
    shares: Shares

    @classmethod
    def of(cls, a: Model, b: Model | None, setting: Setting) -> Pairs:
        """For `<a|b>`, for `<a|a>` where b is None. Raises `TooLarge`, `ModelError`."""
        family = choose(a, b, setting.metric)
        wanted = SELF if b is None else CROSS
        plan = affordable(family, wanted, setting.per_output, setting.dtype, setting.budget)
        return cls(family, plan, uncut(plan) if b is None else _cut(plan, family, setting.pairs))

    def uncut(self) -> Pairs:
        """The same, computed whole for every pair."""
        return self._replace(shares=uncut(self.plan))


class Stack(NamedTuple):
    """What a plan reads of some models.

    Args:
        arrays: By name, with a leading axis of models where there are several.
        logs: Those of own shares, with the same axis.
    """

    arrays: dict[str, Any]
    logs: Logs

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def _cut(plan: Plan, family: Family, pairs: int) -> Shares:
    """A plan of so many pairs in shares, uncut where that would save nothing.

    With a constant in an exact deep metric a plan runs for several moments of the input, on which
    all that is computed depends: those stay whole.
    """
    if family.nodes is not None or plan.multiplications < WORTH:
        return uncut(plan)
    owners: dict[str, str] = {}
    for name in plan.shapes:
        side = side_of(name)
        if side is not None:
            owners[name] = side
    found = shares(plan, owners, pairs)
    crossing = found.crossing.plan
    saved = plan.multiplications - crossing.multiplications
    # The norms have most programs of a whole plan, and only what differs is compiled besides.
    compiling = sum(piece.length for piece in set(crossing.pieces).difference(plan.pieces))
    worth = saved >= SAVING * plan.multiplications and saved * pairs >= COMPILING * compiling
    # What is kept of a model takes no more memory than one pair that is computed whole.
    fits = crossing.input_bytes - plan.input_bytes <= plan.array_bytes
    return found if fits and worth else uncut(plan)


def stack(name: Side, models: Sequence[Model], count: int, pairs: Pairs, setting: Setting) -> Stack:
    """The stack of some models on one side, with what is computed of each alone.

    Args:
        name: The side.
        models: Of equal layers.
        count: Length of the leading axis; the last model is repeated where there are fewer. One
            model is not stacked.
        pairs: How they are contracted with others.
        setting: What is the same for all pairs.
    """
    family, dtype = pairs.family, setting.dtype
    leaves = [family.weights(name, family.prepare(model)) for model in models]
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
    names = share.plan.shapes
    known = {UNIT: np.ones(())} | family.inputs(names, setting.metric, models[0].d_in)
    read = {leaf: spread(array) for leaf, array in arrays.items() if leaf in names}
    over = dict.fromkeys(read, (True,)) if count > 1 else {}
    read |= {leaf: np.asarray(x, dtype) for leaf, x in known.items() if leaf in names}
    with execution.precision():
        result = execution.run(share.plan, read, over=over)
    return Stack(arrays | result.values, _of_whole(result, share))


def contracted(
    pairs: Pairs, stacks: Sequence[tuple[Stack, Axes]], pair: Pair, setting: Setting, d_in: int
) -> LogScaled:
    """Inner products of stacks, at every second moment that the plan wants and summed up.

    Args:
        pairs: How models are contracted.
        stacks: Each model's, and whether it is stacked over each of the axes that products have.
        pair: Which products.
        setting: What is the same for all pairs.
        d_in: Coordinates of the input.
    """
    family, whole, crossing = pairs.family, pairs.plan, pairs.shares.crossing
    parts = []
    runs: list[tuple[float | None, float]] = [(None, 1.0)]
    if family.nodes:
        runs = list(zip(family.nodes.points, family.nodes.weights, strict=True))
    arrays = {name: x for one, _ in stacks for name, x in one.arrays.items()}
    over = {name: axes for one, axes in stacks for name in one.arrays}
    own = {key: aligned(np.asarray(x), axes) for one, axes in stacks for key, x in one.logs.items()}
    names = crossing.plan.shapes
    for t, weight in runs:
        known = family.inputs(names, setting.metric, d_in, t)
        leaves = arrays | {name: np.asarray(x, setting.dtype) for name, x in known.items()}
        with execution.precision():
            read = {name: leaves[name] for name in names}
            result = execution.run(crossing.plan, read, over=over)
        mantissa = np.asarray(result.values[pair.group], np.float64)
        if setting.per_output and family.lifted:
            mantissa = mantissa[..., 1:]  # without the constant
        found = own | _of_whole(result, crossing)
        logs = {key: np.asarray(x, np.float64) for key, x in found.items()}
        result = Result(result.values, logs, whole.log_weights)
        log = execution.log_of(result, dict(whole.scales[pair.group]))
        log = np.broadcast_to(log, mantissa.shape[: len(stacks[0][1])])
        parts.append(times(contribution(mantissa, log), weight))
    return add(parts)


def _of_whole(result: Result, share: Share) -> Logs:
    """The logarithms of a share by the stages of the whole."""
    logs = {}
    for (stage, group), log in result.logs.items():
        logs[share.numbers[stage], group] = log
    return logs
