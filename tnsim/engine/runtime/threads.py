"""Threads of the process: a pool that shares tasks, and the number of BLAS's threads.

A single large product takes the threads of BLAS. Where several tasks run at once instead, BLAS
takes one thread in each of them (`one_blas_thread`). Tasks may wait for each other (`Order`), and a
task may be cut into parts while it runs.

*Interrupts.* Python raises a `KeyboardInterrupt` between any two steps of the main thread's Python
code, in functions of the standard library too: one that is raised as `Condition.__exit__` begins
leaves the condition locked, and all threads that wait for it wait for ever. So locks are those of
C, which a `with` takes and gives back in one step, and a thread sleeps with none of them in hand.
"""

from __future__ import annotations

import heapq
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from tnsim.engine.runtime.devices import blas_libraries, processors

_changing = threading.Lock()
_plans: list[weakref.ref[_Plan]] = []  # those that run
_before: list[int] = []  # numbers of threads as the first of them began, until they are set again


class _Plan:
    """A plan that runs. It is gone with its frame where an interrupt kept it from leaving."""


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS on a single thread inside the block, in all threads of the process."""
    # The setting belongs to the whole process. The first plan that enters remembers the numbers of
    # threads, and the last plan that leaves restores them.
    own = _Plan()
    try:
        with _changing:
            if not _before:
                _before[:] = [each.num_threads for each in blas_libraries()]
            _plans.append(weakref.ref(own))
            if len(_plans) == 1:
                _set_threads([1] * len(_before))
        yield
    finally:
        with _changing:
            _leave(own)


def _leave(own: _Plan) -> None:
    # A function, as Python 3.13 takes the jump back in a comprehension that filters out of the
    # blocks around it: an interrupt there would not set the lock free.
    _plans[:] = [each for each in _plans if each() not in (own, None)]
    if _before and not _plans:
        _set_threads(_before)
        _before.clear()


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
    try:
        for _ in range(count - 1):
            _pool().submit(work.help)
        work.run()
    finally:
        # Where a task raised, tasks are left that nobody shall begin any more. Helpers that have
        # not started find the work at its end, and the others are waited for, since they write to
        # memory of this call.
        work.end()
        work.wait_for_helpers()
        # A helper that has not started stays in the queue of the pool for a while, and keeps
        # nothing.
        results, work.results, work.tasks, work.passed = work.results, [], (), None
    if work.error is not None:
        raise work.error
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
        self.error: BaseException | None = None  # of a helper
        self._helpers = 0  # those that have started
        self._lock = threading.RLock()
        self._asleep: list[threading.Lock] = []  # one for each thread that waits for a change

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
                    with self._lock:
                        self._finish(found)
        except _Ended:
            return
        except BaseException:
            self.end()
            raise
        finally:
            _current.work = before

    def help(self) -> None:
        """Go through tasks in another thread."""
        with self._lock:
            if self._is_ended:
                return
            self._helpers += 1
        try:
            self.run()
        except BaseException as error:
            self.error = self.error or error
        finally:
            with self._lock:
                self._helpers -= 1
                self._wake_all()

    def wait_for_helpers(self) -> None:
        """Wait until no helper is in the middle of a task."""
        while True:
            with self._lock:
                if not self._helpers:
                    return
                changed = self._change()
            changed.acquire()

    def end(self) -> None:
        """Let nobody begin a task any more."""
        with self._lock:
            self._is_ended = True
            self._wake_all()

    def _change(self) -> threading.Lock:
        """A lock that is free after the next change, to be waited for without the lock in hand."""
        changed = threading.Lock()
        changed.acquire()
        self._asleep.append(changed)
        return changed

    def _wake_all(self) -> None:
        self._wake(len(self._asleep))

    def _wake(self, count: int) -> None:
        for changed in self._asleep[:count]:
            with suppress(RuntimeError):  # it was free already, as an interrupt came in between
                changed.release()
            self._asleep.remove(changed)

    def split(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of the parts of a task that runs, which idle threads go through as well."""
        parts = _Parts(tasks)
        with self._lock:
            self._parts.append(parts)
            self._wake_all()
        while self._run_part(parts):
            pass
        while True:
            with self._lock:
                if parts.done == len(tasks):
                    return parts.results
                if self._is_ended:
                    raise _Ended
                changed = self._change()
            changed.acquire()

    def _run_part(self, parts: _Parts) -> bool:
        """Run the next part, if there is one that nobody has begun."""
        with self._lock:
            number = parts.begun
            if number == len(parts.tasks):
                return False
            parts.begun += 1
            if parts.begun == len(parts.tasks):
                self._parts.remove(parts)
        parts.results[number] = parts.tasks[number]()
        with self._lock:
            parts.done += 1
            if parts.done == len(parts.tasks):
                self._wake_all()
        return True

    def _next(self) -> int | _Parts | None:
        """The next task or a task with parts, once there is one; None where nothing is left."""
        while True:
            with self._lock:
                if self._is_ended:
                    return None
                if self._ready and self._is_near(self._ready[0]):
                    return heapq.heappop(self._ready)
                if self._parts:
                    return self._parts[0]
                if self.order is None or self._first == len(self.tasks):
                    return None
                changed = self._change()
            changed.acquire()

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
                self._wake_all()
            elif len(self._ready) > 1:
                self._wake(len(self._ready) - 1)


class _Pool:
    """Threads that wait for functions to call, started one by one as there are functions."""

    def __init__(self, most: int) -> None:
        self._most, self._threads = most, list[threading.Thread]()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function that raises nothing once a thread is idle, if there are threads."""
        if len(self._threads) < self._most:
            # No thread is in the middle of work after `shared`, so the process need not wait.
            thread = threading.Thread(target=self._work, name="tnsim", daemon=True)
            with suppress(RuntimeError):  # the system has no room for another thread
                thread.start()
                self._threads.append(thread)
        if self._threads:
            self._calls.put(call)

    def _work(self) -> None:
        while True:
            self._calls.get()()


@cache
def _pool() -> _Pool:
    return _Pool(max(1, processors() - 1))


if hasattr(os, "register_at_fork"):  # a child process has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
