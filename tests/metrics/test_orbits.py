"""Diagrams: their numbers, their multiplicities, and brute force over all matchings where that is possible."""

import math

import numpy as np
import pytest
from closeness import assert_close

import tnsim
from tnsim.metrics import orbits
from tnsim.metrics.orbits import Tree, diagrams
from tnsim.problems.families import moment_nodes


@pytest.mark.parametrize(
    "depth, count, without_loops, cross", [(1, 2, 1, 1), (2, 10, 4, 2), (3, 606, 212, 16)]
)
def test_bilinear_stacks(depth, count, without_loops, cross):
    tree = Tree((2,) * depth)
    found = diagrams(tree, tree, False)
    assert len(found) == count
    assert sum(d.count for d in found) == math.prod(range(1, 2 * tree.legs, 2))
    assert sum(all(u != v for u, v in d.edges) for d in found) == without_loops
    crossing = diagrams(tree, tree, True)
    assert len(crossing) == cross and sum(d.count for d in crossing) == math.factorial(tree.legs)


def matchings(legs):
    if not legs:
        yield ()
        return
    first, *rest = legs
    for n, other in enumerate(rest):
        for tail in matchings(rest[:n] + rest[n + 1 :]):
            yield ((first, other), *tail)


def nodes_of(tree, shift):
    return [shift + leg // tree.bunch for leg in range(tree.legs)]


@pytest.mark.parametrize(
    "bra, ket",
    [
        ((2, 2), (2, 2)),
        ((2, 2), (2,)),
        ((2, 3), (2,)),
        ((3, 2), (2,)),
        ((5,), (5,)),
        ((2, 2), ()),
        ((4,), (2, 2)),
    ],
)
@pytest.mark.parametrize("cross_only", [False, True])
def test_against_all_matchings(bra, ket, cross_only):
    """Every matching belongs to exactly one generated orbit, and orbits hold as many as they claim."""
    bra, ket = Tree(bra), Tree(ket)
    node = nodes_of(bra, 0) + nodes_of(ket, bra.bottoms)
    from tnsim.metrics.orbits import _automorphisms_of_both

    group = _automorphisms_of_both(bra, ket)

    def canonical(edges):
        return min(tuple(sorted(tuple(sorted((g[u], g[v]))) for u, v in edges)) for g in group)

    counts: dict = {}
    if (bra.legs + ket.legs) % 2 == 0:
        for matching in matchings(list(range(bra.legs + ket.legs))):
            if cross_only and any((x < bra.legs) == (y < bra.legs) for x, y in matching):
                continue
            key = canonical([(node[x], node[y]) for x, y in matching])
            counts[key] = counts.get(key, 0) + 1
    found = {canonical(d.edges): d.count for d in diagrams(bra, ket, cross_only)}
    assert found == counts


def test_depth_three_grows_from_few_partial_joinings(monkeypatch):
    """Two million pairings of 16 legs are never enumerated."""
    tnsim.session().clear()
    held = []
    grown = orbits._Multigraphs.grown

    def counted(self, partial):
        held.append(len(partial))
        return grown(self, partial)

    monkeypatch.setattr(orbits._Multigraphs, "grown", counted)
    diagrams(Tree((2, 2, 2)), Tree((2, 2, 2)), False)
    assert len(held) == 8 and max(held) == 670


@pytest.mark.parametrize("legs, magnification", [(4, 3), (8, 10), (12, 60), (16, 400)])
def test_moment_nodes_undo_the_over_counting(legs, magnification):
    """sum_j w_j t_j^k (2k-1)!! = 1 for every power that occurs, with few digits lost."""
    nodes = moment_nodes(legs)
    for k in range(legs // 2 + 1):
        total = np.dot(nodes.weights, np.power(nodes.points, k)) * math.prod(range(1, 2 * k, 2))
        assert_close(total, 1, scale=nodes.magnification, rtol=1e-13)
    assert nodes.magnification < magnification
