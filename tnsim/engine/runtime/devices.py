"""Devices, memory and threads of the machine that a plan runs on.

**Devices.** Arrays with a leading axis of models are laid over all local devices. JAX shards
compiled programs by the placement of their arguments, so placement is all there is to using several
devices. With a single device nothing is copied or padded.

**Memory.** On an accelerator, free memory is what its allocator has left. On a CPU three limits end
a process that exceeds them: the memory of the machine; the control group of a container or a job
(version 1 or 2; every group above it has a limit too); and the address space of the process
(`ulimit -v`). The least counts. Systems other than Linux have no control groups, so there the
memory of the machine counts.

**Threads of XLA.** On a CPU XLA multiplies a batch of small matrices on one core, whatever the size
of the batch. Compiled programs release Python's lock, so calls from several threads use several
cores. An accelerator works through one compiled program after another, so threads would gain
nothing there.

**Threads of the process** share the tasks of a pool. A single large product takes the threads of
BLAS. Where several tasks run at once instead, BLAS takes one thread in each of them
(`one_blas_thread`). Tasks may wait for each other (`Order`), and a task may be cut into parts while
it runs.

*Interrupts.* Python raises a `KeyboardInterrupt` between any two steps of the main thread's Python
code, in functions of the standard library too: one that is raised as `Condition.__exit__` begins
leaves the condition locked, and all threads that wait for it wait for ever. So locks are those of
C, which a `with` takes and gives back in one step, and a thread sleeps with none of them in hand.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from threadpoolctl import ThreadpoolController

from tnsim.errors import ExecutorError, TooLarge

BY_MODEL = PartitionSpec("models")
_THREAD_BYTES = 136 * 2**20
"""Bytes of addresses that a new thread takes: its stack, and twice a glibc heap to align one.
XLA compiles with as many threads as there are cores, and as many programs are compiled at once."""
_HEAP_BYTES, _COMPILING_BYTES = 72 * 2**20, 112 * 2**20
"""Bytes of addresses: the stack and heap of a started thread; compiling without its threads."""
_XLA_THREADS, _XLA_THREADS_PER_PROCESSOR = 9, 5
"""Threads of a process that has compiled, fixed and per processor: 19 on two processors."""
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
T = TypeVar("T")
_CONFIG: Any = jax.config


_changing = threading.Lock()
_before: list[int] = []  # numbers of threads as the first of them began, until they are set again

_current = threading.local()
"""`work` of a thread: the tasks, some of which wait for others, that the thread goes through."""


def backend() -> str:
    """The platform on which JAX computes, such as "cpu"; asking starts XLA's threads.

    Raises:
        ExecutorError: JAX finds no device of the platforms that it was told to use.
        TooLarge: The limit of the process leaves less than XLA takes to begin.

    Example:
        >>> isinstance(backend(), str)
        True
    """
    _check_beginning()
    try:
        return jax.default_backend()
    except (AssertionError, RuntimeError) as error:  # JAX's errors for a platform that is not there
        chosen: Any = jax.config
        raise ExecutorError(
            f"JAX finds no device of JAX_PLATFORMS={chosen.jax_platforms}: "
            f"{str(error) or 'this machine has none'}; name another platform, such as cpu, or none"
        ) from error


def device() -> str:
    """The name of the device in results: "cpu", or platform and kind of an accelerator.

    Example:
        >>> isinstance(device(), str)
        True
    """
    if backend() == "cpu":
        return "cpu"
    first = jax.local_devices()[0]
    return f"{first.platform}: {first.device_kind}"


@cache
def mesh() -> Mesh:
    """The mesh of all local devices, in a row."""
    return Mesh(np.array(jax.local_devices()), ("models",))


def spread(tree: Any) -> Any:
    """Arrays with their first axis divided over the devices.

    The last entry is repeated until the length of the axis is a multiple of the number of devices.
    With a single device nothing is repeated.
    """
    if mesh().size == 1:
        return jax.device_put(tree)
    return jax.device_put(jax.tree.map(_padded, tree), NamedSharding(mesh(), BY_MODEL))


def replicated(tree: Any) -> Any:
    """The arrays, copied to every device."""
    return jax.device_put(tree, NamedSharding(mesh(), PartitionSpec()))


def _padded(array: Any) -> Any:
    """The array with its last entry repeated, of a length that the devices divide."""
    # The result of a repeated entry is dropped by the caller, who knows the length.
    missing = -len(array) % mesh().size
    if not missing:
        return array
    return jax.numpy.concatenate([array, jax.numpy.repeat(array[-1:], missing, axis=0)])


def available_bytes(compiles: bool = True) -> int | None:
    """Free bytes on JAX's device, or of the machine on a CPU; None where nothing is known.

    Args:
        compiles: Whether XLA's threads take addresses of the process as well.
    """
    if can_compile() and backend() != "cpu":
        stats = jax.devices()[0].memory_stats()
        # Some platforms have no such statistics; then the limits of the host are all that is known.
        if stats and "bytes_limit" in stats:
            return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return host_bytes(PROC, CGROUPS, compiles)


def host_bytes(proc: Path, cgroups: Path, compiles: bool = True) -> int | None:
    """Free bytes: the least of machine, control groups and address space; None without figures.

    Args:
        proc: Mount point of the process file system, which names the control groups.
        cgroups: Mount point of the control groups.
        compiles: Whether threads that compile are going to take addresses.
    """
    # Threads that XLA has not started yet will take addresses but no memory, so they count against
    # the address space and not against the other limits.
    addresses = _addresses_left()
    if compiles and addresses is not None:
        # XLA's threads, and as many again of the pool that compiles several programs at once.
        addresses -= 2 * (os.cpu_count() or 1) * _THREAD_BYTES
    # What the system can give without swapping.
    machine = _told(lambda: psutil.virtual_memory().available)
    limits = [machine, addresses, *_control_groups(proc, cgroups)]
    known = [limit for limit in limits if limit is not None]
    # A process may hold more than a limit that was lowered afterwards.
    return max(0, min(known)) if known else None


def check_addresses() -> None:
    """Refuse to compile within too little address space, where XLA would end the process.

    Raises:
        TooLarge: The limit of the process leaves less than compiling takes.
    """
    left = _addresses_left()
    if left is None:
        return
    needed = _compiling_addresses()
    if needed > left:
        raise TooLarge(
            f"the address space of the process (ulimit -v) has {left / 2**20:,.0f} MiB left, and "
            f"compiling takes {needed / 2**20:,.0f} MiB of it; allow more, as by: "
            "ulimit -v unlimited"
        )


@cache
def _check_beginning() -> None:
    """Refuse to start XLA within too little address space; once it has started, ask no more."""
    check_addresses()


def can_compile() -> bool:
    """Whether the address space is large enough to compile in.

    Example:
        >>> can_compile() in (True, False)
        True
    """
    left = _addresses_left()
    return left is None or _compiling_addresses() <= left


def _compiling_addresses() -> int:
    """Bytes of addresses that compiling takes in this process.

    The first program that is compiled starts XLA's threads, each with a stack and a heap of its
    own, however small the program is. Later programs take only the addresses of compiling itself.
    """
    # Threads that run already have their stacks.
    started = _told(lambda: psutil.Process().num_threads()) or 0
    threads = _XLA_THREADS + _XLA_THREADS_PER_PROCESSOR * (os.cpu_count() or 1) - started
    return max(0, threads) * _HEAP_BYTES + _COMPILING_BYTES


def give_back_freed() -> None:
    """Return freed memory to the system, where the C library is glibc.

    glibc keeps freed arrays below 32 MiB for later allocations. Stages differ in the sizes of their
    arrays, so the memory of one stage seldom fits the next, and the process would hold up to half
    more than is alive.
    """
    # The argument is the number of bytes to keep at the end of the heap.
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None


def _addresses_left() -> int | None:
    """Bytes of addresses that the process may still take; None without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    taken = _told(lambda: psutil.Process().memory_info().vms)
    return None if taken is None else limit - taken


