"""Compiled programs on disk. In: what tells a compiled program from others. Out: the compiled
program, or None.

A file holds machine code, which no check makes safe: whoever can write it runs code in the process
that reads it. So compiled programs are only read from a folder that is the user's and nobody else
may enter (mode 0700), and only files of the user's; a folder that is anything else is neither read
nor written to. The name of a file tells all that the code depends on: the program, the code of this
folder, the versions of JAX and XLA, the device and, on a CPU, the instructions that it knows. The
digest in front of the content is that of the name's text and of the content, so that it tells
damage as well as a file that stands under the name of another: a compiled program of equal shapes
would answer with the number of another program. Whatever is wrong with a file, the compiled program
is compiled again and the file replaced.

`TNSIM_PROGRAM_CACHE=off` switches this off. JAX's own compilation cache is another thing and is
left as the caller has it.

[merged from engine/programs]
Compiled programs. In: what is to be compiled. Out: what runs it, from memory, disk or XLA.

A plan's compiled programs are made before it runs, all at once: tracing holds Python's lock, but
XLA compiles in threads, so several cores share the work (measured on four: a third of the time of
one after another). A compiled program that an earlier process made is read from disk, see
`program_files`, and then not even traced.

The jitted function of a compiled program runs where a compiled one cannot: inside a trace of the
caller's, and on arrays that lie on several devices.
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
from tnsim.engine.runtime.devices import processors
from tnsim.engine.runtime.stacking import Run, Stacked
from tnsim.sessions import session

MAX_BYTES = 2**28  # of one file; the longest compiled programs take 2**24


LIMIT = 2**30  # bytes of all files together


_DIGEST = hashlib.sha256


class Files(NamedTuple):
    """The compiled programs of one device, made with one set of settings. `folder` is None for
    none."""

    folder: Path | None
    device: Any
    made_with: tuple[str, ...]

    @classmethod
    def here(cls, device: Any, settings: tuple) -> Files:
        """Programs for a device, with all that they depend on beside their own key.

        Args:
            device: The one that they run on.
            settings: Of JAX's, those that change what is traced.
        """
        about = (device.platform, device.device_kind, str(device.id), host(), _code())
        flags = os.environ.get("XLA_FLAGS", "")
        made_with = (*_versions(device), *about, flags, repr(settings))
        return cls(_folder(), device, made_with)

    def has(self, key: str) -> bool:
        """Whether there is a file for a compiled program, sound or not."""
        return self.folder is not None and os.path.exists(self._file(key))

    def read(self, key: str) -> Compiled | None:
        """The compiled program that was kept under a key, None where there is no sound one."""
        if self.folder is None or not _is_private(self.folder):
            return None
        file = self._file(key)
        try:
            content = own_bytes(file, MAX_BYTES)
            compiled = serialize_executable.deserialize_and_load(
                *pickle.loads(self._opened(key, content)),
                backend=self.device.client,
                execution_devices=[self.device],
            )
            os.utime(file)  # used now, so that it is given up last
        except Exception:  # whatever is wrong with the file, it can be compiled again
            return None
        return compiled

    def write(self, key: str, compiled: Compiled) -> None:
        """Keep a compiled program, where the backend can and the folder may be written."""
        # Unlike those of `Path`, this is False as well where one may not look.
        if self.folder is None or (os.path.exists(self.folder) and not _is_private(self.folder)):
            return
        try:
            content = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception:  # not every backend and compiled program can be written down
            return
        if len(content) < MAX_BYTES:
            put(self._file(key), self._sealed(key, content))

    def trim(self, limit: int = LIMIT) -> None:
        """Remove what was not used for longest, until the rest is within the limit."""
        if self.folder is None or not _is_private(self.folder):
            return
        files = []
        with contextlib.suppress(OSError):  # another process may remove one meanwhile
            for file in self.folder.iterdir():
                status = file.lstat()
                files.append((status.st_mtime, status.st_size, file))
        total = sum(size for _, size, _ in files)
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
        """All that a compiled program depends on."""
        return repr((key, self.made_with))

    def _sealed(self, key: str, content: bytes) -> bytes:
        """The content of a file: a digest that binds a compiled program to its key, and the
        program."""
        return _DIGEST(digest(self._text(key)).encode() + content).digest() + content

    def _opened(self, key: str, sealed: bytes) -> bytes:
        """The compiled program in the content of a file. Raises `ValueError` where it is not of
        this key."""
        content = sealed[_DIGEST().digest_size :]
        if self._sealed(key, content) != sealed:
            raise ValueError("damaged, or the compiled program of another key")
        return content


def _versions(device: Any) -> tuple[str, ...]:
    """Of all that compiles: JAX, its library, and what drives the device."""
    return jax.__version__, version("jaxlib"), device.client.platform_version


def _folder() -> Path | None:
    if os.environ.get("TNSIM_PROGRAM_CACHE", "").lower() == "off":
        return None
    return cache_folder("programs")


def _is_private(folder: Path) -> bool:
    """Whether it is a folder of the user's that nobody else may enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):  # Windows: the user's folders are closed to others
        return True
    return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0


@cache
def host() -> str:
    """What the machine's processor can do; where nobody tells, the machine itself.

    Compiled code uses the instructions of the processor that it was compiled on.
    """
    names = ("model name", "flags", "Features")
    with contextlib.suppress(OSError):
        found: dict[str, str] = {}
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
        if any(name in found for name in names[1:]):
            return repr([platform.machine(), *(found.get(name) for name in names)])
    return repr(platform.uname())


