"""The records of a run, in memory and in the folder of a store, and who makes them.

*Records.* The numbers of a run come in records: the squared norms of a block of models, and the
tile of one block of models against another. A store has one file for each,

    run.json               what all its numbers have in common: metric, precision, slices
    models.json            the models compared so far, and how their pairs were planned
    finished.json          the same list, once all of its records are there
    records/DIGEST.npz     the arrays of a record, and its key
    computed.log           a line for every record that a process began to compute

The *key* of a record says which numbers it has: those of `run.json`, the part of a network, and the
digests of the models of its rows and columns. The digest of the key names the file. So a record is
found without a list of records, and what a run has to compute is what it needs and does not find,
whether it goes on where it was killed, gets further models, or shares the store with others.

*Damage.* A file is taken as it was written or not at all: a zip archive has a checksum for each
array, and the key inside is compared with the key that is looked for, so that a file in the place
of another is noticed; lists carry a digest of their content. What is damaged is told, and computed
again. Of `run.json` and `models.json` the other lists have copies. Where a run is finished, a
record that is missing was lost.

*Processes.* A file is written under another name and renamed, so that no process reads half of one
and a killed process leaves none. The other name says which process made it, so that `sweep` removes
the leftovers of killed processes alone. Processes that write one record write the same numbers.
Links are never followed inside a store, so that nothing is written outside of it.

Runs over parts of networks share a folder: lists are named by the part, records have it in the key.

*Leases* divide the work among the processes that share a store. A lease is a file that only one
process can create. It says who made it, and its maker touches it again and again while it lives. A
lease never blocks other processes for long. It is taken over when its maker is a process of this
host that is gone, or when the file has not been touched for `EXPIRY` seconds by the watcher's own
clock (clocks of two hosts are never compared). Should two processes hold one lease after all, both
compute the same numbers.

A *maker* is a process of a host. Makers are written into leases and into the names of unfinished
files, so that the leftovers of a killed process are told from the work of a living one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from tnsim.errors import DamagedStore, StoreMismatch, TnsimError, cause, printable
from tnsim.files import appending, regular

EXPIRY = 30.0  # seconds without a sign of life after which a lease is taken over
_RENEWAL = 5.0  # seconds between two signs of life; EXPIRY allows several to be late
_PAUSE = 0.02  # seconds between two looks at a list that another process writes
FOLDER = "leases"
LISTS = "lists"
"""Label of the lease under which the lists of a store are read and written again."""


FORMAT = 13
"""Version of the layout, and of what its numbers mean: another one also where tnsim computes other
numbers for equal models, as by a mended fault. A store of another version is refused."""
# Attributes that must be equal for a store to be continued; error messages name them.
IDENTITY = ("format", "metric", "metric_parameters", "dtype", "slices", "centred", "parts")
RUN, MODELS, FINISHED = "run", "models", "finished"
"""Kinds of lists, by which their files are named."""
RECORDS = "records"
LOG = "computed.log"
WITHIN_RESULTS = ("store", "parts")
"""Names of the store, of whole models and of parts, in the folder where the command writes."""
Form = tuple[tuple[int, ...], str]
"""Shape and dtype of an array of a record."""
_OLDER = ("zarr.json", "parts.json")  # files of the layouts up to version 5
_PARTIAL = ".partial"  # suffix of an unfinished file
_ABANDONED = 24 * 3600.0
"""Seconds after which an unfinished file of another host counts as abandoned: writing a record
takes less than a second, and clocks of two hosts differ by less than a day."""
_SHOWN = 5  # most labels that a message names


class Leases:
    """The leases of a process in the store at `path`; without a path every lease is granted.

    Example: `with Leases(path) as leases: leases.take("tile 0 0")`. On leaving the block, all
    leases that are still held are given back.
    """

    def __init__(self, path: Path | None) -> None:
        self._folder = None if path is None else path / FOLDER
        self._text = " ".join(maker())
        self._held: set[Path] = set()
        self._last_signs: dict[Path, tuple[int, float]] = {}
        self._stopped = threading.Event()

    def __enter__(self) -> Leases:
        if self._folder is not None:
            threading.Thread(target=self._renew, daemon=True, name="tnsim-leases").start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        for file in tuple(self._held):
            self._give_back(file)
        if self._folder is not None and kind is None:
            # Leases of other processes stay, and with them the folder.
            with contextlib.suppress(OSError):
                for file in self._folder.iterdir():
                    if self._is_abandoned(file):
                        remove(file)
                self._folder.rmdir()

    def take(self, label: str) -> bool:
        """Whether this process may compute the record; if not, another process is computing it."""
        if self._folder is None:
            return True
        file = self._folder / _name(label)
        while not self._create(file):
            if not self._is_abandoned(file):
                return False
            # Several processes may come to this point at once. One of them creates the file in the
            # next turn of the loop, and the others find it there.
            with contextlib.suppress(FileNotFoundError):
                remove(file)
        self._held.add(file)
        return True

    def wait(self, label: str) -> None:
        """Take the lease of a list as soon as no other process has it."""
        while not self.take(label):
            time.sleep(_PAUSE)

    def release(self, label: str) -> None:
        """Give a lease back once the record is in the store."""
        if self._folder is not None:
            self._give_back(self._folder / _name(label))

    def _create(self, file: Path) -> bool:
        while True:
            try:
                # Mode x creates the file or fails, in one step of the file system.
                with file.open("x") as out:
                    out.write(self._text)
            except FileExistsError:
                return False
            except (FileNotFoundError, NotADirectoryError):
                make_folder(file.parent)  # no folder yet, or the process that finished removed it
            else:
                return True

    def _is_abandoned(self, file: Path) -> bool:
        try:
            with regular(file) as lease:
                words = lease.read(2**10).decode(errors="replace").split()
                sign = os.fstat(lease.fileno()).st_mtime_ns
        except PermissionError:
            return False  # a file of another user; the process of that user may live
        except OSError:
            return True  # given back meanwhile, or not made by tnsim
        if len(words) == 3 and words[0] == host() and is_gone(words[1]):
            return True
        known, since = self._last_signs.get(file, (None, 0.0))
        # The first look at this lease, or a sign of life since the last one: time is counted from
        # here, by the clock of this process alone.
        if sign != known:
            self._last_signs[file] = (sign, time.monotonic())
            return False
        return time.monotonic() - since > EXPIRY

    def _give_back(self, file: Path) -> None:
        try:
            if file.read_text() == self._text:  # another process may have taken the lease over
                file.unlink()
        except FileNotFoundError:
            pass
        except (OSError, ValueError):
            return  # tried again at the end
        self._held.discard(file)

    def _renew(self) -> None:
        while not self._stopped.wait(_RENEWAL):
            for file in tuple(self._held):
                try:
                    os.utime(file)
                # Given back or taken over meanwhile, which `_give_back` finds out.
                except OSError:
                    continue


@cache
def host() -> str:
    """Digest of this machine, its boot and its namespace of process numbers, 16 digits.

    Containers may share the name of a machine and number their processes separately, so a name
    alone does not say to which namespace a process number belongs.
    """
    known = [platform.node()]
    with contextlib.suppress(OSError):  # only Linux has these two files
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return hashlib.blake2b(" ".join(known).encode(), digest_size=8).hexdigest()


def maker() -> tuple[str, str, str]:
    """The maker of a file: host, process number, and digits that no other file has."""
    return host(), str(os.getpid()), uuid.uuid4().hex


def remove(path: Path) -> None:
    """Remove a file, a link or an empty folder from the place of a store's file.

    Raises:
        OSError: The folder is not empty, or there is nothing to remove.
    """
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def _name(label: str) -> str:
    """The name of the file of a lease."""
    return label.replace(" ", "-").replace("/", "-")


def make_folder(folder: Path) -> None:
    """Make a folder of a store, in the place of whatever else stands there."""
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():  # a link to nowhere, a pipe or a file in its place
            # Other processes make and remove the folder meanwhile.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                folder.unlink()
            with contextlib.suppress(FileExistsError):
                folder.mkdir()


def is_gone(pid: str) -> bool:
    """Whether no process of this host has that number; False where the host cannot tell."""
    if os.name != "posix" or not pid.isdigit():
        return False
    try:
        # Signal 0 is not delivered: the call only tells whether the process exists.
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


class State(Enum):
    """The state of a file in a store."""

    MISSING = 0
    WHOLE = 1
    DAMAGED = 2


class Record(NamedTuple):
    """Numbers that are finished together.

    Attributes:
        label: Name of the record, in words.
        rows: Digests of the models of the rows.
        columns: Digests of the models of the columns; None for squared norms of the rows.
        side: List to which the models of squared norms belong, "a" or "b".
    """

    label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...] | None = None
    side: str = "a"


def digest(value: Any) -> str:
    """The digest of any value that JSON can hold, 32 hexadecimal digits."""
    # Sorted, so that mappings that are equal have equal digests, whatever their order.
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identity(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What all numbers of a store have in common, of the attributes of a run of any version."""
    return {name: attrs.get(name) for name in IDENTITY}


