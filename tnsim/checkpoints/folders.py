"""Folders that hold one model, and names of revisions. In: what a user names. Out: files.

A folder in Hugging Face's layout is one model: `model.safetensors`, an index of several files that
are its parts, or `pytorch_model.bin`, with `config.json` beside them. A folder of many checkpoints
is none.
"""

from __future__ import annotations

import os
from pathlib import Path

from tnsim.checkpoints import hub_cache
from tnsim.checkpoints.formats import INDEX, SUFFIXES
from tnsim.errors import CheckpointError

WHOLE = "model.safetensors"
OLD = "pytorch_model.bin"


def located(source: str | os.PathLike[str]) -> Path:
    """The file to read for one model.

    Args:
        source: A file, a folder that holds one model, or `REPOSITORY@REVISION` in a hub cache.

    Returns:
        A checkpoint file, or the index of one that lies in parts.

    Raises:
        CheckpointError: When a folder holds several checkpoints or none, or a revision is not
            there.

    Example:
        >>> located("runs/step_100.npz").name
        'step_100.npz'
    """
    if hub_cache.names_revision(source):
        return _of_revision(hub_cache.snapshot(str(source)))
    path = Path(source)
    if not path.is_dir():
        return path
    if (file := model_file(path)) is not None:
        return file
    found = checkpoints(path)
    if not found:
        raise CheckpointError(
            f"is a folder without a checkpoint ({', '.join(SUFFIXES)}); name a file"
        )
    raise CheckpointError(
        f"is a folder of {len(found)} checkpoints where one file is meant; name one of them, "
        f"such as {min(found)}, or compare all with `tnsim pairwise`"
    )


def model_file(folder: Path) -> Path | None:
    """The one model that a folder in Hugging Face's layout holds.

    Args:
        folder: Any path.

    Returns:
        Its file or index; None where it is no such folder, or holds other checkpoints beside.

    Example:
        >>> model_file(Path("nowhere")) is None
        True
    """
    if (folder / INDEX).is_file():
        return folder / INDEX
    others = [path for path in checkpoints(folder) if path.suffix in (".safetensors", ".npz")]
    if [path.name for path in others] == [WHOLE]:
        return folder / WHOLE
    if not others and (folder / OLD).is_file():
        return folder / OLD
    return None


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files and models in folders that lie directly in a folder, in no order.

    Args:
        folder: Any path.

    Returns:
        Paths of files, and of folders that hold one model.

    Example:
        >>> checkpoints(Path("nowhere"))
        []
    """
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.suffix in SUFFIXES and not path.is_dir()]
    inside = [path for path in folder.iterdir() if path.is_dir()]
    return found + [path for path in inside if _holds_model(path)]


def _of_revision(snapshot: Path) -> Path:
    """The one checkpoint of a revision, wherever in its folder it lies."""
    if (file := model_file(snapshot)) is not None:
        return file
    files = sorted(path for path in snapshot.rglob("*") if path.suffix in SUFFIXES)
    if len(files) == 1:
        return files[0]
    listed = ", ".join(path.name for path in files[:4]) or "none"
    raise CheckpointError(
        f"{snapshot}: a revision must hold one checkpoint file, found {listed}; "
        "name the files one by one"
    )


def _holds_model(folder: Path) -> bool:
    # Unlike `Path.is_file`, this is False where one may not look, as in `lost+found`.
    return any(os.path.isfile(folder / name) for name in (WHOLE, INDEX, OLD))  # noqa: PTH113
