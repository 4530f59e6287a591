"""Results record by record, in memory and in a zarr store. In: numbers. Out: what is finished.

A store is a zarr group with one chunk per tile, see `zarr_files`. A chunk is written to a temporary
name and renamed, and the marker of a record, a digest of all of its numbers, is written after them.
So a process may be killed, or a disk be full, at any instant; and nothing is taken from a store,
neither to go on nor to be shown, whose digest is not that of its marker: a chunk that was
changed, cut, lost or exchanged is as good as none.

Processes may share a store without locks, see `claims`; a record computed twice is written twice
with the same numbers, each chunk atomically.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.checkpoints.guard import cause
from tnsim.errors import DamagedStore, StoreMismatch, printable
from tnsim.files import appending
from tnsim.gram import store_metadata as metadata
from tnsim.gram import zarr_files
from tnsim.gram.layout import Layout, Record
from tnsim.gram.zarr_files import Disk

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
            with zarr_files.writing(self.path):
                for region, value in zip(record.regions, typed, strict=True):
                    self.disk.write(*region, value)
        self._mark(record, typed)

    def finish(self) -> None:
        """Mark the end of the run, and remove what killed processes left."""
        end = self.layout.end
        if self.fetch(end) is not State.WHOLE:
            self._mark(end, [self.arrays[name] for name, _ in end.regions])
        if self.path is not None:
            zarr_files.sweep(self.path)

    def _mark(self, record: Record, values: Sequence[np.ndarray]) -> None:
        """Keep a record whose numbers are on disk, and write its marker there."""
        marker = self._digest(record, values)
        self._keep(record, values, marker)
        if self.disk is not None:
            with zarr_files.writing(self.path):
                self.disk.write(*record.marker, np.uint64(marker))

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
    return Store(attrs, layout, zarr_files.empty(layout.arrays))


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
        zarr_files.create(path, attrs)
    try:
        theirs = metadata.attributes(path)
    except DamagedStore:
        theirs, damaged = metadata.of_the_same_run(path, attrs), ["attributes"]
    metadata.check(path, theirs, attrs)
    if not damaged:
        damaged = [f"metadata of {name}" for name in metadata.damaged_arrays(path)]
    if damaged:
        with zarr_files.writing(path), zarr_files.fresh(path, theirs) as new:
            metadata.restore(path, new)
    store = _on_disk(path, theirs)
    return dataclasses.replace(store, damaged=(*damaged, *_load(store)[State.DAMAGED]))


def read(path: Path) -> tuple[Store, list[str]]:
    """A store as it is on disk, and the labels of the norms and tiles that are missing.

    Raises:
        StoreMismatch: There is no store.
        DamagedStore: Something in it is not what was written.
    """
    attrs = metadata.attributes(path)
    _refuse(path, [f"metadata of {name}" for name in metadata.damaged_arrays(path)])
    store = _on_disk(path, attrs)
    records = _load(store)
    _refuse(path, records[State.DAMAGED])
    return store, [label for label in records[State.MISSING] if label != store.layout.end.label]


def log_start(store: Store, what: str) -> None:
    """A line about what is computed now, for whoever wants to know which process computed what."""
    if store.path is not None:
        log = store.path / LOG
        with zarr_files.writing(store.path), appending(log) as out:
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
    arrays = zarr_files.empty(layout.arrays)
    return Store(attrs, layout, arrays, Disk(path, layout.arrays))
