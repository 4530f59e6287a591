"""Canonical form of a small tensor network. In: tensors by reference, their labels. Out: a hashable key.

Two sub-contractions are the same array, up to the order of its axes, when their networks are isomorphic:
same arrays, joined alike, the same number of open labels. The key says so regardless of label names, of
the order of the tensors, and of the exchange of the two legs of a symmetric array.

Colour refinement first; where symmetric positions remain, each member of the first undecided class is
singled out in turn and the smallest encoding wins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

Tensor = tuple[int, tuple[int, ...]]


def canonical(
    tensors: Sequence[Tensor], open_labels: Sequence[int], symmetric: Callable[[int], bool]
) -> tuple[Hashable, tuple[int, ...]]:
    """(key, open labels in canonical order) of the network of `tensors`, each a reference and its labels."""
    exchangeable = [symmetric(ref) for ref, _ in tensors]
    is_open = set(open_labels)
    colours = {label: int(label in is_open) for _, labels in tensors for label in labels}
    best = _search(tensors, exchangeable, colours)
    rank, encoding = best
    order = tuple(sorted(is_open, key=rank.__getitem__))
    return (encoding, tuple(rank[label] for label in order)), order


def _search(tensors, exchangeable, colours) -> tuple[dict[int, int], tuple]:
    colours = _refine(tensors, exchangeable, colours)
    classes: dict[int, list[int]] = {}
    for label, colour in colours.items():
        classes.setdefault(colour, []).append(label)
    undecided = [c for c in sorted(classes) if len(classes[c]) > 1]
    if not undecided:
        encoding = sorted(
            (ref, tuple(sorted(colours[x] for x in labels) if swap else (colours[x] for x in labels)))
            for (ref, labels), swap in zip(tensors, exchangeable, strict=True)
        )
        return colours, tuple(encoding)
    best = None
    for label in classes[undecided[0]]:
        single = {x: 2 * c for x, c in colours.items()}
        single[label] -= 1
        found = _search(tensors, exchangeable, single)
        if best is None or found[1] < best[1]:
            best = found
    return best


def _refine(tensors, exchangeable, colours) -> dict[int, int]:
    """Split classes of labels by where they occur until nothing splits any more."""
    count = len(set(colours.values()))
    while True:
        seen: dict[int, list] = {label: [] for label in colours}
        for (ref, labels), swap in zip(tensors, exchangeable, strict=True):
            inside = tuple(colours[x] for x in labels)
            inside = tuple(sorted(inside)) if swap else inside
            for position, label in enumerate(labels):
                seen[label].append((ref, inside, -1 if swap else position))
        signatures = {label: (colours[label], sorted(places)) for label, places in seen.items()}
        ordered = sorted(signatures.values())
        ranks: list = []
        for signature in ordered:
            if not ranks or ranks[-1] != signature:
                ranks.append(signature)
        lookup = {_freeze(signature): i for i, signature in enumerate(ranks)}
        colours = {label: lookup[_freeze(signature)] for label, signature in signatures.items()}
        if len(ranks) == count:
            return colours
        count = len(ranks)


def _freeze(signature) -> tuple:
    return signature[0], tuple(signature[1])
