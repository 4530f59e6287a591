"""Threads of the process: a pool that shares tasks, and the number of BLAS's threads.

A single large product takes the threads of BLAS. Where several tasks run at once instead, BLAS
takes one thread in each of them (`one_blas_thread`). Tasks may wait for each other (`Order`), and a
task may be cut into parts while it runs.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

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


class Order(NamedTuple):
    """Which of several tasks wait for which.

    Attributes:
        waits: For each task the number of tasks that it waits for, all of which stand before it.
        then: For each task those that wait for it.
        ahead: Most places by which a task that runs stands behind the first one that is not done.
    """

    waits: tuple[int, ...]
    then: tuple[tuple[int, ...], ...]
    ahead: int


def shared(
    tasks: Sequence[Callable[[], Any]],
    threads: int,
    order: Order | None = None,
    passed: Callable[[int], None] | None = None,
) -> list[Any]:
    """The results of tasks, in order; this thread and idle threads of the pool go through them.

    A thread that has no task left helps elsewhere, and tasks may share tasks of their own: this
    thread waits for tasks that others have begun, never for a thread to become idle.

    Args:
        tasks: Functions to call.
        threads: Most threads that go through the tasks, this one included.
        order: Which tasks wait for which; None where all may run at once.
        passed: Called with the number of each task, in order, once it and all before it are done.

    Example:
        >>> shared([lambda: 1, lambda: 2, lambda: 3], threads=2)
        [1, 2, 3]
    """
    count = min(threads, len(tasks))
    if count < 2:
        results = []
        with np.errstate(all="ignore"):
            for n, task in enumerate(tasks):
                results.append(task())
                if passed is not None:
                    passed(n)
        return results
    around: _Work | None = getattr(_current, "work", None)
    if around is not None and order is None:
        return around.split(tasks)
    work = _Work(tasks, order, passed)
    helpers = []
    with suppress(RuntimeError):  # the system has no room for another thread
        for _ in range(count - 1):
            helpers.append(_pool().submit(work.run))
    try:
        work.run()
    finally:
        # Where a task raised, tasks are left that nobody shall begin any more. Helpers that have
        # not started are cancelled, and the others are waited for, since they write to memory of
        # this call.
        work.end()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        # A cancelled helper stays in the queue of the pool for a while, and keeps nothing.
        results, work.results, work.tasks, work.passed = work.results, [], (), None
    return results


_current = threading.local()
"""`work` of a thread: the tasks, some of which wait for others, that the thread goes through."""


class _Parts:
    """The parts of a task that runs, with their results in order."""

    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        self.tasks, self.results = tasks, [None] * len(tasks)
        self.begun = self.done = 0


class _Ended(Exception):
    """Tasks ended in an error, in another thread."""


class _Work:
    """Tasks that several threads go through, each in turn the first one that may run.

    Each result goes to the place of its task, so its order does not depend on the threads. Where
    tasks wait for others, a thread that has to wait goes through the parts of tasks that run.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        order: Order | None,
        passed: Callable[[int], None] | None,
    ) -> None:
        count = len(tasks)
        self.tasks, self.order, self.passed = tasks, order, passed
        self.results: list[Any] = [None] * count
        self._waits = [0] * count if order is None else list(order.waits)
        self._ready = [n for n, waits in enumerate(self._waits) if not waits]  # a heap: in order
        self._is_done, self._first, self._is_ended = [False] * count, 0, False
        self._parts: list[_Parts] = []
        self._changed = threading.Condition()

    def run(self) -> None:
        """Go through tasks until all are begun; where some wait for others, until all are done."""
        before = getattr(_current, "work", None)
        _current.work = None if self.order is None else self
        try:
            with np.errstate(all="ignore"):  # a setting of each thread's own
                while (found := self._next()) is not None:
                    if isinstance(found, _Parts):
                        self._run_part(found)
                        continue
                    self.results[found] = self.tasks[found]()
                    with self._changed:
                        self._finish(found)
        except _Ended:
            return
        except BaseException:
            self.end()
            raise
        finally:
            _current.work = before

    def end(self) -> None:
        """Let nobody begin a task any more."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def split(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of the parts of a task that runs, which idle threads go through as well."""
        parts = _Parts(tasks)
        with self._changed:
            self._parts.append(parts)
            self._changed.notify_all()
        while self._run_part(parts):
            pass
        with self._changed:
            while parts.done < len(tasks):
                if self._is_ended:
                    raise _Ended
                self._changed.wait()
        return parts.results

    def _run_part(self, parts: _Parts) -> bool:
        """Run the next part, if there is one that nobody has begun."""
        with self._changed:
            number = parts.begun
            if number == len(parts.tasks):
                return False
            parts.begun += 1
            if parts.begun == len(parts.tasks):
                self._parts.remove(parts)
        parts.results[number] = parts.tasks[number]()
        with self._changed:
            parts.done += 1
            if parts.done == len(parts.tasks):
                self._changed.notify_all()
        return True

    def _next(self) -> int | _Parts | None:
        """The next task or a task with parts, once there is one; None where nothing is left."""
        with self._changed:
            while not self._is_ended:
                if self._ready and self._is_near(self._ready[0]):
                    return heapq.heappop(self._ready)
                if self._parts:
                    return self._parts[0]
                if self.order is None or self._first == len(self.tasks):
                    return None
                self._changed.wait()
            return None

    def _is_near(self, number: int) -> bool:
        return self.order is None or number <= self._first + self.order.ahead

    def _finish(self, number: int) -> None:
        self._is_done[number] = True
        while self._first < len(self.tasks) and self._is_done[self._first]:
            if self.passed is not None:
                self.passed(self._first)
            self._first += 1
        if self.order is not None:
            for later in self.order.then[number]:
                self._waits[later] -= 1
                if not self._waits[later]:
                    heapq.heappush(self._ready, later)
            # This thread takes one itself. The first task that is not done runs or may run.
            if self._first == len(self.tasks):
                self._changed.notify_all()
            elif len(self._ready) > 1:
                self._changed.notify(len(self._ready) - 1)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, processors() - 1), thread_name_prefix="tnsim")


if hasattr(os, "register_at_fork"):  # a child process has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
