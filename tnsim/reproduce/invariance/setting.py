"""Sizes of the networks that are copied. In: nothing. Out: `Setting`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Sizes and samples.

    Args:
        inputs: Of the networks of one layer; the last one is zero in the data.
        hidden: Their units.
        outputs: Of them.
        deep_width: Of the networks of two layers.
        networks: Random networks, one for each seed.
        noise: Size of a small change of the weights, relative to them.
        samples: Inputs for what is estimated.
    """

    inputs: int = 16
    hidden: int = 48
    outputs: int = 8
    deep_width: int = 8
    networks: int = 3
    noise: float = 0.01
    samples: int = 65536
