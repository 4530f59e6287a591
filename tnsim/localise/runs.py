"""Runs of training: their checkpoints, and tables of what was found of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.checkpoints.load import Series
from tnsim.errors import printable
from tnsim.tables import html_table

Run = Series | Mapping | list | tuple
"""The checkpoints of a run: of files, by labels, or in their order."""
SHOWN = 24
"""Most columns of a table, those of the largest numbers."""
ROWS, _LETTERS = 20, "abcdef"
"""Most rows of a text, and a letter for each of its columns."""


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


def least_sure(each: Sequence[Any]) -> Any:
    """The result of a run whose guarantee is that of the run: the largest standard error.

    Args:
        each: Results of the checkpoints, with `exact` and `standard_error`.

    Example:
        >>> from types import SimpleNamespace
        >>> sure = SimpleNamespace(exact=True, standard_error=None)
        >>> sampled = [SimpleNamespace(exact=False, standard_error=[e]) for e in (0.1, 0.2)]
        >>> least_sure([sure, *sampled]) is sampled[1]
        True
    """

    def doubt(found: Any) -> tuple[bool, float]:
        errors = found.standard_error
        return not found.exact, 0.0 if errors is None else float(np.max(errors))

    return max(each, key=doubt)


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


def text_of_shares(labels: Sequence[str], shares: Float[np.ndarray, " labels"]) -> str:
    """A line for each of the largest shares, and one for the sum of all others.

    Example:
        >>> print(text_of_shares(("one", "two"), np.array([0.25, 0.75])))
          +0.7500   two
          +0.2500   one
    """
    order = largest(shares, len(shares))
    lines = [f"{shares[n]:>+9.4f}   {labels[n]}" for n in order[:ROWS]]
    if rest := order[ROWS:]:
        lines.append(f"{shares[rest].sum():>+9.4f}   {len(rest)} others")
    return "\n".join(lines)


def text_of_run(
    labels: Sequence[Any],
    names: Sequence[str],
    values: Float[np.ndarray, "checkpoints names"],
    beside: tuple[str, Sequence[str]] | None = None,
) -> str:
    """A line for every checkpoint with the largest columns, which have letters for their names.

    Args:
        labels: Labels of the checkpoints.
        names: Names of the columns.
        values: Numbers of the columns.
        beside: Name and texts of a column before them.

    Example:
        >>> print(text_of_run(("10", "epoch_20_best"), ("embed",), np.array([[0.5], [1.0]])))
                  a embed
        checkpoint            a
        10              +0.5000
        epoch_20_best   +1.0000
    """
    head, texts = beside or ("", [""] * len(labels))
    order = largest(values, len(_LETTERS))
    letters = _LETTERS[: len(order)]
    lines = [f"{letter:>11} {names[n]}" for letter, n in zip(letters, order, strict=True)]
    first = ["checkpoint", *(printable(str(label), 40) for label in labels)]
    width = max(map(len, first)) + 1
    numbers = ["".join(f"{row[n]:>+9.4f}" for n in order) for row in values]
    numbers.insert(0, "".join(f"{letter:>9}" for letter in letters))
    for label, text, row in zip(first, (head, *texts), numbers, strict=True):
        lines.append(f"{label:<{width}}{text}{row}")
    return "\n".join(lines)