@dataclass(frozen=True)
class Store:
    """The arrays of a run in memory and, where there is a folder, its records on disk.

    Args:
        attrs: Attributes of the run, made by `preparation`.
        path: Folder of the store; None for a run in memory.
        part: Name of the part that is compared; None for whole models.
        places: Places of the distinct models of each side in the arrays.
        arrays: Numbers that this process has computed, or has read and verified; all else is NaN,
            or zero in arrays of integers.
        known: Labels of the records that are in `arrays`.
    """

    attrs: Mapping[str, Any]
    path: Path | None
    part: str | None
    places: Mapping[str, Mapping[str, int]]
    arrays: Mapping[str, np.ndarray]
    known: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, attrs: Mapping[str, Any], path: Path | None = None, part: str | None = None
    ) -> Store:
        """A store of which nothing is read yet.

        Args:
            attrs: Attributes of the run.
            path: Folder of the store; None for a run in memory.
            part: Name of the part that is compared; None for whole models.
        """
        places = {}
        for side in sides(attrs):
            distinct = dict.fromkeys(attrs[f"hash_{side}"])
            places[side] = {known: n for n, known in enumerate(distinct)}
        rows, columns = len(places["a"]), len(places.get("b", places["a"]))
        arrays = {}
        for name, (shape, dtype) in _tile(attrs, rows, columns).items():
            arrays[name] = np.full(shape, 0 if dtype == "int8" else np.nan, dtype)
        for side, models in places.items():
            for name, (shape, dtype) in _norms(attrs, len(models)).items():
                arrays[f"{name}_{side}"] = np.full(shape, np.nan, dtype)
        return cls(attrs, path, part, places, arrays)

    def at(self, side: str, models: Iterable[str]) -> np.ndarray:
        """The places of models in the arrays; a single list is both sides."""
        places = self.places.get(side, self.places["a"])
        return np.array([places[model] for model in models], int)

    def fetch(self, record: Record) -> State:
        """The state of a record; a whole record is copied from the disk into `arrays`.

        Raises:
            TnsimError: This user may not read it.
        """
        if record.label in self.known:
            return State.WHOLE
        if self.path is None:
            return State.MISSING
        key = self._key(record)
        try:
            with regular(self._file(key), follow=False) as file:
                content = file.read()
            values = _unpacked(content, key, self._forms(record))
        except FileNotFoundError:
            return State.MISSING
        except PermissionError as error:
            raise _unreadable(error) from None
        except Exception:  # damaged bytes may raise anything
            return State.DAMAGED
        self._keep(record, values)
        return State.WHOLE

    def write(self, record: Record, values: Mapping[str, np.ndarray]) -> None:
        """Write the arrays of a record, given by name.

        Raises:
            TnsimError: The store cannot be written.
        """
        typed = {}
        for name, (_, dtype) in self._forms(record).items():
            typed[name] = np.asarray(values[name], dtype)
        if self.path is not None:
            key = self._key(record)
            with writing(self.path):
                put(self._file(key), _packed(key, typed))
        self._keep(record, typed)

    def _keep(self, record: Record, values: Mapping[str, np.ndarray]) -> None:
        if record.columns is None:
            at = self.at(record.side, record.rows)
            for name, value in values.items():
                self.arrays[f"{name}_{record.side}"][at] = value
        else:
            rows, columns = self.at("a", record.rows), self.at("b", record.columns)
            for name, value in values.items():
                # Similarities are symmetric, so a tile of a single list is also its mirror image.
                if "b" not in self.places:
                    self.arrays[name][np.ix_(columns, rows)] = np.swapaxes(value, 0, 1)
                self.arrays[name][np.ix_(rows, columns)] = value
        self.known.add(record.label)

    def _key(self, record: Record) -> str:
        """The key of a record, as text."""
        key = {"run": identity(self.attrs), "part": self.part}
        return json.dumps({**key, "rows": record.rows, "columns": record.columns}, sort_keys=True)

    def _file(self, key: str) -> Path:
        assert self.path is not None
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self.path / RECORDS / f"{name}.npz"

    def _forms(self, record: Record) -> dict[str, Form]:
        """The shapes and dtypes of the arrays of a record, by name."""
        if record.columns is None:
            return _norms(self.attrs, len(record.rows))
        return _tile(self.attrs, len(record.rows), len(record.columns))


