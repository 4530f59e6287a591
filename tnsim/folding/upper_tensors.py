"""A model seen from its first-layer nodes: one symmetric tensor. In: the trees. Out: definitions.

In the outputs y of its first nonlinear layer, a model is a homogeneous polynomial

    p_k(y) = sum W[k, a_1, ..., a_n] y[a_1] ... y[a_n],

with an index of W for each of the n first-layer nodes. The tree gives a W that is symmetric under
the tree's automorphisms only. As all y are the same, its mean over all orders of the nodes is the
same polynomial: for three bilinear layers the mean over the three ways to put four nodes in pairs.

With that W it no longer matters which node is joined to which, so that joinings *within* the model
are summed over once. Left with f free nodes it is

    W_f[k, a_1, ..., a_f] = sum over joinings of the other n - f nodes among themselves
                          = sum W[k, a_1, ..., a_n] E[y[a_(f+1)] ... y[a_n]].

These are the coefficients of the polynomial in Wick products,

    p_k(y) = sum over f of C(n, f) <W_f[k], :y^f:>,

of which two, of two models, have for expectation the sum over crossing joinings alone, those in
which every connected part has nodes of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from tnsim.engine.problem import Definition, Merge, Operand, Term
from tnsim.folding.diagram_terms import Bottom, first_layer
from tnsim.folding.tree_operands import TreeOperands, layer_tensor, upper_tensor
from tnsim.metrics.orbits import Tree, automorphisms, diagrams
from tnsim.names import Side

MAX_ELEMENTS = 2**27
"""Of W; with more, models are contracted through their hidden units alone."""


def has_upper_tensors(parts: TreeOperands) -> bool:
    """Whether these models are contracted through upper tensors as well.

    That is worth it where a model has nodes between the first and the last layer, or a last layer
    of more than two legs; a tensor of two legs is symmetric as it is.
    """
    nodes = [parts.trees[side].bottoms for side in parts.models]
    if min(nodes) == 1 or max(nodes) == 2:
        return False
    return max(elements(parts, side) for side in parts.models) <= MAX_ELEMENTS


def elements(parts: TreeOperands, side: Side) -> int:
    """Entries of W."""
    layers = parts.models[side]
    groups = parts.groups[side].nonlinear
    outputs = layers[-1].d_out + parts.lifted
    first = groups[0]
    width = layers[(first.number, *first.linear_after)[-1]].d_out + parts.lifted
    return outputs * width ** parts.trees[side].bottoms


def joinings_within(parts: TreeOperands, side: Side, free: int) -> int:
    """Ways to join the legs of all nodes but the free ones among themselves: (2m - 1)!!."""
    tree = parts.trees[side]
    legs = tree.bunch * (tree.bottoms - free)
    return math.prod(range(legs - 1, 0, -2))


def upper_tensors(parts: TreeOperands) -> Iterator[Definition]:
    """W of every model, and what is left of it with fewer free nodes."""
    for side in parts.models:
        tree = parts.trees[side]
        yield _symmetrised(parts, side)
        for free in reversed(range(tree.bottoms)):
            if tree.bunch * (tree.bottoms - free) % 2 == 0:
                yield _joined_within(parts, side, free)


def _symmetrised(parts: TreeOperands, side: Side) -> Definition:
    """W with all nodes free: the mean over all orders of the nodes, equal ones taken once."""
    tree = parts.trees[side]
    nodes = [f"a{node}" for node in range(tree.bottoms)]
    orders = list(_distinct_orders(tree))
    terms = []
    for order in orders:
        terms.append(Term(1 / len(orders), _tree_over(parts, side, [nodes[n] for n in order])))
    name = upper_tensor(side, tree.bottoms)
    return Definition(name, ("k", *nodes), tuple(terms), exchangeable=len(nodes))


def _distinct_orders(tree: Tree) -> Iterator[tuple[int, ...]]:
    """Orders of the first-layer nodes, one of each set that the tree's automorphisms permute."""
    known: set[tuple[int, ...]] = set()
    symmetries = automorphisms(tree.orders[1:])
    for order in itertools.permutations(range(tree.bottoms)):
        if order not in known:
            known.update(tuple(order[n] for n in moved) for moved in symmetries)
            yield order


def _tree_over(parts: TreeOperands, side: Side, nodes: list[str]) -> tuple[Operand, ...]:
    """The layers above level 0, joined to nodes in the given order."""
    operands: list[Operand] = []
    bonds = nodes
    orders = parts.trees[side].orders
    for level in range(1, len(orders)):
        order = orders[level]
        above = [f"{level}.{copy}" for copy in range(len(bonds) // order)]
        if level == len(orders) - 1:
            above = ["k"]
        for copy, bond in enumerate(above):
            legs = bonds[copy * order : (copy + 1) * order]
            operands.append(Operand(layer_tensor(side, level), (bond, *legs)))
        bonds = above
    return tuple(operands)


def _joined_within(parts: TreeOperands, side: Side, free: int) -> Definition:
    """W_f: the last nodes of W joined among themselves, in all ways."""
    tree = parts.trees[side]
    nodes = [f"a{node}" for node in range(tree.bottoms)]
    whole = Operand(upper_tensor(side, tree.bottoms), ("k", *nodes))
    joined = [Bottom(side, node) for node in nodes[free:]]
    nobody = Tree((tree.bunch, 0))  # without nodes: all joinings are among those of one model
    terms = []
    for diagram in diagrams(Tree((tree.bunch, len(joined))), nobody, cross_only=False):
        merged = Merge()
        operands = [whole, *first_layer(parts, joined, diagram.edges, True, merged)]
        terms.append(Term(float(diagram.count), merged.renamed(operands)))
    indices = ("k", *nodes[:free])
    return Definition(upper_tensor(side, free), indices, tuple(terms), exchangeable=free)
