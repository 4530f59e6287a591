"""Ctrl-C and SIGTERM as one line. In: what is kept. Out: an exit status as a shell has it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


class Stopped(KeyboardInterrupt):
    """A signal that asks the process to end."""


@contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end a run in one line that says what is kept.

    The exit status is that of a shell, 128 + the number of the signal.

    Args:
        kept: The rest of the line.

    Raises:
        Exit: Of Typer, after a signal.

    Example:
        >>> with stoppable("finished tiles are kept in out, run again to go on"):
        ...     pass
    """

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    except Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        typer.echo(f"tnsim: stopped by {number.name}: {kept}", err=True)
        raise typer.Exit(128 + number) from None
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
