"""The commands `tnsim bench`, `demo` and `info`, in this order.

What they need of tnsim is imported when they run.
"""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tnsim.cli.options import (
    DtypeOption,
    JsonOption,
    check_outputs,
    named_path,
    print_json,
    save_picture,
    say,
)
from tnsim.files import PNG

if TYPE_CHECKING:
    from tnsim.all_pairs.result import Pairwise
    from tnsim.analysis.reading import Segmentation
    from tnsim.checkpoints.load import Series


MIDDLE = 3200
"""A step of the shipped series at which the training pairs are known by heart, and no others."""
PAGE = "report.html"
CURVES = ("train_accuracy", "validation_accuracy")
PACKAGES = ("jax", "jaxlib", "numpy", "quimb", "cotengra", "safetensors")
EXTRAS = ("pairwise", "plot", "dask", "parquet", "zarr", "torch", "yaml")
_REQUIREMENT = re.compile(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]")
CACHED = ("plans", "programs")


bench = typer.Typer(
    help="Measure cost, with a protocol.", no_args_is_help=True, rich_markup_mode=None
)


@bench.callback()
def _benches() -> None:
    """Keeps `depth` a command of its own while there is no other."""


@bench.command()
def depth(
    width: Annotated[int, typer.Option(min=1, help="Inputs and outputs of every layer.")] = 256,
    rank: Annotated[int, typer.Option(min=1, help="Hidden units of every layer.")] = 512,
    max_depth: Annotated[
        int, typer.Option(min=1, help="Depths are the powers of two up to this.")
    ] = 64,
    dtype: DtypeOption = "float64",
    repeats: Annotated[
        int, typer.Option(min=1, help="Warm calls per row; the median is reported.")
    ] = 7,
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=named_path, help="Folder for depth.json and depth.png."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Contraction cost by depth, beside the unrolled network and a hand-written recursion."""
    from tnsim.cli import bench as measuring

    if out is not None:
        check_outputs({out / measuring.JSON_FILE: measuring.JSON, out / measuring.PICTURE: PNG})
    depths = [2**n for n in range(max_depth.bit_length())]
    rows: list[dict[str, Any]] = []
    if not as_json:
        say(measuring.line(measuring.COLUMNS))
    for row in measuring.depth_rows(width, rank, depths, dtype, repeats):
        rows.append(row)
        if not as_json:
            say(measuring.line(measuring.cells(row)))
    result = {"width": width, "rank": rank, "dtype": dtype, "repeats": repeats, "rows": rows}
    if as_json:
        print_json(result)
    if out is not None:
        measuring.write(result, out)


def demo(
    out: Annotated[
        Path,
        typer.Option("--out", parser=named_path, help="Folder for the picture and the matrix."),
    ] = Path("tnsim-demo"),
) -> None:
    """Compare shipped checkpoints of a network that groks.

    Computes all pairs, draws the matrix, and writes a page to explore.
    """
    import tnsim
    from tnsim.all_pairs import result as result_module
    from tnsim.analysis import baselines, reading, report

    picture, matrix, page = (out / name for name in ("similarity.png", "similarity.npz", PAGE))
    check_outputs({picture: PNG, matrix: result_module.NPZ, page: report.PAGE})
    folder = Path(tnsim.__file__).parent / "data" / "grokking"
    series = tnsim.Series(folder)
    _introduce(series)
    result = tnsim.pairwise(series, progress=True)
    result["weight_cosine"] = baselines.weight_cosine(series)
    phases = reading.segment(result, 3)
    log = json.loads((folder / "log.json").read_text())["checkpoints"]
    for curve in CURVES:
        result[curve] = ("a", [entry[curve] for entry in log])

    out.mkdir(parents=True, exist_ok=True)
    matrices = ["similarity", "weight_cosine"]
    figure = result.tnsim.plot("heatmap", matrices, phases.change_points, [CURVES])
    save_picture(figure, picture)
    result_module.write_npz(result, matrix)
    report.write(result, page, "Modular addition")
    say(f"\nwrote {picture}, {matrix} and {page}, a page to explore")
    _explain(result, phases)


def _introduce(series: Series) -> None:
    """Print the checkpoints, the last of them as a network, and the cost of a single pair."""
    import tnsim

    say(
        f"{len(series)} checkpoints of one network learning (a + b) mod 113, "
        f"steps {series.labels[0]} to {series.labels[-1]}"
    )
    say(f"{series[-1]}\n")
    network = tnsim.tensor_networks.network(series[-1])
    say(f"network: {network.num_tensors} tensors, tags {', '.join(sorted(network.tags))}\n")
    say(f"{tnsim.plan(series[0], series[-1])}\n")


def _explain(result: Pairwise, phases: Segmentation) -> None:
    """Print an explanation of the picture."""
    first, last = result["a"].values[[0, -1]]
    to_last = result.similarity.sel(b=last)
    first_to_last = float(to_last.sel(a=first))
    middle_to_last = float(to_last.sel(a=MIDDLE))
    starts = ", ".join(map(str, phases.labels))
    say(
        "What is to be seen: three blocks along the diagonal, the steps that are still close to "
        "the initialisation, those that know the training set by heart, and the solution that "
        f"generalises, each unlike the others (similarity of step {first} to step {last}: "
        f"{first_to_last:.2f}, of step {MIDDLE}: {middle_to_last:.2f}). "
        f"The best three phases start at steps {first}, {starts}; the curves above the matrix show "
        "training accuracy rise with the second and validation accuracy jump with the third."
    )


def info(as_json: JsonOption = False) -> None:
    """Versions, devices, installed extras and the cache."""
    facts = _facts()
    if as_json:
        print_json(facts)
        return
    for name, version in facts["versions"].items():
        say(f"{name:<12}{version}")
    say(f"devices     {', '.join(facts['devices'])}")
    say(f"tier        {facts['tier']}")
    for line in facts["blas"]:
        say(f"blas        {line}")
    for extra, missing in facts["missing"].items():
        said = "present"
        if missing:
            said = f"lacks {', '.join(missing)}: pip install 'tnsim[{extra}]'"
        say(f"[{extra}]".ljust(12) + said)
    cache = facts["cache"]
    if cache["folder"] is None:
        say("cache       none: TNSIM_CACHE_DIR is empty")
    else:
        say(f"cache       {cache['folder']}: {cache['files']} files, {cache['bytes']:,} bytes")


def _facts() -> dict[str, Any]:
    import jax

    import tnsim
    from tnsim.engine.runtime.devices import backend

    # Every other fact helps to find out why JAX has no device.
    try:
        backend()
    except (tnsim.errors.ExecutorError, tnsim.TooLarge) as error:
        devices = [str(error)]
    else:
        devices = [f"{device.platform}: {device.device_kind}" for device in jax.local_devices()]
    versions = {"tnsim": tnsim.__version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in PACKAGES}
    return {
        "versions": versions,
        "devices": devices,
        "tier": tnsim.session().tier,
        "blas": _blas(),
        "missing": {extra: _missing(extra) for extra in EXTRAS},
        "cache": _cache(),
    }


def _blas() -> list[str]:
    """NumPy's libraries of matrix products, with the kernels that they chose for this processor."""
    import numpy  # noqa: F401  loads its library
    from threadpoolctl import threadpool_info

    from tnsim.engine.runtime.compiling import host

    libraries = []
    for library in threadpool_info():
        if library["user_api"] != "blas":
            continue
        kernels = library.get("architecture")
        line = f"{library['internal_api']} {library['version']}, kernels for {kernels}"
        if kernels == "Haswell" and "avx512f" in host():
            line += (
                "; the processor has 512-bit instructions, which OPENBLAS_CORETYPE=SkylakeX in the "
                "environment would use"
            )
        libraries.append(line)
    return libraries


def _missing(extra: str) -> list[str]:
    """Packages of an extra that are not installed."""
    try:
        requirements = metadata.requires("tnsim") or []
    except metadata.PackageNotFoundError:  # run from a folder, without being installed
        return []
    parsed = [_REQUIREMENT.match(requirement) for requirement in requirements]
    names = [requirement[1] for requirement in parsed if requirement and requirement[2] == extra]
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _cache() -> dict[str, Any]:
    """The folder of the caches of plans and programs, with the count and the size of its files."""
    from tnsim.engine.disk_cache import cache_folder

    folders = [folder for kind in CACHED if (folder := cache_folder(kind)) is not None]
    if not folders:
        return {"folder": None, "files": 0, "bytes": 0}
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    return {"folder": str(folders[0].parent), "files": len(files), "bytes": sum(sizes)}