def sides(attrs: Mapping[str, Any]) -> str:
    """The sides of a run with lists of their own: "a", or "ab"."""
    return "a" if attrs["hash_b"] is None else "ab"


def _norms(attrs: Mapping[str, Any], models: int) -> dict[str, Form]:
    """Shapes and dtypes of squared norms, of their sizes, see `result`, and of their means."""
    forms: dict[str, Form] = {}
    for name in ("log_norm", "log_norm_size", "mean_share"):
        forms[name] = ((models,), "float64")
    if attrs["outputs"] is not None:
        for name in ("log_norms", "log_norms_size"):
            forms[name] = ((models, attrs["outputs"]), "float64")
    return forms


def _tile(attrs: Mapping[str, Any], rows: int, columns: int) -> dict[str, Form]:
    """Shapes and dtypes of the arrays with an entry for every pair."""
    pairs = rows, columns
    forms: dict[str, Form] = {"similarity": (pairs, "float64"), "log_inner": (pairs, "float64")}
    forms["sign"] = (pairs, "int8")
    if attrs["estimates"]:
        forms["standard_error"] = (pairs, "float64")
    if attrs["outputs"] is not None:
        forms["slices"] = ((*pairs, attrs["outputs"]), "float64")
    return forms


def _packed(key: str, values: Mapping[str, np.ndarray]) -> bytes:
    """The file of a record: its arrays and its key."""
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, key=np.frombuffer(key.encode(), np.uint8), **values)
    return out.getvalue()


