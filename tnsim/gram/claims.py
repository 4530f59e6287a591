"""Who computes what in a shared store. In: a folder, labels of records. Out: may we begin one.

A claim is a file that only one process can create. It says who made it, and is touched again and
again while its maker lives. A claim never blocks anyone for long: it is taken over when its maker
is a process of this host that is gone, or when it has not been touched for `EXPIRY` seconds by
the watcher's own clock (clocks of two hosts are never compared). Should two processes hold one
claim after all, both compute the same numbers.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType

from tnsim.files import regular

EXPIRY = 30.0  # seconds without a sign of life after which a claim is taken over
_RENEWAL = 5.0  # seconds between two signs of life
_FOLDER = "claims"


class Claims:
    """The claims of one run in the store at `path`; without a path there is nobody to share with.

    Example: `with Claims(path) as claims: claims.take("tile 0 0")`. At the end all that are held
    are given back.
    """

    def __init__(self, path: Path | None) -> None:
        self._folder = None if path is None else path / _FOLDER
        self._text = f"{platform.node()} {os.getpid()} {uuid.uuid4().hex}"
        self._held: set[Path] = set()
        self._last_signs: dict[Path, tuple[int, float]] = {}
        self._stopped = threading.Event()

    def __enter__(self) -> Claims:
        if self._folder is not None:
            threading.Thread(target=self._renew, daemon=True, name="tnsim-claims").start()
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
        if self._folder is not None and kind is None:  # all is finished, so no claim means anything
            shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, label: str) -> bool:
        """Whether this process may compute the record of that label; if not, another is at it."""
        if self._folder is None:
            return True
        file = self._folder / label.replace(" ", "-")
        while not self._create(file):
            if not self._is_abandoned(file):
                return False
            _remove(file)
        self._held.add(file)
        return True

    def release(self, label: str) -> None:
        """Give a claim back, once the record is in the store."""
        if self._folder is not None:
            self._give_back(self._folder / label.replace(" ", "-"))

    def _create(self, file: Path) -> bool:
        while True:
            if file.parent.exists() and not file.parent.is_dir():
                _remove(file.parent)
            file.parent.mkdir(exist_ok=True)
            try:
                with file.open("x") as out:
                    out.write(self._text)
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue  # whoever finished the run removed the folder in between
            return True

    def _is_abandoned(self, file: Path) -> bool:
        try:
            with regular(file) as claim:
                maker = claim.read(2**10).decode(errors="replace").split()
                sign = os.fstat(claim.fileno()).st_mtime_ns
        except PermissionError:
            return False  # as of another user, whose process may live
        except OSError:
            return True  # given back meanwhile, or no claim of anybody: a pipe, a folder
        if len(maker) == 3 and maker[0] == platform.node() and _is_gone(maker[1]):
            return True
        known, since = self._last_signs.get(file, (None, 0.0))
        if sign != known:
            self._last_signs[file] = (sign, time.monotonic())
            return False
        return time.monotonic() - since > EXPIRY

    def _give_back(self, file: Path) -> None:
        self._held.discard(file)
        try:
            with regular(file) as claim:
                is_own = claim.read() == self._text.encode()  # it may have been taken over
            if is_own:
                file.unlink()
        except OSError:
            pass

    def _renew(self) -> None:
        while not self._stopped.wait(_RENEWAL):
            for file in tuple(self._held):
                try:
                    os.utime(file)
                except OSError:
                    continue


def _remove(path: Path) -> None:
    """Remove what stands in the place of a claim."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_gone(pid: str) -> bool:
    """Whether no process of this host has that number; False where that cannot be asked."""
    if os.name != "posix" or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
