"""Where tasks run. In: functions and arguments by key. Out: results by key, as they come.

An executor is anything with `submit(function, *arguments)` whose futures have `result` and
`add_done_callback`: those of `concurrent.futures`, and a `dask.distributed.Client`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from typing import Any, TypeVar

from tnsim.errors import TnsimError

K = TypeVar("K", bound=Hashable)
Task = tuple[Callable[..., Any], tuple]
_IN_FLIGHT = 128  # tasks submitted and not yet done: what waits costs memory


def completed(tasks: Iterable[tuple[K, Task]], executor: Any = None) -> Iterator[tuple[K, Any]]:
    """Run tasks, here one after the other or on an executor, and give (key, result) as they finish.

    `tasks` is drawn from only as tasks are started. Raises what a task raises, `TnsimError` when the executor
    cannot be used.
    """
    if executor is None:
        for key, (function, arguments) in tasks:
            yield key, function(*arguments)
        return
    _check(executor)
    waiting = iter(tasks)
    running: dict[Any, K] = {}
    done: queue.SimpleQueue = queue.SimpleQueue()
    try:
        while True:
            while len(running) < _IN_FLIGHT and (task := next(waiting, None)) is not None:
                key, (function, arguments) = task
                future = executor.submit(function, *arguments)
                running[id(future)] = (key, future)
                future.add_done_callback(lambda finished, name=id(future): done.put(name))
            if not running:
                return
            key, future = running.pop(done.get())
            yield key, future.result()
    except BrokenExecutor as error:
        raise TnsimError(
            f"the executor lost its workers ({error}); with a store, run again to go on"
        ) from error
    finally:
        for _, future in running.values():
            future.cancel()


def _check(executor: Any) -> None:
    if not callable(getattr(executor, "submit", None)):
        raise TnsimError(
            f"executor must have submit(function, *arguments), found {type(executor).__name__}"
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise TnsimError(
            "this process pool forks, and a fork after JAX has started may deadlock; "
            "use ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))"
        )
