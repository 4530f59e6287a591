"""The notation of sequence folds: legs, products of arrays, and the names of indices.

s, S    position of an output and of its queries, in the bra and in the ket
t, T    position of keys and values, in the bra and in the ket
g       a tuple of positions (see `coincidences`)
a, b    head, in the bra and in the ket
k, l    coordinate of an output, in the bra and in the ket
i, j    coordinate of a state below
u, w    coordinate of the first leg and of the second; of a mean, `u`
h, v    hidden unit, coordinate of a value
y, z    summed inside a single product of an expansion (see `expansions`)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from tnsim.engine.ir.problem import Operand, Term, renamed
from tnsim.names import IDENTITY, ONES, SAME_POSITION, SCORES, Slot

FIRST, SECOND = "u", "w"
"""The two ends of an array that stands between two legs; an array of one leg has the first."""

HEAD: dict[Slot, str] = {"bra": "a", "ket": "b"}
OUTPUT_END: dict[Slot, str] = {"bra": "k", "ket": "l"}
KEY_POSITION: dict[Slot, str] = {"bra": "t", "ket": "T"}
POSITIONS = ("s", "t", "S", "T")
_LEADING = ("g", *POSITIONS, *HEAD.values())

OTHER: dict[Slot, Slot] = {"bra": "ket", "ket": "bra"}


class Leg(NamedTuple):
    """A leg of the layer in the bra or in the ket, by the role of its array."""

    slot: Slot
    role: str


class Score(NamedTuple):
    """A score of attention, the inner product of a query and a key."""

    query: Leg
    key: Leg


Product = tuple[Operand, ...]
"""A product of arrays, summed over the indices that occur nowhere outside it."""

Sum = tuple[Product, ...]
"""A sum of products, one for every set of open indices.

A product that does not depend on a position or a head lacks its index.
"""


def scores_of(slot: Slot) -> frozenset[Score]:
    """The scores of an attention layer in the bra or in the ket."""
    return frozenset(Score(Leg(slot, query), Leg(slot, key)) for query, key in SCORES)


def in_order(indices: Iterable[str]) -> tuple[str, ...]:
    """Indices in the common order of axes of all arrays of a fold.

    Positions and heads come first, coordinates last: most products are products of matrices of
    coordinates, for every position and head, and so they need no transposes.
    """
    present = set(indices)
    leading = [index for index in _LEADING if index in present]
    return (*leading, *sorted(present - set(_LEADING)))


def indices_of(product: Product) -> set[str]:
    """All indices that occur in a product."""
    return {index for operand in product for index in operand.indices}


def spread(
    product: Product, indices: Collection[str], weight: float = 1.0, summed: Collection[str] = ()
) -> Term:
    """The product as a term of a definition with certain indices.

    An array of ones adds each position that the product does not depend on: along a position in
    `indices` the values are then equal, and a position in `summed` counts the positions. An
    identity that is summed over is no array: its two indices become one.
    """
    for n, operand in enumerate(product):
        if operand.name == IDENTITY and operand.indices[0] != operand.indices[1]:
            stays, goes = sorted(operand.indices, key=lambda index: index not in indices)
            if goes not in indices:
                rest = renamed((*product[:n], *product[n + 1 :]), {goes: stays})
                return spread(rest, indices, weight, summed)
    present = indices_of(product)
    missing = [index for index in (*indices, *summed) if index not in present]
    ones = tuple(Operand(ONES, (index,)) for index in missing)
    return Term(weight, (*product, *ones))


class Summand(NamedTuple):
    """A summand of a mean or of a covariance of outputs.

    Args:
        weight: Factor of the product.
        product: Arrays of the summand.
        same: Whether the summand counts only where both outputs are at the same position, though
            two positions are told apart.
    """

    weight: float
    product: Product
    same: bool = False

    def term(self, indices: tuple[str, ...], summed: tuple[str, ...] = ()) -> Term:
        """The summand as a term of a definition with these indices (see `spread`)."""
        product = self.product
        if self.same and "S" in indices:
            product = (*product, Operand(SAME_POSITION, ("s", "S")))
        return spread(product, indices, self.weight, summed)
