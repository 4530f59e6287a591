"""The compiled function that goes through the rows of a table of steps; importing it loads numba.

Arrays are given by address, so that a row costs the function a few machine instructions beside its
work. Nothing is checked here: rows are made from views that lie within their memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.core.caching import FunctionCache
from numba.core.errors import NumbaWarning
from numba.extending import intrinsic

from tnsim.engine.ir.step_table import (
    ADD,
    AXES,
    COLUMNS,
    COPY,
    MATMUL,
    PRODUCT,
    SCALE,
    SHAPE,
    STARTS,
    STRIDES,
    SUBTRACT,
    VALUES,
)

_BY_ROWS, _AS_IT_IS, _TRANSPOSED = 101, 111, 112  # constants of CBLAS
_INNER = AXES - 1  # the innermost axis
_X, _Y, _Z = STRIDES, STRIDES + AXES, STRIDES + 2 * AXES  # first columns of strides

Row = Any  # a row of integers of a table
Entry = Any  # a number of the dtype of the arrays


def _entries_at(typing: Any, address: Any, one: Any) -> Any:
    """The entries that begin at an address, of the type of `one`."""
    pointer = types.CPointer(one)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, one), generate


def _call_gemm(
    typing: Any, gemm: Any, tx: Any, ty: Any, m: Any, n: Any, k: Any, one: Any,
    x: Any, lx: Any, y: Any, ly: Any, zero: Any, z: Any, lz: Any,
) -> Any:  # fmt: skip
    """A call of CBLAS with integers of 64 bits: z = x y, with matrices at addresses."""
    word = types.int64
    taken = types.void(*[word] * 6, one, *[word] * 4, one, word, word)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, long, flag = context.get_value_type(one), ir.IntType(64), ir.IntType(32)
        kinds = [flag] * 3 + [long] * 3 + [number] + [long] * 4 + [number] + [long] * 2
        pointer = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
        flags = [builder.trunc(transposed, flag) for transposed in args[1:3]]
        given = [ir.Constant(flag, _BY_ROWS), *flags, *args[3:]]
        builder.call(builder.inttoptr(args[0], pointer), given)
        return context.get_dummy_value()

    return taken, generate


_entries: Any = intrinsic(_entries_at)
_gemm: Any = intrinsic(_call_gemm)


@numba.njit
def _corner(start: int, row: Row, strides: int, a: int, b: int, c: int, d: int) -> int:
    """The address that four indices of the outer axes reach."""
    outer = a * row[strides] + b * row[strides + 1]
    return start + outer + c * row[strides + 2] + d * row[strides + 3]


def _line_of(operation: Callable[[Any, Any], Any], in_vectors: bool) -> Any:
    """The loop of a step entry by entry along its innermost axis.

    Args:
        operation: Compiled function of two entries.
        in_vectors: Whether neighbouring entries have loops of their own, which run in vectors and
            take longer to compile; the operation must be the same with exchanged arguments.
    """

    @numba.njit
    def line(
        x: int, y: int, z: int, sx: int, sy: int, sz: int, count: int, item: int, one: Entry
    ) -> None:
        # Where the order of the arguments makes no difference, the second argument becomes the
        # entry that is written or the entry that is fixed, if either argument is.
        if in_vectors and (x == z or sx == 0):
            x, y, sx, sy = y, x, sy, sx
        p, q, r = _entries(x, one), _entries(y, one), _entries(z, one)
        # The compiler makes vectors where it sees that a written entry is either apart from all
        # entries that are read, or the entry that is read last.
        neighbours = in_vectors and sz == item and sx == item
        if neighbours and sy == item and y == z:
            for i in range(count):
                r[i] = operation(p[i], r[i])
        elif neighbours and sy == item:
            for i in range(count):
                r[i] = operation(p[i], q[i])
        elif neighbours and sy == 0 and x != z:
            fixed = q[0]
            for i in range(count):
                r[i] = operation(p[i], fixed)
        else:
            by_x, by_y, by_z = sx // item, sy // item, sz // item
            for i in range(count):
                r[i * by_z] = operation(p[i * by_x], q[i * by_y])

    return line


_multiply = _line_of(numba.njit(lambda p, q: p * q), in_vectors=True)
_add = _line_of(numba.njit(lambda p, q: p + q), in_vectors=True)
_subtract = _line_of(numba.njit(lambda p, q: p - q), in_vectors=False)
_copy = _line_of(numba.njit(lambda p, q: p), in_vectors=False)


@numba.njit
def _step(row: Row, x: int, y: int, z: int, gemm: int, item: int, one: Entry) -> None:
    """A row: for each set of outer indices a product of matrices, or lines entry by entry."""
    kind, count = row[0], row[SHAPE + _INNER]
    sx, sy, sz = row[_X + _INNER], row[_Y + _INNER], row[_Z + _INNER]
    tx = _TRANSPOSED if row[PRODUCT] else _AS_IT_IS
    ty = _TRANSPOSED if row[PRODUCT + 1] else _AS_IT_IS
    m, n, k = row[PRODUCT + 2], row[PRODUCT + 3], row[PRODUCT + 4]
    lx, ly, lz = row[PRODUCT + 5], row[PRODUCT + 6], row[PRODUCT + 7]
    # The last two axes of a product of matrices are rows and columns.
    lines = 1 if kind == MATMUL else row[SHAPE + 4]
    for a in range(row[SHAPE]):
        for b in range(row[SHAPE + 1]):
            for c in range(row[SHAPE + 2]):
                for d in range(row[SHAPE + 3]):
                    p = _corner(x, row, _X, a, b, c, d)
                    q = _corner(y, row, _Y, a, b, c, d)
                    r = _corner(z, row, _Z, a, b, c, d)
                    for _ in range(lines):
                        if kind == MATMUL:
                            _gemm(gemm, tx, ty, m, n, k, one, p, lx, q, ly, one - one, r, lz)
                        elif kind == ADD:
                            _add(p, q, r, sx, sy, sz, count, item, one)
                        elif kind == SUBTRACT:
                            _subtract(p, q, r, sx, sy, sz, count, item, one)
                        elif kind == COPY:
                            _copy(p, q, r, sx, sy, sz, count, item, one)
                        else:
                            _multiply(p, q, r, sx, sy, sz, count, item, one)
                        p, q, r = p + row[_X + 4], q + row[_Y + 4], r + row[_Z + 4]


def _run_of(layout: tuple[int, ...]) -> Callable[..., None]:
    """The function for tables of a layout.

    numba keeps a function under its file's date, its code and the values that it encloses, not
    under the constants of other modules. So the function encloses the layout of the table: with
    another layout it is compiled anew.
    """

    def run(
        rows: Any,
        weights: int,
        addresses: Any,
        first: int,
        last: int,
        gemm: int,
        item: int,
        one: Entry,
    ) -> None:
        assert rows.shape[1] == layout[0]
        for n in range(first, last):
            row = rows[n]
            x = addresses[row[VALUES]] + row[STARTS]
            y = addresses[row[VALUES + 1]] + row[STARTS + 1]
            z = addresses[row[VALUES + 2]] + row[STARTS + 2]
            # The factor of a step that scales is its second argument.
            _step(row, x, weights + n * item if row[0] == SCALE else y, z, gemm, item, one)

    return run


def kernel(dtype: str) -> Callable[..., None] | None:
    """The function for arrays of a dtype, compiled or from numba's folder.

    Returns:
        A function (rows, address of the weights, addresses of values, first row, row behind the
        last, address of the product of matrices, bytes of an entry, the number one); None where
        numba does not compile.
    """
    if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    one, word = numba.from_dtype(np.dtype(dtype)), types.int64
    taken = types.void(word[:, ::1], word, word[::1], word, word, word, word, one)
    kinds = MATMUL, ADD, SUBTRACT, SCALE, COPY
    run = _run_of((COLUMNS, AXES, VALUES, STARTS, SHAPE, STRIDES, PRODUCT, *kinds))
    # A kept function that a full disk has cut raises whatever unpickling raises, in every process
    # until numba forgets it. Where no folder may be written to, numba refuses to keep a function.
    for is_kept in (True, True, False):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumbaWarning)
                return numba.njit(taken, nogil=True, cache=is_kept)(run)
        except Exception:
            with suppress(Exception):
                FunctionCache(run).flush()
    return None
