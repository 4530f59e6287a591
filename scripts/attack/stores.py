"""Attack the stores of pairwise runs, and count the outcomes.

    python scripts/attack/stores.py                        all attacks, a few minutes on two cores
    python scripts/attack/stores.py threads kills --rounds 20 --seed 7

Every attack runs `pairwise` into a store, or reads one, while something goes wrong, and holds the
result against the result of a run in memory. Outcomes are counted:

    same      the numbers of the run in memory, bit by bit
    told      an error of tnsim: a sentence that names the store
    other     other numbers, or none for a pair: an error in tnsim
    raw       any other exception: an error in tnsim
    hung      no answer within two minutes: an error in tnsim
    left      files beside those of an undisturbed store, after all runs have ended

Prints rows of a markdown table. Ends with status 1 where anything is an error in tnsim.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tnsim

MODELS = 9
TILES = tnsim.Budget(memory_bytes=12_000)  # of two models a side
PATIENCE = 120.0  # seconds until a run counts as hung
COLUMNS = ("attack", "tried", "same", "told", "other", "raw", "hung", "left")
WRONG = ("other", "raw", "hung")


@cache
def models() -> list[tnsim.Model]:
    """The models of every run, the same in every process."""
    draw = np.random.default_rng(0).normal
    shapes = (4, 3), (4, 3), (2, 4), (4,)
    return [
        tnsim.Model([tnsim.Bilinear(*(draw(size=shape) for shape in shapes))])
        for _ in range(MODELS)
    ]


def compared(store: Path | None = None) -> Any:
    """One run over all pairs. Damage is warned of, which is as it should be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tnsim.errors.StoreWarning)
        return tnsim.pairwise(
            models(), tnsim.GaussianClosure(), slices=True, store=store, budget=TILES
        )


def opened(store: Path) -> Any:
    """What a reader is shown of a store."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tnsim.errors.StoreWarning)
        return tnsim.open_pairwise(store)


@cache
def wanted() -> Any:
    """The result of a run in memory."""
    return compared()


def equal(found: Any, incomplete: bool = False) -> bool:
    """Whether a result has the wanted numbers; where it may be incomplete, those that it has."""
    for name in ("similarity", "log_inner", "sign", "slices", "log_norm_a"):
        ours, theirs = np.asarray(wanted()[name]), np.asarray(found[name])
        if ours.shape != theirs.shape:
            return False
        missing = np.isnan(np.asarray(found["similarity"], float)) if incomplete else None
        same = ours == theirs
        if missing is not None:
            missing = np.isnan(theirs) if name == "log_norm_a" else missing
            same |= missing.reshape(missing.shape + (1,) * (same.ndim - missing.ndim))
        if not same.all():
            return False
    return True


def outcome(call: Callable[[], Any], incomplete: bool = False) -> str:
    """How one call ends, in one word of the table."""
    try:
        found = call()
    except tnsim.TnsimError:
        return "told"
    except Exception:
        traceback.print_exc()
        return "raw"
    return "same" if equal(found, incomplete) else "other"


def in_time(call: Callable[[], Any], incomplete: bool = False) -> str:
    """The same in a thread that is not waited for beyond all patience."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(outcome(call, incomplete)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found[0] if found else "hung"


def surplus(store: Path) -> int:
    """Files in and beside a store that an undisturbed one has not."""
    known = {path.relative_to(pristine()) for path in pristine().rglob("*")}
    inside = [path for path in store.rglob("*") if path.relative_to(store) not in known]
    return len(inside) + sum(path != store for path in store.parent.iterdir())


@cache
def pristine() -> Path:
    """A store of an undisturbed run."""
    path = Path(tempfile.mkdtemp(prefix="tnsim-attack-")) / "store"
    compared(path)
    return path


@contextlib.contextmanager
def fresh(whole: bool) -> Iterator[Path]:
    """The path of a store alone in a folder: a copy of an undisturbed one, or nothing yet."""
    with tempfile.TemporaryDirectory(prefix="tnsim-attack-") as folder:
        store = Path(folder) / "store"
        if whole:
            shutil.copytree(pristine(), store)
        yield store


def lost(store: Path, rng: np.random.Generator, share: float) -> None:
    """Remove a share of all records."""
    for record in sorted((store / "records").iterdir()):
        if rng.random() < share:
            record.unlink()


