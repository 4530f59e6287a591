"""A classifier that learns digits, forgets one and learns it again. In: a run. Out: series.

`seed-N/stages` goes through the stages of the paper. `seed-N/kept` is a control: it goes on from
the end of the stage before 9 is removed, for as many steps, with all digits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.reproduce import classifiers, images
from tnsim.reproduce.classifiers import Params, State
from tnsim.reproduce.forgetting.setting import STAGES, Setting, Stage
from tnsim.reproduce.images import Images
from tnsim.reproduce.run import Recorder, Run, unfinished_seeds

REMOVED = [stage.name for stage in STAGES].index("remove 9")


def train(run: Run[Setting]) -> None:
    """Train every seed that is not complete.

    Args:
        run: Where to.
    """
    missing = unfinished_seeds(run, run.setting.seeds, ("stages", "kept"))
    if missing:
        trainer = Trainer(run)
        for seed in missing:
            trainer.stages(seed)


class Trainer:
    """Trains classifiers of one setting, with one program for all stages and seeds.

    Args:
        run: Where to.
    """

    def __init__(self, run: Run[Setting]) -> None:
        self._run = run
        self._shown = images.load(run.setting.images, "train", run.data)
        self._tested = images.load(run.setting.images, "test", run.data)
        self._on_device: Any = jax.device_put(self._shown)  # an argument: a program keeps no images
        self._descend = jax.jit(self._steps)

    def stages(self, seed: int) -> None:
        """Write the stages of a seed, and its control."""
        recorder = self._recorder(f"seed-{seed}/stages", seed)
        params = self.started(seed)
        self._keep(recorder, 0, params, STAGES[0], number=0)
        done = 0
        for number, stage in enumerate(STAGES):
            if number == REMOVED:
                longer = self._recorder(f"seed-{seed}/kept", seed)
                as_before = STAGES[number - 1]
                self._stage(longer, params, done, as_before, number, seed)
                longer.finish()
            params, done = self._stage(recorder, params, done, stage, number, seed)
        recorder.finish()

    def pair(self, name: str, seed: int) -> None:
        """Write two checkpoints: after the digits 0 to 8, and after learning all of them."""
        recorder = self._recorder(name, seed)
        params, done = self.started(seed), 0
        for number, stage in enumerate((Stage("without 9", 9), Stage("with 9", 10))):
            params, done = self._stage(recorder, params, done, stage, number, seed, kept=1)
        recorder.finish()

    def started(self, seed: int) -> Params:
        """The weights from which a seed starts."""
        setting = self._run.setting
        pixels = self._shown.x.shape[1]
        return classifiers.initialise(jax.random.key(seed), pixels, setting.hidden, setting.width)

    def _recorder(self, name: str, seed: int) -> Recorder:
        return Recorder(self._run, name, **dataclasses.asdict(self._run.setting) | {"seed": seed})

    def _stage(
        self,
        recorder: Recorder,
        params: Params,
        before: int,
        stage: Stage,
        number: int,
        seed: int,
        kept: int | None = None,
    ) -> tuple[Params, int]:
        """Train one stage; the weights at its end, and the steps done since the beginning."""
        setting = self._run.setting
        order = self._order(stage, np.random.default_rng([seed, number]))
        total = len(order)
        padded = np.zeros((self._longest(), setting.batch), np.int32)
        padded[:total] = order  # one length, one program
        state = classifiers.started(params, setting.weight_decay)
        kept = kept or setting.kept
        done = 0
        with self._run.bar(total, f"seed {seed} {stage.name}") as bar:
            for part in range(1, kept + 1):
                reached = total * part // kept
                state = self._descend(self._on_device, state, padded, done, reached, total)
                self._keep(recorder, before + reached, state[0], stage, number)
                bar.update(reached - done)
                done = reached
        return state[0], before + total

    def _order(self, stage: Stage, rng: np.random.Generator) -> np.ndarray:
        """Images of every step (steps, batch): epochs, each in an order of its own."""
        setting = self._run.setting
        there = np.flatnonzero(self._shown.y < stage.digits)
        steps = len(there) // setting.batch
        epochs = []
        for _ in range(setting.epochs):
            epochs.append(rng.permutation(there)[: steps * setting.batch])
        return np.concatenate(epochs).reshape(-1, setting.batch)

    def _longest(self) -> int:
        """Steps of a stage of all digits."""
        return len(self._shown.y) // self._run.setting.batch * self._run.setting.epochs

    def _steps(
        self, shown: Images, state: State, order: Any, done: Any, reached: Any, total: Any
    ) -> State:
        setting = self._run.setting
        x, y = map(jnp.asarray, shown)

        def step(number: Any, state: State) -> State:
            chosen = order[number]
            rate = classifiers.cosine_rate(setting.rate, number, total)
            return classifiers.step(state, x[chosen], y[chosen], rate, setting.weight_decay)

        return jax.lax.fori_loop(done, reached, step, state)

    def _keep(
        self, recorder: Recorder, step: int, params: Params, stage: Stage, number: int
    ) -> None:
        """A checkpoint, and how well it does on the digits of its stage and on 9."""
        there = self._tested.y < stage.digits
        nines = self._tested.y == 9
        recorder.add(
            step,
            classifiers.model(params),
            stage=number,
            validation_accuracy=self._accuracy(params, there),
            accuracy_of_9=self._accuracy(params, nines),
        )

    def _accuracy(self, params: Params, chosen: np.ndarray) -> float:
        tested: Images = self._tested
        return classifiers.accuracy(params, tested.x[chosen], tested.y[chosen])
