"""The tasks of a run: pure functions from a job and entries to NumPy blocks of inner products.

Arguments are small and picklable, so a task runs in this process, in another process or on another
machine alike. Blocks prepared from weights (features, or the models read from disk) are kept for
the tasks that follow, see `Job`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from tnsim.all_pairs.sources import Entry
from tnsim.all_pairs.ways import Job, NormBlock, Tile
from tnsim.errors import ExecutorError
from tnsim.scaled import ScaledSum
from tnsim.sessions import session

B = TypeVar("B", NormBlock, Tile)


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
