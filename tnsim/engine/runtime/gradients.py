"""Derivatives of a plan's outputs in its arrays, in reverse mode, by functions bound like programs.

The derivative of a contraction `C = sum A B` in A is the contraction with A taken out,
`dA = sum dC B`, where dX stands for the derivative of a final number in X. The derivative of a sum
is the sum with its terms and its result exchanged. The derivative of a loop in an argument is put
together of those of its turns, each in the part of the argument that the turn reads.

*Programs* (`vjp`). The way back through a program is a row of functions of NumPy, as the program
itself is (see `binding`). It computes the values that derivatives read once more, and goes through
the operations from the last to the first. XLA is given JAX's own derivative of the bound program.

*Plans* (`pulled_back`). A run whose derivatives are wanted keeps the arrays that ways back read
(`Pullback.forward`); values inside a stage are computed again. Rounds of stages are gone through
from the last to the first. A value that several stages read has a derivative from each of them,
which are added up as they come.

*Scales.* A stage divides its outputs by powers of two. Derivatives take the powers as constants
(see `scaled.scale_exponent`), so the derivative in an output is divided by the same power.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.engine import costs
from tnsim.engine.costs import Memory
from tnsim.engine.ir.problem import ITEM_BYTES
from tnsim.engine.ir.program import Labels, Operation, Program, n_iterations
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.binding import (
    REPAYS,
    Bound,
    Call,
    Function,
    Run,
    Sizes,
    bind,
    operation_function,
    order_of,
    part,
    place,
    prepared,
    stacked_stages,
    turn_indices,
)
from tnsim.engine.runtime.compiling import Wanted, ready
from tnsim.engine.runtime.devices import one_blas_thread, processors, shared
from tnsim.engine.runtime.execution import Result, tier_in_use
from tnsim.scaled import shifted
from tnsim.sessions import per_object_cache, session

Shape = tuple[int, ...]


class Way(NamedTuple):
    """The way back through a program.

    Attributes:
        bound: Functions of the inputs in `reads`, and of the derivatives in the given outputs.
        reads: Numbers of the inputs of the program that derivatives read.
        gives: Numbers of the inputs in which there are derivatives, in the order of the results.
        elements: Most elements alive at once, results included, beside what is given and read.
        multiplications: Scalar multiplications, of values that are computed again and of
            derivatives.
    """

    bound: Bound
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    elements: int
    multiplications: int


class _Value(NamedTuple):
    """A value of a tape.

    Attributes:
        elements: Number of elements.
        function: Function that computes the value; None for an input.
        args: Numbers of its arguments.
        beside: Elements that the function takes on top while it runs.
        work: Scalar multiplications.
    """

    elements: int
    function: Function | None = None
    args: tuple[int, ...] = ()
    beside: int = 0
    work: int = 0


class _Tape:
    """Functions of numbered values that are written down in the order in which they run."""

    def __init__(self) -> None:
        self.values: list[_Value] = []
        self.slopes: dict[int, int] = {}

    def add(self, value: _Value) -> int:
        """Number of a new value."""
        self.values.append(value)
        return len(self.values) - 1

    def add_slope(self, of: int, term: int) -> None:
        """Add a term to the derivative in a value.

        Args:
            of: Number of the value.
            term: Number of the term.
        """
        if of in self.slopes:
            args = self.slopes[of], term
            total = _Value(self.values[of].elements, lambda x, y: np.asarray(x + y), args)
            term = self.add(total)
        self.slopes[of] = term

    def closed(
        self, inputs: Sequence[int], outputs: Sequence[int], at_once: bool
    ) -> tuple[Bound, int, int]:
        """The functions that the outputs need, their most elements alive at once, and their work.

        Args:
            inputs: Numbers of the inputs, in order.
            outputs: Numbers of the outputs.
            at_once: Whether threads share the functions.
        """
        used = self.used(outputs)
        needed = [n for n in sorted(used) if self.values[n].function is not None]
        numbers = {n: k for k, n in enumerate((*inputs, *needed))}
        last = {a: n for n in needed for a in self.values[n].args}
        calls, alive, taken = [], 0, []
        for n in needed:
            value = self.values[n]
            assert value.function is not None
            taken.append(Memory(alive, value.elements, value.beside))
            alive += value.elements
            dead = {a for a in value.args if last[a] == n and a not in outputs}
            freed = (self.values[a] for a in dead if self.values[a].function is not None)
            alive -= sum(each.elements for each in freed)
            args = tuple(numbers[a] for a in value.args)
            calls.append(Call(value.function, args, tuple(numbers[a] for a in dead)))
        reads, over = [call.args for call in calls], [None] * len(calls)
        order = order_of(reads, over, len(inputs)) if at_once else None
        peak = costs.peak_at_once(taken) if at_once else max(map(sum, taken), default=0)
        work = sum(self.values[n].work for n in needed)
        return Bound(tuple(calls), tuple(numbers[n] for n in outputs), order), peak, work

    def used(self, outputs: Sequence[int]) -> set[int]:
        """Numbers of the values that the outputs are computed from, themselves included."""
        used = set(outputs)
        for n in reversed(range(len(self.values))):
            if n in used:
                used.update(self.values[n].args)
        return used


@per_object_cache
def vjp(program: Program, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> Way | None:
    """The way back through a program.

    Args:
        program: Program to be differentiated, without the division by its scales.
        given: Whether there is a derivative, for each output of the program.
        wanted: Whether the derivative is wanted, for each input of the program.

    Returns:
        The way back in NumPy; None where no given output depends on a wanted input.

    Example:
        >>> product = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
        >>> way = vjp(Program(((4, 3), (3, 5)), (product,), (2,)), (True,), (True, False))
        >>> way.reads, way.gives, way.bound([np.ones((3, 5)), np.ones((4, 5))])[0].tolist()[0]
        ((1,), (0,), [5.0, 5.0, 5.0])
    """
    tape, shapes, first = _Tape(), program.value_shapes, len(program.shapes)
    at_once = costs.runs_at_once(program)
    # Values have the numbers that they have in the program, and derivatives follow.
    varies = _varying(program, wanted)
    for shape in program.shapes:
        tape.add(_Value(math.prod(shape)))
    steps = zip(program.operations, shapes[first:], program.sizes, program.costs, strict=True)
    for op, shape, sizes, cost in steps:
        elements = math.prod(shape)
        function = operation_function(op, sizes, None, np, not at_once)
        beside = costs.beside(op, sizes, elements)
        tape.add(_Value(elements, function, op.args, beside, cost))
    cotangents = []
    for number, is_given in zip(program.outputs, given, strict=True):
        if is_given:
            cotangents.append(tape.add(_Value(math.prod(shapes[number]))))
            tape.add_slope(number, cotangents[-1])
    for n, op in reversed(list(enumerate(program.operations, first))):
        if n in tape.slopes and varies[n]:
            sizes, cost = program.sizes[n - first], program.costs[n - first]
            _add_terms(tape, op, sizes, cost, n, varies, not at_once)
    gives = tuple(n for n in range(first) if wanted[n] and n in tape.slopes)
    if not gives:
        return None
    outputs = [tape.slopes[n] for n in gives]
    used = tape.used(outputs)
    reads = tuple(n for n in range(first) if n in used)
    bound, elements, work = tape.closed([*reads, *cotangents], outputs, at_once)
    return Way(bound, reads, gives, elements, work)


def _varying(program: Program, inputs: tuple[bool, ...]) -> list[bool]:
    """Whether each value of a program depends on inputs that vary."""
    varies = list(inputs)
    for op in program.operations:
        varies.append(any(varies[a] for a in op.args))
    return varies


def _add_terms(
    tape: _Tape,
    op: Operation,
    sizes: Sizes,
    cost: int,
    number: int,
    varies: Sequence[bool],
    alone: bool,
) -> None:
    """Add the derivatives in the arguments of an operation.

    Args:
        tape: Tape with the values of the program.
        op: Operation to be differentiated.
        sizes: Size of every label.
        cost: Scalar multiplications of the operation.
        number: Number of its result.
        varies: Whether each value depends on inputs in which derivatives are wanted.
        alone: Whether functions run one after another.
    """
    slope = tape.slopes[number]
    if op.kind == "loop":
        _add_loop_terms(tape, op, sizes, slope, tuple(varies[a] for a in op.args))
        return
    for slot, (a, labels) in enumerate(zip(op.args, op.labels, strict=True)):
        if not varies[a]:
            continue
        elements = tape.values[a].elements
        if op.kind == "sum":
            weight, axes = op.weights[slot], tuple(op.output.index(x) for x in labels)
            if weight == 1.0 and labels == op.output:
                tape.add_slope(a, slope)
                continue
            value = _Value(elements, partial(_weighted, weight, axes), (slope,))
        elif len(op.args) == 1:
            if labels == op.output:
                tape.add_slope(a, slope)
                continue
            value = _Value(elements, _unreduced(labels, op.output, sizes), (slope,))
        else:  # the contraction with this argument taken out
            other = 1 - slot
            theirs = (op.output, op.labels[other])
            taken_out = Operation("contract", (0, 1), theirs, labels)
            function = operation_function(taken_out, sizes, None, np, alone)
            beside = costs.beside(taken_out, sizes, elements)
            value = _Value(elements, function, (slope, op.args[other]), beside, cost)
        tape.add_slope(a, tape.add(value))


def _weighted(weight: float, axes: Labels, x: np.ndarray) -> np.ndarray:
    """An array times a number, with its axes in another order."""
    return np.asarray(np.multiply(x.transpose(axes), weight, order="C"))


def _unreduced(labels: Labels, output: Labels, sizes: Sizes) -> Function:
    """The derivative in an array of diagonals of it that are summed over some of their axes.

    Entries along an axis that was summed have one derivative. Entries off a diagonal were not read,
    and have none.
    """
    distinct = tuple(dict.fromkeys(labels))
    axes = tuple(output.index(label) for label in distinct if label in output)
    spread = tuple(sizes[label] if label in output else 1 for label in distinct)
    shape = tuple(sizes[label] for label in labels)
    ours, theirs = [distinct.index(label) for label in labels], [*range(len(distinct))]

    def unreduced(x: np.ndarray) -> np.ndarray:
        out = np.zeros(shape, x.dtype)
        np.einsum(out, ours, theirs)[...] = x.transpose(axes).reshape(spread)  # a view
        return out

    return unreduced


def _add_loop_terms(
    tape: _Tape, loop: Operation, sizes: Sizes, slope: int, wanted: tuple[bool, ...]
) -> None:
    """Add the derivatives in the arguments of a loop.

    Args:
        tape: Tape with the values of the program.
        loop: Operation of the kind "loop".
        sizes: Size of every label.
        slope: Number of the derivative in its result.
        wanted: Whether the derivative is wanted, for each argument.
    """
    assert loop.body is not None  # every loop has a body
    way = vjp(loop.body, (True,), wanted)
    assert way is not None  # a body reads all arguments
    count = n_iterations(loop, sizes)
    lanes = costs.lanes(loop, count)
    elements = [tape.values[loop.args[slot]].elements for slot in way.gives]
    outputs = sum(math.prod(loop.body.shapes[slot]) for slot in way.gives)
    slices = sum(math.prod(loop.body.shapes[slot]) for slot in way.reads)
    beside = lanes * (way.elements + outputs + slices + sum(elements))
    args = (*(loop.args[slot] for slot in way.reads), slope)
    function, work = _loop_slopes(loop, sizes, way), count * way.multiplications
    found = tape.add(_Value(0, function, args, beside, work))
    for n, slot in enumerate(way.gives):
        one = tape.add(_Value(elements[n], itemgetter(n), (found,)))
        tape.add_slope(loop.args[slot], one)


def _loop_slopes(loop: Operation, sizes: Sizes, way: Way) -> Function:
    """A function of the arguments that the way back reads, and of the derivative in the result."""
    count, block = n_iterations(loop, sizes), loop.block_size
    lanes = costs.lanes(loop, count)
    repays = costs.host_seconds_of(loop, sizes, 8) > REPAYS
    labels = [loop.labels[slot] for slot in way.reads]
    own = [loop.labels[slot] for slot in way.gives]
    shapes = [tuple(sizes[x] for x in each) for each in own]

    def lane(args: tuple[np.ndarray, ...], number: int) -> list[np.ndarray]:
        *read, slope = args
        totals = [np.zeros(shape, slope.dtype) for shape in shapes]
        for n in range(number, count, lanes):
            at = turn_indices(loop, sizes, n)
            parts = [part(x, each, at, block) for x, each in zip(read, labels, strict=True)]
            found = way.bound([*parts, slope])
            for total, each, added in zip(totals, own, found, strict=True):
                view = total[place(each, at, block)]
                np.add(view, added, view)
        return totals

    def slopes(*args: np.ndarray) -> list[np.ndarray]:
        tasks = [partial(lane, args, n) for n in range(lanes)]
        first, *others = shared(tasks, processors() if repays else 1)
        for other in others:
            for total, added in zip(first, other, strict=True):
                np.add(total, added, total)
        return first

    return slopes


@dataclass(frozen=True)
class _TracedWay:
    """The way back through a program as the work of a compiled program.

    Its inputs are the inputs of the program in `reads`, an exponent for each output in `scaled`, by
    which the derivative in this output is lowered, and the derivatives in the given outputs.

    Attributes:
        program: Program to be differentiated.
        given: Numbers of the outputs with a derivative.
        reads: Numbers of the inputs that derivatives read.
        gives: Numbers of the inputs in which derivatives are wanted.
        scaled: Places among the given outputs of those that scales divide.
    """

    program: Program
    given: tuple[int, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    scaled: tuple[int, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the inputs."""
        values = self.program.value_shapes
        read = [self.program.shapes[n] for n in self.reads]
        slopes = [values[self.program.outputs[n]] for n in self.given]
        return (*read, *((),) * len(self.scaled), *slopes)

    @property
    def length(self) -> int:
        """Number of operations: two derivatives for each."""
        return 3 * self.program.length


