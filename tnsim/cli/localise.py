"""`tnsim paths` and `tnsim change`: which part of a model, as text, JSON or a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from tnsim.cli.options import (
    JsonOption,
    MetricOptions,
    ReadingOptions,
    check_outputs,
    compiling_shown,
    in_order,
    metric_of,
    named_path,
    networks_of,
    print_json,
    save_picture,
    say,
)
from tnsim.errors import ModelError
from tnsim.files import PNG

if TYPE_CHECKING:
    from tnsim.localise.change import Change, ChangeSeries
    from tnsim.localise.paths import Edges, EdgeSeries, Paths, PathSeries

T = TypeVar("T")
_MOST_INPUTS = 5
"""Most inputs that are printed, those that changed most."""


PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot", parser=named_path, help="Also write a picture of the shares, a PNG file."
    ),
]


def paths(
    files: Annotated[
        list[str],
        typer.Argument(
            help="A checkpoint, or several of a run: files, folders, globs or names in a Hugging "
            "Face cache."
        ),
    ],
    other: Annotated[
        str | None, typer.Option("--other", help="Checkpoint to compare with; default: itself.")
    ] = None,
    by: Annotated[
        Literal["layer", "head", "unit"],
        typer.Option("--by", help="Parts of a model that are told apart."),
    ] = "layer",
    within: Annotated[
        list[str] | None,
        typer.Option("--within", help="Component that is told apart, others stay on. Repeatable."),
    ] = None,
    order: Annotated[int | None, typer.Option("--order", help="Most components in a path.")] = None,
    top: Annotated[
        int | None, typer.Option("--top", help="Number of paths that are told apart.")
    ] = None,
    legs: Annotated[
        bool,
        typer.Option("--legs", help="Edges by Q, K, V and in: which part reads which, and cuts."),
    ] = False,
    asked: MetricOptions = MetricOptions(),
    reading: ReadingOptions = ReadingOptions(),
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shares of paths through components, of one model or a run."""
    import tnsim
    from tnsim.analysis import figures

    if plot is not None:
        check_outputs({plot: PNG})
    networks = networks_of(reading)
    series = networks.series(in_order(files))
    partner = None if other is None else networks.single(other)
    chosen, dtype = metric_of(asked), asked.dtype
    options: dict[str, Any] = {"by": by, "within": within or None, "order": order, "top": top}
    if legs:
        if other is not None or within or order is not None or top is not None:
            raise ModelError("--legs gives edges: leave out --other, --within, --order and --top")
        with compiling_shown():
            edges = tnsim.paths(series, metric=chosen, by=by, legs=True, dtype=dtype)
        _tell(edges, _edges_data, as_json)
        if plot is not None:
            last = f"{edges.labels[-1]}"
            save_picture(figures.edges(edges.edges, edges.cut[-1], title=last), plot)
        return
    given: Any = series if len(series) > 1 else series[0]
    with compiling_shown():
        found = tnsim.paths(given, partner, chosen, **options, dtype=dtype)
    _tell(found, _run_data if given is series else _paths_data, as_json)
    if plot is not None:
        if given is series:
            drawn = figures.shares_over_training(found.labels, found.paths, found.share)
        else:
            drawn = figures.shares(found.bra, found.share, found.standard_error)
        save_picture(drawn, plot)


def _tell(result: T, data_of: Callable[[T], dict[str, Any]], as_json: bool) -> None:
    """Print a result as it prints in Python, or its data as JSON."""
    if as_json:
        print_json(data_of(result))
    else:
        say(str(result))


def _paths_data(result: Paths) -> dict[str, Any]:
    shares = _by_name(result.bra, result.share)
    data = {**_about([result]), "total": float(result.values.sum()), "shares": shares}
    if result.standard_error is not None:
        data["standard_errors"] = _by_name(result.bra, result.standard_error)
    return data


def _run_data(run: PathSeries) -> dict[str, Any]:
    data = {**_about(run.each), "shares": _by_label(run.labels, run.paths, run.share)}
    errors = [(found.bra, found.standard_error) for found in run.each]
    return data | _standard_errors(run.labels, errors)


def _about(each: Sequence[Paths] | Sequence[Edges] | Sequence[Change]) -> dict[str, Any]:
    """Metric, guarantee and caveats of a run, which is exact where all of its checkpoints are."""
    said = dict.fromkeys(caveat for result in each for caveat in result.caveats)
    exact = all(result.exact for result in each)
    return {"metric": each[0].metric, "exact": exact, "caveats": list(said)}


def _edges_data(run: EdgeSeries) -> dict[str, Any]:
    table = {
        str(label): {
            edge: {"share": float(share), "cut": float(cut)}
            for edge, share, cut in zip(run.edges, edges.share, edges.cut, strict=True)
        }
        for label, edges in zip(run.labels, run.each, strict=True)
    }
    errors = [(run.edges, found.standard_error) for found in run.each]
    return {**_about(run.each), "edges": table} | _standard_errors(run.labels, errors)


