"""Whether what a forward pass gives for an input depends on the others of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tnsim.checkpoints.affine_values import Library
from tnsim.checkpoints.entrywise import is_entrywise
from tnsim.checkpoints.operations import FILLS, PRODUCTS, Graph, Operation, is_affine

JOINED = (
    "computes with the number of its inputs or with more than one of them: what it gives for an "
    "input depends on the batch around it, so it is no function of an input"
)


def joins_inputs(graph: Graph, arrays: Mapping[Operation, Any], x: Any, library: Library) -> bool:
    """Whether an entry of the output reads more than one input of a batch of two.

    Args:
        graph: Operations on two inputs.
        arrays: Weights and constants, by their operations.
        x: Two inputs.
        library: Functions of arrays.
    """
    numbers: dict[Operation, Any] = {**arrays, graph.argument: x}
    first = np.zeros(tuple(x.shape))
    first[0] = 1
    read: dict[Operation, tuple[Any, Any]] = {
        graph.argument: (library.array(first), library.array(1 - first))
    }
    for one in graph.operations:
        if one not in numbers:
            numbers[one] = one.run(numbers)
            if any(before in read for before in one.reads) and one.name not in FILLS:
                pair = [_reached(one, numbers, read, n, library) for n in (0, 1)]
                read[one] = (pair[0], pair[1])
    if graph.output not in read:
        return False
    one, two = read[graph.output]
    return len(one) != 2 or bool(one[1].any()) or bool(two[0].any())


def _reached(
    one: Operation,
    numbers: Mapping[Operation, Any],
    read: Mapping[Operation, tuple[Any, Any]],
    n: int,
    library: Library,
) -> Any:
    """The entries of a result that depend on an input of a batch of two."""
    known = frozenset(before for before in one.reads if before in read)
    here = {before: read[before][n] for before in known}
    if one.name == "getitem":
        whole, place = one.arguments
        found = here[whole]
        return found[place] if isinstance(found, list) else found
    if is_affine(one.name) and one.name not in ("mul", "where", "embedding"):
        # The others are ones where each of several factors counts, and zeros in a sum.
        fill = int(one.name in PRODUCTS)
        each = []
        for before in known:
            others = {other: here[other] * 0 + fill for other in known if other is not before}
            found = one.reach({**numbers, **others, before: here[before]}, known)
            each.append(found if isinstance(found, list) else [found])
        total = [sum(parts[1:], parts[0]) for parts in zip(*each, strict=True)]
        return total if isinstance(numbers[one], (list, tuple)) else total[0]
    result = numbers[one]
    result = result[0] if isinstance(result, (list, tuple)) else result
    total = library.array(np.zeros(tuple(result.shape)))
    for indicator in here.values():
        if one.name == "embedding":
            total = total + indicator[..., None]
        else:  # of others over the last axis, as a norm
            total = total + (indicator if is_entrywise(one.name) else indicator.sum(-1)[..., None])
    return total
