"""Record of how a model was read, and the warning about its caveats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tnsim.errors import CaveatWarning, warn


@dataclass(frozen=True)
class Origin:
    """Record of how a model was read, and how far it may be from the network in the file.

    A model holds its record as `model.origin`. Arithmetic and JAX's tree functions make new models
    without a record; a `Combination` holds the records of its terms.

    Args:
        source: Source of the weights, such as a state dict or a class of PyTorch.
        assumptions: Facts that were taken for granted, a sentence each, with the values found.
        caveats: Parts of the network that the model leaves out or approximates, a sentence each.
        ignored: Names of tensors that are no part of the function.
        error: Relative root mean square difference from the network's own forward pass; None if
            the network did not run.
        dialect: The `Dialect` that reads the state dict, or None.

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


def warn_of_caveats(caveats: tuple[str, ...]) -> None:
    """Warn that a number may be about other functions than the networks that were read.

    Args:
        caveats: Caveats of all models that the number is about.

    Warns:
        CaveatWarning: There is a caveat.

    Example:
        >>> warn_of_caveats(())
    """
    if caveats:
        warn(
            "the models are not quite the networks they were read from, or not known to be: "
            f"{'; '.join(caveats)}",
            CaveatWarning,
        )
