"""The request of a verb, the question of its route, and the inner products that answer both."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import Tracer

from tnsim.checkpoints.given import check_chooses, given_model
from tnsim.compare.operands import is_known_constant
from tnsim.engine.planner import Budget
from tnsim.errors import ModelError, UnsupportedLayer
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.metric import Gaussian, as_metric, estimate_of, is_metric
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.functions import Function, is_function, is_module, loaded, refused_under
from tnsim.models.model import AnyModel, Model, check_comparable, check_numbers, terms
from tnsim.names import Pair
from tnsim.problems.at_points import Sums, Terms
from tnsim.problems.hidden_units import has_kernels
from tnsim.problems.layer_kinds import kinds, nonlinear
from tnsim.scaled import ScaledSum

log: logging.Logger = logging.getLogger(__name__)

CROSS = (Pair("A", "B"),)  # the inner product alone
ALL = (Pair("A", "A"), Pair("A", "B"), Pair("B", "B"))  # the inner product and both norms
SELF = (Pair("A", "A"),)  # a model with itself, where all three are equal
Comparable: TypeAlias = AnyModel | Function | str | os.PathLike[str]
"""A model or a sum of models, a module of PyTorch or the path of a file; under `Empirical` also a
plain function."""
MOST_DEGREE = 10**100
"""Highest degree of a polynomial that is compared. The logarithms of its values grow with the
degree, and squares of these logarithms must be floats."""


class Question(NamedTuple):
    """A comparison as far as its route depends on it.

    Args:
        models: All models of both sides; empty where only plain functions are compared. The first
            and the last are an example of a pair.
        metric: Metric of the comparison.
        wanted: Inner products that are wanted.
        slices: Whether outputs are told apart.
        dtype: Precision of the computation.
        traced: Whether models or metric are traced, so that no route may look at numbers.
    """

    models: tuple[Model, ...]
    metric: Metric
    wanted: tuple[Pair, ...]
    slices: bool
    dtype: str
    traced: bool = False

    @property
    def distinct(self) -> list[Model]:
        """The models, each once."""
        return list({id(model): model for model in self.models}.values())

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the inner products."""
        return tuple(pair.group for pair in self.wanted)


