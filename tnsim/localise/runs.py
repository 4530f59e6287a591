"""Runs of training: their checkpoints, and tables of what was found of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.checkpoints.load import Series
from tnsim.tables import html_table

Run = Series | Mapping | list | tuple
"""The checkpoints of a run: of files, by labels, or in their order."""
SHOWN = 24
"""Most columns of a table, those of the largest numbers."""


def checkpoints_of(run: Run) -> tuple[tuple[Any, ...], Iterable[Any]]:
    """The labels and the checkpoints of a run.

    Example:
        >>> labels, checkpoints = checkpoints_of({10: "early", 20: "late"})
        >>> labels, list(checkpoints)
        ((10, 20), ['early', 'late'])
    """
    if isinstance(run, Series):
        return run.labels, run
    if isinstance(run, Mapping):
        return tuple(run), run.values()
    return tuple(map(str, range(len(run)))), run


def largest(values: Float[np.ndarray, "... columns"], shown: int = SHOWN) -> list[int]:
    """Numbers of the columns that are largest in any row, the largest first.

    Example:
        >>> largest(np.array([[1.0, -3.0, 0.0], [2.0, 0.0, 0.0]]), shown=2)
        [1, 0]
    """
    sizes = abs(values).reshape(-1, values.shape[-1]).max(axis=0)
    return np.argsort(-sizes, kind="stable")[:shown].tolist()


def table_of_run(
    title: str,
    labels: Sequence[Any],
    names: Sequence[str],
    values: Float[np.ndarray, "checkpoints names"],
    shown: int = SHOWN,
    beside: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """A table of the numbers of every checkpoint, as HTML.

    Args:
        title: Title of the table.
        labels: Labels of the checkpoints.
        names: Names of the numbers.
        values: Numbers, of which the largest are shown.
        shown: Most numbers of a row.
        beside: Columns of texts before them, each with its name.
    """
    order = largest(values, shown)
    rows = []
    for n, label in enumerate(labels):
        numbers = (f"{value:.3g}" for value in values[n, order])
        rows.append((label, *(column[n] for _, column in beside), *numbers))
    heads = ("", *(name for name, _ in beside), *(names[n] for n in order))
    return html_table(title, rows, heads)
