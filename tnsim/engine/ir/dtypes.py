"""Precisions that plans run in. In: what NumPy takes for one. Out: its name."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from tnsim.errors import ModelError

ITEM_BYTES = {"float64": 8, "float32": 4, "complex128": 16, "complex64": 8}
ALL_DTYPES = tuple(ITEM_BYTES)
DTYPES = ALL_DTYPES[:2]
"""Those of models, which are real; networks may be complex."""
_NAMES = {np.dtype(name).type: name for name in ALL_DTYPES}


def dtype_name(dtype: DTypeLike, allowed: tuple[str, ...] = DTYPES) -> str:
    """The name of a precision that plans run in.

    Args:
        dtype: What NumPy takes for one: `"float32"`, `np.float32`, `np.dtype("f4")`, `jnp.float32`.
        allowed: Names of those that make sense.

    Returns:
        One of the names.

    Raises:
        ModelError: For any other.

    Example:
        >>> import numpy as np
        >>> dtype_name(np.float32)
        'float32'
    """
    try:
        name = _NAMES.get(np.dtype(dtype).type)
    except (TypeError, ValueError):
        name = None
    if name not in allowed:
        raise ModelError(f"dtype must be one of {', '.join(allowed)}, found {dtype!r}")
    return name
