"""The sum of products, with common factors taken out.

Common factors are taken out by the distributive law, greedily: of all factors that several summands
share, the factor that saves most multiplications is taken out, the rests are added up in the same
way, and their sum is multiplied by the factor once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tnsim.engine.search.sharing import Builder, Label, Use, WeightedValue


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
        if not names.keys() >= set(operation.labels[two]):
            continue  # the rest has a summed label of its own
        factor = Use(operation.args[one], tuple(names[x] for x in operation.labels[one]))
        rest = Use(operation.args[two], tuple(names[x] for x in operation.labels[two]))
        yield _Factor(factor, rest, use.labels, value.cost)
