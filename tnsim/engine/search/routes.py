"""Products along routes, and the choice of a route for every product of a stage.

`product` contracts values of a `Builder` along a route. Each operand is first reduced on its own:
repeated labels become a diagonal, and labels that no other operand and no output has are summed
over. The labels and sizes of the reduced operands are the *structure* of the product, which its
routes depend on.

`RouteSearch` finds the routes of a stage. Effort follows cost: every product gets a greedy path, in
each way in which its term may be written, and only products that matter for the price of the stage
are searched again, harder.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tnsim.engine.ir.problem import Definition, Stage, Term
from tnsim.engine.ir.program import Operation
from tnsim.engine.search import paths
from tnsim.engine.search.paths import Path, Route
from tnsim.engine.search.sharing import (
    Builder,
    Label,
    Use,
    WeightedValue,
    laid_out,
    price,
    program_of,
    total,
)
from tnsim.errors import TooLarge

Structure = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[tuple[int, int], ...]]
"""The labels of each reduced operand, the labels of the output, and pairs (label, size) of all
labels, where labels are numbers."""
Shapes = tuple[tuple[int, ...], ...]
Sizes = dict[str, tuple[int, ...]]
"""The shapes of arrays by name."""
Choices = tuple[tuple[int, tuple], ...]
"""The way in which a sum is written, as a pair (number, choices) per term.

Number 0 is the product of the term, n its n-th alternative; the choices say how that alternative is
written.
"""
MATTERS, HEAVY = 1e-3, 1e-2
"""Shares of a stage's price from which on a term is searched a second and a third time."""
GAINS, SAVES = 10**5, 3 * 10**7
"""Prices from which on a term is searched a second and a third time.

These searches take 1 and 10 ms, which cheaper routes of such a term save within some 50 runs.
"""
ALIKE = 2
"""Ratio to the cheapest way of a term up to which another way may share enough to be cheaper: a
quarter fewer multiplications for a cosine of two exact layers of width 24."""
MOST_CHECKED = 50
"""Number of products of a definition whose least work is found before the search of a stage."""
HOPELESS = 64
"""Ratio to the cheapest way of a term beyond which another way is not searched again."""


def _structure_of(term: Term, indices: tuple[str, ...], sizes: Sizes) -> Structure:
    """The structure of the product of a term, in a definition with some indices."""
    operands = tuple([(o.indices, sizes[o.name]) for o in term.operands])
    return _product_structure(operands, indices)


@lru_cache(maxsize=2**14)  # many products of a stage differ in their arrays alone
def _product_structure(
    operands: tuple[tuple[tuple[Label, ...], tuple[int, ...]], ...], output: tuple[Label, ...]
) -> Structure:
    """The structure of a product of operands.

    Args:
        operands: Labels and shape of each operand.
        output: Labels of the result.

    Example:
        >>> operands = (("i", "i"), (2, 2)), (("i", "j", "k"), (2, 3, 4))
        >>> _product_structure(operands, ("j",))
        (((0,), (0, 1)), (1,), ((0, 2), (1, 3)))
    """
    kept = _reduced_labels(tuple([labels for labels, _ in operands]), output)
    sizes: dict[Label, int] = {}
    for labels, shape in operands:
        sizes |= zip(labels, shape, strict=True)
    # Labels become numbers in the order of first use, so that products that differ in names share
    # their routes.
    numbers = _label_numbers(kept)
    inputs = tuple([tuple([numbers[x] for x in labels]) for labels in kept])
    items = tuple([(n, sizes[x]) for x, n in numbers.items()])
    return inputs, tuple([numbers[x] for x in output]), items


def product(
    builder: Builder,
    uses: Sequence[Use],
    output: tuple[Label, ...],
    route: Callable[[Structure], Route],
) -> Use:
    """The product of values, contracted pairwise along a route.

    Args:
        builder: Builder of the values and of their product.
        uses: Operands of the product.
        output: Labels of the result.
        route: Function from the structure of a product to its route, called for two and more
            operands.
    """
    kept = _reduced_labels(tuple([use.labels for use in uses]), output)
    operands = []
    for use, labels in zip(uses, kept, strict=True):
        operands.append(use if use.labels == labels else builder.contract([use], labels))
    if len(operands) == 1:
        return operands[0]
    shapes = tuple([(use.labels, builder.values[use.value].shape) for use in uses])
    chosen = route(_product_structure(shapes, output))
    if not chosen.chunks:
        return _along_path(builder, operands, output, chosen.path)
    names = list(_label_numbers(kept))
    chunks = tuple(names[n] for n in chosen.chunks)
    return _in_chunks(builder, operands, output, chosen.path, chunks)


