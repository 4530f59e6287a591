"""Experiments by name. In: a name. Out: an `Experiment`, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from tnsim.errors import MissingExtra, TnsimError
from tnsim.reproduce.experiment import Experiment

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
