"""Two models as trees, and their diagrams as products of named arrays.

Only nonlinear layers branch. *Level* 0 of a model's tree is its first nonlinear layer, level 1
the next, and so on; a layer of order n has n legs. Linear layers before level 0 are part of the
second moments S, and linear layers after a nonlinear layer are multiplied into it.

    name   array                              meaning
    T.A0   T[o, i, j] = sum_h D[o, h] P[h, i] P[h, j], the symmetrised tensor of level 0 of model A
    D.A0   D[o, h]                            its output factor, with the linear layers after it
    P.A0   P[h, i]                            its leg factor, equal for both legs
    S.AB   S[k, l]                            second moment of the inputs of level 0 of A and of B
    m.A    m[o] = sum_ij T[o, i, j] S[i, j]   mean of a node of level 0
    U.A1   U[h, g] = sum_o P[h, o] D[o, g]    from a hidden unit of level 1 to one of level 0
    u.A    u[h] = sum_o P[h, o] m[o]          from a unit of level 1 to the mean of a node
    M.A    M[h, i, j] = sum_o P[h, o] T[o, i, j]   from a unit of level 1 to the legs of a node
    G.AB   G[h, g] = sum_ij P[h, i] S[i, j] P[g, j]   from a unit of A to one of B along an edge
    K.AB   K[h, g] = sum_k D[k, h] D[k, g]    from the units at A's output to units at B's
    V.A    V[k, h1, h2, ...]                  layers above level 1, from its units to the outputs
    W.A2   W[k, o1, o2]                       layers above level 0, symmetrised (see `whole_tree`),
                                              with two of its nodes left to be joined to B's

P serves both legs because a symmetric bilinear layer is a sum of squares, a symmetrised CP
decomposition: with x the row of L and y the row of R that a hidden unit has,

    x (x) y + y (x) x = ((x + y) (x) (x + y) - (x - y) (x) (x - y)) / 2.

D holds the signs (see `layer_tensors.symmetric_arrays`). An attention layer has no such
decomposition and is given as T itself.

*Ways to write a diagram.* A diagram says which first-layer nodes of bra and ket are joined by which
edges (see `metrics.orbits`). Its value is a contraction: the tensors of both trees, joined at their
outputs, and a second moment along every edge. The same value may be written over different arrays,
and the cheapest way depends on widths, ranks and the diagram:

    factors    each layer's tensor as D and P over its hidden units
    dense      each layer's tensor T as a whole
    units      contracted over all bonds between layers beforehand, so that only hidden units are
               left: a vertex per node of the trees, a matrix U up every branch and G along every
               edge, K between the outputs
    matrices   as units, but the first-layer nodes are no vertices: each is the matrix M[h] over its
               two legs that a unit h of level 1 reads, and edges join legs
    tops       as matrices, and the layers above level 1 are a single tensor V from its units to the
               outputs

*Loops.* An edge that joins the two legs of a node contracts its tensor with the second moment,
which gives a vector, the node's mean. All nodes with a loop share this vector, so it is defined
once, and a diagram uses the vector instead of the node: the pairings left to contract are between
*different* nodes. (Wick ordering does the same to the polynomials themselves: it subtracts from
each node its mean, and pairings inside a node are gone.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from tnsim.engine.ir.problem import Merge, Operand
from tnsim.metrics.input_moments import InputKind
from tnsim.metrics.orbits import Diagram, Edge, Tree
from tnsim.names import COVARIANCE, DENSE, SLOTS, TRACE, Pair, Side, Slot
from tnsim.problems.layer_kinds import Kinds, LayerKind
from tnsim.problems.layer_tensors import symmetric_shapes

OUTPUT_INDEX = "k"
"""Index of the models' common output coordinate; flattened, for sequences."""
COORDINATE_INDEX = "o"
"""Index of the common output coordinate with positions added up."""
Form = Literal["factors", "units", "dense", "matrices", "tops"]


def layer_tensor(side: Side, level: int) -> str:
    """Name of T of a layer."""
    return f"T.{side}{level}"


def output_factor(side: Side, level: int) -> str:
    """Name of D of a layer."""
    return f"D.{side}{level}"


def leg_factor(side: Side, level: int) -> str:
    """Name of P of a layer."""
    return f"P.{side}{level}"


def second_moment(pair: Pair) -> str:
    """Name of S of two models, below their first nonlinear layers."""
    return f"S.{pair.group}"


