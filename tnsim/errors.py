"""Errors and warnings of tnsim.

A message names the request, the finding and the next step. All errors derive from `TnsimError`,
which the command line prints as a line before it exits with status 2.

*Guards* turn every failure of reading into a `CheckpointError` of a single sentence. A file may be
damaged in more ways than its readers foresee: their libraries then raise nearly anything, a
`MemoryError` or a `RecursionError` among it. Callers should have to know a single exception.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
    "CaveatWarning",
    "CheckpointError",
    "DamagedStore",
    "DuplicateWarning",
    "ExecutorError",
    "MissingExtra",
    "ModelError",
    "NegativeEigenvalueWarning",
    "OptionError",
    "PrecisionWarning",
    "ResultError",
    "StoreMismatch",
    "StoreWarning",
    "TnsimError",
    "TooLarge",
    "UnsupportedLayer",
]

ON_INPUTS = (
    "What has no layer here (softmax, norms, top-k) is compared by its outputs on inputs of "
    "yours: tnsim.similarity(net, other, tnsim.Empirical(inputs)), many by "
    "tnsim.pairwise([net, other], tnsim.Empirical(inputs)), files of its weights by their paths in "
    "place of the list and dialect=net, on the command line by --metric empirical --inputs x.npy, "
    "or by another measure, tnsim.baselines.cka([net, other], inputs); any callable will do as net"
)
"""Advice for networks that no layers describe; its code runs as it stands."""

BY_PARTS = (
    "Of transformers such as GPT-2, Llama and Qwen2 the parts compare exactly, heads and MLP "
    "blocks: tnsim.parts(net)"
)
"""Advice for transformers with softmax attention, which as a whole have no layers."""

OWN_ACTIVATION = (
    "An activation of your own is declared with the class of its module: "
    "layers={Class: lambda module: tnsim.Elementwise(tnsim.Activation(function, strip=...))} where "
    "it is analytic near the real line; with polynomials between kinks, as Hardshrink, "
    "tnsim.Activation(kinks=(-0.5, 0.5), pieces=((0, 1), (0,), (0, 1))); "
    "or with the class around it, which becomes a list of layers. Functions with a kink and no "
    "polynomials, as softsign, are compared on inputs"
)
"""Advice for functions of single numbers that have no name here."""


def printable(text: str, longest: int = 1000) -> str:
    r"""Text from a file, in a form that is safe to show.

    Args:
        text: Text with names or messages of unknown origin.
        longest: Largest number of characters; of longer text half is shown from either end.

    Returns:
        The text with control characters and lone surrogates escaped.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    return "".join(map(_escaped_character, text))


def in_one_line(error: BaseException) -> str:
    """What another library says of an error, in a sentence of ours.

    Example:
        >>> in_one_line(ValueError("no path\\n  was found"))
        'no path was found'
    """
    return printable(" ".join(str(error).split()))


def first_few(names: Sequence[Any], most: int = 4) -> str:
    """The first names of a list for a message, and dots where there are more.

    Example:
        >>> first_few("abcde"), first_few("ab")
        ('a, b, c, d, ...', 'a, b')
    """
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")


def warn(message: str, category: type[Warning]) -> None:
    """Warn, and name the line of the caller of tnsim, however deep inside tnsim the finding was.

    Args:
        message: The finding.
        category: Class of the warning.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("a rounding error", PrecisionWarning)
        >>> len(caught)
        1
    """
    level, frame = 1, sys._getframe()
    # By the name of the module, as the generated code of a dataclass has no file.
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "tnsim"


def _escaped_character(character: str) -> str:
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
    """Weights that form no model, models that cannot be compared, a metric that does not fit."""


class CheckpointError(TnsimError, ValueError):
    """A file that is missing, truncated, foreign or does not fit its dialect."""


class UnsupportedLayer(TnsimError, ValueError):
    """A layer or a depth that no closed form covers: softmax, top-k, a norm of the input."""


class TooLarge(TnsimError, MemoryError):
    """A contraction or a network that exceeds its budget, refused before it starts."""


class StoreMismatch(TnsimError, ValueError):
    """A store on disk that holds another run, or no run at all."""


class DamagedStore(TnsimError, ValueError):
    """A store on disk with changed, cut or lost bytes."""


class ExecutorError(TnsimError, RuntimeError):
    """An executor that cannot be used, was lost, or returned no valid result."""


class ResultError(TnsimError, ValueError):
    """A pairwise result that cannot answer: not square, not finite, or without the label."""


