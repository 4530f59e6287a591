"""Kernels of gated units, f(u) w as in SwiGLU, GeGLU, ReGLU and bilinear layers: four variables.

Let z be the standard normal variable of u = m + s z, and w = a + b z + e, e independent of z,

    phi(z) = f(u) (a + b z),    g12 = E e z',    g21 = E z e',    eps = E e e'.

Stein's lemma, used for e and e', leaves functions of z and z' (a prime is the other layer's unit):

    E f w f' w' = E phi phi' + g12 E f dphi'/dz' + g21 E dphi/dz f' + eps E f f'
                + g12 g21 E df/dz df'/dz'

Each of the five has a Mehler series, so a unit has four fields: coefficients c of f, p of phi, q of
dphi/dz, d of df/dz, and the rest of each field has its own norm, so the bound is certified as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Activation, Tail, Wave, activation
from tnsim.activations.coefficients import average, coefficients, norms
from tnsim.activations.kernels import (
    Cross,
    DerivativeWeights,
    Expanded,
    NormalInputs,
    Pairing,
    Side,
    at_rest,
    correlations,
    gross_size,
    highest_order,
    in_floats,
    jumps,
    left_over,
    lengths_and_directions,
    product_of_rows,
    relative,
    times_z,
    with_side,
)
from tnsim.activations.normal import Real
from tnsim.errors import UnsupportedLayer
from tnsim.scaled import library


class GatedInputs(NamedTuple):
    """The inputs of gated units under a normal law: of the activation, and of the factor beside it.

    Args:
        gate: Inputs u of the activations.
        up: Inputs w of the factors, in the same coordinates.
    """

    gate: NormalInputs
    up: NormalInputs


def gated_expanded(f: str | Activation, units: GatedInputs, on_device: bool = False) -> Expanded:
    """Gated units with their coefficients, as `expanded` makes plain ones.

    Args:
        f: Activation of the gates, or its name.
        units: Inputs of the units.
        on_device: Whether kernels of units that are numbers are made on JAX's device.

    Raises:
        ModelError: The activation is unknown.
        UnsupportedLayer: The activation has no kernel of gated units, see `check_gate`.
    """
    f = check_gate(activation(f))
    parameters, unit, e = _split(units)
    return with_side(GatedPairing(f, f), Expanded(f, parameters, unit, e, None), on_device)


def gated_moments(
    f: str | Activation, units: GatedInputs
) -> tuple[Real | np.ndarray, Float[Any, "m rank"]]:
    """E f(u_i) w_i of every unit, and its expected derivative by the input's coordinates.

    By Stein's lemma the row is E f'(u) w times the row of u plus E f(u) times the row of w, and
    E f(u) w = a E f + s b E f', E f'(u) w = a E f' + s b E f'', with w = a + b z + e.

    Args:
        f: Activation of the gates, or its name.
        units: Inputs of the units.

    Returns:
        Means (units,) and rows (units, rank). For a standard normal coordinate x_k of the input,
        E f(u) w x_k is entry k of the row.

    Example:
        >>> one = NormalInputs(np.ones(1), np.eye(1))
        >>> units = GatedInputs(one, one)
        >>> mean, row = gated_moments("identity", units)
        >>> float(mean[0]), float(row[0, 0])
        (2.0, 2.0)
    """
    f = activation(f)
    (mean, deviation, shift, slope, _), unit, e = _split(units)
    with np.errstate(all="ignore"):
        # E f, E f' and E f'' of every unit; `slope * deviation` is s b, from Stein's lemma for z.
        first, second, third = (average(f, mean, deviation, order) for order in range(3))
    # A row of zeros has no direction and b = 0. Its changes r change direction and b as if s were 1
    # (`kernels.at_rest`), and moments by E f' times r.
    length = library(deviation).where(deviation > 0, deviation, 1.0)
    value = shift * first + slope * length * second
    by_mean = shift * second + slope * deviation * third
    along = length * by_mean + slope * first
    return value, along[:, None] * unit + first[:, None] * e


def check_gate(f: Activation) -> Activation:
    """The activation of gates, or `UnsupportedLayer` where no bound of their kernel is known."""
    # The series of the slope of a step does not converge in the mean square, so no rest of it has a
    # bound. Slopes of pairs alone take derivatives of third order, which parts that jump lack.
    if jumps(f) or any(isinstance(part, Tail) for part in f.parts):
        raise UnsupportedLayer(
            "gated units take activations without steps, and ELU neither (relu, gelu, silu, tanh, "
            f"sigmoid), found {f!r}: nothing bounds the series of its derivatives; use "
            "Empirical(inputs)"
        )
    return f


def _split(units: GatedInputs) -> tuple[tuple[Real, ...], Real, Real]:
    """Mean, deviation, a, b and the deviation of e of every unit; its direction; the row of e."""
    units = GatedInputs(*map(in_floats, units))
    deviation, unit = lengths_and_directions(units.gate.rows)
    # b is the component of the row of w along the direction of u, and the row of e is what remains,
    # so that e is independent of z.
    slope = library(unit, units.up.rows).sum(units.up.rows * unit, 1)
    e = units.up.rows - slope[:, None] * unit
    return (units.gate.mean, deviation, units.up.mean, slope, lengths_and_directions(e)[0]), unit, e


@dataclass(frozen=True)
class GatedPairing(Pairing):
    """Fields c, p, q, d of either side, joined by rho, g12, g21 and eps."""

    slopes = 14
    # Fields in the order of the lemma: phi phi', f dphi', dphi f', f f' and df df', where 0 is c, 1
    # is p, 2 is q and 3 is d.
    terms = ((1, 1), (0, 2), (2, 0), (0, 0), (3, 3))

    def weights(self, cross: Cross) -> tuple[Real, ...]:
        _, g12, g21, eps = cross
        return g12, g21, eps, g12 * g21

    def slopes_of_weights(self, cross: Cross) -> tuple[tuple[Real | float, ...], ...]:
        _, g12, g21, _ = cross
        return (1.0, 0.0, 0.0, g21), (0.0, 1.0, 0.0, g12), (0.0, 0.0, 1.0, 0.0)

    def cross(self, left: Expanded, right: Expanded) -> Cross:
        unit, e, other_unit, other_e = left.unit, left.across, right.unit, right.across
        # In the order of the weights: g12 = E e z', g21 = E z e', eps = E e e'.
        products = ((e, other_unit), (unit, other_e), (e, other_e))
        return correlations(unit, other_unit), *(product_of_rows(*both) for both in products)

    def side(self, f: Activation, parameters: tuple[Real, ...], slopes: bool) -> Side:
        """Fields c, p, q, d, and their slopes by the parameters."""
        mean, deviation, shift, slope, spread = parameters
        highest = highest_order(f, mean)
        # Multiplying by z and differentiating each need one order beyond the result, derivatives by
        # the parameters further ones.
        order = highest + 4

        def fields(
            mean: Real, deviation: Real, shift: Real, slope: Real, _: Real, moving: bool = slopes
        ) -> Real:
            c = coefficients(f, mean, deviation, order)
            if moving:
                c = at_rest(c, deviation, average(f, mean, deviation, 1))
            p = shift * c + slope * times_z(c)
            # integration by parts: coefficient k of the derivative is sqrt(k + 1) times the next
            xp = library(c)
            k = xp.sqrt(xp.arange(1, order + 1, dtype=c.dtype))[:, None]
            fields = c[:-1], p[:-1], k * p[1:], k * c[1:]
            return xp.stack([x[: highest + 1] for x in fields])

        kinds = [fields(*parameters)]
        if slopes:
            for i in range(len(parameters)):
                tangents = tuple(jnp.full_like(x, i == j) for j, x in enumerate(parameters))
                kinds.append(jax.jvp(fields, parameters, tangents)[1])

        def squares(value: Real, by_z: Real, z: Real) -> list[Real]:
            # The integrands are f^2, phi^2, (dphi/dz)^2 and (df/dz)^2, in the order of the fields.
            factor = shift + slope * z
            return [value**2, (value * factor) ** 2, (by_z * factor + slope * value) ** 2, by_z**2]

        xp = library(mean)
        known = fields(*parameters, moving=False) if slopes else kinds[0]
        squared_norms = norms(f, mean, deviation, squares)
        rests = [
            left_over(f, c, energy, int(i == 1))
            for i, (c, energy) in enumerate(zip(known, squared_norms, strict=True))
        ]
        # E (f w)^2 = E phi^2 + E e^2 E f^2.
        plain, whole, *_ = squared_norms
        size = xp.sqrt(whole + spread**2 * plain)
        factors = abs(shift) + abs(slope) + spread
        if any(isinstance(x, Wave) for x in f.parts):
            # A wave is as large as its derivatives, which the lemma multiplies by deviations.
            factors = factors * (1 + deviation)
        gross = xp.maximum(size, factors * gross_size(f, mean, deviation, xp.sqrt(plain)))
        return Side(parameters, xp.stack(kinds), relative(xp.stack(rests), gross), size, gross)

    @property
    def ends_as_a_root(self) -> bool:
        return False  # slopes take derivatives of higher order

    def smooth_enough(self, f: Activation) -> bool:
        # Slopes take derivatives of fourth order, which kinks do not have.
        return not f.gates_at_kinks

    def alone(self, left: Any, right: Any, rho: Real, cross: Cross) -> DerivativeWeights:
        """Stein's lemma for w and w' themselves, of which no derivative of phi is needed.

        w pairs with u, v, w' or stands for its mean a, where cov(w, u) = b s and
        cov(w, v) = t (b rho + g12):

            E f g w w' = (a a' + cov(w, w')) E f g + sum over x in (u, v) of
                         (a cov(w', x) + a' cov(w, x)) E d/dx (f g)
                         + sum over x, y in (u, v) of cov(w, x) cov(w', y) E d/dx d/dy (f g).
        """
        (_, s, a, b, _), (_, t, a1, b1, _) = left, right
        g12, g21, eps = cross
        # Covariances of w with u and v, of w' with u and v, and of w with w'.
        wu, wv = b * s, t * (b * rho + g12)
        xu, xv = s * (b1 * rho + g21), b1 * t
        joint = eps + b * b1 * rho + b * g21 + b1 * g12
        return {
            (0, 0): a * a1 + joint,
            (1, 0): a * xu + a1 * wu,
            (0, 1): a * xv + a1 * wv,
            (1, 1): wu * xv + wv * xu,
            (2, 0): wu * xu,
            (0, 2): wv * xv,
        }
