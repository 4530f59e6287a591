"""Compiled programs. In: a function of arrays that runs a piece. Out: the same, jitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Run = Callable[[list[Any]], tuple[list[Any], list[Any]]]


class Program:
    """What runs a piece as one jitted function; compiled when it first runs.

    `length` counts operations: each maps one or two regions of code, and Linux allows a process
    65,530 of them, so a session gives up what was not used for longest.
    """

    def __init__(self, run: Run, length: int, traced: bool) -> None:
        # JAX takes compiler options of outermost programs only.
        options = None if traced else _compiler_options()
        self.length = length
        self.jitted = jax.jit(run, compiler_options=options)

    def __call__(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        return self.jitted(inputs)


def _compiler_options() -> dict[str, str] | None:
    """By default XLA orders operations on a CPU so that many can run at once, which keeps their
    arrays too.

    For a plan that doubles the memory, and it gains nothing where matrix products use all cores.
    """
    if jax.default_backend() != "cpu":
        return None
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
