"""Canonical form of a small tensor network.

In: tensors by reference, their labels. Out: a hashable key.

Two sub-contractions are the same array, up to the order of its axes, when their networks are
isomorphic: same arrays, joined alike, the same number of open labels. The key says so regardless
of label names, of the order of the tensors, and of the exchange of the two legs of a symmetric
array.

Colour refinement first; where symmetric positions remain, each member of the first undecided
class is singled out in turn and the smallest encoding wins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

Tensor = tuple[int, tuple[int, ...]]


def canonical(
    tensors: Sequence[Tensor], open_labels: Sequence[int], symmetric: Callable[[int], bool]
) -> tuple[Hashable, tuple[int, ...]]:
    """(key, open labels in canonical order) of the network of `tensors`, each a reference and its
    labels.
    """
    exchangeable = [symmetric(ref) for ref, _ in tensors]
    is_open = set(open_labels)
    colours = {label: int(label in is_open) for _, labels in tensors for label in labels}
    rank, encoding = _search(tensors, exchangeable, colours)
    order = tuple(sorted(is_open, key=rank.__getitem__))
    return (encoding, tuple(rank[label] for label in order)), order


def _search(tensors, exchangeable, colours) -> tuple[dict[int, int], tuple]:
    colours = _refine(tensors, exchangeable, colours)
    if len(set(colours.values())) == len(colours):
        encoding = [
            (
                ref,
                tuple(
                    sorted([colours[x] for x in labels]) if swap else [colours[x] for x in labels]
                ),
            )
            for (ref, labels), swap in zip(tensors, exchangeable, strict=True)
        ]
        return colours, tuple(sorted(encoding))
    classes: dict[int, list[int]] = {}
    for label, colour in colours.items():
        classes.setdefault(colour, []).append(label)
    attempts = []
    for label in classes[min(c for c, members in classes.items() if len(members) > 1)]:
        single = {x: 2 * c for x, c in colours.items()}
        single[label] -= 1
        attempts.append(_search(tensors, exchangeable, single))
    return min(attempts, key=lambda attempt: attempt[1])


def _refine(tensors, exchangeable, colours) -> dict[int, int]:
    """Split classes of labels by where they occur until nothing splits any more."""
    count = len(set(colours.values()))
    while count < len(colours):
        signatures: dict[int, list[tuple]] = {x: [(colour,)] for x, colour in colours.items()}
        for (ref, labels), swap in zip(tensors, exchangeable, strict=True):
            inside = [colours[x] for x in labels]
            inside = tuple(sorted(inside) if swap else inside)
            for position, label in enumerate(labels):
                signatures[label].append((ref, -1 if swap else position, inside))
        frozen = {label: (places[0], *sorted(places[1:])) for label, places in signatures.items()}
        ranks = {signature: n for n, signature in enumerate(sorted(set(frozen.values())))}
        colours = {label: ranks[signature] for label, signature in frozen.items()}
        if len(ranks) == count:
            break
        count = len(ranks)
    return colours
