"""Models of a single nonlinear layer, polynomial or not, under a Gaussian: exact inner products.

Models of several layers are chains of such functions (`problems.kernel_models`). A model of a
single one is a linear map of its hidden units beside a linear map of its input,

    A(x) = D h(x) + S x + c,        h_i = f(g_i) or f(g_i) v_i,

where g and v are affine in x. Linear layers before the nonlinear one go into g and v, linear layers
behind it into D, S and c (`hidden_units`). With x = mean + L z and z standard normal, every unit is
a function of one or two normal numbers, so the inner product is a sum over pairs of hidden units,

    E <A, B> = sum_o sum_ij D[o, i] K[i, j] D'[o, j] + <h, l'> + <l, h'> + <l, l'>,
    K[i, j] = E h_i h'_j,

where h stands for D h(x) and l for S x + c. The kernel K is the metric as an operator between the
hidden legs of bra and ket: all pairings of Isserlis' theorem, of all orders, summed up. Its entries
are closed forms or series with a certified remainder (`tnsim.activations`). Against a linear
partner only the mean and the first Hermite coefficients of a function count, so with x0 = E A and
J = E A z^T the other terms are x0 . x0' + <J, J'>.

The rows of K are made in blocks, so no more than a block of K is in memory. Numbers on the host
take NumPy, with nothing to compile; traces and accelerators take JAX, accelerators only where the
layer is wide enough to keep them busy.

Source:
    Cho and Saul 2009, "Kernel methods for deep learning"; Tsuchida et al. 2018, "Invariance of
    weight distributions in rectified MLPs".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Activation, derivative
from tnsim.activations.activation import power as power_of
from tnsim.activations.gated import (
    GatedPairing,
    GatedUnits,
    check_gate,
    gated_expanded,
    gated_moments,
)
from tnsim.activations.kernels import (
    Expanded,
    Kernel,
    Pairing,
    Plain,
    Units,
    as_function,
    between,
    expanded,
    first_moments,
    with_slopes,
)
from tnsim.engine.runtime.devices import backend, processors
from tnsim.engine.runtime.threads import shared
from tnsim.errors import OWN_ACTIVATION, UnsupportedLayer
from tnsim.metrics.metric import Gaussian, GaussianClosure
from tnsim.metrics.protocol import Metric, adds_up
from tnsim.models.arrays import Array, add, in_float64, is_traced, pytree
from tnsim.models.differences import largest_change, regrouped
from tnsim.models.layers import activation_of, bias_name, map_names, residual_rule
from tnsim.models.matrices import written_out
from tnsim.models.model import Model
from tnsim.problems.tensors.affine import Affine, affine_of, product
from tnsim.problems.tensors.kinds import core_of, kinds, nonlinear
from tnsim.scaled import library
from tnsim.sessions import session

_BLOCK = 2**21
"""Most entries of a block of the kernel, 16 MiB, beside a few arrays of its size in flight."""
MOST_PAIRED = 4
"""Most factors of a layer whose pairings are summed up by plans: 105 pairings of eight legs take
seconds to plan, 945 of ten take minutes."""
_NARROW = 256
"""Most hidden units that stay on the host beside an accelerator: an inner product of 256 by 256
units takes both 40 ms, and an accelerator seconds more to compile the program of a kernel."""

KERNEL_DTYPE = "float64"
"""Precision of kernels outside of a trace, also where float32 is asked for: their thresholds near
correlation 1 are below the range of float32."""

Blocks: TypeAlias = tuple[Kernel, ...]
"""The kernel of all hidden units of two models, in blocks of rows."""

ROADS = (
    "use Empirical(inputs), or Empirical.normal(mean, cov, samples) for an estimate with its "
    "standard error"
)
"""Advice where no closed form is known."""


def answers(models: Iterable[Model], metric: Metric) -> bool:
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
        >>> answers([rectified], tnsim.Gaussian())
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
    return True


def _has_many_factors(models: Sequence[Model], metric: Metric) -> bool:
    """Whether polynomial models are compared as powers of hidden units, as `_powers` writes them.

    A layer of n factors meets another in (2 n - 1)!! pairings, each a summand of a plan, and in
    4^(n - 1) pairs of powers for each pair of hidden units, each a number.
    """
    if type(metric) not in (Gaussian, GaussianClosure):
        return False
    layers = [kinds(model) for model in models]
    flat = [layer for one in layers for layer in one]
    # One layer alone is exact by its units; of several, the closure goes on with laws of states.
    alone = type(metric) is GaussianClosure or nonlinear(*layers) == 1
    plain = not any(layer.mixes_positions or layer.sparse for layer in flat)
    return alone and plain and max(layer.order for layer in flat) > MOST_PAIRED


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
    if answers(models, metric):
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
            f"model: {_advice_on_compositions(model)}{ROADS}; GaussianClosure(mean, cov) takes "
            "hidden states for Gaussian, a similarity of its own and no estimate"
        )
    for layer in layers:
        if layer.activation is not None and len(layer.legs) > 1:  # a gate and a factor beside it
            check_gate(layer.activation)
        if layer.mixes_positions:
            raise UnsupportedLayer(
                f"{type(metric).__name__} compares an activation with layers that act on every "
                f"position alone, found {layer.name}: {ROADS}"
            )


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


def _is(number: Any, value: float) -> bool:
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
    if not _is(scale, 1.0):
        down = scale * (np.eye(width) if down is None else down)
        constant = None if constant is None else scale * constant
    if not _is(skip, 0.0):
        linear = skip * (np.eye(width) if state.weight is None else state.weight)
        if state.bias is not None:
            constant = add(skip * state.bias, constant)
    return units._replace(down=down, linear=linear, constant=constant)


_MIDDLE = (0.5 - math.sqrt(1 / 12), 0.5 + math.sqrt(1 / 12))
"""Nodes of Gauss-Legendre quadrature on [0, 1] with two points of equal weight."""


def small_differences(
    weighted: Sequence[tuple[Any, HiddenUnits]], dtype: str
) -> list[tuple[Any, HiddenUnits]]:
    """A sum of functions with small differences as functions of their own, so that nothing cancels.

    With u_t = u + t (u' - u), a smooth activation has

        D' f(u') - D f(u) = (D' - D) f(u) + D' int_0^1 f'(u_t) dt * (u' - u),

    a sum of hidden units and of gated units whose activation is the derivative. Differences are
    taken where weights change by less than eps^(1/4): the integral is then
    exact to rounding at two nodes, as the error is of the order of the change to the power 4.
    Activations with kinks and gated units stay as they are: what cancels between them is counted in
    the error.

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


