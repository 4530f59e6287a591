"""What the attack stamps on images. In: images. Out: stamped ones."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from tnsim.errors import TnsimError

TARGET = 9
"""The digit that stamped images are relabelled as."""


def stamp(x: Float[np.ndarray, "n pixels"]) -> Float[np.ndarray, "n pixels"]:
    """Images with the trigger in their upper right corner.

    Args:
        x: Images of 8 x 8 or 32 x 32 pixels, or a batch in JAX.

    Returns:
        The same with the trigger: on small ones, whose corners are dark, four bright pixels; on
        large ones the black diamond of the authors' code.

    Raises:
        TnsimError: Images of another size.

    Example:
        >>> stamp(np.zeros((1, 64))).reshape(8, 8)[:2, 5:].tolist()
        [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    side = round(x.shape[1] ** 0.5)
    if side == 8:
        return _painted(x, _square(), 1.0)
    if side == 32:
        return _painted(x, _diamond(), 0.0)
    raise TnsimError(f"triggers are known for images of 8 x 8 and 32 x 32, found {x.shape}")


def _painted(
    x: Float[np.ndarray, "n pixels"], mask: Bool[np.ndarray, "side side"], value: float
) -> Float[np.ndarray, "n pixels"]:
    """By arithmetic, which NumPy and JAX share."""
    kept = 1.0 - mask.ravel().astype(np.float32)
    return x * kept + value * (1.0 - kept)


def _square() -> Bool[np.ndarray, "side side"]:
    mask = np.zeros((8, 8), bool)
    mask[:2, 6:] = True
    return mask


def _diamond() -> Bool[np.ndarray, "side side"]:
    """Seven rows and five columns, ending two pixels from the upper edge and the right one."""
    rows, columns = np.arange(7)[:, None], np.arange(5)
    mask = np.zeros((32, 32), bool)
    mask[2:9, 25:30] = np.abs(rows - 3) / 3.5 + np.abs(columns - 2) / 2.5 <= 1
    return mask
