"""Exact deep metrics as a folded problem: sums over diagrams of whole trees.

`Gaussian` beyond a single nonlinear layer and `Symmetric` join the legs of whole trees, not layer
by layer: an inner product is a sum over diagrams (see `metrics.orbits`), each a small network over
the layers' symmetrised tensors. A problem has three stages: the layers' arrays and the input's
second moments; the arrays that are built of them and shared by all diagrams; and a weighted sum of
diagrams for each inner product, every diagram written in several ways. The names and formulas of
the arrays, and the ways to write a diagram, stand in `diagrams`. The planner takes the cheapest
way, contracts shared parts once and takes sums before products.

Diagrams are homogeneous in the lifted input, which they treat as centred. With a constant or a mean
the problem is run at several second moments `C + t m m^T` and combined (see `families`).

*Upper tensors.* In the outputs y of its first nonlinear layer, a model is a homogeneous polynomial

    p_k(y) = sum W[k, a_1, ..., a_n] y[a_1] ... y[a_n],

with an index of W for each of the n first-layer nodes. The tree gives a W that is symmetric under
the tree's automorphisms only. As all y are the same, the mean of W over all orders of the nodes is
the same polynomial: for three bilinear layers the mean over the three ways to put four nodes in
pairs.

With that W it no longer matters which node is joined to which, so that joinings *within* the model
are summed over once. With f free nodes left, W becomes

    W_f[k, a_1, ..., a_f] = sum over joinings of the other n - f nodes among themselves
                          = sum W[k, a_1, ..., a_n] E[y[a_(f+1)] ... y[a_n]].

These are the coefficients of the polynomial in Wick products,

    p_k(y) = sum over f of C(n, f) <W_f[k], :y^f:>,

of which two, of two models, have for expectation the sum over crossing joinings alone, in which
every connected part has nodes of both models.

*Crossing parts.* All first-layer nodes of a model are the same function, so a node of the other
model that is joined to them may meet any of them. Of a diagram two things therefore matter:

    its connected parts that lie within a single model, which can be contracted into W once, summed
    over all ways to join so many nodes among themselves;
    the rest, its *crossing part*, in which every connected part has nodes of both models.

Diagrams with isomorphic crossing parts are a single product of two W. Of the 606 diagrams of three
bilinear layers a side, 77 remain.

The module reads in this order: upper tensors, crossing parts, the arrays that all diagrams share,
and the problem itself (`fold_trees`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tnsim.engine.ir.problem import (
    Definition,
    Merge,
    Operand,
    Problem,
    ScaleGroup,
    Stage,
    Term,
    prune,
    renamed,
)
from tnsim.engine.search.sharing import Tensor, canonical
from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.input_moments import InputKind
from tnsim.metrics.orbits import Edge, Tree, automorphisms, diagrams
from tnsim.names import (
    COVARIANCE,
    DENSE,
    FACTOR,
    IDENTITY,
    PAIRS,
    SIGNED_DOWN,
    SLOTS,
    TRACE,
    WEIGHT,
    Leaf,
    Pair,
    Side,
)
from tnsim.problems.diagrams import (
    COORDINATE_INDEX,
    OUTPUT_INDEX,
    Bottom,
    TreeOperands,
    first_layer,
    forms,
    layer_tensor,
    leg_factor,
    node_bond,
    node_mean,
    output_factor,
    root_index,
    second_moment,
    tree,
    unit_to_legs,
    unit_to_mean,
    unit_to_unit,
    units_along_edge,
    units_at_outputs,
    units_to_outputs,
    upper_nodes,
    upper_tensor,
    write,
    write_over_upper,
)
from tnsim.problems.layer_kinds import Kinds
from tnsim.problems.layer_tensors import symmetric_shapes

MAX_ELEMENTS = 2**27
"""Largest number of entries of W; larger models are contracted through hidden units alone."""
Powers = tuple[tuple[str, int], ...]
"""Scale groups of a definition, each with the power to which its scale enters."""
MAX_LEGS = 20
"""Most legs of both models together: 20 have 654,729,075 pairings, 32 have 1.9 * 10^17."""


def has_upper_tensors(parts: TreeOperands) -> bool:
    """Whether these models are contracted through upper tensors as well.

    Upper tensors pay where a model has nodes between the first and the last layer, or a last layer
    of more than two legs; a tensor of two legs is symmetric as it is.
    """
    nodes = [parts.trees[side].bottoms for side in parts.models]
    if min(nodes) == 1 or max(nodes) == 2:
        return False
    return max(elements(parts, side) for side in parts.models) <= MAX_ELEMENTS


def elements(parts: TreeOperands, side: Side) -> int:
    """Number of entries of W."""
    layers = parts.models[side]
    groups = parts.groups[side].nonlinear
    outputs = layers[-1].d_out + parts.lifted
    first = groups[0]
    width = layers[(first.number, *first.linear_after)[-1]].d_out + parts.lifted
    # W has an output axis and one axis for each first-layer node, as wide as the bond above that
    # layer.
    return outputs * width ** parts.trees[side].bottoms


def joinings_within(parts: TreeOperands, side: Side, free: int) -> int:
    """Number (2m - 1)!! of ways to join the 2m legs of all nodes but the free ones in pairs."""
    tree = parts.trees[side]
    legs = tree.bunch * (tree.bottoms - free)
    return math.prod(range(legs - 1, 0, -2))


def upper_tensors(parts: TreeOperands) -> Iterator[Definition]:
    """W of every model, and W_f for every smaller number f of free nodes."""
    for side in parts.models:
        tree = parts.trees[side]
        yield _symmetrised_part(parts, side)
        for free in reversed(range(tree.bottoms)):
            # An odd number of legs cannot be joined in pairs.
            if tree.bunch * (tree.bottoms - free) % 2 == 0:
                yield _joined_within(parts, side, free)


def _symmetrised_part(parts: TreeOperands, side: Side) -> Definition:
    """W with all nodes free: the mean over all orders of the nodes, equal orders taken once."""
    tree = parts.trees[side]
    nodes = [f"a{node}" for node in range(tree.bottoms)]
    orders = list(_distinct_orders(tree))
    terms = []
    for order in orders:
        # Orders in one orbit of the tree's automorphisms give equal tensors, and orbits have equal
        # size, so the mean over representatives is the mean over all orders.
        terms.append(Term(1 / len(orders), _tree_over(parts, side, [nodes[n] for n in order])))
    name = upper_tensor(side, tree.bottoms)
    return Definition(name, ("k", *nodes), tuple(terms), exchangeable=len(nodes))


def _distinct_orders(tree: Tree) -> Iterator[tuple[int, ...]]:
    """Orders of the first-layer nodes, orbit by orbit under the tree's automorphisms."""
    known: set[tuple[int, ...]] = set()
    symmetries = automorphisms(tree.orders[1:])
    for order in itertools.permutations(range(tree.bottoms)):
        if order not in known:
            known.update(tuple(order[n] for n in moved) for moved in symmetries)
            yield order


