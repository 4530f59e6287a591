"""Files that are written as a whole or not at all, and opened without waiting.

A reader finds the old file or the new file, never half of a file, even where a run was killed. No
output takes the place of a file of another kind: where a user's checkpoint, table or picture has
the name of an output, the output is refused and the file stays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple


class Kind(NamedTuple):
    r"""The kind of content that an output file holds.

    Attributes:
        name: Words for messages, with an article.
        holds: Function from an open file to whether the file is of this kind; it may raise any
            exception on a file of another kind.
        needs: Package that writes such files and the extra that installs it; None where NumPy and
            Python do.
        inside: Of an output that is a folder, the file in it that `holds` reads; empty of a file.
        endings: Endings that names of such files have, in small letters; none where any will do.

    Example:
        >>> Kind("a picture", lambda file: file.read(4) == b"\x89PNG").name
        'a picture'
    """

    name: str
    holds: Callable[[BinaryIO], bool]
    needs: tuple[str, str] | None = None
    inside: str = ""
    endings: tuple[str, ...] = ()


def beginning(name: str, start: bytes) -> Kind:
    r"""The kind of files that begin with given bytes.

    Args:
        name: Words for messages, with an article.
        start: First bytes of every file of the kind.

    Returns:
        The kind.

    Example:
        >>> import io
        >>> beginning("a picture", b"\x89PNG").holds(io.BytesIO(b"text"))
        False
    """
    return Kind(name, lambda file: file.read(len(start)) == start)


PNG = beginning("a picture", b"\x89PNG\r\n\x1a\n")._replace(
    needs=("matplotlib", "plot"), endings=(".png", "")
)


def json_object(name: str, *keys: str) -> Kind:
    """The kind of JSON files with given keys at the top.

    Args:
        name: Words for messages, with an article.
        *keys: Keys of which the object has at least one.

    Returns:
        The kind.

    Example:
        >>> import io
        >>> json_object("a log", "checkpoints").holds(io.BytesIO(b'{"name": "a package"}'))
        False
    """

    def holds(file: BinaryIO) -> bool:
        data = json.loads(file.read())
        return isinstance(data, dict) and not data.keys().isdisjoint(keys)

    return Kind(name, holds)


def check_replaceable(path: Path, kind: Kind) -> None:
    r"""Refuse an output if a file of another kind has its path.

    Args:
        path: Path of the output.
        kind: Kind of the output.

    Raises:
        FileExistsError: A file of another kind or a folder has this path. An empty file may be
            replaced, as no content is lost, and so may files that are not regular, such as
            `/dev/null`, as they have no earlier content.

    Example:
        >>> import tempfile
        >>> weights = Path(tempfile.mkdtemp()) / "step_100.safetensors"
        >>> length = weights.write_bytes(b"weights")
        >>> check_replaceable(weights, beginning("a picture", b"\x89PNG"))
        Traceback (most recent call last):
        FileExistsError: [Errno 17] holds something else than a picture, which is kept; give...
    """
    if path.exists() and path.is_dir() != bool(kind.inside):
        found = "folder" if path.is_dir() else "file"
        raise FileExistsError(
            errno.EEXIST, f"is a {found}, where {kind.name} is to be written", str(path)
        )
    if kind.inside:
        is_empty = not path.exists() or not any(path.iterdir())
    else:
        # An empty file holds nothing that could be lost, as `mktemp` makes it.
        is_empty = not path.is_file() or path.stat().st_size == 0
    if is_empty:
        return
    is_own, told = False, path / kind.inside
    if told.is_file():
        # A pipe in the place of a file would block the reader.
        with regular(told) as file:
            try:
                is_own = kind.holds(file)
            except Exception:  # a reader may raise anything on a file of another kind
                is_own = False
    if not is_own:
        raise FileExistsError(
            errno.EEXIST,
            f"holds something else than {kind.name}, which is kept; give another path, or remove "
            f"the {'folder' if kind.inside else 'file'}",
            str(path),
        )


def regular(path: str | os.PathLike[str], follow: bool = True) -> BinaryIO:
    """A regular file, opened for reading.

    The file is opened before its type is checked, so that no other file can take its place between
    the two steps. To open a pipe does not wait for its writer.

    Args:
        path: Path of the file.
        follow: Whether a link is followed.

    Returns:
        The open file.

    Raises:
        OSError: The file does not exist, may not be read, or is no regular file.

    Example:
        >>> regular(os.devnull)
        Traceback (most recent call last):
        OSError: [Errno 22] is no regular file: '/dev/null'
    """
    return os.fdopen(_open_regular(path, os.O_RDONLY, follow), "rb")


def appending(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened for writing at its end, and created if there is no file.

    To open a pipe does not wait for its reader.

    Args:
        path: Path of the file.

    Returns:
        The open file.

    Raises:
        OSError: The file may not be written, or is no regular file.

    Example:
        >>> appending(os.devnull)
        Traceback (most recent call last):
        OSError: [Errno 22] is no regular file: '/dev/null'
    """
    return os.fdopen(_open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, follow=True), "ab")


def _open_regular(path: str | os.PathLike[str], flags: int, follow: bool) -> int:
    """Open a regular file and return its descriptor; other files raise `OSError`."""
    wanted = ["O_NONBLOCK", "O_CLOEXEC", "O_BINARY", *([] if follow else ["O_NOFOLLOW"])]
    for name in wanted:
        flags |= getattr(os, name, 0)  # not every platform has all of them
    handle = os.open(path, flags, 0o666)
    # The opened file is checked and not its name, which may change in between.
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return handle


@contextlib.contextmanager
def replacing(path: Path, kind: Kind | None = None) -> Iterator[Path]:
    """A temporary path in the folder of `path` that replaces `path` at the end of the block.

    After an error what was written is removed and `path` is as before. Links are followed. A file
    that is not regular, such as `/dev/null`, has no earlier content and is written to directly. A
    folder takes the place of another in two steps, between which there is none.

    Args:
        path: Path of the file or folder to write, in an existing folder.
        kind: Kind of the new content; None if any earlier file may be replaced, as in a cache.

    Yields:
        The path to open for writing. The file gets the permissions of new files in this process.

    Raises:
        FileExistsError: A file of another kind or a folder has this path, and stays.
        OSError: Writing or renaming failed, or the name holds a NUL character.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "result.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    # Python's own error for such a name is a ValueError.
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "the name holds a NUL character", os.fspath(path))
    # A link stays a link, and the file behind it is replaced.
    target = Path(os.path.realpath(path))
    if kind is not None:
        check_replaceable(target, kind)
    # Devices such as /dev/stdout are written to and not replaced.
    is_folder = kind is not None and bool(kind.inside)
    if target.exists() and not (is_folder or target.is_file()):
        yield target
        return
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if target.is_dir():
            _replace_folder(target, temporary)
        else:
            os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if is_folder:
            shutil.rmtree(temporary, ignore_errors=True)
        # An error of writing, as on a full disk, does not say of which file it is.
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = os.fspath(path)
        raise


def _replace_folder(target: Path, temporary: Path) -> None:
    """Put a folder in the place of another, which is removed, or comes back after an error."""
    old = target.with_name(f".{uuid.uuid4().hex}.tmp")
    os.replace(target, old)
    try:
        os.replace(temporary, target)
    except BaseException:
        os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
