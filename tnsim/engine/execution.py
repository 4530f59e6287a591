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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from tnsim.engine.concurrency import at_once
from tnsim.engine.dtypes import ITEM_BYTES
from tnsim.engine.lowering import run_piece
from tnsim.engine.memory import give_back_freed, resident_bytes
from tnsim.engine.piece import Piece
from tnsim.engine.plan import Plan
from tnsim.engine.programs import Wanted, lie_on_default_device, ready
from tnsim.engine.stacking import Axes, Run, Stacked, aligned, looped, mapped, stacked
from tnsim.engine.turns import Turn, in_turns, runs_in_turns, turn
from tnsim.errors import ModelError

_SMALL = 2**14  # elements of arrays that are not worth placing by themselves
_SHORT = 2**20  # elements of a round that is not waited for: 8 MiB in float64
_AHEAD = 2**22  # elements of all such rounds that may lie beside another: 32 MiB in float64
_TRIMMED = 2**22  # elements of a round before which freed memory is given back: 32 MiB in float64


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
        plan: What to run.
        arrays: By name, in the dtype of the plan.
        backend: "jax", "traced" inside a trace of the caller's, or "numpy".
        over: For the names of stacks of arrays, whether they have each of the stacked axes, which
            lead. Then the result is NumPy and has them all, of size one where nothing depends on
            them.

    Raises:
        ModelError: An array is missing or has another shape than the plan was made for.
    """
    sizes = _stacked_sizes(plan, arrays, over)
    axes = {name: over.get(name, (False,) * len(sizes)) for name in plan.shapes}
    stacks = []
    for stage in plan.stages:
        inputs = [axes[name] for name in stage.inputs]
        stacks.append(stacked(plan.pieces[stage.piece], inputs, sizes))
        axes.update(zip(stage.outputs, stacks[-1].outputs, strict=True))
    runners = _runners(plan, stacks, arrays, backend)

    if not over and any(each.own > _TRIMMED for each in plan.rounds):
        give_back_freed()  # what compiling and other calls left is not this plan's to keep
    at_most = resident_bytes() + plan.peak_bytes
    ahead = _Ahead((), 0)
    values: dict[str, Any] = dict(arrays)
    found: dict[tuple[int, str], Any] = {}
    for each in plan.rounds:
        # What rounds free is kept for later ones, as taking it from the system again costs a tenth
        # of the time, until the process would hold more than is planned. Runs over stacks follow
        # one another, each in what the one before has freed.
        own_bytes = each.own * ITEM_BYTES[plan.dtype]
        is_large = each.own > _TRIMMED and not over
        if is_large and resident_bytes() + own_bytes > at_most:
            give_back_freed()
        calls = []
        for n in each.stages:
            inputs = [values[name] for name in plan.stages[n].inputs]
            calls.append(partial(runners[n], inputs))
        if backend == "jax":
            results, ahead = _sent(calls, each.own, ahead)
        else:
            results = [call() for call in calls]
        for n, (outputs, scales) in zip(each.stages, results, strict=True):
            stage = plan.stages[n]
            values.update(zip(stage.outputs, outputs, strict=True))
            found.update(zip([(n, group) for group in stage.groups], scales, strict=True))
        for name in each.last_read:
            del values[name]
    logs = {key: found[key] for key in plan.log_weights}
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


class _Ahead(NamedTuple):
    """Rounds that were sent to the device and not waited for.

    Args:
        results: What their programs give.
        elements: What they need.
    """

    results: tuple[Any, ...]
    elements: int


def _sent(
    calls: Sequence[Callable[[], Any]], own: int, ahead: _Ahead
) -> tuple[Sequence[Any], _Ahead]:
    """The results of a round of programs, and which rounds are not waited for after it.

    Waiting for a short round takes as long as computing it. One that is sent ahead holds its arrays
    beside those of the rounds after it, which plans do not count, so few may lie there at a time.
    """
    if own <= _SHORT and ahead.elements + own <= _AHEAD:
        results = tuple(call() for call in calls)
        return results, _Ahead((*ahead.results, *results), ahead.elements + own)
    blocking = [partial(lambda call: jax.block_until_ready(call()), call) for call in calls]
    results = tuple(at_once(blocking, len(calls)))
    jax.block_until_ready(ahead.results)
    return results, _Ahead((), 0)


def _runners(
    plan: Plan, stacks: Sequence[Stacked], arrays: Mapping[str, Any], backend: str
) -> Sequence[Any]:
    """What runs each stage: its piece on NumPy, else a program that the session keeps."""
    pieces = [plan.pieces[stage.piece] for stage in plan.stages]
    if backend == "numpy":
        pairs = zip(pieces, stacks, strict=True)
        return [looped(partial(run_piece, piece), over) for piece, over in pairs]
    ahead = backend == "jax" and lie_on_default_device(arrays.values())
    dtype = plan.dtype if ahead else None
    wanted = [program_of(piece, over, dtype) for piece, over in zip(pieces, stacks, strict=True)]
    runners: list[Run] = []
    for one, program in zip(wanted, ready(wanted, function), strict=True):
        work = one.work
        runners.append(in_turns(work, program, plan.dtype) if isinstance(work, Turn) else program)
    return runners


def program_of(piece: Piece, over: Stacked | None, dtype: str | None) -> Wanted[Piece | Turn]:
    """The program that runs a piece: all of it, or one turn of a loop.

    Args:
        piece: Of a plan.
        over: What it is stacked over.
        dtype: None where no program is compiled ahead.
    """
    if over is not None and not over.nothing:
        return Wanted(piece, over, dtype)
    in_parts = dtype is not None and runs_in_turns(piece)
    return Wanted(Turn(piece) if in_parts else piece, None, dtype)


def function(wanted: Wanted[Piece | Turn]) -> Run:
    """What a program computes."""
    if isinstance(wanted.work, Turn):
        return partial(turn, wanted.work)
    run = partial(run_piece, wanted.work)
    return run if wanted.over is None else mapped(run, wanted.over)