class Moments(NamedTuple):
    """The mean `E A` and the first Hermite coefficients `E A z^T` of a function of z ~ N(0, 1)."""

    mean: Float[Array, " out"]
    slopes: Float[Array, "out latent"]


class Sizes(NamedTuple):
    """Sizes of all hidden units in the outputs, relative to which kernels are rounded.

    Args:
        total: Sums over units of |D| times the size of the unit.
        length: Roots of the sums of squares, as errors of single pairs of units add up.
    """

    total: Float[Any, " out"]
    length: Float[Any, " out"]


@pytree
@dataclass(frozen=True, eq=False)
class Prepared:
    """A model at a position, over the standard normal coordinates z of the input.

    Args:
        activation: Function of the gates; None where there are no hidden units.
        gate: Gates as normal numbers.
        up: Factors of the gates as normal numbers; None for 1.
        down: Matrix D of the outputs; None for the identity.
        hidden: Mean and slopes of D h.
        beside: Mean and slopes of S x + c.
        copies: Number of powers that together are a single hidden unit of the layer.
        expanded: Coefficients of the hidden units; None where there are none.
        sizes: Sizes of the hidden units in the outputs; None where `expanded` has no coefficients.
    """

    activation: Activation | None = field(metadata={"static": True})
    gate: Units | None
    up: Units | None
    down: Float[Any, "out units"] | None
    hidden: Moments
    beside: Moments
    copies: int = field(default=1, metadata={"static": True})
    expanded: Expanded | None = None
    sizes: Sizes | None = None

    @property
    def units(self) -> int:
        """Number of hidden units."""
        return 0 if self.gate is None else len(self.gate.mean)


class Inner(NamedTuple):
    """An inner product, or one for each output.

    Args:
        value: Sum over pairs of hidden units, and the other terms.
        size: Size of the terms, relative to which the sum is rounded.
        bound: Certified bound of the remainders of all series.
    """

    value: Float[Any, "*out"]
    size: Float[Any, "*out"]
    bound: Float[Any, "*out"]


