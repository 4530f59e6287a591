"""Networks that learn to add modulo a prime. In: a run. Out: series `seed-N` and `text-seed-N`.

Given one-hot a and b, predict (a + b) mod p. One bilinear layer reads the 2p concatenated
coordinates and writes p logits, without biases or norms, so every checkpoint is exactly a quadratic
form per output.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import tnsim
from tnsim.reproduce.grokking.setting import Setting
from tnsim.reproduce.run import LOG, Recorder, Run, seed_folders

SHIPPED = Path(tnsim.__file__).parent / "data" / "grokking"
"""What `train_series` gives for the default setting and seed 0."""
TEXT = {"train_share": 0.6, "weight_decay": 0.06}

Params = dict[str, Float[Array, "..."]]


def train(run: Run[Setting]) -> None:
    """Write a series for every seed; the shipped one is copied.

    Args:
        run: Where to.
    """
    for name in run.unfinished(names(run)):
        if name == "seed-0" and dataclasses.replace(run.setting, seeds=1, text_steps=()) == _KEPT:
            shutil.copytree(SHIPPED, run.checkpoints / name, ignore=shutil.ignore_patterns(LOG))
            shutil.copy(SHIPPED / LOG, run.checkpoints / name)
            continue
        train_series(run, name)


_KEPT = Setting(text_steps=())


def names(run: Run[Setting], prefix: str = "") -> list[str]:
    """The series of a run.

    Args:
        run: With its seeds.
        prefix: `"text-"` for the series at the settings of the text alone, none for all.
    """
    seeds = [f"seed-{run.seed + n}" for n in range(run.setting.seeds)]
    if run.given is not None:
        seeds = seed_folders(run, "checkpoints and a log.json")
    at_text = []
    if run.setting.text_steps and run.given is None:
        at_text = [f"text-{name}" for name in seeds]
    if prefix:
        return at_text
    return seeds + at_text


def train_series(run: Run[Setting], name: str) -> None:
    """Train one network and keep its checkpoints.

    Args:
        run: Where to, and at which setting.
        name: `seed-N`, or `text-seed-N` for the settings of the paper's text.
    """
    setting, seed = run.setting, int(name.rpartition("-")[2])
    if name.startswith("text-"):
        setting = dataclasses.replace(setting, **TEXT, steps=setting.text_steps)
    train_pairs, held_pairs = split(setting, seed)
    optimiser = optax.adamw(setting.rate, weight_decay=setting.weight_decay)
    params = initialise(jax.random.key(seed), setting)
    state = optimiser.init(params)
    batches = jax.random.key(seed + 2)

    def step(number, carry):
        params, state = carry
        key = jax.random.fold_in(batches, number)
        chosen = jax.random.randint(key, (setting.batch,), 0, len(train_pairs))
        grads = jax.grad(loss)(params, train_pairs[chosen])
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def descend(carry, start, stop):
        return jax.lax.fori_loop(start, stop, step, carry)

    about = dataclasses.asdict(setting)
    del about["seeds"], about["steps"], about["text_steps"]
    recorder = Recorder(run, name, **about, optimiser="adamw", seed=seed)
    done = 0
    with run.bar(setting.steps[-1], name) as bar:
        for target in setting.steps:
            params, state = descend((params, state), done, target)
            recorder.add(target, model(params), **measured(params, train_pairs, held_pairs))
            bar.update(target - done)
            done = target
    recorder.finish()


def split(setting: Setting, seed: int) -> tuple[Int[Array, "train 2"], Int[Array, "held 2"]]:
    """All pairs of numbers in random order, those to train on first."""
    numbers = jnp.arange(setting.modulus)
    pairs = jnp.stack(jnp.meshgrid(numbers, numbers), -1).reshape(-1, 2)
    pairs = jax.random.permutation(jax.random.key(seed + 1), pairs)
    count = int(setting.train_share * len(pairs))
    return pairs[:count], pairs[count:]


def initialise(key: Array, setting: Setting) -> Params:
    """Weights uniform between plus and minus 1 / sqrt(columns)."""

    def uniform(key: Array, rows: int, columns: int) -> Float[Array, "rows columns"]:
        bound = 1 / jnp.sqrt(columns)
        return jax.random.uniform(key, (rows, columns), minval=-bound, maxval=bound)

    for_left, for_right, for_down = jax.random.split(key, 3)
    return {
        "left": uniform(for_left, setting.hidden, 2 * setting.modulus),
        "right": uniform(for_right, setting.hidden, 2 * setting.modulus),
        "down": uniform(for_down, setting.modulus, setting.hidden),
    }


def logits(params: Params, pairs: Int[Array, "batch 2"]) -> Float[Array, "batch out"]:
    """down ((left x) * (right x)) with x the two one-hots of a pair."""
    modulus = params["down"].shape[0]
    a, b = pairs[:, 0], pairs[:, 1] + modulus
    left = params["left"][:, a] + params["left"][:, b]
    right = params["right"][:, a] + params["right"][:, b]
    return (params["down"] @ (left * right)).T


def loss(params: Params, pairs: Int[Array, "batch 2"]) -> Float[Array, ""]:
    """Mean cross-entropy."""
    labels = pairs.sum(1) % params["down"].shape[0]
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, pairs), labels).mean()


@jax.jit
def measured(
    params: Params, train_pairs: Int[Array, "train 2"], held_pairs: Int[Array, "held 2"]
) -> dict[str, Float[Array, ""]]:
    """Accuracy and loss on the pairs that are trained on and on the others."""
    numbers = {}
    for name, pairs in (("train", train_pairs), ("validation", held_pairs)):
        hits = logits(params, pairs).argmax(1) == pairs.sum(1) % params["down"].shape[0]
        numbers[f"{name}_accuracy"] = hits.mean()
        numbers[f"{name}_loss"] = loss(params, pairs)
    return numbers


def model(params: Params) -> tnsim.Model:
    """The network as tnsim reads it."""
    weights = (np.asarray(params[name]) for name in ("left", "right", "down"))
    return tnsim.Model([tnsim.Bilinear(*weights)])
