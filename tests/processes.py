"""Python in a process of its own, which finds what this one finds."""

import os
import subprocess
import sys
from typing import Any


def started(code: str, *arguments: Any, env: dict[str, str] | None = None, **options: Any):
    """A process that runs code with arguments, and variables beside those of this process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(argv, env=environment, text=True, **options)


def python(code: str, *arguments: Any, **options: Any) -> tuple[str, str]:
    """What code prints, and what it writes to stderr; it ends without an error."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = started(code, *arguments, **pipes, **options)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out, err


def ended() -> int:
    """The number of a process that has ended."""
    process = started("")
    process.wait()
    return process.pid
