"""Work of more than ten seconds says so: a line in the log, and a bar on a terminal or notebook.

Where it takes more than a minute the line is a warning of the log, which Python prints on standard
error unless a program says otherwise: a job without a terminal does not stand still in silence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger(__name__)

LONG = 10.0
"""Expected seconds beyond which work is announced."""
VERY_LONG = 60.0
"""Expected seconds beyond which the line is printed where logging is not set up."""
_TICK = 0.5  # seconds between two looks of the bar
_announced: ContextVar[bool] = ContextVar("long work announced", default=False)


def seconds_text(seconds: float) -> str:
    """An expected time in words.

    Args:
        seconds: Time in seconds.

    Example:
        >>> seconds_text(0.02), seconds_text(90), seconds_text(1e5)
        ('about 0.02 s', 'about 1.5 minutes', 'about 28 hours')
    """
    for unit, length in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * length:
            return f"about {seconds / length:,.2g} {unit}"
    return f"about {seconds:.2g} s"


@contextmanager
def announced(what: str, seconds: float, bar: bool = True) -> Iterator[None]:
    """Announce work that is expected to be long, and show how far its time has come.

    The line goes to the logger of this module, at level INFO, or WARNING beyond a minute. The bar
    shows the time that has passed beside the expected time, no measured progress. Work inside
    announced work is not announced.

    Args:
        what: Words for the work.
        seconds: Expected time of the work.
        bar: Whether a bar is drawn where there is a terminal or a notebook.

    Example:
        >>> with announced("a sum", 0.01):
        ...     sum(range(3))
        3
    """
    if seconds < LONG or _announced.get():
        yield
        return
    token = _announced.set(True)
    level = logging.INFO if seconds < VERY_LONG else logging.WARNING
    log.log(level, "%s: %s expected", what, seconds_text(seconds))
    ended = threading.Event()
    shown = threading.Thread(target=_show, args=(what, seconds, ended), daemon=True)
    if bar:
        shown.start()
    try:
        yield
    finally:
        _announced.reset(token)
        ended.set()
        if bar:
            shown.join()


def _show(what: str, seconds: float, ended: threading.Event) -> None:
    """Draw the time that has passed until the work has ended."""
    from tqdm.auto import tqdm

    begun = time.monotonic()
    layout = "{desc} |{bar}| {elapsed} of " + seconds_text(seconds)
    with tqdm(total=seconds, desc=what, bar_format=layout, disable=None, leave=False) as drawn:
        while not ended.wait(_TICK):
            drawn.n = min(seconds, time.monotonic() - begun)
            drawn.refresh()
