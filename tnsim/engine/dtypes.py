"""Precisions that plans run in. In: what NumPy takes for one. Out: its name."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from tnsim.errors import ModelError

ITEM_BYTES = {"float64": 8, "float32": 4}
DTYPES = tuple(ITEM_BYTES)


def dtype_name(dtype: DTypeLike) -> str:
    """The name of a precision that plans run in.

    Args:
        dtype: what NumPy takes for one: `"float32"`, `np.float32`, `np.dtype("f4")`, `jnp.float32`.

    Returns:
        `"float64"` or `"float32"`.

    Raises:
        ModelError: for any other.

    Example:
        >>> import numpy as np
        >>> dtype_name(np.float32)
        'float32'
    """
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError):
        name = None
    if name not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    return name
