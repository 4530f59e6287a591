"""What a plan takes in memory. In: a plan. Out: elements, bytes.

A piece knows what is alive while it runs (`buffers`). Over a whole plan weights stay, and values
that a later stage reads wait for it (`rounds`); what XLA allocates beyond the arrays was measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tnsim.engine.plan import Plan

# Measured by benchmarks/memory.py. A matrix product packs its operands in blocks, and XLA orders
# operations of its own, in long programs rather differently.
SLACK, LONG_SLACK, LONG = 1.08, 1.4, 100
# What compiling takes in a process that has compiled nothing before: XLA itself, and every loop of
# the programs that are compiled at once (matrix products are calls of a library), which later ones
# take over from those that are done. Programs of stacked runs have loops over all runs.
PROGRAM_BYTES, LOOP_BYTES, REPEATING_BYTES = 112 * 2**20, 2253 * 2**10, 86 * 2**20
_AT_ONCE = 2  # long programs; short ones beside them weigh little


def peak_elements(plan: Plan) -> int:
    """Largest number of elements alive at once: what is read, and in every round what it needs."""
    read = sum(math.prod(shape) for shape in plan.shapes.values())
    return max([read, *(each.elements for each in plan.rounds)])


def allocated_bytes(plan: Plan) -> int:
    """Bytes of all arrays alive at once, with what XLA allocates around them."""
    longest = max((piece.length for piece in plan.pieces), default=0)
    slack = LONG_SLACK if longest > LONG else SLACK
    return math.ceil(slack * plan.array_bytes)


def program_bytes(plan: Plan) -> int:
    """Bytes that compiling takes, the first time in a process."""
    loops = sum(sorted(piece.loops for piece in plan.pieces)[-_AT_ONCE:])
    repeating = REPEATING_BYTES if plan.runs > 1 else 0
    return PROGRAM_BYTES + LOOP_BYTES * loops + repeating
