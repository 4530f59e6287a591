"""A program under construction, in which every distinct value is computed once.

A `Builder` numbers values. A contraction is identified by the canonical form of the network that it
stands for, so a sub-network reached twice, in another diagram or in another order, is a single
value. `program_of` makes a program of the values that the outputs need.

*Sums.* Common factors are taken out by the distributive law, greedily: of all factors that several
summands share, the factor that saves most multiplications is taken out, the rests are added up in
the same way, and their sum is multiplied by the factor once: 105 pairings take a third to two
fifths of the multiplications, layers with biases a tenth fewer.

*The order of axes* of every large value is chosen to save copies. NumPy multiplies matrices where
they stand in memory, and copies an argument or a result of any other order of axes. Entry by entry
it reads every order, but slowly where it is not that of the result. Each large value in turn gets
the best of the orders in which its neighbours read or write it without moving entries. Copies of
values that fit in a cache cost next to nothing.

*Canonical forms* are hashable keys for isomorphic networks. Two sub-contractions are the same
array, up to the order of its axes, when their networks are isomorphic: same arrays, joined alike,
the same number of open labels. Isomorphic networks have equal keys, whatever the names of labels,
the order of the tensors, and the order of axes that a tensor may exchange.

The key is found as for graphs. Colour refinement tells labels apart by their occurrences. Where
several labels of a class remain, each member of the first such class is singled out in turn, and
the smallest encoding wins. Members that a symmetry exchanges give the same encoding, so a single
member is tried for all of them; else n parallel bonds would be tried in n! orders. *Twins*, bonds
between exchangeable axes of the same tensors, are recognised by their occurrences; other symmetries
by the equality of two encodings.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tnsim.engine.costs import CACHED, WRITING
from tnsim.engine.ir.matmul_form import matrix_product
from tnsim.engine.ir.program import Labels, Operation, Program, postorder

Tensor = tuple[int, Labels]
"""A reference to an array, and a label for each of its axes."""

Colours = dict[int, int]
"""A number for every label; labels of one colour have not been told apart."""


LARGE = CACHED
"""Elements beyond which the order of a value's axes is chosen."""
SWEEPS = 4
"""Most sweeps over all large values; the best order of a value depends on its neighbours."""

Label = int | str
Forms = dict[tuple, tuple[Hashable, Labels]]
"""Results of `canonical`, by its arguments."""


class _Tensor(NamedTuple):
    """A tensor with the labels of its fixed axes and of its exchangeable axes.

    Args:
        ref: Reference to the array.
        fixed: Labels of the axes that stay in place, the first axes.
        exchangeable: Labels of the axes that may be exchanged, the last axes.
    """

    ref: int
    fixed: Labels
    exchangeable: Labels

    def seen(self, colours: Colours) -> tuple[Labels, Labels]:
        """The colours of the labels, sorted where axes may be exchanged."""
        fixed = tuple([colours[label] for label in self.fixed])
        return fixed, tuple(sorted([colours[label] for label in self.exchangeable]))


def canonical(
    tensors: Sequence[Tensor], open_labels: Sequence[int], exchangeable: Callable[[int], int]
) -> tuple[Hashable, Labels]:
    """The canonical form of a network.

    Args:
        tensors: Reference and labels of each tensor.
        open_labels: Labels that are not summed over.
        exchangeable: Function from a reference to the number of its last axes that may be
            exchanged.

    Returns:
        The key, and the open labels in canonical order.

    Example:
        A symmetric matrix times a vector has a single key, whichever axis is summed:

        >>> key, order = canonical([(7, (0, 1)), (8, (1,))], [0], lambda ref: 2)
        >>> other, _ = canonical([(8, (5,)), (7, (5, 3))], [3], lambda ref: 2)
        >>> key == other, order
        (True, (0,))
    """
    network = []
    for ref, labels in tensors:
        fixed = len(labels) - exchangeable(ref)
        network.append(_Tensor(ref, labels[:fixed], labels[fixed:]))
    is_open = set(open_labels)
    # The first colours tell open labels from summed ones, which no isomorphism exchanges.
    colours = {label: int(label in is_open) for _, labels in tensors for label in labels}
    encoding, ranks = _smallest_encoding(network, colours)
    order = tuple(sorted(is_open, key=ranks.__getitem__))
    # Ranks of the open labels belong to the key: the same tensors with other labels open are
    # another array.
    return (encoding, tuple(ranks[label] for label in order)), order


