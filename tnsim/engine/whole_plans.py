"""Results on the host, of small plans by one program. In: a plan, arrays. Out: NumPy.

A stage costs some 50 microseconds beside its arithmetic: to look up its program, hand it the arrays
and wrap what it gives. Where the stages of a plan have few operations together, they become one
program, whose numbers come back as one array. Longer plans run stage by stage, so that equal stages
share a compiled program and each stage frees what it has used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.engine import execution
from tnsim.engine.execution import Result
from tnsim.engine.plan import Plan
from tnsim.engine.programs import Program
from tnsim.sessions import session

LONGEST = 100
"""Operations of a plan that becomes one program; it compiles in about half a second."""
LARGEST = 2**20
"""Elements alive at once in such a plan: beyond them arithmetic takes longer than what is saved."""


def fetched(plan: Plan, arrays: Mapping[str, Any]) -> Result:
    """Run a plan on JAX and bring home its numbers, all that ever comes back from the device.

    Args:
        plan: what to run.
        arrays: every name in `plan.shapes`, none of them traced.

    Returns:
        The result in float64 of NumPy.

    Raises:
        ModelError: an array is missing or has another shape than the plan was made for.
    """
    if not _is_small(plan):
        return _on_host(execution.run(plan, arrays))
    program = session().programs.get(_key(plan), lambda: _program(plan))
    (numbers,), _ = program([arrays[name] for name in plan.shapes])
    return _unpacked(plan, np.asarray(numbers, np.float64))


def _is_small(plan: Plan) -> bool:
    return plan.length <= LONGEST and plan.peak_elements <= LARGEST


def _key(plan: Plan) -> tuple:
    """What the one program of a plan depends on."""
    return plan.pieces, plan.stages, tuple(plan.shapes), plan.outputs


def _program(plan: Plan) -> Program:
    def run(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        arrays = dict(zip(plan.shapes, inputs, strict=True))
        result = execution.run(plan, arrays, "traced")
        return [jnp.concatenate([jnp.ravel(x) for x in _numbers(result)])], []

    return Program(run, plan.length, traced=False)


def _numbers(result: Result) -> list[Any]:
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


def _on_host(result: Result) -> Result:
    for array in _numbers(result):
        if isinstance(array, jax.Array):
            array.copy_to_host_async()  # all are under way before the first is waited for
    values = {name: np.asarray(x, np.float64)[()] for name, x in result.values.items()}
    logs = {key: np.asarray(x, np.float64)[()] for key, x in result.logs.items()}
    return result._replace(values=values, logs=logs)
