"""The results of a run record by record, in memory and in a zarr store.

*Records.* The arrays of a run are filled in records: the norms of one block of models, the products
of one tile, and at last the end of the run. A record lists the regions it fills, one chunk of a
store each, and the place of its marker, a digest of all of its numbers that is written after them.
So a process may be killed, or a disk be full, at any instant. A record is taken from a store,
whether to go on or to be shown, only where its digest equals its marker: a chunk that was changed,
cut, lost or exchanged counts as not computed.

Processes may share a store without locks, see `claims`; a record computed twice is written twice
with the same numbers, each chunk atomically.

*Metadata.* The root of a store holds the attributes of its run, a digest of the metadata file of
every array, and a digest of both. The metadata of one array hold a copy of the attributes, from
which a lost root is written again, whichever models a later run has. Metadata are read as plain
JSON: nothing damaged ever reaches zarr.

*Files.* zarr makes the arrays; a store is a zarr group with a chunk per tile. Chunks are written
and read here (`Disk`, which knows neither records nor markers). They are uncompressed, so that a
chunk is the bytes of its numbers in C order, filled up at the edge of the array (zarr's
specification 3.0, "bytes" codec). So no chunk is read before it is written, temporary names are
chosen here, and a pipe in the place of a chunk is never waited for.

A chunk is written to a temporary name and renamed; a store is made in a folder of its own and
renamed. Such names say which process made them, so that `sweep` removes the leftovers of killed
processes and no file on which a living process works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tnsim.all_pairs import claims
from tnsim.all_pairs.claims import remove
from tnsim.checkpoints.guard import cause
from tnsim.errors import DamagedStore, MissingExtra, StoreMismatch, TnsimError, printable
from tnsim.files import appending, regular

Region = tuple[str, tuple[slice, ...]]
FORMAT = 5  # version of the layout; a store of another version is refused
FILE = "zarr.json"  # metadata file of the root and of every array
# Attributes that must be equal for a store to be continued; error messages name them.
IDENTITY = ("format", "metric", "metric_parameters", "dtype", "slices", "hash_a", "hash_b")
_CHOSEN = ("route", "tile", "tier")  # chosen by the run that began the store, kept by later runs
_UNREADABLE = (OSError, ValueError, RecursionError, KeyError, TypeError)  # of damaged JSON
_COPY = "finished"  # array whose metadata hold a copy of the attributes of the run
_PARTIAL, _FRESH = ".partial", ".tmp"  # suffixes of an unfinished chunk and an unfinished store
_ABANDONED = 24 * 3600.0
"""Seconds after which an unfinished file of another host counts as abandoned: writing a chunk takes
less than a second, and clocks of two hosts differ by less than a day."""
LOG = "computed.log"  # file of a store, a line for every record that a process began to compute
_SHOWN = 5  # most labels that a message names


class Spec(NamedTuple):
    """The shape of an array, the shape of its chunks, and its dtype by name."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str


