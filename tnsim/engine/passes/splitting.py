"""The cut of a long program into short parts, which run one after another.

XLA's compile time grows faster than linearly in the length of a program. A loop whose turns may run
at once also becomes a part of its own, because its turns are calls of a compiled program.
"""

from __future__ import annotations

import itertools
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

    A loop whose turns may run at once is a part of its own. The last part has the outputs and the
    scales of the whole program.

    Args:
        program: Program of any length.
        limit: Most operations of a part.
    """
    *first, last = _bounds(program, limit)
    for start, stop in first:
        yield _part(program, start, stop, last=False)
    yield _part(program, *last, last=True)


def _bounds(program: Program, limit: int) -> Iterator[tuple[int, int]]:
    """The first operation and the end of each part."""
    count = len(program.operations)
    start = 0
    for n, operation in enumerate(program.operations):
        if operation.concurrency > 1:
            yield from _evenly(start, n, limit)
            yield n, n + 1
            start = n + 1
    # Outputs of a loop at the end are complete only after all turns have been added up, outside the
    # compiled program. Scales are read off outputs, so an empty part behind the loop does so.
    if start == count:  # the last part computes nothing, but gives the outputs and the scales
        yield count, count
    yield from _evenly(start, count, limit)


def _evenly(start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """The bounds of the fewest parts of at most `limit` operations, nearly equally long."""
    count = stop - start
    # Compile time grows faster than linearly, so parts of equal length take the least time in
    # total.
    parts = math.ceil(count / limit)
    bounds = [start + round(count * n / parts) for n in range(parts)]
    yield from itertools.pairwise([*bounds, stop])


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
