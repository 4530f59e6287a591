"""How the inner products of a run are computed along a route, and what all of its tasks share.

Every route of a run has a *way*, which a task asks for the norms of some models and for a tile,
whatever the route. Vectors, contractions and kernels prepare the models of a block once and keep
the block for the tasks that follow (`Blocks`); forward passes add up over points. Ways and jobs are
small and picklable, so that a task may run in another process.

Contractions and kernels know inner products of models alone. Combinations expand by bilinearity
over distinct models, `<sum_s c_s f_s | sum_t d_t g_t> = sum_st c_s d_t <f_s|g_t>`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Float, Int

from tnsim.all_pairs.sources import Entry
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.runtime.execution import Tier
from tnsim.metrics.protocol import Metric
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.problems.units import Units
from tnsim.scaled import (
    Scaled,
    ScaledSum,
    add,
    magnified,
    over_outputs,
    share_of_squares,
    split,
    stacked,
    taken,
    times,
    total,
)
from tnsim.sessions import session

IndexPair: TypeAlias = tuple[int, int]
"""Numbers of two models of a block, the smaller one first."""
_WORKER = "worker"  # owner of the blocks of all runs on a worker, see `Job.kept`


class NormBlock(NamedTuple):
    """Squared norms of some models, and the shares of them that are in the models' means.

    Attributes:
        squared: Squared norms, per output where the job wants slices.
        mean_share: Shares from 0 to 1; NaN where they are not known.
    """

    squared: ScaledSum
    mean_share: Float[np.ndarray, " models"]


class Tile(NamedTuple):
    """Inner products of a tile, and the standard errors of their cosines, None for no estimates."""

    products: ScaledSum
    standard_error: Float[np.ndarray, "rows columns"] | None = None


class PairSetting(NamedTuple):
    """Settings common to all pairs of a run.

    Args:
        metric: Metric that weighs the inputs.
        slices: Whether every output has an inner product of its own.
        dtype: Precision of the computation.
        budget: Limits on a single inner product and on the memory of a tile.
        pairs: Number of pairs in the run.
        units: Units that all models share, with the metric in the units of the inputs.
        tier: Tier in which plans run, "interpret" or "compile"; of a store, the tier in which the
            store was begun.
    """

    metric: Metric
    slices: bool
    dtype: str
    budget: Budget
    pairs: int
    units: Units
    tier: Tier = "compile"


class Job(NamedTuple):
    """Settings that all tasks of a run share.

    Args:
        setting: Settings common to all pairs.
        way: Way of the route.
        sizes: Most models in a block of rows, and in a block of columns.
        keep_blocks: Number of prepared blocks that are kept, whatever their size.
        keep_bytes: Bytes up to which further blocks are kept.
        alone: Whether a single process computes the whole run, and forgets its blocks at the end.
        key: Unique name of this run.
    """

    setting: PairSetting
    way: Way
    sizes: tuple[int, int]
    keep_blocks: int
    keep_bytes: float
    alone: bool
    key: str

    def kept(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """The value of a key in the session's cache of blocks, made where it is missing."""
        # On a worker, the blocks of all runs share one allowance: no worker learns that a run has
        # ended.
        owner = self.key if self.alone else _WORKER
        kept = session().blocks
        block = kept.get((owner, self.key, *key), make)
        kept.shrink(self.keep_bytes, self.keep_blocks, lambda key: key[0] == owner)
        return block

    def finite(self, products: ScaledSum) -> ScaledSum:
        """The products, unchanged. Raises `ResultError` where any is not finite."""
        values = products.mantissa, products.exponent
        precision.check_finite(values, self.setting.metric.name, self.setting.dtype)
        return products


