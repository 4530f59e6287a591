"""Checkpoints of a run that still trains, as they appear: `tnsim pairwise --follow SECONDS`.

A folder is looked at every few seconds. A file counts as written once its size and its time of
change are the same at two looks and it can be read as a model; what cannot, such as the state of an
optimiser, is said once and left out until it changes, or what lies beside it does, as the
configuration of an adapter, which is written after its weights. Every new checkpoint grows the
store of the results (`all_pairs.growing`), so that its pairs alone are computed. A store never
forgets a model, so where a checkpoint is rewritten or removed, the pairs of those that are there
are computed in a store of this process alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tnsim.cli.options import say
from tnsim.errors import CheckpointError, MissingExtra, StoreMismatch, TnsimError

if TYPE_CHECKING:
    from tnsim.all_pairs.result import Pairwise

_LATER_LOOKS = 2
"""Looks until a file counts that another process found before: the first look sees it, the second
sees it unchanged."""
_PATIENCE = 20
"""Looks for which a file that cannot be read may still be on its way."""


class _Stamp(NamedTuple):
    """Size and time of change of a file, which differ while the file is being written."""

    size: int
    changed: int


class _Unreadable(NamedTuple):
    """A file that cannot be read: as what it and its folder were found, why, at how many looks."""

    stamp: _Stamp
    folder: _Stamp | None
    error: TnsimError
    looks: int


Written: TypeAlias = tuple[tuple[Path, _Stamp], ...]


class Grown(NamedTuple):
    """All pairs of the checkpoints that are there.

    Attributes:
        result: The pairs.
        models: Number of checkpoints.
        new: Number of those that the result before had not.
    """

    result: Pairwise
    models: int
    new: int


def followed(
    files: list[str],
    models_of: Callable[[Sequence[Path]], Any],
    compared: Callable[[Any, Path], Pairwise],
    store: Path,
    every: float,
    until: int | None = None,
) -> Generator[Grown]:
    """All pairs of a run that still trains, again for every change of its checkpoints.

    Args:
        files: A folder of the run, or patterns of its checkpoints, which may come later.
        models_of: Function from files to what is compared.
        compared: Function from models and the path of a store to all pairs.
        store: Store of the results.
        every: Seconds between two looks at the files.
        until: Number of checkpoints with which the iterator ends; None where it does not end.

    Yields:
        The pairs of the checkpoints that are written to their end.

    Raises:
        StoreMismatch: The store holds another run.
        TnsimError: There cannot be `until` checkpoints: they are files that were named one by one,
            and one of them was not readable for `_PATIENCE` looks, in which it did not change.
    """
    out = store.parent
    computed: Written = ()  # what the results hold
    stored: dict[Path, _Stamp] = {}  # what the store may hold as far as this process knows
    mismatches = 0
    look = _Look(files, models_of)
    is_closed = until is not None and all(Path(file).is_file() for file in files)
    with ExitStack() as temporary:
        while True:
            written = look.written()
            if is_closed and len(look.hopeless) > len(files) - (until or 0):
                raise next(iter(look.hopeless.values()))
            # A checkpoint that is being written again is waited for.
            is_settled = look.changing.isdisjoint(path for path, _ in computed)
            if written and written != computed and is_settled:
                try:
                    result = compared(models_of([look.named[path] for path, _ in written]), store)
                except StoreMismatch:
                    if lost := [path for path, at in stored.items() if (path, at) not in written]:
                        say(f"{lost[0]} was rewritten or removed: all pairs are computed again")
                        temporary.close()  # the store of an earlier such change
                        folder = TemporaryDirectory(prefix=".follow-", dir=out)
                        store, stored = Path(temporary.enter_context(folder)) / store.name, {}
                        continue
                    # Another process may have grown the store by files that this look missed.
                    mismatches += 1
                    if mismatches > _LATER_LOOKS:
                        raise
                except CheckpointError:
                    # A file may be rewritten or removed while it is read.
                    if all(_stamp(path) == stamp for path, stamp in written):
                        raise
                    stored = dict(written) | stored  # where it lists them already
                else:
                    mismatches = 0
                    yield Grown(result, len(written), len(set(written) - set(computed)))
                    computed = written
                    stored |= written  # and what it held before, as it forgets none
                    if until is not None and len(written) >= until:
                        return
            time.sleep(every)


def _stamp(path: Path) -> _Stamp | None:
    """Size and time of change of a file; None where it is gone."""
    try:
        state = path.stat()
    except OSError:
        return None
    return _Stamp(state.st_size, state.st_mtime_ns)


class _Look:
    """Looks at files that may still be written, one after another."""

    def __init__(self, files: list[str], models_of: Callable[[Sequence[Path]], Any]) -> None:
        self._files, self._models_of = files, models_of
        self.changing: set[Path] = set()  # files that differ from those of the look before
        self.named: dict[Path, Path] = {}  # files, or the folders of single models that they are in
        self._before: dict[Path, _Stamp] = {}
        self._whole: dict[Path, _Stamp] = {}
        self._told: dict[Path, _Unreadable] = {}
        self._unfound: set[str] = set()  # what was said where no files were found

    @property
    def hopeless(self) -> dict[Path, TnsimError]:
        """The files that were not readable for many looks, in which they did not change."""
        return {path: told.error for path, told in self._told.items() if told.looks >= _PATIENCE}

    def written(self) -> Written:
        """The checkpoints that are written to their end, in order."""
        import tnsim

        try:
            series = tnsim.Series(self._files)
        except CheckpointError as error:  # nothing yet, or a folder in the way
            if str(error) not in self._unfound:
                self._unfound.add(str(error))
                say(f"waiting for {error}")
            return ()
        # A folder has the label of the checkpoint, and the files that its library needs.
        self.named = {
            path: path.parent if Path(name) == path.parent else path
            for name, path in zip(series.names, series.paths, strict=True)
        }
        stamps = {path: stamp for path in series.paths if (stamp := _stamp(path)) is not None}
        before, self._before = self._before, stamps
        self.changing = {path for path, stamp in stamps.items() if before.get(path) != stamp}
        return tuple((path, stamp) for path, stamp in stamps.items() if self._is_whole(path, stamp))

    def _is_whole(self, path: Path, stamp: _Stamp) -> bool:
        """Whether a file is as it was at the look before, and can be read."""
        if path in self.changing:
            return False
        if self._whole.get(path) == stamp:
            return True
        told, folder = self._told.get(path), _stamp(path.parent)
        is_known = told is not None and told.stamp == stamp
        if told is not None and is_known and told.folder == folder:
            self._told[path] = told._replace(looks=told.looks + 1)
            return False
        try:
            # Models are read when indexed, parts when they are told apart.
            models = self._models_of([self.named[path]])
            if isinstance(models, Sequence):
                models[0]
        except MissingExtra:
            raise
        except TnsimError as error:
            if not is_known:
                say(f"waiting for {error}")
            self._told[path] = _Unreadable(stamp, folder, error, 1)
            return False
        self._whole[path] = stamp
        return True
