"""Planned contractions for many pairs at once.

In: models, a metric. Out: blocks of inner products.

One plan per pair of shapes runs on stacks of weights, mapped over rows and columns: a contraction
that only reads the row's model runs once per row, one that reads both once per pair, and equal
shapes share one compiled program whatever the number of pairs. Combinations expand by bilinearity
over distinct models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from tnsim.compare.planned import affordable
from tnsim.engine import execution
from tnsim.engine.budget import Budget
from tnsim.engine.devices import mesh, replicated, spread
from tnsim.engine.log_scaled import LogScaled, add, contribution, over_outputs, times
from tnsim.engine.plan import Plan
from tnsim.engine.stacking import Axes
from tnsim.folding.base import Family
from tnsim.folding.choose import choose
from tnsim.metrics.metric import Metric
from tnsim.models.model import Model
from tnsim.models.scaling import split
from tnsim.names import Pair, Side
from tnsim.tensors.kinds import Kinds, kinds

CROSS = (Pair("A", "B"),)
SELF = (Pair("A", "A"),)
_SIDE = 16  # models a side that run together at most


class Terms(NamedTuple):
    """Linear combinations of models: row i is `sum_t coefficients[i, t] * models[index[i, t]]`."""

    index: Int[np.ndarray, "rows terms"]
    coefficients: Float[np.ndarray, "rows terms"]


class Setting(NamedTuple):
    """What is the same for all pairs of a run.

    Args:
        metric: How inputs are weighed.
        per_output: Whether outputs are told apart.
        dtype: Precision of the computation.
        budget: For one inner product and for the memory of a tile.
    """

    metric: Metric
    per_output: bool
    dtype: str
    budget: Budget


class Block(NamedTuple):
    """Distinct models, `2 ** exponents * models`, and the combinations that are compared."""

    models: tuple[Model, ...]
    exponents: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"]
    terms: Terms

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


def pair_plan(a: Model, b: Model | None, setting: Setting) -> Plan:
    """What runs for `<a|b>`, for `<a|a>` where b is None. Raises `TooLarge`, `ModelError`."""
    return _planned(a, b, setting)[1]


def intermediate_bytes(plan: Plan) -> int:
    """Bytes that one pair needs besides the weights."""
    return max(1, plan.array_bytes - plan.input_bytes)


def batch_side(plan: Plan, models: int) -> int:
    """How many models a side run together, dividing `models` evenly.

    As many as keep a device busy: on a CPU their intermediates should stay in its caches
    (measured: 4 x 4 pairs of 1 MiB each take a fifth of the time of single ones, and 16 x 16
    twice as long as these), on others they may be large.
    """
    in_flight = 2**25 if jax.default_backend() == "cpu" else 2**30
    most = max(1, min(_SIDE, math.isqrt(in_flight // intermediate_bytes(plan))))
    even = math.ceil(models / math.ceil(models / most))
    return mesh().size * math.ceil(even / mesh().size)


def norms(block: Block, setting: Setting) -> LogScaled:
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
    known = dict(zip(in_order, _paired(pairs, setting), strict=True))
    parts = []
    for s in range(index.shape[1]):
        for t in range(index.shape[1]):
            values = []
            for first, second in index[:, [s, t]].tolist():
                values.append(known[min(first, second), max(first, second)])
            stacked = LogScaled(*map(np.stack, zip(*values, strict=True)))
            factors = coefficients[:, s] * coefficients[:, t]
            factors = over_outputs(factors, stacked.mantissa)
            parts.append(times(stacked, factors, logs[:, s] + logs[:, t]))
    return add(parts)


def products(rows: Block, columns: Block, setting: Setting, size: int) -> LogScaled:
    """Inner products of every row with every column.

    Args:
        rows: Combinations of models.
        columns: Others. The same object as `rows` is computed below the diagonal and mirrored.
        setting: What is the same for all pairs.
        size: Most models that a block of the run has; blocks of up to so many share programs.

    Returns:
        (rows, columns), or per output (rows, columns, out).
    """
    (first, first_logs), (second, second_logs) = rows.coefficients(), columns.coefficients()
    crossed = _crossed(rows.models, None if columns is rows else columns.models, setting, size)
    parts = []
    for s in range(rows.terms.index.shape[1]):
        for t in range(columns.terms.index.shape[1]):
            at = np.ix_(rows.terms.index[:, s], columns.terms.index[:, t])
            part = LogScaled(*(x[at] for x in crossed))
            factors = over_outputs(first[:, s, None] * second[None, :, t], part.mantissa)
            parts.append(times(part, factors, first_logs[:, None, s] + second_logs[None, :, t]))
    return add(parts)


def _crossed(
    rows: Sequence[Model], columns: Sequence[Model] | None, setting: Setting, size: int
) -> LogScaled:
    """All rows with all columns, or with each other where there are none.

    Models of equal layers run together.
    """
    others = rows if columns is None else columns
    pairs = (len(rows), len(others))
    outputs = (rows[0].d_out,) if setting.per_output else ()
    whole = LogScaled(np.empty(pairs + outputs), np.empty(pairs), np.empty(pairs + outputs))
    row_groups, column_groups = _by_kind(rows), _by_kind(others)
    for n, row_group in enumerate(row_groups):
        met = column_groups[: n + 1] if columns is None else column_groups
        for column_group in met:
            triangle = columns is None and column_group == row_group
            bra = tuple(rows[i] for i in row_group)
            ket = tuple(others[j] for j in column_group)
            for i, j, batch in _batches(bra, ket, setting, size, triangle):
                at, to = row_group[i], column_group[j]
                diagonal = triangle and at == to
                for array, values in zip(whole, batch, strict=True):
                    part = np.asarray(values)[: len(at), : len(to)]
                    array[np.ix_(at, to)] = _mirrored(part) if diagonal else part
                    if columns is None and not diagonal:
                        array[np.ix_(to, at)] = np.swapaxes(part, 0, 1)
    return whole


def _batches(
    bra: Sequence[Model], ket: Sequence[Model], setting: Setting, size: int, triangle: bool
) -> Iterator[tuple[slice, slice, LogScaled]]:
    """All batches of models of equal layers; of a triangle those on and below its diagonal.

    Yields:
        (rows, columns, products).
    """
    family, plan = _planned(bra[0], ket[0], setting)
    together = batch_side(plan, size)

    def stacks(name: Side, models: Sequence[Model]) -> Iterator[tuple[slice, Any]]:
        for i in range(0, len(models), together):
            at = slice(i, i + together)
            yield at, _stack(name, models[at], together, family, setting.dtype)

    with execution.precision():
        rows = [(i, spread(stack)) for i, stack in stacks("A", bra)]
        columns = [(j, replicated(stack)) for j, stack in stacks("B", ket)]
    # What reads the row's model only is not stacked over columns: it runs once a row.
    is_stacked = together > 1
    over_rows, over_columns = (is_stacked, False), (False, is_stacked)
    for (i, row), (j, column) in itertools.product(rows, columns):
        if not triangle or j.start <= i.start:
            both = (row, over_rows), (column, over_columns)
            yield i, j, _run(plan, family, both, CROSS[0], setting, bra[0].d_in)


def _paired(pairs: Sequence[tuple[Model, Model | None]], setting: Setting) -> list[LogScaled]:
    """`<a|b>` of each pair, `<a|a>` where there is no b; pairs of equal layers together."""
    groups: dict[Any, list[int]] = {}
    for n, (a, b) in enumerate(pairs):
        groups.setdefault((kinds(a), b and kinds(b)), []).append(n)
    products: dict[int, LogScaled] = {}
    for members in groups.values():
        a, b = pairs[members[0]]
        family, plan = _planned(a, b, setting)
        together = batch_side(plan, len(members))
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
                    stack = spread(_stack(name, models, together, family, setting.dtype))
                    stacks.append((stack, (together > 1,)))
            values = _run(plan, family, stacks, pair, setting, a.d_in)
            for place, n in enumerate(at):
                products[n] = LogScaled(*(x[place] for x in values))
    return [products[n] for n in range(len(pairs))]


def _run(
    plan: Plan,
    family: Family,
    stacks: Sequence[tuple[dict[str, Any], Axes]],
    pair: Pair,
    setting: Setting,
    d_in: int,
) -> LogScaled:
    """The inner products `pair` of stacks of weights, at every second moment that the plan wants
    and summed up.

    `stacks` has the weights of each model and whether they are stacked over each of the axes that
    the products have.
    """
    parts = []
    runs: list[tuple[float | None, float]] = [(None, 1.0)]
    if family.nodes:
        runs = list(zip(family.nodes.points, family.nodes.weights, strict=True))
    weights = {name: x for stack, _ in stacks for name, x in stack.items()}
    over = {name: axes for stack, axes in stacks for name in stack}
    for t, weight in runs:
        known = family.inputs(plan.shapes, setting.metric, d_in, t)
        leaves = weights | {name: np.asarray(x, setting.dtype) for name, x in known.items()}
        with execution.precision():
            arrays = {name: leaves[name] for name in plan.shapes}
            result = execution.run(plan, arrays, over=over)
        mantissa = np.asarray(result.values[pair.group], np.float64)
        if setting.per_output and family.lifted:
            mantissa = mantissa[..., 1:]  # without the constant
        logs = {key: np.asarray(x, np.float64) for key, x in result.logs.items()}
        log = execution.log_of(result._replace(logs=logs), dict(plan.scales[pair.group]))
        log = np.broadcast_to(log, mantissa.shape[: len(stacks[0][1])])
        parts.append(times(contribution(mantissa, log), weight))
    return add(parts)


def _planned(a: Model, b: Model | None, setting: Setting) -> tuple[Family, Plan]:
    family = choose(a, b, setting.metric)
    wanted = SELF if b is None else CROSS
    plan = affordable(family, wanted, setting.per_output, setting.dtype, setting.budget)
    return family, plan


def _stack(
    name: Side, models: Sequence[Model], count: int, family: Family, dtype: str
) -> dict[str, np.ndarray]:
    """Weights by name with a leading axis of `count` models, the last one repeated where there
    are fewer. One model is not stacked.
    """
    leaves = [family.weights(name, family.prepare(model)) for model in models]
    if count == 1:
        return {role: np.asarray(x, dtype) for role, x in leaves[0].items()}
    leaves += leaves[-1:] * (count - len(leaves))
    stacks = {}
    for leaf in leaves[0]:
        stacks[leaf] = np.stack([weights[leaf] for weights in leaves], dtype=dtype)
    return stacks


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