def _unpacked(content: bytes, key: str, forms: Mapping[str, Form]) -> dict[str, np.ndarray]:
    """The arrays of a record. Raises anything where it is not the record with this key."""
    # An array of its form is read to its end, where the archive compares its checksum.
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        if archive["key"].tobytes() != key.encode():
            raise ValueError("the record of another key")
        values = {name: archive[name] for name in forms}
    for name, form in forms.items():
        if (values[name].shape, values[name].dtype.name) != form:
            raise ValueError(f"{name} has another form")
    return values


class Stated(NamedTuple):
    """What the lists of a store say.

    Attributes:
        run: What all numbers of the store have in common; None for a new store.
        attrs: Attributes of the run over the models compared so far; None where there are none.
        damaged: Names of the lists that are damaged or lost.
    """

    run: dict[str, Any] | None
    attrs: dict[str, Any] | None
    damaged: tuple[str, ...]


def list_file(path: Path, kind: str, part: str | None = None) -> Path:
    """The file of a list; those of models are named by the part that is compared."""
    name = kind if part is None or kind == RUN else f"{kind}-{part.replace(' ', '-')}"
    return path / f"{name}.json"


def stated(path: Path, part: str | None = None) -> Stated:
    """What the lists in the folder of a store say, damaged lists restored from their copies.

    Args:
        path: Folder of the store, which may be missing or empty.
        part: Name of the part that is compared; None for whole models.

    Raises:
        StoreMismatch: The folder holds something else, or a store of another format.
        DamagedStore: All lists of the store are lost.
    """
    # In the opposite order of writing: what another process writes meanwhile looks missing, and
    # never lost.
    last, second, first = (list_file(path, kind, part) for kind in (FINISHED, MODELS, RUN))
    (last_state, finished), (state, attrs), (run_state, run) = map(read_list, (last, second, first))
    copies = [found for found in (attrs, finished) if found is not None]
    lost = [first.name] if run_state is not State.WHOLE else []
    if run is None and copies:
        run = identity(copies[0])
    if run is not None and run["format"] != FORMAT:
        raise _another_version(path)
    if run is None:
        _check_new(path, run_state)
        return Stated(None, None, ())
    # A list of another store may have been put here.
    if state is State.DAMAGED or (attrs is not None and identity(attrs) != run):
        attrs = None
        lost.append(second.name)
    if last_state is State.DAMAGED or (finished is not None and identity(finished) != run):
        finished = None
        lost.append(last.name)
    if attrs is None and finished is not None:
        attrs = finished
        if state is State.MISSING:
            lost.append(second.name)
    return Stated(run, attrs, tuple(lost))


