"""Arrays by the names of a problem's leaves. In: arrays of layers, inputs. Out: leaves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from tnsim.models.model import Model
from tnsim.names import Leaf, Side
from tnsim.problems.diagrams import tree
from tnsim.problems.tensors.kinds import Kinds, kinds

T = TypeVar("T")


def by_side(bra: T, ket: T | None) -> dict[Side, T]:
    """What is there of each model, under its name.

    Example:
        >>> by_side(1, 2), by_side(1, None)
        ({'A': 1, 'B': 2}, {'A': 1})
    """
    if ket is None:
        return {"A": bra}
    return {"A": bra, "B": ket}


def kinds_of_other(model: Model | None) -> Kinds | None:
    """Kinds of the layers of the second model, None where there is none.

    Example:
        >>> kinds_of_other(None)
    """
    return None if model is None else kinds(model)


def must_lift(bra: Kinds, ket: Kinds) -> bool:
    """Whether the constant coordinate is needed.

    It is where some layer has a constant, or where only one of the models is of odd degree:
    unlifted, an odd and an even model have no legs to join.

    Example:
        >>> import tnsim
        >>> biased = kinds(tnsim.Model([tnsim.Linear([[1.0]], [1.0])]))
        >>> must_lift(biased, biased)
        True
    """
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


def all_but_constant(d_out: int) -> Float[np.ndarray, " out"]:
    """0 for the constant row, 1 for the outputs: (1 + d_out,).

    Example:
        >>> all_but_constant(2)
        array([0., 1., 1.])
    """
    return np.concatenate([np.zeros(1), np.ones(d_out)])


def identities(names: Collection[str], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Identity matrices, those alone that are read: few plans read one, and it may be large.

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
