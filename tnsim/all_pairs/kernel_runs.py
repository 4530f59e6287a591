"""The route of a run by sums over pairs of hidden units, for models with an activation.

Every model is prepared once for a block: rows of its units over the input's coordinates, and what
its outputs read (see `problems.kernels`). A pair is a sum over the kernel of its hidden units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from tnsim.all_pairs.run_plan import RouteOfRun, Sizes
from tnsim.all_pairs.ways import ByPairs, Combined, IndexPair, Job, PairBlock
from tnsim.compare.by_kernels import STARTING, Kernels, prepared_under
from tnsim.compare.estimates import Estimate
from tnsim.engine.runtime import execution
from tnsim.problems.kernel_models import PreparedModel, host_sum, mean_part, product_of
from tnsim.scaled import ScaledSum, stacked


class OverUnits(ByPairs):
    """Sums over pairs of hidden units of models that are prepared under the metric."""

    def prepared(self, job: Job, of: Combined, section: None) -> PairBlock:
        """See `Blocks.prepared`."""
        with execution.precision():
            made = [prepared_under(x, job.setting.metric) for x in of.models]
        exponents = np.array([model.exponent for model in made])
        return PairBlock(tuple(made), of.digests, exponents, of.terms, np.ones(len(made)))

    def mean_of(self, job: Job, model: PreparedModel) -> ScaledSum:
        """See `ByPairs.mean_of`."""
        return mean_part(model)

    def paired(
        self, job: Job, models: Sequence[PreparedModel], pairs: Sequence[IndexPair]
    ) -> dict[IndexPair, ScaledSum]:
        """See `ByPairs.paired`."""
        return {(low, high): _product(job, models[high], models[low]) for low, high in pairs}

    def crossed(self, job: Job, rows: PairBlock, columns: PairBlock | None) -> ScaledSum:
        """See `ByPairs.crossed`."""
        if columns is not None:
            return stacked(
                [stacked([_product(job, a, b) for b in columns.models]) for a in rows.models]
            )
        numbers = range(len(rows.models))
        every = itertools.combinations_with_replacement(numbers, 2)
        known = self.paired(job, rows.models, list(every))
        return stacked([stacked([known[min(m, n), max(m, n)] for n in numbers]) for m in numbers])


def _product(job: Job, a: PreparedModel, b: PreparedModel) -> ScaledSum:
    with execution.precision():
        return host_sum(product_of(a, b, job.setting.slices, job.setting.dtype))


class KernelRun(RouteOfRun):
    """The route of a run by sums over pairs of hidden units, see `RouteOfRun`."""

    name = Kernels.name
    way = OverUnits()
    of_pair = Kernels

    def estimate(self, limit: float = math.inf) -> Estimate:
        """See `compare.routes.Weighed`."""
        run = Sizes.of(self.models, self.setting)
        several = [self.alone(model).estimate() for model in self.models.examples.values()]
        largest = max(several, key=lambda planned: planned.multiplications)
        one_pair = run.terms**2 * largest.multiplications
        tile = run.tile(one_pair, 4 * max(1, run.weights))
        stacks = 4 * tile * run.terms * run.weights
        programs = len(self.models.examples) ** 2
        return self.priced(
            run,
            tile,
            multiplications=self.setting.pairs * one_pair,
            peak_bytes=largest.peak_bytes + stacks,
            seconds=STARTING + self.setting.pairs * run.terms**2 * (largest.seconds - STARTING),
            programs=programs,
        )