@lru_cache(maxsize=2**14)
def _reduced_labels(
    operands: tuple[tuple[Label, ...], ...], output: tuple[Label, ...]
) -> tuple[tuple[Label, ...], ...]:
    """The labels of each operand that another operand or the output has, each label once."""
    # A label that one operand alone has, and the output lacks, is summed before any product: a sum
    # over n entries instead of n times as large a product.
    # `often` collects labels that occur at least twice among operands and output.
    once: set[Label] = set(output)
    often: set[Label] = set()
    for labels in operands:
        own = set(labels)
        often |= once & own
        once |= own
    kept = []
    for labels in operands:
        distinct = labels if len(set(labels)) == len(labels) else tuple(dict.fromkeys(labels))
        shared = [label for label in distinct if label in often]
        kept.append(distinct if len(shared) == len(distinct) else tuple(shared))
    return tuple(kept)


def _label_numbers(operands: Sequence[tuple[Label, ...]]) -> dict[Label, int]:
    """The number of every label, in the order of first use."""
    numbers: dict[Label, int] = {}
    for labels in operands:
        for label in labels:
            numbers.setdefault(label, len(numbers))
    return numbers


def _along_path(
    builder: Builder, uses: Sequence[Use], output: tuple[Label, ...], path: Path
) -> Use:
    """The product of values by pairwise contractions in the order of a path."""
    pool = dict(enumerate(uses))
    place = {label: n for n, label in enumerate(output)}
    for step, (one, two) in enumerate(path):
        pair = pool.pop(one), pool.pop(two)
        kept: Sequence[Label] = output
        if pool:
            # Labels that nothing else reads are summed in this contraction, at no multiplication
            # more.
            needed = set(output).union(*(use.labels for use in pool.values()))
            both = dict.fromkeys(x for x in pair[0].labels + pair[1].labels if x in needed)
            # Labels stand in the order of the result, so that products and sums need no transposes.
            kept = sorted(both, key=lambda label: place.get(label, len(place)))
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
    """The product of values as a loop over `chunks`, with a body contracted along a path."""
    numbers = _label_numbers([use.labels for use in uses])
    sizes: dict[Label, int] = {}
    # The body has a builder of its own: its values exist within a turn only, and are shared among
    # themselves.
    inner = Builder()
    operands = []
    for use in uses:
        sizes |= zip(use.labels, builder.values[use.value].shape, strict=True)
        labels = tuple(label for label in use.labels if label not in chunks)
        operands.append(Use(inner.atom(tuple(sizes[label] for label in labels)), labels))
    result = inner.ordered(_along_path(inner, operands, output, path), output)
    body = laid_out(program_of(inner, [result.value], len(uses)))
    operation = Operation(
        kind="loop",
        args=tuple(use.value for use in uses),
        labels=tuple(tuple(numbers[x] for x in use.labels) for use in uses),
        output=tuple(numbers[x] for x in output),
        chunks=tuple(numbers[x] for x in chunks),
        body=body,
    )
    # A body computes what depends on no chunk in every turn again, so the cost of a loop is that of
    # all turns.
    turns = math.prod(sizes[label] for label in chunks)
    return Use(builder.computed(operation, turns * body.multiplications), output)


@dataclass(frozen=True)
class _Candidate:
    """A term of a stage with the structures of all its products.

    Args:
        term: The term.
        indices: Indices of its definition.
        key: Structure of the term's own product.
        sums: Terms of each alternative.
    """

    term: Term
    indices: tuple[str, ...]
    key: Structure
    sums: tuple[tuple[_Candidate, ...], ...]


