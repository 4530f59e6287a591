"""What is to be contracted, as plain data.

In: nothing. Out: types that families fill, plans read.

A `Problem` is the *folded* form of a closed tree tensor network: instead of one tensor per copy it
has one definition per distinct pair of subtrees, each a weighted sum of small networks whose
operands are weight arrays (leaves) or earlier definitions. Copies are thus planned and contracted
once. It knows names, indices and sizes, but neither layers nor metrics nor arrays.

*Scales.* A model of depth L multiplies its arrays exponentially often in L, and no float holds the
product. After every stage each scale group is therefore divided by the size of one of its
definitions, and the logarithm of what was divided off is carried along (see `ScaleGroup`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Operand:
    """An array by name, with the names of its indices.

    Args:
        name: Of a leaf or a definition.
        indices: One for every axis; a repeated index means the diagonal.

    Example:
        >>> Operand("A", ("i", "j")).renamed({"j": "k"})
        Operand(name='A', indices=('i', 'k'))
    """

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


ALIAS_SUFFIX = "'"
"""Appended to a name, another name for the same array.

Two stages that differ only in which arrays coincide are then of one form, and share their plan.
"""


def strip_alias(name: str) -> str:
    """The array's own name, without marks.

    Example:
        >>> strip_alias("A.TABLE'")
        'A.TABLE'
    """
    return name.rstrip(ALIAS_SUFFIX)


@dataclass(frozen=True)
class Term:
    """`weight * prod(operands)`, summed over every index that is not an output.

    Args:
        weight: The factor in front.
        operands: What is multiplied.
        alternatives: Sums of terms that have the product's value, too, without its weight; planning
            keeps the cheapest.
    """

    weight: float
    operands: tuple[Operand, ...]
    alternatives: tuple[tuple[Term, ...], ...] = ()

    @property
    def diagrams(self) -> int:
        """Products in the longest of the sums that it may be written as."""
        sums = [sum(term.diagrams for term in terms) for terms in self.alternatives]
        return max([1, *sums])

    def products(self) -> Iterator[tuple[Operand, ...]]:
        """Its product, and those of all that it may be written as."""
        yield self.operands
        for terms in self.alternatives:
            for term in terms:
                yield from term.products()


@dataclass(frozen=True)
class Definition:
    """`name[indices] = sum(terms)`.

    Args:
        name: What later terms call it.
        indices: Its axes, in order.
        terms: What it is the sum of.
        exchangeable: How many of its indices, the last ones, may be exchanged with each other: 2
            for a symmetric matrix.
        powers: How it scales: with the values of group g multiplied by c, this one becomes
            c**power as large.
        kept: Whether later stages may use it; else it is a step towards other definitions of its
            stage.
        loop_indices: Summed indices over which it may be added up value by value, the first one
            outermost, with everything that leads to it, where memory asks for that.
    """

    name: str
    indices: tuple[str, ...]
    terms: tuple[Term, ...]
    exchangeable: int = 0
    powers: tuple[tuple[str, int], ...] = ()
    kept: bool = True
    loop_indices: tuple[str, ...] = ()


class ScaleGroup(NamedTuple):
    """Values that are divided by one scale, and how its logarithm grows in a stage.

    The logarithm becomes `degree * log + log(scale)`, with

        scale = max |definition| ** (1 / power).

    Args:
        group: Its name.
        degree: How often the stage multiplies values of the group: a layer of order n takes a
            state that is c times as large to one that is c**n times as large.
        definition: What the scale is read off; None where the stage does not rescale the group.
        power: How that definition scales with the group.
    """

    group: str
    degree: int
    definition: str | None = None
    power: int = 1


@dataclass(frozen=True)
class Stage:
    """Definitions that are computed together.

    Args:
        definitions: Each is made of leaves, of earlier stages and of those before it.
        scale_groups: What is rescaled after the stage.
    """

    definitions: tuple[Definition, ...]
    scale_groups: tuple[ScaleGroup, ...] = ()

    @property
    def outputs(self) -> tuple[Definition, ...]:
        """The definitions that later stages may use."""
        return tuple(definition for definition in self.definitions if definition.kept)


class StageBuilder:
    """Lays down the definitions of one stage, in order and each only once.

    Args:
        suffix: Ends every name, so that equal quantities of different stages have different names.
        known: Names that stages before have defined.
        kept: Whether later stages may use what is defined here, unless `define` is told otherwise.

    Example:
        >>> stage = StageBuilder(suffix="@1")
        >>> square = stage.define("S", ("i",), [Term(1.0, (Operand("A", ("i", "i")),))])
        >>> square.name, len(stage.stage().definitions)
        ('S@1', 1)
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
        over: tuple[str, ...] = (),
    ) -> Operand:
        """The operand `name[indices]`, defined as the sum of `terms` unless it is already.

        Args:
            name: Tells quantities apart within a stage.
            indices: Of the array, and of the operand that stands for it.
            terms: What it is the sum of.
            mark: Ends the name where the stage knows the array by a second one (see
                `ALIAS_SUFFIX`).
            kept, over: As in `Definition`.

        Returns:
            The operand to be used in later terms.
        """
        name += self.suffix
        operand = Operand(name + mark, indices)
        if name not in self._known and operand.name not in self._names:
            self._names.add(operand.name)
            kept = self.kept if kept is None else kept
            definition = Definition(
                operand.name, indices, tuple(terms), kept=kept, loop_indices=over
            )
            self.definitions.append(definition)
        return operand

    def stage(self) -> Stage:
        """All that was defined, as a stage that renormalises nothing."""
        return Stage(tuple(self.definitions))


