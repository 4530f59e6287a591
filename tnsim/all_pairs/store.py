"""What a run fills, piece by piece. In: numbers of models, the tile. Out: arrays and records.

The arrays of a run are filled in *records*: the norms of one block of models, the products of one
tile, and at last the end of the run. A record lists the regions it fills, one chunk of a store
each, and the place of its marker, a digest that is written after everything that the record
fills.

[merged from gram/store_metadata]
What a store says about itself, verified. In: a folder, a run's attributes. Out: attributes.

The root of a store holds the attributes of its run, a digest of the metadata file of every array,
and a digest of both. Every array holds the identity of the run as well, so that a root which is
lost can be written again by the run that the store belongs to. Reading here is plain JSON:
nothing damaged ever reaches zarr.

[merged from gram/zarr_files]
A store as zarr keeps it on disk. In: attributes, regions of arrays. Out: bytes in a folder.

Nothing here knows records or markers. A chunk is written to a temporary name and renamed; a store
is made in a folder of its own and renamed. Such names say which process made them, so that `sweep`
removes what killed processes left and nothing that a living one is at.

zarr makes the arrays. Chunks are written and read here: they are uncompressed, which makes one the
bytes of its numbers in C order, filled up at the edge of the array. (zarr's specification 3.0,
"bytes" codec.) So nothing is read before it is written, temporary names are ours, and a pipe in the
place of a chunk is never waited for.

[merged from gram/store]
Results record by record, in memory and in a zarr store. In: numbers. Out: what is finished.

A store is a zarr group with one chunk per tile, see `zarr_files`. A chunk is written to a temporary
name and renamed, and the marker of a record, a digest of all of its numbers, is written after them.
So a process may be killed, or a disk be full, at any instant; and nothing is taken from a store,
neither to go on nor to be shown, whose digest is not that of its marker: a chunk that was
changed, cut, lost or exchanged is as good as none.

Processes may share a store without locks, see `claims`; a record computed twice is written twice
with the same numbers, each chunk atomically.
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


class Spec(NamedTuple):
    """One array: its shape, the shape of its chunks, and its dtype by name."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str


class Record(NamedTuple):
    """Numbers that are finished together.

    Args:
        label: Which they are, in words.
        marker: The array of markers, and the place in it.
        regions: Arrays and the slices of them that are filled, in the order in which values are
            given.
        blocks: Number of the block of rows and, for a tile, of the block of columns.
    """

    label: str
    marker: tuple[str, tuple[int, ...]]
    regions: tuple[Region, ...]
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Sizes that say which arrays a run has.

    Args:
        rows: Distinct models.
        columns: Distinct models they are compared with; None for all pairs of one list.
        outputs: Output coordinates; None where there are no slices.
        tile: Models a side of a tile.
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
        """Sides that have norms of their own, and their numbers of models."""
        return {"a": self.rows} if self.columns is None else {"a": self.rows, "b": self.columns}

    @property
    def variables(self) -> tuple[str, ...]:
        """Arrays with one entry for every pair."""
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
        arrays = {
            "similarity": Spec((rows, columns), (tile, tile), "float64"),
            "log_inner": Spec((rows, columns), (tile, tile), "float64"),
            "sign": Spec((rows, columns), (tile, tile), "int8"),
            "tiles": Spec(across, (1, 1), "uint64"),
            "finished": Spec((1,), (1,), "uint64"),
        }
        if self.estimates:
            arrays["standard_error"] = arrays["similarity"]
        for side, count in self.sides.items():
            arrays[f"blocks_{side}"] = Spec((self._blocks(count),), (1,), "uint64")
            for name in self._norms(side):
                arrays[name] = Spec((count,), (tile,), "float64")
            if self.outputs is not None:
                chunk = (tile, self.outputs)
                for name in self._output_norms(side):
                    arrays[name] = Spec((count, self.outputs), chunk, "float64")
        if self.outputs is not None:
            chunk = (tile, tile, self.outputs)
            arrays["slices"] = Spec((rows, columns, self.outputs), chunk, "float64")
        return arrays

    def block(self, n: int) -> slice:
        """The models of a block."""
        return slice(n * self.tile, (n + 1) * self.tile)

    def norms(self, side: str) -> list[Record]:
        """The squared norms of one side, block by block."""
        names = (*self._norms(side), *self._output_norms(side))
        records = []
        for n in range(self._blocks(self.sides[side])):
            marker = f"blocks_{side}", (n,)
            regions = tuple((name, (self.block(n),)) for name in names)
            records.append(Record(f"norms {side} {n}", marker, regions, (n,)))
        return records

    def tiles(self) -> list[Record]:
        """All tiles; of one list those on and below the diagonal, which are mirrored."""
        tiles = []
        for i in range(self._blocks(self.rows)):
            across = i + 1 if self.columns is None else self._blocks(self.columns)
            tiles += [self._tile(i, j) for j in range(across)]
        return tiles

    def _tile(self, i: int, j: int) -> Record:
        places = [(self.block(i), self.block(j))]
        if self.columns is None and i != j:
            places.append((self.block(j), self.block(i)))
        regions = tuple(itertools.product(self.variables, places))
        return Record(f"tile {i} {j}", ("tiles", (i, j)), regions, (i, j))

    @property
    def end(self) -> Record:
        """The end of the run: all other markers, so that a lost one is noticed."""
        markers = ("tiles", *(f"blocks_{side}" for side in self.sides))
        regions = tuple((name, (slice(None),)) for name in markers)
        return Record("end", ("finished", (0,)), regions)

    @property
    def records(self) -> list[Record]:
        """Everything that a finished run holds."""
        norms = itertools.chain.from_iterable(self.norms(side) for side in self.sides)
        return [*norms, *self.tiles(), self.end]

    def _norms(self, side: str) -> tuple[str, ...]:
        """Squared norms of models, and the sizes of the sums that they are."""
        return f"log_norm_{side}", f"log_norm_size_{side}"

    def _output_norms(self, side: str) -> tuple[str, ...]:
        """The same of every output, where there are slices."""
        if self.outputs is None:
            return ()
        return f"log_norms_{side}", f"log_norms_size_{side}"

    def _blocks(self, models: int) -> int:
        return math.ceil(models / self.tile)


