"""The units and bases in which the models of a comparison are written.

All models of a comparison share units of the inputs, and whether units of bonds follow the weights
alone (`models.scaling`) or the sizes of states under the metric (`state_sizes`). A model whose sums
cancel in the basis that it has gets another one (`conditioning`). Derivatives take all of this as
constants, a *gauge*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from tnsim.engine.precision import cancellation
from tnsim.metrics.input_moments import (
    GaussianMoments,
    check_coordinates,
    in_input_units,
    input_sizes,
    sequence_inputs,
)
from tnsim.metrics.protocol import Metric
from tnsim.models.layers import Residual
from tnsim.models.matrices import is_sparse
from tnsim.models.model import Model
from tnsim.models.scaling import StateSizes, Unit, nearest_unit, scaled_with_shifts
from tnsim.problems.conditioning import (
    Bases,
    amplification,
    in_given_bases,
    sampled_inputs,
    without_skew,
)
from tnsim.problems.state_sizes import SampledStates, input_states
from tnsim.problems.tensors.kinds import kinds, need_constant
from tnsim.scaled import Scaled, library, shifted

_SAMPLES = 64
"""Number of inputs on which the states of sparse layers are measured."""


class Units(NamedTuple):
    """Conventions on units that all models of a single comparison share.

    Args:
        metric: Metric of the inputs in their units.
        inputs: Exponents of the units of the inputs, the same for all or for each coordinate.
        by_states: Whether units of bonds follow the states of the model under the metric instead of
            the weights.
    """

    metric: Metric
    inputs: Unit
    by_states: bool


class ScaledModel(NamedTuple):
    """A model in scientific notation, `2 ** exponent * value`.

    Attributes:
        value: Model with weights and states near 1, read in the units of the inputs.
        exponent: Exponent of the model, or of each output.
        cancels: Ratio of the terms within its inner products to the inner products, as forward
            passes show it (see `precision.cancellation`); inside a trace an array.
    """

    value: Model
    exponent: Unit
    cancels: Any


def scaled_under(model: Model, units: Units, slices: bool) -> ScaledModel:
    """A model in scientific notation under a metric, see `scaling.scaled`.

    A model with a hidden basis far from orthogonal gets another, see `conditioning`.

    Args:
        model: Any model of known layers, traced or not.
        units: Units of the comparison, under a metric that joins legs or `Categorical`.
        slices: Whether each output has an exponent of its own.

    Example:
        The states of this model are of size 18, 2,900 and 7 * 10^7, so its bonds take the units
        2^8, 2^8 and 2^24; two units of the last bond are left to the output.

        >>> import tnsim
        >>> two = np.full((1, 1), 2.0)
        >>> layer = tnsim.Bilinear(two, two, two, two[0], two[0], two[0])
        >>> cube = tnsim.Model([layer] * 3)
        >>> units = common_units([cube], tnsim.TreeSymmetric())
        >>> model, exponent, _ = scaled_under(cube, units, slices=False)
        >>> float(exponent), [float(abs(model(np.zeros(1)))[0]) < 16]
        (40.0, [True])
    """
    return with_gauge(model, units, slices)[0]


class Gauge(NamedTuple):
    """The changes of basis that write a model in scientific notation.

    Attributes:
        shifts: A model with exponents of two in the place of every number of its arrays.
        bases: Bases that bonds are given then; None where they have their own, and in a trace.
        further_shifts: Exponents for the arrays in these bases; None where they are in range.
    """

    shifts: Model
    bases: Bases | None
    further_shifts: Model | None = None


def with_gauge(model: Model, units: Units, slices: bool) -> tuple[ScaledModel, Gauge]:
    """A model in scientific notation, see `scaled_under`, and the changes that write it so.

    Args:
        model, units, slices: Arguments of `scaled_under`.

    Returns:
        The model that `scaled_under` gives, and its gauge. The function that the model computes
        does not depend on it, so derivatives take the gauge as a constant, see `in_gauge`.
    """
    (made, exponent), shifts = in_own_basis(model, units, slices)
    if is_sparse(model):  # another basis would fill its matrices
        amplified = amplification(made, units.metric)
        return ScaledModel(made, exponent, cancellation(amplified)), Gauge(shifts, None)
    gauged, bases, amplified = without_skew(made, units.metric)
    further = None
    if gauged is not made and not units.by_states:
        # In a rotated basis rows of all sizes meet, so units follow the states. Without, squares of
        # small states leave float32: where all operations run in it, a cosine at condition 10^6 was
        # off by 0.03, its bound 5e-6.
        states = input_states(gauged, units.metric)
        (gauged, beyond), further = scaled_with_shifts(gauged, slices, states)
        exponent = exponent + beyond
    return ScaledModel(gauged, exponent, cancellation(amplified)), Gauge(shifts, bases, further)


def in_own_basis(model: Model, units: Units, slices: bool) -> tuple[Scaled[Model], Model]:
    """A model in the units of a comparison, and its shifts, see `scaling.scaled_with_shifts`.

    Args:
        model, units, slices: Arguments of `scaled_under`.

    Example:
        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[2.0**80]])])
        >>> float(in_own_basis(line, common_units([line], tnsim.Gaussian()), False)[0].exponent)
        80.0
    """
    states: StateSizes | None = None
    if units.by_states and is_sparse(model):
        # States below the first layer on random inputs with the moments of the metric.
        rng = np.random.default_rng(0)
        inputs = sampled_inputs(model, units.metric, rng, _SAMPLES)
        states = SampledStates(np.asarray(inputs, np.float64))
    elif units.by_states:
        states = input_states(model, units.metric)
    return scaled_with_shifts(model, slices, states, units.inputs)


def in_gauge(model: Model, gauge: Gauge) -> Model:
    """A model in a gauge that was found for its numbers, as a function with derivatives.

    Args:
        model: A model, traced or not.
        gauge: Changes of basis for the model, found outside of a trace.

    Example:
        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear(np.array([[3e-200, 1e-200]]))])
        >>> found, gauge = with_gauge(line, common_units([line], tnsim.Gaussian()), False)
        >>> again = in_gauge(line, gauge)
        >>> bool((again.layers[0].weight == found.value.layers[0].weight).all())
        True
    """
    made = jax.tree.map(shifted, model, gauge.shifts)
    if gauge.bases is not None:
        gauged = in_given_bases(made, gauge.bases)
        made = jax.tree.map(lambda new, old: new.astype(old.dtype), gauged, made)
    if gauge.further_shifts is not None:
        made = jax.tree.map(shifted, made, gauge.further_shifts)
    return made


def follow_states(models: Iterable[Model]) -> bool:
    """Whether units of some models that are compared must follow the sizes of states.

    Units must follow states where the constant 1 is a coordinate of the states (see
    `kinds.need_constant`). So they do below attention: a moment of two of its outputs is a moment
    of ten states, and steps of 2^8 in the weights of two layers would take it out of the range of
    float32.

    Example:
        >>> import tnsim
        >>> square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> follow_states([tnsim.Model([square])])
        False
        >>> follow_states([tnsim.Model([tnsim.Residual(square)])])
        True
    """
    if any(model.attends for model in models):
        return True
    return need_constant({kinds(model) for model in models})


def common_units(models: Collection[Model], metric: Metric) -> Units:
    """The units that the models of a single comparison share.

    Args:
        models: All models of the comparison, or a model of each sequence of layer kinds.
        metric: The metric of the comparison.

    Raises:
        ModelError: The metric is for other inputs.

    Example:
        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0, 1.0]])])
        >>> units = common_units([line], tnsim.Gaussian(cov=[2.0**80, 1.0]))
        >>> units.inputs.tolist(), units.metric.cov.tolist()
        ([40.0, 0.0], [1.0, 1.0])
    """
    return in_units_of_inputs(models, metric, units_of_inputs(models, metric))


def units_of_inputs(models: Collection[Model], metric: Metric) -> Unit | None:
    """Exponents of the units of the inputs; None where all are 0 (never in a trace).

    Coordinates of the inputs are as far from 1 as the covariance and the mean of the metric say,
    and a plan may contract weights before moments. Inputs therefore have units too, near their
    deviations or means. The residual stream of a first layer leaves them a single unit.

    Args:
        models, metric: Arguments of `common_units`.

    Example:
        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0, 1.0]])])
        >>> units_of_inputs([line], tnsim.Gaussian(cov=[2.0**80, 1.0])).tolist()
        [40.0, 0.0]
    """
    if not isinstance(metric, GaussianMoments):
        return None
    first = next(iter(models))
    if first.n_ctx is None:
        check_coordinates(metric, first.d_in)
    else:
        sequence_inputs(metric, first.d_in, first.n_ctx)
    sizes = input_sizes(metric, first.d_in)
    # A skip carries the inputs on as they are, so all coordinates get a single unit.
    if any(isinstance(model.layers[0], Residual) for model in models):
        sizes = sizes.max()
    unit = nearest_unit(sizes)
    return None if library(unit) is np and not unit.any() else unit


def in_units_of_inputs(models: Collection[Model], metric: Metric, unit: Unit | None) -> Units:
    """The units of a comparison, given the units of its inputs.

    Args:
        models, metric: Arguments of `common_units`.
        unit: Exponents of the units of the inputs, as `units_of_inputs` gives them.

    Example:
        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0, 1.0]])])
        >>> in_units_of_inputs([line], tnsim.Gaussian(), None).by_states
        False
    """
    if unit is not None:
        metric = in_input_units(metric, unit, next(iter(models)).d_in)
    return Units(metric, np.zeros(()) if unit is None else unit, follow_states(models))