@dataclass(frozen=True)
class Problem:
    """Everything that a plan depends on.

    Args:
        stages: In the order in which they are computed.
        shapes: Of every leaf.
        symmetric: The leaves that are symmetric matrices.
        outputs: The definitions that are asked for.
    """

    stages: tuple[Stage, ...]
    shapes: dict[str, tuple[int, ...]]
    symmetric: frozenset[str]
    outputs: tuple[str, ...]


def prune(problem: Problem) -> Problem:
    """The same problem without definitions and leaves that nothing asked for needs.

    A definition off which a scale is read is needed where all that it is made of is needed. A scale
    group whose definition goes is no longer rescaled; its degree stays, as its logarithm grows all
    the same.

    Example:
        >>> read = Definition("S", (), (Term(1.0, (Operand("A", ("i",)),)),))
        >>> unread = Definition("T", (), (Term(1.0, (Operand("B", ("i",)),)),))
        >>> stages = (Stage((read, unread)),)
        >>> prune(Problem(stages, {"A": (2,), "B": (2,)}, frozenset(), ("S",))).shapes
        {'A': (2,)}
    """
    needed = set(problem.outputs)
    stages: list[Stage] = []
    for stage in reversed(problem.stages):  # whoever reads a definition comes after it
        stages.append(_needed_of(stage, needed))
    shapes = {name: shape for name, shape in problem.shapes.items() if name in needed}
    symmetric = problem.symmetric & set(shapes)
    return Problem(tuple(reversed(stages)), shapes, symmetric, problem.outputs)


def _needed_of(stage: Stage, needed: set[str]) -> Stage:
    """The needed part of a stage; `needed` grows by what that part reads."""
    definitions: list[Definition] = []
    scaled_by = {group.definition for group in stage.scale_groups}
    for definition in stage.definitions:
        if definition.name in scaled_by and needed.issuperset(_names_read(definition)):
            needed.add(definition.name)
    for definition in reversed(stage.definitions):
        if definition.name not in needed:
            continue
        definitions.append(definition)
        for name in _names_read(definition):
            needed |= {name, strip_alias(name)}
    names = {definition.name for definition in definitions}
    groups = []
    for group in stage.scale_groups:
        groups.append(group if group.definition in names else group._replace(definition=None))
    return Stage(tuple(reversed(definitions)), tuple(groups))


def _names_read(definition: Definition) -> Iterator[str]:
    """Names of all arrays in the terms of a definition, other ways of writing them included."""
    for term in definition.terms:
        for product in term.products():
            for operand in product:
                yield operand.name


class Merge:
    """Indices that have become one, as sets of equal ones with a representative each.

    Example:
        >>> merged = Merge()
        >>> merged.unite("i", "j")
        >>> merged.renamed([Operand("A", ("i", "k"))])
        (Operand(name='A', indices=('j', 'k')),)
    """

    def __init__(self) -> None:
        self._next: dict[str, str] = {}

    def find(self, index: str) -> str:
        """The name that an index has become."""
        while index in self._next:
            index = self._next[index]
        return index

    def unite(self, index: str, other: str) -> None:
        """Make two indices one, which keeps the name of `other`."""
        index, other = self.find(index), self.find(other)
        if index != other:
            self._next[index] = other

    def renamed(self, operands: Iterable[Operand]) -> tuple[Operand, ...]:
        """A product of arrays, every index under the name it has become."""
        operands = tuple(operands)
        indices = {index for operand in operands for index in operand.indices}
        return renamed(operands, {index: self.find(index) for index in indices})
