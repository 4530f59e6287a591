"""The memory and the seconds of programs and plans, and the rounds of stages that run at once.

*Programs* (`working_elements`). A value is alive from the operation that computes it to the last
one that reads it, in the order written. Beside it stand the copies that an operation takes: NumPy
multiplies matrices where they stand, and copies an argument or a result of any other order of axes
(`ir/matmul_form: host_product`). Where operations run at once, none runs far ahead of the others
(`stage_elements`), so memory depends on the program alone there too.

*Rounds* (`rounds`). The moments of two models do not depend on each other, and a long stage is cut
into parts (see `planner`), few of which keep all cores busy alone. Stages that do not
depend on each other therefore run at once, in a round. A round ends with its last stage: the
arrays alive at any time, and so the memory, depend on the plan alone and not on the speed of any
stage. Over a whole plan weights stay alive, and a value stays alive until the last stage that reads
it.

*XLA* takes the same arrays, times a factor that was measured (`COMPILED`), and memory for compiling
(`program_bytes`): it orders operations itself, packs what it multiplies, and stores no value that
it computes inside its only reader.

*Seconds* (`host_seconds`) are those of NumPy, at speeds that are written down.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tnsim.engine.ir.matmul_form import host_product
from tnsim.engine.ir.program import Labels, Operation, Program, Schedule, WholePlan, n_iterations
from tnsim.sessions import per_object_cache

CACHED, WRITING = 2**20, 128
"""An intermediate of more than CACHED elements leaves the processor's cache, and writing each of
its elements costs about as much as WRITING multiplications."""
AT_ONCE = 4
"""Most stages, or operations of a stage, that run at once: calls of NumPy begin under Python's
lock."""
AHEAD = 8
"""Most operations by which one that runs stands behind the first one that is not done."""
_MIDDLE = 2**21, 2**28
"""Multiplications of the largest product of a program whose operations run at once: handing on
smaller ones takes as long as they do, and blocks of larger ones keep all cores as busy."""
_REPAYS = 1.5
"""Least time of a program's operations one after another, in times of its longest chain."""
_AT_ONCE_BYTES = 2**29
"""Bytes that stages may take to run at once, where stages one by one need less: by the speeds
below, two language models of width 64 take .42 s on two threads in place of .75."""
_AT_ONCE_SECONDS = 0.2
"""Seconds from which a plan may take so much: a short plan gains nothing by several threads."""
COMPILED = 1.4
"""Most bytes that compiled programs allocated in `benchmarks/memory.py`, beside those of compiling,
as a multiple of those that NumPy takes (1.25), and some room."""
PROGRAM_BYTES, LOOP_BYTES, REPEATING_BYTES = 112 * 2**20, 5 * 2**18, 86 * 2**20
"""Memory of compiling in a process that has compiled nothing before: XLA itself, every loop over
entries of the programs that are compiled at once (matrix products are calls of a library), and the
loops over runs of plans that run several times. Later programs reuse the memory of programs that
are done."""
_COMPILED_AT_ONCE = 2  # long programs that are compiled at once; short programs add little
Sizes = dict[str, int]


def program_bytes(plan: Schedule) -> int:
    """Bytes that compiling a plan takes, the first time in a process."""
    compiled_loops = sum(sorted(map(_loops, plan.programs))[-_COMPILED_AT_ONCE:])
    repeating = REPEATING_BYTES if plan.runs > 1 else 0
    return PROGRAM_BYTES + LOOP_BYTES * compiled_loops + repeating


@per_object_cache
def _loops(program: Program) -> int:
    """The number of operations that XLA computes in a loop over entries, not as matrix products."""
    count = 0
    for op, sizes in zip(program.operations, program.sizes, strict=True):
        form = None
        if op.body is not None:
            count += _loops(op.body)
            continue
        if op.is_product:
            form = host_product(op.labels[0], op.labels[1], op.output, sizes)
        count += form is None or not (form.product.left and form.product.right)
    return count