def threads(rounds: int, rng: np.random.Generator) -> Counter[str]:
    """Eight threads on a store that is new, has lost half of its records, or its end alone."""
    wanted()
    counts: Counter[str] = Counter()
    for number in range(rounds):
        with fresh(whole=number % 3 > 0) as store:
            if number % 3 == 1:
                lost(store, rng, 0.5)
            elif number % 3 == 2:
                (store / "finished.json").unlink()
            with ThreadPoolExecutor(8) as pool:
                started = [pool.submit(outcome, lambda: compared(store)) for _ in range(8)]
                counts.update(one.result() for one in started)
            counts["left"] += surplus(store)
    return counts


def readers(rounds: int, rng: np.random.Generator) -> Counter[str]:
    """Four threads that compute and four that read all the while; unfinished is no error."""
    wanted()
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        with fresh(whole=True) as store:
            lost(store, rng, 0.7)
            (store / "finished.json").unlink()
            with ThreadPoolExecutor(8) as pool:
                started = [pool.submit(outcome, lambda: compared(store)) for _ in range(4)]
                shown = [pool.submit(outcome, lambda: opened(store), True) for _ in range(4)]
                counts.update(one.result() for one in (*started, *shown))
            counts["left"] += surplus(store)
    return counts


def process(store: Path, *options: str) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    command = [sys.executable, __file__, "--run", str(store), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)


def ended(run: subprocess.Popen[str]) -> str:
    """How a run in a process of its own ends."""
    try:
        said, _ = run.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()
        return "hung"
    return "killed" if run.returncode == -signal.SIGKILL else (said.split() or ["raw"])[-1]


def processes(rounds: int, rng: np.random.Generator) -> Counter[str]:
    """Four processes on a store that is new, or has lost half of its records."""
    counts: Counter[str] = Counter()
    for number in range(rounds):
        with fresh(whole=number % 2 == 1) as store:
            if number % 2:
                lost(store, rng, 0.5)
            counts.update([ended(run) for run in [process(store) for _ in range(4)]])
            counts["left"] += surplus(store)
    return counts


def kills(rounds: int, rng: np.random.Generator) -> Counter[str]:
    """A process killed as a file takes its name, half of them beside another one; then a run."""
    counts: Counter[str] = Counter()
    for number in range(rounds):
        with fresh(whole=False) as store:
            when = str(int(rng.integers(1, 50)))
            beside = [process(store)] if number % 2 else []
            killed = process(store, "--kill", when)
            for run in (killed, *beside):
                found = ended(run)
                counts[found] += found != "killed"
            counts[in_time(lambda: compared(store))] += 1
            counts["left"] += surplus(store)
    return counts


def failures(rounds: int, rng: np.random.Generator) -> Counter[str]:
    """Calls of the operating system that fail: one in forty, of any kind; then a run."""
    wanted()
    counts: Counter[str] = Counter()
    codes = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOENT, errno.EMFILE, errno.ESTALE)
    names = ("replace", "mkdir", "rename", "unlink", "rmdir", "utime")
    for _ in range(rounds):

        def failing(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                inside = any("store" in str(one) for one in arguments)
                if inside and rng.random() < 1 / 40:
                    code = int(rng.choice(codes))
                    raise OSError(code, os.strerror(code), str(arguments[0]))
                return function(*arguments, **options)

            return wrapped

        with fresh(whole=False) as store:
            with contextlib.ExitStack() as stack:
                for name in names:
                    function = failing(getattr(os, name))
                    stack.enter_context(mock.patch.object(os, name, function))
                counts[in_time(lambda: compared(store))] += 1
            counts[in_time(lambda: compared(store))] += 1
            counts["left"] += surplus(store)
    return counts


def flipped(path: Path, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def cut(path: Path, rng: np.random.Generator) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(rng.integers(len(data)))])


def exchanged(path: Path, rng: np.random.Generator) -> None:
    others = sorted(other for other in path.parent.rglob("*") if other.is_file() and other != path)
    if others:
        shutil.copyfile(others[int(rng.integers(len(others)))], path)
    else:
        path.write_bytes(bytes(len(path.read_bytes())))


def replaced(make: Callable[[Path], Any]) -> Callable[[Path, np.random.Generator], None]:
    def damage(path: Path, rng: np.random.Generator) -> None:
        path.unlink()
        make(path)

    return damage


