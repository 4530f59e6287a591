"""Steps run by a compiled function, without Python and without its lock between them.

NumPy is called for a step at a time, by a thread that holds Python's lock. Two threads that call
NumPy thousands of times a second hand the lock to and fro, and products and sums entry by entry
over short axes take NumPy three times as long as a compiled loop. The function here goes through
the rows of a table (`ir/step_table`): products of matrices are calls of the BLAS that NumPy itself
calls, and the rest are loops. Its numbers are NumPy's, bit for bit.

**When.** numba compiles the function in two seconds, once for a machine and a release, and loads it
from its own folder of compiled functions afterwards. What the function saves is some microseconds
of each call of NumPy. So it is loaded by a process that has called, or is about to call, NumPy more
often than that repays. As the bits are the same, nothing but time depends on this.

Where NumPy's BLAS is another library than the OpenBLAS of NumPy's wheels, and for complex numbers,
there is no such function, and steps are called one by one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from tnsim.engine.ir.step_table import StepTable, step_table
from tnsim.engine.runtime.devices import blas_libraries
from tnsim.sessions import per_object_cache

_LOADING = 100_000
"""Calls of NumPy, so far and in the next plan, that repay loading the function: 8 us are saved of
each, and loading takes a third of a second."""


_GEMM = {"float32": "scipy_cblas_sgemm64_", "float64": "scipy_cblas_dgemm64_"}
"""Names of the product of matrices in the OpenBLAS of NumPy's wheels, by dtype."""


table_of = per_object_cache(step_table)
"""The table of some steps, kept as long as the steps."""


class Executor(NamedTuple):
    """The function that runs rows of arrays of a dtype, with what it is always given.

    Attributes:
        run: Compiled function.
        gemm: Address of the product of matrices in NumPy's BLAS.
        one: The number one, of the dtype.
    """

    run: Callable[..., None]
    gemm: int
    one: np.floating[Any]

    def call(
        self, table: StepTable, addresses: Int64[np.ndarray, " value"], first: int, last: int
    ) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The function and its arguments for the rows from `first` to before `last`.

        Args:
            table: Table of steps, to be kept while the function may be called.
            addresses: Address of each value of the steps; read when the function is called.
            first: Number of the first row.
            last: Number of the row behind the last.
        """
        weights = address_of(table.weights)
        item = self.one.itemsize
        return self.run, (table.rows, weights, addresses, first, last, self.gemm, item, self.one)


def address_of(array: np.ndarray) -> int:
    """The address of the first entry of an array."""
    return array.__array_interface__["data"][0]


class _State:
    """What this process has interpreted and loaded.

    Attributes:
        changing: Held while the number of calls changes.
        calls: Number of calls of NumPy that interpreted plans have taken.
        loading: Held by the thread that loads a function.
        loaded: Function of each dtype that was loaded, None where it cannot be had.
    """

    def __init__(self) -> None:
        self.changing = threading.Lock()
        self.calls = 0
        self.loading = threading.Lock()
        self.loaded: dict[str, Executor | None] = {}

    def added(self, calls: int) -> int:
        with self.changing:
            self.calls += calls
            return self.calls


_state = _State()


def executor(dtype: np.dtype, calls: int) -> Executor | None:
    """The function that runs rows of arrays of a dtype, once the process has work that repays it.

    Args:
        dtype: Type of all arrays.
        calls: Number of calls of the plan that is about to run.
    """
    state, name = _state, dtype.name
    if state.added(calls) < _LOADING or name not in _GEMM:
        return None
    # While a thread loads the function, others go on without it.
    if name not in state.loaded and state.loading.acquire(blocking=False):
        try:
            state.loaded[name] = _loaded(name)
        finally:
            state.loading.release()
    return state.loaded.get(name)


def _loaded(dtype: str) -> Executor | None:
    """The compiled function for a dtype; None where it cannot be had."""
    gemm = _gemm_address(dtype)
    if gemm is None:
        return None
    try:
        from tnsim.engine.runtime.executor_kernel import kernel
    except ImportError:  # numba is missing or does not know this NumPy
        return None
    run = kernel(dtype)
    return None if run is None else Executor(run, gemm, np.dtype(dtype).type(1))


def _gemm_address(dtype: str) -> int | None:
    """The address of the product of matrices in NumPy's own BLAS."""
    for library in blas_libraries():
        # SciPy brings an OpenBLAS of its own, whose products may differ in the last digit.
        if not {"numpy.libs", "numpy"}.intersection(Path(library.filepath).parts[-3:-1]):
            continue
        with suppress(AttributeError, OSError):
            function: Any = getattr(ctypes.CDLL(library.filepath), _GEMM[dtype])
            return ctypes.cast(function, ctypes.c_void_p).value
    return None
