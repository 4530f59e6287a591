"""The steps of an experiment in sequence: train, measure, judge and draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tnsim
from benchmarks.paper import records
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.run import ExperimentRun, claim_folder, timed, write_json
from tnsim.errors import CheckpointError, TnsimError
from tnsim.files import PNG, replacing


def settings_of(experiment: Experiment, full: bool) -> dict[str, Any]:
    """The settings of an experiment by name: the default setting, or the paper's settings.

    Args:
        experiment: The experiment.
        full: Whether the paper's settings are meant.

    Returns:
        A setting or several.

    Example:
        >>> from benchmarks.paper.experiment import experiment
        >>> list(settings_of(experiment("invariance"), full=False))
        ['default']
    """
    if full:
        return dict(experiment.full)
    return {"default": experiment.default}


def reproduce(
    experiment: Experiment,
    setting: str,
    folder: Path,
    *,
    seed: int = 0,
    data: Path | None = None,
    checkpoints: Path | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train, measure, judge and draw; finished work of an earlier call is kept.

    Args:
        experiment: The experiment to run.
        setting: Name of the setting, "default" or a name in `experiment.full`.
        folder: Folder of this run alone.
        seed: Seed of all random numbers.
        data: A folder of real data.
        checkpoints: A folder of the user's checkpoints.
        progress: Whether bars are shown.

    Returns:
        The record that `claims.json` holds.

    Raises:
        StoreMismatch: When the folder holds another run.
        TnsimError: When the experiment takes no data or no checkpoints, or a folder is missing.
    """
    _check_given(experiment.name, "--data", data, experiment.data)
    _check_given(experiment.name, "--checkpoints", checkpoints, experiment.checkpoints)
    chosen = {"default": experiment.default, **experiment.full}[setting]
    run = ExperimentRun(folder, chosen, seed, data, checkpoints, progress)
    claim_folder(run, experiment.name)
    if checkpoints is None:
        with timed(run, "train"):
            experiment.train(run)
    with timed(run, "measure"):
        measured = _measured_values(experiment, run)
    claims = experiment.claims(run, measured)
    names = _draw_figures(experiment, run, measured)
    summaries = experiment.summaries(measured)
    record = records.record(experiment, setting, run, claims, names, summaries)
    write_json(folder / records.FILE, record)
    return record


def _measured_values(experiment: Experiment, run: ExperimentRun) -> Any:
    """The measured values; an error about a user's checkpoints states the wanted contents."""
    try:
        return experiment.measure(run)
    except CheckpointError as error:
        if run.given is None:
            raise
        wanted = f"{experiment.name} wants as --checkpoints {experiment.checkpoints}"
        raise CheckpointError(f"{error}; {wanted}") from error


def _check_given(name: str, option: str, folder: Path | None, wanted: str) -> None:
    if folder is None:
        return
    if not wanted:
        raise TnsimError(f"{name} takes no {option}: it makes all it needs; leave {option} out")
    if not folder.is_dir():
        raise TnsimError(f"{option} {folder}: there is no such folder; {name} wants {wanted}")


def _draw_figures(experiment: Experiment, run: ExperimentRun, measured: Any) -> tuple[str, ...]:
    """Write figures and pages; returns the file names of the figures."""
    names = []
    for name, figure in experiment.figures(run, measured).items():
        with replacing(run.folder / f"{name}.png", PNG) as temporary:
            figure.savefig(temporary, dpi=110, format="png")
        names.append(f"{name}.png")
    for name, result in experiment.results(measured).items():
        tnsim.report.write(result, run.folder / f"{name}.html", f"{experiment.title}: {name}")
    return tuple(names)
