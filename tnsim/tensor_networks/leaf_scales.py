"""Arrays in units of their own. In: the arrays of a sum of networks. Out: the same near one, a log.

No float holds what a product of a few hundred large arrays gives, so every array is divided by a
power of two, its *unit*, and the sum by what all its networks have in common. Networks that hold
each array equally often need no more. Where they do not, as in `A + A B`, only such units may be
taken out as change every network equally: with counts C[network, array] and logarithms s of the
units, s is projected on the null space of the differences of the rows of C,

    e = s - D^+ D s,    D = C[1:] - C[0],

arrays keep 2**(s - e), and the sum lacks 2**(C[0] e).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from tnsim.models.arrays import Array, library
from tnsim.tensor_networks.network_sums import Leaf

_LARGEST = 1000
"""Logarithm of the largest unit: its inverse is a float too."""
_NONE = 1e-9
"""Entries of a projection below this are rounding."""


def in_units(array: Array) -> tuple[Array, Any]:
    """An array over its unit, such that networks of random ones like it have values near one.

    A bond of size n between two random arrays multiplies a network by sqrt(n), so each of its ends
    stands for n**(1/4). Units are constants to derivatives: value and logarithm would cancel.

    Example:
        >>> array, log = in_units(np.full((2, 2), 3e200))
        >>> array.round(2).tolist(), float(log)
        ([[0.98, 0.98], [0.98, 0.98]], 666.0)
    """
    xp = library(array)
    fixed = jax.lax.stop_gradient(array) if isinstance(array, jax.Array) else array
    largest = abs(fixed).max()
    largest = xp.where(largest > 0, largest, 1.0)
    size = xp.sqrt(xp.mean(abs(fixed / largest) ** 2)) * array.size**0.25
    log = xp.log2(largest) + xp.log2(xp.where(size > 0, size, 1.0))
    log = xp.clip(xp.round(log), -_LARGEST, _LARGEST)
    return array * 2.0**-log, log


def balanced(
    leaves: Mapping[str, Leaf], counts: Float[np.ndarray, "networks arrays"]
) -> tuple[dict[str, Array], Any]:
    """Arrays without what may be taken out of all networks alike.

    Args:
        leaves: The arrays over their units, in the order of the columns of `counts`.
        counts: How often each network holds each array.

    Returns:
        The arrays, and the logarithm to base 2 of the factor that the sum then lacks.

    Example:
        With networks `A A B` and `A A`, A has a unit and B has not.

        >>> one = Leaf(np.ones(1), False, [])
        >>> leaves = {"A": one._replace(log=3.0), "B": one._replace(log=5.0)}
        >>> arrays, log = balanced(leaves, np.array([[2.0, 1.0], [2.0, 0.0]]))
        >>> float(arrays["A"][0]), round(float(arrays["B"][0]), 9), round(float(log), 9)
        (1.0, 32.0, 6.0)
    """
    logs = [leaf.log for leaf in leaves.values()]
    xp = library(logs)
    # What is in the null space of D changes every network alike; D^+ D projects on the rest, which
    # has to stay in the arrays.
    rows = np.unique(counts, axis=0)
    differences = rows[1:] - rows[0]
    projection = np.linalg.pinv(differences) @ differences
    stays = projection @ xp.stack(logs)
    arrays = {name: leaf.array for name, leaf in leaves.items()}
    for name, row, kept in zip(leaves, projection, stays, strict=True):
        if abs(row).max() > _NONE:
            arrays[name] = arrays[name] * 2.0**kept
    return arrays, rows[0] @ (xp.stack(logs) - stays)
