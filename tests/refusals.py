"""The one way to assert that something is refused: by its class, with its words, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tnsim

Errors = type[BaseException] | tuple[type[BaseException], ...]
LOST = tnsim.PrecisionWarning, tnsim.errors.ResultError
"""What says that few digits are left, and that none is."""


@contextmanager
def refused(
    said: str, error: Errors = tnsim.ModelError
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Assert that the code inside is refused, in one line that has the words.

    Args:
        said: Regular expression that is found in the line.
        error: Class of the refusal, or several.

    Yields:
        What `pytest.raises` gives, for what else the line has to say.
    """
    with pytest.raises(error, match=said) as caught:
        yield caught
    line = str(caught.value)
    assert line.isprintable(), f"a refusal is one line: {line!r}"


def not_read(
    path: str | Path, said: str, error: Errors = tnsim.CheckpointError, **options: Any
) -> BaseException:
    """Assert that a file is refused, in one line that begins with its name.

    Args:
        path: The file.
        said: Regular expression that is found in the line.
        error: Class of the refusal, or several.
        options: Arguments of `tnsim.load`.

    Returns:
        The refusal, for what else it has to say.
    """
    with refused(said, error) as caught:
        tnsim.load(path, **options)
    assert str(caught.value).startswith(str(path))
    return caught.value
