"""Stages of training, and a pair of models apart from them. In: a run. Out: series.

`seed-N/stages` and `seed-N/kept` are those of `forgetting`. `seed-N/pair` is another network from
another start: after the digits 0 to 8, and after learning all of them.
"""

from __future__ import annotations

from tnsim.reproduce.forgetting.setting import Setting
from tnsim.reproduce.forgetting.train import Trainer
from tnsim.reproduce.run import Run

APART = 1000
"""Added to the seed of the pair."""


def train(run: Run[Setting]) -> None:
    """Train every seed that is not complete.

    Args:
        run: where to.
    """
    seeds = [run.seed + n for n in range(run.setting.seeds)]
    parts = ("stages", "kept", "pair")
    missing = [s for s in seeds if run.unfinished(f"seed-{s}/{part}" for part in parts)]
    if missing:
        trainer = Trainer(run)
        for seed in missing:
            trainer.stages(seed)
            trainer.pair(f"seed-{seed}/pair", seed + APART)
