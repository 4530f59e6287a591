"""Names of the precisions that plans run in."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from tnsim.errors import ModelError

ITEM_BYTES = {"float64": 8, "float32": 4, "complex128": 16, "complex64": 8}
ALL_DTYPES = tuple(ITEM_BYTES)
DTYPES = ALL_DTYPES[:2]
"""Precisions of models, which are real; networks may be complex."""
_NAMES = {np.dtype(name).type: name for name in ALL_DTYPES}


def dtype_name(dtype: DTypeLike, allowed: tuple[str, ...] = DTYPES) -> str:
    """The name of a precision that plans run in.

    Args:
        dtype: Any spelling that NumPy accepts: `"float32"`, `np.float32`, `np.dtype("f4")`,
            `jnp.float32`; or `torch.float32`.
        allowed: Names of the precisions that the caller accepts.

    Returns:
        An allowed name.

    Raises:
        ModelError: For a precision that is not allowed, or no precision at all.

    Example:
        >>> import numpy as np
        >>> dtype_name(np.float32)
        'float32'
    """
    try:
        # Types of PyTorch, which is not imported for them, are known by their names.
        is_torch = str(dtype).startswith("torch.")
        known = str(dtype).removeprefix("torch.") if is_torch else dtype
        name = _NAMES.get(np.dtype(known).type)
    except (TypeError, ValueError):
        name = None
    if name not in allowed:
        raise ModelError(f"dtype must be one of {', '.join(allowed)}, found {dtype!r}")
    return name
