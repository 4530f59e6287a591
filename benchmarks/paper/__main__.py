"""`python -m benchmarks.paper NAME`: an experiment of the paper, rerun and judged.

The parser, the messages and the exit status are those of `tnsim`. What an experiment needs is
imported when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.paper.experiment import PROGRAM
from tnsim import __main__ as process
from tnsim.cli import app as command_line
from tnsim.cli.options import JsonOption, check_outputs, print_json, say, stoppable

PAGE_FILE = "reproduction.md"
LAST_SEED = 10**9
"""The largest seed: random generators take 32 bits, and several seeds count from the given seed."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def rerun(
    name: Annotated[
        str | None, typer.Argument(help="An experiment, as --list shows them, or all.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="At the paper's settings; may take hours.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=LAST_SEED, help="Several seeds count from this one.")
    ] = 0,
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder of the results; run again with the same one to go on."),
    ] = Path("tnsim-paper"),
    checkpoints: Annotated[
        Path | None,
        typer.Option("--checkpoints", help="A folder of checkpoints to judge; trains nothing."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A folder of real data to train on.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Say which experiments there are, and stop.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Rerun an experiment of the paper and judge its claims.

    Stopped, it goes on where it was.
    """
    from benchmarks.paper import page
    from benchmarks.paper.experiment import NAMES, experiment

    if listed:
        _list([experiment(name) for name in NAMES], as_json)
        return
    if name is None:
        raise typer.BadParameter(f"name an experiment: {', '.join(NAMES)} or all")
    if name == "all" and (data or checkpoints):
        raise typer.BadParameter(
            "--data and --checkpoints belong to one experiment; name it instead of all"
        )
    names = list(NAMES) if name == "all" else [name]
    check_outputs({out / PAGE_FILE: page.PAGE})
    records: list[dict[str, Any]] = []
    for chosen in map(experiment, names):
        records += _run(chosen, full, out, seed, data, checkpoints, as_json)
    written = page.write(out, out / PAGE_FILE)
    if as_json:
        print_json({"experiments": records})
        return
    if len(records) > 1:
        say(page.score(records))
    say(f"wrote {written}, a page of all that is in {out}")


def _list(experiments: list[Any], as_json: bool) -> None:
    if as_json:
        rows = [
            {"name": described.name, "title": described.title, "where": described.where}
            for described in experiments
        ]
        print_json({"experiments": rows})
        return
    for described in experiments:
        say(f"{described.name:<12}{described.title} ({described.where})")
        if described.data:
            say(f"{'':<12}--data: {described.data}")
        if described.checkpoints:
            say(f"{'':<12}--checkpoints: {described.checkpoints}")


def _run(
    experiment: Any,
    full: bool,
    out: Path,
    seed: int,
    data: Path | None,
    checkpoints: Path | None,
    as_json: bool,
) -> list[dict[str, Any]]:
    """A single experiment at each of its settings."""
    from benchmarks.paper import page
    from benchmarks.paper.steps import reproduce, settings_of

    done = []
    for setting in settings_of(experiment, full):
        folder = out / experiment.name / setting
        with stoppable(f"what is finished is kept in {folder}, run again to go on"):
            record = reproduce(
                experiment,
                setting,
                folder,
                seed=seed,
                data=data,
                checkpoints=checkpoints,
                progress=not as_json,
            )
        done.append(record)
        if not as_json:
            say("\n".join(page.lines(record)))
            files = [*record["figures"], "claims.json"]
            say(f"wrote {', '.join(str(folder / file) for file in files)}\n")
    return done


def main() -> None:
    """Entry point.

    Raises:
        SystemExit: Always; its code is the exit status.
    """
    process.prepare()
    command_line.run(app, PROGRAM)


if __name__ == "__main__":
    main()
