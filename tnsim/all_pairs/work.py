"""The work of a run: tasks that run here or on an executor, and the loop that writes their results.

*Running tasks.* An executor is anything with `submit(function, *arguments)` that returns futures
with `result` and `add_done_callback`: the executors of `concurrent.futures`, and a
`dask.distributed.Client`. Any failure of an executor is an `ExecutorError`; a `TnsimError` raised
by a task comes out unchanged.

*The loop.* `complete` computes every record that the store lacks and no other process has claimed,
until the store has all of them.

*Norms, then tiles.* The tasks are pure functions (`tasks`), so they may run anywhere. Their results
are checked, normalised and written here, by the process that called.
"""

from __future__ import annotations

import itertools
import pkgutil
import queue
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import tnsim
from tnsim.all_pairs import store as store_module
from tnsim.all_pairs import store as stores
from tnsim.all_pairs import tasks
from tnsim.all_pairs.claims import Claims
from tnsim.all_pairs.forward_runs import Estimated
from tnsim.all_pairs.normalise import Doubt, Norms, norm_arrays, norms_in, tile_arrays
from tnsim.all_pairs.preparation import PairwiseRun, Side
from tnsim.all_pairs.run_plan import tiles_of
from tnsim.all_pairs.sources import digests
from tnsim.all_pairs.store import Record, State, Store
from tnsim.engine import precision
from tnsim.engine.runtime.devices import at_once
from tnsim.errors import ExecutorError, TnsimError
from tnsim.scaled import taken

K = TypeVar("K", bound=Hashable)
Task = tuple[Callable[..., Any], tuple]
_IN_FLIGHT = 128  # most tasks submitted and not yet done, as waiting tasks take memory
_LOOK = 2.0  # seconds without a result after which the cluster is examined
_PATIENCE = 10.0  # seconds that a cluster may be without workers, which may be (re)starting
_PAUSE = 0.1  # seconds between two looks at the records that other processes have claimed


def completed(
    tasks: Iterable[tuple[K, Task]],
    executor: Any = None,
    advice: str = "run again",
    together: int = 1,
) -> Iterator[tuple[K, Any]]:
    """Run tasks, here or on an executor, and yield (key, result) as they finish.

    Args:
        tasks: Tasks as (key, (function, arguments)); the next task is drawn only when it starts.
        executor: Runs the tasks; None to run them here.
        advice: Last words of an error message about the executor.
        together: Number of tasks that may run at once here, in threads.

    Raises:
        ExecutorError: The executor cannot be used, was lost or shut down, or failed or cancelled
            a task.
        TnsimError: A task raised it.

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
            # Tasks are drawn from the iterator only when there is room: drawing claims a record,
            # and a claim without work would hold other processes back.
            while len(running) < _IN_FLIGHT and (task := next(waiting, None)) is not None:
                key, (function, arguments) = task
                future = _submit(executor, function, arguments, advice)
                running[id(future)] = (key, future)
                # Futures report their end by name into a queue, so results come in the order in
                # which they are finished.
                future.add_done_callback(lambda _, name=id(future): done.put(name))
            if not running:
                return
            key, future = running.pop(_next(done, cluster))
            yield key, _result(future, advice)
    finally:
        for _, future in running.values():
            future.cancel()


def _here(tasks: Iterable[tuple[K, Task]], together: int) -> Iterator[tuple[K, Any]]:
    """Run tasks here: the first alone, as it compiles the programs of the others, then several."""
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
    """The next finished task; during a longer wait, a cluster is examined now and then."""
    if cluster is None:
        return done.get()
    while True:
        try:
            return done.get(timeout=_LOOK)
        except queue.Empty:
            cluster.look()


class _Cluster:
    """A check that a Dask cluster has workers, and that they can run tasks of tnsim.

    A worker that cannot import tnsim cannot read a task, and never answers. So every worker is
    asked for its version of tnsim first, by a function of the standard library.
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
            # Any other answer: the worker is gone, or is asked again at the next look.

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


class PendingWork(NamedTuple):
    """Records of one kind, with the functions that compute and write them.

    Args:
        records: Records to compute.
        task: Returns the function that computes a record, and its arguments.
        write: Checks a result, writes it with its marker, and returns the doubts about its numbers.
        done: Is called with every finished record, whichever process finished it.
        together: Number of tasks that may run at once where there is no executor.
    """

    records: Sequence[Record]
    task: Callable[[Record], Task]
    write: Callable[[Record, Any], list[Doubt]]
    done: Callable[[Record], Any]
    together: int = 1


def complete(work: PendingWork, store: Store, claims: Claims, executor: Any) -> list[Doubt]:
    """Compute every record that the store lacks, and wait for the records of other processes.

    Args:
        work: Records, and how they are computed.
        store: Store of the results.
        claims: Claims of this process on records.
        executor: Runs the tasks; None to run them here.

    Returns:
        The doubts about the numbers computed by this call.

    Raises:
        ExecutorError: The executor fails, or returns something other than the task's result.
        TnsimError: The store cannot be written.
        Exception: A task raised it.
    """
    pending = list(work.records)
    doubts: list[Doubt] = []
    while pending:
        # Every turn computes what nobody else has claimed and collects the rest, which is looked at
        # again after a pause: another process may have finished it, or died.
        elsewhere: list[Record] = []
        tasks = _claimed(pending, elsewhere, work, store, claims)
        finished = completed(tasks, executor, advice(store.path), work.together)
        for record, result in finished:
            doubts += work.write(record, result)
            claims.release(record.label)
            work.done(record)
        if elsewhere:
            time.sleep(_PAUSE)
        pending = elsewhere
    return doubts


