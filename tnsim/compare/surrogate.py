"""Polynomial surrogates of models with activations: Hermite expansions, with a measured error.

Over u = m + s z with z standard normal, an activation is `f(u) = sum_k c_k h_k(z)` in normalised
Hermite polynomials, and cutting the sum at a degree is its best approximation in mean square. A
surrogate replaces every activation by such a cut, about the mean m and the deviation s that every
unit has on the inputs of a metric. The result is a `Model` of known layers, so every metric and
every verb takes it, to any depth.

Writing it as layers needs no roots of polynomials. With `sqrt(k) h_k = z h_(k-1) - sqrt(k-1)
h_(k-2)` two orders are a single product of real linear factors,

    c_k h_k + c_(k-1) h_(k-1) = h_(k-1)(z) (c_k z / sqrt(k) + c_(k-1)) - c_k sqrt((k-1)/k) h_(k-2),

since the k - 1 roots of h_(k-1), the nodes of Gauss-Hermite quadrature, are real. The last term
joins order k - 2. So degree p takes half of p hidden units, rounded up, for every unit.

How far a surrogate misleads is told by its relative error in mean square: with e = |A - P| / |A|
the angle between A and its surrogate P is at most asin e, so

    |angle(A, B) - angle(P, Q)| <= asin e_A + asin e_B.

The error is measured on inputs, through all layers. Errors grow with the degree where layers follow
each other, as a polynomial of degree p of a polynomial of degree p has degree p^2: degree 2 or 3
and two layers are where surrogates help, and surrogates without a bound worth stating are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Activation
from tnsim.activations.coefficients import coefficients
from tnsim.checkpoints.given import given_model
from tnsim.compare.by_points import reading_of
from tnsim.errors import ModelError, UnsupportedLayer
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.input_moments import gaussian_draws, marginals
from tnsim.metrics.metric import Gaussian, GaussianClosure, as_metric
from tnsim.metrics.protocol import CHUNK, Metric, Points, check_draws, draws
from tnsim.models.arrays import add, in_float64
from tnsim.models.components import with_core
from tnsim.models.forward import plain_states
from tnsim.models.layers import (
    Bilinear,
    Elementwise,
    Gated,
    Layer,
    Linear,
    Multilinear,
    activation_of,
    innermost,
)
from tnsim.models.model import (
    Model,
    Origin,
    Seed,
    check_numbers,
    check_untraced,
    seed_number,
    with_dense_matrices,
)
from tnsim.models.scaling import replaced
from tnsim.options import checked
from tnsim.problems.hidden_units import segments
from tnsim.problems.layer_tensors import Affine, affine_of

LARGEST_ERROR = 0.5
"""Largest relative error of a surrogate. Its angle bound is 30 degrees, and beyond it a few rare
inputs decide the moments of a polynomial, which say nothing about the network."""

_LARGEST_DEGREE = 170
"""Largest degree whose factorial is a float, as Hermite polynomials need it."""


@checked
def polynomial(
    model: Any,
    degree: int,
    metric: Metric | str = Gaussian(),
    *,
    samples: int = 16384,
    seed: Seed = 0,
) -> Model:
    """Replace every activation of a model by a polynomial, and measure what that changes.

    Args:
        model: Model, module of PyTorch or path of a file.
        degree: Degree of the polynomials, from 1 to 170. An activation of degree 2 is a `Bilinear`
            layer, of a higher degree a `Multilinear` layer; a gate adds 1 for its factor.
        metric: Inputs about which activations are expanded: `Gaussian(mean, cov)`, or
            `Empirical(inputs)` for data.
        samples: Number of draws from a Gaussian on which means, deviations and the error are
            measured. Units that read the input through linear layers alone have exact moments.
        seed: Seed of the draws: a number, a NumPy generator or a JAX key.

    Returns:
        A polynomial `Model`, float64. Its `origin.error` is the root of
        `E |model - polynomial|^2 / E |model|^2`, measured on the inputs, and a caveat repeats it. A
        model without activations is returned as it is.

    Raises:
        ModelError: The error is above 0.5, so that the surrogate says little about the model; or
            the metric has no inputs, the degree is out of range, or there are too few samples.
        UnsupportedLayer: The argument is no single model with layers.

    Example:
        >>> import numpy as np, tnsim
        >>> layers = tnsim.Linear(np.eye(2)), tnsim.Elementwise("relu"), tnsim.Linear(np.eye(2))
        >>> surrogate = tnsim.polynomial(tnsim.Model(layers), degree=2)
        >>> surrogate.degree, type(surrogate.layers[0]).__name__
        (2, 'Bilinear')
        >>> round(surrogate.origin.error, 2)
        0.15

    Source:
        Hermite expansions of activations: Daniely et al. 2016, "Toward deeper understanding of
        neural networks".
    """
    metric, model = as_metric(metric), with_dense_matrices(given_model(model))
    if not isinstance(model, Model):
        raise UnsupportedLayer(
            f"a surrogate is made of a model with layers, found {type(model).__name__}: "
            "make a surrogate of each model of a sum; a function without layers is compared by "
            "Empirical(inputs)"
        )
    if not 1 <= degree <= _LARGEST_DEGREE:
        raise ModelError(
            f"the degree of a polynomial is a whole number from 1 to {_LARGEST_DEGREE}, found "
            f"{degree}"
        )
    if model.is_polynomial:
        return model
    check_numbers(model)
    check_untraced("polynomial", model, metric)
    model = Model(map(in_float64, model.layers), model.n_ctx, model.origin)
    inputs = _Inputs(model, metric, samples, seed_number(seed, "the seed of a surrogate"))
    moments = _gate_moments(model, metric, inputs)
    layers: list[Layer] = []
    for layer, known in zip(model.layers, moments, strict=True):
        _append_layer(layers, layer, known, degree)
    surrogate = Model(layers, model.n_ctx)
    error = _relative_error(model, surrogate, inputs)
    words = f"{inputs.count:,} {inputs.words}"
    if not error <= LARGEST_ERROR:
        raise ModelError(
            f"the polynomial of degree {degree} in each activation is another function: its "
            f"relative error, on {words}, is {error:.2g}, and above {LARGEST_ERROR} it says little "
            "about the model: degrees 2 and 3 help up to two nonlinear layers; use Gaussian(mean, "
            "cov) for one nonlinear layer, exact for any activation, or Empirical(inputs)"
        )
    return Model(layers, model.n_ctx, _surrogate_origin(model, degree, error, words))


def _surrogate_origin(model: Model, degree: int, error: float, words: str) -> Origin:
    """The record of a surrogate, with that of the model."""
    known = model.origin or Origin("a model")
    caveat = (
        f"activations are polynomials of degree {degree}, with a relative error of {error:.2g} on "
        f"{words}: angles are off by up to {math.degrees(math.asin(error)):.1f} degrees"
    )
    return Origin(
        f"polynomials in the place of activations of {known.source}",
        known.assumptions,
        (*known.caveats, caveat),
        known.ignored,
        error,
    )


class _Inputs:
    """Inputs of a metric, in blocks of bounded size, with weights that sum to 1."""

    def __init__(self, model: Model, metric: Metric, samples: int, seed: int) -> None:
        reading = reading_of([model])
        if isinstance(metric, Gaussian | GaussianClosure):
            check_draws(samples)
            points = draws(samples, seed, gaussian_draws(metric, reading))
            self.words = "draws"
        elif isinstance(metric, Empirical):
            points = metric.points(reading)
            self.words = "inputs"
        else:
            raise ModelError(
                "activations are expanded about inputs, which Gaussian(mean, cov) and "
                f"Empirical(inputs) have, found {type(metric).__name__}"
            )
        if points.tokens:
            raise ModelError(
                "activations are expanded about vectors, found token ids: give the states that "
                "reach the model as Empirical(states)"
            )
        self.count = points.count
        self._points: Points = points

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, self.count, CHUNK):
            block = self._points.block(start, min(start + CHUNK, self.count))
            yield np.asarray(block.inputs, np.float64), np.exp(block.log_weights)


class _Moments(NamedTuple):
    """Means and standard deviations of the inputs of a layer's activations."""

    mean: Float[np.ndarray, " units"]
    deviation: Float[np.ndarray, " units"]


