"""Compiled programs. In: what is to be compiled. Out: what runs it, from memory, disk or XLA.

A plan's programs are made before it runs, all at once: tracing holds Python's lock, but XLA
compiles in threads, so several cores share the work (measured on four: a third of the time of one
after another). A program that an earlier process made is read from disk, see `program_files`, and
then not even traced.

The jitted function of a program runs where a compiled one cannot: inside a trace of the caller's,
and on arrays that lie on several devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
from jax.core import Tracer
from jax.stages import Compiled

from tnsim.engine import program_files
from tnsim.engine.concurrency import processors
from tnsim.engine.stacking import Run, Stacked
from tnsim.sessions import session

log = logging.getLogger(__name__)

Report = Callable[[int, int], Any]
_CONFIG: Any = jax.config


class Work(Protocol):
    """What a program computes, a piece for one: hashable, and told from others by its `repr`."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs."""
        ...

    @property
    def length(self) -> int:
        """Number of operations."""
        ...


W = TypeVar("W", bound=Work)


class Wanted(NamedTuple, Generic[W]):
    """What tells a program from others: its work, what that is stacked over, and its dtype.

    One without dtype is not compiled ahead: JAX does so when it runs, or the caller's program
    that it becomes part of.
    """

    work: W
    over: Stacked | None
    dtype: str | None


class Program:
    """What runs a piece.

    `length` counts operations: each maps one or two regions of code, and Linux allows a process
    65,530 of them, so a session gives up what was not used for longest.
    """

    def __init__(self, length: int, run: Any) -> None:
        self.length = length
        self.run = run

    def __call__(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        return self.run(inputs)


def ready(wanted: Sequence[Wanted[W]], function: Callable[[Wanted[W]], Run]) -> list[Program]:
    """Programs that the session keeps, those that it lacks made now, several at a time.

    Args:
        wanted: What to compile; equal ones share a program.
        function: What a program computes, in terms of JAX.

    Returns:
        A program for each.
    """
    kept = session().programs
    place = _place()
    missing = [one for one in dict.fromkeys(wanted) if (one, place) not in kept]
    made = _made(missing, function) if missing else {}

    def program(one: Wanted[W]) -> Program:
        return made[one] if one in made else _made([one], function)[one]

    return [kept.get((one, place), lambda one=one: program(one)) for one in wanted]


def to_compile(wanted: Sequence[Wanted]) -> list[Wanted]:
    """Those that neither the session nor the disk has, each once."""
    kept, place = session().programs, _place()
    files = program_files.Files.here(default_device(), _settings())
    absent = (one for one in dict.fromkeys(wanted) if (one, place) not in kept)
    return [one for one in absent if not files.has(repr(one))]


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Call `report(done, total)` while programs are made inside the `with` block, in this thread.

    Args:
        report: Given how many programs are made, 0 at first, and how many there will be.
    """
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


_report: ContextVar[Report | None] = ContextVar("tnsim compiling report", default=None)


def default_device() -> Any:
    """The device on which JAX puts new arrays."""
    chosen = _CONFIG.jax_default_device
    is_name = chosen is None or isinstance(chosen, str)
    return jax.devices(chosen)[0] if is_name else chosen


def _made(
    missing: Sequence[Wanted[W]], function: Callable[[Wanted[W]], Run]
) -> dict[Wanted[W], Program]:
    jitted = {one: jax.jit(function(one)) for one in missing}
    runs = dict(jitted)
    ahead = [one for one in missing if one.dtype and not _CONFIG.jax_disable_jit]
    if ahead:
        runs |= _compiled([(one, jitted[one]) for one in ahead])
    return {one: Program(one.work.length, run) for one, run in runs.items()}


def _compiled(functions: Sequence[tuple[Wanted, Any]]) -> dict[Wanted, Compiled]:
    """Programs from disk, and those that are not there from XLA, the longest first."""
    report = _report.get() or (lambda done, total: None)
    report(0, len(functions))
    files = program_files.Files.here(default_device(), _settings())
    pool = ThreadPoolExecutor(min(len(functions), processors()))
    try:
        reading = {one: pool.submit(files.read, repr(one)) for one, _ in functions}
        read = {one: future.result() for one, future in reading.items()}
        found = {one: program for one, program in read.items() if program is not None}
        absent = [pair for pair in functions if pair[0] not in found]
        absent.sort(key=lambda pair: -pair[0].work.length)
        options = compiler_options() if absent else None
        compiling = {}
        for one, jitted in absent:
            lowered = jitted.lower(_arguments(one))
            compiling[pool.submit(_compile, lowered, options, files, repr(one))] = one
        for future in as_completed(compiling):
            found[compiling[future]] = future.result()
            report(len(found), len(functions))
    finally:
        pool.shutdown(cancel_futures=True)
    if absent:
        files.trim()
    return found


def _compile(
    lowered: Any, options: dict[str, Any] | None, files: program_files.Files, key: str
) -> Compiled:
    compiled = lowered.compile(compiler_options=options)
    files.write(key, compiled)
    return compiled


def _arguments(one: Wanted) -> list[jax.ShapeDtypeStruct]:
    """The inputs of a program without their numbers."""
    shapes: Sequence[tuple[int, ...]] = one.work.shapes
    if one.over is not None:
        shapes = [
            one.over.leading(axes) + tuple(shape)
            for shape, axes in zip(shapes, one.over.inputs, strict=True)
        ]
    return [jax.ShapeDtypeStruct(shape, one.dtype) for shape in shapes]


def _place() -> tuple:
    """What a program depends on beside what is wanted, and may change within a process."""
    device = default_device()
    return device.id, device.platform, _settings()


def _settings() -> tuple:
    """JAX's settings that change what is traced from a piece."""
    return _CONFIG.jax_enable_x64, _CONFIG.jax_default_matmul_precision


def lie_on_default_device(arrays: Iterable[Any]) -> bool:
    """Whether no array is traced, or on another device than the one programs are compiled for."""
    found = list(arrays)
    if any(isinstance(x, Tracer) for x in found):
        return False
    if jax.device_count() == 1:
        return True
    here = {default_device()}
    return all(x.devices() == here for x in found if isinstance(x, jax.Array))


def compiler_options() -> dict[str, Any] | None:
    """How XLA compiles a program for a CPU.

    By default it orders operations so that many can run at once, which keeps their arrays too. For
    a plan that doubles the memory, and it gains nothing where matrix products use all cores.

    The time of a plan goes into matrix products, which are library calls, and loops over entries,
    which wait for memory: LLVM's first level of optimisation takes two thirds of the time of the
    default, and the programs are as fast.

    Of what XLA hands to a library (YNNPACK) only matrix products are left to it, which it makes up
    to three times as fast where one side is long. Sums of products over arrays of seven or more
    axes in float32, which it would hand over too, crash the process in jaxlib 0.10.2 and 0.11.0.
    """
    if default_device().platform != "cpu":
        return None
    return _for_cpu()


@cache
def _for_cpu() -> dict[str, Any]:
    return known_options(
        {
            "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
            "xla_backend_optimization_level": 1,
            "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        }
    )


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those options that this XLA knows: they come and go with its versions.

    Example:
        >>> known_options({"xla_of_another_year": True})
        {}
    """
    if _accepts(options):
        return options
    known = {name: value for name, value in options.items() if _accepts({name: value})}
    log.info("this XLA does not know %s: programs go without", sorted(set(options) - set(known)))
    return known


def _accepts(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:
        return False
    return True
