"""`tnsim bench`. In: sizes. Out: tables, JSON and pictures of measured cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tnsim.cli.options import (
    DtypeName,
    DtypeOption,
    JsonOption,
    check_outputs,
    print_json,
    save_picture,
    say,
)
from tnsim.files import PNG, json_object, replacing

COLUMNS = (
    "depth",
    "multiplications",
    "of paper's",
    "unrolled",
    "peak MiB",
    "first ms",
    "warm ms",
    "by hand",
    "ratio",
)
JSON_FILE, PICTURE = "depth.json", "depth.png"
JSON = json_object("a measurement of tnsim bench", "rows")
TIMES = ("first_milliseconds", "milliseconds", "hand_milliseconds", "ratio")

app = typer.Typer(
    help="Measure cost, with a protocol.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _group() -> None:
    """Keeps `depth` a command of its own while there is no other."""


@app.command()
def depth(
    width: Annotated[int, typer.Option(min=1, help="Inputs and outputs of every layer.")] = 256,
    rank: Annotated[int, typer.Option(min=1, help="Hidden units of every layer.")] = 512,
    max_depth: Annotated[
        int, typer.Option(min=1, help="Depths are the powers of two up to this.")
    ] = 64,
    dtype: DtypeOption = DtypeName.float64,
    repeats: Annotated[
        int, typer.Option(min=1, help="Warm calls per row; the median is reported.")
    ] = 7,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for depth.json and depth.png.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Contraction cost by depth, beside the unrolled network and a hand-written recursion."""
    from tnsim.cli import bench

    if out is not None:
        check_outputs({out / JSON_FILE: JSON, out / PICTURE: PNG})
    depths = [2**n for n in range(max_depth.bit_length())]
    rows: list[dict[str, Any]] = []
    if not as_json:
        say(_line(COLUMNS))
    for row in bench.depth_rows(width, rank, depths, dtype.value, repeats):
        rows.append(row)
        if not as_json:
            say(_line(_cells(row)))
    result = {"width": width, "rank": rank, "dtype": dtype.value, "repeats": repeats, "rows": rows}
    if as_json:
        print_json(result)
    if out is not None:
        _write(result, out)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    ours = row["multiplications"]
    unrolled = "-"
    if row["unrolled_multiplications"]:
        unrolled = f"{row['unrolled_multiplications'] / ours:.2f}x"
    return (
        str(row["depth"]),
        f"{ours:,}",
        f"{ours / row['paper_multiplications']:.2f}x",
        unrolled,
        f"{row['peak_bytes'] / 2**20:.1f}",
        *(f"{row[name]:.2f}" for name in TIMES),
    )


def _line(cells: tuple[str, ...]) -> str:
    """One line of the table, each cell as wide as the name of its column, or nine characters."""
    widths = [max(9, len(name) + 1) for name in COLUMNS]
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _write(result: Mapping[str, Any], out: Path) -> None:
    from tnsim.analysis import plots

    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / JSON_FILE, JSON) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    sizes = f"width {result['width']}, rank {result['rank']}, {result['dtype']}"
    figure = plots.depth(result["rows"], f"<A|B> under TreeSymmetric, {sizes}")
    save_picture(figure, out / PICTURE)
