"""The seconds that a plan takes on this machine, compiled or interpreted, and the tier it runs in.

**Compiled.** Four things are measured, once per machine, device and precision, and stored in the
cache folder: the rate of a large matrix product, the rate of a batch of small ones, the rate at
which arrays pass through memory, and the cost of a further operation, compiling and running. Rates
of matrix products of sizes in between are interpolated. A measurement takes a fifth of a second.

**Interpreted.** The speeds of NumPy on one core are measured likewise (`speeds`), and the seconds
of a plan are those of its steps.

**Tiers** (`tier_of`). On a CPU a plan runs in the tier that is expected to end first over all runs
asked for. Compiling counts as if nothing were kept from earlier calls: the tier, and so the last
bits of a result, depend on the plan, the number of runs and measured rates, not on caches. Work of
a fraction of a second is interpreted before anything is measured, as nothing compiles in less.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.engine import disk_cache
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.ir.program import Operation, Program, n_iterations
from tnsim.engine.ir.steps import USUAL, Speeds, matmul_seconds
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import compiling as compiling_module
from tnsim.engine.runtime.compiling import Wanted, compiler_options, default_device
from tnsim.engine.runtime.devices import can_compile, cores, processors
from tnsim.engine.runtime.execution import Backend, is_small, precision, work_of
from tnsim.engine.runtime.interpreter import one_blas_thread, prepared
from tnsim.engine.runtime.stacking import Axes, stacked_stages
from tnsim.sessions import session, session_cache

Tier = Literal["interpret", "compile"]

VERSION = 5
_LARGE, _SMALL = 1024, 32  # sides of the matrices that are multiplied
_BATCH = 256  # small products in a batch
_PASSING = 2**21  # elements, beyond the caches of a core
_TRIES = 7  # measurements of which the least counts
_CHAIN = 16  # operations of the program whose compiling is measured
_THREADS = 0.6  # speed-up of compiling several programs at once, as a share of the cores
# An operation of a plan takes this many times as long to compile as a measured operation: the loops
# of a plan differ in shape, and XLA merges those of the chain (measured: 3 to 5 over plans of 20 to
# 6,000 operations).
_VARIED = 3.5
_SHARING = 0.5  # speed-up of a further thread that interprets, as calls begin under Python's lock
_BOUND = 2e-5  # seconds of binding a stage, beside its steps
_ANALYSING = 5e-5  # seconds of analysing an operation, once in a process
_NEVER_COMPILED = 0.3  # seconds of work that is interpreted in any case
_CALLING, _STAGING = 2e-4, 5e-5  # seconds that Python takes for a call and for a stage


USUAL_CORES = 2
"""Cores of a usual processor, for expected times."""

BACKENDS: Mapping[Tier, Backend] = {"interpret": "interpreted", "compile": "jax"}
"""The way to run a plan in each tier."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured speeds of a machine.

    Attributes:
        large: Scalar multiplications a second in a large matrix product.
        small: Scalar multiplications a second in a batch of small matrix products.
        passing: Elements a second that are read or written.
        starting: Seconds that an operation takes besides its work.
        compiling: Seconds of a single core to compile an operation.
    """

    large: float
    small: float
    passing: float
    starting: float
    compiling: float


class Seconds(NamedTuple):
    """Estimated seconds of a single call.

    Attributes:
        compiling: Seconds of compiling, before anything runs; of an interpreted plan, of analysis.
        running: Seconds of all runs of the call.
        tier: Tier in which the plan runs, "compile" or "interpret".
    """

    compiling: float
    running: float
    tier: Tier = "compile"

    @property
    def total(self) -> float:
        """Seconds of compiling and of running."""
        return self.compiling + self.running

    def __str__(self) -> str:
        if self.tier == "interpret":
            return f"about {self.total:.2g} s, interpreted"
        return f"about {self.running:.2g} s, after {self.compiling:.2g} s of compiling"


class Runs(NamedTuple):
    """A plan that would run.

    Attributes:
        plan: Plan of a single pair.
        times: Number of pairs.
        side: Number of models a side that run together.
        over: Stacked axes of the arrays of a batch, by name; empty where pairs run one by one.
    """

    plan: Plan
    times: int = 1
    side: int = 1
    over: Mapping[str, Axes] = MappingProxyType({})


def tier_of(plan: Plan) -> Tier:
    """The tier in which a plan runs once (at all its moment nodes) in the session in use.

    Args:
        plan: Plan that would run.
    """
    return tier_of_all([Runs(plan)])


def backend_of(plan: Plan) -> Backend:
    """The way to run a plan once in the session in use: interpreted or on JAX."""
    return BACKENDS[tier_of(plan)]


def tier_of_all(several: Sequence[Runs]) -> Tier:
    """The tier in which several plans run.

    Args:
        several: Plans with their numbers of runs.
    """
    asked = session().tier
    if asked == "compile":
        return "compile"
    if not can_compile():  # asking for the device would start XLA, which would end the process
        return "interpret"
    if default_device().platform != "cpu":
        return "compile"
    if asked == "interpret":
        return "interpret"
    if len(several) == 1 and several[0].times == 1:  # asked at every call of a similarity
        (runs,) = several
        key = (_faster, runs.plan.dtype, runs.plan.runs)
        # The answer is kept with the plan: comparing two models again asks nothing but a
        # dictionary.
        return session().belongings.get(runs.plan.whole, key, lambda: _faster(several))
    return _faster(several)


def _faster(several: Sequence[Runs]) -> Tier:
    """The tier that is expected to end first."""
    # Usual speeds need no measurement: most similarities end before one would.
    usual = sum(_interpreted(runs, USUAL[ITEM_BYTES[runs.plan.dtype]]).total for runs in several)
    if usual < _NEVER_COMPILED:
        return "interpret"
    interpreted = sum(_interpreted(runs, speeds(runs.plan.dtype)).total for runs in several)
    compiled = sum(seconds.total for seconds in _compiled(several, is_kept=None))
    return "interpret" if interpreted <= compiled else "compile"


def seconds(plan: Plan) -> Seconds:
    """Estimate how long the next call of a plan takes in this process.

    Args:
        plan: Plan that would run. Compiled programs in the session or on disk are not compiled.

    Returns:
        Estimates in seconds, for the tier in which the plan runs.
    """
    return seconds_of([Runs(plan)], tier_of(plan))[0]


def seconds_of(several: Sequence[Runs], tier: Tier) -> list[Seconds]:
    """Estimate how long all runs of several plans take, in the given order.

    Args:
        several: Plans that would run. A compiled program that several plans share counts for the
            first of them. Programs of stacked runs count as not yet compiled.
        tier: Tier in which the plans run.

    Returns:
        Estimates in seconds, one for each plan.
    """
    if tier == "interpret":
        # The estimate itself analyses the steps, which the session keeps: calls find them there.
        estimates = (_interpreted(runs, speeds(runs.plan.dtype)) for runs in several)
        return [estimate._replace(compiling=0.0) for estimate in estimates]
    return _compiled(several, compiling_module.to_compile)


def usual_seconds(plan: Plan) -> float:
    """Seconds of a call of a plan, interpreted on two cores of a usual processor.

    The machine in use plays no part.

    Args:
        plan: Plan that would run.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> usual_seconds(tnsim.plan(model, model).contraction) < 1
        True
    """
    return _interpreted(Runs(plan), USUAL[ITEM_BYTES[plan.dtype]], USUAL_CORES).running


def _interpreted(runs: Runs, given: Speeds, used: int | None = None) -> Seconds:
    """Seconds of all runs of a plan, interpreted, on some cores or on those that are used."""
    plan, sides = runs.plan, runs.side
    count = cores() if used is None else used
    stacks, _ = stacked_stages(
        plan, (sides,) * max(map(len, runs.over.values()), default=0), runs.over
    )
    ready = prepared(plan.whole, ITEM_BYTES[plan.dtype], stacks)
    # A second thread is worth half a thread.
    threads = 1 + _SHARING * (count - 1)
    once = 0.0
    for each in ready.rounds:
        alone = [ready.stages[n].steps.seconds(given, count) for n in each.stages]
        # A round takes at least its longest stage, and at least its work divided over the threads
        # that it may use.
        once += _BOUND * len(alone) + max(max(alone), sum(alone) / min(threads, each.at_once))
    analysed = sum(program.length for program in plan.programs)
    # Models of a batch are stacked along each side, so a batch of two stacked axes is a square of
    # pairs.
    pairs = max(1, sides ** max(map(len, runs.over.values()), default=0))
    batches = math.ceil(runs.times / pairs)
    return Seconds(_ANALYSING * analysed, batches * plan.runs * (_CALLING + once), "interpret")


def _compiled(
    several: Sequence[Runs], is_kept: Callable[[list[Wanted]], list[Wanted]] | None
) -> list[Seconds]:
    """Seconds of all runs of plans, compiled.

    Args:
        several: Plans that would run.
        is_kept: Function that returns those of some programs that are to be compiled; None where
            all of them are.
    """
    estimates = []
    # Programs that an earlier plan of the list compiles cost later plans nothing.
    seen: set[Wanted] = set()
    for plan, times, together, _ in several:
        rates = measured(plan.dtype)
        programs = [running(program, rates) for program in plan.programs]
        is_one = together == 1 and is_small(plan)
        once = 0.0 if is_one else _STAGING * len(plan.stages)
        for each in plan.rounds:
            alone = [programs[plan.stages[n].program] for n in each.stages]
            # A round ends neither before its longest stage nor before all cores have done their
            # share.
            once += max(max(alone), sum(alone) / cores())
        with precision():
            wanted = [work_of(program, None, plan.dtype) for program in plan.programs]
            if is_one:
                wanted = [Wanted(plan.whole, None, plan.dtype)]
            absent = [program for program in dict.fromkeys(wanted) if program not in seen]
            seen.update(absent)
            if together == 1 and is_kept is not None:
                absent = is_kept(absent)
        lengths = [program.work.length for program in absent]
        compile_seconds = compiling(lengths, rates)
        estimates.append(Seconds(compile_seconds, times * (_CALLING + plan.runs * once)))
    return estimates


def compiling(lengths: list[int], rates: Rates) -> float:
    """Seconds to compile programs of the given lengths, several at a time, each on one core."""
    # Compiling is linear in the number of operations for programs of the lengths that `splitting`
    # leaves.
    work = [rates.compiling * length for length in lengths]
    cores = max(1.0, _THREADS * processors())
    # The total over the cores that compile, but no less than the longest program takes on its own.
    return max(sum(work) / cores, max(work, default=0.0))


def running(program: Program, rates: Rates) -> float:
    """Seconds of a single run of a program."""
    total = 0.0
    shapes = program.value_shapes
    outputs = shapes[len(program.shapes) :]
    for op, cost, given in zip(program.operations, program.costs, outputs, strict=True):
        total += rates.starting
        sizes = _sizes(op, shapes)
        if op.body is not None:
            at_once = min(op.concurrency, cores())
            total += n_iterations(op, sizes) * running(op.body, rates) / at_once
            continue
        # Every argument is read and the result written once.
        moved = math.prod(given) + sum(math.prod(shapes[a]) for a in op.args)
        total += moved / rates.passing
        if op.kind == "contract" and len(op.args) == 2:
            total += cost / _rate(op, sizes, rates)
    return total


@session_cache
def speeds(dtype: str) -> Speeds:
    """The speeds of NumPy on this machine, from the cache folder or measured now."""
    measured, _ = disk_cache.kept(
        ["speeds", VERSION, dtype, compiling_module.host(), np.__version__],
        search=lambda: _measure_speeds(dtype),
        encode=lambda found: found._asdict(),
        decode=_speeds_from_data,
        searcher=f"numpy {np.__version__}",
    )
    return measured


@session_cache
def measured(dtype: str) -> Rates:
    """The rates of this machine, from the cache folder or measured now."""
    device = default_device()
    key = ["rates", VERSION, dtype, compiling_module.host(), device.device_kind, processors()]
    rates, _ = disk_cache.kept(
        [*key, jax.__version__],
        search=lambda: _measure(dtype),
        encode=dataclasses.asdict,
        decode=_rates_from_data,
        searcher=f"jax {jax.__version__}",
    )
    return rates


def _rate(op: Operation, sizes: dict[int, int], rates: Rates) -> float:
    """Multiplications a second of a product; the passing rate where it is no matrix product.

    A product is as slow as its smallest side makes it. Up to `_SMALL` the rate is proportional to
    that side; from there to the large product it is interpolated in logarithms.
    """
    first, second = (set(labels) for labels in op.labels)
    output = set(op.output)
    sides = (
        math.prod(sizes[label] for label in (first & second) - output),
        math.prod(sizes[label] for label in first - second),
        math.prod(sizes[label] for label in second - first),
    )
    least = min(sides)
    if least == 1:
        return rates.passing
    # Below that size a product is bound by the loads of its operands, which its smallest side
    # shares among multiplications.
    if least <= _SMALL:
        return max(rates.passing, rates.small * least / _SMALL)
    share = min(1.0, math.log(least / _SMALL) / math.log(_LARGE / 2 / _SMALL))
    return rates.small ** (1 - share) * rates.large**share


def _sizes(op: Operation, shapes: Any) -> dict[int, int]:
    """Label -> size, from the shapes of all values of a program."""
    sizes: dict[int, int] = {}
    for arg, labels in zip(op.args, op.labels, strict=True):
        sizes.update(zip(labels, shapes[arg], strict=True))
    return sizes


def _measure(dtype: str) -> Rates:
    """The rates of this machine, measured now."""
    with precision():
        # Three kinds of work that the time of a plan consists of: large products, batches of small
        # ones, and passing through memory. The chain measures what an operation costs beside its
        # work.
        square = jnp.ones((_LARGE, _LARGE), dtype)
        batch = jnp.ones((_BATCH, _SMALL, _SMALL), dtype)
        long = jnp.ones(_PASSING, dtype)
        tiny = jnp.ones((4, 4), dtype)
        large, _ = _timed(jnp.matmul, square, square)
        small, _ = _timed(jnp.matmul, batch, batch)
        # The reversed array is another array in memory, so that both arguments have to be read.
        passing, _ = _timed(lambda x, y: x * y, long, long[::-1])
        chain, compiled = _timed(_chained, tiny, tiny)
    return Rates(
        large=_LARGE**3 / large,
        small=_BATCH * _SMALL**3 / small,
        # x * y reads two arrays and writes one.
        passing=3 * _PASSING / passing,
        starting=chain / _CHAIN,
        compiling=_VARIED * compiled / _CHAIN,
    )


def _measure_speeds(dtype: str) -> Speeds:
    """The speeds of NumPy on a single core, measured now."""
    tiny, square = np.ones((4, 4), dtype), np.ones((_LARGE // 2, _LARGE // 2), dtype)
    # Steps read and write different memory, which takes up to three times as long as working in
    # place does.
    batches = [np.ones((_BATCH, _SMALL, _SMALL), dtype) for _ in range(3)]
    long = [np.ones(_PASSING, dtype) for _ in range(3)]
    with one_blas_thread():
        # A thousand calls outlast the resolution of the clock.
        call = _least(lambda: [np.multiply(tiny, tiny, tiny) for _ in range(1000)]) / 1000
        large = _least(lambda: np.matmul(square, square))
        small = _least(lambda: np.matmul(*batches)) / _BATCH
        passing = _least(lambda: np.multiply(*long))
    multiplying = (_LARGE // 2) ** 3 / large
    # The arithmetic of one small product at the measured speed of large ones, without fixed costs:
    # the rest of its time is the fixed cost of a product in a batch.
    work = matmul_seconds(1, _SMALL, _SMALL, _SMALL, Speeds(0.0, 0.0, multiplying, 1.0))
    # Beside its arithmetic a product of a batch takes a fixed time; the floor keeps noise from
    # making it zero or negative.
    product = max(small - work, small / 8)
    return Speeds(4 * call, product, multiplying, _PASSING / passing)


def _least(call: Callable[[], Any]) -> float:
    """Seconds of a call, the least of some after a first: other work only ever lengthens them."""
    call()
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _speeds_from_data(data: Any) -> Speeds:
    """Speeds from parsed JSON. Raises `ValueError` unless all are positive numbers."""
    speeds = Speeds(**{name: float(value) for name, value in data.items()})
    if not all(0 < value < math.inf for value in speeds):
        raise ValueError("a speed is no positive number")
    return speeds


def _chained(x: jax.Array, y: jax.Array) -> jax.Array:
    """A chain of matrix products, transpositions and sums, the operations of programs."""
    # Each turn depends on the turn before, so that XLA cannot merge the turns.
    for _ in range(_CHAIN // 2):
        x, y = x @ y, jnp.tanh(y.T) + x
    return x


def _timed(function: Callable[..., Any], *arrays: jax.Array) -> tuple[float, float]:
    """Seconds of a warm call, the least of three, and seconds that cores spend on compiling."""
    options = compiler_options()  # found before the clock starts, as finding them compiles too
    start = time.process_time()  # the process's own time: other work of the machine does not count
    measured_program = jax.jit(function).lower(*arrays).compile(compiler_options=options)
    compiled = time.process_time() - start
    jax.block_until_ready(measured_program(*arrays))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(measured_program(*arrays))
        times.append(time.perf_counter() - start)
    return min(times), compiled


def _rates_from_data(data: Any) -> Rates:
    """Rates from parsed JSON. Raises `ValueError` unless all are positive numbers."""
    rates = Rates(**{name: float(value) for name, value in data.items()})
    if not all(0 < value < math.inf for value in dataclasses.astuple(rates)):
        raise ValueError("a rate is no positive number")
    return rates
