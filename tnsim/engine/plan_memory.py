"""What a plan takes in memory. In: a plan. Out: elements, bytes.

A piece knows what is alive while it runs (`buffers`). Over a whole plan weights stay, and values
that a later stage reads wait for it; what XLA allocates beyond the arrays was measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tnsim.engine.plan import Plan

# Measured by benchmarks/memory.py. A matrix product packs its operands in blocks, and XLA orders
# operations of its own, in long programs rather differently.
SLACK, LONG_SLACK, LONG = 1.08, 1.4, 120
# What compiling takes: once, for every loop that is compiled (matrix products are library calls),
# and once more where runs are repeated, for what is set up between them.
PROGRAM_BYTES, LOOP_BYTES, REPEATING_BYTES = 46 * 2**20, 330 * 2**10, 36 * 2**20


def peak_elements(plan: Plan) -> int:
    """Largest number of elements alive at once: weights, values that wait, the stage that runs."""
    # The last stage that reads each value; what is asked for is read after all of them.
    last: dict[str, int] = {}
    for n, stage in enumerate(plan.stages):
        last |= dict.fromkeys(stage.inputs, n)
    last |= dict.fromkeys(plan.outputs, len(plan.stages))
    alive = {name: math.prod(shape) for name, shape in plan.shapes.items()}
    peak = sum(alive.values())
    for n, stage in enumerate(plan.stages):
        piece, read = plan.pieces[stage.piece], set(stage.inputs)
        waiting = sum(size for name, size in alive.items() if name not in read)
        peak = max(peak, waiting + piece.peak_elements)
        for name, output in zip(stage.outputs, piece.outputs, strict=True):
            alive[name] = math.prod(piece.value_shapes[output])
        for name in (*stage.inputs, *stage.outputs):
            if last.get(name, n) == n and name not in plan.shapes:
                alive.pop(name, None)
    return peak


def allocated_bytes(plan: Plan) -> int:
    """Bytes of all arrays alive at once, with what XLA allocates around them."""
    longest = max((piece.length for piece in plan.pieces), default=0)
    slack = LONG_SLACK if longest > LONG else SLACK
    return math.ceil(slack * plan.array_bytes)


def program_bytes(plan: Plan) -> int:
    """Bytes that compiling takes, the first time in a process."""
    loops = sum(piece.loops for piece in plan.pieces)
    repeating = REPEATING_BYTES if plan.runs > 1 else 0
    return PROGRAM_BYTES + LOOP_BYTES * loops + repeating
