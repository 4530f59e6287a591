"""Train the modular-addition series that tnsim ships.

The task of the paper's section 4.2: given one-hot a and b, predict (a + b) mod 113. One bilinear
layer of 64 hidden units reads the 226 concatenated one-hot coordinates and writes 113 logits; there
are no biases and no normalisation, so every checkpoint is exactly a quadratic form per output.

    python scripts/train_modular_addition.py OUT_DIR

writes `step_000000.safetensors`, ... at log-spaced steps, and `metrics.json` with the train and
validation accuracy and loss of each. The run is deterministic for a given jax version and device.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tnsim

MODULUS = 113
HIDDEN = 64
BATCH = 512
TRAIN_SHARE = 0.6
STEPS = (0, 100, 200, 400, 800, 1500, 3000, 5000, 8000, 12000, 20000, 40000, 100000)


def logits(params: dict, pairs: jax.Array) -> jax.Array:
    """(batch, 2) tokens -> (batch, 113): down ((left x) * (right x)) with x the two one-hots."""
    a, b = pairs[:, 0], pairs[:, 1] + MODULUS
    left = params["left"][:, a] + params["left"][:, b]
    right = params["right"][:, a] + params["right"][:, b]
    return (params["down"] @ (left * right)).T


def loss_fn(params: dict, pairs: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, pairs), labels).mean()


def initialise(key: jax.Array) -> dict:
    """Weights uniform between plus and minus 1 / sqrt(columns)."""

    def uniform(key: jax.Array, rows: int, columns: int) -> jax.Array:
        bound = 1 / jnp.sqrt(columns)
        return jax.random.uniform(key, (rows, columns), minval=-bound, maxval=bound)

    for_left, for_right, for_down = jax.random.split(key, 3)
    return {
        "left": uniform(for_left, HIDDEN, 2 * MODULUS),
        "right": uniform(for_right, HIDDEN, 2 * MODULUS),
        "down": uniform(for_down, MODULUS, HIDDEN),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight-decay", type=float, default=0.06)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    pairs = jnp.stack(jnp.meshgrid(jnp.arange(MODULUS), jnp.arange(MODULUS)), -1).reshape(-1, 2)
    labels = pairs.sum(1) % MODULUS
    order = jax.random.permutation(jax.random.key(args.seed + 1), len(pairs))
    n_train = int(TRAIN_SHARE * len(pairs))
    train, held = order[:n_train], order[n_train:]

    optimiser = optax.adamw(args.learning_rate, weight_decay=args.weight_decay)
    params = initialise(jax.random.key(args.seed))
    state = optimiser.init(params)

    def step(carry, key):
        params, state = carry
        batch = jax.random.choice(key, train, (BATCH,))
        grads = jax.grad(loss_fn)(params, pairs[batch], labels[batch])
        updates, state = optimiser.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(carry, keys):
        return jax.lax.scan(step, carry, keys)[0]

    @jax.jit
    def measure(params, index):
        out = logits(params, pairs[index])
        return (out.argmax(1) == labels[index]).mean(), loss_fn(params, pairs[index], labels[index])

    key = jax.random.key(args.seed + 2)
    metrics, done = [], 0
    for target in STEPS:
        while done < target:
            key, sub = jax.random.split(key)
            count = min(1000, target - done)
            params, state = run((params, state), jax.random.split(sub, count))
            done += count
        (train_acc, train_loss), (val_acc, val_loss) = measure(params, train), measure(params, held)
        row = {
            "step": done,
            "train_accuracy": float(train_acc),
            "validation_accuracy": float(val_acc),
            "train_loss": float(train_loss),
            "validation_loss": float(val_loss),
        }
        metrics.append(row)
        print(row, flush=True)
        model = tnsim.Model(
            [tnsim.Bilinear(*(np.asarray(params[k]) for k in ("left", "right", "down")))]
        )
        tnsim.save(model, args.out / f"step_{done:06d}.safetensors")
    settings = {
        "modulus": MODULUS,
        "hidden": HIDDEN,
        "batch": BATCH,
        "train_share": TRAIN_SHARE,
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
