"""A page to read a pairwise run by: an HTML file that needs only a browser.

The page holds the run as JSON, rounded, and the files that draw it (`page/`: markup, style and
plain JavaScript): every matrix with its values under pointer, finger or keyboard, curves of
training above it, slices, trajectories, embedding, phases, provenance, terms explained, downloads.
Scores, phases and embedding are computed here, by `reading`; the page only draws. Text from the
result is never parsed as markup, nothing is fetched, and no script runs but the page's own.

A variable of numbers over the models alone, such as `result["accuracy"] = ("a", log)`, is a curve.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.analysis import reading
from tnsim.analysis.axes import COLOURS, scale_of
from tnsim.analysis.matrices import (
    are_steps,
    check_result,
    is_one_set,
    is_symmetric,
    matrix,
    part_grids,
    shown_labels,
)
from tnsim.analysis.reading import certainty, findings
from tnsim.errors import ResultError
from tnsim.files import Kind, replacing
from tnsim.options import checked
from tnsim.tables import cell, in_words, listed

if TYPE_CHECKING:
    import xarray as xr

MAX_PHASES = 10
"""Most phases into which the page divides a run."""
MAX_NUMBERS = 2**23
"""Most numbers in the matrices and slices of a page."""
DECIMALS, SLICE_DECIMALS = 4, 3
_PLACES = 10
"""Decimals of points of an embedding, whose rounding is 1e-8: chords of nearly equal models."""
PAGE = Kind(
    "a page of tnsim",
    lambda file: b'name="generator" content="tnsim"' in file.read(256),
    endings=(".html", ".htm", ""),
)
_NUMERIC = "fiub"
"""Kinds of NumPy's floats, integers and booleans."""
SCRIPTS = (
    "values.js",
    "elements.js",
    "terms.js",
    "matrix.js",
    "lines.js",
    "phases.js",
    "pair.js",
    "slices.js",
    "parts.js",
    "downloads.js",
    "page.js",
)
"""Files of the page's one script, in the order in which they run."""


