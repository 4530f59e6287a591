"""Blocks of inner products that cannot overflow. In: mantissas and logarithms. Out: sums, totals and cosines of them.

A block holds `mantissa * exp(log)`: both have the shape of the pairs and, where the products are
wanted per output, one more axis at the end; `log` lacks it where outputs share their scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float


class Products(NamedTuple):
    """`mantissa * exp(log)`, NumPy float64; `mantissa` may have a trailing output axis that `log` lacks."""

    mantissa: Float[np.ndarray, "*pairs_and_outputs"]
    log: Float[np.ndarray, "*pairs"] | Float[np.ndarray, "*pairs_and_outputs"]


class Norms(NamedTuple):
    """Squared norms, and which of them are nothing but rounding because the terms of a combination cancelled."""

    products: Products
    cancelled: Bool[np.ndarray, " models"]


def add(parts: Sequence[Products]) -> Products:
    """Their sum, in the gauge of the largest, pair by pair."""
    log = np.max([part.log for part in parts], axis=0)
    return Products(sum(_in_gauge(part, log) for part in parts), log)


def total(products: Products, per_output: bool) -> Products:
    """The products over all outputs."""
    if not per_output:
        return products
    if products.mantissa.ndim == products.log.ndim:
        log = products.log.max(axis=-1)
        products = Products(_in_gauge(products, log[..., None]), log)
    return Products(products.mantissa.sum(axis=-1), products.log)


def log_abs(products: Products) -> Float[np.ndarray, "*pairs_and_outputs"]:
    """`log |product|`, -inf for zero."""
    log = products.log if products.mantissa.ndim == products.log.ndim else products.log[..., None]
    with np.errstate(divide="ignore"):
        return np.log(np.abs(products.mantissa)) + log


def cosine(
    products: Products, rows: Float[np.ndarray, "R ..."], columns: Float[np.ndarray, "C ..."]
) -> Float[np.ndarray, "R C ..."]:
    """Products over norms given as `log <a|a>` of the rows and of the columns, within [-1, 1] (Cauchy-Schwarz)."""
    scaled = np.exp(log_abs(products) - (rows[:, None] + columns[None, :]) / 2)
    return np.clip(np.sign(products.mantissa) * scaled, -1.0, 1.0)


def _in_gauge(part: Products, log: np.ndarray) -> np.ndarray:
    factor = np.exp(part.log - log)
    return part.mantissa * (factor if part.mantissa.ndim == factor.ndim else factor[..., None])
