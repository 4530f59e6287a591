"""What several commands share. In: words of the command line. Out: options, metrics, output."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tnsim.errors import printable


class MetricName(enum.StrEnum):
    """Metrics that can be named in one word."""

    gaussian = "gaussian"
    closure = "closure"
    symmetric = "symmetric"
    tree = "tree"
    frobenius = "frobenius"
    categorical = "categorical"


class DtypeName(enum.StrEnum):
    """Precisions that a computation may have."""

    float64 = "float64"
    float32 = "float32"


File = Annotated[Path, typer.Argument(help="Checkpoint: .safetensors, .npz, .pt or .pth.")]
MetricOption = Annotated[
    MetricName,
    typer.Option(
        "--metric",
        help="gaussian: E<A(x),B(x)>, exact. closure: the same layer by layer, linear in depth. "
        "symmetric: all legs symmetrised. tree: each layer's legs. frobenius: raw tensors. "
        "categorical: uniform one-hot tokens, exact for one attention layer.",
    ),
]
DialectOption = Annotated[
    str | None,
    typer.Option(
        "--dialect", help="Layout of foreign files: a preset or a JSON file. Default: detect."
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--n-ctx", help="Length of the sequences on which models with attention are compared."
    ),
]
DtypeOption = Annotated[DtypeName, typer.Option("--dtype", help="Precision of the computation.")]
SlicesOption = Annotated[
    bool, typer.Option("--slices", help="Also the cosine of every output coordinate.")
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check", help="Also a Monte-Carlo estimate from forward passes, with its error."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def metric_of(name: MetricName) -> Any:
    """The metric that a word names, with its default moments.

    Args:
        name: the word.

    Returns:
        A metric.

    Example:
        >>> metric_of(MetricName.tree)
        TreeSymmetric()
    """
    import tnsim

    classes = (
        tnsim.Gaussian,
        tnsim.GaussianClosure,
        tnsim.Symmetric,
        tnsim.TreeSymmetric,
        tnsim.Frobenius,
        tnsim.Categorical,
    )
    by_name = {cls.name: cls for cls in classes}
    return by_name[name.value]()


def guarantee(exact: bool) -> str:
    """What a number is beside the true one.

    Args:
        exact: as its metric says.

    Returns:
        Words for a pair of brackets.

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
        text: one line or several.

    Example:
        >>> say("a name with\\ta tab")
        a name with\\ta tab
    """
    for line in text.split("\n"):
        typer.echo(printable(line))


def print_json(data: dict[str, Any]) -> None:
    """Print one object and nothing else.

    Args:
        data: what JSON can hold.

    Example:
        >>> print_json({"similarity": 1.0})
        {"similarity": 1.0}
    """
    typer.echo(json.dumps(data))


@contextmanager
def compiling_shown() -> Iterator[None]:
    """Show on a terminal how many programs are compiled, for as long as there are some to do."""
    from tqdm.auto import tqdm

    from tnsim.engine.programs import reporting

    bar_format = "{desc} [{elapsed}]"
    with tqdm(disable=None, leave=False, delay=1, bar_format=bar_format) as bar:

        def report(done: int, total: int) -> None:
            bar.set_description_str(f"compiling {min(done + 1, total)} of {total}")

        with reporting(report):
            yield
