"""Files written as a whole or not at all, and read without waiting. In: paths. Out: bytes.

A reader, or a run that is killed, meets the old file or the new one, never half of one. No output
takes the place of a file of another kind: where a checkpoint, a table or a picture of somebody
stands under the name of an output, the output is refused and the file stays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple


class Kind(NamedTuple):
    r"""What an output file holds.

    Attributes:
        name: Words for messages, with an article.
        holds: From an open file to whether the file is of this kind; may raise anything on a file
            of another kind.

    Example:
        >>> Kind("a picture", lambda file: file.read(4) == b"\x89PNG").name
        'a picture'
    """

    name: str
    holds: Callable[[BinaryIO], bool]


def beginning(name: str, start: bytes) -> Kind:
    r"""A kind of file that is known by its first bytes.

    Args:
        name: Words for messages, with an article.
        start: The first bytes.

    Returns:
        The kind.

    Example:
        >>> import io
        >>> beginning("a picture", b"\x89PNG").holds(io.BytesIO(b"text"))
        False
    """
    return Kind(name, lambda file: file.read(len(start)) == start)


PNG = beginning("a picture", b"\x89PNG\r\n\x1a\n")


def json_object(name: str, *keys: str) -> Kind:
    """A kind of JSON file that is known by keys at its top.

    Args:
        name: Words for messages, with an article.
        *keys: Keys of which at least one is there.

    Returns:
        The kind.

    Example:
        >>> import io
        >>> json_object("a log", "checkpoints").holds(io.BytesIO(b'{"name": "a package"}'))
        False
    """

    def holds(file: BinaryIO) -> bool:
        found = json.loads(file.read())
        return isinstance(found, dict) and not found.keys().isdisjoint(keys)

    return Kind(name, holds)


def check_replaceable(path: Path, kind: Kind) -> None:
    r"""Refuse an output whose place is taken by something of another kind.

    Args:
        path: Where the output is to be written.
        kind: Of the output.

    Raises:
        FileExistsError: A file of another kind or a folder stands there. An empty file holds
            nothing that could be lost, and what is no regular file, such as `/dev/null`, has no
            earlier content.

    Example:
        >>> import tempfile
        >>> weights = Path(tempfile.mkdtemp()) / "step_100.safetensors"
        >>> length = weights.write_bytes(b"weights")
        >>> check_replaceable(weights, beginning("a picture", b"\x89PNG"))
        Traceback (most recent call last):
        FileExistsError: [Errno 17] holds something else than a picture, which is kept; give...
    """
    if path.is_dir():
        raise FileExistsError(
            errno.EEXIST, f"is a folder, where {kind.name} is to be written", str(path)
        )
    if not path.is_file() or path.stat().st_size == 0:
        return
    with regular(path) as file:
        try:
            is_own = kind.holds(file)
        except Exception:  # whatever a reader says of a file of another kind
            is_own = False
    if not is_own:
        raise FileExistsError(
            errno.EEXIST,
            f"holds something else than {kind.name}, which is kept; give another path, or remove "
            "the file",
            str(path),
        )


def regular(path: str | os.PathLike[str], follow: bool = True) -> BinaryIO:
    """A regular file, opened for reading.

    The file is opened before it is looked at, so that nobody can put another in its place between
    the two, and opening a pipe does not wait for its writer.

    Args:
        path: Of the file.
        follow: Whether a link is followed.

    Returns:
        The open file.

    Raises:
        OSError: There is none, it may not be read, or it is no regular file.

    Example:
        >>> regular(os.devnull)
        Traceback (most recent call last):
        OSError: [Errno 22] is no regular file: '/dev/null'
    """
    return os.fdopen(_regular(path, os.O_RDONLY, follow), "rb")


def appending(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened for writing at its end; made where there is none.

    Opening a pipe does not wait for its reader.

    Args:
        path: Of the file.

    Returns:
        The open file.

    Raises:
        OSError: It may not be written, or it is no regular file.

    Example:
        >>> appending(os.devnull)
        Traceback (most recent call last):
        OSError: [Errno 22] is no regular file: '/dev/null'
    """
    return os.fdopen(_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, follow=True), "ab")


def _regular(path: str | os.PathLike[str], flags: int, follow: bool) -> int:
    """The number of an open file. Raises `OSError` for what is no regular file."""
    wanted = ["O_NONBLOCK", "O_CLOEXEC", "O_BINARY", *([] if follow else ["O_NOFOLLOW"])]
    for name in wanted:
        flags |= getattr(os, name, 0)  # not every platform has all of them
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return handle


@contextlib.contextmanager
def replacing(path: Path, kind: Kind | None = None) -> Iterator[Path]:
    """A path to write to in the folder of `path`; at the end it takes the place of `path`.

    After an error it is removed and `path` is as before. Links are followed. What is no regular
    file, such as `/dev/null`, has no earlier content to keep and is written to directly.

    Args:
        path: The file to write; its folder exists.
        kind: Of what is written; None where any file in its place may go, as in a cache.

    Yields:
        The path to open for writing. The file gets the permissions that new files get here.

    Raises:
        FileExistsError: Something of another kind stands there, and stays.
        OSError: Whatever writing or renaming raises; also for a name with a NUL character.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "result.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "the name holds a NUL character", os.fspath(path))
    target = Path(os.path.realpath(path))
    if kind is not None:
        check_replaceable(target, kind)
    if target.exists() and not target.is_file():
        yield target
        return
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
