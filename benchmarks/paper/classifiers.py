"""Quadratic classifiers of images: weights, logits, training steps and models.

Scores are `head (down ((left e) * (right e)))` with `e = embed x`, without biases or norms. The
small classifier has neither embedding nor head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import tnsim

DIGITS = 10

Params = dict[str, Float[Array, "rows columns"]]
State = tuple[Params, Any]
"""Weights, and the state of the optimiser."""


def initialise(key: Array, pixels: int, hidden: int, width: int | None = None) -> Params:
    """Weights uniform between plus and minus 1 / sqrt(columns).

    Args:
        key: Random key.
        pixels: Number of pixels of an image.
        hidden: Hidden units of the bilinear layer.
        width: Width of the embedding; None for no embedding and no head.

    Returns:
        Matrices by name.

    Example:
        >>> weights = initialise(jax.random.key(0), pixels=64, hidden=16)
        >>> {name: weight.shape for name, weight in weights.items()}
        {'left': (16, 64), 'right': (16, 64), 'down': (10, 16)}
    """
    reads, writes = pixels, DIGITS
    shapes = {}
    if width is not None:
        shapes = {"embed": (width, pixels), "head": (DIGITS, width)}
        reads = writes = width
    shapes |= {"left": (hidden, reads), "right": (hidden, reads), "down": (writes, hidden)}
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        bound = shape[1] ** -0.5
        drawn = jax.random.fold_in(key, number)
        weights[name] = jax.random.uniform(drawn, shape, minval=-bound, maxval=bound)
    return weights


def logits(params: Params, x: Float[Array, "batch pixels"]) -> Float[Array, "batch digits"]:
    """A score for every digit."""
    if "embed" in params:
        x = x @ params["embed"].T
    scores = ((x @ params["left"].T) * (x @ params["right"].T)) @ params["down"].T
    if "head" in params:
        scores = scores @ params["head"].T
    return scores


def loss(
    params: Params, x: Float[Array, "batch pixels"], y: Int[Array, " batch"]
) -> Float[Array, ""]:
    """The mean cross-entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def accuracy(params: Params, x: Float[np.ndarray, "n pixels"], y: Int[np.ndarray, " n"]) -> float:
    """The share of the images whose digit has the largest score."""
    guesses = np.asarray(_guessed_classes(params, x))
    return float((guesses == y).mean())


@jax.jit
def _guessed_classes(params: Params, x: Float[Array, "n pixels"]) -> Int[Array, " n"]:
    return logits(params, x).argmax(1)


def started(params: Params, weight_decay: float) -> State:
    """Weights with a fresh optimiser."""
    return params, _adamw(weight_decay).init(params)


def step(
    state: State,
    x: Float[Array, "batch pixels"],
    y: Int[Array, " batch"],
    rate: Float[Array, ""] | float,
    weight_decay: float,
) -> State:
    """The state after a single step of AdamW."""
    params, remembered = state
    grads = jax.grad(loss)(params, x, y)
    updates, remembered = _adamw(weight_decay).update(grads, remembered, params)
    updates = jax.tree.map(lambda update: -rate * update, updates)
    stepped: Any = optax.apply_updates(params, updates)
    return stepped, remembered


def _adamw(weight_decay: float) -> optax.GradientTransformation:
    """AdamW for a rate of 1, so that a single program serves all rates."""
    return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(weight_decay))


def cosine_rate(rate: float, number: Int[Array, ""], total: Int[Array, ""]) -> Float[Array, ""]:
    """The rate at a step of a cosine schedule, which falls to 0 at the last step."""
    return rate * (1 + jnp.cos(jnp.pi * number / total)) / 2


def model(params: Params) -> tnsim.Model:
    """The classifier as a model of tnsim."""
    weights = {name: np.asarray(weight) for name, weight in params.items()}
    layers: list[Any] = [tnsim.Bilinear(weights["left"], weights["right"], weights["down"])]
    if "embed" in weights:
        layers = [tnsim.Linear(weights["embed"]), *layers, tnsim.Linear(weights["head"])]
    return tnsim.Model(layers)
