"""Patterns of coinciding positions, and the arrays that describe them.

A product of two attention outputs is summed over the keys `t` and `T`, and holds legs at up to
four positions: `s` and `t` of the bra, `S` and `T` of the ket. Where the states at different
positions are independent, two legs can be joined only if they read the same position. So the sum
is split by which positions coincide, over the partitions of {s, t, S, T}. These are the
*patterns*: "sS|t|T" stands for s = S, with t and T different from it and from each other. Within
a pattern

- it is known which legs can be joined, so that the expansion has few terms, and
- a sum over *different* positions is left, a position for every class of the partition.

If the states are moreover distributed alike at all positions, a tuple of positions and its
translates have equal values: RoPE depends on differences of positions only. Then a single tuple of
each set of translates is evaluated, the tuple with lowest position 0, and it counts as often as it
has translates.

Tuples are packed into an index `g`. Two sorts of arrays, leaves of the problem, describe them:

    AT[g, p]          1 where a class of tuple g stands at position p: reads arrays there
    COUNT[g, s, ...]  number of translates of tuple g with outputs at s, ...: sums up values
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tnsim.names import AT, COUNT, PositionLeaf
from tnsim.problems.sequences.notation import POSITIONS
from tnsim.sessions import session_cache

BRA, KET = {"s", "t"}, {"S", "T"}
OUTPUTS = ("s", "S")
CAUSAL, OPEN, ABSENT = "c", "n", "-"
"""Masks of a layer: keys up to the output's position, all keys, and no keys at all."""