class Record(NamedTuple):
    """Numbers that are finished together.

    Args:
        label: Name of the record, in words.
        marker: Array of markers, and the marker's place in it.
        regions: Names of arrays with the regions to fill, in the order in which values are given.
        blocks: Number of the block of rows and, for a tile, of the block of columns.
    """

    label: str
    marker: tuple[str, tuple[int, ...]]
    regions: tuple[Region, ...]
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Sizes that determine the arrays and records of a run.

    Args:
        rows: Distinct models.
        columns: Distinct models compared with the rows; None for all pairs of a single list.
        outputs: Number of output coordinates; None where there are no slices.
        tile: Models per side of a tile.
        estimates: Whether cosines have standard errors.
    """

    rows: int
    columns: int | None
    outputs: int | None
    tile: int
    estimates: bool = False

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Layout:
        """The layout of the run that `attrs` describe."""
        others = attrs["hash_b"]
        columns = None if others is None else len(set(others))
        estimates = bool(attrs.get("estimates"))
        rows = len(set(attrs["hash_a"]))
        return cls(rows, columns, attrs["outputs"], attrs["tile"], estimates)

    @property
    def sides(self) -> dict[str, int]:
        """Sides with norms of their own, and their numbers of models."""
        return {"a": self.rows} if self.columns is None else {"a": self.rows, "b": self.columns}

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the arrays with an entry for every pair."""
        pairs: tuple[str, ...] = ("similarity", "log_inner", "sign")
        if self.estimates:
            pairs = (*pairs, "standard_error")
        return pairs if self.outputs is None else (*pairs, "slices")

    @property
    def arrays(self) -> dict[str, Spec]:
        """Every array by its name."""
        rows, tile = self.rows, self.tile
        columns = rows if self.columns is None else self.columns
        across = self._blocks(rows), self._blocks(columns)
        # A chunk is stored in its full size: where all rows fit one tile, chunks end with the rows.
        height = min(tile, rows)
        arrays = {
            "similarity": Spec((rows, columns), (height, tile), "float64"),
            "log_inner": Spec((rows, columns), (height, tile), "float64"),
            "sign": Spec((rows, columns), (height, tile), "int8"),
            "tiles": Spec(across, (1, 1), "uint64"),
            "finished": Spec((1,), (1,), "uint64"),
        }
        if self.estimates:
            arrays["standard_error"] = arrays["similarity"]
        for side, count in self.sides.items():
            arrays[f"blocks_{side}"] = Spec((self._blocks(count),), (1,), "uint64")
            length = height if side == "a" else tile
            for name in self._norms(side):
                arrays[name] = Spec((count,), (length,), "float64")
            if self.outputs is not None:
                chunk = (length, self.outputs)
                for name in self._output_norms(side):
                    arrays[name] = Spec((count, self.outputs), chunk, "float64")
        if self.outputs is not None:
            chunk = (height, tile, self.outputs)
            arrays["slices"] = Spec((rows, columns, self.outputs), chunk, "float64")
        return arrays

    def block(self, n: int) -> slice:
        """The models of a block."""
        return slice(n * self.tile, (n + 1) * self.tile)

    def norms(self, side: str) -> list[Record]:
        """The records of the squared norms of a single side, block by block."""
        names = self.norm_arrays(side)
        records = []
        for n in range(self._blocks(self.sides[side])):
            marker = f"blocks_{side}", (n,)
            regions = tuple((name, (self.block(n),)) for name in names)
            records.append(Record(f"norms {side} {n}", marker, regions, (n,)))
        return records

    def tiles(self) -> list[Record]:
        """The records of all tiles; of a single list, those on and below the diagonal, mirrored."""
        tiles = []
        for i in range(self._blocks(self.rows)):
            across = i + 1 if self.columns is None else self._blocks(self.columns)
            tiles += [self._tile(i, j) for j in range(across)]
        return tiles

    def _tile(self, i: int, j: int) -> Record:
        places = [(self.block(i), self.block(j))]
        # Similarities are symmetric, so a tile beside the diagonal is also its mirror image.
        if self.columns is None and i != j:
            places.append((self.block(j), self.block(i)))
        regions = tuple(itertools.product(self.variables, places))
        return Record(f"tile {i} {j}", ("tiles", (i, j)), regions, (i, j))

    @property
    def end(self) -> Record:
        """The record of the end of the run: all other markers, so that a lost marker is noticed."""
        markers = ("tiles", *(f"blocks_{side}" for side in self.sides))
        regions = tuple((name, (slice(None),)) for name in markers)
        return Record("end", ("finished", (0,)), regions)

    @property
    def records(self) -> list[Record]:
        """All records of a finished run."""
        norms = itertools.chain.from_iterable(self.norms(side) for side in self.sides)
        return [*norms, *self.tiles(), self.end]

    def norm_arrays(self, side: str) -> tuple[str, ...]:
        """Names of the arrays of the norms of one side."""
        return (*self._norms(side), *self._output_norms(side))

    def _norms(self, side: str) -> tuple[str, ...]:
        """Arrays of the squared norms of models, and of the sizes of their sums."""
        return f"log_norm_{side}", f"log_norm_size_{side}"

    def _output_norms(self, side: str) -> tuple[str, ...]:
        """Arrays of the squared norms of every output and of their sizes, for slices."""
        if self.outputs is None:
            return ()
        return f"log_norms_{side}", f"log_norms_size_{side}"

    def _blocks(self, models: int) -> int:
        return math.ceil(models / self.tile)


