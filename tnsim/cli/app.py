"""The command line. In: files. Out: text, JSON, pictures. Takes results, computes nothing itself.

Heavy imports happen inside the commands, so that `tnsim --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tnsim.cli import pairwise as cli_pairwise
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
from tnsim.errors import TnsimError, printable

if TYPE_CHECKING:
    from tnsim.models.model import Model

app = typer.Typer(
    help="Exact similarity of polynomial networks, from their weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(
    help="Measure cost, with a protocol.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench_app, name="bench")
app.command()(cli_pairwise.pairwise)

File = Annotated[Path, typer.Argument(help="Checkpoint: .safetensors, .npz, .pt or .pth.")]


def _model(file: Path, dialect: str | None, n_ctx: int | None = None) -> Model:
    """The model in one file; a folder or a pattern of names is refused."""
    from tnsim.checkpoints.load import read

    return read(file, dialect, n_ctx).model


@app.command()
def similarity(
    a: File,
    b: File,
    metric: MetricOption = MetricName.gaussian,
    slices: Annotated[
        bool, typer.Option("--slices", help="Also the cosine of every output coordinate.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Also a Monte-Carlo estimate from forward passes, with its error."
        ),
    ] = False,
    samples: Annotated[int, typer.Option(help="Samples of --check.")] = 65536,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --check.")] = 0,
    dialect: DialectOption = None,
    n_ctx: ContextOption = None,
    dtype: DtypeOption = DtypeName.float64,
    as_json: JsonOption = False,
) -> None:
    """Cosine of two models as functions."""
    import tnsim

    one, two = _model(a, dialect, n_ctx), _model(b, dialect, n_ctx)
    value = tnsim.similarity(one, two, metric_of(metric), dtype=dtype.value)
    found: dict[str, Any] = {
        "similarity": float(value),
        "metric": value.metric,
        "exact": value.exact,
        "dtype": dtype.value,
    }
    if slices:
        found["slices"] = tnsim.slices(one, two, metric_of(metric), dtype=dtype.value).tolist()
    if check:
        beside = tnsim.check(
            one, two, metric_of(metric), samples=samples, seed=seed, progress=not as_json
        )
        found["check"] = {
            name: float(getattr(beside, name))
            for name in ("estimate", "standard_error", "deviation", "samples", "seed")
        }
    if as_json:
        print_json({"a": str(a), "b": str(b), **found})
        return
    say(f"similarity  {value:.12g}")
    say(
        f"metric      {value.metric} ({'exact' if value.exact else 'approximation beyond one nonlinear layer'})"
    )
    if check:
        say(
            f"sampled     {beside.estimate:.6g} +- {beside.standard_error:.2g}, {beside.deviation:+.1f} standard errors away"
        )
    for n, x in enumerate(found.get("slices", [])):
        say(f"output {n:<5}{x:.12g}")


@app.command()
def inspect(
    file: File,
    dialect: DialectOption = None,
    n_ctx: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Layers, shapes, degree and legs of a checkpoint, and what was assumed in reading it."""
    from tnsim.checkpoints.load import read
    from tnsim.models.model import describe

    model, assumptions, dtypes = read(file, dialect, n_ctx)
    found = {
        "file": str(file),
        "layers": [describe(layer) for layer in model.layers],
        "inputs": model.d_in,
        "outputs": model.d_out,
        "n_ctx": model.n_ctx,
        "degree": model.degree,
        "legs": model.degree,
        "parameters": model.parameters,
        "stored_dtypes": list(dtypes),
        "assumptions": list(assumptions),
    }
    if as_json:
        print_json(found)
        return
    for n, line in enumerate(found["layers"]):
        say(f"layer {n:<6}{line}")
    say(
        f"degree      {model.degree}, so {model.degree} input legs of {model.d_in} (+ 1 constant) coordinates"
    )
    if model.attends or model.n_ctx is not None:
        say(
            f"sequences   {'of any length; comparing needs --n-ctx' if model.n_ctx is None else f'of {model.n_ctx} positions'}"
        )
    say(f"parameters  {model.parameters:,}, stored as {', '.join(dtypes)}")
    for line in assumptions:
        say(f"assumed     {line}")


