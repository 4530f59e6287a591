"""On what the shipped checkpoints are compared. In: nothing. Out: `Setting`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Sizes of what is measured.

    Args:
        positions: On which functions are compared.
        context: Tokens of a sequence.
        shortest, longest: tokens of the segment that a sequence repeats.
        sequences: On which behaviour is measured.
    """

    positions: int = 4
    context: int = 16
    shortest: int = 4
    longest: int = 8
    sequences: int = 2000
