"""Compiled programs on disk. In: what tells a program from others. Out: the program, or None.

A file holds machine code, which no check makes safe: whoever can write it runs code in the process
that reads it. So programs are only read from a folder that is the user's and nobody else may enter
(mode 0700), and only files of the user's; a folder that is anything else is neither read nor
written to. The name of a file tells all that the code depends on: the piece, the code of this
folder, the versions of JAX and XLA, the device and, on a CPU, the instructions that it knows. The
digest in front of the content is that of the name's text and of the content, so that it tells
damage as well as a file that stands under the name of another: a program of equal shapes would
answer with the number of another piece. Whatever is wrong with a file, the program is compiled
again and the file replaced.

`TNSIM_PROGRAM_CACHE=off` switches this off. JAX's own compilation cache is another thing and is
left as the caller has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import stat
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from tnsim.engine.cache import cache_folder, digest, own_bytes, put

MAX_BYTES = 2**28  # of one file; the longest programs take 2**24
LIMIT = 2**30  # bytes of all files together
_DIGEST = hashlib.sha256


class Files(NamedTuple):
    """The programs of one device, made with one set of settings. `folder` is None for none."""

    folder: Path | None
    device: Any
    made_with: tuple[str, ...]

    @classmethod
    def here(cls, device: Any, settings: tuple) -> Files:
        """Programs for a device, with all that they depend on beside their own key.

        Args:
            device: The one that they run on.
            settings: Of JAX's, those that change what is traced.
        """
        about = (device.platform, device.device_kind, str(device.id), host(), _code())
        flags = os.environ.get("XLA_FLAGS", "")
        made_with = (*_versions(device), *about, flags, repr(settings))
        return cls(_folder(), device, made_with)

    def has(self, key: str) -> bool:
        """Whether there is a file for a program, sound or not."""
        return self.folder is not None and os.path.exists(self._file(key))

    def read(self, key: str) -> Compiled | None:
        """The program that was kept under a key, None where there is no sound one."""
        if self.folder is None or not _is_private(self.folder):
            return None
        file = self._file(key)
        try:
            content = own_bytes(file, MAX_BYTES)
            program = serialize_executable.deserialize_and_load(
                *pickle.loads(self._opened(key, content)),
                backend=self.device.client,
                execution_devices=[self.device],
            )
            os.utime(file)  # used now, so that it is given up last
        except Exception:  # whatever is wrong with the file, it can be compiled again
            return None
        return program

    def write(self, key: str, compiled: Compiled) -> None:
        """Keep a program, where the backend can and the folder may be written."""
        # Unlike those of `Path`, this is False as well where one may not look.
        if self.folder is None or (os.path.exists(self.folder) and not _is_private(self.folder)):
            return
        try:
            content = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception:  # not every backend and program can be written down
            return
        if len(content) < MAX_BYTES:
            put(self._file(key), self._sealed(key, content))

    def trim(self, limit: int = LIMIT) -> None:
        """Remove what was not used for longest, until the rest is within the limit."""
        if self.folder is None or not _is_private(self.folder):
            return
        files = []
        with contextlib.suppress(OSError):  # another process may remove one meanwhile
            for file in self.folder.iterdir():
                status = file.lstat()
                files.append((status.st_mtime, status.st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= limit:
                return
            with contextlib.suppress(OSError):
                file.unlink()
            total -= size

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{digest(self._text(key))}.program"

    def _text(self, key: str) -> str:
        """All that a program depends on."""
        return repr((key, self.made_with))

    def _sealed(self, key: str, content: bytes) -> bytes:
        """The content of a file: a digest that binds a program to its key, and the program."""
        return _DIGEST(digest(self._text(key)).encode() + content).digest() + content

    def _opened(self, key: str, sealed: bytes) -> bytes:
        """The program in the content of a file. Raises `ValueError` where it is not of this key."""
        content = sealed[_DIGEST().digest_size :]
        if self._sealed(key, content) != sealed:
            raise ValueError("damaged, or the program of another key")
        return content


def _versions(device: Any) -> tuple[str, ...]:
    """Of all that compiles: JAX, its library, and what drives the device."""
    return jax.__version__, version("jaxlib"), device.client.platform_version


def _folder() -> Path | None:
    if os.environ.get("TNSIM_PROGRAM_CACHE", "").lower() == "off":
        return None
    return cache_folder("programs")


def _is_private(folder: Path) -> bool:
    """Whether it is a folder of the user's that nobody else may enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):  # Windows: the user's folders are closed to others
        return True
    return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0


@cache
def host() -> str:
    """What the machine's processor can do; where nobody tells, the machine itself.

    Compiled code uses the instructions of the processor that it was compiled on.
    """
    names = ("model name", "flags", "Features")
    with contextlib.suppress(OSError):
        found: dict[str, str] = {}
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
        if any(name in found for name in names[1:]):
            return repr([platform.machine(), *(found.get(name) for name in names)])
    return repr(platform.uname())


@cache
def _code() -> str:
    """A digest of the code that turns pieces into programs: another one may compile another."""
    files = resources.files("tnsim.engine").iterdir()
    sources = sorted((file.name, file.read_bytes()) for file in files if file.name.endswith(".py"))
    return digest(repr(sources))