def node_mean(side: Side) -> str:
    """Name of m of a model, the mean of a node of level 0."""
    return f"m.{side}"


def unit_to_unit(side: Side, level: int) -> str:
    """Name of U of a layer, from its units to units of the level below."""
    return f"U.{side}{level}"


def unit_to_mean(side: Side) -> str:
    """Name of u of a model, from units of level 1 to the mean of a node."""
    return f"u.{side}"


def unit_to_legs(side: Side) -> str:
    """Name of M of a model, from units of level 1 to the legs of a node."""
    return f"M.{side}"


def units_along_edge(pair: Pair) -> str:
    """Name of G of two models, between units of level 0."""
    return f"G.{pair.group}"


def units_at_outputs(pair: Pair) -> str:
    """Name of K of two models, between the units at their outputs."""
    return f"K.{pair.group}"


def units_to_outputs(side: Side) -> str:
    """Name of V of a model, from units of level 1 to the outputs."""
    return f"V.{side}"


def upper_tensor(side: Side, free: int) -> str:
    """Name of W of a model with `free` first-layer nodes left to be joined to the other's."""
    return f"W.{side}{free}"


class NonlinearLayer(NamedTuple):
    """Number of a nonlinear layer in its model, and numbers of the linear layers after it."""

    number: int
    linear_after: tuple[int, ...]


class Groups(NamedTuple):
    """A model's leading linear layers, and its nonlinear layers with the linear ones after each."""

    leading: tuple[int, ...]
    nonlinear: tuple[NonlinearLayer, ...]


def groups(kinds: Sequence[LayerKind]) -> Groups:
    """The layers of a model, linear ones grouped with the nonlinear layer before them.

    Example:
        >>> line = LayerKind("Linear", ("WEIGHT",), None, d_in=2, d_out=2)
        >>> square = LayerKind("Bilinear", ("LEFT", "RIGHT"), "DOWN", d_in=2, d_out=2, rank=5)
        >>> groups([line, square, line])
        Groups(leading=(0,), nonlinear=(NonlinearLayer(number=1, linear_after=(2,)),))
    """
    leading: list[int] = []
    nonlinear: list[NonlinearLayer] = []
    for number, kind in enumerate(kinds):
        if kind.order > 1:
            nonlinear.append(NonlinearLayer(number, ()))
        elif nonlinear:
            # A linear layer behind a nonlinear layer is multiplied into its output matrix.
            layer = nonlinear.pop()
            nonlinear.append(NonlinearLayer(layer.number, (*layer.linear_after, number)))
        else:
            leading.append(number)
    return Groups(tuple(leading), tuple(nonlinear))


def tree(kinds: Sequence[LayerKind]) -> Tree:
    """A model's tree: the orders of its nonlinear layers, from the input up."""
    return Tree(tuple(kind.order for kind in kinds if kind.order > 1))


