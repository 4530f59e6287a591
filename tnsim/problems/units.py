"""The units and bases in which the models of a comparison are written.

All models of a comparison share units of the inputs, and whether units of bonds follow the weights
alone (`models.scaling`) or the sizes of states under the metric (see below). A model whose sums
cancel in the basis that it has gets another one (`conditioning`). Derivatives take all of this as
constants, a *gauge*.

*Sizes of states.* Units of bonds follow these sizes (see `models.scaling`). A state h is known by
its lifted second moment and mean, with `h~ = (1, h)`,

    S = <h~ h~^T>,        m = <h~>,

where the brackets are the average of the metric: a layer's output is a product of legs, and its
second moment a sum over the joinings that the metric has for two layers of equal order, as in the
recursion that plans run (`sequences`). For the layer-wise metrics the sizes are therefore the sizes
of the arrays that a plan holds, at any depth. For metrics of whole trees they are the sizes under
the nearest layer-wise metric, `GaussianClosure` or `TreeSymmetric`, which differ by factors that
few layers do not carry out of range.

*Sequences.* A state is known at a single position, as an average over all positions. Attention
multiplies states at several positions. Its output is measured as if its five legs were independent,
which is the tensor's norm as written. Its second moment is a sum over pairs of keys t and t'. With
T = S for a key with itself, T = m m^T for two different keys, M_q = Q S Q^T, M_k = K T K^T and
M_v = V T V^T by head,

    S'[d, e] = 1 / d_head^4  sum_tt'  tr(M_q1 M_k1) tr(M_q2 M_k2) M_v[d, e].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Float

from tnsim.engine.precision import cancellation
from tnsim.metrics.finite_measures import Categorical
from tnsim.metrics.input_moments import (
    GaussianMoments,
    MomentInParts,
    check_coordinates,
    in_input_units,
    input_sizes,
    moments_at_a_position,
    sequence_inputs,
)
from tnsim.metrics.metric import GaussianClosure, TreeSymmetric
from tnsim.metrics.orbits import JoinedLeg, Joining, PairingRule, gaussian, joinings
from tnsim.metrics.protocol import Metric, joins_layers
from tnsim.models.arrays import Array, affine, bias_name, in_float64, is_sparse, pytree
from tnsim.models.layers import Attention, Layer, Residual, residual_rule
from tnsim.models.model import Model
from tnsim.models.scaling import StateSizes, Unit, nearest_unit, scaled_with_shifts
from tnsim.names import DOWN, SKIP, UNIT, Side
from tnsim.problems.conditioning import (
    Bases,
    amplification,
    in_given_bases,
    sampled_inputs,
    without_skew,
)
from tnsim.problems.layer_kinds import core_of, kinds, need_constant
from tnsim.problems.layer_tensors import arrays, with_bias
from tnsim.scaled import Scaled, library, not_differentiated, shifted

_ROWS_AT_ONCE = 1024
"""Number of rows of the second moment of hidden units that are held at a time."""
_MOST_ORDERS = 5
"""Most legs of a layer for an average over their orders: six legs have 720 orders."""

Joinings: TypeAlias = tuple[Joining, ...]
LegRows: TypeAlias = Float[Array, "rows lifted"] | None
"""Vectors by which a leg reads the lifted state; None for each coordinate, as the identity would.
A single row, such as that of the constant, stands for as many equal rows as other legs have."""


_SAMPLES = 64
"""Number of inputs on which the states of sparse layers are measured."""


@pytree
@dataclass(frozen=True, eq=False)
class MeasuredStates:
    """Lifted moments of a state, in the units of its bond; implements `scaling.StateSizes`.

    Args:
        second: S, (1 + width, 1 + width), the constant first; or in parts.
        mean: m, (1 + width,).
        rule: Rule by which the legs of two layers are joined.
        positions: Number of positions over which attention adds up keys.
    """

    second: Float[Array, "lifted lifted"] | MomentInParts
    mean: Float[Array, " lifted"]
    rule: PairingRule = dataclasses.field(metadata={"static": True})
    positions: int = dataclasses.field(metadata={"static": True})

    @property
    def sizes(self) -> Unit:
        """Sizes of the coordinates of the state, (width,), without the constant."""
        return _half_log2(_moment_matrix(self.second).diagonal()[1:])

    def of_rows(self, weight: Any, bias: Any) -> Unit:
        """Sizes of the entries of `W h + b`."""
        weight, bias = not_differentiated((weight, bias))
        rows = with_bias(weight, bias)
        # E[(w . x)^2] = w^T S w, row by row.
        return _half_log2((_times_moment(rows, self.second) * rows).sum(axis=1))

    def in_units(self, unit: Unit) -> MeasuredStates:
        """The same moments in units of `2 ** unit`."""
        xp = library(self.second, unit)
        # x = 2^u x' gives E[x'_i x'_j] = 2^(-u_i - u_j) E[x_i x_j]; the constant in front has the
        # unit 0.
        factors = xp.exp2(-unit) * xp.ones(len(self.mean) - 1)
        factors = xp.concatenate([xp.ones(1), factors])
        second = self.second * factors * factors[:, None]
        return dataclasses.replace(self, second=second, mean=self.mean * factors)

    def after(self, layer: Layer) -> MeasuredStates:
        """The states above a layer that is written in the units of this state."""
        layer = in_float64(not_differentiated(layer))
        core = core_of(layer)
        if isinstance(core, Attention):
            return self._after_attention(layer, core)
        roles = arrays(layer, lifted=True)
        if DOWN not in roles:
            (weight,) = roles.values()
            # For a linear layer S' = W S W^T.
            second = _times_moment(weight, self.second) @ weight.T
            return dataclasses.replace(self, second=second, mean=weight @ self.mean)
        return self._after_product(layer, roles)

    def _after_product(self, layer: Layer, roles: dict[str, Any]) -> MeasuredStates:
        """The states above a product of legs, with or without a skip.

        With h the products of legs, `D h + s x` has the second moment

            D <h h^T> D^T + s (D <h x^T> + <x h^T> D^T) + s^2 <x x^T>.

        The state x stands for a product of n legs as in `layer_tensors`: the mean over j of "leg
        j reads the state, the others the constant".
        """
        # Hidden units may be many (`_ROWS_AT_ONCE`): <h h^T> is never held whole, only a band of
        # its rows times D^T.
        down = roles[DOWN]
        legs = [rows for role, rows in roles.items() if role not in (DOWN, SKIP, UNIT)]
        order = len(legs)
        across = joinings(self.rule, order, order, False)
        # The tree metrics, without means, have no joinings of one layer.
        within = gaussian(order, 0, False) if self.rule is PairingRule.ISSERLIS else ()
        second: Any = 0.0
        for start in range(0, len(legs[0]), _ROWS_AT_ONCE):
            some = [rows[start : start + _ROWS_AT_ONCE] for rows in legs]
            block = _joined(self, across, some, legs) @ down.T
            second = second + down[:, start : start + _ROWS_AT_ONCE] @ block
        mean = down @ _joined(self, within, legs, ())[:, 0] if within else 0.0 * down[:, 0]
        if isinstance(layer, Residual):
            skip = roles[SKIP][0]
            constant = np.eye(1, len(self.mean))
            streams: list[list[LegRows]] = []
            for j in range(order):
                streams.append([None if i == j else constant for i in range(order)])
            crossed: Any = 0.0
            for stream in streams:
                crossed = crossed + down @ _joined(self, across, legs, stream) / order
            # <x x^T> of the stream as it stands in products: n ways on either side, of weight 1/n
            # each.
            carried: Any = 0.0
            for one, two in itertools.product(streams, streams):
                carried = carried + _joined(self, across, one, two) / order**2
            second = second + skip * (crossed + crossed.T) + skip**2 * carried
            mean = mean + skip * self.mean
        return dataclasses.replace(self, second=second, mean=mean)

    def _after_attention(self, layer: Layer, core: Attention) -> MeasuredStates:
        """The states above attention, with legs independent, and skips independent of heads."""
        xp = library(core.o, self.second)
        # A causal query at position s sees s + 1 keys, (n + 1) / 2 of them on average.
        keys = (self.positions + 1) / 2 if core.mask == "causal" else float(self.positions)

        def of_heads(name: str, moment: Any) -> Any:
            """The moments <rows rows^T> of the rows of every head, (heads, rows, rows)."""
            rows = with_bias(getattr(core, name), getattr(core, bias_name(name)))
            # Shape (heads, rows of a head, coordinates).
            read = _times_moment(rows, moment).reshape(core.n_heads, -1, rows.shape[1])
            return read @ rows.reshape(core.n_heads, -1, rows.shape[1]).swapaxes(1, 2)

        def of_values(key: Any) -> Any:
            """The moments <z z^T> of heads with the second moment `key` of keys and values."""
            # Two scores q . k / d_head, both squared in the second moment.
            scores: Any = 1.0 / core.d_head**4
            for query, name in (("q1", "k1"), ("q2", "k2")):
                # E[(q . k)^2] = sum_ij E[q_i q_j] E[k_i k_j] for independent queries and keys.
                product = of_heads(query, self.second) * of_heads(name, key)
                scores = scores * product.sum(axis=(1, 2))
            return scores[:, None, None] * of_heads("v", key)

        # Keys vary independently around a common mean. Of the keys^2 pairs of keys in E[z z^T],
        # keys(keys - 1) are two different keys, which have the mean in common and nothing else; the
        # others are a key with itself.
        in_common = keys * max(keys - 1, 0.0) * of_values(xp.outer(self.mean, self.mean))
        heads = keys * of_values(self.second) + in_common
        skip, scale = residual_rule(layer) if isinstance(layer, Residual) else (0.0, 1.0)
        down = scale * core.o
        # O is (out, heads x values); heads are summed after each has been multiplied with its own
        # moment.
        by_head = down.reshape(core.d_out, core.n_heads, -1).swapaxes(0, 1) @ heads
        second = by_head.swapaxes(0, 1).reshape(down.shape) @ down.T
        mean = xp.zeros(core.d_out) if core.o_bias is None else scale * core.o_bias
        second = second + mean[:, None] * mean[None, :]
        if isinstance(layer, Residual):
            second = second + skip**2 * _moment_matrix(self.second)[1:, 1:]
            mean = mean + skip * self.mean[1:]
        lifted = xp.concatenate([mean[:, None], second], axis=1)
        mean = xp.concatenate([xp.ones(1), mean])
        return dataclasses.replace(self, second=xp.concatenate([mean[None, :], lifted]), mean=mean)


@pytree
@dataclass(frozen=True, eq=False)
class SampledStates:
    """States on some inputs, in the units of their bond; implements `scaling.StateSizes`.

    Second moments of the states of sparse layers would be dense.

    Args:
        values: States (points, width), or (points, positions, width).
    """

    values: Float[Array, "points *positions width"]

    @property
    def sizes(self) -> Unit:
        """Root mean squares of the coordinates of the state, (width,)."""
        return _root_mean_squares(self.values)

    def of_rows(self, weight: Any, bias: Any) -> Unit:
        """Sizes of the entries of `W h + b`."""
        return _root_mean_squares(affine(self.values, weight, bias))

    def in_units(self, unit: Unit) -> SampledStates:
        """The same states in units of `2 ** unit`."""
        return SampledStates(shifted(self.values, -unit))

    def after(self, layer: Layer) -> SampledStates:
        """The states above a layer that is written in the units of this state."""
        return SampledStates(in_float64(layer)(self.values))


def _joined(
    states: MeasuredStates, joinings: Joinings, bra: Sequence[LegRows], ket: Sequence[LegRows]
) -> Any:
    """The moments `<prod_i bra_i[r] prod_j ket_j[q]>` of products of legs, joined in some ways.

    Args:
        states: States that the legs read.
        joinings: Joinings of the legs, at least one.
        bra, ket: Legs of both sides; none in the ket for the mean of a layer.

    Returns:
        Matrix (rows of the bra, rows of the ket), of one column where the ket has no legs.
    """
    legs = {"A": bra, "B": ket}
    # Moments of pairs of legs, which many joinings have in common, by their places on both sides.
    known: dict[tuple[JoinedLeg, JoinedLeg], Any] = {}

    def along(value: Any, side: Side) -> Any:
        """A vector over the rows of a side, to be multiplied with a matrix over both."""
        return value[:, None] if side == "A" else value[None, :]

    def moments(one: JoinedLeg, two: JoinedLeg) -> Any:
        if (one, two) not in known:
            rows, others = (legs[leg.side][leg.index] for leg in (one, two))
            if one.side != two.side:
                read = _read_moment(rows, states.second)
                known[one, two] = read if others is None else read @ others.T
            else:
                if others is None:  # at most one leg of a stream reads the state
                    rows, others = others, rows
                read = _read_moment(rows, states.second)
                known[one, two] = along((read * others).sum(axis=1), one.side)
        return known[one, two]

    total: Any = 0.0
    for joining in joinings:
        orders = {}
        for side, own in legs.items():
            every = itertools.permutations(range(len(own)))
            told = side in joining.symmetrised and len(own) <= _MOST_ORDERS
            orders[side] = list(every if told else itertools.islice(every, 1))
        # A joining stands for its orbit only after the mean over the orders of legs that it tells
        # apart.
        share = joining.weight / math.prod(map(len, orders.values()))
        for of_bra, of_ket in itertools.product(*orders.values()):
            places = {"A": of_bra, "B": of_ket}
            product: Any = share
            for pair in joining.pairs:
                first, second = sorted(JoinedLeg(x.side, places[x.side][x.index]) for x in pair)
                product = product * moments(first, second)
            for side, index in joining.capped:
                rows = legs[side][places[side][index]]
                mean = states.mean if rows is None else rows @ states.mean
                product = product * along(mean, side)
            total = total + product
    return total


def _read_moment(rows: LegRows, second: Any) -> Any:
    """The moments of a leg with the coordinates of the state."""
    return _moment_matrix(second) if rows is None else _times_moment(rows, second)


def input_states(model: Model, metric: Metric) -> MeasuredStates:
    """The states below the first layer of a model.

    Args:
        model: Model that reads the input.
        metric: Metric that joins legs, or `Categorical`.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> input_states(model, tnsim.Gaussian(cov=np.array([4.0, 1.0]))).sizes.tolist()
        [1.0, 0.0]
    """
    if isinstance(metric, Categorical):
        # One token is on at a time: E[x_i x_j] = p_i delta_ij.
        probabilities = metric.distribution(model.d_in)
        mean = library(probabilities).concatenate([np.ones(1), probabilities])
        second: Any = MomentInParts(mean, 0.0 * mean)
    else:
        mean, second = moments_at_a_position(metric, model.d_in, model.n_ctx)
    joined = metric
    if not joins_layers(metric):
        within = metric.pairs_within_model or isinstance(metric, Categorical)
        joined = GaussianClosure() if within else TreeSymmetric()
    assert joins_layers(joined)
    return MeasuredStates(second, mean, joined.rule, model.n_ctx or 1)


def _times_moment(rows: Any, second: Any) -> Any:
    """Rows times a second moment."""
    return second.behind(rows) if isinstance(second, MomentInParts) else rows @ second


def _moment_matrix(second: Any) -> Any:
    """A second moment as a matrix, also where it is given in parts."""
    return second.matrix() if isinstance(second, MomentInParts) else second


def _root_mean_squares(values: Any) -> Unit:
    """Sizes of the coordinates of some states."""
    return _half_log2((values**2).mean(axis=tuple(range(values.ndim - 1))))


def _half_log2(squares: Any) -> Unit:
    """Base-2 logarithms of square roots; 0 for zero, and for negative numbers by rounding."""
    xp = library(squares)
    positive = squares > 0
    return xp.where(positive, xp.log2(xp.where(positive, squares, 1.0)) / 2, 0.0)


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
    `layer_kinds.need_constant`). So they do below attention: a moment of two of its outputs is a
    moment of ten states, and steps of 2^8 in the weights of two layers would take it out of the
    range of float32.

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
    if not isinstance(metric, GaussianMoments) or (metric.mean is None and metric.cov is None):
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
