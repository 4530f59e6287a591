"""Plans as JSON documents with a digest, checked when they are read.

`sealed` and `opened` write and read a JSON object with a digest of its content. A plan holds
coefficients: a changed coefficient would give another number under the same label, and no check of
types or shapes could tell. The digest is taken over the canonical form of the content (keys sorted,
no spaces), so a document may be indented or reordered, but no value in it may differ. The digest
protects against damage and editing, not against forgery, as anybody can compute a digest.

`plan_from_data` and `program_from_data` turn parsed JSON into plans and programs that can run, or
raise `ValueError` with the place of the error. msgspec makes values of the types that the fields of
plans are annotated with. Then every assumption of the runtime is checked: arguments are earlier
values, every axis has a label, equal labels have equal sizes, results have the shapes that their
readers expect. Data that passes these checks may still be another plan than the written plan, which
only the digest tells.

`document` and `plan_from` combine both: a plan as a sealed document, and back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tnsim.engine.ir.problem import ALL_DTYPES
from tnsim.engine.ir.program import Operation, Program, Schedule
from tnsim.errors import CheckpointError

DIGEST = "digest"
S = TypeVar("S", bound=Schedule)
T = TypeVar("T")
Shape = tuple[int, ...]
MOST = 10**200  # bound on counts: sums and quotients of counts below it are finite as floats
FORMAT = 3  # number of the layout of a document; documents of another layout are refused


def sealed(content: Mapping[str, Any]) -> str:
    """The JSON text of an object: the content, and a digest of the content under `digest`.

    Args:
        content: Plain data without the key `digest`; all numbers are finite.

    Returns:
        JSON text that `opened` reads.

    Example:
        >>> opened(sealed({"weights": [0.5, 2.0]}))
        {'weights': [0.5, 2.0]}
    """
    return json.dumps({**content, DIGEST: _content_digest(content)}, separators=(",", ":"))


def opened(text: str | bytes) -> dict[str, Any]:
    """The content of a sealed document.

    Raises:
        ValueError: For text that is no JSON object, has no digest, or has the digest of another
            content.
        RecursionError: For nesting deeper than the interpreter's stack.
    """
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, found {type(content).__name__}")
    if DIGEST not in content:
        raise ValueError("it has no digest")
    if content.pop(DIGEST) != _content_digest(content):
        raise ValueError(
            "it was changed after it was written: its digest is that of another content"
        )
    return content


def _content_digest(content: Mapping[str, Any]) -> str:
    """The SHA-256 of the canonical form of a content, in hexadecimal digits."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def plan_from_data(data: Any, form: type[S]) -> S:
    """The plan that `document` turned into plain data.

    Args:
        data: Parsed JSON.
        form: Class of the plan.

    Raises:
        ValueError: For data that is no plan, with the place of the error.
    """
    plan = _converted(data, form)
    if plan.runs < 1:
        raise ValueError("a plan is run at least once")
    if plan.dtype not in ALL_DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(ALL_DTYPES)}, found {_shown_value(plan.dtype)}"
        )
    for n, program in enumerate(plan.programs):
        with _naming_place(f"program {n}"):
            _check_program(program)
    for name, shape in plan.shapes.items():
        with _naming_place(f"shape of {name}"):
            _check_shape(shape)
    _check_wiring(plan)
    return plan


def program_data(program: Program) -> dict[str, Any]:
    """A program as plain data that `program_from_data` reads, its tuples shared and not copied.

    Example:
        >>> program_from_data(json.loads(json.dumps(program_data(Program(((2,),), (), (0,))))))
        Program(shapes=((2,),), operations=(), outputs=(0,), scales=(), powers=(), unshared=0)
    """
    data = {field.name: getattr(program, field.name) for field in dataclasses.fields(Program)}
    rows: list[Operation | tuple[Any, ...]] = []
    for operation in program.operations:
        if operation.body is None:
            rows.append(operation)
        else:
            body = program_data(operation.body)
            rows.append(tuple(body if part is operation.body else part for part in operation))
    return data | {"operations": rows}


def program_from_data(data: Any) -> Program:
    """The program that `program_data` turned into plain data.

    Raises:
        ValueError: For data that is no program, with the place of the error.
    """
    program = _converted(data, Program)
    _check_program(program)
    return program