@dataclass(frozen=True, eq=False)
class TreeOperands:
    """Two models as trees, and the operands of the parts of their diagrams.

    Args:
        models: Kinds of the layers of every model, from the input up.
        inputs: Structure of the input's second moment.
        lifted: Whether the constant is coordinate 0 of every bond.
        n_ctx: Number of positions of flattened sequences, 1 for vectors.

    Example:
        >>> from tnsim.metrics.input_moments import InputKind
        >>> kind = LayerKind("Bilinear", ("LEFT", "RIGHT"), "DOWN", d_in=2, d_out=2, rank=5)
        >>> parts = TreeOperands({"A": (kind,)}, InputKind(True, "identity"), False, 1)
        >>> for operand in parts.node("A", 0, "o", ("i", "j"), dense=False):
        ...     print(operand.name, operand.indices)
        D.A0 ('o', 'ho')
        P.A0 ('ho', 'i')
        P.A0 ('ho', 'j')
    """

    models: dict[Side, Kinds]
    inputs: InputKind
    lifted: bool
    n_ctx: int

    @cached_property
    def groups(self) -> dict[Side, Groups]:
        """The grouped layers of every model, see `groups`."""
        return {side: groups(kinds) for side, kinds in self.models.items()}

    @cached_property
    def trees(self) -> dict[Side, Tree]:
        """The tree of every model."""
        return {side: tree(kinds) for side, kinds in self.models.items()}

    def depth(self, side: Side) -> int:
        """Number of nonlinear layers of a model."""
        return len(self.trees[side].orders)

    def is_dense(self, side: Side, level: int) -> bool:
        """Whether a nonlinear layer is given as its whole tensor."""
        layer = self.groups[side].nonlinear[level]
        return DENSE in symmetric_shapes(self.models[side][layer.number], self.lifted)

    def has_leading(self, pair: Pair) -> bool:
        """Whether linear layers stand between the inputs and level 0 of either model."""
        return any(self.groups[side].leading for side in pair)

    @property
    def trace(self) -> tuple[Operand, ...]:
        """The array that leaves out the constant row and, for sequences, adds up positions.

        Nothing where there is no constant.
        """
        indices = (OUTPUT_INDEX,) if self.n_ctx == 1 else (OUTPUT_INDEX, COORDINATE_INDEX)
        return (Operand(TRACE, indices),) if self.lifted else ()

    def node(
        self, side: Side, level: int, bond: str, legs: Sequence[str], dense: bool
    ) -> tuple[Operand, ...]:
        """The symmetrised tensor of a nonlinear layer, whole or as a sum over its hidden units.

        Args:
            side: Name of the model.
            level: Level of the layer in the model's tree.
            bond: Index of the output.
            legs: Indices of the inputs.
            dense: Whether the tensor is used as a whole.

        Returns:
            T[bond, *legs], or D[bond, h] and P[h, leg] for every leg.
        """
        if dense:
            return (Operand(layer_tensor(side, level), (bond, *legs)),)
        unit = hidden(bond)
        output = Operand(output_factor(side, level), (bond, unit))
        factors = [Operand(leg_factor(side, level), (unit, leg)) for leg in legs]
        return (output, *factors)

    def edge(self, pair: Pair, ends: tuple[str, str], merged: Merge) -> tuple[Operand, ...]:
        """The second moment between two legs, which become a single index where it is no array.

        Args:
            pair: Models of the two legs; never B and A, as edges lead from the bra to the ket.
            ends: Indices of the legs.
            merged: Record of the indices that have been joined.

        Returns:
            S[ends] or C[ends], the diagonal C[end], or nothing for the identity.
        """
        if self.has_leading(pair):
            return (Operand(second_moment(pair), ends),)
        return self.input_moment(ends, merged)

    def input_moment(self, ends: tuple[str, str], merged: Merge) -> tuple[Operand, ...]:
        """The same between two legs that read the input itself: C[ends], C[end], or nothing."""
        if self.inputs.moment == "full":
            return (Operand(COVARIANCE, ends),)
        merged.unite(*ends)
        if self.inputs.moment == "diagonal":
            return (Operand(COVARIANCE, (ends[0],)),)
        return ()


def hidden(bond: str) -> str:
    """Index over the hidden units of the node below a bond."""
    return f"h{bond}"


def forms(parts: TreeOperands) -> tuple[Form, ...]:
    """The ways in which every diagram of these models can be written.

    Args:
        parts: Trees of the models. Attention, and layers of more than two legs, have no factors: a
            model with such a layer has dense diagrams only.
    """
    for side in parts.models:
        if any(parts.is_dense(side, level) for level in range(parts.depth(side))):
            return ("dense",)
    shallower = min(parts.depth(side) for side in parts.models)
    if shallower == 1:  # no unit of level 1 that reads a node as a matrix
        return ("factors", "units", "dense")
    if max(parts.depth(side) for side in parts.models) == 2:  # nothing above level 1
        return ("factors", "units", "dense", "matrices")
    return ("factors", "units", "dense", "matrices", "tops")


def write(
    parts: TreeOperands, pair: Pair, diagram: Diagram, form: Form, slices: bool
) -> tuple[Operand, ...]:
    """The product that has the value of a single diagram.

    Args:
        parts: Trees of the models.
        pair: Model in the bra and model in the ket.
        diagram: Edges between first-layer nodes.
        form: Way to write the product.
        slices: Whether the output index stays open.

    Returns:
        Operands with the names at the head of this module. Every index is summed but that of the
        outputs, `OUTPUT_INDEX`, or `COORDINATE_INDEX` for sequences.

    Example:
        A bilinear layer with itself, both legs across: E = sum_hg K[h, g] G[h, g] G[h, g].

        >>> from tnsim.metrics.input_moments import InputKind
        >>> from tnsim.problems.layer_kinds import LayerKind
        >>> kind = LayerKind("Bilinear", ("LEFT", "RIGHT"), "DOWN", d_in=2, d_out=2, rank=5)
        >>> parts = TreeOperands({"A": (kind,)}, InputKind(True, "identity"), False, 1)
        >>> across = Diagram(2, ((0, 1), (0, 1)))
        >>> [operand.name for operand in write(parts, Pair("A", "A"), across, "units", False)]
        ['G.AA', 'G.AA', 'K.AA']

    Source:
        Paper, section 2.3 and appendix A.3: a Wick diagram.
    """
    if form in ("units", "matrices", "tops"):
        return _over_units(parts, pair, diagram, form, slices)
    return _over_layers(parts, pair, diagram, form == "dense")


