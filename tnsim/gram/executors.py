"""Where tasks run. In: functions and arguments by key. Out: results by key, as they come.

An executor is anything with `submit(function, *arguments)` whose futures have `result` and
`add_done_callback`: those of `concurrent.futures`, and a `dask.distributed.Client`. Whatever goes
wrong with one is an `ExecutorError`; what a task itself refuses comes out as it is.
"""

from __future__ import annotations

import itertools
import pkgutil
import queue
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, TypeVar

import tnsim
from tnsim.engine.concurrency import at_once
from tnsim.errors import ExecutorError, TnsimError

K = TypeVar("K", bound=Hashable)
Task = tuple[Callable[..., Any], tuple]
_IN_FLIGHT = 128  # tasks submitted and not yet done: what waits costs memory
_LOOK = 2.0  # seconds without a result after which the cluster is looked at
_PATIENCE = 10.0  # seconds that a cluster may be without workers: they start, and start again


def completed(
    tasks: Iterable[tuple[K, Task]],
    executor: Any = None,
    advice: str = "run again",
    together: int = 1,
) -> Iterator[tuple[K, Any]]:
    """Run tasks, here or on an executor, and give (key, result) as they finish.

    Args:
        tasks: (key, (function, arguments)); drawn from only as tasks are started.
        executor: None to run here.
        advice: What an error about the executor ends with.
        together: How many may run at once here, in threads.

    Raises:
        ExecutorError: The executor cannot be used, was lost or shut down, or failed or cancelled
            a task.
        TnsimError: As a task raises it.

    Example:
        >>> dict(completed([("sum", (sum, ([1, 2],)))]))
        {'sum': 3}
    """
    if executor is None:
        yield from _here(tasks, together)
        return
    _check(executor)
    cluster = _Cluster(executor, advice) if _is_dask(executor) else None
    waiting = iter(tasks)
    running: dict[int, tuple[K, Any]] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        if cluster is not None:
            cluster.look()
        while True:
            while len(running) < _IN_FLIGHT and (task := next(waiting, None)) is not None:
                key, (function, arguments) = task
                future = _submit(executor, function, arguments, advice)
                running[id(future)] = (key, future)
                future.add_done_callback(lambda _, name=id(future): done.put(name))
            if not running:
                return
            key, future = running.pop(_next(done, cluster))
            yield key, _result(future, advice)
    finally:
        for _, future in running.values():
            future.cancel()


def _here(tasks: Iterable[tuple[K, Task]], together: int) -> Iterator[tuple[K, Any]]:
    """The first task by itself, as it compiles what the others run, then several at once."""
    calls = (partial(_answered, key, *task) for key, task in tasks)
    for first in itertools.islice(calls, 1):
        yield first()
    yield from at_once(calls, together)


def _answered(key: K, function: Callable[..., Any], arguments: tuple) -> tuple[K, Any]:
    return key, function(*arguments)


def _submit(executor: Any, function: Callable[..., Any], arguments: tuple, advice: str) -> Any:
    try:
        future = executor.submit(function, *arguments)
    except Exception as error:
        raise _failed(f"{type(executor).__name__} took no task", error, advice) from error
    if not callable(getattr(future, "add_done_callback", None)):
        raise ExecutorError(
            f"{type(executor).__name__}.submit must return a future, found {type(future).__name__}"
        )
    return future


def _result(future: Any, advice: str) -> Any:
    try:
        return future.result()
    except TnsimError:
        raise
    except CancelledError as error:
        raise _failed("the executor cancelled a task", error, advice) from error
    except Exception as error:
        raise _failed("a task failed on the executor", error, advice) from error


def _next(done: queue.SimpleQueue[int], cluster: _Cluster | None) -> int:
    """The next task that is done; while there is none, a cluster is looked at now and then."""
    if cluster is None:
        return done.get()
    while True:
        try:
            return done.get(timeout=_LOOK)
        except queue.Empty:
            cluster.look()


class _Cluster:
    """The workers of a Dask client: that there are any, and that they can run our tasks.

    A worker that cannot import tnsim never answers, as its messages cannot be read there. So
    every worker is asked for the version first, by a function of the standard library.
    """

    def __init__(self, client: Any, advice: str) -> None:
        self._client = client
        self._advice = advice
        self._able: set[str] = set()

    def look(self) -> None:
        """Raise `ExecutorError` where the cluster is lost, empty, or has an unfit worker."""
        workers = self._workers()
        since = time.monotonic()
        while not workers:
            if time.monotonic() - since > _PATIENCE:
                raise ExecutorError(
                    f"the Dask cluster has no workers; start some, then {self._advice}"
                )
            time.sleep(0.2)
            workers = self._workers()
        if new := sorted(workers - self._able):
            self._ask(new)

    def _workers(self) -> set[str]:
        try:
            return set(self._client.nthreads())
        except Exception as error:
            raise _failed("the Dask scheduler was lost", error, self._advice) from error

    def _ask(self, workers: list[str]) -> None:
        question = (pkgutil.resolve_name, "tnsim:__version__")
        try:
            answers = self._client.run(*question, workers=workers, on_error="return")
        except Exception as error:
            raise _failed("the Dask cluster was lost", error, self._advice) from error
        for worker, answer in answers.items():
            if answer == tnsim.__version__:
                self._able.add(worker)
            elif isinstance(answer, str):
                raise self._unable(worker, f"has tnsim {answer}")
            elif isinstance(answer, ImportError | AttributeError):
                raise self._unable(worker, f"cannot import tnsim ({answer})")
            # anything else: it is gone, or will be asked again

    def _unable(self, worker: str, what: str) -> ExecutorError:
        version = tnsim.__version__
        return ExecutorError(
            f"the Dask worker {worker} {what}, and this process runs tnsim {version}: install "
            "that version in the environment of the workers "
            f"(pip install 'tnsim[pairwise]=={version}'), start them again, then {self._advice}"
        )


def _failed(what: str, error: BaseException, advice: str) -> ExecutorError:
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    return ExecutorError(f"{what} ({reason}); {advice}")


def _is_dask(executor: Any) -> bool:
    return all(callable(getattr(executor, name, None)) for name in ("nthreads", "run", "scatter"))


def _check(executor: Any) -> None:
    if not callable(getattr(executor, "submit", None)):
        raise ExecutorError(
            f"executor must have submit(function, *arguments), found {type(executor).__name__}"
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ExecutorError(
            "this process pool forks, and a fork after JAX has started may deadlock; "
            "use ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))"
        )
