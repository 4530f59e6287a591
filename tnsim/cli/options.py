"""Options, metrics, inputs and outputs that several commands share, and the handling of signals.

An option may name a module of PyTorch in the user's own code.
"""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, TypeAlias

import typer

from tnsim.errors import (
    CheckpointError,
    ModelError,
    ResultError,
    UnsupportedLayer,
    printable,
    require,
)
from tnsim.files import PNG, Kind, check_replaceable, regular, replacing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from tnsim.checkpoints.load import Checkpoint, Reading, Series


# A text, as an empty one would be the present folder as a path.
File = Annotated[
    str,
    typer.Argument(
        help="Checkpoint: .safetensors, .npz, .pt, .pth or .ckpt, a folder with model.safetensors, "
        "or REPOSITORY@REVISION in the local hub cache."
    ),
]
CentredOption = Annotated[
    bool,
    typer.Option("--centred", help="Compare functions without their means over the inputs."),
]
SlicesOption = Annotated[
    bool, typer.Option("--slices", help="Also the cosine of every output coordinate.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


MetricName: TypeAlias = Literal[
    "gaussian", "closure", "symmetric", "tree", "frobenius", "categorical", "empirical"
]
DtypeOption = Annotated[
    Literal["float64", "float32"], typer.Option("--dtype", help="Precision of the computation.")
]
_Command: TypeAlias = Callable[..., None]
_OBJECTS: ContextVar[TextIO | None] = ContextVar("_OBJECTS", default=None)
"""Where `print_json` writes; None for the standard output."""
_AGAIN = 0.05
"""Seconds after which a signal that was dropped is sent again."""


log: logging.Logger = logging.getLogger(__name__)


def named_path(name: str | Path) -> Path:
    """The path that an option names, which is the parser of all options with paths.

    Args:
        name: Text on the command line, or the default of the option. A leading `~` is the home of
            the user: shells leave it as it is behind the equals sign of `--out=~/runs`.

    Returns:
        The path.

    Raises:
        BadParameter: Error of Typer, where the text is empty, as that of a variable of a shell that
            is not set, or a dash, which elsewhere stands for standard input or output.

    Example:
        >>> named_path("results").name
        'results'
    """
    if name == "":
        raise typer.BadParameter("the path is empty; '.' is the present folder")
    if name == "-":
        raise typer.BadParameter("- is no standard input or output here; ./- is a file called so")
    return Path(os.path.expanduser(name))  # unlike a Path's own, without an error for no user


def _presets() -> list[str]:
    """Names of presets, which the shell completes."""
    from tnsim.checkpoints.dialects import PRESETS

    return list(PRESETS)


@dataclass(frozen=True)
class ReadingOptions:
    """How the files of a command are read, an option for each field."""

    dialect: Annotated[
        str | None,
        typer.Option(
            help="Layout of foreign files: a preset, a JSON file, or - for JSON on standard input.",
            autocompletion=_presets,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="The nn.Module whose weights the files hold, as FILE.py:NAME or "
            "package.module:NAME: a module, or a class or function that makes one without "
            "arguments. The code runs.",
        ),
    ] = None
    example: Annotated[
        Path | None,
        typer.Option(
            parser=named_path,
            help="Example of the argument of --model (.npy or .npz), a batch of it.",
        ),
    ] = None
    n_ctx: Annotated[
        int | None,
        typer.Option(help="Length of the sequences on which models with attention are compared."),
    ] = None
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Pattern of tensors, a norm or a bias, that are knowingly not read; every result "
            "says so. Repeatable.",
        ),
    ] = None
    norm_inputs: Annotated[
        Path | None,
        typer.Option(
            parser=named_path,
            help="Inputs (.npy or .npz) at whose mean energy norms become constants.",
        ),
    ] = None


