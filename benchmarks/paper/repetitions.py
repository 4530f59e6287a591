"""The training of induction: two layers of bilinear attention learn to continue repetitions.

A sequence repeats a segment of different tokens, of random length, so what follows a token is what
followed it last time, at no fixed distance. Finding it takes two attention layers: a layer that
looks at the previous token, a layer that looks for a position whose previous token is the current
token. The model has no normalisation, so it is a polynomial, of degree 25; its weights are the
leaves of a `tnsim.Model`, which JAX differentiates and optax updates as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import tnsim


@dataclass(frozen=True)
class RepetitionSetting:
    """Sizes and rates of a training.

    Args:
        vocabulary: Number of tokens.
        segments: Least and largest number of tokens of the segment that a sequence repeats.
        context: Number of tokens of a sequence.
        compared_at: Number of positions on which checkpoints are compared by default.
        width, heads, layers: Sizes of the model.
        scale: Factor of a layer's output in the stream.
        gain: Factor of the first weights of attention; a layer, which has six, starts near zero.
        batch: Number of sequences of a step.
        held_out: Number of sequences on which checkpoints are measured.
        warmup: Number of steps at whose end the rate is largest.
        learning_rate, weight_decay: Largest rate, and decay, of the optimiser.
        steps: Steps at which a checkpoint is kept.
    """

    vocabulary: int = 16
    segments: tuple[int, int] = (4, 8)
    context: int = 16
    compared_at: int = 4
    width: int = 32
    heads: int = 4
    layers: int = 2
    scale: float = 0.35
    gain: float = 0.35
    batch: int = 128
    held_out: int = 4096
    warmup: int = 200
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    steps: tuple[int, ...] = (0, 50, 100, 200, 300, 450, 650, 900, 1250, 1700, 2400, 4000)


class Checkpoint(NamedTuple):
    """A model during its training.

    Attributes:
        step: Training step.
        model: Model, weights in float32.
        measures: Loss, and accuracies on tokens that an earlier occurrence of their predecessor
            determines (`repeated_accuracy`) and on those before them (`fresh_accuracy`).
    """

    step: int
    model: tnsim.Model
    measures: dict[str, float]


def trained(setting: RepetitionSetting, seed: int) -> Iterator[Checkpoint]:
    """Train a model, deterministic for a version of JAX and a device.

    Args:
        setting: Sizes and rates.
        seed: Seed of the first weights and of all sequences.

    Yields:
        The checkpoints at `setting.steps`.
    """
    for_model, for_training, for_measuring = jax.random.split(jax.random.key(seed), 3)
    initial: Any = _initialise(for_model, setting)
    model = initial
    rate, last = setting.learning_rate, setting.steps[-1]
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, setting.warmup, last, rate / 10)
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),  # a polynomial of degree 25 has steep gradients at times
        optax.adamw(schedule, weight_decay=setting.weight_decay),
        optax.masked(
            optax.set_to_zero(), lambda tree: jax.tree.map(lambda x: jnp.ndim(x) == 0, tree)
        ),  # the residual rule is no weight
    )
    state = optimiser.init(model)

    def step(n, carry):
        model, state = carry
        tokens, _ = _drawn_sequences(jax.random.fold_in(for_training, n), setting.batch, setting)
        updates, state = optimiser.update(jax.grad(_loss)(model, tokens), state, model)
        return optax.apply_updates(model, updates), state

    @jax.jit
    def descend(carry, start, stop):
        return jax.lax.fori_loop(start, stop, step, carry)

    @jax.jit
    def measured(model):
        tokens, lengths = _drawn_sequences(for_measuring, setting.held_out, setting)
        right = _token_logits(model, tokens).argmax(-1) == tokens[:, 1:]
        # From its second period on a sequence is determined.
        repeated = jnp.arange(1, setting.context) > lengths
        return {
            "loss": _loss(model, tokens),
            "repeated_accuracy": right.mean(where=repeated),
            "fresh_accuracy": right.mean(where=~repeated),
        }

    done = 0
    for target in setting.steps:
        (model, state), done = descend((model, state), done, target), target
        layers = jax.tree.map(
            lambda now, then: np.asarray(now) if np.ndim(then) else then, model, initial
        ).layers
        measures = {name: round(float(x), 6) for name, x in measured(model).items()}
        yield Checkpoint(done, tnsim.Model(layers, n_ctx=setting.compared_at), measures)


def _drawn_sequences(
    key: jax.Array, count: int, setting: RepetitionSetting
) -> tuple[Int[Array, "count context"], Int[Array, "count 1"]]:
    """Tokens, and the length of the segment that each sequence repeats."""
    for_tokens, for_lengths = jax.random.split(key)
    words = setting.vocabulary
    tokens = jnp.broadcast_to(jnp.arange(words), (count, words))
    # Tokens of a segment differ, so that each has a single successor.
    tokens = jax.random.permutation(for_tokens, tokens, axis=1, independent=True)
    shortest, longest = setting.segments
    lengths = jax.random.randint(for_lengths, (count, 1), shortest, longest + 1)
    return jnp.take_along_axis(tokens, jnp.arange(setting.context) % lengths, axis=1), lengths


def _initialise(key: jax.Array, setting: RepetitionSetting) -> tnsim.Model:
    """Uniform weights of variance 1 / columns, those of attention times the gain."""
    keys = iter(jax.random.split(key, 2 + 6 * setting.layers))
    width, words = setting.width, setting.vocabulary

    def matrix(rows: int, columns: int) -> Float[Array, "rows columns"]:
        # A uniform number in [-b, b] has the variance b^2 / 3.
        bound = jnp.sqrt(3 / columns)
        return jax.random.uniform(next(keys), (rows, columns), minval=-bound, maxval=bound)

    def attention() -> tnsim.Attention:
        q1, k1, q2, k2, v, o = (setting.gain * matrix(width, width) for _ in range(6))
        return tnsim.Attention(q1, k1, q2, k2, v, o, setting.heads)

    # A one-hot input selects a column of variance 1.
    embed = tnsim.Linear(matrix(width, words) * jnp.sqrt(words))
    layers = [tnsim.Residual(attention(), 1.0, setting.scale) for _ in range(setting.layers)]
    return tnsim.Model([embed, *layers, tnsim.Linear(matrix(words, width))])


def _token_logits(
    model: tnsim.Model, tokens: Int[Array, "count context"]
) -> Float[Array, "count before vocabulary"]:
    """Logits of tokens 1, 2, ... of every sequence."""
    logits: Any = model(jax.nn.one_hot(tokens, model.d_in))
    return logits[:, :-1]


def _loss(model: tnsim.Model, tokens: Int[Array, "count context"]) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(
        _token_logits(model, tokens), tokens[:, 1:]
    ).mean()