FORMAT = 3


FILE = "zarr.json"  # of the root and of every array


# what must be equal for a store to be continued, and in which words a difference is told
IDENTITY = ("format", "metric", "metric_parameters", "dtype", "slices", "hash_a", "hash_b")


_CHOSEN = ("route", "tile")  # by whoever began the store


_UNREADABLE = (OSError, ValueError, RecursionError)


def digest(value: Any) -> str:
    """Of anything that JSON can hold, 32 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def binding(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What every array of a run's store says: whose it is, by digest, and what the run chose."""
    chosen = {name: attrs[name] for name in _CHOSEN}
    return {"run": digest([attrs[name] for name in (*IDENTITY, *_CHOSEN)]), **chosen}


def root(attrs: Mapping[str, Any], folder: Path, arrays: Iterable[str]) -> dict[str, Any]:
    """The attributes of the root of a store whose arrays are in `folder`."""
    files = {name: _file_digest(folder / name / FILE) for name in arrays}
    return {"tnsim": dict(attrs), "arrays": files, "digest": digest([dict(attrs), files])}


def attributes(path: Path) -> dict[str, Any]:
    """The verified attributes of the run in a store.

    Raises:
        StoreMismatch: There is no store, or one of another format.
        DamagedStore: There is one, but its attributes are not those that were written.
    """
    try:
        data = json.loads(_read(path / FILE))
        attrs = data["attributes"]["tnsim"]
        theirs = attrs["format"]
    except (*_UNREADABLE, KeyError, TypeError) as error:
        if _bound(path) is not None:
            raise _damaged(path, "its attributes") from None
        raise StoreMismatch(
            f"{path}: not a store of tnsim.pairwise ({type(error).__name__}: {error}); "
            "give the path of one, or of nothing"
        ) from None
    if theirs != FORMAT:
        raise _other_run(path, _differs("format", theirs, FORMAT))
    found = data["attributes"]
    whole = found.get("digest") == digest([attrs, found.get("arrays")])
    if not whole or (data.get("zarr_format"), data.get("node_type")) != (3, "group"):
        raise _damaged(path, "its attributes")
    return attrs


