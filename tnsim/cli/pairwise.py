"""`tnsim pairwise`: similarities of all pairs of checkpoints, as files, text or JSON.

The command computes nothing itself.

*A run that still trains* (`--follow SECONDS`). A folder is looked at every few seconds. A file
counts as written once its size and its time of change are the same at two looks and it can be read
as a model; what cannot, such as the state of an optimiser, is said once and left out until it
changes, or what lies beside it does, as the configuration of an adapter, which is written after its
weights. Every new checkpoint grows the store of the results (`all_pairs.growing`), so that its
pairs alone are computed. A store never forgets a model, so where a checkpoint is rewritten or
removed, the pairs of those that are there are computed in a store of this process alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from tnsim.cli.options import (
    CentredOption,
    JsonOption,
    MetricOptions,
    ReadingOptions,
    SlicesOption,
    check_outputs,
    in_order,
    metric_of,
    named_path,
    networks_of,
    print_json,
    save_picture,
    say,
    standard_input,
    stoppable,
)
from tnsim.errors import CheckpointError, MissingExtra, StoreMismatch, TnsimError, printable
from tnsim.files import PNG, Kind

if TYPE_CHECKING:
    from tnsim.all_pairs.result import Pairwise
    from tnsim.checkpoints.load import Series
    from tnsim.circuits.parts import SeriesParts
    from tnsim.metrics.protocol import Metric


_LATER_LOOKS = 2
"""Looks until a file counts that another process found before: the first look sees it, the second
sees it unchanged."""
_PATIENCE = 20
"""Looks for which a file that cannot be read may still be on its way."""


Files = Annotated[
    list[str],
    typer.Argument(
        help="Checkpoints: files, folders, globs, repositories or REPOSITORY@REVISION in a Hugging "
        "Face cache; - for names on standard input, one a line."
    ),
]
_PICTURES = ("heatmap", "trajectory", "mds", "parts")


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


class _Output(NamedTuple):
    """A file that a run writes beside its store.

    Attributes:
        kind: Kind of the file.
        write: Writes a result to a path.
        shows: Whether there is such a file of a result.
    """

    kind: Kind
    write: Callable[[Pairwise, Path], Any]
    shows: Callable[[Pairwise], bool] = lambda result: True


def pairwise(
    files: Files,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=named_path,
            help="Folder of the results; run again with the same folder to go on.",
        ),
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option("--other", help="Compare with these instead of all with all. Repeatable."),
    ] = None,
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--parts",
            metavar="KINDS",
            help="Compare parts of transformers one by one: kinds, such as qk,ov,mlp,direct. "
            "Repeatable.",
        ),
    ] = None,
    distances: Annotated[
        list[str] | None,
        typer.Option(
            "--distances",
            metavar="NUMBERS",
            help="Positions by which keys of qk parts stand before queries, such as 1,2. "
            "Repeatable.",
            show_default="1",
        ),
    ] = None,
    follow: Annotated[
        float | None,
        typer.Option(
            "--follow",
            metavar="SECONDS",
            help="Look for new checkpoints so often, 0.05 to 86400, compute their pairs as they "
            "appear and write the results again, until Ctrl-C.",
        ),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option("--until", min=1, help="End --follow with this many checkpoints."),
    ] = None,
    asked: MetricOptions = MetricOptions(),
    slices: SlicesOption = False,
    centred: CentredOption = False,
    reading: ReadingOptions = ReadingOptions(),
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", help="Address of a Dask scheduler whose workers compute."),
    ] = None,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Also write DIR/pairs.parquet, one row a pair.")
    ] = False,
    zarr: Annotated[
        bool,
        typer.Option(
            "--zarr", help="Also write DIR/pairs.zarr, which xarray.open_zarr reads in blocks."
        ),
    ] = False,
    plots: Annotated[
        bool,
        typer.Option(
            "--plots",
            help="Also write heatmap.png, trajectory.png and mds.png; of parts, parts.png.",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", parser=named_path, help="Also write one HTML page, to be opened offline."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would cost, and stop.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Similarity of all pairs of many checkpoints, resumable.

    Killed, it goes on where it was; with --follow it goes on while the checkpoints are written.
    """
    import tnsim

    _check_follow(follow, until, dry_run, as_json)
    kinds = _listed(parts)
    if distances and "qk" not in kinds:
        raise typer.BadParameter("--distances are those of --parts qk, which are not given")
    networks = networks_of(reading, None if kinds else asked.metric)

    def models_of(names: Sequence[str | Path]) -> Any:
        if not kinds:
            return networks.several(names)
        return _parts_of(networks.series(names), kinds, _listed(distances) or ["1"])

    names = _names_in(files)
    models: Any = models_of(names) if follow is None else None
    others: Any = models_of(_names_in(other)) if other else None
    chosen = metric_of(asked)
    options: dict[str, Any] = {"other": others, "slices": slices, "centred": centred}
    options |= {"n_ctx": networks.n_ctx, "dtype": asked.dtype}
    if dry_run and kinds:
        _say_costs(models, chosen, options, as_json)
        return
    if dry_run:
        planned = tnsim.plan_pairwise(models, chosen, **options)
        if as_json:
            print_json(planned.as_dict())
        else:
            say(str(planned))
        return
    if out is None:
        raise typer.BadParameter("give --out DIR, where results are kept, or --dry-run")
    # Everything that can be refused is refused before the first tile.
    _check_apart(out, [*files, *(other or ())])
    store = _store_in(out, kinds)
    outputs = _outputs_of(out, parquet, zarr, plots, report)
    check_outputs({path: output.kind for path, output in outputs.items()}, store)
    kept = f"finished tiles are kept in {store}, run again to go on"
    with stoppable(kept), _executor(scheduler) as executor:
        options |= {"executor": executor, "progress": follow is None and not as_json}

        def compared(models: Any, store: Path) -> Pairwise:
            return tnsim.pairwise(models, chosen, **options, store=store)

        if follow is not None:
            say(f"following {', '.join(names)} every {follow:g} s; Ctrl-C ends")
            with contextlib.closing(
                followed(names, models_of, compared, store, follow, until)
            ) as run:
                for grown in run:
                    _write_results(grown.result, outputs)
                    _say_grown(grown)
                return
        result = compared(models, store)
    written = [store, *_write_results(result, outputs)]
    if as_json:
        _print_result(result)
    else:
        _say_result(result, written)
        if not (plots or report):
            say("to look at  run again with --plots for pictures, or --report page.html for a page")


