"""The route of a run by sums over pairs of hidden units, for models with an activation.

Every model is prepared once for a block: rows of its units over the input's coordinates, and what
its outputs read (see `problems.kernels`). A pair is a sum over the kernel of its hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from tnsim.all_pairs.batched_plans import PairSetting, Terms
from tnsim.all_pairs.run_plan import Models, Sizes, estimated
from tnsim.compare.by_kernels import STARTING, Kernels, prepared_under
from tnsim.compare.estimates import Estimate, Tiles
from tnsim.compare.request import CROSS, Question
from tnsim.engine.budget import Budget
from tnsim.engine.runtime import execution
from tnsim.models.model import Model
from tnsim.problems.kernel_models import PreparedModel, on_host, product_of
from tnsim.problems.kernels import KERNEL_DTYPE
from tnsim.scaled import ScaledSum, add, split, stacked, times


class KernelRun:
    """The route of a run by sums over pairs of hidden units.

    Args:
        models: Models of the run.
        setting: Settings common to all pairs.
    """

    name = Kernels.name
    search = 0.0

    def __init__(self, models: Models, setting: PairSetting) -> None:
        self.models, self.setting = models, setting

    def estimate(self, limit: float = math.inf) -> Estimate:
        """See `compare.routes.Weighed`."""
        run = Sizes.of(self.models, self.setting)
        several = [route.estimate() for route in self._norms()]
        largest = max(several, key=lambda planned: planned.multiplications)
        one_pair = run.terms**2 * largest.multiplications
        tile = run.tile(one_pair, 4 * max(1, run.weights))
        stacks = 4 * tile * run.terms * run.weights
        programs = len(self.models.examples) ** 2
        return estimated(
            self.name,
            run,
            self.setting,
            Tiles(run.pairs, tile, run.tiles(tile), programs=programs),
            multiplications=run.pairs * one_pair,
            peak_bytes=largest.peak_bytes + stacks + run.tile_bytes(tile),
            seconds=STARTING + run.pairs * run.terms**2 * (largest.seconds - STARTING),
        )

    def check(self, estimate: Estimate, budget: Budget) -> None:
        """See `compare.routes.Weighed`. A model with itself is to be within the budget."""
        for route in self._norms():
            route.check(route.estimate(), budget)

    def _norms(self) -> list[Kernels]:
        """The routes of the norms of a model of each sequence of layer kinds."""
        metric, dtype = self.setting.metric, self.setting.dtype
        several = self.models.examples.values()
        return [Kernels(Question((x, x), metric, CROSS, False, dtype)) for x in several]


class KernelBlock(NamedTuple):
    """Distinct models prepared under a metric, and the combinations of them that are compared.

    Args:
        models: Prepared models.
        terms: Combinations that are compared.
    """

    models: tuple[PreparedModel, ...]
    terms: Terms

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of the models."""
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self.models))


def block(models: Sequence[Model], terms: Terms, setting: PairSetting) -> KernelBlock:
    """The block of some distinct models.

    Args:
        models: Distinct models.
        terms: Combinations of the models.
        setting: Settings common to all pairs.
    """
    with execution.precision():
        made = [prepared_under(model, setting.metric, KERNEL_DTYPE) for model in models]
    return KernelBlock(tuple(made), terms)


def norms(rows: KernelBlock, setting: PairSetting) -> ScaledSum:
    """Squared norms of the combinations of a block, (rows,) or per output (rows, out)."""
    known = _Products(rows, rows, setting)
    return stacked([known.of(i, i) for i in range(len(rows.terms.index))])


def products(rows: KernelBlock, columns: KernelBlock, setting: PairSetting) -> ScaledSum:
    """Inner products of every row with every column.

    Args:
        rows: Combinations of models.
        columns: Combinations compared with the rows; the same object for pairs of a single list.
        setting: Settings common to all pairs.

    Returns:
        (rows, columns), or per output (rows, columns, out).
    """
    known = _Products(rows, columns, setting)
    others = range(len(columns.terms.index))
    return stacked(
        [stacked([known.of(i, j) for j in others]) for i in range(len(rows.terms.index))]
    )


class _Products:
    """Inner products of combinations; those of distinct models are computed once.

    Of two models of the same block the later one stands first, so that products of a block with
    itself are symmetric to the bit.
    """

    def __init__(self, rows: KernelBlock, columns: KernelBlock, setting: PairSetting) -> None:
        self.rows, self.columns, self.setting = rows, columns, setting
        self._known: dict[tuple[int, int], ScaledSum] = {}

    def of(self, i: int, j: int) -> ScaledSum:
        """The inner product of row i with column j."""
        parts = []
        # All terms of row i with all terms of column j, by bilinearity.
        for m, c in zip(self.rows.terms.index[i], self.rows.terms.coefficients[i], strict=True):
            both = zip(self.columns.terms.index[j], self.columns.terms.coefficients[j], strict=True)
            for n, d in both:
                mantissa, exponent = split(c * d)
                exponent = exponent + self.rows.models[m].exponent + self.columns.models[n].exponent
                parts.append(times(self._plain(m, n), mantissa, exponent))
        return add(parts)

    def _plain(self, m: int, n: int) -> ScaledSum:
        if self.rows is self.columns:
            m, n = max(m, n), min(m, n)
        if (m, n) not in self._known:
            setting = self.setting
            with execution.precision():
                both = self.rows.models[m], self.columns.models[n]
                product = product_of(*both, setting.slices, setting.dtype)
                self._known[m, n] = on_host(product)
        return self._known[m, n]
