"""Orbits of joinings of two whole trees. In: the orders of their layers. Out: diagrams with multiplicities.

Pure combinatorics, no arrays. The legs of a tree hang in bunches on its bottom nodes, the copies of its
first nonlinear layer; once every layer's tensor is symmetrised, a joining matters only as the multigraph
it draws on the bottom nodes, up to the automorphisms of the two trees (permute the children of any node).

Orbits are generated, not filtered: canonical partial multigraphs are extended by one edge at a time, always
at the first free leg, and carry the number of partial joinings they stand for. The number of all
joinings, (2n - 1)!! pairings or n! permutations, is never listed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Tree:
    """Orders of the nonlinear layers of a model, from the input up; () is a linear model, one leg."""

    orders: tuple[int, ...]

    @property
    def bunch(self) -> int:
        """Legs of one bottom node."""
        return self.orders[0] if self.orders else 1

    @property
    def bottoms(self) -> int:
        """Number of bottom nodes."""
        return math.prod(self.orders[1:])

    @property
    def legs(self) -> int:
        return math.prod(self.orders)


@dataclass(frozen=True)
class Diagram:
    """One orbit: how many joinings it holds, and the edges of a representative between bottom nodes.

    Nodes are numbered bra first, then ket. An edge (u, u) joins two legs of one node.
    """

    count: int
    edges: tuple[tuple[int, int], ...]


@cache
def diagrams(bra: Tree, ket: Tree, cross_only: bool) -> tuple[Diagram, ...]:
    """Orbits of perfect matchings of all legs, or of those that join every bra leg to a ket leg.

    The counts sum to (2n - 1)!! for 2n legs, or to n! for n legs a side. No diagram exists for an odd number of
    legs, or for cross-only joinings of sides of different size.
    """
    bras, kets = bra.bottoms, ket.bottoms
    size = bras + kets
    if (bra.legs + ket.legs) % 2 or (cross_only and bra.legs != ket.legs):
        return ()
    free = np.array([bra.bunch] * bras + [ket.bunch] * kets)
    slots = _slots(size, _automorphisms(bra, ket))
    pair = {
        edge: n for n, edge in enumerate(itertools.combinations_with_replacement(range(size), 2))
    }
    states: dict[bytes, int] = {np.zeros(len(pair), np.int8).tobytes(): 1}
    for _ in range((bra.legs + ket.legs) // 2):
        grown: list[np.ndarray] = []
        counts: list[int] = []
        for key, count in states.items():
            state = np.frombuffer(key, np.int8)
            left = free - _degrees(state, pair, size)
            first = int(np.flatnonzero(left)[0])
            for other in range(size):
                ways = int(left[other]) - (other == first)
                if ways <= 0 or (cross_only and (first < bras) == (other < bras)):
                    continue
                child = state.copy()
                child[pair[min(first, other), max(first, other)]] += 1
                grown.append(child)
                counts.append(count * ways)
        states = _canonical_sum(np.array(grown), counts, slots)
    edges = list(pair)
    found = []
    for key, count in states.items():
        state = np.frombuffer(key, np.int8)
        found.append(
            Diagram(count, tuple(e for e, n in zip(edges, state, strict=True) for _ in range(n)))
        )
    return tuple(sorted(found, key=lambda d: d.edges))


def _canonical_sum(states: np.ndarray, counts: list[int], slots: np.ndarray) -> dict[bytes, int]:
    """Replace every state by the largest of its images, and add the counts of equal ones."""
    best = states
    for slot in slots:
        image = states[:, slot]
        differs = image != best
        first = differs.argmax(axis=1)
        rows = np.arange(len(states))
        larger = differs.any(axis=1) & (image[rows, first] > best[rows, first])
        best = np.where(larger[:, None], image, best)
    found: dict[bytes, int] = {}
    for state, count in zip(best, counts, strict=True):
        key = state.tobytes()
        found[key] = found.get(key, 0) + count
    return found


def _degrees(state: np.ndarray, pair: dict[tuple[int, int], int], size: int) -> np.ndarray:
    degrees = np.zeros(size, int)
    for (u, v), n in pair.items():
        degrees[u] += state[n]
        degrees[v] += state[n]
    return degrees


def _slots(size: int, automorphisms: list[tuple[int, ...]]) -> np.ndarray:
    """For each permutation of the nodes, where every entry of the edge vector comes from."""
    edges = list(itertools.combinations_with_replacement(range(size), 2))
    index = {edge: n for n, edge in enumerate(edges)}
    return np.array(
        [[index[min(p[u], p[v]), max(p[u], p[v])] for u, v in edges] for p in automorphisms]
    )


def _automorphisms(bra: Tree, ket: Tree) -> list[tuple[int, ...]]:
    """Permutations of all bottom nodes that the two trees allow, each side on its own."""
    shift = bra.bottoms
    return [
        p + tuple(shift + x for x in q)
        for p in _wreath(bra.orders[1:])
        for q in _wreath(ket.orders[1:])
    ]


def _wreath(orders: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The wreath product of symmetric groups as permutations of prod(orders) leaves, bottom order first."""
    if not orders:
        return [(0,)]
    *lower, top = orders
    below = _wreath(tuple(lower))
    size = math.prod(lower)
    found = []
    for order in itertools.permutations(range(top)):
        for inner in itertools.product(below, repeat=top):
            found.append(
                tuple(order[branch] * size + x for branch in range(top) for x in inner[branch])
            )
    return found
