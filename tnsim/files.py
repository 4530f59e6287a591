"""Files written as a whole or not at all. In: a path. Out: a path beside it, renamed when full.

A reader, or a run that is killed, meets the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to in the folder of `path`; at the end it takes the place of `path`.

    After an error it is removed and `path` is as before. Links are followed. What is no regular
    file, such as `/dev/null`, has no earlier content to keep and is written to directly.

    Args:
        path: The file to write; its folder exists.

    Yields:
        The path to open for writing. The file gets the permissions that new files get here.

    Raises:
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