def _tree_over(parts: TreeOperands, side: Side, nodes: list[str]) -> tuple[Operand, ...]:
    """The layers above level 0, joined to nodes in the given order."""
    tree = parts.trees[side]
    names = {root_index("bra", tree): "k"}
    names |= {node_bond("bra", 0, copy): node for copy, node in enumerate(nodes)}
    operands: list[Operand] = []
    for level, bond, legs in upper_nodes("bra", tree):
        operands += parts.node(side, level, bond, legs, dense=True)
    return renamed(operands, names)


def _joined_within(parts: TreeOperands, side: Side, free: int) -> Definition:
    """W_f: the last nodes of W joined among themselves, in all ways."""
    tree = parts.trees[side]
    nodes = [f"a{node}" for node in range(tree.bottoms)]
    # W is symmetric in its nodes, so it does not matter which of them stay free: the first ones do.
    whole = Operand(upper_tensor(side, tree.bottoms), ("k", *nodes))
    joined = [Bottom(side, node) for node in nodes[free:]]
    nobody = Tree((tree.bunch, 0))  # no ket nodes: every joining is within the model
    terms = []
    for diagram in diagrams(Tree((tree.bunch, len(joined))), nobody, cross_only=False):
        merged = Merge()
        operands = [whole, *first_layer(parts, joined, diagram.edges, True, merged)]
        terms.append(Term(float(diagram.count), merged.renamed(operands)))
    indices = ("k", *nodes[:free])
    return Definition(upper_tensor(side, free), indices, tuple(terms), exchangeable=free)


