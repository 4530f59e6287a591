"""What all diagrams of two trees share, defined once. In: the trees. Out: definitions.

The names and formulas of these arrays stand in `tree_operands`. They come in two stages: first the
layers' arrays and the second moments of what level 0 reads, then what is built of those.
"""

from __future__ import annotations

from collections.abc import Iterator

from tnsim.engine.problem import Definition, Merge, Operand, ScaleGroup, Term
from tnsim.folding.tree_operands import (
    TreeOperands,
    layer_tensor,
    leg_factor,
    node_mean,
    output_factor,
    second_moment,
    unit_to_legs,
    unit_to_mean,
    unit_to_unit,
    units_along_edge,
    units_at_outputs,
    units_to_outputs,
)
from tnsim.names import (
    COVARIANCE,
    DENSE,
    FACTOR,
    PAIRS,
    SIGNED_DOWN,
    SLOTS,
    WEIGHT,
    Leaf,
    Pair,
    Side,
)

Powers = tuple[tuple[str, int], ...]
"""Scale groups of a definition, each with the power to which its scale enters."""


def layer_arrays(parts: TreeOperands) -> tuple[Definition, ...]:
    """D and P of every nonlinear layer, or T where it comes whole; linear layers multiplied in.

    Args:
        parts: The models' trees. So of all functions here; the formulas are in `tree_operands`.
    """
    definitions: list[Definition] = []
    for side in parts.models:
        for level in range(parts.depth(side)):
            if parts.is_dense(side, level):
                definitions.append(_whole_tensor(parts, side, level))
            else:
                definitions += _factors(parts, side, level)
    return tuple(definitions)


def scale_groups(arrays: tuple[Definition, ...]) -> tuple[ScaleGroup, ...]:
    """A scale group for each of the layers' arrays, under its name and read off the array itself.

    A diagram holds the arrays of a low level many times over. Divided by their scales they are near
    1, and so are their products; scales come back as logarithms, as often as `layer_powers` says.
    """
    return tuple(ScaleGroup(array.name, degree=1, definition=array.name) for array in arrays)


def second_moments(parts: TreeOperands) -> tuple[Definition, ...]:
    """S of the pairs of models in which linear layers come first; for others it is the input's."""
    return tuple(_second_moment(parts, pair) for pair in _pairs(parts) if parts.has_leading(pair))


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
            definitions.append(
                Definition(
                    layer_tensor(side, level),
                    ("o", "i", "j"),
                    (Term(1.0, tensor),),
                    exchangeable=2,
                    powers=powers,
                )
            )
            if level == 0:
                definitions.append(_node_mean(parts, side, powers))
    return tuple(definitions)


def matrices_between_units(parts: TreeOperands) -> tuple[Definition, ...]:
    """U, u and M of every model, G and K of every pair of models."""
    definitions: list[Definition] = []
    for side in parts.models:
        definitions += _up_the_tree(parts, side)
    for pair in _pairs(parts):
        definitions += [_along_edge(parts, pair), _at_outputs(parts, pair)]
    return tuple(definitions)


def layer_powers(parts: TreeOperands, side: Side, level: int, copies: int) -> Powers:
    """The scale groups of so many copies of a layer's tensor: T is linear in D and square in P.

    Args:
        parts: The models' trees.
        side: The model.
        level: The layer's level in its tree.
        copies: How often the tensor is in a product.
    """
    if parts.is_dense(side, level):
        return ((layer_tensor(side, level), copies),)
    return ((output_factor(side, level), copies), (leg_factor(side, level), 2 * copies))


def _pairs(parts: TreeOperands) -> Iterator[Pair]:
    """The pairs of models that are there."""
    for pair in PAIRS:
        if set(pair) <= set(parts.models):
            yield pair


def _linear_after(parts: TreeOperands, side: Side, level: int) -> tuple[list[Operand], str]:
    """The linear layers after a nonlinear one, from index x0 on, and the index they end in."""
    layers = parts.groups[side].nonlinear[level].linear_after
    weights = []
    for n, number in enumerate(layers):
        weights.append(Operand(str(Leaf(side, number, WEIGHT)), (f"x{n + 1}", f"x{n}")))
    return weights, f"x{len(layers)}"


def _whole_tensor(parts: TreeOperands, side: Side, level: int) -> Definition:
    """T of a layer that comes as its tensor."""
    number = parts.groups[side].nonlinear[level].number
    legs = tuple(f"i{leg}" for leg in range(parts.trees[side].orders[level]))
    weights, end = _linear_after(parts, side, level)
    tensor = Operand(str(Leaf(side, number, DENSE)), ("x0", *legs))
    name = layer_tensor(side, level)
    term = Term(1.0, (tensor, *weights))
    return Definition(name, (end, *legs), (term,), exchangeable=len(legs), powers=((name, 1),))


