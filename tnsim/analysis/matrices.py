"""Matrices that know what they compare. In: models, arrays, results of pairwise runs. Out: checked xarray objects.

A pairwise result has the dimensions `a` (rows) and `b` (columns), labelled by training step where it is known
and by name otherwise. What reads such a result takes it whole, takes one of its matrices, or a plain array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import MissingExtra, ResultError

if TYPE_CHECKING:
    import xarray as xr

    Matrix = xr.Dataset | xr.DataArray | Float[np.ndarray, "A B"]

SYMMETRIC = 1e-4


def labelled(
    values: Float[np.ndarray, "A B"],
    labels: Sequence[int | str],
    attrs: Mapping[str, Any],
    name: str,
) -> xr.DataArray:
    """A square matrix over `labels` on both sides. Raises `MissingExtra` without xarray."""
    return _xarray().DataArray(
        values, dims=("a", "b"), coords={"a": labels, "b": labels}, attrs=dict(attrs), name=name
    )


def labels_of(models: Sequence[Any]) -> list[int] | list[str]:
    """The labels of a series, as integers where all of them are numbers; of another sequence its positions."""
    labels = getattr(models, "labels", None)
    if labels is None:
        return list(range(len(models)))
    return [int(x) for x in labels] if all(x.isdecimal() for x in labels) else list(labels)


def matrix(result: Matrix) -> xr.DataArray:
    """The (a, b) matrix: of a result its `similarity`, of an array its labels are the positions.

    Raises `ResultError` unless it is finite and has exactly these two dimensions.
    """
    result = _array(result)
    if set(result.dims) != {"a", "b"}:
        raise ResultError(
            f"expected a matrix over (a, b), found dimensions {result.dims}; select the others first, as in .sel(output=0)"
        )
    result = result.transpose("a", "b")
    if not np.isfinite(result.values).all():
        i, j = np.argwhere(~np.isfinite(result.values))[0]
        found = f"{result.values[i, j]} at row {i}, column {j}"
        raise ResultError(
            f"{result.name or 'the matrix'} is not finite: {found}; finish the run, or choose another variable"
        )
    return result


def _array(result: Matrix) -> xr.DataArray:
    """The matrix that is meant, with dimensions; it may have others than (a, b)."""
    xr = _xarray()
    given: Any = result
    if isinstance(given, xr.DataArray):
        return given
    if isinstance(given, xr.Dataset):
        if "similarity" in given:
            return given["similarity"]
        names = ", ".join(map(str, given)) or "no variable at all"
        raise ResultError(f"the result has no similarity, only {names}")
    values = np.asarray(given, np.float64)
    if values.ndim != 2:
        raise ResultError(
            f"expected a matrix of similarities, found an array of shape {values.shape}"
        )
    rows, columns = values.shape
    labels = {"a": range(rows), "b": range(columns)}
    return xr.DataArray(values, dims=("a", "b"), coords=labels)


def square(result: Matrix) -> xr.DataArray:
    """As `matrix`, of one set of models with itself, symmetrised. Raises `ResultError` where it is anything else."""
    found = matrix(result)
    rows, columns = found.shape
    if rows != columns or not np.array_equal(found["a"], found["b"]):
        raise ResultError(
            f"this needs all pairs of one set of models, found {rows} rows and {columns} columns that are not the same models"
        )
    if rows == 0:
        raise ResultError("the result holds no models")
    values = found.values
    if not is_symmetric(values):
        difference = np.abs(values - values.T).max()
        raise ResultError(
            f"the matrix is not symmetric: entries differ from their mirror images by up to {difference:.3g}"
        )
    return found.copy(data=(values + values.T) / 2)


def is_symmetric(values: Float[np.ndarray, "A A"]) -> bool:
    """Whether the two triangles are the same up to the rounding of float32, in which they may have been computed apart."""
    return bool(np.abs(values - values.T).max() <= SYMMETRIC * np.abs(values).max())


def _xarray() -> Any:
    try:
        import xarray
    except ImportError:
        raise MissingExtra("xarray", "pairwise", "a labelled matrix of similarities") from None
    return xarray