def digest(value: Any) -> str:
    """The digest of any value that JSON can hold, 32 hexadecimal digits."""
    # Sorted, so that mappings that are equal have equal digests, whatever their order.
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def run_digest(attrs: Mapping[str, Any]) -> str:
    """The digest of what determines the numbers and the tiles of a run."""
    return digest([attrs[name] for name in (*IDENTITY, *_CHOSEN)])


def root(attrs: Mapping[str, Any], folder: Path, arrays: Iterable[str]) -> dict[str, Any]:
    """The attributes of the root of a store with its arrays in `folder`."""
    # A changed shape or type in the metadata of an array would give other numbers without an error,
    # so the digest of the root covers these files as well.
    files = {name: _file_digest(folder / name / FILE) for name in arrays}
    return {"tnsim": dict(attrs), "arrays": files, "digest": digest([dict(attrs), files])}


def attributes(path: Path) -> dict[str, Any]:
    """The verified attributes of the run in a store.

    Raises:
        StoreMismatch: There is no store, or a store of another format.
        DamagedStore: The attributes of the store are not the attributes that were written.
    """
    try:
        data = json.loads(_read(path / FILE))
        stored = data["attributes"]
        attrs = stored["tnsim"]
        theirs = attrs["format"]
    except _UNREADABLE as error:
        # The copy still says that this is a store, so the root is damaged; otherwise it is
        # something else.
        if _copied(path) is not None:
            raise _damaged(path) from None
        raise StoreMismatch(
            f"{path}: not a store of tnsim.pairwise "
            f"({type(error).__name__}: {printable(str(error), 300)}); "
            "give the path of one, or of nothing"
        ) from None
    # The format is compared before the digest, since another format may have another digest.
    if theirs != FORMAT:
        raise _other_run(path, _differs("format", theirs, FORMAT))
    whole = stored.get("digest") == digest([attrs, stored.get("arrays")])
    if not whole or (data.get("zarr_format"), data.get("node_type")) != (3, "group"):
        raise _damaged(path)
    return attrs


def restorable(path: Path) -> tuple[dict[str, Any], bool]:
    """The attributes of the run in a store, and whether the root lost them and has to be restored.

    Raises:
        StoreMismatch: There is no store, or a store of another format.
        DamagedStore: The attributes are damaged in both of their places.
    """
    try:
        return attributes(path), False
    except DamagedStore:
        attrs = _copied(path)
        if attrs is None:
            raise
        return attrs, True


def damaged_arrays(path: Path) -> list[str]:
    """The arrays with changed metadata, in a store with verified attributes."""
    files = json.loads(_read(path / FILE))["attributes"]["arrays"]
    return [name for name, known in files.items() if _file_digest(path / name / FILE) != known]


def restore(path: Path, fresh: Path) -> None:
    """Replace the metadata of a store by the metadata of the new store `fresh`; numbers stay."""
    for file in fresh.rglob(FILE):
        target = path / file.relative_to(fresh)
        # Something else may stand in the place of a folder or of a file.
        for place, is_wanted in ((target.parent, Path.is_dir), (target, Path.is_file)):
            if os.path.lexists(place) and not is_wanted(place):
                remove(place)
        target.parent.mkdir(exist_ok=True)
        file.replace(target)


