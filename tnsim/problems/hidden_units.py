"""Which numbers of a model are hidden units, and what its outputs read beside them.

A model of a single nonlinear layer, polynomial or not, is a linear map of its hidden units beside a
linear map of its input,

    A(x) = D h(x) + S x + c,        h_i = f(g_i) or f(g_i) v_i,

where g and v are affine in x. Linear layers before the nonlinear one go into g and v, linear layers
behind it into D, S and c. A model of several nonlinear layers is a chain of such functions, its
*segments*. Here stands as well which models are compared by their units, pair by pair
(`problems.kernels`), and how a small difference of two such functions is a function of the kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Activation, derivative
from tnsim.activations.activation import power as power_of
from tnsim.activations.kernels import check_gate
from tnsim.errors import OWN_ACTIVATION, UnsupportedLayer
from tnsim.metrics.metric import Gaussian, GaussianClosure
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.arrays import Array, add, bias_name, in_float64, is_traced, written_out
from tnsim.models.differences import largest_change, regrouped
from tnsim.models.layers import activation_of, map_names, residual_rule
from tnsim.models.model import Model
from tnsim.problems.layer_kinds import core_of, kinds, nonlinear
from tnsim.problems.layer_tensors import Affine, affine_of, product
from tnsim.scaled import library

MOST_PAIRED = 4
"""Most factors of a layer whose pairings are summed up by plans: 105 pairings of eight legs take
seconds to plan, 945 of ten take minutes."""

BY_DRAWS = (
    "use Empirical(inputs), or Empirical.normal(mean, cov, samples) for an estimate with its "
    "standard error"
)
"""Advice where no closed form is known."""
_MIDDLE = (0.5 - math.sqrt(1 / 12), 0.5 + math.sqrt(1 / 12))
"""Nodes of Gauss-Legendre quadrature on [0, 1] with two points of equal weight."""


def has_kernels(models: Iterable[Model], metric: Metric) -> bool:
    """Whether the inner products of some models are sums over pairs of hidden units.

    Args:
        models: Models under comparison.
        metric: Metric that joins legs; metrics that add up over inputs run any model.

    Returns:
        Whether a model has an activation, or a product of so many factors that its pairings are
        beyond plans; other models have plans.

    Raises:
        UnsupportedLayer: A model has an activation, and the metric has no closed form for it.

    Example:
        >>> import numpy as np, tnsim
        >>> rectified = tnsim.Model([tnsim.Linear(np.eye(2)), tnsim.Elementwise("relu")])
        >>> has_kernels([rectified], tnsim.Gaussian())
        True
    """
    if adds_up(metric):
        return False
    models = list(models)
    activated = [model for model in models if not model.is_polynomial]
    if not activated:
        return _has_many_factors(models, metric)
    name = next(filter(None, map(activation_of, activated[0].layers))).name
    if type(metric) not in (Gaussian, GaussianClosure):
        raise UnsupportedLayer(
            f"{type(metric).__name__} compares the tensors of polynomials, and {name} is no "
            f"polynomial: use Gaussian(mean, cov), exact for one nonlinear layer, or "
            "Empirical(inputs)"
        )
    for model in models:
        _check_layers(model, metric)
    _check_gates(models)
    return True


def _has_many_factors(models: Sequence[Model], metric: Metric) -> bool:
    """Whether polynomial models are compared as powers of hidden units, as `_powers` writes them.

    A layer of n factors meets another in (2 n - 1)!! pairings, each a summand of a plan, and in
    4^(n - 1) pairs of powers for each pair of hidden units, each a number.
    """
    if max(max(model.orders) for model in models) <= MOST_PAIRED:
        return False
    if type(metric) not in (Gaussian, GaussianClosure):
        return False
    layers = [kinds(model) for model in models]
    flat = [layer for one in layers for layer in one]
    # One layer alone is exact by its units; of several, the closure goes on with laws of states.
    alone = type(metric) is GaussianClosure or nonlinear(*layers) == 1
    plain = not any(layer.mixes_positions or layer.sparse for layer in flat)
    return alone and plain


def tells_units_apart(models: Iterable[Model], metric: Metric) -> bool:
    """Whether inner products are sums over pairs of hidden units, for polynomial models as well.

    Raises:
        UnsupportedLayer: A model has an activation, and the metric has no closed form for it.

    Example:
        >>> import numpy as np, tnsim
        >>> tells_units_apart([Model([tnsim.Bilinear(*[np.eye(2)] * 3)])], Gaussian())
        True
    """
    models = list(models)
    if has_kernels(models, metric):
        return True
    alone = all(nonlinear(kinds(model)) == 1 and not model.attends for model in models)
    return type(metric) is Gaussian and alone


def _check_layers(model: Model, metric: Metric) -> None:
    """Refuse layers beside an activation that sums over pairs of units do not cover."""
    layers = kinds(model)
    depth = nonlinear(layers)
    if depth > 1 and type(metric) is Gaussian:
        raise UnsupportedLayer(
            f"Gaussian is exact beside an activation for one nonlinear layer, found {depth} in a "
            f"model: {_advice_on_compositions(model)}{BY_DRAWS}; GaussianClosure(mean, cov) takes "
            "hidden states for Gaussian, a similarity of its own and no estimate"
        )
    for layer in layers:
        if layer.mixes_positions:
            raise UnsupportedLayer(
                f"{type(metric).__name__} compares an activation with layers that act on every "
                f"position alone, found {layer.name}: {BY_DRAWS}"
            )


def _check_gates(models: Sequence[Model]) -> None:
    """Refuse activations without a kernel of gated units where units meet gated ones.

    Beside gated units plain ones are gated by factors of 1, so that all activations need such a
    kernel where one model is gated.
    """
    nonlinear_layers = ([kind for kind in kinds(model) if kind.order > 1] for model in models)
    for meeting in itertools.zip_longest(*nonlinear_layers):  # from the input up, as they meet
        activated = [
            (kind.activation, len(kind.legs) > 1)  # whether a factor stands beside the gate
            for kind in meeting
            if kind is not None and kind.activation is not None
        ]
        if any(gated for _, gated in activated):
            for function, _ in activated:
                check_gate(function)


def _advice_on_compositions(model: Model) -> str:
    """Advice where a nonlinear layer acts on the units of the layer before it one by one."""
    if model.attends or is_traced(model):
        return ""
    for first, second in itertools.pairwise(segments(model)):
        both = [one for one in (first.activation, second.activation) if one is not None]
        curved = [function for function in both if not function.is_polynomial]
        # An own activation is analytic near the real line, or polynomial between kinks.
        smooth = all(map(_is_smooth, curved))
        in_pieces = all(function.pieces for function in curved)
        if first.up is not None or not (smooth or in_pieces):
            continue
        reads = second.gate.after(Affine(first.down, first.constant))
        weight = np.eye(1) if reads.weight is None else np.asarray(reads.weight)
        entries = weight[weight != 0]
        alone = first.linear is None and second.up is None and ((weight != 0).sum(1) <= 1).all()
        if (
            alone
            and entries.size
            and np.ptp(entries) == 0
            and (reads.bias is None or np.ptp(reads.bias) == 0)
        ):
            inner, outer = (function.name for function in both)
            return (
                f"{outer} reads every {inner} alone, so both are a single activation of your own, "
                f"which is exact. {OWN_ACTIVATION}. Otherwise "
            )
    return ""


class HiddenUnits(NamedTuple):
    """A function `D h(x) + S x + c` of hidden units `h = f(gate)` or `h = f(gate) * up`.

    Args:
        activation: Function f of a gate; None where there are no hidden units.
        gate: Affine map of the input to the gates.
        up: Affine map that multiplies; None for 1.
        down: Matrix D, (out, units); None for the identity.
        linear: Matrix S, (out, in); None for zero.
        constant: Vector c, (out,); None for zero.
        copies: Number of powers that together are a single hidden unit of the layer, see `_powers`.
    """

    activation: Activation | None
    gate: Affine
    up: Affine | None
    down: Float[Array, "out units"] | None
    linear: Float[Array, "out in"] | None
    constant: Float[Array, " out"] | None
    copies: int = 1


def hidden_units(model: Model) -> HiddenUnits:
    """The hidden units of a model with at most one nonlinear layer, linear layers multiplied out.

    Example:
        >>> import tnsim
        >>> layers = tnsim.Linear([[2.0]]), tnsim.Elementwise("relu"), tnsim.Linear([[3.0]])
        >>> units = hidden_units(tnsim.Model(layers))
        >>> units.gate.weight, units.down
        (array([[2.]]), array([[3.]]))
    """
    (units,) = segments(model)
    return units


def segments(model: Model) -> list[HiddenUnits]:
    """A model as functions of a single nonlinear layer each, from the input up.

    Linear layers belong to the nonlinear layer before them, and those at the input to the first
    one. The inputs of a segment are therefore the states that the next nonlinear layer reads.

    Example:
        >>> import tnsim
        >>> layers = [tnsim.Linear([[2.0]]), tnsim.Elementwise("relu")] * 2
        >>> [float(units.gate.weight[0, 0]) for units in segments(tnsim.Model(layers))[:1]]
        [2.0]
        >>> len(segments(tnsim.Model(layers)))
        2
    """
    # Up to the first nonlinear layer `state` is the affine map of the input that this layer reads.
    # The last of `hidden` is the function since, and linear layers act on its outputs.
    state = Affine()
    hidden: list[HiddenUnits] = []
    for layer in written_out(model).layers:
        layer = in_float64(layer)
        core: Any = core_of(layer)
        if core.order > 1:
            state = Affine() if hidden else state
            units = _units_of(core, state)
            hidden.append(_with_residual(units, state, core.d_out, *residual_rule(layer)))
            continue
        own = affine_of(layer)
        if not hidden:
            state = own.after(state)
            continue
        # A linear layer behind the units maps everything that the output reads: W (D h + S x + c)
        # + b.
        last = hidden[-1]
        down, constant = own.after(Affine(last.down, last.constant))
        linear = None if last.linear is None else product(own.weight, last.linear)
        hidden[-1] = last._replace(down=down, linear=linear, constant=constant)
    if hidden:
        return hidden
    # No nonlinear layer: the model is the linear map alone, without hidden units.
    weight = np.eye(model.d_in) if state.weight is None else state.weight
    return [HiddenUnits(None, Affine(), None, None, weight, state.bias)]


def bias_in_outputs(model: Model) -> Float[Array, " out"] | None:
    """What the bias of the only nonlinear layer adds to the outputs; None where it has no bias.

    It is a part of the constant of `hidden_units`.

    Example:
        >>> import tnsim
        >>> layer = tnsim.Gated([[1.0]], None, [[1.0]], "relu", down_bias=[3.0])
        >>> bias_in_outputs(tnsim.Model([layer, tnsim.Linear([[2.0]])]))
        array([6.])
    """
    layers = iter(map(in_float64, written_out(model).layers))
    layer = next(layer for layer in layers if layer.order > 1)
    core = core_of(layer)
    names = map_names(core)
    bias = getattr(core, bias_name(names[-1])) if names else None
    if bias is None:
        return None
    # It passes the scale of the residual and all linear layers behind.
    added = residual_rule(layer)[1] * bias
    for behind in layers:
        added = product(affine_of(behind).weight, added)
    return added


def _equals(number: Any, value: float) -> bool:
    """Whether a number of a residual is known, not traced, and has this value."""
    return isinstance(number, float) and number == value


def _units_of(core: Any, state: Affine) -> HiddenUnits:
    """The hidden units of a nonlinear layer that reads an affine map of the input."""
    function = activation_of(core)
    names = map_names(core)
    if not names:
        return HiddenUnits(function, state, None, None, None, None)
    # The last map reads the hidden units; the others make the gate and its factors.
    *maps, _ = (Affine(getattr(core, name), getattr(core, bias_name(name))) for name in names)
    rows = [affine.after(state) for affine in maps]
    if function is None:
        return _powers(rows, core.down, core.down_bias)
    up = rows[1] if len(rows) == 2 else None
    return HiddenUnits(function, rows[0], up, core.down, None, core.down_bias)


def _powers(rows: Sequence[Affine], down: Any, constant: Any) -> HiddenUnits:
    """A product of affine maps as powers, so that a polynomial layer has an activation as well.

    By polarisation, with signs s of all maps but the first,

        h_1 ... h_n = 1 / (2^(n - 1) n!) sum_s s_2 ... s_n (h_1 + s_2 h_2 + ... + s_n h_n)^n.

    Maps are balanced first, so that little cancels: each is as long as the others of its unit.
    """
    order = len(rows)
    # Lengths are constants to derivatives: the product of the maps does not depend on how they are
    # balanced.
    lengths = [jax.lax.stop_gradient(_length(row)) for row in rows]
    xp = library(lengths)
    # The geometric mean: factors multiply to 1, so the product of the maps stays as it is.
    mean = xp.exp(sum(map(xp.log, lengths)) / order)
    balanced = []
    for row, length in zip(rows, lengths, strict=True):
        factor = mean / length
        bias = xp.zeros(len(factor)) if row.bias is None else factor * row.bias
        balanced.append(Affine(factor[:, None] * row.weight, bias))
    # One power for each choice of signs; all powers are hidden units beside one another, and D has
    # their weights side by side.
    weights, biases, signed = [], [], []
    for signs in itertools.product((1.0, -1.0), repeat=order - 1):
        both = list(zip((1.0, *signs), balanced, strict=True))
        weights.append(sum(sign * row.weight for sign, row in both))
        biases.append(sum(sign * row.bias for sign, row in both))
        signed.append(math.prod(signs) / (2 ** (order - 1) * math.factorial(order)) * down)
    gate = Affine(xp.concatenate(weights), xp.concatenate(biases))
    downs = xp.concatenate(signed, axis=1)
    return HiddenUnits(power_of(order), gate, None, downs, None, constant, len(weights))


def _length(row: Affine) -> Any:
    """Lengths of the rows of an affine map, 1 where a row is zero."""
    weight: Any = row.weight  # no identity: a layer with factors has weights
    xp = library(weight, row.bias)
    squares = (weight**2).sum(axis=1)
    if row.bias is not None:
        squares = squares + row.bias**2
    return xp.where(squares > 0, xp.sqrt(xp.where(squares > 0, squares, 1.0)), 1.0)


def _with_residual(
    units: HiddenUnits, state: Affine, width: int, skip: Any, scale: Any
) -> HiddenUnits:
    """The function `skip * state + scale * units` of the input."""
    # The skip reads the layer's input, which is an affine map of the model's input, so it goes into
    # S and c.
    down, constant, linear = units.down, units.constant, None
    if not _equals(scale, 1.0):
        down = scale * (np.eye(width) if down is None else down)
        constant = None if constant is None else scale * constant
    if not _equals(skip, 0.0):
        linear = skip * (np.eye(width) if state.weight is None else state.weight)
        if state.bias is not None:
            constant = add(skip * state.bias, constant)
    return units._replace(down=down, linear=linear, constant=constant)


def small_differences(
    weighted: Sequence[tuple[Any, HiddenUnits]], dtype: str
) -> list[tuple[Any, HiddenUnits]]:
    """A sum of functions with small differences as functions of their own, so that nothing cancels.

    With u_t = u + t (u' - u), a smooth activation has

        D' f(u') - D f(u) = (D' - D) f(u) + D' int_0^1 f'(u_t) dt * (u' - u),

    a sum of hidden units and of gated units whose activation is the derivative. Differences are
    taken where weights change by less than eps^(1/4): the integral is then exact to rounding at two
    nodes, as the error is of the order of the change to the power 4. Activations with kinks and
    gated units stay as they are: what cancels between them is counted in the error.

    Args:
        weighted: Coefficients and functions.
        dtype: Precision of the computation to come.
    """
    near = float(np.finfo(dtype).eps) ** 0.25
    return regrouped(weighted, near, _units_gap, _units_difference)


def _units_gap(a: HiddenUnits, b: HiddenUnits) -> float:
    """The largest relative change of an array; infinite where there is no small difference."""
    plain = all(units.up is None and units.gate.weight is not None for units in (a, b))
    if a.activation != b.activation or not plain:
        return math.inf
    if a.activation is None or not _is_smooth(a.activation):
        return math.inf
    pairs = []
    for one, two in zip(jax.tree.leaves(_arrays(a)), jax.tree.leaves(_arrays(b)), strict=True):
        if one.shape != two.shape:
            return math.inf
        pairs.append((one, two))
    return largest_change(pairs)


def _arrays(units: HiddenUnits) -> list[np.ndarray]:
    """The arrays of a function in float64, zeros and identities in the place of missing ones."""
    weight: Any = units.gate.weight
    width = len(weight)
    down = np.eye(width) if units.down is None else units.down
    given = (
        weight,
        np.zeros(width) if units.gate.bias is None else units.gate.bias,
        down,
        np.zeros((len(down), 1)) if units.linear is None else units.linear,
        np.zeros(len(down)) if units.constant is None else units.constant,
    )
    return [np.asarray(array, np.float64) for array in given]


def _units_difference(
    a: HiddenUnits, b: HiddenUnits, unit: float
) -> list[tuple[float, HiddenUnits]]:
    """The function b - a as `unit` times functions of weights near 1."""
    weight, bias, down, *_ = _arrays(a)
    # Everything is divided by `unit`, the size of the change, so that the functions have weights
    # near 1 and `unit` becomes their coefficient.
    changes = [(y - x) / unit for x, y in zip(_arrays(a), _arrays(b), strict=True)]
    to_weight, to_bias, to_down, to_linear, to_constant = changes
    moved = None if a.linear is None and b.linear is None else to_linear
    gate = Affine(weight, bias)
    # (D' - D) f(u), with the changes of S and c beside it.
    terms = [(unit, a._replace(gate=gate, down=to_down, linear=moved, constant=to_constant))]
    assert a.activation is not None  # see `_units_gap`
    slope = derivative(a.activation)
    # The integral over t by two nodes of weight 1/2: units f'(u_t) with the factor u' - u, read by
    # D'.
    for t in _MIDDLE:
        between = Affine(weight + t * unit * to_weight, bias + t * unit * to_bias)
        up = Affine(to_weight, to_bias)
        halved = 0.5 * (down + unit * to_down)
        terms.append((unit, HiddenUnits(slope, between, up, halved, None, None, a.copies)))
    return terms


def _is_smooth(function: Activation) -> bool:
    """Whether an activation is analytic near the real line."""
    return function.function is not None and min(part.strip for part in function.parts) > 0
