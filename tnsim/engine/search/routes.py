"""One product in a builder. In: values with labels, a route. Out: their product along the route.

Each operand is first reduced on its own: repeated labels become a diagonal, labels that nobody else
has are summed over. What is left is the product's *structure*, by which routes are found.

[merged from engine/route_search]
Routes for the products of a stage. In: a numbered stage. Out: routes, and which way to write it.

Effort follows cost. Every product gets a greedy path, in each way in which its term is written;
only those that matter are searched again, harder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tnsim.engine.ir.problem import Definition, Operand, Stage, Term
from tnsim.engine.ir.program import Operation
from tnsim.engine.search import paths as paths
from tnsim.engine.search.paths import Path, Route
from tnsim.engine.search.sharing import Builder, Label, Use, program_of

Structure = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[tuple[int, int], ...]]
"""Labels of each reduced operand, labels of the output, label and size of each; labels numbered."""


def structure(
    operands: Sequence[tuple[tuple[Label, ...], tuple[int, ...]]], output: tuple[Label, ...]
) -> Structure:
    """What routes of a product depend on.

    Args:
        operands: Labels and shape of each.
        output: Labels of the result.

    Example:
        >>> structure([(("i", "i"), (2, 2)), (("i", "j", "k"), (2, 3, 4))], ("j",))
        (((0,), (0, 1)), (1,), ((0, 2), (1, 3)))
    """
    kept = _reduced([labels for labels, _ in operands], output)
    sizes: dict[Label, int] = {}
    for labels, shape in operands:
        sizes |= zip(labels, shape, strict=True)
    numbers = _numbers(kept)
    inputs = tuple(tuple([numbers[x] for x in labels]) for labels in kept)
    items = tuple((n, sizes[x]) for x, n in numbers.items())
    return inputs, tuple([numbers[x] for x in output]), items


def product(
    builder: Builder,
    uses: Sequence[Use],
    output: tuple[Label, ...],
    route: Callable[[Structure], Route],
) -> Use:
    """The product of values, contracted pairwise along a route.

    Args:
        builder: Has the values, and gets the product.
        uses: The operands.
        output: Labels of the result.
        route: Called for products of two operands and more.
    """
    of = structure([(use.labels, builder.values[use.value].shape) for use in uses], output)
    kept = _reduced([use.labels for use in uses], output)
    operands = []
    for use, labels in zip(uses, kept, strict=True):
        operands.append(use if use.labels == labels else builder.contract([use], labels))
    if len(operands) == 1:
        return operands[0]
    chosen = route(of)
    if not chosen.chunks:
        return _along(builder, operands, output, chosen.path)
    names = list(_numbers(kept))
    chunks = tuple(names[n] for n in chosen.chunks)
    return _in_chunks(builder, operands, output, chosen.path, chunks)


def _reduced(
    operands: Sequence[tuple[Label, ...]], output: tuple[Label, ...]
) -> list[tuple[Label, ...]]:
    """Labels of each operand, once each, without those that no other operand and no output has."""
    readers: dict[Label, int] = {}
    for labels in (*operands, output):
        for label in set(labels):
            readers[label] = readers.get(label, 0) + 1
    kept = []
    for labels in operands:
        kept.append(tuple([label for label in dict.fromkeys(labels) if readers[label] > 1]))
    return kept


def _numbers(operands: Sequence[tuple[Label, ...]]) -> dict[Label, int]:
    """Numbers for labels, by first use."""
    numbers: dict[Label, int] = {}
    for labels in operands:
        for label in labels:
            numbers.setdefault(label, len(numbers))
    return numbers


def _along(builder: Builder, uses: Sequence[Use], output: tuple[Label, ...], path: Path) -> Use:
    """Pairwise contractions in the order of a path."""
    pool = dict(enumerate(uses))
    place = {label: n for n, label in enumerate(output)}
    for step, (one, two) in enumerate(path):
        pair = pool.pop(one), pool.pop(two)
        needed = set(output).union(*(use.labels for use in pool.values()))
        kept = [label for label in pair[0].labels + pair[1].labels if label in needed]
        # In the order of the result, so that what is multiplied and added up needs no transposes.
        kept = sorted(dict.fromkeys(kept), key=lambda label: place.get(label, len(place)))
        pool[len(uses) + step] = builder.contract(pair, kept)
    (result,) = pool.values()
    return result


def _in_chunks(
    builder: Builder,
    uses: Sequence[Use],
    output: tuple[Label, ...],
    path: Path,
    chunks: tuple[Label, ...],
) -> Use:
    """The product as a loop over the labels `chunks`, its body contracted along the path."""
    numbers = _numbers([use.labels for use in uses])
    sizes: dict[Label, int] = {}
    inner = Builder()
    operands = []
    for use in uses:
        sizes |= zip(use.labels, builder.values[use.value].shape, strict=True)
        labels = tuple(label for label in use.labels if label not in chunks)
        operands.append(Use(inner.atom(tuple(sizes[label] for label in labels)), labels))
    result = inner.ordered(_along(inner, operands, output, path), output)
    body = program_of(inner, [result.value], len(uses))
    operation = Operation(
        kind="loop",
        args=tuple(use.value for use in uses),
        labels=tuple(tuple(numbers[x] for x in use.labels) for use in uses),
        output=tuple(numbers[x] for x in output),
        chunks=tuple(numbers[x] for x in chunks),
        body=body,
    )
    turns = math.prod(sizes[label] for label in chunks)
    return Use(builder.computed(operation, turns * body.multiplications), output)


Shapes = tuple[tuple[int, ...], ...]


Choices = tuple[tuple[int, tuple], ...]
"""How a sum is written. For every term: 0, its own product, or n, the n-th of the sums that it may
be instead; and how that sum is written."""


FEW = 12
"""Products of a stage up to which every one is searched."""


WORTH_SEARCHING = 10**8
"""Price of a stage from which on it is searched harder: some milliseconds."""


MATTERS, HEAVY = 2e-4, 2e-3
"""Shares of the stage's price from which on a term is searched a second and a third time."""


