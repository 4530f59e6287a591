"""The tasks of a run. In: a job and entries, both small and picklable. Out: NumPy blocks of inner products.

A task is a pure function of its arguments, so it runs in this process, in another one or on another
machine alike. What it prepares from weights (features, or the models read from disk) is kept for
the tasks that follow, see `Job`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tnsim.engine.log_scaled import LogScaled
from tnsim.errors import ExecutorError, TnsimError
from tnsim.folding import features
from tnsim.folding.features import Space
from tnsim.gram import batched_plans as recursion
from tnsim.gram.batched_plans import Setting, Terms
from tnsim.gram.sources import Entry
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.models.scaling import scaled

Block = features.Block | recursion.Block


class Job(NamedTuple):
    """What all tasks of a run share. `space` is that of the features, None for the recursion; `key` names it all.

    Of what is prepared, the last two blocks and up to `keep_bytes` are kept.
    """

    setting: Setting
    space: Space | None
    size: int
    keep_bytes: float
    key: str


_kept: OrderedDict[tuple[str, ...], Block] = OrderedDict()
_lock = threading.Lock()


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """Let go of what was kept, at the end of a run."""
    try:
        yield
    finally:
        with _lock:
            _kept.clear()


def norms(job: Job, entries: tuple[Entry, ...]) -> LogScaled:
    """Squared norms of some models; per output where the job wants slices."""
    block = _block(job, entries)
    if isinstance(block, features.Block):
        return _checked(features.norms(block, job.setting.per_output), job)
    return _checked(recursion.norms(block, job.setting), job)


def tile(job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> LogScaled:
    """Inner products of all rows with all columns; of a block with itself, symmetric to the last bit."""
    first = _block(job, rows)
    second = first if rows == columns else _block(job, columns)
    if isinstance(first, features.Block):
        return _checked(features.products(first, second, job.setting.per_output), job)
    return _checked(recursion.products(first, second, job.setting, job.size), job)


def _block(job: Job, entries: tuple[Entry, ...]) -> Block:
    """What the tasks need of some models, from the ones kept or made anew."""
    key = (job.key, *(entry.digest for entry in entries))
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    models, found = _terms(entries, job.setting.dtype)
    parts = [scaled(model, job.setting.per_output) for model in models]
    models = tuple(part.model for part in parts)
    exponents = np.array([part.exponent for part in parts])
    if job.space is None:
        block: Block = recursion.Block(models, exponents, found)
    else:
        plain = (
            found.index.shape[1] == 1
            and len(models) == len(entries)
            and (found.coefficients == 1).all()
        )
        weights = None if plain else _dense(found, len(models))
        block = features.block(
            models, exponents, weights, job.space, job.setting.metric, job.setting.dtype
        )
    with _lock:
        _kept[key] = block
        while len(_kept) > 2 and sum(kept.nbytes for kept in _kept.values()) > job.keep_bytes:
            _kept.popitem(last=False)
    return block


def _terms(entries: tuple[Entry, ...], dtype: str) -> tuple[tuple[Model, ...], Terms]:
    """The distinct models of some entries, and the entries as combinations of them."""
    models: dict[str, Model] = {}
    most = max(len(entry.parts) for entry in entries)
    index, coefficients = np.zeros((len(entries), most), int), np.zeros((len(entries), most))
    for i, entry in enumerate(entries):
        for t, ((digest, _), (coefficient, model)) in enumerate(
            zip(entry.parts, terms(by_differences(entry.read(), dtype)), strict=True)
        ):
            models.setdefault(digest, model)
            index[i, t:] = list(models).index(
                digest
            )  # and what this entry lacks in terms, with coefficient 0
            coefficients[i, t] = coefficient
    return tuple(models.values()), Terms(index, coefficients)


def _dense(found: Terms, count: int) -> np.ndarray:
    weights = np.zeros((len(found.index), count))
    np.add.at(weights, (np.arange(len(weights))[:, None], found.index), found.coefficients)
    return weights


def _checked(products: LogScaled, job: Job) -> LogScaled:
    """The products. Raises `TnsimError` where one is no number."""
    if not (np.isfinite(products.mantissa).all() and np.isfinite(products.log).all()):
        name, dtype = job.setting.metric.name, job.setting.dtype
        advice = "; use dtype='float64'" if dtype == "float32" else ""
        raise TnsimError(
            f"the {name} computation in {dtype} gave NaN: a float range was exceeded within a layer{advice}"
        )
    return products


def expect_norms(result: Any, shape: tuple[int], outputs: int | None, advice: str) -> LogScaled:
    """What came back for `norms`. Raises `ExecutorError` when that is no block of norms."""
    if not _is_block(result, shape, outputs):
        raise _garbage(result, f"squared norms of {shape[0]} models", advice)
    return result


def expect_products(
    result: Any, shape: tuple[int, int], outputs: int | None, advice: str
) -> LogScaled:
    """What came back for `tile`. Raises `ExecutorError` when that is no block of products."""
    if not _is_block(result, shape, outputs):
        raise _garbage(result, f"inner products of {shape[0]} x {shape[1]} models", advice)
    return result


def _is_block(value: Any, shape: tuple[int, ...], outputs: int | None) -> bool:
    whole = shape if outputs is None else (*shape, outputs)
    if not isinstance(value, LogScaled):
        return False
    if not all(_is_array(x, whole, np.float64) for x in (value.mantissa, value.size)):
        return False
    return any(_is_array(value.log, form, np.float64) for form in {shape, whole})


def _is_array(value: Any, shape: tuple[int, ...], dtype: type) -> bool:
    """Whether it is an array of that form without NaN or infinity."""
    is_array = isinstance(value, np.ndarray) and (value.shape, value.dtype) == (shape, dtype)
    return is_array and bool(np.isfinite(value).all())


def _garbage(result: Any, wanted: str, advice: str) -> ExecutorError:
    return ExecutorError(
        f"the executor returned {type(result).__name__} of another form than the {wanted}; {advice}"
    )