def _check_follow(follow: float | None, until: int | None, dry_run: bool, as_json: bool) -> None:
    """Refuse what does not go together with a run that is followed, or that is not."""
    if follow is None:
        if until is not None:
            raise typer.BadParameter("--until ends --follow SECONDS, which is not given")
        return
    if not 0.05 <= follow <= 86400:  # which NaN is not, either
        raise typer.BadParameter(f"--follow takes 0.05 to 86400 seconds, a day, found {follow}")
    if dry_run or as_json:
        flag = "--dry-run" if dry_run else "--json"
        raise typer.BadParameter(f"--follow computes as checkpoints appear: leave {flag} out")


def _say_grown(grown: Grown) -> None:
    from tnsim.tables import in_words

    say(f"models {grown.models}, {grown.new} new; lowest {_lowest(grown.result)}")
    if grown.result.attrs.get("rest"):
        say(f"what belongs to no part {in_words(grown.result.attrs)['rest']}")


def _outputs_of(
    out: Path, parquet: bool, zarr: bool, plots: bool, page: Path | None
) -> dict[Path, _Output]:
    """The files that a run writes beside its store.

    Args:
        out: Folder of the results.
        parquet: Whether a table of pairs is written.
        zarr: Whether a folder of arrays is written.
        plots: Whether pictures are written.
        page: Path of the HTML page, None for none.
    """
    from tnsim.all_pairs import result
    from tnsim.analysis import report

    outputs = {
        out / "similarity.csv": _Output(result.CSV, result.write_csv),
        out / "result.npz": _Output(result.NPZ, result.write_npz),
    }
    if parquet:
        outputs[out / "pairs.parquet"] = _Output(result.PARQUET, result.write_parquet)
    if zarr:
        outputs[out / "pairs.zarr"] = _Output(result.ZARR, result.write_zarr)
    if plots:
        for name in _PICTURES:
            draw, shows = partial(_save_plot, name), partial(_has_plot, name)
            outputs[out / f"{name}.png"] = _Output(PNG, draw, shows)
    if page in outputs:
        raise typer.BadParameter(f"--report {page} is the table that --out writes; name another")
    if page is not None:
        outputs[page] = _Output(report.PAGE, report.write)
    return outputs