class RouteSearch:
    """The routes of products by structure.

    Args:
        large: Elements beyond which intermediates are chunked where chunks can make them smaller.

    Attributes:
        found: Cheapest route of every structure.
        effort: Effort of the search of every structure.
    """

    def __init__(self, large: int) -> None:
        self.large = large
        self.found: dict[Structure, Route] = {}
        self.effort: dict[Structure, int] = {}

    def search(self, key: Structure, effort: int) -> None:
        """Search the route of a product unless it was searched with this effort or more."""
        if self.effort.get(key, -1) < effort:
            self.found[key] = paths.route(*key, effort, self.large)
            self.effort[key] = effort

    def best(self, key: Structure) -> Route:
        """The cheapest route found for a product."""
        self.search(key, 0)
        return self.found[key]

    def search_all(self, stage: Stage, shapes: Shapes) -> list[tuple[_Candidate, ...]]:
        """Search all products of a stage, harder where they matter for the price of the stage.

        Args:
            stage: Stage with inputs named in0, in1, ...
            shapes: Shapes of the inputs.

        Returns:
            The terms of each definition.
        """
        sums = list(_candidate_terms(stage, _input_sizes(shapes)))
        every = [candidate for terms in sums for candidate in terms]
        for effort, share, worth in ((1, MATTERS, GAINS), (2, HEAVY, SAVES)):
            # Prices are those of the routes found so far, so the second round knows more than the
            # first. A search is worth while where it may save more than it takes: of a stage's
            # price a share, and of a term its own time.
            prices = list(map(self._cheapest_price, every))
            least = max(share * sum(prices), worth)
            for candidate, so_far in zip(every, prices, strict=True):
                if so_far >= least:
                    self._search_again(candidate, effort, least)
        return sums

    def cheapest_ways(self, stage: Stage, shapes: Shapes) -> tuple[Choices, ...]:
        """The cheapest way to write each definition of a stage, after a search of its products.

        Args:
            stage, shapes: Arguments of `search_all`.
        """
        sums = self.search_all(stage, shapes)
        sizes = _input_sizes(shapes)
        for definition in stage.definitions:
            sizes[definition.name] = shape_of(definition, sizes)
        every = itertools.chain.from_iterable(sums)
        least = HEAVY * sum(map(self._cheapest_price, every))
        return tuple(
            tuple(self._cheapest_way(candidate, sizes, least) for candidate in terms)
            for terms in sums
        )

    def _search_again(self, candidate: _Candidate, effort: int, least: float) -> None:
        """Search a term of price `least` or more again, in the ways that may become cheapest."""
        cheapest = self._cheapest_price(candidate)
        if cheapest < least:
            return
        # A way that is sixty-four times as dear by its greedy path hardly becomes the cheapest.
        if self.best(candidate.key).price <= HOPELESS * cheapest:
            self.search(candidate.key, effort)
        for terms in candidate.sums:
            if sum(map(self._cheapest_price, terms)) <= HOPELESS * cheapest:
                for term in terms:
                    self._search_again(term, effort, least)

    def _way_prices(self, candidate: _Candidate) -> list[int]:
        """The price of a term in each way: its own product first, then its alternatives."""
        own = self.best(candidate.key).price
        return [own, *(sum(map(self._cheapest_price, terms)) for terms in candidate.sums)]

    def _cheapest_price(self, candidate: _Candidate) -> int:
        """The price of a term in its cheapest way."""
        return min(self._way_prices(candidate))

    def _cheapest_way(
        self, candidate: _Candidate, sizes: Sizes, least: float
    ) -> tuple[int, Choices]:
        """The cheapest way to write a term.

        Ways of a term of price `least` or more whose prices are alike are put together to be
        compared: the products of a way may share most of their work.
        """
        prices = self._way_prices(candidate)
        alike = [n for n, price in enumerate(prices) if price <= ALIKE * min(prices)]
        ways = []
        for number in alike:
            terms = candidate.sums[number - 1] if number else ()
            ways.append((number, tuple(self._cheapest_way(term, sizes, least) for term in terms)))
        if len(ways) == 1 or min(prices) < least:
            return min(ways, key=lambda way: prices[way[0]])
        return min(ways, key=lambda way: self._price_together(candidate, way, sizes))

    def _price_together(self, candidate: _Candidate, way: tuple[int, Choices], sizes: Sizes) -> int:
        """The price of the products of a way, put together."""
        builder = Builder()
        values: dict[str, int] = {}
        items = []
        for term in _chosen_products([candidate.term], (way,)):
            for operand in term.operands:
                if operand.name not in values:
                    values[operand.name] = builder.atom(sizes[operand.name])
            uses = [Use(values[operand.name], operand.indices) for operand in term.operands]
            use = product(builder, uses, candidate.indices, self.best)
            items.append(WeightedValue(term.weight, use))
        return price(builder, [total(builder, items, candidate.indices).value])


