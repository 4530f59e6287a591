"""Where batches run.

In: arrays with a leading axis of models. Out: the same, laid over all local devices.

JAX shards programs by the placement of their arguments, so this is all there is to using several
devices. With one device nothing is copied or padded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BY_MODEL = PartitionSpec("models")


def device() -> str:
    """What programs run on, as results name it: "cpu", or the kind of an accelerator.

    Example:
        >>> isinstance(device(), str)
        True
    """
    first = jax.local_devices()[0]
    if first.platform == "cpu":
        return "cpu"
    return f"{first.platform}: {first.device_kind}"


@cache
def mesh() -> Mesh:
    """All local devices in a row."""
    return Mesh(np.array(jax.local_devices()), ("models",))


def spread(tree: Any) -> Any:
    """Arrays with their first axis divided over the devices.

    It becomes a multiple of their number: the last entry is repeated to fill it. With one device
    nothing has to be divisible.
    """
    if mesh().size == 1:
        return jax.device_put(tree)
    return jax.device_put(jax.tree.map(_padded, tree), NamedSharding(mesh(), BY_MODEL))


def replicated(tree: Any) -> Any:
    """The same arrays on every device."""
    return jax.device_put(tree, NamedSharding(mesh(), PartitionSpec()))


def _padded(array: Any) -> Any:
    missing = -len(array) % mesh().size
    if not missing:
        return array
    return jax.numpy.concatenate([array, jax.numpy.repeat(array[-1:], missing, axis=0)])
