"""How modular addition is trained. In: nothing. Out: `Setting`."""

from __future__ import annotations

from dataclasses import dataclass

# fmt: off
STEPS = (
    0, 20, 32, 50, 80, 125, 200, 320, 500, 800, 1250,
    2000, 3200, 5000, 8000, 12500, 20000, 32000, 50000, 80000,
)
# fmt: on
"""Five to a decade."""


def log_spaced(last: int, per_decade: int = 20) -> tuple[int, ...]:
    """Step 0, and whole steps at equal ratios from 10 to the last.

    Args:
        last: The largest step.
        per_decade: How many make a factor of ten.

    Returns:
        Rising steps, each once.

    Example:
        >>> log_spaced(100, per_decade=3)
        (0, 10, 22, 46, 100)
    """
    steps = [0]
    power = 0
    while steps[-1] < last:
        steps.append(round(10 ** (1 + power / per_decade)))
        power += 1
    return tuple(sorted({min(step, last) for step in steps}))


@dataclass(frozen=True)
class Setting:
    """The task, the network and its training; by default those of the authors' code.

    Args:
        train_share: Of all pairs of numbers, those that are trained on.
        weight_decay: Of AdamW.
        rate: Of learning, constant.
        batch: Pairs in a step.
        hidden: Units of the bilinear layer.
        modulus: Of the addition.
        seeds: Runs, one for each.
        steps: Of the checkpoints.
        text_steps: Checkpoints of a short run at the settings of the paper's text, 60 % of the
            pairs and a weight decay of 0.06; none to leave it out.
    """

    train_share: float = 0.3
    weight_decay: float = 0.3
    rate: float = 1e-3
    batch: int = 512
    hidden: int = 64
    modulus: int = 113
    seeds: int = 1
    steps: tuple[int, ...] = STEPS
    text_steps: tuple[int, ...] = (0, 500, 800, 900, 1000, 1100, 1250)
