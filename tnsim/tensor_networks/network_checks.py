"""What may be summed. In: what a caller gives as networks. Out: the same, checked.

Every message says which network it is, what was found, and what was expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.core import Tracer

from tnsim.errors import ModelError
from tnsim.models.arrays import host_array

if TYPE_CHECKING:
    import quimb.tensor as qtn

WeightedNetwork = tuple[complex, "qtn.TensorNetwork"]


def weighted(networks: Any) -> Iterator[WeightedNetwork]:
    """Weights and networks, checked."""
    import quimb.tensor as qtn

    if isinstance(networks, qtn.TensorNetwork):
        networks = [(1.0, networks)]
    for number, item in enumerate(networks):
        pair = item if isinstance(item, tuple | list) else (item,)
        if len(pair) != 2 or not isinstance(pair[1], qtn.TensorNetwork):
            raise ModelError(
                "contract takes a quimb TensorNetwork or pairs (weight, TensorNetwork); "
                f"item {number} is ({', '.join(type(part).__name__ for part in pair)})"
            )
        weight, network = pair
        if isinstance(weight, Tracer):
            raise ModelError(
                f"the weight of network {number} is traced, but weights are part of the plan: "
                "multiply it into a tensor"
            )
        if np.ndim(weight) or not _is_finite(weight):
            raise ModelError(f"the weight of network {number} is no finite number: {weight}")
        if not network.num_tensors:
            raise ModelError(f"network {number} has no tensors")
        yield complex(weight) if np.iscomplexobj(weight) else float(weight), network


def _is_finite(weight: Any) -> bool:
    try:
        return bool(np.isfinite(weight))
    except TypeError:  # what is no number
        return False


def index_sizes(network: qtn.TensorNetwork, what: str) -> dict[str, int]:
    """Sizes of all indices of a network, the same on all tensors."""
    known: dict[str, int] = {}
    for tensor in network.tensors:
        for index, size in zip(tensor.inds, tensor.shape, strict=True):
            if known.setdefault(index, size) != size:
                raise ModelError(
                    f"the index {index!r} of {what} has sizes {known[index]} and {size}"
                )
    return known


def check_symmetric(array: Any, what: str) -> None:
    """Check that exchanging any two axes changes nothing, unless the array is traced.

    Raises:
        ModelError: It does.

    Example:
        >>> check_symmetric(np.eye(2), "the identity")
    """
    for axis in range(array.ndim - 1):
        same = array.shape[axis] == array.shape[axis + 1]
        if same and not isinstance(array, Tracer):
            same = np.array_equal(array, np.swapaxes(np.asarray(array), axis, axis + 1))
        if not same:
            raise ModelError(f"{what} is declared symmetric, but its axes are not exchangeable")


def check_equal(data: Any, array: Any, tags: frozenset[str]) -> None:
    """Tensors of one group hold equal arrays; what is traced is taken at its word."""
    same = tuple(data.shape) == tuple(array.shape)
    if same and not isinstance(data, Tracer) and not isinstance(array, Tracer):
        same = np.array_equal(host_array(data), array)
    if not same:
        raise ModelError(
            f"tensors with the tags {listed(tags)} are said to share one array, but theirs differ"
        )


def listed(names: Iterable[str]) -> str:
    """Up to eight names, in words."""
    names = list(names)
    shown = ", ".join(repr(str(name)) for name in itertools.islice(names, 8))
    if not names:
        return "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
