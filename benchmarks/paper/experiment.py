"""Experiments as plain data, and experiments by name.

The module of an experiment is imported when its name is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks.paper.claims import Claim, Summary
from benchmarks.paper.run import ExperimentRun
from tnsim.errors import MissingExtra, TnsimError

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

NAMES = (
    "invariance",
    "grokking",
    "forgetting",
    "differences",
    "backdoor",
    "argmax",
    "language",
    "induction",
    "paths",
    "activations",
)
"""Names of the experiments in the order of the paper."""
PROGRAM = "python -m benchmarks.paper"
"""The command that reruns experiments, in a clone."""
NEEDED = {  # module: the package that brings it
    "optax": "optax",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "matplotlib": "matplotlib",
    "xarray": "xarray",
    "zarr": "zarr",
}


@dataclass(frozen=True)
class Experiment:
    """Three steps of an experiment, their settings, and the place of the experiment in the paper.

    Args:
        name: Name on the command line.
        title: Title on pages and in lists.
        where: Sections, figures and tables of the paper.
        default: A setting that takes minutes.
        full: The paper's settings by name: "paper", or "text" and "code" where the two differ.
        train: Function that writes checkpoints and skips finished series.
        measure: Function that reads the checkpoints and returns the measured values.
        claims: Function from the measured values to claims.
        figures: Function from the measured values to figures, by file name without its ending.
        results: Function from the measured values to pairwise results for pages, by name.
        summaries: Function from the measured values to tables of measures side by side.
        data: Contents that a folder of real data must have, empty where the experiment draws its
            own data.
        checkpoints: Contents that a folder of a user's checkpoints must have, empty where none fit.

    Example:
        >>> from benchmarks.paper.experiment import experiment
        >>> experiment("invariance").title
        'Invariance and exactness'
    """

    name: str
    title: str
    where: str
    default: Any
    full: Mapping[str, Any]
    train: Callable[[ExperimentRun], None]
    measure: Callable[[ExperimentRun], Any]
    claims: Callable[[ExperimentRun, Any], tuple[Claim, ...]]
    figures: Callable[[ExperimentRun, Any], Mapping[str, Figure]]
    results: Callable[[Any], Mapping[str, xr.Dataset]] = field(default=lambda measured: {})
    summaries: Callable[[Any], tuple[Summary, ...]] = field(default=lambda measured: ())
    data: str = ""
    checkpoints: str = ""


def experiment(name: str) -> Experiment:
    """The experiment of this name.

    Args:
        name: Any of `NAMES`.

    Returns:
        The experiment.

    Raises:
        TnsimError: When no experiment has this name.
        MissingExtra: When a package that experiments need is not installed.

    Example:
        >>> experiment("invariance").where
        'figure 2, sections 2.2 and 2.3'
    """
    if name not in NAMES:
        raise TnsimError(f"no experiment is called {name!r}; there are {', '.join(NAMES)} and all")
    for module, package in NEEDED.items():
        if find_spec(module) is None:
            raise MissingExtra(package, "paper", "rerunning the paper")
    return import_module(f"benchmarks.paper.{name}").EXPERIMENT
