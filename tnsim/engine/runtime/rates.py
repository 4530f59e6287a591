"""The seconds that a plan takes on this machine, of compiling and of running.

Four things are measured, once per machine, device and precision, and stored in the cache folder:
the rate of a large matrix product, the rate of a batch of small ones, the rate at which arrays pass
through memory, and the cost of one more operation, compiling and running. Rates of matrix products
of sizes in between are interpolated. A measurement takes a fifth of a second.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnsim.engine import disk_cache
from tnsim.engine.ir.program import Operation, Program, n_iterations
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import compiling as compiling_module
from tnsim.engine.runtime.compiling import Wanted, compiler_options, default_device
from tnsim.engine.runtime.devices import cores, processors
from tnsim.engine.runtime.execution import is_small, precision, work_of
from tnsim.sessions import session_cache

VERSION = 4
_LARGE, _SMALL = 1024, 32  # sides of the matrices that are multiplied
_BATCH = 256  # small products in a batch
_PASSING = 2**21  # elements, beyond the caches of a core
_CHAIN = 16  # operations of the program whose compiling is measured
_THREADS = 0.6  # speed-up of compiling several programs at once, as a share of the cores
# An operation of a plan takes this many times as long to compile as a measured operation: the loops
# of a plan differ in shape, and XLA merges those of the chain (measured: 3 to 5 over plans of 20 to
# 6,000 operations).
_VARIED = 3.5
_CALLING, _STAGING = 5e-4, 5e-5  # seconds that Python takes for a call and for a stage


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured speeds of a machine.

    Attributes:
        large: Scalar multiplications a second in a large matrix product.
        small: Scalar multiplications a second in a batch of small matrix products.
        passing: Elements a second that are read or written.
        starting: Seconds that an operation takes besides its work.
        compiling: Seconds of one core to compile an operation.
    """

    large: float
    small: float
    passing: float
    starting: float
    compiling: float


class Seconds(NamedTuple):
    """Estimated seconds of one call.

    Attributes:
        compiling: Seconds of compiling, before anything runs.
        running: Seconds of all runs of the call.
    """

    compiling: float
    running: float

    @property
    def total(self) -> float:
        """Seconds of compiling and of running."""
        return self.compiling + self.running

    def __str__(self) -> str:
        return f"about {self.running:.2g} s, after {self.compiling:.2g} s of compiling"


def seconds(plan: Plan) -> Seconds:
    """Estimate how long the next call of a plan takes in this process.

    Args:
        plan: Plan that would run. Compiled programs in the session or on disk are not compiled.

    Returns:
        Estimates in seconds.
    """
    return seconds_of([plan], [1])[0]


def seconds_of(plans: Sequence[Plan], stacked: Sequence[int]) -> list[Seconds]:
    """Estimate how long one call of each of several plans takes, in the given order.

    Args:
        plans: Plans that would run. A compiled program that several plans share counts for the
            first of them.
        stacked: Number of models a side that a plan runs together, for each plan. Above 1, every
            program counts as not yet compiled.

    Returns:
        Estimates in seconds, one for each plan.
    """
    found = []
    seen: set[Wanted] = set()
    for plan, together in zip(plans, stacked, strict=True):
        rates = measured(plan.dtype)
        programs = [running(program, rates) for program in plan.programs]
        is_one = together == 1 and is_small(plan)
        once = 0.0 if is_one else _STAGING * len(plan.stages)
        for each in plan.rounds:
            alone = [programs[plan.stages[n].program] for n in each.stages]
            once += max(max(alone), sum(alone) / cores())
        with precision():
            wanted = [work_of(program, None, plan.dtype) for program in plan.programs]
            if is_one:
                wanted = [Wanted(plan.whole, None, plan.dtype)]
            absent = [one for one in wanted if one not in seen]
            seen.update(absent)
            if together == 1:
                absent = compiling_module.to_compile(absent)
        lengths = [one.work.length for one in absent]
        found.append(Seconds(compiling(lengths, rates), _CALLING + plan.runs * once))
    return found


def compiling(lengths: list[int], rates: Rates) -> float:
    """Seconds to compile programs of the given lengths, several at a time, each on one core."""
    work = [rates.compiling * length for length in lengths]
    cores = max(1.0, _THREADS * processors())
    return max(sum(work) / cores, max(work, default=0.0))


def running(program: Program, rates: Rates) -> float:
    """Seconds of one run of a program."""
    found = 0.0
    shapes = program.value_shapes
    outputs = shapes[len(program.shapes) :]
    for op, cost, given in zip(program.operations, program.costs, outputs, strict=True):
        found += rates.starting
        sizes = _sizes(op, shapes)
        if op.body is not None:
            at_once = min(op.concurrency, cores())
            found += n_iterations(op, sizes) * running(op.body, rates) / at_once
            continue
        moved = math.prod(given) + sum(math.prod(shapes[a]) for a in op.args)
        found += moved / rates.passing
        if op.kind == "contract" and len(op.args) == 2:
            found += cost / _rate(op, sizes, rates)
    return found


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
        square = jnp.ones((_LARGE, _LARGE), dtype)
        batch = jnp.ones((_BATCH, _SMALL, _SMALL), dtype)
        long = jnp.ones(_PASSING, dtype)
        tiny = jnp.ones((4, 4), dtype)
        large, _ = _timed(jnp.matmul, square, square)
        small, _ = _timed(jnp.matmul, batch, batch)
        passing, _ = _timed(lambda x, y: x * y, long, long[::-1])
        chain, compiled = _timed(_chained, tiny, tiny)
    return Rates(
        large=_LARGE**3 / large,
        small=_BATCH * _SMALL**3 / small,
        passing=3 * _PASSING / passing,
        starting=chain / _CHAIN,
        compiling=_VARIED * compiled / _CHAIN,
    )


def _chained(x: jax.Array, y: jax.Array) -> jax.Array:
    """A chain of matrix products, transpositions and sums, the operations of programs."""
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
