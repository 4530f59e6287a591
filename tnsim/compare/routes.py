"""The route by which models are compared.

    kernels     a single nonlinear layer with an activation                    `by_kernels`
    features    vectors of coefficients: sparse layers, and deep polynomials   `by_features`
                where they take less than diagrams
    points      finite measures, and quadrature where it takes less            `by_points`
    plans       everything else                                                `planned`

Whoever compares or plans asks here, so that a plan says what a comparison does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from tnsim.compare.by_features import beats_diagrams, space_of, work_of
from tnsim.compare.by_points import points_of
from tnsim.engine.budget import Budget
from tnsim.metrics.points import Points
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.model import Model
from tnsim.names import Pair
from tnsim.problems.features import FeatureSpace
from tnsim.problems.kernels import answers

Route: TypeAlias = FeatureSpace | Points | Literal["kernels", "plans"]
"""A route, with the space of its vectors or with its points."""


def route_of(
    models: Sequence[Model],
    metric: Metric,
    wanted: tuple[Pair, ...],
    slices: bool,
    dtype: str,
    budget: Budget,
    traced: bool = False,
) -> Route:
    """The route of a comparison.

    Args:
        models: All models of both sides; empty where only plain functions are compared.
        metric: Metric of the comparison.
        wanted: Inner products that are wanted.
        slices: Whether outputs are told apart.
        dtype: Precision of a plan or of forward passes.
        budget: Budget of the comparison.
        traced: Whether models or metric are traced, so that no route may look at numbers.
    """
    if answers(models, metric):
        return "kernels"
    distinct = list({id(model): model for model in models}.values())
    space, work = None, math.inf
    if not traced and distinct and not adds_up(metric):
        space = space_of(distinct, metric, wanted)
    if space is not None:
        if space.on_host:
            return space
        work = work_of(space, distinct)
    points = None
    # Gauss nodes are chosen by the numbers in models and metric, which a trace does not have.
    if not traced or adds_up(metric):
        points = points_of(models, metric, wanted, slices, dtype, most=work)
    if points is not None:
        return points
    if space is not None and beats_diagrams(space, distinct, metric, wanted, slices, dtype, budget):
        return space
    return "plans"