def _check_new(path: Path, run_state: State) -> None:
    """Refuse a folder that is neither a store nor new; `run_state` is the state of `run.json`."""
    if not os.path.lexists(path):
        return
    if any((path / name).exists() for name in _OLDER):
        raise _another_version(path)
    what = "not a store of tnsim.pairwise"
    try:
        # A process that was killed before it wrote the first list leaves these.
        names = [place.name for place in path.iterdir()]
        if all(name == FOLDER or name.endswith(_PARTIAL) for name in names):
            return
    except OSError as error:
        what += f" ({printable(cause(error), 300)})"
    if path.is_dir() and (run_state is State.DAMAGED or (path / RECORDS).is_dir()):
        raise DamagedStore(
            f"{path}: damaged: {RUN}.json; run pairwise again with this store, which restores it "
            "from the list of models, or where that is lost as well, remove it"
        )
    raise StoreMismatch(f"{path}: {what}; give the path of one, or of nothing")


def _another_version(path: Path) -> StoreMismatch:
    return StoreMismatch(
        f"{path}: a store of another version of tnsim, whose layout or numbers differ from those "
        "of this version; give another path, or remove it, and its pairs are computed again"
    )


def _unreadable(error: PermissionError) -> TnsimError:
    """The error of a file that this user may not read, which is no damage: others may read it."""
    return TnsimError(
        printable(
            f"{error.filename}: cannot be read: {error.strerror}; give a store that you may read"
        )
    )


def read_list(file: Path) -> tuple[State, dict[str, Any] | None]:
    """The state of a list, and its content where it is whole.

    Raises:
        TnsimError: This user may not read it.
    """
    try:
        with regular(file, follow=False) as opened:
            data = json.loads(opened.read())
        content = data["content"]
        # The name is sealed too: a list in the place of another one is no list. The format is
        # compared by the reader, since another format may have another digest.
        is_other = file.name == f"{RUN}.json" and content["format"] != FORMAT
        if is_other or data["digest"] == digest([file.name, content]):
            return State.WHOLE, content
    except FileNotFoundError:
        return State.MISSING, None
    except PermissionError as error:
        raise _unreadable(error) from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):  # of damaged JSON
        pass
    return State.DAMAGED, None


def write_list(file: Path, content: Mapping[str, Any]) -> None:
    """Write a list with a digest of its content. Raises `OSError` where that fails."""
    sealed = {"content": dict(content), "digest": digest([file.name, dict(content)])}
    put(file, json.dumps(sealed).encode())


