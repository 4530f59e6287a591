"""Threads of the process: a pool that shares independent tasks, and the number of BLAS's threads.

A single large product takes the threads of BLAS. Where several tasks run at once instead, BLAS
takes one thread in each of them (`one_blas_thread`).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from tnsim.engine.runtime.devices import blas_libraries, processors

_changing = threading.Lock()
_before: list[list[int]] = []  # for each plan that runs; the first holds the numbers of threads


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS on a single thread inside the block, in all threads of the process."""
    # The setting belongs to the whole process. The first plan that enters remembers the numbers of
    # threads, and the last plan that leaves restores them.
    with _changing:
        _before.append([] if _before else [each.num_threads for each in blas_libraries()])
        if len(_before) == 1:
            _set_threads([1] * len(_before[0]))
    try:
        yield
    finally:
        with _changing:
            first = _before[0]
            _before.pop()
            if not _before:
                _set_threads(first)


def _set_threads(numbers: Sequence[int]) -> None:
    for library, threads in zip(blas_libraries(), numbers, strict=True):
        library.set_num_threads(threads)


def shared(tasks: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """The results of tasks, in order; this thread and idle threads of the pool go through them.

    A thread that has no task left helps elsewhere, and tasks may share tasks of their own: this
    thread waits for tasks that others have begun, never for a thread to become idle.

    Args:
        tasks: Functions to call.
        threads: Most threads that go through the tasks, this one included.

    Example:
        >>> shared([lambda: 1, lambda: 2, lambda: 3], threads=2)
        [1, 2, 3]
    """
    count = min(threads, len(tasks))
    if count < 2:
        with np.errstate(all="ignore"):
            return [task() for task in tasks]
    # Threads take tasks from the left end of one queue until it is empty. Each result goes to the
    # place of its task, so its order does not depend on the threads.
    results: list[Any] = [None] * len(tasks)
    left = deque(enumerate(tasks))

    def work() -> None:
        with np.errstate(all="ignore"):  # a setting of each thread's own
            while left:
                try:
                    n, task = left.popleft()
                except IndexError:  # another thread was faster
                    return
                results[n] = task()

    helpers = []
    with suppress(RuntimeError):  # the system has no room for another thread
        for _ in range(count - 1):
            helpers.append(_pool().submit(work))
    try:
        work()
    finally:
        # Where a task raised, `left` still has tasks that nobody shall begin any more. Helpers that
        # have not started are cancelled, and the others are waited for, since they write to memory
        # of this call.
        left.clear()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    # A cancelled helper stays in the queue of the pool for a while, and would keep the results.
    found = [*results]
    results.clear()
    return found


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, processors() - 1), thread_name_prefix="tnsim")


if hasattr(os, "register_at_fork"):  # a child process has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
