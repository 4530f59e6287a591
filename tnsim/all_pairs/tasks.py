"""The tasks of a run: pure functions from a job and entries to NumPy blocks of inner products.

Arguments are small and picklable, so a task runs in this process, in another process or on another
machine alike. Blocks prepared from weights (features, or the models read from disk) are kept for
the tasks that follow, see `Job`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from tnsim.all_pairs import batched_plans, forward_runs, kernel_runs
from tnsim.all_pairs.batched_plans import PairSetting, Terms
from tnsim.all_pairs.forward_runs import Tile
from tnsim.all_pairs.normalise import Norms, uncertified, uncertified_norms
from tnsim.all_pairs.sources import Entry
from tnsim.compare.resident import mean_in_units
from tnsim.engine.precision import EPS, Arithmetic
from tnsim.errors import ExecutorError, TnsimError, TooLarge
from tnsim.metrics.points import Points
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.problems import features, forward
from tnsim.problems.features import FeatureSpace
from tnsim.problems.forward import Sums
from tnsim.problems.kernel_models import mean_part
from tnsim.problems.units import scaled_under
from tnsim.scaled import (
    ScaledSum,
    add,
    contribution,
    magnified,
    share_of_squares,
    stacked,
    times,
    total,
)
from tnsim.sessions import session

Block = features.FeatureBlock | batched_plans.StackBlock | kernel_runs.KernelBlock
_Arrays: TypeAlias = tuple[Any, ...]
"""Arrays of the numbers of all models, or of all pairs, along their first axes."""
_WORKER = "worker"  # owner of the blocks of all runs on a worker, see `_kept`


class NormBlock(NamedTuple):
    """Squared norms of some models, and the shares of them that are in the models' means.

    Attributes:
        squared: Squared norms, per output where the job wants slices.
        mean_share: Shares from 0 to 1; NaN where they are not known.
    """

    squared: ScaledSum
    mean_share: Float[np.ndarray, " models"]


class Job(NamedTuple):
    """Settings that all tasks of a run share.

    Args:
        setting: Settings common to all pairs.
        space: Space of the features; None for the batched plans.
        sizes: Most models in a block of rows, and in a block of columns.
        keep_blocks: Number of prepared blocks that are kept, whatever their size.
        keep_bytes: Bytes up to which further blocks are kept.
        alone: Whether a single process computes the whole run, and forgets its blocks at the end.
        key: Unique name of this run.
        points: Points of forward passes; None on other routes.
        kernels: Whether inner products are sums over pairs of hidden units.
        certifies: Whether pairs of which float32 leaves few digits are computed in float64.
        differences: Precision that tells which differences of models are small, that of the run.
    """

    setting: PairSetting
    space: FeatureSpace | None
    sizes: tuple[int, int]
    keep_blocks: int
    keep_bytes: float
    alone: bool
    key: str
    points: Points | None
    kernels: bool
    certifies: bool
    differences: str

    @property
    def in_float64(self) -> Job:
        """The same job in float64, with the same terms of models."""
        return self._replace(setting=self.setting._replace(dtype="float64"), certifies=False)

    @property
    def sections(self) -> Sequence[FeatureSpace | None]:
        """Sections of the features, prepared one at a time; inner products are sums over all."""
        return (None,) if self.space is None else self.space.parts


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
    found = _norms(job, entries)
    if not job.certifies:
        return found
    unsure = uncertified_norms(found.squared, arithmetic)

    def in_float64() -> ScaledSum:
        return _counted(_norms(job.in_float64, _chosen(entries, unsure)).squared)

    return found._replace(squared=ScaledSum(*_refined(found.squared, unsure, in_float64)))


def _norms(job: Job, entries: tuple[Entry, ...]) -> NormBlock:
    """Squared norms in the precision of the job."""
    unknown = np.full(len(entries), np.nan)
    if job.points is not None:
        sums = _sums(job, entries, entries)
        shares = sums.mean_shares()
        squared = _checked(forward.total(sums.rows), job)
        return NormBlock(squared, shares[0] if shares else unknown)
    squares, means = [], None
    for section in job.sections:
        block = _block(job, entries, section)
        squares.append(_block_norms(job, block))
        means = means or _block_means(job, block, section)
    squared = _checked(add(squares), job)
    if means is None:
        return NormBlock(squared, unknown)
    return NormBlock(squared, share_of_squares(means, total(squared, job.setting.slices)))


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
    found = _tile(job, rows, columns)
    if not job.certifies:
        return found
    unsure = uncertified(found.products, *norms, arithmetic)
    first, second = (np.array([entry.digest for entry in side]) for side in (rows, columns))
    unsure &= first[:, None] != second
    again = _chosen(rows, unsure.any(axis=1)), _chosen(columns, unsure.any(axis=0))

    def in_float64() -> _Arrays:
        finer = _tile(job.in_float64, *again)
        return *_counted(finer.products), finer.standard_error

    refined = _refined((*found.products, found.standard_error), unsure, in_float64)
    return Tile(ScaledSum(*refined[:-1]), refined[-1])


def _tile(job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Tile:
    """Inner products in the precision of the job."""
    if job.points is not None:
        sums = _sums(job, rows, columns)
        result = forward_runs.tile(sums, job.setting.slices, job.points.drawn)
        _checked(result.products, job)
        return result
    products = []
    for section in job.sections:
        first = _block(job, rows, section)
        # One object for both sides tells the routes below that the tile is symmetric.
        second = first if rows == columns else _block(job, columns, section)
        products.append(_block_products(job, first, second))
    return Tile(_checked(add(products), job))


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


def _block_norms(job: Job, block: Block) -> ScaledSum:
    if isinstance(block, features.FeatureBlock):
        return features.norms(block, job.setting.slices)
    if isinstance(block, kernel_runs.KernelBlock):
        return kernel_runs.norms(block, job.setting)
    return batched_plans.norms(block, job.setting)


def _block_means(job: Job, block: Block, section: FeatureSpace | None) -> ScaledSum | None:
    """The means of the outputs of a block, as parts of its norms; None where they are not known."""
    if isinstance(block, features.FeatureBlock):
        assert section is not None
        return features.means(block, section)
    if isinstance(block, kernel_runs.KernelBlock):
        of_models = [mean_part(model) for model in block.models]
        exponents = [model.exponent for model in block.models]
    else:
        of_models = [mean_in_units(model, job.setting.units.metric) for model in block.models]
        exponents = block.exponents
    if any(mean is None for mean in of_models):
        return None
    each = [contribution(*both) for both in zip(of_models, exponents, strict=True)]
    rows = zip(block.terms.index, block.terms.coefficients, strict=True)
    return stacked([add([times(each[n], c) for n, c in zip(*row, strict=True)]) for row in rows])


def _block_products(job: Job, first: Block, second: Block) -> ScaledSum:
    if isinstance(first, features.FeatureBlock) and isinstance(second, features.FeatureBlock):
        return features.products(first, second, job.setting.slices)
    if isinstance(first, kernel_runs.KernelBlock) and isinstance(second, kernel_runs.KernelBlock):
        return kernel_runs.products(first, second, job.setting)
    assert isinstance(first, batched_plans.StackBlock) and isinstance(
        second, batched_plans.StackBlock
    )
    keep = partial(_kept, job)
    return batched_plans.products(first, second, job.setting, job.sizes, keep)


def _sums(job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Sums:
    """Sums over all points; the sums of a block with itself are kept, for norms and tiles."""
    assert job.points is not None
    points = job.points
    if rows != columns:
        return forward_runs.sums(job.setting, points, rows, columns)
    key = tuple(entry.digest for entry in rows)
    return _kept(job, key, lambda: forward_runs.sums(job.setting, points, rows, None))


def _block(job: Job, entries: tuple[Entry, ...], section: FeatureSpace | None) -> Block:
    """The block of some models, from the cache or made now."""
    key = (section, *(entry.digest for entry in entries))
    return _kept(job, key, lambda: _prepared(job, entries, section))


def _kept(job: Job, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
    """The value of a key in the session's cache of blocks, made where it is missing."""
    # On a worker, the blocks of all runs share one allowance: no worker learns that a run ended.
    owner = job.key if job.alone else _WORKER
    kept = session().blocks
    block = kept.get((owner, job.key, job.setting.dtype, *key), make)
    kept.shrink(job.keep_bytes, job.keep_blocks, lambda key: key[0] == owner)
    return block