def _smallest_encoding(network: list[_Tensor], colours: Colours) -> tuple[tuple, Colours]:
    """The smallest encoding of the network, and the ranks of the labels in that encoding.

    An encoding lists the tensors with ranks in the place of labels, so networks of equal encodings
    are isomorphic.
    """
    colours = _refined_colours(network, colours)
    candidates = _candidate_labels(network, colours)
    if not candidates:
        return _encoding_of(network, colours), colours
    # The first candidate is followed to the end. Every other candidate is compared with it by one
    # quick encoding, and followed only where no symmetry maps the two to each other.
    first, *others = candidates
    start = _singled_out(colours, first)
    smallest = _smallest_encoding(network, start)
    some_encoding = _some_encoding(network, start)
    for label in others:
        start = _singled_out(colours, label)
        if _some_encoding(network, start) == some_encoding:
            continue  # a symmetry maps the first candidate to this label: the encoding is known
        smallest = min(smallest, _smallest_encoding(network, start), key=lambda attempt: attempt[0])
    return smallest


def _some_encoding(network: list[_Tensor], colours: Colours) -> tuple:
    """The encoding found by singling out the first candidate again and again."""
    colours = _refined_colours(network, colours)
    while candidates := _candidate_labels(network, colours):
        colours = _refined_colours(network, _singled_out(colours, candidates[0]))
    return _encoding_of(network, colours)


def _candidate_labels(network: list[_Tensor], colours: Colours) -> list[int]:
    """The labels of the first class with several members, a single label per set of twins.

    The list is empty where all labels are told apart.
    """
    members: dict[int, list[int]] = {}
    for label, colour in colours.items():
        members.setdefault(colour, []).append(label)
    undecided = [colour for colour, labels in members.items() if len(labels) > 1]
    if not undecided:
        return []
    # Twins occur at the same places, so any of them gives the same encoding; the dictionary keeps
    # one label for each set.
    twins = {_occurrences(network, label): label for label in members[min(undecided)]}
    return list(twins.values())


def _singled_out(colours: Colours, label: int) -> Colours:
    """The colours with a label put just before the rest of its class."""
    # Doubling leaves room between neighbouring colours: the label goes to the odd number below its
    # class, and all classes keep their order.
    doubled = {x: 2 * colour for x, colour in colours.items()}
    doubled[label] -= 1
    return doubled


def _encoding_of(network: list[_Tensor], colours: Colours) -> tuple:
    """The sorted list of tensors with colours in the place of labels."""
    return tuple(sorted([(t.ref, *t.seen(colours)) for t in network]))


def _occurrences(network: list[_Tensor], label: int) -> tuple[tuple[int, int], ...]:
    """The occurrences of a label as pairs (tensor, axis), with axis -1 for exchangeable axes."""
    occurrences: list[tuple[int, int]] = []
    for number, tensor in enumerate(network):
        occurrences += [(number, axis) for axis, own in enumerate(tensor.fixed) if own == label]
        occurrences += [(number, -1) for own in tensor.exchangeable if own == label]
    return tuple(occurrences)


def _refined_colours(network: list[_Tensor], colours: Colours) -> Colours:
    """The colours after splitting classes by the occurrences of labels until no class splits.

    Ranks of sorted signatures are the new colours. A signature begins with the old colour, so
    classes split but never change their order.
    """
    count = len(set(colours.values()))
    while count < len(colours):
        # A signature is the old colour with all places where the label occurs, each with the
        # colours of the tensor's other labels.
        places: dict[int, list[tuple]] = {label: [] for label in colours}
        for tensor in network:
            seen = tensor.seen(colours)
            for position, label in enumerate(tensor.fixed):
                places[label].append((tensor.ref, position, seen))
            for label in tensor.exchangeable:
                places[label].append((tensor.ref, -1, seen))
        signatures = {label: (colours[label], *sorted(where)) for label, where in places.items()}
        ranks = {signature: n for n, signature in enumerate(sorted(set(signatures.values())))}
        colours = {label: ranks[signature] for label, signature in signatures.items()}
        # No class has split in this round, and so none will in the next.
        if len(ranks) == count:
            break
        count = len(ranks)
    return colours


