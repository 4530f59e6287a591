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
    """A whole model as one linear map or quadratic form in z~, where x~ = T z~.

    Args:
        layers: Arrays of every layer by role, from the input up; one of them may be nonlinear.
        root: T, as `root_of` gives it.
        lifted: Whether the constant is coordinate 0 of every bond.

    Returns:
        (out, D) or (out, D, D), not symmetrised. The constant row of the output is left out.
    """
    at = next((n for n, layer in enumerate(layers) if WEIGHT not in layer), len(layers))
    before, after = root, None
    for layer in layers[:at]:
        before = _times(layer[WEIGHT], before)
    if at == len(layers):
        return before[int(lifted) :]
    for layer in layers[at + 1 :]:
        after = layer[WEIGHT] if after is None else layer[WEIGHT] @ after

    core = layers[at]
    left, right = (_times(core[role], before) for role in sorted(core) if role not in (DOWN, SKIP))
    down = core[DOWN] if after is None else after @ core[DOWN]
    form = jnp.einsum("oh,hi,hj->oij", down[int(lifted) :], left, right)
    if SKIP in core:
        # `core[SKIP] @ x~` is the skip's weight times the constant coordinate. Its product with x~
        # is a layer of two legs like the core, its form the mean of x~ (x) 1 and 1 (x) x~.
        copy = jnp.eye(core[SKIP].shape[0], dtype=form.dtype) if after is None else after
        copy, one = _times(copy[int(lifted) :], before), _times(core[SKIP], before)
        form = form + 0.5 * (copy[:, :, None] * one + one[:, None] * copy[:, None, :])
    return form


def chaos_features(
    form: Float[jax.Array, "out ..."], space: Space
) -> Float[jax.Array, "out features"]:
    """The Hermite coefficients of a form: orthogonal under z ~ N(0, 1), so dot products are exact.

    With the constant z_0 = 1 apart, z~' F z~ = z'Hz + 2 g'z + c. In Hermite polynomials,
    z_i z_j = He_ij(z) + delta_ij, so the constant part is c + tr H and the quadratic one H itself.
    Their squared norms are E[(z_i)^2] = 1 and E[(sum_ij H_ij He_ij)^2] = 2 sum_ij H_ij^2, whence
    the factor sqrt(2).
    """
    if form.ndim == 2:  # linear: (c, g), and nothing beyond
        return jnp.pad(form, ((0, 0), (0, space.length - form.shape[1])))
    form = _symmetrised(form)
    body = form[:, 1:, 1:] if space.lifted else form
    mean = jnp.trace(body, axis1=1, axis2=2)[:, None]
    parts = [mean]
    if space.lifted:
        parts = [mean + form[:, :1, 0], 2 * form[:, 0, 1:]]
    return jnp.concatenate([*parts, math.sqrt(2) * _half(body)], axis=1)


def entry_features(
    form: Float[jax.Array, "out ..."], space: Space
) -> Float[jax.Array, "out features"]:
    """The entries of a tensor, of a symmetrised one its upper half."""
    if form.ndim == 2 or not space.symmetric:
        return form.reshape(len(form), -1)
    return _half(_symmetrised(form))


def _symmetrised(form: Float[jax.Array, "out D D"]) -> Float[jax.Array, "out D D"]:
    return (form + jnp.swapaxes(form, 1, 2)) / 2


def _half(form: Float[jax.Array, "out D D"]) -> Float[jax.Array, "out half"]:
    """The upper half of symmetric matrices.

    An entry off the diagonal stands for two, so it is weighted by sqrt(2) to keep dot products.
    """
    first, second = np.triu_indices(form.shape[-1])
    return form[:, first, second] * np.where(first == second, 1.0, math.sqrt(2)).astype(form.dtype)


def _times(weight: Any, root: Any) -> Any:
    """`weight @ root`, where a root may be the diagonal of one or None for the identity."""
    if root is None:
        return weight
    return weight * root if root.ndim == 1 else weight @ root


def root_of(metric: Metric, space: Space) -> np.ndarray | None:
    """T with x~ = T z~, for z standard normal with the constant before it if it is lifted.

    Args:
        metric: Its mean m and covariance C are used, zero and the identity if it has none.
        space: Whether the constant is there, and how many coordinates inputs have.

    Returns:
        With R R' = C, T = R, or lifted T = ((1, 0), (m, R)). (D, D), the diagonal (D,) of such a
        matrix, or None for the identity.

    Raises:
        ModelError: The metric is for another number of coordinates.
    """
    input_moments(metric, space.d_in, space.lifted)  # raises
    mean, cov = getattr(metric, "mean", None), getattr(metric, "cov", None)
    if mean is None and cov is None:
        return None
    root = np.ones(space.d_in) if cov is None else _square_root(np.asarray(cov, np.float64))
    if not space.lifted:
        return root
    if mean is None and root.ndim == 1:
        return np.concatenate([[1.0], root])
    lifted = np.eye(space.d_in + 1)
    lifted[1:, 0] = 0.0 if mean is None else np.asarray(mean, np.float64)
    lifted[1:, 1:] = np.diag(root) if root.ndim == 1 else root
    return lifted


def _square_root(
    cov: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"],
) -> Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]:
    """R with R R' = C, of a diagonal its diagonal.

    By eigenvalues and not by Cholesky: C may be singular, and an eigenvalue of 0 be rounded below.
    """
    if cov.ndim == 1:
        return np.sqrt(np.maximum(cov, 0.0))
    values, vectors = np.linalg.eigh((cov + cov.T) / 2)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
