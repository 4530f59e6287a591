"""The canonical form of a small tensor network, a hashable key for isomorphic networks.

Two sub-contractions are the same array, up to the order of its axes, when their networks are
isomorphic: same arrays, joined alike, the same number of open labels. Isomorphic networks have
equal keys, whatever the names of labels, the order of the tensors, and the order of axes that a
tensor may exchange.

The key is found as for graphs. Colour refinement tells labels apart by their occurrences. Where
several labels of a class remain, each member of the first such class is singled out in turn, and
the smallest encoding wins. Members that a symmetry exchanges give the same encoding, so a single
member is tried for all of them; else n parallel bonds would be tried in n! orders. *Twins*, bonds
between exchangeable axes of the same tensors, are recognised by their occurrences; other symmetries
by the equality of two encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from tnsim.engine.ir.program import Labels

Tensor = tuple[int, Labels]
"""A reference to an array, and a label for each of its axes."""

Colours = dict[int, int]
"""A number for every label; labels of one colour have not been told apart."""


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
