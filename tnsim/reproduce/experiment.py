"""What an experiment is. In: its three steps and its settings. Out: an `Experiment`, plain data.

[merged from reproduce/catalogue]
Experiments by name. In: a name. Out: an `Experiment`, imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tnsim.errors import MissingExtra, TnsimError
from tnsim.reproduce.claims import Claim, Summary
from tnsim.reproduce.run import ExperimentRun

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Experiment:
    """Three steps, the settings they may run at, and what the paper has of it.

    Args:
        name: On the command line.
        title: Of pages and lists.
        where: The sections, figures and tables of the paper.
        default: A setting of minutes.
        full: The paper's settings, by name: "paper", or "text" and "code" where the two differ.
        train: Writes checkpoints; skips what is finished.
        measure: Reads them, computes similarities; returns what the two below read.
        claims: Rows.
        figures: By name of the file, without its ending.
        results: Pairwise results to be explored on a page, by name.
        summaries: Tables of measures side by side.
        data: What a folder of real data must hold, empty where the experiment draws its own.
        checkpoints: What a folder of somebody's checkpoints must hold, empty where none fit.

    Example:
        >>> from tnsim.reproduce.experiment import experiment
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


NAMES = (
    "invariance",
    "grokking",
    "forgetting",
    "differences",
    "backdoor",
    "argmax",
    "language",
    "induction",
)
"""In the order of the paper."""


NEEDED = {  # module: the package that brings it
    "optax": "optax",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "matplotlib": "matplotlib",
    "xarray": "xarray",
    "zarr": "zarr",
}


def experiment(name: str) -> Experiment:
    """The experiment of this name.

    Args:
        name: One of `NAMES`.

    Returns:
        The experiment.

    Raises:
        TnsimError: There is none.
        MissingExtra: Something that experiments need is not installed.

    Example:
        >>> experiment("invariance").where
        'figure 2, sections 2.2 and 2.3'
    """
    if name not in NAMES:
        raise TnsimError(f"no experiment is called {name!r}; there are {', '.join(NAMES)} and all")
    for module, package in NEEDED.items():
        if find_spec(module) is None:
            raise MissingExtra(package, "reproduce", "rerunning the paper")
    return import_module(f"tnsim.reproduce.{name}").EXPERIMENT
