"""What is to be contracted, as plain data. In: nothing. Out: the types that metrics fill and plans read.

A `Problem` is the *folded* form of a closed tree tensor network: instead of one tensor per copy it has
one definition per distinct pair of subtrees, each a weighted sum of small networks whose operands are
weight arrays (leaves) or earlier definitions. Copies are thus planned and contracted once. It knows
names, indices and sizes, but neither layers nor metrics nor arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Operand:
    """An array by name, with the names of its indices; a repeated index means the diagonal."""

    name: str
    indices: tuple[str, ...]

    def renamed(self, new: Mapping[str, str]) -> Operand:
        """The same array under new names of indices; those that `new` lacks stay as they are."""
        return Operand(self.name, tuple(new.get(index, index) for index in self.indices))


def renamed(operands: Iterable[Operand], new: Mapping[str, str]) -> tuple[Operand, ...]:
    """A product of arrays under new names of indices.

    Example:
        >>> renamed([Operand("A", ("i", "j"))], {"j": "k"})
        (Operand(name='A', indices=('i', 'k')),)
    """
    return tuple(operand.renamed(new) for operand in operands)


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


class StageBuilder:
    """Lays down the definitions of one stage, in order and each only once.

    Args:
        suffix: Ends every name, so that equal quantities of different stages have different names.
        known: Names that stages before have defined.
        kept: Whether later stages may use what is defined here, unless `define` is told otherwise.
    """

    def __init__(self, suffix: str = "", known: Iterable[str] = (), kept: bool = False) -> None:
        self.definitions: list[Definition] = []
        self.suffix = suffix
        self.kept = kept
        self._known = frozenset(known)
        self._names: set[str] = set()

    def define(
        self,
        name: str,
        indices: tuple[str, ...],
        terms: Iterable[Term],
        *,
        mark: str = "",
        kept: bool | None = None,
        over: str | None = None,
    ) -> Operand:
        """The operand `name[indices]`, defined as the sum of `terms` unless it is already.

        Args:
            name: Tells quantities apart within a stage.
            indices: Of the array, and of the operand that stands for it.
            terms: What it is the sum of.
            mark: Ends the name where the stage knows the array by a second one (see `MARK`).
            kept, over: As in `Definition`.

        Returns:
            The operand to be used in later terms.
        """
        name += self.suffix
        operand = Operand(name + mark, indices)
        if name not in self._known and operand.name not in self._names:
            self._names.add(operand.name)
            kept = self.kept if kept is None else kept
            definition = Definition(operand.name, indices, tuple(terms), kept=kept, over=over)
            self.definitions.append(definition)
        return operand

    def stage(self) -> Stage:
        """All that was defined, as a stage that renormalises nothing."""
        return Stage(tuple(self.definitions))


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

    def renamed(self, operands: Iterable[Operand]) -> tuple[Operand, ...]:
        """A product of arrays, every index under the name it has become."""
        new = tuple(operands)
        return renamed(new, {i: self.find(i) for operand in new for i in operand.indices})
