"""The sums of contractions that the engine compiles, as plain data.

A `Problem` is the *folded* form of a closed tree tensor network: instead of a tensor per copy it
has a definition per distinct pair of subtrees. Each definition is a weighted sum of small networks
whose operands are weight arrays (leaves) or earlier definitions. Copies are thus planned and
contracted once. Families of `tnsim.problems` build problems, and `planner` turns them into plans.
A problem knows names, indices and sizes, but neither layers nor metrics nor arrays.

*Scales.* A model of depth L multiplies its arrays exponentially often in L, and no float holds the
product. After every stage each scale group is therefore divided by a scale, the size of any of its
definitions, and the exponent of the scale is carried along (see `ScaleGroup`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tnsim.errors import ModelError

ALIAS_SUFFIX = "'"
"""Suffix that gives an array a second name.

Two stages that differ only in which arrays coincide then have one form, and share a program.
"""


ITEM_BYTES = {"float64": 8, "float32": 4, "complex128": 16, "complex64": 8}
ALL_DTYPES = tuple(ITEM_BYTES)
DTYPES = ALL_DTYPES[:2]
"""Precisions of models, which are real; networks may be complex."""
_NAMES = {np.dtype(name).type: name for name in ALL_DTYPES}


class Operand(NamedTuple):
    """An array by name, with the names of its indices.

    Args:
        name: Name of a leaf or a definition.
        indices: Name of an index for every axis; a repeated index means the diagonal.

    Example:
        >>> Operand("A", ("i", "j")).renamed({"j": "k"})
        Operand(name='A', indices=('i', 'k'))
    """

    name: str
    indices: tuple[str, ...]

    def renamed(self, new: Mapping[str, str]) -> Operand:
        """The same array under new names of indices; indices that `new` lacks keep their names."""
        return Operand(self.name, tuple([new.get(index, index) for index in self.indices]))


def renamed(operands: Iterable[Operand], new: Mapping[str, str]) -> tuple[Operand, ...]:
    """The operands of a product under new names of indices.

    Example:
        >>> renamed([Operand("A", ("i", "j"))], {"j": "k"})
        (Operand(name='A', indices=('i', 'k')),)
    """
    return tuple([operand.renamed(new) for operand in operands])


def strip_alias(name: str) -> str:
    """The name of an array without suffixes.

    Example:
        >>> strip_alias("A.TABLE'")
        'A.TABLE'
    """
    return name.rstrip(ALIAS_SUFFIX)


class Term(NamedTuple):
    """`weight * prod(operands)`, summed over every index that is not an output.

    Args:
        weight: Factor in front of the product.
        operands: Factors of the product.
        alternatives: Sums of terms, each equal to the product without its weight; planning keeps
            the cheapest of the product and these sums.
    """

    weight: float
    operands: tuple[Operand, ...]
    alternatives: tuple[tuple[Term, ...], ...] = ()

    @property
    def diagrams(self) -> int:
        """Number of products in the longest way to write the term."""
        sums = [sum(term.diagrams for term in terms) for terms in self.alternatives]
        return max([1, *sums])

    def products(self) -> Iterator[tuple[Operand, ...]]:
        """All products of the term: its own, and those of its alternatives."""
        yield self.operands
        for terms in self.alternatives:
            for term in terms:
                yield from term.products()


@dataclass(frozen=True)
class Definition:
    """`name[indices] = sum(terms)`.

    Args:
        name: Name of the array in later terms.
        indices: Names of the axes, in order.
        terms: Summands of the array.
        exchangeable: Number of last axes that may be exchanged with each other: 2 for a symmetric
            matrix.
        powers: Pairs (scale group g, power): where the values of g are multiplied by c, the array
            is multiplied by c**power.
        kept: Whether the array is an output of its stage; else it is an intermediate. `prune` keeps
            what later stages read.
        loop_indices: Summed indices that may become loops, the first index outermost, where memory
            is short. A turn computes the definition, and all that leads to it, at a single value.
    """

    name: str
    indices: tuple[str, ...]
    terms: tuple[Term, ...]
    exchangeable: int = 0
    powers: tuple[tuple[str, int], ...] = ()
    kept: bool = True
    loop_indices: tuple[str, ...] = ()


class ScaleGroup(NamedTuple):
    """Values that are divided by a common scale, and how its exponent grows in a stage.

    The exponent becomes `degree * exponent + log2(scale)`, with the power of two next to

        scale ~ max |definition| ** (1 / power).

    Args:
        group: Name of the group.
        degree: Number of factors of the group in a product of the stage: a layer of order n maps a
            state that is c times as large to a state that is c**n times as large.
        definition: Name of the definition that gives the scale; None where the stage does not
            rescale the group.
        power: Power of the group's scale in that definition.
    """

    group: str
    degree: int
    definition: str | None = None
    power: int = 1


@dataclass(frozen=True)
class Stage:
    """Definitions that are computed together.

    Args:
        definitions: Sums over leaves, outputs of earlier stages and earlier definitions.
        scale_groups: Scale groups that the stage rescales or raises to a power.
    """

    definitions: tuple[Definition, ...]
    scale_groups: tuple[ScaleGroup, ...] = ()

    @property
    def outputs(self) -> tuple[Definition, ...]:
        """The definitions that are no intermediates."""
        return tuple(definition for definition in self.definitions if definition.kept)


class StageBuilder:
    """The definitions of a single stage under construction, in order and each only once.

    Args:
        suffix: End of every name; it tells equal quantities of different stages apart.
        known: Names of the definitions of earlier stages.

    Example:
        >>> stage = StageBuilder(suffix="@1")
        >>> square = stage.define("S", ("i",), [Term(1.0, (Operand("A", ("i", "i")),))])
        >>> square.name, len(stage.stage().definitions)
        ('S@1', 1)
    """

    def __init__(self, suffix: str = "", known: Iterable[str] = ()) -> None:
        self.definitions: list[Definition] = []
        self.suffix = suffix
        self._known = frozenset(known)
        self._names: set[str] = set()

    def define(
        self,
        name: str,
        indices: tuple[str, ...],
        terms: Iterable[Term],
        *,
        alias: str = "",
        loop_indices: tuple[str, ...] = (),
    ) -> Operand:
        """The operand `name[indices]`, newly defined as the sum of `terms` unless it exists.

        Args:
            name: Name of the quantity within the stage, without the suffix.
            indices: Indices of the array and of the returned operand.
            terms: Summands of the array.
            alias: Suffix of a second name for an array of the stage (see `ALIAS_SUFFIX`).
            loop_indices: Indices whose values are computed in turn (see `Definition`).

        Returns:
            The operand for later terms.
        """
        name += self.suffix
        operand = Operand(name + alias, indices)
        # An alias of a definition of an earlier stage is only another name, and needs no definition
        # here.
        if name not in self._known and operand.name not in self._names:
            self._names.add(operand.name)
            definition = Definition(operand.name, indices, tuple(terms), loop_indices=loop_indices)
            self.definitions.append(definition)
        return operand

    def stage(self) -> Stage:
        """The stage of all definitions, without scale groups."""
        return Stage(tuple(self.definitions))


@dataclass(frozen=True)
class Problem:
    """Everything that a plan depends on.

    Args:
        stages: Stages in the order of computation.
        shapes: Shape of every leaf, by name.
        symmetric: Names of the leaves that are symmetric matrices.
        outputs: Names of the definitions that are the results.
    """

    stages: tuple[Stage, ...]
    shapes: dict[str, tuple[int, ...]]
    symmetric: frozenset[str]
    outputs: tuple[str, ...]


def prune(problem: Problem) -> Problem:
    """The problem without the definitions and leaves that no output needs.

    A definition that gives a scale stays where all arrays that it reads are needed anyway. Where it
    goes, the stage no longer rescales its scale group; the degree stays, because the exponent of
    the group grows all the same.

    Example:
        >>> read = Definition("S", (), (Term(1.0, (Operand("A", ("i",)),)),))
        >>> unread = Definition("T", (), (Term(1.0, (Operand("B", ("i",)),)),))
        >>> stages = (Stage((read, unread)),)
        >>> prune(Problem(stages, {"A": (2,), "B": (2,)}, frozenset(), ("S",))).shapes
        {'A': (2,)}
    """
    needed = set(problem.outputs)
    stages: list[Stage] = []
    for stage in reversed(problem.stages):  # the readers of a definition come after it
        stages.append(_needed_of(stage, needed))
    shapes = {name: shape for name, shape in problem.shapes.items() if name in needed}
    symmetric = problem.symmetric & set(shapes)
    return Problem(tuple(reversed(stages)), shapes, symmetric, problem.outputs)


def _needed_of(stage: Stage, needed: set[str]) -> Stage:
    """The needed part of a stage; `needed` becomes what this part and later stages read below."""
    scaled_by = {group.definition for group in stage.scale_groups}
    outputs, inside = needed | scaled_by, set(needed)
    # Backwards, as readers stand behind what they read.
    for definition in reversed(stage.definitions):
        if definition.name in inside:
            inside.update(names_read([definition]))
    # A definition that only gives a scale is kept where it costs no further array, once all that
    # the others read is known.
    for definition in stage.definitions:
        if definition.name in scaled_by and inside.issuperset(names_read([definition])):
            inside.add(definition.name)
    needed_here = [each for each in stage.definitions if each.name in inside]
    definitions = tuple([replace(each, kept=each.name in outputs) for each in needed_here])
    names = {definition.name for definition in definitions}
    # An earlier stage may have intermediates of the same names. An alias needs the array that it is
    # a second name of.
    needed -= names
    needed.update(map(strip_alias, names_read(definitions)))
    groups = []
    for group in stage.scale_groups:
        groups.append(group if group.definition in names else group._replace(definition=None))
    return Stage(definitions, tuple(groups))


def names_read(definitions: Iterable[Definition]) -> tuple[str, ...]:
    """The names that definitions read and do not define, in the order of first use.

    Alternatives of terms are read as well.
    """
    definitions = tuple(definitions)
    names: dict[str, None] = {}
    for definition in definitions:
        for term in definition.terms:
            for product in term.products():
                names |= dict.fromkeys([operand.name for operand in product])
    own = {definition.name for definition in definitions}
    return tuple(name for name in names if name not in own)


class Merge:
    """Sets of united indices, each set with an index that represents it.

    Example:
        >>> merged = Merge()
        >>> merged.unite("i", "j")
        >>> merged.renamed([Operand("A", ("i", "k"))])
        (Operand(name='A', indices=('j', 'k')),)
    """

    def __init__(self) -> None:
        self._next: dict[str, str] = {}

    def find(self, index: str) -> str:
        """The index that represents the set of an index."""
        while index in self._next:
            index = self._next[index]
        return index

    def unite(self, index: str, other: str) -> None:
        """Unite the sets of two indices, under the representative of `other`."""
        index, other = self.find(index), self.find(other)
        if index != other:
            self._next[index] = other

    def renamed(self, operands: Iterable[Operand]) -> tuple[Operand, ...]:
        """The operands of a product, every index replaced by its representative."""
        operands = tuple(operands)
        indices = {index for operand in operands for index in operand.indices}
        return renamed(operands, {index: self.find(index) for index in indices})


def dtype_name(dtype: DTypeLike, allowed: tuple[str, ...] = DTYPES) -> str:
    """The name of a precision that plans run in.

    Args:
        dtype: Any spelling that NumPy accepts: `"float32"`, `np.float32`, `np.dtype("f4")`,
            `jnp.float32`; or `torch.float32`.
        allowed: Names of the precisions that the caller accepts.

    Returns:
        An allowed name.

    Raises:
        ModelError: For a precision that is not allowed, or no precision at all.

    Example:
        >>> import numpy as np
        >>> dtype_name(np.float32)
        'float32'
    """
    try:
        # Types of PyTorch, which is not imported for them, are known by their names.
        is_torch = str(dtype).startswith("torch.")
        known = str(dtype).removeprefix("torch.") if is_torch else dtype
        name = _NAMES.get(np.dtype(known).type)
    except (TypeError, ValueError):
        name = None
    if name not in allowed:
        raise ModelError(f"dtype must be one of {', '.join(allowed)}, found {dtype!r}")
    return name
