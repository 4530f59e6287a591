"""One bilinear layer learns the second argmax. In: a run. Out: series `DISTRIBUTION/seed-N`.

All seeds of a distribution are trained side by side, as one program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import tnsim
from tnsim.reproduce.argmax.distributions import SAMPLERS, N, sampled, second_argmax
from tnsim.reproduce.argmax.setting import Setting
from tnsim.reproduce.run import Recorder, Run

HELD_OUT = 20_000
Weights = dict[str, Array]
State = tuple[Weights, Any]
"""Weights, and what Adam remembers."""


def train(run: Run[Setting]) -> None:
    """Train on every distribution whose series are not all there.

    Args:
        run: Where to.
    """
    setting = run.setting
    waiting = [name for name in setting.distributions if run.unfinished(series_of(run, name))]
    advanced = program(setting.rate, setting.batch)
    with run.bar(len(waiting) * setting.steps[-1], "training") as bar:
        for name in waiting:
            bar.set_description(f"training on {name}")
            train_on(run, name, advanced, bar.update)


def series_of(run: Run[Setting], distribution: str) -> list[str]:
    """Names of the series of one distribution, one for each training."""
    return [f"{distribution}/seed-{seed}" for seed in seeds_of(run)]


def seeds_of(run: Run[Setting]) -> range:
    """Seeds of all trainings, one repetition after the other."""
    return range(run.seed, run.seed + run.setting.repetitions * run.setting.seeds)


def program(rate: float, batch: int) -> Callable[..., State]:
    """Steps of Adam as one compiled function, the same for every distribution.

    Args:
        rate: Of Adam.
        batch: Inputs of a step.

    Returns:
        A function of the distribution's number, the first step, the one to stop before, the keys of
        the trainings and their states.
    """
    optimiser = optax.adam(rate)

    def loss(weights: Weights, inputs: Float[Array, "batch 4"]) -> Float[Array, ""]:
        guesses, labels = logits(weights, inputs), second_argmax(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(guesses, labels).mean()

    def step(number: Array, n: Array, key: jax.Array, state: State) -> State:
        weights, moments = state
        inputs = sampled(number, jax.random.fold_in(key, n), batch)
        updates, moments = optimiser.update(jax.grad(loss)(weights, inputs), moments)
        return cast(Weights, optax.apply_updates(weights, updates)), moments

    def advanced(number: Array, start: Array, stop: Array, keys: jax.Array, state: State) -> State:
        every = jax.vmap(step, (None, None, 0, 0))
        return jax.lax.fori_loop(start, stop, lambda n, now: every(number, n, keys, now), state)

    return jax.jit(advanced)


def train_on(
    run: Run[Setting],
    distribution: str,
    advanced: Callable[..., State],
    advance: Callable[[int], Any],
) -> None:
    """Train all seeds on one distribution, side by side, and write their series."""
    setting = run.setting
    number = list(SAMPLERS).index(distribution)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds_of(run)))
    for_weights, for_training = jax.vmap(jax.random.split, out_axes=1)(keys)
    weights = jax.vmap(partial(initial, rank=setting.rank))(for_weights)
    state = weights, jax.vmap(optax.adam(setting.rate).init)(weights)
    held_out = SAMPLERS[distribution](jax.random.key(10_000 + run.seed), HELD_OUT)
    recorders = [Recorder(run, name) for name in series_of(run, distribution)]
    done = 0
    for target in setting.steps:
        state = advanced(number, done, target, for_training, state)
        accuracies = accuracy(state[0], held_out)
        for n, recorder in enumerate(recorders):
            recorder.add(target, model_of(state[0], n), accuracy=accuracies[n])
        advance(target - done)
        done = target
    for recorder in recorders:
        recorder.finish()


def initial(key: jax.Array, rank: int) -> Weights:
    """Normal weights of standard deviation 0.1."""
    shapes = {"left": (rank, N), "right": (rank, N), "down": (N, rank)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: 0.1 * jax.random.normal(one, shape)
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@jax.jit
def accuracy(weights: Weights, inputs: Float[Array, "batch 4"]) -> Float[Array, " seed"]:
    """Share of right guesses, for each seed."""
    guesses = jax.vmap(logits, (0, None))(weights, inputs).argmax(-1)
    return (guesses == second_argmax(inputs)).mean(-1)


def model_of(weights: Weights, seed: int) -> tnsim.Model:
    """The network of one of the seeds that are trained side by side."""
    left, right, down = (np.asarray(weights[name][seed]) for name in ("left", "right", "down"))
    return tnsim.Model([tnsim.Bilinear(left, right, down)])


def logits(weights: Weights, inputs: Float[Array, "batch 4"]) -> Float[Array, "batch 4"]:
    """`D (L x * R x)`."""
    hidden = (inputs @ weights["left"].T) * (inputs @ weights["right"].T)
    return hidden @ weights["down"].T
