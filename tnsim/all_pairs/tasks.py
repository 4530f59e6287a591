"""The tasks of a run: pure functions from a job and entries to NumPy blocks of inner products.

Arguments are small and picklable, so a task runs in this process, in another process or on another
machine alike. Blocks prepared from weights (features, or the models read from disk) are kept for
the tasks that follow, see `Job`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool

from tnsim.all_pairs.normalise import Norms, uncertified, uncertified_norms
from tnsim.all_pairs.sources import Entry
from tnsim.all_pairs.ways import Job, NormBlock, Tile
from tnsim.engine.precision import EPS, Arithmetic
from tnsim.errors import ExecutorError, TooLarge
from tnsim.scaled import ScaledSum, magnified
from tnsim.sessions import session

_Arrays: TypeAlias = tuple[Any, ...]
"""Arrays of the numbers of all models, or of all pairs, along their first axes."""


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

    def in_float64() -> _Arrays:
        finer = job.way.norms(job.in_float64, _chosen(entries, unsure))
        return *_counted(finer.squared), finer.mean_share

    refined = _refined((*found.squared, found.mean_share), unsure, in_float64)
    return NormBlock(ScaledSum(*refined[:-1]), refined[-1])


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

    def in_float64() -> _Arrays:
        finer = job.way.tile(job.in_float64, *again)
        return *_counted(finer.products), finer.standard_error

    refined = _refined((*found.products, found.standard_error), unsure, in_float64)
    return Tile(ScaledSum(*refined[:-1]), refined[-1])


def _chosen(entries: tuple[Entry, ...], wanted: Bool[np.ndarray, " n"]) -> tuple[Entry, ...]:
    return tuple(itertools.compress(entries, wanted))


def _counted(products: ScaledSum) -> ScaledSum:
    """Numbers of float64 whose sizes count roundings of the run, those of float32."""
    return magnified(products, EPS["float64"] / EPS["float32"])


def _refined(
    arrays: _Arrays, unsure: Bool[np.ndarray, "..."], again: Callable[[], _Arrays]
) -> _Arrays:
    """Numbers of float32 with the unsure numbers taken from a second computation in float64.

    Args:
        arrays: Numbers of all models, or of all pairs; None stays None.
        unsure: Models or pairs to replace, one axis for each axis of models.
        again: Computes the numbers of all rows, or rows and columns, that have an unsure number.
    """
    if not unsure.any():
        return arrays
    try:
        finer = again()
    except TooLarge:
        return arrays  # with the bound of float32
    axes = range(unsure.ndim)
    others = [tuple(axis for axis in axes if axis != kept) for kept in axes]
    place = np.ix_(*(unsure.any(axis=rest) for rest in others))
    replaced = unsure[place]
    refined = []
    for old, new in zip(arrays, finer, strict=True):
        array = None if old is None else old.copy()
        if array is not None:
            block = array[place]
            block[replaced] = new[replaced]
            array[place] = block
        refined.append(array)
    return tuple(refined)


def expect_norms(
    result: Any, shape: tuple[int, ...], outputs: int | None, advice: str
) -> NormBlock:
    """The result of a `norms` task. Raises `ExecutorError` where it is no block of norms."""
    if not (
        isinstance(result, NormBlock)
        and _is_block(result.squared, shape, outputs)
        and isinstance(result.mean_share, np.ndarray)
        and (result.mean_share.shape, result.mean_share.dtype) == (shape, np.float64)
    ):
        raise _garbage(result, f"squared norms of {shape[0]} models", advice)
    return result


def expect_tile(result: Any, shape: tuple[int, ...], outputs: int | None, advice: str) -> Tile:
    """The result of a `tile` task. Raises `ExecutorError` where it is no block of products."""
    if not (
        isinstance(result, Tile)
        and _is_block(result.products, shape, outputs)
        and _is_error(result.standard_error, shape)
    ):
        raise _garbage(result, f"inner products of {shape[0]} x {shape[1]} models", advice)
    return result


def _is_block(value: Any, shape: tuple[int, ...], outputs: int | None) -> bool:
    whole = shape if outputs is None else (*shape, outputs)
    if not isinstance(value, ScaledSum):
        return False
    if not all(_is_array(x, whole) for x in (value.mantissa, value.size)):
        return False
    return any(_is_array(value.exponent, form) for form in {shape, whole})


def _is_array(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is a float64 array of this shape without NaN or infinity."""
    is_array = isinstance(value, np.ndarray) and (value.shape, value.dtype) == (shape, np.float64)
    return is_array and bool(np.isfinite(value).all())


def _is_error(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is none, or an array of standard errors, infinite at most but not NaN."""
    if value is None:
        return True
    return isinstance(value, np.ndarray) and value.shape == shape and not np.isnan(value).any()


def _garbage(result: Any, wanted: str, advice: str) -> ExecutorError:
    return ExecutorError(
        f"the executor returned {type(result).__name__} of another form than the {wanted}; {advice}"
    )