def check(
    path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], settings_alone: bool = False
) -> None:
    """Raise `StoreMismatch`, naming the difference, where two runs have other attributes.

    Args:
        path: Path of the store.
        theirs: Attributes in the store.
        ours: Attributes of the run that would fill it.
        settings_alone: Whether the models may differ, while both have columns or neither has.
    """
    for name in IDENTITY:
        if theirs[name] == ours[name]:
            continue
        if settings_alone and None not in (theirs[name], ours[name]) and name.startswith("hash_"):
            continue
        if name.startswith("hash_"):
            raise _other_run(path, _other_models(name[-1], theirs, ours))
        raise _other_run(path, _differs(name, theirs[name], ours[name]))


def _copied(path: Path) -> dict[str, Any] | None:
    """The copy of the attributes of a store; None where it is damaged or there is no store."""
    try:
        stored = json.loads(_read(path / _COPY / FILE))["attributes"]
        is_whole = stored["digest"] == digest(stored["tnsim"])
    except _UNREADABLE:
        return None
    return stored["tnsim"] if is_whole and stored["tnsim"]["format"] == FORMAT else None


def _read(file: Path) -> bytes:
    """The bytes of a regular file. Raises `OSError` for anything else: a pipe would never end."""
    with regular(file) as opened:
        return opened.read()


def _file_digest(file: Path) -> str | None:
    try:
        return hashlib.blake2b(_read(file), digest_size=16).hexdigest()
    except OSError:
        return None


def _damaged(path: Path) -> DamagedStore:
    remedy = "" if _copied(path) is None else "run again with this store to restore it, or "
    return DamagedStore(
        f"{path}: damaged: its attributes are not those that were written; {remedy}remove it"
    )


def _other_run(path: Path, what: str) -> StoreMismatch:
    return StoreMismatch(f"{path}: holds another run: {what}; give another path, or remove it")


def _differs(name: str, theirs: Any, ours: Any) -> str:
    return f"{name} {json.dumps(theirs)}, and {json.dumps(ours)} is asked for"


