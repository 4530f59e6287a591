"""Modules of PyTorch that an option names, in the user's own code."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from tnsim.errors import CheckpointError, printable

log: logging.Logger = logging.getLogger(__name__)


def module_at(place: str) -> Any:
    """The module that a file of Python code or an importable one holds. The code runs.

    Args:
        place: FILE.py:NAME or package.module:NAME, where NAME is an `nn.Module`, or a class or a
            function that makes one without arguments.

    Returns:
        The module, in evaluation mode: it is compared, and no option could ask for that mode.

    Raises:
        CheckpointError: There is no such file or name, the code fails, or what it names is no
            module and makes none.

    Example:
        >>> module_at("net.txt")
        Traceback (most recent call last):
            ...
        tnsim.errors.CheckpointError: --model net.txt: give FILE.py:NAME or package.module:NAME, ...
    """
    where, _, name = place.rpartition(":")
    said = printable(f"--model {place}", 200)
    if not where or not name:
        raise CheckpointError(
            f"{said}: give FILE.py:NAME or package.module:NAME, where NAME is an nn.Module, or a "
            "class or a function that makes one without arguments"
        )
    log.info("the code of %s runs", where)
    # Code of a user may raise anything, and be found beside the checkpoints.
    try:
        code = _code_of(where)
    except CheckpointError as missing:
        raise CheckpointError(f"{said}: {missing}") from None
    except (Exception, SystemExit) as error:  # a script that reads its own arguments exits
        raise CheckpointError(f"{said}: its code raises {_named(error)}") from error
    if not hasattr(code, name):
        near = difflib.get_close_matches(name, dir(code), 3)
        hint = f"; there is {', '.join(near)}" if near else ""
        raise CheckpointError(f"{said}: there is no {name!r} in it{hint}")
    found: Any = getattr(code, name)
    if hasattr(found, "named_parameters") and not isinstance(found, type):
        return found.eval()
    if not callable(found):
        raise CheckpointError(
            f"{said}: {name} is no nn.Module, nor anything that makes one, found "
            f"{printable(repr(found), 80)}"
        )
    try:
        made: Any = found()
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, TypeError):  # as of a class that needs arguments
            hint = (
                "; where it takes arguments, write a function without any that calls it, and name "
                "the function"
            )
        raise CheckpointError(f"{said}: {name}() raises {_named(error)}{hint}") from error
    if not hasattr(made, "named_parameters"):
        raise CheckpointError(f"{said}: {name}() is a {type(made).__name__}, no nn.Module")
    return made.eval()


def _code_of(where: str) -> Any:
    """The code of a file, or of an importable module; beside it others may be imported."""
    if not where.endswith(".py"):
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # last, so that no file there hides another module
        if importlib.util.find_spec(where) is None:
            raise CheckpointError(f"there is no module {where!r} that Python finds")
        return importlib.import_module(where)
    file = Path(where).resolve()
    # A name of its own: a file may be called as a library is.
    spec = importlib.util.spec_from_file_location(f"tnsim_user_code_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise CheckpointError("there is no such file of Python code")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    code = importlib.util.module_from_spec(spec)
    # Classes look for their module by its name, as dataclasses do.
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = code
    try:
        spec.loader.exec_module(code)
    except BaseException:
        del sys.modules[spec.name]
        if before is not None:
            sys.modules[spec.name] = before
        raise
    return code


def _named(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}", 300)
