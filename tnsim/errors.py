"""What can go wrong, by name. In: nothing. Out: the exceptions that every folder raises.

A message says what was asked, what was found and what to do. All of them derive from `TnsimError`,
which the command line prints as one line before it exits with status 2.
"""

from __future__ import annotations

ON_INPUTS = (
    "What is no polynomial (ReLU, softmax, SwiGLU, norms) is compared by its outputs on inputs of "
    "yours: tnsim.similarity(net, other, tnsim.Empirical(inputs)), many by "
    "tnsim.pairwise([net, other], tnsim.Empirical(inputs)), or by another measure, "
    "tnsim.baselines.cka([net, other], inputs); any callable will do as net"
)
"""The next step where no polynomial describes a network; its code runs as it stands."""


def printable(text: str, longest: int = 1000) -> str:
    r"""Text that came from a file, as it may be shown.

    Args:
        text: What may hold names or messages of unknown origin.
        longest: Number of characters that are kept, half from either end.

    Returns:
        The text with control characters and lone surrogates escaped.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


class TnsimError(Exception):
    """Base of every error that tnsim raises on purpose.

    Example:
        >>> issubclass(CheckpointError, TnsimError) and issubclass(CheckpointError, ValueError)
        True
    """


class ModelError(TnsimError, ValueError):
    """Weights that make no model, models that cannot be compared, a metric that does not fit."""


class CheckpointError(TnsimError, ValueError):
    """A file that is missing, truncated, foreign or does not fit its dialect."""


class UnsupportedLayer(TnsimError, ValueError):
    """An operation that no polynomial describes: softmax, ReLU, a norm of the input."""


class TooLarge(TnsimError, MemoryError):
    """A contraction or a network over its budget, refused before it starts."""


class StoreMismatch(TnsimError, ValueError):
    """A store on disk that holds another run, or something else than a run."""


class DamagedStore(TnsimError, ValueError):
    """A store on disk whose content is not what was written: bytes were changed, cut or lost."""


class ExecutorError(TnsimError, RuntimeError):
    """An executor that cannot be used, was lost, or returned something else than a result."""


class ResultError(TnsimError, ValueError):
    """A pairwise result without what was asked of it: not square, not finite, no such label."""


class MissingExtra(TnsimError, ImportError):
    """An optional dependency is absent; the message carries the command that installs it.

    Args:
        package: What is not installed.
        extra: The extra of tnsim that brings it.
        purpose: What needs it, the beginning of the sentence.

    Example:
        >>> print(MissingExtra("pyyaml", "yaml", "reading config.yaml"))
        reading config.yaml needs pyyaml, which is not installed: run  pip install 'tnsim[yaml]'
    """

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs {package}, which is not installed: run  pip install 'tnsim[{extra}]'"
        )
        self._parts = (package, extra, purpose)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), self._parts  # a worker's error reaches the caller by pickle


class PrecisionWarning(UserWarning):
    """A rounding error that may be visible: polynomials of very high degree magnify it."""


class CaveatWarning(UserWarning):
    """A number about models that are not quite the networks they were read from, or may not be.

    Something was left out on request, such as a bias, a norm stands at its mean energy, or a guess
    of a dialect is not confirmed.
    """


class DuplicateWarning(UserWarning):
    """Checkpoints with the same weights that should be different steps; computed once."""


class StoreWarning(UserWarning):
    """A store that is damaged, and whose losses are computed again, or that is not finished."""


class GramWarning(UserWarning):
    """Similarities that no set of vectors has.

    They come from a closure, from float32 or from a baseline that is no inner product.
    """
