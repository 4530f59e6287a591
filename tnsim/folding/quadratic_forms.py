"""Models of at most one nonlinear layer as quadratic forms, and forms as vectors.

In: arrays of lifted layers. Out: forms, whose features have inner products for dot products.

With x~ = T z~, a layer of two legs L, R and output D is in z~ the form

    form[o,i,j] = sum_h D[o,h] (L T)[h,i] (R T)[h,j],

and a skip around it adds `(copy[o,i] skip[j] + skip[i] copy[o,j]) / 2`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.folding.feature_space import Space
from tnsim.metrics.input_moments import input_moments
from tnsim.metrics.metric import Metric
from tnsim.names import DOWN, SKIP, WEIGHT


def form_of(layers: list[dict[str, Any]], root: Any, lifted: bool) -> Float[jax.Array, "out ..."]:
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


def chaos_features(form: Any, space: Space) -> Float[jax.Array, "out features"]:
    if form.ndim == 2:
        return jnp.pad(form, ((0, 0), (0, space.length - form.shape[1])))
    form = (form + jnp.swapaxes(form, 1, 2)) / 2
    body = form[:, 1:, 1:] if space.lifted else form
    mean = jnp.trace(body, axis1=1, axis2=2)[:, None]
    parts = [mean + form[:, :1, 0], 2 * form[:, 0, 1:]] if space.lifted else [mean]
    return jnp.concatenate([*parts, math.sqrt(2) * _half(body)], axis=1)


def entry_features(form: Any, space: Space) -> Float[jax.Array, "out features"]:
    if form.ndim == 2 or not space.symmetric:
        return form.reshape(len(form), -1)
    return _half((form + jnp.swapaxes(form, 1, 2)) / 2)


def _half(form: Any) -> Float[jax.Array, "out features"]:
    """The upper half of symmetric matrices, weighted to keep dot products."""
    first, second = np.triu_indices(form.shape[-1])
    return form[:, first, second] * np.where(first == second, 1.0, math.sqrt(2)).astype(form.dtype)


def _times(weight: Any, root: Any) -> Any:
    """`weight @ root`, where a root may be the diagonal of one or None for the identity."""
    if root is None:
        return weight
    return weight * root if root.ndim == 1 else weight @ root


def root_of(metric: Metric, space: Space) -> np.ndarray | None:
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
