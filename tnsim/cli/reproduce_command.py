"""`tnsim reproduce`. In: the name of an experiment. Out: tables, claims, figures, pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tnsim.cli.options import JsonOption, check_outputs, print_json, say
from tnsim.cli.stopping import stoppable

PAGE = "reproduction.md"
LAST_SEED = 10**9
"""Random numbers begin from seeds of 32 bits, several of which count from the given seed."""


def reproduce(
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
    ] = Path("tnsim-reproduce"),
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
    from tnsim.reproduce import page, table
    from tnsim.reproduce.catalogue import NAMES, experiment

    if listed:
        _list([experiment(one) for one in NAMES], as_json)
        return
    if name is None:
        raise typer.BadParameter(f"name an experiment: {', '.join(NAMES)} or all")
    if name == "all" and (data or checkpoints):
        raise typer.BadParameter(
            "--data and --checkpoints belong to one experiment; name it instead of all"
        )
    names = list(NAMES) if name == "all" else [name]
    check_outputs({out / PAGE: page.PAGE})
    found: list[dict[str, Any]] = []
    for one in map(experiment, names):
        found += _run(one, full, out, seed, data, checkpoints, as_json)
    written = page.write(out, out / PAGE)
    if as_json:
        print_json({"experiments": found})
        return
    if len(found) > 1:
        say(table.score(found))
    say(f"wrote {written}, a page of all that is in {out}")


def _list(experiments: list[Any], as_json: bool) -> None:
    if as_json:
        rows = [{"name": one.name, "title": one.title, "where": one.where} for one in experiments]
        print_json({"experiments": rows})
        return
    for one in experiments:
        say(f"{one.name:<12}{one.title} ({one.where})")
        if one.data:
            say(f"{'':<12}--data: {one.data}")
        if one.checkpoints:
            say(f"{'':<12}--checkpoints: {one.checkpoints}")


def _run(
    experiment: Any,
    full: bool,
    out: Path,
    seed: int,
    data: Path | None,
    checkpoints: Path | None,
    as_json: bool,
) -> list[dict[str, Any]]:
    """One experiment at each of its settings."""
    from tnsim.reproduce import table
    from tnsim.reproduce.steps import reproduce, settings_of

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
            say("\n".join(table.lines(record)))
            files = [*record["figures"], "claims.json"]
            say(f"wrote {', '.join(str(folder / file) for file in files)}\n")
    return done
