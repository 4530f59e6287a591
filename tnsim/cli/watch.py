"""`tnsim watch`: all pairs of a run that still trains, computed as its checkpoints appear.

A folder is looked at every few seconds. A file counts as written once its size and its time of
change are the same at two looks and its contents have the length that its header states. Every new
checkpoint grows the store of the results (`all_pairs.growing`), so that its pairs alone are
computed, and the tables, pictures and page are written again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tnsim.cli.options import (
    ContextOption,
    DialectOption,
    DistancesOption,
    DtypeName,
    DtypeOption,
    FitOption,
    InputsOption,
    LeaveOutOption,
    MetricName,
    MetricOption,
    NormInputsOption,
    OtherOption,
    PartsOption,
    PlotsOption,
    ReportOption,
    SlicesOption,
    check_outputs,
    metric_of,
    reading_of,
    say,
    stoppable,
)
from tnsim.cli.pairwise import (
    check_apart,
    lowest,
    outputs_of,
    parts_of,
    series_of,
    store_in,
    write_results,
)
from tnsim.errors import CheckpointError, StoreMismatch

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


def watch(
    files: Watched,
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")],
    every: Annotated[
        float, typer.Option("--every", min=0.05, help="Seconds between two looks at the files.")
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

    reading = reading_of(dialect, n_ctx, leave_out, norm_inputs)
    chosen = metric_of(metric, fit, inputs)
    others: Any = series_of(other, reading) if other else None
    if parts is not None and others is not None:
        others = parts_of(others, parts, distances)
    check_apart(out, [*files, *(other or ())])
    check_outputs(outputs_of(out, False, plots, report))
    store = store_in(out, parts)
    look, computed, samples = _Look(files, reading), (), reading.norm_inputs
    mismatches = 0
    with stoppable(f"finished pairs are kept in {store}, watch again to go on"):
        say(f"watching {', '.join(files)} every {every:g} s; Ctrl-C ends")
        while True:
            written = look.written()
            if written and written != computed:
                paths = [path for path, _ in written]
                models: Any = tnsim.Series(
                    paths, reading.dialect, n_ctx, leave_out=reading.leave_out, norm_inputs=samples
                )
                if parts is not None:
                    models = parts_of(models, parts, distances)
                options = {"other": others, "slices": slices, "dtype": dtype.value}
                try:
                    result = tnsim.pairwise(models, chosen, **options, store=store)
                except StoreMismatch:
                    # Another process may have grown the store by files that this look missed.
                    mismatches += 1
                    if mismatches > _LATER_LOOKS:
                        raise
                else:
                    mismatches = 0
                    write_results(result, out, False, plots, report)
                    new = len(written) - len(computed)
                    say(f"models {len(written)}, {new} new; lowest {lowest(result)}")
                    computed = written
                    if until is not None and len(written) >= until:
                        return
            time.sleep(every)


class _Look:
    """Looks at files that may still be written, one after another."""

    def __init__(self, files: list[str], reading: Any) -> None:
        self._files, self._reading = files, reading
        self._before: dict[Path, _Stamp] = {}
        self._whole: dict[Path, _Stamp] = {}
        self._told: dict[Path, _Stamp] = {}

    def written(self) -> tuple[tuple[Path, _Stamp], ...]:
        """The checkpoints that are written to their end, in order."""
        try:
            paths = series_of(self._files, self._reading).paths
        except CheckpointError:  # nothing yet
            return ()
        stamps = {}
        for path in paths:
            try:
                state = path.stat()
            except OSError:  # gone since it was listed
                continue
            stamps[path] = _Stamp(state.st_size, state.st_mtime_ns)
        before, self._before = self._before, stamps
        return tuple(
            (path, stamp) for path, stamp in stamps.items() if self._is_whole(path, stamp, before)
        )

    def _is_whole(self, path: Path, stamp: _Stamp, before: dict[Path, _Stamp]) -> bool:
        """Whether a file is as it was at the look before, and has the length that it states."""
        from tnsim.checkpoints.folders import located
        from tnsim.checkpoints.formats import contents
        from tnsim.checkpoints.guard import naming

        if before.get(path) != stamp:
            return False
        if self._whole.get(path) == stamp:
            return True
        try:
            with naming(path):
                contents(located(path))
        except CheckpointError as error:
            if self._told.get(path) != stamp:
                say(f"waiting for {error}")
                self._told[path] = stamp
            return False
        self._whole[path] = stamp
        return True
