"""Where on the data two networks differ: by input, and along which directions of the outputs.

With `d(x) = b(x) - a(x)` and weights w of the inputs, `|b - a|^2` is the sum of `w(x) |d(x)|^2`,
whose terms say on which inputs, and at which positions of a sequence, the change is. The singular
value decomposition of the matrix of all `sqrt(w(x)) d(x)` gives its directions: the first k of them
leave out less of the change than any other k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, TooLarge

if TYPE_CHECKING:
    import xarray as xr

MOST_BYTES = 2**31
"""Most bytes of differences that directions are found from."""


class Batch(NamedTuple):
    """The difference of two networks on some inputs.

    Attributes:
        weights: Weight of each input.
        values: Outputs of b less those of a.
    """

    weights: Float[np.ndarray, " inputs"]
    values: Float[np.ndarray, "inputs *positions outputs"]

    @property
    def squares(self) -> Float[np.ndarray, "inputs *positions"]:
        """Weighted squared lengths of the differences."""
        values = self.values if self.values.ndim > 1 else self.values[:, None]
        weights = self.weights.reshape(-1, *(1,) * (values.ndim - 2))
        return weights * np.einsum("...o,...o->...", values, values)


def by_input(batches: Iterator[Batch]) -> Float[np.ndarray, "inputs *positions"]:
    """The terms of `|b - a|^2`, input by input.

    Args:
        batches: Differences on all inputs.

    Example:
        >>> batch = Batch(np.array([0.5, 0.5]), np.array([[3.0, 4.0], [0.0, 1.0]]))
        >>> by_input(iter([batch])).tolist()
        [12.5, 0.5]
    """
    return np.concatenate([batch.squares for batch in batches])


def directions(batches: Iterator[Batch], count: int) -> xr.Dataset:
    """The leading directions of a difference.

    Args:
        batches: Differences on all inputs.
        count: Most directions.

    Returns:
        Over `direction` the `share` of `|b - a|^2`, unit vectors `output` (direction, coordinate),
        and coefficients `along` (direction, input, and position of sequences).

    Raises:
        ModelError: There are no directions.
        TooLarge: The differences do not fit in memory.

    Example:
        >>> batch = Batch(np.array([0.5, 0.5]), np.array([[3.0, 0.0], [0.0, 1.0]]))
        >>> found = directions(iter([batch]), 1)
        >>> found.share.values.tolist(), abs(found.along.values).tolist()
        ([0.9], [[3.0, 0.0]])
    """
    import xarray as xr

    if count < 1:
        raise ModelError(f"count is a number of directions from 1, found {count!r}")
    weights, values, held = [], [], 0
    for batch in batches:
        held += batch.values.nbytes
        if held > MOST_BYTES:
            raise TooLarge(
                f"directions are found from all outputs at once, more than {MOST_BYTES / 2**30:g} "
                "GiB here: take fewer inputs, or an output of the network that is smaller than "
                "logits, as by tnsim.Empirical(inputs, output='last_hidden_state')"
            )
        weights.append(batch.weights)
        values.append(batch.values if batch.values.ndim > 1 else batch.values[:, None])
    each, all_values = np.concatenate(weights), np.concatenate(values)
    *places, width = all_values.shape
    rows = all_values.reshape(-1, width)
    roots = np.sqrt(np.repeat(each, len(rows) // len(each)))
    _, sizes, outputs = np.linalg.svd(roots[:, None] * rows, full_matrices=False)
    # The sign of a direction is free: the largest entry of each is positive.
    largest = np.take_along_axis(outputs, abs(outputs).argmax(axis=1)[:, None], axis=1)
    outputs = outputs * np.sign(largest)
    total = (sizes**2).sum()
    if not total:
        raise ModelError("the networks are the same function on these inputs: no direction changed")
    # Singular values that are rounding are no directions.
    kept = min(count, int((sizes > sizes[0] * max(rows.shape) * np.finfo(rows.dtype).eps).sum()))
    names = ("input", "position") if len(places) < 3 else [f"axis_{n}" for n in range(len(places))]
    along = (outputs[:kept] @ rows.T).reshape(kept, *places)
    content: dict[str, Any] = {
        "share": ("direction", sizes[:kept] ** 2 / total),
        "output": (("direction", "coordinate"), outputs[:kept]),
        "along": (("direction", *names[: len(places)]), along),
    }
    return xr.Dataset(content)
