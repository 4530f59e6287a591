"""The memory of programs and plans, and the rounds of stages that run at once.

*Programs* (`peak_elements`). A contraction is a matrix product. XLA copies an operand whose axes
stand in no order that a matrix product reads, and a product whose axes stand in another order than
the output. Such a copy is as large as its original, so it counts. A value that is computed entry by
entry and read by a single entry-by-entry operation is fused into that operation and never stored.
The rest is a liveness analysis of these buffers in the order written, which is the order of XLA's
scheduler when it is told to save memory (see `runtime/compiling`).

*Plans* (`plan_peak_elements`, `allocated_bytes`, `program_bytes`). Over a whole plan weights stay
alive, and a value stays alive until the last stage that reads it. The memory that XLA allocates
beyond the arrays was measured.

*Rounds* (`rounds`). The moments of two models do not depend on each other, and a long stage is cut
into parts (see `passes/splitting`), few of which keep all cores busy alone. Stages that do not
depend on each other therefore run at once, in a round. A round ends with its last stage: the
arrays alive at any time, and so the memory, depend on the plan alone and not on the speed of any
stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from tnsim.engine.ir.matmul_form import Labels, host_product, matrix_product
from tnsim.engine.ir.program import Operation, Program, n_iterations
from tnsim.engine.ir.stages import PlanStage, Schedule, WholePlan
from tnsim.sessions import per_object_cache

CACHED, WRITING = 2**20, 128
"""An intermediate of more than CACHED elements leaves the processor's cache, and writing each of
its elements costs about as much as WRITING multiplications."""


_HOST_AT_ONCE = 4
"""Most stages that NumPy runs at once: calls of NumPy begin under Python's lock."""


_AT_ONCE_BYTES = 2**29
"""Bytes that stages may take to run at once in NumPy, where stages one by one need less."""


_AT_ONCE_SECONDS = 0.2
"""Seconds from which a plan may take so much: a short plan gains nothing by several threads."""


_MOST_LANES = 2
"""Most lanes of a loop in NumPy, each of which takes arrays of its own."""


class Buffer(NamedTuple):
    """An array of a compiled program.

    Args:
        elements: Number of elements.
        reads: Numbers of the buffers that the array is computed from.
        entrywise: Whether the array is computed entry by entry.
        reads_entries: Whether the operation reads its arguments entry by entry.
        inside: Elements that the body of a loop needs on top while it runs.
    """

    elements: int
    reads: tuple[int, ...] = ()
    entrywise: bool = False
    reads_entries: bool = False
    inside: int = 0


@per_object_cache
def peak_elements(program: Program) -> int:
    """The largest number of elements alive at once: inputs, outputs, intermediates and copies."""
    buffers, outputs = _lowered_program(program)
    fused = _fused_buffers(buffers, outputs)
    # A fused buffer is computed inside its reader, so its arguments are alive until the reader
    # runs.
    last: dict[int, int] = {}
    reads = [_stored_reads(buffer.reads, buffers, fused) for buffer in buffers]
    for number, stored in enumerate(reads):
        if number not in fused:
            last.update(dict.fromkeys(stored, number))
    # Outputs are alive to the end, whoever reads them before.
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
        # While an operation runs, its result, all its arguments and the room of its body are alive
        # together.
        peak = max(peak, alive + buffer.inside)
        # Inputs belong to the caller and are never freed here.
        ended = {n for n in reads[number] if last[n] == number and n >= inputs}
        # A value that nothing reads is freed at once.
        if number not in last:
            ended.add(number)
        alive -= sum(buffers[n].elements for n in ended)
    return peak


@per_object_cache
def loops(program: Program) -> int:
    """The number of buffers that XLA computes in a loop over entries, not as a matrix product."""
    buffers, outputs = _lowered_program(program)
    fused = _fused_buffers(buffers, outputs)
    inside = sum(loops(op.body) for op in program.operations if op.body)
    return inside + sum(
        buffer.reads_entries for number, buffer in enumerate(buffers) if number not in fused
    )


def _copied_outputs(buffers: list[Buffer], outputs: list[int], inputs: int) -> int:
    """Elements of the copies of outputs that are inputs, or other outputs once more."""
    # XLA gives each output memory of its own: an input handed through, or a value given twice, is
    # copied.
    copies = [n for n in outputs if n < inputs]
    for number, count in Counter(outputs).items():
        if number >= inputs:
            copies += [number] * (count - 1)
    return sum(buffers[n].elements for n in copies)


