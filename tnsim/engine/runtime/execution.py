"""A `Plan` run on arrays: in which tier, with which exponents of scales, at what expected time.

**Plans.** A plan is compiled or interpreted (see below). A program is bound once to functions of
arrays (`binding`), which run in NumPy, or are what XLA compiles: a compiled program per program and
dtype, whatever the number of stages that use it. After each stage the values of a scale group are
divided by the group's scale. The exponent of the scale is kept per stage, so that a cosine
subtracts exponents stage by stage instead of at the end, where those of a deep network are of the
order 2^L (paper, section 2.2; norms grow like c^(2^L)).

**Small plans.** A stage costs some 50 microseconds besides its arithmetic: the look-up of its
compiled program, the hand-over of arrays and the wrapping of results. Where the stages of a plan
have few operations in total, they become a single compiled program, whose numbers come back as one
array: a tiny cosine runs in a quarter of the time. Longer plans run stage by stage, so that equal
stages share a compiled program and each stage frees the arrays it has used.

**Tiers** (`tier_in_use`). On a CPU plans run in NumPy, at once. XLA runs what is on an accelerator,
what is inside a trace of JAX, and what a session asks it to run (`tnsim.Session.tier`). The tier
depends on session and device alone, so equal runs have equal bits.

**Seconds** (`seconds_of`). The seconds of a plan are those of its operations in NumPy, at speeds of
two cores of a usual processor (`costs.host_seconds`). They are written down and measured nowhere:
equal questions are answered by equal routes, to the last bit, on every machine. Nothing is said of
XLA: its time depends on the device, and on what is compiled already.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.engine.costs import Round, host_seconds
from tnsim.engine.ir.problem import ITEM_BYTES
from tnsim.engine.ir.program import Program, WholePlan
from tnsim.engine.plan import Plan
from tnsim.engine.runtime.binding import (
    BoundStage,
    Run,
    Stacked,
    StackedAxes,
    aligned,
    prepared,
    share_round,
    stacked_stages,
)
from tnsim.engine.runtime.compiling import Wanted, default_device, lie_on_default_device, ready
from tnsim.engine.runtime.devices import can_compile, give_back_freed, one_blas_thread
from tnsim.errors import ModelError
from tnsim.sessions import session

Tier = Literal["interpret", "compile", "trace"]
"""NumPy at once, compiled programs of XLA, or inside a trace of the caller's."""
_SMALL = 2**14  # most elements of arrays that a compiled program places faster than `device_put`
_SHORT = 2**20  # most elements of a round that is not waited for: 8 MiB in float64
_AHEAD = 2**22  # most elements of all rounds not waited for: 32 MiB in float64
_TRIMMED = 2**22  # a plan with larger rounds gives freed memory back first: 32 MiB in float64
LONGEST = 100
"""Most operations of a plan that becomes one compiled program; 100 compile in half a second."""
LARGEST = 2**20
"""Most elements alive at once in such a plan: beyond, arithmetic takes longer than is saved."""


USUAL_CORES = 2
"""Cores of a usual processor, for expected times."""
_SHARING = 0.5  # speed-up of a further thread, as calls of NumPy begin under Python's lock
_CALLING, _BOUND = 2e-4, 2e-5  # seconds that Python takes for a run of a plan, and for a stage


class Result(NamedTuple):
    """Outputs of a plan: `values[name] * 2 ** (sum over (stage, group) of exponents * weight)`.

    Attributes:
        values: Mantissas by output name.
        exponents: Exponent of every scale, by stage and scale group.
        weights: Factor of every exponent in the sum of `exponent_of`, by stage and scale group.
    """

    values: dict[str, Any]
    exponents: dict[tuple[int, str], Any]
    weights: dict[tuple[int, str], float]


