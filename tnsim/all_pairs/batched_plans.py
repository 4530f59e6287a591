"""Stacks of models contracted with each other. In: models, a metric. Out: inner products.

A plan of pairs is cut in shares (`engine.passes.hoisting`): what reads one model only is computed
once for each model and stays in its stack, and a pair costs the crossing share.

[merged from gram/batched_plans]
Planned contractions for many pairs at once.

In: models, a metric. Out: blocks of inner products.

One plan per pair of shapes runs on stacks of weights, mapped over rows and columns, and equal
shapes share one compiled program whatever the number of pairs. What reads one model only is
computed once for each model and kept (see `stacks`); where that is not worth a compiled program,
once for each row of a batch. Combinations expand by bilinearity over distinct models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Float, Int

from tnsim.compare.planned import affordable
from tnsim.compare.request import CROSS, SELF
from tnsim.engine.budget import Budget
from tnsim.engine.passes.hoisting import COMPILING, ONE, Share, Shares, shares, uncut
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.devices import mesh, replicated, spread
from tnsim.engine.runtime.execution import Result
from tnsim.engine.runtime.stacking import Axes, aligned
from tnsim.engine.scaled import (
    LogScaled,
    add,
    contribution,
    magnified,
    over_outputs,
    stacked,
    taken,
    times,
)
from tnsim.metrics.protocol import Metric
from tnsim.models.model import Model
from tnsim.models.scaling import split
from tnsim.names import Pair, Side, side_of
from tnsim.problems.base import Family
from tnsim.problems.families import choose
from tnsim.problems.tensors.kinds import Kinds, kinds

WORTH = 2**22
"""Multiplications of a pair below which shares take as long as the whole: calls are most of it."""


SAVING = 1 / 32
"""Part of a pair's work that own shares must save."""


Logs: TypeAlias = "dict[tuple[int, str], Any]"
"""Logarithms of scales by stage of the whole plan and group."""


class PairSetting(NamedTuple):
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
    def of(cls, a: Model, b: Model | None, setting: PairSetting) -> Pairs:
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
    # The norms have most compiled programs of a whole plan, and only what differs is compiled
    # besides.
    compiling = sum(program.length for program in set(crossing.programs).difference(plan.programs))
    worth = saved >= SAVING * plan.multiplications and saved * pairs >= COMPILING * compiling
    # What is kept of a model takes no more memory than one pair that is computed whole.
    fits = crossing.input_bytes - plan.input_bytes <= plan.array_bytes
    return found if fits and worth else uncut(plan)


def stack(
    name: Side, models: Sequence[Model], count: int, pairs: Pairs, setting: PairSetting
) -> Stack:
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
    known = {ONE: np.ones(())} | family.inputs(names, setting.metric, models[0].d_in)
    read = {leaf: spread(array) for leaf, array in arrays.items() if leaf in names}
    over = dict.fromkeys(read, (True,)) if count > 1 else {}
    read |= {leaf: np.asarray(x, dtype) for leaf, x in known.items() if leaf in names}
    with execution.precision():
        result = execution.run(share.plan, read, over=over)
    return Stack(arrays | result.values, _of_whole(result, share))


