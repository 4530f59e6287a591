"""The program `tnsim`: commands on one file or two, and one line on stderr for every error.

Heavy imports happen inside the commands, so that `tnsim --help` answers at once. The docstring of a
command is the text that `--help` prints, and each option carries its own help.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tnsim.cli import commands, localise
from tnsim.cli import pairwise as pairwise_command
from tnsim.cli.options import (
    CentredOption,
    File,
    JsonOption,
    MetricOptions,
    ReadingOptions,
    SlicesOption,
    check_outputs,
    compiling_shown,
    flags_given,
    grouped,
    metric_of,
    named_path,
    networks_of,
    print_json,
    say,
)
from tnsim.errors import ModelError, TnsimError, printable
from tnsim.tables import guarantee

if TYPE_CHECKING:
    from tnsim.compare.numbers import Number
    from tnsim.compare.request import Estimate
    from tnsim.compare.similarity import Check
    from tnsim.models.model import Model, Origin

CHECKED = ("estimate", "standard_error", "deviation", "samples", "seed")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    import tnsim

    if wanted:
        say(f"tnsim {tnsim.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Which neural networks are the same function, and where a run changed.

    Exact from the weights where that can be, else an estimate that says so.
    """


def similarity(
    a: File,
    b: File,
    asked: MetricOptions = MetricOptions(),
    slices: SlicesOption = False,
    centred: CentredOption = False,
    check: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="SAMPLES",
            help="Also a Monte-Carlo estimate from so many forward passes, such as 65536, with "
            "its error.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of --check.", show_default="0")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            help="Compare MLP blocks of transformers by the paths of their modules, such as "
            "'h.5.mlp' or 'h.*.mlp', gain and bias of the norm folded into the first map. With "
            "--fit the states are those that enter the module, behind its norm.",
        ),
    ] = None,
    reading: ReadingOptions = ReadingOptions(),
    as_json: JsonOption = False,
) -> None:
    """Cosine of two models as functions."""
    import tnsim
    from tnsim.models.functions import is_function

    if seed is not None and check is None:
        raise ModelError("--seed is that of --check SAMPLES, which is not given: leave it out")
    if layers is not None:
        others = {"--check": check is not None, "--centred": centred}
        if given := flags_given(reading) + [flag for flag, used in others.items() if used]:
            raise ModelError(
                f"--layers reads blocks of transformers in known layouts, to which "
                f"{', '.join(given)} does not apply: leave it out"
            )
        _similarity_of_blocks(a, b, layers, asked, slices, as_json)
        return
    networks = networks_of(reading, asked.metric)
    one, two = networks.single(a), networks.single(b)
    chosen, dtype = metric_of(asked), asked.dtype
    options = {"centred": centred, "n_ctx": networks.n_ctx, "dtype": dtype}
    value, by_output = _compared(one, two, chosen, slices, options)
    sampled = None
    if check is not None:
        drawn: dict[str, Any] = {"samples": check, "seed": seed or 0, "progress": not as_json}
        sampled = tnsim.check(one, two, chosen, n_ctx=networks.n_ctx, centred=centred, **drawn)
    if as_json:
        files = {"a": a, "b": b}
        tier = None
        if not (is_function(one) or is_function(two)):
            tier = _tier(tnsim.plan(one, two, chosen, cosine=True, dtype=dtype))
        more = {"centred": centred, "tier": tier}
        print_json(files | _as_data(value, dtype, by_output, sampled) | more)
    else:
        _say_similarity(value, by_output, sampled, centred)


def _similarity_of_blocks(
    a: str,
    b: str,
    pattern: str,
    asked: MetricOptions,
    slices: bool,
    as_json: bool,
) -> None:
    """Cosines of the MLP blocks of two transformers that a pattern names, one after another."""
    import tnsim
    from tnsim.checkpoints.load import is_several

    for file in (a, b):
        if is_several(file):
            raise ModelError(
                f"{file}: stands for several checkpoints, where one is meant: name one of them, or "
                "compare all by `tnsim pairwise --parts mlp`"
            )
    metric, fit, dtype = metric_of(asked), asked.fit, asked.dtype
    # With fitted states the block is compared behind its norm, where the states were taken.
    norm = "fold" if fit is None else "leave"
    one, two = (tnsim.parts(file, "mlp", norm=norm) for file in (a, b))
    labels = one.matching(pattern)
    if not labels:
        raise ModelError(f"{a}: no MLP block is called {printable(pattern, 80)}; {one}")
    for label in labels:
        two.place(label)  # what is refused is refused before a line is printed
    results: dict[str, Any] = {}
    for n, label in enumerate(labels):
        first, second = one[label], two[label]
        value, by_output = _compared(first, second, metric, slices, {"dtype": dtype})
        results[label] = _as_data(value, dtype, by_output, None)
        if not as_json:
            if n == 0:
                entering = "the normalised stream, gain and bias of the norm folded"
                say(f"reads       {entering if fit is None else 'the output of the norm'}")
            say(label)
            _say_similarity(value, by_output, None)
    if as_json:
        print_json({"a": a, "b": b, "layers": results})