def _other_models(side: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The difference between stored and given models of a single side, in words."""
    stored, given = theirs[f"hash_{side}"], ours[f"hash_{side}"]
    if stored is None:
        return "all pairs of one list"
    if given is None:
        return "models against others, and no others are given"
    if len(stored) > len(given):
        return f"{len(stored)} models on side {side}, and {len(given)} are given"
    # Labels say which model changed; a label that is not given now compares equal to itself.
    now = dict(zip(map(str, ours[f"labels_{side}"]), given, strict=True))
    labels = theirs[f"labels_{side}"]
    for n, (label, known) in enumerate(zip(labels, stored, strict=True)):
        if now.get(str(label), known) != known:
            return f"other weights for {label} (side {side}, number {n})"
        if known not in given:
            return f"a model {label} (side {side}, number {n}) that is not given"
    return f"its models on side {side} in another order"


@dataclass(frozen=True)
class Disk:
    """The arrays of a store on disk, by name."""

    path: Path
    specs: Mapping[str, Spec]

    def read(self, name: str, at: tuple) -> np.ndarray:
        """The numbers of a region as they are on disk, unverified.

        Chunks that are not written yet give the array's fill value.

        Args:
            name: Name of the array.
            at: An integer or a slice for each axis; axes that are not named are whole.

        Returns:
            The numbers at that place.

        Raises:
            OSError: A chunk cannot be read, or its place holds something other than a file.
            ValueError: A chunk is longer or shorter than its numbers.
        """
        spec = self.specs[name]
        # Chunks are read as a whole into `values`; the region wanted is cut out of it afterwards.
        held = _held(at, spec)
        sizes = [len(numbers) * size for numbers, size in zip(held, spec.chunks, strict=True)]
        values = np.empty(sizes, spec.dtype)
        for chunk in itertools.product(*held):
            place = []
            for number, numbers, size in zip(chunk, held, spec.chunks, strict=True):
                start = (number - numbers.start) * size
                place.append(slice(start, start + size))
            values[tuple(place)] = self._chunk(name, chunk)
        inside: list[int | slice] = []
        # Places within `values`, relative to the first chunk read; an integer index drops its axis,
        # as in NumPy.
        for axis, (length, size) in enumerate(zip(spec.shape, spec.chunks, strict=True)):
            start, stop = _bounds(at, axis, length)
            first = held[axis].start * size
            is_number = axis < len(at) and not isinstance(at[axis], slice)
            inside.append(start - first if is_number else slice(start - first, stop - first))
        return np.asarray(values[tuple(inside)])

    def write(self, name: str, at: tuple, value: Any) -> None:
        """Write one whole chunk, replacing whatever stands in its place.

        Raises:
            OSError: The chunk cannot be written, or its place holds a folder that is not empty.
        """
        spec = self.specs[name]
        (chunk,) = itertools.product(*_held(at, spec))
        # Zarr stores chunks at the edge of an array in the full size, filled up.
        numbers = np.full(spec.chunks, _fill(spec), _stored_type(spec))
        numbers[tuple(map(slice, np.shape(value)))] = value
        file = self._file(name, chunk)
        # A name of its own for every writer, so that two processes that write one chunk do not
        # meet.
        temporary = file.with_name(f".{'-'.join(claims.maker())}{_PARTIAL}")
        try:
            _make_folders(self.path, file.parent)
            # Under another name first: renaming is one step, so that no process reads half a chunk,
            # and a killed process leaves none.
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
        """The numbers of a chunk, or the fill value where the chunk is not written yet."""
        spec, file = self.specs[name], self._file(name, chunk)
        size = math.prod(spec.chunks) * _stored_type(spec).itemsize
        try:
            with regular(file) as opened:
                content = opened.read(size + 1)  # one byte more, so that a longer file is noticed
        except FileNotFoundError:
            if file.is_symlink():  # a link to nowhere is damage, not a chunk yet to be written
                raise
            return _fill(spec)
        if len(content) != size:
            raise ValueError(f"{file}: expected {size} bytes")
        return np.frombuffer(content, _stored_type(spec)).reshape(spec.chunks)

    def _file(self, name: str, chunk: tuple[int, ...]) -> Path:
        return self.path.joinpath(name, "c", *map(str, chunk))


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turn a failure to write into a `TnsimError` that says that finished tiles are kept."""
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
    """Make a new store as a whole or not at all; a store that another process made first stays."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with fresh(path, attrs) as new:
                new.rename(path)
        except OSError:
            # Renaming onto a folder fails where the folder is not empty: another process was first.
            if not path.exists():
                raise


@contextlib.contextmanager
def fresh(path: Path, attrs: Mapping[str, Any]) -> Iterator[Path]:
    """An empty store in a new folder next to `path`; whatever is not moved away is removed."""
    with new_folder(path) as folder:
        write_empty(folder, attrs)
        yield folder


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """The place of a new folder next to `path`; whatever is not moved away is removed."""
    folder = path.with_name(f".{_short(path)}-{'-'.join(claims.maker())}{_FRESH}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_empty(folder: Path, attrs: Mapping[str, Any]) -> None:
    """Write a store without results."""
    group = zarr_library().open_group(folder, mode="w", zarr_format=3)
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
            attributes=_sealed(attrs) if name == _COPY else None,
        )
    group.attrs.put(root(attrs, folder, arrays))


def write_list(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a group without arrays, with attributes and their digest."""
    group = zarr_library().open_group(folder, mode="w", zarr_format=3)
    group.attrs.put(_sealed(content))


def _sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a group or of an array, with their digest."""
    return {"tnsim": dict(content), "digest": digest(dict(content))}


def read_list(folder: Path) -> dict[str, Any]:
    """The attributes of a group that `write_list` wrote.

    Raises:
        DamagedStore: The attributes are not the attributes that were written.
    """
    try:
        stored = json.loads(_read(folder / FILE))["attributes"]
        if stored["digest"] != digest(stored["tnsim"]):
            raise ValueError("other attributes than were written")
        return stored["tnsim"]
    except _UNREADABLE as error:
        raise DamagedStore(
            f"{folder}: damaged: its list of models ({printable(cause(error), 200)}); remove this "
            "folder and run again with this store, which computes its pairs again"
        ) from None


def refuse_links(path: Path) -> None:
    """Raise `StoreMismatch` where a link in a store leads writing out of it."""
    # Chunks are replaced by renaming, which replaces a link as well; folders and the log are
    # written into.
    for parent, folders, files in os.walk(path):
        for name in (*folders, *(name for name in files if name == LOG)):
            place = Path(parent, name)
            if place.is_symlink():
                raise StoreMismatch(
                    f"{place}: is a link, through which a run would write outside of {path}; "
                    "put what it points to in its place, or remove it, and run again"
                )


def sweep(path: Path) -> None:
    """Remove the unfinished chunks and stores of killed processes."""
    for parent, _, names in os.walk(path):  # os.walk passes over folders that vanish meanwhile
        for name in names:
            chunk = Path(parent, name)
            partial = name.startswith(".") and name.endswith(_PARTIAL)
            if partial and _is_left(chunk, _PARTIAL):
                chunk.unlink(missing_ok=True)
    for folder in path.parent.glob(f".{_short(path)}-*{_FRESH}"):
        if _is_left(folder, _FRESH):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(path: Path, suffix: str) -> bool:
    """Whether the process that a temporary name names as its maker is gone."""
    # The name ends with the maker: host, process number and a random number.
    words = path.name.removesuffix(suffix).lstrip(".").split("-")[-3:]
    if len(words) == 3 and words[0] == claims.host():
        return claims.is_gone(words[1])
    try:
        # Of another host nobody knows whether its process lives; only age tells.
        return time.time() - path.stat().st_mtime > _ABANDONED
    except FileNotFoundError:
        return False


def _short(path: Path) -> str:
    """A short digest of a store's name, for temporary names next to it.

    The full name plus a maker could exceed the longest name that a file system allows.
    """
    return hashlib.blake2b(os.fsencode(path.name), digest_size=4).hexdigest()


def _make_folders(root: Path, folder: Path) -> None:
    """Make the folders from `root` down to `folder`, replacing files in their places."""
    # From the root of the store downwards.
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
    """Arrays in memory without results: NaN, or zero in arrays of integers."""
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
    """The little-endian type of the numbers in a chunk."""
    return np.dtype(spec.dtype).newbyteorder("<")


def _held(at: tuple, spec: Spec) -> list[range]:
    """The numbers of the chunks that hold a region, as a range for each axis."""
    ranges = []
    for axis, (length, size) in enumerate(zip(spec.shape, spec.chunks, strict=True)):
        start, stop = _bounds(at, axis, length)
        ranges.append(range(start // size, -(-stop // size)))
    return ranges


def _bounds(at: tuple, axis: int, length: int) -> tuple[int, int]:
    """The start and the exclusive end of a region along an axis; an axis not named is whole."""
    place = at[axis] if axis < len(at) else slice(None)
    if not isinstance(place, slice):
        place = slice(place, place + 1)
    start, stop, _ = place.indices(length)
    return start, stop


def zarr_library() -> Any:
    """The zarr library. Raises `MissingExtra` where it is not installed."""
    try:
        import zarr
    except ImportError:
        raise MissingExtra("zarr", "pairwise", "a store of results") from None
    return zarr


class State(Enum):
    """The state of a record in a store."""

    MISSING = 0
    WHOLE = 1
    DAMAGED = 2


@dataclass(frozen=True)
class Store:
    """The arrays of a run in memory and, where there is a disk, also on disk.

    Args:
        attrs: Attributes of the run, made by `preparation`.
        layout: Arrays and records of the run.
        arrays: Numbers that this process has computed, or has read and verified; all else is NaN,
            or zero in arrays of integers.
        disk: The arrays on disk; None for a run in memory.
        damaged: Labels of the parts that were damaged when the store was opened.
        known: Labels of the records that are in `arrays`.
    """

    attrs: Mapping[str, Any]
    layout: Layout
    arrays: Mapping[str, np.ndarray]
    disk: Disk | None = None
    damaged: tuple[str, ...] = ()
    known: set[str] = field(default_factory=set)

    @property
    def path(self) -> Path | None:
        """The folder of the store; None for a run in memory."""
        return None if self.disk is None else self.disk.path

    @property
    def is_finished(self) -> bool:
        """Whether every record is known."""
        return len(self.known) == len(self.layout.records)

    def fetch(self, record: Record) -> State:
        """The state of a record; a whole record is copied from the disk into `arrays`."""
        if record.label in self.known:
            return State.WHOLE
        if self.disk is None:
            return State.MISSING
        try:
            # The marker is read first, so that a record that another process is writing looks
            # missing, not damaged.
            marker = int(self.disk.read(*record.marker))
            if marker == 0:
                return State.MISSING
            values = [self.disk.read(*region) for region in record.regions]
        except Exception:  # damaged bytes may raise anything
            return State.DAMAGED
        if marker != self._digest(record, values):
            return State.DAMAGED
        self._keep(record, values, marker)
        return State.WHOLE

    def write(self, record: Record, values: Sequence[np.ndarray]) -> None:
        """Write the numbers of a record, an array for each region, and then its marker."""
        # The digest covers the type of the numbers, so they get the type of their array first.
        specs = self.layout.arrays
        typed = []
        for (name, _), value in zip(record.regions, values, strict=True):
            typed.append(np.asarray(value, specs[name].dtype))
        if self.disk is not None:
            with writing(self.path):
                for region, value in zip(record.regions, typed, strict=True):
                    self.disk.write(*region, value)
        self._mark(record, typed)

    def finish(self) -> None:
        """Mark the end of the run."""
        end = self.layout.end
        if self.fetch(end) is not State.WHOLE:
            self._mark(end, [self.arrays[name] for name, _ in end.regions])

    def _mark(self, record: Record, values: Sequence[np.ndarray]) -> None:
        """Keep a record in memory, and write its marker; its numbers are on disk already."""
        # The marker comes last: a process that is killed before leaves numbers without a marker,
        # which nobody reads.
        marker = self._digest(record, values)
        self._keep(record, values, marker)
        if self.disk is not None:
            with writing(self.path):
                self.disk.write(*record.marker, np.uint64(marker))

    def _keep(self, record: Record, values: Sequence[np.ndarray], marker: int) -> None:
        for (region, at), value in zip(record.regions, values, strict=True):
            self.arrays[region][at] = value
        name, place = record.marker
        self.arrays[name][place] = marker
        self.known.add(record.label)

    def _digest(self, record: Record, values: Sequence[np.ndarray]) -> int:
        """The digest of a record's numbers, label and run: 64 bits, never zero.

        Zero is the marker of a missing record.
        """
        # The label and the run are part of the digest: a record moved to another place, or to
        # another run, has a wrong marker.
        run = run_digest(self.attrs)
        state = hashlib.blake2b(f"{run} {record.label}".encode(), digest_size=8)
        for value in values:
            state.update(f"{value.dtype.name}{value.shape}".encode())
            state.update(np.ascontiguousarray(value).tobytes())
        return int.from_bytes(state.digest(), "little") or 1


def folder(path: str | os.PathLike[str]) -> Path:
    """The path of a store.

    Raises:
        StoreMismatch: The path is an address, which would become a local folder such as `s3:`, or
            it is no path of a file system.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(path)):
        raise StoreMismatch(
            f"{path}: a store is a folder on a disk, and this is an address; "
            "give the path of a folder, and copy it where you want it when the run is done"
        )
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # reported when the store is written or read
    except (OSError, ValueError) as error:
        raise StoreMismatch(
            printable(f"{os.fspath(path)}: no path of a store: {cause(error)}; give another")
        ) from None
    return Path(path)