def advice(path: Path | None) -> str:
    """The advice that messages give after a run that ended early, with its store or none."""
    if path is None:
        return "run again (with store= a run goes on where it ended)"
    return f"run again to go on, finished tiles are kept in {path}"


def _claimed(
    pending: Sequence[Record],
    elsewhere: list[Record],
    work: PendingWork,
    store: Store,
    claims: Claims,
) -> Iterator[tuple[Record, Task]]:
    """The tasks that this process claims; records claimed by other processes go to `elsewhere`.

    The generator never waits: results are written between two tasks drawn from it, so a wait here
    would hold back results that are finished.
    """
    for record in pending:
        if store.fetch(record) is State.WHOLE:
            work.done(record)
            continue
        with store_module.writing(store.path):
            is_ours = claims.take(record.label)
        if not is_ours:
            elsewhere.append(record)
            continue
        if store.fetch(record) is State.WHOLE:  # finished between the look and the claim
            claims.release(record.label)
            work.done(record)
            continue
        stores.log_start(store, record.label)
        yield record, work.task(record)


def units_of_work(run: PairwiseRun, target: Store, bar: Any) -> list[PendingWork]:
    """The work on all norms, then on the tiles that they normalise.

    Args:
        run: Models, settings and plan.
        target: Store to which results are written, and from which norms are read.
        bar: A progress bar, advanced by the number of pairs of every finished tile.
    """
    layout = target.layout
    sides = {side.name: side for side in (run.rows, run.columns)}
    norms = [_norm_work(run, target, sides[name]) for name in layout.sides]
    return [*norms, _tile_work(run, target, bar)]


def _norm_work(run: PairwiseRun, target: Store, side: Side) -> PendingWork:
    def task(record: Record) -> Task:
        return tasks.norms, (run.job, run.block(side, *record.blocks), run.arithmetic)

    def write(record: Record, result: Any) -> list[Doubt]:
        _write_norms(run, target, side, record, result)
        return []

    return PendingWork(target.layout.norms(side.name), task, write, lambda record: None)


def _tile_work(run: PairwiseRun, target: Store, bar: Any) -> PendingWork:
    def task(record: Record) -> Task:
        i, j = record.blocks
        models = run.block(run.rows, i), run.block(run.columns, j)
        return tasks.tile, (run.job, *models, _norms_of(run, target, i, j), run.arithmetic)

    def write(record: Record, result: Any) -> list[Doubt]:
        return [_write_tile(run, target, record, result)]

    def done(record: Record) -> None:
        bar.update(run.pairs_in(*record.blocks))

    together = tiles_of(run.estimate).together
    return PendingWork(target.layout.tiles(), task, write, done, together)


def _write_norms(run: PairwiseRun, target: Store, side: Side, record: Record, result: Any) -> None:
    """Write squared norms and the sizes of their sums. Raises `ModelError` where one is zero."""
    entries = run.block(side, *record.blocks)
    norms = tasks.expect_norms(result, (len(entries),), target.layout.outputs, advice(target.path))
    for i, entry in enumerate(entries):
        precision.check_norm(taken(norms, i), entry.source.name, entry.terms > 1, run.arithmetic)
    target.write(record, list(norm_arrays(norms, run.job.setting.slices).values()))


def _write_tile(run: PairwiseRun, target: Store, record: Record, result: Any) -> Doubt:
    """Normalise a tile and write it, also mirrored where rows and columns are a single list.

    Returns:
        The largest error bound, and the cosine to which it belongs.

    Raises:
        ResultError: The largest error leaves no digit.
    """
    i, j = record.blocks
    at, to = target.layout.block(i), target.layout.block(j)
    rows, columns = run.block(run.rows, i), run.block(run.columns, j)
    shape = len(rows), len(columns)
    products = tasks.expect_products(result, shape, target.layout.outputs, advice(target.path))
    estimated = None
    if isinstance(products, Estimated):
        products, estimated = products
    same = digests(rows)[:, None] == digests(columns)
    blocks, error = tile_arrays(products, *_norms_of(run, target, i, j), same, run.arithmetic)
    if estimated is not None:
        blocks["standard_error"] = np.where(same, 0.0, estimated)
    # The pair of the largest error stands for the tile in warnings.
    row, column = np.unravel_index(np.argmax(error), error.shape)
    what = f"the cosine of {rows[row].source.name} and {columns[column].source.name}"
    doubt = Doubt(float(error[row, column]), what)
    precision.refuse(*doubt, run.arithmetic)
    values = []
    # Regions beside the place of the tile are its mirror image.
    for name, place in record.regions:
        block = blocks[name]
        values.append(block if place == (at, to) else np.swapaxes(block, 0, 1))
    target.write(record, values)
    return doubt


def _norms_of(run: PairwiseRun, target: Store, i: int, j: int) -> tuple[Norms, Norms]:
    """The norms of the rows and columns of tile (i, j), which were written before any tile."""
    at, to = target.layout.block(i), target.layout.block(j)
    slices = run.job.setting.slices
    bra = norms_in(target.arrays, "a", at, slices)
    return bra, norms_in(target.arrays, "a" if run.symmetric else "b", to, slices)
