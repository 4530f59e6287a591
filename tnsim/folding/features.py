"""Models as vectors whose dot products are inner products.

In: models, a space that holds them (`feature_space`). Out: blocks of features.

The work per model is done once, and K x K inner products are one matrix product. A space whose
vectors are long is a sum of parts, made one at a time: inner products are sums over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.engine import execution
from tnsim.engine.devices import BY_MODEL, mesh, replicated, spread
from tnsim.engine.log_scaled import LogScaled, add, taken, total
from tnsim.folding.conditioning import cancellations
from tnsim.folding.feature_space import FeatureSpace, fits, spaces
from tnsim.folding.state_sizes import in_common_units
from tnsim.metrics.metric import Metric
from tnsim.models.model import Model
from tnsim.models.scaling import SMALLEST, split
from tnsim.tensors.kinds import Kinds, kinds


class Block(NamedTuple):
    """Features of some models: `values * exp(log)`, each model's largest value about one.

    Args:
        values: The vectors, output by output.
        log: Logarithms of their scales, of whole models or of every output.
        norms: Lengths of `values`, output by output.
        sizes: Sums of the lengths of the terms, larger than `norms` by what cancels within a model
            (see `conditioning`) and between the terms of a combination.
    """

    values: Float[jax.Array, "models out features"]
    log: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"]
    norms: Float[np.ndarray, "models out"]
    sizes: Float[np.ndarray, "models out"]

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors."""
        return self.values.nbytes


def compared(
    one: Sequence[tuple[Any, Model]],
    two: Sequence[tuple[Any, Model]],
    metric: Metric,
    per_output: bool,
    dtype: str,
) -> dict[str, LogScaled] | None:
    """`<a|b>`, `<a|a>` and `<b|b>` of two combinations by their vectors, as `AB`, `AA` and `BB`.

    Args:
        one, two: Coefficients and models of each.
        metric: Any.
        per_output: Whether outputs are told apart.
        dtype: Precision of the computation.

    Returns:
        Inner products, (out,) or (). None where the models have no vectors or such as do not fit.
    """
    models = list({id(model): model for _, model in (*one, *two)}.values())
    several = spaces([kinds(model) for model in models], metric, models[0].n_ctx)
    common = next((space for space in several if fits(space)), None)
    if common is None:
        return None
    number = {id(model): n for n, model in enumerate(models)}
    weights = np.zeros((2, len(models)))
    for row, weighted in zip(weights, (one, two), strict=True):
        for coefficient, model in weighted:
            row[number[id(model)]] += coefficient
    parts = in_common_units(models, metric, per_output)
    exponents = np.array([part.exponent for part in parts])
    models = [part.model for part in parts]
    blocks = [block(models, exponents, weights, part, metric, dtype) for part in common.parts]
    cross = add([products(both, both, per_output) for both in blocks])
    squares = add([norms(both, per_output) for both in blocks])
    return {
        "AB": taken(cross, (0, 1)),
        "AA": taken(squares, 0),
        "BB": taken(squares, 1),
    }


def block(
    models: Sequence[Model],
    exponents: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"],
    weights: Float[np.ndarray, "rows models"] | None,
    space: FeatureSpace,
    metric: Metric,
    dtype: str,
) -> Block:
    """Features of `2 ** exponents * models`, or of combinations of these.

    Args:
        models: Any that the space holds.
        exponents: Of whole models, or of every output.
        weights: Coefficients of the combinations, one a row; None for the models themselves.
        space: Which numbers a vector holds.
        metric: Whose inner products dot products are.
        dtype: Precision of the computation.
    """
    with execution.precision():
        values, log = _of_models(models, space, metric, dtype)
        if exponents.ndim == 2:  # of every output
            log = log[:, None]
        lengths = _lengths(values)
        is_zero = lengths == 0 if exponents.ndim == 2 else (lengths == 0).all(axis=1)
        log = np.where(is_zero, SMALLEST, log + exponents * np.log(2))
        # A vector is off by the root of what its square is off by.
        factors = np.sqrt(cancellations(models, metric))
        single = Block(values, log, lengths, factors[:, None] * lengths)
        return single if weights is None else _combined(single, weights, dtype)


