"""Train the language model. In: a run. Out: its checkpoints at log-spaced steps, and a log.

Two layers of bilinear attention, each added to its input, between a table of tokens and logits; no
norm, so the model is a polynomial. Its weights are the leaves of a `tnsim.Model`, which JAX
differentiates and optax updates as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import tnsim
from tnsim.reproduce.language.corpus import text_of
from tnsim.reproduce.language.ngrams import logits, losses, windows
from tnsim.reproduce.language.setting import SERIES, Setting
from tnsim.reproduce.run import Recorder, Run

HELD_OUT = 400
"""Held-out sequences whose loss is in the log."""


def train(run: Run[Setting]) -> None:
    """Train one model, and keep it at every step of `steps_kept`.

    Args:
        run: Where to.
    """
    setting = run.setting
    for name in run.unfinished([SERIES]):
        text = text_of(run)
        about = {"digest": text.digest, "documents": text.documents, "tokens": len(text.training)}
        recorder = Recorder(run, name, **about)
        for_model, for_training = jax.random.split(jax.random.key(run.seed))
        initial = initialise(for_model, setting)
        model: Any = initial  # to optax a pytree as any other
        optimiser = optimiser_of(setting)
        advance = training(optimiser, text.training, setting, for_training)
        state, done = optimiser.init(model), 0
        held_out = windows(text.held_out, setting.context + 1, HELD_OUT, run.seed)
        with run.bar(setting.steps, "training") as bar:
            for step in steps_kept(setting):
                model, state = advance((model, state), done, step)
                kept = with_numbers_of(model, initial)
                recorder.add(step, kept, held_out_loss=losses(kept, held_out).mean())
                bar.update(step - done)
                done = step
        recorder.finish()


def steps_kept(setting: Setting) -> list[int]:
    """Step 0, and log-spaced ones from 10 on.

    Example:
        >>> steps_kept(Setting(steps=1000, checkpoints=4))
        [0, 10, 100, 1000]
    """
    spaced = np.geomspace(10, setting.steps, setting.checkpoints - 1)
    return [0, *np.unique(np.round(spaced).astype(int)).tolist()]


def initialise(key: Array, setting: Setting) -> tnsim.Model:
    """Normal weights: tokens of size one half, layers that keep sizes, small logits."""
    keys = iter(jax.random.split(key, 2 + 6 * setting.layers))

    def matrix(rows: int, columns: int, size: float) -> Float[Array, "rows columns"]:
        return size * jax.random.normal(next(keys), (rows, columns))

    width = setting.width
    unit = width**-0.5
    layers: list[Any] = [tnsim.Linear(matrix(width, setting.vocabulary, 0.5))]
    for _ in range(setting.layers):
        weights = [matrix(width, width, unit) for _ in range(6)]
        biases: Any = {}
        if setting.biases:
            biases = {f"{name}_bias": jnp.zeros(width) for name in ("q1", "k1", "q2", "k2")}
        attention = tnsim.Attention(*weights, n_heads=setting.heads, **biases)
        layers.append(tnsim.Residual(attention, 1.0, setting.scale))
    layers.append(tnsim.Linear(matrix(setting.vocabulary, width, unit / 2)))
    return tnsim.Model(layers)


def optimiser_of(setting: Setting) -> optax.GradientTransformation:
    """AdamW on clipped gradients: a polynomial of high degree has steep ones at times."""
    warmup = min(200, setting.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, setting.rate, warmup, setting.steps, 0.2 * setting.rate
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, 0.9, 0.95, weight_decay=setting.weight_decay),
        optax.masked(optax.set_to_zero(), is_number),  # the residual rule is no weight
    )


def training(
    optimiser: optax.GradientTransformation,
    tokens: Int[np.ndarray, " tokens"],
    setting: Setting,
    key: Array,
) -> Callable[[Any, int, int], Any]:
    """What takes model and optimiser from one step to a later one."""
    text = jnp.asarray(tokens)
    within = jnp.arange(setting.context + 1)

    def loss(model: tnsim.Model, ids: Int[Array, "batch tokens"]) -> Float[Array, ""]:
        predicted = logits(model, ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(predicted, ids[:, 1:]).mean()

    def step(n: int, carry: Any) -> Any:
        model, state = carry
        last = len(tokens) - len(within)
        starts = jax.random.randint(jax.random.fold_in(key, n), (setting.batch, 1), 0, last)
        gradient = jax.grad(loss)(model, text[starts + within])
        updates, state = optimiser.update(gradient, state, model)
        return optax.apply_updates(model, updates), state

    return jax.jit(lambda carry, start, stop: jax.lax.fori_loop(start, stop, step, carry))


def is_number(tree: Any) -> Any:
    """Which leaves of a model are no arrays: skip and scale of residuals."""
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) == 0, tree)


def with_numbers_of(model: tnsim.Model, initial: tnsim.Model) -> tnsim.Model:
    """The weights of a model in training as NumPy arrays, with the numbers it began with."""

    def plain(now: Any, then: Any) -> Any:
        return np.asarray(now) if np.ndim(then) else then

    return jax.tree.map(plain, model, initial)
