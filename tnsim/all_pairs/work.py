"""The work of a run: tasks that run here or on an executor, and the loop that writes their results.

*Running tasks.* An executor is anything with `submit(function, *arguments)` that returns futures
with `result` and `add_done_callback`: the executors of `concurrent.futures`, and a
`dask.distributed.Client`. Any failure of an executor is an `ExecutorError`; a `TnsimError` raised
by a task comes out unchanged.

*The loop.* `complete` computes every record that the store lacks and no other process has a lease
of, until the store has all of them.

*Norms, then tiles.* The tasks are pure functions, so they may run anywhere. Their results are
checked, normalised and written here, by the process that called.

*Tasks* go from a job and entries to NumPy blocks of inner products. Arguments are small and
picklable, so a task runs in this process, in another process or on another machine alike. Blocks
prepared from weights (features, or the models read from disk) are kept for the tasks that follow,
see `Job`.
"""

from __future__ import annotations

import contextlib
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
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.preparation import PairwiseRun
from tnsim.all_pairs.result import Doubt, Norms, norm_arrays, norms_in, tile_arrays
from tnsim.all_pairs.sources import Entry
from tnsim.all_pairs.store import Leases, Record, State, Store
from tnsim.all_pairs.ways import Job, NormBlock, Tile, pairs_of, tiles_of
from tnsim.engine import precision
from tnsim.engine.runtime.devices import at_once
from tnsim.errors import ExecutorError, TnsimError, in_one_line
from tnsim.scaled import ScaledSum, taken
from tnsim.sessions import session

B = TypeVar("B", NormBlock, Tile)


K = TypeVar("K", bound=Hashable)
Task = tuple[Callable[..., Any], tuple]
_IN_FLIGHT = 128  # most tasks submitted and not yet done, as waiting tasks take memory
_LOOK = 2.0  # seconds without a result after which the cluster is examined
_PATIENCE = 10.0  # seconds that a cluster may be without workers, which may be (re)starting
_PAUSE = 0.1  # seconds between two looks at the records of which other processes have leases


@contextlib.contextmanager
def forgetting(job: Job) -> Iterator[None]:
    """Forget the blocks of a run at its end; the blocks of other runs stay."""
    try:
        yield
    finally:
        session().blocks.forget(lambda key: key[1] == job.key)


def norms(job: Job, entries: tuple[Entry, ...]) -> NormBlock:
    """Squared norms of some distinct models, and what their means have of them.

    Args:
        job: Settings that all tasks share.
        entries: The models.
    """
    return job.way.norms(job, entries)


