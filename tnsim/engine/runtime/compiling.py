"""Compiled programs, from memory, from disk or from XLA.

**On disk.** A file holds machine code, which no check makes safe: whoever can write the file runs
code in the process that reads it. So compiled programs are read only from a folder that belongs to
the user and that nobody else may enter (mode 0700), and only from files of the user; any other
folder is neither read nor written. The name of a file is a digest of everything that the code
depends on: the program, the code of the engine, the versions of JAX and XLA, the device and, on a
CPU, its instructions. The content starts with a digest of that text and of the rest of the content.
It shows damage, and also a file that stands under the name of another: compiled programs of equal
shapes are interchangeable to JAX, so the wrong one would answer with wrong numbers. Whatever is
wrong with a file, the program is compiled again and the file replaced. `TNSIM_PROGRAM_CACHE=off`
switches the files off. So does JAX's own compilation cache where the caller set it up: it keeps the
programs then, and JAX cannot serialise a program once more that came out of it.

**From XLA.** The compiled programs of a plan are made before the plan runs, all at once: tracing
holds Python's lock, but XLA compiles in threads, so several cores share the work (measured on four
cores: a third of the time of one after another). A compiled program read from disk (`Files`) is not
even traced.

A jitted function stands in where a compiled program cannot run: inside a trace of the caller's, and
on arrays that lie on several devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
from jax.core import Tracer
from jax.experimental import serialize_executable
from jax.stages import Compiled

from tnsim.engine.disk_cache import cache_folder, digest, own_bytes, put
from tnsim.engine.runtime.binding import Run, Stacked
from tnsim.engine.runtime.devices import backend, processors
from tnsim.sessions import session

MAX_BYTES = 2**28  # limit of one file; the longest compiled programs take 2**24
LIMIT = 2**30  # bytes of all files together
_DIGEST = hashlib.sha256
log = logging.getLogger(__name__)
Report = Callable[[int, int], Any]
_CONFIG: Any = jax.config
W = TypeVar("W", bound="Work")
_report: ContextVar[Report | None] = ContextVar("tnsim compiling report", default=None)
_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        "xla_backend_optimization_level": 1,
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    },
    "gpu": {"xla_gpu_autotune_level": 0},
}


class Files(NamedTuple):
    """The files of compiled programs of one device, made with one set of settings.

    Attributes:
        folder: Folder of the files; None where the disk cache is off.
        device: Device that the compiled programs run on.
        made_with: Versions, code, processor, flags and settings that the compiled code depends on.
    """

    folder: Path | None
    device: Any
    made_with: tuple[str, ...]

    @classmethod
    def here(cls, device: Any, settings: tuple) -> Files:
        """Files for a device, with everything but a key that a compiled program depends on.

        Args:
            device: Device that the compiled programs run on.
            settings: JAX's settings that change traces.
        """
        about = (device.platform, device.device_kind, str(device.id), host(), _code())
        flags = os.environ.get("XLA_FLAGS", "")
        made_with = (*_versions(device), *about, flags, repr(settings))
        return cls(_folder(), device, made_with)

    def read(self, key: str) -> Compiled | None:
        """The compiled program in the file of a key; None where the file is absent or unsound."""
        if self.folder is None or not _is_private(self.folder):
            return None
        file = self._file(key)
        # Unpickling runs code, so the digest is checked before `loads` sees the content
        # (`_opened`).
        try:
            content = own_bytes(file, MAX_BYTES)
            compiled = serialize_executable.deserialize_and_load(
                *pickle.loads(self._opened(key, content)),
                backend=self.device.client,
                execution_devices=[self.device],
            )
            os.utime(file)  # the time of last use, by which `trim` chooses
        except Exception:  # whatever is wrong with the file, the program can be compiled again
            return None
        return compiled

    def write(self, key: str, compiled: Compiled) -> None:
        """Write a compiled program, where the backend can and the folder is private or absent."""
        # `os.path.exists` is False where the user may not look; `Path.exists` may raise there.
        if self.folder is None or (os.path.exists(self.folder) and not _is_private(self.folder)):
            return
        try:
            content = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception:  # some backends and compiled programs cannot be serialised
            return
        # A file beyond the limit would be refused by `read`, and be written again at every run.
        if len(content) < MAX_BYTES:
            put(self._file(key), self._sealed(key, content))

    def trim(self, limit: int = LIMIT) -> None:
        """Remove the files that were not used for longest, until the rest is within the limit."""
        if self.folder is None or not _is_private(self.folder):
            return
        files = []
        with contextlib.suppress(OSError):  # another process may remove a file meanwhile
            for file in self.folder.iterdir():
                status = file.lstat()
                files.append((status.st_mtime, status.st_size, file))
        total = sum(size for _, size, _ in files)
        # Pairs sort by time of last use, the oldest first.
        for _, size, file in sorted(files):
            if total <= limit:
                return
            with contextlib.suppress(OSError):
                file.unlink()
            total -= size

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{digest(self._text(key))}.program"

    def _text(self, key: str) -> str:
        """Everything that a compiled program depends on, as text."""
        return repr((key, self.made_with))

    def _sealed(self, key: str, content: bytes) -> bytes:
        """The content of a file: a digest over key and compiled program, then the program."""
        # The text of the key is part of what is digested, so content under the name of another key
        # fails the check although nothing in it is damaged.
        return _DIGEST(digest(self._text(key)).encode() + content).digest() + content

    def _opened(self, key: str, sealed: bytes) -> bytes:
        """The serialised compiled program in the content of a file.

        Raises `ValueError` where the digest is not that of this key and content.
        """
        content = sealed[_DIGEST().digest_size :]
        if self._sealed(key, content) != sealed:
            raise ValueError("damaged, or the compiled program of another key")
        return content


def _versions(device: Any) -> tuple[str, ...]:
    """Versions of JAX, of jaxlib, and of the platform that drives the device."""
    return jax.__version__, version("jaxlib"), device.client.platform_version


def _folder() -> Path | None:
    """The folder of compiled programs, None where the user switched it off."""
    if os.environ.get("TNSIM_PROGRAM_CACHE", "").lower() == "off":
        return None
    # What XLA's CPU loads from JAX's cache can be serialised, but not run by the process that reads
    # it ("Function ... not found", jaxlib 0.10.2).
    if _CONFIG.jax_enable_compilation_cache and _CONFIG.jax_compilation_cache_dir:
        return None
    return cache_folder("programs")


def _is_private(folder: Path) -> bool:
    """Whether a path is a folder that belongs to the user and that nobody else may enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    # `lstat` does not follow links: a link that somebody else may redirect is no folder here.
    if not stat.S_ISDIR(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):  # Windows: the user's folders are closed to others
        return True
    # Neither the group nor others have any permission.
    return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0


