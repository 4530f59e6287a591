"""Results record by record, in memory and in a zarr store. In: numbers. Out: what is finished.

A store is a zarr group with one chunk per tile. A chunk is written to a temporary name and
renamed, and the marker of a record, a digest of all of its numbers, is written after them. So a
process may be killed, or a disk be full, at any instant; and nothing is taken from a store,
neither to go on nor to be shown, whose digest is not that of its marker: a chunk that was
changed, cut, lost or exchanged is as good as none.

Processes may share a store without locks, see `claims`; a record computed twice is written twice
with the same numbers, each chunk atomically.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.errors import DamagedStore, MissingExtra, StoreMismatch, TnsimError
from tnsim.gram import store_metadata as metadata
from tnsim.gram.layout import Layout, Record, Spec

LOG = "computed.log"
_SHOWN = 5  # labels that a message names


class State(Enum):
    """What a store has of a record."""

    MISSING = 0
    WHOLE = 1
    DAMAGED = 2


@dataclass(frozen=True)
class _Disk:
    """The arrays of a store on disk: zarr's by name, and their specs."""

    path: Path
    arrays: Mapping[str, Any]
    specs: Mapping[str, Spec]

    def read(self, name: str, at: tuple) -> np.ndarray:
        """Numbers as they are there, true or not."""
        return np.asarray(self.arrays[name][at])

    def write(self, name: str, at: tuple, value: Any) -> None:
        """Write one chunk.

        Of a chunk that reaches beyond the array zarr reads the old numbers first. Where they cannot
        be read the chunk is removed, and written anew.
        """
        try:
            self.arrays[name][at] = value
        except OSError:
            raise
        except Exception:
            chunk = _chunk_of(at, self.specs[name])
            self.path.joinpath(name, "c", *map(str, chunk)).unlink(missing_ok=True)
            self.arrays[name][at] = value


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
    disk: _Disk | None = None
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
        values = typed
        marker = self._digest(record, values)
        self._keep(record, values, marker)
        if self.disk is None:
            return
        with writing(self.path):
            for region, value in zip(record.regions, values, strict=True):
                self.disk.write(*region, value)
            self.disk.write(*record.marker, np.uint64(marker))

    def finish(self) -> None:
        """Mark the end of the run."""
        end = self.layout.end
        if self.fetch(end) is not State.WHOLE:
            self.write(end, [self.arrays[name] for name, _ in end.regions])

    def _keep(self, record: Record, values: Sequence[np.ndarray], marker: int) -> None:
        for (region, at), value in zip(record.regions, values, strict=True):
            self.arrays[region][at] = value
        name, place = record.marker
        self.arrays[name][place] = marker
        self.known.add(record.label)

    def _digest(self, record: Record, values: Sequence[np.ndarray]) -> int:
        """Of a record's numbers, place and run: 64 bits, never the zero of what is missing."""
        run = metadata.binding(self.attrs)["run"]
        state = hashlib.blake2b(f"{run} {record.label}".encode(), digest_size=8)
        for value in values:
            state.update(f"{value.dtype.name}{value.shape}".encode())
            state.update(np.ascontiguousarray(value).tobytes())
        return int.from_bytes(state.digest(), "little") or 1


def folder(path: str | os.PathLike[str]) -> Path:
    """The path of a store. Raises `StoreMismatch` for an address, as a path a folder `s3:` here."""
    if re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(path)):
        raise StoreMismatch(
            f"{path}: a store is a folder on a disk, and this is an address; "
            "give the path of a folder, and copy it where you want it when the run is done"
        )
    return Path(path)


def in_memory(attrs: Mapping[str, Any]) -> Store:
    """A store that lives as long as the result."""
    layout = Layout.of(attrs)
    return Store(attrs, layout, _empty(layout))


