"""Byte pairs: text as numbers. In: words as bytes, and how often each occurs. Out: token ids.

Starting from single bytes, the commonest pair of neighbouring tokens becomes a token of its own,
again and again. Words are kept apart, so that no token spans two of them.

    END     between documents
    OTHER   a byte too rare to be a token
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from tnsim.errors import ModelError

END, OTHER = 0, 1
RARE = 1e-5
"""Share of all bytes below which one is no token."""
_BETWEEN = -1  # stands between words, and in no pair
_WORDS = re.compile(rb"\n[ ]*| ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z0-9_]+|\s")


@dataclass(frozen=True)
class Coder:
    """What turns words into token ids.

    Args:
        alphabet: The bytes that are tokens, numbered from 2.
        merges: Pairs of tokens that become one, numbered on from there.

    Example:
        >>> Coder(b"ab", ((2, 3),)).size
        5
    """

    alphabet: bytes
    merges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Tokens, END and OTHER among them."""
        return 2 + len(self.alphabet) + len(self.merges)

    def text(self, token: int) -> bytes:
        """The bytes of a token, none of END, and a question mark for OTHER."""
        if token < 2:
            return (b"", b"?")[token]
        token -= 2
        if token < len(self.alphabet):
            return self.alphabet[token : token + 1]
        first, second = self.merges[token - len(self.alphabet)]
        return self.text(first) + self.text(second)


def words_of(text: bytes) -> list[bytes]:
    """A text cut into words, each with the space before it; nothing is lost.

    Example:
        >>> words_of(b"if x == 10:")
        [b'if', b' x', b' ==', b' 10', b':']
    """
    return _WORDS.findall(text)


def learn(counts: Counter[bytes], size: int) -> Coder:
    """The coder that shortens these words most, pair by pair.

    Args:
        counts: How often each word occurs.
        size: Of the vocabulary.

    Returns:
        A coder of `size` tokens. Of pairs that are equally common the lowest numbers come first, so
        it depends on nothing else.

    Raises:
        ModelError: There are not as many pairs in these words, or more letters than tokens.

    Example:
        >>> coder = learn(Counter({b"abab": 3, b"abc": 1}), 6)
        >>> [coder.text(token) for token in range(2, 6)]
        [b'a', b'b', b'c', b'ab']

    Source:
        Sennrich, Haddow and Birch 2016, "Neural machine translation of rare words with subword
        units".
    """
    words = list(counts)
    alphabet = _alphabet(counts)
    if size < 2 + len(alphabet):
        raise ModelError(
            f"a vocabulary of {size} tokens has no room for the {len(alphabet)} bytes of this text"
        )
    tokens = _letters(alphabet, words)
    often = np.array([counts[word] for word in words])
    weights = np.repeat(often, [len(word) + 1 for word in words])
    merges = []
    for new in range(2 + len(alphabet), size):
        common = np.bincount(_pairs(tokens, size), weights=weights[:-1], minlength=1)
        common[-1] = 0  # what is no pair
        if not common.any():
            raise ModelError(f"the text is too short for {size} tokens: it has {new}")
        pair = divmod(int(common.argmax()), size)
        tokens, kept = _merged(tokens, pair, new)
        weights = weights[kept]
        merges.append(pair)
    return Coder(alphabet, tuple(merges))


def encode(coder: Coder, words: Sequence[bytes]) -> list[Int[np.ndarray, " tokens"]]:
    """Every word as token ids.

    Example:
        >>> coder = Coder(b"ab", ((2, 3),))
        >>> [ids.tolist() for ids in encode(coder, [b"abba", b"ac"])]
        [[4, 3, 2], [2, 1]]
    """
    tokens = _letters(coder.alphabet, words)
    first = 2 + len(coder.alphabet)
    for number, pair in enumerate(coder.merges):
        tokens, _ = _merged(tokens, pair, first + number)
    ends = np.flatnonzero(tokens == _BETWEEN)
    pieces = np.split(tokens, ends + 1)[: len(words)]
    return [piece[:-1] for piece in pieces]


def _alphabet(counts: Counter[bytes]) -> bytes:
    """The bytes that are not rare, in their own order."""
    often = np.zeros(256)
    for word, count in counts.items():
        for byte in word:
            often[byte] += count
    return bytes(np.flatnonzero(often > RARE * often.sum()).tolist())


def _letters(alphabet: bytes, words: Sequence[bytes]) -> Int[np.ndarray, " letters"]:
    """The bytes of all words as tokens, with _BETWEEN after each word."""
    numbers = np.full(256, OTHER)
    numbers[list(alphabet)] = np.arange(2, 2 + len(alphabet))
    tokens = numbers[np.frombuffer(b"".join(words), np.uint8)]
    ends = np.cumsum([len(word) for word in words])
    return np.insert(tokens, ends, _BETWEEN)


def _pairs(tokens: Int[np.ndarray, " letters"], size: int) -> Int[np.ndarray, " pairs"]:
    """Neighbours `(a, b)` as `size * a + b`; `size ** 2` where one is _BETWEEN."""
    first, second = tokens[:-1], tokens[1:]
    within = (first != _BETWEEN) & (second != _BETWEEN)
    return np.where(within, size * first + second, size**2)


def _merged(
    tokens: Int[np.ndarray, " letters"], pair: tuple[int, int], new: int
) -> tuple[Int[np.ndarray, " fewer"], Float[np.ndarray, " fewer"]]:
    """The tokens with every such pair replaced, from the left, and where they come from."""
    found = np.flatnonzero((tokens[:-1] == pair[0]) & (tokens[1:] == pair[1]))
    # in `aaaa` the pair `aa` is found at 0, 1 and 2; of such a run every second is taken
    numbers = np.arange(len(found))
    starts = np.diff(found, prepend=-2) > 1
    in_run = numbers - np.maximum.accumulate(np.where(starts, numbers, 0))
    found = found[in_run % 2 == 0]
    merged = tokens.copy()
    merged[found] = new
    kept = np.delete(np.arange(len(tokens)), found + 1)
    return merged[kept], kept