def _traced(wanted: Wanted[_TracedWay]) -> Run:
    """The function of JAX arrays that is compiled for a way back."""
    work = wanted.work
    bound = bind(work.program, jnp)

    def run(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        count, scaled = len(work.reads), len(work.scaled)
        exponents, slopes = inputs[count : count + scaled], inputs[count + scaled :]
        for at, exponent in zip(work.scaled, exponents, strict=True):
            slopes[at] = shifted(slopes[at], -exponent)
        # No derivative depends on inputs that are not read.
        whole = [jnp.zeros(shape, wanted.dtype) for shape in work.program.shapes]
        for n, array in zip(work.reads, inputs[:count], strict=True):
            whole[n] = array

        def outputs(moving: list[Any]) -> list[Any]:
            arrays = list(whole)
            for n, array in zip(work.gives, moving, strict=True):
                arrays[n] = array
            found = bound(arrays)
            return [found[n] for n in work.given]

        _, pullback = jax.vjp(outputs, [whole[n] for n in work.gives])
        return pullback(slopes)[0], []

    return run


class _Step(NamedTuple):
    """The way back through a stage.

    Attributes:
        stage: Number of the stage.
        way: Way back through its program.
        given: Numbers of the outputs in which there are derivatives.
    """

    stage: int
    way: Way
    given: tuple[int, ...]


@dataclass(frozen=True)
class Pullback:
    """The way back through a plan.

    Attributes:
        forward: The plan, with the values that the way back reads among its outputs.
        outputs: Names of the outputs of the plan itself.
        kept: Names of the arrays and values that the way back reads.
        rounds: Ways back through the stages of each round, the last round first, and how many of
            them run at once.
        gives: Names of the arrays in which there are derivatives.
        elements: Most elements alive at once on the way back, beside what is kept.
        multiplications: Scalar multiplications of the way back.
    """

    forward: Plan
    outputs: tuple[str, ...]
    kept: tuple[str, ...]
    rounds: tuple[tuple[tuple[_Step, ...], int], ...]
    gives: tuple[str, ...]
    elements: int
    multiplications: int

    @property
    def kept_bytes(self) -> int:
        """Bytes of the arrays and values that are kept for the way back."""
        known = self.forward.shapes | self.forward.output_shapes
        item = ITEM_BYTES[self.forward.dtype]
        return item * sum(math.prod(known[name]) for name in self.kept)

    @property
    def own_bytes(self) -> int:
        """Bytes of all arrays alive at once on the way back beside what is kept, an estimate."""
        return ITEM_BYTES[self.forward.dtype] * self.elements


def pulled_back(plan: Plan, wanted: frozenset[str]) -> Pullback:
    """The way back through a plan, the same object at every call in a session.

    Args:
        plan: Plan on real numbers.
        wanted: Names of the arrays in which derivatives are wanted.
    """
    key = (pulled_back, wanted, plan.dtype, plan.runs)
    return session().belongings.get(plan.whole, key, lambda: _pulled_back(plan, wanted))


def _pulled_back(plan: Plan, wanted: frozenset[str]) -> Pullback:
    varies = set(wanted)
    for stage in plan.stages:
        program = plan.programs[stage.program]
        values = _varying(program, tuple(name in varies for name in stage.inputs))
        outputs = zip(stage.outputs, program.outputs, strict=True)
        varies.update(name for name, number in outputs if values[number])
    stacks, _ = stacked_stages(plan, (), {})
    ready_plan = prepared(plan.whole, ITEM_BYTES[plan.dtype], stacks)
    slopes = {name: math.prod(plan.output_shapes[name]) for name in plan.outputs}
    rounds, kept, peaks, work = [], {}, [0], 0
    for each in reversed(ready_plan.rounds):
        steps, needs, found = [], [], []
        for n in each.stages:
            stage = plan.stages[n]
            program = plan.programs[stage.program]
            given = tuple(name in slopes and name in varies for name in stage.outputs)
            way = vjp(program, given, tuple(name in varies for name in stage.inputs))
            if way is None:
                continue
            steps.append(_Step(n, way, tuple(k for k, is_given in enumerate(given) if is_given)))
            # Derivatives are copied as scales divide them.
            scaled = [k for k in steps[-1].given if program.powers and program.powers[k]]
            copies = sum(math.prod(program.value_shapes[program.outputs[k]]) for k in scaled)
            needs.append(way.elements + copies)
            work += way.multiplications
            kept.update({stage.inputs[k]: math.prod(program.shapes[k]) for k in way.reads})
            found += [(stage.inputs[k], math.prod(program.shapes[k])) for k in way.gives]
        at_once = min(each.at_once, max(1, len(steps)))
        # What the largest stages need, beside the derivatives that all others give.
        own = sorted(needs, reverse=True)[:at_once]
        others = sum(size for _, size in found) if len(steps) > 1 else 0
        peaks.append(sum(own) + sum(slopes.values()) + others)
        slopes.update(found)
        for n in each.stages:
            for name in plan.stages[n].outputs:
                slopes.pop(name, None)
        rounds.append((tuple(steps), at_once))
    own = [name for name in kept if name not in plan.shapes and name not in plan.outputs]
    forward = dataclasses.replace(
        plan, outputs=(*plan.outputs, *own), scales=plan.scales | dict.fromkeys(own, ())
    )
    return Pullback(
        forward,
        plan.outputs,
        tuple(kept),
        tuple(rounds),
        tuple(name for name in plan.shapes if name in wanted and name in slopes),
        max(peaks),
        work,
    )


class Kept(NamedTuple):
    """A run of a plan, as the way back reads it.

    Attributes:
        pullback: Way back through the plan.
        arrays: Arrays and values that the way back reads, by name.
        exponents: Exponent of every scale, by stage and scale group.
    """

    pullback: Pullback
    arrays: dict[str, Any]
    exponents: dict[tuple[int, str], Any]


def run_kept(pullback: Pullback, arrays: Mapping[str, Any]) -> tuple[Result, Kept]:
    """Run a plan and keep what the way back reads.

    Args:
        pullback: Way back through the plan.
        arrays: Name -> array for every name in the shapes of the plan, in the dtype of the plan.

    Returns:
        The result of the plan, and the arrays for `gradients`.
    """
    plan = pullback.forward
    tier = tier_in_use()
    placed = execution.placed(dict(arrays), plan.dtype, tier)
    result = execution.run(plan, placed, tier)
    given = {**arrays, **result.values}
    kept = {name: given[name] for name in pullback.kept}
    values = {name: result.values[name] for name in pullback.outputs}
    return result._replace(values=values), Kept(pullback, kept, result.exponents)


def gradients(kept: Kept, cotangents: Mapping[str, Any]) -> dict[str, Any]:
    """The derivatives in the arrays of a plan.

    Args:
        kept: Run of the plan.
        cotangents: Derivatives of a number in the mantissas of the plan's outputs, by name.

    Returns:
        Derivatives of the number, by the names of the arrays. An array on which no output depends
        is absent.
    """
    pullback, plan = kept.pullback, kept.pullback.forward
    tier = tier_in_use()
    arrays = execution.placed(dict(kept.arrays), plan.dtype, tier)
    slopes = {name: np.asarray(cotangents[name], plan.dtype) for name in pullback.outputs}
    for steps, at_once in pullback.rounds:
        if tier == "interpret":
            tasks = [partial(_interpreted, plan, step, kept, arrays, slopes) for step in steps]
            with one_blas_thread(), np.errstate(all="ignore"):
                results = shared(tasks, min(processors(), at_once))
        else:
            results = _compiled(plan, steps, kept, arrays, slopes)
        for step in steps:
            for name in plan.stages[step.stage].outputs:
                slopes.pop(name, None)
        for step in steps:  # `pop`, so that what was added up is freed
            for slot, term in zip(step.way.gives, results.pop(0), strict=True):
                name = plan.stages[step.stage].inputs[slot]
                slopes[name] = slopes[name] + term if name in slopes else term
    return {name: slopes[name] for name in pullback.gives}


def _exponents(plan: Plan, step: _Step, kept: Kept) -> dict[int, Any]:
    """The exponent of the power that divides each given output, by place; none where it is 0."""
    stage = plan.stages[step.stage]
    powers = plan.programs[stage.program].powers
    found = {}
    for at, n in enumerate(step.given):
        if powers and powers[n]:
            own = [power * kept.exponents[step.stage, stage.groups[k]] for k, power in powers[n]]
            found[at] = sum(own[1:], own[0])
    return found


def _interpreted(
    plan: Plan,
    step: _Step,
    kept: Kept,
    arrays: Mapping[str, np.ndarray],
    slopes: Mapping[str, np.ndarray],
) -> list[np.ndarray]:
    """The derivatives in the inputs of a stage, in NumPy."""
    stage = plan.stages[step.stage]
    given = [slopes[stage.outputs[n]] for n in step.given]
    for at, exponent in _exponents(plan, step, kept).items():
        given[at] = np.asarray(shifted(given[at], np.float64(-exponent)))
    return step.way.bound([*(arrays[stage.inputs[n]] for n in step.way.reads), *given])


def _compiled(
    plan: Plan,
    steps: Sequence[_Step],
    kept: Kept,
    arrays: Mapping[str, Any],
    slopes: Mapping[str, Any],
) -> list[list[Any]]:
    """The derivatives in the inputs of the stages of a round, by compiled programs."""
    wanted, inputs = [], []
    for step in steps:
        stage, (_, way, given) = plan.stages[step.stage], step
        exponents = _exponents(plan, step, kept)
        program = plan.programs[stage.program]
        work = _TracedWay(program, given, way.reads, way.gives, tuple(exponents))
        wanted.append(Wanted(work, None, plan.dtype))
        read = [arrays[stage.inputs[n]] for n in way.reads]
        by = [np.asarray(exponent, plan.dtype) for exponent in exponents.values()]
        inputs.append([*read, *by, *(slopes[stage.outputs[n]] for n in given)])
    runs = ready(wanted, _traced)
    return [run(own)[0] for run, own in zip(runs, inputs, strict=True)]