def flattened(path: Path, rng: np.random.Generator) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path, np.random.Generator], Any]] = {
    "a bit flipped": flipped,
    "cut": cut,
    "longer": lambda path, rng: path.write_bytes(path.read_bytes() + b"0"),
    "zeros": lambda path, rng: path.write_bytes(bytes(path.stat().st_size)),
    "another file": exchanged,
    "gone": replaced(lambda path: None),
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a link to itself": replaced(lambda path: path.symlink_to(path)),
    "a link to nowhere": replaced(lambda path: path.symlink_to("nowhere")),
    "its folder a file": flattened,
}


def damages(rounds: int, rng: np.random.Generator) -> Counter[str]:
    """Every kind of damage to files drawn from a whole store: read, then run again, then read."""
    counts: Counter[str] = Counter()
    names = sorted(p.relative_to(pristine()) for p in pristine().rglob("*") if p.is_file())
    names = [name for name in names if name.name != "computed.log"]
    for damage in DAMAGES.values():
        for n in rng.choice(len(names), min(rounds, len(names)), replace=False):
            if damage is flattened and len(names[n].parts) == 1:
                continue
            with fresh(whole=True) as store:
                damage(store / names[n], rng)
                counts[in_time(lambda: opened(store))] += 1
                counts[in_time(lambda: compared(store))] += 1
                again = in_time(lambda: opened(store))
                counts[again] += again != "told"
                counts["raw"] += again == "told"  # what was repaired is whole
                counts["left"] += surplus(store)
    return counts


def rivals(rounds: int, rng: np.random.Generator) -> Counter[str]:
    """Six threads that compute while another damages record after record; then a run, and a reader.

    A run may be told of a damage, or end in a sentence. A store that was damaged after its last run
    is repaired by the run that follows.
    """
    wanted()
    counts: Counter[str] = Counter()
    kinds = [DAMAGES[name] for name in DAMAGES if name != "its folder a file"]
    for _ in range(rounds):
        with fresh(whole=True) as store:
            lost(store, rng, 0.5)
            stop = threading.Event()

            def spoil(store: Path = store, stop: threading.Event = stop) -> None:
                while not stop.wait(0.002):
                    records = [path for path in store.glob("records/*.npz") if path.is_file()]
                    if records:
                        with contextlib.suppress(OSError, ValueError):
                            kinds[int(rng.integers(len(kinds)))](
                                records[int(rng.integers(len(records)))], rng
                            )

            spoiler = threading.Thread(target=spoil)
            spoiler.start()
            with ThreadPoolExecutor(6) as pool:
                started = [pool.submit(in_time, lambda: compared(store)) for _ in range(6)]
                counts.update(one.result() for one in started)
            stop.set()
            spoiler.join()
            counts[in_time(lambda: compared(store))] += 1
            counts[in_time(lambda: opened(store))] += 1
            counts["left"] += surplus(store)
    return counts


ATTACKS: dict[str, tuple[Callable[[int, np.random.Generator], Counter[str]], int]] = {
    "threads": (threads, 12),
    "readers": (readers, 8),
    "processes": (processes, 6),
    "kills": (kills, 12),
    "failures": (failures, 60),
    "damages": (damages, 12),
    "rivals": (rivals, 6),
}
"""By name, each with its rounds."""


def killed_at(when: int) -> None:
    """Kill this process when it gives a file its name for the n-th time, before or after."""
    left = iter(range(when, -1, -1))

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            is_last = next(left) == 0
            if not is_last or when % 2:
                function(*arguments, **options)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    for name in ("replace", "rename"):
        setattr(os, name, counting(getattr(os, name)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Attack the stores of pairwise runs, and count the outcomes."
    )
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        wanted()
        if asked.kill:
            killed_at(asked.kill)
        print(outcome(lambda: compared(asked.run)))
        return 0
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    total: Counter[str] = Counter()
    for name in asked.attacks or ATTACKS:
        attack, rounds = ATTACKS[name]
        counts = attack(asked.rounds or rounds, np.random.default_rng(asked.seed))
        tried = sum(counts.values()) - counts["left"]
        cells = [counts[one] for one in COLUMNS[2:]]
        print(f"| {name} | {tried} | {' | '.join(map(str, cells))} |", flush=True)
        total += counts
    return int(any(total[one] for one in WRONG))


if __name__ == "__main__":
    sys.exit(main())
