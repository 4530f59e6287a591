"""A loop whose turns run at once. In: a piece that is one loop. Out: what runs it.

A turn is one call of a compiled program that is given the number of the turn. The sums are taken in
the order of the turns, so they are the same to the last bit however many cores there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from tnsim.engine.concurrency import at_once
from tnsim.engine.lowering import run_turn
from tnsim.engine.piece import Piece, turns
from tnsim.engine.stacking import Run


@dataclass(frozen=True)
class Turn:
    """One turn of a piece that is one loop, as the work of a program.

    Its inputs are those of the piece and, as a number of their dtype, that of the turn.
    """

    piece: Piece

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs."""
        return (*self.piece.shapes, ())

    @property
    def length(self) -> int:
        """Number of operations."""
        return self.piece.length


def runs_in_turns(piece: Piece) -> bool:
    """Whether a piece is one loop, turns of which may run at once."""
    return len(piece.operations) == 1 and piece.operations[0].together > 1


def turn(work: Turn, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """What the program of a turn computes."""
    *arrays, number = inputs
    loop = work.piece.operations[0]
    args = [arrays[a] for a in loop.args]
    return [run_turn(loop, args, number.astype(int))], []


def in_turns(work: Turn, program: Run, dtype: str) -> Run:
    """What runs a loop turn by turn.

    Args:
        work: A turn of it.
        program: Compiled from that.
        dtype: Of its arrays.
    """
    loop = work.piece.operations[0]
    count = turns(loop, loop.sizes(work.piece.shapes))

    def one(inputs: list[Any], n: int) -> Any:
        (added,), _ = program([*inputs, np.asarray(n, dtype)])
        return jax.block_until_ready(added)

    def run(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        calls = (partial(one, inputs, n) for n in range(count))
        total = None
        for added in at_once(calls, loop.together):
            total = added if total is None else total + added
        return [total], []

    return run
