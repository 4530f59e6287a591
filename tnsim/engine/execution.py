"""Run a plan on arrays. In: a `Plan` and arrays by name. Out: mantissas and logarithms.

Lowering is written once over autoray, so a piece runs on JAX (jitted, one program per piece and
dtype, whatever the number of stages that use it) and, eagerly, on NumPy, which is the reference
in tests.

After each stage the values of a scale group are divided by the group's scale and its logarithm is
kept, per stage, so that a cosine can subtract logarithms stage by stage instead of at the end,
where those of a deep network are of the order 2^L (paper, section 2.2; norms grow like c^(2^L)).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from autoray import do

from tnsim.engine.memory import give_back_freed
from tnsim.engine.piece import Operation, Piece
from tnsim.engine.plan import Plan
from tnsim.engine.programs import Program
from tnsim.errors import ModelError
from tnsim.sessions import session

_SMALL = 2**14  # elements of arrays that are not worth placing by themselves, or waiting for
_TRIMMED = 2**22  # elements of a stage before which freed memory is given back: 32 MiB in float64


class Result(NamedTuple):
    """`values[name] * exp(sum over (stage, group) of logs * weight)`, see `log_of`."""

    values: dict[str, Any]
    logs: dict[tuple[int, str], Any]
    weights: dict[tuple[int, str], float]


def run(plan: Plan, arrays: Mapping[str, Any], backend: str = "jax") -> Result:
    """Execute a plan. `arrays` holds every name in `plan.shapes`.

    backend: "jax", where arrays may be mapped over (`jax.vmap`), "traced" inside a trace of the
    caller's, or "numpy".

    Raises `ModelError` when an array is missing or has another shape than the plan was made for.
    """
    for name, shape in plan.shapes.items():
        if name not in arrays or tuple(arrays[name].shape) != tuple(shape):
            found = tuple(arrays[name].shape) if name in arrays else "nothing"
            raise ModelError(
                f"the plan expects {name} of shape {tuple(shape)}, found {found}; "
                "plan these models anew"
            )
    values: dict[str, Any] = dict(arrays)
    logs: dict[tuple[int, str], Any] = {}
    last_use = {name: n for n, stage in enumerate(plan.stages) for name in stage.inputs}
    for n, stage in enumerate(plan.stages):
        piece = plan.pieces[stage.piece]
        if piece.peak_elements > _TRIMMED:
            give_back_freed()
        runner = _runner(piece, backend)
        outputs, scales = runner([values[name] for name in stage.inputs])
        if backend == "jax" and piece.peak_elements > _SMALL:
            # A stage sent ahead would hold its arrays beside those of this one.
            jax.block_until_ready(outputs)
        values.update(zip(stage.outputs, outputs, strict=True))
        logs.update({(n, group): scale for group, scale in zip(stage.groups, scales, strict=True)})
        for name in set(stage.inputs):
            if last_use[name] == n and name not in arrays:
                del values[name]
    return Result({name: values[name] for name in plan.outputs}, logs, _weights(plan, logs))


def log_of(result: Result, combination: Mapping[str, float]) -> Any:
    """`sum over groups of combination[group] * log(group)`, stage by stage.

    Coefficients that cancel cost nothing.
    """
    total = 0.0
    for key, log in result.logs.items():
        factor = combination.get(key[1], 0.0) * result.weights[key]
        if factor:
            total = total + factor * log
    return total


@contextlib.contextmanager
def precision() -> Iterator[None]:
    """The JAX settings under which plans run: 64-bit types on, matmuls in full precision.

    Scoped, never global.
    """
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def placed(arrays: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The arrays in `dtype` on JAX's device, each let go in `arrays` as soon as it is there.

    A program puts few small arrays there itself, in less time.
    """
    if sum(array.size for array in arrays.values()) <= _SMALL:
        return {name: cast(array, dtype) for name, array in arrays.items()}
    return {name: jax.device_put(cast(arrays.pop(name), dtype)) for name in list(arrays)}


def cast(array: Any, dtype: str) -> Any:
    return array if array.dtype == dtype else array.astype(dtype)


def _weights(plan: Plan, logs: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], float]:
    """How often a stage's logarithm counts in the end.

    The product of the later degrees of its group.
    """
    found, later = {}, {}
    for n in reversed(range(len(plan.stages))):
        for group in plan.stages[n].groups:
            found[n, group] = float(later.get(group, 1))
        for group, degree in plan.stages[n].degrees:
            later[group] = later.get(group, 1) * degree
    return found


def _runner(piece: Piece, backend: str) -> Any:
    """What runs a piece: itself on NumPy, else a program that the session keeps."""
    if backend == "numpy":
        return partial(_run_piece, piece)
    traced = backend == "traced"
    programs = session().programs
    one_run = partial(_run_piece, piece)
    return programs.get((piece, traced), lambda: Program(one_run, piece.length, traced))


