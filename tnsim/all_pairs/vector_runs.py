"""Vectors of coefficients in a run: each model is a vector, and a pair a dot product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tnsim.all_pairs.run_plan import Models, RouteOfRun, Sizes, memory
from tnsim.all_pairs.ways import Blocks, Combined, Job, PairSetting
from tnsim.compare.by_features import Vectors, expected_seconds
from tnsim.compare.estimates import Estimate
from tnsim.engine.budget import Budget
from tnsim.errors import TooLarge
from tnsim.problems import features
from tnsim.problems.features import FeatureBlock, FeatureSpace
from tnsim.problems.tensors.kinds import Kinds, nonlinear
from tnsim.problems.units import scaled_under
from tnsim.scaled import ScaledSum


@dataclass(frozen=True)
class AsVectors(Blocks):
    """Models as vectors in a space that holds all, one part of the space after another.

    Args:
        space: The space.
    """

    space: FeatureSpace

    @property
    def sections(self) -> Sequence[FeatureSpace]:
        """The parts of the space."""
        return self.space.parts

    def prepared(self, job: Job, of: Combined, section: FeatureSpace) -> FeatureBlock:
        """See `Blocks.prepared`."""
        units, slices = job.setting.units, job.setting.slices
        index, coefficients = of.terms
        # Models in scientific notation, in units that all models of the run share.
        made = [scaled_under(model, units, slices) for model in of.models]
        weights = None
        # Where every entry is a single model with coefficient 1, features need no sums.
        if len(made) < len(index) or index.shape[1] > 1 or (coefficients != 1).any():
            weights = np.zeros((len(index), len(made)))
            # A model may occur in several terms, the coefficients of which add up.
            np.add.at(weights, (np.arange(len(index))[:, None], index), coefficients)
        return features.block(made, weights, section, units.metric)

    def squares(self, job: Job, block: FeatureBlock) -> ScaledSum:
        """See `Blocks.squares`."""
        return features.norms(block, job.setting.slices)

    def means(self, job: Job, block: FeatureBlock, section: FeatureSpace) -> ScaledSum | None:
        """See `Blocks.means`."""
        return features.means(block, section)

    def products(self, job: Job, first: FeatureBlock, second: FeatureBlock) -> ScaledSum:
        """See `Blocks.products`."""
        return features.products(first, second, job.setting.slices)


class VectorRun(RouteOfRun):
    """The route of a run that turns every model into a vector, so that a pair is a dot product.

    Args:
        models: Models of the run.
        setting: Settings common to all pairs.
        space: Space that holds all models.
    """

    def __init__(self, models: Models, setting: PairSetting, space: FeatureSpace) -> None:
        super().__init__(models, setting)
        self.space, self.name, self.way = space, space.route, AsVectors(space)
        self.of_pair = partial(Vectors, space=space)

    def estimate(self, limit: float = math.inf) -> Estimate:
        """See `compare.routes.Weighed`."""
        models, space = self.models, self.space
        made = list(itertools.chain.from_iterable(bases.elements() for bases in models.bases))
        numbers = space.length * space.d_out
        making = sum(space.multiplications(kinds) for kinds in made)
        run = Sizes.of(models, self.setting._replace(dtype="float64"))
        work = making + self.setting.pairs * numbers
        vector_bytes = numbers * run.item
        section_bytes = max(one.length for one in space.parts) * space.d_out * run.item
        kept = len(made) * vector_bytes <= run.available / 2
        streamed = not kept and len(space.parts) > 1
        if streamed:  # a larger tile makes vectors fewer times, so tiles take half the memory
            vector_bytes = section_bytes
            tile = run.tile(1, run.weights + 2 * section_bytes, share=1 / 2)
        else:
            tile = run.tile(numbers, run.weights + 2 * vector_bytes)
        # Every tile makes the features of its rows and its columns, so each model is made about 2
        # tiles x tile / models times.
        if not kept:
            work += 2 * run.tiles(tile) * tile // len(made) * making
        # Features are kept for later tiles: of two blocks, or of all models up to half the memory.
        most = max(2 * tile * vector_bytes, run.available / 2)
        peak = int(min(len(made) * numbers * run.item, most))
        peak += self._making_bytes(run, tile * run.terms, made, section_bytes)
        return self.priced(
            run,
            tile,
            multiplications=work,
            peak_bytes=peak,
            seconds=expected_seconds(work, nonlinear(*models.examples)),
            facts=(("coefficients at most", numbers),),
            streamed=streamed,
            tier="interpret",
        )

    def check(self, estimate: Estimate, budget: Budget) -> None:
        """See `compare.routes.Weighed`. All vectors at hand are to fit the memory as well."""
        super().check(estimate, budget)
        available = memory(self.setting)
        if estimate.peak_bytes > available:
            raise TooLarge(
                f"{estimate.metric} by {self.name} needs {estimate.peak_bytes / 2**30:.3g} GiB, "
                f"and the budget is {available / 2**30:.3g} GiB; give a larger tnsim.Budget"
            )

    @property
    def fits(self) -> bool:
        """Whether vectors of combinations fit, also the memory of the run."""
        within = self.estimate().peak_bytes <= memory(self.setting)
        return features.fits(self.space) and within

    def _making_bytes(
        self, run: Sizes, models: int, made: Sequence[Kinds], section_bytes: int
    ) -> int:
        """Working bytes for making a section of the features of `models` distinct models."""
        combined = models * section_bytes if run.terms > 1 else 0
        stacks = 2 * models * run.weights  # as read and in units of the run
        in_flight = max(self.space.in_flight(kinds, models) for kinds in made) * run.item
        return combined + stacks + in_flight
