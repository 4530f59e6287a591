"""The loop of a run. In: records, tasks that compute them. Out: a store that has them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tnsim.gram import executors, zarr_files
from tnsim.gram import store as stores
from tnsim.gram.claims import Claims
from tnsim.gram.layout import Record
from tnsim.gram.normalise import Doubt
from tnsim.gram.store import State, Store

_PAUSE = 0.1  # seconds between two looks at what other processes have in hand


class Work(NamedTuple):
    """Records of one kind: the task that computes one, and what is done with its result.

    Args:
        records: What is to be computed.
        task: Gives the function that computes a record, and its arguments.
        write: Checks, keeps and marks a result, and says what errors its numbers may have.
        done: Is told of every record, whoever finished it.
        together: How many tasks may run at once where there is no executor.
    """

    records: Sequence[Record]
    task: Callable[[Record], executors.Task]
    write: Callable[[Record, Any], list[Doubt]]
    done: Callable[[Record], Any]
    together: int = 1


def complete(work: Work, store: Store, claims: Claims, executor: Any) -> list[Doubt]:
    """Compute every record that the store lacks, and wait for those that others have in hand.

    Args:
        work: The records, and how they are computed.
        store: Where results are kept.
        claims: Which records this process has in hand.
        executor: Runs the tasks; None for here and now.

    Returns:
        The doubts about what was computed here.

    Raises:
        ExecutorError: The executor fails, or returns something else.
        TnsimError: The store cannot be written.
        Exception: Whatever a task raises.
    """
    pending = list(work.records)
    doubts: list[Doubt] = []
    while pending:
        elsewhere: list[Record] = []
        tasks = _claimed(pending, elsewhere, work, store, claims)
        finished = executors.completed(tasks, executor, advice(store), work.together)
        for record, result in finished:
            doubts += work.write(record, result)
            claims.release(record.label)
            work.done(record)
        if elsewhere:
            time.sleep(_PAUSE)
        pending = elsewhere
    return doubts


def advice(store: Store) -> str:
    """What to do after a run that ended early."""
    if store.path is None:
        return "run again (with store= a run goes on where it ended)"
    return f"run again to go on, finished tiles are kept in {store.path}"


def _claimed(
    pending: Sequence[Record], elsewhere: list[Record], work: Work, store: Store, claims: Claims
) -> Iterator[tuple[Record, executors.Task]]:
    """The tasks that fall to this process; what another one has in hand is added to `elsewhere`.

    Never waits: results of tasks that were given out are written only while the next one is asked
    for.
    """
    for record in pending:
        if store.fetch(record) is State.WHOLE:
            work.done(record)
            continue
        with zarr_files.writing(store.path):
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
