"""Read every input of the corpus in one process with limits; the table in the documentation.

python tests/corpus_run.py                            one object in JSON on stdout
python tests/corpus_run.py docs/hostile-files.md      writes the page
"""

import collections
import contextlib
import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import corpus
import corpus_files as files

import tnsim
from tnsim.cli import app

SECONDS = 10  # after which an input is given up
STRIDE = 8  # one input in so many goes through the command line too
ADDRESSES = 2**31  # bytes of address space beyond what the libraries take
PAGE = """# Hostile files

No file may do more than be refused in one sentence: no other exception, no code that runs, no long
wait, no memory out of proportion. `tests/corpus.py` makes damaged and hostile files from a few
sound ones. Each is read through `tnsim.load`, and one in eight through `tnsim inspect` as well, in
one process whose address space is limited.

| kind of input | tried | loaded | refused | anything else | slowest, CPU |
|---|---|---|---|---|---|
{rows}

*Loaded* are inputs that are sound in spite of the change: another name or description, a tensor of
8 bits, a bit of a weight in a format without checksums (safetensors; npz and PyTorch files have
them, and they are compared). Memory grew by at most {memory} MiB above the process with all
libraries loaded.

What is read is limited: tensors may declare up to 16 times the size of their file (or 32 MiB), a
safetensors header 4 MiB, the directory of an archive 1 MiB, the pickle in a PyTorch file 512 KiB,
JSON 1 MiB, YAML 128 KiB, the patterns of a dialect 16,384 characters. The pickle in a PyTorch file
is gone through before PyTorch reads it, and refused where it asks for memory by a number alone
(`bytearray(2**31)`) or for a codec of quadratic time. PyTorch files from before 1.6 are refused, as they do not say what they
hold before they are unpickled; so is YAML that refers to itself by `*name`.

The table is written by `python tests/corpus_run.py docs/hostile-files.md`;
`tests/checkpoints/test_hostile_files.py` holds the same run to 2 seconds an input, 200 MiB, and
nothing but loaded or refused.
"""


class TooSlow(BaseException):
    """Not an `Exception`, so that no reader can swallow it."""


def give_up(*_) -> None:
    raise TooSlow


def load(target: str, dialect: str | None) -> str:
    try:
        tnsim.load(target, dialect)
    except tnsim.TnsimError as error:
        # A file whose names fit a preset is read by it, as the refusal says.
        if fitting := re.search(r'dialect="([\w-]+)"', str(error)):
            return load(target, fitting[1])
        assert str(error).isprintable(), error
        assert len(str(error)) < 2000
        assert "weights_only" not in str(error)
        return "refused"
    return "loaded"


def inspect(target: str, dialect: str | None) -> str:
    """The same through the command line, whose output is looked at as well."""
    sys.argv = ["tnsim", "inspect", target, *(["--dialect", dialect] if dialect else [])]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            app.main()
        except SystemExit as ended:
            status = ended.code
    lines = (out.getvalue() + errors.getvalue()).split("\n")
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 2000
    if status == 0:
        return "loaded"
    assert status == 2, status
    assert errors.getvalue().count("\n") == 1, errors.getvalue()
    assert "unforeseen" not in errors.getvalue(), errors.getvalue()
    if fitting := re.search(r'dialect="([\w-]+)"', errors.getvalue()):
        return inspect(target, fitting[1])
    return "refused"


def outcome(read: Callable, target: str, dialect: str | None) -> tuple[str, float]:
    """`loaded` or `refused`, or else what was raised; and the seconds of the processor."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    start = time.process_time()
    try:
        result = read(target, dialect)
    except BaseException as error:
        result = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ("ran code" if Path("owned").exists() else result), time.process_time() - start


def memory() -> int:
    """Largest amount held so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def limit_addresses() -> None:
    """Only Linux tells how much is taken already."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        return
    pages = int(statistics.read_text().split()[0])
    size = pages * resource.getpagesize() + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def run() -> dict:
    """Counts by kind, what was neither loaded nor refused, the slowest, the growth of memory."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, give_up)
    for name, data in files.sound().items():
        Path(name).write_bytes(data)
        assert load(name, None) == inspect(name, None) == "loaded", name
    inputs = list(corpus.inputs())
    limit_addresses()
    idle = memory()
    kinds = collections.defaultdict(collections.Counter)
    slowest = collections.defaultdict(float)
    wrong = []
    for number, item in enumerate(inputs):
        readers = [load]
        if number % STRIDE == 0 or item.kind in ("bomb", "names"):
            readers.append(inspect)
        for result, seconds in outcomes(item, readers):
            slowest[item.kind] = max(slowest[item.kind], seconds)
            if result not in ("loaded", "refused"):
                wrong.append(f"{item.kind}: {result}")
        kinds[item.kind][result if result in ("loaded", "refused") else "else"] += 1
    return {"kinds": kinds, "slowest": slowest, "wrong": wrong, "memory": memory() - idle}


def outcomes(item: files.Input, readers: list[Callable]) -> list[tuple[str, float]]:
    """What each reader makes of one input, written into the folder of the process."""
    item.write(Path())
    results = [outcome(read, item.target, item.dialect) for read in readers]
    for name in item.files:
        Path(name).unlink()
    return results


def page(result: dict) -> str:
    """The result as a page of the documentation."""
    rows = []
    total = collections.Counter()
    for kind, counts in result["kinds"].items():
        total += counts
        rows.append(row(kind, counts, result["slowest"][kind]))
    rows.append(row("**all**", total, max(result["slowest"].values())))
    return PAGE.format(rows="\n".join(rows), memory=result["memory"])


def row(kind: str, counts: dict, seconds: float) -> str:
    cells = [sum(counts.values()), counts["loaded"], counts["refused"], counts["else"]]
    return f"| {kind} | {' | '.join(map(str, cells))} | {seconds:.2f} s |"


if __name__ == "__main__":
    arguments = [Path(argument).absolute() for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        result = run()
        os.chdir("/")
    if not arguments:
        print(json.dumps(result))  # noqa: T201
    for target in arguments:
        target.parent.mkdir(exist_ok=True)
        target.write_text(page(result))
        print(*result["wrong"], sep="\n")  # noqa: T201