class Request(NamedTuple):
    """What a verb asks of two models, or of two sums of models.

    Args:
        metric: Metric of the comparison.
        dtype: Precision of the computation.
        budget: Limits of the computation.
        squared_norms: Whether `AA` and `BB` are wanted as well as `AB`, as a cosine needs.
        slices: Whether outputs are told apart.
        centred: Whether the models are given without their means.
    """

    metric: Metric
    dtype: str
    budget: Budget
    squared_norms: bool = False
    slices: bool = False
    centred: bool = False

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The inner products that are wanted."""
        return ALL if self.squared_norms else CROSS


class InnerProducts(NamedTuple):
    """Inner products of two models.

    Args:
        values: Inner product `AB` and, with norms, `AA` and `BB`.
        exponent: Exponent of the power of two by which `AB` is to be multiplied. The norms lack
            powers of their own, which cancel in a cosine.
        traced: Whether the values are traced.
        dtype: Precision of the computation: float64 also where float32 was asked for and would
            have left few digits.
        route: Name of the route, see `Estimate.route`.
        sums: Sums of the forward passes over groups of points, for standard errors.
        inputs: Number of inputs of the forward passes, None where nothing was run.
        mean_share: Share of the squared norm that both functions have in their means over the
            inputs, the smaller of the two; None where it is not known.
    """

    values: dict[str, ScaledSum]
    exponent: Any
    traced: bool
    dtype: str
    route: str
    sums: Sums | None = None
    inputs: int | None = None
    mean_share: float | None = None


Two: TypeAlias = tuple[Comparable, Comparable]
"""The two sides of a comparison."""
Answer: TypeAlias = Callable[[InnerProducts, Two, Request], Any]
"""A function of inner products that gives a number, or a pair of a number and of numbers that
accompany it without derivatives."""


def comparables(
    a: Any, b: Any, metric: Any, n_ctx: int | None, *, runs: bool = False
) -> tuple[Any, Any]:
    """The two sides of a comparison as models and functions.

    Args:
        a, b: Arguments of a verb, see `Comparable`.
        metric: Metric of the comparison. `Empirical` runs modules on its inputs.
        n_ctx: Length of the sequences on which models with attention are compared.
        runs: Whether modules that cannot be read as models are compared by their outputs.

    Returns:
        Models, sums of models and plain functions.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: A file or a module cannot be read as a model,
            or a metric stands in the place of the second side.
    """
    if is_metric(b):  # as `pairwise` has it, after many models
        raise ModelError(
            f"the second of two networks is a metric, {type(b).__name__}: give it as metric="
        )
    inputs = output = None
    if isinstance(metric, Empirical):
        inputs, output = metric.inputs, metric.output
    first = given_model(a, n_ctx, inputs, output, runs, shape_of(metric, a, b))
    shape = shape_of(metric, first, b)
    both = first, first if b is a else given_model(b, n_ctx, inputs, output, runs, shape)
    check_chooses(output, both)
    return both


def shape_of(metric: Any, *given: Any) -> tuple[int, ...]:
    """The shape of an input as a metric weighs it, or the width that a model reads.

    Args:
        metric: Metric of a comparison.
        given: What is compared.

    Returns:
        The shape (d,) or (positions, d); () where neither the moments of the metric nor a model
        say it.

    Example:
        >>> shape_of(Gaussian(mean=np.zeros((2, 3)))), shape_of(Gaussian())
        ((2, 3), ())
    """
    mean, cov = (getattr(metric, name, None) for name in ("mean", "cov"))
    if mean is not None and np.ndim(mean):
        return tuple(np.shape(mean))
    if cov is not None and np.ndim(cov):
        return tuple(np.shape(cov)[-1:])
    models = [part for one in given if isinstance(one, AnyModel) for _, part in terms(one)]
    return (models[0].d_in,) if models else ()


def with_metric(a: Any, b: Any, metric: Metric | str, n_ctx: int | None) -> tuple[Any, Any, Metric]:
    """The two sides of a comparison, and the metric that compares them.

    Args:
        a, b: Arguments of a verb, see `Comparable`.
        metric: Metric that was asked for, or its name.
        n_ctx: Length of the sequences on which models with attention are compared.

    Returns:
        Models, sums of models and plain functions; and the metric, or its estimate where `Gaussian`
        has no exact inner product of them, see `estimated`.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: A file or a module cannot be read as a model,
            and cannot be run on inputs of the metric.
    """
    metric = as_metric(metric)
    a, b = comparables(a, b, metric, n_ctx, runs=may_estimate(metric))
    return a, b, estimated(metric, (a, b), n_ctx)


def may_estimate(metric: Any) -> bool:
    """Whether a metric has an estimate for networks without an exact inner product.

    Example:
        >>> import tnsim
        >>> may_estimate(tnsim.Gaussian()), may_estimate(tnsim.Gaussian(samples=0))
        (True, False)
    """
    # A subclass may weigh inputs otherwise, so only the class itself has normal inputs.
    return type(metric) is Gaussian and metric.samples > 0


def estimated(metric: Any, models: Sequence[Any], n_ctx: int | None) -> Any:
    """The metric by which models and functions are compared: exact, or by an estimate.

    Args:
        metric: Metric that was asked for.
        models: Models, sums of models, modules and plain functions under comparison.
        n_ctx: Length of sequences, where modules or functions read sequences.

    Returns:
        The metric itself; of a `Gaussian` that knows no exact inner product of these models a
        `GaussianEstimate`, which runs them on normal inputs.

    Raises:
        ModelError: Nothing says which inputs the functions take.

    Example:
        >>> import tnsim
        >>> half = tnsim.Linear([[0.5]]), tnsim.Elementwise("relu")
        >>> shallow, deep = tnsim.Model(half), tnsim.Model(half * 2)
        >>> [type(estimated(tnsim.Gaussian(), [m], None)).__name__ for m in (shallow, deep)]
        ['Gaussian', 'GaussianEstimate']
    """
    if not may_estimate(metric):
        return metric
    read = [part for model in models if isinstance(model, AnyModel) for _, part in terms(model)]
    if not any(map(is_function, models)):
        if not read:
            return metric  # neither models nor functions, which the comparison refuses
        try:
            has_kernels(read, metric)
        except UnsupportedLayer as refusal:
            log.info("no exact inner product, so an estimate is made: %s", refusal)
        else:
            return metric
    return estimate_of(metric, _input_shape(metric, models, read, n_ctx))


def _input_shape(
    metric: Gaussian, models: Sequence[Any], read: Sequence[Model], n_ctx: int | None
) -> tuple[int, ...]:
    """The shape of a single input: as a model reads it, as the metric says, or a module takes."""
    if read:
        one = read[0]
        return (one.d_in,) if one.n_ctx is None else (one.n_ctx, one.d_in)
    if known := shape_of(metric):
        return known if n_ctx is None or len(known) == 2 else (n_ctx, *known)
    for model in map(loaded, models):
        if is_module(model):
            from tnsim.checkpoints.module_calls import shape_of_inputs

            return shape_of_inputs(model, n_ctx)
    raise ModelError(
        "nothing says which inputs these functions take: give tnsim.Gaussian(mean=np.zeros(d)) "
        "for vectors of d coordinates, or inputs of your own by tnsim.Empirical(inputs)"
    )


def at_numbers(a: Any, b: Any, metric: Any) -> bool:
    """Whether JAX differentiates a comparison, with numbers at hand, along plans or kernels.

    Args:
        a, b: Models, combinations of models or functions.
        metric: Metric of the comparison. Points of finite metrics run inside the trace.

    Example:
        >>> import numpy as np, tnsim
        >>> found = []
        >>> def loss(weight):
        ...     model = tnsim.Model([tnsim.Linear(weight)])
        ...     found.append(at_numbers(model, model, tnsim.Gaussian()))
        ...     return weight.sum()
        >>> _ = jax.grad(loss)(np.eye(2)), jax.jit(loss)(np.eye(2)), loss(np.eye(2))
        >>> found
        [True, False, False]
    """
    if is_known_constant(a) and is_known_constant(b) and not jax.tree.leaves(metric):
        return False
    leaves = jax.tree.leaves((a, b, metric))
    tracers = [leaf for leaf in leaves if isinstance(leaf, Tracer)]
    if not tracers or is_function(a) or is_function(b) or adds_up(metric):
        return False
    return all(tracer.to_concrete_value() is not None for tracer in tracers)


def summands(model: Any) -> Terms:
    """The coefficients and models of a sum; a model or a plain function is a sum of a single term.

    Raises:
        ModelError: The argument is neither a model, nor a combination of models, nor a function.
    """
    return ((1.0, model),) if is_function(model) else terms(model)


def smaller_share(*shares: float) -> float | None:
    """The smaller of two shares; None where one of them is not known.

    Example:
        >>> smaller_share(0.5, 0.9), smaller_share(0.5, math.nan), smaller_share()
        (0.5, None, None)
    """
    return None if not shares or np.isnan(shares).any() else min(shares)


def highest_degree(models: Iterable[Comparable]) -> int:
    """The highest degree, or growth, of the models; plain functions count as degree 1."""
    degrees = [1]
    for model in models:
        degrees += [part.growth for _, part in summands(model) if isinstance(part, Model)]
    return max(degrees)


def is_exact(metric: Metric, models: Iterable[Model]) -> bool:
    """Whether a metric's definition is met exactly, of these models, whatever the route.

    Args:
        metric: Metric of the comparison.
        models: Models that are compared; a metric that adds up over inputs does not ask for them.

    Example:
        >>> import tnsim
        >>> is_exact(tnsim.Categorical(), []), is_exact(tnsim.Categorical(samples=10), [])
        (True, False)
    """
    depth = 0 if adds_up(metric) else nonlinear(*map(kinds, models))
    return bool(metric.is_exact(depth))


def check_comparison(a: Any, b: Any, metric: Any) -> None:
    """Raise `ModelError` or `UnsupportedLayer` unless the metric can compare the two models."""
    as_metric(metric)
    degree = highest_degree((a, b))
    if degree > MOST_DEGREE:
        raise ModelError(
            f"a polynomial of degree 10^{math.log10(degree):.0f} has values whose logarithms "
            "are beyond float64: degrees up to 10^100 are compared, which are 332 bilinear "
            "layers; compare models of fewer layers"
        )
    if is_function(a) or is_function(b):
        check_numbers(*(model for model in (a, b) if isinstance(model, AnyModel)))
        if not isinstance(metric, Empirical):  # a plain function gives outputs and nothing else
            raise refused_under(metric)
        return
    one, two = terms(a)[0][1], terms(b)[0][1]
    check_numbers(*(model for model in (a, b) if not is_known_constant(model)))
    check_comparable(one, two)
    has_kernels([part for model in (a, b) for _, part in terms(model)], metric)
    if one.n_ctx is None and (one.attends or two.attends):
        raise ModelError(
            "attention is compared on sequences of one length: give n_ctx=, as in "
            "tnsim.similarity(a, b, n_ctx=12), or tnsim.load(..., n_ctx=12) (--n-ctx)"
        )
