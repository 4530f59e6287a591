"""Attention without softmax, read off the exact maps of queries, keys and values.

A score is a product of a query at one position and a key at another. `Scores` holds arrays of
which every entry is a number times products of a row of queries and a row of keys, so masks,
scales, heads and products of scores are known entry by entry. Where scores multiply values, the
maps of queries, keys and values at every position say which rotation there is, and whether there
is another layer than `Attention`: windows, decays and embeddings of positions are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnsim.checkpoints.affine_values import Library, Value
from tnsim.checkpoints.layer_rules import constant_score
from tnsim.checkpoints.norms import Normed
from tnsim.checkpoints.operations import AXES, Operation
from tnsim.checkpoints.unit_layers import Layout, Stack
from tnsim.checkpoints.unit_rows import unless_zero, written_out
from tnsim.errors import UnsupportedLayer
from tnsim.models.layers import Attention, rotated

KEEP_PLACES = frozenset(
    ["mul", "div", "neg", "where", "masked_fill", "tril", "triu", "to", "clone"]
)
"""Operations on scores that change numbers and leave every entry where it is."""

TABLES = 1e-5  # relative; tables of a rotation are often of float32


@dataclass(frozen=True, eq=False)
class Pairs:
    """Products of queries and keys.

    Args:
        left: Rows (groups, positions, d_head), affine in the state.
        right: Columns (groups, d_head, positions).
        index: For every entry of scores its place in (groups, positions, positions).
    """

    left: Value
    right: Value
    index: np.ndarray


@dataclass(frozen=True, eq=False)
class Scores:
    """An array of numbers times products of pairs.

    Args:
        weight: The numbers, an array.
        pairs: The factors.
    """

    weight: Any
    pairs: tuple[Pairs, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.weight.shape)

    def moved(self, function: Callable[[Any], Any]) -> Scores:
        """The scores in other places, by a function of arrays that orders entries."""
        pairs = (replace(pair, index=function(pair.index)) for pair in self.pairs)
        return Scores(function(self.weight), tuple(pairs))


def scores_of(stack: Stack, left: Value, right: Value) -> Scores | None:
    """The products of all rows of a value with all columns of another; None for other products.

    Args:
        stack: The state on which values depend.
        left: Value (groups, positions, d_head).
        right: Value (groups, d_head, positions).
    """
    n = stack.positions
    if n == 1 or len(left.shape) != 3 or left.shape[1] != n or right.shape[2] != n:
        return None
    rows, columns = (stack.positions_of(one).reshape(one.shape) for one in (left, right))
    here = np.arange(n)
    if not _reads_only(rows, here[None, :, None]) or not _reads_only(columns, here[None, None, :]):
        return None
    shape = left.shape[0], n, n
    weight = stack.library.array(np.ones(shape))
    return Scores(weight, (Pairs(left, right, np.arange(math.prod(shape)).reshape(shape)),))


def _reads_only(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(((found == expected) | (found == -1)).all())


def operated(operation: Operation, values: Mapping[Operation, Any], library: Library) -> Scores:
    """The result of an operation on scores that changes their numbers or their places.

    Args:
        operation: Operation that reads scores and arrays.
        values: Results by operation.
        library: Functions of arrays.

    Raises:
        UnsupportedLayer: The operation does something else.
    """
    (read,) = [one for one in operation.reads if isinstance(values[one], Scores)]
    scores: Scores = values[read]
    name = operation.name
    if (name not in AXES and name not in KEEP_PLACES) or (
        name == "div" and operation.arguments[0] is not read
    ):
        raise UnsupportedLayer(
            f"{operation.place} computes {name} of scores of attention, which no layer does"
        )

    def ran(array: Any) -> Any:
        return operation.run({**values, read: array})

    weight = ran(scores.weight)
    if bool((ran(scores.weight * 0) != 0).any()):
        raise UnsupportedLayer(
            f"{operation.place} computes {name} of scores of attention, and adds numbers to them"
        )
    pairs = []
    for one in scores.pairs:
        if name in KEEP_PLACES:
            index = np.broadcast_to(one.index, tuple(weight.shape))
        else:
            index = library.numbers(ran(library.array(one.index)))
        pairs.append(Pairs(one.left, one.right, index))
    return Scores(weight, tuple(pairs))


def multiplied(one: Scores, two: Scores) -> Scores:
    """The product, entry by entry."""
    weight = one.weight * two.weight
    shape = tuple(weight.shape)
    pairs = [
        Pairs(pair.left, pair.right, np.broadcast_to(pair.index, shape))
        for scores in (one, two)
        for pair in scores.pairs
    ]
    return Scores(weight, tuple(pairs))


def power(scores: Scores, exponent: int, factor: float) -> Scores:
    """A power of scores, entry by entry, times a number."""
    result = scores
    for _ in range(exponent - 1):
        result = multiplied(result, scores)
    return Scores(factor * result.weight, result.pairs)


def attended(stack: Stack, scores: Scores, value: Value, place: str) -> Value:
    """The sum over keys of scores times values.

    Args:
        stack: The state on which both depend.
        scores: Scores (heads, positions, positions).
        value: Values (heads, positions, d_value).
        place: Words for where this stands.

    Returns:
        The sums (heads, positions, d_value), as hidden units of a layer `Attention`.

    Raises:
        UnsupportedLayer: `Attention` has no place for what there is.
    """
    n, library = stack.positions, stack.library
    if scores.shape[:2] == (1, n) and scores.shape[2] > n and scores.shape[2] % n == 0:
        # Keys of all heads in one axis: the sum over keys is one over heads as well.
        heads = scores.shape[2] // n
        split = scores.moved(lambda x: x.reshape(n, heads, n).swapaxes(0, 1))
        by_head = value.mapped(lambda x: x.reshape(heads, n, -1))
        return attended(stack, split, by_head, place).mapped(lambda x: x.sum(0)[None])
    if len(scores.shape) != 3 or len(scores.pairs) > 2:
        raise UnsupportedLayer(
            f"{place} multiplies {len(scores.pairs)} scores of attention; layers have one or two"
        )
    heads, width = scores.shape[0], value.shape[2]
    if not _reads_only(stack.positions_of(value).reshape(value.shape), np.arange(n)[None, :, None]):
        raise UnsupportedLayer(f"{place} attends to values of several positions at once")
    legs: list[Value] = [value]
    queries, keys = [], []
    for pair in scores.pairs:
        group, query, key = np.unravel_index(pair.index, (pair.left.shape[0], n, n))
        if (group != group[:, :1, :1]).any():
            raise UnsupportedLayer(f"{place} attends with scores of several heads in one")
        grid = np.indices((heads, n, n))
        left, right = pair.left, pair.right.mapped(lambda x: x.swapaxes(1, 2))
        if (query == grid[2]).all() and (key == grid[1]).all() and n > 1:
            left, right = right, left
        elif not ((query == grid[1]).all() and (key == grid[2]).all()):
            raise UnsupportedLayer(
                f"{place} attends with scores in another order than the positions"
            )
        chosen = library.array(group[:, 0, 0].astype(np.int64))
        queries.append(left.mapped(lambda x, c=chosen: x[c]))
        keys.append(right.mapped(lambda x, c=chosen: x[c]))
        legs += [queries[-1], keys[-1]]
    sources = {source for leg in legs for source in leg.slopes}
    if len(sources) > 1 or any(
        stack.sources[s].factors or stack.sources[s].layers for s in sources
    ):
        raise UnsupportedLayer(f"{place} attends to what is no linear map of one state")
    (source,) = sources

    def by_position(leg: Value) -> tuple[Any, Any]:
        """Rows of a leg (heads, positions, rows, d), and its constant as a last axis of one."""
        constant = leg.constant.reshape(-1, 1)
        rows = written_out(leg.slopes[source].matrix, library)
        return rows.reshape(*leg.shape, -1), constant.reshape(*leg.shape, 1)

    def numbers_of(leg: tuple[Any, Any]) -> np.ndarray:
        return np.concatenate([library.numbers(one) for one in leg], -1)

    scale, mask = _mask(library.numbers(scores.weight), place, library.rounding)
    rows = [by_position(leg) for leg in (*queries, *keys)]
    d_head = rows[0][0].shape[2]
    if any(one.shape[2] != d_head for one, _ in rows):
        raise UnsupportedLayer(f"{place} multiplies scores of heads of different widths")
    numbers = [numbers_of(one) for one in rows]
    base = None
    if any(not _same_everywhere(one, library.rounding) for one in numbers):
        if len(scores.pairs) == 1:
            raise UnsupportedLayer(
                f"{place} attends by a single score with queries or keys that depend on the "
                "position, such as rotated ones, and linear attention has no rotation"
            )
        base, order, sign = _rotation(numbers, place, library.rounding)
        chosen, signs = library.array(order), library.array(sign)[:, None]
        rows = [(one[:, :, chosen] * signs, c[:, :, chosen] * signs) for one, c in rows]
    values = by_position(value)
    if not _same_everywhere(numbers_of(values), library.rounding):
        raise UnsupportedLayer(f"{place} attends to values that depend on the position itself")

    def flat_rows(leg: tuple[Any, Any]) -> tuple[Any, Any]:
        matrix, bias = (one[:, 0].reshape(-1, one.shape[-1]) for one in leg)
        return matrix, unless_zero(bias[:, 0])

    factors = scale * d_head**2
    weights: dict[str, Any] = {}
    count = len(scores.pairs)
    for role, one in zip(
        [f"{leg}{k + 1}" for leg in "qk" for k in range(count)], rows, strict=True
    ):
        if role == "q1" and count == 2 and (factors != 1).any():
            scales = library.array(factors)[:, None, None, None]
            one = one[0] * scales, one[1] * scales
        weights[role], weights[f"{role}_bias"] = flat_rows(one)
    if count == 1:
        weights |= constant_score((heads * d_head, rows[0][0].shape[-1]), heads, factors)
    weights["v"], weights["v_bias"] = flat_rows(values)

    def layers(down: Any, bias: Any) -> list[Normed]:
        o = np.eye(heads * width) if down is None else down
        return [
            Normed(Attention(**weights, o=o, o_bias=bias, n_heads=heads, mask=mask, rope_base=base))
        ]

    shape = heads, n, width
    head, position, entry = np.indices(shape).reshape(3, -1)
    layout = Layout(head * width + entry, position, heads * width, False)
    return stack.new_block(shape, layout, source, layers=layers)


def _same_everywhere(rows: np.ndarray, rounding: float) -> bool:
    """Whether rows (heads, positions, rows, entries) are the same at all positions."""
    return bool(
        np.abs(rows - rows[:, :1]).max(initial=0.0) <= rounding * np.abs(rows).max(initial=0.0)
    )


def _mask(weight: np.ndarray, place: str, rounding: float) -> tuple[np.ndarray, str]:
    """A number for each head, and the mask, that the numbers of scores are."""
    n = weight.shape[-1]
    scale = weight[:, 0, 0]
    for mask, pattern in (("causal", np.tril(np.ones((n, n)))), ("none", np.ones((n, n)))):
        expected = scale[:, None, None] * pattern
        if np.abs(weight - expected).max(initial=0.0) <= rounding * np.abs(weight).max(initial=0.0):
            return scale, mask
    raise UnsupportedLayer(
        f"{place} masks or weighs the scores of attention otherwise than layers do, which see all "
        "positions or those up to their own: compare it by its outputs, tnsim.Empirical(inputs)"
    )


def _rotation(
    rows: Sequence[np.ndarray], place: str, rounding: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """Base, order and signs of rows for which R_s turns queries and keys as `Attention` does."""
    width, n = rows[0].shape[2], rows[0].shape[1]
    half = width // 2
    for layout in ("half", "interleaved") if width % 2 == 0 else ():
        order = np.arange(width)
        if layout == "interleaved":
            order = np.concatenate([order[::2], order[1::2]])
        ordered = [one[:, :, order] for one in rows]
        size: Any = sum(
            (one[:, 0, :half] ** 2 + one[:, 0, half:] ** 2).sum((0, 2)) for one in ordered
        )
        sine = sum(
            (one[:, 1, half:] * one[:, 0, :half] - one[:, 1, :half] * one[:, 0, half:]).sum((0, 2))
            for one in ordered
        )
        cosine = sum(
            (one[:, 1] * one[:, 0]).reshape(len(one), 2, half, -1).sum((0, 1, 3)) for one in ordered
        )
        if not (size > 0).all():
            continue
        angles = np.arctan2(sine, cosine)
        sign = np.where(np.arange(width) >= half, np.sign(angles[0]) or 1.0, 1.0)
        base = 10_000.0
        if half > 1 and (np.abs(angles[1:]) > 0).all():
            base = float(np.abs(angles[1]) ** (-width / 2))
        turned = [one * sign[:, None] for one in ordered]
        # A base of few digits is the one that was written; of tables in float32 few are right.
        exact = [(digits, 10 * rounding) for digits in range(1, 16)]
        for digits, tolerance in (*exact, (16, TABLES), (5, TABLES)):
            known = float(f"{base:.{digits}g}")
            if _rotation_error(turned, known, n) <= tolerance:
                return known, order, sign
    raise UnsupportedLayer(
        f"{place} attends with queries or keys that depend on the position otherwise than by a "
        "rotation of pairs of coordinates"
    )


def _rotation_error(rows: Sequence[np.ndarray], base: float, n: int) -> float:
    """How far rows are from those at position 0, rotated, relative to their size."""
    half = rows[0].shape[2] // 2
    angles = np.arange(n)[:, None, None] * base ** (-np.arange(half) / half)
    worst = 0.0
    for one in rows:
        turned = np.asarray(rotated(one[:, :1].swapaxes(2, 3), angles)).swapaxes(2, 3)
        worst = max(worst, float(np.abs(one - turned).max() / max(np.abs(one).max(), 1e-300)))
    return worst
