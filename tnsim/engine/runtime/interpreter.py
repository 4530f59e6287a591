"""Plans run by NumPy, without compiling: steps bound to memory and called in order.

`ir/steps` says which steps a program has, on which views, and where each value stands in memory.
Here the views are made, once for a stage and once for each lane of a loop, so that a step is the
call of a function on arrays that are there already. Nothing else happens between two steps.

**Small plans.** Making the views takes as long as the steps of a plan of small steps. Such a plan
stays bound, to copies of its arrays: a further run copies the arrays in, and calls the steps.

**Threads.** BLAS runs on one thread while a plan is interpreted. Stages of a round, lanes of a loop
and parts of large steps are shared by the threads of a pool instead, where their work repays waking
a thread. No bit depends on which thread runs what: every sum is taken in an order of the plan's.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from tnsim.engine.costs import InterpretedRound, interpreted, interpreted_rounds
from tnsim.engine.ir.program import Program
from tnsim.engine.ir.stages import WholePlan
from tnsim.engine.ir.steps import Room, Step, Steps, Turns, View
from tnsim.engine.plan import Plan
from tnsim.engine.runtime.devices import blas_libraries, processors
from tnsim.engine.runtime.executor import Executor, address_of, executor, table_of
from tnsim.engine.runtime.stacking import Stacked, aligned, stacked_program
from tnsim.errors import TooLarge
from tnsim.scaled import scale_exponent, shifted
from tnsim.sessions import per_object_cache, session

_REPAYS = 1e-3
"""Seconds of work of one core that repay waking threads."""


_SMALL = 2**21
"""Most elements, with the arrays, of a plan that stays bound: 16 MiB in float64."""


_SHORT = 2e-5
"""Most seconds of a step of such a plan, on average: longer ones gain more by several threads."""


_UNINTERRUPTED = 0.1
"""Seconds after which a call of many steps ends, so that an interrupt is noticed."""


_CALL_BYTES = 600
"""Bytes of a bound step: three views and their tuple."""


_UFUNCS = {"matmul": np.matmul, "multiply": np.multiply, "add": np.add, "subtract": np.subtract}


class Outcome(NamedTuple):
    """What the stages of a plan gave.

    Attributes:
        values: Outputs of the plan by name, divided by their scales.
        exponents: Exponent of every scale, by stage number and scale group.
    """

    values: dict[str, np.ndarray]
    exponents: dict[tuple[int, str], Any]


def interpret(
    plan: Plan, arrays: Mapping[str, Any], stacks: tuple[Stacked, ...], threads: int | None = None
) -> Outcome:
    """Run the stages of a plan.

    Args:
        plan: Plan to run.
        arrays: Name -> array for every name in `plan.shapes`, stacked axes first.
        stacks: Stacked axes of every stage.
        threads: Number of threads that share the work; by default as many as there are cores.
    """
    dtype = np.dtype(plan.dtype)
    # The analysis depends on shapes alone and is kept; a small plan is kept together with its
    # memory.
    ready = prepared(plan.whole, dtype.itemsize, stacks)
    # The same numbers with it and without it, bit for bit.
    execute = executor(dtype, ready.calls)
    if ready.bound is not None:
        return _run_bound(plan, ready, arrays, dtype, execute)
    workers = _Workers(processors() if threads is None else threads, execute)
    values = {name: np.asarray(arrays[name], dtype, order="C") for name in plan.shapes}
    exponents: dict[tuple[int, str], Any] = {}
    memory = np.empty(0, dtype)
    with one_blas_thread():
        # One stretch of memory serves all rounds. It grows where a round needs more, and shrinks
        # where keeping its surplus would exceed the planned peak together with the arrays of this
        # round.
        for each in ready.rounds:
            if memory.size < each.rooms or memory.size - each.rooms > ready.peak - each.elements:
                memory = np.empty(0, dtype)  # frees it before more is taken
                memory = _taken(each.rooms, dtype)
            _run_round(plan, ready, each, values, exponents, memory, workers)
    return Outcome({name: values[name] for name in plan.outputs}, exponents)


class _Workers(NamedTuple):
    """Who calls the steps of a plan.

    Attributes:
        threads: Number of threads that share the work.
        execute: Compiled function that runs many steps at a call; None where each is called.
    """

    threads: int
    execute: Executor | None


def _run_bound(
    plan: Plan,
    ready: Prepared,
    arrays: Mapping[str, Any],
    dtype: np.dtype,
    execute: Executor | None,
) -> Outcome:
    """Run a plan of small steps where it is bound already, or else bind it."""
    assert ready.bound is not None
    # A session keeps bound plans up to a number of bytes, for which each entry carries its size.
    key, size = (ready.bound, dtype, execute is None), ready.bound.nbytes
    kept = session().bound.get(key, lambda: BoundPlans(size))
    # A list's `pop` and `append` are atomic, so no lock is needed to hand out bound plans.
    try:
        bound = kept.idle.pop()  # each thread that runs the plan at one time has its own
    except IndexError:
        bound = _BoundPlan(plan, ready, arrays, dtype, execute)
    with one_blas_thread(), np.errstate(all="ignore"):
        outcome = bound.run(plan, arrays)
    kept.idle.append(bound)
    return outcome


class BoundPlans:
    """A plan of small steps, bound several times where several threads run it at one time.

    Args:
        nbytes: Bytes of one of them.

    Attributes:
        idle: Bound plans that no thread runs now.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.idle: list[_BoundPlan] = []


