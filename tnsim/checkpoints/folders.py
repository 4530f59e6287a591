"""Names of a single model that users give: folders in Hugging Face's layout, cached revisions.

A repository in a local hub cache lies in a folder `models--org--name`. The folder keeps
`snapshots/<commit>/`, and in `refs/` a small file per branch or tag that holds the commit of the
branch or tag. Nothing is downloaded.

A folder in Hugging Face's layout is a single model: `model.safetensors` or `pytorch_model.bin`, or
an index of several files that are its parts, with `config.json` beside them; or an adapter, which
names its base. A folder of many checkpoints is not a single model.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tnsim.checkpoints.formats import (
    ADAPTERS,
    INDEX,
    OLD_INDEX,
    SUFFIXES,
    is_adapter,
    places_in,
    read_text,
)
from tnsim.errors import CheckpointError, naming

KINDS = ("models", "datasets")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
WHOLE = "model.safetensors"  # a model in one file, in Hugging Face's layout
OLD = "pytorch_model.bin"  # the same as a pickle, in older repositories
_COUNT = r"([._-]?(step|epoch|iter|rank)?[._=-]?\d+)*"
_WITHOUT_WEIGHTS = re.compile(
    r"(optimizer|optim|(lr_)?scheduler|(grad_)?scaler|rng_state|random_states|training_args|"
    rf"trainer_state){_COUNT}\.(pt|pth|ckpt)"
)
"""Names by which training code writes what is no network, as pickles beside the weights."""


def is_cache(folder: Path) -> bool:
    """Whether a folder is the folder of a single repository in a hub cache.

    Args:
        folder: Any path.

    Returns:
        True where the folder holds snapshots.

    Example:
        >>> is_cache(Path("models--nobody--nothing"))
        False
    """
    return (folder / "snapshots").is_dir()


def names_revision(source: str | os.PathLike[str]) -> bool:
    """Whether a name is `REPOSITORY@REVISION` and not the name of a file.

    Args:
        source: Name that a user gave.

    Returns:
        True for an `@` behind the name or the cache folder of a repository.

    Example:
        >>> names_revision("me/net@step1000"), names_revision("runs/step_1000.npz")
        (True, False)
    """
    repository, at, revision = str(source).rpartition("@")
    # A file whose name has an `@` is a file.
    if not (at and revision) or os.path.lexists(source) or revision.endswith(SUFFIXES):
        return False
    return is_cache(Path(repository)) or bool(_REPOSITORY.fullmatch(repository))


def snapshot(source: str) -> Path:
    """The folder of a revision.

    Args:
        source: A name for which `names_revision` holds; the revision is a branch, a tag or the
            beginning of a commit.

    Returns:
        A folder of files as they were at that revision.

    Raises:
        CheckpointError: When the repository or the revision is not in the cache.
    """
    repository, _, revision = source.rpartition("@")
    folder = Path(repository)
    if not is_cache(folder):
        folder = _repository_folder(repository)
    refs = _ref_names(folder / "refs")
    # A commit is the name of an existing folder, so no ref or revision leads out of the cache.
    commits = [path.name for path in (folder / "snapshots").iterdir() if path.is_dir()]
    named = [commit for commit in commits if revision in refs.get(commit, ())]
    # A branch or tag before a commit that begins with the same letters.
    matches = named or [commit for commit in commits if commit.startswith(revision)]
    if len(matches) == 1:
        return folder / "snapshots" / matches[0]
    known = ", ".join(list(snapshots(folder))[:8])
    raise CheckpointError(
        f"{repository} has no revision {revision!r} in the local cache (found {known}); "
        f"download it, as by: hf download {repository} --revision {revision}"
    )


def snapshots(folder: Path) -> dict[str, Path]:
    """The folder of each revision.

    Args:
        folder: A folder for which `is_cache` holds.

    Returns:
        Folders by name, in the order of the commits. The name is a branch or a tag other than
        `main` if any, else the first eight digits of the commit.

    Raises:
        CheckpointError: When there is no revision, or a ref cannot be read.

    Example:
        >>> import tempfile
        >>> cache = Path(tempfile.mkdtemp())
        >>> (cache / "snapshots" / "0123456789").mkdir(parents=True)
        >>> list(snapshots(cache))
        ['01234567']
    """
    refs = _ref_names(folder / "refs")
    folders: dict[str, Path] = {}
    for path in sorted((folder / "snapshots").iterdir()):
        names = refs.get(path.name, [path.name[:8]])
        # `main` is the name only where no other branch or tag points to the commit
        folders[min(names, key=lambda name: name == "main")] = path
    if not folders:
        raise CheckpointError(f"{folder}: the cache holds no revision; download one first")
    return folders


def _repository_folder(name: str) -> Path:
    """The folder of a repository in the user's hub cache."""
    root = _cache_root()
    folders = [root / f"{kind}--{name.replace('/', '--')}" for kind in KINDS]
    folder = next(filter(is_cache, folders), None)
    if folder is None:
        raise CheckpointError(
            f"no file of that name, and no repository {name} in the hub cache {root}; "
            f"download it, as by: hf download {name}"
        )
    return folder


def _cache_root() -> Path:
    """The folder in which the hub's client keeps repositories, by its environment variables."""
    # The variables are asked in the order of the hub's own client.
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    general = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(home) if home else Path(general, "huggingface")) / "hub"