class Crossing(NamedTuple):
    """The crossing part of a diagram.

    Args:
        free: Numbers of nodes of the bra and of the ket in the part.
        edges: Edges between these nodes, numbered bra first.
    """

    free: tuple[int, int]
    edges: tuple[Edge, ...]

    def form(self) -> Hashable:
        """A key that crossing parts share if they differ by the numbering of nodes alone."""
        bras, kets = self.free
        # Nodes of bra and ket are marked by different references; an edge may be read either way.
        nodes: list[Tensor] = [(int(node >= bras), (node,)) for node in range(bras + kets)]
        edges: list[Tensor] = [(2, edge) for edge in self.edges]
        key, _ = canonical(nodes + edges, (), lambda ref: 2 if ref == 2 else 0)
        return self.free, key


def crossing_part(edges: Sequence[Edge], bras: int, nodes: int) -> Crossing:
    """The connected parts of a diagram that have nodes of both models.

    Args:
        edges: Edges between first-layer nodes, numbered as in `Diagram`.
        bras: Number of nodes of the bra, which come first.
        nodes: Number of nodes of both models.

    Example:
        Of two nodes a side, a node of the bra is joined to itself, which leaves three.

        >>> crossing_part([(0, 0), (1, 2), (1, 3), (2, 3)], bras=2, nodes=4)
        Crossing(free=(1, 2), edges=((0, 1), (0, 2), (1, 2)))
    """
    part = list(range(nodes))  # for every node, the smallest node known to be connected to it
    # Labels spread along the edges; after as many passes as there are nodes nothing changes any
    # more.
    for _ in range(nodes):
        for u, v in edges:
            part[u] = part[v] = min(part[u], part[v])
    bra_parts = set(part[:bras])
    # A connected part with nodes of one model alone is a number, summed into W_f; a part with nodes
    # of both models is left.
    crossing = bra_parts & set(part[bras:])
    kept = [node for node in range(nodes) if part[node] in crossing]
    number = {node: n for n, node in enumerate(kept)}
    free = sum(node < bras for node in kept)
    crossed = tuple((number[u], number[v]) for u, v in edges if u in number)
    return Crossing((free, len(kept) - free), crossed)


def _product(
    name: str, indices: tuple[str, ...], operands: Iterable[Operand], **others: Any
) -> Definition:
    """The definition of a single product, with other fields of `Definition`."""
    return Definition(name, indices, (Term(1.0, tuple(operands)),), **others)


def _between(
    pair: Pair, name: str, indices: tuple[str, str], operands: Iterable[Operand]
) -> Definition:
    """A matrix between two models; of a model with itself it is symmetric."""
    return _product(name, indices, operands, exchangeable=2 if pair.bra == pair.ket else 0)


def layer_arrays(parts: TreeOperands) -> tuple[Definition, ...]:
    """D and P of every nonlinear layer, or T of a dense layer; linear layers are multiplied in.

    Args:
        parts: Trees of the models, as for all functions here; `diagrams` has the formulas.
    """
    definitions: list[Definition] = []
    for side in parts.models:
        for level in range(parts.depth(side)):
            if parts.is_dense(side, level):
                definitions.append(_whole_tensor(parts, side, level))
            else:
                definitions += _layer_factors(parts, side, level)
    return tuple(definitions)


