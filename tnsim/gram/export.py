"""Results as files that other programs read. In: a `Pairwise`, a path. Out: csv, npz, parquet.

Labels may come from file names. Half of a surrogate pair, which is what Python makes of a byte
that is no text, is written as its escape (`\\udc80`) where the format holds text only.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tnsim.errors import MissingExtra, ResultError
from tnsim.files import Kind, beginning, replacing
from tnsim.gram.result import Pairwise

FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Signs with which a spreadsheet begins a formula; in Japanese ones their wide forms as well."""
_CONTROLS = tuple("\t\r\n")


def _is_result(file: BinaryIO) -> bool:
    with zipfile.ZipFile(file) as archive:
        return {"attributes.npy", "similarity.npy"} <= set(archive.namelist())


def _is_parquet(file: BinaryIO) -> bool:
    """Whether the description at the end, whose length stands before the last four bytes, names
    tnsim."""
    start = file.read(4)
    file.seek(-8, os.SEEK_END)
    length, end = int.from_bytes(file.read(4), "little"), file.read(4)
    file.seek(-8 - length, os.SEEK_END)
    return start == end == b"PAR1" and b"tnsim" in file.read(length)


CSV = beginning("a table of similarities", b",")
NPZ = Kind("a result of tnsim", _is_result)
PARQUET = Kind("a table of pairs of tnsim", _is_parquet)


def write_csv(result: Pairwise, path: Path) -> None:
    """The similarities as a matrix, labels in the first row and the first column.

    A label that a spreadsheet would run as a formula gets an apostrophe in front, the
    spreadsheets' own mark of text. Labels that are numbers, and all values, stay numbers.

    Raises:
        ResultError: The file cannot be written, or one of another kind is there.
    """
    table = io.StringIO(newline="")
    rows = csv.writer(table)
    rows.writerow(["", *map(_cell, result.b.values.tolist())])
    for label, values in zip(result.a.values.tolist(), result.similarity.values, strict=True):
        rows.writerow([_cell(label), *values.tolist()])
    with _written(path, CSV) as temporary:
        temporary.write_bytes(table.getvalue().encode())


def write_npz(result: Pairwise, path: Path) -> None:
    """Every variable and coordinate by its name, the attributes as JSON text under `attributes`.

    Raises:
        ResultError: The file cannot be written, or one of another kind is there.
    """
    arrays = {str(name): values.values for name, values in result.variables.items()}
    with _written(path, NPZ) as temporary, temporary.open("wb") as file:
        np.savez(file, attributes=json.dumps(result.attrs), **arrays)  # type: ignore[arg-type]


def write_parquet(result: Pairwise, path: Path) -> None:
    """One row a pair: a, b, similarity, log_inner, sign; slices, where there are any, as lists.

    Raises:
        ResultError: The file cannot be written, or one of another kind is there.
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "writing parquet") from None
    count, across = result.similarity.shape
    labels = {side: [_plain(label) for label in result[side].values.tolist()] for side in "ab"}
    columns: dict[str, Any] = {
        "a": np.repeat(labels["a"], across),
        "b": np.tile(labels["b"], count),
    }
    columns |= {name: result[name].values.ravel() for name in ("similarity", "log_inner", "sign")}
    if "slices" in result:
        columns["slices"] = list(result.slices.values.reshape(count * across, -1))
    table = pyarrow.table(columns).replace_schema_metadata({"tnsim": json.dumps(result.attrs)})
    with _written(path, PARQUET) as temporary:
        parquet.write_table(table, temporary)


@contextlib.contextmanager
def _written(path: Path, kind: Kind) -> Iterator[Path]:
    """A temporary path that takes the place of `path`. Raises `ResultError` where that fails."""
    try:
        with replacing(path, kind) as temporary:
            yield temporary
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror or error}") from None


def _cell(label: Any) -> Any:
    """A label of a table: text is never a formula.

    Programs drop blanks, control characters and marks without a width before they look for a
    formula. So no line of a label begins with a sign of a formula behind any of those, and no label
    with a control character.
    """
    label = _plain(label)
    if not isinstance(label, str):
        return label
    is_formula = any(_seen(line).startswith(FORMULA) for line in label.splitlines())
    return f"'{label}" if is_formula or label[:1] in _CONTROLS else label


def _seen(line: str) -> str:
    """A line from its first character that takes room."""
    seen = (n for n, sign in enumerate(line) if not (sign.isspace() or not sign.isprintable()))
    return line[next(seen, len(line)) :]


def _plain(label: Any) -> Any:
    """A label that UTF-8 can hold."""
    return label.encode("utf-8", "backslashreplace").decode() if isinstance(label, str) else label
