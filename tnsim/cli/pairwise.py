"""`tnsim pairwise`. In: files, folders, globs. Out: a store, csv, npz, parquet, text or JSON. Computes nothing itself."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tnsim.cli.options import (
    ContextOption,
    DialectOption,
    DtypeName,
    DtypeOption,
    JsonOption,
    MetricName,
    MetricOption,
    metric_of,
    print_json,
    say,
)

Files = Annotated[
    list[str],
    typer.Argument(
        help="Checkpoints: files, folders, globs, or one repository folder of a Hugging Face cache."
    ),
]


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
    metric: MetricOption = MetricName.gaussian,
    slices: Annotated[
        bool, typer.Option("--slices", help="Also the cosine of every output coordinate.")
    ] = False,
    dialect: DialectOption = None,
    n_ctx: ContextOption = None,
    dtype: DtypeOption = DtypeName.float64,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", help="Address of a Dask scheduler whose workers compute."),
    ] = None,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Also write DIR/pairs.parquet, one row a pair.")
    ] = False,
    plots: Annotated[
        bool, typer.Option("--plots", help="Also write heatmap.png, trajectory.png and mds.png.")
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
    """Similarity of all pairs of many checkpoints, or of some with others; killed, it goes on where it was."""
    import dataclasses

    import tnsim
    from tnsim.gram import export as exports

    models, others = (
        _series(files, dialect, n_ctx),
        _series(other, dialect, n_ctx) if other else None,
    )
    options: dict[str, Any] = {"slices": slices, "dtype": dtype.value}
    if dry_run:
        found = tnsim.plan_pairwise(models, metric_of(metric), others, **options)
        print_json(dataclasses.asdict(found)) if as_json else say(str(found))
        return
    if out is None:
        raise typer.BadParameter("give --out DIR, where results are kept, or --dry-run")
    with _stoppable(out / "store.zarr"), _executor(scheduler) as executor:
        result = tnsim.pairwise(
            models,
            metric_of(metric),
            others,
            **options,
            store=out / "store.zarr",
            executor=executor,
            progress=not as_json,
        )
    written = [out / "store.zarr", out / "similarity.csv", out / "result.npz"]
    exports.write_csv(result, written[1])
    exports.write_npz(result, written[2])
    if parquet:
        written.append(out / "pairs.parquet")
        exports.write_parquet(result, written[3])
    written += _looked_at(result, out if plots else None, report)
    if as_json:
        labels = {side: result[side].values.tolist() for side in ("a", "b")}
        print_json(
            {
                **labels,
                "similarity": result.similarity.values.tolist(),
                **result.attrs,
                "exact": bool(result.attrs["exact"]),
            }
        )
        return
    say(
        f"models      {result.sizes['a']} x {result.sizes['b']}, {result.attrs['duplicates']} with the weights of another"
    )
    say(
        f"metric      {result.attrs['metric']} ({'exact' if result.attrs['exact'] else 'approximation beyond one nonlinear layer'})"
    )
    say(f"route       {result.attrs['plan']}")
    say(f"wrote       {', '.join(map(str, written))}")


def _looked_at(result: Any, pictures: Path | None, page: Path | None) -> list[Path]:
    """Write what is to be looked at."""
    written = []
    if pictures is not None:
        for kind in ("heatmap", "trajectory", "mds") if result.attrs["symmetric"] else ("heatmap",):
            written.append(pictures / f"{kind}.png")
            result.tnsim.plot(kind).savefig(written[-1], dpi=150)
    if page is not None:
        from tnsim.analysis import report

        written.append(report.write(result, page))
    return written


def _series(files: list[str], dialect: str | None, n_ctx: int | None) -> Any:
    """A series of checkpoints, or one read lazily from the revisions in a hub cache."""
    import tnsim
    from tnsim.checkpoints import hub_cache as hub

    if len(files) == 1 and hub.is_cache(Path(files[0])):
        found = hub.revisions(Path(files[0]))
        return tnsim.Series(list(found.values()), dialect, n_ctx, names=tuple(found))
    return tnsim.Series(files, dialect, n_ctx)


class _Stopped(KeyboardInterrupt):
    """A signal that asks the process to end."""


@contextlib.contextmanager
def _stoppable(store: Path) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run in one line that says what is kept.

    The exit status is that of a shell, 128 + the number of the signal.
    """

    def stop(number: int, frame: Any) -> None:
        raise _Stopped(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    except _Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        typer.echo(
            f"tnsim: stopped by {number.name}: finished tiles are kept in {store}, "
            "run again to go on",
            err=True,
        )
        raise typer.Exit(128 + number) from None
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _executor(scheduler: str | None) -> Any:
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
    except (OSError, ValueError, AssertionError) as error:  # what Dask raises for a bad address
        reason = str(error) or "not the address of a scheduler"
        raise TnsimError(
            f"--scheduler {scheduler!r}: {reason}; give one such as tcp://HOST:8786"
        ) from None
    with client:
        yield client
