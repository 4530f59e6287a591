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
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from tnsim.engine.products import Labels, matrix_product

if TYPE_CHECKING:
    from tnsim.engine.piece import Operation, Piece


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
    """The buffers of a piece, as `lowering` lowers its operations; equal copies are made once."""

    def __init__(self, piece: Piece):
        self.buffers = [Buffer(math.prod(shape)) for shape in piece.shapes]
        self.values = list(range(len(piece.shapes)))
        self.shapes = piece.value_shapes
        self.copies: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}

    def add(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def add_operation(self, op: Operation, elements: int) -> None:
        reads = tuple(self.values[a] for a in op.args)
        if op.body is not None:  # a loop: the running total and what each turn adds to it
            inside = op.together * op.body.peak_elements
            added = self.add(Buffer((1 + op.together) * elements, reads, inside=inside))
        elif op.kind == "sum":
            added = self.add(Buffer(elements, reads, entrywise=True, reads_entries=True))
        elif len(reads) == 1:
            added = self.reduction(reads[0], op, elements)
        else:
            added = self.contraction(reads, op, elements)
        self.values.append(added)

    def copy(self, read: int, labels: Labels, order: Labels, sizes: Mapping[int, int]) -> int:
        """A buffer with its axes in another order, repeated along those that it has not."""
        axes = tuple((labels.index(x), 1) if x in labels else (-1, sizes[x]) for x in order)
        if (read, axes) not in self.copies:
            elements = math.prod(sizes[label] for label in order)
            self.copies[read, axes] = self.add(Buffer(elements, (read,)))
        return self.copies[read, axes]

    def reduction(self, read: int, op: Operation, elements: int) -> int:
        (labels,) = op.labels
        if labels == op.output:
            return read
        if sorted(labels) == sorted(op.output):
            return self.copy(read, labels, op.output, op.sizes(self.shapes))
        return self.add(Buffer(elements, (read,), reads_entries=True))

    def contraction(self, reads: tuple[int, ...], op: Operation, elements: int) -> int:
        """One of the forms of `lowering._contract`."""
        first, second = op.labels
        sizes = op.sizes(self.shapes)
        chosen = matrix_product(first, second, op.output, sizes)
        if chosen is None:
            summed = any(label not in op.output for label in first)
            return self.add(Buffer(elements, reads, entrywise=not summed, reads_entries=True))
        product, swapped = chosen
        arguments = list(zip(reads, op.labels, strict=True))
        factors = []
        for (read, labels), order in zip(
            arguments[::-1] if swapped else arguments, product.orders, strict=True
        ):
            if not product.reads_in_place(order, labels):
                read = self.copy(read, labels, order, sizes)
            factors.append(read)
        result = self.add(Buffer(elements, tuple(factors)))
        if product.result == op.output:
            return result
        return self.add(Buffer(elements, (result,)))
