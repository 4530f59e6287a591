"""Planned contractions for many pairs at once.

In: models, a metric. Out: blocks of inner products.

One plan per pair of shapes runs on stacks of weights, mapped over rows and columns, and equal
shapes share one compiled program whatever the number of pairs. What reads one model only is
computed once for each model and kept (see `stacks`); where that is not worth a program, once for
each row of a batch. Combinations expand by bilinearity over distinct models.
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

from tnsim.compare.question import CROSS, SELF
from tnsim.engine import execution
from tnsim.engine.budget import Budget
from tnsim.engine.devices import mesh, replicated, spread
from tnsim.engine.log_scaled import (
    LogScaled,
    add,
    magnified,
    over_outputs,
    stacked,
    taken,
    times,
)
from tnsim.engine.plan import Plan
from tnsim.gram.stacks import Pairs, Setting, Stack, contracted, stack
from tnsim.models.model import Model
from tnsim.models.scaling import split
from tnsim.names import Side
from tnsim.tensors.kinds import Kinds, kinds

_SIDE = 16  # models a side that run together at most

Keep: TypeAlias = "Callable[[tuple[Hashable, ...], Callable[[], Stack]], Stack]"
"""Gives the stack of a key, kept or made now."""


class Terms(NamedTuple):
    """Linear combinations of models: row i is `sum_t coefficients[i, t] * models[index[i, t]]`."""

    index: Int[np.ndarray, "rows terms"]
    coefficients: Float[np.ndarray, "rows terms"]


class Block(NamedTuple):
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


def pair_plan(a: Model, b: Model | None, setting: Setting) -> Plan:
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


def products(rows: Block, columns: Block, setting: Setting, size: int, keep: Keep) -> LogScaled:
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
    rows: Block, columns: Block | None, setting: Setting, size: int, keep: Keep
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


def _chosen(block: Block, places: Sequence[int]) -> _Models:
    return _Models(
        tuple(block.models[place] for place in places),
        tuple(block.digests[place] for place in places),
    )


def _batches(
    bra: _Models, ket: _Models, setting: Setting, size: int, triangle: bool, keep: Keep
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


def _paired(pairs: Sequence[tuple[Model, Model | None]], setting: Setting) -> list[LogScaled]:
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