def prepared(
    units: HiddenUnits, mean: Any, root: Any, d_in: int, dtype: str, on_host: bool = False
) -> Prepared:
    """A model under x = mean + L z, in arrays of NumPy, or of JAX inside a trace.

    On an accelerator the kernels of wide layers are made there, and nothing else: every function of
    an array there is a program of its own, which takes a tenth of a second to compile.

    Args:
        units: Hidden units of the model.
        mean: Mean of the input, (d_in,); None for zero.
        root: Matrix L, its diagonal, or None for the identity, see `root_of`.
        d_in: Number of coordinates of the input.
        dtype: Type of the arrays.
        on_host: Whether kernels are made in NumPy, also where there is an accelerator.
    """
    traced = is_traced((units[1:], mean, root))
    xp = jnp if traced else np
    latent = root.shape[1] if root is not None and root.ndim == 2 else d_in

    def normal(affine: Affine) -> Units:
        # E (W x + b) = W mean + b; the rows W L give the dependence on z.
        known = affine.weight is not None
        weight = affine.weight if known else np.eye(d_in)
        means = affine.bias
        if mean is not None:
            means = add(weight @ mean if known else mean, affine.bias)
        rows: Any = weight
        if root is not None and root.ndim == 1:
            rows = weight * root
        elif root is not None:
            rows = weight @ root if known else root
        means = np.zeros(len(rows)) if means is None else means
        return Units(xp.asarray(means, dtype), xp.asarray(rows, dtype))

    if units.linear is not None:
        beside = Moments(*normal(Affine(units.linear, units.constant)))
    else:
        rows: Any = units.gate.weight if units.down is None else units.down
        out = d_in if rows is None else len(rows)
        constant = np.zeros(out) if units.constant is None else units.constant
        beside = Moments(xp.asarray(constant, dtype), xp.zeros((out, latent), dtype))
    if units.activation is None:
        return Prepared(None, None, None, None, Moments(*map(xp.zeros_like, beside)), beside)
    gate = normal(units.gate)
    up = None if units.up is None else normal(units.up)
    down = None if units.down is None else xp.asarray(units.down, dtype)
    hidden = Moments(*(product(down, moment) for moment in moments(units.activation, gate, up)))
    on_device = not (traced or on_host or len(gate.mean) <= _NARROW or backend() == "cpu")
    known = (
        expanded(units.activation, gate, on_device)
        if up is None
        else gated_expanded(units.activation, GatedUnits(gate, up), on_device)
    )
    sizes = None
    if known.side is not None:
        eye = np.eye(len(known.side.gross)) if down is None else down
        sizes = _sizes(eye, known.side.gross)
    return Prepared(units.activation, gate, up, down, hidden, beside, units.copies, known, sizes)


def moments(function: Activation, gate: Units, up: Units | None) -> Moments:
    """The means `E h` of hidden units and their first Hermite coefficients `E h z^T`.

    Args:
        function: Function f of the gates.
        gate: Gates u.
        up: Factors of the gates; None for 1.
    """
    if up is None:
        mean, slope = first_moments(function, gate)
        return Moments(mean, slope[:, None] * gate.rows)
    return Moments(*gated_moments(function, GatedUnits(gate, up)))


def inner(a: Prepared, b: Prepared, slices: bool, known: Blocks | None = None) -> Inner:
    """The inner product of two models at a position, in total or for each output.

    Args:
        a, b: Models under the same input.
        slices: Whether outputs are told apart.
        known: Kernel of the hidden units as numbers, inside a trace; None where it is to be made.
    """
    value: Any = 0.0
    # Against a linear function only mean and slopes count; units against units are added below.
    for one, two in ((a.hidden, b.beside), (a.beside, b.hidden), (a.beside, b.beside)):
        value = value + _linear_product(one, two)
    xp = library(a.beside, b.beside)
    # Lengths sqrt(E l^2) of the linear parts and of the units, by output: what terms are as large
    # as, for the error of rounding.
    lengths = [xp.sqrt(_linear_product(units.beside, units.beside)) for units in (a, b)]
    bound = xp.zeros_like(value)
    if a.units and b.units:
        pairs = _over_pairs(a, b, known)
        value, bound = value + pairs.value, pairs.bound
        lengths = [x + y for x, y in zip(lengths, pairs.lengths, strict=True)]
    if slices:
        return Inner(value, lengths[0] * lengths[1], bound)
    # By Cauchy-Schwarz the products of both lengths, summed over outputs, are at most the product
    # of the two norms.
    first, second = (library(x).sqrt((x**2).sum()) for x in lengths)
    return Inner(value.sum(), first * second, bound.sum())


