"""Many files as a sequence of models. In: paths, folders, globs. Out: a `Series`, read lazily."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from tnsim.checkpoints import hub_cache
from tnsim.checkpoints.checkpoint import AnyDialect, Reading, find_dialect, patterns, read
from tnsim.checkpoints.folders import checkpoints, located, model_file
from tnsim.checkpoints.formats import SUFFIXES
from tnsim.checkpoints.guard import naming
from tnsim.errors import CheckpointError, printable
from tnsim.models.model import Model
from tnsim.tables import html_table

COUNTERS = ("step", "iter", "epoch")  # of names that count several things, the finest first
LAST = ("final", "last", "latest")


class Series(Sequence[Model]):
    """Checkpoints in order, read when indexed.

    A folder or a glob is sorted by the numbers in the names, a list keeps its order.

    Args:
        source: A path, a folder, a glob pattern, a repository in a hub cache, or several of them.
        dialect: As in `load`.
        n_ctx: As in `load`.
        names: What to take the labels from, where not the paths.
        leave_out: As in `load`.
        norms: As in `load`.

    Attributes:
        paths: Files in order.
        names: As given, or the paths as text; of revisions their names.
        reading: How the files are read.
        labels: The step where the names differ by one number or one of several counts steps, else
            the names.

    Raises:
        CheckpointError: When nothing matches.

    Example:
        >>> import tnsim
        >>> folder = Path(tnsim.__file__).parent / "data" / "modular-addition"
        >>> series = Series(folder)
        >>> series[:2].labels
        ('0', '100')
        >>> series[0].d_out
        113
    """

    def __init__(
        self,
        source: Any,
        dialect: AnyDialect | None = None,
        n_ctx: int | None = None,
        names: Sequence[str] | None = None,
        *,
        leave_out: str | Sequence[str] = (),
        norms: Any = None,
    ):
        if dialect is not None:
            dialect = find_dialect(dialect)
        self.reading: Reading = Reading(dialect, n_ctx, patterns(leave_out), norms)
        found = list(_expand(source))
        self.paths: tuple[Path, ...] = tuple(path for _, path in found)
        self.names: tuple[str, ...] = tuple(names or [name for name, _ in found])
        self.labels: tuple[str, ...] = _labels([Path(name) for name in self.names])

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Model: ...

    @overload
    def __getitem__(self, index: slice) -> Series: ...

    def __getitem__(self, index: int | slice) -> Model | Series:
        if isinstance(index, slice):
            dialect, n_ctx, leave_out, norms = self.reading
            chosen = self.paths[index], dialect, n_ctx, self.names[index]
            return Series(*chosen, leave_out=leave_out, norms=norms)
        return read(self.paths[index], *self.reading).model

    def __iter__(self) -> Iterator[Model]:
        return (self[n] for n in range(len(self)))

    def __repr__(self) -> str:
        shown = list(self.labels[:3])
        if len(self) > 3:
            shown.append("...")
        return f"Series({len(self)} checkpoints: {', '.join(shown)})"

    def _repr_html_(self) -> str:
        rows = zip(self.labels, self.paths, strict=True)
        return html_table(f"{len(self)} checkpoints", rows, ("label", "file"))


def is_several(path: str | os.PathLike[str]) -> bool:
    """Whether a path stands for several models.

    Args:
        path: Of a file, of a folder, or a glob pattern.

    Returns:
        True for a folder unless it holds one model, and for a pattern unless there is a file of
        that very name.

    Example:
        >>> is_several("runs/*.safetensors"), is_several("runs/step_100.safetensors")
        (True, False)
    """
    if os.path.isdir(path):
        return model_file(Path(path)) is None
    return glob.has_magic(str(path)) and not os.path.exists(path)


def _expand(source: Any) -> Iterator[tuple[str, Path]]:
    """Names and files of the models that a source stands for."""
    if isinstance(source, (str, os.PathLike)):
        yield from _matches(source)
        return
    if isinstance(source, Mapping):
        raise CheckpointError(
            "expected a path or several, found a mapping: tnsim.from_state_dict reads weights by "
            "name"
        )
    if not isinstance(source, Iterable):
        raise CheckpointError(
            f"expected a path or several, found {printable(repr(source), 80)}; an nn.Module is "
            "read by tnsim.from_module"
        )
    for one in source:
        yield from _expand(one)


def _matches(source: str | os.PathLike[str]) -> list[tuple[str, Path]]:
    with naming(source):
        paths = _paths(source)
        if not paths:
            raise CheckpointError(f"no checkpoint matches ({', '.join(SUFFIXES)})")
        ordered = sorted(paths, key=lambda name: natural(Path(name)))
        return [(name, located(paths[name])) for name in ordered]


def _paths(source: str | os.PathLike[str]) -> dict[str, str | Path]:
    """Files, folders of one model and snapshots by the names from which labels are taken."""
    folder = Path(source)
    if hub_cache.is_cache(folder):
        return {name: f"{source}@{path.name}" for name, path in hub_cache.snapshots(folder).items()}
    if not is_several(source):
        return {str(source): str(source)}
    if folder.is_dir():
        return {str(path): path for path in checkpoints(folder)}
    return {path: Path(path) for path in glob.glob(str(source))}


def natural(path: Path) -> tuple[list[tuple[int, int, str]], ...]:
    """A sort key that takes the digits of a name for numbers.

    Args:
        path: Of a file.

    Returns:
        A key that is compared part by part, words before numbers; a file named as the last of a
        run comes after all others. Among files of one name, as in `step_9/model.pt` and
        `step_10/model.pt`, the parts of the whole path decide.

    Example:
        >>> names = ["final.pt", "step_10.pt", "step_9.pt"]
        >>> [path.stem for path in sorted(map(Path, names), key=natural)]
        ['step_9', 'step_10', 'final']
    """
    at_end = (int(path.stem.lower() in LAST), 0, "")
    texts = path.name, str(path)
    name, whole = ([_part(part) for part in re.split(r"(\d+)", text)] for text in texts)
    return [at_end, *name], whole


def _part(part: str) -> tuple[int, int, str]:
    if part.isdecimal():
        return (1, int(part), "")
    return (0, 0, part)


def _labels(paths: Sequence[Path]) -> tuple[str, ...]:
    """The one number that tells the names apart, or the names."""
    stems = [path.stem for path in paths]
    numbers = _differing_numbers([re.split(r"(\d+)", stem) for stem in stems])
    if numbers is not None:
        return numbers
    if len(set(stems)) == len(stems):
        return tuple(stems)
    return tuple(map(str, paths))


def _differing_numbers(names: Sequence[list[str]]) -> tuple[str, ...] | None:
    """The number in which names differ: the only one, or the one that counts steps."""
    if len(names) < 2 or len(set(map(len, names))) > 1:
        return None
    columns = list(zip(*names, strict=True))
    differing = [n for n, column in enumerate(columns) if len(set(column)) > 1]
    if not all(all(map(str.isdecimal, columns[n])) for n in differing):
        return None
    number = _counting(differing, columns)
    if len(differing) == 1:
        number = differing[0]
    if number is None:
        return None
    labels = tuple(str(int(part)) for part in columns[number])
    return labels if len(set(labels)) == len(names) else None


def _counting(numbers: Sequence[int], columns: Sequence[Sequence[str]]) -> int | None:
    """Of several numbers in names the finest that counts, as in `epoch=3-step=1200`.

    Args:
        numbers: Columns that hold them.
        columns: The parts of all names, words and numbers in turn.

    Returns:
        Its column. None where another number, such as a seed, tells the files apart too; digits
        behind a point belong to a measure.
    """
    before = {n: columns[n - 1][0].lower() for n in numbers if not columns[n - 1][0].endswith(".")}
    if not all(any(word in text for word in COUNTERS) for text in before.values()):
        return None
    for word in COUNTERS:
        for n, text in before.items():
            if word in text:
                return n
    return None
