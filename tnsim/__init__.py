"""tnsim: exact similarity of polynomial networks, from their weights.

Names are loaded on first use, so that `import tnsim` is cheap and changes nothing in JAX.
"""

from __future__ import annotations

from typing import Any

_HOME = {
    "Linear": "models.layers",
    "Bilinear": "models.layers",
    "Attention": "models.layers",
    "Residual": "models.layers",
    "Model": "models.model",
    "Combination": "models.model",
    "Frobenius": "metrics.metric",
    "TreeSymmetric": "metrics.metric",
    "Symmetric": "metrics.metric",
    "Gaussian": "metrics.metric",
    "GaussianClosure": "metrics.metric",
    "Categorical": "metrics.metric",
    "similarity": "compare.similarity",
    "slices": "compare.similarity",
    "inner": "compare.similarity",
    "log_inner": "compare.similarity",
    "plan": "compare.similarity",
    "Budget": "compare.planned",
    "pairwise": "gram.run",
    "plan_pairwise": "gram.run",
    "open_pairwise": "gram.run",
    "Pairwise": "gram.result",
    "check": "compare.monte_carlo",
    "attribution": "compare.attribution",
    "Attribution": "compare.attribution",
    "Plan": "engine.plan",
    "network": "tensor_networks.network",
    "networks": "tensor_networks.closed_networks",
    "load": "checkpoints.load",
    "save": "checkpoints.load",
    "from_state_dict": "checkpoints.load",
    "Series": "checkpoints.load",
    "Dialect": "checkpoints.dialects",
    "compare_forward": "checkpoints.load",
    "TnsimError": "errors",
    "ModelError": "errors",
    "CheckpointError": "errors",
    "UnsupportedLayer": "errors",
    "TooLarge": "errors",
    "ResultError": "errors",
    "MissingExtra": "errors",
    "StoreMismatch": "errors",
    "PrecisionWarning": "errors",
    "DuplicateWarning": "errors",
    "GramWarning": "errors",
}

_MODULES = {
    "baselines": "analysis.baselines",
    "figures": "analysis.figures",
    "plots": "analysis.plots",
    "reading": "analysis.reading",
    "report": "analysis.report",
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"tnsim.{_MODULES[name]}")
    if name in _HOME:
        return getattr(import_module(f"tnsim.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tnsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
