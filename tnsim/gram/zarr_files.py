"""A store as zarr keeps it on disk. In: attributes, regions of arrays. Out: bytes in a folder.

Nothing here knows records or markers. A chunk is written to a temporary name and renamed; a store
is made in a folder of its own and renamed. What a killed process leaves under such names is
removed by `sweep`.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.errors import MissingExtra, TnsimError
from tnsim.gram import store_metadata as metadata
from tnsim.gram.layout import Layout, Spec


@dataclass(frozen=True)
class Disk:
    """The arrays of a store on disk: zarr's by name, and their specs."""

    path: Path
    arrays: Mapping[str, Any]
    specs: Mapping[str, Spec]

    def read(self, name: str, at: tuple) -> np.ndarray:
        """Numbers as they are there, true or not.

        Raises:
            OSError: Something else than a file stands in the place of a chunk; a pipe would be
                waited for.
        """
        for chunk in self._chunks(name, at):
            if chunk.exists() and not chunk.is_file():
                raise OSError(f"{chunk} is no regular file")
        return np.asarray(self.arrays[name][at])

    def write(self, name: str, at: tuple, value: Any) -> None:
        """Write one chunk.

        Of a chunk that reaches beyond the array zarr reads the old numbers first. Where they cannot
        be read the chunk is removed, and written anew. So is a chunk whose temporary file is gone:
        another process has finished the run meanwhile, and swept it away.
        """
        for chunk in self._chunks(name, at):
            if chunk.is_dir() and not chunk.is_symlink():
                shutil.rmtree(chunk)
            elif chunk.exists() and not chunk.is_file():
                chunk.unlink()
        try:
            self.arrays[name][at] = value
        except FileNotFoundError:
            self.arrays[name][at] = value
        except OSError:
            raise
        except Exception:
            for chunk in self._chunks(name, at):
                chunk.unlink(missing_ok=True)
            self.arrays[name][at] = value

    def _chunks(self, name: str, at: tuple) -> list[Path]:
        """Files of the chunks that hold a region of an array."""
        spec = self.specs[name]
        places = [place if isinstance(place, slice) else slice(place, place + 1) for place in at]
        places += [slice(None)] * (len(spec.shape) - len(places))
        numbers = []
        for place, size, length in zip(places, spec.chunks, spec.shape, strict=True):
            start, stop, _ = place.indices(length)
            numbers.append(range(start // size, -(-stop // size)))
        folder = self.path / name / "c"
        return [folder.joinpath(*map(str, chunk)) for chunk in itertools.product(*numbers)]


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turn a failure to write into an error that says what is safe."""
    try:
        yield
    except OSError as error:
        if path is None:
            raise
        raise TnsimError(
            f"{path}: cannot be written: {error.strerror or error}; "
            "finished tiles are kept, run again to go on"
        ) from error


def opened(path: Path, attrs: Mapping[str, Any], mode: str) -> Disk:
    """The arrays of the store at `path`, to be read ("r") or also written ("r+")."""
    arrays = Layout.of(attrs).arrays
    group = zarr_library().open_group(path, mode=mode, zarr_format=3)
    return Disk(path, {name: group[name] for name in arrays}, arrays)


def create(path: Path, attrs: Mapping[str, Any]) -> None:
    """A new store as a whole or not at all; the one of another process, if that was quicker."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with fresh(path, attrs) as new:
                new.rename(path)
        except OSError:
            if not path.exists():
                raise


@contextlib.contextmanager
def fresh(path: Path, attrs: Mapping[str, Any]) -> Iterator[Path]:
    """An empty store in a folder of its own beside `path`; what is not moved away is removed."""
    zarr = zarr_library()
    folder = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        group = zarr.open_group(folder, mode="w", zarr_format=3)
        arrays = Layout.of(attrs).arrays
        for name, spec in arrays.items():
            group.create_array(
                name,
                shape=spec.shape,
                chunks=spec.chunks,
                dtype=spec.dtype,
                fill_value=_fill(spec),
                compressors=None,  # logarithms and cosines of weights do not compress
                dimension_names=_dimensions(name, spec),
                attributes={"tnsim": metadata.binding(attrs)},
            )
        group.attrs.put(metadata.root(attrs, folder, arrays))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(path: Path) -> None:
    """Remove chunks and stores that were being written when their process was killed."""
    for chunk in path.rglob("*.partial"):  # zarr's suffix of a chunk that is not renamed yet
        chunk.unlink(missing_ok=True)
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def empty(arrays: Mapping[str, Spec]) -> dict[str, np.ndarray]:
    """Arrays in memory that hold nothing yet: NaN, or zero where there is no NaN."""
    return {name: np.full(spec.shape, _fill(spec), spec.dtype) for name, spec in arrays.items()}


def _fill(spec: Spec) -> float:
    return float("nan") if spec.dtype == "float64" else 0


def _dimensions(name: str, spec: Spec) -> tuple[str, ...]:
    if name == "finished":
        return ("run",)
    if name == "tiles":
        return ("block_a", "block_b")
    if name.startswith("blocks_"):
        return (f"block_{name[-1]}",)
    if name.startswith("log_norm"):
        return (name[-1], "output")[: len(spec.shape)]
    return ("a", "b", "output")[: len(spec.shape)]


def zarr_library() -> Any:
    """The library that reads and writes stores, or what to install."""
    try:
        import zarr
    except ImportError:
        raise MissingExtra("zarr", "pairwise", "a store of results") from None
    return zarr
