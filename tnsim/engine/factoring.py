"""Sums with common factors taken out. In: weighted values of a builder. Out: one value.

The distributive law, greedily: of all factors that several summands share, the one that saves most
multiplications is taken out, the rest is added up in the same way, and the sum is multiplied once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tnsim.engine.sharing import Builder, Label, Use, Weighted


class _Factor(NamedTuple):
    """A summand read as a factor times a rest.

    Args:
        factor: Under names of summed labels that other summands share.
        rest: What the factor is multiplied by.
        output: Labels of the summand.
        cost: Multiplications of the product.
    """

    factor: Use
    rest: Use
    output: tuple[Label, ...]
    cost: int


def total(builder: Builder, items: Iterable[Weighted], output: tuple[Label, ...]) -> Use:
    """The sum of weighted values, common factors taken out.

    Args:
        builder: Has the values, and gets the sum.
        items: The summands; their labels are those of the output.
        output: Order of the axes where the result is a sum; a single product keeps its own.
    """
    items = _merged(items)
    while len(items) > 1:
        shared = _most_saving(builder, items)
        if not shared:
            break
        inner = [Weighted(items[n].weight, factor.rest) for n, factor in shared.items()]
        first = next(iter(shared.values()))
        rest = total(builder, inner, first.rest.labels)
        product = builder.contract((rest, first.factor), first.output)
        others = [item for n, item in enumerate(items) if n not in shared]
        items = _merged([*others, Weighted(1.0, product)])
    if len(items) == 1 and items[0].weight == 1.0:
        return items[0].use
    return builder.sum(items, output)


def _merged(items: Iterable[Weighted]) -> list[Weighted]:
    """One item per value, with the sum of its weights."""
    weights: dict[Use, float] = {}
    for weight, use in items:
        weights[use] = weights.get(use, 0.0) + weight
    left = [Weighted(weight, use) for use, weight in weights.items() if weight != 0.0]
    if left:
        return left
    return [Weighted(0.0, use) for use in weights][:1]  # where all cancels, zero has a shape


def _most_saving(builder: Builder, items: list[Weighted]) -> dict[int, _Factor]:
    """The items that share the factor worth most, read as that factor times their rests."""
    groups: dict[tuple, dict[int, _Factor]] = {}
    for n, item in enumerate(items):
        for factor in _factors(builder, item.use):
            shared_by = (factor.factor, frozenset(factor.rest.labels))
            groups.setdefault(shared_by, {}).setdefault(n, factor)
    best: dict[int, _Factor] = {}
    saved = -1
    for group in groups.values():
        # All products but one are saved; as they may differ in cost, all but an average one.
        saving = (len(group) - 1) * sum(factor.cost for factor in group.values())
        if len(group) > 1 and saving > saved:
            best, saved = group, saving
    return best


def _factors(builder: Builder, use: Use) -> Iterator[_Factor]:
    """The ways to read a value as factor times rest, in names that other summands share."""
    value = builder.values[use.value]
    operation = value.operation
    if operation is None or operation.kind != "contract" or len(operation.args) != 2:
        return
    outer = dict(zip(operation.output, use.labels, strict=True))
    # A summed label is named after its position in the factor, with more primes than any outer
    # label has, so that it is none of those.
    primes = "'" * (1 + max((str(label).count("'") for label in use.labels), default=0))
    for one, two in ((0, 1), (1, 0)):
        names = dict(outer)
        for position, label in enumerate(operation.labels[one]):
            names.setdefault(label, f"{position}{primes}")
        if not names.keys() >= set(operation.labels[two]):
            continue  # the rest has a summed label of its own
        factor = Use(operation.args[one], tuple(names[x] for x in operation.labels[one]))
        rest = Use(operation.args[two], tuple(names[x] for x in operation.labels[two]))
        yield _Factor(factor, rest, use.labels, value.cost)
