"""Orbits of joinings: of the legs of two layers, weighted, and of two whole trees, counted.

*Whole trees.* The module is pure combinatorics without arrays. The legs of a tree hang in bunches
on its bottom nodes, which are the copies of its first nonlinear layer. Once the tensor of every
layer is symmetrised, the legs of a bunch are alike, and so are the children of a node. A joining is
then known by the multigraph that it draws on the bottom nodes, up to the automorphisms of the two
trees, which permute the children of any node.

Orbits are grown edge by edge, not filtered out of all (2n - 1)!! pairings of 2n legs or all n!
permutations. A growth step takes the first node with a free leg and joins that leg to a free leg of
any node. Every joining has a partner for this leg, so each joining is built exactly once. Legs of a
bunch are alike, so a partial joining is known by its multigraph, and a step to a node with f free
legs stands for f steps. Multigraphs that differ by an automorphism have continuations that differ
by the same automorphism, so their counts are added and only the canonical multigraph stays. Three
bilinear layers a side have two million pairings; the growth never holds more than 670 multigraphs,
and ends in 606 orbits.

*Layers.* A joining pairs some legs, hands the other legs to the mean (caps them), and says on which
side the tensor of the layer has to be symmetrised before this representative may stand for its
whole orbit: an exchange of legs keeps the *function* of a layer, but not its tensor.

*Hermite caps.* For a Gaussian x with raw second moment S = E[x x^T] = C + m m^T and mean m, the
moment generating function is

    exp(t.m + t.C t / 2) = exp(t.S t / 2) exp(t.m - (t.m)^2 / 2).

The first factor generates pairings with S. The second generates the Hermite polynomials at 1,
`exp(z - z^2 / 2) = sum_k He_k(1) z^k / k!` with z = t.m, and so gives k legs handed to m the weight
He_k(1). Isserlis' theorem with a mean therefore reads

    E[x_1 ... x_N] = sum over k, over sets of k legs handed to m, over pairings of the rest with S,
                     of He_k(1),

with He_k the probabilists' Hermite polynomials: 1, 1, 0, -2, -2, 6, ... at 1. The constant
coordinate of a lifted input needs no further rule: it is a Gaussian of variance 0 and mean 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from tnsim.names import SIDES, Side
from tnsim.sessions import session_cache

Edge = tuple[int, int]


@dataclass(frozen=True)
class Tree:
    """A model as a tree of nonlinear layers.

    Args:
        orders: Orders of the nonlinear layers, from the input up; () for a linear model (one leg).
    """

    orders: tuple[int, ...]

    @property
    def bunch(self) -> int:
        """Number of legs of a bottom node."""
        return self.orders[0] if self.orders else 1

    @property
    def bottoms(self) -> int:
        """Number of bottom nodes."""
        return math.prod(self.orders[1:])

    @property
    def legs(self) -> int:
        """Number of legs, which is the degree of the model."""
        return math.prod(self.orders)


@dataclass(frozen=True)
class Diagram:
    """An orbit of joinings.

    Args:
        count: Number of joinings in the orbit.
        edges: Edges (u, v) of a representative between bottom nodes, with u <= v, in order. Nodes
            are numbered bra first, then ket; (u, u) joins two legs of the same node.
    """

    count: int
    edges: tuple[Edge, ...]


@session_cache
def diagrams(bra: Tree, ket: Tree, cross_only: bool) -> tuple[Diagram, ...]:
    """Orbits of perfect matchings of all legs, or of matchings of bra legs with ket legs.

    Args:
        bra: Tree of the first model.
        ket: Tree of the second model.
        cross_only: Whether legs of a single model may not be joined.

    Returns:
        Diagrams in the order of their edges. The counts sum to (2n - 1)!! for 2n legs together, or
        to n! for n legs a side. The tuple is empty for an odd number of legs, and for cross-only
        joinings of sides of different size.

    Example:
        Two bilinear layers: either both self-pairings, or both cross pairs in 2 ways.

        >>> bilinear = Tree((2,))
        >>> for diagram in diagrams(bilinear, bilinear, cross_only=False):
        ...     print(diagram.count, diagram.edges)
        1 ((0, 0), (1, 1))
        2 ((0, 1), (0, 1))
    """
    legs = bra.legs + ket.legs
    if legs % 2 or (cross_only and bra.legs != ket.legs):
        return ()
    graphs = _Multigraphs(bra, ket, cross_only)
    orbits = {graphs.empty: 1}
    # Orbits are kept to one representative after every edge. Listing all matchings first and
    # sorting them into orbits afterwards would take (2n - 1)!! steps.
    for _ in range(legs // 2):  # an edge joins two legs
        orbits = graphs.grown(orbits)
    complete = [Diagram(count, graphs.edges_of(key)) for key, count in orbits.items()]
    return tuple(sorted(complete, key=lambda diagram: diagram.edges))


def expected_count(bra: Tree, ket: Tree, cross_only: bool) -> float:
    """About the number of `diagrams`, within a factor of 2.5 up to 16 legs, without growing them.

    Growing takes up to a tenth of a second then, and seconds to minutes of 20 legs.

    Automorphisms move most multigraphs, so an orbit has nearly as many as there are automorphisms;
    those that stay where they are make up for the factor 2.

    Args:
        bra: Tree of the first model.
        ket: Tree of the second model.
        cross_only: Whether legs of a single model may not be joined.

    Example:
        >>> three = Tree((2, 2, 2))
        >>> len(diagrams(three, three, False)), round(expected_count(three, three, False))
        (606, 567)
    """
    sides = [(tree.bunch,) * tree.bottoms for tree in (bra, ket)]
    moved = math.prod(_automorphism_count(tree.orders[1:]) for tree in (bra, ket))
    return max(1.0, 2 * _multigraph_count(*sides, cross_only) / moved)


def _automorphism_count(uppers: tuple[int, ...]) -> int:
    """Number of automorphisms of a tree whose layers above the first have these orders."""
    count, copies = 1, 1
    for order in reversed(uppers):
        count *= math.factorial(order) ** copies
        copies *= order
    return count


@functools.cache
def _multigraph_count(bra: tuple[int, ...], ket: tuple[int, ...], cross_only: bool) -> int:
    """Number of multigraphs on nodes with these numbers of free legs, as `diagrams` grows them."""
    bra, ket = (tuple(sorted(free for free in side if free)) for side in (bra, ket))
    if not bra:
        if cross_only or not ket:
            return int(not ket)
        return _multigraph_count(ket, (), False)
    *rest, first = bra
    if cross_only:
        return sum(_multigraph_count(tuple(rest), left, True) for left in _with_fewer(ket, first))
    total = 0
    for loops in range(first // 2 + 1):
        for left in _with_fewer((*rest, *ket), first - 2 * loops):
            total += _multigraph_count(left[: len(rest)], left[len(rest) :], False)
    return total


def _with_fewer(free: tuple[int, ...], legs: int) -> Iterator[tuple[int, ...]]:
    """All ways to take a number of legs from some nodes, as the numbers that are left free."""
    if not free:
        if legs == 0:
            yield ()
        return
    for taken in range(min(free[0], legs) + 1):
        for left in _with_fewer(free[1:], legs - taken):
            yield (free[0] - taken, *left)


class _Multigraphs:
    """Partial joinings of two trees as vectors of multiplicities, an entry per possible edge.

    A vector's bytes serve as its key. Multiplicities are at most half the legs, so int8 holds them.
    """

    def __init__(self, bra: Tree, ket: Tree, cross_only: bool):
        self.bras = bra.bottoms
        self.cross_only = cross_only
        # A bottom node has as many legs as the first nonlinear layer, its bunch: only these legs
        # read the input.
        self.legs = np.array([bra.bunch] * bra.bottoms + [ket.bunch] * ket.bottoms)
        nodes = range(len(self.legs))
        self.edges: list[Edge] = list(itertools.combinations_with_replacement(nodes, 2))
        self.place = {edge: n for n, edge in enumerate(self.edges)}
        self.images = self._image_places(_automorphisms_of_both(bra, ket))

    @property
    def empty(self) -> bytes:
        """Key of the multigraph without edges."""
        return np.zeros(len(self.edges), np.int8).tobytes()

    def edges_of(self, key: bytes) -> tuple[Edge, ...]:
        """The edges of a multigraph, multiple edges repeated."""
        edges: list[Edge] = []
        for edge, times in zip(self.edges, np.frombuffer(key, np.int8), strict=True):
            edges += [edge] * int(times)
        return tuple(edges)

    def grown(self, orbits: dict[bytes, int]) -> dict[bytes, int]:
        """Canonical multigraphs with another edge, and the number of partial joinings of each."""
        graphs: list[np.ndarray] = []
        counts: list[int] = []
        for key, count in orbits.items():
            graph = np.frombuffer(key, np.int8)
            # Any representative will do: automorphisms carry the continuations of one image to
            # those of another, so an orbit has as many continuations from each.
            free = self.legs - self._joined_legs(graph)
            # The next edge starts at a leg of the first node with a free leg. That is no choice to
            # count: every leg is joined in the end, and this leg is joined now.
            first = int(np.flatnonzero(free)[0])
            for other, legs in enumerate(free):
                ways = int(legs) - (other == first)  # a leg is not joined to itself
                one_side = (first < self.bras) == (other < self.bras)
                if ways <= 0 or (self.cross_only and one_side):
                    continue
                larger = graph.copy()
                larger[self.place[min(first, other), max(first, other)]] += 1
                graphs.append(larger)
                counts.append(count * ways)
        return self._canonical_sum(np.array(graphs), counts)

    def _joined_legs(self, graph: np.ndarray) -> np.ndarray:
        """Number of joined legs of every node; a loop takes two legs of its node."""
        degrees = np.zeros(len(self.legs), int)
        for (u, v), times in zip(self.edges, graph, strict=True):
            degrees[u] += times
            degrees[v] += times
        return degrees

    def _image_places(self, automorphisms: list[tuple[int, ...]]) -> np.ndarray:
        """The place from which each entry of an edge vector is taken, for every automorphism."""
        images = []
        for p in automorphisms:
            # Edges have no direction, so the image of (u, v) is named with its smaller node first.
            moved = [(min(p[u], p[v]), max(p[u], p[v])) for u, v in self.edges]
            images.append([self.place[edge] for edge in moved])
        return np.array(images)

    def _canonical_sum(self, graphs: np.ndarray, counts: list[int]) -> dict[bytes, int]:
        """Replace graphs by their largest image, in lexical order, and add up equal graphs."""
        # All graphs go through one automorphism after the other; the largest image so far stays.
        # Two graphs have the same largest image if and only if an automorphism maps one to the
        # other.
        rows = np.arange(len(graphs))
        largest = graphs
        for places in self.images:
            # All graphs move at once: a column of the array is an edge, and an automorphism
            # permutes edges.
            image = graphs[:, places]
            differs = image != largest
            first = differs.argmax(axis=1)  # 0 where nothing differs
            larger = differs.any(axis=1) & (image[rows, first] > largest[rows, first])
            largest = np.where(larger[:, None], image, largest)
        orbits: dict[bytes, int] = {}
        for graph, count in zip(largest, counts, strict=True):
            key = graph.tobytes()
            # Partial joinings of one orbit can come from several smaller orbits.
            orbits[key] = orbits.get(key, 0) + count
        return orbits


def _automorphisms_of_both(bra: Tree, ket: Tree) -> list[tuple[int, ...]]:
    """Permutations of all bottom nodes that the two trees allow, each side on its own."""
    both = []
    for p in automorphisms(bra.orders[1:]):
        for q in automorphisms(ket.orders[1:]):
            # No automorphism exchanges a node of the bra with a node of the ket: the two models
            # differ.
            both.append(p + tuple(bra.bottoms + node for node in q))
    return both


def automorphisms(orders: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Automorphisms of a single tree as permutations of its prod(orders) bottom nodes.

    The automorphisms form a wreath product of symmetric groups: an automorphism for every branch
    below the root, and a permutation of the branches.
    """
    if not orders:
        return [(0,)]
    *lower, top = orders  # the root has `top` branches, each a tree of the lower orders
    branch_automorphisms = automorphisms(tuple(lower))
    size = math.prod(lower)
    moves = []
    for order in itertools.permutations(range(top)):
        for inner in itertools.product(branch_automorphisms, repeat=top):
            moved: list[int] = []
            for branch in range(top):
                moved += [order[branch] * size + node for node in inner[branch]]
            moves.append(tuple(moved))
    return moves