def _compared(
    a: Any, b: Any, metric: Any, slices: bool, options: dict[str, Any]
) -> tuple[Number, list[float] | None]:
    """The cosine of two models and, with `slices`, that of every output."""
    import tnsim

    with compiling_shown():
        value = tnsim.similarity(a, b, metric, **options)
        return value, tnsim.slices(a, b, metric, **options).tolist() if slices else None


def _as_data(
    value: Number, dtype: str, by_output: list[float] | None, sampled: Check | None
) -> dict[str, Any]:
    """The answer on two files, for JSON."""
    from tnsim.engine.runtime.devices import device

    answer: dict[str, Any] = {
        "similarity": float(value),
        "metric": value.metric,
        "exact": value.exact,
        "dtype": dtype,
        "device": device(),
        "caveats": list(value.caveats),
    }
    if by_output is not None:
        answer["slices"] = by_output
    if value.standard_error is not None:
        answer |= {"standard_error": float(value.standard_error), "inputs": value.inputs}
    if value.mean_share is not None:
        answer["mean_share"] = value.mean_share
    if sampled is not None:
        answer["check"] = {name: float(getattr(sampled, name)) for name in CHECKED}
    return answer


def _tier(estimate: Estimate) -> str | None:
    """The tier in which a plan of contractions runs; None where another route answers."""
    from tnsim.engine.runtime.execution import tier_in_use

    return None if estimate.contraction is None else tier_in_use()


def _say_similarity(
    value: Number,
    by_output: list[float] | None,
    sampled: Check | None,
    centred: bool = False,
) -> None:
    say(f"similarity  {value:.12g}")
    if value.standard_error is None:
        said = guarantee(value.exact)
    else:
        kind = "on" if value.exact else "an estimate on"
        said = f"{kind} {value.inputs:,} inputs, standard error {value.standard_error:.1g}"
    said += ", without means" if centred else ""
    say(f"metric      {value.metric} ({said})")
    if value.mean_share is not None and value.mean_share > 0.5:
        share = f"{100 * value.mean_share:.0f} % of the squared norm"
        say(f"means       {share}: --centred compares without them")
    if sampled is not None:
        estimate = f"{sampled.estimate:.6g} +- {sampled.standard_error:.2g}"
        say(f"sampled     {estimate}, {sampled.deviation:+.1f} standard errors away")
    for n, cosine in enumerate(by_output or ()):
        say(f"output {n:<5}{cosine:.12g}")


def inspect(
    file: File,
    reading: ReadingOptions = ReadingOptions(),
    as_json: JsonOption = False,
) -> None:
    """Layers, shapes and degree of a checkpoint, and what was assumed.

    Also names what reading it left out, and the types of the stored numbers.
    """
    from tnsim.models.model import Origin, describe

    networks = networks_of(reading)
    found, dtypes = networks.stored(file)
    origin = found.origin or Origin("")
    layers = [describe(layer) for layer in found.layers]
    if as_json:
        facts = {
            "file": file,
            "layers": layers,
            "inputs": found.d_in,
            "outputs": found.d_out,
            "n_ctx": found.n_ctx,
            "degree": found.degree if found.is_polynomial else None,
            "legs": found.degree if found.is_polynomial else None,
            "parameters": found.parameters,
            "stored_dtypes": list(dtypes),
            "assumptions": list(origin.assumptions),
            "ignored": list(origin.ignored),
            "caveats": list(origin.caveats),
        }
        print_json(facts)
    else:
        _say_model(found, dtypes, layers, origin)


def _say_model(model: Model, dtypes: Sequence[str], layers: Sequence[str], origin: Origin) -> None:
    for n, line in enumerate(layers):
        say(f"layer {n:<6}{line}")
    legs = f"{model.degree} input legs of {model.d_in} (+ 1 constant) coordinates"
    if model.is_polynomial:
        say(f"degree      {model.degree}, so {legs}")
    else:
        # A layer with an activation has infinite order.
        depth = sum(order > 1 for order in model.orders)
        road = "exact under a Gaussian" if depth == 1 else "compared on inputs"
        say(f"degree      none, as layers have activations; {depth} nonlinear, so {road}")
    if model.n_ctx is not None:
        say(f"sequences   of {model.n_ctx} positions")
    elif model.attends:
        say("sequences   of any length; comparing needs --n-ctx")
    say(f"parameters  {model.parameters:,}, stored as {', '.join(dtypes)}")
    for line in origin.assumptions:
        say(f"assumed     {line}")
    for name in origin.ignored:
        say(f"ignored     {name}")
    for line in origin.caveats:
        say(f"caveat      {line}")