def _prepared(job: Job, entries: tuple[Entry, ...], section: FeatureSpace | None) -> Block:
    """The block of some models: a section of their features, or a stack for the batched plans."""
    models, combined = _terms(entries, job.differences)
    if job.kernels:
        return kernel_runs.block(models, combined, job.setting)
    units = job.setting.units
    # Models in scientific notation, in units that all models of the run share.
    made = [scaled_under(model, units, job.setting.slices) for model in models]
    if section is None:
        digests = tuple(dict.fromkeys(digest for entry in entries for digest, _ in entry.bases))
        exponents = np.array([model.exponent for model in made])
        roots = np.sqrt([model.cancels for model in made])
        values = tuple(model.value for model in made)
        return batched_plans.StackBlock(values, digests, exponents, combined, roots)
    # Where every entry is a single model with coefficient 1, features need no sums.
    single_terms = combined.index.shape[1] == 1 and (combined.coefficients == 1).all()
    plain = single_terms and len(models) == len(entries)
    weights = None if plain else _dense(combined, len(models))
    return features.block(made, weights, section, units.metric)


def _terms(entries: tuple[Entry, ...], dtype: str) -> tuple[tuple[Model, ...], Terms]:
    """The distinct models of some entries, and the entries as combinations of them."""
    models: dict[str, Model] = {}
    most = max(len(entry.bases) for entry in entries)
    index, coefficients = np.zeros((len(entries), most), int), np.zeros((len(entries), most))
    for i, entry in enumerate(entries):
        model: Any = entry.read()  # no plain function, as functions take forward passes
        both = zip(entry.bases, terms(by_differences(model, dtype)), strict=True)
        for t, ((digest, _), (coefficient, base)) in enumerate(both):
            models.setdefault(digest, base)
            # Terms that this entry lacks repeat its last term, with coefficient 0.
            index[i, t:] = list(models).index(digest)
            coefficients[i, t] = coefficient
    return tuple(models.values()), Terms(index, coefficients)