def in_memory(attrs: Mapping[str, Any]) -> Store:
    """A store that lives as long as the result."""
    layout = Layout.of(attrs)
    return Store(attrs, layout, empty(layout.arrays))


def opened(path: Path, attrs: Mapping[str, Any]) -> Store:
    """The store at `path` for the run that `attrs` describe, new or existing.

    Damaged metadata are written again where they belong to this run; damaged records count as not
    computed. Both are named in `damaged`.

    Raises:
        StoreMismatch: The path holds another run, or something other than a store.
        DamagedStore: The attributes are damaged in both of their places.
    """
    if not path.exists():
        create(path, attrs)
    theirs, is_lost = restorable(path)
    check(path, theirs, attrs)
    damaged = ["attributes"] if is_lost else []
    if not is_lost:
        damaged = [f"metadata of {name}" for name in damaged_arrays(path)]
    # Metadata come from a new empty store of the same run, which has the same metadata.
    if damaged:
        with writing(path), fresh(path, theirs) as new:
            restore(path, new)
    store = _on_disk(path, theirs)
    return dataclasses.replace(store, damaged=(*damaged, *_load(store)[State.DAMAGED]))


def read(path: Path) -> tuple[Store, list[str]]:
    """A store as it is on disk, and the labels of the norms and tiles that are missing.

    Raises:
        StoreMismatch: There is no store.
        DamagedStore: Part of the store differs from the bytes that were written.
    """
    attrs = attributes(path)
    _refuse(path, [f"metadata of {name}" for name in damaged_arrays(path)])
    store = _on_disk(path, attrs)
    records = _load(store)
    _refuse(path, records[State.DAMAGED])
    return store, [label for label in records[State.MISSING] if label != store.layout.end.label]


