"""Labelled, checked matrices, made of models, arrays or results of pairwise runs.

A pairwise result has the dimensions `a` (rows) and `b` (columns), labelled by training step where
it is known and by name otherwise. A function that reads such a result takes the whole result, one
of its matrices, or a plain array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from tnsim.errors import ModelError, ResultError, require
from tnsim.options import shown

if TYPE_CHECKING:
    import xarray as xr

    Matrix: TypeAlias = xr.Dataset | xr.DataArray | Float[np.ndarray, "A B"]

Names: TypeAlias = Sequence[int | str] | None
"""Labels of models; None for the labels of a series, or for positions."""

_LARGEST = 2**53
"""Largest label that becomes a number: floats, JSON and browsers hold every whole number up to it,
and lose digits of larger ones."""

TOLERANCE = 1e-4
"""Largest asymmetry relative to the largest entry, as the two triangles of a float32 run are
rounded differently."""


def labelled(
    values: Float[np.ndarray, "K K *output"],
    labels: Sequence[int | str],
    attrs: Mapping[str, Any],
    name: str,
) -> xr.DataArray:
    """A square matrix over `labels` on both sides, or a stack of such matrices over outputs.

    Args:
        values: Array (K, K) or (K, K, d_out); entry (i, j) compares model i with model j.
        labels: K names or training steps, for rows and columns alike.
        attrs: Description of the matrix for its readers, such as its formula.
        name: Name of the matrix as a variable of a result.

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
    kept = numbered(labels)
    coordinates = {"a": kept, "b": kept}
    dims = ("a", "b", "output")[: values.ndim]
    return _import_xarray().DataArray(
        values, dims=dims, coords=coordinates, attrs=dict(attrs), name=name
    )


def of_models(
    models: Sequence[Any],
    names: Names,
    name: str,
    values: Float[np.ndarray, "K K *output"],
    about: Mapping[str, Any],
) -> xr.DataArray:
    """The labelled matrix of a measure over all pairs of models.

    Args:
        models: K models.
        names: K labels, or None for the labels of a series, or for positions.
        name: Name of the measure.
        values: Array (K, K), or (K, K, d_out) for a measure of each output.
        about: Description of the measure for its readers; the key `samples` marks a measure that
            needs data.

    Returns:
        The values over (a, b), or (a, b, output).

    Raises:
        ModelError: A value is NaN, or the numbers of names and models differ.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> of_models(["p", "q"], None, "sameness", np.eye(2), {}).attrs
        {'needs_data': 0}
    """
    if np.isnan(values).any():
        raise ModelError(f"{name} gave NaN for finite outputs: a float range was exceeded")
    labels = labels_of(models) if names is None else names
    if len(labels) != len(values):
        raise ModelError(f"{len(labels)} names were given for {len(values)} models")
    # A number, as files of results hold no booleans in attributes.
    needs_data = int("samples" in about)
    return labelled(values, labels, {"needs_data": needs_data, **about}, name)


def over_layers(matrix: xr.DataArray, count: int, names: Sequence[Sequence[str]]) -> xr.DataArray:
    """The rectangle between the parts of two networks in a matrix over all their parts.

    Args:
        matrix: Square matrix over the parts of the first network and then of the second.
        count: Number of parts of the first network.
        names: Names of the parts of each network.

    Returns:
        The matrix over (a, b), with the names as labels.

    Raises:
        ModelError: The measure has no matrix over (a, b).

    Example:
        >>> import numpy as np
        >>> both = labelled(np.arange(9.0).reshape(3, 3), [0, 1, 2], {}, "cka")
        >>> over_layers(both, 1, [["first"], ["second", "third"]]).values.tolist()
        [[1.0, 2.0]]
    """
    if matrix.dims != ("a", "b"):
        raise ModelError(f"layers are compared by a measure over (a, b), found {matrix.dims}")
    # Rows are the first network's parts, columns the second's.
    rectangle = matrix.isel(a=slice(None, count), b=slice(count, None))
    return rectangle.assign_coords(a=list(names[0]), b=list(names[1]))


def labels_of(models: Sequence[Any]) -> list[Any]:
    """The labels of models: those of a series or mapping, positions in any other sequence.

    Args:
        models: A series, a mapping from labels to models, or any sequence.

    Returns:
        A label for each model.

    Example:
        >>> labels_of(["first", "second"])
        [0, 1]
    """
    labels = [*models] if isinstance(models, Mapping) else getattr(models, "labels", None)
    return list(range(len(models)) if labels is None else labels)