def _dense(combined: Terms, count: int) -> np.ndarray:
    """Linear combinations as a matrix, (rows, models)."""
    weights = np.zeros((len(combined.index), count))
    rows = np.arange(len(weights))[:, None]
    # A model may occur in several terms, the coefficients of which add up.
    np.add.at(weights, (rows, combined.index), combined.coefficients)
    return weights


def _checked(products: ScaledSum, job: Job) -> ScaledSum:
    """The products, unchanged. Raises `TnsimError` where any is not finite."""
    if not (np.isfinite(products.mantissa).all() and np.isfinite(products.exponent).all()):
        name, dtype = job.setting.metric.name, job.setting.dtype
        advice = "; use dtype='float64'" if dtype == "float32" else ""
        raise TnsimError(
            f"the {name} computation in {dtype} gave NaN: "
            f"a float range was exceeded within a layer{advice}"
        )
    return products


def expect_norms(result: Any, shape: tuple[int], outputs: int | None, advice: str) -> NormBlock:
    """The result of a `norms` task. Raises `ExecutorError` where it is no block of norms."""
    if not (
        isinstance(result, NormBlock)
        and _is_block(result.squared, shape, outputs)
        and isinstance(result.mean_share, np.ndarray)
        and (result.mean_share.shape, result.mean_share.dtype) == (shape, np.float64)
    ):
        raise _garbage(result, f"squared norms of {shape[0]} models", advice)
    return result


def expect_tile(result: Any, shape: tuple[int, int], outputs: int | None, advice: str) -> Tile:
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