class _BoundPlan:
    """A small plan bound to memory of its own, for one thread.

    Args:
        plan: Plan to be run.
        ready: Steps and rounds of the plan.
        arrays: Arrays of the first run; those of later runs have the same shapes.
        dtype: Type of all arrays.
        execute: Compiled function that runs many steps at a call, if there is one.
    """

    def __init__(
        self,
        plan: Plan,
        ready: Prepared,
        arrays: Mapping[str, Any],
        dtype: np.dtype,
        execute: Executor | None,
    ) -> None:
        # A small plan runs in this thread: steps this short do not repay waking others.
        self.workers = _Workers(1, execute)
        # Arrays, one room that all stages use in turn, and the memory of outputs. Nothing but
        # outputs of the plan is allocated when the plan runs again.
        self.values = {name: np.empty(np.shape(arrays[name]), dtype) for name in plan.shapes}
        self.room = np.empty(max(each.room for each in ready.rounds), dtype)
        self.outputs = np.empty(ready.outputs.room // dtype.itemsize, dtype)
        self.order = [n for each in ready.rounds for n in each.stages]
        self.places = ready.outputs.places
        self.stages = ready.stages
        self.bound: dict[int, _BoundStage] = {}

    def run(self, plan: Plan, arrays: Mapping[str, Any]) -> Outcome:
        """Copy the arrays in, call the steps, and copy the outputs out."""
        for name in plan.shapes:
            np.copyto(self.values[name], arrays[name])
        exponents: dict[tuple[int, str], Any] = {}
        for n in self.order:
            stage = plan.stages[n]
            # A stage is bound at its first run, as only then the arrays exist that earlier stages
            # give.
            if n not in self.bound:
                inputs = [self.values[name] for name in stage.inputs]
                places = {value: _Place(self.outputs, at) for value, at in self.places[n].items()}
                self.bound[n] = self.stages[n].bound(inputs, places, self.room, self.workers)
            bound = self.bound[n]
            outputs, scales = self.stages[n].called(bound)
            for name, output, alone in zip(stage.outputs, outputs, bound.alone, strict=True):
                if name not in self.values:  # later stages are bound to this array
                    # A single number comes as a scalar of NumPy, which nothing can be copied into.
                    self.values[name] = np.asarray(output) if alone else np.array(output)
                elif self.values[name] is not output:
                    # Dividing by a scale may give an array elsewhere, where one value stands for
                    # several outputs; the numbers are copied to the array that later stages read.
                    np.copyto(self.values[name], output)
            exponents.update(zip([(n, group) for group in stage.groups], scales, strict=True))
        # The caller keeps the outputs, and the next run overwrites these arrays.
        return Outcome({name: self.values[name].copy() for name in plan.outputs}, exponents)


def _taken(count: int, dtype: np.dtype) -> np.ndarray:
    """Memory for a round, where the system gives it: a budget cannot see every limit."""
    try:
        return np.empty(count, dtype)
    except MemoryError:
        size = count * dtype.itemsize / 2**20
        raise TooLarge(
            f"the process cannot get the {size:.3g} MiB that a round of the plan takes: its limit "
            "of memory is reached; raise the limit (ulimit -v), or end what else runs in it"
        ) from None


def _run_round(
    plan: Plan,
    ready: Prepared,
    each: InterpretedRound,
    values: dict[str, np.ndarray],
    exponents: dict[tuple[int, str], Any],
    memory: np.ndarray,
    workers: _Workers,
) -> None:
    """Run the stages of a round: enter their outputs and drop what no later stage reads."""
    # A room for each stage that may run at the same time.
    rooms = [memory[n * each.room :] for n in range(each.at_once)]
    tasks = []
    for n in each.stages:
        inputs = [values[name] for name in plan.stages[n].inputs]
        tasks.append(partial(_in_a_room, ready.stages[n], inputs, rooms, workers))
    # Waking threads takes longer than a short round; such a round runs in this thread.
    repays = sum(ready.stages[n].steps.usual_seconds for n in each.stages) > _REPAYS
    results = shared(tasks, min(workers.threads, each.at_once) if repays else 1)
    for n, (outputs, scales) in zip(each.stages, results, strict=True):
        stage = plan.stages[n]
        values.update(zip(stage.outputs, outputs, strict=True))
        exponents.update(zip([(n, group) for group in stage.groups], scales, strict=True))
    for name in each.last_read:
        del values[name]


def _in_a_room(
    stage: _Stage, inputs: Sequence[np.ndarray], rooms: list[np.ndarray], workers: _Workers
) -> tuple[list[Any], list[Any]]:
    """Run a stage in one of the free rooms."""
    # There are as many rooms as threads at work, so a room is always free.
    room = rooms.pop()
    outcome = stage.run(inputs, room, workers)
    rooms.append(room)
    return outcome


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS on a single thread inside the block, in all threads of the process."""
    _blas.begin()
    try:
        yield
    finally:
        _blas.end()


class _Blas:
    """The number of threads of NumPy's BLAS, one while any thread interprets a plan."""

    def __init__(self) -> None:
        self.changing = threading.Lock()
        self.inside = 0
        self.before: list[int] = []

    def begin(self) -> None:
        # The setting belongs to the whole process. The first plan that enters remembers the numbers
        # of threads, and the last plan that leaves restores them.
        with self.changing:
            self.inside += 1
            if self.inside == 1:
                self.before = [library.num_threads for library in blas_libraries()]
                for library in blas_libraries():
                    library.set_num_threads(1)

    def end(self) -> None:
        with self.changing:
            self.inside -= 1
            if self.inside == 0:
                for library, threads in zip(blas_libraries(), self.before, strict=True):
                    library.set_num_threads(threads)


_blas = _Blas()


def shared(tasks: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """The results of tasks, in order; this thread and idle threads of the pool go through them.

    A thread that has no task left helps elsewhere, and tasks may share tasks of their own: this
    thread waits for tasks that others have begun, never for a thread to become idle.

    Args:
        tasks: Functions to call.
        threads: Most threads that go through the tasks, this one included.

    Example:
        >>> shared([lambda: 1, lambda: 2, lambda: 3], threads=2)
        [1, 2, 3]
    """
    count = min(threads, len(tasks))
    if count < 2:
        with np.errstate(all="ignore"):
            return [task() for task in tasks]
    # Threads take tasks from the left end of one queue until it is empty. Each result goes to the
    # place of its task, so its order does not depend on the threads.
    results: list[Any] = [None] * len(tasks)
    left = deque(enumerate(tasks))

    def work() -> None:
        with np.errstate(all="ignore"):  # a setting of each thread's own
            while left:
                try:
                    n, task = left.popleft()
                except IndexError:  # another thread was faster
                    return
                results[n] = task()

    helpers = []
    with suppress(RuntimeError):  # the system has no room for another thread
        for _ in range(count - 1):
            helpers.append(_pool().submit(work))
    try:
        work()
    finally:
        # Where a task raised, `left` still has tasks that nobody shall begin any more. Helpers that
        # have not started are cancelled, and the others are waited for, since they write to memory
        # of this call.
        left.clear()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    return results


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, processors() - 1), thread_name_prefix="tnsim")