@app.command()
def plan(
    a: File,
    b: File,
    metric: MetricOption = MetricName.gaussian,
    dialect: DialectOption = None,
    n_ctx: ContextOption = None,
    dtype: DtypeOption = DtypeName.float64,
    norms: Annotated[
        bool, typer.Option("--norms", help="Include the two norms that a cosine needs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """What one inner product would cost, without computing it."""
    import tnsim

    found = tnsim.plan(
        _model(a, dialect, n_ctx),
        _model(b, dialect, n_ctx),
        metric_of(metric),
        norms=norms,
        dtype=dtype.value,
    )
    if as_json:
        typer.echo(found.to_json())
        return
    say(str(found))
    say(
        f"\n{'piece':>5} {'runs':>5} {'contractions':>13} {'multiplications':>16}  inputs of the first run"
    )
    for n, piece in enumerate(found.pieces):
        stages = [s for s in found.stages if s.piece == n]
        inputs = ", ".join(stages[0].inputs[:4]) + (", ..." if len(stages[0].inputs) > 4 else "")
        say(
            f"{n:>5} {len(stages):>5} {piece.contractions:>13,} {piece.multiplications:>16,}  {inputs}"
        )


@app.command()
def convert(
    source: File,
    target: Annotated[Path, typer.Argument(help="Where to write, a .safetensors file.")],
    dialect: DialectOption = None,
) -> None:
    """Rewrite a checkpoint in tnsim's own format, safetensors with the architecture inside."""
    import tnsim

    model = _model(source, dialect)
    tnsim.save(model, target)
    say(f"{target}: {model}")


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the picture and the matrix.")
    ] = Path("tnsim-demo"),
) -> None:
    """Compare the shipped modular-addition checkpoints, all pairs, and draw the matrix."""
    import tnsim
    from tnsim.analysis import baselines, reading, report
    from tnsim.gram import export as exports

    series = tnsim.load(Path(__file__).parent.parent / "data" / "modular-addition")
    models, count = [series[0], series[-1]], len(series)
    say(
        f"{count} checkpoints of one network learning (a + b) mod 113, steps {series.labels[0]} to {series.labels[-1]}"
    )
    say(f"{models[-1]}\n")
    network = tnsim.network(models[-1])
    say(f"network: {network.num_tensors} tensors, tags {', '.join(sorted(network.tags))}\n")
    say(f"{tnsim.plan(models[0], models[-1])}\n")
    result = tnsim.pairwise(series, progress=True)
    result["weight_cosine"] = baselines.weight_cosine(series)
    phases = reading.segment(result, 3)
    out.mkdir(parents=True, exist_ok=True)
    result.tnsim.plot("heatmap", ["similarity", "weight_cosine"], phases.change_points).savefig(
        out / "similarity.png", dpi=150
    )
    exports.write_npz(result, out / "similarity.npz")
    page = report.write(result, out / "report.html", "Modular addition")
    say(f"\nwrote {out / 'similarity.png'}, {out / 'similarity.npz'} and {page}, a page to explore")
    first, middle, last = int(series.labels[0]), 400, int(series.labels[-1])
    at = lambda a, b: float(result.similarity.sel(a=a, b=b))  # noqa: E731
    say(
        "What is to be seen: three blocks along the diagonal, the steps that are still close to the initialisation, those that have "
        "memorised the training set, and the solution that generalises, each unlike the others "
        f"(similarity of step {first} to step {last}: {at(first, last):.2f}, of step {middle}: {at(middle, last):.2f}). "
        f"The best three phases start at steps {first}, {', '.join(map(str, phases.labels))}."
    )


@bench_app.command("depth")
def bench_depth(
    width: Annotated[int, typer.Option(help="Inputs and outputs of every layer.")] = 256,
    rank: Annotated[int, typer.Option(help="Hidden units of every layer.")] = 512,
    max_depth: Annotated[int, typer.Option(help="Depths are the powers of two up to this.")] = 64,
    dtype: DtypeOption = DtypeName.float64,
    repeats: Annotated[int, typer.Option(help="Warm calls per row; the median is reported.")] = 7,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for depth.json and depth.png.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Contraction cost by depth, beside the unrolled network and a hand-written recursion."""
    from tnsim.cli import bench

    depths = [2**n for n in range(max_depth.bit_length()) if 2**n <= max_depth]
    columns = (
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
    rows = []
    if not as_json:
        say(" ".join(f"{name:>{max(9, len(name) + 1)}}" for name in columns))
    for row in bench.depth_rows(width, rank, depths, dtype.value, repeats):
        rows.append(row)
        unrolled = row["unrolled_multiplications"]
        cells = (
            row["depth"],
            f"{row['multiplications']:,}",
            f"{row['multiplications'] / row['paper_multiplications']:.2f}x",
            f"{unrolled / row['multiplications']:.2f}x" if unrolled else "-",
            f"{row['peak_bytes'] / 2**20:.1f}",
            *(
                f"{row[name]:.2f}"
                for name in ("first_milliseconds", "milliseconds", "hand_milliseconds", "ratio")
            ),
        )
        if not as_json:
            say(
                " ".join(
                    f"{cell:>{max(9, len(name) + 1)}}"
                    for name, cell in zip(columns, cells, strict=True)
                )
            )
    result = {"width": width, "rank": rank, "dtype": dtype.value, "repeats": repeats, "rows": rows}
    if as_json:
        print_json(result)
    if out is not None:
        from tnsim.analysis import plots

        out.mkdir(parents=True, exist_ok=True)
        (out / "depth.json").write_text(json.dumps(result, indent=1) + "\n")
        title = f"<A|B> under TreeSymmetric, width {width}, rank {rank}, {dtype.value}"
        plots.depth(rows, title).savefig(out / "depth.png", dpi=150)


def main() -> None:
    """Entry point: every error becomes one line on stderr and exit status 2.

    With TNSIM_DEBUG=1 in the environment the traceback stands before it.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    warnings.showwarning = _warn
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("TNSIM_DEBUG") == "1":
            traceback.print_exc()
        _print_line(f"error: {_sentence(error)}")
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def _sentence(error: Exception) -> str:
    if said := getattr(error, "format_message", None):  # a wrong flag, in the parser's words
        return said()
    if isinstance(error, (TnsimError, OSError)):
        return str(error)
    kind = type(error).__name__
    return f"unforeseen {kind}: {error} (TNSIM_DEBUG=1 in the environment shows where)"


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    _print_line(f"{category.__name__}: {message}")


def _print_line(text: str) -> None:
    line = printable(" ".join(text.split()))
    print(f"tnsim: {line}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
