"""The cut of a long program into short parts, which run one after another.

XLA's compile time grows faster than linearly in the length of a program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from tnsim.engine.ir.program import Program

MAX_OPERATIONS = 200
"""Most operations of a program; longer programs are split, as XLA's time is not linear."""


class StageSlice(NamedTuple):
    """A part of a program.

    Args:
        program: Program of the part.
        takes: Numbers of its inputs in the whole program.
        gives: Numbers of its outputs in the whole program.
    """

    program: Program
    takes: tuple[int, ...]
    gives: tuple[int, ...]


def split(program: Program, limit: int) -> Iterator[StageSlice]:
    """The parts of a program, nearly equally long, in the order in which they run.

    The last part has the outputs and the scales of the whole program.

    Args:
        program: Program of any length.
        limit: Most operations of a part.
    """
    count = len(program.operations)
    # Compile time grows faster than linearly, so parts of equal length take the least time in
    # total.
    parts = max(1, math.ceil(count / limit))
    for n in range(parts):
        start, stop = round(count * n / parts), round(count * (n + 1) / parts)
        yield _part(program, start, stop, last=n == parts - 1)


def _part(program: Program, start: int, stop: int, last: bool) -> StageSlice:
    """The part with the operations from `start` up to but without `stop`."""
    inputs = len(program.shapes)
    operations = program.operations[start:stop]
    inside = range(inputs + start, inputs + stop)
    if last:
        gives = program.outputs
    else:
        # A part gives only what a later part or the caller reads; the rest is freed at its end.
        later = set(program.outputs).union(*(op.args for op in program.operations[stop:]))
        gives = tuple(number for number in inside if number in later)
    # The last part may give values that an earlier part computed, without an operation that reads
    # them.
    read = set(gives).union(*(op.args for op in operations))
    whole = start == 0 and last
    # A program that stays whole keeps the inputs that it does not read, as its stage names all.
    takes = tuple(range(inputs)) if whole else tuple(sorted(read.difference(inside)))
    # Inputs of the part first, then its operations, as the numbering of a program demands.
    numbers = {number: n for n, number in enumerate((*takes, *inside))}
    renumbered = []
    for operation in operations:
        args = tuple(numbers[arg] for arg in operation.args)
        renumbered.append(operation._replace(args=args))
    part = Program(
        shapes=tuple(program.value_shapes[number] for number in takes),
        operations=tuple(renumbered),
        outputs=tuple(numbers[number] for number in gives),
        # Scales are read off outputs, which are complete after the last part only.
        scales=program.scales if last else (),
        powers=program.powers if last else ((),) * len(gives),
        unshared=program.unshared if last else 0,
    )
    return StageSlice(part, takes, gives)
