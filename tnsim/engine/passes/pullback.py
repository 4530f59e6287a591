"""The derivatives of a plan in reverse mode, as a further plan.

The derivative of a contraction `C = sum A B` in A is the contraction with A taken out,
`dA = sum dC B`, where dX stands for the derivative of a final number in X. The derivative of a sum
is the sum with its terms and its result exchanged. So reverse mode needs no operation that programs
do not have: the pullback of a program is a program.

*Programs* (`adjoint`). The adjoint of a program computes the values of the program once more and
goes through its operations from the last to the first. Two kinds of constants write what is left
over: a label that was summed in one argument alone comes back by a product with ones, and a
diagonal is put back into its matrix by a product with the identity. The derivative of a loop in an
argument is a loop over the adjoint of its body. Where a turn reads a part of the argument, the
identity puts the derivative of the part in its place.

*Plans* (`pulled_back`). Stages are gone through from the last to the first; each has a stage that
runs the adjoint of its program. The adjoint reads the arrays that the stage has read, so a run
whose derivatives are wanted keeps these (`Pullback.forward`), and values inside a stage are
computed again. A value that several stages read has a derivative for each of them, and the stage
that gives the value adds them up.

*Scales.* A stage divides its outputs by powers of two. Derivatives take the powers as constants
(see `scaled.scale_exponent`), so the derivative in an output is divided by the same power. Powers
are numbers of a run: they are inputs of the pullback (`Pullback.factors`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.ir.stages import PlanStage
from tnsim.engine.passes.splitting import MAX_OPERATIONS, split
from tnsim.engine.plan import Plan
from tnsim.sessions import per_object_cache, session

Labels = tuple[int, ...]
Shape = tuple[int, ...]


_MOST_PARTS = 8
"""Parts of a derivative that are added up as soon as they are there: all of them are kept."""


class Constant(NamedTuple):
    """An array of ones, or an identity matrix.

    Attributes:
        shape: Shape of the array.
        is_identity: Whether the array is an identity matrix.
    """

    shape: Shape
    is_identity: bool

    @property
    def name(self) -> str:
        """The name of the array in the pullback."""
        return f"{'identity' if self.is_identity else 'ones'} {self.shape}"

    def array(self, dtype: str) -> np.ndarray:
        """The array itself."""
        return (
            np.eye(self.shape[0], dtype=dtype) if self.is_identity else np.ones(self.shape, dtype)
        )


class Adjoint(NamedTuple):
    """The pullback of a program.

    Its inputs are, in this order: the inputs of the program in `reads`; a power of two for each
    output in `scaled`, by which the program has divided the output; the derivatives in the outputs,
    to be added up for each output; and `constants`.

    Attributes:
        program: Program that computes the derivatives.
        reads: Numbers of the inputs of the program that its adjoint reads.
        scaled: Numbers of the outputs whose powers of two the adjoint reads.
        constants: Constants that the adjoint reads.
        gives: Numbers of the inputs of the program in which the outputs are derivatives.
    """

    program: Program
    reads: tuple[int, ...]
    scaled: tuple[int, ...]
    constants: tuple[Constant, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True)
class Pullback:
    """The pullback of a plan.

    Attributes:
        forward: The plan, with the values that the pullback reads among its outputs.
        backward: Plan of the derivatives.
        outputs: Names of the outputs of the plan itself.
        cotangents: Name in `backward` of the derivative in each output of the plan.
        factors: Name in `backward` of each power of two, with triples (stage, scale group, power):
            it is 2 to the power of minus the sum of the powers times the exponents of the scales.
        constants: Constants that `backward` reads, by name.
        gradients: Name in `backward` of the derivative in each array of the plan. An array on which
            no output depends is absent.
    """

    forward: Plan
    backward: Plan
    outputs: tuple[str, ...]
    cotangents: dict[str, str]
    factors: dict[str, tuple[tuple[int, str, int], ...]]
    constants: dict[str, Constant]
    gradients: dict[str, str]


class _WeightedTerm(NamedTuple):
    """A summand of a derivative.

    Attributes:
        value: Number of the value.
        weight: Weight of the value in the sum.
        axes: For each axis of the value its axis in the sum.
    """

    value: int
    weight: float
    axes: Labels


class _ProgramWriter:
    """A program that is written operation by operation; its inputs may be named at any time."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []
        self.operations: dict[int, Operation] = {}
        self.constants: dict[Constant, int] = {}

    def input(self, shape: Shape) -> int:
        """Number of a new input."""
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def constant(self, shape: Shape, is_identity: bool) -> int:
        """Number of a constant, which is an input."""
        constant = Constant(shape, is_identity)
        if constant not in self.constants:
            self.constants[constant] = self.input(shape)
        return self.constants[constant]

    def add(self, operation: Operation) -> int:
        """Number of the result of an operation."""
        sizes = operation.sizes(self.shapes)
        number = self.input(tuple(sizes[label] for label in operation.output))
        self.operations[number] = operation
        return number

    def contracted(
        self, one: int, labels: Labels, other: int, other_labels: Labels, output: Labels
    ) -> int:
        """Number of the contraction of two values."""
        both = (labels, other_labels)
        return self.add(Operation("contract", (one, other), both, output))

    def reduced(self, value: int, labels: Labels, output: Labels) -> int:
        """Number of a value on the diagonals of repeated labels, summed over other labels."""
        if labels == output:
            return value
        return self.add(Operation("contract", (value,), (labels,), output))

    def total(self, terms: Sequence[_WeightedTerm]) -> int:
        """Number of the sum of some terms."""
        order = tuple(range(len(terms[0].axes)))
        if len(terms) == 1 and terms[0].weight == 1.0 and terms[0].axes == order:
            return terms[0].value
        values = tuple(term.value for term in terms)
        weights = tuple(term.weight for term in terms)
        return self.add(Operation("sum", values, tuple(t.axes for t in terms), order, weights))

    def program(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
        """The program of the outputs, without operations that they do not need.

        Args:
            inputs: Numbers of the inputs, in order; all others are unused.
            outputs: Numbers of the outputs.
        """
        used = self.used(outputs)
        needed = [number for number in self.operations if number in used]
        numbers = {number: n for n, number in enumerate((*inputs, *needed))}
        operations = []
        for number in needed:
            operation = self.operations[number]
            args = tuple(numbers[a] for a in operation.args)
            operations.append(operation._replace(args=args))
        shapes = tuple(self.shapes[number] for number in inputs)
        given = tuple(numbers[number] for number in outputs)
        return Program(shapes, tuple(operations), given, powers=((),) * len(given))

    def used(self, outputs: Iterable[int]) -> set[int]:
        """Numbers of the values that the outputs are computed from, themselves included."""
        used = set(outputs)
        for number, operation in reversed(self.operations.items()):
            if number in used:
                used.update(operation.args)
        return used


@per_object_cache
def adjoint(program: Program, given: tuple[int, ...], wanted: tuple[bool, ...]) -> Adjoint | None:
    """The pullback of a program.

    Args:
        program: Program to be differentiated, without the division by its scales.
        given: Number of derivatives to be added up, for each output of the program.
        wanted: Whether the derivative is wanted, for each input of the program.

    Returns:
        The adjoint; None where no output depends on a wanted input.

    Example:
        >>> product = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
        >>> found = adjoint(Program(((4, 3), (3, 5)), (product,), (2,)), (1,), (True, False))
        >>> found.reads, found.program.shapes, found.program.operations[0].labels
        ((1,), ((3, 5), (4, 5)), ((0, 2), (1, 2)))
    """
    writer = _ProgramWriter()
    varies = _varying_values(program, wanted)
    values = [writer.input(shape) for shape in program.shapes]
    for operation in program.operations:
        args = tuple(values[a] for a in operation.args)
        values.append(writer.add(operation._replace(args=args)))
    scaled = []
    if any(program.powers):
        scaled = [n for n, powers in enumerate(program.powers) if powers and given[n]]
    factors = {n: writer.input(()) for n in scaled}
    cotangents: list[int] = []
    terms: dict[int, list[_WeightedTerm]] = {}
    for n, (number, count) in enumerate(zip(program.outputs, given, strict=True)):
        shape = program.value_shapes[number]
        axes = tuple(range(len(shape)))
        parts = [writer.input(shape) for _ in range(count)]
        cotangents += parts
        if parts:
            whole = writer.total([_WeightedTerm(part, 1.0, axes) for part in parts])
            if n in factors:
                whole = writer.contracted(whole, axes, factors[n], (), axes)
            terms.setdefault(number, []).append(_WeightedTerm(whole, 1.0, axes))
    inputs = len(program.shapes)
    for n, operation in reversed(list(enumerate(program.operations, inputs))):
        if n in terms and varies[n]:
            own = operation._replace(args=tuple(values[a] for a in operation.args))
            cotangent = writer.total(terms.pop(n))
            for slot, a in enumerate(operation.args):
                if varies[a]:
                    term = _argument_term(writer, own, slot, cotangent)
                    if term is not None:
                        terms.setdefault(a, []).append(term)
    gives = tuple(n for n in range(inputs) if wanted[n] and n in terms)
    if not gives:
        return None
    outputs = [writer.total(terms[n]) for n in gives]
    used = writer.used(outputs)
    reads = tuple(n for n in range(inputs) if n in used)
    constants = {
        constant: number for constant, number in writer.constants.items() if number in used
    }
    order = [*reads, *factors.values(), *cotangents, *constants.values()]
    written = writer.program(order, outputs)
    return Adjoint(written, reads, tuple(scaled), tuple(constants), gives)


def _varying_values(program: Program, inputs: Sequence[bool]) -> list[bool]:
    """Whether each value of a program depends on inputs that vary."""
    varying = list(inputs)
    for operation in program.operations:
        varying.append(any(varying[a] for a in operation.args))
    return varying


def _argument_term(
    writer: _ProgramWriter, operation: Operation, slot: int, cotangent: int
) -> _WeightedTerm | None:
    """The derivative in an argument of an operation, a term of the whole derivative.

    Args:
        writer: Program in which the operation stands.
        operation: Operation to be differentiated.
        slot: Place of the argument among those of the operation.
        cotangent: Number of the derivative in the result of the operation.
    """
    labels = operation.labels[slot]
    if operation.kind == "sum":
        axes = tuple(labels.index(label) for label in operation.output)
        return _WeightedTerm(cotangent, operation.weights[slot], axes)
    if operation.kind == "loop":
        value = _loop_derivative(writer, operation, slot, cotangent)
        return None if value is None else _WeightedTerm(value, 1.0, tuple(range(len(labels))))
    return _contraction_term(writer, operation, slot, cotangent)


def _contraction_term(
    writer: _ProgramWriter, operation: Operation, slot: int, cotangent: int
) -> _WeightedTerm:
    """The derivative in an argument of a contraction: the contraction with all other arguments."""
    labels = operation.labels[slot]
    value, have = cotangent, operation.output
    others = [n for n in range(len(operation.args)) if n != slot]
    if others:
        (other,) = others
        theirs = operation.labels[other]
        met = tuple(x for x in dict.fromkeys(theirs) if x in labels or x in have)
        factor = writer.reduced(operation.args[other], theirs, met)
        left = tuple(x for x in dict.fromkeys(labels) if x in have or x in met)
        value, have = writer.contracted(value, have, factor, met, left), left
    sizes = dict(zip(labels, writer.shapes[operation.args[slot]], strict=True))
    summed = tuple(x for x in dict.fromkeys(labels) if x not in have)
    if summed:  # every entry along a label that was summed has the same derivative
        ones = writer.constant(tuple(sizes[x] for x in summed), is_identity=False)
        value, have = writer.contracted(value, have, ones, summed, have + summed), have + summed
    fresh = itertools.count(1 + max(sizes, default=0))
    own: list[int] = []  # the labels of the argument, repeated ones replaced
    for label in labels:
        if label not in own:
            own.append(label)
            continue
        other = next(fresh)
        own.append(other)
        # Entries off the diagonal were not read, and have no derivative.
        identity = writer.constant((sizes[label],) * 2, is_identity=True)
        both = (*have, other)
        value, have = writer.contracted(value, have, identity, (label, other), both), both
    return _WeightedTerm(value, 1.0, tuple(own.index(x) for x in have))


def _loop_derivative(
    writer: _ProgramWriter, loop: Operation, slot: int, cotangent: int
) -> int | None:
    """The derivative in an argument of a loop: a loop over the adjoint of the body.

    A turn gives the derivative in the part of the argument that the turn reads, and a row of the
    identity, or several where turns take blocks, puts the part in its place. None where the body
    does not depend on the argument.
    """
    body, labels = loop.body, loop.labels[slot]
    assert body is not None  # every loop has a body
    derivative = adjoint(body, (1,), tuple(n == slot for n in range(len(loop.args))))
    if derivative is None:
        return None
    sizes = loop.sizes(writer.shapes)
    fresh = itertools.count(1 + max(sizes))
    inner = _ProgramWriter()
    args, arg_labels = [*loop.args, cotangent], [*loop.labels, loop.output]
    given = [inner.input(shape) for shape in (*body.shapes, writer.shapes[cotangent])]
    numbers = [*(given[n] for n in derivative.reads), given[-1]]
    for constant in derivative.constants:
        numbers.append(inner.input(constant.shape))
        args.append(writer.constant(*constant))
        arg_labels.append(tuple(next(fresh) for _ in constant.shape))
    for operation in derivative.program.operations:
        moved = operation._replace(args=tuple(numbers[a] for a in operation.args))
        numbers.append(inner.add(moved))
    # The labels of a loop tell sizes apart and need not differ, so axes are told apart by place.
    value = numbers[derivative.program.outputs[0]]
    block = (loop.block_size,) if loop.block_size else ()
    have = tuple(n for n, x in enumerate(labels) if block or x not in loop.chunks)
    output, order = list(labels), list(range(len(labels)))
    for n, label in enumerate(labels):
        if label not in loop.chunks:
            continue
        output[n], order[n] = next(fresh), len(labels) + n
        rows = inner.input((*block, sizes[label]))
        args.append(writer.constant((sizes[label],) * 2, is_identity=True))
        arg_labels.append((label, output[n]))
        row_labels = (n, order[n]) if block else (order[n],)
        left = (*(x for x in have if x != n), order[n])
        value, have = inner.contracted(value, have, rows, row_labels, left), left
    value = inner.reduced(value, have, tuple(order))
    inputs = [n for n in range(len(inner.shapes)) if n not in inner.operations]
    whole = loop._replace(
        args=tuple(args),
        labels=tuple(arg_labels),
        output=tuple(output),
        body=inner.program(inputs, [value]),
    )
    return writer.add(whole)


def pulled_back(plan: Plan, wanted: frozenset[str]) -> Pullback:
    """The pullback of a plan, the same object at every call in a session.

    Args:
        plan: Plan on real numbers.
        wanted: Names of the arrays in which derivatives are wanted.
    """
    key = (pulled_back, wanted, plan.dtype, plan.runs)
    return session().belongings.get(
        plan.whole, key, lambda: _PullbackPlanner(plan, wanted).pullback()
    )


class _PullbackPlanner:
    """The pullback of a plan, put together from the last stage to the first.

    Attributes:
        varies: Names of the arrays and values that depend on wanted arrays.
        derivatives: For each name the names of the derivatives to be added up.
    """

    def __init__(self, plan: Plan, wanted: frozenset[str]) -> None:
        self.plan = plan
        self.wanted = wanted
        self.varies = set(wanted)
        self.known = {name: tuple(shape) for name, shape in plan.shapes.items()}
        for stage in plan.stages:
            program = plan.programs[stage.program]
            varies = _varying_values(program, [name in self.varies for name in stage.inputs])
            for name, number in zip(stage.outputs, program.outputs, strict=True):
                self.known[name] = program.value_shapes[number]
                if varies[number]:
                    self.varies.add(name)
        self.programs: dict[Program, int] = {}
        self.stages: list[PlanStage] = []
        self.shapes: dict[str, Shape] = {}
        self.factors: dict[str, tuple[tuple[int, str, int], ...]] = {}
        self.constants: dict[str, Constant] = {}
        self.cotangents = {name: f"d {name}" for name in plan.outputs if name in self.varies}
        self.derivatives = {name: [own] for name, own in self.cotangents.items()}
        for name, own in self.cotangents.items():
            self.shapes[own] = self.known[name]

    def pullback(self) -> Pullback:
        plan = self.plan
        for n in reversed(range(len(plan.stages))):
            self._add_adjoint(n, plan.stages[n])
        gradients = {}
        for name in plan.shapes:
            if name in self.wanted and name in self.derivatives:
                gradients[name] = self._array_gradient(name)
        backward = dataclasses.replace(
            plan,
            programs=tuple(self.programs),
            stages=tuple(self.stages),
            shapes=self.shapes,
            outputs=tuple(gradients.values()),
            scales=dict.fromkeys(gradients.values(), ()),
        )
        given = (*plan.shapes, *plan.outputs)
        kept = [name for name in self.shapes if name in self.known and name not in given]
        forward = dataclasses.replace(
            plan,
            outputs=(*plan.outputs, *kept),
            scales=plan.scales | dict.fromkeys(kept, ()),
        )
        return Pullback(
            forward,
            backward,
            plan.outputs,
            self.cotangents,
            self.factors,
            self.constants,
            gradients,
        )

    def _add_adjoint(self, n: int, stage: PlanStage) -> None:
        """Add the adjoint of a stage."""
        program = self.plan.programs[stage.program]
        given = tuple(len(self.derivatives.get(name, ())) for name in stage.outputs)
        wanted = tuple(name in self.varies for name in stage.inputs)
        derivative = adjoint(program, given, wanted) if any(given) and any(wanted) else None
        if derivative is None:
            return
        inputs = [stage.inputs[slot] for slot in derivative.reads]
        for name in inputs:
            self.shapes[name] = self.known[name]
        for slot in derivative.scaled:
            name = f"scale of {stage.outputs[slot]}"
            powers = program.powers[slot]
            self.factors[name] = tuple((n, stage.groups[scale], p) for scale, p in powers)
            self.shapes[name] = ()
            inputs.append(name)
        for name in stage.outputs:
            inputs += self.derivatives.get(name, [])
        for constant in derivative.constants:
            self.constants[constant.name] = constant
            self.shapes[constant.name] = constant.shape
            inputs.append(constant.name)
        outputs = tuple(f"d {stage.inputs[slot]} #{n}.{slot}" for slot in derivative.gives)
        self._add_program(derivative.program, inputs, outputs)
        for slot, output in zip(derivative.gives, outputs, strict=True):
            name = stage.inputs[slot]
            parts = self.derivatives.setdefault(name, [])
            parts.append(output)
            if len(parts) == _MOST_PARTS:
                self.derivatives[name] = [self._add_sum(name, f"sum to {output}")]

    def _add_program(self, program: Program, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Add stages that run a program, in parts where it is long."""
        names = dict(enumerate(inputs))
        *first, last = split(program, MAX_OPERATIONS)
        for part in first:
            names |= {n: f"part #{len(self.stages)}.{n}" for n in part.gives}
            given = [names[n] for n in part.gives]
            self._add_stage(part.program, [names[n] for n in part.takes], given)
        self._add_stage(last.program, [names[n] for n in last.takes], outputs)

    def _add_stage(self, program: Program, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Add a stage that runs a program."""
        number = self.programs.setdefault(program, len(self.programs))
        self.stages.append(PlanStage(number, tuple(inputs), tuple(outputs)))

    def _array_gradient(self, name: str) -> str:
        """The name of the derivative in an array, where all its parts are added up."""
        (first, *others) = self.derivatives[name]
        # An array that is an output itself has the given derivative, which is no value of a stage.
        is_given = first in self.shapes
        return self._add_sum(name, f"gradient {name}") if others or is_given else first

    def _add_sum(self, name: str, output: str) -> str:
        """Add a stage that adds up the derivatives in an array or a value."""
        parts, shape = self.derivatives[name], self.known[name]
        axes = tuple(range(len(shape)))
        count = len(parts)
        added = Operation("sum", tuple(range(count)), (axes,) * count, axes, (1.0,) * count)
        self._add_stage(
            Program((shape,) * count, (added,), (count,), powers=((),)), parts, [output]
        )
        return output
