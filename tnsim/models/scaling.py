"""Models in scientific notation: weights and states near 1, times a power of two.

An inner product of two attention layers multiplies the weights of ten legs, so weights far from 1
leave the range of floats long before the function does. Every bond therefore gets a unit: with
`h = 2^u h'` for the state below a layer, `2^p` and `2^q` for the products of its legs with that
state, and `2^v` for its output,

    Linear      W x + b                   W' = 2^(u - v) W     b' = 2^-v b
    Bilinear    D ((L x + l) (R x + r))   L' = 2^(u - p) L     l' = 2^-p l    D' = 2^(p + q - v) D
    Residual    c x + s f(x)              c' = 2^(u - v) c     s' = 2^(w - v) s

with `2^w` the unit of f. Attention has five legs instead of two. The constant is 1 in every unit,
so biases and skips are scaled together with the products that they are added to. The remaining
factor `2^v` at the output is the exponent of the model.

*Choice of units.* Without constants a model is homogeneous, and any units would do: the unit of a
row is the unit of its largest weight. With constants the size of a state *relative to the constant
1* matters. A unit that is wrong by c bits leaves a state of size `2^c` next to the constant. The
next layer of order n makes that `2^(n c)`, so after some layers either the state has left the range
of floats, and the function is lost, or the constant has, and the biases are lost. Units of models
with constants therefore follow the sizes of the states themselves, measured layer by layer under
the metric (`StateSizes`). Each layer is written in the units that the sizes below it gave, so that
errors do not add up.

Inputs have units as well, from the deviations and means of a metric (`problems.units`): the
first layer of every model and the moments of the metric are written in them.

Units are powers of 2^8, rounded to the nearest: models of ordinary size are left as they are,
states lie in `[2^-4, 2^4]`, and a product of ten legs stays far from both ends of float32.

On lifted states this is a diagonal change of basis on the bonds, which leaves the tensor as it is:
all metrics see the same model. Powers of two are exact, so nothing is rounded. Derivatives treat
units as constants, since units cancel in the function.

Products of many equal factors are written as powers (`with_powers`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import power
from tnsim.models.arrays import (
    Array,
    Matrix,
    SparseMatrix,
    bias_name,
    is_sparse,
    is_traced,
    with_numpy,
)
from tnsim.models.layers import (
    Attention,
    Elementwise,
    Gated,
    Layer,
    Multilinear,
    Residual,
    affine_maps,
    innermost,
    residual_rule,
)
from tnsim.models.model import Model
from tnsim.scaled import Scaled, exponents_of, larger, library, shifted

_STEP = 8
"""Units are powers of 2^8: a layer has its largest entry in [2^-7, 2), a row within 2^8 of it."""
# The exponent of the unit 1: a scalar, as JAX remembers an array of NumPy with the dtype of the
# first trace that captured the array, and would give float32 to a later trace in float64.
_UNIT_1: Any = np.float64(0)
_LEAST_SIZE = -20
"""Size below which a coordinate is rounding: a second moment of 2^-40, summed of moments near 1."""
_OF_SCORES = ("q1", "k1", "q2", "k2")

Unit: TypeAlias = Float[Array, ""] | Float[Array, " rows"]
"""Exponents of two: a number for all coordinates of a bond, or a number for each."""


class StateSizes(Protocol):
    """Sizes of the states below a layer: root mean squares under a metric, as logarithms to base 2.

    Every layer is given in the units of the state below it. All sizes are finite: a coordinate that
    is always zero has the size 0.
    """

    def of_rows(self, weight: Any, bias: Any) -> Unit:
        """Sizes of the entries of `W h + b`, an array (rows,)."""
        ...

    def after(self, layer: Layer) -> StateSizes:
        """The states above a layer."""
        ...

    @property
    def sizes(self) -> Unit:
        """Sizes of the coordinates of the state, an array (width,)."""
        ...

    def in_units(self, unit: Unit) -> StateSizes:
        """The same states in units of `2 ** unit`, a single unit or units of the coordinates."""
        ...


def scaled(
    model: Model, slices: bool = False, states: StateSizes | None = None, below: Any = _UNIT_1
) -> Scaled[Model]:
    """A model with weights or states near 1, and the power of two that its output lacks.

    Args:
        model: Any model. Arrays of JAX come back as NumPy unless they are traced. A layer with an
            activation, which reads numbers in no other unit than 1, stands alone.
        slices: Whether each output has an exponent of its own, (d_out,), or all share an exponent.
        states: Sizes of the inputs of the model, for models with constants, in the units of the
            inputs; None where units follow the weights alone.
        below: Exponents of the units of the inputs, a single exponent or exponents of the
            coordinates; a single exponent for a model that begins with a residual.

    Returns:
        The model, which reads inputs in their units, and its exponent; a row of weights is zero
        only if it was zero before. The coordinates of a residual stream share a unit, because the
        skip is a single number. The outputs of a model that ends in a residual share a unit too,
        even with `slices`.

    Example:
        >>> from tnsim import Linear
        >>> model, exponent = scaled(Model([Linear(np.array([[3e-200, 1e-200]]))]))
        >>> model.layers[0].weight * 2.0**exponent
        array([[3.e-200, 1.e-200]])
    """
    return scaled_with_shifts(model, slices, states, below)[0]


def scaled_with_shifts(
    model: Model, slices: bool = False, states: StateSizes | None = None, below: Any = _UNIT_1
) -> tuple[Scaled[Model], Model]:
    """A model scaled as by `scaled`, and the exponents by which its arrays were shifted.

    Args:
        model, slices, states, below: Arguments of `scaled`.

    Returns:
        The scaled model with its exponent, and a model that holds exponents of two in the place of
        each array: they broadcast against the array.

    Example:
        >>> from tnsim import Linear
        >>> line = Model([Linear(np.array([[3e-200, 1e-200]]))])
        >>> (made, _), shifts = scaled_with_shifts(line)
        >>> bool((made.layers[0].weight == line.layers[0].weight * 2.0**656).all())
        True
        >>> shifts.layers[0].weight
        array([656.])
    """
    given = model, states, below
    of_jax = [leaf for leaf in jax.tree.leaves(given) if isinstance(leaf, jax.Array)]
    if is_traced(of_jax):
        return _scaled_by_jax(model, slices, states, below)
    if of_jax:
        model, states, below = with_numpy(given)
    return _scaled_model(model, slices, states, below)


def _scaled_model(
    model: Model, slices: bool, states: StateSizes | None, below: Unit
) -> tuple[Scaled[Model], Model]:
    """Scale a model as `scaled_with_shifts` does, with all arrays from the same library."""
    layers: list[Layer] = []
    shifts: list[Layer] = []
    unit = _single_if_equal(below)
    beyond: Unit = _UNIT_1
    for n, layer in enumerate(model.layers):
        # A stream is added to the output of the layer inside its residual, and its skip is a single
        # number: the bonds at both ends of a residual therefore have one unit for all coordinates.
        # Sparse layers keep equal rows equal, as those of a convolution are, in a single unit too.
        ends = model.layers[n : n + 2]
        streams = any(isinstance(x, Residual) or is_sparse(x) for x in ends)
        last = n + 1 == len(model.layers)
        shared = streams or (last and not slices)
        by, unit = _layer_shifts(layer, unit, shared, states)
        layer = _shifted_layer(layer, by)
        if states is not None and not last:  # no layer reads the last state, its size is no matter
            more, unit, states = _measured_shifts(layer, unit, shared, states)
            layer = _shifted_layer(layer, more)
            by = jax.tree.map(operator.add, by, more)
        unit, surplus = _kept_exact(unit)
        # A layer with an activation stands alone, so nothing was taken off below it.
        # f(2^s h) = 2^(n s) f(h) for a layer of order n: what was taken off below grows by the
        # order.
        beyond = surplus if math.isinf(layer.order) else layer.order * beyond + surplus
        layers.append(layer)
        shifts.append(by)
    if slices and unit.ndim == 0:
        unit = unit + np.zeros(model.d_out)
    result = Scaled(Model(layers, model.n_ctx), unit + beyond)
    return result, jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(shifts))


_scaled_by_jax = jax.jit(_scaled_model, static_argnums=1)  # instead of a program per operation


def nearest_unit(sizes: Unit) -> Unit:
    """Exponents of the units for some sizes, given as base-2 logarithms: multiples of 8.

    Example:
        >>> nearest_unit(np.array([3.0, 13.0])).tolist()
        [0.0, 16.0]
    """
    return _STEP * library(sizes).rint(sizes / _STEP)


def replaced(layer: Any, values: dict[str, Any]) -> Any:
    """A copy of a layer with some arrays replaced, without checks.

    Example:
        >>> from tnsim import Linear
        >>> replaced(Linear([[2.0]]), {"weight": np.array([[3.0]])}).weight
        array([[3.]])
    """
    copy = object.__new__(type(layer))
    vars(copy).update(vars(layer) | values)
    return copy


def _shifted_layer(layer: Layer, shifts: Layer) -> Layer:
    """A layer times powers of two, given by their exponents for each of its arrays."""
    return jax.tree.map(shifted, layer, shifts)


def _shifts(layer: Layer, values: dict[str, Any]) -> Layer:
    """A layer of exponents: the given exponents, and 0 for all other arrays."""
    return replaced(jax.tree.map(lambda _: _UNIT_1, layer), values)


def _measured_shifts(
    layer: Layer, unit: Unit, shared: bool, states: StateSizes
) -> tuple[Layer, Unit, StateSizes]:
    """The exponents of a layer in units, its output unit being that of the measured state above.

    Args:
        layer: Layer in the units of its input and its output.
        unit: Output unit of the layer.
        shared: Whether all outputs share a unit.
        states: States below the layer.

    Returns:
        The exponents by which the layer is to be shifted, its new output unit and the state above.
    """
    reached = states.after(layer)
    sizes = reached.sizes
    # Rows and what they read are near 1 here, so a much smaller coordinate is what rounding left of
    # zero, and its unit stays. In a unit of that rounding the coordinate would be near 1, and
    # products of the others beside it below the range of float32.
    known = library(sizes).where(sizes > _LEAST_SIZE, sizes, 0.0)
    step = nearest_unit(sizes.max() if shared else known)
    if isinstance(layer, Residual):
        # On lifted states a skip of c in the new units adds c to the constant, and c - 1 is taken
        # off again (`problems.layer_tensors`). So c stays below 2, at the price of a unit that may
        # be too large. A skip of 1 is below: units that grew by a step over each of its layers
        # took states of size 1 beyond the range of float32 from five layers on.
        skip = exponents_of(layer.skip) - 1
        step = larger(step, _STEP * library(step).ceil(skip / _STEP))
    unit, reached = _single_if_equal(unit + step), reached.in_units(step)
    if isinstance(layer, Residual):  # all its outputs share a unit
        return _shifts(layer, {"skip": -step, "scale": -step}), unit, reached
    _, output = affine_maps(layer)
    return _shifts(layer, _shifts_between(layer, output, _UNIT_1, step)), unit, reached


def _layer_shifts(
    layer: Layer, below: Unit, shared: bool, states: StateSizes | None
) -> tuple[Layer, Unit]:
    """The exponents that write a layer in the units of its input and output, and the output unit.

    Args:
        layer: Layer as it is given.
        below: Unit of the state below the layer.
        shared: Whether all outputs share a unit.
        states: States below the layer; None where units follow the weights alone.
    """
    if isinstance(layer, Residual):
        return _residual_shifts(layer, below, states)
    if isinstance(layer, Elementwise):
        return _shifts(layer, {}), _of_outputs(below, shared)  # its input has the unit 0
    # The unit u below gives the units p and q of the legs. The output matrix reads in the unit
    # p + q, and its rows give the unit v above. Every map is written between the units at its ends.
    rows, output = affine_maps(layer)
    legs = {name: _leg_units(layer, name, below, states) for name in rows}
    if isinstance(layer, Attention):
        # A single unit for each head, since a rotation adds multiples of its rows to one another.
        for name in _OF_SCORES:
            by_head = legs[name].reshape(layer.n_heads, layer.d_head)
            legs[name] = by_head.max(axis=1).repeat(layer.d_head)
    if isinstance(layer, Gated):
        legs["gate"] = _UNIT_1  # an activation reads numbers in the unit 1
    # The output matrix of a linear layer reads the state itself.
    hidden = _hidden_units(layer, legs) if rows else below
    above = _of_outputs(_row_units(layer, output, hidden), shared)
    if rows:
        hidden, legs = _with_units_of_zeros(layer, output, hidden, legs, above)
    exponents = _shifts_between(layer, output, hidden, above)
    for name, unit in legs.items():
        exponents |= _shifts_between(layer, name, below, unit)
    return _shifts(layer, exponents), above


def _with_units_of_zeros(
    layer: Layer, output: str, hidden: Unit, legs: dict[str, Unit], above: Unit
) -> tuple[Unit, dict[str, Unit]]:
    """Units of hidden states and of legs, in which rows of zeros have units that are finite.

    A row of zeros has no size, and its product is zero in any unit; but the derivative by its
    entries is not zero, and needs the output matrix as it is. The unit is that of the largest row
    of the leg, or so much smaller that what reads the product is no larger than all other weights.

    Args:
        layer: Layer as it is given.
        output: Name of the output matrix.
        hidden: Units of what the output matrix reads, -inf behind a row of zeros.
        legs: Units of the rows of each leg, -inf for a row of zeros.
        above: Units of the outputs.
    """
    xp = library(hidden, above)
    if xp is np and (hidden > -np.inf).all():
        return hidden, legs
    with_units = {
        name: unit + np.zeros(getattr(layer, name).shape[0]) for name, unit in legs.items()
    }
    finite = {}
    for name, unit in with_units.items():
        finite[name] = xp.where(unit == -np.inf, _largest(unit), unit)
    reads = _largest_by_column(getattr(layer, output), above)
    hidden = _hidden_units(layer, finite)
    excess = xp.maximum(hidden + reads, 0.0)
    if isinstance(layer, Attention):  # a row of a head, of queries and keys all rows of the head
        excess = excess.reshape(layer.n_heads, -1)
        of_heads = excess.max(axis=1).repeat(layer.d_head)
        excesses = {name: excess.ravel() if name == "v" else of_heads for name in finite}
    else:
        excesses = dict.fromkeys(finite, excess)
    for name, unit in with_units.items():
        finite[name] = xp.where(unit == -np.inf, finite[name] - excesses[name], unit)
    return _hidden_units(layer, finite), finite


def _hidden_units(layer: Layer, legs: dict[str, Unit]) -> Unit:
    """Units of the products that the output matrix reads: of a head, a value times both scores."""
    if not isinstance(layer, Attention):
        return _single_if_equal(_total_unit(legs.values()))
    # Rows of a head share a unit, so every d_head-th entry names it once per head.
    scores = _total_unit(legs[name][:: layer.d_head] for name in _OF_SCORES)
    return _single_if_equal(legs["v"] + scores.repeat(layer.d_value))


def _leg_units(layer: Layer, name: str, below: Unit, states: StateSizes | None) -> Unit:
    """Units of the rows of a leg: from weights alone, or from values if states are measured."""
    # Units of weights first, then of values read through weights near 1: of_rows sees no overflow.
    unit = _row_units(layer, name, below)
    sparse = isinstance(getattr(layer, name), SparseMatrix)
    if sparse:
        unit = _of_outputs(unit, shared=True)
    if states is None:
        return unit
    names = name, bias_name(name)
    weight, bias = (getattr(layer, each) for each in names)
    by, bias_by = (_shifts_between(layer, name, below, unit)[each] for each in names)
    bias = None if bias is None else shifted(bias, bias_by)
    sizes = states.of_rows(jax.tree.map(shifted, weight, by), bias)
    return unit + nearest_unit(sizes.max() if sparse else sizes)


def _residual_shifts(layer: Residual, below: Unit, states: StateSizes | None) -> tuple[Layer, Unit]:
    """The exponents that write both terms of a residual in the unit of their sum, and that unit."""
    # c x and s f(x) are of sizes 2^u c and 2^w s; the larger one gives the unit of the sum.
    inner, unit = _layer_shifts(layer.layer, below, shared=True, states=states)
    terms = exponents_of(layer.skip) + below, exponents_of(layer.scale) + unit
    above = _of_outputs(_stepped_units(larger(*terms)), shared=True)
    values = {"layer": inner, "skip": below - above, "scale": unit - above}
    return _shifts(layer, values), above


def _total_unit(units: Iterable[Unit]) -> Unit:
    """Unit of a product, the sum of the exponents of its factors."""
    return functools.reduce(operator.add, units)


def _row_units(layer: Layer, name: str, below: Unit) -> Unit:
    """Units of the rows of `[W, b]` read from the unit below, -inf for a row of zeros."""
    weight, bias = getattr(layer, name), getattr(layer, bias_name(name))
    entries = weight.values if isinstance(weight, SparseMatrix) else weight
    if below.ndim == 0:
        exponents = exponents_of(abs(entries).max(axis=1)) + below
    else:
        exponents = (exponents_of(entries) + _of_entries(weight, below)).max(axis=1)
    if bias is not None:
        # The constant that the bias reads has the exponent 0 in every unit.
        exponents = larger(exponents, exponents_of(bias))
    return _stepped_units(exponents)


def _stepped_units(exponents: Any) -> Any:
    """Units of entries with `2^(e - 1) <= |x| < 2^e`; the largest entry then lies in [2^-7, 2).

    Steps are counted down from the largest entry, so that entries of similar size share a unit:
    sums and balances within a layer lose the digits by which units differ.
    """
    xp, largest = library(exponents), _largest(exponents)
    below = xp.floor((largest - exponents) / _STEP)
    return _STEP * (xp.ceil((largest - 1) / _STEP) - below)


def _shifts_between(layer: Layer, name: str, below: Unit, above: Unit) -> dict[str, Any]:
    """The exponents that write the arrays `W` and `b` of an affine map between two units."""
    weight, bias = getattr(layer, name), getattr(layer, bias_name(name))
    between = _of_entries(weight, below) - above[..., None]
    if isinstance(weight, SparseMatrix):
        between = weight.with_values(between)
    return {name: between, bias_name(name): None if bias is None else -above}


def _largest_by_column(weight: Matrix, above: Unit) -> Any:
    """The largest exponent of each column of an output matrix in the units of its outputs."""
    if not isinstance(weight, SparseMatrix):
        return (exponents_of(weight) - above[..., None]).max(axis=0)
    largest = np.full(weight.shape[1], -np.inf)
    exponents = np.broadcast_to(exponents_of(weight.values) - above[..., None], weight.values.shape)
    filled = weight.columns.filled
    np.maximum.at(largest, weight.columns.array[filled], exponents[filled])
    return largest


def _of_entries(weight: Matrix, below: Unit) -> Any:
    """Units of the inputs as they broadcast against the entries of a matrix."""
    if isinstance(weight, SparseMatrix) and below.ndim:
        return below[weight.columns.array]
    return below


def _of_outputs(unit: Unit, shared: bool) -> Unit:
    """Finite units: rows of zeros take the unit of the largest row, or 0 if all rows are zero."""
    largest = _largest(unit)
    if shared:
        return largest
    return _single_if_equal(library(unit).where(unit == -np.inf, largest, unit))


def _largest(exponents: Any) -> Any:
    """The largest of some exponents, or 0 where all are those of zeros."""
    largest = exponents.max()
    return library(exponents).where(largest == -np.inf, 0.0, largest)


def _single_if_equal(unit: Unit) -> Unit:
    """A single exponent where all coordinates agree, which is faster; traced units stay."""
    if library(unit) is np and unit.ndim and (unit == unit[0]).all():
        return unit[0]
    return unit


def _kept_exact(unit: Unit) -> tuple[Unit, Unit]:
    """A unit small enough for floats to hold every integer near it, and the surplus taken off.

    Exponents double with every bilinear layer. Beyond some distance from the constant 1 the size of
    a state no longer changes cosines; the surplus is added to the exponent of the output again.
    """
    limit = 2.0 ** (np.finfo(unit.dtype).nmant - 4)
    top = unit.max()
    surplus = top - top.clip(-limit, limit)
    return unit - surplus, surplus


def with_powers(model: Model, most: int) -> Model:
    """A model whose products of many equal factors are powers, `h^n` in the place of `h ... h`.

    Written as sums of powers by polarisation, which does not ask for equal factors, they would be
    2^(n - 1) powers. Equal numbers have derivatives of their own, so this is for values alone.

    Args:
        model: Model that is not traced; without such layers it is returned itself.
        most: Most factors of a product that stays a product.

    Example:
        >>> import tnsim
        >>> sixth = tnsim.Model([tnsim.Multilinear([[[2.0]]] * 6, [[1.0]])])
        >>> with_powers(sixth, 4).layers[0].activation.name
        'power(6)'
    """
    layers = [_as_power(layer, most) for layer in model.layers]
    changed = any(new is not old for new, old in zip(layers, model.layers, strict=True))
    return Model(layers, model.n_ctx, model.origin) if changed else model


def _as_power(layer: Any, most: int) -> Any:
    core = innermost(layer)
    if not isinstance(core, Multilinear) or core.n_legs <= most or is_sparse(core):
        return layer
    (gate, *others), (bias, *biases) = core.legs, core.leg_biases
    pairs = [*((gate, leg) for leg in others), *((bias, one) for one in biases)]
    if not all(_are_equal(one, two) for one, two in pairs):
        return layer
    made = Gated(gate, None, core.down, power(core.n_legs), bias, None, core.down_bias)
    return made if core is layer else Residual(made, *residual_rule(layer))


def _are_equal(one: Any, two: Any) -> bool:
    """Whether two arrays have equal numbers; a missing bias differs from zeros."""
    return one is two or (one is not None and two is not None and np.array_equal(one, two))