def tile(job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Tile:
    """Inner products of all rows with all columns.

    The products of a block with itself are symmetric to the bit. Estimates carry standard errors.

    Args:
        job: Settings that all tasks share.
        rows, columns: Distinct models.

    Returns:
        (rows, columns), or (rows, columns, out) where the job wants slices.
    """
    return job.way.tile(job, rows, columns)


def expected(
    result: Any, kind: type[B], shape: tuple[int, ...], outputs: int | None, advice: str
) -> B:
    """The result of a task. Raises `ExecutorError` where it is no block of this kind and shape.

    Args:
        result: What the executor returned.
        kind: Class of the block.
        shape: Numbers of models along its axes.
        outputs: Outputs that have products of their own; None for sums over outputs.
        advice: Last words of the message.
    """
    if isinstance(result, kind):
        products, beside = result
        if _is_block(products, shape, outputs) and _is_beside(beside, kind, shape):
            return result
    what = "squared norms" if kind is NormBlock else "inner products"
    raise ExecutorError(
        f"the executor returned {type(result).__name__} of another form than the {what} of "
        f"{' x '.join(map(str, shape))} models; {advice}"
    )


def _is_block(value: Any, shape: tuple[int, ...], outputs: int | None) -> bool:
    """Whether a value is a block of finite sums."""
    whole = shape if outputs is None else (*shape, outputs)
    if not isinstance(value, ScaledSum):
        return False
    if not all(_is_array(x, whole) for x in (value.mantissa, value.size)):
        return False
    of_exponent = any(_is_array(value.exponent, form) for form in (shape, whole))
    return of_exponent and all(bool(np.isfinite(array).all()) for array in value)


def _is_beside(value: Any, kind: type, shape: tuple[int, ...]) -> bool:
    """Whether a value is shares of means, NaN allowed, or standard errors, infinity or None too."""
    if kind is NormBlock:
        return _is_array(value, shape)
    return value is None or (_is_array(value, shape) and not np.isnan(value).any())


def _is_array(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is a float64 array of this shape."""
    return isinstance(value, np.ndarray) and (value.shape, value.dtype) == (shape, np.float64)


def completed(
    started: Iterable[tuple[K, Task]],
    executor: Any = None,
    advice: str = "run again",
    together: int = 1,
) -> Iterator[tuple[K, Any]]:
    """Run tasks, here or on an executor, and yield (key, result) as they finish.

    Args:
        started: Tasks as (key, (function, arguments)); the next task is drawn only when it starts.
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
        yield from _here(started, together)
        return
    _check(executor)
    cluster = _Cluster(executor, advice) if _is_dask(executor) else None
    submit = executor.submit if cluster is None else cluster.submit
    waiting = iter(started)
    running: dict[int, tuple[K, Any]] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        if cluster is not None:
            cluster.look()
        while True:
            # Tasks are drawn from the iterator only when there is room: drawing takes a lease, and
            # a lease without work would hold other processes back.
            while len(running) < _IN_FLIGHT and (task := next(waiting, None)) is not None:
                key, (function, arguments) = task
                future = _submit(executor, partial(submit, function, *arguments), advice)
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


def _here(started: Iterable[tuple[K, Task]], together: int) -> Iterator[tuple[K, Any]]:
    """Run tasks here: the first alone, as it compiles the programs of the others, then several."""
    calls = (partial(_answered, key, *task) for key, task in started)
    for first in itertools.islice(calls, 1):
        yield first()
    yield from at_once(calls, together)


def _answered(key: K, function: Callable[..., Any], arguments: tuple) -> tuple[K, Any]:
    return key, function(*arguments)


def _submit(executor: Any, submit: Callable[[], Any], advice: str) -> Any:
    try:
        future = submit()
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
        # Dask says that environments differ, and what of them is in the cause.
        for cause in (error, error.__cause__):
            if isinstance(cause, ImportError):
                what = (
                    "a worker cannot import the code of the networks: give modules of a package "
                    "that is installed there, such as --model package.module:Net"
                )
                raise _failed(what, cause, advice) from error
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
        self._first: Any = None
        self._shared: Any = None

    def submit(self, function: Callable[..., Any], first: Any, *rest: Any) -> Any:
        """Submit a task whose first argument, the job, is often that of the task before.

        A job has the inputs of its metric. As the result of a task of its own it is on the cluster
        once, and is made again where its worker is lost.
        """
        if self._shared is None or first is not self._first:
            self._first, self._shared = first, self._client.submit(_itself, first)
        return self._client.submit(function, self._shared, *rest)

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


def _itself(value: Any) -> Any:
    return value


def _failed(what: str, error: BaseException, advice: str) -> ExecutorError:
    reason = f"{type(error).__name__}: {in_one_line(error)}".rstrip(": ")
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


class Work(NamedTuple):
    """Records of one kind, and how they are computed and written.

    Args:
        run: Settings and plan.
        store: Store to which results are written, and from which the norms of tiles are read.
        records: Squared norms, or tiles the norms of which are in the store.
    """

    run: PairwiseRun
    store: Store
    records: Sequence[Record]

    @property
    def together(self) -> int:
        """The number of tasks that may run at once where there is no executor."""
        return 1 if self.records[0].columns is None else tiles_of(self.run.estimate).together

    def task(self, record: Record) -> Task:
        """The function that computes a record, and its arguments."""
        function = norms if record.columns is None else tile
        return function, (self.run.job, *self._entries(record))

    def write(self, record: Record, result: Any) -> list[Doubt]:
        """Check the result of a task and write it, and return the doubts about its numbers.

        Raises:
            ExecutorError: The result is something other than that of the task.
            ResultError: A model is the zero function, or the largest error leaves no digit.
        """
        entries, arithmetic = self._entries(record), self.run.arithmetic
        form = tuple(map(len, entries)), self.store.attrs["outputs"], advice(self.store.path)
        if record.columns is None:
            norms = expected(result, NormBlock, *form)
            for i, entry in enumerate(entries[0]):
                source, centred = entry.source, entry.source.centred is not None
                precision.check_norm(
                    taken(norms.squared, i), source.name, entry.terms > 1, arithmetic, centred
                )
            arrays = norm_arrays(norms.squared, self.run.job.setting.slices)
            self.store.write(record, {**arrays, "mean_share": norms.mean_share})
            return []
        found = expected(result, Tile, *form)
        same = np.array(record.rows)[:, None] == np.array(record.columns)
        arrays, error = tile_arrays(found.products, *self._norms(record), same, arithmetic)
        if found.standard_error is not None:
            arrays["standard_error"] = np.where(same, 0.0, found.standard_error)
        # The pair of the largest error stands for the tile in warnings.
        worst = np.unravel_index(np.argmax(error), error.shape)
        names = [side[n].source.name for side, n in zip(entries, worst, strict=True)]
        doubt = Doubt(float(error[worst]), f"the cosine of {' and '.join(names)}")
        precision.refuse(*doubt, arithmetic)
        self.store.write(record, arrays)
        return [doubt]

    def _entries(self, record: Record) -> tuple[tuple[Entry, ...], ...]:
        """The models of the rows and, of a tile, those of the columns."""
        sides, models = self.run.models.sides, [(record.side, record.rows)]
        if record.columns is not None:
            models.append(("b", record.columns))
        return tuple(tuple(sides[side][model] for model in digests) for side, digests in models)

    def _norms(self, record: Record) -> tuple[Norms, Norms]:
        """The norms of the rows and columns of a tile, which were written before any tile."""
        both, store = [], self.store
        for side, models in (("a", record.rows), ("b", record.columns or ())):
            name = side if side in store.places else "a"
            at = store.at(side, models)
            both.append(norms_in(store.arrays, name, at, store.attrs["outputs"] is not None))
        return both[0], both[1]


def complete(work: Work, leases: Leases, executor: Any, bar: Any) -> list[Doubt]:
    """Compute every record that the store lacks, and wait for the records of other processes.

    Args:
        work: Records, and how they are computed.
        leases: Leases of this process.
        executor: Runs the tasks; None to run them here.
        bar: A progress bar, advanced by the pairs of every record, whichever process finished it.

    Returns:
        The doubts about the numbers computed by this call.

    Raises:
        ExecutorError: The executor fails, or returns something other than the task's result.
        TnsimError: The store cannot be written.
        Exception: A task raised it.
    """
    store, pending = work.store, list(work.records)
    doubts: list[Doubt] = []
    while pending:
        # Every turn computes what nobody else has a lease of and collects the rest, which is looked
        # at again after a pause: another process may have finished it, or died.
        elsewhere: list[Record] = []
        started = _leased(pending, elsewhere, work, leases, bar)
        for record, result in completed(started, executor, advice(store.path), work.together):
            doubts += work.write(record, result)
            leases.release(record.label)
            bar.update(pairs_in(store, record))
        if elsewhere:
            time.sleep(_PAUSE)
        pending = elsewhere
    return doubts


def advice(path: Path | None) -> str:
    """The advice that messages give after a run that ended early, with its store or none."""
    if path is None:
        return "run again (with store= a run goes on where it ended)"
    return f"run again to go on, finished tiles are kept in {path}"


def _leased(
    pending: Sequence[Record], elsewhere: list[Record], work: Work, leases: Leases, bar: Any
) -> Iterator[tuple[Record, Task]]:
    """The tasks of which this process gets leases; records of other processes go to `elsewhere`.

    The generator never waits: results are written between two tasks drawn from it, so a wait here
    would hold back results that are finished.
    """
    store = work.store
    for record in pending:
        if store.fetch(record) is State.WHOLE:
            bar.update(pairs_in(store, record))
            continue
        with stores.writing(store.path):
            is_ours = leases.take(record.label)
        if not is_ours:
            elsewhere.append(record)
            continue
        if store.fetch(record) is State.WHOLE:  # finished between the look and the lease
            leases.release(record.label)
            bar.update(pairs_in(store, record))
            continue
        stores.log_start(store, record.label)
        yield record, work.task(record)


def pairs_in(store: Store, record: Record) -> int:
    """The number of pairs of a record; squared norms have none."""
    is_mirrored = record.rows == record.columns and "b" not in store.places
    return pairs_of(len(record.rows), len(record.columns or ()), is_mirrored)