@checked
def write(
    result: xr.Dataset, path: str | os.PathLike[str], title: str = "Pairwise similarity"
) -> Path:
    """Write the page of a result, and return its path.

    Phases, embedding and trajectories to the previous model need all pairs of a set of models;
    the page of a result of two sets has the rest.

    Args:
        result: A finished pairwise result.
        path: Path of the file; its folder is made where it is missing.
        title: Title of the page.

    Returns:
        The path, for example to open in a browser.

    Raises:
        ResultError: The run is not finished or too large for a page, the file cannot be written, or
            a file of another kind is there.

    Example:
        >>> import tempfile
        >>> import numpy as np, xarray as xr
        >>> values = np.array([[1.0, 0.5], [0.5, 1.0]])
        >>> run = xr.Dataset({"similarity": (("a", "b"), values)}, {"a": [0, 100], "b": [0, 100]})
        >>> page = write(run, Path(tempfile.mkdtemp()) / "run.html", "Two models")
        >>> "<title>Two models</title>" in page.read_text()
        True
    """
    check_result(result)
    page = _filled_page({"title": title, **_run_contents(result)})
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, PAGE) as temporary:
            # Half of a surrogate pair, as in an undecodable file name, has no UTF-8; it is written
            # as its escape, which JSON reads.
            temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def _filled_page(contents: Mapping[str, Any]) -> str:
    """The template with all contents, inserted at once so that no content is searched again."""
    # NaN has no place in JSON, and such entries are None before.
    run = json.dumps(contents, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    script = "\n" + "\n".join(map(_page_part, SCRIPTS))
    parts = {
        "TITLE": html.escape(contents["title"]),
        "POLICY": _content_policy(script),
        "STYLE": _page_part("page.css"),
        # Escaped, so that no text can close the element in which it stands.
        "RUN": run.replace("<", "\\u003c"),
        "SCRIPT": script,
    }
    return re.sub(r"__([A-Z]+)__", lambda place: parts[place[1]], _page_part("page.html"))


def _page_part(name: str) -> str:
    """The text of a file of the page."""
    return (resources.files("tnsim.analysis") / "page" / name).read_text(encoding="utf-8")


def _content_policy(script: str) -> str:
    """The content security policy of the page: run this very script, and fetch nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)


def _run_contents(result: xr.Dataset) -> dict[str, Any]:
    """The data that the template draws; of a result over parts every part is a matrix."""
    over_parts, one_set = "part" in result.dims, is_one_set(result)
    matrices = _matrices(result)
    slices = {} if over_parts else _stacked(result, "slices", "output")
    _check_size(sum(table.size for table in (*matrices.values(), *slices.values())))
    phases, embedding, parts = [], None, []
    if over_parts:
        for kind, grid in part_grids(result).items():
            # None marks a place without a part, as models may have layers of different kinds.
            numbers = [[n if n >= 0 else None for n in row] for row in grid.tolist()]
            parts.append({"kind": kind, "grid": numbers})
    elif one_set:
        similarity = matrix(result)
        of_slices = {f"output {output}": table for output, table in slices.items()}
        phases = _phases(similarity, matrices | of_slices)
        # Two models lie on a line, which shows nothing.
        embedding = _embedding(similarity) if len(similarity) > 2 else None
    rows, columns = (shown_labels(result[side]) for side in "ab")
    caveats = listed(result.attrs.get("caveats", []))
    # What parts do not show stands beside them.
    if len(result.attrs.get("rest", [])):
        caveats.append(f"what belongs to no part {in_words(result.attrs)['rest']}")
    return {
        "matrices": _all_packed(matrices, DECIMALS),
        "slices": _all_packed(slices, SLICE_DECIMALS),
        # All parts have one scale, so that they can be compared; slices too.
        "partScale": _scale_of_all(matrices) if over_parts else None,
        "sliceScale": _scale_of_all(slices) if slices else None,
        "about": {} if over_parts else _attributes_of(matrices),
        "phases": phases,
        "embedding": embedding,
        "parts": parts,
        "rows": rows,
        "columns": columns,
        "cells": {"rows": list(map(cell, rows)), "columns": list(map(cell, columns))},
        "oneSet": one_set,
        "palette": COLOURS,
        "curves": _curves(result, one_set),
        "findings": findings(result),
        "caveats": caveats,
        "guarantee": _guarantee(result),
        "provenance": [[str(key), str(value)] for key, value in in_words(result.attrs).items()],
        "models": {"a": _model_table(result, "a"), "b": _model_table(result, "b")},
    }


def _guarantee(result: xr.Dataset) -> list[str] | None:
    """The term for the guarantee of a result, and its words; None for a result that has none."""
    if "exact" not in result.attrs:
        return None
    kind, rest = certainty(result)
    return [kind, kind + rest]


def _matrices(result: xr.Dataset) -> dict[str, xr.DataArray]:
    """All variables of numbers over (a, b), or the similarity of every part, which is finite."""
    if "part" in result.dims:
        return {
            part: matrix(table) for part, table in _stacked(result, "similarity", "part").items()
        }
    matrix(result)  # refuses what is no finished run
    matrices = {}
    for name, variable in result.items():
        if set(variable.dims) == {"a", "b"} and variable.dtype.kind in _NUMERIC:
            matrices[str(name)] = variable.transpose("a", "b")
    return matrices


def _stacked(result: xr.Dataset, name: str, dim: str) -> dict[str, xr.DataArray]:
    """The matrices in a variable by their label along a dimension; none without the variable."""
    if name not in result:
        return {}
    stack = result[name].transpose(dim, "a", "b")
    return {str(label): table for label, table in zip(stack[dim].values, stack, strict=True)}


def _scale_of_all(matrices: Mapping[str, xr.DataArray]) -> dict[str, Any]:
    return scale_of(np.stack([table.values for table in matrices.values()]))._asdict()


def _attributes_of(matrices: Mapping[str, xr.DataArray]) -> dict[str, list[list[str]]]:
    """The attributes of matrices, such as those of baselines, by the name of the matrix."""
    about = {}
    for name, table in matrices.items():
        if table.attrs:
            about[name] = [[str(key), _cell_text(value)] for key, value in table.attrs.items()]
    return about


def _curves(result: xr.Dataset, one_set: bool) -> list[dict[str, Any]]:
    """The variables of numbers over the models in the columns, without those of the run itself."""
    side = "a" if one_set else "b"
    curves = []
    for name, variable in result.items():
        is_curve = variable.dims == (side,) and variable.dtype.kind in _NUMERIC
        # Norms and shares of means are no curves of training.
        if is_curve and name not in {f"log_norm_{side}", f"mean_share_{side}"}:
            values = list(map(_rounded_value, variable.values.astype(float).tolist()))
            # A curve of gaps alone is none.
            if values.count(None) < len(values):
                curves.append({"name": str(name).removesuffix(f"_{side}"), "values": values})
    return curves


def _rounded_value(value: float) -> float | None:
    """The value to six digits, or None where it is not finite: JSON has no such number."""
    if not np.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _check_size(numbers: int) -> None:
    if numbers > MAX_NUMBERS:
        raise ResultError(
            f"{numbers:,} numbers are more than the {MAX_NUMBERS:,} of a page; "
            "choose some, as in result.sel(output=[0, 1])"
        )


def _all_packed(matrices: Mapping[str, xr.DataArray], decimals: int) -> list[dict[str, Any]]:
    packed = []
    for name, table in matrices.items():
        packed.append({"name": name, **_packed_matrix(table.values, decimals)})
    return packed


def _packed_matrix(values: Float[np.ndarray, "A B"], decimals: int) -> dict[str, Any]:
    """A matrix as whole multiples of 10^-decimals, with its scale of colours.

    There is null where a value is not finite. Where values crowd near 1, decimals are as many as
    tell the least difference from 1, and where all are small, as many more as they are smaller.

    Of a symmetric matrix, only the lower triangle is kept, row by row. A matrix counts as symmetric
    where its triangles differ by less than the page shows. Whole numbers need no decimals.
    """
    scale = scale_of(values)
    if scale.name != "linear":
        decimals = max(decimals, 2 - math.floor(math.log10(scale.least)))
    elif largest := float(abs(values[np.isfinite(values)]).max(initial=0.0)):
        # Browsers write numbers with at most 100 decimals.
        decimals = min(decimals + max(0, -1 - math.floor(math.log10(largest))), 100)
    symmetric = False
    if values.shape == values.T.shape:
        # Half a unit of the last digit that the page shows.
        unseen = 0.5 * 10.0**-decimals
        symmetric = np.allclose(values, values.T, rtol=0, atol=unseen, equal_nan=True)
    if symmetric:
        kept = values[np.tril_indices(len(values))].astype(float)
    else:
        kept = values.ravel().astype(float)
    if np.array_equal(kept, np.rint(kept)):
        decimals = 0
    each = zip(kept.tolist(), np.isfinite(kept), strict=True)
    return {
        "symmetric": symmetric,
        "decimals": decimals,
        "values": [round(value * 10**decimals) if finite else None for value, finite in each],
        "scale": scale._asdict(),
    }


def _phases(similarity: xr.DataArray, matrices: Mapping[str, xr.DataArray]) -> list[dict[str, Any]]:
    """Divisions into 1, 2, ... phases, each with the block scores of all matrices with a score."""
    count = len(similarity)
    scored = {}
    for name, table in matrices.items():
        if np.isfinite(table).all() and is_symmetric(table.values):
            scored[name] = table
    phases = []
    for division in reading.segmentations(similarity, min(MAX_PHASES, count)):
        scores = {}
        # One phase has no pair across phases; phases of one model each have no pair within.
        if 0 < len(division.change_points) < count - 1:
            for name, table in scored.items():
                score = reading.block_score(table, division.change_points)
                scores[name] = round(score, DECIMALS)
        phases.append(
            {
                "changePoints": division.change_points,
                "cost": round(division.cost, DECIMALS),
                "scores": scores,
            }
        )
    return phases


def _embedding(similarity: xr.DataArray) -> dict[str, Any]:
    embedding = reading.mds(similarity)
    return {
        "points": embedding.points.values.round(_PLACES).tolist(),
        "joined": are_steps(similarity["a"].values),
        "share": embedding.share.round(DECIMALS).tolist(),
        "negative": round(embedding.negative, DECIMALS),
    }


def _model_table(result: xr.Dataset, side: str) -> list[list[str]]:
    """The table of the models on a side: a header, then a row for each model with its variables."""
    header, columns = ["checkpoint"], [result[side].values]
    for name, variable in result.variables.items():
        if variable.dims == (side,) and name != side:
            header.append(str(name).removesuffix(f"_{side}"))
            columns.append(variable.values)
    table = [header]
    for row in zip(*columns, strict=True):
        table.append(list(map(_cell_text, row)))
    return table


def _cell_text(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}"
    return str(value)
