"""The state of the process while a plan is made: no cyclic garbage collection, lines of progress.

Planning makes some million small tuples that live until the plan is there and form no cycles. The
collector of cycles goes through all of them again and again, a third of the time of a plan of a
language model, and finds nothing. It is switched off while any thread plans.

A plan of three nonlinear layers takes many seconds. Lines of progress go to the logger of this
module at level INFO, the first after `FIRST_LINE` seconds, each later line after twice the time.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger(__name__)

FIRST_LINE = 2.0
"""Seconds of planning after which the first line of progress is logged."""
_changing = threading.Lock()
_found: list[bool] = []  # for each thread that plans, whether it found the collector switched on


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch the collector of cycles off; the last of several threads restores its first state."""
    with _changing:
        _found.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _changing:
            was_enabled = _found[0]
            _found.pop()
            if not _found and was_enabled:
                gc.enable()


class _Progress:
    """How far the planning of a plan has come.

    Args:
        name: Name of the plan.

    Attributes:
        searched: Number of products whose contraction paths have been searched.
        stage: Description of the stage that is planned.
        spoken: Whether a line has been logged.
        begun: Time at which the planning began.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.searched = 0
        self.stage = ""
        self.spoken = False
        self.begun = time.monotonic()
        self._next = FIRST_LINE

    def speak(self) -> None:
        """Log a line where a line is due."""
        seconds = time.monotonic() - self.begun
        if seconds < self._next:
            return
        self._next = 2 * seconds
        self.spoken = True
        log.info(
            "planning %s for %.0f s: %sproducts searched: %d",
            self.name,
            seconds,
            self.stage and f"{self.stage}, ",
            self.searched,
        )


_current: ContextVar[_Progress | None] = ContextVar("planning in progress", default=None)


@contextmanager
def planning(name: str) -> Iterator[None]:
    """Make a plan inside a `with` block, without collections of garbage and with progress.

    Blocks inside another block belong to the plan of the outermost block.

    Args:
        name: Name of the plan, for lines of progress.

    Example:
        >>> with planning("a plan"):
        ...     gc.isenabled()
        False
    """
    if _current.get() is not None:
        yield
        return
    progress = _Progress(name)
    token = _current.set(progress)
    try:
        with _without_collections():
            yield
        if progress.spoken:
            log.info("planned %s in %.1f s", name, time.monotonic() - progress.begun)
    finally:
        _current.reset(token)


def tell(stage: str = "", searched: int = 0) -> None:
    """Say how far the plan in progress has come.

    Args:
        stage: Description of the stage that is planned from now on; empty where it goes on.
        searched: Number of products whose contraction paths are searched now.
    """
    progress = _current.get()
    if progress is not None:
        progress.searched += searched
        progress.stage = stage or progress.stage
        progress.speak()