class OptionError(ModelError, ResultError, TypeError):
    """An option of another kind than the function takes, such as a text for a number."""


class MissingExtra(TnsimError, ImportError):
    """An optional dependency is absent; the message carries the command that installs it.

    Args:
        package: Package that is not installed.
        extra: Extra of tnsim that installs the package; None where no extra does.
        purpose: Purpose of the package, as the beginning of the message.

    Example:
        >>> print(MissingExtra("pyyaml", "yaml", "reading config.yaml"))
        reading config.yaml needs pyyaml, which is not installed: run  pip install 'tnsim[yaml]'
    """

    def __init__(self, package: str, extra: str | None, purpose: str):
        wanted = package if extra is None else f"'tnsim[{extra}]'"
        super().__init__(
            f"{purpose} needs {package}, which is not installed: run  pip install {wanted}"
        )
        self._parts = (package, extra, purpose)

    def __reduce__(self) -> tuple[type, tuple[str, str | None, str]]:
        return type(self), self._parts  # a worker's error reaches the caller by pickle


def require(module: str, extra: str | None, purpose: str) -> None:
    """Refuse what needs an optional package that cannot be imported.

    Args:
        module: Module of the package, by the name under which Python imports it.
        extra: Extra of tnsim that installs it; None where no extra does.
        purpose: Purpose of the package, as the beginning of the message.

    Raises:
        MissingExtra: The package is not installed.

    Example:
        >>> require("numpy", "pairwise", "comparing many models")
    """
    try:
        importlib.import_module(module)
    except ImportError:
        raise MissingExtra(module.partition(".")[0], extra, purpose) from None


class PrecisionWarning(UserWarning):
    """A rounding error that may be visible, as polynomials of very high degree magnify it."""


class CaveatWarning(UserWarning):
    """A number about models that are not, or may not be, quite the networks they were read from.

    Reasons are: a part such as a bias was left out on request, or a norm stands at its mean energy.
    """


class DuplicateWarning(UserWarning):
    """Checkpoints of different steps with the same weights, which are computed once."""


class StoreWarning(UserWarning):
    """A store that is not finished, or that lost records, which are computed again."""


class NegativeEigenvalueWarning(UserWarning):
    """A matrix of similarities with a negative eigenvalue, which no set of vectors has.

    Such similarities come from a closure, from float32 or from a baseline that is no inner product.
    """


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn every foreign exception into a refusal; tnsim's own exceptions pass through.

    Args:
        what: The sentence to which the cause is appended.

    Raises:
        CheckpointError: Where a foreign exception was raised, which is its `__cause__`.

    Example:
        >>> with refusing("config.json is not JSON"):
        ...     raise ValueError("expected a value")
        Traceback (most recent call last):
        tnsim.errors.CheckpointError: config.json is not JSON: expected a value
    """
    try:
        yield
    except TnsimError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {cause(error)}") from error


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Put the name of a file in front of every refusal, in printable characters.

    Args:
        path: The file that is read.

    Raises:
        TnsimError: Error of the kind that was raised inside; `CheckpointError` for foreign errors.

    Example:
        >>> with naming("step_100.npz"):
        ...     raise CheckpointError("is empty")
        Traceback (most recent call last):
        tnsim.errors.CheckpointError: step_100.npz: is empty
        >>> with naming("step_100.npz"), naming("step_100.npz"):
        ...     raise CheckpointError("is empty")
        Traceback (most recent call last):
        tnsim.errors.CheckpointError: step_100.npz: is empty
    """
    try:
        with refusing("cannot be read"):
            yield
    except MissingExtra:
        raise
    except TnsimError as error:
        said = str(error)
        # As a reader inside of this one may have said; an empty name tells nothing.
        if str(path) and not said.startswith(f"{path}: "):
            said = f"{path}: {said}"
        # The cause of the refusal stays the exception of the library.
        raise type(error)(printable(said)) from error.__cause__


def cause(error: Exception) -> str:
    """The cause that an exception states, in terms of the file.

    Args:
        error: Exception that a library raised.

    Returns:
        A single line, never empty.

    Example:
        >>> cause(RecursionError("maximum recursion depth exceeded"))
        'it is nested too deeply'
    """
    # Such errors speak of this process, and users need to hear of the file.
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"there is no {error}"
    text = str(error).strip().partition("\n")[0]
    if not text or "weights_only" in text:  # PyTorch advises to unpickle, which is unsafe
        return type(error).__name__
    return text