def _fused_buffers(buffers: list[Buffer], outputs: list[int]) -> set[int]:
    """Numbers of the buffers that are never stored, as their only reader computes their entries."""
    readers: dict[int, set[int]] = {}
    for number, buffer in enumerate(buffers):
        for read in buffer.reads:
            readers.setdefault(read, set()).add(number)
    fused = set()
    for number, by in readers.items():
        alone = len(by) == 1 and number not in outputs
        if alone and buffers[number].entrywise and buffers[min(by)].reads_entries:
            fused.add(number)
    return fused


def _stored_reads(reads: tuple[int, ...], buffers: list[Buffer], fused: set[int]) -> set[int]:
    """Numbers of the stored buffers that some buffers, fused or not, are computed from."""
    stored: set[int] = set()
    for number in reads:
        if number in fused:
            stored |= _stored_reads(buffers[number].reads, buffers, fused)
        else:
            stored.add(number)
    return stored


def _lowered_program(program: Program) -> tuple[list[Buffer], list[int]]:
    """All buffers of a program, inputs first, and the numbers of the output buffers."""
    lowering = _Lowering(program)
    for number, operation in enumerate(program.operations, len(program.shapes)):
        lowering.add_operation(operation, math.prod(program.value_shapes[number]))
    return lowering.buffers, [lowering.values[n] for n in program.outputs]


class _Lowering:
    """The buffers of a program as XLA computes it; equal copies are made once."""

    def __init__(self, program: Program):
        self.buffers = [Buffer(math.prod(shape)) for shape in program.shapes]
        self.values = list(range(len(program.shapes)))
        self.shapes = program.value_shapes
        self.copies: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}

    def add(self, buffer: Buffer) -> int:
        """Append a buffer and return its number."""
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def add_operation(self, op: Operation, elements: int) -> None:
        """Append the buffers of an operation whose result has `elements` elements."""
        reads = tuple(self.values[a] for a in op.args)
        if op.body is not None:  # a loop: the running total and what each turn adds to it
            # Turns that run at once have intermediates of their own, and a summand each beside the
            # running total.
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
        """Number of a copy with its axes in another order, repeated along axes that it lacks."""
        # The key tells where each axis comes from, or how often the array is repeated along it.
        axes = tuple((labels.index(x), 1) if x in labels else (-1, sizes[x]) for x in order)
        if (read, axes) not in self.copies:
            elements = math.prod(sizes[label] for label in order)
            self.copies[read, axes] = self.add(Buffer(elements, (read,)))
        return self.copies[read, axes]

    def reduction(self, read: int, op: Operation, elements: int) -> int:
        """Number of the buffer of a contraction of a single argument.

        An operation that changes nothing takes the buffer of its argument.
        """
        (labels,) = op.labels
        if labels == op.output:
            return read
        if sorted(labels) == sorted(op.output):
            return self.copy(read, labels, op.output, op.sizes(self.shapes))
        return self.add(Buffer(elements, (read,), reads_entries=True))

    def contraction(self, reads: tuple[int, ...], op: Operation, elements: int) -> int:
        """Number of the buffer of a contraction, a matrix product or a loop over entries."""
        first, second = op.labels
        sizes = op.sizes(self.shapes)
        chosen = matrix_product(first, second, op.output, sizes)
        if chosen is None:
            # Without a sum the product is computed entry by entry, and may be fused into its only
            # reader.
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
        return self.add(Buffer(elements, (result,)))  # the copy that puts the axes in order


# Ratio of allocated to planned bytes, measured by benchmarks/memory.py, for programs of up to LONG
# operations and for longer ones. A matrix product packs its operands in blocks, and XLA changes the
# order of operations, in long compiled programs more than in short ones.
SLACK, LONG_SLACK, LONG = 1.08, 1.4, 100


# Memory of compiling in a process that has compiled nothing before: XLA itself, every loop of the
# programs that are compiled at once (matrix products are calls of a library), and the loops over
# runs of plans that run several times. Later programs reuse the memory of programs that are done.
PROGRAM_BYTES, LOOP_BYTES, REPEATING_BYTES = 112 * 2**20, 2253 * 2**10, 86 * 2**20


_AT_ONCE = 2  # long programs that are compiled at once; short programs add little


def plan_peak_elements(
    shapes: Mapping[str, tuple[int, ...]], rounds: Sequence[ParallelGroup]
) -> int:
    """The largest number of elements alive at once, over the arrays read and all rounds."""
    read = sum(math.prod(shape) for shape in shapes.values())
    # A plan without rounds holds its inputs alone.
    return max([read, *(each.elements for each in rounds)])