if hasattr(os, "register_at_fork"):  # a child process has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


@dataclass(frozen=True, eq=False)
class _BoundKey:
    """The key of a bound plan, one object for each plan, with the bytes that it takes."""

    nbytes: int


class _Outputs(NamedTuple):
    """Memory of the outputs of all stages, where outputs that are not alive together share it.

    Attributes:
        places: For each stage the first byte of each value that is an output.
        room: Bytes of all of them.
    """

    places: tuple[dict[int, int], ...]
    room: int


class Prepared(NamedTuple):
    """What is found out about a plan before it is run on numbers.

    Attributes:
        stages: Steps of each stage.
        rounds: Stages that run at once, round after round.
        peak: Elements of all memory at once.
        calls: Number of calls of NumPy.
        bound: Key under which the plan stays bound; None where its steps are large.
        outputs: Memory of the outputs of all stages of a bound plan.
    """

    stages: tuple[_Stage, ...]
    rounds: tuple[InterpretedRound, ...]
    peak: int
    calls: int
    bound: _BoundKey | None
    outputs: _Outputs


@per_object_cache
def prepared(whole: WholePlan, item: int, stacks: tuple[Stacked, ...]) -> Prepared:
    """The steps of all stages of a plan, and their rounds.

    Args:
        whole: Stages of the plan.
        item: Bytes of an element of the arrays.
        stacks: Stacked axes of every stage.
    """
    # Stages of one program with the same stacks share the analysis of its steps.
    made: dict[tuple[int, Stacked], _Stage] = {}
    numbers = []
    for stage, over in zip(whole.stages, stacks, strict=True):
        key = (stage.program, over)
        if key not in made:
            program = whole.programs[stage.program]
            if not over.nothing:
                program = stacked_program(program, over)
            made[key] = _Stage(program, interpreted(program, item), over)
        numbers.append([*made].index(key))
    distinct = tuple(made.values())
    steps = [bound_stage.steps for bound_stage in distinct]
    rounds = interpreted_rounds(whole, steps, numbers, item)
    stages = tuple(distinct[n] for n in numbers)
    peak = max((each.elements for each in rounds), default=0)
    outputs = _placed(whole, rounds, stages, item)
    # Elements of each array as the steps see it, stacked axes included.
    read: dict[str, int] = {}
    for stage, bound_stage in zip(whole.stages, stages, strict=True):
        read.update(zip(stage.inputs, bound_stage.steps.sizes, strict=False))
    # An array that no stage reads, as the array of a sum times zero, counts nothing.
    elements = sum(read.get(name, 0) for name in whole.names) + outputs.room // item
    elements += max((each.room for each in rounds), default=0)
    # A plan stays bound where it is small and its steps are short on average: then binding costs as
    # much as running.
    kept_calls = sum(len(bound_stage.steps.steps) for bound_stage in stages)
    seconds = sum(bound_stage.steps.usual_seconds for bound_stage in stages)
    is_small = rounds and elements <= _SMALL and seconds < _SHORT * kept_calls
    bound = _BoundKey(elements * item + kept_calls * _CALL_BYTES) if is_small else None
    calls = sum(bound_stage.steps.calls for bound_stage in stages)
    return Prepared(stages, rounds, peak, calls, bound, outputs)


