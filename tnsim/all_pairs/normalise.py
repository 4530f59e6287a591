"""Norms and cosines as a result keeps them.

In: inner products. Out: arrays by name, error bounds.

Stored are a squared norm's logarithm and that of its size, the sum of the absolute contributions
(see `engine.precision`), so that cosines have the same error bound in whatever process they are
computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.engine.scaled import LogScaled, log_abs, taken, total

_NORM, _NORMS = "log_norm", "log_norms"


class Doubt(NamedTuple):
    """The largest bound of an error, and the cosine that it belongs to."""

    error: float
    cosine: str


def norm_arrays(norms: LogScaled, per_output: bool) -> dict[str, Float[np.ndarray, "models ..."]]:
    """What is stored of the squared norms of some models, by name without the side."""
    values = {_NORM: total(norms, per_output)}
    if per_output:
        values[_NORMS] = norms
    arrays = {}
    for name, norm in values.items():
        arrays[name] = log_abs(norm)
        arrays[f"{name}_size"] = log_abs(norm._replace(mantissa=norm.size))
    return arrays


def norms_in(
    arrays: Mapping[str, Any], side: str, at: slice, per_output: bool
) -> dict[str, LogScaled]:
    """Squared norms of some models as stored, with `per_output` also those of every output."""
    names = (_NORM, _NORMS) if per_output else (_NORM,)
    norms = {}
    for name in names:
        log = np.asarray(arrays[f"{name}_{side}"][at])
        size = np.asarray(arrays[f"{name}_size_{side}"][at])
        norms[name] = LogScaled(np.ones_like(log), log, np.exp(size - log))
    return norms


def tile_arrays(
    products: LogScaled,
    bra: Mapping[str, LogScaled],
    ket: Mapping[str, LogScaled],
    same: Bool[np.ndarray, "rows columns"],
    arithmetic: Arithmetic,
) -> tuple[dict[str, Float[np.ndarray, "rows columns ..."]], Float[np.ndarray, "rows columns"]]:
    """What is stored of a tile, by name, and the bound of each pair's error.

    Args:
        products: Inner products of rows with columns, per output where there are norms of outputs.
        bra, ket: Norms of rows and columns, from `norms_in`.
        same: Pairs that are one model twice, whose cosine is 1.
        arithmetic: What they were computed with.
    """
    inner = total(products, per_output=_NORMS in bra)
    arrays = {"log_inner": log_abs(inner), "sign": np.sign(inner.mantissa)}
    errors = []
    for name, norm, values in (("similarity", _NORM, inner), ("slices", _NORMS, products)):
        if norm in bra:
            rows = taken(bra[norm], np.s_[:, None])
            columns = taken(ket[norm], None)
            cosines = precision.cosine(values, rows, columns, arithmetic)
            arrays[name] = precision.clipped(cosines)
            errors.append(cosines.error.reshape(*same.shape, -1).max(axis=-1))
    for array in arrays.values():
        array[same] = 1
    rows = np.broadcast_to(bra[_NORM].log[:, None], same.shape)
    arrays["log_inner"][same] = rows[same]
    return arrays, np.where(same, 0.0, np.max(errors, axis=0))