@cache
def host() -> str:
    """The processor's model and instruction sets; without /proc/cpuinfo, the machine's name.

    Compiled code uses the instructions of the processor on which it was compiled.
    """
    names = ("model name", "flags", "Features")
    with contextlib.suppress(OSError):
        # One entry per core follows another; `setdefault` keeps those of the first core.
        fields: dict[str, str] = {}
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
        # x86 calls the instruction sets "flags", ARM "Features". A model name alone does not tell
        # the instructions apart, for instance under a virtual machine that masks some.
        if any(name in fields for name in names[1:]):
            return repr([platform.machine(), *(fields.get(name) for name in names)])
    return repr(platform.uname())


@cache
def _code() -> str:
    """A digest of the engine's code: a change of it may change what a program compiles to."""
    sources = sorted(_sources(resources.files("tnsim.engine")))
    return digest(repr(sources))


def _sources(folder: Traversable, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Path and content of every Python file of a package and of its sub-packages."""
    for entry in folder.iterdir():
        if entry.name.endswith(".py"):
            yield f"{path}{entry.name}", entry.read_bytes()
        elif entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry, f"{path}{entry.name}/")


class Work(Protocol):
    """The computation of a compiled program, such as a `Program`; hashable, with a unique `repr`.

    The `repr` is part of the key on disk, so two different computations must not share a `repr`.
    """

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs."""
        ...

    @property
    def length(self) -> int:
        """Number of operations."""
        ...


class Wanted(NamedTuple, Generic[W]):
    """The key of a compiled program.

    Attributes:
        work: Computation to be compiled.
        over: Axes over which arrays are stacked; None without stacks.
        dtype: Type of all arrays; None where nothing is compiled ahead. JAX then compiles at the
            first call, or the computation becomes part of the caller's trace.
    """

    work: W
    over: Stacked | None
    dtype: str | None


class CompiledProgram(NamedTuple):
    """A function compiled by XLA or jitted, with its number of operations.

    `length` counts operations: each operation maps one or two regions of code, and Linux allows a
    process 65,530 regions, so a session gives up the compiled programs not used for longest.
    """

    length: int
    run: Any

    def __call__(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        return self.run(inputs)


def ready(
    wanted: Sequence[Wanted[W]], function: Callable[[Wanted[W]], Run]
) -> list[CompiledProgram]:
    """Compiled programs from the session; missing ones are made now, several at a time.

    Args:
        wanted: Keys of the compiled programs; equal keys share a compiled program.
        function: Maps a key to the function of JAX arrays that is compiled.

    Returns:
        A compiled program for each key, in the order of `wanted`.
    """
    kept = session().programs
    # The same program on another device, or under other settings of JAX, is another compiled
    # program.
    place = _place()
    missing = [program for program in dict.fromkeys(wanted) if (program, place) not in kept]
    # All missing programs in one call, so that they are compiled at the same time.
    made = _made(missing, function) if missing else {}

    # The session may have dropped a program between the check above and the look-up below, where
    # another thread filled the cache meanwhile; such a program is made alone.
    def compiled(program: Wanted[W]) -> CompiledProgram:
        return made[program] if program in made else _made([program], function)[program]

    return [
        kept.get((program, place), lambda program=program: compiled(program)) for program in wanted
    ]


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Call `report(done, total)` as this thread makes compiled programs in the `with` block.

    Args:
        report: Function of the number of compiled programs made so far, 0 at first, and of the
            number there will be.
    """
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def default_device() -> Any:
    """The device on which JAX puts new arrays."""
    chosen = _CONFIG.jax_default_device
    # JAX accepts a device or the name of a platform, and None for its own choice.
    is_name = chosen is None or isinstance(chosen, str)
    return jax.devices(chosen or backend())[0] if is_name else chosen


def _made(
    missing: Sequence[Wanted[W]], function: Callable[[Wanted[W]], Run]
) -> dict[Wanted[W], CompiledProgram]:
    """Compiled programs made now: compiled ahead where the dtype is known, else jitted."""
    # Every program has at least a jitted function, which costs nothing until its first call.
    # Programs whose dtype is known are replaced by programs compiled ahead.
    jitted = {program: jax.jit(function(program)) for program in missing}
    runs = dict(jitted)
    ahead = [program for program in missing if program.dtype and not _CONFIG.jax_disable_jit]
    if ahead:
        runs |= _compiled([(program, jitted[program]) for program in ahead])
    return {program: CompiledProgram(program.work.length, run) for program, run in runs.items()}


def _compiled(functions: Sequence[tuple[Wanted, Any]]) -> dict[Wanted, Compiled]:
    """Compiled programs from disk; those missing there from XLA, the longest first."""
    report = _report.get() or (lambda done, total: None)
    report(0, len(functions))
    files = Files.here(default_device(), _settings())
    # First all files are read, in threads. What no file had is lowered in this thread, as tracing
    # holds Python's lock, and each lowered program is handed at once to a thread, where XLA
    # compiles without the lock. Tracing the next program and compiling the last ones overlap.
    pool = ThreadPoolExecutor(min(len(functions), processors()))
    try:
        reading = {program: pool.submit(files.read, repr(program)) for program, _ in functions}
        read = {program: future.result() for program, future in reading.items()}
        programs = {program: compiled for program, compiled in read.items() if compiled is not None}
        absent = [pair for pair in functions if pair[0] not in programs]
        # The longest program starts first, so that no thread is left with it at the end.
        absent.sort(key=lambda pair: -pair[0].work.length)
        options = compiler_options() if absent else None
        compiling = {}
        for program, jitted in absent:
            lowered = jitted.lower(_arguments(program))
            compiling[pool.submit(_compile, lowered, options, files, repr(program))] = program
        for future in as_completed(compiling):
            programs[compiling[future]] = future.result()
            report(len(programs), len(functions))
    finally:
        # After an error, programs that wait in the queue are not compiled any more.
        pool.shutdown(cancel_futures=True)
    if absent:
        files.trim()
    return programs


def _compile(lowered: Any, options: dict[str, Any] | None, files: Files, key: str) -> Compiled:
    """The compiled program of a lowered function, written to disk as well."""
    compiled = lowered.compile(compiler_options=options)
    files.write(key, compiled)
    return compiled


def _arguments(program: Wanted) -> list[jax.ShapeDtypeStruct]:
    """The inputs of a compiled program without their numbers."""
    shapes: Sequence[tuple[int, ...]] = program.work.shapes
    if program.over is not None:
        shapes = [
            program.over.leading(axes) + tuple(shape)
            for shape, axes in zip(shapes, program.over.inputs, strict=True)
        ]
    return [jax.ShapeDtypeStruct(shape, program.dtype) for shape in shapes]


def _place() -> tuple:
    """The device and settings that a compiled program depends on; a process may change both."""
    device = default_device()
    return device.id, device.platform, _settings()


def _settings() -> tuple:
    """JAX's settings that change the trace of a program."""
    return _CONFIG.jax_enable_x64, _CONFIG.jax_default_matmul_precision


def lie_on_default_device(arrays: Iterable[Any]) -> bool:
    """Whether no array is traced and every JAX array lies on the default device alone."""
    # A traced array has no device, and the computation joins the trace of the caller.
    several = list(arrays)
    if any(isinstance(x, Tracer) for x in several):
        return False
    if jax.device_count() == 1:
        return True
    here = {default_device()}
    return all(x.devices() == here for x in several if isinstance(x, jax.Array))


def compiler_options() -> dict[str, Any] | None:
    """Options with which XLA compiles for the default device; None where its own are best.

    On a CPU:

    By default XLA orders operations so that many can run at once, which keeps the arrays of all of
    them alive. For a plan that order doubles the memory, and it gains nothing where matrix products
    use all cores.

    The time of a plan goes into matrix products, which are library calls, and into loops over
    entries, which wait for memory. LLVM's first level of optimisation compiles in two thirds of the
    time of the default level, and the compiled programs are as fast.

    XLA hands several kinds of operations to a library (YNNPACK). These options restrict it to
    matrix products, which the library makes up to three times as fast where one side is long. Sums
    of products over arrays of seven or more axes in float32, handed over by default, crash the
    process in jaxlib 0.10.2 and 0.11.0.

    On a GPU XLA times several kernels for every matrix product before it chooses one. A plan has
    hundreds of small products of different shapes, so the trials are most of a first call, and
    their outcome varies: without them equal calls have equal bits in every process.
    """
    return _options_for(default_device().platform)


@cache
def _options_for(platform: str) -> dict[str, Any] | None:
    wanted = _OPTIONS.get(platform)
    return None if wanted is None else known_options(wanted)


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that this version of XLA knows: options come and go with versions.

    Example:
        >>> known_options({"xla_of_another_year": True})
        {}
    """
    # Usually XLA knows all options, which one empty compilation tells; only otherwise each option
    # is tried alone.
    if _accepts(options):
        return options
    known = {name: value for name, value in options.items() if _accepts({name: value})}
    log.info(
        "this XLA does not know %s: compiled programs go without", sorted(set(options) - set(known))
    )
    return known


def _accepts(options: dict[str, Any]) -> bool:
    """Whether XLA compiles with the options, tried on an empty function."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:
        return False
    return True