def laid_out(program: Program) -> Program:
    """The program with large values in orders of axes that save copies.

    Inputs, outputs, and arguments and results of loops keep the order of their axes.

    Args:
        program: Program of any length.

    Returns:
        A program of the same operations and numbers of values.

    Example:
        The middle axis of the first product is summed in the second product, which reads it without
        a copy where it is the last axis:

        >>> outer = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 1, 2))
        >>> later = Operation("contract", (3, 2), ((0, 1, 2), (1, 3)), (0, 2, 3))
        >>> program = Program(((300, 300),) * 3, (outer, later), (4,))
        >>> laid_out(program).operations[0].output
        (0, 2, 1)
    """
    operations, first = list(program.operations), len(program.shapes)
    # Orders of axes change the order of labels and no size.
    sizes = program.sizes
    fixed = set(program.outputs)  # the caller reads them in the order that is announced
    for n, op in enumerate(operations):
        if op.body is not None:  # a loop reads slices, and adds up results of its body as they come
            fixed.update((first + n, *op.args))
    elements = {n: math.prod(shape) for n, shape in enumerate(program.value_shapes)}
    free = [n for n in elements if n >= first and n not in fixed and elements[n] > LARGE]
    known: dict[tuple[int, Operation], int] = {}  # most operations are asked for again and again

    def moved_by(n: int, op: Operation) -> int:
        if (n, op) not in known:
            known[n, op] = moved(op, sizes[n])
        return known[n, op]

    for _ in range(SWEEPS):
        is_better = False
        for value in sorted(free, key=lambda n: -elements[n]):
            beside = [value - first, *program.readers.get(value, ())]
            best = {n: operations[n] for n in beside}
            least = sum(moved_by(n, op) for n, op in best.items())
            # Sorted, as the first of equally good orders is taken, and a set has its own order in
            # every process. Nothing is better than nothing moved.
            for order in sorted(_orders(operations, value, beside)) if least else ():
                turned = {n: _turned(operations[n], value, first + n, order) for n in beside}
                attempt = sum(moved_by(n, op) for n, op in turned.items())
                if attempt < least:
                    best, least, is_better = turned, attempt, True
            for n, op in best.items():
                operations[n] = op
        if not is_better:
            break
    if tuple(operations) == program.operations:
        return program  # its sizes and readers are known
    return dataclasses.replace(program, operations=tuple(operations))


def moved(op: Operation, sizes: Mapping[int, int]) -> int:
    """The number of entries that an operation reads or writes in another order than they stand.

    Where the last axis stays the last, entries are moved in rows, and count a quarter.
    """
    chosen = None
    if op.is_product:
        first, second = op.labels
        chosen = matrix_product(first, second, op.output, sizes)
    if chosen is None:  # entry by entry, from one end of the result to the other
        orders = []
        for labels in op.labels:
            kept = tuple(x for x in labels if x in op.output)
            orders.append((tuple(x for x in op.output if x in labels), kept))
    else:
        product, swapped = chosen
        one, other = op.labels[::-1] if swapped else op.labels
        wanted_one, wanted_other = product.orders
        orders = [(wanted_one, one), (op.output, product.result)]
        if not product.reads_in_place(wanted_other, other):  # transposed matrices are read fast
            orders.append((wanted_other, other))
    entries = 0
    for wanted, stands in orders:
        if wanted != stands:
            size = math.prod(sizes[label] for label in wanted)
            entries += size // 4 if wanted[-1] == stands[-1] else size
    return entries


def _orders(operations: list[Operation], value: int, beside: list[int]) -> set[tuple[int, ...]]:
    """The orders of a value's axes, as permutations, that its neighbours prefer.

    Args:
        operations: Operations of the program.
        value: Number of the value.
        beside: Numbers of the operation that gives the value, and of those that read it.
    """
    made, *reading = (operations[n] for n in beside)
    found = {tuple(made.output.index(x) for x in order) for order in _results(made)}
    for op in reading:
        for arg, labels in zip(op.args, op.labels, strict=True):
            # A label that stands twice is a diagonal, which every order reads with gaps.
            if arg == value and len(set(labels)) == len(labels):
                found |= {tuple(labels.index(x) for x in order) for order in _readings(op, labels)}
    return found


def _results(op: Operation) -> Iterator[Labels]:
    """The orders of axes in which an operation gives its result without a copy."""
    if op.is_product:
        shared = [x for x in op.output if all(x in labels for labels in op.labels)]
        rows, columns = (
            [x for x in op.output if x in own and x not in shared] for own in op.labels
        )
        yield (*shared, *rows, *columns)
        yield (*shared, *columns, *rows)
    # Entry by entry a result is written in the order of an argument, whole arguments repeated.
    for labels in op.labels:
        rest = [x for x in op.output if x not in labels]
        yield (*rest, *dict.fromkeys(x for x in labels if x in op.output))


def _readings(op: Operation, labels: Labels) -> Iterator[Labels]:
    """The orders of axes in which an operation reads an argument without a copy."""
    others = {x for own in op.labels if own is not labels for x in own}
    kept = [x for x in op.output if x in labels]
    summed = [x for x in labels if x not in op.output]
    yield (*kept, *summed)
    shared, alone = [x for x in kept if x in others], [x for x in kept if x not in others]
    yield (*shared, *alone, *summed)
    yield (*shared, *summed, *alone)