class Round(NamedTuple):
    """Stages that run at once.

    Args:
        stages: Numbers of the stages.
        at_once: Most stages that run at the same time.
        own: Elements that the stages take themselves, with their outputs.
        elements: Elements alive while the stages run: `own`, and all values for them and later.
        seconds: Seconds that the stages take one after another in NumPy.
        last_read: Names of the values that no later stage reads; arrays and outputs of the plan
            are never among them.
    """

    stages: tuple[int, ...]
    at_once: int
    own: int
    elements: int
    seconds: float
    last_read: tuple[str, ...]


@per_object_cache
def rounds(whole: WholePlan, programs: tuple[Program, ...], item: int) -> tuple[Round, ...]:
    """The rounds of a plan; every stage runs in a round after the rounds of the stages it reads.

    Rounds hold as many stages as fit in the memory that the stages need one by one.

    Args:
        whole: Stages of the plan.
        programs: Program of each stage, on stacks where the plan runs on stacks.
        item: Bytes of an element.
    """
    working = [stage_elements(program) for program in programs]
    seconds = [host_seconds(program, item) for program in programs]
    read: Sizes = {}
    given = []
    for stage, program in zip(whole.stages, programs, strict=True):
        read.update(zip(stage.inputs, map(math.prod, program.shapes), strict=True))
        given.append([math.prod(program.value_shapes[output]) for output in program.outputs])
    kept = {*whole.names, *whole.outputs}

    def own(chosen: Sequence[int]) -> int:
        # Inputs are not part of what a program needs. Of stages that do not run, outputs remain.
        outputs = sum(sum(given[n]) for n in chosen)
        return outputs + min(len(chosen), AT_ONCE) * max(working[n] for n in chosen)

    def within(at_most: int) -> Iterator[Round]:
        """Rounds of as many stages as fit in `at_most` elements, at least one stage each."""
        alive = {name: size for name, size in read.items() if name in whole.names}
        # How many stages are still to read each value.
        readers = Counter(name for stage in whole.stages for name in set(stage.inputs) - kept)
        left = dict(enumerate(whole.stages))
        while left:
            chosen: list[int] = []
            others = sum(alive.values())
            # Stages in order, each taken where its inputs exist and memory allows.
            for number, stage in left.items():
                if not alive.keys() >= set(stage.inputs):
                    continue
                if not chosen or others + own([*chosen, number]) <= at_most:
                    chosen.append(number)
            names: list[str] = []
            for number in chosen:
                stage = left.pop(number)
                alive.update(zip(stage.outputs, given[number], strict=True))
                names += [name for name in set(stage.inputs) if name in readers]
            readers.subtract(names)
            last_read = tuple(name for name in dict.fromkeys(names) if not readers[name])
            for name in last_read:
                del alive[name]
            total, taken = sum(seconds[n] for n in chosen), own(chosen)
            at_once = min(len(chosen), AT_ONCE)
            yield Round(tuple(chosen), at_once, taken, others + taken, total, last_read)

    # At most 0 elements leaves each round with a single stage, the minimum a round has. As much
    # memory as these rounds need at most is allowed to rounds of several stages.
    one_by_one = tuple(within(0))
    if len(one_by_one) < 2:
        return one_by_one
    at_least = _AT_ONCE_BYTES // item if sum(seconds) > _AT_ONCE_SECONDS else 0
    return tuple(within(max(at_least, *(each.elements for each in one_by_one))))


def peak_elements(program: Program) -> int:
    """The largest number of elements alive at once: inputs, outputs, intermediates and copies."""
    outputs = [program.value_shapes[output] for output in program.outputs]
    return working_elements(program) + sum(map(math.prod, (*program.shapes, *outputs)))


@per_object_cache
def working_elements(program: Program) -> int:
    """The largest number of elements alive at once, beside inputs and outputs.

    A value is alive from its operation to the last one that reads it, and copies that an operation
    needs are alive beside it.
    """
    return max((sum(each) for each in _memory(program)), default=0)


