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
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax

from tnsim.engine.lowering import run_piece
from tnsim.engine.memory import give_back_freed
from tnsim.engine.piece import Piece
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
        return partial(run_piece, piece)
    traced = backend == "traced"
    programs = session().programs
    one_run = partial(run_piece, piece)
    return programs.get((piece, traced), lambda: Program(one_run, piece.length, traced))
