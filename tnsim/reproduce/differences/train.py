"""Stages of training, and a pair of models apart from them. In: a run. Out: series.

`seed-N/stages` and `seed-N/kept` are those of `forgetting`. `seed-N/pair` is another network from
another start: after the digits 0 to 8, and after learning all of them.
"""

from __future__ import annotations

from tnsim.reproduce.forgetting.setting import Setting
from tnsim.reproduce.forgetting.train import Trainer
from tnsim.reproduce.run import Run, unfinished_seeds

APART = 1000
"""Added to the seed of the pair."""


def train(run: Run[Setting]) -> None:
    """Train every seed that is not complete.

    Args:
        run: Where to.
    """
    missing = unfinished_seeds(run, run.setting.seeds, ("stages", "kept", "pair"))
    if missing:
        trainer = Trainer(run)
        for seed in missing:
            trainer.stages(seed)
            trainer.pair(f"seed-{seed}/pair", seed + APART)
