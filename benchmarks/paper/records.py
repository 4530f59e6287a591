"""Records of runs as JSON: `claims.json`, written and read.

Nothing is typed by hand: tables and pages are made of these files alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import tnsim
from benchmarks.paper.claims import Claim, Interval, Summary, verdict
from benchmarks.paper.experiment import PROGRAM, Experiment
from benchmarks.paper.run import ExperimentRun, read_json, seconds_of
from tnsim.errors import CheckpointError, ResultError

FILE = "claims.json"
PACKAGES = ("jax", "numpy", "optax", "scikit-learn")


def record(
    experiment: Experiment,
    setting: str,
    run: ExperimentRun,
    claims: tuple[Claim, ...],
    figures: tuple[str, ...],
    summaries: tuple[Summary, ...] = (),
) -> dict[str, Any]:
    """The record of a run as plain data.

    Args:
        experiment: The experiment that was run.
        setting: Name of the setting.
        run: The run, with its folder, seed and data.
        claims: Claims with measured values.
        figures: Names of the pictures beside the record.
        summaries: Tables of measures side by side.

    Returns:
        An object for JSON; `claims` has a row for each claim, with its verdict.

    Raises:
        ResultError: When two claims have the same name, or a claim has no finite value and no
            reason.
    """
    names = [claim.name for claim in claims]
    if len(set(names)) != len(names):
        raise ResultError(f"claims need different names, found {names}")
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "where": experiment.where,
        "setting": setting,
        "settings": _plain_value(dataclasses.asdict(run.setting)),
        "seed": run.seed,
        "data": None if run.data is None else run.data.name,
        "checkpoints": None if run.given is None else run.given.name,
        "seconds": seconds_of(run),
        "machine": machine(),
        "versions": versions(),
        "figures": list(figures),
        "summaries": [_plain_value(summary._asdict()) for summary in summaries],
        "claims": [row(claim) for claim in claims],
    }


def row(claim: Claim) -> dict[str, Any]:
    """A claim as plain data, with its verdict.

    Example:
        >>> from benchmarks.paper.claims import at_least
        >>> row(Claim("r", "r > 0.9.", "appendix D", (0.93,), at_least(0.9), "the text's"))["ours"]
        [0.93]
    """
    fields = dataclasses.asdict(claim)
    for name in ("expected", "excess"):
        fields[name] = _interval_ends(getattr(claim, name))
    return _plain_value({**fields, "verdict": verdict(claim).value})


def claim_of(row: dict[str, Any]) -> Claim:
    """A claim from its row; the verdict is computed again.

    Example:
        >>> from benchmarks.paper.claims import at_least
        >>> claim = Claim("r", "r > 0.9.", "appendix D", (0.93,), at_least(0.9), "the text's")
        >>> claim_of(row(claim)) == claim
        True
    """
    fields = {name: value for name, value in row.items() if name != "verdict"}
    for name in ("expected", "excess"):
        fields[name] = _interval_from(fields[name])
    for name in ("ours", "control"):
        fields[name] = tuple(fields[name])
    return Claim(**fields)


def read(path: Path) -> dict[str, Any]:
    """A record from its file.

    Raises:
        ResultError: When the file is missing or is no record.
    """
    try:
        record = read_json(path)
        record["claims"][0]["verdict"]
    except (CheckpointError, KeyError, TypeError, IndexError) as error:
        raise ResultError(
            f"{path}: cannot be read as the claims of an experiment ({error}); "
            f"run  {PROGRAM}  again"
        ) from None
    return record


def machine() -> str:
    """Cores, processor and memory, in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    words = [f"{cores} cores of {_processor()}"]
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        words.append(f"{total / 2**30:.0f} GiB")
    return ", ".join(words)


def versions() -> dict[str, str]:
    """The versions of tnsim, Python and the packages that compute."""
    installed = {name: metadata.version(name) for name in PACKAGES}
    return {"tnsim": tnsim.__version__, "python": platform.python_version(), **installed}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _interval_ends(interval: Interval | None) -> list[float | None] | None:
    """Both ends; JSON has no infinity, so an open end is null."""
    if interval is None:
        return None
    return [end if math.isfinite(end) else None for end in (interval.low, interval.high)]


def _interval_from(ends: list[float | None] | None) -> Interval | None:
    if ends is None:
        return None
    low, high = ends
    return Interval(-math.inf if low is None else low, math.inf if high is None else high)


def _plain_value(value: Any) -> Any:
    """A value with lists for tuples, as it is read back from a file."""
    return json.loads(json.dumps(value, allow_nan=False))