def damaged_arrays(path: Path) -> list[str]:
    """Arrays whose metadata are not those that were written, where the attributes are verified."""
    files = json.loads(_read(path / FILE))["attributes"]["arrays"]
    return [name for name, known in files.items() if _file_digest(path / name / FILE) != known]


def of_the_same_run(path: Path, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a store that lost them, if it belongs to the run of `attrs`.

    Raises `DamagedStore` where nothing shows that it does.
    """
    bound = _bound(path) or {}
    attrs = {**attrs, **{name: bound.get(name) for name in _CHOSEN}}
    if bound != binding(attrs):
        raise _damaged(path, "its attributes")
    return attrs


def restore(path: Path, fresh: Path) -> None:
    """Put the metadata of a new store in the place of an old one's; its numbers stay."""
    for file in fresh.rglob(FILE):
        target = path / file.relative_to(fresh)
        for place, is_wanted in ((target.parent, Path.is_dir), (target, Path.is_file)):
            if os.path.lexists(place) and not is_wanted(place):
                remove(place)
        target.parent.mkdir(exist_ok=True)
        file.replace(target)


def check(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise `StoreMismatch`, naming the difference, unless `theirs` are those of the run `ours`."""
    for name in IDENTITY:
        if theirs[name] == ours[name]:
            continue
        if name.startswith("hash_"):
            raise _other_run(path, _other_models(name[-1], theirs, ours))
        raise _other_run(path, _differs(name, theirs[name], ours[name]))


def _bound(path: Path) -> dict[str, Any] | None:
    """What the first readable array of a store says about its run, None where nothing does."""
    for file in sorted(path.glob(f"*/{FILE}")):
        try:
            bound = json.loads(_read(file))["attributes"]["tnsim"]
        except (*_UNREADABLE, KeyError, TypeError):
            continue
        if isinstance(bound, dict):
            return bound
    return None


def _read(file: Path) -> bytes:
    """The bytes of a file. Raises `OSError` for anything else: a pipe would never end."""
    with regular(file) as opened:
        return opened.read()


def _file_digest(file: Path) -> str | None:
    try:
        return hashlib.blake2b(_read(file), digest_size=16).hexdigest()
    except OSError:
        return None


def _damaged(path: Path, what: str) -> DamagedStore:
    return DamagedStore(
        f"{path}: damaged: {what} are not those that were written; "
        "run again with this store to restore it, or remove it"
    )


def _other_run(path: Path, what: str) -> StoreMismatch:
    return StoreMismatch(f"{path}: holds another run: {what}; give another path, or remove it")


def _differs(name: str, theirs: Any, ours: Any) -> str:
    return f"{name} {json.dumps(theirs)}, and {json.dumps(ours)} is asked for"


def _other_models(side: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How the models of one side differ, in words."""
    stored, given = theirs[f"hash_{side}"], ours[f"hash_{side}"]
    if stored is None:
        return "all pairs of one list"
    if given is None:
        return "models against others, and no others are given"
    if len(stored) != len(given):
        return f"{len(stored)} models on side {side}, and {len(given)} are given"
    pairs = zip(stored, given, strict=True)
    first = next(n for n, (one, other) in enumerate(pairs) if one != other)
    label = ours[f"labels_{side}"][first]
    return f"other weights for {label} (side {side}, number {first})"


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
                attributes={"tnsim": binding(attrs)},
            )
        group.attrs.put(root(attrs, folder, arrays))
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


LOG = "computed.log"


_SHOWN = 5  # labels that a message names


class State(Enum):
    """What a store has of a record."""

    MISSING = 0
    WHOLE = 1
    DAMAGED = 2


@dataclass(frozen=True)
class Store:
    """The arrays of a run in memory and, where there is a disk, the same there.

    Args:
        attrs: What the run is, as `preparation` describes it.
        layout: Which arrays and records it has.
        arrays: What this process has computed, or has read and verified; all else is NaN.
        disk: The arrays on disk; None for a run in memory.
        damaged: What was damaged when the store was opened.
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
        """Where it is on disk."""
        return None if self.disk is None else self.disk.path

    def fetch(self, record: Record) -> State:
        """Take a record from the disk into `arrays`, if it is whole there or was taken before."""
        if record.label in self.known:
            return State.WHOLE
        if self.disk is None:
            return State.MISSING
        try:
            # The marker first: what another process writes meanwhile looks missing, not damaged
            marker = int(self.disk.read(*record.marker))
            if marker == 0:
                return State.MISSING
            values = [self.disk.read(*region) for region in record.regions]
        except Exception:  # whatever a decoder says of damaged bytes
            return State.DAMAGED
        if marker != self._digest(record, values):
            return State.DAMAGED
        self._keep(record, values, marker)
        return State.WHOLE

    def write(self, record: Record, values: Sequence[np.ndarray]) -> None:
        """Keep the numbers of a record, one array for each of its regions, and then its marker."""
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
        """Mark the end of the run, and remove what killed processes left."""
        end = self.layout.end
        if self.fetch(end) is not State.WHOLE:
            self._mark(end, [self.arrays[name] for name, _ in end.regions])
        if self.path is not None:
            sweep(self.path)

    def _mark(self, record: Record, values: Sequence[np.ndarray]) -> None:
        """Keep a record whose numbers are on disk, and write its marker there."""
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
        """Of a record's numbers, place and run: 64 bits, never the zero of what is missing."""
        run = binding(self.attrs)["run"]
        state = hashlib.blake2b(f"{run} {record.label}".encode(), digest_size=8)
        for value in values:
            state.update(f"{value.dtype.name}{value.shape}".encode())
            state.update(np.ascontiguousarray(value).tobytes())
        return int.from_bytes(state.digest(), "little") or 1


def folder(path: str | os.PathLike[str]) -> Path:
    """The path of a store.

    Raises:
        StoreMismatch: It is an address, as a path a folder `s3:` here, or no path of a file system.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(path)):
        raise StoreMismatch(
            f"{path}: a store is a folder on a disk, and this is an address; "
            "give the path of a folder, and copy it where you want it when the run is done"
        )
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # told where it is written or read
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
    """The store at `path` for the run that `attrs` describe: new, or the one that is there.

    Metadata that are damaged are written again where they belong to this run; what is damaged of
    the numbers counts as not computed. Both are named in `damaged`.

    Raises:
        StoreMismatch: There is another run, or something else.
        DamagedStore: Attributes are damaged, and nothing shows that the store is of this run.
    """
    damaged = []
    if not path.exists():
        create(path, attrs)
    try:
        theirs = attributes(path)
    except DamagedStore:
        theirs, damaged = of_the_same_run(path, attrs), ["attributes"]
    check(path, theirs, attrs)
    if not damaged:
        damaged = [f"metadata of {name}" for name in damaged_arrays(path)]
    if damaged:
        with writing(path), fresh(path, theirs) as new:
            restore(path, new)
    store = _on_disk(path, theirs)
    return dataclasses.replace(store, damaged=(*damaged, *_load(store)[State.DAMAGED]))


def read(path: Path) -> tuple[Store, list[str]]:
    """A store as it is on disk, and the labels of the norms and tiles that are missing.

    Raises:
        StoreMismatch: There is no store.
        DamagedStore: Something in it is not what was written.
    """
    attrs = attributes(path)
    _refuse(path, [f"metadata of {name}" for name in damaged_arrays(path)])
    store = _on_disk(path, attrs)
    records = _load(store)
    _refuse(path, records[State.DAMAGED])
    return store, [label for label in records[State.MISSING] if label != store.layout.end.label]


def log_start(store: Store, what: str) -> None:
    """A line about what is computed now, for whoever wants to know which process computed what."""
    if store.path is not None:
        log = store.path / LOG
        with writing(store.path), appending(log) as out:
            out.write(f"{platform.node()} {os.getpid()} {what}\n".encode())


def listed(labels: Sequence[str]) -> str:
    """The first few labels, and how many more there are."""
    shown = ", ".join(labels[:_SHOWN])
    return shown if len(labels) <= _SHOWN else f"{shown} and {len(labels) - _SHOWN} more"


def _load(store: Store) -> dict[State, list[str]]:
    """Fetch every record; the labels of what is there, missing and damaged.

    Where the end of the run is marked, nothing was missing, so what is missing now was lost. The
    end is looked for first: another process may mark it while the records are read.
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
