"""Nothing is trained: the series is shipped. In: a run. Out: nothing.

`scripts/train_induction.py` made it, deterministic by its seed, and trains others; a folder of its
output is read with `--checkpoints`.
"""

from __future__ import annotations

from pathlib import Path

import tnsim
from tnsim.reproduce.induction.setting import Setting
from tnsim.reproduce.run import Run


def train(run: Run[Setting]) -> None:
    """Do nothing.

    Args:
        run: Whose checkpoints are those of `series_of`.
    """


def series_of(run: Run[Setting]) -> tnsim.Series:
    """The checkpoints of a run: those given, or those shipped."""
    return tnsim.Series(run.given or Path(tnsim.__file__).parent / "data" / "induction")
