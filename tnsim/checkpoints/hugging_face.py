"""Folders of Hugging Face as the modules that its library makes of them.

Only networks whose code is the library's own are made, of safetensors files or of pickles that
PyTorch reads as weights alone: a folder is trusted in nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tnsim.checkpoints.adapters import adapted, base_of
from tnsim.checkpoints.configurations import configuration, is_adapter
from tnsim.checkpoints.folders import OLD, WHOLE, model_file
from tnsim.checkpoints.formats import Contents, Stored, contents
from tnsim.checkpoints.guard import naming, refusing
from tnsim.errors import CheckpointError, first_few, require

_FAULTS = {
    "missing_keys": "are not in its files",
    "mismatched_keys": "have other shapes in its files",
    "unexpected_keys": "are in its files and in no layer",
}
"""What the library reports of a folder that is not the network it names, in words."""


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Run without the progress bars of the library, one a folder."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def architecture_of(path: Any) -> str | None:
    """The class that a folder, or the base of its adapter, names for its network; None for none.

    Args:
        path: Path of anything.

    Raises:
        CheckpointError: There is a configuration, and it is damaged or too long; or an adapter
            whose base is not on this machine.

    Example:
        >>> architecture_of("no folder") is None
        True
    """
    with naming(path):
        adapter = _adapter_in(path)
        beside = Path(path) / WHOLE if adapter is None else base_of(adapter)
        named = (configuration(beside) or {}).get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) and name.isidentifier() else None


def _adapter_in(path: str | os.PathLike[str]) -> Path | None:
    """The adapter in a folder, None where there is none."""
    found = model_file(Path(path))
    return found if found is not None and is_adapter(found) else None


def _tensors_of(net: Any) -> Contents:
    """The tensors of a network by the names of its library, which may rename those of its files.

    Tied tensors have the first of their names, as in files.
    """
    own = {name for name, _ in (*net.named_parameters(), *net.named_buffers())}
    return Contents.flat(
        [
            Stored(name, str(tensor.dtype).removeprefix("torch."), tensor.nbytes, tensor.detach)
            for name, tensor in net.state_dict().items()
            if name in own
        ]
    )


def module_in(path: str | os.PathLike[str]) -> Any:
    """The network of a folder, in evaluation mode, as a module of PyTorch.

    Args:
        path: Folder with `config.json` and weights, or of an adapter over such a folder.

    Raises:
        CheckpointError: The folder names no network of the library, or its files are not all of
            the tensors of that network and no others.
        MissingExtra: transformers is not installed.
    """
    if (adapter := _adapter_in(path)) is not None:
        from tnsim.checkpoints.modules import StatesOf  # PyTorch's reader, where it is there

        with naming(path):
            base = base_of(adapter)
            net = module_in(base.parent)
            return StatesOf(net).loaded(adapted(adapter, base, _tensors_of(net)).state)
    name = architecture_of(path)
    require("transformers", None, f"running {os.fspath(path)} on inputs")
    import transformers

    made = getattr(transformers, name or "", None)
    if not isinstance(made, type) or not hasattr(made, "from_pretrained"):
        raise CheckpointError(
            f"{os.fspath(path)}: config.json names {name!r}, which is no network of transformers "
            f"{transformers.__version__}: load it by its own code and give the module"
        )
    found = model_file(Path(path))
    with naming(path):
        if found is not None:  # damage, and pickles of more than weights, in words of ours
            contents(found)
    with naming(path), refusing(f"cannot be loaded as {name}"), _without_bars():
        loaded, told = made.from_pretrained(
            path,
            local_files_only=True,
            use_safetensors=found is None or not found.name.startswith(OLD),
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    # The library fills what a file lacks with random numbers.
    for kind, said in _FAULTS.items():
        keys = (key if isinstance(key, str) else key[0] for key in told.get(kind, ()))
        if faulty := sorted(keys):
            raise CheckpointError(
                f"{os.fspath(path)}: {len(faulty)} tensors of {name} {said}: {first_few(faulty)}; "
                "load the network by code of your own and give the module"
            )
    return loaded.eval()