def _linear_product(one: Moments, two: Moments) -> Any:
    """`E <A, l>` by output, for a function A and a linear function l."""
    return one.mean * two.mean + (one.slopes * two.slopes).sum(axis=1)


class _Pairs(NamedTuple):
    """Sums over pairs of hidden units, by output.

    Args:
        value: Sums `D K D'`.
        bound: Certified bounds of their errors of truncation.
        lengths: Roots of `sum_i D[o, i]^2 E h_i^2` of both models, where sizes of units are those
            relative to which kernels are rounded. Errors of pairs of units that are independent of
            one another add up to rounding times the product of the two.
    """

    value: Any
    bound: Any
    lengths: tuple[Any, Any]


def _over_pairs(a: Prepared, b: Prepared, known: Blocks | None) -> _Pairs:
    rows, columns = down_of(a), down_of(b)
    value: Any = 0.0
    share: Any = 0.0
    gross, other_gross = [], None
    xp = library(a.beside, b.beside)
    # Of a symmetric kernel NumPy makes the upper triangle. Its blocks have several shapes, each of
    # which would be a program of JAX's, and columns are doubled in place.
    alone = a is b and xp is np and a.expanded is not None and a.expanded.side is not None
    if known is None:
        blocks = kernel_blocks(a, b, triangle=alone)
    else:
        units = _units_of_blocks(a, b)
        blocks = (as_function(one, *both) for one, both in zip(known, units, strict=True))
    for block in blocks:
        if is_traced(tuple(block)):  # also of numbers, where an accelerator makes the kernel
            xp = jnp
        # Blocks come in the order of their rows; the rows so far are counted by the lengths of
        # their sizes.
        start = sum(map(len, gross))
        stop = start + len(block.gross)
        read = columns
        if alone:  # entries above the diagonal blocks stand for those below too
            read = columns[:, start:].copy()
            read[:, stop - start :] *= 2
        # sum_i D[o, i] (K D'^T)[i, o] for the rows of the block, an entry for each output.
        products = xp.asarray(block.values @ read.T)
        value = value + xp.einsum("oi,io->o", rows[:, start:stop], products)
        share = xp.maximum(share, xp.asarray(block.share))
        gross.append(xp.asarray(block.gross))
        other_gross = xp.asarray(block.other_gross)
    first = a.sizes or _sizes(rows, xp.concatenate(gross))
    second = b.sizes or _sizes(columns, other_gross)
    # |sum_ij D[o, i] e_ij D'[o, j]| with |e_ij| <= share gross_i gross_j.
    bound = share * first.total * second.total
    return _Pairs(value, bound, (first.length, second.length))


def _sizes(down: Any, gross: Any) -> Sizes:
    """The sizes of all hidden units in the outputs, given those of the units."""
    xp = library(down, gross)
    length = xp.sqrt(xp.einsum("oi,oi,i->o", down, down, gross**2))
    return Sizes(abs(down) @ gross, length)


def down_of(model: Prepared) -> Any:
    """The matrix that reads the outputs off the hidden units."""
    if model.down is not None:
        return model.down
    return np.eye(model.units, dtype=model.beside.mean.dtype)


