"""Sequences whose continuation only induction finds. In: sizes, a seed. Out: `Repeated`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class Repeated(NamedTuple):
    """Sequences that repeat a segment of different tokens.

    Attributes:
        tokens: Their ids.
        periods: The length of the segment of each.
    """

    tokens: Int[np.ndarray, "n context"]
    periods: Int[np.ndarray, " n"]

    @property
    def determined(self) -> Bool[np.ndarray, "n predicted"]:
        """Which tokens, from the second on, an earlier occurrence of their predecessor tells."""
        places = np.arange(1, self.tokens.shape[1])
        return places > self.periods[:, None]


def drawn(
    count: int, vocabulary: int, context: int, shortest: int, longest: int, seed: int
) -> Repeated:
    """Random sequences.

    Args:
        count: How many.
        vocabulary: Tokens to choose from, none twice in a segment.
        context: Tokens of a sequence.
        shortest, longest: tokens of a segment.
        seed: Of the draws.

    Returns:
        The sequences.

    Example:
        >>> repeated = drawn(1, 6, 6, 3, 3, seed=0)
        >>> repeated.tokens.tolist(), repeated.determined.tolist()
        ([[3, 2, 5, 3, 2, 5]], [[False, False, False, True, True]])
    """
    rng = np.random.default_rng(seed)
    segments = rng.permuted(np.tile(np.arange(vocabulary), (count, 1)), axis=1)
    periods = rng.integers(shortest, longest + 1, size=count)
    places = np.arange(context) % periods[:, None]
    return Repeated(np.take_along_axis(segments, places, axis=1), periods)
