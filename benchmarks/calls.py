"""What one comparison of two small files goes through: packages, modules, functions, and hops.

    python benchmarks/calls.py

Two models of two bilinear layers of width 8 are saved and compared under `Gaussian`, once in a new
process and once more. A hop is a call from a function of one package into one of another. Nested
functions and comprehensions count as part of the function around them. The same script run in an
older tree counts that tree.
"""

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import tnsim

ROOT = f"{Path(tnsim.__file__).parent}/"


def package(file: str) -> str:
    """The package of a file of tnsim, or the root."""
    first, _, rest = file.removeprefix(ROOT).partition("/")
    return first if rest else "root"


def is_counted(frame: FrameType) -> bool:
    """Whether a frame runs a named function of tnsim that no other function holds."""
    code = frame.f_code
    return code.co_filename.startswith(ROOT) and "<" not in code.co_qualname


class Trace:
    """Calls of a comparison, counted as they are made."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.hops = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Count one event of `sys.setprofile`."""
        if event != "call" or not is_counted(frame):
            return
        file = frame.f_code.co_filename
        self.calls[file, frame.f_code.co_qualname] += 1
        caller = frame.f_back
        while caller is not None and not is_counted(caller):
            caller = caller.f_back
        if caller is not None and package(caller.f_code.co_filename) != package(file):
            self.hops += 1


def traced(files: tuple[Path, Path]) -> list[str]:
    """The cells of one comparison."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        tnsim.similarity(*files, tnsim.Gaussian())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    modules = {file for file, _ in trace.calls}
    packages = Counter(package(file) for file, _ in trace.calls)
    counts = len(packages), len(modules), len(trace.calls), trace.calls.total(), trace.hops
    most = ", ".join(f"{name} {count}" for name, count in packages.most_common())
    return [*(f"{count:,}" for count in counts), most]


def main() -> None:
    """Print the table."""
    draw = np.random.default_rng(0).standard_normal
    shapes = [[(4, 8), (4, 8), (8, 4)], [(4, 8), (4, 8), (3, 4)]]
    heads = "packages", "modules", "functions", "calls", "hops", "functions of each package"
    print("| call | " + " | ".join(heads) + " |\n|" + "---|" * 7)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "a.safetensors"), Path(folder, "b.safetensors")
        for file in files:
            layers = [tnsim.Bilinear(*(draw(shape) for shape in layer)) for layer in shapes]
            tnsim.save(tnsim.Model(layers), file)
        for name in "first", "second":
            print(f"| {name} | " + " | ".join(traced(files)) + " |")


if __name__ == "__main__":
    main()