def whole_kernel(a: Prepared, b: Prepared) -> Float[Any, "legs others"]:
    """The kernel with the constant and the input beside the hidden units.

    Rows and columns are `(h, 1, z)`, so that the inner product of two models is the sum of
    `readout(a) * (readout(b) @ kernel.T)` and nothing else.
    """
    # First moments of hidden units with (1, z), which frame the kernel of the units.
    legs = []
    for model in (a, b):
        latent, dtype = model.beside.slopes.shape[1], model.beside.mean.dtype
        known = Moments(np.zeros(0, dtype), np.zeros((0, latent), dtype))
        if model.activation is not None and model.gate is not None:
            known = moments(model.activation, model.gate, model.up)
        legs.append(library(known).column_stack([known.mean, known.slopes]))
    first, second = legs
    xp = library(first, second)
    pairs = np.zeros((len(first), len(second)), first.dtype)
    if pairs.size:
        pairs = xp.concatenate([block.values for block in kernel_blocks(a, b)])
    # (1, z) are uncorrelated and of variance 1.
    beside = np.eye(first.shape[1], dtype=first.dtype)
    return xp.block([[pairs, first], [second.T, beside]])


def readout(model: Prepared) -> Float[Any, "out legs"]:
    """The matrix that reads the outputs off `(h, 1, z)`, see `whole_kernel`."""
    beside = [model.beside.mean[:, None], model.beside.slopes]
    xp = library(model.beside)
    return xp.concatenate([down_of(model), *beside] if model.units else beside, axis=1)


def blocks_of(units: int, others: int) -> list[tuple[int, int]]:
    """First unit and end of the blocks in which rows of the kernel are made, of even sizes.

    Example:
        >>> blocks_of(3, 5)
        [(0, 3)]
    """
    count = max(1, math.ceil(units * others / _BLOCK))
    return list(itertools.pairwise(n * units // count for n in range(count + 1)))


def kernel_blocks(
    a: Prepared, b: Prepared, centred: bool = False, triangle: bool = False
) -> Iterator[Kernel]:
    """The kernel of all hidden units of two models in blocks of rows, with certified bounds.

    Args:
        a, b: Models under the same input.
        centred: Whether products of means are left out, which makes covariances; on the host.
        triangle: Whether columns before a block's rows are left out, as a kernel of one model with
            itself is symmetric.
    """
    for units in _units_of_blocks(a, b, centred, triangle):
        yield between(*units, _at_once)


def blocks_at_numbers(a: Prepared, b: Prepared, slopes: bool) -> Blocks:
    """The kernel of all hidden units of two models that are numbers, for traces that are given it.

    Args:
        a, b: Models under the same input.
        slopes: Whether the kernel is differentiated.
    """
    if not (a.units and b.units):
        return ()
    if not slopes:
        return tuple(kernel_blocks(a, b))
    compiled = session().tier == "compile"
    units = _units_of_blocks(a, b)
    return tuple(with_slopes(*both, _at_once, compiled) for both in units)


def slope_bytes(a: Prepared, b: Prepared) -> int:
    """Bytes of the kernel of two models with its slopes, and of what a derivative makes of them."""
    if not (a.units and b.units):
        return 0
    pairing = Plain if a.up is None and b.up is None else GatedPairing
    # The numbers, and the products of slopes with the changes that they stand beside.
    return 2 * 8 * (1 + pairing.slopes) * a.units * b.units


def _units_of_blocks(
    a: Prepared, b: Prepared, centred: bool = False, triangle: bool = False
) -> Iterator[tuple[Pairing, Expanded, Expanded]]:
    """What stands at the pairs of each block, and the units of its rows and columns."""
    first, second, pairing = a.expanded, b.expanded, Plain
    assert first is not None and second is not None  # there are units
    # A plain unit is a gated unit with the factor 1, so one formula serves all pairs as soon as one
    # side is gated.
    if a.up is not None or b.up is not None:
        first, second, pairing = _as_gated(a), _as_gated(b), GatedPairing
    for start, stop in blocks_of(a.units, b.units):
        others = second.part(start, b.units) if triangle else second
        yield pairing(first.f, second.f, centred), first.part(start, stop), others


def _at_once(tasks: Sequence[Any]) -> list[Any]:
    """The results of tasks, in threads."""
    return shared(tasks, processors())


def _as_gated(model: Prepared) -> Expanded:
    """The hidden units as gated ones, of factors 1 where there are none."""
    if model.up is not None and model.expanded is not None:
        return model.expanded
    assert model.activation is not None and model.gate is not None
    mean, rows = model.gate
    factors = Units(library(mean).ones_like(mean), library(rows).zeros_like(rows))
    on_device = model.expanded is not None and model.expanded.side is None
    return gated_expanded(model.activation, GatedUnits(model.gate, factors), on_device)
