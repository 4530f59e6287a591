"""Steps as a table of integers: the form in which a compiled function runs them without Python.

A row holds a single call of NumPy: its kind, where its views begin, and the sizes and strides of
its axes. A row names the values of the views, not their memory, so that one table serves all stages
and lanes that run the same steps: a run brings the address of each value.

**The same bits.** A row exists only where its numbers are those of NumPy, bit for bit. Products and
sums entry by entry have one result whoever computes them. A matrix product is passed by NumPy to
BLAS as a product of matrices where rows and columns stand as BLAS reads them; a product with a
vector, a product of a matrix with its own transpose, and a sum over axes are computed in other ways
by NumPy. Steps of these kinds have no row and stay calls of NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from tnsim.engine.ir.steps import Step, Steps, View

AXES = 6
"""Axes of a row, for each of which the compiled function has a loop. Shorter views have axes of
size 1 in front."""


MATMUL, MULTIPLY, ADD, SUBTRACT, SCALE, COPY = range(6)
"""Kinds of rows."""


VALUES, STARTS, SHAPE, STRIDES, PRODUCT = 1, 4, 7, 7 + AXES, 7 + 4 * AXES
"""First columns of the value numbers of both arguments and the result, of the first bytes of their
views, of the sizes of the axes, of the strides of the three views in bytes, and of a product of
matrices: whether each argument is transposed, rows, columns, entries that are summed over, and the
entries between neighbouring rows of the three matrices."""


COLUMNS = PRODUCT + 8
"""Number of columns."""


_BLAS_MOST = 2**31 - 1  # NumPy calls BLAS for smaller sizes only


_KINDS = {"multiply": MULTIPLY, "add": ADD, "subtract": SUBTRACT, "scale": SCALE, "copy": COPY}


class StepTable(NamedTuple):
    """Rows for those steps that a compiled function runs.

    Attributes:
        rows: Rows in the order of the steps, without those of loops' bodies.
        weights: Factor of each row in the dtype of the arrays; only rows that scale use it.
        of_step: For each step its first row and the row behind its last; a step that is cut into
            parts has a row for each part. None for a step that stays a call of NumPy, or a loop.
        elapsed: Usual seconds on a single core from the first row to the beginning of each row, and
            to the end of the last.
    """

    rows: Int64[np.ndarray, "row column"]
    weights: Float[np.ndarray, " row"]
    of_step: tuple[tuple[int, int] | None, ...]
    elapsed: tuple[float, ...]


def step_table(steps: Steps) -> StepTable:
    """The table of some steps on real numbers.

    Example:
        >>> from tnsim.engine.ir.program import Operation, Program
        >>> from tnsim.engine.ir.steps import steps_of
        >>> product = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
        >>> table = step_table(steps_of(Program(((4, 3), (3, 5)), (product,), (2,)), 8))
        >>> table.of_step, table.rows.shape == (1, COLUMNS)
        (((0, 1),), True)
    """
    rows: list[list[int]] = []
    weights: list[float] = []
    of_step: list[tuple[int, int] | None] = []
    elapsed = [0.0]
    for step in steps.steps:
        views = step.parts or ((*step.reads, step.writes),)
        made = [_row(step, each, steps.item) for each in views] if step.turns is None else [None]
        whole = [row for row in made if row is not None]
        if len(whole) < len(made):
            of_step.append(None)
            continue
        of_step.append((len(rows), len(rows) + len(whole)))
        rows += whole
        each = steps.step_seconds(step) / len(whole)
        elapsed += [elapsed[-1] + each * (n + 1) for n in range(len(whole))]
        weights += [step.weight] * len(whole)
    table = np.array(rows, np.int64).reshape(-1, COLUMNS)
    factors = np.array(weights, f"f{steps.item}")
    return StepTable(table, factors, tuple(of_step), tuple(elapsed))


def _row(step: Step, views: Sequence[View], item: int) -> list[int] | None:
    """The row of a step, or of a part of it; None where NumPy computes it in a way of its own."""
    *reads, written = views
    axes = len(written.shape)
    if axes > AXES or 0 in written.shape:
        return None
    product = [0] * (COLUMNS - PRODUCT)
    if step.kind == "matmul":
        form = _blas_form(reads[0], reads[1], written, item)
        if form is None:
            return None
        is_mirrored, product = form
        kind, reads = MATMUL, reads[::-1] if is_mirrored else reads
    elif step.kind in _KINDS:
        kind = _KINDS[step.kind]
        if any(view.shape != written.shape for view in reads):
            return None
    else:
        return None
    # A step that reads a single view reads it twice.
    three = (reads[0], reads[-1], written)
    fill = AXES - axes
    row = [kind, *(view.value for view in three), *(view.start for view in three)]
    row += [1] * fill + list(written.shape)
    for place, view in enumerate(three):
        # The second argument of a step that scales is its factor, wherever an entry stands.
        is_factor = kind == SCALE and place == 1
        row += [0] * AXES if is_factor else [0] * fill + list(view.strides)
    return row + product


def _blas_form(x: View, y: View, z: View, item: int) -> tuple[bool, list[int]] | None:
    """How BLAS computes a product of matrices as NumPy calls it; None where NumPy calls it
    otherwise, or not at all.

    Returns:
        Whether the transpose of the result is computed from the transposed arguments, and the last
        columns of the row.
    """
    (m, n), k = z.shape[-2:], x.shape[-1]
    if min(m, n, k) < 2 or max(m, n, k) >= _BLAS_MOST:
        return None  # products with vectors
    transposed = x.value == y.value and x.start == y.start and x.strides[-2:] == y.strides[:-3:-1]
    if transposed and m == n:
        return None  # BLAS has a function of its own for a matrix times its transpose
    # A result that stands by columns is the transpose of a result that stands by rows, computed
    # from the transposed arguments in exchanged places.
    is_mirrored = _leading(z, item) is None
    if is_mirrored:
        x, y, z, m, n = _turned(y), _turned(x), _turned(z), n, m
    leading = [_leading(x, item), _leading(y, item), _leading(z, item)]
    # An argument is read by rows where it can be, and else by columns.
    flags = [int(each is None) for each in leading[:2]]
    for place, view in enumerate((x, y)):
        if leading[place] is None:
            leading[place] = _leading(_turned(view), item)
    known = [each for each in leading if each is not None]
    return (is_mirrored, [*flags, m, n, k, *known]) if len(known) == 3 else None


def _turned(view: View) -> View:
    """The view of the transposed matrices."""
    shape, strides = view.shape, view.strides
    return view._replace(
        shape=(*shape[:-2], shape[-1], shape[-2]), strides=(*strides[:-2], strides[-1], strides[-2])
    )


def _leading(view: View, item: int) -> int | None:
    """Entries between neighbouring rows, where the entries of a row are neighbours; else None."""
    down, along = view.strides[-2:]
    is_read = along == item and down % item == 0 and view.shape[-1] <= down // item < _BLAS_MOST
    return down // item if is_read else None