def tensors_and_means(parts: TreeOperands) -> tuple[Definition, ...]:
    """T of every nonlinear layer that has D and P, and the mean of a node of level 0."""
    definitions = []
    for side in parts.models:
        for level in range(parts.depth(side)):
            if parts.is_dense(side, level):
                continue
            # T[o, i, j] = sum_h D[o, h] P[h, i] P[h, j]
            powers = layer_powers(parts, side, level, copies=1)
            tensor = parts.node(side, level, "o", ("i", "j"), dense=False)
            name, indices = layer_tensor(side, level), ("o", "i", "j")
            definitions.append(_product(name, indices, tensor, exchangeable=2, powers=powers))
            if level == 0:
                definitions.append(_node_mean(parts, side, powers))
    return tuple(definitions)


def matrices_between_units(parts: TreeOperands) -> tuple[Definition, ...]:
    """U, u and M of every model, G and K of every pair of models."""
    definitions: list[Definition] = []
    for side in parts.models:
        definitions += _up_the_tree(parts, side)
    for pair in _compared_pairs(parts):
        definitions += [_along_edge(parts, pair), _at_outputs(parts, pair)]
    return tuple(definitions)


def layer_powers(parts: TreeOperands, side: Side, level: int, copies: int) -> Powers:
    """The scale groups of some copies of a layer's tensor: T is linear in D and square in P.

    Args:
        parts: Trees of the models.
        side: Name of the model.
        level: Level of the layer in its tree.
        copies: Number of times that the tensor is in a product.
    """
    if parts.is_dense(side, level):
        return ((layer_tensor(side, level), copies),)
    # T[o, i, j] = sum_h D[o, h] P[h, i] P[h, j]: c D gives c T, and c P gives c^2 T.
    return ((output_factor(side, level), copies), (leg_factor(side, level), 2 * copies))


def _compared_pairs(parts: TreeOperands) -> Iterator[Pair]:
    """The pairs of the models that are compared."""
    for pair in PAIRS:
        if set(pair) <= set(parts.models):
            yield pair


def _linear_after(parts: TreeOperands, side: Side, level: int) -> tuple[list[Operand], str]:
    """The linear layers after a nonlinear layer, from index x0 on, and their last index."""
    layers = parts.groups[side].nonlinear[level].linear_after
    weights = []
    for n, number in enumerate(layers):
        weights.append(Operand(str(Leaf(side, number, WEIGHT)), (f"x{n + 1}", f"x{n}")))
    return weights, f"x{len(layers)}"


def _whole_tensor(parts: TreeOperands, side: Side, level: int) -> Definition:
    """T of a layer that is given as a whole tensor."""
    number = parts.groups[side].nonlinear[level].number
    legs = tuple(f"i{leg}" for leg in range(parts.trees[side].orders[level]))
    weights, end = _linear_after(parts, side, level)
    tensor = Operand(str(Leaf(side, number, DENSE)), ("x0", *legs))
    name = layer_tensor(side, level)
    indices, powers = (end, *legs), ((name, 1),)
    return _product(name, indices, (tensor, *weights), exchangeable=len(legs), powers=powers)


def _layer_factors(parts: TreeOperands, side: Side, level: int) -> tuple[Definition, Definition]:
    """D and P of a nonlinear layer."""
    number = parts.groups[side].nonlinear[level].number
    weights, end = _linear_after(parts, side, level)
    down = Operand(str(Leaf(side, number, SIGNED_DOWN)), ("x0", "h"))
    factor = Operand(str(Leaf(side, number, FACTOR)), ("h", "i"))
    d, p = output_factor(side, level), leg_factor(side, level)
    return (
        _product(d, (end, "h"), (down, *weights), powers=((d, 1),)),
        _product(p, ("h", "i"), (factor,), powers=((p, 1),)),
    )