def _factors(parts: TreeOperands, side: Side, level: int) -> tuple[Definition, Definition]:
    """D and P of a layer."""
    number = parts.groups[side].nonlinear[level].number
    weights, end = _linear_after(parts, side, level)
    down = Operand(str(Leaf(side, number, SIGNED_DOWN)), ("x0", "h"))
    factor = Operand(str(Leaf(side, number, FACTOR)), ("h", "i"))
    d, p = output_factor(side, level), leg_factor(side, level)
    return (
        Definition(d, (end, "h"), (Term(1.0, (down, *weights)),), powers=((d, 1),)),
        Definition(p, ("h", "i"), (Term(1.0, (factor,)),), powers=((p, 1),)),
    )


def _second_moment(parts: TreeOperands, pair: Pair) -> Definition:
    """S[k, l] = W_X C W_Y^T; where C is the identity or a diagonal, the inputs share an index."""
    # A chain, for two linear layers in the bra and one in the ket
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
    if parts.inputs.moment == "full":
        operands.append(Operand(COVARIANCE, ("bra0", "ket0")))
    else:
        merged.unite("bra0", "ket0")
        if parts.inputs.moment == "diagonal":
            operands.append(Operand(COVARIANCE, ("bra0",)))
    merged.unite(ends[0], "k")
    merged.unite(ends[1], "l")
    term = Term(1.0, merged.renamed(operands))
    exchangeable = 2 if pair.bra == pair.ket else 0
    return Definition(second_moment(pair), ("k", "l"), (term,), exchangeable=exchangeable)


def _node_mean(parts: TreeOperands, side: Side, powers: Powers) -> Definition:
    """m[o] = sum_ij T[o, i, j] S[i, j]."""
    merged = Merge()
    moment = parts.edge(Pair(side, side), ("i", "j"), merged)
    tensor = parts.node(side, 0, "o", ("i", "j"), dense=False)
    term = Term(1.0, merged.renamed((*tensor, *moment)))
    return Definition(node_mean(side), ("o",), (term,), powers=powers)


def _up_the_tree(parts: TreeOperands, side: Side) -> Iterator[Definition]:
    """U of every level above the first, and u and M of what level 1 sees."""
    # P of a level reads the output o of the level below, which D of that one writes. Summed over o,
    # widths are gone: diagrams over units have numbers of hidden units for sizes.
    for level in range(1, parts.depth(side)):
        link = (
            Operand(leg_factor(side, level), ("h", "o")),
            Operand(output_factor(side, level - 1), ("o", "g")),
        )
        yield Definition(unit_to_unit(side, level), ("h", "g"), (Term(1.0, link),))
    if parts.depth(side) > 1:
        factor = Operand(leg_factor(side, 1), ("h", "o"))
        mean = (factor, Operand(node_mean(side), ("o",)))
        yield Definition(unit_to_mean(side), ("h",), (Term(1.0, mean),))
        node = (factor, *parts.node(side, 0, "o", ("i", "j"), dense=False))
        yield Definition(unit_to_legs(side), ("h", "i", "j"), (Term(1.0, node),), exchangeable=2)
    if parts.depth(side) > 1:
        yield _to_outputs(parts, side)


def _to_outputs(parts: TreeOperands, side: Side) -> Definition:
    """V[k, h1, h2, ...]: all above level 1, from its units to the outputs.

    With two units it is a symmetric matrix for each output. With more, of four levels, it would
    have to be symmetrised; that many legs are not planned.
    """
    top = parts.depth(side) - 1
    operands: list[Operand] = []
    units = ["h"]
    for level in reversed(range(2, top + 1)):
        order = parts.trees[side].orders[level]
        below: list[str] = []
        for unit in units:
            children = [f"{unit}.{child}" for child in range(order)]
            name = unit_to_unit(side, level)
            operands += [Operand(name, (unit, child)) for child in children]
            below += children
        units = below
    operands.append(Operand(output_factor(side, top), ("k", "h")))
    exchangeable = len(units) if top <= 2 else 0
    indices = ("k", *units)
    term = Term(1.0, tuple(operands))
    return Definition(units_to_outputs(side), indices, (term,), exchangeable=exchangeable)


def _along_edge(parts: TreeOperands, pair: Pair) -> Definition:
    """G[h, g] = sum_ij P[h, i] S[i, j] P[g, j]."""
    merged = Merge()
    moment = parts.edge(pair, ("i", "j"), merged)
    bra = Operand(leg_factor(pair.bra, 0), ("h", "i"))
    ket = Operand(leg_factor(pair.ket, 0), ("g", "j"))
    term = Term(1.0, merged.renamed((bra, ket, *moment)))
    exchangeable = 2 if pair.bra == pair.ket else 0
    return Definition(units_along_edge(pair), ("h", "g"), (term,), exchangeable=exchangeable)


def _at_outputs(parts: TreeOperands, pair: Pair) -> Definition:
    """K[h, g] = sum_k D[k, h] D[k, g], without the constant row."""
    operands = []
    for side, unit in zip(pair, ("h", "g"), strict=True):
        operands.append(Operand(output_factor(side, parts.depth(side) - 1), ("k", unit)))
    if parts.lifted:
        operands.append(parts.trace)
    exchangeable = 2 if pair.bra == pair.ket else 0
    term = Term(1.0, tuple(operands))
    return Definition(units_at_outputs(pair), ("h", "g"), (term,), exchangeable=exchangeable)
