"""A diagram as a product of arrays, in several ways. In: a diagram, two trees. Out: operands.

A diagram says which first-layer nodes of bra and ket are joined by which edges (see `orbits`).
Its value is a contraction: the tensors of both trees, joined at their outputs, and a second moment
along every edge. The same value may be written over different arrays (see `tree_operands` for
their names), and which way is cheapest depends on widths, ranks and the diagram:

    factors    each layer's tensor as D and P over its hidden units
    dense      each layer's tensor T as a whole
    units      contracted over all bonds between layers beforehand, so that only hidden units are
               left: a vertex per node of the trees, a matrix U up every branch and G along every
               edge, K between the outputs
    matrices   the same, but the first-layer nodes are no vertices: each is the matrix M[h] over its
               two legs that a unit h of level 1 sees, and edges join legs
    tops       the same, and all above level 1 is one tensor V from its units to the outputs

*Loops.* An edge that joins the two legs of one node contracts its tensor with the second moment,
which gives a vector, the node's mean. All nodes with a loop share it, so it is defined once, and a
diagram uses the vector instead of the node: what is left to contract are pairings between
*different* nodes. (Wick ordering does the same to the polynomials themselves: it subtracts from
each node its mean, and pairings inside a node are gone.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from tnsim.engine.problem import Merge, Operand
from tnsim.folding.tree_operands import (
    OUTPUT,
    TreeOperands,
    node_mean,
    output_factor,
    unit_to_legs,
    unit_to_mean,
    unit_to_unit,
    units_along_edge,
    units_at_outputs,
    units_to_outputs,
    upper_tensor,
)
from tnsim.metrics.orbits import Diagram, Edge, Tree
from tnsim.names import SLOTS, Pair, Side, Slot

Form = Literal["factors", "units", "dense", "matrices", "tops"]


def forms(parts: TreeOperands) -> tuple[Form, ...]:
    """The ways in which every diagram of these models can be written.

    Args:
        parts: The models' trees. Attention, and layers of more than two legs, have no factors: with
            one of them all diagrams are dense.
    """
    for side in parts.models:
        if any(parts.is_dense(side, level) for level in range(parts.depth(side))):
            return ("dense",)
    shallower = min(parts.depth(side) for side in parts.models)
    if shallower == 0:  # a linear model has no hidden units
        return ("factors",)
    if shallower == 1:  # no unit above the first-layer nodes, so nothing to see them as matrices
        return ("factors", "units", "dense")
    if max(parts.depth(side) for side in parts.models) == 2:  # nothing above level 1
        return ("factors", "units", "dense", "matrices")
    return ("factors", "units", "dense", "matrices", "tops")


def write(
    parts: TreeOperands, pair: Pair, diagram: Diagram, form: Form, per_output: bool
) -> tuple[Operand, ...]:
    """The product whose value is one diagram.

    Args:
        parts: The models' trees.
        pair: Which model is the bra and which the ket.
        diagram: The edges between first-layer nodes.
        form: What the product is written over.
        per_output: Whether the output index stays open.

    Returns:
        Operands by the names of `tree_operands`; every index but `OUTPUT` is summed.

    Example:
        One bilinear layer with itself, both legs across: E = sum_hg K[h, g] G[h, g] G[h, g].

        >>> from tnsim.metrics.input_moments import InputKind
        >>> from tnsim.tensors.kinds import LayerKind
        >>> kind = LayerKind("Bilinear", ("LEFT", "RIGHT"), "DOWN", d_in=2, d_out=2, rank=5)
        >>> parts = TreeOperands({"A": (kind,)}, InputKind(True, "identity"), False, 1)
        >>> across = Diagram(2, ((0, 1), (0, 1)))
        >>> [operand.name for operand in write(parts, Pair("A", "A"), across, "units", False)]
        ['G.AA', 'G.AA', 'K.AA']

    Source:
        Paper, section 2.3 and appendix A.3: a Wick diagram.
    """
    if form in ("units", "matrices", "tops"):
        return _over_units(parts, pair, diagram, form, per_output)
    return _over_layers(parts, pair, diagram, form == "dense")


class _Node(NamedTuple):
    """A copy of a layer above level 0: its level, its output bond, the bonds at its legs."""

    level: int
    bond: str
    legs: tuple[str, ...]


class Bottom(NamedTuple):
    """A copy of the first nonlinear layer; of a linear model, its one leg."""

    side: Side
    bond: str


def _bond(slot: Slot, level: int, copy: int) -> str:
    """Index at the output of a copy of a layer; the slot tells bra from ket even of one model."""
    return f"{slot}{level}.{copy}"


def _root(slot: Slot, tree: Tree) -> str:
    """Index at the output of a whole tree."""
    return _bond(slot, max(len(tree.orders) - 1, 0), 0)


def _upper_nodes(slot: Slot, tree: Tree) -> Iterator[_Node]:
    """The nodes above level 0, from the output down; copy c has children c n, ..., c n + n - 1."""
    copies = 1
    for level in reversed(range(1, len(tree.orders))):
        order = tree.orders[level]
        for copy in range(copies):
            children = range(copy * order, (copy + 1) * order)
            legs = tuple(_bond(slot, level - 1, child) for child in children)
            yield _Node(level, _bond(slot, level, copy), legs)
        copies *= order


def _bottoms(parts: TreeOperands, pair: Pair) -> list[Bottom]:
    """The first-layer nodes, numbered as diagrams number them: bra first, then ket."""
    nodes = []
    for slot, side in zip(SLOTS, pair, strict=True):
        for copy in range(parts.trees[side].bottoms):
            nodes.append(Bottom(side, _bond(slot, 0, copy)))
    return nodes


def _legs_of(bond: str, count: int) -> list[str]:
    """Indices of the input legs of one first-layer node."""
    return [f"{bond}.leg{leg}" for leg in range(count)]


def _over_layers(
    parts: TreeOperands, pair: Pair, diagram: Diagram, dense: bool
) -> tuple[Operand, ...]:
    """Layer tensors of both trees, from the outputs down, then the moments along the edges."""
    # Two trees hang from one index, as outputs meet outputs.
    merged = Merge()
    operands: list[Operand] = []
    for slot, side in zip(SLOTS, pair, strict=True):
        tree = parts.trees[side]
        for node in _upper_nodes(slot, tree):
            operands += parts.node(side, node.level, node.bond, node.legs, dense)
        merged.unite(_root(slot, tree), OUTPUT)

    operands += first_layer(parts, _bottoms(parts, pair), diagram.edges, dense, merged)
    if parts.lifted:
        operands.append(parts.trace)
    return merged.renamed(operands)


def write_over_upper(
    parts: TreeOperands, pair: Pair, free: tuple[int, int], edges: tuple[Edge, ...]
) -> tuple[Operand, ...]:
    """The product of what the upper tensors of bra and ket have in common (see `crossings`).

    Args:
        parts: The models' trees.
        pair: Which model is the bra and which the ket.
        free: How many nodes of each are joined to the other's.
        edges: Between those nodes, numbered bra first.
    """
    merged = Merge()
    operands: list[Operand] = []
    nodes: list[Bottom] = []
    for slot, side, count in zip(SLOTS, pair, free, strict=True):
        own = [Bottom(side, _bond(slot, 0, copy)) for copy in range(count)]
        bonds = [node.bond for node in own]
        operands.append(Operand(upper_tensor(side, count), (OUTPUT, *bonds)))
        nodes += own
    operands += first_layer(parts, nodes, edges, True, merged)
    if parts.lifted:
        operands.append(parts.trace)
    return merged.renamed(operands)


def first_layer(
    parts: TreeOperands,
    nodes: Sequence[Bottom],
    edges: Iterable[Edge],
    dense: bool,
    merged: Merge,
) -> list[Operand]:
    """Nodes of the first nonlinear layer and the second moments along the edges between them.

    Args:
        parts: The models' trees.
        nodes: Numbered in this order.
        edges: Pairs of numbers; together they join all legs.
        dense: Whether a node is a tensor as a whole.
        merged: Takes down which indices have become one.
    """
    edges = tuple(edges)
    operands: list[Operand] = []
    free_legs: dict[int, list[str]] = {}
    for number, (side, bond) in enumerate(nodes):
        tree = parts.trees[side]
        looped = (number, number) in edges
        if looped and tree.bunch == 2:  # the loop takes both legs
            operands.append(Operand(node_mean(side), (bond,)))
        elif tree.orders:
            free_legs[number] = _legs_of(bond, tree.bunch)
            operands += parts.node(side, 0, bond, free_legs[number], dense)
        else:
            free_legs[number] = [bond]

    # Legs of a node are alike, so an edge may take whichever is free. A node whose loop took both
    # legs has none, and its loop is done.
    for u, v in edges:
        if u in free_legs:
            ends = free_legs[u].pop(), free_legs[v].pop()
            operands += parts.edge(Pair(nodes[u].side, nodes[v].side), ends, merged)
    return operands


def _over_units(
    parts: TreeOperands, pair: Pair, diagram: Diagram, form: Form, per_output: bool
) -> tuple[Operand, ...]:
    """Matrices between hidden units. The bond at a node's output also names the node's units."""
    merged = Merge()
    bottoms = _bottoms(parts, pair)
    looped = {bottoms[u].bond for u, v in diagram.edges if u == v}
    operands, free_legs = _up_the_trees(parts, pair, form, looped)
    for u, v in diagram.edges:
        one, two = bottoms[u], bottoms[v]
        if u == v:
            if parts.depth(one.side) == 1:  # the node is all of its model, and so is its mean
                operands.append(Operand(node_mean(one.side), (OUTPUT,)))
        elif form == "units":
            operands.append(_along_edge(one, two))
        else:
            ends = free_legs[one.bond].pop(), free_legs[two.bond].pop()
            operands += parts.edge(Pair(one.side, two.side), ends, merged)
    if form == "tops":
        operands += _tops(parts, pair)
    else:
        operands += _at_outputs(parts, pair, looped, per_output)
    return merged.renamed(operands)


def _up_the_trees(
    parts: TreeOperands, pair: Pair, form: Form, looped: set[str]
) -> tuple[list[Operand], dict[str, list[str]]]:
    """What stands on the branches of both trees, and the legs that edges may join.

    Args:
        parts: The models' trees.
        pair: Which model is the bra and which the ket.
        form: What the product is written over.
        looped: Bonds of the first-layer nodes whose two legs are joined.

    Returns:
        Operands, and by bond the legs of the first-layer nodes that are matrices.
    """
    operands: list[Operand] = []
    free_legs: dict[str, list[str]] = {}
    for slot, side in zip(SLOTS, pair, strict=True):
        for node in _upper_nodes(slot, parts.trees[side]):
            if form == "tops" and node.level > 1:
                continue
            # A hidden unit multiplies its branches. Each is a factor of its own: the unit's row
            # P[h, :] with all that hangs below.
            for child in node.legs:
                if child in looped:
                    operands.append(Operand(unit_to_mean(side), (node.bond,)))
                elif form != "units" and node.level == 1:
                    free_legs[child] = _legs_of(child, 2)
                    indices = (node.bond, *free_legs[child])
                    operands.append(Operand(unit_to_legs(side), indices))
                else:
                    name = unit_to_unit(side, node.level)
                    operands.append(Operand(name, (node.bond, child)))
    return operands, free_legs


def _tops(parts: TreeOperands, pair: Pair) -> list[Operand]:
    """All above level 1 of both trees."""
    operands = []
    for slot, side in zip(SLOTS, pair, strict=True):
        nodes = _upper_nodes(slot, parts.trees[side])
        units = [node.bond for node in nodes if node.level == 1]
        operands.append(Operand(units_to_outputs(side), (OUTPUT, *units)))
    if parts.lifted:
        operands.append(parts.trace)
    return operands


def _along_edge(one: Bottom, two: Bottom) -> Operand:
    """G between the units of two nodes; G.AB is kept, and G.BA is its transpose."""
    if one.side > two.side:
        one, two = two, one
    return Operand(units_along_edge(Pair(one.side, two.side)), (one.bond, two.bond))


def _at_outputs(
    parts: TreeOperands, pair: Pair, looped: set[str], per_output: bool
) -> list[Operand]:
    """What joins the units at the roots of both trees: K, or D twice where K has no place.

    K is summed over outputs, which must not be where they stay open. A root that is itself a looped
    first-layer node has no units left: its mean carries the output index.
    """
    roots = [_root(slot, parts.trees[side]) for slot, side in zip(SLOTS, pair, strict=True)]
    if not per_output and not any(root in looped for root in roots):
        return [Operand(units_at_outputs(pair), tuple(roots))]
    operands = []
    for side, root in zip(pair, roots, strict=True):
        if root not in looped:
            operands.append(Operand(output_factor(side, parts.depth(side) - 1), (OUTPUT, root)))
    if parts.lifted:
        operands.append(parts.trace)
    return operands
