"""How much memory a piece needs when compiled.

In: a `Piece`. Out: the elements it holds at once.

A contraction is a matrix product, and XLA copies an operand whose axes are in no order that a
matrix product reads, and a product whose axes are in another order than its output. Such a copy is
as large as what it copies, so it counts. What is computed entry by entry and read by one
entry-by-entry operation is fused into that operation and never stored. The rest is a liveness
analysis of these buffers in the order written, which is the order of XLA's scheduler when it is
told to save memory (see `execution`).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tnsim.engine.piece import Operation, Piece

Labels = tuple[int, ...]


class Buffer(NamedTuple):
    """One array of a compiled piece: its elements, the buffers it is computed from.

    `entrywise`: computed entry by entry. `reads_entries`: takes its arguments entry by entry.
    `inside`: elements that a loop's body needs on top while it runs.
    """

    elements: int
    reads: tuple[int, ...] = ()
    entrywise: bool = False
    reads_entries: bool = False
    inside: int = 0


def peak_elements(piece: Piece) -> int:
    """Largest number of elements alive at once: inputs, outputs, intermediates and copies."""
    buffers, outputs = _lowered(piece)
    fused = _fused(buffers, outputs)
    last: dict[int, int] = {}
    reads = [_stored(buffer.reads, buffers, fused) for buffer in buffers]
    for number, stored in enumerate(reads):
        if number not in fused:
            last.update(dict.fromkeys(stored, number))
    last.update(dict.fromkeys(outputs, len(buffers)))

    inputs = len(piece.shapes)
    alive = sum(buffer.elements for buffer in buffers[:inputs])
    alive += _copied_outputs(buffers, outputs, inputs)
    peak = alive
    for number in range(inputs, len(buffers)):
        if number in fused:
            continue
        buffer = buffers[number]
        alive += buffer.elements
        peak = max(peak, alive + buffer.inside)
        ended = {n for n in reads[number] if last[n] == number and n >= inputs}
        if number not in last:
            ended.add(number)
        alive -= sum(buffers[n].elements for n in ended)
    return peak


def loops(piece: Piece) -> int:
    """Number of buffers that a loop over entries computes, and not a matrix product."""
    buffers, outputs = _lowered(piece)
    fused = _fused(buffers, outputs)
    inside = sum(op.body.loops for op in piece.operations if op.body)
    return inside + sum(
        buffer.reads_entries for number, buffer in enumerate(buffers) if number not in fused
    )


def _copied_outputs(buffers: list[Buffer], outputs: list[int], inputs: int) -> int:
    """An output that is an input, or another output once more, is a buffer of its own."""
    copies = [n for n in outputs if n < inputs]
    for number, count in Counter(outputs).items():
        if number >= inputs:
            copies += [number] * (count - 1)
    return sum(buffers[n].elements for n in copies)


def _fused(buffers: list[Buffer], outputs: list[int]) -> set[int]:
    """Buffers that are never stored, because their only reader computes them entry by entry."""
    readers: dict[int, set[int]] = {}
    for number, buffer in enumerate(buffers):
        for read in buffer.reads:
            readers.setdefault(read, set()).add(number)
    found = set()
    for number, by in readers.items():
        alone = len(by) == 1 and number not in outputs
        if alone and buffers[number].entrywise and buffers[min(by)].reads_entries:
            found.add(number)
    return found


def _stored(reads: tuple[int, ...], buffers: list[Buffer], fused: set[int]) -> set[int]:
    """The stored buffers behind some that may be fused."""
    found: set[int] = set()
    for number in reads:
        if number in fused:
            found |= _stored(buffers[number].reads, buffers, fused)
        else:
            found.add(number)
    return found


def _lowered(piece: Piece) -> tuple[list[Buffer], list[int]]:
    """All buffers of a piece, inputs first, and the numbers of its outputs."""
    lowering = _Lowering(piece)
    for number, operation in enumerate(piece.operations, len(piece.shapes)):
        lowering.add_operation(operation, math.prod(piece.value_shapes[number]))
    return lowering.buffers, [lowering.values[n] for n in piece.outputs]


class _Lowering:
    """The buffers of a piece, as `execution` lowers its operations; equal copies are made once."""

    def __init__(self, piece: Piece):
        self.buffers = [Buffer(math.prod(shape)) for shape in piece.shapes]
        self.values = list(range(len(piece.shapes)))
        self.copies: dict[tuple[int, Labels], int] = {}

    def add(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def add_operation(self, op: Operation, elements: int) -> None:
        reads = tuple(self.values[a] for a in op.args)
        if op.body is not None:  # a loop: the running total and what one turn adds to it
            added = self.add(Buffer(2 * elements, reads, inside=op.body.peak_elements))
        elif op.kind == "sum":
            added = self.add(Buffer(elements, reads, entrywise=True, reads_entries=True))
        elif len(reads) == 1:
            added = self.reduction(reads[0], op, elements)
        else:
            added = self.contraction(reads, op, elements)
        self.values.append(added)

    def copy(self, read: int, labels: Labels, order: Labels) -> int:
        """A buffer with its axes in another order."""
        key = (read, tuple(labels.index(x) for x in order))
        if key not in self.copies:
            self.copies[key] = self.add(Buffer(self.buffers[read].elements, (read,)))
        return self.copies[key]

    def reduction(self, read: int, op: Operation, elements: int) -> int:
        (labels,) = op.labels
        if labels == op.output:
            return read
        if sorted(labels) == sorted(op.output):
            return self.copy(read, labels, op.output)
        return self.add(Buffer(elements, (read,), reads_entries=True))

    def contraction(self, reads: tuple[int, ...], op: Operation, elements: int) -> int:
        """One of the three forms of `execution._contract`."""
        first, second = op.labels
        shared = [x for x in first if x in second]
        summed = tuple(x for x in shared if x not in op.output)
        batch = tuple(x for x in shared if x in op.output)
        left = tuple(x for x in first if x not in second)
        right = tuple(x for x in second if x not in first)
        if not summed:
            return self.add(Buffer(elements, reads, entrywise=True, reads_entries=True))
        if not (left and right) and (batch or not (left or right)):
            return self.add(Buffer(elements, reads, reads_entries=True))
        factors = (
            self.factor(reads[0], first, batch, left, summed),
            self.factor(reads[1], second, batch, right, summed),
        )
        product = self.add(Buffer(elements, factors))
        in_place = op.output == batch + left + right or op.output == right + left
        return product if in_place else self.add(Buffer(elements, (product,)))

    def factor(self, read: int, labels: Labels, batch: Labels, own: Labels, summed: Labels) -> int:
        """An operand of a matrix product: its summed axes stand together, beside its own."""
        order = batch + own + summed
        if labels in (order, batch + summed + own):
            return read
        return self.copy(read, labels, order)