def contracted(
    pairs: Pairs, stacks: Sequence[tuple[Stack, Axes]], pair: Pair, setting: PairSetting, d_in: int
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


_SIDE = 16  # models a side that run together at most


Keep: TypeAlias = "Callable[[tuple[Hashable, ...], Callable[[], Stack]], Stack]"
"""Gives the stack of a key, kept or made now."""


class Terms(NamedTuple):
    """Linear combinations of models: row i is `sum_t coefficients[i, t] * models[index[i, t]]`."""

    index: Int[np.ndarray, "rows terms"]
    coefficients: Float[np.ndarray, "rows terms"]


class StackBlock(NamedTuple):
    """Distinct models, `2 ** exponents * models`, and the combinations that are compared.

    Args:
        models: Models in scientific notation.
        digests: Digests of the models' content.
        exponents: Powers of two that the models lack, of whole models or of every output.
        terms: The combinations.
        roots: Roots of the factors by which cancellation within the models enlarges rounding, see
            `conditioning`.
    """

    models: tuple[Model, ...]
    digests: tuple[str, ...]
    exponents: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"]
    terms: Terms
    roots: Float[np.ndarray, " models"]

    def coefficients(self) -> tuple[np.ndarray, np.ndarray]:
        """What multiplies the model of a term, as mantissas and logarithms.

        Returns:
            Mantissas (rows, terms). Logarithms (rows, terms), or (rows, terms, out) where
            exponents differ by output.
        """
        mantissas, powers = split(self.terms.coefficients)
        own = self.exponents[self.terms.index]
        powers = own + (powers if own.ndim == 2 else powers[:, :, None])
        return mantissas, powers * np.log(2)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        leaves = jax.tree.leaves(self.models)
        return sum(leaf.nbytes for leaf in leaves if hasattr(leaf, "nbytes"))


def pair_plan(a: Model, b: Model | None, setting: PairSetting) -> Plan:
    """What runs for `<a|b>`, for `<a|a>` where b is None. Raises `TooLarge`, `ModelError`."""
    return Pairs.of(a, b, setting).plan


def intermediate_bytes(plan: Plan) -> int:
    """Bytes that one pair needs besides the weights."""
    return max(1, plan.array_bytes - plan.input_bytes)


def batch_side(plan: Plan, models: int, budget: Budget) -> int:
    """How many models a side run together, dividing `models` evenly.

    As many as keep a device busy: on a CPU their intermediates should stay in its caches
    (measured: 4 x 4 pairs of 1 MiB each take a fifth of the time of single ones, and 16 x 16
    twice as long as these), on others they may be large. Of a budget that is given they take no
    more than it has; what is free at the moment counts for nothing, so that equal runs have equal
    batches.
    """
    in_flight = 2**25 if jax.default_backend() == "cpu" else 2**30
    if budget.memory_bytes is not None:
        in_flight = int(min(in_flight, budget.memory_bytes))
    most = max(1, min(_SIDE, math.isqrt(in_flight // intermediate_bytes(plan))))
    even = math.ceil(models / math.ceil(models / most))
    return mesh().size * math.ceil(even / mesh().size)


def norms(block: StackBlock, setting: PairSetting) -> LogScaled:
    """Squared norms of the combinations of a block, (rows,) or per output (rows, out).

    |sum_s c_s f_s|^2 = sum_st c_s c_t <f_s|f_t>. Every product of two models is computed once.
    """
    index, (coefficients, logs) = block.terms.index, block.coefficients()
    wanted: set[tuple[int, int]] = set()
    for row in index.tolist():
        ascending = sorted(set(row))
        wanted.update(itertools.combinations_with_replacement(ascending, 2))
    in_order = sorted(wanted)
    pairs: list[tuple[Model, Model | None]] = []
    for low, high in in_order:
        pairs.append((block.models[low], None if low == high else block.models[high]))
    known = {}
    for (low, high), product in zip(in_order, _paired(pairs, setting), strict=True):
        known[low, high] = magnified(product, block.roots[low] * block.roots[high])
    parts = []
    for s in range(index.shape[1]):
        for t in range(index.shape[1]):
            values = []
            for first, second in index[:, [s, t]].tolist():
                values.append(known[min(first, second), max(first, second)])
            together = stacked(values)
            factors = coefficients[:, s] * coefficients[:, t]
            factors = over_outputs(factors, together.mantissa)
            parts.append(times(together, factors, logs[:, s] + logs[:, t]))
    return add(parts)


def products(
    rows: StackBlock, columns: StackBlock, setting: PairSetting, size: int, keep: Keep
) -> LogScaled:
    """Inner products of every row with every column.

    Args:
        rows: Combinations of models.
        columns: Others. The same object as `rows` is computed below the diagonal and mirrored.
        setting: What is the same for all pairs.
        size: Most models that a block of the run has; blocks of up to so many share programs.
        keep: Keeps what is computed of models alone.

    Returns:
        (rows, columns), or per output (rows, columns, out).
    """
    (first, first_logs), (second, second_logs) = rows.coefficients(), columns.coefficients()
    crossed = _crossed(rows, None if columns is rows else columns, setting, size, keep)
    parts = []
    for s in range(rows.terms.index.shape[1]):
        for t in range(columns.terms.index.shape[1]):
            terms = np.ix_(rows.terms.index[:, s], columns.terms.index[:, t])
            part = taken(crossed, terms)
            factors = over_outputs(first[:, s, None] * second[None, :, t], part.mantissa)
            parts.append(times(part, factors, first_logs[:, None, s] + second_logs[None, :, t]))
    return add(parts)


def _crossed(
    rows: StackBlock, columns: StackBlock | None, setting: PairSetting, size: int, keep: Keep
) -> LogScaled:
    """All models of the rows with all of the columns, or with each other where there are none.

    Models of equal layers run together.
    """
    others = rows if columns is None else columns
    pairs = (len(rows.models), len(others.models))
    outputs = (rows.models[0].d_out,) if setting.per_output else ()
    whole = LogScaled(np.empty(pairs + outputs), np.empty(pairs), np.empty(pairs + outputs))
    row_groups, column_groups = _by_kind(rows.models), _by_kind(others.models)
    for n, row_group in enumerate(row_groups):
        met = column_groups[: n + 1] if columns is None else column_groups
        for column_group in met:
            triangle = columns is None and column_group == row_group
            bra, ket = _chosen(rows, row_group), _chosen(others, column_group)
            for i, j, batch in _batches(bra, ket, setting, size, triangle, keep):
                at, to = row_group[i], column_group[j]
                diagonal = triangle and at == to
                for array, values in zip(whole, batch, strict=True):
                    part = np.asarray(values)[: len(at), : len(to)]
                    array[np.ix_(at, to)] = _mirrored(part) if diagonal else part
                    if columns is None and not diagonal:
                        array[np.ix_(to, at)] = np.swapaxes(part, 0, 1)
    return magnified(whole, np.outer(rows.roots, others.roots))


class _Models(NamedTuple):
    """Models of equal layers, and what tells them by their content."""

    models: tuple[Model, ...]
    digests: tuple[str, ...]


def _chosen(block: StackBlock, places: Sequence[int]) -> _Models:
    return _Models(
        tuple(block.models[place] for place in places),
        tuple(block.digests[place] for place in places),
    )


def _batches(
    bra: _Models, ket: _Models, setting: PairSetting, size: int, triangle: bool, keep: Keep
) -> Iterator[tuple[slice, slice, LogScaled]]:
    """All batches of models of equal layers; of a triangle those on and below its diagonal.

    Yields:
        (rows, columns, products).
    """
    pairs = Pairs.of(bra.models[0], ket.models[0], setting)
    together = batch_side(pairs.shares.crossing.plan, size, setting.budget)

    def stacks(name: Side, models: _Models) -> Iterator[tuple[slice, Stack]]:
        for i in range(0, len(models.models), together):
            at = slice(i, i + together)
            key = (name, pairs.family, *models.digests[at])
            make = partial(stack, name, models.models[at], together, pairs, setting)
            yield at, keep(key, make) if name in pairs.shares.own else make()

    with execution.precision():
        rows = [(i, _placed(one, spread)) for i, one in stacks("A", bra)]
        columns = [(j, _placed(one, replicated)) for j, one in stacks("B", ket)]
    # What reads the row's model only is not stacked over columns: it runs once a row.
    is_stacked = together > 1
    over_rows, over_columns = (is_stacked, False), (False, is_stacked)
    d_in = bra.models[0].d_in
    for (i, row), (j, column) in itertools.product(rows, columns):
        if not triangle or j.start <= i.start:
            both = (row, over_rows), (column, over_columns)
            yield i, j, contracted(pairs, both, CROSS[0], setting, d_in)


def _placed(found: Stack, place: Callable[[Any], Any]) -> Stack:
    return found._replace(arrays=place(found.arrays))


def _paired(pairs: Sequence[tuple[Model, Model | None]], setting: PairSetting) -> list[LogScaled]:
    """`<a|b>` of each pair, `<a|a>` where there is no b; pairs of equal layers together."""
    groups: dict[Any, list[int]] = {}
    for n, (a, b) in enumerate(pairs):
        groups.setdefault((kinds(a), b and kinds(b)), []).append(n)
    products: dict[int, LogScaled] = {}
    for members in groups.values():
        a, b = pairs[members[0]]
        plan = Pairs.of(a, b, setting).uncut()
        together = batch_side(plan.plan, len(members), setting.budget)
        (pair,) = SELF if b is None else CROSS
        for i in range(0, len(members), together):
            at = members[i : i + together]
            sides: dict[Side, list[Model]] = {"A": [pairs[n][0] for n in at]}
            partners = [pairs[n][1] for n in at]
            if b is not None:
                sides["B"] = [partner for partner in partners if partner is not None]
            stacks = []
            with execution.precision():
                for name, models in sides.items():
                    found = stack(name, models, together, plan, setting)
                    stacks.append((_placed(found, spread), (together > 1,)))
            values = contracted(plan, stacks, pair, setting, a.d_in)
            for place, n in enumerate(at):
                products[n] = taken(values, place)
    return [products[n] for n in range(len(pairs))]


def _by_kind(models: Sequence[Model]) -> list[list[int]]:
    groups: dict[Kinds, list[int]] = {}
    for n, model in enumerate(models):
        groups.setdefault(kinds(model), []).append(n)
    return list(groups.values())


def _mirrored(block: np.ndarray) -> np.ndarray:
    """A square block with what is below its diagonal, in the first two axes, above it as well."""
    below = np.tri(len(block), dtype=bool)
    below = below.reshape(below.shape + (1,) * (block.ndim - 2))
    return np.where(below, block, np.swapaxes(block, 0, 1))
