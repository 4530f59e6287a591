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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from tnsim.engine.lowering import run_piece
from tnsim.engine.memory import give_back_freed
from tnsim.engine.piece import Piece
from tnsim.engine.plan import Plan
from tnsim.engine.programs import Wanted, lie_on_default_device, ready
from tnsim.engine.stacking import Axes, Run, Stacked, aligned, looped, mapped, stacked
from tnsim.errors import ModelError

_SMALL = 2**14  # elements of arrays that are not worth placing by themselves, or waiting for
_TRIMMED = 2**22  # elements of a stage before which freed memory is given back: 32 MiB in float64


class Result(NamedTuple):
    """`values[name] * exp(sum over (stage, group) of logs * weight)`, see `log_of`."""

    values: dict[str, Any]
    logs: dict[tuple[int, str], Any]
    weights: dict[tuple[int, str], float]


def run(
    plan: Plan,
    arrays: Mapping[str, Any],
    backend: str = "jax",
    over: Mapping[str, Axes] = MappingProxyType({}),
) -> Result:
    """Execute a plan. `arrays` holds every name in `plan.shapes`.

    Args:
        plan: what to run.
        arrays: by name, in the dtype of the plan.
        backend: "jax", "traced" inside a trace of the caller's, or "numpy".
        over: for the names of stacks of arrays, whether they have each of the stacked axes, which
            lead. Then the result is NumPy and has them all, of size one where nothing depends on
            them.

    Raises:
        ModelError: an array is missing or has another shape than the plan was made for.
    """
    sizes = _stacked_sizes(plan, arrays, over)
    axes = {name: over.get(name, (False,) * len(sizes)) for name in plan.shapes}
    stacks = []
    for stage in plan.stages:
        inputs = [axes[name] for name in stage.inputs]
        stacks.append(stacked(plan.pieces[stage.piece], inputs, sizes))
        axes.update(zip(stage.outputs, stacks[-1].outputs, strict=True))
    runners = _runners(plan, stacks, arrays, backend)

    values: dict[str, Any] = dict(arrays)
    logs: dict[tuple[int, str], Any] = {}
    last_use = {name: n for n, stage in enumerate(plan.stages) for name in stage.inputs}
    last_use |= dict.fromkeys(plan.outputs, len(plan.stages))
    for n, (stage, runner) in enumerate(zip(plan.stages, runners, strict=True)):
        piece = plan.pieces[stage.piece]
        if piece.peak_elements > _TRIMMED:
            give_back_freed()
        outputs, scales = runner([values[name] for name in stage.inputs])
        if backend == "jax" and piece.peak_elements > _SMALL:
            # A stage sent ahead would hold its arrays beside those of this one.
            jax.block_until_ready(outputs)
        values.update(zip(stage.outputs, outputs, strict=True))
        logs.update({(n, group): scale for group, scale in zip(stage.groups, scales, strict=True)})
        for name in set(stage.inputs):
            if last_use[name] == n and name not in arrays:
                del values[name]
    wanted = {name: values[name] for name in plan.outputs}
    if sizes:
        wanted, logs = jax.device_get((wanted, logs))
        wanted = {name: aligned(np.asarray(x), axes[name]) for name, x in wanted.items()}
        for n, (stage, one) in enumerate(zip(plan.stages, stacks, strict=True)):
            for group, own in zip(stage.groups, one.scales, strict=True):
                logs[n, group] = aligned(np.asarray(logs[n, group]), own)
    return Result(wanted, logs, plan.log_weights)


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


def _stacked_sizes(
    plan: Plan, arrays: Mapping[str, Any], over: Mapping[str, Axes]
) -> tuple[int, ...]:
    """Sizes of the stacked axes, none where there are no stacks.

    Raises `ModelError` where an array is not of the planned shape.
    """
    depth = max(map(len, over.values()), default=0)
    sizes = [1] * depth
    for name, shape in plan.shapes.items():
        stacks = [n for n, is_stacked in enumerate(over.get(name, ())) if is_stacked]
        found = tuple(arrays[name].shape) if name in arrays else None
        if found is None or found[len(stacks) :] != tuple(shape):
            raise ModelError(
                f"the plan expects {name} of shape {tuple(shape)}, found {found or 'nothing'}; "
                "plan these models anew"
            )
        for n, size in zip(stacks, found, strict=False):
            sizes[n] = size
    return tuple(sizes)


def _runners(
    plan: Plan, stacks: Sequence[Stacked], arrays: Mapping[str, Any], backend: str
) -> Sequence[Any]:
    """What runs each stage: its piece on NumPy, else a program that the session keeps."""
    pieces = [plan.pieces[stage.piece] for stage in plan.stages]
    if backend == "numpy":
        pairs = zip(pieces, stacks, strict=True)
        return [looped(partial(run_piece, piece), over) for piece, over in pairs]
    ahead = backend == "jax" and lie_on_default_device(arrays.values())
    wanted = []
    for piece, over in zip(pieces, stacks, strict=True):
        dtype = plan.dtype if ahead else None
        wanted.append(Wanted(piece, None if over.nothing else over, dtype))
    return ready(wanted, function)


def function(wanted: Wanted[Piece]) -> Run:
    """What a program computes."""
    run = partial(run_piece, wanted.work)
    return run if wanted.over is None else mapped(run, wanted.over)
