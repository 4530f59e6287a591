"""Derivatives of inner products by switches, and integrals along the diagonal of all switches.

For a model f(s) that is a polynomial in switches s, and any sum of models T,

    delta_c = integral over t from 0 to 1 of df/ds_c at s = (t, ..., t)

is the part of component c in f(1, ..., 1) - f(0, ..., 0) after Aumann and Shapley: the parts sum to
the difference, as functions. Along the diagonal f is a polynomial of degree U in t, so
ceil(U / 2) Gauss-Legendre nodes give `<delta_c, T>` exactly, by one reverse gradient a node for all
components together.

Weights and points are arguments of the compiled programs, so other numbers need no new program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.compare.similarity import inner
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.compiling import compiler_options
from tnsim.errors import TnsimError, TooLarge
from tnsim.localise.grams import Setting
from tnsim.metrics.points import Points, WeightedPoints
from tnsim.metrics.protocol import Metric
from tnsim.models.forward import check_inputs, is_tokens, plain_forward
from tnsim.models.model import Combination, Model, terms
from tnsim.problems import forward

Build: TypeAlias = Callable[[Any, Any], Model]
"""A function of weights and switches that gives a model; hashable, as programs are kept by it."""
MOST_NODES = 512
"""Most nodes of one integral, each a reverse gradient."""


class Family(NamedTuple):
    """Models f(s) with switches s.

    Args:
        build: Function from (weights, s) to the model f(s).
        weights: Pytree of arrays, such as two models.
        players: Number of switches.
        degree: Degree U of the outputs in t along s = (t, ..., t).
    """

    build: Build
    weights: Any
    players: int
    degree: int

    def at(self, s: Any) -> Model:
        """The model with given switches, of plain numbers."""
        return self.build(self.weights, np.broadcast_to(np.asarray(s, np.float64), self.players))


class Nodes(NamedTuple):
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1]."""

    points: Float[np.ndarray, " nodes"]
    weights: Float[np.ndarray, " nodes"]


def nodes(count: int) -> Nodes:
    """Gauss-Legendre nodes on [0, 1], exact to degree 2 count - 1.

    Raises:
        TooLarge: There are more nodes than `MOST_NODES`.

    Example:
        >>> round(float(nodes(2).weights @ nodes(2).points**3), 12)
        0.25
    """
    if count > MOST_NODES:
        raise TooLarge(
            f"an exact integral over all switches takes {count:,} gradients here, more than "
            f"{MOST_NODES:,}, as its degree grows exponentially with depth; use fewer components "
            "(within=[...])"
        )
    # From [-1, 1] to [0, 1].
    x, w = np.polynomial.legendre.leggauss(count)
    return Nodes((x + 1) / 2, w / 2)


def exact_nodes(degree: int) -> Nodes:
    """The nodes at which the derivative of a polynomial of this degree is integrated exactly."""
    # The derivative has degree U - 1, and n nodes are exact to degree 2 n - 1.
    return nodes(max(1, math.ceil(degree / 2)))


class Slope(NamedTuple):
    """The inner product `<f(s), T>` and its derivatives by switches, by groups of draws.

    Args:
        value: Inner products, (groups,).
        by_switch: Derivatives, (groups, players).
    """

    value: Float[np.ndarray, " groups"]
    by_switch: Float[np.ndarray, "groups players"]


def slope(
    family: Family, s: Any, target: Model | Combination, setting: Setting, points: Points | None
) -> Slope:
    """The derivatives of `<f(s), T>` by the switches.

    Args:
        family: Models with switches.
        s: Switches, a single number for all or (players,).
        target: Model or sum of models T.
        setting: Metric, precision and budget.
        points: Points of the comparison; None along a plan.

    Raises:
        TnsimError: A value is beyond the range of floats.
    """
    at = np.broadcast_to(np.asarray(s, np.float64), family.players)
    coefficients, models = zip(*terms(target), strict=True)
    numbers = np.asarray(coefficients, np.float64)
    with execution.precision():
        args = _placed((family.weights, at, numbers, models), setting.dtype)
        if points is None:
            # Without points there is a single group.
            found = [_program(_planned, 0, 6)(family.build, *args, setting.metric, setting.dtype)]
        else:
            found = _by_groups(_at_points, args, family, models, points, setting)
        value, by_switch = (np.asarray(x, np.float64) for x in _stacked(found))
    _check_finite(setting, value, by_switch)
    return Slope(value, by_switch)