class Pattern(NamedTuple):
    """Position variables by class; different classes are at different positions.

    Args:
        classes: Classes of variables, such as ("sS", "t", "T").
        masks: Masks of the bra and of the ket, each `CAUSAL`, `OPEN` or `ABSENT`.
        relative: Whether tuples count up to translation.
    """

    classes: tuple[str, ...]
    masks: str
    relative: bool

    def class_of(self, variable: str) -> int:
        """Number of the class of a variable."""
        return next(n for n, members in enumerate(self.classes) if variable in members)

    def joins(self, one: str, two: str) -> bool:
        """Whether two variables are at a single position."""
        return self.class_of(one) == self.class_of(two)

    @property
    def variables(self) -> str:
        """All position variables, class by class."""
        return "".join(self.classes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The output positions; the first alone where they coincide."""
        present = tuple(variable for variable in OUTPUTS if variable in self.variables)
        return present[:1] if self.same_output else present

    @property
    def same_output(self) -> bool:
        """Whether two outputs that are told apart are at a single position."""
        return any(set(OUTPUTS) <= set(members) for members in self.classes)

    @property
    def linked(self) -> bool:
        """Whether a position of the bra coincides with a position of the ket."""
        return any(BRA & set(members) and KET & set(members) for members in self.classes)

    def at(self, place: int) -> str:
        """Name of the array AT of a single class."""
        return str(PositionLeaf(AT, *self, place))

    @property
    def count(self) -> str:
        """Name of the array COUNT."""
        return str(PositionLeaf(COUNT, *self))


def patterns(variables: Iterable[str], masks: str, relative: bool, n_ctx: int) -> Iterator[Pattern]:
    """All patterns of some position variables that occur under the masks."""
    for classes in _partitions(_in_order(variables)):
        pattern = Pattern(classes, masks, relative)
        if _tuple_count(pattern, n_ctx):
            yield pattern


@session_cache
def _class_orders(pattern: Pattern) -> Int[np.ndarray, "orders classes"]:
    """Orders of the classes in a sequence that the masks allow, as the rank of every class."""
    ranks = np.array(list(itertools.permutations(range(len(pattern.classes)))))
    # With outputs at one position only, the ket's output is called `s`, like the bra's.
    ket_output = "S" if "S" in pattern.variables else "s"
    keep = np.ones(len(ranks), bool)
    for mask, output, key in zip(pattern.masks, ("s", ket_output), ("t", "T"), strict=True):
        if mask == CAUSAL:
            # t <= s; in one class both have equal ranks.
            keep &= ranks[:, pattern.class_of(output)] >= ranks[:, pattern.class_of(key)]
    return ranks[keep]


def _tuple_count(pattern: Pattern, n_ctx: int) -> int:
    """Number of tuples: every set of positions in every order; relative sets contain 0."""
    classes = len(pattern.classes)
    sets = math.comb(n_ctx, classes)
    if pattern.relative:
        sets = math.comb(n_ctx - 1, classes - 1)
    return len(_class_orders(pattern)) * sets


@session_cache
def tuples(pattern: Pattern, n_ctx: int) -> Int[np.ndarray, "tuples classes"]:
    """All tuples of different positions that the masks allow; relative ones up to translation.

    Example:
        >>> tuples(Pattern(("s", "t"), "c-", relative=True), 3).tolist()
        [[1, 0], [2, 0]]
    """
    lowest = int(pattern.relative)  # relative: the lowest position is 0, the others are chosen
    chosen = len(pattern.classes) - lowest
    # Ascending sets of positions; every allowed order of the classes then permutes the columns.
    sets = itertools.combinations(range(lowest, n_ctx), chosen)
    flat = np.fromiter(itertools.chain.from_iterable(sets), int)
    ascending = flat.reshape(math.comb(n_ctx - lowest, chosen), chosen)
    ascending = np.pad(ascending, ((0, 0), (lowest, 0)))
    return np.concatenate([ascending[:, ranks] for ranks in _class_orders(pattern)])


def position_shape(name: str, n_ctx: int) -> tuple[int, ...] | None:
    """The shape of `position_array` of a name, None for the name of any other leaf."""
    if name not in _leaf_patterns():
        return None
    pattern, place = _leaf_patterns()[name]
    axes = len(pattern.outputs) if place is None else 1
    return (_tuple_count(pattern, n_ctx), *(n_ctx,) * axes)


def position_array(name: str, n_ctx: int) -> Float[np.ndarray, "tuples ..."]:
    """The array AT or COUNT of a name, in float64.

    Args:
        name: Name of a leaf, see `names.PositionLeaf`.
        n_ctx: Number of positions.
    """
    pattern, place = _leaf_patterns()[name]
    if place is None:
        return _tuple_multiplicity(pattern, n_ctx)
    positions = tuples(pattern, n_ctx)[:, place]
    at = np.zeros((len(positions), n_ctx))
    at[np.arange(len(positions)), positions] = 1.0
    return at


def _tuple_multiplicity(pattern: Pattern, n_ctx: int) -> Float[np.ndarray, "tuples ..."]:
    """The multiplicity of every tuple at each position of the outputs.

    A tuple of a relative pattern counts with all its translates.
    """
    positions = tuples(pattern, n_ctx)
    outputs = positions[:, [pattern.class_of(variable) for variable in pattern.outputs]]
    count = np.zeros((len(positions), *(n_ctx,) * len(pattern.outputs)))
    # A tuple counts at every shift for which its last position stays within the sequence.
    shifts = n_ctx if pattern.relative else 1
    for shift in range(shifts):
        inside = np.flatnonzero(positions.max(axis=1) + shift < n_ctx)
        moved = outputs[inside] + shift
        count[(inside, *moved.T)] += 1.0
    return count


@session_cache
def _leaf_patterns() -> dict[str, tuple[Pattern, int | None]]:
    """Pattern of every array by name, with a class for AT and None for COUNT.

    The partitions of four variables and their subsets are few, so names are looked up here and need
    not be parsed.
    """
    leaves: dict[str, tuple[Pattern, int | None]] = {}
    for pattern in _all_patterns():
        leaves[pattern.count] = pattern, None
        for place in range(len(pattern.classes)):
            leaves[pattern.at(place)] = pattern, place
    return leaves


def _all_patterns() -> Iterator[Pattern]:
    """Every possible pattern, for any length of sequences."""
    for size in range(1, len(POSITIONS) + 1):
        for variables in itertools.combinations(_in_order(POSITIONS), size):
            bra, ket = _possible_masks("t", variables), _possible_masks("T", variables)
            masks = ["".join(both) for both in itertools.product(bra, ket)]
            for classes in _partitions(variables):
                for mask, relative in itertools.product(masks, (True, False)):
                    yield Pattern(classes, mask, relative)


def _possible_masks(key: str, variables: tuple[str, ...]) -> tuple[str, ...]:
    """The possible masks of a layer, with or without its key among the variables."""
    return (CAUSAL, OPEN) if key in variables else (ABSENT,)


def _in_order(variables: Iterable[str]) -> tuple[str, ...]:
    """Position variables without repetition, in the order of `POSITIONS`."""
    return tuple(sorted(set(variables), key=POSITIONS.index))


def _partitions(variables: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All partitions of distinct letters into classes."""
    if not variables:
        yield ()
        return
    # The first letter is a class of its own, or joins a class of the other letters.
    first, *rest = variables
    for smaller in _partitions(tuple(rest)):
        yield (first, *smaller)
        for n, members in enumerate(smaller):
            yield (*smaller[:n], first + members, *smaller[n + 1 :])
