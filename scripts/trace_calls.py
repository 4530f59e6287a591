"""Count what a reader who follows a call meets: files that execute, functions, lines of the files.

    python scripts/trace_calls.py

Two bilinear layers of width 5 go from files to the number. Counted are functions and files of
tnsim, comprehensions and lambdas left out; imports are done before.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import tnsim

SOURCE = str(Path(tnsim.__file__).parent)


def trace(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """The functions of tnsim that a call runs, as pairs of file and qualified name."""
    seen: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and "<" not in code.co_name:
            seen.add((code.co_filename, code.co_qualname))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.safetensors" for n in range(5)]
        for path in paths:
            layers = [tnsim.Bilinear(*rng.normal(size=(3, 5, 5))) for _ in range(2)]
            tnsim.save(tnsim.Model(layers), path)
        metric = tnsim.TreeSymmetric()
        calls: dict[str, Callable[[], Any]] = {
            "similarity, by quadrature": lambda: tnsim.similarity(paths[0], paths[1]),
            "similarity, by plan": lambda: tnsim.similarity(paths[0], paths[1], metric),
            "pairwise of 5 files": lambda: tnsim.pairwise(paths),
        }
        print(f"{'':<28}{'files':>6}{'functions':>10}{'lines':>8}")
        for name, call in calls.items():
            with tnsim.using(tnsim.Session()):
                call()  # imports
            with tnsim.using(tnsim.Session()):
                seen = trace(call)
            files = {file for file, _ in seen}
            lines = sum(len(Path(file).read_text().splitlines()) for file in files)
            print(f"{name:<28}{len(files):>6}{len(seen):>10}{lines:>8,}")


if __name__ == "__main__":
    main()