def _combined(single: Block, weights: Float[np.ndarray, "rows models"], dtype: str) -> Block:
    """Features of combinations of models, from those of the models."""
    # A row is a sum of w_m exp(log_m) v_m. Its largest factor is taken out as exp(scale), and every
    # coefficient is split into a mantissa and a power of two, so that no factor leaves the range of
    # a float before its logarithm is taken.
    by_output = single.log.ndim == 2
    mantissas, powers = split(weights[:, :, None] if by_output else weights)
    logs = powers * np.log(2) + single.log
    scale = logs.max(axis=1)
    factors = mantissas * np.exp(logs - scale[:, None])
    sizes = (np.abs(factors).reshape(*weights.shape, -1) * single.sizes).sum(axis=1)
    sums = "kmo,mof->kof" if by_output else "km,mof->kof"
    values = jnp.einsum(sums, jnp.asarray(factors, dtype), single.values)
    return Block(values, scale, _lengths(values), sizes)


def norms(block: Block, per_output: bool) -> LogScaled:
    """Squared norms of the models of a block.

    With lengths N and sizes S, a vector is off by about eps S and its squared norm by
    (N + eps S)^2 - N^2 ~ 2 eps N S: what cancels costs a difference of vectors half the digits that
    it costs a difference of products.
    """
    eps = float(np.finfo(block.values.dtype).eps)
    size = (block.norms + eps * block.sizes) * block.sizes
    squares = LogScaled(block.norms**2, 2 * block.log, size)
    return squares if per_output else total(squares, per_output=True)


def products(rows: Block, columns: Block, per_output: bool) -> LogScaled:
    """Inner products of every row with every column.

    The error of a dot product is about eps (|a| S_b + S_a |b|) / 2 with lengths |a|, |b| and the
    sizes S of what the vectors are sums of; the size of the product is chosen accordingly.

    Returns:
        (rows, columns), and (rows, columns, out) where outputs are told apart.
    """
    with execution.precision():
        gram = _gram(spread(rows.values), replicated(columns.values), per_output)
    mantissa = np.asarray(gram, np.float64)[: len(rows.log)]
    equation = "ko,lo->klo" if per_output else "ko,lo->kl"
    size = np.einsum(equation, rows.norms, columns.sizes)
    size += np.einsum(equation, rows.sizes, columns.norms)
    return LogScaled(mantissa, rows.log[:, None] + columns.log[None, :], size / 2)


def _lengths(values: Any) -> Float[np.ndarray, "models out"]:
    return np.sqrt(np.asarray(_squares(values), np.float64))


@jax.jit
def _squares(values: Any) -> Float[jax.Array, "models out"]:
    """Squared norms; compiled, so that no second array of all features is made."""
    return jnp.sum(values * values, axis=2)


@partial(jax.jit, static_argnames="per_output")
def _gram(rows: Any, columns: Any, per_output: bool) -> Any:
    if per_output:
        return jnp.einsum("kof,lof->klo", rows, columns)
    return rows.reshape(len(rows), -1) @ columns.reshape(len(columns), -1).T


def _of_models(
    models: Sequence[Model], space: FeatureSpace, metric: Metric, dtype: str
) -> tuple[Any, np.ndarray]:
    """Features of all models, and the logarithms of their scales.

    Models of equal layers are stacked and go through one compiled program.
    """
    inputs = space.inputs(metric, dtype)
    groups: dict[Kinds, list[int]] = {}
    for n, model in enumerate(models):
        groups.setdefault(kinds(model), []).append(n)
    order, blocks, scales = [], [], []
    for members in groups.values():
        weights = [space.weights(models[n]) for n in members]
        stack = jax.tree.map(lambda *x: np.stack(x, dtype=dtype), *weights)
        values, scale = _features(spread(stack), inputs, space)
        order += members
        if len(values) > len(members):  # repeated to fill the devices
            values = values[: len(members)]
        blocks.append(values)
        scales.append(np.asarray(scale[: len(members)], np.float64))
    back = np.argsort(order)
    values = blocks[0]
    if len(blocks) > 1:  # one group is in order already, and copying it takes memory
        values = jnp.concatenate(blocks)[back]
    return values, np.log(np.concatenate(scales)[back])


@partial(jax.jit, static_argnames="space")
def _features(stack: Any, inputs: Any, space: FeatureSpace) -> tuple[Any, Any]:
    """Features (models, out, features) of stacked weights, and their scales (models,).

    Args:
        stack: What the space reads of a model, with a first axis of models.
        inputs: What it reads besides.
        space: Which numbers a vector holds.
    """

    def one(weights: Any) -> tuple[Any, Any]:
        values = space.vector(weights, inputs)
        largest = jnp.abs(values).max()
        scale = jnp.where(largest > 0, largest, 1.0)
        return values / scale, scale

    each = jax.shard_map(
        lambda part: jax.lax.map(one, part, batch_size=space.at_once),
        mesh=mesh(),
        in_specs=BY_MODEL,
        out_specs=BY_MODEL,
    )
    return each(stack)