def integral(
    family: Family,
    at: Nodes,
    target: Model | Combination,
    setting: Setting,
    points: Points | None,
) -> Float[np.ndarray, "groups players"]:
    """The inner products `<delta_c, T>` by groups of draws: derivatives summed over nodes.

    At points T runs once for all nodes, and one program goes through them.

    Args:
        family: Models with switches.
        at: Nodes, and their weights.
        target: Model or sum of models T.
        setting: Metric, precision and budget.
        points: Points of the comparison; None along a plan.

    Raises:
        TnsimError: A value is beyond the range of floats.
    """
    if points is None:
        slopes = (slope(family, t, target, setting, None).by_switch for t in at.points)
        return np.sum([w * one for w, one in zip(at.weights, slopes, strict=True)], axis=0)
    coefficients, models = zip(*terms(target), strict=True)
    numbers = np.asarray(coefficients, np.float64)
    with execution.precision():
        args = (family.weights, (*at, np.ones(family.players)), numbers, models)
        args = _placed(args, setting.dtype)
        found = _by_groups(_integral_at_points, args, family, models, points, setting)
        by_switch = np.asarray(_stacked(found), np.float64)
    _check_finite(setting, by_switch)
    return by_switch


def _by_groups(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    family: Family,
    models: Sequence[Model],
    points: Points,
    setting: Setting,
) -> list[Any]:
    """Values of a function of batches, summed over every group of draws."""
    found = []
    for batches in _batches(family, models, points, setting):
        parts = [_program(function, 0)(family.build, *args, batch) for batch in batches]
        found.append(jax.tree.map(lambda *same: sum(same), *parts))
    return found


def _check_finite(setting: Setting, *values: np.ndarray) -> None:
    if not all(np.isfinite(value).all() for value in values):
        raise TnsimError(
            f"inner products under {setting.metric.name} are beyond float64 for these weights; "
            "scale down the last layer of both models, which changes no share"
        )


@cache
def _program(function: Callable[..., Any], *static: int) -> Callable[..., Any]:
    """A function compiled once for all arrays of one shape, with these arguments static."""
    return jax.jit(function, static_argnums=static, compiler_options=compiler_options())


def _stacked(found: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *same: np.stack([np.asarray(x) for x in same]), *found)