def _placed(
    whole: WholePlan, rounds: Sequence[InterpretedRound], stages: Sequence[_Stage], item: int
) -> _Outputs:
    """Places of the outputs of all stages, which are given back after their last reader."""
    # Memory is given back in the order of the rounds, as in a run of the stages one after another.
    room = Room()
    places: tuple[dict[int, int], ...] = tuple({} for _ in stages)
    names: dict[str, tuple[int, int]] = {}
    for each in rounds:
        for n in each.stages:
            steps = stages[n].steps
            for value in stages[n].written:
                places[n][value] = room.take(steps.sizes[value] * item)
            for name, view in zip(whole.stages[n].outputs, steps.outputs, strict=True):
                names[name] = n, view.value
        for name in each.last_read:
            n, value = names.pop(name)
            # Two outputs may be one value, whose memory is free when the last name has been read.
            if (n, value) not in names.values():
                room.give(places[n][value], stages[n].steps.sizes[value] * item)
    return _Outputs(places, room.top)


class _Place(NamedTuple):
    """Where a value stands: an array, and the first byte of the value in the array."""

    memory: np.ndarray
    start: int


_Places = dict[int, _Place]
_Call = tuple[Callable[..., Any], Sequence[Any]]


class _BoundStage(NamedTuple):
    """The calls of a stage, and the arrays that they write.

    Attributes:
        calls: Functions with their arguments.
        outputs: Arrays of the outputs.
        alone: Whether each output is the only output in its memory.
    """

    calls: Sequence[_Call]
    outputs: Sequence[np.ndarray]
    alone: Sequence[bool]


