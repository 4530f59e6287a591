"""Guards that turn every failure of reading into a `CheckpointError` of a single sentence.

A file may be damaged in more ways than its readers foresee: their libraries then raise nearly
anything, a `MemoryError` or a `RecursionError` among it. Callers should have to know a single
exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tnsim.errors import CheckpointError, MissingExtra, TnsimError, printable


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn every foreign exception into a refusal; tnsim's own exceptions pass through.

    Args:
        what: The sentence to which the cause is appended.

    Raises:
        CheckpointError: Where a foreign exception was raised, which is its `__cause__`.

    Example:
        >>> with refusing("config.json is not JSON"):
        ...     raise ValueError("expected a value")
        Traceback (most recent call last):
        tnsim.errors.CheckpointError: config.json is not JSON: expected a value
    """
    try:
        yield
    except TnsimError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {cause(error)}") from error


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Put the name of a file in front of every refusal, in printable characters.

    Args:
        path: The file that is read.

    Raises:
        TnsimError: Error of the kind that was raised inside; `CheckpointError` for foreign errors.

    Example:
        >>> with naming("step_100.npz"):
        ...     raise CheckpointError("is empty")
        Traceback (most recent call last):
        tnsim.errors.CheckpointError: step_100.npz: is empty
        >>> with naming("step_100.npz"), naming("step_100.npz"):
        ...     raise CheckpointError("is empty")
        Traceback (most recent call last):
        tnsim.errors.CheckpointError: step_100.npz: is empty
    """
    try:
        with refusing("cannot be read"):
            yield
    except MissingExtra:
        raise
    except TnsimError as error:
        said = str(error)
        # As a reader inside of this one may have said; an empty name tells nothing.
        if str(path) and not said.startswith(f"{path}: "):
            said = f"{path}: {said}"
        # The cause of the refusal stays the exception of the library.
        raise type(error)(printable(said)) from error.__cause__


def cause(error: Exception) -> str:
    """The cause that an exception states, in terms of the file.

    Args:
        error: Exception that a library raised.

    Returns:
        A single line, never empty.

    Example:
        >>> cause(RecursionError("maximum recursion depth exceeded"))
        'it is nested too deeply'
    """
    # Such errors speak of this process, and users need to hear of the file.
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"there is no {error}"
    text = str(error).strip().partition("\n")[0]
    if not text or "weights_only" in text:  # PyTorch advises to unpickle, which is unsafe
        return type(error).__name__
    return text