def allocated_bytes(programs: Sequence[Program], array_bytes: int) -> int:
    """Bytes that XLA allocates for arrays of `array_bytes` bytes alive at once."""
    # The slack is a property of the compiler's schedule, so the longest program decides.
    longest = max((program.length for program in programs), default=0)
    slack = LONG_SLACK if longest > LONG else SLACK
    return math.ceil(slack * array_bytes)


def program_bytes(plan: Schedule) -> int:
    """Bytes that compiling a plan takes, the first time in a process."""
    compiled_loops = sum(sorted(loops(program) for program in plan.programs)[-_AT_ONCE:])
    repeating = REPEATING_BYTES if plan.runs > 1 else 0
    return PROGRAM_BYTES + LOOP_BYTES * compiled_loops + repeating


Sizes = dict[str, int]


class HostRound(NamedTuple):
    """Stages that NumPy runs at once.

    Args:
        stages: Numbers of the stages.
        at_once: Most stages that run at the same time.
        elements: Elements alive while the stages run.
        seconds: Seconds that the stages take one after another.
        last_read: Names of the values that no later stage reads.
    """

    stages: tuple[int, ...]
    at_once: int
    elements: int
    seconds: float
    last_read: tuple[str, ...]


class ParallelGroup(NamedTuple):
    """Stages that run at once.

    Args:
        stages: Numbers of the stages.
        own: Elements that the stages need themselves.
        elements: Elements alive while the stages run: `own`, and values for later stages.
        last_read: Names of the values that no later stage reads; arrays and outputs of the plan
            are never among them.
    """

    stages: tuple[int, ...]
    own: int
    elements: int
    last_read: tuple[str, ...]


def rounds(plan: Schedule) -> tuple[ParallelGroup, ...]:
    """The rounds of a plan; every stage runs in a round after the rounds of the stages it reads.

    Rounds hold as many stages as possible without more memory than the stages need alone.
    """
    programs = [plan.programs[stage.program] for stage in plan.stages]
    own = [peak_elements(program) for program in programs]
    given = [[math.prod(p.value_shapes[output]) for output in p.outputs] for p in programs]
    read = {name: math.prod(shape) for name, shape in plan.shapes.items()}

    # Inputs of running stages are counted in the stages' own peaks, so only other values wait
    # beside them.
    def elements(alive: Sizes, chosen: Sequence[int]) -> int:
        names = {name for n in chosen for name in plan.stages[n].inputs}
        waiting = sum(size for name, size in alive.items() if name not in names)
        return sum(own[n] for n in chosen) + waiting

    fitting = _fitting_rounds(plan.stages, {*plan.shapes, *plan.outputs}, read, given, elements)
    return tuple(
        ParallelGroup(stages, sum(own[n] for n in stages), alive, last_read)
        for stages, alive, last_read in fitting
    )


def host_rounds(whole: WholePlan, programs: Sequence[Program], item: int) -> tuple[HostRound, ...]:
    """The rounds of a plan that NumPy runs, with the memory that they take.

    Args:
        whole: Stages of the plan.
        programs: Program of each stage, on stacks where the plan runs on stacks.
        item: Bytes of an element.
    """
    own = [host_elements(program) for program in programs]
    seconds = [host_seconds(program, item) for program in programs]
    read: Sizes = {}
    given = []
    for stage, program in zip(whole.stages, programs, strict=True):
        read.update(zip(stage.inputs, map(math.prod, program.shapes), strict=True))
        given.append([math.prod(program.value_shapes[output]) for output in program.outputs])

    def at_once(chosen: Sequence[int]) -> int:
        return min(len(chosen), _HOST_AT_ONCE)

    # Inputs are not part of what a program needs. Of stages that do not run, outputs remain.
    def elements(alive: Sizes, chosen: Sequence[int]) -> int:
        outputs = sum(sum(given[n]) for n in chosen)
        return sum(alive.values()) + outputs + at_once(chosen) * max(own[n] for n in chosen)

    at_least = _AT_ONCE_BYTES // item if sum(seconds) > _AT_ONCE_SECONDS else 0
    arrays = {name: size for name, size in read.items() if name in whole.names}
    kept = {*whole.names, *whole.outputs}
    found = []
    for numbers, alive, last_read in _fitting_rounds(
        whole.stages, kept, arrays, given, elements, at_least
    ):
        total = sum(seconds[n] for n in numbers)
        found.append(HostRound(numbers, at_once(numbers), alive, total, last_read))
    return tuple(found)


