"""Which family of problems answers a comparison. In: two models, a metric. Out: a `Family`.

The only place that asks which metric and which kind of models it has before it. The four families:

    Tokens      `Categorical`
    WholeTree   `Symmetric`, and `Gaussian` beyond one nonlinear layer; small sequences alone
    Sequences   every other metric on models of sequences; `GaussianClosure`, and `Gaussian` of one
                nonlinear layer, on vectors beside a constant or a mean: sequences of one position
    LayerWise   every other metric on models of vectors

Beside a constant or a mean, Gaussian moments are carried as means and covariances: raw second
moments lose digits at every layer where a mean is large beside the spread around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tnsim.errors import TooLarge
from tnsim.folding.base import Family
from tnsim.folding.layer_families import LayerWise, Sequences
from tnsim.folding.leaves import must_lift
from tnsim.folding.whole_families import Tokens, WholeTree
from tnsim.metrics.categorical import Categorical
from tnsim.metrics.metric import Gaussian, GaussianClosure, Metric, joins_whole_trees
from tnsim.models.model import Model
from tnsim.tensors.kinds import kinds, nonlinear


def choose(a: Model, b: Model | None, metric: Metric) -> Family:
    """The family that compares two models, or one with itself where `b` is None.

    Raises:
        ModelError: The metric is not defined for these models.
        TooLarge: It is, but nobody could contract what it asks for.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> type(choose(model, None, tnsim.TreeSymmetric())).__name__
        'LayerWise'
    """
    return _family(a, b, metric).of(a, b, metric)


def _family(a: Model, b: Model | None, metric: Metric) -> type[Family]:
    if isinstance(metric, Categorical):
        return Tokens
    other = a if b is None else b
    depth = nonlinear(kinds(a), kinds(other))
    whole = joins_whole_trees(type(metric), depth)
    if a.n_ctx is None:
        if whole:
            return WholeTree
        carries_mean = getattr(metric, "mean", None) is not None
        carries_mean = carries_mean or must_lift(kinds(a), kinds(other))
        gaussian = type(metric) in (Gaussian, GaussianClosure)
        return Sequences if gaussian and carries_mean else LayerWise
    if whole and depth > 1 and WholeTree.fits(a, other, metric):
        return WholeTree
    return Sequences


def has_plan(models: Sequence[Model], metric: Metric) -> bool:
    """Whether a family answers for all of these models under `Categorical`.

    Example:
        >>> import tnsim
        >>> table = tnsim.Model([tnsim.Linear([[1.0, 2.0]])], n_ctx=2)
        >>> has_plan([table], tnsim.Categorical())
        True
    """
    try:
        for model in models:
            choose(model, None, metric)
    except TooLarge:
        return False
    return True
