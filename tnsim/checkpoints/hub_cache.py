"""Revisions in a local Hugging Face hub cache. In: its folder. Out: one file per revision, by name.

A repository lies in a folder `models--org--name`. It keeps `snapshots/<commit>/`, and in `refs/`
one small file per branch or tag that holds the commit it points to. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

from tnsim.checkpoints.configurations import read_text
from tnsim.checkpoints.formats import SUFFIXES
from tnsim.checkpoints.guard import naming
from tnsim.checkpoints.series import natural
from tnsim.errors import CheckpointError


def is_cache(folder: Path) -> bool:
    """Whether a folder is that of one repository in a hub cache.

    Args:
        folder: any path.

    Returns:
        True where it holds snapshots.

    Example:
        >>> is_cache(Path("models--nobody--nothing"))
        False
    """
    return (folder / "snapshots").is_dir()


def revisions(folder: Path) -> dict[str, Path]:
    """The checkpoint file of each revision.

    Args:
        folder: one for which `is_cache` holds.

    Returns:
        Paths by name, in the order of the numbers in the names. The name is a branch or a tag other
        than `main` where there is one, else the first eight digits of the commit.

    Raises:
        CheckpointError: when there is no revision, or one has not exactly one checkpoint file.

    Example:
        >>> import tempfile
        >>> cache = Path(tempfile.mkdtemp())
        >>> (cache / "snapshots" / "0123456789").mkdir(parents=True)
        >>> (cache / "snapshots" / "0123456789" / "model.npz").touch()
        >>> list(revisions(cache))
        ['01234567']
    """
    refs = _refs(folder / "refs")
    files: dict[str, Path] = {}
    for snapshot in sorted((folder / "snapshots").iterdir()):
        names = refs.get(snapshot.name, [snapshot.name[:8]])
        name = min(names, key=lambda name: name == "main")  # main only where it is alone
        files[name] = _only_checkpoint(snapshot)
    if not files:
        raise CheckpointError(f"{folder}: the cache holds no revision; download one first")
    ordered = sorted(files, key=lambda name: natural(Path(name)))
    return {name: files[name] for name in ordered}


def _only_checkpoint(snapshot: Path) -> Path:
    files = sorted(path for path in snapshot.rglob("*") if path.suffix in SUFFIXES)
    if len(files) != 1:
        listed = ", ".join(path.name for path in files[:4]) or "none"
        raise CheckpointError(
            f"{snapshot}: a revision must hold one checkpoint file, found {listed}; "
            "name the files one by one"
        )
    return files[0]


def _refs(folder: Path) -> dict[str, list[str]]:
    """Names of branches and tags by the commit they point to."""
    names: dict[str, list[str]] = {}
    for ref in sorted(path for path in folder.rglob("*") if path.is_file()):
        with naming(ref):
            commit = read_text(ref).strip()
        names.setdefault(commit, []).append(ref.relative_to(folder).as_posix())
    return names