class _Node(NamedTuple):
    """A copy of a layer above level 0: its level, its output bond, the bonds at its legs."""

    level: int
    bond: str
    legs: tuple[str, ...]


class Bottom(NamedTuple):
    """A copy of the first nonlinear layer."""

    side: Side
    bond: str


def node_bond(slot: Slot, level: int, copy: int) -> str:
    """Index at the output of a copy of a layer, distinct in bra and ket even for a single model."""
    return f"{slot}{level}.{copy}"


def root_index(slot: Slot, tree: Tree) -> str:
    """Index at the output of a whole tree."""
    return node_bond(slot, len(tree.orders) - 1, 0)


def upper_nodes(slot: Slot, tree: Tree) -> Iterator[_Node]:
    """The nodes above level 0, from the output down; copy c has children c n, ..., c n + n - 1."""
    copies = 1
    for level in reversed(range(1, len(tree.orders))):
        order = tree.orders[level]
        for copy in range(copies):
            # Copies of a level are numbered from left to right, so that the children of copy c are
            # consecutive.
            children = range(copy * order, (copy + 1) * order)
            legs = tuple(node_bond(slot, level - 1, child) for child in children)
            yield _Node(level, node_bond(slot, level, copy), legs)
        # A layer of order n reads n copies of the tree below.
        copies *= order


def _bottom_nodes(parts: TreeOperands, pair: Pair) -> list[Bottom]:
    """The first-layer nodes, numbered as diagrams number them: bra first, then ket."""
    nodes = []
    for slot, side in zip(SLOTS, pair, strict=True):
        for copy in range(parts.trees[side].bottoms):
            nodes.append(Bottom(side, node_bond(slot, 0, copy)))
    return nodes


def _legs_of(bond: str, count: int) -> list[str]:
    """Indices of the input legs of a first-layer node."""
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
        for node in upper_nodes(slot, tree):
            operands += parts.node(side, node.level, node.bond, node.legs, dense)
        merged.unite(root_index(slot, tree), OUTPUT_INDEX)

    operands += first_layer(parts, _bottom_nodes(parts, pair), diagram.edges, dense, merged)
    return merged.renamed((*operands, *parts.trace))


def write_over_upper(
    parts: TreeOperands, pair: Pair, free: tuple[int, int], edges: tuple[Edge, ...]
) -> tuple[Operand, ...]:
    """A crossing part as a product of the upper tensors of bra and ket (see `whole_tree`).

    Args:
        parts: Trees of the models.
        pair: Model in the bra and model in the ket.
        free: Number of nodes of each model that are joined to the other's.
        edges: Edges between these nodes, numbered bra first.
    """
    merged = Merge()
    operands: list[Operand] = []
    nodes: list[Bottom] = []
    for slot, side, count in zip(SLOTS, pair, free, strict=True):
        own = [Bottom(side, node_bond(slot, 0, copy)) for copy in range(count)]
        bonds = [node.bond for node in own]
        operands.append(Operand(upper_tensor(side, count), (OUTPUT_INDEX, *bonds)))
        nodes += own
    operands += first_layer(parts, nodes, edges, True, merged)
    return merged.renamed((*operands, *parts.trace))