def _turned(op: Operation, value: int, number: int, order: tuple[int, ...]) -> Operation:
    """The operation after the axes of a value that it gives or reads are permuted.

    Args:
        op: Operation before the permutation.
        value: Number of the permuted value.
        number: Number of the operation's result.
        order: Permutation of the axes.
    """

    def permuted(labels: Labels) -> Labels:
        return tuple(labels[place] for place in order)

    labels = [permuted(x) if arg == value else x for arg, x in zip(op.args, op.labels, strict=True)]
    output = permuted(op.output) if number == value else op.output
    return op._replace(labels=tuple(labels), output=output)


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

    Its axes stand as they were asked for, see `laid_out`.

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
    return Program.of(needed, range(inputs), outputs, lambda n: values[n].shape, **scaling)


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


class _Factor(NamedTuple):
    """A summand read as a factor times a rest.

    Args:
        factor: Factor, with names for summed labels that do not depend on the summand.
        rest: Cofactor: the summand is the product of factor and rest.
        output: Labels of the summand.
        cost: Scalar multiplications of the product.
    """

    factor: Use
    rest: Use
    output: tuple[Label, ...]
    cost: int


def total(builder: Builder, items: Iterable[WeightedValue], output: tuple[Label, ...]) -> Use:
    """The sum of weighted values, with shared intermediates and common factors taken out.

    Args:
        builder: Builder of the values and of their sum.
        items: Summands, with the labels of the output.
        output: Order of the axes of the result, unless it is a single product, which has an order
            of its own.
    """
    items = _merged_items(items)
    while len(items) > 1:
        shared = _most_saving(builder, items)
        if not shared:
            break
        inner = [WeightedValue(items[n].weight, factor.rest) for n, factor in shared.items()]
        first = next(iter(shared.values()))
        # a b + a c = a (b + c): the sum of the rests is a sum like any other, and may have common
        # factors itself.
        others = [item for n, item in enumerate(items) if n not in shared]
        rest = total(builder, inner, first.rest.labels)
        product = builder.contract((rest, first.factor), first.output)
        # The product joins the other summands, with which it may share a factor in turn; every pass
        # leaves fewer summands, so the loop ends.
        items = _merged_items([*others, WeightedValue(1.0, product)])
    if len(items) == 1 and items[0].weight == 1.0:
        return items[0].use
    return builder.sum(items, output)


def _merged_items(items: Iterable[WeightedValue]) -> list[WeightedValue]:
    """The summands with equal values merged and weights of zero left out."""
    weights: dict[Use, float] = {}
    for weight, use in items:
        weights[use] = weights.get(use, 0.0) + weight
    left = [WeightedValue(weight, use) for use, weight in weights.items() if weight != 0.0]
    if left:
        return left
    return [WeightedValue(0.0, use) for use in weights][:1]  # a zero that has the right shape


def _most_saving(builder: Builder, items: list[WeightedValue]) -> dict[int, _Factor]:
    """The items that share the most saving factor, by number, each read as factor times rest."""
    groups: dict[tuple, dict[int, _Factor]] = {}
    for n, item in enumerate(items):
        for factor in _shared_factors(builder, item.use):
            shared_by = (factor.factor, frozenset(factor.rest.labels))
            groups.setdefault(shared_by, {}).setdefault(n, factor)
    best: dict[int, _Factor] = {}
    saved = -1
    for group in groups.values():
        # All products but one are saved: products may differ in cost, so the sum of all costs
        # less their average. This is len(group) times that sum, which favours large groups.
        saving = (len(group) - 1) * sum(factor.cost for factor in group.values())
        if len(group) > 1 and saving > saved:
            best, saved = group, saving
    return best


def _shared_factors(builder: Builder, use: Use) -> Iterator[_Factor]:
    """The ways to read a value as factor times rest, under names that other summands share."""
    value = builder.values[use.value]
    operation = value.operation
    if operation is None or not operation.is_product:
        return
    outer = dict(zip(operation.output, use.labels, strict=True))
    # A summed label is named after its position in the factor, which other summands share, with
    # more primes than any outer label, so that the two differ.
    primes = "'" * (1 + max((str(label).count("'") for label in use.labels), default=0))
    # Either factor may be the common one.
    for one, two in ((0, 1), (1, 0)):
        names = dict(outer)
        for position, label in enumerate(operation.labels[one]):
            names.setdefault(label, f"{position}{primes}")
        factor = Use(operation.args[one], tuple(names[x] for x in operation.labels[one]))
        rest = Use(operation.args[two], tuple(names[x] for x in operation.labels[two]))
        yield _Factor(factor, rest, use.labels, value.cost)