def run(
    plan: Plan,
    arrays: Mapping[str, Any],
    tier: Tier = "compile",
    over: Mapping[str, StackedAxes] = MappingProxyType({}),
) -> Result:
    """Run a plan on arrays.

    Args:
        plan: Plan to run.
        arrays: Name -> array for every name in `plan.shapes`, in the dtype of the plan.
        tier: "interpret" runs NumPy at once, "compile" programs of XLA, "trace" adds to a trace
            of JAX that the caller has begun.
        over: Name -> stacked axes, for every array that is a stack: a flag per axis says whether
            the array has the axis. Stacked axes lead. With stacks the result is NumPy and has all
            stacked axes, of size 1 where nothing depends on them.

    Returns:
        The outputs of the plan, with the exponents of their scales.

    Raises:
        ModelError: An array is missing or has another shape than the plan was made for.
    """
    # `over` says which arrays are stacked; the stages pass the flags on from inputs to outputs.
    # Without stacks all flags are empty and nothing changes.
    sizes = _stacked_sizes(plan, arrays, over)
    stacks, axes = stacked_stages(plan, sizes, over)
    if tier == "interpret":
        bound = prepared(plan.whole, ITEM_BYTES[plan.dtype], stacks)
        values = placed({name: arrays[name] for name in plan.shapes}, plan.dtype, tier)
        with one_blas_thread(), np.errstate(all="ignore"):
            exponents = _through(plan, bound.rounds, bound.stages, values, share_round)
        return _gathered(plan, stacks, axes, values, exponents)
    values = dict(arrays)
    runners = _runners(plan, stacks, arrays, tier)
    if not over and any(each.own > _TRIMMED for each in plan.rounds):
        # Memory left by compiling and other calls: a process that compiles a language model holds
        # 1.2 GiB in place of 1.7. Later rounds reuse what rounds of this plan free.
        give_back_freed()
    ahead = _Ahead((), 0)

    def send(calls: Sequence[Callable[[], Any]], each: Round) -> Sequence[Any]:
        nonlocal ahead
        if tier == "trace":
            return _one_by_one(calls, each)
        results, ahead = _sent(calls, each, ahead)
        return results

    exponents = _through(plan, plan.rounds, runners, values, send)
    # Results of stacks go to the host together, in one transfer.
    if sizes:
        values, exponents = jax.device_get(
            ({name: values[name] for name in plan.outputs}, exponents)
        )
    return _gathered(plan, stacks, axes, values, exponents)


def _through(
    plan: Plan,
    rounds: Sequence[Round],
    stages: Sequence[Run],
    values: dict[str, Any],
    send: Callable[[Sequence[Callable[[], Any]], Round], Sequence[Any]],
) -> dict[tuple[int, str], Any]:
    """Run all stages of a plan.

    Args:
        plan: Plan to run.
        rounds: Rounds of its stages.
        stages: Function of the inputs of each stage.
        values: All arrays that are alive, by name. Every round adds the outputs of its stages and
            drops what no later round reads.
        send: Function from the calls of a round to their results.

    Returns:
        Exponent of every scale, by stage number and scale group.
    """
    exponents: dict[tuple[int, str], Any] = {}
    for each in rounds:
        calls = []
        # Stages of a round need nothing of one another, so all inputs are known before the first
        # one runs.
        for n in each.stages:
            inputs = [values[name] for name in plan.stages[n].inputs]
            calls.append(partial(stages[n], inputs))
        for n, (outputs, scales) in zip(each.stages, send(calls, each), strict=True):
            stage = plan.stages[n]
            values.update(zip(stage.outputs, outputs, strict=True))
            exponents.update(zip([(n, group) for group in stage.groups], scales, strict=True))
        for name in each.last_read:
            del values[name]
    return exponents


def _one_by_one(calls: Sequence[Callable[[], Any]], each: Round) -> list[Any]:
    """The results of a round whose calls join a trace."""
    return [call() for call in calls]


def _gathered(
    plan: Plan,
    stacks: Sequence[Stacked],
    axes: Mapping[str, StackedAxes],
    values: Mapping[str, Any],
    stage_exponents: Mapping[tuple[int, str], Any],
) -> Result:
    """The result of a plan, of stacks with all stacked axes.

    Args:
        plan: Plan that was run.
        stacks: Stacked axes of every stage.
        axes: Stacked axes of every value.
        values: Outputs of the plan, among others.
        stage_exponents: Exponent of every scale.
    """
    # In the order of `scale_weights`, which the small plans below rely on when all numbers come as
    # one row.
    exponents = {key: stage_exponents[key] for key in plan.scale_weights}
    wanted = {name: values[name] for name in plan.outputs}
    # An array that does not depend on a stacked axis lacks it, and gets an axis of size 1 in its
    # place, so that all results broadcast against each other.
    if any(axes.values()):
        wanted = {name: aligned(x, axes[name]) for name, x in wanted.items()}
        for n, (stage, stacked) in enumerate(zip(plan.stages, stacks, strict=True)):
            for group, own in zip(stage.groups, stacked.scales, strict=True):
                exponents[n, group] = aligned(exponents[n, group], own)
    return Result(wanted, exponents, plan.scale_weights)


