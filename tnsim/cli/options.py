"""What several commands share. In: words of the command line. Out: options, metrics, JSON on stdout."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any

import typer

from tnsim.errors import printable


class MetricName(enum.StrEnum):
    gaussian = "gaussian"
    closure = "closure"
    symmetric = "symmetric"
    tree = "tree"
    frobenius = "frobenius"
    categorical = "categorical"


class DtypeName(enum.StrEnum):
    float64 = "float64"
    float32 = "float32"


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
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def metric_of(name: MetricName) -> Any:
    import tnsim

    classes = (
        tnsim.Gaussian,
        tnsim.GaussianClosure,
        tnsim.Symmetric,
        tnsim.TreeSymmetric,
        tnsim.Frobenius,
        tnsim.Categorical,
    )
    return {cls.name: cls for cls in classes}[name.value]()


def say(text: str) -> None:
    """Print lines that may hold names out of files, as a terminal may show them."""
    for line in text.split("\n"):
        typer.echo(printable(line))


def print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data))
