"""Long programs cut into short ones. In: a program. Out: programs that are run one after the other.

XLA's compile time grows faster than linearly in the length of a program. A loop whose turns may run
at once is cut out as well: its turns are calls of one program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from tnsim.engine.ir.program import Program


class StageSlice(NamedTuple):
    """A part of a program, with the numbers that its inputs and outputs have in the whole."""

    program: Program
    takes: tuple[int, ...]
    gives: tuple[int, ...]


def split(program: Program, limit: int) -> Iterator[StageSlice]:
    """Parts of at most `limit` operations, nearly equally long, in the order in which they run.

    A loop whose turns may run at once is a part of its own. The last part has the outputs and the
    scales of the whole.
    """
    *first, last = _bounds(program, limit)
    for start, stop in first:
        yield _part(program, start, stop, last=False)
    yield _part(program, *last, last=True)


def _bounds(program: Program, limit: int) -> Iterator[tuple[int, int]]:
    """Where parts start and stop."""
    count = len(program.operations)
    start = 0
    for n, operation in enumerate(program.operations):
        if operation.concurrency > 1:
            yield from _evenly(start, n, limit)
            yield n, n + 1
            start = n + 1
    if start == count:  # nothing is left to be computed, but the whole has outputs and scales
        yield count, count
    yield from _evenly(start, count, limit)


def _evenly(start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """A range cut into as few as go of at most `limit`."""
    count = stop - start
    parts = math.ceil(count / limit)
    bounds = [start + round(count * n / parts) for n in range(parts)]
    yield from itertools.pairwise([*bounds, stop])


def _part(program: Program, start: int, stop: int, last: bool) -> StageSlice:
    """The operations from `start` on and before `stop`."""
    inputs = len(program.shapes)
    operations = program.operations[start:stop]
    inside = range(inputs + start, inputs + stop)
    if last:
        gives = program.outputs
    else:
        later = set(program.outputs).union(*(op.args for op in program.operations[stop:]))
        gives = tuple(number for number in inside if number in later)
    read = set(gives).union(*(op.args for op in operations))
    whole = start == 0 and last
    takes = tuple(range(inputs)) if whole else tuple(sorted(read.difference(inside)))
    numbers = {number: n for n, number in enumerate((*takes, *inside))}
    renumbered = []
    for operation in operations:
        args = tuple(numbers[arg] for arg in operation.args)
        renumbered.append(operation._replace(args=args))
    part = Program(
        shapes=tuple(program.value_shapes[number] for number in takes),
        operations=tuple(renumbered),
        outputs=tuple(numbers[number] for number in gives),
        scales=program.scales if last else (),
        powers=program.powers if last else ((),) * len(gives),
        unshared=program.unshared if last else 0,
    )
    return StageSlice(part, takes, gives)
