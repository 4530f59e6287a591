"""Files that spare work to later processes, and the search results among them.

In: a key, a search. Out: its result, from disk where it is sound.

One file a result, under `TNSIM_CACHE_DIR` (default: the user's cache folder), named after the
digest of its key. A file that is foreign, damaged, changed, too large or of another version
counts as absent: the search runs again and the file is replaced. Where nothing can be written,
nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from tnsim.engine.ir.plan_json import opened, sealed
from tnsim.files import regular, replacing

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 14
MAX_BYTES = 2**26  # of one file; 606 diagrams take 2**22


def kept(
    key: Sequence[Any],
    search: Callable[[], T],
    encode: Callable[[T], Any],
    decode: Callable[[Any], T],
    searcher: str,
) -> tuple[T, str]:
    """A search result by its key: from the cache folder, else searched now and kept.

    Args:
        key: All that the result depends on; its `repr` tells keys apart.
        search: Gives the result.
        encode: Makes it plain data.
        decode: Makes plain data a result again, and raises on what is none for this key.
        searcher: Name and version of what searches.

    Returns:
        The result, and the name and version of what searched it.
    """
    folder = cache_folder("plans")
    if folder is None:
        return search(), searcher
    text = repr([VERSION, *key])
    file = folder / f"{digest(text)}.json"
    try:
        return _read(file, text, decode)
    except Exception:  # whatever is wrong with the file, the search does not need it
        log.debug("searched and kept in %s", file)
        result = search()
    found = sealed({"key": text, "searched_with": searcher, "found": encode(result)}).encode()
    if len(found) <= MAX_BYTES:  # else it would not be read again
        put(file, found)
    return result, searcher


def digest(text: str) -> str:
    """A name for a file, one for each text."""
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder(kind: str) -> Path | None:
    """Where files of a kind are kept: in `TNSIM_CACHE_DIR`, else in the user's cache folder.

    None where the variable is empty.
    """
    named = os.environ.get("TNSIM_CACHE_DIR")
    if named is not None:
        return Path(named) / kind if named else None
    return platformdirs.user_cache_path("tnsim", appauthor=False) / kind


def _read(file: Path, key: str, decode: Callable[[Any], T]) -> tuple[T, str]:
    """The result in a file. Raises anything where there is none for this key."""
    data = opened(own_bytes(file, MAX_BYTES))
    if data["key"] != key:
        raise ValueError("the result of another search")
    searcher = data["searched_with"]
    if not isinstance(searcher, str):
        raise ValueError("no name of what searched")
    return decode(data["found"]), searcher


def own_bytes(file: Path, most: int) -> bytes:
    """The bytes of a regular file that belongs to the user. Raises anything where it is none.

    A link is not followed, see `regular`.
    """
    with regular(file, follow=False) as stream:
        status = os.fstat(stream.fileno())
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise ValueError("the file of another user")
        if status.st_size > most:
            raise ValueError("larger than any result")
        return stream.read(most)


def put(file: Path, content: bytes) -> None:
    """Put the content in the place of whatever is there, in a folder of the user's own."""
    with contextlib.suppress(OSError):  # a read-only home: it is made again next time
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if file.is_symlink() or not file.is_file():
            file.unlink(missing_ok=True)  # a link or a pipe, which would be written through
        with replacing(file) as temporary:
            temporary.write_bytes(content)
