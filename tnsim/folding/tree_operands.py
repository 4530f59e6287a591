"""Two models as trees, and what their diagrams are written with. In: layer kinds. Out: operands.

Only nonlinear layers branch. *Level* 0 of a model's tree is its first nonlinear layer, level 1
the next, and so on; a layer of order n has n legs. Linear layers before level 0 are part of the
second moments below, those after a nonlinear layer are multiplied into it.

    name   array                              what it is
    T.A0   T[o, i, j] = sum_h D[o, h] P[h, i] P[h, j], the symmetrised tensor of level 0 of model A
    D.A0   D[o, h]                            its output factor, with the linear layers after it
    P.A0   P[h, i]                            its leg factor, one for both legs
    S.AB   S[k, l]                            second moment of what level 0 of A and of B read
    m.A    m[o] = sum_ij T[o, i, j] S[i, j]   mean of a node of level 0
    U.A1   U[h, g] = sum_o P[h, o] D[o, g]    from a hidden unit of level 1 to one of level 0
    u.A    u[h] = sum_o P[h, o] m[o]          from a unit of level 1 to the mean of a node
    M.A    M[h, i, j] = sum_o P[h, o] T[o, i, j]   what a unit of level 1 sees of a node's legs
    G.AB   G[h, g] = sum_ij P[h, i] S[i, j] P[g, j]   from a unit of A to one of B along an edge
    K.AB   K[h, g] = sum_k D[k, h] D[k, g]    from the units at A's output to those at B's
    V.A    V[k, h1, h2, ...]                  all above level 1, from its units to the outputs
    W.A2   W[k, o1, o2]                       all above level 0, symmetrised (see `upper_tensors`),
                                              with two of its nodes left to be joined to B's

P serves both legs because a symmetric bilinear layer is a sum of squares, a symmetrised CP
decomposition: with x the row of L and y the row of R that a hidden unit has,

    x (x) y + y (x) x = ((x + y) (x) (x + y) - (x - y) (x) (x - y)) / 2.

D holds the signs (see `symmetric.symmetric_arrays`). An attention layer has no such decomposition:
it comes as T itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tnsim.engine.problem import Merge, Operand
from tnsim.metrics.input_moments import InputKind
from tnsim.metrics.orbits import Tree
from tnsim.names import COVARIANCE, DENSE, TRACE, Pair, Side
from tnsim.tensors.kinds import Kinds, LayerKind
from tnsim.tensors.symmetric import symmetric_shapes

OUTPUT = "k"
"""Index of the models' common output coordinate; flattened, for sequences."""
COORDINATE = "o"
"""The same with positions added up."""


def layer_tensor(side: Side, level: int) -> str:
    """T of a layer."""
    return f"T.{side}{level}"


def output_factor(side: Side, level: int) -> str:
    """D of a layer."""
    return f"D.{side}{level}"


def leg_factor(side: Side, level: int) -> str:
    """P of a layer."""
    return f"P.{side}{level}"


def second_moment(pair: Pair) -> str:
    """S of two models, below their first nonlinear layers."""
    return f"S.{pair.group}"


def node_mean(side: Side) -> str:
    """m of a model, the mean of a node of level 0."""
    return f"m.{side}"


def unit_to_unit(side: Side, level: int) -> str:
    """U of a layer, from its units to those of the level below."""
    return f"U.{side}{level}"


def unit_to_mean(side: Side) -> str:
    """u of a model, from units of level 1 to the mean of a node."""
    return f"u.{side}"


def unit_to_legs(side: Side) -> str:
    """M of a model, from units of level 1 to the legs of a node."""
    return f"M.{side}"


def units_along_edge(pair: Pair) -> str:
    """G of two models, between units of level 0."""
    return f"G.{pair.group}"


def units_at_outputs(pair: Pair) -> str:
    """K of two models, between the units at their outputs."""
    return f"K.{pair.group}"


def units_to_outputs(side: Side) -> str:
    """V of a model, from units of level 1 to the outputs."""
    return f"V.{side}"


def upper_tensor(side: Side, free: int) -> str:
    """W of a model, with so many of its first-layer nodes left to be joined to the other's."""
    return f"W.{side}{free}"


class NonlinearLayer(NamedTuple):
    """A nonlinear layer by its number in the model, and the numbers of the linear ones after it."""

    number: int
    linear_after: tuple[int, ...]


class Groups(NamedTuple):
    """A model's layers: the leading linear ones, then each nonlinear one with its linear ones."""

    leading: tuple[int, ...]
    nonlinear: tuple[NonlinearLayer, ...]


def groups(kinds: Sequence[LayerKind]) -> Groups:
    """The layers of a model by what they belong to, from the input up.

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
    """Two models as trees, and the operands that stand for the parts of a diagram.

    Args:
        models: Kinds of the layers of every model, from the input up.
        inputs: Structure of the input's second moment.
        lifted: Whether the constant is coordinate 0 of every bond.
        n_ctx: Positions of flattened sequences, 1 for vectors.

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
        """The layers of every model by what they belong to."""
        return {side: groups(kinds) for side, kinds in self.models.items()}

    @cached_property
    def trees(self) -> dict[Side, Tree]:
        """The tree of every model."""
        return {side: tree(kinds) for side, kinds in self.models.items()}

    def depth(self, side: Side) -> int:
        """Number of nonlinear layers."""
        return len(self.trees[side].orders)

    def is_dense(self, side: Side, level: int) -> bool:
        """Whether a nonlinear layer comes as its whole tensor."""
        layer = self.groups[side].nonlinear[level]
        return DENSE in symmetric_shapes(self.models[side][layer.number], self.lifted)

    def has_leading(self, pair: Pair) -> bool:
        """Whether linear layers stand between the inputs and level 0 of either model."""
        return any(self.groups[side].leading for side in pair)

    @property
    def trace(self) -> Operand:
        """Leaves out the constant row; for sequences, adds up positions as well."""
        indices = (OUTPUT,) if self.n_ctx == 1 else (OUTPUT, COORDINATE)
        return Operand(TRACE, indices)

    def node(
        self, side: Side, level: int, bond: str, legs: Sequence[str], dense: bool
    ) -> tuple[Operand, ...]:
        """The symmetrised tensor of a nonlinear layer, whole or as a sum over its hidden units.

        Args:
            side: The model.
            level: The layer's level in the model's tree.
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
        """The second moment between two legs; where that is no array, the legs become one index.

        Args:
            pair: The models that the two legs belong to.
            ends: Indices of the legs.
            merged: Takes down which indices have become one.

        Returns:
            S[ends] or C[ends], the diagonal C[end], or nothing for the identity.
        """
        if pair == Pair("B", "A"):  # only S.AB is there, and S.BA is its transpose
            pair, ends = Pair("A", "B"), (ends[1], ends[0])
        if self.has_leading(pair):
            return (Operand(second_moment(pair), ends),)
        if self.inputs.moment == "full":
            return (Operand(COVARIANCE, ends),)
        merged.unite(*ends)
        if self.inputs.moment == "diagonal":
            return (Operand(COVARIANCE, (ends[0],)),)
        return ()


def hidden(bond: str) -> str:
    """Index over the hidden units of the node below a bond."""
    return f"h{bond}"
