"""Norms and cosines as a result stores them.

Stored are the logarithm of a squared norm and the logarithm of its size, the sum of the absolute
contributions (see `engine.precision`). Cosines therefore have the same error bound in whatever
process they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.scaled import LOG_2, ScaledSum, log_abs, taken, total

_NORM, _NORMS = "log_norm", "log_norms"
Norms: TypeAlias = Mapping[str, ScaledSum]
"""Squared norms of some models over all outputs, and of each output where these are told apart."""


class Doubt(NamedTuple):
    """The largest error bound, and the cosine to which it belongs."""

    error: float
    cosine: str


def norm_arrays(norms: ScaledSum, slices: bool) -> dict[str, Float[np.ndarray, "models ..."]]:
    """The stored arrays of the squared norms of some models, by name without the side."""
    values = {_NORM: total(norms, slices)}
    if slices:
        values[_NORMS] = norms
    arrays = {}
    for name, norm in values.items():
        arrays[name] = log_abs(norm)
        arrays[f"{name}_size"] = log_abs(norm._replace(mantissa=norm.size))
    return arrays


def norms_in(
    arrays: Mapping[str, Any], side: str, at: Int[np.ndarray, " models"], slices: bool
) -> dict[str, ScaledSum]:
    """Squared norms of some models in the arrays of a store, with `slices` also of every output."""
    names = (_NORM, _NORMS) if slices else (_NORM,)
    norms = {}
    for name in names:
        log = np.asarray(arrays[f"{name}_{side}"][at])
        size = np.asarray(arrays[f"{name}_size_{side}"][at])
        # Size and norm may both be beyond floats, but their ratio is 1 where nothing cancels and
        # hardly larger where something does.
        norms[name] = ScaledSum(np.ones_like(log), log / LOG_2, np.exp(size - log))
    return norms


def tile_arrays(
    products: ScaledSum,
    bra: Norms,
    ket: Norms,
    same: Bool[np.ndarray, "rows columns"],
    arithmetic: Arithmetic,
) -> tuple[dict[str, Float[np.ndarray, "rows columns ..."]], Float[np.ndarray, "rows columns"]]:
    """The stored arrays of a tile by name, and the error bound of each pair.

    Args:
        products: Inner products of rows with columns, per output where there are norms of outputs.
        bra, ket: Norms of rows and columns, from `norms_in`.
        same: Pairs of a model with itself, with the exact cosine 1.
        arithmetic: Degree and precision of the computation, which bound its rounding.
    """
    inner = total(products, slices=_NORMS in bra)
    arrays = {"log_inner": log_abs(inner), "sign": np.sign(inner.mantissa)}
    errors = []
    for name, norm, values in (("similarity", _NORM, inner), ("slices", _NORMS, products)):
        if norm in bra:
            # Norms of rows along the first axis of the tile, norms of columns along the second.
            rows, columns = taken(bra[norm], np.s_[:, None]), taken(ket[norm], None)
            cosines = precision.cosine(values, rows, columns, arithmetic)
            arrays[name] = precision.clipped(cosines, arithmetic.dtype)
            errors.append(cosines.error.reshape(*same.shape, -1).max(axis=-1))
    for array in arrays.values():
        # A model with itself: cosine and sign are 1, without the rounding of the computation.
        array[same] = 1
    # The inner product of a model with itself is its stored squared norm, to the bit.
    squared = np.broadcast_to(log_abs(bra[_NORM])[:, None], same.shape)
    arrays["log_inner"][same] = squared[same]
    return arrays, np.where(same, 0.0, np.max(errors, axis=0))