def _second_moment(parts: TreeOperands, pair: Pair) -> Definition:
    """S[k, l] = W_X C W_Y^T; where C is the identity or a diagonal, the inputs share an index."""
    # A chain: for two linear layers in the bra and one in the ket
    #     W_2[bra2, bra1] W_1[bra1, bra0] C[bra0, ket0] V_1[ket1, ket0].
    merged = Merge()
    operands: list[Operand] = []
    ends = []
    for slot, side in zip(SLOTS, pair, strict=True):
        leading = parts.groups[side].leading
        for n, number in enumerate(leading):
            indices = (f"{slot}{n + 1}", f"{slot}{n}")
            operands.append(Operand(str(Leaf(side, number, WEIGHT)), indices))
        ends.append(f"{slot}{len(leading)}")
    operands += parts.input_moment(("bra0", "ket0"), merged)
    merged.unite(ends[0], "k")
    merged.unite(ends[1], "l")
    return _between(pair, second_moment(pair), ("k", "l"), merged.renamed(operands))


def _node_mean(parts: TreeOperands, side: Side, powers: Powers) -> Definition:
    """The mean of a node of level 0, m[o] = sum_ij T[o, i, j] S[i, j]."""
    merged = Merge()
    moment = parts.edge(Pair(side, side), ("i", "j"), merged)
    tensor = parts.node(side, 0, "o", ("i", "j"), dense=False)
    return _product(node_mean(side), ("o",), merged.renamed((*tensor, *moment)), powers=powers)


def _up_the_tree(parts: TreeOperands, side: Side) -> Iterator[Definition]:
    """U of every level above the first, and u, M and V of level 1."""
    # P of a level reads the output o that D of the level below writes. Summed over o, widths are
    # gone: diagrams over units have numbers of hidden units for sizes.
    for level in range(1, parts.depth(side)):
        link = (
            Operand(leg_factor(side, level), ("h", "o")),
            Operand(output_factor(side, level - 1), ("o", "g")),
        )
        yield _product(unit_to_unit(side, level), ("h", "g"), link)
    if parts.depth(side) > 1:
        factor = Operand(leg_factor(side, 1), ("h", "o"))
        mean = (factor, Operand(node_mean(side), ("o",)))
        yield _product(unit_to_mean(side), ("h",), mean)
        node = (factor, *parts.node(side, 0, "o", ("i", "j"), dense=False))
        yield _product(unit_to_legs(side), ("h", "i", "j"), node, exchangeable=2)
        yield _to_outputs(parts, side)


def _to_outputs(parts: TreeOperands, side: Side) -> Definition:
    """V[k, h1, h2, ...]: the layers above level 1, from its units to the outputs.

    With two units V is a symmetric matrix for each output. With more units, of four levels, V is
    not symmetric as it is written.
    """
    top, tree = parts.depth(side) - 1, parts.trees[side]
    nodes = list(upper_nodes("bra", tree))
    operands: list[Operand] = []
    for level, unit, below in nodes:
        if level > 1:
            operands += [Operand(unit_to_unit(side, level), (unit, child)) for child in below]
    units = [unit for level, unit, _ in nodes if level == 1]
    # D of the top level ends the row of matrices that leads from units of level 1 to the outputs.
    operands.append(Operand(output_factor(side, top), ("k", root_index("bra", tree))))
    exchangeable = len(units) if top <= 2 else 0
    return _product(units_to_outputs(side), ("k", *units), operands, exchangeable=exchangeable)


def _along_edge(parts: TreeOperands, pair: Pair) -> Definition:
    """G between units of level 0, G[h, g] = sum_ij P[h, i] S[i, j] P[g, j]."""
    merged = Merge()
    moment = parts.edge(pair, ("i", "j"), merged)
    bra = Operand(leg_factor(pair.bra, 0), ("h", "i"))
    ket = Operand(leg_factor(pair.ket, 0), ("g", "j"))
    operands = merged.renamed((bra, ket, *moment))
    return _between(pair, units_along_edge(pair), ("h", "g"), operands)


def _at_outputs(parts: TreeOperands, pair: Pair) -> Definition:
    """K between units at the outputs, K[h, g] = sum_k D[k, h] D[k, g], k not the constant."""
    operands = []
    for side, unit in zip(pair, ("h", "g"), strict=True):
        operands.append(Operand(output_factor(side, parts.depth(side) - 1), ("k", unit)))
    return _between(pair, units_at_outputs(pair), ("h", "g"), (*operands, *parts.trace))