class BeyondLimit(TooLarge):
    """A stage that takes more multiplications than are allowed, known before all is searched.

    Args:
        least: Number of multiplications that the stage takes at least.
    """

    def __init__(self, least: float) -> None:
        super().__init__(f"at least {least:.3g} multiplications")
        self.least = least

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return type(self), (self.least,)  # a worker's error reaches the caller by pickle


def check_limit(stage: Stage, shapes: Shapes, limit: float) -> list[tuple[int, ...]]:
    """Refuse a stage in which a single contraction is beyond a limit.

    Sharing computes a contraction once for many products, and factors out of sums merge
    contractions of equal cost. But the dearest contraction of each product is left. So a stage
    takes at least the dearest contraction of any product along its best path. Paths are searched,
    as hard as they are searched at all, of products whose greedy path is beyond the limit, the
    dearest first, until a product is beyond the limit in all ways to write it.

    Args:
        stage: Stage with inputs named in0, in1, ...
        shapes: Shapes of the inputs.
        limit: Multiplications that the stage may take.

    Returns:
        The shape of every definition of the stage.

    Raises:
        BeyondLimit: A contraction is beyond the limit.
    """
    sizes = _input_sizes(shapes)
    for definition in stage.definitions:
        dear = []
        for number, term in enumerate(definition.terms):
            work = paths.greedy_work(*_structure_of(term, definition.indices, sizes))
            # A greedy path bounds the least work from above: products within the limit along it are
            # within the limit.
            if work > limit:
                dear.append((-work, number))
        # Negative work sorts the dearest product first.
        for _, number in sorted(dear)[:MOST_CHECKED]:
            least = _least_cost(definition.terms[number], definition.indices, sizes, limit)
            if least > limit:
                raise BeyondLimit(least)
        sizes[definition.name] = shape_of(definition, sizes)
    return [sizes[definition.name] for definition in stage.definitions]


def _least_cost(term: Term, indices: tuple[str, ...], sizes: Sizes, limit: float) -> int:
    """The multiplications of the dearest contraction of a term, in the cheapest way to write it.

    The search ends, and the number is too small, at the first way that is within the limit.
    """
    least = paths.least_work(*_structure_of(term, indices, sizes), limit)
    for terms in term.alternatives:
        if least <= limit:
            break
        of_sum = 0
        for other in terms:
            # Of a sum every product is computed, so its dearest one bounds it from below; of the
            # ways to write a term the cheapest does.
            of_sum = max(of_sum, _least_cost(other, indices, sizes, limit))
            if of_sum > limit:
                break
        least = min(least, of_sum)
    return least


def written(definition: Definition, ways: Choices) -> Definition:
    """The definition with every term written in the chosen way, without alternatives."""
    return dataclasses.replace(definition, terms=tuple(_chosen_products(definition.terms, ways)))


def _chosen_products(terms: Sequence[Term], ways: Choices, weight: float = 1.0) -> Iterator[Term]:
    """The products of some terms in the chosen ways, with all weights multiplied by `weight`."""
    for term, (number, inner) in zip(terms, ways, strict=True):
        if number == 0:
            yield Term(weight * term.weight, term.operands)
        else:
            yield from _chosen_products(term.alternatives[number - 1], inner, weight * term.weight)


def shape_of(definition: Definition, sizes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a definition, from the shapes of the arrays that it reads, by name."""
    known: dict[str, int] = {}
    for operand in definition.terms[0].operands:  # every term has all indices of the definition
        known |= zip(operand.indices, sizes[operand.name], strict=True)
    return tuple(known[index] for index in definition.indices)


def _input_sizes(shapes: Shapes) -> Sizes:
    """The shapes of the inputs of a stage by name."""
    return {f"in{n}": shape for n, shape in enumerate(shapes)}


def _candidate_terms(stage: Stage, sizes: Sizes) -> Iterator[tuple[_Candidate, ...]]:
    """The terms of each definition of a stage as candidates; adds the definitions to `sizes`."""

    def candidate(term: Term, indices: tuple[str, ...]) -> _Candidate:
        sums = []
        for terms in term.alternatives:
            sums.append(tuple(candidate(other, indices) for other in terms))
        return _Candidate(term, indices, _structure_of(term, indices, sizes), tuple(sums))

    for definition in stage.definitions:
        yield tuple(candidate(term, definition.indices) for term in definition.terms)
        sizes[definition.name] = shape_of(definition, sizes)
