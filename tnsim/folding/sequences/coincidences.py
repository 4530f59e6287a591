"""Which positions coincide. In: position variables, masks, n_ctx. Out: patterns, their tuples, as arrays.

Where the inputs at different positions are independent, two legs have a covariance only at one position. The sum
over the positions `s`, `t` (output and key of the bra) and `S`, `T` (of the ket) therefore falls into *patterns*, the
partitions of the variables into classes that coincide: within a pattern it is known which legs can be joined, and a
sum over few tuples of distinct positions is left. If the inputs are moreover alike at all positions, only differences of
positions matter, even under RoPE, and one tuple of each set of translates is enough.

Tuples are packed in one index `g`: AT[g, p] puts a class at a position, COUNT[g, s, ...] says at which outputs a tuple counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_NAME = "{kind} {groups} {masks} {how}"
OUTPUTS = "sS"


class Pattern(NamedTuple):
    """groups: classes of position variables, as in "sS|t|T"; masks: per side "c" causal, "n" none, "-" nothing to mask.

    `relative`: tuples up to translation.
    """

    groups: str
    masks: str
    relative: bool

    def class_of(self, variable: str) -> int:
        return next(n for n, group in enumerate(self.groups.split("|")) if variable in group)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output positions, one of those that coincide."""
        found = [v for v in OUTPUTS if v in self.groups]
        return tuple(
            found[:1] if len(found) == 2 and self.class_of("s") == self.class_of("S") else found
        )

    def name(self, kind: str) -> str:
        """Name of the array AT, followed by a class, or COUNT."""
        return _NAME.format(
            kind=kind,
            groups=self.groups,
            masks=self.masks,
            how="relative" if self.relative else "absolute",
        )


def patterns(variables: str, masks: str, relative: bool, n_ctx: int) -> Iterator[Pattern]:
    """All patterns of some position variables that occur under the masks."""
    for partition in _partitions(variables):
        found = Pattern("|".join(partition), masks, relative)
        if len(tuples(found, n_ctx)):
            yield found


@lru_cache(maxsize=1024)
def tuples(pattern: Pattern, n_ctx: int) -> np.ndarray:
    """Positions of the classes, (tuples, classes): distinct, allowed by the masks; up to translation, the lowest one."""
    classes = pattern.groups.count("|") + 1
    grid = np.stack(np.meshgrid(*[np.arange(n_ctx)] * classes, indexing="ij"), -1).reshape(
        -1, classes
    )
    keep = np.ones(len(grid), bool)
    for i, j in itertools.combinations(range(classes), 2):
        keep &= grid[:, i] != grid[:, j]
    bra, ket = pattern.masks
    ket_output = "S" if "S" in pattern.groups else "s"
    for mask, output, key in ((bra, "s", "t"), (ket, ket_output, "T")):
        if mask == "c":
            keep &= grid[:, pattern.class_of(output)] >= grid[:, pattern.class_of(key)]
    if pattern.relative:
        keep &= grid.min(axis=1) == 0
    return grid[keep]


def position_array(name: str, n_ctx: int) -> np.ndarray | None:
    """The array of a name made by `Pattern.name`; None for any other name."""
    kind, *rest = name.split(" ")
    if kind not in ("AT", "COUNT"):
        return None
    pattern = Pattern(rest[0], rest[1], rest[2] == "relative")
    found = tuples(pattern, n_ctx)
    if kind == "AT":
        return np.eye(n_ctx)[found[:, int(rest[3])]]
    where = found[:, [pattern.class_of(v) for v in pattern.outputs]]
    count = np.zeros((len(found), *(n_ctx,) * where.shape[1]))
    for shift in range(n_ctx - 1 if pattern.relative else 0, -1, -1):
        inside = np.flatnonzero(found.max(axis=1) + shift < n_ctx)
        count[(inside, *(where[inside] + shift).T)] += 1.0
    return count


def _partitions(variables: str) -> Iterator[tuple[str, ...]]:
    """All set partitions of a string of distinct letters."""
    if not variables:
        yield ()
        return
    first, rest = variables[0], variables[1:]
    for smaller in _partitions(rest):
        yield (first, *smaller)
        for n, group in enumerate(smaller):
            yield (*smaller[:n], first + group, *smaller[n + 1 :])
