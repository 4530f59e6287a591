"""The result of a pairwise run, and the files into which other programs can read it.

A `Pairwise` is an xarray Dataset that knows its metric. Dimensions `a` and `b` carry the labels of
the models (training steps where the names have them), `output` the output coordinates of slices.
Coordinates `name_a`, `hash_a` (and `_b`) say where a model came from and what it is. Additions of
tnsim to a Dataset of this layout, wherever it comes from, stand under `result.tnsim`, as xarray
asks of packages that build on it.

`write_csv`, `write_npz` and `write_parquet` write files. Labels may come from file names. Half of a
surrogate pair, which Python makes of an undecodable byte, is written as its escape (`\\udc80`)
where the format holds text only.

*Norms.* Stored are the logarithm of a squared norm and the logarithm of its size, the sum of the
absolute contributions (see `engine.precision`). Cosines therefore have the same error bound in
whatever process they are computed.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int

from tnsim.analysis import reading as summaries
from tnsim.analysis.matrices import shown_labels
from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.errors import MissingExtra, ResultError, TnsimError, require
from tnsim.files import Kind, beginning, replacing
from tnsim.scaled import LOG_2, ScaledSum, log_abs, taken, total
from tnsim.tables import cell, in_words

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure
    from xarray import DataArray, Dataset

    from tnsim.analysis.axes import Drawing
else:
    try:
        import xarray
        from xarray import DataArray, Dataset
    except ImportError:
        xarray, DataArray, Dataset = None, object, object


CSV = beginning("a table of similarities", b",")


ZARR = Kind(
    "a Zarr folder of tnsim",
    lambda file: "tnsim_version" in json.loads(file.read()),
    needs=("zarr", "zarr"),
    inside=".zattrs",
)

_NORM, _NORMS = "log_norm", "log_norms"
Norms: TypeAlias = Mapping[str, ScaledSum]
"""Squared norms of some models over all outputs, and of each output where these are told apart."""


def require_xarray() -> None:
    """Raise `MissingExtra` where xarray is missing, before a run instead of at its end."""
    if xarray is not None:
        return
    if importlib.util.find_spec("xarray") is None:
        raise MissingExtra("xarray", "pairwise", "comparing many models")
    raise TnsimError(
        "comparing many models needs xarray, which is installed but cannot be imported: python -c "
        "'import xarray' tells why; too little memory or address space (ulimit -v) is one reason"
    )


class Pairwise(Dataset):
    """Similarities of all pairs, an `xarray.Dataset`.

    Variables: `similarity` (a, b), in [-1, 1]; `log_inner` and `sign` (a, b), the inner product
    as `sign * exp(log_inner)`; `log_norm_a` (a) and `log_norm_b` (b), the logarithms of the
    squared norms <a|a> and <b|b>; `mean_share_a` (a) and `mean_share_b` (b), the shares of these
    that are in the means over the inputs, NaN or absent where these are not known; `slices`
    (a, b, output) when they were asked for;
    `standard_error` (a, b) of similarities over a sample, as estimates for its distribution.
    Of parts of a series all have the dimension `part` in front, with coordinates `kind`, `layer`
    and `head`, -1 where a part has none; `result.sel(part=label)` is the result of a single part.
    `rest_differs` (a, b) then counts what belongs to none of the parts and differs, and the
    attribute `rest` names it: models are equal where all their parts and their rests are.
    Attributes: `metric`, `metric_parameters`, `exact`, `dtype`, `plan`, `symmetric`, `duplicates`,
    `caveats`, `device`, `tier`, `tnsim_version`, `jax_version`, and
    `centred` where means were taken away. Pictures: `result.tnsim.plot()`.
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_xarray()
        super().__init__(*args, **kwargs)

    def __repr__(self) -> str:
        """What xarray writes, with attributes in words."""
        return super(Pairwise, self.assign_attrs(in_words(self.attrs))).__repr__()

    def _repr_html_(self) -> str:
        return super(Pairwise, self.assign_attrs(in_words(self.attrs)))._repr_html_()

    def to_netcdf(self, *args: Any, **kwargs: Any) -> Any:
        """As of xarray; attributes that are lists of texts have a line for each.

        The netCDF that SciPy writes, where no other package does, has no lists of texts.
        """
        texts = {name: "\n".join(x) for name, x in self.attrs.items() if isinstance(x, list) and x}
        return super(Pairwise, self.assign_attrs(texts)).to_netcdf(*args, **kwargs)