def _told(ask: Callable[[], int]) -> int | None:
    """A figure of the system, None where it does not tell, as without /proc."""
    try:
        return ask()
    except (KeyError, NotImplementedError, OSError, ValueError, psutil.Error):
        return None


class _Files(NamedTuple):
    """Names in one version of control groups.

    Attributes:
        limit: File of the memory limit.
        usage: File of the memory in use.
        reclaimable: Entry of `memory.stat` for file cache that is given up under pressure.
    """

    limit: str
    usage: str
    reclaimable: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def _control_groups(proc: Path, cgroups: Path) -> Iterator[int | None]:
    """Bytes left under each memory limit on this process: of its group and of all groups above."""
    # Lines are "number:controllers:path". In version 2 a process has a single line, numbered 0 and
    # without controllers; in version 1 there is a line for each hierarchy, and only that of the
    # memory controller matters.
    for line in _lines(proc / "self" / "cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        number, controllers, path = fields
        if number == "0" and not controllers:
            yield from _up_to_the_root(cgroups, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _up_to_the_root(cgroups / "memory", path, _VERSION_1)


def _up_to_the_root(mount: Path, path: str, files: _Files) -> Iterator[int | None]:
    """Bytes left in a group and in every group above it.

    Inside a container the path may be that of the host; a folder not mounted here gives None.
    """
    # From the group itself, with all parts of the path, to the root of the hierarchy, without any.
    parts = path.strip("/").split("/")
    for depth in range(len(parts), -1, -1):
        yield _left(mount.joinpath(*parts[:depth]), files)


def _left(group: Path, files: _Files) -> int | None:
    """The limit of a group less its usage; None without a limit ("max", or a missing file)."""
    limit, usage = _numbers(group / files.limit), _numbers(group / files.usage)
    if not limit or not usage:
        return None
    # The kernel counts file cache as usage but gives it up before it ends a process.
    return limit[0] - usage[0] + _table(group / "memory.stat").get(files.reclaimable, 0)


def _table(path: Path) -> dict[str, int]:
    """Name -> number, from the lines of a file that hold both."""
    fields = [line.split() for line in _lines(path)]
    return {row[0]: int(row[1]) for row in fields if len(row) > 1 and row[1].isdigit()}


def _numbers(path: Path) -> list[int]:
    """The whole numbers in a file; none where the file holds anything else."""
    words = " ".join(_lines(path)).split()
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []


def _lines(path: Path) -> list[str]:
    """The lines of a file, none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def cores() -> int:
    """The number of calls that gain by running at once; 1 on an accelerator."""
    return processors() if backend() == "cpu" else 1


@cache
def blas_libraries() -> list[Any]:
    """Controllers of the BLAS libraries of the process, which are called without their manager:
    it looks through all libraries at every change, longer than a small plan takes."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


def processors() -> int:
    """The number of cores that this process may use, often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def at_once(calls: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """The results of calls, in the order of the calls.

    Args:
        calls: Functions to call, each in a thread of the pool.
        most: Largest number of calls that are started and not yet yielded. The limit bounds memory
            and does not depend on the number of cores.

    Yields:
        The result of each call.

    Example:
        >>> list(at_once([lambda: 1, lambda: 2, lambda: 3], most=2))
        [1, 2, 3]
    """
    if cores() < 2 or most < 2:
        yield from (call() for call in calls)
        return
    wide = _CONFIG.jax_enable_x64

    def under_same_settings(call: Callable[[], T]) -> T:
        with jax.enable_x64(wide):  # settings of JAX hold for one thread
            return call()

    waiting: deque[Future[T]] = deque()
    # More threads than cores: three calls on two cores then take 1.5 times one call, not twice.
    with ThreadPoolExecutor(min(most, 2 * cores())) as pool:
        # A window of `most` calls slides over the sequence: a further call starts when the oldest
        # result has been taken, so results that wait for their turn stay few. `calls` may be a
        # generator that makes arguments only when it is asked.
        for call in calls:
            waiting.append(pool.submit(under_same_settings, call))
            if len(waiting) == most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_plans: list[weakref.ref[_Plan]] = []  # those that run


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
