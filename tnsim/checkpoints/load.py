"""Entry points of reading: a single file into a `Model`, many files into a lazy `Series`.

tnsim's own files carry their architecture; foreign files are read through a dialect. Every fault of
a file is refused as `CheckpointError`, `ModelError` or `UnsupportedLayer`, the path of the file in
front. The code stands in this order: a single file (`read`), many files (`Series`), then the
functions that users call (`load`, `from_state_dict`, `compare_forward`).
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np

from tnsim.checkpoints import folders
from tnsim.checkpoints.adapters import merged_module, read_file
from tnsim.checkpoints.dialects import PRESETS, Dialect
from tnsim.checkpoints.folders import checkpoints, located, model_file, without_weights
from tnsim.checkpoints.formats import SUFFIXES, configuration, read_text
from tnsim.checkpoints.layer_rules import to_numpy
from tnsim.checkpoints.native import METADATA, own_model
from tnsim.checkpoints.state_dict import (
    check_no_norm_inputs,
    check_unquantised,
    model_from_state,
    unnamed,
)
from tnsim.errors import CheckpointError, ModelError, TnsimError, first_few, naming, printable
from tnsim.models.arrays import bytes_of, is_count
from tnsim.models.functions import Deferred, array_at, check_not_random
from tnsim.models.model import AnyModel, Model, Seed, check_untraced, normal_inputs
from tnsim.options import checked, is_list, shown
from tnsim.sessions import session
from tnsim.tables import html_table

if TYPE_CHECKING:
    from tnsim.checkpoints.modules import StatesOf

log: logging.Logger = logging.getLogger(__name__)
AnyDialect: TypeAlias = Any
"""A `Dialect`, the name of a preset, the path of a JSON file, or an `nn.Module` whose state dicts
the files hold."""
COUNTERS = ("step", "iter", "epoch")  # words before numbers that count, the finest count first
LAST = ("final", "last", "latest")  # names of the last checkpoint of a run, sorted to the end


class Reading(NamedTuple):
    """Options for the reading of files; the fields are arguments of `load`."""

    dialect: AnyDialect | None = None
    n_ctx: int | None = None
    leave_out: tuple[str, ...] = ()
    norm_inputs: Any = None


class Checkpoint(NamedTuple):
    """The model in a single file, and the types of its numbers.

    Attributes:
        model: The model; its `origin` lists the assumptions.
        dtypes: Types in which the numbers are stored, each once.
    """

    model: Model
    dtypes: tuple[str, ...]


def read(
    path: str | os.PathLike[str],
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    leave_out: str | Sequence[str] = (),
    norm_inputs: Any = None,
    *,
    inputs: Any = None,
    output: str | int | None = None,
) -> Checkpoint:
    """Read a single file as `load` does, with the stored dtypes.

    Args:
        path: A file that ends in .safetensors, .npz, .pt, .pth or .ckpt, a folder that holds one
            model, or a revision in a hub cache, as `REPOSITORY@REVISION`.
        dialect: Dialect of foreign files, as in `load`.
        n_ctx: Length of the sequences, as in `load`.
        leave_out: Patterns of tensors that are knowingly not read, as in `load`.
        norm_inputs: Inputs at whose mean energy norms become constants, as in `load`.
        inputs: Example of the argument of a module, as in `load`.
        output: Output of a module that counts, as in `load`.

    Returns:
        The model and the dtypes.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: Raised as by `load`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> file = Path(tempfile.mkdtemp(), "step_100.npz")
        >>> np.savez(file, W_l=np.ones((4, 2)), W_r=np.ones((4, 2)), W_p=np.ones((3, 4)))
        >>> read(file, "bilinear-readout").dtypes
        ('float64',)
    """
    asked = _asked_for(dialect, n_ctx, leave_out, norm_inputs, inputs, output)
    with naming(path):
        file = located(path)
        log.debug("read %s", file)
        inventory, told_by = read_file(file)
        # A dialect that was asked for comes before the architecture that a file of tnsim states.
        if asked.dialect is None and METADATA in inventory.metadata:
            check_no_norm_inputs(norm_inputs)  # norms are constants in such a file
            if asked.leave_out:
                raise CheckpointError(
                    "leave_out= (--leave-out) is for foreign files: a file of tnsim's own holds no "
                    "tensor that is not read"
                )
            model = own_model(inventory.state, inventory.metadata[METADATA], n_ctx)
            return Checkpoint(model, inventory.dtypes)
        # Only foreign files need the configuration beside them.
        config = configuration(told_by)
        try:
            model = _model_by(asked, inventory.state, config)
        except CheckpointError as refused:
            if METADATA not in inventory.metadata:
                raise
            own = "a file of tnsim's own states its architecture: read it without dialect or module"
            raise CheckpointError(f"{refused}; {own}") from None
        if told_by != file and model.origin:
            told = (*model.origin.assumptions, f"the adapter is applied to {told_by}")
            origin = replace(model.origin, assumptions=told)
            model = Model(model.layers, model.n_ctx, origin)
        return Checkpoint(model, inventory.dtypes)


def _model_by(asked: Reading, state: Mapping[str, Any], config: Mapping[str, Any] | None) -> Model:
    """The model of named arrays, by a dialect or by a module."""
    reader, n_ctx, leave_out, norm_inputs = asked
    try:
        if reader is None:
            raise unnamed(state, config, leave_out)
        log.debug("by the dialect %s", reader.name)
        if isinstance(reader, Dialect):
            return model_from_state(state, reader, n_ctx, config, leave_out, norm_inputs)
        return reader.model(state, n_ctx, leave_out, norm_inputs)
    except TnsimError as refused:
        check_unquantised(state, refused)
        raise


def patterns(leave_out: str | Sequence[str]) -> tuple[str, ...]:
    """Patterns of tensors to leave out; a text is a single pattern.

    Args:
        leave_out: A pattern, or several.

    Returns:
        All patterns.

    Raises:
        CheckpointError: When a pattern is no text.

    Example:
        >>> patterns("*bias"), patterns(["*bias", "norm.*"])
        (('*bias',), ('*bias', 'norm.*'))
    """
    if isinstance(leave_out, str):
        return (leave_out,)
    several: tuple[Any, ...] = tuple(leave_out) if is_list(leave_out) else (leave_out,)
    if not all(isinstance(pattern, str) for pattern in several):
        raise CheckpointError(
            f"leave_out lists patterns of names, such as ['*.bias'], found {leave_out!r}"
        )
    return several


def _asked_for(
    dialect: AnyDialect | None,
    n_ctx: int | None,
    leave_out: str | Sequence[str],
    norm_inputs: Any,
    inputs: Any,
    output: str | int | None,
) -> Reading:
    """The options of a call, with the reader that its dialect or its module is.

    The reader of a module keeps inputs and output. There is none where files say what they hold.
    """
    if (inputs is not None or output is not None) and not hasattr(dialect, "named_parameters"):
        raise CheckpointError(
            "inputs and output say how an nn.Module is read: give the module in the place of the "
            "dialect, as tnsim.load(path, net, output=1), found "
            f"{'none' if dialect is None else type(dialect).__name__}"
        )
    reader = None if dialect is None else find_dialect(dialect, inputs, output)
    return Reading(reader, n_ctx, patterns(leave_out), norm_inputs)


def find_dialect(
    dialect: AnyDialect, inputs: Any = None, output: str | int | None = None
) -> Dialect | StatesOf:
    """A dialect by itself, by the name of a preset, the path of its JSON file, or by a module.

    Args:
        dialect: A dialect, the name of a preset, the path of a JSON file, or an `nn.Module` whose
            state dicts the files hold.
        inputs: Example of the argument of a module, as in `load`.
        output: Output of a module that counts, as in `load`.

    Returns:
        The dialect; for a module the reader of its state dicts.

    Raises:
        CheckpointError: When there is none, or its file is damaged.
        UnsupportedLayer: When it has a layer kind without a polynomial.

    Example:
        >>> find_dialect("bilinear-readout").layers[0].left
        'W_l'
    """
    if isinstance(dialect, Dialect):
        return dialect
    if hasattr(dialect, "named_parameters"):
        if isinstance(dialect, type):
            raise CheckpointError(
                f"files are read by a module, found the class {dialect.__name__}: give an "
                f"instance, {dialect.__name__}(...)"
            )
        from tnsim.checkpoints.modules import StatesOf  # PyTorch's reader, where a module comes

        return StatesOf(merged_module(dialect), inputs, output)
    # A series hands on the reader that was found for its module.
    if hasattr(dialect, "module"):
        return dialect
    if isinstance(dialect, str) and dialect in PRESETS:
        return PRESETS[dialect]
    if not isinstance(dialect, (str, os.PathLike)):
        raise CheckpointError(
            "a dialect is a tnsim.Dialect, the name of a preset, the path of a JSON file or an "
            f"nn.Module, found {shown(dialect)}"
        )
    path = Path(dialect)
    if path.suffix == ".json":
        with naming(path):
            return Dialect.from_json(read_text(path))
    raise CheckpointError(
        f"no dialect {str(dialect)!r}: neither a preset ({', '.join(PRESETS)}) nor a JSON file; "
        "the code of a module is named by --model FILE.py:NAME"
    )


class UnknownCheckpoint(ModelError, IndexError):
    """A position or a label that a series does not have."""


def position_in(index: Any, labels: Sequence[str]) -> int:
    """The position of a checkpoint that is given by its position or its label.

    Args:
        index: Whole number, counted from the end where negative, or a label.
        labels: Labels of the checkpoints.

    Raises:
        UnknownCheckpoint: There is no such checkpoint.

    Example:
        >>> position_in("100", ("0", "100")), position_in(-1, ("0", "100"))
        (1, -1)
    """
    if isinstance(index, str) and index in labels:
        return labels.index(index)
    if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
        position = int(index)
        if -len(labels) <= position < len(labels):
            return position
    known = printable(first_few([*map(repr, labels)], 3), 200)
    raise UnknownCheckpoint(
        f"there is no checkpoint {printable(repr(index), 80)}: give a position below {len(labels)} "
        f"or a label, {known}"
    )


class Series(Sequence[Model]):
    """Checkpoints in order, read when indexed by their position or their label.

    A folder or a glob is sorted by the numbers in the names, a list keeps its order.

    Args:
        source: A path, a folder, a glob pattern, a repository in a hub cache, or several of them.
        dialect: Dialect of foreign files, as in `load`.
        n_ctx: Length of the sequences, as in `load`.
        names: Names from which labels are taken; by default the paths.
        leave_out: Patterns of tensors that are knowingly not read, as in `load`.
        norm_inputs: Inputs at whose mean energy norms become constants, as in `load`.
        inputs: Example of the argument of a module, as in `load`.
        output: Output of a module that counts, as in `load`.

    Attributes:
        paths: Files in order.
        names: The given names, else the names of revisions or the paths as text.
        reading: Arguments of `load` with which the files are read.
        labels: The step where the names differ by a single number, or a number among several counts
            steps, else the names.

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

    @checked(own="leave_out")
    def __init__(
        self,
        source: Any,
        dialect: AnyDialect | None = None,
        n_ctx: int | None = None,
        names: Sequence[str] | None = None,
        *,
        leave_out: str | Sequence[str] = (),
        norm_inputs: Any = None,
        inputs: Any = None,
        output: str | int | None = None,
    ):
        self.reading: Reading = _asked_for(dialect, n_ctx, leave_out, norm_inputs, inputs, output)
        entries = list(_expand_source(source))
        if len(entries) > 1 and names is None:  # as a shell writes out `run/*.pt`
            _say_what_is_left_out(path for _, path in entries)
            entries = [entry for entry in entries if without_weights(entry[1]) is None] or entries
        self.paths: tuple[Path, ...] = tuple(path for _, path in entries)
        # Snapshots in a hub cache lie under hashes, so their revisions are the names.
        self.names: tuple[str, ...] = tuple(names or [name for name, _ in entries])
        self.labels: tuple[str, ...] = series_labels([Path(name) for name in self.names])

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int | str) -> Model: ...

    @overload
    def __getitem__(self, index: slice) -> Series: ...

    def __getitem__(self, index: int | str | slice) -> Model | Series:
        if isinstance(index, slice):
            return self._part(index, self.reading.n_ctx)
        return read(self.paths[position_in(index, self.labels)], *self.reading).model

    @checked
    def at_length(self, n_ctx: int) -> Series:
        """The same checkpoints, read as models for sequences of `n_ctx` positions."""
        return self._part(slice(None), n_ctx)

    def _part(self, which: slice, n_ctx: int | None) -> Series:
        """Some of the checkpoints, read with the other arguments of the whole."""
        dialect, _, leave_out, norm_inputs = self.reading
        chosen = self.paths[which], dialect, n_ctx, self.names[which]
        return Series(*chosen, leave_out=leave_out, norm_inputs=norm_inputs)

    def __iter__(self) -> Iterator[Model]:
        return (self[n] for n in range(len(self)))

    def __repr__(self) -> str:
        shown = list(self.labels[:3])
        if len(self) > 3:
            shown.append("...")
        return printable(f"Series({len(self)} checkpoints: {', '.join(shown)})")

    def _repr_html_(self) -> str:
        rows = zip(self.labels, self.paths, strict=True)
        return html_table(f"{len(self)} checkpoints", rows, ("label", "file"))


