"""A store as zarr keeps it on disk. In: attributes, regions of arrays. Out: bytes in a folder.

Nothing here knows records or markers. A chunk is written to a temporary name and renamed; a store
is made in a folder of its own and renamed. Such names say which process made them, so that `sweep`
removes what killed processes left and nothing that a living one is at.

zarr makes the arrays. Chunks are written and read here: they are uncompressed, which makes one the
bytes of its numbers in C order, filled up at the edge of the array. (zarr's specification 3.0,
"bytes" codec.) So nothing is read before it is written, temporary names are ours, and a pipe in the
place of a chunk is never waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.errors import MissingExtra, TnsimError
from tnsim.files import regular
from tnsim.gram import claims
from tnsim.gram import store_metadata as metadata
from tnsim.gram.layout import Layout, Spec

_PARTIAL, _FRESH = ".partial", ".tmp"  # of a chunk and of a store that are being written
_ABANDONED = 24 * 3600.0
"""Seconds after which what another host was writing is taken for left; a chunk takes less than
one, and clocks of two hosts differ by less than that."""


@dataclass(frozen=True)
class Disk:
    """The arrays of a store on disk, by name."""

    path: Path
    specs: Mapping[str, Spec]

    def read(self, name: str, at: tuple) -> np.ndarray:
        """Numbers as they are there, true or not; filled up where chunks are not written yet.

        Args:
            name: Of the array.
            at: An integer or a slice for each axis; axes that are not named are whole.

        Returns:
            The numbers at that place.

        Raises:
            OSError: A chunk cannot be read, or something else than a file stands in its place.
            ValueError: A chunk is longer or shorter than its numbers.
        """
        spec = self.specs[name]
        held = _held(at, spec)
        sizes = [len(numbers) * size for numbers, size in zip(held, spec.chunks, strict=True)]
        found = np.empty(sizes, spec.dtype)
        for chunk in itertools.product(*held):
            place = []
            for number, numbers, size in zip(chunk, held, spec.chunks, strict=True):
                start = (number - numbers.start) * size
                place.append(slice(start, start + size))
            found[tuple(place)] = self._chunk(name, chunk)
        inside: list[int | slice] = []
        for axis, (length, size) in enumerate(zip(spec.shape, spec.chunks, strict=True)):
            start, stop = _bounds(at, axis, length)
            first = held[axis].start * size
            is_number = axis < len(at) and not isinstance(at[axis], slice)
            inside.append(start - first if is_number else slice(start - first, stop - first))
        return np.asarray(found[tuple(inside)])

    def write(self, name: str, at: tuple, value: Any) -> None:
        """Write one chunk whole, whatever stands in its place.

        Raises:
            OSError: It cannot be written, or a folder with something in it stands in its place.
        """
        spec = self.specs[name]
        (chunk,) = itertools.product(*_held(at, spec))
        numbers = np.full(spec.chunks, _fill(spec), _stored_type(spec))
        numbers[tuple(map(slice, np.shape(value)))] = value
        file = self._file(name, chunk)
        temporary = file.with_name(f".{'-'.join(claims.maker())}{_PARTIAL}")
        try:
            _make_folders(self.path, file.parent)
            temporary.write_bytes(numbers.tobytes())
            try:
                os.replace(temporary, file)
            except IsADirectoryError:
                claims.remove(file)
                os.replace(temporary, file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _chunk(self, name: str, chunk: tuple[int, ...]) -> Any:
        """The numbers of a chunk, or the number that fills one that is not there."""
        spec, file = self.specs[name], self._file(name, chunk)
        size = math.prod(spec.chunks) * _stored_type(spec).itemsize
        try:
            with regular(file) as opened:
                content = opened.read(size + 1)
        except FileNotFoundError:
            if file.is_symlink():
                raise
            return _fill(spec)
        if len(content) != size:
            raise ValueError(f"{file}: expected {size} bytes")
        return np.frombuffer(content, _stored_type(spec)).reshape(spec.chunks)

    def _file(self, name: str, chunk: tuple[int, ...]) -> Path:
        return self.path.joinpath(name, "c", *map(str, chunk))


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turn a failure to write into an error that says what is safe."""
    try:
        yield
    except OSError as error:
        if path is None:
            raise
        at = Path(error.filename2 or error.filename or path)
        where = f" ({at})" if at != path and not at.name.endswith(_PARTIAL) else ""
        raise TnsimError(
            f"{path}: cannot be written: {error.strerror or error}{where}; "
            "finished tiles are kept, run again to go on"
        ) from error


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
    folder = path.with_name(f".{_short(path)}-{'-'.join(claims.maker())}{_FRESH}")
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
    for parent, _, names in os.walk(path):  # passes over folders that go while it walks
        for name in names:
            chunk = Path(parent, name)
            partial = name.startswith(".") and name.endswith(_PARTIAL)
            if partial and _is_left(chunk, _PARTIAL):
                chunk.unlink(missing_ok=True)
    for folder in path.parent.glob(f".{_short(path)}-*{_FRESH}"):
        if _is_left(folder, _FRESH):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(path: Path, suffix: str) -> bool:
    """Whether the process that was writing something is gone, by its name."""
    host, pid, _ = path.name.removesuffix(suffix).lstrip(".").split("-")[-3:]
    if host == claims.host():
        return claims.is_gone(pid)
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED
    except FileNotFoundError:
        return False


def _short(path: Path) -> str:
    """The name of a store in names beside it, which may be no longer than its own."""
    return hashlib.blake2b(os.fsencode(path.name), digest_size=4).hexdigest()


def _make_folders(root: Path, folder: Path) -> None:
    """Make the folders down to one, in the place of files that stand there."""
    for level in (*reversed(folder.parents), folder):
        if not level.is_relative_to(root) or level == root:
            continue
        try:
            level.mkdir()
        except FileExistsError:
            if not level.is_dir():
                level.unlink(missing_ok=True)
                level.mkdir(exist_ok=True)


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


def _stored_type(spec: Spec) -> np.dtype:
    """The type of numbers in a chunk."""
    return np.dtype(spec.dtype).newbyteorder("<")


def _held(at: tuple, spec: Spec) -> list[range]:
    """For each axis the numbers of the chunks that hold a region."""
    ranges = []
    for axis, (length, size) in enumerate(zip(spec.shape, spec.chunks, strict=True)):
        start, stop = _bounds(at, axis, length)
        ranges.append(range(start // size, -(-stop // size)))
    return ranges


def _bounds(at: tuple, axis: int, length: int) -> tuple[int, int]:
    """First and last position, exclusive, of a region along an axis; whole where not named."""
    place = at[axis] if axis < len(at) else slice(None)
    if not isinstance(place, slice):
        place = slice(place, place + 1)
    start, stop, _ = place.indices(length)
    return start, stop


def zarr_library() -> Any:
    """The library that reads and writes stores, or what to install."""
    try:
        import zarr
    except ImportError:
        raise MissingExtra("zarr", "pairwise", "a store of results") from None
    return zarr
