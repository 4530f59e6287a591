"""Differences of two networks: on which data, how they are measured and split, along a run.

*Where on the data.* With `d(x) = b(x) - a(x)` and weights w of the inputs, `|b - a|^2` is the sum
of `w(x) |d(x)|^2`, whose terms say on which inputs, and at which positions of a sequence, the
change is. The singular value decomposition of the matrix of all `sqrt(w(x)) d(x)` gives its
directions: the first k of them leave out less of the change than any other k.

*By component.* There are two ways to exchange components of two networks a and b: their functions
(`change_of_functions.FunctionsExchanged`), and their weights
(`change_of_weights.WeightsExchanged`). A change asks the same of both.

*Runs of training* are checkpoints in order, and tables of what was found of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.checkpoints.load import Series
from tnsim.errors import ModelError, ResultError, TooLarge, first_few, printable
from tnsim.tables import html_table

if TYPE_CHECKING:
    import xarray as xr


MOST_BYTES = 2**31
"""Most bytes of differences that directions are found from."""


TOTALS = {"distance": "|b - a|^2", "similarity": "1 - similarity"}
"""Values of `of`, and what they are measures of."""
ONE_FUNCTION = {
    "distance": "the same function",
    "similarity": "the same function, up to a factor",
}
"""What two networks are between which a measure is zero."""

Run = Series | Mapping | list | tuple
"""The checkpoints of a run: of files, by labels, or in their order."""
SHOWN = 24
"""Most columns of a table, those of the largest numbers."""
ROWS, _LETTERS = 20, "abcdef"
"""Most rows of a text, and a letter for each of its columns."""


class Batch(NamedTuple):
    """The difference of two networks on some inputs.

    Attributes:
        weights: Weight of each input.
        values: Outputs of b less those of a.
    """

    weights: Float[np.ndarray, " inputs"]
    values: Float[np.ndarray, "inputs *positions outputs"]

    @property
    def squares(self) -> Float[np.ndarray, "inputs *positions"]:
        """Weighted squared lengths of the differences."""
        values = self.values if self.values.ndim > 1 else self.values[:, None]
        weights = self.weights.reshape(-1, *(1,) * (values.ndim - 2))
        return weights * np.einsum("...o,...o->...", values, values)


def by_input(batches: Iterator[Batch]) -> Float[np.ndarray, "inputs *positions"]:
    """The terms of `|b - a|^2`, input by input.

    Args:
        batches: Differences on all inputs.

    Example:
        >>> batch = Batch(np.array([0.5, 0.5]), np.array([[3.0, 4.0], [0.0, 1.0]]))
        >>> by_input(iter([batch])).tolist()
        [12.5, 0.5]
    """
    return np.concatenate([batch.squares for batch in batches])


def directions(batches: Iterator[Batch], count: int) -> xr.Dataset:
    """The leading directions of a difference.

    Args:
        batches: Differences on all inputs.
        count: Most directions.

    Returns:
        Over `direction` the `share` of `|b - a|^2`, unit vectors `output` (direction, coordinate),
        and coefficients `along` (direction, input, and position of sequences).

    Raises:
        ModelError: There are no directions.
        TooLarge: The differences do not fit in memory.

    Example:
        >>> batch = Batch(np.array([0.5, 0.5]), np.array([[3.0, 0.0], [0.0, 1.0]]))
        >>> found = directions(iter([batch]), 1)
        >>> found.share.values.tolist(), abs(found.along.values).tolist()
        ([0.9], [[3.0, 0.0]])
    """
    import xarray as xr

    if count < 1:
        raise ModelError(f"count is a number of directions from 1, found {count!r}")
    weights, values, held = [], [], 0
    for batch in batches:
        held += batch.values.nbytes
        if held > MOST_BYTES:
            raise TooLarge(
                f"directions are found from all outputs at once, more than {MOST_BYTES / 2**30:g} "
                "GiB here: take fewer inputs, or an output of the network that is smaller than "
                "logits, as by tnsim.Empirical(inputs, output='last_hidden_state')"
            )
        weights.append(batch.weights)
        values.append(batch.values if batch.values.ndim > 1 else batch.values[:, None])
    each, all_values = np.concatenate(weights), np.concatenate(values)
    *places, width = all_values.shape
    rows = all_values.reshape(-1, width)
    roots = np.sqrt(np.repeat(each, len(rows) // len(each)))
    _, sizes, outputs = np.linalg.svd(roots[:, None] * rows, full_matrices=False)
    # The sign of a direction is free: the largest entry of each is positive.
    largest = np.take_along_axis(outputs, abs(outputs).argmax(axis=1)[:, None], axis=1)
    outputs = outputs * np.sign(largest)
    total = (sizes**2).sum()
    if not total:
        raise ModelError("the networks are the same function on these inputs: no direction changed")
    # Singular values that are rounding are no directions.
    kept = min(count, int((sizes > sizes[0] * max(rows.shape) * np.finfo(rows.dtype).eps).sum()))
    names = ("input", "position") if len(places) < 3 else [f"axis_{n}" for n in range(len(places))]
    along = (outputs[:kept] @ rows.T).reshape(kept, *places)
    content: dict[str, Any] = {
        "share": ("direction", sizes[:kept] ** 2 / total),
        "output": (("direction", "coordinate"), outputs[:kept]),
        "along": (("direction", *names[: len(places)]), along),
    }
    return xr.Dataset(content)


class Unchanged(ModelError, ResultError):
    """Two networks that are one function, or differ by rounding: there is no change to split."""


class Split(NamedTuple):
    """A change that is split by component.

    Args:
        parts: What every component made of the change, by groups of draws.
        share: Shares of the components.
        total: The measure of the change.
        surroundings: The measure of what changed beside all components.
        exact: Whether the shares are exact.
        doubts: What makes the shares less sure than they look, in sentences.
    """

    parts: Float[np.ndarray, "groups components"]
    share: Float[np.ndarray, " components"]
    total: float
    surroundings: float = 0.0
    exact: bool = False
    doubts: tuple[str, ...] = ()


def checkpoints_of(run: Run) -> tuple[tuple[Any, ...], Iterable[Any]]:
    """The labels and the checkpoints of a run.

    Raises:
        ModelError: Two checkpoints have one label, by which tables and JSON tell them apart.

    Example:
        >>> labels, checkpoints = checkpoints_of({10: "early", 20: "late"})
        >>> labels, list(checkpoints)
        ((10, 20), ['early', 'late'])
    """
    if isinstance(run, Series):
        if repeated := [label for label, count in Counter(run.labels).items() if count > 1]:
            raise ModelError(
                f"labels of a run must differ, found {first_few(repeated)} more than once: give "
                "each checkpoint once"
            )
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
