"""The engine's table: first call, second process, warm call, and the floor, for work of all kinds.

    python benchmarks/run.py                                   # every row, in both tiers
    python benchmarks/run.py --missing                         # those that have no figures yet
    python benchmarks/run.py --rows "depth 3" --process first  # half of a row at a time
    python benchmarks/run.py --tier interpret                  # one tier
    python benchmarks/run.py --process first                   # first calls alone
    taskset -c 0,1 python benchmarks/run.py                    # on two cores
    python benchmarks/run.py --device gpu --dtype float64

A row is measured interpreted and compiled (on a GPU compiled alone), each in two processes that
share a folder of caches, empty before the first. "First" is the first call of the first process,
planning and compiling included, "second process" that of the second, "warm" the median of further
calls there. "Taken" is the tier that a session takes by itself, "best" whether its first call ends
no later than that of the other. Importing and making models are outside. Estimates are held against
a call that has been planned. The floor is the planned multiplications over the rate of one 2048 x
2048 matrix product of the same dtype in the same process. "By hand" is called in turn with the warm
calls. "Before" is the release before, on two cores. Figures are kept in a JSON file beside the
table, by device, cores, dtype and tier, so a row can be measured alone on an idle machine; the
table is written anew after each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import works

import tnsim
from tnsim.engine.runtime.devices import processors

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results" / "engine.json"
CACHES = Path(tempfile.gettempdir()) / "tnsim-benchmarks"
PROCESSES = ("first", "second")
TIERS = ("interpret", "compile")
REPEATS = 7
ENOUGH = 10  # seconds of warm calls after which no further one is made
SIDE = 2048  # of the matrices of the floor
# Columns of the tables of a machine.
TIMES = (
    "work, tier, multiplications, first s, second process s, warm s, floor s, warm / floor, "
    "planned GiB, process GiB, taken, best"
)
RATIOS = (
    "work, tier, estimated / first, estimated / warm, warm / by hand, "
    "first s before, first / before, warm s before, warm / before"
)
SUMS = "sum, tier, multiplications / those of contract, first / contract, warm / contract"


def measured(name: str, dtype: str, process: str, tier: str) -> dict:
    """The figures of a row from this process: the first of its two, or the second."""
    work = works.ROWS[name].work(dtype)
    tnsim.session().tier = tier
    planning, planned = _timed(work.plan)
    calling, _ = _timed(work.call)
    figures = {
        f"{process} s": planning + calling,
        f"{process} estimated": _ratio(planned.seconds, calling),
        "multiplications": planned.multiplications,
        "planned GiB": _ratio(planned.peak_bytes, 2**30),
        "process GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if process == PROCESSES[0]:
        tnsim.session().tier = "auto"
        return figures | {"taken": work.plan().tier}
    estimated = work.plan().seconds
    warm, beside = _warm(work)
    figures["warm s"] = warm
    figures["warm estimated"] = _ratio(estimated, warm)
    figures["by hand"] = _ratio(warm, beside)
    figures["floor s"] = planned.multiplications / _rate(dtype)
    return figures


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def _warm(work: works.Work) -> tuple[float, float | None]:
    """Medians of a call, and of the same by hand, called in turn with it."""
    calls = [work.call] if work.beside is None else [work.call, work.beside]
    for call in calls[1:]:
        call()  # compiles
    times: list[list[float]] = []
    while len(times) < REPEATS and sum(map(sum, times)) < ENOUGH:
        times.append([_timed(call)[0] for call in calls])
    warm, *beside = (statistics.median(of_one) for of_one in zip(*times, strict=True))
    return warm, beside[0] if beside else None


def _rate(dtype: str) -> float:
    """Multiplications a second of one large matrix product."""
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        matrix = jnp.ones((SIDE, SIDE), dtype)
        product = jax.jit(lambda x: x @ x)
        product(matrix).block_until_ready()
        times = [_timed(lambda: product(matrix).block_until_ready())[0] for _ in range(5)]
    return SIDE**3 / min(times)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def where() -> str:
    """On what this process computes."""
    import jax

    device = jax.devices()[0]
    on = f"{device.platform}, {device.device_kind}"
    if device.platform == "cpu":
        on = f"{processors()} of {os.cpu_count()} cores, {_processor()}"
    return f"{on}, Python {platform.python_version()}, jax {jax.__version__}"


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _process(device: str, *arguments: str, caches: Path = CACHES) -> Any:
    """What this script prints in a process of its own."""
    environment = os.environ | {"TNSIM_CACHE_DIR": str(caches)}
    if device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _caches(key: str, process: str) -> Path:
    """The folder that a row's processes share, emptied for the first."""
    folder = CACHES / "".join(c if c.isalnum() else "-" for c in key)
    if process == PROCESSES[0]:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def written(results: dict[str, dict[str, Tiers]], path: Path) -> None:
    """The figures and, beside them, the table of them."""
    path.write_text(json.dumps(results, indent=1) + "\n")
    lines = ["# The engine", "", "`python benchmarks/run.py`; its first lines say what is timed."]
    for place, rows in results.items():
        ordered = sorted(rows, key=lambda key: [*works.ROWS].index(_name(key)))
        times = [line for key in ordered for line in _times(key, rows[key])]
        ratios = [line for key in ordered for line in _ratios(key, rows[key])]
        tools = [line for key in ordered for line in _tools(key, rows)]
        lines += ["", f"## {place}", ""]
        for heading, cells in ((TIMES, times), (RATIOS, ratios), (SUMS, tools)):
            lines += _table(heading, cells)
    path.with_suffix(".md").write_text("\n".join(lines))


