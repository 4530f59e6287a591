"""The route of a run by sums over pairs of hidden units, for models with an activation.

Every model is prepared once for a block: rows of its units over the input's coordinates, and what
its outputs read (see `problems.kernels`). A pair is a sum over the kernel of its hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from tnsim.all_pairs.batched_plans import PairSetting, Terms
from tnsim.all_pairs.run_plan import KERNELS, PairwisePlan, Route, Sizes
from tnsim.all_pairs.sources import Entry
from tnsim.compare.by_kernels import check_kernels, kernel_estimate, prepared_under
from tnsim.compare.request import CROSS
from tnsim.engine.runtime import execution
from tnsim.models.model import Model
from tnsim.problems.kernel_models import PreparedModel, on_host, product_of
from tnsim.problems.kernels import KERNEL_DTYPE, answers
from tnsim.problems.tensors.kinds import Kinds
from tnsim.scaled import ScaledSum, add, split, stacked, times


def applies(models: Sequence[Model], setting: PairSetting) -> bool:
    """Whether a run goes this way; raises `UnsupportedLayer` where it would and cannot."""
    return answers(models, setting.metric)


def route(
    rows: Sequence[Entry],
    columns: Sequence[Entry] | None,
    examples: Mapping[Kinds, Model],
    setting: PairSetting,
) -> Route:
    """The route by sums over pairs of hidden units.

    Args:
        rows: Distinct models.
        columns: Distinct models compared with the rows; None for all pairs of `rows`.
        examples: A model of each sequence of layer kinds.
        setting: Settings common to all pairs.

    Raises:
        TooLarge: A pair of models is beyond the budget.
    """
    run = Sizes.of(rows, columns, examples, setting)
    plans = []
    for model in examples.values():
        plans.append(kernel_estimate(model, model, setting.metric, CROSS, setting.dtype))
        check_kernels(plans[-1], setting.budget)
    largest = max(plans, key=lambda plan: plan.multiplications)
    one_pair = run.terms**2 * largest.multiplications
    tile = run.tile(one_pair, 4 * max(1, run.weights))
    pairwise_plan = PairwisePlan(
        route=KERNELS,
        pairs=run.pairs,
        tile=tile,
        tiles=run.tiles(tile),
        multiplications=run.pairs * one_pair,
        peak_bytes=largest.peak_bytes + 4 * tile * run.terms * run.weights + run.tile_bytes(tile),
        compilations=len(examples) ** 2,
    )
    return Route(pairwise_plan, spaces={}, contracted=[])


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