class Way(ABC):
    """How the inner products of a run are computed along a route."""

    @property
    def sections(self) -> Sequence[Any]:
        """Sections of the models, prepared one at a time; inner products are sums over all."""
        return (None,)

    @property
    def estimates(self) -> bool:
        """Whether inner products are estimates from draws, with standard errors."""
        return False

    @abstractmethod
    def norms(self, job: Job, entries: tuple[Entry, ...]) -> NormBlock:
        """Squared norms of some models in the precision of the job."""

    @abstractmethod
    def tile(self, job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Tile:
        """Inner products of all rows with all columns in the precision of the job."""


class Terms(NamedTuple):
    """Linear combinations of models: row i is `sum_t coefficients[i, t] * models[index[i, t]]`."""

    index: Int[np.ndarray, "rows terms"]
    coefficients: Float[np.ndarray, "rows terms"]


class Combined(NamedTuple):
    """The distinct models of some entries, and the entries as combinations of them.

    Attributes:
        models: Distinct models.
        digests: Digests of the models' content.
        terms: The combinations.
    """

    models: tuple[Model, ...]
    digests: tuple[str, ...]
    terms: Terms


class Blocks(Way):
    """A way along which the models of a block are prepared once, section by section."""

    @abstractmethod
    def prepared(self, job: Job, of: Combined, section: Any) -> Any:
        """A section of some models, prepared for products."""

    @abstractmethod
    def squares(self, job: Job, block: Any) -> ScaledSum:
        """Squared norms of the entries of a block."""

    @abstractmethod
    def means(self, job: Job, block: Any, section: Any) -> ScaledSum | None:
        """Means of the outputs of a block, as parts of its norms; None where they are not known."""

    @abstractmethod
    def products(self, job: Job, first: Any, second: Any) -> ScaledSum:
        """Inner products of two blocks, which are one object where a block meets itself."""

    def norms(self, job: Job, entries: tuple[Entry, ...]) -> NormBlock:
        """See `Way.norms`."""
        squares, means = [], None
        for section in self.sections:
            block = self._block(job, entries, section)
            squares.append(self.squares(job, block))
            means = means or self.means(job, block, section)
        squared = job.finite(add(squares))
        if means is None:
            return NormBlock(squared, np.full(len(entries), np.nan))
        return NormBlock(squared, share_of_squares(means, total(squared, job.setting.slices)))

    def tile(self, job: Job, rows: tuple[Entry, ...], columns: tuple[Entry, ...]) -> Tile:
        """See `Way.tile`."""
        products = []
        for section in self.sections:
            first = self._block(job, rows, section)
            second = first if rows == columns else self._block(job, columns, section)
            products.append(self.products(job, first, second))
        return Tile(job.finite(add(products)))

    def _block(self, job: Job, entries: tuple[Entry, ...], section: Any) -> Any:
        """The block of some models, from the cache or made now."""
        key = (section, *(entry.digest for entry in entries))
        return job.kept(key, lambda: self.prepared(job, _combined(entries, job), section))


def _combined(entries: tuple[Entry, ...], job: Job) -> Combined:
    models: dict[str, Model] = {}
    most = max(len(entry.bases) for entry in entries)
    index, coefficients = np.zeros((len(entries), most), int), np.zeros((len(entries), most))
    for i, entry in enumerate(entries):
        model: Any = entry.read()  # no plain function, as functions take forward passes
        both = zip(entry.bases, terms(by_differences(model, job.setting.dtype)), strict=True)
        for t, ((digest, _), (coefficient, base)) in enumerate(both):
            models.setdefault(digest, base)
            # Terms that this entry lacks repeat its last term, with coefficient 0.
            index[i, t:] = list(models).index(digest)
            coefficients[i, t] = coefficient
    return Combined(tuple(models.values()), tuple(models), Terms(index, coefficients))


class PairBlock(NamedTuple):
    """Distinct models `2 ** exponents * models`, and the combinations of them that are compared.

    Args:
        models: Models as the way prepares them.
        digests: Digests of the models' content.
        exponents: Powers of two taken out of the models, one per model or one per output.
        terms: Combinations that are compared.
        roots: Square roots of the factors by which cancellation within the models enlarges
            rounding, see `problems.conditioning`; 1 where products count it themselves.
    """

    models: tuple[Any, ...]
    digests: tuple[str, ...]
    exponents: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"]
    terms: Terms
    roots: Float[np.ndarray, " models"]

    def coefficients(self) -> Scaled[np.ndarray]:
        """The factor of the model in every term.

        Returns:
            Mantissas (rows, terms). Exponents (rows, terms), or (rows, terms, out) where
            exponents differ by output.
        """
        mantissas, powers = split(self.terms.coefficients)
        own = self.exponents[self.terms.index]
        return Scaled(mantissas, own + (powers if own.ndim == 2 else powers[:, :, None]))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of the models."""
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self.models))


class ByPairs(Blocks):
    """A way that knows inner products of models, of which those of combinations are sums."""

    @abstractmethod
    def mean_of(self, job: Job, model: Any) -> ScaledSum | None:
        """The mean of every output of a prepared model, as a part of its norm; None if unknown."""

    @abstractmethod
    def paired(
        self, job: Job, models: Sequence[Any], pairs: Sequence[IndexPair]
    ) -> dict[IndexPair, ScaledSum]:
        """Inner products of pairs of prepared models."""

    @abstractmethod
    def crossed(self, job: Job, rows: PairBlock, columns: PairBlock | None) -> ScaledSum:
        """Inner products of all models of the rows with all of the columns, or among themselves."""

    def squares(self, job: Job, block: PairBlock) -> ScaledSum:
        """|sum_s c_s f_s|^2 = sum_st c_s c_t <f_s|f_t>; every product is computed once."""
        index, (coefficients, exponents) = block.terms.index, block.coefficients()
        # Pairs of models that occur together in some combination.
        wanted: set[IndexPair] = set()
        for row in index.tolist():
            wanted.update(itertools.combinations_with_replacement(sorted(set(row)), 2))
        known = {}
        for (low, high), product in self.paired(job, block.models, sorted(wanted)).items():
            known[low, high] = magnified(product, block.roots[low] * block.roots[high])
        # One part for each pair of terms (s, t), over all rows at once.
        parts = []
        for s, t in itertools.product(range(index.shape[1]), repeat=2):
            both = np.sort(index[:, [s, t]]).tolist()
            together = stacked([known[low, high] for low, high in both])
            factors = over_outputs(coefficients[:, s] * coefficients[:, t], together.mantissa)
            parts.append(times(together, factors, exponents[:, s] + exponents[:, t]))
        return add(parts)

    def means(self, job: Job, block: PairBlock, section: None) -> ScaledSum | None:
        """See `Blocks.means`."""
        each: list[ScaledSum] = []
        for model, exponent in zip(block.models, block.exponents, strict=True):
            mean = self.mean_of(job, model)
            if mean is None:
                return None
            each.append(times(mean, 1.0, exponent))
        rows = zip(*block.terms, strict=True)
        return stacked(
            [add([times(each[n], c) for n, c in zip(*row, strict=True)]) for row in rows]
        )

    def products(self, job: Job, first: PairBlock, second: PairBlock) -> ScaledSum:
        """See `Blocks.products`."""
        crossed = self.crossed(job, first, None if second is first else second)
        crossed = magnified(crossed, np.outer(first.roots, second.roots))
        rows, columns = first.coefficients(), second.coefficients()
        parts = []
        for s in range(first.terms.index.shape[1]):
            for t in range(second.terms.index.shape[1]):
                # Entry (i, j) is the product of term s of row i with term t of column j.
                places = np.ix_(first.terms.index[:, s], second.terms.index[:, t])
                part = taken(crossed, places)
                factors = rows.value[:, s, None] * columns.value[None, :, t]
                exponents = rows.exponent[:, None, s] + columns.exponent[None, :, t]
                parts.append(times(part, over_outputs(factors, part.mantissa), exponents))
        return add(parts)
