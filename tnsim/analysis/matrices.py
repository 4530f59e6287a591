"""Labelled, checked matrices. In: models, arrays, results of pairwise runs. Out: xarray objects.

A pairwise result has the dimensions `a` (rows) and `b` (columns), labelled by training step where
it is known and by name otherwise. What reads such a result takes it whole, takes one of its
matrices, or a plain array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Float

from tnsim.errors import MissingExtra, ModelError, ResultError

if TYPE_CHECKING:
    import xarray as xr

    Matrix: TypeAlias = xr.Dataset | xr.DataArray | Float[np.ndarray, "A B"]

Names: TypeAlias = Sequence[int | str] | None
"""Labels of models; None for those that the models bring."""

TOLERANCE = 1e-4
"""Of symmetry, relative to the largest entry: the triangles of a float32 run are rounded apart."""


def labelled(
    values: Float[np.ndarray, "K K *output"],
    labels: Sequence[int | str],
    attrs: Mapping[str, Any],
    name: str,
) -> xr.DataArray:
    """A square matrix over `labels` on both sides, or one for every output.

    Args:
        values: (K, K) or (K, K, d_out); entry (i, j) compares model i with model j.
        labels: K names or training steps, for rows and columns alike.
        attrs: What a reader has to know of the matrix, such as its formula.
        name: The variable that it becomes in a result.

    Returns:
        The matrix over (a, b), or (a, b, output), with dtype and unit of `values`.

    Raises:
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> steps = labelled(np.array([[1.0, 0.5], [0.5, 1.0]]), [0, 100], {}, "similarity")
        >>> steps.sel(a=0, b=100).item()
        0.5
    """
    kept = list(labels)  # xarray reads a tuple as a variable
    coordinates = {"a": kept, "b": kept}
    dims = ("a", "b", "output")[: values.ndim]
    return _xarray().DataArray(values, dims=dims, coords=coordinates, attrs=dict(attrs), name=name)


def of_models(
    models: Sequence[Any],
    names: Names,
    name: str,
    values: Float[np.ndarray, "K K *output"],
    about: Mapping[str, Any],
) -> xr.DataArray:
    """What a measure says of all pairs of models, labelled.

    Args:
        models: K models.
        names: K labels, or None for those of the models.
        name: Of the measure.
        values: (K, K), or (K, K, d_out) of a measure that looks at one output at a time.
        about: What a reader has to know of the measure; `samples` says that it needed data.

    Returns:
        The values over (a, b), or (a, b, output).

    Raises:
        ModelError: A value is NaN, or there are other numbers of names and models.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> of_models(["p", "q"], None, "sameness", np.eye(2), {}).attrs
        {'needs_data': 0}
    """
    if np.isnan(values).any():
        raise ModelError(f"{name} gave NaN for finite outputs: a float range was exceeded")
    labels = names
    if labels is None:
        labels = labels_of(models)
    if len(labels) != len(values):
        raise ModelError(f"{len(labels)} names were given for {len(values)} models")
    needs_data = int("samples" in about)
    return labelled(values, labels, {"needs_data": needs_data, **about}, name)


def labels_of(models: Sequence[Any]) -> list[int] | list[str]:
    """What models are called: the labels of a series, the positions in any other sequence.

    Args:
        models: A series, or any sequence.

    Returns:
        One label per model; integers where all labels are decimal numbers, as training steps are.

    Example:
        >>> labels_of(["first", "second"])
        [0, 1]
    """
    labels = getattr(models, "labels", None)
    if labels is None:
        return list(range(len(models)))
    if all(label.isdecimal() for label in labels):
        return list(map(int, labels))
    return list(labels)


def matrix(result: Matrix) -> xr.DataArray:
    """The matrix that is meant: of a result its `similarity`; positions label a plain array.

    Args:
        result: A result, one of its matrices, or an array (A, B).

    Returns:
        The matrix over (a, b), in this order; every entry is finite.

    Raises:
        ResultError: The result has no `similarity`, there are other dimensions than a and b, or an
            entry is not finite.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> matrix(np.array([[1.0, 0.5, 0.25]])).sizes["b"]
        3
    """
    table = _array(result)
    if set(table.dims) != {"a", "b"}:
        raise ResultError(
            f"expected a matrix over (a, b), found dimensions {table.dims}; "
            "select the others first, as in .sel(output=0)"
        )
    table = table.transpose("a", "b")
    finite = np.isfinite(table.values)
    if not finite.all():
        i, j = np.argwhere(~finite)[0]
        raise ResultError(
            f"{table.name or 'the matrix'} is not finite: {table.values[i, j]} at row {i}, "
            f"column {j}; finish the run, or choose another variable"
        )
    return table


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
    """As `matrix`, of all pairs of one set of models.

    Args:
        result: A result, one of its matrices, or an array (K, K).

    Returns:
        The matrix over (a, b), exactly symmetric: the mean of itself and its transpose.

    Raises:
        ResultError: Rows and columns are different models, there is no model, the two triangles
            differ by more than rounding, or `matrix` refuses it.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> square(np.array([[1.0, 0.5], [0.50001, 1.0]])).values[0, 1].item()
        0.500005
    """
    table = matrix(result)
    rows, columns = table.shape
    if rows != columns or not np.array_equal(table["a"], table["b"]):
        raise ResultError(
            f"this needs all pairs of one set of models, found {rows} rows and {columns} columns "
            "that are not the same models"
        )
    if rows == 0:
        raise ResultError("the result holds no models")
    values = table.values
    if not is_symmetric(values):
        difference = np.abs(values - values.T).max()
        raise ResultError(
            "the matrix is not symmetric: entries differ from their mirror images "
            f"by up to {difference:.3g}"
        )
    return table.copy(data=(values + values.T) / 2)


def is_symmetric(values: Float[np.ndarray, "K K"]) -> bool:
    """Whether the two triangles agree, up to the rounding of the float32 runs that made them.

    Args:
        values: (K, K), finite.

    Returns:
        Whether no entry differs from its mirror image by more than `TOLERANCE` of the largest one.

    Example:
        >>> import numpy as np
        >>> is_symmetric(np.array([[1.0, 0.5], [0.50001, 1.0]]))
        True
        >>> is_symmetric(np.array([[1.0, 0.5], [0.6, 1.0]]))
        False
    """
    return bool(np.abs(values - values.T).max() <= TOLERANCE * np.abs(values).max())


def _xarray() -> Any:
    try:
        import xarray
    except ImportError:
        raise MissingExtra("xarray", "pairwise", "a labelled matrix of similarities") from None
    return xarray
