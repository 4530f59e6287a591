"""Inner products over a finite measure inside a JAX trace. In: models, points. Out: products.

As `forward`, in terms of JAX alone: points are constants, and batches of them are unrolled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from tnsim.engine.log_scaled import LogScaled, add, contribution, times
from tnsim.folding.forward import Part, Terms, batch_size, in_batches, vector_of, vector_of_model
from tnsim.metrics.points import Points, Weighted
from tnsim.models.forward import check_inputs, is_tokens, scaled_layers
from tnsim.models.functions import outputs_of
from tnsim.models.model import Model


def inner_product(rows: Terms, columns: Terms, points: Points, per_output: bool) -> LogScaled:
    """`<a|b>` of two sums of models, in the precision of their weights.

    Args:
        rows, columns: The sums, of models whose weights may be traced, or of functions.
        points: The measure.
        per_output: Whether outputs are told apart.

    Returns:
        One inner product, () or (out,).

    Raises:
        ModelError: The models do not read these inputs.
    """
    size = batch_size((part for _, part in (*rows, *columns)), points)
    return over_batches(rows, columns, in_batches(points, 0, points.count, size), per_output)


def over_batches(
    rows: Terms, columns: Terms, batches: Iterable[Weighted], per_output: bool
) -> LogScaled:
    """The same at points that are there, and may be traced too.

    Args:
        rows, columns: As for `inner_product`.
        batches: All points, some at a time.
        per_output: Whether outputs are told apart.

    Returns:
        One inner product, () or (out,).
    """
    parts = {id(part): part for _, part in (*rows, *columns)}
    products = []
    for batch in batches:
        vectors = {key: _vector(part, batch, per_output) for key, part in parts.items()}
        for (c, a), (d, b) in itertools.product(rows, columns):
            (first, first_log), (second, second_log) = vectors[id(a)], vectors[id(b)]
            mantissa = (first * second).sum(axis=1)
            log = first_log + second_log
            if not per_output:
                mantissa, log = mantissa.sum(), log[0]
            products.append(times(contribution(mantissa, log), c * d))
    return add(products)


def _vector(part: Part, batch: Weighted, per_output: bool) -> tuple[Any, Any]:
    """Values (out, features) of a model at some points, and their logarithms."""
    inputs, half_logs = batch.inputs, batch.log_weights / 2
    if not isinstance(part, Model):
        outputs = outputs_of(part, inputs)
        exponents = jnp.zeros((len(outputs), outputs.shape[-1] if per_output else 1))
        return vector_of(jnp.asarray(outputs), exponents, half_logs)[:2]
    check_inputs(part, inputs)
    dtype = jnp.result_type(*(x for x in jax.tree.leaves(part) if jnp.ndim(x)))
    if not is_tokens(inputs):
        inputs = inputs.astype(dtype)
    layers = jax.tree.map(jnp.asarray, scaled_layers(part, per_output))
    return vector_of_model(layers, jax.tree.map(jnp.asarray, inputs), half_logs)[:2]
