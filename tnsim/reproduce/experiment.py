"""What an experiment is. In: its three steps and its settings. Out: an `Experiment`, plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tnsim.reproduce.claims import Claim, Summary
from tnsim.reproduce.run import Run

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
        >>> from tnsim.reproduce.catalogue import experiment
        >>> experiment("invariance").title
        'Invariance and exactness'
    """

    name: str
    title: str
    where: str
    default: Any
    full: Mapping[str, Any]
    train: Callable[[Run], None]
    measure: Callable[[Run], Any]
    claims: Callable[[Run, Any], tuple[Claim, ...]]
    figures: Callable[[Run, Any], Mapping[str, Figure]]
    results: Callable[[Any], Mapping[str, xr.Dataset]] = field(default=lambda measured: {})
    summaries: Callable[[Any], tuple[Summary, ...]] = field(default=lambda measured: ())
    data: str = ""
    checkpoints: str = ""
