"""A page to read a pairwise run by. In: a result. Out: one HTML file that needs no network and no program but a browser.

The page holds the run as JSON, rounded, and a template of its own (`report.html`: markup, style and plain JavaScript) that
draws it: every matrix with its values under pointer or keyboard, slices, trajectories, embedding, phases, provenance. What takes
thought is computed here, by `reading`; the page only draws. Text from the result is never parsed as markup.
"""

from __future__ import annotations

import html
import json
import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.analysis import reading
from tnsim.analysis.matrices import is_symmetric, matrix
from tnsim.errors import ResultError
from tnsim.files import replacing

if TYPE_CHECKING:
    import xarray as xr

MAX_PHASES = 10
MAX_NUMBERS = 2**23
DECIMALS, SLICE_DECIMALS = 4, 3


def write(result: xr.Dataset, path: str | os.PathLike, title: str = "Pairwise similarity") -> Path:
    """Write the page and return its path. Raises `ResultError` for a run that is not finished, too large for a page or not writable.

    Phases, embedding and trajectories to the one before need all pairs of one set of models; a result of two sets has the rest.
    """
    data = json.dumps(
        {"title": title, **_contents(result)},
        allow_nan=False,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    template = (resources.files("tnsim.analysis") / "report.html").read_text(encoding="utf-8")
    head, body = template.split("__RUN__")
    page = head.replace("__TITLE__", html.escape(title)) + data.replace("<", "\\u003c") + body
    path = Path(path)
    # half of a surrogate pair, as in an undecodable file name, has no UTF-8; its escape is JSON's
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def _contents(result: xr.Dataset) -> dict[str, Any]:
    """What the template draws, as plain data."""
    similarity = matrix(result)
    matrices = {
        name: found.transpose("a", "b")
        for name, found in result.items()
        if set(found.dims) == {"a", "b"} and found.dtype.kind in "fiub"
    }
    slices = result["slices"].transpose("output", "a", "b") if "slices" in result else None
    numbers = similarity.size * (len(matrices) + (0 if slices is None else len(slices)))
    if numbers > MAX_NUMBERS:
        raise ResultError(
            f"{numbers:,} numbers are more than the {MAX_NUMBERS:,} of a page; choose some, as in result.sel(output=[0, 1])"
        )
    outputs = (
        {} if slices is None else dict(zip(map(str, slices["output"].values), slices, strict=True))
    )
    one_set = np.array_equal(similarity["a"], similarity["b"])
    return {
        "rows": similarity["a"].values.tolist(),
        "columns": similarity["b"].values.tolist(),
        "oneSet": one_set,
        "matrices": [
            {"name": str(name), **_packed(found.values, DECIMALS)}
            for name, found in matrices.items()
        ],
        "slices": [
            {"name": name, **_packed(one.values, SLICE_DECIMALS)} for name, one in outputs.items()
        ],
        "phases": _phases(
            similarity, {**matrices, **{f"output {name}": one for name, one in outputs.items()}}
        )
        if one_set
        else [],
        "embedding": _embedding(similarity) if one_set and len(similarity) > 2 else None,
        "provenance": [[str(key), str(value)] for key, value in result.attrs.items()],
        "models": _models(result),
    }


def _packed(values: Float[np.ndarray, "A B"], decimals: int) -> dict[str, Any]:
    """Whole multiples of 10^-decimals, of a symmetric matrix the lower triangle only; null where a value is not finite."""
    symmetric = np.array_equal(values, values.T)
    flat = values[np.tril_indices(len(values))] if symmetric else values.ravel()
    decimals = decimals if (flat != np.rint(flat)).any() else 0
    scaled = [
        round(x * 10**decimals) if np.isfinite(x) else None for x in flat.astype(float).tolist()
    ]
    return {"symmetric": symmetric, "decimals": decimals, "values": scaled}


def _phases(similarity: xr.DataArray, matrices: dict[Any, xr.DataArray]) -> list[dict[str, Any]]:
    """Divisions into 1, 2, ... phases, each with the block score of every matrix and of every slice that has one."""
    count = len(similarity)
    scored = {
        str(name): m
        for name, m in matrices.items()
        if np.isfinite(m).all() and is_symmetric(m.values)
    }
    found = []
    for one in reading.segmentations(similarity, min(MAX_PHASES, count)):
        split = (
            0 < len(one.change_points) < count - 1
        )  # else there is no pair across, or none within
        scores = (
            {
                name: round(reading.block_score(m, one.change_points), DECIMALS)
                for name, m in scored.items()
            }
            if split
            else {}
        )
        found.append(
            {"changePoints": one.change_points, "cost": round(one.cost, DECIMALS), "scores": scores}
        )
    return found


def _embedding(similarity: xr.DataArray) -> dict[str, Any]:
    placed = reading.mds(similarity)
    return {
        "points": placed.points.values.round(DECIMALS).tolist(),
        "share": placed.share.round(DECIMALS).tolist(),
        "negative": round(placed.negative, DECIMALS),
    }


def _models(result: xr.Dataset) -> dict[str, list[list[str]]]:
    """Per side a table: the label, then every coordinate and variable that belongs to single models."""
    tables = {}
    for side in ("a", "b"):
        own = {
            str(name).removesuffix(f"_{side}"): found
            for name, found in result.variables.items()
            if found.dims == (side,) and name != side
        }
        rows = [
            [_text(x) for x in row]
            for row in zip(
                result[side].values, *(found.values for found in own.values()), strict=True
            )
        ]
        tables[side] = [["checkpoint", *own], *rows]
    return tables


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (float, np.floating)) else str(value)
