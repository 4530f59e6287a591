"""Hostile files and flags against the command line; rows of a table of what was tried.

python scripts/attack/files.py       rows in Markdown on stdout, what fell on stderr

Every case is a command line that must end with status 0, or with status 2 and one line that is not
unforeseen, within a limit of processor time, and must leave all files as they are.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import commands  # pyright: ignore[reportMissingImports]
import corpus_files as files  # pyright: ignore[reportMissingImports]
import numpy as np

SECONDS = 20
NUMBERS = ("0", "-1", "1", "2", "9" * 5, "9" * 12, "9" * 30, "1.5", "nan", "", "x", "1e3", "\u0663")
HOSTILE = (
    "absent",
    "folder",
    "pipe",
    "empty",
    "text.npz",
    "object.npy",
    "cut.npz",
    "/dev/null",
    "",
)
Case = tuple[str, tuple[str, ...]]


class TooSlow(BaseException):
    """Not an `Exception`, so that nobody swallows it."""


def numbers() -> Iterator[Case]:
    """Every option that takes a number."""
    pair = ("similarity", "a.npz", "b.npz", "--check")
    for value in NUMBERS:
        if len(value) < 5:  # larger ones are a long sample that somebody asked for
            yield "flags: numbers", (*pair, value)
        yield "flags: numbers", (*pair, "8", "--seed", value)
        for verb in ("inspect", "plan", "similarity"):
            given = ("a.npz",) if verb == "inspect" else ("a.npz", "b.npz")
            for metric in ((),) if verb == "inspect" else ((), ("--metric", "categorical")):
                yield "flags: numbers", (verb, *given, *metric, "--n-ctx", value)
        for option in ("--width", "--rank", "--repeats", "--max-depth"):
            if not value.isdecimal() or value in ("0", "\u0663"):
                yield "flags: numbers", ("bench", "depth", option, value)


def inputs() -> Iterator[Case]:
    """Every place of a file, with what is none."""
    for name in HOSTILE:
        yield "flags: inputs", ("inspect", name)
        yield "flags: inputs", ("similarity", "a.npz", name)
        yield "flags: inputs", ("convert", name, "c.safetensors")
        yield "flags: inputs", ("pairwise", "a.npz", name, "--out", "new")
        for option in ("--dialect", "--model", "--norm-inputs", "--fit", "--leave-out"):
            yield "flags: inputs", ("similarity", "a.npz", "b.npz", option, name)


def outputs() -> Iterator[Case]:
    """Every option that writes, onto every kind of file."""
    for name in (*HOSTILE[1:-2], "a.npz", "a.safetensors"):
        yield "flags: outputs", ("convert", "a.npz", name)
        yield "flags: outputs", ("pairwise", "a.npz", "--out", name)
        yield (
            "flags: outputs",
            ("bench", "depth", "--width", "2", "--max-depth", "1", "--out", name),
        )
        if name != "folder":
            yield "flags: outputs", ("demo", "--out", name)
        if name not in ("folder", "pipe"):  # who writes to a pipe waits for its reader
            yield "flags: outputs", ("pairwise", "a.npz", "--out", "new", "--report", name)


def samples() -> Iterator[Case]:
    """Arrays that are no samples."""
    shapes = [(), (0,), (0, 2), (5,), (5, 2), (5, 3), (1, 2), (2, 5, 2), (5, 0)]
    kinds = ["f8", "f2", "i8", "u1", "c8", "?", "U3", "M8[s]", "f8,i4"]
    for shape, kind in itertools.product(shapes, kinds):
        name = f"s{len(shape)}-{'x'.join(map(str, shape))}-{kind}.npy".replace("[s]", "").replace(
            ",", ""
        )
        np.save(name, np.zeros(shape, kind))
        for option in ("--fit", "--norm-inputs"):
            yield "samples", ("similarity", "a.npz", "b.npz", option, name)
    for value in (np.nan, np.inf, 1e300, 1e-300):
        np.save("value.npy", np.full((5, 2), value))
        yield "samples", ("similarity", "a.npz", "b.npz", "--fit", "value.npy")


def prepare() -> None:
    """The files that cases name."""
    Path("a.npz").write_bytes(files.npz(files.readout()))
    Path("b.npz").write_bytes(files.npz({k: v + 1 for k, v in files.readout().items()}))
    Path("a.safetensors").write_bytes(files.sound()["a.safetensors"])
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("empty").touch()
    Path("text.npz").write_text("text")
    np.save("object.npy", np.array([{}], dtype=object))
    Path("cut.npz").write_bytes(files.npz(files.readout())[:-40])


def outcome(arguments: tuple[str, ...]) -> str:
    """`answered` or `refused`, or else what went wrong."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 3 * SECONDS)  # one who waits for a pipe takes no processor
    try:
        done = commands.command(*arguments, check=False)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    if done.returncode == 0:
        return "answered"
    lines = [line for line in done.stderr.split("\n") if "error: " in line]
    if done.returncode != 2 or len(lines) != 1 or "unforeseen" in done.stderr:
        return f"{done.returncode}: {done.stderr[-300:]}"
    return "refused"


def given() -> dict[str, bytes]:
    """The content of what must stay."""
    names = ("a.npz", "b.npz", "a.safetensors", "text.npz", "object.npy", "cut.npz")
    return {name: Path(name).read_bytes() for name in names}


def run() -> int:
    """Try all cases, say what fell, print the rows; how many fell."""

    def give_up(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, give_up)
    signal.signal(signal.SIGALRM, give_up)
    prepare()
    before = given()
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for kind, arguments in itertools.chain(numbers(), inputs(), outputs(), samples()):
        result = outcome(arguments)
        if given() != before:
            result = "a file was changed"
            for name, content in before.items():
                Path(name).write_bytes(content)
        if result not in ("answered", "refused"):
            print(" ".join(arguments)[:200], "->", result, file=sys.stderr, flush=True)
        counts[kind][result if result in ("answered", "refused") else "fell"] += 1
    for kind, found in counts.items():
        cells = [sum(found.values()), found["answered"], found["refused"], found["fell"]]
        print(f"| {kind} | {' | '.join(map(str, cells))} |")
    return sum(found["fell"] for found in counts.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        fell = run()
        os.chdir("/")
    sys.exit(bool(fell))
