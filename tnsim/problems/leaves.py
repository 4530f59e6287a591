"""The leaves of a problem: arrays of layers and inputs under the names that definitions read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tnsim.names import Leaf, Side
from tnsim.problems.diagrams import tree
from tnsim.problems.tensors.kinds import Kinds

T = TypeVar("T")


def by_side(bra: T, ket: T | None) -> dict[Side, T]:
    """The given objects of the two models by side, without a missing second model.

    Example:
        >>> by_side(1, 2), by_side(1, None)
        ({'A': 1, 'B': 2}, {'A': 1})
    """
    if ket is None:
        return {"A": bra}
    return {"A": bra, "B": ket}


def must_lift(bra: Kinds, ket: Kinds) -> bool:
    """Whether the constant coordinate is needed.

    The constant is needed where some layer has a constant, or where only a single model is of
    odd degree: without the lift, an odd and an even model have no complete pairing of legs.

    Example:
        >>> import tnsim
        >>> from tnsim.problems.tensors.kinds import kinds
        >>> biased = kinds(tnsim.Model([tnsim.Linear([[1.0]], [1.0])]))
        >>> must_lift(biased, biased)
        True
    """
    # A kind depends on shapes and on which biases exist, never on numbers, so plans are found by
    # it.
    if any(layer.constant for layer in bra + ket):
        return True
    return tree(bra).legs % 2 != tree(ket).legs % 2


def named(side: Side, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arrays of a model's layers, by leaf name.

    Example:
        >>> named("A", [{"WEIGHT": 1.0}])
        {'A.LAYER0.WEIGHT': 1.0}
    """
    leaves: dict[str, Any] = {}
    for number, roles in enumerate(layers):
        for role, array in roles.items():
            leaves[str(Leaf(side, number, role))] = array
    return leaves


def identities(names: Collection[str], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The identity matrices among the names that are read; the others may be large.

    Example:
        >>> list(identities(["IDENTITY"], {"IDENTITY": 2, "SAME_POSITION": 1000}))
        ['IDENTITY']
    """
    return {name: np.eye(size) for name, size in sizes.items() if name in names}


def only(names: Collection[str], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that a plan reads.

    Example:
        >>> only(["MEAN"], {"MEAN": 1.0, "TRACE": 2.0})
        {'MEAN': 1.0}
    """
    return {name: array for name, array in leaves.items() if name in names}