def _table(heading: str, rows: list[list[str]]) -> list[str]:
    columns = heading.split(", ")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""] if rows else []


def _name(key: str) -> str:
    """The row's name, without the dtype."""
    return key.rsplit(", ", 1)[0]


Tiers = dict[str, dict]
"""The figures of a row by tier."""


def _times(key: str, tiers: Tiers) -> list[list[str]]:
    """Lines of the first table, of seconds."""
    lines = []
    for tier, row in tiers.items():
        names = ("multiplications", "first s", "second s", "warm s", "floor s")
        over = _ratio(row.get("warm s"), row.get("floor s"))
        figures = [*map(row.get, names), over, row.get("planned GiB"), row.get("process GiB")]
        lines.append([key, tier, *map(_cell, figures), *_choice(tiers)])
    return lines


def _choice(tiers: Tiers) -> tuple[str, str]:
    """The tier that a session takes, and whether its first call ends no later than the other's."""
    taken = next((row["taken"] for row in tiers.values() if row.get("taken")), None)
    firsts = {tier: row["first s"] for tier, row in tiers.items() if "first s" in row}
    if taken is None or len(firsts) < len(TIERS):
        return taken or "", ""
    return taken, "yes" if firsts[taken] <= min(firsts.values()) else "no"


def _ratios(key: str, tiers: Tiers) -> list[list[str]]:
    """Lines of the second table: beside the estimates, by hand, and the release before."""
    known = works.ROWS[_name(key)]
    before = known.before if key.endswith(known.dtype) else works.Before()
    lines = []
    for tier, row in tiers.items():
        if not row.get("first estimated"):
            continue
        figures = [row.get(c) for c in ("first estimated", "warm estimated", "by hand")]
        for name, past in (("first s", before.first), ("warm s", before.warm)):
            figures += [past, _ratio(row.get(name), past)]
        lines.append([key, tier, *map(_cell, figures)])
    return lines


def _contract(key: str) -> str:
    """The row of `tnsim.tensor_networks.contract` for the sum of this row."""
    name, dtype = key.rsplit(", ", 1)
    return f"{name.split(': ')[0]}: contract, {dtype}"


def _tools(key: str, rows: dict[str, Tiers]) -> list[list[str]]:
    """Lines of the third table: a sum of networks by one tool, beside tnsim's `contract`."""
    lines = []
    for tier, own in rows[key].items():
        contract = rows.get(_contract(key), {}).get(tier)
        if contract is not None:
            figures = ("multiplications", "first s", "warm s")
            ratios = [_cell(_ratio(own.get(one), contract.get(one))) for one in figures]
            lines.append([key, tier, *ratios])
    return lines


def _cell(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="only rows whose name holds this text")
    parser.add_argument("--missing", action="store_true", help="only rows without figures")
    parser.add_argument("--tier", choices=TIERS, help="one of the two")
    parser.add_argument("--process", choices=("first", "second"), help="one of a row's two")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="gpu: JAX's own")
    parser.add_argument("--dtype", choices=("float32", "float64"), help="instead of the row's own")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file; the table is beside")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--where", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure or options.where:
        print(json.dumps(measured(*options.measure) if options.measure else where()))
        return
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = results.setdefault(_process(options.device, "--where"), {})
    for name, row in works.ROWS.items():
        key = f"{name}, {options.dtype or row.dtype}"
        if options.rows not in name:
            continue
        tiers = [options.tier] if options.tier else TIERS
        done = 0
        for tier in tiers if options.device == "cpu" else TIERS[1:]:
            figures = rows.setdefault(key, {}).setdefault(tier, {})
            if options.missing and "warm s" in figures:
                continue
            for process in [options.process] if options.process else PROCESSES:
                arguments = "--measure", name, options.dtype or row.dtype, process, tier
                caches = _caches(f"{key}, {tier}", process)
                figures |= _process(options.device, *arguments, caches=caches)
                written(results, options.out)
                done += 1
        if done:
            print(*(" | ".join(line) for line in _times(key, rows[key])), sep="\n", flush=True)


if __name__ == "__main__":
    main()