def exponent_of(result: Result, combination: Mapping[str, float]) -> Any:
    """The sum over groups of `combination[group] * exponent(group)`, added up stage by stage.

    Groups whose coefficients cancel are left out, so they cost no digits.
    """
    # In a cosine <A|B> / sqrt(<A|A> <B|B>) most exponents occur with opposite coefficients.
    # Exponents are whole numbers up to 2^L, and a difference of two of them taken at the end would
    # lose the digits that are left out of the sum here.
    total = 0.0
    for key, exponent in result.exponents.items():
        factor = combination.get(key[1], 0.0) * result.weights[key]
        if factor:
            total = total + factor * exponent
    return total


@contextlib.contextmanager
def precision() -> Iterator[None]:
    """The settings under which plans run: 64-bit types, full matmuls, usual promotion of types.

    The settings hold inside the `with` block only, never globally. What leaves the range of floats
    is told by the result, and not by warnings of NumPy besides.
    """
    exact = jax.enable_x64(True), jax.default_matmul_precision("highest")
    with exact[0], exact[1], jax.numpy_dtype_promotion("standard"), np.errstate(all="ignore"):
        yield


def placed(arrays: dict[str, Any], dtype: str, tier: Tier = "compile") -> dict[str, Any]:
    """The arrays in `dtype`, where a tier reads them.

    On JAX's device each array is removed from `arrays` as soon as it is placed. Removal lets the
    host's copy go before the next array is placed. A few small arrays stay on the host, as a
    compiled program places them itself in less time.

    Args:
        arrays: Arrays by name.
        dtype: Precision of the computation.
        tier: Tier that reads the arrays; "compile" or "interpret".
    """
    if tier == "interpret":
        return {name: np.asarray(array, dtype, order="C") for name, array in arrays.items()}
    if sum(array.size for array in arrays.values()) <= _SMALL:
        return {name: cast(array, dtype) for name, array in arrays.items()}
    return {name: jax.device_put(cast(arrays.pop(name), dtype)) for name in list(arrays)}


def cast(array: Any, dtype: str) -> Any:
    """The array in a dtype; the same object where it has the dtype already."""
    return array if array.dtype == dtype else array.astype(dtype)


def _stacked_sizes(
    plan: Plan, arrays: Mapping[str, Any], over: Mapping[str, StackedAxes]
) -> tuple[int, ...]:
    """Sizes of the stacked axes; an empty tuple without stacks.

    Raises `ModelError` where an array is missing or not of the planned shape.
    """
    # Every stack has flags for all stacked axes; `depth` is their number.
    depth = max(map(len, over.values()), default=0)
    sizes = [1] * depth
    for name, shape in plan.shapes.items():
        stacks = [n for n, is_stacked in enumerate(over.get(name, ())) if is_stacked]
        # Stacked axes lead, so the planned shape is what follows them.
        given = tuple(arrays[name].shape) if name in arrays else None
        if given is None or given[len(stacks) :] != tuple(shape):
            raise ModelError(
                f"the plan expects {name} of shape {tuple(shape)}, found {given or 'nothing'}; "
                "plan these models anew"
            )
        for n, size in zip(stacks, given, strict=False):
            sizes[n] = size
    return tuple(sizes)


class _Ahead(NamedTuple):
    """Rounds that were sent to the device and not waited for.

    Attributes:
        results: Results of the compiled programs of these rounds.
        elements: Number of elements that these rounds need.
    """

    results: tuple[Any, ...]
    elements: int