def _save_plot(name: str, result: Pairwise, path: Path) -> None:
    save_picture(result.tnsim.plot(name), path)


def _has_plot(name: str, result: Pairwise) -> bool:
    """Whether a result has a picture: of parts one for all, of one set also those of its path."""
    from tnsim.analysis.matrices import is_one_set

    if "part" in result.dims:
        return name == "parts"
    if name == "mds" and result.sizes["a"] < 2:  # the first of a run that is followed
        return False
    return name == "heatmap" or (name != "parts" and is_one_set(result))


def _write_results(result: Pairwise, outputs: Mapping[Path, _Output]) -> list[Path]:
    """Write a result for other programs and for readers, and return the paths of the files."""
    written = [path for path, output in outputs.items() if output.shows(result)]
    for path in written:
        outputs[path].write(result, path)
    return written


def _store_in(out: Path, parts: Sequence[str]) -> Path:
    """The store of a run in the folder of its results.

    Args:
        out: Folder of the results.
        parts: Kinds of parts that are compared, none for whole models.

    Returns:
        The path of the store.

    Raises:
        StoreMismatch: The folder holds results of the other kind, which the tables would replace.
    """
    from tnsim.all_pairs.store import WITHIN_RESULTS

    ours, theirs = (out / name for name in WITHIN_RESULTS)
    if parts:
        ours, theirs = theirs, ours
    if theirs.exists():
        of_what = "whole models" if parts else "parts"
        raise StoreMismatch(
            f"{out}: holds the results of a run over {of_what}, kept in {theirs}; "
            "give another folder"
        )
    return ours


def _parts_of(series: Series, kinds: list[str], distances: list[str]) -> SeriesParts:
    """The parts of checkpoints that options name.

    Args:
        series: Checkpoints.
        kinds: Kinds of parts.
        distances: Distances of positions.

    Returns:
        The parts of the checkpoints.

    Raises:
        BadParameter: Error of Typer, where a distance is no whole number.
        ModelError: The checkpoints have no such parts.
    """
    import tnsim

    try:
        numbers = list(map(int, distances))
    except ValueError:
        raise typer.BadParameter(
            f"--distances lists whole numbers, such as 1,2,4, found {','.join(distances)!r}"
        ) from None
    return tnsim.parts(series, kinds, distances=numbers)


def _listed(texts: list[str] | None) -> list[str]:
    """Words with commas between, of an option that may be repeated."""
    return [word.strip() for text in texts or () for word in text.split(",")]


def _say_costs(
    models: SeriesParts, metric: Metric, options: Mapping[str, Any], as_json: bool
) -> None:
    """The cost of all parts of each kind, and their number."""
    import tnsim

    data = {}
    for kind in dict.fromkeys(name.kind for name in models.names):
        own = models.of_kind(kind)
        other = None if options["other"] is None else options["other"].of_kind(kind)
        planned = tnsim.plan_pairwise(own, metric, **{**options, "other": other})
        data[kind] = {"parts": len(own), "together": planned.as_dict()}
        if not as_json:
            say(f"{kind}: {len(own)} parts, together\n{planned}")
    if as_json:
        print_json(data)


