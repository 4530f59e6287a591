"""Canonical form of a small tensor network. In: tensors by reference, labels. Out: a hashable key.

Two sub-contractions are the same array, up to the order of its axes, when their networks are
isomorphic: same arrays, joined alike, the same number of open labels. The key says so regardless of
the names of labels, of the order of the tensors, and of the order of axes that a tensor may
exchange.

It is found as for graphs: colour refinement, then, where symmetric positions remain, each member of
the first undecided class is singled out in turn, and the smallest encoding wins. Members that a
symmetry exchanges give the same, so one of them speaks for all; else n parallel bonds would be
tried in n! orders. *Twins*, bonds between exchangeable axes of the same tensors, are seen at once;
other symmetries by two encodings that are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

Labels = tuple[int, ...]
Tensor = tuple[int, Labels]
"""A reference to an array, and a label for each of its axes."""

Colours = dict[int, int]
"""A number for every label; labels of one colour have not been told apart."""


class _Tensor(NamedTuple):
    """A tensor's reference, the labels of axes that stay in place, those of axes that exchange."""

    ref: int
    fixed: Labels
    exchangeable: Labels

    def seen(self, colours: Colours) -> tuple[Labels, Labels]:
        """The colours of its labels, in an order that does not depend on how axes exchange."""
        fixed = tuple([colours[label] for label in self.fixed])
        return fixed, tuple(sorted([colours[label] for label in self.exchangeable]))


def canonical(
    tensors: Sequence[Tensor], open_labels: Sequence[int], exchangeable: Callable[[int], int]
) -> tuple[Hashable, Labels]:
    """The canonical form of a network.

    Args:
        tensors: Each a reference and its labels.
        open_labels: Labels that are not summed over.
        exchangeable: How many axes of a reference, the last ones, may be exchanged.

    Returns:
        The key, and the open labels in canonical order.

    Example:
        A symmetric matrix times a vector, from either side.

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
    colours = {label: int(label in is_open) for _, labels in tensors for label in labels}
    encoding, ranks = _smallest(network, colours)
    order = tuple(sorted(is_open, key=ranks.__getitem__))
    return (encoding, tuple(ranks[label] for label in order)), order


def exchanges(
    tensors: Sequence[Tensor], open_labels: Sequence[int], exchangeable: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    """Pairs of open labels that may change places: the array is symmetric in these two axes.

    Args:
        tensors: Each a reference and its labels.
        open_labels: Labels that are not summed over, the axes of the array.
        exchangeable: How many axes of a reference, the last ones, may be exchanged.

    Yields:
        Places in `open_labels`.

    Example:
        `A A^T` is symmetric, `A B^T` is not.

        >>> list(exchanges([(7, (0, 1)), (7, (2, 1))], [0, 2], lambda ref: 0))
        [(0, 1)]
        >>> list(exchanges([(7, (0, 1)), (8, (2, 1))], [0, 2], lambda ref: 0))
        []
    """

    def form(labels: Sequence[int]) -> Hashable:
        # Every axis is marked by a tensor of its own, so that only its place tells it from others.
        marks = [(-1 - place, (label,)) for place, label in enumerate(labels)]
        key, _ = canonical(
            [*tensors, *marks], labels, lambda ref: 0 if ref < 0 else exchangeable(ref)
        )
        return key

    given = form(open_labels)
    for one, other in itertools.combinations(range(len(open_labels)), 2):
        exchanged = list(open_labels)
        exchanged[one], exchanged[other] = open_labels[other], open_labels[one]
        if form(exchanged) == given:
            yield one, other


def _smallest(network: list[_Tensor], colours: Colours) -> tuple[tuple, Colours]:
    """The smallest encoding of the network that its symmetries allow, and the labels' ranks in it.

    An encoding lists the tensors with ranks for labels, so equal encodings are equal networks.
    """
    colours = _refined(network, colours)
    candidates = _candidates(network, colours)
    if not candidates:
        return _encoding(network, colours), colours
    first, *others = candidates
    start = _singled_out(colours, first)
    smallest = _smallest(network, start)
    some_encoding = _some_encoding(network, start)
    for label in others:
        start = _singled_out(colours, label)
        if _some_encoding(network, start) == some_encoding:
            continue  # a symmetry takes the first candidate to this one: nothing new
        smallest = min(smallest, _smallest(network, start), key=lambda attempt: attempt[0])
    return smallest


def _some_encoding(network: list[_Tensor], colours: Colours) -> tuple:
    """One of the encodings that singling out one label after the other leads to."""
    colours = _refined(network, colours)
    while candidates := _candidates(network, colours):
        colours = _refined(network, _singled_out(colours, candidates[0]))
    return _encoding(network, colours)


def _candidates(network: list[_Tensor], colours: Colours) -> list[int]:
    """Labels of the first class of several, one of each set of twins; none where all differ."""
    members: dict[int, list[int]] = {}
    for label, colour in colours.items():
        members.setdefault(colour, []).append(label)
    undecided = [colour for colour, labels in members.items() if len(labels) > 1]
    if not undecided:
        return []
    twins = {_occurrences(network, label): label for label in members[min(undecided)]}
    return list(twins.values())


def _singled_out(colours: Colours, label: int) -> Colours:
    """Colours in which a label comes just before the rest of its class."""
    doubled = {x: 2 * colour for x, colour in colours.items()}
    doubled[label] -= 1
    return doubled


def _encoding(network: list[_Tensor], colours: Colours) -> tuple:
    return tuple(sorted([(t.ref, *t.seen(colours)) for t in network]))


def _occurrences(network: list[_Tensor], label: int) -> tuple[tuple[int, int], ...]:
    """Where a label stands: numbers of tensors with the axis, -1 for all that exchange."""
    found: list[tuple[int, int]] = []
    for number, tensor in enumerate(network):
        found += [(number, axis) for axis, own in enumerate(tensor.fixed) if own == label]
        found += [(number, -1) for own in tensor.exchangeable if own == label]
    return tuple(found)


def _refined(network: list[_Tensor], colours: Colours) -> Colours:
    """Split classes of labels by where they occur until nothing splits any more.

    Ranks of sorted signatures are the new colours; the old colour comes first in a signature, so
    classes split but never change their order.
    """
    count = len(set(colours.values()))
    while count < len(colours):
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
        if len(ranks) == count:
            break
        count = len(ranks)
    return colours
