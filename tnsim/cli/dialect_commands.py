"""`tnsim dialect`. In: a checkpoint. Out: a template of its dialect, as JSON."""

from __future__ import annotations

from pathlib import Path

import typer

from tnsim.cli.options import File

app = typer.Typer(
    help="Describe the layout of foreign files.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _group() -> None:
    """Keeps `suggest` a command of its own while there is no other."""


@app.command()
def suggest(file: File) -> None:
    """Print a dialect to begin with, guessed from names and shapes.

    Write it to a file, mend it, and set "confirmed" to true in each guess that you know to be
    right: before that, --dialect is refused by all commands but inspect. Gates and plain linear
    layers in a row, which have activations in nearly all networks, are refused at once.
    """
    from tnsim.checkpoints.folders import located
    from tnsim.checkpoints.formats import contents
    from tnsim.checkpoints.guard import naming
    from tnsim.checkpoints.suggestions import suggest as suggested

    with naming(file):
        path = located(file)
        typer.echo(suggested(contents(path).state, Path(file).stem))
