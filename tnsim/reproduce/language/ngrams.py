"""How well a model knows the commonest n-grams. In: models, token ids. Out: losses, scores.

    score(n)  =  loss on the last token of n held-out tokens  /  loss on that of common n-grams

It is 1 for a model that knows neither better, and rises while it learns the common ones by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import tnsim
from tnsim.reproduce.language.byte_pairs import END

NONE = 1
"""The phase of a model that knows no n-gram: one token, by its frequency at best."""


def logits(model: tnsim.Model, ids: Int[Array, "n tokens"]) -> Any:
    """What a model predicts after each token of every sequence, of any length.

    Args:
        model: Whose first layer is a table of tokens.
        ids: The sequences.

    Returns:
        Logits of the next token, (n, tokens, words).

    Raises:
        ModelError: The first layer is no table.

    Example:
        >>> table = tnsim.Model([tnsim.Linear(np.eye(2)), tnsim.Linear(np.eye(2))])
        >>> logits(table, np.array([[0, 1]])).tolist()
        [[[1.0, 0.0], [0.0, 1.0]]]
    """
    table, *rest = model.layers
    if not isinstance(table, tnsim.Linear):
        raise tnsim.ModelError(f"the first layer of a language model is linear, found {table}")
    state: Any = table.weight.T[ids]
    for layer in rest:
        state = layer(state)
    return state


def losses(
    model: tnsim.Model, ids: Int[np.ndarray, "n tokens"]
) -> Float[np.ndarray, "n predicted"]:
    """Cross-entropy of every token but the first.

    Args:
        model: A language model.
        ids: Sequences of one length.

    Returns:
        In nats, float64; one less than tokens.
    """
    return np.asarray(_losses(model, ids), np.float64)


def windows(
    tokens: Int[np.ndarray, " tokens"], length: int, count: int, seed: int
) -> Int[np.ndarray, "count length"]:
    """Pieces of a text from random places.

    Example:
        >>> windows(np.arange(100), 3, 2, seed=0).tolist()
        [[83, 84, 85], [62, 63, 64]]
    """
    places = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, count)
    return np.lib.stride_tricks.sliding_window_view(tokens, length)[places]


def common(tokens: Int[np.ndarray, " tokens"], n: int, count: int) -> Int[np.ndarray, "count n"]:
    """The commonest n-grams of a text, within documents; of equally common ones the first.

    Args:
        tokens: The text.
        n: Tokens of each.
        count: How many, or all where there are less.

    Returns:
        The n-grams, commonest first.

    Example:
        >>> common(np.array([0, 5, 6, 5, 6, 7]), 2, 2).tolist()
        [[5, 6], [6, 5]]
    """
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n)
    grams = grams[(grams != END).all(axis=1)]
    base = int(tokens.max()) + 1
    numbers = grams.astype(np.int64) @ base ** np.arange(n)[::-1]
    _, first, often = np.unique(numbers, return_index=True, return_counts=True)
    order = np.argsort(-often, kind="stable")[:count]
    return grams[first[order]]


def scores(
    models: Sequence[tnsim.Model],
    known: Sequence[Int[np.ndarray, "count n"]],
    unseen: Sequence[Int[np.ndarray, "count n"]],
) -> Float[np.ndarray, "models sizes"]:
    """The n-gram score of every model for every n.

    Args:
        models: Language models.
        known: The commonest n-grams of the training text, one array for each n.
        unseen: As many tokens each of held-out text.

    Returns:
        Held-out loss of the last token divided by that of common n-grams.

    Source:
        The paper, appendix on n-gram metrics.
    """
    found = np.empty((len(models), len(known)))
    for row, model in enumerate(models):
        for column, (own, other) in enumerate(zip(known, unseen, strict=True)):
            last = losses(model, np.concatenate([own, other]))[:, -1]
            found[row, column] = last[len(own) :].mean() / last[: len(own)].mean()
    return found


def phases(scores: Float[np.ndarray, "models sizes"], above: float) -> Int[np.ndarray, " models"]:
    """Which n-grams a model knows best, along training.

    Args:
        scores: For n = 2, 3, ...
        above: The score at which something is known.

    Returns:
        For every model the n of its highest score, or the last one's where that is larger; `NONE`
        before any score is above.

    Example:
        >>> phases(np.array([[1.0, 1.0], [1.3, 1.2], [1.2, 1.5]]), 1.1).tolist()
        [1, 2, 3]
    """
    best = scores.argmax(axis=1) + 2
    best[scores.max(axis=1) < above] = NONE
    return np.maximum.accumulate(best)


@jax.jit
def _losses(model: tnsim.Model, ids: Int[Array, "n tokens"]) -> Float[Array, "n predicted"]:
    chances = jax.nn.log_softmax(logits(model, ids[:, :-1]))
    return -jnp.take_along_axis(chances, ids[:, 1:, None], axis=-1)[..., 0]