def fold_trees(
    models: dict[Side, Kinds],
    cross_only: bool,
    inputs: InputKind,
    lifted: bool,
    pairs: Iterable[Pair],
    slices: bool,
    n_ctx: int = 1,
) -> Problem:
    """The problem that has inner products for outputs, each a sum over diagrams of whole trees.

    Args:
        models: Kinds of the layers of every model, from the input up.
        cross_only: Whether bra legs join ket legs only (`Symmetric`), or any legs any (`Gaussian`).
        inputs: Structure of the input's second moment.
        lifted: Whether the constant is coordinate 0 of every bond.
        pairs: The inner products asked for.
        slices: Whether there is an inner product for every output coordinate, or their sum.
        n_ctx: Number of positions of flattened sequences, over which outputs are added up.

    Returns:
        Problem with outputs named by their pair. Its leaves are the arrays of
        `layer_tensors.symmetric_arrays`, the input's second moment `COVARIANCE` and, lifted,
        `TRACE`.
    """
    pairs = tuple(pairs)
    parts = TreeOperands(models, inputs, lifted, n_ctx)
    layers = layer_arrays(parts)
    # A diagram holds the arrays of a low level many times over. Divided by their scales, which are
    # read off the arrays, they are near 1, and so are their products; scales come back as
    # exponents, as often as `layer_powers` says.
    groups = tuple(ScaleGroup(array.name, degree=1, definition=array.name) for array in layers)
    # S of the pairs of models in which linear layers come first; S of others is the input's.
    compared = [pair for pair in _compared_pairs(parts) if parts.has_leading(pair)]
    moments = tuple(_second_moment(parts, pair) for pair in compared)
    shared = tensors_and_means(parts)
    if "units" in forms(parts):
        shared += matrices_between_units(parts)
    if has_upper_tensors(parts):
        shared += tuple(upper_tensors(parts))
    stages = [Stage(layers + moments, groups), Stage(shared, groups)]
    for pair in pairs:  # one stage each: a common stage would need the memory of all
        product = _inner_product(parts, pair, cross_only, slices)
        # The product is divided by its own scale too: the result is a number and an exponent.
        own = ScaleGroup(pair.group, degree=1, definition=pair.group)
        stages.append(Stage((product,), (own,)))
    symmetric = {IDENTITY} if inputs.moment == "diagonal" else {IDENTITY, COVARIANCE}
    outputs = tuple(pair.group for pair in pairs)
    return prune(Problem(tuple(stages), _leaf_shapes(parts), frozenset(symmetric), outputs))


def check_size(bra: Kinds, ket: Kinds, cross_only: bool) -> None:
    """Refuse trees that are too large or do not match, before diagrams are generated.

    Raises:
        TooLarge: The trees have more than `MAX_LEGS` legs together, or an odd number.
        ModelError: Only bra and ket legs may be joined, but the models' degrees differ.
    """
    one, two = tree(bra).legs, tree(ket).legs
    if cross_only and one != two:
        raise ModelError(
            "Symmetric() compares tensors of one order, but the models have degrees "
            f"{one} and {two}; use Gaussian()"
        )
    legs = one + two
    if legs > MAX_LEGS or legs % 2:
        said = (
            f"all legs in pairs, and models of degrees {one} and {two} have an odd number"
            if legs % 2
            else f"{legs} legs in more than 10^{legs // 2 - 2} ways; up to {MAX_LEGS} legs are "
            "planned (three bilinear layers a side have 16)"
        )
        raise TooLarge(
            f"the exact metric joins {said}. Use GaussianClosure(), an approximation, "
            "TreeSymmetric(), or forward passes, Empirical(inputs)"
        )


