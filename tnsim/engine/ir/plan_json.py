"""Plans as JSON documents with a digest, checked when they are read.

`sealed` and `opened` write and read a JSON object with a digest of its content. A plan holds
coefficients: a changed coefficient would give another number under the same label, and no check of
types or shapes could tell. The digest is taken over the canonical form of the content (keys sorted,
no spaces), so a document may be indented or reordered, but no value in it may differ. The digest
protects against damage and editing, not against forgery, as anybody can compute a digest.

`plan_from_data` and `program_from_data` turn parsed JSON into plans and programs that can run, or
raise `ValueError`. They check every assumption of the runtime: arguments are earlier values, every
axis has a label, equal labels have equal sizes, results have the shapes that their readers expect,
weights are finite. Data that passes these checks may still be another plan than the written plan,
which only the digest tells.

`document` and `plan_from` combine both: a plan as a sealed document, and back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from tnsim.engine.ir.dtypes import ALL_DTYPES
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.ir.stages import PlanStage, Schedule
from tnsim.errors import CheckpointError

DIGEST = "digest"
T = TypeVar("T")
S = TypeVar("S", bound=Schedule)
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
    fields = _checked_fields(data, form)
    programs = _converted_items(fields["programs"], "program", program_from_data)
    with _naming_place("shapes"):
        shapes = {
            name: _checked_shape(shape) for name, shape in _checked_object(fields["shapes"]).items()
        }
    stages = _converted_items(fields["stages"], "stage", _stage_from)
    outputs = _converted_items(fields["outputs"], "output", _checked_text)
    with _naming_place("scales"):
        scales = {
            name: _checked_pairs(rows) for name, rows in _checked_object(fields["scales"]).items()
        }
    plan: S = cast(Any, form)(
        metric=_checked_text(fields["metric"]),
        exact=_checked_flag(fields["exact"]),
        dtype=_checked_text(fields["dtype"]),
        diagrams=_checked_integer(fields["diagrams"]),
        programs=programs,
        stages=stages,
        shapes=shapes,
        outputs=outputs,
        scales=scales,
        searched_with=_checked_text(fields["searched_with"]),
        runs=_checked_integer(fields["runs"]),
    )
    if plan.runs < 1:
        raise ValueError("a plan is run at least once")
    if plan.dtype not in ALL_DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(ALL_DTYPES)}, found {_shown_value(plan.dtype)}"
        )
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
    fields = _checked_fields(data, Program)
    shapes = _converted_items(fields["shapes"], "shape", _checked_shape)
    values, operations = list(shapes), []
    # Each operation is checked against the shapes of all earlier values, and adds its own.
    for n, row in enumerate(_checked_rows(fields["operations"])):
        with _naming_place(f"operation {n}"):
            operation = _operation_from(row)
            values.append(_shape_of(operation, values))
        operations.append(operation)
    outputs = _checked_integers(fields["outputs"], len(values))
    scales = _converted_items(
        fields["scales"], "scale", lambda row: _integer_pair(row, len(outputs), lowest_second=1)
    )
    powers = _converted_items(
        fields["powers"],
        "powers of output",
        lambda rows: _converted_items(rows, "power", lambda row: _integer_pair(row, len(scales))),
    )
    if powers and len(powers) != len(outputs):
        raise ValueError(f"powers of {len(powers)} outputs, and there are {len(outputs)}")
    program = Program(
        shapes, tuple(operations), outputs, scales, powers, _checked_integer(fields["unshared"])
    )
    _checked_integer(
        program.multiplications
    )  # sizes pass one by one, but their products may be too large
    return program


def _stage_from(data: Any) -> PlanStage:
    fields = _checked_fields(data, PlanStage)
    return PlanStage(
        program=_checked_integer(fields["program"]),
        inputs=_converted_items(fields["inputs"], "input", _checked_text),
        outputs=_converted_items(fields["outputs"], "output", _checked_text),
        groups=_converted_items(fields["groups"], "group", _checked_text),
        degrees=_checked_pairs(fields["degrees"]),
    )


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


def _operation_from(row: Any) -> Operation:
    if not isinstance(row, list) or len(row) != len(Operation._fields):
        raise ValueError(f"expected {len(Operation._fields)} fields")
    kind, args, labels, output, weights, chunks, body, together, block = row
    return Operation(
        kind=_checked_text(kind),
        args=_checked_integers(args),
        labels=_converted_items(labels, "labels of argument", _checked_integers),
        output=_checked_integers(output),
        weights=_converted_items(weights, "weight", _checked_weight),
        chunks=_checked_integers(chunks),
        body=None if body is None else program_from_data(body),
        concurrency=_checked_integer(together, lowest=1),
        block_size=_checked_integer(block),
    )


def _shape_of(operation: Operation, values: Sequence[Shape]) -> Shape:
    """The shape of an operation's result, after the checks of its kind."""
    if operation.kind not in _CHECKS:
        raise ValueError(
            f"kind must be one of {', '.join(_CHECKS)}, found {_shown_value(operation.kind)}"
        )
    _same_length(operation.args, operation.labels, "arguments")
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
    _checked_integer(math.prod(shape))
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


def _checked_fields(data: Any, form: type) -> dict[str, Any]:
    """The data, which is an object with exactly the fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(form)}
    odd = set(_checked_object(data)) ^ names
    if odd:
        raise ValueError(
            f"missing or unknown fields of a {form.__name__}: {', '.join(sorted(odd))}"
        )
    return data


def _checked_object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, found {type(data).__name__}")
    return data


def _checked_rows(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"expected a list, found {type(data).__name__}")
    return data


def _converted_items(data: Any, what: str, convert: Callable[[Any], T]) -> tuple[T, ...]:
    """The converted items of a list; an error names `what` and the number of the item."""
    converted = []
    for n, item in enumerate(_checked_rows(data)):
        with _naming_place(f"{what} {n}"):
            converted.append(convert(item))
    return tuple(converted)


def _checked_integer(value: Any, end: int = MOST, lowest: int = 0) -> int:
    """The value, a whole number from `lowest` up to but without `end`.

    Booleans are refused, although Python counts them as integers.
    """
    if type(value) is not int or not lowest <= value < end:
        raise ValueError(
            f"expected a whole number from {lowest}, below {end:.3g}, found {_shown_value(value)}"
        )
    return value


def _checked_integers(data: Any, end: int = MOST) -> tuple[int, ...]:
    return tuple(_checked_integer(value, end) for value in _checked_rows(data))


def _integer_pair(data: Any, end: int, lowest_second: int = 0) -> tuple[int, int]:
    """The pair (number, power), whose number is below `end`."""
    first, second = _checked_pair(data)
    return _checked_integer(first, end), _checked_integer(second, lowest=lowest_second)


def _checked_pairs(data: Any) -> tuple[tuple[str, int], ...]:
    """The pairs (scale group, count) of a list."""
    pairs = []
    for row in _checked_rows(data):
        name, count = _checked_pair(row)
        pairs.append((_checked_text(name), _checked_integer(count)))
    return tuple(pairs)


def _checked_pair(data: Any) -> list[Any]:
    if len(_checked_rows(data)) != 2:
        raise ValueError(f"expected a pair, found {len(data)} items")
    return data


def _checked_shape(data: Any) -> Shape:
    shape = tuple(_checked_integer(size, lowest=1) for size in _checked_rows(data))
    _checked_integer(math.prod(shape))
    return shape


def _checked_weight(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {_shown_value(value)}")
    return value


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {type(value).__name__}")
    return value


def _checked_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {_shown_value(value)}")
    return value


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