def check(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise `StoreMismatch`, naming the difference, where two runs have other numbers in common.

    Args:
        path: Path of the store.
        theirs: Identity of the run in the store.
        ours: Attributes of the run that would fill it.
    """
    for name in IDENTITY:
        if theirs[name] != ours[name]:
            if name == "parts":
                texts = [_over(run[name]) for run in (theirs, ours)]
                raise other_run(path, f"it is over {texts[0]}, not over {texts[1]}")
            if name == "metric_parameters":  # digests, which tell a reader nothing
                raise other_run(
                    path,
                    f"{ours['metric']} has other parameters there, such as inputs, their length "
                    "or number, mean or covariance",
                )
            known, asked = (json.dumps(run[name]) for run in (theirs, ours))
            raise other_run(path, f"{name} {known}, and {asked} is asked for")


def check_models(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise `StoreMismatch`, naming the difference between stored and given models."""
    # First whether there are two lists at all.
    for side in "ab" if sides(theirs) == sides(ours) else "b":
        if theirs[f"hash_{side}"] != ours[f"hash_{side}"]:
            raise other_run(path, _other_models(side, theirs, ours))


def other_run(path: Path, what: str) -> StoreMismatch:
    """The error of a store that holds another run."""
    return StoreMismatch(f"{path}: holds another run: {what}; give another path, or remove it")


def _over(parts: Mapping[str, Any] | None) -> str:
    """What a run compares, in words."""
    if parts is None:
        return "whole models"
    kinds = ", ".join(dict.fromkeys(name[0] for name in parts["names"]))
    settings = f"distances {parts['distances']} and norm {parts['norm']!r}"
    return f"{len(parts['names'])} parts of kinds {kinds}, {settings}"


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
            place = f"{label} (side {side}, number {n})"
            if known.startswith("function"):  # which is told by its outputs
                return f"other outputs of {place}, or equal ones as another processor rounds them"
            return f"other weights for {place}"
        if known not in given:
            return f"a model {label} (side {side}, number {n}) that is not given"
    return f"its models on side {side} in another order"


def within_results(path: Path) -> Path:
    """The store in a folder of results, or the path itself where there is none in it."""
    # `os.path.exists` is False where the user may not look; `Path.exists` may raise there.
    if not os.path.exists(list_file(path, RUN)):
        for inside in (path / name for name in WITHIN_RESULTS):
            if os.path.exists(list_file(inside, RUN)):
                return inside
    return path


def folder(path: str | os.PathLike[str]) -> Path:
    """The path of a store.

    Raises:
        StoreMismatch: The path is empty, or an address, which would become a local folder such as
            `s3:`, or it is no path of a file system.
    """
    if not os.fspath(path):
        raise StoreMismatch("the path of a store is empty; '.' is the present folder")
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


def put(file: Path, content: bytes) -> None:
    """Write a file of a store, replacing whatever stands in its place.

    Raises:
        OSError: The file cannot be written, or its place holds a folder that is not empty.
    """
    # A name of its own for every writer, so that two processes that write one file do not meet.
    temporary = file.with_name(f".{'-'.join(maker())}{_PARTIAL}")
    try:
        make_folder(file.parent)
        temporary.write_bytes(content)
        try:
            os.replace(temporary, file)
        except IsADirectoryError:
            remove(file)
            os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def refuse_links(path: Path) -> None:
    """Raise `StoreMismatch` where a link in a store leads writing out of it."""
    # Other files are replaced by renaming, which replaces a link as well.
    for place in (path / RECORDS, path / FOLDER, path / LOG):
        if os.path.islink(place):  # noqa: PTH114  (False where this user may not look)
            raise StoreMismatch(
                f"{place}: is a link, through which a run would write outside of {path}; "
                "put what it points to in its place, or remove it, and run again"
            )


def sweep(path: Path) -> None:
    """Remove the unfinished files of killed processes, where this process may."""
    for parent in (path, path / RECORDS):
        for unfinished in parent.glob(f".*{_PARTIAL}"):  # none where the folder vanished meanwhile
            if _is_left(unfinished):
                with contextlib.suppress(OSError):  # gone by now, or read-only, as a finished store
                    unfinished.unlink()


def _is_left(file: Path) -> bool:
    """Whether the process that the name of an unfinished file names as its maker is gone."""
    # The name is the maker: host, process number and a random number.
    words = file.name.removesuffix(_PARTIAL).lstrip(".").split("-")
    if len(words) == 3 and words[0] == host():
        return is_gone(words[1])
    try:
        # Of another host nobody knows whether its process lives; only age tells.
        return time.time() - file.stat().st_mtime > _ABANDONED
    except FileNotFoundError:
        return False


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
