"""What a change is measured by, and a change that is split.

There are two ways to exchange components of two networks a and b: their functions
(`change_of_functions.FunctionsExchanged`), and their weights
(`change_of_weights.WeightsExchanged`). A change asks the same of both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, ResultError

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
