"""Revisions in a local Hugging Face hub cache. In: a cache folder `models--org--name`. Out: one file per revision, by name.

The cache keeps `snapshots/<commit>/`, and in `refs/` one small file per branch or tag that holds the commit it
points to. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

from tnsim.checkpoints.configurations import read_text
from tnsim.checkpoints.guard import naming
from tnsim.checkpoints.load import SUFFIXES, natural
from tnsim.errors import CheckpointError


def is_cache(folder: Path) -> bool:
    """Whether a folder is that of one repository in a hub cache."""
    return (folder / "snapshots").is_dir()


def revisions(folder: Path) -> dict[str, Path]:
    """Checkpoint file of each revision by name, in the order of the numbers in the names.

    The name is a ref other than `main` where there is one, else the commit's first digits.
    Raises `CheckpointError` when there is no revision, or a revision has not exactly one checkpoint file.
    """
    known = _refs(folder / "refs")
    found = {}
    for snapshot in sorted((folder / "snapshots").iterdir()):
        names = sorted(
            known.get(snapshot.name, [snapshot.name[:8]]), key=lambda name: name == "main"
        )
        files = sorted(p for p in snapshot.rglob("*") if p.suffix in SUFFIXES)
        if len(files) != 1:
            listed = ", ".join(p.name for p in files[:4]) or "none"
            raise CheckpointError(
                f"{snapshot}: a revision must hold one checkpoint file, found {listed}; name the files one by one"
            )
        found[names[0]] = files[0]
    if not found:
        raise CheckpointError(f"{folder}: the cache holds no revision; download one first")
    return {name: found[name] for name in sorted(found, key=lambda name: natural(Path(name)))}


def _refs(folder: Path) -> dict[str, list[str]]:
    """Names of branches and tags by the commit they point to."""
    names: dict[str, list[str]] = {}
    for ref in sorted(path for path in folder.rglob("*") if path.is_file()):
        with naming(ref):
            commit = read_text(ref).strip()
        names.setdefault(commit, []).append(ref.relative_to(folder).as_posix())
    return names
