"""Models as vectors whose dot products are inner products.

In: models of at most one nonlinear layer. Out: blocks of features.

Such a model is a quadratic polynomial, and its inner product with any other depends on few
numbers. Under a Gaussian x = m + C^(1/2) z these are the coefficients of its Hermite (chaos)
expansion in z,

    f(x) = z'Hz + 2 g'z + c,      phi = (c + tr H, 2 g, sqrt(2) H),      E<A(x), B(x)> = phi_A .
    phi_B,

which holds biases, skips, linear layers around, mean and covariance (possibly singular) exactly.
Under the other metrics they are the entries of the lifted tensor, symmetrised for `TreeSymmetric`
and `Symmetric`. A symmetric matrix is stored as its upper half, entries off the diagonal times
sqrt(2). The work per model is then done once, and K x K inner products are one matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.engine import execution
from tnsim.engine.devices import BY_MODEL, mesh, replicated, spread
from tnsim.engine.log_scaled import LogScaled, total
from tnsim.metrics.input_moments import input_moments
from tnsim.metrics.metric import Categorical, Frobenius, Metric
from tnsim.models.model import Model
from tnsim.models.scaling import scaled, split
from tnsim.names import DOWN, SKIP, WEIGHT
from tnsim.tensors.kinds import LayerKind, kinds
from tnsim.tensors.lifted import arrays

_LARGEST = 2**24  # numbers in a vector of a combination, 128 MiB
_AT_ONCE = 4  # models whose quadratic forms are in flight at the same time


class Space(NamedTuple):
    """Which numbers a feature vector holds; one space for all models of a run. Hashable."""

    d_in: int
    d_out: int
    quadratic: bool
    lifted: bool
    gaussian: bool
    symmetric: bool

    @property
    def length(self) -> int:
        """Numbers per output."""
        d = self.d_in + (self.lifted and not self.gaussian)
        square = d * (d + 1) // 2 if self.symmetric else d * d
        if not self.gaussian:
            return square if self.quadratic else d
        return 1 + self.lifted * d + square if self.quadratic else self.lifted + d

    def multiplications(self, layers: tuple[LayerKind, ...]) -> int:
        """Scalar multiplications that the features of one model take.

        Products of single layers are left out as small.
        """
        width = self.d_in + self.lifted
        rank = max((k.rank for k in layers if k.order > 1), default=1)
        return self.d_out * rank * width * (width if self.quadratic else 1)

    def in_flight(self, layers: tuple[LayerKind, ...], models: int) -> int:
        """Elements of intermediates while features of some models are made.

        A form (out, D, D) beside its contraction over hidden units, or beside its symmetrised
        copy and half of another (measured); where the models are no multiple of those in flight,
        all features once more.
        """
        if not self.quadratic:
            return 0
        width = self.d_in + self.lifted
        rank = max((k.rank for k in layers if k.order == 2), default=1)
        form = width * width
        once = self.d_out * (form + max(3 * form // 2, rank * width))
        uneven = models > _AT_ONCE and models % _AT_ONCE > 0
        return min(models, _AT_ONCE) * once + uneven * models * self.length * self.d_out


class Block(NamedTuple):
    """Features of some models: `values * exp(log)`, each model's largest value about one.

    `log` may differ by output. Per output, `norms` are the lengths of these vectors and `sizes` the
    sums of the lengths of the terms, the same unless the model is a combination.
    """

    values: Float[jax.Array, "models out features"]
    log: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"]
    norms: Float[np.ndarray, "models out"]
    sizes: Float[np.ndarray, "models out"]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


def space(
    models: Sequence[tuple[LayerKind, ...]], metric: Metric, sequences: bool = False
) -> Space | None:
    """The space that holds all models of these layers, None where one of them is no quadratic
    polynomial.
    """
    flat = [k for layers in models for k in layers]
    if isinstance(metric, Categorical) or sequences:
        return None
    bilinear = {sum(k.order > 1 for k in layers) for layers in models}
    if max(bilinear) > 1 or any(k.order > 2 for k in flat):
        return None
    odd_and_even = len(bilinear) > 1
    lifted = (
        any(k.constant for k in flat) or getattr(metric, "mean", None) is not None or odd_and_even
    )
    symmetric = not isinstance(metric, Frobenius)
    return Space(
        models[0][0].d_in,
        models[0][-1].d_out,
        max(bilinear) == 1,
        lifted,
        metric.pairs_within_model,
        symmetric,
    )


def fits(space: Space | None) -> bool:
    """Whether combinations may be compared as vectors, which lose fewer digits than products."""
    return space is not None and space.length * space.d_out <= _LARGEST


def compared(
    one: Sequence[tuple[Any, Model]],
    two: Sequence[tuple[Any, Model]],
    metric: Metric,
    per_output: bool,
    dtype: str,
) -> dict[str, LogScaled] | None:
    """`<a|b>`, `<a|a>` and `<b|b>` of two combinations by their vectors, as `AB`, `AA` and `BB`.

    Args:
        one, two: coefficients and models of each.
        metric: any.
        per_output: whether outputs are told apart.
        dtype: precision of the computation.

    Returns:
        Inner products, or None where the models have no vectors or such as do not fit.
    """
    models = list({id(model): model for _, model in (*one, *two)}.values())
    common = space([kinds(model) for model in models], metric)
    if common is None or not fits(common):
        return None
    number = {id(model): n for n, model in enumerate(models)}
    weights = np.zeros((2, len(models)))
    for row, weighted in zip(weights, (one, two), strict=True):
        for coefficient, model in weighted:
            row[number[id(model)]] += coefficient
    parts = [scaled(model, per_output) for model in models]
    exponents = np.array([part.exponent for part in parts])
    models = [part.model for part in parts]
    both = block(models, exponents, weights, common, metric, dtype)
    cross, squares = products(both, both, per_output), norms(both, per_output)
    return {
        "AB": LogScaled(*(x[0, 1] for x in cross)),
        "AA": LogScaled(*(x[0] for x in squares)),
        "BB": LogScaled(*(x[1] for x in squares)),
    }


def block(
    models: Sequence[Model],
    exponents: Float[np.ndarray, " models"] | Float[np.ndarray, "models out"],
    weights: Float[np.ndarray, "rows models"] | None,
    space: Space,
    metric: Metric,
    dtype: str,
) -> Block:
    """Features of `2 ** exponents * models`, or of combinations of these: the rows of `weights`."""
    with execution.precision():
        values, log = _all(models, space, metric, dtype)
        log = (log if exponents.ndim == 1 else log[:, None]) + exponents * np.log(2)
        lengths = _lengths(values)
        if weights is None:
            return Block(values, log, lengths, lengths)
        mantissas, powers = split(weights if log.ndim == 1 else weights[:, :, None])
        logs = powers * np.log(2) + log
        gauge = logs.max(axis=1)
        factors = mantissas * np.exp(logs - gauge[:, None])
        sizes = (np.abs(factors).reshape(*weights.shape, -1) * lengths).sum(axis=1)
        sums = "km,mof->kof" if log.ndim == 1 else "kmo,mof->kof"
        values = jnp.einsum(sums, jnp.asarray(factors, dtype), values)
        return Block(values, gauge, _lengths(values), sizes)


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
    """Inner products of every row with every column, (rows, columns) and with `per_output` (rows,
    columns, out).
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