def _ref_names(folder: Path) -> dict[str, list[str]]:
    """Names of branches and tags by the commit they point to."""
    names: dict[str, list[str]] = {}
    for ref in sorted(path for path in folder.rglob("*") if path.is_file()):
        with naming(ref):
            commit = read_text(ref).strip()
        names.setdefault(commit, []).append(ref.relative_to(folder).as_posix())
    return names


def located(source: str | os.PathLike[str]) -> Path:
    """The file to read for a single model.

    Args:
        source: A file, a folder that holds a single model, or `REPOSITORY@REVISION` in a hub cache.

    Returns:
        A checkpoint file, or the index of a checkpoint in several files.

    Raises:
        CheckpointError: When a folder holds several checkpoints or none, or a revision is not
            there.

    Example:
        >>> located("runs/step_100.npz").name
        'step_100.npz'
    """
    check_named(source)
    if names_revision(source):
        return _of_revision(snapshot(str(source)))
    path = Path(source)
    if not path.is_dir():
        return path
    # An index, or `model.safetensors` without other checkpoints beside it, makes the folder a
    # single model.
    if (file := model_file(path)) is not None:
        return file
    files = checkpoints(path)
    if not files:
        raise CheckpointError(
            f"is a folder without a checkpoint ({', '.join(SUFFIXES)}); name a file"
        )
    raise CheckpointError(
        f"is a folder where one file is meant; name one of its {len(files)} checkpoints, such as "
        f"{min(files)}, or compare all with `tnsim pairwise`"
    )


def check_named(source: str | os.PathLike[str]) -> None:
    """Refuse an empty name: the present folder to the file system, to a shell an unset variable.

    Raises:
        CheckpointError: The name is empty.

    Example:
        >>> check_named("runs/step_100.npz")
    """
    if not os.fspath(source):
        raise CheckpointError("the name of a checkpoint is empty; '.' is the present folder")


def model_file(folder: Path) -> Path | None:
    """The file of the single model that a folder in Hugging Face's layout holds.

    Args:
        folder: Any path.

    Returns:
        The file or the index of the model, or the adapter over it; None where the folder has
        another layout, or holds other checkpoints too.

    Example:
        >>> model_file(Path("nowhere")) is None
        True
    """
    adapters = (folder / name for name in ADAPTERS if (folder / name).exists())
    return next(filter(is_adapter, adapters), None) or base_file(folder)


def base_file(folder: Path) -> Path | None:
    """The file of the model in a folder, without an adapter beside it.

    Args:
        folder: Any path.

    Returns:
        The file or the index, None as of `model_file`.

    Raises:
        CheckpointError: A file of the whole model lies beside an index of other files.
    """
    if (folder / INDEX).is_file():
        return _only(folder, INDEX, WHOLE)
    # The pickle beside safetensors is the same model again, so it does not count.
    others = [path for path in checkpoints(folder) if path.suffix in (".safetensors", ".npz")]
    others = [path for path in others if not is_adapter(path)]
    if [path.name for path in others] == [WHOLE]:
        return folder / WHOLE
    if not others and (folder / OLD_INDEX).is_file():
        return _only(folder, OLD_INDEX, OLD)
    if not others and (folder / OLD).is_file():
        return folder / OLD
    return None


def _only(folder: Path, index: str, whole: str) -> Path:
    """The index, unless the folder holds a whole model besides, as one that was saved into twice.

    Hugging Face's library reads the whole model then, others the parts.
    """
    with naming(folder / index):
        if (folder / whole).is_file() and whole not in places_in(folder / index).values():
            raise CheckpointError(
                f"lists other files than {whole}, which lies beside it: these may be two models; "
                "move one of them out of the folder"
            )
    return folder / index


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files and models in folders that lie directly in a folder, in no order.

    Args:
        folder: Any path.

    Returns:
        Paths of files, and of folders that hold a single model.

    Example:
        >>> checkpoints(Path("nowhere"))
        []
    """
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if without_weights(path) is None]
    files = [path for path in paths if path.suffix in SUFFIXES and not path.is_dir()]
    return files + [path for path in paths if path.is_dir() and _holds_model(path)]


def without_weights(path: Path) -> str | None:
    """Why a file among checkpoints is known to be none without being read.

    Args:
        path: A path with the ending of a checkpoint, in a folder or matched by a pattern.

    Returns:
        The reason in words; None for what may be a checkpoint.

    Example:
        >>> without_weights(Path("run/optimizer.pt"))
        'its name is that of the state of a training'
        >>> without_weights(Path(__file__)) is None
        True
    """
    if _WITHOUT_WEIGHTS.fullmatch(path.name):
        return "its name is that of the state of a training"
    if path.name.startswith("."):  # on its way to its name, or macOS's notes on another file
        return "its name begins with a dot"
    return "it is a broken link" if path.is_symlink() and not path.exists() else None


def _of_revision(snapshot: Path) -> Path:
    """The single checkpoint of a revision, anywhere in the folder of the revision."""
    if (file := model_file(snapshot)) is not None:
        return file
    files = sorted(path for path in snapshot.rglob("*") if path.suffix in SUFFIXES)
    files = [path for path in files if without_weights(path) is None]
    if len(files) == 1:
        return files[0]
    listed = ", ".join(path.name for path in files[:4]) or "none"
    raise CheckpointError(
        f"{snapshot}: a revision must hold one checkpoint file, found {listed}; "
        "name the files one by one"
    )


def _holds_model(folder: Path) -> bool:
    # Unlike `Path.is_file`, this is False without permission to read, as in `lost+found`.
    return any(os.path.isfile(folder / name) for name in (WHOLE, INDEX, OLD, OLD_INDEX, *ADAPTERS))  # noqa: PTH113