class PairingRule(Enum):
    """The sum that all joinings of the legs of two layers together amount to.

    Attributes:
        AS_WRITTEN: Leg i with leg i, the inner product of two tensors.
        SYMMETRISED: Leg i with leg i, the inner product of two tensors symmetrised over their legs.
        ISSERLIS: All pairings, the expectation of a product of Gaussians.
    """

    AS_WRITTEN = auto()
    SYMMETRISED = auto()
    ISSERLIS = auto()


class JoinedLeg(NamedTuple):
    """Input leg `index` of the layer on a single side, "A" for the bra and "B" for the ket."""

    side: Side
    index: int


@dataclass(frozen=True)
class Joining:
    """An orbit of joinings.

    Args:
        weight: Number of joinings in the orbit, times He_k(1) for k capped legs.
        pairs: Legs that a representative joins through the second moment.
        capped: Legs that the representative hands to the mean.
        symmetrised: Sides where the tensor is first averaged over all orders of its legs.
    """

    weight: float
    pairs: tuple[tuple[JoinedLeg, JoinedLeg], ...]
    capped: tuple[JoinedLeg, ...] = ()
    symmetrised: tuple[Side, ...] = ()


def joinings(rule: PairingRule, bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    """The ways in which the legs of two layers are joined, one for every orbit.

    Args:
        rule: Rule of the metric. The tree metrics, all but Isserlis' sum, join layers of one order.
        bra: Number of legs of the layer in the bra.
        ket: Number of legs of the layer in the ket.
        centred: Whether the mean is zero, so that no leg is handed to it.

    Returns:
        Joinings with their weights.

    Example:
        >>> joinings(PairingRule.AS_WRITTEN, 1, 1, centred=True)[0].pairs
        ((JoinedLeg(side='A', index=0), JoinedLeg(side='B', index=0)),)
        >>> [joined.weight for joined in joinings(PairingRule.ISSERLIS, 2, 2, centred=True)]
        [1.0, 2.0]
    """
    if rule is PairingRule.ISSERLIS:
        return gaussian(bra, ket, centred)
    return straight(bra, symmetrised=rule is PairingRule.SYMMETRISED)


def straight(order: int, symmetrised: bool) -> tuple[Joining, ...]:
    """The joining of the tree metrics: leg i of the bra with leg i of the ket.

    If the metric symmetrises, a single side is enough. A symmetriser is idempotent, P = P^T P, and
    a symmetriser on the legs of the bra may be moved over to the ket, through second moments that
    are the same on every leg (paper, appendix A.2).
    """
    # The n! ways to join n legs of either side are one orbit under permutations of the ket's legs;
    # the mean over the orbit has weight 1.
    pairs = tuple((JoinedLeg("A", i), JoinedLeg("B", i)) for i in range(order))
    averaged: tuple[Side, ...] = ()
    if symmetrised and order > 1:
        averaged = ("B",)
    return (Joining(1.0, pairs, symmetrised=averaged),)


@session_cache
def gaussian(bra: int, ket: int, centred: bool) -> tuple[Joining, ...]:
    """Orbits of all pairings of the legs of two layers, with legs left over for the mean.

    Legs of a side are exchangeable, so an orbit is known by its numbers of cross pairs, of pairs
    inside either side, and of capped legs.

    Args:
        bra: Number of legs of the layer in the bra.
        ket: Number of legs of the layer in the ket; 0 for the mean of the output of the bra's.
        centred: Whether the mean is zero, so that no leg is capped.

    Returns:
        Joinings. Their weights sum to (bra + ket - 1)!! if centred, and else to 1, the Gaussian
        moment of order bra + ket at S = m = 1. There are none where the moment is 0.

    Source:
        Isserlis' theorem (paper, appendix A.3), with a mean as above.
    """
    joinings = []
    for cross in range(min(bra, ket) + 1):
        for bra_caps in _numbers_of_caps(bra - cross, centred):
            for ket_caps in _numbers_of_caps(ket - cross, centred):
                count = (
                    _ways_on_a_side(bra, cross, bra_caps)
                    * _ways_on_a_side(ket, cross, ket_caps)
                    * math.factorial(cross)  # which bra leg crosses to which ket leg
                )
                # With S the raw second moment, k legs handed to the mean m are worth m^k He_k(1):
                # He_k takes off the pairs among them that the part m m^T of S counts already.
                # He_2(1) = 0 and He_3(1) = -2.
                weight = float(hermite_at_one(bra_caps + ket_caps) * count)
                if weight:
                    caps = bra_caps, ket_caps
                    joinings.append(_representative(weight, (bra, ket), cross, caps))
    return tuple(joinings)


@session_cache
def hermite_at_one(k: int) -> int:
    """The number He_k(1), by the recurrence He_{k+1}(z) = z He_k(z) - k He_{k-1}(z)."""
    if k < 2:
        return 1
    return hermite_at_one(k - 1) - (k - 1) * hermite_at_one(k - 2)


def _numbers_of_caps(legs: int, centred: bool) -> range:
    """Possible numbers of capped legs, such that the other legs can be paired."""
    odd = legs % 2
    if centred:
        return range(0) if odd else range(1)
    return range(odd, legs + 1, 2)


def _ways_on_a_side(legs: int, cross: int, caps: int) -> int:
    """Number of ways to choose crossing and capped legs of a side and to pair up the rest."""
    rest = legs - cross - caps
    pairings = math.prod(range(1, rest, 2))  # (rest - 1)!!
    return math.comb(legs, cross) * math.comb(legs - cross, caps) * pairings


def _representative(
    weight: float, legs: tuple[int, int], cross: int, caps: tuple[int, int]
) -> Joining:
    """The joining of an orbit whose legs are in order: first crossing, then capped, then paired."""
    pairs = [(JoinedLeg("A", i), JoinedLeg("B", i)) for i in range(cross)]
    capped: list[JoinedLeg] = []
    for side, count, capped_here in zip(SIDES, legs, caps, strict=True):
        first_paired = cross + capped_here
        capped += [JoinedLeg(side, i) for i in range(cross, first_paired)]
        pairs += [
            (JoinedLeg(side, i), JoinedLeg(side, i + 1)) for i in range(first_paired, count, 2)
        ]
    return Joining(weight, tuple(pairs), tuple(capped), _to_symmetrise(legs, cross, caps))


def _to_symmetrise(legs: tuple[int, int], cross: int, caps: tuple[int, int]) -> tuple[Side, ...]:
    """Sides on which a representative treats legs unequally.

    The legs of a side are alike if all of them are capped, or if the side has exactly two legs,
    paired with each other: every order gives the same joining, and there is nothing to average.
    They are alike too if all of them cross to a side that is symmetrised itself. Four or more legs
    paired among themselves are not alike, as their partners differ. If all legs of both sides
    cross, only their order against each other matters, and it is enough to symmetrise the ket.
    """
    if legs[0] == legs[1] == cross:
        return ("B",) if cross > 1 else ()
    unequal = []
    for side, count, capped in zip(SIDES, legs, caps, strict=True):
        paired = count - cross - capped
        alike = count in (cross, capped, paired) and paired <= 2
        if not alike:
            unequal.append(side)
    return tuple(unequal)