def plan(
    a: File,
    b: File,
    asked: MetricOptions = MetricOptions(),
    cosine: Annotated[
        bool, typer.Option("--cosine", help="Include the two norms that a cosine needs.")
    ] = False,
    reading: ReadingOptions = ReadingOptions(),
    as_json: JsonOption = False,
) -> None:
    """The cost of a single inner product, without computing it."""
    import tnsim

    networks = networks_of(reading, asked.metric)
    one, two = networks.single(a), networks.single(b)
    options = {"n_ctx": networks.n_ctx, "cosine": cosine, "dtype": asked.dtype}
    planned = tnsim.plan(one, two, metric_of(asked), **options)
    if as_json:
        print_json(json.loads(planned.to_json()))
        return
    say(str(planned))
    contraction = planned.contraction
    if contraction is None:
        return
    tier = _tier(planned)
    note = "; the expected seconds are those of NumPy" if tier == "compile" else ""
    say(f"{'tier':<16} {tier}{note}")
    counts = f"{'program':>5} {'runs':>5} {'contractions':>13} {'multiplications':>16}"
    say(f"\n{counts}  inputs of the first run")
    for n, program in enumerate(contraction.programs):
        runs = [stage for stage in contraction.stages if stage.program == n]
        counts = f"{n:>5} {len(runs):>5} {program.contractions:>13,} {program.multiplications:>16,}"
        say(f"{counts}  {_first_names(runs[0].inputs)}")


def _first_names(names: tuple[str, ...]) -> str:
    shown = list(names[:4])
    if len(names) > 4:
        shown.append("...")
    return ", ".join(shown)


def convert(
    source: File,
    target: Annotated[
        Path, typer.Argument(parser=named_path, help="Where to write, a .safetensors file.")
    ],
    reading: ReadingOptions = ReadingOptions(),
) -> None:
    """Rewrite a checkpoint as safetensors of tnsim's own.

    These files have the architecture inside, and need no option to be read.
    """
    import tnsim
    from tnsim.checkpoints.native import OWN

    # The target is checked before a large checkpoint is read.
    check_outputs({target: OWN})
    networks = networks_of(reading)
    found = networks.single(source)
    tnsim.save(found, target)
    say(f"{printable(str(target))}: {found}")


# In the order of `tnsim --help`: what compares, what reads files, what helps.
for command in (
    similarity,
    pairwise_command.pairwise,
    localise.paths,
    localise.change,
    inspect,
    plan,
    convert,
    commands.demo,
    commands.info,
):
    app.command()(grouped(command))
app.add_typer(commands.bench, name="bench")


def main() -> None:
    """Entry point of `tnsim`.

    Raises:
        SystemExit: Always; its code is the exit status.
    """
    run(app, "tnsim")


def run(program: typer.Typer, name: str) -> None:
    """Run a program: every error becomes a single line on stderr and exit status 2.

    With TNSIM_DEBUG=1 in the environment the traceback is printed before the line.

    Args:
        program: The commands.
        name: Name of the program in its own help.

    Raises:
        SystemExit: Always; its code is the exit status.
    """
    # JAX would otherwise take most of a GPU's memory at its start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    warnings.showwarning = _warn
    if sys.stderr is None:  # closed by the parent process: messages go nowhere
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  open until the process ends
    for slow in ("tnsim.engine.search.paths", "tnsim.problems.at_points", "tnsim.long_work"):
        logging.getLogger(slow).setLevel(logging.INFO)
        logging.getLogger(slow).addHandler(_Lines())
    try:
        # without a name click takes that of the process, and completion is asked for under the name
        code = program(prog_name=name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the parser's; its message is the help
            typer.echo(_sentence(error), err=True)
            sys.exit(2)
        if os.environ.get("TNSIM_DEBUG") == "1":
            traceback.print_exc()
        _print_line(f"error: {_sentence(error)}")
        sys.exit(2)
    if not isinstance(code, int):
        code = 0
    sys.exit(code)


def _sentence(error: Exception) -> str:
    if said := getattr(error, "format_message", None):  # a wrong option, in the words of the parser
        return said()
    if isinstance(error, OSError) and error.strerror:  # without a name where stdout is full
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (TnsimError, OSError)):
        return str(error)
    if isinstance(error, MemoryError):
        return f"memory ran out: {error}; give the process more, or compare smaller networks"
    # An error that no code here foresaw; its class helps whoever reports it.
    kind = type(error).__name__
    return f"unforeseen {kind}: {error} (TNSIM_DEBUG=1 in the environment shows where)"


class _Lines(logging.Handler):
    """A handler that prints every record as a line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        _print_line(record.getMessage())


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    _print_line(f"{category.__name__}: {message}")


def _print_line(text: str) -> None:
    line = printable(" ".join(text.split()))
    print(f"tnsim: {line}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