def first_layer(
    parts: TreeOperands,
    nodes: Sequence[Bottom],
    edges: Iterable[Edge],
    dense: bool,
    merged: Merge,
) -> list[Operand]:
    """Nodes of the first nonlinear layer and the second moments along the edges between them.

    Args:
        parts: Trees of the models.
        nodes: Nodes in the order of their numbers.
        edges: Pairs of node numbers; together the edges join all legs.
        dense: Whether a node is a tensor as a whole.
        merged: Record of the indices that have been joined.
    """
    edges = tuple(edges)
    operands: list[Operand] = []
    # Legs of each node that no edge has taken yet.
    free_legs: dict[int, list[str]] = {}
    for number, (side, bond) in enumerate(nodes):
        tree = parts.trees[side]
        looped = (number, number) in edges
        if looped and tree.bunch == 2:  # the loop takes both legs
            operands.append(Operand(node_mean(side), (bond,)))
        else:
            free_legs[number] = _legs_of(bond, tree.bunch)
            operands += parts.node(side, 0, bond, free_legs[number], dense)

    # Legs of a node are alike, so an edge may take any free leg. A node with a loop over both legs
    # has no free leg, and its mean already counts the loop.
    for u, v in edges:
        if u in free_legs:
            ends = free_legs[u].pop(), free_legs[v].pop()
            operands += parts.edge(Pair(nodes[u].side, nodes[v].side), ends, merged)
    return operands


def _over_units(
    parts: TreeOperands, pair: Pair, diagram: Diagram, form: Form, slices: bool
) -> tuple[Operand, ...]:
    """Matrices between hidden units; the bond at a node's output also names the node's units."""
    merged = Merge()
    bottoms = _bottom_nodes(parts, pair)
    # Nodes with a loop are replaced by their mean further up and have no legs or units of their
    # own.
    looped = {bottoms[u].bond for u, v in diagram.edges if u == v}
    operands, free_legs = _up_the_trees(parts, pair, form, looped)
    for u, v in diagram.edges:
        one, two = bottoms[u], bottoms[v]
        if u == v:
            if parts.depth(one.side) == 1:  # the node is the whole model, and its mean the model's
                operands.append(Operand(node_mean(one.side), (OUTPUT_INDEX,)))
        elif form == "units":
            name = units_along_edge(Pair(one.side, two.side))
            operands.append(Operand(name, (one.bond, two.bond)))
        else:
            ends = free_legs[one.bond].pop(), free_legs[two.bond].pop()
            operands += parts.edge(Pair(one.side, two.side), ends, merged)
    if form == "tops":
        operands += _top_layers(parts, pair)
    else:
        operands += _at_outputs(parts, pair, looped, slices)
    return merged.renamed(operands)


def _up_the_trees(
    parts: TreeOperands, pair: Pair, form: Form, looped: set[str]
) -> tuple[list[Operand], dict[str, list[str]]]:
    """The arrays on the branches of both trees, and the legs that edges may join.

    Args:
        parts: Trees of the models.
        pair: Model in the bra and model in the ket.
        form: Way to write the product.
        looped: Bonds of the first-layer nodes with their two legs joined.

    Returns:
        Operands, and the legs of the first-layer nodes that are matrices, by bond.
    """
    operands: list[Operand] = []
    free_legs: dict[str, list[str]] = {}
    for slot, side in zip(SLOTS, pair, strict=True):
        for node in upper_nodes(slot, parts.trees[side]):
            # Layers above level 1 are inside V.
            if form == "tops" and node.level > 1:
                continue
            # A hidden unit multiplies its branches. Each branch is a factor of its own: the unit's
            # row P[h, :] contracted with the subtree below.
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


def _top_layers(parts: TreeOperands, pair: Pair) -> list[Operand]:
    """V of both trees: the layers above level 1."""
    operands = []
    for slot, side in zip(SLOTS, pair, strict=True):
        nodes = upper_nodes(slot, parts.trees[side])
        units = [node.bond for node in nodes if node.level == 1]
        operands.append(Operand(units_to_outputs(side), (OUTPUT_INDEX, *units)))
    return [*operands, *parts.trace]


def _at_outputs(parts: TreeOperands, pair: Pair, looped: set[str], slices: bool) -> list[Operand]:
    """The arrays that join the units at the roots of both trees: K, or D of each tree.

    K is summed over outputs, so it cannot be used where outputs stay open. A root that is itself a
    looped first-layer node has no units left: its mean carries the output index.
    """
    roots = [root_index(slot, parts.trees[side]) for slot, side in zip(SLOTS, pair, strict=True)]
    if not slices and not any(root in looped for root in roots):
        # K = D_A^T D_B holds the sum over outputs, computed once for all diagrams.
        return [Operand(units_at_outputs(pair), tuple(roots))]
    operands = []
    for side, root in zip(pair, roots, strict=True):
        if root not in looped:
            operands.append(
                Operand(output_factor(side, parts.depth(side) - 1), (OUTPUT_INDEX, root))
            )
    return [*operands, *parts.trace]
