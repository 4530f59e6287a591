"""`tnsim pairwise`: similarities of all pairs of checkpoints, as files, text or JSON.

The command computes nothing itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tnsim.cli.follow import Grown, followed
from tnsim.cli.options import (
    CentredOption,
    JsonOption,
    MetricOptions,
    ReadingOptions,
    SlicesOption,
    check_outputs,
    in_order,
    metric_of,
    networks_of,
    print_json,
    save_picture,
    say,
    standard_input,
    stoppable,
)
from tnsim.errors import StoreMismatch, printable
from tnsim.files import PNG, Kind

if TYPE_CHECKING:
    from tnsim.all_pairs.result import Pairwise
    from tnsim.checkpoints.load import Series
    from tnsim.circuits.parts import SeriesParts
    from tnsim.metrics.protocol import Metric

Files = Annotated[
    list[str],
    typer.Argument(
        help="Checkpoints: files, folders, globs, repositories or REPOSITORY@REVISION in a Hugging "
        "Face cache; - for names on standard input, one a line."
    ),
]
_PICTURES = ("heatmap", "trajectory", "mds", "parts")


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
            "--out", help="Folder of the results; run again with the same folder to go on."
        ),
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option("--other", help="Compare with these instead of all with all. Repeatable."),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            "--parts",
            help="Compare parts of transformers one by one: kinds, such as qk,ov,mlp,direct.",
        ),
    ] = None,
    distances: Annotated[
        str | None,
        typer.Option(
            "--distances",
            help="Positions by which keys of qk parts stand before queries.",
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
        typer.Option("--report", help="Also write one HTML page, to be opened offline."),
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
    if distances is not None and "qk" not in (parts or "").split(","):
        raise typer.BadParameter("--distances are those of --parts qk, which are not given")
    networks = networks_of(reading, asked.metric if parts is None else None)

    def models_of(names: Sequence[str | Path]) -> Any:
        if parts is None:
            return networks.several(names)
        return _parts_of(networks.series(names), parts, "1" if distances is None else distances)

    names = _names_in(files)
    models: Any = models_of(names) if follow is None else None
    others: Any = models_of(_names_in(other)) if other else None
    chosen = metric_of(asked)
    options: dict[str, Any] = {"other": others, "slices": slices, "centred": centred}
    options |= {"n_ctx": networks.n_ctx, "dtype": asked.dtype}
    if dry_run and parts is not None:
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
    store = _store_in(out, parts)
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


def _store_in(out: Path, parts: str | None) -> Path:
    """The store of a run in the folder of its results.

    Args:
        out: Folder of the results.
        parts: Kinds of parts that are compared, None for whole models.

    Returns:
        The path of the store.

    Raises:
        StoreMismatch: The folder holds results of the other kind, which the tables would replace.
    """
    from tnsim.all_pairs.store import WITHIN_RESULTS

    ours, theirs = (out / name for name in WITHIN_RESULTS)
    if parts is not None:
        ours, theirs = theirs, ours
    if theirs.exists():
        of_what = "parts" if parts is None else "whole models"
        raise StoreMismatch(
            f"{out}: holds the results of a run over {of_what}, kept in {theirs}; "
            "give another folder"
        )
    return ours


def _parts_of(series: Series, kinds: str, distances: str) -> SeriesParts:
    """The parts of checkpoints that options name.

    Args:
        series: Checkpoints.
        kinds: Kinds of parts, with commas between.
        distances: Distances of positions, with commas between.

    Returns:
        The parts of the checkpoints.

    Raises:
        BadParameter: Error of Typer, where a distance is no whole number.
        ModelError: The checkpoints have no such parts.
    """
    import tnsim

    try:
        numbers = [int(number) for number in distances.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--distances lists whole numbers, such as 1,2,4, found {distances!r}"
        ) from None
    return tnsim.parts(series, kinds.split(","), distances=numbers)


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
    data["similarity"] = result.similarity.values.tolist()
    # Files keep the flag as a number, and JSON has booleans.
    print_json(data | result.attrs | {"exact": bool(result.attrs["exact"])})


def _say_result(result: Pairwise, written: list[Path]) -> None:
    from tnsim.analysis.summary import certainty, findings
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
    say(f"wrote       {', '.join(map(str, written))}")


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
