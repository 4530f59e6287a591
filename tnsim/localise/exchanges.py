"""Two networks whose components are exchanged: what a change asks of them.

There are two ways to exchange: functions of components (`change_of_functions`), and weights
(`change_of_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, ResultError
from tnsim.localise.differences import Batch

TOTALS = {"distance": "|b - a|^2", "similarity": "1 - similarity"}
"""Values of `of`, and what they are measures of."""


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


class Exchanges(Protocol):
    """Two networks a and b whose components are exchanged."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the components."""
        ...

    @property
    def caveats(self) -> tuple[str, ...]:
        """Differences between the models and the networks they were read from."""
        ...

    @property
    def how(self) -> str:
        """How weights are exchanged, in words; empty where functions are."""
        ...

    @property
    def length(self) -> float:
        """The norm of b."""
        ...

    def split(self, of: Any) -> Split:
        """The change from a to b, split by component.

        Raises:
            Unchanged: Both are one function.
        """
        ...

    def swapped(self, of: Any, put_back: bool) -> Float[np.ndarray, " components"]:
        """The measure between b and b with one component of a, or between a and a with one of b."""
        ...

    def gram(self, total: float) -> Float[np.ndarray, "components components"]:
        """Inner products of the parts of the change."""
        ...

    def differences(self) -> Iterator[Batch]:
        """Outputs of b less those of a on the inputs of the metric."""
        ...


def check_measure(of: Any) -> None:
    """Refuse a measure of a change that has no name.

    Args:
        of: Measure, see `TOTALS`.

    Raises:
        ModelError: There is no such measure.

    Example:
        >>> check_measure("similarity")
    """
    if of not in TOTALS:
        raise ModelError(f"of must be one of {', '.join(TOTALS)}, or a function, found {of!r}")
