"""Results as files that other programs read. In: a `Pairwise`, a folder. Out: csv, npz, parquet."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np

from tnsim.errors import MissingExtra
from tnsim.gram.result import Pairwise


def write_csv(result: Pairwise, path: Path) -> None:
    """The similarities as a matrix, labels in the first row and the first column."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["", *result.b.values.tolist()])
        rows.writerows(
            [label, *values]
            for label, values in zip(
                result.a.values.tolist(), result.similarity.values.tolist(), strict=True
            )
        )


def write_npz(result: Pairwise, path: Path) -> None:
    """Every variable and coordinate by its name, and the attributes as JSON text under `attributes`."""
    np.savez(
        path,
        attributes=json.dumps(result.attrs),
        **{name: values.values for name, values in result.variables.items()},
    )


def write_parquet(result: Pairwise, path: Path) -> None:
    """One row a pair: a, b, similarity, log_inner, sign; slices, where there are any, as lists."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "writing parquet") from None
    count, across = result.similarity.shape
    columns = {"a": np.repeat(result.a.values, across), "b": np.tile(result.b.values, count)}
    columns |= {name: result[name].values.ravel() for name in ("similarity", "log_inner", "sign")}
    if "slices" in result:
        columns["slices"] = list(result.slices.values.reshape(count * across, -1))
    table = pyarrow.table(columns).replace_schema_metadata({"tnsim": json.dumps(result.attrs)})
    parquet.write_table(table, path)
