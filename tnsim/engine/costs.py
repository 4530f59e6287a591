"""How much memory a program needs when compiled.

In: a `Program`. Out: the elements it holds at once.

A contraction is a matrix product, and XLA copies an operand whose axes are in no order that a
matrix product reads, and a product whose axes are in another order than its output. Such a copy is
as large as what it copies, so it counts. What is computed entry by entry and read by one
entry-by-entry operation is fused into that operation and never stored. The rest is a liveness
analysis of these buffers in the order written, which is the order of XLA's scheduler when it is
told to save memory (see `execution`).

[merged from engine/plan_memory]
What a plan takes in memory. In: a plan. Out: elements, bytes.

A program knows what is alive while it runs (`buffers`). Over a whole plan weights stay, and values
that a later stage reads wait for it (`rounds`); what XLA allocates beyond the arrays was measured.

[merged from engine/rounds]
Which stages run at once. In: a plan. Out: rounds of stages, one round after another.

The moments of two models wait for nothing of each other, and a long stage is cut into parts (see
`splitting`) of which few keep all cores busy. So stages that need nothing of one another run at
once. A round waits for its last stage: what is alive at a time, and so the memory, depends on the
plan alone, not on how fast anything runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tnsim.engine.ir.matmul_form import Labels, matrix_product
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.ir.stages import PlanStage, Schedule
from tnsim.sessions import per_object_cache

CACHED, WRITING = 2**20, 128
"""An element of an intermediate beyond CACHED elements leaves the processor's cache, and costs
about as much as WRITING multiplications."""


class Buffer(NamedTuple):
    """One array of a compiled program: its elements, the buffers it is computed from.

    `entrywise`: computed entry by entry. `reads_entries`: takes its arguments entry by entry.
    `inside`: elements that a loop's body needs on top while it runs.
    """

    elements: int
    reads: tuple[int, ...] = ()
    entrywise: bool = False
    reads_entries: bool = False
    inside: int = 0


@per_object_cache
def peak_elements(program: Program) -> int:
    """Largest number of elements alive at once: inputs, outputs, intermediates and copies."""
    buffers, outputs = _lowered(program)
    fused = _fused(buffers, outputs)
    last: dict[int, int] = {}
    reads = [_stored(buffer.reads, buffers, fused) for buffer in buffers]
    for number, stored in enumerate(reads):
        if number not in fused:
            last.update(dict.fromkeys(stored, number))
    last.update(dict.fromkeys(outputs, len(buffers)))

    inputs = len(program.shapes)
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


@per_object_cache
def loops(program: Program) -> int:
    """Number of buffers that a loop over entries computes, and not a matrix product."""
    buffers, outputs = _lowered(program)
    fused = _fused(buffers, outputs)
    inside = sum(loops(op.body) for op in program.operations if op.body)
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


def _lowered(program: Program) -> tuple[list[Buffer], list[int]]:
    """All buffers of a program, inputs first, and the numbers of its outputs."""
    lowering = _Lowering(program)
    for number, operation in enumerate(program.operations, len(program.shapes)):
        lowering.add_operation(operation, math.prod(program.value_shapes[number]))
    return lowering.buffers, [lowering.values[n] for n in program.outputs]


class _Lowering:
    """The buffers of a program, as `lowering` lowers its operations; equal copies are made once."""

    def __init__(self, program: Program):
        self.buffers = [Buffer(math.prod(shape)) for shape in program.shapes]
        self.values = list(range(len(program.shapes)))
        self.shapes = program.value_shapes
        self.copies: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}

    def add(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def add_operation(self, op: Operation, elements: int) -> None:
        reads = tuple(self.values[a] for a in op.args)
        if op.body is not None:  # a loop: the running total and what each turn adds to it
            inside = op.concurrency * peak_elements(op.body)
            added = self.add(Buffer((1 + op.concurrency) * elements, reads, inside=inside))
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


# Measured by benchmarks/memory.py. A matrix product packs its operands in blocks, and XLA orders
# operations of its own, in long compiled programs rather differently.
SLACK, LONG_SLACK, LONG = 1.08, 1.4, 100


# What compiling takes in a process that has compiled nothing before: XLA itself, and every loop of
# the compiled programs that are compiled at once (matrix products are calls of a library), which
# later ones take over from those that are done. Programs of stacked runs have loops over all runs.
PROGRAM_BYTES, LOOP_BYTES, REPEATING_BYTES = 112 * 2**20, 2253 * 2**10, 86 * 2**20


_AT_ONCE = 2  # long compiled programs; short ones beside them weigh little


def plan_peak_elements(
    shapes: Mapping[str, tuple[int, ...]], rounds: Sequence[ParallelGroup]
) -> int:
    """Largest number of elements alive at once: what is read, and in every round what it needs."""
    read = sum(math.prod(shape) for shape in shapes.values())
    return max([read, *(each.elements for each in rounds)])


def allocated_bytes(programs: Sequence[Program], array_bytes: int) -> int:
    """Bytes of all arrays alive at once, with what XLA allocates around them."""
    longest = max((program.length for program in programs), default=0)
    slack = LONG_SLACK if longest > LONG else SLACK
    return math.ceil(slack * array_bytes)


def program_bytes(plan: Schedule) -> int:
    """Bytes that compiling takes, the first time in a process."""
    compiled_loops = sum(sorted(loops(program) for program in plan.programs)[-_AT_ONCE:])
    repeating = REPEATING_BYTES if plan.runs > 1 else 0
    return PROGRAM_BYTES + LOOP_BYTES * compiled_loops + repeating


Sizes = dict[str, int]


class ParallelGroup(NamedTuple):
    """Stages that run at once.

    Args:
        stages: Their numbers.
        own: Elements that they need themselves.
        elements: Alive at once while they run: their own, and those of values that wait.
        last_read: Names of the values, arrays of the plan apart, that nothing reads after them.
    """

    stages: tuple[int, ...]
    own: int
    elements: int
    last_read: tuple[str, ...]


def rounds(plan: Schedule) -> tuple[ParallelGroup, ...]:
    """Every stage in a round after those of what it reads.

    As few rounds as go without more memory than the stages need one after another.
    """
    one_by_one = tuple(_rounds(plan, at_most=0))
    if len(plan.stages) < 2:
        return one_by_one
    return tuple(_rounds(plan, at_most=max(each.elements for each in one_by_one)))


def _rounds(plan: Schedule, at_most: int) -> Iterator[ParallelGroup]:
    """Rounds of as many stages as fit in so many elements, at least one each."""
    alive = {name: math.prod(shape) for name, shape in plan.shapes.items()}
    readers = _readers(plan)
    left = dict(enumerate(plan.stages))
    while left:
        chosen: dict[int, PlanStage] = {}
        for number, stage in left.items():
            if not alive.keys() >= set(stage.inputs):
                continue
            with_it = sum(_elements(plan, alive, [*chosen.values(), stage]))
            if not chosen or with_it <= at_most:
                chosen[number] = stage
        own, waiting = _elements(plan, alive, list(chosen.values()))
        read: list[str] = []
        for number, stage in chosen.items():
            del left[number]
            alive |= _given(plan, stage)
            read += [name for name in set(stage.inputs) if name in readers]
        for name in read:
            readers[name] -= 1
        last_read = tuple(name for name in dict.fromkeys(read) if not readers[name])
        for name in last_read:
            del alive[name]
        yield ParallelGroup(tuple(chosen), own, own + waiting, last_read)


def _elements(plan: Schedule, alive: Sizes, stages: list[PlanStage]) -> tuple[int, int]:
    """Elements alive while some stages run: their own, and those that none of them reads."""
    read = {name for stage in stages for name in stage.inputs}
    own = sum(peak_elements(plan.programs[stage.program]) for stage in stages)
    return own, sum(size for name, size in alive.items() if name not in read)


def _readers(plan: Schedule) -> dict[str, int]:
    """How many stages read each value that is not kept to the end."""
    readers: dict[str, int] = {}
    for stage in plan.stages:
        for name in set(stage.inputs) - set(plan.shapes) - set(plan.outputs):
            readers[name] = readers.get(name, 0) + 1
    return readers


def _given(plan: Schedule, stage: PlanStage) -> Sizes:
    """Elements of what a stage hands out."""
    program = plan.programs[stage.program]
    outputs = zip(stage.outputs, program.outputs, strict=True)
    return {name: math.prod(program.value_shapes[output]) for name, output in outputs}
