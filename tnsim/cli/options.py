"""Options, metrics, inputs and outputs that several commands share, and the handling of signals."""

from __future__ import annotations

import codecs
import enum
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tnsim.errors import CheckpointError, ModelError, printable
from tnsim.files import PNG, Kind, check_replaceable, regular, replacing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from tnsim.checkpoints.load import Checkpoint, Series


File = Annotated[
    Path,
    typer.Argument(
        help="Checkpoint: .safetensors, .npz, .pt, .pth or .ckpt, a folder with model.safetensors, "
        "or REPOSITORY@REVISION in the local hub cache."
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--n-ctx", help="Length of the sequences on which models with attention are compared."
    ),
]
LeaveOutOption = Annotated[
    list[str] | None,
    typer.Option(
        "--leave-out",
        help="Pattern of tensors, a norm or a bias, that are knowingly not read; every result says "
        "so. Repeatable.",
    ),
]
NormInputsOption = Annotated[
    Path | None,
    typer.Option(
        "--norm-inputs",
        help="Inputs (.npy or .npz) at whose mean energy norms become constants.",
    ),
]
FitOption = Annotated[
    Path | None,
    typer.Option(
        "--fit", help="Inputs (.npy or .npz) from which the metric takes its mean and covariance."
    ),
]
InputsOption = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        help="Inputs of --metric empirical (.npy or .safetensors): vectors, sequences of vectors, "
        "or token ids.",
    ),
]
SlicesOption = Annotated[
    bool, typer.Option("--slices", help="Also the cosine of every output coordinate.")
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check", help="Also a Monte-Carlo estimate from forward passes, with its error."
    ),
]
OtherOption = Annotated[
    list[str] | None,
    typer.Option("--other", help="Compare with these instead of all with all. Repeatable."),
]
PartsOption = Annotated[
    str | None,
    typer.Option(
        "--parts", help="Compare parts of transformers one by one: kinds, such as qk,ov,mlp,direct."
    ),
]
DistancesOption = Annotated[
    str,
    typer.Option("--distances", help="Positions by which keys of qk parts stand before queries."),
]
PlotsOption = Annotated[
    bool,
    typer.Option(
        "--plots", help="Also write heatmap.png, trajectory.png and mds.png; of parts, parts.png."
    ),
]
ReportOption = Annotated[
    Path | None, typer.Option("--report", help="Also write one HTML page, to be opened offline.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


class MetricName(enum.StrEnum):
    """Names of metrics on the command line."""

    gaussian = "gaussian"
    closure = "closure"
    symmetric = "symmetric"
    tree = "tree"
    frobenius = "frobenius"
    categorical = "categorical"
    empirical = "empirical"


class DtypeName(enum.StrEnum):
    """Precisions of a computation on the command line."""

    float64 = "float64"
    float32 = "float32"


def _presets() -> list[str]:
    """Names of presets, which the shell completes."""
    from tnsim.checkpoints.dialects import PRESETS

    return list(PRESETS)


MetricOption = Annotated[
    MetricName,
    typer.Option(
        "--metric",
        help="gaussian: E<A(x),B(x)>, exact. closure: the same layer by layer, linear in depth. "
        "symmetric: all legs symmetrised. tree: each layer's legs. frobenius: raw tensors. "
        "categorical: uniform one-hot tokens, exact for one attention layer. "
        "empirical: forward passes on --inputs, of any network.",
    ),
]
DialectOption = Annotated[
    str | None,
    typer.Option(
        "--dialect",
        help="Layout of foreign files: a preset, a JSON file, or - for JSON on standard input.",
        autocompletion=_presets,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The nn.Module whose weights the files hold, as FILE.py:NAME or package.module:NAME: "
        "a module, or a class or function that makes one without arguments. The code runs.",
    ),
]
ExampleOption = Annotated[
    Path | None,
    typer.Option(
        "--example", help="Example of the argument of --model (.npy or .npz), a batch of it."
    ),
]
DtypeOption = Annotated[DtypeName, typer.Option("--dtype", help="Precision of the computation.")]


@dataclass(frozen=True)
class Networks:
    """How the files that a command names become networks.

    Args:
        reader: A dialect, or a module whose state dicts the files hold; None where files say
            themselves what they hold.
        example: Example of the module's argument, or None.
        n_ctx: Length of sequences.
        leave_out: Patterns of tensors that are knowingly not read.
        norm_inputs: Inputs at whose mean energy norms become constants.
        run_as_they_are: Whether files become copies of the module, which run on inputs, instead of
            models.
    """

    reader: Any = None
    example: Any = None
    n_ctx: int | None = None
    leave_out: tuple[str, ...] = ()
    norm_inputs: Any = None
    run_as_they_are: bool = False

    def single(self, file: Path) -> Any:
        """The network of a name; a folder of several models is refused."""
        from tnsim.checkpoints.load import modules_of

        if self.run_as_they_are:
            ((_, module),) = modules_of([file], self.reader).items()
            return module
        return self.stored(file).model

    def stored(self, file: Path) -> Checkpoint:
        """The model of a name, with the types of its numbers."""
        from tnsim.checkpoints.load import read

        known = (self.reader, self.n_ctx, self.leave_out, self.norm_inputs)
        return read(file, *known, inputs=self.example)

    def series(self, files: Sequence[str | Path]) -> Series:
        """The checkpoints that names stand for, as models."""
        import tnsim

        return tnsim.Series(
            files,
            self.reader,
            self.n_ctx,
            leave_out=self.leave_out,
            norm_inputs=self.norm_inputs,
            inputs=self.example,
        )

    def several(self, files: Sequence[str | Path]) -> Series | dict[str, Any]:
        """The checkpoints that names stand for, as models or as modules."""
        from tnsim.checkpoints.load import modules_of

        return modules_of(files, self.reader) if self.run_as_they_are else self.series(files)


def networks_of(
    dialect: str | None,
    module: str | None,
    example: Path | None,
    n_ctx: int | None,
    leave_out: list[str] | None = None,
    norm_inputs: Path | None = None,
    metric: MetricName | None = None,
) -> Networks:
    """How the files of a command are read, as its options say.

    Args:
        dialect: A preset, the path of a JSON file, or "-" for standard input.
        module: FILE.py:NAME or package.module:NAME.
        example: A file with an example of the module's argument.
        n_ctx: Length of sequences.
        leave_out: Patterns of tensors that are knowingly not read.
        norm_inputs: A file of inputs.
        metric: Metric of the comparison, where it may run modules as they are.

    Returns:
        The networks. Under `empirical` a module runs as it is.

    Raises:
        CheckpointError: A file cannot be read, or the code of the module fails.
        ModelError: Options do not go together.
    """
    from tnsim.checkpoints.dialects import Dialect
    from tnsim.checkpoints.load import find_dialect

    inputs = None if norm_inputs is None else samples_in(norm_inputs)
    if module is None:
        if example is not None:
            raise ModelError(
                "--example is an example of the argument of a module: give --model FILE.py:NAME"
            )
        chosen: Any = None
        if dialect == "-":
            chosen = Dialect.from_json(standard_input("a dialect"))
        elif dialect is not None:
            chosen = find_dialect(dialect)
        return Networks(chosen, None, n_ctx, tuple(leave_out or ()), inputs)
    from tnsim.cli.user_modules import module_at

    if dialect is not None:
        raise ModelError(
            "--dialect and --model both say what the files hold: give the module, which says more"
        )
    as_it_is = metric is MetricName.empirical
    if as_it_is:
        unread = {
            "--example": example,
            "--n-ctx": n_ctx,
            "--leave-out": leave_out,
            "--norm-inputs": norm_inputs,
        }
        given = [name for name, value in unread.items() if value]
        if given:
            raise ModelError(
                f"--metric empirical runs the module as it is, on --inputs, to which "
                f"{', '.join(given)} does not apply: leave it out"
            )
    given_example = None if example is None else samples_in(example)
    settings = (n_ctx, tuple(leave_out or ()), inputs, as_it_is)
    return Networks(module_at(module), given_example, *settings)


def standard_input(what: str) -> str:
    """The text on standard input, which can be read once.

    Args:
        what: Words for the expected text, for messages.

    Returns:
        The text.

    Raises:
        CheckpointError: Where the text is empty.
    """
    data = b"" if sys.stdin is None else sys.stdin.buffer.read()
    # Windows' shells begin with a mark of the encoding; bytes that are no text may name files.
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    reading = ("utf-16", "replace") if is_wide else ("utf-8-sig", "surrogateescape")
    text = data.decode(*reading)
    if not text.strip():
        raise CheckpointError(
            f"- stands for {what} on standard input, which is empty; it can be read for one - only"
        )
    return text


def metric_of(name: MetricName, fit: Path | None = None, inputs: Path | None = None) -> Any:
    """The metric of a name, with its default moments or the moments of samples.

    Args:
        name: Name of the metric.
        fit: A file of inputs, for the Gaussian metrics.
        inputs: A file of inputs, for `empirical`.

    Returns:
        A metric.

    Raises:
        ModelError: Where samples are given for a metric without moments to fit, inputs for another
            metric than `empirical`, or none for `empirical`.
        CheckpointError: Where the file cannot be read.

    Example:
        >>> metric_of(MetricName.tree)
        TreeSymmetric()
    """
    import tnsim

    # Either without the other would be ignored in silence.
    if (name is MetricName.empirical) != (inputs is not None):
        raise ModelError(
            f"--metric {name.value} and "
            + ("no --inputs" if inputs is None else f"--inputs {inputs}")
            + ": forward passes need both, --metric empirical --inputs FILE, a .npy or "
            ".safetensors file of vectors or token ids; --fit takes moments from inputs"
        )
    classes = (
        tnsim.Gaussian,
        tnsim.GaussianClosure,
        tnsim.Symmetric,
        tnsim.TreeSymmetric,
        tnsim.Frobenius,
        tnsim.Categorical,
    )
    by_name: dict[str, Any] = {cls.name: cls for cls in (*classes, tnsim.Empirical)}
    cls = by_name[name.value]
    if fit is None:
        return cls() if inputs is None else cls(inputs)
    if not hasattr(cls, "fit"):
        raise ModelError(
            f"--fit takes mean and covariance from samples, which metric {name.value} has not; "
            "use gaussian or closure"
        )
    return cls.fit(samples_in(fit))


def samples_in(file: Path) -> np.ndarray:
    """The single array in a NumPy file.

    Args:
        file: Path of a .npy file, or of a .npz file with a single array inside.

    Returns:
        The array.

    Raises:
        CheckpointError: Where there is no such file, or the file holds something else.
    """
    import numpy as np

    from tnsim.checkpoints.formats import contents
    from tnsim.checkpoints.guard import naming, refusing

    with naming(file), refusing("cannot be read as inputs"):
        if file.suffix != ".npz":
            with regular(file) as data:
                np.lib.format.read_magic(data)  # no pickle, whatever the name of the file
            return np.array(np.load(file, mmap_mode="r", allow_pickle=False))
        arrays = contents(file).tensors
        if len(arrays) != 1:
            raise CheckpointError(f"must hold one array of inputs, found {len(arrays)}")
        return arrays[0].tensor


def check_outputs(outputs: Mapping[Path, Kind], store: Path | None = None) -> None:
    """Refuse outputs that could not be written, before anything is computed.

    Args:
        outputs: The files that a command will write, with the kind of each.
        store: Folder that the command writes and that holds nothing else.

    Raises:
        BadParameter: Error of Typer, where a file of another kind stands in the place of an output,
            where a file stands in the place of a folder, where two outputs are one file, or where
            one is to lie in another or in the store.
    """
    places = {} if store is None else {os.path.realpath(store): store}
    for path, kind in outputs.items():
        # Two names of the same file would overwrite each other.
        place = os.path.realpath(path)
        if (other := places.setdefault(place, path)) is not path:
            raise typer.BadParameter(f"{path} is the same file as {other}; give another path")
        try:
            # Folders that are missing are made later, so the nearest one that exists decides.
            above = next((above for above in Path(place).parents if above.exists()), Path(place))
            if not above.is_dir():
                raise NotADirectoryError(0, f"{above} is no folder")
            check_replaceable(path, kind)
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror}") from None
    for place, path in places.items():
        if above := next((above for above in Path(place).parents if str(above) in places), None):
            raise typer.BadParameter(
                f"{path} would lie in {places[str(above)]}, which is another output; give another "
                "path"
            )


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure as PNG, as a whole or not at all.

    Args:
        figure: Figure of matplotlib.
        path: Path of the picture; no file but a picture is replaced.
    """
    with replacing(path, PNG) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


def guarantee(exact: bool) -> str:
    """The relation of a number to the true similarity, in words.

    Args:
        exact: Whether the result calls itself exact.

    Returns:
        Words to be put in brackets.

    Example:
        >>> guarantee(True)
        'exact'
    """
    if exact:
        return "exact"
    return "approximation beyond one nonlinear layer"


def say(text: str) -> None:
    """Print lines that may hold names out of files, as a terminal may show them.

    Args:
        text: Text of one line or several.

    Example:
        >>> say("a name with\\ta tab")
        a name with\\ta tab
    """
    for line in text.split("\n"):
        typer.echo(printable(line))


def print_json(data: dict[str, Any]) -> None:
    """Print one object and nothing else.

    Args:
        data: Object of values that JSON can hold.

    Example:
        >>> print_json({"similarity": 1.0})
        {"similarity": 1.0}
    """
    typer.echo(json.dumps(data))


@contextmanager
def compiling_shown() -> Iterator[None]:
    """Show on a terminal how many programs are compiled, as long as compiling lasts."""
    from tqdm.auto import tqdm

    from tnsim.engine.runtime.compiling import reporting

    bar_format = "{desc} [{elapsed}]"
    with tqdm(disable=None, leave=False, delay=1, bar_format=bar_format) as bar:

        def report(done: int, total: int) -> None:
            bar.set_description_str(f"compiling {min(done + 1, total)} of {total}")

        with reporting(report):
            yield


class Stopped(KeyboardInterrupt):
    """A signal that asks the process to end."""


@contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """End a run at Ctrl-C or SIGTERM with a single line that says which results are kept.

    The exit status is that of a shell, 128 + the number of the signal.

    Args:
        kept: Words on the kept results, the rest of the line.

    Raises:
        Exit: Exit of Typer, after a signal.

    Example:
        >>> with stoppable("finished tiles are kept in out, run again to go on"):
        ...     pass
    """

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    # The handlers of the caller come back at the end.
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    except Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        typer.echo(f"tnsim: stopped by {number.name}: {kept}", err=True)
        # The exit status that shells give for a signal.
        raise typer.Exit(128 + number) from None
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