def _gate_moments(model: Model, metric: Metric, inputs: _Inputs) -> list[_Moments | None]:
    """Moments of the inputs of every activation; None for layers without an activation."""
    exact = _first_moments(model, metric)
    # Every activation is covered by exact moments, so no input has to be run.
    if sum(activation_of(layer) is not None for layer in model.layers) == len(exact):
        return [exact.get(n) for n in range(len(model.layers))]
    shifts: dict[int, np.ndarray] = {}
    sums: dict[int, list[np.ndarray]] = {}
    # Each block of inputs runs through the model layer by layer, and the gates of every activation
    # are measured on the way.
    for x, weights in inputs:
        for layer, (n, state) in zip(model.layers, plain_states(model.layers, x), strict=False):
            if activation_of(layer) is not None and n not in exact:
                gates = _gate_inputs(layer, state)
                gates = gates.reshape(len(x), -1, gates.shape[-1])
                # The mean of the first block is taken off before squares are added: a variance far
                # below the squared mean keeps its digits in sums of small numbers.
                shift = shifts.setdefault(n, gates.mean(axis=(0, 1)))
                centred = gates - shift
                powers = [
                    np.einsum("i,ipu->u", weights, centred**k) / gates.shape[1] for k in (1, 2)
                ]
                known = sums.setdefault(n, [np.zeros_like(p) for p in powers])
                sums[n] = [a + b for a, b in zip(known, powers, strict=True)]
    moments = dict(exact)
    for n, (first, second) in sums.items():
        # Var = E (u - shift)^2 - (E u - shift)^2.
        variance = np.maximum(second - first**2, 0.0)
        moments[n] = _Moments(shifts[n] + first, np.sqrt(variance))
    return [moments.get(n) for n in range(len(model.layers))]


