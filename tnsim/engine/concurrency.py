"""Calls that run at once. In: calls. Out: their results, in order.

XLA multiplies a batch of small matrices on one core of a CPU, whatever the size of the batch.
Compiled programs let go of Python's lock, so programs called from several threads use several
cores. On an accelerator, which works through one program after another, nothing would be gained.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

T = TypeVar("T")
_CONFIG: Any = jax.config


def cores() -> int:
    """How many calls the processor can run at once; one where an accelerator does the work."""
    return processors() if jax.default_backend() == "cpu" else 1


def processors() -> int:
    """Cores that this process may use: it may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def at_once(calls: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """The results of calls, in the order of the calls.

    Args:
        calls: What is called, each in a thread of its own.
        most: How many may have been called whose results were not taken yet. It bounds memory, and
            does not depend on how many cores there are.

    Yields:
        The results.

    Example:
        >>> list(at_once([lambda: 1, lambda: 2, lambda: 3], most=2))
        [1, 2, 3]
    """
    if cores() < 2 or most < 2:
        yield from (call() for call in calls)
        return
    wide = _CONFIG.jax_enable_x64

    def under_same_settings(call: Callable[[], T]) -> T:
        with jax.enable_x64(wide):  # a thread has settings of its own
            return call()

    waiting: deque[Future[T]] = deque()
    # More threads than cores: three calls on two cores then take as long as one and a half.
    with ThreadPoolExecutor(min(most, 2 * cores())) as pool:
        for call in calls:
            waiting.append(pool.submit(under_same_settings, call))
            if len(waiting) == most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
