"""The tasks of a run: pure functions from a job and entries to NumPy blocks of inner products.

Arguments are small and picklable, so a task runs in this process, in another process or on another
machine alike. Blocks prepared from weights (features, or the models read from disk) are kept for
the tasks that follow, see `Job`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool

from tnsim.all_pairs.normalise import Norms, uncertified, uncertified_norms
from tnsim.all_pairs.sources import Entry
from tnsim.all_pairs.ways import Job, NormBlock, Tile
from tnsim.engine.precision import EPS, Arithmetic
from tnsim.errors import ExecutorError, TooLarge
from tnsim.scaled import ScaledSum, magnified
from tnsim.sessions import session

B = TypeVar("B", NormBlock, Tile)


@contextlib.contextmanager
def forgetting(job: Job) -> Iterator[None]:
    """Forget the blocks of a run at its end; the blocks of other runs stay."""
    try:
        yield
    finally:
        session().blocks.forget(lambda key: key[1] == job.key)


def norms(job: Job, entries: tuple[Entry, ...], arithmetic: Arithmetic) -> NormBlock:
    """Squared norms of some models, and what their means have of them.

    Args:
        job: Settings that all tasks share.
        entries: Distinct models.
        arithmetic: Degree and precision of the run.
    """
    found = job.way.norms(job, entries)
    if not job.certifies:
        return found
    unsure = uncertified_norms(found.squared, arithmetic)
    return _refined(found, unsure, lambda: job.way.norms(job.in_float64, _chosen(entries, unsure)))


def tile(
    job: Job,
    rows: tuple[Entry, ...],
    columns: tuple[Entry, ...],
    norms: tuple[Norms, Norms],
    arithmetic: Arithmetic,
) -> Tile:
    """Inner products of all rows with all columns.

    The products of a block with itself are symmetric to the bit. Estimates carry standard errors.

    Args:
        job: Settings that all tasks share.
        rows, columns: Distinct models.
        norms: Squared norms of rows and columns.
        arithmetic: Degree and precision of the run.

    Returns:
        (rows, columns), or (rows, columns, out) where the job wants slices.
    """
    found = job.way.tile(job, rows, columns)
    if not job.certifies:
        return found
    unsure = uncertified(found.products, *norms, arithmetic)
    first, second = (np.array([entry.digest for entry in side]) for side in (rows, columns))
    unsure &= first[:, None] != second
    again = _chosen(rows, unsure.any(axis=1)), _chosen(columns, unsure.any(axis=0))
    return _refined(found, unsure, lambda: job.way.tile(job.in_float64, *again))


def _chosen(entries: tuple[Entry, ...], wanted: Bool[np.ndarray, " n"]) -> tuple[Entry, ...]:
    return tuple(itertools.compress(entries, wanted))


def _refined(found: B, unsure: Bool[np.ndarray, "..."], again: Callable[[], B]) -> B:
    """Numbers of float32 with the unsure numbers taken from a second computation in float64.

    Args:
        found: Numbers of all models, or of all pairs.
        unsure: Models or pairs to replace, one axis for each axis of models.
        again: Computes the numbers of all rows, or rows and columns, that have an unsure number.
    """
    if not unsure.any():
        return found
    try:
        finer, finer_beside = again()
    except TooLarge:
        return found  # with the bound of float32
    # Sizes of float64 count roundings of the run, those of float32.
    finer = magnified(finer, EPS["float64"] / EPS["float32"])
    axes = range(unsure.ndim)
    others = [tuple(axis for axis in axes if axis != kept) for kept in axes]
    # Unsure numbers have the same order among all and among those that were computed again.
    unsure_again = unsure[np.ix_(*(unsure.any(axis=rest) for rest in others))]
    products, beside = found
    refined: list[Any] = [None if array is None else array.copy() for array in (*products, beside)]
    for array, new in zip(refined, (*finer, finer_beside), strict=True):
        if array is not None and new is not None:
            array[unsure] = new[unsure_again]
    return type(found)(ScaledSum(*refined[:-1]), refined[-1])


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