class ResultAccessor:
    """Metric and pictures of a pairwise result, as `result.tnsim`."""

    def __init__(self, result: Dataset) -> None:
        self._result = result

    @property
    def metric(self) -> str:
        """Name of the metric."""
        return self._result.attrs["metric"]

    @property
    def exact(self) -> bool:
        """Whether the metric's definition is met exactly."""
        return bool(self._result.attrs["exact"])

    @property
    def distance(self) -> DataArray:
        """Distances |b - a| of all pairs as functions, in units of outputs.

        A similarity is blind to size: a part may turn far and be small. Distances of nearly equal
        functions have as few digits as `1 - similarity`: below 1e-7 of their size they are
        rounding.

        Raises:
            ResultError: A distance is beyond float64.

        Example:
            >>> import tnsim
            >>> models = [tnsim.Model([tnsim.Linear([[w]])]) for w in (1.0, 3.0)]
            >>> tnsim.pairwise(models).tnsim.distance.values.round(6).tolist()
            [[0.0, 2.0], [2.0, 0.0]]
        """
        return summaries.distance(self._result)

    def summary(self) -> str:
        """What the run shows in words: the range of similarity, when it changed, and how sure.

        A change is the step between neighbours that moved the function furthest, where it is at
        least twice the median step. Rows that repeat a step under a name, such as `model_best`, are
        left out. Of parts, those that moved furthest.

        Raises:
            ResultError: A similarity is not finite.

        Example:
            >>> import tnsim
            >>> models = [tnsim.Model([tnsim.Linear([[w, 1.0]])]) for w in (1.0, 1.1, 5.0)]
            >>> print(tnsim.pairwise(models).tnsim.summary().splitlines()[1])
            Changed here: from 1 to 2 (similarity 0.857; the other steps 1 - 0.0011).
        """
        return summaries.summary(self._result)

    def most_changed(self, a: Any = None, b: Any = None) -> Dataset:
        """The parts of a result over parts, those first whose functions moved furthest.

        Args:
            a, b: Labels of two models; None for the first row and the last column.

        Returns:
            A Dataset over `part`, with `distance` |b - a| in units of the outputs of the part, and
            `similarity`. Parts with outputs of one meaning, such as all `ov`, are ranked by what
            they add to the stream.

        Raises:
            ResultError: The result has no parts, or a label is unknown.

        Example:
            >>> import numpy as np, tnsim
            >>> models = [tnsim.Model([tnsim.Linear(w)]) for w in (np.eye(2), np.ones((2, 2)))]
            >>> tnsim.pairwise(models).tnsim.most_changed()
            Traceback (most recent call last):
            tnsim.errors.ResultError: the result has no parts: compare tnsim.parts(series)
        """
        return summaries.most_changed(self._result, a, b)

    def plot(
        self,
        kind: str = "heatmap",
        variable: str | Sequence[str] = "similarity",
        change_points: Sequence[int] | None = None,
        curves: Sequence[str | Sequence[str]] = (),
        **drawing: Unpack[Drawing],
    ) -> Figure:
        """A matplotlib figure, as `tnsim.figures.pairwise` draws it; nothing is shown.

        Args:
            kind: `"heatmap"`, `"trajectory"`, `"slices"`, `"mds"`, `"dendrogram"`, `"scatter"` or,
                over parts, `"parts"`.
            variable: The matrix to draw, or several, as panels or lines.
            change_points: Rows at which phases start.
            curves: Variables over `a` to draw above heatmaps, each entry a strip.
            drawing: `ax`, `figsize`, `cmap`, `vmin` and `vmax`, see `figures.Drawing`.

        Raises:
            ResultError: The kind or a variable is unknown, or the picture cannot show the data.
        """
        from tnsim.analysis import figures

        return figures.pairwise(self._result, kind, variable, change_points, curves, **drawing)


if xarray is not None:
    xarray.register_dataset_accessor("tnsim")(ResultAccessor)