class _Stage(NamedTuple):
    """The program of a stage, for stacks where arrays are stacked, as steps."""

    program: Program
    steps: Steps
    over: Stacked

    def run(
        self, inputs: Sequence[np.ndarray], room: np.ndarray, workers: _Workers
    ) -> tuple[list[Any], list[Any]]:
        """Outputs divided by their scales, and the exponent of each scale."""
        outputs = {}
        for value in self.written:
            outputs[value] = _Place(np.empty(self.steps.sizes[value], room.dtype), 0)
        return self.called(self.bound(inputs, outputs, room, workers))

    @property
    def written(self) -> tuple[int, ...]:
        """Numbers of the values that are outputs, of which several may be one value."""
        return tuple(dict.fromkeys(view.value for view in self.steps.outputs))

    def bound(
        self,
        inputs: Sequence[np.ndarray],
        outputs: _Places,
        room: np.ndarray,
        workers: _Workers,
    ) -> _BoundStage:
        """The calls of the steps on these inputs, and the outputs that they write."""
        # Values of the steps are numbered with the inputs first, so an input's place is its array.
        places = {n: _Place(array, 0) for n, array in enumerate(inputs)} | outputs
        run = _Run(self.steps, places, _Place(room, 0), workers)
        run.bind()
        # An output that shares its value with another output may not be divided in place, as the
        # other may have other powers.
        numbers = [view.value for view in self.steps.outputs]
        alone = [numbers.count(number) == 1 for number in numbers]
        return _BoundStage(run.calls, [run.array(view) for view in self.steps.outputs], alone)

    def called(self, bound: _BoundStage) -> tuple[list[Any], list[Any]]:
        """Outputs of the steps divided by their scales, and the exponent of each scale."""
        for function, arguments in bound.calls:
            function(*arguments)
        return self._rescaled(list(bound.outputs), bound.alone)

    def _rescaled(
        self, outputs: list[np.ndarray], alone: Sequence[bool]
    ) -> tuple[list[Any], list[Any]]:
        """The same as at the end of `lowering.run_program`, in the memory of the outputs.

        The entries of a stack have scales of their own.
        """
        program, over = self.program, self.over
        if not program.scales:
            return outputs, []
        depth = 0 if over.nothing else len(over.sizes)
        whole = outputs
        if depth:
            whole = [aligned(x, axes) for x, axes in zip(outputs, over.computed, strict=True)]
        # With stacks the scale is taken over all but the `depth` leading axes, an exponent for
        # every entry.
        exponents = [scale_exponent(whole[which], power, depth) for which, power in program.scales]
        for n, powers in enumerate(program.powers):
            for slot, power in powers:
                by = -power * exponents[slot]
                # An output that lacks a stacked axis gains it where its scale has the axis, and
                # then needs a larger array than it stands in.
                in_place = alone[n]
                if depth:
                    by = by.reshape(by.shape + (1,) * (whole[n].ndim - depth))
                    shape = np.broadcast_shapes(whole[n].shape, by.shape)
                    in_place = in_place and shape == whole[n].shape
                whole[n] = shifted(whole[n], by, out=whole[n] if in_place else None)
        if not depth:
            return whole, exponents
        # Axes of size 1 that were added to align arrays are removed again, except where a division
        # has filled them.
        given = [_without(x, axes) for x, axes in zip(whole, over.outputs, strict=True)]
        return given, [_without(x, axes) for x, axes in zip(exponents, over.scales, strict=True)]


def _without(array: np.ndarray, axes: tuple[bool, ...]) -> np.ndarray:
    """An array without the stacked axes that it lacks, which have size 1."""
    return array.squeeze(tuple(n for n, is_stacked in enumerate(axes) if not is_stacked))


