"""Lists of four numbers, and where the second largest stands. In: keys. Out: inputs, labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

N = 4
COVARIANCE = np.array(
    [
        [1.0, 0.8, 0.3, 0.1],
        [0.8, 1.0, 0.5, 0.2],
        [0.3, 0.5, 1.0, 0.7],
        [0.1, 0.2, 0.7, 1.0],
    ]
)
"""The paper has "a fixed positive-definite correlation matrix" and does not print it."""


def second_argmax(inputs: Float[Array, "count 4"]) -> Int[Array, " count"]:
    """The index of the second largest number; of equal ones the first counts as larger.

    Example:
        >>> second_argmax(jnp.array([[-0.54, -0.19, 0.17, -10.0]])).tolist()
        [1]
    """
    largest = inputs.argmax(1, keepdims=True)
    others = jnp.where(jnp.arange(N) == largest, -jnp.inf, inputs)
    return others.argmax(1)


def gaussian(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Standard normal."""
    return jax.random.normal(key, (count, N))


def half_gaussian(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Absolute values of standard normal numbers."""
    return jnp.abs(gaussian(key, count))


def bimodal(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Around -1 or 1, with a standard deviation of 0.3."""
    for_mode, for_noise = jax.random.split(key)
    mode = jax.random.rademacher(for_mode, (count, N), float)
    return mode + 0.3 * gaussian(for_noise, count)


def uniform(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Between -1 and 1."""
    return jax.random.uniform(key, (count, N), minval=-1.0, maxval=1.0)


def laplace(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Of scale 1 / sqrt 2, so of variance 1."""
    return jax.random.laplace(key, (count, N)) / np.sqrt(2)


def spikes(key: jax.Array, count: int, mean: float = 0.0) -> Float[Array, "count 4"]:
    """Zero, or once in four times normal of variance 4, with mean 0 as in the authors' code."""
    for_place, for_size = jax.random.split(key)
    here = jax.random.bernoulli(for_place, 0.25, (count, N))
    return jnp.where(here, mean + 2 * gaussian(for_size, count), 0.0)


def spikes_text(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Sparse spikes of mean 1, as the paper's text has them."""
    return spikes(key, count, mean=1.0)


def permutations(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """The numbers 1 to 4 in any order."""
    ordered = jnp.broadcast_to(jnp.arange(1.0, N + 1), (count, N))
    return jax.random.permutation(key, ordered, axis=1, independent=True)


def correlated(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Normal with covariance `COVARIANCE`."""
    return gaussian(key, count) @ np.linalg.cholesky(COVARIANCE).T


def last_is_minus_10(key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Three standard normal numbers and -10."""
    return gaussian(key, count).at[:, -1].set(-10.0)


SAMPLERS: dict[str, Callable[..., Float[Array, "count 4"]]] = {
    "gaussian": gaussian,
    "half-gaussian": half_gaussian,
    "bimodal": bimodal,
    "uniform": uniform,
    "laplace": laplace,
    "spikes": spikes,
    "permutations": permutations,
    "correlated": correlated,
    "last-is-minus-10": last_is_minus_10,
    "spikes-text": spikes_text,
}


def sampled(number: Int[Array, ""] | int, key: jax.Array, count: int) -> Float[Array, "count 4"]:
    """Lists from one of `SAMPLERS`, by its number: one compiled program serves all of them.

    Example:
        >>> sampled(list(SAMPLERS).index("permutations"), jax.random.key(0), 3).sum(1).tolist()
        [10.0, 10.0, 10.0]
    """
    branches = [partial(sampler, count=count) for sampler in SAMPLERS.values()]
    return jax.lax.switch(number, branches, key)
