"""Results on the host, of small plans by one program. In: a plan, arrays. Out: NumPy.

A stage costs some 50 microseconds beside its arithmetic: to look up its program, hand it the arrays
and wrap what it gives. Where the stages of a plan have few operations together, they become one
program, whose numbers come back as one array. Longer plans run stage by stage, so that equal stages
share a compiled program and each stage frees what it has used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.engine import execution
from tnsim.engine.execution import Result
from tnsim.engine.plan import Plan
from tnsim.engine.plan_stages import WholePlan
from tnsim.engine.programs import Wanted, lie_on_default_device, ready
from tnsim.engine.stacking import Run, Stacked, mapped

LONGEST = 100
"""Operations of a plan that becomes one program; it compiles in about half a second."""
LARGEST = 2**20
"""Elements alive at once in such a plan: beyond them arithmetic takes longer than what is saved."""


def fetched(plan: Plan, arrays: Mapping[str, Any]) -> Result:
    """Run a plan on JAX and bring home its numbers, all that ever comes back from the device.

    Args:
        plan: What to run.
        arrays: Every name in `plan.shapes`, none of them traced.

    Returns:
        The result in float64 of NumPy.

    Raises:
        ModelError: An array is missing or has another shape than the plan was made for.
    """
    if is_small(plan) and lie_on_default_device(arrays.values()):
        return _unpacked(plan, _numbers(plan, arrays, None))
    result = execution.run(plan, arrays)
    for array in _all(result):
        if isinstance(array, jax.Array):
            array.copy_to_host_async()  # all are under way before the first is waited for
    values = {name: np.asarray(x, np.float64)[()] for name, x in result.values.items()}
    logs = {key: np.asarray(x, np.float64)[()] for key, x in result.logs.items()}
    return result._replace(values=values, logs=logs)


def fetched_at_all(plan: Plan, arrays: Mapping[str, Any], stacks: Iterable[str]) -> list[Result]:
    """The results of a plan at every entry of some stacks of arrays, computed together.

    Args:
        plan: What to run.
        arrays: As for `fetched`; those in `stacks` have one more axis in front.
        stacks: Names of the stacked arrays.

    Returns:
        A result for each entry, as `fetched` gives it.

    Raises:
        ModelError: As `fetched`.
    """
    over = {name: (True,) for name in stacks}
    (size,) = {len(arrays[name]) for name in over}
    if is_small(plan) and lie_on_default_device(arrays.values()):
        inputs = tuple((name in over,) for name in plan.shapes)
        rows = _numbers(plan, arrays, Stacked((size,), inputs, ((True,),), ()))
        return [_unpacked(plan, row) for row in rows]
    result = execution.run(plan, arrays, over=over)
    return [_entry(result, n, size) for n in range(size)]


def is_small(plan: Plan) -> bool:
    """Whether a plan becomes one program."""
    return plan.whole.length <= LONGEST and plan.peak_elements <= LARGEST


def _numbers(plan: Plan, arrays: Mapping[str, Any], over: Stacked | None) -> np.ndarray:
    """All numbers of the result in a row, a row for every entry of stacks."""
    names = plan.whole.names

    def function(wanted: Wanted[WholePlan]) -> Run:
        def run(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
            arrays = dict(zip(names, inputs, strict=True))
            result = execution.run(plan, arrays, "numpy")  # stages as they are, no programs in one
            return [jnp.concatenate([jnp.ravel(x) for x in _all(result)])], []

        return run if wanted.over is None else mapped(run, wanted.over)

    (program,) = ready([Wanted(plan.whole, over, plan.dtype)], function)
    (numbers,), _ = program([arrays[name] for name in names])
    return np.asarray(numbers, np.float64)


def _all(result: Result) -> list[Any]:
    return [*result.values.values(), *result.logs.values()]


def _unpacked(plan: Plan, numbers: np.ndarray) -> Result:
    """The result from its numbers in a row: values of the outputs, then a number for every log."""
    values = {}
    start = 0
    for name, shape in plan.output_shapes.items():
        size = math.prod(shape)
        values[name] = numbers[start : start + size].reshape(shape)[()]
        start += size
    logs = dict(zip(plan.log_weights, numbers[start:], strict=True))
    return Result(values, logs, plan.log_weights)


def _entry(result: Result, n: int, size: int) -> Result:
    """One entry of a stacked result; what does not depend on the stack is the same in all."""

    def at(array: Any) -> Any:
        array = np.asarray(array, np.float64)
        return array[n if len(array) == size else 0]

    values = {name: at(array) for name, array in result.values.items()}
    return result._replace(values=values, logs={key: at(x) for key, x in result.logs.items()})