class _Run:
    """Steps bound to memory.

    Args:
        steps: Steps of a program, or of the body of a loop.
        places: Places of inputs, and of outputs with memory of their own.
        room: Memory for all other values.
        workers: Threads that share loops and large steps, and the compiled function for the rest.

    Attributes:
        calls: Functions with their arguments, in the order in which they are called.
        addresses: Address of each value, which the compiled function reads at every call.
    """

    def __init__(self, steps: Steps, places: _Places, room: _Place, workers: _Workers) -> None:
        self.steps, self.places, self.room = steps, places, room
        self.threads, self.execute = workers
        self.dtype = room.memory.dtype
        self.calls: list[_Call] = []
        # Places within the room are offsets, so one analysis serves every lane and every stage.
        for value, start in steps.places.items():
            places[value] = _Place(room.memory, room.start + start)
        self.addresses = np.zeros(len(steps.sizes), np.int64)

    def bind(self, moving: frozenset[int] = frozenset()) -> None:
        """Make the calls of all steps; views of moving values are made anew at every call."""
        spans: Sequence[tuple[int, int] | None] = [None] * len(self.steps.steps)
        elapsed: Sequence[float] = ()
        if self.execute is not None:
            _, _, spans, elapsed = table_of(self.steps)
            begins = {id(memory): address_of(memory) for memory, _ in self.places.values()}
            for value, (memory, start) in self.places.items():
                self.addresses[value] = begins[id(memory)] + start
        open_span: tuple[int, int] | None = None
        for step, span in zip(self.steps.steps, spans, strict=True):
            if span is not None and step.kind == "matmul" and self.meets_itself(step):
                span = None
            is_shared = self.threads > 1 and self.steps.is_shared(step)
            # Steps that follow one another are one call of the compiled function, which nothing can
            # interrupt before its end.
            if span is not None and not is_shared:
                open_span = first, last = (open_span or span)[0], span[1]
                if elapsed[last] - elapsed[first] < _UNINTERRUPTED:
                    continue
            if open_span is not None:
                self.calls.append(self.compiled(*open_span))
                open_span = None
            if span is not None and not is_shared:
                continue
            # Four forms of a call: a loop binds its body when it runs; a large step is bound part
            # by part; a step on values that move from turn to turn gets new views at every call;
            # all others are bound once.
            if step.turns is not None:
                self.calls.append((self.loop, (step, step.turns)))
            elif span is not None:
                self.calls.append(self.together([self.compiled(n, n + 1) for n in range(*span)]))
            elif step.parts and (step.kind == "matmul" or is_shared):
                if moving.intersection(view.value for view in step.reads):
                    self.calls.append((self.in_parts, (step, is_shared)))
                elif is_shared:
                    self.calls.append(self.together(self.parts(step)))
                else:
                    self.calls += self.parts(step)
            else:
                self.bind_alone(step, moving)
        if open_span is not None:
            self.calls.append(self.compiled(*open_span))

    def meets_itself(self, step: Step) -> bool:
        """Whether both arguments begin at one place: NumPy multiplies a matrix with its own
        transpose in another way, and two inputs may be one array."""
        first, second = (view.value for view in step.reads)
        return first != second and self.addresses[first] == self.addresses[second]

    def compiled(self, first: int, last: int) -> _Call:
        """The call of the compiled function for rows of the steps' table."""
        assert self.execute is not None
        return self.execute.call(table_of(self.steps), self.addresses, first, last)

    def bind_alone(self, step: Step, moving: frozenset[int]) -> None:
        """Make the call of a step that is neither a loop nor cut into parts."""
        reads = [self.array(view) for view in step.reads]
        function, arguments = _call(step, reads, self.array(step.writes))
        places = [n for n, view in enumerate(step.reads) if view.value in moving]
        if not places:
            self.calls.append((function, arguments))
            return
        # The arguments of `np.copyto` are (written, read); all other functions begin with what they
        # read.
        first = 1 if step.kind == "copy" else 0
        slots = tuple((first + n, step.reads[n]) for n in places)
        self.calls.append((self.moved, (function, list(arguments), slots)))

    def array(self, view: View) -> np.ndarray:
        """The array of a view; NumPy checks that it lies within the memory."""
        memory, start = self.places[view.value]
        return np.ndarray(view.shape, self.dtype, memory, start + view.start, view.strides)

    def moved(
        self, function: Any, arguments: list[Any], slots: tuple[tuple[int, View], ...]
    ) -> None:
        """Call a function with views of moving values made anew."""
        for slot, view in slots:
            arguments[slot] = self.array(view)
        function(*arguments)

    def parts(self, step: Step) -> list[_Call]:
        """The calls of the parts of a step."""
        calls = []
        for *reads, written in step.parts:
            arrays = [self.array(view) for view in reads]
            calls.append(_call(step, arrays, self.array(written)))
        return calls

    def together(self, calls: Sequence[_Call]) -> _Call:
        """One call that shares calls, of which none depends on another, among the threads."""
        tasks = [partial(function, *arguments) for function, arguments in calls]
        return shared, (tasks, self.threads)

    def in_parts(self, step: Step, is_shared: bool) -> None:
        """Run a step part by part."""
        calls = self.parts(step)
        for function, arguments in [self.together(calls)] if is_shared else calls:
            function(*arguments)

    def loop(self, step: Step, turns: Turns) -> None:
        """Run a loop: all lanes, at once where they repay it, and their sum in order."""
        # Lane 0 adds up where the result of the loop stands, the others behind the room of their
        # body.
        sums = [self.array(step.writes)]
        tasks = []
        for lane in range(turns.lanes):
            start = self.room.start + turns.place + lane * turns.lane_bytes
            if lane:
                own = (step.writes.shape, self.dtype, self.room.memory, start + turns.body.room)
                sums.append(np.ndarray(*own, step.writes.strides))
            place = _Place(self.room.memory, start)
            tasks.append(partial(self.lane, step, turns, lane, place, sums[lane]))
        repays = turns.count * turns.body.usual_seconds > _REPAYS
        shared(tasks, self.threads if repays else 1)
        # The lanes are added in their order, and each lane has a fixed set of turns, so the sum has
        # the same bits for any number of threads.
        for total in sums[1:]:
            np.add(sums[0], total, sums[0])

    def lane(self, step: Step, turns: Turns, lane: int, room: _Place, total: np.ndarray) -> None:
        """Add up the turns of a lane."""
        given = [self.places[view.value] for view in step.reads]
        # The body is bound once for a lane. From turn to turn only the places of its inputs change.
        # Threads that go through the lanes have no time for parts of steps.
        threads = 1 if turns.lanes >= self.threads else self.threads
        body = _Run(turns.body, dict(enumerate(given)), room, _Workers(threads, self.execute))
        body.bind(frozenset(n for n, moves in enumerate(turns.moves) if any(moves)))
        begins = body.addresses[: len(given)].tolist()
        (view,) = turns.body.outputs
        for turn in range(lane, turns.count, turns.lanes):
            # Digits of the turn in mixed radix, the last index running fastest, say how far each
            # input moves.
            at, number = [], turn
            for size in reversed(turns.sizes):
                number, digit = divmod(number, size)
                at.insert(0, digit)
            for n, ((memory, start), moves) in enumerate(zip(given, turns.moves, strict=True)):
                by = sum(digit * by for digit, by in zip(at, moves, strict=True))
                body.places[n] = _Place(memory, start + by)
                body.addresses[n] = begins[n] + by
            for function, arguments in body.calls:
                function(*arguments)
            # The first turn of a lane overwrites its sum, so no memory has to be set to zero.
            if turn == lane:
                np.copyto(total, body.array(view))
            else:
                np.add(total, body.array(view), total)


def _call(step: Step, reads: Sequence[np.ndarray], written: np.ndarray) -> _Call:
    """The function of a step with its arguments."""
    if step.kind == "scale":
        # The weight has the dtype of the arrays, so that NumPy multiplies in this dtype.
        return np.multiply, (reads[0], written.dtype.type(step.weight), written)
    if step.kind == "copy":
        return np.copyto, (written, reads[0])
    if step.kind == "reduce":
        return np.add.reduce, (reads[0], tuple(range(-step.axes, 0)), None, written)
    if step.kind == "einsum":
        return _einsum, (*reads, step.axes, written)
    return _UFUNCS[step.kind], (*reads, written)


def _einsum(x: np.ndarray, y: np.ndarray, axes: int, written: np.ndarray) -> None:
    """A product entry by entry summed over its last axes."""
    # Views of both arguments have the same axes, so the labels of all axes are simply counted.
    labels = list(range(x.ndim))
    np.einsum(x, labels, y, labels, labels[: x.ndim - axes], out=written)