def _run_piece(piece: Piece, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """All outputs of a piece, renormalised, and the logarithm of each scale."""
    values = list(inputs)
    last = {a: n for n, op in enumerate(piece.operations) for a in op.args}
    for n, op in enumerate(piece.operations):
        values.append(_apply(op, [values[a] for a in op.args]))
        for a in op.args:
            if last[a] == n and a not in piece.outputs:
                values[a] = None  # lets NumPy free it; XLA does so by itself
    outputs = [values[n] for n in piece.outputs]
    scales = [_scale(outputs[which], power) for which, power in piece.scales]
    for n, powers in enumerate(piece.powers):
        for slot, power in powers:
            outputs[n] = outputs[n] / scales[slot] ** power
    return outputs, [do("log", scale) for scale in scales]


def _scale(value: Any, power: int) -> Any:
    """max|value| ** (1 / power), 1 for a zero value.

    A constant to derivatives: value and log would cancel.
    """
    largest = do("max", do("abs", value))
    if isinstance(largest, jax.Array):
        largest = jax.lax.stop_gradient(largest)
    largest = do("where", largest > 0, largest, do("ones_like", largest))
    return (
        largest if power == 1 else do("sqrt", largest) if power == 2 else largest ** (1.0 / power)
    )


def _apply(op: Operation, args: list[Any]) -> Any:
    if op.kind == "sum":
        total = None
        for weight, arg, labels in zip(op.weights, args, op.labels, strict=True):
            arg = _to(arg, labels, op.output)
            arg = arg if weight == 1.0 else weight * arg
            total = arg if total is None else total + arg
        return total
    if op.kind == "loop":
        return _loop(op, args)
    if len(args) == 1:
        return _reduce(args[0], op.labels[0], op.output)
    (x, y), (x_labels, y_labels) = args, op.labels
    return _contract(x, y, x_labels, y_labels, op.output)


def _loop(op: Operation, args: list[Any]) -> Any:
    """Add up a piece over all values of its chunked labels.

    One compiled body, not one copy per value.
    """
    sizes = {
        x: n
        for arg, labels in zip(args, op.labels, strict=True)
        for x, n in zip(labels, arg.shape, strict=True)
    }
    counts = [sizes[label] for label in op.chunks]
    body = op.body
    assert body is not None  # a loop has one

    def step(n: Any) -> Any:
        at = {}
        for label, count in zip(reversed(op.chunks), reversed(counts), strict=True):
            n, at[label] = n // count, n % count
        fixed = []
        for arg, labels in zip(args, op.labels, strict=True):
            for axis in reversed(range(len(labels))):
                if labels[axis] in at:
                    arg = do("take", arg, at[labels[axis]], axis=axis)
            fixed.append(arg)
        return _run_piece(body, fixed)[0][0]

    first = step(0)
    if isinstance(first, jax.Array):
        return jax.lax.fori_loop(1, math.prod(counts), lambda n, total: total + step(n), first)
    return sum((step(n) for n in range(1, math.prod(counts))), first)


def _reduce(x: Any, labels: Sequence[int], output: tuple[int, ...]) -> Any:
    """Diagonals over repeated labels, then sums over those not in the output."""
    labels = list(labels)
    while len(set(labels)) < len(labels):
        label = next(x for x in labels if labels.count(x) > 1)
        first = labels.index(label)
        second = labels.index(label, first + 1)
        x = do("diagonal", x, axis1=first, axis2=second)
        labels = [y for n, y in enumerate(labels) if n not in (first, second)] + [label]
    summed = tuple(n for n, label in enumerate(labels) if label not in output)
    x = do("sum", x, axis=summed) if summed else x
    return _to(x, tuple(y for y in labels if y in output), output)


def _contract(
    x: Any, y: Any, xl: tuple[int, ...], yl: tuple[int, ...], output: tuple[int, ...]
) -> Any:
    """Two arrays into one, as a broadcast product, a product and a sum, or a (batched) matrix
    product.
    """
    shared = [label for label in xl if label in yl]
    summed = [label for label in shared if label not in output]
    batch = [label for label in shared if label in output]
    left = [label for label in xl if label not in yl]
    right = [label for label in yl if label not in xl]
    if not summed:
        return _spread(x, xl, output) * _spread(y, yl, output)
    one_sided = not left or not right
    if one_sided and (
        batch or not (left or right)
    ):  # a matrix product would have no rows or no columns
        order = tuple(batch + left + right + summed)
        z = _spread(x, xl, order) * _spread(y, yl, order)
        z = do("sum", z, axis=tuple(range(len(order) - len(summed), len(order))))
        return _to(z, order[: len(order) - len(summed)], output)
    if not batch:
        if (
            output and output[0] in right
        ):  # the product in the order that needs no transposition of the result
            x, y, xl, yl, left, right = y, x, yl, xl, right, left
        axes = [[labels.index(label) for label in summed] for labels in (xl, yl)]
        return _to(do("tensordot", x, y, axes=axes), tuple(left + right), output)
    sizes = dict(zip(xl, x.shape, strict=True)) | dict(zip(yl, y.shape, strict=True))
    count = lambda labels: math.prod(sizes[label] for label in labels)  # noqa: E731
    x = do(
        "reshape",
        _to(x, xl, tuple(batch + left + summed)),
        (count(batch), count(left), count(summed)),
    )
    y = do(
        "reshape",
        _to(y, yl, tuple(batch + summed + right)),
        (count(batch), count(summed), count(right)),
    )
    z = do("reshape", do("matmul", x, y), tuple(sizes[label] for label in batch + left + right))
    return _to(z, tuple(batch + left + right), output)


def _to(x: Any, labels: tuple[int, ...], output: tuple[int, ...]) -> Any:
    axes = tuple(labels.index(label) for label in output)
    return x if axes == tuple(range(len(axes))) else do("transpose", x, axes)


def _spread(x: Any, labels: tuple[int, ...], output: tuple[int, ...]) -> Any:
    """Axes in the order of the output, with size 1 where a label is missing."""
    present = tuple(label for label in output if label in labels)
    x = _to(x, labels, present)
    it = iter(x.shape)
    shape = tuple(next(it) if label in labels else 1 for label in output)
    return x if shape == tuple(x.shape) else do("reshape", x, shape)
