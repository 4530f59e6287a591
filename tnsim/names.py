"""The grammar of names that users meet: tags and indices of networks, names of leaves in plans.

No other module writes them. Names of definitions and indices inside a problem belong to the family
that makes it (`problems.diagrams`, `problems.sequences.notation`).

Tags of a quimb network (all of a tensor's tags at once):

    side       `A` for the bra, `B` for the ket
    layer      `LAYER{i}`, counted from the input
    role       `WEIGHT` for a linear layer; `LEFT`, `RIGHT`, `DOWN` for a bilinear layer;
               `Q1`, `K1`, `Q2`, `K2`, `V`, `O`, `MASK` for attention
    copy       `COPY{j}`: which of the identical copies in the unrolled tree, 0 at the left
    operator   `SYMMETRISER`, `COVARIANCE`, `MEAN`, `KERNEL`: nodes that a metric inserts
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

Side = Literal["A", "B"]
"""Name of one of the two models under comparison."""
SIDES: tuple[Side, Side] = ("A", "B")
Slot = Literal["bra", "ket"]
"""Place of a model in an inner product: in <A|A>, model A has both places."""
SLOTS: tuple[Slot, Slot] = ("bra", "ket")
WEIGHT, LEFT, RIGHT, DOWN, SKIP = "WEIGHT", "LEFT", "RIGHT", "DOWN", "SKIP"
UNIT = "UNIT"
"""Role of the vector that reads the constant from a lifted leg, if a skip leaves several legs."""
FACTOR, SIGNED_DOWN, DENSE = "FACTOR", "SIGNED_DOWN", "DENSE"
VALUE, OUTPUT, MASK = "V", "O", "MASK"
SYMMETRISER, COVARIANCE, MEAN = "SYMMETRISER", "COVARIANCE", "MEAN"
KERNEL = "KERNEL"
TRACE, IDENTITY = "TRACE", "IDENTITY"
SCORES = (("Q1", "K1"), ("Q2", "K2"))
"""Roles of the query and the key of each score of attention."""
STREAM = "STREAM"
"""Role of the leg that reads the residual stream past a layer."""
ONE, ONES, SAME_POSITION = "ONE", "ONES", "SAME_POSITION"
"""Leaves of sequences: the constant 1, a 1 for every position, the identity over positions."""
AT, COUNT = "AT", "COUNT"
"""Leaves of a pattern of positions: places of a class, outputs at which a tuple counts."""
OUT = "out"


class Pair(NamedTuple):
    """The models in bra and ket of an inner product: AA, AB or BB."""

    bra: Side
    ket: Side

    @property
    def group(self) -> str:
        """Name of the pair's inner product, and of its scale group."""
        return self.bra + self.ket


PAIRS = (Pair("A", "A"), Pair("B", "B"), Pair("A", "B"))


def bias_of(role: str) -> str:
    """Role of the bias that belongs to the matrix `role`."""
    return f"{role}_BIAS"


def layer_tag(layer: int) -> str:
    """Tag of the tensors of a layer in a network."""
    return f"LAYER{layer}"


def copy_tag(copy: int) -> str:
    """Tag of the tensors of a copy of a layer."""
    return f"COPY{copy}"


def input_index(leg: int) -> str:
    """Index of a lifted input leg of an open network."""
    return f"in{leg}"


def bond_index(side: str, layer: int, copy: int) -> str:
    """Index of the bond that leaves copy `copy` of layer `layer`; layer -1 is the input."""
    return f"{side}_bond{layer}_{copy}"


def inner_index(side: str, layer: int, copy: int, name: str) -> str:
    """Index inside a copy of a layer: hidden units of a bilinear layer, heads of attention."""
    return f"{side}_{name}{layer}_{copy}"


def role_index(side: str, layer: int, copy: int, leg: int) -> str:
    """Index over the roles (left and right, q1 to v) that the symmetriser of a copy permutes."""
    return f"{side}_role{layer}_{copy}_{leg}"


class Leaf(NamedTuple):
    """Name of a weight array in a plan: model, layer and role."""

    side: str
    layer: int
    role: str

    def __str__(self) -> str:
        return f"{self.side}.{layer_tag(self.layer)}.{self.role}"


def model_leaf(side: Side, role: str) -> str:
    """Name of an array of a whole model in a plan, such as its table over tokens."""
    return f"{side}.{role}"


def on_side(leaf: str, side: Side) -> str:
    """Name of the same array of the model on a given side.

    Example:
        >>> on_side("A.LAYER0.WEIGHT", "B")
        'B.LAYER0.WEIGHT'
    """
    return side + leaf[1:]


def side_of(leaf: str) -> Side | None:
    """The model to which an array of a plan belongs; None for an array of no model.

    Example:
        >>> side_of("A.LAYER0.WEIGHT"), side_of("MEAN")
        ('A', None)
    """
    first, dot, _ = leaf.partition(".")
    for side in SIDES:
        if dot and first == side:
            return side
    return None


class PositionLeaf(NamedTuple):
    """Name of an array of tuples of different positions.

    Args:
        array: `AT`, which reads arrays at a position of every tuple, or `COUNT`, which says at
            which outputs a tuple counts.
        relative: Whether tuples stand for their translates.
        size: Number of positions of a tuple.
        ranks: The rank of a position in tuples of every order, for each axis of positions.
    """

    array: str
    relative: bool
    size: int
    ranks: tuple[str, ...]

    def __str__(self) -> str:
        how = "relative" if self.relative else "absolute"
        return " ".join([self.array, how, str(self.size), *self.ranks])

    @classmethod
    def of(cls, name: str) -> Self | None:
        """The leaf that has a name; None for the name of any other array."""
        array, *words = name.split(" ")
        if array not in (AT, COUNT):
            return None
        how, size, *ranks = words
        return cls(array, how == "relative", int(size), tuple(ranks))