def labelled(attrs: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Pairwise:
    """The result made of a run's arrays, with labels, and with equal models repeated.

    Args:
        attrs: Attributes of the run's store.
        arrays: Arrays by name, with an entry for each distinct model.
    """
    coordinates: dict[str, Any] = {}
    index: dict[str, np.ndarray] = {}
    norms: dict[str, Any] = {}
    for side in "ab":
        stored = "a" if attrs["symmetric"] else side
        digests = attrs[f"hash_{stored}"]
        distinct = {digest: n for n, digest in enumerate(dict.fromkeys(digests))}
        index[side] = np.array([distinct[digest] for digest in digests])
        coordinates[side] = attrs[f"labels_{stored}"]
        coordinates[f"name_{side}"] = (side, attrs[f"names_{stored}"])
        coordinates[f"hash_{side}"] = (side, digests)
        for name in ("log_norm", "mean_share"):
            values = arrays[f"{name}_{stored}"][index[side]]
            if name == "log_norm" or not np.isnan(values).all():
                norms[f"{name}_{side}"] = (side, values)
    both = np.ix_(index["a"], index["b"])
    variables: dict[str, Any] = {}
    for name in ("similarity", "log_inner", "sign", "standard_error"):
        if name in arrays:
            variables[name] = (("a", "b"), arrays[name][both])
    variables |= norms
    if attrs["slices"]:
        variables["slices"] = (("a", "b", "output"), arrays["slices"][both])
        coordinates["output"] = np.arange(variables["slices"][1].shape[-1])
    known = (
        "metric",
        *(("centred",) if attrs["centred"] else ()),
        "metric_parameters",
        "exact",
        "dtype",
        "plan",
        "symmetric",
        "duplicates",
        "caveats",
        "device",
        "tier",
        "tnsim_version",
        "jax_version",
    )
    return Pairwise(variables, coordinates, {name: attrs[name] for name in known})


def _is_result(file: BinaryIO) -> bool:
    with zipfile.ZipFile(file) as archive:
        return {"attributes.npy", "similarity.npy"} <= set(archive.namelist())


def _is_parquet(file: BinaryIO) -> bool:
    """Whether a parquet file has the attributes of a result of tnsim."""
    from pyarrow import parquet

    return b"tnsim" in parquet.read_schema(file).metadata


NPZ = Kind("a result of tnsim", _is_result)
PARQUET = Kind("a table of pairs of tnsim", _is_parquet, needs=("pyarrow", "parquet"))


def write_csv(result: Pairwise, path: Path) -> None:
    """Write the similarities as a matrix, with labels in the first row and the first column.

    Matrices of parts stand below one another, the part in a column before the labels.

    A label that a spreadsheet would run as a formula gets an apostrophe in front, the mark by which
    spreadsheets know text. Labels that are numbers, and all values, stay numbers.

    Raises:
        ResultError: The file cannot be written, or a file of another kind is there.
    """
    table = io.StringIO(newline="")
    rows = csv.writer(table)
    columns, labels = (list(map(cell, shown_labels(result[side]))) for side in "ba")
    if "part" in result.dims:
        rows.writerow(["", "", *columns])
        for part, matrix in zip(result.part.values.tolist(), result.similarity.values, strict=True):
            for label, values in zip(labels, matrix, strict=True):
                rows.writerow([cell(part), label, *values.tolist()])
    else:
        rows.writerow(["", *columns])
        for label, values in zip(labels, result.similarity.values, strict=True):
            rows.writerow([label, *values.tolist()])
    with _written(path, CSV) as temporary:
        temporary.write_bytes(table.getvalue().encode())


def write_npz(result: Pairwise, path: Path) -> None:
    """Write all variables and coordinates by name, and the attributes as JSON in `attributes`.

    Raises:
        ResultError: The file cannot be written, or a file of another kind is there.
    """
    arrays = {str(name): values.values for name, values in result.variables.items()}
    with _written(path, NPZ) as temporary, temporary.open("wb") as file:
        np.savez(file, attributes=json.dumps(result.attrs), **arrays)  # type: ignore[arg-type]


def write_parquet(result: Pairwise, path: Path) -> None:
    """Write a row per pair: a, b, similarity, log_inner, sign, standard errors, slices as lists.

    Standard errors and slices stand there where the result has them. Of parts, a row per part and
    pair, with the column `part` in front.

    Raises:
        ResultError: The file cannot be written, or a file of another kind is there.
        MissingExtra: pyarrow is not installed.
    """
    require("pyarrow", "parquet", "writing parquet")
    import pyarrow
    from pyarrow import parquet

    dims = result.similarity.dims
    # An array of texts would end at their first NUL character.
    labels = [pyarrow.array([_plain(label) for label in result[dim].values]) for dim in dims]
    places = np.indices(result.similarity.shape).reshape(len(dims), -1)
    columns: dict[str, Any] = {
        str(dim): known.take(at) for dim, known, at in zip(dims, labels, places, strict=True)
    }
    for name in ("similarity", "log_inner", "sign", "standard_error"):
        if name in result:
            columns[name] = result[name].values.ravel()
    if "slices" in result:
        columns["slices"] = list(result.slices.values.reshape(places.shape[1], -1))
    table = pyarrow.table(columns).replace_schema_metadata({"tnsim": json.dumps(result.attrs)})
    with _written(path, PARQUET) as temporary:
        parquet.write_table(table, temporary)


def write_zarr(result: Pairwise, path: Path) -> None:
    """Write all variables, coordinates and attributes as a folder that `xarray.open_zarr` opens.

    Its arrays are in blocks, of which a reader reads those that it needs.

    Raises:
        ResultError: The folder cannot be written, or one of another kind is there.
        MissingExtra: zarr is not installed.
    """
    require("zarr", "zarr", "writing Zarr")
    with _written(path, ZARR) as temporary:
        # Format 2 has its one way to write texts, of which format 3 warns.
        result.to_zarr(temporary, zarr_format=2)


@contextlib.contextmanager
def _written(path: Path, kind: Kind) -> Iterator[Path]:
    """A temporary path that replaces `path` at the end. Raises `ResultError` where that fails."""
    try:
        with replacing(path, kind) as temporary:
            yield temporary
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror or error}") from None


def _plain(label: Any) -> Any:
    """A label that UTF-8 can hold."""
    return label.encode("utf-8", "backslashreplace").decode() if isinstance(label, str) else label


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