def _converted(data: Any, form: type[T]) -> T:
    """Parsed JSON as a value of a type, by the annotations of its fields."""
    try:
        return msgspec.convert(data, form)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _check_program(program: Program) -> None:
    """Raise `ValueError` unless a program can run."""
    values: list[Shape] = []
    for n, shape in enumerate(program.shapes):
        with _naming_place(f"shape {n}"):
            _check_shape(shape)
        values.append(shape)
    # Each operation is checked against the shapes of all earlier values, and adds its own.
    for n, operation in enumerate(program.operations):
        with _naming_place(f"operation {n}"):
            values.append(_shape_of(operation, values))
    _check_numbers(program.outputs, len(values), "value")
    _check_numbers([output for output, _ in program.scales], len(program.outputs), "output")
    if any(power < 1 for _, power in program.scales):
        raise ValueError("the power of a scale is at least 1")
    if program.powers:
        _same_length(program.powers, program.outputs, "powers of outputs")
    for powers in program.powers:
        _check_numbers([scale for scale, _ in powers], len(program.scales), "scale")
    # Sizes pass one by one, but their products may be too large.
    _check_count(program.multiplications)


def _check_shape(shape: Shape) -> None:
    if not all(shape):
        raise ValueError(f"a size is at least 1, found {shape}")
    _check_count(math.prod(shape))


def _check_count(count: int) -> None:
    if count >= MOST:
        raise ValueError(f"a count is below {MOST:.3g}, found {_shown_value(count)}")


def _check_numbers(numbers: Sequence[int], count: int, what: str) -> None:
    for number in numbers:
        if number >= count:
            raise ValueError(f"there is no {what} {number}")


def _check_wiring(plan: Schedule) -> None:
    """Raise `ValueError` unless stages fit together.

    Every stage reads arrays that exist, in the shapes of its program, and gives new names. Every
    output of the plan is an output of a stage that no later stage reads.
    """
    shapes = dict(plan.shapes)
    made: set[str] = set()
    for n, stage in enumerate(plan.stages):
        with _naming_place(f"stage {n}"):
            if stage.program >= len(plan.programs):
                raise ValueError(f"there is no program {stage.program}")
            program = plan.programs[stage.program]
            for name in stage.inputs:
                if name not in shapes:
                    raise ValueError(f"nothing gives its input {name!r}")
            given = tuple(shapes[name] for name in stage.inputs)
            if given != program.shapes:
                raise ValueError(
                    f"its inputs have shapes {given}, its program reads {program.shapes}"
                )
            results = [program.value_shapes[value] for value in program.outputs]
            _same_length(stage.outputs, results, "outputs")
            _same_length(stage.groups, program.scales, "scale groups")
            if shapes.keys() & set(stage.outputs) or len(set(stage.outputs)) < len(stage.outputs):
                raise ValueError("it gives a name that is taken")
        # `made` holds the outputs that no later stage has read.
        made -= set(stage.inputs)
        made |= set(stage.outputs)
        shapes |= dict(zip(stage.outputs, results, strict=True))
    for name in plan.outputs:
        if name not in made:
            raise ValueError(f"no stage leaves the output {name!r}")
    if set(plan.scales) != set(plan.outputs):
        raise ValueError("scales are of other names than the outputs")


def _shape_of(operation: Operation, values: Sequence[Shape]) -> Shape:
    """The shape of an operation's result, after the checks of its kind."""
    if operation.kind not in _CHECKS:
        raise ValueError(
            f"kind must be one of {', '.join(_CHECKS)}, found {_shown_value(operation.kind)}"
        )
    _same_length(operation.args, operation.labels, "arguments")
    if operation.concurrency < 1:
        raise ValueError("an operation has at least one turn at once")
    sizes: dict[int, int] = {}
    for arg, labels in zip(operation.args, operation.labels, strict=True):
        if arg >= len(values):
            raise ValueError(f"argument {arg} is not an earlier value")
        _same_length(labels, values[arg], f"axes of argument {arg}")
        for label, size in zip(labels, values[arg], strict=True):
            if sizes.setdefault(label, size) != size:
                raise ValueError(f"label {label} has sizes {sizes[label]} and {size}")
    if not set(operation.output) <= set(sizes):
        raise ValueError("a label of the output is on no argument")
    _CHECKS[operation.kind](operation, values)
    shape = tuple(sizes[label] for label in operation.output)
    _check_shape(shape)
    return shape


def _check_contraction(operation: Operation, values: Sequence[Shape]) -> None:
    """Raise `ValueError` for a malformed contraction.

    A contraction of a single argument takes diagonals and sums. A contraction of two is a product
    of arrays that were reduced before.
    """
    labels = operation.labels
    if len(labels) not in (1, 2) or operation.weights or operation.chunks or operation.body:
        raise ValueError("a contraction takes one or two arguments and nothing else")
    _check_distinct(operation.output)
    if len(labels) == 1:
        return
    for own, others in (labels, labels[::-1]):
        _check_distinct(own)
        if not set(own) <= {*others, *operation.output}:
            raise ValueError("a label of one argument alone is summed")