def _all(
    models: Sequence[Model], space: Space, metric: Metric, dtype: str
) -> tuple[Any, np.ndarray]:
    """Features of all models, those of equal layers by one compiled program.

    And the logarithms of their scales.
    """
    root = _root(metric, space)
    root = None if root is None else jnp.asarray(root, dtype)
    groups: dict[tuple[LayerKind, ...], list[int]] = {}
    for n, model in enumerate(models):
        groups.setdefault(kinds(model), []).append(n)
    order, found, scales = [], [], []
    for members in groups.values():
        lifted = [[arrays(layer, space.lifted) for layer in models[n].layers] for n in members]
        stack = jax.tree.map(lambda *x: np.stack(x, dtype=dtype), *lifted)
        values, scale = _features(spread(stack), root, space)
        order += members
        found.append(values if len(values) == len(members) else values[: len(members)])
        scales.append(np.asarray(scale[: len(members)], np.float64))
    values = jnp.concatenate(found)[np.argsort(order)] if len(found) > 1 else found[0]
    return values, np.log(np.concatenate(scales)[np.argsort(order)])


@partial(jax.jit, static_argnames="space")
def _features(stack: list[dict[str, Any]], root: Any, space: Space) -> tuple[Any, Any]:
    """Features (models, out, features) of weights stacked along a first axis of models, and their
    scales (models,).
    """

    def one(layers: list[dict[str, Any]]) -> tuple[Any, Any]:
        form = _form(layers, root, space.lifted)
        values = _chaos(form, space) if space.gaussian else _entries(form, space)
        largest = jnp.abs(values).max()
        scale = jnp.where(largest > 0, largest, 1.0)
        return values / scale, scale

    each = jax.shard_map(
        lambda part: jax.lax.map(one, part, batch_size=_AT_ONCE),
        mesh=mesh(),
        in_specs=BY_MODEL,
        out_specs=BY_MODEL,
    )
    return each(stack)