def modules_of(source: Any, module: Any) -> dict[str, Deferred]:
    """Copies of a module in evaluation mode, with the weights of files, by the labels of a series.

    Args:
        source: A path, a folder, a glob pattern, or several of them.
        module: An `nn.Module` whose state dicts the files hold.

    Returns:
        The copies as functions that are loaded where they run. Each was loaded once.

    Raises:
        CheckpointError: When nothing matches, or a file is damaged or of another module.
        ModelError: The module is in training mode, in which its outputs are random.

    Example:
        >>> import tempfile, torch
        >>> folder, net = Path(tempfile.mkdtemp()), torch.nn.Linear(2, 2)
        >>> torch.save(net.state_dict(), folder / "step_3.pt")
        >>> [function.module for function in modules_of(folder, net).values()]
        [Linear(in_features=2, out_features=2, bias=True)]
    """
    check_not_random(module)
    series, load = Series(source), partial(_module_of, module)
    return {
        label: deferred(path, load) for label, path in zip(series.labels, series.paths, strict=True)
    }


def _module_of(module: Any, path: Path) -> Any:
    from tnsim.checkpoints.modules import StatesOf  # PyTorch's reader, where a module comes

    with naming(path):
        return StatesOf(module).loaded(read_file(path)[0].state).eval()


