"""Train the induction series that tnsim ships.

Two layers of bilinear attention learn to continue a repetition.

A sequence repeats a segment of 4 to 8 different tokens, of random length, so what follows a token
is what followed it last time, at no fixed distance. Finding it takes two attention layers: one that
looks at the previous token, one that looks for a position whose previous token is the current one.
The model has no normalisation, so it is a polynomial, of degree 25; its weights are the leaves of a
`tnsim.Model`, which JAX differentiates and optax updates as they are.

    python scripts/train_induction.py OUT_DIR

writes `step_000000.safetensors`, ... at log-spaced steps, and `metrics.json` with the loss and the
accuracies of each: `repeated` are the tokens that an earlier occurrence of their predecessor
determines, `fresh` those before them. The run is deterministic for a given jax version and device.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import tnsim

VOCABULARY = 16
SEGMENTS = (4, 8)
CONTEXT = 16
COMPARED_AT = 4
WIDTH = 32
HEADS = 4
LAYERS = 2
SCALE = 0.35
GAIN = 0.35
BATCH = 128
HELD_OUT = 4096
WARMUP = 200
STEPS = (0, 50, 100, 200, 300, 450, 650, 900, 1250, 1700, 2400, 4000)


def sequences(
    key: jax.Array, count: int
) -> tuple[Int[Array, "count context"], Int[Array, "count 1"]]:
    """Tokens, and the length of the segment that each sequence repeats."""
    for_tokens, for_lengths = jax.random.split(key)
    tokens = jnp.broadcast_to(jnp.arange(VOCABULARY), (count, VOCABULARY))
    tokens = jax.random.permutation(for_tokens, tokens, axis=1, independent=True)
    lengths = jax.random.randint(for_lengths, (count, 1), SEGMENTS[0], SEGMENTS[1] + 1)
    return jnp.take_along_axis(tokens, jnp.arange(CONTEXT) % lengths, axis=1), lengths


def initialise(key: jax.Array) -> tnsim.Model:
    """Uniform weights of variance 1 / columns, those of attention times GAIN.

    So a layer, which has six factors, starts close to zero.
    """
    keys = iter(jax.random.split(key, 2 + 6 * LAYERS))

    def matrix(rows: int, columns: int) -> Float[Array, "rows columns"]:
        bound = jnp.sqrt(3 / columns)
        return jax.random.uniform(next(keys), (rows, columns), minval=-bound, maxval=bound)

    def attention() -> tnsim.Attention:
        return tnsim.Attention(*(GAIN * matrix(WIDTH, WIDTH) for _ in range(6)), HEADS)

    embed = tnsim.Linear(
        matrix(WIDTH, VOCABULARY) * jnp.sqrt(VOCABULARY)
    )  # a one-hot input selects a column of variance 1
    layers = [tnsim.Residual(attention(), 1.0, SCALE) for _ in range(LAYERS)]
    return tnsim.Model([embed, *layers, tnsim.Linear(matrix(VOCABULARY, WIDTH))])


def predict(
    model: tnsim.Model, tokens: Int[Array, "count context"]
) -> Float[Array, "count before vocabulary"]:
    """Logits of tokens 1, 2, ... of every sequence."""
    return model(jax.nn.one_hot(tokens, VOCABULARY))[:, :-1]


def loss_fn(model: tnsim.Model, tokens: Int[Array, "count context"]) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(model, tokens), tokens[:, 1:]
    ).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    for_model, for_training, for_measuring = jax.random.split(jax.random.key(args.seed), 3)
    initial = model = initialise(for_model)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, WARMUP, STEPS[-1], args.learning_rate / 10
    )
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),  # a polynomial of degree 25 has steep gradients at times
        optax.adamw(schedule, weight_decay=args.weight_decay),
        optax.masked(
            optax.set_to_zero(), lambda tree: jax.tree.map(lambda x: jnp.ndim(x) == 0, tree)
        ),  # the residual rule is no weight
    )
    state = optimiser.init(model)

    def step(n, carry):
        model, state = carry
        tokens, _ = sequences(jax.random.fold_in(for_training, n), BATCH)
        updates, state = optimiser.update(jax.grad(loss_fn)(model, tokens), state, model)
        return optax.apply_updates(model, updates), state

    @jax.jit
    def run(carry, start, stop):
        return jax.lax.fori_loop(start, stop, step, carry)

    @jax.jit
    def measure(model):
        tokens, lengths = sequences(for_measuring, HELD_OUT)
        right = predict(model, tokens).argmax(-1) == tokens[:, 1:]
        repeated = jnp.arange(1, CONTEXT) > lengths
        return {
            "loss": loss_fn(model, tokens),
            "repeated_accuracy": right.mean(where=repeated),
            "fresh_accuracy": right.mean(where=~repeated),
        }

    metrics, done = [], 0
    for target in STEPS:
        (model, state), done = run((model, state), done, target), target
        metrics.append(
            {"step": done, **{name: round(float(x), 6) for name, x in measure(model).items()}}
        )
        print(metrics[-1], flush=True)
        layers = jax.tree.map(
            lambda now, then: np.asarray(now) if np.ndim(then) else then, model, initial
        ).layers
        tnsim.save(
            tnsim.Model(layers, n_ctx=COMPARED_AT), args.out / f"step_{done:06d}.safetensors"
        )
    settings = {
        "vocabulary": VOCABULARY,
        "segments": SEGMENTS,
        "context": CONTEXT,
        "width": WIDTH,
        "heads": HEADS,
        "scale": SCALE,
        "gain": GAIN,
        "batch": BATCH,
        "held_out": HELD_OUT,
        "optimiser": "adamw",
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
    }
    (args.out / "metrics.json").write_text(
        json.dumps({"settings": settings, "checkpoints": metrics}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