def _changes_data(run: ChangeSeries) -> dict[str, Any]:
    from tnsim.localise.differences import least_sure

    each = [found for found in run.each if found is not None]
    labels = list(map(str, run.labels))
    steps = {
        "totals": dict(zip(labels, run.total.tolist(), strict=True)),
        "surroundings": dict(zip(labels, run.surroundings.tolist(), strict=True)),
        "shares": _by_label(run.labels, run.components, run.share),
    }
    errors = [
        (run.components, None if found is None else found.standard_error) for found in run.each
    ]
    data = {**_about(each), "how": least_sure(each).how, "of": each[0].of, **steps}
    return data | _standard_errors(run.labels, errors)


def _standard_errors(labels: Sequence[Any], errors: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Standard errors by the label of a checkpoint and by name; nothing where none was sampled."""
    told = {
        str(label): _by_name(names, values)
        for label, (names, values) in zip(labels, errors, strict=True)
        if values is not None
    }
    return {"standard_errors": told} if told else {}


def _by_label(labels: Sequence[Any], names: Sequence[str], table: Any) -> dict[str, Any]:
    """Rows of a table by the label of a checkpoint, each by name, for JSON."""
    return {str(label): _by_name(names, row) for label, row in zip(labels, table, strict=True)}


def _by_name(names: Sequence[str], values: Any) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))


def change(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Two checkpoints, or those of a run in their order: files, folders, globs or "
            "names in a Hugging Face cache."
        ),
    ],
    by: Annotated[
        Literal["layer", "head", "unit", "module", "block", "parameter"] | None,
        typer.Option(
            "--by",
            help="Parts that are told apart: layer, head or unit of polynomials; module, block or "
            "parameter of any network of --model. Default: layers, or modules.",
        ),
    ] = None,
    of: Annotated[
        Literal["distance", "similarity"], typer.Option("--of", help="Measure that is split.")
    ] = "distance",
    ends: Annotated[
        bool, typer.Option("--ends", help="Linear layers such as embeddings are parts as well.")
    ] = False,
    align: Annotated[
        bool,
        typer.Option("--align", help="Turn the stream of B so that its embedding fits that of A."),
    ] = False,
    swaps: Annotated[
        bool, typer.Option("--swaps", help="Also the change without and with one part alone.")
    ] = False,
    asked: MetricOptions = MetricOptions(),
    reading: ReadingOptions = ReadingOptions(),
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """A change of checkpoints, or each of a run, split by layer, head, hidden unit or module."""
    import tnsim
    from tnsim.analysis import figures
    from tnsim.localise.change import text_of_change

    if plot is not None:
        check_outputs({plot: PNG})
    # A module that computes a polynomial has layers under every metric, unless its own modules are
    # asked for.
    on_inputs = asked.metric == "empirical"
    known = "gaussian" if by is None else None
    networks = networks_of(reading, asked.metric if reading.model is None else known, on_inputs)
    if by in ("module", "block", "parameter"):
        if reading.model is None and not networks.run_folders:
            raise ModelError(
                f"--by {by} tells weights of a network apart: give the network by --model "
                "FILE.py:NAME"
            )
        networks = dataclasses.replace(networks, run_as_they_are=reading.model is not None)
    options: dict[str, Any] = {
        "metric": metric_of(asked),
        "by": by,
        "of": of,
        "ends": ends,
        "align": "embedding" if align else None,
        "n_ctx": networks.n_ctx,
        "dtype": asked.dtype,
    }
    if len(files) != 2:
        if swaps:
            raise ModelError("--swaps shows one change: give two checkpoints, or leave it out")
        with compiling_shown():
            run = tnsim.change(networks.several(in_order(files)), **options)
        _tell(run, _changes_data, as_json)
        if plot is not None:
            drawn = figures.shares_over_training(run.labels, run.components, run.share)
            save_picture(drawn, plot)
        return
    one, two = (networks.single(file) for file in files)
    with compiling_shown():
        result = tnsim.change(one, two, **options)
        swapped = {"removed": result.removed, "alone": result.alone} if swaps else {}
        by_input = result.by_input if on_inputs and of == "distance" else None
    if as_json:
        told = ("how", "of", "total", "surroundings", "components")
        data = _about([result]) | {name: getattr(result, name) for name in told}
        arrays = {"share": result.share, **swapped}
        if result.standard_error is not None:
            arrays["standard_error"] = result.standard_error
        if by_input is not None:
            arrays["by_input"] = by_input
        print_json(data | {name: array.tolist() for name, array in arrays.items()})
    else:
        say(text_of_change(result, swapped))
        if by_input is not None:
            _say_inputs(by_input)
    if plot is not None:
        title = f"share of the change of {result.total:.3g}"
        draw = figures.layers_and_heads
        if not all(label.startswith("layer ") for label in result.components):
            draw = figures.shares  # names of modules have no place in a grid
        save_picture(draw(result.components, result.share, title=title), plot)


def _say_inputs(by_input: Any) -> None:
    """The inputs on which most of a change is, and its share on each."""
    import numpy as np

    each = by_input.reshape(len(by_input), -1).sum(axis=1)
    first = np.argsort(-each, kind="stable")[:_MOST_INPUTS]
    shares = ", ".join(f"{n} ({each[n] / each.sum():.1%})" for n in first)
    say(f"{'most on inputs':<15} {shares}, of {len(each):,}")
