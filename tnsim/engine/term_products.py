"""One product in a builder. In: values with labels, a route. Out: their product along the route.

Each operand is first reduced on its own: repeated labels become a diagonal, labels that nobody else
has are summed over. What is left is the product's *structure*, by which routes are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tnsim.engine.pathfinding import Path, Route
from tnsim.engine.piece import Operation
from tnsim.engine.sharing import Builder, Label, Use, piece_of

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
    body = piece_of(inner, [result.value], len(uses))
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
