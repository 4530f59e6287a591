"""Beginnings of token sequences, each of them once. In: sequences in order. Out: states, levels.

Where attention is causal, the state at position s is a function of the first s + 1 tokens: all
sequences that begin alike share it. Of `vocabulary ** n` sequences there are `vocabulary ** s`
beginnings of s tokens, together hardly more states than there are sequences, where sequence by
sequence there are n times as many.

Beginnings are a tree: those of s tokens are its level s, and in order, so that the continuations of
one stand together, equally many for each. A row for each, level after level, is what layers read.
A query of level s sees the keys of its beginnings at levels t <= s, and `reshape` finds them:
level s seen from level t is (beginnings at t, continuations of each).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Float, Int

from tnsim.models.arrays import Array, add, library
from tnsim.models.attention import Attention, rotated
from tnsim.models.layers import Residual
from tnsim.models.protocol import Layer
from tnsim.models.scaling import larger, power


class Prefixes(NamedTuple):
    """Beginnings of token sequences.

    Args:
        tokens: For each level the last token of every beginning, in order.

    Example:
        The beginnings of 00, 01, 10 and 11.

        >>> import numpy as np
        >>> prefixes = Prefixes((np.array([0, 1]), np.array([0, 1, 0, 1])))
        >>> prefixes.counts, prefixes.ids.tolist()
        ((2, 4), [0, 1, 0, 1, 0, 1])
    """

    tokens: tuple[Int[Array, " beginnings"], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many there are at each level."""
        return tuple(level.shape[0] for level in self.tokens)

    @property
    def ids(self) -> Int[Array, " states"]:
        """The tokens of all levels, level after level."""
        return library(self.tokens[0]).concatenate(self.tokens)


def rising(exponents: Float[Array, "states 1"], counts: Sequence[int]) -> Float[Array, "states 1"]:
    """For every beginning the largest exponent among its own and those of its beginnings.

    Example:
        >>> import numpy as np
        >>> rising(np.array([[3.0], [0.0], [1.0], [4.0]]), counts=(2, 2)).ravel().tolist()
        [3.0, 0.0, 3.0, 4.0]
    """
    found: list[Any] = []
    for level in _levels(exponents, counts):
        if found:
            each = len(level) // len(found[-1])
            level = larger(level, found[-1].repeat(each, axis=0))
        found.append(level)
    return library(exponents).concatenate(found)


def over_prefixes(
    layer: Layer,
    state: Float[Array, "states in"],
    exponents: Float[Array, "states 1"],
    counts: Sequence[int],
) -> Float[Array, "states out"]:
    """A layer at every beginning, where states are `state * 2 ** exponents`.

    Args:
        layer: Any; attention is causal.
        state: A row for each beginning, level after level.
        exponents: None is smaller than those of its beginnings, see `rising`.
        counts: Beginnings at each level.

    Returns:
        Outputs; their exponents are `layer.order * exponents`.

    Example:
        >>> import numpy as np, tnsim
        >>> square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> over_prefixes(square, np.array([[2.0], [3.0]]), np.zeros((2, 1)), (1, 1)).tolist()
        [[4.0], [9.0]]
    """
    if isinstance(layer, Residual):
        inner = over_prefixes(layer.layer, state, exponents, counts)
        return layer.skip * state + layer.scale * inner
    if not isinstance(layer, Attention):
        return layer(state)
    return _attention(layer, state, exponents, counts)


def _attention(layer: Attention, state: Any, exponents: Any, counts: Sequence[int]) -> Any:
    """Causal attention.

    With states `2^e h`, what query s adds up over keys t is two of its own and three of theirs,
    `2^(2 e_s + 3 e_t) = 2^(5 e_s) 2^(3 (e_t - e_s))`, and e_t is at most e_s.
    """
    heads = layer.n_heads
    angles = layer.angles(len(counts))

    def by_level(name: str) -> list[Any]:
        """Rows of queries, keys or values of every level, (beginnings, head, row)."""
        rows = add(state @ getattr(layer, name).T, getattr(layer, f"{name}_bias"))
        levels = _levels(rows.reshape(len(rows), heads, -1), counts)
        if angles is None or name == "v":
            return levels
        return [rotated(level, own) for level, own in zip(levels, angles, strict=True)]

    q1, k1, q2, k2, values = map(by_level, ("q1", "k1", "q2", "k2", "v"))
    scales = _levels(exponents, counts)
    outputs = []
    for s, count in enumerate(counts):
        z: Any = 0.0
        for t, beginnings in enumerate(counts[: s + 1]):
            shape = beginnings, count // beginnings
            scores = _scores(q1[s], k1[t], shape) * _scores(q2[s], k2[t], shape)
            lower = scales[t][:, None] - scales[s].reshape(*shape, 1)
            share = power(lower * 0 + 1, 0.0, 3 * lower).astype(state.dtype)
            weights = scores * share / layer.d_head**2
            seen = weights[..., None] * values[t][:, None]
            z = z + seen.reshape(count, heads, -1)
        outputs.append(z)
    z = library(state).concatenate(outputs)
    return add(z.reshape(len(z), -1) @ layer.o.T, layer.o_bias)


def _scores(queries: Any, keys: Any, shape: tuple[int, int]) -> Any:
    """Queries times the keys of their beginnings, (beginnings, continuations, head)."""
    by_beginning = queries.reshape(*shape, *queries.shape[1:])
    return (by_beginning * keys[:, None]).sum(axis=-1)


def _levels(rows: Any, counts: Sequence[int]) -> list[Any]:
    """Rows of all levels, level by level."""
    ends = itertools.accumulate(counts)
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]
