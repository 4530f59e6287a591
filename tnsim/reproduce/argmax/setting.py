"""The paper's sizes and rates. In: nothing. Out: `Setting`."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Setting:
    """Of one bilinear layer without biases, trained with Adam at a constant rate.

    Args:
        distributions: Of the inputs, by name; all but `spikes-text` are the paper's nine.
        seeds: Trainings on every distribution, of which all pairs of checkpoints are compared.
        repetitions: Of the whole, with other seeds; the paper has one.
        steps: At which a checkpoint is kept; the last one ends the training.
        rank: Hidden units.
        batch: Inputs of a step, all new.
        rate: Of Adam.
        samples: Inputs on which outputs are compared.
    """

    distributions: tuple[str, ...] = (
        "gaussian",
        "half-gaussian",
        "bimodal",
        "uniform",
        "laplace",
        "spikes",
        "permutations",
        "correlated",
        "last-is-minus-10",
        "spikes-text",
    )
    seeds: int = 5
    repetitions: int = 3
    steps: tuple[int, ...] = STEPS
    rank: int = 32
    batch: int = 512
    rate: float = 1e-2
    samples: int = 50_000