def log_start(store: Store, what: str) -> None:
    """Append a line to the log of the store: host, process, and the record that it computes."""
    if store.path is not None:
        log = store.path / LOG
        with writing(store.path), appending(log) as out:
            out.write(f"{platform.node()} {os.getpid()} {what}\n".encode())


def listed(labels: Sequence[str]) -> str:
    """The first few labels, and how many more there are."""
    shown = ", ".join(labels[:_SHOWN])
    return shown if len(labels) <= _SHOWN else f"{shown} and {len(labels) - _SHOWN} more"


def _load(store: Store) -> dict[State, list[str]]:
    """Fetch every record and return the labels of the records in each state.

    Where the end of the run is marked, every record was written, so a record missing now was lost.
    The end is fetched first, as another process may mark it while the records are read.
    """
    labels: dict[State, list[str]] = {state: [] for state in State}
    is_finished = store.fetch(store.layout.end) is not State.MISSING
    for record in store.layout.records:
        labels[store.fetch(record)].append(record.label)
    if is_finished:
        labels[State.DAMAGED] += labels[State.MISSING]
        labels[State.MISSING] = []
    return labels


def _refuse(path: Path, damaged: Sequence[str]) -> None:
    if damaged:
        raise DamagedStore(
            f"{path}: damaged: {listed(damaged)}; run pairwise again with this store to compute "
            "again what was lost, or remove it"
        )


def _on_disk(path: Path, attrs: Mapping[str, Any]) -> Store:
    layout = Layout.of(attrs)
    arrays = empty(layout.arrays)
    return Store(attrs, layout, arrays, Disk(path, layout.arrays))
