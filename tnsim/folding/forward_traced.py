"""Inner products over a finite measure inside a JAX trace. In: models, points. Out: products.

As `forward`, in terms of JAX alone: points are constants, and batches of them are unrolled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp

from tnsim.engine.budget import Budget
from tnsim.engine.log_scaled import LogScaled, add, contribution, times
from tnsim.folding.forward import (
    Part,
    Run,
    Terms,
    Vector,
    batch_size,
    in_batches,
    vector_of,
    vector_of_model,
)
from tnsim.metrics.points import Points, Weighted
from tnsim.models.forward import ScaledLayers, check_inputs, is_tokens, scaled_layers
from tnsim.models.functions import Function, outputs_of
from tnsim.models.model import Model


def inner_product(
    rows: Terms, columns: Terms, points: Points, per_output: bool, dtype: str
) -> LogScaled:
    """`<a|b>` of two sums of models, in the precision of their weights.

    Args:
        rows, columns: The sums, of models whose weights may be traced, or of functions.
        points: The measure.
        per_output: Whether outputs are told apart.
        dtype: Precision of the forward passes, for their memory.

    Returns:
        One inner product, () or (out,).

    Raises:
        ModelError: The models do not read these inputs.
        TooLarge: One point takes more than the free memory. Batches follow no smaller budget: each
            becomes part of the caller's program.
    """
    known = [part for _, part in (*rows, *columns)]
    size = batch_size(known, points, points.count, dtype, Budget())
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
    runs = {key: _run(part, per_output) for key, part in parts.items()}
    products = []
    for batch in batches:
        vectors = {key: run(batch) for key, run in runs.items()}
        for (c, a), (d, b) in itertools.product(rows, columns):
            first, second = vectors[id(a)], vectors[id(b)]
            mantissa = (first.values * second.values).sum(axis=1)
            log = first.log + second.log
            if not per_output:
                mantissa, log = mantissa.sum(), log[0]
            products.append(times(contribution(mantissa, log), c * d))
    return add(products)


def _run(part: Part, per_output: bool) -> Run:
    """What gives the vector of a part on a batch."""
    if not isinstance(part, Model):
        return partial(_of_function, part, per_output)
    layers = jax.tree.map(jnp.asarray, scaled_layers(part, per_output))
    return partial(_of_model, part, layers)


def _of_function(function: Function, per_output: bool, batch: Weighted) -> Vector:
    outputs = outputs_of(function, batch.inputs)
    exponents = jnp.zeros((len(outputs), outputs.shape[-1] if per_output else 1))
    return vector_of(jnp.asarray(outputs), exponents, batch.log_weights / 2)


def _of_model(model: Model, layers: ScaledLayers, batch: Weighted) -> Vector:
    inputs = batch.inputs
    check_inputs(model, inputs)
    if not is_tokens(inputs):
        weights = (leaf for leaf in jax.tree.leaves(model) if jnp.ndim(leaf))
        inputs = inputs.astype(jnp.result_type(*weights))
    inputs = jax.tree.map(jnp.asarray, inputs)
    return vector_of_model(layers, inputs, batch.log_weights / 2)