def _first_moments(model: Model, metric: Metric) -> dict[int, _Moments]:
    """Exact moments at the first activation, where linear layers stand before it."""
    if not isinstance(metric, Gaussian | GaussianClosure):
        return {}
    (_, mean, cov), *others = marginals(metric, model.d_in, model.n_ctx)
    place = next(n for n, layer in enumerate(model.layers) if innermost(layer).order > 1)
    if others or activation_of(model.layers[place]) is None:
        return {}
    (units,) = segments(Model(model.layers[: place + 1], model.n_ctx))
    rows, bias = units.gate
    rows = np.eye(model.d_in) if rows is None else rows
    mean = np.zeros(len(rows)) if mean is None else rows @ np.asarray(mean, np.float64)
    cov = np.ones(model.d_in) if cov is None else np.asarray(cov, np.float64)
    spread = rows * cov if cov.ndim == 1 else rows @ cov
    variance = (spread * rows).sum(axis=1)
    return {place: _Moments(add(mean, bias), np.sqrt(np.maximum(variance, 0.0)))}


def _gate_inputs(layer: Layer, x: Any) -> np.ndarray:
    """The inputs of a layer's activations."""
    core: Any = innermost(layer)
    if isinstance(core, Elementwise):
        return np.asarray(x)
    return np.asarray(add(x @ core.gate.T, core.gate_bias))


def _append_layer(layers: list[Layer], layer: Layer, moments: _Moments | None, degree: int) -> None:
    """Append a layer to a surrogate, with linear neighbours of hidden units multiplied out."""
    before = layers[-1] if layers else None
    # A linear layer behind hidden units is multiplied into their output matrix.
    if moments is None:
        if isinstance(layer, Linear) and isinstance(before, Bilinear | Multilinear):
            down, bias = affine_of(layer).after(Affine(before.down, before.down_bias))
            layers[-1] = replaced(before, {"down": down, "down_bias": bias})
        else:
            layers.append(layer)
        return
    core: Any = innermost(layer)
    if isinstance(core, Gated):
        gate, bias, up = core.gate, core.gate_bias, (core.up, core.up_bias)
        down, constant = core.down, core.down_bias
    else:
        gate, bias, up = np.eye(core.d_in), None, (None, None)
        down, constant = np.eye(core.d_in), None
        # A linear layer before an activation without a skip becomes the rows of its hidden units.
        if core is layer and isinstance(before, Linear):
            gate, bias = before.weight, before.bias
            layers.pop()
    rows = np.asarray(gate, np.float64)
    offset = np.zeros(len(rows)) if bias is None else np.asarray(bias, np.float64)
    known = _hermite_layer(core.activation, moments, degree, (rows, offset), up, down, constant)
    layers.append(with_core(layer, known))


