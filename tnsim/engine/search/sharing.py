"""A program under construction, in which every distinct value is computed once.

A `Builder` numbers values. A contraction is identified by the canonical form of the network that it
stands for, so a sub-network reached twice, in another diagram or in another order, is a single
value. `program_of` makes a program of the values that the outputs need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tnsim.engine.costs import CACHED, WRITING
from tnsim.engine.ir.program import Labels, Operation, Program, postorder
from tnsim.engine.passes import layout
from tnsim.engine.search.canonical import Tensor, canonical

Label = int | str
Forms = dict[tuple, tuple[Hashable, Labels]]
"""Results of `canonical`, by its arguments."""


class Use(NamedTuple):
    """A value with a name for each of its axes."""

    value: int
    labels: tuple[Label, ...]


class WeightedValue(NamedTuple):
    """A summand: a number times a value."""

    weight: float
    use: Use


@dataclass(frozen=True)
class Value:
    """An array of a program.

    Args:
        shape: Sizes of the axes.
        atoms: Network that the value stands for, over values that are not products.
        axes: Labels of the axes in the network.
        operation: Operation that computes the value; None for an input.
        cost: Scalar multiplications of the operation.
    """

    shape: tuple[int, ...]
    atoms: tuple[Tensor, ...]
    axes: Labels
    operation: Operation | None = None
    cost: int = 0


class Builder:
    """The values of a program under construction.

    Args:
        forms: Known canonical forms, which several attempts at a stage share.

    Attributes:
        values: Values by number.
        exchangeable: Number of last axes that may be exchanged, for inputs, sums and loops.

    Example:
        A product is found again with its factors in another order and under other labels.

        >>> builder = Builder()
        >>> a, b = builder.atom((2, 3)), builder.atom((3, 2))
        >>> one = builder.contract([Use(a, ("i", "j")), Use(b, ("j", "k"))], ["i", "k"])
        >>> other = builder.contract([Use(b, ("x", "y")), Use(a, ("z", "x"))], ["y", "z"])
        >>> one.value == other.value
        True
    """

    def __init__(self, forms: Forms | None = None) -> None:
        self.values: list[Value] = []
        self.exchangeable: dict[int, int] = {}
        self._forms: Forms = {} if forms is None else forms
        self._known: dict[Operation, int] = {}
        self._alone: dict[tuple[Labels, int], int | None] = {}
        self._products: dict[Hashable, tuple[int, Labels]] = {}
        self._contracted: dict[tuple, Tensor] = {}

    def atom(
        self,
        shape: tuple[int, ...],
        exchangeable: int = 0,
        operation: Operation | None = None,
        cost: int = 0,
    ) -> int:
        """The number of a new value that is a network of its own: an input, a sum or a loop."""
        number = len(self.values)
        axes = tuple(range(len(shape)))
        self.values.append(Value(shape, ((number, axes),), axes, operation, cost))
        self.exchangeable[number] = exchangeable
        return number

    def contract(self, uses: Iterable[Use], output: Iterable[Label]) -> Use:
        """The product of one or two values, summed over labels that are not in the output.

        Args:
            uses: Factors of the product.
            output: Labels of the product, in any order.

        Returns:
            The product, with the labels `output` in the order in which its axes stand: the order of
            the first request for this product.
        """
        # Labels are numbered by first use, so that requests under other names find the same
        # product.
        uses, output = tuple(uses), tuple(output)
        numbers: dict[Label, int] = {}
        for use in uses:
            for label in use.labels:
                numbers.setdefault(label, len(numbers))
        factors = tuple([(u.value, tuple([numbers[x] for x in u.labels])) for u in uses])
        key = factors, tuple([numbers[label] for label in output])
        if key not in self._contracted:
            self._contracted[key] = self._shared_product(*key)
        value, order = self._contracted[key]
        names = tuple(numbers)
        return Use(value, tuple([names[number] for number in order]))

    def _shared_product(self, factors: tuple[Tensor, ...], output: Labels) -> Tensor:
        """The value of a product and the label of each axis; equal products are a single value."""
        atoms = tuple(self._atoms_of(factors))
        # Networks of other arrays differ. In plans of attention nearly all do, so the canonical
        # form, which takes longer, is found only where a second network of the same arrays comes.
        arrays = tuple(sorted([ref for ref, _ in atoms])), len(output)
        # The first network of these arrays is kept without a canonical form. `_alone` holds its
        # number until a second network comes, and None from then on.
        if arrays not in self._alone:
            number = self._alone[arrays] = self._new_contraction(factors, output, atoms)
            return number, output
        first = self._alone[arrays]
        # The second network of the same arrays: the first one gets its canonical form now, after
        # the fact.
        if first is not None:
            self._alone[arrays] = None
            value = self.values[first]
            key, order = self._canonical_form(value.atoms, value.axes)
            self._products[key] = first, tuple(order.index(x) for x in value.axes)
        key, order = self._canonical_form(atoms, output)
        if key not in self._products:
            # The axes stand as first requested; other requests find them by canonical order.
            number = self._new_contraction(factors, output, atoms)
            self._products[key] = number, tuple(order.index(x) for x in output)
        number, places = self._products[key]
        return number, tuple(order[place] for place in places)

    def _new_contraction(
        self, factors: tuple[Tensor, ...], output: Labels, atoms: tuple[Tensor, ...]
    ) -> int:
        """The number of a new value, the product of one or two values."""
        args, labels = zip(*factors, strict=True)
        operation = Operation("contract", args, labels, output)
        sizes = self.sizes(operation)
        shape = tuple([sizes[label] for label in output])
        # A product of two arrays takes a multiplication for each combination of all labels; a
        # diagonal or a sum of an array takes none.
        cost = math.prod(sizes.values()) if len(factors) == 2 else 0
        self.values.append(Value(shape, atoms, output, operation, cost))
        return len(self.values) - 1

    def _canonical_form(self, atoms: tuple[Tensor, ...], output: Labels) -> tuple[Hashable, Labels]:
        """The canonical form of a network, and its open labels in canonical order."""
        alike = tuple([self.exchangeable[ref] for ref, _ in atoms])
        form = atoms, frozenset(output), alike
        if form not in self._forms:
            self._forms[form] = canonical(atoms, sorted(output), self.exchangeable.__getitem__)
        return self._forms[form]

    def _atoms_of(self, factors: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """The network of a product: the networks of its factors, joined at their axes."""
        # Labels summed within a factor get fresh numbers, so that sums of several factors stay
        # apart.
        used = [label for _, labels in factors for label in labels]
        fresh = itertools.count(1 + max(used, default=-1))
        for number, axes in factors:
            value = self.values[number]
            names = dict(zip(value.axes, axes, strict=True))
            for ref, labels in value.atoms:
                for label in labels:
                    if label not in names:  # a label summed within the factor
                        names[label] = next(fresh)
                yield ref, tuple([names[label] for label in labels])

    def sum(self, items: Iterable[WeightedValue], output: tuple[Label, ...]) -> Use:
        """The sum of weighted values, its axes in the order `output`; equal sums share a value."""
        position = {label: n for n, label in enumerate(output)}
        parts = []
        for weight, use in items:
            parts.append((use.value, tuple(position[x] for x in use.labels), float(weight)))
        # Sorted, so that a sum does not depend on the order of its terms.
        args, labels, weights = zip(*sorted(parts), strict=True)
        axes = tuple(range(len(output)))
        return Use(self.computed(Operation("sum", args, labels, axes, weights)), output)

    def computed(self, operation: Operation, cost: int = 0) -> int:
        """The number of the value of a sum or loop; equal operations are a single value."""
        if operation not in self._known:
            sizes = self.sizes(operation)
            shape = tuple(sizes[label] for label in operation.output)
            self._known[operation] = self.atom(shape, operation=operation, cost=cost)
        return self._known[operation]

    def sizes(self, operation: Operation) -> dict[int, int]:
        """The size of every label of an operation."""
        return operation.sizes({arg: self.values[arg].shape for arg in operation.args})

    def ordered(self, use: Use, output: tuple[Label, ...]) -> Use:
        """The value with its axes in a given order."""
        return use if use.labels == output else self.sum([WeightedValue(1.0, use)], output)


def program_of(builder: Builder, outputs: list[int], inputs: int, **scaling: Any) -> Program:
    """The program that computes some values of a builder, with only the operations they need.

    Args:
        builder: Builder of the values.
        outputs: Numbers of the values that the program gives.
        inputs: Number of first values that are the inputs of the program.
        scaling: Other fields of `Program`.
    """
    # Values of abandoned attempts at a sum or a loop stay in the builder; no output reaches them.
    values = builder.values
    computed = ((n, values[n].operation) for n in reachable(builder, outputs))
    needed = {n: operation for n, operation in computed if operation is not None}
    program = Program.of(needed, range(inputs), outputs, lambda n: values[n].shape, **scaling)
    return layout.laid_out(program)


def price(builder: Builder, outputs: Iterable[int]) -> int:
    """The price of everything that the outputs need, in the measure of `paths.Cost.price`."""
    total = 0
    for number in reachable(builder, outputs):
        value = builder.values[number]
        size = math.prod(value.shape)
        total += value.cost
        # Beyond the cache, an element written and read again takes as long as several
        # multiplications.
        if value.operation and size > CACHED:
            total += WRITING * size
    return total


def reachable(builder: Builder, outputs: Iterable[int]) -> list[int]:
    """The numbers of all values that the outputs need, arguments before results.

    The order is depth first, so that few values are alive at once.
    """

    def arguments(number: int) -> tuple[int, ...]:
        operation = builder.values[number].operation
        return operation.args if operation else ()

    return postorder(outputs, arguments)