@per_object_cache
def host_elements(program: Program) -> int:
    """The largest number of elements alive at once in NumPy, beside inputs and outputs.

    A value is alive from its operation to the last one that reads it, and copies that an operation
    needs are alive beside it.
    """
    shapes, first = program.value_shapes, len(program.shapes)
    last = {a: n for n, op in enumerate(program.operations) for a in op.args}
    kept, places = set(program.outputs), overwritten(program)
    alive, peak = 0, 0
    for n, op in enumerate(program.operations):
        number = first + n
        size = math.prod(shapes[number])
        written_over = places[n]
        if written_over is not None:
            alive -= size
        if number not in kept:
            alive += size
        peak = max(peak, alive + beside(op, op.sizes(shapes), size))
        for a in set(op.args):
            is_gone = written_over is not None and op.args[written_over] == a
            if last[a] == n and a >= first and a not in kept and not is_gone:
                alive -= math.prod(shapes[a])
        if number not in last and number not in kept:
            alive -= size
    return peak


@per_object_cache
def overwritten(program: Program) -> tuple[int | None, ...]:
    """For each operation the place of the argument that NumPy writes its result over, if any.

    An argument is written over by a sum or by a product entry by entry that reads it last, where
    it is an array of its own in the order of the result.

    Args:
        program: Program that NumPy runs.

    Example:
        >>> square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
        >>> cube = Operation("contract", (0, 1), ((0,), (0,)), (0,))
        >>> overwritten(Program(((4,),), (square, cube), (2,)))
        (None, 1)
    """
    first = len(program.shapes)
    last = {a: n for n, op in enumerate(program.operations) for a in op.args}
    own = set()  # values that certainly share no memory with another value
    for number, op in enumerate(program.operations, first):
        if op.kind == "sum" or (op.kind == "contract" and len(op.args) == 2):
            own.add(number)
    for op in program.operations:
        if op.kind == "contract" and len(op.args) == 1:  # may give its argument itself
            own.discard(op.args[0])
    own.difference_update(program.outputs)
    found: list[int | None] = []
    for n, op in enumerate(program.operations):
        place = None
        if op.kind == "sum" or (op.kind == "contract" and len(op.args) == 2):
            for slot, a in enumerate(op.args):
                is_last = a in own and last[a] == n and op.args.count(a) == 1
                if is_last and op.labels[slot] == op.output and _is_entrywise(op):
                    place = slot
        found.append(place)
    return tuple(found)


def _is_entrywise(op: Operation) -> bool:
    """Whether every entry of the result is computed from single entries of the arguments."""
    return op.kind == "sum" or all(label in op.output for labels in op.labels for label in labels)


def beside(op: Operation, sizes: Mapping[int, int], size: int) -> int:
    """Elements that NumPy takes for an operation beside its arguments and its result."""
    if op.body is not None:
        count = lanes(op, n_iterations(op, sizes))
        outputs = sum(math.prod(op.body.value_shapes[n]) for n in op.body.outputs)
        slices = 0  # turns read arrays of their own where slices have gaps
        for labels, shape in zip(op.labels, op.body.shapes, strict=True):
            if any(label in op.chunks for label in labels[1:]):
                slices += math.prod(shape)
        return count * (host_elements(op.body) + outputs + slices + size) + size * (count > 1)
    if op.kind == "sum":  # a term is weighted before it is added
        return size * (len(op.args) > 1 and any(abs(weight) != 1.0 for weight in op.weights))
    if len(op.args) == 1:
        return 0 if op.output == tuple(x for x in op.labels[0] if x in op.output) else size
    first, second = op.labels
    form = host_product(first, second, op.output, sizes)
    return 0 if form is None else form.copied(sizes, (first, second))


def lanes(loop: Operation, count: int) -> int:
    """The number of lanes that the turns of a loop are dealt to, each with arrays of its own.

    Args:
        loop: Operation of the kind "loop".
        count: Number of its turns.
    """
    return max(1, min(loop.concurrency, count, _MOST_LANES))


@per_object_cache
def host_elements_of_plan(whole: WholePlan, item: int) -> int:
    """The largest number of elements alive at once where NumPy runs a plan."""
    programs = [whole.programs[stage.program] for stage in whole.stages]
    rounds = host_rounds(whole, programs, item)
    return max((each.elements for each in rounds), default=0)


class Speeds(NamedTuple):
    """Times of NumPy on a single core, for a single dtype.

    Attributes:
        call: Seconds of a call beside its work.
        product: Seconds of a single matrix product of a batch beside its work.
        multiplying: Scalar multiplications a second in a large matrix product.
        passing: Entries a second that are read and written, entry by entry.
    """

    call: float
    product: float
    multiplying: float
    passing: float


