"""What is to be contracted, as plain data. In: nothing. Out: the types that metrics fill and plans read.

A `Problem` is the *folded* form of a closed tree tensor network: instead of one tensor per copy it has
one definition per distinct pair of subtrees, each a weighted sum of small networks whose operands are
weight arrays (leaves) or earlier definitions. Copies are thus planned and contracted once. It knows
names, indices and sizes, but neither layers nor metrics nor arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Operand:
    """An array by name, with the names of its indices; a repeated index means the diagonal."""

    name: str
    indices: tuple[str, ...]


MARK = "'"
"""Appended to a name, another name for the same array: two stages that differ in which arrays coincide stay of one form."""


def unaliased(name: str) -> str:
    return name.rstrip(MARK)


@dataclass(frozen=True)
class Term:
    """`weight * prod(operands)`, summed over every index that is not an output.

    `otherwise` lists other products with the same value; planning keeps the cheapest.
    """

    weight: float
    operands: tuple[Operand, ...]
    otherwise: tuple[tuple[Operand, ...], ...] = ()


@dataclass(frozen=True)
class Definition:
    """`name[indices] = sum(terms)`; `symmetric` if exchanging its two indices changes nothing.

    `powers` says how it scales: multiply the values of group g by c and this one becomes c**power as large.
    Not `kept`, it is a step towards other definitions of its stage and no later stage may use it. `over`: a summed index over
    which it may be added up value by value, with everything that leads to it, where memory asks for that.
    """

    name: str
    indices: tuple[str, ...]
    terms: tuple[Term, ...]
    symmetric: bool = False
    powers: tuple[tuple[str, int], ...] = ()
    kept: bool = True
    over: str | None = None


class Gauge(NamedTuple):
    """How a scale group is renormalised after a stage, and how its log grows in it.

    The group's logarithm becomes `degree * log + log(scale)` with scale = max|value of definition| ** (1 / power).
    """

    group: str
    degree: int
    definition: str | None = None
    power: int = 1


@dataclass(frozen=True)
class Stage:
    """Definitions that are computed together, from leaves, from the stages before and from each other in order."""

    definitions: tuple[Definition, ...]
    gauges: tuple[Gauge, ...] = ()

    @property
    def outputs(self) -> tuple[Definition, ...]:
        """The definitions that later stages may use."""
        return tuple(d for d in self.definitions if d.kept)


@dataclass(frozen=True)
class Problem:
    """Stages in order, the shape of every leaf, the symmetric leaves, and the definitions that are asked for."""

    stages: tuple[Stage, ...]
    shapes: dict[str, tuple[int, ...]]
    symmetric: frozenset[str]
    outputs: tuple[str, ...]


def prune(problem: Problem) -> Problem:
    """Drop the definitions, gauges and leaves that nothing asked for needs."""
    needed, stages = set(problem.outputs), []
    for stage in reversed(problem.stages):
        kept = []
        for definition in reversed(stage.definitions):
            if definition.name in needed:
                kept.insert(0, definition)
                used = {
                    o.name
                    for t in definition.terms
                    for operands in (t.operands, *t.otherwise)
                    for o in operands
                }
                needed |= used | set(map(unaliased, used))
        names = {d.name for d in kept}
        gauges = tuple(
            g if g.definition in names else g._replace(definition=None) for g in stage.gauges
        )
        stages.append(Stage(tuple(kept), gauges))
    shapes = {name: shape for name, shape in problem.shapes.items() if name in needed}
    return Problem(
        tuple(reversed(stages)), shapes, problem.symmetric & set(shapes), problem.outputs
    )


class Merge:
    """Indices that have become one; the outputs of a term keep their names k and l."""

    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.parent: dict[str, str] = {}

    def find(self, index: str) -> str:
        while index in self.parent:
            index = self.parent[index]
        return index

    def unite(self, index: str, other: str) -> None:
        index, other = self.find(index), self.find(other)
        if index != other:
            self.parent[index] = other