def _form(layers: list[dict[str, Any]], root: Any, lifted: bool) -> Float[jax.Array, "out ..."]:
    """The whole model as one linear map (out, D) or quadratic form (out, D, D) in the inputs that
    `root` multiplies.
    """
    at = next((n for n, layer in enumerate(layers) if WEIGHT not in layer), len(layers))
    before, after = root, None
    for layer in layers[:at]:
        before = _times(layer[WEIGHT], before)
    for layer in layers[at + 1 :]:
        after = layer[WEIGHT] if after is None else layer[WEIGHT] @ after
    if at == len(layers):
        return before[int(lifted) :]
    core = layers[at]
    legs = [core[role] for role in sorted(core) if role not in (DOWN, SKIP)]
    left, right = (_times(leg, before) for leg in legs)
    down = core[DOWN] if after is None else after @ core[DOWN]
    form = jnp.einsum("oh,hi,hj->oij", down[int(lifted) :], left, right)
    if SKIP in core:
        copy = jnp.eye(core[SKIP].shape[0], dtype=form.dtype) if after is None else after
        copy, skip = _times(copy[int(lifted) :], before), _times(core[SKIP], before)
        form = form + 0.5 * (copy[:, :, None] * skip + skip[:, None] * copy[:, None, :])
    return form


def _chaos(form: Any, space: Space) -> Float[jax.Array, "out features"]:
    if form.ndim == 2:
        return jnp.pad(form, ((0, 0), (0, space.length - form.shape[1])))
    form = (form + jnp.swapaxes(form, 1, 2)) / 2
    body = form[:, 1:, 1:] if space.lifted else form
    mean = jnp.trace(body, axis1=1, axis2=2)[:, None]
    parts = [mean + form[:, :1, 0], 2 * form[:, 0, 1:]] if space.lifted else [mean]
    return jnp.concatenate([*parts, math.sqrt(2) * _half(body)], axis=1)


def _entries(form: Any, space: Space) -> Float[jax.Array, "out features"]:
    if form.ndim == 2 or not space.symmetric:
        return form.reshape(len(form), -1)
    return _half((form + jnp.swapaxes(form, 1, 2)) / 2)


def _half(form: Any) -> Float[jax.Array, "out features"]:
    """The upper half of symmetric matrices, weighted so that dot products stay those of all."""
    first, second = np.triu_indices(form.shape[-1])
    return form[:, first, second] * np.where(first == second, 1.0, math.sqrt(2)).astype(form.dtype)


def _times(weight: Any, root: Any) -> Any:
    """`weight @ root`, where a root may be the diagonal of one or None for the identity."""
    if root is None:
        return weight
    return weight * root if root.ndim == 1 else weight @ root


def _root(metric: Metric, space: Space) -> np.ndarray | None:
    """T with x~ = T z~ for the (lifted) standard normal z.

    (D, D), the diagonal (D,) of one, or None for the identity.
    """
    input_moments(
        metric, space.d_in, space.lifted
    )  # refuses a metric for another number of coordinates
    mean, cov = (
        None if x is None else np.asarray(x, np.float64)
        for x in (getattr(metric, "mean", None), getattr(metric, "cov", None))
    )
    if mean is None and cov is None:
        return None
    root = (
        np.ones(space.d_in)
        if cov is None
        else np.sqrt(np.maximum(cov, 0.0))
        if cov.ndim == 1
        else _square_root(cov)
    )
    if not space.lifted:
        return root
    if mean is None and root.ndim == 1:
        return np.concatenate([[1.0], root])
    lifted = np.eye(space.d_in + 1)
    lifted[1:, 0], lifted[1:, 1:] = (
        0.0 if mean is None else mean,
        np.diag(root) if root.ndim == 1 else root,
    )
    return lifted


def _square_root(cov: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    values, vectors = np.linalg.eigh((cov + cov.T) / 2)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
