"""Search results and other files on disk that spare work to later processes.

Every result has a file of its own, under `TNSIM_CACHE_DIR` (default: the user's cache folder),
named after the digest of its key. A file that is foreign, damaged, changed, too large or of another
version counts as absent: the search runs again and the file is replaced. Where the folder cannot be
written, searches run without a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from tnsim.engine.ir.plan_json import opened, sealed
from tnsim.files import regular, replacing

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 17  # part of every key: files of other versions are not found
MAX_BYTES = 2**26  # bound on the size of a file; a result of 606 diagrams takes 2**22


def text_of(*key: Any) -> str:
    """The text of a key, by which results of all processes of one version are told apart."""
    return repr([VERSION, *key])


def kept(
    key: str,
    search: Callable[[], T],
    encode: Callable[[T], Any],
    decode: Callable[[Any], T],
    searcher: str,
) -> tuple[T, str]:
    """A search result by its key, from the cache folder or else from a new search.

    The result of a new search is written to the cache folder.

    Args:
        key: Text of everything that the result depends on, see `text_of`.
        search: Function that gives the result.
        encode: Function from the result to plain data.
        decode: Function from plain data to the result, which raises where the data is no result
            for this key.
        searcher: Name and version of the tool that searches.

    Returns:
        The result, and the name and version of the tool that found it.
    """
    folder = cache_folder("plans")
    if folder is None:
        return search(), searcher
    name = digest(key)
    file = folder / f"{name}.json"
    try:
        return _read_result(file, name, decode)
    except Exception:  # any broken file counts as absent
        log.debug("searched and kept in %s", file)
        result = search()
    document = sealed({"key": name, "searched_with": searcher, "found": encode(result)}).encode()
    if len(document) <= MAX_BYTES:  # a larger file would not be read again
        put(file, document)
    return result, searcher


def digest(text: str) -> str:
    """The name of the file for a text, its SHA-256 in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder(kind: str) -> Path | None:
    """The folder for files of a kind, in `TNSIM_CACHE_DIR` or else in the user's cache folder.

    Returns:
        The folder; None where the variable is set but empty, which switches the cache off.
    """
    named = os.environ.get("TNSIM_CACHE_DIR")
    if named is not None:
        return Path(named) / kind if named else None
    return platformdirs.user_cache_path("tnsim", appauthor=False) / kind


def _read_result(file: Path, name: str, decode: Callable[[Any], T]) -> tuple[T, str]:
    """The result in a file.

    Raises:
        Exception: Any kind of exception where the file holds no result for this key.
    """
    data = opened(own_bytes(file, MAX_BYTES))
    if data["key"] != name:
        raise ValueError("the result of another search")
    searcher = data["searched_with"]
    if not isinstance(searcher, str):
        raise ValueError("no name of what searched")
    return decode(data["found"]), searcher


def own_bytes(file: Path, most: int) -> bytes:
    """The bytes of a regular file that belongs to the user; links are not followed.

    Args:
        file: Path of the file.
        most: Largest size of the file in bytes.

    Raises:
        OSError: For a file that is absent or not regular (see `regular`).
        ValueError: For a file of another user, and for a larger file.
    """
    with regular(file, follow=False) as stream:
        status = os.fstat(stream.fileno())
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise ValueError("the file of another user")
        if status.st_size > most:
            raise ValueError("larger than any result")
        return stream.read(most)


def put(file: Path, content: bytes) -> None:
    """Write a file in a folder of the user's own, in the place of any earlier file.

    Nothing is raised where the file cannot be written.
    """
    with contextlib.suppress(OSError):  # with a read-only home the work is repeated next time
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if file.is_symlink() or not file.is_file():
            file.unlink(missing_ok=True)  # writing to a link or a pipe would change its target
        with replacing(file) as temporary:
            temporary.write_bytes(content)
