"""Where a model was read from, and what that left open. In: facts. Out: a record, a warning."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from tnsim.errors import CaveatWarning


@dataclass(frozen=True)
class Origin:
    """How a model was read, and how far it may be from the network that it came from.

    A model carries it as `model.origin`. Arithmetic and JAX's tree functions make new models, which
    have none; a `Combination` keeps those of its terms.

    Args:
        source: What was read: a state dict, a class of PyTorch's.
        assumptions: What was taken for granted, one sentence each, with the values that were found.
        caveats: What makes it another function than the network: left out or approximated.
        ignored: Names of tensors that are no part of the function.
        error: Relative root mean square difference from the network's own forward pass; None where
            none was run.
        dialect: The `Dialect` that reads its state dict; None where there is none.
        guesses: Guesses of the dialect that nobody has confirmed. They are caveats of every result,
            and no result is exact while there are any.

    Example:
        >>> Origin("a state dict", caveats=("left out: norm.weight",)).caveats
        ('left out: norm.weight',)
    """

    source: str
    assumptions: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    error: float | None = None
    dialect: Any = None
    guesses: tuple[str, ...] = ()


def warn_of_caveats(caveats: tuple[str, ...], stacklevel: int) -> None:
    """Say that a number may be about other functions than the networks that were read.

    Args:
        caveats: Of all models that the number is about.
        stacklevel: As for `warnings.warn`, counted from the caller of this.

    Warns:
        CaveatWarning: Where there are any.

    Example:
        >>> warn_of_caveats((), stacklevel=1)
    """
    if caveats:
        warnings.warn(
            "the models are not quite the networks they were read from, or not known to be: "
            f"{'; '.join(caveats)}",
            CaveatWarning,
            stacklevel=stacklevel + 1,
        )
