"""Leases of records, by which the processes that share a store divide its work.

A lease is a file that only one process can create. It says who made it, and its maker touches it
again and again while it lives. A lease never blocks other processes for long. It is taken over when
its maker is a process of this host that is gone, or when the file has not been touched for `EXPIRY`
seconds by the watcher's own clock (clocks of two hosts are never compared). Should two processes
hold one lease after all, both compute the same numbers.

A *maker* is a process of a host. Makers are written into leases and into the names of unfinished
files, so that the leftovers of a killed process are told from the work of a living one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import threading
import time
import uuid
from functools import cache
from pathlib import Path
from types import TracebackType

from tnsim.files import regular

EXPIRY = 30.0  # seconds without a sign of life after which a lease is taken over
_RENEWAL = 5.0  # seconds between two signs of life; EXPIRY allows several to be late
_PAUSE = 0.02  # seconds between two looks at a list that another process writes
FOLDER = "leases"
LISTS = "lists"
"""Label of the lease under which the lists of a store are read and written again."""


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