@per_object_cache
def stage_elements(program: Program) -> int:
    """The same for the program of a stage, whose operations may run at once.

    While the first operation that is not done runs, only operations up to `AHEAD` places behind it
    have run, and nothing is freed that one of these or a later one reads.
    """
    return peak_at_once(_memory(program)) if runs_at_once(program) else working_elements(program)


class Memory(NamedTuple):
    """Elements that an operation takes where operations run one after another.

    Attributes:
        alive: Elements alive before it.
        added: Elements that its result adds to these.
        beside: Elements of copies, which it takes while it runs.
    """

    alive: int
    added: int
    beside: int


def peak_at_once(operations: Sequence[Memory]) -> int:
    """The largest number of elements alive at once where operations run at once."""
    most = 0
    for n, one in enumerate(operations):
        near = operations[n : n + AHEAD + 1]
        added = sum(max(each.added, 0) for each in near)
        most = max(most, one.alive + added + AT_ONCE * max(each.beside for each in near))
    return most


def _memory(program: Program) -> list[Memory]:
    shapes, first = program.value_shapes, len(program.shapes)
    kept, places = set(program.outputs), overwritten(program)
    alive, rows = 0, []
    for n, op in enumerate(program.operations):
        number = first + n
        size = math.prod(shapes[number])
        written_over = places[n]
        added = (number not in kept) * size - (written_over is not None) * size
        rows.append(Memory(alive, added, beside(op, program.sizes[n], size)))
        alive += added
        for a in set(op.args):
            is_gone = written_over is not None and op.args[written_over] == a
            if program.readers[a][-1] == n and a >= first and a not in kept and not is_gone:
                alive -= math.prod(shapes[a])
    return rows


@per_object_cache
def runs_at_once(program: Program) -> bool:
    """Whether NumPy runs operations of a stage at once, on the threads of a pool.

    Args:
        program: Program of a stage.

    Example:
        >>> products = [Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))] * 2
        >>> joined = Operation("contract", (2, 3), ((0, 1), (1, 2)), (0, 2))
        >>> runs_at_once(Program(((256, 256),) * 2, (*products, joined), (4,)))
        True
    """
    least, most = _MIDDLE
    if not least <= max(program.costs, default=0) < most:
        return False
    if any(op.body is not None for op in program.operations):
        return False  # its turns run at once
    first, total = len(program.shapes), 0.0
    ends = [0.0] * first  # when each value is there, if every operation runs as soon as it may
    for op, sizes in zip(program.operations, program.sizes, strict=True):
        seconds = host_seconds_of(op, sizes, 8)
        total += seconds
        ends.append(seconds + max(ends[a] for a in op.args))
    return total >= _REPAYS * max(ends)


@per_object_cache
def overwritten(program: Program) -> tuple[int | None, ...]:
    """For each operation the place of the argument that NumPy writes its result over, if any.

    An argument is written over by a sum or by a product entry by entry that reads it last, where
    it is an array of its own in the order of the result. In memory of their own, 105 pairings of
    width 32 take 1.14 times as long.

    Args:
        program: Program that NumPy runs.

    Example:
        >>> square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
        >>> cube = Operation("contract", (0, 1), ((0,), (0,)), (0,))
        >>> overwritten(Program(((4,),), (square, cube), (2,)))
        (None, 1)
    """
    first = len(program.shapes)
    # Values that certainly share no memory with another value.
    own = {n for n, op in enumerate(program.operations, first) if op.kind != "loop"}
    own.difference_update(program.outputs)
    found: list[int | None] = []
    for n, op in enumerate(program.operations):
        place = None
        if op.kind == "sum" or op.is_product:
            for slot, a in enumerate(op.args):
                is_last = a in own and program.readers[a][-1] == n and op.args.count(a) == 1
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
        return count * (working_elements(op.body) + outputs + slices + size) + size * (count > 1)
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
    return max(1, min(loop.concurrency, count))


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
    sized = zip(program.operations, program.sizes, strict=True)
    return sum(host_seconds_of(op, sizes, item) for op, sizes in sized)


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