@dataclass(frozen=True)
class MetricOptions:
    """The metric of a command and its precision, an option for each field."""

    metric: Annotated[
        MetricName,
        typer.Option(
            metavar="NAME",
            help="gaussian: E<A(x),B(x)>, exact for polynomials and one layer with an activation, "
            "else estimated. closure: the same layer by layer, linear in "
            "depth. symmetric: all legs symmetrised. tree: each layer's legs. frobenius: raw "
            "tensors. categorical: uniform one-hot tokens, exact for one attention layer. "
            "empirical: forward passes on --inputs, of any network.",
        ),
    ] = "gaussian"
    fit: Annotated[
        Path | None,
        typer.Option(
            parser=named_path,
            help="Inputs (.npy or .npz) from which a Gaussian takes mean and covariance.",
        ),
    ] = None
    inputs: Annotated[
        Path | None,
        typer.Option(
            parser=named_path,
            help="Inputs of --metric empirical (.npy or .safetensors): vectors, sequences of "
            "vectors, or token ids.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Samples of --metric categorical, for more than one attention layer; of gaussian, "
            "normal inputs where networks have no exact number (0 refuses them).",
        ),
    ] = None
    dtype: DtypeOption = "float64"


def grouped(command: _Command) -> _Command:
    """A command whose parameters may be groups of options, dataclasses as the two above.

    Args:
        command: Function of the command. A parameter of the type of a group stands for all of its
            fields, which the parser sees as options of their own names.

    Returns:
        The function with the options in place of the groups.

    Example:
        >>> @grouped
        ... def show(file: File, reading: ReadingOptions) -> None:
        ...     print(reading.n_ctx)
        >>> list(inspect.signature(show).parameters)[:3]
        ['file', 'dialect', 'model']
        >>> show(file="a.npz", **dataclasses.asdict(ReadingOptions(n_ctx=4)))
        4
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        fields = [parameter]
        if dataclasses.is_dataclass(group) and isinstance(group, type):
            fields = list(inspect.signature(group, eval_str=True).parameters.values())
            groups[parameter.name] = group, [field.name for field in fields]
        options += [field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in fields]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, (group, fields) in groups.items():
            given[name] = group(**{field: given.pop(field) for field in fields})
        with _object_alone() if given.get("as_json") else nullcontext():
            command(**given)

    run.__annotations__ = {}
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def flags_given(reading: ReadingOptions) -> list[str]:
    """The options that say how files are read and were given, as they are written.

    Args:
        reading: Options of a command.

    Returns:
        Flags in the order of the fields.

    Example:
        >>> flags_given(ReadingOptions(model="net.py:Net", n_ctx=4))
        ['--model', '--n-ctx']
    """
    values = dataclasses.asdict(reading)
    given = [name for name, value in values.items() if value is not None and value != []]
    return [f"--{name.replace('_', '-')}" for name in given]


@dataclass(frozen=True)
class Networks:
    """How the files that a command names become networks.

    Args:
        reading: How they are read as models.
        example: Example of the argument of a module by which they are read, or None.
        run_as_they_are: Whether files become copies of the module, which run on inputs, instead of
            models.
        run_folders: Whether folders of Hugging Face that are no models run on inputs, as networks
            of its library.
    """

    reading: Reading
    example: Any = None
    run_as_they_are: bool = False
    run_folders: bool = False

    @property
    def n_ctx(self) -> int | None:
        """Length of sequences that a verb is told, as what runs has none by its reading."""
        return self.reading.n_ctx if self.run_as_they_are else None

    def single(self, file: str) -> Any:
        """The network of a name; a folder of several models is refused."""
        from tnsim.checkpoints.given import read_model
        from tnsim.checkpoints.load import modules_of

        if self.run_as_they_are:
            (function,) = modules_of([file], self.reading.dialect).values()
            return function.module
        return read_model(file, None, True) if self.run_folders else self.stored(file).model

    def stored(self, file: str) -> Checkpoint:
        """The model of a name, with the types of its numbers."""
        from tnsim.checkpoints.load import read

        return read(file, *self.reading, inputs=self.example)

    def series(self, files: Sequence[str | Path]) -> Series:
        """The checkpoints that names stand for, as models."""
        import tnsim

        return tnsim.Series(files, **self.reading._asdict(), inputs=self.example)

    def several(self, files: Sequence[str | Path]) -> Series | dict[str, Any]:
        """The checkpoints that names stand for, as models or as modules."""
        from tnsim.checkpoints.given import folders_of_networks, networks_of_folders
        from tnsim.checkpoints.load import modules_of

        if self.run_as_they_are:
            return modules_of(files, self.reading.dialect)
        if self.run_folders and (folders := folders_of_networks(list(files))):
            return networks_of_folders(folders)
        return self.series(files)


def networks_of(
    reading: ReadingOptions, metric: MetricName | None = None, on_inputs: bool = False
) -> Networks:
    """How the files of a command are read, as its options say.

    Args:
        reading: The options.
        metric: Metric of the comparison, where it may run modules as they are.
        on_inputs: Whether there are inputs of the user's, on which also a module runs whose inputs
            are not known.

    Returns:
        The networks. Under `empirical` a module runs as it is, and so do folders of Hugging Face,
        and a module without an exact inner product under `gaussian`.

    Raises:
        CheckpointError: A file cannot be read, or the code of the module fails.
        ModelError: Options do not go together.
    """
    from tnsim.checkpoints.dialects import Dialect
    from tnsim.checkpoints.load import Reading, find_dialect

    inputs = None if reading.norm_inputs is None else samples_in(reading.norm_inputs)
    known = (reading.n_ctx, tuple(reading.leave_out or ()), inputs)
    if reading.model is None:
        if reading.example is not None:
            raise ModelError(
                "--example is an example of the argument of a module: give --model FILE.py:NAME"
            )
        chosen: Any = None
        if reading.dialect == "-":
            chosen = Dialect.from_json(standard_input("a dialect"))
        elif reading.dialect is not None:
            chosen = find_dialect(reading.dialect)
        run_folders = metric == "empirical" and not flags_given(reading)
        return Networks(Reading(chosen, *known), run_folders=run_folders)

    if reading.dialect is not None:
        raise ModelError(
            "--dialect and --model both say what the files hold: give the module, which says more"
        )
    as_it_is = metric == "empirical"
    unread = [flag for flag in flags_given(reading) if flag != "--model"]
    if as_it_is and unread:
        raise ModelError(
            f"--metric empirical runs the module as it is, on --inputs, to which "
            f"{', '.join(unread)} does not apply: leave it out"
        )
    module = module_at(reading.model)
    if metric == "gaussian" and unread in ([], ["--n-ctx"]):
        from tnsim.checkpoints.given import given_model
        from tnsim.models.functions import is_module

        try:
            as_it_is = is_module(given_model(module, reading.n_ctx, runs=True))
        except (UnsupportedLayer, ModelError):  # no layers, or none that say what they read
            if not on_inputs:
                raise
            as_it_is = True
    example = None if reading.example is None else samples_in(reading.example)
    return Networks(Reading(module, *known), example, as_it_is)


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


def metric_of(options: MetricOptions) -> Any:
    """The metric that options name, with its default moments or the moments of samples.

    Args:
        options: Name of the metric and the files that belong to it.

    Returns:
        A metric.

    Raises:
        ModelError: Where samples are given for a metric without moments to fit, inputs for another
            metric than `empirical`, or none for `empirical`, or a number of samples for another
            metric than `categorical` and `gaussian`.
        CheckpointError: Where the file cannot be read.

    Example:
        >>> metric_of(MetricOptions("tree"))
        TreeSymmetric()
    """
    import tnsim
    from tnsim.metrics.metric import METRICS

    name, fit, inputs, samples = options.metric, options.fit, options.inputs, options.samples
    # Either without the other would be ignored in silence.
    if (name == "empirical") != (inputs is not None):
        raise ModelError(
            f"--metric {name} and "
            + ("no --inputs" if inputs is None else f"--inputs {inputs}")
            + ": forward passes need both, --metric empirical --inputs FILE, a .npy or "
            ".safetensors file of vectors or token ids; --fit takes moments from inputs"
        )
    if samples is not None and name not in ("categorical", "gaussian"):
        raise ModelError(f"--samples are those of --metric categorical or gaussian, found {name}")
    cls: Any = tnsim.Empirical if inputs is not None else METRICS[name]
    if fit is not None and not hasattr(cls, "fit"):
        raise ModelError(
            f"--fit takes mean and covariance from samples, which metric {name} has not; "
            "use gaussian or closure"
        )
    if fit is not None:
        fitted = cls.fit(samples_in(fit))
        return fitted if samples is None else dataclasses.replace(fitted, samples=samples)
    if inputs is not None:
        return cls(inputs)
    return cls() if samples is None else cls(samples=samples)


def in_order(names: list[str]) -> list[str]:
    """Names of checkpoints by their numbers, where a shell has sorted them by their letters.

    A shell writes `step_*.pt` out as step_0, step_100, step_20. Any other order is the user's own,
    and so is that of folders.

    Args:
        names: Names as they stand in the command.

    Returns:
        The names, those of one folder in the order of a run.

    Example:
        >>> in_order(["a/1.pt", "a/10.pt", "a/2.pt", "b/3.pt"])
        ['a/1.pt', 'a/2.pt', 'a/10.pt', 'b/3.pt']
        >>> in_order(["run/1/net.pt", "run/10/net.pt", "run/2/net.pt"])
        ['run/1/net.pt', 'run/2/net.pt', 'run/10/net.pt']
        >>> in_order(["10.pt", "2.pt", "1.pt"])
        ['10.pt', '2.pt', '1.pt']
    """
    from tnsim.checkpoints.load import natural

    def letters(name: str) -> str:  # that decide first in most languages
        return re.sub(r"[\W_]", "", name).casefold()

    if names not in (sorted(names), sorted(names, key=letters)):
        return names
    folders = [list(group) for _, group in itertools.groupby(names, lambda name: Path(name).parent)]
    if len({Path(name).name for name in names}) == 1:
        folders = [names]
    return [name for each in folders for name in sorted(each, key=lambda name: natural(Path(name)))]


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
    from tnsim.errors import naming, refusing

    with naming(file), refusing("cannot be read as inputs"):
        if file.suffix != ".npz":
            with regular(file):  # no pickle, whatever the name of the file, and no pipe
                return np.array(np.lib.format.open_memmap(file, mode="r"))
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
        BadParameter: Error of Typer, where a file has the ending of another kind, where a file
            of another kind stands in the place of an output, where a file stands in the place of a
            folder, where two outputs are one file, or where one is to lie in another or in the
            store.
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
            if kind.needs is not None:
                require(*kind.needs, f"writing {path}")
            check_replaceable(path, kind)
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror}") from None
        if kind.endings and path.suffix.lower() not in kind.endings:
            raise typer.BadParameter(
                f"{path}: {kind.name} ends in {kind.endings[0]}, found {path.suffix or 'no ending'}"
            )
    for place, path in places.items():
        if above := next((above for above in Path(place).parents if str(above) in places), None):
            raise typer.BadParameter(
                f"{path} would lie in {places[str(above)]}, which is another output; give another "
                "path"
            )


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure as PNG, as a whole or not at all; a missing folder is made.

    Args:
        figure: Figure of matplotlib.
        path: Path of the picture; no file but a picture is replaced.

    Raises:
        ResultError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, PNG) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror or error}") from None


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


@contextmanager
def _object_alone() -> Iterator[None]:
    """Send all other output to stderr: code of a user, a forward pass too, may print anything."""
    before = _OBJECTS.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _OBJECTS.reset(before)


def print_json(data: dict[str, Any]) -> None:
    """Print one object and nothing else.

    Args:
        data: Object of values that JSON can hold; NaN and infinities, for which it has no word,
            become null.

    Example:
        >>> print_json({"similarity": 1.0, "standard_error": float("inf")})
        {"similarity": 1.0, "standard_error": null}
    """
    known = json.loads(json.dumps(data), parse_constant=lambda _: None)
    typer.echo(json.dumps(known), file=_OBJECTS.get())


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

    def again(unraisable: Any) -> None:
        """Send a signal once more that came in a callback, where Python drops what is raised.

        JAX has a callback in every collection of garbage, and the run would go on.
        """
        if not isinstance(unraisable.exc_value, Stopped):
            return hook(unraisable)
        timers.append(Timer(_AGAIN, signal.raise_signal, unraisable.exc_value.args))
        timers[-1].start()

    signals = (signal.SIGINT, signal.SIGTERM)
    timers: list[Timer] = []
    # The handlers of the caller come back at the end.
    before = [signal.signal(number, stop) for number in signals]
    hook, sys.unraisablehook = sys.unraisablehook, again
    try:
        yield
    except Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        typer.echo(f"tnsim: stopped by {number.name}: {kept}", err=True)
        # The exit status that shells give for a signal.
        raise typer.Exit(128 + number) from None
    finally:
        sys.unraisablehook = hook
        for timer in timers:
            timer.cancel()
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def module_at(place: str) -> Any:
    """The module that a file of Python code or an importable one holds. The code runs.

    Args:
        place: FILE.py:NAME or package.module:NAME, where NAME is an `nn.Module`, or a class or a
            function that makes one without arguments.

    Returns:
        The module, in evaluation mode: it is compared, and no option could ask for that mode.

    Raises:
        CheckpointError: There is no such file or name, the code fails, or what it names is no
            module and makes none.

    Example:
        >>> module_at("net.txt")
        Traceback (most recent call last):
            ...
        tnsim.errors.CheckpointError: --model net.txt: give FILE.py:NAME or package.module:NAME, ...
    """
    where, _, name = place.rpartition(":")
    said = printable(f"--model {place}", 200)
    if not where or not name:
        raise CheckpointError(
            f"{said}: give FILE.py:NAME or package.module:NAME, where NAME is an nn.Module, or a "
            "class or a function that makes one without arguments"
        )
    log.info("the code of %s runs", where)
    # Code of a user may raise anything, and be found beside the checkpoints.
    try:
        code = _code_of(where)
    except CheckpointError as missing:
        raise CheckpointError(f"{said}: {missing}") from None
    except (Exception, SystemExit) as error:  # a script that reads its own arguments exits
        raise CheckpointError(f"{said}: its code raises {_named(error)}") from error
    if not hasattr(code, name):
        near = difflib.get_close_matches(name, dir(code), 3)
        hint = f"; there is {', '.join(near)}" if near else ""
        raise CheckpointError(f"{said}: there is no {name!r} in it{hint}")
    found: Any = getattr(code, name)
    if hasattr(found, "named_parameters") and not isinstance(found, type):
        return found.eval()
    if not callable(found):
        raise CheckpointError(
            f"{said}: {name} is no nn.Module, nor anything that makes one, found "
            f"{printable(repr(found), 80)}"
        )
    try:
        made: Any = found()
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, TypeError):  # as of a class that needs arguments
            hint = (
                "; where it takes arguments, write a function without any that calls it, and name "
                "the function"
            )
        raise CheckpointError(f"{said}: {name}() raises {_named(error)}{hint}") from error
    if not hasattr(made, "named_parameters"):
        raise CheckpointError(f"{said}: {name}() is a {type(made).__name__}, no nn.Module")
    return made.eval()


def _code_of(where: str) -> Any:
    """The code of a file, or of an importable module; beside it others may be imported."""
    if not where.endswith(".py"):
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # last, so that no file there hides another module
        if importlib.util.find_spec(where) is None:
            raise CheckpointError(f"there is no module {where!r} that Python finds")
        return importlib.import_module(where)
    file = Path(where).resolve()
    # A name of its own: a file may be called as a library is.
    spec = importlib.util.spec_from_file_location(f"tnsim_user_code_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise CheckpointError("there is no such file of Python code")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    code = importlib.util.module_from_spec(spec)
    # Classes look for their module by its name, as dataclasses do.
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = code
    try:
        spec.loader.exec_module(code)
    except BaseException:
        del sys.modules[spec.name]
        if before is not None:
            sys.modules[spec.name] = before
        raise
    return code


def _named(error: BaseException) -> str:
    return printable(f"{type(error).__name__}: {error}", 300)