def _hermite_layer(
    function: Activation,
    moments: _Moments,
    degree: int,
    gate: tuple[np.ndarray, np.ndarray],
    up: tuple[Any, Any],
    down: Any,
    constant: Any,
) -> Layer:
    """A layer `D (f(u) * v) + b` with f cut at a degree, see the formula of the module.

    Args:
        function: Activation f.
        moments: Means and deviations of the gates u.
        degree: Degree of the polynomial.
        gate: Rows and biases of the gates.
        up: Rows and biases of the factors v; None for 1.
        down: Matrix D.
        constant: Bias b, or None.
    """
    with jax.enable_x64(True):
        mean, deviation = map(jnp.asarray, moments)
        series = coefficients(function, mean, deviation, degree)
    c = np.array(series, np.float64)
    mean, deviation = moments
    # A unit that does not vary is the constant c_0, and its z is set to zero.
    live = deviation > 0
    per = np.where(live, 1.0 / np.where(live, deviation, 1.0), 0.0)
    rows, offsets = per[:, None] * gate[0], per * (gate[1] - mean)  # z of every unit
    down = np.asarray(down, np.float64)
    legs: list[list[tuple[np.ndarray, np.ndarray]]] = []
    nothing, one = np.zeros_like(rows), np.ones(len(rows))
    # Two orders in each round, from the highest on, as in the formula of the module.
    for k in range(degree, -1, -2):
        if k == 0 and up[0] is None:
            break
        # The factors of one product of each unit, as pairs (row, offset): first the order zero
        # alone, or the roots of h_(k-1) and the last factor.
        factors = [(nothing, c[0])]
        if k:
            nodes = np.polynomial.hermite_e.hermegauss(k - 1)[0] if k > 1 else ()
            size = 1 / math.sqrt(math.factorial(k - 1))
            slope = size / math.sqrt(k) * c[k]
            last = slope[:, None] * rows, slope * offsets + size * c[k - 1]
            factors = [*((rows, offsets - node) for node in nodes), last]
            # What the product has too much joins order k - 2, which comes in the next round.
            if k > 1:
                c[k - 2] -= math.sqrt((k - 1) / k) * c[k]
        # Products of lower orders are filled up with factors of 1, as a layer has the same legs for
        # all units.
        factors += [(nothing, one)] * (max(degree, 1) - len(factors))
        if up[0] is not None:
            offset = np.zeros(len(rows)) if up[1] is None else np.asarray(up[1], np.float64)
            factors.append((np.asarray(up[0], np.float64), offset))
        legs.append(factors)
    bias = None if constant is None else np.asarray(constant, np.float64)
    # An even degree ends with order 0, the constant c_0 of each unit, as a bias of the output.
    if degree % 2 == 0 and up[0] is None:
        bias = add(down @ c[0], bias)
    # Every round is a block of hidden units that the same output matrix reads.
    columns = np.concatenate([down] * len(legs), axis=1)
    weights, biases = [], []
    for n in range(len(legs[0])):
        weights.append(np.concatenate([factors[n][0] for factors in legs]))
        biases.append(np.concatenate([factors[n][1] for factors in legs]))
    if len(weights) == 1:
        return Linear(columns @ weights[0], add(columns @ biases[0], bias))
    if len(weights) == 2:
        (left, right), (left_bias, right_bias) = weights, biases
        return Bilinear(left, right, columns, left_bias, right_bias, bias)
    return Multilinear(weights, columns, biases, bias)


def _relative_error(model: Model, surrogate: Model, inputs: _Inputs) -> float:
    """The root of `E |model - surrogate|^2 / E |model|^2` on the inputs."""
    apart = size = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for x, weights in inputs:
            expected = np.asarray(model(x)).reshape(len(x), -1)
            outputs = np.asarray(surrogate(x)).reshape(len(x), -1)
            apart += float(weights @ ((outputs - expected) ** 2).sum(axis=1))
            size += float(weights @ (expected**2).sum(axis=1))
    if size == 0:
        raise ModelError(
            f"the model is zero on all {inputs.count:,} {inputs.words}, so no error is relative "
            "to it: give a metric with inputs on which the model is not"
        )
    return math.sqrt(apart / size) if math.isfinite(apart) else math.inf