def _print_result(result: Pairwise) -> None:
    from tnsim.analysis.matrices import shown_labels

    data: dict[str, Any] = {side: shown_labels(result[side]) for side in "ab"}
    if "part" in result.dims:
        data["part"] = result["part"].values.tolist()
    for name in ("similarity", "standard_error"):
        if name in result:
            data[name] = result[name].values.tolist()
    # Files keep the flags as numbers, and JSON has booleans.
    flags = {"exact", "symmetric", "centred"} & result.attrs.keys()
    print_json(data | result.attrs | {name: bool(result.attrs[name]) for name in flags})


def _say_result(result: Pairwise, written: list[Path]) -> None:
    from tnsim.analysis.reading import certainty, findings
    from tnsim.tables import in_words

    sizes, about = result.sizes, result.attrs
    duplicates = f"{about['duplicates']} with the weights of another"
    if "part" in sizes:
        say(f"parts       {sizes['part']}: {', '.join(dict.fromkeys(result.kind.values.tolist()))}")
    say(f"models      {sizes['a']} x {sizes['b']}, {duplicates}")
    say(f"metric      {about['metric']} ({''.join(certainty(result))})")
    say(f"route       {about['plan']}")
    say(f"lowest      {_lowest(result)}")
    for n, sentence in enumerate(findings(result)):
        say(f"{'' if n else 'found':<12}{sentence}")
    if "rest" in about:
        say(f"rest        what belongs to no part {in_words(about)['rest']}")
    say(printable(f"wrote       {', '.join(map(str, written))}"))


def _lowest(result: Pairwise) -> str:
    """The pair with the lowest similarity, in words.

    Args:
        result: Result of a run.

    Returns:
        The similarity with the labels of both models, and of a run over parts with the part.
    """
    import numpy as np

    values = result.similarity.values
    # A result over parts has one more axis in front.
    *part, row, column = np.unravel_index(int(values.argmin()), values.shape)
    first, second = result["a"].values[row], result["b"].values[column]
    said = f"similarity {values.min():.4g}, of {first} and {second}"
    return printable(f"{said} in {result['part'].values[part[0]]}" if part else said)


def _names_in(files: list[str]) -> list[str]:
    """The names of checkpoints that arguments give, those on standard input for "-".

    Args:
        files: Names, or "-" alone.

    Returns:
        The names, those of standard input as they stand there.

    Raises:
        CheckpointError: There is none on standard input.
    """
    if files != ["-"]:
        return in_order(files)
    # Names may hold what else ends a line of text.
    lines = standard_input("names of checkpoints, one a line,").split("\n")
    return [line.removesuffix("\r") for line in lines if line.strip()]


def _check_apart(out: Path, sources: list[str]) -> None:
    """Refuse to write into a folder of checkpoints: the next run would read tables as models.

    Args:
        out: Folder of the results.
        sources: Names of the checkpoints.

    Raises:
        BadParameter: Error of Typer, where `out` is a folder of checkpoints, or one of them.
    """
    if os.path.realpath(out) not in map(os.path.realpath, sources):
        return
    if out.is_file():
        raise typer.BadParameter(f"--out {out} is a checkpoint that is compared: give a folder")
    raise typer.BadParameter(
        f"--out {out} is a folder of checkpoints that are compared, among which a run that "
        f"goes on would find its own result: give another, such as {out / 'pairs'}"
    )


@contextlib.contextmanager
def _executor(scheduler: str | None) -> Iterator[Any]:
    """A client of a Dask scheduler, None where no address is given."""
    if scheduler is None:
        yield None
        return
    from tnsim.errors import MissingExtra, TnsimError

    try:
        from distributed import Client
    except ImportError:
        raise MissingExtra("distributed", "dask", "--scheduler") from None
    try:
        client = Client(scheduler)
    except (OSError, ValueError, AssertionError) as error:  # errors of Dask for a bad address
        reason = str(error) or "not the address of a scheduler"
        raise TnsimError(
            f"--scheduler {scheduler!r}: {reason}; give one such as tcp://HOST:8786"
        ) from None
    with client:
        yield client
