"""The seconds that a plan is expected to take, compiled or interpreted, and the tier it runs in.

Speeds are those of two cores of a usual processor, written down here and measured nowhere: equal
questions are answered by equal routes and tiers, to the last bit, on every machine.

**Compiled.** A program takes the time of its matrix products, at rates interpolated between those
of large ones and of batches of small ones, of passing arrays through memory, and a fixed time for
each operation, for compiling and for running.

**Interpreted.** The seconds of a plan are those of its operations in NumPy (`costs.host_seconds`).

**Tiers** (`tier_of`). On a CPU a plan runs in the tier that is expected to end first over all runs
asked for. Compiling counts as if nothing were kept from earlier calls: the tier depends on the plan
and the number of runs, not on caches. Work of a fraction of a second is interpreted in any case.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from tnsim.engine.costs import host_seconds
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.ir.program import Operation, Program, n_iterations
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import compiling as compiling_module
from tnsim.engine.runtime.binding import prepared
from tnsim.engine.runtime.compiling import Wanted, default_device
from tnsim.engine.runtime.devices import can_compile
from tnsim.engine.runtime.execution import Backend, is_small, precision, work_of
from tnsim.engine.runtime.stacking import Axes, stacked_stages
from tnsim.sessions import session

Tier = Literal["interpret", "compile"]

_SMALL, _LARGE = 32, 1024  # sides of the matrices whose rates are known
_THREADS = 0.6  # speed-up of compiling several programs at once, as a share of the cores
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
    """Speeds of a machine.

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


USUAL_RATES = {
    4: Rates(large=1e11, small=3e10, passing=3e9, starting=3e-6, compiling=0.009),
    8: Rates(large=5e10, small=1.5e10, passing=1.5e9, starting=3e-6, compiling=0.009),
    16: Rates(large=1.2e10, small=4e9, passing=7e8, starting=3e-6, compiling=0.009),
}
"""Speeds of compiled programs, for each number of bytes of an element. An operation of a plan takes
3 to 5 times as long to compile as one of a chain of equal operations, which XLA merges (measured
over plans of 20 to 6,000 operations)."""
ACCELERATED = 2**5
"""Speed of an accelerator, as a multiple of that of a CPU."""


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
    given = given_tier()
    if given is not None:
        return given
    if len(several) == 1 and several[0].times == 1:  # asked at every call of a similarity
        (runs,) = several
        key = (_faster, runs.plan.dtype, runs.plan.runs)
        # The answer is kept with the plan: comparing two models again asks nothing but a
        # dictionary.
        return session().belongings.get(runs.plan.whole, key, lambda: _faster(several))
    return _faster(several)


def given_tier() -> Tier | None:
    """The tier that the session asks for or the machine leaves; None on a CPU with both."""
    asked = session().tier
    if asked == "compile":
        return "compile"
    if not can_compile():  # asking for the device would start XLA, which would end the process
        return "interpret"
    if default_device().platform != "cpu":
        return "compile"
    return "interpret" if asked == "interpret" else None


def _faster(several: Sequence[Runs]) -> Tier:
    """The tier that is expected to end first."""
    interpreted = sum(_interpreted(runs).total for runs in several)
    if interpreted < _NEVER_COMPILED:
        return "interpret"
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
        return [_interpreted(runs)._replace(compiling=0.0) for runs in several]
    return _compiled(several, compiling_module.to_compile)


def usual_seconds(plan: Plan) -> float:
    """Seconds of a call of a plan, interpreted on a CPU.

    Args:
        plan: Plan that would run.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> usual_seconds(tnsim.plan(model, model).contraction) < 1
        True
    """
    return _interpreted(Runs(plan)).running


def _interpreted(runs: Runs) -> Seconds:
    """Seconds of all runs of a plan, interpreted."""
    plan, sides = runs.plan, runs.side
    stacks, _ = stacked_stages(
        plan, (sides,) * max(map(len, runs.over.values()), default=0), runs.over
    )
    item = ITEM_BYTES[plan.dtype]
    ready = prepared(plan.whole, item, stacks)
    # A second thread is worth half a thread.
    threads = 1 + _SHARING * (USUAL_CORES - 1)
    once = 0.0
    for each in ready.rounds:
        alone = [host_seconds(ready.stages[n].program, item) for n in each.stages]
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
    speed = 1 if default_device().platform == "cpu" else ACCELERATED
    # Programs that an earlier plan of the list compiles cost later plans nothing.
    seen: set[Wanted] = set()
    for plan, times, together, _ in several:
        rates = USUAL_RATES[ITEM_BYTES[plan.dtype]]
        programs = [running(program, rates) / speed for program in plan.programs]
        is_one = together == 1 and is_small(plan)
        once = 0.0 if is_one else _STAGING * len(plan.stages)
        for each in plan.rounds:
            alone = [programs[plan.stages[n].program] for n in each.stages]
            # A round ends neither before its longest stage nor before all cores have done their
            # share.
            once += max(max(alone), sum(alone) / USUAL_CORES)
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
    at_once = _THREADS * USUAL_CORES
    # The total over the cores that compile, but no less than the longest program takes on its own.
    return max(sum(work) / at_once, max(work, default=0.0))


def running(program: Program, rates: Rates) -> float:
    """Seconds of a single run of a program."""
    total = 0.0
    shapes = program.value_shapes
    outputs = shapes[len(program.shapes) :]
    for op, cost, given in zip(program.operations, program.costs, outputs, strict=True):
        total += rates.starting
        sizes = _sizes(op, shapes)
        if op.body is not None:
            at_once = min(op.concurrency, USUAL_CORES)
            total += n_iterations(op, sizes) * running(op.body, rates) / at_once
            continue
        # Every argument is read and the result written once.
        moved = math.prod(given) + sum(math.prod(shapes[a]) for a in op.args)
        total += moved / rates.passing
        if op.kind == "contract" and len(op.args) == 2:
            total += cost / _rate(op, sizes, rates)
    return total


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
