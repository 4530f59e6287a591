"""What can go wrong, by name. In: nothing. Out: the exceptions every other room raises.

A message says what was asked, what was found and what to do. All of them derive from `TnsimError`,
which the command line prints as one line before it exits with status 2.
"""

from __future__ import annotations


class TnsimError(Exception):
    """Base of every error that tnsim raises on purpose."""


class ModelError(TnsimError, ValueError):
    """Weights that make no model, two models that cannot be compared, or a metric that does not fit them."""


class CheckpointError(TnsimError, ValueError):
    """A file that is missing, truncated, foreign or does not fit its dialect."""


class UnsupportedLayer(TnsimError, ValueError):
    """An operation that no polynomial describes: softmax, ReLU, a norm that depends on the input."""


class TooLarge(TnsimError, MemoryError):
    """A contraction or a network over its budget, refused before it starts."""


class StoreMismatch(TnsimError, ValueError):
    """A store on disk that holds another run, or something else than a run."""


class ResultError(TnsimError, ValueError):
    """A pairwise result that does not hold what was asked of it: not square, not finite, no such label."""


class MissingExtra(TnsimError, ImportError):
    """An optional dependency is absent; the message carries the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs {package}, which is not installed: run  pip install 'tnsim[{extra}]'"
        )


class PrecisionWarning(UserWarning):
    """A result whose rounding error may be visible: polynomials of very high degree magnify it."""


class DuplicateWarning(UserWarning):
    """Checkpoints whose weights are identical although they should be different steps; they are computed once."""


class GramWarning(UserWarning):
    """A matrix of similarities that no set of vectors has: a closure, float32 or a baseline that is no inner product."""