def _check_sum(operation: Operation, values: Sequence[Shape]) -> None:
    """Raise `ValueError` unless every argument of a sum has a weight and the output's axes."""
    if not operation.args or operation.chunks or operation.body:
        raise ValueError("a sum takes arguments with weights and nothing else")
    _same_length(operation.weights, operation.args, "weights")
    if not all(map(math.isfinite, operation.weights)):
        raise ValueError(f"weights are finite, found {_shown_value(operation.weights)}")
    _check_distinct(operation.output)
    for labels in operation.labels:
        _check_distinct(labels)
        if set(labels) != set(operation.output):
            raise ValueError("an argument of a sum has other axes than the output")


def _check_loop(operation: Operation, values: Sequence[Shape]) -> None:
    """Raise `ValueError` unless the body fits the loop.

    The body reads the arguments at a single value, or in a single block, of the labels looped over.
    """
    body, chunks = operation.body, operation.chunks
    if body is None or operation.weights or not chunks:
        raise ValueError("a loop takes labels to loop over, a body, and no weights")
    with _naming_place("body"):
        _check_program(body)
    _check_distinct(chunks)
    sizes: dict[int, int] = {}
    inner = []
    for arg, labels in zip(operation.args, operation.labels, strict=True):
        axes = list(zip(labels, values[arg], strict=True))
        sizes |= dict(axes)
        inner.append(_in_a_turn(axes, operation))
    if operation.block_size and (
        len(chunks) != 1 or sizes.get(chunks[0], 0) % operation.block_size
    ):
        raise ValueError("a loop in blocks has one label, whose size they divide")
    if not set(chunks) <= set(sizes) or set(chunks) & set(operation.output):
        raise ValueError("a label looped over is on no argument, or in the output")
    if body.shapes != tuple(inner):
        raise ValueError(f"the body reads shapes {body.shapes}, the loop gives {tuple(inner)}")
    if body.scales or body.powers or len(body.outputs) != 1:
        raise ValueError("the body of a loop has one output and no scales")
    if body.value_shapes[body.outputs[0]] != tuple(sizes[x] for x in operation.output):
        raise ValueError("the body gives another shape than the loop")


def _in_a_turn(axes: Sequence[tuple[int, int]], loop: Operation) -> Shape:
    """The shape of an argument in a turn of a loop, from its labels and sizes in the loop."""
    if loop.block_size:
        return tuple(loop.block_size if label in loop.chunks else size for label, size in axes)
    return tuple(size for label, size in axes if label not in loop.chunks)


_CHECKS: dict[str, Callable[[Operation, Sequence[Shape]], None]] = {
    "contract": _check_contraction,
    "sum": _check_sum,
    "loop": _check_loop,
}


def _check_distinct(labels: Sequence[int]) -> None:
    if len(set(labels)) < len(labels):
        raise ValueError(f"a label stands twice in {tuple(labels)}")


def _same_length(one: Sequence[Any], other: Sequence[Any], what: str) -> None:
    if len(one) != len(other):
        raise ValueError(f"{len(one)} and {len(other)} {what}, which must be as many")


@contextlib.contextmanager
def _naming_place(what: str) -> Iterator[None]:
    """Prefix the message of a `ValueError` with the place of the error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _shown_value(value: Any) -> str:
    """The beginning of a value's `repr`, enough to recognise the value."""
    return repr(value)[:40]


def document(plan: Any) -> str:
    """The JSON document of a plan, with a digest of its content.

    Args:
        plan: Plan, a dataclass of plain data.

    Returns:
        JSON text that `plan_from` reads.
    """
    data = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    data["programs"] = list(map(program_data, plan.programs))
    data["stages"] = [dataclasses.asdict(stage) for stage in plan.stages]
    return sealed({"format": FORMAT, **data})


def plan_from(text: str | bytes, form: type[S]) -> S:
    """The plan that a document holds.

    Args:
        text: Document written by `document`, in any indentation and order of keys.
        form: Class of the plan.

    Returns:
        A plan equal to the written plan.

    Raises:
        CheckpointError: For text that is no plan of this format, for a plan that cannot run, and
            for a plan that was changed.
    """
    try:
        data = opened(text)
        if data.pop("format", None) != FORMAT:
            raise ValueError("another format number")
        return plan_from_data(data, form)
    except (ValueError, TypeError) as error:
        reason = str(error)
    except RecursionError:
        reason = "it is nested too deeply"
    raise CheckpointError(f"not a tnsim plan in format {FORMAT}: {reason}")