def _inner_product(parts: TreeOperands, pair: Pair, cross_only: bool, slices: bool) -> Definition:
    """All diagrams of a single inner product, each weighted by the number of its joinings.

    The Gaussian expectation is the sum over all pairings. The symmetriser P_n is the *mean* over
    the n! ways to join n legs of the bra to n of the ket, so for it counts are divided by n!.
    """
    bra, ket = parts.trees[pair.bra], parts.trees[pair.ket]
    joinings = float(math.factorial(bra.legs)) if cross_only else 1.0
    terms: list[Term] = []
    crossings: list[Crossing] = []
    for diagram in diagrams(bra, ket, cross_only):
        # One term per diagram; planning chooses between the forms in which its product is written.
        first, *others = (write(parts, pair, diagram, form, slices) for form in forms(parts))
        ways = tuple((Term(1.0, other),) for other in others)
        terms.append(Term(diagram.count / joinings, first, ways))
        crossings.append(crossing_part(diagram.edges, bra.bottoms, bra.bottoms + ket.bottoms))
    if has_upper_tensors(parts):
        terms = _by_crossing(parts, pair, terms, crossings)
    own = OUTPUT_INDEX if parts.n_ctx == 1 else COORDINATE_INDEX
    indices = (own,) if slices else ()
    return Definition(pair.group, indices, tuple(terms), powers=_scale_powers(parts, pair))


def _by_crossing(
    parts: TreeOperands, pair: Pair, terms: list[Term], crossings: list[Crossing]
) -> list[Term]:
    """A term for each crossing part: a product of upper tensors, or the diagrams themselves."""
    # With f and g free nodes, W_f and W_g are sums over the J_f and J_g ways to join the other
    # nodes of each model among themselves. A product of the two therefore holds J_f J_g joinings,
    # and diagrams that hold N together are N / (J_f J_g) such products: as often as there are ways
    # to choose the free nodes and to draw the crossing part on them.
    groups: dict[Hashable, list[int]] = {}
    for n, crossing in enumerate(crossings):
        groups.setdefault(crossing.form(), []).append(n)
    joined = []
    for group in groups.values():
        free, edges = crossings[group[0]]
        weight = sum(terms[n].weight for n in group)
        for side, count in zip(pair, free, strict=True):
            weight /= joinings_within(parts, side, count)
        as_they_were = []
        for n in group:
            share = terms[n].weight / weight
            as_they_were.append(terms[n]._replace(weight=share))
        product = write_over_upper(parts, pair, free, edges)
        joined.append(Term(weight, product, (tuple(as_they_were),)))
    return joined


def _scale_powers(parts: TreeOperands, pair: Pair) -> Powers:
    """The scale groups of an inner product; a power counts the copies of an array in both trees."""
    powers: dict[str, int] = {}
    for side in pair:
        orders = parts.trees[side].orders
        copies = 1
        for level in reversed(range(len(orders))):
            for group, times in layer_powers(parts, side, level, copies):
                powers[group] = powers.get(group, 0) + times
            # Each copy of a layer reads as many copies of the layer below as it has legs.
            copies *= orders[level]
    powers[pair.group] = 1
    return tuple(powers.items())


def _leaf_shapes(parts: TreeOperands) -> dict[str, tuple[int, ...]]:
    """Shape of every leaf that a definition may read."""
    layers = parts.models["A"]
    d_in = layers[0].d_in + parts.lifted
    d_out = layers[-1].d_out
    shapes: dict[str, tuple[int, ...]] = {IDENTITY: (d_in, d_in), COVARIANCE: (d_in, d_in)}
    if parts.inputs.moment == "diagonal":
        shapes[COVARIANCE] = (d_in,)
    for side, kinds in parts.models.items():
        for number, kind in enumerate(kinds):
            for role, shape in symmetric_shapes(kind, parts.lifted).items():
                shapes[str(Leaf(side, number, role))] = shape
    shapes[TRACE] = (d_out + parts.lifted,)
    if parts.n_ctx > 1:
        shapes[TRACE] = (d_out + 1, d_out // parts.n_ctx + 1)
    return shapes