def _sent(
    calls: Sequence[Callable[[], Any]], each: Round, ahead: _Ahead
) -> tuple[Sequence[Any], _Ahead]:
    """The results of a round, and the rounds that are not waited for after it.

    Waiting for a short round takes as long as computing it, so short rounds are sent ahead. Their
    arrays are alive together with those of later rounds, which a plan does not count, so `_AHEAD`
    limits them.
    """
    # JAX returns from a call before the result is there. Not waiting lets Python prepare the next
    # round meanwhile.
    if each.own <= _SHORT and ahead.elements + each.own <= _AHEAD:
        results = tuple(call() for call in calls)
        return results, _Ahead((*ahead.results, *results), ahead.elements + each.own)
    # As many stages are under way as memory is planned for. Everything sent earlier has to be done
    # as well before its memory counts as free.
    found: list[Any] = []
    for n in range(0, len(calls), each.at_once):
        found += [call() for call in calls[n : n + each.at_once]]
        jax.block_until_ready((ahead.results, found))
    return found, _Ahead((), 0)


def _runners(
    plan: Plan, stacks: Sequence[Stacked], arrays: Mapping[str, Any], tier: Tier
) -> Sequence[Any]:
    """A function for each stage: a compiled program of the session."""
    programs = [plan.programs[stage.program] for stage in plan.stages]
    ahead = tier == "compile" and lie_on_default_device(arrays.values())
    dtype = plan.dtype if ahead else None
    # Equal stages have equal keys, and so share a compiled program.
    wanted = [
        Wanted(program, None if over.nothing else over, dtype)
        for program, over in zip(programs, stacks, strict=True)
    ]
    return ready(wanted, stage_function)


def stage_function(wanted: Wanted[Program]) -> Run:
    """The function of JAX arrays that is compiled for a program."""
    stage = BoundStage.of(wanted.work, wanted.over, jnp)
    return lambda inputs: stage(inputs)  # JAX keeps weak references to functions


def fetched(plan: Plan, arrays: Mapping[str, Any], tier: Tier = "compile") -> Result:
    """Run a plan and fetch its result to the host.

    Args:
        plan: Plan to run.
        arrays: Name -> array for every name in `plan.shapes`, none of them traced.
        tier: Tier in which the plan runs, as for `run`.

    Returns:
        The result as NumPy arrays of float64.

    Raises:
        ModelError: An array is missing or has another shape than the plan was made for.
    """
    if tier == "compile" and is_small(plan) and lie_on_default_device(arrays.values()):
        return _unpacked(plan, _numbers(plan, arrays, None))
    result = run(plan, arrays, tier)
    for array in _all(result):
        if isinstance(array, jax.Array):
            array.copy_to_host_async()  # all copies start before the first is waited for
    values = {name: np.asarray(x, np.float64)[()] for name, x in result.values.items()}
    exponents = {key: np.asarray(x, np.float64)[()] for key, x in result.exponents.items()}
    return result._replace(values=values, exponents=exponents)


def fetched_at_all(
    plan: Plan, arrays: Mapping[str, Any], stacks: Iterable[str], tier: Tier = "compile"
) -> list[Result]:
    """Run a plan at every entry of some stacks of arrays, and fetch the results to the host.

    Args:
        plan: Plan to run.
        arrays: Name -> array as for `fetched`; stacked arrays have a further axis in front.
        stacks: Names of the stacked arrays, stacks of equal length.
        tier: Tier in which the plan runs, as for `run`.

    Returns:
        A result for each entry, with NumPy arrays of float64.

    Raises:
        ModelError: An array is missing or has another shape than the plan was made for.
    """
    over = {name: (True,) for name in stacks}
    (size,) = {len(arrays[name]) for name in over}
    if tier == "compile" and is_small(plan) and lie_on_default_device(arrays.values()):
        # The stacks are one axis, along which the result is a row of numbers for each entry.
        inputs = tuple((name in over,) for name in plan.shapes)
        rows = _numbers(plan, arrays, Stacked((size,), inputs, ((True,),), ()))
        return [_unpacked(plan, row) for row in rows]
    result = run(plan, arrays, tier, over)
    return [_entry(result, n, size) for n in range(size)]


def is_small(plan: Plan) -> bool:
    """Whether a plan becomes a single compiled program."""
    return plan.whole.length <= LONGEST and plan.peak_elements <= LARGEST