def opened(path: Path, attrs: Mapping[str, Any]) -> Store:
    """The store at `path` for the run that `attrs` describe: new, or the one that is there.

    Metadata that are damaged are written again where they belong to this run; what is damaged of
    the numbers counts as not computed. Both are named in `damaged`.

    Raises:
        StoreMismatch: there is another run, or something else.
        DamagedStore: attributes are damaged, and nothing shows that the store is of this run.
    """
    damaged = []
    if not path.exists():
        _create(path, attrs)
    try:
        theirs = metadata.attributes(path)
    except DamagedStore:
        theirs, damaged = metadata.of_the_same_run(path, attrs), ["attributes"]
    metadata.check(path, theirs, attrs)
    if not damaged:
        damaged = [f"metadata of {name}" for name in metadata.damaged_arrays(path)]
    if damaged:
        with writing(path), _fresh(path, theirs) as fresh:
            metadata.restore(path, fresh)
    store = _on_disk(path, theirs, "r+")
    return dataclasses.replace(store, damaged=(*damaged, *_load(store)[State.DAMAGED]))


def read(path: Path) -> tuple[Store, list[str]]:
    """A store as it is on disk, and the labels of the norms and tiles that are missing.

    Raises:
        StoreMismatch: there is no store.
        DamagedStore: something in it is not what was written.
    """
    _zarr()
    attrs = metadata.attributes(path)
    _refuse(path, [f"metadata of {name}" for name in metadata.damaged_arrays(path)])
    store = _on_disk(path, attrs, "r")
    records = _load(store)
    _refuse(path, records[State.DAMAGED])
    return store, [label for label in records[State.MISSING] if label != store.layout.end.label]


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


def log_start(store: Store, what: str) -> None:
    """A line about what is computed now, for whoever wants to know which process computed what."""
    if store.path is not None:
        with writing(store.path), (store.path / LOG).open("a") as out:
            out.write(f"{platform.node()} {os.getpid()} {what}\n")


def listed(labels: Sequence[str]) -> str:
    """The first few labels, and how many more there are."""
    shown = ", ".join(labels[:_SHOWN])
    return shown if len(labels) <= _SHOWN else f"{shown} and {len(labels) - _SHOWN} more"


def _load(store: Store) -> dict[State, list[str]]:
    """Fetch every record; the labels of what is there, missing and damaged.

    Where the end of the run is marked, nothing was missing, so what is missing now was lost.
    """
    labels: dict[State, list[str]] = {state: [] for state in State}
    for record in store.layout.records:
        labels[store.fetch(record)].append(record.label)
    end = store.layout.end.label
    if end not in labels[State.MISSING]:
        labels[State.DAMAGED] += labels[State.MISSING]
        labels[State.MISSING] = []
    return labels


def _refuse(path: Path, damaged: Sequence[str]) -> None:
    if damaged:
        raise DamagedStore(
            f"{path}: damaged: {listed(damaged)}; run pairwise again with this store to compute "
            "again what was lost, or remove it"
        )


def _create(path: Path, attrs: Mapping[str, Any]) -> None:
    """A new store as a whole or not at all; the one of another process, if that was quicker."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _fresh(path, attrs) as fresh:
                fresh.rename(path)
        except OSError:
            if not path.exists():
                raise


@contextlib.contextmanager
def _fresh(path: Path, attrs: Mapping[str, Any]) -> Iterator[Path]:
    """An empty store in a folder of its own beside `path`; what is not moved away is removed."""
    zarr = _zarr()
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


def _on_disk(path: Path, attrs: Mapping[str, Any], mode: str) -> Store:
    layout = Layout.of(attrs)
    group = _zarr().open_group(path, mode=mode, zarr_format=3)
    arrays = {name: group[name] for name in layout.arrays}
    return Store(attrs, layout, _empty(layout), _Disk(path, arrays, layout.arrays))


def _empty(layout: Layout) -> dict[str, np.ndarray]:
    arrays = layout.arrays
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


def _chunk_of(at: tuple, spec: Spec) -> list[int]:
    """The number of the chunk that begins at a place."""
    starts = [place.start if isinstance(place, slice) else place for place in at]
    starts += [0] * (len(spec.shape) - len(starts))
    return [start // size for start, size in zip(starts, spec.chunks, strict=True)]


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise MissingExtra("zarr", "pairwise", "a store of results") from None
    return zarr