USUAL = {
    4: Speeds(1.2e-6, 2.5e-7, 5e10, 1.2e9),
    8: Speeds(1.2e-6, 2.5e-7, 2.5e10, 1e9),
    16: Speeds(1.2e-6, 4e-7, 6e9, 5e8),
}
"""Speeds of two cores of a usual processor, for each number of bytes of an element."""


@per_object_cache
def host_seconds(program: Program, item: int) -> float:
    """Seconds of a run of a program in NumPy, at usual speeds, on a single core.

    Args:
        program: Program that would run.
        item: Bytes of an element.
    """
    return sum(
        host_seconds_of(op, op.sizes(program.value_shapes), item) for op in program.operations
    )


def host_seconds_of(op: Operation, sizes: Mapping[int, int], item: int) -> float:
    """Seconds of an operation in NumPy, at usual speeds, on a single core.

    Args:
        op: Operation of a program.
        sizes: Size of every label.
        item: Bytes of an element.
    """
    speeds = USUAL[item]

    def entries(labels: Labels) -> int:
        return math.prod(sizes[label] for label in labels)

    if op.body is not None:
        return n_iterations(op, sizes) * host_seconds(op.body, item)
    if op.kind == "sum" or len(op.args) == 1:
        passed = sum(max(entries(labels), entries(op.output)) for labels in op.labels)
        return speeds.call * len(op.args) + passed / speeds.passing
    first, second = op.labels
    form = host_product(first, second, op.output, sizes)
    if form is None:
        return speeds.call + math.prod(sizes.values()) / speeds.passing
    batch, left, summed, right = form.product
    m, n, k = entries(left), entries(right), entries(summed)
    # Short sides leave registers unused.
    slowed = (1 + 2 / m) * (1 + 2 / n) * (1 + 2 / k)
    products = entries(batch) * (speeds.product + m * n * k * slowed / speeds.multiplying)
    return speeds.call + products + form.copied(sizes, (first, second)) / speeds.passing


_Chosen = tuple[tuple[int, ...], int, tuple[str, ...]]
"""Numbers of the stages of a round, elements alive, names of values that no later stage reads."""


def _fitting_rounds(
    stages: Sequence[PlanStage],
    kept: Set[str],
    read: Sizes,
    given: Sequence[Sequence[int]],
    elements: Callable[[Sizes, Sequence[int]], int],
    at_least: int = 0,
) -> list[_Chosen]:
    """Rounds of as many stages as fit in the memory that the stages need alone.

    Args:
        stages: Stages of a plan.
        kept: Names of the arrays and outputs of the plan, which stay.
        read: Elements of each array that the plan reads.
        given: Elements of each output of every stage.
        elements: Function of the elements alive by name and of stages; returns the elements alive
            while the stages run.
        at_least: Elements that rounds of several stages may have in any case.
    """
    # At most 0 elements leaves each round with a single stage, the minimum a round has. As much
    # memory as these rounds need at most is allowed to rounds of several stages.
    one_by_one = list(_rounds_within(stages, kept, read, given, elements, 0))
    if len(stages) < 2:
        return one_by_one
    at_most = max(at_least, *(alive for _, alive, _ in one_by_one))
    return list(_rounds_within(stages, kept, read, given, elements, at_most))


def _rounds_within(
    stages: Sequence[PlanStage],
    kept: Set[str],
    read: Sizes,
    given: Sequence[Sequence[int]],
    elements: Callable[[Sizes, Sequence[int]], int],
    at_most: int,
) -> Iterator[_Chosen]:
    """Rounds of as many stages as fit in `at_most` elements, at least one stage each."""
    alive = dict(read)
    # How many stages are still to read each value.
    readers = Counter(name for stage in stages for name in set(stage.inputs) - kept)
    left = dict(enumerate(stages))
    while left:
        chosen: list[int] = []
        # Stages in order, each taken where its inputs exist and memory allows.
        for number, stage in left.items():
            if not alive.keys() >= set(stage.inputs):
                continue
            if not chosen or elements(alive, [*chosen, number]) <= at_most:
                chosen.append(number)
        together = elements(alive, chosen)
        names: list[str] = []
        for number in chosen:
            stage = left.pop(number)
            alive.update(zip(stage.outputs, given[number], strict=True))
            names += [name for name in set(stage.inputs) if name in readers]
        for name in names:
            readers[name] -= 1
        last_read = tuple(name for name in dict.fromkeys(names) if not readers[name])
        for name in last_read:
            del alive[name]
        yield tuple(chosen), together, last_read