GAINS, SAVES = 10**6, 3 * 10**7
"""Prices of a term from which on these searches, of 6 and 50 ms, are won back in some 50 runs."""


HOPELESS = 64
"""How many times as dear as the cheapest way another may look and still be searched again."""


@dataclass(frozen=True)
class _Candidate:
    """A term as its product's structure, and the sums that it may be instead."""

    key: Structure
    sums: tuple[tuple[_Candidate, ...], ...]


class RouteSearch:
    """Routes found so far, by the structure of the product, and the one chosen for each.

    Args:
        large: Elements that no intermediate exceeds where chunks can prevent it.
    """

    def __init__(self, large: int) -> None:
        self.large = large
        self.found: dict[Structure, tuple[Route, ...]] = {}
        self.effort: dict[Structure, int] = {}
        self.chosen: dict[Structure, int] = {}

    def look(self, key: Structure, effort: int) -> None:
        """Search a product unless it has been searched as hard."""
        if self.effort.get(key, -1) < effort:
            self.found[key] = paths.routes(*key, effort, self.large)
            self.effort[key] = effort

    def best(self, key: Structure) -> Route:
        """The cheapest route of a product."""
        self.look(key, 0)
        return self.found[key][0]

    def pick(self, key: Structure) -> Route:
        """The route chosen for a product; the cheapest, unless another was put in its place."""
        self.look(key, 0)
        return self.found[key][self.chosen.get(key, 0)]

    def cheapest_ways(self, stage: Stage, shapes: Shapes) -> tuple[Choices, ...]:
        """Search all terms of a stage in all ways, harder where the stage's cost lies.

        Args:
            stage: Its inputs are named in0, in1, ...
            shapes: Of the inputs.

        Returns:
            For every definition, the cheapest way to write it.
        """
        sums = list(_candidates(stage, shapes))
        every = [candidate for terms in sums for candidate in terms]
        few = len(every) <= FEW
        for effort, share, worth in ((1, MATTERS, GAINS), (2, HEAVY, SAVES)):
            prices = [self._price(candidate) for candidate in every]
            least = max(share * sum(prices), worth)
            if effort == 1 and few:
                least = 0.0
            elif sum(prices) < WORTH_SEARCHING:
                break
            for candidate in every:
                self._search_again(candidate, effort, least)
        return tuple(tuple(self._way(candidate) for candidate in terms) for terms in sums)

    def _search_again(self, candidate: _Candidate, effort: int, least: float) -> None:
        """Search a term harder if it costs at least so much, in the ways that may be cheapest."""
        price = self._price(candidate)
        if price < least:
            return
        if self.best(candidate.key).price <= HOPELESS * price:
            self.look(candidate.key, effort)
        for terms in candidate.sums:
            if sum(map(self._price, terms)) <= HOPELESS * price:
                for term in terms:
                    self._search_again(term, effort, least)

    def _prices(self, candidate: _Candidate) -> list[int]:
        """What a term costs in each way."""
        own = self.best(candidate.key).price
        return [own, *(sum(map(self._price, terms)) for terms in candidate.sums)]

    def _price(self, candidate: _Candidate) -> int:
        return min(self._prices(candidate))

    def _way(self, candidate: _Candidate) -> tuple[int, Choices]:
        prices = self._prices(candidate)
        number = prices.index(min(prices))
        terms = candidate.sums[number - 1] if number else ()
        return number, tuple(self._way(term) for term in terms)


def written(definition: Definition, ways: Choices) -> Definition:
    """The definition with every term in the way chosen for it."""
    return dataclasses.replace(definition, terms=tuple(_chosen(definition.terms, ways)))


def _chosen(terms: Sequence[Term], ways: Choices, weight: float = 1.0) -> Iterator[Term]:
    for term, (number, inner) in zip(terms, ways, strict=True):
        if number == 0:
            yield Term(weight * term.weight, term.operands)
        else:
            yield from _chosen(term.alternatives[number - 1], inner, weight * term.weight)


def shape_of(definition: Definition, sizes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of a definition, from the shapes of what it names."""
    known: dict[str, int] = {}
    for operand in definition.terms[0].operands:
        known |= zip(operand.indices, sizes[operand.name], strict=True)
    return tuple(known[index] for index in definition.indices)


def _candidates(stage: Stage, shapes: Shapes) -> Iterator[tuple[_Candidate, ...]]:
    """The terms of every definition of a stage as candidates."""
    sizes = {f"in{n}": shape for n, shape in enumerate(shapes)}

    def key(operands: tuple[Operand, ...], indices: tuple[str, ...]) -> Structure:
        return structure([(o.indices, sizes[o.name]) for o in operands], indices)

    def candidate(term: Term, indices: tuple[str, ...]) -> _Candidate:
        sums = []
        for terms in term.alternatives:
            sums.append(tuple(candidate(other, indices) for other in terms))
        return _Candidate(key(term.operands, indices), tuple(sums))

    for definition in stage.definitions:
        yield tuple(candidate(term, definition.indices) for term in definition.terms)
        sizes[definition.name] = shape_of(definition, sizes)