def numbered(labels: Iterable[Any]) -> list[int | str]:
    """Labels as integers where all of them are numbers, else as text.

    All labels of models pass here, so that matrices of the same models have equal labels: xarray
    joins by them.

    Args:
        labels: Labels of any kind, such as names of files, keys of a mapping or training steps.

    Returns:
        Integers where the text of every label is a decimal number of at most `2**53` and no two
        texts are one number, else the texts.

    Example:
        >>> numbered(["0", "100"]), numbered(["0", "9" * 19]), numbered([0, "last"])
        ([0, 100], ['0', '9999999999999999999'], ['0', 'last'])
    """
    texts = [str(label) for label in labels]
    # The length comes first, as Python refuses to read very long numbers.
    if all(text.isdecimal() and len(text.lstrip("0")) <= 16 for text in texts):
        numbers = list(map(int, texts))
        if max(numbers, default=0) <= _LARGEST and len(set(numbers)) == len(set(texts)):
            return [*numbers]
    return [*texts]


def are_steps(labels: Iterable[Any]) -> bool:
    """Whether models are a run in its order, as their labels say: one of them counts.

    Seeds and edits under their names are in no order.

    Args:
        labels: Labels of the models.

    Example:
        >>> are_steps(["0", "100", "final"]), are_steps(["base", "pruned", "seed_1"])
        (True, False)
    """
    return any(str(label).isdecimal() for label in labels)


def shown_labels(labels: xr.DataArray) -> list[Any]:
    """Labels of a result as JSON and tables hold them: text where a number would lose digits.

    Args:
        labels: Coordinate of a result, which anybody may have assigned.

    Returns:
        Numbers that every reader of JSON holds, and texts.

    Example:
        >>> import xarray as xr
        >>> shown_labels(xr.DataArray([0, 10**18 + 1]))
        [0, '1000000000000000001']
    """
    # Dates of NumPy would become numbers of nanoseconds.
    listed = labels.values.astype(str) if labels.dtype.kind in "mM" else labels.values
    return [
        label if isinstance(label, (int, float)) and abs(label) <= _LARGEST else str(label)
        for label in listed.tolist()
    ]


def place_of(labels: xr.DataArray, wanted: Any) -> int | None:
    """The place of the first model with a label, told by its text; None where no model has it.

    Args:
        labels: Coordinate of a result.
        wanted: Label of a model, of which a number and its text are the same.

    Example:
        >>> import xarray as xr
        >>> steps = xr.DataArray([0, 100])
        >>> place_of(steps, 100), place_of(steps, "100"), place_of(steps, "last")
        (1, 1, None)
    """
    texts = list(map(str, labels.values.tolist()))
    return texts.index(str(wanted)) if str(wanted) in texts else None


def part_grids(parts: xr.Dataset | xr.DataArray) -> dict[str, Int[np.ndarray, "layer head"]]:
    """For each kind of part the numbers of its parts by layer and head, -1 where there is none.

    Args:
        parts: A result over parts, or a variable of one.

    Example:
        >>> import xarray as xr
        >>> places = {"kind": ["ov", "ov", "mlp"], "layer": [0, 1, 1], "head": [1, 0, -1]}
        >>> parts = xr.Dataset({name: ("part", values) for name, values in places.items()})
        >>> {kind: grid.tolist() for kind, grid in part_grids(parts).items()}
        {'ov': [[-1, 0], [1, -1]], 'mlp': [[-1], [2]]}
    """
    grids = {}
    kinds = parts["kind"].values
    for kind in dict.fromkeys(kinds.tolist()):
        numbers = np.flatnonzero(kinds == kind)
        # Parts without a layer or head, which is -1 there, count as the first.
        layers, heads = (np.maximum(parts[name].values[numbers], 0) for name in ("layer", "head"))
        grids[kind] = np.full((layers.max() + 1, heads.max() + 1), -1)
        grids[kind][layers, heads] = numbers
    return grids


def matrix(result: Matrix) -> xr.DataArray:
    """The matrix in a result (its `similarity`), in any of its matrices, or in a plain array.

    Positions label a plain array.

    Args:
        result: A result, any of its matrices, or an array (A, B).

    Returns:
        The matrix over (a, b), in this order; every entry is finite.

    Raises:
        ResultError: The result has no `similarity`, there are other dimensions than a and b, there
            is no model, or an entry is not finite.
        MissingExtra: xarray is not installed.

    Example:
        >>> import numpy as np
        >>> matrix(np.array([[1.0, 0.5, 0.25]])).sizes["b"]
        3
    """
    table = _unchecked_array(result)
    if set(table.dims) != {"a", "b"}:
        raise ResultError(
            f"expected a matrix over (a, b), found dimensions {table.dims}; "
            "select the others first, as in .sel(output=0)"
        )
    if not table.size:
        raise ResultError("the result holds no models: select at least one along a and b")
    table = table.transpose("a", "b")
    finite = np.isfinite(table.values)
    if not finite.all():
        i, j = np.argwhere(~finite)[0]
        raise ResultError(
            f"{table.name or 'the matrix'} is not finite: {table.values[i, j]} at row {i}, "
            f"column {j}; finish the run, or choose another variable"
        )
    return table