def deferred(path: Path, load: Callable[[Path], Any]) -> Any:
    """The network of a path, a module as a function that is loaded where it runs.

    Args:
        path: File, or folder with the files.
        load: Function of the path that reads a module, or a model of tnsim.

    Returns:
        The model as it was read; of a module a `Deferred`, which raises `CheckpointError` where it
        would be loaded once more from files that have changed.

    Raises:
        CheckpointError: The path cannot be read, which it is once at first.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "net.pt"
        >>> torch.save(torch.nn.Linear(2, 1).state_dict(), path)
        >>> deferred(path, lambda path: torch.nn.Linear(2, 1)).module
        Linear(in_features=2, out_features=1, bias=True)
    """
    times = _times_of(path)  # before it is read, so that no change in between is missed
    found = load(path)
    if isinstance(found, AnyModel):
        return found
    return Deferred(_Unchanged(path.absolute(), load, times)).holding(found)


@dataclass(frozen=True)
class _Unchanged:
    """Loads a network once more from files that are what they were."""

    path: Path
    load: Callable[[Path], Any]
    times: tuple[tuple[str, int, int], ...]

    def __call__(self) -> Any:
        if _times_of(self.path) != self.times:
            raise CheckpointError(
                f"{self.path}: has changed while the run was under way; run again with a new store"
            )
        return self.load(self.path)


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A model in a file, small enough to be sent to another process.

    Args:
        path: The file.
        reading: Options of reading.
    """

    path: Path
    reading: Reading

    @property
    def model(self) -> Model:
        """The model, read once while the file stays what it is and memory holds the model."""
        with naming(self.path):
            times = _times_of(located(self.path))
        make = lambda: read(self.path, *self.reading).model  # noqa: E731
        return session().belongings.get(self, times, make, bytes_of)


def _times_of(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of a file, or of the files of a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    every = ((file.name, file.stat()) for file in files)
    return tuple((name, about.st_size, about.st_mtime_ns) for name, about in every)


def is_several(path: str | os.PathLike[str]) -> bool:
    """Whether a path stands for several models.

    Args:
        path: Path of a file or a folder, or a glob pattern.

    Returns:
        True for a folder unless the folder holds a single model, and for a pattern unless a file
        has exactly this name.

    Example:
        >>> is_several("runs/*.safetensors"), is_several("runs/step_100.safetensors")
        (True, False)
    """
    # A folder with an architecture and its weights is a single model.
    if os.path.isdir(path):
        return model_file(Path(path)) is None
    # A file may really have brackets in its name.
    return glob.has_magic(str(path)) and not os.path.exists(path)


def _expand_source(source: Any) -> Iterator[tuple[str, Path]]:
    """The names and files of the models in a source."""
    if isinstance(source, (str, os.PathLike)):
        folders.check_named(source)
        yield from _source_matches(source)
        return
    if isinstance(source, Mapping):
        raise CheckpointError(
            "expected a path or several, found a mapping: tnsim.from_state_dict reads weights by "
            "name"
        )
    # Bytes and open files are iterable, into what is no path.
    if not is_list(source) or hasattr(source, "read"):
        raise CheckpointError(
            f"expected a path or several, found {shown(source)}; an nn.Module is read by "
            "tnsim.from_module"
        )
    for entry in source:
        yield from _expand_source(entry)


def _source_matches(source: str | os.PathLike[str]) -> list[tuple[str, Path]]:
    with naming(source):
        paths = _source_paths(source)
        if not paths:
            raise CheckpointError(
                f"no checkpoint matches ({', '.join(SUFFIXES)}){_held_by(Path(source))}"
            )
        found = []
        # Folders list files in an order of their own.
        for name in sorted(paths, key=lambda name: natural(Path(name))):
            with naming(paths[name]):
                found.append((name, located(paths[name])))
        return found


def _held_by(folder: Path) -> str:
    """What a folder without checkpoints holds; of other sources nothing is said."""
    if not folder.is_dir():
        return ""
    names = sorted(path.name for path in folder.iterdir())
    return f"; the folder holds {printable(first_few(names), 200) or 'nothing'}"


def _source_paths(source: str | os.PathLike[str]) -> dict[str, str | Path]:
    """Files, folders of a single model and snapshots by the names from which labels are taken."""
    folder = Path(source)
    # A repository in a hub cache has a snapshot for each revision, which are the checkpoints of a
    # run.
    if folders.is_cache(folder):
        return {name: f"{source}@{path.name}" for name, path in folders.snapshots(folder).items()}
    if not is_several(source):
        return {str(source): str(source)}
    if folder.is_dir():
        _say_what_is_left_out(folder.iterdir())
        return {str(path): path for path in checkpoints(folder)}
    matches = [Path(path) for path in glob.glob(str(source), recursive=True)]
    _say_what_is_left_out(matches)
    return {str(path): path for path in matches if without_weights(path) is None}


def _say_what_is_left_out(paths: Iterable[Path]) -> None:
    for path in sorted(paths):
        if path.suffix in SUFFIXES and (reason := without_weights(path)) is not None:
            log.info("%s is left out: %s", path, reason)


def natural(path: Path) -> tuple[list[tuple[int, int, str]], ...]:
    """A sort key that takes the digits of a name for numbers.

    Args:
        path: Path of a file.

    Returns:
        A key that is compared part by part, words before numbers; a file named as the last of a
        run comes after all others. Among files of equal name, as in `step_9/model.pt` and
        `step_10/model.pt`, the parts of the whole path decide.

    Example:
        >>> names = ["final.pt", "step_10.pt", "step_9.pt"]
        >>> [path.stem for path in sorted(map(Path, names), key=natural)]
        ['step_9', 'step_10', 'final']
    """
    at_end = (int(path.stem.lower() in LAST), 0, "")
    texts = path.name, str(path)
    name, whole = (
        [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", x)]
        for x in texts
    )
    return [at_end, *name], whole


def series_labels(paths: Sequence[Path]) -> tuple[str, ...]:
    """The single number that tells the names of files or folders apart, or the names.

    Seeds and names without a digit, as `model_best` beside `epoch=3-val=0.12`, stay names.

    Example:
        >>> series_labels([Path("run/step_10.pt"), Path("run/step_20.pt")])
        ('10', '20')
    """
    # What follows a point in the name of a revision or of a folder is no suffix, as in v1.5.
    stems = [path.stem if path.suffix in (*SUFFIXES, ".bin") else path.name for path in paths]
    parts = {stem: re.split(r"(\d+)", stem) for stem in stems}
    counted = [stem for stem in stems if len(parts[stem]) > 1]
    numbers = _differing_numbers([parts[stem] for stem in counted])
    # The step is shorter than the name and is what plots need on their axis. Beside names without
    # a number those with a single one stay whole, as all are short then and of one kind.
    whole = len(counted) < len(stems) and max((len(parts[stem]) for stem in counted), default=0) < 5
    if numbers is not None and len(set(stems)) == len(stems) and not whole:
        by_stem = dict(zip(counted, numbers, strict=True))
        return tuple(by_stem.get(stem, stem) for stem in stems)
    if len(set(stems)) == len(stems):
        return tuple(stems)
    # Equal stems, as in `step_9/model.pt`, need the folders in front.
    return tuple(map(str, paths))


def _differing_numbers(names: Sequence[list[str]]) -> tuple[str, ...] | None:
    """The number in which names differ: the only number, or the number of steps."""
    # Names of different build cannot be compared part by part.
    if len(names) < 2 or len(set(map(len, names))) > 1:
        return None
    columns = list(zip(*names, strict=True))
    differing = [n for n, column in enumerate(columns) if len(set(column)) > 1]
    # A word that differs says more than the numbers beside it.
    if not all(all(map(str.isdecimal, columns[n])) for n in differing):
        return None
    number = _counting_column(differing, columns)
    if len(differing) == 1:
        number = differing[0]
    if number is None:
        return None
    before = columns[number - 1][0]
    # Digits behind a point or in an exponent are no number of their own, as in lr0.25 and lr1e-4.
    if number > 1 and re.fullmatch(r"\.|[eE][-+]?", before):
        return None
    if re.search(r"seed[\W_]*$", before, re.IGNORECASE):  # which are no steps of a run
        return None
    labels = tuple(str(int(part)) for part in columns[number])
    # Leading zeros may hide that two labels are one number.
    return labels if len(set(labels)) == len(names) else None


def _counting_column(numbers: Sequence[int], columns: Sequence[Sequence[str]]) -> int | None:
    """The column of the finest count among several numbers in names, as in `epoch=3-step=1200`.

    Args:
        numbers: Columns that hold numbers.
        columns: The parts of all names, words and numbers in turn.

    Returns:
        The column. None where another number, such as a seed, tells the files apart too; digits
        behind a point belong to a measured value and are passed over.
    """
    # The word in front of a number tells what the number counts.
    before = {n: columns[n - 1][0].lower() for n in numbers if not columns[n - 1][0].endswith(".")}
    if not all(any(word in text for word in COUNTERS) for text in before.values()):
        return None
    # Of several counts the finest tells the most checkpoints apart.
    for word in COUNTERS:
        for n, text in before.items():
            if word in text:
                return n
    return None


@overload
def load(
    path: str | os.PathLike[str],
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    *,
    leave_out: str | Sequence[str] = (),
    norm_inputs: Any = None,
    inputs: Any = None,
    output: str | int | None = None,
) -> Model | Series: ...


@overload
def load(
    path: Iterable[Any],
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    *,
    leave_out: str | Sequence[str] = (),
    norm_inputs: Any = None,
    inputs: Any = None,
    output: str | int | None = None,
) -> Series: ...


@checked(own="leave_out")
def load(
    path: Any,
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    *,
    leave_out: str | Sequence[str] = (),
    norm_inputs: Any = None,
    inputs: Any = None,
    output: str | int | None = None,
) -> Model | Series:
    """Read a single file into a `Model`; a list, a folder or a glob pattern into a lazy `Series`.

    A folder in Hugging Face's layout counts as a file. In a local hub cache `REPOSITORY@REVISION`
    counts as a file, and the folder of the repository as several.

    Args:
        path: A file that ends in .safetensors, .npz, .pt, .pth or .ckpt, or several.
        dialect: A `Dialect`, the name of a preset, the path of a JSON file, or an `nn.Module` of
            which the files hold state dicts. Files of tnsim's own format need none.
        n_ctx: Length of the sequences on which a model with attention is compared; by default the
            length that the file states. Foreign files state none.
        leave_out: A pattern, or several, of tensors that are part of the network, a bias or a norm,
            and are knowingly not read. Every result says so. Of files read by a module, tensors of
            the file alone: a module computes with all of its own. Files of tnsim's own format hold
            no others.
        norm_inputs: Inputs (samples, d_in), of a sequence (samples, positions, d_in) or token
            numbers (samples, positions), at whose mean energy each norm that the dialect names
            becomes a constant. The model's `origin` says how far outputs are off, and so does every
            result.
        inputs: Example of the module's argument, as in `from_module`; for files read by a module.
        output: Name or place of the module's output that counts, as in `from_module`.

    Returns:
        A model, or a series whose models are read when they are asked for.

    Raises:
        CheckpointError: When the file is missing, damaged, out of proportion, or does not fit its
            dialect; the message names file and tensor.
        ModelError: When the tensors of the file make no model.
        UnsupportedLayer: When the file holds a layer that is no polynomial, such as a norm without
            `norm_inputs`.

    Warns:
        CaveatWarning: A pattern to leave out fits no tensor of a file.

    Example:
        >>> from pathlib import Path
        >>> import tnsim
        >>> folder = Path(tnsim.__file__).parent / "data" / "modular-addition"
        >>> load(folder)
        Series(13 checkpoints: 0, 100, 200, ...)
        >>> load(folder / "step_000100.safetensors")
        Model(Bilinear(226 -> 113, rank 64); degree 2, 36,160 parameters)
    """
    if isinstance(path, (str, os.PathLike)) and not is_several(path):
        one = read(path, dialect, n_ctx, leave_out, norm_inputs, inputs=inputs, output=output)
        return one.model
    return Series(
        path,
        dialect,
        n_ctx,
        leave_out=leave_out,
        norm_inputs=norm_inputs,
        inputs=inputs,
        output=output,
    )


@checked(own="state leave_out")
def from_state_dict(
    state: Mapping[str, Any],
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    leave_out: str | Sequence[str] = (),
    norm_inputs: Any = None,
    inputs: Any = None,
    output: str | int | None = None,
) -> Model:
    """A model from a torch state_dict or any mapping of names to arrays.

    Args:
        state: Arrays or tensors by name.
        dialect: Dialect of the state dict, as in `load`.
        n_ctx: Length of the sequences, as in `load`.
        config: Contents of config.json, for dialects that take numbers from the configuration.
        leave_out: Patterns of tensors that are knowingly not read, as in `load`.
        norm_inputs: Inputs at whose mean energy norms become constants, as in `load`.
        inputs: Example of the argument of a module, as in `load`.
        output: Output of a module that counts, as in `load`.

    Returns:
        The model.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: Raised as by `load`.

    Example:
        >>> shapes = {"W_l": (4, 2), "W_r": (4, 2), "W_p": (3, 4)}
        >>> state = {name: np.ones(shape) for name, shape in shapes.items()}
        >>> from_state_dict(state, "bilinear-readout").degree
        2
    """
    asked = _asked_for(dialect, n_ctx, leave_out, norm_inputs, inputs, output)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected named tensors, found {type(state).__name__}")
    return _model_by(asked, state, config)


class ForwardDifference(NamedTuple):
    """Largest difference of two forward passes.

    Attributes:
        absolute: Largest difference, in the unit of the outputs.
        relative: Largest difference divided by the largest output of the other pass.
    """

    absolute: float
    relative: float


@checked
def compare_forward(
    model: Model, forward: Callable[[np.ndarray], Any], samples: int = 64, seed: Seed = 0
) -> ForwardDifference:
    """Check a dialect: compare the model's forward pass with another.

    A float32 forward of the same function differs by about 1e-6 relatively.

    Args:
        model: The model that was read through the dialect.
        forward: Module of PyTorch, or function of arrays or tensors. It takes float32 inputs
            (samples, d_in), or (samples, n_ctx, d_in) for a model of sequences, and returns outputs
            (samples, d_out), or (samples, n_ctx, d_out).
        samples: Number of standard normal inputs.
        seed: Seed of the inputs: a number, a NumPy generator or a JAX key.

    Returns:
        Absolute and relative difference; the relative difference has no unit.

    Raises:
        ModelError: The shapes of the outputs differ, or outputs are NaN or infinite.
        TooLarge: Memory does not hold so many samples.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> compare_forward(model, lambda x: x)
        ForwardDifference(absolute=0.0, relative=0.0)
    """
    if not isinstance(model, AnyModel):
        raise ModelError(f"a tnsim Model is held against a forward pass, found {shown(model)}")
    if not is_count(samples):
        raise ModelError(f"samples must be a positive integer, found {samples!r}")
    check_untraced("a comparison with a forward pass", model)
    # Inputs are float32, as networks take them; the model itself computes in float64.
    x = normal_inputs(samples, model, seed).astype(np.float32)
    wide = x.astype(np.float64)  # before a forward pass that writes into its inputs
    theirs = to_numpy(array_at(forward, x), "the output of forward").astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        ours = np.asarray(model(wide), np.float64)
    if theirs.shape != ours.shape:
        raise ModelError(
            f"forward gives shape {theirs.shape} for inputs {x.shape}, the model {ours.shape}"
        )
    for outputs, whose in ((theirs, "forward"), (ours, "the model")):
        if not np.isfinite(outputs).all():
            raise ModelError(f"{whose} gives outputs that are NaN or infinite")
    absolute = float(np.abs(theirs - ours).max())
    # A forward pass that gives zeros alone must not divide by zero.
    largest = max(float(np.abs(theirs).max()), float(np.finfo(np.float64).tiny))
    return ForwardDifference(absolute, absolute / largest)
