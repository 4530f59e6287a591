"""`tnsim watch`: all pairs of a run that still trains, computed as its checkpoints appear.

A folder is looked at every few seconds. A file counts as written once its size and its time of
change are the same at two looks and it can be read as a model; what cannot, such as the state of an
optimiser, is said once and left out until it changes. Every new checkpoint grows the store of the
results (`all_pairs.growing`), so that its pairs alone are computed, and the tables, pictures and
page are written again. A store never forgets a model, so where a checkpoint is rewritten or
removed, the pairs of those that are there are computed in a store of this process alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from tnsim.cli.options import (
    ContextOption,
    DialectOption,
    DistancesOption,
    DtypeName,
    DtypeOption,
    ExampleOption,
    FitOption,
    InputsOption,
    LeaveOutOption,
    MetricName,
    MetricOption,
    ModelOption,
    NormInputsOption,
    OtherOption,
    PartsOption,
    PlotsOption,
    ReportOption,
    SlicesOption,
    check_outputs,
    metric_of,
    networks_of,
    say,
    stoppable,
)
from tnsim.cli.pairwise import (
    check_apart,
    lowest,
    names_in,
    outputs_of,
    parts_of,
    store_in,
    write_results,
)
from tnsim.errors import CheckpointError, MissingExtra, StoreMismatch, TnsimError

if TYPE_CHECKING:
    pass

Watched = Annotated[
    list[str],
    typer.Argument(help="Folder of a run, or patterns of its checkpoints, which may come later."),
]


_LATER_LOOKS = 2
"""Looks until a file counts that another process found before: the first look sees it, the second
sees it unchanged."""


class _Stamp(NamedTuple):
    """Size and time of change of a file, which differ while the file is being written."""

    size: int
    changed: int


Written: TypeAlias = tuple[tuple[Path, _Stamp], ...]


def watch(
    files: Watched,
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")],
    every: Annotated[
        float,
        typer.Option("--every", help="Seconds between two looks at the files, 0.05 to 86400."),
    ] = 10.0,
    until: Annotated[
        int | None,
        typer.Option("--until", min=1, help="End with this many checkpoints; default: never."),
    ] = None,
    other: OtherOption = None,
    parts: PartsOption = None,
    distances: DistancesOption = "1",
    metric: MetricOption = MetricName.gaussian,
    slices: SlicesOption = False,
    fit: FitOption = None,
    inputs: InputsOption = None,
    dialect: DialectOption = None,
    model: ModelOption = None,
    example: ExampleOption = None,
    n_ctx: ContextOption = None,
    leave_out: LeaveOutOption = None,
    norm_inputs: NormInputsOption = None,
    dtype: DtypeOption = DtypeName.float64,
    plots: PlotsOption = False,
    report: ReportOption = None,
) -> None:
    """Similarity of all pairs of a run that still trains, until Ctrl-C.

    Computes the pairs of new checkpoints as these appear, and writes the results again.
    """
    import tnsim
    from tnsim.tables import in_words

    if not 0.05 <= every <= 86400:  # which NaN is not, either
        raise typer.BadParameter(f"--every takes 0.05 to 86400 seconds, a day, found {every}")
    as_it_is = metric if parts is None else None
    networks = networks_of(dialect, model, example, n_ctx, leave_out, norm_inputs, as_it_is)
    chosen = metric_of(metric, fit, inputs)
    others: Any = networks.several(names_in(other)) if other else None
    if parts is not None and others is not None:
        others = parts_of(others, parts, distances)
    check_apart(out, [*files, *(other or ())])
    store = store_in(out, parts)
    check_outputs(outputs_of(out, False, plots, report), store)
    files = names_in(files)
    computed: Written = ()  # what the results hold
    stored: Written = ()  # what the store holds as far as this process knows
    mismatches = 0

    def models_of(paths: Sequence[Path]) -> Any:
        if parts is None:
            return networks.several(paths)
        return parts_of(networks.series(paths), parts, distances)

    look = _Look(files, models_of)
    with (
        stoppable(f"finished pairs are kept in {store}, watch again to go on"),
        ExitStack() as temporary,
    ):
        say(f"watching {', '.join(files)} every {every:g} s; Ctrl-C ends")
        while True:
            written = look.written()
            # A checkpoint that is being written again is waited for.
            is_settled = look.changing.isdisjoint(path for path, _ in computed)
            if written and written != computed and is_settled:
                options = {"other": others, "slices": slices, "dtype": dtype.value}
                try:
                    models = models_of([path for path, _ in written])
                    result = tnsim.pairwise(models, chosen, **options, store=store)
                except StoreMismatch:
                    if lost := [path for path, stamp in stored if (path, stamp) not in written]:
                        say(f"{lost[0]} was rewritten or removed: all pairs are computed again")
                        temporary.close()  # the store of an earlier such change
                        folder = TemporaryDirectory(prefix=".watch-", dir=out)
                        store, stored = Path(temporary.enter_context(folder)) / store.name, ()
                        continue
                    # Another process may have grown the store by files that this look missed.
                    mismatches += 1
                    if mismatches > _LATER_LOOKS:
                        raise
                except CheckpointError:
                    # A file may be rewritten or removed while it is read.
                    if all(_stamp(path) == stamp for path, stamp in written):
                        raise
                else:
                    mismatches = 0
                    write_results(result, out, False, plots, report)
                    new = len(set(written) - set(computed))
                    say(f"models {len(written)}, {new} new; lowest {lowest(result)}")
                    if result.attrs.get("rest"):
                        say(f"what belongs to no part {in_words(result.attrs)['rest']}")
                    computed = stored = written
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
        self._before: dict[Path, _Stamp] = {}
        self._whole: dict[Path, _Stamp] = {}
        self._told: dict[Path, _Stamp] = {}

    def written(self) -> Written:
        """The checkpoints that are written to their end, in order."""
        import tnsim

        try:
            paths = tnsim.Series(self._files).paths
        except CheckpointError:  # nothing yet
            return ()
        stamps = {path: stamp for path in paths if (stamp := _stamp(path)) is not None}
        before, self._before = self._before, stamps
        self.changing = {path for path, stamp in stamps.items() if before.get(path) != stamp}
        return tuple((path, stamp) for path, stamp in stamps.items() if self._is_whole(path, stamp))

    def _is_whole(self, path: Path, stamp: _Stamp) -> bool:
        """Whether a file is as it was at the look before, and can be read."""
        if path in self.changing:
            return False
        if self._whole.get(path) == stamp:
            return True
        if self._told.get(path) == stamp:
            return False
        try:
            # Models are read when indexed, parts when they are told apart.
            models = self._models_of([path])
            if isinstance(models, Sequence):
                models[0]
        except MissingExtra:
            raise
        except TnsimError as error:
            say(f"waiting for {error}")
            self._told[path] = stamp
            return False
        self._whole[path] = stamp
        return True
