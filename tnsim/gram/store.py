"""Results tile by tile, in memory or in a zarr store. In: blocks of numbers. Out: arrays, and what is finished.

A store is a zarr group with one chunk per tile. A chunk is written to a temporary name and renamed, and the
tile's own marker (`tiles`, one number per chunk) is written after all of its numbers; so a process may be killed, or
a disk be full, at any instant: a tile without its marker is computed again and one with it is whole.

Processes may share a store without locks. Each begins at a place of its own and looks at the marker before
it computes a tile, so they rarely meet; where they do, both write the same numbers, each chunk atomically.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.errors import MissingExtra, StoreMismatch, TnsimError

FORMAT = 1
LOG = "computed.log"
# what must be equal for a store to be continued, and in which words a difference is told
IDENTITY = ("format", "metric", "metric_parameters", "dtype", "slices", "hash_a", "hash_b")


@dataclass(frozen=True)
class Store:
    """Arrays that take blocks by NumPy slices; `path` is None in memory. `attrs`: the run's identity and layout."""

    arrays: Mapping[str, Any]
    attrs: Mapping[str, Any]
    path: Path | None


def folder(path: str | os.PathLike) -> Path:
    """The path of a store. Raises `StoreMismatch` for an address, as a path a folder `s3:` here."""
    if re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(path)):
        raise StoreMismatch(
            f"{path}: a store is a folder on a disk, and this is an address; "
            "give the path of a folder, and copy it where you want it when the run is done"
        )
    return Path(path)


def shapes(
    rows: int, columns: int | None, outputs: int | None, tile: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Name -> (shape, chunk, dtype) of every array; `columns` is None for all pairs of one list, `outputs` where there are no slices."""
    sides = (("a", rows),) if columns is None else (("a", rows), ("b", columns))
    columns = rows if columns is None else columns
    down, across = -(-rows // tile), -(-columns // tile)
    found = {
        name: ((rows, columns), (tile, tile), "float64") for name in ("similarity", "log_inner")
    }
    found["sign"] = ((rows, columns), (tile, tile), "int8")
    found["tiles"] = ((down, across), (1, 1), "uint8")
    for side, count in sides:
        found[f"log_norm_{side}"] = ((count,), (tile,), "float64")
        found[f"blocks_{side}"] = ((-(-count // tile),), (1,), "uint8")
        if outputs is not None:
            found[f"log_norms_{side}"] = ((count, outputs), (tile, outputs), "float64")
    if outputs is not None:
        found["slices"] = ((rows, columns, outputs), (tile, tile, outputs), "float64")
    return found


def in_memory(layout: Mapping[str, tuple], attrs: Mapping[str, Any]) -> Store:
    """A store that lives as long as the result."""
    return Store(
        {name: np.full(shape, _fill(dtype), dtype) for name, (shape, _, dtype) in layout.items()},
        attrs,
        None,
    )


def create(path: Path, layout: Mapping[str, tuple], attrs: Mapping[str, Any]) -> Store:
    """A new store, there as a whole or not at all; the one of another process if that was quicker."""
    zarr = _zarr()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            group = zarr.open_group(temporary, mode="w", zarr_format=3)
            for name, (shape, chunks, dtype) in layout.items():
                options = {"fill_value": _fill(dtype), "dimension_names": _dims(name, shape)}
                group.create_array(name, shape=shape, chunks=chunks, dtype=dtype, **options)
            group.attrs.put({"tnsim": dict(attrs)})
            temporary.rename(path)
        except OSError:
            if not path.exists():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return open_store(path)


def open_store(path: Path, mode: str = "r+") -> Store:
    """A store on disk. Raises `StoreMismatch` when there is something else."""
    zarr = _zarr()
    try:
        group = zarr.open_group(path, mode=mode, zarr_format=3)
        attrs = dict(group.attrs)["tnsim"]
        return Store({name: group[name] for name in attrs["arrays"]}, attrs, path)
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise StoreMismatch(
            f"{path}: not a store of tnsim.pairwise ({reason}); give the path of one, or of nothing"
        ) from None


def check(store: Store, attrs: Mapping[str, Any]) -> None:
    """Raise `StoreMismatch`, naming the difference, unless the store belongs to the run that `attrs` describes."""
    for name in IDENTITY:
        theirs, ours = store.attrs.get(name), attrs[name]
        if theirs == ours:
            continue
        if name.startswith("hash_") and theirs is not None and ours is not None:
            if len(theirs) != len(ours):
                what = f"{len(theirs)} models on side {name[-1]}, and {len(ours)} are given"
            else:
                first = next(
                    n for n, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]
                )
                what = f"other weights for {attrs['labels_' + name[-1]][first]} (side {name[-1]}, number {first})"
        elif name == "hash_b":
            what = (
                "all pairs of one list"
                if theirs is None
                else "models against others, and no others are given"
            )
        else:
            what = f"{name} {json.dumps(theirs)}, and {json.dumps(ours)} is asked for"
        raise StoreMismatch(
            f"{store.path}: holds another run: {what}; give another path, or remove it"
        )


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turn a failure to write into an error that says what is safe."""
    try:
        yield
    except OSError as error:
        if path is None:
            raise
        raise TnsimError(
            f"{path}: cannot be written: {error.strerror or error}; finished tiles are kept, run again to go on"
        ) from error


def log_start(store: Store, what: str) -> None:
    """A line about what is computed now, for whoever wants to know which process computed what."""
    if store.path is not None:
        with writing(store.path), (store.path / LOG).open("a") as out:
            out.write(f"{os.uname().nodename} {os.getpid()} {what}\n")


def _fill(dtype: str) -> float:
    return float("nan") if dtype == "float64" else 0


def _dims(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    names = {"tiles": ("block_a", "block_b"), "blocks_a": ("block_a",), "blocks_b": ("block_b",)}
    side = (name[-1],) if name.startswith("log_norm") else ("a", "b")
    return names.get(name, (*side, "output"))[: len(shape)]


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise MissingExtra("zarr", "pairwise", "a store of results") from None
    return zarr