def _placed(tree: Any, dtype: str) -> Any:
    """Weights on the device in a precision; scalars such as skips as well."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def _batches(
    family: Family, models: Sequence[Model], points: Points, setting: Setting
) -> Iterator[Iterator[WeightedPoints]]:
    """Batches of points of every group of draws, small enough for a reverse pass."""
    every = [family.at(0.5), *models]
    for model in every:
        check_inputs(model, points.block(0, 1).inputs)
    bounds = forward.groups(points)
    largest = max(stop - start for start, stop in bounds)
    # The way back keeps the states behind every layer.
    # Each model counts once for each of its layers, which is what a reverse pass keeps.
    deep = [model for model in every for _ in model.layers]
    size = forward.batch_size(deep, points, largest, setting.dtype, setting.budget)
    for start, stop in bounds:
        yield (
            _cast(batch, setting.dtype) for batch in forward.in_batches(points, start, stop, size)
        )


def _cast(batch: WeightedPoints, dtype: str) -> WeightedPoints:
    inputs = batch.inputs
    if not is_tokens(inputs):
        inputs = inputs.astype(dtype)
    return WeightedPoints(inputs, batch.log_weights)


def _at_points(
    build: Build, weights: Any, s: Any, coefficients: Any, models: Any, batch: WeightedPoints
) -> Any:
    """The value and the derivatives over some points."""
    # The target does not depend on switches and runs outside of the gradient.
    target = _vector(tuple(models), coefficients, batch)

    def product(s: Any) -> Any:
        return (_vector((build(weights, s),), jnp.ones(1), batch) * target).sum()

    return jax.value_and_grad(product)(s)


def _integral_at_points(
    build: Build, weights: Any, at: Any, coefficients: Any, models: Any, batch: WeightedPoints
) -> Any:
    """The derivatives at all nodes, weighted and summed, over some points."""
    target = _vector(tuple(models), coefficients, batch)
    where, node_weights, ones = at

    def product(s: Any) -> Any:
        return (_vector((build(weights, s),), jnp.ones(1), batch) * target).sum()

    def one(node: Any) -> Any:
        t, weight = node
        return weight * jax.grad(product)(t * ones)

    # One node after another: all at once would keep the states of all nodes.
    return jax.lax.map(one, (where, node_weights)).sum(axis=0)


def _vector(models: Sequence[Model], coefficients: Any, batch: WeightedPoints) -> Any:
    """The outputs of a sum of models at some points, times the roots of the weights.

    Outputs are plain floats: exponents of their own would cost more to compile than all the rest.
    """
    # Both factors of the inner product get the root of the weight of each point.
    roots = jnp.exp(batch.log_weights / 2)
    total: Any = 0.0
    for n, model in enumerate(models):
        found = plain_forward(model, batch.inputs)
        scaled = found * roots.astype(found.dtype).reshape(-1, *(1,) * (found.ndim - 1))
        total = total + coefficients[n] * scaled
    return total


def _planned(
    build: Build, weights: Any, s: Any, coefficients: Any, models: Any, metric: Metric, dtype: str
) -> Any:
    """The value and the derivatives along a plan."""
    target = Combination([(coefficients[n], model) for n, model in enumerate(models)])

    def product(s: Any) -> Any:
        return inner(build(weights, s), target, metric, dtype=dtype)

    return jax.value_and_grad(product)(s)


def gram_of_parts(family: Family, setting: Setting, points: Points | None) -> np.ndarray:
    """The inner products `<delta_c, delta_d>` of the parts of all components.

    Args:
        family: Models with switches.
        setting: Metric, precision and budget.
        points: Points of the comparison; None along a plan.

    Returns:
        A float64 matrix (players, players).
    """
    at = exact_nodes(family.degree)
    total = np.zeros((family.players, family.players))
    with execution.precision():
        weights = _placed(family.weights, setting.dtype)
        if points is None:
            # <delta_c, delta_d> is a double integral over t and t', and its integrand at (t', t) is
            # the transpose of that at (t, t'): each pair of nodes is computed once.
            for (t, u), (x, y) in _pairs(at):
                s, r = (jnp.full(family.players, z, setting.dtype) for z in (t, x))
                mixed = _program(_mixed_derivatives, 0, 5)(
                    family.build, weights, s, r, setting.metric, setting.dtype
                )
                both = np.asarray(mixed, np.float64)
                total += u * y * (both if t == x else both + both.T)
            return total
        parts, ones = _program(_parts_at_points, 0), jnp.ones(family.players, setting.dtype)
        where = jnp.asarray(at.points, setting.dtype), jnp.asarray(at.weights, setting.dtype)
        for batches in _batches(family, (), points, setting):
            for batch in batches:
                total += np.asarray(parts(family.build, weights, where, ones, batch))
    return total


def _pairs(at: Nodes) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """All pairs of nodes (node, weight), each pair once."""
    every = list(zip(at.points, at.weights, strict=True))
    for n, first in enumerate(every):
        for second in every[: n + 1]:
            yield first, second


def _mixed_derivatives(
    build: Build, weights: Any, s: Any, r: Any, metric: Metric, dtype: str
) -> Any:
    """The inner products of derivatives of f at s with derivatives at r."""

    def product(s: Any, r: Any) -> Any:
        return inner(build(weights, s), build(weights, r), metric, dtype=dtype)

    return jax.jacfwd(jax.grad(product, argnums=0), argnums=1)(s, r)


def _parts_at_points(
    build: Build, weights: Any, where: Any, ones: Any, batch: WeightedPoints
) -> Any:
    """The Gram matrix of the parts over some points."""

    def vector(s: Any) -> Any:
        return _vector((build(weights, s),), jnp.ones(1), batch)

    def one(node: Any) -> Any:
        t, weight = node
        return weight * jax.jacfwd(vector)(t * ones)

    parts = jax.lax.map(one, where).sum(axis=0)
    # (points and outputs, players): the Gram matrix of the columns.
    flat = parts.reshape(-1, parts.shape[-1])
    return flat.T @ flat