def _numbers(plan: Plan, arrays: Mapping[str, Any], over: Stacked | None) -> np.ndarray:
    """All numbers of the result in a row; with stacks, a row for every entry."""
    names = plan.whole.names

    def function(wanted: Wanted[WholePlan]) -> Run:
        own = wanted.over or Stacked((), ((),) * len(names), (), ())
        over = dict(zip(names, own.inputs, strict=True))
        stacks, axes = stacked_stages(plan, own.sizes, over)
        stages = [
            BoundStage.of(plan.programs[stage.program], stacked, jnp)
            for stage, stacked in zip(plan.stages, stacks, strict=True)
        ]

        def whole(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
            values = dict(zip(names, inputs, strict=True))
            exponents = _through(plan, plan.rounds, stages, values, _one_by_one)
            rows = [
                jnp.broadcast_to(x, (*own.sizes, *x.shape[len(own.sizes) :])).reshape(
                    *own.sizes, -1
                )
                for x in _all(_gathered(plan, stacks, axes, values, exponents))
            ]
            return [jnp.concatenate(rows, axis=-1)], []

        return whole

    (compiled,) = ready([Wanted(plan.whole, over, plan.dtype)], function)
    (numbers,), _ = compiled([arrays[name] for name in names])
    return np.asarray(numbers, np.float64)


def _all(result: Result) -> list[Any]:
    """All arrays of a result: values, then exponents."""
    return [*result.values.values(), *result.exponents.values()]


def _unpacked(plan: Plan, numbers: np.ndarray) -> Result:
    """The result from its numbers in a row: values of the outputs, then exponents."""
    values = {}
    # The row holds the outputs in the order of the plan, each flattened, and then one exponent for
    # each scale.
    start = 0
    for name, shape in plan.output_shapes.items():
        size = math.prod(shape)
        values[name] = numbers[start : start + size].reshape(shape)[()]
        start += size
    exponents = dict(zip(plan.scale_weights, numbers[start:], strict=True))
    return Result(values, exponents, plan.scale_weights)


def _entry(result: Result, n: int, size: int) -> Result:
    """An entry of a stacked result; arrays that do not depend on the stack have a single entry."""

    def at(array: Any) -> Any:
        array = np.asarray(array, np.float64)
        return array[n if len(array) == size else 0]

    values = {name: at(array) for name, array in result.values.items()}
    exponents = {key: at(x) for key, x in result.exponents.items()}
    return result._replace(values=values, exponents=exponents)


def tier_in_use() -> Tier:
    """The tier in which plans run in the session in use.

    Example:
        >>> import tnsim
        >>> with tnsim.using(tnsim.Session(tier="compile")):
        ...     tier_in_use()
        'compile'
    """
    asked = session().tier
    if asked == "compile":
        return "compile"
    if not can_compile():  # asking for the device would start XLA, which would end the process
        return "interpret"
    return "interpret" if default_device().platform == "cpu" else "compile"


def seconds_of(
    plan: Plan,
    times: int = 1,
    side: int = 1,
    over: Mapping[str, StackedAxes] = MappingProxyType({}),
) -> float:
    """Seconds of a plan in NumPy, at all its moment nodes.

    Args:
        plan: Plan of a single pair.
        times: Number of pairs.
        side: Number of models a side that run together.
        over: Stacked axes of the arrays of a batch, by name; empty where pairs run one by one.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> seconds_of(tnsim.plan(model, model).contraction) < 1
        True
    """
    # Models of a batch are stacked along each side, so a batch of two stacked axes is a square of
    # pairs.
    axes = max(map(len, over.values()), default=0)
    item = ITEM_BYTES[plan.dtype]
    if axes:
        ready = prepared(plan.whole, item, stacked_stages(plan, (side,) * axes, over)[0])
        programs, rounds = [stage.program for stage in ready.stages], ready.rounds
    else:  # a plan that may never run is not bound
        programs, rounds = [plan.programs[stage.program] for stage in plan.stages], plan.rounds
    threads = 1 + _SHARING * (USUAL_CORES - 1)
    once = _CALLING
    for each in rounds:
        alone = [host_seconds(programs[n], item) for n in each.stages]
        # A round takes at least its longest stage, and at least its work divided over the threads
        # that it may use.
        once += _BOUND * len(alone) + max(max(alone), sum(alone) / min(threads, each.at_once))
    return math.ceil(times / side**axes) * plan.runs * once