@cache
def _code() -> str:
    """A digest of the code that turns programs into compiled programs: another one may compile
    another."""
    sources = sorted(_sources(resources.files("tnsim.engine")))
    return digest(repr(sources))


def _sources(folder: Traversable, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Path and content of every Python file of a package and of its sub-packages."""
    for entry in folder.iterdir():
        if entry.name.endswith(".py"):
            yield f"{path}{entry.name}", entry.read_bytes()
        elif entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry, f"{path}{entry.name}/")


log = logging.getLogger(__name__)


Report = Callable[[int, int], Any]


_CONFIG: Any = jax.config


class Work(Protocol):
    """What a compiled program computes, a program for one: hashable, and told from others by its
    `repr`."""

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
    """What tells a compiled program from others: its work, what that is stacked over, and its
    dtype.

    One without dtype is not compiled ahead: JAX does so when it runs, or the caller's compiled
    program that it becomes part of.
    """

    work: W
    over: Stacked | None
    dtype: str | None


class CompiledProgram:
    """What runs a program.

    `length` counts operations: each maps one or two regions of code, and Linux allows a process
    65,530 of them, so a session gives up what was not used for longest.
    """

    def __init__(self, length: int, run: Any) -> None:
        self.length = length
        self.run = run

    def __call__(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        return self.run(inputs)


def ready(
    wanted: Sequence[Wanted[W]], function: Callable[[Wanted[W]], Run]
) -> list[CompiledProgram]:
    """Programs that the session keeps, those that it lacks made now, several at a time.

    Args:
        wanted: What to compile; equal ones share a program.
        function: What a compiled program computes, in terms of JAX.

    Returns:
        A compiled program for each.
    """
    kept = session().programs
    place = _place()
    missing = [one for one in dict.fromkeys(wanted) if (one, place) not in kept]
    made = _made(missing, function) if missing else {}

    def compiled(one: Wanted[W]) -> CompiledProgram:
        return made[one] if one in made else _made([one], function)[one]

    return [kept.get((one, place), lambda one=one: compiled(one)) for one in wanted]


def to_compile(wanted: Sequence[Wanted]) -> list[Wanted]:
    """Those that neither the session nor the disk has, each once."""
    kept, place = session().programs, _place()
    files = Files.here(default_device(), _settings())
    absent = (one for one in dict.fromkeys(wanted) if (one, place) not in kept)
    return [one for one in absent if not files.has(repr(one))]


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Call `report(done, total)` while compiled programs are made inside the `with` block, in this
    thread.

    Args:
        report: Given how many compiled programs are made, 0 at first, and how many there will be.
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
) -> dict[Wanted[W], CompiledProgram]:
    jitted = {one: jax.jit(function(one)) for one in missing}
    runs = dict(jitted)
    ahead = [one for one in missing if one.dtype and not _CONFIG.jax_disable_jit]
    if ahead:
        runs |= _compiled([(one, jitted[one]) for one in ahead])
    return {one: CompiledProgram(one.work.length, run) for one, run in runs.items()}


def _compiled(functions: Sequence[tuple[Wanted, Any]]) -> dict[Wanted, Compiled]:
    """Programs from disk, and those that are not there from XLA, the longest first."""
    report = _report.get() or (lambda done, total: None)
    report(0, len(functions))
    files = Files.here(default_device(), _settings())
    pool = ThreadPoolExecutor(min(len(functions), processors()))
    try:
        reading = {one: pool.submit(files.read, repr(one)) for one, _ in functions}
        read = {one: future.result() for one, future in reading.items()}
        found = {one: compiled for one, compiled in read.items() if compiled is not None}
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


def _compile(lowered: Any, options: dict[str, Any] | None, files: Files, key: str) -> Compiled:
    compiled = lowered.compile(compiler_options=options)
    files.write(key, compiled)
    return compiled


def _arguments(one: Wanted) -> list[jax.ShapeDtypeStruct]:
    """The inputs of a compiled program without their numbers."""
    shapes: Sequence[tuple[int, ...]] = one.work.shapes
    if one.over is not None:
        shapes = [
            one.over.leading(axes) + tuple(shape)
            for shape, axes in zip(shapes, one.over.inputs, strict=True)
        ]
    return [jax.ShapeDtypeStruct(shape, one.dtype) for shape in shapes]


def _place() -> tuple:
    """What a compiled program depends on beside what is wanted, and may change within a process."""
    device = default_device()
    return device.id, device.platform, _settings()


def _settings() -> tuple:
    """JAX's settings that change what is traced from a program."""
    return _CONFIG.jax_enable_x64, _CONFIG.jax_default_matmul_precision


def lie_on_default_device(arrays: Iterable[Any]) -> bool:
    """Whether no array is traced, or on another device than the one compiled programs are compiled
    for."""
    found = list(arrays)
    if any(isinstance(x, Tracer) for x in found):
        return False
    if jax.device_count() == 1:
        return True
    here = {default_device()}
    return all(x.devices() == here for x in found if isinstance(x, jax.Array))


def compiler_options() -> dict[str, Any] | None:
    """How XLA compiles a compiled program for a CPU.

    By default it orders operations so that many can run at once, which keeps their arrays too. For
    a plan that doubles the memory, and it gains nothing where matrix products use all cores.

    The time of a plan goes into matrix products, which are library calls, and loops over entries,
    which wait for memory: LLVM's first level of optimisation takes two thirds of the time of the
    default, and the compiled programs are as fast.

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
    log.info(
        "this XLA does not know %s: compiled programs go without", sorted(set(options) - set(known))
    )
    return known


def _accepts(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:
        return False
    return True
