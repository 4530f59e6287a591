"""Folders of Hugging Face as the modules that its library makes of them.

Only networks whose code is the library's own are made, and only of safetensors files: a folder is
trusted in nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tnsim.errors import CheckpointError, MissingExtra

_FAULTS = {
    "missing_keys": "are not in its files",
    "mismatched_keys": "have other shapes in its files",
    "unexpected_keys": "are in its files and in no layer",
}
"""What the library reports of a folder that is not the network it names, in words."""


def architecture_of(path: Any) -> str | None:
    """The class that a folder names for its network; None where it names none.

    Args:
        path: Path of anything.

    Example:
        >>> architecture_of("no folder") is None
        True
    """
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        name = config["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return name if isinstance(name, str) and name.isidentifier() else None


def module_in(path: str | os.PathLike[str]) -> Any:
    """The network of a folder, in evaluation mode, as a module of PyTorch.

    Args:
        path: Folder with `config.json` and weights as safetensors.

    Raises:
        CheckpointError: The folder names no network of the library, or its files are not all of
            the tensors of that network and no others.
        MissingExtra: transformers is not installed.
    """
    name = architecture_of(path)
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", None, f"running {os.fspath(path)} on inputs") from None
    made = getattr(transformers, name or "", None)
    if not isinstance(made, type) or not hasattr(made, "from_pretrained"):
        raise CheckpointError(
            f"{os.fspath(path)}: config.json names {name!r}, which is no network of transformers "
            f"{transformers.__version__}: load it by its own code and give the module"
        )
    try:
        loaded, told = made.from_pretrained(
            path,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be loaded as {name}: {error}") from error
    # The library fills what a file lacks with random numbers.
    for kind, said in _FAULTS.items():
        keys = (key if isinstance(key, str) else key[0] for key in told.get(kind, ()))
        if found := sorted(keys):
            shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
            raise CheckpointError(
                f"{os.fspath(path)}: {len(found)} tensors of {name} {said}: {shown}; load the "
                "network by code of your own and give the module"
            )
    return loaded.eval()
