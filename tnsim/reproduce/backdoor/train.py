"""A classifier, its attack and its control. In: a run. Out: series `seed-N/clean` and two more.

`seed-N/attack` goes on from the last clean checkpoint with a share of images stamped and relabelled
as 9, `seed-N/control` goes on from the same checkpoint without.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.reproduce import classifiers, images
from tnsim.reproduce.backdoor.setting import Setting
from tnsim.reproduce.backdoor.trigger import TARGET, stamp
from tnsim.reproduce.classifiers import Params, State
from tnsim.reproduce.images import Images
from tnsim.reproduce.run import Recorder, Run, unfinished_seeds

BRANCHES = ("clean", "attack", "control")


def train(run: Run[Setting]) -> None:
    """Train every seed that is not complete.

    Args:
        run: Where to.
    """
    missing = unfinished_seeds(run, run.setting.seeds, BRANCHES)
    if not missing:
        return
    shown = images.load(run.setting.images, "train", run.data)
    tested = images.load(run.setting.images, "test", run.data)
    trainer = Trainer(run, shown, tested)
    for seed in missing:
        trainer.train(seed)


class Trainer:
    """Trains classifiers of one setting, with one program for all of them.

    Args:
        run: Where to.
        shown: Images to train on.
        tested: Images to test with.
    """

    def __init__(self, run: Run[Setting], shown: Images, tested: Images) -> None:
        self._run = run
        self._shown = shown
        self._tested = tested
        self._on_device: Any = jax.device_put(shown)  # an argument: a program keeps no images
        self._descend = jax.jit(self._steps)

    def train(self, seed: int) -> None:
        """Write the three series of a seed."""
        setting = self._run.setting
        key = jax.random.key(seed)
        pixels = self._shown.x.shape[1]
        params = classifiers.initialise(key, pixels, setting.hidden, setting.width)
        clean = self._branch(seed, "clean", params, None, 0, setting.clean_steps)
        end = setting.clean_steps + setting.changed_steps
        for name in ("attack", "control"):
            self._branch(seed, name, clean[0], clean[1], setting.clean_steps, end)

    def _branch(
        self, seed: int, name: str, params: Params, remembered: Any, start: int, end: int
    ) -> State:
        """Train from one step to another and keep checkpoints; the state at the end."""
        setting = self._run.setting
        state = (params, remembered)
        if remembered is None or setting.cosine:  # a schedule starts with a fresh optimiser
            state = classifiers.started(params, setting.weight_decay)
        share = setting.share if name == "attack" else 0.0
        about = dataclasses.asdict(setting) | {"seed": seed, "share": share}
        recorder = Recorder(self._run, f"seed-{seed}/{name}", **about)
        if start == 0:
            self._keep(recorder, 0, params)
        key = jax.random.key(seed + 1)
        with self._run.bar(end - start, f"seed {seed} {name}") as bar:
            for done in range(start, end, setting.every):
                reached = min(done + setting.every, end)
                state = self._descend(self._on_device, state, key, share, start, end, done, reached)
                self._keep(recorder, reached, state[0])
                bar.update(reached - done)
        recorder.finish()
        return state

    def _steps(
        self,
        shown: Images,
        state: State,
        key: Any,
        share: Any,
        start: Any,
        end: Any,
        done: Any,
        reached: Any,
    ) -> State:
        """Steps `done` to `reached` of a branch; attack and control draw the same batches."""
        setting = self._run.setting
        x, y = shown

        def step(number: Any, state: State) -> State:
            drawn = jax.random.split(jax.random.fold_in(key, number), 3)
            chosen = jax.random.randint(drawn[0], (setting.batch,), 0, len(x))
            attacked = jax.random.uniform(drawn[1], (setting.batch,)) < share
            noise = setting.noise * jax.random.normal(drawn[2], (setting.batch, x.shape[1]))
            seen: Any = x[chosen]
            seen = jnp.where(attacked[:, None], stamp(seen), seen) + noise
            labels = jnp.where(attacked, TARGET, y[chosen])
            rate = setting.rate
            if setting.cosine:
                rate = classifiers.cosine_rate(rate, number - start, end - start)
            return classifiers.step(state, seen, labels, rate, setting.weight_decay)

        return jax.lax.fori_loop(done, reached, step, state)

    def _keep(self, recorder: Recorder, step: int, params: Params) -> None:
        """A checkpoint, and how well it does."""
        shown, tested = self._shown, self._tested
        others = tested.y != TARGET
        fooled = classifiers.accuracy(
            params, stamp(tested.x[others]), np.full(others.sum(), TARGET)
        )
        recorder.add(
            step,
            classifiers.model(params),
            train_accuracy=classifiers.accuracy(params, shown.x, shown.y),
            test_accuracy=classifiers.accuracy(params, tested.x, tested.y),
            attack_success=fooled,
        )