def _unchecked_array(result: Matrix) -> xr.DataArray:
    """The matrix of `matrix` before the check of its dimensions, which may exceed (a, b)."""
    xr = _import_xarray()
    given: Any = result
    if isinstance(given, xr.DataArray):
        return given
    if isinstance(given, xr.Dataset):
        if "similarity" in given:
            return given["similarity"]
        names = ", ".join(map(str, given)) or "no variable at all"
        raise ResultError(f"the result has no similarity, only {names}")
    values = numbers_in(given)
    if values.ndim != 2:
        raise ResultError(
            f"expected a matrix of similarities, found an array of shape {values.shape}"
        )
    rows, columns = values.shape
    labels = {"a": range(rows), "b": range(columns)}
    return xr.DataArray(values, dims=("a", "b"), coords=labels)


def numbers_in(given: Any) -> np.ndarray:
    """The numbers of a matrix that is given as an array, a labelled array or nested lists.

    Raises:
        ResultError: The value holds no real numbers.

    Example:
        >>> numbers_in([[1, 0]])
        array([[1., 0.]])
    """
    try:
        return np.asarray(given, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ResultError(
            "expected a result of tnsim.pairwise, one of its matrices or an array of numbers "
            f"(K, K), found {shown(given)}"
        ) from None


def check_result(result: Any) -> None:
    """Refuse what is no result of all pairs.

    Raises:
        ResultError: The value is something else, such as a single matrix.

    Example:
        >>> import xarray as xr
        >>> check_result(xr.Dataset())
    """
    if not isinstance(result, _import_xarray().Dataset):
        raise ResultError(f"expected a result of tnsim.pairwise, found {shown(result)}")


def is_one_set(result: Any) -> bool:
    """Whether rows and columns of a result are the same models, so that it has all their pairs.

    Equal labels alone do not say so: positions in two lists, or the steps of two runs, are equal.

    Args:
        result: Result of a run, over parts as well, or one of its matrices, which has labels alone.

    Example:
        >>> import xarray as xr
        >>> steps = xr.Dataset(coords={"a": [0, 100], "b": [0, 100]})
        >>> is_one_set(steps), is_one_set(steps.assign_attrs(symmetric=0))
        (True, False)
    """
    return bool(result.attrs.get("symmetric", True)) and np.array_equal(result["a"], result["b"])


def square(result: Matrix) -> xr.DataArray:
    """The symmetric matrix of all pairs of a set of models.

    Args:
        result: A result, any of its matrices, or an array (K, K).

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
    # A result says of itself whether it has two lists of models; a matrix alone has labels.
    if not is_one_set(result if hasattr(result, "attrs") else table):
        raise ResultError(
            f"this needs all pairs of one set of models, found {rows} rows and {columns} columns "
            "that are not the same models"
        )
    values = table.values
    if not is_symmetric(values):
        difference = np.abs(values - values.T).max()
        raise ResultError(
            "the matrix is not symmetric: entries differ from their mirror images "
            f"by up to {difference:.3g}"
        )
    # The mean makes the matrix symmetric to the last bit, as eigenvalues need.
    return table.copy(data=(values + values.T) / 2)


def is_symmetric(values: Float[np.ndarray, "K K"]) -> bool:
    """Whether the two triangles agree, up to the rounding of the float32 runs that made them.

    Args:
        values: Matrix (K, K), finite.

    Returns:
        Whether no entry differs from its mirror image by more than `TOLERANCE` times the largest
        entry.

    Example:
        >>> import numpy as np
        >>> is_symmetric(np.array([[1.0, 0.5], [0.50001, 1.0]]))
        True
        >>> is_symmetric(np.array([[1.0, 0.5], [0.6, 1.0]]))
        False
    """
    return bool(np.abs(values - values.T).max() <= TOLERANCE * np.abs(values).max())


def _import_xarray() -> Any:
    require("xarray", "pairwise", "a labelled matrix of similarities")
    import xarray

    return xarray
